"""The arrays of a call: their names, their common backend, and their descriptions for planning.

Below the public functions every image is (n, c, d, h, w).  The caller's images may omit N, and those of a merge may
have more than three spatial axes.  `Axes` converts an array to this form: as ints for planning, and as a view for
execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.dispatch import Backend, backend_for, kind_of
from cupyconv.call.options import current_settings
from cupyconv.problem.activations import Activation, resolve_activation
from cupyconv.problem.arrays import (
    Operand,
    check_dtype,
    collapsed_stride,
    dtype_name,
    is_channels_last,
    operand,
    overlaps_itself,
)
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.problems import Machine

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Axes:
    """The axes of the caller's images."""

    batched: bool
    spatial: int

    @property
    def are_the_backends(self) -> bool:
        """Whether backends use the caller's axes, so that `view` would return its argument."""
        return self.batched and self.spatial <= 3

    def shape(self, batch: int, channels: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """An image's shape with the caller's axes."""
        return (batch, channels, *spatial) if self.batched else (channels, *spatial)

    def asks_channels_last(self, image: Any) -> bool:
        """Whether an image asks for a channels-last result."""
        return is_channels_last(tuple(image.shape), tuple(image.strides), image.dtype.itemsize, int(self.batched))

    def describe(
        self, name: str, dtype: str, shape: tuple[int, ...], byte_strides: tuple[int, ...], address: int
    ) -> Operand:
        """The image as planning sees it; an image that `view` has to copy is described as the copy."""
        if not self.batched:
            shape, byte_strides = (1, *shape), (0, *byte_strides)
        if self.spatial > 3:
            step = collapsed_stride(shape[2:-2], byte_strides[2:-2])
            shape = (*shape[:2], prod(shape[2:-2]), *shape[-2:])
            if step is None:
                return Operand(name, dtype, shape, (0,) * 5).in_c_order(dtype)
            byte_strides = (*byte_strides[:2], step, *byte_strides[-2:])
        fill = 5 - len(shape)
        shape = (*shape[:2], *(1,) * fill, *shape[2:])
        return operand(name, dtype, shape, (*byte_strides[:2], *(0,) * fill, *byte_strides[2:]), address)

    def needs_copy(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        """Whether no view of the image has at most three spatial axes."""
        return self.spatial > 3 and collapsed_stride(shape[-self.spatial : -2], strides[-self.spatial : -2]) is None

    def view(self, image: Any, copy: Callable[[Any], Any]) -> Any:
        """The image as backends see it: with N, and with at most three spatial axes.

        If the leading spatial axes have no single stride, `copy` returns memory in C order to use instead.
        """
        if not self.batched:
            image = image[None]
        if self.spatial > 3:
            if self.needs_copy(image.shape, image.strides):
                image = copy(image)
            image = image.reshape(*image.shape[:2], prod(image.shape[2:-2]), *image.shape[-2:])
        return image

    def result(self, name: str, shape: tuple[int, ...], dtype: np.dtype, images: Iterable[Any], **rest: Any) -> Result:
        """A result that is channels-last if all these images are."""
        return Result(
            name, shape, dtype, int(self.batched) if all(map(self.asks_channels_last, images)) else None, **rest
        )

    def give_back(self, image: Any, spatial: tuple[int, ...]) -> Any:
        """The inverse of `view`."""
        if self.spatial > 3:
            image = image.reshape(*image.shape[:2], *spatial)
        return image if self.batched else image[0]


#: Axes of arrays that backends receive unchanged.
NO_IMAGE = Axes(True, 0)
#: Axes of vectors: a bias, a scale, channel sums.
VECTOR = Axes(False, 0)


#: Maximum size of a NumPy or CuPy array.
_MAX_BYTES = 2**63 - 1


class Result(NamedTuple):
    """An array that a call returns, as it will be allocated: ``out``, or ``out[0]``, ``out[1]`` ... of a list."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    channel: int | None = None  # the axis that is stored last; None for C order
    may_alias: str = "residual"  # the only argument that may have the same memory as the result

    def check_size(self) -> None:
        """Refuse a result that is larger than any array can be."""
        nbytes = prod(extent or 1 for extent in self.shape) * self.dtype.itemsize
        if nbytes > _MAX_BYTES:
            raise ValueError(
                f"{self.name} would have shape {self.shape}: {nbytes} bytes, but an array can have at most {_MAX_BYTES}"
            )

    @property
    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The C-ordered shape to allocate, and the order of axes that transposes it to the result.

        The order is None if no transposition is needed.
        """
        shape, channel, last = self.shape, self.channel, len(self.shape) - 1
        if channel is None:
            return shape, None
        return (*shape[:channel], *shape[channel + 1 :], shape[channel]), (*range(channel), last, *range(channel, last))

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        shape, order = self.memory
        steps = [prod(shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(shape))]
        return tuple(steps if order is None else (steps[axis] for axis in order))


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arrays of one call by name, without absent ones, and their common backend.

    `on` names a GPU to plan for, instead of the machine of that backend.
    """

    arrays: dict[str, Any]
    backend: Backend
    on: str | None = None

    @classmethod
    def of(cls, arrays: dict[str, Any], on: str | None) -> Arguments:
        """Check that the arrays belong to one library and device, and that their dtypes are supported."""
        backend = backend_for(arrays)
        for name, array in arrays.items():
            check_dtype(name, array.dtype)
        return cls(arrays, backend, on)

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def some(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.arrays[name] for name in names}

    @property
    def decided_with(self) -> dict[str, Any]:
        """The fields that every problem has."""
        settings = current_settings()
        return {
            "machine": self.machine,
            "workspace_limit": settings.workspace_limit,
            "allow_tf32": settings.allow_tf32,
            "allow_winograd": settings.allow_winograd,
            "allow_fft": settings.allow_fft,
        }

    @property
    def machine(self) -> Machine:
        """The processor to plan for."""
        if self.on is None:
            return self.backend.machine(current_settings().threads)
        if self.backend.name != "numpy":
            raise TypeError(
                f"on={self.on!r} plans for a GPU that need not be present and takes NumPy arrays;"
                f" given {self.backend.name} arrays"
            )
        return known_gpu(self.on)

    def located(self, what: str | Result) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
        """Name, dtype, shape, byte strides and address of an argument or of a result.

        A result is the caller's array, which is then checked, or the array that will be allocated.
        """
        if isinstance(what, Result):
            if what.name not in self.arrays:
                return what.name, dtype_name(what.dtype), what.shape, what.strides, 0
            self.check_out(what)
            what = what.name
        array = self.arrays[what]
        address = self.backend.address(array) if array.size else 0
        return what, dtype_name(array.dtype), tuple(array.shape), tuple(array.strides), address

    def describe(self, axes: Axes, what: str | Result) -> Operand:
        """An image as planning sees it."""
        return axes.describe(*self.located(what))

    def describe_each(self, axes: Axes, each: Iterable[str | Result]) -> tuple[Operand, ...]:
        return tuple(self.describe(axes, what) for what in each)

    def describe_given(self, axes: Axes, name: str) -> Operand | None:
        """An optional argument as planning sees it; None if it is absent."""
        return self.describe(axes, name) if name in self.arrays else None

    def describe_array(self, what: str | Result, shape: tuple[int, ...] | None = None) -> Operand:
        """An array with its own axes as planning sees it; `shape` may add leading axes of length 1."""
        name, dtype, own, strides, address = self.located(what)
        shape = own if shape is None else shape
        return operand(name, dtype, shape, (*(0,) * (len(shape) - len(own)), *strides), address)

    def check_out(self, result: Result) -> None:
        """Refuse an array for a result that has another shape or dtype, or that shares memory."""
        name, out = result.name, self.arrays[result.name]
        if tuple(out.shape) != result.shape:
            raise ValueError(f"{name} has shape {tuple(out.shape)}, needed {result.shape}")
        if out.dtype != result.dtype:
            raise TypeError(f"{name} has dtype {out.dtype}, needed {result.dtype}")
        if overlaps_itself(out.shape, out.strides, out.dtype.itemsize):
            raise ValueError(f"{name} overlaps itself: shape {tuple(out.shape)}, strides {tuple(out.strides)}")
        OutMemory(self.arrays, [name], result.may_alias).check(tuple(self.arrays.values()), self.backend)

    def check_optional(self, name: str, shape: tuple[int, ...], dtype: np.dtype, what: str = "the result is") -> None:
        """Refuse an optional argument of another shape, or one whose imaginary parts would be dropped."""
        array = self.arrays.get(name)
        if array is None:
            return
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {shape}")
        if array.dtype.kind == "c" and dtype.kind != "c":
            raise TypeError(f"{name} is {array.dtype.name}, {what} {dtype.name}: casting would drop imaginary parts")

    def copy_notes(self, axes: Axes, images: Iterable[str]) -> tuple[str, ...]:
        """Notes on the images that have to be copied whole to have at most three spatial axes."""
        return tuple(
            f"{name}: its leading spatial axes have no uniform stride, so it is copied; workspace excludes the copy"
            for name in images
            if name in self.arrays and axes.needs_copy(tuple(self.arrays[name].shape), tuple(self.arrays[name].strides))
        )


def named_inputs(name: str, x: Any) -> dict[str, Any]:
    """One array, or a list or tuple of arrays that stand for their concatenation, by argument name."""
    if not isinstance(x, (list, tuple)):
        return {name: x}
    if not x:
        raise ValueError(f"{name} is an empty sequence, needed at least one array")
    return {f"{name}[{i}]": array for i, array in enumerate(x)}


def merged_inputs(given: Arrays, name: str, *required: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of the argument `name`, which may be a sequence, and all present arrays in their order."""
    inputs = named_inputs(name, given[name])
    arrays: dict[str, Any] = {}
    for each, array in given.items():
        arrays |= inputs if each == name else present({each: array}, *required)
    return inputs, arrays


def present(given: Arrays, *required: str) -> dict[str, Any]:
    """The arguments that are not None, and the required ones in any case."""
    return {name: array for name, array in given.items() if array is not None or name in required}


def is_batched(shapes: Mapping[str, tuple[int, ...]], kernel_shape: Any) -> bool:
    """Whether images have N: only a kernel with one entry per spatial axis can tell that N is missing."""
    if not isinstance(kernel_shape, (tuple, list)):
        return True
    return any(len(shape) != len(kernel_shape) + 1 for shape in shapes.values())


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def activation_for(activation: Any, dtype: np.dtype) -> Activation:
    """The activation for a result of this dtype; complex results have none."""
    resolved = resolve_activation(activation)
    if resolved and dtype.kind == "c":
        raise TypeError(f"activation {resolved} is not defined for the complex result, {dtype.name}")
    return resolved


def widening_notes(arrays: Arrays, dtype: np.dtype) -> tuple[str, ...]:
    """A note on the argument that makes the result wider than another argument."""
    result, names = dtype_name(dtype), {name: dtype_name(array.dtype) for name, array in arrays.items()}
    wide = [name for name, kind in names.items() if kind == result]
    narrow = [f"{name} ({kind})" for name, kind in names.items() if kind != result]
    if not narrow:
        return ()
    cause = f"{wide[0]} ({result}) widens" if wide else "mixed dtypes widen"
    return (f"{cause} the result to {result}; narrower: {', '.join(narrow)}",)


def fitting(name: str, grad: Any, shape: tuple[int, ...], dtype: np.dtype, backend: Backend) -> Any:
    """Return the gradient of a result in the dtype of that result; another shape, library or device is refused."""
    if backend_for({name: grad}) is not backend:
        raise TypeError(
            f"{name} is {kind_of(grad)}, needed an array of the library and device of the result, {backend.name}"
        )
    if tuple(grad.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(grad.shape)}, needed {shape}, the shape of the result")
    if grad.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{name} is {grad.dtype.name}, the result is {dtype.name}: casting would drop imaginary parts")
    return in_dtype(grad, dtype, backend)


def in_dtype(array: Any, dtype: np.dtype, backend: Backend) -> Any:
    """The array without its subclass, converted if it has another dtype; only real parts if `dtype` is real."""
    if array.dtype == dtype:
        return backend.plain(array)
    with backend.current():
        return backend.converted(backend.plain(array), dtype)
