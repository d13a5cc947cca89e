"""Properties of cuBLAS and CuPy that the CUDA backend relies on, and that only a GPU can show.

Run the first test of this file first on a new kind of GPU: everything else assumes that it passes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import reference
from recurrent_cases import RecurrentCase
from targets import gpu_target
from tolerance import assert_close

import cupyconv
from cupyconv.call.dispatch import backend_for
from cupyconv.cuda.run.execution import PreparedPlan
from cupyconv.cuda.run.kernel_sources import kernel_directory
from tests import fake_gpu

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@pytest.fixture
def gpu():
    return gpu_target()


def random(rng, shape, dtype):
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_stride_zero_on_two_streams_at_once(gpu, dtype):
    """One strided-batched GEMM with a shared weight is right, and gives the same bits on concurrent streams."""
    cupy = gpu.xp
    rng = np.random.default_rng(0)
    x, w = random(rng, (16, 64, 24, 24), dtype), random(rng, (96, 64, 1, 1), dtype)
    device_x, device_w = cupy.asarray(x), cupy.asarray(w)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = [[], []]
    for _ in range(20):
        for stream, mine in zip(streams, results):
            with stream:
                mine.append(cupyconv.conv(device_x, device_w, method="gemm"))
    for stream in streams:
        stream.synchronize()
    first = gpu.to_host(results[0][0])
    for result in (*results[0], *results[1]):
        assert gpu.to_host(result).tobytes() == first.tobytes()
    assert_close(first[:1], reference.conv(x[:1], w), dtype, terms=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_same_bits_every_time(gpu, dtype, method):
    rng = np.random.default_rng(1)
    x, w = (gpu.to_device(random(rng, shape, dtype)) for shape in ((4, 16, 33, 31), (24, 16, 3, 3)))
    first, *others = (gpu.to_host(cupyconv.conv(x, w, padding=1, method=method)).tobytes() for _ in range(10))
    assert all(other == first for other in others)


def test_nothing_waits_for_the_gpu(gpu):
    """A call returns while its stream is still busy with earlier work."""
    cupy = gpu.xp
    x, w = cupy.ones((8, 32, 64, 64), np.float32), cupy.ones((32, 32, 3, 3), np.float32)
    cupyconv.conv(x, w, padding=1, activation="relu")  # compile and load
    source = (kernel_directory() / "bench" / "delay.cu").read_text(encoding="utf-8")
    delay = cupy.RawModule(code=source, backend="nvrtc").get_function("delay")
    cupy.cuda.Device().synchronize()
    delay((1,), (1,), (np.int64(300_000_000),))  # nanoseconds
    done = cupy.cuda.Event(disable_timing=True)
    cupyconv.conv(x, w, padding=1, activation="relu")
    done.record()
    returned_early = not done.done
    cupy.cuda.Device().synchronize()
    assert returned_early


def test_a_loop_with_out_does_not_grow_the_pool(gpu):
    cupy = gpu.xp
    x, w, out = cupy.ones((4, 8, 32, 32)), cupy.ones((8, 8, 3, 3)), cupy.empty((4, 8, 30, 30))
    cupyconv.conv(x, w, out=out)
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    for _ in range(50):
        cupyconv.conv(x, w, out=out)
    assert pool.total_bytes() == before


@pytest.mark.parametrize(
    ("kernel", "groups", "method"),
    [((8, 8, 1), 1, "direct"), ((8, 1, 3), 8, "direct"), ((8, 8, 3), 1, "direct"), ((8, 8, 3), 1, "implicit_gemm")],
    ids=str,
)
def test_methods_of_own_kernels_can_be_captured_in_a_graph(gpu, kernel, groups, method):
    """Fused merge, depthwise, general kernel and implicit GEMM, whose workspace the graph allocates."""
    cupy = gpu.xp
    x, w = cupy.ones((2, 8, 1000), np.float32), cupy.ones(kernel, np.float32)
    expected = gpu.to_host(cupyconv.conv(x, w, groups=groups, method=method))
    out = cupy.zeros(expected.shape, np.float32)
    cupy.cuda.Device().synchronize()  # the next stream waits for no other
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyconv.conv(x, w, groups=groups, method=method, out=out)
        stream.begin_capture()
        cupyconv.conv(x, w, groups=groups, method=method, out=out)
        graph = stream.end_capture()
        for _ in range(2):  # the second launch must find the first one's memory freed
            out.fill(0)
            graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(gpu.to_host(out), expected)


@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_recurrent_layer_can_be_captured_in_a_graph(gpu, cell, method):
    """Both methods are right, also in a graph: the counters that blocks wait for start from 0 in each launch."""
    cupy = gpu.xp
    case = RecurrentCase(
        cell=cell, steps=7, batch=35, inputs=20, hidden=138, direction="bidirectional", dtype="float32",
        optional=("bias_ih", "bias_hh", "h0"), linear_before_reset=False,
    )  # fmt: skip
    arrays = case.arrays()
    views, expected = case.views(arrays, gpu.to_device, cupy), case.expected(arrays)
    outs = [cupy.zeros(one.shape, np.float32) for one in case.call(views, method=method) if one is not None]
    out = outs if len(outs) == 2 else (outs[0], tuple(outs[1:]))
    cupy.cuda.Device().synchronize()  # the next stream waits for no other
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.call(views, method=method, out=out)
        stream.begin_capture()
        case.call(views, method=method, out=out)
        graph = stream.end_capture()
        for _ in range(2):
            for one in outs:
                one.fill(0)
            graph.launch(stream)
    stream.synchronize()
    for one, wanted in zip(outs, expected):
        case.assert_close(gpu.to_host(one), wanted, expected.largest)


def test_the_gemm_path_says_that_it_cannot_be_captured(gpu):
    cupy = gpu.xp
    x, w, out = (
        cupy.ones((2, 8, 1000), np.float32),
        cupy.ones((8, 8, 1), np.float32),
        cupy.zeros((2, 8, 1000), np.float32),
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyconv.conv(x, w, method="gemm", out=out)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cannot capture cuBLAS calls"):
            cupyconv.conv(x, w, method="gemm", out=out)
        stream.end_capture()


def test_a_call_that_converts_an_argument_says_that_it_cannot_be_captured(gpu):
    """By the launch of the graph, the memory of the converted copy would belong to another array."""
    cupy = gpu.xp
    x, w, out = cupy.ones((2, 8, 1000), np.float32), cupy.ones((8, 8, 1)), cupy.zeros((2, 8, 1000))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyconv.conv(x, w, method="direct", out=out)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"converts an argument \(x\) cannot be captured"):
            cupyconv.conv(x, w, method="direct", out=out)
        stream.end_capture()


def test_more_shared_memory_than_a_kernel_has_unasked(gpu):
    """A function must be told if it may use more than 48 KiB, also if it was told a smaller size before."""
    cupy = gpu.xp
    xs, w = [cupy.ones((1, 4, 256), np.float32)] * 5, cupy.ones((4, 20), np.float32)
    expected = gpu.to_host(cupyconv.linmerge(xs, w, method="direct"))
    plan = cupyconv.explain(cupyconv.linmerge, xs, w, method="direct")
    device = backend_for({"w": w}).device
    for shared_bytes in (50 << 10, 60 << 10, 49 << 10):
        (step,) = plan.steps
        wide = replace(plan, steps=(replace(step, shared_bytes=shared_bytes),))
        out = cupy.zeros(expected.shape, np.float32)
        arrays = {f"xs[{i}]": x for i, x in enumerate(xs)}
        PreparedPlan(wide, device).run({**arrays, "weight": w, "out": out})
        assert np.array_equal(gpu.to_host(out), expected)


def test_parameters_are_copied_when_a_launch_is_enqueued(gpu):
    """All launches of a plan share the memory of their parameters; many are in flight, each with its own addresses."""
    cupy = gpu.xp
    w = cupy.ones((4, 4), np.float32)
    images = [cupy.full((1, 4, 64), float(i), np.float32) for i in range(300)]
    results = [cupyconv.linmerge([x], w, method="direct") for x in images]
    assert all((gpu.to_host(y) == 4 * i).all() for i, y in enumerate(results))


def test_first_calls_of_many_threads(gpu):
    """Backends, modules and handles are created once, whichever thread needs them first."""
    x, w = gpu.to_device(np.ones((4, 6, 50), np.float32)), gpu.to_device(np.ones((5, 6, 3), np.float32))
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda i: gpu.to_host(cupyconv.conv(x, w, method=("gemm", "direct")[i % 2])), range(32))
        )
    assert all((result == 18).all() for result in results)


def lstm_arguments(gpu, dtype):
    rng = np.random.default_rng(2)
    shapes = (40, 24, 32), (4 * 136, 32), (4 * 136, 136)  # x, and the weights of 136 hidden units
    return [gpu.to_device((rng.standard_normal(shape) / 4).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_blocks_that_wait_for_each_other_beside_other_work(gpu, dtype):
    """Two persistent kernels and products run on separate streams.

    Each run gives the same bits, which agree with the method "step".
    """
    cupy = gpu.xp
    arguments = lstm_arguments(gpu, dtype)
    expected = gpu.to_host(cupyconv.lstm(*arguments, method="step")[0])
    busy = cupy.ones((2048, 2048), np.float32)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results = []
    for _ in range(2 if fake_gpu.is_installed() else 10):
        for stream in streams[:2]:
            with stream:
                results.append(cupyconv.lstm(*arguments, method="persistent")[0])
        with streams[2]:
            busy @ busy
    for stream in streams:
        stream.synchronize()
    first, *others = map(gpu.to_host, results)
    assert all(other.tobytes() == first.tobytes() for other in others)
    tolerance = {"float16": 1e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(first, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["step", "persistent"])
def test_a_recurrent_sequence_can_be_captured_in_a_graph(gpu, method):
    cupy = gpu.xp
    arguments = lstm_arguments(gpu, np.float32)
    expected = [gpu.to_host(a) for a in flat(cupyconv.lstm(*arguments, method=method))]
    out = cupy.zeros(expected[0].shape, np.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupyconv.lstm(*arguments, method=method, out=out)
        stream.begin_capture()
        results = flat(cupyconv.lstm(*arguments, method=method, out=out))
        graph = stream.end_capture()
        for _ in range(2):
            for result in results:
                result.fill(0)
            graph.launch(stream)
    stream.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        assert np.array_equal(gpu.to_host(result), wanted)


def flat(result):
    y, (h, c) = result
    return [y, h, c]


def test_a_gemm_of_very_many_columns(gpu):
    """The last columns are right in a product near the largest size that plans put into one call."""
    cupy = gpu.xp
    pixels = 2**28 + 8
    x = cupy.zeros((1, 2, pixels), np.float16)
    x[..., -2:] = 3
    y = cupyconv.conv(x, cupy.ones((2, 2, 1), np.float16), method="gemm")
    assert gpu.to_host(y[..., -3:]).tolist() == [[[0, 6, 6], [0, 6, 6]]]


def test_past_two_to_the_31_elements(gpu):
    """Offsets have 64 bits: the last pixels of an array of more than 2**31 elements are right."""
    cupy = gpu.xp
    pixels = 2**31 + 1024
    if cupy.cuda.Device().mem_info[0] < 6 * pixels:
        pytest.skip("needs 13 GB of free GPU memory")
    x = cupy.zeros((1, 1, pixels), np.float16)
    x[..., -3:] = 1
    w = cupy.ones((1, 1, 3), np.float16)
    y = cupyconv.conv(x, w, method="direct")
    assert gpu.to_host(y[..., -4:]).tolist() == [[[0, 1, 2, 3]]]
