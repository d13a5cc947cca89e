"""Named types for the signatures of public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

#: A NumPy or CuPy array; all arrays of a call belong to one library.  CuPy has no types, so a checker cannot verify
#: this.
Array: TypeAlias = Any

#: An array if an array was given, a list of arrays if a sequence of arrays was given.
ArrayOrList: TypeAlias = Any

#: One number for all spatial axes, or one per axis.
PerAxis: TypeAlias = int | Sequence[int]

#: One number for all sides, a number or a pair per axis, or a name: "valid", "same", "same_lower", "full", "causal".
Padding: TypeAlias = int | str | Sequence[int] | Sequence[tuple[int, int]]

#: A name, or a tuple of a name and parameters: ``"relu"``, ``("leaky_relu", 0.1)``.
ActivationLike: TypeAlias = str | tuple[Any, ...] | None

#: Scale, shift and activation of ``prologue=``; each may be None.
PrologueLike: TypeAlias = tuple[Array | None, Array | None, ActivationLike]
