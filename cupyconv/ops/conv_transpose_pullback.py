"""`conv_transpose` with its pullback: the gradient of its input is a convolution of the gradient of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyconv.call.dispatch import Backend, backend_for
from cupyconv.ops.conv import conv
from cupyconv.ops.conv_grad_weight import conv_grad_weight
from cupyconv.ops.conv_pullback import EpilogueBackward, Pullback, listed_inputs, pullback_of
from cupyconv.ops.conv_transpose import CONV_TRANSPOSE, TRANSPOSED_WINDOWS
from cupyconv.problem.geometry import transposed_geometry
from cupyconv.typing import Array


def conv_transpose_with_pullback(arguments: dict[str, Any]) -> tuple[Array, Pullback]:
    """Return the result of `conv_transpose` with these arguments, and its pullback."""
    results = CONV_TRANSPOSE(arguments, saving=True)
    inputs, listed = listed_inputs(arguments["x"])
    backend = backend_for({"weight": arguments["weight"]})
    inputs, weight = tuple(map(backend.plain, inputs)), backend.plain(arguments["weight"])
    rank = weight.ndim - 2
    channel = inputs[0].ndim - rank - 1
    # This is the adjoint of a convolution over images of the size of y, with the same weight.
    shapes = {f"x[{i}]": tuple(image.shape) for i, image in enumerate(inputs)}
    said = {name: arguments[name] for name in TRANSPOSED_WINDOWS}
    geometry = transposed_geometry(shapes, tuple(weight.shape), batched=channel == 1, **said)
    triples = geometry.size, geometry.before, geometry.stride, geometry.out_size, geometry.span
    reached, padding = zip(*(_under_windows(*axis) for axis in zip(*map(geometry.spatial, triples))))
    windows: dict[str, Any] = {"stride": said["stride"], "dilation": said["dilation"], "padding": padding}
    under_windows = tuple(map(slice, reached))
    channels = [image.shape[channel] for image in inputs]
    pieces = _pieces(channels, geometry.groups, geometry.group_outputs, geometry.group_channels)

    def of_piece(dz: Any, piece: _Piece) -> Any:
        """The part of `dz` that the windows of these channels read."""
        return dz[(..., piece.outputs, *under_windows)]

    def to_x(dz: Any) -> list[Any]:
        factors = _conjugate(weight, backend)
        gradients = [backend.empty(tuple(image.shape), dz.dtype) for image in inputs]
        for piece in pieces:
            out = gradients[piece.of][(..., piece.channels, *(slice(None),) * rank)]
            conv(of_piece(dz, piece), factors[piece.rows], groups=piece.groups, **windows, out=out)
        return gradients

    def to_weight(dz: Any) -> Any:
        gradient, kernel_shape = backend.empty(tuple(weight.shape), dz.dtype), tuple(weight.shape[2:])
        for piece in pieces:
            image = inputs[piece.of][(..., piece.channels, *(slice(None),) * rank)]
            out = gradient[piece.rows]
            conv_grad_weight(image, of_piece(dz, piece), kernel_shape, groups=piece.groups, **windows, out=out)
        if gradient.dtype.kind == "c":  # `conv_grad_weight` conjugated the other factor of the product
            _negate_imaginary(gradient)
        return gradient

    epilogue = EpilogueBackward(results, arguments["activation"], rank)
    return results[0], pullback_of(inputs, listed, arguments, to_x, to_weight, epilogue)


def _conjugate(array: Any, backend: Backend) -> Any:
    if array.dtype.kind != "c":
        return array
    with backend.current():
        copy = backend.converted(array, array.dtype)
        _negate_imaginary(copy)
    return copy


def _negate_imaginary(array: Any) -> None:
    imaginary = array.imag  # a view
    imaginary *= -1


def _under_windows(size: int, before: int, stride: int, windows: int, span: int) -> tuple[int, tuple[int, int]]:
    """Return the extent of an image that the windows reach along one axis, and the padding that gives so many windows.

    Elements beyond the last window are omitted.
    """
    covered = (windows - 1) * stride + span
    before = min(before, covered)
    size = min(size, covered - before)
    return size, (before, covered - before - size)


class _Piece(NamedTuple):
    """Channels of one of the merged inputs that belong to one group or form whole groups."""

    of: int  # number of the input
    channels: slice  # of that input
    rows: slice  # of the weight: the same channels, numbered across all inputs
    outputs: slice  # channels of the result that belong to the same groups
    groups: int


def _pieces(channels: Sequence[int], groups: int, group_rows: int, group_outputs: int) -> list[_Piece]:
    """Split the merged inputs where a group of `group_rows` channels begins or ends; whole groups stay together."""
    pieces, first = [], 0
    for i, count in enumerate(channels):
        at, end = first, first + count
        while at < end:
            group, offset = divmod(at, group_rows)
            whole = (end - at) // group_rows if offset == 0 else 0
            stop = at + whole * group_rows if whole else min(end, (group + 1) * group_rows)
            outputs = slice(group * group_outputs, (group + max(1, whole)) * group_outputs)
            pieces.append(_Piece(i, slice(at - first, stop - first), slice(at, stop), outputs, max(1, whole)))
            at = stop
        first = end
    return pieces
