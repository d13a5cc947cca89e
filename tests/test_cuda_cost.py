"""The cost model for GPUs: rounds of blocks, the resource that a block waits for longest, tiles that are partly filled.

The constants of `cupyconv.cuda.plan.cost` are estimates, and nothing here repeats them.  The tests check that they
agree with each other, with the hardware's own numbers and with larger problems.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from plans import array, launches, recurrent_gradient_plan

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import FIRST_MMA, arithmetics
from cupyconv.cuda.plan.conv import choose, draft_conv
from cupyconv.cuda.plan.draft import Draft, cheapest
from cupyconv.cuda.plan.implicit_gemm import tiles
from cupyconv.cuda.plan.weight_gradient import ROWS
from cupyconv.problem.arrays import ITEMSIZE, operand
from cupyconv.problem.machine import KNOWN_GPUS, known_gpu
from cupyconv.problem.plan import Address, GemmCall, Kernel, KernelLaunch, LaunchLoop, Matrix, Transform
from cupyconv.problem.problems import NotApplicable

GPU = known_gpu("sm_90")
EVERY_GPU = pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=str)


def gemm(m: int, n: int, k: int, batch: int = 1, dtype: str = "float32", compute: str = "float32") -> GemmCall:
    a, b, c = (Matrix(Address(name), ld, rows * ld) for name, ld, rows in (("a", k, m), ("b", n, k), ("c", n, m)))
    return GemmCall(m, n, k, a, b, c, batch, dtype, dtype, compute, 0, "products")


def seconds(call: GemmCall, gpu: Any = GPU) -> float:
    return cost.arithmetic_seconds(call, gpu)


@EVERY_GPU
def test_a_multiprocessor_issues_four_instructions_a_clock(gpu):
    """The clock rate that follows from the issue rate is that of a GPU."""
    clock = cost.issue_rate(gpu) / (4 * gpu.multiprocessors)
    assert 1.0e9 < clock < 3.0e9


@EVERY_GPU
def test_shared_memory_gives_no_more_than_a_line_a_clock(gpu):
    clocks = cost.issue_rate(gpu) / 4  # per second, summed over all multiprocessors
    assert 1 / clocks < cost.shared_memory_seconds(1, gpu) < 2 / clocks


def test_instructions_are_counted_of_every_tile_that_a_kernel_is_compiled_for():
    """Exactly the tiles that kernels are compiled for have counts; bfloat16 has those of float16."""
    asked: dict[tuple[str, int, str], set[tuple[int, int]]] = {}
    ways = product(KNOWN_GPUS.values(), FIRST_MMA, (False, True), ("ALONG_PIXELS", "PIXEL_CHUNKS", "ALONG_CHANNELS"))
    for gpu, dtype, allow_tf32, gather in ways:
        for arithmetic in arithmetics(dtype, gpu, allow_tf32):
            found = asked.setdefault((arithmetic, ITEMSIZE[dtype], gather), set())
            found.update(tiles(dtype, arithmetic, gather))
    assert {key: set(counts) for key, counts in cost.ISSUED.items()} == asked


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("on", ["sm_75", "sm_80", "sm_90"])
def test_instructions_are_counted_of_every_dtype_that_goes_back_through_a_layer(dtype, on):
    """The persistent kernel computes all steps if the weight fits on the GPU."""
    assert recurrent_gradient_plan("lstm", dtype, (10, 4, 8, 64), on=on).method == "persistent"


@EVERY_GPU
def test_tensor_cores_are_as_quick_as_their_products_are_many(gpu):
    """TF32 computes each product once, TF32X3 three times; kernels reach part of cuBLAS's rate, in float64 all."""
    one, three = (cost.product_rate(arithmetic, "float32", gpu) for arithmetic in ("TF32", "TF32X3"))
    assert one == pytest.approx(3 * three) and one <= gpu.tf32
    assert cost.product_rate("MMA", "float64", gpu) == gpu.gemm64
    for dtype in ("float16", "bfloat16"):
        assert cost.product_rate("MMA", dtype, gpu) == pytest.approx(gpu.gemm16 * gpu.mma_share)
    for dtype, rate in (("float32", gpu.fp32), ("complex64", gpu.fp32), ("float16", gpu.fp32), ("float64", gpu.fp64)):
        assert cost.product_rate("FMA", dtype, gpu) == cost.core_rate(dtype, gpu) == rate
    assert cost.core_rate("complex128", gpu) == gpu.fp64


def test_rounds_are_whole():
    """One block more than multiprocessors takes twice as long; a block takes the longest of four estimated times."""
    most = GPU.multiprocessors
    takes = [cost.seconds_in_rounds(blocks, 10**6, 1e12, GPU) for blocks in (1, most, most + 1, 2 * most, 2 * most + 1)]
    assert takes == [pytest.approx(rounds * takes[0]) for rounds in (1, 1, 2, 2, 3)]
    assert takes[0] == pytest.approx(most * 10**6 / 1e12), "a multiprocessor has its share of the rate"
    alone = {
        "operations": cost.seconds_in_rounds(1, 10**6, 1e12, GPU),
        "l2_bytes": cost.seconds_in_rounds(1, 0, 1e12, GPU, l2_bytes=1e6),
        "issued": cost.seconds_in_rounds(1, 0, 1e12, GPU, issued=1e6),
        "shared_lines": cost.seconds_in_rounds(1, 0, 1e12, GPU, shared_lines=1e6),
    }
    assert all(each > 0 for each in alone.values())
    amounts = {"l2_bytes": 1e6, "issued": 1e6, "shared_lines": 1e6}
    assert cost.seconds_in_rounds(1, 10**6, 1e12, GPU, **amounts) == max(alone.values())
    for name in amounts:
        assert cost.seconds_in_rounds(1, 10**6, 1e12, GPU, **{name: 1e9}) == pytest.approx(1e3 * alone[name])
    # Instructions and lines of one multiprocessor, at its own clock rate.
    clock = cost.issue_rate(GPU) / (4 * most)
    assert alone["issued"] == pytest.approx(1e6 / 4 / clock)
    assert alone["shared_lines"] == pytest.approx(most * cost.shared_memory_seconds(1e6, GPU))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("stride", [-8, -1, 1, 2, 4, 64])
@pytest.mark.parametrize("step", [1, 2])
def test_a_warp_touches_the_lines_that_its_addresses_are_in(dtype, stride, step):
    item = {"float16": 2, "float32": 4, "float64": 8}[dtype]
    image = operand("x", dtype, (1, 1, 1, 1, 64), (0, 0, 0, 0, stride * item), 256)
    lines = {lane * abs(stride) * step * item // 128 for lane in range(32)}
    assert cost.lines_of(image, step) == len(lines)


def test_what_a_matrix_leaves_of_a_tile_is_wasted():
    """The part of a tile beyond the matrix is wasted, and multiprocessors without a tile are idle."""
    whole = seconds(gemm(128, 128, 512, batch=1000))
    for m, n in ((65, 128), (128, 65), (65, 65), (127, 127)):
        assert seconds(gemm(m, n, 512, batch=1000)) == pytest.approx(whole)
    assert seconds(gemm(64, 128, 512, batch=1000)) == pytest.approx(whole / 2)
    assert seconds(gemm(129, 128, 512, batch=1000)) == pytest.approx(whole * 1.5)
    assert seconds(gemm(128, 128, 1024, batch=1000)) == pytest.approx(2 * whole)
    lone = seconds(gemm(64, 64, 512))
    assert seconds(gemm(64, 64, 512, batch=GPU.multiprocessors)) == pytest.approx(lone)
    assert seconds(gemm(64, 128, 512, batch=GPU.multiprocessors // 2)) == pytest.approx(lone)
    assert seconds(gemm(64, 64, 512, batch=2 * GPU.multiprocessors)) == pytest.approx(2 * lone)
    full = gemm(64 * GPU.multiprocessors, 64, 512)
    assert seconds(full) == pytest.approx(full.flops / GPU.gemm_rate("float32", "float32"))


def test_few_blocks_have_a_part_of_the_bandwidth_and_transforms_less():
    launch = KernelLaunch(Kernel("merge"), (1, 1, 1), 64, (), bytes_moved=10**6)
    takes = [
        cost.memory_seconds(replace(launch, grid=(blocks, 1, 1)), GPU) for blocks in (1, 2, GPU.multiprocessors, 10**4)
    ]
    assert takes[0] == pytest.approx(2 * takes[1]) and takes[1] > takes[2] == takes[3] == 10**6 / GPU.bandwidth
    assert cost.memory_seconds(gemm(64, 64, 64), GPU) == gemm(64, 64, 64).bytes_moved / GPU.bandwidth
    apart, interleaved = (
        cost.memory_seconds(Transform((64, 64), 8, Address("a"), Address("b"), "float32", interleaved=order), GPU)
        for order in (False, True)
    )
    plain = Transform((64, 64), 8, Address("a"), Address("b"), "float32")
    assert plain.bytes_moved / GPU.bandwidth < apart < interleaved
    assert cost.arithmetic_seconds(plain, GPU) > plain.flops / cost.core_rate("float32", GPU)


@pytest.mark.parametrize("blocks", [1, 66, 132, 1000])
def test_a_launch_takes_its_operations_at_the_rate_of_the_multiprocessors_it_has(blocks):
    launch = cost.priced(KernelLaunch(Kernel("merge"), (blocks, 1, 1), 64, (), flops=10**9), 1e12, GPU)
    assert cost.arithmetic_seconds(launch, GPU) == pytest.approx(1e-3 * max(1, GPU.multiprocessors / blocks))


@pytest.mark.parametrize("method", ["direct", "gemm", "implicit_gemm"])
def test_products_of_16_bits_are_those_of_tensor_cores(method):
    """A merge, fused by "direct" or as a product, is faster in float16 than in float32, and slowest in float64."""
    takes = []
    for dtype in ("float16", "float32", "float64"):
        xs = [array(16, 64, 4096, dtype=dtype)] * 2
        made = cupyconv.explain(cupyconv.conv, xs, array(32, 128, 1, dtype=dtype), method=method, on="sm_86")
        takes.append(sum(cost.arithmetic_seconds(step, known_gpu("sm_86")) for step in made.steps))
    assert 2 * takes[0] < takes[1] < takes[2]


# The purpose of estimated times: the shortest is chosen, and more work takes no less time.

#: (batch, channels, spatial size, outputs, kernel, settings)
LAYERS = [
    (16, 64, (28, 28), 64, (3, 3), {"padding": 1}),
    (4, 3, (64, 64), 32, (5, 5), {"stride": 2}),
    (8, 128, (14, 14), 256, (1, 1), {}),
    (4, 32, (56, 56), 32, (3, 3), {"groups": 32, "padding": 1}),
    (4, 32, (20, 20), 64, (3, 3), {"groups": 4}),
    (2, 8, (4096,), 8, (65,), {"padding": 32}),
]


def drafts(layer: Any, on: str, dtype: str, order: str, times: tuple[int, int, int] = (1, 1, 1)) -> dict[str, float]:
    """Return the estimated time of each method that applies, with multiples of samples, channels and outputs."""
    batch, channels, size, outputs, kernel, settings = layer
    batch, channels, outputs = (count * more for count, more in zip((batch, channels, outputs), times))
    settings = dict(settings)
    if settings.get("groups", 1) > 1:
        settings["groups"] *= times[1]
    x = array(batch, channels, *size, dtype=dtype, order=order)
    weight = array(outputs, channels // settings.get("groups", 1), *kernel, dtype=dtype)
    problem: Any = checked_call(cupyconv.conv, x, weight, **settings, on=on).problem
    found = {}
    for method in ("direct", "gemm", "implicit_gemm", "fft"):
        try:
            found[method] = draft_conv(method, problem)
        except NotApplicable:
            continue
    takes = {method: draft.cost(problem.gpu).seconds for method, draft in found.items()}
    assert all(price > len(found[method].steps) * problem.gpu.launch_seconds for method, price in takes.items())
    counted = {method: takes[method] * found[method].doubt for method in found}
    chosen, _ = choose(problem, draft_conv)
    assert counted[chosen.method] == min(counted.values())
    return takes


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer[4]}-{layer[5]}")
@pytest.mark.parametrize(
    ("on", "dtype", "order"), [("sm_90", "float32", "C"), ("sm_80", "float16", "last"), ("sm_75", "float64", "C")]
)
def test_more_work_is_no_cheaper_and_the_cheapest_is_taken(layer, on, dtype, order):
    """Twice the samples, channels or outputs take from slightly less than the same time to about twice the time."""
    once = drafts(layer, on, dtype, order)
    is_grouped = layer[5].get("groups", 1) > 1
    for times in [(2, 1, 1), (8, 1, 1)] + ([(1, 2, 2)] if is_grouped else [(1, 2, 1), (1, 1, 2)]):
        more = drafts(layer, on, dtype, order, times)
        for method in once.keys() & more.keys():
            assert 0.9 * once[method] < more[method] < 2.6 * max(times) * once[method], (method, times)


def test_idle_multiprocessors_are_priced():
    """A late 1x1 layer at batch 1 fills part of the GPU; the estimate for "direct" once assumed that it filled all."""
    x, weight = np.broadcast_to(np.float32(0), (1, 256, 13, 13)), np.broadcast_to(np.float32(0), (64, 512, 1, 1))
    plan = cupyconv.explain(cupyconv.conv, [x, x], weight, on="sm_90")
    assert plan.method == "implicit_gemm"
    gpu = known_gpu("sm_90")
    launch = KernelLaunch(Kernel("merge"), (33, 1, 1), 64, (), bytes_moved=10**6, flops=10**6)
    whole = replace(launch, grid=(132, 1, 1))
    quarter, full = (cost.priced(one, 1e12, gpu).arithmetic_seconds for one in (launch, whole))
    assert (quarter, full) == (pytest.approx(4e-6), pytest.approx(1e-6))
    one, few, many = (cost.memory_seconds(replace(launch, grid=(n, 1, 1)), gpu) for n in (1, 33, 1000))
    assert one == pytest.approx(33 * few) and few == many == pytest.approx(10**6 / gpu.bandwidth)


def test_predictions_have_two_digits():
    assert cost.by_model(123.4e-6) == "estimated 120 µs (model not yet measured on a GPU)"
    assert cost.by_model(9.96e-6) == "estimated 10 µs (model not yet measured on a GPU)"
    assert cost.by_model(3.14159e-6) == "estimated 3.1 µs (model not yet measured on a GPU)"
    assert cost.by_model(45_678e-6) == "estimated 46,000 µs (model not yet measured on a GPU)"


def test_the_hosts_time_stands_beside_the_gpus():
    """Plans state the host overhead: for one kernel, and for columns, a product and an epilogue."""
    x, weight, bias = array(2, 8, 16, 16), array(8, 8, 3, 3), array(8)
    one = cupyconv.explain(cupyconv.conv, x, weight, method="direct", on="sm_90")
    assert one.price.endswith("; host overhead 11 µs plus driver")
    three = cupyconv.explain(cupyconv.conv, x, weight, bias, activation="tanh", method="gemm", on="sm_90")
    assert len(three.steps) == 3 and three.price.endswith("; host overhead 19 µs plus driver")


def test_a_draft_takes_all_of_its_steps_and_the_least_that_may_be_doubted_is_taken():
    """A step takes the longer of its bytes and arithmetic, plus a launch; the largest total bounds the draft."""
    bytes_alone = KernelLaunch(Kernel("epilogue"), (1000, 1, 1), 256, (), bytes_moved=10**9)
    both = replace(bytes_alone, flops=1, arithmetic_seconds=1e-3)
    moved = 10**9 / GPU.bandwidth
    small = replace(bytes_alone, bytes_moved=1)
    for steps, seconds, bound in (
        ((bytes_alone, both), moved + 1e-3, "arithmetic"),
        ((bytes_alone, replace(both, bytes_moved=0, arithmetic_seconds=1e-5)), moved + 1e-5, "memory"),
        ((replace(both, arithmetic_seconds=moved / 2), bytes_alone), 2 * moved, "memory"),
        ((LaunchLoop((both, bytes_alone), 7, "step"),), 7 * (moved + 1e-3), "arithmetic"),
        ((small,) * 3, 0.0, "launch"),
    ):
        takes = Draft("direct", steps).cost(GPU)
        launched = sum(len(step.launches) * step.times if isinstance(step, LaunchLoop) else 1 for step in steps)
        assert takes.seconds == pytest.approx(seconds + launched * GPU.launch_seconds, rel=1e-3)
        assert takes.bound == bound
    doubted, sure = Draft("fft", (both,), doubt=2), Draft("direct", (both,) * 3)
    assert cheapest([sure, doubted], GPU) is doubted
    assert cheapest([doubted, replace(sure, steps=(both,))], GPU).method == "direct"
    assert cheapest([doubted, replace(doubted, method="direct")], GPU) is doubted, "of equals the first"


# If tiles and rounds are full, twice the work takes exactly twice as long, and reads twice as many bytes from L2.


def launch_of(plan: cupyconv.Plan, kernel: str) -> KernelLaunch:
    (launch, *_) = launches(plan, kernel)
    return launch


def convolved(method: str, kernel: str, **shared: Any) -> Any:
    def made(n: int, c: int, h: int, o: int, k: int = 3, w: int = 32) -> KernelLaunch:
        dtype, order = shared.get("dtype", "float32"), shared.get("order", "C")
        x, weight = array(n, c, h, w, dtype=dtype, order=order), array(o, c, k, k, dtype=dtype)
        on = shared.get("on", "sm_90")
        return launch_of(cupyconv.explain(cupyconv.conv, x, weight, padding=k // 2, method=method, on=on), kernel)

    return made


def transposed(n: int, c: int, h: int, o: int) -> KernelLaunch:
    x, weight = array(n, o, h, 32), array(o, c, 2, 2)
    return launch_of(
        cupyconv.explain(cupyconv.conv_transpose, x, weight, stride=2, method="direct", on="sm_90"), "transposed"
    )


def weight_gradient(n: int, c: int, h: int, o: int) -> KernelLaunch:
    grad, x = array(n, o, h, 32), array(n, c, h, 32)
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (3, 3), padding=1, method="direct", on="sm_90")
    return launch_of(plan, "weight_gradient")


def launched(kernel: str, function: Any, *arguments: Any, **settings: Any) -> KernelLaunch:
    return launch_of(cupyconv.explain(function, *arguments, padding=1, on="sm_90", **settings), kernel)


def direct(n: int, c: int, h: int, o: int) -> KernelLaunch:
    return launched("direct", cupyconv.conv, array(n, c, h, 32), array(o, c, 3, 3), method="direct")


def depthwise(n: int, c: int, h: int) -> KernelLaunch:
    return launched("depthwise", cupyconv.conv, array(n, c, h, 32), array(c, 1, 3, 3), groups=c, method="direct")


def depthwise_transposed(n: int, c: int, h: int) -> KernelLaunch:
    x, settings = array(n, c, h, 32), {"stride": 2, "groups": c, "method": "direct"}
    return launched("depthwise_transposed", cupyconv.conv_transpose, x, array(c, 1, 3, 3), **settings)


def depthwise_weight_gradient(n: int, c: int, h: int) -> KernelLaunch:
    grad, settings = array(n, c, h, 32), {"groups": c, "method": "direct"}
    return launched("depthwise_weight_gradient", cupyconv.conv_grad_weight, grad, grad, (3, 3), **settings)


def implicit_weight_gradient(n: int, c: int, h: int, o: int) -> KernelLaunch:
    grad, x = (array(n, channels, h, 32, dtype="float16", order="last") for channels in (o, c))
    return launched("implicit_weight_gradient", cupyconv.conv_grad_weight, grad, x, (3, 3), method="implicit_gemm")


def channels_last(n: int, c: int, h: int) -> KernelLaunch:
    grad, x = array(n, 64, h, 32), array(n, c, h, 32)
    return launched("channels_last", cupyconv.conv_grad_weight, grad, x, (3, 3), method="implicit_gemm")


def back_through(kernel: str) -> Any:
    def made(steps: int, batch: int, hidden: int) -> KernelLaunch:
        return launch_of(recurrent_gradient_plan("lstm", "float32", (steps, batch, 32, hidden)), kernel)

    return made


def recurrent(method: str, dtype: str) -> Any:
    def made(steps: int, batch: int, hidden: int) -> KernelLaunch:
        weights = array(4 * hidden, 128, dtype=dtype), array(4 * hidden, hidden, dtype=dtype)
        plan = cupyconv.explain(
            cupyconv.lstm, array(steps, batch, 128, dtype=dtype), *weights, method=method, on="sm_90"
        )
        return launch_of(plan, f"recurrent_{method}")

    return made


def pair(first: str, second: str, dtype: str = "float32") -> Any:
    def made(n: int, c: int, m: int, o: int) -> KernelLaunch:
        m, o = c if first == "DEPTHWISE" else m, (c if first == "DEPTHWISE" else m) if second == "DEPTHWISE" else o
        layers = []
        for kind, inputs, outputs in ((first, c, m), (second, m, o)):
            groups = inputs if kind == "DEPTHWISE" else 1
            weight = array(outputs, inputs // groups, 3, 3, dtype=dtype)
            layers.append(cupyconv.ConvLayer(weight, padding=1, groups=groups))
        plan = cupyconv.explain(cupyconv.conv_chain, array(n, c, 32, 32, dtype=dtype), layers, fuse=True, on="sm_90")
        return launch_of(plan, "conv_pair")

    return made


#: A function that makes a launch, its sizes, and the factor by which its time increases with twice each size.
WHOLE = {
    **{
        f"implicit_gemm {dtype} {order}": (
            convolved("implicit_gemm", "implicit_gemm", dtype=dtype, order=order),
            {"n": 132, "c": 64, "h": 32, "o": 128}, {"n": 2, "c": 2, "h": 2, "o": 2},
        )
        for dtype in ("float16", "float32", "float64") for order in ("C", "last")
    },
    "implicit_gemm complex64": (
        convolved("implicit_gemm", "implicit_gemm", dtype="complex64"),
        {"n": 132, "c": 64, "h": 32, "o": 128}, {"n": 2, "c": 2, "h": 2, "o": 2},
    ),
    "implicit_gemm by CUDA cores": (
        convolved("implicit_gemm", "implicit_gemm", on="sm_75"),
        {"n": 40, "c": 64, "h": 32, "o": 128}, {"n": 2, "c": 2, "h": 2, "o": 2},
    ),
    "merge": (convolved("direct", "merge"), {"n": 132, "c": 64, "h": 32, "o": 64, "k": 1}, {"n": 2, "c": 2, "h": 2, "o": 2}),
    "merge float16": (
        convolved("direct", "merge", dtype="float16"),
        {"n": 132, "c": 64, "h": 32, "o": 64, "k": 1}, {"n": 2, "c": 2, "h": 2, "o": 2},
    ),
    "transposed": (transposed, {"n": 132, "c": 64, "h": 32, "o": 64}, {"n": 2, "c": 2, "h": 2}),
    "weight_gradient": (weight_gradient, {"n": 132, "c": 64, "h": 32, "o": 64}, {"n": 2, "c": 2, "h": 2, "o": 2}),
    "recurrent_step": (recurrent("step", "float32"), {"steps": 8, "batch": 128, "hidden": 128}, {"steps": 1, "batch": 2}),
    "recurrent_step float16": (
        recurrent("step", "float16"), {"steps": 8, "batch": 128, "hidden": 128}, {"steps": 1, "batch": 2, "hidden": 4},
    ),
    "recurrent_persistent": (recurrent("persistent", "float32"), {"steps": 8, "batch": 128, "hidden": 128}, {"steps": 2}),
    "direct": (direct, {"n": 132, "c": 64, "h": 32, "o": 64}, {"n": 2, "c": 2, "h": 2, "o": 2}),
    "depthwise": (depthwise, {"n": 132, "c": 64, "h": 32}, {"n": 2, "c": 2, "h": 2}),
    "depthwise_transposed": (depthwise_transposed, {"n": 132, "c": 64, "h": 32}, {"n": 2, "c": 2}),
    "depthwise_weight_gradient": (depthwise_weight_gradient, {"n": 132, "c": 64, "h": 32}, {"n": 2, "c": 2, "h": 2}),
    "implicit_weight_gradient": (
        implicit_weight_gradient, {"n": 132, "c": 128, "h": 32, "o": 128}, {"n": 2, "c": 2, "h": 2, "o": 2},
    ),
    "channels_last": (channels_last, {"n": 132, "c": 64, "h": 32}, {"n": 2, "c": 2, "h": 2}),
    "recurrent_gradient": (
        back_through("recurrent_gradient"), {"steps": 8, "batch": 512, "hidden": 512}, {"steps": 1, "batch": 2, "hidden": 4},
    ),
    "recurrent_gradient_persistent": (
        back_through("recurrent_gradient_persistent"), {"steps": 8, "batch": 128, "hidden": 128}, {"steps": 2},
    ),
    "pair, depthwise": (pair("DEPTHWISE", "DEPTHWISE"), {"n": 132, "c": 16, "m": 16, "o": 16}, {"c": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_twice_the_work_takes_exactly_twice_as_long(case):
    made, sizes, times = WHOLE[case]
    once = made(**sizes)
    for size, factor in times.items():
        more = made(**sizes | {size: 2 * sizes[size]})
        assert more.kernel == once.kernel and more.block == once.block
        assert more.flops == factor * once.flops, size
        assert more.arithmetic_seconds == pytest.approx(factor * once.arithmetic_seconds), size
        # Each block reads its weight once, for any number of pixels.
        assert 0.93 * factor * once.l2_bytes <= more.l2_bytes <= factor * once.l2_bytes * (1 + 1e-9), size


PAIRS = {
    f"pair, {first} and {second}, {dtype}".lower(): (pair(first, second, dtype), {"n": 132, "c": 16, "m": 16, "o": 16}, {})
    for first in ("DENSE", "DEPTHWISE") for second in ("DENSE", "DEPTHWISE") for dtype in ("float16", "float32", "float64")
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in WHOLE | PAIRS if case != "channels_last"]
)  # the kernel `channels_last` multiplies nothing
def test_whole_tiles_come_near_the_rate_of_their_arithmetic(case):
    """No launch exceeds this rate.  Loops that compute each address, or wait for all blocks, reach only part of it."""
    made, sizes, _ = (WHOLE | PAIRS)[case]
    launch = made(**sizes)
    macros = dict(launch.kernel.macros)
    dtype = macros.get("DTYPE", "float32")
    arithmetic = macros.get("ARITHMETIC", "MMA" if dtype == "float16" else "FMA")
    gpu = known_gpu("sm_75" if "cores" in case else "sm_90")
    share = launch.flops / launch.arithmetic_seconds / cost.product_rate(arithmetic, dtype, gpu)
    if case == "recurrent_step float16":
        share *= 2  # a state is two 16-bit numbers, so that it is not rounded
    is_slow = "depthwise" in case or launch.kernel.name in (
        "direct", "transposed", "weight_gradient", "recurrent_persistent", "recurrent_gradient_persistent",
    )  # fmt: skip
    assert (0.02 if is_slow else 0.2) < share <= 1.0001


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_asks_l2_for_what_its_blocks_read(dtype):
    """Each column of blocks reads all states, each row of blocks reads all weights, and projections are read once."""
    launch, item = recurrent("step", dtype)(8, 128, 128), {"float16": 2, "float32": 4, "float64": 8}[dtype]
    columns, rows, _ = launch.grid
    kept = max(4, item)  # states are not rounded to 16 bits between steps
    states, gates, weights = 128 * 128 * kept, 128 * 4 * 128 * kept, 4 * 128 * 128 * item
    assert launch.l2_bytes == columns * states + gates + rows * weights
    assert launch.bytes_moved == weights + gates + 3 * states
    of_all = recurrent("persistent", dtype)(8, 128, 128)
    columns, rows, _ = of_all.grid
    assert of_all.l2_bytes == 8 * (columns * states + gates), "weights stay with their blocks"
    assert of_all.bytes_moved == weights + 8 * (gates + 3 * states)


def test_a_state_of_16_bits_takes_two_products():
    """A state is stored as two 16-bit numbers, so that it is not rounded."""
    half, single = (recurrent("step", dtype)(8, 128, 128) for dtype in ("float16", "float32"))
    assert half.grid == single.grid and dict(half.kernel.macros)["ARITHMETIC"] == "MMA"
    rates = [cost.product_rate(*kinds, GPU) for kinds in (("MMA", "float16"), ("TF32X3", "float32"))]
    shares = [launch.flops / launch.arithmetic_seconds / rate for launch, rate in zip((half, single), rates)]
    assert 2 * shares[0] == pytest.approx(shares[1])


def test_a_merge_asks_l2_for_the_inputs_of_each_tile_and_for_a_weight_each_block():
    launch = convolved("direct", "merge")(132, 64, 32, 64, 1)
    tiles = 64 // int(dict(launch.kernel.macros)["TILE"])
    image, weight = 132 * 64 * 32 * 32 * 4, 64 * 64 * 4
    assert launch.l2_bytes == tiles * image + launch.blocks // tiles * weight


def test_tiles_of_a_convolution_ask_l2_for_their_rows_and_columns():
    """Adjacent taps find in L1 what the previous tap has read."""
    launch = convolved("implicit_gemm", "implicit_gemm", dtype="float16")(132, 64, 32, 256)
    tile_m, tile_n = (int(dict(launch.kernel.macros)[name]) for name in ("TILE_M", "TILE_N"))
    pixels, depth = 132 * 32 * 32, 64 * 9
    rows, columns = 256 // tile_m, pixels // tile_n
    assert launch.grid == (rows * columns, 1, 1)
    assert launch.l2_bytes == pytest.approx(2 * depth * (columns * 256 + rows * pixels / 3))


def test_a_weights_gradient_reads_its_images_once_for_each_tile():
    launch = weight_gradient(132, 64, 32, 64)
    outputs, rows = int(dict(launch.kernel.macros)["OUTPUTS"]), 4 * 132 * 64 * 32 * 32
    tiles_m, tiles_n = 64 // outputs, launch.grid[1] // (64 // outputs)
    assert outputs > 1 and tiles_m * tiles_n * outputs * ROWS == 64 * 64 * 9, "each weight is in one tile"
    assert launch.bytes_moved == rows * tiles_m + rows * tiles_n + 4 * launch.grid[0] * 64 * 64 * 9


def test_images_are_moved_as_quickly_as_the_lines_that_they_are_in_are_read():
    """A line has 128 bytes; a row with gaps as large as its elements spans twice as many lines."""
    for order, times in (("C", 1), ("gaps", 2)):
        grad, x = array(132, 64, 32, 32), array(132, 64, 32, 32, order=order)
        moved = launched("channels_last", cupyconv.conv_grad_weight, grad, x, (3, 3), method="implicit_gemm")
        lines = times * 132 * 64 * 32 * 32 * 4 / 128
        assert moved.arithmetic_seconds == pytest.approx(cost.shared_memory_seconds(lines, GPU))


@pytest.mark.parametrize(
    ("kernel", "steps", "size"), [("recurrent_gradient", 1, 512), ("recurrent_gradient_persistent", 8, 128)]
)
def test_back_through_a_layer_its_weight_is_read_once_and_the_gates_of_every_step(kernel, steps, size):
    launch = back_through(kernel)(8, size, size)
    weight, gates = 4 * size * size * 4, steps * 4 * size * size * 4
    # Gates are read; their gradients are written, and read by the next step.  In addition, states of a gate's size.
    assert weight + 4 * gates <= launch.bytes_moved <= weight + 5 * gates
    if steps > 1:  # twice as many steps also read it once
        assert 2 * launch.bytes_moved - back_through(kernel)(16, size, size).bytes_moved == weight


@pytest.mark.parametrize(("inputs", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_products_of_spectra_move_the_spectra_that_they_name(inputs, groups):
    """Spectra of each input and of its part of the weight are read once; a second input reads and writes sums again."""
    xs, settings = (
        [array(2, 8 // inputs, 64, 64)] * inputs,
        {"padding": 8, "groups": groups, "method": "fft", "on": "sm_90"},
    )
    plan = cupyconv.explain(cupyconv.conv, xs, array(4, 8 // groups, 17, 17), **settings)
    sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    weight, products = sizes["spectra of the weight"] // inputs, sizes["products"]
    assert [launch.bytes_moved for launch in launches(plan, "spectra")] == [
        sizes["spectra"] + weight + products * (1 + i) for i in range(inputs)
    ]
    (finish,) = launches(plan, "finish_tiles")
    assert finish.bytes_moved == 2 * 2 * 4 * 64 * 64 * 4, "sums that are wanted, and the result"
    extra = {"residual": array(2, 4, 64, 64)}
    (more,) = launches(
        cupyconv.explain(cupyconv.conv, xs, array(4, 8 // groups, 17, 17), **settings, **extra), "finish_tiles"
    )
    assert more.bytes_moved == finish.bytes_moved * 3 // 2
    (several,) = launches(
        cupyconv.explain(cupyconv.conv, array(2, 8, 500, 500), array(4, 8 // groups, 17, 17), **settings),
        "finish_tiles",
    )
    assert prod(dict(several.params)["tiles"]) > 1 and several.bytes_moved == 2 * 2 * 4 * 500 * 500 * 4
    back = cupyconv.explain(cupyconv.conv_grad_weight, array(2, 4, 64, 64), xs, 17, **settings)
    sizes = {buffer.name: buffer.nbytes for buffer in back.workspace}
    assert [launch.bytes_moved for launch in launches(back, "spectra_gradient")] == [
        sizes["spectra of the gradient"] + sizes["spectra"] + sizes["products"] // inputs
    ] * inputs
    (last,) = launches(back, "finish_weight_tiles")
    assert last.bytes_moved == 4 * 8 // groups * 17 * 17 * 4 * (dict(last.params)["parts"] + 1)


def test_sums_of_two_parts_are_read_by_what_finishes_them():
    """A real image times a complex weight gives real and imaginary sums, each half as large as the result."""
    x, weight = array(4, 8, 30, 30), array(6, 8, 3, 3, dtype="complex64")
    plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm", on="sm_90")
    (launch,) = launches(plan, "epilogue")
    assert launch.bytes_moved == 2 * 4 * 6 * 30 * 30 * 8
