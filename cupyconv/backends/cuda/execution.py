"""Run a plan on a device: workspace, launches and GEMM calls, enqueued in order, nothing waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyconv.backends.cuda.device import Device, GemmArguments
from cupyconv.backends.cuda.parameters import PackedParameters
from cupyconv.dtypes import dtype_from_name, is_complex
from cupyconv.plan import Address, BlockLoop, GemmCall, KernelLaunch, Matrix, Plan

#: cudaDataType_t
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
#: cublasComputeType_t, and the host type of alpha and beta
_COMPUTE_TYPE = {"float32": 68, "tf32": 77, "float64": 70}

_NO_TRANSPOSE, _TRANSPOSE = 0, 1


class PreparedPlan:
    """A plan with its parameter structs packed: what a repeated call need not do again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps: list[_PreparedLaunch | _PreparedGemm] = []
        for step in plan.steps:
            assert not isinstance(step, BlockLoop)
            self._steps.append(_PreparedLaunch(step) if isinstance(step, KernelLaunch) else _PreparedGemm(step))

    def run(self, device: Device, arrays: Mapping[str, Any]) -> None:
        """Enqueue every step; `arrays` holds the plan's arguments and result by name."""
        converted = {
            c.buffer: device.convert(arrays[c.buffer], dtype_from_name(c.target)) for c in self.plan.conversions
        }
        named = {**arrays, **converted}
        workspace = {buffer.name: device.empty((buffer.nbytes,), np.dtype(np.uint8)) for buffer in self.plan.workspace}
        bases = {name: device.pointer(array) for name, array in (named | workspace).items()}

        def address_of(address: Address) -> int:
            return bases[address.buffer] + address.offset

        for step in self._steps:
            step.run(device, address_of)


class _PreparedLaunch:
    """A kernel launch with its parameter struct packed but for the addresses."""

    def __init__(self, launch: KernelLaunch) -> None:
        self.launch = launch
        self.parameters = PackedParameters(launch)

    def run(self, device: Device, address_of: Callable[[Address], int]) -> None:
        launch = self.launch
        device.launch(launch.kernel, launch.grid, launch.block, self.parameters.bind(address_of), launch.shared_bytes)


class _PreparedGemm:
    """A GEMM call with alpha and beta on the host, where cuBLAS reads them while it enqueues.

    A row-major call as cuBLAS, which is column-major, has it: operands swapped.

    ::

        row-major  C[m, n] = A[m, k] B[k, n]      is, read by columns,      C'[n, m] = B'[n, k] A'[k, m]
    """

    def __init__(self, call: GemmCall) -> None:
        real = np.float64 if call.compute == "float64" else np.float32
        kind = np.result_type(real, np.complex64) if is_complex(call.dtype) else np.dtype(real)
        self.call = call
        self._scalars = np.array([1, call.beta], kind)
        self.alpha = self._scalars.ctypes.data
        self.beta = self.alpha + self._scalars.itemsize

    def run(self, device: Device, address_of: Callable[[Address], int]) -> None:
        call, kind = self.call, _DATA_TYPE[self.call.dtype]
        arguments = GemmArguments(
            _operation(call.b), _operation(call.a), call.n, call.m, call.k,
            self.alpha, address_of(call.b.at), kind, call.b.ld, call.b.stride,
            address_of(call.a.at), kind, call.a.ld, call.a.stride,
            self.beta, address_of(call.c.at), _DATA_TYPE[call.c_dtype], call.c.ld, call.c.stride,
            call.batch, _COMPUTE_TYPE[call.compute],
        )  # fmt: skip
        device.gemm_strided_batched(arguments)


def _operation(matrix: Matrix) -> int:
    return _TRANSPOSE if matrix.transposed else _NO_TRANSPOSE
