"""`rnn`, `lstm` and `gru` over a sequence, and the checks of these layers and of their single steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Never

import numpy as np

from cupyconv.call.arguments import NO_IMAGE, Arguments, Arrays, Result, widening_notes
from cupyconv.call.dispatch import backend_for
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.call.options import flag
from cupyconv.problem.activations import Activation, as_float, resolve_activation
from cupyconv.problem.arrays import (
    COUNT_ITEMSIZE,
    Operand,
    accumulator,
    check_dtype,
    dtype_from_name,
    dtype_name,
    promote,
)
from cupyconv.problem.problems import check_method
from cupyconv.problem.recurrence import DIRECTIONS, GATES, RECURRENT_METHODS, RecurrentGeometry, RecurrentProblem
from cupyconv.typing import ActivationLike, Array


def rnn(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *unnamed: Never,
    h0: Array | None = None,
    lengths: Array | Sequence[int] | None = None,
    direction: str = "forward",
    activation: ActivationLike = "tanh",
    clip: float | None = None,
    method: str = "auto",
    out: Sequence[Any] | None = None,
    **foreign: Never,
) -> tuple[Array, Array]:
    """Apply a plain recurrent layer to a sequence.

    ``h[t] = activation(weight_ih @ x[t] + bias_ih + weight_hh @ h[t - 1] + bias_hh)`` for every sample, and
    ``y[t] = h[t]``.

    Parameters
    ----------
    x : array
        ``(T, N, I)``: steps, samples, inputs; real.  For an array ``(N, T, I)``, pass the view ``x.swapaxes(0, 1)``.
    weight_ih, weight_hh : array
        ``(H, I)`` and ``(H, H)``, with H hidden units.  If `direction` is ``"bidirectional"``: ``(2, H, I)`` and
        ``(2, H, H)``, with the forward direction first.
    bias_ih, bias_hh : array, optional
        ``(H,)``, or ``(2, H)``.
    h0 : array, optional
        ``(D, N, H)``: the state before the first step, by default zeros.  D is 2 for ``"bidirectional"``, otherwise 1.
    lengths : sequence or array of int, optional
        Number of steps of each sample, from 0 to T.  After a sample's last step, y is zero and the state does not
        change; a reverse direction begins at that last step.  A list or NumPy array is checked, and copied to the GPU
        if `x` is there.  A CuPy array of int32 or int64 is not checked: values below 0 count as 0, values above T as T.
    direction : str
        ``"forward"``, ``"reverse"`` or ``"bidirectional"``.
    activation : str, tuple or None
        A name, or a tuple with parameters, from the table that ``help("cupyconv.problem.activations")`` shows.  For
        ``"bidirectional"`` it may be a pair.
    clip : float, optional
        Bound of the pre-activation, which is clipped to ``[-clip, clip]``.
    method : str
        ``"auto"``, ``"step"`` (step by step; on CUDA one kernel per step; the only method on NumPy) or ``"persistent"``
        (CUDA: one kernel for all steps).
    out : array or tuple, optional
        An array for y, of its shape and dtype; or a tuple of arrays for all return values.

    Returns
    -------
    y : array
        ``(T, N, D * H)`` in ``result_type(x, weight_ih, weight_hh)``; 16-bit types are computed in float32.
    h : array
        ``(D, N, H)``: the state after each sample's last step.

    Raises
    ------
    TypeError
        For integer, complex or foreign arrays, NumPy and CuPy arrays mixed, or an `out` of another dtype.
    ValueError
        For shapes that do not fit, lengths outside the sequence, settings out of range, an `out` that overlaps an
        argument, or a method that does not apply.

    See Also
    --------
    lstm, gru : recurrent layers with gates.
    from_onnx_weights : ONNX's weights as keyword arguments.

    Notes
    -----
    The products of the inputs with `weight_ih` do not depend on the recurrence.  They are one matrix product for all
    steps, or for as many steps as the workspace limit allows.  For several layers, call the function once per layer and
    pass the y of each call as the x of the next.

    Source: Elman, *Finding Structure in Time* (1990); ONNX ``RNN``.

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
    *unnamed: Never,
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
    **foreign: Never,
) -> tuple[Array, tuple[Array, Array]]:
    """Apply a long short-term memory (LSTM) layer to a sequence.

    ``v = weight_ih @ x[t] + bias_ih + weight_hh @ h[t - 1] + bias_hh`` has four parts, in PyTorch's order: v_i, v_f,
    v_g and v_o.  ``i, f, o = sigmoid(v_i), sigmoid(v_f), sigmoid(v_o)``, ``g = tanh(v_g)``,
    ``c[t] = f * c[t - 1] + i * g``, ``h[t] = o * tanh(c[t])``, and ``y[t] = h[t]``.

    Parameters
    ----------
    x, lengths, direction, method, out
        As for `rnn`; `out` as a tuple is ``(y, (h, c))``.
    weight_ih, weight_hh, bias_ih, bias_hh : array
        ``(4 * H, I)``, ``(4 * H, H)`` and, optionally, ``(4 * H,)``, with rows in the order i, f, g, o.  If `direction`
        is ``"bidirectional"``, each has a leading axis of length 2.
    h0, c0 : array, optional
        ``(D, N, H)``: the states before the first step.
    peephole : array, optional
        ``(3 * H,)``, or ``(2, 3 * H)``, in the order i, f, o: factors of the cell state.  The products are added to v_i
        and v_f (with the state before the step) and to v_o (with the state after it).
    activations : tuple
        Activations of the gates i, f and o; of g; and of the cell state.  For ``"bidirectional"`` it may be a pair of
        such tuples.
    input_forget : bool
        If True, f is ``1 - i``, independently of its weights.
    clip : float, optional
        Bound of the pre-activations of i, f, o and g, peepholes included, which are clipped to ``[-clip, clip]``.

    Returns
    -------
    y, (h, c) : array and pair of arrays
        ``(T, N, D * H)``, and ``(D, N, H)`` after each sample's last step, with dtype as for `rnn`.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Notes
    -----
    The parameters of a `torch.nn.LSTM` need no conversion: ``lstm(x, *parameters)`` with its weight_ih_l0,
    weight_hh_l0, bias_ih_l0 and bias_hh_l0 as arrays.  For two directions, stack each parameter with its reverse:
    ``numpy.stack([weight_ih_l0, weight_ih_l0_reverse])``.  `from_onnx_weights` converts ONNX's weights.

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
    *unnamed: Never,
    h0: Array | None = None,
    lengths: Array | Sequence[int] | None = None,
    direction: str = "forward",
    activations: Sequence[Any] = ("sigmoid", "tanh"),
    linear_before_reset: bool = True,
    clip: float | None = None,
    method: str = "auto",
    out: Sequence[Any] | None = None,
    **foreign: Never,
) -> tuple[Array, Array]:
    """Apply a gated recurrent unit (GRU) layer to a sequence.

    ``u = weight_ih @ x[t] + bias_ih`` and ``v = weight_hh @ h[t - 1] + bias_hh`` have three parts each, in PyTorch's
    order: r, z and n.  ``r = sigmoid(u_r + v_r)``, ``z = sigmoid(u_z + v_z)``, ``n = tanh(u_n + r * v_n)``,
    ``h[t] = (1 - z) * n + z * h[t - 1]``, and ``y[t] = h[t]``.

    Parameters
    ----------
    x, h0, lengths, direction, method, out
        As for `rnn`.
    weight_ih, weight_hh, bias_ih, bias_hh : array
        As for `lstm`, with ``3 * H`` rows in the order r, z, n.
    activations : tuple
        Activations of the gates r and z, and of n.  For ``"bidirectional"`` it may be a pair of such tuples.
    linear_before_reset : bool
        If True, as in PyTorch, r multiplies the product, as above.  If False, as is ONNX's default, r multiplies the
        state before the product: ``n = tanh(u_n + weight_hh_n @ (r * h[t - 1]) + bias_hh_n)``.  This needs two
        consecutive products per step.
    clip : float, optional
        Bound of the pre-activations, which are clipped to ``[-clip, clip]``.

    Returns
    -------
    y, h : array
        As for `rnn`.

    Raises
    ------
    TypeError, ValueError
        As for `rnn`.

    Notes
    -----
    The parameters of a `torch.nn.GRU` need no conversion, as for `lstm`.

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


#: Number of activations of each cell in one direction.
_ACTIVATIONS = {"rnn": 1, "lstm": 3, "gru": 2}
#: The required arguments.
_REQUIRED = ("x", "weight_ih", "weight_hh")


def check_recurrent(
    cell: str,
    given: Arrays,
    *,
    on: str | None = None,
    saving: bool = False,
    direction: str = "forward",
    clip: Any,
    method: str,
    activation: Any = None,
    activations: Any = None,
    **flags: Any,
) -> CheckedCall:
    """Check the arguments of a layer or of a step: a sequence of length one, whose h and c have no axis of directions.

    `saving` also asks for the arrays that a gradient needs, as `RecurrentGeometry.keeps` lists them.
    """
    groups = activation_groups(activation if cell == "rnn" else activations, cell, direction)
    checked_flags = {name: flag(name, value) for name, value in flags.items()}
    step = "h" in given
    roles = ("out", *["h"] * (not step), *["c"] * (cell == "lstm"))
    arrays, result_names = _with_out(given, roles)
    arguments = _arguments(arrays, on)
    steps, batch, inputs = _sequence_shape(tuple(arrays["x"].shape), step)
    geometry = RecurrentGeometry(
        cell=cell,
        steps=steps,
        batch=batch,
        inputs=inputs,
        hidden=_hidden(tuple(arrays["weight_hh"].shape), cell, direction),
        direction=direction,
        activations=groups,
        clip=_bound(clip),
        **checked_flags,
    )
    dtype = promote(arguments.some(_REQUIRED))
    check_method(method, RECURRENT_METHODS)
    shapes = _shapes(geometry)
    # With one direction, the caller's arrays lack the axis of directions, except the states of a sequence.  The arrays
    # of a step lack the axis of time.
    lacking = {"weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole"} if geometry.directions == 1 else set()
    lacking |= {"x", "h0", "c0", "out", "c"} if step else set()
    described: dict[str, Operand | None] = {}
    for name in given:
        role = f"{name}0" if step and name in ("h", "c") else name
        if name not in arguments.arrays or name == "out":
            continue
        array, shape = arguments[name], shapes[role]
        needed = shape[1:] if role in lacking else shape
        if tuple(array.shape) != needed:
            because = " because direction='bidirectional'" if geometry.directions == 2 and shape[0] == 2 else ""
            if role == "bias_ih" and tuple(array.shape)[-1:] == (2 * shape[-1],):
                because += "; from_onnx_weights splits an array that holds both biases"
            raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {needed}{because}")
        described[role] = arguments.describe_array(name, shape)
    results = [Result(name, shapes[role][role in lacking :], dtype) for role, name in result_names.items()]
    for role, result in zip(result_names, results):
        described[role] = arguments.describe_array(result, shapes[role])
    wide = dtype_from_name(accumulator(dtype_name(dtype)))
    kept = [Result(name, shape, wide) for name, shape in geometry.keeps.items()] if saving else []
    problem = RecurrentProblem(
        geometry=geometry,
        **described,  # type: ignore[arg-type]
        kept=tuple(map(arguments.describe_array, kept)),
        method=method,
        notes=widening_notes(arguments.some(_REQUIRED), dtype),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset(), NO_IMAGE, (*results, *kept), listed=True)


def unpack_sequence(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with lengths as an array of x's library, and the results in one tuple."""
    arguments["lengths"] = _on_backend(arguments["lengths"], arguments["x"])
    return unpack_results(arguments)


def unpack_results(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with an `out` of ``(y, (h, c))`` as ``(y, h, c)``."""
    out = arguments["out"]
    if isinstance(out, (tuple, list)) and len(out) == 2 and isinstance(out[1], (tuple, list)):
        arguments["out"] = (out[0], *out[1])
    return arguments


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_SEQUENCE = ("x", *WEIGHTS, "h0", "lengths", "out")
_LSTM_SEQUENCE = ("x", *WEIGHTS, "h0", "c0", "peephole", "lengths", "out")
CHECKS = {cell: partial(check_recurrent, cell) for cell in GATES}
RNN = Operation(rnn, CHECKS["rnn"], _SEQUENCE, unpack=unpack_sequence)
LSTM = Operation(lstm, CHECKS["lstm"], _LSTM_SEQUENCE, unpack=unpack_sequence)
GRU = Operation(gru, CHECKS["gru"], _SEQUENCE, unpack=unpack_sequence)


def _on_backend(lengths: Any, x: Any) -> Any:
    """Return the lengths as an array of x's library; lengths on the host are checked to be within the sequence.

    Lengths in an array of another library than NumPy are not checked, because reading them would wait for the GPU.
    """
    if lengths is None:
        return None
    if not isinstance(lengths, (list, tuple)) and backend_for({"lengths": lengths}).name != "numpy":
        return lengths
    if getattr(x, "ndim", None) != 3:
        return None  # a later check refuses this x
    try:
        counts = np.asarray(lengths)
    except ValueError:  # nested sequences of different lengths
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


def _arguments(arrays: dict[str, Any], on: str | None) -> Arguments:
    """Return the arrays with their one backend, after checking that their dtypes are supported."""
    backend = backend_for(arrays)
    for name, array in arrays.items():
        if name == "lengths":
            if dtype_name(array.dtype) not in COUNT_ITEMSIZE:
                raise TypeError(f"lengths has dtype {array.dtype}; supported are {', '.join(COUNT_ITEMSIZE)}")
            continue
        check_dtype(name, array.dtype)
        if array.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {array.dtype}; recurrent layers support only real dtypes")
    return Arguments(arrays, backend, on)


def _sequence_shape(x_shape: tuple[int, ...], step: bool) -> tuple[int, ...]:
    """Return the numbers of steps, samples and inputs."""
    if len(x_shape) != 3 - step:
        axes = (
            "(N, I): samples, inputs"
            if step
            else "(T, N, I): steps, samples, inputs; for a single sample use x[:, None]"
        )
        raise ValueError(f"x has shape {x_shape}, needed {axes}")
    return (1, *x_shape) if step else x_shape


def _hidden(shape: tuple[int, ...], cell: str, direction: str) -> int:
    """Return the number of hidden units of a layer whose recurrent weight has this shape."""
    gates, directions = GATES[cell], len(DIRECTIONS[direction])
    lead = (2,) * (directions == 2)
    hidden = shape[-1] if shape else 0
    if shape != (*lead, gates * hidden, hidden):
        rows = f"{gates} * H" if gates > 1 else "H"
        needed = f"(2, {rows}, H) because direction='bidirectional'" if lead else f"({rows}, H)"
        hint = ""
        if not lead and shape == (1, gates * hidden, hidden):
            hint = "; a single direction has no direction axis: use weight_hh[0]"
        elif len(shape) == 2 and shape[1] == gates * shape[0]:
            hint = "; its transpose has this shape: use weight_hh.T"
        raise ValueError(f"weight_hh has shape {shape}, needed {needed}{hint}")
    return hidden


def _shapes(geometry: RecurrentGeometry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arguments and results by role, with all axes that they have in a problem."""
    directions, hidden, batch, inputs = geometry.directions, geometry.hidden, geometry.batch, geometry.inputs
    rows, state = geometry.gates * hidden, (directions, batch, hidden)
    return {
        "x": (geometry.steps, batch, inputs),
        "weight_ih": (directions, rows, inputs),
        "weight_hh": (directions, rows, hidden),
        **dict.fromkeys(("bias_ih", "bias_hh"), (directions, rows)),
        "peephole": (directions, 3 * hidden),
        "lengths": (batch,),
        "out": (geometry.steps, batch, directions * hidden),
        **dict.fromkeys(("h0", "c0", "h", "c"), state),
    }


def _with_out(given: Arrays, roles: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the present arrays, including those that the caller gave for results, and the name of each result.

    ``given["out"]`` is one array, for the first result, or as many arrays as there are results.
    """
    out, needed = given["out"], (*_REQUIRED, "h", "c")
    arrays = {name: array for name, array in given.items() if name != "out" and (array is not None or name in needed)}
    if not isinstance(out, (tuple, list)):
        names = {role: f"out[{i}]" if i else "out" for i, role in enumerate(roles)}
        return (arrays if out is None else {**arrays, "out": out}), names
    if len(out) != len(roles):
        raise ValueError(
            f"out must be one array, for the first result, or a sequence of {len(roles)}, given {len(out)}"
        )
    names = {role: f"out[{i}]" for i, role in enumerate(roles)}
    return {**arrays, **dict(zip(names.values(), out))}, names


def activation_groups(given: Any, kind: str, direction: Any) -> tuple[tuple[Activation, ...], ...]:
    """Return the activations of each direction; `given` holds those of one direction, or a pair for two."""
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
        f"{name} must be {wanted}{', or a pair of these, one for each direction' * (directions == 2)}; given {given!r}"
    )


def _is_one(activation: Any) -> bool:
    """Whether this is one activation: a tuple of several activations has names or tuples where one has numbers."""
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
    bound = as_float("clip", clip)
    if not bound >= 0:
        raise ValueError(f"clip must be at least 0, given {clip!r}")
    return bound
