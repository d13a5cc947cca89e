"""Whether `out` may be written where it lies: the one question about a call that only addresses answer.

Layouts repeat from call to call, addresses do not.  What a layout says of the memory an array spans is worked
out once; a check then compares bounds, and only spans that meet are looked at element by element.  It is not made where
arrays know the owners of their memory, and these say that all are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cupyconv.call.dispatch import Backend


class OutMemory:
    """The memory of results that the caller gave beside that of the other arguments, in calls with these layouts.

    `arrays` are those of one such call by argument name, none of them is kept; `outs` are the names of results,
    and `may_alias` is that of the residual which a result may be.
    """

    def __init__(self, arrays: Mapping[str, Any], outs: Sequence[str], may_alias: str) -> None:
        self._may_alias = may_alias
        self._spans = [(name, _Span(array)) for name, array in arrays.items()]
        self._outs = [(place, *self._spans[place]) for place, name in enumerate(arrays) if name in outs]

    def check(self, arrays: Sequence[Any], backend: Backend) -> None:
        """Refuse an `out` that is read-only, or that another argument shares memory with; it may be the residual.

        `arrays` are in the order of those that this was made from.
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
                    continue  # each of its elements is read just before it is written
                if _share_elements(out, at, span, where):
                    raise ValueError(
                        f"{out_name} overlaps {name}; only an out that is exactly the {self._may_alias} may"
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
    """A layout, and the bytes that an array of it spans, counted from the address of its first element."""

    def __init__(self, array: Any) -> None:
        shape, itemsize = tuple(array.shape), array.dtype.itemsize
        strides = tuple(step if extent > 1 else 0 for extent, step in zip(shape, array.strides))
        reaches = [step * (extent - 1) for extent, step in zip(shape, strides)]
        self.layout = shape, strides, itemsize
        self.nbytes = prod(shape) * itemsize
        self.begin = sum(min(reach, 0) for reach in reaches)
        self.end = sum(max(reach, 0) for reach in reaches) + itemsize


class _Memory:
    """A region of memory as NumPy sees one, for questions about addresses; its bytes are never touched."""

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
