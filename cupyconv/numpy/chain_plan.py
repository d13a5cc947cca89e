"""A chain on NumPy: the tile that goes through all layers while it is in cache, or whole images one by one.

A tile is a run of rows of one sample, or some samples where an image is small.  Not fusing is a tile of whole
images.  Every part of a tile is a convolution of its own, and its loop is planned as that of any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from cupyconv.numpy.convolution_plan import BALANCE, plan_conv, tile_pixels
from cupyconv.numpy.loops import BlockLoop, ChainLoop
from cupyconv.numpy.rows import Piece, tiles
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import ChainProblem, ConvProblem, HostModel, NotApplicable, without_empty_inputs

#: Bytes of intermediate rows in a tile: what stays in a core's cache beside the columns that are made of it.
TILE_BYTES = 1 << 20


def plan_chain(problem: ChainProblem) -> Plan:
    """The plan of a chain; ValueError where ``fuse=True`` and nothing can be fused, or nothing fits the limit."""
    machine = problem.machine
    assert isinstance(machine, HostModel)
    problem = replace(problem, layers=(without_empty_inputs(problem.layers[0]), *problem.layers[1:]))
    last = problem.layers[-1]
    if last.out.nbytes == 0:
        rejected: tuple[tuple[str, str], ...] = ()
        chosen = _Draft("unfused", (), (), "the result is empty")
    else:
        chosen, rejected = _choose(problem)
    notes = tuple(dict.fromkeys(note for layer in problem.layers for note in layer.notes))
    return Plan(
        method=chosen.method, backend="numpy", device=str(machine), problem=problem.title, result=last.result,
        steps=chosen.steps, flops=problem.flops, bytes_moved=sum(step.bytes_moved for step in chosen.steps),
        minimal_bytes=problem.minimal_bytes, rejected=rejected, reason=chosen.reason, notes=notes + chosen.notes,
        bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic", workspace=chosen.workspace,
    )  # fmt: skip


@dataclass(frozen=True)
class _Draft:
    """One way to run a chain."""

    method: str
    steps: tuple[ChainLoop, ...]
    workspace: tuple[Buffer, ...]
    reason: str
    notes: tuple[str, ...] = ()


def _choose(problem: ChainProblem) -> tuple[_Draft, tuple[tuple[str, str], ...]]:
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


def _between(draft: _Draft) -> int:
    """Bytes of intermediate rows that are in memory."""
    return sum(buffer.nbytes for buffer in draft.workspace if buffer.name.startswith("layer["))


def _fused(problem: ChainProblem) -> _Draft:
    """Tiles of about `TILE_BYTES`, or the largest below that keep within the workspace limit."""
    layers, axis = problem.layers, _axis(problem.layers[-1].geometry)
    geometry = layers[-1].geometry
    batch, rows = geometry.batch, geometry.out_size[axis]
    a_sample = max(1, problem.intermediate_bytes // batch)
    samples = even_part(batch, TILE_BYTES // a_sample)
    rows = even_part(rows, rows * TILE_BYTES // a_sample)
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


def _unfused(problem: ChainProblem) -> _Draft:
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
    draft = _tiled(problem, (1, rows), problem.limit + size, is_fused=False)
    nbytes = _between(draft)
    note = f"the images between layers take {nbytes:,} bytes for one sample, beyond the workspace limit of {problem.limit:,}"
    return replace(draft, notes=(note,))


def _axis(geometry: ConvGeometry) -> int:
    """The axis that rows are counted along: the longest, where the windows of a tile reach over its ends least often."""
    return max(range(3), key=lambda axis: (geometry.out_size[axis], -axis))


def _tiled(problem: ChainProblem, tile: tuple[int, int], limit: int, *, is_fused: bool) -> _Draft:
    """The loop over tiles of (samples, rows); ValueError where its workspace passes `limit`."""
    layers = problem.layers
    geometries = tuple(layer.geometry for layer in layers)
    assert isinstance(problem.machine, HostModel)
    threads, axis = problem.machine.threads, _axis(geometries[-1])
    groups, rows = -(-geometries[-1].batch // tile[0]), geometries[-1].out_size[axis]
    bands = min(-(-threads // groups), -(-rows // tile[1])) if is_fused else 1
    workers = min(threads, groups * bands) if is_fused else 1
    loop = ChainLoop(
        inputs=tuple(x.name for x in layers[0].xs), layers=geometries, dtypes=tuple(layer.out.dtype for layer in layers),
        axis=axis, tile=tile, bands=bands, threads=workers, loops=(), held=(), flops=problem.flops,
        bytes_moved=problem.minimal_bytes + (0 if is_fused else 2 * problem.intermediate_bytes),
    )  # fmt: skip
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
    loops: list[tuple[BlockLoop, ...]] = []
    scratch: dict[tuple[str, str], int] = {}
    for i, layer in enumerate(layers):
        own = [part[i] for part in parts if part[i].outputs]
        plans = [
            plan_conv(_part_of(layer, piece, axis, held[i - 1 : i], held[i : i + 1], threads // workers, left))
            for piece in {piece.geometry: piece for piece in own}.values()
        ]
        loops.append(tuple(step for plan in plans for step in plan.steps if isinstance(step, BlockLoop)))
        # Layers of one dtype and body use the same memory, but one's columns and another's tile lie in it side by side.
        most = max((plan.workspace_bytes for plan in plans), default=0) + max(map(_tile_bytes, loops[-1]), default=0)
        for kind in {(layer.x_dtype, own_loop.body) for own_loop in loops[-1]}:
            scratch[kind] = max(scratch.get(kind, 0), most)
    needed = fixed + workers * sum(scratch.values())
    if needed > limit:
        raise NotApplicable(
            f"a tile of {tile[0]} samples x {tile[1]} rows needs {needed:,} bytes of workspace, the limit is {limit:,}"
        )
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)}
    sizes |= {"weights": weights, "blocks": needed - weights - sum(between)}
    words = (
        f"tiles of {tile[0]} samples x {tile[1]} rows go through all layers"
        if is_fused
        else "one layer after the other"
    )
    return _Draft(
        "fused" if is_fused else "unfused", (replace(loop, loops=tuple(loops), held=rows_held),),
        tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes), words,
    )  # fmt: skip


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
        layer, geometry=piece.geometry, xs=tuple(cut(x, len(piece.reads)) for x in read or layer.xs),
        weight=layer.weight.in_c_order(accumulator(layer.weight_dtype)), out=cut(written[0] if written else layer.out, outputs),
        residual=layer.residual and cut(layer.residual, outputs), machine=HostModel(threads), workspace_limit=limit,
    )  # fmt: skip


def _moved(held: Sequence[Operand], parts: Sequence[tuple[Piece, ...]], axis: int) -> int:
    """The most bytes of rows that are kept from one tile to the next: a copy of them is made where they overlap."""
    kept = [
        max((len(part[i + 1].reads) - len(part[i].outputs) for part in parts if part[i].outputs), default=0)
        for i in range(len(held))
    ]
    return max((_rows(image, axis, rows).nbytes for image, rows in zip(held, kept)), default=0)


def _tile_bytes(loop: BlockLoop) -> int:
    """Of what a block's columns are copied from."""
    pixels = loop.block[0] * tile_pixels(loop.geometry, loop.block)
    return loop.geometry.in_channels * pixels * ITEMSIZE[loop.x_dtype] if loop.body == "columns" else 0


def _rows(image: Operand, axis: int, rows: int) -> Operand:
    """An image with so many rows of its own."""
    return replace(image, shape=image.shape[: 2 + axis] + (rows,) + image.shape[3 + axis :])


def _copied(layer: ConvProblem) -> int:
    """Bytes of the weight where it is not what the loops read: C-ordered, in the dtype they compute with."""
    weight = layer.weight.in_c_order(accumulator(layer.weight_dtype))
    return 0 if (weight.dtype, weight.strides) == (layer.weight.dtype, layer.weight.strides) else weight.nbytes
