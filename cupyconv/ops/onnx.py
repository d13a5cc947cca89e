"""Conversions from ONNX conventions: flat padding lists, and recurrent weights with another order of gates and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyconv.call.dispatch import backend_for
from cupyconv.problem.padding import AUTO_PAD, Pairs, padding_amount
from cupyconv.problem.recurrence import GATES
from cupyconv.typing import Array

#: For each operator, the position of each of our gates in ONNX's order: i, o, f, c for LSTM; z, r, h for GRU.
_ORDER = {"RNN": (0,), "LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
#: The same for peepholes, which ONNX stores in the order i, o, f.
_PEEPHOLES = (0, 2, 1)


def onnx_padding(pads: Sequence[int] | None = None, auto_pad: str = "NOTSET") -> Pairs | str | int:
    """Convert ONNX's ``pads`` and ``auto_pad`` attributes to a `padding` argument.

    Parameters
    ----------
    pads : sequence of int or None
        ONNX's flat list: all begins, then all ends, such as ``[h0, w0, h1, w1]`` for two axes.  None means zeros.
    auto_pad : str
        ``"NOTSET"`` (use `pads`), ``"SAME_UPPER"``, ``"SAME_LOWER"`` or ``"VALID"``.

    Returns
    -------
    padding
        A tuple of ``(before, after)`` pairs; one of the names ``"same"``, ``"same_lower"`` and ``"valid"``; or 0 if
        neither argument is given.

    Raises
    ------
    ValueError
        For an odd number of pads, a negative pad, an unknown `auto_pad`, or `pads` together with an `auto_pad`.

    Notes
    -----
    Source: the ONNX operator specification, ``Conv``.

    Examples
    --------
    >>> from cupyconv import onnx_padding
    >>> onnx_padding([0, 1, 2, 3])
    ((0, 2), (1, 3))
    >>> onnx_padding(None, "SAME_UPPER")
    'same'
    """
    if not isinstance(auto_pad, str) or auto_pad not in ("NOTSET", *AUTO_PAD):
        hint = "; it is bytes: use auto_pad.decode()" if isinstance(auto_pad, bytes) else ""
        raise ValueError(f"unknown auto_pad {auto_pad!r}; known are NOTSET, {', '.join(AUTO_PAD)}{hint}")
    try:
        amounts = [padding_amount(pad, "pads") for pad in ([] if pads is None else list(pads))]
    except TypeError:
        raise TypeError(f"pads must be a sequence of integers, given {pads!r}") from None
    if auto_pad in AUTO_PAD:
        if any(amounts):
            raise ValueError(f"pads {amounts} given together with auto_pad {auto_pad!r}: ONNX allows only one of them")
        return AUTO_PAD[auto_pad]
    if pads is None:
        return 0
    if not amounts or len(amounts) % 2:
        raise ValueError(f"pads needs two entries per spatial axis, given {len(amounts)}")
    half = len(amounts) // 2
    return tuple(zip(amounts[:half], amounts[half:]))


def from_onnx_weights(op: str, W: Array, R: Array, B: Array | None = None, P: Array | None = None) -> dict[str, Any]:
    """Convert the weights of an ONNX ``RNN``, ``LSTM`` or ``GRU`` to keyword arguments of `rnn`, `lstm` or `gru`.

    Parameters
    ----------
    op : str
        ``"RNN"``, ``"LSTM"`` or ``"GRU"``.
    W : array
        ``(D, G * H, I)``, with gates in the operator's order: i, o, f, c or z, r, h.
    R : array
        ``(D, G * H, H)``.
    B : array, optional
        ``(D, 2 * G * H)``: the input biases, then the recurrent biases.
    P : array, optional
        ``(D, 3 * H)``: peepholes of an ``LSTM``, in the order i, o, f.

    Returns
    -------
    dict
        ``weight_ih`` and ``weight_hh``; with B also ``bias_ih`` and ``bias_hh``; with P also ``peephole``.  The arrays
        belong to the same library.  Their gates are in PyTorch's order, and the axis D is omitted if its length is 1.

    Raises
    ------
    TypeError
        For objects that are not NumPy or CuPy arrays, or a mixture of both libraries.
    ValueError
        For another operator, shapes that do not fit, or peepholes with an operator other than ``LSTM``.

    Notes
    -----
    The other attributes and inputs of a node translate as follows:

    ==============================  ===================================================================================
    ONNX                            here
    ==============================  ===================================================================================
    direction, clip                 the same
    input_forget                    the same, as a bool
    linear_before_reset             the same, as a bool; the default is 0 in ONNX and True in `gru`
    sequence_lens                   lengths
    initial_h, initial_c            h0, c0
    activations                     lower case, with an underscore: ``"HardSigmoid"`` is ``"hard_sigmoid"``
    activation_alpha, _beta         ``("hard_sigmoid", alpha, beta)``
    layout 1                        views: ``x.swapaxes(0, 1)``
    hidden_size                     not needed: it follows from R
    Y, ``(T, D, N, H)``             ``y.reshape(T, N, D, H).swapaxes(1, 2)``
    ==============================  ===================================================================================

    The ``OPERATORS`` of `cupyconv.interop.onnx` do all of this.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> W, R, B = np.ones((1, 12, 3)), np.ones((1, 12, 4)), np.zeros((1, 24))
    >>> weights = cupyconv.from_onnx_weights("GRU", W, R, B)
    >>> {name: array.shape for name, array in weights.items()}
    {'weight_ih': (12, 3), 'weight_hh': (12, 4), 'bias_ih': (12,), 'bias_hh': (12,)}
    >>> y, h = cupyconv.gru(np.ones((5, 2, 3)), **weights, linear_before_reset=False)
    """
    if not isinstance(op, str) or op not in _ORDER:
        raise ValueError(f"op must be one of {', '.join(_ORDER)}, given {op!r}")
    if P is not None and op != "LSTM":
        raise ValueError(f"P (peepholes) requires op 'LSTM', given op {op!r}")
    backend_for({"W": W, "R": R, **{name: array for name, array in (("B", B), ("P", P)) if array is not None}})
    order, gates = _ORDER[op], GATES[op.lower()]
    if R.ndim != 3 or R.shape[0] not in (1, 2) or R.shape[1] != gates * R.shape[2]:
        raise ValueError(f"R has shape {tuple(R.shape)}, needed (D, {gates} * H, H) with D 1 or 2")
    directions, rows, hidden = R.shape
    if W.ndim != 3 or tuple(W.shape[:2]) != (directions, rows):
        raise ValueError(f"W has shape {tuple(W.shape)}, needed ({directions}, {rows}, I)")
    for name, array, needed in (("B", B, (directions, 2 * rows)), ("P", P, (directions, 3 * hidden))):
        if array is not None and tuple(array.shape) != needed:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {needed}")

    def reordered(array: Any, order: tuple[int, ...]) -> Any:
        by_gate = array.reshape(directions, len(order), hidden, *array.shape[2:])
        result = by_gate[:, list(order)].reshape(array.shape)
        return result if directions == 2 else result[0]

    weights = {"weight_ih": reordered(W, order), "weight_hh": reordered(R, order)}
    if B is not None:
        weights |= {"bias_ih": reordered(B[:, :rows], order), "bias_hh": reordered(B[:, rows:], order)}
    if P is not None:
        weights["peephole"] = reordered(P, _PEEPHOLES)
    return weights
