"""The arguments of `rnn`, `lstm` and `gru`, and of single steps of them, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from cupyconv.activations import Activation, as_float, resolve_activation
from cupyconv.axes import Axes, byte_strides
from cupyconv.calls.call import Call, check_out, machine_for, widened
from cupyconv.dispatch import Backend, backend_for
from cupyconv.dtypes import COUNT_ITEMSIZE, accumulator, check_dtype, dtype_from_name, dtype_name, promote
from cupyconv.operands import Operand, array_operand
from cupyconv.planning.request import RecurrentRequest, check_recurrent_method
from cupyconv.prepared import Result
from cupyconv.recurrence import DIRECTIONS, GATES, RecurrentGeometry
from cupyconv.settings import current_settings, flag

#: Activations of each cell, for one direction.
_ACTIVATIONS = {"rnn": 1, "lstm": 3, "gru": 2}
#: The axes of x, of a sequence and of a step, in words.
_AXES = {"(T, N, I)": "steps, samples, inputs; one sample alone is x[:, None]", "(N, I)": "samples, inputs"}
#: Arguments that none can be without.
_REQUIRED = ("x", "weight_ih", "weight_hh")


def prepare_rnn(
    x: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *, h0: Any = None,
    lengths: Any = None, direction: str = "forward", activation: Any = "tanh", clip: Any = None, method: str = "auto",
    out: Any = None, saving: bool = False, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `rnn`; `saving` asks for what a gradient needs beside the results, as `keeps` lists it."""
    return _sequence_call(
        _cell("rnn", direction, activation, clip), out, method, saving, on, x=x, weight_ih=weight_ih,
        weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh, h0=h0, lengths=lengths,
    )  # fmt: skip


def prepare_lstm(
    x: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *, h0: Any = None, c0: Any = None,
    peephole: Any = None, lengths: Any = None, direction: str = "forward",
    activations: Any = ("sigmoid", "tanh", "tanh"), input_forget: bool = False, clip: Any = None, method: str = "auto",
    out: Any = None, saving: bool = False, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `lstm`; `saving` as for `prepare_rnn`."""
    return _sequence_call(
        _cell("lstm", direction, activations, clip, input_forget=input_forget), out, method, saving, on, x=x,
        weight_ih=weight_ih, weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh, h0=h0, c0=c0, peephole=peephole,
        lengths=lengths,
    )  # fmt: skip


def prepare_gru(
    x: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *, h0: Any = None,
    lengths: Any = None, direction: str = "forward", activations: Any = ("sigmoid", "tanh"),
    linear_before_reset: bool = True, clip: Any = None, method: str = "auto", out: Any = None, saving: bool = False,
    on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `gru`; `saving` as for `prepare_rnn`."""
    return _sequence_call(
        _cell("gru", direction, activations, clip, linear_before_reset=linear_before_reset), out, method, saving, on,
        x=x, weight_ih=weight_ih, weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh, h0=h0, lengths=lengths,
    )  # fmt: skip


def prepare_rnn_step(
    x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *,
    activation: Any = "tanh", clip: Any = None, method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `rnn_step`."""
    cell = _cell("rnn", "forward", activation, clip)
    return _step_call(cell, x, {"h": h}, weight_ih, weight_hh, bias_ih, bias_hh, None, out, method, on)


def prepare_lstm_step(
    x: Any, h: Any, c: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *,
    peephole: Any = None, activations: Any = ("sigmoid", "tanh", "tanh"), input_forget: bool = False, clip: Any = None,
    method: str = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `lstm_step`."""
    cell = _cell("lstm", "forward", activations, clip, input_forget=input_forget)
    return _step_call(cell, x, {"h": h, "c": c}, weight_ih, weight_hh, bias_ih, bias_hh, peephole, out, method, on)


def prepare_gru_step(
    x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any = None, bias_hh: Any = None, *,
    activations: Any = ("sigmoid", "tanh"), linear_before_reset: bool = True, clip: Any = None, method: str = "auto",
    out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check the arguments of `gru_step`."""
    cell = _cell("gru", "forward", activations, clip, linear_before_reset=linear_before_reset)
    return _step_call(cell, x, {"h": h}, weight_ih, weight_hh, bias_ih, bias_hh, None, out, method, on)


def on_backend(lengths: Any, x: Any) -> Any:
    """Lengths as an array of the library that owns x; those that the host has are held to be within the sequence.

    An array of another library than NumPy is taken as it is: to look at its values would be to wait for them.
    """
    if lengths is None:
        return None
    if not isinstance(lengths, (list, tuple)) and backend_for({"lengths": lengths}).name != "numpy":
        return lengths
    if getattr(x, "ndim", None) != 3:
        return None  # x is refused for that
    try:
        counts = np.asarray(lengths)
    except ValueError:  # rows of several lengths
        raise TypeError(f"lengths must be integers, one for each sample, given {lengths!r}") from None
    if counts.dtype.kind not in "iu" and counts.size:
        raise TypeError(f"lengths must be integers, given {lengths if counts.size < 9 else counts.dtype}")
    steps, batch, _ = x.shape
    if counts.shape != (batch,):
        raise ValueError(f"lengths has shape {counts.shape}, needed ({batch},): one for each sample")
    if batch and not 0 <= counts.min() <= counts.max() <= steps:
        raise ValueError(f"lengths must be from 0 to {steps}, given {int(counts.min())} to {int(counts.max())}")
    if dtype_name(counts.dtype) not in COUNT_ITEMSIZE or not counts.dtype.isnative:
        counts = counts.astype(np.int64)
    return backend_for({"x": x}).from_host(counts)


@dataclass(frozen=True)
class _Cell:
    """What is computed, sizes aside."""

    kind: str
    direction: str
    activations: tuple[tuple[Activation, ...], ...]
    clip: Any
    input_forget: bool = False
    linear_before_reset: bool = True

    def geometry(self, steps: int, batch: int, inputs: int, hidden: int) -> RecurrentGeometry:
        return RecurrentGeometry(
            cell=self.kind, steps=steps, batch=batch, inputs=inputs, hidden=hidden, direction=self.direction,
            activations=self.activations, clip=_bound(self.clip), input_forget=self.input_forget,
            linear_before_reset=self.linear_before_reset,
        )  # fmt: skip


def _cell(kind: str, direction: Any, activations: Any, clip: Any, **flags: Any) -> _Cell:
    groups = activation_groups(activations, kind, direction)
    return _Cell(kind, direction, groups, clip, **{name: flag(name, value) for name, value in flags.items()})


def _sequence_call(
    cell: _Cell, out: Any, method: str, saving: bool, on: str | None, *, x: Any, lengths: Any, **others: Any
) -> Call:
    arguments = {"x": x, **others, "lengths": on_backend(lengths, x)}
    roles = ("out", "h", "c") if cell.kind == "lstm" else ("out", "h")
    arrays, result_names = _with_out(arguments, out, roles)
    backend = _owner(arrays)
    geometry = _geometry(cell, arrays, tuple(arrays["x"].shape), "(T, N, I)")
    state = (geometry.directions, geometry.batch, geometry.hidden)
    shapes = {"out": (geometry.steps, geometry.batch, geometry.directions * geometry.hidden), "h": state, "c": state}
    dtype = _promoted(arrays)
    results = {role: Result(name, shapes[role], dtype) for role, name in result_names.items()}
    kept_dtype = dtype_from_name(accumulator(dtype_name(dtype)))
    kept = [Result(name, shape, kept_dtype) for name, shape in geometry.keeps.items()] if saving else []
    return _call(backend, geometry, arrays, {name: name for name in arguments}, results, kept, method, on)


def _step_call(
    cell: _Cell, x: Any, states: Mapping[str, Any], weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any,
    peephole: Any, out: Any, method: str, on: str | None,
) -> Call:  # fmt: skip
    """A sequence of one step, whose states have no axis of directions: `states` by name, h and c."""
    arguments = {
        "x": x, **states, "weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh,
        "peephole": peephole,
    }  # fmt: skip
    arrays, result_names = _with_out(arguments, out, ("out", "c") if "c" in states else ("out",))
    backend = _owner(arrays)
    shape = tuple(arrays["x"].shape)
    geometry = _geometry(cell, arrays, (1, *shape) if len(shape) == 2 else shape[:2], "(N, I)")
    results = {
        role: Result(name, (geometry.batch, geometry.hidden), _promoted(arrays)) for role, name in result_names.items()
    }
    names = {f"{name}0" if name in states else name: name for name in arguments}
    return _call(backend, geometry, arrays, names, results, [], method, on)


def _promoted(arrays: Mapping[str, Any]) -> np.dtype:
    return promote({name: arrays[name] for name in _REQUIRED})


def _owner(arrays: Mapping[str, Any]) -> Backend:
    """The one backend of all arrays, which are of dtypes that there are here."""
    backend = backend_for(arrays)
    for name, array in arrays.items():
        if name == "lengths":
            if dtype_name(array.dtype) not in COUNT_ITEMSIZE:
                raise TypeError(f"lengths has dtype {array.dtype}; supported are {', '.join(COUNT_ITEMSIZE)}")
            continue
        check_dtype(name, array.dtype)
        if array.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {array.dtype}; recurrent layers are of real numbers")
    return backend


def _geometry(cell: _Cell, arrays: Mapping[str, Any], x_shape: tuple[int, ...], axes: str) -> RecurrentGeometry:
    """The problem, from the shapes of x, as that of a sequence, and of the recurrent weight."""
    if len(x_shape) != 3:
        raise ValueError(f"x has shape {tuple(arrays['x'].shape)}, needed {axes}: {_AXES[axes]}")
    steps, batch, inputs = x_shape
    gates, directions = GATES[cell.kind], len(DIRECTIONS[cell.direction])
    shape = tuple(arrays["weight_hh"].shape)
    lead = (2,) * (directions == 2)
    hidden = shape[-1] if shape else 0
    if shape != (*lead, gates * hidden, hidden):
        rows = f"{gates} * H" if gates > 1 else "H"
        needed = f"(2, {rows}, H), as direction is 'bidirectional'" if lead else f"({rows}, H)"
        plain = (gates * hidden, hidden)
        hint = ""
        if not lead and shape == (1, *plain):
            hint = "; one direction has no axis for directions: weight_hh[0]"
        elif len(shape) == 2 and shape[1] == gates * shape[0]:
            hint = "; its transpose has it: weight_hh.T"
        raise ValueError(f"weight_hh has shape {shape}, needed {needed}{hint}")
    return cell.geometry(steps, batch, inputs, hidden)


def _call(
    backend: Backend, geometry: RecurrentGeometry, arrays: dict[str, Any], names: Mapping[str, str],
    results: Mapping[str, Result], kept: list[Result], method: str, on: str | None,
) -> Call:  # fmt: skip
    """The common part: `names` and `results` by role."""
    check_recurrent_method(method)
    directions, hidden, batch = geometry.directions, geometry.hidden, geometry.batch
    rows = geometry.gates * hidden
    full = {
        "x": (geometry.steps, batch, geometry.inputs), "weight_ih": (directions, rows, geometry.inputs),
        "weight_hh": (directions, rows, hidden), "bias_ih": (directions, rows), "bias_hh": (directions, rows),
        "h0": (directions, batch, hidden), "c0": (directions, batch, hidden), "peephole": (directions, 3 * hidden),
        "lengths": (batch,), "out": (geometry.steps, batch, directions * hidden), "h": (directions, batch, hidden),
        "c": (directions, batch, hidden),
    }  # fmt: skip
    # An axis of one direction is not the caller's, but in the states of a sequence; a step has no axis of time.
    lacking = {"weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole"} if directions == 1 else set()
    lacking |= set() if "h" in results else {"x", "h0", "c0"}
    described: dict[str, Operand | None] = {}
    for role, name in names.items():
        if name not in arrays:
            continue
        array, shape = arrays[name], full[role]
        needed = shape[1:] if role in lacking else shape
        if tuple(array.shape) != needed:
            because = ", as direction is 'bidirectional'" if directions == 2 and shape[0] == 2 else ""
            if role == "bias_ih" and tuple(array.shape)[-1:] == (2 * rows,):
                because += "; both biases in one array are split by from_onnx_weights"
            raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {needed}{because}")
        described[role] = _described(backend, name, array, shape)
    for role, result in results.items():
        described[role] = _described_result(backend, arrays, result, full[role])
    settings = current_settings()
    inputs = {name: arrays[name] for name in _REQUIRED}
    request = RecurrentRequest(
        geometry=geometry, **described,  # type: ignore[arg-type]
        kept=tuple(_described_result(backend, arrays, result, result.shape) for result in kept), method=method,
        machine=machine_for(backend, on), workspace_limit=settings.workspace_limit, allow_tf32=settings.allow_tf32,
        notes=widened(inputs, results["out"].dtype),
    )  # fmt: skip
    no_images = Axes(True, 0)  # the backend gets every array as it is
    return Call(backend, request, arrays, frozenset(), no_images, (*results.values(), *kept), listed=True)


def _described(backend: Backend, name: str, array: Any, shape: tuple[int, ...]) -> Operand:
    """An array as planning sees it: `shape` may have an axis of length 1 in front of the array's own."""
    strides = (*(0,) * (len(shape) - array.ndim), *array.strides)
    return array_operand(name, dtype_name(array.dtype), shape, strides, backend.address(array) if array.size else 0)


def _described_result(backend: Backend, arrays: Mapping[str, Any], result: Result, shape: tuple[int, ...]) -> Operand:
    if result.name in arrays:
        check_out(arrays, result, backend)
        return _described(backend, result.name, arrays[result.name], shape)
    name = dtype_name(result.dtype)
    return array_operand(result.name, name, shape, byte_strides(shape, name), 0)


def _with_out(arguments: Mapping[str, Any], out: Any, roles: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays that are there, with those that the caller gave for results, and the name of each result.

    `out` is one array, for the first result, or as many as there are results, nested as these are returned.
    """
    needed = (*_REQUIRED, *(name for name in ("h", "c") if name in arguments))
    arrays = {name: array for name, array in arguments.items() if array is not None or name in needed}
    if not isinstance(out, (tuple, list)):
        names = {role: f"out[{i}]" if i else "out" for i, role in enumerate(roles)}
        return (arrays if out is None else {**arrays, "out": out}), names
    flat = flat_results(out)
    if len(flat) != len(roles):
        raise ValueError(f"out must be one array, for the first result, or {len(roles)} of them, given {len(flat)}")
    names = {role: f"out[{i}]" for i, role in enumerate(roles)}
    return {**arrays, **dict(zip(names.values(), flat))}, names


def flat_results(out: Any) -> Any:
    """``(y, (h, c))`` as ``(y, h, c)``; anything else as it is."""
    if isinstance(out, (tuple, list)) and len(out) == 2 and isinstance(out[1], (tuple, list)):
        return (out[0], *out[1])
    return out


def activation_groups(given: Any, kind: str, direction: Any) -> tuple[tuple[Activation, ...], ...]:
    """Activations for each direction; `given` for one, or a pair for two."""
    name = "activation" if kind == "rnn" else "activations"
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, given {direction!r}")
    count, directions = _ACTIVATIONS[kind], len(DIRECTIONS[direction])
    each = [given] if kind == "rnn" and _is_one(given) else given
    if not isinstance(each, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of {count}, given {given!r}")
    if all(map(_is_one, each)) and len(each) == count:
        group = tuple(resolve_activation(one, recurrent=True) for one in each)
        return (group,) * directions
    if directions == 2 and len(each) == 2:
        pairs = [[one] if kind == "rnn" and _is_one(one) else one for one in each]
        if all(isinstance(group, (tuple, list)) and len(group) == count for group in pairs):
            return tuple(tuple(resolve_activation(one, recurrent=True) for one in group) for group in pairs)
    wanted = f"{count} activation" + "s" * (count > 1)
    raise ValueError(
        f"{name} must be {wanted}{', or a pair of that, one for each direction' * (directions == 2)}; given {given!r}"
    )


def _is_one(activation: Any) -> bool:
    """Whether this is one activation: a tuple of several has names or tuples where this has numbers."""
    if isinstance(activation, (tuple, list)):
        return (
            bool(activation)
            and isinstance(activation[0], str)
            and not any(parameter is None or isinstance(parameter, (str, tuple, list)) for parameter in activation[1:])
        )
    return activation is None or isinstance(activation, str)


def _bound(clip: Any) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, Real):
        raise TypeError(f"clip must be a number or None, given {clip!r}")
    bound = as_float("clip", clip)
    if not bound >= 0:
        raise ValueError(f"clip must be at least 0, given {clip!r}")
    return bound
