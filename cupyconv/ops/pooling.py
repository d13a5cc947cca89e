"""`max_pool`: the largest element of every window, and the gradient's way back to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cupyconv.call.arguments import Arguments, Arrays, Axes, Result, in_dtype, is_batched, named_inputs, shapes_of
from cupyconv.call.dispatch import backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv_pullback import ConvGradients, Pullback, holding, listed_inputs, needed_names
from cupyconv.problem.geometry import Windows, window_geometry
from cupyconv.problem.passes import PoolingGradientProblem, PoolingProblem
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
        ``(N, C, *spatial)``, real; N as for `im2col`.  The arrays of a sequence agree in all but C and dtype.
    kernel_shape : int or tuple of int
        The window's size, as for `im2col`.
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
    return MAX_POOL(locals())


def max_pool_with_pullback(arguments: dict[str, Any]) -> tuple[ArrayOrList, Pullback]:
    """The result of `max_pool` with these arguments, and its pullback."""
    x, y = arguments["x"], MAX_POOL(arguments)
    inputs, listed = listed_inputs(x)
    held = {**arguments, "x": inputs if listed else x, "y": tuple(y) if listed else y}
    x_dtypes, backend = [image.dtype for image in inputs], backend_for({"x": inputs[0]})

    def pullback(grad: Any, *, needs: Iterable[str] | None = None) -> ConvGradients:
        """The gradient of `x`, from that of the result; None where `needs` leaves it out."""
        if "x" not in needed_names(needs):
            return ConvGradients()
        if grad is None:
            raise TypeError("grad must be an array of the result's shape, or a sequence of them, not None")
        dx = MAX_POOL_GRADIENT({**held, "grad": grad})
        gradients = [in_dtype(*one, backend) for one in zip(dx if listed else [dx], x_dtypes, strict=True)]
        return ConvGradients(x=gradients if listed else gradients[0])

    return y, holding(pullback, (*inputs, *listed_inputs(y)[0]))


def check_max_pool(given: Arrays, *, on: str | None = None, **settings: Any) -> CheckedCall:
    """Check the arguments of `max_pool`."""
    inputs = named_inputs("x", given["x"])
    arguments = Arguments.of(inputs | _named_like("out", given["out"], "x", given["x"]), on)
    windows, axes = _windows(inputs, **settings)
    spatial = windows.spatial(windows.out_size)
    results = tuple(
        _result(axes, image, name.replace("x", "out"), axes.shape(windows.batch, channels, spatial))
        for (name, image), channels in zip(inputs.items(), windows.channels)
    )
    problem = PoolingProblem(
        windows=windows,
        xs=arguments.describe_each(axes, inputs),
        outs=arguments.describe_each(axes, results),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, results, given["x"])


def check_max_pool_gradient(given: Arrays, *, on: str | None = None, **settings: Any) -> CheckedCall:
    """Check the gradients given to the pullback of ``max_pool(x, ...)``, which was y."""
    x, y = given["x"], given["y"]
    xs, ys, grads = named_inputs("x", x), _named_like("y", y, "x", x), _named_like("grad", given["grad"], "y", y)
    arguments = Arguments.of({**xs, **ys, **grads}, on)
    for (y_name, one_y), (name, one_grad) in zip(ys.items(), grads.items()):
        if tuple(one_grad.shape) != tuple(one_y.shape):
            raise ValueError(f"{name} has shape {tuple(one_grad.shape)}, needed that of {y_name}, {tuple(one_y.shape)}")
        if one_grad.dtype.kind == "c":
            raise TypeError(f"{name} is {one_grad.dtype.name}, {y_name} is {one_y.dtype.name}: both must be real")
    windows, axes = _windows(xs, **settings)
    results = tuple(_result(axes, image, name.replace("x", "out"), tuple(image.shape)) for name, image in xs.items())
    problem = PoolingGradientProblem(
        windows=windows,
        xs=arguments.describe_each(axes, xs),
        ys=arguments.describe_each(axes, ys),
        grads=arguments.describe_each(axes, grads),
        outs=arguments.describe_each(axes, results),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, results, x)


MAX_POOL = Operation(max_pool, check_max_pool, ("x", "out"))
MAX_POOL_GRADIENT = Operation(
    None, check_max_pool_gradient, ("x", "y", "grad"), ("kernel_shape", "stride", "padding", "dilation")
)


def _pooling_call(
    arguments: Arguments, problem: PoolingProblem, axes: Axes, results: tuple[Result, ...], x: Any
) -> CheckedCall:
    images = frozenset((*arguments.arrays, *(result.name for result in results)))
    return CheckedCall(arguments, problem, images, axes, results, isinstance(x, (list, tuple)))


def _windows(xs: Arrays, *, kernel_shape: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Windows, Axes]:
    for name, array in xs.items():
        if array.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {array.dtype}: complex numbers have no order, so none is the largest")
    shapes = shapes_of(xs)
    batched = is_batched(shapes, kernel_shape)
    stride = kernel_shape if stride is None else stride
    windows = window_geometry(shapes, kernel_shape, batched=batched, stride=stride, padding=padding, dilation=dilation)
    return windows, Axes(batched, windows.rank)


def _named_like(name: str, given: Any, model_name: str, model: Any) -> dict[str, Any]:
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
    return axes.result(name, shape, image.dtype.newbyteorder("="), [image])
