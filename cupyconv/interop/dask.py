"""`conv`, `linmerge`, `conv_transpose` and `max_pool` of Dask arrays, chunk by chunk: for data larger than memory.

A result is lazy, and one task computes a chunk of it, by the function of the same name on what the chunk needs::

    chunks of x    |........|........|........|        a chunk of the result reads its own chunk of x
    one of y             ===|========|==               and a halo: the rows next to it, cut from its neighbours

Where the chunks are views of one NumPy array, as those of `dask.array.from_array` are, so is the chunk with its halo.

Along each axis the geometry of the whole call says what a chunk of the result reads, to the element: stride and dilation go
on across borders of chunks, padding is at the ends of the whole image alone, and no chunk overlaps another.  Where a
halo is thin, one more task for each chunk of x copies what its neighbours need, so that they hold that and not the chunk.

Chunks are NumPy's or CuPy's arrays.  Settings (`cupyconv.options`) are those in force where the function is called, not where
the result is computed.  Dask's workers are the threads: within a task a call on NumPy takes one thread, and BLAS too,
unless ``options(threads=...)`` said more.  From a Zarr volume to another, of which memory holds some chunks at a time::

    import dask.array
    from cupyconv.interop.dask import conv

    volume = dask.array.from_zarr("volume.zarr")  # (C, depth, height, width), in chunks of 64 or more along each axis
    conv(volume, weight, padding="same", activation="relu").to_zarr("result.zarr")

`vjp`, `conv_chain` and recurrent layers are not here: `dask.array.map_blocks` does what needs no halo.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from math import isnan, prod
from mmap import mmap
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from numpy.lib.stride_tricks import as_strided

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import CheckedCall
from cupyconv.call.options import Settings, current_settings
from cupyconv.numpy.threads import BLAS
from cupyconv.numpy.windows import axis_segments
from cupyconv.problem.passes import PoolingProblem
from cupyconv.problem.problems import ProductsProblem
from cupyconv.typing import ActivationLike, Array, ArrayOrList, Padding, PerAxis, PrologueLike


def conv(
    x: da.Array | Sequence[da.Array],
    weight: Array,
    bias: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    residual: da.Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
) -> da.Array:
    """`cupyconv.conv` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As of `cupyconv.conv`, chunked along any axes.  The arrays of a sequence may be chunked each in its own way; they
        are not rechunked, and those of a task are merged without a concatenation, chunks of channels too.
    weight, bias, stride, padding, padding_mode, dilation, groups, activation, prologue, method
        As of `cupyconv.conv`: arrays in memory, of the library of x's chunks.
    residual : dask.array.Array, optional
        Of the result's shape, chunked in any way.

    Returns
    -------
    dask.array.Array
        Chunked as x is, or the first of the sequence: chunks of the result are as large as those of x divided by the
        stride.  It has one chunk of channels, or with groups one for each chunk of x's channels that ends with a group.

    Raises
    ------
    TypeError, ValueError
        As `cupyconv.conv`, at once and not when the result is computed; TypeError where x or residual is not a Dask
        array, or another argument is one; ValueError for chunks of unknown size.

    Notes
    -----
    Sums are those of the call in memory: equal for integers, else up to rounding, because blocks of another size may be
    computed by another method.  A chunk with less than 64 elements along an axis spends more time on its halo, and on Dask,
    than it need; a kernel may reach over several chunks.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from cupyconv.interop.dask import conv
    >>> x = da.arange(12, chunks=4, dtype=np.float64)[None, None]
    >>> y = conv(x, np.ones((1, 1, 3)), padding="same")
    >>> y.chunks[-1], y.compute()[0, 0].tolist()
    ((4, 4, 4), [1.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0, 27.0, 30.0, 21.0])
    """
    return _lazy(cupyconv.conv, "x", locals())


def linmerge(
    xs: Sequence[da.Array],
    weight: Array,
    bias: Array | None = None,
    *,
    activation: ActivationLike = None,
    residual: da.Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
) -> da.Array:
    """`cupyconv.linmerge` of Dask arrays, lazily.

    Parameters
    ----------
    xs : sequence of dask.array.Array, or one
        As of `cupyconv.linmerge`, each chunked in its own way, as for `conv`.
    weight, bias, activation, residual, prologue, method
        As for `conv`.

    Returns
    -------
    dask.array.Array
        As of `conv`.

    Raises
    ------
    TypeError, ValueError
        As `conv`.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from cupyconv.interop.dask import linmerge
    >>> velocity, pressure = da.ones((1, 3, 8), chunks=(1, 3, 4)), da.ones((1, 1, 8), chunks=(1, 1, 2))
    >>> linmerge([velocity, pressure], np.array([[1.0, 1.0, 1.0, 5.0]])).compute()[0, 0].tolist()
    [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    """
    return _lazy(cupyconv.linmerge, "xs", locals())


def conv_transpose(
    x: da.Array | Sequence[da.Array],
    weight: Array,
    bias: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: PerAxis | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    method: str = "auto",
) -> da.Array:
    """`cupyconv.conv_transpose` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As for `conv`.
    weight, bias, stride, padding, output_padding, output_shape, dilation, groups, activation, method
        As of `cupyconv.conv_transpose`: arrays in memory, of the library of x's chunks.

    Returns
    -------
    dask.array.Array
        As of `conv`; chunks of the result are `stride` times as large as those of x.

    Raises
    ------
    TypeError, ValueError
        As `conv`.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from cupyconv.interop.dask import conv_transpose
    >>> y = conv_transpose(da.ones((1, 1, 4), chunks=2), np.ones((1, 1, 2)), stride=2)
    >>> y.chunks[-1], y.compute()[0, 0].tolist()
    ((4, 4), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    return _lazy(cupyconv.conv_transpose, "x", locals())


def max_pool(
    x: da.Array | Sequence[da.Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> ArrayOrList:
    """`cupyconv.max_pool` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As of `cupyconv.max_pool`, each chunked in its own way.
    kernel_shape, stride, padding, dilation, ceil_mode
        As of `cupyconv.max_pool`.

    Returns
    -------
    dask.array.Array, or list of them where `x` is a sequence
        Each chunked as its own image is: chunks are as large as those of x divided by the stride.

    Raises
    ------
    TypeError, ValueError
        As `conv`.

    Examples
    --------
    >>> import dask.array as da
    >>> from cupyconv.interop.dask import max_pool
    >>> y = max_pool(da.arange(12, chunks=5, dtype=float)[None, None], 3)
    >>> y.chunks[-1], y.compute()[0, 0].tolist()
    ((2, 1, 1), [2.0, 5.0, 8.0, 11.0])
    """
    return _lazy(cupyconv.max_pool, "x", locals())


# --- a call, checked ------------------------------------------------------------------------------------------


def _lazy(function: Callable[..., Any], images: str, arguments: dict[str, Any]) -> Any:
    """The function's result; `arguments` are all by name, `images` is the name of the first."""
    given = arguments.pop(images)
    listed = isinstance(given, (list, tuple))
    xs = [_dask_array(f"{images}[{i}]" if listed else images, x) for i, x in enumerate(given if listed else [given])]
    residual = arguments.pop("residual", None)
    stand_ins = _stand_ins(arguments, xs[0] if xs else None)
    if residual is not None:
        stand_ins["residual"] = _stand_in(_dask_array("residual", residual))
    stand_ins[images] = [_stand_in(x) for x in xs] if listed else _stand_in(xs[0])
    checked = checked_call(function, **stand_ins)
    if arguments.get("method", "auto") != "auto" and isinstance(xs[0]._meta, np.ndarray):
        checked.plan()  # refuses a method that does not apply
    if function is cupyconv.max_pool:
        results = [_graph(function, checked, i, [x], None, arguments) for i, x in enumerate(xs)]
        return results if listed else results[0]
    return _graph(function, checked, 0, xs, residual, arguments)


def _dask_array(name: str, x: Any) -> Any:
    """The argument, which must be a Dask array of known chunks."""
    if not isinstance(x, da.Array):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"{name} must be a Dask array, given {kind}: dask.array.from_array and dask.array.from_zarr make one;"
            " cupyconv's own functions compute arrays in memory"
        )
    if any(map(isnan, x.shape)):
        raise ValueError(f"{name} has shape {x.shape}, needed chunks of known size: {name}.compute_chunk_sizes()")
    return x


def _library(array: Any) -> str | None:
    """Which library an array in memory is of; None of what is no array that we know."""
    known = "numpy" if isinstance(array, np.ndarray) else type(array).__module__.partition(".")[0]
    return known if known in ("numpy", "cupy") and hasattr(array, "shape") else None


def _stand_in(array: Any) -> Any:
    """An array of the same shape and dtype without elements of its own; anything else as it is, for the check."""
    if isinstance(array, da.Array) or _library(array):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return array


def _stand_ins(arguments: Mapping[str, Any], x: da.Array | None) -> dict[str, Any]:
    """The arguments that must be in memory, where chunks of x are, with stand-ins for their arrays."""
    library = None if x is None else _library(x._meta)

    def checked(name: str, value: Any) -> Any:
        if name == "prologue" and isinstance(value, (tuple, list)):
            return tuple(checked(f"prologue[{i}]", part) for i, part in enumerate(value))
        if isinstance(value, da.Array):
            raise TypeError(f"{name} must be an array in memory, given a Dask array: {name}.compute() makes one of it")
        if library and _library(value) and _library(value) != library:
            raise TypeError(
                f"{name} is an array of {_library(value)}, chunks of x are {library}'s: both must be of one"
            )
        return _stand_in(value)

    return {name: checked(name, value) for name, value in arguments.items()}


# --- what a chunk of the result reads -------------------------------------------------------------------------

Range = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True)
class _Need:
    """What a call on one block takes along an axis: elements of x, and what it pads and adds."""

    first: int
    stop: int
    padding: Range = (0, 0)
    output_padding: int = 0


@dataclass(frozen=True)
class _Axis:
    """An axis of x, of `size` elements, and of the result, of `out`: the windows of a convolution or of pooling.

    Element p of the result reads `span` elements of x from ``p * stride - before`` on.
    """

    size: int
    out: int
    stride: int = 1
    span: int = 1
    before: int = 0
    mode: str = "constant"

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """The chunks of the result for these borders of chunks of x: windows go by their middle."""
        left_over = self.size - (self.out - 1) * self.stride - 1
        return _ranges(self.out, [-((left_over // 2 - border) // self.stride) for border in borders])

    def need(self, first: int, stop: int) -> _Need:
        """What this range of the result needs.  Zeros are padded by the call, other elements are read where they are."""
        begin = first * self.stride - self.before
        end = max(begin, (stop - 1) * self.stride - self.before + self.span)
        if self.mode != "constant":
            return _Need(begin, end)
        inside = min(max(0, begin), self.size), max(0, min(end, self.size))
        if inside[0] >= inside[1]:
            return _Need(0, 0, (end - begin, 0))
        return _Need(*inside, (inside[0] - begin, end - inside[1]))


@dataclass(frozen=True)
class _StampedAxis(_Axis):
    """The same of a transposed convolution: element p of x is stamped on `span` elements of the result."""

    dilation: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        left_over = self.out - self.size * self.stride
        return _ranges(self.out, [border * self.stride + left_over // 2 for border in borders])

    def need(self, first: int, stop: int) -> _Need:
        """The stamps that reach into this range.  What they cover before it is cut off, what they do not cover is added."""
        earliest = -((self.span - 1 - first - self.before) // self.stride)
        begin = max(0, min(earliest, (first + self.before) // self.stride))  # not past `first`, where stamps leave gaps
        end = (stop - 1 + self.before) // self.stride + 1  # zeros where that is past the last
        if begin < self.size < end and self._added(first, stop, begin, self.size) < max(self.stride, self.dilation):
            end = self.size
        covered = (end - 1 - begin) * self.stride + self.span
        cut, added = first + self.before - begin * self.stride, self._added(first, stop, begin, end)
        return _Need(begin, end, (cut, covered + added - cut - (stop - first)), added)

    def _added(self, first: int, stop: int, begin: int, end: int) -> int:
        """How many elements of the result are past what these stamps cover."""
        return max(0, stop + self.before - (end - 1) * self.stride - self.span)


@dataclass(frozen=True)
class _ChannelAxis(_Axis):
    """The channels of all x, merged, and of the result: a group of these needs a group of those."""

    groups: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """Where a chunk of x ends with a group: that may be nowhere, and is nowhere if there is one group."""
        size = self.size // self.groups
        ends = [border // size for border in borders if self.groups > 1 and size and border % size == 0]
        return _ranges(self.out, [end * (self.out // self.groups) for end in ends])

    def need(self, first: int, stop: int) -> _Need:
        if self.groups == 1 or first == stop:
            return _Need(0, self.size)
        outputs, size = self.out // self.groups, self.size // self.groups
        return _Need(first // outputs * size, stop // outputs * size)

    def groups_in(self, part: Range) -> int:
        """How many groups make this part of the result."""
        return (part[1] - part[0]) // (self.out // self.groups)


def _ranges(size: int, points: Sequence[int]) -> list[Range]:
    """The parts of an axis between these points, those outside left out; one empty part of an empty axis."""
    return [*pairwise(sorted({0, size, *(point for point in points if 0 < point < size)}))] or [(0, 0)]


def _axes(function: Callable[..., Any], checked: CheckedCall, which: int, xs: Sequence[da.Array]) -> list[Any]:
    """The axes of the images and of the result number `which` of a checked call."""
    problem, channel = checked.problem, int(checked.axes.batched)
    channels = sum(x.shape[channel] for x in xs)
    out_channels = checked.results[which].shape[channel]
    if isinstance(problem, PoolingProblem):
        windows, groups = problem.windows, max(1, channels)
    else:
        assert isinstance(problem, ProductsProblem)
        windows, groups = problem.geometry, problem.geometry.groups
    if function is cupyconv.linmerge:  # its geometry has at most three spatial axes
        spatial: list[_Axis] = [_Axis(n, n) for n in xs[0].shape[2:]]
    else:
        triples = windows.size, windows.out_size, windows.stride, windows.span, windows.before, windows.dilation
        spatial = [
            _StampedAxis(out, size, stride, span, before, dilation=dilation)
            if function is cupyconv.conv_transpose
            else _Axis(size, out, stride, span, before, windows.padding_mode)
            for size, out, stride, span, before, dilation in zip(*map(windows.spatial, triples))
        ]
    samples = [_Axis(n, n) for n in xs[0].shape[:channel]]
    return [*samples, _ChannelAxis(channels, out_channels, groups=groups), *spatial]


# --- where that lies in chunks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Elements of one chunk along an axis, and where in a block they go; one that is repeated fills a stretch."""

    chunk: int
    elements: slice
    count: int  # how many these are
    at: slice


def _runs(need: Range, size: int, mode: str, borders: Sequence[int]) -> list[_Run]:
    """The runs of an axis of `size` elements that make the range; what is past its ends is as the mode has it."""
    runs = []
    for at, elements in axis_segments(range(*need), size, 1, 0, mode):
        if elements is None:
            continue
        where = at.start
        for first, step, count in _progressions(elements):
            while count:
                chunk = bisect_right(borders, first) - 1
                begin, end = borders[chunk], borders[chunk + 1]
                here = count if step == 0 else min(count, end - first if step > 0 else first - begin + 1)
                local = first - begin
                if step < 0:
                    read = slice(local, local - here if local >= here else None, -1)
                else:
                    read = slice(local, local + (here if step else 1))
                runs.append(_Run(chunk, read, here if step else 1, slice(where, where + here)))
                first, where, count = first + step * here, where + here, count - here
    return runs


def _progressions(elements: slice | np.ndarray) -> Iterator[tuple[int, int, int]]:
    """First, step and count of stretches whose elements go up by one, or down, or are one that is repeated."""
    if isinstance(elements, slice):
        yield elements.start, 1, elements.stop - elements.start
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
class _Block:
    """A part of an image, made of chunks: those of all combinations of its axes' runs, in C order.

    `cut` has for each the number of the piece that a task has cut from the chunk already; None where the chunk comes whole.
    """

    image: int
    shape: tuple[int, ...]
    axes: tuple[Sequence[_Run], ...]
    cut: tuple[int | None, ...]

    def of(self, chunks: Iterator[Any], like: Any) -> Any:
        """The block: a view where it is one piece, or lies in one array, else a copy of the pieces; zeros where there are none."""
        pieces = []
        for runs, number in zip(product(*self.axes), self.cut):
            chunk = next(chunks)
            pieces.append(chunk[tuple(run.elements for run in runs)] if number is None else chunk[number])
        if len(pieces) == 1 and pieces[0].shape == self.shape:
            return pieces[0]
        covered = prod(sum(run.at.stop - run.at.start for run in runs) for runs in self.axes) == prod(self.shape)
        if covered and isinstance(like, np.ndarray) and (view := self._in_one_array(pieces)) is not None:
            return view
        block = (np.empty_like if covered else np.zeros_like)(like, shape=self.shape)
        for runs, piece in zip(product(*self.axes), pieces):
            block[tuple(run.at for run in runs)] = piece
        return block

    def _in_one_array(self, pieces: list[np.ndarray]) -> np.ndarray | None:
        """The block where its pieces lie in an array as they would in the block, as chunks of an array in memory do."""
        if not pieces:
            return None
        strides, whole = pieces[0].strides, _owner(pieces[0])
        for runs, piece in zip(product(*self.axes), pieces):
            begins = [run.at.start for run in runs]
            place = pieces[0].ctypes.data + sum(begin * step for begin, step in zip(begins, strides))
            shape = tuple(run.at.stop - run.at.start for run in runs)
            if (piece.shape, piece.strides, piece.ctypes.data) != (shape, strides, place) or _owner(piece) is not whole:
                return None
        return as_strided(pieces[0], self.shape, strides, writeable=False)


def _owner(array: np.ndarray) -> Any:
    """What has the memory of an array: another one, or a file's map."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


@dataclass(frozen=True)
class _Cut:
    """The task that takes from a chunk what its neighbours need of it: copies, so that they do not hold the chunk."""

    chunk: tuple[Any, ...]
    pieces: list[tuple[slice, ...]] = field(default_factory=list)

    def __call__(self, chunk: Any) -> list[Any]:
        pieces = [chunk[piece] for piece in self.pieces]
        return pieces if _is_part(chunk) else [piece.copy() for piece in pieces]


def _is_part(chunk: Any) -> bool:
    """Whether a chunk is a view of an array, in memory or in a file, that has other chunks too: that one is there anyway."""
    owner = _owner(chunk) if isinstance(chunk, np.ndarray) else None
    if isinstance(owner, (np.ndarray, mmap)):
        return (owner.nbytes if isinstance(owner, np.ndarray) else len(owner)) >= 2 * chunk.nbytes
    return False


class _Image:
    """A Dask array that a graph reads: where its chunks end, and what is cut from them in the layer `halo`."""

    def __init__(self, number: int, x: da.Array, halo: str) -> None:
        self.number, self.x = number, x
        self.borders = [[0, *accumulate(sizes)] for sizes in x.chunks]
        self.cuts: dict[Any, _Cut] = {}
        self._halo = halo
        self._known: dict[Any, list[_Run]] = {}

    def runs(self, axis: int, need: Range, mode: str = "constant") -> list[_Run]:
        """Where the elements of an axis lie that are needed: worked out once for all chunks of the result beside each other."""
        key = axis, need
        if key not in self._known:
            self._known[key] = _runs(need, self.x.shape[axis], mode, self.borders[axis])
        return self._known[key]

    def block(self, shape: Sequence[int], axes: Sequence[Sequence[_Run]]) -> tuple[_Block, list[Any]]:
        """A block, and the keys of what it is made of.  Pieces of less than half a chunk are cut from it."""
        numbers: list[int | None] = []
        keys: list[Any] = []
        for runs in product(*axes):
            key = (self.x.name, *(run.chunk for run in runs))
            whole = prod(sizes[run.chunk] for sizes, run in zip(self.x.chunks, runs))
            if 2 * prod(run.count for run in runs) >= whole:
                numbers.append(None)
                keys.append(key)
            else:
                pieces = self.cuts.setdefault((self._halo, self.number, *key[1:]), _Cut(key)).pieces
                numbers.append(len(pieces))
                keys.append((self._halo, self.number, *key[1:]))
                pieces.append(tuple(run.elements for run in runs))
        return _Block(self.number, tuple(shape), tuple(axes), tuple(numbers)), keys


# --- the graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What all tasks of a graph have in common."""

    function: Callable[..., Any]
    keywords: dict[str, Any]  # arrays in memory among them
    settings: Settings
    likes: tuple[Any, ...]  # an empty array of each image's library and dtype, the residual's at the end


@dataclass(frozen=True)
class _Part:
    """The task that computes a chunk of the result."""

    blocks: tuple[_Block, ...]
    residual: _Block | None
    keywords: dict[str, Any]
    rows: dict[str, slice] | None  # the channels of arrays in memory, where the chunk has not all of them

    def __call__(self, call: _Call, chunks: list[Any]) -> Any:
        threads = call.settings.threads
        with ExitStack() as stack:
            if threads is None and isinstance(call.likes[0], np.ndarray):
                stack.enter_context(BLAS.held_at_one())
                BLAS.hold_thread()
            stack.enter_context(cupyconv.options(**{**call.settings._asdict(), "threads": threads or 1}))
            each = iter(chunks)
            images = [block.of(each, call.likes[block.image]) for block in self.blocks]
            keywords = {**call.keywords, **self.keywords}
            if self.residual is not None:
                keywords["residual"] = self.residual.of(each, call.likes[-1])
            if self.rows is not None:
                keywords = self._with_rows(keywords)
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


def _graph(
    function: Callable[..., Any],
    checked: CheckedCall,
    which: int,
    xs: Sequence[da.Array],
    residual: da.Array | None,
    arguments: dict[str, Any],
) -> da.Array:
    """The result number `which` of a checked call, of chunks of these images."""
    token = tokenize(function.__name__, which, xs, residual, arguments, current_settings())
    name, halo, common = f"{function.__name__}-{token}", f"halo-{token}", f"call-{token}"
    given = [*xs, *([] if residual is None else [residual])]
    images = [_Image(number, x, halo) for number, x in enumerate(given)]
    fixed = {key: value for key, value in arguments.items() if key not in _GEOMETRY}
    call = _Call(function, fixed, current_settings(), tuple(x._meta for x in given))

    channel = int(checked.axes.batched)  # the axis of channels
    axes = _axes(function, checked, which, xs)
    merged = [0, *accumulate(x.shape[channel] for x in xs)]
    borders = [*images[0].borders]
    borders[channel] = [first + border for first, image in zip(merged, images) for border in image.borders[channel]]
    parts = [axis.cut(own) for axis, own in zip(axes, borders)]
    needs = [[axis.need(*part) for part in own] for axis, own in zip(axes, parts)]

    layer: dict[Any, Any] = {}
    for numbers in product(*(range(len(own)) for own in parts)):
        out = [own[number] for own, number in zip(parts, numbers)]
        need = [own[number] for own, number in zip(needs, numbers)]
        blocks, keys = _merged_blocks(images[: len(xs)], merged, axes, need, channel)
        added = None
        if residual is not None:
            lengths = [stop - first for first, stop in out]
            added, of_it = images[-1].block(lengths, [images[-1].runs(i, part) for i, part in enumerate(out)])
            keys += of_it
        keywords = _of_block(function, need[channel + 1 :])
        rows = None
        if len(parts[channel]) > 1:
            if "groups" in arguments:
                keywords["groups"] = axes[channel].groups_in(out[channel])
            rows = _rows(function, slice(need[channel].first, need[channel].stop), slice(*out[channel]))
        layer[(name, *numbers)] = (_Part(blocks, added, keywords, rows), common, keys)

    cuts = {key: (cut, cut.chunk) for image in images for key, cut in image.cuts.items()}
    graph = HighLevelGraph.from_collections(halo, cuts, dependencies=given)
    layers = {**graph.layers, common: MaterializedLayer({common: call}), name: MaterializedLayer(layer)}
    needed = {**graph.dependencies, common: set(), name: {halo, common, *(x.name for x in given)}}
    chunks = tuple(tuple(stop - first for first, stop in own) for own in parts)
    meta = np.empty_like(xs[0]._meta, shape=(0,) * len(chunks), dtype=checked.results[which].dtype)
    return da.Array(HighLevelGraph(layers, needed), name, chunks, meta=meta)


#: Arguments that say which elements are read: of each block its own.
_GEOMETRY = ("padding", "padding_mode", "output_padding", "output_shape", "ceil_mode")


def _merged_blocks(
    images: Sequence[_Image], merged: Sequence[int], axes: Sequence[_Axis], need: Sequence[_Need], channel: int
) -> tuple[tuple[_Block, ...], list[Any]]:
    """The blocks that are merged for a chunk of the result, one for each chunk of channels, and the keys of their chunks."""
    blocks: list[_Block] = []
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
        blocks.append(_Block(0, tuple(lengths), ((),), ()))
    return tuple(blocks), keys


def _of_block(function: Callable[..., Any], need: Sequence[_Need]) -> dict[str, Any]:
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
