"""cublasGemmStridedBatchedEx on host memory, with exact column-major pointer semantics.

::

    C[i] = alpha * op(A[i]) @ op(B[i]) + beta * C[i]      for i in range(batch)

    X[i] begins at  pointer + i * stride * itemsize;  element (row, column) is row + column * ld elements further

It refuses everything that cuBLAS refuses, and also what cuBLAS leaves undefined: overlapping results, and matrices that
are not entirely inside one allocation.  Sums are accumulated in the compute type and rounded once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyconv.cuda.run.device import GemmArguments

#: cudaDataType_t
DATA_TYPES = {0: "float32", 1: "float64", 2: "float16", 4: "complex64", 5: "complex128", 14: "bfloat16"}

COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77

#: (compute type, type of A and B, type of C) -> the type of alpha, beta and the sums
SUPPORTED = {
    (COMPUTE_32F, "float16", "float16"): "float32",
    (COMPUTE_32F, "float16", "float32"): "float32",
    (COMPUTE_32F, "bfloat16", "bfloat16"): "float32",
    (COMPUTE_32F, "bfloat16", "float32"): "float32",
    (COMPUTE_32F, "float32", "float32"): "float32",
    (COMPUTE_32F, "complex64", "complex64"): "complex64",
    (COMPUTE_32F_FAST_TF32, "float32", "float32"): "float32",
    (COMPUTE_32F_FAST_TF32, "complex64", "complex64"): "complex64",
    (COMPUTE_64F, "float64", "float64"): "float64",
    (COMPUTE_64F, "complex128", "complex128"): "complex128",
}

NONE, TRANSPOSE, CONJUGATE_TRANSPOSE = 0, 1, 2
INT32_MAX = 2**31 - 1
MAX_BATCH = 65535

#: (first byte, byte after the last) -> (the allocation as bytes, its first byte); raises IndexError if there is none
Memory = Callable[[int, int], tuple[np.ndarray, int]]


def gemm_strided_batched(memory: Memory, g: GemmArguments) -> None:
    """Run ``cublasGemmStridedBatchedEx`` on the allocations that `memory` finds."""
    operand_a, operand_b, result = checked(g)
    scale = scale_type(g)
    if 0 in (g.m, g.n, g.batch):
        return

    alpha_value, beta_value = _scalar(g.alpha, scale), _scalar(g.beta, scale)
    operands = [] if g.k == 0 else [operand_a.view(memory), operand_b.view(memory)]
    target = result.view(memory)
    with np.errstate(all="ignore"):
        if operands:
            left = _operand(operands[0], g.transa, scale, g.compute_type)
            right = _operand(operands[1], g.transb, scale, g.compute_type)
            total = np.matmul(left, right)
            if alpha_value != 1:
                total *= alpha_value
        else:  # A and B have no elements and are not read
            total = np.zeros(target.shape, scale)
        if beta_value != 0:  # otherwise C is not read, because it may hold NaN
            total = total + beta_value * target.astype(scale)
        target[...] = total


def checked(g: GemmArguments) -> tuple[_Matrices, _Matrices, _Matrices]:
    """Return A, B and C.  Raises ValueError for arguments that cuBLAS refuses, without access to memory."""
    _check_sizes(**{name: getattr(g, name) for name in ("m", "n", "k", "lda", "ldb", "ldc", "batch")})
    for name, operation in (("transa", g.transa), ("transb", g.transb)):
        if operation not in (NONE, TRANSPOSE, CONJUGATE_TRANSPOSE):
            raise ValueError(f"{name} is {operation}; 0, 1 and 2 are operations")
    scale_type(g)
    a_shape = (g.m, g.k) if g.transa == NONE else (g.k, g.m)
    b_shape = (g.k, g.n) if g.transb == NONE else (g.n, g.k)
    operand_a = _Matrices("A", g.a, DATA_TYPES[g.a_type], a_shape, g.lda, g.stride_a, g.batch)
    operand_b = _Matrices("B", g.b, DATA_TYPES[g.b_type], b_shape, g.ldb, g.stride_b, g.batch)
    result = _Matrices("C", g.c, DATA_TYPES[g.c_type], (g.m, g.n), g.ldc, g.stride_c, g.batch)
    for matrices in (operand_a, operand_b, result):
        matrices.check()
    result.check_disjoint()
    return operand_a, operand_b, result


def scale_type(g: GemmArguments) -> str:
    """Return the type of alpha, of beta and of the sums."""
    names = [DATA_TYPES.get(number, f"type {number}") for number in (g.a_type, g.b_type, g.c_type)]
    combination = (g.compute_type, names[0], names[2])
    if g.a_type != g.b_type or combination not in SUPPORTED:
        raise ValueError(
            f"A {names[0]}, B {names[1]}, C {names[2]} with compute type {g.compute_type} is not supported"
        )
    return SUPPORTED[combination]


@dataclass(frozen=True)
class _Matrices:
    """One operand: `batch` column-major matrices."""

    name: str
    pointer: int
    dtype: str
    shape: tuple[int, int]
    ld: int
    stride: int
    batch: int

    @property
    def itemsize(self) -> int:
        return _dtype(self.dtype).itemsize

    def check(self) -> None:
        rows = self.shape[0]
        if self.ld < max(1, rows):
            raise ValueError(f"the leading dimension of {self.name} is {self.ld}; {rows} rows need {max(1, rows)}")
        if self.stride < 0:
            raise ValueError(f"the batch stride of {self.name} is {self.stride}; it cannot be negative")
        if self.pointer % self.itemsize:
            raise ValueError(f"{self.name} at {self.pointer:#x} is not aligned to {self.dtype}")

    def check_disjoint(self) -> None:
        """Check that no two matrices of the batch share an element: they are consecutive or side by side."""
        rows, columns = self.shape
        one_after_another = self.stride >= (columns - 1) * self.ld + rows
        side_by_side = self.stride >= rows and (self.batch - 1) * self.stride + rows <= self.ld
        if self.batch > 1 and rows and columns and not (one_after_another or side_by_side):
            raise ValueError(
                f"the {self.batch} results overlap: {rows} x {columns} matrices with leading dimension {self.ld}"
                f" and batch stride {self.stride}"
            )

    def view(self, memory: Memory) -> np.ndarray:
        """Return the matrices as an array (batch, rows, columns).  With a batch stride of 0, batch is 1."""
        batch = self.batch if self.stride else 1
        rows, columns = self.shape
        elements = (batch - 1) * self.stride + (columns - 1) * self.ld + rows
        try:
            allocation, start = memory(self.pointer, self.pointer + elements * self.itemsize)
        except IndexError as error:
            raise IndexError(f"matrix {self.name}: {error}") from None
        strides = (self.stride * self.itemsize, self.itemsize, self.ld * self.itemsize)
        return np.ndarray((batch, rows, columns), _dtype(self.dtype), allocation, self.pointer - start, strides)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        limit = MAX_BATCH if name == "batch" else INT32_MAX
        if not 0 <= value <= limit:
            raise ValueError(f"{name} is {value}; it has to lie between 0 and {limit}")


def _scalar(address: int, dtype: str) -> np.generic:
    return np.frombuffer(ctypes.string_at(address, np.dtype(dtype).itemsize), dtype)[0]


def _operand(matrices: np.ndarray, operation: int, scale: str, compute_type: int) -> np.ndarray:
    """Return op(X) in the type of the sums."""
    values = matrices.astype(scale, copy=False)
    if compute_type == COMPUTE_32F_FAST_TF32:
        values = round_to_tf32(values)
    if operation == NONE:
        return values
    transposed = values.swapaxes(1, 2)
    return transposed.conj() if operation == CONJUGATE_TRANSPOSE else transposed


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """Round float32 or complex64 to 10 of the 23 mantissa bits, to nearest even."""
    copy = np.array(values, order="C")
    bits = copy.view(np.float32).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + (0xFFF + ((bits >> 13) & 1))) & np.uint32(0xFFFFE000)
    np.copyto(bits, rounded, where=finite)
    return copy


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
