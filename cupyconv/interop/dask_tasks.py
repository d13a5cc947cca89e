"""A result of Dask arrays as tasks: one for each of its chunks, or one call in the place of all.

::

    chunks of x     |........|........|........|     what a chunk of the result reads: chunks of x, whole or cut (`dask_chunks`)
                       \\      / \\      / \
    tasks            [  0  ]  [  1  ]  [  2  ]       each is a call of the library on a block
                        |        |        |
    result          |........|........|........|     chunks of their own, or parts of one array (`dask_out`)

Tasks are made when somebody asks for them: a result that is computed at once needs none.
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

#: Arguments that say which elements are read: of each block its own.
_GEOMETRY = ("padding", "padding_mode", "output_padding", "output_shape", "ceil_mode")


@dataclass(frozen=True)
class _Call:
    """What all tasks of a graph have in common."""

    function: Callable[..., Any]
    keywords: dict[str, Any]  # arrays in memory among them
    settings: Settings
    likes: tuple[Any, ...]  # an empty array of each image's library and dtype, the residual's at the end
    out: Out | None = None  # where all of the result is written


@dataclass(frozen=True)
class _Part:
    """The task that computes a chunk of the result."""

    blocks: tuple[Block, ...]
    residual: Block | None
    keywords: dict[str, Any]
    rows: dict[str, slice] | None  # the channels of arrays in memory, where the chunk has not all of them
    region: tuple[slice, ...]  # where the chunk is in the result

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
        """The arguments with those channels of their arrays that are needed here."""
        assert self.rows is not None
        some = {name: keywords[name][self.rows[name]] for name in ("weight", "bias") if keywords.get(name) is not None}
        if keywords.get("prologue") is not None:
            *vectors, activation = keywords["prologue"]
            parts = (vector if vector is None else vector[self.rows["prologue"]] for vector in vectors)
            some["prologue"] = (*parts, activation)
        return {**keywords, **some}


#: Tasks by the numbers of their chunks, each with the keys of what it reads.
_Parts = dict[tuple[int, ...], tuple[_Part, list[Any]]]


class _Made(NamedTuple):
    """The tasks of a result, and what they need cut."""

    parts: _Parts
    cuts: dict[Any, tuple[Cut, Any]]  # a little of a chunk, for tasks that read no more of it


class _LazyLayer(Layer):
    """A layer of a graph, whose tasks are made when somebody asks for them."""

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
    """A result, whose tasks are made when somebody asks for them."""

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
        # What is written to `out` is like no other result: one that has been computed already has not written there.
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
        """The result, in chunks of their own or in `out`."""
        return self._array(self._token, self._out)

    def into(self, out: Any) -> da.Array:
        """The result in this array."""
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
        """The result of one call with so many threads; None where not all that it reads lies in arrays already.

        It reads and writes whole arrays in order, of which chunks are short runs, and there is nothing to schedule.
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
        """Tasks that write the result into `out` and need no others, where all chunks that they read are in memory already."""
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
        """All tasks; chunks lend others a little of them, cut by tasks of their own, or are read whole by all."""
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
    """The blocks that are merged for a chunk of the result, one for each chunk of channels, and the keys of their chunks."""
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
    """What a call on one block is told of its geometry."""
    if function is cupyconv.linmerge:
        return {}
    keywords: dict[str, Any] = {"padding": tuple(each.padding for each in need)}
    if function is cupyconv.conv_transpose:
        keywords["output_padding"] = tuple(each.output_padding for each in need)
    return keywords


def _rows(function: Callable[..., Any], of_x: slice, of_result: slice) -> dict[str, slice]:
    """The channels that arrays in memory have, of a block with these channels of x and of the result."""
    weight = of_x if function is cupyconv.conv_transpose else of_result
    return {"weight": weight, "bias": of_result, "prologue": of_x}
