"""Array metadata for planning: dtypes by name, and memory layouts as ints.

Below the public functions, a dtype is represented by its name.  Plans are therefore printable and hashable, and
bfloat16 needs no package until an array of it appears.  A layout is represented by strides.  An `Operand` is an image
`(n, c, d, h, w)` with element strides; channels-last, sliced, reversed and broadcast views differ only in their
strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}

#: Item sizes of lengths, which are step counts and never operands of the computation.
COUNT_ITEMSIZE = {"int32": 4, "int64": 8}

_SIZES = ITEMSIZE | COUNT_ITEMSIZE

_REAL_PART = {"complex64": "float32", "complex128": "float64"}


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str:
    """The dtype's name, without its byte order.  It is cached because NumPy computes it on every access."""
    return dtype.name


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Refuse a dtype that the library does not compute in; the message names the argument and a conversion."""
    if dtype_name(dtype) in ITEMSIZE:
        return
    hint = " (convert it first: array.astype(numpy.float32))" if dtype.kind in "biu" else ""
    raise TypeError(f"{name} has dtype {dtype}; supported are {', '.join(ITEMSIZE)}{hint}")


def promote(arrays: Mapping[str, Any]) -> np.dtype:
    """The common dtype of arrays (or of anything with a dtype) by NumPy's rules, in native byte order."""
    try:
        return np.result_type(*(array.dtype for array in arrays.values())).newbyteorder("=")
    except TypeError:  # float16 and bfloat16: neither can represent the other
        given = ", ".join(f"{name} ({dtype_name(array.dtype)})" for name, array in arrays.items())
        raise TypeError(f"there is no common dtype of {given}; convert one with astype") from None


def dtype_from_name(name: str) -> np.dtype:
    """The NumPy dtype of a name in `ITEMSIZE`."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_complex(name: str) -> bool:
    return name in _REAL_PART


def product_flops(x: str, weight: str) -> int:
    """Real operations of one accumulated product: 2, with one complex factor 4, with two complex factors 8."""
    return (2, 4, 8)[is_complex(x) + is_complex(weight)]


def real_part(name: str) -> str:
    """The dtype of one component: float32 for complex64; a real dtype is returned unchanged."""
    return _REAL_PART.get(name, name)


def accumulator(name: str) -> str:
    """The dtype in which sums are accumulated.

    A 16-bit type has 8 to 11 significant bits; a sum of a few hundred products accumulated in it would lose all of
    them.  Products of two 16-bit numbers are exact in float32, so they are accumulated there, and the result is rounded
    once.  Wider types accumulate in their own dtype.
    """
    return "float32" if ITEMSIZE[name] == 2 else name


def operand_dtypes(xs: list[np.dtype], weight: np.dtype, result: np.dtype) -> tuple[str, str]:
    """The dtypes that images and weight have in the computation.

    Both have the precision of `result`.  If only one of them is complex, the other stays real, which halves the
    arithmetic of a full complex product.
    """
    name = dtype_name(result)
    x = name if any(d.kind == "c" for d in xs) else real_part(name)
    w = name if weight.kind == "c" else real_part(name)
    return x, w


@dataclass(frozen=True)
class Operand:
    """An array argument, described with three spatial axes; for recurrent layers, with its own axes.

    Attributes
    ----------
    shape, strides : five ints each
        ``(n, c, d, h, w)``; strides in elements, 0 along axes of length 1.
    alignment : int
        Largest power of two, at most 16, that divides the address of the first element.
    offset : int
        Bytes from the start of the buffer called `name` to the first element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 16
    offset: int = 0

    @property
    def itemsize(self) -> int:
        return _SIZES[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def stride_n(self) -> int:
        return self.strides[0]

    @property
    def stride_c(self) -> int:
        return self.strides[1]

    @cached_property
    def pixels(self) -> int:
        return prod(self.shape[2:])

    @cached_property
    def pixel_stride(self) -> int | None:
        """The stride between neighbouring pixels if the spatial axes collapse into one axis; otherwise None."""
        return collapsed_stride(self.shape[2:], self.strides[2:])

    def samples(self, first: int, count: int) -> Operand:
        """A view of `count` samples, beginning with sample `first`."""
        first_sample = self.view(self.shape, self.strides, first * self.stride_n)
        return replace(first_sample, shape=(count, *self.shape[1:]))

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> Operand:
        """A view that begins `first` elements later."""
        shift = first * self.itemsize
        return replace(
            self,
            shape=shape,
            strides=tuple(step if extent > 1 else 0 for extent, step in zip(shape, strides)),
            offset=self.offset + shift,
            alignment=min(self.alignment, shift & -shift or self.alignment),
        )

    def in_c_order(self, dtype: str) -> Operand:
        """The image in this dtype, newly allocated in C order."""
        return replace(self, dtype=dtype, strides=c_strides(self.shape), alignment=16)


def operand(name: str, dtype: str, shape: Sequence[int], byte_strides: Sequence[int], address: int) -> Operand:
    """Describe an array.

    Strides that are not a multiple of the item size are rounded and marked by an alignment of 1.
    """
    itemsize = _SIZES[dtype]
    between_elements = any(stride % itemsize for stride, extent in zip(byte_strides, shape) if extent > 1)
    strides = tuple(s // itemsize if extent > 1 else 0 for s, extent in zip(byte_strides, shape))
    alignment = 1 if between_elements else min(16, address & -address) if address else 16
    return Operand(name, dtype, tuple(shape), strides, alignment)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a C-ordered array, 0 along axes of length 1."""
    return tuple(prod(shape[i + 1 :]) if extent > 1 else 0 for i, extent in enumerate(shape))


def collapsed_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several axes traversed as one, or None if they have no single stride.

    Axes of length 1 are ignored; if no other axis remains, the stride is irrelevant and 1 is returned.
    """
    axes = [(extent, stride) for extent, stride in zip(shape, strides) if extent != 1]
    for (_, outer), (extent, inner) in pairwise(axes):
        if outer != extent * inner:
            return None
    return axes[-1][1] if axes else 1


def is_channels_last(shape: Sequence[int], byte_strides: Sequence[int], itemsize: int, channel: int) -> bool:
    """Whether a view with this channel axis asks for a channels-last result.

    The view has more than one channel, unit channel stride, and is not C-ordered.
    """
    expected = itemsize
    c_ordered = True
    for extent, stride in zip(reversed(shape), reversed(byte_strides)):
        if extent > 1 and stride != expected:
            c_ordered = False
        expected *= extent
    return len(shape) > channel + 1 and shape[channel] > 1 and byte_strides[channel] == itemsize and not c_ordered


def overlaps_itself(shape: Sequence[int], byte_strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of a strided view share memory.

    Axes are sorted by stride.  If each stride exceeds the range that the axes with smaller strides span, no elements
    overlap.  Any other view counts as overlapping, unless the list of all its offsets proves otherwise.
    """
    axes = sorted((abs(stride), extent) for stride, extent in zip(byte_strides, shape) if extent > 1)
    if prod(shape) == 0:
        return False
    reach = itemsize - 1
    for stride, extent in axes:
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    offsets = [0]
    for stride, extent in axes:
        if len(offsets) * extent > 1 << 20:
            return True
        offsets = [offset + stride * i for offset in offsets for i in range(extent)]
    offsets.sort()
    return any(after - before < itemsize for before, after in pairwise(offsets))
