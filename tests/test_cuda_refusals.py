"""Reasons why a method does not apply on a GPU: for each reason, a call that is refused and a similar one that is not.

Workspace limits: a plan stays within them, and the bytes that a refusal asks for are enough.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from plans import array
from test_every_plan import holds

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.explain import checked_call
from cupyconv.problem.geometry import LARGEST_STEP
from cupyconv.problem.plan import MAX_PAIR_SOURCES, MAX_SOURCES, GemmCall
from cupyconv.problem.recurrence import GATES


def refusal_of(function: Any, *arguments: Any, on: str = "sm_90", limit: int | None = None, **settings: Any) -> str:
    """Return why a named method does not apply; an empty string if it applies."""
    with cupyconv.options(workspace_limit=limit):
        try:
            cupyconv.explain(function, *arguments, **settings, on=on)
        except ValueError as refusal:
            return str(refusal)
    return ""


#: A function, its arrays and its settings.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def pair(first: Any, second: Any, channels: int = 8, dtype: str = "float32") -> Call:
    """Return the call of a chain of two layers that must be one kernel."""
    return cupyconv.conv_chain, (array(2, channels, 16, dtype=dtype), [first, second]), {"fuse": True}


def layer(outputs: int = 8, channels: int = 8, dtype: str = "float32", **settings: Any) -> ConvLayer:
    return ConvLayer(array(outputs, channels, 3, dtype=dtype), **settings)


def conv(*shapes: tuple[int, ...], dtypes: tuple[str, str] = ("float32", "float32"), **settings: Any) -> Call:
    return cupyconv.conv, tuple(map(_of_dtype, shapes, dtypes)), settings


def transposed(*shapes: tuple[int, ...], dtypes: tuple[str, str] = ("float32", "float32"), **settings: Any) -> Call:
    return cupyconv.conv_transpose, tuple(map(_of_dtype, shapes, dtypes)), settings


def weight_gradient(grad: tuple[int, ...], x: tuple[int, ...], kernel: int, **settings: Any) -> Call:
    return cupyconv.conv_grad_weight, (array(*grad), array(*x), kernel), settings


def recurrent(cell: str, sizes: tuple[int, int, int], hidden: int, dtype: str = "float32", **settings: Any) -> Call:
    rows = GATES[cell] * hidden
    arrays = array(*sizes, dtype=dtype), array(rows, sizes[2], dtype=dtype), array(rows, hidden, dtype=dtype)
    return getattr(cupyconv, cell), arrays, settings


def _of_dtype(shape: tuple[int, ...], dtype: str) -> Any:
    return array(*shape, dtype=dtype)


SCALE = (array(8), None, "relu")
MOST = 2**30  # the largest dimension that is given to cuBLAS
#: The reason, a call that is refused for it, and a call that is not.
REASONS: list[tuple[str, Call, Call]] = [
    ("there is nothing to sum over", pair(layer(channels=0), layer(), channels=0), pair(layer(channels=1), layer(), channels=1)),
    ("the layers compute in different dtypes", pair(layer(dtype="complex64"), layer(dtype="complex64")), pair(layer(), layer())),
    ("the intermediate image is float32, but the second layer computes in float64", pair(layer(), layer(dtype="float64")), pair(layer(dtype="float64"), layer(dtype="float64"), dtype="float64")),
    ("no kernel for complex products", pair(layer(dtype="complex64"), layer(dtype="complex64"), dtype="complex64"), pair(layer(), layer())),
    ("the first layer has a prologue", pair(layer(prologue=SCALE), layer()), pair(layer(), layer())),
    ("the second layer has a prologue", pair(layer(), layer(prologue=SCALE)), pair(layer(), layer())),
    ("the first layer has groups", pair(layer(channels=4, groups=2), layer()), pair(layer(channels=1, groups=8), layer())),
    ("the second layer has groups", pair(layer(), layer(channels=2, groups=4)), pair(layer(), layer(channels=1, groups=8))),
    ("the second layer has groups", pair(layer(), layer(16, channels=1, groups=8)), pair(layer(), layer(channels=1, groups=8))),
    ("the first layer has a residual", pair(layer(padding=1, residual=array(2, 8, 16)), layer()), pair(layer(), layer(padding=2, residual=array(2, 8, 16)))),
    ("the second layer has padding_mode='reflect'", pair(layer(), layer(padding=1, padding_mode="reflect")), pair(layer(padding=1, padding_mode="reflect"), layer(padding=1))),
    ("no kernel for products of complex64 and float32", conv((2, 4, 9), (4, 4, 3), dtypes=("complex64", "float32"), method="implicit_gemm"), conv((2, 4, 9), (4, 4, 3), dtypes=("complex64", "complex64"), method="implicit_gemm")),
    ("tiles exceed the largest grid", conv((1 << 27, 1, 1024), (1, 1, 1), method="implicit_gemm"), conv((1 << 27, 1, 1023), (1, 1, 1), method="implicit_gemm")),
    ("exceed cuBLAS's 32-bit dimensions", transposed((1, 1, MOST + 1), (1, 1, 2), method="gemm"), transposed((1, 1, MOST), (1, 1, 2), method="gemm")),
    ("exceed cuBLAS's 32-bit dimensions", transposed((1, MOST + 1, 1), (MOST + 1, 1, 2), method="gemm"), transposed((1, MOST, 1), (MOST, 1, 2), method="gemm")),
    ("exceed cuBLAS's 32-bit dimensions", transposed((1, 1, MOST // 2 + 1), (1, 1, 2), dtypes=("complex64", "float32"), method="gemm"), transposed((1, 1, MOST // 2), (1, 1, 2), dtypes=("complex64", "float32"), method="gemm")),
    ("exceed cuBLAS's 32-bit dimensions", weight_gradient((1, 1, 1), (1, MOST // 8 + 1, 8), 8, method="gemm"), weight_gradient((1, 1, 1), (1, MOST // 8, 8), 8, method="gemm")),
    ("exceed cuBLAS's 32-bit dimensions", weight_gradient((1, 2, 1), (1, MOST // 8 + 2, 8), 8, groups=2, method="gemm"), weight_gradient((1, 2, 1), (1, MOST // 8, 8), 8, groups=2, method="gemm")),
    ("exceed cuBLAS's 32-bit dimensions", weight_gradient((1, MOST + 1, 1), (1, 1, 1), 1, method="gemm"), weight_gradient((1, MOST, 1), (1, 1, 1), 1, method="gemm")),
    ("samples exceed the largest grid", recurrent("rnn", (2, 32 * 65535 + 1, 1), 8, method="step"), recurrent("rnn", (2, 32 * 65535, 1), 8, method="step")),
    ("steps; the kernel supports at most", recurrent("rnn", (LARGEST_STEP + 1, 1, 1), 1, method="step"), recurrent("rnn", (LARGEST_STEP, 1, 1), 1, method="step")),
    ("133 blocks of 8 units must run at the same time", recurrent("rnn", (9, 4, 8), 1057, method="persistent"), recurrent("rnn", (9, 4, 8), 1056, method="persistent")),
    ("bytes of shared memory", recurrent("lstm", (9, 4, 8), 1056, "float64", method="persistent"), recurrent("lstm", (9, 4, 8), 640, "float64", method="persistent")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "refused", "accepted"), REASONS, ids=[words for words, *_ in REASONS])
def test_a_reason_is_met_and_not_by_what_is_nearly_the_same(words, refused, accepted):
    for (function, arguments, settings), says in ((refused, words), (accepted, "")):
        said = refusal_of(function, *arguments, **settings, limit=1 << 60)
        assert says in said and bool(says) == bool(said), said


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_as_many_inputs_as_a_kernel_has_room_for_and_no_more(method):
    for count in (MAX_SOURCES, MAX_SOURCES + 1):
        few = f"{count} inputs" if count > MAX_SOURCES else ""
        xs = [array(2, 4, 8, 8, order="last")] * count
        grad, weight = array(2, 4, 8, 8, order="last"), array(4, 4 * count, 3, 3)
        assert few in (said := refusal_of(cupyconv.conv, xs, weight, padding=1, method=method)) and bool(few) == bool(
            said
        )
        said = refusal_of(cupyconv.conv_grad_weight, grad, xs, 3, padding=1, method=method)
        assert few in said and bool(few) == bool(said)
        weight = array(4 * count, 4, 3, 3)
        said = refusal_of(cupyconv.conv_transpose, xs, weight, method=method)
        assert few in said and bool(few) == bool(said)


def test_as_many_inputs_as_a_pair_has_room_for_and_no_more():
    for count, words in ((MAX_PAIR_SOURCES, ""), (MAX_PAIR_SOURCES + 1, f"{MAX_PAIR_SOURCES + 1} inputs")):
        layers = [cupyconv.ConvLayer(array(4, count, 1)), cupyconv.ConvLayer(array(4, 4, 1))]
        said = refusal_of(cupyconv.conv_chain, [array(2, 1, 16)] * count, layers, fuse=True)
        assert words in said and bool(words) == bool(said)


def test_indices_of_a_pixel_have_32_bits():
    """A sample may have 65,536 x 65,536 pixels; one more column needs another bit."""
    weight = array(2, 1, 3, 3)
    for width, words in ((1 << 16, ""), ((1 << 16) + 1, "32 bits")):
        x = array(1, 1, 1 << 16, width)
        said = refusal_of(cupyconv.conv, x, weight, padding=1, method="implicit_gemm")
        assert words in said and bool(words) == bool(said)


def test_sizes_that_a_kernel_counts_in_32_bits():
    """Sizes leave enough of int32 to step one tile, or one window, beyond the end."""
    most = (2**31 - 1) // 8
    for pixels, words in ((most, ""), (most + 1, "int32")):
        x, weight = array(1, 1, pixels), array(1, 1, 1)
        said = refusal_of(cupyconv.conv, x, weight, method="implicit_gemm")
        assert words in said and bool(words) == bool(said)
        grad = array(1, 8, pixels, order="last", dtype="float16")
        said = refusal_of(cupyconv.conv_grad_weight, grad, grad, 1, method="implicit_gemm")
        assert words in said and bool(words) == bool(said)
    for (rows, step), words in (((9, 3), ""), ((9, 4), "int32"), ((1, 4), "")):  # from one tap to the next
        x, weight = array(1, 1, rows + 8, 1 << 26, dtype="float16"), array(1, 1, min(rows, 3), 1, dtype="float16")
        said = refusal_of(cupyconv.conv, x, weight, dilation=(step, 1), method="implicit_gemm", limit=1 << 60)
        assert words in said and bool(words) == bool(said)
    for pixels, words in (((1 << 13) - 1, ""), (1 << 13, "int32")):
        grad = array(1 << 15, 8, pixels, order="last", dtype="float16")
        said = refusal_of(cupyconv.conv_grad_weight, grad, grad, 1, method="implicit_gemm")
        assert words in said and bool(words) == bool(said)
    most = (2**31 - 1) // 1024
    layers = [cupyconv.ConvLayer(array(1, 1, 1)), cupyconv.ConvLayer(array(1, 1, 1))]
    for pixels, words in ((most, ""), (most + 1, "int32")):
        said = refusal_of(cupyconv.conv_chain, array(1, 1, pixels), layers, fuse=True, limit=1 << 30)
        assert words in said and bool(words) == bool(said)


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "method"),
    [
        (cupyconv.conv, (array(4, 6, 30, 30), array(8, 6, 3, 3)), {"padding": 1}, "gemm"),
        (cupyconv.conv, (array(4, 6, 30, 30, order="gaps"), array(8, 6, 1, 1)), {}, "gemm"),
        (cupyconv.conv, (array(4, 6, 30, 30, dtype="float16"), array(8, 6, 3, 3, dtype="float16")), {"activation": "gelu"}, "gemm"),
        (cupyconv.conv, (array(4, 6, 30, 30), array(8, 6, 3, 3)), {"padding": 1}, "implicit_gemm"),
        (cupyconv.conv_transpose, (array(4, 6, 30, 30), array(6, 8, 3, 3)), {"stride": 2}, "gemm"),
        (cupyconv.conv_transpose, (array(4, 6, 30, 30, order="gaps"), array(6, 4, 3, 3)), {"groups": 2}, "gemm"),
        (cupyconv.conv_grad_weight, (array(4, 8, 30, 30), array(4, 6, 30, 30), 3), {"padding": 1}, "gemm"),
        (cupyconv.conv_grad_weight, (array(4, 8, 30, 30, dtype="float16"), array(4, 6, 30, 30, dtype="float16"), 3), {"padding": 1}, "direct"),
        (cupyconv.conv_grad_weight, (array(4, 8, 9, 9, dtype="complex64"), array(4, 6, 9, 9), 3), {"padding": 1}, "gemm"),
        (cupyconv.conv_grad_weight, (array(4, 8, 9, 9), array(4, 6, 9, 9, dtype="complex64"), 3), {"padding": 1}, "gemm"),
        (cupyconv.conv_grad_weight, (array(4, 8, 30, 30, dtype="float16", order="last"), array(4, 8, 30, 30, dtype="float16", order="last"), 3), {"padding": 1}, "implicit_gemm"),
        (cupyconv.conv, (array(4, 6, 30, 30, dtype="complex64"), array(8, 6, 3, 3)), {}, "gemm"),
        (cupyconv.conv, (array(4, 6, 30, 30), array(8, 6, 3, 3, dtype="complex64")), {}, "gemm"),
        (cupyconv.conv_transpose, (array(4, 6, 30, 30, dtype="complex64"), array(6, 8, 3, 3)), {}, "gemm"),
        (cupyconv.conv_transpose, (array(4, 6, 30, 30), array(6, 8, 3, 3, dtype="complex64")), {}, "gemm"),
        (cupyconv.conv_transpose, (array(4, 6, 30, 30, order="gaps"), array(6, 8, 3, 3)), {"stride": 3}, "gemm"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)  # fmt: skip
def test_what_a_refusal_says_is_needed_is_enough(function, arguments, settings, method):
    """No plan exceeds its limit, however small it is."""
    said = refusal_of(function, *arguments, **settings, method=method, limit=0)
    needed = int(re.findall(r"([\d,]+) bytes of workspace", said)[0].replace(",", ""))
    for limit in (needed, needed + 255, needed + 256, 2 * needed + 1, 3 * needed, 20 * needed, 1 << 27):
        with cupyconv.options(workspace_limit=limit):
            call = checked_call(function, *arguments, **settings, method=method, on="sm_90")
            plan = holds(call, limit)
        assert plan.workspace_bytes <= limit


@pytest.mark.parametrize("cell", GATES)
def test_recurrent_layers_keep_any_limit(cell):
    shapes = (40, 3, 5), (GATES[cell] * 7, 5), (GATES[cell] * 7, 7)
    arrays = [array(*shape) for shape in shapes]
    kept = 0
    for limit, method in product((3_000, 5_000, 8_001, 13_313, 20_000, 70_000), ("step", "persistent")):
        with cupyconv.options(workspace_limit=limit):
            try:
                plan = cupyconv.explain(getattr(cupyconv, cell), *arrays, method=method, on="sm_90")
            except ValueError as refusal:
                assert "workspace" in str(refusal)
                continue
        assert plan.workspace_bytes <= limit
        kept += 1
    assert kept >= 6


@pytest.mark.parametrize("cell", GATES)
def test_recurrent_layers_of_no_steps_project_nothing(cell):
    weights = array(GATES[cell] * 7, 5), array(GATES[cell] * 7, 7)
    plan = cupyconv.explain(getattr(cupyconv, cell), array(0, 3, 5), *weights, on="sm_90")
    assert not [step for step in plan.steps if isinstance(step, GemmCall)] and plan.workspace_bytes == 0


def test_buffers_that_begin_on_boundaries_fit_the_limit():
    """Several buffers, whose sizes are not multiples of the alignment, fit every limit or are refused."""
    x, weight = array(1, 300, 5, 5), array(33, 300, 3, 3)
    grad, image = array(2, 12, 1, 9_999, order="last"), array(2, 4, 1, 9_999, order="last")
    layers = [cupyconv.ConvLayer(array(5, 3, 3, dtype=dtype), padding=1) for dtype in ("float32",)]
    layers += [cupyconv.ConvLayer(array(7, 5, 3, dtype=dtype), padding=1) for dtype in ("float64",)]
    calls = (
        (cupyconv.conv, (x, weight), {"padding": 1, "method": "implicit_gemm"}, range(600_000, 1_000_000, 9_771)),
        (cupyconv.conv_grad_weight, (grad, image, (1, 3)), {"padding": (0, 1), "method": "implicit_gemm"}, range(0, 19_000, 251)),
        (cupyconv.conv_transpose, (array(5, 6, 7, 7, order="gaps"), array(6, 5, 3, 3)), {"method": "gemm"}, range(7_000, 60_000, 499)),
        (cupyconv.conv, (array(5, 6, 7, 7, order="gaps"), array(5, 6, 3, 3, order="gaps")), {"method": "gemm"}, range(7_000, 60_000, 499)),
        (cupyconv.conv_chain, (array(3, 3, 77), layers), {"fuse": False}, range(9_000, 40_000, 977)),
    )  # fmt: skip
    for function, arguments, settings, limits in calls:
        taken = set()
        for limit in limits:
            with cupyconv.options(workspace_limit=limit):
                try:
                    plan = cupyconv.explain(function, *arguments, **settings, on="sm_90")
                except ValueError as refusal:
                    assert "limit" in str(refusal)
                    continue
            converted = sum(conversion.nbytes for conversion in plan.conversions)
            assert plan.workspace_bytes - converted <= limit, (function, limit)
            taken.add(plan.workspace_bytes)
        assert len(taken) > 1, function
