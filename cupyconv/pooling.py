"""`max_pool`: the largest element of every window."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.calls.pooling import prepare_max_pool
from cupyconv.repetition import call
from cupyconv.typing import Array, ArrayOrList, Padding, PerAxis


def max_pool(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | Sequence[Array] | None = None,
) -> ArrayOrList:
    """The largest element of every window of an image.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C, *spatial)`` with one to three spatial axes, real.  One sample may come without the axis N; then
        `kernel_shape` must be a tuple, which tells how many spatial axes there are.  The arrays of a sequence
        agree in all but C and dtype.
    kernel_shape : int or tuple of int
        The window's size along each spatial axis.  With an int the first two axes of `x` are N and C.
    stride : int or tuple of int, optional
        Elements from one window to the next; by default `kernel_shape`, windows side by side.
    padding, dilation
        As for `conv`.  Padding is never the largest: it takes no part.
    out : array or sequence of arrays, optional
        Of exactly the results' shapes and dtypes; a sequence where `x` is one.

    Returns
    -------
    array, or list of arrays where `x` is a sequence
        ``(N, C, *out_spatial)`` in x's dtype; channels-last where x is.  NaN where a window holds one; -inf
        where a window lies in the padding alone.

    Raises
    ------
    TypeError
        For complex arrays, which have no order, integers and foreign arrays.
    ValueError
        For shapes and settings that do not fit, and where `options` leave too little workspace for one window.

    Notes
    -----
    Exact in every dtype: the result is an element of the window.  Each array of a sequence is pooled by itself, into
    an array of its own.  With 0.0 and -0.0 in a window either may be the result.  What ONNX and PyTorch call
    ``ceil_mode`` is some padding more behind: ``padding_of_ceil_mode`` in ``examples/onnx_nodes.py`` computes it.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.max_pool(np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 2)
    array([[[3., 4.]]])
    >>> cupyconv.max_pool(np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 3, stride=2, padding="same")
    array([[[3., 4., 5.]]])
    """
    settings = {"kernel_shape": kernel_shape, "stride": stride, "padding": padding, "dilation": dilation}
    return call(prepare_max_pool, {"x": x, "out": out}, settings)
