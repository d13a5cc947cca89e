"""Whole convolution problems for hypothesis, and arrays in every layout that a caller may pass.

`conv_cases()` draws a `ConvCase`: all arguments of one valid call as plain ints and strings.  Its repr can be pasted
into a test.  It provides

    arrays = case.arrays(integer=True)                        # plain NumPy arrays, named as conv's arguments
    views = case.views(arrays, to_device, xp)                 # the same values on a device, in the case's layouts
    expected = reference.conv(**arrays, **case.parameters)
    actual = cupyconv.conv(**views, **case.parameters, out=case.new_out(to_device, xp))
    assert_exact(actual, expected, case.result_dtype)

For random data, arrays(integer=False), the last line is

    assert_close(actual, expected, case.result_dtype, case.terms, magnitude=case.magnitude(arrays))

`transposed_cases()` and `pool_cases()` do the same for `conv_transpose` and for pooling; case.gradient() is an array
like the result.  `to_device` copies a C-ordered NumPy array; `xp` is the module (numpy, cupy) of the arrays it returns.

A layout is a base array that contains the values, and the slicing that extracts them (`embed`).  The elements between
the values are NaN: a read outside a view shows in the result, and a write outside it shows in the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import assume, settings
from hypothesis import strategies as st

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
REAL_DTYPES = DTYPES[:4]
PADDING_MODES = ("constant", "reflect", "symmetric", "edge", "wrap")
# First the activations that map integers to values that are exact in every dtype, then all that `conv` accepts.
EXACT_ACTIVATIONS = (None, "relu", "relu6", ("leaky_relu", 0.25), ("clip", -3, 5))
ACTIVATIONS = (
    *EXACT_ACTIVATIONS,
    "leaky_relu",
    "elu",
    ("elu", 0.5),
    "sigmoid",
    "hard_sigmoid",
    ("hard_sigmoid", 0.3, 0.4),
    "hardswish",
    "tanh",
    "gelu",
    "gelu_tanh",
    "silu",
    "mish",
    "softplus",
)
# Bounds that keep one case cheap for the oracle and its integer results exact in bfloat16.
MAX_TAPS, MAX_TERMS, MAX_PIXELS, MAX_ORACLE_STEPS = 36, 192, 100, 6000


def share_of_examples(share: float) -> settings:
    """Return settings with a share of the profile's examples, for tests whose examples cost more or less."""
    return settings(max_examples=math.ceil(share * settings.default.max_examples))


# --- layouts --------------------------------------------------------------------------------------------------

View = Callable[[Any], Any]  # slicing of a base array on any device


def embed(array: np.ndarray, layout: str, *, channel_axis: int = 1) -> tuple[np.ndarray, View]:
    """Return a C-ordered base, NaN except for the values of `array`, and a slicing with view(base) equal to `array`."""
    shape = array.shape
    if layout == "c_order":
        base, view = np.empty(shape, array.dtype), lambda b: b[...]
    elif layout == "unaligned":  # contiguous, one element after the start of the allocation
        base, view = nan_filled((array.size + 1,), array.dtype), lambda b: b[1:].reshape(shape)
    elif layout == "window":  # cut out of the middle of a larger array
        base = nan_filled(tuple(size + 3 for size in shape), array.dtype)
        view = cut(tuple(slice(1, 1 + size) for size in shape))
    elif layout == "stepped":  # every second element of every axis
        base, view = nan_filled(tuple(2 * size for size in shape), array.dtype), cut((slice(1, None, 2),) * array.ndim)
    elif layout == "reversed":
        base, view = np.empty(shape, array.dtype), cut((slice(None, None, -1),) * array.ndim)
    elif layout == "fortran":
        base, view = np.empty(shape[::-1], array.dtype), lambda b: b.transpose()
    elif layout == "channels_last":
        base = np.empty(moved_last(shape, channel_axis), array.dtype)
        view = channels_back(array.ndim, channel_axis)
    elif layout == "channels_last_window":  # some channels of a wider channels-last image
        *others, channels = moved_last(shape, channel_axis)
        base = nan_filled((*others, channels + 3), array.dtype)
        view = channels_back(array.ndim, channel_axis, slice(2, 2 + channels))
    else:
        raise ValueError(f"unknown layout {layout!r}")
    view(base)[...] = array
    return base, view


def with_layout(
    array: np.ndarray, layout: str, to_device: View = np.array, xp: ModuleType = np, *, channel_axis: int = 1
) -> Any:
    """Return `array`'s values on the device, as a view with this layout.

    For a broadcast layout the values must be constant along its axis (`constant_where_broadcast`).
    """
    axis = broadcast_axis(layout, array.ndim, channel_axis)
    if axis is None:
        base, view = embed(array, layout, channel_axis=channel_axis)
        return view(to_device(base))
    single = to_device(np.ascontiguousarray(array[along(axis, slice(0, 1))]))
    keep_class = {"subok": True} if xp is np else {}
    return xp.broadcast_to(single, array.shape, **keep_class)


def constant_where_broadcast(array: np.ndarray, layout: str, *, channel_axis: int = 1) -> np.ndarray:
    """Return the nearest array that this layout can hold: unchanged, unless the layout has a stride of 0."""
    axis = broadcast_axis(layout, array.ndim, channel_axis)
    return array if axis is None else np.repeat(array[along(axis, slice(0, 1))], array.shape[axis], axis)


def broadcast_axis(layout: str, ndim: int, channel_axis: int) -> int | None:
    return {"broadcast_first": 0, "broadcast_channels": channel_axis, "broadcast_last": ndim - 1}.get(layout)


def along(axis: int, index: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, index)


def cut(index: tuple[slice, ...]) -> View:
    return lambda base: base[index]


def moved_last(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def channels_back(ndim: int, channel_axis: int, channels: slice = slice(None)) -> View:
    """Return the slicing that undoes `moved_last` on an array, and selects some of its channels."""
    axes = [*range(ndim - 1)]
    axes.insert(channel_axis, ndim - 1)
    return lambda base: base[..., channels].transpose(axes)


def nan_filled(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


OUT_LAYOUTS = (
    "c_order", "unaligned", "window", "stepped", "reversed", "fortran", "channels_last", "channels_last_window",
)  # fmt: skip
LAYOUTS = (*OUT_LAYOUTS, "broadcast_first", "broadcast_channels", "broadcast_last")

# --- cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class ConvCase:
    """One valid call of `conv`.  `channels` has one entry per input; with `bare_x`, x is an array instead of a list."""

    batch: int | None = 1  # None: there is no batch axis
    channels: tuple[int, ...] = (1,)
    out_channels: int = 1
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: Any = 0
    padding_mode: str = "constant"
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    activation: str | tuple[Any, ...] | None = None
    bias: bool = False
    residual: bool = False
    bare_x: bool = False
    dtype: str = "float32"
    weight_dtype: str = ""  # "": same as dtype
    layouts: tuple[str, ...] = ()  # one per input; (): all in C order
    weight_layout: str = "c_order"
    residual_layout: str = "c_order"
    out_layout: str | None = None  # None: no out is given
    seed: int = 0

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        shown = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
        return f"{type(self).__name__}({shown})"

    @property
    def parameters(self) -> dict[str, Any]:
        """conv's keywords that are not arrays."""
        names = ("stride", "padding", "padding_mode", "dilation", "groups", "activation")
        return {name: getattr(self, name) for name in names}

    @property
    def rank(self) -> int:
        return len(self.spatial)

    @property
    def channel_axis(self) -> int:
        return 0 if self.batch is None else 1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, sum(self.channels) // self.groups, *self.kernel)

    @property
    def terms(self) -> int:
        """Products in one result."""
        return sum(self.channels) // self.groups * math.prod(self.kernel)

    @property
    def result_dtype(self) -> np.dtype:
        return np.result_type(as_dtype(self.dtype), as_dtype(self.weight_dtype or self.dtype))

    @property
    def padding_pairs(self) -> reference.Pairs:
        stride, dilation = reference.per_axis(self.stride, self.rank), reference.per_axis(self.dilation, self.rank)
        return reference.padding_pairs(self.padding, self.spatial, self.kernel, stride, dilation)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        stride, dilation = reference.per_axis(self.stride, self.rank), reference.per_axis(self.dilation, self.rank)
        return reference.output_shape(self.spatial, self.kernel, self.padding_pairs, stride, dilation)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self._batch_shape, self.out_channels, *self.out_spatial)

    @property
    def _batch_shape(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    def arrays(self, *, integer: bool = True) -> dict[str, Any]:
        """Return x (a list, or one array), weight, bias and residual (None if absent), C-ordered, from the seed.

        Integers are so small that every result, and every partial sum, is exact in the dtype of the result.
        """
        generator = np.random.default_rng(self.seed)
        largest = self._largest_integer() if integer else 0

        def values(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return drawn(generator, shape, dtype, largest if integer else None)

        x_dtype, weight_dtype = as_dtype(self.dtype), as_dtype(self.weight_dtype or self.dtype)
        xs = [
            constant_where_broadcast(
                values((*self._batch_shape, channels, *self.spatial), x_dtype), layout, channel_axis=self.channel_axis
            )
            for channels, layout in zip(self.channels, self._input_layouts)
        ]
        weight = values(self.weight_shape, weight_dtype)
        residual = values(self.out_shape, self.result_dtype) if self.residual else None
        return {
            "x": xs[0] if self.bare_x else xs,
            "weight": constant_where_broadcast(weight, self.weight_layout),
            "bias": values((self.out_channels,), self.result_dtype) if self.bias else None,
            "residual": None
            if residual is None
            else constant_where_broadcast(residual, self.residual_layout, channel_axis=self.channel_axis),
        }

    def gradient(self, *, integer: bool = True, dtype: str = "") -> np.ndarray:
        """Return an array like the result (or of another dtype) for the residual's layout, independent of `arrays`."""
        generator = np.random.default_rng((self.seed, 1))
        values = drawn(generator, self.out_shape, as_dtype(dtype or self.result_dtype.name), 3 if integer else None)
        return constant_where_broadcast(values, self.residual_layout, channel_axis=self.channel_axis)

    def views(self, arrays: dict[str, Any], to_device: View = np.array, xp: ModuleType = np) -> dict[str, Any]:
        """Return the arrays on the device, each in its layout."""
        xs = [
            with_layout(x, layout, to_device, xp, channel_axis=self.channel_axis)
            for x, layout in zip(reference.sequence(arrays["x"]), self._input_layouts)
        ]
        bias, residual = arrays["bias"], arrays["residual"]
        return {
            "x": xs[0] if self.bare_x else xs,
            "weight": with_layout(arrays["weight"], self.weight_layout, to_device, xp),
            "bias": None if bias is None else to_device(bias),
            "residual": None
            if residual is None
            else with_layout(residual, self.residual_layout, to_device, xp, channel_axis=self.channel_axis),
        }

    def magnitude(self, arrays: dict[str, Any]) -> np.ndarray:
        """Return M of `tolerance`: sum |x| |w| + |bias| + |residual|, + 1 for an activation."""
        absolute = {name: None if array is None else absolute_values(array) for name, array in arrays.items()}
        return reference.conv(**absolute, **{**self.parameters, "activation": None}) + (self.activation is not None)

    def new_out(self, to_device: View = np.array, xp: ModuleType = np) -> Any:
        """Return NaN in the shape, dtype and layout of out; None if the case has no out."""
        if self.out_layout is None:
            return None
        nans = nan_filled(self.out_shape, self.result_dtype)
        return with_layout(nans, self.out_layout, to_device, xp, channel_axis=self.channel_axis)

    @property
    def _input_layouts(self) -> tuple[str, ...]:
        return self.layouts or ("c_order",) * len(self.channels)

    def _largest_integer(self) -> int:
        """Return the largest value up to 4 for which every sum of `terms` products, bias and residual is exact."""
        exact_up_to = {"float16": 2**11, "bfloat16": 2**8}.get(self.result_dtype.name, 2**20)
        parts = 2 if self.result_dtype.kind == "c" else 1  # (a + bi)(c + di) has two products in each part
        # A quarter of an integer (leaky_relu) is as exact as the integer.
        fits = [a for a in (1, 2, 3, 4) if parts * self.terms * a * a + 2 * a <= exact_up_to]
        return fits[-1]


@dataclass(frozen=True, kw_only=True, repr=False)
class TransposedCase(ConvCase):
    """One valid call of `conv_transpose`: it differs from `conv` in the weight's axes and the sizes of the result."""

    output_padding: int | tuple[int, ...] = 0
    output_shape: tuple[int, ...] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        names = ("stride", "padding", "output_padding", "output_shape", "dilation", "groups", "activation")
        return {name: getattr(self, name) for name in names}

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (sum(self.channels), self.out_channels // self.groups, *self.kernel)

    @property
    def window(self) -> tuple[list[int], list[int]]:
        """Start of the result on the canvas, and its sizes."""
        names = ("padding", "output_padding", "output_shape")
        return reference_gradients.transposed_window(
            self.spatial, self.kernel, reference.per_axis(self.stride, self.rank),
            reference.per_axis(self.dilation, self.rank), **{name: getattr(self, name) for name in names},
        )  # fmt: skip

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(self.window[1])

    def arrays(self, *, integer: bool = True) -> dict[str, Any]:
        return without_residual(super().arrays(integer=integer))

    def views(self, arrays: dict[str, Any], to_device: View = np.array, xp: ModuleType = np) -> dict[str, Any]:
        return without_residual(super().views({**arrays, "residual": None}, to_device, xp))

    def magnitude(self, arrays: dict[str, Any]) -> np.ndarray:
        absolute = {name: None if array is None else absolute_values(array) for name, array in arrays.items()}
        parameters = {**self.parameters, "activation": None}
        return reference_gradients.conv_transpose(**absolute, **parameters) + (self.activation is not None)


def without_residual(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "residual"}


@dataclass(frozen=True, kw_only=True)
class PoolCase:
    """One valid call of `max_pool`, or of `avg_pool`."""

    batch: int | None = 1
    channels: tuple[int, ...] = (1,)
    spatial: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    stride: int | tuple[int, ...] | None = None
    padding: Any = 0
    dilation: int | tuple[int, ...] = 1
    ceil_mode: bool = False
    bare_x: bool = False
    dtype: str = "float32"
    layouts: tuple[str, ...]
    out_layout: str | None = None
    seed: int = 0

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kernel_shape", "stride", "padding", "dilation", "ceil_mode")}

    @property
    def channel_axis(self) -> int:
        return 0 if self.batch is None else 1

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return reference_gradients.pooling_windows(self.spatial, *self.parameters.values())[1]

    def arrays(self, *, integer: bool = True) -> dict[str, Any]:
        """Return x; with integers, nearly every window has two equal maxima."""
        generator, dtype = np.random.default_rng(self.seed), as_dtype(self.dtype)
        xs = [
            constant_where_broadcast(
                drawn(generator, shape, dtype, 2 if integer else None), layout, channel_axis=self.channel_axis
            )
            for shape, layout in zip(self._shapes(self.spatial), self.layouts)
        ]
        return {"x": xs[0] if self.bare_x else xs}

    def gradient(self, *, integer: bool = True) -> Any:
        """Return arrays like the result: a list, or one array."""
        generator, dtype = np.random.default_rng((self.seed, 1)), as_dtype(self.dtype)
        grads = [drawn(generator, shape, dtype, 3 if integer else None) for shape in self._shapes(self.out_spatial)]
        return grads[0] if self.bare_x else grads

    def views(self, arrays: dict[str, Any], to_device: View = np.array, xp: ModuleType = np) -> dict[str, Any]:
        xs = [
            with_layout(x, layout, to_device, xp, channel_axis=self.channel_axis)
            for x, layout in zip(reference.sequence(arrays["x"]), self.layouts)
        ]
        return {"x": xs[0] if self.bare_x else xs}

    def new_out(self, to_device: View = np.array, xp: ModuleType = np) -> Any:
        """Return NaN in the form of the result; None if the case has no out."""
        if self.out_layout is None:
            return None
        outs = [
            with_layout(
                nan_filled(shape, as_dtype(self.dtype)), self.out_layout, to_device, xp, channel_axis=self.channel_axis
            )
            for shape in self._shapes(self.out_spatial)
        ]
        return outs[0] if self.bare_x else outs

    def _shapes(self, spatial: tuple[int, ...]) -> list[tuple[int, ...]]:
        batch = () if self.batch is None else (self.batch,)
        return [(*batch, channels, *spatial) for channels in self.channels]


def drawn(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, largest: int | None = None
) -> np.ndarray:
    """Draw integers from -`largest` to `largest`; without it, standard normal numbers (complex: unit variance)."""

    def draw() -> np.ndarray:
        if largest is None:
            return generator.standard_normal(shape)
        return generator.integers(-largest, largest + 1, shape)

    if dtype.kind != "c":
        return draw().astype(dtype)
    both = draw() + 1j * draw()
    return (both / math.sqrt(2) if largest is None else both).astype(dtype)


def absolute_values(x: Any) -> Any:
    return [np.abs(reference.wide(array)) for array in x] if isinstance(x, list) else np.abs(reference.wide(x))


def as_dtype(name: str) -> np.dtype:
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


@st.composite
def conv_cases(
    draw: st.DrawFn,
    *,
    ranks: tuple[int, ...] = (1, 2, 3),
    dtypes: tuple[str, ...] = DTYPES,
    activations: tuple[str | tuple[Any, ...] | None, ...] = EXACT_ACTIVATIONS,
    layouts: tuple[str, ...] = LAYOUTS,
    mixed_dtypes: bool = True,
) -> ConvCase:
    """Draw any valid call.  With the default activations, integer arrays have exact results."""
    rank = draw(st.sampled_from(ranks))
    kernel = tuple(draw(bounded_sizes(rank, 4, MAX_TAPS)))
    stride, dilation = draw(per_axis_ints(rank, 1, 3)), draw(per_axis_ints(rank, 1, 3))
    reaches = [d * (k - 1) for d, k in zip(reference.per_axis(dilation, rank), kernel)]
    padding = draw(paddings(rank))
    spatial = tuple(draw(spatial_sizes(reaches, padding)))

    groups = draw(st.integers(1, 4))
    most_channels = max(1, min(4, MAX_TERMS // math.prod(kernel)))
    depthwise = draw(st.booleans())
    channels_per_group = 1 if depthwise else draw(st.integers(1, most_channels))
    channels = tuple(draw(channel_splits(groups * channels_per_group)))

    dtype = draw(st.sampled_from(dtypes))
    weight_dtype = draw(st.sampled_from(("", *partners(dtype, dtypes)))) if mixed_dtypes else ""
    is_complex = "complex" in dtype + weight_dtype
    inner_layouts = tuple(layout for layout in layouts if layout in OUT_LAYOUTS)
    case = ConvCase(
        batch=draw(st.sampled_from((1, 2, 3, None, 0))),
        channels=channels,
        out_channels=groups * draw(st.integers(1, 3)),
        spatial=spatial,
        kernel=kernel,
        stride=stride,
        padding=padding,
        padding_mode=draw(padding_modes(padding, kernel)),
        dilation=dilation,
        groups=groups,
        activation=None if is_complex else draw(st.sampled_from(activations)),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        bare_x=len(channels) == 1 and draw(st.booleans()),
        dtype=dtype,
        weight_dtype=weight_dtype,
        layouts=tuple(draw(st.sampled_from(layouts)) for _ in channels),
        weight_layout=draw(st.sampled_from(layouts)),
        residual_layout=draw(st.sampled_from(layouts)),
        out_layout=draw(st.sampled_from((None, *inner_layouts))),
        seed=draw(st.integers(0, 2**16)),
    )
    assume(math.prod(case.out_spatial) * math.prod(kernel) <= MAX_ORACLE_STEPS)
    return case


@st.composite
def transposed_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    activations: tuple[str | tuple[Any, ...] | None, ...] = EXACT_ACTIVATIONS,
    layouts: tuple[str, ...] = LAYOUTS,
    mixed_dtypes: bool = True,
) -> TransposedCase:
    """Draw any valid call of `conv_transpose`: a case of `conv_cases` with other sizes."""
    like = draw(conv_cases(dtypes=dtypes, activations=activations, layouts=layouts, mixed_dtypes=mixed_dtypes))
    spatial = tuple(draw(bounded_sizes(like.rank, 6, 40)))
    stride, dilation = reference.per_axis(like.stride, like.rank), reference.per_axis(like.dilation, like.rank)
    covered = [(size - 1) * s + d * (k - 1) + 1 for size, s, d, k in zip(spatial, stride, dilation, like.kernel)]
    sizes: dict[str, Any] = {}
    form = draw(st.sampled_from(("numbers", "pairs", "valid", "same", "output_shape")))
    if form in ("numbers", "pairs", "valid") or draw(st.booleans()):
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
        sizes["output_padding"] = draw(st.sampled_from((0, extra[0] if len(set(extra)) == 1 else extra, extra)))
    if form == "valid":
        sizes["padding"] = "valid"
    elif form == "numbers":
        amounts = tuple(draw(st.integers(0, min(4, (full - 1) // 2))) for full in covered)
        sizes["padding"] = draw(st.sampled_from((amounts, min(amounts))))
    elif form == "pairs":
        befores = [draw(st.integers(0, min(4, full - 1))) for full in covered]
        sizes["padding"] = tuple(
            (before, draw(st.integers(0, min(4, full - 1 - before)))) for full, before in zip(covered, befores)
        )
    elif form == "same":
        sizes["padding"] = draw(st.sampled_from(("same", "same_lower")))
    else:
        sizes["padding"] = draw(st.sampled_from((0, "valid", "same", "same_lower")))
        sizes["output_shape"] = tuple(draw(st.integers(max(1, full - 5), full + 2)) for full in covered)
    names = (
        "batch", "channels", "out_channels", "kernel", "stride", "dilation", "groups", "activation", "bias", "bare_x",
        "dtype", "weight_dtype", "layouts", "weight_layout",
        "residual_layout", "out_layout", "seed",
    )  # fmt: skip
    case = TransposedCase(spatial=spatial, **sizes, **{name: getattr(like, name) for name in names})
    assume(math.prod(spatial) * math.prod(case.kernel) <= MAX_ORACLE_STEPS)
    return case


@st.composite
def pool_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = REAL_DTYPES,
    layouts: tuple[str, ...] = LAYOUTS,
    ceil_modes: tuple[bool, ...] = (False, True),
) -> PoolCase:
    """Draw any valid call of `max_pool`, or of `avg_pool`."""
    rank = draw(st.integers(1, 3))
    kernel = tuple(draw(bounded_sizes(rank, 4, MAX_TAPS)))
    dilation, padding = draw(per_axis_ints(rank, 1, 3)), draw(paddings(rank))
    reaches = [d * (k - 1) for d, k in zip(reference.per_axis(dilation, rank), kernel)]
    channels = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    inner_layouts = tuple(layout for layout in layouts if layout in OUT_LAYOUTS)
    return PoolCase(
        batch=draw(st.sampled_from((1, 2, 3, None, 0))),
        channels=channels,
        spatial=tuple(draw(spatial_sizes(reaches, padding))),
        kernel_shape=kernel,
        stride=draw(st.one_of(st.none(), per_axis_ints(rank, 1, 3))),
        padding=padding,
        dilation=dilation,
        ceil_mode=draw(st.sampled_from(ceil_modes)),
        bare_x=len(channels) == 1 and draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        layouts=tuple(draw(st.sampled_from(layouts)) for _ in channels),
        out_layout=draw(st.sampled_from((None, *inner_layouts))),
        seed=draw(st.integers(0, 2**16)),
    )


def partners(dtype: str, allowed: tuple[str, ...]) -> list[str]:
    """Return other dtypes that a weight may have with x: the other kind of the same precision, or another float."""
    pairs = (("float32", "complex64"), ("float64", "complex128"), ("float32", "float64"), ("float16", "float32"))
    others = [b if dtype == a else a for a, b in pairs if dtype in (a, b)]
    return [other for other in others if other in allowed]


@st.composite
def bounded_sizes(draw: st.DrawFn, rank: int, largest: int, product: int) -> list[int]:
    """Draw `rank` ints from 1 to `largest` whose product is at most `product`; no axis is favored."""
    sizes = [1] * rank
    for axis in draw(st.permutations(range(rank))):
        sizes[axis] = draw(st.integers(1, max(1, min(largest, product // math.prod(sizes)))))
    return sizes


@st.composite
def per_axis_ints(draw: st.DrawFn, rank: int, smallest: int, largest: int) -> int | tuple[int, ...]:
    """Draw one int for all axes, or one per axis."""
    one = st.integers(smallest, largest)
    return draw(st.one_of(one, st.tuples(*[one] * rank)))


def paddings(rank: int) -> st.SearchStrategy[Any]:
    """Draw every form of padding; amounts may exceed the size of a short axis, so that np.pad starts over."""
    amount = st.integers(0, {1: 5, 2: 3, 3: 2}[rank])
    pair = st.tuples(amount, amount)
    amounts = st.one_of(amount, st.tuples(*[amount] * rank), st.tuples(*[pair] * rank))
    names = ("valid", "same", "same_lower", "full", *(("causal",) if rank == 1 else ()))
    return st.booleans().flatmap(lambda named: st.sampled_from(names) if named else amounts)


def padding_modes(padding: Any, kernel: tuple[int, ...]) -> st.SearchStrategy[str]:
    """Draw a padding mode; with a padding of 0 only "constant", because a mode without effect is refused."""
    idle = isinstance(padding, int) and padding == 0 and max(kernel) > 1
    return st.just("constant") if idle else st.sampled_from(PADDING_MODES)


@st.composite
def spatial_sizes(draw: st.DrawFn, reaches: list[int], padding: Any) -> list[int]:
    """Draw sizes from 1 to 9 (larger only if the kernel requires it) into which every kernel fits after padding."""
    rank = len(reaches)
    if isinstance(padding, str) and padding != "valid":  # all others pad until the kernel fits
        smallest = [1] * rank
    else:
        pairs = reference.padding_pairs(padding, [1] * rank, [1] * rank, [1] * rank, [1] * rank)
        smallest = [max(1, reach + 1 - before - after) for reach, (before, after) in zip(reaches, pairs)]
    sizes = list(smallest)
    for axis in draw(st.permutations(range(rank))):
        others = math.prod(sizes) // sizes[axis]
        sizes[axis] = draw(st.integers(smallest[axis], max(smallest[axis], min(9, MAX_PIXELS // others))))
    return sizes


@st.composite
def channel_splits(draw: st.DrawFn, total: int) -> list[int]:
    """Split `total` channels over 1 to 5 inputs, unevenly and regardless of groups; sometimes an input has none."""
    inputs = draw(st.integers(1, min(5, total)))
    cuts = draw(st.permutations(range(1, total)))[: inputs - 1]
    channels = [end - start for start, end in pairwise((0, *sorted(cuts), total))]
    if len(channels) < 5 and draw(st.integers(0, 9)) == 9:
        channels.insert(draw(st.integers(0, len(channels))), 0)
    return channels
