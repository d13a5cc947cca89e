"""Cases for the tests of FFT convolutions on both backends."""

from __future__ import annotations

import numpy as np

MODES = ("reflect", "symmetric", "edge", "wrap")
#: Shapes of x and weight, settings: every rank, one-tap axes, strides, dilations, groups, padding modes, no elements.
CASES = {
    "2-D": ((2, 3, 13, 11), (4, 3, 5, 4), dict(padding="same")),
    "1-D": ((2, 3, 67), (4, 3, 9), dict(padding=((8, 0),))),
    "3-D": ((1, 2, 6, 5, 7), (3, 2, 3, 2, 4), dict(padding="full")),
    "rows": ((2, 3, 9, 18), (4, 3, 1, 5), {}),
    "columns": ((2, 3, 18, 9), (4, 3, 5, 1), dict(padding=((2, 2), (0, 1)), stride=(1, 2))),
    "plane of a volume": ((1, 2, 6, 5, 7), (3, 2, 3, 1, 3), dict(padding=1, stride=(1, 2, 1))),
    "stride": ((2, 4, 23, 19), (6, 2, 3, 4), dict(padding=((2, 3), (4, 1)), stride=(2, 3), groups=2)),
    "dilation": ((1, 3, 17, 20), (4, 3, 3, 3), dict(dilation=(3, 2), padding=2)),
    "stride past the kernel": ((1, 2, 40), (3, 2, 2), dict(stride=5, dilation=3)),
    "many channels": ((2, 9, 12, 13), (8, 9, 3, 3), dict(padding=1)),
    "groups": ((2, 12, 12, 13), (16, 6, 3, 3), dict(padding=1, groups=2)),
    "depthwise": ((2, 4, 9, 8), (4, 1, 3, 3), dict(groups=4, padding=1)),
    "several outputs of a channel": ((2, 4, 9, 8), (8, 1, 3, 3), dict(groups=4)),
    **{
        mode: ((2, 4, 11, 9), (6, 2, 3, 4), dict(padding=((2, 3), (4, 1)), stride=(2, 1), groups=2, padding_mode=mode))
        for mode in MODES
    },
    "padding longer than the image": ((1, 1, 7), (2, 1, 5), dict(padding=16, padding_mode="reflect")),
    "empty": ((0, 3, 9, 8), (4, 3, 3, 3), {}),
    "no outputs": ((2, 3, 9, 8), (0, 3, 3, 3), {}),
    "no channels": ((2, 0, 9, 8), (4, 0, 3, 3), {}),
}

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")
MIXED = [("float32", "complex64"), ("complex64", "float32")]


def normal(*shape, dtype="float32", seed=0):
    rng = np.random.default_rng(sum(shape) + seed)
    numbers = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        numbers = (numbers + 1j * rng.standard_normal(shape)) * 0.5**0.5
    return numbers.astype(dtype)
