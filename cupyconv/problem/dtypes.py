"""The dtypes of the library: which there are, how they promote, and in which one sums are kept.

Below the public functions a dtype is its name, so that plans stay printable and hashable and
bfloat16 needs no package until an array of it turns up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}

#: Of lengths, which are counted and never computed with.
COUNT_ITEMSIZE = {"int32": 4, "int64": 8}

_REAL_PART = {"complex64": "float32", "complex128": "float64"}


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype) -> str:
    """The dtype's name, whatever its byte order; NumPy works it out anew each time."""
    return dtype.name


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Refuse a dtype that the library does not compute in, naming the argument and the way out."""
    if dtype_name(dtype) in ITEMSIZE:
        return
    hint = " (convert it first: array.astype(numpy.float32))" if dtype.kind in "biu" else ""
    raise TypeError(f"{name} has dtype {dtype}; supported are {', '.join(ITEMSIZE)}{hint}")


def promote(arrays: Mapping[str, Any]) -> np.dtype:
    """The common dtype of arrays, or of what has a dtype, by NumPy's rules, in native byte order."""
    try:
        return np.result_type(*(array.dtype for array in arrays.values())).newbyteorder("=")
    except TypeError:  # float16 and bfloat16: neither holds the other
        given = ", ".join(f"{name} ({dtype_name(array.dtype)})" for name, array in arrays.items())
        raise TypeError(f"no common dtype of {given}; convert one with astype") from None


def dtype_from_name(name: str) -> np.dtype:
    """The NumPy dtype of a name in `ITEMSIZE`."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_complex(name: str) -> bool:
    return name in _REAL_PART


def product_flops(x: str, weight: str) -> int:
    """Real operations of a product that is added to a sum: 2, with one complex factor 4, with two 8."""
    return (2, 4, 8)[is_complex(x) + is_complex(weight)]


def real_part(name: str) -> str:
    """The dtype of one component: float32 for complex64, a real dtype itself."""
    return _REAL_PART.get(name, name)


def accumulator(name: str) -> str:
    """The dtype sums are kept in.

    A 16-bit type holds 8 to 11 significant bits: a sum of a few hundred products kept in it has none
    left.  Products of two 16-bit numbers are exact in float32, so that is where they are added; the
    result is rounded once.  Wider types add in themselves.
    """
    return "float32" if ITEMSIZE[name] == 2 else name


def operand_dtypes(xs: list[np.dtype], weight: np.dtype, result: np.dtype) -> tuple[str, str]:
    """The dtypes that images and weight are computed in.

    Both have the precision of `result`; where only one side is complex, the other stays real, which
    halves the arithmetic of a full complex product.
    """
    name = dtype_name(result)
    x = name if any(d.kind == "c" for d in xs) else real_part(name)
    w = name if weight.kind == "c" else real_part(name)
    return x, w
