"""Products of block-Toeplitz matrices: strides, dilations, row ends, blocks and windows, against the naive reference."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import reference
from integer_arrays import integers
from not_numbers import assert_memory_does_not_matter, assert_they_land_where_defined
from peak_memory import OF_EINSUM, peak_bytes
from plans import array
from refusals import smallest_block
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import backend, block_toeplitz, convolution, group_products
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.block_toeplitz import BlockToeplitz
from cupyconv.numpy.choice import Method
from cupyconv.numpy.convolution import temporaries
from cupyconv.numpy.windows import tile_shape
from cupyconv.problem.activations import Activation
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import HostModel, NotApplicable, Prologue

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "same": (1, 3, 2, (61,), (5,), dict(padding=2)),
    "no padding": (2, 2, 5, (40,), (4,), dict()),
    "padding on one side": (1, 3, 4, (33,), (3,), dict(padding=((4, 0),))),
    "more padding than the image": (1, 2, 2, (5,), (3,), dict(padding=((9, 12),))),
    "even kernel": (2, 2, 3, (50,), (8,), dict(padding=3)),
    "one output": (2, 5, 1, (50,), (2,), dict()),
    "one pixel": (3, 4, 2, (6,), (6,), dict()),
    "stride": (2, 3, 4, (61,), (5,), dict(stride=2, padding=2)),
    "stride beyond the kernel": (1, 3, 4, (61,), (2,), dict(stride=5, padding=1)),
    "dilation": (1, 3, 4, (61,), (4,), dict(dilation=3, padding="same")),
    "stride and dilation": (2, 2, 3, (80,), (3,), dict(stride=3, dilation=4, padding=((5, 1),))),
    "rows": (2, 3, 4, (5, 17), (1, 4), dict(padding=(0, 2))),
    "rows of padding": (1, 3, 2, (4, 17), (1, 3), dict(padding=(2, 1))),
    "rows, stride and dilation": (2, 2, 3, (3, 31), (1, 3), dict(stride=(1, 2), dilation=(1, 3))),
    "rows of 3-D": (1, 2, 3, (2, 3, 14), (1, 1, 3), dict(padding="same")),
    "reflected": (1, 3, 2, (20,), (5,), dict(padding=7, padding_mode="reflect")),
    "wrapped": (2, 2, 2, (3, 9), (1, 4), dict(padding=(1, 20), padding_mode="wrap")),
}


@pytest.fixture(autouse=True)
def block_toeplitz_only(monkeypatch):
    for table in (convolution.METHODS, convolution.SHIFTED, convolution.MERGING):
        monkeypatch.setitem(table, "gemm", Method((BlockToeplitz,)))
    forget_calls()
    yield
    forget_calls()


def layer(batch, channels, outputs, size, kernel, settings, dtype="float32"):
    """Return a layer's arrays, its settings, and its result."""
    x, weight = integers(batch, channels, *size, dtype=dtype), integers(outputs, channels, *kernel, dtype=dtype, seed=1)
    return x, weight, dict(settings, method="gemm"), reference.conv([x], weight, **settings)


def channels_last(x):
    """Return a copy with the same axes that is contiguous along the channels."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


def problem_of(batch, channels, outputs, size, kernel, settings, dtype="float32", threads=1, limit=16 << 20):
    """Return the problem of a layer of `LAYERS`, without arrays."""
    x, weight = array(batch, channels, *size, dtype=dtype), array(outputs, channels, *kernel, dtype=dtype)
    problem = checked_call(cupyconv.conv, x, weight, **settings).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


@pytest.mark.parametrize("block", [512 << 10, 2_000, 1], ids=["whole", "parts", "pixels"])
@pytest.mark.parametrize("length", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, dtype, length, block, monkeypatch):
    monkeypatch.setattr(block_toeplitz, "LINE_BLOCK", block)
    monkeypatch.setattr(block_toeplitz, "LENGTHS", (1, length))
    monkeypatch.setattr(BlockToeplitz, "_product", lambda loop, windows, outputs: 1e-6)  # the longest takes the least
    x, weight, settings, expected = layer(*LAYERS[name], dtype)
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
        assert type(loop) is BlockToeplitz and loop.outputs == (length if length <= expected.shape[-1] else 1)
        assert_exact(cupyconv.conv(x, weight, **settings), expected, dtype)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", ["same", "stride", "rows", "reflected"])
def test_bias_residual_activation_prologue_and_several_inputs(name, last):
    x, weight, settings, _ = layer(*LAYERS[name])
    rng = np.random.default_rng(1)
    scale, shift = (rng.integers(-2, 3, x.shape[1]).astype(np.float32) for _ in range(2))
    bias, own = (
        rng.integers(-2, 3, len(weight)).astype(np.float32),
        {k: v for k, v in settings.items() if k != "method"},
    )
    per_channel = (slice(None), *(None,) * (x.ndim - 2))
    read = np.maximum(x * scale[per_channel] + shift[per_channel], 0)
    y = reference.conv([read], weight, **own)
    residual = rng.integers(-3, 4, y.shape).astype(np.float32)
    x = channels_last(x) if last else x
    given = settings | dict(prologue=(scale, shift, "relu"))
    assert_exact(cupyconv.conv(x, weight, **given), y, "float32")
    expected = np.maximum(y + bias[per_channel] + residual, 0)
    actual = cupyconv.conv([x[:, :1], x[:, 1:]], weight, bias, residual=residual, activation="relu", **given)
    assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", LAYERS)
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name, value, where, last):
    """Zeros of the matrix would spread them to the neighbouring outputs of a window."""
    x, weight, settings, _ = layer(*LAYERS[name])
    x = channels_last(x) if last else x
    assert_they_land_where_defined(x, weight, settings, where, value)


@pytest.mark.parametrize("name", LAYERS)
def test_finite_sums_are_not_computed_again(name, monkeypatch):
    """Elements of the memory that belong to no pixel are zeros, even if they were not numbers before."""
    monkeypatch.delattr(group_products, "sum_windows")
    x, weight, settings, expected = layer(*LAYERS[name])
    assert_memory_does_not_matter(x, weight, settings, expected)


@pytest.mark.parametrize(
    "size, kernel, settings, applies",
    [
        ((60,), (3,), dict(), True),
        ((60,), (1,), dict(), False),
        ((7, 6), (1, 3), dict(), True),
        ((7, 6), (3, 1), dict(), False),
        ((7, 6), (2, 3), dict(), False),  # a second tap would need a second line
        ((7, 6), (1, 3), dict(stride=(2, 1)), False),  # rows between those that are read
        ((7, 6), (1, 3), dict(stride=(1, 2), padding=(1, 2), padding_mode="edge"), True),
        ((7, 6), (1, 3), dict(groups=2), False),
    ],
    ids=str,
)
def test_it_is_for_taps_along_the_width(size, kernel, settings, applies):
    groups = settings.get("groups", 1)
    x, weight = array(1, 4, *size), array(4, 4 // groups, *kernel)
    problem = checked_call(cupyconv.conv, x, weight, **settings).problem
    assert BlockToeplitz.applies(problem) is applies


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_smallest_block_is_a_pixel(name, threads):
    """The bytes that a refusal names are enough for this block, and one byte less is refused."""
    problem = problem_of(*LAYERS[name], threads=threads)
    limit, words, ((loop,), nbytes) = smallest_block(BlockToeplitz.loops, problem, 100)
    assert words.startswith(f"the smallest block needs {limit:,} bytes")
    assert loop.block == (1, 1, 1, 1)
    assert sum(nbytes.values()) + 2 * Plan.ALIGNMENT <= limit
    with pytest.raises(NotApplicable, match="the smallest block needs"):
        BlockToeplitz.loops(replace(problem, workspace_limit=limit - 1))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("value", [1, np.nan])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(activation="gelu"),
        dict(dtype="float16"),
        dict(inputs=2),
        dict(last=True),
        dict(last=True, activation="mish"),
    ],
    ids=str,
)
def test_it_takes_the_memory_that_it_says(name, settings, value):
    """A plan counts at least as many bytes as a run allocates, also where sums are computed again, and not much more."""
    settings, (batch, channels, outputs, size, kernel, own) = dict(settings), LAYERS[name]
    dtype, inputs, last = settings.pop("dtype", "float32"), settings.pop("inputs", 1), settings.pop("last", False)
    size = *size[:-1], 40 * size[-1]
    x, weight, given, _ = layer(batch, 4 * channels, 4 * outputs, size, kernel, own | settings, dtype)
    x = channels_last(x) if last else x
    xs = np.split(x, inputs, axis=1) if inputs > 1 else x
    vectors = np.ones(x.shape[1], dtype)
    x.flat[x.size // 2] = value
    given |= dict(prologue=(vectors, vectors, "relu"))
    out = cupyconv.conv(xs, weight, **given)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, xs, weight, out=out, **given)
        cupyconv.conv(xs, weight, out=out, **given)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(xs, weight, out=out, **given))
    again = value != value  # only sums that are computed again need a tile, and einsum
    assert plan.workspace_bytes / (3 if again else 4) <= peak <= plan.workspace_bytes + 100_000 + OF_EINSUM * again


class Seen(Scratch):
    """Scratch memory that notes the bytes of its arrays."""

    def __init__(self, dtype):
        super().__init__(dtype, 1)
        self.sizes = {}

    def array(self, name, shape, dtype=None):
        array = super().array(name, shape, dtype)
        self.sizes[name] = array.nbytes
        return array


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_line_and_other_memory_are_counted_apart(name, inputs):
    """A fused chain has one layer's line in memory next to another layer's."""
    batch, channels, *rest = LAYERS[name]
    problem = problem_of(batch, 3 * channels, *rest)
    if inputs > 1:
        size, kernel, settings = rest[1:]
        xs = [array(batch, channels, *size) for _ in range(3)]
        problem = replace(
            checked_call(cupyconv.conv, xs, array(rest[0], 3 * channels, *kernel), **settings).problem,
            machine=problem.machine,
        )
    loop, scratch = BlockToeplitz(problem, (1, *problem.geometry.out_size)), Seen(np.dtype("float32"))
    steps = loop._steps(scratch, loop.block)
    assert scratch.sizes["line"] == loop.workspace - loop.extra_bytes == 4 * loop._elements[0]
    assert scratch.sizes["products"] == 4 * loop._elements[1]
    assert scratch.sizes.get("tile", 0) == 4 * loop._tile_elements * (inputs > 1)
    copies = temporaries(problem.geometry, problem.prologue) * 4 * loop._tile_elements
    assert loop._group_bytes == sum(scratch.sizes.values()) + copies
    assert (steps.tile is not None) is (inputs > 1) and steps.image.size == loop._tile_elements
    assert loop.largest_product == prod(steps.windows.shape[1:]) * steps.products.shape[2]
    assert sum(elements.size for elements in steps.beyond) == loop._elements[0] - loop._tile_elements
    # Windows of one matrix do not overlap, there are as few matrices as that takes, and the line ends with the last one.
    matrices, move = len(steps.windows), loop._move
    assert (matrices - 1) * move < loop._reach <= matrices * move
    end = sum((n - 1) * step for n, step in zip(steps.windows.shape, steps.windows.strides)) + steps.windows.itemsize
    assert scratch.sizes["line"] == max(end, scratch.sizes["line"] - steps.beyond[1].nbytes)


def test_a_result_with_channels_last_is_written_once():
    """The products are its sums: nothing else is allocated for them, and no price is paid to move the channels."""
    x, weight, settings, _ = layer(*LAYERS["rows"])
    first, last = (
        replace(checked_call(cupyconv.conv, each, weight, **settings).problem, machine=HostModel(1))
        for each in (x, channels_last(x))
    )
    first, last = (BlockToeplitz(problem, (1, 1, 5, 17)) for problem in (first, last))
    assert first._is_last is False and last._is_last is True and not last.in_place
    assert last.sums_bytes == 4 * 4 * 5 * 17 and first.sums_bytes == 0
    moved = first.products_work - last.products_work
    assert moved == pytest.approx(
        first._elements[1] * (block_toeplitz.WRITE + 4 * block_toeplitz.WRITE_APART) * first.blocks
    )
    assert last.work == last.products_work + last.store_work


def test_copies_that_a_prologue_writes_twice_are_counted():
    problem = problem_of(*LAYERS["rows"])
    twice = replace(problem, prologue=Prologue(activation=Activation("relu", 1)))
    plain, other = (BlockToeplitz(each, (1, 1, 5, 17)) for each in (problem, twice))
    assert other._group_bytes - plain._group_bytes == 4 * prod(tile_shape(problem.geometry, 3, plain.block))


@pytest.mark.parametrize("name", LAYERS)
def test_the_bytes_of_a_weight_are_those_of_its_matrix(name):
    problem = problem_of(*LAYERS[name])
    geometry = problem.geometry
    weight = integers(1, geometry.out_channels, geometry.reduction, dtype="float32")
    loop = BlockToeplitz(problem, (1, *geometry.out_size))
    matrix = loop.arranged(weight)
    assert matrix.nbytes == BlockToeplitz.weight_bytes(problem)
    np.testing.assert_array_equal(loop.kernels(matrix).reshape(weight.shape), weight)


@pytest.mark.parametrize("refused", ["", *block_toeplitz.BUFFERS])
def test_views_are_kept_only_with_all_the_memory_that_they_view(refused, monkeypatch):
    """Views of memory for which the budget has no room would keep it nevertheless."""
    made, asked, of_loop, of_scratch = [], [""], BlockToeplitz._steps, Scratch.array

    def of_name(self, name, shape, dtype=None):
        asked.append(name)
        return of_scratch(self, name, shape, dtype)

    cupyconv.clear_caches()
    monkeypatch.setattr(BlockToeplitz, "_steps", lambda *arguments: made.append(arguments) or of_loop(*arguments))
    monkeypatch.setattr(backend.CachedScratch, "array", of_name)
    monkeypatch.setattr(backend.CachedScratch, "_may_keep", lambda self, buffer: asked[-1] != refused)
    x, weight, settings, _ = layer(*LAYERS["rows"])
    for _ in range(3):
        cupyconv.conv([x[:, :1], x[:, 1:]], weight, **settings)
    assert len(made) == (3 if refused else 1)
    cupyconv.clear_caches()


def test_a_long_row_is_cut_and_threads_share_its_parts():
    x, weight, settings, expected = layer(1, 8, 8, (60_000,), (7,), dict(padding=3))
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, **settings).steps
        assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")
    assert loop.threads == 2 and loop.blocks > 3
    assert block_toeplitz.LINE_BLOCK * 0.9 < loop._group_bytes < block_toeplitz.LINE_BLOCK * 1.02


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("channels, outputs, stride", [(8, 8, 1), (24, 6, 1), (6, 24, 1), (9, 9, 3), (12, 48, 2)])
def test_the_line_and_the_products_of_a_block_stay_in_cache(channels, outputs, stride, dtype):
    problem = problem_of(1, channels, outputs, (400_000,), (9,), dict(stride=stride), dtype)
    pixels, _ = BlockToeplitz.aim(problem)
    loop = BlockToeplitz(problem, (1, 1, 1, pixels))
    assert loop._group_bytes == pytest.approx(block_toeplitz.LINE_BLOCK, rel=0.02)


@pytest.mark.parametrize("limit", [60_000, 20_000, 8_000])
def test_the_limit_holds(limit):
    x, weight, settings, expected = layer(2, 8, 6, (3000,), (5,), dict(padding=2))
    with cupyconv.options(workspace_limit=limit, threads=1):
        assert cupyconv.explain(cupyconv.conv, x, weight, **settings).workspace_bytes <= limit
        assert_exact(cupyconv.conv(x, weight, **settings), expected, "float32")


def test_the_estimated_time_counts_what_a_run_does(monkeypatch):
    problem = problem_of(2, 3, 4, (61,), (5,), dict(stride=2, padding=2))
    loop, scratch = BlockToeplitz(problem, (2, 1, 1, 31)), Seen(np.dtype("float32"))
    steps = loop._steps(scratch, loop.block)

    def work(**seconds):  # of `loop`
        for constant in ("READ", "WRITE", "WRITE_APART", "BEGIN", "ARRANGE"):
            monkeypatch.setattr(block_toeplitz, constant, seconds.get(constant, 0))
        return loop.products_work

    (matrices, windows, reduction), columns = steps.windows.shape, steps.products.shape[2]
    products = matrices * block_toeplitz.cost.product(windows, reduction, columns, problem)
    assert work() == pytest.approx(products) and loop.tile_work == 0
    assert work(BEGIN=1) == pytest.approx(prod(steps.windows.shape[:2]))
    assert work(ARRANGE=1) == pytest.approx(loop.outputs * prod(problem.weight.shape))
    monkeypatch.setattr(block_toeplitz.cost, "product", lambda *given: 0)
    assert work(READ=1) == scratch.sizes["line"] // 4 == sum(e.size for e in steps.beyond) + steps.image.size
    assert work(WRITE=1) == steps.products.size
    assert work(WRITE_APART=1) == 4 * steps.products.size
    double = problem_of(2, 3, 4, (61,), (5,), dict(stride=2, padding=2), "float64")
    loop = replace(loop, problem=double)
    assert work(WRITE_APART=1) == 8 * loop._elements[1]
    monkeypatch.setattr(block_toeplitz, "FAR", 5)
    assert work(WRITE_APART=1) == 5 * loop._elements[1]


@pytest.mark.parametrize(
    "shape, outputs, kernel, dtype, takes",
    [
        ((1, 16, 100_000), 16, (15,), "float32", True),
        ((1, 8, 100_000), 8, (15,), "float64", True),
        ((1, 4, 50_000), 4, (31,), "float32", True),
        ((1, 64, 4_000), 64, (3,), "float32", False),
        ((1, 3, 20_000), 64, (3,), "float32", False),
        ((1, 100, 20_000), 1, (9,), "float32", False),
    ],
)
def test_long_signals_of_few_channels_take_it(shape, outputs, kernel, dtype, takes, monkeypatch):
    """For the first three layers it took 0.66, 0.45 and 0.41 of the time of columns or shifted rows."""
    monkeypatch.undo()
    forget_calls()
    x, weight = array(*shape, dtype=dtype), array(outputs, shape[1], *kernel, dtype=dtype)
    with cupyconv.options(threads=1, allow_fft=False, allow_winograd=False):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same")
    assert (type(plan.steps[0]) is BlockToeplitz) is takes


def test_moving_several_inputs_takes_the_time_of_a_copy():
    xs, weight = [array(1, 2, 50) for _ in range(2)], array(3, 4, 5)
    of_one = problem_of(1, 4, 3, (50,), (5,), dict(padding=2))
    of_two = replace(checked_call(cupyconv.conv, xs, weight, padding=2).problem, machine=HostModel(1))
    one, two = (BlockToeplitz(problem, (1, 1, 1, 25)) for problem in (of_one, of_two))
    copied = block_toeplitz.cost.copied(2 * 4 * (25 + 4), 25, "float32")
    assert one.tile_work == 0 and two.tile_work == pytest.approx(copied)
    assert two.work - one.work == pytest.approx(copied)


@pytest.mark.parametrize("batch, outputs", [(0, 4), (2, 0)])
def test_layers_without_samples_or_outputs(batch, outputs):
    x, weight = np.ones((batch, 3, 50), np.float32), np.ones((outputs, 3, 5), np.float32)
    assert cupyconv.conv(x, weight, method="gemm").shape == (batch, outputs, 46)


def test_several_inputs_take_it_too(monkeypatch):
    monkeypatch.undo()
    forget_calls()
    xs, weight = [array(1, 8, 50_000) for _ in range(2)], array(16, 16, 15)
    with cupyconv.options(threads=1, allow_fft=False):
        plan = cupyconv.explain(cupyconv.conv, xs, weight, padding="same")
    assert type(plan.steps[0]) is BlockToeplitz
