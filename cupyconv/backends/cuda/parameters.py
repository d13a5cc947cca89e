"""The C++ parameter structs of the kernels, mirrored as NumPy dtypes.

A test holds size and every offset against what the compilers say.  ``pack`` turns a launch's values
into bytes once; ``bind`` copies them and writes the addresses of a call's arrays in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyconv.plan import MAX_SOURCES, Address, KernelLaunch

POINTER, INT64, INT32, FLOAT64 = np.uint64, np.int64, np.int32, np.float64


def _struct(**fields: Any) -> np.dtype:
    return np.dtype(
        [(name, *(spec if isinstance(spec, tuple) else (spec,))) for name, spec in fields.items()], align=True
    )


IMAGE = _struct(data=POINTER, stride_n=INT64, stride_c=INT64, stride=(INT64, 3))
SOURCE = _struct(image=IMAGE, first=INT32, channels=INT32)
SOURCES = _struct(table=(SOURCE, MAX_SOURCES), count=INT32)
WINDOWS = _struct(
    size=(INT64, 3), out=(INT64, 3), kernel=(INT32, 3), stride=(INT32, 3), before=(INT32, 3), dilation=(INT32, 3),
    padding_mode=INT32,
)  # fmt: skip
EPILOGUE = _struct(bias=POINTER, residual=IMAGE, alpha=FLOAT64, beta=FLOAT64, activation=INT32)

_CONVOLUTION = _struct(
    sources=SOURCES, windows=WINDOWS, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, batch=INT64, groups=INT32,
    group_channels=INT32, group_outputs=INT32,
)  # fmt: skip

#: Kernel name -> its one parameter.
PARAMETERS = {
    "merge": _struct(
        sources=SOURCES, weight=POINTER, weight_stride_o=INT64, weight_stride_c=INT64, out=IMAGE, epilogue=EPILOGUE,
        batch=INT64, pixels=INT64, in_channels=INT32, out_channels=INT32,
    ),
    "direct": _CONVOLUTION,
    "depthwise": _CONVOLUTION,
    "im2col": _struct(
        sources=SOURCES, windows=WINDOWS, columns=POINTER, stride_n=INT64, stride_row=INT64, stride_pixel=INT64, batch=INT64,
        first_pixel=INT64, pixels=INT64, channels=INT32,
    ),
    "col2im": _struct(columns=IMAGE, windows=WINDOWS, out=IMAGE, batch=INT64, channels=INT32),
    "epilogue": _struct(
        sums=POINTER, sums_stride_n=INT64, sums_stride_o=INT64, sums_stride_p=INT64, imaginary=INT64, out=IMAGE,
        epilogue=EPILOGUE, size=(INT64, 3), batch=INT64, first_pixel=INT64, pixels=INT64, channels=INT32,
    ),
}  # fmt: skip


class PackedParameters:
    """A launch's parameter struct with holes where addresses go."""

    def __init__(self, launch: KernelLaunch) -> None:
        dtype = PARAMETERS[launch.kernel.name]
        assert dtype.names == tuple(name for name, _ in launch.params), f"fields of {launch.kernel.name} disagree"
        template = np.zeros((), dtype)
        self._holes: list[tuple[int, Address]] = []  # byte offset, what goes there
        self._fill(template, 0, tuple(value for _, value in launch.params))
        assert dtype.itemsize % 8 == 0, "every struct is a whole number of 8-byte words"
        self._words = template.reshape(1).view(np.uint64)
        self._bytes = np.dtype((np.void, dtype.itemsize))

    def bind(self, address_of: Callable[[Address], int]) -> np.ndarray:
        """The struct with addresses filled in, as one element of plain bytes.

        A fresh copy, so that threads may share the template.  Bytes, because NumPy would describe a
        nested struct to CuPy anew at every launch, which takes longer than the launch.
        """
        words = self._words.copy()
        for at, address in self._holes:
            words[at // 8] = address_of(address)
        return words.view(self._bytes)

    def _fill(self, struct: np.ndarray, base: int, values: tuple[Any, ...]) -> None:
        assert struct.dtype.names is not None and struct.dtype.fields is not None
        for name, value in zip(struct.dtype.names, values, strict=True):
            field, offset = struct.dtype.fields[name][:2]
            self._fill_field(struct, name, field, base + offset, value)

    def _fill_field(self, struct: np.ndarray, name: str, field: np.dtype, at: int, value: Any) -> None:
        if isinstance(value, Address):
            self._holes.append((at, value))
        elif value is None:
            struct[name] = 0
        elif field.names is not None:
            self._fill(struct[name], at, value)
        elif field.subdtype is not None and field.subdtype[0].names is not None:
            item = field.subdtype[0]
            for i, entry in enumerate(value):
                self._fill(struct[name][i], at + i * item.itemsize, entry)
        else:
            struct[name] = value
