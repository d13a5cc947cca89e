"""A transposed convolution gathered: each part of its result is a convolution of x with some of the taps, reversed.

::

    result, stride 2    e o e o e o      even elements are reached through some taps, odd ones through the others:
    x                   |   |   |        two convolutions of stride 1, each written to every other element
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyconv.numpy.convolution import ConvolutionLoop
from cupyconv.numpy.loops import GatheredLoop
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.geometry import ConvGeometry


class GatheredConvolution:
    """What all runs of a plan's step have in common."""

    def __init__(self, loop: GatheredLoop) -> None:
        self.plan, self._convolution = loop, ConvolutionLoop(loop)
        self._read: Any = tuple(slice(begin, end) for begin, end in loop.read)
        self._written: Any = tuple(slice(first, None, step) for first, step in loop.written)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the part; arguments and results are given by name."""
        loop, geometry = self.plan, self.plan.geometry
        parts = {"weight": self._weight(arrays["weight"])}
        for name in loop.inputs:
            x = arrays[name]
            is_read = geometry.in_channels > 0
            parts[name] = (
                five_axes(x)[(..., *self._read)] if is_read else np.empty((geometry.batch, 0, *geometry.size), x.dtype)
            )
        for name, target in ((loop.output, "out"), ("pre", "pre")):
            if name in arrays:
                parts[target] = five_axes(arrays[name])[(..., *self._written)]
        if "bias" in arrays:
            parts["bias"] = arrays["bias"]
        self._convolution.run(parts)

    def _weight(self, weight: np.ndarray) -> np.ndarray:
        """The taps of the part: a copy, or an array of no elements where no tap reaches it."""
        geometry = self.plan.geometry
        assert isinstance(geometry, ConvGeometry)
        if geometry.reduction == 0:
            return np.empty((geometry.out_channels, 0, *geometry.kernel), weight.dtype)
        reversed_taps: Any = tuple(slice(t.start, t.stop if t.stop >= 0 else None, t.step) for t in self.plan.taps)
        own = slice(self.plan.first_channel, self.plan.first_channel + geometry.out_channels // geometry.groups)
        taken = five_axes(weight)[(slice(None), own, *reversed_taps)]
        # (groups, channels of the result, of x, taps)
        grouped = taken.reshape(geometry.groups, geometry.group_channels, geometry.group_outputs, *geometry.kernel)
        exchanged = np.array(grouped.swapaxes(1, 2), order="C")
        if self.plan.conjugate:
            np.conjugate(exchanged, out=exchanged)
        return exchanged.reshape(geometry.out_channels, geometry.group_channels, *geometry.kernel)
