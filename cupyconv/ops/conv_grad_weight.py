"""`conv_grad_weight`: the gradient of a convolution with respect to its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from cupyconv.call.arguments import (
    Arguments,
    Arrays,
    Axes,
    Result,
    is_batched,
    merged_inputs,
    shapes_of,
    widening_notes,
)
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv import WINDOWS, checked_prologue
from cupyconv.problem.arrays import operand_dtypes, promote
from cupyconv.problem.geometry import weight_gradient_geometry
from cupyconv.problem.problems import WeightGradientProblem, check_method
from cupyconv.typing import Array, Padding, PerAxis


def conv_grad_weight(
    grad: Array,
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *unnamed: Never,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    method: str = "auto",
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Gradient of a convolution with respect to its weight, from the gradient of its result.

    ``out[o, c, k] = sum over n, p of grad[n, o, p] * conj(x[n, c, p * stride + k * dilation - before])``.  This is the
    adjoint of `conv` as a linear map of its weight.

    Parameters
    ----------
    grad : array
        Array of the shape of `conv`'s result, ``(N, C_out, *out_spatial)``: the gradient before any activation.
    x : array or sequence of arrays
        Input or inputs of that convolution.  The weight has one gradient over the channels of all inputs.
    kernel_shape : int or tuple of int
        Size of the kernel along each spatial axis, as for `im2col`.
    stride, padding, padding_mode, dilation, groups
        Settings of the convolution, as for `conv`.
    method : str
        ``"auto"``, ``"gemm"``, ``"direct"``, ``"implicit_gemm"`` (CUDA, for real dtypes), ``"winograd"`` (NumPy) or
        ``"fft"``.  A method that does not apply raises an error; it is never replaced by another.
    out : array, optional
        Array for the result, of exactly its shape and dtype, with any strides that do not overlap.

    Returns
    -------
    array
        ``(C_out, C_in // groups, *kernel_shape)`` in ``result_type(grad, *x)``, in C order.  16-bit types accumulate in
        float32 and are rounded once.  An empty batch gives zeros.

    Raises
    ------
    TypeError, ValueError
        As for `conv`; ValueError also if the shape of `grad` is not that of the convolution's result.

    See Also
    --------
    conv : the convolution.

    Notes
    -----
    The gradient is the product of ``grad`` with the transposed columns of ``x``, computed per chunk of samples; some
    methods never store the columns.  The order of summation depends only on layouts, options, device and thread count,
    so repeated calls give the same bits.

    Source: Chetlur et al., *cuDNN: Efficient Primitives for Deep Learning* (2014).

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, grad = np.arange(5.0).reshape(1, 1, 5), np.ones((1, 1, 3))
    >>> cupyconv.conv_grad_weight(grad, x, 3)
    array([[[3., 6., 9.]]])
    """
    return CONV_GRAD_WEIGHT(locals())


def check_conv_grad_weight(
    given: Arrays,
    *,
    on: str | None = None,
    kernel_shape: Any,
    method: str = "auto",
    prologue_activation: Any = None,
    **windows: Any,
) -> CheckedCall:
    """Check the arguments of `conv_grad_weight`, and of the prologue that a pullback may add."""
    inputs, arrays = merged_inputs(given, "x", "grad")
    arguments = Arguments.of(arrays, on)
    grad = arguments["grad"]
    shapes = shapes_of(inputs)
    batched = is_batched(shapes, kernel_shape)
    geometry = weight_gradient_geometry(tuple(grad.shape), shapes, kernel_shape, batched=batched, **windows)
    axes = Axes(batched, geometry.rank)
    check_method(method)
    multiplied = arguments.some(("grad", *inputs))
    dtype = promote(multiplied)
    x_dtype, grad_dtype = operand_dtypes([x.dtype for x in inputs.values()], grad.dtype, dtype)
    shape = (geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))
    result = Result("out", shape, dtype)
    problem = WeightGradientProblem(
        geometry=geometry,
        xs=arguments.describe_each(axes, inputs),
        grad=arguments.describe(axes, "grad"),
        out=arguments.describe(Axes(True, len(shape) - 2), result),
        prologue=checked_prologue(arguments, geometry.in_channels, x_dtype, prologue_activation),
        x_dtype=x_dtype,
        grad_dtype=grad_dtype,
        method=method,
        notes=widening_notes(arguments.some((*inputs, "grad")), dtype),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset((*inputs, "grad")), axes, (result,))


CONV_GRAD_WEIGHT = Operation(conv_grad_weight, check_conv_grad_weight, ("grad", "x", "out"))
#: The weight gradient from inputs that a prologue transforms, used by pullbacks.
TRANSFORMED_GRAD_WEIGHT = Operation(
    None,
    check_conv_grad_weight,
    ("grad", "x", "scale", "shift", "out"),
    ("kernel_shape", *WINDOWS, "prologue_activation"),
)
