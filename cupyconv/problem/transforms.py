"""The method "fft" as both backends have it: which axes are transformed, what it says of its results.

And the shares of groups, or of outputs, that are computed one after the other where the weight's spectra are too large.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from cupyconv.problem.arrays import Operand, is_complex
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.problems import ConvProblem, NotApplicable, ProductsProblem, Prologue, WeightGradientProblem

#: What a plan says of results.
ERRORS = "rounding errors are relative to the largest elements of a tile"
#: What must fit the workspace limit.
SMALLEST = "the smallest tile with its spectra"
#: Shares of groups or of outputs that are computed one after the other, at most.
MOST_SHARES = 64
#: What may be computed in shares.
Shared = ConvProblem | WeightGradientProblem
SharedT = TypeVar("SharedT", bound=Shared)
#: Of each the array that has a kernel for every output, and those that have an image.
_CUT: dict[type, tuple[str, tuple[str, ...]]] = {
    ConvProblem: ("weight", ("out", "bias", "residual", "pre")),
    WeightGradientProblem: ("out", ("grad",)),
}
#: Where the arrays of a share begin and end along their channels, by name; none where they are whole.
Cut = tuple[tuple[str, int, int], ...]


def no_room(limit: int) -> NotApplicable:
    return NotApplicable(f"{SMALLEST} does not fit the workspace limit of {limit:,} bytes")


def is_real(problem: ProductsProblem) -> bool:
    """Whether transforms are of real numbers."""
    return not (is_complex(problem.x_dtype) or is_complex(problem.factor_dtype))


def transformed_axes(windows: Windows) -> tuple[int, ...]:
    return tuple(axis for axis, taps in enumerate(windows.kernel) if taps > 1)


def share_sizes(geometry: ConvGeometry) -> list[tuple[int, int]]:
    """Groups, and outputs of each, that may be computed together: all, half of them, and so on to `MOST_SHARES`."""
    shares = [(geometry.groups, geometry.group_outputs)]
    while prod(shares[-1]) > max(1, prod(shares[0]) // MOST_SHARES):
        groups, outputs = shares[-1]
        shares.append((-(-groups // 2), outputs) if groups > 1 else (1, -(-outputs // 2)))
    return shares


def share_problem(problem: SharedT, groups: range, outputs: range) -> tuple[SharedT, Cut]:
    """The problem of some groups, or of some outputs of one."""
    geometry = problem.geometry
    if len(groups) == geometry.groups and len(outputs) == geometry.group_outputs:
        return problem, ()
    channels = range(groups.start * geometry.group_channels, groups.stop * geometry.group_channels)
    first = groups.start * geometry.group_outputs + outputs.start
    results = range(first, first + (len(groups) - 1) * geometry.group_outputs + len(outputs))
    cut: dict[str, tuple[int, int]] = {}

    def part(array: Any, own: range, axis: int = 1) -> Any:
        if array is None:
            return None
        cut[array.name] = own.start, own.stop
        shape = (*array.shape[:axis], len(own), *array.shape[axis + 1 :])
        return array.view(shape, array.strides, own.start * array.strides[axis])

    xs: list[Operand] = []
    for x, begin in zip(problem.xs, geometry.channel_offsets):
        own = range(max(channels.start - begin, 0), min(channels.stop - begin, x.shape[1]))
        if own:
            xs.append(part(x, own))
    vectors = problem.prologue
    of_kernels, of_results = _CUT[type(problem)]
    share = replace(
        problem,
        geometry=replace(
            geometry, channels=tuple(x.shape[1] for x in xs), out_channels=len(results), groups=len(groups)
        ),
        xs=tuple(xs),
        prologue=Prologue(part(vectors.scale, channels), part(vectors.shift, channels), vectors.activation),
        **{of_kernels: part(getattr(problem, of_kernels), results, axis=0)},
        **{name: part(getattr(problem, name), results) for name in of_results},
    )
    return share, tuple((name, *own) for name, own in cut.items())
