"""The parts of the method "fft" that both backends share: transformed axes, shares, and words for plans.

If the weight's spectra are too large, shares of the groups or of the output channels are computed one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from cupyconv.problem.arrays import Operand, is_complex
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.problems import ConvProblem, NotApplicable, ProductsProblem, Prologue, WeightGradientProblem

#: A plan's note on the results.
ERRORS = "rounding errors are relative to the largest elements of a tile"
#: The smallest unit that must fit the workspace limit.
SMALLEST = "the smallest tile with its spectra"
#: Maximum number of shares of groups or output channels that are computed one after the other.
MAX_SHARES = 64
#: Problems that may be computed in shares.
Shared = ConvProblem | WeightGradientProblem
SharedT = TypeVar("SharedT", bound=Shared)
#: For each, the array with one kernel per output channel, and the arrays with one image per output channel.
_CUT: dict[type, tuple[str, tuple[str, ...]]] = {
    ConvProblem: ("weight", ("out", "bias", "residual", "pre")),
    WeightGradientProblem: ("out", ("grad",)),
}
#: Name, begin and end along the channels of each array of a share; empty if the arrays are whole.
Cut = tuple[tuple[str, int, int], ...]


def does_not_fit(limit: int) -> NotApplicable:
    return NotApplicable(f"{SMALLEST} does not fit the workspace limit of {limit:,} bytes")


def is_real(problem: ProductsProblem) -> bool:
    """Whether the transforms are of real numbers."""
    return not (is_complex(problem.x_dtype) or is_complex(problem.factor_dtype))


def transformed_axes(windows: Windows) -> tuple[int, ...]:
    return tuple(axis for axis, taps in enumerate(windows.kernel) if taps > 1)


def share_sizes(geometry: ConvGeometry) -> list[tuple[int, int]]:
    """Numbers of groups and of outputs per group that may be computed together.

    The first entry is all of them; each further entry is half of the previous one, down to 1 / `MAX_SHARES`.
    """
    shares = [(geometry.groups, geometry.group_outputs)]
    while prod(shares[-1]) > max(1, prod(shares[0]) // MAX_SHARES):
        groups, outputs = shares[-1]
        shares.append((-(-groups // 2), outputs) if groups > 1 else (1, -(-outputs // 2)))
    return shares


def share_problem(problem: SharedT, groups: range, outputs: range) -> tuple[SharedT, Cut]:
    """The problem of some groups, or of some output channels of one group."""
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
