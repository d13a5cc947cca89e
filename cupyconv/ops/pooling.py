"""`max_pool` and `avg_pool`: the maximum or the mean of every window, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Never

import numpy as np

from cupyconv.call.arguments import (
    Arguments,
    Arrays,
    Axes,
    Result,
    fitting,
    in_dtype,
    is_batched,
    named_inputs,
    shapes_of,
)
from cupyconv.call.dispatch import backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.call.options import flag
from cupyconv.ops.conv_pullback import ConvGradients, Pullback, holding, listed_inputs, needed_names
from cupyconv.problem.geometry import Triple, Windows, window_geometry
from cupyconv.problem.passes import (
    AvgPoolGradientProblem,
    AvgPoolProblem,
    MaxPoolGradientProblem,
    MaxPoolProblem,
    PoolingProblem,
)
from cupyconv.typing import Array, ArrayOrList, Padding, PerAxis


def max_pool(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *unnamed: Never,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    out: Array | Sequence[Array] | None = None,
    **foreign: Never,
) -> ArrayOrList:  # or two of them: with a union type, every caller without indices would have to check which
    """Maximum of every window of an image.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C, *spatial)`` with one to three spatial axes, real.  A single sample may omit the axis N; `kernel_shape`
        must then be a tuple, whose length is the number of spatial axes: ``max_pool(picture[None], (2, 2))``.  The
        arrays of a sequence agree in everything but C and dtype.
    kernel_shape : int or tuple of int
        Size of the window along each spatial axis.  With an int, the first two axes of `x` are N and C.
    stride : int or tuple of int, optional
        Distance in elements from one window to the next.  The default is `kernel_shape`: windows side by side.
    padding, dilation
        As for `conv`.  Padding is never a maximum: it is ignored.
    ceil_mode : bool
        Whether to keep a last window that extends beyond the padded image.  It must begin in the image or in the
        padding before it.
    return_indices : bool
        Whether to also return the position of each maximum.
    out : array or sequence of arrays, optional
        Arrays for the maxima, of exactly their shapes and dtypes; a sequence if `x` is one.

    Returns
    -------
    y : array, or list of arrays if `x` is a sequence
        ``(N, C, *out_spatial)`` in the dtype of `x`; channels-last if `x` is.  A window that contains NaN gives NaN.  A
        window that covers only padding gives -inf.
    indices : the same with dtype int64, only with `return_indices`
        Positions in the image without its padding, in C order over its spatial axes: ``y[n, c]`` is
        ``x[n, c].ravel()[indices[n, c]]``.  Among equal maxima the first is returned; NaN counts as the largest value.
        The index is -1 for a window that covers only padding.

    Raises
    ------
    TypeError
        For complex arrays, because complex numbers have no order, and for integer and foreign arrays.
    ValueError
        For shapes and settings that do not fit, and if `options` leaves too little workspace for one window.

    See Also
    --------
    avg_pool : the mean of every window.

    Notes
    -----
    The result is exact in every dtype: it is an element of the window.  Each array of a sequence is pooled separately,
    into its own array.  If the maximum of a window is zero and the window contains both 0.0 and -0.0, either may be the
    result.  `ceil_mode` and the indices follow ONNX and PyTorch, but ONNX's indices also count over N and C: they are
    ``indices + size * arange(N * C)``, where size is the number of pixels of one channel, and the range is reshaped to
    broadcast.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x = np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]])
    >>> cupyconv.max_pool(x, 2)
    array([[[3., 4.]]])
    >>> cupyconv.max_pool(x, 3, stride=2, padding="same")
    array([[[3., 4., 5.]]])
    >>> y, indices = cupyconv.max_pool(x, 2, ceil_mode=True, return_indices=True)
    >>> y, indices
    (array([[[3., 4., 5.]]]), array([[[0, 2, 4]]]))
    """
    pooled = MAX_POOL(locals())
    return _values_and_indices(pooled, x) if return_indices else pooled


def avg_pool(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *unnamed: Never,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    out: Array | Sequence[Array] | None = None,
    **foreign: Never,
) -> ArrayOrList:
    """Mean of every window of an image.

    Parameters
    ----------
    x, kernel_shape, stride, padding, dilation, ceil_mode
        As for `max_pool`.
    count_include_pad : bool
        Whether padding counts as zeros, as in PyTorch.  If False, the mean is over elements of the image only, as in
        ONNX.  With `ceil_mode`, the part of a last window beyond the padding never counts.
    out : array or sequence of arrays, optional
        Arrays for the results, of exactly their shapes and dtypes; a sequence if `x` is one.

    Returns
    -------
    array, or list of arrays if `x` is a sequence
        ``(N, C, *out_spatial)`` in the dtype of `x`; channels-last if `x` is.  A window in which nothing counts gives
        NaN.

    Raises
    ------
    TypeError
        For complex arrays (average their real and imaginary parts separately), and for integer and foreign arrays.
    ValueError
        For shapes and settings that do not fit, and if `options` leaves too little workspace for one window.

    See Also
    --------
    max_pool : the maximum of every window.

    Notes
    -----
    Each mean is a sum that is divided once.  16-bit types accumulate in float32 and are rounded once.  Each array of a
    sequence is pooled separately.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x = np.array([[[3.0, 1.0, 4.0, 1.0, 6.0]]])
    >>> cupyconv.avg_pool(x, 2)
    array([[[2. , 2.5]]])
    >>> cupyconv.avg_pool(x, 3, stride=2, padding=1, count_include_pad=False)
    array([[[2. , 2. , 3.5]]])
    """
    return AVG_POOL(locals())


def max_pool_with_pullback(arguments: dict[str, Any]) -> tuple[Any, Pullback]:
    """Return the result of `max_pool` with these arguments, and its pullback."""
    x, pooled = arguments["x"], MAX_POOL(arguments)
    result = _values_and_indices(pooled, x) if arguments["return_indices"] else pooled
    y = result[0] if arguments["return_indices"] else pooled
    inputs, listed = listed_inputs(x)
    held = {**arguments, "x": inputs if listed else x, "y": tuple(y) if listed else y}
    pullback = _pullback(x, lambda grads: MAX_POOL_GRADIENT({**held, "grad": grads}))
    return result, holding(pullback, (*inputs, *listed_inputs(y)[0]))


def avg_pool_with_pullback(arguments: dict[str, Any]) -> tuple[ArrayOrList, Pullback]:
    """Return the result of `avg_pool` with these arguments, and its pullback, which needs only shapes."""
    x, y = arguments["x"], AVG_POOL(arguments)
    inputs, listed = listed_inputs(x)
    results, backend = [(tuple(one.shape), one.dtype) for one in listed_inputs(y)[0]], backend_for({"x": inputs[0]})
    settings = {**arguments, "x": None, "x_shapes": tuple(tuple(image.shape) for image in inputs)}

    def back(grad: Any) -> Any:
        grads = _as_many("grad", grad, "y", len(results), listed)
        fitted = [fitting(*each, *of, backend) for each, of in zip(grads.items(), results, strict=True)]
        return AVG_POOL_GRADIENT({**settings, "grad": fitted if listed else fitted[0]})

    return y, holding(_pullback(x, back), ())


def _pullback(x: Any, back: Callable[[Any], Any]) -> Pullback:
    """The pullback of a function of x alone; `back` computes its gradient."""
    inputs, listed = listed_inputs(x)
    x_dtypes, backend = [image.dtype for image in inputs], backend_for({"x": inputs[0]})

    def pullback(grad: Any, *, needs: Iterable[str] | None = None) -> ConvGradients:
        """The gradient of `x` from that of the result; None if `needs` omits it."""
        if "x" not in needed_names(needs):
            return ConvGradients()
        if grad is None:
            raise TypeError(
                "grad must be an array with the shape of the result, or a sequence of such arrays, not None"
            )
        dx = back(grad)
        gradients = [in_dtype(*one, backend) for one in zip(dx if listed else [dx], x_dtypes, strict=True)]
        return ConvGradients(x=gradients if listed else gradients[0])

    return pullback


def check_max_pool(given: Arrays, *, on: str | None = None, return_indices: Any, **settings: Any) -> CheckedCall:
    """Check the arguments of `max_pool`."""
    arguments, windows, axes, results = _pooling("the largest", given, on, settings)
    places: list[Result] = []
    if flag("return_indices", return_indices):
        indices = np.dtype(np.int64)
        places = [result._replace(name=result.name.replace("out", "indices"), dtype=indices) for result in results]
    problem = MaxPoolProblem(
        windows=windows,
        xs=arguments.describe_each(axes, named_inputs("x", given["x"])),
        outs=arguments.describe_each(axes, results),
        indices=arguments.describe_each(axes, places),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, (*results, *places), bool(places) or _listed(given["x"]))


def check_avg_pool(given: Arrays, *, on: str | None = None, count_include_pad: Any, **settings: Any) -> CheckedCall:
    """Check the arguments of `avg_pool`."""
    arguments, windows, axes, results = _pooling("the mean", given, on, settings)
    problem = AvgPoolProblem(
        windows=windows,
        xs=arguments.describe_each(axes, named_inputs("x", given["x"])),
        outs=arguments.describe_each(axes, results),
        counted=_counted(windows, count_include_pad),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, results, _listed(given["x"]))


def check_max_pool_gradient(given: Arrays, *, on: str | None = None, **settings: Any) -> CheckedCall:
    """Check the gradients given to the pullback of ``y = max_pool(x, ...)``."""
    x = given["x"]
    xs = named_inputs("x", x)
    ys, grads = (_as_many(name, given[name], like, len(xs), _listed(x)) for name, like in (("y", "x"), ("grad", "y")))
    arguments = Arguments.of({**xs, **ys, **grads}, on)
    for (y_name, one_y), (name, one_grad) in zip(ys.items(), grads.items()):
        if tuple(one_grad.shape) != tuple(one_y.shape):
            raise ValueError(
                f"{name} has shape {tuple(one_grad.shape)}, needed {tuple(one_y.shape)}, the shape of {y_name}"
            )
        if one_grad.dtype.kind == "c":
            raise TypeError(f"{name} is {one_grad.dtype.name}, {y_name} is {one_y.dtype.name}: both must be real")
    windows, axes = _windows(shapes_of(xs), **settings)
    results = tuple(
        axes.result(name.replace("x", "out"), tuple(image.shape), _native(image), [image]) for name, image in xs.items()
    )
    problem = MaxPoolGradientProblem(
        windows=windows,
        xs=arguments.describe_each(axes, xs),
        ys=arguments.describe_each(axes, ys),
        grads=arguments.describe_each(axes, grads),
        outs=arguments.describe_each(axes, results),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, results, _listed(x))


def check_avg_pool_gradient(
    given: Arrays,
    *,
    on: str | None = None,
    x_shapes: tuple[tuple[int, ...], ...],
    count_include_pad: bool,
    **settings: Any,
) -> CheckedCall:
    """Check the gradients given to the pullback of ``avg_pool(x, ...)``; they have its results' shapes and dtypes."""
    grads = named_inputs("grad", given["grad"])
    arguments = Arguments.of(grads, on)
    shapes = {name.replace("grad", "x"): shape for name, shape in zip(grads, x_shapes, strict=True)}
    windows, axes = _windows(shapes, **settings)
    results = tuple(
        axes.result(name.replace("grad", "out"), shape, _native(grad), [grad])
        for (name, grad), shape in zip(grads.items(), x_shapes)
    )
    problem = AvgPoolGradientProblem(
        windows=windows,
        grads=arguments.describe_each(axes, grads),
        outs=arguments.describe_each(axes, results),
        counted=_counted(windows, count_include_pad),
        **arguments.decided_with,
    )
    return _pooling_call(arguments, problem, axes, results, _listed(given["grad"]))


_WINDOWS = ("kernel_shape", "stride", "padding", "dilation", "ceil_mode")

MAX_POOL = Operation(max_pool, check_max_pool, ("x", "out"))
AVG_POOL = Operation(avg_pool, check_avg_pool, ("x", "out"))
MAX_POOL_GRADIENT = Operation(None, check_max_pool_gradient, ("x", "y", "grad"), _WINDOWS)
AVG_POOL_GRADIENT = Operation(
    None, check_avg_pool_gradient, ("grad", "out"), ("x_shapes", *_WINDOWS, "count_include_pad")
)


def _pooling(
    what: str, given: Arrays, on: str | None, settings: dict[str, Any]
) -> tuple[Arguments, Windows, Axes, tuple[Result, ...]]:
    """Return the arguments of pooling, its windows, and one result per image."""
    x, out = given["x"], given["out"]
    inputs = named_inputs("x", x)
    outs = {} if out is None else _as_many("out", out, "x", len(inputs), _listed(x))
    arguments = Arguments.of(inputs | outs, on)
    for name, image in inputs.items():
        if image.dtype.kind == "c":
            why = {
                "the largest": "complex numbers have no order, so there is no maximum",
                "the mean": "average the real and imaginary parts separately",
            }
            raise TypeError(f"{name} has dtype {image.dtype}, needed a real dtype: {why[what]}")
    windows, axes = _windows(shapes_of(inputs), **settings)
    spatial = windows.spatial(windows.out_size)
    results = tuple(
        axes.result(name.replace("x", "out"), axes.shape(windows.batch, channels, spatial), _native(image), [image])
        for (name, image), channels in zip(inputs.items(), windows.channels)
    )
    return arguments, windows, axes, results


def _pooling_call(
    arguments: Arguments, problem: PoolingProblem, axes: Axes, results: tuple[Result, ...], listed: bool
) -> CheckedCall:
    images = frozenset((*arguments.arrays, *(result.name for result in results)))
    return CheckedCall(arguments, problem, images, axes, results, listed)


def _windows(
    shapes: dict[str, tuple[int, ...]], *, kernel_shape: Any, stride: Any, ceil_mode: Any, **settings: Any
) -> tuple[Windows, Axes]:
    batched = is_batched(shapes, kernel_shape)
    stride = kernel_shape if stride is None else stride
    ceil_mode = flag("ceil_mode", ceil_mode)
    windows = window_geometry(shapes, kernel_shape, batched=batched, stride=stride, ceil_mode=ceil_mode, **settings)
    return windows, Axes(batched, windows.rank)


def _counted(windows: Windows, count_include_pad: Any) -> tuple[Triple, Triple]:
    """Return the range of positions that count for a mean, see `MeanProblem`."""
    if not flag("count_include_pad", count_include_pad):
        return (0, 0, 0), windows.size
    first, end = zip(*((-before, n + after) for n, before, after in zip(windows.size, windows.before, windows.after)))
    return first, end


def _values_and_indices(pooled: list[Any], x: Any) -> tuple[ArrayOrList, ArrayOrList]:
    """Split the list of all results into the two return values of `max_pool`."""
    half = len(pooled) // 2
    return (pooled[:half], pooled[half:]) if _listed(x) else (pooled[0], pooled[1])


def _listed(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _as_many(name: str, given: Any, model: str, count: int, listed: bool) -> dict[str, Any]:
    """Return `given` by argument name: one array, or a sequence of `count` arrays if `listed`."""
    if not listed:
        return {name: given}
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a sequence like {model}, given {type(given).__qualname__}")
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} arrays, needed {count}, as many as {model}")
    return named_inputs(name, given)


def _native(image: Any) -> np.dtype:
    """The dtype of a result: that of the image, in native byte order."""
    return image.dtype.newbyteorder("=")
