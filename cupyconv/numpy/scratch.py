"""Memory that a block leaves to the next one: pages of a fresh array are mapped anew each time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import numpy as np


class Scratch:
    """Uninitialised arrays by name, each thread its own; one that is asked for again overwrites the one before it.

    Of a single round nothing is kept: its arrays are fresh.
    """

    def __init__(self, dtype: np.dtype, rounds: int) -> None:
        self._dtype = dtype
        self._buffers = threading.local() if rounds > 1 else None

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype | None = None) -> np.ndarray:
        """This thread's array of that name, in C order; of another dtype than the scratch memory's where one is given."""
        dtype = dtype or self._dtype
        if self._buffers is None:
            return np.empty(shape, dtype)
        buffers: dict[str, np.ndarray] = self._buffers.__dict__
        nbytes = prod(shape) * dtype.itemsize
        if name not in buffers or buffers[name].size < nbytes:
            buffers[name] = np.empty(nbytes, np.uint8)
        return np.ndarray(shape, dtype, buffers[name])
