"""`conv_grad_input`: what reaches the input of a convolution from its result."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.call.cache import call
from cupyconv.ops.conv_transpose import prepare_conv_grad_input
from cupyconv.typing import Array, ArrayOrList, Padding, PerAxis


def conv_grad_input(
    grad: Array,
    weight: Array,
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    method: str = "auto",
    out: Array | Sequence[Array] | None = None,
) -> ArrayOrList:
    """The gradient of a convolution with respect to its input, or to each of its merged inputs.

    ``gx[n, c, i] = sum over o, k, p with element(p * stride + k * dilation - before) = i of
    conj(weight[o, c, k]) * grad[n, o, p]``, where padding that is not zeros is the element it was copied
    from: the adjoint of ``conv(x, weight, ...)``, linear in `x`.

    Parameters
    ----------
    grad : array
        Of the shape of the convolution's result, ``(N, C_out, *out_spatial)``; N is missing where it is in
        `input_shape`.
    weight : array
        The convolution's, ``(C_out, C_in // groups, *kernel)``; a complex one is conjugated.
    input_shape : tuple of int, or sequence of them
        The shape of the convolution's input; for merged inputs one each, in their order.
    stride, padding, padding_mode, dilation, groups
        The convolution's, as for `conv`.
    method : str
        ``"auto"``, ``"direct"``, ``"gemm"`` or ``"implicit_gemm"``; one that does not apply is refused, never
        replaced.
    out : array or list of arrays, optional
        Of exactly the results' shapes and dtype, any strides that do not overlap; a list for a list of shapes.

    Returns
    -------
    array or list of arrays
        Of `input_shape`, in ``result_type(grad, weight)``; a list exactly where `input_shape` is a sequence
        of shapes, each written where it lies.  16-bit sums are kept in float32 and rounded once.
        Channels-last where `grad` is, else C order.  For a real input and a complex weight the gradient
        is the real part of this.

    Raises
    ------
    TypeError
        For integer or foreign arrays, NumPy and CuPy mixed, or an `out` of another dtype.
    ValueError
        For a `grad` whose shape is not the result's, settings out of range, an `out` of the wrong shape or
        overlapping an argument, or a method that cannot do the problem.

    See Also
    --------
    conv_transpose : the same sum as a layer, without the conjugate.

    Notes
    -----
    On NumPy products are added where they belong, in blocks that stay in cache; on CUDA every element
    gathers what reaches it.  No atomics: the same bits on every run.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> weight, grad = np.ones((1, 3, 2)), np.ones((1, 1, 3))
    >>> a, b = cupyconv.conv_grad_input(grad, weight, [(1, 2, 4), (1, 1, 4)])  # of conv([x, y], weight)
    >>> a.shape, b
    ((1, 2, 4), array([[[1., 2., 2., 1.]]]))
    """
    return call(
        prepare_conv_grad_input,
        {"grad": grad, "weight": weight, "out": out},
        {
            "input_shape": input_shape, "stride": stride, "padding": padding, "padding_mode": padding_mode,
            "dilation": dilation, "groups": groups, "method": method,
        },
    )  # fmt: skip
