"""Depthwise convolutions and one-channel filters on NumPy: Toeplitz matrices, and which implementation is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import ceil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import (
    backend,
    depthwise,
    group_products,
    strips,
    toeplitz_rows,
    toeplitz_runs,
    weight_gradient,
    weight_runs,
)
from cupyconv.numpy.choice import Method
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.toeplitz_rows import ToeplitzRows
from cupyconv.numpy.toeplitz_runs import ToeplitzRuns
from cupyconv.problem.problems import HostModel
from tests import reference, reference_gradients
from tests.peak_memory import peak_bytes
from tests.plans import array

METHODS = ("gemm", "direct")


@st.composite
def depthwise_calls(draw):
    """Draw the arguments of a depthwise convolution of integers: (x, weight, settings)."""
    rank = draw(st.integers(1, 3))
    longest = {1: (200, 40), 2: (40, 8), 3: (9, 4)}[rank]
    size = draw(st.tuples(*[st.integers(1, longest[0])] * rank))
    kernel = draw(st.tuples(*[st.integers(1, longest[1])] * rank))
    stride, dilation = (draw(st.tuples(*[st.sampled_from((1, 1, 2, 3))] * rank)) for _ in range(2))
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    padding = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3)) + max(0, s - n)) for s, n in zip(spans, size))
    channels, outputs, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    dtype = draw(st.sampled_from(("float32", "float64")))
    x = rng.integers(-4, 5, (batch, channels, *size)).astype(dtype)
    weight = rng.integers(-4, 5, (channels * outputs, 1, *kernel)).astype(dtype)
    mode = draw(st.sampled_from(("constant", "edge", "wrap")))
    return x, weight, dict(stride=stride, dilation=dilation, padding=padding, padding_mode=mode, groups=channels)


def by_windows(x, weight, *, stride, dilation, padding, padding_mode, groups):
    """Compute the definition window by window: no element outside a window is multiplied."""
    padded = np.pad(x, ((0, 0), (0, 0), *padding), mode=padding_mode)
    kernel, taps = weight.shape[2:], list(itertools.product(*map(range, weight.shape[2:])))
    size = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], kernel, stride, dilation)]
    outputs = len(weight) // groups
    result = np.zeros((len(x), len(weight), *size), x.dtype)
    with np.errstate(invalid="ignore"):
        for tap in taps:
            window = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilation, size, stride))
            scale = weight[(slice(None), 0, *tap)].reshape(-1, *[1] * len(kernel))
            result += np.repeat(padded[(..., *window)], outputs, axis=1) * scale
    return result


@pytest.mark.parametrize("method", METHODS)
@given(
    call=depthwise_calls(),
    threads=st.integers(1, 2),
    limit=st.sampled_from((None, 60_000)),
    channels_last=st.booleans(),
)
def test_integers_are_exact(method, call, threads, limit, channels_last):
    x, weight, settings = call
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    with cupyconv.options(threads=threads, workspace_limit=limit):
        try:
            result = cupyconv.conv(x, weight, method=method, **settings)
        except ValueError as refusal:
            assert limit is not None and "the limit is" in str(refusal)
            return
    assert np.array_equal(result, by_windows(x, weight, **settings))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["x", "weight"])
@given(
    call=depthwise_calls(),
    value=st.sampled_from((np.inf, -np.inf, np.nan)),
    seed=st.integers(0, 1 << 16),
    alone=st.sampled_from((1, 50, group_products.PIXELS_ALONE)),
)
def test_infinities_and_nan_reach_the_outputs_whose_windows_have_them(method, where, call, value, seed, alone):
    """Zeros of a Toeplitz matrix would spread them to neighbours: such windows are summed alone, a few at a time."""
    x, weight, settings = call
    spoilt = {"x": x, "weight": weight}[where]
    spoilt.flat[seed % spoilt.size] = value
    with mock.patch.object(group_products, "PIXELS_ALONE", alone):
        forget_calls()
        result = cupyconv.conv(x, weight, method=method, **settings)
        forget_calls()
    np.testing.assert_array_equal(result, by_windows(x, weight, **settings))


@pytest.mark.parametrize("value", [0, np.nan])
@pytest.mark.parametrize("kernel, padding", [((1, 9), (0, 4)), ((1, 9), (0, 0)), ((9, 1), (0, 0)), ((3, 3), (1, 1))])
def test_one_nan_takes_no_more_memory(kernel, padding, value):
    """One NaN needs no more memory; it once needed a copy of all that a block reads, 26 MB instead of 248 kB."""
    x, weight = np.ones((1, 64, 90, 1000), np.float32), np.ones((64, 1, *kernel), np.float32)
    x[0, 30, 40, 500] = value
    settings = dict(padding=padding, groups=64, method="gemm")
    with cupyconv.options(workspace_limit=1 << 20):
        out = cupyconv.conv(x, weight, **settings)
        plan, python_objects = cupyconv.explain(cupyconv.conv, x, weight, out=out, **settings), 200_000
        assert type(plan.steps[0]) in (ToeplitzRows, ToeplitzRuns)
        assert (
            peak_bytes(lambda: cupyconv.conv(x, weight, out=out, **settings)) <= plan.workspace_bytes + python_objects
        )


@st.composite
def row_calls(draw):
    """Draw such arguments along rows only, with few or many channels, and windows that reach beyond a row's ends."""
    rows, size, taps = draw(st.sampled_from((1, 1, 2, 19))), draw(st.integers(1, 300)), draw(st.integers(2, 40))
    stride, dilation = draw(st.sampled_from((1, 1, 2, 7))), draw(st.sampled_from((1, 1, 3)))
    before, behind = (draw(st.sampled_from((0, 1, 5, 130))) for _ in range(2))
    behind += max(0, dilation * (taps - 1) + 1 - size)
    channels, outputs = draw(st.sampled_from((1, 2, 20))), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    x = rng.integers(-4, 5, (2, channels, rows, size)).astype(np.float32)
    x = draw(st.sampled_from((x, x.transpose(2, 3, 0, 1).copy().transpose(2, 3, 0, 1), x.repeat(2, axis=2)[:, :, ::2])))
    weight = rng.integers(-4, 5, (channels * outputs, 1, 1, taps)).astype(np.float32)
    settings = dict(stride=(rows % 3 + 1, stride), dilation=(1, dilation), padding=((0, 0), (before, behind)))
    return x, weight, dict(settings, padding_mode="constant", groups=channels)


@given(
    call=row_calls(),
    value=st.sampled_from((0, np.inf, np.nan)),
    threads=st.integers(1, 2),
    limit=st.sampled_from((None, 60_000)),
)
def test_rows_are_read_where_they_lie_but_for_their_ends(call, value, threads, limit):
    x, weight, settings = call
    x.flat[x.size // 2] = value
    with (
        mock.patch.object(toeplitz_runs, "LONG_ROW", 1),
        mock.patch.dict(depthwise.DEPTHWISE, gemm=Method((ToeplitzRuns,))),
        cupyconv.options(threads=threads, workspace_limit=limit),
    ):
        forget_calls()
        try:
            result = cupyconv.conv(x, weight, method="gemm", **settings)
        except ValueError as refusal:
            assert limit is not None and "the limit is" in str(refusal)
            return
        finally:
            forget_calls()
    np.testing.assert_array_equal(result, by_windows(x, weight, **settings))


def test_a_long_row_is_not_copied():
    """Only windows that read padding, or that are too few for a product, are copied."""
    x, weight = np.ones((1, 64, 100_000), np.float32), np.ones((64, 1, 9), np.float32)
    plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same", groups=64, method="gemm")
    assert type(plan.steps[0]) is ToeplitzRuns and plan.workspace_bytes < x.nbytes // 50


@pytest.mark.parametrize("rows", ["backwards", "all one", "overlapping"])
def test_rows_that_are_no_matrix_are_copied(rows):
    """BLAS reads none of these rows as a matrix: products of them in place took 1.6 times as long."""
    image = np.arange(2.0 * 50 * 600, dtype=np.float32).reshape(1, 2, 50, 600) % 7
    x = {
        "backwards": image[:, :, ::-1],
        "all one": np.broadcast_to(image[:, :, :1], image.shape),
        "overlapping": np.lib.stride_tricks.sliding_window_view(image[:, :, 0, :549], 500, axis=2),
    }[rows]
    weight, settings = np.ones((2, 1, 1, 9), np.float32), dict(padding=(0, 4), groups=2)
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="gemm", **settings)
    assert type(plan.steps[0]) is ToeplitzRuns and not plan.steps[0].is_in_place
    expected = cupyconv.conv(x.copy(), weight, method="direct", **settings)
    assert np.array_equal(cupyconv.conv(x, weight, method="gemm", **settings), expected)


@pytest.mark.parametrize("what", ["the other byte order", "an odd address"])
def test_rows_that_no_product_reads_are_copied_a_few_windows_at_a_time(what):
    rng = np.random.default_rng(0)
    x, weight = rng.integers(-4, 5, (1, 16, 30_000)).astype(np.float32), np.ones((16, 1, 9), np.float32)
    settings = dict(stride=(1,), dilation=(1,), padding=((4, 4),), groups=16)
    expected = by_windows(x, weight, padding_mode="constant", **settings)
    if what == "an odd address":
        x = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    else:
        x = x.astype(">f4")
    out = np.empty_like(expected)
    plan = cupyconv.explain(cupyconv.conv, x, weight, out=out, method="gemm", **settings)
    assert type(plan.steps[0]) is ToeplitzRuns
    cupyconv.clear_caches()
    peak = peak_bytes(lambda: cupyconv.conv(x, weight, out=out, method="gemm", **settings))
    assert np.array_equal(out, expected)
    assert peak <= plan.workspace_bytes + 200_000 < x.nbytes / 5  # including Python objects


def problem_of(groups, size, kernel, batch=1, threads=1, limit=16 << 20):
    """Return the problem of a depthwise convolution, without arrays."""
    x, weight = array(batch, groups, *size), array(groups, 1, *kernel)
    problem = checked_call(cupyconv.conv, x, weight, padding="same", groups=groups).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


@pytest.mark.parametrize("implementation", [ToeplitzRows, ToeplitzRuns])
def test_toeplitz_products_compute_these_problems_themselves(implementation, monkeypatch):
    """While sums are finite, Toeplitz products leave nothing to sums window by window, nor to other implementations."""
    kernel, size = ((5, 5), (256, 256)) if implementation is ToeplitzRows else ((1, 31), (4, 5_000))
    monkeypatch.delattr(group_products, "sum_windows")
    monkeypatch.setitem(depthwise.DEPTHWISE, "gemm", Method((implementation,)))
    forget_calls()
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 1, *size)), rng.standard_normal((1, 1, *kernel))
    (step,) = cupyconv.explain(cupyconv.conv, x, weight, padding="same", method="gemm").steps
    assert type(step) is implementation
    expected = reference.conv(x, weight, padding="same")
    np.testing.assert_allclose(cupyconv.conv(x, weight, padding="same", method="gemm"), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape, kernel", [((512, 512), (31, 31)), ((100_000,), (101,))])
def test_a_filter_of_one_channel_is_depthwise(shape, kernel):
    """With one channel, columns are many copies for one vector, and scaled elements need a pass for each tap."""
    x, weight = np.ones((1, *shape), np.float32), np.ones((1, 1, *kernel), np.float32)
    with cupyconv.options(allow_fft=False):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same")
    assert plan.method == "gemm" and isinstance(plan.steps[0], group_products.GroupProducts)
    named = cupyconv.explain(cupyconv.conv, x, weight, padding="same", method="direct")
    assert isinstance(named.steps[0], depthwise.ScaledRuns)


def test_a_layer_of_a_millisecond_is_divided(monkeypatch):
    """Two threads took 0.65 to 0.93 of one's time for layers of 0.7 ms and more; for less, waking costs the gain."""
    monkeypatch.setitem(depthwise.DEPTHWISE, "gemm", Method((ToeplitzRows,)))
    forget_calls()
    weight = np.ones((96, 1, 3, 3), np.float32)
    with cupyconv.options(threads=2):
        plans = [
            cupyconv.explain(cupyconv.conv, np.ones((1, 96, size, size), np.float32), weight, groups=96, method="gemm")
            for size in (64, 82)
        ]
    assert [plan.steps[0].threads for plan in plans] == [1, 2]


@pytest.mark.parametrize("milliseconds, threads", [(0.7, 1), (0.9, 2), (1.3, 3), (9.0, 3)])
def test_threads_are_woken_for_four_tenths_of_a_millisecond_of_runs_each(milliseconds, threads, monkeypatch):
    monkeypatch.setattr(ToeplitzRuns, "rough_seconds", lambda problem: milliseconds * 1e-3)
    assert ToeplitzRuns.workers(problem_of(4, (1, 50), (1, 9), threads=3)) == threads


@pytest.mark.parametrize("groups, threads, expected", [(1, 2, 2), (3, 2, 2), (32, 2, 1), (32, 1, 1), (8, 6, 6)])
def test_threads_share_groups_if_there_are_enough_else_pixels(groups, threads, expected, monkeypatch):
    monkeypatch.setattr(ToeplitzRuns, "rough_seconds", lambda problem: 1.0)
    assert ToeplitzRuns.sharers(problem_of(groups, (1, 50), (1, 9), threads=threads)) == expected


@pytest.mark.parametrize("of_group", [0, 10, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("groups", [1, 5, 3000])
@pytest.mark.parametrize("limit", [1 << 14, 1 << 18, 1 << 30])
@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_groups_are_computed_at_a_time_as_there_is_room_for(of_group, groups, limit, threads, monkeypatch):
    monkeypatch.setattr(ToeplitzRuns, "_group_bytes", of_group)
    loop = ToeplitzRuns(problem_of(groups, (1, 300), (1, 9), threads=threads, limit=limit), (1, 1, 1, 300))
    room = min(ToeplitzRuns.groups_bytes, limit * 3 // (4 * threads))
    assert loop.part == 1 or loop.part * of_group <= room
    assert loop.part == groups or 2 * (loop.part + 1) * of_group > room
    assert loop.workspace >= loop.part * (of_group + loop.sums_bytes // groups)


@pytest.mark.parametrize("samples, parts", [(1, 2), (2, 1), (3, 2)])
def test_threads_compute_the_same_number_of_parts(samples, parts, monkeypatch):
    """A single block is divided by groups for them; an even number of blocks is not."""
    monkeypatch.setattr(ToeplitzRuns, "rough_seconds", lambda problem: 1.0)
    loop = ToeplitzRuns(problem_of(64, (1, 50), (1, 9), batch=samples, threads=2), (1, 1, 1, 50))
    assert loop.blocks == samples and loop.rounds == samples * parts and loop.threads == 2


def test_nothing_is_computed_by_one_thread(monkeypatch):
    monkeypatch.setattr(ToeplitzRuns, "rough_seconds", lambda problem: 1.0)
    assert ToeplitzRuns(problem_of(4, (1, 50), (1, 9), batch=0, threads=2), (1, 1, 1, 50)).threads == 1


def test_work_is_products_copies_of_tiles_stores_and_moves_of_channels(monkeypatch):
    for number, name in enumerate(("products_work", "tile_work", "store_work")):
        monkeypatch.setattr(ToeplitzRuns, name, 10**number)
    monkeypatch.setattr(group_products.cost, "channels_moved", lambda problem: 1000)
    assert ToeplitzRuns(problem_of(4, (1, 50), (1, 9)), (1, 1, 1, 50)).work == 1111


@pytest.mark.parametrize(
    "block, together, alone",
    [
        ((64, 1, 8, 8), 8, (1, (64, 1, 8, 8))),
        ((100, 1, 8, 8), 8, (1, (64, 1, 8, 8))),
        ((1, 1, 8, 8), 100, (64, (1, 1, 8, 8))),
        ((1, 1, 8, 8), 10, (10, (1, 1, 8, 8))),
        ((3, 1, 100, 128), 10, (1, (1, 1, 25, 128))),
        ((1, 1, 1, 10_000), 10, (1, (1, 1, 1, 3334))),
    ],
)
def test_at_most_4096_pixels_are_summed_alone_at_a_time(block, together, alone, monkeypatch):
    monkeypatch.setattr(ToeplitzRuns, "part", together)
    assert group_products.PIXELS_ALONE == 4096
    assert ToeplitzRuns(problem_of(100, block[2:], (1, 9), batch=block[0]), block)._alone == alone


#: Calls by what their products write: lines with zeros over their ends, or between them; rows outside the image, in a
#: plane or next to it; the result itself; tiles; several turns; sums of several outputs per channel, and of other rows.
ROW_CALLS = {
    "borders": ((1, 6, 20, 12), (6, 1, 3, 3), dict(padding=1)),
    "strides": ((2, 6, 20, 13), (6, 1, 3, 3), dict(padding=1, stride=2)),
    "no rows": ((1, 6, 9, 12), (6, 1, 5, 3), dict(padding=((40, 40), (1, 1)))),
    "beside": ((1, 6, 5, 9, 12), (6, 1, 3, 3, 3), dict(padding=2)),
    "depth": ((1, 6, 9, 5, 12), (6, 1, 3, 1, 3), dict(padding=(1, 0, 1))),
    "two planes": ((1, 6, 2, 5, 12), (6, 1, 3, 1, 3), dict(padding=(1, 0, 1))),
    "result": ((1, 6, 20, 12), (6, 1, 3, 1), dict(padding=((30, 30), (0, 0)))),
    "tiles": ((1, 6, 20, 12), (6, 1, 3, 3), dict(padding=1, padding_mode="edge")),
    "turns": ((1, 70, 90, 60), (70, 1, 3, 3), dict(padding=1)),
    "outputs": ((3, 6, 19, 12), (12, 1, 5, 4), dict(dilation=(1, 2))),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ROW_CALLS)
def test_views_of_rows_are_made_once_and_their_zeros_written_each_time(name, threads, monkeypatch):
    """The memory is cached and shared: another convolution of the same dtype may have overwritten it meanwhile."""
    shape, kernel, settings = ROW_CALLS[name]
    made, of_loop = [], ToeplitzRows._steps
    monkeypatch.setattr(ToeplitzRows, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    monkeypatch.setattr(toeplitz_rows, "SHARE", 1e-12)
    monkeypatch.setitem(depthwise.DEPTHWISE, "gemm", Method((ToeplitzRows,)))
    cupyconv.clear_caches()
    rng = np.random.default_rng(0)
    with cupyconv.options(threads=threads):
        for _ in range(4):
            x, weight = (rng.integers(-4, 5, size).astype(np.float32) for size in (shape, kernel))
            result = cupyconv.conv(x, weight, groups=shape[1], method="gemm", **settings)
            rank = len(shape) - 2
            padding = settings.get("padding", 0)
            pairs = [
                (p, p) if isinstance(p, int) else p
                for p in (padding if isinstance(padding, tuple) else (padding,) * rank)
            ]
            stride, dilation = ((settings.get(key, 1),) * rank for key in ("stride", "dilation"))
            dilation = settings.get("dilation", dilation)
            mode = settings.get("padding_mode", "constant")
            expected = by_windows(
                x, weight, stride=stride, dilation=dilation, padding=pairs, padding_mode=mode, groups=shape[1]
            )
            np.testing.assert_array_equal(result, expected)
            for buffers in list(backend.cached_scratch(x.dtype)._all.values()):
                for key, memory in list(buffers.items()):
                    if type(key) is str:
                        memory.fill(255)  # not a number
    cupyconv.clear_caches()
    # At most once for each block that a thread may compute first, not for each call.
    assert 1 <= len(made) <= threads * 2


@pytest.mark.parametrize(
    "shape, kernel, settings, expected",
    [
        ((1, 384, 14, 14), (3, 3), dict(padding=1), ShiftedRows),
        ((8, 256, 14, 14), (3, 3), dict(padding=1), ShiftedRows),
        ((1, 120, 28, 28), (5, 5), dict(padding=2), ShiftedRows),
        ((1, 64, 16, 28, 28), (3, 3, 3), dict(padding=1), ShiftedRows),
        ((1, 128, 56, 56), (3, 1), dict(padding=(1, 0)), ToeplitzRows),
        ((1, 96, 56, 56), (7, 7), dict(padding=3), ToeplitzRows),
        ((1, 3, 1024, 1024), (5, 5), dict(padding=2), ToeplitzRows),
        ((1, 128, 4000), (7,), dict(padding=3), ToeplitzRuns),
    ],
)
def test_rows_are_shifted_for_many_channels_and_few_taps(shape, kernel, settings, expected):
    """For these layers shifted rows took 0.65 to 0.82 of the time of Toeplitz rows, or 1.0 to 2.4 on one thread."""
    x, weight = array(*shape), array(shape[1], 1, *kernel)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, groups=shape[1], method="gemm", **settings)
    assert type(plan.steps[0]) is expected


@pytest.mark.parametrize("method, channels, size", [("direct", 128, 92), ("gemm", 0, 300_000)])
def test_a_pass_of_a_millisecond_and_a_half_is_divided(method, channels, size):
    """Two threads share the work of scaled channels-last images, and of a merge of inputs."""
    if channels:
        x = np.ones((1, size, size, channels), np.float32).transpose(0, 3, 1, 2)
        weight = np.ones((channels, 1, 3, 3), np.float32)
    else:
        x, weight = [np.ones((1, 2, size), np.float32)] * 5, np.ones((16, 10, 1), np.float32)
    with cupyconv.options(threads=2):
        plan = cupyconv.explain(cupyconv.conv, x, weight, groups=channels or 1, method=method)
    (step,) = plan.steps
    assert step.name == ("scaled pixels" if channels else "merge")
    assert 1.2e-3 < step.work < 2e-3 and step.threads == 2


def test_threads_with_too_little_to_do_cut_no_runs(monkeypatch):
    """Runs that are cut for more threads are short, and an element of a short run takes twice as long."""
    x, weight = np.ones((1, 32, 16, 16, 16), np.float32), np.ones((32, 1, 3, 3, 3), np.float32)
    monkeypatch.setitem(depthwise.DEPTHWISE, "direct", Method((depthwise.ScaledRuns,)))
    forget_calls()
    blocks = {}
    for threads in (1, 2):
        with cupyconv.options(threads=threads):
            (step,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=32, method="direct").steps
            assert isinstance(step, depthwise.ScaledRuns)
            blocks[threads] = step.blocks, step.threads
    assert blocks[1] == blocks[2]


@given(
    channels=st.integers(2, 5),
    size=st.tuples(st.integers(2, 9), st.integers(2, 30)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    run=st.sampled_from((1, 10, 40)),
    last=st.booleans(),
    value=st.sampled_from((0, np.inf, np.nan)),
    seed=st.integers(0, 1 << 16),
)
def test_channels_are_scaled_in_runs_of_pixels(channels, size, kernel, stride, run, last, value, seed):
    """Results are exact whether channels are last already or are moved there."""
    rng = np.random.default_rng(seed)
    x = np.moveaxis(rng.integers(-4, 5, (2, *size, channels)).astype(np.float32), -1, 1)
    x[1, 1, 1, 1] = value
    x = x if last else x.copy("C")
    weight = rng.integers(-4, 5, (channels, 1, *kernel)).astype(np.float32)
    settings = dict(stride=stride, padding=((1, 2), (2, 3)), groups=channels)
    implementations = Method((depthwise.ScaledPixels,))
    with (
        mock.patch.object(depthwise, "INNERMOST_RUN", run),
        mock.patch.dict(depthwise.DEPTHWISE, direct=implementations),
    ):
        forget_calls()
        result = cupyconv.conv(x, weight, method="direct", **settings)
        forget_calls()
    expected = by_windows(x, weight, dilation=(1, 1), padding_mode="constant", **settings)
    np.testing.assert_array_equal(result, expected)


def test_channels_that_are_last_stay_last():
    """Channels-last images are scaled in place: moving channels first and back takes longer than products save."""
    x, weight = np.ones((2, 30, 30, 48), np.float32).transpose(0, 3, 1, 2), np.ones((48, 1, 3, 3), np.float32)
    for stride in (1, 2):
        plan = cupyconv.explain(cupyconv.conv, x, weight, groups=48, padding=1, stride=stride)
        assert isinstance(plan.steps[0], depthwise.ScaledPixels) and plan.steps[0].in_place


def test_many_outputs_of_one_channel_are_products_of_columns():
    x, weight = np.ones((1, 1, 512, 512), np.float32), np.ones((32, 1, 3, 3), np.float32)
    assert not isinstance(cupyconv.explain(cupyconv.conv, x, weight).steps[0], group_products.GroupProducts)


@pytest.mark.parametrize("size, stride", [(5, 1), (7, 1), (14, 2)])
def test_small_images_of_many_channels_are_scaled(size, stride):
    """A product per channel would mostly be call overhead, so channels are moved last."""
    x, weight = np.ones((1, 512, size, size), np.float32), np.ones((512, 1, 3, 3), np.float32)
    plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=512, stride=stride)
    assert isinstance(plan.steps[0], depthwise.ScaledPixels) and not plan.steps[0].in_place


# --- the weight's gradient ------------------------------------------------------------------------------------


@given(
    implementation=st.sampled_from((strips.GradientStrips, weight_runs.GradientRuns)),
    call=depthwise_calls(),
    threads=st.integers(1, 2),
    limit=st.sampled_from((None, 60_000)),
    channels_last=st.booleans(),
    value=st.sampled_from((None, np.inf, np.nan)),
    where=st.sampled_from(("x", "grad")),
    seed=st.integers(0, 1 << 16),
)
def test_gradients_by_strips_and_by_runs_are_exact(
    implementation, call, threads, limit, channels_last, value, where, seed
):
    """Infinities and NaN are exact too: products of elements that no tap combines are in no sum."""
    x, weight, settings = call
    grad = np.random.default_rng(seed).integers(-4, 5, cupyconv.conv(x, weight, **settings).shape).astype(x.dtype)
    if value is not None:
        spoilt = {"x": x, "grad": grad}[where]
        spoilt.flat[seed % spoilt.size] = value
    arrays = x, grad
    if channels_last:
        x, grad = (np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1) for array in arrays)
    kernel = weight.shape[2:]
    whatever_is_estimated = mock.patch.multiple(implementation, seconds=0.0, turn_calls=0)
    settings_in_force = cupyconv.options(threads=threads, workspace_limit=limit, allow_fft=False, allow_winograd=False)
    with settings_in_force, whatever_is_estimated:
        result = cupyconv.conv_grad_weight(grad, x, kernel, **settings)
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_weight(grad, x, kernel, **settings)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("where", [None, "x", "grad"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("shape, kernel, settings", [
    ((2, 4, 31, 56), (4, 1, 3, 3), dict(stride=2, padding=1)),
    ((1, 3, 20, 57), (6, 1, 5, 5), dict(stride=(3, 2), padding=[(1, 2), (2, 1)])),
    ((1, 4, 20, 64), (4, 1, 7, 7), dict(padding=3)),
    ((1, 4, 20, 75), (4, 1, 3, 4), dict(dilation=2, stride=(1, 2), padding=1, padding_mode="reflect")),
])  # fmt: skip
def test_strips_of_which_elements_fill_vectors(shape, kernel, settings, dtype, where, fresh, monkeypatch):
    monkeypatch.setattr(weight_gradient, "METHODS", {"gemm": Method((strips.GradientStrips,))})
    x = np.random.default_rng(1).integers(-4, 5, shape).astype(dtype)
    grad = cupyconv.conv(x, np.ones(kernel, dtype), groups=shape[1], **settings)
    grad = np.random.default_rng(2).integers(-4, 5, grad.shape).astype(dtype)
    if where:
        {"x": x, "grad": grad}[where][0, 1, 3, 5] = np.nan
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], groups=shape[1], **settings)
    for limit in (None, 1 << 20, 100_000):
        with cupyconv.options(threads=2, workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], groups=shape[1], **settings)
            result = cupyconv.conv_grad_weight(grad, x, kernel[2:], groups=shape[1], **settings)
        assert limit is None or plan.workspace_bytes <= limit
        np.testing.assert_array_equal(result, expected)
    (step,) = plan.steps
    assert strips.strip_of(step.geometry, "float32").is_turned


@pytest.mark.parametrize("width", [*range(200), 10_007, 65_536])
def test_a_width_of_a_strip_is_tried_with_the_fewest_strips(width):
    """All numbers of strips were tried once: seconds for a long row."""
    fewest: dict[int, int] = {}
    for count in range(max(1, ceil(width / strips.WIDEST)), max(1, width // strips.NARROWEST) + 1):
        fewest.setdefault(max(1, ceil(width / count)), count)
    counts = strips.strip_counts(width)
    assert {max(1, ceil(width / count)) for count in counts} == set(fewest)
    assert set(fewest.values()) <= set(counts) and len(counts) <= strips.WIDEST


def test_strips_of_rows_without_pixels(fresh, monkeypatch):
    monkeypatch.setattr(weight_gradient, "METHODS", {"gemm": Method((strips.GradientStrips,))})
    x, grad = np.ones((1, 4, 8, 0), np.float32), np.ones((1, 4, 6, 0), np.float32)
    result = cupyconv.conv_grad_weight(grad, x, (3, 1), groups=4)
    np.testing.assert_array_equal(result, np.zeros((4, 1, 3, 1)))


def test_the_calls_of_strips_are_those_of_each_part_once(fresh, monkeypatch):
    monkeypatch.setattr(weight_gradient, "METHODS", {"gemm": Method((strips.GradientStrips,))})
    x, grad = np.ones((1, 96, 112, 112), np.float32), np.ones((1, 96, 56, 56), np.float32)
    (step,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, stride=2, padding=1, groups=96).steps
    parts = step.geometry.groups // step.part
    assert isinstance(step, strips.GradientStrips) and parts > 1
    assert step.calls == step.blocks * (step.turn_calls + parts * strips.STRIP_CALLS)


@pytest.fixture
def runs_only(fresh, monkeypatch):
    monkeypatch.setattr(weight_gradient, "METHODS", {"direct": Method((weight_runs.GradientRuns,))})


@pytest.mark.parametrize("dtypes", ["float32 float32", "float16 float32", "complex64 complex64", "complex64 float32"])
@pytest.mark.parametrize("shape, kernel, settings", [
    ((2, 4, 11, 56), (4, 3, 3), dict(padding=1)),
    ((3, 4, 12, 13), (4, 3, 4), dict(stride=(2, 3), padding=2, dilation=(1, 2))),
    ((2, 3, 9, 10), (6, 2, 3), dict(stride=(4, 2), padding=1, padding_mode="reflect")),
    ((1, 3, 7, 6, 5), (3, 2, 3, 2), dict(stride=(1, 2, 1), dilation=(2, 1, 2))),
    ((2, 4, 20_000), (4, 5), dict(dilation=3, padding=6)),
], ids=["rows", "phases", "borders", "3-D", "one row of several pieces"])  # fmt: skip
def test_gradients_by_runs(shape, kernel, settings, dtypes, runs_only, monkeypatch):
    """Results are exact in one block of all channels, and in several blocks of parts of a run and few channels."""
    of_x, of_grad = dtypes.split()
    random = np.random.default_rng(1)
    x = random.integers(-4, 5, shape).astype(of_x)
    y = cupyconv.conv(x, np.ones((kernel[0], 1, *kernel[1:])), groups=shape[1], **settings)
    grad = random.integers(-4, 5, y.shape).astype(of_grad)
    expected = reference_gradients.conv_grad_weight(grad, x, kernel[1:], groups=shape[1], **settings)
    for pixels, piece, limit in ((1 << 17, 16 << 10, None), (40, 100, 1 << 20), (1 << 17, 1000, 40_000)):
        monkeypatch.setattr(weight_runs, "BLOCK_PIXELS", pixels)
        monkeypatch.setattr(weight_runs, "PIECE", piece)
        forget_calls()
        for threads in (1, 2):
            with cupyconv.options(threads=threads, workspace_limit=limit):
                result = cupyconv.conv_grad_weight(grad, x, kernel[1:], groups=shape[1], **settings)
            np.testing.assert_array_equal(result, expected)


def test_an_infinity_between_rows_is_in_no_sum(runs_only):
    """A run multiplies a row's last element by the zero behind the gradient's row before; the first tap ignores it."""
    x, grad = np.ones((1, 2, 6, 9), np.float32), np.ones((1, 2, 6, 9), np.float32)
    x[0, 1, 2, 8] = np.inf
    result = cupyconv.conv_grad_weight(grad, x, 3, padding=1, groups=2)
    sums = np.array([[40, 45, 40], [48, 54, 48], [40, 45, 40]], np.float32)
    np.testing.assert_array_equal(result[0, 0], sums)
    sums[:, 1:] = np.inf
    np.testing.assert_array_equal(result[1, 0], sums)


def test_what_is_summed_again_is_not_finite_alone(runs_only):
    """The other channel's sums keep every bit; in the same channel, sums that read no NaN keep their values."""
    x, grad = np.random.default_rng(0).standard_normal((2, 1, 2, 64, 64)).astype(np.float32)
    x[0, 1, 5, 63] = 0
    finite = cupyconv.conv_grad_weight(grad, x, 3, padding=1, groups=2)
    x[0, 1, 5, 63] = np.nan
    spoilt = cupyconv.conv_grad_weight(grad, x, 3, padding=1, groups=2)
    np.testing.assert_array_equal(spoilt[0], finite[0])
    assert np.isnan(spoilt[1, 0, :, 1:]).all()
    np.testing.assert_allclose(spoilt[1, 0, :, 0], finite[1, 0, :, 0], rtol=1e-4)


def test_small_kernels_at_stride_1_have_runs():
    def step(size, kernel, dtype="float32", **settings):
        x = np.ones((1, 64, *size), dtype)
        (step,) = cupyconv.explain(cupyconv.conv_grad_weight, x, x, kernel, groups=64, **settings).steps
        return step

    assert isinstance(step((56, 56), (3, 3), padding=1), weight_runs.GradientRuns)
    assert isinstance(step((28, 28), (5, 5), padding=2), weight_runs.GradientRuns)
    assert isinstance(step((56, 56), (7, 7), "complex64", padding=3), weight_runs.GradientRuns)


def test_which_gradients_are_by_strips():
    """Strips are not used for rows so short that products with zeros, and calls, take longer."""

    def step(size, kernel, **settings):
        x = np.ones((1, 64, *size), np.float32)
        grad = np.ones(cupyconv.conv(x, np.ones((64, 1, *kernel), np.float32), groups=64, **settings).shape, np.float32)
        (step,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, groups=64, **settings).steps
        return step

    assert isinstance(step((56, 56), (7, 7), padding=3), strips.GradientStrips)
    assert not isinstance(step((56, 56), (5, 5), padding=2, stride=2), strips.GradientStrips)
    assert not isinstance(step((7, 7), (3, 3), padding=1), strips.GradientStrips)
    assert not isinstance(step((1_000,), (9,)), strips.GradientStrips)


@pytest.mark.parametrize("size, kernel, dilation", [((3000, 3000), (3, 3), 1000), ((1 << 22,), (2,), 1 << 21)])
def test_taps_as_far_apart_as_the_image_is_large_keep_within_the_default_limit(size, kernel, dilation):
    """This was once refused, because the smallest block's windows span the whole image, which exceeds the limit."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (1, 2, *size)).astype(np.float32)
    w = rng.integers(-2, 3, (2, 1, *kernel)).astype(np.float32)
    assert x[0, 0].nbytes >= 16 << 20
    near = tuple(extent - dilation * (taps - 1) for extent, taps in zip(size, kernel))
    expected = np.zeros((1, 2, *near), np.float32)
    for tap in np.ndindex(kernel):
        shifted = tuple(slice(dilation * at, dilation * at + extent) for at, extent in zip(tap, near))
        expected += x[(..., *shifted)] * w[(slice(None), 0, *tap)].reshape(2, *[1] * len(size))
    assert cupyconv.explain(cupyconv.conv, x, w, groups=2, dilation=dilation).workspace_bytes <= 16 << 20
    np.testing.assert_array_equal(cupyconv.conv(x, w, groups=2, dilation=dilation), expected)
