"""Products of spectra: the plan of method "fft" on CUDA.

Overlap-save (Stockham, "High-Speed Convolution and Correlation", 1966).  A unit is one tile of one sample, of all channels.
Along an axis of one tap tiles are one pixel long, so that the transforms are of the others.

::

    weight, flipped  --tiles.cu-->  tiles of  --cuFFT-->  W                                    once a call
    x_0, x_1, ...    --tiles.cu-->  units     --cuFFT-->  X  --X W-->  Y  --cuFFT-->  sums     a chunk of units at a time
    sums             --finish_tiles.cu-->  bias, residual, activation, every stride-th of what did not wrap round

Two orders of spectra.  Frequencies side by side: spectra.cu multiplies them one by one, which is for few channels.
Interleaved, channels side by side: each frequency has a matrix product, units x channels by channels x outputs, and cuBLAS
does 65,535 of them in one call.  cuFFT reads and writes both, so nothing is transposed.

The weight lies last to first in its tile: so products of spectra are a convolution with it, and no spectrum is conjugated.
It is divided by the elements of a tile too, which neither transform does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.draft import Draft, in_rounds, in_sequence
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    WARP,
    bytes_of,
    epilogue_params,
    image,
    is_along_channels,
    prologue_params,
    prologue_words,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.matrices import MAX_BATCH, MAX_DIMENSION, compute_type
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator
from cupyconv.problem.geometry import Triple, Windows, even_part, ranges_of
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, GemmCall, KernelLaunch, Matrix, Plan, Step, Transform
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, NotApplicable, Prologue
from cupyconv.problem.transforms import ERRORS, no_room, share_problem, share_sizes, transformed_axes

#: Threads of a block of these kernels, and channels of a thread where a warp's share them.
BLOCK, CHANNELS = 256, 8
#: Neighbouring threads on neighbouring channels, where these lie side by side in tiles: all of a warp where they do so in
#: the image too, else as many as write a whole sector.
SIDE_BY_SIDE = 8
#: Shortest tile, and how much longer each that is looked at is than the one before, beginning with the kernel.
SHORTEST, LONGER = 16, 1.8
#: Elements of one step's tiles, which the kernels and cuFFT count in 32 bits.
MOST_ELEMENTS = 2**31 - 1
#: Matrix products of the frequencies: more groups are multiplied one by one.
MOST_CALLS = 64
#: Orders of spectra: whether they are interleaved.
ORDERS = (False, True)
#: Multiply-adds of a convolution whose sums are computed again where they are not finite: as many take about a second.
MOST_PRODUCTS = 1 << 40


def draft_fft(problem: ConvProblem) -> Draft:
    """The tiles and the order of spectra that take the least by the model; NotApplicable where there is no room for any."""
    if refusal := problem.fft_refusal:
        raise NotApplicable(refusal)
    if not problem.gpu.has_transforms:
        raise NotApplicable("CuPy finds no cuFFT: install cupy-cuda13x[ctk], or nvidia-cufft")
    if problem.method == "auto":
        _refuse_at_once(problem)
    best = min(_tilings(problem), key=lambda found: found.seconds, default=None)
    if best is None:
        raise no_room(problem.limit)
    return best.tiling.draft() if best.shares == 1 else _in_shares(problem, best.tiling)


class _Found(NamedTuple):
    """A tiling of a whole problem, or of the first of several shares, and what all of them take by the model."""

    tiling: _Tiling
    shares: int
    seconds: float


def _tilings(problem: ConvProblem) -> Iterator[_Found]:
    """Those that there is room for, in as few shares as that takes."""
    geometry = problem.geometry
    for block, order in product(block_extents(geometry), ORDERS):
        for groups, outputs in share_sizes(geometry):
            share, _ = share_problem(problem, range(groups), range(outputs))
            tiling = _Tiling(share, block, order)
            if order and not tiling.has_matrices:
                break
            if tiling.most_units:
                shares = -(-geometry.groups // groups) * -(-geometry.group_outputs // outputs)
                yield _Found(tiling, shares, shares * tiling.seconds)
                break


def _in_shares(problem: ConvProblem, first: _Tiling) -> Draft:
    """Shares of a problem one after the other, tiled as the first of them is."""
    geometry, groups, outputs = problem.geometry, first.problem.geometry.groups, first.problem.geometry.group_outputs
    drafts = [
        replace(first, problem=share_problem(problem, own_groups, own_outputs)[0]).draft()
        for own_groups in ranges_of(geometry.groups, groups)
        for own_outputs in ranges_of(geometry.group_outputs, outputs)
    ]
    reason = f"{len(drafts)} shares of {groups * outputs} outputs; {drafts[0].reason}"
    return in_sequence("fft", drafts, reason)


def _refuse_at_once(problem: ConvProblem) -> None:
    """Most problems are told by a few operations: another method takes less than transforms take at the least."""
    geometry, gpu, dtype = problem.geometry, problem.gpu, problem.out.dtype
    filled = min(1.0, geometry.group_outputs / cost.GEMM_TILE)
    products = gpu.gemm_rate(dtype, compute_type(dtype, problem.allow_tf32)) * filled
    others = problem.flops / max(products, cost.core_rate(dtype, gpu) * cost.GENERAL)
    images = (bytes_of(problem.xs) + problem.out.nbytes) / gpu.bandwidth
    # Into tiles, through the products, out of tiles, there and back along each axis.
    least = images * (4 + 2 * len(transformed_axes(geometry)) / cost.TRANSFORM) + 7 * gpu.launch_seconds
    if others < cost.TRANSFORMS_DOUBT * least:
        raise NotApplicable(f"transforms take {cost.by_model(least)} at the least")


def block_extents(windows: Windows) -> Iterator[Triple]:
    """Pixels of the result that come from one tile, the fewest first: all axes as much longer than the kernel."""
    along, longer, before = transformed_axes(windows), 1.0, (0, 0, 0)
    whole = tuple(extent if axis in along else 1 for axis, extent in enumerate(windows.out_size))
    while before != whole:
        longer *= LONGER
        extents = [1, 1, 1]
        lengths = {axis: max(SHORTEST, int(windows.span[axis] * longer)) for axis in along}
        if prod(lengths.values()) > MOST_ELEMENTS:
            return
        for axis, length in lengths.items():
            most = (fast_length(length) - windows.span[axis]) // windows.stride[axis] + 1
            extents[axis] = even_part(windows.out_size[axis], most)
        if tuple(extents) != before:
            before = (extents[0], extents[1], extents[2])
            yield before


def fast_length(least: int, multiple: int = 1) -> int:
    """The next length that cuFFT has quick kernels for: a product of 2, 3, 5 and 7; a multiple of 1 or 2."""
    lengths = _fast_lengths()
    return multiple * lengths[bisect_left(lengths, -(-least // multiple))]


@lru_cache(maxsize=1)
def _fast_lengths() -> list[int]:
    """All up to `MOST_ELEMENTS`, and one more."""
    lengths = [1]
    for factor in (2, 3, 5, 7):
        for length in lengths:  # which grows meanwhile
            if length * factor <= MOST_ELEMENTS + 1:
                lengths.append(length * factor)
    return sorted(lengths)


@dataclass(frozen=True)
class _Tiling:
    """One way to cut a convolution, and one order of its spectra."""

    problem: ConvProblem
    #: Pixels of the result that come from one tile.
    block: Triple
    #: Whether channels lie side by side, and each frequency has a matrix product.
    interleaved: bool

    @property
    def seconds(self) -> float:
        """What it takes by the model."""
        gpu, part = self.problem.gpu, self.chunk
        weight, chunk = (Draft("fft", tuple(steps)).cost(gpu) for steps in (self._weight_steps(), self._steps(0, part)))
        return weight.seconds + chunk.seconds * self.units / part

    def draft(self) -> Draft:
        geometry, part = self.problem.geometry, self.chunk
        whole, rest = divmod(self.units, part)
        steps = [
            *self._weight_steps(),
            *in_rounds(whole, lambda chunk: self._steps(chunk * part, part)),
            *(self._steps(whole * part, rest) if rest else ()),
        ]
        chunks = f", {whole + bool(rest):,} chunks of {part:,}" if whole + bool(rest) > 1 else ""
        shown = " x ".join(str(self.tile[axis]) for axis in transformed_axes(geometry))
        how = "a matrix product for each frequency" if self.interleaved else "products of spectra"
        again = "is computed again from its window" if self.computes_again else "is left so, as is all of its tile"
        notes = f"what is not finite {again}", "cuFFT's own memory comes on top, and stays with the stream"
        reason = f"{how}; {self.units:,} tile(s) of {shown}{chunks}; {ERRORS}"
        return Draft("fft", tuple(steps), self._workspace(part), reason, notes, cost.TRANSFORMS_DOUBT)

    # Sizes.

    @cached_property
    def tile(self) -> Triple:
        """The size of a tile."""
        geometry = self.problem.geometry
        along = transformed_axes(geometry)
        read = [(n - 1) * stride + span for n, stride, span in zip(self.block, geometry.stride, geometry.span)]
        lengths = [
            fast_length(extent, 2 if axis == along[-1] else 1) if axis in along else extent
            for axis, extent in enumerate(read)
        ]
        return lengths[0], lengths[1], lengths[2]

    @cached_property
    def tiles(self) -> Triple:
        """How many there are along each axis of a sample."""
        depth, height, width = (-(-n // part) for n, part in zip(self.problem.geometry.out_size, self.block))
        return depth, height, width

    @property
    def units(self) -> int:
        return self.problem.geometry.batch * prod(self.tiles)

    @cached_property
    def dtype(self) -> str:
        """Of tiles and of sums."""
        return accumulator(self.problem.out.dtype)

    @cached_property
    def spectrum_dtype(self) -> str:
        return {"float32": "complex64", "float64": "complex128"}.get(self.dtype, self.dtype)

    @cached_property
    def elements(self) -> int:
        return prod(self.tile)

    @cached_property
    def frequencies(self) -> int:
        return prod(self._transform("", "", 1).frequencies)

    @cached_property
    def most_units(self) -> int:
        """Units of the largest chunk that there is room for; 0 where there is none."""
        geometry = self.problem.geometry
        kernels = geometry.out_channels * geometry.group_channels
        channels, outputs = geometry.in_channels, geometry.out_channels
        if kernels * self.elements > MOST_ELEMENTS:
            return 0
        tile, spectrum = self.elements * ITEMSIZE[self.dtype], self.frequencies * ITEMSIZE[self.spectrum_dtype]
        room = self.problem.limit - 4 * Plan.ALIGNMENT - kernels * spectrum
        images, spectra = max(channels, outputs) * tile, (channels + outputs) * spectrum
        fitting = min(room // (images + spectra), MOST_ELEMENTS // (max(channels, outputs) * self.elements))
        if fitting * images < kernels * tile:  # the weight's tiles are the largest
            fitting = min((room - kernels * tile) // spectra, MOST_ELEMENTS // (max(channels, outputs) * self.elements))
        return max(0, min(fitting, self.units, MAX_DIMENSION))

    @property
    def chunk(self) -> int:
        """Units of a chunk."""
        return even_part(self.units, self.most_units)

    @cached_property
    def computes_again(self) -> bool:
        """Whether what is not finite is computed from its window."""
        return self.problem.geometry.products <= MOST_PRODUCTS and len(self.problem.xs) <= MAX_SOURCES

    @cached_property
    def has_matrices(self) -> bool:
        """Whether products are of matrices, and cuBLAS can be told of those of all frequencies in a few calls."""
        geometry = self.problem.geometry
        largest = max(geometry.in_channels, geometry.out_channels)
        if geometry.group_channels * geometry.group_outputs == 1:
            return False
        return geometry.groups * -(-self.frequencies // MAX_BATCH) <= MOST_CALLS and largest <= MAX_DIMENSION

    def _workspace(self, units: int) -> tuple[Buffer, ...]:
        geometry = self.problem.geometry
        kernels = geometry.out_channels * geometry.group_channels
        tiles = max(units * max(geometry.in_channels, geometry.out_channels), kernels) * self.elements
        spectrum = self.frequencies * ITEMSIZE[self.spectrum_dtype]
        return (
            Buffer("spectra of the weight", kernels * spectrum),
            Buffer("tiles", tiles * ITEMSIZE[self.dtype]),
            Buffer("spectra", units * geometry.in_channels * spectrum),
            Buffer("products", units * geometry.out_channels * spectrum),
        )

    # Steps.

    def _weight_steps(self) -> list[Step]:
        geometry, weight = self.problem.geometry, self.problem.weight
        last = sum((taps - 1) * step for taps, step in zip(geometry.kernel, weight.strides[2:]))
        flipped = weight.view(weight.shape, (*weight.strides[:2], *(-step for step in weight.strides[2:])), last)
        kernel = geometry.kernel, (1, 1, 1), self.tile, (1, 1, 1), (0, 0, 0), geometry.dilation, 0
        kernels, outputs = geometry.out_channels * geometry.group_channels, geometry.out_channels
        launches = self._cut((flipped,), kernel, 0, outputs, scale=1 / self.elements, purpose="tiles of the weight")
        return [*launches, self._transform("tiles", "spectra of the weight", kernels, purpose="spectra of the weight")]

    def _steps(self, first: int, units: int) -> list[Step]:
        geometry = self.problem.geometry
        step = tuple(pixels * stride for pixels, stride in zip(self.block, geometry.stride))
        mode = PADDING_MODES.index(geometry.padding_mode)
        windows = geometry.size, self.tiles, self.tile, step, geometry.before, (1, 1, 1), mode
        return [
            *self._cut(self.problem.xs, windows, first, units, prologue=self.problem.prologue),
            self._transform("tiles", "spectra", units * geometry.in_channels, purpose="spectra of the tiles"),
            *(self._matrix_products(units) if self.interleaved else [self._products(units)]),
            self._transform("products", "tiles", units * geometry.out_channels, inverse=True, purpose="sums"),
            self._finish(first, units),
        ]

    def _transform(
        self, source: str, target: str, batch: int, *, inverse: bool = False, purpose: str = ""
    ) -> Transform:
        size = tuple(self.tile[axis] for axis in transformed_axes(self.problem.geometry))
        places = Address(source), Address(target)
        return Transform(size, batch, *places, self.dtype, inverse, self.interleaved, purpose)

    def _strides(self, units: int, channels: int, elements: int) -> tuple[int, int, int]:
        """From one unit, one channel and one element, or frequency, to the next."""
        return (channels, 1, units * channels) if self.interleaved else (channels * elements, elements, 1)

    def _lanes(self, array: Operand) -> int:
        """Neighbouring threads that take neighbouring channels."""
        most = WARP if is_along_channels(array) else SIDE_BY_SIDE
        return min(most, 1 << (array.shape[1] - 1).bit_length()) if self.interleaved else 1

    def _cut(
        self,
        xs: tuple[Operand, ...],
        windows: tuple[Any, ...],
        first: int,
        units: int,
        *,
        scale: float = 1.0,
        prologue: Prologue = NO_PROLOGUE,
        purpose: str = "tiles",
    ) -> list[KernelLaunch]:
        """Tiles of images in workspace: one launch for every `MAX_SOURCES` of them."""
        channels = sum(x.shape[1] for x in xs)
        strides, lanes = self._strides(units, channels, self.elements), self._lanes(xs[0])
        launches = []
        for begin in range(0, len(xs), MAX_SOURCES):
            part = xs[begin : begin + MAX_SOURCES]
            before, here = sum(x.shape[1] for x in xs[:begin]), sum(x.shape[1] for x in part)
            at = Address("tiles", before * strides[1] * ITEMSIZE[self.dtype])
            launch = KernelLaunch(
                variant("tiles", prologue, DTYPE=xs[0].dtype, TILE_DTYPE=self.dtype),
                *_grid(units * self.elements, here, lanes),
                (
                    ("sources", sources_params(part)),
                    ("windows", windows),
                    ("prologue", prologue_params(prologue, before)),
                    ("tiles", at),
                    *zip(("stride_u", "stride_c", "stride_t"), strides),
                    ("first_unit", first),
                    ("scale", scale),
                    ("units", units),
                    ("channels", here),
                    ("channel_lanes", lanes),
                ),
                purpose=purpose + prologue_words(prologue),
                bytes_moved=units * here * self.elements * (xs[0].itemsize + ITEMSIZE[self.dtype]),
            )
            launches.append(self._placed(launch, units * self.elements, here))
        return launches

    def _products(self, units: int) -> KernelLaunch:
        geometry = self.problem.geometry
        rows = units * geometry.out_channels
        operands = units * geometry.in_channels + geometry.out_channels * geometry.group_channels + rows
        launch = KernelLaunch(
            variant("spectra", DTYPE=self.spectrum_dtype),
            (min(-(-self.frequencies // BLOCK), GRID_X), min(rows, GRID_Y), 1),
            BLOCK,
            (
                ("x", Address("spectra")),
                ("weight", Address("spectra of the weight")),
                ("y", Address("products")),
                ("frequencies", self.frequencies),
                ("units", units),
                ("groups", geometry.groups),
                ("group_channels", geometry.group_channels),
                ("group_outputs", geometry.group_outputs),
            ),
            purpose="products of spectra",
            bytes_moved=operands * self.frequencies * ITEMSIZE[self.spectrum_dtype],
            flops=8 * rows * geometry.group_channels * self.frequencies,
        )
        gpu = self.problem.gpu
        loaded = 2 * rows * geometry.group_channels * self.frequencies * ITEMSIZE[self.spectrum_dtype]
        loads = loaded / (gpu.bandwidth * cost.L2_SPEED)
        return replace(launch, arithmetic_seconds=max(launch.flops / cost.core_rate(self.dtype, gpu), loads))

    def _matrix_products(self, units: int) -> list[Step]:
        """Y = X Wᵀ of each frequency, group by group."""
        geometry, item = self.problem.geometry, ITEMSIZE[self.spectrum_dtype]
        channels, outputs = geometry.group_channels, geometry.group_outputs
        sizes = units * geometry.in_channels, geometry.out_channels * channels, units * geometry.out_channels
        compute = compute_type(self.spectrum_dtype, self.problem.allow_tf32)
        calls: list[Step] = []
        for group, first in product(range(geometry.groups), range(0, self.frequencies, MAX_BATCH)):
            x, weight, y = (
                Address(name, (first * size + group * step) * item)
                for name, size, step in zip(
                    ("spectra", "spectra of the weight", "products"), sizes, (channels, outputs * channels, outputs)
                )
            )
            a = Matrix(x, geometry.in_channels, sizes[0])
            b = Matrix(weight, channels, sizes[1], transposed=True)
            c = Matrix(y, geometry.out_channels, sizes[2])
            batch, dtype = min(MAX_BATCH, self.frequencies - first), self.spectrum_dtype
            calls.append(GemmCall(units, outputs, channels, a, b, c, batch, dtype, dtype, compute, 0, "products"))
        return calls

    def _finish(self, first: int, units: int) -> KernelLaunch:
        problem, geometry, out = self.problem, self.problem.geometry, self.problem.out
        xs = problem.xs if self.computes_again else ()
        places, lanes = units * prod(self.block), self._lanes(out)
        pixels = units * geometry.pixels // prod(self.tiles)
        bytes_of_pixel = ITEMSIZE[self.dtype] + out.itemsize * (1 + bool(problem.residual) + bool(problem.pre))
        launch = KernelLaunch(
            variant(
                "finish_tiles",
                problem.prologue,
                X_DTYPE=problem.x_dtype,
                W_DTYPE=problem.weight_dtype,
                Y_DTYPE=out.dtype,
            ),
            *_grid(places, geometry.out_channels, lanes),
            (
                ("sources", sources_params(xs)),
                ("windows", windows_params(geometry)),
                ("weight", image(problem.weight)),
                ("out", image(out)),
                ("epilogue", epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)),
                ("prologue", prologue_params(problem.prologue)),
                ("sums", Address("tiles")),
                *zip(("stride_u", "stride_o", "stride_t"), self._strides(units, geometry.out_channels, self.elements)),
                ("first_unit", first),
                ("tiles", self.tiles),
                ("tile", self.tile),
                ("block", self.block),
                ("units", units),
                ("outputs", geometry.out_channels),
                ("output_lanes", lanes),
                ("group_channels", geometry.group_channels),
                ("group_outputs", geometry.group_outputs),
                ("computes_again", int(self.computes_again)),
            ),
            purpose=f"what is wanted of the tiles, {problem.activation if problem.activation else 'bias, residual'}",
            bytes_moved=pixels * geometry.out_channels * bytes_of_pixel,
        )
        return self._placed(launch, places, geometry.out_channels)

    def _placed(self, launch: KernelLaunch, places: int, channels: int) -> KernelLaunch:
        """The launch with what it takes to find its places, once for the channels of a thread, and to go through these."""
        gpu = self.problem.gpu
        operations = places * (cost.TILE_PLACE * -(-channels // CHANNELS) + 4 * channels)
        return replace(launch, arithmetic_seconds=2 * operations / gpu.fp32)


def _grid(places: int, channels: int, lanes: int) -> tuple[Triple, int]:
    """Places, with a thread for each lane, along x; runs of channels along y."""
    return (min(-(-places * lanes // BLOCK), GRID_X), min(-(-channels // (lanes * CHANNELS)), GRID_Y), 1), BLOCK
