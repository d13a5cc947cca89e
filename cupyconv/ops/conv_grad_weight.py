"""`conv_grad_weight`: the gradient of a convolution with respect to its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import (
    Call,
    describe,
    describe_result,
    is_unbatched,
    machine_for,
    named_inputs,
    owner,
    present,
    shapes_of,
    widened,
)
from cupyconv.call.dispatch import Backend
from cupyconv.call.executable import Result
from cupyconv.call.options import current_settings
from cupyconv.ops.conv import describe_prologue
from cupyconv.problem.activations import Activation, resolve_activation
from cupyconv.problem.arrays import operand_dtypes, promote
from cupyconv.problem.geometry import ConvGeometry, weight_gradient_geometry
from cupyconv.problem.problems import WeightGradientProblem, check_method
from cupyconv.typing import Array, Padding, PerAxis


def conv_grad_weight(
    grad: Array,
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """Gradient of a scalar with respect to the weight of `conv`, from that with respect to its result.

    ``out[o, c, k] = sum over n, p of grad[n, o, p] * conj(x[n, c, p * stride + k * dilation - before])``: the
    adjoint of `conv` as a linear map of its weight.

    Parameters
    ----------
    grad : array
        Of the shape of `conv`'s result, ``(N, C_out, *out_spatial)``, before any activation.
    x : array or sequence of arrays
        The input or inputs of that convolution.  A list or tuple means the concatenation of its arrays along
        the channel axis, which is never built; the weight has one gradient, over all of their channels.
    kernel_shape : int or tuple of int
        The kernel's size along each spatial axis.  One sample may come without the axis N where this is a tuple, which
        tells how many spatial axes there are; with an int the first two axes of `x` are N and C.
    stride, padding, padding_mode, dilation, groups
        Those of the convolution, as for `conv`.
    method : str
        ``"auto"``, ``"gemm"`` or ``"direct"``; a method that does not apply is refused, never replaced.
    out : array, optional
        Of exactly the result's shape and dtype, any strides that do not overlap.

    Returns
    -------
    array
        ``(C_out, C_in // groups, *kernel_shape)`` in ``result_type(grad, *x)``, C order.  16-bit sums are kept in
        float32 and rounded once; an empty batch gives zeros.

    Raises
    ------
    TypeError
        For integer or foreign arrays, NumPy and CuPy mixed, or an `out` of another dtype.
    ValueError
        For a `grad` that is not of the convolution's shape, settings out of range, an `out` of the wrong shape
        or overlapping an argument, or a method that cannot do the problem.

    See Also
    --------
    conv : the convolution.

    Notes
    -----
    One product of ``grad`` with the transposed columns of ``x`` for each chunk of samples.  The order of
    summation depends on nothing but layouts, options, device and thread count: repeated calls give the same
    bits.  Source: Chetlur et al., *cuDNN: Efficient Primitives for Deep Learning* (2014).

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, grad = np.arange(5.0).reshape(1, 1, 5), np.ones((1, 1, 3))
    >>> cupyconv.conv_grad_weight(grad, x, 3)
    array([[[3., 6., 9.]]])
    """
    return call(
        prepare_conv_grad_weight,
        {"grad": grad, "x": x, "out": out},
        {
            "kernel_shape": kernel_shape, "stride": stride, "padding": padding, "padding_mode": padding_mode,
            "dilation": dilation, "groups": groups, "method": method,
        },
    )  # fmt: skip


def prepare_conv_grad_weight(
    grad: Any, x: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, scale: Any = None, shift: Any = None, prologue_activation: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv_grad_weight`, and a prologue in its three parts, which the pullbacks give."""
    xs = named_inputs("x", x)
    arrays = present({"grad": grad, **xs}, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    unbatched = is_unbatched(xs, kernel_shape)
    geometry = weight_gradient_geometry(
        tuple(grad.shape), shapes_of(xs), kernel_shape, batched=not unbatched, stride=stride, padding=padding,
        padding_mode=padding_mode, dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(not unbatched, geometry.rank)
    shape = (geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))
    activation = resolve_activation(prologue_activation)
    return _weight_gradient_call(backend, geometry, axes, shape, list(xs), arrays, activation, method, on)


def _weight_gradient_call(
    backend: Backend, geometry: ConvGeometry, axes: Axes, shape: tuple[int, ...], inputs: list[str],
    arrays: dict[str, Any], activation: Activation, method: str, on: str | None,
) -> Call:  # fmt: skip
    """Everything but the geometry; `shape` is the weight's."""
    xs, grad = [arrays[name] for name in inputs], arrays["grad"]
    check_method(method)
    dtype = promote({name: arrays[name] for name in ("grad", *inputs)})
    x_dtype, grad_dtype = operand_dtypes([x.dtype for x in xs], grad.dtype, dtype)
    result = Result("out", shape, dtype)
    settings = current_settings()
    problem = WeightGradientProblem(
        geometry=geometry, xs=tuple(describe(backend, axes, name, arrays[name]) for name in inputs),
        grad=describe(backend, axes, "grad", grad),
        out=describe_result(backend, Axes(True, len(shape) - 2), arrays, result),
        prologue=describe_prologue(backend, arrays, geometry.in_channels, x_dtype, activation),
        x_dtype=x_dtype, grad_dtype=grad_dtype, method=method, machine=machine_for(backend, on),
        workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened({name: arrays[name] for name in (*inputs, "grad")}, dtype),
    )  # fmt: skip
    return Call(backend, problem, arrays, frozenset((*inputs, "grad")), axes, (result,))
