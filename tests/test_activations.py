"""Every activation compared with its definition, at values where definitions and implementations differ."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from tolerance import assert_close, finfo

import cupyconv
from cupyconv.problem.activations import RECURRENT_ONLY, TABLE, resolve_activation

ml_dtypes = pytest.importorskip("ml_dtypes")

#: Each activation with its defaults, and with given parameters if it accepts any.
SPECIFICATIONS = [
    *(name for name, (_, defaults) in TABLE.items() if None not in defaults),
    ("leaky_relu", 0.25),
    ("leaky_relu", -0.5),
    ("leaky_relu", 0),
    ("clip", -1, 2),
    ("clip", 0.5, 0.5),
    ("clip", float("-inf"), 1),
    ("clip", 0, float("inf")),
    ("elu", 0.5),
    ("hard_sigmoid", 0.25),
    ("hard_sigmoid", 1 / 6, 0.75),
]
DTYPES = [np.dtype(dtype) for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64")]


def special_values(dtype: np.dtype) -> np.ndarray:
    """Return zeros, infinities, NaN, the ends of the dtype's range, points where functions bend, and points between."""
    info = finfo(dtype)
    ends = [float(info.max), float(info.max) / 8, float(info.tiny), float(info.smallest_subnormal), float(info.eps)]
    bends = [0.0, 1.0, 2.0, 2.5, 3.0, 6.0, 20.0, 88.0, 89.0, 104.0, 300.0, 709.0, 710.0, 746.0, np.inf]
    walk = [*np.linspace(0.01, 12, 60), *ends, *bends]
    with np.errstate(all="ignore"):
        return np.array([np.nan, *walk, *(-v for v in walk)]).astype(dtype)


def test_the_table_has_the_contracts_names():
    convolutions = (
        "relu relu6 leaky_relu clip elu sigmoid hard_sigmoid hardswish tanh gelu gelu_tanh silu mish softplus"
    )
    assert sorted(TABLE) == sorted(convolutions.split())
    assert set(RECURRENT_ONLY) == {"affine", "thresholded_relu", "scaled_tanh", "softsign"}
    assert len({code for code, _ in TABLE.values()}) == len(TABLE), "codes are unique"


@pytest.mark.grid(specification=SPECIFICATIONS, dtype=DTYPES, method=["direct", "gemm"])
def test_special_values(target, specification, dtype, method):
    """A convolution that changes nothing else applies the activation; no NaN or infinity is lost, moved or created."""
    values = special_values(dtype)
    x, one = target.to_device(values[None, None]), target.to_device(np.ones((1, 1, 1), dtype))
    actual = cupyconv.conv(x, one, activation=specification, method=method)
    expected = reference.activation(specification, reference.wide(values))
    magnitude = np.where(np.isfinite(values), np.abs(reference.wide(values)), 0) + 1
    assert_close(target.to_host(actual)[0, 0], expected, dtype, terms=1, magnitude=magnitude)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", ["elu", "tanh", "softplus", "silu", "mish", "gelu", "gelu_tanh", "sigmoid"])
def test_small_and_large_arguments_keep_their_digits(target, name, dtype):
    """The relative error stays small: exp(v) - 1 near 0, log(1 + exp(v)) far below 0, and both far above."""
    digits = {"elu": (-1e-5, 30), "tanh": (-1e-5, 30), "softplus": (-30, 30), "mish": (-20, 30)}
    low, high = digits.get(name, (-1, 30))
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(low, high, 200), rng.uniform(min(low, 0) / 100, 0, 50)]).astype(dtype)
    x, one = target.to_device(values[None, None]), target.to_device(np.ones((1, 1, 1), dtype))
    actual = target.to_host(cupyconv.conv(x, one, activation=name))[0, 0]
    expected = reference.activation(name, reference.wide(values))
    np.testing.assert_allclose(actual, expected, rtol=16 * finfo(dtype).eps, atol=finfo(dtype).tiny)


@pytest.mark.parametrize("specification", ["relu", ("leaky_relu",), ["leaky_relu", 0.2], ("clip", 0, np.float32(6))])
def test_a_name_a_tuple_or_a_list(specification):
    name, *given = (specification,) if isinstance(specification, str) else specification
    resolved = resolve_activation(specification)
    assert (resolved.name, resolved.code) == (name, TABLE[name][0])
    assert (resolved.alpha, resolved.beta)[: len(given)] == tuple(map(float, given))
    assert resolved and str(resolved) == name


def test_none_is_no_activation():
    assert not resolve_activation(None)


def test_parameters_left_out_have_their_defaults():
    assert resolve_activation(("hard_sigmoid", 0.25)) == resolve_activation(("hard_sigmoid", 0.25, 0.5))
    assert resolve_activation("elu") == resolve_activation(("elu", 1))
