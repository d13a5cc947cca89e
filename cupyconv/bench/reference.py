"""The check of a result: the same sums in float64, and how far each precision may deviate from them.

Data are standard normal, so a result of `terms` products has a root mean square of sqrt(terms), and errors are
relative to that.  With u the unit roundoff, the relative root mean square of the errors stays below

    u_result                     one rounding to the result's dtype (its mean square is u/3)
    + 4 u_sum sqrt(terms + 4)    the successive roundings of a sum accumulated in u_sum: about u sqrt(terms)/2.4
    + 2 u_TF32                   two factors rounded to 11 bits, if TF32 is allowed

and no single error exceeds sixteen times that bound.  For a transform (Winograd, FFT), which a peer may choose, the
second term is eight times as large.  In a chain, the root mean square is the product over the layers.  Results of a
recurrent layer are below 1, and errors are relative to 1.  A peer may round its states to the result's dtype at every
step, and its first term is four times as large.  Therefore a float32 result from TF32 products, a missing tap and a NaN
all fail.
"""

from __future__ import annotations

from itertools import product
from math import prod, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase, loop_in_python
from cupyconv.problem.arrays import accumulator, dtype_name, is_complex, real_part

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
TF32_ROUNDOFF = 2.0**-11
#: Largest single error as a multiple of the bound for the root mean square.
LARGEST = 16
#: Factor on the bound of the sums for a transform.
TRANSFORM = 8


class WrongResult(Exception):
    """A result that deviates from the float64 reference."""


def in_float64(xp: ModuleType, case: AnyCase, xs: list[Any], weights: list[Any]) -> Any:
    """Compute the result without the library's code: a convolution is summed tap by tap, without columns or tiles."""
    xs, weights = ([_widened(xp, array) for array in arrays] for arrays in (xs, weights))
    if isinstance(case, RecurrentCase):
        return loop_in_python(xp, case, xs, weights)
    if isinstance(case, GradientCase):
        return _gradient_tap_by_tap(xp, case, xs, weights)
    if isinstance(case, LargeKernelCase):
        return _by_transforms(xp, case, xs, weights[0])
    for layer, weight in zip(case.layers, weights):
        xs = [_tap_by_tap(xp, layer, xs, weight)]
    return xs[0]


def _tap_by_tap(xp: ModuleType, case: Case, xs: list[Any], weight: Any) -> Any:
    """Compute one layer."""
    group_outputs, dtype = case.out_channels // case.groups, weight.dtype
    padded = _padded(xp, case, xs, dtype)
    y = xp.zeros((case.batch, case.groups, group_outputs, prod(case.out_size)), dtype)
    for tap in product(*map(range, case.kernel)):
        part = padded[_reached(case, tap)]
        matrix = weight[(..., *tap)].reshape(case.groups, group_outputs, -1)
        y += xp.matmul(matrix, part.reshape(case.batch, case.groups, -1, prod(case.out_size)))
    return y.reshape(case.batch, case.out_channels, *case.out_size)


def _by_transforms(xp: ModuleType, case: LargeKernelCase, xs: list[Any], weight: Any) -> Any:
    """Compute by one transform of the whole image, because a sum per tap would take minutes.

    The transform is far more exact than the float32 results that it checks.
    """
    padded = _padded(xp, case, xs, weight.dtype)
    axes = tuple(range(-len(case.size), 0))
    lengths = [1 << (n - 1).bit_length() for n in padded.shape[2:]]
    image = xp.fft.rfftn(padded, lengths, axes).reshape(case.batch, case.groups, 1, case.in_channels // case.groups, -1)
    kernel = xp.fft.rfftn(weight, lengths, axes).reshape(case.groups, -1, *image.shape[3:]).conj()
    spectra = (image * kernel).sum(3).reshape(case.batch, case.out_channels, *lengths[:-1], lengths[-1] // 2 + 1)
    return xp.fft.irfftn(spectra, lengths, axes)[(..., *map(slice, case.out_size))]


def _gradient_tap_by_tap(xp: ModuleType, case: GradientCase, xs: list[Any], weights: list[Any]) -> Any:
    """Compute the gradient of one layer from each tap's products, in reverse."""
    arriving, dtype = xs[0].reshape(case.batch, case.groups, -1, prod(case.out_size)), xs[0].dtype
    padded = _padded(xp, case, xs[1:], dtype)
    to_weight = xp.zeros(case.weight_shape, dtype)
    for tap in product(*map(range, case.kernel)):
        reached = _reached(case, tap)
        if case.of == "input":
            matrix = weights[0][(..., *tap)].reshape(case.groups, arriving.shape[2], -1)
            padded[reached] += xp.matmul(matrix.swapaxes(1, 2), arriving).reshape(padded[reached].shape)
        else:
            part = padded[reached].reshape(case.batch, case.groups, -1, prod(case.out_size))
            sums = xp.matmul(arriving, part.swapaxes(2, 3)).sum(0)
            to_weight[(..., *tap)] = sums.reshape(case.weight_shape[:2])
    return padded[_inside(case)] if case.of == "input" else to_weight


def _padded(xp: ModuleType, case: Case, xs: list[Any], dtype: Any) -> Any:
    """Return the concatenated inputs with their padding, or zeros of that shape without inputs."""
    padded = xp.zeros((case.batch, case.in_channels, *(n + sum(p) for n, p in zip(case.size, case.pairs))), dtype)
    if xs:
        padded[_inside(case)] = xp.concatenate(xs, axis=1)
    return padded


def _inside(case: Case) -> Any:
    """Return the index of the image in the padded image."""
    return (..., *(slice(before, before + n) for n, (before, _) in zip(case.size, case.pairs)))


def _reached(case: Case, tap: tuple[int, ...]) -> Any:
    """Return the index of the padded image's pixels that a tap reads, one per pixel of the result."""
    steps = (
        slice(t * case.dilation, t * case.dilation + (n - 1) * case.stride + 1, case.stride)
        for t, n in zip(tap, case.out_size)
    )
    return (..., *steps)


def error(xp: ModuleType, case: AnyCase, result: Any, expected: Any, *, transform: bool = False) -> float:
    """Return the relative root mean square of the errors; raise WrongResult if it is too large."""
    return error_beside(xp, case.dtype, case.magnitude, result, expected, allowed_error(case, transform=transform))


def error_beside(xp: ModuleType, dtype: str, magnitude: float, result: Any, expected: Any, allowed: float) -> float:
    """Return the root mean square of any results' errors relative to `magnitude`, the results' root mean square."""
    if dtype_name(result.dtype) != dtype or tuple(result.shape) != tuple(expected.shape):
        raise WrongResult(f"{dtype_name(result.dtype)} {tuple(result.shape)}, needed {dtype} {tuple(expected.shape)}")
    difference = xp.abs(_widened(xp, result) - expected)
    rms = sqrt(float((difference * difference).mean())) / magnitude
    largest = float(difference.max()) / magnitude
    if not (rms <= allowed and largest <= LARGEST * allowed):  # a NaN is wrong too
        raise WrongResult(
            f"error {rms:.2g} (largest {largest:.2g}), allowed {allowed:.2g} (largest {LARGEST * allowed:.2g})"
        )
    return rms


def allowed_error(case: AnyCase, *, transform: bool = False) -> float:
    """Return the bound derived above, summed over all layers: each layer passes on a relative error unchanged."""
    if isinstance(case, Case) and case.then:
        return sum(allowed_error(layer, transform=transform) for layer in case.layers)
    states = transform and isinstance(case, RecurrentCase)
    return allowed_error_of_sums(case.dtype, case.terms, tf32=case.tf32, transform=transform, states=states)


def allowed_error_of_sums(
    dtype: str, terms: float, *, tf32: bool = False, transform: bool = False, states: bool = False
) -> float:
    """Return the bound for sums of `terms` products; `states` are rounded to the dtype at every step."""
    kept = UNIT_ROUNDOFF[real_part(accumulator(dtype))]
    sums = 4 * kept * sqrt(terms + 4) * (TRANSFORM if transform else 1)
    return (4 if states else 1) * UNIT_ROUNDOFF[real_part(dtype)] + sums + (2 * TF32_ROUNDOFF if tf32 else 0)


def _widened(xp: ModuleType, array: Any) -> Any:
    """Convert to float64 or complex128."""
    array = xp.asarray(array)
    name = dtype_name(array.dtype)
    if name == "bfloat16":  # the upper half of a float32, so no library must support the type
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.complex128 if is_complex(name) else np.float64)
