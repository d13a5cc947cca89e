"""Run a plan on a device: workspace, launches and GEMM calls, enqueued in order, nothing waited for."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from cupyconv.backends.cuda.device import Device
from cupyconv.backends.cuda.parameters import PackedParameters
from cupyconv.dtypes import dtype_from_name
from cupyconv.plan import Address, GemmCall, KernelLaunch, Matrix, Plan

#: cudaDataType_t
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
#: cublasComputeType_t, and the host type of alpha and beta
_COMPUTE_TYPE = {"float32": 68, "tf32": 77, "float64": 70}

_NO_TRANSPOSE, _TRANSPOSE = 0, 1


class PreparedPlan:
    """A plan with its parameter structs packed: what a repeated call need not do again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps = [
            (step, PackedParameters(step) if isinstance(step, KernelLaunch) else _Scalars(step)) for step in plan.steps
        ]

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

        for step, prepared in self._steps:
            if isinstance(step, KernelLaunch):
                params = prepared.bind(address_of)
                device.launch(step.kernel, step.grid, step.block, params, step.shared_bytes)
            else:
                _gemm(device, step, prepared, address_of)


class _Scalars:
    """alpha and beta of a GEMM call, on the host, alive as long as the plan."""

    def __init__(self, step: GemmCall) -> None:
        real = np.float64 if step.compute == "float64" else np.float32
        kind = np.result_type(real, np.complex64) if step.dtype.startswith("complex") else real
        self.values = np.array([1, step.beta], kind)

    @property
    def alpha(self) -> int:
        return self.values.ctypes.data

    @property
    def beta(self) -> int:
        return self.values.ctypes.data + self.values.itemsize


def _gemm(device: Device, call: GemmCall, scalars: _Scalars, address_of: Any) -> None:
    """A row-major call as cuBLAS, which is column-major, has it: C' = B' A', operands swapped.

    ::

        row-major  C[m, n] = A[m, k] B[k, n]      is, read by columns,      C'[n, m] = B'[n, k] A'[k, m]
    """

    def operation(matrix: Matrix) -> int:
        return _TRANSPOSE if matrix.transposed else _NO_TRANSPOSE

    kind = _DATA_TYPE[call.dtype]
    device.gemm_strided_batched(
        operation(call.b), operation(call.a), call.n, call.m, call.k,
        scalars.alpha, address_of(call.b.at), kind, call.b.ld, call.b.stride,
        address_of(call.a.at), kind, call.a.ld, call.a.stride,
        scalars.beta, address_of(call.c.at), _DATA_TYPE[call.c_dtype], call.c.ld, call.c.stride,
        call.batch, _COMPUTE_TYPE[call.compute],
    )  # fmt: skip
