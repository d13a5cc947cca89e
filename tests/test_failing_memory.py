"""Each allocation of a call fails in turn: the call gives the right result, or MemoryError without other effects.

::

    NumPy          failing_memory.py, a handler of NumPy's memory
    host device    `HostDevice.failing_allocations`
    CuPy           `Machine.failing_allocations` of the emulated GPUs, without CuPy's pool
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failing_memory import failing_memory
from targets import Target, gpu_target, host_device_target, numpy_target

import cupyconv
from cupyconv import ConvLayer
from cupyconv.numpy.backend import NumpyBackend
from tests import fake_gpu

SHAPES = {
    "x": (3, 4, 20, 21), "weight": (6, 4, 3, 3), "bias": (6,), "second": (2, 6, 3, 3), "grad": (3, 6, 18, 19),
    "pooled": (3, 4, 6, 7), "depthwise": (4, 1, 3, 3), "turned": (4, 6, 3, 3),
    "sequence": (7, 3, 5), "w_ih": (16, 5), "w_hh": (16, 4), "grad_y": (7, 3, 4),
}  # fmt: skip


def arrays_on(target: Target) -> SimpleNamespace:
    """Return arrays of small integers, whose sums are all exact."""
    rng = np.random.default_rng(0)
    on_host = {name: rng.integers(-2, 3, shape).astype(np.float32) for name, shape in SHAPES.items()}
    on_host |= {f"{name}_{bits}": on_host[name].astype(f"float{bits}") for name in ("x", "weight") for bits in (16, 64)}
    return SimpleNamespace(**{name: target.to_device(array) for name, array in on_host.items()})


def chain(a: Any) -> list[ConvLayer]:
    return [ConvLayer(a.weight, a.bias, padding=1, activation="relu"), ConvLayer(a.second, padding=1)]


CALLS: dict[str, Callable[[Any], Any]] = {
    "conv": lambda a: cupyconv.conv(a.x, a.weight, a.bias, padding=1, activation="relu"),
    "columns": lambda a: cupyconv.conv(a.x, a.weight, a.bias, padding=1, activation="relu", method="gemm"),
    "reflected": lambda a: cupyconv.conv(a.x, a.weight, padding=2, padding_mode="reflect", stride=2),
    "16 bits": lambda a: cupyconv.conv(a.x_16, a.weight_16),
    "two dtypes": lambda a: cupyconv.conv(a.x_64, a.weight, a.bias, method="gemm"),
    "narrower weight": lambda a: cupyconv.conv(a.x, a.weight_16),
    "implicit_gemm": lambda a: cupyconv.conv(a.x, a.weight_16, method="implicit_gemm"),
    "depthwise": lambda a: cupyconv.conv(a.x, a.depthwise, groups=4),
    "winograd": lambda a: cupyconv.conv(a.x, a.weight, method="winograd"),
    "fft": lambda a: cupyconv.conv(a.x, a.weight, method="fft"),
    "transposed": lambda a: cupyconv.conv_transpose(a.x, a.turned, stride=2, activation="relu"),
    "input gradient": lambda a: cupyconv.conv_grad_input(a.grad, a.weight, a.x.shape),
    "weight gradient": lambda a: cupyconv.conv_grad_weight(a.grad, a.x, (3, 3)),
    "chain": lambda a: cupyconv.conv_chain(a.x, chain(a)),
    "one by one": lambda a: cupyconv.conv_chain(a.x, chain(a), fuse=False),
    "pool": lambda a: cupyconv.max_pool(a.x, 3, stride=2),
    "pool gradient": lambda a: cupyconv.vjp(cupyconv.max_pool, a.x, 3, stride=3)[1](a.pooled).x,
    "im2col": lambda a: cupyconv.im2col([a.x, a.x], (3, 3), padding=1),
    "lstm": lambda a: cupyconv.lstm(a.sequence, a.w_ih, a.w_hh, lengths=[7, 3, 0])[0],
    "lstm gradients": lambda a: cupyconv.vjp(cupyconv.lstm, a.sequence, a.w_ih, a.w_hh)[1](a.grad_y).weight_ih,
    "gradients": lambda a: cupyconv.vjp(cupyconv.conv, a.x, a.weight, activation="relu")[1](a.grad).weight,
}
#: Methods that only one of the backends has.
ON_NUMPY_ONLY, ON_CUDA_ONLY = {"winograd"}, {"implicit_gemm"}


@dataclass(frozen=True)
class FailingDevice:
    """A target whose allocations a test lets fail."""

    target: Target
    #: Returns a context in which `times` allocations fail from that number on; it yields a function that counts them.
    failing: Callable[..., AbstractContextManager[Callable[[], int]]]
    #: Bytes of the device's memory that are in use.
    in_use: Callable[[], int]


@contextmanager
def numpy_device() -> Iterator[FailingDevice]:
    with cupyconv.options(threads=1):  # allocations of other threads would not fail
        yield FailingDevice(numpy_target(), failing_memory, lambda: 0)


@contextmanager
def host_device() -> Iterator[FailingDevice]:
    target = host_device_target()
    yield FailingDevice(target, target.device.failing_allocations, lambda: target.device.allocated_bytes)


@contextmanager
def emulated_gpu() -> Iterator[FailingDevice]:
    """CuPy without its pool: each array is an allocation of the GPU itself."""
    if not fake_gpu.is_installed():
        pytest.skip(fake_gpu.unavailable() or "GPUs are emulated only under --fake-gpu")
    from tests.fake_gpu.machine import MACHINE

    target = gpu_target()
    pool = target.xp.get_default_memory_pool()
    pool.free_all_blocks()
    target.xp.cuda.set_allocator(None)
    try:
        yield FailingDevice(target, MACHINE.failing_allocations, lambda: -MACHINE.free_bytes)
    finally:
        target.xp.cuda.set_allocator(pool.malloc)


CASES = [
    *(pytest.param(numpy_device, name, id=f"numpy-{name}") for name in CALLS if name not in ON_CUDA_ONLY),
    *(
        pytest.param(device, name, id=f"{device.__name__}-{name}", marks=mark)
        for device, mark in ((host_device, pytest.mark.host_device), (emulated_gpu, pytest.mark.fake_gpu))
        for name in CALLS
        if name not in ON_NUMPY_ONLY
    ),
]


@pytest.mark.parametrize("times", [1, 1 << 30], ids=["one", "and all after it"])
@pytest.mark.parametrize("device, name", CASES)
def test_every_allocation_fails(device, name, times):
    with device() as failing_device:
        target, failing = failing_device.target, failing_device.failing
        arrays, call = arrays_on(target), CALLS[name]
        held = {key: target.to_host(array).copy() for key, array in vars(arrays).items()}
        expected = target.to_host(call(arrays))
        cupyconv.clear_caches()
        with failing(-1) as allocations:
            np.testing.assert_array_equal(target.to_host(call(arrays)), expected)
        count, in_use = allocations(), failing_device.in_use()
        assert count > 0, "nothing was asked for"
        for number in range(count):
            cupyconv.clear_caches()
            actual = None
            with suppress(MemoryError), failing(number, times):
                actual = call(arrays)
            if actual is not None:  # a plan with less memory may have other blocks; integer sums are exact in any order
                np.testing.assert_allclose(target.to_host(actual), expected, rtol=1e-5, atol=1e-5)
            for key, as_it_was in held.items():
                np.testing.assert_array_equal(target.to_host(getattr(arrays, key)), as_it_was)
            del actual
            assert failing_device.in_use() == in_use
        np.testing.assert_array_equal(target.to_host(call(arrays)), expected)


def test_what_fails_is_counted():
    """Of three allocations, first only the second fails, then the second and the third."""
    for times, alive in ((1, [True, False, True]), (2, [True, False, False])):
        with failing_memory(1, times) as count:
            found = []
            for _ in alive:
                try:
                    np.empty(100_000)
                    found.append(True)
                except MemoryError:
                    found.append(False)
        assert (found, count()) == (alive, 3)


def test_what_an_attempt_had_is_let_go_of_before_the_next(monkeypatch):
    """An attempt's memory is free before the next attempt, and after the error of the last attempt has been handled."""
    prepare, had, seen = NumpyBackend.prepare, [], []

    def prepared(backend, plan):
        execute = prepare(backend, plan)

        def attempt(arrays):
            seen.extend(array() for array in had)
            array = np.empty(10)
            had.append(weakref.ref(array))
            if len(had) <= failures:
                try:
                    raise OSError("of the device")
                except OSError as error:
                    raise MemoryError("no memory") from error
            execute(arrays)

        return attempt

    monkeypatch.setattr(NumpyBackend, "prepare", prepared)
    x, weight = np.ones((1, 8, 40, 40), np.float32), np.ones((8, 8, 3, 3), np.float32)
    for failures in (1, 100):
        cupyconv.clear_caches()
        had.clear()
        gc.collect()
        gc.disable()
        try:
            cupyconv.conv(x, weight, method="gemm")
        except MemoryError:
            assert failures == 100
        finally:
            gc.enable()
        assert len(had) > 1 and all(array() is None for array in had)
    assert seen and all(array is None for array in seen)
    cupyconv.clear_caches()
