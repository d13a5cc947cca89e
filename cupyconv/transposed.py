"""`conv_transpose`: a convolution backwards, from each of its outputs to the inputs that its kernel reads."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.calls.transposed import prepare_conv_transpose
from cupyconv.repetition import call
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis


def conv_transpose(
    x: Array | Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_shape: PerAxis | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """Transposed convolution over one, two or three spatial axes, of one array or of several merged.

    Every pixel of `x` stamps the kernel onto the result, `stride` apart, scaled by its value:
    ``y[n, c, i] = activation(sum over o, k, p with p * stride + k * dilation - before = i of
    weight[o, c, k] * x[n, o, p] + bias[c])``.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``; N may be missing where ``x.ndim == weight.ndim - 1``.  A list or tuple means
        the concatenation of its arrays along the channel axis, which is never built.
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
        The result's spatial size, instead of amounts of `padding` and `output_padding`: what the stamps
        cover beyond it is cut off both ends, an odd element at the end where `padding` is ``"same"``, else
        at the beginning.  If they cover less, zeros are at the end.
    groups : int
        Channels are split into this many groups, each by itself.
    activation : str or tuple, optional
        As for `conv`.
    method : str
        ``"auto"``, ``"direct"``, ``"gemm"`` or ``"implicit_gemm"``; one that does not apply is refused, never
        replaced.
    out : array, optional
        Of exactly the result's shape and dtype, any strides that do not overlap.

    Returns
    -------
    array
        ``(N, C_out, *out_spatial)`` in ``result_type(*x, weight)``.  16-bit sums are kept in float32 and
        rounded once.  Channels-last where every `x` is, else C order.

    Raises
    ------
    TypeError
        As for `conv`.
    ValueError
        For shapes that do not fit, settings out of range or that contradict each other, ``"full"`` and
        ``"causal"`` padding, an `out` of the wrong shape or overlapping an argument, or a method that cannot do
        the problem.

    See Also
    --------
    conv_grad_input : the same sum with a conjugated weight, for every padding mode and for merged inputs.

    Notes
    -----
    Everything ONNX's ``ConvTranspose`` can say: ``auto_pad`` and ``pads`` through `onnx_padding`;
    ``output_shape`` there overrides ``pads``, so give 0 beside it.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.conv_transpose(np.array([[[1.0, 2.0]]]), np.ones((1, 1, 3)), stride=2)
    array([[[1., 1., 3., 2., 2.]]])
    """
    return call(
        prepare_conv_transpose,
        {"x": x, "weight": weight, "bias": bias, "out": out},
        {
            "stride": stride, "padding": padding, "output_padding": output_padding, "output_shape": output_shape,
            "dilation": dilation, "groups": groups, "activation": activation, "method": method,
        },
    )  # fmt: skip
