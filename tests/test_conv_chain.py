"""`conv_chain` against the naive reference applied layer by layer, on every target."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import assume, given
from hypothesis import strategies as st
from peak_memory import OF_EINSUM, OF_OBJECTS, peak_bytes
from strategies import (
    ACTIVATIONS,
    DTYPES,
    EXACT_ACTIVATIONS,
    MAX_ORACLE_STEPS,
    ConvCase,
    absolute_values,
    bounded_sizes,
    conv_cases,
    padding_modes,
    paddings,
    partners,
    per_axis_ints,
    share_of_examples,
)
from targets import Target
from threadpoolctl import threadpool_limits
from tolerance import assert_exact, checked, compare, rounded, tolerance, widened

import cupyconv
from cupyconv import ConvLayer
from cupyconv.bench import tables
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import chain as chain_cuda
from cupyconv.cuda.plan.draft import Draft
from cupyconv.numpy import chain as chain_numpy
from cupyconv.numpy import chain_fused
from cupyconv.numpy.backend import cached_scratch, seconds_of
from cupyconv.numpy.chain import LayersLoop
from cupyconv.numpy.chain_fused import ChainLoop
from cupyconv.problem.plan import Address, Kernel, KernelLaunch, Plan, counted
from cupyconv.problem.problems import NotApplicable

#: Largest slope of an activation (hardswish): the factor by which it may enlarge an error of its argument.
STEEPEST = 1.5


# --- cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainCase:
    """A valid call of `conv_chain`: each layer is a convolution of the previous result."""

    layers: tuple[ConvCase, ...]

    def arrays(self, *, integer: bool) -> list[dict[str, Any]]:
        """Return the arrays of every layer; only the first layer's `x` is used, since the others read results."""
        return [layer.arrays(integer=integer) for layer in self.layers]

    def call(self, target: Target, arrays: list[dict[str, Any]]) -> tuple[Any, list[ConvLayer]]:
        all_views = [layer.views(plain, target.to_device, target.xp) for layer, plain in zip(self.layers, arrays)]
        layers = []
        for case, views in zip(self.layers, all_views):
            layers.append(ConvLayer(views["weight"], views["bias"], residual=views["residual"], **case.parameters))
        return all_views[0]["x"], layers

    def expected(self, arrays: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the result by the unfused definition, with each layer rounded to its dtype, and the allowed error."""
        x: Any = arrays[0]["x"]
        error: Any = [np.zeros(np.shape(part)) for part in x] if isinstance(x, list) else np.zeros(x.shape)
        for case, plain in zip(self.layers, arrays):
            now = {**plain, "x": x}
            y = reference.conv(**now, **case.parameters)
            spread = {"activation": None}
            passed_on = reference.conv(error, absolute_values(plain["weight"]), **{**case.parameters, **spread})
            error = tolerance(y, case.result_dtype, case.terms, case.magnitude(now)) + STEEPEST * passed_on
            x = rounded(y, case.result_dtype)
        return y, error

    def is_exact(self, arrays: list[dict[str, Any]]) -> bool:
        """Whether every result is exact in its dtype, and every sum in the accumulator."""
        x: Any = arrays[0]["x"]
        for case, plain in zip(self.layers, arrays):
            now = {**plain, "x": x}
            y = reference.conv(**now, **case.parameters)
            x = rounded(y, case.result_dtype)
            digits = {"float64": 2**53, "complex128": 2**53}.get(case.result_dtype.name, 2**24)
            # leaky_relu makes quarters, and quarters of quarters in the next layer.
            if (widened(x) != y).any() or 64 * np.max(case.magnitude(now), initial=0) > digits:
                return False
        return True


@st.composite
def chain_cases(
    draw: st.DrawFn, *, longest: int = 3, activations: tuple[Any, ...] = EXACT_ACTIVATIONS, **kinds: Any
) -> ChainCase:
    """Draw two or more layers, the first one from `conv_cases`.  Half of the chains are padded only with zeros."""
    last = draw(conv_cases(activations=activations, **kinds))
    zeros = draw(st.booleans())
    if zeros or not all(last.out_spatial):
        last = replace(last, padding_mode="constant")
    if not all(last.out_spatial):
        last = replace(last, padding="full")
    layers = [last]
    for _ in range(draw(st.integers(1, longest - 1))):
        rank = last.rank
        kernel = tuple(draw(bounded_sizes(rank, 4, 16)))
        stride, dilation, padding = (
            draw(per_axis_ints(rank, 1, 3)),
            draw(per_axis_ints(rank, 1, 3)),
            draw(paddings(rank)),
        )
        spans = [d * (k - 1) + 1 for d, k in zip(reference.per_axis(dilation, rank), kernel)]
        if not isinstance(padding, str) or padding == "valid":
            pairs = reference.padding_pairs(padding, [1] * rank, [1] * rank, [1] * rank, [1] * rank)
            if any(span > size + sum(pair) for span, size, pair in zip(spans, last.out_spatial, pairs)):
                padding = "full"
        groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if last.out_channels % g == 0]))
        dtype = last.result_dtype.name
        weight_dtype = draw(st.sampled_from(("", "", *partners(dtype, DTYPES))))
        complex_now = "complex" in dtype + weight_dtype
        last = ConvCase(
            batch=last.batch, channels=(last.out_channels,), out_channels=groups * draw(st.integers(1, 3)), spatial=tuple(last.out_spatial),
            kernel=kernel, stride=stride, dilation=dilation, padding=padding, groups=groups,
            weight_dtype=weight_dtype, activation=None if complex_now else draw(st.sampled_from(activations)),
            bias=draw(st.booleans()), residual=draw(st.booleans()), bare_x=True, dtype=dtype,
            weight_layout=draw(st.sampled_from(("c_order", "window", "reversed"))),
            out_layout=draw(st.sampled_from((None, "c_order", "window", "channels_last"))), seed=draw(st.integers(0, 2**16)),
        )  # fmt: skip
        assume(math.prod(last.out_spatial) * math.prod(kernel) <= MAX_ORACLE_STEPS)
        if not zeros and all(last.spatial):
            last = replace(last, padding_mode=draw(padding_modes(padding, kernel)))
        layers.append(last)
    return ChainCase(tuple(layers))


@contextmanager
def tile_bytes(nbytes: int) -> Iterator[None]:
    """Use tiles of about this size on NumPy, so that small images have several."""
    before, chain_fused.TILE_BYTES = chain_fused.TILE_BYTES, nbytes
    forget_calls()
    try:
        yield
    finally:
        chain_fused.TILE_BYTES = before
        forget_calls()


def run(target: Target, case: ChainCase, arrays: list[dict[str, Any]], **chosen: Any) -> Any:
    x, layers = case.call(target, arrays)
    out = case.layers[-1].new_out(target.to_device, target.xp)
    result = cupyconv.conv_chain(x, layers, out=out, **chosen)
    assert out is None or result is out
    return target.to_host(result)


TILES = st.sampled_from((1, 64, 400, 1 << 20))
LIMITS = st.sampled_from((None, None, 30_000, 6_000))
FUSE = st.sampled_from(("auto", True, True, False))


def outcome(
    target: Target, case: ChainCase, arrays: list[dict[str, Any]], fuse: Any, tile: int, limit: int | None, threads: int
) -> Any:
    """Return the result, or None if the chain is refused with a reason."""
    with tile_bytes(tile), cupyconv.options(workspace_limit=limit, threads=threads):
        try:
            return run(target, case, arrays, fuse=fuse)
        except ValueError as refusal:
            if (fuse is True and "fuse=True does not apply" in str(refusal)) or (limit and "workspace" in str(refusal)):
                return None
            raise


# --- values ---------------------------------------------------------------------------------------------------


@share_of_examples(0.5)
@given(case=chain_cases(), fuse=FUSE, tile=TILES, limit=LIMITS, threads=st.sampled_from((1, 1, 3)))
def test_integers_are_exact(target, case, fuse, tile, limit, threads):
    arrays = case.arrays(integer=True)
    actual = outcome(target, case, arrays, fuse, tile, limit, threads)
    if actual is not None:
        expected, error = case.expected(arrays)
        dtype = case.layers[-1].result_dtype
        # Later layers' sums may be too large to be exact in a 16-bit type.
        allowed = np.zeros(expected.shape) if case.is_exact(arrays) else error
        compare(checked(actual, expected, dtype), rounded(expected, dtype), allowed)


@given(
    case=chain_cases(activations=ACTIVATIONS), fuse=FUSE, tile=TILES, limit=LIMITS, threads=st.sampled_from((1, 1, 3))
)
def test_random_data(target, case, fuse, tile, limit, threads):
    arrays = case.arrays(integer=False)
    actual = outcome(target, case, arrays, fuse, tile, limit, threads)
    if actual is not None:
        expected, error = case.expected(arrays)
        dtype = case.layers[-1].result_dtype
        compare(checked(actual, expected, dtype), rounded(expected, dtype), error)


@pytest.mark.parametrize("fuse", [True, False])
def test_an_intermediate_image_ends_where_it_ends(target, fuse):
    """An intermediate image is padded with zeros, not with further results of x or with the first epilogue of zero."""
    x = np.ones((1, 1, 6, 6), np.float32)
    ones = np.ones((1, 1, 3, 3), np.float32)
    layers = [{"weight": ones, "bias": np.array([1], np.float32), "padding": 1}, {"weight": ones, "padding": 2}]
    y = chain(target, x, layers, fuse=fuse)
    between = np.pad(reference.conv(x, ones, np.array([1.0]), padding=1), ((0, 0), (0, 0), (2, 2), (2, 2)))
    assert_exact(y, reference.conv(between, ones), "float32")


@pytest.mark.parametrize("fuse", ["auto", True, False])
@pytest.mark.parametrize("tile", [1 << 20, 400])
def test_every_layer_has_its_own_prologue(target, fuse, tile):
    """Prologues transform merged inputs and intermediate images, but not their padding."""
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype(np.float32)

    x = [draw(2, 2, 9, 8), draw(2, 1, 9, 8)]
    layers = [
        {"weight": draw(4, 3, 3, 3), "padding": 1, "prologue": (draw(3), draw(3), "relu")},
        {"weight": draw(2, 4, 3, 3), "padding": 2, "prologue": (None, draw(4), ("clip", -2, 3)), "bias": draw(2)},
        {"weight": draw(3, 2, 1, 1), "prologue": (draw(2), None, None)},
    ]
    expected: Any = x
    for layer in layers:
        scale, shift, spec = layer["prologue"]
        taken = reference.transformed(expected, scale, shift, spec, axis=1)
        expected = reference.conv(taken, **{name: value for name, value in layer.items() if name != "prologue"})
    with tile_bytes(tile):
        assert_exact(chain(target, x, layers, fuse=fuse), expected, "float32")


def test_a_padding_mode_is_a_reason_not_to_fuse():
    weight = np.ones((2, 2, 3, 3), np.float32)
    layers = [ConvLayer(weight, padding=1), ConvLayer(weight, padding=1, padding_mode="edge")]
    with pytest.raises(ValueError, match="fuse=True does not apply: layer 1 has padding_mode='edge', not 'constant'"):
        cupyconv.conv_chain(np.ones((1, 2, 8, 8), np.float32), layers, fuse=True)


@pytest.mark.parametrize("fuse", [True, False])
def test_non_finite_values_land_where_the_definition_puts_them(target, fuse):
    x = np.ones((1, 2, 12, 12), np.float32)
    x[0, 0, 0, 0], x[0, 1, 6, 7], x[0, 0, 11, 3] = np.nan, np.inf, -np.inf
    rng = np.random.default_rng(0)
    first, second = (rng.integers(1, 4, (2, 2, 3, 3)).astype(np.float32) for _ in range(2))
    second[1] *= -1
    layers = [{"weight": first, "padding": 1, "activation": "relu"}, {"weight": second, "padding": 1}]
    expected = reference.conv(reference.conv(x, first, padding=1, activation="relu"), second, padding=1)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    assert_exact(chain(target, x, layers, fuse=fuse), expected, "float32")


def test_every_layer_has_its_own_epilogue(target):
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(np.float32)

    x = [draw(2, 2, 7, 8), draw(2, 1, 7, 8)]
    layers = [
        {"weight": draw(4, 3, 3, 3), "bias": draw(4), "activation": "relu6", "residual": draw(2, 4, 5, 6)},
        {"weight": draw(4, 2, 2, 2), "groups": 2, "stride": 2, "activation": ("leaky_relu", 0.25)},
        {"weight": draw(2, 4, 1, 1), "bias": draw(2), "residual": draw(2, 2, 2, 3)},
    ]
    expected: Any = x
    for layer in layers:
        expected = reference.conv(expected, **layer)
    assert_exact(chain(target, x, layers), expected, "float32")


def test_a_sixteen_bit_image_between_is_widened_by_a_wider_layer(target):
    """The second layer computes in the wider dtype, from an image that was rounded to the narrower one."""
    x = np.full((1, 2, 4, 5), 1 + 2**-10, np.float16)
    narrow, wide = np.full((3, 2, 1, 1), 1 + 2**-10, np.float16), np.full((1, 3, 3, 3), 1, np.float32)
    y = chain(target, x, [{"weight": narrow}, {"weight": wide, "padding": 1}], fuse=False)
    between = reference.conv(x, narrow).astype(np.float16)
    assert (between.astype(float) != reference.conv(x, narrow)).any()
    assert_exact(y, reference.conv(between, wide, padding=1), "float32")


def test_out_may_be_the_last_residual(target):
    rng = np.random.default_rng(2)
    x, w, v, r = (
        rng.integers(-3, 4, s).astype(np.float32) for s in ((1, 2, 9, 9), (2, 2, 3, 3), (2, 2, 3, 3), (1, 2, 9, 9))
    )
    out = target.to_device(r)
    layers = device_layers(target, [{"weight": w, "padding": 1}, {"weight": v, "padding": 1}])
    layers[1] = replace(layers[1], residual=out)
    assert cupyconv.conv_chain(target.to_device(x), layers, out=out) is out
    expected = reference.conv(reference.conv(x, w, padding=1), v, padding=1, residual=r)
    assert_exact(target.to_host(out), expected, "float32")


def test_the_result_is_laid_out_as_that_of_calls_in_turn(target):
    x = np.ones((2, 5, 6, 3), np.float32)
    weights = [np.ones((4, 3, 3, 3), np.float32), np.ones((2, 4, 1, 1), np.float32)]
    channels_last = target.to_device(x).transpose(0, 3, 1, 2)
    layers = device_layers(target, [{"weight": weight} for weight in weights])
    y = cupyconv.conv_chain(channels_last, layers)
    once = cupyconv.conv(cupyconv.conv(channels_last, layers[0].weight), layers[1].weight)
    assert y.strides == once.strides and y.strides[1] == y.dtype.itemsize


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 0, 8, 8), (2, 3, 0, 8)])
def test_empty_axes(target, shape):
    layers = [
        {"weight": np.ones((4, shape[1], 3, 3), np.float32), "padding": 2, "bias": np.ones(4, np.float32)},
        {"weight": np.ones((2, 4, 3, 3), np.float32), "padding": 1},
    ]
    x = np.ones(shape, np.float32)
    expected: Any = x
    for layer in layers:
        expected = reference.conv(expected, **layer)
    assert_exact(chain(target, x, layers), expected, "float32")


def test_no_channels_between(target):
    layers = [
        {"weight": np.ones((0, 3, 3, 3), np.float32)},
        {"weight": np.ones((2, 0, 1, 1), np.float32), "bias": np.ones(2, np.float32), "activation": "relu"},
    ]
    y = chain(target, np.ones((1, 3, 5, 5), np.float32), layers)
    assert_exact(y, np.ones((1, 2, 3, 3)), "float32")


# --- memory ---------------------------------------------------------------------------------------------------


def test_numpy_never_has_the_whole_image_between():
    """With 32 -> 32 -> 32 channels, 3x3, 768 x 512, tiles need at most a quarter of the memory of two calls."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 32, 768, 512), np.float32)
    w, v = rng.standard_normal((2, 32, 32, 3, 3), np.float32)
    out, expected = np.empty_like(x), np.empty_like(x)
    layers = [ConvLayer(w, padding=1, activation="relu"), ConvLayer(v, padding=1)]
    with cupyconv.options(allow_winograd=False):  # Winograd's rounding errors depend on how the image is cut
        apart = peak_bytes(
            lambda: cupyconv.conv(cupyconv.conv(x, w, padding=1, activation="relu"), v, padding=1, out=expected)
        )
        together = peak_bytes(lambda: cupyconv.conv_chain(x, layers, fuse=True, out=out))
    assert together <= apart / 4
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


#: Chains with images so large that Python objects are small compared with them.
LARGE: dict[str, tuple[np.ndarray, list[ConvLayer]]] = {
    "plain": (ones(4, 16, 64, 64), [ConvLayer(ones(16, 16, 3, 3), padding=1)] * 4),
    "float16": (ones(4, 16, 64, 64, dtype="float16"), [ConvLayer(ones(16, 16, 3, 3, dtype="float16"), padding=1)] * 3),
    "wide between": (ones(2, 8, 64, 64), [
        ConvLayer(ones(64, 8, 1, 1)), ConvLayer(ones(64, 1, 3, 3), groups=64, padding=1, activation="gelu"),
        ConvLayer(ones(8, 64, 1, 1)),
    ]),
    "strides": (ones(2, 16, 120, 100), [
        ConvLayer(ones(16, 16, 5, 5), stride=2, padding=2, activation="gelu"),
        ConvLayer(ones(32, 16, 3, 3), stride=2, residual=ones(2, 32, 29, 24)),
    ]),
    "many samples": (ones(40, 16, 14, 14), [ConvLayer(ones(16, 16, 3, 3), padding=1)] * 3),
    "large weights": (ones(1, 96, 20, 20, dtype="float16"), [ConvLayer(ones(96, 96, 3, 3, dtype="float16"), padding=1)] * 2),
    "long": (ones(2, 8, 20_000), [ConvLayer(ones(8, 8, 9), padding=4)] * 3),
}  # fmt: skip


@pytest.mark.parametrize("of", LARGE)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("threads", "limit"), [(1, None), (1, 400_000), (2, 400_000)])
def test_numpy_takes_what_explain_says(of, fuse, threads, limit, small_buffers):
    """A chain needs no more memory than `explain` states, and at least half on one thread, which uses all at once."""
    x, layers = LARGE[of]
    with cupyconv.options(threads=threads, workspace_limit=limit), tile_bytes(1 << 18):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=fuse)
        out = cupyconv.conv_chain(x, layers, fuse=fuse)
        cupyconv.conv_chain(x, layers, fuse=fuse, out=out)
        cached_scratch(np.dtype("float32"))._give_back()
        peak = peak_bytes(lambda: cupyconv.conv_chain(x, layers, fuse=fuse, out=out))
    python_objects = int(50_000 * OF_OBJECTS)
    assert peak <= plan.workspace_bytes + python_objects + OF_EINSUM * (of == "wide between")
    assert threads > 1 or peak + python_objects >= plan.workspace_bytes / 2
    assert limit or plan.workspace_bytes <= 16 << 20
    assert plan.method == ("fused" if fuse else "unfused")


@pytest.mark.parametrize("limit, at_a_time", [(None, [7]), (40_000, [3, 3, 1])])
def test_samples_that_are_left_over_are_counted_and_computed(limit, at_a_time):
    """Layer by layer, the plan counts the last, smaller group of samples; two of the growing images are in memory."""
    sizes, rng = (3, 4, 6, 8, 12), np.random.default_rng(0)
    weights = [rng.integers(-1, 2, (after, before, 3, 3)).astype(np.float32) for before, after in pairwise(sizes)]
    x = rng.integers(-2, 3, (7, 3, 12, 20)).astype(np.float32)
    expected, layers = x, [ConvLayer(weight) for weight in weights]
    with cupyconv.options(threads=1, workspace_limit=limit, allow_winograd=False):
        for weight in weights:
            expected = cupyconv.conv(expected, weight)
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False)
        np.testing.assert_array_equal(cupyconv.conv_chain(x, layers, fuse=False), expected)
    (loop,) = plan.steps
    assert isinstance(
        loop, LayersLoop
    ) and f"{counted(at_a_time[0], 'sample')} at a time, {counted(len(at_a_time), 'time')}" in str(loop)
    assert str(loop).count("  layer ") == 4
    runs = [step for count in at_a_time for each in loop.plans[count != at_a_time[0]] for step in each.steps]
    assert loop.turns == sum(step.turns for step in runs) and loop.calls == sum(step.calls for step in runs)
    assert loop.seconds == pytest.approx(seconds_of(runs))  # the images stay in cache
    largest = sorted(each * pixels for each, pixels in zip(sizes[1:4], (10 * 18, 8 * 16, 6 * 14)))[-2:]
    between = sum(buffer.nbytes for buffer in plan.workspace if buffer.name.startswith("layer"))
    assert between <= 4 * at_a_time[0] * sum(largest) + 2 * Plan.ALIGNMENT


def test_fewer_samples_where_the_loops_need_more_than_half():
    """The image of two samples needs half of the limit, and loops over two need slightly more than the other half."""
    x = np.ones((4, 16, 256, 256), np.float32)
    layer = ConvLayer(np.ones((16, 16, 3, 3), np.float32), padding=1)
    plan = cupyconv.explain(cupyconv.conv_chain, x, [layer, layer], fuse=False)
    assert plan.workspace_bytes <= 16 << 20 and not plan.notes


def test_cuda_takes_what_explain_says(cuda_target):
    """Four layers one by one keep two images in memory, and process fewer samples at a time under a limit."""
    device = cuda_target.device
    x = device.asarray(np.ones((4, 4, 16, 16), np.float32))
    w = device.asarray(np.ones((4, 4, 1, 1), np.float32))
    image = x.nbytes
    out = device.empty(x.shape, np.float32)
    for limit, images in ((None, 2.0), (image, 0.5)):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv_chain, x, [ConvLayer(w)] * 4, fuse=False, out=out)
            gc.collect()
            before = device.peak_bytes = device.allocated_bytes
            cupyconv.conv_chain(x, [ConvLayer(w)] * 4, fuse=False, out=out)
        assert plan.workspace_bytes == images * image
        assert device.peak_bytes - before <= plan.workspace_bytes
        assert (out == 4**4).all()


def test_a_failed_allocation_is_retried_with_fewer_samples(cuda_target):
    device = cuda_target.device
    x, w = device.asarray(np.ones((4, 4, 16, 16), np.float32)), device.asarray(np.ones((4, 4, 1, 1), np.float32))
    out = device.empty(x.shape, np.float32)
    device.fail_allocations_over = x.nbytes // 2
    try:
        cupyconv.conv_chain(x, [ConvLayer(w)] * 2, fuse=False, out=out)
        device.fail_allocations_over = 64
        with pytest.raises(MemoryError):
            cupyconv.conv_chain(x, [ConvLayer(w)] * 2, fuse=False, out=out)
    finally:
        device.fail_allocations_over = None
    assert (out == 16).all()


# --- explain --------------------------------------------------------------------------------------------------


def test_explain_says_what_is_fused_on_numpy_and_why_not():
    x = np.ones((1, 8, 1024, 1024), np.float32)
    layers = [ConvLayer(np.ones((8, 8, 3, 3), np.float32), padding=1)] * 2
    plan = cupyconv.explain(cupyconv.conv_chain, x, layers)
    assert plan.method == "fused"
    (loop,) = plan.steps
    assert isinstance(loop, ChainLoop) and loop.tile[1] < 1024
    assert f"{x.nbytes:,} bytes" in dict(plan.rejected)["unfused"]
    for said in ("tiles of", "layer 0:", "layer 1:", "not unfused", "layer[0]"):
        assert said in str(plan)
    small = cupyconv.explain(cupyconv.conv_chain, x[..., :16, :16], layers)
    assert small.method == "unfused" and "estimated " in dict(small.rejected)["fused"]
    asked = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False)
    assert asked.method == "unfused" and "fuse=False" in dict(asked.rejected)["fused"]
    assert asked.bytes_moved == plan.bytes_moved + 2 * x.nbytes


def mobile_block(inner: int, outer: int, kernel: int = 3) -> list[ConvLayer]:
    """Return the layers of a mobile network's block: 1x1, depthwise, 1x1."""
    return [
        ConvLayer(np.ones((inner, outer, 1, 1), np.float32), np.ones(inner, np.float32), activation="relu"),
        ConvLayer(np.ones((inner, 1, kernel, kernel), np.float32), padding=kernel // 2, groups=inner),
        ConvLayer(np.ones((outer, inner, 1, 1), np.float32)),
    ]


def test_numpy_does_not_fuse_what_calls_of_conv_do_faster_and_plans_these_alike():
    """A mobile network's block is not fused: a tile is a whole image, and would need many small calls of NumPy."""
    x, layers = np.ones((1, 24, 14, 14), np.float32), mobile_block(144, 24)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers)
        assert plan.method == "unfused"
        (loop,) = plan.steps
        assert isinstance(loop, chain_numpy.LayersLoop)
        image: Any = x[: loop.samples]
        for layer, planned in zip(layers, loop.plans[0]):
            named = {"padding": layer.padding, "groups": layer.groups, "activation": layer.activation}
            alone = cupyconv.explain(cupyconv.conv, image, layer.weight, layer.bias, **named)
            assert (planned.method, planned.reason) == (alone.method, alone.reason)
            image = cupyconv.conv(image, layer.weight, layer.bias, **named)


#: Time of tiles divided by the time of the layers one after the other, by the benchmark's names of chains: medians of
#: alternating calls on two threads.  `LIMITED` has a chain with a workspace limit.
FUSED_OVER_LAYERS = {
    "chain 3x3, 3x3, 32 -> 32 -> 32, 512x512": 1.14,
    "chain 3x3 depthwise, 1x1, 64 -> 64 -> 64, 128x128": 1.05,
    "chain 1x1, 3x3, 256 -> 64 -> 64, 56x56": 1.13,
    "chain 1-D, 3 taps, dilations 8 and 1, 64 -> 64 -> 64, 16000": 1.08,
    "chain 1x1, 3x3 depthwise, 1x1, 24 -> 144 -> 144 -> 24, 56x56": 1.23,
    "chain 1x1, 3x3 depthwise, 1x1, 16 -> 96 -> 96 -> 24, 112x112": 1.13,
    "chain 1x1, 3x3 depthwise, 1x1, 16 -> 96 -> 96 -> 24, 112x112, N 8": 1.16,
    "chain 3x3, 3x3, 16 -> 16 -> 16, 512x512": 1.13,
    "chain 3x3, 3x3, 8 -> 8 -> 8, 1024x1024": 0.98,
    "chain 3x3, 3x3, 64 -> 64 -> 64, 56x56, N 4": 1.19,
    "chain 1x1, 1x1, 32 -> 64 -> 32, 256x256, N 2": 0.85,
    "chain 1x1, 1x1, 4 -> 8 -> 4, 1024x1024": 0.70,
    "chain 3x3 depthwise twice, 32 channels, 256x256": 1.31,
    "chain 3x3 depthwise, 1x1, 3x3 depthwise, 32 -> 64, 112x112, N 2": 1.31,
    "chain 3x3 stride 2, 3x3, 3 -> 32 -> 64, 224x224": 1.27,
    "chain 7x7 stride 2, 3x3, 3 -> 64 -> 64, 224x224": 1.11,
    "chain 3x3 merged 16+16, 1x1, 32 -> 16, 256x256": 1.23,
    "chain merge 5 x 4 -> 8 -> 4, 10^6 points": 1.00,
    "chain 1-D, 9 taps three times, 8 channels, 10^5": 1.30,
    "chain 1-D, 15 taps twice, 2 channels, 10^6": 1.23,
    "chain of filters, 101 and 31 taps, 10^6 points": 1.38,
    "chain 3x3 three times, 16 channels, 64x64, N 8": 1.06,
    "chain 3x3, 3x3, 1 -> 8 -> 1, 1024x1024": 0.86,
    "chain of filters 9x1, 1x9, 2048x2048": 1.70,
    "chain of filters 31x1, 1x31, 1024x1024, float64": 0.99,
    "chain 3x3, 3x3, 24 channels, 128x128, N 2, float64": 1.10,
    "chain 5x5, 1x1, 16 -> 32 -> 16, 200x200": 1.12,
    "chain 3-D 3x3x3 twice, 8 channels, 48x48x48": 1.34,
    "chain 3x3, 3x3, 128 -> 128 -> 128, 28x28, N 8": 1.09,
    "chain 3x3, 1x1, 8 -> 8 -> 8, 32x32": 1.40,
}
LIMITED = {("chain 3x3, 3x3, 64 -> 64 -> 64, 56x56, N 4", 1 << 18): 1.66}


def test_the_choice_is_within_a_tenth_of_the_faster_for_nine_tenths_of_the_chains():
    """Estimated times make the choice, and measured ratios judge it."""
    cases = {case.name: case for case in tables.numpy_cases() if case.group == "chains"}
    assert set(cases) == set(FUSED_OVER_LAYERS)
    losses = {}
    for (name, limit), ratio in [
        *(((name, None), ratio) for name, ratio in FUSED_OVER_LAYERS.items()),
        *LIMITED.items(),
    ]:
        function, arguments, _ = cases[name].call(*cases[name].arrays(lambda dtype, _, count: np.zeros(count, dtype)))
        with threadpool_limits(2, "blas"), cupyconv.options(workspace_limit=limit):  # as in the measurement
            chosen = cupyconv.explain(function, *arguments).method
        losses[name, limit] = (ratio if chosen == "fused" else 1.0) / min(1.0, ratio)
    bad = {name: loss for name, loss in losses.items() if loss > 1.1}
    assert len(bad) <= 0.1 * len(losses), bad
    assert max(losses.values()) <= 1.3, bad


def test_numpy_fuses_where_one_image_between_takes_the_limit():
    x = np.ones((1, 8, 1024, 1024), np.float32)
    layers = [ConvLayer(np.ones((8, 8, 3, 3), np.float32), padding=1)] * 2
    plan = cupyconv.explain(cupyconv.conv_chain, x, layers)
    assert plan.method == "fused" and plan.workspace_bytes <= 16 << 20


def test_a_tile_leaves_the_loops_more_than_blocks_of_a_few_pixels():
    """A tile of 14 rows needs 224 of 256 KiB, which would leave blocks of 2 pixels: 30 times slower than 7 rows."""
    x = np.ones((4, 64, 56, 56), np.float32)
    layers = [ConvLayer(np.ones((64, 64, 3, 3), np.float32), padding=1)] * 2
    with cupyconv.options(workspace_limit=1 << 18, threads=2):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True)
    (loop,) = plan.steps
    assert isinstance(loop, ChainLoop) and plan.workspace_bytes <= 1 << 18
    assert all(math.prod(part.block) >= 28 for parts in loop.loops for part in parts if part.geometry.out_size[1] > 1)


@pytest.mark.parametrize("fuse", ["auto", True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_limit_refuses_what_a_smaller_one_allows(fuse, dtype):
    """A larger limit allows what a smaller one allows, also with float16 weights, which are copied to float32."""
    x, w = np.ones((1, 64, 32, 32), dtype), np.ones((64, 64, 3, 3), dtype)
    allowed = False
    for limit in sorted({int(4000 * 1.2**i) for i in range(40)} | {1 << i for i in range(14, 22)}):
        with cupyconv.options(workspace_limit=limit, threads=2):
            try:
                cupyconv.explain(cupyconv.conv_chain, x, [ConvLayer(w, padding=1)] * 2, fuse=fuse)
                allowed = True
            except ValueError:
                assert not allowed, limit
    assert allowed


def test_explain_compares_every_pair_on_cuda():
    x = np.ones((8, 64, 56, 56), np.float32)
    layers = [ConvLayer(np.ones((64, 64, 3, 3), np.float32), padding=1)] * 3
    plan = cupyconv.explain(cupyconv.conv_chain, x, layers, on="sm_90")
    assert len(plan.rejected) == 2 and all("fused" in name for name, _ in plan.rejected)
    apart = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on="sm_90")
    assert apart.method == "unfused"
    assert [buffer.name for buffer in apart.workspace][:2] == ["layer[0]", "layer[1]"]
    assert apart.flops == 3 * cupyconv.explain(cupyconv.conv, x, layers[0].weight, padding=1, on="sm_90").flops


@pytest.mark.parametrize("seed", range(8))
def test_the_pairing_is_the_best_there_is(monkeypatch, seed):
    """For six layers with made-up costs of pairs, some without a kernel, the best of all pairings is chosen."""
    rng = np.random.default_rng(seed)
    x = np.ones((1, 8, 64, 64), np.float32)
    layers = [ConvLayer(np.ones((8, 8, 3, 3), np.float32), padding=1)] * 6
    alone = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on="sm_90").bytes_moved // 6
    moved = [int(alone * factor) for factor in rng.uniform(0.5, 8, 5)]
    refused = {int(i) for i in rng.choice(5, seed % 3, replace=False)}

    def made_up(first: Any, second: Any) -> Draft:
        i = int(first.weight.name[7:-1])
        if i in refused:
            raise NotApplicable("no kernel")
        step = KernelLaunch(Kernel("pair"), (1, 1, 1), 32, (("first", Address("x")),), bytes_moved=moved[i])
        return Draft("fused", (step,), reason="made up")

    monkeypatch.setattr(chain_cuda, "draft_pair", made_up)
    request = checked_call(cupyconv.conv_chain, x, layers, on="sm_90").problem
    comparison = chain_cuda._Comparison(request.layers, request.machine)
    assert set(comparison.refusals) == refused
    pairings = [
        chosen
        for count in range(4)
        for chosen in combinations(comparison.pairs, count)
        if all(b - a > 1 for a, b in pairwise(chosen))
    ]

    def seconds(chosen: tuple[int, ...]) -> float:
        paired = {i for first in chosen for i in (first, first + 1)}
        lone = sum(comparison.seconds(part) for part in comparison.single if part.first not in paired)
        return lone + sum(comparison.seconds(comparison.pairs[i]) for i in chosen)

    def found(fuse: Any) -> tuple[int, ...]:
        return tuple(part.first for part in comparison.best(fuse) if part.count == 2)

    assert found(False) == ()
    assert found("auto") == min(pairings, key=seconds)
    assert found(True) == min(pairings, key=lambda chosen: (-len(chosen), seconds(chosen)))
    plan = chain_cuda.plan_chain(request)
    assert sum(step.kernel.name == "pair" for step in plan.steps) == len(found("auto"))
    stored = {buffer.name for buffer in plan.workspace}
    assert not stored & {f"layer[{i}]" for i in found("auto")}
    assert [name for name, _ in plan.rejected] == [f"{'un' * (i in found('auto'))}fused {i}+{i + 1}" for i in range(5)]


@pytest.mark.parametrize("fuse", ["auto", True, False])
def test_a_long_loop_is_said(fuse):
    """A plan notes a long loop in Python if the limit leaves blocks of a few pixels."""
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (8, 4, 2000, 2000), (0, 0, 0, 0))
    layers = [ConvLayer(np.ones((4, 4, 3, 3), np.float32), padding=1)] * 2
    with cupyconv.options(workspace_limit=201_000 if fuse is True else 1000, threads=2):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=fuse)
    assert any("a Python loop of" in note for note in plan.notes)


def test_an_image_beyond_the_limit_is_said():
    x = np.ones((2, 8, 64, 64), np.float32)
    layers = [ConvLayer(np.ones((8, 8, 1, 1), np.float32))] * 2
    with cupyconv.options(workspace_limit=1000):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on="sm_90")
    assert any("beyond the workspace limit" in note for note in plan.notes)


@pytest.mark.parametrize("fuse", [True, False])
def test_images_beyond_the_limit_are_said_and_tiles_keep_within_it(fuse):
    """Only images of one sample may exceed the limit, as the page about memory says; tiles do not need them."""
    x, limit = np.ones((2, 16, 64, 64), np.float32), 1 << 18
    layers, out = [ConvLayer(np.ones((16, 16, 3, 3), np.float32), padding=1)] * 3, np.empty_like(x)
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=fuse, out=out)
        cupyconv.conv_chain(x, layers, fuse=fuse, out=out)
        peak = peak_bytes(lambda: cupyconv.conv_chain(x, layers, fuse=fuse, out=out))
    assert any("beyond the workspace limit" in note for note in plan.notes) == (fuse is False)
    assert (plan.workspace_bytes <= limit) == fuse
    assert peak <= plan.workspace_bytes + 100_000  # Python objects


# --- bad input ------------------------------------------------------------------------------------------------


def valid(target: Target, **changes: Any) -> dict[str, Any]:
    ones = {
        "x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "v": (2, 4, 3, 3), "b": (2,), "r": (1, 2, 4, 4),
    }  # fmt: skip
    arrays = {name: target.to_device(np.ones(shape, np.float32)) for name, shape in ones.items()}
    x, w, v, b, r = arrays.values()
    return {"x": x, "layers": [ConvLayer(w), ConvLayer(v, b, residual=r)], **changes}


def test_the_call_that_is_varied_is_valid(target):
    assert cupyconv.conv_chain(**valid(target)).shape == (1, 2, 4, 4)


def changed(target: Target, i: int, **fields: Any) -> list[ConvLayer]:
    layers = valid(target)["layers"]
    given = {
        name: target.to_device(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()
    }
    return [replace(layer, **given) if k == i else layer for k, layer in enumerate(layers)]


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "layers must be a sequence of ConvLayer, given ConvLayer: put it in a list", lambda t: {"layers": valid(t)["layers"][0]}),
        (TypeError, r"layers\[1\] must be a ConvLayer, given", lambda t: {"layers": [valid(t)["layers"][0], 3]}),
        (ValueError, "layers is an empty sequence", lambda t: {"layers": []}),
        (ValueError, "fuse must be 'auto', True or False, given 1", lambda t: {"fuse": 1}),
        (ValueError, "fuse must be 'auto', True or False, given 'always'", lambda t: {"fuse": "always"}),
        (ValueError, r"layers\[1\]: weight of shape .* given 4 channels \(layer\[0\] has shape \(1, 4, 6, 6\)",
         lambda t: {"layers": changed(t, 1, weight=np.ones((2, 5, 3, 3), np.float32))}),
        (ValueError, r"layers\[1\]: kernel spans 7 elements", lambda t: {"layers": changed(t, 1, weight=np.ones((2, 4, 7, 3), np.float32))}),
        (ValueError, r"layers\[1\]: layer\[0\] has shape \(1, 4, 6, 6\), needed 3 axes",
         lambda t: {"layers": changed(t, 1, weight=np.ones((2, 4, 3), np.float32))}),
        (ValueError, r"layers\[1\]: padding_mode 'edge' cannot extend spatial axis 0 of length 0",
         lambda t: {"x": t.to_device(np.ones((1, 3, 0, 8), np.float32)), "layers": [
             ConvLayer(t.to_device(np.ones((4, 3, 1, 1), np.float32))),
             ConvLayer(t.to_device(np.ones((2, 4, 3, 3), np.float32)), padding=2, padding_mode="edge")]}),
        (ValueError, r"residual\[1\] has shape \(2, 4, 4\), needed \(1, 2, 4, 4\)",
         lambda t: {"layers": changed(t, 1, residual=np.ones((2, 4, 4), np.float32))}),
        (TypeError, r"layers\[1\]: activation relu is not defined for the complex result",
         lambda t: {"x": t.to_device(np.ones((1, 3, 8, 8), np.complex64)), "layers": changed(t, 1, activation="relu")}),
        (ValueError, r"out has shape \(1, 2, 4, 5\), needed \(1, 2, 4, 4\)", lambda t: {"out": t.to_device(np.ones((1, 2, 4, 5), np.float32))}),
        (ValueError, "x is an empty sequence", lambda t: {"x": []}),
    ],
)  # fmt: skip
def test_refused(target, error, words, changes):
    with pytest.raises(error, match=words):
        cupyconv.conv_chain(**valid(target, **changes(target)))


@pytest.mark.parametrize(
    ("error", "words", "fields"),
    [
        (ValueError, "stride must be at least 1, given 0", dict(stride=0)),
        (TypeError, "dilation accepts only integers, given 1.5", dict(dilation=1.5)),
        (ValueError, "padding has 3 entries for 2 spatial axes", dict(padding=(1, 2, 3))),
        (ValueError, "unknown padding_mode 'zeros'.*'constant' here", dict(padding=1, padding_mode="zeros")),
        (ValueError, "padding_mode 'edge' has no effect with padding=0", dict(padding_mode="edge")),
        (ValueError, "groups 3 does not divide the weight's 2 output channels", dict(groups=3)),
        (ValueError, "activation.*sine", dict(activation="sine")),
        (ValueError, r"bias has shape \(3,\), needed \(2,\)", dict(bias=np.ones(3, np.float32))),
        (ValueError, r"scale has shape \(2,\), needed \(4,\)", dict(prologue=(np.ones(2, np.float32), None, None))),
        (ValueError, r"shift has shape \(1, 4\), needed \(8,\)", dict(prologue=(None, np.ones((1, 4)), None), groups=2)),
        (ValueError, "prologue has 2 entries, needed 3", dict(prologue=(None, None))),
        (ValueError, "activation.*sine", dict(prologue=(None, None, "sine"))),
        (TypeError, "weight has dtype int64", dict(weight=np.ones((2, 4, 3, 3), np.int64))),
        (ValueError, "weight has 2 axes", dict(weight=np.ones((3, 3), np.float32))),
        (TypeError, "activation relu is not defined for the complex result",
         dict(weight=np.ones((2, 4, 3, 3), np.complex64), activation="relu")),
        (TypeError, "weight must be a NumPy or CuPy array, not builtins.list", dict(weight=[[1.0]])),
        (TypeError, "weight must be a NumPy or CuPy array, not builtins.NoneType", dict(weight=None)),
    ],
)  # fmt: skip
def test_a_layer_is_checked_as_it_is_made(error, words, fields):
    with pytest.raises(error, match=words):
        ConvLayer(**{"weight": np.ones((2, 4, 3, 3), np.float32), **fields})


def test_a_layer_prints_in_one_line():
    weight, bias = np.ones((2, 4, 3, 3), np.float32), np.ones(2)
    assert repr(ConvLayer(weight)) == "ConvLayer(float32 (2, 4, 3, 3))"
    prologue = (np.ones(4), None, ("leaky_relu", 0.5))
    layer = ConvLayer(weight, bias, stride=(1, 2), padding="same", padding_mode="edge", prologue=prologue)
    assert repr(layer) == (
        "ConvLayer(float32 (2, 4, 3, 3), bias=float64 (2,), stride=(1, 2), padding='same', padding_mode='edge',"
        " prologue=(float64 (4,), None, ('leaky_relu', 0.5)))"
    )


def test_fuse_is_refused_where_there_is_nothing_to_fuse(target):
    with pytest.raises(ValueError, match="fuse=True does not apply: the chain has a single layer"):
        cupyconv.conv_chain(**valid(target, layers=valid(target)["layers"][:1], fuse=True))


def test_out_may_not_overlap_x_nor_an_earlier_residual(target):
    x = target.to_device(np.ones((1, 2, 8, 8), np.float32))
    layer = ConvLayer(target.to_device(np.ones((2, 2, 1, 1), np.float32)))
    with pytest.raises(
        ValueError, match=r"out overlaps x; it may share memory only if it is exactly the residual\[1\]"
    ):
        cupyconv.conv_chain(x, [layer, layer], out=x)
    out = target.to_device(np.ones((1, 2, 8, 8), np.float32))
    with pytest.raises(ValueError, match=r"out overlaps residual\[0\]"):
        cupyconv.conv_chain(x, [replace(layer, residual=out), layer], out=out)


# --- repetition -----------------------------------------------------------------------------------------------


def test_a_repeated_chain_does_what_the_first_did(target):
    """A layer with any other setting makes another call; a layer with other values makes the same call."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(np.float32)

    x, w, v, b, r = draw(1, 2, 9, 9), draw(2, 2, 3, 3), draw(2, 2, 3, 3), draw(2), draw(1, 2, 9, 9)
    plain = {"weight": w, "padding": 1}
    seconds = [
        {"weight": v, "padding": 1}, {"weight": w, "padding": 1}, {"weight": v, "padding": 1, "bias": b}, {"weight": v, "padding": 1, "residual": r},
        {"weight": v, "padding": 2, "dilation": 2}, {"weight": v, "padding": 1, "activation": "relu"}, {"weight": v[:, :1], "padding": 1, "groups": 2},
        {"weight": v, "padding": 1, "stride": 2}, {"weight": v, "padding": 1, "padding_mode": "edge"},
    ]  # fmt: skip
    forget_calls()
    for _ in range(2):
        for second in seconds:
            expected = reference.conv(reference.conv(x, **plain), **second)
            assert_exact(chain(target, x, [plain, second]), expected, "float32")
        biased = {**plain, "bias": b}
        expected = reference.conv(reference.conv(x, **biased), **seconds[0])
        assert_exact(chain(target, x, [biased, seconds[0]]), expected, "float32")


def test_the_same_bits_every_time(target):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, 4, 40, 40), np.float32)
    layers = [{"weight": rng.standard_normal((4, 4, 3, 3), np.float32), "padding": 1} for _ in range(2)]
    with tile_bytes(4000):
        results = [chain(target, x, layers).tobytes() for _ in range(3)]
    assert len(set(results)) == 1


def device_layers(target: Target, layers: list[dict[str, Any]]) -> list[ConvLayer]:
    def put(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(put, value))
        return target.to_device(value) if isinstance(value, np.ndarray) else value

    return [ConvLayer(**{name: put(value) for name, value in layer.items()}) for layer in layers]


def chain(target: Target, x: Any, layers: list[dict[str, Any]], *, fuse: Any = "auto") -> np.ndarray:
    """Return the chain's result for NumPy arrays; on CUDA, if no kernel fuses these layers, computed one by one."""
    put = [target.to_device(part) for part in x] if isinstance(x, list) else target.to_device(x)
    try:
        return target.to_host(cupyconv.conv_chain(put, device_layers(target, layers), fuse=fuse))
    except ValueError as refusal:
        assert target.name != "numpy" and "fuse=True does not apply" in str(refusal)
        return target.to_host(cupyconv.conv_chain(put, device_layers(target, layers)))
