"""The gradients of a recurrent layer: a call that the pullbacks make, of arrays that the forward call has checked."""

from __future__ import annotations

from typing import Any

from cupyconv.axes import Axes, byte_strides
from cupyconv.calls.call import Call, machine_for, present
from cupyconv.calls.recurrent import activation_groups
from cupyconv.dispatch import backend_for
from cupyconv.dtypes import dtype_name
from cupyconv.operands import array_operand
from cupyconv.planning.request import RecurrentGradientRequest
from cupyconv.prepared import Result
from cupyconv.recurrence import RecurrentGeometry
from cupyconv.settings import current_settings


def prepare_recurrent_gradient(
    x: Any, weight_ih: Any, weight_hh: Any, y: Any, gates: Any, h0: Any = None, c0: Any = None, peephole: Any = None,
    lengths: Any = None, cells: Any = None, candidate: Any = None, grad_y: Any = None, grad_h: Any = None,
    grad_c: Any = None, *, cell: str, direction: str, activations: Any, clip: Any, input_forget: bool = False,
    linear_before_reset: bool = True, on: str | None = None,
) -> Call:  # fmt: skip
    """A list of gradients, in the dtype computed with: of x, weight_ih, weight_hh, h0, of an lstm c0, and sums.

    Weights and peepholes have their axis of directions in front.  `sums` is (D, rows, H), over steps and samples: of
    the gates' gradients; then, of a gru that is linear before its reset, of the recurrent part of the candidate's; of
    an lstm with peepholes, of those of i, f and o times what they looked at.
    """
    arrays = present(
        {"x": x, "weight_ih": weight_ih, "weight_hh": weight_hh, "y": y, "gates": gates},
        h0=h0, c0=c0, peephole=peephole, lengths=lengths, cells=cells, candidate=candidate, grad_y=grad_y,
        grad_h=grad_h, grad_c=grad_c,
    )  # fmt: skip
    backend = backend_for(arrays)
    steps, batch, inputs = x.shape
    geometry = RecurrentGeometry(
        cell=cell, steps=steps, batch=batch, inputs=inputs, hidden=weight_hh.shape[2], direction=direction,
        activations=activation_groups(activations, cell, direction),
        clip=None if clip is None else float(clip), input_forget=input_forget, linear_before_reset=linear_before_reset,
    )  # fmt: skip
    state = (geometry.directions, batch, geometry.hidden)
    shapes = {
        "grad_x": x.shape, "grad_weight_ih": weight_ih.shape, "grad_weight_hh": weight_hh.shape, "grad_h0": state,
        **({"grad_c0": state} if cell == "lstm" else {}),
        "sums": (geometry.directions, geometry.sums(peephole is not None), geometry.hidden),
    }  # fmt: skip
    dtype, wide = gates.dtype, dtype_name(gates.dtype)
    results = tuple(Result(name, tuple(shape), dtype) for name, shape in shapes.items())
    settings = current_settings()
    request = RecurrentGradientRequest(
        geometry=geometry, dtype=wide,
        arguments=tuple(
            array_operand(name, dtype_name(a.dtype), a.shape, a.strides, backend.address(a) if a.size else 0)
            for name, a in arrays.items()
        ),
        results=tuple(array_operand(r.name, wide, r.shape, byte_strides(r.shape, wide), 0) for r in results),
        machine=machine_for(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
    )  # fmt: skip
    return Call(backend, request, arrays, frozenset(), Axes(True, 1), results, listed=True)
