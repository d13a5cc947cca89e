"""Columns as shifts of the image: strides, dilations, borders and parts in every phase, against the naive reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from integer_arrays import integers
from peak_memory import peak_bytes
from plans import array
from refusals import smallest_block
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import convolution, gemm, long_rows, mec, shifts
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.shifts import Shifts
from cupyconv.problem.problems import HostModel, NotApplicable

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "groups": (1, 6, 9, (7, 6), (3, 3), dict(groups=3, padding=1)),
    "one group": (2, 4, 5, (7, 6), (3, 3), dict(padding=1)),
    "even kernel": (1, 4, 6, (8, 9), (4, 2), dict(groups=2, padding="same")),
    "wide kernel": (2, 4, 6, (5, 4), (3, 9), dict(groups=2, padding="same")),
    "stride": (2, 4, 6, (9, 8), (3, 3), dict(groups=2, stride=2, padding=1)),
    "stride, odd": (1, 4, 6, (9, 11), (5, 3), dict(groups=2, stride=(3, 2), padding=(2, 1))),
    "stride beyond the kernel": (1, 4, 6, (9, 11), (2, 2), dict(groups=2, stride=3, padding=1)),
    "dilation": (1, 4, 6, (9, 11), (3, 3), dict(groups=2, dilation=(2, 3), padding="same")),
    "dilation beyond the image": (1, 4, 6, (4, 3), (3, 3), dict(groups=2, dilation=5, padding=5)),
    "stride and dilation": (1, 4, 6, (12, 10), (3, 3), dict(groups=2, stride=(2, 4), dilation=(3, 2), padding=(3, 2))),
    "more padding than taps read": (1, 4, 6, (3, 4), (2, 3), dict(groups=2, padding=((3, 2), (5, 4)))),
    "a stride that reads padding alone": (
        1,
        4,
        6,
        (5, 1),
        (3, 3),
        dict(groups=2, stride=(1, 3), padding=((1, 1), (4, 1))),
    ),
    "borders between rows": (1, 4, 6, (6, 5), (3, 1), dict(groups=2, padding=(2, 0), padding_mode="reflect")),
    "3-D": (2, 4, 6, (4, 5, 3), (3, 2, 3), dict(groups=2, padding="same")),
    "3-D, stride": (1, 4, 6, (5, 4, 7), (3, 1, 3), dict(groups=2, stride=(2, 1, 2), padding=(1, 0, 1))),
}


@pytest.fixture(autouse=True)
def shifts_only(monkeypatch):
    monkeypatch.setitem(convolution.METHODS, "gemm", convolution.SHIFTED["gemm"])
    for implementation in (gemm.View, gemm.Columns, mec.MecRows, long_rows.LongRows, ShiftedRows):
        monkeypatch.setattr(implementation, "applies", lambda problem: False)
    forget_calls()
    yield
    forget_calls()


def layer(batch, channels, outputs, size, kernel, settings, dtype="float32"):
    """Return a layer's arrays and its result."""
    x = integers(batch, channels, *size, dtype=dtype)
    weight = integers(outputs, channels // settings.get("groups", 1), *kernel, dtype=dtype, seed=1)
    return x, weight, reference.conv([x], weight, **settings)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block, pixels", [(1 << 21, 256), (1500, 1)], ids=["whole", "bands and parts"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, dtype, block, pixels, threads, monkeypatch):
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", block)
    monkeypatch.setattr(shifts, "LONG_PRODUCT", pixels)
    monkeypatch.setattr(shifts.Shifts, "smallest", 1)
    x, weight, expected = layer(*LAYERS[name], dtype)
    settings = LAYERS[name][-1]
    with cupyconv.options(threads=threads):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, method="gemm", **settings).steps
        assert loop.name == "shifted columns"
        # Memory behind an image of other channels is not zero, because it has been used before.
        cupyconv.conv(x + 100, weight, method="gemm", **settings)
        assert_exact(cupyconv.conv(x, weight, method="gemm", **settings), expected, dtype)


def test_bands_and_parts_of_groups(monkeypatch):
    """Rows and groups are split if their columns do not fit; every thread has the same number of parts."""
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 30_000)
    x, weight, expected = layer(1, 24, 24, (40, 16), (3, 3), dict(groups=12, padding=1))
    (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=12, method="gemm").steps
    assert loop.block == (1, 1, 20, 16) and loop.part == 1
    assert_exact(cupyconv.conv(x, weight, padding=1, groups=12, method="gemm"), expected, "float32")
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 400_000)
    for threads, part in ((1, 6), (2, 6), (3, 4)):
        with cupyconv.options(threads=threads):
            forget_calls()
            (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=12, method="gemm").steps
            assert loop.part == part
            assert_exact(cupyconv.conv(x, weight, padding=1, groups=12, method="gemm"), expected, "float32")


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_bias_residual_activation_prologue_and_several_inputs(last, monkeypatch):
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 3000)
    x, weight, _ = layer(*LAYERS["stride"])
    rng = np.random.default_rng(1)
    settings = LAYERS["stride"][-1]
    scale, shift, bias = (rng.integers(-2, 3, count).astype(np.float32) for count in (4, 4, 6))
    read = np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)
    y = reference.conv([read], weight, **settings)
    residual = rng.integers(-3, 4, y.shape).astype(np.float32)
    if last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    given = dict(prologue=(scale, shift, "relu"), method="gemm", **settings)
    for threads in (1, 2):
        with cupyconv.options(threads=threads):
            assert_exact(cupyconv.conv(x, weight, **given), y, "float32")
            expected = np.maximum(y + bias[:, None, None] + residual, 0)
            actual = cupyconv.conv([x[:, :1], x[:, 1:]], weight, bias, residual=residual, activation="relu", **given)
            assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("name", ["groups", "stride", "dilation", "3-D"])
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name):
    """Non-finite values at the ends of rows do not reach other rows, which are their neighbours in memory."""
    x, weight, _ = layer(*LAYERS[name])
    settings = LAYERS[name][-1]
    weight[weight == 0] = 1
    x[0, 0, ..., 0], x[-1, 1, ..., -1] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = reference.conv([x], weight, **settings)
    np.testing.assert_array_equal(cupyconv.conv(x, weight, method="gemm", **settings), expected)


@pytest.mark.parametrize("limit", [40_000, 9_000, 6_000])
def test_the_limit_holds(limit):
    x, weight, expected = layer(2, 12, 12, (15, 14), (3, 3), dict(groups=4, padding=1))
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=4, method="gemm")
        assert plan.workspace_bytes <= limit
        assert_exact(cupyconv.conv(x, weight, padding=1, groups=4, method="gemm"), expected, "float32")
    with cupyconv.options(workspace_limit=200), pytest.raises(ValueError, match="bytes of workspace, the limit is 200"):
        cupyconv.conv(x, weight, padding=1, groups=4, method="gemm")


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(padding=(1, 0)), dict(padding=1, padding_mode="edge"), dict(padding=((1, 1), (1, 0)))],
    ids=["none", "no columns", "a border", "one side"],
)
def test_rows_that_are_longer_than_those_of_the_result_have_other_ways(settings):
    x, weight, _ = layer(1, 4, 6, (7, 6), (3, 3), dict(groups=2, padding=1))
    with pytest.raises(ValueError, match="no implementation applies"):
        cupyconv.explain(cupyconv.conv, x, weight, groups=2, method="gemm", **settings)


def test_a_row_is_not_cut(monkeypatch):
    """A row stays whole however long it is, and however few rows there are for threads."""
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 1000)
    monkeypatch.setattr(shifts, "LONG_PRODUCT", 1)
    x, weight, expected = layer(1, 2, 3, (3, 90), (3, 3), dict(padding=1))
    for threads in (1, 2, 4):
        with cupyconv.options(threads=threads):
            (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm").steps
            assert loop.block[3] == 90
            assert_exact(cupyconv.conv(x, weight, padding=1, method="gemm"), expected, "float32")


#: Channels, outputs, size, kernel, stride, groups, dtype.
SHIFTED = {
    "groups of 16 channels": (512, 512, (7, 7), (3, 3), 1, 32, "float32"),
    "stride": (64, 64, (40, 40), (3, 3), 2, 1, "float32"),
    "one row": (96, 64, (42, 10), (1, 5), 1, 1, "float32"),
}


@pytest.mark.parametrize("channels, outputs, size, kernel, stride, groups, dtype", SHIFTED.values(), ids=SHIFTED)
def test_layers_of_many_groups_and_those_without_winograds_method_are_shifted(
    channels, outputs, size, kernel, stride, groups, dtype, monkeypatch
):
    monkeypatch.undo()
    forget_calls()
    x, weight = np.zeros((1, channels, *size), dtype), np.zeros((outputs, channels // groups, *kernel), dtype)
    padding = tuple(taps // 2 for taps in kernel)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=padding, stride=stride, groups=groups)
    assert [step.name for step in plan.steps] == ["shifted columns"]


# --- what a plan counts ---------------------------------------------------------------------------------------


def problem_of(batch, channels, outputs, size, kernel, settings, dtype="float32", threads=1, limit=16 << 20) -> Any:
    """The problem of a layer of `LAYERS`, without arrays."""
    x = array(batch, channels, *size, dtype=dtype)
    weight = array(outputs, channels // settings.get("groups", 1), *kernel, dtype=dtype)
    problem = checked_call(cupyconv.conv, x, weight, **settings).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


def steps_of(loop):
    """The phases of a loop's first block."""
    block = next(iter(loop.each_block))
    return loop._steps(Scratch(loop.x_dtype, 1), block, block.bare_phases)[0]


def count(monkeypatch, **counted):
    """Replace the functions of `cost` that estimate times by the given counts, and the others by zero."""
    monkeypatch.setattr(shifts, "parts_of_columns", lambda *given: None)
    for name in ("product", "shifted", "left_out", "copied", "added"):
        monkeypatch.setattr(shifts.cost, name, counted.get(name, lambda *given: 0))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_the_estimated_time_counts_all_that_a_run_does(name, samples, monkeypatch):
    """It counts multiply-adds, elements of the columns, their zeros, copied elements of the image and stored results."""
    problem = problem_of(2, *LAYERS[name][1:], dtype="float16")  # sums are stored apart
    geometry = problem.geometry
    loop, blocks = Shifts(problem, (samples, *geometry.out_size)), 2 // samples
    steps = steps_of(loop)
    count(monkeypatch, product=lambda rows, reduction, columns, _: rows * reduction * columns)
    assert loop.work == geometry.products
    count(monkeypatch, shifted=lambda elements, run, dtype: elements)
    assert loop.work == blocks * sum(step.columns.size for step in steps)
    count(monkeypatch, left_out=lambda elements: elements)
    assert loop.work == blocks * sum(zeros.size for step in steps for zeros in step.padding)
    count(monkeypatch, copied=lambda elements, run, dtype, apart: elements)
    assert loop.work == pytest.approx(blocks * sum(step.image.size for step in steps))
    count(monkeypatch, added=lambda elements, dtype: elements)
    assert loop.work == 2 * geometry.out_channels * geometry.pixels


@pytest.mark.parametrize(
    "name", sorted(LAYERS.keys() - {"more padding than taps read", "a stride that reads padding alone"})
)
def test_the_calls_of_a_turn_are_counted(name):
    """A turn makes two calls per phase, one call per array of zeros, and a fixed number of calls for the block."""
    problem = problem_of(*LAYERS[name])
    loop = Shifts(problem, (1, *problem.geometry.out_size))
    steps = steps_of(loop)
    zeros = sum(len(step.padding) for step in steps)
    assert loop.calls == loop.turns * (shifts.TURN_CALLS + shifts.PHASE_CALLS * len(steps) + zeros)


@pytest.mark.parametrize(
    "size, settings, run, is_apart",
    [
        ((7, 6), dict(padding=1), 42, False),
        ((4, 6), dict(padding=1), 24, False),
        ((7, 6), dict(padding=1, stride=2), 3, True),
        ((7, 6), dict(padding=1, stride=(2, 1)), 24, False),
        ((7, 6), dict(padding=(1, 2)), 8, False),
    ],
    ids=["rows as long", "few rows", "stride", "stride between rows", "longer rows"],
)
def test_the_image_is_copied_in_runs_of_whole_rows(size, settings, run, is_apart, monkeypatch):
    """All rows of a sample are one run if they are as long as the result's rows and have no stride along the width."""
    problem, seen = problem_of(1, 4, 6, size, (3, 3), dict(groups=2) | settings), []
    count(monkeypatch, copied=lambda elements, *how: seen.append(how) or 0)
    loop = Shifts(problem, (1, *problem.geometry.out_size))
    assert loop.work == 0 and seen == [(run, "float32", is_apart)]


def test_columns_beyond_the_cache_take_longer(monkeypatch):
    """The estimated time of columns that exceed the cache is larger by a fixed factor."""
    count(monkeypatch, shifted=lambda elements, run, dtype: elements)
    problem, seconds = problem_of(*LAYERS["groups"]), []
    for block in (1 << 21, 100):
        monkeypatch.setattr(shifts, "COLUMNS_BLOCK", block)
        seconds.append(Shifts(problem, (1, *problem.geometry.out_size)).work)
    assert seconds[1] == shifts.cost.FARTHER * seconds[0] > seconds[0]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_share_the_groups_if_there_are_two_for_each(groups, threads):
    """With fewer groups, the threads share the rows of the image instead."""
    problem = problem_of(1, groups, groups, (16, 20), (3, 3), dict(groups=groups, padding=1), threads=threads)
    loop = Shifts.fitted(problem, 0, 1 << 20)
    assert loop.blocks == (1 if groups >= 2 * threads else threads)
    assert loop.threads == threads


@pytest.mark.parametrize(
    "size, kernel, settings, applies",
    [
        ((2, 6), (3, 3), dict(padding=1), True),
        ((1, 6), (3, 3), dict(padding=1), False),
        ((12,), (3,), dict(padding=1), False),
        ((2, 6), (1, 1), {}, False),
        ((3, 6), (2, 1), {}, True),
        ((2, 6), (1, 3), dict(padding=(0, 1), padding_mode="edge"), False),
        ((2, 6), (1, 2), dict(padding=((0, 0), (1, 0)), padding_mode="edge"), False),
        ((2, 6), (1, 2), dict(padding=((0, 0), (0, 1)), padding_mode="edge"), False),
        ((2, 6), (3, 1), dict(padding=(1, 0), padding_mode="edge"), True),
    ],
)
def test_it_is_for_several_rows_and_taps_and_zeros_at_the_ends_of_rows(size, kernel, settings, applies):
    """The implementation applies to kernels of several taps with several rows of pixels, padded by zeros along the width."""
    assert bool(Shifts.applies(problem_of(1, 4, 6, size, kernel, dict(groups=2) | settings))) is applies


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kernel, settings",
    [
        ((3, 3), dict(groups=1, padding=1)),
        ((3, 3), dict(groups=2, padding=1)),
        ((3, 1), dict(groups=2, padding=(1, 0), padding_mode="reflect")),
    ],
    ids=str,
)
def test_the_smallest_block_is_a_row_of_one_group(kernel, settings, threads):
    """The bytes that a refusal names are enough for this block, and one byte less is refused."""
    problem = problem_of(2, 4, 6, (3, 90), kernel, settings, threads=threads)
    limit, words, ((loop,), nbytes) = smallest_block(Shifts.loops, problem, 300)
    assert words.startswith(f"a row needs {limit:,} bytes")
    assert loop.block == (1, 1, 1, 90) and loop.part == 1
    assert sum(nbytes.values()) + 2 * shifts.Plan.ALIGNMENT <= limit
    with pytest.raises(NotApplicable, match="a row needs"):
        Shifts.loops(replace(problem, workspace_limit=limit - 1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_as_many_groups_as_fit_are_computed_at_a_time(dtype, threads):
    """The parts of the groups fit every limit, and the next larger parts do not."""
    settings, seen = dict(groups=24, padding=(1, 0), padding_mode="reflect"), set()
    for limit in range(30_000 * threads, 150_000 * threads, 211 * threads):
        problem = problem_of(1, 96, 96, (12, 14), (3, 1), settings, dtype, threads, limit)
        (loop,), nbytes = Shifts.loops(problem)
        room = limit - 2 * shifts.Plan.ALIGNMENT - sum(nbytes.values())
        assert room >= 0
        step = threads if loop.blocks % threads else 1  # threads have as many parts
        larger = [size for size in (-(-24 // parts) for parts in range(step, 25, step)) if size > loop.part]
        if larger:
            assert threads * loop.workspace // loop.part * (min(larger) - loop.part) > room
        seen.add(loop.part)
    assert len(seen) > 1


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("settings", [{}, dict(activation="gelu"), dict(dtype="float16")], ids=str)
def test_it_takes_the_memory_that_it_says(settings, groups):
    """A plan counts at least as many bytes as a run allocates, and at most three times as many."""
    settings = dict(settings)
    dtype = settings.pop("dtype", "float32")
    x, weight = np.ones((2, 32, 40, 40), dtype), np.ones((48, 32 // groups, 3, 3), dtype)
    vectors = np.ones(32, dtype)
    settings |= dict(groups=groups, padding=1, prologue=(vectors, vectors, "relu"), method="gemm")
    out = np.empty((2, 48, 40, 40), dtype)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, out=out, **settings)
        cupyconv.conv(x, weight, out=out, **settings)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, out=out, **settings))
    assert plan.workspace_bytes / 3 <= peak <= plan.workspace_bytes + 100_000


@pytest.mark.parametrize("name", LAYERS)
def test_memory_of_the_image_and_of_columns_is_counted_apart(name, monkeypatch):
    """A fused chain asks for the bytes of the image alone, because another layer's columns are in memory next to it."""
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 1)  # one group at a time
    problem, sizes = problem_of(*LAYERS[name]), {}

    class Seen(Scratch):
        def array(self, name, shape, dtype=None):
            array = super().array(name, shape, dtype)
            sizes[name] = array.nbytes
            return array

    loop = Shifts(problem, (1, *problem.geometry.out_size))
    block = next(iter(loop.each_block))
    loop._steps(Seen(loop.x_dtype, 1), block, block.bare_phases)
    assert loop.part == 1 and loop.extra_bytes == sizes["tile"]
    assert loop.workspace - loop.extra_bytes >= sizes["columns"] > 0


@pytest.mark.parametrize("kernel", [(3, 3), (3, 1)])
@pytest.mark.parametrize("batch, channels, outputs", [(2, 0, 4), (0, 4, 6), (2, 4, 0)])
def test_layers_without_samples_channels_or_outputs(batch, channels, outputs, kernel):
    """A layer with an empty axis has an empty result, or zeros if it has no input channels."""
    settings = dict(groups=2, padding=(1, kernel[1] // 2))
    x, weight, expected = layer(batch, channels, outputs, (5, 6), kernel, settings)
    assert_exact(cupyconv.conv(x, weight, method="gemm", **settings), expected, "float32")


def test_a_block_holds_no_larger_product_than_it_says(monkeypatch):
    """The largest product is that of one sample and one group, or one part of it if it is computed in parts."""
    for whole in (True, False):
        problem = problem_of(*LAYERS["groups"])
        if whole:
            monkeypatch.setattr(shifts, "parts_of_columns", lambda *given: None)
        else:
            monkeypatch.setattr(shifts, "parts_of_columns", lambda *given: shifts.cost.Parts(2, 16, 42, 0.0))
        loop = Shifts(problem, (1, *problem.geometry.out_size))
        outputs, reduction, pixels = 3, 18, 42
        assert loop.largest_product == (outputs * reduction * pixels if whole else 2 * reduction * 16)
