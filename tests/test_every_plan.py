"""Properties of every GPU plan, for every operation and method: addresses, sizes, amounts of work, times.

`test_planning.py` checks single decisions; this file checks what no decision may break.  Addresses of a launch are
within its arrays and buffers, and every buffer is used.  Bytes and operations are no fewer than those of the problem,
and not many times as many.  No step takes less time than the GPU's data sheet allows.  A grid has enough threads and
not far more, and large problems use all multiprocessors.  Data in whole vectors is moved in vectors.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import GRID_Y, UNCOSTED, array, check, gemms, launches, recurrent_gradient_plan
from rounds import each_step

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import plan as planned
from cupyconv.cuda.plan.channels_last import channels_last
from cupyconv.cuda.plan.draft import Draft, relocated, within
from cupyconv.cuda.plan.implicit_weight_gradient import STAGES
from cupyconv.cuda.plan.launches import GRID_X
from cupyconv.cuda.plan.packed_weight import SLAB_BYTES
from cupyconv.cuda.plan.recurrence import recurrent_tiles
from cupyconv.ops.conv_pullback import EPILOGUE_GRADIENT, PROLOGUE_GRADIENT
from cupyconv.ops.pooling import AVG_POOL_GRADIENT, MAX_POOL_GRADIENT
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import (
    MAX_SOURCES,
    Address,
    Buffer,
    GemmCall,
    KernelLaunch,
    LaunchLoop,
    Plan,
    Rounds,
    Transform,
)
from cupyconv.problem.problems import NotApplicable
from cupyconv.problem.recurrence import GATES

#: Most elements of the result, or of a step's output, that one thread computes; tiles of products have the most.
MAX_OF_A_THREAD = 256

CONVOLUTIONS = {
    "3x3": ((8, 16, 20, 20), (24, 16, 3, 3), {"padding": 1}),
    "strided": ((5, 7, 21, 19), (9, 7, 3, 5), {"stride": (2, 1), "padding": "same"}),
    "dilated, reflected": ((2, 12, 33), (8, 12, 5), {"dilation": 3, "padding": 6, "padding_mode": "reflect"}),
    "3-D": ((2, 8, 6, 9, 10), (4, 8, 3, 3, 3), {"padding": 1}),
    "1x1": ((4, 64, 16, 16), (40, 64, 1, 1), {}),
    "groups": ((4, 16, 16, 16), (24, 4, 3, 3), {"groups": 4, "padding": 1}),
    "depthwise": ((4, 40, 24, 24), (40, 1, 3, 3), {"groups": 40, "padding": 1}),
    "long kernel": ((4, 16, 48, 48), (16, 16, 11, 11), {"padding": 5}),
    "few outputs": ((64, 256, 7, 7), (3, 256, 3, 3), {"padding": 1}),
    "deep": ((1, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
}
#: Dtype, GPU, workspace limit, memory order.
SETTINGS = [
    ("float16", "sm_75", None, "C"),
    ("float16", "sm_90", 1_000_000, "last"),
    ("float32", "sm_80", None, "last"),
    ("float32", "sm_90", None, "C"),
    ("float64", "sm_90", 2_000_000, "gaps"),
    ("complex64", "sm_90", None, "C"),
]
#: Bytes that a launch moves divided by the bytes of the arrays that it names: smallest and largest ratio.
TIMES = {
    **dict.fromkeys(("channels_last", "conv_pair", "depthwise", "depthwise_weight_gradient", "direct"), (1, 1)),
    "depthwise_transposed": (1, 1),
    **dict.fromkeys(("epilogue_grad", "exchange_weight", "implicit_gemm", "implicit_weight_gradient"), (1, 1)),
    **dict.fromkeys(("pool", "pool_gradient", "transposed"), (1, 1)),
    **dict.fromkeys(("col2im", "im2col"), (0.8, 1)),  # rows of columns have gaps between them
    "epilogue": (1, 2),  # twice if it reads the result that it writes
    "prologue_grad": (1, 1.3),  # its scale and shift too
    "merge": (1, 4),  # once per tile of outputs
}
#: Most bytes that a thread moves, for kernels whose threads share the elements.
MAX_BYTES = {
    **dict.fromkeys(("channels_last", "depthwise", "finish_tiles", "pool", "pool_gradient", "prologue_grad"), 256),
    **dict.fromkeys(("epilogue", "im2col", "recurrent_inputs", "tiles"), 512),
}
KERNELS = Path(__file__).parent.parent / "kernels"
#: Operations that are a single pass over an image: their bytes determine their time.
ELEMENTWISE = ("epilogue_grad", "prologue_grad", "im2col")
#: Parameter for how many adjacent threads have adjacent channels, in kernels whose threads otherwise follow pixels.
LANES = {
    **dict.fromkeys(("depthwise", "depthwise_transposed", "depthwise_weight_gradient", "im2col"), "channel_lanes"),
    "pool": "lanes",
}
#: Parameter for the number of channels, or squares of them, that these lanes share; and the most lanes.
CHANNELS_OF = {
    "depthwise": ("outputs", 32), "depthwise_transposed": ("channels", 32),
    "depthwise_weight_gradient": ("outputs", 32), "im2col": ("squares", 4),
}  # fmt: skip
#: Axis of the grid along which a sum is divided into parts.
PARTS = {"weight_gradient": 0, "depthwise_weight_gradient": 0, "implicit_weight_gradient": 1}


def spans(call: Any) -> dict[str, int]:
    """Return the bytes of each array and result of a call from its first element on; addresses are within them."""
    found = {}
    for name, one in call.arrays.items():
        found[name] = sum((n - 1) * step for n, step in zip(one.shape, one.strides) if step > 0) + one.dtype.itemsize
    for result in call.results:
        found.setdefault(result.name, prod(result.shape) * result.dtype.itemsize)
    return found


def addresses(value: Any) -> Iterator[Address]:
    """Yield all addresses in a step."""
    if isinstance(value, Address):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from addresses(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from addresses(getattr(value, field.name))


def holds(call: Any, limit: int | None = None, on: str = "sm_90") -> Plan:
    plan = call.plan()
    hold(plan, spans(call), limit, on)
    if limit is None:
        moves_what_it_names(plan, call)
    for result in call.results:
        assert product_bytes(plan, result.name) in (0, prod(result.shape) * result.dtype.itemsize), result
    return plan


def product_bytes(plan: Plan, result: str) -> int:
    """Return the bytes of a result that matrix products write first; none adds to what nobody has written.

    Later products at the same address add to it.
    """
    begun: set[tuple[str, int]] = set()
    launched: set[str] = set()
    total = 0
    for step in each_step(plan.steps):
        if isinstance(step, GemmCall):
            at = step.c.at.buffer, step.c.at.offset
            assert not step.beta or at in begun or step.c.at.buffer in launched, step
            if step.c.at.buffer == result:
                assert step.beta or at not in begun, step
                total += step.m * step.n * step.batch * ITEMSIZE[step.c_dtype] * (at not in begun)
            begun.add(at)
        else:
            launched |= {at.buffer for at in addresses(step)}
    return total


def moves_what_it_names(plan: Plan, call: Any) -> None:
    """Check that launches move the bytes of images, weights and buffers that they name, with the ratios of `TIMES`."""
    sizes = {name: (one.ndim > 1) * one.dtype.itemsize * prod(one.shape) for name, one in call.arrays.items()}
    sizes |= {result.name: prod(result.shape) * result.dtype.itemsize for result in call.results}
    sizes |= {each.buffer: each.nbytes for each in plan.conversions} | {
        each.name: each.nbytes for each in plan.workspace
    }
    for step in plan.steps:
        if isinstance(step, KernelLaunch) and step.kernel.name in TIMES:
            named = {at.buffer for at in addresses(step)}
            least, most = TIMES[step.kernel.name]
            if "workspace" not in named:  # several buffers share it in turn
                assert 0.98 * least < step.bytes_moved / sum(sizes[name] for name in named) < 1.02 * most, step


def hold(plan: Plan, sizes: dict[str, int] | None, limit: int | None = None, on: str = "sm_90") -> None:
    gpu = known_gpu(on)
    check(plan, limit, on)
    every = each_step(plan.steps)
    steps = [one for step in every for one in (step.launches if isinstance(step, LaunchLoop) else (step,))]
    # Addresses.
    buffers = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    places = [at for step in steps for at in addresses(step)]
    for at in places:
        if at.buffer in buffers:
            assert 0 <= at.offset < buffers[at.buffer], at
        elif sizes is not None:
            converted = {each.buffer: each.nbytes for each in plan.conversions}
            end = converted.get(at.buffer, sizes.get(at.buffer))
            assert end is not None and 0 <= at.offset < end, at
    own = {name for name, buffer in zip(buffers, plan.workspace) if not buffer.is_kept}
    assert own <= {at.buffer for at in places}, "workspace that nothing uses"
    # Amounts of work.
    assert plan.bytes_moved >= plan.minimal_bytes * 0.99
    if plan.method not in ELEMENTWISE and not any(isinstance(step, Transform) for step in steps):
        # The phases of a transposed convolution leave out what falls outside its result, or compute it in vain.  Tiles
        # of a pair overlap, and a gather of columns is counted in addition to their products.
        done = sum(step.flops for step in every)
        assert plan.flops * (0.9 if plan.method == "implicit_gemm" else 1) <= done <= 2 * plan.flops
    # Times.
    most = max(gpu.fp32, gpu.fp64, gpu.gemm16, gpu.tf32)
    for step in steps:
        if isinstance(step, KernelLaunch):
            _hold_launch(step, gpu, most)
    chunks_of(plan)
    says_what_it_does(plan)
    microseconds = float(plan.price.split(" ")[1].replace(",", "")) if plan.price else None
    if microseconds is not None and steps:
        lower_bound = max(plan.minimal_bytes / gpu.bandwidth, gpu.launch_seconds * len(plan.steps))
        assert 0.9 * lower_bound < microseconds * 1e-6 < 1 + 1e4 * lower_bound


def chunks_of(plan: Plan) -> int:
    """Return the number of chunks that the plan states; it states none for one chunk."""
    said = re.search(r"([\d,]+) chunks", plan.reason)
    assert said is None or said[1] not in ("0", "1")
    return int(said[1].replace(",", "")) if said else 1


def says_what_it_does(plan: Plan) -> None:
    """Check words of the reason and of purposes that a user may rely on, if the steps determine them."""
    steps, reason = each_step(plan.steps), plan.reason
    kernels = [step.kernel.name for step in steps if isinstance(step, KernelLaunch)]
    if plan.method == "fft" and "shares" not in reason:
        assert ("one matrix product per frequency" in reason) == any(isinstance(step, GemmCall) for step in steps)
    if plan.method == "implicit_gemm":
        assert ("inputs first copied to channels-last" in reason) == ("channels_last" in kernels)
        products = [step for step in steps if isinstance(step, KernelLaunch) and step.kernel.name == plan.method]
        assert len(products) != 1 or (f"each sum in {products[0].grid[1]} parts" in reason) == (products[0].grid[1] > 1)
        assert all(("activation" in step.purpose) == (step.grid[1] == 1) for step in products)
    assert not re.search(r"\b1 (chunks|runs|parts of)\b", reason)
    if plan.method in ("fused", "unfused"):
        assert (plan.method == "fused") == ("conv_pair" in kernels) == ("in one kernel" in reason)
        unstored = sum("is never stored" in note for note in plan.notes)
        assert (unstored > 0) == ("conv_pair" in kernels) and unstored <= kernels.count("conv_pair")
    if any("CUDA graphs cannot capture" in note for note in plan.notes):
        assert "implicit_gemm" not in kernels
    purposes = {step.purpose for step in steps if isinstance(step, KernelLaunch)}
    if "one batched GEMM over samples on " in reason:
        assert ("on columns" in reason) == any(purpose.startswith("columns") for purpose in purposes)
        assert ("on gathered inputs" in reason) == any(purpose.startswith("gathered ") for purpose in purposes)
    for step in steps:
        if isinstance(step, KernelLaunch) and step.kernel.name in PARTS:
            assert ("in parts" in step.purpose) == (step.grid[PARTS[step.kernel.name]] > 1)
            assert ("sum of the parts" in purposes) == (dict(step.params)["sums"].buffer == "sums")
            assert "in parts" not in step.purpose or dict(step.params)["sums"].buffer == "sums", "there is room for one"
        if isinstance(step, LaunchLoop) and plan.method == "step":
            assert ("one launch per step" in reason) == (len(step.launches) == 1)
    if "batched GEMM on " in reason:  # a weight gradient
        is_pointwise = bool(re.search(r"kernel 1(x1)*\b", plan.problem))
        assert ("GEMM on columns" in reason) == (not is_pointwise)


def counts_its_products(plan: Plan) -> None:
    """Check that operations are those of the problem, unless it is transformed or cut into other problems."""
    assert plan.method == "fft" or sum(step.flops for step in each_step(plan.steps)) == plan.flops


def _hold_launch(launch: KernelLaunch, gpu: Any, most: float) -> None:
    threads = prod(launch.grid) * launch.block
    parts_are_even(launch)
    is_whole = GRID_Y not in launch.grid and launch.purpose not in ("zeros", "sum of the parts")
    if is_whole and launch.kernel.name in MAX_BYTES:
        assert threads <= max(1024, 2 * launch.bytes_moved), launch
        assert launch.bytes_moved <= MAX_BYTES[launch.kernel.name] * threads, launch
    assert all(count == 1 or asked for count, asked in zip(launch.grid, axes_asked_for(launch.kernel.name))), launch
    lanes_have_channels(launch)
    if launch.kernel.name in UNCOSTED:
        assert launch.flops > 0 and launch.arithmetic_seconds == 0
    elif launch.flops:
        assert launch.flops / most < launch.arithmetic_seconds < 1e3 * max(1e-6, launch.flops / gpu.fp64), launch
    else:
        assert launch.arithmetic_seconds < 1e3 * max(1e-6, threads / gpu.fp32), launch
    assert launch.bytes_moved > 0 or "zeros" in launch.purpose, launch
    assert launch.l2_bytes == 0 or launch.l2_bytes > 0.1 * launch.bytes_moved, launch
    assert launch.shared_bytes <= gpu.shared_bytes, launch
    assert launch.shared_bytes >= 0 and (not launch.cooperative or launch.blocks <= gpu.multiprocessors)


def lanes_have_channels(launch: KernelLaunch) -> None:
    """Check that adjacent threads along channels are one, just enough for all channels, or the allowed maximum.

    Blocks along y process the other channels, and none is idle; along x no block is beyond the frequencies.
    """
    params, name, (x, y, _) = dict(launch.params), launch.kernel.name, launch.grid
    if name in CHANNELS_OF:
        counted, most = CHANNELS_OF[name]
        lanes, channels = params["channel_lanes"], params[counted]
        assert lanes == 1 or (lanes < 2 * channels and (lanes >= channels or lanes == most)), launch
        of_taps = prod(params["windows"][2]) if name == "im2col" else 1
        assert y == GRID_Y or (y // of_taps - 1) * lanes < channels <= y // of_taps * lanes, launch
    elif name == "channels_last":
        lanes, vectors = 1 << params["lanes_shift"], params["padded"] * item_of(launch) // 16
        assert lanes < 2 * vectors and (lanes >= vectors or lanes == 8), launch
    elif name in ("epilogue_grad", "prologue_grad"):
        vectors = -(-params["channels"] // int(dict(launch.kernel.macros).get("WIDTH", "1")))
        lanes = params["lanes"]
        assert lanes == 1 or (lanes < 2 * vectors and (lanes >= vectors or lanes == 32)), launch
    elif name in ("tiles", "finish_tiles"):
        lanes, channels = (
            params[one] for one in (("channel_lanes", "channels") if name == "tiles" else ("output_lanes", "outputs"))
        )
        assert lanes == 1 or (lanes < 2 * channels and (lanes >= channels or lanes in (8, 32))), launch
    elif name in ("spectra", "spectra_gradient") and x < GRID_X:
        assert (x - 1) * launch.block < params["frequencies"] <= x * launch.block, launch


def item_of(launch: KernelLaunch) -> int:
    dtype = dict(launch.kernel.macros)["DTYPE"]
    return ITEMSIZE[dtype] if dtype in ITEMSIZE else int(dtype.removeprefix("bits")) // 8


def parts_are_even(launch: KernelLaunch) -> None:
    """Check that the parts of a sum cover all of it, and that none is empty or much longer than the others."""
    params = dict(launch.params)
    if launch.kernel.name == "spectra_gradient":
        parts, part, whole = launch.grid[2], params["units_per_part"], params["units"]
    elif "pixels_per_part" in params:
        parts, part = launch.grid[PARTS[launch.kernel.name]], params["pixels_per_part"]
        whole = params["pixels"] if "pixels" in params else params["batch"] * prod(params["windows"][1])
    else:
        return
    assert whole <= parts * part < whole + max(parts, part), launch
    if launch.kernel.name == "implicit_weight_gradient":  # each part fills its pipeline
        assert parts == 1 or part * ITEMSIZE[dict(launch.kernel.macros)["DTYPE"]] >= STAGES * SLAB_BYTES, launch


@functools.cache
def axes_asked_for(kernel: str) -> tuple[bool, bool, bool]:
    """Return whether blocks read their index along each axis of the grid; along others they would all do the same."""
    body = (KERNELS / f"{kernel}.cu").read_text()
    included = (KERNELS / name for name in re.findall(r'#include "(.*?)"', body))
    text = "".join([body, *(path.read_text() for path in included)])
    return True, "blockIdx.y" in text, "blockIdx.z" in text


def enough_threads(plan: Plan, elements: int) -> None:
    """Check the launches that write the result: no thread has too many elements, and few have none."""
    every = [step for step in each_step(plan.steps) if isinstance(step, KernelLaunch)]
    writing = [step for step in every if any(at.buffer == "out" for at in addresses(step.params))]
    threads = sum(prod(step.grid) * step.block for step in writing)
    if writing and not any(step.grid[0] == GRID_X or GRID_Y in step.grid[1:] for step in writing):
        assert threads * MAX_OF_A_THREAD >= elements, writing
        assert threads <= 1024 * len(writing) + 8 * elements, writing


def methods_of(
    function: Any, arguments: Any, settings: dict[str, Any], on: str, limit: int | None
) -> Iterator[tuple[Any, Plan]]:
    """Yield the plans of all methods that apply; at least one does."""
    found = 0
    for method in ("auto", "direct", "gemm", "implicit_gemm", "fft"):
        with cupyconv.options(workspace_limit=limit):
            call = checked_call(function, *arguments, **settings, method=method, on=on)
            try:
                plan = holds(call, limit, on)
            except ValueError as refusal:
                assert "appl" in str(refusal)
                continue
        assert method in ("auto", plan.method)
        found += 1
        yield call, plan
    assert found or limit is not None


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("dtype", "on", "limit", "order"), SETTINGS)
class TestConvolutions:
    """Convolutions, both of their gradients, and transposed convolutions."""

    def test_forward(self, name, dtype, on, limit, order):
        shape, kernel, settings = CONVOLUTIONS[name]
        x, weight = array(*shape, dtype=dtype, order=order), array(*kernel, dtype=dtype)
        merged = [array(shape[0], count, *shape[2:], dtype=dtype, order=order) for count in (1, shape[1] - 1)]
        extra = {} if dtype == "complex64" else {"bias": array(kernel[0], dtype=dtype), "activation": "gelu"}
        (y,) = checked_call(cupyconv.conv, x, weight, **settings, on=on).results
        for xs, more in ((x, extra), (merged, {"residual": array(*y.shape, dtype=dtype, order=order)})):
            for call, plan in methods_of(cupyconv.conv, (xs, weight), settings | more, on, limit):
                enough_threads(plan, prod(call.results[0].shape))
                counts_its_products(plan)

    def test_transposed(self, name, dtype, on, limit, order):
        shape, kernel, settings = CONVOLUTIONS[name]
        groups = settings.get("groups", 1)
        settings = {key: value for key, value in settings.items() if key in ("stride", "dilation", "groups")}
        x = array(*shape, dtype=dtype, order=order)
        weight = array(shape[1], max(1, kernel[0] // groups), *kernel[2:], dtype=dtype)
        for call, plan in methods_of(cupyconv.conv_transpose, (x, weight), settings, on, limit):
            enough_threads(
                plan, prod(call.results[0].shape) // prod(np.broadcast_to(settings.get("stride", 1), len(shape) - 2))
            )

    def test_gradients(self, name, dtype, on, limit, order):
        shape, kernel, settings = CONVOLUTIONS[name]
        x, weight = array(*shape, dtype=dtype, order=order), array(*kernel, dtype=dtype)
        (result,) = checked_call(cupyconv.conv, x, weight, **settings, on=on).results
        grad = array(*result.shape, dtype=dtype, order=order)
        list(methods_of(cupyconv.conv_grad_input, (grad, weight, shape), settings, on, limit))
        for _, plan in methods_of(cupyconv.conv_grad_weight, (grad, x, kernel[2:]), settings, on, limit):
            counts_its_products(plan)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(
    ("dtype", "order"), [("float16", "last"), ("float32", "C"), ("float32", "gaps"), ("complex64", "C")]
)
def test_chunks_are_as_large_as_there_is_room_for(name, dtype, order):
    """Equal chunks need over half of the limit: twice the size would not fit.  Chunks of sums alone use the result."""
    shape, kernel, settings = CONVOLUTIONS[name]
    of_weights = order if order == "gaps" else "C"
    x, weight = array(*shape, dtype=dtype, order=order), array(*kernel, dtype=dtype, order=of_weights)
    (y,) = checked_call(cupyconv.conv, x, weight, **settings, on="sm_90").results
    grad = array(*y.shape, dtype=dtype, order=order)
    turned = array(shape[1], kernel[0] // settings.get("groups", 1) or 1, *kernel[2:], dtype=dtype, order=of_weights)
    alone = {key: value for key, value in settings.items() if key in ("stride", "dilation", "groups")}
    calls: list[Any] = [
        (cupyconv.conv, (x, weight), settings),
        (cupyconv.conv_grad_input, (grad, weight, shape), settings),
        (cupyconv.conv_grad_weight, (grad, x, kernel[2:]), settings),
        (cupyconv.conv_transpose, (x, turned), alone),
    ]
    found = 0
    for (function, arguments, given), method, limit in product(calls, ("gemm", "fft"), (30_000, 200_000, 1_500_000)):
        with cupyconv.options(workspace_limit=limit):
            try:
                plan = cupyconv.explain(function, *arguments, **given, method=method, on="sm_90")
            except ValueError as refusal:
                assert "appl" in str(refusal)
                continue
        taken = sum(buffer.space for buffer in plan.workspace if not buffer.of)
        assert taken <= limit
        if chunks_of(plan) > 1:
            found += 1
            assert 2 * taken > limit or not taken, (function, method, limit)
        if method == "fft" and function is cupyconv.conv and "shares" not in plan.reason:
            back = sum(isinstance(step, Transform) and step.inverse for step in each_step(plan.steps))
            assert back == chunks_of(plan)
    has_no_room = order == "gaps" and name == "deep"  # for the reordered weight
    assert found or has_no_room or name == "1x1", "which multiplies images where they lie"


def images(*channels: int, batch: int = 5, dtypes: tuple[str, str] = ("float32", "float32"), **more: Any) -> list[Any]:
    """Return images of the same size with these numbers of channels."""
    return [array(batch, count, 14, 13, dtype=dtype, **more) for count, dtype in zip(channels, dtypes)]


def kernels(channels: int, dtype: str = "float32") -> Any:
    return array(channels, 5, 3, 3, dtype=dtype)


BOTH_MIXED = (("complex64", "float32"), ("float32", "complex64"))
#: Gradients of weights and transposed convolutions whose columns come in chunks.
IN_CHUNKS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (cupyconv.conv_grad_weight, (*images(8, 5, batch=6), 3), {"padding": 1}),
    (cupyconv.conv_grad_weight, (array(1, 8, 40, 33), array(1, 5, 40, 33), 3), {"padding": 1}),
    (cupyconv.conv_grad_weight, (*images(8, 5, dtypes=("float16", "float16")), 3), {"padding": 1}),
    (cupyconv.conv_grad_weight, (*images(8, 12), 3), {"padding": 1, "groups": 4}),
    *((cupyconv.conv_grad_weight, (*images(8, 5, dtypes=mixed), 3), {"padding": 1}) for mixed in BOTH_MIXED),
    (cupyconv.conv_grad_weight, (*images(8, order="gaps"), images(5, 3, order="gaps"), 1), {}),
    (cupyconv.conv_transpose, (*images(8), kernels(8)), {"stride": 2}),
    (cupyconv.conv_transpose, (*images(12), kernels(12)), {"stride": 2, "groups": 4}),
    *((cupyconv.conv_transpose, (*images(12, dtypes=mixed), kernels(12, mixed[1])), {"stride": 2, "groups": 2}) for mixed in BOTH_MIXED),
    (cupyconv.conv_transpose, (images(5, 7, order="gaps"), kernels(12)), {"stride": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "settings"), IN_CHUNKS)
def test_every_limit_is_kept(function, arguments, settings):
    """Plans compute all products; a larger limit is never refused; the bytes that a refusal names are enough."""
    limits, amounts, asked, granted = {int(500 * 1.12**i) for i in range(77)}, set(), set(), []
    for limit in sorted(limits):
        with cupyconv.options(workspace_limit=limit):
            try:
                plan = cupyconv.explain(function, *arguments, **settings, method="gemm", on="sm_90")
            except ValueError as refusal:
                assert not granted and "workspace" in str(refusal)
                asked |= {int(number.replace(",", "")) for number in re.findall(r"needs ([\d,]+) bytes", str(refusal))}
                continue
        check(plan, limit)
        made = Counter(launch.purpose for launch in launches(plan) if launch.kernel.name in ("im2col", "col2im"))
        assert chunks_of(plan) == made.get("sum of columns", min(made.values())), "of each chunk"
        granted.append(limit)
        amounts.add(sum(step.flops for step in each_step(plan.steps)))
    assert len(amounts) == 1 and len(granted) > 20
    for enough in asked:
        with cupyconv.options(workspace_limit=enough):
            cupyconv.explain(function, *arguments, **settings, method="gemm", on="sm_90")


@pytest.mark.parametrize(
    ("channels", "tiles"), [((2, 2), [1, 1]), ((3, 1), [2, 1]), ((1, 3), [1, 2]), ((1, 2, 1), [1, 2, 1])]
)
@pytest.mark.parametrize("method", ["direct", "gemm", "implicit_gemm"])
def test_results_that_share_groups(method, channels, tiles):
    """With two groups of two channels, a kernel that gathers processes the groups of which a result has channels."""
    shapes = [(2, count, 12, 12) for count in channels]
    grad, weight = array(2, 4, 4, 4), array(4, 2, 3, 3)
    call = checked_call(cupyconv.conv_grad_input, grad, weight, shapes, groups=2, stride=3, method=method, on="sm_90")
    hold(plan := call.plan(), spans(call))
    found = launches(plan, "transposed")
    assert method != "direct" or [launch.grid[1] for launch in found] == tiles


@pytest.mark.parametrize(("groups", "calls"), [(2, 1), (8, 1), (65_535, 1), (70_000, 2), (140_000, 3)])
def test_groups_of_one_sample_are_a_batch(groups, calls):
    """A call has as many groups as it may, and each group is in one call."""
    x, weight = array(1, groups, 6), array(groups, 1, 3)
    for function, arguments in (
        (cupyconv.conv_transpose, (x, weight)),
        (cupyconv.conv_grad_weight, (x, array(1, groups, 8), 3)),
    ):
        call = checked_call(function, *arguments, groups=groups, method="gemm", on="sm_90")
        products = [step for step in each_step(holds(call).steps) if isinstance(step, GemmCall)]
        assert len(products) == calls and sum(product.batch for product in products) == groups
        places = {
            product.c.at.offset + i * product.c.stride * 4 for product in products for i in (0, product.batch - 1)
        }
        assert len(places) == 2 * calls and max(places) == (groups - 1) * products[0].c.stride * 4


@pytest.mark.parametrize("limit", [500_000, 1_000_000, 2_000_000])
def test_chunks_of_pixels_are_counted(limit):
    """Each of three samples has equally many chunks, and each chunk has its own product."""
    with cupyconv.options(workspace_limit=limit):
        x, weight = array(3, 8, 200, 200), array(6, 8, 3, 3)
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm", on="sm_90")
    said = re.search(r"chunks of 1 x (\d+) pixels", plan.reason)
    assert said and chunks_of(plan) == 3 * -(-40_000 // int(said[1]))
    assert sum(isinstance(step, GemmCall) for step in each_step(plan.steps)) == chunks_of(plan)


@pytest.mark.parametrize("limit", [200_000, 300_000, 400_000])
@pytest.mark.parametrize(("x_dtype", "dtype", "order"), [
    ("float32", "complex64", "C"), ("complex64", "float32", "gaps"), ("float32", "float32", "gaps"), ("float64", "complex128", "gaps"),
])  # fmt: skip
def test_a_gathered_weight_and_sums_of_two_parts_count(x_dtype, dtype, order, limit):
    """A weight with gaps, or in separate parts, is in workspace in addition to columns and sums; a part is as large."""
    x, weight = array(8, 8, 12, 12, dtype=x_dtype), array(6, 8, 3, 3, dtype=dtype, order=order)
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm", on="sm_90")
    check(plan, limit)
    taken = sum(buffer.space for buffer in plan.workspace)
    assert 2 * taken > limit >= taken and {buffer.name for buffer in plan.workspace} >= {"columns", "gathered weight"}


@pytest.mark.parametrize("order", ["C", "last", "gaps"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_pooling_and_columns(dtype, order):
    x = array(4, 12, 21, 18, dtype=dtype, order=order)
    usual = {"kernel_shape": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False}
    for function in (cupyconv.max_pool, cupyconv.avg_pool):
        call = checked_call(function, x, 3, stride=2, padding=1, on="sm_90")
        enough_threads(holds(call), prod(call.results[0].shape))
    y = array(4, 12, 11, 9, dtype=dtype, order=order)
    holds(MAX_POOL_GRADIENT.checked({"x": x, "y": y, "grad": y, **usual}, "sm_90"))
    mean = {"grad": y, "out": None, "x_shapes": (x.shape,), "count_include_pad": True}
    holds(AVG_POOL_GRADIENT.checked(mean | usual, "sm_90"))
    for padding, stride in product((0, 1), (1, 2)):
        call = checked_call(cupyconv.im2col, x, 3, padding=padding, stride=stride, on="sm_90")
        enough_threads(holds(call), prod(call.results[0].shape))
        columns = array(*call.results[0].shape, dtype=dtype)
        call = checked_call(cupyconv.col2im, columns, (21, 18), 3, padding=padding, stride=stride, on="sm_90")
        enough_threads(call.plan(), prod(call.results[0].shape))


@pytest.mark.parametrize("order", ["C", "last", "gaps", "cut"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(8, 16, 20, 20), (3, 7, 5), (1, 300, 1, 1), (64, 1, 50)], ids=str)
def test_passes_of_gradients(dtype, order, shape):
    if order == "cut":  # channels-last, with pixels that have no single stride
        grad = array(*shape[:-1], shape[-1] + 1, dtype=dtype, order="last")[..., 1:]
    else:
        grad = array(*shape, dtype=dtype, order=order)
    scale = array(shape[1], dtype="float32" if dtype == "float16" else dtype)
    usual = {"spatial": len(shape) - 2, "activation": None}
    holds(EPILOGUE_GRADIENT.checked({"grad": grad, "saved": None, "through": False, "sums": True, **usual}, "sm_90"))
    given = {"grad": grad, "x": grad, "scale": scale, "shift": None, "sums": None, "through": True}
    holds(PROLOGUE_GRADIENT.checked(given | usual, "sm_90"))


@pytest.mark.parametrize("fuse", [True, False, "auto"])
@pytest.mark.parametrize("groups", [(1, 1), (16, 1), (1, 16)], ids=str)
@pytest.mark.parametrize(("dtype", "on"), [("float16", "sm_80"), ("float32", "sm_90"), ("float64", "sm_75")])
def test_chains(dtype, on, groups, fuse):
    layers = [
        cupyconv.ConvLayer(array(16, 16 // count, 3, 3, dtype=dtype), groups=count, padding=1) for count in groups
    ]
    for limit in (None, 250_000):
        with cupyconv.options(workspace_limit=limit):
            call = checked_call(cupyconv.conv_chain, array(4, 16, 30, 30, dtype=dtype), layers, fuse=fuse, on=on)
            try:
                holds(call, limit, on)
            except ValueError as refusal:
                assert fuse is True and dtype == "float64" and "bytes of shared memory per block" in str(refusal)


@pytest.mark.parametrize(
    ("dtype", "on", "kernel"), [("float32", "sm_75", 3), ("float16", "sm_90", 3), ("float32", "sm_90", 9)]
)
def test_images_between_layers_take_turns_within_the_limit(dtype, on, kernel):
    """Two buffers hold alternate images, each as large as its largest, and leave half of the limit to the layers."""
    counts = (8, 24, 8, 40, 16, 32, 8)
    pairs = [(outputs, channels) for channels, outputs in pairwise(counts)]
    layers = [cupyconv.ConvLayer(array(*pair, kernel, kernel, dtype=dtype), padding=kernel // 2) for pair in pairs]
    x = array(7, 8, 20, 20, dtype=dtype)
    images = [400 * count * x.itemsize for count in counts[1:-1]]
    places = [max(images[slot::2]) for slot in (0, 1)]
    for limit in (None, 14 * sum(places), 14 * sum(places) - 1, 5 * sum(places), 2 * sum(places), sum(places) // 2):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on=on)
        assert plan.method == "unfused"
        said = re.search(r"([\d,]+) chunks of (\d+) samples?", plan.reason)
        samples, allowed = int(said[2]) if said else 7, limit or 256 << 20
        assert (samples == 7) == (2 * 7 * sum(places) <= allowed)
        assert samples == 1 or 2 * samples * sum(places) <= allowed
        assert samples == 7 or 2 * -(-7 // (-(-7 // samples) - 1)) * sum(places) > allowed, "fewer chunks would not fit"
        own = {buffer.name: buffer.nbytes for buffer in plan.workspace}
        assert [own["layer[0]"], own["layer[1]"]] == [samples * place for place in places]
        taken = sum(buffer.space for buffer in plan.workspace if not buffer.of)
        is_beyond = samples * sum(places) > allowed
        assert is_beyond == any("beyond the workspace limit" in note for note in plan.notes)
        assert is_beyond or taken <= allowed
        assert chunks_of(plan) == -(-7 // samples)
        written = {at.offset for at in addresses(each_step(plan.steps)) if at.buffer == "out"}
        assert written >= {first * 400 * counts[-1] * x.itemsize for first in range(0, 7, samples)}


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize(("dtype", "on"), [("float16", "sm_80"), ("float32", "sm_90"), ("float64", "sm_75")])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_recurrent_layers(cell, method, dtype, on, direction):
    gates, directions = GATES[cell], 1 + (direction == "bidirectional")
    weights = [array(directions, gates * 48, size, dtype=dtype) for size in (20, 48)]
    weights = weights if directions == 2 else [weight[0] for weight in weights]
    function = getattr(cupyconv, cell)
    resets = ({}, {"linear_before_reset": False}) if cell == "gru" else ({},)
    for limit, (steps, batch), settings in product((None, 100_000), ((1, 4), (12, 5), (3, 100)), resets):
        with cupyconv.options(workspace_limit=limit):
            x = array(steps, batch, 20, dtype=dtype)
            try:
                plan = cupyconv.explain(function, x, *weights, direction=direction, method=method, **settings, on=on)
            except ValueError as refusal:
                assert "appl" in str(refusal) and limit
                continue
        hold(plan, None, limit, on)
        steps_fill_their_buffers(plan)
        products = sum(step.flops for step in each_step(plan.steps))
        assert products == 2 * steps * batch * directions * gates * 48 * (20 + 48) and plan.method == method
        resetting = [launch for launch in launches(plan) if "reset" in launch.purpose]
        assert bool(resetting) == bool(settings), "of one product it is a gate like the others"
        candidates = [dict(launch.params)["is_candidate"] for launch in launches(plan, f"recurrent_{method}")]
        in_turn = [0, 1] if settings and method == "step" else [int(bool(settings))]
        assert candidates == in_turn * (len(candidates) // len(in_turn))


def steps_fill_their_buffers(plan: Plan) -> None:
    """Check that a chunk's gates are stored from its earliest step on, and what r and z leave for n for one step."""
    sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    for launch in (one for one in launches(plan) if "gates_d" in dict(one.params)):
        params, item = dict(launch.params), ITEMSIZE[accumulator(dict(launch.kernel.macros)["DTYPE"])]
        directions, count = launch.grid[2], params["count"]
        if params["gates"] == Address("gates"):
            assert (
                params["gates_d"] * directions * item == sizes["gates"]
                and params["gates_d"] >= count * params["gates_t"]
            )
            for first, is_last in zip(params["first"], params["backward"]):
                assert first == (params["steps"] - params["step"] - count if is_last else params["step"])
        if params["beside"] == Address("reset state"):
            assert (params["beside_d"] * directions * item, params["beside_t"]) == (sizes["reset state"], 0)


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("limit", [None, 200_000])
def test_gradients_of_recurrent_layers(cell, dtype, limit):
    before = (True, False) if cell == "gru" else (True,)
    for sizes, direction, linear in product(((1, 20, 3, 5), (30, 9, 10, 24)), ("forward", "bidirectional"), before):
        with cupyconv.options(workspace_limit=limit):
            plan = recurrent_gradient_plan(cell, dtype, sizes, direction=direction, linear_before_reset=linear)
        hold(plan, None, limit)
        steps, batch, inputs, _ = sizes
        moved = [launch.bytes_moved for launch in launches(plan, "recurrent_inputs")]
        # 16-bit inputs are copied in the dtype of products, once for each pass through the layer.
        copies = [times * steps * batch * inputs * (2 + 4) for times in (1, 2)] if dtype == "float16" else [0]
        assert sum(moved) in copies
        # A step's product has as many operations as its part of the gradient of the same weight.
        every, through = each_step(plan.steps), 0
        for step in every:
            if isinstance(step, LaunchLoop):
                through += (step.times - 1) * sum(launch.flops for launch in step.launches)
            elif isinstance(step, KernelLaunch) and "of all steps" in step.purpose:
                through += step.flops
        assert through == sum(
            step.flops for step in every if isinstance(step, GemmCall) and step.purpose == "weight_hh"
        )


@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [(0, 8, 9, 9), (2, 0, 9, 9), (2, 8, 0, 9)], ids=str)
def test_nothing_is_done_for_nothing(size, dtype, order):
    """An empty result needs no step; a result of padding alone is planned like any other."""
    x, weight = array(*size, dtype=dtype, order=order), array(8, size[1], 3, 3, dtype=dtype)
    (y,) = checked_call(cupyconv.conv, x, weight, padding=2, on="sm_90").results
    grad = array(*y.shape, dtype=dtype, order=order)
    calls: list[Any] = [(cupyconv.conv, x, weight), (cupyconv.conv_grad_weight, grad, x, 3), (cupyconv.im2col, x, 3)]
    calls += [(cupyconv.conv_grad_input, grad, weight, size)]
    for function, *arguments in calls:
        for method in ("auto", "direct", "gemm", "implicit_gemm") if function is not cupyconv.im2col else (None,):
            named = {"method": method} if method else {}
            call = checked_call(function, *arguments, padding=2, **named, on="sm_90")
            try:
                plan = call.plan()
            except ValueError as refusal:
                assert "appl" in str(refusal)
                continue
            if any(prod(result.shape) for result in call.results):
                hold(plan, spans(call))
            else:
                assert plan.steps == plan.workspace == (), (function, method)


@pytest.mark.parametrize("batch", [4, 0])
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("function", [cupyconv.conv, cupyconv.conv_transpose], ids=["conv", "conv_transpose"])
def test_a_pre_activation_is_kept_beside_the_result(function, groups, batch):
    for method, taps in (*product(("direct", "gemm", "implicit_gemm"), (1, 3)), ("fft", 3)):
        x, weight = array(batch, 8, 12, 12), array(8, 8 // groups, taps, taps)
        settings = {"groups": groups, "activation": "gelu", "method": method, "on": "sm_90"}
        problem: Any = checked_call(function, x, weight, **settings).problem
        out = problem.out if function is cupyconv.conv else problem.outs[0]
        plain, keeping = planned(problem), planned(replace(problem, pre=replace(out, name="pre")))
        assert keeping.minimal_bytes == plain.minimal_bytes + out.nbytes
        assert keeping.bytes_moved == sum(step.bytes_moved for step in keeping.steps)
        # An activation that is a separate pass anyway reads the pre-activation and writes the result.
        more = keeping.bytes_moved - plain.bytes_moved
        assert (taps > 1) * out.nbytes <= more <= 2 * out.nbytes, (method, taps)
        assert {"pre", "out"} <= {at.buffer for at in addresses(keeping.steps)} or (not batch and not keeping.steps)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("cell", GATES)
def test_gradients_of_no_steps_and_of_no_samples_are_zeros(cell, direction):
    """Without steps, the gradients of the initial states are those of the last states."""
    for steps, batch in ((0, 4), (2, 0)):
        made = recurrent_gradient_plan(cell, "float32", (steps, batch, 3, 5), direction=direction)
        check(made)
        *zeros, states = (*made.steps, *[None] * (not batch))
        assert {at.buffer for at in addresses(tuple(zeros))} == {"grad_weight_ih", "grad_weight_hh", "sums"}
        assert all(isinstance(step, KernelLaunch) and step.purpose == "zeros" for step in zeros)
        if isinstance(states, LaunchLoop):
            assert states.times == 1 and states.launches[0].grid[1] == 1 + (direction == "bidirectional")
        else:
            assert not batch
    (grad_x,) = recurrent_gradient_plan(cell, "float32", (2, 4, 3, 0), direction=direction).steps
    assert {at.buffer for at in addresses(grad_x)} == {"grad_x"} and grad_x.purpose == "zeros"


@pytest.mark.parametrize(
    ("dtype", "hidden", "words"),
    [
        ("float32", 48, None), ("float32", 45, "4-byte access"), ("float64", 45, "8-byte access"),
        ("float16", 46, "4-byte access"), ("float16", 45, "scalar access"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["step", "persistent"])
def test_rows_of_a_weight_that_are_no_whole_vectors_are_noted(method, dtype, hidden, words):
    weights = array(4 * hidden, 48, dtype=dtype), array(4 * hidden, hidden, dtype=dtype)
    plan = cupyconv.explain(cupyconv.lstm, array(3, 5, 48, dtype=dtype), *weights, method=method, on="sm_90")
    (width,) = {dict(launch.params)["weight_vector"] for launch in launches(plan, f"recurrent_{method}")}
    assert words in {16: [None], 0: ["scalar access"]}.get(width, [f"{width}-byte access"]), width
    notes = [note for note in plan.notes if note.startswith("weight_hh: rows")]
    assert [note.rpartition(": ")[2] for note in notes] == ([words] if words else [])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_thread_has_more_sums_than_registers(dtype):
    """CUDA cores compute eight samples of four gates, in float64 four; many threads share the sums of tensor cores."""
    for resident in (False, True):
        for on in ("sm_75", "sm_90"):
            for tile in recurrent_tiles(dtype, resident, known_gpu(on)):
                assert tile.arithmetic != "FMA" or tile.samples * ITEMSIZE[dtype] <= 32
    asked = {tile.samples for tile in recurrent_tiles("float32", False, known_gpu("sm_75"))}
    assert asked == {4, 8}, "few samples and many"


def test_weights_that_no_block_has_room_for_go_back_step_by_step():
    """Rows of 8 units' four gates in float64 must fit 227 KiB of shared memory."""
    for hidden, method in ((800, "persistent"), (900, "step")):
        assert recurrent_gradient_plan("lstm", "float64", (10, 4, 8, hidden)).method == method


def test_shares_of_transforms_keep_together_within_the_limit():
    """The last share has fewer outputs, yet it once needed more of our memory; the first needed most of cuFFT's own."""
    xs = [array(3, channels, 224, 33, dtype="complex128") for channels in (23, 33, 8)]
    settings = dict(padding=((5, 0), (1, 1)), padding_mode="wrap", dilation=(5, 1), method="fft")
    grad, limit = array(3, 17, 219, 34, dtype="complex128"), 5_000_000
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, xs, (3, 2), on="sm_86", **settings)
    check(plan, limit, "sm_86")


def test_images_of_few_elements_take_time_to_be_moved():
    """The time of an image with fewer than 32 elements was once zero."""
    grad, x = array(5, 1, 2), array(5, 8, 3, order="last")
    settings = dict(stride=3, padding=((0, 3),), method="implicit_gemm")
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (3,), on="sm_90", **settings)
    assert any(launch.kernel.name == "channels_last" for launch in plan.steps)
    check(plan)


def test_usual_kernels_of_depthwise_convolutions_are_compiled_for():
    """These are odd squares, and for gradients through stride 2 all squares; others share a kernel or use no strips."""
    found: dict[str, set[tuple[int, int]]] = {}
    for size, stride in product(range(1, 9), (1, 2, 3)):
        x, many, settings = array(8, 64, 30, 30), array(64, 1, size, size), {"stride": stride, "groups": 64}
        (y,) = checked_call(cupyconv.conv, x, many, **settings, on="sm_90").results
        scale, grad, few = array(64), array(*y.shape), array(64, 2, size, size)
        calls: dict[str, Any] = {
            "alone": (cupyconv.conv, (x, many), settings),
            "prologue": (cupyconv.conv, (x, many), settings | {"prologue": (scale, None, "relu")}),
            "groups": (cupyconv.conv, (x, few), settings | {"groups": 32}),
            "both": (cupyconv.conv, (x, few), settings | {"groups": 32, "prologue": (scale, None, "relu")}),
            "transposed": (cupyconv.conv_transpose, (x, many), settings),  # at stride 1 it is a convolution
            "weight": (cupyconv.conv_grad_weight, (grad, x, size), settings),
            "weight of groups": (cupyconv.conv_grad_weight, (grad, x, size), settings | {"groups": 32}),
        }
        for name, (function, arguments, given) in calls.items():
            plan = cupyconv.explain(function, *arguments, **given, method="direct", on="sm_90")
            kernels = [launch.kernel for launch in launches(plan) if launch.kernel.name.startswith("depthwise")]
            if any(dict(kernel.macros)["KERNEL"] == str(size) for kernel in kernels):
                found.setdefault(name, set()).add((size, stride))
    three, five = {(3, 1), (3, 2)}, {(5, 1), (5, 2)}
    assert found.pop("alone") == three | five | {(7, 1)} and found.pop("weight") == three | five
    assert found.pop("transposed") == {(size, 2) for size in range(2, 8)} | {(size, 1) for size in (3, 5, 7)}
    assert found == {"prologue": three, "groups": three}


def test_a_merge_takes_all_shared_memory_that_every_gpu_has_and_needs_matrix_instructions():
    """Scales and shifts of 1,228 channels, the weights of eight outputs and their biases fill 48 KiB."""
    for channels, name in ((1228, "merge"), (1232, "direct")):
        x, scale = array(2, channels, 64), array(channels)
        weight, prologue = array(8, channels, 1), (scale, scale, "relu")
        plan = cupyconv.explain(cupyconv.conv, x, weight, prologue=prologue, method="direct", on="sm_90")
        assert [launch.kernel.name for launch in launches(plan)] == [name]
        assert name != "merge" or launches(plan)[0].shared_bytes == 48 << 10
    half = pytest.importorskip("ml_dtypes").bfloat16
    for dtype, on, name in (("float16", "sm_75", "merge"), (half, "sm_75", "direct"), (half, "sm_80", "merge")):
        plan = cupyconv.explain(
            cupyconv.conv, array(2, 8, 64, dtype=dtype), array(8, 8, 1, dtype=dtype), method="direct", on=on
        )
        assert launches(plan)[0].kernel.name == name


@pytest.mark.parametrize(
    ("dtype", "of_weight", "on", "words"),
    [
        ("complex64", "complex64", "sm_75", "sm_75 has no matrix instructions for complex64"),
        ("complex64", "complex64", "sm_80", None),
        ("complex128", "complex128", "sm_90", "no kernel for products of complex128"),
        ("complex64", "float32", "sm_90", "no kernel for products of complex64 and float32"),
        ("bfloat16", "bfloat16", "sm_75", "sm_75 has no matrix instructions for bfloat16"),
        ("bfloat16", "bfloat16", "sm_80", None),
    ],
)
def test_a_kernel_is_for_gpus_that_have_its_instructions(dtype, of_weight, on, words):
    """This holds for the kernel of implicit GEMMs and, with real numbers, for the kernel of a pair of layers."""
    if is_real := dtype == "bfloat16":
        dtype = of_weight = pytest.importorskip("ml_dtypes").bfloat16
    x, weight = array(2, 8, 9, 9, dtype=dtype), array(8, 8, 3, 3, dtype=of_weight)
    calls: list[Any] = [(cupyconv.conv, weight, {"method": "implicit_gemm"})]
    calls += [(cupyconv.conv_chain, [cupyconv.ConvLayer(weight)] * 2, {"fuse": True})] * is_real
    for function, given, settings in calls:
        with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
            cupyconv.explain(function, x, given, **settings, on=on)


def test_layers_that_have_nothing_to_sum_share_no_kernel():
    layers = [cupyconv.ConvLayer(array(8, channels, 3, 3)) for channels in (0, 8)]
    with pytest.raises(ValueError, match="nothing to sum over"):
        cupyconv.explain(cupyconv.conv_chain, array(2, 0, 9, 9), layers, fuse=True, on="sm_90")


@pytest.mark.parametrize("fuse", ["auto", True])
def test_of_pairings_that_take_as_long_one_is_taken(fuse):
    """With three equal layers, either the first two or the last two are paired."""
    layers = [cupyconv.ConvLayer(array(8, 8, 3, 3), padding=1)] * 3
    plan = cupyconv.explain(cupyconv.conv_chain, array(2, 8, 32, 32), layers, fuse=fuse, on="sm_90")
    assert [step.kernel.name for step in plan.steps].count("conv_pair") == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_bias_that_does_not_lie_side_by_side_is_copied(count):
    """The strides of a single element make no difference."""
    x, weight, bias = array(1, 4, 8, 8), array(count, 4, 3, 3), array(count)
    for each in (bias, bias[::-1], array(count, order="gaps")):
        plan = cupyconv.explain(cupyconv.conv, x, weight, each, on="sm_90")
        assert [one.buffer for one in plan.conversions] == ["bias"] * (each is not bias and count > 1)


def test_what_is_made_of_a_weight_is_kept_where_calls_give_the_same():
    """A weight that is converted is another array in each call, so nothing is cached."""
    for dtype, names in (("float32", ["weight for TF32X3 64 x 4"]), ("float16", [])):
        call = checked_call(cupyconv.conv, array(2, 8, 9, 9), array(8, 8, 3, 3, dtype=dtype), on="sm_90")
        problem: Any = replace(call.problem, weight_is_constant=True, method="implicit_gemm")
        assert [buffer.name for buffer in planned(problem).workspace if buffer.is_kept] == names


def kernel_of(plan: Plan) -> str:
    """Return the kernel size that a depthwise launch is compiled for ("0" for any), or the name of another kernel."""
    (launch,) = launches(plan)
    return dict(launch.kernel.macros)["KERNEL"] if launch.kernel.name.startswith("depthwise") else launch.kernel.name


@pytest.mark.parametrize("size", [(20, 20), (6, 20, 20)])
def test_strips_of_a_depthwise_convolution_go_forward_through_planes(size):
    """Strides of samples and of channels may be negative.  The stride along h selects the compiled kernel."""
    weight, settings = array(8, 1, *(3,) * 2 if len(size) == 2 else (1, 3, 3)), {"groups": 8, "method": "direct"}
    for axis in range(2 + len(size)):
        x = np.flip(array(2, 8, *size), axis)
        plan = cupyconv.explain(cupyconv.conv, x, weight, **settings, on="sm_90")
        assert kernel_of(plan) == ("3" if axis < 2 else "0")
    for stride in ((1, 3), (3, 1)):
        given = settings | {"stride": (1,) * (len(size) - 2) + stride}
        plan = cupyconv.explain(cupyconv.conv, array(2, 8, *size), weight, **given, on="sm_90")
        assert kernel_of(plan) == ("3" if stride == (1, 3) else "0")


def test_planes_of_a_depthwise_convolution_are_counted_in_32_bits():
    """Counts are bytes of a plane and, for transposed convolutions, elements of a result channel over all samples."""
    for rows, kernel in ((1 << 14, "3"), ((1 << 14) + 1, "0")):
        x, given = array(1, 2, rows, 1 << 14), {"groups": 2, "method": "direct", "on": "sm_90"}
        assert kernel_of(cupyconv.explain(cupyconv.conv, x, array(2, 1, 3, 3), **given)) == kernel
    for batch, kernel in ((3, "2"), (4, "transposed")):
        x, given = array(batch, 2, 1 << 13, 1 << 13), {"stride": 2, "groups": 2, "method": "direct", "on": "sm_90"}
        assert kernel_of(cupyconv.explain(cupyconv.conv_transpose, x, array(2, 1, 2, 2), **given)) == kernel


def test_sums_of_a_depthwise_weight_are_made_within_the_limit():
    """Sums of float16 are wider than the result and need workspace.  Groups of two channels are not depthwise."""
    grad = array(64, 64, 56, 56, dtype="float16")
    arguments, settings = (cupyconv.conv_grad_weight, grad, grad, 3), {"padding": 1, "method": "direct", "on": "sm_90"}
    for groups in (64, 32):
        plan: Any = cupyconv.explain(*arguments, **settings, groups=groups)
        assert bool(launches(plan, "depthwise_weight_gradient")) == (groups == 64)
    with cupyconv.options(workspace_limit=0), pytest.raises(ValueError, match="sums need"):
        cupyconv.explain(*arguments, **settings, groups=64)


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_a_kernel_takes_as_many_inputs_as_its_parameters_hold(method):
    for count in (MAX_SOURCES, MAX_SOURCES + 1):
        xs, weight = [array(2, 2, 9, 9)] * count, array(4, 2 * count, 3, 3)
        with contextlib.nullcontext() if count == MAX_SOURCES else pytest.raises(ValueError, match=f"{count} inputs"):
            cupyconv.explain(cupyconv.conv, xs, weight, method=method, on="sm_90")


@pytest.mark.parametrize("limit", [None, 20_000_000])
@pytest.mark.parametrize("channels", [(32, 48), (2, 3)])
def test_spectra_of_several_inputs_are_multiplied_each_at_its_place(channels, limit):
    """This holds in chunks or at once; later chunks of a weight gradient add to the sums of the first."""
    xs = [array(16, count, 40, 40) for count in channels]
    weight, grad = array(64, sum(channels), 9, 9), array(16, 64, 32, 32)
    for function, arguments in ((cupyconv.conv, (xs, weight)), (cupyconv.conv_grad_weight, (grad, xs, 9))):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(function, *arguments, method="fft", on="sm_90")
        check(plan, limit)
        steps, chunks = each_step(plan.steps), chunks_of(plan)
        (transform, *_) = (step for step in steps if isinstance(step, Transform))
        calls = [step for step in steps if isinstance(step, GemmCall)]
        assert sum(call.batch for call in calls) in (0, 2 * chunks * prod(transform.frequencies))
        if function is cupyconv.conv_grad_weight:
            added = [call.beta for call in calls] or [
                dict(one.params)["adds"] for one in launches(plan, "spectra_gradient")
            ]
            assert added == [0, 0] + [1, 1] * (chunks - 1)
            (finish,) = launches(plan, "finish_weight_tiles")
            parts = {one.grid[2] for one in launches(plan, "spectra_gradient")} or {1}
            assert parts == {dict(finish.params)["parts"]}


@pytest.mark.parametrize("count", [1, 2, 3, 17, 40])
def test_gradients_of_epilogues_go_along_channels_where_these_are_neighbours(count):
    for order in ("C", "last"):
        x = array(4, count, 12, 12, order=order)
        usual = {"grad": x, "saved": None, "through": False, "sums": True, "spatial": 2, "activation": None}
        (launch,) = launches(holds(EPILOGUE_GRADIENT.checked(usual, "sm_90")), "epilogue_grad")[:1]
        given = {"grad": x, "x": x, "scale": array(count), "shift": None, "through": True, "sums": None}
        given |= {"spatial": 2, "activation": None}
        (back,) = launches(holds(PROLOGUE_GRADIENT.checked(given, "sm_90")), "prologue_grad")[:1]
        for one in (launch, back):
            assert (dict(one.params)["lanes"] > 1) == (order == "last" and count > 1)


def test_every_place_of_a_step_moves_with_its_buffer():
    x, weight = array(2, 8, 20, 20), array(8, 8, 9, 9)
    for method in ("gemm", "fft", "implicit_gemm"):
        steps = each_step(cupyconv.explain(cupyconv.conv, x, weight, method=method, on="sm_90").steps)
        for step in steps:
            also = (
                (LaunchLoop((step,), 3, "step"), Rounds((step,), (step,), 3)) if isinstance(step, KernelLaunch) else ()
            )
            for one in (step, *also):
                before = list(addresses(one))
                moved = relocated(relocated(one, {at.buffer: Address(at.buffer, 512) for at in before}), {})
                assert list(addresses(moved)) == [Address(at.buffer, at.offset + 512) for at in before]
    twice = Address("x", 256)
    assert relocated(twice, {"x": Address("workspace", 512)}) == Address("workspace", 768)


def test_a_prologue_begins_with_the_channel_that_a_table_of_inputs_does():
    xs, scale = [array(2, 2, 9, 9)] * (MAX_SOURCES + 1), array(2 * MAX_SOURCES + 2)
    weight = array(4, 2 * MAX_SOURCES + 2, 3, 3)
    plan = cupyconv.explain(cupyconv.conv, xs, weight, prologue=(scale, None, "relu"), method="gemm", on="sm_90")
    columns = [launch for launch in launches(plan, "im2col") if launch.purpose.startswith("columns")]
    assert [dict(launch.params)["prologue"][0].offset for launch in columns] == [0, 2 * MAX_SOURCES * 4]


@pytest.mark.parametrize(
    ("kernel", "mode", "searches"),
    [((3, 3), "constant", 0), ((3, 3), "reflect", 1), ((3, 33), "constant", 1), ((3, 33), "reflect", 1)],
)
def test_taps_of_a_window_are_bits_where_it_is_padded_with_zeros(kernel, mode, searches):
    """Each axis has its own bits, 31 at most."""
    x, weight = array(2, 8, 40, 40), array(8, 8, *kernel)
    settings = {"padding": 1, "padding_mode": mode, "method": "implicit_gemm"}
    (launch,) = launches(cupyconv.explain(cupyconv.conv, x, weight, **settings, on="sm_90"), "implicit_gemm")
    assert dict(launch.params)["steps"][-1] == searches


def test_an_implicit_gemm_with_a_prologue_gathers_channels_last_inputs_by_elements():
    x, weight = array(2, 8, 12, 12, order="last"), array(8, 8, 3, 3)
    given = {"prologue": (array(8), None, "relu"), "method": "implicit_gemm"}
    plan = holds(checked_call(cupyconv.conv, x, weight, **given, on="sm_90"))
    moved = any(launch.kernel.name == "channels_last" for launch in plan.steps)
    assert moved or any("with a prologue: gathered element by element" in note for note in plan.notes)


@pytest.mark.parametrize("batch", [1, 2])
def test_groups_of_one_sample_are_one_call(batch):
    """With several samples, each group is one call.  A transposed weight is multiplied in place."""
    x, weight = array(batch, 8, 8, 8), np.moveaxis(array(4, 8, 1, 1), 0, 1)
    plan = holds(checked_call(cupyconv.conv, x, weight, groups=2, method="gemm", on="sm_90"))
    assert not plan.workspace and [call.batch for call in gemms(plan)] == [2] * batch


def test_a_merge_is_of_one_group_and_of_pixels_that_are_neighbours():
    """Pixels of the inputs and of the result are contiguous; a residual may have any strides."""

    def kernel(order: str = "C", groups: int = 1, out: str = "C", residual: str = "C") -> str:
        x, weight = array(2, 8, 8, 8, order=order), array(8, 8 // groups, 1, 1)
        places = {"C": np.zeros((2, 8, 8, 8), np.float32), "gaps": np.zeros((2, 8, 8, 16), np.float32)[..., ::2]}
        places["last"] = np.moveaxis(places["C"], 3, 1)
        images = {"out": places[out], "residual": array(2, 8, 8, 8, order=residual)}
        given: dict[str, Any] = images | {"groups": groups, "method": "direct", "on": "sm_90"}
        return launches(cupyconv.explain(cupyconv.conv, x, weight, **given))[0].kernel.name

    assert kernel() == kernel(residual="last") == "merge"
    assert "merge" not in (kernel(groups=2), kernel("last"), kernel("gaps"), kernel(out="last"), kernel(out="gaps"))


def test_a_row_that_ends_before_a_boundary_is_not_written_beyond_its_end():
    x, weight, bias = array(2, 8, 13), array(8, 8, 1), array(8)
    out = np.zeros((2, 8, 16), np.float32)[..., :13]
    check(cupyconv.explain(cupyconv.conv, x, weight, bias, activation="tanh", method="gemm", out=out, on="sm_90"))


def test_a_weight_is_conjugated_on_the_way_back():
    grad, weight = (array(*shape, dtype="complex64") for shape in ((2, 8, 9, 9), (8, 8, 3, 3)))
    plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, (2, 8, 11, 11), method="implicit_gemm", on="sm_90")
    (pack,) = launches(plan, "pack_weight")
    assert pack.purpose.endswith("conjugated") and dict(pack.params)["packed_as"] == 3


def test_parts_of_complex_numbers_are_gathered_each_from_where_it_is():
    """For products with real numbers: an imaginary part follows its real part, so strides count two per number."""
    grad, x = array(2, 8, 14, 13), array(2, 5, 14, 13, dtype="complex64")
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, method="gemm", on="sm_90")
    read = [dict(launch.params)["sources"][0][0][0] for launch in launches(plan, "im2col")]
    read = [(at.offset, strides) for at, _, _, strides in read if at.buffer == "x"]
    assert read == [(offset, (0, 26, 2)) for offset in (0, 4)]


#: Quantities that implicit_gemm.cu counts in few bits: smallest size that exceeds these, words of the refusal, arrays.
COUNTED_IN_BITS: dict[str, tuple[int, str, Any]] = {
    "a channel's stride": (1 << 14, "int32", lambda n: (array(1, 2, 1 << 14, n), array(4, 2, 1, 1), {})),
    "a tap's stride": (1 << 14, "int32", lambda n: (array(1, 1, 16385, 1 << 14), array(4, 1, 2, 1), {"dilation": (n, 1)})),
    "K": (1 << 20, "int32", lambda n: (array(1, n, 16, 16), array(1, n, 16, 16), {})),
    "a slab of the weight": (1 << 22, "int32", lambda n: (array(1, 1, 4, 4), array(n, 1, 1, 1), {})),
    "indices of a pixel": (
        1025, "the kernel's 32 bits", lambda n: (array(1, 2, 1025, 1025, n, order="last"), array(4, 2, 1, 1, 1), {})
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED_IN_BITS)
def test_an_implicit_gemm_is_of_sizes_that_its_kernel_counts(name):
    beyond, words, of_size = COUNTED_IN_BITS[name]
    for size in (beyond - 1, beyond):
        x, weight, settings = of_size(size)
        with contextlib.ExitStack() as stack:
            stack.enter_context(cupyconv.options(workspace_limit=1 << 40))
            if size == beyond:
                stack.enter_context(pytest.raises(ValueError, match=words))
            cupyconv.explain(cupyconv.conv, x, weight, **settings, method="implicit_gemm", on="sm_90")


def test_samples_and_one_tap_are_as_far_apart_as_they_like():
    """Offsets of samples have 64 bits, and with a single tap no address is a dilated tap's stride away."""
    for x, dilation in ((array(2, 1, 1 << 14, 1 << 14), 1), (array(1, 1, 16385, 1 << 14), 1 << 14)):
        hold(
            cupyconv.explain(
                cupyconv.conv, x, array(4, 1, 1, 1), dilation=dilation, method="implicit_gemm", on="sm_90"
            ),
            None,
        )


@pytest.mark.parametrize("step", [32, 33, 36, 40, 44, 48, (1 << 24) - 8, 1 << 24])
def test_rows_of_a_weight_that_begin_on_boundaries_are_slabs_as_they_lie(step):
    """Boundaries are 16 bytes, or eight numbers, and rows are no further apart than int32 counts."""
    x, one = array(2, 32, 8, 8, dtype="float16", order="last"), array(1, dtype="float16")
    weight = np.lib.stride_tricks.as_strided(one, (16, 32, 1, 1), (2 * step, 2, 2, 2))
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90")
    assert bool(launches(plan, "pack_weight")) == (step % 8 > 0 or step == 1 << 24)


def test_sums_are_kept_where_that_is_less_and_there_is_room():
    """In 16 bits, with one addend and bounds, a pass over sums costs less than one before the product and one after."""
    x, weight, bias = (array(*each, dtype="float16") for each in ((8, 64, 28, 28), (64, 64, 1, 1), (64,)))
    for limit, purposes in ((None, ["products", "bias, relu"]), (0, ["bias", "products", "relu"])):
        with cupyconv.options(workspace_limit=limit):
            given = {"activation": "relu", "method": "gemm", "on": "sm_90"}
            plan = cupyconv.explain(cupyconv.conv, x, weight, bias, **given)
        hold(plan, None, limit)
        assert [step.purpose for step in plan.steps] == purposes


def test_a_weight_in_order_is_copied_within_the_limit_alone():
    """It is the only workspace if images are multiplied in place."""
    x, weight = array(1, 64, 8, 8), array(64, 64, 1, 1, order="gaps")
    for limit in (16384, 16383):
        with contextlib.ExitStack() as stack:
            stack.enter_context(cupyconv.options(workspace_limit=limit))
            if limit < 16384:
                stack.enter_context(pytest.raises(ValueError, match="needs 16,384 bytes"))
            plan = cupyconv.explain(cupyconv.conv, x, weight, method="gemm", on="sm_90")
            assert [buffer.nbytes for buffer in plan.workspace] == [16384]


def test_a_draft_that_takes_the_limit_is_within_it():
    """A draft that exceeds the limit is made again with less memory, until it fits."""
    asked: list[int] = []

    def draft_of(room: int) -> Draft:
        asked.append(room)
        return Draft("", (), (Buffer("one", room), Buffer("other", 512 * (room > 512))))

    assert within(1024, lambda room: Draft("", (), (Buffer("one", room),))).workspace[0].nbytes == 1024
    assert [buffer.nbytes for buffer in within(1024, draft_of).workspace] == [512, 0] and asked == [1024, 512]


@pytest.mark.parametrize(
    ("dtypes", "converted"),
    [
        (("float32", "float32", "float32"), []),
        (("float32", "float64", "float64"), ["x"]),
        (("float64", "float32", "float32"), ["weight[0]", "weight[1]"]),
        (("float16", "float32", "float16"), ["x", "weight[1]"]),
        (("float16", "float32", "float64"), ["x"]),  # the intermediate image is widened in workspace
    ],
)
def test_a_chain_converts_its_arguments_alone(dtypes, converted):
    x, *weights = array(2, 4, 10, 10, dtype=dtypes[0]), *(array(4, 4, 3, 3, dtype=dtype) for dtype in dtypes[1:])
    plan = cupyconv.explain(cupyconv.conv_chain, x, [cupyconv.ConvLayer(each) for each in weights], on="sm_90")
    check(plan)
    assert [each.buffer for each in plan.conversions] == converted


@pytest.mark.parametrize("channels", [(4, 4, 0, 4), (4, 0, 4, 4)])
def test_nothing_is_widened_for_a_layer_that_reads_or_writes_nothing(channels):
    """Empty images between float32 and float64 layers are not widened."""
    dtypes = "float32", "float64", "float64"
    weights = [array(n, of, 3, 3, dtype=dtype) for of, n, dtype in zip(channels, [*channels[1:], 4], dtypes)]
    layers = [cupyconv.ConvLayer(each) for each in weights]
    plan = cupyconv.explain(cupyconv.conv_chain, array(2, 4, 10, 10), layers, on="sm_90")
    check(plan)
    assert not any("->" in step.purpose for step in plan.steps) and len(plan.steps) == 2


def large_calls(dtype: str, order: str) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield calls with 64 samples of 64 channels: tens of megabytes."""
    x, small = (array(64, 64, size, size, dtype=dtype, order=order) for size in (56, 28))
    dense, depthwise, bias = (array(64, *each, dtype=dtype) for each in ((64, 3, 3), (1, 3, 3), ()))
    for weight, groups in ((dense, 1), (depthwise, 64)):
        yield cupyconv.conv, (x, weight, bias), {"padding": 1, "groups": groups, "activation": "gelu"}
        yield cupyconv.conv_transpose, (small, weight), {"stride": 2, "groups": groups}
        yield cupyconv.conv_grad_weight, (x, x, 3), {"padding": 1, "groups": groups}
    yield cupyconv.conv, ([x, x], array(64, 128, 1, 1, dtype=dtype)), {}


@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("channels", [2, 16, 17, 40])
def test_neighbouring_threads_have_neighbouring_channels(channels, order):
    """As many channels as there are, up to a warp; for columns, up to four squares."""
    x, small = (array(4, channels, size, size, order=order) for size in (24, 12))
    each, all_of_them = array(channels, 1, 3, 3), array(8, channels, 3, 3)
    calls: dict[str, Any] = {
        "depthwise": (cupyconv.conv, (x, each), {"padding": 1, "groups": channels}),
        "depthwise_transposed": (cupyconv.conv_transpose, (small, each), {"stride": 2, "groups": channels}),
        "depthwise_weight_gradient": (cupyconv.conv_grad_weight, (x, x, 3), {"padding": 1, "groups": channels}),
        "im2col": (cupyconv.conv, (x, all_of_them), {"padding": 1}),
    }
    for name, (function, arguments, settings) in calls.items():
        method = "gemm" if name == "im2col" else "direct"
        plan = holds(checked_call(function, *arguments, **settings, method=method, on="sm_90"))
        (launch,) = launches(plan, name)
        few = name == "im2col" and channels == 2
        assert (dict(launch.params)["channel_lanes"] > 1) == (order == "last" and not few), name


@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_problems_leave_no_multiprocessor_idle(dtype, order):
    """Adjacent threads read adjacent elements in memory, whether these are pixels or channels."""
    x = array(64, 64, 56, 56, dtype=dtype, order=order)
    plans = []
    for function, arguments, settings in large_calls(dtype, order):
        for method in ("direct", "gemm", "implicit_gemm", "fft"):
            with contextlib.suppress(ValueError):
                plans.append(cupyconv.explain(function, *arguments, **settings, method=method, on="sm_90"))
    plans += [cupyconv.explain(function, x, 3, on="sm_90") for function in (cupyconv.im2col, cupyconv.max_pool)]
    usual = {"grad": x, "through": True, "sums": True, "spatial": 2, "activation": None}
    plans.append(EPILOGUE_GRADIENT.checked(usual | {"saved": None, "through": False}, "sm_90").plan())
    given = {"x": x, "scale": array(64, dtype="float32"), "shift": None, "sums": None}
    plans.append(PROLOGUE_GRADIENT.checked(usual | given, "sm_90").plan())
    every = [launch for plan in plans for launch in launches(plan)]
    for launch in every:
        params = dict(launch.params)
        if launch.bytes_moved > 10_000_000:
            assert launch.blocks >= known_gpu("sm_90").multiprocessors, launch
            assert launch.bytes_moved > launch.blocks * launch.block, launch
        if launch.kernel.name in ("tiles", "finish_tiles") and "weight" not in launch.purpose:
            lanes = params.get("channel_lanes", params.get("output_lanes"))
            assert (lanes == 32) == (order == "last" and params["stride_u"] == 64), launch
        elif launch.kernel.name in LANES:
            assert (params[LANES[launch.kernel.name]] > 1) == (order == "last"), launch
    asked = {launch.kernel.name for launch in every}
    assert asked >= {*LANES, "tiles", "spectra", "implicit_weight_gradient", "transposed"}


def test_parts_of_a_sum_are_as_many_as_there_is_room_for():
    """A depthwise weight gradient has three parts of 9 x 64 float32; in float16, whose sums are wider, at least one."""
    for dtype, room, parts in (("float32", 3, 3), ("float32", 1, 1), ("float16", 2, 2), ("float16", 1, 1)):
        grad = array(64, 64, 56, 56, dtype=dtype)
        with cupyconv.options(workspace_limit=room * 9 * 64 * 4 // 256 * 256 + 256 * (room * 9 * 64 * 4 % 256 > 0)):
            plan = cupyconv.explain(
                cupyconv.conv_grad_weight, grad, grad, 3, padding=1, groups=64, method="direct", on="sm_90"
            )
        (launch,) = launches(plan, "depthwise_weight_gradient")
        in_place = parts == 1 and dtype == "float32"
        assert launch.grid[0] == parts and len(plan.steps) == 2 - in_place
        assert ("in parts" in launch.purpose) == (parts > 1)
        assert sum(buffer.nbytes for buffer in plan.workspace) == (0 if in_place else parts * 9 * 64 * 4)


@pytest.mark.parametrize(
    ("dtype", "channels", "groups", "words"),
    [
        ("float32", 6, 1, None), ("float32", 6, 2, "channels of a group are not a multiple of 4"), ("float32", 8, 2, None),
        ("float16", 8, 2, "channels of a group are not a multiple of 8"), ("float16", 16, 2, None),
        ("float64", 8, 1, "a 16-byte chunk has fewer than four elements"), ("float32", 300, 1, None),
        ("float32", 4, 1, None), ("float32", 12, 1, None),
    ],
)  # fmt: skip
def test_images_are_moved_where_channels_are_then_read_in_chunks(dtype, channels, groups, words):
    x, weight = array(1, channels, 12, 12, dtype=dtype), array(groups, channels // groups, 3, 3, dtype=dtype)
    problem: Any = checked_call(cupyconv.conv, x, weight, groups=groups, on="sm_90").problem
    if words is not None:
        with pytest.raises(NotApplicable, match=words):
            channels_last(problem)
        return
    moved, item = channels_last(problem), np.dtype(dtype).itemsize
    lanes_have_channels(moved.launch)
    padded = -(-channels * item // 16) * 16
    assert moved.problem.xs[0].nbytes == 144 * channels * item and moved.buffer.nbytes == 144 * padded
    (image,) = moved.problem.xs
    assert [step * item for step in image.strides[1:]] == [item, 144 * padded, 12 * padded, padded]
    assert image.stride_n * item == moved.buffer.nbytes and moved.problem.geometry.channels == (channels,)


def test_images_are_moved_within_the_limit_alone():
    problem: Any = checked_call(cupyconv.conv, array(1, 8, 16, 16), array(8, 8, 3, 3), on="sm_90").problem
    for limit in (8193, 8192):
        with contextlib.ExitStack() as stack:
            if limit == 8192:  # with nothing left for the weight
                stack.enter_context(pytest.raises(NotApplicable, match="copy of the inputs needs 8,192 bytes"))
            channels_last(replace(problem, workspace_limit=limit))


@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("method", ["direct", "gemm", "implicit_gemm"])
def test_sums_of_few_weights_are_in_parts_for_all_multiprocessors(method, order):
    """They are less than a tile: without parts, one multiprocessor would compute everything."""
    grad, x = (array(64, channels, 112, 112, order=order) for channels in (8, 3))
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, method=method, on="sm_90")
    hold(plan, None)
    parts = [prod(launch.grid) for launch in launches(plan) if launch.kernel.name in PARTS]
    parts += [sum(step.batch for step in each_step(plan.steps) if isinstance(step, GemmCall))] * (method == "gemm")
    assert parts and min(parts) >= known_gpu("sm_90").multiprocessors


@pytest.mark.parametrize("axis", [None, 0, 2, 3, 4])
def test_channels_of_a_pixel_are_vectors_where_every_pixel_begins_on_a_boundary(axis):
    """Every sample, plane, row and pixel must begin on a boundary."""
    x = array(2, 16, 4, 6, 8, dtype="float16", order="last")
    strides = [step + x.itemsize * (i == axis) for i, step in enumerate(x.strides)]
    x = np.lib.stride_tricks.as_strided(x, x.shape, strides)
    weight = array(16, 16, 1, 1, 1, dtype="float16")
    layers = [cupyconv.ConvLayer(weight)] * 2
    (pair,) = launches(cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True, on="sm_90"), "conv_pair")
    assert dict(pair.params)["x_vectorized"] == (axis is None)
    weight = array(16, 16, 3, 3, 3, dtype="float16")
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90")
    (launch,) = launches(plan, "implicit_gemm")
    in_place = dict(launch.kernel.macros)["GATHER"] == "ALONG_CHANNELS" and not launches(plan, "channels_last")
    assert in_place == (axis is None)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("lies", ["whole", "off its boundary", "odd"])
class TestVectors:
    """Data in whole aligned vectors is moved in vectors; unaligned data, or rows of other lengths, are not."""

    def image(self, dtype: str, order: str, lies: str) -> Any:
        channels, size = (33, 15) if lies == "odd" else (32, 16)
        return array(4, channels, size, size, dtype=dtype, order=order, offset=int(lies == "off its boundary"))

    def words(self, plan: Plan, kernel: str) -> dict[str, Any]:
        """Return the parameters and macros of the kernel's first launch."""
        launch = launches(plan, kernel)[0]
        return dict(launch.params) | dict(launch.kernel.macros)

    def test_of_passes(self, dtype, order, lies):
        x, is_whole = self.image(dtype, order, lies), lies == "whole"
        width = str(16 // x.itemsize if is_whole else 1)
        given = {"grad": x, "spatial": 2, "activation": None}
        sums = EPILOGUE_GRADIENT.checked(given | {"saved": None, "through": False, "sums": True}, "sm_90").plan()
        made = self.words(sums, "epilogue_grad")
        assert made["WIDTH"] == width and made["ALONG_CHANNELS"] == str(int(order == "last" and is_whole))
        if order == "C":
            given |= {"x": x, "shift": None, "sums": None, "through": True}
            scale = array(x.shape[1], dtype="float32" if dtype == "float16" else dtype)
            plan = PROLOGUE_GRADIENT.checked(given | {"scale": scale}, "sm_90").plan()
            assert self.words(plan, "prologue_grad")["WIDTH"] == width

    def test_of_one_channel(self, dtype, order, lies):
        """Whatever the stride of the channel, its pixels are contiguous."""
        size, is_whole = 15 if lies == "odd" else 16, lies != "odd"
        one = array(4, 1, size, size, dtype=dtype, order=order)
        scale = array(1, dtype="float32" if dtype == "float16" else dtype)
        usual = {"grad": one, "spatial": 2, "activation": None}
        sums = EPILOGUE_GRADIENT.checked(usual | {"saved": None, "through": False, "sums": True}, "sm_90").plan()
        given = {"x": one, "scale": scale, "shift": None, "sums": None, "through": True}
        back = PROLOGUE_GRADIENT.checked(usual | given, "sm_90").plan()
        for plan, kernel in ((sums, "epilogue_grad"), (back, "prologue_grad")):
            made = self.words(plan, kernel)
            assert made["WIDTH"] == str(16 // one.itemsize if is_whole else 1) and made["lanes"] == 1
        pooled = cupyconv.explain(cupyconv.max_pool, array(64, 64, 2, 2, dtype=dtype, order=order), 2, on="sm_90")
        assert (self.words(pooled, "pool")["lanes"] > 1) == (order == "last")

    def test_of_samples(self, dtype, order, lies):
        """The second of two samples may begin off a boundary."""
        x = self.image(dtype, order, "whole")[:2]
        strides = (x.strides[0] + x.itemsize, *x.strides[1:])
        residual = np.lib.stride_tricks.as_strided(x, x.shape, strides) if lies == "odd" else x
        weight = array(32, 32, 3, 3, dtype=dtype)
        plan = cupyconv.explain(
            cupyconv.conv, x, weight, residual=residual, activation="gelu", padding=1, method="gemm", on="sm_90"
        )
        assert self.words(plan, "epilogue")["residual_vectorized"] == (lies != "odd")
        if order == "C":
            weight = array(32, 32, 1, 1, dtype=dtype)
            merge = cupyconv.explain(cupyconv.conv, x, weight, residual=residual, method="direct", on="sm_90")
            assert self.words(merge, "merge")["VECTOR"] == ("1" if lies == "odd" else str(16 // x.itemsize))

    def test_of_epilogues(self, dtype, order, lies):
        """The result and the columns, which the call allocates, are aligned."""
        x, is_whole = self.image(dtype, order, lies), lies == "whole"
        channels = x.shape[1]
        bias = array(channels, dtype=dtype, offset=int(lies == "off its boundary"))
        settings = dict(bias=bias, residual=x, activation="gelu", padding=1, method="gemm")
        weight = array(channels, channels, 3, 3, dtype=dtype)
        plan = cupyconv.explain(cupyconv.conv, x, weight, **settings, on="sm_90")
        made = self.words(plan, "epilogue")
        assert made["along_channels"] == (order == "last")
        if lies == "odd":
            assert made["WIDTH"] == "1"
        else:
            assert made["WIDTH"] == str(16 // x.itemsize) and made["residual_vectorized"] == is_whole
            assert made["bias_vectorized"] == (is_whole and order == "last")
            assert self.words(plan, "im2col")["WIDTH"] == made["WIDTH"]

    def test_of_inputs(self, dtype, order, lies):
        x, is_whole = self.image(dtype, order, lies), lies == "whole"
        weight = array(x.shape[1], x.shape[1], 1, 1, dtype=dtype)
        layers = [cupyconv.ConvLayer(weight)] * 2
        pair = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True, on="sm_90")
        assert self.words(pair, "conv_pair")["x_vectorized"] == (is_whole and order == "last")
        if order == "C":
            both = array(x.shape[1], 2 * x.shape[1], 1, 1, dtype=dtype)
            merge = cupyconv.explain(cupyconv.conv, [x, x], both, method="direct", on="sm_90")
            assert self.words(merge, "merge")["VECTOR"] == str(16 // x.itemsize if is_whole else 1)
        plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90")
        made = self.words(plan, "implicit_gemm")
        if is_whole:
            assert made["GATHER"] == ("ALONG_CHANNELS" if order == "last" else "PIXEL_CHUNKS")
        elif made["ARITHMETIC"] != "FMA" and not launches(plan, "channels_last"):
            assert made["GATHER"] == "ALONG_PIXELS"
        back = cupyconv.explain(cupyconv.conv_grad_weight, x, x, 3, padding=1, method="implicit_gemm", on="sm_90")
        moved = [dict(launch.params)["vectorized"] for launch in launches(back, "channels_last")]
        assert moved == ([] if is_whole and order == "last" else [is_whole] * 2)


EXACT: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (cupyconv.conv, (array(4, 6, 30, 30), array(8, 6, 1, 1, order="gaps")), {}, "gemm"),
    (cupyconv.conv, (array(4, 8, 30, 30, dtype="float16"), array(8, 8, 3, 3, dtype="float16")), {"padding": 1}, "implicit_gemm"),
    (cupyconv.conv, (array(4, 6, 30, 30), array(8, 6, 9, 9)), {"padding": 4}, "fft"),
    (cupyconv.conv_transpose, (array(4, 6, 30, 30), array(6, 8, 3, 3)), {"stride": 2}, "gemm"),
    (cupyconv.conv_transpose, (array(4, 6, 30, 30), array(6, 4, 3, 3)), {"groups": 2}, "implicit_gemm"),
    (cupyconv.conv_grad_input, (array(4, 8, 30, 30), array(8, 6, 9, 9), (4, 6, 30, 30)), {"padding": 4, "padding_mode": "reflect"}, "fft"),
    (cupyconv.conv_grad_weight, (array(4, 8, 30, 30), array(4, 6, 30, 30), 3), {"padding": 1}, "gemm"),
    (cupyconv.conv_grad_weight, (array(4, 8, 30, 30), array(4, 6, 30, 30), 3), {"padding": 1}, "implicit_gemm"),
    (cupyconv.conv_grad_weight, (array(4, 8, 30, 30, dtype="float16"), array(4, 6, 30, 30, dtype="float16"), 3), {"padding": 1}, "direct"),
    (cupyconv.lstm, (array(1, 4, 6), array(32, 6), array(32, 8)), {}, "step"),
    (cupyconv.gru, (array(1, 4, 6), array(24, 6), array(24, 8)), {"linear_before_reset": False}, "step"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "settings", "method"), EXACT)
def test_a_plan_fits_into_exactly_what_it_takes(function, arguments, settings, method):
    """This holds for each possible size down to the smallest, below which the method is refused with its reason.

    Columns, and layers of several steps, reserve memory for alignment, whether it is needed or not.
    """

    def taken(limit: int | None) -> int:
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(function, *arguments, **settings, method=method, on="sm_90")
        return sum(buffer.space for buffer in plan.workspace if not buffer.of)

    size = taken(None)
    for _ in range(8):
        assert taken(size) <= size
        if not size:
            return
        try:
            size = taken(size - 1)
        except ValueError as refusal:
            assert "workspace" in str(refusal)
            return


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 512, 7, 7), (4, 1024, 15, 15)], ids=str)
def test_a_plan_is_the_same_within_what_it_takes(shape, dtype):
    """Sums may use all memory that moved images and packed weights leave: none is counted twice."""
    x, weight = array(*shape, dtype=dtype), array(8, shape[1], 3, 3, dtype=dtype)
    grad = array(shape[0], 8, *shape[2:], dtype=dtype)
    for function, arguments in ((cupyconv.conv, (x, weight)), (cupyconv.conv_grad_weight, (grad, x, 3))):
        whole = cupyconv.explain(function, *arguments, padding=1, method="implicit_gemm", on="sm_90")
        with cupyconv.options(workspace_limit=whole.workspace_bytes):
            again = cupyconv.explain(function, *arguments, padding=1, method="implicit_gemm", on="sm_90")
        assert again.steps == whole.steps
