"""`conv` and `linmerge` with their pullbacks: maps from the result's gradient to the gradients of the arguments.

::

    forward      x, weight --linear--> + bias + residual = z --activation--> y
    backward     x, weight <--linear--  dz = grad * f'(z)  <-------------- grad
                 bias     <-- sums of dz's channels;   residual <-- dz

One pass computes both the gradient before the activation and the channel sums for the bias.  The public gradient
functions compute the linear part.  If there is a prologue, one more pass takes the gradient of the transformed input
back through it, and transforms the input again for this.  The weight's gradient is that of the transformed input, which
is transformed as it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

from cupyconv.call.arguments import VECTOR, Arguments, Arrays, Axes, Result, fitting, in_dtype, present
from cupyconv.call.dispatch import Backend, backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv import CONV, LINMERGE, WINDOWS, checked_prologue
from cupyconv.ops.conv_grad_input import conv_grad_input
from cupyconv.ops.conv_grad_weight import TRANSFORMED_GRAD_WEIGHT
from cupyconv.problem.activations import resolve_activation
from cupyconv.problem.arrays import accumulator, collapsed_stride, dtype_from_name, dtype_name
from cupyconv.problem.passes import EpilogueGradProblem, PrologueGradProblem
from cupyconv.typing import Array, ArrayOrList


class ConvGradients(NamedTuple):
    """Gradients that a pullback returns: one per argument, with the argument's shape and dtype.

    Attributes
    ----------
    x : array or list of arrays
        Gradient of the input; a list if and only if the input was a sequence.
    weight, bias, residual : array or None
        Gradients of these arguments; None if the argument is absent or `needs` omits it.
    scale, shift : array or None
        Gradients of the prologue's arrays.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.ConvGradients(x=1.0)._fields
    ('x', 'weight', 'bias', 'residual', 'scale', 'shift')
    """

    # None is not in the types: the caller of a function with an argument knows that its gradient exists.
    x: ArrayOrList = None
    weight: Array = None
    bias: Array = None
    residual: Array = None
    scale: Array = None
    shift: Array = None


Pullback = Callable[..., ConvGradients]
_AnyPullback = TypeVar("_AnyPullback", bound=Callable[..., Any])


def holding(pullback: _AnyPullback, arrays: Iterable[Any]) -> _AnyPullback:
    """Return the pullback with the attribute `holds`: the arguments and results that it will read.

    The functions for PyTorch use it to know which arrays must not change before the backward pass.
    """
    pullback.__dict__["holds"] = tuple(arrays)
    pullback.__qualname__ = "pullback"  # Python's errors show this name
    return pullback


def conv_with_pullback(arguments: dict[str, Any]) -> tuple[Array, Pullback]:
    """Return the result of `conv` with these arguments, and its pullback."""
    results = CONV(arguments, saving=True)
    weight, windows = arguments["weight"], {name: arguments[name] for name in WINDOWS}
    inputs, listed = listed_inputs(arguments["x"])
    shapes = [tuple(image.shape) for image in inputs]
    prologue = _PrologueBackward(inputs, arguments, weight.ndim - 2)

    def to_x(dz: Any) -> list[Any]:
        return conv_grad_input(dz, weight, shapes, **windows)

    def to_weight(dz: Any) -> Any:
        return prologue.grad_weight(dz, inputs, tuple(weight.shape[2:]), windows)

    epilogue = EpilogueBackward(results, arguments["activation"], weight.ndim - 2)
    return results[0], pullback_of(inputs, listed, arguments, to_x, to_weight, epilogue, prologue)


def linmerge_with_pullback(arguments: dict[str, Any]) -> tuple[Array, Pullback]:
    """Return the result of `linmerge` with these arguments, and its pullback."""
    results = LINMERGE(arguments, saving=True)
    inputs, listed = listed_inputs(arguments["xs"])
    rank = inputs[0].ndim - 2
    backend = backend_for({"xs": inputs[0]})
    inputs, weight = tuple(map(backend.plain, inputs)), backend.plain(arguments["weight"])
    prologue = _PrologueBackward(inputs, arguments, rank)
    windows = {"stride": 1, "padding": 0, "padding_mode": "constant", "dilation": 1, "groups": 1}

    def flat(image: Any) -> Any:
        """The image with one spatial axis: the result of a merge does not depend on the order of pixels."""
        if collapsed_stride(image.shape[2:], image.strides[2:]) is None:
            image = backend.converted(image, image.dtype)
        return image.reshape(*image.shape[:2], prod(image.shape[2:]))

    def to_x(dz: Any) -> list[Any]:
        shapes = [(*image.shape[:2], prod(image.shape[2:])) for image in inputs]
        gradients = conv_grad_input(flat(dz), weight[:, :, None], shapes)
        return [gradient.reshape(image.shape) for gradient, image in zip(gradients, inputs)]

    def to_weight(dz: Any) -> Any:
        return prologue.grad_weight(flat(dz), [flat(image) for image in inputs], (1,), windows)[:, :, 0]

    epilogue = EpilogueBackward(results, arguments["activation"], rank)
    return results[0], pullback_of(inputs, listed, arguments, to_x, to_weight, epilogue, prologue)


def pullback_of(
    inputs: tuple[Any, ...],
    listed: bool,
    arguments: Arrays,
    to_x: Callable[[Any], list[Any]],
    to_weight: Callable[[Any], Any],
    epilogue: EpilogueBackward,
    prologue: _PrologueBackward | None = None,
) -> Pullback:
    """The pullback of a function that is linear in `inputs` and the weight between its prologue and its epilogue.

    `to_x` and `to_weight` map the gradient before the epilogue to the gradients of the transformed inputs and of the
    weight, in the dtype of y.  The pullback retains only the dtypes of bias and residual.
    """
    weight, x_dtypes = arguments["weight"], [image.dtype for image in inputs]
    others = {name: arguments.get(name) for name in ConvGradients._fields if name != "x"}
    dtypes = {name: array.dtype for name, array in others.items() if array is not None}
    given = frozenset(("x", *dtypes))

    def pullback(grad: Any, *, needs: Iterable[str] | None = None) -> ConvGradients:
        """Gradients of the arguments named in `needs`, or of all, from the gradient of the result."""
        wanted = needed_names(needs) & given
        backend = Arguments.of({"weight": weight, "grad": grad}, None).backend
        callers = backend.plain(grad)
        grad = fitting("grad", callers, epilogue.shape, epilogue.dtype, backend)
        dz, sums = epilogue(grad, through=bool(wanted - {"bias"}), sums="bias" in wanted)
        found: dict[str, Any] = {"bias": sums, "residual": dz}
        gradients: dict[str, Any] = {}
        if wanted & {"x", "scale", "shift"}:
            dx = to_x(dz)
            if prologue is not None:
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
        if gradients.get("residual") is callers:
            gradients["residual"] = epilogue.copy(callers, backend)
        return ConvGradients(**gradients)

    return holding(pullback, (*inputs, weight, epilogue.saved, others["scale"], others["shift"]))


class EpilogueBackward:
    """The backward pass through activation, bias and residual, with the arrays it needs from the forward pass.

    `results` are those of a call with ``saving=True``: y comes first, and the array that determines the activation's
    derivative last.
    """

    def __init__(self, results: Sequence[Any], activation: Any, spatial: int) -> None:
        self.shape, self.dtype = tuple(results[0].shape), results[0].dtype
        self.saved = results[-1] if resolve_activation(activation) else None
        self._spatial = spatial
        self._settings = {"spatial": spatial, "activation": activation}

    def __call__(self, grad: Any, *, through: bool, sums: bool) -> tuple[Any, Any]:
        """Return the gradient before the activation (if `through`) and its channel sums (if `sums`)."""
        unchanged = self.saved is None
        asked = {"through": through and not unchanged, "sums": sums}
        if not any(asked.values()):
            return grad, None
        results = EPILOGUE_GRADIENT({"grad": grad, "saved": self.saved, **self._settings, **asked})
        return results[0] if asked["through"] else grad, results[-1]

    def copy(self, grad: Any, backend: Backend) -> Any:
        """Return a copy of `grad` with its own memory, channels-last if `grad` is."""
        axes = Axes(grad.ndim == self._spatial + 2, self._spatial)
        shape, order = axes.result("residual", tuple(grad.shape), grad.dtype, [grad]).memory
        with backend.current():
            copy = backend.empty(shape, grad.dtype)
            copy = copy if order is None else copy.transpose(order)
            copy[...] = grad
        return copy


class _PrologueBackward:
    """The backward pass through a prologue; it reads the inputs again.

    `arguments` are those of the call, with the prologue unpacked.
    """

    def __init__(self, x: tuple[Any, ...], arguments: Arrays, spatial: int) -> None:
        self.scale, self.shift = arguments["scale"], arguments["shift"]
        self._activation = activation = arguments["prologue_activation"]
        self._spatial = spatial
        #: Whether the gradient of `x` differs from the gradient of the transformed `x`.
        self.changes_x = self.scale is not None or bool(resolve_activation(activation))
        self._x = x if self.changes_x or self.shift is not None else ()

    def __call__(self, grads: list[Any], *, through: bool, sums: bool, backend: Backend) -> tuple[list[Any], Any]:
        """Map the gradients of the transformed `x` to those of `x` if `through`, and of scale and shift if `sums`.

        The gradients of scale and shift are interleaved in one array.
        """
        if not sums and not (through and self.changes_x):
            return grads, None
        channel = self._x[0].ndim - self._spatial - 1
        dtype = dtype_from_name(accumulator(dtype_name(grads[0].dtype)))
        totals = backend.empty((2 * sum(image.shape[channel] for image in self._x),), dtype)
        first = 0
        for i, image in enumerate(self._x):
            channels = slice(first, first + image.shape[channel])
            scale, shift = (
                None if vector is None else backend.plain(vector)[channels] for vector in (self.scale, self.shift)
            )
            arrays = {"grad": grads[i], "x": image, "scale": scale, "shift": shift}
            own_totals = totals[2 * channels.start : 2 * channels.stop]
            settings = {"spatial": self._spatial, "activation": self._activation, "through": through}
            results = PROLOGUE_GRADIENT({**arrays, "sums": own_totals, **settings})
            if through:
                grads[i] = results[0]  # releases the gradient of the transformed input
            first = channels.stop
        return grads, totals

    def grad_weight(self, grad: Any, x: Any, kernel_shape: tuple[int, ...], windows: dict[str, Any]) -> Any:
        """The gradient of the weight that is convolved with the transformed `x`."""
        transformed = {"scale": self.scale, "shift": self.shift, "prologue_activation": self._activation}
        arguments = {"grad": grad, "x": x, "out": None, "kernel_shape": kernel_shape, **windows, **transformed}
        return TRANSFORMED_GRAD_WEIGHT(arguments)


def listed_inputs(x: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the inputs as a tuple, and whether they were given as a sequence."""
    listed = isinstance(x, (list, tuple))
    return (tuple(x) if listed else (x,)), listed


def needed_names(needs: Iterable[str] | None) -> frozenset[str]:
    """Return the names of the gradients that are requested."""
    if needs is None:
        return frozenset(ConvGradients._fields)
    try:
        names = [needs] if isinstance(needs, str) else list(needs)
    except TypeError:
        raise TypeError(f"needs must be a sequence of gradient names, given {needs!r}") from None
    for name in names:
        if not isinstance(name, str) or name not in ConvGradients._fields:
            raise ValueError(f"unknown gradient {name!r} in needs; known are {', '.join(ConvGradients._fields)}")
    return frozenset(names)


def check_epilogue_gradient(
    given: Arrays, *, on: str | None = None, spatial: int, activation: Any, through: bool, sums: bool
) -> CheckedCall:
    """Check the backward pass through an epilogue; the call returns a list.

    The list has the gradient before the activation if `through`, and the sum of each channel in the accumulator's dtype
    if `sums`.  Both are computed from `grad` and from `saved`, the array that the activation saved.  Images have
    `spatial` spatial axes.  `saved` has the shape and dtype of `grad`, and is None without an activation.
    """
    arguments = Arguments.of(present(given), on)
    grad, saved = given["grad"], given["saved"]
    resolved = resolve_activation(activation)
    assert through or sums, "nothing to compute"
    assert (saved is None) == (not resolved) and not (through and saved is None), (
        "only an activation changes a gradient"
    )
    assert saved is None or (saved.shape == grad.shape and saved.dtype == grad.dtype), "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    layout = grad if saved is None else saved
    out = axes.result("out", tuple(grad.shape), grad.dtype, [layout])
    totals = Result("sums", (grad.shape[int(axes.batched)],), dtype_from_name(accumulator(dtype_name(grad.dtype))))
    problem = EpilogueGradProblem(
        grad=arguments.describe(axes, "grad"),
        activation=resolved,
        saved=arguments.describe_given(axes, "saved"),
        out=arguments.describe(axes, out) if through else None,
        sums=arguments.describe(VECTOR, totals) if sums else None,
        **arguments.decided_with,
    )
    results = (out,) * through + (totals,) * sums
    return CheckedCall(arguments, problem, frozenset(("grad", "saved", "out")), axes, results, listed=True)


def check_prologue_gradient(
    given: Arrays, *, on: str | None = None, spatial: int, activation: Any, through: bool
) -> CheckedCall:
    """Check the backward pass through a prologue; the call returns a list.

    The list has the gradient of `x` if `through`, computed from `grad`, the gradient of the transformed `x`; then the
    channel sums.  The sums are two per channel, interleaved, in the accumulator's dtype: the gradients of `scale` and
    of `shift`.  Images have `spatial` spatial axes and one shape; `scale` and `shift` belong to these channels.
    """
    arguments = Arguments.of(present(given), on)
    grad, x = given["grad"], given["x"]
    assert x.shape == grad.shape, "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    channels, dtype = grad.shape[int(axes.batched)], dtype_name(grad.dtype)
    out = axes.result("out", tuple(grad.shape), grad.dtype, [grad])
    totals = Result("sums", (2 * channels,), dtype_from_name(accumulator(dtype)))
    problem = PrologueGradProblem(
        grad=arguments.describe(axes, "grad"),
        x=arguments.describe(axes, "x"),
        prologue=checked_prologue(arguments, channels, dtype, activation),
        out=arguments.describe(axes, out) if through else None,
        sums=arguments.describe(VECTOR, totals),
        **arguments.decided_with,
    )
    results = (out,) * through + (totals,)
    return CheckedCall(arguments, problem, frozenset(("grad", "x", "out")), axes, results, listed=True)


EPILOGUE_GRADIENT = Operation(
    None, check_epilogue_gradient, ("grad", "saved"), ("spatial", "activation", "through", "sums")
)
PROLOGUE_GRADIENT = Operation(
    None, check_prologue_gradient, ("grad", "x", "scale", "shift", "sums"), ("spatial", "activation", "through")
)
