"""`rnn_step`, `lstm_step` and `gru_step`: single steps, for sequences that arrive step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from cupyconv.call.operation import Operation
from cupyconv.ops.recurrent import CHECKS, WEIGHTS, unpack_results
from cupyconv.typing import ActivationLike, Array


def rnn_step(
    x: Array,
    h: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    *unnamed: Never,
    activation: ActivationLike = "tanh",
    clip: float | None = None,
    method: str = "auto",
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Apply one step of `rnn`, for sequences that arrive step by step.

    Parameters
    ----------
    x, h : array
        The input ``(N, I)``, and the state before the step, ``(N, H)``.
    weight_ih, weight_hh, bias_ih, bias_hh, activation, clip, method
        As for `rnn` in one direction.
    out : array, optional
        Array for the result.  It may not overlap `h`, because every element of the result depends on all of `h`.

    Returns
    -------
    array
        ``(N, H)``: the state after the step.

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
    *unnamed: Never,
    peephole: Array | None = None,
    activations: Sequence[Any] = ("sigmoid", "tanh", "tanh"),
    input_forget: bool = False,
    clip: float | None = None,
    method: str = "auto",
    out: Sequence[Any] | None = None,
    **foreign: Never,
) -> tuple[Array, Array]:
    """Apply one step of `lstm`, for sequences that arrive step by step.

    Parameters
    ----------
    x, h, c : array
        The input ``(N, I)``, and the states before the step, ``(N, H)``.
    weight_ih, weight_hh, bias_ih, bias_hh, peephole, activations, input_forget, clip, method
        As for `lstm` in one direction.
    out : tuple of arrays, optional
        Arrays for both results; they may not overlap `h` and `c`.

    Returns
    -------
    h, c : pair of arrays
        ``(N, H)``: the states after the step.

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
    *unnamed: Never,
    activations: Sequence[Any] = ("sigmoid", "tanh"),
    linear_before_reset: bool = True,
    clip: float | None = None,
    method: str = "auto",
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Apply one step of `gru`, for sequences that arrive step by step.

    Parameters
    ----------
    x, h : array
        The input ``(N, I)``, and the state before the step, ``(N, H)``.
    weight_ih, weight_hh, bias_ih, bias_hh, activations, linear_before_reset, clip, method
        As for `gru` in one direction.
    out : array, optional
        As for `rnn_step`.

    Returns
    -------
    array
        ``(N, H)``: the state after the step.

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


_STEP, _LSTM_STEP = ("x", "h", *WEIGHTS, "out"), ("x", "h", "c", *WEIGHTS, "peephole", "out")
RNN_STEP = Operation(rnn_step, CHECKS["rnn"], _STEP, unpack=unpack_results)
LSTM_STEP = Operation(lstm_step, CHECKS["lstm"], _LSTM_STEP, unpack=unpack_results)
GRU_STEP = Operation(gru_step, CHECKS["gru"], _STEP, unpack=unpack_results)
