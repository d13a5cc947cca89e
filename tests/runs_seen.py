"""Which objects of a class run in a test: the test plans its calls again, and each run adds an entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cupyconv.call.operation import forget_calls


def runs_seen(monkeypatch: pytest.MonkeyPatch, of: type, said: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Yield, for a fixture, a list that receives `said(one)` for each object of this class that runs."""
    seen: list[Any] = []
    run = of.run

    def noted(self: Any, arrays: Any) -> None:
        seen.append(said(self))
        run(self, arrays)

    monkeypatch.setattr(of, "run", noted)
    forget_calls()
    yield seen
    forget_calls()
