"""`conv` and `linmerge`: the public functions the library is for."""

from __future__ import annotations

from typing import Any

from cupyconv.calls.convolution import prepare_conv, prepare_linmerge, prologue_parts
from cupyconv.repetition import call


def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "constant",
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
    residual: Any = None,
    prologue: Any = None,
    method: str = "auto",
    out: Any = None,
) -> Any:
    """Convolution over one, two or three spatial axes, of one array or of several merged.

    ``y[n, o, p] = activation(sum over c, k of weight[o, c, k] * x[n, c, p * stride + k * dilation - before]
    + bias[o] + residual[n, o, p])``: cross-correlation, as deep-learning libraries have it.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``; N may be missing where ``x.ndim == weight.ndim - 1``.  A list or tuple
        means the concatenation of its arrays along the channel axis, which is never built.  Beside a
        complex array real ones are computed as complex; a real `x` with a complex `weight`, or the
        reverse, is not promoted and takes half the arithmetic.
    weight : array
        ``(C_out, C_in // groups, *kernel)``.
    bias : array, optional
        ``(C_out,)``.
    stride, dilation : int or tuple of int
        One for all spatial axes, or one each; in elements.
    padding : int, tuple or str
        Elements on both sides of every axis; one int, or one ``(before, after)`` pair, per axis;
        ``"valid"``, ``"same"``, ``"same_lower"``, ``"full"``, or ``"causal"`` (one axis).
    padding_mode : str
        ``"constant"`` (zeros), ``"reflect"``, ``"symmetric"``, ``"edge"`` or ``"wrap"``, as in `numpy.pad`.
    groups : int
        Channels are split into this many groups, each convolved by itself.
    activation : str or tuple, optional
        ``"relu"``, ``("leaky_relu", 0.1)``, ``("clip", 0, 6)``, ...; the table is in ``cupyconv.activations``.
    residual : array, optional
        Of exactly the result's shape, added before the activation.
    prologue : tuple (scale, shift, activation), optional
        Each input element is taken as ``activation(scale[c] * x[n, c, p] + shift[c])``, computed as it is loaded:
        a batch normalisation and an activation before the convolution, without a copy.  `scale` and `shift` are
        arrays ``(C,)`` over all channels of the merged inputs; each of the three may be None.  Padding is zeros
        beside transformed elements, and those of a `padding_mode` are transformed.
    method : str
        ``"auto"``, ``"direct"``, ``"gemm"`` (columns and a product) or ``"implicit_gemm"`` (CUDA: the product
        without columns); a method that does not apply is refused, never replaced.
    out : array, optional
        Of exactly the result's shape and dtype, any strides that do not overlap; may be `residual`,
        may not otherwise share memory with an argument.

    Returns
    -------
    array
        ``(N, C_out, *out_spatial)`` in ``result_type(*x, weight)``: float16, bfloat16, float32, float64,
        complex64 or complex128.  16-bit sums are kept in float32 and rounded once.  Channels-last where
        every `x` is, else C order.

    Raises
    ------
    TypeError
        For integer or foreign arrays, NumPy and CuPy mixed, a cast that would drop imaginary parts, a
        complex result with an activation, before or after, or an `out` of another dtype.
    ValueError
        For shapes that do not fit, settings out of range, an `out` of the wrong shape or overlapping an
        argument, or a method that cannot do the problem.
    RuntimeError
        While a CUDA graph is captured, for a call that takes workspace or calls cuBLAS.

    See Also
    --------
    linmerge : 1x1 kernels over any number of spatial axes.
    explain : what a call would run.

    Notes
    -----
    A prologue is computed in the precision of sums, float32 for 16-bit types, and never widens the result; `scale` and
    `shift` of that dtype are taken as they are, others converted first.  The products of ``"gemm"`` and
    ``"implicit_gemm"`` on CUDA are of 16-bit elements, so there a transformed one is rounded to its type once.  With
    a prologue ``"gemm"`` always writes columns, also of 1x1 kernels.

    On CUDA nothing waits for the GPU: the work is enqueued on the current stream.  After a first call
    like it, one with `out` whose plan has no workspace and no GEMM can be captured in a CUDA graph.  With
    ``CUPYCONV_NVTX=1`` in the environment each call is an NVTX range.  Source of the conventions: ONNX ``Conv``; Chetlur et al., *cuDNN: Efficient Primitives for Deep Learning* (2014),
    for columns and products.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> image, features = np.ones((1, 3, 8, 8), np.float32), np.ones((1, 5, 8, 8), np.float32)
    >>> weight = np.ones((16, 8, 3, 3), np.float32)
    >>> y = cupyconv.conv([image, features], weight, padding="same", activation="relu")
    >>> y.shape, float(y[0, 0, 4, 4])
    ((1, 16, 8, 8), 72.0)
    """
    scale, shift, prologue_activation = prologue_parts(prologue)
    return call(
        prepare_conv,
        {"x": x, "weight": weight, "bias": bias, "residual": residual, "scale": scale, "shift": shift, "out": out},
        {
            "stride": stride, "padding": padding, "padding_mode": padding_mode, "dilation": dilation, "groups": groups,
            "activation": activation, "prologue_activation": prologue_activation, "method": method,
        },
    )  # fmt: skip


def linmerge(
    xs: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: Any = None,
    residual: Any = None,
    prologue: Any = None,
    method: str = "auto",
    out: Any = None,
) -> Any:
    """Linear combination of the channels of several arrays, without concatenating them.

    ``y[n, o, ...] = activation(sum over c of weight[o, c] * concatenate(xs, axis=1)[n, c, ...] + bias[o]
    + residual[n, o, ...])``

    Parameters
    ----------
    xs : sequence of arrays, or array
        Each ``(N, C_i, *spatial)`` with any number of spatial axes, equal in all but the channels.
    weight : array
        ``(C_out, C_0 + C_1 + ...)``.
    bias, activation, residual, prologue, method, out
        As for `conv`.

    Returns
    -------
    array
        ``(N, C_out, *spatial)``, dtype and order as for `conv`.

    Raises
    ------
    TypeError, ValueError
        As for `conv`.

    Notes
    -----
    On CUDA few channels are one kernel that reads every input once and writes the result once; many are
    one GEMM per input, accumulating.  `explain` says which, and why.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> velocity, pressure = np.ones((2, 3, 100)), np.full((2, 1, 100), 5.0)
    >>> weight = np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    >>> y = cupyconv.linmerge([velocity, pressure], weight)
    >>> y.shape, y[0, :, 0].tolist()
    ((2, 2, 100), [3.0, 10.0])
    """
    scale, shift, prologue_activation = prologue_parts(prologue)
    return call(
        prepare_linmerge,
        {"xs": xs, "weight": weight, "bias": bias, "residual": residual, "scale": scale, "shift": shift, "out": out},
        {"activation": activation, "prologue_activation": prologue_activation, "method": method},
    )
