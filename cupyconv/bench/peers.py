"""What the library is measured against: a way a user has without it, each ready to be timed.

======================  ==================================================================================
``numpy``               concatenate, pad, one view of all windows, one copy of it, matmul: on NumPy; of a
                        recurrent layer one product of all inputs, and a loop over the steps
``cupy``                ``cupy.concatenate`` and ``cupy.matmul``: on a GPU, where that is the whole job; the
                        same loop
``conv calls``          the library's own `conv` for each layer of a chain
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
from cupyconv.demo.libraries import Call


@dataclass(frozen=True)
class Way:
    """One way to do a case.

    `prepare` gives the call to be timed, or raises.  `as_array` marks a framework with arrays of its own, and makes
    one of the machine's from what the call returns.  It allocates for itself, so that its memory is not counted, and
    may choose an algorithm that transforms its data.
    """

    name: str
    prepare: Callable[[], Call]
    as_array: Callable[[Any], Any] | None = None


def array_peers(xp: ModuleType, on_gpu: bool, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
    """The ways of the machine's own array library."""
    own = "cupy" if on_gpu else "numpy"
    if isinstance(case, RecurrentCase):
        return [Way(own, lambda: partial(loop_in_python, xp, case, xs[0], weights))]
    ways = []
    if not on_gpu or (case.pointwise and case.has_plain_product):
        ways.append(Way(own, lambda: partial(concatenate_im2col_matmul, xp, case, xs, weights)))
    if case.then:
        ways.append(Way("conv calls", lambda: partial(_layer_by_layer, case, xs, weights)))
    if case.loop:
        ways.append(Way("loop over samples", lambda: _loop_over_samples(case, xs, weights)))
    return ways


def concatenate_im2col_matmul(xp: ModuleType, case: Case, xs: list[Any], weights: list[Any]) -> Any:
    """What a good NumPy user writes without a library, who skips the columns where there is one product."""
    for layer, weight in zip(case.layers, weights):
        xs = [_im2col_matmul(xp, layer, xs, weight)]
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


def _layer_by_layer(case: Case, xs: list[Any], weights: list[Any]) -> Any:
    """A chain's layers, each by a call of its own."""
    for layer, weight in zip(case.layers, weights):
        function, arguments, keywords = layer.call(xs, [weight])
        xs = [function(*arguments, **keywords)]
    return xs[0]


def _loop_over_samples(case: Case, xs: list[Any], weights: list[Any]) -> Call:
    """One call per sample, each into its part of one result: nothing is allocated or joined in between."""
    y = case.ours(xs, weights)
    function, (_, weight), keywords = case.call(xs, weights)
    samples = [([x[n : n + 1] for x in xs], y[n : n + 1]) for n in range(case.batch)]

    def call() -> Any:
        for parts, out in samples:
            function(parts, weight, **keywords, out=out)
        return y

    return call
