"""Arguments as kernels and products take them: in one dtype, aligned; and what has to be copied for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cupyconv.problem.arrays import Operand, accumulator
from cupyconv.problem.plan import Conversion
from cupyconv.problem.problems import ConvProblem, Prologue


def convert(operand: Operand, dtype: str, conversions: list[Conversion], *, as_it_lies: bool = True) -> Operand:
    """The operand in `dtype`; in another one, or not `as_it_lies`, freshly allocated and noted in `conversions`."""
    if operand.dtype == dtype and as_it_lies:
        return operand
    fresh = operand.in_c_order(dtype)
    conversions.append(Conversion(operand.name, operand.dtype, dtype, fresh.nbytes))
    return fresh


def convert_bias(bias: Operand | None, dtype: str, conversions: list[Conversion]) -> Operand | None:
    """The bias, if there is one, in `dtype` and with its elements side by side: kernels step by no stride of it."""
    return bias and convert(bias, dtype, conversions, as_it_lies=bias.stride_c == 1 or bias.shape[1] <= 1)


def check_alignment(operands: Iterable[Operand | None]) -> None:
    """Refuse what no GPU can load: elements that lie across the boundaries of their own size."""
    for operand in operands:
        if operand is not None and operand.alignment < operand.itemsize:
            raise ValueError(
                f"{operand.name} is not aligned to its elements of {operand.itemsize} bytes: copy it first"
            )


def converted(problem: ConvProblem) -> tuple[ConvProblem, tuple[Conversion, ...]]:
    """Arguments in the dtypes computed with, and what must be converted for that."""
    conversions: list[Conversion] = []
    bias, residual = problem.bias, problem.residual
    problem = replace(
        problem,
        xs=tuple(convert(x, problem.x_dtype, conversions) for x in problem.xs),
        weight=convert(problem.weight, problem.weight_dtype, conversions),
        bias=convert_bias(bias, problem.out.dtype, conversions),
        residual=residual and convert(residual, problem.out.dtype, conversions),
        prologue=converted_prologue(problem.prologue, problem.x_dtype, conversions),
    )
    return problem, tuple(conversions)


def converted_prologue(prologue: Prologue, x_dtype: str, conversions: list[Conversion]) -> Prologue:
    """The prologue with its vectors in the dtype that elements of `x_dtype` are transformed in."""
    scale, shift = (
        vector and convert(vector, accumulator(x_dtype), conversions) for vector in (prologue.scale, prologue.shift)
    )
    return replace(prologue, scale=scale, shift=shift)
