"""What a decision rests on: the problem, where its arrays lie, the settings and the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from cupyconv.activations import IDENTITY, Activation
from cupyconv.geometry import ConvGeometry, Windows
from cupyconv.operands import Operand
from cupyconv.planning.machine import GpuModel, HostModel

Machine = Union[HostModel, GpuModel]

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
