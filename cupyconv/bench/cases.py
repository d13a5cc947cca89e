"""What is measured: one convolution or a chain of them as data, its derived sizes, its arrays and the library's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from typing import Any

import numpy as np

from cupyconv.call.options import options
from cupyconv.ops.conv import conv, linmerge
from cupyconv.ops.conv_chain import ConvLayer, conv_chain
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name, is_complex, real_part
from cupyconv.problem.problems import METHODS

#: Normals that all data repeat.  A prime, so that no row or plane of a case begins where another began.
PERIOD = 4_194_301

#: Elements between the places where two arrays of a case begin to read them.
APART = 52_361

#: Gives an array of a dtype by its name: so many of `normals`, from the given one on.
Fill = Callable[[str, int, int], Any]


@lru_cache(maxsize=len(ITEMSIZE))
def normals(dtype: str) -> np.ndarray:
    """Standard normal values (complex: of unit variance)."""
    rng = np.random.default_rng(0)
    if is_complex(dtype):
        values = np.empty(PERIOD, dtype)
        for part in (values.real, values.imag):
            part[...] = rng.standard_normal(PERIOD, np.dtype(real_part(dtype)).type) * np.sqrt(0.5)
        return values
    drawn = rng.standard_normal(PERIOD, np.float64 if dtype == "float64" else np.float32)
    return drawn.astype(dtype_from_name(dtype), copy=False)


def repeat_normals(dtype: str, first: int, elements: int) -> np.ndarray:
    """`Fill` for NumPy."""
    return np.resize(normals(dtype)[first % PERIOD :], elements)


#: What a chain's `fuse` is for each of its methods but "auto".
FUSE = {"fused": True, "unfused": False}


class LayerCase:
    """What convolutions and recurrent layers have in common as cases."""

    name: str
    dtype: str
    tf32: bool

    def __str__(self) -> str:
        return self.name

    @property
    def precision(self) -> str:
        """The name of what products are rounded to."""
        return "TF32" if self.tf32 else self.dtype

    @property
    def has_plain_product(self) -> bool:
        """Whether CuPy's matmul computes in this precision."""
        return self.precision not in ("TF32", "bfloat16")

    def named(self, method: str) -> dict[str, Any]:
        """The keyword that asks for a method."""
        return {"method": method}

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The library's function for this case, its arguments and its keywords."""
        raise NotImplementedError

    def ours(self, xs: list[Any], weights: list[Any], method: str = "auto") -> Any:
        """The library's result."""
        function, arguments, keywords = self.call(xs, weights)
        if not self.tf32:
            return function(*arguments, **keywords, **self.named(method))
        with options(allow_tf32=True):
            return function(*arguments, **keywords, **self.named(method))


@dataclass(frozen=True)
class Case(LayerCase):
    """One convolution: `channels` of each input, and what `cupyconv.conv` takes.

    In a chain it is the first; of every further one, `then` has outputs, kernel, padding and groups.

    `tf32` allows float32 products in TF32, to the library and to its peers alike.  `misaligned` begins every
    input one element past an aligned address.  `loop` adds the loop over samples, `compiled` torch.compile;
    `judged` is the time that ratios compare: the GPU's ("device") or that of the call's return ("host").
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

    @property
    def layers(self) -> tuple[Case, ...]:
        """Every convolution of a chain; the case itself where it is none."""
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
        """Those that there are for it."""
        return tuple(FUSE) if self.then else METHODS

    @property
    def in_channels(self) -> int:
        return sum(self.channels)

    @property
    def terms(self) -> int:
        """Products in one result, of the first layer."""
        return self.in_channels // self.groups * prod(self.kernel)

    @property
    def magnitude(self) -> float:
        """Root mean square of the results, of standard normal values: in a chain the product of the layers'."""
        return sqrt(prod(layer.terms for layer in self.layers))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return self.padding or ((0, 0),) * len(self.size)

    @property
    def pointwise(self) -> bool:
        """Whether one product of matrices is all there is to do."""
        simple = self.stride == 1 and not self.padding and self.groups == 1 and not self.then
        return self.kernel == (1,) * len(self.size) and simple

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(
            (n + sum(pair) - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k, pair in zip(self.size, self.kernel, self.pairs)
        )

    @property
    def flops(self) -> int:
        """Real operations: a multiply-add is 2, of complex numbers 8."""
        products = sum(c.batch * c.out_channels * prod(c.out_size) * c.terms for c in self.layers)
        return products * (8 if is_complex(self.dtype) else 2)

    @property
    def minimal_bytes(self) -> int:
        """Every input, weight and result once; none between layers."""
        weights = sum(layer.out_channels * layer.terms for layer in self.layers)
        return (self.batch * self.in_channels * prod(self.size) + weights) * ITEMSIZE[self.dtype] + self.result_bytes

    @property
    def result_bytes(self) -> int:
        last = self.layers[-1]
        return last.batch * last.out_channels * prod(last.out_size) * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], list[Any]]:
        """The inputs, and a weight for each layer."""
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
        if self.kernel == (1,) and self.pointwise:
            return linmerge, (xs, weights[0][:, :, 0]), {}
        settings: list[dict[str, Any]] = [
            dict(stride=layer.stride, padding=layer.pairs, dilation=layer.dilation, groups=layer.groups)
            for layer in self.layers
        ]
        if self.then:
            return conv_chain, (xs, [ConvLayer(w, **given) for w, given in zip(weights, settings)]), {}
        return conv, (xs, weights[0]), settings[0]
