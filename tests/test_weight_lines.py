"""The weight gradient by lines: groups, strides, dilations, ends of rows and parts, against the naive reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_gradients
from integer_arrays import integers
from peak_memory import peak_bytes
from plans import array
from refusals import smallest_block
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import backend, lines, weight_gradient, weight_lines, weight_sums
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.choice import Method
from cupyconv.numpy.weight_lines import GradientLines
from cupyconv.numpy.windows import Images
from cupyconv.problem.activations import Activation
from cupyconv.problem.problems import HostModel, Prologue

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "depthwise": (1, 6, 6, (7, 6), (3, 3), dict(groups=6, padding=1)),
    "samples": (3, 4, 4, (7, 6), (3, 3), dict(groups=2, padding=1)),
    "outputs": (2, 4, 12, (7, 6), (3, 5), dict(groups=2, padding="same")),
    "parts of unequal size": (2, 10, 10, (7, 6), (3, 3), dict(groups=5, padding=1)),
    "one row": (2, 6, 4, (1, 21), (1, 5), dict(groups=2, padding=(0, 2))),
    "no padding": (2, 4, 4, (7, 9), (3, 4), dict(groups=2)),
    "no padding, as many rows as one is long": (2, 4, 4, (11, 9), (3, 4), dict(groups=2)),
    "padding on one side": (1, 4, 4, (7, 9), (3, 4), dict(groups=2, padding=((0, 2), (1, 0)))),
    "wide kernel": (2, 4, 4, (5, 4), (3, 7), dict(groups=2, padding="same")),
    "tall kernel": (1, 4, 4, (4, 9), (9, 2), dict(groups=2, padding="same")),
    "stride": (2, 4, 4, (9, 8), (3, 3), dict(groups=2, stride=2, padding=1)),
    "stride, odd": (1, 4, 4, (9, 11), (5, 3), dict(groups=2, stride=(3, 2), padding=(2, 1))),
    "stride, a line": (1, 4, 4, (9, 8), (3, 2), dict(groups=2, stride=2)),
    "stride beyond the kernel": (1, 4, 4, (9, 11), (2, 2), dict(groups=2, stride=3, padding=1)),
    "dilation": (1, 4, 4, (9, 11), (3, 3), dict(groups=2, dilation=(2, 3), padding="same")),
    "dilation beyond the image": (1, 4, 4, (4, 3), (3, 3), dict(groups=2, dilation=5, padding=5)),
    "stride and dilation": (1, 4, 4, (12, 21), (3, 4), dict(groups=2, stride=(1, 2), dilation=(1, 5), padding=(1, 8))),
    "a border that nothing reads": (1, 4, 4, (6, 7), (3, 3), dict(groups=2, padding_mode="reflect", padding="valid")),
    "3-D": (2, 4, 4, (4, 5, 3), (3, 2, 3), dict(groups=2, padding="same")),
    "3-D, stride": (1, 4, 8, (5, 4, 7), (3, 1, 3), dict(groups=2, stride=(2, 1, 2), padding=(1, 0, 1))),
}


@pytest.fixture(autouse=True)
def lines_only(monkeypatch):
    monkeypatch.setattr(weight_gradient, "METHODS", {"gemm": Method((GradientLines,))})
    forget_calls()
    yield
    forget_calls()


def layer(batch, channels, outputs, size, kernel, settings, dtype="float32"):
    """Return the arguments of a layer's weight gradient, and the gradient."""
    x = integers(batch, channels, *size, dtype=dtype)
    weight = np.zeros((outputs, channels // settings["groups"], *kernel), dtype)
    grad = integers(*cupyconv.conv(x, weight, method="direct", **settings).shape, dtype=dtype, seed=1)
    return (grad, x, kernel), settings, reference_gradients.conv_grad_weight(grad, x, kernel, **settings)


def result_shape(x, weight, settings):
    geometry = checked_call(cupyconv.conv, x, weight, **settings).problem.geometry
    return len(x), len(weight), *geometry.out_size[3 - geometry.rank :]


def problem_of(batch, channels, outputs, size, kernel, settings, dtype="float32", threads=1, limit=16 << 20):
    """Return the problem of a layer of `LAYERS`, without arrays."""
    x = array(batch, channels, *size, dtype=dtype)
    weight = array(outputs, channels // settings["groups"], *kernel, dtype=dtype)
    grad = array(*result_shape(x, weight, settings), dtype=dtype)
    problem = checked_call(cupyconv.conv_grad_weight, grad, x, kernel, **settings).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block, run", [(640 << 10, 1_000_000), (6_000, 1_000_000), (1, 100), (640 << 10, 60)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, dtype, block, run, threads, monkeypatch):
    """Blocks have all rows or one; a product has all elements of a line, or runs of some and a rest.

    Turns have all groups, or one, or some and fewer at last.
    """
    monkeypatch.setattr(weight_lines, "LINES_BLOCK", block)
    monkeypatch.setattr(GradientLines, "groups_bytes", block)
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run)
    monkeypatch.setattr(GradientLines, "smallest", 1)
    arguments, settings, expected = layer(*LAYERS[name], dtype)
    with cupyconv.options(threads=threads):
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, *arguments, **settings).steps
        assert loop.name == "lines"
        for _ in range(2):
            assert_exact(cupyconv.conv_grad_weight(*arguments, **settings), expected, dtype)


def test_threads_share_the_blocks_evenly(monkeypatch):
    shared = []

    def in_threads(threads, work, shares, holds_blas):
        taken = [(list(blocks), thread) for blocks, thread in shares]
        shared.extend(len(blocks) for blocks, _ in taken)
        return list(map(work, taken))

    monkeypatch.setattr(weight_sums, "in_threads", in_threads)
    monkeypatch.setattr(weight_lines, "LINES_BLOCK", 1)
    monkeypatch.setattr(GradientLines, "smallest", 1)
    arguments, settings, expected = layer(*LAYERS["depthwise"])
    with cupyconv.options(threads=2):
        assert_exact(cupyconv.conv_grad_weight(*arguments, **settings), expected, "float32")
    assert shared == [4, 3]  # rows


def test_a_line_is_cut_into_runs_of_any_length(monkeypatch):
    """Runs may leave any rest; views of their products are made once."""
    made, of_loop, rests = [], GradientLines._steps, set()
    monkeypatch.setattr(GradientLines, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    arguments, settings, expected = layer(1, 4, 4, (5, 7), (3, 3), dict(groups=2, padding=1))
    for run in range(1, 36):
        monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run * 6 * 6)
        forget_calls()
        cupyconv.clear_caches()
        with cupyconv.options(threads=1):
            (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, *arguments, **settings).steps
            assert loop.part * loop.group_bytes == sum(steps_of(loop)[1].values())
            made.clear()
            for _ in range(2):
                assert_exact(cupyconv.conv_grad_weight(*arguments, **settings), expected, "float32")
        rests.add(35 % loop._run)
        assert loop._sizes == (6, 6, 35) and loop._run <= run and len(made) == 1
    assert {0, 1, 2} < rests


@pytest.mark.parametrize("channels, outputs", [(0, 0), (0, 4), (4, 0)])
def test_layers_without_channels_or_outputs(channels, outputs):
    grad, x = np.ones((2, outputs, 7, 6), np.float32), np.ones((2, channels, 7, 6), np.float32)
    result = cupyconv.conv_grad_weight(grad, x, (3, 3), groups=2, padding=1)
    assert result.shape == (outputs, channels // 2, 3, 3)


def test_an_image_that_fits_is_one_block_however_long_its_rows_are():
    (loop, *_), _ = GradientLines.loops(problem_of(1, 4, 4, (4, 30), (3, 3), dict(groups=2, padding=1)))
    assert loop.block == (1, 1, 4, 30)


def test_of_long_rows_a_block_has_one_if_that_fits():
    problem = problem_of(2, 4, 4, (4, 40_000), (3, 3), dict(groups=2, padding=1))
    limit, words, ((loop, *_), _) = smallest_block(GradientLines.loops, problem, 100_000)
    assert words.startswith(f"a row needs {limit:,} bytes")
    assert loop.block == (1, 1, 1, 40_000)


def test_one_factor_may_be_complex():
    (grad, x, kernel), settings, _ = layer(*LAYERS["outputs"], "complex64")
    for one, other in ((grad.real, x), (grad, x.real)):
        expected = reference_gradients.conv_grad_weight(one, other, kernel, **settings)
        assert_exact(cupyconv.conv_grad_weight(one, other, kernel, **settings), expected, "complex64")


@pytest.mark.parametrize("name", ["samples", "stride", "outputs"])
def test_a_prologue_several_inputs_and_other_layouts(name):
    """`vjp` passes a prologue to the weight gradient; channels-last arrays have no rows that are one run."""
    (grad, x, kernel), settings, expected = layer(*LAYERS[name])
    last, grad_last = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, grad))
    for xs in (last, [x[:, :1], x[:, 1:]]):
        for g in (grad, grad_last):
            assert_exact(cupyconv.conv_grad_weight(g, xs, kernel, **settings), expected, "float32")
    rng = np.random.default_rng(1)
    scale, shift = (rng.integers(-2, 3, x.shape[1]).astype(np.float32) for _ in range(2))
    read = np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)
    weight = rng.integers(-2, 3, (grad.shape[1], x.shape[1] // settings["groups"], *kernel)).astype(np.float32)
    _, pullback = cupyconv.vjp(cupyconv.conv, x, weight, prologue=(scale, shift, "relu"), **settings)
    expected = reference_gradients.conv_grad_weight(grad, read, kernel, **settings)
    assert_exact(pullback(grad)[1], expected, "float32")


@pytest.mark.parametrize("where", ["x", "grad"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", LAYERS)
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name, value, where):
    """Zeros of the lines do not spread them to taps that do not read them, and times padding they are NaN."""
    (grad, x, kernel), settings, _ = layer(*LAYERS[name])
    spoilt = {"x": x, "grad": grad}[where]
    for place in (0, spoilt.size // 2, spoilt.size - 1):
        before, spoilt.flat[place] = spoilt.flat[place], value
        with np.errstate(invalid="ignore"):
            expected = reference_gradients.conv_grad_weight(grad, x, kernel, **settings)
        np.testing.assert_array_equal(cupyconv.conv_grad_weight(grad, x, kernel, **settings), expected)
        spoilt.flat[place] = before


@pytest.mark.parametrize("name", LAYERS)
def test_finite_sums_are_not_computed_again(name, monkeypatch):
    monkeypatch.delattr(GradientLines, "_add_alone")
    arguments, settings, expected = layer(*LAYERS[name])
    assert_exact(cupyconv.conv_grad_weight(*arguments, **settings), expected, "float32")


@pytest.mark.parametrize("name", LAYERS)
def test_the_memory_may_have_held_anything_before(name):
    """Other loops use the same memory: elements that nothing writes in this call are not read, or set to zero."""
    cupyconv.clear_caches()
    arguments, settings, expected = layer(*LAYERS[name])
    for _ in range(3):
        np.testing.assert_array_equal(cupyconv.conv_grad_weight(*arguments, **settings), expected)
        for buffers in list(backend.cached_scratch(arguments[0].dtype)._all.values()):
            for key, memory in list(buffers.items()):
                if type(key) is str:
                    memory.fill(255)  # not a number
    cupyconv.clear_caches()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("settings", [dict(padding=1), dict(stride=2, padding=1), dict()], ids=str)
def test_the_smallest_block_is_a_row_of_one_group(settings, threads):
    """The bytes that a refusal names are enough for this block."""
    problem = problem_of(2, 4, 4, (9, 90), (3, 3), settings | dict(groups=2), threads=threads)
    limit, words, ((loop, *_), nbytes) = smallest_block(GradientLines.loops, problem, 3000)
    assert words.startswith(f"a row needs {limit:,} bytes")
    assert loop.block == (1, 1, 1, problem.geometry.out_size[2]) and loop.part == 1
    assert sum(nbytes.values()) <= limit


@pytest.mark.parametrize(
    "size, kernel, settings, applies",
    [
        ((7, 6), (3, 3), dict(padding=1), True),
        ((7, 6), (1, 3), dict(), True),
        ((7, 6), (3, 1), dict(padding=(1, 0)), False),  # nothing to shift
        ((7, 6), (3, 3), dict(padding=1, groups=1), False),
        ((7, 6), (3, 3), dict(padding=1, padding_mode="edge"), False),
        ((7, 6), (3, 3), dict(padding_mode="edge", padding="valid"), True),
        ((1, 2000), (1, 1024), dict(), True),
        ((1, 2000), (1, 1025), dict(), False),
        ((70, 6), (64, 2), dict(), True),
        ((70, 6), (65, 2), dict(), False),
        ((7, 6), (3, 3), dict(padding=2), True),
        ((7, 6), (3, 3), dict(padding=3), False),  # the first pixels read padding alone
        ((5, 6), (1, 2), dict(padding=(0, 5), dilation=(1, 10)), False),  # those in the middle do
        ((7, 6), (3, 3), dict(padding=((0, 0), (0, 3))), True),  # lines have zeros behind each row
    ],
    ids=str,
)
def test_it_is_for_groups_lines_and_pixels_with_a_tap_in_the_image(size, kernel, settings, applies):
    problem = problem_of(1, 4, 4, size, kernel, dict(groups=2) | settings)
    assert bool(GradientLines.applies(problem)) is applies


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [1, np.nan])
def test_it_takes_the_memory_that_it_says(name, dtype, value):
    """A plan counts at least as many bytes as a run allocates, also where sums are computed again."""
    batch, channels, outputs, size, kernel, settings = LAYERS[name]
    size = [8 * n for n in size] if len(size) == 2 else [3 * n for n in size]
    settings = dict(settings, groups=4 * settings["groups"])
    (grad, x, _), settings, _ = layer(batch, 4 * channels, 4 * outputs, size, kernel, settings, dtype)
    x.flat[x.size // 2] = value
    out = cupyconv.conv_grad_weight(grad, x, kernel, **settings)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, out=out, **settings)
        cupyconv.conv_grad_weight(grad, x, kernel, out=out, **settings)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv_grad_weight(grad, x, kernel, out=out, **settings))
    assert peak <= plan.workspace_bytes + 150_000


class Seen(Scratch):
    """Scratch memory that remembers the bytes of its arrays, in place of a run."""

    def __init__(self, dtype):
        super().__init__(dtype, 1)
        self.sizes = {}

    def scratch(self, name, shape):
        array = self.array(name, shape)
        self.sizes[name] = array.nbytes
        return array


def steps_of(loop):
    """Return the views for a loop's first block, and the bytes of their arrays by name."""
    block, run = next(iter(loop.each_block)), Seen(loop._dtype)
    is_line = loop._row == block.size[3]
    return loop._steps(run, block.lines(loop._row), block.size, is_line), run.sizes


@pytest.mark.parametrize("run", [1_000_000, 60], ids=["whole lines", "runs"])
@pytest.mark.parametrize("rows", [0, 1], ids=["all outputs", "an output"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_memory_of_lines_is_counted(name, rows, run, monkeypatch):
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run)
    problem = problem_of(*LAYERS[name])
    loop = GradientLines(problem, (1, *problem.geometry.out_size), rows=rows)
    steps, sizes = steps_of(loop)
    assert loop.part * loop.group_bytes == sum(sizes.values())
    one, other, _ = steps.turns[loop.part].products[0]
    assert loop.largest_product == one.shape[-2] * one.shape[-1] * other.shape[-1] > 0
    of_gradient, of_image, length = loop._sizes
    assert loop.largest_product <= run or (loop._run == length and of_gradient * of_image > run)


@pytest.mark.parametrize("name", LAYERS)
def test_windows_that_are_summed_alone_are_counted(name, monkeypatch):
    (grad, x, kernel), settings, _ = layer(*LAYERS[name])
    seen, of_images = [0], Images.tile
    monkeypatch.setattr(Images, "tile", lambda *given: seen.append(of_images(*given).nbytes) or of_images(*given))
    monkeypatch.setattr(weight_lines, "PIXELS_ALONE", 20)
    x[...] = np.nan
    with cupyconv.options(threads=1):
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, **settings).steps
        cupyconv.conv_grad_weight(grad, x, kernel, **settings)
    # As much again for what a prologue writes twice.
    assert loop.columns_bytes - loop.part * loop.group_bytes == 2 * max(seen) > 0


@pytest.mark.parametrize("name", ["samples", "3-D"])
def test_a_copy_that_a_prologue_writes_twice_is_counted(name):
    problem = problem_of(*LAYERS[name])
    twice = replace(problem, prologue=Prologue(activation=Activation("relu", 1)))
    plain, other = (GradientLines(each, (1, *each.geometry.out_size)) for each in (problem, twice))
    elements = problem.geometry.group_channels * plain._sizes[2]
    assert other.group_bytes - plain.group_bytes == elements * 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lines_of_a_group_fill_the_cache(dtype):
    problem = problem_of(1, 8, 6, (5, 9_000), (3, 7), dict(groups=2, padding=(1, 3)), dtype)
    pixels, _ = GradientLines.aim(problem)
    of_gradient, of_image, length = GradientLines(problem, (1, 1, 1, 9_000))._sizes
    assert length == 9_000
    nbytes = (of_gradient + of_image) * pixels * np.dtype(dtype).itemsize
    assert nbytes == pytest.approx(weight_lines.LINES_BLOCK, rel=0.01)


@pytest.mark.parametrize("run", [1_000_000, 60], ids=["whole lines", "runs"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_estimated_time_counts_all_that_a_run_does(name, run, monkeypatch):
    """It counts the elements of lines that are copied, read and multiplied, of zeros, and of the weight."""
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    problem = problem_of(*LAYERS[name])
    geometry = problem.geometry
    monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run)
    loop = GradientLines(problem, (geometry.batch, *geometry.out_size))
    steps, _ = steps_of(loop)
    turn = steps.turns[loop.part]
    times, is_apart = geometry.groups // loop.part, geometry.stride[2] > 1
    assert loop.part * times == geometry.groups
    of_gradient, of_image = (times * sum(factors[i].size for factors in turn.products) for i in range(2))

    def work(**seconds):
        for constant in ("COPY", "APART", "READ", "PACK", "BEGIN"):
            monkeypatch.setattr(weight_lines, constant, seconds.get(constant, 0))
        monkeypatch.setattr(weight_lines.cost, "MULTIPLY_ADD", seconds.get("MULTIPLY_ADD", 0))
        for function in ("left_out", "summed"):
            monkeypatch.setattr(weight_lines.cost, function, seconds.get(function, lambda *given: 0))
        return loop.products_work

    assert work(COPY=1) == of_gradient + (not is_apart) * of_image
    assert work(APART=1) == is_apart * of_image
    assert work(READ=1) == of_gradient + of_image
    assert work(PACK=1) == work() == 0
    assert work(BEGIN=1) == geometry.groups * (1 if turn.runs is None else turn.runs.shape[1])
    assert work(MULTIPLY_ADD=1) == times * sum(one.size * other.shape[-1] for one, other, _ in turn.products)
    weight = geometry.out_channels * geometry.reduction
    assert work(summed=lambda elements, run, dtype: elements) == weight
    assert work(summed=lambda elements, run, dtype: run) == geometry.groups * geometry.kernel[2]
    if loop._row == geometry.out_size[2] and loop._taps.reach <= loop._row:
        assert work(left_out=lambda elements: elements) == times * sum(zeros.size for zeros in turn.others)


@pytest.mark.parametrize("dtype, times, product", [("float64", 2, 2), ("complex64", 2, 4)])
def test_other_dtypes_take_as_long_as_their_bytes_and_their_multiply_adds(dtype, times, product, monkeypatch):
    """BLAS packs complex factors."""
    for function in ("left_out", "summed"):
        monkeypatch.setattr(weight_lines.cost, function, lambda *given: 0)
    loops = [GradientLines(problem_of(*LAYERS["outputs"], kind), (1, 1, 7, 6)) for kind in ("float32", dtype)]
    for loop in loops:
        monkeypatch.setitem(vars(loop), "_run", loop._sizes[2])

    def ratio(**seconds):
        for constant in ("COPY", "READ", "PACK", "BEGIN"):
            monkeypatch.setattr(weight_lines, constant, seconds.get(constant, 0))
        monkeypatch.setattr(weight_lines.cost, "MULTIPLY_ADD", seconds.get("MULTIPLY_ADD", 0))
        return loops[1].products_work / loops[0].products_work

    read = "PACK" if dtype == "complex64" else "READ"
    assert ratio(COPY=1) == times and ratio(MULTIPLY_ADD=1) == product and ratio(**{"READ": 1, read: 1}) == times
    assert ratio(BEGIN=1) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_the_estimated_calls_count_the_views_of_each_turn(name, monkeypatch):
    monkeypatch.setattr(weight_lines, "QUICK", 1)
    problem = problem_of(*LAYERS[name])
    loop = GradientLines(problem, (1, *problem.geometry.out_size))
    steps, _ = steps_of(loop)
    turn = steps.turns[loop.part]
    views = len(turn.reading.lines) + len(turn.shifted) + len(turn.others) + len(turn.taps)
    assert views <= loop.calls / loop.turns - loop.turn_calls <= 2 * views + problem.geometry.kernel[2]


def test_lines_of_several_inputs_are_priced_by_their_calls():
    (grad, x, kernel), settings, _ = layer(1, 4, 4, (7, 6), (3, 3), dict(groups=2, padding=1))
    problems = [
        checked_call(cupyconv.conv_grad_weight, grad, xs, kernel, **settings).problem
        for xs in (x, [x[:, :2], x[:, 2:]])
    ]
    one, two = (
        GradientLines(replace(problem, machine=HostModel(1), workspace_limit=1 << 20), (1, 1, 7, 6))
        for problem in problems
    )
    assert one.part == two.part
    assert two.calls - one.calls == pytest.approx(two.turns * lines.REGION_CALLS * 2 * 3)


@pytest.mark.parametrize("refused", ["", *weight_lines.BUFFERS])
@pytest.mark.parametrize("run", [1_000_000, 1_000])
@pytest.mark.parametrize("name", ["samples", "3-D"])
def test_views_are_kept_only_with_all_the_memory_that_they_view(name, run, refused, monkeypatch):
    """Views of memory for which the budget has no room would keep it nevertheless."""
    made, asked, of_loop, of_scratch = [], [""], GradientLines._steps, Scratch.array

    def array(self, name, shape, dtype=None):
        asked.append(name)
        return of_scratch(self, name, shape, dtype)

    cupyconv.clear_caches()
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run)
    monkeypatch.setattr(GradientLines, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    monkeypatch.setattr(backend.CachedScratch, "array", array)
    monkeypatch.setattr(backend.CachedScratch, "_may_keep", lambda self, buffer: asked[-1] != refused)
    arguments, settings, _ = layer(*LAYERS[name])
    with cupyconv.options(threads=1):
        for _ in range(3):
            cupyconv.conv_grad_weight(*arguments, **settings)
    assert len(made) == (3 if refused in asked[1:] else 1)
    cupyconv.clear_caches()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_some_outputs_at_a_time_take_the_memory_that_they_say(dtype):
    """If the sums of all outputs do not fit, each loop reads the gradient of its own outputs in place."""
    arguments, settings, expected = layer(2, 256, 1024, (9, 10), (3, 3), dict(groups=64, padding=1), dtype)
    out = np.empty(expected.shape, dtype)
    with cupyconv.options(threads=1, workspace_limit=280_000):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, *arguments, out=out, **settings)
        assert (len(plan.steps) > 1) == (dtype == "float16")
        cupyconv.conv_grad_weight(*arguments, out=out, **settings)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv_grad_weight(*arguments, out=out, **settings))
    assert peak <= plan.workspace_bytes + 150_000
    assert_exact(out, expected, dtype)


@pytest.mark.parametrize(
    "shape, groups, kernel, settings, is_lines",
    [
        ((2, 128, 28, 28), 16, (3, 3), dict(padding=1), True),
        ((4, 256, 14, 14), 32, (3, 3), dict(padding=1), True),
        ((1, 128, 56, 56), 32, (3, 3), dict(padding=1), True),
        ((1, 384, 14, 14), 384, (3, 3), dict(padding=1), True),
        ((4, 72, 56, 56), 72, (5, 5), dict(padding=2, stride=2), True),
        ((1, 64, 28, 28), 2, (3, 3), dict(padding=1), False),
        ((1, 512, 7, 7), 32, (3, 3), dict(padding=1), False),
    ],
)
def test_groups_of_few_channels_have_lines(shape, groups, kernel, settings, is_lines, monkeypatch):
    """Lines took 0.3 to 0.5 of the time of the others for groups of several channels, 0.7 of it for one channel."""
    monkeypatch.undo()
    forget_calls()
    x, weight = array(*shape), array(shape[1], shape[1] // groups, *kernel)
    grad = array(*result_shape(x, weight, dict(settings, groups=groups)))
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, groups=groups, **settings)
    assert (type(plan.steps[-1]) is GradientLines) is is_lines
