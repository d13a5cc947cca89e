"""`conv_transpose`: maps each output of a convolution back to the inputs that its kernel reads."""

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
    """Transposed convolution over one to three spatial axes, of one array or of several merged arrays.

    Every pixel of `x` adds a stamp to the result: the kernel, scaled by the pixel's value.  Stamps are `stride` apart.

    ``y[n, c, i] = activation(sum over o, k, p with p * stride + k * dilation - before = i of
    weight[o, c, k] * x[n, o, p] + bias[c])``.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``.  The axis N may be omitted, and a list or tuple is merged, as for `conv`.
    weight : array
        ``(C_in, C_out // groups, *kernel)``; it is not conjugated.
    bias : array, optional
        ``(C_out,)``.
    stride, dilation : int or tuple of int
        Distance in elements between stamps (`stride`) and between the taps of one stamp (`dilation`); one int for all
        spatial axes, or one per axis.
    padding : int, tuple or str
        Number of elements cut off both ends of the range that the stamps cover,
        ``(size - 1) * stride + dilation * (k - 1) + 1``: one int for all axes, or one int or one ``(before, after)``
        pair per axis.  ``"valid"`` cuts nothing.  ``"same"`` and ``"same_lower"`` cut until the result has
        ``size * stride`` elements; an odd element is cut at the end or at the beginning, respectively.
    output_padding : int or tuple of int
        Number of elements added at the end.  The elements that `padding` cut off there come first, then zeros.  The
        number must be less than the stride or less than the dilation.
    output_shape : int or tuple of int, optional
        Spatial shape of the result, instead of amounts of `padding`.  The excess of the range that the stamps cover,
        plus `output_padding`, is cut off both ends.  An odd element is cut at the end if `padding` is ``"same"``,
        otherwise at the beginning.  If the stamps cover less than the result, zeros follow at the end.
    groups, activation, method
        As for `conv`.
    out : array, optional
        Array for the result, of exactly its shape and dtype, with any strides that do not overlap.

    Returns
    -------
    array
        ``(N, C_out, *out_spatial)`` in ``result_type(*x, weight)``.  16-bit types accumulate in float32 and are rounded
        once.  The result is channels-last if every `x` is, otherwise in C order.

    Raises
    ------
    TypeError, ValueError
        As for `conv`; ValueError also for settings that contradict each other, and for ``"full"`` and ``"causal"``
        padding.

    See Also
    --------
    conv_grad_input : the same sum with a conjugated weight, for every padding mode and for merged inputs.

    Notes
    -----
    The arguments cover all of ONNX's ``ConvTranspose``.  `onnx_padding` translates ``auto_pad`` and ``pads``.  In ONNX,
    ``output_shape`` overrides ``pads``, so leave `padding` at 0 if you pass `output_shape`.

    Source: ONNX ``ConvTranspose``; Dumoulin and Visin, *A guide to convolution arithmetic for deep learning* (2016).

    An infinite or NaN weight affects only the elements that its tap is added to.  On CUDA it may also make neighbouring
    elements NaN, because some methods read zeros around `x`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.conv_transpose(np.array([[[1.0, 2.0]]]), np.ones((1, 1, 3)), stride=2)
    array([[[1., 1., 3., 2., 2.]]])
    """
    return CONV_TRANSPOSE(locals())


#: The settings that define a transposed convolution's geometry.
TRANSPOSED_WINDOWS = ("stride", "padding", "output_padding", "output_shape", "dilation", "groups")


def check_conv_transpose(
    given: Arrays, *, on: str | None = None, saving: bool = False, activation: Any, method: str, **windows: Any
) -> CheckedCall:
    """Check the arguments of `conv_transpose`; `saving` asks for a list of results, as for `conv`."""
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
    """Check the adjoint of the convolution `geometry`, which maps `inputs` to results of the given `shapes`, by name.

    If `listed`, the call returns a list; its last entry is the array that determines the activation's derivative.
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
