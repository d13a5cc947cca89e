"""The arguments of `im2col` and `col2im`, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupyconv.axes import Axes
from cupyconv.calls.call import (
    Call,
    describe,
    describe_result,
    is_unbatched,
    machine_for,
    named_inputs,
    owner,
    present,
    shapes_of,
    sizes,
)
from cupyconv.dtypes import promote
from cupyconv.geometry import window_geometry
from cupyconv.planning.request import Col2imRequest, Im2colRequest
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


def prepare_im2col(
    x: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, out: Any = None,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `im2col`."""
    xs = named_inputs("x", x)
    arrays = present(xs, out=out)
    backend = owner(arrays)
    unbatched = is_unbatched(xs, kernel_shape)
    windows = window_geometry(
        shapes_of(xs), kernel_shape, batched=not unbatched, stride=stride, padding=padding, dilation=dilation
    )
    axes = Axes(not unbatched, windows.rank)
    columns_axes = Axes(not unbatched, 1)
    shape = columns_axes.shape(windows.batch, windows.in_channels * windows.taps, (windows.pixels,))
    result = Result("out", shape, promote(xs))
    request = Im2colRequest(
        windows=windows, xs=tuple(describe(backend, axes, name, array) for name, array in xs.items()),
        columns=describe_result(backend, columns_axes, arrays, result), machine=machine_for(backend, on),
        workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    return Call(backend, request, arrays, frozenset((*xs, "out")), axes, (result,))


def prepare_col2im(
    columns: Any, spatial_shape: Any, kernel_shape: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `col2im`."""
    arrays = present({"columns": columns}, out=out)
    backend = owner(arrays)
    if columns.ndim not in (2, 3):
        given = tuple(columns.shape)
        raise ValueError(
            f"columns must have shape (N, C * prod(kernel_shape), pixels), N may be missing; given {given}"
        )
    spatial = sizes("spatial_shape", spatial_shape)
    if not 1 <= len(spatial) <= 3:
        raise ValueError(f"spatial_shape must have 1 to 3 entries, given {len(spatial)}: {spatial}")
    batched = columns.ndim == 3
    rows, pixels = columns.shape[-2:]
    one_channel = (columns.shape[0], 1, *spatial) if batched else (1, *spatial)
    windows = window_geometry(
        {"spatial_shape": one_channel}, kernel_shape, batched=batched, stride=stride, padding=padding,
        dilation=dilation,
    )  # fmt: skip
    if rows % windows.taps or pixels != windows.pixels:
        raise ValueError(
            f"columns of shape {tuple(columns.shape)} do not fit: needed a multiple of {windows.taps} rows (taps)"
            f" and {windows.pixels} pixels for spatial_shape {spatial}"
        )
    windows = replace(windows, channels=(rows // windows.taps,))
    axes = Axes(batched, windows.rank)
    shape = axes.shape(windows.batch, windows.in_channels, spatial)
    result = Result("out", shape, promote({"columns": columns}))
    request = Col2imRequest(
        windows=windows, xs=(describe_result(backend, axes, arrays, result),),
        columns=describe(backend, Axes(batched, 1), "columns", columns), machine=machine_for(backend, on),
        workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    return Call(backend, request, arrays, frozenset(("columns", "out")), axes, (result,))
