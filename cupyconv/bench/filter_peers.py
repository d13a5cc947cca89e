"""SciPy and OpenCV as peers of filters: one channel in and one out, one sample, stride 1.

Of SciPy the direct functions, which use one thread.  OpenCV takes a Fourier transform for large filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.peers import Participant, Way, installed
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.demo.libraries import Call


def _is_filter(case: AnyCase) -> bool:
    """Whether it is one image or signal and one filter, of real numbers."""
    if not isinstance(case, Case) or isinstance(case, GradientCase) or case.then:
        return False
    plain = case.batch == case.stride == case.dilation == 1 and case.dtype in ("float32", "float64")
    return plain and case.channels == (case.out_channels,) == (1,) and len(case.size) < 3


def _is_centred(case: AnyCase) -> bool:
    """Whether the result is as large as the image, and each pixel's window lies around it."""
    return isinstance(case, Case) and all(
        k % 2 == 1 and pair == (k // 2, k // 2) for k, pair in zip(case.kernel, case.pairs)
    )


def _ways(case: AnyCase, calls: Mapping[str, Call], *, transform: bool = False) -> list[Way]:
    """Each gives the image alone."""
    return [
        Way(name, lambda call=call: call, _with_channels, transform=transform)  # type: ignore[misc]
        for name, call in calls.items()
    ]


def _with_channels(image: Any) -> Any:
    return np.asarray(image)[np.newaxis, np.newaxis]


class SciPy(Participant):
    """``ndimage.correlate``, ``signal.correlate`` and ``signal.lfilter``; beside them ``numpy.correlate``."""

    def __init__(self) -> None:
        self._version = installed("scipy").__version__
        self._ndimage, self._signal = installed("scipy.ndimage"), installed("scipy.signal")

    def properties(self) -> dict[str, Any]:
        return {"scipy": self._version}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
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
    """``filter2D``, on so many threads."""

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
