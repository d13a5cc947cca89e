"""The shapes that are measured, the peer they are measured against, and the check before any clock runs.

The peer is what a good NumPy user writes without a library: concatenate the inputs, `np.pad`, one view
of all windows, one copy of it into columns, one `np.matmul`, batched over samples and groups.  Where the
kernel is 1x1 with stride 1 it skips the columns, as that user would.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tolerance import assert_close

import cupyconv


@dataclass(frozen=True)
class Layer:
    """One convolution: `channels` of each input, and what `cupyconv.conv` takes."""

    name: str
    batch: int
    channels: tuple[int, ...]
    size: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: int = 1
    padding: tuple[tuple[int, int], ...] = ()
    dilation: int = 1
    groups: int = 1
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def in_channels(self) -> int:
        return sum(self.channels)

    @property
    def terms(self) -> int:
        """Products in one result."""
        return self.in_channels // self.groups * prod(self.kernel)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return self.padding or ((0, 0),) * len(self.size)

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(
            (n + sum(pair) - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k, pair in zip(self.size, self.kernel, self.pairs)
        )

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.out_channels * prod(self.out_size) * self.terms

    @property
    def minimal_bytes(self) -> int:
        """Every input, weight and result once."""
        images = self.in_channels * prod(self.size) + self.out_channels * prod(self.out_size)
        return (self.batch * images + self.out_channels * self.terms) * np.dtype(self.dtype).itemsize

    def arrays(self) -> tuple[list[np.ndarray], np.ndarray]:
        """The inputs and the weight, standard normal."""
        rng = np.random.default_rng(0)
        dtype = np.dtype(self.dtype).type
        xs = [rng.standard_normal((self.batch, c, *self.size), dtype) for c in self.channels]
        return xs, rng.standard_normal((self.out_channels, self.in_channels // self.groups, *self.kernel), dtype)

    def ours(self, xs: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
        """The library's call."""
        if len(self.size) == 1 and self.kernel == (1,):
            return cupyconv.linmerge(xs, weight[:, :, 0])
        return cupyconv.conv(
            xs, weight, stride=self.stride, padding=self.pairs, dilation=self.dilation, groups=self.groups
        )

    def peer(self, xs: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
        """Concatenate, one whole im2col, matmul."""
        x = np.concatenate(xs, axis=1) if len(xs) > 1 else xs[0]
        groups = () if self.groups == 1 else (self.groups,)
        matrix = weight.reshape(*groups, self.out_channels // self.groups, self.terms)
        if self.kernel == (1,) * len(self.size) and self.stride == 1 and not self.padding:
            columns = x
        else:
            columns = self._windows(np.pad(x, ((0, 0), (0, 0), *self.padding)) if self.padding else x)
        y = np.matmul(matrix, columns.reshape(self.batch, *groups, self.terms, prod(self.out_size)))
        return y.reshape(self.batch, self.out_channels, *self.out_size)

    def _windows(self, padded: np.ndarray) -> np.ndarray:
        """A view (N, C, *kernel, *out_size) of a padded image."""
        rank = len(self.size)
        extents = tuple(self.dilation * (k - 1) + 1 for k in self.kernel)
        view = sliding_window_view(padded, extents, axis=tuple(range(2, 2 + rank)))
        strided = (slice(None, None, self.stride),) * rank + (slice(None, None, self.dilation),) * rank
        return np.moveaxis(view[(slice(None), slice(None), *strided)], range(-rank, 0), range(2, 2 + rank))

    def in_float64(self, xs: list[np.ndarray], weight: np.ndarray) -> np.ndarray:
        """The result summed tap by tap in float64: no columns, no code in common with either side."""
        group_outputs = self.out_channels // self.groups
        y = np.zeros((self.batch, self.groups, group_outputs, prod(self.out_size)))
        x = np.pad(np.concatenate(xs, axis=1).astype(np.float64), ((0, 0), (0, 0), *self.pairs))
        for tap in product(*map(range, self.kernel)):
            reached = tuple(
                slice(t * self.dilation, t * self.dilation + (n - 1) * self.stride + 1, self.stride)
                for t, n in zip(tap, self.out_size)
            )
            factors = weight[(slice(None), slice(None), *tap)].reshape(self.groups, group_outputs, -1)
            part = x[(slice(None), slice(None), *reached)]
            y += factors.astype(np.float64) @ part.reshape(self.batch, self.groups, -1, prod(self.out_size))
        return y.reshape(self.batch, self.out_channels, *self.out_size)

    def check(self, result: Any, xs: list[np.ndarray], weight: np.ndarray) -> None:
        """AssertionError where a result is not what float64 says."""
        assert_close(result, self.in_float64(xs, weight), self.dtype, self.terms)


def _same(*extents: int) -> tuple[tuple[int, int], ...]:
    return tuple(((extent - 1) // 2, extent // 2) for extent in extents)


#: The two jobs of the demo.
JOBS = (
    Layer("merge 5 x 4 -> 4, 10^6 points, float64", 4, (4,) * 5, (10**6,), 4, (1,), dtype="float64"),
    Layer("merge 5 x 4 -> 4, 10^6 points, float32", 4, (4,) * 5, (10**6,), 4, (1,)),
    Layer("3x3, 64 samples of 14x14", 64, (64,), (14, 14), 64, (3, 3), padding=_same(3, 3)),
)

#: Ten ordinary layers.
LAYERS = (
    Layer("3x3, 64 -> 64, 56x56", 8, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3)),
    Layer("3x3, 256 -> 256, 14x14", 8, (256,), (14, 14), 256, (3, 3), padding=_same(3, 3)),
    Layer("7x7 stride 2, 3 -> 64, 224x224", 4, (3,), (224, 224), 64, (7, 7), stride=2, padding=_same(7, 7)),
    Layer("1x1, 256 -> 64, 56x56", 8, (256,), (56, 56), 64, (1, 1)),
    Layer("1x1 merged 128+128 -> 128, 64x64", 4, (128, 128), (64, 64), 128, (1, 1)),
    Layer("3x3 merged 64+64 -> 64, 128x128", 2, (64, 64), (128, 128), 64, (3, 3), padding=_same(3, 3)),
    Layer("3x3 depthwise 144, 56x56", 8, (144,), (56, 56), 144, (3, 3), padding=_same(3, 3), groups=144),
    Layer("3x3 in 32 groups, 128 -> 128, 56x56", 4, (128,), (56, 56), 128, (3, 3), padding=_same(3, 3), groups=32),
    Layer("1-D, 3 taps, dilation 8, 64 -> 64, 16000", 8, (64,), (16000,), 64, (3,), padding=((16, 0),), dilation=8),
    Layer("3-D 3x3x3, 16 -> 32, 32x32x32", 2, (16,), (32, 32, 32), 32, (3, 3, 3), padding=_same(3, 3, 3)),
)
