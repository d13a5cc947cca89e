"""`conv`, `linmerge`, `conv_transpose` and `max_pool` of Dask arrays, chunk by chunk, for data larger than memory.

A result is lazy.  One task computes each chunk of it: the function of the same name runs on the elements the chunk
needs::

    chunks of x      |........|........|........|      a chunk of the result reads its own chunk of x
    chunk of result        ===|========|==             and a halo, cut from the neighbouring chunks

If the chunks are views of one NumPy array, as after `dask.array.from_array`, a chunk with its halo is a view too.

The geometry of the whole call determines which elements each chunk reads, along every axis.  Stride and dilation
continue across chunk borders, only the ends of the whole image are padded, and result chunks do not overlap.  If a halo
is thin, an extra task per chunk of x copies the elements that its neighbours need, so that these do not hold the whole
chunk in memory.

Chunks are NumPy or CuPy arrays.  The settings (`cupyconv.options`) are those in force when the function is called, not
when the result is computed.  Dask's workers provide the threads: within a task, a call on NumPy uses one thread, and so
does BLAS, unless ``options(threads=...)`` requests more.  This example streams one Zarr volume to another and holds
only some chunks in memory at a time::

    import dask.array
    from cupyconv.interop.dask import conv

    volume = dask.array.from_zarr("volume.zarr")  # (C, depth, height, width), in chunks of 64 or more along each axis
    conv(volume, weight, padding="same", activation="relu").to_zarr("result.zarr")

A result that fits into memory is computed directly into one array, `out` or a new one, so no chunks are concatenated::

    conv(volume, weight, padding="same", out=result).compute()

If all inputs are NumPy arrays in memory as well, ``compute()`` is one call on them with as many threads as Dask has
workers.  If Dask callbacks such as a progress bar are active, the result is computed by one task per chunk instead.

`vjp`, `conv_chain` and recurrent layers are not included.  Use `dask.array.map_blocks` for operations without a halo.
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
    """Lazily compute `cupyconv.conv` of Dask arrays.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        See `cupyconv.conv`.  Any axes may be chunked.  The arrays of a sequence may have different chunks: they are not
        rechunked, and a task merges its chunks without concatenating them, chunks of channels included.
    weight, bias, stride, padding, padding_mode, dilation, groups, activation, prologue, method
        See `cupyconv.conv`.  Arrays must be in memory and belong to the library of x's chunks.  They are copied.
    residual : dask.array.Array, optional
        Has the result's shape and any chunks.
    out : array, optional
        An array in memory, see `cupyconv.conv`.  Threads of this process write chunks into it when they are computed.
        No chunk of an argument may share its memory or be computed from it, except that `residual` may be exactly
        `out`.

    Returns
    -------
    dask.array.Array
        Chunked like x, or like the first array of the sequence: chunks have the size of x's chunks divided by the
        stride.  There is one chunk of channels; with `groups`, one per chunk of x's channels that ends at a group
        boundary.  With `out`, the chunks are views of `out`, and ``compute()`` returns `out` itself.

    Raises
    ------
    TypeError, ValueError
        See `cupyconv.conv`; raised by this call, not when the result is computed.  TypeError also if x or residual is
        not a Dask array, or if another argument is one.  ValueError also for chunks of unknown size.

        Computing the result raises TypeError if `out` is given and the workers are other processes.  It raises
        ValueError if `out` shares memory with a chunk of an argument, or if a chunk has another shape or a wider dtype
        than its Dask array declares.

    Notes
    -----
    The result equals that of the call in memory up to rounding, because blocks of another size may use another method.
    Chunks of fewer than 64 elements along an axis lose time to halos and to Dask's scheduling.  A kernel may span
    several chunks.

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
    """Lazily compute `cupyconv.linmerge` of Dask arrays.

    Parameters
    ----------
    xs : sequence of dask.array.Array, or one
        See `cupyconv.linmerge`.  The arrays may have different chunks, as for `conv`.
    weight, bias, activation, residual, prologue, method, out
        See `conv`.

    Returns
    -------
    dask.array.Array
        See `conv`.

    Raises
    ------
    TypeError, ValueError
        See `conv`.

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
    """Lazily compute `cupyconv.conv_transpose` of Dask arrays.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        See `conv`.
    weight, bias, stride, padding, output_padding, output_shape, dilation, groups, activation, method
        See `cupyconv.conv_transpose`.  Arrays must be in memory and belong to the library of x's chunks.
    out : array, optional
        See `conv`.

    Returns
    -------
    dask.array.Array
        See `conv`.  Chunks of the result are `stride` times as large as those of x.

    Raises
    ------
    TypeError, ValueError
        See `conv`.

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
    """Lazily compute `cupyconv.max_pool` of Dask arrays.

    Parameters
    ----------
    x : dask.array.Array or sequence of them
        See `cupyconv.max_pool`.  The arrays may have different chunks.
    kernel_shape, stride, padding, dilation, ceil_mode
        See `cupyconv.max_pool`.
    out : array or sequence of arrays, optional
        See `conv`.  Must be a sequence if `x` is one.

    Returns
    -------
    dask.array.Array, or list of them if `x` is a sequence
        Each result is chunked like its own image: chunks have the size of x's chunks divided by the stride.

    Raises
    ------
    TypeError, ValueError
        See `conv`.

    Examples
    --------
    >>> import dask.array as da
    >>> from cupyconv.interop.dask import max_pool
    >>> y = max_pool(da.arange(12, chunks=5, dtype=float)[None, None], 3)
    >>> y.chunks[-1], y.compute()[0, 0].tolist()
    ((2, 1, 1), [2.0, 5.0, 8.0, 11.0])
    """
    return _lazy(cupyconv.max_pool, "x", locals())


# --- argument checks ------------------------------------------------------------------------------------------


def _lazy(function: Callable[..., Any], images: str, arguments: dict[str, Any]) -> Any:
    """Return the function's lazy result.  `arguments` maps names to values; `images` is the name of the first one."""
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
    arguments = deepcopy(arguments)  # later writes to a weight do not affect the result
    if function is cupyconv.max_pool:
        outs = out if listed and out is not None else [out] * len(xs)
        results = [Tasks(function, checked, i, [x], None, arguments, outs[i]).array() for i, x in enumerate(xs)]
        return results if listed else results[0]
    return Tasks(function, checked, 0, xs, residual, arguments, out).array()


def _dask_array(name: str, x: Any) -> Any:
    """Return the argument, which must be a Dask array with known chunk sizes."""
    if not isinstance(x, da.Array):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(
            f"{name} must be a Dask array, given {kind}: use dask.array.from_array or dask.array.from_zarr;"
            " for arrays in memory use the functions of cupyconv"
        )
    if any(map(isnan, x.shape)):
        raise ValueError(f"{name} has shape {x.shape}, needed chunks of known size: call {name}.compute_chunk_sizes()")
    return x


def _library(array: Any) -> str | None:
    """Return the library of an array in memory: "numpy", "cupy", or None for anything else."""
    known = "numpy" if isinstance(array, np.ndarray) else type(array).__module__.partition(".")[0]
    return known if known in ("numpy", "cupy") and hasattr(array, "shape") else None


def _stand_in(array: Any) -> Any:
    """Return an array of the same shape and dtype that needs no memory of its own, or any other value unchanged."""
    if isinstance(array, da.Array) or _library(array):
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return array


def _stand_ins(arguments: Mapping[str, Any], x: da.Array | None) -> dict[str, Any]:
    """Return the arguments, with stand-ins for arrays, which must be in memory and of the library of x's chunks."""
    library = None if x is None else _library(x._meta)

    def checked(name: str, value: Any) -> Any:
        if name in ("prologue", "out") and isinstance(value, (tuple, list)):
            return tuple(checked(f"{name}[{i}]", part) for i, part in enumerate(value))
        if isinstance(value, da.Array):
            raise TypeError(f"{name} must be an array in memory, given a Dask array: use {name}.compute()")
        if library and _library(value) and _library(value) != library:
            raise TypeError(
                f"{name} is a {_library(value)} array, the chunks of x are {library} arrays: both must belong to one library"
            )
        if name.startswith("out") and _library(value):  # a stand-in is read-only, and the check needs a writable array
            return value if isinstance(value, np.ndarray) else np.empty(value.shape, value.dtype)
        return _stand_in(value)

    return {name: checked(name, value) for name, value in arguments.items()}
