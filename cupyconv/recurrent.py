"""`rnn`, `lstm` and `gru` over a sequence, and single steps of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyconv.calls.recurrent import (
    flat_results,
    on_backend,
    prepare_gru,
    prepare_gru_step,
    prepare_lstm,
    prepare_lstm_step,
    prepare_rnn,
    prepare_rnn_step,
)
from cupyconv.repetition import call
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
        A name, or a tuple with parameters, of the table that ``help("cupyconv.activations")`` shows; for
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
    y, h = call(
        prepare_rnn,
        {
            "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
            "lengths": on_backend(lengths, x), "out": out,
        },
        {"direction": direction, "activation": activation, "clip": clip, "method": method},
    )  # fmt: skip
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
    y, h, c = call(
        prepare_lstm,
        {
            "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
            "c0": c0, "peephole": peephole, "lengths": on_backend(lengths, x), "out": flat_results(out),
        },
        {
            "direction": direction, "activations": activations, "input_forget": input_forget, "clip": clip,
            "method": method,
        },
    )  # fmt: skip
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
        state before the product, ``n = tanh(u_n + weight_hh_n @ (r * h[t - 1]) + bias_hh_n)``: two products a step, one
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
    y, h = call(
        prepare_gru,
        {
            "x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh, "h0": h0,
            "lengths": on_backend(lengths, x), "out": out,
        },
        {
            "direction": direction, "activations": activations, "linear_before_reset": linear_before_reset,
            "clip": clip, "method": method,
        },
    )  # fmt: skip
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
    (next_h,) = call(
        prepare_rnn_step,
        {
            "x": x, "h": h, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh,
            "out": out,
        },
        {"activation": activation, "clip": clip, "method": method},
    )  # fmt: skip
    return next_h


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
    next_h, next_c = call(
        prepare_lstm_step,
        {
            "x": x, "h": h, "c": c, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih,
            "bias_hh": bias_hh, "peephole": peephole, "out": out,
        },
        {
            "activations": activations, "input_forget": input_forget, "clip": clip, "method": method,
        },
    )  # fmt: skip
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
    (next_h,) = call(
        prepare_gru_step,
        {
            "x": x, "h": h, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh,
            "out": out,
        },
        {
            "activations": activations, "linear_before_reset": linear_before_reset, "clip": clip, "method": method,
        },
    )  # fmt: skip
    return next_h
