"""The host device, on which kernels are tested, is tested itself: correct kernels run, and seeded bugs are reported."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from cupyconv.cuda.run.device import GemmArguments
from cupyconv.problem.plan import Kernel
from tests import host_device
from tests.host_device import HostArray, HostDevice, KernelError, build, sanitize
from tests.host_device.blas import DATA_TYPES, round_to_tf32

host_device.require()
pytestmark = pytest.mark.host_device

SAMPLES = Path(host_device.__file__).parent / "seeded_bugs"
PARAMS = np.dtype([("x", "u8"), ("y", "u8"), ("n", "i4")], align=True)

#: Mark for tests whose kernel has a bug for which a sanitizer ends the process.
without_sanitizer = pytest.mark.skipif(build.sanitizer() != "", reason="the sanitizer reports this bug itself")


def run(device, name, x, y, *, n=None, grid=(1, 1, 1), block=64, shared_bytes=0, cooperative=False, **macros):
    """Launch one of the sample kernels."""
    params = np.zeros((), PARAMS)
    params["x"], params["y"], params["n"] = device.pointer(x), device.pointer(y), x.size if n is None else n
    kernel = Kernel(name, tuple((key, str(value)) for key, value in macros.items()))
    device.launch(kernel, grid, block, params, shared_bytes, cooperative)


@pytest.fixture(params=["ascending", "descending", "random"])
def device(request):
    return HostDevice(SAMPLES, order=request.param)


@pytest.fixture
def x(device):
    return device.asarray(np.arange(64, dtype=np.float32))


@pytest.fixture
def y(device):
    return device.empty(64, np.float32)


# ---- right kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [0, 1])
def test_barriers_and_shared_memory(device, dynamic):
    x = device.asarray(np.arange(256, dtype=np.float32))
    y = device.empty(256, np.float32)
    for _ in range(3):
        run(device, "block_reverse", x, y, grid=(4, 1, 1), shared_bytes=256 * dynamic, DYNAMIC=dynamic)
        np.testing.assert_array_equal(y, x.reshape(4, 64)[:, ::-1].ravel())


def test_shuffles_votes_and_atomics(device):
    values = np.arange(-100, 900, dtype=np.float32)
    x, y = device.asarray(values), device.asarray(np.zeros(2, np.float32))
    run(device, "warp_sum", x, y, grid=(4, 1, 1), block=256)
    np.testing.assert_array_equal(y, [values.sum(), 100])


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("shuffle", ["__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync"])
def test_each_shuffle(device, x, y, shuffle, halves):
    run(device, "warp_shuffles", x, y, n=3, SHUFFLE=shuffle, HALVES=halves)
    width = 16 if halves else 32
    lanes = np.arange(width)
    source = {
        "__shfl_sync": np.full(width, 3),
        "__shfl_xor_sync": lanes ^ 3,
        "__shfl_up_sync": np.where(lanes >= 3, lanes - 3, lanes),
        "__shfl_down_sync": np.where(lanes + 3 < width, lanes + 3, lanes),
    }[shuffle]
    np.testing.assert_array_equal(y.reshape(-1, width), x.reshape(-1, width)[:, source])


def exchange(device, x, *, blocks=3, **macros):
    """Return the rows that blocks wrote for each other."""
    y = device.asarray(np.zeros(2 * blocks * x.size + 1, np.float32))
    run(
        device,
        "block_exchange",
        x,
        y,
        grid=(blocks, 1, 1),
        block=32,
        **{"cooperative": True, "BARRIER": 1, "AWAITED": blocks, **macros},
    )
    return y[blocks * x.size : -1].reshape(blocks, -1)


def exchanged(x, blocks=3):
    return [2 * (x + (block + 1) % blocks) for block in range(blocks)]


def test_blocks_that_wait_for_each_other(device, x):
    for blocks in (1, 3, 5):
        np.testing.assert_array_equal(exchange(device, x, blocks=blocks), exchanged(x, blocks))


def test_grids_and_blocks_of_three_dimensions(device):
    x, y = device.asarray(np.zeros(1, np.float32)), device.empty(2 * 3 * 4 * 24, np.float32)
    run(device, "indices", x, y, grid=(2, 3, 4), block=(4, 3, 2))
    np.testing.assert_array_equal(y, np.arange(y.size))


@pytest.mark.parametrize("function", ["exp", "tanh", "erf", "log1p", "expm1", "sqrt", "rsqrtf", "__expf"])
def test_mathematics_in_float(device, function):
    values = np.linspace(0.1, 3, 50, dtype=np.float32)
    x, y = device.asarray(values), device.empty(50, np.float32)
    run(device, "mathematics", x, y, FUNCTION=function)
    import math

    exact = {"rsqrtf": lambda v: 1 / math.sqrt(v), "__expf": math.exp}.get(function) or getattr(math, function)
    np.testing.assert_allclose(y, [exact(float(v)) for v in values], rtol=1e-6)


@pytest.mark.skipif(build.sanitizer() == "tsan", reason="400,000 threads take minutes")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_conversions_are_exact(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
        names = {"TO": "__float2bfloat16_rn", "FROM": "__bfloat162float"}
    else:
        names = {"TO": "__float2half_rn", "FROM": "__half2float"}
    every = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = ((every[:-1].astype(np.float64) + every[1:]) / 2).astype(np.float32)
        near = [np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
        arbitrary = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
        values = np.concatenate([every, ties, *near, arbitrary])
        expected = values.astype(dtype).astype(np.float32)
    device = HostDevice(SAMPLES)
    x, y = device.asarray(values), device.empty(values.shape, np.float32)
    run(device, "half_conversions", x, y, grid=(-(-x.size // 256), 1, 1), block=256, **names)
    np.testing.assert_array_equal(y, expected)


# ---- seeded bugs --------------------------------------------------------------------------------------------


def test_divergent_barrier(device, x, y):
    message = r"divergent barrier: divergent_barrier.cu:\d+ .* \d+ threads? waiting at the barrier in divergent_barrier"
    with pytest.raises(KernelError, match=message):
        run(device, "divergent_barrier", x, y)


@without_sanitizer
def test_blocks_without_a_barrier_read_what_is_not_there_yet(device, x):
    assert not np.array_equal(exchange(device, x, BARRIER=0), exchanged(x))


def test_a_block_that_waits_for_too_many_is_a_deadlock(device, x):
    message = r"deadlock: every block waits .* 1 thread waiting for other blocks in grid_barrier.cuh:\d+"
    with pytest.raises(KernelError, match=message):
        exchange(device, x, AWAITED=4)


def test_blocks_wait_in_cooperative_launches_only(device, x):
    with pytest.raises(KernelError, match=r"grid_barrier.cuh:\d+, which a launch that is not cooperative"):
        exchange(device, x, cooperative=False)
    with pytest.raises(KernelError, match=r"a cooperative launch of .* at most 256"):
        exchange(device, x, blocks=257)


@without_sanitizer
def test_missing_barrier_gives_wrong_numbers(device, x, y):
    run(device, "missing_barrier", x, y)
    assert not np.array_equal(y, x[::-1])


@without_sanitizer
def test_missing_barrier_depends_on_the_order(x, y):
    results = []
    for order, seed in (("ascending", 0), ("descending", 0), ("random", 1), ("random", 2)):
        device = HostDevice(SAMPLES, order=order, seed=seed)
        x, y = device.asarray(np.arange(64, dtype=np.float32)), device.empty(64, np.float32)
        run(device, "missing_barrier", x, y)
        results.append(y.tobytes())
    assert len(set(results)) == 4


@without_sanitizer
def test_missing_warp_barrier(device, x, y):
    run(device, "warp_race", x, y, block=32, SYNCHRONISE="__syncwarp()")
    np.testing.assert_array_equal(y[:32], x[31::-1])
    run(device, "warp_race", x, y, block=32, SYNCHRONISE="")
    assert not np.array_equal(y[:32], x[31::-1])


def test_unwritten_shared_memory_is_nan_in_every_block(device, x):
    y = device.empty(128, np.float32)
    run(device, "unwritten_shared", x, y, grid=(2, 1, 1))
    assert np.isnan(y.reshape(2, 64)[:, 32:]).all()
    assert not np.isnan(y.reshape(2, 64)[:, :32]).any()


@without_sanitizer
@pytest.mark.parametrize("side, where", [(-1, "4 bytes before"), (1, "0 bytes after")])
def test_write_outside_an_array(device, x, y, side, where):
    with pytest.raises(KernelError, match=f"outside its arrays: {where} an allocation of 256 bytes"):
        run(device, "out_of_bounds_write", x, y, SIDE=side)
    run(device, "block_reverse", x, y, DYNAMIC=0)  # the guard zone has been restored


def test_early_exit_is_refused_where_strict(device, x, y):
    run(device, "early_exit", x, y, n=50)
    np.testing.assert_array_equal(y[:50], x[:50])
    device.strict = True
    run(device, "early_exit", x, y, n=64)
    with pytest.raises(KernelError, match=r"barrier in early_exit.cu:8"):
        run(device, "early_exit", x, y, n=50)


def test_deadlock_is_described(device, x, y):
    message = (
        "deadlock.*1 thread waiting at the warp operation in deadlock.cu:5.*63 threads waiting at the barrier|"
        "deadlock.*63 threads waiting at the barrier in deadlock.cu:6, 1 thread waiting at the warp operation"
    )
    with pytest.raises(KernelError, match=message):
        run(device, "deadlock", x, y)
    run(device, "block_reverse", x, y, DYNAMIC=0)  # the next launch is not affected


@pytest.mark.parametrize(
    "mask, lanes, strict, message",
    [
        ("0x0000ffffu", 32, False, "missing from its own warp mask 0x0000ffff in warp_mask.cu:6"),
        ("0xffffffffu", 20, False, "exited"),
        ("0xffffffffu", 48, True, "beyond the block"),
        ("(threadIdx.x < 8 ? 0xffffffffu : 0xffffff01u)", 32, False, "deadlock.*0xffffff01|missing"),
    ],
)
def test_wrong_warp_mask(device, x, y, mask, lanes, strict, message):
    device.strict = strict
    with pytest.raises(KernelError, match=message):
        run(device, "warp_mask", x, y, n=lanes, block=48 if strict else 32, MASK=mask)


def test_shared_memory_has_limits(device, x, y):
    run(device, "shared_size", x, y, COUNT=12 * 1024)
    with pytest.raises(KernelError, match="static shared memory of 49156 bytes"):
        run(device, "shared_size", x, y, COUNT=12 * 1024 + 1)
    with pytest.raises(KernelError, match="pass the limit of 232448"):
        run(device, "shared_size", x, y, shared_bytes=227 << 10, COUNT=64)
    with pytest.raises(KernelError, match="dynamic shared memory of 232449 bytes"):
        run(device, "block_reverse", x, y, shared_bytes=(227 << 10) + 1, DYNAMIC=1)
    with pytest.raises(KernelError, match="the launch gives none"):
        run(device, "block_reverse", x, y, DYNAMIC=1)


@pytest.mark.parametrize(
    "grid, block",
    [((1, 1, 1), 0), ((1, 1, 1), 1025), ((1, 1, 1), (1, 1, 65)), ((0, 1, 1), 32), ((2**31, 1, 1), 32)]
    + [((1, 65536, 1), 32), ((1, 1, 65536), 32), ((-1, 1, 1), 32), ((1, 1, 1), (32, 33))],
)
def test_grid_and_block_have_limits(device, x, y, grid, block):
    with pytest.raises(KernelError):
        run(device, "indices", x, y, grid=grid, block=block)


def test_params_have_to_be_the_struct(device, x):
    kernel = Kernel("indices")
    with pytest.raises(KernelError, match="params has 20 bytes, the kernel's struct 24"):
        device.launch(kernel, (1, 1, 1), 1, np.zeros((), [("x", "u8"), ("y", "u8"), ("n", "i4")]), 0)
    with pytest.raises(TypeError, match="raw bytes"):
        device.launch(kernel, (1, 1, 1), 1, np.zeros((), "i8"), 0)
    with pytest.raises(TypeError, match="raw bytes"):
        device.launch(kernel, (1, 1, 1), 1, np.zeros(2, PARAMS), 0)


def test_compile_error_shows_the_compilers_message(device, x, y):
    with pytest.raises(host_device.CompileError, match="no_such_function"):
        run(device, "mathematics", x, y, FUNCTION="no_such_function")


# ---- sanitizers ---------------------------------------------------------------------------------------------

UNDER_SANITIZER = """
import sys
from tests.test_host_device import *
device = HostDevice(SAMPLES)
x = device.asarray(np.arange(64, dtype=np.float32))
y = device.asarray(np.zeros(64, np.float32))
run(device, sys.argv[1], x, y, **eval(sys.argv[2]))
"""

#: Arguments to launch two blocks that wait for each other.
TOGETHER = {"grid": (2, 1, 1), "block": 32, "n": 8, "cooperative": True, "AWAITED": 2}


@without_sanitizer
@pytest.mark.parametrize(
    "mode, name, arguments, finding",
    [
        ("asan", "block_reverse", {"DYNAMIC": 0}, None),
        ("asan", "deadlock", {}, "KernelError: deadlock<>: deadlock"),
        ("asan", "shared_out_of_bounds", {}, "heap-buffer-overflow"),
        ("asan", "out_of_bounds_write", {"SIDE": 1}, "use-after-poison"),
        ("ubsan", "misaligned_vector", {}, "misaligned address"),
        ("tsan", "block_reverse", {"DYNAMIC": 1, "shared_bytes": 256}, None),
        ("tsan", "warp_race", {"SYNCHRONISE": "__syncwarp()", "block": 32}, None),
        ("tsan", "warp_sum", {"grid": (2, 1, 1)}, None),
        ("tsan", "missing_barrier", {}, "data race"),
        ("tsan", "warp_race", {"SYNCHRONISE": "", "block": 32}, "data race"),
        ("tsan", "block_race", {"grid": (2, 1, 1)}, "data race"),
        ("tsan", "block_exchange", {**TOGETHER, "BARRIER": 1}, None),
        ("tsan", "block_exchange", {**TOGETHER, "BARRIER": 0}, "data race"),
    ],
)
def test_sanitizers_see(mode, name, arguments, finding):
    try:
        sanitize.check_finding(mode, UNDER_SANITIZER, name, arguments, finding)
    except FileNotFoundError as error:
        pytest.skip(str(error))


# ---- memory -------------------------------------------------------------------------------------------------


def test_memory_is_aligned_poisoned_and_counted():
    device = HostDevice()
    array = device.empty((3, 5), np.float32)
    assert type(array) is HostArray and array.flags.c_contiguous and array.shape == (3, 5)
    assert device.pointer(array) % 256 == 0
    assert np.isnan(array).all()
    assert device.allocated_bytes == device.peak_bytes == 60
    view = array[:, ::-2]
    assert type(view) is HostArray
    assert device.pointer(view) == device.pointer(array) + 4 * 4
    del array
    assert device.allocated_bytes == 60  # the view keeps it
    del view
    gc.collect()
    assert (device.allocated_bytes, device.peak_bytes) == (0, 60)


def test_allocations_fail_on_demand():
    device = HostDevice()
    device.fail_allocations_over = 100
    device.empty(100, np.uint8)
    with pytest.raises(MemoryError, match="101 bytes"):
        device.empty(101, np.uint8)


def test_only_its_own_memory_is_accepted():
    device, other = HostDevice(), HostDevice()
    array = device.asarray(np.ones((2, 2), np.float32, order="F"))
    assert array.flags.c_contiguous
    with pytest.raises(TypeError, match="HostArray"):
        device.pointer(np.ones(3))
    with pytest.raises(IndexError, match="one allocation"):
        device.pointer(array + 1)  # computed by NumPy, so it is outside the device
    with pytest.raises(IndexError, match="one allocation"):
        other.pointer(array)
    assert type(array.get()) is np.ndarray
    assert device.pointer(device.empty((0, 3), np.float32)) == 0  # CuPy gives an empty array no memory either


def test_convert():
    device = HostDevice()
    converted = device.convert(device.asarray([[1.5, 2.5]])[:, ::-1], np.dtype(np.float16))
    assert type(converted) is HostArray and converted.dtype == np.float16 and converted.flags.c_contiguous
    np.testing.assert_array_equal(converted, [[2.5, 1.5]])
    device.pointer(converted)


def test_log_and_seed_count_launches():
    device = HostDevice(SAMPLES)
    x, y = device.asarray(np.zeros(64, np.float32)), device.empty(64, np.float32)
    run(device, "block_reverse", x, y, DYNAMIC=0)
    run(device, "block_reverse", x, y, DYNAMIC=0)
    assert [record.kernel.name for record in device.log] == ["block_reverse"] * 2
    assert device.log[0].grid == (1, 1, 1) and device.log[0].block == 64
    assert device.seed == 2


def test_threads_may_launch_at_once():
    def work():
        device = HostDevice(SAMPLES)
        x, y = device.asarray(np.arange(64, dtype=np.float32)), device.empty(64, np.float32)
        for _ in range(20):
            run(device, "block_reverse", x, y, DYNAMIC=0)
            right.append(np.array_equal(y, x[::-1]))

    right: list[bool] = []
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(right) == 80 and all(right)


# ---- cuBLAS -------------------------------------------------------------------------------------------------

TYPE_NUMBERS = {name: number for number, name in DATA_TYPES.items()}
COMPUTE = {"float64": 70, "complex128": 70}


def dtype_of(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def multiply(device, a, b, c, *, m, n, k, lda, ldb, ldc, strides, batch, transa=0, transb=0, alpha=1, beta=0, **types):
    """Call the device's GEMM with NumPy's dtypes translated; `types` overrides a_type, b_type, c_type and compute."""
    names = {"a_type": a.dtype.name, "b_type": b.dtype.name, "c_type": c.dtype.name}
    numbers = {key: TYPE_NUMBERS.get(name, -1) for key, name in names.items()} | types
    compute = numbers.pop("compute", COMPUTE.get(a.dtype.name, 68))
    scale = {"float64": "f8", "complex128": "c16", "complex64": "c8"}.get(a.dtype.name, "f4")
    alpha, beta = np.array(alpha, scale), np.array(beta, scale)
    arguments = GemmArguments(
        transa, transb, m, n, k,
        alpha.ctypes.data, device.pointer(a), numbers["a_type"], lda, strides[0],
        device.pointer(b), numbers["b_type"], ldb, strides[1],
        beta.ctypes.data, device.pointer(c), numbers["c_type"], ldc, strides[2],
        batch, compute,
    )  # fmt: skip
    device.gemm_strided_batched(arguments)


def small_integers(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(-4, 5, shape).astype(np.float64)
    if dtype.kind == "c":
        values = values + 1j * rng.integers(-4, 5, shape)
    return values.astype(dtype)


@pytest.mark.grid(name=list(TYPE_NUMBERS), transa=[0, 1, 2], transb=[0, 1, 2], beta=[0, 1, 2])
def test_gemm_is_exact_on_integers(name, transa, transb, beta):
    """Matrices are column-major, with leading dimensions larger than the matrix, and one A for the whole batch."""
    device, dtype = HostDevice(), dtype_of(name)
    m, n, k, batch, pad = 3, 4, 5, 2, 2
    a_rows, a_columns = (m, k) if transa == 0 else (k, m)
    b_rows, b_columns = (k, n) if transb == 0 else (n, k)
    # A column-major matrix is a row-major matrix with swapped axes.
    a = device.asarray(small_integers((a_columns, a_rows + pad), dtype, 1))
    b = device.asarray(small_integers((batch, b_columns, b_rows + pad), dtype, 2))
    c = device.asarray(small_integers((batch, n, m + pad), dtype, 3))
    before = c.get()
    if beta == 0:
        c[...] = np.nan  # it must not be read
    multiply(
        device, a, b, c, m=m, n=n, k=k, lda=a_rows + pad, ldb=b_rows + pad, ldc=m + pad, batch=batch,
        strides=(0, b_columns * (b_rows + pad), n * (m + pad)), transa=transa, transb=transb, alpha=2, beta=beta,
    )  # fmt: skip

    def operand(matrix, rows, operation):
        values = matrix[..., :rows].get().astype("c16" if dtype.kind == "c" else "f8").swapaxes(-1, -2)
        return {0: values, 1: values.swapaxes(-1, -2), 2: values.swapaxes(-1, -2).conj()}[operation]

    expected = 2 * operand(a, a_rows, transa) @ operand(b, b_rows, transb)
    if beta:
        expected = expected + beta * before[..., :m].astype(expected.dtype).swapaxes(-1, -2)
    np.testing.assert_array_equal(c[..., :m].swapaxes(-1, -2), expected.astype(dtype))
    if beta:  # the padding must be unchanged
        np.testing.assert_array_equal(c[..., m:], before[..., m:])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_types_are_summed_in_float32(name):
    device, dtype = HostDevice(), dtype_of(name)
    a = device.asarray(np.ones((4096, 1), dtype))
    for c_dtype, total in ((np.dtype("f4"), 4096 + 2**-6), (dtype, 4096)):
        b = device.asarray(np.ones((1, 4096), dtype))
        b[0, 0] = 1 + 2**-6
        c = device.empty((1, 1), c_dtype)
        multiply(device, a, b, c, m=1, n=1, k=4096, lda=1, ldb=4096, ldc=1, strides=(0, 0, 0), batch=1)
        assert float(c[0, 0]) == total


def test_tf32_is_visible():
    device = HostDevice()
    a = device.asarray(np.full((1, 1), 1 + 2**-12, np.float32))
    c = device.empty((1, 1), np.float32)
    sizes = {"m": 1, "n": 1, "k": 1, "lda": 1, "ldb": 1, "ldc": 1, "strides": (0, 0, 0), "batch": 1}
    multiply(device, a, a, c, **sizes)
    assert c[0, 0] == np.float32(1 + 2**-11)
    multiply(device, a, a, c, **sizes, compute=77)
    assert c[0, 0] == 1


def test_tf32_rounds_to_nearest_even():
    values = np.float32([1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-10), np.inf, -np.inf, np.nan, 0])
    np.testing.assert_array_equal(
        round_to_tf32(values), np.float32([1, 1 + 2**-9, -(1 + 2**-10), np.inf, -np.inf, np.nan, 0])
    )


GOOD = {"m": 3, "n": 4, "k": 5, "lda": 3, "ldb": 5, "ldc": 3, "strides": (15, 20, 12), "batch": 2}


def test_gemm_with_nothing_to_do():
    device = HostDevice()
    a, b, c = (device.asarray(np.ones(n, np.float32)) for n in (30, 40, 24))
    multiply(device, a, b, c, **GOOD | {"m": 0, "lda": 1, "ldc": 1})
    multiply(device, a, b, c, **GOOD | {"batch": 0})
    assert (c == 1).all()
    multiply(device, a, b, c, **GOOD | {"k": 0, "ldb": 1})
    assert (c == 0).all()


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "leading dimension of A is 2", {"lda": 2}),
        (ValueError, "leading dimension of B is 4", {"ldb": 4}),
        (ValueError, "leading dimension of C is 0", {"m": 0, "lda": 1, "ldc": 0}),
        (ValueError, "batch is 65536", {"batch": 65536}),
        (ValueError, "m is 2147483648", {"m": 2**31, "lda": 2**31}),
        (ValueError, "k is -1", {"k": -1}),
        (ValueError, "stride of B is -20", {"strides": (15, -20, 12)}),
        (ValueError, "overlap", {"strides": (15, 20, 0)}),
        (ValueError, "overlap", {"strides": (15, 20, 11)}),
        (ValueError, "transa is 3", {"transa": 3}),
        (ValueError, "not supported", {"c_type": 1}),
        (ValueError, "not supported", {"b_type": 2}),
        (ValueError, "not supported", {"compute": 70}),
        (ValueError, "not supported", {"a_type": 2, "b_type": 2, "c_type": 2, "compute": 77}),
        (ValueError, "not supported", {"a_type": 99, "b_type": 99, "c_type": 99}),
        (IndexError, "matrix A", {"strides": (16, 20, 12)}),
        (IndexError, "matrix B", {"strides": (15, 21, 12)}),
        (IndexError, "matrix C", {"strides": (15, 20, 13)}),
        (IndexError, "matrix A", {"batch": 3}),
        (IndexError, "matrix C", {"ldc": 4, "strides": (15, 20, 16)}),
    ],
)
def test_wrong_gemm_calls(error, message, change):
    device = HostDevice()
    a, b, c = (device.asarray(np.ones(n, np.float32)) for n in (30, 40, 24))
    multiply(device, a, b, c, **GOOD)
    c[...] = 7
    with pytest.raises(error, match=message):
        multiply(device, a, b, c, **GOOD | change)
    assert (c == 7).all()


def test_results_may_lie_side_by_side():
    """Results may be column slices of one matrix, as a grouped convolution with channels-last output writes them."""
    device = HostDevice()
    a = device.asarray(np.ones((2, 5, 3), np.float32))
    b = device.asarray(np.ones((4, 5), np.float32))
    c = device.empty((4, 6), np.float32)
    multiply(device, a, b, c, m=3, n=4, k=5, lda=3, ldb=5, ldc=6, strides=(15, 0, 3), batch=2)
    assert (c == 5).all()
