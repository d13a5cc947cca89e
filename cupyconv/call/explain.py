"""`explain`: the plan of a call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from cupyconv.call.call import Call
from cupyconv.ops.columns import col2im, im2col, prepare_col2im, prepare_im2col
from cupyconv.ops.conv import conv, linmerge, prepare_conv, prepare_linmerge, prologue_parts
from cupyconv.ops.conv_chain import conv_chain, prepare_conv_chain
from cupyconv.ops.conv_grad_input import conv_grad_input
from cupyconv.ops.conv_grad_weight import conv_grad_weight, prepare_conv_grad_weight
from cupyconv.ops.conv_transpose import conv_transpose, prepare_conv_grad_input, prepare_conv_transpose
from cupyconv.ops.pooling import max_pool, prepare_max_pool
from cupyconv.ops.recurrent import (
    gru,
    gru_step,
    lstm,
    lstm_step,
    prepare_gru,
    prepare_gru_step,
    prepare_lstm,
    prepare_lstm_step,
    prepare_rnn,
    prepare_rnn_step,
    rnn,
    rnn_step,
)
from cupyconv.problem.plan import Plan

_PREPARE: dict[Callable[..., Any], Callable[..., Call]] = {
    conv: prepare_conv,
    linmerge: prepare_linmerge,
    conv_chain: prepare_conv_chain,
    conv_transpose: prepare_conv_transpose,
    conv_grad_input: prepare_conv_grad_input,
    conv_grad_weight: prepare_conv_grad_weight,
    im2col: prepare_im2col,
    col2im: prepare_col2im,
    max_pool: prepare_max_pool,
    rnn: prepare_rnn,
    lstm: prepare_lstm,
    gru: prepare_gru,
    rnn_step: prepare_rnn_step,
    lstm_step: prepare_lstm_step,
    gru_step: prepare_gru_step,
}


def _no_plan(function: Any) -> str:
    known = [f.__name__ for f in _PREPARE]
    message = f"explain takes one of {', '.join(known)}, and then its arguments, given "
    if not callable(function):
        given = repr(function) if function is None or isinstance(function, str) else type(function).__name__
        return f"{message}{given}: write explain(conv, x, weight), without calling conv"
    name = getattr(function, "__name__", repr(function))
    base = name.removesuffix("_vjp")  # a pullback's forward pass, or another framework's twin
    hint = f": its forward pass is explain(cupyconv.{base}, ...) of NumPy or CuPy arrays" if base in known else ""
    return f"{message}{name!r}{hint}"


def explain(function: Callable[..., Any], *args: Any, on: str | None = None, **kwargs: Any) -> Plan:
    """What a call would run, and why; nothing is run or allocated.

    Parameters
    ----------
    function : callable
        `conv`, `linmerge`, `conv_chain`, `conv_transpose`, `conv_grad_input`, `conv_grad_weight`, `im2col`,
        `col2im`, `max_pool`, `rnn`, `lstm`, `gru`, `rnn_step`, `lstm_step` or `gru_step`.
    *args, **kwargs
        The call's arguments.
    on : str, optional
        A GPU's architecture: the plan is for that GPU, which need not be in this machine, and the arguments are
        NumPy arrays.  ``"sm_75"`` (T4), ``"sm_80"`` (A100), ``"sm_86"`` (A10), ``"sm_89"`` (L40), ``"sm_90"`` (H100, H200),
        ``"sm_100"`` (B200) or ``"sm_120"`` (RTX 5090).

    Returns
    -------
    Plan
        Print it for a page to read: the method, why not the others, every kernel and matrix product, temporary memory
        (workspace), operations, bytes, and what limits the speed.  `Plan` explains its lines.

    Raises
    ------
    TypeError
        For a function that has no plan, or `on` beside arrays that are not NumPy's.
    ValueError
        For an unknown architecture, and wherever the call itself would raise.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> xs, weight = [np.ones((4, 4, 1000), np.float32)] * 5, np.ones((4, 20), np.float32)
    >>> plan = cupyconv.explain(cupyconv.linmerge, xs, weight, on="sm_90")
    >>> plan.method, len(plan.steps), plan.workspace_bytes
    ('direct', 1, 0)
    """
    prepare = next((prepare for known, prepare in _PREPARE.items() if known is function), None)
    if prepare is None:
        raise TypeError(_no_plan(function))
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None
    if function in (conv, linmerge):
        names = ("scale", "shift", "prologue_activation")
        kwargs |= zip(names, prologue_parts(kwargs.pop("prologue", None)))
    return prepare(*args, on=on, **kwargs).plan()
