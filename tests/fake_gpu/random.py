"""cuRAND: numbers from NumPy's generators, enqueued on the stream of a generator."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fake_gpu.calls import exported
from tests.fake_gpu.machine import MACHINE

CURAND: dict[str, Any] = {}

_VERSION = 100000


@dataclass
class Generator:
    """The state of a cuRAND generator."""

    stream: int | None = None
    numbers: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))


def curand(*types: Any) -> Any:
    return exported(CURAND, *types)


@curand(POINTER(c_void_p), c_int)
def curandCreateGenerator(generator: Any, kind: int) -> None:
    generator[0] = MACHINE.handle(Generator())


@curand(c_void_p)
def curandDestroyGenerator(generator: int) -> None:
    MACHINE.forget(generator, Generator)


@curand(POINTER(c_int))
def curandGetVersion(version: Any) -> None:
    version[0] = _VERSION


@curand(c_void_p, c_void_p)
def curandSetStream(generator: int, stream: int | None) -> None:
    MACHINE.find(generator, Generator).stream = stream


@curand(c_void_p, c_ulonglong)
def curandSetPseudoRandomGeneratorSeed(generator: int, seed: int) -> None:
    MACHINE.find(generator, Generator).numbers = np.random.default_rng(seed)


@exported(CURAND, c_void_p, c_ulonglong, names=("curandSetGeneratorOffset", "curandSetGeneratorOrdering"))
def ignored(generator: int, value: int) -> None:
    """Ignore the position in the sequence, because any position will do here."""


@curand(c_void_p, POINTER(c_uint), c_size_t)
def curandGenerate(generator: int, out: Any, count: int) -> None:
    _fill(generator, out, count, lambda numbers: numbers.integers(1 << 32, size=count))


@curand(c_void_p, POINTER(c_float), c_size_t)
def curandGenerateUniform(generator: int, out: Any, count: int) -> None:
    _fill(generator, out, count, lambda numbers: 1 - numbers.random(count, np.float32))


@curand(c_void_p, POINTER(c_double), c_size_t)
def curandGenerateUniformDouble(generator: int, out: Any, count: int) -> None:
    _fill(generator, out, count, lambda numbers: 1 - numbers.random(count))


@curand(c_void_p, POINTER(c_float), c_size_t, c_float, c_float)
def curandGenerateNormal(generator: int, out: Any, count: int, mean: float, deviation: float) -> None:
    _fill(generator, out, count, lambda numbers: numbers.normal(mean, deviation, count))


@curand(c_void_p, POINTER(c_double), c_size_t, c_double, c_double)
def curandGenerateNormalDouble(generator: int, out: Any, count: int, mean: float, deviation: float) -> None:
    _fill(generator, out, count, lambda numbers: numbers.normal(mean, deviation, count))


def _fill(generator: int, out: Any, count: int, drawn: Any) -> None:
    known = MACHINE.find(generator, Generator)
    memory = np.ctypeslib.as_array(out, (count,))

    def work() -> None:
        memory[:] = drawn(known.numbers)

    MACHINE.enqueue(MACHINE.stream(known.stream), work)
