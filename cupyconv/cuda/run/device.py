"""The interface between the CUDA backend and a GPU: the few operations that a plan needs from a device.

Two implementations exist: `cupy_device.CupyDevice`, and a device in the tests that compiles the same kernels for the
host.  So every test run executes all code that calls this interface, with or without a GPU.
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
    """The arguments of ``cublasGemmStridedBatchedEx`` in its own order, for column-major matrices.

    `alpha` and `beta` are host addresses; `a`, `b` and `c` are device addresses.  Types are values of cudaDataType_t
    and cublasComputeType_t.  An operation is 0 (none), 1 (transpose) or 2 (conjugate transpose).  Strides count
    elements.
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
    """The arguments of ``cufftMakePlanMany`` in its own order, and the direction: -1 forward, 1 inverse.

    Image b + 1 begins `idist` elements after image b.  An image has the layout of a C-ordered array of shape `inembed`,
    with all strides multiplied by `istride`.  `onembed`, `ostride` and `odist` describe the results in the same way.
    `type` is a cufftType.
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

    #: The model that plans are made for; `too_many_blocks` lowers its `room`.
    model: GpuModel

    def current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device the current one."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an uninitialised C-ordered array of this device's array type."""

    def empty_in_graph(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an uninitialised array for the graph being captured, which allocates and frees it at every launch."""

    def from_host(self, array: np.ndarray) -> Any:
        """Return a copy on this device of an array in host memory."""

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        """Return a C-ordered copy of `array` in another dtype."""

    def pointer(self, array: Any) -> int:
        """Return the address of the first element (index 0 along every axis); it may be null for an empty array."""

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """Return a key of the device, dtypes and layouts of arrays: arrays with equal keys may share a plan."""

    def synchronize(self) -> None:
        """Wait for all work enqueued on the current stream."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is capturing a graph."""

    def argument(self, params: np.ndarray) -> Any:
        """Return `params`, one element of plain bytes, as a launch takes it: by reference, read when enqueued."""

    def load(self, launch: KernelLaunch) -> Callable[[Any], None]:
        """Return a function that enqueues this launch.

        The function takes what `argument` made of the kernel's only parameter, which the launch passes by value.  The
        blocks of a cooperative launch are all on the GPU at once.  If they do not fit, `load` raises the error of
        `too_many_blocks`; the function raises it if only the launch itself shows this.
        """

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        """Call ``cublasGemmStridedBatchedEx`` with the default algorithm."""

    def load_transform(self, arguments: TransformArguments, work_bytes: int) -> Callable[[int, int], None]:
        """Return a function that enqueues this transform.

        The function takes the addresses of the source, which may be overwritten, and the target.  `load_transform`
        raises the error of `no_transforms` without cuFFT, and the error of `more_to_work_in` if cuFFT's work area needs
        more than `work_bytes`.
        """

    def check_captured(self, transforms: Sequence[TransformArguments]) -> None:
        """Raise RuntimeError unless the current stream, which is capturing, has a plan for each of these transforms."""

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return `function` wrapped in a profiler range with this label, or unchanged unless ranges were asked for."""


def too_many_blocks(device: Device, launch: KernelLaunch, room: int) -> TooManyBlocks:
    """Return the error for a cooperative launch whose blocks do not fit, and update the model for later plans."""
    device.model = replace(device.model, room=room)
    return TooManyBlocks(
        f"{launch.kernel}: {launch.blocks} blocks must run at the same time, the GPU has room for {room}"
    )


def more_to_work_in(device: Device, nbytes: int, counted: int) -> UnlikeItsModel:
    """Return the error for a transform that needs more memory than counted, and update the model for later plans."""
    area = device.model.transform_area * nbytes / counted
    device.model = replace(device.model, transform_area=1.01 * area)  # slightly more, since `counted` is rounded up
    return UnlikeItsModel(f"a transform uses {nbytes:,} bytes of work area, {counted:,} were estimated")


def no_transforms(device: Device, why: str) -> UnlikeItsModel:
    """Return the error for a transform on a device without cuFFT, and update the model for later plans."""
    device.model = replace(device.model, has_transforms=False)
    return UnlikeItsModel(f"cuFFT is not available: {why}")
