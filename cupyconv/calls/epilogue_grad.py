"""A gradient's way back through an epilogue: a call that the pullbacks make, checked as any other."""

from __future__ import annotations

from typing import Any

from cupyconv.activations import resolve_activation
from cupyconv.axes import Axes
from cupyconv.calls.call import Call, describe, describe_result, machine_for, owner, present
from cupyconv.dtypes import accumulator, dtype_from_name, dtype_name
from cupyconv.planning.request import EpilogueGradRequest
from cupyconv.prepared import Result
from cupyconv.settings import current_settings


def prepare_epilogue_grad(
    grad: Any, saved: Any = None, *, spatial: int, activation: Any = None, through: bool = True, sums: bool = True,
    on: str | None = None,
) -> Call:  # fmt: skip
    """From `grad`, and what its activation saved, a list of the gradient before the activation, where `through`,
    and of each channel's sum in the accumulator's dtype, where `sums`.

    Images have `spatial` spatial axes; `saved` has the shape and dtype of `grad`, and is None without an activation.
    """
    arrays = present({"grad": grad}, saved=saved)
    backend = owner(arrays)
    resolved = resolve_activation(activation)
    assert through or sums, "nothing to compute"
    assert (saved is None) == (not resolved) and not (through and saved is None), (
        "only an activation changes a gradient"
    )
    assert saved is None or (saved.shape == grad.shape and saved.dtype == grad.dtype), "the pullback has seen to it"
    axes = Axes(grad.ndim == spatial + 2, spatial)
    layout = grad if saved is None else saved
    out = Result("out", tuple(grad.shape), grad.dtype, axes.asks_channels_last(layout))
    totals = Result("sums", (grad.shape[int(axes.batched)],), dtype_from_name(accumulator(dtype_name(grad.dtype))))
    described = {name: describe(backend, axes, name, array) for name, array in arrays.items()}
    request = EpilogueGradRequest(
        grad=described["grad"], activation=resolved, saved=described.get("saved"),
        out=describe_result(backend, axes, arrays, out) if through else None,
        sums=describe_result(backend, Axes(False, 0), arrays, totals) if sums else None,
        machine=machine_for(backend, on), workspace_limit=current_settings().workspace_limit,
    )  # fmt: skip
    results = (out,) * through + (totals,) * sums
    images = frozenset({"grad", "saved", "out"} & {*arrays, *(result.name for result in results)})
    return Call(backend, request, arrays, images, axes, results, listed=True)
