"""`explain`: the plan of a call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyconv.call.operation import CheckedCall, bound, known_functions, operation_of, refusal
from cupyconv.problem.plan import Plan


def explain(function: Callable[..., Any], *args: Any, on: str | None = None, **kwargs: Any) -> Plan:
    """Return the plan of a call: what would run, and why.  Nothing is run or allocated.

    Parameters
    ----------
    function : callable
        `conv`, `linmerge`, `conv_chain`, `conv_transpose`, `conv_grad_input`, `conv_grad_weight`, `im2col`, `col2im`,
        `max_pool`, `avg_pool`, `rnn`, `lstm`, `gru`, `rnn_step`, `lstm_step` or `gru_step`.
    *args, **kwargs
        Arguments of the call.
    on : str, optional
        Architecture of the GPU to plan for, which need not be in this machine; the arguments are then NumPy arrays.
        ``"sm_75"`` (T4), ``"sm_80"`` (A100), ``"sm_86"`` (A10), ``"sm_89"`` (L40), ``"sm_90"`` (H100, H200),
        ``"sm_100"`` (B200) or ``"sm_120"`` (RTX 5090).

    Returns
    -------
    Plan
        Printing it shows the method, why the other methods were not chosen, every kernel and matrix product, temporary
        memory (workspace), operations, bytes, and what limits the speed.  `Plan` explains these lines.

    Raises
    ------
    TypeError
        For a function that has no plan, or `on` together with arrays that are not NumPy's.
    ValueError
        For an unknown architecture, and whenever the call itself would raise.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> xs, weight = [np.ones((4, 4, 1000), np.float32)] * 5, np.ones((4, 20), np.float32)
    >>> plan = cupyconv.explain(cupyconv.linmerge, xs, weight, on="sm_90")
    >>> plan.method, len(plan.steps), plan.workspace_bytes
    ('direct', 1, 0)
    """
    return checked_call(function, *args, on=on, **kwargs).plan()


def checked_call(function: Callable[..., Any], *args: Any, on: str | None = None, **kwargs: Any) -> CheckedCall:
    """Return the checked call that `explain` plans."""
    operation = operation_of(function)
    if operation is None:
        if getattr(function, "__name__", "") in ("vjp", "pullback"):
            raise TypeError(
                "explain takes a function such as conv, not vjp or a pullback: explain(conv, x, weight) plans the forward pass of"
                " vjp(conv, x, weight), explain(conv_grad_input, ...) and explain(conv_grad_weight, ...) the backward pass"
            )
        namesake = ": to plan its forward pass, call explain(cupyconv.{}, ...) with NumPy or CuPy arrays"
        raise TypeError(refusal("explain", known_functions(), function, namesake))
    return operation.checked(bound(function, args, kwargs), on)
