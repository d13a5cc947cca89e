"""Settings of calls: a context variable that each call reads when it begins."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, Never

from cupyconv.call.keywords import too_many_arguments, unknown_keyword, without_foreign


class Settings(NamedTuple):
    """The settings that decide how a call runs; `options` sets them."""

    workspace_limit: int | None = None
    allow_tf32: bool = False
    allow_winograd: bool = True
    allow_fft: bool = True
    threads: int | None = None


_DEFAULTS = Settings()
#: The settings in force, and the open ``with`` blocks, innermost last.
_CURRENT: ContextVar[Settings] = ContextVar("cupyconv_settings", default=_DEFAULTS)
_BLOCKS: ContextVar[tuple[options, ...]] = ContextVar("cupyconv_blocks", default=())

#: Returns the settings in force.
current_settings = _CURRENT.get


class options(AbstractContextManager["Settings"]):
    """Settings for the calls inside a ``with`` block.

    Parameters
    ----------
    workspace_limit : int, optional
        Maximum number of bytes of temporary buffers that a call may use.  The default is 256 MiB on CUDA and 16 MiB on
        NumPy.  A call works in chunks that fit: first of samples, then of output pixels.  A method whose smallest chunk
        needs more memory is not chosen, and raises an error if it was named.  On NumPy every method needs some
        workspace.

        Some buffers may exceed the limit; `explain` then adds a note.  On CUDA, an argument of another dtype than that
        of the computation is converted as a whole.  This copy counts against the limit, but it is made even if it alone
        exceeds the limit.  On NumPy the same holds for a weight: if its copy needs more than half of the limit, it
        comes on top of the limit, in part or as a whole.  The same also holds for the sums of one output channel of a
        weight's gradient, if they cannot be accumulated in the result.
    allow_tf32 : bool
        On CUDA, allow matrix products of float32 and complex64 to round their factors to TF32 (10 bits of mantissa).
        This is faster, with relative errors of up to about 1e-3.
    allow_winograd : bool
        On NumPy, allow Winograd's method for float32 convolutions with kernels of 2 to 5 taps along an axis, if it is
        faster.  Sums of integers are then not exact, and errors are bounded normwise: by 4e-6 times the largest sum of
        ``abs(weight * x)`` over all results, not times each result's own sum.  On random data of 64 channels,
        root-mean-square errors are up to 2, 3 and 5 times those of sums of products along one, two and three axes; with
        4 channels they are twice as large.  Infinities and NaN appear where the definition gives them.  False forbids
        the method, even if it is named.
    allow_fft : bool
        Allow Fourier transforms, tile by tile, for kernels of many taps, if they are faster.  On CUDA, cuFFT is used
        only if it is faster by far according to its cost model, which has not been verified on any GPU.  Sums of
        integers are then not exact, and errors are bounded normwise: in float32 by 2e-6 times the largest element of x
        times the largest sum of ``abs(weight)`` of an output channel.  On random data they are about those of sums of
        products.  A tile with an infinite or NaN element is computed again by sums of products, unless this needs more
        than 2**34 products (2**40 on CUDA); then it is left as it is.  `explain` says which of the two applies.
        False forbids the method, even if it is named.
    threads : int, optional
        Number of threads that a call on NumPy uses; it uses fewer if the workspace limit does not allow so many.  By
        default, it is at most the number of threads of NumPy's BLAS, so that BLAS's environment variables,
        threadpoolctl and the process's affinity are respected; the cost model may choose fewer.  While a call uses
        several threads, BLAS is limited to one thread in the whole process; afterwards it gets its own number back.
        With ``threads=1``, matrix products use the threads of BLAS; if the default selects one thread, they do not.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type or is out of range, when the object is created.

    Notes
    -----
    Inside the block, an omitted setting has its default value, even if an enclosing block sets it.  New threads start
    with the defaults, unless they inherit the context of their starter (``sys.flags.thread_inherit_context``).

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
        # This block need not be the innermost: interleaved generators leave their blocks in any order.  It may also not
        # be open in this context: a generator that an event loop or another thread closes leaves its block there.
        blocks = list(_BLOCKS.get())
        if self not in blocks:
            return
        innermost_of_self = len(blocks) - 1 - blocks[::-1].index(self)
        del blocks[innermost_of_self]
        _BLOCKS.set(tuple(blocks))
        _CURRENT.set(blocks[-1]._settings if blocks else _DEFAULTS)


options.__signature__ = without_foreign(options)  # type: ignore[attr-defined]


def flag(name: str, value: Any) -> bool:
    """Return True or False; any other value is refused, even if it has a truth value."""
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
