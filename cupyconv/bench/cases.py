"""What is measured: one convolution as data, its derived sizes, its arrays and the library's call of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from cupyconv.convolution import conv, linmerge
from cupyconv.dtypes import ITEMSIZE, dtype_from_name, is_complex, real_part
from cupyconv.planning.request import METHODS
from cupyconv.settings import options

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


@dataclass(frozen=True)
class Case:
    """One convolution: `channels` of each input, and what `cupyconv.conv` takes.

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

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Case:
        """The case that a results file holds."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: _as_tuple(value) for name, value in record.items() if name in known})

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that there are for it."""
        return METHODS

    @property
    def in_channels(self) -> int:
        return sum(self.channels)

    @property
    def terms(self) -> int:
        """Products in one result."""
        return self.in_channels // self.groups * prod(self.kernel)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return self.padding or ((0, 0),) * len(self.size)

    @property
    def pointwise(self) -> bool:
        """Whether one product of matrices is all there is to do."""
        return self.kernel == (1,) * len(self.size) and self.stride == 1 and not self.padding and self.groups == 1

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(
            (n + sum(pair) - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k, pair in zip(self.size, self.kernel, self.pairs)
        )

    @property
    def flops(self) -> int:
        """Real operations: a multiply-add is 2, of complex numbers 8."""
        products = self.batch * self.out_channels * prod(self.out_size) * self.terms
        return products * (8 if is_complex(self.dtype) else 2)

    @property
    def minimal_bytes(self) -> int:
        """Every input, weight and result once."""
        images = self.in_channels * prod(self.size) + self.out_channels * prod(self.out_size)
        return (self.batch * images + self.out_channels * self.terms) * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        return self.batch * self.out_channels * prod(self.out_size) * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], Any]:
        """The inputs and the weight."""
        lead = int(self.misaligned)
        xs = []
        for number, channels in enumerate(self.channels):
            order = (*self.size, channels) if self.channels_last else (channels, *self.size)
            elements = self.batch * prod(order)
            flat = fill(self.dtype, number * APART, elements + lead)[lead:]
            x = flat.reshape(self.batch, *order)
            xs.append(x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1)) if self.channels_last else x)
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel)
        return xs, fill(self.dtype, len(xs) * APART, prod(shape)).reshape(shape)

    def call(self, xs: list[Any], weight: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The library's function for this case, its arguments and its keywords."""
        if self.kernel == (1,) and self.pointwise:
            return linmerge, (xs, weight[:, :, 0]), {}
        keywords = dict(stride=self.stride, padding=self.pairs, dilation=self.dilation, groups=self.groups)
        return conv, (xs, weight), keywords

    def ours(self, xs: list[Any], weight: Any, method: str = "auto") -> Any:
        """The library's result."""
        function, arguments, keywords = self.call(xs, weight)
        if not self.tf32:
            return function(*arguments, **keywords, method=method)
        with options(allow_tf32=True):
            return function(*arguments, **keywords, method=method)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
