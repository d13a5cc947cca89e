"""A chain of convolutions by tiles: runs of rows that go through all layers while they are in cache.

A tile is some rows of one sample, or of several samples if an image is small.  `chain_tiles` computes which rows of
each image a tile needs.  Every part of a tile is a convolution of its own, and its loop is planned like any other.  The
rows that a layer adds in most tiles determine the implementation, which the parts at the ends of images use too.

Fusing saves writing intermediate images to memory and reading them back.  It costs several NumPy calls for every
part of every tile, and the rows that bands share.  The cost model of `conv` estimates all of this in seconds, and the
tile with the least estimated time is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, product
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, Scratch
from cupyconv.numpy.chain_tiles import Piece, bands_to_plan, kept_rows, rows_of_band, tiles, tiles_to_plan
from cupyconv.numpy.choice import FEWER_THREADS
from cupyconv.numpy.convolution import ConvLoop, plan_conv, plan_like
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import Operand, accumulator, dtype_from_name
from cupyconv.problem.geometry import ConvGeometry, even_part, ranges_of
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.problems import ChainProblem, ConvProblem, HostModel, NotApplicable

#: Most bytes of intermediate rows in a tile: about a core's cache.
TILE_BYTES = 5 << 19
#: How many times the tile is halved to estimate the time of smaller tiles too, if all fit the limit.
_HALVES = 3
#: Tiles of a band up to which they are cached from run to run: computing them bounds the time of a chain with few
#: tiles.
_CACHED_TILES = 16
#: Most kinds of parts per layer, and most drafts that are tried, so that the time of planning is bounded.
_MAX_PARTS, _MAX_TRIED = 12, 10
#: Factor by which tiles take longer than the loops of their parts: each part is another convolution than the previous
#: one.
TILES = 1.1
#: Factor by which the estimated time of one thread must be less than that of several threads.
_ALONE = 1.1
#: Fewest rows of an axis that tiles are cut along: on a shorter axis, most windows reach beyond the ends.
_MIN_ROWS = 32

#: Overhead of Python for a part of a tile, in addition to its loop, in NumPy calls.
PART_CALLS = 12

# --- plans ----------------------------------------------------------------------------------------------------

#: Rows that a layer adds to its result, and the loop that computes them; None if a layer has no channels.
Part = tuple[Piece, ConvLoop | None]


@dataclass(frozen=True)
class ChainLoop(NumpyStep):
    """A chain as runs of rows, each of which goes through all layers.

    `tile` is the number of samples, and of rows of the last layer's result along `axis`.  The rows are first divided
    into `bands`, which are independent.  `held` is the number of rows of each other layer's result that are in memory
    at a time.  `loops` has, for each layer, one loop for every geometry that its part of a tile may have.  At the edges
    of the image a part has padding, and the last part may have fewer rows.
    """

    problem: ChainProblem
    tile: tuple[int, int]
    bands: int
    threads: int
    held: tuple[int, ...] = ()
    loops: tuple[tuple[ConvLoop, ...], ...] = ()

    @cached_property
    def layers(self) -> tuple[ConvGeometry, ...]:
        return tuple(layer.geometry for layer in self.problem.layers)

    @cached_property
    def axis(self) -> int:
        return axis_of(self.problem.layers[-1].geometry)

    @cached_property
    def sample_counts(self) -> list[int]:
        """Numbers of samples that tiles have: one number, or two if the last tiles have fewer samples."""
        most, batch = self.tile[0], self.layers[-1].batch
        return [count for count in (min(most, batch), batch % most) if count]

    @cached_property
    def row_ranges(self) -> list[range]:
        """The rows of each band."""
        rows = self.layers[-1].out_size[self.axis]
        return ranges_of(rows, -(-rows // self.bands))

    @cached_property
    def tiles_count(self) -> int:
        samples, rows = self.tile
        return -(-self.layers[-1].batch // samples) * sum(-(-len(band) // rows) for band in self.row_ranges)

    def __str__(self) -> str:
        samples, rows = self.tile
        lines = [
            f"loop     {len(self.layers)} layers, tile by tile: {counted(self.tiles_count, 'tile')} of {counted(samples, 'sample')}"
            f" x {counted(rows, 'row')} (axis {'dhw'[self.axis]}) in {counted(self.bands, 'band')} on {counted(self.threads, 'thread')}"
        ]
        lines += [
            f"  layer {i}: {max(loops, key=lambda loop: loop.flops)}" for i, loops in enumerate(self.loops) if loops
        ]
        return "\n".join(lines)

    @cached_property
    def holds_blas(self) -> bool:
        """Whether BLAS uses one thread if the loop has one; it always does if the loop has several."""
        return self.threads == 1 and any(loop.holds_blas for loops in self.loops for loop in loops)

    @cached_property
    def turns(self) -> int:
        return self.tiles_count * sum(max(loop.turns for loop in loops) for loops in self.loops if loops)

    @property
    def calls(self) -> float:
        return self.tiles_count * sum(PART_CALLS + max(loop.calls for loop in loops) for loops in self.loops if loops)

    @cached_property
    def _kept(self) -> dict[tuple[int, range], list[tuple[Part, ...]]]:
        """The tiles of bands that have few tiles."""
        bands = product(self.sample_counts, self.row_ranges)
        return {band: list(self._tiles(*band)) for band in bands if len(band[1]) <= _CACHED_TILES * self.tile[1]}

    def tiles(self, samples: int, rows: range) -> Iterable[tuple[Part, ...]]:
        """The tiles of a band, in order, with one part per layer."""
        return self._kept.get((samples, rows)) or self._tiles(samples, rows)

    def _tiles(self, samples: int, rows: range) -> Iterator[tuple[Part, ...]]:
        by_geometry = [{part.geometry: part for part in loops} for loops in self.loops]
        for tile in tiles(self.layers, self.axis, samples, rows, self.tile[1]):
            yield tuple((piece, loops.get(piece.geometry)) for piece, loops in zip(tile, by_geometry))

    def run(self, arrays: Mapping[str, Any]) -> None:
        run = _Run(self, arrays)
        bands = product(ranges_of(self.layers[-1].batch, self.tile[0]), self.row_ranges)
        in_threads(self.threads, lambda band: run.finish(*band), bands, self.holds_blas)


class Fused(NamedTuple):
    """A loop over tiles, its workspace, and its estimated seconds."""

    loop: ChainLoop
    sizes: Mapping[str, int]
    seconds: float


class _Draft(NamedTuple):
    """How a chain is cut, on how many threads, and its estimated seconds: on these threads, and on one thread."""

    cut: ChainLoop
    inner: int  # threads of each part
    seconds: float
    alone: float


def plan_fused(problem: ChainProblem) -> Fused:
    """Plan the tiles with the least estimated time; NotApplicable if there are none, or if none fits the limit."""
    if len(problem.layers) == 1:
        raise NotApplicable("the chain has a single layer")
    for i, layer in enumerate(problem.layers):
        if layer.geometry.padding_mode != "constant":
            raise NotApplicable(f"layer {i} has padding_mode={layer.geometry.padding_mode!r}, not 'constant'")
    refusals: list[str] = []
    drafts: list[_Draft] = []
    more: list[Iterator[_Draft]] = []
    for threads in sorted({1, problem.host.threads}, reverse=True):
        best = min(drafts, key=lambda draft: draft.seconds, default=None)
        # If the limit rejected no tile, one thread would have the same tiles.
        if best and not refusals and best.alone > FEWER_THREADS * best.seconds:
            break
        more.append(_drafts(problem, threads, refusals))
        drafts += _while_falling(more[-1])
    for draft in islice(chain(sorted(drafts, key=_by_price), *more), _MAX_TRIED):
        try:
            return _planned(problem, draft)
        except ValueError as reason:
            refusals.append(str(reason))
    raise NotApplicable(refusals[-1])


def _by_price(draft: _Draft) -> float:
    """The estimated time by which drafts are sorted.

    Several threads are preferred: they also share work that the model leaves out, such as the pages of a fresh result.
    """
    is_alone = draft.cut.threads < draft.cut.problem.host.threads
    return draft.seconds * (_ALONE if is_alone else 1.0)


def _while_falling(drafts: Iterator[_Draft]) -> list[_Draft]:
    """The first drafts, up to one that takes longer than the one before."""
    taken: list[_Draft] = []
    for draft in islice(drafts, 1 + _HALVES):
        taken.append(draft)
        if len(taken) > 1 and draft.seconds > taken[-2].seconds:
            break
    return taken


def _drafts(problem: ChainProblem, threads: int, refusals: list[str]) -> Iterator[_Draft]:
    """Yield drafts of tiles of about `TILE_BYTES`, then of smaller ones; append reasons for failures to `refusals`."""
    for tile in _tile_sizes(problem, threads):
        try:
            yield _draft(problem, tile, threads)
        except ValueError as reason:
            refusals.append(str(reason))


def _tile_sizes(problem: ChainProblem, threads: int) -> Iterator[tuple[int, int]]:
    """Yield samples, and rows of the last layer's result: as large as a tile may be, then half as large, and so on."""
    geometry = problem.layers[-1].geometry
    batch, extent = geometry.batch, geometry.out_size[axis_of(geometry)]
    per_sample = max(1, problem.intermediate_bytes // batch)
    samples = even_part(batch, min(-(-batch // threads), TILE_BYTES // per_sample))
    rows = even_part(extent, extent * TILE_BYTES // per_sample)
    while True:
        yield samples, rows
        if samples == rows == 1:
            return
        if samples > 1:
            samples = even_part(batch, samples // 2)
        else:
            rows = even_part(extent, rows // 2)


def axis_of(geometry: ConvGeometry) -> int:
    """The axis along which rows are counted: the outermost long axis, or else the longest one.

    Rows along the outermost axis are contiguous.
    """
    long = [axis for axis in range(3) if geometry.out_size[axis] >= _MIN_ROWS]
    return long[0] if long else max(range(3), key=lambda axis: (geometry.out_size[axis], -axis))


def _draft(problem: ChainProblem, tile: tuple[int, int], threads: int) -> _Draft:
    """Estimate the time of a loop over tiles of (samples, rows); NotApplicable if they need more than the limit."""
    layers = problem.layers
    geometries = tuple(layer.geometry for layer in layers)
    axis = axis_of(geometries[-1])
    groups, rows = -(-geometries[-1].batch // tile[0]), geometries[-1].out_size[axis]
    bands = 1 if groups % threads == 0 else min(threads, -(-rows // tile[1]))
    cut = ChainLoop(problem, tile, bands, min(threads, groups * bands))
    inner = threads // cut.threads
    first = list(islice(tiles(geometries, axis, tile[0], cut.row_ranges[0], tile[1]), 2))
    held = _held(layers, axis, tile[0], first)
    _, left = _room(problem, cut, held, kept_rows(first))
    totals = [rows_of_band(geometries, axis, band) for band in cut.row_ranges]
    work = cost.between(problem.intermediate_bytes, sum(image.nbytes for image in held))
    calls = waits = beside = 0.0
    for i, layer in enumerate(layers):
        piece = _usual(first, i)
        if piece is None:
            continue
        plan = plan_conv(_part_of(layer, piece, axis, held[i - 1 : i], held[i : i + 1], _host_of(problem, inner), left))
        times = sum(total[i] for total in totals) / len(piece.outputs) * geometries[-1].batch / tile[0]
        loops = [step for step in plan.steps if isinstance(step, ConvLoop)]
        work += times * sum(loop.work for loop in loops) + sum(loop.fresh_work for loop in loops)
        calls += times * sum(loop.calls + PART_CALLS for loop in loops)
        beside = max([beside, *(loop.contention for loop in loops)])
        if inner > 1:
            waits += times * sum(loop.seconds - loop.work - loop.calls * cost.CALL for loop in loops)
    shares = groups * bands
    alone = TILES * cost.shared(work, calls, shares, 1)
    together = TILES * cost.shared(work, calls, shares, cut.threads, beside or cost.CONTENTION)
    return _Draft(cut, inner, together + waits, alone)


def _host_of(problem: ChainProblem, threads: int) -> HostModel:
    """A host with `threads` threads for a part; they are a request of the caller only if the chain's threads are."""
    return HostModel(threads, most=threads if problem.host.most else 0)


def _room(
    problem: ChainProblem, cut: ChainLoop, held: Sequence[Operand], kept: Sequence[int]
) -> tuple[dict[str, int], int]:
    """Bytes of workspace by name that tiles need with any loops, and the bytes left for the parts of one thread."""
    between = [cut.threads * image.nbytes for image in held]
    weights = sum(_copied(layer) for layer in problem.layers)
    moved = max(_rows(image, cut.axis, rows).nbytes for image, rows in zip(held, kept))  # through a copy
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)} | {
        "weights": weights,
        "blocks": cut.threads * moved,
    }
    left = problem.limit_with(weights) - sum(sizes.values())
    if left < 0:
        raise _too_large(cut, sum(sizes.values()))
    return sizes, left // cut.threads


def _planned(problem: ChainProblem, draft: _Draft, spared: int = 0) -> Fused:
    """Plan the loop over tiles, with a loop for every kind of part; NotApplicable if these need more than the limit.

    Parts are planned with `spared` bytes less than are available, which are for memory that they cannot share.
    """
    layers, cut, axis = problem.layers, draft.cut, draft.cut.axis
    parts = [
        part
        for samples, band in product(cut.sample_counts, bands_to_plan(cut.layers, axis, cut.row_ranges))
        for part in tiles_to_plan(cut.layers, axis, samples, band, cut.tile[1])
    ]
    unlike = [{part[i].geometry: part[i] for part in parts if part[i].outputs} for i in range(len(layers))]
    if sum(map(len, unlike)) > _MAX_PARTS * len(layers):
        raise NotApplicable(f"tiles have more than {_MAX_PARTS} kinds of parts per layer")
    held = _held(layers, axis, cut.tile[0], parts)
    sizes, left = _room(problem, cut, held, kept_rows(parts))
    loops: list[tuple[ConvLoop, ...]] = []
    # Per dtype and implementation, over all layers: bytes of a part, and bytes of its arrays other than the largest.
    scratch: dict[tuple[str, type[ConvLoop]], tuple[int, int]] = {}
    for i, layer in enumerate(layers):
        plans: list[Plan] = []
        usual = _usual(parts, i)
        for piece in sorted(unlike[i].values(), key=lambda piece: usual is None or piece.geometry != usual.geometry):
            part = _part_of(
                layer, piece, axis, held[i - 1 : i], held[i : i + 1], _host_of(problem, draft.inner), left - spared
            )
            plans.append(plan_like(plans[0], part) if plans else plan_conv(part))
        loops.append(tuple(step for plan in plans for step in plan.steps if isinstance(step, ConvLoop)))
        most = max((plan.workspace_bytes for plan in plans), default=0)
        for part_loop in loops[-1]:
            whole, beside = scratch.get(kind := (layer.x_dtype, type(part_loop)), (0, 0))
            scratch[kind] = max(whole, most), max(beside, part_loop.threads * part_loop.extra_bytes)
    # Layers with the same dtype and implementation share memory, which holds one's columns next to another's tile.
    shared = sum(map(sum, scratch.values()))
    if shared > left:
        if not spared:
            return _planned(problem, draft, -(-(shared - left) // len(scratch)))
        raise _too_large(cut, sum(sizes.values()) + cut.threads * shared)
    sizes["blocks"] += cut.threads * shared
    loop = replace(cut, loops=tuple(loops), held=tuple(image.shape[2 + axis] for image in held))
    return Fused(loop, sizes, draft.seconds)


def _usual(parts: Sequence[tuple[Piece, ...]], i: int) -> Piece | None:
    """The rows that layer `i` adds in most tiles: in a band's second tile, and in all later ones except the last."""
    return next((part[i] for part in (*reversed(parts[:2]), *parts[2:]) if part[i].outputs), None)


def _held(layers: Sequence[ConvProblem], axis: int, samples: int, parts: Sequence[tuple[Piece, ...]]) -> list[Operand]:
    """The rows of each intermediate image that are in memory at a time."""
    return [
        _rows(layer.out, axis, max(len(part[i].reads) for part in parts))
        .samples(0, samples)
        .in_c_order(layer.out.dtype)
        for i, layer in enumerate(layers[:-1], start=1)
    ]


def _too_large(cut: ChainLoop, needed: int) -> NotApplicable:
    samples, rows = cut.tile
    return NotApplicable(
        f"a tile of {counted(samples, 'sample')} x {counted(rows, 'row')} needs {needed:,} bytes of workspace,"
        f" the limit is {cut.problem.limit:,}"
    )


def _part_of(
    layer: ConvProblem,
    piece: Piece,
    axis: int,
    read: Sequence[Operand],
    written: Sequence[Operand],
    host: HostModel,
    limit: int,
) -> ConvProblem:
    """A part of a layer as a convolution of its own; `read` and `written` have its intermediate images, if any."""
    samples, outputs = piece.geometry.batch, len(piece.outputs)

    def cut(image: Operand, rows: int) -> Operand:
        return _rows(image, axis, rows).samples(0, samples)

    return replace(
        layer,
        geometry=piece.geometry,
        xs=tuple(cut(x, len(piece.reads)) for x in read or layer.xs),
        weight=layer.weight.in_c_order(accumulator(layer.weight_dtype)),
        out=cut(written[0] if written else layer.out, outputs),
        residual=layer.residual and cut(layer.residual, outputs),
        machine=host,
        workspace_limit=limit,
        allow_fft=False,  # it would transform the weight for every part
    )


def _rows(image: Operand, axis: int, rows: int) -> Operand:
    """The image with `rows` rows."""
    return replace(image, shape=image.shape[: 2 + axis] + (rows,) + image.shape[3 + axis :])


def _copied(layer: ConvProblem) -> int:
    """Bytes of the weight's copy; 0 if the weight is in C order, in the dtype that the loops compute in."""
    weight = layer.weight.in_c_order(accumulator(layer.weight_dtype))
    return 0 if (weight.dtype, weight.strides) == (layer.weight.dtype, layer.weight.strides) else weight.nbytes


# --- runs -----------------------------------------------------------------------------------------------------


class _Held:
    """Rows of an intermediate image, beginning with row `first`."""

    def __init__(self, empty: Callable[[], np.ndarray]) -> None:
        self._empty = empty
        self._image: np.ndarray | None = None
        self.first = 0

    @property
    def image(self) -> np.ndarray:
        """The rows' memory, allocated on first use."""
        if self._image is None:
            self._image = self._empty()
        return self._image

    def forget(self) -> None:
        self._image = None


class _Run:
    """One run: its arrays, viewed with five axes, and memory that the tiles of a thread share."""

    def __init__(self, chain: ChainLoop, arrays: Mapping[str, Any]) -> None:
        self.chain, self.axis = chain, chain.axis + 2
        self.inputs = {x.name: five_axes(arrays[x.name]) for x in chain.problem.layers[0].xs}
        self.out = five_axes(arrays["out"])
        self.residuals = {
            i: five_axes(arrays[name]) for i in range(len(chain.layers)) if (name := f"residual[{i}]") in arrays
        }
        #: Arguments that a layer's tiles share: its weight in the dtype of products, its bias, and its prologue's
        #: arrays.
        self.common = [
            {
                "weight": np.ascontiguousarray(arrays[f"weight[{i}]"], loops[0].factor_dtype if loops else None),
                **({"bias": arrays[f"bias[{i}]"]} if f"bias[{i}]" in arrays else {}),
                **{vector.name: arrays[vector.name] for vector in chain.problem.layers[i].prologue.vectors},
            }
            for i, loops in enumerate(chain.loops)
        ]
        self.scratch = {loops[0].x_dtype: Scratch(loops[0].x_dtype, rounds=2) for loops in chain.loops if loops}

    def finish(self, samples: range, rows: range) -> None:
        """Compute all tiles of a band, in order."""
        held = [_Held(partial(self._empty, i, len(samples), count)) for i, count in enumerate(self.chain.held)]
        for tile in self.chain.tiles(len(samples), rows):
            is_last = tile[-1][0].outputs.stop == rows.stop
            for i, (piece, _) in enumerate(tile):
                if not piece.outputs:
                    continue
                self._finish_piece(i, tile, samples, held)
                if i and is_last:
                    held[i - 1].forget()  # it is not read again

    def _finish_piece(self, i: int, tile: tuple[Part, ...], samples: range, held: list[_Held]) -> None:
        """Compute the rows of layer `i` that a tile adds."""
        piece, loop = tile[i]
        if i == len(held):
            result = self._cut(self.out, samples, piece.outputs)
        else:
            result = self._evict_for(held[i], tile[i + 1][0].reads, piece.outputs)
        if loop is None:
            return
        if i == 0:
            images = {name: self._cut(image, samples, piece.reads) for name, image in self.inputs.items()}
        else:
            before = held[i - 1]
            images = {f"layer[{i - 1}]": self._rows(before.image, piece.reads.start - before.first, len(piece.reads))}
        if i in self.residuals:
            images["residual"] = self._cut(self.residuals[i], samples, piece.outputs)
        loop.run({**self.common[i], **images, "out": result}, self.scratch[loop.x_dtype])

    def _evict_for(self, held: _Held, needed: range, new: range) -> np.ndarray:
        """Move the `needed` rows that are present to the front; return the memory of the `new` rows behind them."""
        kept = new.start - needed.start
        if kept and held.first != needed.start:
            self._rows(held.image, 0, kept)[...] = self._rows(held.image, needed.start - held.first, kept)
        held.first = needed.start
        return self._rows(held.image, kept, len(new))

    def _empty(self, i: int, samples: int, rows: int) -> np.ndarray:
        """Allocate memory for some rows of layer `i`."""
        geometry = self.chain.layers[i]
        size = list(geometry.out_size)
        size[self.axis - 2] = rows
        return np.empty((samples, geometry.out_channels, *size), dtype_from_name(self.chain.problem.layers[i].dtype))

    def _rows(self, image: np.ndarray, first: int, count: int) -> np.ndarray:
        return image[(slice(None),) * self.axis + (slice(first, first + count),)]

    def _cut(self, image: np.ndarray, samples: range, rows: range) -> np.ndarray:
        return self._rows(image[samples.start : samples.stop], rows.start, len(rows))
