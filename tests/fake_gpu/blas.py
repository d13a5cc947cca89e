"""cuBLAS: every product is a strided batch of products, enqueued on the stream of its handle."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyconv.cuda.run.device import GemmArguments
from tests.fake_gpu.calls import exported
from tests.fake_gpu.machine import MACHINE, CudaError
from tests.host_device import blas

CUBLAS: dict[str, Any] = {}

_VERSION = 130000
_INVALID_VALUE, _EXECUTION_FAILED, _INTERNAL_ERROR = 7, 13, 14
#: Letter of a type -> cudaDataType_t and cublasComputeType_t.
_TYPES = {"S": (0, 68), "D": (1, 70), "C": (4, 68), "Z": (5, 70)}


@dataclass
class Handle:
    """The state of a cuBLAS handle."""

    stream: int | None = None
    math_mode: int = 0
    pointer_mode: int = 0


def cublas(*types: Any) -> Any:
    return exported(CUBLAS, *types)


@cublas(POINTER(c_void_p))
def cublasCreate_v2(handle: Any) -> None:
    handle[0] = MACHINE.handle(Handle())


@cublas(c_void_p)
def cublasDestroy_v2(handle: int) -> None:
    MACHINE.wait_for_all()
    MACHINE.forget(handle, Handle)


@cublas(c_void_p, c_void_p)
def cublasSetStream_v2(handle: int, stream: int | None) -> None:
    MACHINE.find(handle, Handle).stream = stream


@cublas(c_void_p, POINTER(c_void_p))
def cublasGetStream_v2(handle: int, stream: Any) -> None:
    stream[0] = MACHINE.find(handle, Handle).stream


@cublas(c_void_p, c_int)
def cublasSetMathMode(handle: int, mode: int) -> None:
    MACHINE.find(handle, Handle).math_mode = mode


@cublas(c_void_p, POINTER(c_int))
def cublasGetMathMode(handle: int, mode: Any) -> None:
    mode[0] = MACHINE.find(handle, Handle).math_mode


@cublas(c_void_p, c_int)
def cublasSetPointerMode_v2(handle: int, mode: int) -> None:
    MACHINE.find(handle, Handle).pointer_mode = mode


@cublas(c_void_p, POINTER(c_int))
def cublasGetPointerMode_v2(handle: int, mode: Any) -> None:
    mode[0] = MACHINE.find(handle, Handle).pointer_mode


@cublas(c_void_p, POINTER(c_int))
def cublasGetVersion_v2(handle: int, version: Any) -> None:
    version[0] = _VERSION


_MATRIX, _TYPED, _STRIDED = (c_void_p, c_int), (c_void_p, c_int, c_int), (c_void_p, c_int, c_int, c_longlong)
_SIZES = (c_void_p, *(c_int,) * 5, c_void_p)  # handle, operations, m, n, k, alpha


@cublas(*_SIZES, *_STRIDED, *_STRIDED, c_void_p, *_STRIDED, c_int, c_int, c_int)
def cublasGemmStridedBatchedEx(handle: int, *arguments: Any) -> None:
    *given, _algorithm = arguments
    _enqueue(handle, GemmArguments(*given))


@cublas(*_SIZES, *_TYPED, *_TYPED, c_void_p, *_TYPED, c_int, c_int)
def cublasGemmEx(handle: int, *arguments: Any) -> None:
    *sizes, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _algorithm = arguments
    given = (*sizes, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute)
    _enqueue(handle, GemmArguments(*given))


def _typed(letter: str) -> None:
    """Define cublasSgemm and the like for one type."""
    kind, compute = _TYPES[letter]
    strided = (c_void_p, c_int, c_longlong)

    @exported(CUBLAS, *_SIZES, *_MATRIX, *_MATRIX, c_void_p, *_MATRIX, names=(f"cublas{letter}gemm_v2",))
    def gemm(handle: int, *arguments: Any) -> None:
        *sizes, a, lda, b, ldb, beta, c, ldc = arguments
        given = (*sizes, a, kind, lda, 0, b, kind, ldb, 0, beta, c, kind, ldc, 0, 1, compute)
        _enqueue(handle, GemmArguments(*given))

    @exported(CUBLAS, *_SIZES, *_MATRIX, *_MATRIX, c_void_p, *_MATRIX, c_int, names=(f"cublas{letter}gemmBatched",))
    def gemm_batched(handle: int, *arguments: Any) -> None:
        """Enqueue products of matrices whose addresses are on the device."""
        *sizes, a, lda, b, ldb, beta, c, ldc, batch = arguments
        stream = MACHINE.stream(MACHINE.find(handle, Handle).stream)
        MACHINE.wait(stream)
        tables = [(ctypes.c_uint64 * batch).from_address(table) for table in (a, b, c)]
        for x, y, z in zip(*tables):
            given = (*sizes, x, kind, lda, 0, y, kind, ldb, 0, beta, z, kind, ldc, 0, 1, compute)
            _enqueue(handle, GemmArguments(*given))

    @exported(
        CUBLAS, *_SIZES, *strided, *strided, c_void_p, *strided, c_int, names=(f"cublas{letter}gemmStridedBatched",)
    )
    def gemm_strided_batched(handle: int, *arguments: Any) -> None:
        *sizes, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, batch = arguments
        given = (*sizes, a, kind, lda, stride_a, b, kind, ldb, stride_b, beta, c, kind, ldc, stride_c, batch, compute)
        _enqueue(handle, GemmArguments(*given))


for _letter in _TYPES:
    _typed(_letter)


def _enqueue(handle: int, product: GemmArguments) -> None:
    stream = MACHINE.stream(MACHINE.find(handle, Handle).stream)
    if stream.capture is not None:
        raise CudaError(_INTERNAL_ERROR, "no workspace that a graph could keep")
    try:
        blas.checked(product)
    except ValueError as error:
        raise CudaError(_INVALID_VALUE, str(error)) from error
    if MACHINE.work_enqueued.next_one():
        raise CudaError(_EXECUTION_FAILED, "as a test asked for")
    # alpha and beta are read now, because they are in host memory.
    nbytes = np.dtype(blas.scale_type(product)).itemsize
    scalars = [ctypes.create_string_buffer(ctypes.string_at(at, nbytes), 16) for at in (product.alpha, product.beta)]
    alpha, beta = map(ctypes.addressof, scalars)
    product = product._replace(alpha=alpha, beta=beta)

    def work(keep: object = scalars) -> None:
        blas.gemm_strided_batched(MACHINE.allocation, product)

    MACHINE.enqueue(stream, work)
