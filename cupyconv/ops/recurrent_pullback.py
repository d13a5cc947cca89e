"""Recurrent layers with their pullbacks: maps from the gradients of the results to the gradients of the arguments.

::

    forward     x, weights, biases, h0, c0   --every step-->   y, h, c           gates, cells are kept
    backward    their gradients              <--every step--   grad_y, grad_h, grad_c

One call computes all gradients in the dtype of the computation; this file converts each to its argument's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyconv.call.arguments import NO_IMAGE, Arguments, Arrays, Result, fitting, in_dtype, present
from cupyconv.call.dispatch import Backend, backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv_pullback import holding
from cupyconv.ops.recurrent import GRU, LSTM, RNN, activation_groups
from cupyconv.problem.arrays import check_dtype, dtype_name
from cupyconv.problem.recurrence import GATES, RecurrentGeometry, RecurrentGradientProblem
from cupyconv.typing import Array


class RecurrentGradients(NamedTuple):
    """Gradients that the pullback of a recurrent layer returns: one per argument, with the argument's shape and dtype.

    Attributes
    ----------
    x, weight_ih, weight_hh : array
        Gradients of the input and of both weights.
    bias_ih, bias_hh, h0, c0, peephole : array or None
        Gradients of these arguments; None if the argument is absent.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.RecurrentGradients()._fields
    ('x', 'weight_ih', 'weight_hh', 'bias_ih', 'bias_hh', 'h0', 'c0', 'peephole')
    """

    # None is not in the types, as in `ConvGradients`.
    x: Array = None
    weight_ih: Array = None
    weight_hh: Array = None
    bias_ih: Array = None
    bias_hh: Array = None
    h0: Array = None
    c0: Array = None
    peephole: Array = None


RecurrentPullback = Callable[..., RecurrentGradients]


#: The layers, and the names of the results that they return with ``saving=True``.
_LAYERS = {
    "rnn": (RNN, ("y", "h", "gates")),
    "lstm": (LSTM, ("y", "h", "c", "gates", "cells")),
    "gru": (GRU, ("y", "h", "gates", "candidate")),
}


def recurrent_with_pullback(cell: str, arguments: dict[str, Any]) -> tuple[tuple[Any, Any], RecurrentPullback]:
    """Return the results of `rnn`, `lstm` or `gru` with these arguments, and the pullback."""
    layer, names = _LAYERS[cell]
    found = dict(zip(names, layer(arguments, saving=True)))
    states = (found["h"], found["c"]) if cell == "lstm" else found["h"]
    return (found["y"], states), _pullback(cell, arguments, found)


#: Arguments that a pullback reads.  Of the biases it only needs to know whether they are present.
_READ = ("x", "weight_ih", "weight_hh", "h0", "c0", "peephole", "lengths")
_SETTINGS = ("cell", "direction", "activations", "clip", "input_forget", "linear_before_reset")


def _pullback(cell: str, arguments: Arrays, found: Arrays) -> RecurrentPullback:
    """The pullback of a layer that was called with `arguments` and returned and saved the arrays in `found`."""
    y = found["y"]
    shapes = {name: (tuple(array.shape), array.dtype) for name, array in found.items()}
    gradients_of = {name: arguments.get(name) for name in RecurrentGradients._fields}
    dtypes = {name: array.dtype for name, array in gradients_of.items() if array is not None}
    backend = backend_for({"y": y})
    single = arguments["direction"] != "bidirectional"
    settings = {"input_forget": False, "linear_before_reset": True, "activations": arguments.get("activation")}
    settings |= {name: arguments[name] for name in _SETTINGS if name in arguments} | {"cell": cell}

    # Initial states and peepholes, rounded as in the forward pass.
    states = {name: in_dtype(arguments[name], y.dtype, backend) for name in dtypes.keys() & {"h0", "c0", "peephole"}}
    given = {name: arguments.get(name) for name in _READ}
    plain: dict[str, Any] = {name: None if array is None else backend.plain(array) for name, array in given.items()}
    read = {**plain, **states, "y": y}
    held = {**read, **{name: found.get(name) for name in ("gates", "cells", "candidate")}}
    if single:  # add the axis of directions that the gradient expects
        for name in ("weight_ih", "weight_hh", "peephole"):
            held[name] = None if read[name] is None else read[name][None]
    gates = GATES[cell]
    # Rows of the sums over steps and samples.  If the reset gate multiplies the candidate's recurrent part, the sums of
    # that part are in a row of their own.
    rows = {"bias_ih": [slice(0, gates)], "bias_hh": [slice(0, gates)], "peephole": [slice(gates, gates + 3)]}
    if cell == "gru" and settings["linear_before_reset"]:
        rows["bias_hh"] = [slice(0, 2), slice(3, 4)]

    def backward(grad_y: Any, grad_h: Any, grad_c: Any) -> RecurrentGradients:
        given = {"y": grad_y, "h": grad_h, "c": grad_c}
        grads = {
            f"grad_{name}": None if grad is None else _fitting(f"grad_{name}", grad, *shapes[name], backend)
            for name, grad in given.items()
        }
        x, weight_ih, weight_hh, h0, *c0, sums = RECURRENT_GRADIENT({**held, **grads, **settings})
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

        return holding(pullback_with_cell, read.values())

    def pullback(grad_y: Any = None, grad_h: Any = None) -> RecurrentGradients:
        """Gradients of the arguments, from those of y and h."""
        return backward(grad_y, grad_h, None)

    return holding(pullback, read.values())


def _fitting(name: str, grad: Any, shape: tuple[int, ...], dtype: np.dtype, backend: Backend) -> Any:
    """Return the gradient of a result in the dtype of that result; a gradient that does not fit is refused."""
    if backend_for({name: grad}) is not backend:
        raise TypeError(f"{name} belongs to another library or device than the result: {type(grad).__name__}")
    check_dtype(name, grad.dtype)
    return fitting(name, grad, shape, dtype, backend)


def _joined(sums: Any, ranges: list[slice], single: bool, dtype: np.dtype, backend: Backend) -> Any:
    """Return rows of the sums joined into a new array."""
    directions, _, hidden = sums.shape
    counts = [rows.stop - rows.start for rows in ranges]
    with backend.current():
        joined = backend.empty((directions, sum(counts), hidden), dtype)
        first = 0
        for rows, count in zip(ranges, counts):
            joined[:, first : first + count] = sums[:, rows]
            first += count
    joined = joined.reshape(directions, sum(counts) * hidden)
    return joined[0] if single else joined


def check_recurrent_gradient(
    given: Arrays, *, on: str | None = None, cell: str, direction: str, activations: Any, clip: Any, **flags: bool
) -> CheckedCall:
    """Check the backward pass of a layer; the call returns a list of gradients in the dtype of the computation.

    The list has the gradients of x, weight_ih, weight_hh, h0 and, for an lstm, c0; then `sums`.  Weights and peepholes
    have a leading axis of directions.  `sums` has shape (D, rows, H) and holds sums over steps and samples: of the
    gates' gradients; for a gru that is linear before its reset, of the gradient of the candidate's recurrent part; for
    an lstm with peepholes, of the gradients of i, f and o times the cell state that each gate read.
    """
    arrays = present(given)
    backend = backend_for(arrays)
    x, weight_ih, weight_hh = arrays["x"], arrays["weight_ih"], arrays["weight_hh"]
    steps, batch, inputs = x.shape
    geometry = RecurrentGeometry(
        cell=cell,
        steps=steps,
        batch=batch,
        inputs=inputs,
        hidden=weight_hh.shape[2],
        direction=direction,
        activations=activation_groups(activations, cell, direction),
        clip=None if clip is None else float(clip),
        **flags,
    )
    state = (geometry.directions, batch, geometry.hidden)
    shapes = {
        "grad_x": x.shape,
        "grad_weight_ih": weight_ih.shape,
        "grad_weight_hh": weight_hh.shape,
        "grad_h0": state,
        **({"grad_c0": state} if cell == "lstm" else {}),
        "sums": (geometry.directions, geometry.sums("peephole" in arrays), geometry.hidden),
    }
    dtype = arrays["gates"].dtype
    results = tuple(Result(name, tuple(shape), dtype) for name, shape in shapes.items())
    arguments = Arguments(arrays, backend, on)
    problem = RecurrentGradientProblem(
        geometry=geometry,
        dtype=dtype_name(dtype),
        arguments=tuple(map(arguments.describe_array, arrays)),
        results=tuple(map(arguments.describe_array, results)),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset(), NO_IMAGE, results, listed=True)


_KEPT = ("y", "gates", "h0", "c0", "peephole", "lengths", "cells", "candidate")
RECURRENT_GRADIENT = Operation(
    None, check_recurrent_gradient, ("x", "weight_ih", "weight_hh", *_KEPT, "grad_y", "grad_h", "grad_c"), _SETTINGS
)
