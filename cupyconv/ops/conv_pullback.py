"""Functions with their pullbacks: a result, and the map from its gradient to those of the arguments.

::

    forward      x, weight --linear--> + bias + residual = z --activation--> y
    backward     x, weight <--linear--  dz = grad * f'(z)  <-------------- grad
                 bias     <-- sums of dz's channels;   residual <-- dz

The way back through the activation and the sums for the bias are one pass; what is linear goes back through
the public gradient functions.  A prologue stands before all of this: the gradient of the transformed input is taken
back through it in one more pass, which transforms the input anew, and the weight's gradient is of the transformed
input, transformed as it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import Call, describe, describe_result, fitting, in_dtype, machine_for, owner, present
from cupyconv.call.dispatch import Backend
from cupyconv.call.executable import Result
from cupyconv.call.options import current_settings
from cupyconv.ops.conv import conv, describe_prologue, prepare_conv, prepare_linmerge, prologue_parts
from cupyconv.ops.conv_grad_input import conv_grad_input
from cupyconv.ops.conv_grad_weight import conv_grad_weight, prepare_conv_grad_weight
from cupyconv.ops.conv_transpose import prepare_conv_transpose
from cupyconv.ops.pooling import max_pool, prepare_max_pool_gradient
from cupyconv.problem.activations import resolve_activation
from cupyconv.problem.arrays import accumulator, collapsed_stride, dtype_from_name, dtype_name
from cupyconv.problem.geometry import transposed_geometry
from cupyconv.problem.problems import EpilogueGradProblem, PrologueGradProblem
from cupyconv.typing import ActivationLike, Array, ArrayOrList, Padding, PerAxis, PrologueLike


class ConvGradients(NamedTuple):
    """What a pullback returns: one gradient for each argument, of its shape and dtype.

    Attributes
    ----------
    x : array or list of arrays
        Of the input; a list exactly where that was a sequence.
    weight, bias, residual : array or None
        None where the argument is absent or `needs` leaves it out.
    scale, shift : array or None
        Of the prologue.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.ConvGradients(x=1.0)._fields
    ('x', 'weight', 'bias', 'residual', 'scale', 'shift')
    """

    x: ArrayOrList | None = None
    weight: Array | None = None
    bias: Array | None = None
    residual: Array | None = None
    scale: Array | None = None
    shift: Array | None = None


Pullback = Callable[..., ConvGradients]


def conv_vjp(
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
) -> tuple[Array, Pullback]:
    """`conv`, and its pullback: the function that computes the gradients of its arguments from that of its result.

    Parameters
    ----------
    x, weight, bias, stride, padding, padding_mode, dilation, groups, activation, residual, prologue
        As for `conv`.
    method : str
        The convolution's, as for `conv`.  Its gradients choose their own.

    Returns
    -------
    y : array
        The result of `conv`.
    pullback : callable
        ``pullback(grad, *, needs=None) -> ConvGradients``.  `grad` is the gradient of a number, such as a loss, with
        respect to `y`, and has its shape; another precision is converted.  What is returned are the gradients of
        that number with respect to the arguments, each in its argument's shape and dtype; that of a real argument
        beside complex ones is the real part.  `needs`, such as ``("weight", "bias")``, names those that are wanted:
        the others are None and take no time.  It may be called again.

    Raises
    ------
    TypeError, ValueError
        As for `conv`; of the pullback, for a `grad` of another shape than `y`, or an unknown name in `needs`.

    See Also
    --------
    conv_grad_input, conv_grad_weight : the linear parts by themselves.

    Notes
    -----
    Memory.  The pullback holds `x`, `weight`, and with an activation one array of the size of `y`: `y` itself for relu,
    sigmoid, tanh and leaky_relu of a positive slope, and otherwise the values before the activation, which the forward
    pass then writes too.  Do not write to any of these before the pullback is called.  A call of it allocates one more
    array of that size, for the gradient before the activation.

    With a prologue the pullback holds `scale` and `shift`, but no transformed input, which is computed again as the
    input is read.  A call then allocates one more array of the size of `x`, for the gradient of the transformed input,
    and on CUDA a copy of `x` where its dtype is not that of `y`.  In 16-bit types that gradient is rounded.

    Values.  At a kink of an activation the derivative of the flat or the left side counts: relu'(0) = 0.  For complex
    arrays the weight and `x` are conjugated, as in PyTorch (the Hermitian adjoint).  Without an activation the gradient
    of `residual` is `grad` itself, not a copy.  The gradients of `x` are channels-last where `y` is, or without an
    activation where `grad` is; that of `weight` is in C order.  Every call gives the same bits.

    For a 16-bit result on CUDA the activation is computed, as in `conv`, before the values under it are rounded to be
    kept; but after that in the kernels of the fused merge and of depthwise convolutions.

    Examples
    --------
    Two steps of gradient descent on the squares of a layer's results:

    >>> import numpy as np, cupyconv
    >>> image, skip = np.ones((1, 2, 6, 6)), np.full((1, 1, 6, 6), 2.0)
    >>> weight, bias = np.full((4, 3, 3, 3), 0.1), np.zeros(4)
    >>> for _ in range(2):
    ...     y, pullback = cupyconv.conv_vjp([image, skip], weight, bias, padding="same", activation="relu")
    ...     gradients = pullback(2 * y / y.size, needs=("weight", "bias"))
    ...     weight -= 0.01 * gradients.weight
    ...     bias -= 0.01 * gradients.bias
    ...     print(round(float(np.mean(y * y)), 3))
    8.604
    5.709
    """
    scale, shift, prologue_activation = parts = prologue_parts(prologue)
    window: dict[str, Any] = {
        "stride": stride, "padding": padding, "padding_mode": padding_mode, "dilation": dilation, "groups": groups
    }  # fmt: skip
    others = {"activation": activation, "prologue_activation": prologue_activation, "method": method, "saving": True}
    results = call(
        prepare_conv,
        {"x": x, "weight": weight, "bias": bias, "residual": residual, "scale": scale, "shift": shift, "out": None},
        {**window, **others},
    )
    inputs, listed = _listed(x)
    shapes = [tuple(image.shape) for image in inputs]

    def to_x(dz: Any) -> list[Any]:
        return conv_grad_input(dz, weight, shapes, **window)

    def to_weight(dz: Any) -> Any:
        return _grad_weight(dz, inputs, tuple(weight.shape[2:]), parts, window)

    return results[0], _pullback(
        inputs, listed, weight, bias, residual, to_x, to_weight,
        _EpilogueBackward(results, activation, weight.ndim - 2), _PrologueBackward(inputs, parts, weight.ndim - 2),
    )  # fmt: skip


def linmerge_vjp(
    xs: Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *,
    activation: ActivationLike = None,
    residual: Array | None = None,
    prologue: PrologueLike | None = None,
    method: str = "auto",
) -> tuple[Array, Pullback]:
    """`linmerge`, and its pullback: the function that computes its arguments' gradients from that of its result.

    Parameters
    ----------
    xs, weight, bias, activation, residual, prologue
        As for `linmerge`.
    method
        As for `conv_vjp`.

    Returns
    -------
    y : array
        The result of `linmerge`.
    pullback : callable
        As of `conv_vjp`; the gradients of `xs` are its `x`, each written straight into its own array.

    Raises
    ------
    TypeError, ValueError
        As for `linmerge` and `conv_vjp`.

    Notes
    -----
    The pullback holds `xs`, `weight`, and `y` or the pre-activation, as that of `conv_vjp` does.  An array
    whose spatial axes have no one stride is copied for the weight's gradient.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> velocity, pressure = np.ones((2, 3, 100)), np.full((2, 1, 100), 5.0)
    >>> y, pullback = cupyconv.linmerge_vjp([velocity, pressure], np.array([[1.0, 1.0, 1.0, 2.0]]))
    >>> gradients = pullback(np.ones_like(y))
    >>> [gradient.shape for gradient in gradients.x], gradients.weight.tolist(), gradients.bias
    ([(2, 3, 100), (2, 1, 100)], [[200.0, 200.0, 200.0, 1000.0]], None)
    """
    scale, shift, prologue_activation = parts = prologue_parts(prologue)
    results = call(
        prepare_linmerge,
        {"xs": xs, "weight": weight, "bias": bias, "residual": residual, "scale": scale, "shift": shift, "out": None},
        {"activation": activation, "prologue_activation": prologue_activation, "method": method, "saving": True},
    )
    inputs, listed = _listed(xs)
    rank = inputs[0].ndim - 2
    backend = owner({"weight": weight})

    def flat(image: Any) -> Any:
        """With one spatial axis: the order of pixels means nothing to a merge."""
        if collapsed_stride(image.shape[2:], image.strides[2:]) is None:
            image = backend.converted(image, image.dtype)
        return image.reshape(*image.shape[:2], prod(image.shape[2:]))

    def to_x(dz: Any) -> list[Any]:
        shapes = [(*image.shape[:2], prod(image.shape[2:])) for image in inputs]
        gradients = conv_grad_input(flat(dz), weight[:, :, None], shapes)
        return [gradient.reshape(image.shape) for gradient, image in zip(gradients, inputs)]

    def to_weight(dz: Any) -> Any:
        return _grad_weight(flat(dz), [flat(image) for image in inputs], (1,), parts, {})[:, :, 0]

    return results[0], _pullback(
        inputs, listed, weight, bias, residual, to_x, to_weight,
        _EpilogueBackward(results, activation, rank), _PrologueBackward(inputs, parts, rank),
    )  # fmt: skip


def conv_transpose_vjp(
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
) -> tuple[Array, Pullback]:
    """`conv_transpose`, and its pullback: the function that computes its arguments' gradients from that of its result.

    Parameters
    ----------
    x, weight, bias, stride, padding, output_padding, output_shape, dilation, groups, activation
        As for `conv_transpose`.
    method : str
        The transposed convolution's, as for `conv_transpose`.  Its gradients choose their own.

    Returns
    -------
    y : array
        The result of `conv_transpose`.
    pullback : callable
        As of `conv_vjp`; there is no residual.

    Raises
    ------
    TypeError, ValueError
        As for `conv_transpose` and `conv_vjp`.

    Notes
    -----
    The gradient of `x` is a convolution of that of `y`, one for each array of a sequence, and written
    straight into its own; that of `weight` is that of this convolution's weight.  The pullback holds `x`, `weight`,
    and `y` or the pre-activation, as that of `conv_vjp` does.  Of a 16-bit result on CUDA, an activation for which
    the pre-activation is kept is computed from the rounded one, in a pass of its own.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, weight = np.array([[[1.0, 2.0]]]), np.ones((1, 1, 3))
    >>> y, pullback = cupyconv.conv_transpose_vjp(x, weight, stride=2)
    >>> pullback(y).x  # y is 1, 1, 3, 2, 2
    array([[[5., 7.]]])
    """
    results = call(
        prepare_conv_transpose,
        {"x": x, "weight": weight, "bias": bias, "out": None},
        {
            "stride": stride, "padding": padding, "output_padding": output_padding, "output_shape": output_shape,
            "dilation": dilation, "groups": groups, "activation": activation, "method": method, "saving": True,
        },
    )  # fmt: skip
    inputs, listed = _listed(x)
    rank = weight.ndim - 2
    channel = inputs[0].ndim - rank - 1
    backend = owner({"weight": weight})
    # The convolution that this is the adjoint of: over images of the size of y, with the same weight.
    geometry = transposed_geometry(
        {f"x[{i}]": tuple(image.shape) for i, image in enumerate(inputs)}, tuple(weight.shape), batched=channel == 1,
        stride=stride, padding=padding, output_padding=output_padding, output_shape=output_shape, dilation=dilation,
        groups=groups,
    )  # fmt: skip
    triples = geometry.size, geometry.before, geometry.stride, geometry.out_size, geometry.span
    axes = [_UnderWindows.of(*axis) for axis in zip(*map(geometry.spatial, triples))]
    window: dict[str, Any] = {
        "stride": stride, "dilation": dilation, "padding": tuple((axis.before, axis.after) for axis in axes)
    }  # fmt: skip
    under_windows = tuple(slice(axis.size) for axis in axes)
    pieces = _pieces(
        [image.shape[channel] for image in inputs], groups, geometry.group_outputs, geometry.group_channels
    )

    def of_piece(dz: Any, piece: _Piece) -> Any:
        """What the windows of these channels read."""
        return dz[(..., piece.outputs, *under_windows)]

    def to_x(dz: Any) -> list[Any]:
        factors = _conjugate(weight, backend)
        gradients = [backend.empty(tuple(image.shape), dz.dtype) for image in inputs]
        for piece in pieces:
            conv(
                of_piece(dz, piece), factors[piece.rows], groups=piece.groups, **window,
                out=gradients[piece.of][(..., piece.channels, *(slice(None),) * rank)],
            )  # fmt: skip
        return gradients

    def to_weight(dz: Any) -> Any:
        gradient = backend.empty(tuple(weight.shape), dz.dtype)
        for piece in pieces:
            image = inputs[piece.of][(..., piece.channels, *(slice(None),) * rank)]
            conv_grad_weight(
                image, of_piece(dz, piece), tuple(weight.shape[2:]), groups=piece.groups, **window,
                out=gradient[piece.rows],
            )  # fmt: skip
        if gradient.dtype.kind == "c":  # of the pair of factors the other one was conjugated
            _negate_imaginary(gradient)
        return gradient

    return results[0], _pullback(
        inputs, listed, weight, bias, None, to_x, to_weight,
        _EpilogueBackward(results, activation, rank), _PrologueBackward(inputs, (None, None, None), rank),
    )  # fmt: skip


def max_pool_vjp(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
) -> tuple[ArrayOrList, Pullback]:
    """`max_pool`, and its pullback: the function that computes the image's gradient from that of its result.

    Parameters
    ----------
    x, kernel_shape, stride, padding, dilation
        As for `max_pool`.

    Returns
    -------
    y : array, or list of arrays where `x` is a sequence
        The result of `max_pool`.
    pullback : callable
        As of `conv_vjp`; `grad` is a sequence where `x` is one, and so is the one gradient, ``x``.

    Raises
    ------
    TypeError, ValueError
        As for `max_pool` and `conv_vjp`.

    Notes
    -----
    All of a window's gradient goes to its largest element, to the first in C order where there are several; a NaN
    counts as larger.  The pullback holds `x` and `y`: it finds out again which element that was.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> y, pullback = cupyconv.max_pool_vjp(np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 3, stride=2)
    >>> pullback(np.array([[[1.0, 2.0]]])).x
    array([[[0., 0., 1., 0., 2.]]])
    """
    y = max_pool(x, kernel_shape, stride=stride, padding=padding, dilation=dilation)
    inputs, listed = _listed(x)
    arguments = {"x": inputs if listed else x, "y": tuple(y) if listed else y}
    settings = {"kernel_shape": kernel_shape, "stride": stride, "padding": padding, "dilation": dilation}
    x_dtypes, backend = [image.dtype for image in inputs], owner({"x": inputs[0]})

    def pullback(grad: Any, *, needs: Iterable[str] | None = None) -> ConvGradients:
        """The gradient of `x`, from that of the result; None where `needs` leaves it out."""
        if "x" not in _names(needs):
            return ConvGradients()
        if grad is None:
            raise TypeError("grad must be an array of the result's shape, or a sequence of them, not None")
        dx = call(prepare_max_pool_gradient, {**arguments, "grad": grad}, settings)
        of_inputs = [in_dtype(*one, backend) for one in zip(dx if listed else [dx], x_dtypes, strict=True)]
        return ConvGradients(x=of_inputs if listed else of_inputs[0])

    return y, pullback


class _EpilogueBackward:
    """The way back through activation, bias and residual: what it needs to know of the forward pass.

    `results` are those of a call that saves: y first, and last what the derivative is worked out from.
    """

    def __init__(self, results: Sequence[Any], activation: Any, spatial: int) -> None:
        self.shape, self.dtype = tuple(results[0].shape), results[0].dtype
        self._saved = results[-1] if resolve_activation(activation) else None
        self._activation = activation
        self._spatial = spatial

    def __call__(self, grad: Any, *, through: bool, sums: bool) -> tuple[Any, Any]:
        """The gradient before the activation, and the sum of each of its channels, as far as they are asked for."""
        unchanged = self._saved is None
        asked = {"through": through and not unchanged, "sums": sums}
        if not any(asked.values()):
            return grad, None
        settings = {"spatial": self._spatial, "activation": self._activation, **asked}
        results = call(prepare_epilogue_grad, {"grad": grad, "saved": self._saved}, settings)
        return results[0] if asked["through"] else grad, results[-1]


class _PrologueBackward:
    """The way back through a prologue, which needs its inputs again.

    `parts` are the prologue's scale, shift and activation.
    """

    def __init__(self, x: tuple[Any, ...], parts: tuple[Any, Any, Any], spatial: int) -> None:
        self.scale, self.shift, activation = parts
        self._activation = activation
        self._spatial = spatial
        #: Whether the gradient of `x` is another one than that of the transformed `x`.
        self.changes_x = self.scale is not None or bool(resolve_activation(activation))
        self._x = x if self.changes_x or self.shift is not None else ()

    def __call__(self, grads: list[Any], *, through: bool, sums: bool, backend: Backend) -> tuple[list[Any], Any]:
        """From the gradients of the transformed `x` those of `x` where `through`; and where `sums`, those of scale and
        shift, which take turns in one array."""
        if not sums and not (through and self.changes_x):
            return grads, None
        channel = self._x[0].ndim - self._spatial - 1
        dtype = dtype_from_name(accumulator(dtype_name(grads[0].dtype)))
        totals = backend.empty((2 * sum(image.shape[channel] for image in self._x),), dtype)
        first = 0
        for i, image in enumerate(self._x):
            channels = slice(first, first + image.shape[channel])
            scale, shift = (None if vector is None else vector[channels] for vector in (self.scale, self.shift))
            results = call(
                prepare_prologue_grad,
                {
                    "grad": grads[i], "x": image, "scale": scale, "shift": shift,
                    "sums": totals[2 * channels.start : 2 * channels.stop],
                },
                {"spatial": self._spatial, "activation": self._activation, "through": through},
            )  # fmt: skip
            if through:
                grads[i] = results[0]  # the gradient of the transformed input is let go
            first = channels.stop
        return grads, totals


def _grad_weight(
    grad: Any, x: Any, kernel_shape: tuple[int, ...], parts: tuple[Any, Any, Any], window: dict[str, Any]
) -> Any:
    """`conv_grad_weight` of inputs that the prologue with these parts transforms."""
    scale, shift, activation = parts
    return call(
        prepare_conv_grad_weight,
        {"grad": grad, "x": x, "scale": scale, "shift": shift, "out": None},
        {"kernel_shape": kernel_shape, **window, "prologue_activation": activation},
    )


def _pullback(
    inputs: tuple[Any, ...], listed: bool, weight: Any, bias: Any, residual: Any,
    to_x: Callable[[Any], list[Any]], to_weight: Callable[[Any], Any],
    epilogue: _EpilogueBackward, prologue: _PrologueBackward,
) -> Pullback:  # fmt: skip
    """The pullback of what is linear in `inputs` and `weight` between its prologue and its epilogue.

    `to_x` and `to_weight` take the gradient before the epilogue to those of the transformed inputs and of `weight`, in
    y's dtype.  Of bias and residual the dtype is kept.
    """
    x_dtypes = [image.dtype for image in inputs]
    others = {"weight": weight, "bias": bias, "residual": residual, "scale": prologue.scale, "shift": prologue.shift}
    dtypes = {name: array.dtype for name, array in others.items() if array is not None}
    given = frozenset(("x", *dtypes))

    def pullback(grad: Any, *, needs: Iterable[str] | None = None) -> ConvGradients:
        """Gradients of the arguments, from that of the result; of those named in `needs`, or of all."""
        wanted = _names(needs) & given
        backend = owner({"weight": weight, "grad": grad})
        grad = fitting("grad", grad, epilogue.shape, epilogue.dtype, backend)
        dz, sums = epilogue(grad, through=bool(wanted - {"bias"}), sums="bias" in wanted)
        found: dict[str, Any] = {"bias": sums, "residual": dz}
        gradients: dict[str, Any] = {}
        if wanted & {"x", "scale", "shift"}:
            dx = to_x(dz)
            with backend.current():
                dx, totals = prologue(
                    dx, through="x" in wanted, sums=bool(wanted & {"scale", "shift"}), backend=backend
                )
                for first, name in enumerate(("scale", "shift")):
                    if name in wanted:
                        found[name] = backend.converted(totals[first::2], dtypes[name])
            if "x" in wanted:
                of_inputs = [in_dtype(one, dtype, backend) for one, dtype in zip(dx, x_dtypes, strict=True)]
                gradients["x"] = of_inputs if listed else of_inputs[0]
        if "weight" in wanted:
            found["weight"] = to_weight(dz)
        gradients |= {name: in_dtype(found[name], dtype, backend) for name, dtype in dtypes.items() if name in wanted}
        return ConvGradients(**gradients)

    return pullback


def _listed(x: Any) -> tuple[tuple[Any, ...], bool]:
    """The inputs, and whether they came as a sequence."""
    listed = isinstance(x, (list, tuple))
    return (tuple(x) if listed else (x,)), listed


def _names(needs: Iterable[str] | None) -> frozenset[str]:
    """The names of gradients that are asked for."""
    if needs is None:
        return frozenset(ConvGradients._fields)
    try:
        names = [needs] if isinstance(needs, str) else list(needs)
    except TypeError:
        raise TypeError(f"needs must be names of gradients, given {needs!r}") from None
    for name in names:
        if not isinstance(name, str) or name not in ConvGradients._fields:
            raise ValueError(f"needs names {name!r}; the gradients are {', '.join(ConvGradients._fields)}")
    return frozenset(names)


def _conjugate(array: Any, backend: Backend) -> Any:
    if array.dtype.kind != "c":
        return array
    with backend.current():
        copy = backend.converted(array, array.dtype)
        _negate_imaginary(copy)
    return copy


def _negate_imaginary(array: Any) -> None:
    imaginary = array.imag  # a view
    imaginary *= -1


class _UnderWindows(NamedTuple):
    """Along one axis, the part of an image that windows reach, and the padding that makes them as many."""

    size: int
    before: int
    after: int

    @classmethod
    def of(cls, size: int, before: int, stride: int, windows: int, span: int) -> _UnderWindows:
        """Elements beyond the last window are left out."""
        covered = (windows - 1) * stride + span
        before = min(before, covered)
        size = min(size, covered - before)
        return cls(size, before, covered - before - size)


class _Piece(NamedTuple):
    """Channels of one of several merged inputs that belong to one group or are whole groups."""

    of: int  # the input
    channels: slice  # of it
    rows: slice  # of the weight: the same channels, counted through all inputs
    outputs: slice  # of the result: those of the groups they belong to
    groups: int


def _pieces(channels: Sequence[int], groups: int, group_rows: int, group_outputs: int) -> list[_Piece]:
    """Merged inputs cut where a group of `group_rows` channels begins or ends within one; whole groups stay together."""
    pieces, first = [], 0
    for i, count in enumerate(channels):
        at, end = first, first + count
        while at < end:
            group, offset = divmod(at, group_rows)
            whole = (end - at) // group_rows if offset == 0 else 0
            stop = at + whole * group_rows if whole else min(end, (group + 1) * group_rows)
            outputs = slice(group * group_outputs, (group + max(1, whole)) * group_outputs)
            pieces.append(_Piece(i, slice(at - first, stop - first), slice(at, stop), outputs, max(1, whole)))
            at = stop
        first = end
    return pieces


def prepare_epilogue_grad(
    grad: Any, saved: Any = None, *, spatial: int, activation: Any = None, through: bool = True, sums: bool = True,
    on: str | None = None,
) -> Call:  # fmt: skip
    """From `grad`, and what its activation saved, a list of the gradient before the activation, where `through`,
    and of each channel's sum in the accumulator's dtype, where `sums`.

    Images have `spatial` spatial axes; `saved` has the shape and dtype of `grad`, and is None without an activation.
    """
    arrays = present({"grad": grad}, saved=saved)
    backend = owner(arrays)
    resolved = resolve_activation(activation)
    assert through or sums, "nothing to compute"
    assert (saved is None) == (not resolved) and not (through and saved is None), (
        "only an activation changes a gradient"
    )
    assert saved is None or (saved.shape == grad.shape and saved.dtype == grad.dtype), "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    layout = grad if saved is None else saved
    out = Result("out", tuple(grad.shape), grad.dtype, axes.asks_channels_last(layout))
    totals = Result("sums", (grad.shape[int(axes.batched)],), dtype_from_name(accumulator(dtype_name(grad.dtype))))
    described = {name: describe(backend, axes, name, array) for name, array in arrays.items()}
    problem = EpilogueGradProblem(
        grad=described["grad"], activation=resolved, saved=described.get("saved"),
        out=describe_result(backend, axes, arrays, out) if through else None,
        sums=describe_result(backend, Axes(False, 0), arrays, totals) if sums else None,
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    results = (out,) * through + (totals,) * sums
    images = frozenset({"grad", "saved", "out"} & {*arrays, *(result.name for result in results)})
    return Call(backend, problem, arrays, images, axes, results, listed=True)


def prepare_prologue_grad(
    grad: Any, x: Any, scale: Any = None, shift: Any = None, sums: Any = None, *, spatial: int,
    activation: Any = None, through: bool = True, on: str | None = None,
) -> Call:  # fmt: skip
    """From `grad`, of the transformed `x`, a list of the gradient of `x` where `through`, and of each channel's sums.

    These are two a channel, one after the other, in the accumulator's dtype: the gradients of `scale` and of `shift`.
    Images have `spatial` spatial axes and one shape; `scale` and `shift` are of these channels.
    """
    arrays = present({"grad": grad, "x": x}, scale=scale, shift=shift, sums=sums)
    backend = owner(arrays)
    assert x.shape == grad.shape, "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    channels, dtype = grad.shape[int(axes.batched)], dtype_name(grad.dtype)
    out = Result("out", tuple(grad.shape), grad.dtype, axes.asks_channels_last(grad))
    totals = Result("sums", (2 * channels,), dtype_from_name(accumulator(dtype)))
    problem = PrologueGradProblem(
        grad=describe(backend, axes, "grad", grad), x=describe(backend, axes, "x", x),
        prologue=describe_prologue(backend, arrays, channels, dtype, resolve_activation(activation)),
        out=describe_result(backend, axes, arrays, out) if through else None,
        sums=describe_result(backend, Axes(False, 0), arrays, totals),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset({"grad", "x", "out"} if through else {"grad", "x"})
    return Call(backend, problem, arrays, images, axes, (out,) * through + (totals,), listed=True)
