"""From arguments to a call that can be planned and run: everything is checked here, nothing is launched.

A `Call` is the public functions' common path: arrays with one owner, a validated problem, a request to
planning.  ``plan()`` is all that `explain` needs; ``run()`` allocates, executes and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from cupyconv.activations import resolve_activation
from cupyconv.axes import Axes, byte_strides
from cupyconv.dispatch import Backend, backend_for
from cupyconv.dtypes import check_dtype, dtype_name, operand_dtypes, promote
from cupyconv.geometry import ConvGeometry, conv_geometry, pointwise_geometry, window_geometry
from cupyconv.machine import known_gpu
from cupyconv.operands import Operand, is_channels_last, overlaps_itself
from cupyconv.padding import per_axis
from cupyconv.plan import Plan
from cupyconv.planning import plan_col2im, plan_conv, plan_im2col
from cupyconv.planning.request import ColumnsRequest, ConvRequest, Machine, check_method
from cupyconv.settings import current_settings

Arrays = Mapping[str, Any]


@dataclass
class Call:
    """One call, checked and ready; nothing has been allocated or launched for it.

    `arrays` are the arguments by name, as the caller gave them, absent ones left out.
    """

    backend: Backend
    request: ConvRequest | ColumnsRequest
    make_plan: Callable[[Any], Plan]
    arrays: dict[str, Any]
    images: frozenset[str]  # names of those with the axes of an image
    axes: Axes
    shape: tuple[int, ...]  # of the result
    dtype: np.dtype
    channels_last: bool = False

    def plan(self) -> Plan:
        return self.make_plan(self.request)

    def run(self) -> Any:
        """Execute the plan; smaller chunks are tried before a failed allocation is reported."""
        with self.backend.current():
            plan = self.plan()  # refusals come before the result is allocated
            arrays = dict(self.arrays)
            if "out" not in arrays:
                arrays["out"] = self._allocate()
            views = {name: self._view(name, a) if name in self.images else a for name, a in arrays.items()}
            while True:
                try:
                    self.backend.run(plan, views)
                    break
                except MemoryError:
                    # A result that is the residual may hold sums already: done again, they would be added twice.
                    smaller = None if arrays["out"] is arrays.get("residual") else self._with_less_workspace(plan)
                    if smaller is None:
                        raise
                    plan = smaller
            out = arrays["out"]
            if self.axes.needs_copy(tuple(out.shape), tuple(out.strides)):  # computed beside it: see Axes.view
                out[...] = self.axes.give_back(views["out"], tuple(out.shape)[-self.axes.spatial :])
            return out

    def _with_less_workspace(self, plan: Plan) -> Plan | None:
        """A plan with half the workspace that could not be had, or None where there is none."""
        if not plan.workspace or not isinstance(self.request, ConvRequest):
            return None
        try:
            return self.make_plan(replace(self.request, workspace_limit=plan.workspace_bytes // 2))
        except ValueError:
            return None

    def _view(self, name: str, array: Any) -> Any:
        def copy(image: Any) -> Any:
            if name == "out":
                return self.backend.empty(tuple(image.shape), image.dtype)
            return self.backend.contiguous(image)

        return self.axes.view(array, copy)

    def _allocate(self) -> Any:
        if not self.channels_last:
            return self.backend.empty(self.shape, self.dtype)
        channel = int(self.axes.batched)
        rest = self.shape[:channel] + self.shape[channel + 1 :]
        array = self.backend.empty((*rest, self.shape[channel]), self.dtype)
        last = array.ndim - 1
        return array.transpose(*range(channel), last, *range(channel, last))


def prepare_conv(
    x: Any, weight: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, activation: Any = None, residual: Any = None, prologue: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv`."""
    xs = named_inputs("x", x)
    arrays = _present({**xs, "weight": weight}, bias=bias, residual=residual, out=out)
    backend = _owner(arrays)
    batched = not all(array.ndim == weight.ndim - 1 for array in xs.values())
    geometry = conv_geometry(
        _shapes(xs), tuple(weight.shape), batched=batched, stride=stride, padding=padding, padding_mode=padding_mode,
        dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(batched, geometry.rank)
    spatial = geometry.spatial(geometry.out_size)
    return _conv_call(backend, geometry, axes, spatial, list(xs), arrays, activation, prologue, method, on)


def prepare_linmerge(
    xs: Any, weight: Any, bias: Any = None, *, activation: Any = None, residual: Any = None, prologue: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `linmerge`."""
    inputs = named_inputs("xs", xs)
    arrays = _present({**inputs, "weight": weight}, bias=bias, residual=residual, out=out)
    backend = _owner(arrays)
    geometry = pointwise_geometry(_shapes(inputs), tuple(weight.shape))
    spatial = tuple(next(iter(inputs.values())).shape[2:])
    axes = Axes(True, len(spatial))
    return _conv_call(backend, geometry, axes, spatial, list(inputs), arrays, activation, prologue, method, on)


def prepare_im2col(
    x: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, out: Any = None,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `im2col`."""
    xs = named_inputs("x", x)
    arrays = _present(xs, out=out)
    backend = _owner(arrays)
    unbatched = isinstance(kernel_shape, (tuple, list)) and all(a.ndim == len(kernel_shape) + 1 for a in xs.values())
    windows = window_geometry(
        _shapes(xs), kernel_shape, batched=not unbatched, stride=stride, padding=padding, dilation=dilation
    )
    axes = Axes(not unbatched, windows.rank)
    columns_axes = Axes(not unbatched, 1)
    shape = columns_axes.shape(windows.batch, windows.in_channels * windows.taps, (windows.pixels,))
    dtype = promote(*(array.dtype for array in xs.values()))
    request = ColumnsRequest(
        windows=windows, xs=tuple(_describe(backend, axes, name, array) for name, array in xs.items()),
        columns=_result(backend, columns_axes, arrays, shape, dtype), machine=_machine(backend, on),
    )  # fmt: skip
    return Call(backend, request, plan_im2col, arrays, frozenset((*xs, "out")), axes, shape, dtype)


def prepare_col2im(
    columns: Any, spatial_shape: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `col2im`."""
    arrays = _present({"columns": columns}, out=out)
    backend = _owner(arrays)
    if columns.ndim not in (2, 3):
        given = tuple(columns.shape)
        raise ValueError(
            f"columns must have shape (N, C * prod(kernel_shape), pixels), N may be missing; given {given}"
        )
    spatial = _sizes("spatial_shape", spatial_shape)
    if not 1 <= len(spatial) <= 3:
        raise ValueError(f"spatial_shape must have 1 to 3 entries, given {len(spatial)}: {spatial}")
    batched = columns.ndim == 3
    rows, pixels = columns.shape[-2:]
    one_channel = (columns.shape[0], 1, *spatial) if batched else (1, *spatial)
    windows = window_geometry(
        {"spatial_shape": one_channel}, kernel_shape, batched=batched, stride=stride, padding=padding,
        dilation=dilation,
    )  # fmt: skip
    if rows % windows.taps or pixels != windows.pixels:
        raise ValueError(
            f"columns of shape {tuple(columns.shape)} do not fit: needed a multiple of {windows.taps} rows (taps)"
            f" and {windows.pixels} pixels for spatial_shape {spatial}"
        )
    windows = replace(windows, channels=(rows // windows.taps,))
    axes = Axes(batched, windows.rank)
    shape = axes.shape(windows.batch, windows.in_channels, spatial)
    dtype = promote(columns.dtype)
    request = ColumnsRequest(
        windows=windows, xs=(_result(backend, axes, arrays, shape, dtype),),
        columns=_describe(backend, Axes(batched, 1), "columns", columns), machine=_machine(backend, on),
    )  # fmt: skip
    return Call(backend, request, plan_col2im, arrays, frozenset(("columns", "out")), axes, shape, dtype)


def named_inputs(name: str, x: Any) -> dict[str, Any]:
    """One array, or a list or tuple of arrays that stand for their concatenation, by argument name."""
    if not isinstance(x, (list, tuple)):
        return {name: x}
    if not x:
        raise ValueError(f"{name} is an empty sequence, needed at least one array")
    return {f"{name}[{i}]": array for i, array in enumerate(x)}


def _present(required: Arrays, **optional: Any) -> dict[str, Any]:
    return {**required, **{name: array for name, array in optional.items() if array is not None}}


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _owner(arrays: Arrays) -> Backend:
    backend = backend_for(arrays)
    for name, array in arrays.items():
        check_dtype(name, array.dtype)
    return backend


def _conv_call(
    backend: Backend, geometry: ConvGeometry, axes: Axes, spatial: tuple[int, ...], inputs: list[str],
    arrays: dict[str, Any], activation: Any, prologue: Any, method: str, on: str | None,
) -> Call:  # fmt: skip
    """The common part of `conv` and `linmerge`: everything but the geometry."""
    xs, weight = [arrays[name] for name in inputs], arrays["weight"]
    check_method(method)
    if prologue is not None:
        raise ValueError("prologue is not in this version: apply scale, shift and activation to x first")
    dtype = promote(*(x.dtype for x in xs), weight.dtype)
    resolved = resolve_activation(activation)
    if resolved and dtype.kind == "c":
        raise TypeError(f"activation {resolved} is not defined for the complex result, {dtype.name}")
    shape = axes.shape(geometry.batch, geometry.out_channels, spatial)
    _check_addend(arrays, "bias", (geometry.out_channels,), dtype)
    _check_addend(arrays, "residual", shape, dtype)
    channels_last = all(is_channels_last(x.shape, x.strides, x.dtype.itemsize, int(axes.batched)) for x in xs)
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    settings = current_settings()
    request = ConvRequest(
        geometry=geometry, xs=tuple(_describe(backend, axes, name, arrays[name]) for name in inputs),
        weight=_describe(backend, Axes(True, weight.ndim - 2), "weight", weight),
        out=_result(backend, axes, arrays, shape, dtype, channels_last),
        bias=_describe(backend, Axes(False, 0), "bias", arrays["bias"]) if "bias" in arrays else None,
        residual=_describe(backend, axes, "residual", arrays["residual"]) if "residual" in arrays else None,
        x_dtype=x_dtype, weight_dtype=weight_dtype, activation=resolved, method=method,
        machine=_machine(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=_widened({name: arrays[name] for name in (*inputs, "weight")}, dtype) + _copied(axes, arrays),
    )  # fmt: skip
    images = frozenset((*inputs, "residual", "out"))
    return Call(backend, request, plan_conv, arrays, images, axes, shape, dtype, channels_last)


def _machine(backend: Backend, on: str | None) -> Machine:
    if on is None:
        return backend.machine(current_settings().threads)
    if backend.name != "numpy":
        raise TypeError(
            f"on={on!r} plans for a GPU that need not be there, from NumPy arrays; given {backend.name} arrays"
        )
    return known_gpu(on)


# Checks.


def _check_addend(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if name not in arrays:
        return
    array = arrays[name]
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {shape}")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{name} is {array.dtype.name}, the result is {dtype.name}: casting would drop imaginary parts")


def _check_out(arrays: Arrays, shape: tuple[int, ...], dtype: np.dtype, backend: Backend) -> None:
    out = arrays["out"]
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, needed {shape}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, needed {dtype}")
    flags = getattr(out, "flags", None)
    if getattr(flags, "writeable", True) is False:
        raise ValueError("out is read-only")
    if overlaps_itself(out.shape, out.strides, out.dtype.itemsize):
        raise ValueError(f"out overlaps itself: shape {tuple(out.shape)}, strides {tuple(out.strides)}")
    place = _extent(backend, out)
    for name, array in arrays.items():
        if name == "out" or 0 in (prod(array.shape), prod(shape)):
            continue
        other = _extent(backend, array)
        if name == "residual" and other.__array_interface__ == place.__array_interface__:
            continue  # out is residual: each element is read just before it is written
        try:
            shared = np.shares_memory(place, other, max_work=100_000)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            raise ValueError(f"out overlaps {name}; only an out that is exactly the residual may")


class _Memory:
    """A region of memory as NumPy sees one, for questions about addresses; its bytes are never touched."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}"
        }  # fmt: skip


def _extent(backend: Backend, array: Any) -> np.ndarray:
    return np.asarray(_Memory(backend.address(array), tuple(array.shape), tuple(array.strides), array.dtype.itemsize))


def _widened(arrays: Arrays, dtype: np.dtype) -> tuple[str, ...]:
    """Name the argument that made the result wider than another argument is."""
    result, names = dtype_name(dtype), {name: dtype_name(array.dtype) for name, array in arrays.items()}
    wide = [name for name, kind in names.items() if kind == result]
    narrow = [f"{name} ({kind})" for name, kind in names.items() if kind != result]
    if not narrow:
        return ()
    cause = f"{wide[0]} ({result}) widens" if wide else "mixed precisions widen"
    return (f"{cause} the result to {result}; narrower: {', '.join(narrow)}",)


def _copied(axes: Axes, arrays: Arrays) -> tuple[str, ...]:
    """Name the images that have to be copied whole to have no more than three spatial axes."""
    images = {name: array for name, array in arrays.items() if name not in ("weight", "bias")}
    return tuple(
        f"{name}: its leading spatial axes have no one stride, so it is copied, beyond the workspace"
        for name, array in images.items()
        if axes.needs_copy(tuple(array.shape), tuple(array.strides))
    )


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return per_axis(name, tuple(values), len(values), 0)


# Descriptions.


def _describe(backend: Backend, axes: Axes, name: str, array: Any) -> Operand:
    address = backend.address(array) if array.size else 0
    return axes.describe(name, dtype_name(array.dtype), tuple(array.shape), tuple(array.strides), address)


def _result(
    backend: Backend, axes: Axes, arrays: Arrays, shape: tuple[int, ...], dtype: np.dtype, channels_last: bool = False
) -> Operand:
    """The result described: the caller's `out`, which is checked, or what `Call` will allocate."""
    if "out" in arrays:
        _check_out(arrays, shape, dtype, backend)
        return _describe(backend, axes, "out", arrays["out"])
    name = dtype_name(dtype)
    strides = byte_strides(shape, name)
    if channels_last:
        channel = int(axes.batched)
        rest = byte_strides((*shape[:channel], *shape[channel + 1 :], shape[channel]), name)
        strides = (*rest[:channel], rest[-1], *rest[channel:-1])
    return axes.describe("out", name, shape, strides, 0)
