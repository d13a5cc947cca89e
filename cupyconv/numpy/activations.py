"""The activations of ``cupyconv.problem.activations`` on NumPy arrays: in-place functions and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyconv.problem.activations import Activation


def _erf(v: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the error function of `v` to `out`."""
    from scipy.special import erf  # imported only if used

    return np.asarray(erf(v, out))


def activate(v: np.ndarray, activation: Activation) -> None:
    """Apply an activation in place; it needs one temporary array like `v`, and a boolean mask."""
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
    flat = np.minimum(v, 0)
    np.multiply(np.expm1(flat, out=flat), alpha, out=v, where=v < 0)


def _gate(v: np.ndarray, slope: Any, offset: Any) -> np.ndarray:
    gate = v * v.dtype.type(slope)
    gate += v.dtype.type(offset)
    return np.clip(gate, 0, 1, out=gate)


def _gelu(v: np.ndarray, *_: object) -> None:
    gate = v * v.dtype.type(math.sqrt(0.5))
    gate = _erf(gate, gate)
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


def _mish(v: np.ndarray, *_: object) -> None:
    gate = _softplus(v)
    v *= np.tanh(gate, out=gate)


def _softsign(v: np.ndarray, *_: object) -> None:
    scale = np.abs(v)
    scale += 1
    v /= scale


def _affine(v: np.ndarray, alpha: np.floating, beta: np.floating) -> None:
    v *= alpha
    v += beta


def _scaled_tanh(v: np.ndarray, alpha: np.floating, beta: np.floating) -> None:
    v *= beta
    np.tanh(v, out=v)
    v *= alpha


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
    "mish": _mish,
    "softplus": lambda v, *_: np.copyto(v, _softplus(v)),
    "affine": _affine,
    "thresholded_relu": lambda v, alpha, _: np.copyto(v, 0, where=v < alpha),
    "scaled_tanh": _scaled_tanh,
    "softsign": _softsign,
}


def derivative(saved: np.ndarray, activation: Activation) -> np.ndarray:
    """Return f' at the pre-activation, or from the result if that determines it (`derivative_from_result`).

    A bool array stands for ones and zeros.  At a kink, the derivative is that of the flat side or of the left side.
    """
    return _DERIVATIVES[activation.name](saved, saved.dtype.type(activation.alpha), saved.dtype.type(activation.beta))


def _between(v: np.ndarray, low: Any, high: Any) -> np.ndarray:
    inside = v > low
    inside &= v < high
    return inside


def _hardswish_derivative(v: np.ndarray, *_: object) -> np.ndarray:
    result = _gate(v, 1 / 6, 0.5)
    np.add(result, v * v.dtype.type(1 / 6), out=result, where=_between(v, -3, 3))
    return result


def _elu_derivative(v: np.ndarray, alpha: np.floating, _: object) -> np.ndarray:
    result = np.exp(np.minimum(v, 0))
    result *= alpha
    result[v > 0] = 1
    return result


def _gelu_derivative(v: np.ndarray, *_: object) -> np.ndarray:
    density = v * v
    density *= v.dtype.type(-0.5)
    np.exp(density, out=density)
    density *= v
    density *= v.dtype.type(1 / math.sqrt(2 * math.pi))
    result = v * v.dtype.type(math.sqrt(0.5))
    result = _erf(result, result)
    result += 1
    result *= v.dtype.type(0.5)
    result += density
    return result


def _gelu_tanh_derivative(v: np.ndarray, *_: object) -> np.ndarray:
    v = np.clip(v, -10, 10)  # flat beyond; the cube would overflow
    scale, square = v.dtype.type(math.sqrt(8 / math.pi)), v * v
    square *= v.dtype.type(0.044715)
    inner = v * scale * (1 + square)
    square *= 3
    square += 1
    square *= v
    square *= scale
    # sigmoid(2 u) = (1 + tanh u) / 2 keeps its digits if tanh is near -1, and sigmoid(-2 u) if it is near 1.
    square *= _sigmoid(-inner)
    square += 1
    square *= _sigmoid(inner)
    return square


def _silu_derivative(v: np.ndarray, *_: object) -> np.ndarray:
    gate = _sigmoid(v)
    result = 1 - gate
    result *= v
    result += 1
    result *= gate
    return result


def _mish_derivative(v: np.ndarray, *_: object) -> np.ndarray:
    t = np.tanh(_softplus(v))
    result = 1 - t * t
    result *= v
    result *= _sigmoid(v)
    result += t
    return result


_DERIVATIVES: dict[str, Callable[[np.ndarray, np.floating, np.floating], np.ndarray]] = {
    "relu": lambda y, *_: y > 0,
    "relu6": lambda v, *_: _between(v, 0, 6),
    "leaky_relu": lambda v, alpha, _: np.where(v > 0, v.dtype.type(1), alpha),
    "clip": _between,
    "elu": _elu_derivative,
    "sigmoid": lambda y, *_: y * (1 - y),
    "hard_sigmoid": lambda v, alpha, beta: _between(v * alpha + beta, 0, 1) * alpha,
    "hardswish": _hardswish_derivative,
    "tanh": lambda y, *_: 1 - y * y,
    "gelu": _gelu_derivative,
    "gelu_tanh": _gelu_tanh_derivative,
    "silu": _silu_derivative,
    "mish": _mish_derivative,
    "softplus": lambda v, *_: _sigmoid(v),
    "affine": lambda v, alpha, _: np.full_like(v, alpha),
    "thresholded_relu": lambda v, alpha, _: v > alpha,
    "scaled_tanh": lambda v, alpha, beta: alpha * beta * (1 - np.tanh(beta * v) ** 2),
    "softsign": lambda v, *_: (1 + np.abs(v)) ** -2,
}
