"""Convert arguments to the form that kernels and GEMMs need: one dtype, aligned elements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from cupyconv.problem.arrays import Operand, accumulator
from cupyconv.problem.plan import Conversion
from cupyconv.problem.problems import Problem, Prologue

ProblemT = TypeVar("ProblemT", bound=Problem)


def convert(operand: Operand, dtype: str, conversions: list[Conversion], *, as_it_lies: bool = True) -> Operand:
    """Return the operand in `dtype`; a different dtype, or `as_it_lies` False, adds a copy to `conversions`."""
    if operand.dtype == dtype and as_it_lies:
        return operand
    fresh = operand.in_c_order(dtype)
    conversions.append(Conversion(operand.name, operand.dtype, dtype, fresh.nbytes))
    return fresh


def check_alignment(operands: Iterable[Operand | None]) -> None:
    """Raise ValueError for arrays that no GPU can load: elements that are not aligned to their own size."""
    for operand in operands:
        if operand is not None and operand.nbytes and operand.alignment < operand.itemsize:
            raise ValueError(f"{operand.name} is not aligned to its {operand.itemsize}-byte elements: copy it first")


def converted(problem: ProblemT, **dtypes: str) -> tuple[ProblemT, tuple[Conversion, ...]]:
    """Return the problem with fields in these dtypes, and the copies, whose memory is taken from its workspace limit.

    A bias is also made contiguous, because kernels read it without a stride.
    """
    conversions: list[Conversion] = []

    def in_dtype(name: str, value: Any, dtype: str) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(each, dtype, conversions) for each in value)
        if isinstance(value, Prologue):
            scale, shift = (in_dtype("vector", vector, accumulator(dtype)) for vector in (value.scale, value.shift))
            return replace(value, scale=scale, shift=shift)
        in_place = name != "bias" or value is None or value.stride_c == 1 or value.shape[1] <= 1
        return value and convert(value, dtype, conversions, as_it_lies=in_place)

    changed = {name: in_dtype(name, getattr(problem, name), dtype) for name, dtype in dtypes.items()}
    return replace(problem, **changed).sharing_with(conversions), tuple(conversions)
