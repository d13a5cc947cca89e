"""`conv` and `linmerge`: the public functions the library is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import (
    Arrays,
    Call,
    activation_for,
    copied,
    describe,
    describe_given,
    describe_result,
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
from cupyconv.problem.activations import Activation, derivative_from_result, resolve_activation
from cupyconv.problem.arrays import dtype_from_name, operand_dtypes, promote
from cupyconv.problem.geometry import ConvGeometry, conv_geometry, pointwise_geometry
from cupyconv.problem.problems import ConvProblem, Prologue, check_method
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis, PrologueLike


def conv(
    x: Array | Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    residual: Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """Convolution over one, two or three spatial axes, of one array or of several merged.

    ``y[n, o, p] = activation(sum over c, k of weight[o, c, k] * x[n, c, p * stride + k * dilation - before]
    + bias[o] + residual[n, o, p])``.  The kernel is not flipped (cross-correlation, as in deep-learning libraries); for
    the convolution of SciPy and of mathematics flip it: ``weight[:, :, ::-1, ::-1]``.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``: samples, channels, and one to three spatial axes.  One sample may come without the
        axis N: ``x.ndim == weight.ndim - 1``.  A list or tuple of arrays means their concatenation along the
        channels, which is never built.  Its arrays may be real and complex; they are then all computed as complex.
        A real `x` with a complex `weight`, or the reverse, stays real and takes half the arithmetic.
    weight : array
        ``(C_out, C_in // groups, *kernel)``.  A kernel alone is ``kernel[None, None]``: one channel in, one out.
    bias : array, optional
        ``(C_out,)``.
    stride : int or tuple of int
        Elements from one window to the next; one int for all spatial axes, or one for each.
    dilation : int or tuple of int
        Elements from one tap of the kernel to the next; likewise.
    padding : int, tuple or str
        How many elements are added around `x`: one int for all sides; or for each axis one int or one
        ``(before, after)`` pair; or a name (a kernel of k taps spans ``dilation * (k - 1) + 1``): ``"valid"`` none;
        ``"same"`` so many that ``ceil(size / stride)`` results come out, an odd one after (``"same_lower"``: before);
        ``"full"`` the span less one on each side; ``"causal"`` the same, all before, for one spatial axis.
    padding_mode : str
        What the added elements are: ``"constant"`` (zeros), ``"reflect"``, ``"symmetric"``, ``"edge"`` or ``"wrap"``, as
        in `numpy.pad`.  SciPy's ``"reflect"`` is ``"symmetric"`` here, its ``"mirror"`` is ``"reflect"``.
    groups : int
        The channels are split into this many groups, and each is convolved by itself.  ``groups=C_in`` with a weight
        ``(C_in, 1, *kernel)`` filters every channel by its own kernel.
    activation : str or tuple, optional
        ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"clip"``, ``"elu"``, ``"sigmoid"``, ``"hard_sigmoid"``, ``"hardswish"``,
        ``"tanh"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"mish"`` or ``"softplus"``; with parameters a tuple,
        ``("leaky_relu", 0.1)``, ``("clip", 0, 6)``.  The formulas: ``help("cupyconv.problem.activations")``.
    residual : array, optional
        Of exactly the result's shape, added before the activation.
    prologue : tuple (scale, shift, activation), optional
        Each input element is taken as ``activation(scale[c] * x[n, c, p] + shift[c])``, computed as it is loaded:
        a batch normalisation and an activation before the convolution, without a copy.  `scale` and `shift` are
        arrays ``(C,)`` over all channels of the merged inputs; each of the three may be None.  Zero padding comes
        after it and stays zero; the elements that another `padding_mode` repeats are transformed.
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
    conv_vjp : the same with gradients.
    explain : what a call would run.

    Notes
    -----
    A prologue is computed in the precision of the sums (float32 for 16-bit types) and never changes the result's dtype.
    For 16-bit types on CUDA, ``"gemm"`` and ``"implicit_gemm"`` round a transformed element to its type once, because
    their products take 16-bit elements.  With a prologue ``"gemm"`` always writes columns, for 1x1 kernels too.

    On CUDA nothing waits for the GPU: the work is put on the current stream.  A call with `out` whose plan has neither
    workspace nor a GEMM can be captured in a CUDA graph, after a first such call outside it.  With
    ``CUPYCONV_NVTX=1`` in the environment each call is an NVTX range.

    Source of the conventions: ONNX ``Conv``; Chetlur et al., *cuDNN: Efficient Primitives for Deep Learning* (2014), for
    columns and products.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> image, features = np.ones((1, 3, 8, 8), np.float32), np.ones((1, 5, 8, 8), np.float32)
    >>> weight = np.ones((16, 8, 3, 3), np.float32)
    >>> y = cupyconv.conv([image, features], weight, padding="same", activation="relu")
    >>> y.shape, float(y[0, 0, 4, 4])
    ((1, 16, 8, 8), 72.0)

    A picture and a kernel as SciPy has them:

    >>> picture, kernel = np.ones((120, 160)), np.ones((5, 5)) / 25
    >>> cupyconv.conv(picture[None], kernel[None, None], padding="same", padding_mode="symmetric")[0].shape
    (120, 160)
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
    xs: Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *,
    activation: ActivationLike = None,
    residual: Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """Linear combination of the channels of several arrays, without concatenating them.

    ``y[n, o, ...] = activation(sum over c of weight[o, c] * concatenate(xs, axis=1)[n, c, ...] + bias[o]
    + residual[n, o, ...])``

    Parameters
    ----------
    xs : sequence of arrays, or array
        Each ``(N, C_i, *spatial)`` with any number of spatial axes, equal in all but the channels.  The axis of samples
        N is always there: ``array[None]`` for one sample.
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


def prepare_conv(
    x: Any, weight: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, activation: Any = None, residual: Any = None, scale: Any = None,
    shift: Any = None, prologue_activation: Any = None, method: str = "auto", out: Any = None, saving: bool = False,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv`, whose prologue comes in its three parts (`prologue_parts`).

    `saving` asks for a list of results, as `_conv_call` says.
    """
    xs = named_inputs("x", x)
    arrays = present({**xs, "weight": weight}, bias=bias, residual=residual, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    batched = not all(array.ndim == weight.ndim - 1 for array in xs.values())
    geometry = conv_geometry(
        shapes_of(xs), tuple(weight.shape), batched=batched, stride=stride, padding=padding, padding_mode=padding_mode,
        dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(batched, geometry.rank)
    spatial = geometry.spatial(geometry.out_size)
    return _conv_call(
        backend, geometry, axes, spatial, list(xs), arrays, activation, prologue_activation, method, saving, on
    )


def prepare_linmerge(
    xs: Any, weight: Any, bias: Any = None, *, activation: Any = None, residual: Any = None, scale: Any = None,
    shift: Any = None, prologue_activation: Any = None, method: str = "auto", out: Any = None, saving: bool = False,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `linmerge`; prologue and `saving` as for `prepare_conv`."""
    inputs = named_inputs("xs", xs)
    arrays = present({**inputs, "weight": weight}, bias=bias, residual=residual, scale=scale, shift=shift, out=out)
    backend = owner(arrays)
    geometry = pointwise_geometry(shapes_of(inputs), tuple(weight.shape))
    spatial = tuple(next(iter(inputs.values())).shape[2:])
    axes = Axes(True, len(spatial))
    return _conv_call(
        backend, geometry, axes, spatial, list(inputs), arrays, activation, prologue_activation, method, saving, on
    )


def prologue_parts(prologue: Any) -> tuple[Any, Any, Any]:
    """A prologue's scale, shift and activation, each None where it is absent."""
    if prologue is None:
        return None, None, None
    if not isinstance(prologue, (tuple, list)):
        raise TypeError(f"prologue must be None or a tuple (scale, shift, activation), given {prologue!r}")
    if len(prologue) != 3:
        raise ValueError(f"prologue has {len(prologue)} entries, needed 3: scale, shift, activation; each may be None")
    scale, shift, activation = prologue
    return scale, shift, activation


def _conv_call(
    backend: Backend, geometry: ConvGeometry, axes: Axes, spatial: tuple[int, ...], inputs: list[str],
    arrays: dict[str, Any], activation: Any, prologue_activation: Any, method: str, saving: bool,
    on: str | None,
) -> Call:  # fmt: skip
    """The common part of `conv` and `linmerge`: everything but the geometry.

    Where `saving`, the results are a list, whose last is what the derivative of the activation is worked out
    from: the one result, or the pre-activation beside it.
    """
    xs, weight = [arrays[name] for name in inputs], arrays["weight"]
    check_method(method)
    dtype = promote({name: arrays[name] for name in (*inputs, "weight")})
    resolved = activation_for(activation, dtype)
    shape = axes.shape(geometry.batch, geometry.out_channels, spatial)
    check_addend(arrays, "bias", (geometry.out_channels,), dtype)
    check_addend(arrays, "residual", shape, dtype)
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    prologue = describe_prologue(
        backend, arrays, geometry.in_channels, x_dtype, resolve_activation(prologue_activation)
    )
    if prologue.activation and dtype.kind == "c":
        raise TypeError(
            f"prologue activation {prologue.activation} is not defined beside the complex result, {dtype.name}"
        )
    channels_last = all(map(axes.asks_channels_last, xs))
    result = Result("out", shape, dtype, channels_last)
    keeps_pre = saving and resolved and not derivative_from_result(resolved)
    pre = result._replace(name="pre")
    settings = current_settings()
    problem = ConvProblem(
        geometry=geometry, xs=tuple(describe(backend, axes, name, arrays[name]) for name in inputs),
        weight=describe(backend, Axes(True, weight.ndim - 2), "weight", weight),
        out=describe_result(backend, axes, arrays, result),
        bias=describe_given(backend, Axes(False, 0), "bias", arrays),
        residual=describe_given(backend, axes, "residual", arrays),
        pre=describe_result(backend, axes, arrays, pre) if keeps_pre else None,
        x_dtype=x_dtype, weight_dtype=weight_dtype, activation=resolved, prologue=prologue, method=method,
        machine=machine_for(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened({name: arrays[name] for name in (*inputs, "weight")}, dtype) + copied(axes, arrays),
    )  # fmt: skip
    images = frozenset((*inputs, "residual", "out", "pre"))
    results = (result, pre) if keeps_pre else (result,)
    return Call(backend, problem, arrays, images, axes, results, listed=saving)


def check_addend(
    arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype, what: str = "the result is"
) -> None:
    if name not in arrays:
        return
    array = arrays[name]
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {shape}")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{name} is {array.dtype.name}, {what} {dtype.name}: casting would drop imaginary parts")


def describe_prologue(
    backend: Backend, arrays: Arrays, channels: int, x_dtype: str, activation: Activation
) -> Prologue:
    """The prologue of inputs of so many merged channels, computed in `x_dtype`, as planning sees it."""
    vectors = {}
    for name in ("scale", "shift"):
        check_addend(arrays, name, (channels,), dtype_from_name(x_dtype), "the inputs are computed in")
        vectors[name] = describe_given(backend, Axes(False, 0), name, arrays)
    return Prologue(**vectors, activation=activation)
