"""The measured operation as data: one convolution, a chain of convolutions, or a gradient of one.

A case knows its sizes, creates its arrays, and builds the library's call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod, sqrt
from typing import Any

import numpy as np

from cupyconv.call.options import options
from cupyconv.ops.conv import conv, linmerge
from cupyconv.ops.conv_chain import ConvLayer, conv_chain
from cupyconv.ops.conv_grad_input import conv_grad_input
from cupyconv.ops.conv_grad_weight import conv_grad_weight
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name, is_complex, real_part
from cupyconv.problem.problems import METHODS

#: Number of normals that all data repeat.  A prime, so that no row or plane of a case begins at the same value as
#: another.
PERIOD = 4_194_301

#: Offset in elements between two arrays of a case.
APART = 52_361

#: Returns an array of a dtype, given its name: a number of `normals`, starting at a given one.
Fill = Callable[[str, int, int], Any]


@lru_cache(maxsize=len(ITEMSIZE))
def normals(dtype: str) -> np.ndarray:
    """Return standard normal values (complex: of unit variance)."""
    rng = np.random.default_rng(0)
    if is_complex(dtype):
        values = np.empty(PERIOD, dtype)
        for part in (values.real, values.imag):
            part[...] = rng.standard_normal(PERIOD, np.dtype(real_part(dtype)).type) * np.sqrt(0.5)
        return values
    drawn = rng.standard_normal(PERIOD, np.float64 if dtype == "float64" else np.float32)
    return drawn.astype(dtype_from_name(dtype), copy=False)


def repeat_normals(dtype: str, first: int, elements: int) -> np.ndarray:
    """Implement `Fill` for NumPy."""
    return np.resize(normals(dtype)[first % PERIOD :], elements)


#: The value of a chain's `fuse` for each of its methods except "auto".
FUSE = {"fused": True, "unfused": False}


class LayerCase:
    """The common base of convolutions and recurrent layers as cases."""

    name: str
    dtype: str
    tf32: bool

    def __str__(self) -> str:
        return self.name

    @property
    def precision(self) -> str:
        """The name of the precision that products are rounded to."""
        return "TF32" if self.tf32 else self.dtype

    @property
    def has_plain_product(self) -> bool:
        """Whether CuPy's matmul computes in this precision."""
        return self.precision not in ("TF32", "bfloat16")

    def named(self, method: str) -> dict[str, Any]:
        """Return the keyword argument that requests a method."""
        return {"method": method}

    @property
    def group(self) -> str:
        """The name of the group over which a mean is computed."""
        raise NotImplementedError

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the library's function for this case, its arguments and its keywords."""
        raise NotImplementedError

    def bound(self, xs: list[Any], weights: list[Any], method: str = "auto", **settings: Any) -> Callable[[], Any]:
        """Return the library's call alone, which is timed."""
        function, arguments, keywords = self.call(xs, weights)
        named = {} if method == "auto" else self.named(method)
        call = partial(function, *arguments, **keywords, **named)
        if self.tf32:
            settings["allow_tf32"] = True
        return partial(_under, settings, call) if settings else call

    def compared(self, returned: Any) -> Any:
        """Return the array that is compared with float64, given the call's result."""
        return returned

    def ours(self, xs: list[Any], weights: list[Any], method: str = "auto") -> Any:
        """Return the library's result."""
        return self.compared(self.bound(xs, weights, method)())


def _under(settings: dict[str, Any], call: Callable[[], Any]) -> Any:
    with options(**settings):
        return call()


@dataclass(frozen=True)
class Case(LayerCase):
    """One convolution: `channels` per input, and the arguments of `cupyconv.conv`.

    For a chain it is the first convolution; `then` has the outputs, kernel, padding and groups of each further one.

    `tf32` allows TF32 for float32 products, for the library and its peers alike.  `misaligned` starts every input one
    element past an aligned address.  `loop` adds the loop over samples, `compiled` adds torch.compile.  `judged` is the
    time that ratios compare: the GPU's ("device") or the time until the call returns ("host").
    """

    name: str
    batch: int
    channels: tuple[int, ...]
    size: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: int = 1
    padding: tuple[tuple[int, int], ...] = ()
    dilation: int = 1
    groups: int = 1
    dtype: str = "float32"
    tf32: bool = False
    channels_last: bool = False
    misaligned: bool = False
    loop: bool = False
    compiled: bool = False
    judged: str = "device"
    then: tuple[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...], int], ...] = ()

    @cached_property  # cached, so that it is not part of the time of layer-by-layer calls
    def layers(self) -> tuple[Case, ...]:
        """All convolutions of a chain, or the case itself if it is no chain."""
        layers = [replace(self, then=())]
        for further in self.then:
            last = layers[-1]
            given: dict[str, Any] = dict(zip(("out_channels", "kernel", "padding", "groups"), further))
            given |= dict(channels=(last.out_channels,), size=last.out_size, stride=1, dilation=1)
            layers.append(replace(last, **given))
        return tuple(layers)

    def named(self, method: str) -> dict[str, Any]:
        return {"fuse": FUSE.get(method, method)} if self.then else super().named(method)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods for this case."""
        return tuple(FUSE) if self.then else METHODS

    @property
    def group(self) -> str:
        if self.judged == "host":
            return "small calls"
        if self.then:
            return "chains"
        if self.in_channels == self.out_channels == 1:
            return "filters"
        return "merge" if self.is_linmerge else "convolutions"

    @property
    def in_channels(self) -> int:
        return sum(self.channels)

    @property
    def fan_in(self) -> int:
        """Number of weights per output channel of the first layer."""
        return self.in_channels // self.groups * prod(self.kernel)

    @property
    def terms(self) -> int:
        """Number of products per result element of the first layer."""
        return self.fan_in

    @property
    def magnitude(self) -> float:
        """Root mean square of the results for standard normal values: in a chain, the product over the layers."""
        return sqrt(prod(layer.terms for layer in self.layers))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return self.padding or ((0, 0),) * len(self.size)

    @property
    def pointwise(self) -> bool:
        """Whether the case is a single matrix product."""
        simple = self.stride == 1 and not self.padding and self.groups == 1 and not self.then
        return self.kernel == (1,) * len(self.size) and simple

    @property
    def is_linmerge(self) -> bool:
        """Whether `linmerge` computes this case."""
        return self.kernel == (1,) and self.pointwise

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(
            (n + sum(pair) - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k, pair in zip(self.size, self.kernel, self.pairs)
        )

    @property
    def flops(self) -> int:
        """Number of real operations: a multiply-add is 2, or 8 for complex numbers."""
        products = sum(c.batch * c.out_channels * prod(c.out_size) * c.fan_in for c in self.layers)
        return products * (8 if is_complex(self.dtype) else 2)

    @property
    def minimal_bytes(self) -> int:
        """Bytes of every input, weight and result, counted once, without those between layers."""
        weights = sum(layer.out_channels * layer.fan_in for layer in self.layers)
        return (self.batch * self.in_channels * prod(self.size) + weights) * ITEMSIZE[self.dtype] + self.result_bytes

    @property
    def result_bytes(self) -> int:
        last = self.layers[-1]
        return last.batch * last.out_channels * prod(last.out_size) * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], list[Any]]:
        """Return the inputs, and a weight per layer."""
        lead = int(self.misaligned)
        xs = []
        for number, channels in enumerate(self.channels):
            order = (*self.size, channels) if self.channels_last else (channels, *self.size)
            elements = self.batch * prod(order)
            flat = fill(self.dtype, number * APART, elements + lead)[lead:]
            x = flat.reshape(self.batch, *order)
            xs.append(x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1)) if self.channels_last else x)
        weights = []
        for number, layer in enumerate(self.layers, start=len(xs)):
            shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
            weights.append(fill(self.dtype, number * APART, prod(shape)).reshape(shape))
        return xs, weights

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        if self.is_linmerge:
            return linmerge, (xs, weights[0][:, :, 0]), {}
        if self.then:
            layers = [ConvLayer(w, **layer.settings) for w, layer in zip(weights, self.layers)]
            return conv_chain, (xs, layers), {}
        return conv, (xs, weights[0]), self.settings

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the library's functions for the first layer."""
        return dict(stride=self.stride, padding=self.pairs, dilation=self.dilation, groups=self.groups)

    def layer_by_layer(self, xs: list[Any], weights: list[Any]) -> Any:
        """Compute a chain with one call of `conv` per layer."""
        for weight, layer in zip(weights, self.layers):
            xs = [conv(xs, weight, **layer.settings)]
        return xs[0]


@dataclass(frozen=True)
class GradientCase(Case):
    """The gradient of a loss with respect to the input or the weight of a convolution.  See `Case` for other fields.

    The incoming gradient is the first of the inputs.
    """

    of: str = "input"

    @property
    def group(self) -> str:
        return f"{self.of} gradients"

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        return [(self.batch, channels, *self.size) for channels in self.channels]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def result_elements(self) -> int:
        return sum(map(prod, self.input_shapes)) if self.of == "input" else prod(self.weight_shape)

    @property
    def terms(self) -> int:
        return max(1, self.flops // 2 // self.result_elements)

    @property
    def result_bytes(self) -> int:
        return self.result_elements * ITEMSIZE[self.dtype]

    @property
    def minimal_bytes(self) -> int:
        arriving = self.batch * self.out_channels * prod(self.out_size)
        return (arriving + sum(map(prod, self.input_shapes)) + prod(self.weight_shape)) * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], list[Any]]:
        xs, weights = super().arrays(fill)
        shape = (self.batch, self.out_channels, *self.out_size)
        arriving = fill(self.dtype, (len(xs) + 1) * APART, prod(shape)).reshape(shape)
        return ([arriving], weights) if self.of == "input" else ([arriving, *xs], [])

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        if self.of == "input":
            return conv_grad_input, (xs[0], weights[0], self.input_shapes), self.settings
        return conv_grad_weight, (xs[0], xs[1:], self.kernel), self.settings

    def compared(self, returned: Any) -> Any:
        """Return the gradients of merged inputs, a list, concatenated.  CuPy arrays remain CuPy arrays."""
        return np.concatenate(returned, axis=1) if isinstance(returned, list) else returned


@dataclass(frozen=True)
class LargeKernelCase(Case):
    """A convolution with stride 1 that all participants compute by transforms.  See `Case` for the fields."""

    @property
    def group(self) -> str:
        return "large kernels"
