"""The table of activation functions: names, parameters, codes.

A CUDA kernel receives the code (``kernels/activation.cuh`` switches on it at run time).  The NumPy backend looks up its
function by name.  Both are tested against the same definitions.

======================= ======================================= ==========================
name                    f(v)                                    parameters (default)
======================= ======================================= ==========================
relu                    max(v, 0)
relu6                   min(max(v, 0), 6)
leaky_relu              v if v >= 0 else alpha v                alpha (0.01)
clip                    min(max(v, low), high)                  low, high (required)
hard_sigmoid            min(max(alpha v + beta, 0), 1)          alpha (0.2), beta (0.5)
hardswish               v min(max(v / 6 + 1/2, 0), 1)
elu                     v if v >= 0 else alpha (exp(v) - 1)     alpha (1)
sigmoid                 1 / (1 + exp(-v))
tanh                    tanh(v)
gelu                    v (1 + erf(v / sqrt 2)) / 2
gelu_tanh               gelu, erf approximated through tanh
silu                    v sigmoid(v)
mish                    v tanh(softplus(v))
softplus                log(1 + exp(v))
----------------------- --------------------------------------- --------------------------
affine                  alpha v + beta                          alpha (1), beta (0)
thresholded_relu        0 if v < alpha else v                   alpha (1)
scaled_tanh             alpha tanh(beta v)                      alpha (1), beta (1)
softsign                v / (1 + |v|)
======================= ======================================= ==========================

Only the recurrent functions accept the activations below the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

#: name -> (code in kernels/activation.cuh, default parameters; None marks a required one)
TABLE: dict[str, tuple[int, tuple[float | None, ...]]] = {
    "relu": (1, ()),
    "relu6": (2, ()),
    "clip": (3, (None, None)),
    "leaky_relu": (4, (0.01,)),
    "hard_sigmoid": (5, (0.2, 0.5)),
    "hardswish": (6, ()),
    "elu": (7, (1.0,)),
    "sigmoid": (8, ()),
    "tanh": (9, ()),
    "gelu": (10, ()),
    "gelu_tanh": (11, ()),
    "silu": (12, ()),
    "mish": (13, ()),
    "softplus": (14, ()),
}

#: Activations that only the recurrent functions accept; a convolution refuses them.
RECURRENT_ONLY: dict[str, tuple[int, tuple[float | None, ...]]] = {
    "affine": (15, (1.0, 0.0)),
    "thresholded_relu": (16, (1.0,)),
    "scaled_tanh": (17, (1.0, 1.0)),
    "softsign": (18, ()),
}


@dataclass(frozen=True)
class Activation:
    """A resolved activation: its name, its code and up to two parameters."""

    name: str
    code: int
    alpha: float = 0.0
    beta: float = 0.0

    def __bool__(self) -> bool:
        return self.code != 0

    def __str__(self) -> str:
        return self.name

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval that the function clips values to; None if it does anything else."""
        if self.name == "clip":
            return self.alpha, self.beta
        return {"none": (-inf, inf), "relu": (0.0, inf), "relu6": (0.0, 6.0)}.get(self.name)


IDENTITY = Activation("none", 0)


def derivative_from_result(activation: Activation) -> bool:
    """Whether ``f'(v)`` can be computed from ``f(v)``: a backward pass then needs only the result, not `v`."""
    return activation.name in ("relu", "sigmoid", "tanh") or (activation.name == "leaky_relu" and activation.alpha > 0)


def resolve_activation(activation: Any, *, recurrent: bool = False) -> Activation:
    """Return ``None``, a name, or a tuple ``(name, parameters...)`` as an `Activation`; refuse anything else."""
    if activation is None:
        return IDENTITY
    name, *given = activation if isinstance(activation, (tuple, list)) and activation else (activation,)
    if not isinstance(name, str):
        own = "; apply your own function to the result instead" if callable(name) else ""
        raise TypeError(f"activation must be None, a name or a tuple (name, parameters...), not {activation!r}{own}")
    known = TABLE | RECURRENT_ONLY if recurrent else TABLE
    if name in RECURRENT_ONLY and not recurrent:
        raise ValueError(
            f"activation {name!r} is supported only by the recurrent functions; known here are {', '.join(known)}"
        )
    if name not in known:
        plain = {one.replace("_", ""): one for one in known}.get(name.replace("_", "").lower())
        hint = f": write {plain!r}" if plain else ""
        raise ValueError(f"unknown activation {name!r}{hint}; known are {', '.join(known)}")
    code, defaults = known[name]
    required = sum(default is None for default in defaults)
    if not required <= len(given) <= len(defaults):
        count = f"{required} to {len(defaults)}" if required < len(defaults) else f"{required}"
        raise ValueError(
            f"activation {name!r} takes {count} parameters, given {len(given)}; an activation with parameters is a tuple,"
            f" ({name!r}, ...)"
        )
    values = [as_float(f"a parameter of activation {name!r}", value) for value in given]
    values += [default for default in defaults[len(values) :] if default is not None]
    if name == "clip" and not values[0] <= values[1]:
        raise ValueError(f"activation 'clip' needs low <= high, given {values[0]} and {values[1]}")
    return Activation(name, code, *values)


def as_float(name: str, value: Any) -> float:
    """Return a real number as a float; refuse other values, also bool, and numbers that are too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, given {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be within the range of a float, given {value!r}") from None
