"""What NumPy and CuPy users write without a library.

======================  ==================================================================================
``numpy``               concatenate, pad, view all windows, copy the view, matmul.  A gradient uses the
                        same columns in reverse; a recurrent layer is one product of all inputs and a loop
                        over the steps
``cupy``                ``cupy.concatenate`` and ``cupy.matmul`` on a GPU, if these do the whole job; the
                        same loop for recurrent layers
``loop over samples``   the library's own call, once per sample
======================  ==================================================================================
"""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

from numpy.lib.stride_tricks import sliding_window_view

from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase
from cupyconv.bench.machines import Machine
from cupyconv.bench.peers import Participant, Way
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase, loop_in_python
from cupyconv.demo.libraries import Call


class ArrayLibrary(Participant):
    """The implementations that use the machine's array library."""

    def __init__(self, machine: Machine) -> None:
        self._xp, self._on_gpu = machine.xp, machine.arch is not None

    def properties(self) -> dict[str, Any]:
        return {self._xp.__name__: self._xp.__version__}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        xp, name = self._xp, "cupy" if self._on_gpu else "numpy"
        if isinstance(case, RecurrentCase):
            return [Way(name, lambda: partial(loop_in_python, xp, case, xs, weights))]
        if isinstance(case, LargeKernelCase):
            return []  # its columns would be gigabytes
        if isinstance(case, GradientCase):
            return [Way(name, lambda: partial(gradient_by_columns, xp, case, xs, weights))]
        ways = []
        if not self._on_gpu or (case.pointwise and case.has_plain_product):
            ways.append(Way(name, lambda: partial(concatenate_im2col_matmul, xp, case, xs, weights)))
        if case.loop:
            ways.append(Way("loop over samples", lambda: _loop_over_samples(case, xs, weights)))
        return ways

    def product(self, square: Case, x: Any, weight: Any) -> Call | None:
        return partial(self._xp.matmul, weight[:, :, 0], x[0]) if square.has_plain_product else None


def concatenate_im2col_matmul(xp: ModuleType, case: Case, xs: list[Any], weights: list[Any]) -> Any:
    """Compute what a good NumPy user writes without a library, without copying columns if one product is enough."""
    for layer, weight in zip(case.layers, weights):
        xs = [_im2col_matmul(xp, layer, xs, weight)]
    return xs[0]


def _im2col_matmul(xp: ModuleType, case: Case, xs: list[Any], weight: Any) -> Any:
    """Compute one layer."""
    x = xp.concatenate(xs, axis=1) if len(xs) > 1 else xs[0]
    y = xp.matmul(_matrix(case, weight), _columns(xp, case, x))
    return y.reshape(case.batch, case.out_channels, *case.out_size)


def gradient_by_columns(xp: ModuleType, case: GradientCase, xs: list[Any], weights: list[Any]) -> Any:
    """Compute the same user's gradients: one product, and for an input a scatter-add of each tap's contributions."""
    arriving = xs[0].reshape(case.batch, *_groups(case), case.out_channels // case.groups, prod(case.out_size))
    if case.of == "weight":
        x = xp.concatenate(xs[1:], axis=1) if len(xs) > 2 else xs[1]
        return xp.matmul(arriving, _columns(xp, case, x).swapaxes(-1, -2)).sum(0).reshape(case.weight_shape)
    columns = xp.matmul(_matrix(case, weights[0]).swapaxes(-1, -2), arriving)
    columns = columns.reshape(case.batch, case.in_channels, *case.kernel, *case.out_size)
    size = tuple(n + sum(pair) for n, pair in zip(case.size, case.pairs))
    padded = xp.zeros((case.batch, case.in_channels, *size), columns.dtype)
    for tap in product(*map(range, case.kernel)):
        first = [t * case.dilation for t in tap]
        read = (slice(f, f + (n - 1) * case.stride + 1, case.stride) for f, n in zip(first, case.out_size))
        padded[(..., *read)] += columns[(slice(None), slice(None), *tap)]
    return padded[(..., *(slice(before, before + n) for n, (before, _) in zip(case.size, case.pairs)))]


def _groups(case: Case) -> tuple[int, ...]:
    """Return the axis of groups if there is more than one group."""
    return () if case.groups == 1 else (case.groups,)


def _matrix(case: Case, weight: Any) -> Any:
    return weight.reshape(*_groups(case), case.out_channels // case.groups, case.fan_in)


def _columns(xp: ModuleType, case: Case, x: Any) -> Any:
    """Return all windows as columns, or the image itself if one product is enough."""
    if case.kernel != (1,) * len(case.size) or case.stride > 1 or case.padding:
        x = _windows(case, xp.pad(x, ((0, 0), (0, 0), *case.padding)) if case.padding else x)
    return x.reshape(case.batch, *_groups(case), case.fan_in, prod(case.out_size))


def _windows(case: Case, padded: Any) -> Any:
    """Return a view (N, C, *kernel, *out_size) of a padded image."""
    rank = len(case.size)
    extents = tuple(case.dilation * (k - 1) + 1 for k in case.kernel)
    view = sliding_window_view(padded, extents, axis=tuple(range(2, 2 + rank)))
    strided = (slice(None, None, case.stride),) * rank + (slice(None, None, case.dilation),) * rank
    view = view[(slice(None), slice(None), *strided)]
    return view.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))


def _loop_over_samples(case: Case, xs: list[Any], weights: list[Any]) -> Call:
    """Return a call per sample, each into its part of one result: nothing is allocated or concatenated in between."""
    y = case.ours(xs, weights)
    function, (_, weight), keywords = case.call(xs, weights)
    samples = [([x[n : n + 1] for x in xs], y[n : n + 1]) for n in range(case.batch)]

    def call() -> Any:
        for parts, out in samples:
            function(parts, weight, **keywords, out=out)
        return y

    return call
