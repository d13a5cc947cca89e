"""The draft of a plan: the steps and workspace that a method proposes, and their estimated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.cost import Cost, arithmetic_seconds, memory_seconds
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import (
    Address,
    Buffer,
    Conversion,
    GemmCall,
    KernelLaunch,
    LaunchLoop,
    Matrix,
    Plan,
    Rounds,
    Step,
    Transform,
    going_on,
)
from cupyconv.problem.problems import NotApplicable, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Draft:
    """One proposal to solve a problem."""

    method: str
    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    #: Factor on the estimated time when drafts are compared: more than 1 for the least certain estimates.
    doubt: float = 1.0

    @property
    def bytes_moved(self) -> int:
        return sum(step.bytes_moved for step in self.steps)

    def cost(self, gpu: GpuModel) -> Cost:
        """Return the estimated time: per step, the larger of its memory and arithmetic times, plus one launch."""
        memory = arithmetic = total = 0.0
        launches = 0.0
        for step, times in self._repeated_steps():
            by_bytes = memory_seconds(step, gpu)
            by_flops = arithmetic_seconds(step, gpu)
            memory, arithmetic = memory + times * by_bytes, arithmetic + times * by_flops
            launches += times * gpu.launch_seconds
            total += times * (max(by_bytes, by_flops) + gpu.launch_seconds)
        bound = max((arithmetic, "arithmetic"), (memory, "memory"), (launches, "launch"))[1]
        return Cost(total, bound)

    @property
    def host_seconds(self) -> float:
        """Estimated host time to enqueue all steps in a repeated call."""
        seconds = cost.HOST_CALL
        for step, times in self._repeated_steps():
            seconds += times * (cost.HOST_KERNEL if isinstance(step, KernelLaunch) else cost.HOST_PRODUCT)
        return seconds

    def plan(
        self,
        problem: Problem,
        rejected: tuple[tuple[str, str], ...] = (),
        conversions: tuple[Conversion, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> Plan:
        """Return the plan that runs this draft for `problem`."""
        seconds = self.cost(problem.gpu)
        return problem.planned(
            self.steps,
            method=self.method,
            bytes_moved=self.bytes_moved,
            bound=seconds.bound,
            rejected=rejected,
            reason=self.reason,
            price=f"{seconds}; {cost.on_the_host(self.host_seconds)}",
            notes=notes + self.notes,
            conversions=conversions,
            workspace=self.workspace,
        )

    def _repeated_steps(self) -> Iterator[tuple[Step, int]]:
        """Yield every step that is enqueued, with the number of times."""
        waiting = [(step, 1) for step in self.steps]
        while waiting:
            step, times = waiting.pop()
            if isinstance(step, (LaunchLoop, Rounds)):
                inner: tuple[Step, ...] = step.launches if isinstance(step, LaunchLoop) else step.first
                waiting += [(each, times * step.times) for each in inner]
            else:
                yield step, times


#: A plan lists the steps of up to `LISTED` chunks one by one, and of up to `MAX_UNLIKE` chunks that differ.
LISTED, MAX_UNLIKE = 8, 1024


def in_rounds(times: int, steps_of: Callable[[int], Sequence[Step]]) -> list[Step]:
    """Return the steps of chunks 0, 1, ... `times` - 1 in turn; many chunks become one `Rounds` step.

    The first chunk often differs from the others: the others add to its results, or it is at a boundary.
    """
    for lone in (0, 1) if times > LISTED else ():
        first, second = tuple(steps_of(lone)), tuple(steps_of(lone + 1))
        if not first:
            return []
        if going_on(first, second, times - lone - 1) == tuple(steps_of(times - 1)):
            return [*(steps_of(0) if lone else ()), Rounds(first, second, times - lone)]
    if times > MAX_UNLIKE:
        raise NotApplicable(f"the workspace limit requires {times:,} chunks that all differ, too many for a plan")
    return [step for i in range(times) for step in steps_of(i)]


def in_sequence(method: str, drafts: Sequence[Draft], reason: str) -> Draft:
    """Join drafts that run one after the other in the same workspace: each finishes before the next begins."""
    steps: list[Step] = []
    most = 0
    kept: dict[str, Buffer] = {}
    for draft in drafts:
        places: dict[str, Address] = {}
        used = 0
        for buffer in draft.workspace:
            if buffer.is_kept:
                kept[buffer.name] = max(buffer, kept.get(buffer.name, buffer), key=lambda kept: kept.nbytes)
                continue
            places[buffer.name] = Address("workspace", used)
            used += buffer.space
        steps += [relocated(step, places) for step in draft.steps]
        most = max(most, used)
    notes = tuple(dict.fromkeys(note for draft in drafts for note in draft.notes))
    doubt = max((draft.doubt for draft in drafts), default=1.0)
    workspace = ((Buffer("workspace", most),) if most else ()) + tuple(kept.values())
    return Draft(method, tuple(steps), workspace, reason, notes, doubt)


def within(limit: int, draft_of: Callable[[int], Draft]) -> Draft:
    """Return a draft whose whole workspace is within `limit`, by lowering the limit that `draft_of` gets.

    Each part of a sequence may fit the limit while the sequence does not: one part may need the most memory for our
    buffers, another the most for cuFFT's work area.
    """
    room = limit
    while True:
        draft = draft_of(room)
        over = sum(buffer.space for buffer in draft.workspace if not buffer.of) - limit
        if over <= 0:
            return draft
        room -= over


def relocated(value: Any, places: Mapping[str, Address]) -> Any:
    """Return a step, or a part of one, with every buffer named in `places` moved to its address there."""
    if isinstance(value, Address):
        place = places.get(value.buffer)
        return Address(place.buffer, place.offset + value.offset) if place else value
    if isinstance(value, tuple):
        # Most parts are numbers and names, which have no addresses: they are not worth a call.
        return tuple(relocated(part, places) if type(part) in _HAVE_ADDRESSES else part for part in value)
    if isinstance(value, KernelLaunch):
        return replace(value, params=relocated(value.params, places))
    if isinstance(value, Rounds):
        return replace(value, first=relocated(value.first, places), second=relocated(value.second, places))
    if isinstance(value, LaunchLoop):
        return replace(value, launches=relocated(value.launches, places))
    if isinstance(value, Matrix):
        return replace(value, at=relocated(value.at, places))
    if isinstance(value, GemmCall):
        return replace(value, **{name: relocated(getattr(value, name), places) for name in ("a", "b", "c")})
    if isinstance(value, Transform):
        return replace(value, **{name: relocated(getattr(value, name), places) for name in ("source", "target")})
    return value


_HAVE_ADDRESSES = {Address, tuple, KernelLaunch, Rounds, LaunchLoop, Matrix, GemmCall, Transform}


def drafted(candidates: Iterable[T], draft_of: Callable[[T], Draft]) -> tuple[list[Draft], list[tuple[T, str]]]:
    """Return the drafts of all `candidates` that apply, and the others with the reason why they do not."""
    drafts, refusals = [], []
    for candidate in candidates:
        try:
            drafts.append(draft_of(candidate))
        except NotApplicable as refusal:
            refusals.append((candidate, str(refusal)))
    return drafts, refusals


def cheapest_of(candidates: Iterable[T], draft_of: Callable[[T], Draft], gpu: GpuModel) -> Draft:
    """Return the cheapest draft of all `candidates` that apply; if none does, raise `NotApplicable` with the last reason."""
    drafts, refusals = drafted(candidates, draft_of)
    if not drafts:
        raise NotApplicable(refusals[-1][1])
    return cheapest(drafts, gpu)


def cheapest(drafts: Iterable[Draft], gpu: GpuModel) -> Draft:
    """Return the draft with the smallest product of estimated time and `doubt`; the first one of equals."""
    return min(drafts, key=lambda draft: draft.cost(gpu).seconds * draft.doubt)
