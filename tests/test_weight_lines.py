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
from cupyconv.numpy import backend, weight_gradient, weight_lines
from cupyconv.numpy.choice import Method
from cupyconv.numpy.weight_lines import GradientLines
from cupyconv.problem.problems import HostModel

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "depthwise": (1, 6, 6, (7, 6), (3, 3), dict(groups=6, padding=1)),
    "samples": (3, 4, 4, (7, 6), (3, 3), dict(groups=2, padding=1)),
    "outputs": (2, 4, 12, (7, 6), (3, 5), dict(groups=2, padding="same")),
    "parts of unequal size": (2, 10, 10, (7, 6), (3, 3), dict(groups=5, padding=1)),
    "one row": (2, 6, 4, (1, 21), (1, 5), dict(groups=2, padding=(0, 2))),
    "no padding": (2, 4, 4, (7, 9), (3, 4), dict(groups=2)),
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
    """Blocks have all rows or one; a product has all elements of a line, or runs of some and a rest."""
    monkeypatch.setattr(weight_lines, "LINES_BLOCK", block)
    monkeypatch.setattr(weight_lines, "MIN_RUN", 1)
    monkeypatch.setattr(weight_lines.cost, "SMALL_PRODUCT", run)
    monkeypatch.setattr(GradientLines, "smallest", 1)
    arguments, settings, expected = layer(*LAYERS[name], dtype)
    with cupyconv.options(threads=threads):
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, *arguments, **settings).steps
        assert loop.name == "lines"
        for _ in range(2):
            assert_exact(cupyconv.conv_grad_weight(*arguments, **settings), expected, dtype)


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
