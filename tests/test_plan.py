"""`Plan` as data and as a page; `explain` lists the steps that then run."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import GPU, array
from plans import plan as plan_of_conv
from refusals import Ones, placed
from rounds import each_step
from strategies import conv_cases
from targets import numpy_target

import cupyconv
from cupyconv.cuda.plan.conv import access_notes
from cupyconv.cuda.run.execution import _COMPUTE_TYPE, _DATA_TYPE
from cupyconv.numpy.block_loops import BlockLoop
from cupyconv.ops.conv_pullback import PROLOGUE_GRADIENT
from cupyconv.problem.arrays import operand
from cupyconv.problem.plan import (
    Address,
    GemmCall,
    Kernel,
    KernelLaunch,
    Matrix,
    Plan,
    Transform,
    _bytes,
    _rounds,
    going_on,
)
from cupyconv.problem.problems import HostModel
from tests.host_device import GemmRecord, LaunchRecord

# --- what ran -------------------------------------------------------------------------------------------------


def expected_record(step: KernelLaunch | GemmCall) -> LaunchRecord | GemmRecord:
    """Return the record that the device logs for a step.  cuBLAS gets its operands, and so m and n, exchanged."""
    if isinstance(step, KernelLaunch):
        return LaunchRecord(step.kernel, step.grid, step.block, step.shared_bytes)
    types = _DATA_TYPE[step.dtype], _DATA_TYPE[step.c_dtype], _COMPUTE_TYPE[step.compute]
    return GemmRecord(step.n, step.m, step.k, step.batch, *types, (step.b.stride, step.a.stride, step.c.stride))


@given(
    case=conv_cases(),
    method=st.sampled_from(("auto", "direct", "gemm")),
    limit=st.sampled_from((None, 1 << 20, 20_000)),
)
def test_explained_is_what_runs_and_explaining_runs_nothing(cuda_target, case, method, limit):
    device = cuda_target.device
    views = case.views(case.arrays(), cuda_target.to_device)
    out = case.new_out(cuda_target.to_device)
    arguments = dict(**views, **case.parameters, method=method, out=out)
    with cupyconv.options(workspace_limit=limit):
        device.log.clear()
        before = device.peak_bytes = device.allocated_bytes
        try:
            plan = cupyconv.explain(cupyconv.conv, **arguments)
        except ValueError as refusal:
            assert "does not apply" in str(refusal) or "workspace" in str(refusal)
            return
        assert device.log == [] and device.peak_bytes == before
        y = cupyconv.conv(**arguments)
    assert device.log == [expected_record(step) for step in plan.steps]
    result_bytes = 0 if out is not None else y.nbytes
    assert device.peak_bytes - before <= result_bytes + plan.workspace_bytes
    if limit is not None:
        assert sum(buffer.nbytes for buffer in plan.workspace) <= limit


def test_explaining_a_merge_over_many_axes_runs_nothing(cuda_target):
    """Strides that allow no view of three axes make the call copy its input; explaining the call copies nothing."""
    device = cuda_target.device
    x = cuda_target.to_device(np.ones((2, 3, 5, 4, 3, 2), np.float32)).transpose(0, 1, 5, 4, 3, 2)
    weight = cuda_target.to_device(np.ones((4, 3), np.float32))
    device.log.clear()
    before = device.peak_bytes = device.allocated_bytes
    cupyconv.explain(cupyconv.linmerge, x, weight)
    assert device.log == [] and device.peak_bytes == before


@pytest.mark.parametrize("function", ["im2col", "col2im"])
def test_explained_columns_are_what_runs(cuda_target, function):
    device = cuda_target.device
    if function == "im2col":
        arguments = [cuda_target.to_device(np.ones((2, 3, 8, 9), np.float32)), 3]
    else:
        arguments = [cuda_target.to_device(np.ones((2, 27, 42), np.float32)), (8, 9), 3]
    plan = cupyconv.explain(getattr(cupyconv, function), *arguments)
    device.log.clear()
    getattr(cupyconv, function)(*arguments)
    assert device.log == [expected_record(step) for step in plan.steps] != []


@given(case=conv_cases(dtypes=("float32", "complex64"), mixed_dtypes=False))
def test_a_plan_for_a_gpu_needs_none(case):
    """A plan for a GPU is made from NumPy arrays, without a GPU, and consists of CUDA steps."""
    views = case.views(case.arrays())
    plan = cupyconv.explain(cupyconv.conv, **views, **case.parameters, on="sm_90")
    assert plan.backend == "cuda" and "H200" in plan.device
    assert all(isinstance(step, (KernelLaunch, GemmCall)) for step in plan.steps)
    assert (plan.steps == ()) == (0 in case.out_shape)


def test_the_number_of_steps_does_not_depend_on_the_batch():
    weight = np.ones((32, 16, 3, 3), np.float32)

    def steps(batch: int) -> int:
        x = np.ones((batch, 16, 20, 20), np.float32)
        return len(cupyconv.explain(cupyconv.conv, x, weight, method="gemm", on="sm_90").steps)

    assert steps(1) == steps(2) == steps(64) > 0


# --- as data --------------------------------------------------------------------------------------------------


@pytest.fixture(params=[None, "sm_90"], ids=["numpy", "cuda"])
def plan(request) -> Plan:
    x, weight = np.ones((4, 8, 30, 30), np.float32), np.ones((16, 8, 3, 3), np.float32)
    return cupyconv.explain(cupyconv.conv, x, weight, activation="relu", on=request.param)


def test_fields(plan):
    names = {field.name for field in dataclasses.fields(plan)}
    promised = {"method", "backend", "device", "steps", "workspace_bytes", "flops", "bytes_moved", "bound", "rejected"}
    assert promised <= names
    assert plan.method in ("direct", "gemm") and plan.bound in ("memory", "arithmetic", "launch")
    assert plan.flops == 2 * 4 * 16 * 28 * 28 * 8 * 9
    assert plan.bytes_moved >= plan.minimal_bytes == 4 * (4 * 8 * 30 * 30 + 16 * 8 * 9 + 4 * 16 * 28 * 28)
    assert plan.steps and all(len(entry) == 2 and all(entry) for entry in plan.rejected)


def test_frozen_hashable_and_equal_by_value(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.method = "fft"
    for field in dataclasses.fields(plan.steps[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan.steps[0], field.name, 0)
    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init}
    twin = Plan(**values)
    assert twin == plan and hash(twin) == hash(plan) and twin is not plan
    assert Plan(**values | {"reason": "another"}) != plan


def test_the_methods_not_taken_are_named_with_a_reason(plan):
    others = {"direct", "gemm"} - {plan.method}
    assert others <= dict(plan.rejected).keys() and plan.method not in dict(plan.rejected)
    assert all(dict(plan.rejected).values())


def test_workspace_is_counted_whole():
    """The workspace counts whole allocations, each rounded up to its alignment, and converted arguments."""
    x, weight = np.ones((2, 8, 30, 30), np.float32), np.ones((16, 8, 3, 3))
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="gemm", on="sm_90")
    buffers = sum(-(-buffer.nbytes // 256) * 256 for buffer in plan.workspace)
    assert plan.workspace_bytes == buffers + sum(c.nbytes for c in plan.conversions)
    assert [c.buffer for c in plan.conversions] == ["x"] and plan.conversions[0].nbytes == 8 * x.size
    assert any("weight (float64) widens" in note for note in plan.notes)
    page = str(plan)
    assert "convert  x: float32 -> float64 (112.5 KiB)" in page and all(
        f"note      {note}" in page for note in plan.notes
    )


# --- as a page ------------------------------------------------------------------------------------------------


def test_the_page_of_a_gemm():
    x, weight = np.ones((64, 64, 28, 28), np.float32), np.ones((128, 64, 3, 3), np.float32)
    plan = cupyconv.explain(cupyconv.conv, x, weight, np.ones(128, np.float32), padding=1, on="sm_90", method="gemm")
    page = str(plan)
    assert "conv 64 -> 128 channels, kernel 3x3 on 64 samples of 28x28, padding ((1, 1), (1, 1))" in page
    assert "gemm on cuda (H200" in page
    assert f"{plan.flops:,} FLOP" in page and f"bound by {plan.bound}" in page
    (gemm,) = [step for step in plan.steps if isinstance(step, GemmCall)]
    assert (gemm.m, gemm.k) == (128, 64 * 9)
    for number in (f"m {gemm.m}", f"n {gemm.n}", f"k {gemm.k}", f"batch {gemm.batch}", f"ld {gemm.b.ld}"):
        assert number in page
    assert gemm.a.stride == 0 and "weight ld 576 stride 0" in page
    launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    assert launches
    for launch in launches:
        assert f"grid {launch.grid}  block ({launch.block}, 1, 1)  shared {launch.shared_bytes:,} B" in page
    assert "not direct:" in page


def test_the_page_of_a_merge():
    xs, weight = [np.ones((4, 4, 1000))] * 5, np.ones((4, 20))
    page = str(cupyconv.explain(cupyconv.linmerge, xs, weight, on="sm_90"))
    assert "20 (merged from 4+4+4+4+4) -> 4 channels" in page
    assert "merge<float64" in page and "workspace 0 B" in page and "not gemm:" in page


def test_the_page_on_numpy():
    page = str(cupyconv.explain(cupyconv.conv, np.ones((1, 2, 9)), np.ones((3, 2, 3))))
    assert "on numpy (1 thread)" in page and ": 1 block of " in page and "(s)" not in page
    assert [str(HostModel(threads)) for threads in (1, 2)] == ["1 thread", "2 threads"]


@pytest.mark.parametrize("on", [None, "sm_90"])
def test_one_thing_is_no_several(on):
    """A page writes a count of one in the singular: one layer, one sample, one step."""
    one = np.ones((1, 1, 2))
    for called in (
        (cupyconv.conv_chain, one, [cupyconv.ConvLayer(one)]),
        (cupyconv.conv_transpose, one, one),
        (cupyconv.conv_grad_weight, one, one, (1,)),
        (cupyconv.lstm, np.ones((1, 1, 1)), np.ones((4, 1)), np.ones((4, 1))),
    ):
        page = str(cupyconv.explain(*called, on=on))
        several = re.findall(r"(?<![\d,.>])(?<!-> )1 [a-z]+s\b", page)
        assert not several and "(s)" not in page, page
    assert "chain of 1 convolution\n" in str(
        cupyconv.explain(cupyconv.conv_chain, one, [cupyconv.ConvLayer(one)], on=on)
    )


def f32(*shape):
    return np.ones(shape, np.float32)


def test_what_limits_the_speed_of_the_host():
    """A merge is bound by memory, because it computes little per element; a layer of many channels by arithmetic."""
    assert cupyconv.explain(cupyconv.linmerge, [f32(2, 4, 1000)] * 5, f32(4, 20)).bound == "memory"
    assert cupyconv.explain(cupyconv.conv, f32(2, 64, 28, 28), f32(64, 64, 3, 3)).bound == "arithmetic"
    assert cupyconv.explain(cupyconv.conv, f32(2, 1, 28, 28), f32(1, 1, 3, 3)).bound == "memory"


def channels_last(*shape):
    return f32(shape[0], *shape[2:], shape[1]).transpose(0, -1, *range(1, len(shape) - 1))


@pytest.mark.parametrize(
    "call, title, result",
    [
        ((cupyconv.conv_transpose, f32(2, 4, 10), f32(4, 3, 3)), "conv_transpose, the adjoint of conv 3 -> 4 channels, kernel 3 on 2 samples of 12", "float32 (2, 3, 12), C order"),
        ((cupyconv.conv_transpose, channels_last(2, 4, 1, 2), f32(4, 3, 1, 1)), "conv_transpose, the adjoint of conv 3 -> 4 channels, kernel 1x1 on 2 samples of 1x2", "float32 (2, 3, 1, 2), channels-last"),
        ((cupyconv.conv_transpose, channels_last(2, 4, 1, 1), f32(4, 3, 1, 1)), "conv_transpose, the adjoint of conv 3 -> 4 channels, kernel 1x1 on 2 samples of 1x1", "float32 (2, 3, 1, 1), C order"),
        ((cupyconv.conv_grad_input, f32(2, 3, 8, 8), f32(3, 4, 3, 3), [(2, 1, 10, 10), (2, 3, 10, 10)]), "conv_grad_input, the adjoint of conv 4 (merged from 1+3) -> 3 channels, kernel 3x3 on 2 samples of 10x10", "float32 (2, 1, 10, 10), (2, 3, 10, 10), C order"),
        ((cupyconv.conv_chain, f32(2, 4, 9), [cupyconv.ConvLayer(f32(5, 4, 3)), cupyconv.ConvLayer(f32(6, 5, 1))]), "chain of 2 convolutions", "float32 (2, 6, 7), C order"),
        ((cupyconv.conv, channels_last(2, 4, 5, 6), f32(3, 4, 5, 5)), "conv 4 -> 3 channels, kernel 5x5 on 2 samples of 5x6", "float32 (2, 3, 1, 2), channels-last"),
        ((cupyconv.conv, channels_last(2, 4, 5, 6), f32(3, 4, 5, 6)), "conv 4 -> 3 channels, kernel 5x6 on 2 samples of 5x6", "float32 (2, 3, 1, 1), C order"),
        ((cupyconv.max_pool, f32(2, 3, 8, 9), (2, 3)), "max_pool 3 channels, kernel 2x3 on 2 samples of 8x9", "float32 (2, 3, 4, 3)"),
        ((cupyconv.max_pool, [f32(2, 1, 8), f32(2, 2, 8)], 2), "max_pool 3 (1+2) channels, kernel 2 on 2 samples of 8", "float32 (2, 1, 4), float32 (2, 2, 4)"),
        ((cupyconv.im2col, f32(2, 3, 8, 9), (2, 3)), "im2col 3 channels, kernel 2x3 on 2 samples of 8x9", "float32 (2, 18, 49)"),
        ((cupyconv.col2im, f32(2, 18, 49), (8, 9), (2, 3)), "col2im 3 channels, kernel 2x3 on 2 samples of 8x9", "float32 (2, 3, 8, 9)"),
        ((cupyconv.rnn, f32(5, 2, 3), f32(4, 3), f32(4, 4)), "rnn 3 -> 4, forward, on 5 steps x 2 samples", "float32 (5, 2, 4)"),
    ],
    ids=["transposed", "transposed, channels-last", "transposed, one pixel", "input gradient of a merge", "chain", "channels-last", "one pixel", "max_pool", "a list to pool", "im2col", "col2im", "rnn"],
)  # fmt: skip
@pytest.mark.parametrize("on", [None, "sm_90"])
def test_a_page_begins_with_what_is_computed_and_its_result(call, title, result, on):
    first, *lines = str(cupyconv.explain(*call, on=on)).splitlines()
    assert first == title
    assert f"  result    {result}" in lines


def test_what_comes_in_later_rounds():
    """Offsets of later rounds continue the first two; rounds that differ in more than offsets have no next one."""
    x, y = (Address("x", offset) for offset in (100, 130))
    assert going_on(x, y, 3) == Address("x", 190) and going_on(5, 7, 2) == 9
    assert going_on((x, None, 2), (y, None, 3), 2) == (Address("x", 160), None, 4)
    assert going_on((x, True), (y, True), 2) == (Address("x", 160), True)
    assert going_on(x, Address("y", 130), 1) is None
    assert going_on((x, "a"), (y, "b"), 1) is None and going_on((x,), (x, x), 1) is None
    assert going_on(x, 5, 1) is None


def test_chunks_are_printed_once():
    x, weight = np.ones((64, 16, 64, 64), np.float32), np.ones((16, 16, 3, 3), np.float32)
    with cupyconv.options(workspace_limit=4 << 20):
        plan = cupyconv.explain(cupyconv.conv, x, weight, on="sm_90", method="gemm")
    page = str(plan)
    assert len(each_step(plan.steps)) > 20 and len(page.splitlines()) < 20
    assert "one per chunk" in page


@pytest.mark.parametrize(
    "x, weight, groups",
    [
        ([Ones((8, 1, 16, 16))] * 100, Ones((64, 100, 1, 1)), 1),  # one product per input
        ([Ones((8, 1, 16, 16))] * 200, Ones((400, 2, 3, 3)), 100),  # one product per group
    ],
    ids=["inputs", "groups"],
)
def test_many_products_are_printed_once(x, weight, groups):
    """A page prints many equal products once, between the columns before them and the epilogue after them."""
    arguments = [placed(value, numpy_target()) for value in (x, weight)]
    plan = cupyconv.explain(cupyconv.conv, *arguments, groups=groups, activation="relu", method="gemm", on="sm_90")
    page = str(plan)
    assert len(each_step(plan.steps)) > 100 and len(page.splitlines()) < 40
    assert ("more like it" in page or "rounds   " in page) and str(plan.steps[-1]) in page


def test_chunks_of_which_the_last_takes_fewer_steps_are_printed_once():
    """Chunks of seven samples print once, although the last has one, which the layers split into fewer chunks."""
    x = placed(Ones((50, 8, 100, 7), "complex64"), numpy_target())
    weights = [placed(Ones(shape, "complex64"), numpy_target()) for shape in ((300, 8, 3, 3), (48, 300, 3, 1))]
    layers = [cupyconv.ConvLayer(weight, padding=1) for weight in weights]
    with cupyconv.options(workspace_limit=24 << 20):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=False, on="sm_75")
    page = str(plan)
    assert len(plan.steps) > 40 and len(page.splitlines()) < 60
    assert "more chunks" in page


@pytest.mark.parametrize(
    "kinds, rounds",
    [([0, 1, 0, 1, 0, 1], (2, 3)), ([0, 1, 0, 2], (1, 1)), ([0, 0, 0, 1], (1, 3)), ([0, 1, 2], (1, 1)), ([0], (1, 1))],
)
def test_rounds_are_equal_to_their_end(kinds, rounds):
    """Rounds are equal to their end: a page that took the first run for the whole round would omit steps."""
    assert _rounds(kinds, 0) == rounds and _rounds([7, *kinds], 1) == rounds


@pytest.mark.parametrize("on", [None, "sm_90"])
@pytest.mark.parametrize("shape, taps", [((0, 2, 9), 3), ((1, 2, 0), 1)], ids=["no sample", "no pixel"])
def test_the_page_of_nothing(shape, taps, on):
    plan = cupyconv.explain(cupyconv.conv, np.ones(shape), np.ones((3, 2, taps)), on=on)
    assert "nothing to run: the result is empty" in str(plan) and not plan.workspace


@pytest.mark.parametrize(
    ("shape", "strides", "alignment", "words"),
    [
        ((2, 4, 1, 8, 8), (256, 64, 64, 8, 1), 16, ""),
        ((2, 4, 1, 8, 8), (256, 1, 256, 32, 4), 16, ""),
        ((2, 4, 1, 1, 1), (8, 2, 1, 1, 1), 16, "rows are not a multiple of 16 bytes: scalar access"),
        ((2, 4, 1, 8, 8), (640, 160, 160, 16, 1), 16, "pixels have no uniform stride, so a GEMM cannot read it in place"),
        ((2, 4, 1, 1, 2), (16, 4, 4, 4, 2), 16, "neither pixels nor channels have unit stride: scalar access"),
        ((2, 4, 1, 8, 8), (256, 64, 64, 8, 1), 8, "not 16-byte aligned: scalar access"),
        ((2, 4, 1, 7, 9), (252, 63, 63, 9, 1), 16, "rows are not a multiple of 16 bytes: scalar access"),
    ],
)  # fmt: skip
def test_what_keeps_an_image_off_the_fast_path_is_noted(shape, strides, alignment, words):
    image = operand("x", "float32", shape, tuple(4 * step for step in strides), alignment)
    assert access_notes([image]) == ((f"x: {words}",) if words else ())


def test_lost_alignment_is_named():
    x = np.ones((1, 2, 65), np.float32)[:, :, 1:]
    plan = cupyconv.explain(cupyconv.linmerge, x, np.ones((3, 2), np.float32), on="sm_90")
    assert any(note.startswith("xs: ") and "aligned" in note for note in plan.notes)


def off_its_elements(*shape):
    """Return an array whose elements are not aligned to their own size."""
    x = np.frombuffer(bytearray(4 * int(np.prod(shape)) + 1), np.float32, offset=1).reshape(shape)
    assert not x.flags.aligned
    return x


@pytest.mark.parametrize(
    "name, x, settings",
    [
        ("x", (1, 2, 9), dict(function=cupyconv.conv, weight=np.ones((3, 2, 3), np.float32))),
        ("x", (1, 2, 9), dict(function=cupyconv.max_pool, kernel_shape=(3,))),
        ("x", (1, 2, 9), dict(function=cupyconv.im2col, kernel_shape=(3,))),
        ("columns", (1, 6, 7), dict(function=cupyconv.col2im, spatial_shape=(9,), kernel_shape=(3,))),
        ("out", (1, 6, 7), dict(function=cupyconv.im2col, x=np.ones((1, 2, 9), np.float32), kernel_shape=(3,))),
        ("weight", (2, 3, 3), dict(function=cupyconv.conv_transpose, x=np.ones((1, 2, 9), np.float32))),
        ("grad", (1, 3, 7), dict(function=cupyconv.conv_grad_weight, x=np.ones((1, 2, 9), np.float32), kernel_shape=3)),
        ("weight_hh", (4, 4), dict(function=cupyconv.rnn, x=np.ones((5, 1, 2), np.float32), weight_ih=np.ones((4, 2), np.float32))),
    ],
    ids=["conv", "max_pool", "im2col", "col2im", "out", "conv_transpose", "conv_grad_weight", "rnn"],
)  # fmt: skip
def test_no_gpu_loads_an_element_off_its_boundary(name, x, settings):
    with pytest.raises(ValueError, match=f"{name} is not aligned to its 4-byte elements"):
        cupyconv.explain(**settings, **{name: off_its_elements(*x)}, on="sm_90")


def test_no_gpu_loads_an_element_of_a_layer_off_its_boundary():
    layers = [cupyconv.ConvLayer(np.ones((2, 2, 1), np.float32)), cupyconv.ConvLayer(off_its_elements(2, 2, 1))]
    with pytest.raises(ValueError, match=r"weight.* is not aligned to its 4-byte elements"):
        cupyconv.explain(cupyconv.conv_chain, np.ones((1, 2, 9), np.float32), layers, on="sm_90")


@pytest.mark.parametrize("name", ["x", "scale"])
def test_no_gpu_loads_what_a_gradient_goes_back_through_off_its_boundary(name):
    arrays = {
        "grad": np.ones((1, 2, 9), np.float32),
        "x": np.ones((1, 2, 9), np.float32),
        "scale": np.ones(2, np.float32),
    }
    arrays[name] = off_its_elements(*arrays[name].shape)
    settings = {"shift": None, "sums": None, "spatial": 1, "activation": None, "through": True}
    with pytest.raises(ValueError, match=f"{name} is not aligned to its 4-byte elements"):
        PROLOGUE_GRADIENT.checked(arrays | settings, "sm_90").plan()


def test_rows_that_begin_off_a_boundary_are_named():
    """A note names inputs with rows that start off a boundary: rows of 63 float32 prevent 16-byte loads."""
    plan = cupyconv.explain(cupyconv.linmerge, np.ones((1, 2, 63), np.float32), np.ones((3, 2), np.float32), on="sm_90")
    assert dict(plan.steps[0].kernel.macros)["VECTOR"] == "1"
    assert any(note.startswith("xs: ") for note in plan.notes)


def test_work_of_a_gemm_call():
    """A GEMM call reads a shared matrix once, counts a complex product as 8 operations, and reads C if beta is set."""
    a, b, c = Matrix(Address("weight"), 3, 0), Matrix(Address("x"), 5, 15), Matrix(Address("out"), 5, 10)
    call = GemmCall(2, 5, 3, a, b, c, batch=7, dtype="complex64", c_dtype="complex64", compute="float32", beta=1)
    assert call.flops == 8 * 7 * 2 * 5 * 3
    assert call.bytes_moved == 8 * (2 * 3 + 7 * 3 * 5 + 2 * 7 * 2 * 5)


def test_names_of_kernels():
    assert str(Kernel("merge", (("DTYPE", "float32"), ("TILE", "4")))) == "merge<float32, 4>"
    assert str(Address("x[0]", 4096)) == "x[0]+4,096B"


@pytest.mark.parametrize(
    "dtype, flops, moved, frequencies, words",
    [
        ("complex64", 3 * 64 * 6 * 5, 2 * 3 * 64 * 16, (8, 8), "complex64 -> complex64"),
        ("complex128", 3 * 64 * 6 * 5, 2 * 3 * 64 * 32, (8, 8), "complex128 -> complex128"),
        ("float32", 3 * 64 * 15, 2 * 3 * (64 * 4 + 40 * 8), (8, 5), "float32 -> complex64"),
        ("float64", 3 * 64 * 15, 2 * 3 * (64 * 8 + 40 * 16), (8, 5), "float64 -> complex128"),
    ],
)
def test_the_figures_of_a_transform(dtype, flops, moved, frequencies, words):
    step = Transform((8, 8), 3, Address("tiles"), Address("spectra"), dtype)
    assert (step.flops, step.bytes_moved, step.frequencies) == (flops, moved, frequencies)
    assert f"8 x 8  batch 3  {words}" in str(step)


def test_bytes_in_words():
    sizes = 1023, 1024, 1 << 20, 3 << 29, (1 << 20) - 1
    assert [_bytes(n) for n in sizes] == ["1023 B", "1.0 KiB", "1.0 MiB", "1.5 GiB", "1024.0 KiB"]


# --- the page of a plan for a GPU ----------------------------------------------------------------------------


def test_the_page_names_everything():
    page = str(
        plan_of_conv(array(64, 3, 32, 32), array(16, 3, 3, 3), array(16), padding=1, activation="relu", method="gemm")
    )
    for words in (
        "conv 3 -> 16 channels, kernel 3x3 on 64 samples of 32x32", "padding ((1, 1), (1, 1)) constant",
        "float32 (64, 16, 32, 32), C order", "method    gemm on cuda (H200, sm_90)", "asked for",
        "56,623,104 FLOP", "moved", "minimum", "bound by", "workspace 6.8 MiB; columns 6.8 MiB",
        "kernel   im2col<bits32, 4>  grid (", "block (256, 1, 1)", "shared 0 B",
        "gemm     m 16  n 1024  k 27  batch 64  float32 -> float32", "A weight ld 27 stride 0",
        "B columns ld 1024 stride 27648", "C out ld 1024 stride 16384", "kernel   epilogue<float32, float32, 4>",
        "not direct: ", "bias", "relu",
    ):  # fmt: skip
        assert words in page, f"{words!r} is missing in\n{page}"


def test_the_page_says_why():
    made = plan_of_conv([array(4, 4, 1_000_000)] * 5, array(4, 20, 1))
    assert dict(made.rejected).keys() == {"gemm", "implicit_gemm", "winograd", "fft"}
    elsewhere = "winograd", "fft"  # methods of NumPy only
    assert all(
        "(model not yet measured on a GPU)" in reason for method, reason in made.rejected if method not in elsewhere
    )
    assert "fused merge" in str(made) and "not gemm: " in str(made) and "not implicit_gemm: " in str(made)


def test_chunks_print_once():
    made = plan_of_conv(array(64, 3, 32, 32), array(16, 3, 3, 3), padding=1, method="gemm", limit=1 << 20)
    assert len(made.steps) == 16
    assert str(made).count("gemm     m 16") == 1 and "7 more chunks (14 steps)" in str(made)


def test_what_is_lost_is_named():
    notes = "\n".join(
        plan_of_conv([array(2, 4, 64, 64, order="gaps"), array(2, 4, 64, 64, offset=1)], array(4, 8, 1, 1)).notes
    )
    assert "x[0]: neither pixels nor channels have unit stride" in notes
    assert "x[1]: not 16-byte aligned" in notes
    widened = plan_of_conv([array(2, 4, 8, 8), array(2, 4, 8, 8, dtype="float64")], array(4, 8, 1, 1))
    assert any("x[1] (float64) widens the result to float64" in note for note in widened.notes)
    assert [c.buffer for c in widened.conversions] == ["x[0]", "weight"]


def test_numpy_plans_print_too():
    for x, method in ((array(8, 3, 32, 32), "gemm"), (array(8, 3, 32, 32), "direct"), (array(0, 3, 32, 32), "auto")):
        made = cupyconv.explain(cupyconv.conv, x, array(16, 3, 3, 3), method=method)
        assert made.backend == "numpy" and f"method    {made.method} on numpy" in str(made)
        assert all(isinstance(step, BlockLoop) for step in made.steps)
        assert "loop     " in str(made) or (not made.steps and "nothing to run" in str(made))
        assert all(f"not {other}: {reason}" in str(made) for other, reason in made.rejected)


def test_columns_print_too():
    made = cupyconv.explain(cupyconv.im2col, array(2, 3, 8, 8), 3, on=GPU)
    assert "im2col<bits32" in str(made) and made.method == "im2col"
    assert "col2im<float32, float32, 0>" in str(cupyconv.explain(cupyconv.col2im, array(2, 27, 36), (8, 8), 3, on=GPU))
    assert "im2col" in str(cupyconv.explain(cupyconv.im2col, array(2, 3, 8, 8), 3))
