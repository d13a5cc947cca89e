"""Shared by the tests of refusals: arrays before they are on a device, and checks of a refusal's message and effects.

A refusal is a valid call with one fault, and the words that its message must contain: the argument's name, what was
given and what was needed.  The words are regular expressions; each one must match somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from targets import Target

import cupyconv
from cupyconv.problem.problems import NotApplicable


@dataclass(frozen=True)
class Ones:
    """An array of ones, before it is on a device."""

    shape: tuple[int, ...]
    dtype: Any = "float32"


def placed(value: Any, target: Target) -> Any:
    """Return `value` with every `Ones` in it replaced by an array of the target."""
    if isinstance(value, Ones):
        return target.to_device(np.ones(value.shape, value.dtype))
    if isinstance(value, list):
        return [placed(entry, target) for entry in value]
    return value


def assert_refused(
    target: Target, error: type[Exception], words: Iterable[str], function: Callable, *args: Any, **kwargs: Any
) -> None:
    """Check that the call raises `error` with all `words`, and that `out` and the device's log do not change."""
    out = kwargs.get("out")
    before = out.tobytes() if hasattr(out, "tobytes") else None
    launched = None if target.device is None else len(target.device.log)
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    missing = [word for word in words if not re.search(word, message)]
    assert not missing, f"{missing} not said in: {message}"
    assert not re.search(r"[^\s\[(,'=]None(?!Type)", message), f"a hint that is none is said in: {message}"
    if before is not None:
        assert out.tobytes() == before, "out was written to"
    if launched is not None:
        assert len(target.device.log) == launched, "something was launched"


def table(*rows: tuple) -> Any:
    """Return rows (id, ...) as pytest parameters."""
    return [pytest.param(*values, id=name) for name, *values in rows]


def numpy_arrays() -> Target:
    return Target("numpy", np.array, np.asarray, np)


def foreign(module: str, name: str) -> Any:
    """Return an object whose class claims to come from another library."""
    return type(name, (), {"__module__": module, "shape": (2, 5, 8, 9), "ndim": 4, "dtype": np.dtype("f4")})()


#: A valid call of `conv` with two inputs of 3 and 2 channels, and 4 output channels.
CONV = dict(
    x=[Ones((2, 3, 8, 9)), Ones((2, 2, 8, 9))],
    weight=Ones((4, 5, 3, 3)),
    bias=Ones((4,)),
    residual=Ones((2, 4, 6, 7)),
    out=Ones((2, 4, 6, 7)),
)


def conv_arguments(target: Target, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: placed(value, target) for name, value in (CONV | changes).items()}


def least_workspace(call: Callable[[], object]) -> int:
    """Return the workspace that a call needs, read from its refusal without workspace; 0 if it needs none."""
    with cupyconv.options(workspace_limit=0):
        try:
            call()
        except ValueError as refusal:
            needed = re.search(r"needs ([\d,]+) bytes", str(refusal))
            assert needed is not None, refusal
            return int(needed[1].replace(",", ""))
    return 0


def smallest_block(loops: Callable[[Any], Any], problem: Any, limit: int) -> tuple[int, str, Any]:
    """Return the first limit that is enough, the words of the last refusal, and what `loops` returns with this limit.

    The limit is raised to the bytes that each refusal names.  These must be more than there were.
    """
    words = ""
    while True:
        try:
            return limit, words, loops(replace(problem, workspace_limit=limit))
        except NotApplicable as refusal:
            words = str(refusal)
            assert refusal.needed > limit
            limit = refusal.needed
