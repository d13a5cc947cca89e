"""What happens to each element of the inputs as it is loaded:  f(scale[c] * x + shift[c]), c counts merged channels.

The definition is of the transformed image: padding is of zeros that are not transformed, and a padding mode's
elements are copies of transformed ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.operands import Operand


@dataclass(frozen=True)
class Prologue:
    """`scale` and `shift` as vectors of the merged channels, (1, C, 1, 1, 1); either may be absent."""

    scale: Operand | None = None
    shift: Operand | None = None
    activation: Activation = IDENTITY

    def __bool__(self) -> bool:
        return bool(self.scale or self.shift or self.activation)

    def __str__(self) -> str:
        inner = "scale * x" if self.scale else "x"
        inner += " + shift" if self.shift else ""
        return f"{self.activation}({inner})" if self.activation else inner

    @property
    def vectors(self) -> tuple[Operand, ...]:
        return tuple(vector for vector in (self.scale, self.shift) if vector)


#: Elements are taken as they lie.
NONE = Prologue()
