"""Properties of every NumPy plan: convolutions and their gradients by every implementation, and recurrent layers.

`test_every_plan.py` does the same for GPUs.  A plan stays within its limit, and a larger limit has a plan too.  Blocks
cover each pixel of the result once.  All implementations compute the same numbers.  The estimated time of "auto" is at
most that of any method, and no implementation's estimate is less than its arithmetic takes, or far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from math import exp, log, prod
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peak_memory import OF_OBJECTS, peak_bytes
from plans import array
from strategies import share_of_examples

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import CheckedCall
from cupyconv.numpy import convolution, cost, depthwise, transposed, weight_gradient
from cupyconv.numpy.backend import NumpyBackend, cached_scratch
from cupyconv.numpy.block_loops import BlockLoop, PixelLoop
from cupyconv.numpy.choice import Method, choose
from cupyconv.numpy.convolution import ConvLoop
from cupyconv.numpy.direct import TapByTap
from cupyconv.numpy.fft import FftShares
from cupyconv.numpy.gathered import GatheredLoop, GatheringStep
from cupyconv.numpy.gemm import Columns, View
from cupyconv.numpy.recurrent import RecurrentStep
from cupyconv.numpy.scattered import ScatteredLoop
from cupyconv.numpy.toeplitz_rows import ToeplitzRows
from cupyconv.numpy.weight_channels import GradientChannels
from cupyconv.numpy.weight_runs import GradientRuns
from cupyconv.numpy.weight_sums import WeightGradientLoop, WeightRun
from cupyconv.numpy.winograd import MEMORY
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import HostModel, ProductsProblem
from cupyconv.problem.recurrence import GATES, RecurrentProblem

METHODS = ("winograd", "fft", "gemm", "direct")
#: Smallest and largest limit in bytes: a few rows, and more than any of these calls needs.
MIN_LIMIT, MAX_LIMIT = 1 << 14, 1 << 25
BACKEND = NumpyBackend()
#: A function that makes an array with a shape, a dtype and a memory order.
Make = Callable[..., np.ndarray]

# --- any problem ----------------------------------------------------------------------------------------------


def about(random: Random, least: int, most: int) -> int:
    """Return a random number; its logarithm is uniform, so that small ones are as likely as large ones."""
    return round(exp(random.uniform(log(least), log(max(least, most)))))


def any_conv(random: Random, make: Make, scale: int, times: int = 1) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return `conv`, random arguments and settings: 2-D sizes are up to about `scale`; `times` multiplies samples."""
    rank = random.choice((1, 2, 2, 3))
    is_depthwise = random.random() < 0.25
    groups = about(random, 1, scale // 2) if is_depthwise else random.choice((1, 1, 2, 6))
    channels = 1 if is_depthwise else about(random, 1, scale)
    outputs = random.choice((1, 1, 2)) if is_depthwise else about(random, 1, scale)
    kernel = random.choice([(1,), (3,), (3,), tuple(about(random, 1, 12 // rank) for _ in range(rank))])
    kernel = kernel if len(kernel) == rank else kernel * rank
    stride = tuple(random.choice((1, 2, 3)) for _ in range(rank)) if random.random() < 0.3 else (1,) * rank
    dilation = tuple(random.choice((1, 2, 3)) for _ in range(rank)) if random.random() < 0.2 else (1,) * rank
    most = {1: scale * scale // 2, 2: scale, 3: scale // 4}[rank]
    size = [about(random, (taps - 1) * gap + 1, most) for taps, gap in zip(kernel, dilation)]
    dtype = random.choice(("float32", "float32", "float32", "float64", "float16", "complex64"))
    order = random.choice(("C", "C", "last", "gaps"))
    batch = times * about(random, 1, 16)
    parts = [groups * channels]
    if parts[0] > 1 and random.random() < 0.2:
        first = random.randint(1, parts[0] - 1)
        parts = [first, parts[0] - first]
    xs = [make(batch, part, *size, dtype=dtype, order=order) for part in parts]
    of_weight = {"complex64": "float32", "float32": "complex64"}.get(dtype, dtype) if random.random() < 0.1 else dtype
    weight = make(groups * outputs, channels, *kernel, dtype=of_weight, order=random.choice(("C", "C", "last")))
    settings: dict[str, Any] = dict(stride=stride, dilation=dilation, groups=groups)
    if max(stride) == 1 and random.random() < 0.6:
        settings |= dict(
            padding=random.choice(("same", "full")), padding_mode=random.choice(("constant",) * 3 + ("edge",))
        )
        if settings["padding_mode"] != "constant" and max(kernel) == 1:
            del settings["padding_mode"]
    if random.random() < 0.3:
        settings["bias"] = make(groups * outputs, dtype=dtype)
    activation = None if "complex64" in (dtype, of_weight) else random.choice(("relu", "gelu"))
    if random.random() < 0.3:
        settings["activation"] = activation
    if random.random() < 0.2:
        vectors = (make(sum(parts), dtype=dtype) if random.random() < 0.7 else None for _ in range(2))
        settings["prologue"] = *vectors, random.choice((None, activation))
    if random.random() < 0.2:
        (result,) = checked_call(cupyconv.conv, xs, weight, **settings).results
        settings["residual"] = make(*result.shape, dtype=dtype, order=random.choice(("C", "last")))
    return cupyconv.conv, (xs if len(xs) > 1 else xs[0], weight), settings


def gradient(
    random: Random, make: Make, scale: int, times: int = 1, *, of_weight: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    function, (x, weight), settings = any_conv(random, make, scale, times)
    window = "stride", "padding", "padding_mode", "dilation", "groups"
    settings = {name: value for name, value in settings.items() if name in window}
    (result,) = checked_call(function, x, weight, **settings).results
    grad = make(*result.shape, dtype=weight.dtype, order=random.choice(("C", "last")))
    xs = x if isinstance(x, list) else [x]
    shape = (len(xs[0]), sum(each.shape[1] for each in xs), *xs[0].shape[2:])
    if of_weight:
        return cupyconv.conv_grad_weight, (grad, x, weight.shape[2:]), settings
    return cupyconv.conv_grad_input, (grad, weight, shape), settings


ANY: dict[str, Callable[..., Any]] = {
    "conv": any_conv,
    "conv_grad_input": partial(gradient, of_weight=False),
    "conv_grad_weight": partial(gradient, of_weight=True),
}


def problem_of(name: str, random: Random, threads: int = 0, times: int = 1) -> tuple[ProductsProblem, int]:
    """Return a random problem with a random limit, and the bytes of whole copies, which may exceed the limit."""
    function, arguments, settings = ANY[name](random, array, random.choice((20, 60, 200)), times)
    limit = about(random, MIN_LIMIT, MAX_LIMIT)
    threads = threads or random.choice((1, 2, 3))
    problem: Any = checked_call(function, *arguments, **settings).problem
    problem = replace(problem, machine=HostModel(threads), workspace_limit=limit)
    geometry = problem.geometry
    item = ITEMSIZE[accumulator(problem.dtype)]
    if name == "conv_grad_weight":  # the sums of an output of each group
        return problem, geometry.groups * geometry.reduction * item
    if name == "conv_grad_input" and problem.weight.itemsize < item:
        item += problem.weight.itemsize  # reordered in its own dtype, then widened
    return problem, geometry.out_channels * geometry.reduction * item * (1 + problem.factor_alone_is_complex)


def planned(problem: ProductsProblem, method: str = "auto", limit: int = 0) -> Plan | None:
    """Return the plan, or None if there is none."""
    try:
        return BACKEND.plan(replace(problem, method=method, workspace_limit=limit or problem.workspace_limit))
    except ValueError as refusal:
        assert "appl" in str(refusal)
        return None


def loops_of(plan: Plan) -> Iterator[BlockLoop]:
    """Yield all loops over blocks, also those inside other steps."""
    waiting: list[Any] = list(plan.steps)
    for step in waiting:
        waiting += getattr(step, "loops", None) if isinstance(getattr(step, "loops", None), tuple) else ()
        waiting += [step.convolution] if isinstance(step, GatheringStep) else []
        if isinstance(step, BlockLoop):
            yield step


def seconds(plan: Plan) -> float:
    return sum(step.seconds for step in plan.steps)  # type: ignore[attr-defined]


# --- properties of plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("method", ["auto", *METHODS])
@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_memory_keeps_within_the_limit_and_more_of_it_is_no_worse(method, name, seed):
    """Whole copies larger than half of the limit are added to it."""
    problem, copied = problem_of(name, Random(seed))
    plan = planned(problem, method)
    if plan is None:
        return
    assert plan.workspace_bytes <= max(problem.limit, min(problem.limit, copied) + copied)
    assert plan.method == method or method == "auto"
    assert plan.bytes_moved >= problem.minimal_bytes
    assert all(buffer.nbytes >= 0 for buffer in plan.workspace)
    for loop in loops_of(plan):
        assert 1 <= loop.threads <= max(problem.host.threads, 1) and loop.blocks >= 1 and loop.turns >= 1
        assert loop.threads * loop.workspace <= plan.workspace_bytes
    more = planned(problem, method, 4 * problem.limit)
    assert more is not None


@pytest.mark.parametrize("name", ANY)
@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_auto_takes_least(name, seed):
    problem, _ = problem_of(name, Random(seed), threads=1)
    plan = planned(problem)
    others = {method: planned(problem, method) for method in METHODS}
    assert (plan is None) == (not any(others.values()))
    if plan is None:
        return
    if problem.geometry.products < 1_000_000:
        del others["fft"]
    if problem.geometry.taps == 1:
        del others["direct"]
    assert all(other is None or seconds(plan) <= seconds(other) * (1 + 1e-9) for other in others.values())


@pytest.mark.parametrize("name", ANY)
@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_of_as_many_threads_as_are_worth_it_those_are_taken_that_take_least(name, seed):
    """Implementations that fit only on fewer threads are tried; they once were not if another one fitted on all."""
    problem, _ = problem_of(name, Random(seed), threads=1)
    plan = planned(replace(problem, machine=HostModel(4, most=4)))
    fixed = [planned(replace(problem, machine=HostModel(threads))) for threads in (1, 2, 4)]
    assert (plan is None) == (not any(fixed))
    assert plan is None or seconds(plan) <= 2 * min(seconds(other) for other in fixed if other)


def test_a_way_with_room_on_fewer_threads_only_is_tried_on_these():
    """Without this, a depthwise gradient took seven times as long."""
    x, grad = array(7, 81, 68, 14), array(7, 162, 71, 16)
    problem: Any = checked_call(cupyconv.conv_grad_weight, grad, x, (4, 3), padding="full", groups=81).problem
    problem = replace(problem, workspace_limit=420_000)
    alone, four = (planned(replace(problem, machine=machine)) for machine in (HostModel(1), HostModel(4, most=4)))
    assert alone and four and seconds(four) <= seconds(alone)


def test_several_lines_of_a_gradient_by_transforms_keep_within_the_limit():
    """Spectra of several lines are added, which needs memory that a single line does not."""
    settings = dict(padding=((2, 2), (0, 0), (1, 1)), padding_mode="edge", groups=3, method="fft")
    x, grad = array(2, 3, 10, 35, 3, order="last"), array(2, 6, 12, 35, 4)
    with cupyconv.options(workspace_limit=31_695, threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (3, 1, 2), **settings)
    assert plan.workspace_bytes <= 31_695


def test_a_kernel_of_more_taps_than_there_are_pixels_is_added_pixel_by_pixel():
    """Adding was once not tried: a call for every tap, which it does not make, would take longer than gathering."""
    weight, grad = array(2, 1, 3, 3, 3), array(1, 2, 1, 1, 3)
    with cupyconv.options(threads=1):
        plans = [
            cupyconv.explain(cupyconv.conv_grad_input, grad, weight, (1, 1, 3, 4, 5), stride=(1, 2, 1), method=method)
            for method in ("auto", "direct")
        ]
    assert seconds(plans[0]) <= seconds(plans[1])


# --- properties of implementations -----------------------------------------------------------------------------

#: The tables of methods of each operation.  An input gradient may also be gathered by a convolution's implementations.
TABLES = {
    "conv": (convolution.METHODS | convolution.SHIFTED, convolution.MERGING, convolution.GROUPED, depthwise.DEPTHWISE),
    "conv_grad_input": (transposed.METHODS,),
    "conv_transpose": (transposed.METHODS,),
    "conv_grad_weight": (weight_gradient.METHODS,),
}
#: The problems that each table of a convolution is for.
IS_FOR: list[Callable[[ProductsProblem], bool]] = [
    lambda problem: len(problem.xs) == problem.geometry.groups == 1,
    lambda problem: len(problem.xs) > 1 == problem.geometry.groups,
    lambda problem: problem.geometry.groups > 1 and not problem.geometry.is_depthwise,
    lambda problem: problem.geometry.is_depthwise,
]


def implementations_of(method: Method) -> tuple[type[BlockLoop], ...]:
    return (
        import_module(method.implementations).IMPLEMENTATIONS
        if isinstance(method.implementations, str)
        else method.implementations
    )


def implementations_for(name: str, problem: ProductsProblem) -> Iterator[type[BlockLoop]]:
    """Yield all implementations that apply, of all methods that do not refuse the problem."""
    tables = TABLES[name]
    if name == "conv":
        tables = tuple(table for table, is_for in zip(tables, IS_FOR) if is_for(problem))
    for table in tables:
        for method in table.values():
            if not method.refusal(problem):
                yield from (
                    implementation for implementation in implementations_of(method) if implementation.applies(problem)
                )


def by_implementation(problem: ProductsProblem, implementation: type[BlockLoop]) -> Plan | None:
    """Return the plan with this implementation; None if its smallest block exceeds the limit."""
    try:
        return choose(replace(problem, method="way"), {"way": Method((implementation,))})
    except ValueError as refusal:
        assert "workspace" in str(refusal), refusal
        return None


def integers(random: Random) -> Make:
    def made(*shape: int, dtype: str, order: str = "C") -> np.ndarray:
        rng = np.random.default_rng(random.getrandbits(32))
        values = rng.integers(-3, 4, shape).astype(dtype)
        if values.dtype.kind == "c":
            values.imag = rng.integers(-3, 4, shape)
        if order == "last":
            return np.moveaxis(np.moveaxis(values, 1, -1).copy(), -1, 1)
        return np.repeat(values, 2, axis=-1)[..., ::2] if order == "gaps" else values

    return made


def call_into_any_array(name: str, random: Random, scale: int) -> tuple[CheckedCall, Callable[[], Any]]:
    """Return a call with integers and an `out` of random layout, and the same call without `out`."""
    make = integers(random)
    function, arguments, settings = ANY[name](random, make, scale)
    (result,) = checked_call(function, *arguments, **settings).results
    out = make(*result.shape, dtype=result.dtype, order=random.choice(("C", "last", "gaps")))
    return checked_call(function, *arguments, **settings, out=out), partial(function, *arguments, **settings)


@pytest.mark.parametrize("name", ANY)
@share_of_examples(0.6)
@given(st.integers(0, 10**9))
def test_every_way_computes_the_same(name, seed):
    """All implementations that apply compute the same result, also within a small limit and on threads."""
    random = Random(seed)
    call, without_out = call_into_any_array(name, random, 10)
    out = call.arrays["out"]
    problem: Any = replace(call.problem, machine=HostModel(random.choice((1, 2))))
    expected = np.asarray(without_out())  # other tests compare it with the oracle
    atol = {"float16": 1e-3, "float64": 1e-12}.get(str(out.dtype), 1e-5) * np.abs(expected).max(initial=1)
    for implementation in implementations_for(name, problem):
        plan = by_implementation(
            replace(problem, workspace_limit=random.choice((None, about(random, 1 << 13, 1 << 17)))), implementation
        )
        if plan is None:
            continue
        out[...] = 77
        with BACKEND.current():
            BACKEND.prepare(plan)(call.arrays)
        np.testing.assert_allclose(out, expected, rtol=0, atol=atol, err_msg=implementation.__name__)


@pytest.mark.parametrize("of", ["plain", "groups", "depthwise", "one tap", "many samples", "a long line", "complex"])
@pytest.mark.parametrize("name", ["conv_grad_weight", "conv_grad_input"])
def test_blocks_of_a_gradient_are_added_up(name, of):
    """Every implementation runs within the smallest of several limits that fits it, some in several blocks."""
    rng = np.random.default_rng(0)
    call = large(name, LARGE[of], lambda *shape, dtype="float32", order="C": rng.integers(-1, 2, shape).astype(dtype))
    (result,) = call.results
    arrays = {**call.arrays, "out": np.empty(result.shape, result.dtype)}
    problem: Any = replace(call.problem, machine=HostModel(1))
    expected, several = None, 0
    for implementation in implementations_for(name, problem):
        plans = (
            by_implementation(replace(problem, workspace_limit=1 << bits), implementation) for bits in range(16, 25)
        )
        plan = next(filter(None, plans))
        with BACKEND.current():
            BACKEND.prepare(plan)(arrays)
        several += any(loop.blocks > 1 for loop in loops_of(plan))
        expected = arrays["out"].copy() if expected is None else expected
        np.testing.assert_allclose(
            arrays["out"], expected, atol=1e-3 * np.abs(expected).max(), err_msg=implementation.__name__
        )
    assert several > 1


@pytest.mark.parametrize("name", ["conv_transpose", "conv_grad_input"])
@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_ways_to_scatter_read_and_write_several_images_as_one(name, seed):
    random = Random(seed)
    make, groups, taps = integers(random), random.choice((1, 1, 2, 5)), random.choice((1, 2, 3))
    outputs, channels, size = random.randint(1, 5), random.randint(1, 5), (random.randint(3, 9), random.randint(3, 40))
    grid = [extent - taps + 1 for extent in size]
    dtype = random.choice(("float32", "float64", "float16", "complex64"))
    of_weight = {"complex64": "float32", "float32": "complex64"}.get(dtype, dtype) if random.random() < 0.3 else dtype
    weight = make(groups * outputs, channels, taps, taps, dtype=of_weight if name == "conv_transpose" else dtype)
    given = make(random.randint(1, 3), groups * outputs, *grid, dtype=dtype, order=random.choice(("C", "last")))
    shape = (len(given), groups * channels, *size)
    cut = random.randint(1, shape[1])
    shapes = [(len(given), part, *size) for part in (cut, shape[1] - cut) if part]
    dtype = "complex64" if "complex64" in (dtype, weight.dtype) else dtype
    outs = [make(*each, dtype=dtype, order=random.choice(("C", "last"))) for each in shapes]
    if name == "conv_grad_input":
        expected = cupyconv.conv_grad_input(given, weight, shape, groups=groups)
        call = checked_call(cupyconv.conv_grad_input, given, weight, shapes, groups=groups, out=outs)
    else:
        outs = [make(*shape, dtype=dtype, order=random.choice(("C", "last")))]
        cut = random.randint(1, given.shape[1])
        xs = [each for each in (given[:, :cut], given[:, cut:]) if each.size]
        expected = cupyconv.conv_transpose(given, weight, groups=groups)
        call = checked_call(cupyconv.conv_transpose, xs, weight, groups=groups, out=outs[0])
    limit = random.choice((None, about(random, 1 << 12, 1 << 16)))
    problem: Any = replace(call.problem, machine=HostModel(random.choice((1, 2))), workspace_limit=limit)
    for implementation in implementations_for(name, problem):
        if plan := by_implementation(problem, implementation):
            for out in outs:
                out[...] = 77
            with BACKEND.current():
                BACKEND.prepare(plan)(call.arrays)
            actual = np.concatenate(outs, axis=1)
            np.testing.assert_allclose(
                actual, expected, atol=1e-4 * np.abs(expected).max(), err_msg=implementation.__name__
            )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("order", ["C", "gaps", "last"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_are_written_where_the_results_lie_if_they_are_matrices_there(groups, several, order, dtype):
    make = integers(Random(1))
    grad, weight = make(2, 6, 40, 40, dtype=dtype), make(6, 4 // groups, 1, 1, dtype=dtype)
    parts = ((2, 1, 40, 40), (2, 3, 40, 40)) if several else ((2, 4, 40, 40),)
    outs = [make(*part, dtype=dtype, order=order) for part in parts]
    call = checked_call(cupyconv.conv_grad_input, grad, weight, parts, groups=groups, out=outs)
    by_group = zip(np.split(weight[:, :, 0, 0], groups), np.split(grad, groups, axis=1))
    expected = np.concatenate([np.einsum("oc,nohw->nchw", *each) for each in by_group], axis=1)
    problem: Any = replace(call.problem, machine=HostModel(1))
    implementations = list(implementations_for("conv_grad_input", problem))
    is_view = dtype == "float32" and order == "C" and (groups == 1 or not several)
    assert (transposed.ScatteredView in implementations) == is_view
    for implementation in implementations:
        for out in outs:
            out[...] = 77
        with BACKEND.current():
            BACKEND.prepare(by_implementation(problem, implementation))(call.arrays)
        np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-2, err_msg=implementation.__name__)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_inputs_are_columns_where_they_are_matrices_of_whole_groups(groups, several, dtype):
    make = integers(Random(1))
    grad, parts = make(2, 6, 20, 20, dtype=dtype), [1, 3] if several else [4]
    xs = [make(2, channels, 20, 20, dtype=dtype) for channels in parts]
    out = make(6, 4 // groups, 1, 1, dtype=dtype)
    call = checked_call(cupyconv.conv_grad_weight, grad, xs, (1, 1), groups=groups, out=out)
    by_group = zip(np.split(grad, groups, axis=1), np.split(np.concatenate(xs, axis=1), groups, axis=1))
    expected = np.concatenate([np.einsum("nohw,nchw->oc", of_grad, of_x.conj()) for of_grad, of_x in by_group])
    problem: Any = replace(call.problem, machine=HostModel(1))
    implementations = list(implementations_for("conv_grad_weight", problem))
    assert (weight_gradient.GradientView in implementations) == (groups == 1 or not several)
    for implementation in implementations:
        out[...] = 77
        with BACKEND.current():
            BACKEND.prepare(by_implementation(problem, implementation))(call.arrays)
        np.testing.assert_allclose(out[:, :, 0, 0], expected, rtol=1e-5, err_msg=implementation.__name__)


#: Bytes that no plan counts, of Python objects such as views and blocks: per call, per loop after the first, per turn,
#: and per tap if it reads a border.
OBJECTS, OF_A_LOOP, OF_A_TURN, OF_A_BORDER = 25_000, 10_000, 250, 10_000
#: Implementations with too many of these objects to measure small arrays, or with NumPy loops that have buffers.
NOT_OF_ANY_SIZE = (depthwise.ScaledPixels, depthwise.ScaledRuns, depthwise.ScaledTaps)
NOT_MEASURED = (ScatteredLoop, *NOT_OF_ANY_SIZE)
#: Implementations that need memory only for a few epilogues and shapes, and count it if these may occur.
IN_PLACE = (View, weight_gradient.GradientView)
#: Factor by which a plan may count more memory than is used: for a product of more taps, or a larger block, than exist.
FAR_MORE = 12


def taken(plan: Plan, arrays: dict[str, Any]) -> tuple[int, int]:
    """Return the peak memory of a plan's run after the first one, and the most bytes of it that no plan counts."""
    with BACKEND.current():
        run = partial(BACKEND.prepare(plan), arrays)
        run()  # sets up what all runs share, and the regions that are read
        peaks = []
        for _ in range(2):  # in one of them, a dict of the whole process may grow
            for memory in (
                MEMORY,
                *map(cached_scratch, map(np.dtype, ("float32", "float64", "complex64", "complex128"))),
            ):
                memory._give_back()
            peaks.append(peak_bytes(run))
        peak = min(peaks)
    loops = [*loops_of(plan)]
    objects = OBJECTS + OF_A_LOOP * max(0, len(loops) - 1)
    for loop in loops:
        border = OF_A_BORDER * loop.geometry.taps * (loop.geometry.padding_mode != "constant")
        objects += OF_A_TURN * loop.turns + border
    return peak, int(objects * OF_OBJECTS)


@pytest.mark.parametrize("name", ["conv", "conv_grad_weight"])
@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_every_way_takes_the_memory_that_it_says(name, small_buffers, seed):
    """A run needs no more than planned, and not far less: memory that is counted but unused makes blocks too small."""
    random = Random(seed)
    call, _ = call_into_any_array(name, random, 60)
    problem: Any = replace(call.problem, machine=HostModel(1), workspace_limit=about(random, 1 << 17, 1 << 22))
    assume(problem.geometry.products < 10_000_000)
    for implementation in (
        implementation
        for implementation in implementations_for(name, problem)
        if not issubclass(implementation, NOT_MEASURED)
    ):
        if plan := by_implementation(problem, implementation):
            peak, objects = taken(plan, call.arrays)
            assert peak <= plan.workspace_bytes + objects, (peak, implementation, plan)
            # A lone product keeps its memory from the first run.
            if not issubclass(implementation, IN_PLACE) and not any(
                getattr(loop, "lone", None) for loop in loops_of(plan)
            ):
                assert peak + OBJECTS >= plan.workspace_bytes // FAR_MORE, (peak, implementation, plan)


def ones(*shape: int, dtype: str = "float32", order: str = "C") -> np.ndarray:
    values = np.ones(shape, dtype)
    return np.moveaxis(np.moveaxis(values, 1, -1).copy(), -1, 1) if order == "last" else values


#: An implementation, and a call that needed far more memory than planned, or would if the plan left out what is named.
NOT_COUNTED = {
    "a weight in the order of its taps, which is transformed": (
        "Winograd", cupyconv.conv, (ones(5, 17, 8, 14, 3), ones(42, 17, 3, 3, 3)), {},
    ),
    "a weight copied twice": (
        "Columns", cupyconv.conv,
        (ones(8, 21, 4, 9, 4), ones(100, 21, 3, 3, 3, dtype="complex64", order="last")), {"stride": (1, 3, 2)},
    ),
    "what a wide border is gathered to": (
        "Columns", cupyconv.conv, (ones(1, 16, 50, 50), ones(2, 16, 2, 1)), {"padding": 60, "padding_mode": "wrap"},
    ),
    "a prologue of two steps": (
        "Columns", cupyconv.conv, (ones(11, 28, 6, 5, 4), ones(6, 28, 1, 1, 1)), {"prologue": (ones(28), ones(28), None)},
    ),
    "the product of a tap, beside the only block's sums": (
        "GradientMecProducts", cupyconv.conv_grad_weight, (ones(11, 104, 1, 4, 2, dtype="complex64"), ones(11, 54, 3, 12, 7, dtype="complex64"), (3, 3, 2)),
        {"stride": (1, 3, 3), "groups": 2},
    ),
    "the product of the second of two blocks": (
        "GradientChannels", cupyconv.conv_grad_weight, (ones(1, 512, 32, 64), ones(1, 8, 34, 66), (3, 3)), {},
    ),
    "what a wide border of tiles is gathered to": (
        "GradientWinograd", cupyconv.conv_grad_weight, (ones(1, 4, 168, 168), ones(1, 64, 50, 50), (3, 3)),
        {"padding": 60, "padding_mode": "wrap"},
    ),
    "what a wide border of a convolution's tiles is gathered to": (
        "Winograd", cupyconv.conv, (ones(1, 64, 50, 50), ones(4, 64, 3, 3)), {"padding": 60, "padding_mode": "wrap"},
    ),
    "a convolution's tiles that begin with an activation": (
        "Winograd", cupyconv.conv, (ones(2, 64, 40, 40), ones(4, 64, 3, 3)), {"prologue": (ones(64), ones(64), "gelu")},
    ),
    "the gradient where a block has a part of each row": (
        "GradientWinograd", cupyconv.conv_grad_weight, (ones(1, 512, 4, 1000), ones(1, 2, 6, 1002), (3, 3)), {},
    ),
    "columns of a block that is not finite": (
        "GradientWinograd", cupyconv.conv_grad_weight,
        (ones(1, 128, 40, 40) * np.float32(np.inf), ones(1, 16, 42, 42), (3, 3)), {},
    ),
    "what came back of the outputs before": (
        "GradientFft", cupyconv.conv_grad_weight, (ones(8, 360, 14), ones(8, 204, 43), (3,)), {"stride": 3, "groups": 6},
    ),
    "the tile that two taps are copied from": (
        "Columns", cupyconv.conv, (ones(16, 32, 30, 30), ones(2, 32, 1, 2)), {"padding": 1},
    ),
    "the product of some taps": (
        "GradientTaps", cupyconv.conv_grad_weight, (ones(1, 128, 4, 4), ones(1, 32, 10, 10), (7, 7)), {},
    ),
    "both parts of a gradient, zeros between their rows": (
        "GradientRuns", cupyconv.conv_grad_weight,
        (ones(1, 64, 40, 40, dtype="complex64"), ones(1, 16, 42, 42), (3, 3)), {"groups": 16},
    ),
    "products of pieces of a run, and of pixels alone": (
        "GradientRuns", cupyconv.conv_grad_weight,
        (ones(1, 32, 40, 40) * np.float32(np.inf), ones(1, 16, 100, 100), (61, 61)), {"groups": 16},
    ),
    "what a wide border of runs is gathered to": (
        "GradientRuns", cupyconv.conv_grad_weight, (ones(1, 16, 168, 168), ones(1, 16, 50, 50), (3, 3)),
        {"groups": 16, "padding": 60, "padding_mode": "wrap"},
    ),
    "the gradient of a box of pixels that are not one run": (
        "GradientFft", cupyconv.conv_grad_weight, (ones(1, 32, 46, 1986), ones(1, 8, 60, 2000), (15, 15)), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_what_took_more_memory_than_it_said(name, small_buffers):
    implementation, function, arguments, settings = NOT_COUNTED[name]
    call = checked_call(function, *arguments, **settings)
    (result,) = call.results
    problem: Any = replace(call.problem, machine=HostModel(1), workspace_limit=8_000_000)
    (known,) = (each for each in implementations_for(function.__name__, problem) if each.__name__ == implementation)
    plan = by_implementation(problem, known)
    assert plan
    peak, objects = taken(plan, {**call.arrays, "out": np.empty(result.shape, result.dtype)})
    assert peak <= plan.workspace_bytes + objects, (peak, plan)


@pytest.mark.parametrize("implementation, side", [(transposed.ScatteredTaps, 8), (transposed.ScatteredColumns, 24)])
def test_products_with_both_parts_of_a_complex_weight_count(implementation, side, small_buffers):
    """Products are counted for taps that share a product too, as is the weight in the order of taps."""
    x, weight = ones(1, 256, side, side), ones(256, 64, 5, 5, dtype="complex64")
    call = checked_call(cupyconv.conv_transpose, x, weight)
    (result,) = call.results
    plan = by_implementation(replace(call.problem, machine=HostModel(1), workspace_limit=1 << 26), implementation)  # type: ignore[type-var]
    assert plan
    peak, objects = taken(plan, {**call.arrays, "out": np.empty(result.shape, result.dtype)})
    assert plan.workspace_bytes * 2 // 3 <= peak <= plan.workspace_bytes + objects, (peak, plan)


def test_a_gradient_is_read_where_it_lies_where_a_block_is_a_run_of_its_pixels():
    grad = ones(2, 3, 5, 4, 6)
    problem: Any = checked_call(cupyconv.conv_grad_weight, grad, ones(2, 2, 7, 6, 8), (3, 3, 3)).problem
    plan = by_implementation(replace(problem, machine=HostModel(1)), weight_gradient.GradientColumns)
    assert plan
    (loop,) = loops_of(plan)
    for block in product(*(range(1, extent + 1) for extent in (2, 5, 4, 6))):
        samples, *pixels = map(slice, block)
        matrix = grad[samples, :, *pixels].swapaxes(0, 1).reshape(3, -1)
        is_run = np.may_share_memory(matrix, grad) and matrix[0].flags.c_contiguous
        assert loop.is_factor(block) == is_run, block


#: Shapes of the gradient, the weight and x, and settings.
WIDE_BORDERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "a line": ((1, 2, 4_998), (2, 64, 3), (1, 64, 2_000), {"padding": 1_500}),
    "strides": ((1, 2, 1_666), (2, 64, 3), (1, 64, 2_000), {"padding": 1_500, "stride": 3}),
    "corners": ((1, 2, 59, 59), (2, 128, 3, 3), (1, 128, 21, 21), {"padding": 20}),
    "fewer pixels than taps": ((1, 2, 2, 2), (2, 128, 20, 20), (1, 128, 11, 11), {"padding": 5}),
    "samples": ((8, 2, 3), (2, 512, 40), (8, 512, 22), {"padding": 10}),
    "several times around": ((1, 2, 2_498), (2, 128, 3), (1, 128, 500), {"padding": 1_000}),
}


@pytest.mark.parametrize("name", WIDE_BORDERS)
@pytest.mark.parametrize("implementation", [transposed.ScatteredTaps, transposed.ScatteredColumns])
@pytest.mark.parametrize("limit", [1 << 19, 1 << 22])
def test_what_a_wide_border_is_added_to_counts(limit, implementation, name, small_buffers):
    """The buffer for a border spans all elements that the border refers to; the border of a short run spans fewer."""
    grad, weight, x, settings = WIDE_BORDERS[name]
    call = checked_call(cupyconv.conv_grad_input, ones(*grad), ones(*weight), x, **settings, padding_mode="wrap")
    plan = by_implementation(replace(call.problem, machine=HostModel(1), workspace_limit=limit), implementation)  # type: ignore[type-var]
    assert plan
    peak, objects = taken(plan, {**call.arrays, "out": np.empty(x, np.float32)})
    assert plan.workspace_bytes * 2 // 3 <= peak <= plan.workspace_bytes + min(objects, 40_000), (peak, plan)


@pytest.mark.parametrize("function", [cupyconv.conv, cupyconv.conv_grad_weight])
@pytest.mark.parametrize("taps", [60, 100])
def test_of_a_wide_border_there_are_the_indices_of_one_tap_at_a_time(taps, function, small_buffers):
    """Indices of all taps once needed 25 MB, while the plan stated 2.6 MB."""
    size, pad = 10_000, 15_000
    x, weight, grad = ones(1, 2, size), ones(1, 2, taps), ones(1, 1, size + 2 * pad - taps + 1)
    arguments: Any = (x, weight) if function is cupyconv.conv else (grad, x, (taps,))
    call = checked_call(function, *arguments, padding=pad, padding_mode="wrap", method="direct")
    (result,) = call.results
    plan = planned(replace(call.problem, machine=HostModel(1)), "direct", 1 << 20)  # type: ignore[type-var]
    assert plan
    peak, objects = taken(plan, {**call.arrays, "out": np.empty(result.shape, result.dtype)})
    assert peak <= plan.workspace_bytes + min(objects, 200_000), (peak, plan)


#: Shapes of x and of the weight of a convolution, and settings.
Call = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
#: Calls with arrays so large that Python objects are small compared with them.
LARGE: dict[str, Call] = {
    "plain": ((2, 32, 40, 40), (48, 32, 3, 3), {}),
    "float16, that ends": ((2, 32, 40, 40), (48, 32, 3, 3), {"dtype": "float16", "activation": "gelu"}),
    "that begins and ends": ((2, 32, 40, 40), (48, 32, 3, 3), {"prologue": "relu", "activation": "gelu"}),
    "channels last": ((2, 32, 40, 40), (48, 32, 3, 3), {"order": "last", "padding": 1, "residual": True}),
    "strides": ((2, 32, 60, 60), (48, 32, 3, 3), {"stride": 2}),
    "a border": ((2, 32, 40, 40), (48, 32, 3, 3), {"padding": 2, "padding_mode": "edge"}),
    "a border that begins": ((2, 32, 40, 40), (48, 32, 3, 3), {"padding": 2, "padding_mode": "edge", "prologue": "relu"}),
    "groups": ((2, 32, 40, 40), (48, 16, 3, 3), {"groups": 2, "prologue": "relu"}),
    "depthwise": ((2, 64, 50, 50), (64, 1, 3, 3), {"groups": 64}),
    "depthwise, float16": ((2, 64, 50, 50), (128, 1, 3, 3), {"groups": 64, "dtype": "float16", "activation": "gelu"}),
    "many samples": ((24, 32, 8, 8), (24, 32, 3, 3), {}),
    "many samples, float16": ((24, 32, 10, 10), (24, 32, 1, 3), {"dtype": "float16"}),
    "taps of many channels, one after the other": ((1, 256, 30, 30), (48, 256, 3, 3), {"prologue": "relu"}),
    "one tap": ((2, 64, 40, 40), (48, 64, 1, 1), {"prologue": "relu", "activation": "gelu"}),
    "one tap, float16": ((2, 64, 40, 40), (48, 64, 1, 1), {"dtype": "float16"}),
    "a large weight": ((2, 128, 12, 12), (128, 128, 3, 3), {"of_weight": "last"}),
    "a long line": ((2, 4, 20_000), (4, 4, 15), {}),
    "complex": ((2, 32, 30, 30), (48, 32, 3, 3), {"dtype": "complex64"}),
    "complex times real": ((2, 32, 30, 30), (48, 32, 3, 3), {"dtype": "complex64", "dtype_of_weight": "float32"}),
    "real times complex": ((2, 32, 30, 30), (48, 32, 3, 3), {"dtype_of_weight": "complex64"}),
}  # fmt: skip
#: The calls that run within a small limit.
WITHIN_LITTLE = "depthwise", "channels last", "groups", "one tap, float16", "complex", "a border", "float16, that ends"
#: Smallest share of the counted memory that each implementation uses for these calls.
MIN_TAKEN = 1 / 3


def large(name: str, of: Call, ones: Make = ones) -> CheckedCall:
    """Return the call of an operation for these shapes and settings."""
    size, of_weight, settings = of
    settings = dict(settings)
    dtype, order = settings.pop("dtype", "float32"), settings.pop("order", "C")
    weight = ones(*of_weight, dtype=settings.pop("dtype_of_weight", dtype), order=settings.pop("of_weight", "C"))
    x, ends = ones(*size, dtype=dtype, order=order), ("activation", "prologue", "residual")
    if name == "conv":
        if "prologue" in settings:
            settings["prologue"] = (*(ones(size[1], dtype=dtype) for _ in range(2)), settings["prologue"])
        if settings.pop("residual", None):
            settings["residual"] = ones(*checked_call(cupyconv.conv, x, weight, **settings).results[0].shape)
        return checked_call(cupyconv.conv, x, weight, **settings)
    activation = {key: value for key, value in settings.items() if key == "activation"}
    settings = {key: value for key, value in settings.items() if key not in ends}
    (result,) = checked_call(cupyconv.conv, x, weight, **settings).results
    if name == "conv_grad_input":
        grad = ones(*result.shape, dtype=dtype, order=order)
        return checked_call(cupyconv.conv_grad_input, grad, weight, size, **settings)
    if name == "conv_transpose":
        settings = {key: value for key, value in settings.items() if key != "padding_mode"} | activation
        return checked_call(cupyconv.conv_transpose, ones(*result.shape, dtype=dtype, order=order), weight, **settings)
    grad = ones(*result.shape, dtype=weight.dtype.name, order=order)
    return checked_call(cupyconv.conv_grad_weight, grad, x, of_weight[2:], **settings)


@pytest.mark.parametrize("of", LARGE)
@pytest.mark.parametrize("name", [*ANY, "conv_transpose"])
def test_every_way_takes_the_memory_that_it_says_of_large_arrays(name, of, small_buffers):
    """Large arrays are not hidden by Python objects; input gradients are measured too."""
    call, limit = large(name, LARGE[of]), 1_000_000 if of in WITHIN_LITTLE else 8_000_000
    (result,) = call.results
    arrays = {**call.arrays, "out": np.empty(result.shape, result.dtype)}
    problem: Any = replace(call.problem, machine=HostModel(1), workspace_limit=limit)
    plans = [by_implementation(problem, implementation) for implementation in implementations_for(name, problem)]
    if name == "conv_grad_input":  # gathered, by a convolution's implementations
        plans += [planned(problem, method) for method in METHODS]
    for plan in filter(None, plans):
        loops = [*loops_of(plan)]
        if any(isinstance(loop, NOT_OF_ANY_SIZE) for loop in loops):
            continue
        peak, objects = taken(plan, arrays)
        assert peak <= plan.workspace_bytes + objects, (peak, plan)
        if not any(isinstance(loop, IN_PLACE) for loop in loops):
            assert peak + OBJECTS >= MIN_TAKEN * plan.workspace_bytes, (peak, plan)


@pytest.mark.parametrize("groups", [1, 2, 32])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_way_ends_with_bias_residual_and_activation(dtype, groups):
    """The residual is first rounded to the result's dtype, as if it were given in that dtype."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((2, 32, 12, 40), (32, 32 // groups, 3, 3)))
    bias, plain = np.arange(-16, 16).astype(dtype), cupyconv.conv(x, weight, groups=groups)
    residual = -plain.astype(np.float32) + rng.choice([-1, 1, 2], plain.shape).astype(np.float32)
    residual += np.float32(0.6 * 2**-10) * (np.abs(residual) == 1)
    before = plain.astype(np.float32) + bias.astype(np.float32)[:, None, None]
    expected = np.maximum(before + residual.astype(dtype).astype(np.float32), 0)
    call = checked_call(cupyconv.conv, x, weight, bias, residual=residual, activation="relu", groups=groups)
    problem: Any = replace(call.problem, machine=HostModel(1), workspace_limit=600_000)
    for implementation in implementations_for("conv", problem):
        if plan := by_implementation(problem, implementation):
            out = np.full(plain.shape, np.nan, dtype)
            with BACKEND.current():
                BACKEND.prepare(plan)({**call.arrays, "out": out})
            rounds = 1e-2 if implementation.__name__ in ("Fft", "Winograd") else 1e-4  # the others' sums are exact
            np.testing.assert_allclose(
                out, expected.astype(dtype), rtol=0, atol=rounds, err_msg=implementation.__name__
            )


def test_what_is_made_of_a_constant_weight_has_the_groups_of_its_call():
    x, weight = np.ones((1, 4, 1, 20), np.float16), np.arange(16).astype(np.float16).reshape(4, 2, 1, 2)
    weight.flags.writeable = False
    forms = []
    for groups in (1, 2):
        problem: Any = checked_call(cupyconv.conv, x[:, : 2 * groups], weight, groups=groups).problem
        (loop,) = by_implementation(replace(problem, machine=HostModel(1)), Columns).steps  # type: ignore[union-attr]
        forms.append(loop.form)  # type: ignore[attr-defined]
    assert forms[0] != forms[1]


def least_limit(problem: ProductsProblem, implementation: type[BlockLoop]) -> tuple[int, Plan]:
    """Return the smallest limit for which an implementation has a plan, and this plan."""
    too_little, enough, best = 0, 1 << 26, None
    while enough - too_little > 1:
        limit = (too_little + enough) // 2
        plan = by_implementation(replace(problem, workspace_limit=limit), implementation)
        if plan is None:
            too_little = limit
        else:
            enough, best = limit, plan
    assert best
    return enough, best


@pytest.mark.parametrize("mode", ["constant", "wrap"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("implementation", [Columns, TapByTap, View])
def test_the_least_limit_is_what_the_smallest_block_takes(implementation, threads, mode):
    """Counted and available memory agree up to alignment, also for a widened weight and for a border's indices."""
    for outputs in range(1, 5):
        x, weight = (
            array(1, 3, 1400, dtype="float16"),
            array(outputs, 3, 1 if implementation is View else 5, dtype="float16"),
        )
        padding = 0 if implementation is View else 1500
        call = checked_call(cupyconv.conv, x, weight, padding=padding, padding_mode=mode, stride=3)
        if not implementation.applies(call.problem):
            continue
        limit, plan = least_limit(replace(call.problem, machine=HostModel(threads)), implementation)
        assert limit - 2 * Plan.ALIGNMENT <= plan.workspace_bytes <= limit


def test_runs_are_of_as_few_groups_as_there_is_room_for():
    limits = []
    for groups in (1, 64):
        grad, x = array(1, groups, 40, 2000), array(1, groups, 42, 2002)
        problem: Any = checked_call(cupyconv.conv_grad_weight, grad, x, (3, 3), groups=groups).problem
        limits.append(least_limit(replace(problem, machine=HostModel(1)), GradientRuns)[0])
    assert limits[1] < 4 * limits[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_by_what_a_plan_says_it_takes_memory_of_a_gradient_is_kept_or_not(threads):
    """The bytes that decide this include the product that a lone block writes to the place of the sums."""
    seen = 0
    for of in LARGE.values():
        problem: Any = large("conv_grad_weight", of, array).problem
        problem = replace(problem, machine=HostModel(threads), workspace_limit=8_000_000)
        for plan in (
            by_implementation(problem, implementation)
            for implementation in implementations_for("conv_grad_weight", problem)
        ):
            for loop in () if plan is None else plan.steps:
                nbytes: int = getattr(loop, "_memory_bytes", 0)
                assert not nbytes or 0.95 < nbytes / plan.workspace_bytes < 1.6, plan
                seen += nbytes > 0
    assert seen > 50


def test_at_the_least_channels_are_taken_one_by_one():
    """Even one row of the gradient exceeds the target size then."""
    grad, x = array(1, 8, 4, 2000), array(1, 64, 6, 2002)
    problem: Any = checked_call(cupyconv.conv_grad_weight, grad, x, (3, 3)).problem
    _, plan = least_limit(replace(problem, machine=HostModel(1)), GradientChannels)
    (loop,) = plan.steps
    assert isinstance(loop, GradientChannels) and loop.channels == 1


@pytest.mark.parametrize("implementation", [Columns, TapByTap, GradientChannels, transposed.ScatteredColumns])
def test_indices_of_a_border_count_as_what_they_take(implementation):
    """Indices need eight bytes per element of a row that is read; a border that is a run of the image needs none."""
    x, weight, sizes = array(1, 1, 20_000), array(1, 1, 2), {}
    for mode, pad in product(("constant", "wrap"), (20_000, 20_001)):
        border: Any = dict(padding=pad, padding_mode=mode)
        of_grad = array(1, 1, 19_999 + 2 * pad)
        problem: Any = checked_call(cupyconv.conv, x, weight, **border).problem
        if implementation is GradientChannels:
            problem = checked_call(cupyconv.conv_grad_weight, of_grad, array(1, 2, 20_000), 2, **border).problem
        if implementation is transposed.ScatteredColumns:
            problem = checked_call(cupyconv.conv_grad_input, of_grad, weight, x.shape, **border).problem
        plan = by_implementation(replace(problem, machine=HostModel(1), workspace_limit=1 << 30), implementation)
        assert plan
        (loop,) = loops_of(plan)
        assert isinstance(loop, (PixelLoop, ScatteredLoop))
        sizes[mode, pad] = plan.workspace_bytes / loop.block[3]
    assert 8 <= sizes["wrap", 20_001] - sizes["constant", 20_001] <= 64
    assert sizes["wrap", 20_000] == sizes["constant", 20_000]


@pytest.mark.parametrize("limit", [50_000, 3 << 20, 5 << 20, 9 << 20])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_no_more_threads_than_there_are_nor_than_have_what_each_needs(threads, limit):
    seen = 0
    for x, weight, settings in (
        (array(4, 8, 30, 300), array(8, 8, 3, 3), {}),
        (array(4, 64, 40, 40), array(64, 1, 3, 3), {"groups": 64}),
        (array(2, 16, 40, 90), array(16, 8, 3, 5), {"groups": 2}),
    ):
        problem: Any = checked_call(cupyconv.conv, x, weight, **settings).problem
        problem = replace(problem, machine=HostModel(threads), workspace_limit=limit)
        for implementation in (
            implementation
            for implementation in implementations_for("conv", problem)
            if getattr(implementation, "thread_bytes", 0)
        ):
            plan = by_implementation(problem, implementation)
            for loop in () if plan is None else loops_of(plan):
                assert isinstance(loop, ConvLoop) and 1 <= loop.threads <= threads
                assert loop.problem.host.threads in (1, min(threads, max(1, limit // loop.thread_bytes)))
                seen += 1
    assert seen or limit < 100_000


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["conv_grad_weight", "conv_grad_input", "conv_transpose"])
def test_what_a_refused_way_says_it_needs_is_about_enough(name, threads):
    """A gradient stays within even the smallest limit that fits it, also for sizes that are not whole lines."""
    call = large(name, ((2, 9, 11, 13), (7, 9, 3, 3), {"dtype": "float16"}))
    problem: Any = replace(call.problem, machine=HostModel(threads), workspace_limit=1)
    for implementation in implementations_for(name, problem):
        with pytest.raises(ValueError, match="workspace") as refusal:
            choose(replace(problem, method="way"), {"way": Method((implementation,))})
        if "spectra" in str(refusal.value):  # these refusals name no number
            continue
        needed = int(str(refusal.value).partition("needs ")[2].partition(" bytes")[0].replace(",", ""))
        # Twice may not be enough: with more memory, pieces are larger too.
        assert needed > 1 and by_implementation(replace(problem, workspace_limit=3 * needed), implementation), (
            implementation
        )
        limit, plan = least_limit(problem, implementation)
        copied = {buffer.name: buffer.nbytes for buffer in plan.workspace}.get("weight", 0)
        sums = {buffer.name: buffer.nbytes for buffer in plan.workspace}.get("sums", 0)
        assert plan.workspace_bytes <= replace(problem, workspace_limit=limit).limit_with(copied + sums), implementation


@pytest.mark.parametrize("implementation", [Columns, TapByTap])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_needed_is_said_to_the_byte_where_a_large_weight_is_copied(implementation, dtype):
    """The copy may use as much memory again in addition to the limit; a refusal names only the limit."""
    x, weight = array(1, 64, 30, 30, dtype=dtype), array(300, 64, 3, 3, dtype=dtype, order="last")
    problem: Any = checked_call(cupyconv.conv, x, weight).problem
    problem = replace(problem, machine=HostModel(1), workspace_limit=1000)
    limit, _ = least_limit(problem, implementation)
    with pytest.raises(ValueError, match=f"needs {limit:,} bytes of workspace, the limit is 1,000"):
        choose(replace(problem, method="way"), {"way": Method((implementation,))})


@pytest.mark.parametrize("side, divided", [(7, 2), (14, 2), (28, 1)])
def test_one_product_of_few_pixels_that_ends_is_divided_by_blas(side, divided, monkeypatch):
    """Our threads would read the weight twice; a larger image's sums would leave the cache before the epilogue."""
    monkeypatch.setattr("cupyconv.numpy.threads.BLAS", SimpleNamespace(threads=2))
    problem: Any = checked_call(cupyconv.conv, array(1, 64, side, side), array(64, 64, 1, 1), activation="relu").problem
    (loop,) = by_implementation(replace(problem, machine=HostModel(2)), View).steps  # type: ignore[union-attr]
    assert isinstance(loop, View) and loop.divided == divided


def test_a_product_of_one_tap_is_as_large_as_its_sums():
    x, grad = ones(1, 40, 40, 40), ones(1, 30, 38, 38)
    problem: Any = checked_call(cupyconv.conv_grad_weight, grad, x, (3, 3)).problem
    plan = by_implementation(
        replace(problem, machine=HostModel(1), workspace_limit=1 << 24), weight_gradient.GradientTaps
    )
    assert plan and {buffer.name: buffer.nbytes for buffer in plan.workspace}["products"] == 40 * 30 * 4


@pytest.mark.parametrize("dtype, is_copied", [("complex64", False), ("float16", True)])
def test_a_weight_is_copied_where_products_do_not_take_it_as_it_lies(dtype, is_copied):
    call = checked_call(cupyconv.conv_transpose, ones(2, 6, 20, 20, dtype=dtype), ones(6, 4, 3, 3, dtype=dtype))
    plan = by_implementation(replace(call.problem, machine=HostModel(1)), transposed.ScatteredColumns)  # type: ignore[type-var]
    assert plan and any(buffer.name == "weight" and buffer.nbytes for buffer in plan.workspace) == is_copied


def test_the_weight_stays_as_it_is_where_products_take_its_conjugate():
    make = integers(Random(0))
    grad, weight = make(1, 3, 9, 9, dtype="complex64"), make(3, 2, 3, 3, dtype="complex64")
    before = weight.copy()
    call = checked_call(cupyconv.conv_grad_input, grad, weight, (1, 2, 11, 11))
    for implementation in implementations_for("conv_grad_input", call.problem):  # type: ignore[arg-type]
        plan = by_implementation(replace(call.problem, machine=HostModel(1)), implementation)  # type: ignore[type-var]
        BACKEND.prepare(plan)({**call.arrays, "out": np.empty((1, 2, 11, 11), np.complex64)})  # type: ignore[arg-type]
        np.testing.assert_array_equal(weight, before)


def test_products_are_scattered_pixel_by_pixel_in_three_dimensions_and_of_inputs_that_part_a_group():
    make = integers(Random(0))
    x, weight = make(1, 8, 2, 2, 2, dtype="float32"), make(8, 3, 3, 3, 3, dtype="float32")
    expected = cupyconv.conv_transpose(x, weight, groups=2, method="fft")
    out = np.empty_like(expected)
    call = checked_call(cupyconv.conv_transpose, [x[:, :6], x[:, 6:]], weight, groups=2, out=out)
    for threads in (1, 2):
        problem: Any = replace(call.problem, machine=HostModel(threads))
        for implementation in implementations_for("conv_transpose", problem):
            if plan := by_implementation(problem, implementation):
                out[...] = 77
                BACKEND.prepare(plan)(call.arrays)
                np.testing.assert_allclose(out, expected, atol=1e-3, err_msg=implementation.__name__)


@pytest.mark.parametrize("side, is_kept", [(8, True), (800, False)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_of_a_weight_that_never_changes_what_is_made_is_kept_and_counted_once(dtype, side, is_kept):
    """The arranged weight counts as cached memory or as workspace, and as neither if none is needed."""
    problem: Any = checked_call(
        cupyconv.conv, array(1, side, 9, 9, dtype=dtype), array(side, side, 3, 3, dtype=dtype)
    ).problem
    problem = replace(problem, machine=HostModel(1), workspace_limit=1 << 28)
    made = side * side * 9 * 4
    for is_constant in (False, True):
        plan = by_implementation(replace(problem, weight_is_constant=is_constant), Columns)
        assert plan
        (loop,) = loops_of(plan)
        sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
        stays = is_constant and is_kept and dtype == "float16"
        assert loop.cached_bytes == (made if stays else 0)
        assert (sizes.get("weight", 0) >= made) == (dtype == "float16" and not stays)
    for implementation in implementations_for("conv", problem):
        plan = by_implementation(replace(problem, weight_is_constant=True), implementation)
        assert plan is None or all(step.cached_bytes >= 0 for step in plan.steps)  # type: ignore[attr-defined]


def test_a_part_that_has_no_plan_like_another_has_one_of_its_own():
    one, other = (checked_call(cupyconv.conv, array(1, 4, 9, 9), array(4, 4, k, k)).problem for k in (3, 1))
    like = convolution.plan_conv(replace(one, machine=HostModel(1), method="winograd"))  # type: ignore[arg-type]
    plan = convolution.plan_like(like, replace(other, machine=HostModel(1)))  # type: ignore[arg-type]
    assert plan == convolution.plan_conv(replace(other, machine=HostModel(1)))  # type: ignore[arg-type]


def test_only_for_several_threads_the_libraries_of_blas_are_looked_for():
    """From then on, plans depend on the number of BLAS's threads."""
    problem = checked_call(cupyconv.conv, array(1, 4, 9, 9), array(4, 4, 3, 3)).problem
    for threads in (1, 2):
        backend = NumpyBackend()
        backend.plan(replace(problem, machine=HostModel(threads)))
        assert (backend.signature(())[0] is not None) == (threads > 1)


def test_a_call_is_silent_whatever_the_caller_asks_for():
    with np.errstate(all="raise"):
        assert {*NumpyBackend().within(lambda _: np.geterr(), ()).values()} == {"ignore"}


@pytest.mark.parametrize("name", ANY)
@share_of_examples(1)
@given(st.integers(0, 10**9))
def test_blocks_are_all_of_the_result_each_pixel_once(name, seed):
    problem, _ = problem_of(name, Random(seed))
    for implementation in implementations_for(name, problem):
        plan = by_implementation(problem, implementation)
        for loop in () if plan is None else loops_of(plan):
            loop = loop.first if isinstance(loop, FftShares) else loop
            geometry = loop.geometry
            if isinstance(loop, ScatteredLoop):
                blocks = list(loop.each_block)
                assert len(blocks) == loop.blocks
                assert sum(map(prod, (map(len, block) for block in blocks))) == geometry.batch * geometry.in_channels
                assert len({(samples.start, channels.start) for samples, channels in blocks}) == len(blocks)
                assert len(loop.pixel_runs) == loop.runs
                assert sum(prod(map(len, run)) for run in loop.pixel_runs) == geometry.pixels
            elif isinstance(loop, PixelLoop):
                if isinstance(loop, GradientChannels):
                    assert geometry.in_channels <= loop.shares * loop.channels < 2 * geometry.in_channels
                areas = [block.area for block in loop.each_block]  # each for all groups, or some of them
                assert len(areas) % loop.blocks == 0 and loop.rounds >= len(areas) and prod(loop.block) == max(areas)
                assert sum(areas) * loop.blocks == len(areas) * geometry.batch * geometry.pixels, loop


def sums_of(
    grad: np.ndarray, x: np.ndarray, kernel: tuple[int, ...], *, threads: int = 1, limit: int = 1 << 20, out: Any = None
) -> Iterator[tuple[ProductsProblem, Plan | None]]:
    """Yield the plan of a weight gradient by each implementation that sums over blocks."""
    call = checked_call(cupyconv.conv_grad_weight, grad, x, kernel, out=out)
    problem: Any = replace(call.problem, machine=HostModel(threads), workspace_limit=limit)
    for implementation in implementations_for("conv_grad_weight", problem):
        if issubclass(implementation, WeightGradientLoop):
            yield problem, by_implementation(problem, implementation)


def test_sums_beside_a_result_are_those_of_outputs_that_have_room():
    """At least one output's sums are needed, even beyond the limit; a result in C order holds all sums itself."""
    grad, x, apart = array(1, 4, 201), array(1, 16, 300), np.empty((4, 16, 200), np.float32)[..., ::2]
    seen = 0
    for limit in range(2_000, 20_000, 1_000):
        pairs = [sums_of(grad, x, (100,), limit=limit, out=out) for out in (np.empty((4, 16, 100), np.float32), apart)]
        for (problem, in_place), (_, beside) in zip(*pairs, strict=True):
            if in_place is None:
                continue
            assert beside is not None
            assert len(in_place.steps) == 1 and not any(buffer.name == "sums" for buffer in in_place.workspace)
            assert beside.bytes_moved >= problem.minimal_bytes * len(beside.steps)
            assert sum(step.flops for step in beside.steps) == problem.flops  # type: ignore[attr-defined]
            seen += len(beside.steps) > 1
    assert seen


def test_blocks_of_few_bytes_a_pixel_keep_within_the_limit():
    """The alignment of each piece of memory counts too."""
    for limit in range(8_000, 16_000, 370):
        for _, plan in sums_of(array(1, 1, 3998), array(1, 1, 4000), (3,), limit=limit):
            assert plan is None or plan.workspace_bytes <= limit


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limit", [60_000, 150_000, 400_000, 3_000_000])
def test_products_of_a_sum_leave_room_for_its_blocks(threads, limit):
    grad, x = array(4, 64, 30, 30), array(4, 64, 32, 32)
    for problem, plan in sums_of(grad, x, (3, 3), threads=threads, limit=limit):
        sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace} if plan else {}
        one = threads * problem.geometry.reduction * 4
        assert sizes.get("products", 0) <= max(limit // 4, one) + Plan.ALIGNMENT


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_have_as_many_blocks_of_a_sum(threads, monkeypatch):
    shares: list[int] = []
    own = WeightRun.sum_over

    def sum_over(run: WeightRun, share: tuple[Any, int]) -> np.ndarray:
        blocks = list(share[0])
        shares.append(len(blocks))
        return own(run, (blocks, share[1]))

    monkeypatch.setattr(WeightRun, "sum_over", sum_over)
    grad, x = ones(5, 8, 30, 30), ones(5, 4, 32, 32)
    for _, plan in sums_of(grad, x, (3, 3), threads=threads, limit=200_000):
        for loop in () if plan is None else loops_of(plan):
            shares.clear()
            loop.run({"grad": grad, "x": x, "out": np.empty((8, 4, 3, 3), np.float32)})  # type: ignore[attr-defined]
            assert sum(shares) == loop.blocks and max(shares) == -(-loop.blocks // loop.threads)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 3)])
def test_a_gradient_is_copied_where_its_pixels_are_not_in_the_order_of_the_products(kernel, monkeypatch):
    """A gradient is copied only then, and exactly the copies that are made are counted."""
    seen, own = [], WeightRun._grad

    def read(run: WeightRun, block: Any, part: int) -> np.ndarray:
        grad = block.of(run.grads[part]).swapaxes(0, 1)
        if run.loop.shares_columns:
            grad = np.moveaxis(grad, 2 + run.geometry.outermost, 1)
        as_it_lies = run.loop.reads_boxes or np.shares_memory(grad.reshape(len(grad), -1), grad)
        result = own(run, block, part)
        assert run.loop.is_factor(block.size) == as_it_lies == np.shares_memory(result, run.grads[part])
        seen.append(as_it_lies)
        return result

    monkeypatch.setattr(WeightRun, "_grad", read)
    x, grad = ones(4, 8, 30, 30), ones(4, 6, *(31 - taps for taps in kernel))
    for limit in (50_000, 150_000, 1 << 20):
        for _, plan in sums_of(grad, x, kernel, limit=limit):
            for loop in () if plan is None else loops_of(plan):
                loop.run({"grad": grad, "x": x, "out": np.empty((6, 8, *kernel), np.float32)})  # type: ignore[attr-defined]
    assert {*seen} == {False, True}


@pytest.mark.parametrize("implementation", [weight_gradient.GradientMecProducts, GradientChannels])
def test_a_gradient_of_large_samples_is_read_where_it_lies(implementation):
    """The gradient is read sample by sample, also in the order of columns that taps share."""
    grad, x = array(2, 32, 58, 58), array(2, 32, 60, 60)
    problem: Any = checked_call(cupyconv.conv_grad_weight, grad, x, (3, 3), groups=4).problem
    (loop,) = by_implementation(replace(problem, machine=HostModel(1)), implementation).steps  # type: ignore[union-attr]
    assert loop.copied_bytes == 0 if isinstance(loop, GradientChannels) else loop.is_factor(loop.block)  # type: ignore[attr-defined]


#: Seconds per byte that must be moved, with the fastest memory; and bounds of any estimate divided by the time of all
#: products and bytes.  Implementations with small parts, or named where they do not suit, have the longest estimates.
BYTE, LESS, MORE = 5e-11, 0.05, 2000.0
#: Largest factor by which four times as many samples increase the work: a single sample may be a factor in place.
FOUR_TIMES = 40.0


@pytest.mark.parametrize("name", ANY)
@share_of_examples(1)
@given(st.integers(0, 10**9))
def test_a_price_is_of_what_there_is_to_do(name, seed):
    (problem, _), (larger, _) = (problem_of(name, Random(seed), threads=1, times=times) for times in (1, 4))
    factors = cost.multiply_adds(problem) / (2 if cost.is_complex_product(problem) else 1)
    least = problem.flops / 2 * factors * cost.MULTIPLY_ADD + problem.minimal_bytes * BYTE
    for implementation in (
        implementation for implementation in implementations_for(name, problem) if implementation.applies(larger)
    ):
        plans = [
            by_implementation(replace(each, workspace_limit=16 << 20), implementation) for each in (problem, larger)
        ]
        if None in plans:
            continue
        assert all(plan and plan.reason for plan in plans)
        loops, more = ([*loops_of(plan)] for plan in plans if plan)
        work = sum(loop.work for loop in loops)
        assert LESS * least < work < MORE * least, (work / least, implementation)
        assert work < sum(loop.work for loop in more) < FOUR_TIMES * work, implementation
        for loop in loops:
            geometry, turns = loop.geometry, loop.turns
            assert 2 * turns <= loop.calls < 100 * turns * (geometry.taps + geometry.group_outputs), loop
            in_turn = loop.work + loop.fresh_work + loop.calls * cost.CALL
            assert loop.seconds == pytest.approx(in_turn, rel=0.02) and loop.fresh_work >= 0, loop
            # With threads, one thread does the first work, and the rest takes no less than its share.
            assert loop.shares >= 1 and loop.seconds_on(2) > loop.first_work + (loop.work - loop.first_work) / 2, loop


def test_what_one_thread_does_first_is_part_of_the_work():
    problem: Any = checked_call(cupyconv.conv, array(1, 64, 9, 9), array(64, 64, 3, 3)).problem
    problem, seen = replace(problem, machine=HostModel(1)), 0
    for implementation in implementations_for("conv", problem):
        for loop in loops_of(by_implementation(problem, implementation)):  # type: ignore[arg-type]
            assert loop.seconds == pytest.approx(loop.work + loop.fresh_work + loop.calls * cost.CALL, rel=1e-6)
            seen += loop.first_work > 0
    assert seen


def test_steps_that_are_chosen_by_no_price_count_as_nothing():
    assert seconds(cupyconv.explain(cupyconv.max_pool, np.ones((1, 2, 8, 8)), 2)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_phases_that_taps_reach_are_convolutions_by_the_method_that_was_asked_for(method):
    grad, weight = array(1, 8, 40, 40), array(8, 8, 6, 6)
    problem: Any = checked_call(cupyconv.conv_grad_input, grad, weight, (1, 8, 84, 84), stride=2).problem
    for limit in (1 << 22, 1 << 26):
        within = replace(problem, method=method, machine=HostModel(1), workspace_limit=limit)
        plan = transposed.plan_gathered(within)
        steps = [step for step in plan.steps if isinstance(step, GatheringStep)]
        assert len(steps) >= 4 and plan.method == method
        assert all(type(step.convolution) in implementations_of(convolution.METHODS[method]) for step in steps)


def test_what_is_kept_for_all_phases_keeps_within_the_limit():
    """The memory includes the weight that phases are cut from; lone products of small images cache what they read."""
    call = checked_call(cupyconv.conv_grad_input, array(1, 8, 6, 6), array(8, 8, 6, 6), (1, 8, 16, 16), stride=2)
    problem: Any = replace(call.problem, machine=HostModel(1))
    kept = set()
    for limit in range(40_000, 140_000, 2_000):
        plan = transposed.plan_gathered(replace(problem, workspace_limit=limit))
        assert plan.workspace_bytes <= limit
        kept.add(any(isinstance(step, GatheredLoop) and step.keeps for step in plan.steps))
    assert kept == {False, True}


def test_groups_of_a_block_have_their_own_bias_and_place():
    x, weight, bias = np.ones((1, 256, 9, 9), np.float32), np.ones((256, 1, 3, 3), np.float32), np.arange(256.0)
    problem: Any = checked_call(cupyconv.conv, x, weight, bias.astype(np.float32), groups=256).problem
    plan = by_implementation(replace(problem, machine=HostModel(1), workspace_limit=100_000), ToeplitzRows)
    out = np.empty((1, 256, 7, 7), np.float32)
    with BACKEND.current():
        BACKEND.prepare(plan)({"x": x, "weight": weight, "bias": bias.astype(np.float32), "out": out})
    assert any(block.outputs.start for loop in loops_of(plan) for block in loop.each_block)
    assert (out == 9 + bias[:, None, None]).all()


def test_a_bias_is_rounded_to_the_dtype_of_the_result_first():
    """The rounding is that of implementations which add the bias to finished images."""
    x, bias = np.full((1, 1, 8, 8), -1, np.float32), np.full(1, 1 + 2.0**-30)
    assert not cupyconv.conv(x, np.ones((1, 1, 1, 1), np.float32), bias).any()


@pytest.mark.parametrize("order, residual, written", [("C", False, True), ("gaps", False, False), ("C", True, False)])
def test_products_of_a_convolution_are_the_result_where_it_is_a_matrix_and_nothing_is_added(order, residual, written):
    out = integers(Random(1))(1, 6, 20, 20, dtype="float32", order=order)
    settings = {"residual": array(1, 6, 20, 20)} if residual else {}
    call = checked_call(cupyconv.conv, array(1, 8, 20, 20), array(6, 8, 1, 1), out=out, **settings)
    plan = by_implementation(replace(call.problem, machine=HostModel(1)), View)  # type: ignore[arg-type]
    assert plan and (plan.workspace_bytes == 0) == written


# --- recurrent layers -----------------------------------------------------------------------------------------


def any_layer(random: Random) -> RecurrentProblem:
    cell = random.choice(list(GATES))
    steps, batch, inputs, hidden = (about(random, 1, most) for most in (400, 64, 200, 200))
    dtype, directions = random.choice(("float32", "float32", "float64", "float16")), random.choice(((), (), (2,)))
    gates = GATES[cell] * hidden
    x, weight_ih = array(steps, batch, inputs, dtype=dtype), array(*directions, gates, inputs, dtype=dtype)
    gapped = array(*directions, gates, hidden, dtype=dtype, order=random.choice(("C", "gaps")))
    settings: dict[str, Any] = {"direction": "bidirectional"} if directions else {}
    if random.random() < 0.6:
        settings |= {name: array(*directions, gates, dtype=dtype) for name in ("bias_ih", "bias_hh")}
    problem: Any = checked_call(getattr(cupyconv, cell), x, weight_ih, gapped, **settings).problem
    machine = random.choice((HostModel(1), HostModel(2), HostModel(4), HostModel(4, most=4)))
    return replace(problem, machine=machine, workspace_limit=about(random, 1 << 12, MAX_LIMIT))


@share_of_examples(4)
@given(st.integers(0, 10**9))
def test_a_layer_keeps_within_the_limit_and_is_refused_only_where_nothing_fits(seed):
    """Weight copies larger than half of the limit are added to it; the bytes that a refusal asks for are enough."""
    problem = any_layer(Random(seed))
    geometry, limit = problem.geometry, problem.limit
    try:
        plan = BACKEND.plan(problem)
    except ValueError as refusal:
        needed = int(str(refusal).partition("needs ")[2].partition(" bytes")[0].replace(",", ""))
        assert needed > limit
        assert BACKEND.plan(replace(problem, workspace_limit=needed)).steps
        return
    copied = {buffer.name: buffer.nbytes for buffer in plan.workspace}.get("weights", 0)
    assert plan.workspace_bytes <= max(limit, min(limit, copied) + copied)
    (step,) = plan.steps
    assert isinstance(step, RecurrentStep) and step.threads <= problem.host.threads
    parts = geometry.directions * -(-geometry.batch // step.samples)
    assert 1 <= step.threads <= parts and 1 <= step.samples <= geometry.batch and 1 <= step.chunk <= geometry.steps
    assert BACKEND.plan(replace(problem, workspace_limit=2 * limit)).steps
