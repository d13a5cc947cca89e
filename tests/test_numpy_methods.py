"""The table of methods on NumPy: a new method needs a file and an entry, and everything else follows from these."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pytest
import reference
from integer_arrays import integers

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import conv as cuda_conv
from cupyconv.numpy import choice, convolution
from cupyconv.numpy.choice import Method
from cupyconv.numpy.gemm import Columns
from cupyconv.problem import problems


class Reversed(Columns):
    """Multiply the columns of a block in reverse order."""

    name = "reversed columns"
    description = "columns from the last to the first"

    @classmethod
    def applies(cls, problem):
        return problem.geometry.groups == 1

    @property
    def workspace(self):
        return 3 * super().workspace

    seconds = 1e-9

    def arranged(self, weight):
        return weight[..., ::-1]

    def sums(self, run, block):
        columns = run.images.columns(block).reshape(1, -1, block.area)
        return np.matmul(run.weight, columns[:, ::-1]).reshape(block.sums_shape)

    @cached_property
    def in_place(self):
        return False


@pytest.fixture
def with_one_more(monkeypatch):
    """Add a method to the tables; its estimated time is almost zero at stride 1."""
    one = Method((Reversed,), lower_bound=lambda problem: 1.0 * (problem.geometry.stride != (1, 1, 1)))
    for table in ("METHODS", "GROUPED"):
        monkeypatch.setattr(convolution, table, {"reversed": one, **getattr(convolution, table)})
    forget_calls()
    yield
    forget_calls()


def test_a_method_that_suits_is_taken(with_one_more):
    x, weight, bias = integers(2, 3, 9, 8), integers(5, 3, 3, 3), integers(5)
    settings = dict(padding=1, activation="relu")
    plan = cupyconv.explain(cupyconv.conv, x, weight, bias, **settings)
    assert plan.method == "reversed" and "reversed columns, accumulates in float32" in str(plan)
    assert [name for name, _ in plan.rejected] == ["winograd", "fft", "gemm", "direct", "implicit_gemm"]
    for threads in (1, 2):
        with cupyconv.options(threads=threads, workspace_limit=12_000 * threads):
            actual = cupyconv.conv(x, weight, bias, **settings)
            assert cupyconv.explain(cupyconv.conv, x, weight, bias, **settings).steps[0].blocks > 1
        np.testing.assert_array_equal(actual, reference.conv(x, weight, bias, **settings))


def test_a_method_that_does_not_suit_does_not_apply_or_was_not_named_is_not(with_one_more):
    x, weight = integers(2, 4, 9, 8), integers(4, 4, 3, 3)
    stepped = cupyconv.explain(cupyconv.conv, x, weight, stride=2)
    assert stepped.method == "gemm" and ("reversed", "estimated 1.0 s or more") in stepped.rejected
    grouped = cupyconv.explain(cupyconv.conv, x, weight[:, :2], groups=2)
    assert grouped.method == "gemm" and dict(grouped.rejected)["reversed"] == "no implementation applies"
    named = cupyconv.explain(cupyconv.conv, x, weight, method="direct")
    assert set(named.rejected[:-1]) == {
        (name, "method='direct' was asked for") for name in ("reversed", "winograd", "fft", "gemm")
    }


def test_a_method_without_room_gives_way(with_one_more):
    x, weight = integers(1, 3, 9, 8), integers(5, 3, 3, 3)
    taken = {}
    for limit in (100_000, 8_000, 100):
        with cupyconv.options(workspace_limit=limit):
            try:
                taken[limit] = cupyconv.explain(cupyconv.conv, x, weight).method
            except ValueError as error:
                taken[limit] = str(error)
    assert (taken[100_000], taken[8_000]) == ("reversed", "gemm")
    assert taken[100].startswith("no method applies: reversed: the smallest block needs ")
    assert "; gemm: the smallest" in taken[100] and "; direct: the smallest" in taken[100]


@pytest.mark.parametrize("name", ["gemm", "direct"])
def test_the_last_way_of_a_method_applies_to_all_that_the_others_leave(name):
    """The last implementation of a method applies to every problem that the others leave.

    So a named method is refused only for lack of workspace, and implementations for different kinds leave no gap.
    """
    from cupyconv.numpy import depthwise, direct, gemm
    from cupyconv.numpy.toeplitz_rows import ToeplitzRows

    scaled = depthwise.ScaledPixels, depthwise.ScaledRuns, depthwise.ScaledTaps
    implementations = {"gemm": (*gemm.IMPLEMENTATIONS, ToeplitzRows), "direct": (*direct.IMPLEMENTATIONS, *scaled)}[
        name
    ]
    rng = np.random.default_rng(0)
    for groups, kernel, stride, dtype in [
        (1, 3, 1, "float32"), (1, 1, 1, "float32"), (4, 3, 1, "float32"), (4, 3, 2, "float32"), (4, 3, 2, "complex64"),
    ]:  # fmt: skip
        x, weight = rng.random((1, 4, 30, 30), np.float32), np.ones((4, 4 // groups, kernel, kernel), dtype)
        (step,) = cupyconv.explain(cupyconv.conv, x, weight, groups=groups, stride=stride, method=name).steps
        assert type(step) in implementations
        np.testing.assert_allclose(
            cupyconv.conv(x, weight, groups=groups, stride=stride, method=name),
            reference.conv(x, weight, groups=groups, stride=stride),
            rtol=1e-4,
        )


@pytest.mark.parametrize("on", [None, "sm_90"])
@pytest.mark.parametrize("operation", ["conv", "conv_transpose", "conv_grad_input", "conv_grad_weight"])
def test_a_public_name_that_a_backend_does_not_have_is_refused_there(monkeypatch, operation, on):
    """A method may exist on one backend only: its name is known everywhere, and "auto" works without it."""
    names = (*problems.METHODS, "wavelet")
    monkeypatch.setattr(problems.check_method, "__defaults__", (names,))
    monkeypatch.setattr(choice, "PUBLIC_METHODS", names)
    monkeypatch.setattr(cuda_conv, "METHODS", names)
    x, weight = integers(2, 4, 9, 8), integers(4, 4, 3, 3)
    given = {
        "conv": (x, weight),
        "conv_transpose": (x, weight),
        "conv_grad_input": (integers(2, 4, 7, 6), weight, x.shape),
        "conv_grad_weight": (integers(2, 4, 7, 6), x, (3, 3)),
    }[operation]
    function = getattr(cupyconv, operation)
    plan = cupyconv.explain(function, *given, on=on)
    assert dict(plan.rejected)["wavelet"]
    with pytest.raises(ValueError, match=r"method 'wavelet' does not apply: .*not supported for this operation"):
        cupyconv.explain(function, *given, method="wavelet", on=on)


@pytest.mark.parametrize("taps, method", [(1, "gemm"), (3, "gemm"), (3, "direct")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_whose_elements_are_apart_are_copied_before_products(monkeypatch, taps, method, dtype):
    """Weights without unit stride are copied: NumPy 2.1 does not give them to BLAS, which took 40 times as long."""
    taken = []
    arranged = convolution.ConvRun._arranged

    def recorded(run, weight):
        loop = type(run.loop)
        with monkeypatch.context() as context:
            own = loop.arranged
            context.setattr(loop, "arranged", lambda self, matrix: taken.append(matrix) or own(self, matrix))
            return arranged(run, weight)

    monkeypatch.setattr(convolution.ConvRun, "_arranged", recorded)
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (2, 24, 20, 20)).astype(dtype)
    wide = rng.integers(-3, 4, (40, 24, taps, 2 * taps)).astype(dtype)
    for weight in (wide[..., ::2], wide[::-1, :, :, ::2], wide[..., :taps].swapaxes(2, 3)):
        forget_calls()
        y = cupyconv.conv(x, weight, method=method)
        np.testing.assert_array_equal(y, cupyconv.conv(x, weight.copy(), method=method))
    assert len(taken) == 6 and all(matrix.flags.c_contiguous for matrix in taken)
