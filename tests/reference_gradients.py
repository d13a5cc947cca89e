"""The oracle of gradients, transposed convolution and pooling: definitions with loops, in float64 or complex128.

It extends `reference` under the same rules: no code of the package, verified by reading, no diagnosis of invalid
arguments.  Everything follows from one statement.  A convolution iterates over pixels and taps and computes

    y[n, o, pixel] += padded[n, c, pixel * stride + tap * dilation] * weight[o, c, tap]

so each gradient runs the same loops and sends `grad[n, o, pixel]` back, times the conjugate of the other factor: the
Hermitian adjoint.  A padded element passes its gradient on to the element that it copies.  The gradient of a real
argument is the real part of that.

`conv_grad_input`, `conv_grad_weight`, `conv_transpose`, `max_pool` and `avg_pool` take the public functions' arguments
without `method` and `out`.  The `..._gradients` functions are pullbacks: (grad, arguments of the function) ->
`Gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from reference import (
    ACTIVATIONS,
    Image,
    Padding,
    Pairs,
    PerAxis,
    clip,
    concatenated,
    conv,
    epilogue,
    linmerge,
    normal_cdf,
    output_shape,
    padding_pairs,
    per_axis,
    sequence,
    sigmoid,
    softplus,
    wide,
)


class Gradients(NamedTuple):
    """One gradient per argument; None for an absent argument.  `x` is a list if the input was a sequence."""

    x: Any = None
    weight: Any = None
    bias: Any = None
    residual: Any = None


# --- convolution ----------------------------------------------------------------------------------------------


def conv_grad_input(
    grad: np.ndarray,
    weight: np.ndarray,
    input_shape: Sequence[Any],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
) -> Any:
    """Return the gradient of the input, or of the inputs if `input_shape` is a sequence of shapes."""
    weight = wide(weight).conj()
    out_channels, channels_per_group, *kernel = weight.shape
    rank = len(kernel)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    shapes = input_shape if is_sequence_of_shapes(input_shape) else [input_shape]
    spatial = tuple(shapes[0])[-rank:]
    pairs = padding_pairs(padding, spatial, kernel, stride, dilation)

    grad, has_batch = concatenated(grad, rank)
    batch, _, *out_spatial = grad.shape
    assert tuple(out_spatial) == output_shape(spatial, kernel, pairs, stride, dilation), (out_spatial, input_shape)
    grad = grad.reshape(batch, groups, out_channels // groups, *out_spatial)
    weight = weight.reshape(groups, out_channels // groups, channels_per_group, *kernel)
    padded_spatial = [before + size + after for size, (before, after) in zip(spatial, pairs)]
    padded = np.zeros((batch, groups, channels_per_group, *padded_spatial), np.result_type(grad, weight))
    for pixel in np.ndindex(*out_spatial):
        for tap in np.ndindex(*kernel):
            position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
            padded[(..., *position)] += np.einsum("ngo,goc->ngc", grad[(..., *pixel)], weight[(..., *tap)])

    image = folded_back(
        padded.reshape(batch, groups * channels_per_group, *padded_spatial), spatial, pairs, padding_mode
    )
    images = split(image if has_batch else image[0], [shape[-rank - 1] for shape in shapes], rank)
    return images if is_sequence_of_shapes(input_shape) else images[0]


def conv_grad_weight(
    grad: np.ndarray,
    x: Image,
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
) -> np.ndarray:
    """Return the weight's gradient, (C_out, C_in // groups, *kernel_shape), summed over all samples and pixels."""
    rank = len(kernel_shape)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    image, _ = concatenated(x, rank)
    batch, channels, *spatial = image.shape
    pairs = padding_pairs(padding, spatial, kernel_shape, stride, dilation)
    padded = np.pad(image, [(0, 0), (0, 0), *pairs], mode=padding_mode).conj()
    padded = padded.reshape(batch, groups, channels // groups, *padded.shape[2:])

    grad, _ = concatenated(grad, rank)
    _, out_channels, *out_spatial = grad.shape
    assert tuple(out_spatial) == output_shape(spatial, kernel_shape, pairs, stride, dilation), (out_spatial, spatial)
    grad = grad.reshape(batch, groups, out_channels // groups, *out_spatial)
    shape = (groups, out_channels // groups, channels // groups, *kernel_shape)
    weight = np.zeros(shape, np.result_type(grad, padded))
    for pixel in np.ndindex(*out_spatial):
        for tap in np.ndindex(*kernel_shape):
            position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
            weight[(..., *tap)] += np.einsum("ngo,ngc->goc", grad[(..., *pixel)], padded[(..., *position)])
    return weight.reshape(out_channels, channels // groups, *kernel_shape)


def conv_gradients(
    grad: np.ndarray,
    x: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    activation: str | tuple[Any, ...] | None = None,
    residual: np.ndarray | None = None,
    **window: Any,
) -> Gradients:
    """Compute the pullback of `conv`; `window` is its stride, padding, padding_mode, dilation and groups."""
    before_activation = conv(x, weight, bias, residual=residual, **window)
    grad = wide(grad) * derivative(activation, before_activation)
    rank = np.ndim(weight) - 2
    shapes = [array.shape for array in sequence(x)]
    xs = conv_grad_input(grad, weight, shapes, **window)
    return gradients(
        xs, conv_grad_weight(grad, x, weight.shape[2:], **window), over_channels(grad, rank), grad,
        of=(x, weight, bias, residual),
    )  # fmt: skip


def linmerge_gradients(
    grad: np.ndarray,
    xs: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    activation: str | tuple[Any, ...] | None = None,
    residual: np.ndarray | None = None,
) -> Gradients:
    """Compute the pullback of `linmerge`."""
    grad = wide(grad) * derivative(activation, linmerge(xs, weight, bias, residual=residual))
    image = np.concatenate([wide(x) for x in sequence(xs)], axis=1)
    spatial = image.shape[2:]
    dtype = np.result_type(grad, image, wide(weight))
    grad_image, grad_weight = np.zeros(image.shape, dtype), np.zeros(np.shape(weight), dtype)
    for pixel in np.ndindex(*spatial):
        here = (slice(None), slice(None), *pixel)
        grad_image[here] = np.einsum("no,oc->nc", grad[here], wide(weight).conj())
        grad_weight += np.einsum("no,nc->oc", grad[here], image[here].conj())
    images = split(grad_image, [x.shape[1] for x in sequence(xs)], len(spatial))
    return gradients(
        images, grad_weight, over_channels(grad, len(spatial)), grad, of=(xs, weight, bias, residual)
    )  # fmt: skip


def folded_back(padded: np.ndarray, spatial: Sequence[int], pairs: Pairs, padding_mode: str) -> np.ndarray:
    """Compute the adjoint of np.pad: add each element of `padded` to the one it copies; padded zeros are no copies."""
    nowhere = {"constant_values": -1} if padding_mode == "constant" else {}
    copied_from = np.pad(np.arange(math.prod(spatial)).reshape(spatial), pairs, mode=padding_mode, **nowhere)
    image = np.zeros((*padded.shape[:2], math.prod(spatial)), padded.dtype)
    for position in np.ndindex(*copied_from.shape):
        if copied_from[position] != -1:
            image[:, :, copied_from[position]] += padded[(..., *position)]
    return image.reshape(*padded.shape[:2], *spatial)


# --- transposed convolution -----------------------------------------------------------------------------------


def conv_transpose(
    x: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: Sequence[int] | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: str | tuple[Any, ...] | None = None,
) -> np.ndarray:
    """Stamp the kernel, scaled by each input pixel, onto a canvas; then cut off the padding.

    This is the adjoint of `conv` with the same weight, whose axes here are (C_in, C_out // groups, *kernel), without
    conjugation.  `transposed_window` defines which part of the canvas is the result.
    """
    weight = wide(weight)
    channels, out_per_group, *kernel = weight.shape
    rank = len(kernel)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    image, has_batch = concatenated(x, rank)
    batch, _, *spatial = image.shape
    begins, sizes = transposed_window(
        spatial, kernel, stride, dilation, padding=padding, output_padding=output_padding, output_shape=output_shape
    )

    image = image.reshape(batch, groups, channels // groups, *spatial)
    weight = weight.reshape(groups, channels // groups, out_per_group, *kernel)
    canvas_sizes = [
        begin + size + s * n + d * k
        for begin, size, s, n, d, k in zip(begins, sizes, stride, spatial, dilation, kernel)
    ]
    canvas = np.zeros((batch, groups, out_per_group, *canvas_sizes), np.result_type(image, weight))  # large enough
    with np.errstate(all="ignore"):
        for pixel in np.ndindex(*spatial):
            for tap in np.ndindex(*kernel):
                position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
                canvas[(..., *position)] += np.einsum("ngc,gco->ngo", image[(..., *pixel)], weight[(..., *tap)])
        y = canvas[(..., *(slice(begin, begin + size) for begin, size in zip(begins, sizes)))]
        y = y.reshape(batch, groups * out_per_group, *sizes)
        y = y if has_batch else y[0]
        return epilogue(y, bias, None, activation, channel_axis=y.ndim - rank - 1)


def conv_transpose_gradients(
    grad: np.ndarray,
    x: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: Sequence[int] | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: str | tuple[Any, ...] | None = None,
) -> Gradients:
    """Compute the pullback of `conv_transpose`: collect the gradient of each stamp."""
    settings = dict(
        stride=stride, padding=padding, output_padding=output_padding, output_shape=output_shape, dilation=dilation,
        groups=groups,
    )  # fmt: skip
    rank = np.ndim(weight) - 2
    grad = wide(grad) * derivative(activation, conv_transpose(x, weight, bias, **settings))
    whole_grad = grad
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    image, has_batch = concatenated(x, rank)
    grad, _ = concatenated(grad, rank)
    batch, channels, *spatial = image.shape
    _, out_channels, *sizes = grad.shape
    kernel = weight.shape[2:]
    begins, _ = transposed_window(
        spatial, kernel, stride, dilation, padding=padding, output_padding=output_padding, output_shape=output_shape
    )

    grad = grad.reshape(batch, groups, out_channels // groups, *sizes)
    image = image.reshape(batch, groups, channels // groups, *spatial)
    taps = wide(weight).reshape(groups, channels // groups, out_channels // groups, *kernel)
    dtype = np.result_type(grad, image, taps)
    grad_image, grad_taps = np.zeros(image.shape, dtype), np.zeros(taps.shape, dtype)
    for pixel in np.ndindex(*spatial):
        for tap in np.ndindex(*kernel):
            position = tuple(p * s + t * d - b for p, s, t, d, b in zip(pixel, stride, tap, dilation, begins))
            if not all(0 <= p < size for p, size in zip(position, sizes)):
                continue  # this part of the stamp was cut off
            here = grad[(..., *position)]
            grad_image[(..., *pixel)] += np.einsum("ngo,gco->ngc", here, taps[(..., *tap)].conj())
            grad_taps[(..., *tap)] += np.einsum("ngo,ngc->gco", here, image[(..., *pixel)].conj())
    grad_image = grad_image.reshape(batch, channels, *spatial)
    images = split(grad_image if has_batch else grad_image[0], [a.shape[-rank - 1] for a in sequence(x)], rank)
    return gradients(
        images, grad_taps.reshape(weight.shape), over_channels(whole_grad, rank), None, of=(x, weight, bias, None)
    )


def transposed_window(
    spatial: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:
    """Return where the result begins on the canvas, and its sizes.  The canvas is zero beyond the stamps.

    The stamps cover `covered = (size - 1) * stride + dilation * (kernel - 1) + 1` elements of an axis.

    - Numeric `padding`, or "valid": it is cut off, then `output_padding` is added at the end (the definition of PyTorch
      and ONNX): begin = before, size = covered - before - after + output_padding.
    - `output_shape`: ONNX's definition.  The sizes are given.  Half of the surplus, covered + output_padding - size, is
      cut off on each side.  The odd element is cut off at the end for "same" (ONNX's SAME_UPPER), and at the beginning
      for "same_lower", "valid" and no padding (every other value of ONNX's auto_pad).  Without a surplus nothing is cut
      off and the zeros are at the end: ONNX's formula is meaningless in this case, but ONNX's own test puts them there.
    - "same", "same_lower" without `output_shape`: the same as an `output_shape` of size * stride.  "same" is then the
      adjoint of a convolution with "same" over size * stride elements.
    """
    rank = len(spatial)
    covered = [(size - 1) * s + d * (k - 1) + 1 for size, k, s, d in zip(spatial, kernel, stride, dilation)]
    extra = per_axis(output_padding, rank)
    if output_shape is None and padding not in ("same", "same_lower"):
        pairs = padding_pairs(padding, spatial, kernel, stride, dilation)
        sizes = [full - before - after + more for full, (before, after), more in zip(covered, pairs, extra)]
        return [before for before, _ in pairs], sizes
    sizes = [size * s for size, s in zip(spatial, stride)] if output_shape is None else list(output_shape)
    surplus = [max(0, full + more - size) for full, more, size in zip(covered, extra, sizes)]
    begins = [total // 2 if padding == "same" else total - total // 2 for total in surplus]
    return begins, sizes


# --- pooling --------------------------------------------------------------------------------------------------


def max_pool(
    x: Image,
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> Any:
    """Return the largest element of each window; NaN if one is NaN, -inf if the window is entirely in the padding.

    `stride` None means `kernel_shape`: adjacent windows.  A sequence of images returns a list.
    """
    pooled = []
    for image in sequence(x):
        image, has_batch = concatenated(image, len(kernel_shape))
        windows, out_spatial = pooling_windows(image.shape[2:], kernel_shape, stride, padding, dilation, ceil_mode)
        y = np.full((*image.shape[:2], *out_spatial), -np.inf)
        for pixel, elements, _ in windows:
            for element in elements:
                y[(..., *pixel)] = np.maximum(y[(..., *pixel)], image[(..., *element)])  # NaN if either is
        pooled.append(y if has_batch else y[0])
    return pooled if isinstance(x, (list, tuple)) else pooled[0]


def max_pool_indices(
    x: Image,
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> Any:
    """Return the indices of the largest elements, in C order over each image: the first one, or -1 if there is none."""
    places = []
    for image in sequence(x):
        image, has_batch = concatenated(image, len(kernel_shape))
        windows, out_spatial = pooling_windows(image.shape[2:], kernel_shape, stride, padding, dilation, ceil_mode)
        indices = np.full((*image.shape[:2], *out_spatial), -1)
        for pixel, elements, _ in windows:
            for n, c in np.ndindex(*image.shape[:2]):
                if elements:
                    first = np.argmax([image[(n, c, *element)] for element in elements])  # or the first NaN
                    indices[(n, c, *pixel)] = np.ravel_multi_index(elements[first], image.shape[2:])
        places.append(indices if has_batch else indices[0])
    return places if isinstance(x, (list, tuple)) else places[0]


def avg_pool(
    x: Image,
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """Return the mean of each window, over its elements alone or including padded zeros."""
    pooled = []
    for image in sequence(x):
        image, has_batch = concatenated(image, len(kernel_shape))
        windows, out_spatial = pooling_windows(image.shape[2:], kernel_shape, stride, padding, dilation, ceil_mode)
        y = np.zeros((*image.shape[:2], *out_spatial))
        for pixel, elements, padded_taps in windows:
            for element in elements:
                y[(..., *pixel)] += image[(..., *element)]
            taps = padded_taps if count_include_pad else len(elements)
            y[(..., *pixel)] = y[(..., *pixel)] / taps if taps else np.nan
        pooled.append(y if has_batch else y[0])
    return pooled if isinstance(x, (list, tuple)) else pooled[0]


def avg_pool_gradients(grad: Any, x: Image, kernel_shape: Sequence[int], **settings: Any) -> Gradients:
    """Compute the pullback of `avg_pool`, a linear function: each element's contribution times the gradient."""
    count_include_pad = settings.pop("count_include_pad", True)
    window = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, **settings}
    images = []
    for one_grad, image in zip(sequence(grad), sequence(x)):
        image, has_batch = concatenated(image, len(kernel_shape))
        one_grad, _ = concatenated(one_grad, len(kernel_shape))
        windows, _ = pooling_windows(image.shape[2:], kernel_shape, **window)
        grad_image = np.zeros(image.shape)
        for pixel, elements, padded_taps in windows:
            for element in elements:
                grad_image[(..., *element)] += one_grad[(..., *pixel)] / (
                    padded_taps if count_include_pad else len(elements)
                )
        images.append(grad_image if has_batch else grad_image[0])
    return Gradients(x=images if isinstance(x, (list, tuple)) else images[0])


def max_pool_gradients(
    grad: Any,
    x: Image,
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> Gradients:
    """Compute the pullback of `max_pool`: everything goes to the first largest element in tap order; NaN is largest."""
    images = []
    for one_grad, image in zip(sequence(grad), sequence(x)):
        image, has_batch = concatenated(image, len(kernel_shape))
        one_grad, _ = concatenated(one_grad, len(kernel_shape))
        windows, _ = pooling_windows(image.shape[2:], kernel_shape, stride, padding, dilation, ceil_mode)
        grad_image = np.zeros(image.shape)
        for pixel, elements, _ in windows:
            for n, c in np.ndindex(*image.shape[:2]):
                if elements:
                    values = [image[(n, c, *element)] for element in elements]
                    first = np.argmax(values)  # the first of the largest, or the first NaN
                    grad_image[(n, c, *elements[first])] += one_grad[(n, c, *pixel)]
        images.append(grad_image if has_batch else grad_image[0])
    return Gradients(x=images if isinstance(x, (list, tuple)) else images[0])


def pooling_windows(
    spatial: Sequence[int],
    kernel: Sequence[int],
    stride: PerAxis | None,
    padding: Padding,
    dilation: PerAxis,
    ceil_mode: bool,
) -> tuple[list[tuple[tuple[int, ...], list[tuple[int, ...]], int]], tuple[int, ...]]:
    """Return the windows and the output sizes.

    A window is (output pixel, its input pixels in the order of the taps, how many taps are in the padded image).  In
    `ceil_mode` a window follows if the previous one leaves a part of the padded image, and if it begins in the image or
    before it.
    """
    rank = len(kernel)
    stride, dilation = per_axis(kernel if stride is None else stride, rank), per_axis(dilation, rank)
    pairs = padding_pairs(padding, spatial, kernel, stride, dilation)
    out_spatial = output_shape(spatial, kernel, pairs, stride, dilation)
    if ceil_mode:
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
        out_spatial = tuple(
            next(o for o in range(before + n + 2) if (o - 1) * s + span >= before + n + after or o * s >= before + n)
            for n, (before, after), span, s in zip(spatial, pairs, spans, stride)
        )
    windows = []
    for pixel in np.ndindex(*out_spatial):
        elements = [
            tuple(p * s + t * d - before for p, s, t, d, (before, _) in zip(pixel, stride, tap, dilation, pairs))
            for tap in np.ndindex(*kernel)
        ]
        inside = [element for element in elements if all(0 <= e < size for e, size in zip(element, spatial))]
        padded = [
            all(-before <= e < size + after for e, size, (before, after) in zip(element, spatial, pairs))
            for element in elements
        ]
        windows.append((pixel, inside, sum(padded)))
    return windows, out_spatial


# --- activations ----------------------------------------------------------------------------------------------


def normal_density(v: np.ndarray) -> np.ndarray:
    return np.exp(-v * v / 2) / math.sqrt(2 * math.pi)


def clip_derivative(v: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.where((low < v) & (v < high), 1.0, 0.0)


def gelu_tanh_derivative(v: np.ndarray) -> np.ndarray:
    scale = 2 * math.sqrt(2 / math.pi)
    u = scale * (v + 0.044715 * v**3)  # (1 + tanh(u / 2)) / 2 is sigmoid(u), which cancels less in tanh'
    return sigmoid(u) + v * sigmoid(u) * sigmoid(-u) * scale * (1 + 3 * 0.044715 * v**2)


def hardswish_derivative(v: np.ndarray) -> np.ndarray:
    return clip(v / 6 + 0.5, 0, 1) + v / 6 * clip_derivative(v, -3, 3)


def mish_derivative(v: np.ndarray) -> np.ndarray:
    t = np.tanh(softplus(v))
    return t + v * (1 - t**2) * sigmoid(v)


# Name: function of (v, *parameters).  At a kink of an activation, the derivative is that of the flat or the left side:
# 0 for relu, and therefore for every clip at both ends; the slope for leaky_relu, alpha for elu.
DERIVATIVES: dict[str, Any] = {
    "relu": lambda v: clip_derivative(v, 0, np.inf),
    "relu6": lambda v: clip_derivative(v, 0, 6),
    "leaky_relu": lambda v, slope: np.where(v > 0, 1.0, slope),
    "clip": clip_derivative,
    "elu": lambda v, alpha: np.where(v > 0, 1.0, alpha * np.exp(np.minimum(v, 0))),
    "sigmoid": lambda v: sigmoid(v) * sigmoid(-v),
    "hard_sigmoid": lambda v, alpha, beta: alpha * clip_derivative(alpha * v + beta, 0, 1),
    "hardswish": hardswish_derivative,
    "tanh": lambda v: 1 - np.tanh(v) ** 2,
    "gelu": lambda v: normal_cdf(v) + v * normal_density(v),
    "gelu_tanh": gelu_tanh_derivative,
    "silu": lambda v: sigmoid(v) + v * sigmoid(v) * sigmoid(-v),
    "mish": mish_derivative,
    "softplus": sigmoid,
    "affine": lambda v, alpha, beta: np.full(v.shape, alpha),
    "thresholded_relu": lambda v, alpha: np.where(v > alpha, 1.0, 0.0),
    "scaled_tanh": lambda v, alpha, beta: alpha * beta * (1 - np.tanh(beta * v) ** 2),
    "softsign": lambda v: 1 / (1 + np.abs(v)) ** 2,
}


def derivative(spec: str | tuple[Any, ...] | None, v: np.ndarray) -> np.ndarray:
    """Return the activation's derivative at `v`, the value before it."""
    if spec is None:
        return np.ones(v.shape)
    name, *given = (spec,) if isinstance(spec, str) else spec
    _, defaults = ACTIVATIONS[name]
    with np.errstate(all="ignore"):
        return DERIVATIVES[name](v, *given, *defaults[len(given) :])


# --- arguments ------------------------------------------------------------------------------------------------


def is_sequence_of_shapes(input_shape: Sequence[Any]) -> bool:
    return isinstance(input_shape[0], (list, tuple))


def split(image: np.ndarray, channels: Sequence[int], rank: int) -> list[np.ndarray]:
    """Split the image's channels into those of the inputs."""
    ends = np.cumsum(channels)
    return [image[(..., slice(end - c, end), *(slice(None),) * rank)] for c, end in zip(channels, ends)]


def over_channels(grad: np.ndarray, rank: int) -> np.ndarray:
    """Return the bias's gradient: the sum of every channel over samples and pixels."""
    channel_axis = grad.ndim - rank - 1
    return grad.sum(axis=tuple(axis for axis in range(grad.ndim) if axis != channel_axis))


def gradients(
    xs: list[np.ndarray], weight: np.ndarray, bias: np.ndarray, residual: np.ndarray | None, *, of: tuple[Any, ...]
) -> Gradients:
    """Return each gradient in the form of its argument: absent, real, or a list."""
    x, *others = of
    images = [real_where(argument, image) for argument, image in zip(sequence(x), xs)]
    return Gradients(
        images if isinstance(x, (list, tuple)) else images[0],
        *(
            None if argument is None else real_where(argument, gradient)
            for argument, gradient in zip(others, (weight, bias, residual))
        ),
    )


def real_where(argument: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return the real part of the gradient for a real argument."""
    return gradient if np.iscomplexobj(argument) else gradient.real
