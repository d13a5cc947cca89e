"""`max_pool`: the largest element of every window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import (
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
from cupyconv.call.executable import Result
from cupyconv.call.options import current_settings
from cupyconv.problem.geometry import Windows, window_geometry
from cupyconv.problem.problems import PoolingGradientProblem, PoolingProblem
from cupyconv.typing import Array, ArrayOrList, Padding, PerAxis


def max_pool(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | Sequence[Array] | None = None,
) -> ArrayOrList:
    """The largest element of every window of an image.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C, *spatial)`` with one to three spatial axes, real.  One sample may come without the axis N; then
        `kernel_shape` must be a tuple, which tells how many spatial axes there are.  The arrays of a sequence
        agree in all but C and dtype.
    kernel_shape : int or tuple of int
        The window's size along each spatial axis.  With an int the first two axes of `x` are N and C.
    stride : int or tuple of int, optional
        Elements from one window to the next; by default `kernel_shape`, windows side by side.
    padding, dilation
        As for `conv`.  Padding is never the largest: it takes no part.
    out : array or sequence of arrays, optional
        Of exactly the results' shapes and dtypes; a sequence where `x` is one.

    Returns
    -------
    array, or list of arrays where `x` is a sequence
        ``(N, C, *out_spatial)`` in x's dtype; channels-last where x is.  NaN where a window holds one; -inf
        where a window lies in the padding alone.

    Raises
    ------
    TypeError
        For complex arrays, which have no order, integers and foreign arrays.
    ValueError
        For shapes and settings that do not fit, and where `options` leave too little workspace for one window.

    Notes
    -----
    Exact in every dtype: the result is an element of the window.  Each array of a sequence is pooled by itself, into
    an array of its own.  With 0.0 and -0.0 in a window either may be the result.  What ONNX and PyTorch call
    ``ceil_mode`` is some padding more behind: ``padding_of_ceil_mode`` in ``examples/onnx_nodes.py`` computes it.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.max_pool(np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 2)
    array([[[3., 4.]]])
    >>> cupyconv.max_pool(np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 3, stride=2, padding="same")
    array([[[3., 4., 5.]]])
    """
    settings = {"kernel_shape": kernel_shape, "stride": stride, "padding": padding, "dilation": dilation}
    return call(prepare_max_pool, {"x": x, "out": out}, settings)


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
    problem = PoolingProblem(
        windows=windows, xs=tuple(describe(backend, axes, name, array) for name, array in xs.items()),
        outs=tuple(describe_result(backend, axes, arrays, result) for result in results),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset((*arrays, *(result.name for result in results)))
    return Call(backend, problem, arrays, images, axes, results, isinstance(x, (list, tuple)))


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
    problem = PoolingGradientProblem(
        windows=windows, xs=described[0], ys=described[1], grads=described[2],
        outs=tuple(describe_result(backend, axes, arrays, result) for result in results),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset((*arrays, *(result.name for result in results)))
    return Call(backend, problem, arrays, images, axes, results, isinstance(x, (list, tuple)))


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
