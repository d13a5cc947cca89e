"""The arguments of `conv` and `linmerge`, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyconv.activations import Activation, derivative_from_result, resolve_activation
from cupyconv.axes import Axes
from cupyconv.calls.call import (
    Arrays,
    Call,
    activation_for,
    copied,
    describe,
    describe_given,
    describe_result,
    machine_for,
    named_inputs,
    owner,
    present,
    shapes_of,
    widened,
)
from cupyconv.dispatch import Backend
from cupyconv.dtypes import dtype_from_name, operand_dtypes, promote
from cupyconv.geometry import ConvGeometry, conv_geometry, pointwise_geometry
from cupyconv.planning.request import ConvRequest, check_method
from cupyconv.prepared import Result
from cupyconv.prologue import Prologue
from cupyconv.settings import current_settings


def prepare_conv(
    x: Any, weight: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, activation: Any = None, residual: Any = None, scale: Any = None,
    shift: Any = None, prologue_activation: Any = None, method: str = "auto", out: Any = None, saving: bool = False,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv`, whose prologue comes in its three parts (`prologue_parts`).

    `saving` asks for a list of results, as `_conv_call` says.
    """
    xs = named_inputs("x", x)
    arrays = present({**xs, "weight": weight}, bias=bias, residual=residual, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    batched = not all(array.ndim == weight.ndim - 1 for array in xs.values())
    geometry = conv_geometry(
        shapes_of(xs), tuple(weight.shape), batched=batched, stride=stride, padding=padding, padding_mode=padding_mode,
        dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(batched, geometry.rank)
    spatial = geometry.spatial(geometry.out_size)
    return _conv_call(
        backend, geometry, axes, spatial, list(xs), arrays, activation, prologue_activation, method, saving, on
    )


def prepare_linmerge(
    xs: Any, weight: Any, bias: Any = None, *, activation: Any = None, residual: Any = None, scale: Any = None,
    shift: Any = None, prologue_activation: Any = None, method: str = "auto", out: Any = None, saving: bool = False,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `linmerge`; prologue and `saving` as for `prepare_conv`."""
    inputs = named_inputs("xs", xs)
    arrays = present({**inputs, "weight": weight}, bias=bias, residual=residual, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    geometry = pointwise_geometry(shapes_of(inputs), tuple(weight.shape))
    spatial = tuple(next(iter(inputs.values())).shape[2:])
    axes = Axes(True, len(spatial))
    return _conv_call(
        backend, geometry, axes, spatial, list(inputs), arrays, activation, prologue_activation, method, saving, on
    )


def prologue_parts(prologue: Any) -> tuple[Any, Any, Any]:
    """A prologue's scale, shift and activation, each None where it is absent."""
    if prologue is None:
        return None, None, None
    if not isinstance(prologue, (tuple, list)):
        raise TypeError(f"prologue must be None or a tuple (scale, shift, activation), given {prologue!r}")
    if len(prologue) != 3:
        raise ValueError(f"prologue has {len(prologue)} entries, needed 3: scale, shift, activation; each may be None")
    scale, shift, activation = prologue
    return scale, shift, activation


def _conv_call(
    backend: Backend, geometry: ConvGeometry, axes: Axes, spatial: tuple[int, ...], inputs: list[str],
    arrays: dict[str, Any], activation: Any, prologue_activation: Any, method: str, saving: bool,
    on: str | None,
) -> Call:  # fmt: skip
    """The common part of `conv` and `linmerge`: everything but the geometry.

    Where `saving`, the results are a list, whose last is what the derivative of the activation is worked out
    from: the one result, or the pre-activation beside it.
    """
    xs, weight = [arrays[name] for name in inputs], arrays["weight"]
    check_method(method)
    dtype = promote({name: arrays[name] for name in (*inputs, "weight")})
    resolved = activation_for(activation, dtype)
    shape = axes.shape(geometry.batch, geometry.out_channels, spatial)
    check_addend(arrays, "bias", (geometry.out_channels,), dtype)
    check_addend(arrays, "residual", shape, dtype)
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    prologue = describe_prologue(
        backend, arrays, geometry.in_channels, x_dtype, resolve_activation(prologue_activation)
    )
    if prologue.activation and dtype.kind == "c":
        raise TypeError(
            f"prologue activation {prologue.activation} is not defined beside the complex result, {dtype.name}"
        )
    channels_last = all(map(axes.asks_channels_last, xs))
    result = Result("out", shape, dtype, channels_last)
    keeps_pre = saving and resolved and not derivative_from_result(resolved)
    pre = result._replace(name="pre")
    settings = current_settings()
    request = ConvRequest(
        geometry=geometry, xs=tuple(describe(backend, axes, name, arrays[name]) for name in inputs),
        weight=describe(backend, Axes(True, weight.ndim - 2), "weight", weight),
        out=describe_result(backend, axes, arrays, result),
        bias=describe_given(backend, Axes(False, 0), "bias", arrays),
        residual=describe_given(backend, axes, "residual", arrays),
        pre=describe_result(backend, axes, arrays, pre) if keeps_pre else None,
        x_dtype=x_dtype, weight_dtype=weight_dtype, activation=resolved, prologue=prologue, method=method,
        machine=machine_for(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened({name: arrays[name] for name in (*inputs, "weight")}, dtype) + copied(axes, arrays),
    )  # fmt: skip
    images = frozenset((*inputs, "residual", "out", "pre"))
    results = (result, pre) if keeps_pre else (result,)
    return Call(backend, request, arrays, images, axes, results, listed=saving)


def check_addend(
    arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype, what: str = "the result is"
) -> None:
    if name not in arrays:
        return
    array = arrays[name]
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {shape}")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{name} is {array.dtype.name}, {what} {dtype.name}: casting would drop imaginary parts")


def describe_prologue(
    backend: Backend, arrays: Arrays, channels: int, x_dtype: str, activation: Activation
) -> Prologue:
    """The prologue of inputs of so many merged channels, computed in `x_dtype`, as planning sees it."""
    vectors = {}
    for name in ("scale", "shift"):
        check_addend(arrays, name, (channels,), dtype_from_name(x_dtype), "the inputs are computed in")
        vectors[name] = describe_given(backend, Axes(False, 0), name, arrays)
    return Prologue(**vectors, activation=activation)
