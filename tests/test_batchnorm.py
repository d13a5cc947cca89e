"""`fold_batchnorm`: one convolution equals a convolution and the batch normalization after it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference
from tolerance import assert_close

import cupyconv

ml_dtypes = pytest.importorskip("ml_dtypes")

STATISTICS = ("mean", "var", "gamma", "beta")


def statistics(rng: np.random.Generator, channels: int, dtype: Any = "float64") -> dict[str, np.ndarray]:
    drawn = {name: rng.standard_normal(channels) for name in STATISTICS}
    drawn["var"] = rng.uniform(0.5, 2, channels)
    return {name: values.astype(dtype) for name, values in drawn.items()}


def moved(target: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: target.to_device(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}


def normalised(y: np.ndarray, mean: Any, var: Any, gamma: Any, beta: Any, eps: float) -> np.ndarray:
    """Batch normalization at inference, as ONNX defines it."""
    mean, var, gamma, beta = (v[:, None, None] for v in (mean, var, gamma, beta))
    return gamma * (y - mean) / np.sqrt(var + eps) + beta


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_folded_is_convolution_then_normalisation(target, groups):
    rng = np.random.default_rng(groups)
    x, weight = rng.standard_normal((2, 6, 5, 5)), rng.standard_normal((6, 6 // groups, 3, 3))
    bias, given = rng.standard_normal(6), statistics(rng, 6)
    expected = normalised(reference.conv(x, weight, bias, groups=groups), **given, eps=1e-3)
    folded = cupyconv.fold_batchnorm(target.to_device(weight), target.to_device(bias), **moved(target, given), eps=1e-3)
    arrays = [target.to_device(np.array(target.to_host(array))) for array in folded]
    actual = cupyconv.conv(target.to_device(x), *arrays, groups=groups)
    np.testing.assert_allclose(target.to_host(actual), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("absent", list(itertools.product([False, True], repeat=3)), ids=str)
def test_what_is_none_is_neutral(target, absent):
    rng = np.random.default_rng(0)
    weight, bias, given = rng.standard_normal((4, 3, 2)), rng.standard_normal(4), statistics(rng, 4)
    no_bias, no_gamma, no_beta = absent
    bias = None if no_bias else bias
    given["gamma"], given["beta"] = None if no_gamma else given["gamma"], None if no_beta else given["beta"]
    expected = reference.fold_batchnorm(weight, bias, **given)
    actual = cupyconv.fold_batchnorm(**moved(target, dict(weight=weight, bias=bias, **given)))
    for folded, wanted in zip(actual, expected):
        np.testing.assert_allclose(target.to_host(folded), wanted, rtol=1e-14)


@pytest.mark.parametrize("kernel", [(3,), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_weight_of_a_transposed_convolution(target, groups, kernel):
    """In a weight (C_in, C_out // groups, ...), an output channel is a column in the rows of its own group."""
    rng = np.random.default_rng(groups)
    outputs = 2 * groups
    weight, bias, given = rng.standard_normal((6, 2, *kernel)), rng.standard_normal(outputs), statistics(rng, outputs)
    options = dict(groups=groups, transposed=True)
    expected = reference.fold_batchnorm(weight, bias, **given, **options)
    actual = cupyconv.fold_batchnorm(**moved(target, dict(weight=weight, bias=bias, **given)), **options)
    for folded, wanted in zip(actual, expected):
        np.testing.assert_allclose(target.to_host(folded), wanted, rtol=1e-14)


@pytest.mark.parametrize("statistics_dtype", ["float32", None], ids=["float32 statistics", "16-bit statistics"])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bits_are_rounded_once(target, dtype, statistics_dtype):
    rng = np.random.default_rng(1)
    weight, bias = rng.standard_normal((8, 4, 3)).astype(dtype), rng.standard_normal(8).astype(dtype)
    given = statistics(rng, 8, statistics_dtype or dtype)
    expected = reference.fold_batchnorm(weight, bias, **given)
    actual = cupyconv.fold_batchnorm(**moved(target, dict(weight=weight, bias=bias, **given)))
    for folded, wanted in zip(actual, expected):
        assert_close(folded, wanted, dtype, terms=4, magnitude=np.abs(wanted) + 4)


def test_the_arguments_stay_as_they_are(target):
    rng = np.random.default_rng(2)
    arguments = dict(weight=rng.standard_normal((3, 2, 1)), bias=rng.standard_normal(3), **statistics(rng, 3))
    arrays = moved(target, arguments)
    weight, bias = cupyconv.fold_batchnorm(**arrays)
    assert weight is not arrays["weight"] and bias is not arrays["bias"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(target.to_host(array), arguments[name])


def test_a_variance_of_zero_without_eps_is_infinite_and_quiet_on_cuda(cuda_target):
    """On CUDA the result is what the definition gives, because a refusal would have to wait for the GPU."""
    one = np.ones(1)
    arguments = moved(cuda_target, dict(weight=np.ones((1, 1, 1)), bias=None, mean=0 * one, var=0 * one))
    weight, bias = cupyconv.fold_batchnorm(**arguments, eps=0)
    assert np.isposinf(cuda_target.to_host(weight)).all() and np.isnan(cuda_target.to_host(bias)).all()


VALID: dict[str, Any] = dict(
    weight=np.ones((4, 3, 2), np.float32), bias=np.ones(4, np.float32),
    **{name: np.ones(4, np.float32) for name in STATISTICS},
)  # fmt: skip


@pytest.mark.parametrize(
    "error, message, changes",
    [
        (ValueError, r"mean has shape \(3,\), needed \(4,\)", dict(mean=np.ones(3, np.float32))),
        (ValueError, r"var has shape \(1,\), needed \(4,\)", dict(var=np.ones(1, np.float32))),
        (ValueError, r"gamma has shape \(4, 1\), needed \(4,\)", dict(gamma=np.ones((4, 1), np.float32))),
        (ValueError, r"beta has shape \(\), needed \(4,\)", dict(beta=np.ones((), np.float32))),
        (ValueError, r"bias has shape \(5,\), needed \(4,\)", dict(bias=np.ones(5, np.float32))),
        (ValueError, r"weight .* two axes, given shape \(4,\)", dict(weight=np.ones(4, np.float32))),
        (ValueError, r"groups 3 .* 4", dict(groups=3, transposed=True)),
        (ValueError, r"groups must be at least 1, given 0", dict(groups=0)),
        (TypeError, r"groups .* 1.5", dict(groups=1.5)),
        (TypeError, r"mean has dtype int64.*astype", dict(mean=np.ones(4, np.int64))),
        (TypeError, r"weight has dtype int32.*astype", dict(weight=np.ones((4, 3, 2), np.int32))),
        (TypeError, r"mean is complex64.*imaginary", dict(mean=np.ones(4, np.complex64))),
        (TypeError, r"gamma is complex64.*imaginary", dict(gamma=np.ones(4, np.complex64))),
    ],
    ids=lambda value: None if isinstance(value, type) else str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_bad_input(target, error, message, changes):
    with pytest.raises(error, match=message):
        cupyconv.fold_batchnorm(**moved(target, VALID | changes))


@pytest.mark.parametrize("name", ["weight", "mean", "var"])
@pytest.mark.parametrize("value", [None, 1.0, [1.0] * 4], ids=repr)
def test_what_has_to_be_an_array(target, name, value):
    with pytest.raises(TypeError, match=rf"\b{name}\b.*{type(value).__name__}"):
        cupyconv.fold_batchnorm(**moved(target, VALID | {name: value}))


@pytest.mark.parametrize("eps", [None, "1e-5"], ids=repr)
def test_eps_is_a_number(eps):
    with pytest.raises(TypeError, match="eps"):
        cupyconv.fold_batchnorm(**VALID, eps=eps)


def test_one_library(cuda_target):
    arguments = moved(cuda_target, VALID) | {"var": VALID["var"]}
    with pytest.raises(TypeError, match=r"weight is .*HostArray, var is numpy\.ndarray"):
        cupyconv.fold_batchnorm(**arguments)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("var, eps, said", [(-3.0, 1e-5, "-1e-05, given -3"), (0.0, 0, "0, given 0"),
                                           (-0.25, 0.25, "-0.25, given -0.25")])  # fmt: skip
def test_a_variance_without_a_root_to_divide_by_is_refused(var, eps, said, dtype):
    """A variance of -eps or less is refused; exactly -eps gave infinities once."""
    one = np.ones(2, dtype)
    with pytest.raises(ValueError, match=f"var must be above -eps, {said}"):
        cupyconv.fold_batchnorm(np.ones((2, 3, 1), dtype), None, mean=one, var=np.array([1, var], dtype), eps=eps)


def test_a_variance_that_rounding_makes_minus_eps_is_refused():
    """float32(-1e-5) is refused with an eps of 1e-5: it is above -1e-5, but var + eps is 0 in float32."""
    one = np.ones(1, np.float32)
    with pytest.raises(ValueError, match="var must be above -eps"):
        cupyconv.fold_batchnorm(np.ones((1, 1, 1), np.float32), None, mean=one, var=np.float32(-1e-5) * one, eps=1e-5)
    weight, _ = cupyconv.fold_batchnorm(
        np.ones((1, 1, 1)), None, mean=np.ones(1), var=np.array([-1e-5 + 1e-15]), eps=1e-5
    )
    assert np.isfinite(weight).all()
