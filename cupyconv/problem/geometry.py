"""Geometry: the sizes of a convolution and of its windows, as ints, validated once.

All layers below this file use three spatial axes.  This file extends 1-D and 2-D problems to 3-D with leading axes of
length 1.  The layers below do not depend on the original number of axes.  Quantities that follow from the sizes are
properties here, for both planning and execution.

::

    size      |<----------------------- n ----------------------->|
    before -> |..|                                             |..| <- after
              [k   k   k]                one window: taps dilation apart, `span` wide
                  [k   k   k]            the next one: stride further
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Self

from cupyconv.problem.padding import (
    PADDING_MODES,
    padding_mode_hint,
    per_axis,
    positive,
    resolve_padding,
    resolve_transposed_padding,
)

Triple = tuple[int, int, int]
Ints = tuple[int, ...]

#: Strides, dilations, padding and kernel sizes are int32 in the CUDA kernels; image sizes are not.
LARGEST_STEP = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows that slide over images: the geometry of columns, and half of a convolution's geometry.

    `channels` has one entry per input array; several entries stand for their concatenation.  In `ceil_mode` a last
    window may extend beyond the padded image if it begins in the image or in the padding before it.
    """

    batch: int
    channels: tuple[int, ...]
    size: Triple
    kernel: Triple
    stride: Triple
    before: Triple
    after: Triple
    dilation: Triple
    padding_mode: str
    rank: int
    ceil_mode: bool = False

    @cached_property
    def in_channels(self) -> int:
        return sum(self.channels)

    @cached_property
    def channel_offsets(self) -> tuple[int, ...]:
        """First channel of each input in the concatenation."""
        return tuple(sum(self.channels[:i]) for i in range(len(self.channels)))

    @cached_property
    def span(self) -> Triple:
        """Extent of the dilated kernel."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel))  # type: ignore[return-value]

    @cached_property
    def out_size(self) -> Triple:
        rooms = [n + a + b - span for n, a, b, span in zip(self.size, self.before, self.after, self.span)]
        if self.ceil_mode:
            return tuple(  # type: ignore[return-value]
                min(-(-room // s) + 1, -(-(n + b) // s))
                for room, s, n, b in zip(rooms, self.stride, self.size, self.before)
            )
        return tuple(room // s + 1 for room, s in zip(rooms, self.stride))  # type: ignore[return-value]

    @cached_property
    def reached(self) -> Triple:
        """Extent of all windows together: the padded image without the remainder after the last window."""
        return tuple((n - 1) * s + span for n, s, span in zip(self.out_size, self.stride, self.span))  # type: ignore[return-value]

    @cached_property
    def taps(self) -> int:
        return prod(self.kernel)

    @cached_property
    def pixels(self) -> int:
        """Output pixels of one sample."""
        return prod(self.out_size)

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether the kernel is 1x1 and reads every pixel exactly once, at its own position."""
        return self.taps == 1 and self.stride == (1, 1, 1) and self.before == self.after == (0, 0, 0)

    @cached_property
    def outermost(self) -> int:
        """The first axis along which the kernel has more than one tap."""
        return next((axis for axis, taps in enumerate(self.kernel) if taps > 1), 0)

    def with_taps(self, taps: Sequence[range]) -> Self:
        """Windows with the same pixels and only these taps of the kernel."""
        return self._reading(self.out_size, self.stride, taps, self.dilation)

    def exchanged(self, pixels: Sequence[range]) -> Self:
        """Windows whose taps are these pixels, and whose pixels are the taps.

        A pixel p reads element p * stride + t * dilation - before for tap t, so pixels and taps are interchangeable.
        If there are fewer pixels than taps, a loop over pixels, which handles all taps at once, is shorter.
        """
        return self._reading(self.kernel, self.dilation, pixels, self.stride)

    def _reading(self, out_size: Triple, stride: Triple, taps: Sequence[range], dilation: Triple) -> Self:
        """Windows on the same images, with this `out_size`, and with only these taps of the kernel."""
        kernel: Any = tuple(map(len, taps))
        before: Any = tuple(b - run.start * d for b, run, d in zip(self.before, taps, dilation))
        ends = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(out_size, stride, dilation, kernel)]
        after: Any = tuple(end - b - size for end, b, size in zip(ends, before, self.size))
        return replace(self, kernel=kernel, before=before, after=after, stride=stride, dilation=dilation)

    def spatial(self, triple: Sequence[int]) -> tuple[int, ...]:
        """The entries of a triple that belong to the caller's axes."""
        return tuple(triple[3 - self.rank :])


def even_part(extent: int, most: int) -> int:
    """The size of equal parts that cut `extent` into as few pieces as parts of size `most` do; at least 1."""
    return -(-extent // -(-extent // max(1, most))) if extent else 1


def ranges_of(extent: int | range, part: int) -> list[range]:
    """An axis, or a range of it, cut into parts."""
    whole = range(extent) if isinstance(extent, int) else extent
    return [whole[first : first + part] for first in range(0, len(whole), part)]


def box_within(size: Sequence[int], most: int) -> Triple:
    """A contiguous box of at most `most` elements, but at least one: whole inner axes and part of one axis."""
    depth, height, width = size
    if most >= height * width:
        return even_part(depth, most // (height * width)), height, width
    if most >= width:
        return 1, even_part(height, most // width), width
    return 1, 1, even_part(width, most)


def tap_boxes(kernel: Sequence[int], most: int) -> Iterator[tuple[slice, tuple[range, ...]]]:
    """Cut a kernel into boxes of at most `most` taps.

    Each box is contiguous in C order; yields its slice of the taps and its range along each axis.
    """
    first = 0
    for box in product(*map(ranges_of, kernel, box_within(kernel, most))):
        count = prod(map(len, box))
        yield slice(first, first + count), box
        first += count


def pixel_windows(batch: int, channels: int, size: Triple) -> Windows:
    """One window per pixel: the columns of an image are then a copy of it."""
    ones, zeros = (1, 1, 1), (0, 0, 0)
    return Windows(batch=batch, channels=(channels,), **_in_three(size, ones, ones, zeros, zeros, ones))


@dataclass(frozen=True, kw_only=True)
class ConvGeometry(Windows):
    """A convolution: windows, and a weight that maps each window to `out_channels` numbers.

    ::

        y[n, o, p]  =  sum over c, t of   weight[o, c, t] * x[n, first(o) + c, window(p, t)]
                       first(o) = o // group_outputs * group_channels
    """

    out_channels: int
    groups: int

    @cached_property
    def group_channels(self) -> int:
        return self.in_channels // self.groups

    @cached_property
    def group_outputs(self) -> int:
        return self.out_channels // self.groups

    @cached_property
    def reduction(self) -> int:
        """Products summed for one output: K of the GEMM, the channels of a group times the taps."""
        return self.group_channels * self.taps

    @cached_property
    def is_depthwise(self) -> bool:
        """Whether each output depends on one input channel: one kernel per channel, or kernels on a single channel."""
        return self.group_channels == 1

    @cached_property
    def products(self) -> int:
        """Multiply-adds of the whole convolution."""
        return self.batch * self.out_channels * self.pixels * self.reduction

    def __str__(self) -> str:
        image = "x".join(map(str, self.spatial(self.size))) or "1"
        kernel = "x".join(map(str, self.spatial(self.kernel))) or "1"
        merged = f" (merged from {'+'.join(map(str, self.channels))})" if len(self.channels) > 1 else ""
        words = [
            f"conv {self.in_channels}{merged} -> {self.out_channels} channels, kernel {kernel}"
            f" on {self.batch} sample{'s' * (self.batch != 1)} of {image}"
        ]
        for name, value, usual in (("stride", self.stride, 1), ("dilation", self.dilation, 1)):
            if any(v != usual for v in value):
                words.append(f"{name} {self.spatial(value)}")
        if any(self.before + self.after):
            pairs = tuple(zip(self.spatial(self.before), self.spatial(self.after)))
            words.append(f"padding {pairs} {self.padding_mode}")
        if self.groups > 1:
            words.append(f"groups {self.groups}")
        return ", ".join(words)


def conv_geometry(
    shapes: Mapping[str, tuple[int, ...]],
    weight_shape: tuple[int, ...],
    *,
    batched: bool,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    padding_mode: str = "constant",
) -> ConvGeometry:
    """Validate a convolution's settings and its shapes, given by input; each error says what was given and needed."""
    rank = len(weight_shape) - 2
    if not 1 <= rank <= 3:
        raise ValueError(_weight_axes(weight_shape, "(C_out, C_in // groups, *kernel)"))
    groups = positive("groups", groups)
    hint = _without_its_axis(shapes, weight_shape, groups)
    try:
        batch, channels, size = _common_image(shapes, rank, batched)
    except ValueError as error:
        raise ValueError(f"{error}{hint or _three_axes_alone(shapes, weight_shape)}") from None
    out_channels, weight_channels = weight_shape[:2]
    if out_channels % groups:
        raise ValueError(f"groups {groups} does not divide the weight's {out_channels} output channels{hint}")
    if sum(channels) % groups:
        raise ValueError(f"groups {groups} does not divide the {_counted(shapes, channels)}{hint}")
    if sum(channels) // groups != weight_channels:
        needed = weight_channels * groups
        raise ValueError(
            f"weight of shape {weight_shape} with groups={groups} takes {needed} input channels,"
            f" given {_counted(shapes, channels)}"
            f"{hint or _each_channel(weight_shape) or _three_axes_alone(shapes, weight_shape)}"
        )
    windows = _windows(size, weight_shape[2:], stride, padding, padding_mode, dilation)
    return ConvGeometry(batch=batch, channels=channels, out_channels=out_channels, groups=groups, **windows)


def transposed_geometry(
    shapes: Mapping[str, tuple[int, ...]],
    weight_shape: tuple[int, ...],
    *,
    batched: bool,
    stride: Any,
    padding: Any,
    output_padding: Any,
    output_shape: Any,
    dilation: Any,
    groups: Any,
) -> ConvGeometry:
    """The convolution whose adjoint is the given transposed convolution.

    Its images are the results of the transposed convolution, and its result is the concatenation of the inputs.
    `after` may be negative: no window then covers the last elements of the result.
    """
    rank = len(weight_shape) - 2
    if not 1 <= rank <= 3:
        raise ValueError(_weight_axes(weight_shape, "(C_in, C_out // groups, *kernel)"))
    batch, channels, size = _common_image(shapes, rank, batched)
    groups = positive("groups", groups)
    in_channels, group_outputs, *kernel = weight_shape
    if in_channels % groups:
        raise ValueError(f"groups {groups} does not divide the weight's {in_channels} input channels")
    if sum(channels) != in_channels:
        raise ValueError(
            f"weight of shape {weight_shape} takes {in_channels} input channels, given {_counted(shapes, channels)}"
        )
    if min(kernel) < 1 or min(size) < 1:
        raise ValueError(
            f"kernel and input must have at least one element along every axis, given {tuple(kernel)} and {size}"
        )
    stride = per_axis("stride", stride, rank, 1)
    dilation = per_axis("dilation", dilation, rank, 1)
    before, out_size = resolve_transposed_padding(padding, output_padding, output_shape, size, kernel, stride, dilation)
    _check_steps(stride=stride, dilation=dilation, padding=before, kernel=tuple(kernel))
    after = tuple(
        (n - 1) * s + d * (k - 1) + 1 - b - length
        for n, s, d, k, b, length in zip(size, stride, dilation, kernel, before, out_size)
    )
    windows = _in_three(out_size, tuple(kernel), stride, before, after, dilation)
    return ConvGeometry(
        batch=batch, channels=(group_outputs * groups,), out_channels=in_channels, groups=groups, **windows
    )


def window_geometry(
    shapes: Mapping[str, tuple[int, ...]],
    kernel_shape: Any,
    *,
    batched: bool,
    stride: Any,
    padding: Any,
    dilation: Any,
    padding_mode: str = "constant",
    ceil_mode: bool = False,
) -> Windows:
    """Validate the windows of images, whose shapes are given by input."""
    name, shape = next(iter(shapes.items()))
    rank = len(shape) - 1 - batched
    if not 1 <= rank <= 3:
        hint = f"; for one sample of one channel, pass {name}[None, None]" if len(shape) in (1, 2) else ""
        raise ValueError(
            f"{name} has {len(shape)} axes, needed 3 to 5: (N, C, *spatial) with 1 to 3 spatial axes; given {shape}{hint}"
        )
    if isinstance(kernel_shape, (tuple, list)) and len(kernel_shape) != rank:
        raise ValueError(
            f"kernel_shape has {len(kernel_shape)} entries, needed one int or {rank} ints (one per spatial axis of {name},"
            f" which has shape {shape}); given {tuple(kernel_shape)}"
        )
    kernel = per_axis("kernel_shape", kernel_shape, rank, 1)
    batch, channels, size = _common_image(shapes, rank, batched)
    windows = _windows(size, kernel, stride, padding, padding_mode, dilation, ceil_mode)
    return Windows(batch=batch, channels=channels, **windows)


def weight_gradient_geometry(
    grad_shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    kernel_shape: Any,
    *,
    batched: bool,
    groups: Any,
    **settings: Any,
) -> ConvGeometry:
    """Validate the geometry of a convolution of whose weight only the kernel's shape is known."""
    windows = window_geometry(shapes, kernel_shape, batched=batched, **settings)
    groups = positive("groups", groups)
    batch, size = (windows.batch,) * batched, windows.spatial(windows.out_size)
    if grad_shape[:batched] != batch or grad_shape[1 + batched :] != size:
        needed = ", ".join(map(str, (*batch, "C_out", *size)))
        name, shape = next(iter(shapes.items()))
        raise ValueError(
            f"grad has shape {grad_shape}, needed ({needed}), the shape of the convolution's result for {name} of shape {shape}"
            f" and kernel {windows.spatial(windows.kernel)}"
        )
    out_channels = grad_shape[batched]
    if out_channels % groups:
        raise ValueError(f"groups {groups} does not divide the {out_channels} channels of grad, of shape {grad_shape}")
    if windows.in_channels % groups:
        raise ValueError(f"groups {groups} does not divide the {_counted(shapes, windows.channels)}")
    common = {field.name: getattr(windows, field.name) for field in fields(Windows)}
    return ConvGeometry(out_channels=out_channels, groups=groups, **common)


def pointwise_geometry(shapes: Mapping[str, tuple[int, ...]], weight_shape: tuple[int, ...]) -> ConvGeometry:
    """The geometry of a merge: images with any number of spatial axes, and a weight (C_out, sum of the C_i).

    The result does not depend on the order of pixels, so axes beyond three are merged into the first one.
    """
    if len(weight_shape) != 2:
        raise ValueError(f"weight of linmerge must have two axes, (C_out, sum of C_i); given shape {weight_shape}")
    name, shape = next(iter(shapes.items()))
    rank = len(shape) - 2
    if rank < 0:
        raise ValueError(f"{name} has shape {shape}, needed at least two axes: (N, C, *spatial)")
    hint, firsts = "", [shape[0] for shape in shapes.values() if shape]
    if sum(firsts) == weight_shape[1] and len({s[1:] for s in shapes.values()}) == 1:
        hint = "; the axis N of samples is missing: for one sample, pass array[None] of shape (1, C, *spatial)"
    elif len(shapes) == weight_shape[1]:
        hint = "; arrays have shape (N, C, *spatial): for one channel of one sample, pass array[None, None]"
    try:
        batch, channels, size = _common_image(shapes, rank, batched=True)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None
    if sum(channels) != weight_shape[1]:
        given = _counted(shapes, channels)
        raise ValueError(f"weight of shape {weight_shape} takes {weight_shape[1]} channels, given {given}{hint}")
    if rank > 3:
        size = (prod(size[:-2]), *size[-2:])
    ones = (1,) * len(size)
    windows = _windows(size, ones, ones, 0, "constant", ones)
    return ConvGeometry(batch=batch, channels=channels, out_channels=weight_shape[0], groups=1, **windows)


def _common_image(
    shapes: Mapping[str, tuple[int, ...]], rank: int, batched: bool
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Batch, channels of each input, and spatial size; the images must agree in everything but channels."""
    axes = "(N, C, *spatial)" if batched else "(C, *spatial)"
    for name, shape in shapes.items():
        if len(shape) != rank + 1 + batched:
            hint = "; a list is merged along the channels, so pass a batch as one array" if len(shapes) > 1 else ""
            with_channels = (1, *shape) if name.startswith("input_shape") else f"{name}[None]"
            hint += f"; for an image without channels, pass {with_channels}" if len(shape) == rank else ""
            raise ValueError(
                f"{name} has shape {shape}, needed {rank + 1 + batched} axes: {axes} with {rank} spatial"
                f" {'axis' if rank == 1 else 'axes'}{hint}"
            )
    first, expected = next(iter(shapes.items()))
    for name, shape in shapes.items():
        if shape[:batched] != expected[:batched] or shape[1 + batched :] != expected[1 + batched :]:
            raise ValueError(
                f"inputs must agree in all but the channel axis: {first} has shape {expected}, {name} has shape {shape}"
            )
    batch = expected[0] if batched else 1
    return batch, tuple(shape[batched] for shape in shapes.values()), expected[1 + batched :]


def _windows(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: Any,
    padding: Any,
    padding_mode: Any,
    dilation: Any,
    ceil_mode: bool = False,
) -> dict[str, Any]:
    rank = len(size)
    if min(kernel, default=1) < 1:
        raise ValueError(f"kernel must have at least one tap along every axis, given {kernel}")
    stride = per_axis("stride", stride, rank, 1)
    dilation = per_axis("dilation", dilation, rank, 1)
    if not isinstance(padding_mode, str) or padding_mode not in PADDING_MODES:
        raise ValueError(
            f"unknown padding_mode {padding_mode!r}; known are {', '.join(PADDING_MODES)}, as in numpy.pad"
            f"{padding_mode_hint(padding_mode)}"
        )
    pairs = resolve_padding(padding, size, kernel, stride, dilation)
    if padding_mode != "constant" and not isinstance(padding, (str, tuple, list)) and not padding and max(kernel) > 1:
        raise ValueError(
            f"padding_mode {padding_mode!r} has no effect with padding=0: pass padding='same' for a result of the size of x,"
            " the padding in numbers, or 'valid' for no padding"
        )
    before, after = tuple(b for b, _ in pairs), tuple(a for _, a in pairs)
    _check_steps(stride=stride, dilation=dilation, padding=before + after, kernel=kernel)
    for axis in range(rank):
        padded = size[axis] + before[axis] + after[axis]
        span = dilation[axis] * (kernel[axis] - 1) + 1
        beyond = stride[axis] - 1 if ceil_mode else 0
        if span > max(1, padded + beyond):  # one tap on an empty axis gives an empty result
            raise ValueError(
                f"kernel spans {span} elements along spatial axis {axis}, but the padded input has {padded}"
                f" (size {size[axis]}, padding {pairs[axis]}, kernel {kernel[axis]}, dilation {dilation[axis]})"
            )
        if size[axis] == 0 and padding_mode != "constant" and any(pairs[axis]):
            raise ValueError(f"padding_mode {padding_mode!r} cannot extend spatial axis {axis} of length 0")

    windows = _in_three(size, kernel, stride, before, after, dilation)
    return windows | {"padding_mode": padding_mode if any(before + after) else "constant", "ceil_mode": ceil_mode}


def _check_steps(**steps: tuple[int, ...]) -> None:
    for name, values in steps.items():
        if max(values, default=0) > LARGEST_STEP:
            raise ValueError(f"{name} must be at most {LARGEST_STEP}, given {values}")


def _in_three(size: Ints, kernel: Ints, stride: Ints, before: Ints, after: Ints, dilation: Ints) -> dict[str, Any]:
    """The fields of `Windows` along three axes, with `padding_mode` "constant"."""
    return dict(
        size=_triple(size, 1),
        kernel=_triple(kernel, 1),
        stride=_triple(stride, 1),
        before=_triple(before, 0),
        after=_triple(after, 0),
        dilation=_triple(dilation, 1),
        padding_mode="constant",
        rank=len(size),
    )


def _triple(values: tuple[int, ...], fill: int) -> Triple:
    """One value per axis of three, with `fill` for missing axes."""
    return (fill,) * (3 - len(values)) + tuple(values)  # type: ignore[return-value]


def _weight_axes(shape: tuple[int, ...], needed: str) -> str:
    hint = "; for a kernel without channel axes, pass kernel[None, None]" if len(shape) in (1, 2) else ""
    return f"weight has {len(shape)} axes, needed 3 to 5: {needed} with 1 to 3 spatial axes; given shape {shape}{hint}"


def _each_channel(weight_shape: tuple[int, ...]) -> str:
    """A hint for callers who want to apply one filter to every channel."""
    if weight_shape[:2] != (1, 1):
        return ""
    kernel = ", ".join(map(str, weight_shape[2:]))
    return f"; to filter each of C channels separately, pass groups=C and a weight of shape (C, 1, {kernel})"


def _three_axes_alone(shapes: Mapping[str, tuple[int, ...]], weight_shape: tuple[int, ...]) -> str:
    """A hint for callers who pass a kernel of three axes, which is read as a weight with channels and one spatial axis.

    An image of three axes may also be a batch of signals; the hint is then given only for a cubic kernel.
    """
    axes = min(map(len, shapes.values()))
    if len(weight_shape) != 3 or axes < 3 or (axes == 3 and len(set(weight_shape)) > 1):
        return ""
    return f"; weight of shape {weight_shape} has 1 spatial axis; for a kernel of three spatial axes, pass weight[None, None]"


def _without_its_axis(shapes: Mapping[str, tuple[int, ...]], weight_shape: tuple[int, ...], groups: int) -> str:
    """A hint for callers whose weight has one kernel per channel, (C, *kernel), without the axis of input channels."""
    rank = len(weight_shape) - 1
    channels = [shape[-rank - 1] for shape in shapes.values() if len(shape) in (rank + 1, rank + 2)]
    if groups == 1 or rank > 3 or len(channels) != len(shapes) or not sum(channels) == groups == weight_shape[0]:
        return ""
    needed = (groups, 1, *weight_shape[1:])
    axes = f"{rank - 1} spatial {'axis' if rank == 2 else 'axes'}"
    return (
        f"; weight of shape {weight_shape} has {axes}; for a kernel for each of {groups} channels, pass weight[:, None] of"
        f" shape {needed}"
    )


def _counted(shapes: Mapping[str, tuple[int, ...]], channels: tuple[int, ...]) -> str:
    if len(channels) == 1:
        name, shape = next(iter(shapes.items()))
        return f"{channels[0]} channels ({name} has shape {shape}: channels come before the spatial axes)"
    return f"{sum(channels)} channels ({', '.join(f'{name}: {c}' for name, c in zip(shapes, channels))})"
