"""Plans of recurrent layers and their gradients on a GPU: within limits, with as many blocks as it runs at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from plans import array, check, launches, recurrent_gradient_plan
from rounds import each_step
from strategies import as_dtype
from test_every_plan import addresses, hold, spans

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan.cost import BARRIER_SECONDS
from cupyconv.cuda.plan.recurrence import recurrent_tiles
from cupyconv.cuda.plan.recurrent_gradient import gradient_arithmetic
from cupyconv.problem.geometry import LARGEST_STEP
from cupyconv.problem.machine import KNOWN_GPUS, known_gpu
from cupyconv.problem.plan import Buffer, GemmCall, KernelLaunch, LaunchLoop, Plan
from cupyconv.problem.recurrence import GATES


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("limit", [None, 300_000, 150_000])
def test_recurrent_gradients_keep_the_limit(cell, limit):
    """Directions run together if all gates fit, otherwise one after the other, in runs; the parts make up the whole."""
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
    """Return the steps of each of a plan's chunks, which cover every step once."""
    counts: list[int] = []
    for step in each_step(plan.steps):
        if isinstance(step, LaunchLoop) or (isinstance(step, KernelLaunch) and step.cooperative):
            (launch, *_) = step.launches if isinstance(step, LaunchLoop) else (step,)
            params, begin = dict(launch.params), sum(counts) % STEPS
            count, back = params["count"], "gradient" in launch.kernel.name
            from_end = [sign > 0 for sign in params["sign"]] if back else params["backward"]
            for first, is_last in zip(params["first"], from_end):
                assert first == (STEPS - begin - count if is_last else begin)
            if isinstance(step, LaunchLoop):  # going back in time, the last time is only the product
                assert (step.times, step.first) == ((count + 1, 0) if back else (count, begin))
            assert back or params["step"] == begin
            counts.append(params["count"])
    return counts


def plans_within(limits: Iterable[int], planned: Callable[[], Plan]) -> Iterator[tuple[Plan, list[int]]]:
    """Yield the plans within the limits and the steps of their chunks: more than half as many as fit, or all.

    A larger limit refuses nothing that a smaller one grants.  The bytes that a refusal names are enough; a byte less is
    not.
    """
    enough, granted, before = None, False, None
    for limit in limits:
        with cupyconv.options(workspace_limit=limit):
            try:
                plan = planned()
            except ValueError as refusal:
                assert not granted and "workspace" in str(refusal)
                asked = re.search(r"needs (.*?) bytes .*limit is ([\d,]+)", str(refusal))
                needed, left = (int(number.replace(",", "")) for number in asked.groups()) if asked else (0, 0)
                enough = limit - left + needed if left else None  # conversions have used the rest
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
        with cupyconv.options(workspace_limit=enough - 1), pytest.raises(ValueError, match="workspace"):
            planned()


#: For a gru: its reset gate multiplies the state, so that a step has two products, one after the other.
TWO = {"linear_before_reset": False}
STEPS, LIMITS = 11, [int(500 * 1.6**i) for i in range(16)]


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru", "gru of two products"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_limit_is_kept_by_layers(cell, direction, method, dtype):
    name, _, more = cell.partition(" ")
    settings = dict(direction=direction, method=method, on="sm_90") | (TWO if more else {})
    directions = 1 + (direction == "bidirectional")
    weights = [array(directions, GATES[name] * 23, size, dtype=dtype) for size in (10, 23)]
    x, weights = array(STEPS, 7, 10, dtype=dtype), weights if directions == 2 else [weight[0] for weight in weights]
    chunks, amounts = set(), set()
    for plan, counts in plans_within(
        LIMITS, lambda: cupyconv.explain(getattr(cupyconv, name), x, *weights, **settings)
    ):
        assert sum(counts) == STEPS and not any(isinstance(step, GemmCall) for step in each_step(plan.steps))
        projections = sum(launch.purpose == "projection of the inputs" for launch in launches(plan))
        assert projections == directions * len(counts) and plan.reason.count("projection by implicit_gemm") == 1
        if counts[0] not in chunks:  # the plan's own workspace is enough for it
            with cupyconv.options(workspace_limit=sum(buffer.space for buffer in plan.workspace)):
                assert counts_of(cupyconv.explain(getattr(cupyconv, name), x, *weights, **settings)) == counts
        chunks.add(counts[0])
        amounts.add(sum(step.flops for step in each_step(plan.steps)))
    assert STEPS in chunks and len(chunks) > 1 and len(amounts) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limits_are_kept_where_cublas_projects_into_the_gates(dtype):
    """cuBLAS needs no workspace: the space that the gates leave may be nothing, but is not negative."""
    arrays = [array(*shape, dtype=as_dtype(dtype)) for shape in ((STEPS, 7, 10), (92, 10), (92, 23))]
    on, counts = "sm_75" if dtype == "bfloat16" else "sm_90", set()

    def planned(limit: int) -> Plan:
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.lstm, *arrays, on=on)
        check(plan, limit, on)
        assert any(isinstance(step, GemmCall) for step in each_step(plan.steps))
        return plan

    for limit in LIMITS:
        try:
            plan = planned(limit)
        except ValueError:
            assert not counts, "more memory is refused nothing that less is granted"
            continue
        steps, *_ = found = counts_of(plan)
        counts.add(steps)
        assert sum(found) == STEPS
        taken, gates = sum(buffer.space for buffer in plan.workspace), plan.workspace[-1]
        assert gates.name == "gates" and (steps == STEPS or limit < taken + gates.space), "twice as many do not fit"
        assert planned(taken).steps == plan.steps, "what it takes is enough"
        with suppress(ValueError):
            planned(taken - 1)
    assert {1, STEPS} < counts


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_projection_moves_its_inputs_its_weight_and_the_gates(dtype):
    """The plan has a projection per direction, and one more launch, which works only on the states."""
    x, weights = array(12, 8, 16, dtype=dtype), [array(2, 96, size, dtype=dtype) for size in (16, 24)]
    plan = cupyconv.explain(cupyconv.lstm, x, *weights, direction="bidirectional", method="step", on="sm_90")
    *projections, _ = launches(plan)
    (gates,) = (buffer.nbytes for buffer in plan.workspace if buffer.name == "gates")
    moved = x.nbytes + (weights[0].nbytes + gates) // 2
    assert [launch.bytes_moved for launch in projections] == [moved, moved]
    assert {launch.purpose for launch in projections} == {"projection of the inputs"}
    assert [at.offset for at in addresses(tuple(projections)) if at.buffer == "gates"] == [0, gates // 2]


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_limit_is_kept_by_gradients_of_layers(cell, direction, dtype):
    """Gradients of layers keep every limit, and both directions run together if all fits."""
    sizes, passes, chunks = (STEPS, 7, 10, 23), 1 + (direction == "bidirectional"), set()
    for plan, counts in plans_within(LIMITS, lambda: recurrent_gradient_plan(cell, dtype, sizes, direction=direction)):
        assert sum(counts) == STEPS * passes or counts == [STEPS]
        chunks.add(counts[0])
        products, rows = [step for step in each_step(plan.steps) if isinstance(step, GemmCall)], GATES[cell] * 23
        wholes = {"grad_weight_ih": passes * rows * 10, "grad_weight_hh": passes * rows * 23, "grad_x": STEPS * 7 * 10}
        for name, whole in wholes.items():
            own = sorted((call for call in products if call.c.at.buffer == name), key=lambda call: call.c.at.offset)
            for beta in range(passes) if name == "grad_x" else (0,):  # a direction adds to the result of the other
                parts = [(call.c.at.offset // 4, call.m * call.n) for call in own if call.beta == beta]
                ends = list(accumulate(size for _, size in parts))
                assert [begin for begin, _ in parts] == [0, *ends[:-1]] and ends[-1] == whole, name
        places = [call.c.at.offset for call in products if call.c.at.buffer == "grad_x"]
        assert [call.b.at.offset for call in products if call.b.at.buffer == "x"] in ([], places)
    assert len(chunks) > 2 and counts == [STEPS]


@pytest.mark.parametrize("cell", GATES)
def test_recurrent_gradients_of_more_blocks_than_fit_at_once(cell):
    """If too many blocks must run at once or exchange parts, each step is a launch, and a last product is left."""
    made = recurrent_gradient_plan(cell, np.float32, (60, 4000, 10, 200), direction="bidirectional")
    loops = [step for step in made.steps if isinstance(step, LaunchLoop)]
    assert loops and made.method == "step"
    assert [loop.times for loop in loops] == [dict(loop.launches[0].params)["count"] + 1 for loop in loops]
    assert not any(launch.cooperative for loop in loops for launch in loop.launches)


@pytest.mark.parametrize("samples", [1, 50, 1000, 1500, 7000])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("hidden", [8, 24])
def test_blocks_that_wait_do_a_step_in_as_few_turns_as_there_is_room_for(samples, direction, hidden):
    """All blocks are on the GPU at once; one turn fewer would need more blocks than fit; turns are even.

    Each tile of samples has a counter, in a cache line of its own.
    """
    room, directions = known_gpu("sm_90").multiprocessors, 1 + (direction == "bidirectional")
    x = np.broadcast_to(np.float32(0), (20, samples, 4))
    weights = [np.broadcast_to(np.float32(0), (directions, 4 * hidden, size)) for size in (4, hidden)]
    if directions == 1:
        weights = [weight[0] for weight in weights]
    layer = cupyconv.explain(cupyconv.lstm, x, *weights, direction=direction, method="persistent", on="sm_90")
    back = recurrent_gradient_plan("lstm", np.float32, (20, samples, 4, hidden), direction=direction)
    rows = {"recurrent_persistent": int(layer.reason.partition("blocks of ")[2].split()[0])}
    rows["recurrent_gradient_persistent"] = 16
    for plan in (layer, back):
        for launch in (one for one in launches(plan) if one.kernel.name in rows):
            tiles, (columns, blocks, together) = -(-samples // rows[launch.kernel.name]), launch.grid
            turns = -(-tiles // blocks)
            assert launch.blocks <= room and blocks == -(-tiles // turns)
            assert turns == 1 or columns * together * -(-tiles // (turns - 1)) > room
            assert ("passes per step" in plan.reason) == (turns > 1) and together == directions
            assert [each.nbytes for each in plan.workspace if each.name == "counters"] == [128 * directions * tiles]
            assert [each.bytes_moved for each in launches(plan) if "set to 0" in each.purpose] == [
                128 * directions * tiles
            ]


@pytest.mark.parametrize("kernel", ["recurrent_persistent", "recurrent_gradient_persistent"])
def test_every_turn_takes_as_long_and_asks_l2_for_as_much(kernel):
    """However many turns a step has, each costs the same time and L2 bytes, as waiting blocks work on whole tiles."""
    found = []
    for samples in (1600, 8000):
        x, weights = array(20, samples, 4), [array(96, size) for size in (4, 24)]
        plan = cupyconv.explain(cupyconv.lstm, x, *weights, method="persistent", on="sm_90")
        if "gradient" in kernel:
            plan = recurrent_gradient_plan("lstm", np.float32, (20, samples, 4, 24))
        (launch,), rows = launches(plan, kernel), int(re.findall(r"blocks of (\d+) samples", plan.reason)[0])
        turns = -(-samples // rows // launch.grid[1])
        seconds = (launch.arithmetic_seconds / 20 - BARRIER_SECONDS) / turns
        found.append((turns, rows, launch.l2_bytes / launch.blocks / turns, seconds))
    assert found[0][0] < found[1][0] and found[0][1:] == pytest.approx(found[1][1:])


@pytest.mark.parametrize("cell", [*GATES, "gru of two products"])
def test_blocks_leave_and_take_their_parts_once_for_every_product(cell):
    """Blocks write parts to one half of the buffer while they read those in the other half."""
    name, _, more = cell.partition(" ")
    settings = TWO if more else {}
    for sizes, direction in (((20, 64, 4, 24), "forward"), ((7, 4160, 4, 40), "bidirectional")):
        plan = recurrent_gradient_plan(name, np.float32, sizes, direction=direction, **settings)
        (launch,), (parts,) = (
            launches(plan, "recurrent_gradient_persistent"),
            [each.nbytes for each in plan.workspace if each.name == "parts"],
        )
        assert launch.l2_bytes == sizes[0] * (1 + bool(more)) * parts
        assert launch.arithmetic_seconds > sizes[0] * (1 + bool(more)) * BARRIER_SECONDS


def test_a_block_multiplies_for_every_gate_and_every_other_block():
    """A block multiplies for every gate and every other block, whether a step has one product or two.

    Products of a single sample take longer than exchanging parts.  Launches per step move as much for two products as
    for one.
    """

    def work(cell: str, hidden: int, **settings: bool) -> float:
        plan = recurrent_gradient_plan(cell, np.float32, (20, 1, 4, hidden), **settings)
        (launch,) = launches(plan, "recurrent_gradient_persistent")
        return launch.arithmetic_seconds - 20 * (1 + bool(settings)) * BARRIER_SECONDS

    once = work("rnn", 128)
    for times, cell, hidden, two in (
        (4, "lstm", 128, {}),
        (3, "gru", 128, {}),
        (2, "rnn", 256, {}),
        (3, "gru", 128, TWO),
    ):
        assert work(cell, hidden, **two) == pytest.approx(times * once)
    moved = [
        sum(launch.bytes_moved for launch in launches(made, "recurrent_gradient"))
        for made in (recurrent_gradient_plan("gru", np.float32, (60, 4000, 10, 200), **two) for two in ({}, TWO))
    ]
    assert moved[0] == pytest.approx(moved[1])


def test_gradients_of_16_bit_layers_are_products_in_tf32():
    """TF32 holds x, h and the weights of 16-bit layers exactly, but not those of float32."""
    for dtype, compute in (("float16", "tf32"), (np.float32, "float32")):
        made = recurrent_gradient_plan("lstm", dtype, (20, 8, 10, 24))
        assert {step.compute for step in made.steps if isinstance(step, GemmCall)} == {compute}


def test_long_16_bit_sequences_are_not_converted():
    """Arrays that grow with the steps are widened as they are read; a copy would exceed the limit."""
    made = recurrent_gradient_plan("lstm", "float16", (500, 64, 1000, 200))
    assert {conversion.buffer for conversion in made.conversions} == {"weight_ih", "grad_h"}
    assert made.workspace_bytes <= 256 << 20


def test_sizes_beyond_32_bits_of_recurrent_gradients():
    """cuBLAS counts rows of a product in an int32, so very many steps of very many samples are several runs."""
    with cupyconv.options(workspace_limit=1 << 60):
        made = recurrent_gradient_plan("rnn", np.float32, (5, 1 << 29, 1, 1))
    for step in made.steps:
        for launch in step.launches if isinstance(step, LaunchLoop) else [step]:
            check(replace(made, steps=(launch,)), 1 << 60)


@pytest.mark.parametrize(
    ("samples", "methods"), [(262_144, {"step", "persistent"}), (1_048_600, {"step", "persistent"})]
)
def test_recurrent_layers_of_very_many_samples(samples, methods):
    """Tiles with too many blocks for a grid are left out; a persistent grid has an upper bound anyway."""
    shapes = (3, samples, 4), (32, 4), (32, 8)
    arrays = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    for method in methods:
        plan = cupyconv.explain(cupyconv.lstm, *arrays, method=method, on="sm_90")
        launches = [launch for step in plan.steps for launch in getattr(step, "launches", (step,))]
        assert all(launch.grid[1] <= 65535 for launch in launches if isinstance(launch, KernelLaunch))


@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("cell", GATES)
def test_layers_of_no_steps_and_of_too_many(cell, method):
    """Without steps the states stay as they were: nothing is projected, and there are no gates."""
    weights = array(GATES[cell] * 8, 1), array(GATES[cell] * 8, 8)
    function, settings = getattr(cupyconv, cell), {"method": method, "on": "sm_90"}
    none = cupyconv.explain(function, array(0, 3, 1), *weights, **settings)
    known = {
        *spans(checked_call(function, array(0, 3, 1), *weights, **settings)),
        *(each.name for each in none.workspace),
    }
    assert {at.buffer for at in addresses(none.steps)} <= known
    assert all(dict(launch.params).get("count", 1) == 1 for launch in launches(none)), "one that is past the end"
    assert all(step.times == 1 for step in none.steps if isinstance(step, LaunchLoop))
    assert {launch.purpose for launch in launches(none)} <= {launches(none)[-1].purpose, "counters set to 0"}
    assert not {"gates", "workspace"} & {buffer.name for buffer in none.workspace}
    with pytest.raises(ValueError, match=f"steps; the kernel supports at most {LARGEST_STEP:,}"):
        cupyconv.explain(function, array(LARGEST_STEP + 1, 1, 1), *weights, **settings)
    assert cupyconv.explain(function, array(LARGEST_STEP, 1, 1), *weights, **settings).steps


def test_a_lone_step_of_two_products_keeps_its_limit():
    """A single step of two products has gates and reset states in memory; other single steps need none."""
    weights = array(3 * 24, 10), array(3 * 24, 24)
    settings = {"linear_before_reset": False, "method": "step", "on": "sm_90"}
    call = checked_call(cupyconv.gru, array(1, 7, 10), *weights, **settings)
    taken = call.plan().workspace_bytes
    hold(call.plan(), spans(call))
    for limit in (taken, taken - 1, 100):
        with cupyconv.options(workspace_limit=limit), pytest.raises(ValueError) if limit < taken else nullcontext():
            assert cupyconv.explain(cupyconv.gru, array(1, 7, 10), *weights, **settings).workspace_bytes == taken
    assert not cupyconv.explain(cupyconv.gru, array(1, 7, 10), *weights, method="step", on="sm_90").workspace


@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("steps", [1, 2])
def test_places_of_layers_of_few_steps_are_in_their_arrays(cell, method, steps):
    """With one step no state is carried to another."""
    weights = array(GATES[cell] * 24, 10), array(GATES[cell] * 24, 24)
    call = checked_call(getattr(cupyconv, cell), array(steps, 7, 10), *weights, method=method, on="sm_90")
    hold(call.plan(), spans(call))


@pytest.mark.parametrize(("hidden", "whole"), [(48, 1), (46, 0), (45, 0)])
def test_states_are_loaded_as_vectors_where_their_rows_are_whole_ones(hidden, whole):
    """Rows of whole vectors are loaded as such; only kernels of many steps have a variant for gates with a bound."""
    weights = array(4 * hidden, 10), array(4 * hidden, hidden)
    for method, given in (("step", None), ("persistent", "1")):
        plan = cupyconv.explain(cupyconv.lstm, array(3, 7, 10), *weights, clip=1.0, method=method, on="sm_90")
        (launch,) = launches(plan, f"recurrent_{method}")
        assert dict(launch.params)["states_vectorized"] == whole
        assert dict(launch.kernel.macros).get("GIVEN_GATES") == given


def test_float64_of_more_samples_than_a_grid_has_blocks_for():
    """float64 has one size of tiles, of 16 samples."""
    arrays = [np.broadcast_to(0.0, shape) for shape in ((3, 16 * 65535 + 1, 4), (32, 4), (32, 8))]
    with cupyconv.options(workspace_limit=1 << 40):
        with pytest.raises(ValueError, match="1,048,561 samples exceed the largest grid"):
            cupyconv.explain(cupyconv.lstm, *arrays, method="step", on="sm_90")
        assert cupyconv.explain(cupyconv.lstm, arrays[0][:, 1:], *arrays[1:], method="step", on="sm_90").steps


@pytest.mark.parametrize("name", ["x", "grad_y", "weight_hh", "weight_ih", "y", "gates", "h0", "cells"])
def test_gradients_read_what_is_large_as_it_lies(name):
    """Large arrays are read in place; the others are in order, or copied."""
    shapes = {"x": (4, 20, 3), "grad_y": (4, 20, 5), "weight_hh": (1, 20, 5), "weight_ih": (1, 20, 3), "y": (4, 20, 5)}
    shapes |= {"gates": (1, 4, 20, 20), "h0": (1, 20, 5), "cells": (1, 4, 20, 5)}
    plan = recurrent_gradient_plan("lstm", "float32", **{name: array(*shapes[name], order="gaps")})
    assert {each.buffer for each in plan.conversions} == ({name} - {"x", "grad_y"})


@pytest.mark.parametrize(("dtype", "first"), [("float16", "sm_75"), ("bfloat16", "sm_80"), ("float32", "sm_80")])
def test_tensor_cores_multiply_states_on_every_gpu_that_has_them(dtype, first):
    """Gradients multiply in float32, and float64 uses CUDA cores."""
    expected = {"float16": "MMA", "bfloat16": "MMA", "float32": "TF32X3"}[dtype]
    for name, gpu in KNOWN_GPUS.items():
        found = {tile.arithmetic for resident in (False, True) for tile in recurrent_tiles(dtype, resident, gpu)}
        assert (expected in found) == (gpu.capability >= int(first[3:])), name
        if expected in found:  # instructions of three products for 16 samples leave few samples to CUDA cores
            stays = {tile.arithmetic for tile in recurrent_tiles(dtype, True, gpu)}
            assert stays == {expected} | ({"FMA"} if dtype == "float32" else set())
        assert {tile.arithmetic for tile in recurrent_tiles("float64", True, gpu)} == {"FMA"}
        assert gradient_arithmetic(dtype, gpu) == ("TF32X3" if gpu.capability >= 80 else "FMA")
        assert gradient_arithmetic("float64", gpu) == "FMA"


@pytest.mark.parametrize("strides", [(0, 48), (0, 49), (9217, 48), "off its boundary"])
def test_rows_of_a_weight_are_loaded_as_vectors_where_all_begin_on_boundaries(strides):
    """A load of 16 bytes off a boundary would fault."""
    whole = array(2, 192, 49, offset=int(isinstance(strides, str)))
    direction, row = (9216, 48) if isinstance(strides, str) else strides
    weight = as_strided(whole, (2, 192, 48), (4 * direction, 4 * row, 4))
    plan = cupyconv.explain(
        cupyconv.lstm, array(3, 5, 48), array(2, 192, 48), weight, direction="bidirectional", on="sm_90"
    )
    widths = {
        dict(launch.params)["weight_vector"] for launch in launches(plan) if "weight_vector" in dict(launch.params)
    }
    assert widths == {16 if strides == (0, 48) else 4}


def test_rows_that_end_within_a_vector_are_loaded_as_smaller_ones():
    """Memory after a row is not zeros, although the next row starts on a boundary."""
    weight = array(184, 48)[:, :46]
    plan = cupyconv.explain(cupyconv.lstm, array(3, 5, 48), array(184, 48), weight, on="sm_90")
    widths = [dict(launch.params).get("weight_vector", 4) for launch in launches(plan)]
    assert widths == [4] * len(widths)
