"""A result of Dask arrays as tasks: one task per chunk, or one call in place of all tasks.

::

    chunks of x     |........|........|........|     a result chunk's sources: chunks of x, whole or cut (`dask_chunks`)
                       \\      / \\      / \\
    tasks            [  0  ]  [  1  ]  [  2  ]       each task is a library call on a block
                        |        |        |
    result          |........|........|........|     separate chunks, or parts of one array (`dask_out`)

Tasks are created on demand: a result that one call computes needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, product
from typing import Any, NamedTuple
from uuid import uuid4

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

import cupyconv
from cupyconv.call.operation import CheckedCall
from cupyconv.call.options import Settings, current_settings
from cupyconv.interop.dask_axes import Axis, Need, axes_of
from cupyconv.interop.dask_chunks import Block, Cut, Image, borders_of, chunks_in_memory, in_one_array
from cupyconv.interop.dask_out import LazyArray, Out
from cupyconv.interop.dask_workers import in_threads_of

#: Arguments that determine which elements are read: each block has its own values.
_GEOMETRY = ("padding", "padding_mode", "output_padding", "output_shape", "ceil_mode")


@dataclass(frozen=True)
class _Call:
    """The part that all tasks of a graph share."""

    function: Callable[..., Any]
    keywords: dict[str, Any]  # including arrays in memory
    settings: Settings
    likes: tuple[Any, ...]  # an empty array of each image's library and dtype, the residual's at the end
    out: Out | None = None  # the array for the whole result


@dataclass(frozen=True)
class _Part:
    """The task that computes a chunk of the result."""

    blocks: tuple[Block, ...]
    residual: Block | None
    keywords: dict[str, Any]
    rows: dict[str, slice] | None  # the channels of arrays in memory, if the chunk has only some
    region: tuple[slice, ...]  # the chunk's place in the result

    def __call__(self, call: _Call, chunks: list[Any]) -> Any:
        if isinstance(call.likes[0], np.ndarray):
            return in_threads_of(1, call.settings, partial(self._compute, call, chunks))
        with cupyconv.options(**call.settings._asdict()):
            return self._compute(call, chunks)

    def _compute(self, call: _Call, chunks: list[Any]) -> Any:
        each = iter(chunks)
        images = [block.of(each, call.likes[block.image]) for block in self.blocks]
        keywords = {**call.keywords, **self.keywords}
        if self.residual is not None:
            keywords["residual"] = self.residual.of(each, call.likes[-1])
        if self.rows is not None:
            keywords = self._with_rows(keywords)
        if call.out is not None:
            keywords["out"] = call.out.part(self.region, images, keywords.get("residual"))
        return call.function(images if len(images) > 1 else images[0], **keywords)

    def _with_rows(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments, with only the needed channels of their arrays."""
        assert self.rows is not None
        some = {name: keywords[name][self.rows[name]] for name in ("weight", "bias") if keywords.get(name) is not None}
        if keywords.get("prologue") is not None:
            *vectors, activation = keywords["prologue"]
            parts = (vector if vector is None else vector[self.rows["prologue"]] for vector in vectors)
            some["prologue"] = (*parts, activation)
        return {**keywords, **some}


#: Tasks by chunk numbers, each with the keys of its sources.
_Parts = dict[tuple[int, ...], tuple[_Part, list[Any]]]


class _Made(NamedTuple):
    """The tasks of a result, and the pieces that are cut for them."""

    parts: _Parts
    cuts: dict[Any, tuple[Cut, Any]]  # small pieces of chunks, for tasks that need no more


class _LazyLayer(Layer):
    """A graph layer that creates its tasks on demand."""

    def __init__(self, tasks: Callable[[], Mapping[Any, Any]]) -> None:
        super().__init__()
        self._make = tasks

    @cached_property
    def _tasks(self) -> Mapping[Any, Any]:
        return self._make()

    def is_materialized(self) -> bool:
        return "_tasks" in vars(self)

    def __getitem__(self, key: Any) -> Any:
        return self._tasks[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def get_output_keys(self) -> Set[Any]:
        return self._tasks.keys()

    def __reduce__(self) -> Any:
        return MaterializedLayer, (dict(self._tasks), self.annotations, self.collection_annotations)


class Tasks:
    """A result that creates its tasks on demand."""

    def __init__(
        self,
        function: Callable[..., Any],
        checked: CheckedCall,
        which: int,
        xs: Sequence[da.Array],
        residual: da.Array | None,
        arguments: dict[str, Any],
        out: Any,
    ) -> None:
        self._function, self._arguments, self._settings = function, arguments, current_settings()
        self._has_residual = residual is not None
        self._out = out
        # A result with `out` gets a unique name: a cached result of the same name would not have been written to `out`.
        known_by = function.__name__, xs, residual, arguments, self._settings
        self._token = tokenize(known_by) if out is None else uuid4().hex
        self._given = [*xs, *([] if residual is None else [residual])]
        self._channel = channel = int(checked.axes.batched)  # the axis of channels
        self._axes = axes_of(function, checked, which, xs)
        self._merged = [0, *accumulate(x.shape[channel] for x in xs)]
        borders = [borders_of(sizes) for sizes in xs[0].chunks]
        borders[channel] = [
            first + border for first, x in zip(self._merged, xs) for border in borders_of(x.chunks[channel])
        ]
        self._ranges = [axis.cut(own) for axis, own in zip(self._axes, borders)]
        self._meta = np.empty_like(xs[0]._meta, shape=(0,) * len(borders), dtype=checked.results[which].dtype)

    def array(self) -> da.Array:
        """Return the result, in separate chunks or in `out`."""
        return self._array(self._token, self._out)

    def into(self, out: Any) -> da.Array:
        """Return the result, computed into this array."""
        return self._array(uuid4().hex, out)

    def _array(self, token: str, out: Any) -> da.Array:
        name, common, halo = f"{self._function.__name__}-{token}", f"call-{token}", f"halo-{self._token}"
        call = self._call(out)
        layers: dict[str, Any] = {
            halo: _LazyLayer(lambda: self._made.cuts),
            common: MaterializedLayer({common: call}),
            name: _LazyLayer(
                lambda: {(name, *numbers): (part, common, keys) for numbers, (part, keys) in self._made.parts.items()}
            ),
        }
        names = {x.name for x in self._given}
        needed = {halo: names, common: set(), name: {halo, common, *names}}
        for x in self._given:
            layers.update(x.dask.layers)
            needed.update(x.dask.dependencies)
        chunks = tuple(tuple(stop - first for first, stop in own) for own in self._ranges)
        arguments = HighLevelGraph(layers, needed), name, chunks
        return LazyArray.of(self, call.out, *arguments, meta=self._meta)

    def in_one_call(self, out: Any, workers: int) -> Any:
        """Return the result of one call with `workers` threads, or None if an input is not stored in one array.

        One call reads and writes whole arrays in order, whereas chunks are short runs, and there is nothing to
        schedule.
        """
        arrays = [in_one_array(x) for x in self._given]
        if any(array is None for array in arrays):
            return None
        arguments = {**self._arguments, "out": out}
        if self._has_residual:
            arguments["residual"] = arrays.pop()
        x = arrays if len(arrays) > 1 else arrays[0]
        return in_threads_of(workers, self._settings, partial(self._function, x, **arguments))

    def tasks_in_memory(self, out: Any) -> dict[Any, Any] | None:
        """Return independent tasks that write the result into `out`, or None if the inputs are not in memory."""
        chunks: dict[Any, Any] = {}
        for x in self._given:
            in_memory = chunks_in_memory(x)
            if in_memory is None:
                return None
            chunks |= in_memory
        call, parts = self._call(out), self._make(lends=False).parts
        return {
            numbers: (partial(part, call, [chunks[key] for key in keys]),) for numbers, (part, keys) in parts.items()
        }

    def _call(self, out: Any) -> _Call:
        fixed = {key: value for key, value in self._arguments.items() if key not in _GEOMETRY}
        likes = tuple(x._meta for x in self._given)
        return _Call(self._function, fixed, self._settings, likes, None if out is None else Out(out))

    @cached_property
    def _made(self) -> _Made:
        return self._make(lends=True)

    def _make(self, lends: bool) -> _Made:
        """Create all tasks.  With `lends`, extra tasks cut small pieces of chunks; otherwise chunks are read whole."""
        function, axes, channel, merged = self._function, self._axes, self._channel, self._merged
        halo = f"halo-{self._token}" if lends else None
        images = [Image(number, x, halo) for number, x in enumerate(self._given)]
        needs = [[axis.need(*part) for part in own] for axis, own in zip(axes, self._ranges)]
        parts: _Parts = {}
        for numbers in product(*(range(len(own)) for own in self._ranges)):
            lies = [own[number] for own, number in zip(self._ranges, numbers)]
            need = [own[number] for own, number in zip(needs, numbers)]
            blocks, keys = _merged_blocks(images[: len(merged) - 1], merged, axes, need, channel)
            added = None
            if self._has_residual:
                lengths = [stop - first for first, stop in lies]
                added, of_it = images[-1].block(lengths, [images[-1].runs(i, part) for i, part in enumerate(lies)])
                keys += of_it
            keywords = _of_block(function, need[channel + 1 :])
            rows = None
            if len(self._ranges[channel]) > 1:
                if "groups" in self._arguments:
                    keywords["groups"] = axes[channel].groups_in(lies[channel])
                rows = _rows(function, slice(need[channel].first, need[channel].stop), slice(*lies[channel]))
            region = tuple(slice(*part) for part in lies)
            parts[numbers] = _Part(blocks, added, keywords, rows, region), keys
        return _Made(parts, {key: (cut, cut.chunk) for image in images for key, cut in image.cuts.items()})


def _merged_blocks(
    images: Sequence[Image], merged: Sequence[int], axes: Sequence[Axis], need: Sequence[Need], channel: int
) -> tuple[tuple[Block, ...], list[Any]]:
    """Return the blocks that a result chunk merges, one per chunk of channels, and the keys of their chunks."""
    blocks: list[Block] = []
    keys: list[Any] = []
    lengths = [each.stop - each.first for each in need]
    for image, first, end in zip(images, merged, merged[1:]):
        wanted = max(first, need[channel].first) - first, min(end, need[channel].stop) - first
        runs = [
            image.runs(i, (each.first, each.stop), axis.mode)
            for i, (axis, each) in enumerate(zip(axes, need))
            if i != channel
        ]
        for run in image.runs(channel, wanted) if wanted[0] < wanted[1] else ():
            own = replace(run, at=slice(0, run.count))
            block, of_it = image.block(
                [*lengths[:channel], run.count, *lengths[channel + 1 :]], [*runs[:channel], [own], *runs[channel:]]
            )
            blocks.append(block)
            keys += of_it
    if not blocks:  # no channels at all
        lengths[channel] = 0
        blocks.append(Block(0, tuple(lengths), ((),), ()))
    return tuple(blocks), keys


def _of_block(function: Callable[..., Any], need: Sequence[Need]) -> dict[str, Any]:
    """Return the geometry arguments of a call on one block."""
    if function is cupyconv.linmerge:
        return {}
    keywords: dict[str, Any] = {"padding": tuple(each.padding for each in need)}
    if function is cupyconv.conv_transpose:
        keywords["output_padding"] = tuple(each.output_padding for each in need)
    return keywords


def _rows(function: Callable[..., Any], of_x: slice, of_result: slice) -> dict[str, slice]:
    """Return, per argument, the channels that a block with these channels of x and of the result needs."""
    weight = of_x if function is cupyconv.conv_transpose else of_result
    return {"weight": weight, "bias": of_result, "prologue": of_x}
