"""The arguments of `conv_chain`, checked layer by layer, each as those of `conv` are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cupyconv.axes import Axes
from cupyconv.calls.call import (
    Call,
    activation_for,
    describe,
    describe_given,
    describe_result,
    machine_for,
    named_inputs,
    owner,
    present,
    widened,
)
from cupyconv.calls.convolution import check_addend
from cupyconv.dispatch import Backend
from cupyconv.dtypes import operand_dtypes, promote
from cupyconv.geometry import conv_geometry
from cupyconv.operands import is_channels_last
from cupyconv.planning.request import ChainRequest, ConvRequest, Machine
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


class LayerSettings(NamedTuple):
    """What a layer has beside its arrays, and which of these it has."""

    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    activation: Any
    has_bias: bool
    has_residual: bool


def prepare_split_chain(
    x: Any, weights: Sequence[Any], biases: Sequence[Any], residuals: Sequence[Any], layers: Sequence[tuple[Any, ...]],
    fuse: Any = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check a chain whose layers are taken apart; `biases` and `residuals` are those that there are."""
    settings = [LayerSettings(*layer) for layer in layers]
    if not (isinstance(fuse, bool) or (isinstance(fuse, str) and fuse == "auto")):
        raise ValueError(f"fuse must be 'auto', True or False, given {fuse!r}")
    inputs = named_inputs("x", x)
    arrays = present(
        {
            **inputs,
            **{f"weight[{i}]": weight for i, weight in enumerate(weights)},
            **_named("bias", biases, [layer.has_bias for layer in settings]),
            **_named("residual", residuals, [layer.has_residual for layer in settings]),
        },
        out=out,
    )
    backend = owner(arrays)
    rank = weights[0].ndim - 2
    batched = not all(array.ndim == rank + 1 for array in inputs.values())
    checker = _Checker(backend, Axes(batched, rank), arrays, machine_for(backend, on), len(settings))
    requests: list[ConvRequest] = []
    images = {
        name: _Image(tuple(array.shape), array.dtype, checker.axes.asks_channels_last(array))
        for name, array in inputs.items()
    }
    for i, layer in enumerate(settings):
        request, result = checker.layer(i, layer, images)
        requests.append(request)
        images = {result.name: _Image(result.shape, result.dtype, _is_stored_channels_last(request))}
    chain = ChainRequest(
        layers=tuple(requests), fuse=fuse, machine=checker.machine, workspace_limit=current_settings().workspace_limit
    )
    named = frozenset((*inputs, *(name for name in arrays if name.startswith("residual[")), "out"))
    return Call(backend, chain, arrays, named, checker.axes, (result,))


class _Image(NamedTuple):
    """What the checks of a layer look at of the images it reads."""

    shape: tuple[int, ...]
    dtype: Any
    channels_last: bool


class _Checker:
    """What the layers of a chain have in common."""

    def __init__(self, backend: Backend, axes: Axes, arrays: Mapping[str, Any], machine: Machine, count: int) -> None:
        self.backend, self.axes, self.arrays, self.machine = backend, axes, arrays, machine
        self.last = count - 1
        #: Intermediate results as planning sees them.
        self.between: dict[str, Any] = {}

    def layer(self, i: int, layer: LayerSettings, images: Mapping[str, _Image]) -> tuple[ConvRequest, Result]:
        """Check layer `i`, which reads `images`."""
        backend, axes, arrays = self.backend, self.axes, self.arrays
        weight, bias, residual = arrays[f"weight[{i}]"], f"bias[{i}]", f"residual[{i}]"
        try:
            geometry = conv_geometry(
                {name: image.shape for name, image in images.items()}, tuple(weight.shape), batched=axes.batched,
                stride=layer.stride, padding=layer.padding, padding_mode="constant", dilation=layer.dilation, groups=layer.groups,
            )  # fmt: skip
            dtype = promote({**images, f"weight[{i}]": weight})
            activation = activation_for(layer.activation, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layers[{i}]: {error}") from None
        shape = axes.shape(geometry.batch, geometry.out_channels, geometry.spatial(geometry.out_size))
        check_addend(arrays, bias, (geometry.out_channels,), dtype)
        check_addend(arrays, residual, shape, dtype)
        channels_last = all(image.channels_last for image in images.values())
        name = "out" if i == self.last else f"layer[{i}]"
        result = Result(name, shape, dtype, channels_last, addend=residual)
        x_dtype, weight_dtype = operand_dtypes([image.dtype for image in images.values()], weight.dtype, dtype)
        read = [self.between.get(name) or describe(backend, axes, name, arrays[name]) for name in images]
        request = ConvRequest(
            geometry=geometry, xs=tuple(read), weight=describe(backend, Axes(True, weight.ndim - 2), f"weight[{i}]", weight),
            out=describe_result(backend, axes, arrays, result),
            bias=describe_given(backend, Axes(False, 0), bias, arrays),
            residual=describe_given(backend, axes, residual, arrays),
            x_dtype=x_dtype, weight_dtype=weight_dtype, activation=activation, machine=self.machine,
            allow_tf32=current_settings().allow_tf32,
            notes=widened({**images, f"weight[{i}]": weight}, dtype),
        )  # fmt: skip
        self.between[name] = request.out
        return request, result


def _named(name: str, arrays: Sequence[Any], present: Sequence[bool]) -> dict[str, Any]:
    """Arrays by name, of the layers that have one."""
    places = [i for i, is_there in enumerate(present) if is_there]
    return {f"{name}[{i}]": array for i, array in zip(places, arrays, strict=True)}


def _is_stored_channels_last(request: ConvRequest) -> bool:
    """Whether an intermediate result would ask for a channels-last one, were it an argument."""
    out = request.out
    return is_channels_last(out.shape, [step * out.itemsize for step in out.strides], out.itemsize, 1)
