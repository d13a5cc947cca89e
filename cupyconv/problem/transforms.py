"""The method "fft" as both backends have it: which axes are transformed, when it cannot be had, what it says of its results."""

from __future__ import annotations

from cupyconv.problem.arrays import is_complex
from cupyconv.problem.geometry import Windows
from cupyconv.problem.problems import NotApplicable, ProductsProblem

#: What a plan says of results.
ERRORS = "rounding errors are relative to the largest elements of a tile"


def refusal_of(problem: ProductsProblem) -> str:
    """Why transforms cannot do a problem."""
    if not problem.allow_fft:
        return "options(allow_fft=False) forbids it"
    if problem.geometry.taps == 1:
        return "it is for kernels of several taps"
    return ""


def no_room(limit: int) -> NotApplicable:
    return NotApplicable(f"the smallest tile and its spectra do not fit the workspace limit of {limit:,} bytes")


def is_real(problem: ProductsProblem) -> bool:
    """Whether transforms are of real numbers."""
    return not (is_complex(problem.x_dtype) or is_complex(problem.factor_dtype))


def transformed_axes(windows: Windows) -> tuple[int, ...]:
    return tuple(axis for axis, taps in enumerate(windows.kernel) if taps > 1)
