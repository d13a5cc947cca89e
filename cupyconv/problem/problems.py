"""The problems that are planned: what is to be computed, where its arrays lie, the settings and the processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import itemgetter
from typing import Any, ClassVar, Self, TypeVar

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import Operand, is_complex, product_flops
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Buffer, Conversion, Plan, Step, counted

#: What ``method=`` may name for a convolution, its transpose and its gradients.  Not every backend has each of them.
METHODS = ("direct", "gemm", "implicit_gemm", "winograd", "fft")
#: Why a method is not taken that a backend does not have for an operation.
NO_SUCH_METHOD = "there is no such method of this operation on this backend"


@dataclass(frozen=True)
class HostModel:
    """The processor of the NumPy backend."""

    #: The backend that runs what is planned for it.
    backend: ClassVar[str] = "numpy"
    threads: int  # 0: as many as the backend finds worth it
    #: As many as the backend found worth it, of which a way may take fewer; 0 where the caller has said how many there are.
    most: int = 0

    def __str__(self) -> str:
        return counted(self.threads, "thread")


Machine = HostModel | GpuModel

#: Operations per byte beyond which a few cores are busier than their memory.
_HOST_BALANCE = 8
#: Bytes of workspace allowed unless `options` says otherwise.
DEFAULT_LIMIT = {HostModel: 16 << 20, GpuModel: 256 << 20}


class NotApplicable(ValueError):
    """A method cannot do this problem; the message says why, and `needed` how many bytes of workspace would do, if any would."""

    def __init__(self, why: str, needed: float = inf) -> None:
        super().__init__(why)
        self.needed = needed

    @classmethod
    def of_the_least(cls, refusals: Iterable[tuple[float, str]]) -> NotApplicable:
        """The reason of several ways, each given by the bytes that it needs and its words: that of the one that needs least."""
        needed, why = min(refusals, key=itemgetter(0))
        return cls(why, needed)


class UnlikeItsModel(RuntimeError):
    """A plan asks for what the device turned out not to have, as its model says from now on."""


class TooManyBlocks(UnlikeItsModel):
    """A plan has more blocks that wait for each other than the device has room for, as its model says from now on."""


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
    allow_tf32: bool = False
    allow_winograd: bool = True
    allow_fft: bool = True
    notes: tuple[str, ...] = ()

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
        """The limit where weights have to be copied whole: what of their bytes passes half of it comes on top.

        At no limit is less left beside them than at a smaller one.
        """
        return max(self.limit, min(self.limit, weights) + weights)

    def no_room(self, what: str, needed: int, room: int) -> NotApplicable:
        """Why `what` is not done, which needs more bytes than there is room for: in bytes of the limit that the caller knows,
        without what `limit_with` has put on top of it.
        """
        least = needed - (room - self.limit)
        return NotApplicable(f"{what} needs {least:,} bytes of workspace, the limit is {self.limit:,}", least)

    @property
    def arrays(self) -> Iterable[Operand | None]:
        """Arguments and results, None for one that is absent."""
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

    @property
    def turns(self) -> int:
        """Parts of the work of which each waits for the one before."""
        return 1

    @property
    def bound(self) -> str:
        """What limits the speed on the host."""
        return "memory" if self.flops < _HOST_BALANCE * self.minimal_bytes else "arithmetic"

    def planned(self, steps: Sequence[Step], sizes: Mapping[str, int] = {}, **rest: Any) -> Plan:
        """The plan of these steps, with workspace of these sizes; `rest` is what the problem does not know of it."""
        known: dict[str, Any] = dict(
            backend=self.machine.backend,
            device=str(self.machine),
            problem=self.title,
            result=self.result,
            steps=tuple(steps),
            flops=self.flops,
            bytes_moved=sum(step.bytes_moved for step in steps),
            minimal_bytes=self.minimal_bytes,
            bound=self.bound,
            notes=self.notes,
            workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes and steps),
        )
        return Plan(**known | rest)

    def sharing_with(self, conversions: Sequence[Conversion]) -> Self:
        """The problem with what the conversions leave of the workspace: they take their share first."""
        if not conversions:
            return self
        left = self.limit - sum(conversion.nbytes for conversion in conversions)
        return replace(self, workspace_limit=max(0, left))


@dataclass(frozen=True, kw_only=True)
class ProductsProblem(Problem):
    """A problem of sums of products: those of the convolution `geometry`, of inputs and another factor."""

    geometry: ConvGeometry
    xs: tuple[Operand, ...]
    x_dtype: str
    method: str = "auto"
    weight_is_constant: bool = False  # the same in every run: what is made of it may be kept

    @property
    def dtype(self) -> str:
        """Dtype of the results."""
        raise NotImplementedError

    @property
    def factor_dtype(self) -> str:
        """Dtype of what the inputs are multiplied with."""
        raise NotImplementedError

    @cached_property
    def x_alone_is_complex(self) -> bool:
        return is_complex(self.x_dtype) and not is_complex(self.factor_dtype)

    @cached_property
    def factor_alone_is_complex(self) -> bool:
        return is_complex(self.factor_dtype) and not is_complex(self.x_dtype)

    @property
    def is_one_kind(self) -> bool:
        """Whether both factors are real, or both complex."""
        return not (self.x_alone_is_complex or self.factor_alone_is_complex)

    @property
    def fft_refusal(self) -> str:
        """Why Fourier transforms cannot do it, on any processor."""
        if not self.allow_fft:
            return "options(allow_fft=False) forbids it"
        if self.geometry.taps == 1:
            return "it is for kernels of several taps"
        return ""

    @property
    def flops(self) -> int:
        return self.geometry.products * product_flops(self.x_dtype, self.factor_dtype)


@dataclass(frozen=True, kw_only=True)
class ConvProblem(ProductsProblem):
    """A convolution with everything that decides how it runs."""

    weight: Operand
    out: Operand
    bias: Operand | None = None
    residual: Operand | None = None
    pre: Operand | None = None  # where the pre-activation goes that is kept beside the result; laid out as that is
    weight_dtype: str
    conjugate: bool = False  # the weight is taken conjugated, by implicit GEMM alone: a part of an input's gradient
    activation: Activation = IDENTITY
    prologue: Prologue = NO_PROLOGUE

    @property
    def dtype(self) -> str:
        return self.out.dtype

    @property
    def factor_dtype(self) -> str:
        return self.weight_dtype

    @property
    def title(self) -> str:
        return str(self.geometry)

    @property
    def result(self) -> str:
        out, geometry = self.out, self.geometry
        shape = (geometry.batch, geometry.out_channels, *geometry.spatial(geometry.out_size))
        order = "channels-last" if out.stride_c == 1 and out.pixels > 1 else "C order"
        return f"{out.dtype} {shape}, {order}"

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.xs, self.weight, self.out, self.bias, self.residual, self.pre, *self.prologue.vectors)


@dataclass(frozen=True, kw_only=True)
class ChainProblem(Problem):
    """Convolutions one after the other: each reads the result of the one before, ``layer[0]``, ``layer[1]`` ...

    Only the last result is an argument of the call.  The limit on workspace is the chain's, not its layers'.
    """

    layers: tuple[ConvProblem, ...]
    fuse: str | bool = "auto"

    @property
    def arrays(self) -> Iterable[Operand | None]:
        """Images between layers too, which are none's argument."""
        return (array for layer in self.layers for array in layer.arrays)

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
        return f"chain of {counted(len(self.layers), 'convolution')}{layers}"

    @property
    def result(self) -> str:
        return self.layers[-1].result


@dataclass(frozen=True, kw_only=True)
class WeightGradientProblem(ProductsProblem):
    """The gradient of a convolution's weight; `geometry` is that of the convolution, `grad` its result's gradient."""

    grad: Operand
    out: Operand  # with the weight's axes
    grad_dtype: str
    prologue: Prologue = NO_PROLOGUE

    @property
    def arrays(self) -> Iterable[Operand]:
        return (self.grad, *self.xs, self.out, *self.prologue.vectors)

    @property
    def dtype(self) -> str:
        return self.out.dtype

    @property
    def factor_dtype(self) -> str:
        return self.grad_dtype

    @property
    def title(self) -> str:
        return f"weight gradient of {self.geometry}"

    @property
    def result(self) -> str:
        geometry = self.geometry
        return f"{self.dtype} {(geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))}"


@dataclass(frozen=True, kw_only=True)
class TransposedProblem(ProductsProblem):
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
    #: Whether 0 times the weight is 0, so that zeros may be read where the definition has no term.
    weight_is_finite: bool = True

    @property
    def dtype(self) -> str:
        return self.outs[0].dtype

    @property
    def factor_dtype(self) -> str:
        return self.weight_dtype

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.xs, self.weight, *self.outs, self.bias, self.pre)

    @property
    def title(self) -> str:
        return f"{self.operation}, the adjoint of {self.geometry}"

    @property
    def result(self) -> str:
        spatial = self.geometry.spatial(self.geometry.size)
        shapes = [str((out.shape[0], out.shape[1], *spatial)) for out in self.outs]
        channels_last = all(out.stride_c == 1 and out.pixels > 1 for out in self.outs)
        return f"{self.dtype} {', '.join(shapes)}, {'channels-last' if channels_last else 'C order'}"


def check_method(method: object, known: Sequence[str] = METHODS) -> None:
    """Refuse an unknown method."""
    if not isinstance(method, str) or method not in ("auto", *known):
        raise ValueError(f"unknown method {method!r}; known are auto, {', '.join(known)}")


#: One kind of problem for sums of products.
ProductsProblemT = TypeVar("ProductsProblemT", bound=ProductsProblem)
WindowsT = TypeVar("WindowsT", bound=Windows)
_Merging = TypeVar("_Merging", ConvProblem, WeightGradientProblem)


def without_empty_inputs(problem: _Merging) -> _Merging:
    """The problem without inputs that have no channels."""
    kept, geometry = inputs_with_channels(problem.geometry)
    if geometry is problem.geometry:
        return problem
    return replace(problem, geometry=geometry, xs=tuple(problem.xs[i] for i in kept))


def inputs_with_channels(geometry: WindowsT) -> tuple[list[int], WindowsT]:
    """Inputs of no channels take part in nothing: the others, one at the least, and the problem of these."""
    kept = [i for i, channels in enumerate(geometry.channels) if channels] or [0]
    if len(kept) == len(geometry.channels):
        return kept, geometry
    return kept, replace(geometry, channels=tuple(geometry.channels[i] for i in kept))
