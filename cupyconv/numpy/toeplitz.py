"""Depthwise convolution as products with Toeplitz matrices: several neighbouring outputs of a channel at a time.

One output of a channel is a dot product, which BLAS computes slowly.  But m neighbouring outputs read nearly the same
elements.  They are a matrix times these elements, with the kernel in each row one step further to the right:

::

    m outputs         | w0 w1 w2          |
    of a channel  =   |    w0 w1 w2       | x  n columns of m + k - 1 elements: (m, n) = (m, m + k - 1) x (m + k - 1, n)
                      |       w0 w1 w2    |

Along the height (or depth), the elements are rows of the image, with a column per pixel (`toeplitz_rows`).  Along the
width, the windows of m outputs are the rows of an overlapping view (`toeplitz_runs`).  Both are read in place.

The zeros are multiplied too.  Sums that are not finite are recomputed without them (see `group_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

import numpy as np

from cupyconv.problem.geometry import ConvGeometry


def reach(geometry: ConvGeometry, axis: int, outputs: int) -> int:
    """Return how many elements along an axis `outputs` neighbouring outputs read."""
    return (outputs - 1) * geometry.stride[axis] + geometry.span[axis]


def within(stride: int, offset: int, size: int, outputs: int) -> slice:
    """Return the slice of `outputs` outputs whose tap, at ``output * stride + offset``, is inside the image."""
    start = min(max(0, -(offset // stride)), outputs)
    return slice(start, max(start, min(outputs, -((offset - size) // stride))))


def strided(image: np.ndarray, first: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Return a strided view of an image that begins at the pixel `first`."""
    if image.flags.c_contiguous:
        return np.ndarray(shape, image.dtype, image, sum(map(mul, first, image.strides[2:])), strides)
    from_first: Any = (..., *(slice(index, None) for index in first))
    return np.lib.stride_tricks.as_strided(image[from_first], shape, strides)


def toeplitz(weight: np.ndarray, outputs: int, stride: int, dilation: int) -> np.ndarray:
    """Return Toeplitz matrices (c, o, outputs, other taps, reach) with a weight's (c, o, ..., taps) on diagonals."""
    c, o, *_, taps = weight.shape
    weight = weight.reshape(c, o, -1, taps)
    reach = (outputs - 1) * stride + dilation * (taps - 1) + 1
    matrices = np.zeros((c, o, outputs, weight.shape[2], reach), weight.dtype)
    of_c, of_o, of_output, of_other, item = matrices.strides
    strides = (of_c, of_o, of_output + stride * item, of_other, dilation * item)
    band = np.ndarray((c, o, outputs, *weight.shape[2:]), weight.dtype, matrices, 0, strides)
    band[...] = weight[:, :, None]
    return matrices
