"""Arrays of small integers, whose sums of products are exact in every dtype and order."""

from __future__ import annotations

import numpy as np


def integers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Return integers from -3 to 3 (complex: in both parts), which depend only on shape, dtype and seed."""
    rng = np.random.default_rng(seed + len(shape))
    values = rng.integers(-3, 4, shape).astype(dtype)
    return values + 1j * rng.integers(-3, 4, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values
