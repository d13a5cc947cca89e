"""Where the elements that a task needs are stored in chunks, and how they become one block.

::

    chunks          |........|........|........|
    a block              [---|--------|--]        a piece per chunk: the whole chunk, or a part that another task cut

If all pieces are stored in one NumPy array in the positions they have in the block, the block is a view of that array.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from math import prod
from mmap import mmap
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import MaterializedLayer
from numpy.lib.stride_tricks import as_strided

from cupyconv.call.dispatch import backend_for
from cupyconv.interop.dask_axes import Range
from cupyconv.numpy.windows import axis_segments


@dataclass(frozen=True)
class Run:
    """A run of elements of one chunk along an axis, and its place in a block.  One element may fill a longer place."""

    chunk: int
    elements: slice
    count: int  # number of elements read
    at: slice


def _runs(need: Range, size: int, mode: str, borders: Sequence[int]) -> list[Run]:
    """Return the runs that form a range of an axis of `size` elements.  `mode` defines the elements past its ends."""
    runs = []
    for at, elements in axis_segments(range(*need), size, 1, 0, mode):
        if elements is None:
            continue
        where = at.start
        for first, step, count in _progressions(elements, at.stop - at.start):
            while count:
                chunk = bisect_right(borders, first) - 1
                begin, end = borders[chunk], borders[chunk + 1]
                here = count if step == 0 else min(count, end - first if step > 0 else first - begin + 1)
                local = first - begin
                if step < 0:
                    read = slice(local, local - here if local >= here else None, -1)
                else:
                    read = slice(local, local + (here if step else 1))
                runs.append(Run(chunk, read, here if step else 1, slice(where, where + here)))
                first, where, count = first + step * here, where + here, count - here
    return runs


def _progressions(elements: slice | np.ndarray, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield first, step and count of stretches in which `count` indices go up by one, down by one, or repeat."""
    if isinstance(elements, slice):
        is_repeated = count > 1 and elements.stop == elements.start + 1
        yield elements.start, 0 if is_repeated else elements.step, count
        return
    steps = np.diff(elements)
    begin = 0
    while begin < len(elements):
        step = int(steps[begin]) if begin < len(steps) and abs(steps[begin]) <= 1 else 0
        end = begin + 1
        while end < len(elements) and steps[end - 1] == step:
            end += 1
        yield int(elements[begin]), step, end - begin
        begin = end


@dataclass(frozen=True)
class Block:
    """A part of an image, assembled from pieces of chunks: one per combination of the axes' runs, in C order.

    `cut` has, per piece, its number among the pieces that a `Cut` task returns, or None if the chunk arrives whole.
    """

    image: int
    shape: tuple[int, ...]
    axes: tuple[Sequence[Run], ...]
    cut: tuple[int | None, ...]

    def of(self, chunks: Iterator[Any], like: Any) -> Any:
        """Return the block: a view if it is one piece or part of one array, else a copy.  Missing parts are zero."""
        pieces = []
        for runs, number in zip(product(*self.axes), self.cut):
            chunk = next(chunks)
            pieces.append(chunk[tuple(run.elements for run in runs)] if number is None else chunk[number])
        if len(pieces) == 1 and (pieces[0].shape, pieces[0].dtype) == (self.shape, like.dtype):
            return pieces[0]
        for runs, piece in zip(product(*self.axes), pieces):
            _check(piece, tuple(run.count for run in runs), like.dtype)
        covered = prod(sum(run.at.stop - run.at.start for run in runs) for runs in self.axes) == prod(self.shape)
        if covered and isinstance(like, np.ndarray) and all(piece.dtype == like.dtype for piece in pieces):
            at = [[(run.at.start, run.at.stop) for run in runs] for runs in self.axes]
            if (view := _in_one_array(self.shape, pieces, at)) is not None:
                return view
        block = (np.empty_like if covered else np.zeros_like)(like, shape=self.shape)
        for runs, piece in zip(product(*self.axes), pieces):
            block[tuple(run.at for run in runs)] = piece
        return block


def _in_one_array(
    shape: tuple[int, ...], pieces: Sequence[np.ndarray], axes: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray | None:
    """Return a view of all pieces if one array stores them in order, else None.  `axes` has piece bounds per axis."""
    if not pieces:
        return None
    strides, whole, origin = pieces[0].strides, _owner(pieces[0]), _address(pieces[0])
    for piece, ranges in zip(pieces, product(*axes)):
        if piece.strides != strides or piece.shape != tuple([end - begin for begin, end in ranges]):
            return None
        place = origin + sum([begin * step for (begin, _), step in zip(ranges, strides)])
        if _address(piece) != place or _owner(piece) is not whole:
            return None
    return as_strided(pieces[0], shape, strides, writeable=False)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _check(piece: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse chunks that a copy silently alters: masks, units, imaginary parts, a broadcast axis of length one."""
    backend_for({"a chunk": piece})
    if piece.shape != shape or not np.can_cast(piece.dtype, dtype):
        raise ValueError(
            f"a chunk is {piece.dtype} of shape {piece.shape}, but its Dask array declares {dtype} of shape {shape}:"
            " pass the actual dtype and chunks to map_blocks or the function that made the array"
        )


def _owner(array: np.ndarray) -> Any:
    """Return the owner of an array's memory: another array, or the memory map of a file."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


@dataclass(frozen=True)
class Cut:
    """The task that cuts from a chunk what its neighbours need.  Copies do not keep the chunk in memory."""

    chunk: tuple[Any, ...]
    pieces: list[tuple[slice, ...]] = field(default_factory=list)

    def __call__(self, chunk: Any) -> list[Any]:
        pieces = [chunk[piece] for piece in self.pieces]
        return pieces if _is_part(chunk) else [piece.copy() for piece in pieces]


def _is_part(chunk: Any) -> bool:
    """Return whether a chunk is a view of a larger array, in memory or in a file, which stays in memory anyway."""
    owner = _owner(chunk) if isinstance(chunk, np.ndarray) else None
    if isinstance(owner, (np.ndarray, mmap)):
        return (owner.nbytes if isinstance(owner, np.ndarray) else len(owner)) >= 2 * chunk.nbytes
    return False


def borders_of(sizes: Sequence[int]) -> list[int]:
    """Return 0 and the positions where chunks of these sizes end."""
    return [0, *accumulate(sizes)]


def chunks_in_memory(x: da.Array) -> dict[Any, np.ndarray] | None:
    """Return the chunks of x by key if all are in memory as NumPy arrays of its dtype, else None."""
    layer = x.dask.layers.get(x.name)
    if not isinstance(layer, MaterializedLayer):
        return None
    keys = [(x.name, *numbers) for numbers in product(*map(range, x.numblocks))]
    chunks = [layer.get(key) for key in keys]
    are_numpys = all(type(chunk) is np.ndarray and chunk.dtype == x.dtype for chunk in chunks)
    return dict(zip(keys, chunks)) if are_numpys else None


def in_one_array(x: da.Array) -> np.ndarray | None:
    """Return all of x if its chunks are stored in order in one NumPy array, as `from_array` makes them, else None."""
    chunks = chunks_in_memory(x)
    if chunks is None:
        return None
    return _in_one_array(x.shape, [*chunks.values()], [[*pairwise(borders_of(sizes))] for sizes in x.chunks])


class Image:
    """A Dask array that a graph reads: its chunk borders, and the pieces that tasks of the layer `halo` cut from it."""

    def __init__(self, number: int, x: da.Array, halo: str | None) -> None:
        self.number, self.x = number, x
        self._borders = [borders_of(sizes) for sizes in x.chunks]
        self.cuts: dict[Any, Cut] = {}
        self._halo = halo
        self._known: dict[Any, list[Run]] = {}

    def runs(self, axis: int, need: Range, mode: str = "constant") -> list[Run]:
        """Return the runs of the elements needed along an axis, cached for all result chunks with the same need."""
        key = axis, need
        if key not in self._known:
            self._known[key] = _runs(need, self.x.shape[axis], mode, self._borders[axis])
        return self._known[key]

    def block(self, shape: Sequence[int], axes: Sequence[Sequence[Run]]) -> tuple[Block, list[Any]]:
        """Return a block and the keys of its sources.  With a halo layer, pieces below half a chunk are cut there."""
        numbers: list[int | None] = []
        keys: list[Any] = []
        for runs in product(*axes):
            key = (self.x.name, *(run.chunk for run in runs))
            whole = prod(sizes[run.chunk] for sizes, run in zip(self.x.chunks, runs))
            if self._halo is None or 2 * prod(run.count for run in runs) >= whole:
                numbers.append(None)
                keys.append(key)
            else:
                pieces = self.cuts.setdefault((self._halo, self.number, *key[1:]), Cut(key)).pieces
                numbers.append(len(pieces))
                keys.append((self._halo, self.number, *key[1:]))
                pieces.append(tuple(run.elements for run in runs))
        return Block(self.number, tuple(shape), tuple(axes), tuple(numbers)), keys
