"""The interface between the CUDA backend and a GPU: the few things that a plan needs of a device.

Two implementations exist: `cupy_device.CupyDevice`, and a device in the tests that compiles the same
kernels for the host.  So all that calls this interface is executed by every test run, GPU or none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import KernelLaunch
from cupyconv.problem.problems import TooManyBlocks, UnlikeItsModel


class GemmArguments(NamedTuple):
    """The arguments of ``cublasGemmStridedBatchedEx``, in its order and its terms: column-major.

    `alpha` and `beta` are addresses on the host, `a`, `b` and `c` on the device; types are cudaDataType_t
    and cublasComputeType_t; an operation is 0 (none), 1 (transpose) or 2 (conjugate transpose); strides count elements.
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


class TransformArguments(NamedTuple):
    """The arguments of ``cufftMakePlanMany``, in its order, and the direction: -1 forward, 1 inverse.

    Image b begins `idist` elements after the one before, and its elements lie as those of a C-ordered array of the shape
    `inembed` do, `istride` times as far apart; so do the results.  `type` is a cufftType.
    """

    size: tuple[int, ...]
    inembed: tuple[int, ...]
    istride: int
    idist: int
    onembed: tuple[int, ...]
    ostride: int
    odist: int
    type: int
    batch: int
    direction: int


class Device(Protocol):
    """One CUDA device, as the backend sees it.  All work is enqueued on the caller's current stream."""

    #: What plans are made for; `too_many_blocks` lowers what it says of room.
    model: GpuModel

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the current one for the length of a ``with`` block."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array of this device's array type."""

    def empty_in_graph(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised array for a graph that is being captured, which allocates and frees it at every launch."""

    def from_host(self, array: np.ndarray) -> Any:
        """A copy of an array in the host's memory."""

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        """`array` in another dtype, C-ordered."""

    def pointer(self, array: Any) -> int:
        """The address of the array's first element (index 0 along every axis); it may be null where there is none."""

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """What the device, dtypes and layouts of arrays are: where equal, a plan for the one is a plan for the other."""

    def synchronize(self) -> None:
        """Wait for all that was enqueued on the current stream."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of running what it gets."""

    def argument(self, params: np.ndarray) -> Any:
        """`params`, one element of plain bytes, as a launch takes it: by reference, read when it is enqueued."""

    def load(self, launch: KernelLaunch) -> Callable[[Any], None]:
        """A function that enqueues this launch; the kernel's one parameter is what `argument` made, passed by value.

        The blocks of a cooperative launch are all on the GPU at once.  Where there is no room for that, `load` raises
        what `too_many_blocks` gives; or the function does, where only the launch itself shows it.
        """

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        """``cublasGemmStridedBatchedEx`` with the library's default algorithm."""

    def load_transform(self, arguments: TransformArguments, work_bytes: int) -> Callable[[int, int], None]:
        """A function that enqueues this transform, given the addresses of its source, which may be overwritten, and target.

        Where there is no cuFFT, `load_transform` raises what `no_transforms` gives; where cuFFT needs more than
        `work_bytes` to work in, what `more_to_work_in` gives.
        """

    def check_captured(self, transforms: Sequence[TransformArguments]) -> None:
        """RuntimeError where the current stream, which is capturing, has not had one of these transforms before."""

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """`function`, shown by profilers as a range with this label; itself unless that was asked for."""


def too_many_blocks(device: Device, launch: KernelLaunch, room: int) -> TooManyBlocks:
    """The error for a cooperative launch on a device with room for fewer blocks; later plans and `explain` know it."""
    device.model = replace(device.model, room=room)
    return TooManyBlocks(f"{launch.kernel}: {launch.blocks} blocks have to run at once, there is room for {room}")


def more_to_work_in(device: Device, nbytes: int, counted: int) -> UnlikeItsModel:
    """The error for a transform that needs more memory than was counted; later plans and `explain` know it."""
    area = device.model.transform_area * nbytes / counted
    device.model = replace(device.model, transform_area=1.01 * area)  # a little more: `counted` is rounded up
    return UnlikeItsModel(f"a transform works in {nbytes:,} bytes, {counted:,} were counted")


def no_transforms(device: Device, why: str) -> UnlikeItsModel:
    """The error for a transform on a device without cuFFT; later plans and `explain` know it."""
    device.model = replace(device.model, has_transforms=False)
    return UnlikeItsModel(f"there is no cuFFT: {why}")
