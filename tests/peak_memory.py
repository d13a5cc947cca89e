"""Peak memory that NumPy allocates during a call."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import numpy as np

#: Bytes of Python objects, as a multiple of those on a Python with the GIL: without it, the header of an object has 16
#: bytes more, and views have 56 to 128 bytes.
OF_OBJECTS = 1.25 if sys.getsizeof(object()) > 16 else 1
#: Bytes of float32 buffers of `einsum`, which `np.setbufsize` does not limit before NumPy 2.3.
OF_EINSUM = 3 * 8192 * 4 if np.lib.NumpyVersion(np.__version__) < "2.3.0" else 0


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates at its peak, including its result."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
