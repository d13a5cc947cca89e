"""The problems that are planned: what to compute, the layout of the arrays, the settings and the processor."""

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

#: Values of ``method=`` for a convolution, its transpose and its gradients.  Not every backend has all of them.
METHODS = ("direct", "gemm", "implicit_gemm", "winograd", "fft")
#: The refusal of a method that a backend does not have for an operation.
NO_SUCH_METHOD = "not supported for this operation on this backend"


@dataclass(frozen=True)
class HostModel:
    """The processor of the NumPy backend."""

    #: The backend that runs the plans for this processor.
    backend: ClassVar[str] = "numpy"
    threads: int  # 0: the backend chooses the number
    #: The number that the backend chose, of which an implementation may use fewer; 0 if the caller set the number.
    most: int = 0

    def __str__(self) -> str:
        return counted(self.threads, "thread")


Machine = HostModel | GpuModel

#: Operations per byte above which arithmetic, not memory, limits a few cores.
_HOST_BALANCE = 8
#: Default workspace limits in bytes; `options` overrides them.
DEFAULT_LIMIT = {HostModel: 16 << 20, GpuModel: 256 << 20}


class NotApplicable(ValueError):
    """A method cannot solve this problem.

    The message says why; `needed` is the workspace in bytes that would be enough, if any would.
    """

    def __init__(self, why: str, needed: float = inf) -> None:
        super().__init__(why)
        self.needed = needed

    @classmethod
    def of_the_least(cls, refusals: Iterable[tuple[float, str]]) -> NotApplicable:
        """The refusal, among several given as (needed bytes, reason), that needs the fewest bytes."""
        needed, why = min(refusals, key=itemgetter(0))
        return cls(why, needed)


class UnlikeItsModel(RuntimeError):
    """A plan needs something that the device turned out not to have; its model records this from now on."""


class TooManyBlocks(UnlikeItsModel):
    """A cooperative launch has more blocks than the device can run at once; its model records this from now on."""


@dataclass(frozen=True)
class Prologue:
    """Transformation of each input element as it is loaded:  f(scale[c] * x + shift[c]); c counts merged channels.

    `scale` and `shift` are vectors (1, C, 1, 1, 1); either may be absent.  The convolution is defined on the
    transformed image: zero padding is not transformed, and other padding modes copy transformed elements.
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


#: No transformation of the input elements.
NO_PROLOGUE = Prologue()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The common fields of all problems: processor, settings and notes."""

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
        """The machine, for a problem planned for NumPy."""
        assert isinstance(self.machine, HostModel)
        return self.machine

    @property
    def gpu(self) -> GpuModel:
        """The machine, for a problem planned for CUDA."""
        assert isinstance(self.machine, GpuModel)
        return self.machine

    def limit_with(self, weights: int) -> int:
        """The limit if `weights` bytes of weights have to be copied whole.

        Copies of more than half of the limit come on top of it, in part or as a whole.  This way a larger limit never
        leaves less memory for the other buffers.
        """
        return max(self.limit, min(self.limit, weights) + weights)

    def does_not_fit(self, what: str, needed: int, room: int) -> NotApplicable:
        """The refusal of `what`, which needs `needed` bytes but has only `room`.

        The message counts the bytes relative to the caller's limit, without the bytes that `limit_with` added to it.
        """
        least = needed - (room - self.limit)
        return NotApplicable(f"{what} needs {least:,} bytes of workspace, the limit is {self.limit:,}", least)

    @property
    def arrays(self) -> Iterable[Operand | None]:
        """Arguments and results; None for an absent one."""
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
        """Every argument and result once: the minimum number of bytes that any method moves."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    @property
    def turns(self) -> int:
        """The number of sequential parts of the work; each waits for the part before it."""
        return 1

    @property
    def bound(self) -> str:
        """What limits the speed on the host."""
        return "memory" if self.flops < _HOST_BALANCE * self.minimal_bytes else "arithmetic"

    def planned(self, steps: Sequence[Step], sizes: Mapping[str, int] = {}, **rest: Any) -> Plan:
        """The plan of these steps, with workspace of these sizes; `rest` are fields that the problem does not know."""
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
        """The problem with the part of the workspace limit that the conversions leave."""
        if not conversions:
            return self
        left = self.limit - sum(conversion.nbytes for conversion in conversions)
        return replace(self, workspace_limit=max(0, left))


@dataclass(frozen=True, kw_only=True)
class ProductsProblem(Problem):
    """A problem of sums of products: those of the convolution `geometry`, between inputs and another factor."""

    geometry: ConvGeometry
    xs: tuple[Operand, ...]
    x_dtype: str
    method: str = "auto"
    weight_is_constant: bool = False  # the same in every run: its derived forms may be cached

    @property
    def dtype(self) -> str:
        """Dtype of the results."""
        raise NotImplementedError

    @property
    def factor_dtype(self) -> str:
        """Dtype of the factor that the inputs are multiplied with."""
        raise NotImplementedError

    @cached_property
    def x_alone_is_complex(self) -> bool:
        return is_complex(self.x_dtype) and not is_complex(self.factor_dtype)

    @cached_property
    def factor_alone_is_complex(self) -> bool:
        return is_complex(self.factor_dtype) and not is_complex(self.x_dtype)

    @property
    def is_one_kind(self) -> bool:
        """Whether both factors are real, or both are complex."""
        return not (self.x_alone_is_complex or self.factor_alone_is_complex)

    @property
    def fft_refusal(self) -> str:
        """Why Fourier transforms cannot solve it on any processor; empty if they can."""
        if not self.allow_fft:
            return "forbidden by options(allow_fft=False)"
        if self.geometry.taps == 1:
            return "only for kernels of several taps"
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
    pre: Operand | None = None  # receives the pre-activation, if it is saved; its layout is that of the result
    weight_dtype: str
    conjugate: bool = False  # conjugate the weight, only with implicit GEMM: for a part of an input's gradient
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
    """Consecutive convolutions: each reads the result of the previous one, ``layer[0]``, ``layer[1]`` ...

    Only the last result is an argument of the call.  The workspace limit belongs to the chain, not to its layers.
    """

    layers: tuple[ConvProblem, ...]
    fuse: str | bool = "auto"

    @property
    def arrays(self) -> Iterable[Operand | None]:
        """All arrays, including the images between layers, which are not arguments."""
        return (array for layer in self.layers for array in layer.arrays)

    @property
    def intermediate_bytes(self) -> int:
        """Memory of all results except the last."""
        return sum(layer.out.nbytes for layer in self.layers[:-1])

    @property
    def minimal_bytes(self) -> int:
        """Every argument once, without the intermediate images."""
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
    out: Operand  # has the weight's axes
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
    """A transposed convolution, or an input gradient: the adjoint of the convolution `geometry`.

    `xs` stand for their concatenation along the channels, which are the convolution's output channels.  `outs` have the
    channels of its inputs, one array per input.
    """

    operation: str
    weight: Operand  # (out_channels, group_channels, *kernel) of the convolution
    outs: tuple[Operand, ...]
    pre: Operand | None = None  # receives the pre-activation of the only result, if it is saved
    bias: Operand | None = None
    weight_dtype: str
    conjugate: bool = False  # conjugate the weight
    activation: Activation = IDENTITY
    #: Whether 0 times the weight is 0: zeros may then be read where the definition has no term.
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


#: One class of problems of sums of products.
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
    """The indices of the inputs that have channels, at least one index, and the geometry of only these inputs."""
    kept = [i for i, channels in enumerate(geometry.channels) if channels] or [0]
    if len(kept) == len(geometry.channels):
        return kept, geometry
    return kept, replace(geometry, channels=tuple(geometry.channels[i] for i in kept))
