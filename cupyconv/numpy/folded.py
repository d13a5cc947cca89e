"""Input gradient through a padding mode: the gradient with zero padding, plus the folded gradients of the borders.

::

    padded image     | border |          image          | border |
                      c  b  a   . a  b  c . . . x  y  z .  z  y  x        "reflect": a border element copies one inside
                         \\____________^           ^____________/           and its gradient is added there

The gradient of each part of the padded image is a transposed convolution of its own, with zeros around it.  All except
the image's are small.  A border is computed in an array of its own, and then added to the elements that it copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, seconds_of
from cupyconv.numpy.gathered import GatheredLoop, plan_gathered, without_cache, workspace_with_kept
from cupyconv.numpy.windows import five_axes, padded_index
from cupyconv.problem.arrays import accumulator
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import NotApplicable, TransposedProblem

#: Size of the padded image relative to the image, up to which the borders are worth a few calls each.
MAX_PADDED = 2
#: Floating-point operations that make another thread worth waking.
THREAD_FLOPS = 100_000_000
#: A part of the padded image: a range of elements along each axis.  Those of the image begin at 0.
Box = tuple[range, range, range]


@dataclass(frozen=True)
class Border(NumpyStep):
    """Compute a border's gradient, and add it to the elements that the border copies.

    `box` covers the border along its first axis that is not inside the image, and all padding along later axes.
    """

    problem: TransposedProblem
    box: Box
    loops: tuple[NumpyStep, ...]

    @property
    def adds_zeros(self) -> bool:
        """Whether a loop multiplies the weight by zeros where the definition has no term."""
        return any(loop.adds_zeros for loop in cast("tuple[GatheredLoop, ...]", self.loops))

    @property
    def has_zero_taps(self) -> bool:
        """Whether a loop also multiplies x by zeros."""
        return any(loop.has_zero_taps for loop in cast("tuple[GatheredLoop, ...]", self.loops))

    @property
    def seconds(self) -> float:
        return seconds_of(self.loops) + cost.BORDER_CALLS * cost.CALL

    def __str__(self) -> str:
        extents = " x ".join(str(len(along)) for along in self.box)
        lines = [
            f"border   {extents} (d, h, w), added onto the image (padding_mode {self.problem.geometry.padding_mode!r})"
        ]
        return "\n".join(lines + [f"  {loop}" for loop in self.loops])

    def run(self, arrays: Mapping[str, Any]) -> None:
        outs = [out.name for out in self.problem.outs]
        images = {name: five_axes(arrays[name]) for name in outs}
        borders = {
            name: np.empty((*image.shape[:2], *map(len, self.box)), image.dtype) for name, image in images.items()
        }
        for loop in self.loops:
            loop.run({**arrays, **borders})
        for name in outs:
            self._fold(images[name], borders[name])

    def _fold(self, image: np.ndarray, border: np.ndarray) -> None:
        geometry = self.problem.geometry
        inside = [along == range(size) for along, size in zip(self.box, geometry.size)]
        own = inside.index(False)
        for axis in reversed(range(own + 1, 3)):
            size = geometry.size[axis]
            within = _along(border, axis, range(geometry.before[axis], geometry.before[axis] + size))
            for beside in (range(-geometry.before[axis], 0), range(size, size + geometry.after[axis])):
                first = beside.start + geometry.before[axis]
                self._add(within, axis, beside, _along(border, axis, range(first, first + len(beside))))
            border = within
        self._add(image, own, self.box[own], border)

    def _add(self, image: np.ndarray, axis: int, beside: range, border: np.ndarray) -> None:
        """Add the elements of a border along an axis to the elements of the image that they copy."""
        if not beside:
            return
        mode = self.problem.geometry.padding_mode
        size = self.problem.geometry.size[axis]
        index = padded_index(np.array([beside[0], beside[-1]]), size, mode).tolist()
        if mode == "edge":
            at = _along(image, axis, range(index[0], index[0] + 1))
            at += border.sum(2 + axis, keepdims=True)
        else:
            backwards = index[1] < index[0]
            at = _along(image, axis, range(min(index), max(index) + 1))
            at += np.flip(border, 2 + axis) if backwards else border


def _kept(steps: Iterable[Any]) -> int:
    """Bytes that these steps keep between calls."""
    return sum(step.cached_memory for step in steps if isinstance(step, GatheredLoop))


def _along(image: np.ndarray, axis: int, run: range) -> np.ndarray:
    """Return a view of some elements along a spatial axis."""
    return image[(slice(None),) * (2 + axis) + (slice(run.start, run.stop),)]


def plan_folded(problem: TransposedProblem) -> Plan:
    """Plan an image and its borders, all gathered; raise ValueError if that does not apply."""
    geometry = problem.geometry
    sizes = list(zip(geometry.before, geometry.size, geometry.after))
    padded = prod(map(sum, sizes))
    if padded > MAX_PADDED * prod(geometry.size) or any(max(before, after) >= size for before, size, after in sizes):
        raise NotApplicable("the borders are as large as the image")
    if problem.dtype != accumulator(problem.dtype):
        raise NotApplicable("the sums would be rounded twice")
    image = plan_gathered(replace(problem, geometry=replace(geometry, padding_mode="constant")))
    beside, parts = 0, [(image.workspace_bytes, _kept(image.steps))]
    borders: list[Border] = []
    for box in _borders(geometry):
        shape = (*map(len, box),)
        outs = tuple(
            replace(out, shape=(*out.shape[:2], *shape), offset=0).in_c_order(out.dtype) for out in problem.outs
        )
        nbytes = sum(out.nbytes for out in outs)
        if nbytes > problem.limit // 2:
            raise NotApplicable("the borders do not fit the workspace limit")
        part = replace(problem, geometry=_part(geometry, box), outs=outs, workspace_limit=problem.limit - 2 * nbytes)
        if problem.method == "winograd":
            part = replace(part, method="auto")  # Winograd's method is not for strips
        threads = max(1, min(problem.host.threads, part.flops // THREAD_FLOPS))
        plan = plan_gathered(replace(part, machine=replace(problem.host, threads=threads)))
        beside = max(beside, 2 * nbytes)
        parts.append((plan.workspace_bytes + 2 * nbytes, _kept(plan.steps)))
        borders.append(Border(problem, box, cast("tuple[NumpyStep, ...]", plan.steps)))
    workspace, of_image = workspace_with_kept(parts, problem.limit), image.steps
    if workspace is None:
        borders = [replace(border, loops=without_cache(border.loops)) for border in borders]
        (alone, kept), *others = parts
        workspace = max(alone, *(own + kept for own, _ in others))
        if workspace > problem.limit:
            of_image, workspace = without_cache(image.steps), max(own for own, _ in parts)
    steps = [*of_image, *borders]
    return replace(
        image,
        problem=problem.title,
        steps=tuple(steps),
        reason=f"{image.reason}, borders computed separately",
        price=cost.by_model(seconds_of(steps)),
        workspace=(Buffer("borders", beside), Buffer("blocks", workspace - beside)),
    )


def _borders(geometry: ConvGeometry) -> Iterator[Box]:
    """Yield the parts of the padded image around the image, without overlap."""
    for axis in range(3):
        size = geometry.size[axis]
        for along in (range(-geometry.before[axis], 0), range(size, size + geometry.after[axis])):
            if along:
                inner = [range(size) for size in geometry.size[:axis]]
                outer = [
                    range(-before, size + after)
                    for before, size, after in zip(
                        geometry.before[axis + 1 :], geometry.size[axis + 1 :], geometry.after[axis + 1 :]
                    )
                ]
                yield cast("Box", (*inner, along, *outer))


def _part(geometry: ConvGeometry, box: Box) -> ConvGeometry:
    """Return the geometry of the convolution on a part of the padded image, with zeros around it."""
    before = tuple(pad + along.start for pad, along in zip(geometry.before, box))
    ends = [size + after for size, after in zip(geometry.size, geometry.after)]
    return replace(
        geometry,
        padding_mode="constant",
        size=tuple(map(len, box)),  # type: ignore[arg-type]
        before=before,  # type: ignore[arg-type]
        after=tuple(end - along.stop for end, along in zip(ends, box)),  # type: ignore[arg-type]
    )
