"""What of a class ran in a test: the calls in it are planned anew, and each run says something of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cupyconv.call.operation import forget_calls


def runs_seen(monkeypatch: pytest.MonkeyPatch, of: type, said: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """What a fixture yields from: a list that gets what is `said` of each object of this class that runs."""
    seen: list[Any] = []
    run = of.run

    def noted(self: Any, arrays: Any) -> None:
        seen.append(said(self))
        run(self, arrays)

    monkeypatch.setattr(of, "run", noted)
    forget_calls()
    yield seen
    forget_calls()
