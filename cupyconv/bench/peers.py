"""What the library is measured against: a way a user has without it, each ready to be timed.

======================  ==================================================================================
``numpy``               concatenate, pad, one view of all windows, one copy of it, matmul: on NumPy; of a
                        recurrent layer one product of all inputs, and a loop over the steps
``cupy``                ``cupy.concatenate`` and ``cupy.matmul``: on a GPU, where that is the whole job; the
                        same loop
``loop over samples``   the library's own call, once for each sample
``torch`` …             `torch_peers.py`
======================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

from numpy.lib.stride_tricks import sliding_window_view

from cupyconv.bench.cases import Case
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase, loop_in_python

Call = Callable[[], Any]


def _itself(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Way:
    """One way to do a case.

    `prepare` gives the call to be timed, or raises; `as_array` makes an array of the machine's library from what
    the call returns; `counts_memory` says whether that library allocates for it; `transforms`, that it may choose
    an algorithm that transforms its data.
    """

    name: str
    prepare: Callable[[], Call]
    as_array: Callable[[Any], Any] = _itself
    counts_memory: bool = True
    transforms: bool = False


def array_peers(xp: ModuleType, on_gpu: bool, case: AnyCase, xs: list[Any], weight: Any) -> list[Way]:
    """The ways of the machine's own array library."""
    if isinstance(case, RecurrentCase):
        return [Way("cupy" if on_gpu else "numpy", lambda: partial(loop_in_python, xp, case, xs[0], weight))]
    ways = []
    if not on_gpu:
        ways.append(Way("numpy", lambda: partial(concatenate_im2col_matmul, xp, case, xs, weight)))
    elif case.pointwise and not case.tf32 and case.dtype != "bfloat16":  # of which CuPy has no GEMM
        ways.append(Way("cupy", lambda: partial(concatenate_im2col_matmul, xp, case, xs, weight)))
    if case.loop:
        ways.append(Way("loop over samples", lambda: _loop_over_samples(case, xs, weight)))
    return ways


def concatenate_im2col_matmul(xp: ModuleType, case: Case, xs: list[Any], weight: Any) -> Any:
    """What a good NumPy user writes without a library, who skips the columns where there is one product."""
    for layer, factors in zip(case.layers, case.weights(weight)):
        xs = [_im2col_matmul(xp, layer, xs, factors)]
    return xs[0]


def _im2col_matmul(xp: ModuleType, case: Case, xs: list[Any], weight: Any) -> Any:
    """One layer of it."""
    x = xp.concatenate(xs, axis=1) if len(xs) > 1 else xs[0]
    groups = () if case.groups == 1 else (case.groups,)
    matrix = weight.reshape(*groups, case.out_channels // case.groups, case.terms)
    if case.kernel == (1,) * len(case.size) and case.stride == 1 and not case.padding:
        columns = x
    else:
        columns = _windows(case, xp.pad(x, ((0, 0), (0, 0), *case.padding)) if case.padding else x)
    y = xp.matmul(matrix, columns.reshape(case.batch, *groups, case.terms, prod(case.out_size)))
    return y.reshape(case.batch, case.out_channels, *case.out_size)


def _windows(case: Case, padded: Any) -> Any:
    """A view (N, C, *kernel, *out_size) of a padded image."""
    rank = len(case.size)
    extents = tuple(case.dilation * (k - 1) + 1 for k in case.kernel)
    view = sliding_window_view(padded, extents, axis=tuple(range(2, 2 + rank)))
    strided = (slice(None, None, case.stride),) * rank + (slice(None, None, case.dilation),) * rank
    view = view[(slice(None), slice(None), *strided)]
    return view.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))


def _loop_over_samples(case: Case, xs: list[Any], weight: Any) -> Call:
    """One call a sample, each into its part of one result: nothing is allocated or joined in between."""
    y = case.ours(xs, weight)
    function, (_, factors), keywords = case.call(xs, weight)
    samples = [([x[n : n + 1] for x in xs], y[n : n + 1]) for n in range(case.batch)]

    def call() -> Any:
        for parts, out in samples:
            function(parts, factors, **keywords, out=out)
        return y

    return call
