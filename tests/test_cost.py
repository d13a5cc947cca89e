"""The cost model of the NumPy backend: calls whose best method is known from measurements, and properties of estimates.

Nothing is timed here.  The factors were measured on a processor with two cores, AVX-512 and OpenBLAS.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import share_of_examples

import cupyconv
from cupyconv import conv, conv_grad_input, conv_grad_weight
from cupyconv.call.explain import checked_call
from cupyconv.numpy import cost
from cupyconv.problem.problems import HostModel


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def convolution(x, weight, dtype="float32", limit=None, **window):
    return lambda: (conv, (zeros(*x, dtype=dtype), zeros(*weight, dtype=dtype)), window, limit)


def gradient(of, x, weight, **window):
    def call():
        grad = conv(zeros(*x), zeros(*weight), **window)
        if of == "weight":
            return conv_grad_weight, (grad, zeros(*x), weight[2:]), window, None
        return conv_grad_input, (grad, zeros(*weight), x), window, None

    return call


#: The best method, the factor by which the next one takes longer, and the call.
CLEAR = [
    ("winograd", 1.5, convolution((8, 64, 56, 56), (64, 64, 3, 3), padding=1)),
    ("winograd", 1.8, convolution((8, 128, 28, 28), (128, 128, 3, 3), padding=1)),
    ("gemm", 2.0, convolution((1, 256, 14, 14), (256, 256, 3, 3), padding=1)),
    ("gemm", 5.4, convolution((1, 512, 7, 7), (512, 512, 3, 3), padding=1)),
    ("gemm", 4.6, convolution((1, 3, 224, 224), (16, 3, 3, 3), padding=1)),
    ("winograd", 1.3, convolution((16, 128, 7, 7), (128, 128, 3, 3), padding=1)),
    ("gemm", 3.6, convolution((1, 8, 16, 16), (8, 8, 3, 3), padding=1)),
    ("winograd", 1.3, convolution((2, 48, 27, 27), (96, 48, 5, 5), padding=2)),
    ("gemm", 2.9, convolution((1, 96, 17, 17), (128, 96, 7, 1), padding=(3, 0))),
    ("gemm", 15.0, convolution((1, 16, 112, 112), (16, 16, 1, 1))),
    ("gemm", 1.9, convolution((1, 128, 56, 56), (128, 128, 3, 3), stride=2, padding=1)),
    ("gemm", 3.8, convolution((1, 3, 224, 224), (64, 3, 11, 11), stride=4, padding=2)),
    ("winograd", 1.4, convolution((2, 32, 8, 28, 28), (32, 32, 1, 3, 3), padding=(0, 1, 1))),
    ("gemm", 1.8, convolution((2, 128, 28, 28), (128, 8, 3, 3), padding=1, groups=16)),
    # Few outputs: they fill no vector, and need as many transforms of inputs as more outputs would.
    ("gemm", 1.2, convolution((64, 32, 17, 17), (1, 32, 4, 4), padding=1)),
    # Few channels: the last transform of the outputs also moves channels first, and is counted once.
    ("winograd", 1.2, convolution((4, 24, 71, 71), (16, 24, 3, 5), padding=(1, 2))),
    ("winograd", 1.2, convolution((2, 96, 56, 56), (32, 96, 2, 2))),
    # Groups of few channels: Winograd's products fill no vector.
    ("gemm", 1.6, convolution((8, 128, 56, 56), (128, 4, 3, 3), padding=1, groups=32)),
    ("gemm", 1.9, convolution((1, 16, 16, 32, 32), (16, 1, 3, 3, 3), padding=1, groups=16)),
    ("gemm", 2.2, convolution((1, 24, 33, 35), (40, 24, 3, 3), "complex64", padding=1)),
    ("fft", 15.0, convolution((1, 3, 256, 256), (3, 3, 31, 31), padding=15)),
    ("fft", 12.0, convolution((1, 2, 65536), (2, 2, 1024), padding=512)),
    ("gemm", 2.0, convolution((1, 120, 28, 28), (120, 1, 5, 5), padding=2, groups=120)),
    ("gemm", 1.8, convolution((4, 72, 56, 56), (72, 1, 5, 5), stride=2, padding=2, groups=72)),
    ("fft", 4.0, convolution((1, 1, 512, 512), (1, 1, 31, 31), padding=15)),
    ("fft", 2.5, convolution((1, 1, 512, 512), (1, 1, 15, 15), "complex64", padding=7)),
    ("gemm", 4.9, convolution((1, 1, 10**6), (1, 1, 101), padding=50)),
    ("gemm", 2.7, convolution((1, 1, 10**6), (1, 1, 200), "float64", padding=100)),
    ("gemm", 2.7, gradient("weight", (1, 512, 7, 7), (512, 512, 3, 3), padding=1)),
    ("gemm", 7.4, gradient("weight", (1, 3, 224, 224), (64, 3, 11, 11), stride=4, padding=2)),
    ("fft", 5.7, gradient("weight", (1, 1, 512, 512), (1, 1, 31, 31), padding=15)),
    ("fft", 2.3, gradient("weight", (1, 2, 256, 256), (2, 2, 25, 25), padding=12)),
    ("fft", 6.7, gradient("weight", (1, 4, 256, 256), (4, 4, 31, 31), padding=15)),
    ("winograd", 1.5, gradient("input", (4, 128, 28, 28), (128, 128, 3, 3), padding=1)),
    ("gemm", 1.7, gradient("input", (4, 64, 57, 57), (96, 64, 3, 3), stride=2, padding=1)),
    ("gemm", 2.1, gradient("input", (1, 16, 64, 64), (16, 16, 3, 3), padding=1, padding_mode="reflect")),
    # Little memory: products of Toeplitz matrices are as fast as with more, and products of columns are short.
    ("gemm", 2.0, convolution((1, 1, 1024, 1024), (1, 1, 9, 9), limit=1 << 20, padding=4)),
    ("gemm", 10.0, convolution((1, 3, 224, 224), (64, 3, 7, 7), limit=1 << 20, stride=2, padding=3)),
]


@pytest.mark.parametrize("best, factor, call", CLEAR, ids=[str(number) for number in range(len(CLEAR))])
def test_the_choice_where_the_best_is_clear(best, factor, call):
    function, arrays, window, limit = call()
    with cupyconv.options(threads=2, workspace_limit=limit):
        plan = cupyconv.explain(function, *arrays, **window)
    assert plan.method == best, f"{best} takes 1/{factor} of the time\n{plan}"


@pytest.mark.parametrize(
    ("channels", "size", "samples", "dtype"),
    [(256, 14, 8, "float32"), (384, 14, 4, "float32"), (192, 14, 4, "float32")],
)
def test_a_large_weight_is_not_read_anew_for_each_row(channels, size, samples, dtype):
    """Rows of MEC columns, with a turned weight larger than the cache, took 1.7 to 2.8 times as long as columns."""
    x = zeros(samples, channels, size, size, dtype=dtype)
    weight = zeros(channels, channels, 3, 3, dtype=dtype)
    with cupyconv.options(threads=2, allow_winograd=False):
        plan = cupyconv.explain(conv, x, weight, padding=1)
    assert [step.name for step in plan.steps] == ["shifted columns"]


def test_explain_prints_what_each_method_takes():
    x, weight = zeros(8, 64, 56, 56), zeros(64, 64, 3, 3)
    plan = cupyconv.explain(conv, x, weight, padding=1)
    assert plan.price.startswith("estimated ")
    others = dict(plan.rejected)
    assert all(others[name].startswith("estimated ") for name in {"winograd", "fft", "gemm", "direct"} - {plan.method})
    with cupyconv.options(allow_winograd=False):
        plan = cupyconv.explain(conv, x, weight, padding=1)
    assert dict(plan.rejected)["winograd"] == "forbidden by options(allow_winograd=False)"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.34e-6, "0.3 µs"), (3.44e-6, "3.4 µs"), (12.3e-6, "12 µs"), (99.6e-6, "100 µs"), (999e-6, "1.0 ms"),
        (0.126, "130 ms"), (1.26, "1.3 s"), (345.0, "340 s"),
    ],
)  # fmt: skip
def test_a_price_has_two_digits(seconds, words):
    assert cost.by_model(seconds) == f"estimated {words}"


def steps_of(method, *arrays, **settings):
    return cupyconv.explain(conv, *arrays, method=method, **settings).steps


@pytest.mark.parametrize("method", ["winograd", "fft", "gemm", "direct"])
def test_more_work_costs_more(method):
    """More samples, channels or outputs, or a wider dtype, take a longer estimated time."""
    x, weight = zeros(2, 16, 40, 40), zeros(16, 16, 3, 3)

    def seconds(x, weight):
        with cupyconv.options(threads=1):
            return sum(step.seconds for step in steps_of(method, x, weight))

    one = seconds(x, weight)
    assert 0 < one < seconds(zeros(16, 16, 40, 40), weight)
    assert one < seconds(x, zeros(64, 16, 3, 3))
    assert one < seconds(zeros(2, 64, 40, 40), zeros(16, 64, 3, 3))
    if method != "winograd":
        assert one < seconds(x.astype("float64"), weight.astype("float64")) < seconds(x + 0j, weight + 0j)


PROBLEM: Any = checked_call(conv, zeros(1, 4, 9, 9), zeros(4, 4, 3, 3)).problem
#: The same problem in other dtypes.
WIDE = replace(PROBLEM, x_dtype="float64", out=replace(PROBLEM.out, dtype="float64"))
COMPLEX = replace(PROBLEM, x_dtype="complex64", weight_dtype="complex64", out=replace(PROBLEM.out, dtype="complex64"))
#: Functions that estimate the time of a number of elements, and their other arguments.
OF_ELEMENTS = {
    "dot": (100.0, PROBLEM), "copied": (16.0, "float32"), "added_with_border": ("float32",), "transposed": (),
    "added": ("float32", 16.0), "added_to_windows": ("float32", 16.0, False), "exchanged": (), "transformed": ((56, 56, 8), (1, 3, 3)),
    "fourier": (4.0, PROBLEM, True), "complex_products": (PROBLEM,), "apart": (PROBLEM,), "scaled": (PROBLEM, 4),
    "scaled_apart": (PROBLEM,),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_twice_the_elements_take_twice_as_long(name):
    """Estimates are proportional to the elements, and each element takes between 0.1 and 20 ns."""
    price, rest = getattr(cost, name), OF_ELEMENTS[name]
    assert 1e-10 < price(1e6, *rest) / 1e6 < 2e-8
    assert price(2e6, *rest) == pytest.approx(2 * price(1e6, *rest))


def test_what_makes_an_element_take_longer():
    """Wider dtypes, short runs, strided places, more levels of a transform and fewer channels per row take longer."""
    for price in (cost.copied, cost.added):
        runs = [
            price(1e6, run, "float32") if price is cost.copied else price(1e6, "float32", run) for run in (1, 8, 64)
        ]
        assert runs == sorted(runs, reverse=True) and runs[0] > 4 * runs[2]
    assert (
        cost.copied(1e6, 16, "float32") < cost.copied(1e6, 16, "float32", True) < cost.copied(1e6, 16, "float64", True)
    )
    assert (
        cost.added(1e6, "float32") < cost.added(1e6, "float32", apart=True) < cost.added(1e6, "complex128", apart=True)
    )
    assert cost.added_to_windows(1e6, "float32", 16, False) < cost.added_to_windows(1e6, "float32", 16, True)
    kernel = 1, 3, 3
    short, longer, long = (cost.transformed(1e6, (9, row, row), kernel) for row in (1, 32, 320))
    assert short > 2 * longer > 2 * long
    # Each axis counts its own contiguous elements, and an axis with a single tap counts none.
    assert cost.transformed(1e6, (1, 320, 1), (1, 3, 1)) == cost.transformed(1e6, (1, 320, 320), (1, 3, 1))
    assert cost.transformed(1e6, (1, 320, 320), kernel) < cost.transformed(1e6, (1, 320, 1), kernel) < short
    assert (
        cost.fourier(1e6, 4, PROBLEM, True)
        < cost.fourier(1e6, 8, PROBLEM, True)
        < 2 * cost.fourier(1e6, 4, PROBLEM, True)
    )
    assert cost.scaled(1e6, PROBLEM) < cost.scaled(1e6, PROBLEM, 16) < cost.scaled(1e6, PROBLEM, 2)
    assert cost.scaled(1e6, PROBLEM) < cost.scaled(1e6, PROBLEM, is_short=True) < cost.scaled_apart(1e6, PROBLEM)
    assert cost.slowness(COMPLEX) > cost.slowness(WIDE) > cost.slowness(PROBLEM) == 1
    assert cost.multiply_adds(WIDE) == 2 * cost.multiply_adds(PROBLEM) == 2
    assert (
        cost.width("complex128") == 2 * cost.width("float64") == 4 * cost.width("float32") == 4 * cost.width("float16")
    )


def test_products_take_longer_the_more_they_multiply():
    """Time increases along each side, is the same for exchanged sides, and is about that of many multiply-adds."""
    sides = (1, 3, 8, 40, 300, 2000)
    for rows in sides:
        for reduction in sides:
            prices = [cost.product(rows, reduction, columns, PROBLEM) for columns in sides]
            assert all(0 < one < other * 1.35 for one, other in pairwise(prices)), (rows, reduction, prices)
            assert prices[-1] > prices[0]
            for longer in (WIDE, COMPLEX):
                others = [cost.product(rows, reduction, columns, longer) for columns in sides]
                assert all(one < other for one, other in zip(prices, others)), (rows, reduction, longer)
    assert cost.product(500, 64, 3000, PROBLEM) == cost.product(3000, 64, 500, PROBLEM)
    large = cost.product(2000, 2000, 2000, PROBLEM)
    assert 1 < large / (2000**3 * cost.MULTIPLY_ADD) < 1.1
    assert cost.product(1, 1000, 1000, PROBLEM) > 2 * 1000**2 * cost.MULTIPLY_ADD, (
        "a vector is read once for each number"
    )


def test_parts_on_threads_take_as_long_as_the_longest():
    work, calls = 1.0, 100.0
    alone = cost.shared(work, calls, 8, 1)
    assert alone == work + calls * cost.CALL == cost.shared(work, calls, 0, 4)
    prices = [cost.shared(work, calls, 8, threads) for threads in (2, 4, 8)]
    assert alone > prices[0] > prices[1] > prices[2]
    assert cost.shared(work, calls, 3, 2) > cost.shared(work, calls, 4, 2), "two parts of three, two of four"
    assert cost.shared(work, calls, 8, 4) == cost.shared(work, calls, 8, 5) > work / 4
    assert cost.shared(0.0, calls, 8, 2) > cost.shared(0.0, calls, 8, 1), "they wait for each other"
    assert cost.shared(0.0, 0.0, 8, 2) > 0, "waking them takes time"
    assert [cost.worth_waking(4, work, 1.0) for work in (0.0, 1.5, 2.5, 9.0)] == [1, 1, 2, 4]


@pytest.mark.parametrize("shares, threads", [(0.1, 1), (1.5, 1), (3.5, 3), (50.0, 8)])
def test_threads_are_woken_for_a_share_each(shares, threads):
    assert cost.worth_waking(8, shares * cost.SHARE) == cost.worth_waking(8, shares, 1.0) == threads


def test_memory_is_dear_where_it_is_more_than_stays():
    assert cost.touched(cost.OWN) == 0 < cost.touched(cost.OWN + 1000) < cost.touched(cost.OWN + 2000) < 1e-6
    assert cost.between(1e6, cost.STAYS) == 0 == cost.between(1e6, 0) < cost.between(1e6, 2 * cost.STAYS)
    assert cost.between(1e6, 2 * cost.STAYS) == pytest.approx(1e6 * cost.BETWEEN / 2)
    # Memory that the allocator returns to the system is mapped again, filled with zeros.
    assert cost.between(1e6, cost.REUSED - 1) < 1e6 * cost.BETWEEN < 1e6 * cost.MAPPED < cost.between(1e6, cost.REUSED)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("channels", [(3, 16), (64, 64), (128, 8)])
@pytest.mark.parametrize("window", [((56, 56), (3, 3)), ((14, 14), (3, 3)), ((90, 90), (11, 11)), ((4000,), (3,))])
def test_at_the_least_is_less_than_the_price_and_not_nothing(threads, batch, channels, window):
    """A method is never planned if its lower bound exceeds another method's estimate, so the bound must hold."""
    size, kernel = window
    inputs, outputs = channels
    x, weight = zeros(batch, inputs, *size), zeros(outputs, inputs, *kernel)
    least = {"winograd": cost.least_winograd, "fft": cost.least_fft, "direct": cost.least_direct}
    for method, bound in least.items():
        with cupyconv.options(threads=threads):
            problem = checked_call(conv, x, weight).problem
            try:
                price = sum(step.seconds for step in steps_of(method, x, weight))
            except ValueError:
                continue
        assert price / 40 < bound(problem) <= price, method


@pytest.mark.parametrize("size, kernel", [((600, 600), (50, 50)), ((1024, 1024), (31, 31))])
def test_the_least_estimate_of_transforms_has_many_lines_at_a_time(size, kernel):
    """The bound once assumed lines that are transformed one by one, which takes twice as long."""
    x, weight = zeros(1, 1, *size), zeros(1, 1, *kernel)
    with cupyconv.options(threads=1):
        bound = cost.least_fft(checked_call(conv, x, weight).problem)
        estimate = sum(step.seconds for step in steps_of("fft", x, weight))
    assert estimate / 4 < bound < estimate / 2


def test_tiles_are_transformed_along_the_axes_of_several_taps():
    """Each further axis writes fewer elements than the axis before, since tiles overlap."""
    rows = (1e3, 1e3, 1e3)
    none, one, two, three = (
        cost.transformed(1e6, rows, kernel) for kernel in ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
    )
    assert none == 0 < three - two < two - one < one

    def least(*kernel: int, **more: bool) -> float:
        with cupyconv.options(threads=1):
            problem: Any = checked_call(conv, zeros(9, 16, 200, 200), zeros(16, 16, *kernel)).problem
        return cost.least_winograd(replace(problem, **more))

    assert least(3, 3, weight_is_constant=True) < least(3, 3)
    # With fewer taps a tile has more windows, but as many products.
    for kernel, larger in (((2, 2), (3, 3)), ((1, 2), (1, 3))):
        assert least(*kernel) < least(*larger) < 2 * least(*kernel)
    calls = [
        cost.winograd_calls(checked_call(conv, zeros(1, 1, 9, 9), zeros(1, 1, *taps)).problem.geometry)
        for taps in ((1, 1), (1, 2), (2, 2))
    ]
    assert 0 < calls[0] < calls[1] < calls[2] < 2 * calls[1]


def test_transforms_of_few_products_are_taken_where_they_are_named():
    """Transforms of few products are used only if named: they have larger rounding errors and save almost nothing."""
    x, weight = zeros(1, 1, 40, 40), zeros(1, 1, 15, 15)
    plan = cupyconv.explain(conv, x, weight)
    assert "larger rounding errors" in dict(plan.rejected)["fft"]
    assert plan.bytes_moved == plan.minimal_bytes == x.nbytes + weight.nbytes + 26 * 26 * 4
    assert cupyconv.explain(conv, x, weight, method="fft").method == "fft"


def test_a_small_limit_costs_more():
    x, weight = zeros(1, 1, 10**6), zeros(1, 1, 101)
    prices = []
    for limit in (16 << 20, 1 << 20):
        with cupyconv.options(workspace_limit=limit, threads=2):
            prices.append(sum(step.seconds for step in steps_of("gemm", x, weight, padding=50)))
    assert prices[0] < prices[1]


def test_a_tiny_call_imports_no_transforms():
    script = """
import sys, numpy, cupyconv
x, weight = numpy.ones((1, 8, 16, 16), "float32"), numpy.ones((8, 8, 3, 3), "float32")
cupyconv.conv(x, weight)
cupyconv.conv(x, weight[:, :1], groups=8)
cupyconv.conv_grad_weight(numpy.ones((1, 8, 14, 14), "float32"), x, 3)
print([name for name in sys.modules if name in ("scipy", "cupyconv.numpy.fft", "cupyconv.numpy.spectra")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@share_of_examples(2)
@given(st.integers(2, 400), st.integers(1, 3000), st.integers(1, 20_000), st.booleans(), st.booleans(), st.booleans())
def test_parts_of_a_product_are_small_and_all_of_it(rows, reduction, columns, is_double, may_be_longer, turned):
    """BLAS packs no operand of such small parts; columns that are never read are added only if that saves time."""
    dtype, vector = ("float64", 8) if is_double else ("float32", 16)
    parts = cost.parts_of_product(rows, reduction, columns, dtype, may_be_longer, turned)
    if parts is None:
        assert not 0 < reduction * 2 * vector * cost.MIN_ROWS <= cost.SMALL_PRODUCT / (2 if is_double else 1)
        return
    assert 1 <= parts.rows <= rows and 1 <= parts.columns <= parts.length
    assert columns <= parts.length < columns + 4 * vector * may_be_longer + (not may_be_longer)
    assert parts.columns == parts.length or parts.columns % vector == 0
    assert parts.rows * reduction * parts.columns <= cost.SMALL_PRODUCT
    assert reduction * parts.columns <= max(cost.READ_AGAIN / cost.width(dtype), 2 * vector * reduction)
    least = rows * reduction * columns * cost.width(dtype) / cost.VECTOR_ELEMENTS * 1e-10
    assert least < parts.seconds < 1000 * least + 1e-6 * rows + 1e-6 * columns
    as_it_is = cost.parts_of_product(rows, reduction, columns, dtype, False, turned)
    assert as_it_is is None or parts.seconds <= as_it_is.seconds
    more = cost.parts_of_product(2 * rows, reduction, columns, dtype, may_be_longer, turned)
    assert more is None or 0.9 * parts.seconds < more.seconds < 3 * parts.seconds
    assert turned or as_it_is is None or cost.product_of_few(rows, reduction, columns, dtype) <= as_it_is.seconds
    assert cost.product_of_few(cost.MIN_ROWS, reduction, columns, dtype) == 0


@pytest.mark.parametrize("price", ["BEGIN", "READ"])
def test_columns_that_take_longer_to_read_make_no_product_cheaper(price, monkeypatch):
    sizes = 8, 100, 500, "float32"
    before = cost.parts_of_product.__wrapped__(*sizes)
    monkeypatch.setattr(cost, price, 2 * getattr(cost, price))
    assert cost.parts_of_product.__wrapped__(*sizes).seconds > before.seconds


@pytest.mark.parametrize(
    "refused", [(1, 5, 5, "float32"), (4, 0, 5, "float32"), (4, 5, 0, "float32"), (4, 5, 5, "complex64")]
)
def test_products_that_have_no_such_parts(refused):
    assert cost.parts_of_product(*refused) is None and cost.parts_of_product(2, 5, 5, "float64")


@share_of_examples(2)
@given(st.integers(1, 80), st.integers(1, 4000), st.integers(1, 20_000))
def test_runs_of_a_product_are_what_blas_packs_nothing_for(rows, reduction, columns):
    run = cost.run_of(rows, reduction, columns, True)
    assert cost.run_of(rows, reduction, columns, False) == 0
    if run:
        assert rows <= cost.FEW_ROWS and rows * reduction <= cost.SMALL_WEIGHT
        assert run < columns and run % cost.RUN_STEP == 0 and rows * reduction * run <= cost.SMALL_PRODUCT
    elif (
        rows <= cost.FEW_ROWS and rows * reduction <= cost.SMALL_WEIGHT
    ):  # BLAS packs nothing, or the last run would be short
        assert columns <= max(2 * cost.RUN_OF_COLUMNS, cost.SMALL_PRODUCT // (rows * reduction))


def test_who_holds_the_threads_of_blas():
    """A loop of one thread that nobody asked for holds BLAS if BLAS would divide its products, complex ones earlier."""
    alone, asked, many = HostModel(1, most=1), HostModel(1), HostModel(4, most=4)
    large = cost.SMALL_PRODUCT + 1
    assert cost.holds_blas(1, alone, large) and cost.holds_blas(1, many, large)
    for refused in ((1, alone, large - 1), (1, asked, large), (2, many, large), (1, alone, large, large)):
        assert not cost.holds_blas(*refused)
    assert cost.divided_from(PROBLEM) == cost.SMALL_PRODUCT == 10 * cost.divided_from(COMPLEX)


def test_rows_of_images_that_are_turned_are_of_those_that_lie_otherwise():
    """Only images in the other order are converted, to channels first or last; one channel is in both orders."""
    call = {last: image(last) for last in (False, True)}
    assert cost.channels_moved(call[False]) == 0 < cost.channels_moved(call[True])
    assert cost.channels_moved(call[True], last=True) == 0 < cost.channels_moved(call[False], last=True)
    assert cost.channels_moved(image(True, 1)) < cost.channels_moved(call[True])


def image(channels_last: bool, channels: int = 16) -> Any:
    """Return the problem of a convolution of large images in this order."""
    x, weight = zeros(2, channels, 200, 200), zeros(channels, channels, 1, 1)
    out = zeros(2, channels, 200, 200)
    if channels_last:
        x, out = (np.moveaxis(zeros(2, 200, 200, channels), 3, 1) for _ in range(2))
    return checked_call(conv, x, weight, out=out).problem
