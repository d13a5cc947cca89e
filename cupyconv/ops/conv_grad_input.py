"""`conv_grad_input`: the gradient of a convolution with respect to its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

from cupyconv.call.arguments import Arguments, Arrays, Axes, is_batched
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv_transpose import checked_adjoint
from cupyconv.problem.geometry import conv_geometry
from cupyconv.problem.padding import per_axis
from cupyconv.typing import Array, ArrayOrList, Padding, PerAxis


def conv_grad_input(
    grad: Array,
    weight: Array,
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *unnamed: Never,
    stride: PerAxis = 1,
    padding: Padding = 0,
    padding_mode: str = "constant",
    dilation: PerAxis = 1,
    groups: int = 1,
    method: str = "auto",
    out: Array | Sequence[Array] | None = None,
    **foreign: Never,
) -> ArrayOrList:
    """Gradient of a convolution with respect to its input, or to each of its merged inputs.

    ``gx[n, c, i] = sum over o, k, p with element(p * stride + k * dilation - before) = i of
    conj(weight[o, c, k]) * grad[n, o, p]``

    Here ``element`` maps a padded position to the element it was copied from, if the padding is not zeros.  This is the
    adjoint of ``conv(x, weight, ...)`` as a linear map of `x`.

    Parameters
    ----------
    grad : array
        Array of the shape of the convolution's result, ``(N, C_out, *out_spatial)``, without N if `input_shape` has no
        N.
    weight : array
        Weight of the convolution, ``(C_out, C_in // groups, *kernel)``; a complex weight is conjugated.
    input_shape : tuple of int, or sequence of tuples
        Shape of the convolution's input; for merged inputs, a sequence with the shape of each input in order.
    stride, padding, padding_mode, dilation, groups, method
        Settings of the convolution, as for `conv`.
    out : array or list of arrays, optional
        Array for the result, of exactly its shape and dtype, with any strides that do not overlap.  A sequence of
        shapes needs a list of arrays.

    Returns
    -------
    array or list of arrays
        Array of shape `input_shape`, in ``result_type(grad, weight)``.  The result is a list if and only if
        `input_shape` is a sequence of shapes; each input's gradient is written directly into its own array.  16-bit
        types accumulate in float32 and are rounded once.  The result is channels-last if `grad` is, otherwise in C
        order.  The gradient of a real input with a complex weight is the real part of this result.

    Raises
    ------
    TypeError, ValueError
        As for `conv`; ValueError also if the shape of `grad` is not that of the convolution's result.

    See Also
    --------
    conv_transpose : the same sum as a layer, without the conjugation.

    Notes
    -----
    On NumPy, the products are accumulated into the result in blocks that stay in cache.  On CUDA, every element gathers
    its contributions.  There are no atomics, so every run gives the same bits.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> weight, grad = np.ones((1, 3, 2)), np.ones((1, 1, 3))
    >>> a, b = cupyconv.conv_grad_input(grad, weight, [(1, 2, 4), (1, 1, 4)])  # of conv([x, y], weight)
    >>> a.shape, b
    ((1, 2, 4), array([[[1., 2., 2., 1.]]]))
    """
    return CONV_GRAD_INPUT(locals())


def check_conv_grad_input(
    given: Arrays, *, on: str | None = None, input_shape: Any, method: str, **windows: Any
) -> CheckedCall:
    """Check the arguments of `conv_grad_input`."""
    shapes, listed = _input_shapes(input_shape)
    required = {"grad": given["grad"], "weight": given["weight"]}
    arguments = Arguments.of(required | _named_outs(given["out"], len(shapes), listed), on)
    grad, weight = arguments["grad"], arguments["weight"]
    batched = is_batched(shapes, tuple(weight.shape[2:]))
    geometry = conv_geometry(shapes, tuple(weight.shape), batched=batched, **windows)
    axes = Axes(batched, geometry.rank)
    needed = axes.shape(geometry.batch, geometry.out_channels, geometry.spatial(geometry.out_size))
    if tuple(grad.shape) != needed:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, needed {needed}, the shape of conv's result for input_shape {input_shape}"
        )
    outs = {name.replace("input_shape", "out"): shape for name, shape in shapes.items()}
    return checked_adjoint("conv_grad_input", arguments, axes, ["grad"], geometry, outs, method, listed)


CONV_GRAD_INPUT = Operation(conv_grad_input, check_conv_grad_input, ("grad", "weight", "out"))


def _input_shapes(input_shape: Any) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return the shape of each input by name, and whether the shapes were given as a list."""
    if not isinstance(input_shape, (tuple, list)):
        given = "an array: pass its shape" if hasattr(input_shape, "shape") else repr(input_shape)
        raise TypeError(f"input_shape must be a shape or a sequence of shapes, given {given}")
    if not input_shape:
        raise ValueError("input_shape is an empty sequence, needed at least one shape")
    listed = isinstance(input_shape[0], (tuple, list))
    shapes = input_shape if listed else [input_shape]
    for shape in shapes:
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"input_shape must be a shape or a sequence of shapes, given {input_shape!r}")
    names = [f"input_shape[{i}]" for i in range(len(shapes))] if listed else ["input_shape"]
    return {name: per_axis(name, tuple(shape), len(shape), 0) for name, shape in zip(names, shapes)}, listed


def _named_outs(out: Any, count: int, listed: bool) -> dict[str, Any]:
    """Return the arrays for the results by name: one array, one per shape of a list, or none if `out` is None."""
    if out is None:
        return {}
    if not listed:
        return {"out": out}
    if not isinstance(out, (tuple, list)) or len(out) != count:
        given = f"{len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out must be a list of {count} arrays, one for each shape in input_shape; given {given}")
    return {f"out[{i}]": array for i, array in enumerate(out)}
