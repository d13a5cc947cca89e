"""Convolution by the fast Fourier transform: one product per frequency of a tile, instead of a sum over taps.

Blocks use overlap-save (Stockham, "High-Speed Convolution and Correlation", 1966).  A block's tile holds all elements
that its outputs read (`spectra` has a drawing).  The tile's spectrum times the conjugate of the kernel's is the
spectrum of a circular convolution.  It wraps around only in elements that are no outputs of the block.

::

    x_0, x_1, ...   --read-->   tile   --rfft-->   X   --times W-->   Y   --irfft-->   sums
    any strides,                real if x          (frequencies, outputs) =            every stride-th
    any dtype                   and weight are     (frequencies, channels) W           element only

W is computed once per call.  If it is too large for the workspace limit, shares of the groups or outputs are computed
one after the other, or the kernel is cut too (`fft_parts`).

With few channels, spectra are multiplied element by element, channels first.  With many, channels are last, and each
frequency has a matrix product: samples x channels by channels x outputs.

An element's rounding error is relative to the largest elements of its tile, not to its own sum.  An infinite or NaN
element spoils its whole tile.  Such a block is recomputed from its windows, unless that would take too long.
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
    MAX_PRODUCTS,
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

#: Multiplications per frequency, samples x channels x outputs, from which they are done as a matrix product.
MATRIX = 48
#: Slowdown of a block whose channels are transformed one by one: its sums are read and written for each channel.
ONE_BY_ONE = 1.12

# --- the choice -----------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a convolution is cut: the estimated time of all shares, the loop of the first one, and their number."""

    seconds: float
    first: Fft
    shares: int


@lru_cache(maxsize=64)
def best_cut(implementation: type[Fft], problem: ConvProblem, fixed: int, limit: int) -> Cut | int:
    """Return the cut with the least estimated time; if none fits the limit, the bytes that the smallest needs."""
    geometry, threads = problem.geometry, problem.host.threads
    best: Cut | None = None
    least = 0
    sizes = share_sizes(geometry)
    shares_of = [share_problem(problem, range(groups), range(outputs)) for groups, outputs in sizes]

    def loop_of(tiling: dict[str, Any], size: int, one_by_one: bool = True) -> Fft:
        share, own = shares_of[size]
        return implementation(share, cut=own, one_by_one=one_by_one, **tiling)

    def needed(line: Fft) -> int:
        return fixed + line.spectra_bytes + max(line.spectra_bytes, threads * line.workspace)

    for tiling in implementation.tilings(geometry):
        size, line = 0, loop_of(tiling, 0, one_by_one=False)
        if needed(line) > limit:
            smallest = needed(loop_of(tiling, len(sizes) - 1))
            if smallest > limit:
                least = min(least or smallest, smallest)
                if smallest > 2 * limit:
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
        if threads * loop.workspace > room:  # matrix products need all channels at once
            loop = line
        groups, outputs = sizes[size]
        shares = -(-geometry.groups // groups) * -(-geometry.group_outputs // outputs)
        if best is None or shares * loop.seconds < best.seconds:
            best = Cut(shares * loop.seconds, loop, shares)
    return best or least


# --- the method -----------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The weight (groups, outputs per group, K_g), and the conjugate of its spectrum."""

    matrix: np.ndarray
    #: (groups, outputs, channels, *frequencies), or for matrix products (*frequencies, groups, channels, outputs).
    spectra: np.ndarray


@dataclass(frozen=True)
class Fft(ConvLoop):
    """Compute tiles with lengths that are fast to transform, for some groups or outputs of a convolution."""

    name: ClassVar[str] = "FFT"
    description: ClassVar[str] = f"products of spectra; {ERRORS}"
    in_place: ClassVar[bool] = False

    problem: ConvProblem
    #: The channels of a share's arrays, as (name, start, stop); empty if the arrays are whole.
    cut: tuple[tuple[str, int, int], ...] = ()
    #: Whether a tile's channels are transformed one by one.  This needs less memory, so tiles may be larger.
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
            from cupyconv.numpy.fft_parts import FftParts  # imported only for large kernels

            cuts.append(best_cut(FftParts, problem, copied + 3 * Plan.ALIGNMENT, limit))
        best = min((cut for cut in cuts if isinstance(cut, Cut)), key=attrgetter("seconds"), default=None)
        if best is None:
            needed = min(cut for cut in cuts if isinstance(cut, int))
            raise problem.does_not_fit(SMALLEST, needed, limit)
        first: Any = best.first
        loop: Any = first if best.shares == 1 else FftShares(problem, first.block, first=first, count=best.shares)
        return [loop], {"weight": copied, "spectra": first.spectra_bytes, "blocks": first.threads * first.workspace}

    @classmethod
    def tilings(cls, geometry: ConvGeometry) -> Iterator[dict[str, Any]]:
        """Return the fields of candidate loops."""
        return ({"block": (1, *extents)} for extents in block_extents(geometry))

    @property
    def cached_bytes(self) -> int:
        return 0  # only the workspace limit bounds spectra

    # Memory and cost of a block.

    @cached_property
    def tile(self) -> Tile:
        """The tile of a whole block."""
        return Tile.of(self.geometry, self.block[1:], is_real(self.problem), transformed_axes(self.geometry))

    @cached_property
    def spectrum_dtype(self) -> np.dtype:
        return np.result_type(self.x_dtype, self.factor_dtype, np.complex64)

    @cached_property
    def by_matrix(self) -> bool:
        """Whether each frequency has a matrix product, and channels are last."""
        return self.geometry.group_channels * self.geometry.group_outputs * self.block[0] >= MATRIX

    @cached_property
    def channels_at_once(self) -> int:
        """Number of channels whose tiles and spectra exist at a time."""
        is_one = self.one_by_one and self.geometry.groups == 1 and not self.by_matrix
        return min(1, self.geometry.in_channels) if is_one else self.geometry.in_channels

    @cached_property
    def spectra_bytes(self) -> int:
        return prod(self.tile.of_kernel) * prod(self.problem.weight.shape[:2]) * self.spectrum_dtype.itemsize

    @cached_property
    def workspace(self) -> int:
        """Bytes of a block's tile and sums with their spectra, and of an activation's temporary."""
        geometry, tile = self.geometry, self.tile
        spectrum = prod(tile.frequencies) * self.spectrum_dtype.itemsize
        read = tile.elements * self.x_dtype.itemsize * (1 + temporaries(geometry, self.problem.prologue))
        sums = tile.elements * self.sums_dtype.itemsize * (1 + bool(self.problem.activation))
        added = geometry.groups * spectrum * (geometry.group_channels > 1)
        images = self.channels_at_once * (read + spectrum) + geometry.out_channels * (sums + spectrum)
        return max(self.block[0] * (images + added), self._again_bytes)

    @property
    def _again_bytes(self) -> int:
        """Bytes of the smallest columns of a recomputed block.  They have all channels, even if `one_by_one`."""
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
        """Estimated time of the products of spectra."""
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
        """Estimated time of the spectra of the weight."""
        tile, pairs = self.tile, self.geometry.group_channels * self.geometry.out_channels
        reordered = prod(tile.of_kernel) * self.by_matrix
        return pairs * (tile.seconds(self.problem, pairs) + cost.apart(reordered, self.problem))

    @property
    def calls(self) -> float:
        steps = -(-self.geometry.in_channels // (self.channels_at_once or 1))
        return self.turns * (1 + steps) / 2 * cost.FFT_CALLS + cost.FFT_CALLS  # forward transforms are half of them

    @property
    def flops(self) -> int:
        """Floating-point operations of the transforms and the products."""
        geometry, tile, blocks = self.geometry, self.tile, self.blocks * self.block[0]
        pairs, images = geometry.group_channels * geometry.out_channels, geometry.in_channels + geometry.out_channels
        products = blocks * pairs * prod(tile.frequencies) * product_flops("complex64", "complex64")
        return (blocks * images + pairs) * tile.flops * (1 if tile.is_real else 2) + products

    @cached_property
    def computes_again(self) -> bool:
        """Whether a block that is not finite is recomputed from its windows."""
        return prod(self.block) * self.geometry.out_channels * self.geometry.reduction <= MAX_PRODUCTS

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.tile.size)))
        again = "recomputed from their windows" if self.computes_again else "not recomputed and fill their whole tile"
        return f"{super().__str__()}, tiles of {shown}; non-finite results are {again}"

    # Computation.

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
            # Conjugate both the kernel and its spectrum, so that a complex kernel itself is not conjugated.
            spectrum = self.tile.spectrum(np.conjugate(dilated(kernels[part], geometry)), 2)
            np.conjugate(spectrum, out=by_kernel[part])

        # A part is the kernels of several outputs, or some kernels of one output.  There is a part for each thread, and
        # its temporaries fit the memory of a block.
        count, one = len(kernels) * kernels.shape[1] * channels, prod(sizes) * self.spectrum_dtype.itemsize
        most = min(-(-count // self.threads), self.workspace // (3 * one))
        rows, some = even_part(kernels.shape[1], most // (channels or 1)), even_part(channels, most)
        parts = list(product(range(len(kernels)), parts_of(kernels.shape[1], rows), parts_of(channels, some)))
        work = count * self.tile.seconds(self.problem)
        in_threads(cost.worth_waking(min(self.threads, len(parts)), work), transform, parts)
        return Weights(weight, spectra)

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        """Compute this share of the result."""
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
        """Return a block's sums, recomputed if they are not finite, unless that would take too long."""
        if self.computes_again and not np.isfinite(sums.sum()):
            return self._sums_of_columns(run, matrix, block)
        return sums.reshape(block.sums_shape)

    def _sums_by_element(self, run: ConvRun, weight: np.ndarray, block: Block) -> np.ndarray:
        """Return the sums (outputs, n, d, h, w), with spectra multiplied element by element."""
        geometry, size = self.geometry, (block.size[0], *self._tile_size(block))
        weight = weight[:, :, :, None]  # broadcast over samples
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
            del x  # free it before the next one
        return self.tile.image(y.reshape(geometry.out_channels, *y.shape[2:]), 2, self._wanted(block))

    def _sums_by_matrix(self, run: ConvRun, weight: np.ndarray, block: Block) -> np.ndarray:
        """Return the sums (outputs, n, d, h, w), with spectra multiplied as matrices, channels last."""
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
        """Compute the sums by their definition, for as many pixels and taps at a time as fit the block's memory."""
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


def _of_all_shares(name: str) -> Any:
    """Return a property of `FftShares`: that of the first share times the number of shares."""
    return property(lambda shares: shares.count * getattr(shares.first, name))


@dataclass(frozen=True)
class FftShares(Fft):
    """Shares of a convolution, one after the other: of some groups, or of some outputs of a group.

    All shares are cut like the first one and cost as much.  A share's loop is made when it runs: there may be thousands.
    """

    #: The loop of the first share, and the number of shares.
    first: Any = None
    count: int = 1

    blocks, turns, calls, work = map(_of_all_shares, ("blocks", "turns", "calls", "work"))
    flops, bytes_moved = map(_of_all_shares, ("flops", "bytes_moved"))

    def seconds_on(self, threads: int) -> float:
        return float(self.count * self.first.seconds_on(threads))

    @cached_property
    def threads(self) -> int:
        return int(self.first.threads)

    @property
    def workspace(self) -> int:
        return int(self.first.workspace)

    def __str__(self) -> str:
        groups, outputs = self.first.geometry.groups, self.first.geometry.group_outputs
        each = counted(groups, "group") if groups > 1 else counted(outputs, "output")
        return f"{self.first}; repeated for {self.count:,} shares of {each}"

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        whole, first = self.geometry, self.first.geometry
        groups = ranges_of(whole.groups, first.groups)
        outputs = ranges_of(whole.group_outputs, first.group_outputs)
        for own_groups, own_outputs in product(groups, outputs):
            share, cut = share_problem(self.problem, own_groups, own_outputs)
            replace(self.first, problem=share, cut=cut).run(arrays, scratch, run_of)


def multiply(x: np.ndarray, weight: np.ndarray, sums: np.ndarray, scratch: Scratch, add: bool = False) -> None:
    """Multiply spectra (groups, channels, ...) by those of a weight (groups, outputs, channels, ...).

    The products are summed over channels.  With `add`, they are added to `sums`.
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


IMPLEMENTATIONS = (Fft,)
