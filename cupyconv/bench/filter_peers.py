"""SciPy and OpenCV as peers for filters: one input and one output channel, one sample, stride 1.

SciPy takes part with its direct functions, which use one thread.  For large kernels its transforms take part, also with
several channels.  OpenCV uses a Fourier transform for large filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase
from cupyconv.bench.peers import Participant, Way, installed
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.demo.libraries import Call


def _is_filter(case: AnyCase) -> bool:
    """Return whether a case is one image or signal and one filter, with real numbers."""
    if not isinstance(case, Case) or isinstance(case, GradientCase) or case.then:
        return False
    plain = case.batch == case.stride == case.dilation == 1 and case.dtype in ("float32", "float64")
    return plain and case.channels == (case.out_channels,) == (1,) and len(case.size) < 3


def _is_centred(case: AnyCase) -> bool:
    """Return whether the result is as large as the image, and each window is centered on its pixel."""
    return isinstance(case, Case) and all(
        k % 2 == 1 and pair == (k // 2, k // 2) for k, pair in zip(case.kernel, case.pairs)
    )


def _ways(case: AnyCase, calls: Mapping[str, Call], *, transform: bool = False) -> list[Way]:
    """Return implementations whose results are the image alone."""
    return [
        Way(name, lambda call=call: call, _with_channels, transform=transform)  # type: ignore[misc]
        for name, call in calls.items()
    ]


def _with_channels(image: Any) -> Any:
    return np.asarray(image)[np.newaxis, np.newaxis]


def _in_pairs(function: Callable[..., Any], case: Case, xs: list[Any], weight: Any) -> Any:
    """Call the function for each pair of an input and an output channel."""
    images = [image for x in xs for image in x[0]]
    inputs, outputs = case.in_channels // case.groups, case.out_channels // case.groups
    y = np.zeros((1, case.out_channels, *case.out_size), weight.dtype)
    for output, kernels in enumerate(weight):
        first = output // outputs * inputs
        for image, kernel in zip(images[first : first + inputs], kernels):
            y[0, output] += function(image, np.flip(kernel), "same")
    return y


def _at_once(function: Callable[..., Any], case: Case, xs: list[Any], weight: Any) -> Any:
    """Call the function once for all pairs, which requires concatenated inputs."""
    spatial = tuple(range(-len(case.size), 0))
    image = np.concatenate(xs, axis=1).reshape(case.groups, 1, -1, *case.size)
    kernel = np.flip(weight, spatial).reshape(case.groups, -1, image.shape[2], *case.kernel)
    centre = tuple(slice(k // 2, k // 2 + n) for k, n in zip(case.kernel, case.size))
    full = function(image, kernel, axes=spatial)  # "same" would crop the axis of outputs to the image's length
    return full[(..., *centre)].sum(2).reshape(1, case.out_channels, *case.out_size)


def _transforms(signal: ModuleType, case: Case, xs: list[Any], weight: Any) -> list[Way]:
    """Return implementations by Fourier transforms, of the whole image or of blocks."""
    calls: dict[str, Call] = {
        name: partial(_in_pairs, getattr(signal, name), case, xs, weight) for name in ("fftconvolve", "oaconvolve")
    }
    if case.fan_in * case.out_channels > prod(case.kernel):
        calls["fftconvolve at once"] = partial(_at_once, signal.fftconvolve, case, xs, weight)
    return [Way(name, lambda call=call: call, transform=True) for name, call in calls.items()]  # type: ignore[misc]


class SciPy(Participant):
    """``ndimage.correlate``, ``signal.correlate`` and ``signal.lfilter``, and also ``numpy.correlate``.

    For large kernels ``signal.fftconvolve``, whose transforms use `threads` threads, and ``signal.oaconvolve``.
    """

    def __init__(self, threads: int) -> None:
        self._version, self._threads = installed("scipy").__version__, threads
        self._ndimage, self._signal = installed("scipy.ndimage"), installed("scipy.signal")

    def during(self, case: AnyCase) -> AbstractContextManager[Any]:
        return installed("scipy.fft").set_workers(self._threads) if isinstance(case, LargeKernelCase) else nullcontext()

    def properties(self) -> dict[str, Any]:
        return {"scipy": self._version}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        if isinstance(case, LargeKernelCase):
            return _transforms(self._signal, case, xs, weights[0])
        if not _is_filter(case):
            return []
        assert isinstance(case, Case)
        image, kernel = xs[0][0, 0], weights[0][0, 0]
        calls: dict[str, Call] = {}
        if _is_centred(case):
            correlate = self._ndimage.correlate if image.ndim > 1 else self._ndimage.correlate1d
            calls["scipy.ndimage"] = partial(correlate, image, kernel, mode="constant")
            calls["scipy.signal"] = partial(self._signal.correlate, image, kernel, "same", "direct")
        elif not case.padding:
            calls["scipy.signal"] = partial(self._signal.correlate, image, kernel, "valid", "direct")
            if image.ndim == 1:
                calls["numpy.correlate"] = partial(np.correlate, image, kernel)
        elif case.pairs == ((case.kernel[0] - 1, 0),):
            calls["scipy.signal"] = partial(self._signal.lfilter, kernel[::-1].copy(), np.ones(1, image.dtype), image)
        return _ways(case, calls)


class OpenCV(Participant):
    """``filter2D`` with `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._cv2 = installed("cv2")
        self._cv2.setNumThreads(threads)

    def properties(self) -> dict[str, Any]:
        return {"opencv": self._cv2.__version__}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        if not (_is_filter(case) and _is_centred(case) and xs[0].ndim == 4):
            return []
        image, kernel = xs[0][0, 0], weights[0][0, 0]
        call = partial(self._cv2.filter2D, image, -1, kernel, borderType=self._cv2.BORDER_CONSTANT)
        return _ways(case, {"opencv": call}, transform=True)
