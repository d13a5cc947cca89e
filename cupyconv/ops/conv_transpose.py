"""`conv_transpose`: a convolution backwards, from each of its outputs to the inputs that its kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import (
    Call,
    activation_for,
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
from cupyconv.ops.conv import check_addend
from cupyconv.problem.activations import derivative_from_result
from cupyconv.problem.arrays import operand_dtypes, promote
from cupyconv.problem.geometry import ConvGeometry, conv_geometry, transposed_geometry
from cupyconv.problem.padding import per_axis
from cupyconv.problem.problems import TransposedProblem, check_method
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


def prepare_conv_grad_input(
    grad: Any, weight: Any, input_shape: Any, *, stride: Any = 1, padding: Any = 0, padding_mode: str = "constant",
    dilation: Any = 1, groups: Any = 1, method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv_grad_input`."""
    shapes, listed = _input_shapes(input_shape)
    arrays = present({"grad": grad, "weight": weight}, **_named_outs(out, len(shapes), listed))
    backend = owner(arrays)
    batched = not all(len(shape) == weight.ndim - 1 for shape in shapes.values())
    geometry = conv_geometry(
        shapes, tuple(weight.shape), batched=batched, stride=stride, padding=padding, padding_mode=padding_mode,
        dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(batched, geometry.rank)
    needed = axes.shape(geometry.batch, geometry.out_channels, geometry.spatial(geometry.out_size))
    if tuple(grad.shape) != needed:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, needed {needed}: that of conv's result for input_shape {input_shape}"
        )
    names = [f"out[{i}]" for i in range(len(shapes))] if listed else ["out"]
    return _transposed_call(
        "conv_grad_input", backend, geometry, axes, ["grad"], arrays, dict(zip(names, shapes.values())), None, method, on,
        conjugate=True, listed=listed,
    )  # fmt: skip


def prepare_conv_transpose(
    x: Any, weight: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    output_shape: Any = None, dilation: Any = 1, groups: Any = 1, activation: Any = None, method: str = "auto",
    out: Any = None, saving: bool = False, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `conv_transpose`; `saving` asks for a list of results, as for `prepare_conv`."""
    xs = named_inputs("x", x)
    arrays = present({**xs, "weight": weight}, bias=bias, out=out)
    backend = owner(arrays)
    batched = not all(array.ndim == weight.ndim - 1 for array in xs.values())
    geometry = transposed_geometry(
        shapes_of(xs), tuple(weight.shape), batched=batched, stride=stride, padding=padding,
        output_padding=output_padding, output_shape=output_shape, dilation=dilation, groups=groups,
    )  # fmt: skip
    axes = Axes(batched, geometry.rank)
    shape = axes.shape(geometry.batch, geometry.in_channels, geometry.spatial(geometry.size))
    return _transposed_call(
        "conv_transpose", backend, geometry, axes, list(xs), arrays, {"out": shape}, activation, method, on,
        conjugate=False, listed=saving, saving=saving,
    )  # fmt: skip


def _transposed_call(
    operation: str, backend: Backend, geometry: ConvGeometry, axes: Axes, inputs: list[str], arrays: dict[str, Any],
    shapes: dict[str, tuple[int, ...]], activation: Any, method: str, on: str | None, *, conjugate: bool, listed: bool,
    saving: bool = False,
) -> Call:  # fmt: skip
    """The common part: `inputs` name what is spread over results of these `shapes`, given by name."""
    xs, weight = [arrays[name] for name in inputs], arrays["weight"]
    check_method(method)
    dtype = promote({name: arrays[name] for name in (*inputs, "weight")})
    resolved = activation_for(activation, dtype)
    check_addend(arrays, "bias", (geometry.in_channels,), dtype)
    channels_last = all(map(axes.asks_channels_last, xs))
    results = tuple(Result(name, shape, dtype, channels_last) for name, shape in shapes.items())
    keeps_pre = saving and resolved and not derivative_from_result(resolved)
    pre = results[0]._replace(name="pre")
    x_dtype, weight_dtype = operand_dtypes([x.dtype for x in xs], weight.dtype, dtype)
    settings = current_settings()
    problem = TransposedProblem(
        operation=operation, geometry=geometry, xs=tuple(describe(backend, axes, name, arrays[name]) for name in inputs),
        weight=describe(backend, Axes(True, weight.ndim - 2), "weight", weight),
        outs=tuple(describe_result(backend, axes, arrays, result) for result in results),
        pre=describe_result(backend, axes, arrays, pre) if keeps_pre else None,
        bias=describe_given(backend, Axes(False, 0), "bias", arrays),
        x_dtype=x_dtype, weight_dtype=weight_dtype, conjugate=conjugate and weight.dtype.kind == "c",
        activation=resolved, method=method, machine=machine_for(backend, on),
        workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened({name: arrays[name] for name in (*inputs, "weight")}, dtype),
    )  # fmt: skip
    images = frozenset((*inputs, *shapes, "pre"))
    results = (*results, pre) if keeps_pre else results
    return Call(backend, problem, arrays, images, axes, results, listed)


def _input_shapes(input_shape: Any) -> tuple[dict[str, tuple[int, ...]], bool]:
    """The shape of each input by name, and whether they were given as a list."""
    if not isinstance(input_shape, (tuple, list)):
        raise TypeError(f"input_shape must be a shape or a sequence of shapes, given {input_shape!r}")
    if not input_shape:
        raise ValueError("input_shape is an empty sequence, needed at least one shape")
    listed = isinstance(input_shape[0], (tuple, list))
    shapes = input_shape if listed else [input_shape]
    for shape in shapes:
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"input_shape must be a shape or a sequence of shapes, given {input_shape!r}")
    names = [f"input_shape[{i}]" for i in range(len(shapes))] if listed else ["input_shape"]
    return {name: per_axis(name, tuple(shape), len(shape), 0) for name, shape in zip(names, shapes)}, listed


def _named_outs(out: Any, count: int, listed: bool) -> dict[str, Any]:
    """The arrays for the results by name: one, or one each of a list; none where nothing was given."""
    if out is None:
        return {}
    if not listed:
        return {"out": out}
    if not isinstance(out, (tuple, list)) or len(out) != count:
        given = f"{len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out must be a list of {count} arrays, one for each shape in input_shape; given {given}")
    return {f"out[{i}]": array for i, array in enumerate(out)}
