"""A result in one array: tasks write their chunks where these lie in it, and nobody joins chunks afterwards.

::

    out        |........|........|........|        a task computes its chunk here: a view of `out`
    tasks          0        1        2             in any order, by threads of this process
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any, NoReturn, Self

import dask
import dask.array as da
import dask.local
import dask.threaded
import numpy as np
from dask.base import get_scheduler

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.dispatch import backend_for


class Out:
    """The array, in the graph of a result.  It is not sent to another process: what is written there would be lost."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def part(self, region: tuple[slice, ...], images: Sequence[Any], residual: Any) -> Any:
        """Where a chunk is written.  Other tasks write beside it: nothing that this one reads may be there.

        A residual may be what is written, and that alone: it is read element by element, just before.
        """
        part = self.array[region]
        read = {f"chunks of x ({i})": image for i, image in enumerate(images)}
        if residual is not None and not _are_the_same(residual, part):
            read["residual"] = residual
        arrays = {"out": self.array, **read}
        OutMemory(arrays, ["out"], "residual").check(tuple(arrays.values()), backend_for(arrays))
        return part

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "out is an array of this process, and a graph with it cannot be sent to another: compute it with"
            " scheduler='threads', or make it without out and store the result (to_zarr, dask.array.store)"
        )


def _are_the_same(a: Any, b: Any) -> bool:
    address = backend_for({"a": a, "b": b}).address
    return (a.shape, a.strides, address(a)) == (b.shape, b.strides, address(b))


class _Result(da.Array):
    """A result that knows where it is written.  What is made of it is an ordinary Dask array."""

    _place: Any
    _given_name: str

    @classmethod
    def of(cls, place: Any, *args: Any, **kwargs: Any) -> Self:
        array = cls(*args, **kwargs)
        array._place, array._given_name = place, array.name
        return array

    @property
    def _is_unchanged(self) -> bool:
        """Dask allows to assign to an array, which then has another name."""
        return self.name == self._given_name


class WrittenArray(_Result):
    """A result whose chunks are views of the array in its `Out`: computed whole it is that array."""

    def __dask_postcompute__(self) -> Any:
        return (_whole, (self._place,)) if self._is_unchanged else super().__dask_postcompute__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`out` itself, or where NumPy wants a copy one: it makes none of what is returned here."""
        return np.array(self.compute(), dtype, copy=copy)


def _whole(chunks: Any, out: Out) -> Any:
    return out.array


class LazyArray(_Result):
    """A result that is computed whole into one array where it can be: else one thread joins copies of all chunks.

    Its place is a function that gives the result in an array.
    """

    def compute(self, **kwargs: Any) -> Any:
        """As that of any Dask array."""
        by = get_scheduler(scheduler=kwargs.get("scheduler"), collections=[self])
        pool = kwargs.get("pool") or dask.config.get("pool", None)
        is_of_threads = pool is None or isinstance(pool, (ThreadPool, ThreadPoolExecutor))  # it may be one of processes
        is_here = by is dask.local.get_sync or (by is dask.threaded.get and is_of_threads)
        if is_here and type(self._meta) is np.ndarray and self._is_unchanged and self.npartitions > 1:
            return self._place(np.empty(self.shape, self.dtype)).compute(**kwargs)
        return super().compute(**kwargs)
