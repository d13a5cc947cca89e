"""The activation table of ``cupyconv.activations`` on NumPy arrays, in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from cupyconv.activations import Activation


@cache
def _erf() -> Callable[[np.ndarray], np.ndarray]:
    """SciPy's, imported when first needed; without SciPy the standard library's, a Python call per element."""
    try:
        from scipy.special import erf
    except ImportError:
        each = np.frompyfunc(math.erf, 1, 1)
        return lambda v: each(v).astype(v.dtype)
    return erf


def activate(v: np.ndarray, activation: Activation) -> None:
    """Replace every element by its image."""
    if activation:
        _FUNCTIONS[activation.name](v, v.dtype.type(activation.alpha), v.dtype.type(activation.beta))


def _sigmoid(v: np.ndarray) -> np.ndarray:
    result = np.negative(v)
    np.exp(result, out=result)
    result += 1
    return np.reciprocal(result, out=result)


def _softplus(v: np.ndarray) -> np.ndarray:
    return np.logaddexp(v, v.dtype.type(0))


def _leaky_relu(v: np.ndarray, alpha: np.floating, _: object) -> None:
    np.multiply(v, alpha, out=v, where=v < 0)


def _elu(v: np.ndarray, alpha: np.floating, _: object) -> None:
    np.multiply(np.expm1(np.minimum(v, 0)), alpha, out=v, where=v < 0)


def _gate(v: np.ndarray, slope: Any, offset: Any) -> np.ndarray:
    gate = v * v.dtype.type(slope)
    gate += v.dtype.type(offset)
    return np.clip(gate, 0, 1, out=gate)


def _gelu(v: np.ndarray, *_: object) -> None:
    gate = _erf()(v * v.dtype.type(math.sqrt(0.5)))
    gate += 1
    gate *= v.dtype.type(0.5)
    v *= gate


def _gelu_tanh(v: np.ndarray, *_: object) -> None:
    gate = v * v
    gate *= v.dtype.type(0.044715)
    gate *= v
    gate += v
    gate *= v.dtype.type(math.sqrt(2 / math.pi))
    np.tanh(gate, out=gate)
    gate += 1
    gate *= v.dtype.type(0.5)
    v *= gate


_FUNCTIONS: dict[str, Callable[[np.ndarray, np.floating, np.floating], object]] = {
    "relu": lambda v, *_: np.maximum(v, 0, out=v),
    "relu6": lambda v, *_: np.clip(v, 0, 6, out=v),
    "leaky_relu": _leaky_relu,
    "clip": lambda v, low, high: np.clip(v, low, high, out=v),
    "elu": _elu,
    "sigmoid": lambda v, *_: np.copyto(v, _sigmoid(v)),
    "hard_sigmoid": lambda v, alpha, beta: np.copyto(v, _gate(v, alpha, beta)),
    "hardswish": lambda v, *_: np.multiply(v, _gate(v, 1 / 6, 0.5), out=v),
    "tanh": lambda v, *_: np.tanh(v, out=v),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda v, *_: np.multiply(v, _sigmoid(v), out=v),
    "mish": lambda v, *_: np.multiply(v, np.tanh(_softplus(v)), out=v),
    "softplus": lambda v, *_: np.copyto(v, _softplus(v)),
}
