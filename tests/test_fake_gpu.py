"""The real CuPy on emulated GPUs (``pytest --fake-gpu``), which a test can make small, slow or failing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from recurrent_cases import RecurrentCase
from targets import gpu_target
from test_failing_memory import CALLS, ON_NUMPY_ONLY, arrays_on

import cupyconv
from cupyconv.call import operation
from cupyconv.cuda.plan import conv as cuda_planning
from tests import fake_gpu

pytestmark = pytest.mark.fake_gpu

CUDA_CALLS = [name for name in CALLS if name not in ON_NUMPY_ONLY]


@pytest.fixture
def cupy() -> Any:
    if not fake_gpu.is_installed():
        pytest.skip(fake_gpu.unavailable() or "GPUs are emulated only under --fake-gpu")
    return gpu_target().xp


@pytest.fixture
def machine(cupy):
    from tests.fake_gpu.machine import MACHINE

    cupy.cuda.Device().synchronize()
    MACHINE.launches.clear()
    return MACHINE


@pytest.fixture
def no_pool(cupy):
    """Make each array an allocation of the device itself; the pool's free memory is released first."""
    pool = cupy.get_default_memory_pool()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.set_allocator(None)
    yield
    cupy.cuda.set_allocator(pool.malloc)


def layer(cupy, seed=0, shape=(2, 6, 9, 8), outputs=5):
    """Return an image and a weight of small integers on the device, and the reference result of their convolution."""
    rng = np.random.default_rng(seed)
    host = [rng.integers(-4, 5, size).astype(np.float32) for size in (shape, (outputs, shape[1], 3, 3))]
    return [cupy.asarray(array) for array in host], reference.conv(*host)


# ---- the emulation itself ---------------------------------------------------------------------------------------------


def test_work_waits_until_it_is_waited_for(cupy, machine):
    x = cupy.zeros(4, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        x += 1
    assert x.get(stream=cupy.cuda.Stream(non_blocking=True)).tolist() == [0] * 4  # this stream waits for no other
    stream.synchronize()
    assert x.get().tolist() == [1] * 4


def test_a_stream_waits_for_an_event_of_another(cupy, machine):
    x = cupy.zeros(4, np.float32)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with first:
        x += 1
        event = first.record()
        x += 10  # not awaited: it follows the event
    second.wait_event(event)
    assert x.get(stream=second).tolist() == [1] * 4
    assert not first.done or x.get().tolist() == [11] * 4


def test_memory_is_unwritten_when_it_is_new(cupy, no_pool):
    assert np.isnan(cupy.empty(3, np.float64).get()).all()


def test_what_is_not_emulated_says_so(cupy, capfd):
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="801"):
        cupy.cuda.runtime.deviceGetLimit(0)
    assert "cudaDeviceGetLimit is not emulated" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes"),
    [((1, 1, 1), (1025, 1, 1), 0), ((1, 65536, 1), (32, 1, 1), 0), ((1, 1, 1), (32, 1, 1), (48 << 10) + 1)],
    ids=["threads", "rows", "shared"],
)  # fmt: skip
def test_launches_are_held_against_the_gpus_limits(cupy, machine, grid, block, shared_bytes):
    kernel = cupy.RawModule(code='extern "C" __global__ void nothing_to_do(float* x) {}', backend="nvrtc")
    function = kernel.get_function("nothing_to_do")
    x = cupy.zeros(1, np.float32)
    machine.launches.clear()
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        function(grid, block, (x,), shared_mem=shared_bytes)
    assert not machine.launches
    function((1, 65535, 1), (1024, 1, 1), (x,), shared_mem=48 << 10)
    (launch,) = machine.launches
    assert (launch.name, launch.grid, launch.block, launch.shared_bytes) == (
        "nothing_to_do", (1, 65535, 1), (1024, 1, 1), 48 << 10
    )  # fmt: skip


def test_a_kernel_that_nvrtc_refuses_is_an_error(cupy, monkeypatch):
    """The project's own kernels are compiled by NVRTC before the host runs them."""
    from cupyconv.cuda.run.kernel_sources import compile_options, kernel_source

    source = kernel_source("epilogue").replace("__global__", "__globalll__")
    options = compile_options((("DTYPE", "float32"),))
    with pytest.raises(cupy.cuda.compiler.CompileException, match="__globalll__"):
        cupy.RawModule(code=source, options=options, backend="nvrtc").get_function("epilogue")


def test_subnormals_are_zeros_in_float32_only(cupy):
    for dtype, expected in ((np.float32, 0), (np.float64, 2)):
        tiny = np.finfo(dtype).smallest_subnormal
        x, w = cupy.full((1, 1, 4), tiny, dtype), cupy.full((1, 1, 1), 2, dtype)
        y = cupyconv.conv(x, w, method="direct").get()
        assert (y / tiny).tolist() == [[[expected] * 4]]
        assert ((x + x).get() / tiny).tolist() == [[[expected] * 4]]  # computed by a kernel of CuPy


# ---- streams and threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "gemm", "implicit_gemm"])
@pytest.mark.parametrize("kind", ["non_blocking", "blocking", "per_thread", "null"])
def test_all_work_of_a_call_is_on_the_callers_stream(cupy, machine, kind, method):
    """This holds however slow another stream is; the result is read on the caller's stream too."""
    (x, w), expected = layer(cupy)
    cupy.cuda.Device().synchronize()
    stream = {
        "non_blocking": lambda: cupy.cuda.Stream(non_blocking=True), "blocking": lambda: cupy.cuda.Stream(),
        "per_thread": lambda: cupy.cuda.Stream.ptds, "null": lambda: cupy.cuda.Stream.null,
    }[kind]()  # fmt: skip
    machine.launches.clear()
    with stream:
        y = cupyconv.conv(x, w, method=method)
    streams = {id(launch.stream) for launch in machine.launches}
    assert streams == {id(machine.stream(stream.ptr))}
    assert np.array_equal(y.get(stream=stream), expected)


def test_threads_have_default_streams_of_their_own(cupy, machine):
    """Each thread uses its own default stream, as under CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1."""

    def work(seed: int) -> tuple[np.ndarray, np.ndarray]:
        with cupy.cuda.Stream.ptds:
            (x, w), expected = layer(cupy, seed)
            return cupyconv.conv(x, w, method="gemm").get(), expected

    with ThreadPoolExecutor(4) as pool:
        for actual, expected in pool.map(work, range(16)):
            assert np.array_equal(actual, expected)


def test_a_graph_of_a_chain_runs_on_what_its_arrays_hold_then(cupy, machine):
    """A graph is captured once and launched for two inputs; it has its own workspace."""
    (x, w), _ = layer(cupy, outputs=6)
    out = cupy.zeros((2, 6, 5, 4), np.float32)
    inputs = [x.copy(), x + 1]
    wanted = [cupyconv.conv(cupyconv.conv(i, w, method="direct"), w, method="direct").get() for i in inputs]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        middle = cupyconv.conv(x, w, method="implicit_gemm")
        cupyconv.conv(middle, w, method="implicit_gemm", out=out)
        stream.begin_capture()
        cupyconv.conv(x, w, method="implicit_gemm", out=middle)
        cupyconv.conv(middle, w, method="implicit_gemm", out=out)
        graph = stream.end_capture()
        for given, expected in zip(inputs, wanted):
            x[...] = given
            out.fill(0)
            graph.launch()
            assert np.array_equal(out.get(stream=stream), expected)


def test_a_packed_layer_is_read_in_other_streams_threads_and_graphs(cupy, machine, monkeypatch):
    """The weight that the first call packs is ready when it returns: nothing has to wait for that call's stream."""
    monkeypatch.setattr(cuda_planning, "METHODS", ("implicit_gemm",))
    (x, w), expected = layer(cupy)
    packed = cupyconv.ConvLayer(w).packed()
    w.fill(0)
    cupy.cuda.Device().synchronize()

    def result():
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            return cupyconv.conv_chain(x, [packed]).get(stream=stream)

    machine.launches.clear()
    first = cupy.cuda.Stream(non_blocking=True)
    with first:
        ignored = cupyconv.conv_chain(x, [packed])  # the other work in this stream stays pending
    assert np.array_equal(result(), expected) and np.array_equal(result(), expected)
    with ThreadPoolExecutor(4) as pool:
        for actual in pool.map(lambda _: result(), range(4)):
            assert np.array_equal(actual, expected)
    out, stream = cupy.zeros(expected.shape, np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cupyconv.conv_chain(x, [packed], out=out)
        stream.begin_capture()
        cupyconv.conv_chain(x, [packed], out=out)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch()
        assert np.array_equal(out.get(stream=stream), expected)
    assert [launch.name for launch in machine.launches].count("pack_weight") == 1
    assert np.array_equal(ignored.get(stream=first), expected)


def test_a_layer_packed_on_the_second_gpu_stays_there(cupy, machine, monkeypatch):
    monkeypatch.setattr(cuda_planning, "METHODS", ("implicit_gemm",))
    with cupy.cuda.Device(1):
        (x, w), expected = layer(cupy)
        cupy.cuda.Device().synchronize()
    packed = cupyconv.ConvLayer(w).packed()  # while the first GPU is the current one
    assert packed.weight.device.id == 1
    for _ in range(2):
        actual = cupyconv.conv_chain(x, [packed])
        assert actual.device.id == 1
        with cupy.cuda.Device(1):
            assert np.array_equal(actual.get(), expected)


# ---- other GPUs -----------------------------------------------------------------------------------------------------------


def test_arrays_of_the_second_gpu_are_computed_there(cupy, machine):
    with cupy.cuda.Device(1):
        (x, w), expected = layer(cupy)
        cupy.cuda.Device().synchronize()
    machine.launches.clear()
    assert cupy.cuda.runtime.getDevice() == 0
    y = cupyconv.conv(x, w)
    assert {launch.gpu for launch in machine.launches} == {1} and y.device.id == 1
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        assert np.array_equal(y.get(), expected)


def test_arrays_of_two_gpus_are_refused(cupy, machine):
    (x, w), _ = layer(cupy)
    with cupy.cuda.Device(1):
        other = w.copy() if w.device.id == 1 else cupy.ones(w.shape, w.dtype)
    machine.launches.clear()
    with pytest.raises(TypeError, match="device"):
        cupyconv.conv(x, other)
    assert not machine.launches


def test_a_layer_that_does_not_fit_a_small_gpu_at_once_takes_steps(cupy, machine):
    """Blocks that wait for each other must all be resident, which four multiprocessors do not allow for all blocks."""
    case = RecurrentCase(
        cell="lstm", steps=3, batch=40, inputs=20, hidden=200, direction="forward", dtype="float32",
        optional=("bias_ih",), linear_before_reset=False,
    )  # fmt: skip
    arrays = case.arrays()
    with cupy.cuda.Device(1):
        views, expected = case.views(arrays, cupy.asarray, cupy), case.expected(arrays)
        machine.launches.clear()
        results = case.call(views)
        assert {launch.name for launch in machine.launches} >= {"recurrent_step"}
        assert not any(launch.cooperative for launch in machine.launches)
        for result, wanted in zip(results, expected):
            case.assert_close(result.get(), wanted, expected.largest)
        with pytest.raises(ValueError, match="at the same time, the GPU has 4 multiprocessors"):
            case.call(views, method="persistent")


# ---- transforms -------------------------------------------------------------------------------------------------------


def filtered(cupy, size, taps, dtype=np.float32, **settings):
    """Return a call that filters an image by transforms, and a function for its error relative to the reference."""
    rng = np.random.default_rng(size)
    host = [rng.standard_normal(shape).astype(dtype) for shape in ((2, 2, size, size - 3), (3, 2, taps, taps))]
    x, weight = map(cupy.asarray, host)
    expected = reference.conv(*host, padding="same", padding_mode="reflect")

    def call():
        return cupyconv.conv(x, weight, padding="same", padding_mode="reflect", method="fft", **settings)

    def error(y):
        return abs(y.get() - expected).max() / abs(expected).max()

    return call, error


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_transforms_by_cupys_cufft(cupy, dtype):
    call, error = filtered(cupy, 40, 7, dtype)
    for limit in (None, 150_000):
        with cupyconv.options(workspace_limit=limit):
            assert error(call()) < 1e-5


def test_a_weight_gradient_by_cupys_cufft(cupy):
    """The limit holds for merged inputs, although the emulated cuFFT needs more memory than first assumed."""
    from cupyconv.call.dispatch import backend_for

    rng = np.random.default_rng(0)
    grad, *xs = (rng.standard_normal((2, channels, 40, 37)).astype(np.float32) for channels in (3, 2, 1))
    expected = reference_gradients.conv_grad_weight(grad, np.concatenate(xs, axis=1), (7, 7), padding=3)
    arrays = cupy.asarray(grad), list(map(cupy.asarray, xs))
    for limit in (None, 300_000):
        with cupyconv.options(workspace_limit=limit):
            actual = cupyconv.conv_grad_weight(*arrays, (7, 7), padding=3, method="fft")
            plan = cupyconv.explain(cupyconv.conv_grad_weight, *arrays, (7, 7), padding=3, method="fft")
        assert abs(actual.get() - expected).max() < 1e-5 * abs(expected).max()
        assert limit is None or plan.workspace_bytes <= limit
    device = backend_for({"x": actual}).device
    assert device.model.transform_area > 1.5
    area = device._thread.transforms[cupy.cuda.get_current_stream().ptr]._work_area.mem.size
    assert area > 0


def test_streams_share_no_transforms(cupy, machine):
    """Each stream has its own plans in its own memory.

    CuPy's own plans are used by several streams, so these would share the memory too.
    """
    from cupyconv.call.dispatch import backend_for

    call, error = filtered(cupy, 40, 7)
    cupy.cuda.Device().synchronize()
    streams, results = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], []
    for stream in (*streams, *streams):
        with stream:
            results.append(call())
    for stream in streams:
        stream.synchronize()
    assert max(map(error, results)) < 1e-5
    device = backend_for({"x": results[0]}).device
    areas = [device._thread.transforms[stream.ptr]._work_area.ptr for stream in streams]
    assert areas[0] != areas[1]


def test_transforms_of_a_stream_share_the_largest_memory(cupy):
    """When a transform needs more memory, the stream's earlier plans are made again, and all results stay right."""
    from cupyconv.call.dispatch import backend_for

    with cupy.cuda.Stream(non_blocking=True) as stream:
        calls = [filtered(cupy, size, 5) for size in (20, 60, 20, 30)]
        stream.synchronize()
        sizes = []
        for call, error in (*calls, *calls):
            y = call()
            device = backend_for({"x": y}).device
            sizes.append(device._thread.transforms[stream.ptr]._work_area.mem.size)
            stream.synchronize()
            assert error(y) < 1e-5
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] == sizes[-1]


def test_what_is_allocated_while_a_plan_is_made_is_not_the_plans(cupy, monkeypatch):
    """A finalizer may allocate while a plan is made; its arrays once shared memory with the transforms."""
    from cupyconv.cuda.run.cupy_device import _Transforms

    lent, found = _Transforms._lent, []

    def lending(self, nbytes, allocate):
        if not found:
            found.append(cupy.full(1000, 7, np.float32))
        return lent(self, nbytes, allocate)

    monkeypatch.setattr(_Transforms, "_lent", lending)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        call, error = filtered(cupy, 36, 5)
        assert error(call()) < 1e-5
        stream.synchronize()
        assert (found[0] == 7).all()


def test_a_finalizer_may_load_a_kernel_while_one_is_loaded(cupy, monkeypatch):
    """Such a call once waited forever for the lock of its own thread."""
    from cupyconv.cuda.run.cupy_device import CupyDevice

    load, outcomes = CupyDevice._function, []
    (x, weight), expected = layer(cupy, seed=3)

    def loading(self, kernel, shared_bytes):
        if not outcomes:
            outcomes.append(None)
            outcomes.append(np.array_equal(cupyconv.conv(x, weight, method="direct").get(), expected))
        return load(self, kernel, shared_bytes)

    monkeypatch.setattr(CupyDevice, "_function", loading)
    operation.forget_calls()
    thread = threading.Thread(
        target=lambda: outcomes.append(np.array_equal(cupyconv.conv(x, weight).get(), expected)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert outcomes == [None, True, True]


def steps_of_deconvolution(cupy, size, taps=9):
    """Return an input and an output array, a step (a convolution and its input gradient) and its reference."""
    rng = np.random.default_rng(size)
    host = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, size, size - 3), (1, 1, taps, taps))]
    x, psf = map(cupy.asarray, host)
    blurred, out = cupy.zeros_like(x), cupy.zeros_like(x)
    same = dict(padding=taps // 2, method="fft")

    def step():
        cupyconv.conv(x, psf, out=blurred, **same)
        cupyconv.conv_grad_input(blurred, psf, x.shape, out=out, **same)

    def expected(image):
        forward = reference.conv(image, host[1], padding=taps // 2)
        return reference_gradients.conv_grad_input(forward, host[1], image.shape, padding=taps // 2)

    return x, out, step, expected


def test_a_graph_of_transforms_works_in_memory_of_its_own(cupy, machine):
    """The graph may run on another stream while such calls run on its own, and after no plan is cached any more."""
    from cupyconv.call.dispatch import backend_for

    x, out, step, expected = steps_of_deconvolution(cupy, 40)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with stream:
        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        stream.synchronize()
    transforms = backend_for({"x": x}).device._thread.transforms
    for seed in range(2):
        image = np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)
        _, _, beside, _ = steps_of_deconvolution(cupy, 40)
        x.set(image, stream=other)
        cupy.cuda.Device().synchronize()
        graph.launch(other)
        while not other.done:  # each query lets it do one more piece of work
            with stream:
                beside()
                stream.synchronize()
        wanted = expected(image)
        assert abs(out.get(stream=other) - wanted).max() < 1e-5 * abs(wanted).max()
        with stream:
            step()
            _, _, larger, _ = steps_of_deconvolution(cupy, 70)
            larger()
        cupy.cuda.Device().synchronize()
        transforms.clear()  # as after the thread has used many streams


def test_a_capture_makes_no_plan_of_transforms(cupy, machine):
    """The call is refused before anything is enqueued; outside a capture, it makes what the next capture needs."""
    _, _, step, _ = steps_of_deconvolution(cupy, 30)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    with other:
        step()
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cannot create a plan during a capture"):
            step()
        graph = machine.stream(stream.ptr).capture
        assert graph.is_valid and not graph.work
        stream.end_capture()
        step()
        stream.begin_capture()
        step()
        stream.end_capture()
    cupy.cuda.Device().synchronize()


# ---- the report of a GPU ------------------------------------------------------------------------------------------------


def test_the_report_of_a_gpu_compiles_and_runs_kernels(cupy, tmp_path):
    """The report's processes run here what they do on a GPU, so that a mistake in them costs no GPU time."""
    from cupyconv.cuda.run.cupy_device import CupyDevice
    from tests.gpu_report.compilation import compile_variants, planned_variants
    from tests.gpu_report.smoke import run_call

    results = tmp_path / "results.jsonl"
    assert compile_variants(CupyDevice(0), planned_variants(90)[:3], results) == 0
    assert results.read_text().count('"passed"') == 3
    for name in ("merge", "implicit_gemm", "recurrent_persistent", "finish_tiles"):
        assert run_call(gpu_target(), name, "float32")["message"] == ""


def test_host_time_is_measured_with_a_driver_that_does_nothing(cupy):
    """After `let_go`, calls still return and are timed; how long they take is measured on an idle machine only."""
    command = [sys.executable, "-m", "tests.fake_gpu", "tests/benchmarks/host_time.py", "--rounds", "1", "--calls", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    of_cupy = done.stdout.partition("cuda, CuPy on a driver that does nothing")[2].partition("NumPy, ")[0]
    assert of_cupy.count("one launch") == 8 and of_cupy.count("GEMM") == 4


# ---- streams that are slow or fail, and little memory -----------------------------------------------------------------


#: Work items that a slow stream holds.  Each time CuPy queries, without waiting, whether it is done, a little of it is
#: done.
MUCH = 50


@pytest.mark.parametrize("name", CUDA_CALLS)
def test_a_slow_stream_is_not_waited_for(cupy, machine, name):
    """A call's work is enqueued behind that of the stream, which is not done when the call returns."""
    target, call = gpu_target(), CALLS[name]
    arrays = arrays_on(target)
    stream, begun = cupy.cuda.Stream(non_blocking=True), []
    cupy.cuda.Device().synchronize()
    with stream:
        expected = call(arrays).get()  # a first call loads modules, and makes this stream's plans of transforms
    cupy.cuda.Device().synchronize()
    for _ in range(MUCH):
        machine.enqueue(machine.stream(stream.ptr), lambda: begun.append(True))
    with stream:
        y = call(arrays)
    assert len(begun) < MUCH, "the host has waited"
    assert np.array_equal(y.get(stream=stream), expected) and len(begun) == MUCH


@pytest.mark.parametrize("name", CUDA_CALLS)
def test_launches_that_fail(cupy, machine, name):
    """Each launch of a call fails in turn with CUDA's own error.

    Only the result may have changed, no memory is lost, and the next call is right.
    """
    target, call = gpu_target(), CALLS[name]
    arrays = arrays_on(target)
    held = {key: array.get() for key, array in vars(arrays).items()}
    pool = cupy.get_default_memory_pool()
    expected, in_use = call(arrays).get(), pool.used_bytes()
    with machine.failing_launches(-1) as launches:
        call(arrays)
    assert launches() > 0
    for number in range(launches()):
        with machine.failing_launches(number):
            try:
                call(arrays)
            except (cupy.cuda.driver.CUDADriverError, cublas_error()):
                pass
            else:
                raise AssertionError("nothing has failed")
        assert np.array_equal(call(arrays).get(), expected)
        assert all(np.array_equal(getattr(arrays, key).get(), array) for key, array in held.items())
        gc.collect()
        assert pool.used_bytes() == in_use


def cublas_error() -> type[Exception]:
    from cupy_backends.cuda.libs.cublas import CUBLASError

    return CUBLASError


@pytest.mark.parametrize("name", CUDA_CALLS)
def test_a_pool_with_a_limit(cupy, machine, name):
    """With less and less pool memory, calls use smaller chunks, then raise MemoryError; with it back they are right."""
    target, call = gpu_target(), CALLS[name]
    expected = call(arrays_on(target)).get()
    pool, outcomes = cupy.cuda.MemoryPool(), []  # a new pool, without fragments of other calls
    with cupy.cuda.using_allocator(pool.malloc):
        arrays = arrays_on(target)
        least = pool.total_bytes()
        for spare in (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 512):
            pool.set_limit(size=least + spare)
            try:
                y = call(arrays).get()
                # A plan with less memory may sum in another order.
                np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
                outcomes.append(True)
            except cupy.cuda.memory.OutOfMemoryError:
                outcomes.append(False)
            gc.collect()
            pool.free_all_blocks()
        pool.set_limit(size=0)
        assert outcomes[0] and not outcomes[-1] and outcomes == sorted(outcomes, reverse=True)
        assert np.array_equal(call(arrays).get(), expected)


def test_a_limit_of_the_pool_takes_smaller_chunks(cupy, machine):
    """Less memory gives more launches and the same numbers."""
    x, w = cupy.ones((8, 4, 64, 64), np.float32), cupy.ones((4, 4, 3, 3), np.float32)
    out, pool = cupy.zeros((8, 4, 62, 62), np.float32), cupy.get_default_memory_pool()
    launches = []
    for limit in (0, 600_000):
        gc.collect()
        pool.free_all_blocks()
        pool.set_limit(size=limit and pool.total_bytes() + limit)
        machine.launches.clear()
        try:
            cupyconv.conv(x, w, out=out, method="gemm")
        finally:
            pool.set_limit(size=0)
        assert (out.get() == 36).all()
        launches.append(len(machine.launches))
    assert launches[1] > launches[0]
