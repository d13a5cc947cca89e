"""Convolution by shifted rows: groups, strides, dilations, ends of rows and parts, against the naive reference."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import reference
from hypothesis import given
from integer_arrays import integers
from not_numbers import assert_memory_does_not_matter, assert_they_land_where_defined
from peak_memory import peak_bytes
from plans import array
from refusals import smallest_block
from test_depthwise import by_windows, depthwise_calls
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import backend, convolution, depthwise, group_products, lines, shifted_rows
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.choice import Method
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.windows import Images, tile_shape
from cupyconv.problem.activations import Activation
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import HostModel, NotApplicable, Prologue

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "same": (1, 6, 6, (7, 6), (3, 3), dict(padding=1)),
    "samples": (3, 4, 4, (7, 6), (3, 3), dict(padding=1)),
    "outputs": (2, 4, 8, (7, 6), (3, 5), dict(padding="same")),
    "no padding": (2, 4, 4, (7, 9), (3, 4), dict()),
    "padding on one side": (1, 4, 4, (7, 9), (3, 4), dict(padding=((0, 2), (1, 0)))),
    "more padding than taps read": (1, 4, 4, (3, 4), (2, 3), dict(padding=((3, 2), (5, 4)))),
    "wide kernel": (2, 4, 4, (5, 4), (3, 9), dict(padding="same")),
    "tall kernel": (1, 4, 4, (4, 9), (9, 2), dict(padding="same")),
    "stride": (2, 4, 4, (9, 8), (3, 3), dict(stride=2, padding=1)),
    "stride, odd": (1, 4, 4, (9, 11), (5, 3), dict(stride=(3, 2), padding=(2, 1))),
    "stride, a line": (1, 4, 4, (9, 8), (3, 2), dict(stride=2)),
    "stride, whole phases": (1, 4, 4, (9, 8), (3, 4), dict(stride=2, padding=1)),
    "stride beyond the kernel": (1, 4, 4, (9, 11), (2, 2), dict(stride=3, padding=1)),
    "stride of rows": (1, 4, 4, (9, 8), (3, 3), dict(stride=(2, 1))),
    "stride of the width, whole phases": (1, 4, 4, (9, 8), (3, 4), dict(stride=(1, 2))),
    "stride of one row": (2, 4, 4, (1, 21), (1, 5), dict(stride=(1, 2), padding=(0, 2))),
    "dilation": (1, 4, 4, (9, 11), (3, 3), dict(dilation=(2, 3), padding="same")),
    "dilation beyond the image": (1, 4, 4, (4, 3), (3, 3), dict(dilation=5, padding=5)),
    "stride and dilation": (1, 4, 4, (12, 10), (3, 3), dict(stride=(2, 4), dilation=(3, 2), padding=(3, 2))),
    "stride and more dilation": (1, 4, 4, (12, 21), (3, 4), dict(stride=(1, 2), dilation=(1, 5), padding=(1, 8))),
    "a border that nothing reads": (1, 4, 4, (6, 7), (3, 3), dict(padding_mode="reflect", padding="valid")),
    "groups of several channels": (2, 6, 9, (7, 6), (3, 3), dict(groups=3, padding=1)),
    "one group": (2, 3, 5, (7, 6), (3, 3), dict(groups=1, padding=1)),
    "one row": (2, 3, 2, (61,), (5,), dict(groups=1, padding=2)),
    "one row, stride and dilation": (2, 4, 4, (61,), (5,), dict(groups=2, stride=3, dilation=2, padding=((3, 9),))),
    "one row of 3-D": (1, 4, 4, (3, 1, 20), (2, 1, 3), dict(groups=2, padding=(0, 0, 1))),
    "groups and a stride": (1, 6, 4, (9, 8), (3, 3), dict(groups=2, stride=2, padding=1)),
    "groups of rows": (2, 6, 4, (4, 5, 3), (2, 3, 2), dict(groups=2, padding="same")),
    "3-D": (2, 4, 4, (4, 5, 3), (3, 2, 3), dict(padding="same")),
    "3-D, dilation": (1, 4, 4, (7, 8, 6), (2, 3, 2), dict(dilation=(3, 2, 1), padding=(1, 2, 0))),
    "3-D, stride": (1, 4, 8, (5, 4, 7), (3, 1, 3), dict(stride=(2, 1, 2), padding=(1, 0, 1))),
}


@pytest.fixture(autouse=True)
def shifted_rows_only(monkeypatch):
    for table in (depthwise.DEPTHWISE, convolution.GROUPED, convolution.METHODS, convolution.SHIFTED):
        monkeypatch.setitem(table, "gemm", Method((ShiftedRows,)))
    forget_calls()
    yield
    forget_calls()


def layer(batch, channels, outputs, size, kernel, settings, dtype="float32"):
    """Return a layer's arrays, its settings, and its result."""
    settings = dict(groups=channels, method="gemm") | settings
    x = integers(batch, channels, *size, dtype=dtype)
    weight = integers(outputs, channels // settings["groups"], *kernel, dtype=dtype, seed=1)
    return x, weight, settings, reference.conv([x], weight, **{k: v for k, v in settings.items() if k != "method"})


def problem_of(batch, channels, outputs, size, kernel, settings, dtype="float32", threads=1, limit=16 << 20):
    """Return the problem of a layer of `LAYERS`, without arrays."""
    settings = dict(groups=channels) | settings
    x = array(batch, channels, *size, dtype=dtype)
    weight = array(outputs, channels // settings["groups"], *kernel, dtype=dtype)
    problem = checked_call(cupyconv.conv, x, weight, **settings).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


@pytest.mark.parametrize("block", [640 << 10, 2_000, 1], ids=["whole", "bands and parts", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, dtype, block, monkeypatch):
    monkeypatch.setattr(shifted_rows, "LINES_BLOCK", block)
    monkeypatch.setattr(ShiftedRows, "smallest", 1)
    x, weight, settings, expected = layer(*LAYERS[name], dtype)
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
        assert loop.name == "shifted rows" and (loop.threads == 1 or loop.geometry.groups == 1)
        assert_exact(cupyconv.conv(x, weight, **settings), expected, dtype)


def test_a_product_in_parts_that_blas_does_not_pack():
    """Rows of the matrices and columns of the lines are cut; the last columns are fewer."""
    x, weight, settings, expected = layer(1, 128, 64, (14, 14), (3, 3), dict(groups=2, padding=1))
    (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
    (lines_added, _, length), (rows, columns) = loop._sizes, loop._part_of_product
    assert rows < lines_added and columns < length and length % columns
    assert loop.largest_product == rows * columns * 64 * 3
    assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")


@given(call=depthwise_calls())
def test_any_layer(call):
    x, weight, settings = call
    try:
        result = cupyconv.conv(x, weight, method="gemm", **settings)
    except ValueError as refusal:
        assert "no implementation applies" in str(refusal)
        return
    assert np.array_equal(result, by_windows(x, weight, **settings))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", ["same", "stride", "outputs", "groups of several channels"])
def test_bias_residual_activation_prologue_and_several_inputs(name, last):
    x, weight, settings, _ = layer(*LAYERS[name])
    rng = np.random.default_rng(1)
    scale, shift, bias = (rng.integers(-2, 3, count).astype(np.float32) for count in (4, 4, len(weight)))
    scale, shift = (np.resize(vector, x.shape[1]) for vector in (scale, shift))
    read = np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)
    y = reference.conv([read], weight, **{k: v for k, v in settings.items() if k != "method"})
    residual = rng.integers(-3, 4, y.shape).astype(np.float32)
    if last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    given = settings | dict(prologue=(scale, shift, "relu"))
    assert_exact(cupyconv.conv(x, weight, **given), y, "float32")
    expected = np.maximum(y + bias[:, None, None] + residual, 0)
    actual = cupyconv.conv([x[:, :1], x[:, 1:]], weight, bias, residual=residual, activation="relu", **given)
    assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", LAYERS)
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name, value, where):
    """Neither zeros of the matrix nor the next row of pixels spread them, and times padding they are NaN."""
    x, weight, settings, _ = layer(*LAYERS[name])
    assert_they_land_where_defined(x, weight, settings, where, value)


@pytest.mark.parametrize("name", LAYERS)
def test_finite_sums_are_not_computed_again(name, monkeypatch):
    monkeypatch.delattr(group_products, "sum_windows")
    x, weight, settings, expected = layer(*LAYERS[name])
    assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")


@pytest.mark.parametrize("name", ["same", "stride of the width, whole phases", "one group"])
def test_an_infinity_that_no_zero_of_a_matrix_multiplies_is_not_computed_again(name, monkeypatch):
    monkeypatch.delattr(group_products, "sum_windows")
    x, weight, settings, _ = layer(*LAYERS[name])
    x[:, :, 3, 3] = np.inf
    with np.errstate(invalid="ignore"):
        expected = reference.conv([x], weight, **{k: v for k, v in settings.items() if k != "method"})
    np.testing.assert_array_equal(cupyconv.conv(x, weight, **settings), expected)


def test_the_only_input_is_read_through_views_that_all_turns_share(monkeypatch):
    """To read a region takes several calls of Python, so the estimate counts them for other inputs only."""
    monkeypatch.delattr(Images, "read")
    x, weight, settings, expected = layer(*LAYERS["same"])
    assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")


def test_weights_whose_squares_are_too_large_are_right_too():
    x, weight, settings, expected = layer(*LAYERS["same"], "float32")
    result = cupyconv.conv(x, weight * np.float32(2) ** 100, **settings)
    assert_exact(result * np.float32(2) ** -100, expected, "float32")


@pytest.mark.parametrize("name", LAYERS)
def test_the_memory_may_have_held_anything_before(name):
    """Other loops use the same memory: elements that nothing writes in this call are not read, or set to zero."""
    x, weight, settings, expected = layer(*LAYERS[name])
    assert_memory_does_not_matter(x, weight, settings, expected)


@pytest.mark.parametrize("limit", [40_000, 20_000, 12_000])
def test_the_limit_holds(limit):
    x, weight, settings, expected = layer(2, 12, 12, (15, 14), (3, 3), dict(padding=1))
    with cupyconv.options(workspace_limit=limit, threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, **settings)
        assert plan.workspace_bytes <= limit
        assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")
    with cupyconv.options(workspace_limit=200), pytest.raises(ValueError, match="bytes of workspace, the limit is 200"):
        cupyconv.conv(x, weight, **settings)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("settings", [dict(padding=1), dict(stride=2, padding=1), dict()], ids=str)
def test_the_smallest_block_is_a_pixel_of_one_group(settings, threads):
    """The bytes that a refusal names are enough for this block, and one byte less is refused."""
    problem = problem_of(2, 4, 4, (9, 90), (3, 3), settings, threads=threads)
    limit, words, ((loop,), nbytes) = smallest_block(ShiftedRows.loops, problem, 300)
    assert words.startswith(f"the smallest block needs {limit:,} bytes")
    assert loop.block == (1, 1, 1, 1) and loop.several == 1
    assert sum(nbytes.values()) + 2 * Plan.ALIGNMENT <= limit
    with pytest.raises(NotApplicable, match="the smallest block needs"):
        ShiftedRows.loops(replace(problem, workspace_limit=limit - 1))


def test_a_long_row_is_cut_and_threads_share_its_parts(monkeypatch):
    """Views are made for the first part, the last one, and once for all parts between."""
    made, of_loop = [], ShiftedRows._steps
    monkeypatch.setattr(ShiftedRows, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    x, weight, settings, expected = layer(1, 3, 2, (30_000,), (7,), dict(groups=1, padding=3))
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
        for _ in range(3):
            assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")
    assert loop.threads == 2 and loop.blocks > 3
    assert 3 <= len(made) <= 2 * 3


@pytest.mark.parametrize(
    "size, kernel, settings, applies",
    [
        ((7, 6), (3, 3), dict(padding=1), True),
        ((7, 6), (3, 1), dict(padding=(1, 0)), False),  # nothing to add
        ((7, 6), (1, 3), dict(), True),
        ((7, 6), (3, 3), dict(padding=1, padding_mode="edge"), False),
        ((7, 6), (3, 3), dict(padding_mode="edge", padding="valid"), True),
        ((70, 6), (64, 2), dict(), True),
        ((70, 6), (65, 2), dict(), False),
        ((1, 2000), (1, 1024), dict(), True),
        ((1, 2000), (1, 1025), dict(), False),
        ((70, 6), (32, 2), dict(stride=(1, 2)), True),
        ((70, 6), (32, 2), dict(stride=(1, 3)), False),
    ],
    ids=str,
)
def test_it_is_for_lines_that_are_added_and_for_zeros_at_their_ends(size, kernel, settings, applies):
    assert bool(ShiftedRows.applies(problem_of(1, 4, 4, size, kernel, settings))) is applies


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("value", [1, np.nan])
@pytest.mark.parametrize("settings", [{}, dict(activation="gelu"), dict(dtype="float16")], ids=str)
def test_it_takes_the_memory_that_it_says(name, settings, value):
    """A plan counts at least as many bytes as a run allocates, also where sums are computed again, and not much more."""
    settings, (batch, channels, outputs, size, kernel, own) = dict(settings), LAYERS[name]
    dtype = settings.pop("dtype", "float32")
    size = [8 * n for n in size] if len(size) == 2 else [3 * n for n in size]
    own = dict(own, groups=8 * own.get("groups", channels))
    x, weight, settings, _ = layer(batch, 8 * channels, 8 * outputs, size, kernel, own | settings, dtype)
    vectors = np.ones(x.shape[1], dtype)
    weight.flat[weight.size // 2] = value
    settings |= dict(prologue=(vectors, vectors, "relu"))
    out = cupyconv.conv(x, weight, **settings)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, out=out, **settings)
        cupyconv.conv(x, weight, out=out, **settings)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, out=out, **settings))
    assert plan.workspace_bytes / 3 <= peak <= plan.workspace_bytes + 100_000


@pytest.mark.parametrize("name", LAYERS)
def test_windows_that_are_summed_alone_are_counted(name, monkeypatch):
    seen, of_windows = [], group_products.sum_windows

    def sum_windows(geometry, image, weight, sums):
        seen.append((image.nbytes, weight.nbytes))
        of_windows(geometry, image, weight, sums)

    monkeypatch.setattr(group_products, "sum_windows", sum_windows)
    monkeypatch.setattr(group_products, "PIXELS_ALONE", 20)
    x, weight, settings, _ = layer(*LAYERS[name])
    x[...] = weight[...] = np.nan
    (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
    cupyconv.conv(x, weight, **settings)
    assert loop._alone_bytes == sum(map(max, zip(*seen))) or (loop._is_single and not loop._has_gaps and not seen)


def test_copies_that_a_prologue_writes_twice_are_counted():
    problem = problem_of(*LAYERS["groups of several channels"])
    twice = replace(problem, prologue=Prologue(activation=Activation("relu", 1)))
    plain, other = (ShiftedRows(each, (1, 1, 7, 6)) for each in (problem, twice))
    assert other._lines_bytes[0] - plain._lines_bytes[0] == 4 * 2 * 7 * 6  # two channels
    tile = prod(tile_shape(problem.geometry, plain._alone[0] * 2, plain._alone[1]))
    assert other._alone_bytes - plain._alone_bytes == 4 * tile


@pytest.mark.parametrize("refused", ["", *shifted_rows.BUFFERS])
@pytest.mark.parametrize("name", ["samples", "no padding"])
def test_views_are_kept_only_with_all_the_memory_that_they_view(name, refused, monkeypatch):
    """Views of memory for which the budget has no room would keep it nevertheless."""
    made, asked, of_loop, of_scratch = [], [""], ShiftedRows._steps, Scratch.array

    def array(self, name, shape, dtype=None):
        asked.append(name)
        return of_scratch(self, name, shape, dtype)

    cupyconv.clear_caches()
    monkeypatch.setattr(ShiftedRows, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    monkeypatch.setattr(backend.CachedScratch, "array", array)
    monkeypatch.setattr(backend.CachedScratch, "_may_keep", lambda self, buffer: asked[-1] != refused)
    x, weight, settings, _ = layer(*LAYERS[name])
    for _ in range(3):
        cupyconv.conv(x, weight, **settings)
    assert len(made) == (3 if refused in asked[1:] else 1)
    cupyconv.clear_caches()


class Seen(Scratch):
    """Scratch memory that remembers the bytes of its arrays."""

    def __init__(self, dtype):
        super().__init__(dtype, 1)
        self.sizes = {}

    def array(self, name, shape, dtype=None):
        array = super().array(name, shape, dtype)
        self.sizes[name] = array.nbytes
        return array


def steps_of(loop):
    """Return the views for a loop's first block, and the bytes of their arrays by name."""
    block, scratch = next(iter(loop.each_block)), Seen(loop.x_dtype)
    regions = block.lines(loop._row(block.size[3]), loop._taps.shifts[0] if loop._is_single else None)
    return loop._steps(scratch, regions, block.sums_shape), scratch.sizes


@pytest.mark.parametrize("name", LAYERS)
def test_lines_that_are_read_and_other_memory_are_counted_apart(name):
    """A fused chain has one layer's lines in memory next to another layer's."""
    problem = problem_of(*LAYERS[name])
    loop = ShiftedRows(problem, (1, *problem.geometry.out_size))
    steps, sizes = steps_of(loop)
    assert loop.workspace - loop.extra_bytes == sizes["lines read"] > 0
    assert loop.largest_product >= max(place[0].size for row in steps.turns[loop.several].places for place in row)
    sums_and_windows = super(ShiftedRows, loop).workspace
    assert loop.extra_bytes - sums_and_windows == sizes["lines"] + sizes.get("line sums", 0)


@pytest.mark.parametrize("name", LAYERS)
def test_the_bytes_of_a_weight_are_those_of_its_matrices(name):
    problem = problem_of(*LAYERS[name])
    geometry = problem.geometry
    weight = np.ones((geometry.groups, geometry.group_outputs, geometry.reduction), "float32")
    matrices = ShiftedRows(problem, (1, *geometry.out_size)).arranged(weight)
    assert matrices.nbytes == ShiftedRows.weight_bytes(problem)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lines_of_two_groups_stay_in_cache(dtype):
    problem = problem_of(1, 8, 6, (5, 9_000), (3, 7), dict(groups=2), dtype)
    pixels, _ = ShiftedRows.aim(problem)
    nbytes = 2 * sum(ShiftedRows(problem, (1, 1, 1, pixels))._lines_bytes)
    assert nbytes == pytest.approx(lines.LINES_BLOCK, rel=0.02)
    (loop,) = ShiftedRows.loops(problem)[0]
    assert loop.blocks > 1 and loop.several == 2


@pytest.mark.parametrize(
    "taps, stride, gap, before, shifts",
    [
        (3, 1, 1, 1, [-1, 0, 1]),
        (3, 1, 3, 1, [-1, 2, 5]),
        (3, 1, 4, 2, [-2, 2, 6]),
        (3, 2, 4, 3, [-2, 0, 2]),
        (3, 2, 1, 1, [-1, 0]),
        (2, 3, 1, 0, [0]),
    ],
)
def test_taps_have_no_lines_that_none_of_them_adds(taps, stride, gap, before, shifts):
    of_width = lines.taps_of(taps, stride, gap, before)
    assert list(of_width.shifts) == shifts
    for tap, (number, phase) in enumerate(zip(of_width.numbers, of_width.phases)):
        assert shifts[number] * stride + phase == tap * gap - before


@pytest.mark.parametrize("name", LAYERS)
def test_the_estimated_time_counts_all_that_a_run_does(name, monkeypatch):
    """It counts the elements of lines that are copied, computed and added, of zeros, and of sums that are copied."""
    problem = problem_of(*LAYERS[name])
    geometry = problem.geometry
    loop = ShiftedRows(problem, (geometry.batch, *geometry.out_size))
    steps, _ = steps_of(loop)
    turn = steps.turns[loop.several]
    read, written = (
        sum(line.size for line in turn.reading.lines),
        sum(place.size for row in turn.places for place in row),
    )
    times = geometry.groups // loop.several
    assert loop.several * times == geometry.groups

    def work(**seconds):
        for constant in ("COPY", "APART", "WRITE", "ADD", "BEGIN", "ARRANGE"):
            monkeypatch.setattr(shifted_rows, constant, seconds.get(constant, 0))
        for function in ("left_out", "copied", "product"):
            monkeypatch.setattr(shifted_rows.cost, function, seconds.get(function, lambda *given: 0))
        return loop.products_work

    loop._parts = None
    is_apart = geometry.stride[2] > 1
    assert work(COPY=1) == (not is_apart) * times * read
    assert work(APART=1) == is_apart * times * read
    assert work(WRITE=1) == times * written
    added = times * sum(run.size for run in turn.runs)
    assert work(ADD=1) == times * written if loop._is_single else added  # with the elements beyond a single row
    assert work(BEGIN=1) == geometry.out_channels * geometry.batch
    assert work(ARRANGE=1) == np.prod(problem.weight.shape)
    assert work(left_out=lambda elements: elements) == times * sum(zeros.size for zeros in turn.zeros)
    copied = 0 if turn.pixels is None else times * turn.pixels.size
    assert work(copied=lambda elements, run, dtype: elements) == copied
    multiplied = times * sum(place.size for row in turn.places for place in row) * loop._reads
    assert work(product=lambda rows, reduction, columns, problem: rows * reduction * columns) == multiplied
    assert work() == 0
    loop._parts = shifted_rows.cost.Parts(2, 16, 42, 7.0)
    assert work() == 7 * geometry.groups
    assert all(zeros.size for zeros in turn.zeros)  # each takes a call
    monkeypatch.setattr(shifted_rows, "CACHE_BLOCK", sum(loop._lines_bytes) - 1)
    loop._parts = None
    assert work(COPY=1) == (not is_apart) * times * read * shifted_rows.cost.FARTHER


@pytest.mark.parametrize("dtype, times", [("float64", 2), ("complex64", 4)])
def test_other_dtypes_take_as_long_as_their_bytes_or_their_multiply_adds(dtype, times, monkeypatch):
    for constant in ("COPY", "BEGIN", "ARRANGE"):
        monkeypatch.setattr(shifted_rows, constant, 0)
    for function in ("left_out", "product"):
        monkeypatch.setattr(shifted_rows.cost, function, lambda *given: 0)
    one, other = (ShiftedRows(problem_of(*LAYERS["same"], dtype), (1, 1, 7, 6)) for dtype in ("float32", dtype))
    one._parts = other._parts = None
    assert other.products_work == pytest.approx(times * one.products_work)


def test_a_sum_is_cut_into_products_that_one_thread_of_blas_computes(monkeypatch):
    monkeypatch.setattr(shifted_rows, "ONE_THREAD", 30)
    problem = problem_of(*LAYERS["samples"])
    loop = ShiftedRows(problem, (3, *problem.geometry.out_size))
    steps, _ = steps_of(loop)
    runs = steps.turns[loop.several].runs
    assert all(run.shape[3] * run.shape[4] <= 30 for run in runs)
    assert sum(run.shape[4] for run in runs) == 7 * 6 and len(runs) == 5
    before = loop.products_work
    monkeypatch.setattr(shifted_rows, "BEGIN", shifted_rows.BEGIN + 1)
    assert loop.products_work - before == pytest.approx(4 * 3 * len(runs))  # outputs and samples


@pytest.mark.parametrize("name", LAYERS)
def test_the_estimated_calls_count_lines_and_zeros_of_each_turn(name, monkeypatch):
    monkeypatch.setattr(shifted_rows, "QUICK", 1)
    monkeypatch.setattr(shifted_rows, "LINES_BLOCK", 1)
    problem = problem_of(*LAYERS[name])
    loop = ShiftedRows(problem, (1, *problem.geometry.out_size))
    steps, _ = steps_of(loop)
    (turn,) = steps.turns.values()
    of_turn = len(turn.reading.lines) + len(turn.zeros)
    per_block = loop.calls / loop.turns - loop.turn_calls
    assert loop.several == 1 and per_block > loop.part * of_turn
    monkeypatch.setattr(shifted_rows, "QUICK", 2)
    more = loop.calls / loop.turns - loop.turn_calls - per_block
    assert more == loop.part * (of_turn + 3)  # two products and a copy


def test_channels_of_a_result_with_other_strides_are_computed_in_parts():
    """Their sums are an array of their own, which stays in cache."""
    x = np.ones((1, 90, 90, 96), np.float32).transpose(0, 3, 1, 2)
    weight = np.ones((96, 1, 3, 3), np.float32)
    (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=96, method="gemm").steps
    assert loop.part < 96 and depthwise.CACHE_BLOCK / 2 <= loop.part * loop.sums_bytes // 96 <= depthwise.CACHE_BLOCK
    first_last = np.ascontiguousarray(x)
    (loop,) = cupyconv.explain(cupyconv.conv, first_last, weight, padding=1, groups=96, method="gemm").steps
    assert loop.part == 96
    settings = dict(padding=1, groups=96, method="gemm")
    assert np.array_equal(cupyconv.conv(x, weight, **settings), cupyconv.conv(first_last, weight, **settings))


@pytest.mark.parametrize("batch, channels, outputs", [(2, 0, 0), (0, 4, 4), (2, 4, 0)])
def test_layers_without_samples_channels_or_outputs(batch, channels, outputs):
    x, weight = np.ones((batch, channels, 5, 6), np.float32), np.ones((outputs, 1, 3, 3), np.float32)
    if not channels:
        weight = np.ones((0, 0, 3, 3), np.float32)
    settings = dict(padding=1, groups=max(1, channels), method="auto")
    assert all(loop.threads == 1 for loop in cupyconv.explain(cupyconv.conv, x, weight, **settings).steps)
    result = cupyconv.conv(x, weight, **settings)
    assert result.shape == (batch, outputs, 5, 6)


@pytest.mark.parametrize(
    "shape, groups, kernel, is_shifted",
    [
        ((4, 256, 14, 14), 32, 3, True),
        ((2, 128, 28, 28), 16, 3, True),
        ((1, 128, 56, 56), 32, 3, True),
        ((1, 128, 28, 28), 32, 3, True),
        ((1, 64, 28, 28), 2, 3, False),
    ],
)
def test_groups_of_few_channels_are_shifted(shape, groups, kernel, is_shifted, monkeypatch):
    """Shifted rows took 0.5 to 0.7 of the time of shifted columns for the first four layers."""
    monkeypatch.undo()
    forget_calls()
    x, weight = array(*shape), array(shape[1], shape[1] // groups, kernel, kernel)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same", groups=groups)
    assert (type(plan.steps[0]) is ShiftedRows) is is_shifted


@pytest.mark.parametrize(
    "shape, outputs, kernel, dtype, is_shifted",
    [
        ((1, 16, 20_000), 1, (9,), "float32", True),
        ((1, 128, 3_000), 16, (15,), "float64", True),
        ((1, 64, 56, 56), 4, (3, 3), "float32", True),
        ((1, 64, 56, 56), 64, (3, 3), "float32", False),
        ((1, 16, 56, 56), 64, (3, 3), "float64", False),
    ],
)
def test_few_outputs_of_many_channels_are_shifted(shape, outputs, kernel, dtype, is_shifted, monkeypatch):
    """Shifted rows took 0.35, 0.5 and 0.7 of the time of columns, and of MEC, for the first three layers."""
    monkeypatch.undo()
    forget_calls()
    x, weight = array(*shape, dtype=dtype), array(outputs, shape[1], *kernel, dtype=dtype)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same")
    assert (type(plan.steps[0]) is ShiftedRows) is is_shifted


def test_lines_of_several_inputs_are_priced_by_their_calls():
    """A line of each input is read by calls of its own, which take longer than the products of few channels."""
    size, settings = (64, 64, 64), dict(padding=1, groups=1)
    one = problem_of(1, 24, 1, size, (3, 3, 3), settings)
    xs = [array(1, 8, *size) for _ in range(3)]
    three = checked_call(cupyconv.conv, xs, array(1, 24, 3, 3, 3), **settings).problem
    three = replace(three, machine=one.machine, workspace_limit=one.workspace_limit)
    (alone,), (together,) = ShiftedRows.loops(one)[0], ShiftedRows.loops(three)[0]
    assert alone.block == together.block and alone.work == together.work
    assert together.calls - alone.calls == pytest.approx(together.turns * lines.REGION_CALLS * 3 * 9)
