"""Plans of recurrent layers and of their gradients on a GPU: within limits, of as many blocks as it holds at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from plans import array, check, launches, recurrent_gradient_plan
from rounds import each_step

import cupyconv
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import Buffer, GemmCall, KernelLaunch, LaunchLoop, Plan
from cupyconv.problem.recurrence import GATES


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("limit", [None, 300_000, 150_000])
def test_recurrent_gradients_keep_the_limit(cell, limit):
    """Together while all gates fit; then one direction after the other, in runs; and the parts make the whole."""
    sizes = steps, batch, inputs, hidden = (60, 40, 10, 24)
    with cupyconv.options(workspace_limit=limit):
        made = recurrent_gradient_plan(cell, np.float32, sizes, direction="bidirectional")
    name = "recurrent_gradient_persistent"
    runs = [step for step in made.steps if isinstance(step, KernelLaunch) and step.kernel.name == name]
    for step in made.steps:
        check(replace(made, steps=(step,)), limit)
    assert len(runs) == 1 if limit is None else len(runs) > 2
    assert all(run.cooperative and run.blocks <= known_gpu("sm_90").multiprocessors for run in runs)
    counts = [dict(run.params)["count"] for run in runs]
    assert sum(counts) == steps * (1 if limit is None else 2)
    products = [step for step in made.steps if isinstance(step, GemmCall)]
    for name, depth, times in (("grad_x", GATES[cell] * hidden, 2), ("grad_weight_ih", 2 * steps * batch, 1)):
        own = [call for call in products if call.c.at.buffer == name]
        if name == "grad_x":
            assert sum(call.m for call in own) == steps * batch * times and {call.k for call in own} == {depth}
            assert [call.beta for call in own] == sorted(call.beta for call in own)
        else:
            assert sum(call.k for call in own) == depth and {(call.m, call.n) for call in own} == {
                (GATES[cell] * hidden, inputs)
            }
            assert sum(call.beta == 0 for call in own) == 2, "each direction's sum begins once"


def counts_of(plan: Plan) -> list[int]:
    """The steps of each of a plan's chunks: none is left out, and none is in two."""
    counts: list[int] = []
    for step in each_step(plan.steps):
        if isinstance(step, LaunchLoop) or (isinstance(step, KernelLaunch) and step.cooperative):
            (launch, *_) = step.launches if isinstance(step, LaunchLoop) else (step,)
            params, begin = dict(launch.params), sum(counts) % STEPS
            count, back = params["count"], "gradient" in launch.kernel.name
            from_end = [sign > 0 for sign in params["sign"]] if back else params["backward"]
            for first, is_last in zip(params["first"], from_end):
                assert first == (STEPS - begin - count if is_last else begin)
            if isinstance(step, LaunchLoop):  # back through time the last is the product alone
                assert (step.times, step.first) == ((count + 1, 0) if back else (count, begin))
            assert back or params["step"] == begin
            counts.append(params["count"])
    return counts


def plans_within(limits: Iterable[int], planned: Callable[[], Plan]) -> Iterator[tuple[Plan, list[int]]]:
    """Those that there are, and the steps of their chunks: more than half as many as there is room for, or all.

    More memory is refused nothing that less is granted, and as much as a refusal asks for is enough.
    """
    enough, granted, before = None, False, None
    for limit in limits:
        with cupyconv.options(workspace_limit=limit):
            try:
                plan = planned()
            except ValueError as refusal:
                assert not granted and "workspace" in str(refusal)
                asked = re.search(rf"needs ([\d,]+) bytes .*limit is {limit:,}$", str(refusal))  # nothing is converted
                enough = int(asked[1].replace(",", "")) if asked else None
                continue
        granted = True
        check(plan, limit)
        counts = counts_of(plan)
        assert int((re.findall(r"in ([\d,]+) (?:chunks|runs) of", plan.reason) or ["1"])[0]) == len(counts)
        converted = (Buffer(each.buffer, each.nbytes) for each in plan.conversions)
        taken = sum(each.space for each in (*plan.workspace, *converted))
        assert 2.1 * taken > limit or counts[0] == STEPS
        if counts != before:
            with cupyconv.options(workspace_limit=taken - 1), suppress(ValueError):
                check(planned(), taken - 1)
        before = counts
        yield plan, counts
    if enough is not None:
        with cupyconv.options(workspace_limit=enough):
            planned()


STEPS, LIMITS = 11, [int(500 * 1.6**i) for i in range(16)]


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru", "gru of two products"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_limit_is_kept_by_layers(cell, direction, method, dtype):
    name, _, more = cell.partition(" ")
    settings = dict(direction=direction, method=method, on="sm_90") | ({"linear_before_reset": False} if more else {})
    directions = 1 + (direction == "bidirectional")
    weights = [array(directions, GATES[name] * 23, size, dtype=dtype) for size in (10, 23)]
    x, weights = array(STEPS, 7, 10, dtype=dtype), weights if directions == 2 else [weight[0] for weight in weights]
    chunks, amounts = set(), set()
    for plan, counts in plans_within(
        LIMITS, lambda: cupyconv.explain(getattr(cupyconv, name), x, *weights, **settings)
    ):
        assert sum(counts) == STEPS
        chunks.add(counts[0])
        amounts.add(sum(step.flops for step in each_step(plan.steps)))
    assert STEPS in chunks and len(chunks) > 1 and len(amounts) == 1


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_limit_is_kept_by_gradients_of_layers(cell, direction, dtype):
    """Both directions are together where all fit."""
    sizes, passes, chunks = (STEPS, 7, 10, 23), 1 + (direction == "bidirectional"), set()
    for _, counts in plans_within(LIMITS, lambda: recurrent_gradient_plan(cell, dtype, sizes, direction=direction)):
        assert sum(counts) == STEPS * passes or counts == [STEPS]
        chunks.add(counts[0])
    assert len(chunks) > 2 and counts == [STEPS]


@pytest.mark.parametrize("cell", GATES)
def test_recurrent_gradients_of_more_blocks_than_fit_at_once(cell):
    """Or than can leave parts for each other: a launch for each step, and the product that is left."""
    made = recurrent_gradient_plan(cell, np.float32, (60, 4000, 10, 200), direction="bidirectional")
    loops = [step for step in made.steps if isinstance(step, LaunchLoop)]
    assert loops and made.method == "step"
    assert [loop.times for loop in loops] == [dict(loop.launches[0].params)["count"] + 1 for loop in loops]
    assert not any(launch.cooperative for loop in loops for launch in loop.launches)


@pytest.mark.parametrize("samples", [1, 50, 1000, 1500, 7000])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_blocks_that_wait_do_a_step_in_as_few_turns_as_there_is_room_for(samples, direction):
    """All are on the GPU at once; one turn fewer would need more blocks than it has room for; turns are even."""
    room, directions = known_gpu("sm_90").multiprocessors, 1 + (direction == "bidirectional")
    x = np.broadcast_to(np.float32(0), (20, samples, 4))
    weights = [np.broadcast_to(np.float32(0), (directions, 4 * 24, size)) for size in (4, 24)]
    if directions == 1:
        weights = [weight[0] for weight in weights]
    layer = cupyconv.explain(cupyconv.lstm, x, *weights, direction=direction, method="persistent", on="sm_90")
    back = recurrent_gradient_plan("lstm", np.float32, (20, samples, 4, 24), direction=direction)
    rows = {"recurrent_persistent": int(layer.reason.partition("blocks of ")[2].split()[0])}
    rows["recurrent_gradient_persistent"] = 16
    for plan in (layer, back):
        for launch in (one for one in launches(plan) if one.kernel.name in rows):
            tiles, (columns, blocks, together) = -(-samples // rows[launch.kernel.name]), launch.grid
            turns = -(-tiles // blocks)
            assert launch.blocks <= room and blocks == -(-tiles // turns)
            assert turns == 1 or columns * together * -(-tiles // (turns - 1)) > room


def test_gradients_of_16_bit_layers_are_products_in_tf32():
    """Which hold x, h and the weights exactly; not those of float32."""
    for dtype, compute in (("float16", "tf32"), (np.float32, "float32")):
        made = recurrent_gradient_plan("lstm", dtype, (20, 8, 10, 24))
        assert {step.compute for step in made.steps if isinstance(step, GemmCall)} == {compute}


def test_long_16_bit_sequences_are_not_converted():
    """What grows with the steps is widened where it is read: a copy of it would pass the limit."""
    made = recurrent_gradient_plan("lstm", "float16", (500, 64, 1000, 200))
    assert {conversion.buffer for conversion in made.conversions} == {"weight_ih", "grad_h"}
    assert made.workspace_bytes <= 256 << 20


def test_sizes_beyond_32_bits_of_recurrent_gradients():
    """Rows of a product are an int32 in cuBLAS: so many steps of so many samples are several runs."""
    with cupyconv.options(workspace_limit=1 << 60):
        made = recurrent_gradient_plan("rnn", np.float32, (5, 1 << 29, 1, 1))
    for step in made.steps:
        for launch in step.launches if isinstance(step, LaunchLoop) else [step]:
            check(replace(made, steps=(launch,)), 1 << 60)


@pytest.mark.parametrize(
    ("samples", "methods"), [(262_144, {"step", "persistent"}), (1_048_600, {"step", "persistent"})]
)
def test_recurrent_layers_of_very_many_samples(samples, methods):
    """A tile whose blocks are too many for a grid leaves the others; a persistent grid is capped anyway."""
    shapes = (3, samples, 4), (32, 4), (32, 8)
    arrays = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    for method in methods:
        plan = cupyconv.explain(cupyconv.lstm, *arrays, method=method, on="sm_90")
        launches = [launch for step in plan.steps for launch in getattr(step, "launches", (step,))]
        assert all(launch.grid[1] <= 65535 for launch in launches if isinstance(launch, KernelLaunch))
