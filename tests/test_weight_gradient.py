"""How `conv_grad_weight` splits its sum: every implementation, every split, plans and bits."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import reference
from plans import check
from rounds import each_step
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import weight_gradient as weight_gradient_cuda
from cupyconv.numpy import shared_columns
from cupyconv.numpy.strips import GradientStrips
from cupyconv.numpy.weight_channels import GradientChannels
from cupyconv.numpy.weight_gradient import GradientColumns, GradientTaps
from cupyconv.numpy.weight_lines import GradientLines
from cupyconv.numpy.weight_rows import GradientRows
from cupyconv.numpy.weight_runs import GradientRuns
from cupyconv.numpy.weight_sums import WeightGradientLoop
from cupyconv.ops.conv_grad_weight import TRANSFORMED_GRAD_WEIGHT
from cupyconv.problem.plan import Buffer, GemmCall, Plan


def by_definition(grad, x, kernel, *, padding=0, stride=1, groups=1):
    """Return the gradient in double precision, computed tap by tap."""
    grad, x = reference.wide(grad), np.concatenate([reference.wide(a) for a in reference.sequence(x)], axis=1)
    x = np.pad(x, [(0, 0), (0, 0), *[(padding, padding)] * len(kernel)])
    x = x.conj().reshape(len(x), groups, -1, *x.shape[2:])
    split = grad.reshape(len(grad), groups, -1, *grad.shape[2:])
    result = np.empty((groups, split.shape[2], x.shape[2], *kernel), np.result_type(grad, x))
    for tap in np.ndindex(*kernel):
        window = tuple(slice(t, t + stride * (n - 1) + 1, stride) for t, n in zip(tap, grad.shape[2:]))
        result[(..., *tap)] = np.einsum("ngohw,ngchw->goc", split, x[(..., *window)])
    return result.reshape(grad.shape[1], -1, *kernel)


def integers(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, shape).astype(dtype)
    return values + 1j * rng.integers(-2, 3, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values


def explained(grad, x, kernel, limit=None, **arguments):
    with cupyconv.options(workspace_limit=limit):
        return cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, **arguments)


# --- NumPy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, kernel, settings",
    [
        ("MEC columns", (3, 3), {"padding": 1, "method": "gemm"}),
        ("MEC columns", (3, 3), {"stride": 2, "padding": 1}),
        ("columns", (1, 1), {"stride": 2}),
        ("columns", (3, 3), {"groups": 2}),
        ("view", (1, 1), {}),
        ("taps", (3, 3), {"padding": 1, "method": "direct"}),
        ("lines", (3, 3), {"groups": 2, "padding": 1}),
        ("strips", (3, 3), {"groups": 12}),
        ("strips", (3, 4), {"groups": 12, "padding": 1}),
        ("multiplied runs", (3, 3), {"groups": 12, "method": "direct"}),
        ("multiplied runs", (3, 2), {"groups": 12, "stride": 2, "padding": 1, "method": "direct"}),
    ],
)
@pytest.mark.parametrize(
    "grad_dtype, x_dtype", [("float32", "float32"), ("complex64", "float32"), ("float32", "complex64")]
)
def test_every_body(fresh, monkeypatch, body, kernel, settings, grad_dtype, x_dtype):
    """Every implementation is planned for its case and exact; views need two real or two complex factors."""
    if body == "MEC columns":  # columns are faster for an image this small
        monkeypatch.setattr(shared_columns, "MEMORY_BLOCK", 64)
        for implementation in (GradientColumns, GradientRows, GradientChannels, GradientTaps):
            monkeypatch.setattr(implementation, "applies", lambda problem: False)
    monkeypatch.setattr(GradientLines, "applies", lambda problem: body == "lines")
    for implementation in (GradientStrips, GradientRuns, GradientLines):
        if body == implementation.name:
            monkeypatch.setattr(implementation, "turn_calls", 0)
            monkeypatch.setattr(implementation, "seconds", 0.0)
    x = integers((2, 12, 18, 17), x_dtype)
    window = {name: value for name, value in settings.items() if name != "method"}
    grad = integers(
        cupyconv.conv(x, np.zeros((12, 12 // window.get("groups", 1), *kernel)), **window).shape, grad_dtype, 1
    )
    (step,) = explained(grad, x, kernel, **settings).steps
    assert isinstance(step, WeightGradientLoop)
    assert step.name == body or (body == "view" and x_dtype == "complex64" and step.name == "columns")
    actual = cupyconv.conv_grad_weight(grad, x, kernel, **settings)
    assert_exact(actual, by_definition(grad, x, kernel, **window), np.result_type(grad, x))


def test_sums_that_do_not_fit_are_kept_for_some_outputs_at_a_time(fresh):
    """float16 sums are float32, stored apart from the result: outputs are split, and each is rounded only once."""
    grad, x = integers((2, 64, 9, 9), "float16"), integers((2, 16, 9, 9), "float16", 1)
    plan = explained(grad, x, (3, 3), limit=40_000, padding=1)
    assert len(plan.steps) > 1 and plan.workspace_bytes <= 40_000
    assert all(b.first_row == a.first_row + a.rows for a, b in pairwise(plan.steps))
    assert sum(step.rows for step in plan.steps) == 64
    assert [step.seconds for step in plan.steps] == [replace(step).seconds for step in plan.steps]
    assert all(
        f"outputs {step.first_row} to {step.first_row + step.rows} of each" in str(step) for step in plan.steps[1:]
    )
    with cupyconv.options(workspace_limit=40_000):
        actual = cupyconv.conv_grad_weight(grad, x, (3, 3), padding=1)
    assert_exact(actual, by_definition(grad, x, (3, 3), padding=1), "float16")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_for_the_same_threads(threads):
    rng = np.random.default_rng(0)
    grad, x = rng.standard_normal((5, 8, 40, 40)), rng.standard_normal((5, 12, 40, 40))
    with cupyconv.options(threads=threads, workspace_limit=1 << 20):
        results = {cupyconv.conv_grad_weight(grad, x, 3, padding=1).tobytes() for _ in range(5)}
    assert len(results) == 1


# --- CUDA -----------------------------------------------------------------------------------------------------


def test_launches_do_not_depend_on_the_batch():
    def steps(batch):
        grad, x = (np.broadcast_to(np.float32(0), (batch, 64, 14, 14)).copy() for _ in range(2))
        return [type(step) for step in explained(grad, x, 3, padding=1, method="gemm", on="sm_90").steps]

    assert steps(2) == steps(5) == steps(64)


def test_a_1x1_gradient_reads_both_factors_where_they_lie():
    grad, x = np.empty((4, 64, 32, 32), np.float32), np.empty((4, 256, 32, 32), np.float32)
    plan = explained(grad, x, 1, method="gemm", on="sm_90")
    calls = [step for step in plan.steps if isinstance(step, GemmCall)]
    assert {call.a.at.buffer for call in calls} <= {"grad", "gathered grad"}
    assert plan.flops == sum(call.flops for call in calls) == 2 * 4 * 64 * 256 * 32 * 32
    in_rows = (np.moveaxis(np.empty((4, 32, 32, count), np.float32), -1, 1) for count in (64, 256))
    for factors in ((grad[:1], x[:1]), in_rows):  # all pixels in one row
        plan = explained(*factors, 1, method="gemm", on="sm_90")
        assert {(step.a.at.buffer, step.b.at.buffer) for step in plan.steps if isinstance(step, GemmCall)} == {
            ("grad", "x")
        }
        assert {buffer.name for buffer in plan.workspace} <= {"sums"}


@pytest.mark.grid(
    is_long={"samples apart": False, "one long row": True}, groups=[1, 2, 12],
    dtypes=["float32 float32", "float16 float16", "complex64 complex64", "complex64 float32", "float32 complex64"],
)  # fmt: skip
@pytest.mark.host_device
def test_every_cut_of_the_sum(target, fresh, monkeypatch, is_long, groups, dtypes):
    """Every way to split the sum into several parts is exact, whole and in chunks."""
    if target.name == "numpy":
        pytest.skip("the cuts are CUDA's")
    monkeypatch.setattr(weight_gradient_cuda, "MIN_PART", 16)
    grad_dtype, x_dtype = dtypes.split()
    grad, x = integers((3, 12, 7, 9), grad_dtype), [integers((3, c, 7, 9), x_dtype, c) for c in (5, 7)]
    expected = by_definition(grad, x, (3, 3), padding=1, groups=groups)
    on_device = target.to_device(grad), [target.to_device(a) for a in x]
    settings = {"padding": 1, "groups": groups, "method": "gemm"}
    for implementation in (
        implementation for implementation in weight_gradient_cuda.CUTS if implementation[0] == is_long
    ):
        forget_calls()
        with monkeypatch.context() as one:
            one.setattr(weight_gradient_cuda, "CUTS", (implementation,))
            for limit in (None, explained(*on_device, (3, 3), **settings).workspace_bytes // 2):
                plan = explained(*on_device, (3, 3), limit=limit, **settings)
                assert "sum in " in plan.reason
                assert limit is None or ("chunks" in plan.reason and plan.workspace_bytes <= limit)
                with cupyconv.options(workspace_limit=limit):
                    actual = cupyconv.conv_grad_weight(*on_device, (3, 3), **settings)
                assert_exact(target.to_host(actual), expected, np.result_type(grad, *x))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_kernel_without_columns_sums_in_parts(cuda_target, dtype, groups):
    grad, xs = integers((3, 12, 27, 29), dtype), [integers((3, c, 27, 29), dtype, c) for c in (3, 5)]
    arguments = cuda_target.to_device(grad), [cuda_target.to_device(x) for x in xs], (3, 3)
    settings = {"padding": 1, "groups": groups, "method": "direct"}
    plan = explained(*arguments, **settings)
    assert dict(plan.steps[0].params)["sums"].buffer == "sums" and plan.steps[0].grid[0] > 1
    expected = by_definition(grad, xs, (3, 3), padding=1, groups=groups)
    assert_exact(cuda_target.to_host(cupyconv.conv_grad_weight(*arguments, **settings)), expected, dtype)


@pytest.mark.parametrize("orders", ["C C", "C last", "last C", "last last"])
@pytest.mark.parametrize("dtypes", ["float32 float32", "complex64 complex64", "complex64 float32", "float32 complex64"])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_1x1_gradient_of_channels_last_images(target, fresh, monkeypatch, dtypes, orders, is_long):
    """Images are read in place as transposed matrices, but complex inputs not: cuBLAS conjugates what it transposes.

    So a separate pass writes a transposed result.  Parts of one long row begin anywhere.
    """
    if is_long:
        monkeypatch.setattr(weight_gradient_cuda, "MIN_PART", 16)
        monkeypatch.setattr(weight_gradient_cuda, "CUTS", weight_gradient_cuda.CUTS[-1:])

    def placed(array, order):
        if order == "C":
            return target.to_device(array)
        return target.to_device(np.ascontiguousarray(array.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)

    grad_dtype, x_dtype = dtypes.split()
    dtype = "complex64" if "complex64" in dtypes else "float32"
    grad, x = integers((3, 5, 6, 8), grad_dtype), integers((3, 4, 6, 8), x_dtype, 1)
    expected = by_definition(grad, x, (1, 1))
    on_device = [placed(array, order) for array, order in zip((grad, x), orders.split())]
    assert_exact(target.to_host(cupyconv.conv_grad_weight(*on_device, (1, 1), method="gemm")), expected, dtype)
    turned = target.to_device(np.zeros((4, 5, 1, 1), dtype)).transpose(1, 0, 2, 3)
    cupyconv.conv_grad_weight(*on_device, (1, 1), method="gemm", out=turned)
    assert_exact(target.to_host(turned), expected, dtype)


@pytest.mark.parametrize(
    "dtype, channels, outputs, is_turned",
    [
        ("float32", 200, 32, True),
        ("float32", 200, 128, False),
        ("float32", 64, 100, False),
        ("float64", 200, 32, False),
    ],
)
def test_a_first_product_of_few_outputs_is_turned_too(monkeypatch, dtype, channels, outputs, is_turned):
    rng, rows = np.random.default_rng(9), []
    x, grad = (rng.integers(-3, 4, (1, own, 24, 24)).astype(dtype) for own in (channels, outputs))
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 1)
    assert plan.steps[0].name == "view" and plan.steps[0].blocks == 1
    assert ("products" in {buffer.name for buffer in plan.workspace}) == is_turned
    original = np.matmul
    monkeypatch.setattr(
        np, "matmul", lambda a, *others, **out: (rows.append(a.shape[-2]), original(a, *others, **out))[1]
    )
    result = cupyconv.conv_grad_weight(grad, x, 1)
    assert rows == [channels if is_turned else outputs]
    assert_exact(result[..., 0, 0], np.einsum("ohw,chw->oc", grad[0], x[0]), dtype)


def test_one_part_of_a_sum_is_the_result_where_its_rows_lie_in_order():
    """A 16-bit sum is the result only as one chunk: partial sums of several chunks would each be rounded."""

    def written(out, dtype=np.float32, limit=100_000):
        """Return the buffers that products of a single sample write, and whether there are several chunks."""
        grad, x = np.empty((1, 64, 16, 16), dtype), np.empty((1, 256, 16, 16), dtype)
        plan = explained(grad, x, 3, padding=1, method="gemm", on="sm_80", limit=limit, out=out)
        return {step.c.at.buffer for step in plan.steps if isinstance(step, GemmCall)}, "chunks" in plan.reason

    turned = np.empty((256, 64, 3, 3), np.float32).transpose(1, 0, 2, 3)
    for limit, less in ((1_300_000, 950_000), (1_600_000, 1_150_000)):
        assert written(None, limit=limit) == ({"out"}, True)
        assert written(turned, limit=limit) == ({"sums"}, True)
        assert written(None, np.float16, limit=less) == ({"sums"}, True)
        assert written(None, np.float16, limit=limit) == ({"out"}, False), "in one chunk"
    assert written(None, limit=None) == ({"out"}, False) == written(None, np.float16, limit=None)


@pytest.mark.parametrize("dtypes", ["complex64 float32", "float32 complex64"])
def test_a_lone_part_of_two_planes_is_not_the_result(cuda_target, dtypes):
    """Real and imaginary sums are apart; the result has them next to each other."""
    grad, x = (integers((1, 4, 5, 6), dtype, i) for i, dtype in enumerate(dtypes.split()))
    actual = cupyconv.conv_grad_weight(*map(cuda_target.to_device, (grad, x)), 3, padding=1, method="gemm")
    assert_exact(cuda_target.to_host(actual), by_definition(grad, x, (3, 3), padding=1), "complex64")


def test_more_samples_than_a_call_has_products(fresh, monkeypatch):
    """The plan is within any limit, for every way to split the sum."""
    grad, x = (np.broadcast_to(np.float32(0), (2 * 65_536, channels, 6)) for channels in (8, 5))
    for implementation in weight_gradient_cuda.CUTS:
        monkeypatch.setattr(weight_gradient_cuda, "CUTS", (implementation,))
        forget_calls()
        plan = explained(grad, x, 3, limit=1 << 40, padding=1, method="gemm", on="sm_90")
        check(plan, 1 << 40)
        assert sum(step.flops for step in each_step(plan.steps)) == plan.flops
        assert ("3 chunks" in plan.reason) == (not implementation[0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("implementation", weight_gradient_cuda.CUTS)
def test_chunks_of_a_sum_have_all_the_room_there_is_and_no_more(implementation, dtype, fresh, monkeypatch):
    """Plans keep ever smaller limits, also with two of three samples at a time.

    The bytes that a plan uses are enough for it, except for alignment, unless the sum then has more parts.
    """
    monkeypatch.setattr(weight_gradient_cuda, "CUTS", (implementation,))
    for batch, out in product((1, 3), (None, np.empty((5, 8, 3, 3), dtype).swapaxes(0, 1))):
        grad, x = (np.empty((batch, channels, 14, 13), dtype) for channels in (8, 5))

        in_two: list[bool] = []

        def taken(limit, grad=grad, x=x, out=out, in_two=in_two):
            try:
                plan = explained(grad, x, 3, limit=limit, padding=1, method="gemm", out=out, on="sm_90")
            except ValueError:
                return None
            assert plan.workspace_bytes <= limit
            in_two.append("2 chunks" in plan.reason)
            return plan.workspace_bytes

        limit, sizes = 1 << 30, 0
        while size := taken(limit):
            assert implementation != (False, 1) or size == taken(size + 2 * Plan.ALIGNMENT)
            limit, sizes = size - 1, sizes + 1
        assert sizes > 2 and any(in_two)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("lies", ["in order", "with gaps", "turned", "flipped"])
def test_sums_beside_the_result_count(lies, dtype):
    """Separate sums count if no product can write the result, or not in parts; 1x1 kernels read images in place."""
    for batch, taps, order in product((1, 3), (1, 3), ("C", "last")):
        grad, x = (np.empty((batch, channels, 14, 13), dtype) for channels in (8, 5))
        if order == "last":
            grad, x = (np.empty((batch, 14, 13, channels), dtype).transpose(0, 3, 1, 2) for channels in (8, 5))
        out = {
            "in order": np.empty((8, 5, taps, taps), dtype),
            "with gaps": np.empty((8, 9, taps, taps), dtype)[:, :5],
            "turned": np.empty((5, 8, taps, taps), dtype).swapaxes(0, 1),
            "flipped": np.empty((8, 5, taps, taps), dtype)[::-1],
        }[lies]
        granted = []
        for limit in (0, 255, 256, 6_000, 13_000, 15_000, 19_000, 26_000):
            with contextlib.suppress(ValueError):
                plan = explained(grad, x, taps, limit=limit, padding=taps // 2, method="gemm", out=out, on="sm_90")
                check(plan, limit)
                granted.append(limit)
        can_be_added_to = batch == 1 or order == "last" or dtype == "float32"
        can_be_written = lies in ("in order", "with gaps") and can_be_added_to
        assert len(granted) > 1 and (taps > 1 or granted[0] == (0 if can_be_written else 256))


def test_what_does_not_apply_is_said():
    grad, x = np.empty((2, 4, 8, 8), np.float32), np.empty((2, 4, 8, 8), np.complex64)
    with pytest.raises(ValueError, match="'winograd' does not apply: not supported for this operation on this backend"):
        explained(grad, grad, 3, padding=1, method="winograd", on="sm_80")
    given = dict.fromkeys(TRANSFORMED_GRAD_WEIGHT.arrays) | {"grad": grad, "x": x, "scale": np.empty(4, np.complex64)}
    windows = {
        "stride": 1,
        "padding": 1,
        "dilation": 1,
        "groups": 1,
        "padding_mode": "constant",
        "prologue_activation": None,
    }
    plan = TRANSFORMED_GRAD_WEIGHT.checked(given | windows | {"kernel_shape": 3}, "sm_80").plan()
    assert dict(plan.rejected)["gemm"] == "complex inputs with a prologue and a real gradient are not supported"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_a_sum_has_as_many_parts_as_there_is_room_for(method, dtype):
    """Images that are copied first count too; a single part is the result itself if that has its dtype and order."""
    grad, x = (np.empty((16, channels, 56, 56), dtype) for channels in (24, 16))
    for taps, parts in ((1, 1), (3, 1), (1, 2), (3, 2), (3, 5)):
        settings = {"padding": taps // 2, "method": method, "on": "sm_90"}
        moved = [each.space for each in explained(grad, x, taps, **settings).workspace if each.name != "sums"]
        plane = 24 * 16 * taps**2 * (8 if dtype == "float64" else 4)
        for room in (Buffer("sums", parts * plane).space, Buffer("sums", (parts + 1) * plane).space - 1):
            plan = explained(grad, x, taps, limit=sum(moved) + room, **settings)
            is_result = parts == 1 and dtype != "float16" and (taps == 1 or method == "direct")
            assert [each.nbytes for each in plan.workspace if each.name == "sums"] == [parts * plane] * (not is_result)


def test_long_sums_stay_accurate(target):
    """25,600 products in one sum, by both methods."""
    rng = np.random.default_rng(0)
    grad, x = (rng.standard_normal((4, 2, 80, 80), np.float32) for _ in range(2))
    expected = np.einsum("nohw,nchw->oc", grad.astype(float), x.astype(float))[:, :, None, None]
    for method in ("gemm", "direct"):
        actual = cupyconv.conv_grad_weight(target.to_device(grad), target.to_device(x), 1, method=method)
        assert_close(target.to_host(actual), expected, "float32", 4 * 80 * 80)


def test_least_shared_is_what_decides(fresh, monkeypatch):
    grad, x = integers((1, 2, 9, 9)), integers((1, 2, 9, 9), seed=1)
    window = dict(padding=1, method="gemm")
    assert explained(grad, x, 3, **window).steps[0].name == "columns"
    monkeypatch.setattr(shared_columns, "MIN_SHARED", 1)
    monkeypatch.setattr(shared_columns, "MEMORY_BLOCK", 64)
    for implementation in (GradientColumns, GradientRows, GradientChannels):
        monkeypatch.setattr(implementation, "applies", lambda problem: False)
    assert explained(grad, x, 3, **window).steps[0].name == "MEC columns"
    assert_exact(cupyconv.conv_grad_weight(grad, x, 3, **window), by_definition(grad, x, (3, 3), padding=1), "float32")
