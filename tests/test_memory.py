"""Memory is bounded: inputs are not concatenated, workspace stays under its limit, a failed allocation is retried."""

from __future__ import annotations

import contextlib
import gc
import re
import tracemalloc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peak_memory import peak_bytes
from strategies import share_of_examples
from test_any_call import FITTING
from test_any_call_on_cuda import all_arrays
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import _OPERATIONS, MIN_WORKSPACE, NEAR, _enough_workspace
from cupyconv.problem import caches

SHAPES = {
    "pointwise": ((4, 16, 40, 40), (8, 16, 1, 1), {}),
    "3x3": ((4, 16, 40, 40), (8, 16, 3, 3), {"padding": 1}),
    "depthwise": ((4, 16, 40, 40), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
    "long": ((2, 4, 20_000), (4, 4, 5), {"padding": "same"}),
}


@pytest.fixture
def device(cuda_target):
    """Return the host device, after garbage that may hold its memory has been collected."""
    gc.collect()
    return cuda_target.device


def used_beyond(device, call):
    """Return a call's peak memory in bytes, in addition to the memory allocated before it, and the call's result."""
    before = device.peak_bytes = device.allocated_bytes
    result = call()
    return device.peak_bytes - before, result


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("limit", [None, 1 << 20, 100_000])
def test_cuda_takes_what_explain_says(device, name, limit):
    x_shape, w_shape, settings = SHAPES[name]
    x, w = device.asarray(np.ones(x_shape, np.float32)), device.asarray(np.ones(w_shape, np.float32))
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, x, w, **settings)
        peak, y = used_beyond(device, lambda: cupyconv.conv(x, w, **settings))
    assert peak <= y.nbytes + plan.workspace_bytes
    assert limit is None or plan.workspace_bytes <= limit


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("parts", [1, 4])
def test_numpy_takes_what_explain_says(name, parts):
    x_shape, w_shape, settings = SHAPES[name]
    x, w = np.ones(x_shape, np.float32), np.ones(w_shape, np.float32)
    xs = list(np.split(x, parts, axis=1))
    out = cupyconv.conv(xs, w, **settings)
    plan = cupyconv.explain(cupyconv.conv, xs, w, **settings)
    peak = peak_bytes(lambda: cupyconv.conv(xs, w, **settings, out=out))
    python_objects = 200_000
    assert peak <= plan.workspace_bytes + python_objects
    assert plan.workspace_bytes <= 16 << 20


def test_merging_allocates_no_concatenation(device):
    """A merge of 3 MB of inputs fits a 2 MiB workspace limit, so it does not concatenate them."""
    xs = [device.asarray(np.full((2, 8, 96, 96), i, np.float32)) for i in range(5)]
    w = device.asarray(np.ones((2, 40, 3, 3), np.float32))
    out = device.empty((2, 2, 94, 94), np.float32)
    with cupyconv.options(workspace_limit=1 << 21):
        peak, _ = used_beyond(device, lambda: cupyconv.conv(xs, w, out=out))
    assert peak <= 1 << 21 < sum(x.nbytes for x in xs)
    assert (out == 9 * 8 * (0 + 1 + 2 + 3 + 4)).all()


def test_wide_pointwise_merge_reads_its_inputs_in_place(device):
    xs = [device.asarray(np.ones((2, 128, 16, 16), np.float32)) for _ in range(3)]
    w = device.asarray(np.ones((256, 384), np.float32))
    out = device.empty((2, 256, 16, 16), np.float32)
    device.log.clear()
    peak, _ = used_beyond(device, lambda: cupyconv.linmerge(xs, w, out=out, method="gemm"))
    assert peak == 0
    assert [record.batch for record in device.log] == [2, 2, 2]
    assert (out == 384).all()


def test_failed_allocation_is_retried_with_smaller_chunks(device):
    x, w = device.asarray(np.ones((8, 4, 64, 64), np.float32)), device.asarray(np.ones((4, 4, 3, 3), np.float32))
    out = device.empty((8, 4, 62, 62), np.float32)
    device.fail_allocations_over = 1_000_000
    try:
        cupyconv.conv(x, w, out=out, method="gemm")
        device.fail_allocations_over = 1_000
        with pytest.raises(MemoryError):
            cupyconv.conv(x, w, out=out, method="gemm")
    finally:
        device.fail_allocations_over = None
    assert (out == 36).all()


def test_a_loop_does_not_grow(device):
    x, w = device.asarray(np.ones((2, 3, 20, 20), np.float32)), device.asarray(np.ones((4, 3, 3, 3), np.float32))
    out = device.empty((2, 4, 18, 18), np.float32)
    cupyconv.conv(x, w, out=out)
    before = device.allocated_bytes
    for _ in range(10):
        cupyconv.conv(x, w, out=out)
    assert device.allocated_bytes == before


@pytest.fixture
def no_collector():
    cupyconv.clear_caches()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _gradients(x, weight, **how):
    y, pullback = cupyconv.vjp(cupyconv.conv, x, weight, **how)
    pullback(y)


#: Calls for which planning meets methods and implementations that do not apply, or that exceed the workspace limit.
PLANNED = {
    "gradients of many channels": (_gradients, (4, 376, 32, 32), (12, 376, 3, 3), {"padding": 1}),
    "strided gradients": (_gradients, (2, 16, 40, 40), (8, 16, 5, 5), {"stride": 2}),
    "bordered gradients": (_gradients, (2, 16, 40, 40), (8, 16, 5, 5), {"padding": 2, "padding_mode": "reflect"}),
    "large kernel": (cupyconv.conv, (1, 1, 200, 200), (1, 1, 31, 31), {}),
    "large kernel under a limit": (cupyconv.conv, (1, 8, 90, 90), (8, 8, 15, 15), {"workspace_limit": 1 << 18}),
    "long": (cupyconv.conv, (1, 4, 100_000), (4, 4, 7), {"padding": "same"}),
    "transposed": (cupyconv.conv_transpose, (2, 8, 30, 30), (8, 6, 4, 4), {"stride": 2}),
    "refused": (cupyconv.conv, (1, 8, 90, 90), (8, 8, 15, 15), {"method": "gemm", "workspace_limit": 100}),
}


@pytest.mark.parametrize("name", PLANNED)
def test_nothing_of_a_call_waits_for_the_collector(name, no_collector):
    """Planning keeps no error that it caught: an error references its frames, and these reference the call's arrays."""
    function, x_shape, weight_shape, how = PLANNED[name]
    x, weight = np.ones(x_shape, np.float32), np.ones(weight_shape, np.float32)
    how = dict(how)
    limit = how.pop("workspace_limit", 4 << 20)
    with cupyconv.options(workspace_limit=limit, threads=2), contextlib.suppress(ValueError):
        function(x, weight, **how)
    alive = weakref.ref(x), weakref.ref(weight)
    del x, weight
    assert [array() for array in alive] == [None, None]


def test_blocks_are_freed_when_a_call_returns(no_collector):
    """The memory of its blocks is in no cycle of references, on a Python without the GIL either."""
    xs = [np.ones((64, 8, 32, 32), np.float32) for _ in range(2)]

    def call():
        with cupyconv.options(threads=1):
            cupyconv.max_pool(xs, (2, 2))
            cupyconv.conv(xs, np.ones((4, 16, 3, 3), np.float32), method="gemm")

    call()
    tracemalloc.start()
    try:
        call()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            call()
        assert tracemalloc.get_traced_memory()[0] - before < PYTHON_OBJECTS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_launches_do_not_depend_on_the_batch(device, batch):
    x = device.asarray(np.ones((batch, 3, 10, 10), np.float32))
    w = device.asarray(np.ones((4, 3, 3, 3), np.float32))
    device.log.clear()
    cupyconv.conv(x, w, method="gemm", activation="relu")
    assert len(device.log) == 3  # columns, one GEMM, epilogue


def test_chunks_give_the_same_numbers(target):
    rng = np.random.default_rng(3)
    x = target.to_device(rng.integers(-3, 4, (5, 6, 33, 31)).astype(np.float32))
    w = target.to_device(rng.integers(-3, 4, (7, 6, 3, 3)).astype(np.float32))
    whole = target.to_host(cupyconv.conv(x, w, padding=2, dilation=2))
    for limit in (2_000_000, 400_000, 250_000):
        with cupyconv.options(workspace_limit=limit):
            chunked = cupyconv.conv(x, w, padding=2, dilation=2, method="gemm")
        assert_exact(target.to_host(chunked), whole.astype(np.float64), "float32")


# --- any call on NumPy -----------------------------------------------------------------------------------------

#: Arguments that have a sample axis.
OF_SAMPLES = ("x", "xs", "grad", "columns", "h", "c", "h0")
#: Target size of the largest of these arrays, in bytes: large compared with Python objects.
LARGE = 1 << 20
#: Bytes that no plan counts: frames, views, blocks, a thread that is started.
PYTHON_OBJECTS = 40_000
#: The same for a first call, which also examines and plans the call.
PLANNING = 60_000


def of_many_samples(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return a similar call with so many samples that its arrays are large."""
    axis = 1 if name in ("rnn", "lstm", "gru") else 0

    def repeated(value: Any) -> Any:
        return [*map(repeated, value)] if isinstance(value, list) else np.concatenate([value] * times, axis)

    case = {key: value for key, value in case.items() if key not in ("lengths", "residual")}
    given = {key: value for key, value in case.items() if key in OF_SAMPLES}
    times = LARGE // max(array.nbytes for array in all_arrays(list(given.values())))
    if "input_shape" in case:
        case["input_shape"] = (times * case["input_shape"][0], *case["input_shape"][1:])
    return case | {key: repeated(value) for key, value in given.items()}


def has_samples(name: str, case: dict[str, Any]) -> bool:
    """Return whether the call's images have a sample axis."""
    if name not in SPATIAL:
        return True
    shape = case["kernel_shape"] if "kernel_shape" in case else case["weight"].shape[2:]
    image = all_arrays(next(case[key] for key in ("x", "grad", "columns") if key in case))[0]
    return image.ndim == (3 if name == "col2im" else len(shape) + 2)


#: Operations that accept images without a sample axis.
SPATIAL = {"conv", "conv_transpose", "conv_grad_input", "conv_grad_weight", "im2col", "col2im", "max_pool", "avg_pool"}


@pytest.mark.parametrize("name", sorted(function.__name__ for function in _OPERATIONS))
@share_of_examples(0.02)
@given(st.randoms(use_true_random=False), st.sampled_from((None, 500_000, 200_000)), st.sampled_from((1, 2)))
def test_numpy_takes_what_explain_says_of_any_call(name, small_buffers, random, limit, threads):
    """A call's peak memory is its result, the plan's workspace and Python objects; a first call adds what it caches."""
    function, case = getattr(cupyconv, name), FITTING[name](random)
    assume(has_samples(name, case))
    case = of_many_samples(name, case)
    with cupyconv.options(workspace_limit=limit, threads=threads):
        result = function(**case)
        new = sum(array.nbytes for array in all_arrays(result))
        del result
        plan = cupyconv.explain(function, **case)
        cupyconv.clear_caches()
        before = caches.spent()
        first = peak_bytes(lambda: function(**case))
        stays = caches.spent() - before
        peak = peak_bytes(lambda: function(**case))
    assert peak <= new + plan.workspace_bytes + PYTHON_OBJECTS, (peak - new, str(plan))
    assert first <= new + plan.workspace_bytes + stays + PLANNING, (first - new, stays, str(plan))


@pytest.mark.parametrize("on", [None, "sm_90"])
@pytest.mark.parametrize("name", sorted(function.__name__ for function in _OPERATIONS))
@share_of_examples(0.3)
@given(st.randoms(use_true_random=False), st.sampled_from((0, 300, 3000)))
def test_the_limit_that_a_refusal_names_is_enough(name, on, random, limit):
    """The workspace limit that a refusal names is enough for the whole call, though methods know only their own use."""
    function, case = getattr(cupyconv, name), FITTING[name](random)

    def refusal_under(limit):
        with cupyconv.options(workspace_limit=limit):
            try:
                cupyconv.explain(function, **case, on=on)
            except ValueError as refusal:
                return str(refusal)
        return ""

    refusal = refusal_under(limit)
    if "a workspace_limit of" in refusal:
        enough = int(re.findall(r"a workspace_limit of ([\d,]+) bytes is enough", refusal)[0].replace(",", ""))
        assert limit < enough and not refusal_under(enough)
    else:
        assert not refusal or refusal_under(1 << 62)


@pytest.mark.parametrize("method", ["gemm", "direct", "winograd"])
@pytest.mark.parametrize("stride", [1, 2])
def test_of_several_ways_a_refusal_names_the_one_that_needs_least(method, stride):
    """A refusal names the implementation that needs the least memory, or it would contradict its own advice."""
    x, weight = np.ones((8, 64, 56, 56), np.float32), np.ones((64, 64, 3, 3), np.float32)
    settings = {"method": method, "padding": 1, "stride": 1 if method == "winograd" else stride}
    with (
        cupyconv.options(workspace_limit=10),
        pytest.raises(ValueError, match=r"block needs .* is enough for the whole call$") as refused,
    ):
        cupyconv.explain(cupyconv.conv, x, weight, **settings)
    needed, limit, enough = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", str(refused.value)))
    assert limit == 10 and needed <= enough < 2 * needed


def test_a_plan_says_where_it_passes_the_limit():
    """A note says that workspace exceeds the limit, as with a copied weight; a cached form alone causes no note."""
    x, weight = np.ones((2, 16, 20, 20)), np.ones((32, 16, 7, 7))[::-1]

    def planned(limit, on=None, function=cupyconv.conv, second=weight):
        with cupyconv.options(workspace_limit=limit):
            return cupyconv.explain(function, x, second, on=on)

    plan = planned(20_000)
    needed = sum(buffer.nbytes for buffer in plan.workspace)
    assert needed > weight.nbytes
    assert plan.notes == (
        f"{needed:,} bytes of workspace exceed the limit of 20,000: this method cannot run with less",
    )
    assert not planned(1 << 24).notes
    half = planned(20_000, on="sm_90", second=weight.astype(np.float32))  # converted to the dtype of `x`
    needed = half.workspace_bytes
    assert f"{needed:,} bytes of workspace exceed the limit of 20,000" in " ".join(half.notes)
    layers = [cupyconv.ConvLayer(weight.astype(np.float32)).packed()]
    x = x.astype(np.float32)
    kept = planned(20_000, on="sm_90", function=cupyconv.conv_chain, second=layers)
    assert any(buffer.of for buffer in kept.workspace) and kept.workspace_bytes > 20_000
    assert not any("exceed the limit" in note for note in kept.notes)


@pytest.mark.parametrize("limit", [0, 1, 63, 64, 5000])
def test_the_limit_that_a_refusal_names_is_near_the_least(limit):
    problem = checked_call(cupyconv.conv, np.ones((1, 1, 4)), np.ones((1, 1, 3))).problem

    def plan(problem):
        if problem.limit < least:
            raise ValueError

    for least in (limit + 1, limit + 2, 2 * limit + 7, 1_000_003, 1 << 40):
        enough = _enough_workspace(plan, replace(problem, workspace_limit=limit))
        assert least <= enough <= NEAR * max(MIN_WORKSPACE, least)
    least = 1 << 63
    assert _enough_workspace(plan, replace(problem, workspace_limit=limit)) is None


def test_a_lone_product_has_room_for_what_its_border_is_gathered_with():
    x, weight = np.ones((1, 1, 1, 300), np.float32), np.ones((1, 1, 3, 2), np.float32)
    settings = dict(padding=((1, 5), (0, 130)), padding_mode="edge", dilation=(2, 1), method="gemm")
    with cupyconv.options(workspace_limit=60_000, threads=2):
        plan = cupyconv.explain(cupyconv.conv, x, weight, np.ones(1, np.float32), **settings)
    assert plan.workspace_bytes <= 60_000


#: A weight that is not in C order.  Calls copy it, in addition to a small workspace limit.
COPIED = np.ones((3, 3, 64, 96), np.float32).transpose(3, 2, 0, 1)


@pytest.mark.parametrize(
    "function, arguments",
    [
        *((cupyconv.conv, dict(weight=COPIED, method=method)) for method in ("gemm", "winograd", "fft")),
        *((cupyconv.conv_transpose, dict(weight=COPIED.swapaxes(0, 1), method=method)) for method in ("gemm", "fft")),
        (cupyconv.lstm, dict(weight_ih=COPIED[0].reshape(64, 9).T[:8], weight_hh=np.ones((2, 8), np.float32).T)),
    ],
)
def test_a_refusal_names_the_limit_that_was_set(function, arguments):
    """A refusal names the limit that the user set, not the limit with the copy of a large weight added."""
    x = np.ones((5, 1, 64) if function is cupyconv.lstm else (1, 64, 20, 20), np.float32)
    with cupyconv.options(workspace_limit=10, threads=1), pytest.raises(ValueError) as refused:
        function(x, **arguments)
    limits = re.findall(r"(?:the limit is|the workspace limit of) ([\d,]+)", str(refused.value))
    assert limits == ["10"]
