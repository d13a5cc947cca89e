"""Convolution by the fast Fourier transform: a product for each frequency of a tile, where a sum over taps takes as many.

Blocks by overlap-save (Stockham, "High-Speed Convolution and Correlation", 1966).  The spectrum of what a block of
outputs reads (`spectra` has a drawing), times the conjugate of the kernel's, is that of a convolution which wraps round:
only where no output of the block is.

::

    x_0, x_1, ...   --read-->   tile   --rfft-->   X   --times W-->   Y   --irfft-->   sums
    any strides,                real where x       (frequencies, outputs) =            every stride-th,
    any dtype                   and weight are     (frequencies, channels) W           no more

W is transformed once a call.  Where it is too large for the workspace limit, some groups or some outputs are computed
after the others, or the kernel is cut too (`fft_parts`).

Spectra of few channels are multiplied element by element, channels first.  Of many, channels are last, and each frequency
has a matrix product: samples x channels by channels x outputs.

An element's rounding error is relative to the largest elements of its tile, not to its own sum.  One that is infinite or
NaN spoils its whole tile: such a block is computed again from its windows, unless that would take too long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.block_loops import largest_block
from cupyconv.numpy.convolution import ConvLoop, ConvRun, RunOf, box_bytes, one_tap_bytes, temporaries, weight_copy
from cupyconv.numpy.gemm import product as multiplied
from cupyconv.numpy.gemm import with_parts
from cupyconv.numpy.spectra import (
    BLOCK,
    MOST_PRODUCTS,
    Tile,
    block_extents,
    dilated,
    every,
    has_large_spectra,
    with_lines,
)
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Block, parts_of, tile_size
from cupyconv.problem.arrays import product_flops
from cupyconv.problem.geometry import ConvGeometry, even_part, ranges_of
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.problems import ConvProblem, NotApplicable
from cupyconv.problem.transforms import ERRORS, SMALLEST, is_real, share_problem, share_sizes, transformed_axes

#: Products of a frequency, samples x channels x outputs, from which they are a matrix product.
MATRIX = 48
#: How much longer a block takes whose channels are transformed one by one: its sums are read and written for each.
ONE_BY_ONE = 1.12

# --- the choice -----------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a convolution is cut, into how many shares, and what all take."""

    seconds: float
    first: Fft
    shares: int


@lru_cache(maxsize=64)
def best_cut(way: type[Fft], problem: ConvProblem, fixed: int, limit: int) -> Cut | int:
    """The cut that is estimated to take the least; where there is no room for any, the bytes that the smallest needs."""
    geometry, threads = problem.geometry, problem.host.threads
    best: Cut | None = None
    least = 0
    sizes = share_sizes(geometry)
    shares_of = [share_problem(problem, range(groups), range(outputs)) for groups, outputs in sizes]

    def loop_of(tiling: dict[str, Any], size: int, one_by_one: bool = True) -> Fft:
        share, own = shares_of[size]
        return way(share, cut=own, one_by_one=one_by_one, **tiling)

    def needed(line: Fft) -> int:
        return fixed + line.spectra_bytes + max(line.spectra_bytes, threads * line.workspace)

    for tiling in way.tilings(geometry):
        smallest = loop_of(tiling, len(sizes) - 1)
        if needed(smallest) > limit:
            least = min(least or needed(smallest), needed(smallest))
            if needed(smallest) > 2 * limit:
                break  # the tiles that follow are larger
            continue
        # The largest share that fits; smaller ones need less.
        size = bisect_left(range(len(sizes) - 1), True, key=lambda size: needed(loop_of(tiling, size)) <= limit)
        line = loop_of(tiling, size, one_by_one=False)
        if needed(line) > limit:
            line = loop_of(tiling, size)
        room = limit - fixed - line.spectra_bytes
        lines = min(min(room // threads, BLOCK) // line.workspace, -(-line.blocks // threads))
        loop = replace(line, block=with_lines(geometry, line.block, lines))
        if threads * loop.workspace > room:  # its products are of matrices, which take all channels at once
            loop = line
        groups, outputs = sizes[size]
        shares = -(-geometry.groups // groups) * -(-geometry.group_outputs // outputs)
        if best is None or shares * loop.seconds < best.seconds:
            best = Cut(shares * loop.seconds, loop, shares)
    return best or least


# --- the method -----------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The weight: (groups, outputs per group, K_g) as it is, and the conjugate of its spectrum."""

    matrix: np.ndarray
    #: (groups, outputs, channels, *frequencies); of matrix products (*frequencies, groups, channels, outputs).
    spectra: np.ndarray


@dataclass(frozen=True)
class Fft(ConvLoop):
    """Tiles as long as transforms are quick at, of some groups or outputs of a convolution."""

    name: ClassVar[str] = "FFT"
    words: ClassVar[str] = f"products of spectra; {ERRORS}"
    in_place: ClassVar[bool] = False

    problem: ConvProblem
    #: Where the arrays of a share begin and end along their channels, by name; none where they are whole.
    cut: tuple[tuple[str, int, int], ...] = ()
    #: Whether a tile's channels are transformed one by one, which takes less memory: then tiles may be larger.
    one_by_one: bool = False

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return True

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        raise AssertionError("blocks are chosen by what they take")

    @classmethod
    def loops(cls, problem: ConvProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if refusal := problem.fft_refusal:
            raise NotApplicable(refusal)
        geometry, copied = problem.geometry, weight_copy(problem)
        if 0 in (geometry.batch, geometry.out_channels, *geometry.out_size):
            return [], {}
        limit = problem.limit_with(copied)
        cuts = [best_cut(Fft, problem, copied + 3 * Plan.ALIGNMENT, limit)]
        if isinstance(cuts[0], int) or has_large_spectra(problem):
            from cupyconv.numpy.fft_parts import FftParts  # imported where kernels are large

            cuts.append(best_cut(FftParts, problem, copied + 3 * Plan.ALIGNMENT, limit))
        best = min((cut for cut in cuts if isinstance(cut, Cut)), key=attrgetter("seconds"), default=None)
        if best is None:
            needed = min(cut for cut in cuts if isinstance(cut, int))
            raise problem.no_room(SMALLEST, needed, limit)
        first: Any = best.first
        loop: Any = first if best.shares == 1 else FftShares(problem, first.block, first=first, count=best.shares)
        return [loop], {"weight": copied, "spectra": first.spectra_bytes, "blocks": first.threads * first.workspace}

    @classmethod
    def tilings(cls, geometry: ConvGeometry) -> Iterator[dict[str, Any]]:
        """Fields of loops that are worth a look."""
        return ({"block": (1, *extents)} for extents in block_extents(geometry))

    @property
    def kept_bytes(self) -> int:
        return 0  # spectra have no bound but the workspace's

    # What a block takes.

    @cached_property
    def tile(self) -> Tile:
        """That of a whole block."""
        return Tile.of(self.geometry, self.block[1:], is_real(self.problem), transformed_axes(self.geometry))

    @cached_property
    def spectrum_dtype(self) -> np.dtype:
        return np.result_type(self.x_dtype, self.factor_dtype, np.complex64)

    @cached_property
    def by_matrix(self) -> bool:
        """Whether there is a matrix product for each frequency, and channels are last."""
        return self.geometry.group_channels * self.geometry.group_outputs * self.block[0] >= MATRIX

    @cached_property
    def channels_at_once(self) -> int:
        """Channels whose tiles and spectra are there at a time."""
        is_one = self.one_by_one and self.geometry.groups == 1 and not self.by_matrix
        return min(1, self.geometry.in_channels) if is_one else self.geometry.in_channels

    @cached_property
    def spectra_bytes(self) -> int:
        return prod(self.tile.of_kernel) * prod(self.problem.weight.shape[:2]) * self.spectrum_dtype.itemsize

    @cached_property
    def workspace(self) -> int:
        """Bytes of a block's tile, of its sums and of an activation's temporary, and of the spectra of these."""
        geometry, tile = self.geometry, self.tile
        spectrum = prod(tile.frequencies) * self.spectrum_dtype.itemsize
        read = tile.elements * self.x_dtype.itemsize * (1 + temporaries(geometry, self.problem.prologue))
        sums = tile.elements * self.sums_dtype.itemsize * (1 + bool(self.problem.activation))
        added = geometry.groups * spectrum * (geometry.group_channels > 1)
        images = self.channels_at_once * (read + spectrum) + geometry.out_channels * (sums + spectrum)
        return max(self.block[0] * (images + added), self._again_bytes)

    @property
    def _again_bytes(self) -> int:
        """Bytes of the smallest columns of a block that is computed again: of all channels, which need not be there at once else."""
        return one_tap_bytes(self.problem, (1, 1, 1, 1), self.x_dtype.itemsize) * self.computes_again

    @property
    def work(self) -> float:
        geometry, tile, problem = self.geometry, self.tile, self.problem
        inputs, outputs = geometry.in_channels, geometry.out_channels
        transforms = inputs * tile.seconds(problem, self.channels_at_once) + outputs * tile.seconds(problem, outputs)
        blocks = self.blocks * self.block[0] * transforms + self.products_work + self.store_work
        return blocks * (ONE_BY_ONE if self.one_by_one else 1) + self.weight_work

    @property
    def products_work(self) -> float:
        """What the products of spectra take."""
        geometry, tile, samples = self.geometry, self.tile, self.blocks * self.block[0]
        pairs, frequencies = geometry.group_channels * geometry.out_channels, prod(tile.frequencies)
        if not self.by_matrix:
            return cost.complex_products(samples * frequencies * pairs, self.problem)
        images = samples * (geometry.in_channels + geometry.out_channels) * tile.elements
        read = self.blocks * prod(tile.of_kernel) * pairs
        matrices = self.blocks * frequencies * geometry.groups
        return cost.complex_matrices(matrices, read, samples * frequencies * pairs, images, self.problem)

    @property
    def weight_work(self) -> float:
        """What the spectra of the weight take."""
        tile, pairs = self.tile, self.geometry.group_channels * self.geometry.out_channels
        reordered = prod(tile.of_kernel) * self.by_matrix
        return pairs * (tile.seconds(self.problem, pairs) + cost.apart(reordered, self.problem))

    @property
    def calls(self) -> float:
        steps = -(-self.geometry.in_channels // (self.channels_at_once or 1))
        return self.turns * (1 + steps) / 2 * cost.FFT_CALLS + cost.FFT_CALLS  # half of them on the way there

    @property
    def flops(self) -> int:
        """Operations of transforms and of products."""
        geometry, tile, blocks = self.geometry, self.tile, self.blocks * self.block[0]
        pairs, images = geometry.group_channels * geometry.out_channels, geometry.in_channels + geometry.out_channels
        products = blocks * pairs * prod(tile.frequencies) * product_flops("complex64", "complex64")
        return (blocks * images + pairs) * tile.flops * (1 if tile.is_real else 2) + products

    @cached_property
    def computes_again(self) -> bool:
        """Whether a block that is not finite is computed from its windows."""
        return prod(self.block) * self.geometry.out_channels * self.geometry.reduction <= MOST_PRODUCTS

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.tile.size)))
        again = "computed again from its windows" if self.computes_again else "left so, all of it"
        return f"{super().__str__()}, tiles of {shown}; one that is not finite is {again}"

    # What it does.

    def arranged(self, weight: np.ndarray) -> Weights:  # type: ignore[override]
        geometry, sizes = self.geometry, self.tile.of_kernel
        groups, outputs, channels = geometry.groups, geometry.group_outputs, geometry.group_channels
        if self.by_matrix:
            spectra = np.empty((*sizes, groups, channels, outputs), self.spectrum_dtype)
            by_kernel = spectra.transpose(3, 5, 4, 0, 1, 2)
        else:
            spectra = np.empty((groups, outputs, channels, *sizes), self.spectrum_dtype)
            by_kernel = spectra.reshape(1, groups * outputs, channels, *sizes)
        kernels = weight.reshape(*by_kernel.shape[:3], *geometry.kernel)

        def transform(part: tuple[int, slice, slice]) -> None:
            # The conjugate's spectrum, conjugated.
            spectrum = self.tile.spectrum(np.conjugate(dilated(kernels[part], geometry)), 2)
            np.conjugate(spectrum, out=by_kernel[part])

        # Kernels of several outputs at a time, or some of one's: a part for each thread, and their temporaries fit a block's memory.
        count, one = len(kernels) * kernels.shape[1] * channels, prod(sizes) * self.spectrum_dtype.itemsize
        most = min(-(-count // self.threads), self.workspace // (3 * one))
        rows, some = even_part(kernels.shape[1], most // (channels or 1)), even_part(channels, most)
        parts = list(product(range(len(kernels)), parts_of(kernels.shape[1], rows), parts_of(channels, some)))
        work = count * self.tile.seconds(self.problem)
        in_threads(cost.worth_waking(min(self.threads, len(parts)), work), transform, parts)
        return Weights(weight, spectra)

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        """Compute the share of the result."""
        own = dict(arrays)
        for name, *ends in self.cut:
            if name in own:
                axis = 0 if name == "weight" or own[name].ndim == 1 else 1
                own[name] = own[name][(slice(None),) * axis + (slice(*ends),)]
        super().run(own, scratch, run_of)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        weights: Any = run.weight
        if not self.geometry.in_channels:
            return np.zeros(block.sums_shape, self.sums_dtype)
        own = self._sums_by_matrix if self.by_matrix else self._sums_by_element
        sums = own(run, weights.spectra, block)
        return self._finite(run, weights.matrix, block, sums)

    def _finite(self, run: ConvRun, matrix: np.ndarray, block: Block, sums: np.ndarray) -> np.ndarray:
        """A block's sums; computed again where they are not finite, unless that would take too long."""
        if self.computes_again and not np.isfinite(sums.sum()):
            return self._sums_of_columns(run, matrix, block)
        return sums.reshape(block.sums_shape)

    def _sums_by_element(self, run: ConvRun, weight: np.ndarray, block: Block) -> np.ndarray:
        """The sums (outputs, n, d, h, w) of spectra that are multiplied by element."""
        geometry, size = self.geometry, (block.size[0], *self._tile_size(block))
        weight = weight[:, :, :, None]  # for all samples
        for some in parts_of(geometry.in_channels, self.channels_at_once):
            image = run.images.scratch.array("tile", (some.stop - some.start, *size))
            run.images.some(some).read_tile(block, image)
            x = self.tile.spectrum(image, 2)
            x = x.reshape(geometry.groups, -1, *x.shape[1:])
            if geometry.group_channels == geometry.group_outputs == 1:
                y = np.multiply(x, weight[:, 0], out=x)
            else:
                y = run.products.array("spectra", (geometry.groups, geometry.group_outputs, *x.shape[2:]), x.dtype)
                multiply(x, weight[:, :, some], y, run.products, add=some.start > 0)
            del x  # before the next is made
        return self.tile.image(y.reshape(geometry.out_channels, *y.shape[2:]), 2, self._wanted(block))

    def _sums_by_matrix(self, run: ConvRun, weight: np.ndarray, block: Block) -> np.ndarray:
        """The same of spectra that are multiplied as matrices, channels last."""
        groups, samples = self.geometry.groups, block.size[0]
        image = run.images.scratch.array("tile", (*self._tile_size(block), samples, self.geometry.in_channels))
        run.images.read_tile(block, image.transpose(4, 3, 0, 1, 2))
        x = self.tile.spectrum(image, 0)
        y = run.products.array("spectra", (*x.shape[:4], self.geometry.out_channels), x.dtype)
        matrices, sums = (one.reshape(*x.shape[:4], groups, -1).swapaxes(3, 4) for one in (x, y))
        np.matmul(matrices, weight, out=sums)
        return self.tile.image(y, 0, self._wanted(block)).transpose(4, 3, 0, 1, 2)

    def _tile_size(self, block: Block) -> Sequence[int]:
        return self.tile.shape(tile_size(self.geometry, block.size[1:]))

    def _wanted(self, block: Block) -> list[slice]:
        return every(block.size[1:], self.geometry.stride)

    def _sums_of_columns(self, run: ConvRun, matrix: np.ndarray, block: Block) -> np.ndarray:
        """The sums as they are defined, of as many pixels and taps at a time as the block's memory has room for."""
        problem, geometry, item = self.problem, self.geometry, self.x_dtype.itemsize
        most = geometry.taps
        while most > 1 and box_bytes(problem, (1, 1, 1, 1), item, most) > self.workspace:
            most = -(-most // 2)
        size = largest_block(
            geometry, lambda part: box_bytes(problem, part, item, most), self.workspace, block.area, 1, block.size[0]
        )
        sums = np.zeros(block.sums_shape, self.sums_dtype)
        weight = with_parts(self, matrix)
        by_tap = weight.reshape(*weight.shape[:2], geometry.group_channels, geometry.taps)
        for at, part in block.parts(size):
            for taps, columns in run.images.some_taps(part, most):
                factor = np.ascontiguousarray(by_tap[..., taps]).reshape(*weight.shape[:2], -1)
                sums[(slice(None), slice(None), *at)] += multiplied(run, factor, columns, part)
        return sums


@dataclass(frozen=True)
class FftShares(Fft):
    """Shares of a convolution one after the other, of some groups or of some outputs of one.

    All shares are cut like the first one and cost as much.  The loop of a share is made when it runs: there may be thousands.
    """

    #: The loop of the first share, and the number of shares.
    first: Any = None
    count: int = 1

    @cached_property
    def threads(self) -> int:
        return int(self.first.threads)

    @property
    def workspace(self) -> int:
        return int(self.first.workspace)

    @cached_property
    def blocks(self) -> int:
        return int(self.count * self.first.blocks)

    def seconds_on(self, threads: int) -> float:
        return float(self.count * self.first.seconds_on(threads))

    @property
    def work(self) -> float:
        return float(self.count * self.first.work)

    @property
    def turns(self) -> int:
        return int(self.count * self.first.turns)

    @property
    def calls(self) -> float:
        return float(self.count * self.first.calls)

    @property
    def flops(self) -> int:
        return int(self.count * self.first.flops)

    @property
    def bytes_moved(self) -> int:
        return int(self.count * self.first.bytes_moved)

    def __str__(self) -> str:
        groups, outputs = self.first.geometry.groups, self.first.geometry.group_outputs
        each = counted(groups, "group") if groups > 1 else counted(outputs, "output")
        return f"{self.first}; for each of {self.count:,} shares of {each}"

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        whole, first = self.geometry, self.first.geometry
        groups = ranges_of(whole.groups, first.groups)
        outputs = ranges_of(whole.group_outputs, first.group_outputs)
        for own_groups, own_outputs in product(groups, outputs):
            share, cut = share_problem(self.problem, own_groups, own_outputs)
            replace(self.first, problem=share, cut=cut).run(arrays, scratch, run_of)


def multiply(x: np.ndarray, weight: np.ndarray, sums: np.ndarray, scratch: Scratch, add: bool = False) -> None:
    """Spectra (groups, channels, ...) times those of a weight (groups, outputs, channels, ...), added over channels.

    With `add` to what the sums are.
    """
    if x.shape[1] == 0:
        sums[...] = 0
        return
    for output in range(sums.shape[1]):
        if not add:
            np.multiply(x[:, 0], weight[:, output, 0], out=sums[:, output])
        for channel in range(not add, x.shape[1]):
            more = scratch.array("product", x[:, 0].shape, x.dtype)
            sums[:, output] += np.multiply(x[:, channel], weight[:, output, channel], out=more)


WAYS = (Fft,)
