"""Faults that once existed, each with a test that needs no special hardware."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from functools import partial
from itertools import product

import numpy as np
import pytest
import reference
import reference_gradients
from peak_memory import peak_bytes
from rounds import each_step
from strategies import ACTIVATIONS, constant_where_broadcast, with_layout
from tolerance import assert_exact

import cupyconv
from cupyconv.bench import machines
from cupyconv.call import dispatch
from cupyconv.numpy.convolution import ConvRun
from cupyconv.problem.arrays import overlaps_itself


@pytest.mark.parametrize("weight_dtype", ["float32", "complex64"])
@pytest.mark.parametrize("extra", [{}, {"bias": np.ones(2)}, {"residual": np.ones((1, 2, 6))}], ids=str)
@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_the_only_complex_input_has_no_channels(target, weight_dtype, extra, method):
    """The result is complex nevertheless, and every element of it is written."""
    xs = [np.ones((1, 3, 8), np.float32), np.ones((1, 0, 8), np.complex64)]
    weight = np.ones((2, 3, 3), weight_dtype)
    expected = reference.conv(xs, weight, **extra)
    moved = {name: target.to_device(value.astype(np.float32)) for name, value in extra.items()}
    actual = cupyconv.conv([target.to_device(x) for x in xs], target.to_device(weight), **moved, method=method)
    assert_exact(target.to_host(actual), expected, "complex64")


@pytest.mark.parametrize("method", ["direct", "gemm"])
@pytest.mark.parametrize("layout", ["stepped", "reversed", "broadcast_first"])
def test_a_bias_of_any_stride(target, method, layout):
    """A bias may have any stride; CUDA once read it as if it were contiguous."""
    x, weight = np.ones((1, 2, 8), np.float32), np.ones((4, 2, 3), np.float32)
    bias = constant_where_broadcast(np.arange(4, dtype=np.float32), layout, channel_axis=0)
    moved = [target.to_device(x), target.to_device(weight), with_layout(bias, layout, target.to_device, target.xp)]
    actual = cupyconv.conv(*moved, method=method)
    assert_exact(target.to_host(actual), reference.conv(x, weight, bias), np.float32)
    moved[1] = target.to_device(weight.swapaxes(0, 1).copy())
    actual = cupyconv.conv_transpose(*moved, method=method)
    assert_exact(target.to_host(actual), reference_gradients.conv_transpose(x, weight.swapaxes(0, 1), bias), np.float32)


def test_no_retry_where_the_residual_may_hold_sums_already(monkeypatch):
    """A retry would add blocks that were stored before memory ran out a second time."""
    x, weight = np.ones((8, 4, 64, 64)), np.ones((4, 4, 3, 3))
    out = np.ones((8, 4, 62, 62))
    store, calls = ConvRun.store, []

    def run_out_of_memory(self, block, sums):
        calls.append(block)
        if len(calls) == 2:
            raise MemoryError
        store(self, block, sums)

    monkeypatch.setattr(ConvRun, "store", run_out_of_memory)
    with cupyconv.options(workspace_limit=2_000_000), pytest.raises(MemoryError):
        cupyconv.conv(x, weight, residual=out, out=out)
    assert out.max() == 1 + 36


def test_more_outputs_than_a_grid_has_rows(cuda_target):
    """A grid has at most 65,535 rows; with more outputs, kernels with one row per output loop over them."""
    x, weight = np.ones((1, 1, 2), np.float32), np.arange(65_600, dtype=np.float32)[:, None]
    moved = cuda_target.to_device(x), cuda_target.to_device(weight)
    for method, activation in (("direct", None), ("gemm", "relu")):
        plan = cupyconv.explain(cupyconv.linmerge, *moved, method=method, activation=activation)
        last = plan.steps[-1]
        assert (last.kernel.name, last.grid[1]) == (("epilogue", 65_535) if activation else ("merge", 1))
        y = cupyconv.linmerge(*moved, method=method, activation=activation)
        assert (cuda_target.to_host(y)[0, :, 1] == np.arange(65_600)).all()


def test_threads_that_ask_first_together_get_one_backend(monkeypatch):
    made = []

    def make_slowly(ordinal):
        time.sleep(0.05)
        made.append(ordinal)
        return object()

    monkeypatch.setattr(dispatch, "_make_cupy_backend", make_slowly)
    monkeypatch.setattr(dispatch, "_CUPY_BACKENDS", {})
    found = []
    threads = [threading.Thread(target=lambda: found.append(dispatch._cupy_device_backend(0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(set(map(id, found))) == 1


def test_a_finalizer_that_asks_for_a_backend_while_it_is_made_gets_the_same(monkeypatch):
    """The finalizer once waited forever for the lock of its own thread."""
    found = []

    def make(ordinal):
        if not found:
            found.append(None)
            found.append(dispatch._cupy_device_backend(ordinal))
        return object()

    monkeypatch.setattr(dispatch, "_make_cupy_backend", make)
    monkeypatch.setattr(dispatch, "_CUPY_BACKENDS", {})
    thread = threading.Thread(target=lambda: found.append(dispatch._cupy_device_backend(0)), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and found[1] is found[2] is dispatch._cupy_device_backend(0)


def test_an_out_whose_elements_overlap_by_bytes_is_refused():
    memory = np.zeros(100, np.uint8)
    out = np.ndarray((1, 1, 5), np.float64, memory, strides=(40, 40, 4))
    with pytest.raises(ValueError, match="out overlaps itself"):
        cupyconv.conv(np.ones((1, 1, 5)), np.ones((1, 1, 1)), out=out)


def test_a_stride_beyond_the_kernels_integers_is_refused(target):
    x, weight = target.to_device(np.ones((1, 2, 5))), target.to_device(np.ones((1, 2, 1)))
    with pytest.raises(ValueError, match="stride must be at most 2147483647"):
        cupyconv.conv(x, weight, stride=2**40)


@pytest.mark.parametrize("size, outputs", [(2**61, 1), (2**80, 1), (2**80, 0)])
def test_a_result_of_more_bytes_than_addresses_is_refused(target, size, outputs):
    """The error names `out`; the array library's error named no argument, and CUDA raised OverflowError before it."""
    x, weight = target.to_device(np.ones((1, 2, 5))), target.to_device(np.ones((2, outputs, 3)))
    for function in (cupyconv.conv_transpose, partial(cupyconv.explain, cupyconv.conv_transpose)):
        with pytest.raises(ValueError, match=rf"out would have shape \(1, {outputs}, {size}\): .* at most"):
            function(x, weight, output_shape=size)
    with pytest.raises(ValueError, match="out would have shape"):
        cupyconv.vjp(cupyconv.conv_transpose, x, weight, output_shape=size)


def test_a_gradient_of_max_pool_has_the_byte_order_of_its_argument():
    """A gradient of max_pool has its argument's byte order, as the gradients of all other functions do."""
    xs = [np.ones((1, 1, 4), dtype) for dtype in (">f4", "<f4", ">f8")]
    ys, pullback = cupyconv.vjp(cupyconv.max_pool, xs, 2)
    assert all(y.dtype.isnative for y in ys)
    assert [gradient.dtype for gradient in pullback(ys).x] == [x.dtype for x in xs]
    y, pullback = cupyconv.vjp(cupyconv.max_pool, xs[0], 2)
    assert pullback(y).x.dtype == xs[0].dtype


def test_byte_order_widens_nothing():
    x, weight = np.ones((1, 2, 5), ">f4"), np.ones((1, 2, 1), ">f4")
    assert cupyconv.explain(cupyconv.conv, x, weight).notes == ()
    assert cupyconv.conv(x, weight).dtype == np.dtype("=f4")


def test_a_complex_image_with_a_real_weight_keeps_within_cublas(target):
    """Rows of a complex image are twice as long as real numbers, and must fit cuBLAS's int32 leading dimension."""
    pixels = 700_000_000
    x = np.lib.stride_tricks.as_strided(np.ones(1, np.complex64), (1, 2, pixels), (16 * pixels, 8 * pixels, 8))
    plan = cupyconv.explain(cupyconv.conv, x, np.ones((64, 2, 1), np.float32), on="sm_90", method="gemm")
    calls = [step for step in plan.steps if hasattr(step, "k")]
    assert calls and all(matrix.ld < 2**31 for call in calls for matrix in (call.a, call.b, call.c))


def test_a_page_with_a_preamble_stays_short():
    x, weight = np.ones((64, 16, 64, 64), np.float32), np.ones((16, 16, 3, 3), np.complex64)
    with cupyconv.options(workspace_limit=8 << 20):
        plan = cupyconv.explain(cupyconv.conv, x, weight, on="sm_90", method="gemm")
    assert len(each_step(plan.steps)) > 50 and len(str(plan).splitlines()) < 30


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "edge", "wrap"])
def test_borders_are_gathered_small(mode):
    """Borders along one axis are cut to the block along the other axes before they are gathered."""
    x, weight = np.ones((1, 64, 4, 128, 128), np.float32), np.ones((4, 64, 3, 3, 3), np.float32)
    with cupyconv.options(workspace_limit=1 << 20):
        out = cupyconv.conv(x, weight, padding=1, padding_mode=mode)  # fills the caches
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, padding_mode=mode)
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, padding=1, padding_mode=mode, out=out))
    assert peak <= plan.workspace_bytes + 1_000_000  # gathering a whole plane used 4 million


WEIGHT_OF_16_BITS = np.random.default_rng(0).integers(-1, 2, (32, 32, 3, 3)).astype(np.float16)


@pytest.mark.parametrize(
    "function, oracle, x, arguments",
    [
        (cupyconv.conv, reference.conv, (2, 32, 6, 5), dict(padding=1)),
        (cupyconv.conv_transpose, reference_gradients.conv_transpose, (2, 32, 6, 5), dict(stride=2)),
    ],
)
def test_a_weight_that_alone_passes_the_limit_once_widened(function, oracle, x, arguments):
    """Every method once refused float16 weights that exceed the limit as float32, by default from 16 MiB on."""
    x = np.random.default_rng(1).integers(-1, 2, x).astype(np.float16)
    limit, widened = 32_000, 2 * WEIGHT_OF_16_BITS.nbytes
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(function, x, WEIGHT_OF_16_BITS, **arguments)
        assert widened <= plan.workspace_bytes <= widened + limit
        assert_exact(function(x, WEIGHT_OF_16_BITS, **arguments), oracle(x, WEIGHT_OF_16_BITS, **arguments), np.float16)


def test_recurrent_weights_that_alone_pass_the_limit_once_widened():
    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 2, 40), (128, 40), (128, 32)))
    expected = cupyconv.lstm(x, *weights)[0]
    with cupyconv.options(workspace_limit=16_000):
        np.testing.assert_array_equal(cupyconv.lstm(x, *weights)[0], expected)


def test_16_bit_sums_of_col2im_keep_within_the_limit():
    """Workspace for 16-bit sums of col2im keeps within the limit; it was once that of a whole sample."""
    columns = np.ones((2, 5 * 3, 98), np.float16)
    with cupyconv.options(workspace_limit=1000):
        plan = cupyconv.explain(cupyconv.col2im, columns, 100, 3)
        y = cupyconv.col2im(columns, 100, 3)
    assert plan.workspace_bytes <= 1000 < 5 * 100 * 4
    assert_exact(y, reference.col2im(columns, [100], [3]), np.float16)


@pytest.mark.parametrize("limit", [16 << 20, 24 << 20, 30 << 20])
def test_the_last_chunk_of_a_chain_keeps_within_the_limit(limit):
    """The last chunk has fewer samples, and once took the memory for the other chunks' images as its own."""
    x = np.ones((50, 8, 100, 7), np.complex64)
    layers = [cupyconv.ConvLayer(np.ones(s, np.complex64), padding=1) for s in ((300, 8, 3, 3), (48, 300, 3, 1))]
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on="sm_90")
    assert plan.workspace_bytes <= limit and "chunks" in plan.reason
    kernels = {step.kernel.name for step in plan.steps if hasattr(step, "kernel")}
    assert ("1 by 'direct'" in plan.reason) == ("direct" in kernels), "the methods of the chunks"


def test_a_single_step_of_a_gru_keeps_within_the_limit():
    """A GRU step with reset before its product has two launches and a buffer, which once ignored the limit."""
    arrays = [np.ones(shape, np.float32) for shape in ((64, 8), (64, 32), (96, 8), (96, 32))]
    needed = cupyconv.explain(cupyconv.gru_step, *arrays, linear_before_reset=False, on="sm_90").workspace_bytes
    assert needed > 0
    with cupyconv.options(workspace_limit=needed):
        plan = cupyconv.explain(cupyconv.gru_step, *arrays, linear_before_reset=False, on="sm_90")
    assert plan.workspace_bytes == needed
    with cupyconv.options(workspace_limit=1000), pytest.raises(ValueError, match=r"1,000 bytes of workspace"):
        cupyconv.explain(cupyconv.gru_step, *arrays, linear_before_reset=False, on="sm_90")


def test_a_merge_of_empty_fields_is_empty(target):
    """Merging inputs of size 0 gives an empty result; it was once refused, with an error about a kernel."""
    xs = [target.to_device(np.ones((2, c, 5, 0), np.float32)) for c in (3, 1)]
    weight = target.to_device(np.ones((4, 4), np.float32))
    y, pullback = cupyconv.vjp(cupyconv.linmerge, xs, weight, activation="relu")
    gradients = pullback(y)
    assert y.shape == (2, 4, 5, 0)
    assert [tuple(gradient.shape) for gradient in gradients[0]] == [(2, 3, 5, 0), (2, 1, 5, 0)]
    assert not target.to_host(gradients[1]).any()
    image = target.to_device(np.ones((1, 2, 0, 3), np.float32))
    assert cupyconv.conv(image, target.to_device(np.ones((3, 2, 1, 1), np.float32)), stride=2).shape == (1, 3, 0, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_no_outputs(target, groups):
    """Gradients without outputs once divided by zero, or could not be written if the weight was complex."""
    grad, x = np.ones((1, 0, 4), np.float32), np.ones((1, 4, 6), np.float32)
    gradient = cupyconv.conv_grad_weight(target.to_device(grad), target.to_device(x), (3,), groups=groups)
    assert gradient.shape == (0, 4 // groups, 3)
    weight = target.to_device(np.ones((0, 4 // groups, 3), np.complex64))
    gradient = cupyconv.conv_grad_input(target.to_device(grad), weight, x.shape, groups=groups)
    assert gradient.dtype == np.complex64 and not target.to_host(gradient).any() and gradient.shape == x.shape


@pytest.mark.parametrize("method", ["auto", "direct", "gemm", "winograd", "fft"])
def test_whatever_has_no_elements_has_a_result_by_every_method(method):
    """Without samples, channels or outputs a result is zeros if nothing is summed, or is refused with a reason."""
    for samples, inputs, outputs, groups, stride in product((0, 1), (0, 2), (0, 2), (1, 2), (1, 2)):
        x = np.ones((samples, inputs * groups, 5, 4), np.float32)
        weight = np.ones((outputs * groups, inputs, 1, 3), np.float32)
        adjoint = np.ones((inputs * groups, outputs, 1, 3), np.float32)
        named = {"stride": stride, "padding": (0, 1), "groups": groups}
        grad = cupyconv.conv(x, weight, **named) + 1
        for function, arguments in (
            (cupyconv.conv, (x, weight)),
            (cupyconv.conv_transpose, (x, adjoint)),
            (cupyconv.conv_grad_input, (grad, weight, x.shape)),
            (cupyconv.conv_grad_weight, (grad, x, (1, 3))),
        ):
            try:
                result = function(*arguments, **named, method=method)
            except ValueError as refusal:
                assert method != "auto" and "does not apply" in str(refusal)
                continue
            assert result.any() == (0 not in (samples, inputs, outputs) and result.size > 0)
    empty, weight = np.ones((1, 2, 0, 4), np.float32), np.ones((2, 2, 1, 3), np.float32)
    assert cupyconv.conv(empty, weight, padding=(0, 1), method=method).shape == empty.shape


def test_zeros_of_either_sign_are_different_settings(target):
    x, w = target.to_device(-np.ones((1, 1, 1), np.float32)), target.to_device(np.ones((1, 1, 1), np.float32))
    for zero in (0.0, -0.0, 0.0):
        y = target.to_host(cupyconv.conv(x, w, activation=("clip", zero, 5.0)))
        assert np.signbit(y).item() == np.signbit(zero)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_step_without_inputs(target, dtype):
    """CuPy gives an empty array a null address, which tells a kernel that the inputs are already projected."""
    rng = np.random.default_rng(0)
    shapes = (4, 0), (4, 3), (9, 0), (9, 3)
    x, h, w, r = [target.to_device(rng.standard_normal(shape).astype(dtype)) for shape in shapes]
    y = target.to_host(cupyconv.gru_step(x, h, w, r))
    without = [target.to_device(np.zeros(shape, dtype)) for shape in ((4, 1), (9, 1))]
    assert_exact(y, target.to_host(cupyconv.gru_step(without[0], h, without[1], r)), np.dtype(dtype).name)


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_a_sequence_of_no_steps_reads_no_inputs(target, cell):
    """The CUDA kernel once multiplied missing inputs by weights, for a result that was not stored."""
    rows = {"rnn": 2, "lstm": 8, "gru": 6}[cell]
    shapes = (0, 3, 4), (rows, 4), (rows, 2)
    x, w, r, h0 = [target.to_device(np.ones(shape, np.float32)) for shape in (*shapes, (1, 3, 2))]
    function = getattr(cupyconv, cell)
    for y, states in (function(x, w, r, h0=h0), cupyconv.vjp(function, x, w, r, h0=h0)[0]):
        last = states[0] if cell == "lstm" else states
        assert y.shape == (0, 3, 2) and (target.to_host(last) == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.float16])
@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
@pytest.mark.parametrize(
    "x, weight, settings",
    [
        ((1, 1, 3), (1, 1, 3), {}),
        ((2, 4, 5), (4, 1, 3), dict(groups=4, padding=1)),
        ((2, 4, 5, 6), (4, 1, 2, 3), dict(groups=4, stride=2)),
        ((2, 2, 5, 6), (2, 6, 3, 3), {}),
        ((2, 3, 9, 10), (3, 3, 3, 3), {}),
        ((2, 3, 9, 10), (3, 3, 3, 3), dict(method="gemm")),
        ((2, 3, 9, 10), (3, 3, 3, 3), dict(method="direct")),
        ((2, 64, 12, 12), (64, 64, 3, 3), {}),
    ],
    ids=str,
)
def test_an_infinite_weight_is_no_part_of_what_it_does_not_reach(x, weight, settings, value, dtype):
    """Zeros once stood in for terms that a transposed convolution does not have; zero times infinity is NaN."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(1, 3, shape).astype(dtype) for shape in (x, weight))
    weight[(*(0,) * (weight.ndim - 1), -1)] = value
    window = {name: value for name, value in settings.items() if name != "method"}
    with np.errstate(all="ignore"):
        expected = reference_gradients.conv_transpose(x, weight, **window)
    actual = cupyconv.conv_transpose(x, weight, **settings)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[finite], expected[finite].astype(dtype))


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name], ids=str)
def test_a_transposed_convolution_and_its_activation_keep_within_the_limit(activation):
    """gelu and mish once used two more arrays of the size of their input."""
    x, weight, limit = np.ones((2, 16, 40, 40), np.float32), np.ones((16, 16, 3, 3), np.float32), 1 << 20
    with cupyconv.options(workspace_limit=limit):
        out = cupyconv.conv_transpose(x, weight, stride=2, activation=activation)
        call = partial(cupyconv.conv_transpose, x, weight, stride=2, activation=activation, out=out)
        assert peak_bytes(call) <= limit


def test_the_commit_of_a_bench_is_that_of_its_own_repository(tmp_path):
    """An installed copy once recorded the commit of the repository that surrounded its environment."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    tracked, installed = tmp_path / "tracked.py", tmp_path / "venv" / "machines.py"
    installed.parent.mkdir()
    for file in (tracked, installed):
        file.write_text("pass\n")
    try:
        for command in (["init", "-q"], ["add", "tracked.py"], ["commit", "-q", "-m", "one"]):
            subprocess.run(git + command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    assert machines.commit_of(installed) == "unknown"
    assert re.fullmatch("[0-9a-f]{7,}", machines.commit_of(tracked))


@pytest.mark.parametrize(
    "shape, strides, overlaps",
    [
        ((2, 3), (12, 4), False),
        ((2,), (4,), False),
        ((2,), (3,), True),  # they overlap by a byte
        ((1, 2), (1, 4), False),
        ((2, 2), (4, -8), False),
        ((2, 3), (4, 8), False),
        ((3, 3), (4, 8), True),
        ((2, 2), (6, 4), True),
        ((0, 2), (4, 0), False),
        ((2,), (0,), True),
        ((2, 3), (12, 8), False),  # neither axis steps over the other
    ],
)
def test_views_whose_elements_share_memory(shape, strides, overlaps):
    assert overlaps_itself(shape, strides, 4) is overlaps
