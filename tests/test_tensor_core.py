"""`kernels/tensor_core.cuh`: each instruction against NumPy, pipelines of copies, and bugs that must be detected.

The right kernels run on the host device and on a GPU if there is one, the wrong ones on the host device.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cupyconv.cuda.run.kernel_sources import compile_options, kernel_source
from cupyconv.problem.plan import Kernel
from tests import host_device, nvrtc
from tests.host_device import HostDevice, KernelError, build, sanitize

SAMPLES = Path(host_device.__file__).parent / "tensor_core"
PARAMS = np.dtype([(name, "u8") for name in ("a", "b", "sum", "result")])

#: For tests whose kernel has a bug at which a sanitizer stops the process.
without_sanitizer = pytest.mark.skipif(build.sanitizer() != "", reason="the sanitizer reports this bug itself")


def run_on_host(name, result, a, b=None, sum=None, *, block=32, order="random", **macros):
    """Return the result of one block of a sample kernel; `result` is its shape and dtype."""
    device = HostDevice(SAMPLES, order=order)
    arrays = [device.asarray(a), *(device.asarray(a if x is None else x) for x in (b, sum)), device.empty(*result)]
    params = np.array(tuple(device.pointer(array) for array in arrays), PARAMS)
    device.launch(Kernel(name, tuple((key, str(value)) for key, value in macros.items())), (1, 1, 1), block, params)
    return arrays[-1].get()


def run_on_gpu(name, result, a, b=None, sum=None, *, block=32, **macros):
    """Return the same through CuPy, which only moves bytes, so that it need not know the dtypes."""
    import cupy

    inputs = [np.ascontiguousarray(a if x is None else x) for x in (a, b, sum)]
    arrays = [cupy.asarray(x.view(np.uint8)) for x in inputs]
    arrays.append(cupy.full(np.empty(*result).nbytes, 0xFF, np.uint8))
    params = np.array(tuple(array.data.ptr for array in arrays), PARAMS)
    code, options = source_and_options(name, macros)
    function = cupy.RawModule(code=code, options=options, backend="nvrtc").get_function(name)
    function((1, 1, 1), (block, 1, 1), (params,))
    return cupy.asnumpy(arrays[-1]).view(result[1]).reshape(result[0])


def source_and_options(name, macros):
    options = compile_options(tuple((key, str(value)) for key, value in macros.items()))
    return kernel_source(name, SAMPLES), (*options, f"-I{SAMPLES}")


@pytest.fixture(
    params=[pytest.param("host", marks=pytest.mark.host_device), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def run(request):
    if request.param == "host":
        host_device.require()
        return run_on_host
    from targets import gpu_target

    gpu = gpu_target()
    if int(gpu.xp.cuda.Device().compute_capability) < 80:
        pytest.skip("the instructions of sm_80 are needed")
    return run_on_gpu


# ---- matrix instructions ------------------------------------------------------------------------------------


def element(kind):
    """Return the dtype that holds a kind of operand."""
    if kind == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype({"float16": np.float16, "tf32": np.float32}[kind])


def terms(kind):
    return 8 if kind == "tf32" else 16


def multiply(run, kind, a_mk, b_kn, sum_mn, a_load, b_load):
    """Return sum + a b from the sample kernel, with operands rounded to their dtype and laid out for the loads."""
    dtype = element(kind)
    a = a_mk.T if a_load == "COLUMNS" else a_mk
    b = b_kn if b_load == "COLUMNS" else b_kn.T
    return run(
        "multiply", ((16, 16), np.float32), a.astype(dtype), b.astype(dtype), sum_mn.astype(np.float32),
        TYPE=kind, A_LOAD=a_load, B_LOAD=b_load,
    )  # fmt: skip


LOADS = [
    (kind, a_load, b_load)
    for kind, loads in {
        "float16": ("SCALAR", "ROWS", "COLUMNS"),
        "bfloat16": ("SCALAR", "ROWS", "COLUMNS"),
        "tf32": ("SCALAR", "ROWS"),
    }.items()
    for a_load in loads
    for b_load in loads
]


@pytest.mark.parametrize(("kind", "a_load", "b_load"), LOADS)
def test_multiply_add_is_exact_on_integers(run, kind, a_load, b_load):
    rng = np.random.default_rng(0)
    a, b, sum = (rng.integers(-20, 21, shape) for shape in ((16, terms(kind)), (terms(kind), 16), (16, 16)))
    np.testing.assert_array_equal(multiply(run, kind, a, b, sum, a_load, b_load), sum + a @ b)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32"])
def test_multiply_add_rounds_as_float32(run, kind):
    rng = np.random.default_rng(1)
    a, b, sum = (rng.standard_normal(shape) for shape in ((16, terms(kind)), (terms(kind), 16), (16, 16)))
    a, b = ((truncated(x) if kind == "tf32" else x.astype(element(kind))).astype(np.float64) for x in (a, b))
    sum = sum.astype(np.float32).astype(np.float64)
    bound = 2.0**-23 * terms(kind) * (abs(sum) + abs(a) @ abs(b))
    assert (abs(multiply(run, kind, a, b, sum, "ROWS", "ROWS") - (sum + a @ b)) <= bound).all()


def truncated(values):
    """Return float32 values without their 13 lowest bits, as tf32 keeps them."""
    return (np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("side", ["a", "b"])
def test_tf32_drops_thirteen_bits(run, side):
    """A product with the identity returns an operand without the bits that the instruction does not read."""
    values = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    values[0, :2] = 1 - 2.0**-24, -3.999
    identity, zeros = np.eye(8, 16), np.zeros((16, 16))
    if side == "a":
        result = multiply(run, "tf32", values, identity, zeros, "ROWS", "ROWS")[:, :8]
    else:
        result = multiply(run, "tf32", identity.T, values.T, zeros, "ROWS", "ROWS")[:8].T
    assert not np.array_equal(truncated(values), values)
    np.testing.assert_array_equal(result, truncated(values))


@pytest.mark.parametrize("integers", [True, False])
def test_multiply_add_of_doubles(run, integers):
    rng = np.random.default_rng(3)
    a, b, sum = (rng.standard_normal(shape) for shape in ((16, 4), (4, 8), (16, 8)))
    if integers:
        a, b, sum = (np.round(1000 * x) for x in (a, b, sum))
    result = run("multiply_doubles", ((16, 8), np.float64), a, b.T.copy(), sum)
    bound = 0 if integers else 2.0**-52 * 4 * (abs(sum) + abs(a) @ abs(b))
    assert (abs(result - (sum + a @ b)) <= bound).all()


@pytest.mark.parametrize("rows", ["16 * lane", "16 * (31 - lane)"])
@pytest.mark.parametrize("transposed", [False, True])
def test_which_lane_gets_which_element(run, transposed, rows):
    tiles = np.arange(256, dtype=np.uint16).reshape(32, 8)
    load = "load_matrices_transposed" if transposed else "load_matrices"
    registers = run("load", ((32, 4), np.uint32), tiles, LOAD=load, ROW=rows, LANES=32)
    tiles = (tiles if rows == "16 * lane" else tiles[::-1]).reshape(4, 8, 8)
    tiles = tiles.swapaxes(1, 2) if transposed else tiles
    # A lane has two neighbours in a row of each tile: one register in memory, the lower half first.
    expected = np.ascontiguousarray(tiles).view("<u4").reshape(4, 32).T
    np.testing.assert_array_equal(registers, expected)


# ---- asynchronous copies --------------------------------------------------------------------------------------

STAGES, THREADS = 7, 64


def pipeline(run=run_on_host, *, order=None, **replaced):
    """Return the input of the sample pipeline and its result, both with axes for stages, threads and words."""
    macros = {
        "STAGES": STAGES, "WIDTH": 16, "VALID": "true", "BUFFERS": 3, "DRAIN": "",
        "COMMIT": "commit_copies()", "WAIT": "wait_for_copies<1>()", "SYNCHRONISE": "__syncthreads()",
    } | replaced  # fmt: skip
    shape = (STAGES, THREADS, macros["WIDTH"] // 4)
    given = np.random.default_rng(4).integers(1, 1000, shape, dtype=np.uint32)
    extra = {} if order is None else {"order": order}
    return given, run("pipeline", (shape, np.uint32), given, block=THREADS, **macros, **extra)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_pipeline_of_three_stages(run, width):
    given, made = pipeline(run, WIDTH=width)
    np.testing.assert_array_equal(made, given[:, ::-1])


@pytest.mark.parametrize("width", [4, 8, 16])
def test_copies_that_are_not_valid_write_zeros(run, width):
    given, made = pipeline(run, WIDTH=width, VALID="(i + t) % 3 != 0")
    stage, thread = np.ogrid[:STAGES, :THREADS]
    np.testing.assert_array_equal(made, np.where(((stage + thread) % 3 != 0)[..., None], given, 0)[:, ::-1])


def test_copies_that_are_not_valid_read_nothing(run):
    result = run("copy", ((32, 4), np.uint32), np.zeros(128, np.uint32), FROM=1 << 40, TO="16 * t", VALID="false")
    np.testing.assert_array_equal(result, 0)


ALL_AT_LAST = "commit_copies(), wait_for_copies<0>()"


@without_sanitizer
@pytest.mark.host_device
@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
@pytest.mark.parametrize(
    "bug",
    [
        pytest.param({"WAIT": "", "DRAIN": ALL_AT_LAST}, id="no wait"),
        pytest.param({"COMMIT": "", "DRAIN": ALL_AT_LAST}, id="no commit"),
        pytest.param({"WAIT": "wait_for_copies<2>()", "DRAIN": ALL_AT_LAST}, id="waits for a group too few"),
        pytest.param({"SYNCHRONISE": ""}, id="no barrier after the wait"),
        pytest.param({"BUFFERS": 2}, id="copies into a buffer that is being read"),
    ],
)
def test_a_broken_pipeline_gives_wrong_numbers(bug, order):
    host_device.require()
    given, made = pipeline(order=order, **bug)
    wrong = made != given[:, ::-1]
    assert wrong.any()
    if bug.get("DRAIN"):  # only copies that have not arrived are missing, and they show as NaN
        assert (made[wrong] == 0xFFFFFFFF).all()


@pytest.mark.host_device
@pytest.mark.parametrize("bug", [{"WAIT": ""}, {"COMMIT": ""}])
def test_copies_left_behind_are_an_error(bug):
    host_device.require()
    message = rf"exits with {STAGES} asynchronous copies it has not waited for, the oldest from pipeline.cu:\d+"
    with pytest.raises(KernelError, match=message):
        pipeline(**bug)
    given, made = pipeline()  # the next launch is not disturbed
    np.testing.assert_array_equal(made, given[:, ::-1])


# ---- wrong use ------------------------------------------------------------------------------------------------


@pytest.mark.host_device
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"ROW": "16 * lane + 2"}, r"misaligned shared address of 16 bytes in load.cu:\d+"),
        ({"ROW": "16 * lane + 16"}, r"outside the block's shared arrays: shared address of 16 bytes in load.cu:\d+"),
        ({"LANES": 31}, r"names a lane that has exited in load.cu:\d+|deadlock.*operation in load.cu:\d+"),
        ({"block": 48}, r"matrix operation in load.cu:\d+ by the block's last warp, which has fewer than 32 lanes"),
    ],
)
def test_wrong_matrix_load(replaced, message):
    host_device.require()
    arguments = {"LOAD": "load_matrices", "ROW": "16 * (lane % 32)", "LANES": 64} | replaced
    with pytest.raises(KernelError, match=message):
        run_on_host("load", ((64, 4), np.uint32), np.zeros(256, np.uint16), **arguments)


@pytest.mark.host_device
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"TO": "16 * t + 8"}, r"misaligned shared address of 16 bytes in copy.cu:\d+"),
        ({"TO": "16 * t + 512"}, r"outside the block's shared arrays: shared address of 16 bytes in copy.cu:\d+"),
        ({"FROM": "16 * t + 4"}, r"misaligned global address of 16 bytes in copy.cu:\d+"),
    ],
)
def test_wrong_copy(replaced, message):
    host_device.require()
    arguments = {"FROM": "16 * t", "TO": "16 * t", "VALID": "true"} | replaced
    with pytest.raises(KernelError, match=message):
        run_on_host("copy", ((32, 4), np.uint32), np.zeros(256, np.uint32), **arguments)


UNDER_SANITIZER = """
import sys
from tests.test_tensor_core import *
if sys.argv[1] == "pipeline":
    given, made = pipeline(**eval(sys.argv[2]))
    assert (made == given[:, ::-1]).all()
elif sys.argv[1] == "multiply":
    multiply(run_on_host, "float16", *np.ones((3, 16, 16)), "ROWS", "COLUMNS")
else:
    run_on_host("copy", ((32, 4), np.uint32), np.zeros(128, np.uint32), **eval(sys.argv[2]))
"""


@without_sanitizer
@pytest.mark.host_device
@pytest.mark.parametrize(
    ("mode", "name", "arguments", "finding"),
    [
        ("tsan", "pipeline", {}, None),
        ("tsan", "pipeline", {"SYNCHRONISE": ""}, "data race"),
        ("tsan", "pipeline", {"BUFFERS": 2}, "data race"),
        ("tsan", "multiply", {}, None),
        ("asan", "pipeline", {}, None),
        ("asan", "multiply", {}, None),
        ("asan", "copy", {"FROM": "16 * t + 16", "TO": "16 * t", "VALID": "true"}, "use-after-poison"),
        ("ubsan", "multiply", {}, None),
    ],
)
def test_sanitizers_see(mode, name, arguments, finding):
    host_device.require()
    try:
        sanitize.check_finding(mode, UNDER_SANITIZER, name, arguments, finding)
    except FileNotFoundError as error:
        pytest.skip(str(error))


# ---- machine code ---------------------------------------------------------------------------------------------

ON_EVERY_GPU = (
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16",
)
FROM_SM_80 = (
    r"cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16, %r\d+;",
    r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 16, %r\d+;",
    r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 8, %r\d+;",
    r"cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+\], 4, %r\d+;",
    r"cp\.async\.commit_group;",
    r"cp\.async\.wait_group 1;",
    r"cp\.async\.wait_group 0;",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
    r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32",
    r"cvt\.rna\.tf32\.f32",
)
#: Instructions for doubles of 16 x 4, and of 8 x 4, of which older architectures need two.
DOUBLES = r"mma\.sync\.aligned\.m16n8k4\.row\.col\.f64", r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f64"


def ptx_of_every_function(architecture, macros):
    nvrtc.require()
    source, options = source_and_options("every_function", macros)
    return nvrtc.compile_source(source, (*options, *nvrtc.CUPY_OPTIONS, *nvrtc.CHECK_OPTIONS), architecture).ptx


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", [a for a in nvrtc.ARCHITECTURES if a >= 80])
def test_every_function_is_one_instruction(architecture):
    ptx = ptx_of_every_function(architecture, {"ALL": 1})
    for instruction in (*ON_EVERY_GPU, *FROM_SM_80):
        assert len(re.findall(instruction, ptx)) == 1, instruction
    assert [len(re.findall(instruction, ptx)) for instruction in DOUBLES] == ([1, 0] if architecture >= 90 else [0, 2])
    assert "trap;" not in ptx


@pytest.mark.nvrtc
def test_sm_75_has_plain_copies_and_float16():
    ptx = ptx_of_every_function(75, {})
    for instruction in ON_EVERY_GPU:
        assert len(re.findall(instruction, ptx)) == 1, instruction
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.f16\.f16\.f32", ptx)) == 2
    assert len(re.findall(r"st\.shared\.(v4\.|v2\.)?[bu]32", ptx)) == 4
    assert "cp.async" not in ptx and "trap;" not in ptx
    assert "trap;" in ptx_of_every_function(75, {"ALL": 1})
