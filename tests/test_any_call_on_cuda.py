"""Any call of any operation on CUDA agrees with the reference and NumPy, and is refused if NumPy refuses it.

The calls are those of `test_any_call.py`, with their arrays on the host device in the same layouts.  The host device
detects writes outside an array, and reads of values that nothing wrote.  A sanitizer detects reads outside an array.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from strategies import share_of_examples
from targets import Target, gpu_target
from test_any_call import (
    ARRAYS,
    DIFFERENTIABLE,
    all_arrays,
    any_call,
    any_grads,
    assert_as_expected,
    assert_gradients,
    assert_written,
    expected_gradients,
    expected_of,
    held,
    refused,
    run,
)

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.operation import _OPERATIONS

Arguments = dict[str, Any]

OPERATIONS = sorted(function.__name__ for function in _OPERATIONS)
#: Parameters that accept arrays; another value that looks like an array stays on the host.
GIVEN_BY = ARRAYS | {"layers", "prologue"}

#: Refusals of one backend: no GPU has read-only arrays or another byte order; a method or a fusion may apply on one only.
OF_ONE_BACKEND = re.compile(r"read-only|dtype >|does not apply")


def on_device(target: Target, arguments: Arguments) -> Arguments:
    """Return the same arguments with their arrays on the device."""
    return {name: moved(target, value) if name in GIVEN_BY else value for name, value in arguments.items()}


def moved(target: Target, value: Any) -> Any:
    if type(value) is np.ndarray and value.dtype.kind in "biufc":  # a GPU has no arrays of objects or bytes
        return laid_out_alike(target, value.astype(value.dtype.newbyteorder("="), copy=False))
    if isinstance(value, ConvLayer):
        layer = replace(value, **on_device(target, vars(value)))
        return layer.packed() if value.is_packed else layer
    return type(value)(moved(target, item) for item in value) if type(value) in (list, tuple) else value


def laid_out_alike(target: Target, array: np.ndarray) -> Any:
    """Return a copy of an array in the same layout, in exactly as much memory as it spans."""
    if not array.size:
        return target.to_device(array)
    as_it_was = (..., *(slice(None, None, -1 if step < 0 else 1) for step in array.strides))
    forward = array[as_it_was]
    span = 1 + sum((extent - 1) * step for extent, step in zip(forward.shape, forward.strides)) // array.itemsize
    memory = target.to_device(as_strided(forward, (span,), (array.itemsize,)))
    subclasses = {"subok": True} if target.xp is np else {}  # the host device's arrays subclass NumPy's
    return target.xp.lib.stride_tricks.as_strided(memory, forward.shape, forward.strides, **subclasses)[as_it_was]


def on_host(target: Target, result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [on_host(target, one) for one in result]
    return None if result is None else target.to_host(result)


def test_arrays_are_laid_out_alike(cuda_target):
    for array in (
        np.arange(6.0),
        np.arange(24.0).reshape(2, 3, 4)[::-1, :, 1::2],
        np.broadcast_to(3.0, (2, 3)),
        np.array(2),
    ):
        copy = laid_out_alike(cuda_target, array)
        assert (copy.strides, copy.dtype) == (array.strides, array.dtype)
        cuda_target.device.pointer(copy)
        np.testing.assert_array_equal(cuda_target.to_host(copy), array)


@pytest.mark.parametrize("name", OPERATIONS)
@share_of_examples(0.1)
@given(st.randoms(use_true_random=False))
def test_any_call(name, cuda_target, random):
    arguments = any_call(random, name)
    there, on_numpy, results = on_device(cuda_target, arguments), [], []
    before, inputs = held(there), {key: value for key, value in there.items() if key != "out"}
    inputs_before = held(inputs)
    device, function, plans = cuda_target.device, getattr(cupyconv, name), []
    in_use = device.peak_bytes = device.allocated_bytes
    refusal = refused(name, lambda: results.append(function(**there)))
    peak = device.peak_bytes - in_use
    assert held(inputs) == inputs_before, "an argument has changed"
    explained = refused(name, lambda: plans.append(cupyconv.explain(function, **there)))
    assert (explained is None) == (refusal is None), (explained, refusal)
    refusal_of_numpy = refused(name, lambda: on_numpy.append(run(name, arguments)))
    if not OF_ONE_BACKEND.search(f"{refusal_of_numpy} {refusal}"):
        assert (refusal_of_numpy is None) == (refusal is None), (refusal_of_numpy, refusal)
    if refusal is not None:
        assert held(there) == before, "a refused call has written something"
        return
    given = all_arrays(there.get("out"))
    new = sum(array.nbytes for array in all_arrays(results[0]) if all(array is not one for one in given))
    lengths = 8 * len(arguments["lengths"]) if arguments.get("lengths") is not None else 0  # a copy on the device
    assert peak <= new + lengths + plans[0].workspace_bytes, "more memory than was explained"
    actual, expected = on_host(cuda_target, results[0]), expected_of(name, arguments)
    for wanted in (expected, *on_numpy):
        assert_as_expected(actual, wanted)
    assert_written(on_host(cuda_target, given), expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@share_of_examples(0.1)
@given(st.randoms(use_true_random=False))
def test_any_gradient(name, cuda_target, random):
    gradients_are_numpys(cuda_target, name, random)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@share_of_examples(0.1)
@given(st.randoms(use_true_random=False))
def test_any_gradient_of_cupys(name, random):
    gradients_are_numpys(gpu_target(), name, random)


def gradients_are_numpys(target: Target, name: str, random: Random) -> None:
    """Check that values and gradients are NumPy's and the reference's, or all are refused; no argument may change."""
    arguments = {key: value for key, value in any_call(random, name).items() if key not in ("method", "out")}
    there, function, on_numpy, results = on_device(target, arguments), getattr(cupyconv, name), [], []
    before = held(there)
    refusal = refused(name, lambda: results.append(cupyconv.vjp(function, **there)))
    refusal_of_numpy = refused(name, lambda: on_numpy.append(cupyconv.vjp(function, **arguments)))
    assert (refusal_of_numpy is None) == (refusal is None), (refusal_of_numpy, refusal)
    if refusal is None:
        (value, pullback), (value_of_numpy, pullback_of_numpy) = results[0], on_numpy[0]
        assert_as_expected(on_host(target, value), value_of_numpy)
        grads = any_grads(random, name, arguments, value_of_numpy)
        gradients = pullback(*moved(target, grads))
        gradients = gradients._replace(**{field: on_host(target, one) for field, one in gradients._asdict().items()})
        for wanted in (pullback_of_numpy(*grads)._asdict(), expected_gradients(name, arguments, grads)):
            assert_gradients(gradients, wanted)
    assert held(there) == before, "an argument has changed"


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
@share_of_examples(0.1)
@given(st.randoms(use_true_random=False))
def test_any_call_of_cupys(name, random):
    """The same calls with CuPy's arrays agree with NumPy, also on emulated GPUs."""
    target, function = gpu_target(), getattr(cupyconv, name)
    arguments = any_call(random, name)
    there, on_numpy, results = on_device(target, arguments), [], []
    refusal = refused(name, lambda: results.append(function(**there)))
    refusal_of_numpy = refused(name, lambda: on_numpy.append(run(name, arguments)))
    if not OF_ONE_BACKEND.search(f"{refusal_of_numpy} {refusal}"):
        assert (refusal_of_numpy is None) == (refusal is None), (refusal_of_numpy, refusal)
    if refusal is None:
        actual = on_host(target, results[0])
        for wanted in on_numpy:
            assert_as_expected(actual, wanted)
