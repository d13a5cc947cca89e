"""`rnn`, `lstm` and `gru` over a sequence, and single steps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from cupyconv.call.arguments import NO_IMAGE, Arguments, Arrays, Result, byte_strides, widening_notes
from cupyconv.call.dispatch import Backend, backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.call.options import current_settings, flag
from cupyconv.problem.activations import Activation, as_float, resolve_activation
from cupyconv.problem.arrays import (
    COUNT_ITEMSIZE,
    Operand,
    accumulator,
    array_operand,
    check_dtype,
    dtype_from_name,
    dtype_name,
    promote,
)
from cupyconv.problem.recurrence import (
    DIRECTIONS,
    GATES,
    RecurrentGeometry,
    RecurrentProblem,
    check_recurrent_method,
)
from cupyconv.typing import ActivationLike, Array


def rnn(
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
    out: Sequence[Any] | None = None,
) -> tuple[Array, Array]:
    """A plain recurrent layer over a sequence.

    ``h[t] = activation(weight_ih @ x[t] + bias_ih + weight_hh @ h[t - 1] + bias_hh)`` for every sample, and
    ``y[t] = h[t]``.

    Parameters
    ----------
    x : array
        ``(T, N, I)``: steps, samples, inputs; real.  An array ``(N, T, I)`` is given as ``x.swapaxes(0, 1)``, a view.
    weight_ih, weight_hh : array
        ``(H, I)`` and ``(H, H)``, with H hidden units; ``(2, H, I)`` and ``(2, H, H)``, the forward direction first,
        where `direction` is ``"bidirectional"``.
    bias_ih, bias_hh : array, optional
        ``(H,)``, or ``(2, H)``.
    h0 : array, optional
        ``(D, N, H)``, the state before the first step, by default zeros; D is 2 for ``"bidirectional"``, else 1.
    lengths : sequence or array of int, optional
        How many steps each sample has, 0 to T.  After them y is zero and the state stays; a reverse direction begins
        at a sample's own last step.  A list or NumPy array is checked, and copied to the GPU where `x` is there; a
        CuPy array of int32 or int64 is not checked: values below 0 count as 0, those above T as T.
    direction : str
        ``"forward"``, ``"reverse"`` or ``"bidirectional"``.
    activation : str, tuple or None
        A name, or a tuple with parameters, of the table that ``help("cupyconv.problem.activations")`` shows; for
        ``"bidirectional"`` a pair may be given.
    clip : float, optional
        What the activation is applied to is first limited to ``[-clip, clip]``.
    method : str
        ``"auto"``, ``"step"`` (step by step: one kernel for each on CUDA; NumPy has this one only) or
        ``"persistent"`` (CUDA: one kernel for all steps).
    out : array or tuple, optional
        An array for y, of its shape and dtype; or a tuple of arrays for everything that is returned.

    Returns
    -------
    y : array
        ``(T, N, D * H)`` in ``result_type(x, weight_ih, weight_hh)``; 16-bit types are computed in float32.
    h : array
        ``(D, N, H)``, the state after each sample's last step.

    Raises
    ------
    TypeError
        For integer, complex or foreign arrays, NumPy and CuPy mixed, an `out` of another dtype.
    ValueError
        For shapes that do not fit, lengths outside the sequence, settings out of range, an `out` that overlaps an
        argument, or a method that does not apply.

    See Also
    --------
    lstm, gru : with gates.
    from_onnx_weights : ONNX's weights as keywords.

    Notes
    -----
    The products of the inputs with `weight_ih` do not wait for the recurrence: they are one matrix product for all
    steps, or for as many as the workspace limit has room for.  Several layers are several calls, each with the y of the
    one before as its x.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, weight_ih, weight_hh = np.ones((3, 1, 1)), np.ones((1, 1)), np.ones((1, 1))
    >>> y, h = cupyconv.rnn(x, weight_ih, weight_hh, activation=None)
    >>> y.ravel().tolist(), h.tolist()
    ([1.0, 2.0, 3.0], [[[3.0]]])
    """
    y, h = RNN(locals())
    return y, h


def lstm(
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
    out: Sequence[Any] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """A long short-term memory over a sequence.

    ``v = weight_ih @ x[t] + bias_ih + weight_hh @ h[t - 1] + bias_hh`` has four parts, in PyTorch's order: v_i, v_f, v_g
    and v_o.  ``i, f, o = sigmoid(v_i), sigmoid(v_f), sigmoid(v_o)``, ``g = tanh(v_g)``, ``c[t] = f * c[t - 1] + i * g``,
    ``h[t] = o * tanh(c[t])``, and ``y[t] = h[t]``.

    Parameters
    ----------
    x : array
        ``(T, N, I)``: steps, samples, inputs, as for `rnn`.
    weight_ih, weight_hh : array
        ``(4 * H, I)`` and ``(4 * H, H)``, rows in the order i, f, g, o; with a leading axis of 2 where `direction`
        is ``"bidirectional"``.
    bias_ih, bias_hh : array, optional
        ``(4 * H,)``, or ``(2, 4 * H)``.
    h0, c0 : array, optional
        ``(D, N, H)``, the states before the first step.
    peephole : array, optional
        ``(3 * H,)``, or ``(2, 3 * H)``, in the order i, f, o: factors of the cell state, whose products are added to
        v_i, v_f (of the state before the step) and v_o (of the state after it).
    lengths, direction
        As for `rnn`.
    activations : tuple
        Of the gates i, f and o; of g; and of the cell state.  For ``"bidirectional"`` a pair of such tuples may be given.
    input_forget : bool
        If True, f is ``1 - i``, whatever its weights say.
    clip : float, optional
        What the activations of i, f, o and g are applied to, peepholes included, is first limited to ``[-clip, clip]``.
    method, out
        As for `rnn`; a tuple is ``(y, (h, c))``.

    Returns
    -------
    y : array
        ``(T, N, D * H)``, dtype as for `rnn`.
    (h, c) : pair of arrays
        ``(D, N, H)``, the states after each sample's last step.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Notes
    -----
    The parameters of a `torch.nn.LSTM` are taken as they are: ``lstm(x, *parameters)`` with its weight_ih_l0, weight_hh_l0,
    bias_ih_l0 and bias_hh_l0 as arrays.  For two directions stack each with its reverse:
    ``numpy.stack([weight_ih_l0, weight_ih_l0_reverse])``.  ONNX's go through `from_onnx_weights`.

    Source: Hochreiter and Schmidhuber, *Long Short-Term Memory* (1997); Gers, Schraudolph and Schmidhuber, *Learning
    Precise Timing with LSTM Recurrent Networks* (2002), for peepholes; ONNX ``LSTM``.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x = np.ones((5, 2, 3), np.float32)
    >>> weight_ih, weight_hh = np.ones((16, 3), np.float32), np.ones((16, 4), np.float32)
    >>> y, (h, c) = cupyconv.lstm(x, weight_ih, weight_hh, lengths=[5, 2])
    >>> y.shape, h.shape, bool((y[2:, 1] == 0).all()), bool((h[0, 1] == y[1, 1]).all())
    ((5, 2, 4), (1, 2, 4), True, True)
    """
    y, h, c = LSTM(locals())
    return y, (h, c)


def gru(
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
    out: Sequence[Any] | None = None,
) -> tuple[Array, Array]:
    """A gated recurrent unit over a sequence.

    ``u = weight_ih @ x[t] + bias_ih`` and ``v = weight_hh @ h[t - 1] + bias_hh`` have three parts each, in PyTorch's order:
    r, z and n.  ``r = sigmoid(u_r + v_r)``, ``z = sigmoid(u_z + v_z)``, ``n = tanh(u_n + r * v_n)``,
    ``h[t] = (1 - z) * n + z * h[t - 1]``, and ``y[t] = h[t]``.

    Parameters
    ----------
    x : array
        ``(T, N, I)``: steps, samples, inputs, as for `rnn`.
    weight_ih, weight_hh : array
        ``(3 * H, I)`` and ``(3 * H, H)``, rows in the order r, z, n; with a leading axis of 2 where `direction` is
        ``"bidirectional"``.
    bias_ih, bias_hh : array, optional
        ``(3 * H,)``, or ``(2, 3 * H)``.
    h0, lengths, direction
        As for `rnn`.
    activations : tuple
        Of the gates r and z, and of n.  For ``"bidirectional"`` a pair of such tuples may be given.
    linear_before_reset : bool
        If True, as in PyTorch, r multiplies the product, as above.  If False, as is ONNX's default, r multiplies the
        state before the product, ``n = tanh(u_n + weight_hh_n @ (r * h[t - 1]) + bias_hh_n)``: two products per step, one
        after the other.
    clip : float, optional
        What the activations are applied to is first limited to ``[-clip, clip]``.
    method, out
        As for `rnn`.

    Returns
    -------
    y : array
        ``(T, N, D * H)``, dtype as for `rnn`.
    h : array
        ``(D, N, H)``, the state after each sample's last step.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Notes
    -----
    The parameters of a `torch.nn.GRU` are taken as they are, as those of an LSTM are by `lstm`.

    Source: Cho et al., *Learning Phrase Representations using RNN Encoder-Decoder* (2014); ONNX ``GRU``.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, weight_ih, weight_hh = np.ones((5, 2, 3)), np.ones((2, 12, 3)), np.ones((2, 12, 4))
    >>> y, h = cupyconv.gru(x, weight_ih, weight_hh, direction="bidirectional")
    >>> y.shape, h.shape, bool((h[1] == y[0, :, 4:]).all())
    ((5, 2, 8), (2, 2, 4), True)
    """
    y, h = GRU(locals())
    return y, h


def rnn_step(
    x: Array,
    h: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    activation: ActivationLike = "tanh",
    clip: float | None = None,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """One step of `rnn`, for sequences that arrive step by step.

    Parameters
    ----------
    x : array
        ``(N, I)``.
    h : array
        ``(N, H)``, the state before the step.
    weight_ih, weight_hh, bias_ih, bias_hh, activation, clip, method
        As for `rnn` in one direction.
    out : array, optional
        For the result; it may not be `h`, of which every element of the result needs all.

    Returns
    -------
    array
        ``(N, H)``, the state after the step.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> h = np.zeros((1, 1))
    >>> for value in (1.0, 2.0):
    ...     h = cupyconv.rnn_step(np.full((1, 1), value), h, np.ones((1, 1)), np.ones((1, 1)), activation="relu")
    >>> h.tolist()
    [[3.0]]
    """
    return RNN_STEP(locals())[0]


def lstm_step(
    x: Array,
    h: Array,
    c: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    peephole: Array | None = None,
    activations: Sequence[Any] = ("sigmoid", "tanh", "tanh"),
    input_forget: bool = False,
    clip: float | None = None,
    method: str = "auto",
    out: Sequence[Any] | None = None,
) -> tuple[Array, Array]:
    """One step of `lstm`, for sequences that arrive step by step.

    Parameters
    ----------
    x : array
        ``(N, I)``.
    h, c : array
        ``(N, H)``, the states before the step.
    weight_ih, weight_hh, bias_ih, bias_hh, peephole, activations, input_forget, clip, method
        As for `lstm` in one direction.
    out : tuple of arrays, optional
        For both results; they may not overlap `h` and `c`.

    Returns
    -------
    h, c : pair of arrays
        ``(N, H)``, the states after the step.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> h, c = np.zeros((2, 4)), np.zeros((2, 4))
    >>> weight_ih, weight_hh = np.ones((16, 3)), np.ones((16, 4))
    >>> for x in np.ones((5, 2, 3)):
    ...     h, c = cupyconv.lstm_step(x, h, c, weight_ih, weight_hh)
    >>> h.shape, c.shape
    ((2, 4), (2, 4))
    """
    next_h, next_c = LSTM_STEP(locals())
    return next_h, next_c


def gru_step(
    x: Array,
    h: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *,
    activations: Sequence[Any] = ("sigmoid", "tanh"),
    linear_before_reset: bool = True,
    clip: float | None = None,
    method: str = "auto",
    out: Array | None = None,
) -> Array:
    """One step of `gru`, for sequences that arrive step by step.

    Parameters
    ----------
    x : array
        ``(N, I)``.
    h : array
        ``(N, H)``, the state before the step.
    weight_ih, weight_hh, bias_ih, bias_hh, activations, linear_before_reset, clip, method
        As for `gru` in one direction.
    out : array, optional
        For the result; it may not overlap `h`.

    Returns
    -------
    array
        ``(N, H)``, the state after the step.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> h, weight_ih, weight_hh = np.zeros((2, 4)), np.ones((12, 3)), np.ones((12, 4))
    >>> for x in np.ones((5, 2, 3)):
    ...     h = cupyconv.gru_step(x, h, weight_ih, weight_hh)
    >>> h.shape
    (2, 4)
    """
    return GRU_STEP(locals())[0]


#: How many activations each cell has in one direction.
_ACTIVATIONS = {"rnn": 1, "lstm": 3, "gru": 2}
#: The axes of x, of a sequence and of a step, in words.
_AXES = {"(T, N, I)": "steps, samples, inputs; one sample alone is x[:, None]", "(N, I)": "samples, inputs"}
#: Arguments that none can be without.
_REQUIRED = ("x", "weight_ih", "weight_hh")


def check_sequence(
    cell: str, given: Arrays, *, on: str | None = None, saving: bool = False, method: str, **settings: Any
) -> CheckedCall:
    """Check the arguments of a layer; `saving` asks for what a gradient needs beside the results, as `keeps` lists it."""
    said = cell_settings(cell, **settings)
    roles = ("out", "h", "c") if cell == "lstm" else ("out", "h")
    arrays, result_names = _with_out(given, roles)
    arguments = _arguments(arrays, on)
    geometry = _geometry(said, arrays, tuple(arrays["x"].shape), "(T, N, I)")
    state = (geometry.directions, geometry.batch, geometry.hidden)
    shapes = {"out": (geometry.steps, geometry.batch, geometry.directions * geometry.hidden), "h": state, "c": state}
    dtype = promote(arguments.some(_REQUIRED))
    results = {role: Result(name, shapes[role], dtype) for role, name in result_names.items()}
    kept_dtype = dtype_from_name(accumulator(dtype_name(dtype)))
    kept = [Result(name, shape, kept_dtype) for name, shape in geometry.keeps.items()] if saving else []
    return _checked(arguments, geometry, {name: name for name in given if name != "out"}, results, kept, method)


def check_step(cell: str, given: Arrays, *, on: str | None = None, method: str, **settings: Any) -> CheckedCall:
    """Check the arguments of a step: a sequence of one, whose states h and c have no axis of directions."""
    said = cell_settings(cell, direction="forward", **settings)
    arrays, result_names = _with_out(given, ("out", "c") if cell == "lstm" else ("out",))
    arguments = _arguments(arrays, on)
    shape = tuple(arrays["x"].shape)
    geometry = _geometry(said, arrays, (1, *shape) if len(shape) == 2 else shape[:2], "(N, I)")
    dtype = promote(arguments.some(_REQUIRED))
    results = {role: Result(name, (geometry.batch, geometry.hidden), dtype) for role, name in result_names.items()}
    names = {f"{name}0" if name in ("h", "c") else name: name for name in given if name != "out"}
    return _checked(arguments, geometry, names, results, [], method)


def unpack_sequence(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with lengths as an array of x's library, and results in one tuple."""
    arguments["lengths"] = _on_backend(arguments["lengths"], arguments["x"])
    return _unpack_out(arguments)


def _unpack_out(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the results for ``(y, (h, c))`` as ``(y, h, c)``."""
    out = arguments["out"]
    if isinstance(out, (tuple, list)) and len(out) == 2 and isinstance(out[1], (tuple, list)):
        arguments["out"] = (out[0], *out[1])
    return arguments


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_SEQUENCE = ("x", *_WEIGHTS, "h0", "lengths", "out")
RNN = Operation(rnn, partial(check_sequence, "rnn"), _SEQUENCE, unpack=unpack_sequence)
LSTM = Operation(
    lstm,
    partial(check_sequence, "lstm"),
    ("x", *_WEIGHTS, "h0", "c0", "peephole", "lengths", "out"),
    unpack=unpack_sequence,
)
GRU = Operation(gru, partial(check_sequence, "gru"), _SEQUENCE, unpack=unpack_sequence)
RNN_STEP = Operation(rnn_step, partial(check_step, "rnn"), ("x", "h", *_WEIGHTS, "out"), unpack=_unpack_out)
LSTM_STEP = Operation(
    lstm_step, partial(check_step, "lstm"), ("x", "h", "c", *_WEIGHTS, "peephole", "out"), unpack=_unpack_out
)
GRU_STEP = Operation(gru_step, partial(check_step, "gru"), ("x", "h", *_WEIGHTS, "out"), unpack=_unpack_out)


def _on_backend(lengths: Any, x: Any) -> Any:
    """Lengths as an array of the library that owns x; those that the host has are held to be within the sequence.

    An array of another library than NumPy is taken as it is: to look at its values would be to wait for them.
    """
    if lengths is None:
        return None
    if not isinstance(lengths, (list, tuple)) and backend_for({"lengths": lengths}).name != "numpy":
        return lengths
    if getattr(x, "ndim", None) != 3:
        return None  # x is refused for that
    try:
        counts = np.asarray(lengths)
    except ValueError:  # rows of several lengths
        raise TypeError(f"lengths must be integers, one for each sample, given {lengths!r}") from None
    if counts.dtype.kind not in "iu" and counts.size:
        raise TypeError(f"lengths must be integers, given {lengths if counts.size < 9 else counts.dtype}")
    steps, batch, _ = x.shape
    if counts.shape != (batch,):
        raise ValueError(f"lengths has shape {counts.shape}, needed ({batch},): one for each sample")
    if batch and not 0 <= counts.min() <= counts.max() <= steps:
        raise ValueError(f"lengths must be from 0 to {steps}, given {int(counts.min())} to {int(counts.max())}")
    if dtype_name(counts.dtype) not in COUNT_ITEMSIZE or not counts.dtype.isnative:
        counts = counts.astype(np.int64)
    return backend_for({"x": x}).from_host(counts)


def cell_settings(
    cell: str, *, direction: Any, clip: Any, activation: Any = None, activations: Any = None, **flags: Any
) -> dict[str, Any]:
    """What is said of a cell, as `RecurrentGeometry` has it."""
    groups = activation_groups(activation if cell == "rnn" else activations, cell, direction)
    checked_flags = {name: flag(name, value) for name, value in flags.items()}
    return {"cell": cell, "direction": direction, "activations": groups, "clip": clip, **checked_flags}


def _arguments(arrays: dict[str, Any], on: str | None) -> Arguments:
    """The arrays with their one backend, all of dtypes that there are here."""
    backend = backend_for(arrays)
    for name, array in arrays.items():
        if name == "lengths":
            if dtype_name(array.dtype) not in COUNT_ITEMSIZE:
                raise TypeError(f"lengths has dtype {array.dtype}; supported are {', '.join(COUNT_ITEMSIZE)}")
            continue
        check_dtype(name, array.dtype)
        if array.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {array.dtype}; recurrent layers are of real numbers")
    return Arguments(arrays, backend, on)


def _geometry(
    said: Mapping[str, Any], arrays: Mapping[str, Any], x_shape: tuple[int, ...], axes: str
) -> RecurrentGeometry:
    """The problem, from the shapes of x, as that of a sequence, and of the recurrent weight."""
    if len(x_shape) != 3:
        raise ValueError(f"x has shape {tuple(arrays['x'].shape)}, needed {axes}: {_AXES[axes]}")
    steps, batch, inputs = x_shape
    gates, directions = GATES[said["cell"]], len(DIRECTIONS[said["direction"]])
    shape = tuple(arrays["weight_hh"].shape)
    lead = (2,) * (directions == 2)
    hidden = shape[-1] if shape else 0
    if shape != (*lead, gates * hidden, hidden):
        rows = f"{gates} * H" if gates > 1 else "H"
        needed = f"(2, {rows}, H), as direction is 'bidirectional'" if lead else f"({rows}, H)"
        plain = (gates * hidden, hidden)
        hint = ""
        if not lead and shape == (1, *plain):
            hint = "; one direction has no axis for directions: weight_hh[0]"
        elif len(shape) == 2 and shape[1] == gates * shape[0]:
            hint = "; its transpose has it: weight_hh.T"
        raise ValueError(f"weight_hh has shape {shape}, needed {needed}{hint}")
    return RecurrentGeometry(
        **{**said, "clip": _bound(said["clip"])}, steps=steps, batch=batch, inputs=inputs, hidden=hidden
    )


def _checked(
    arguments: Arguments,
    geometry: RecurrentGeometry,
    names: Mapping[str, str],
    results: Mapping[str, Result],
    kept: list[Result],
    method: str,
) -> CheckedCall:
    """What layers and steps have in common: `names` and `results` are by role."""
    check_recurrent_method(method)
    directions, hidden, batch = geometry.directions, geometry.hidden, geometry.batch
    rows = geometry.gates * hidden
    state = (directions, batch, hidden)
    full = {
        "x": (geometry.steps, batch, geometry.inputs),
        "weight_ih": (directions, rows, geometry.inputs),
        "weight_hh": (directions, rows, hidden),
        "bias_ih": (directions, rows),
        "bias_hh": (directions, rows),
        "h0": state,
        "c0": state,
        "peephole": (directions, 3 * hidden),
        "lengths": (batch,),
        "out": (geometry.steps, batch, directions * hidden),
        "h": state,
        "c": state,
    }
    # An axis of one direction is not the caller's, but in the states of a sequence; a step has no axis of time.
    lacking = {"weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole"} if directions == 1 else set()
    lacking |= set() if "h" in results else {"x", "h0", "c0"}
    described: dict[str, Operand | None] = {}
    for role, name in names.items():
        if name not in arguments.arrays:
            continue
        array, shape = arguments[name], full[role]
        needed = shape[1:] if role in lacking else shape
        if tuple(array.shape) != needed:
            because = ", as direction is 'bidirectional'" if directions == 2 and shape[0] == 2 else ""
            if role == "bias_ih" and tuple(array.shape)[-1:] == (2 * rows,):
                because += "; both biases in one array are split by from_onnx_weights"
            raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {needed}{because}")
        described[role] = _described(arguments.backend, name, array, shape)
    for role, result in results.items():
        described[role] = _described_result(arguments, result, full[role])
    problem = RecurrentProblem(
        geometry=geometry,
        **described,  # type: ignore[arg-type]
        kept=tuple(_described_result(arguments, result, result.shape) for result in kept),
        method=method,
        allow_tf32=current_settings().allow_tf32,
        notes=widening_notes(arguments.some(_REQUIRED), results["out"].dtype),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset(), NO_IMAGE, (*results.values(), *kept), listed=True)


def _described(backend: Backend, name: str, array: Any, shape: tuple[int, ...]) -> Operand:
    """An array as planning sees it: `shape` may have an axis of length 1 in front of the array's own."""
    strides = (*(0,) * (len(shape) - array.ndim), *array.strides)
    return array_operand(name, dtype_name(array.dtype), shape, strides, backend.address(array) if array.size else 0)


def _described_result(arguments: Arguments, result: Result, shape: tuple[int, ...]) -> Operand:
    if result.name in arguments.arrays:
        arguments.check_out(result)
        return _described(arguments.backend, result.name, arguments[result.name], shape)
    name = dtype_name(result.dtype)
    return array_operand(result.name, name, shape, byte_strides(shape, name), 0)


def _with_out(given: Arrays, roles: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays that are there, with those that the caller gave for results, and the name of each result.

    ``given["out"]`` is one array, for the first result, or as many as there are results.
    """
    out, needed = given["out"], (*_REQUIRED, "h", "c")
    arrays = {name: array for name, array in given.items() if name != "out" and (array is not None or name in needed)}
    if not isinstance(out, (tuple, list)):
        names = {role: f"out[{i}]" if i else "out" for i, role in enumerate(roles)}
        return (arrays if out is None else {**arrays, "out": out}), names
    if len(out) != len(roles):
        raise ValueError(f"out must be one array, for the first result, or {len(roles)} of them, given {len(out)}")
    names = {role: f"out[{i}]" for i, role in enumerate(roles)}
    return {**arrays, **dict(zip(names.values(), out))}, names


def activation_groups(given: Any, kind: str, direction: Any) -> tuple[tuple[Activation, ...], ...]:
    """Activations for each direction; `given` for one, or a pair for two."""
    name = "activation" if kind == "rnn" else "activations"
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, given {direction!r}")
    count, directions = _ACTIVATIONS[kind], len(DIRECTIONS[direction])
    each = [given] if kind == "rnn" and _is_one(given) else given
    if not isinstance(each, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of {count}, given {given!r}")
    if all(map(_is_one, each)) and len(each) == count:
        group = tuple(resolve_activation(one, recurrent=True) for one in each)
        return (group,) * directions
    if directions == 2 and len(each) == 2:
        pairs = [[one] if kind == "rnn" and _is_one(one) else one for one in each]
        if all(isinstance(group, (tuple, list)) and len(group) == count for group in pairs):
            return tuple(tuple(resolve_activation(one, recurrent=True) for one in group) for group in pairs)
    wanted = f"{count} activation" + "s" * (count > 1)
    raise ValueError(
        f"{name} must be {wanted}{', or a pair of that, one for each direction' * (directions == 2)}; given {given!r}"
    )


def _is_one(activation: Any) -> bool:
    """Whether this is one activation: a tuple of several has names or tuples where this has numbers."""
    if isinstance(activation, (tuple, list)):
        return (
            bool(activation)
            and isinstance(activation[0], str)
            and not any(parameter is None or isinstance(parameter, (str, tuple, list)) for parameter in activation[1:])
        )
    return activation is None or isinstance(activation, str)


def _bound(clip: Any) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, Real):
        raise TypeError(f"clip must be a number or None, given {clip!r}")
    bound = as_float("clip", clip)
    if not bound >= 0:
        raise ValueError(f"clip must be at least 0, given {clip!r}")
    return bound
