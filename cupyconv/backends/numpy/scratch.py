"""Memory that a thread uses again from block to block: pages of a fresh array are mapped anew each time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import numpy as np


class Scratch:
    """Uninitialised arrays by name; one that is asked for again overwrites the one before it."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype, axes: Sequence[int]) -> np.ndarray:
        """An array whose `axes` lie in memory in this order, outermost first."""
        buffers: dict[str, np.ndarray] = self._buffers.__dict__
        nbytes = prod(shape) * dtype.itemsize
        if name not in buffers or buffers[name].size < nbytes:
            buffers[name] = np.empty(nbytes, np.uint8)
        laid_out = buffers[name][:nbytes].view(dtype).reshape([shape[axis] for axis in axes])
        return laid_out.transpose(np.argsort(axes))
