"""What a decision rests on: the problem, where its arrays lie, the settings and the processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyconv.activations import IDENTITY, Activation
from cupyconv.geometry import ConvGeometry, Windows
from cupyconv.machine import GpuModel, HostModel
from cupyconv.operands import Operand
from cupyconv.plan import Conversion

METHODS = ("direct", "gemm")
LATER_METHODS = ("implicit_gemm", "winograd", "fft")

Machine = HostModel | GpuModel

#: Bytes of workspace allowed unless `options` says otherwise.
DEFAULT_LIMIT = {HostModel: 16 << 20, GpuModel: 256 << 20}


class NotApplicable(ValueError):
    """A method cannot do this problem; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ConvRequest:
    """A convolution with everything that decides how it runs; hashable, the key of the plan cache."""

    geometry: ConvGeometry
    xs: tuple[Operand, ...]
    weight: Operand
    out: Operand
    bias: Operand | None = None
    residual: Operand | None = None
    x_dtype: str
    weight_dtype: str
    activation: Activation = IDENTITY
    method: str = "auto"
    machine: Machine
    workspace_limit: int | None = None
    allow_tf32: bool = False
    notes: tuple[str, ...] = ()

    @property
    def limit(self) -> int:
        return DEFAULT_LIMIT[type(self.machine)] if self.workspace_limit is None else self.workspace_limit

    @property
    def minimal_bytes(self) -> int:
        """Every argument once: the fewest bytes any method can move."""
        operands = (*self.xs, self.weight, self.out, self.bias, self.residual)
        return sum(operand.nbytes for operand in operands if operand is not None)

    @property
    def flops(self) -> int:
        """Real operations: a multiply-add is 2, with one complex side 4, with two 8."""
        sides = ("complex" in self.x_dtype) + ("complex" in self.weight_dtype)
        return self.geometry.products * (2, 4, 8)[sides]


@dataclass(frozen=True, kw_only=True)
class ColumnsRequest:
    """Columns to be written from images, or summed back into one."""

    windows: Windows
    xs: tuple[Operand, ...]
    columns: Operand  # (n, row, 1, 1, pixel)
    machine: Machine


def check_method(method: object) -> None:
    """Refuse an unknown method, and one that this version does not have."""
    if method in LATER_METHODS:
        raise ValueError(f"method {method!r} is not in this version; there are 'auto', 'direct' and 'gemm'")
    if method != "auto" and method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known are auto, {', '.join(METHODS + LATER_METHODS)}")


def without_empty_inputs(request: ConvRequest) -> ConvRequest:
    """Inputs of no channels take part in nothing; one is kept where there is no other."""
    kept = [i for i, channels in enumerate(request.geometry.channels) if channels] or [0]
    geometry = replace(request.geometry, channels=tuple(request.geometry.channels[i] for i in kept))
    return replace(request, geometry=geometry, xs=tuple(request.xs[i] for i in kept))


def convert(operand: Operand, dtype: str, conversions: list[Conversion]) -> Operand:
    """The operand in `dtype`; where that is another one, freshly allocated and noted in `conversions`."""
    if operand.dtype == dtype:
        return operand
    fresh = operand.in_c_order(dtype)
    conversions.append(Conversion(operand.name, operand.dtype, dtype, fresh.nbytes))
    return fresh


def converted(request: ConvRequest) -> tuple[ConvRequest, tuple[Conversion, ...]]:
    """Arguments in the dtypes computed with, and what must be converted for that."""
    conversions: list[Conversion] = []
    bias, residual = request.bias, request.residual
    request = replace(
        request,
        xs=tuple(convert(x, request.x_dtype, conversions) for x in request.xs),
        weight=convert(request.weight, request.weight_dtype, conversions),
        bias=bias and convert(bias, request.out.dtype, conversions),
        residual=residual and convert(residual, request.out.dtype, conversions),
    )
    return request, tuple(conversions)


def describe_result(request: ConvRequest) -> str:
    """The result in words."""
    out, geometry = request.out, request.geometry
    shape = (geometry.batch, geometry.out_channels, *geometry.spatial(geometry.out_size))
    order = "channels-last" if out.stride_c == 1 and out.pixels > 1 else "C order"
    return f"{out.dtype} {shape}, {order}"
