"""A chain of convolutions: the choice between fused and unfused, and the loop over one layer after the other.

Unfused, each layer is planned like a call of `conv`, for as many samples at a time as leave it enough memory.  Fused,
tiles of rows go through all layers (`chain_fused`).  The cost model of `conv` estimates the time of both, and the
faster one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.block_loops import BlockLoop
from cupyconv.numpy.chain_fused import ChainLoop, plan_fused
from cupyconv.numpy.choice import long_loop
from cupyconv.numpy.convolution import plan_conv
from cupyconv.problem.arrays import Operand, dtype_from_name
from cupyconv.problem.geometry import even_part, ranges_of
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.problems import ChainProblem, ConvProblem, NotApplicable, without_empty_inputs

#: Factor by which tiles may take longer than layers whose images exceed the workspace limit.
BEYOND_LIMIT = 1.05

# --- the choice -----------------------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A plan, its estimated seconds, and whether it stays within the workspace limit."""

    plan: Plan
    seconds: float
    fits: bool = True


def plan_chain(problem: ChainProblem) -> Plan:
    """Plan a chain; ValueError if ``fuse=True`` and nothing can be fused, or if nothing fits the limit."""
    problem = replace(problem, layers=(without_empty_inputs(problem.layers[0]), *problem.layers[1:]))
    if problem.layers[-1].out.nbytes == 0:
        return problem.planned((), method="unfused", reason="the result is empty", notes=_notes(problem))
    if problem.fuse is False:
        return replace(_unfused(problem).plan, rejected=(("fused", "fuse=False was asked for"),))
    try:
        fused = _fused(problem)
    except NotApplicable as reason:
        if problem.fuse is True:
            raise ValueError(f"fuse=True does not apply: {reason}") from None
        return replace(_unfused(problem).plan, rejected=(("fused", str(reason)),))
    if problem.fuse is True:
        return replace(fused.plan, rejected=(("unfused", "fuse=True was asked for"),))
    unfused = _unfused(problem)
    if unfused.seconds * (1 if unfused.fits else BEYOND_LIMIT) <= fused.seconds:
        return replace(unfused.plan, rejected=(("fused", fused.plan.how),))
    why_not = f"{unfused.plan.price}, and the intermediate images take {problem.intermediate_bytes:,} bytes"
    return replace(fused.plan, rejected=(("unfused", why_not),))


def _fused(problem: ChainProblem) -> _Candidate:
    """Plan tiles that go through all layers."""
    loop, sizes, seconds = plan_fused(problem)
    samples, rows = loop.tile
    reason = f"tiles of {counted(samples, 'sample')} x {counted(rows, 'row')} through all layers"
    return _Candidate(_planned(problem, "fused", reason, loop, sizes, seconds), seconds)


def _planned(
    problem: ChainProblem,
    method: str,
    reason: str,
    loop: LayersLoop | ChainLoop,
    sizes: Mapping[str, int],
    seconds: float,
    notes: tuple[str, ...] = (),
) -> Plan:
    return problem.planned(
        (loop,),
        sizes,
        method=method,
        reason=reason,
        price=cost.by_model(seconds),
        notes=_notes(problem) + notes + long_loop((loop,)),
    )


def _notes(problem: ChainProblem) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for layer in problem.layers for note in layer.notes))


# --- one layer after the other --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayersLoop(NumpyStep):
    """Layers one after the other, `samples` samples at a time, each run like a call of `conv`.

    `plans` has a tuple of plans, one per layer, for each number of samples that is computed at a time.
    """

    problem: ChainProblem
    samples: int
    plans: tuple[tuple[Plan, ...], ...]

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes + 2 * self.problem.intermediate_bytes

    @property
    def times(self) -> int:
        """Number of times that a part of the samples goes through all layers."""
        return -(-self.problem.layers[-1].geometry.batch // self.samples)

    @cached_property
    def _runs(self) -> list[tuple[int, BlockLoop]]:
        """Every loop, and how often it runs."""
        whole = self.problem.layers[-1].geometry.batch // self.samples
        return [
            (times, cast(BlockLoop, step))
            for times, plans in zip((whole, 1), self.plans)
            for plan in plans
            for step in plan.steps
        ]

    @cached_property
    def seconds(self) -> float:
        at_a_time = sum(_slot_bytes(_of_samples(self.problem.layers, self.samples)))
        stored = cost.between(self.problem.intermediate_bytes, at_a_time)
        return stored + sum(times * loop.seconds for times, loop in self._runs)

    @property
    def turns(self) -> int:
        return sum(times * loop.turns for times, loop in self._runs)

    @property
    def calls(self) -> float:
        return sum(times * loop.calls for times, loop in self._runs)

    def __str__(self) -> str:
        layers, samples = counted(len(self.problem.layers), "layer"), counted(self.samples, "sample")
        lines = [f"loop     {layers}, {samples} at a time, {counted(self.times, 'time')}"]
        lines += [f"  layer {i}: {step}" for i, plan in enumerate(self.plans[0]) for step in plan.steps]
        return "\n".join(lines)

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        layers, batch = self.problem.layers, self.problem.layers[-1].geometry.batch
        sizes = _slot_bytes(_of_samples(layers, self.samples))
        counts = filter(None, (self.samples, batch % self.samples))
        runs = {count: _layer_runs(_of_samples(layers, count), plans) for count, plans in zip(counts, self.plans)}
        chunks = [(slice(some.start, some.stop), runs[len(some)]) for some in ranges_of(batch, self.samples)]

        def run(arrays: Mapping[str, Any]) -> None:
            slots = [np.empty(nbytes, np.uint8) for nbytes in sizes]
            for some, each in chunks:
                images = {x.name: arrays[x.name][some] for x in layers[0].xs}
                for i, layer in enumerate(each):
                    given = {name: arrays[source] for name, source in layer.fixed} | images
                    if layer.residual:
                        given["residual"] = arrays[layer.residual][some]
                    result = arrays["out"][some] if layer.image is None else layer.image(slots[i % 2])
                    given["out"] = result
                    for run_step in layer.steps:
                        run_step(given)
                    images = {layer.name: result}

        return run


class _LayerRun(NamedTuple):
    """One layer at run time: its steps, the names of its arrays, and how to place its result in memory."""

    steps: list[Callable[[Mapping[str, Any]], None]]
    fixed: list[tuple[str, str]]  # arguments by their names in the layer and in the chain
    residual: str  # its name in the chain
    name: str  # the name of the result
    image: Callable[[np.ndarray], np.ndarray] | None  # makes the result from memory; None for the chain's result


def _layer_runs(layers: Sequence[ConvProblem], plans: Sequence[Plan]) -> list[_LayerRun]:
    """Prepare layers to run; the last layer's result is the chain's."""
    runs = []
    for i, (layer, plan) in enumerate(zip(layers, plans)):
        steps = [step.executable() for step in cast("tuple[NumpyStep, ...]", plan.steps)]
        fixed = [("weight", f"weight[{i}]"), *([("bias", f"bias[{i}]")] if layer.bias else [])]
        fixed += [(vector.name, vector.name) for vector in layer.prologue.vectors]
        image = None if i == len(layers) - 1 else partial(_image, *_layout(layer.out))
        runs.append(_LayerRun(steps, fixed, f"residual[{i}]" if layer.residual else "", f"layer[{i}]", image))
    return runs


def _unfused(problem: ChainProblem) -> _Candidate:
    """Plan layer by layer, for as many samples at a time as leave the loops enough memory.

    If the images of one sample leave too little, they are allocated on top of the workspace limit.
    """
    limit, batch = problem.limit, problem.layers[-1].geometry.batch
    one = sum(_slot_bytes(_of_samples(problem.layers, 1)))
    samples = even_part(batch, limit // (2 * one) if one else batch)
    while True:
        try:
            return _layer_by_layer(problem, samples, beside_images=True)
        except ValueError:
            if samples == 1:
                return _layer_by_layer(problem, samples, beside_images=False)
            samples = even_part(batch, samples // 2)


def _layer_by_layer(problem: ChainProblem, samples: int, *, beside_images: bool) -> _Candidate:
    """Plan `samples` samples at a time.

    The images between layers count against the workspace limit if `beside_images`.  Otherwise they come on top of it.
    """
    between = _slot_bytes(_of_samples(problem.layers, samples))
    limit = problem.limit - sum(between) * beside_images
    if limit < 0:
        raise NotApplicable("the intermediate images exceed the workspace limit")
    counts = [samples, problem.layers[-1].geometry.batch % samples]
    plans = tuple(
        tuple(plan_conv(replace(layer, workspace_limit=limit)) for layer in _of_samples(problem.layers, count))
        for count in counts
        if count
    )
    loop = LayersLoop(problem, samples, plans)
    sizes = {f"layer[{i}]": nbytes for i, nbytes in enumerate(between)}
    sizes["blocks"] = max(plan.workspace_bytes for plan in chain.from_iterable(plans))
    notes: tuple[str, ...] = ()
    if not beside_images:
        size, limit = sum(between), problem.limit
        notes = (
            f"the intermediate images need {size:,} bytes for one sample, beyond the workspace limit of {limit:,}",
        )
    plan = _planned(problem, "unfused", "one layer after the other", loop, sizes, loop.seconds, notes)
    return _Candidate(plan, loop.seconds, beside_images)


def _of_samples(layers: Sequence[ConvProblem], count: int) -> tuple[ConvProblem, ...]:
    """The layers for `count` of the samples."""
    return tuple(
        replace(
            layer,
            geometry=replace(layer.geometry, batch=count),
            xs=tuple(x.samples(0, count) for x in layer.xs),
            out=layer.out.samples(0, count),
            residual=layer.residual and layer.residual.samples(0, count),
        )
        for layer in layers
    )


def _slot_bytes(layers: Sequence[ConvProblem]) -> list[int]:
    """Bytes of the buffers, at most two, that the images between layers use in turn."""
    sizes = [layer.out.nbytes for layer in layers[:-1]]
    return [max(sizes[first::2]) for first in range(min(2, len(sizes)))]


def _layout(image: Operand) -> tuple[tuple[int, ...], np.dtype, tuple[int, ...]]:
    """Shape, dtype, and strides in bytes."""
    return image.shape, dtype_from_name(image.dtype), tuple(step * image.itemsize for step in image.strides)


def _image(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...], memory: np.ndarray) -> np.ndarray:
    """An image with five axes in this memory."""
    return np.ndarray(shape, dtype, memory, 0, strides)
