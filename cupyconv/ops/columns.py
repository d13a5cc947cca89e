"""`im2col` and `col2im`: the windows of a convolution as a matrix, and the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Never

from cupyconv.call.arguments import Arguments, Arrays, Axes, Result, is_batched, merged_inputs, present, shapes_of
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.problem.arrays import promote
from cupyconv.problem.geometry import window_geometry
from cupyconv.problem.padding import per_axis
from cupyconv.problem.passes import Col2imProblem, Im2colProblem
from cupyconv.typing import Array, Padding, PerAxis


def im2col(
    x: Array | Sequence[Array],
    kernel_shape: PerAxis,
    *unnamed: Never,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Write every window of an image as a column.

    Parameters
    ----------
    x : array or sequence of arrays
        ``(N, C, *spatial)`` with one to three spatial axes.  A sequence stands for the concatenation along C.  A single
        sample may omit the axis N; `kernel_shape` must then be a tuple, whose length is the number of spatial axes.
    kernel_shape : int or tuple of int
        Size of the window along each spatial axis.  With an int, the first two axes of `x` are N and C.
    stride, padding, dilation
        As for `conv`; padding is with zeros.
    out : array, optional
        Array for the result, of exactly its shape and dtype.

    Returns
    -------
    array
        ``(N, C * prod(kernel_shape), pixels)`` in the dtype of `x`: row ``c * prod(kernel_shape) + k`` holds tap ``k``
        of channel ``c``.  Taps and pixels are in C order.

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
    return IM2COL(locals())


def col2im(
    columns: Array,
    spatial_shape: PerAxis,
    kernel_shape: PerAxis,
    *unnamed: Never,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Sum columns back into an image: the adjoint of `im2col`.

    Parameters
    ----------
    columns : array
        ``(N, C * prod(kernel_shape), pixels)``; the axis N may be omitted.
    spatial_shape : int or tuple of int
        Spatial shape of the image.
    kernel_shape, stride, padding, dilation
        As for the corresponding `im2col`.
    out : array, optional
        Array for the result, of exactly its shape and dtype.

    Returns
    -------
    array
        ``(N, C, *spatial_shape)`` in the dtype of `columns`.  Every element is the sum of the entries that `im2col`
        reads from it.  16-bit types accumulate in float32 and are rounded once.

    Raises
    ------
    TypeError, ValueError
        For arrays, shapes and settings that do not fit.

    Notes
    -----
    On CUDA this is a gather without atomics, so every run gives the same bits.  On NumPy, the float32 sums of 16-bit
    types are workspace.  Their channels are computed in blocks as large as the workspace limit allows, but of at least
    one channel.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> columns = cupyconv.im2col(np.ones((1, 1, 4)), 2)
    >>> cupyconv.col2im(columns, 4, 2)  # how many windows cover each element
    array([[[1., 2., 2., 1.]]])
    """
    return COL2IM(locals())


def check_im2col(given: Arrays, *, on: str | None = None, kernel_shape: Any, **settings: Any) -> CheckedCall:
    """Check the arguments of `im2col`."""
    inputs, arrays = merged_inputs(given, "x")
    arguments = Arguments.of(arrays, on)
    shapes = shapes_of(inputs)
    batched = is_batched(shapes, kernel_shape)
    windows = window_geometry(shapes, kernel_shape, batched=batched, **settings)
    axes, columns_axes = Axes(batched, windows.rank), Axes(batched, 1)
    shape = columns_axes.shape(windows.batch, windows.in_channels * windows.taps, (windows.pixels,))
    result = Result("out", shape, promote(inputs))
    problem = Im2colProblem(
        windows=windows,
        xs=arguments.describe_each(axes, inputs),
        columns=arguments.describe(columns_axes, result),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset((*inputs, "out")), axes, (result,))


def check_col2im(
    given: Arrays, *, on: str | None = None, spatial_shape: Any, kernel_shape: Any, **settings: Any
) -> CheckedCall:
    """Check the arguments of `col2im`."""
    arguments = Arguments.of(present(given, "columns"), on)
    columns = arguments["columns"]
    if columns.ndim not in (2, 3):
        given_shape = tuple(columns.shape)
        raise ValueError(
            f"columns must have shape (N, C * prod(kernel_shape), pixels), with or without N; given {given_shape}"
        )
    given_sizes = spatial_shape if isinstance(spatial_shape, (tuple, list)) else (spatial_shape,)
    spatial = per_axis("spatial_shape", tuple(given_sizes), len(given_sizes), 0)
    if not 1 <= len(spatial) <= 3:
        raise ValueError(f"spatial_shape must have 1 to 3 entries, given {len(spatial)}: {spatial}")
    batched = columns.ndim == 3
    rows, pixels = columns.shape[-2:]
    one_channel = (columns.shape[0], 1, *spatial) if batched else (1, *spatial)
    windows = window_geometry({"spatial_shape": one_channel}, kernel_shape, batched=batched, **settings)
    if rows % windows.taps or pixels != windows.pixels:
        raise ValueError(
            f"columns of shape {tuple(columns.shape)} do not fit: needed are a multiple of {windows.taps} rows (taps)"
            f" and {windows.pixels} pixels for spatial_shape {spatial}"
        )
    windows = replace(windows, channels=(rows // windows.taps,))
    axes = Axes(batched, windows.rank)
    shape = axes.shape(windows.batch, windows.in_channels, spatial)
    result = Result("out", shape, promote(arguments.some(["columns"])))
    problem = Col2imProblem(
        windows=windows,
        xs=(arguments.describe(axes, result),),
        columns=arguments.describe(Axes(batched, 1), "columns"),
        **arguments.decided_with,
    )
    return CheckedCall(arguments, problem, frozenset(("columns", "out")), axes, (result,))


IM2COL = Operation(im2col, check_im2col, ("x", "out"))
COL2IM = Operation(col2im, check_col2im, ("columns", "out"))
