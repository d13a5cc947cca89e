"""`conv_transpose`: a convolution backwards, from each of its outputs to the inputs that its kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from cupyconv.call.arguments import (
    VECTOR,
    Arguments,
    Arrays,
    Axes,
    activation_for,
    is_batched,
    merged_inputs,
    shapes_of,
    widening_notes,
)
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.problem.activations import derivative_from_result
from cupyconv.problem.arrays import operand_dtypes, promote
from cupyconv.problem.geometry import ConvGeometry, transposed_geometry
from cupyconv.problem.problems import TransposedProblem, check_method
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis


def conv_transpose(
    x: Array | Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *unnamed: Never,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: PerAxis | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    method: str = "auto",
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Transposed convolution over one, two or three spatial axes, of one array or of several merged.

    Every pixel of `x` stamps the kernel onto the result, `stride` apart, scaled by its value:
    ``y[n, c, i] = activation(sum over o, k, p with p * stride + k * dilation - before = i of
    weight[o, c, k] * x[n, o, p] + bias[c])``.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``; N may be missing, and a list or tuple is a merge, as for `conv`.
    weight : array
        ``(C_in, C_out // groups, *kernel)``; it is not conjugated.
    bias : array, optional
        ``(C_out,)``.
    stride, dilation : int or tuple of int
        One for all spatial axes, or one each: between stamps, and between the taps of one.
    padding : int, tuple or str
        Elements cut off both ends of what the stamps cover, ``(size - 1) * stride + dilation * (k - 1) + 1``:
        one int, or one ``(before, after)`` pair, per axis; ``"valid"``: none; ``"same"`` and ``"same_lower"``:
        until the result has ``size * stride`` elements, an odd one at the end or at the beginning.
    output_padding : int or tuple of int
        Elements added at the end: those that `padding` cut off, and zeros beyond; less than stride or than
        dilation.
    output_shape : int or tuple of int, optional
        The result's spatial size, instead of amounts of `padding`: what the stamps cover beyond it, and
        `output_padding`, is cut off both ends, an odd element at the end where `padding` is ``"same"``, else
        at the beginning.  If they cover less, zeros are at the end.
    groups, activation, method
        As for `conv`.
    out : array, optional
        Of exactly the result's shape and dtype, any strides that do not overlap.

    Returns
    -------
    array
        ``(N, C_out, *out_spatial)`` in ``result_type(*x, weight)``.  16-bit sums are kept in float32 and
        rounded once.  Channels-last where every `x` is, else C order.

    Raises
    ------
    TypeError, ValueError
        As for `conv`; ValueError for settings that contradict each other, and for ``"full"`` and ``"causal"`` padding.

    See Also
    --------
    conv_grad_input : the same sum with a conjugated weight, for every padding mode and for merged inputs.

    Notes
    -----
    Everything ONNX's ``ConvTranspose`` can say: ``auto_pad`` and ``pads`` through `onnx_padding`;
    ``output_shape`` there overrides ``pads``, so give 0 beside it.

    Source: ONNX ``ConvTranspose``; Dumoulin and Visin, *A guide to convolution arithmetic for deep learning* (2016).

    An infinite or NaN weight reaches the elements that the kernel puts it on, and no others; on CUDA it may make NaN of
    those beside them too, where methods read zeros around `x`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.conv_transpose(np.array([[[1.0, 2.0]]]), np.ones((1, 1, 3)), stride=2)
    array([[[1., 1., 3., 2., 2.]]])
    """
    return CONV_TRANSPOSE(locals())


#: What is said of a transposed convolution's geometry.
TRANSPOSED_WINDOWS = ("stride", "padding", "output_padding", "output_shape", "dilation", "groups")


def check_conv_transpose(
    given: Arrays, *, on: str | None = None, saving: bool = False, activation: Any, method: str, **windows: Any
) -> CheckedCall:
    """Check the arguments of `conv_transpose`; `saving` asks for a list of results, as it does of `conv`."""
    inputs, arrays = merged_inputs(given, "x", "weight")
    arguments = Arguments.of(arrays, on)
    shapes, weight_shape = shapes_of(inputs), tuple(arguments["weight"].shape)
    batched = is_batched(shapes, weight_shape[2:])
    geometry = transposed_geometry(shapes, weight_shape, batched=batched, **windows)
    axes = Axes(batched, geometry.rank)
    outs = {"out": axes.shape(geometry.batch, geometry.in_channels, geometry.spatial(geometry.size))}
    return checked_adjoint(
        "conv_transpose", arguments, axes, list(inputs), geometry, outs, method, saving, activation=activation
    )


CONV_TRANSPOSE = Operation(conv_transpose, check_conv_transpose, ("x", "weight", "bias", "out"))


def checked_adjoint(
    operation: str,
    arguments: Arguments,
    axes: Axes,
    inputs: list[str],
    geometry: ConvGeometry,
    shapes: dict[str, tuple[int, ...]],
    method: str,
    listed: bool,
    activation: ActivationLike = None,
) -> CheckedCall:
    """The adjoint of the convolution `geometry`: `inputs` are spread over results of these `shapes`, given by name.

    Results that are `listed` have at their end what the derivative of the activation is worked out from.
    """
    xs, weight = [arguments[name] for name in inputs], arguments["weight"]
    check_method(method)
    multiplied = arguments.some((*inputs, "weight"))
    dtype = promote(multiplied)
    resolved = activation_for(activation, dtype)
    arguments.check_optional("bias", (geometry.in_channels,), dtype)
    results = tuple(axes.result(name, shape, dtype, xs) for name, shape in shapes.items())
    keeps_pre = listed and resolved and not derivative_from_result(resolved)
    pre = results[0]._replace(name="pre")
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    problem = TransposedProblem(
        operation=operation,
        geometry=geometry,
        xs=arguments.describe_each(axes, inputs),
        weight=arguments.describe(Axes(True, weight.ndim - 2), "weight"),
        outs=arguments.describe_each(axes, results),
        pre=arguments.describe(axes, pre) if keeps_pre else None,
        bias=arguments.describe_given(VECTOR, "bias"),
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        conjugate=operation == "conv_grad_input" and weight.dtype.kind == "c",
        activation=resolved,
        method=method,
        notes=widening_notes(multiplied, dtype),
        **arguments.decided_with,
    )
    images = frozenset((*inputs, *shapes, "pre"))
    return CheckedCall(arguments, problem, images, axes, (*results, pre) if keeps_pre else results, listed)
