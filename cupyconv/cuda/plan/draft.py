"""A method's proposal: its steps and workspace, and what they would cost."""

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
    """One way to do a problem."""

    method: str
    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    #: How many times as long it is taken for in a comparison: more than 1 where the model is the least sure of it.
    doubt: float = 1.0

    @property
    def bytes_moved(self) -> int:
        return sum(step.bytes_moved for step in self.steps)

    def cost(self, gpu: GpuModel) -> Cost:
        """Seconds by the model: each step takes the larger of its memory and arithmetic times, and a launch."""
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
        """What enqueuing the steps once more takes the host."""
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
        """The plan to run this for `problem`."""
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
        """What is enqueued, and how often."""
        waiting = [(step, 1) for step in self.steps]
        while waiting:
            step, times = waiting.pop()
            if isinstance(step, (LaunchLoop, Rounds)):
                inner: tuple[Step, ...] = step.launches if isinstance(step, LaunchLoop) else step.first
                waiting += [(each, times * step.times) for each in inner]
            else:
                yield step, times


#: Chunks up to which their steps are listed; and where one is not like the other.
LISTED, MOST_UNLIKE = 8, 1024


def in_rounds(times: int, steps_of: Callable[[int], Sequence[Step]]) -> list[Step]:
    """The steps of chunk 0, 1, ... `times` - 1 in turn: of many, one step with a count.

    Often the first is not like the others: they add to its results, or it lies on a boundary and they do not.
    """
    for lone in (0, 1) if times > LISTED else ():
        first, second = tuple(steps_of(lone)), tuple(steps_of(lone + 1))
        if not first:
            return []
        if going_on(first, second, times - lone - 1) == tuple(steps_of(times - 1)):
            return [*(steps_of(0) if lone else ()), Rounds(first, second, times - lone)]
    if times > MOST_UNLIKE:
        raise NotApplicable(f"{times:,} chunks within the workspace limit, no two alike")
    return [step for i in range(times) for step in steps_of(i)]


def in_sequence(method: str, drafts: Sequence[Draft], reason: str) -> Draft:
    """One draft after the other, in the same workspace: a step has finished with it before the next begins."""
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
    """What there is room for within the limit; where parts in sequence are not together what each of them is, with less room.

    One may take most of the memory of ours, and another most of cuFFT's own.
    """
    room = limit
    while True:
        draft = draft_of(room)
        over = sum(buffer.space for buffer in draft.workspace if not buffer.of) - limit
        if over <= 0:
            return draft
        room -= over


def relocated(value: Any, places: Mapping[str, Address]) -> Any:
    """A step, or a part of one, with every buffer in `places` at that place of another."""
    if isinstance(value, Address):
        place = places.get(value.buffer)
        return Address(place.buffer, place.offset + value.offset) if place else value
    if isinstance(value, tuple):
        return tuple(relocated(part, places) for part in value)
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


def drafted(ways: Iterable[T], draft_of: Callable[[T], Draft]) -> tuple[list[Draft], list[tuple[T, str]]]:
    """The drafts of the ways that apply, and why the others do not."""
    drafts, refusals = [], []
    for way in ways:
        try:
            drafts.append(draft_of(way))
        except NotApplicable as refusal:
            refusals.append((way, str(refusal)))
    return drafts, refusals


def cheapest_of(ways: Iterable[T], draft_of: Callable[[T], Draft], gpu: GpuModel) -> Draft:
    """The cheapest of the ways that apply, or NotApplicable with what the last one says."""
    drafts, refusals = drafted(ways, draft_of)
    if not drafts:
        raise NotApplicable(refusals[-1][1])
    return cheapest(drafts, gpu)


def cheapest(drafts: Iterable[Draft], gpu: GpuModel) -> Draft:
    """The one that takes the least time by the model, and by the doubts in it; of equals the first."""
    return min(drafts, key=lambda draft: draft.cost(gpu).seconds * draft.doubt)
