"""Problems that are a single pass over their arrays: columns, pooling, and the elementwise part of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import Operand
from cupyconv.problem.geometry import Triple, Windows
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Problem, Prologue


@dataclass(frozen=True, kw_only=True)
class PassProblem(Problem):
    """An operation that is a single pass over its arrays: it has one method, and memory bandwidth limits its speed."""

    operation: ClassVar[str]
    bound = "memory"

    def planned(self, *steps_and_sizes: Any, **rest: Any) -> Plan:
        return super().planned(*steps_and_sizes, method=self.operation, **rest)


@dataclass(frozen=True, kw_only=True)
class ColumnsProblem(PassProblem):
    """Images and their columns."""

    windows: Windows
    xs: tuple[Operand, ...]
    columns: Operand  # (n, row, 1, 1, pixel)

    @property
    def arrays(self) -> Iterable[Operand]:
        return (self.columns, *self.xs)

    @property
    def title(self) -> str:
        return f"{self.operation} {self.windows.in_channels} channels, {_sliding(self.windows)}"


class Im2colProblem(ColumnsProblem):
    """Write columns from images."""

    operation = "im2col"
    flops = 0

    @property
    def result(self) -> str:
        return f"{self.columns.dtype} {self.columns.shape[:2] + self.columns.shape[4:]}"


class Col2imProblem(ColumnsProblem):
    """Sum columns back into one image."""

    operation = "col2im"

    @property
    def result(self) -> str:
        return _image(self.windows, self.xs[0])

    @property
    def flops(self) -> int:
        return prod(self.columns.shape)


@dataclass(frozen=True, kw_only=True)
class PoolingProblem(PassProblem):
    """Compute one number from every window of images, each image separately; or the gradients of this."""

    _READ: ClassVar[tuple[str, ...]] = ("xs",)
    _WRITTEN: ClassVar[tuple[str, ...]] = ("outs",)

    windows: Windows  # `channels` has one entry per image
    outs: tuple[Operand, ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that are read; the first one has the layout of the caller's images."""
        return tuple(operand for name in self._READ for operand in getattr(self, name))

    @property
    def results(self) -> tuple[Operand, ...]:
        """The arrays that are written."""
        return tuple(operand for name in self._WRITTEN for operand in getattr(self, name))

    @property
    def arrays(self) -> Iterable[Operand]:
        return (*self.inputs, *self.results)

    @property
    def each(self) -> list[Self]:
        """One problem per image whose result has elements."""
        return [self._one(i) for i, out in enumerate(self.outs) if out.nbytes]

    def _one(self, i: int) -> Self:
        images: dict[str, Any] = {name: getattr(self, name)[i : i + 1] for name in (*self._READ, *self._WRITTEN)}
        return replace(self, windows=replace(self.windows, channels=(self.windows.channels[i],)), **images)

    @property
    def title(self) -> str:
        channels = self.windows.channels
        merged = f" ({'+'.join(map(str, channels))})" if len(channels) > 1 else ""
        return f"{self.operation} {sum(channels)}{merged} channels, {_sliding(self.windows)}"

    @property
    def result(self) -> str:
        return ", ".join(_image(self.windows, image) for image in self.results)

    @property
    def flops(self) -> int:
        """One comparison or addition per tap and window."""
        windows = self.windows
        channels = sum(count for count, out in zip(windows.channels, self.outs) if out.nbytes)
        return windows.batch * channels * windows.pixels * windows.taps


@dataclass(frozen=True, kw_only=True)
class MaxPoolProblem(PoolingProblem):
    """Find the maximum of every window and, on request, its index in the image, counted in C order."""

    operation = "max_pool"
    _WRITTEN = ("outs", "indices")

    xs: tuple[Operand, ...]
    indices: tuple[Operand, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MaxPoolGradientProblem(PoolingProblem):
    """Compute the gradients of images from the images, their maxima, and the gradients of the maxima."""

    operation = "max_pool gradient"
    _READ = ("xs", "ys", "grads")

    xs: tuple[Operand, ...]
    ys: tuple[Operand, ...]
    grads: tuple[Operand, ...]


@dataclass(frozen=True, kw_only=True)
class MeanProblem(PoolingProblem):
    """Divide the sum of every window by the number of its taps that lie inside `counted`.

    `counted` is a box of positions: the first position along each axis, and the end along each axis.
    """

    counted: tuple[Triple, Triple]

    def count(self, axis: int, output: int) -> int:
        """The number of taps of a window that count, along one axis."""
        windows, (first, end) = self.windows, (places[axis] for places in self.counted)
        start, step = output * windows.stride[axis] - windows.before[axis], windows.dilation[axis]
        from_tap, to_tap = (max(0, -((start - place) // step)) for place in (first, end))
        return max(0, min(windows.kernel[axis], to_tap) - from_tap)


@dataclass(frozen=True, kw_only=True)
class AvgPoolProblem(MeanProblem):
    """Compute the mean of every window."""

    operation = "avg_pool"

    xs: tuple[Operand, ...]


@dataclass(frozen=True, kw_only=True)
class AvgPoolGradientProblem(MeanProblem):
    """Compute the gradients of images from the gradients of their means."""

    operation = "avg_pool gradient"
    _READ = ("grads",)

    grads: tuple[Operand, ...]


@dataclass(frozen=True, kw_only=True)
class ElementwiseGradProblem(PassProblem):
    """Propagate a gradient back through an elementwise operation."""

    grad: Operand
    out: Operand | None = None  # the gradient before that operation
    sums: Operand | None = None  # channel sums, in the accumulator's dtype

    @property
    def images(self) -> tuple[Operand, ...]:
        """The images from which each element is read, and to which it is written."""
        raise NotImplementedError

    @property
    def result(self) -> str:
        return f"{self.grad.dtype} {self.grad.shape}"


@dataclass(frozen=True, kw_only=True)
class EpilogueGradProblem(ElementwiseGradProblem):
    """Propagate a gradient back through an epilogue: its activation, and the bias.

    The gradient of the bias is the channel sums (1, C, 1, 1, 1).
    """

    operation = "epilogue_grad"

    activation: Activation = IDENTITY
    saved: Operand | None = None  # determines the activation's derivative; None without an activation

    @property
    def images(self) -> tuple[Operand, ...]:
        return tuple(image for image in (self.grad, self.saved, self.out) if image is not None)

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.images, self.sums)

    @property
    def does(self) -> list[str]:
        """The parts of this operation in words."""
        return [f"derivative of {self.activation}"] * bool(self.saved) + ["sums of channels"] * bool(self.sums)

    @property
    def title(self) -> str:
        return f"{' and '.join(self.does)} of {self.grad.dtype} {self.grad.shape}"

    @property
    def flops(self) -> int:
        return prod(self.grad.shape) * len(self.does)


@dataclass(frozen=True, kw_only=True)
class PrologueGradProblem(ElementwiseGradProblem):
    """Propagate a gradient of transformed elements back through the prologue that computed them from `x`.

    The sums (1, 2 C, 1, 1, 1) are interleaved: for each channel that of scale, then that of shift.
    """

    operation = "prologue_grad"

    x: Operand
    prologue: Prologue  # for these channels

    @property
    def images(self) -> tuple[Operand, ...]:
        return (self.grad, self.x, *([self.out] if self.out else []))

    @property
    def arrays(self) -> Iterable[Operand | None]:
        return (*self.images, *self.prologue.vectors, self.sums)

    @property
    def title(self) -> str:
        return f"gradient of {self.prologue}, {self.grad.dtype} {self.grad.shape}"

    @property
    def flops(self) -> int:
        return 4 * prod(self.grad.shape)


def _sliding(windows: Windows) -> str:
    """The kernel's size and the images that it slides over, in words."""
    kernel, size = ("x".join(map(str, windows.spatial(triple))) for triple in (windows.kernel, windows.size))
    return f"kernel {kernel} on {windows.batch} sample{'s' * (windows.batch != 1)} of {size}"


def _image(windows: Windows, image: Operand) -> str:
    """Dtype and shape of an image with the caller's axes."""
    return f"{image.dtype} {image.shape[:2] + windows.spatial(image.shape[2:])}"
