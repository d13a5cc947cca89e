"""A chain of convolutions: one layer after the other, or by tiles of rows that go through all layers while in cache.

Unfused, each layer is planned as a call of `conv` is, for as many samples at a time as leave it memory.  Fused, a tile is
a run of rows of one sample, or some samples where an image is small; every part of a tile is a convolution of its own,
whose loop is planned as that of any other.

"Rows" run along one spatial axis.  Going back through the layers, the rows that a layer computes say which rows
it reads, which are those that the layer before must have; some of these it has from the time before.

::

    last layer     | rows done      | rows of this tile |
    layer before   | rows done        | new rows          |      the window's rows on both sides of the tile,
    x              | rows read           | rows read         |   less what is at hand already

Of a layer's result only the rows are in memory that the next layer reads for this tile.  Those it will read
again are moved to the front for the next tile, and only rows that are not there yet are computed: none twice,
but where a band begins, whose neighbour belongs to another thread.

What fusing saves is the way of the images between to memory and back.  What it costs are calls of NumPy, several for
every part of every tile, and the rows that bands share.  Both are counted in seconds, and the cheaper is taken; a tile
that leaves the loops small blocks has many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any, NamedTuple, cast

import numpy as np

from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.convolution import ConvLoop, plan_conv
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Scratch, five_axes
from cupyconv.problem.arrays import Operand, accumulator, dtype_from_name
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part, ranges_of
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import ChainProblem, ConvProblem, HostModel, NotApplicable, without_empty_inputs

#: Bytes of intermediate rows in a tile: what stays in a core's cache beside the columns that are made of it.
TILE_BYTES = 5 << 18
#: Tiles of a band up to which they are kept from run to run: a chain of few is bound by working them out.
_KEPT_TILES = 16
#: Tiles of a band up to which planning looks at each; of more, at those where something changes, if these are as few.
_PLANNED_TILES = 32
#: Threads that a chain is cut for at most.
_MOST_THREADS = 64

# The seconds of the model (measured on 2 cores with 1 MiB of L2 each that share 32 MiB).
#: A part of a tile, and a block of its loop: calls of NumPy, of which one thread at a time is at the beginning or end.
PART_SECONDS, BLOCK_SECONDS = 40e-6, 10e-6
#: Bytes a second of an image that is written by one layer and read by the next: all threads together, from the cache
#: that cores share.
IMAGE_BYTES = 60e9
#: Operations a second and thread, of rows that are computed twice.
_FLOPS = 5e10

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


def tiles_to_plan(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Tiles of a band among which are all that differ in more than where they lie; NotApplicable where these are many."""
    count = -(-len(rows) // step)
    numbers: Iterable[int] = range(count)
    if count > _PLANNED_TILES:
        # Before a tile at which one layer's windows first reach an end of its image, or last do, all are alike.
        near = {0, count - 1}
        for begin, end in _rows_at_ends(layers, axis):
            first, last = (min(max((row - rows.start) // step, -2), count + 1) for row in (begin, end))
            if last - first > _PLANNED_TILES:
                raise NotApplicable(f"windows at the ends of an image reach over more than {_PLANNED_TILES} tiles")
            near.update(range(first, last + 1))
        numbers = sorted({n for i in near for n in range(i - 2, i + 3) if 0 <= n < count})
    before = -1
    for number in numbers:
        if number > before + 1 or number == 0:
            # What a tile adds depends on the one before it.
            begin = rows.start + max(0, number - 1) * step
            run = tiles(layers, axis, samples, range(begin, rows.stop), step)
            if number:
                next(run)
        before = number
        yield next(run)


def _bands_to_plan(layers: Sequence[ConvGeometry], axis: int, bands: Sequence[range]) -> list[range]:
    """Bands among which are all that differ in more than where they lie: those between the ends of images are alike."""
    ends = list(_rows_at_ends(layers, axis))
    chosen = [bands[0], *bands[1:-1][:1], *bands[1:][-1:]]
    met = [band for band in bands if any(begin <= band.stop and band.start <= end for begin, end in ends)]
    return list(dict.fromkeys(chosen + met))


def _rows_at_ends(layers: Sequence[ConvGeometry], axis: int) -> Iterator[tuple[int, int]]:
    """For both ends of each layer's image: the first and the last row of the last result whose windows meet it."""
    for i in range(len(layers)):
        for position in (0, layers[i].size[axis]):
            begin = end = position
            for layer in layers[i:]:
                first = begin + layer.before[axis] - layer.span[axis]
                begin, end = first // layer.stride[axis], (end + layer.before[axis]) // layer.stride[axis]
            yield begin, end


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

    @cached_property
    def sample_counts(self) -> list[int]:
        """The numbers of samples that tiles have: one, or two where the last have fewer."""
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
            f"loop     {len(self.layers)} layers, tile by tile: {self.tiles_count} tile(s) of {samples} samples x {rows} rows (axis {'dhw'[self.axis]})"
            f" in {self.bands} band(s) on {self.threads} thread(s)"
        ]
        lines += [
            f"  layer {i}: {max(loops, key=lambda loop: loop.flops)}" for i, loops in enumerate(self.loops) if loops
        ]
        return "\n".join(lines)

    @cached_property
    def _kept(self) -> dict[tuple[int, range], list[tuple[Part, ...]]]:
        """The tiles of bands that have few."""
        bands = product(self.sample_counts, self.row_ranges)
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
        bands = product(ranges_of(self.layers[-1].batch, self.tile[0]), self.row_ranges)
        in_threads(self.threads, lambda band: chain.finish(*band), bands)


@dataclass(frozen=True)
class LayersLoop(NumpyStep):
    """Layers one after the other, so many samples at a time, each as a call of `conv` would run it.

    `plans` has, for each number of samples that is computed at a time, a plan for each layer.
    """

    problem: ChainProblem
    samples: int
    plans: tuple[tuple[Plan, ...], ...]

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes + 2 * self.problem.intermediate_bytes

    @property
    def times(self) -> int:
        """How often some samples go through all layers."""
        return -(-self.problem.layers[-1].geometry.batch // self.samples)

    def __str__(self) -> str:
        lines = [f"loop     {len(self.problem.layers)} layers, {self.samples} sample(s) at a time, {self.times} times"]
        lines += [f"  layer {i}: {step}" for i, plan in enumerate(self.plans[0]) for step in plan.steps]
        return "\n".join(lines)

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        layers = self.problem.layers
        batch = layers[-1].geometry.batch
        runs = [
            [[step.executable() for step in cast("tuple[NumpyStep, ...]", plan.steps)] for plan in plans]
            for plans in self.plans
        ]
        sizes = _slot_bytes(_of_samples(self.problem.layers, self.samples))

        def run(arrays: Mapping[str, Any]) -> None:
            slots = [np.empty(nbytes, np.uint8) for nbytes in sizes]
            for samples in ranges_of(batch, self.samples):
                some = slice(samples.start, samples.stop)
                images = {x.name: arrays[x.name][some] for x in layers[0].xs}
                for i, (layer, steps) in enumerate(zip(layers, runs[len(samples) != self.samples])):
                    given = {name: arrays[f"{name}[{i}]"] for name in ("weight", "bias") if f"{name}[{i}]" in arrays}
                    given |= {vector.name: arrays[vector.name] for vector in layer.prologue.vectors}
                    if f"residual[{i}]" in arrays:
                        given["residual"] = arrays[f"residual[{i}]"][some]
                    if i == len(layers) - 1:
                        result = arrays["out"][some]
                    else:
                        result = _image(replace(layer.out, shape=(len(samples), *layer.out.shape[1:])), slots[i % 2])
                    for run_step in steps:
                        run_step({**given, **images, "out": result})
                    images = {f"layer[{i}]": result}

        return run


class _Way(NamedTuple):
    """A plan, the seconds that it takes beside the arithmetic that any takes, and whether it keeps within the limit."""

    plan: Plan
    seconds: float
    fits: bool = True


def plan_chain(problem: ChainProblem) -> Plan:
    """The plan of a chain; ValueError where ``fuse=True`` and nothing can be fused, or nothing fits the limit."""
    problem = replace(problem, layers=(without_empty_inputs(problem.layers[0]), *problem.layers[1:]))
    if problem.layers[-1].out.nbytes == 0:
        return _plan(problem, "unfused", "the result is empty")
    try:
        fused = _fused(problem)
    except NotApplicable as reason:
        if problem.fuse is True:
            raise ValueError(f"fuse=True does not apply: {reason}") from None
        return replace(_unfused(problem).plan, rejected=(("fused", str(reason)),))
    if problem.fuse is True:
        return replace(fused.plan, rejected=(("unfused", "fuse=True was asked for"),))
    unfused = _unfused(problem)
    stored = f"the images between layers are {problem.intermediate_bytes:,} bytes"
    costs = f"{stored}, which cost {_ms(unfused)} by the model, and tiles {_ms(fused)}"
    if problem.fuse is False:
        return replace(unfused.plan, rejected=(("fused", f"fuse=False was asked for; {fused.plan.reason}; {costs}"),))
    if unfused.fits and unfused.seconds <= fused.seconds:
        return replace(unfused.plan, rejected=(("fused", costs),))
    return replace(fused.plan, rejected=(("unfused", costs if unfused.fits else unfused.plan.notes[-1]),))


def _ms(way: _Way) -> str:
    return f"{way.seconds * 1e3:,.2f} ms"


def _plan(
    problem: ChainProblem, method: str, reason: str, steps: Sequence[NumpyStep] = (), sizes: Mapping[str, int] = {}
) -> Plan:
    notes = tuple(dict.fromkeys(note for layer in problem.layers for note in layer.notes))
    return problem.planned(steps, sizes, method=method, reason=reason, notes=notes)


# --- unfused: whole images


def _unfused(problem: ChainProblem) -> _Way:
    """Layer by layer, of as many samples at a time as leave the loops what they need.

    Where the images of one sample leave too little, they come on top of the limit.
    """
    limit, batch = problem.limit, problem.layers[-1].geometry.batch
    one = sum(_slot_bytes(_of_samples(problem.layers, 1)))
    samples = even_part(batch, limit // (2 * one) if one else batch)
    while True:
        try:
            return _layer_by_layer(problem, samples, beside_images=True)
        except ValueError:
            if samples == 1:
                return _layer_by_layer(problem, samples, beside_images=False)
            samples = even_part(batch, samples // 2)


def _layer_by_layer(problem: ChainProblem, samples: int, *, beside_images: bool) -> _Way:
    """So many samples at a time; the images between count against the limit, or come on top of it."""
    between = _slot_bytes(_of_samples(problem.layers, samples))
    limit = problem.limit - sum(between) * beside_images
    if limit < 0:
        raise NotApplicable("the images between layers pass the limit")
    counts = [samples, problem.layers[-1].geometry.batch % samples]
    plans = tuple(
        tuple(plan_conv(replace(layer, workspace_limit=limit)) for layer in _of_samples(problem.layers, count))
        for count in counts
        if count
    )
    loop = LayersLoop(problem, samples, plans)
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)}
    sizes["blocks"] = max(plan.workspace_bytes for plan in chain.from_iterable(plans))
    plan = _plan(problem, "unfused", "one layer after the other", (loop,), sizes)
    if not beside_images:
        size, of = sum(between), "one sample" if samples == 1 else f"{samples} samples"
        note = (
            f"the images between layers take {size:,} bytes for {of}, beyond the workspace limit of {problem.limit:,}"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    moved = 2 * problem.intermediate_bytes if sum(between) > TILE_BYTES else 0
    calls = loop.times * (len(problem.layers) * PART_SECONDS + sum(map(_block_seconds, plans[0])))
    whole = problem.layers[-1].geometry.batch // samples
    flops = sum(times * step.flops for times, own in zip((whole, 1), plans) for layer in own for step in layer.steps)
    arithmetic = flops / max(1, problem.host.threads) / _FLOPS
    return _Way(plan, calls + moved / IMAGE_BYTES + arithmetic, beside_images)


def _of_samples(layers: Sequence[ConvProblem], count: int) -> tuple[ConvProblem, ...]:
    """The layers for some of the samples."""
    return tuple(
        replace(
            layer,
            geometry=replace(layer.geometry, batch=count),
            xs=tuple(x.samples(0, count) for x in layer.xs),
            out=layer.out.samples(0, count),
            residual=layer.residual and layer.residual.samples(0, count),
        )
        for layer in layers
    )


def _slot_bytes(layers: Sequence[ConvProblem]) -> list[int]:
    """Bytes of the memory, at most two pieces, that the images between take turns in."""
    sizes = [layer.out.nbytes for layer in layers[:-1]]
    return [max(sizes[first::2]) for first in range(min(2, len(sizes)))]


# --- fused: tiles


def _fused(problem: ChainProblem) -> _Way:
    """Tiles of about `TILE_BYTES`, or smaller ones where these take less time, or leave the loops what they need."""
    if len(problem.layers) == 1:
        raise NotApplicable("a single layer has no neighbour")
    for i, layer in enumerate(problem.layers):
        if layer.geometry.padding_mode != "constant":
            raise NotApplicable(f"layer {i} is padded by {layer.geometry.padding_mode!r}")
    geometry = problem.layers[-1].geometry
    batch, extent = geometry.batch, geometry.out_size[_axis(geometry)]
    per_sample = max(1, problem.intermediate_bytes // batch)
    samples = even_part(batch, TILE_BYTES // per_sample)
    rows = even_part(extent, extent * TILE_BYTES // per_sample)
    best: _Way | None = None
    refusal = NotApplicable("there are no tiles")
    while True:
        ways: list[_Way] = []
        for threads in sorted({1, min(problem.host.threads, _MOST_THREADS)}, reverse=True):
            try:
                ways.append(_tiled(problem, (samples, rows), threads))
            except ValueError as reason:
                refusal = NotApplicable(str(reason))
        now = min(ways, key=lambda way: way.seconds, default=None)
        if best and now and now.seconds >= best.seconds:
            return best
        best = now or best
        if samples == rows == 1:
            break
        if samples > 1:
            samples = even_part(batch, samples // 2)
        else:
            rows = even_part(extent, rows // 2)
    if best is None:
        raise refusal
    return best


def _axis(geometry: ConvGeometry) -> int:
    """The axis that rows are counted along: the longest, where the windows of a tile reach over its ends least often."""
    return max(range(3), key=lambda axis: (geometry.out_size[axis], -axis))


def _tiled(problem: ChainProblem, tile: tuple[int, int], threads: int, spared: int = 0) -> _Way:
    """The loop over tiles of (samples, rows); ValueError where its workspace passes the limit.

    The parts are planned with `spared` bytes less than there are: for memory that they cannot share.
    """
    layers = problem.layers
    geometries = tuple(layer.geometry for layer in layers)
    axis = _axis(geometries[-1])
    groups, rows = -(-geometries[-1].batch // tile[0]), geometries[-1].out_size[axis]
    bands = min(-(-threads // groups), -(-rows // tile[1]))
    workers = min(threads, groups * bands)
    loop = ChainLoop(problem, tile, bands, workers)
    parts = [
        part
        for samples, band in product(loop.sample_counts, _bands_to_plan(geometries, axis, loop.row_ranges))
        for part in tiles_to_plan(geometries, axis, samples, band, tile[1])
    ]
    rows_held = tuple(max(len(part[i].reads) for part in parts) for i in range(1, len(layers)))
    held = [
        _rows(layer.out, axis, count).samples(0, tile[0]).in_c_order(layer.out.dtype)
        for layer, count in zip(layers, rows_held)
    ]
    between = [workers * image.nbytes for image in held]
    kept = _kept_rows(parts)
    moved = max(_rows(image, axis, rows).nbytes for image, rows in zip(held, kept))  # by way of a copy
    weights = sum(_copied(layer) for layer in layers)
    limit = problem.limit_with(weights)
    fixed = sum(between) + weights + workers * moved
    if fixed > limit:
        raise _too_large(tile, fixed, problem)
    loops: list[tuple[ConvLoop, ...]] = []
    blocks = 0.0
    scratch: dict[tuple[str, type[ConvLoop]], int] = {}
    for i, layer in enumerate(layers):
        own = {part[i].geometry: part[i] for part in parts if part[i].outputs}
        left, inner = (limit - fixed) // workers - spared, threads // workers
        plans = [
            plan_conv(_part_of(layer, piece, axis, held[i - 1 : i], held[i : i + 1], inner, left))
            for piece in own.values()
        ]
        loops.append(tuple(step for plan in plans for step in plan.steps if isinstance(step, ConvLoop)))
        blocks += max(map(_block_seconds, plans), default=0)
        # Layers of one dtype and way use the same memory, but one's columns and another's tile lie in it side by side.
        most = max((plan.workspace_bytes for plan in plans), default=0)
        most += max((part_loop.threads * part_loop.tile_bytes for part_loop in loops[-1]), default=0)
        for kind in {(layer.x_dtype, type(part_loop)) for part_loop in loops[-1]}:
            scratch[kind] = max(scratch.get(kind, 0), most)
    needed = fixed + workers * sum(scratch.values())
    if needed > limit:
        if not spared:
            return _tiled(problem, tile, threads, -(-(needed - limit) // (workers * len(scratch))))
        raise _too_large(tile, needed, problem)
    loop = replace(loop, loops=tuple(loops), held=rows_held)
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)}
    sizes |= {"weights": weights, "blocks": needed - weights - sum(between)}
    plan = _plan(problem, "fused", f"tiles of {tile[0]} samples x {tile[1]} rows go through all layers", (loop,), sizes)
    twice = (bands - 1) * sum(
        count * layer.flops / layer.geometry.out_size[axis] for count, layer in zip(kept, layers) if count
    )
    calls = loop.tiles_count * (len(layers) * PART_SECONDS + blocks)
    return _Way(plan, calls + (problem.flops + twice) / workers / _FLOPS)


def _block_seconds(plan: Plan) -> float:
    """Seconds that the calls of NumPy for a layer's blocks take, however little they compute."""
    loops = [step for step in plan.steps if isinstance(step, ConvLoop)]
    return sum(loop.rounds * (loop.geometry.taps if plan.method == "direct" else 1) * BLOCK_SECONDS for loop in loops)


def _too_large(tile: tuple[int, int], needed: int, problem: ChainProblem) -> NotApplicable:
    return NotApplicable(
        f"a tile of {tile[0]} samples x {tile[1]} rows needs {needed:,} bytes of workspace, the limit is {problem.limit:,}"
    )


def _kept_rows(parts: Sequence[tuple[Piece, ...]]) -> list[int]:
    """The most rows of each image between that are kept from one tile to the next."""
    return [
        max((len(part[i + 1].reads) - len(part[i].outputs) for part in parts if part[i].outputs), default=0)
        for i in range(len(parts[0]) - 1)
    ]


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
        allow_fft=False,  # which would transform the weight for every part
    )


def _rows(image: Operand, axis: int, rows: int) -> Operand:
    """An image with so many rows of its own."""
    return replace(image, shape=image.shape[: 2 + axis] + (rows,) + image.shape[3 + axis :])


def _copied(layer: ConvProblem) -> int:
    """Bytes of the weight where it is not what the loops read: C-ordered, in the dtype they compute with."""
    weight = layer.weight.in_c_order(accumulator(layer.weight_dtype))
    return 0 if (weight.dtype, weight.strides) == (layer.weight.dtype, layer.weight.strides) else weight.nbytes


# --- runs -----------------------------------------------------------------------------------------------------


def _image(layout: Operand, memory: np.ndarray) -> np.ndarray:
    """An image of five axes in this memory."""
    strides = [step * layout.itemsize for step in layout.strides]
    return np.ndarray(layout.shape, dtype_from_name(layout.dtype), memory, 0, strides)


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
        #: What a layer's tiles have in common: its weight, as they compute with it, its bias and its prologue's arrays.
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
