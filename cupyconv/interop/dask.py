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

A result that fits into memory is computed in one array, `out` or a new one: no chunk is copied to join it to others::

    conv(volume, weight, padding="same", out=result).compute()

Where all that it reads is in memory too, in NumPy's arrays, ``compute()`` is the call on these, by as many threads as Dask has
workers.  Who watches tasks, as a progress bar does, sees one for each chunk.

`vjp`, `conv_chain` and recurrent layers are not here: `dask.array.map_blocks` does what needs no halo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import isnan
from typing import Any

import dask.array as da
import numpy as np

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.interop.dask_tasks import Tasks
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
    out: Array | None = None,
) -> da.Array:
    """`cupyconv.conv` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As of `cupyconv.conv`, chunked along any axes.  The arrays of a sequence may be chunked each in its own way; they
        are not rechunked, and those of a task are merged without a concatenation, chunks of channels too.
    weight, bias, stride, padding, padding_mode, dilation, groups, activation, prologue, method
        As of `cupyconv.conv`: arrays in memory, of the library of x's chunks.  They are copied.
    residual : dask.array.Array, optional
        Of the result's shape, chunked in any way.
    out : array, optional
        As of `cupyconv.conv`, an array in memory: chunks are written into it when they are computed, by threads of this
        process.  No chunk of an argument may be in its memory, or be computed from it, but those of `residual` may be exactly it.

    Returns
    -------
    dask.array.Array
        Chunked as x is, or the first of the sequence: chunks of the result are as large as those of x divided by the
        stride.  It has one chunk of channels, or with groups one for each chunk of x's channels that ends with a group.
        With `out` its chunks are views of that, and ``compute()`` returns `out` itself.

    Raises
    ------
    TypeError, ValueError
        As `cupyconv.conv`, at once and not when the result is computed; TypeError where x or residual is not a Dask
        array, or another argument is one; ValueError for chunks of unknown size.  When it is computed, TypeError for `out`
        beside workers that are other processes, and ValueError where it shares memory with a chunk of an argument, and for a
        chunk whose shape, or whose wider dtype, is not what its Dask array says.

    Notes
    -----
    Sums are those of the call in memory up to rounding, because blocks of another size may be computed by another method.
    A chunk with less than 64 elements along an axis spends more time on its halo, and on Dask, than it need; a kernel may
    reach over several chunks.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from cupyconv.interop.dask import conv
    >>> x = da.arange(12, chunks=4, dtype=np.float64)[None, None]
    >>> y = conv(x, np.ones((1, 1, 3)), padding="same")
    >>> y.chunks[-1], y.compute()[0, 0].tolist()
    ((4, 4, 4), [1.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0, 27.0, 30.0, 21.0])

    >>> result = np.empty((1, 1, 10))
    >>> conv(x, np.ones((1, 1, 3)), out=result).compute() is result
    True
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
    out: Array | None = None,
) -> da.Array:
    """`cupyconv.linmerge` of Dask arrays, lazily.

    Parameters
    ----------
    xs : sequence of dask.array.Array, or one
        As of `cupyconv.linmerge`, each chunked in its own way, as for `conv`.
    weight, bias, activation, residual, prologue, method, out
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
    out: Array | None = None,
) -> da.Array:
    """`cupyconv.conv_transpose` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As for `conv`.
    weight, bias, stride, padding, output_padding, output_shape, dilation, groups, activation, method
        As of `cupyconv.conv_transpose`: arrays in memory, of the library of x's chunks.
    out : array, optional
        As for `conv`.

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
    out: Array | Sequence[Array] | None = None,
) -> ArrayOrList:
    """`cupyconv.max_pool` of Dask arrays, lazily.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        As of `cupyconv.max_pool`, each chunked in its own way.
    kernel_shape, stride, padding, dilation, ceil_mode
        As of `cupyconv.max_pool`.
    out : array or sequence of arrays, optional
        As for `conv`; a sequence where `x` is one.

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
    residual = arguments.pop("residual", None)
    listed = isinstance(given, (list, tuple))
    xs = [_dask_array(f"{images}[{i}]" if listed else images, x) for i, x in enumerate(given if listed else [given])]
    stand_ins = _stand_ins(arguments, xs[0] if xs else None)
    if residual is not None:
        stand_ins["residual"] = _stand_in(_dask_array("residual", residual))
    stand_ins[images] = [_stand_in(x) for x in xs] if listed else _stand_in(xs[0])
    checked = checked_call(function, **stand_ins)
    if arguments.get("method", "auto") != "auto" and isinstance(xs[0]._meta, np.ndarray):
        checked.plan()  # refuses a method that does not apply
    out = arguments.pop("out")
    arguments = deepcopy(arguments)  # what is written into a weight later is not what will be computed with
    if function is cupyconv.max_pool:
        outs = out if listed and out is not None else [out] * len(xs)
        results = [Tasks(function, checked, i, [x], None, arguments, outs[i]).array() for i, x in enumerate(xs)]
        return results if listed else results[0]
    return Tasks(function, checked, 0, xs, residual, arguments, out).array()


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
        if name in ("prologue", "out") and isinstance(value, (tuple, list)):
            return tuple(checked(f"{name}[{i}]", part) for i, part in enumerate(value))
        if isinstance(value, da.Array):
            raise TypeError(f"{name} must be an array in memory, given a Dask array: {name}.compute() makes one of it")
        if library and _library(value) and _library(value) != library:
            raise TypeError(
                f"{name} is an array of {_library(value)}, chunks of x are {library}'s: both must be of one"
            )
        if name.startswith("out") and _library(value):  # must be one that can be written to
            return value if isinstance(value, np.ndarray) else np.empty(value.shape, value.dtype)
        return _stand_in(value)

    return {name: checked(name, value) for name, value in arguments.items()}
