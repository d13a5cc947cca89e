"""A gradient's way back through a prologue: a call that the pullbacks make, checked as any other."""

from __future__ import annotations

from typing import Any

from cupyconv.activations import resolve_activation
from cupyconv.axes import Axes
from cupyconv.calls.call import Call, describe, describe_result, machine_for, owner, present
from cupyconv.calls.convolution import describe_prologue
from cupyconv.dtypes import accumulator, dtype_from_name, dtype_name
from cupyconv.planning.request import PrologueGradRequest
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


def prepare_prologue_grad(
    grad: Any, x: Any, scale: Any = None, shift: Any = None, sums: Any = None, *, spatial: int,
    activation: Any = None, through: bool = True, on: str | None = None,
) -> Call:  # fmt: skip
    """From `grad`, of the transformed `x`, a list of the gradient of `x` where `through`, and of each channel's sums.

    These are two a channel, one after the other, in the accumulator's dtype: the gradients of `scale` and of `shift`.
    Images have `spatial` spatial axes and one shape; `scale` and `shift` are of these channels.
    """
    arrays = present({"grad": grad, "x": x}, scale=scale, shift=shift, sums=sums)
    backend = owner(arrays)
    assert x.shape == grad.shape, "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    channels, dtype = grad.shape[int(axes.batched)], dtype_name(grad.dtype)
    out = Result("out", tuple(grad.shape), grad.dtype, axes.asks_channels_last(grad))
    totals = Result("sums", (2 * channels,), dtype_from_name(accumulator(dtype)))
    request = PrologueGradRequest(
        grad=describe(backend, axes, "grad", grad), x=describe(backend, axes, "x", x),
        prologue=describe_prologue(backend, arrays, channels, dtype, resolve_activation(activation)),
        out=describe_result(backend, axes, arrays, out) if through else None,
        sums=describe_result(backend, Axes(False, 0), arrays, totals),
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    images = frozenset({"grad", "x", "out"} if through else {"grad", "x"})
    return Call(backend, request, arrays, images, axes, (out,) * through + (totals,), listed=True)
