"""What tests of refusals share: arrays before they are on a device, and what a refusal must say and leave undone.

A refusal is a valid call with one thing wrong, and the words its message must hold: the argument's name, what was given
and what was needed.  The words are regular expressions, searched for one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from targets import Target

import cupyconv


@dataclass(frozen=True)
class Ones:
    """An array of ones, before it is on a device."""

    shape: tuple[int, ...]
    dtype: Any = "float32"


def placed(value: Any, target: Target) -> Any:
    """`value` with every `Ones` in it as an array of the target."""
    if isinstance(value, Ones):
        return target.to_device(np.ones(value.shape, value.dtype))
    if isinstance(value, list):
        return [placed(entry, target) for entry in value]
    return value


def assert_refused(
    target: Target, error: type[Exception], words: Iterable[str], function: Callable, *args: Any, **kwargs: Any
) -> None:
    """The call raises `error` and says all `words`; `out` and the device's log stay as they are."""
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
    """Rows (id, ...) as pytest parameters."""
    return [pytest.param(*values, id=name) for name, *values in rows]


def numpy_arrays() -> Target:
    return Target("numpy", np.array, np.asarray, np)


def foreign(module: str, name: str) -> Any:
    """An object of a class that says it comes from another library."""
    return type(name, (), {"__module__": module, "shape": (2, 5, 8, 9), "ndim": 4, "dtype": np.dtype("f4")})()


#: A valid call of `conv`, in which two inputs of 3 and 2 channels make 4.
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
    """What the refusal says that a call needs, which finds no workspace; 0 where it needs none."""
    with cupyconv.options(workspace_limit=0):
        try:
            call()
        except ValueError as refusal:
            needed = re.search(r"needs ([\d,]+) bytes", str(refusal))
            assert needed is not None, refusal
            return int(needed[1].replace(",", ""))
    return 0
