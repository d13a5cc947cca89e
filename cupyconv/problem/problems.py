"""What a decision rests on: the problem, where its arrays lie, the settings and the processor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import Operand, product_flops
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Conversion, Plan, Step

METHODS = ("direct", "gemm", "implicit_gemm")


@dataclass(frozen=True)
class HostModel:
    """The processor of the NumPy backend."""

    #: The backend that runs what is planned for it.
    backend: ClassVar[str] = "numpy"
    #: Operations per byte beyond which a few cores are busier than their memory.
    BALANCE: ClassVar[int] = 8

    threads: int

    def bound(self, flops: int, nbytes: int) -> str:
        """What limits the speed of so much work."""
        return "memory" if flops < self.BALANCE * nbytes else "arithmetic"

    def __str__(self) -> str:
        return f"{self.threads} thread" + "s" * (self.threads > 1)


Machine = HostModel | GpuModel

#: Bytes of workspace allowed unless `options` says otherwise.
DEFAULT_LIMIT = {HostModel: 16 << 20, GpuModel: 256 << 20}


class NotApplicable(ValueError):
    """A method cannot do this problem; the message says why."""


@dataclass(frozen=True)
class Prologue:
    """What happens to each element of the inputs as it is loaded:  f(scale[c] * x + shift[c]), c counts merged channels.

    `scale` and `shift` are vectors (1, C, 1, 1, 1); either may be absent.  The definition is of the transformed image:
    padding is of zeros that are not transformed, and a padding mode's elements are copies of transformed ones.
    """

    scale: Operand | None = None
    shift: Operand | None = None
    activation: Activation = IDENTITY

    def __bool__(self) -> bool:
        return bool(self.scale or self.shift or self.activation)

    def __str__(self) -> str:
        inner = "scale * x" if self.scale else "x"
        inner += " + shift" if self.shift else ""
        return f"{self.activation}({inner})" if self.activation else inner

    @property
    def vectors(self) -> tuple[Operand, ...]:
        return tuple(vector for vector in (self.scale, self.shift) if vector)


#: Elements are taken as they lie.
NO_PROLOGUE = Prologue()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What every decision under a limit on workspace rests on."""

    machine: Machine
    workspace_limit: int | None = None

    @property
    def limit(self) -> int:
        return DEFAULT_LIMIT[type(self.machine)] if self.workspace_limit is None else self.workspace_limit

    @property
    def host(self) -> HostModel:
        """The machine, of a problem that is planned for NumPy."""
        assert isinstance(self.machine, HostModel)
        return self.machine

    @property
    def gpu(self) -> GpuModel:
        """The machine, of a problem that is planned for CUDA."""
        assert isinstance(self.machine, GpuModel)
        return self.machine

    def limit_with(self, weights: int) -> int:
        """The limit where weights have to be copied whole: where their bytes take more than half of it, they come on top."""
        return self.limit + (weights if 2 * weights > self.limit else 0)

    @property
    def arrays(self) -> Iterable[Operand | None]:
        """Arguments and results, None for one that is absent; where planning asks for them."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """The first line of a plan."""
        raise NotImplementedError

    @property
    def result(self) -> str:
        """The results in words."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        raise NotImplementedError

    @property
    def minimal_bytes(self) -> int:
        """Every argument and result once: the fewest bytes any method can move."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    def planned(self, steps: Sequence[Step], **rest: Any) -> Plan:
        """The plan that consists of these steps; `rest` is what the problem does not know of it."""
        return Plan(
            backend=self.machine.backend,
            device=str(self.machine),
            problem=self.title,
            result=self.result,
            steps=tuple(steps),
            flops=self.flops,
            minimal_bytes=self.minimal_bytes,
            **rest,
        )

    def sharing_with(self, conversions: Sequence[Conversion]) -> Self:
        """The problem with what the conversions leave of the workspace: they take their share first."""
        if not conversions:
            return self
        left = self.limit - sum(conversion.nbytes for conversion in conversions)
        return replace(self, workspace_limit=max(0, left))


@dataclass(frozen=True, kw_only=True)
class _ProductsProblem(Problem):
    """A problem of sums of products: those of the convolution `geometry`."""

    geometry: ConvGeometry
    xs: tuple[Operand, ...]
    x_dtype: str
    method: str = "auto"
    allow_tf32: bool = False
    notes: tuple[str, ...] = ()

    def operations(self, other_dtype: str) -> int:
        return self.geometry.products * product_flops(self.x_dtype, other_dtype)


@dataclass(frozen=True, kw_only=True)
class ConvProblem(_ProductsProblem):
    """A convolution with everything that decides how it runs; hashable, the key of the plan cache."""

    weight: Operand
    out: Operand
    bias: Operand | None = None
    residual: Operand | None = None
    pre: Operand | None = None  # where the pre-activation goes that is kept beside the result; laid out as that is
    weight_dtype: str
    activation: Activation = IDENTITY
    prologue: Prologue = NO_PROLOGUE

    @property
    def title(self) -> str:
        return str(self.geometry)

    @property
    def result(self) -> str:
        """The result in words."""
        out, geometry = self.out, self.geometry
        shape = (geometry.batch, geometry.out_channels, *geometry.spatial(geometry.out_size))
        order = "channels-last" if out.stride_c == 1 and out.pixels > 1 else "C order"
        return f"{out.dtype} {shape}, {order}"

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.xs, self.weight, self.out, self.bias, self.residual, self.pre, *self.prologue.vectors)

    @property
    def flops(self) -> int:
        return self.operations(self.weight_dtype)


@dataclass(frozen=True, kw_only=True)
class ChainProblem(Problem):
    """Convolutions one after the other: each reads the result of the one before, ``layer[0]``, ``layer[1]`` ...

    Only the last result is an argument of the call.  The limit on workspace is the chain's, not its layers'.
    """

    layers: tuple[ConvProblem, ...]
    fuse: str | bool = "auto"

    @property
    def intermediate_bytes(self) -> int:
        """Memory of all results but the last."""
        return sum(layer.out.nbytes for layer in self.layers[:-1])

    @property
    def minimal_bytes(self) -> int:
        """Every argument once; an intermediate is none."""
        return sum(layer.minimal_bytes for layer in self.layers) - 2 * self.intermediate_bytes

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @property
    def title(self) -> str:
        layers = "".join(f"\n  layer {i}   {layer.geometry}" for i, layer in enumerate(self.layers))
        return f"chain of {len(self.layers)} convolutions{layers}"

    @property
    def result(self) -> str:
        return self.layers[-1].result


@dataclass(frozen=True, kw_only=True)
class WeightGradientProblem(_ProductsProblem):
    """The gradient of a convolution's weight; `geometry` is that of the convolution, `grad` its result's gradient."""

    grad: Operand
    out: Operand  # with the weight's axes
    grad_dtype: str
    prologue: Prologue = NO_PROLOGUE

    @property
    def arrays(self) -> Iterable[Operand]:
        return (self.grad, *self.xs, self.out, *self.prologue.vectors)

    @property
    def flops(self) -> int:
        return self.operations(self.grad_dtype)

    @property
    def title(self) -> str:
        return f"weight gradient of {self.geometry}"

    @property
    def result(self) -> str:
        geometry = self.geometry
        return (
            f"{self.out.dtype} {(geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))}"
        )


@dataclass(frozen=True, kw_only=True)
class TransposedProblem(_ProductsProblem):
    """A transposed convolution, which an input gradient is: the adjoint of the convolution `geometry`.

    `xs` stand for their concatenation along the channels, which are the convolution's outputs; `outs` have
    the channels of its inputs, one array each.
    """

    operation: str
    weight: Operand  # (out_channels, group_channels, *kernel) of the convolution
    outs: tuple[Operand, ...]
    pre: Operand | None = None  # where the pre-activation goes that is kept beside the one result
    bias: Operand | None = None
    weight_dtype: str
    conjugate: bool = False  # the weight is taken conjugated
    activation: Activation = IDENTITY

    @property
    def dtype(self) -> str:
        """Dtype of the results."""
        return self.outs[0].dtype

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.xs, self.weight, *self.outs, self.bias, self.pre)

    @property
    def flops(self) -> int:
        return self.operations(self.weight_dtype)

    @property
    def title(self) -> str:
        return f"{self.operation}, the adjoint of {self.geometry}"

    @property
    def result(self) -> str:
        """The results in words."""
        spatial = self.geometry.spatial(self.geometry.size)
        shapes = [str((out.shape[0], out.shape[1], *spatial)) for out in self.outs]
        channels_last = all(out.stride_c == 1 and out.pixels > 1 for out in self.outs)
        return f"{self.dtype} {', '.join(shapes)}, {'channels-last' if channels_last else 'C order'}"


def check_method(method: object) -> None:
    """Refuse an unknown method."""
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        raise ValueError(f"unknown method {method!r}; known are auto, {', '.join(METHODS)}")


#: One kind of problem for sums of products.
ProductsProblemT = TypeVar("ProductsProblemT", bound=_ProductsProblem)
WindowsT = TypeVar("WindowsT", bound=Windows)
_Merging = TypeVar("_Merging", ConvProblem, WeightGradientProblem)


def without_empty_inputs(problem: _Merging) -> _Merging:
    """The problem without inputs that have no channels."""
    kept, geometry = inputs_with_channels(problem.geometry)
    return replace(problem, geometry=geometry, xs=tuple(problem.xs[i] for i in kept))


def inputs_with_channels(geometry: WindowsT) -> tuple[list[int], WindowsT]:
    """Inputs of no channels take part in nothing: the others, one at the least, and the problem of these."""
    kept = [i for i, channels in enumerate(geometry.channels) if channels] or [0]
    return kept, replace(geometry, channels=tuple(geometry.channels[i] for i in kept))
