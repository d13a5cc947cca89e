"""Find the backend of arrays by their type alone.

A backend is found through the method resolution order of an array's class and cached by class.  CuPy is imported only
after one of its arrays has been seen, so ``import cupyconv`` never imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Protocol

import numpy as np

from cupyconv.numpy import NumpyBackend
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Machine, Problem


class Backend(Protocol):
    """The interface that a call needs from an array library; every backend has exactly these methods."""

    name: str

    def machine(self, threads: int | None) -> Machine: ...

    def current(self) -> AbstractContextManager[Any]: ...

    def within(self, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Any: ...

    def address(self, array: Any) -> int: ...

    def are_apart(self, arrays: Sequence[Any], outs: Sequence[int]) -> bool: ...

    def signature(self, arrays: Sequence[Any]) -> Hashable: ...

    def plain(self, array: Any) -> Any: ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any: ...

    def from_host(self, array: np.ndarray) -> Any: ...

    def converted(self, array: Any, dtype: np.dtype) -> Any: ...

    def own_copy(self, array: Any) -> Any: ...

    def plan(self, problem: Problem) -> Plan: ...

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]: ...


_NUMPY = NumpyBackend()

#: Array class -> the function that returns the backend of an array of this class.
_REGISTRY: dict[type, Callable[[Any], Backend]] = {np.ndarray: lambda array: _NUMPY}

_JAX = "the functions of cupyconv.interop.jax, or numpy.asarray(array) or cupy.from_dlpack(array)"
_ON_DISK = (
    "the functions of cupyconv.interop.dask on dask.array.from_array(array), or array[...] if it fits in memory;"
    " docs/how-to/recipes.md has a loop over blocks without Dask"
)
_WAYS_IN = {
    "torch": "the functions of cupyconv.interop.torch, or numpy.asarray(tensor) or cupy.from_dlpack(tensor),"
    " which share its memory",
    "jax": _JAX,
    "jaxlib": _JAX,
    "dask": "the functions of cupyconv.interop.dask, or array.compute() if it fits in memory",
    "zarr": _ON_DISK,
    "h5py": _ON_DISK,
}


def register_backend(array_class: type, backend_of: Callable[[Any], Backend]) -> None:
    """Register the backend of a class of arrays and its subclasses."""
    _REGISTRY[array_class] = backend_of


def backend_of_class(array_class: type) -> Callable[[Any], Backend] | None:
    """The function that returns the backend of an array of exactly this class; None if no such array has been seen."""
    return _REGISTRY.get(array_class)


def backend_for(arrays: Mapping[str, Any]) -> Backend:
    """The common backend of all arrays, given by argument name."""
    found: Backend | None = None
    first = ""
    for name, array in arrays.items():
        backend = _finder(name, array)(array)
        if found is None:
            found, first = backend, name
        elif backend is not found:
            raise TypeError(
                f"all arrays must belong to one library and device: {first} is {kind_of(arrays[first])},"
                f" {name} is {kind_of(array)}"
            )
    assert found is not None
    return found


def planner(backend: Backend, machine: Machine) -> Callable[[Problem], Plan]:
    """The function that plans for a machine.

    This is the arrays' own backend, or CUDA's planning if NumPy arrays stand for arrays on a GPU.
    """
    if backend is _NUMPY and isinstance(machine, GpuModel):
        from cupyconv.cuda.plan import plan

        return plan
    return backend.plan


def _finder(name: str, array: Any) -> Callable[[Any], Backend]:
    units = next((name for name in ("unit", "units") if hasattr(type(array), name)), None)
    if units is not None and isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} has units, {kind_of(array)} of {getattr(array, units)}, which would be lost: use array.value"
        )
    for array_class in type(array).__mro__:
        if array_class in _REGISTRY and not isinstance(array, (np.ma.MaskedArray, np.matrix)):
            return _REGISTRY[array_class]
        if array_class.__module__.partition(".")[0] == "cupy" and array_class.__name__ == "ndarray":
            register_backend(array_class, _cupy_backend)
            return _cupy_backend
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a MaskedArray, whose mask would be lost: use array.filled(0)")
    if isinstance(array, str):
        raise TypeError(
            f"{name} must be an array, not the str {array!r}: pass settings by name, for example padding='same'"
        )
    library = type(array).__module__.partition(".")[0]
    way_in = _WAYS_IN.get(library, "numpy.asarray(array), or cupy.from_dlpack(array) for GPU memory")
    raise TypeError(f"{name} must be a NumPy or CuPy array, not {kind_of(array)}; use {way_in}")


def _cupy_backend(array: Any) -> Backend:
    return _cupy_device_backend(array.device.id)


_CUPY_BACKENDS: dict[int, Backend] = {}
#: Reentrant, because a finalizer may call the library while the lock is held.
_ONE_AT_A_TIME = RLock()


def _cupy_device_backend(ordinal: int) -> Backend:
    """The one backend of a device; two threads that ask for it first at the same time get the same backend."""
    backend = _CUPY_BACKENDS.get(ordinal)
    if backend is None:
        with _ONE_AT_A_TIME:
            if ordinal not in _CUPY_BACKENDS:
                _CUPY_BACKENDS.setdefault(ordinal, _make_cupy_backend(ordinal))
            backend = _CUPY_BACKENDS[ordinal]
    return backend


def _make_cupy_backend(ordinal: int) -> Backend:
    from cupyconv.cuda.run import CudaBackend
    from cupyconv.cuda.run.cupy_device import CupyDevice

    return CudaBackend(CupyDevice(ordinal))


def kind_of(array: Any) -> str:
    """An array's class and device, in words."""
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    device = getattr(array, "device", None)
    return f"{kind} on {device}" if device is not None and device != "cpu" else kind
