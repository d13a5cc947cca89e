"""The types in the signatures of public functions, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

#: A NumPy array or a CuPy array; all arrays of a call are of one library.  CuPy is not typed, so no checker can tell.
Array: TypeAlias = Any

#: An array where one was given, a list of arrays where a sequence of them was.
ArrayOrList: TypeAlias = Any

#: One number for all spatial axes, or one for each.
PerAxis: TypeAlias = int | Sequence[int]

#: One number for all sides, one or a pair for each axis, or a name: "valid", "same", "same_lower", "full", "causal".
Padding: TypeAlias = int | str | Sequence[int] | Sequence[tuple[int, int]]

#: A name, or a tuple of a name and parameters: ``"relu"``, ``("leaky_relu", 0.1)``.
ActivationLike: TypeAlias = str | tuple[Any, ...] | None

#: Scale, shift and activation of ``prologue=``; each may be None.
PrologueLike: TypeAlias = tuple[Array | None, Array | None, ActivationLike]
