"""The arguments of `max_pool`, and of its gradient, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyconv.axes import Axes
from cupyconv.calls.call import (
    Arrays,
    Call,
    describe,
    describe_result,
    is_unbatched,
    machine_for,
    named_inputs,
    owner,
    present,
    shapes_of,
)
from cupyconv.geometry import Windows, window_geometry
from cupyconv.planning.request import PoolingGradientRequest, PoolingRequest
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


def prepare_max_pool(
    x: Any, kernel_shape: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1, out: Any = None,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `max_pool`."""
    xs = named_inputs("x", x)
    arrays = present({**xs, **_like("out", out, "x", x)})
    backend = owner(arrays)
    windows, axes = _pooling(xs, kernel_shape, stride, padding, dilation)
    spatial = windows.spatial(windows.out_size)
    results = tuple(
        _result(axes, image, name.replace("x", "out"), axes.shape(windows.batch, channels, spatial))
        for (name, image), channels in zip(xs.items(), windows.channels)
    )
    request = PoolingRequest(
        windows=windows, xs=tuple(describe(backend, axes, name, array) for name, array in xs.items()),
        outs=tuple(describe_result(backend, axes, arrays, result) for result in results),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset((*arrays, *(result.name for result in results)))
    return Call(backend, request, arrays, images, axes, results, isinstance(x, (list, tuple)))


def prepare_max_pool_gradient(
    x: Any, y: Any, grad: Any, kernel_shape: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the gradients given to the pullback of ``max_pool(x, ...)``, which was y."""
    xs, ys, grads = named_inputs("x", x), _like("y", y, "x", x), _like("grad", grad, "y", y)
    arrays = present({**xs, **ys, **grads})
    backend = owner(arrays)
    for (y_name, one_y), (name, one_grad) in zip(ys.items(), grads.items()):
        if tuple(one_grad.shape) != tuple(one_y.shape):
            raise ValueError(f"{name} has shape {tuple(one_grad.shape)}, needed that of {y_name}, {tuple(one_y.shape)}")
        if one_grad.dtype.kind == "c":
            raise TypeError(f"{name} is {one_grad.dtype.name}, {y_name} is {one_y.dtype.name}: both must be real")
    windows, axes = _pooling(xs, kernel_shape, stride, padding, dilation)
    results = tuple(_result(axes, image, name.replace("x", "out"), tuple(image.shape)) for name, image in xs.items())
    described = [
        tuple(describe(backend, axes, name, array) for name, array in images.items()) for images in (xs, ys, grads)
    ]
    request = PoolingGradientRequest(
        windows=windows, xs=described[0], ys=described[1], grads=described[2],
        outs=tuple(describe_result(backend, axes, arrays, result) for result in results),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset((*arrays, *(result.name for result in results)))
    return Call(backend, request, arrays, images, axes, results, isinstance(x, (list, tuple)))


def _pooling(xs: Arrays, kernel_shape: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Windows, Axes]:
    for name, array in xs.items():
        if array.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {array.dtype}: complex numbers have no order, so none is the largest")
    batched = not is_unbatched(xs, kernel_shape)
    windows = window_geometry(
        shapes_of(xs), kernel_shape, batched=batched, stride=kernel_shape if stride is None else stride,
        padding=padding, dilation=dilation,
    )  # fmt: skip
    return windows, Axes(batched, windows.rank)


def _like(name: str, given: Any, model_name: str, model: Any) -> dict[str, Any]:
    """One array beside one array, as many beside a sequence, by argument name; none where there is none."""
    if given is None:
        return {}
    if not isinstance(model, (list, tuple)):
        return {name: given}
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a sequence, as {model_name} is, given {type(given).__qualname__}")
    if len(given) != len(model):
        raise ValueError(f"{name} has {len(given)} arrays, needed {len(model)}, as many as {model_name}")
    return named_inputs(name, given)


def _result(axes: Axes, image: Any, name: str, shape: tuple[int, ...]) -> Result:
    """A result of an image's dtype and order."""
    dtype: np.dtype = image.dtype.newbyteorder("=")
    return Result(name, shape, dtype, axes.asks_channels_last(image))
