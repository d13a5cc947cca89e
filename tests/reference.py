"""The oracle: every function implemented as its definition, with loops, in float64 or complex128.

It shares no code with the package.  It is meant to be verified by reading, not to be fast.  A convolution iterates over
the output pixels and the kernel taps one by one.  Only the contraction over channels is vectorized:

    y[n, o, pixel] = sum over taps t and channels c of o's group:
                         padded[n, c, pixel * stride + t * dilation] * weight[o, c, t]

The functions take the arguments of the public ones without `method` and `out`, and NumPy arrays of any dtype.  They
return float64 or complex128, which is exact for small integers; the caller converts the result.  Invalid arguments are
not diagnosed here, because errors are part of the package's interface and not of arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Image = np.ndarray | Sequence[np.ndarray]  # one array, or several that represent their concatenation
PerAxis = int | Sequence[int]
Padding = int | str | Sequence[Any]
Pairs = list[tuple[int, int]]  # (before, after) of every spatial axis

# --- convolution and merge ------------------------------------------------------------------------------------


def conv(
    x: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: str | tuple[Any, ...] | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the cross-correlation, + bias, + residual, activation."""
    weight = wide(weight)
    out_channels, channels_per_group, *kernel = weight.shape
    rank = len(kernel)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)

    image, has_batch = concatenated(x, rank)
    batch, _, *spatial = image.shape
    pairs = padding_pairs(padding, spatial, kernel, stride, dilation)
    padded = np.pad(image, [(0, 0), (0, 0), *pairs], mode=padding_mode)
    out_spatial = output_shape(spatial, kernel, pairs, stride, dilation)

    # Separate the axis of groups: n, g, channel within the group, then space.
    padded = padded.reshape(batch, groups, channels_per_group, *padded.shape[2:])
    weight = weight.reshape(groups, out_channels // groups, channels_per_group, *kernel)
    y = np.zeros((batch, groups, out_channels // groups, *out_spatial), np.result_type(padded, weight))
    with np.errstate(all="ignore"):
        for pixel in np.ndindex(*out_spatial):
            for tap in np.ndindex(*kernel):
                position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
                y[(..., *pixel)] += np.einsum("ngc,goc->ngo", padded[(..., *position)], weight[(..., *tap)])
        y = y.reshape(batch, out_channels, *out_spatial)
        y = y if has_batch else y[0]
        return epilogue(y, bias, residual, activation, channel_axis=y.ndim - rank - 1)


def linmerge(
    xs: Image,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    activation: str | tuple[Any, ...] | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Compute, at every pixel, the matrix `weight` times the vector of all inputs' channels."""
    weight = wide(weight)
    image = np.concatenate([wide(x) for x in sequence(xs)], axis=1)
    batch, _, *spatial = image.shape
    y = np.zeros((batch, weight.shape[0], *spatial), np.result_type(image, weight))
    with np.errstate(all="ignore"):
        for pixel in np.ndindex(*spatial):
            here = (slice(None), slice(None), *pixel)
            y[here] = np.einsum("nc,oc->no", image[here], weight)
        return epilogue(y, bias, residual, activation, channel_axis=1)


def epilogue(
    y: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation_spec: str | tuple[Any, ...] | None,
    channel_axis: int,
) -> np.ndarray:
    """Add the bias of each channel and the residual, then apply the activation."""
    if bias is not None:
        ones_after = (1,) * (y.ndim - channel_axis - 1)
        y = y + wide(bias).reshape(-1, *ones_after)
    if residual is not None:
        assert residual.shape == y.shape, (residual.shape, y.shape)
        y = y + wide(residual)
    return activation(activation_spec, y)


# --- columns --------------------------------------------------------------------------------------------------


def im2col(
    x: Image, kernel_shape: Sequence[int], *, stride: PerAxis = 1, padding: Padding = 0, dilation: PerAxis = 1
) -> np.ndarray:
    """Return (N, C * taps, pixels): the input of each tap at each pixel; row c * taps + tap, both in C order."""
    rank = len(kernel_shape)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    image, has_batch = concatenated(x, rank)
    batch, channels, *spatial = image.shape
    pairs = padding_pairs(padding, spatial, kernel_shape, stride, dilation)
    padded = np.pad(image, [(0, 0), (0, 0), *pairs])
    out_spatial = output_shape(spatial, kernel_shape, pairs, stride, dilation)

    columns = np.zeros((batch, channels, math.prod(kernel_shape), math.prod(out_spatial)), padded.dtype)
    for column, pixel in enumerate(np.ndindex(*out_spatial)):
        for row, tap in enumerate(np.ndindex(*kernel_shape)):
            position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
            columns[:, :, row, column] = padded[(slice(None), slice(None), *position)]
    columns = columns.reshape(batch, channels * math.prod(kernel_shape), math.prod(out_spatial))
    return columns if has_batch else columns[0]


def col2im(
    columns: np.ndarray,
    spatial_shape: Sequence[int],
    kernel_shape: Sequence[int],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
) -> np.ndarray:
    """Compute the adjoint of `im2col`: add every entry to the pixel it was read from, and cut off the padding."""
    rank, taps = len(kernel_shape), math.prod(kernel_shape)
    stride, dilation = per_axis(stride, rank), per_axis(dilation, rank)
    pairs = padding_pairs(padding, spatial_shape, kernel_shape, stride, dilation)
    out_spatial = output_shape(spatial_shape, kernel_shape, pairs, stride, dilation)
    has_batch = columns.ndim == 3
    columns = wide(columns if has_batch else columns[None])
    batch, channels = columns.shape[0], columns.shape[1] // taps
    columns = columns.reshape(batch, channels, taps, math.prod(out_spatial))

    padded_spatial = [before + size + after for size, (before, after) in zip(spatial_shape, pairs)]
    padded = np.zeros((batch, channels, *padded_spatial), columns.dtype)
    for column, pixel in enumerate(np.ndindex(*out_spatial)):
        for row, tap in enumerate(np.ndindex(*kernel_shape)):
            position = tuple(p * s + t * d for p, s, t, d in zip(pixel, stride, tap, dilation))
            padded[(slice(None), slice(None), *position)] += columns[:, :, row, column]
    inside = tuple(slice(before, before + size) for size, (before, _) in zip(spatial_shape, pairs))
    image = padded[(slice(None), slice(None), *inside)]
    return image if has_batch else image[0]


# --- padding and sizes ----------------------------------------------------------------------------------------


def padding_pairs(
    padding: Padding, spatial: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Pairs:
    """Convert any form of `padding` to one (before, after) pair per spatial axis."""
    if isinstance(padding, str):
        return [axis_padding(padding, *axis) for axis in zip(spatial, kernel, stride, dilation)]
    if isinstance(padding, int):
        return [(padding, padding)] * len(spatial)
    return [(entry, entry) if isinstance(entry, int) else (entry[0], entry[1]) for entry in padding]


def axis_padding(name: str, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return a named padding on one axis.  `reach` is the distance from a kernel's first tap to its last."""
    reach = dilation * (kernel - 1)
    if name == "valid":
        return 0, 0
    if name == "full":
        return reach, reach
    if name == "causal":
        return reach, 0
    outputs = math.ceil(size / stride)
    last_read = (outputs - 1) * stride + reach  # index in the padded axis
    total = max(0, last_read + 1 - size)
    smaller, larger = total // 2, total - total // 2
    return {"same": (smaller, larger), "same_lower": (larger, smaller)}[name]


def output_shape(
    spatial: Sequence[int], kernel: Sequence[int], pairs: Pairs, stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return how many positions the dilated kernel has inside each padded axis."""
    return tuple(
        len(range(0, before + size + after - d * (k - 1), s))
        for size, k, (before, after), s, d in zip(spatial, kernel, pairs, stride, dilation)
    )


def onnx_padding(pads: Sequence[int] | None, auto_pad: str = "NOTSET") -> Any:
    """Convert ONNX's padding, which lists all befores, then all afters, and its auto_pad names to ours."""
    if auto_pad != "NOTSET":
        return {"VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same_lower"}[auto_pad]
    if pads is None:
        return 0
    rank = len(pads) // 2
    return tuple((pads[axis], pads[rank + axis]) for axis in range(rank))


# --- activations ----------------------------------------------------------------------------------------------


def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))


def softplus(v: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, v)  # log(exp(0) + exp(v)) without overflow


def normal_cdf(v: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(v / math.sqrt(2)))


def clip(v: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.minimum(np.maximum(v, low), high)


# Name: function of (v, *parameters), and defaults of the parameters.  None: the parameter is required.
ACTIVATIONS: dict[str, tuple[Any, tuple[float | None, ...]]] = {
    "relu": (lambda v: np.maximum(v, 0), ()),
    "relu6": (lambda v: clip(v, 0, 6), ()),
    "leaky_relu": (lambda v, slope: np.where(v > 0, v, slope * v), (0.01,)),
    "clip": (clip, (None, None)),
    "elu": (lambda v, alpha: np.where(v > 0, v, alpha * np.expm1(v)), (1.0,)),
    "sigmoid": (sigmoid, ()),
    "hard_sigmoid": (lambda v, alpha, beta: clip(alpha * v + beta, 0, 1), (0.2, 0.5)),  # as in ONNX
    "hardswish": (lambda v: v * clip(v / 6 + 0.5, 0, 1), ()),
    "tanh": (np.tanh, ()),
    "gelu": (lambda v: v * normal_cdf(v), ()),
    "gelu_tanh": (lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))), ()),
    "silu": (lambda v: v * sigmoid(v), ()),
    "mish": (lambda v: v * np.tanh(softplus(v)), ()),
    "softplus": (softplus, ()),
    "affine": (lambda v, alpha, beta: alpha * v + beta, (1.0, 0.0)),
    "thresholded_relu": (lambda v, alpha: np.where(v > alpha, v, 0), (1.0,)),
    "scaled_tanh": (lambda v, alpha, beta: alpha * np.tanh(beta * v), (1.0, 1.0)),
    "softsign": (lambda v: v / (1 + np.abs(v)), ()),
}


def activation(spec: str | tuple[Any, ...] | None, v: np.ndarray) -> np.ndarray:
    """Apply `spec`: None, a name, or (name, parameter, ...), where omitted parameters have their defaults."""
    if spec is None:
        return v
    name, *given = (spec,) if isinstance(spec, str) else spec
    function, defaults = ACTIVATIONS[name]
    parameters = (*given, *defaults[len(given) :])
    with np.errstate(all="ignore"):
        return function(v, *parameters)


# --- prologue ---------------------------------------------------------------------------------------------------


def transformed(
    x: Image, scale: np.ndarray | None, shift: np.ndarray | None, spec: str | tuple[Any, ...] | None, *, axis: int
) -> list[np.ndarray]:
    """Return each input after the prologue, as the convolution reads it; scale and shift cover all their channels."""
    images, first = [], 0
    for image in sequence(x):
        values, channels = wide(image), image.shape[axis]
        column = (slice(first, first + channels), *(None,) * (image.ndim - axis - 1))
        with np.errstate(all="ignore"):
            values = values if scale is None else values * wide(scale)[column]
            values = values if shift is None else values + wide(shift)[column]
        images.append(activation(spec, values))
        first += channels
    return images


# --- batch normalization --------------------------------------------------------------------------------------


def fold_batchnorm(
    weight: np.ndarray,
    bias: np.ndarray | None,
    *,
    mean: np.ndarray,
    var: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    eps: float = 1e-5,
    groups: int = 1,
    transposed: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight and bias of the convolution that equals the given one and then (y - mean) / std * gamma + beta."""
    channels = len(mean)
    gamma = np.ones(channels) if gamma is None else wide(gamma)
    beta = np.zeros(channels) if beta is None else wide(beta)
    bias = np.zeros(channels) if bias is None else wide(bias)
    new_weight, new_bias = wide(weight).copy(), np.zeros(channels, bias.dtype)
    for o in range(channels):
        scale = gamma[o] / np.sqrt(wide(var)[o] + eps)
        new_bias[o] = (bias[o] - wide(mean)[o]) * scale + beta[o]
        if transposed:  # weight (C_in, C_out // groups, ...): o is a column, in the rows of its own group
            group, column = divmod(o, channels // groups)
            rows = weight.shape[0] // groups
            new_weight[group * rows : (group + 1) * rows, column] *= scale
        else:
            new_weight[o] *= scale
    return new_weight, new_bias


# --- arguments ------------------------------------------------------------------------------------------------


def wide(array: Any) -> np.ndarray:
    """Return the same values in float64, or in complex128 if they are complex."""
    array = np.asarray(array)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def sequence(x: Image) -> list[np.ndarray]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def per_axis(value: PerAxis, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def concatenated(x: Image, rank: int) -> tuple[np.ndarray, bool]:
    """Return the inputs as one wide (N, C, *spatial) array, and whether they had a batch axis."""
    inputs = [wide(array) for array in sequence(x)]
    has_batch = inputs[0].ndim == rank + 2
    inputs = inputs if has_batch else [array[None] for array in inputs]
    return np.concatenate(inputs, axis=1), has_batch
