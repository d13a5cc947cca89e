"""`im2col` and `col2im`: a convolution's windows as a matrix, and the adjoint."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.calls.columns import prepare_col2im, prepare_im2col
from cupyconv.repetition import call
from cupyconv.typing import Array, Padding, PerAxis


def im2col(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | None = None,
) -> Array:
    """Every window of an image as a column.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C, *spatial)`` with one to three spatial axes; a sequence means the concatenation along C.
        One sample may come without the axis N; then `kernel_shape` must be a tuple, which tells how many spatial axes
        there are.
    kernel_shape : int or tuple of int
        The window's size along each spatial axis.  With an int the first two axes of `x` are N and C.
    stride, padding, dilation
        As for `conv`; padding is with zeros.
    out : array, optional
        Of exactly the result's shape and dtype.

    Returns
    -------
    array
        ``(N, C * prod(kernel_shape), pixels)`` in x's dtype: row ``c * prod(kernel_shape) + k`` holds tap
        ``k`` of channel ``c``, both in C order.

    Raises
    ------
    TypeError, ValueError
        For arrays, shapes and settings that do not fit, as for `conv`.

    See Also
    --------
    col2im : the adjoint.

    Notes
    -----
    Source: Chellapilla, Puri, Simard, *High Performance Convolutional Neural Networks for Document
    Processing* (2006).

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.im2col(np.arange(4.0).reshape(1, 1, 4), 2)
    array([[[0., 1., 2.],
            [1., 2., 3.]]])
    """
    settings = {"kernel_shape": kernel_shape, "stride": stride, "padding": padding, "dilation": dilation}
    return call(prepare_im2col, {"x": x, "out": out}, settings)


def col2im(
    columns: Array,
    spatial_shape: PerAxis,
    kernel_shape: PerAxis,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | None = None,
) -> Array:
    """Sum columns back into an image: the adjoint of `im2col`.

    Parameters
    ----------
    columns : array
        ``(N, C * prod(kernel_shape), pixels)``; N may be missing.
    spatial_shape : int or tuple of int
        The image's spatial axes.
    kernel_shape, stride, padding, dilation
        As for the `im2col` that is undone.
    out : array, optional
        Of exactly the result's shape and dtype.

    Returns
    -------
    array
        ``(N, C, *spatial_shape)`` in the dtype of `columns`: every element is the sum of the entries that
        `im2col` reads from it.  16-bit sums are kept in float32 and rounded once.

    Raises
    ------
    TypeError, ValueError
        For arrays, shapes and settings that do not fit.

    Notes
    -----
    On CUDA a gather: no atomics, the same bits on every run.  On NumPy 16-bit sums are workspace, of as many
    channels at a time as the limit has room for, and of one at the least.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> columns = cupyconv.im2col(np.ones((1, 1, 4)), 2)
    >>> cupyconv.col2im(columns, 4, 2)  # how many windows cover each element
    array([[[1., 2., 2., 1.]]])
    """
    settings = {
        "spatial_shape": spatial_shape, "kernel_shape": kernel_shape, "stride": stride, "padding": padding,
        "dilation": dilation,
    }  # fmt: skip
    return call(prepare_col2im, {"columns": columns, "out": out}, settings)
