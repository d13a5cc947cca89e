"""A chain of convolutions by tiles of rows: each goes through all layers while it is in cache.

A tile is a run of rows of one sample, or some samples where an image is small.  Not fusing is a tile of whole
images.  Every part of a tile is a convolution of its own, and its loop is planned as that of any other.

"Rows" run along one spatial axis.  Going back through the layers, the rows that a layer computes say which rows
it reads, which are those that the layer before must have; some of these it has from the time before.

::

    last layer     | rows done      | rows of this tile |
    layer before   | rows done        | new rows          |      the window's rows on both sides of the tile,
    x              | rows read           | rows read         |   less what is at hand already

Of a layer's result only the rows are in memory that the next layer reads for this tile.  Those it will read
again are moved to the front for the next tile, and only rows that are not there yet are computed: none twice,
but where a band begins, whose neighbour belongs to another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.convolution import ConvLoop, Rejected, plan_conv
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Scratch, five_axes, ranges_of
from cupyconv.problem.arrays import Operand, accumulator, dtype_from_name
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import ChainProblem, ConvProblem, HostModel, NotApplicable, without_empty_inputs

#: Bytes of intermediate rows in a tile: what stays in a core's cache beside the columns that are made of it.
TILE_BYTES = 1 << 20
#: Tiles of a band up to which they are kept from run to run: a chain of few is bound by working them out.
_KEPT_TILES = 16

# --- rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Some rows of a layer's result, as a convolution of the rows that they read.

    Its padding is zeros: what of the layer's own lies beside these rows.
    """

    outputs: range
    reads: range
    geometry: ConvGeometry


def tiles(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Rows of the last layer, `step` at a time: one piece a layer, each layer's rows one after the other, none twice."""
    done = [0] * len(layers)
    # Most tiles are alike: their parts are one object, made and hashed once.
    alike: dict[tuple[int, int, int, int], ConvGeometry] = {}
    for first in range(rows.start, rows.stop, step):
        needed = range(first, min(first + step, rows.stop))
        tile: list[Piece] = []
        for i in reversed(range(len(layers))):
            new = range(min(max(needed.start, done[i]), needed.stop), needed.stop)
            done[i] = max(done[i], needed.stop)
            reads, before, after = _reads(layers[i], axis, new)
            key = i, len(reads), before, after
            if key not in alike:
                alike[key] = _part(layers[i], axis, samples, *key[1:])
            tile.append(Piece(new, reads, alike[key]))
            needed = reads if new else range(0)
        yield tuple(reversed(tile))


def _reads(geometry: ConvGeometry, axis: int, outputs: range) -> tuple[range, int, int]:
    """The rows that rows of the result are computed from, and those of padding before and after them."""
    stride, size = geometry.stride[axis], geometry.size[axis]
    first = outputs.start * stride - geometry.before[axis]
    count = (len(outputs) - 1) * stride + geometry.span[axis] if outputs else 0
    begin = min(max(first, 0), size)
    end = max(begin, min(first + count, size))
    before = min(max(begin - first, 0), count)
    return range(begin, end), before, count - before - (end - begin)


def _part(geometry: ConvGeometry, axis: int, samples: int, rows: int, before: int, after: int) -> ConvGeometry:
    """The convolution of so many rows."""

    def put(values: Triple, value: int) -> Triple:
        return values[:axis] + (value,) + values[axis + 1 :]  # type: ignore[return-value]

    return replace(
        geometry,
        batch=samples,
        size=put(geometry.size, rows),
        before=put(geometry.before, before),
        after=put(geometry.after, after),
    )


# --- plans ----------------------------------------------------------------------------------------------------

#: Rows that a layer adds to its result, and what computes them; None where a layer has no channels.
Part = tuple[Piece, ConvLoop | None]


@dataclass(frozen=True)
class ChainLoop(NumpyStep):
    """A chain: runs of rows, each through all layers one after the other.

    `tile` is samples, and rows of the last layer's result along `axis`.  The rows are cut into `bands` first,
    which know nothing of each other.  Of the other layers' results `held` rows are in memory at a time.  `loops`
    has, for each layer, one loop for every geometry that its part of a tile may have: at the edges of the image
    a part has padding, and the last one may have fewer rows.
    """

    problem: ChainProblem
    is_fused: bool
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
        return _axis(self.problem.layers[-1].geometry)

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes + (0 if self.is_fused else 2 * self.problem.intermediate_bytes)

    @cached_property
    def sample_ranges(self) -> list[range]:
        """The samples of each tile."""
        return ranges_of(self.layers[-1].batch, self.tile[0])

    @cached_property
    def row_ranges(self) -> list[range]:
        """The rows of each band."""
        rows = self.layers[-1].out_size[self.axis]
        return ranges_of(rows, -(-rows // self.bands))

    def __str__(self) -> str:
        samples, rows = self.tile
        tiles = len(self.sample_ranges) * sum(-(-len(band) // rows) for band in self.row_ranges)
        lines = [
            f"loop     {len(self.layers)} layers, tile by tile: {tiles} tile(s) of {samples} samples x {rows} rows (axis {'dhw'[self.axis]})"
            f" in {self.bands} band(s) on {self.threads} thread(s)"
        ]
        lines += [
            f"  layer {i}: {max(loops, key=lambda loop: loop.flops)}" for i, loops in enumerate(self.loops) if loops
        ]
        return "\n".join(lines)

    @cached_property
    def _kept(self) -> dict[tuple[int, range], list[tuple[Part, ...]]]:
        """The tiles of bands that have few."""
        bands = product({len(samples) for samples in self.sample_ranges}, self.row_ranges)
        return {band: list(self._tiles(*band)) for band in bands if len(band[1]) <= _KEPT_TILES * self.tile[1]}

    def tiles(self, samples: int, rows: range) -> Iterable[tuple[Part, ...]]:
        """The tiles of a band, in order: a part of each layer."""
        return self._kept.get((samples, rows)) or self._tiles(samples, rows)

    def _tiles(self, samples: int, rows: range) -> Iterator[tuple[Part, ...]]:
        by_geometry = [{part.geometry: part for part in loops} for loops in self.loops]
        for tile in tiles(self.layers, self.axis, samples, rows, self.tile[1]):
            yield tuple((piece, loops.get(piece.geometry)) for piece, loops in zip(tile, by_geometry))

    def run(self, arrays: Mapping[str, Any]) -> None:
        chain = _Run(self, arrays)
        bands = list(product(self.sample_ranges, self.row_ranges))
        in_threads(self.threads, lambda band: chain.finish(*band), bands)


def plan_chain(problem: ChainProblem) -> Plan:
    """The plan of a chain; ValueError where ``fuse=True`` and nothing can be fused, or nothing fits the limit."""
    problem = replace(problem, layers=(without_empty_inputs(problem.layers[0]), *problem.layers[1:]))
    if problem.layers[-1].out.nbytes == 0:
        return _plan(problem, "unfused", "the result is empty")
    plan, rejected = _choose(problem)
    return replace(plan, rejected=rejected)


def _plan(
    problem: ChainProblem, method: str, reason: str, steps: Sequence[ChainLoop] = (), sizes: Mapping[str, int] = {}
) -> Plan:
    notes = tuple(dict.fromkeys(note for layer in problem.layers for note in layer.notes))
    return problem.planned(steps, sizes, method=method, reason=reason, notes=notes)


def _choose(problem: ChainProblem) -> tuple[Plan, Rejected]:
    """The way that was asked for, or for "auto" the one that memory and cache speak for; and why not the other."""
    whole = problem.intermediate_bytes
    if len(problem.layers) == 1:
        if problem.fuse is True:
            raise ValueError("fuse=True does not apply: a single layer has no neighbour")
        return _unfused(problem), (("fused", "a single layer has no neighbour"),)
    try:
        fused = _fused(problem)
    except NotApplicable as reason:
        if problem.fuse is True:
            raise ValueError(f"fuse=True does not apply: {reason}") from None
        return _unfused(problem), (("fused", str(reason)),)
    stored = f"the images between layers are {whole:,} bytes"
    if problem.fuse is False:
        return _unfused(problem), (("fused", f"fuse=False was asked for; {fused.reason}"),)
    if problem.fuse == "auto" and whole <= TILE_BYTES:
        return _unfused(problem), (("fused", f"{stored}, which stay in cache as they are"),)
    return fused, (("unfused", f"{stored}, written to memory and read again, where a tile has {_between(fused):,}"),)


def _between(plan: Plan) -> int:
    """Bytes of intermediate rows that are in memory."""
    return sum(buffer.nbytes for buffer in plan.workspace if buffer.name.startswith("layer["))


def _fused(problem: ChainProblem) -> Plan:
    """Tiles of about `TILE_BYTES`, or the largest below that keep within the workspace limit."""
    layers, axis = problem.layers, _axis(problem.layers[-1].geometry)
    geometry = layers[-1].geometry
    batch, rows = geometry.batch, geometry.out_size[axis]
    per_sample = max(1, problem.intermediate_bytes // batch)
    samples = even_part(batch, TILE_BYTES // per_sample)
    rows = even_part(rows, rows * TILE_BYTES // per_sample)
    while True:
        try:
            return _tiled(problem, (samples, rows), problem.limit, is_fused=True)
        except ValueError as reason:
            if samples == rows == 1:
                raise NotApplicable(str(reason)) from None
            if samples > 1:
                samples = even_part(batch, samples // 2)
            else:
                rows = even_part(geometry.out_size[axis], rows // 2)


def _unfused(problem: ChainProblem) -> Plan:
    """Whole images, of as many samples as leave the loops what they need."""
    geometry = problem.layers[-1].geometry
    sizes = [layer.out.nbytes for layer in problem.layers[:-1]]
    size = sum(max(sizes[first::2]) for first in range(min(2, len(sizes))))  # two are alive at a time
    most = geometry.batch if 2 * size <= problem.limit else max(1, geometry.batch * (problem.limit // 2) // size)
    samples, rows = even_part(geometry.batch, most), geometry.out_size[_axis(geometry)]
    while True:
        try:
            return _tiled(problem, (samples, rows), problem.limit, is_fused=False)
        except ValueError:
            if samples == 1:
                break
            samples = even_part(geometry.batch, samples // 2)
    plan = _tiled(problem, (1, rows), problem.limit + size, is_fused=False)
    nbytes = _between(plan)
    note = f"the images between layers take {nbytes:,} bytes for one sample, beyond the workspace limit of {problem.limit:,}"
    return replace(plan, notes=(*plan.notes, note))


def _axis(geometry: ConvGeometry) -> int:
    """The axis that rows are counted along: the longest, where the windows of a tile reach over its ends least often."""
    return max(range(3), key=lambda axis: (geometry.out_size[axis], -axis))


def _tiled(problem: ChainProblem, tile: tuple[int, int], limit: int, *, is_fused: bool) -> Plan:
    """The loop over tiles of (samples, rows); ValueError where its workspace passes `limit`."""
    layers = problem.layers
    geometries = tuple(layer.geometry for layer in layers)
    threads, axis = problem.host.threads, _axis(geometries[-1])
    groups, rows = -(-geometries[-1].batch // tile[0]), geometries[-1].out_size[axis]
    bands = min(-(-threads // groups), -(-rows // tile[1])) if is_fused else 1
    workers = min(threads, groups * bands) if is_fused else 1
    loop = ChainLoop(problem, is_fused, tile, bands, workers)
    parts = [
        part
        for samples, band in product(sorted({len(samples) for samples in loop.sample_ranges}), loop.row_ranges)
        for part in tiles(geometries, axis, samples, band, tile[1])
    ]
    rows_held = tuple(max(len(part[i].reads) for part in parts) for i in range(1, len(layers)))
    held = [
        _rows(layer.out, axis, count).samples(0, tile[0]).in_c_order(layer.out.dtype)
        for layer, count in zip(layers, rows_held)
    ]
    between = [workers * image.nbytes for image in held]
    if not is_fused:  # two are alive at a time
        between = [max(between[first::2]) for first in range(min(2, len(between)))]
    weights = sum(_copied(layer) for layer in layers)
    limit += problem.limit_with(weights) - problem.limit
    fixed = sum(between) + weights + workers * _moved(held, parts, axis)
    left = (limit - fixed) // workers
    loops: list[tuple[ConvLoop, ...]] = []
    scratch: dict[tuple[str, type[ConvLoop]], int] = {}
    for i, layer in enumerate(layers):
        own = [part[i] for part in parts if part[i].outputs]
        plans = [
            plan_conv(_part_of(layer, piece, axis, held[i - 1 : i], held[i : i + 1], threads // workers, left))
            for piece in {piece.geometry: piece for piece in own}.values()
        ]
        loops.append(tuple(step for plan in plans for step in plan.steps if isinstance(step, ConvLoop)))
        # Layers of one dtype and way use the same memory, but one's columns and another's tile lie in it side by side.
        most = max((plan.workspace_bytes for plan in plans), default=0)
        most += max((part_loop.tile_bytes for part_loop in loops[-1]), default=0)
        for kind in {(layer.x_dtype, type(part_loop)) for part_loop in loops[-1]}:
            scratch[kind] = max(scratch.get(kind, 0), most)
    needed = fixed + workers * sum(scratch.values())
    if needed > limit:
        raise NotApplicable(
            f"a tile of {tile[0]} samples x {tile[1]} rows needs {needed:,} bytes of workspace, the limit is {limit:,}"
        )
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)}
    sizes |= {"weights": weights, "blocks": needed - weights - sum(between)}
    loop = replace(loop, loops=tuple(loops), held=rows_held)
    if is_fused:
        words = f"tiles of {tile[0]} samples x {tile[1]} rows go through all layers"
        return _plan(problem, "fused", words, (loop,), sizes)
    return _plan(problem, "unfused", "one layer after the other", (loop,), sizes)


def _part_of(
    layer: ConvProblem,
    piece: Piece,
    axis: int,
    read: Sequence[Operand],
    written: Sequence[Operand],
    threads: int,
    limit: int,
) -> ConvProblem:
    """A part of a layer as a convolution of its own; `read` and `written` are intermediate images, where they are."""
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
        machine=HostModel(threads),
        workspace_limit=limit,
    )


def _moved(held: Sequence[Operand], parts: Sequence[tuple[Piece, ...]], axis: int) -> int:
    """The most bytes of rows that are kept from one tile to the next: a copy of them is made where they overlap."""
    kept = [
        max((len(part[i + 1].reads) - len(part[i].outputs) for part in parts if part[i].outputs), default=0)
        for i in range(len(held))
    ]
    return max((_rows(image, axis, rows).nbytes for image, rows in zip(held, kept)), default=0)


def _rows(image: Operand, axis: int, rows: int) -> Operand:
    """An image with so many rows of its own."""
    return replace(image, shape=image.shape[: 2 + axis] + (rows,) + image.shape[3 + axis :])


def _copied(layer: ConvProblem) -> int:
    """Bytes of the weight where it is not what the loops read: C-ordered, in the dtype they compute with."""
    weight = layer.weight.in_c_order(accumulator(layer.weight_dtype))
    return 0 if (weight.dtype, weight.strides) == (layer.weight.dtype, layer.weight.strides) else weight.nbytes


# --- runs -----------------------------------------------------------------------------------------------------


class _Held:
    """Rows of an intermediate image, the first of them number `first`."""

    def __init__(self, empty: Callable[[], np.ndarray]) -> None:
        self._empty = empty
        self._image: np.ndarray | None = None
        self.first = 0

    @property
    def image(self) -> np.ndarray:
        """The rows' memory, from when it is first asked for."""
        if self._image is None:
            self._image = self._empty()
        return self._image

    def forget(self) -> None:
        self._image = None


class _Run:
    """One run: its arrays, brought to five axes, and memory that the tiles of a thread share."""

    def __init__(self, chain: ChainLoop, arrays: Mapping[str, Any]) -> None:
        self.chain, self.axis = chain, chain.axis + 2
        self.inputs = {x.name: five_axes(arrays[x.name]) for x in chain.problem.layers[0].xs}
        self.out = five_axes(arrays["out"])
        self.residuals = {
            i: five_axes(arrays[name]) for i in range(len(chain.layers)) if (name := f"residual[{i}]") in arrays
        }
        #: What a layer's tiles have in common: its weight, as they compute with it, and its bias.
        self.common = [
            {
                "weight": np.ascontiguousarray(arrays[f"weight[{i}]"], loops[0].factor_dtype if loops else None),
                **({"bias": arrays[f"bias[{i}]"]} if f"bias[{i}]" in arrays else {}),
            }
            for i, loops in enumerate(chain.loops)
        ]
        self.scratch = {loops[0].x_dtype: Scratch(loops[0].x_dtype, rounds=2) for loops in chain.loops if loops}

    def finish(self, samples: range, rows: range) -> None:
        """All tiles of a band, in order."""
        held = [_Held(partial(self._empty, i, len(samples), count)) for i, count in enumerate(self.chain.held)]
        for tile in self.chain.tiles(len(samples), rows):
            is_last = tile[-1][0].outputs.stop == rows.stop
            for i, (piece, _) in enumerate(tile):
                if not piece.outputs:
                    continue
                self._finish_piece(i, tile, samples, held)
                if i and is_last:
                    held[i - 1].forget()  # nobody reads it again

    def _finish_piece(self, i: int, tile: tuple[Part, ...], samples: range, held: list[_Held]) -> None:
        """The rows of layer `i` that a tile adds."""
        piece, loop = tile[i]
        if i == len(held):
            result = self._cut(self.out, samples, piece.outputs)
        else:
            result = self._make_room(held[i], tile[i + 1][0].reads, piece.outputs)
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

    def _make_room(self, held: _Held, needed: range, new: range) -> np.ndarray:
        """Bring what is there of the rows `needed` to the front; the place of `new` ones, after these."""
        kept = new.start - needed.start
        if kept and held.first != needed.start:
            self._rows(held.image, 0, kept)[...] = self._rows(held.image, needed.start - held.first, kept)
        held.first = needed.start
        return self._rows(held.image, kept, len(new))

    def _empty(self, i: int, samples: int, rows: int) -> np.ndarray:
        """Memory for some rows of layer `i`."""
        geometry = self.chain.layers[i]
        size = list(geometry.out_size)
        size[self.axis - 2] = rows
        return np.empty((samples, geometry.out_channels, *size), dtype_from_name(self.chain.problem.layers[i].dtype))

    def _rows(self, image: np.ndarray, first: int, count: int) -> np.ndarray:
        return image[(slice(None),) * self.axis + (slice(first, first + count),)]

    def _cut(self, image: np.ndarray, samples: range, rows: range) -> np.ndarray:
        return self._rows(image[samples.start : samples.stop], rows.start, len(rows))
