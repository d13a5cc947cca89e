"""The cost model of the NumPy backend: calls whose best method was measured to be best by a factor, and what is made of prices.

Nothing is timed here.  The factors are of a processor with two cores, AVX-512 and OpenBLAS.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import cupyconv
from cupyconv import conv, conv_grad_input, conv_grad_weight
from cupyconv.numpy import cost


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


#: The best method, by how much the next one takes longer, and the call.
CLEAR = [
    ("winograd", 1.5, convolution((8, 64, 56, 56), (64, 64, 3, 3), padding=1)),
    ("winograd", 1.8, convolution((8, 128, 28, 28), (128, 128, 3, 3), padding=1)),
    ("gemm", 2.0, convolution((1, 256, 14, 14), (256, 256, 3, 3), padding=1)),
    ("gemm", 5.4, convolution((1, 512, 7, 7), (512, 512, 3, 3), padding=1)),
    ("gemm", 4.6, convolution((1, 3, 224, 224), (16, 3, 3, 3), padding=1)),
    ("gemm", 1.6, convolution((8, 16, 28, 28), (32, 16, 3, 3), padding=1)),
    ("gemm", 3.6, convolution((1, 8, 16, 16), (8, 8, 3, 3), padding=1)),
    ("gemm", 2.1, convolution((2, 48, 27, 27), (96, 48, 5, 5), padding=2)),
    ("gemm", 2.9, convolution((1, 96, 17, 17), (128, 96, 7, 1), padding=(3, 0))),
    ("gemm", 15.0, convolution((1, 16, 112, 112), (16, 16, 1, 1))),
    ("gemm", 1.9, convolution((1, 128, 56, 56), (128, 128, 3, 3), stride=2, padding=1)),
    ("gemm", 3.8, convolution((1, 3, 224, 224), (64, 3, 11, 11), stride=4, padding=2)),
    ("gemm", 1.8, convolution((1, 32, 64, 64), (32, 32, 3, 3), padding=4, dilation=4)),
    ("gemm", 1.8, convolution((2, 128, 28, 28), (128, 8, 3, 3), padding=1, groups=16)),
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
    # Little memory: products of Toeplitz matrices are as quick, and those of columns short.
    ("gemm", 2.0, convolution((1, 1, 1024, 1024), (1, 1, 9, 9), limit=1 << 20, padding=4)),
    ("gemm", 10.0, convolution((1, 3, 224, 224), (64, 3, 7, 7), limit=1 << 20, stride=2, padding=3)),
]


@pytest.mark.parametrize("best, factor, call", CLEAR, ids=[str(number) for number in range(len(CLEAR))])
def test_the_choice_where_the_best_is_clear(best, factor, call):
    function, arrays, window, limit = call()
    with cupyconv.options(threads=2, workspace_limit=limit):
        plan = cupyconv.explain(function, *arrays, **window)
    assert plan.method == best, f"{best} takes 1/{factor} of the time\n{plan}"


def test_explain_prints_what_each_method_takes():
    x, weight = zeros(8, 64, 56, 56), zeros(64, 64, 3, 3)
    plan = cupyconv.explain(conv, x, weight, padding=1)
    assert plan.price.endswith(" by the model")
    others = dict(plan.rejected)
    assert all(others[name].endswith(" by the model") for name in {"winograd", "fft", "gemm", "direct"} - {plan.method})
    with cupyconv.options(allow_winograd=False):
        plan = cupyconv.explain(conv, x, weight, padding=1)
    assert dict(plan.rejected)["winograd"] == "options(allow_winograd=False) forbids it"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3.44e-6, "3.4 µs"), (12.3e-6, "12 µs"), (99.6e-6, "100 µs"), (999e-6, "1.0 ms"),
        (0.126, "130 ms"), (1.26, "1.3 s"), (345.0, "340 s"),
    ],
)  # fmt: skip
def test_a_price_has_two_digits(seconds, words):
    assert cost.by_model(seconds) == f"{words} by the model"


def steps_of(method, *arrays, **settings):
    return cupyconv.explain(conv, *arrays, method=method, **settings).steps


@pytest.mark.parametrize("method", ["winograd", "fft", "gemm", "direct"])
def test_more_work_costs_more(method):
    """Of samples, of channels, of outputs; and in a wider dtype."""
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
