"""The check whether `out` may be written: the only property of a call that depends on addresses.

Layouts repeat from call to call, addresses do not.  The memory range that an array spans is computed once per layout.
A check then compares the bounds, and compares elements only if the ranges overlap.  The check is skipped if the arrays
know the owners of their memory, and these show that no memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cupyconv.call.dispatch import Backend


class OutMemory:
    """The memory of the caller's result arrays and of the other arguments, for calls with these layouts.

    `arrays` are those of one such call by argument name; no reference to them is retained.  `outs` are the names of the
    results.  `may_alias` is the name of the residual, which may be the same array as a result.
    """

    def __init__(self, arrays: Mapping[str, Any], outs: Sequence[str], may_alias: str) -> None:
        self._may_alias = may_alias
        self._spans = [(name, _Span(array)) for name, array in arrays.items()]
        self._outs = [(place, *self._spans[place]) for place, name in enumerate(arrays) if name in outs]

    def check(self, arrays: Sequence[Any], backend: Backend) -> None:
        """Refuse an `out` that is read-only, or that shares memory with another argument; it may be the residual.

        `arrays` are in the same order as those given to the constructor.
        """
        for place, out_name, out in self._outs:
            if getattr(getattr(arrays[place], "flags", None), "writeable", True) is False:
                raise ValueError(f"{out_name} is read-only")
            if out.nbytes == 0:
                continue
            at = backend.address(arrays[place])
            begin, end = at + out.begin, at + out.end
            for other, (name, span) in enumerate(self._spans):
                if other == place or span.nbytes == 0:
                    continue
                where = backend.address(arrays[other])
                if end <= where + span.begin or where + span.end <= begin:
                    continue
                if name == self._may_alias and where == at and span.layout == out.layout:
                    continue  # each element is read just before it is overwritten
                if _share_elements(out, at, span, where):
                    raise ValueError(
                        f"{out_name} overlaps {name}; it may share memory only if it is exactly the {self._may_alias}"
                    )

    def is_residual(self, arrays: Mapping[str, Any], address: Callable[[Any], int]) -> bool:
        """Whether `out` and `residual` have the same elements at the same addresses."""
        residual, out = (dict(self._spans).get(name) for name in (self._may_alias, "out"))
        return (
            residual is not None
            and out is not None
            and residual.layout == out.layout
            and address(arrays[self._may_alias]) == address(arrays["out"])
        )


class _Span:
    """A layout, and the range of bytes that it spans, relative to the address of the first element."""

    def __init__(self, array: Any) -> None:
        shape, itemsize = tuple(array.shape), array.dtype.itemsize
        strides = tuple(step if extent > 1 else 0 for extent, step in zip(shape, array.strides))
        reaches = [step * (extent - 1) for extent, step in zip(shape, strides)]
        self.layout = shape, strides, itemsize
        self.nbytes = prod(shape) * itemsize
        self.begin = sum(min(reach, 0) for reach in reaches)
        self.end = sum(max(reach, 0) for reach in reaches) + itemsize


class _Memory:
    """A memory region with NumPy's array interface, for questions about addresses; its bytes are never accessed."""

    def __init__(self, span: _Span, address: int) -> None:
        shape, strides, itemsize = span.layout
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def _share_elements(a: _Span, a_address: int, b: _Span, b_address: int) -> bool:
    try:
        regions = np.asarray(_Memory(a, a_address)), np.asarray(_Memory(b, b_address))
        return np.shares_memory(*regions, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
