"""`conv` and `linmerge`: the public functions the library is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

from cupyconv.call.arguments import (
    VECTOR,
    Arguments,
    Arrays,
    Axes,
    Result,
    activation_for,
    is_batched,
    merged_inputs,
    shapes_of,
    widening_notes,
)
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.problem.activations import derivative_from_result, resolve_activation
from cupyconv.problem.arrays import dtype_from_name, operand_dtypes, promote
from cupyconv.problem.geometry import ConvGeometry, conv_geometry, pointwise_geometry
from cupyconv.problem.problems import ConvProblem, Prologue, check_method
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis, PrologueLike


def conv(
    x: Array | Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *unnamed: Never,
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
    **foreign: Never,
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
        in `numpy.pad`.  SciPy's ``"reflect"`` is ``"symmetric"`` here, its ``"mirror"`` is ``"reflect"``.  Beside a
        `padding` of 0 another mode than ``"constant"`` would do nothing, and is refused.
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
        ``"auto"``, ``"direct"``, ``"gemm"`` (columns and a product), ``"implicit_gemm"`` (CUDA: the product
        without columns), ``"winograd"`` (NumPy) or ``"fft"``: fewer products of transformed data, with the errors
        that `options` names; a method that does not apply is refused, never replaced.
    out : array, optional
        Of exactly the result's shape and dtype, any strides that do not overlap; may be `residual`,
        may not otherwise share memory with an argument.  A call that is refused leaves it as it was; one that is
        interrupted, or runs out of memory, may leave it half written, and `residual` lost where they are one.

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
    vjp : the result, and its gradients.
    explain : what a call would run.

    Notes
    -----
    A prologue is computed in the precision of the sums (float32 for 16-bit types) and never changes the result's dtype.
    For 16-bit types on CUDA, ``"gemm"`` and ``"implicit_gemm"`` round a transformed element to its type once, because
    their products take 16-bit elements.  With a prologue ``"gemm"`` always writes columns, for 1x1 kernels too.

    On CUDA nothing waits for the GPU: the work is put on the current stream.  A call with `out` whose plan has neither
    workspace nor a GEMM can be captured in a CUDA graph, after a first such call outside it.  With
    ``CUPYCONV_NVTX=1`` in the environment each call is an NVTX range, where CuPy has NVTX.

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
    return CONV(locals())  # every argument by its name: see `Operation.__call__`


def linmerge(
    xs: Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *unnamed: Never,
    activation: ActivationLike = None,
    residual: Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
    out: Array | None = None,
    **foreign: Never,
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
    return LINMERGE(locals())


#: What is said of a convolution's geometry, and what else is said of it beside its arrays.
WINDOWS = ("stride", "padding", "padding_mode", "dilation", "groups")
_HOW = ("activation", "prologue_activation", "method")


def check_conv(given: Arrays, *, on: str | None = None, saving: bool = False, **settings: Any) -> CheckedCall:
    """Check the arguments of `conv`."""
    inputs, arrays = merged_inputs(given, "x", "weight")
    arguments = Arguments.of(arrays, on)
    shapes, weight_shape = shapes_of(inputs), tuple(arguments["weight"].shape)
    batched = is_batched(shapes, weight_shape[2:])
    windows = {name: settings.pop(name) for name in WINDOWS}
    geometry = conv_geometry(shapes, weight_shape, batched=batched, **windows)
    spatial = geometry.spatial(geometry.out_size)
    return _conv_call(arguments, Axes(batched, geometry.rank), inputs, geometry, spatial, saving, settings)


def check_linmerge(given: Arrays, *, on: str | None = None, saving: bool = False, **settings: Any) -> CheckedCall:
    """Check the arguments of `linmerge`."""
    inputs, arrays = merged_inputs(given, "xs", "weight")
    arguments = Arguments.of(arrays, on)
    geometry = pointwise_geometry(shapes_of(inputs), tuple(arguments["weight"].shape))
    spatial = tuple(next(iter(inputs.values())).shape[2:])
    return _conv_call(arguments, Axes(True, len(spatial)), inputs, geometry, spatial, saving, settings)


_NO_PROLOGUE = (None, None, None)


def unpack_prologue(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the prologue in its three parts, each None where it is absent."""
    prologue = arguments["prologue"]
    parts = _NO_PROLOGUE if prologue is None else prologue_parts(prologue)
    arguments["scale"], arguments["shift"], arguments["prologue_activation"] = parts
    return arguments


def prologue_parts(prologue: Any) -> tuple[Any, Any, Any]:
    """Scale, shift and activation, each None where it is absent."""
    parts = _NO_PROLOGUE if prologue is None else prologue
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"prologue must be None or a tuple (scale, shift, activation), given {prologue!r}")
    if len(parts) != 3:
        raise ValueError(f"prologue has {len(parts)} entries, needed 3: scale, shift, activation; each may be None")
    scale, shift, activation = parts
    return scale, shift, activation


_EPILOGUE = ("bias", "residual", "scale", "shift", "out")
CONV = Operation(conv, check_conv, ("x", "weight", *_EPILOGUE), (*WINDOWS, *_HOW), unpack_prologue)
LINMERGE = Operation(linmerge, check_linmerge, ("xs", "weight", *_EPILOGUE), _HOW, unpack_prologue)


def _conv_call(
    arguments: Arguments,
    axes: Axes,
    inputs: Arrays,
    geometry: ConvGeometry,
    spatial: tuple[int, ...],
    saving: bool,
    how: Mapping[str, Any],
) -> CheckedCall:
    """The common part of `conv` and `linmerge`: everything but the geometry.

    Where `saving`, the results are a list, whose last is what the derivative of the activation is worked out
    from: the one result, or the pre-activation beside it.
    """
    problem, results = conv_problem(arguments, axes, inputs, geometry, spatial, saving=saving, **how)
    images = frozenset((*inputs, "residual", "out", "pre"))
    return CheckedCall(arguments, problem, images, axes, results, listed=saving)


def conv_problem(
    arguments: Arguments,
    axes: Axes,
    images: Mapping[str, Any],
    geometry: ConvGeometry,
    spatial: tuple[int, ...],
    *,
    layer: str = "",
    out: str = "out",
    saving: bool = False,
    activation: Any,
    prologue_activation: Any = None,
    method: str = "auto",
) -> tuple[ConvProblem, tuple[Result, ...]]:
    """A convolution of these images, arguments or results of layers before it, and its results.

    `layer` is what stands behind the names of its other arguments, ``[0]`` of a chain's first; `out` is its result's.
    """
    weight_name, bias, residual = f"weight{layer}", f"bias{layer}", f"residual{layer}"
    weight = arguments[weight_name]
    check_method(method)
    multiplied = {**images, weight_name: weight}
    dtype = promote(multiplied)
    resolved = activation_for(activation, dtype)
    shape = axes.shape(geometry.batch, geometry.out_channels, spatial)
    arguments.check_optional(bias, (geometry.out_channels,), dtype)
    arguments.check_optional(residual, shape, dtype)
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in images.values()], weight.dtype, dtype)
    prologue = checked_prologue(arguments, geometry.in_channels, x_dtype, prologue_activation, layer)
    if prologue.activation and dtype.kind == "c":
        raise TypeError(
            f"prologue activation {prologue.activation} is not defined beside the complex result, {dtype.name}"
        )
    result = axes.result(out, shape, dtype, images.values(), may_alias=residual)
    keeps_pre = saving and resolved and not derivative_from_result(resolved)
    pre = result._replace(name="pre")
    problem = ConvProblem(
        geometry=geometry,
        xs=arguments.describe_each(axes, [x if isinstance(x, Result) else name for name, x in images.items()]),
        weight=arguments.describe(Axes(True, weight.ndim - 2), weight_name),
        out=arguments.describe(axes, result),
        bias=arguments.describe_given(VECTOR, bias),
        residual=arguments.describe_given(axes, residual),
        pre=arguments.describe(axes, pre) if keeps_pre else None,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        activation=resolved,
        prologue=prologue,
        method=method,
        notes=widening_notes(multiplied, dtype) + arguments.copy_notes(axes, (*images, residual, out)),
        **arguments.decided_with,
    )
    return problem, (result, pre) if keeps_pre else (result,)


def checked_prologue(arguments: Arguments, channels: int, x_dtype: str, activation: Any, layer: str = "") -> Prologue:
    """The prologue of inputs of so many merged channels, computed in `x_dtype`, as planning sees it."""
    resolved = resolve_activation(activation)
    vectors = {}
    for vector in ("scale", "shift"):
        name = f"{vector}{layer}"
        arguments.check_optional(name, (channels,), dtype_from_name(x_dtype), "the inputs are computed in")
        vectors[vector] = arguments.describe_given(VECTOR, name)
    return Prologue(**vectors, activation=resolved)
