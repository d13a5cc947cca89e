"""A result in one array: each task writes its chunk into its place, and no chunks are concatenated afterwards.

::

    out        |........|........|........|        a task computes its chunk here: a view of `out`
    tasks          0        1        2             in any order, by threads of this process
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import dask.array as da
import numpy as np

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.dispatch import backend_for
from cupyconv.interop.dask_workers import scheduler_here


class Out:
    """The output array in the graph of a result.  It is never sent to another process, where writes would be lost."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def part(self, region: tuple[slice, ...], images: Sequence[Any], residual: Any) -> Any:
        """Return the view that a chunk is written to.  Nothing that its task reads may share memory with `out`.

        Other tasks write to `out` at the same time.  The residual may be exactly the view: it is read element by
        element, just before each write.
        """
        part = self.array[region]
        read = {f"chunks of x ({i})": image for i, image in enumerate(images)}
        if residual is not None and not _are_the_same(residual, part):
            read["residual"] = residual
        arrays = {"out": self.array, **read}
        backend = backend_for(arrays)
        if backend.are_apart(tuple(arrays.values()), [0]):
            return part
        OutMemory(arrays, ["out"], "residual").check(tuple(arrays.values()), backend)
        return part

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "out is in the memory of this process, so its graph cannot be sent to another process: compute it with"
            " scheduler='threads', or omit out and store the result (to_zarr, dask.array.store)"
        )


def _are_the_same(a: Any, b: Any) -> bool:
    address = backend_for({"a": a, "b": b}).address
    return (a.shape, a.strides, address(a)) == (b.shape, b.strides, address(b))


class LazyArray(da.Array):
    """A result that knows its tasks, and its `Out` if it has one.  Arrays derived from it are ordinary Dask arrays.

    With an `Out` its chunks are views of `out`, and computing it returns `out`.  Without one it is computed into one
    new array if possible; otherwise Dask joins copies of all chunks in one thread.
    """

    _tasks: Any
    _out: Out | None
    _given_name: str

    @classmethod
    def of(cls, tasks: Any, out: Out | None, *args: Any, **kwargs: Any) -> Self:
        array = cls(*args, **kwargs)
        array._tasks, array._out, array._given_name = tasks, out, array.name
        return array

    @property
    def _is_unchanged(self) -> bool:
        """Whether this is still the original array: Dask allows assignment to an array, which changes its name."""
        return self.name == self._given_name

    def compute(self, **kwargs: Any) -> Any:
        """Compute the array, see `dask.array.Array.compute`."""
        here = scheduler_here(self, kwargs)
        if here is None or not self._is_unchanged or type(self._meta) is not np.ndarray:
            return super().compute(**kwargs)
        out = None if self._out is None else self._out.array
        if not here.is_watched:
            whole = self._tasks.in_one_call(out, here.workers)
            if whole is not None:
                return whole
        if out is None:
            out = np.empty(self.shape, self.dtype)
        tasks = self._tasks.tasks_in_memory(out)
        if tasks is None:
            return da.Array.compute(self if self._out else self._tasks.into(out), **kwargs)
        here.run(tasks)
        return out

    def __dask_postcompute__(self) -> Any:
        if self._out is None or not self._is_unchanged:
            return super().__dask_postcompute__()
        return _whole, (self._out,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the computed array itself, or a copy if NumPy asks for one: NumPy does not copy the returned array."""
        return np.array(self.compute(), dtype, copy=copy)


def _whole(chunks: Any, out: Out) -> Any:
    return out.array
