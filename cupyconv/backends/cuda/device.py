"""The seam between the CUDA backend and a GPU: the few things a plan needs of a device.

Two implementations exist: `cupy_device.CupyDevice`, and a device in the tests that compiles the same
kernels for the host.  Everything above this line is executed by every test run, GPU or none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyconv.plan import Kernel


class GemmArguments(NamedTuple):
    """The arguments of ``cublasGemmStridedBatchedEx``, in its order and its terms: column-major.

    `alpha` and `beta` are addresses on the host, `a`, `b` and `c` on the device; types are cudaDataType_t
    and cublasComputeType_t; an operation is 0 (none) or 1 (transpose); strides count elements.
    """

    transa: int
    transb: int
    m: int
    n: int
    k: int
    alpha: int
    a: int
    a_type: int
    lda: int
    stride_a: int
    b: int
    b_type: int
    ldb: int
    stride_b: int
    beta: int
    c: int
    c_type: int
    ldc: int
    stride_c: int
    batch: int
    compute_type: int


class Device(Protocol):
    """One CUDA device, as the backend sees it.  All work is enqueued on the caller's current stream."""

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the current one for the length of a ``with`` block."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array of this device's array type."""

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        """`array` in another dtype, C-ordered."""

    def pointer(self, array: Any) -> int:
        """The address of the array's first element (index 0 along every axis)."""

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], block: int, params: np.ndarray, shared_bytes: int
    ) -> None:
        """Launch a kernel whose only parameter is `params`: one element, whose bytes are passed by value."""

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        """``cublasGemmStridedBatchedEx`` with the library's default algorithm."""
