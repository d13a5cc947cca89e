"""The arguments of `conv_grad_weight`, checked."""

from __future__ import annotations

from typing import Any

from cupyconv.activations import Activation, resolve_activation
from cupyconv.axes import Axes
from cupyconv.calls.call import (
    Call,
    describe,
    describe_result,
    is_unbatched,
    machine_for,
    named_inputs,
    owner,
    present,
    shapes_of,
    widened,
)
from cupyconv.calls.convolution import describe_prologue
from cupyconv.dispatch import Backend
from cupyconv.dtypes import operand_dtypes, promote
from cupyconv.geometry import ConvGeometry, weight_gradient_geometry
from cupyconv.planning.request import WeightGradientRequest, check_method
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


def prepare_conv_grad_weight(
    grad: Any, x: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, scale: Any = None, shift: Any = None, prologue_activation: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv_grad_weight`, and a prologue in its three parts, which the pullbacks give."""
    xs = named_inputs("x", x)
    arrays = present({"grad": grad, **xs}, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    unbatched = is_unbatched(xs, kernel_shape)
    geometry = weight_gradient_geometry(
        tuple(grad.shape), shapes_of(xs), kernel_shape, batched=not unbatched, stride=stride, padding=padding,
        padding_mode=padding_mode, dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(not unbatched, geometry.rank)
    shape = (geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))
    activation = resolve_activation(prologue_activation)
    return _weight_gradient_call(backend, geometry, axes, shape, list(xs), arrays, activation, method, on)


def _weight_gradient_call(
    backend: Backend, geometry: ConvGeometry, axes: Axes, shape: tuple[int, ...], inputs: list[str],
    arrays: dict[str, Any], activation: Activation, method: str, on: str | None,
) -> Call:  # fmt: skip
    """Everything but the geometry; `shape` is the weight's."""
    xs, grad = [arrays[name] for name in inputs], arrays["grad"]
    check_method(method)
    dtype = promote({name: arrays[name] for name in ("grad", *inputs)})
    x_dtype, grad_dtype = operand_dtypes([x.dtype for x in xs], grad.dtype, dtype)
    result = Result("out", shape, dtype)
    settings = current_settings()
    request = WeightGradientRequest(
        geometry=geometry, xs=tuple(describe(backend, axes, name, arrays[name]) for name in inputs),
        grad=describe(backend, axes, "grad", grad),
        out=describe_result(backend, Axes(True, len(shape) - 2), arrays, result),
        prologue=describe_prologue(backend, arrays, geometry.in_channels, x_dtype, activation),
        x_dtype=x_dtype, grad_dtype=grad_dtype, method=method, machine=machine_for(backend, on),
        workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened({name: arrays[name] for name in (*inputs, "grad")}, dtype),
    )  # fmt: skip
    return Call(backend, request, arrays, frozenset((*inputs, "grad")), axes, (result,))
