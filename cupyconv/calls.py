"""From arguments to a call that can be planned and run: everything is checked here, nothing is launched.

A `Call` is the public functions' common path: arrays with one owner, a validated problem, a request to
planning.  ``plan()`` is all that `explain` needs; ``run()`` allocates, executes and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from cupyconv.activations import resolve_activation
from cupyconv.dispatch import Backend, backend_for
from cupyconv.dtypes import check_dtype, dtype_name, operand_dtypes, promote
from cupyconv.geometry import ConvGeometry, conv_geometry, pointwise_geometry, window_geometry
from cupyconv.machine import known_gpu
from cupyconv.operands import Operand, c_strides, collapsed_stride, is_channels_last, operand, overlaps_itself
from cupyconv.padding import per_axis
from cupyconv.plan import Plan
from cupyconv.planning import plan_col2im, plan_conv, plan_im2col
from cupyconv.planning.request import ColumnsRequest, ConvRequest, Machine
from cupyconv.settings import current_settings

Arrays = Mapping[str, Any]


@dataclass
class Call:
    """One call, checked and ready; `request` does not change with the arrays' content."""

    backend: Backend
    request: ConvRequest | ColumnsRequest
    make_plan: Callable[[Any], Plan]
    arrays: dict[str, Any]
    allocate: Callable[[], Any]
    finish: Callable[[Any], Any] = field(default=lambda out: out)

    def plan(self) -> Plan:
        return self.make_plan(self.request)

    def run(self) -> Any:
        """Execute the plan; smaller chunks are tried before a failed allocation is reported."""
        with self.backend.current():
            arrays = {name: array for name, array in self.arrays.items() if array is not None}
            if "out" not in arrays:
                arrays["out"] = self.allocate()
            request = self.request
            while True:
                plan = self.make_plan(request)
                try:
                    self.backend.run(plan, arrays)
                except MemoryError:
                    request = _with_less_workspace(request, plan)
                    if request is None:
                        raise
                else:
                    return self.finish(arrays["out"])


def _with_less_workspace(request: Any, plan: Plan) -> Any:
    """The request with half the workspace that could not be had, or None where nothing smaller exists."""
    if not plan.workspace or not isinstance(request, ConvRequest):
        return None
    smaller = replace(request, workspace_limit=plan.workspace_bytes // 2)
    try:
        plan_conv(smaller)
    except ValueError:
        return None
    return smaller


def prepare_conv(
    x: Any, weight: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, activation: Any = None, residual: Any = None, prologue: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv`."""
    xs = named_inputs("x", x)
    arrays = {**xs, "weight": weight, "bias": bias, "residual": residual, "out": out}
    backend = _owner(arrays)
    unbatched = all(array.ndim == weight.ndim - 1 for array in xs.values())
    if unbatched:
        arrays = {name: _with_batch(name, array, xs) for name, array in arrays.items()}
    geometry = conv_geometry(
        [tuple(arrays[name].shape) for name in xs], tuple(weight.shape), stride=stride, padding=padding,
        padding_mode=padding_mode, dilation=dilation, groups=groups,
    )  # fmt: skip
    call = _conv_call(backend, geometry, list(xs), arrays, activation, prologue, method, on)
    return _without_batch(call, out) if unbatched else call


def prepare_linmerge(
    xs: Any, weight: Any, bias: Any = None, *, activation: Any = None, residual: Any = None, prologue: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `linmerge`."""
    inputs = named_inputs("xs", xs)
    arrays = {**inputs, "weight": weight, "bias": bias, "residual": residual, "out": out}
    backend = _owner(arrays)
    rank = next(iter(inputs.values())).ndim - 2
    if rank < 0:
        raise ValueError(f"xs must have shape (N, C, *spatial), given {next(iter(inputs.values())).shape}")
    geometry = pointwise_geometry([tuple(array.shape) for array in inputs.values()], tuple(weight.shape))
    if rank <= 3:
        return _conv_call(backend, geometry, list(inputs), arrays, activation, prologue, method, on)

    # More spatial axes than a geometry has: the leading ones become one, their order means nothing here.
    spatial = tuple(next(iter(inputs.values())).shape[2:])
    for name in ("out", "residual"):
        if arrays[name] is not None and tuple(arrays[name].shape[2:]) != spatial:
            raise ValueError(f"{name} has shape {tuple(arrays[name].shape)}, needed (N, C_out, *{spatial})")
    arrays = {
        name: array if name in ("weight", "bias") or array is None else _three_spatial(backend, name, array)
        for name, array in arrays.items()
    }
    geometry = pointwise_geometry([tuple(arrays[name].shape) for name in inputs], tuple(weight.shape))
    call = _conv_call(backend, geometry, list(inputs), arrays, activation, prologue, method, on)

    def spread(result: Any) -> Any:
        if out is None:
            return result.reshape(*result.shape[:2], *spatial)
        if backend.address(result) != backend.address(out):  # its strides allow no view of three axes
            out[...] = result.reshape(out.shape)
        return out

    call.finish = spread
    return call


def prepare_im2col(
    x: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, out: Any = None,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `im2col`."""
    xs = named_inputs("x", x)
    arrays = {**xs, "out": out}
    backend = _owner(arrays)
    unbatched = isinstance(kernel_shape, (tuple, list)) and all(a.ndim == len(kernel_shape) + 1 for a in xs.values())
    if unbatched:
        arrays = {name: None if array is None else array[None] for name, array in arrays.items()}
    windows = window_geometry(
        [tuple(arrays[name].shape) for name in xs], kernel_shape, stride=stride, padding=padding, dilation=dilation
    )
    dtype = promote(*(array.dtype for array in xs.values()))
    shape = (windows.batch, windows.in_channels * windows.taps, windows.pixels)
    if arrays["out"] is not None:
        _check_out(arrays, shape, dtype, backend)
        columns = _describe(backend, "out", arrays["out"])
    else:
        columns = _fresh("out", dtype_name(dtype), shape, channels_last=False)
    request = ColumnsRequest(
        windows=windows, xs=tuple(_describe(backend, name, arrays[name]) for name in xs), columns=columns,
        machine=_machine(backend, on),
    )  # fmt: skip
    call = Call(backend, request, plan_im2col, arrays, lambda: backend.empty(shape, dtype))
    return _without_batch(call, out) if unbatched else call


def prepare_col2im(
    columns: Any, spatial_shape: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `col2im`."""
    arrays = {"columns": columns, "out": out}
    backend = _owner(arrays)
    unbatched = columns.ndim == 2
    if unbatched:
        arrays = {name: None if array is None else array[None] for name, array in arrays.items()}
    columns = arrays["columns"]
    if columns.ndim != 3:
        raise ValueError(f"columns must have shape (N, C * prod(kernel_shape), pixels), given {columns.shape}")
    spatial = _sizes("spatial_shape", spatial_shape)
    windows = window_geometry(
        [(columns.shape[0], 1, *spatial)], kernel_shape, stride=stride, padding=padding, dilation=dilation
    )
    if columns.shape[1] % windows.taps or columns.shape[2] != windows.pixels:
        raise ValueError(
            f"columns of shape {tuple(columns.shape)} do not fit: needed a multiple of {windows.taps} rows (taps)"
            f" and {windows.pixels} pixels for spatial_shape {spatial}"
        )
    windows = replace(windows, channels=(columns.shape[1] // windows.taps,))
    shape = (windows.batch, windows.in_channels, *spatial)
    dtype = promote(columns.dtype)
    if arrays["out"] is not None:
        _check_out(arrays, shape, dtype, backend)
        target = _describe(backend, "out", arrays["out"])
    else:
        target = _fresh("out", dtype_name(dtype), shape, channels_last=False)
    request = ColumnsRequest(
        windows=windows, xs=(target,), columns=_describe(backend, "columns", columns), machine=_machine(backend, on)
    )
    call = Call(backend, request, plan_col2im, arrays, lambda: backend.empty(shape, dtype))
    return _without_batch(call, out) if unbatched else call


def named_inputs(name: str, x: Any) -> dict[str, Any]:
    """One array, or a list or tuple of arrays that stand for their concatenation, by argument name."""
    if not isinstance(x, (list, tuple)):
        return {name: x}
    if not x:
        raise ValueError(f"{name} is an empty sequence, needed at least one array")
    return {f"{name}[{i}]": array for i, array in enumerate(x)}


def _owner(arrays: Arrays) -> Backend:
    backend = backend_for(arrays)
    for name, array in arrays.items():
        if array is not None:
            check_dtype(name, array.dtype)
    return backend


def _conv_call(
    backend: Backend, geometry: ConvGeometry, inputs: list[str], arrays: dict[str, Any], activation: Any,
    prologue: Any, method: str, on: str | None,
) -> Call:  # fmt: skip
    """The common part of `conv` and `linmerge`: everything but the geometry."""
    xs, weight, out = [arrays[name] for name in inputs], arrays["weight"], arrays["out"]
    if prologue is not None:
        raise ValueError("prologue is not in this version: apply scale, shift and activation to x first")
    dtype = promote(*(x.dtype for x in xs), weight.dtype)
    resolved = resolve_activation(activation)
    if resolved and dtype.kind == "c":
        raise TypeError(f"activation {resolved} is not defined for the complex result, {dtype.name}")
    shape = (geometry.batch, geometry.out_channels, *geometry.spatial(geometry.out_size))
    _check_addend("bias", arrays["bias"], (geometry.out_channels,), dtype)
    _check_addend("residual", arrays["residual"], shape, dtype)
    channels_last = all(is_channels_last(x.shape, x.strides, x.dtype.itemsize) for x in xs)
    if out is not None:
        _check_out(arrays, shape, dtype, backend)
        target = _describe(backend, "out", out)
    else:
        target = _fresh("out", dtype_name(dtype), shape, channels_last)
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    settings = current_settings()

    def describe(name: str) -> Operand | None:
        return None if arrays[name] is None else _describe(backend, name, arrays[name])

    request = ConvRequest(
        geometry=geometry, xs=tuple(_describe(backend, name, arrays[name]) for name in inputs),
        weight=_describe(backend, "weight", weight), out=target, bias=describe("bias"), residual=describe("residual"),
        x_dtype=x_dtype, weight_dtype=weight_dtype, activation=resolved, method=method,
        machine=_machine(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=_widened({name: arrays[name] for name in (*inputs, "weight")}, dtype),
    )  # fmt: skip
    return Call(backend, request, plan_conv, arrays, lambda: _allocate(backend, shape, dtype, channels_last))


def _machine(backend: Backend, on: str | None) -> Machine:
    if on is None:
        return backend.machine(current_settings().threads)
    if backend.name != "numpy":
        raise TypeError(
            f"on={on!r} plans for a GPU that need not be there, from NumPy arrays; given {backend.name} arrays"
        )
    return known_gpu(on)


# Checks.


def _check_addend(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array is None:
        return
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
    if overlaps_itself(out.shape, out.strides):
        raise ValueError(f"out overlaps itself: shape {tuple(out.shape)}, strides {tuple(out.strides)}")
    place = _extent(backend, out)
    for name, array in arrays.items():
        if name == "out" or array is None or 0 in (prod(array.shape), prod(shape)):
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
    if all(array.dtype == dtype for array in arrays.values()):
        return ()
    wide = [name for name, array in arrays.items() if array.dtype == dtype]
    narrow = [f"{name} ({array.dtype.name})" for name, array in arrays.items() if array.dtype != dtype]
    cause = f"{wide[0]} ({dtype.name}) widens" if wide else "mixed precisions widen"
    return (f"{cause} the result to {dtype.name}; narrower: {', '.join(narrow)}",)


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return per_axis(name, tuple(values), len(values), 0)


# Descriptions and allocation.


def _describe(backend: Backend, name: str, array: Any) -> Operand:
    address = backend.address(array) if array.size else 0
    return operand(name, dtype_name(array.dtype), tuple(array.shape), tuple(array.strides), address)


def _fresh(name: str, dtype: str, shape: tuple[int, ...], channels_last: bool) -> Operand:
    """The operand that `_allocate` would give."""
    if not channels_last:
        strides = c_strides(shape)
    else:
        last = c_strides((shape[0], *shape[2:], shape[1]))
        strides = (last[0], last[-1], *last[1:-1])
    spatial = 5 - len(shape)
    return Operand(
        name, dtype, (*shape[:2], *(1,) * spatial, *shape[2:]), (*strides[:2], *(0,) * spatial, *strides[2:])
    )


def _allocate(backend: Backend, shape: tuple[int, ...], dtype: np.dtype, channels_last: bool) -> Any:
    if not channels_last:
        return backend.empty(shape, dtype)
    array = backend.empty((shape[0], *shape[2:], shape[1]), dtype)
    return array.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))


def _with_batch(name: str, array: Any, xs: Arrays) -> Any:
    """Images, residual and out with a batch axis of one; weight and bias as they are."""
    return array[None] if array is not None and (name in xs or name in ("residual", "out")) else array


def _three_spatial(backend: Backend, name: str, array: Any) -> Any:
    """The leading spatial axes as one: a view where the strides allow it, else a copy (of `out`, room for one)."""
    if collapsed_stride(array.shape[2:-2], array.strides[2:-2]) is None:
        array = backend.empty(tuple(array.shape), array.dtype) if name == "out" else backend.contiguous(array)
    return array.reshape(*array.shape[:2], prod(array.shape[2:-2]), *array.shape[-2:])


def _without_batch(call: Call, out: Any) -> Call:
    """The call with a result that, like its input, has no batch axis."""
    call.finish = (lambda result: result[0]) if out is None else (lambda result: out)
    return call
