"""`conv` and `linmerge`: convolution and pointwise merge of one or several arrays."""

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
    """Convolve one array, or several arrays merged along the channels, over one to three spatial axes.

    ``y[n, o, p] = activation(sum over c, k of weight[o, c, k] * x[n, c, p * stride + k * dilation - before]
    + bias[o] + residual[n, o, p])``.

    The kernel is not flipped (cross-correlation, as in deep-learning libraries).  For the convolution of SciPy and of
    mathematics, flip it: ``weight[:, :, ::-1, ::-1]``.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C_in, *spatial)``: samples, channels, and one to three spatial axes.  A single sample may omit the axis N:
        ``x.ndim == weight.ndim - 1``.  A list or tuple of arrays stands for their concatenation along the channels,
        which is never built.  Real and complex arrays may be mixed in it; all of them are then computed as complex.  A
        real `x` with a complex `weight`, or the reverse, stays real, which halves the arithmetic.
    weight : array
        ``(C_out, C_in // groups, *kernel)``.  ``kernel[None, None]`` makes a weight of one input and one output channel
        from a kernel without channel axes.
    bias : array, optional
        ``(C_out,)``.
    stride : int or tuple of int
        Distance in elements from one window to the next; one int for all spatial axes, or one per axis.
    dilation : int or tuple of int
        Distance in elements from one tap of the kernel to the next; one int, or one per axis.
    padding : int, tuple or str
        Number of elements added around `x`: one int for all sides; or one int or one ``(before, after)`` pair per axis;
        or a name.  A kernel of k taps spans ``dilation * (k - 1) + 1`` elements.  ``"valid"`` adds nothing.  ``"same"``
        adds as many elements as give ``ceil(size / stride)`` results; an odd element goes after (``"same_lower"``:
        before).  ``"full"`` adds one element less than the span on each side.  ``"causal"`` adds the same number, but
        only before the input, and is for one spatial axis.
    padding_mode : str
        Value of the added elements: ``"constant"`` (zeros), ``"reflect"``, ``"symmetric"``, ``"edge"`` or ``"wrap"``,
        as in `numpy.pad`.  SciPy's ``"reflect"`` is ``"symmetric"`` here, and its ``"mirror"`` is ``"reflect"``.  A
        mode other than ``"constant"`` together with ``padding=0`` has no effect, so it is refused.
    groups : int
        Number of groups that the channels are split into; each group is convolved separately.  ``groups=C_in`` with a
        weight ``(C_in, 1, *kernel)`` filters every channel with its own kernel.
    activation : str or tuple, optional
        ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"clip"``, ``"elu"``, ``"sigmoid"``, ``"hard_sigmoid"``,
        ``"hardswish"``, ``"tanh"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"mish"`` or ``"softplus"``.  A tuple
        passes parameters: ``("leaky_relu", 0.1)``, ``("clip", 0, 6)``.  ``help("cupyconv.problem.activations")`` shows
        the formulas.
    residual : array, optional
        Array of exactly the result's shape, added before the activation.
    prologue : tuple (scale, shift, activation), optional
        Transforms each input element as it is loaded: ``activation(scale[c] * x[n, c, p] + shift[c])``.  This fuses a
        batch normalization and an activation before the convolution, without a copy.  `scale` and `shift` are arrays
        ``(C,)`` over all channels of the merged inputs; each of the three entries may be None.  Zero padding is applied
        after the prologue and stays zero.  Elements that another `padding_mode` repeats are transformed.
    method : str
        ``"auto"``, ``"direct"``, ``"gemm"`` (columns and a matrix product), ``"implicit_gemm"`` (CUDA: the matrix
        product without stored columns), ``"winograd"`` (NumPy) or ``"fft"``.  The last two transform the data to need
        fewer products; `options` documents their rounding errors.  A method that does not apply raises an error; it is
        never replaced by another.
    out : array, optional
        Array for the result, of exactly its shape and dtype, with any strides that do not overlap.  It may be
        `residual`, but may not otherwise share memory with an argument.  A call that is refused leaves it unchanged.  A
        call that is interrupted or runs out of memory may leave it partly written; if `out` is `residual`, the residual
        is then lost.

    Returns
    -------
    array
        ``(N, C_out, *out_spatial)`` in ``result_type(*x, weight)``: float16, bfloat16, float32, float64, complex64 or
        complex128.  16-bit types accumulate in float32 and are rounded once.  The result is channels-last if every `x`
        is, otherwise in C order.

    Raises
    ------
    TypeError
        For integer or foreign arrays, NumPy and CuPy arrays mixed, a cast that would drop imaginary parts, an
        activation (also one in the prologue) if the result is complex, or an `out` of another dtype.
    ValueError
        For shapes that do not fit, settings out of range, an `out` of the wrong shape or overlapping an argument, or a
        method that cannot compute the problem.
    RuntimeError
        During the capture of a CUDA graph, for a call that needs workspace or calls cuBLAS.

    See Also
    --------
    linmerge : 1x1 kernels over any number of spatial axes.
    vjp : the result, and a function that computes the gradients.
    explain : the plan of a call, without running it.

    Notes
    -----
    A prologue is computed in the precision of the accumulator (float32 for 16-bit types) and never changes the result's
    dtype.  On CUDA, ``"gemm"`` and ``"implicit_gemm"`` round a transformed 16-bit element to its type once, because
    their matrix products read 16-bit elements.  With a prologue, ``"gemm"`` always writes columns, for 1x1 kernels too.

    On CUDA the call does not wait for the GPU: it enqueues its work on the current stream.  A call with `out` whose
    plan has neither workspace nor a GEMM can be captured in a CUDA graph, after one such call outside the capture.  If
    the environment sets ``CUPYCONV_NVTX=1`` and CuPy has NVTX, each call is an NVTX range.

    Source of the conventions: ONNX ``Conv``; Chetlur et al., *cuDNN: Efficient Primitives for Deep Learning* (2014),
    for columns and matrix products.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> image, features = np.ones((1, 3, 8, 8), np.float32), np.ones((1, 5, 8, 8), np.float32)
    >>> weight = np.ones((16, 8, 3, 3), np.float32)
    >>> y = cupyconv.conv([image, features], weight, padding="same", activation="relu")
    >>> y.shape, float(y[0, 0, 4, 4])
    ((1, 16, 8, 8), 72.0)

    An image and a kernel in SciPy's layout, without axes for samples and channels:

    >>> picture, kernel = np.ones((120, 160)), np.ones((5, 5)) / 25
    >>> cupyconv.conv(picture[None], kernel[None, None], padding="same", padding_mode="symmetric")[0].shape
    (120, 160)
    """
    return CONV(locals())  # all arguments by name: see `Operation.__call__`


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
        Arrays ``(N, C_i, *spatial)`` with any number of spatial axes; their shapes agree in all axes but the channels.
        The axis N of samples is required: use ``array[None]`` for one sample.
    weight : array
        ``(C_out, C_0 + C_1 + ...)``.
    bias, activation, residual, prologue, method, out
        As for `conv`.

    Returns
    -------
    array
        ``(N, C_out, *spatial)``, with dtype and memory order as for `conv`.

    Raises
    ------
    TypeError, ValueError
        As for `conv`.

    Notes
    -----
    On CUDA, few channels run as one kernel that reads every input once and writes the result once.  Many channels run
    as one accumulating GEMM per input.  `explain` says which is chosen, and why.

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


#: The settings that define a convolution's geometry (`WINDOWS`), and its remaining settings (`_HOW`).
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
    """Replace the prologue among the arguments by its three parts, each None if it is absent."""
    prologue = arguments["prologue"]
    parts = _NO_PROLOGUE if prologue is None else prologue_parts(prologue)
    arguments["scale"], arguments["shift"], arguments["prologue_activation"] = parts
    return arguments


def prologue_parts(prologue: Any) -> tuple[Any, Any, Any]:
    """Return scale, shift and activation, each None if it is absent."""
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
    """The part that `conv` and `linmerge` share: everything but the geometry.

    If `saving`, the call returns a list.  Its last entry is the array from which a pullback computes the derivative of
    the activation: the result itself, or else the pre-activation.
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
    """The problem of one convolution, and its results.

    `images` holds the inputs: arguments of the call, or results of earlier layers.  `layer` is the suffix of the names
    of its other arguments, such as ``[0]`` for the first layer of a chain; `out` is the name of its result.
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
            f"prologue activation {prologue.activation} is not defined for the complex result, {dtype.name}"
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
    """Check a prologue of `channels` merged channels, computed in `x_dtype`, and describe it for planning."""
    resolved = resolve_activation(activation)
    vectors = {}
    for vector in ("scale", "shift"):
        name = f"{vector}{layer}"
        arguments.check_optional(name, (channels,), dtype_from_name(x_dtype), "the inputs are computed in")
        vectors[vector] = arguments.describe_given(VECTOR, name)
    return Prologue(**vectors, activation=resolved)
