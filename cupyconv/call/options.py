"""Settings of calls: a context variable, read when a function is called."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, Never

from cupyconv.call.keywords import too_many_arguments, unknown_keyword, without_foreign


class Settings(NamedTuple):
    """What a call is decided with; `options` sets it."""

    workspace_limit: int | None = None
    allow_tf32: bool = False
    allow_winograd: bool = True
    allow_fft: bool = True
    threads: int | None = None


_DEFAULTS = Settings()
#: The settings in force, and the blocks that are open, the innermost last.
_CURRENT: ContextVar[Settings] = ContextVar("cupyconv_settings", default=_DEFAULTS)
_BLOCKS: ContextVar[tuple[options, ...]] = ContextVar("cupyconv_blocks", default=())

#: What the call at hand is decided with.
current_settings = _CURRENT.get


class options(AbstractContextManager["Settings"]):
    """Settings for the calls inside a ``with`` block.

    Parameters
    ----------
    workspace_limit : int, optional
        The most bytes of temporary buffers that a call may take; by default 256 MiB on CUDA, 16 MiB on NumPy.
        The work is done in chunks that fit: first of samples, then of output pixels.  A method whose smallest
        chunk needs more is not chosen, and refused if it was named; on NumPy every method needs some.
        On CUDA an argument of another dtype than the one computed with is converted as a whole.  That copy counts,
        but it is made even where it alone exceeds the limit.  On NumPy the same holds for a weight: if its copy takes
        more than half of the limit, it comes on top of the limit, in part or as a whole.  So do the sums of one output
        of a weight's gradient, where they cannot be those of the result.  A note of `explain` says where a call passes
        its limit.
    allow_tf32 : bool
        On CUDA, let products of float32 and complex64 round their factors to TF32 (10 bits of mantissa): faster,
        with relative errors of up to about 1e-3.
    allow_winograd : bool
        On NumPy, let float32 convolutions with kernels of 2 to 5 taps along an axis be computed by Winograd's method
        where that is faster.  Sums of integers are then not exact, and errors are bounded normwise: by 4e-6 times the
        largest sum of ``abs(weight * x)`` of all results, not times each result's own.  On random data of 64 channels they
        are, in the root mean square, up to 2, 3 and 5 times those of sums of products, along one, two and three axes; of 4
        channels twice that.  Infinities and NaN are where the definition has them.
        False forbids it, by name too.
    allow_fft : bool
        Let kernels of many taps be multiplied as Fourier transforms, tile by tile, where that is faster; on CUDA, by
        cuFFT, where it is faster by far as its cost model has it, which no GPU has been held against.  Sums of
        integers are then not exact, and errors are bounded normwise, in float32 by 2e-6 times the largest element of x
        times the largest sum of ``abs(weight)`` of an output; on random data they are about those of sums of products.
        Where an element is infinite or NaN its tile is computed again by sums of products; where that would take
        more than 2**34 of them (2**40 on CUDA) it is left as it is, and `explain` says which.  False forbids it, by name too.
    threads : int, optional
        How many threads a call on NumPy is divided among, or fewer where the workspace limit has no room for so many;
        by default as many as NumPy's BLAS would use (so that its environment variables, threadpoolctl and the process's
        affinity are respected), and fewer where that takes less by the cost model.  While a call uses several, BLAS
        has one thread in the whole process; then it has its own number again.  With one that was asked for, products
        use the threads of BLAS, by default they do not.

    Raises
    ------
    TypeError, ValueError
        Where a value is not an integer or is out of range, when the block is set up.

    Notes
    -----
    A setting that is left out has its default inside the block, even inside another block that sets it.  New
    threads start with the defaults.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, w = np.ones((4, 8, 32, 32)), np.ones((8, 8, 3, 3))
    >>> with cupyconv.options(workspace_limit=1 << 20):
    ...     plan = cupyconv.explain(cupyconv.conv, x, w)
    >>> plan.workspace_bytes <= 1 << 20
    True
    """

    def __init__(
        self,
        *unnamed: Never,
        workspace_limit: int | None = None,
        allow_tf32: bool = False,
        allow_winograd: bool = True,
        allow_fft: bool = True,
        threads: int | None = None,
        **foreign: Never,
    ) -> None:
        if foreign:
            raise unknown_keyword("options", next(iter(foreign)), Settings._fields)
        if unnamed:
            raise TypeError(too_many_arguments("options", signature(options).parameters, len(unnamed)))
        self._settings = Settings(
            workspace_limit=_at_least("workspace_limit", workspace_limit, 0),
            allow_tf32=flag("allow_tf32", allow_tf32),
            allow_winograd=flag("allow_winograd", allow_winograd),
            allow_fft=flag("allow_fft", allow_fft),
            threads=_at_least("threads", threads, 1),
        )

    def __enter__(self) -> Settings:
        _BLOCKS.set((*_BLOCKS.get(), self))
        _CURRENT.set(self._settings)
        return self._settings

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not always the innermost: generators that take turns leave their blocks in any order.  And not always where the
        # block was entered: one that is closed elsewhere, by an event loop or another thread, has nothing to leave there.
        blocks = list(_BLOCKS.get())
        if self not in blocks:
            return
        innermost_of_self = len(blocks) - 1 - blocks[::-1].index(self)
        del blocks[innermost_of_self]
        _BLOCKS.set(tuple(blocks))
        _CURRENT.set(blocks[-1]._settings if blocks else _DEFAULTS)


options.__signature__ = without_foreign(options)  # type: ignore[attr-defined]


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, given {value!r}")
    return value


def _at_least(name: str, value: int | None, least: int) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or None, given {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, given {number}")
    return number
