"""Recurrent layers with their pullbacks: results, and the map from their gradients to those of the arguments.

::

    forward     x, weights, biases, h0, c0   --every step-->   y, h, c           gates, cells are kept
    backward    their gradients              <--every step--   grad_y, grad_h, grad_c

The gradients come from one call, in the dtype computed with; here each becomes its argument's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyconv.call.axes import Axes, byte_strides
from cupyconv.call.cache import call
from cupyconv.call.call import Call, fitting, in_dtype, machine_for, present
from cupyconv.call.dispatch import Backend, backend_for
from cupyconv.call.executable import Result
from cupyconv.call.options import current_settings
from cupyconv.ops.recurrent import activation_groups, on_backend, prepare_gru, prepare_lstm, prepare_rnn
from cupyconv.problem.arrays import array_operand, check_dtype, dtype_name
from cupyconv.problem.recurrence import GATES, RecurrentGeometry, RecurrentGradientProblem
from cupyconv.typing import ActivationLike, Array


class RecurrentGradients(NamedTuple):
    """What the pullback of a recurrent layer returns: one gradient for each argument, of its shape and dtype.

    Attributes
    ----------
    x, weight_ih, weight_hh : array
        Of the input and of both weights.
    bias_ih, bias_hh, h0, c0, peephole : array or None
        None where the argument is absent.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.RecurrentGradients()._fields
    ('x', 'weight_ih', 'weight_hh', 'bias_ih', 'bias_hh', 'h0', 'c0', 'peephole')
    """

    x: Array | None = None
    weight_ih: Array | None = None
    weight_hh: Array | None = None
    bias_ih: Array | None = None
    bias_hh: Array | None = None
    h0: Array | None = None
    c0: Array | None = None
    peephole: Array | None = None


RecurrentPullback = Callable[..., RecurrentGradients]


def rnn_vjp(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    h0: Array | None = None,
    lengths: Array | Sequence[int] | None = None,
    direction: str = "forward",
    activation: ActivationLike = "tanh",
    clip: float | None = None,
    method: str = "auto",
) -> tuple[tuple[Array, Array], RecurrentPullback]:
    """`rnn`, and its pullback: the function that computes its arguments' gradients from those of its results.

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, lengths, direction, activation, clip, method
        As for `rnn`.

    Returns
    -------
    (y, h) : pair of arrays
        The results of `rnn`.
    pullback : callable
        ``pullback(grad_y=None, grad_h=None) -> RecurrentGradients``.  `grad_y` and `grad_h` are the gradients of a number,
        such as a loss, with respect to y and h: each has the shape of its result, None stands for zeros, and another
        precision is converted.  What is returned are the gradients of that number with respect to the arguments, each
        in its argument's shape and dtype; None where the argument is absent.  It may be called again.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`; of the pullback, for a gradient of another shape than its result, of another library, or of
        a dtype that is not a real floating-point one.

    See Also
    --------
    lstm_vjp, gru_vjp : of layers with gates.

    Notes
    -----
    What the pullback holds: the arguments but the biases, `y`, and what the activation was applied to at every
    step, ``(D, T, N, H)`` in the dtype computed with.  Do not write to any of these in between.  A call of it takes
    about as much again for the gates' gradients, of as many steps at a time as the workspace limit has room for.

    Where an activation bends, or a value was clipped, the flat or the left side counts.  The gradient of `y` past a
    sample's length is not looked at, and `x` has zeros for a gradient there.  16-bit types are computed in float32,
    but a state before a step is read from `y`, which was rounded.  The same bits on every call.

    On CUDA the way back is a launch a step, two of a gru that is not linear before its reset, both directions together;
    the products that follow are cuBLAS's, so a graph does not capture it.

    Examples
    --------
    The derivative of a product of three equal factors:

    >>> import numpy as np, cupyconv
    >>> x, weight_ih, weight_hh = np.zeros((3, 1, 1)), np.ones((1, 1)), np.full((1, 1), 2.0)
    >>> (y, h), pullback = cupyconv.rnn_vjp(x, weight_ih, weight_hh, h0=np.ones((1, 1, 1)), activation=None)
    >>> h, pullback(grad_h=np.ones_like(h)).weight_hh
    (array([[[8.]]]), array([[12.]]))
    """
    arguments = {
        "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
        "lengths": on_backend(lengths, x),
    }  # fmt: skip
    settings = {"direction": direction, "activation": activation, "clip": clip}
    y, h, gates = call(prepare_rnn, {**arguments, "out": None}, {**settings, "method": method, "saving": True})
    backward = {"direction": direction, "activations": activation, "clip": clip, "cell": "rnn"}
    return (y, h), _pullback(arguments, {"y": y, "h": h}, {"gates": gates}, backward)


def lstm_vjp(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    h0: Array | None = None,
    c0: Array | None = None,
    peephole: Array | None = None,
    lengths: Array | Sequence[int] | None = None,
    direction: str = "forward",
    activations: Sequence[Any] = ("sigmoid", "tanh", "tanh"),
    input_forget: bool = False,
    clip: float | None = None,
    method: str = "auto",
) -> tuple[tuple[Array, tuple[Array, Array]], RecurrentPullback]:
    """`lstm`, and its pullback: the function that computes its arguments' gradients from those of its results.

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, peephole, lengths, direction, activations, input_forget, clip
        As for `lstm`.
    method
        As for `lstm`, of the forward pass.

    Returns
    -------
    (y, (h, c)) : arrays
        The results of `lstm`.
    pullback : callable
        ``pullback(grad_y=None, grad_h=None, grad_c=None) -> RecurrentGradients``, otherwise as of `rnn_vjp`.

    Raises
    ------
    TypeError, ValueError
        As for `lstm` and `rnn_vjp`.

    Notes
    -----
    What the pullback holds: the arguments but the biases, `y`, and of every step what the gates' activations were
    applied to, ``(D, T, N, 4 * H)``, and the cell state, ``(D, T, N, H)``.  The rest is as for `rnn_vjp`.

    Examples
    --------
    One step of gradient descent on the distance of the last state from a target:

    >>> import numpy as np, cupyconv
    >>> rng = np.random.default_rng(0)
    >>> x, target = rng.normal(size=(10, 8, 3)), rng.uniform(-0.5, 0.5, size=(1, 8, 4))
    >>> weights = [rng.normal(size=(16, 3)), rng.normal(size=(16, 4)), np.zeros(16)]
    >>> losses = []
    >>> for _ in range(2):
    ...     (y, (h, c)), pullback = cupyconv.lstm_vjp(x, *weights)
    ...     losses.append(np.mean((h - target) ** 2))
    ...     gradients = pullback(grad_h=2 * (h - target) / h.size)
    ...     for weight, gradient in zip(weights, gradients[1:]):
    ...         weight -= gradient
    >>> bool(losses[1] < losses[0]), gradients.c0
    (True, None)
    """
    arguments = {
        "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
        "c0": c0, "peephole": peephole, "lengths": on_backend(lengths, x),
    }  # fmt: skip
    settings = {"direction": direction, "activations": activations, "input_forget": input_forget, "clip": clip}
    forward = {**settings, "method": method, "saving": True}
    y, h, c, gates, cells = call(prepare_lstm, {**arguments, "out": None}, forward)
    kept = {"gates": gates, "cells": cells}
    return (y, (h, c)), _pullback(arguments, {"y": y, "h": h, "c": c}, kept, {**settings, "cell": "lstm"})


def gru_vjp(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    h0: Array | None = None,
    lengths: Array | Sequence[int] | None = None,
    direction: str = "forward",
    activations: Sequence[Any] = ("sigmoid", "tanh"),
    linear_before_reset: bool = True,
    clip: float | None = None,
    method: str = "auto",
) -> tuple[tuple[Array, Array], RecurrentPullback]:
    """`gru`, and its pullback: the function that computes its arguments' gradients from those of its results.

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, lengths, direction, activations, linear_before_reset, clip
        As for `gru`.
    method
        As for `gru`, of the forward pass.

    Returns
    -------
    (y, h) : pair of arrays
        The results of `gru`.
    pullback : callable
        ``pullback(grad_y=None, grad_h=None) -> RecurrentGradients``, as of `rnn_vjp`.

    Raises
    ------
    TypeError, ValueError
        As for `gru` and `rnn_vjp`.

    Notes
    -----
    What the pullback holds: the arguments but the biases, `y`, and of every step what the gates' activations were
    applied to, ``(D, T, N, 3 * H)``, and what the reset gate changed, ``(D, T, N, H)``.  The rest is as for `rnn_vjp`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, weight_ih, weight_hh = np.ones((5, 2, 3)), np.full((12, 3), 0.1), np.full((12, 4), 0.1)
    >>> (y, h), pullback = cupyconv.gru_vjp(x, weight_ih, weight_hh, lengths=[5, 2])
    >>> gradients = pullback(np.ones_like(y))
    >>> gradients.x.shape, bool((gradients.x[2:, 1] == 0).all()), gradients.weight_hh.shape, gradients.h0
    ((5, 2, 3), True, (12, 4), None)
    """
    arguments = {
        "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
        "lengths": on_backend(lengths, x),
    }  # fmt: skip
    settings = {
        "direction": direction, "activations": activations, "linear_before_reset": linear_before_reset, "clip": clip
    }  # fmt: skip
    forward = {**settings, "method": method, "saving": True}
    y, h, gates, candidate = call(prepare_gru, {**arguments, "out": None}, forward)
    kept = {"gates": gates, "candidate": candidate}
    return (y, h), _pullback(arguments, {"y": y, "h": h}, kept, {**settings, "cell": "gru"})


def _pullback(
    arguments: Mapping[str, Any], results: Mapping[str, Any], kept: Mapping[str, Any], settings: Mapping[str, Any]
) -> RecurrentPullback:
    """The pullback of a layer called with `arguments`, which returned `results` and kept `kept`."""
    y, cell = results["y"], settings["cell"]
    shapes = {name: (tuple(array.shape), array.dtype) for name, array in results.items()}
    dtypes = {name: array.dtype for name, array in arguments.items() if array is not None and name != "lengths"}
    backend = backend_for({"y": y})
    single = settings["direction"] != "bidirectional"

    def with_directions(name: str) -> Any:
        """An argument that has an axis of directions only where there are two, with that axis."""
        array = arguments.get(name)
        return array[None] if single and array is not None else array

    def state(array: Any) -> Any:
        """An initial state, or peepholes, as the forward pass rounded them."""
        return None if array is None else in_dtype(array, y.dtype, backend)

    held = {
        "x": arguments["x"], "weight_ih": with_directions("weight_ih"), "weight_hh": with_directions("weight_hh"),
        "y": y, "gates": kept["gates"], "h0": state(arguments["h0"]), "c0": state(arguments.get("c0")),
        "peephole": state(with_directions("peephole")), "lengths": arguments["lengths"], "cells": kept.get("cells"),
        "candidate": kept.get("candidate"),
    }  # fmt: skip
    gates = GATES[cell]
    # Rows of the sums over steps and samples.  Of a candidate whose recurrent part is reset, that part has its own.
    rows = {"bias_ih": [slice(0, gates)], "bias_hh": [slice(0, gates)], "peephole": [slice(gates, gates + 3)]}
    if cell == "gru" and settings["linear_before_reset"]:
        rows["bias_hh"] = [slice(0, 2), slice(3, 4)]

    def backward(grad_y: Any, grad_h: Any, grad_c: Any) -> RecurrentGradients:
        given = {"y": grad_y, "h": grad_h, "c": grad_c}
        grads = {
            f"grad_{name}": None if grad is None else _checked(f"grad_{name}", grad, *shapes[name], backend)
            for name, grad in given.items()
        }
        found = call(prepare_recurrent_gradient, {**held, **grads}, settings)
        x, weight_ih, weight_hh, h0, *c0, sums = found
        gradients = {"x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "h0": h0, **dict(zip(("c0",), c0))}
        own = {
            name: in_dtype(array[0] if single and name.startswith("weight") else array, dtypes[name], backend)
            for name, array in gradients.items()
            if name in dtypes
        }
        for name, ranges in rows.items():
            if name in dtypes:
                own[name] = _joined(sums, ranges, single, dtypes[name], backend)
        return RecurrentGradients(**own)

    if cell == "lstm":

        def pullback_with_cell(grad_y: Any = None, grad_h: Any = None, grad_c: Any = None) -> RecurrentGradients:
            """Gradients of the arguments, from those of y, h and c."""
            return backward(grad_y, grad_h, grad_c)

        return pullback_with_cell

    def pullback(grad_y: Any = None, grad_h: Any = None) -> RecurrentGradients:
        """Gradients of the arguments, from those of y and h."""
        return backward(grad_y, grad_h, None)

    return pullback


def _checked(name: str, grad: Any, shape: tuple[int, ...], dtype: np.dtype, backend: Backend) -> Any:
    """The gradient of a result of this shape, in its dtype; anything else is refused."""
    if backend_for({name: grad}) is not backend:
        raise TypeError(f"{name} belongs to another library or device than the result: {type(grad).__name__}")
    check_dtype(name, grad.dtype)
    return fitting(name, grad, shape, dtype, backend)


def _joined(sums: Any, ranges: list[slice], single: bool, dtype: np.dtype, backend: Backend) -> Any:
    """Rows of the sums side by side, in memory of their own."""
    directions, _, hidden = sums.shape
    counts = [rows.stop - rows.start for rows in ranges]
    with backend.current(), np.errstate(all="ignore"):
        joined = backend.empty((directions, sum(counts), hidden), dtype)
        first = 0
        for rows, count in zip(ranges, counts):
            joined[:, first : first + count] = sums[:, rows]
            first += count
    joined = joined.reshape(directions, sum(counts) * hidden)
    return joined[0] if single else joined


def prepare_recurrent_gradient(
    x: Any, weight_ih: Any, weight_hh: Any, y: Any, gates: Any, h0: Any = None, c0: Any = None, peephole: Any = None,
    lengths: Any = None, cells: Any = None, candidate: Any = None, grad_y: Any = None, grad_h: Any = None,
    grad_c: Any = None, *, cell: str, direction: str, activations: Any, clip: Any, input_forget: bool = False,
    linear_before_reset: bool = True, on: str | None = None,
) -> Call:  # fmt: skip
    """A list of gradients, in the dtype computed with: of x, weight_ih, weight_hh, h0, of an lstm c0, and sums.

    Weights and peepholes have their axis of directions in front.  `sums` is (D, rows, H), over steps and samples: of
    the gates' gradients; then, of a gru that is linear before its reset, of the recurrent part of the candidate's; of
    an lstm with peepholes, of those of i, f and o times what they looked at.
    """
    arrays = present(
        {"x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "y": y, "gates": gates},
        h0=h0, c0=c0, peephole=peephole, lengths=lengths, cells=cells, candidate=candidate, grad_y=grad_y,
        grad_h=grad_h, grad_c=grad_c,
    )  # fmt: skip
    backend = backend_for(arrays)
    steps, batch, inputs = x.shape
    geometry = RecurrentGeometry(
        cell=cell, steps=steps, batch=batch, inputs=inputs, hidden=weight_hh.shape[2], direction=direction,
        activations=activation_groups(activations, cell, direction),
        clip=None if clip is None else float(clip), input_forget=input_forget, linear_before_reset=linear_before_reset,
    )  # fmt: skip
    state = (geometry.directions, batch, geometry.hidden)
    shapes = {
        "grad_x": x.shape, "grad_weight_ih": weight_ih.shape, "grad_weight_hh": weight_hh.shape, "grad_h0": state,
        **({"grad_c0": state} if cell == "lstm" else {}),
        "sums": (geometry.directions, geometry.sums(peephole is not None), geometry.hidden),
    }  # fmt: skip
    dtype, wide = gates.dtype, dtype_name(gates.dtype)
    results = tuple(Result(name, tuple(shape), dtype) for name, shape in shapes.items())
    settings = current_settings()
    problem = RecurrentGradientProblem(
        geometry=geometry, dtype=wide,
        arguments=tuple(
            array_operand(name, dtype_name(a.dtype), a.shape, a.strides, backend.address(a) if a.size else 0)
            for name, a in arrays.items()
        ),
        results=tuple(array_operand(r.name, wide, r.shape, byte_strides(r.shape, wide), 0) for r in results),
        machine=machine_for(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
    )  # fmt: skip
    return Call(backend, problem, arrays, frozenset(), Axes(True, 1), results, listed=True)
