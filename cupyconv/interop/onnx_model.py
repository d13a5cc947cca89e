"""A runnable ONNX model: calls of cupyconv on NumPy or CuPy arrays, one after the other.

Each convolution is a call that is checked and planned once per image size, and caches the forms of its weight
(`call.repeated`).  An image is freed after the last step that reads it.  A concatenation is one array, into which each
layer writes its channels; a walk through the graph finds their positions without computing any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

import cupyconv
from cupyconv.call.operation import CheckedCall
from cupyconv.call.options import current_settings
from cupyconv.call.repeated import RepeatedCall
from cupyconv.cuda.plan.cost import by_model
from cupyconv.cuda.plan.draft import Draft
from cupyconv.interop.onnx import OPERATORS
from cupyconv.interop.onnx_elementwise import Call, Node
from cupyconv.interop.onnx_elementwise import run as run_elementwise
from cupyconv.interop.onnx_graph import CONVOLUTIONS, Graph, reads
from cupyconv.numpy.threads import BLAS
from cupyconv.ops.onnx import onnx_padding
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Plan
from cupyconv.typing import Array

Values = dict[str, Any]

#: Number of combinations of input sizes whose channel positions are cached.
_KNOWN_SIZES = 16


class Whole(NamedTuple):
    """A concatenation: its shape and dtype, and the first channel of each of its inputs."""

    shape: tuple[int, ...]
    dtype: np.dtype
    first: list[int]


class Places:
    """Where a run writes the parts of concatenations: channels of an array that the first part allocates."""

    def __init__(self, graph: Graph, wholes: Mapping[str, Whole], empty: Callable[..., Array]) -> None:
        self._parts, self._wholes, self._empty = graph.parts, wholes, empty
        self._arrays: dict[str, Array] = {}

    def of(self, name: str) -> Array | None:
        """Return the array that a value must be written to, or None if any will do."""
        if name not in self._parts or not self._wholes:
            return None
        whole, place = self._parts[name]
        array, first = self.whole(whole), self._wholes[whole].first
        return array[:, first[place] : first[place + 1]]

    def whole(self, name: str) -> Array:
        """Return the array of a concatenation, which may be part of another one."""
        if name not in self._arrays:
            place, known = self.of(name), self._wholes[name]
            self._arrays[name] = self._empty(known.shape, known.dtype) if place is None else place
        return self._arrays[name]

    def finished(self, name: str) -> Array | None:
        """Return the array of a concatenation whose parts are all written, or None for another value."""
        return self._arrays.pop(name, None)


class Model:
    """A runnable model, called as ``run(**inputs)``.  `load` returns it."""

    def __init__(self, graph: Graph, xp: Any) -> None:
        self._graph, self._xp = graph, xp
        #: Integers are shapes and indices, which the host must know.
        self._constants = {
            name: xp.asarray(array) if array.dtype.kind == "f" and array.ndim else array
            for name, array in graph.constants.items()
        }
        self._last_reads: list[list[str]] = []
        kept, later = set(graph.outputs), set(graph.outputs)
        for node in reversed(graph.nodes):
            read = {name for name in reads(node) if name not in self._constants}
            unread = {name for name in node.outputs if name not in later}
            self._last_reads.append(sorted((read - later) | unread - kept))
            later |= read
        self._last_reads.reverse()
        #: By shapes and dtypes of inputs.
        self._known_sizes: dict[Any, Mapping[str, Whole]] = {}

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return list(self._graph.inputs)

    @property
    def outputs(self) -> list[str]:
        """The names of the model's outputs."""
        return list(self._graph.outputs)

    def __repr__(self) -> str:
        convolutions = sum(node.op in CONVOLUTIONS for node in self._graph.nodes)
        steps = f"{len(self._graph.nodes)} steps, {convolutions} of them convolutions"
        return f"Model({', '.join(self.inputs)} -> {', '.join(self.outputs)}: {steps}, on {self._xp.__name__})"

    def __call__(self, **inputs: Array) -> Any:
        """Return the outputs of the model: one array, or a tuple in the model's order.

        Parameters
        ----------
        **inputs : array
            Inputs by the model's names; use ``run(**{"data/in": x})`` for a name that is not a Python identifier.
        """
        values = self._checked(inputs)
        places = Places(self._graph, self._wholes(values), self._xp.empty)
        compute = partial(self._compute, values, places)
        if self._xp is np and current_settings().threads is None:
            BLAS.hold_while(compute)  # else BLAS threads busy-wait between two products while our threads compute
        else:
            compute()
        found = tuple(self._of(values, name) for name in self._graph.outputs)
        return found if len(found) > 1 else found[0]

    def _compute(self, values: dict[str, Any], places: Places) -> None:
        for node, unread in zip(self._graph.nodes, self._last_reads):
            for name, value in zip(node.outputs, self._run(node, values, places)):
                if name:
                    values[name] = value
            for name in unread:
                values.pop(name, None)

    def explain(self, *, on: str | None = None, **inputs: Array) -> ModelPlan:
        """Describe what a run would do, as a printable page.  No layer is computed.

        Parameters
        ----------
        on : str, optional
            A GPU architecture, as for `cupyconv.explain`.  The arrays are then NumPy arrays.
        **inputs : array
            As for a run.  An input whose shape the model declares may be omitted.
        """
        for name, (dtype, sizes) in self._graph.inputs.items():
            if name not in inputs and dtype is not None and sizes is not None and None not in sizes:
                inputs[name] = self._xp.zeros(sizes, dtype)
        given = self._checked(inputs)
        places = Places(self._graph, self._wholes(given), self._xp.zeros)
        lines, peak, kept = [], 0, 0
        for node, values, call in self._walked(given, places, on):
            plan, seconds = call.plan() if call else None, None
            if call is not None and plan is not None and isinstance(call.problem.machine, GpuModel):
                seconds = Draft(plan.method, plan.steps).cost(call.problem.machine).seconds
            forms = _cached_bytes(plan) if plan else 0
            peak = max(peak, _nbytes(values.values()) + (plan.workspace_bytes - forms if plan else 0))
            kept += forms
            lines.append(ModelStep(node.op, tuple(node.outputs), plan, seconds))
        weights = sum(array.nbytes for array in self._constants.values())
        kept += sum(getattr(step, "cached_bytes", 0) for line in lines if line.plan for step in line.plan.steps)
        return ModelPlan(tuple(lines), dict(self._graph.done), peak, weights + kept)

    def _walked(
        self, values: Values, places: Places, on: str | None = None
    ) -> Iterator[tuple[Node, Values, CheckedCall | None]]:
        """Yield every node, the values available after it, and its call if it is a convolution.

        Convolutions are not run: zeros stand for their results.
        """
        for node, unread in zip(self._graph.nodes, self._last_reads):
            call: CheckedCall | None = None
            if node.op in CONVOLUTIONS:
                repeated, given = self._layer(node, values, places)
                call = repeated.checked(on, **given)
                result = call.results[0]
                outputs: Sequence[Any] = [given.get("out")]
                if "out" not in given:
                    shape, order = result.memory
                    zeros = self._xp.zeros(shape, result.dtype)
                    outputs = [zeros if order is None else zeros.transpose(order)]
            else:
                with np.errstate(all="ignore"):  # inputs may be zeros in place of a layer's result
                    outputs = self._run(node, values, places)
            values |= {name: value for name, value in zip(node.outputs, outputs) if name}
            yield node, values, call
            for name in unread:
                values.pop(name, None)

    def _wholes(self, inputs: Values) -> Mapping[str, Whole]:
        """Return the concatenations whose parts are written in place, for inputs of these sizes.

        Empty if there are integer inputs, because these may determine sizes.
        """
        if not self._graph.parts or any(array.dtype.kind != "f" for array in inputs.values()):
            return {}
        sizes = tuple((name, tuple(array.shape), array.dtype) for name, array in inputs.items())
        found = self._known_sizes.get(sizes)
        if found is None:
            found = {}
            host = self if self._xp is np else Model(self._graph, np)
            zeros = {name: np.zeros(shape, dtype) for name, shape, dtype in sizes}
            for node, values, _ in host._walked(zeros, Places(self._graph, {}, np.zeros)):
                if node.outputs[0] in self._graph.whole:
                    whole = values[node.outputs[0]]
                    channels = (values[name].shape[1] for name in node.inputs)
                    found[node.outputs[0]] = Whole(whole.shape, whole.dtype, list(accumulate(channels, initial=0)))
            if len(self._known_sizes) >= _KNOWN_SIZES:
                self._known_sizes = {}
            self._known_sizes[sizes] = found
        return found

    def _checked(self, inputs: Mapping[str, Array]) -> Values:
        """Return the inputs if they match those of the model."""
        needed = self._graph.inputs
        if inputs.keys() != needed.keys():
            raise TypeError(f"the model takes {', '.join(needed)}, given {', '.join(inputs) or 'nothing'}")
        for name, array in inputs.items():
            dtype, sizes = needed[name]
            if not isinstance(array, self._xp.ndarray):
                kind = type(array)
                raise TypeError(
                    f"{name} must be an array of {self._xp.__name__}, given {kind.__module__}.{kind.__name__}"
                )
            if dtype is not None and array.dtype != dtype:
                raise TypeError(f"{name} has dtype {array.dtype}, the model takes {dtype}")
            fits = sizes is None or (
                len(sizes) == array.ndim and all(size in (None, n) for size, n in zip(sizes, array.shape))
            )
            if not fits:
                raise ValueError(f"{name} has shape {array.shape}, the model takes {sizes}")
        return dict(inputs)

    def _of(self, values: Values, name: str) -> Any:
        """Return a value of the run, a constant, or None if an optional value is absent."""
        if not name:
            return None
        return values[name] if name in values else self._constants[name]

    def _run(self, node: Node, values: Values, places: Places) -> Sequence[Any]:
        """Return the outputs of a node."""
        if node.op in CONVOLUTIONS:
            call, given = self._layer(node, values, places)
            return (call(**given),)
        whole = places.finished(node.outputs[0])
        if whole is not None:
            return (whole,)
        outputs = self._computed(node, [self._of(values, name) for name in node.inputs])
        place = places.of(node.outputs[0])
        if place is None:
            return outputs
        place[...] = outputs[0]
        return place, *outputs[1:]

    def _computed(self, node: Node, given: list[Any]) -> Sequence[Any]:
        """Return the outputs of an operator other than a convolution."""
        if node.op == "Merged":
            return (tuple(image for one in given for image in (one if isinstance(one, tuple) else (one,))),)
        if node.op == "Affine":
            x, scale, shift = given
            y = x * scale
            y += shift
            return (y.astype(x.dtype, copy=False),)
        if node.op in OPERATORS:
            return OPERATORS[node.op](*given, **node.attributes, outputs=len(node.outputs))
        on_host = all(type(one) is np.ndarray or np.isscalar(one) for one in given if one is not None)
        xp = np if on_host else self._xp
        if not on_host and node.op in _MIXING:
            given = [one if one is None else self._xp.asarray(one) for one in given]
        return run_elementwise(Call(node, xp, self._graph.version), given)

    def _layer(self, node: Node, values: Values, places: Places) -> tuple[RepeatedCall, dict[str, Any]]:
        """Return the call of a convolution and the arrays for it."""
        call, names = self._layers[id(node)]
        given = {argument: self._of(values, name) for argument, name in names.items()}
        if isinstance(given["x"], tuple):
            given["x"] = list(given["x"])
        place = places.of(node.outputs[0])
        if place is not None:
            given["out"] = place
        return call, given

    @cached_property
    def _layers(self) -> dict[int, tuple[RepeatedCall, dict[str, str]]]:
        """The call of each convolution, and the values that are its arguments."""
        return {id(node): self._layer_of(node) for node in self._graph.nodes if node.op in CONVOLUTIONS}

    def _layer_of(self, node: Node) -> tuple[RepeatedCall, dict[str, str]]:
        said = node.attributes
        strides, dilations = said.get("strides"), said.get("dilations")
        size = said.get("output_shape") if node.op == "ConvTranspose" else None
        fixed = {
            "stride": tuple(strides) if strides else 1,
            "padding": onnx_padding(None if size else said.get("pads"), said.get("auto_pad", "NOTSET")),
            "dilation": tuple(dilations) if dilations else 1,
            "groups": said.get("group", 1),
            "activation": said.get("activation"),
        }
        names = dict(zip(("x", "weight", "bias"), node.inputs)) | {"residual": said.get("residual", "")}
        fixed |= {one: self._constants[name] for one, name in names.items() if one != "x" and name in self._constants}
        changing = {one: name for one, name in names.items() if name and one not in fixed}
        if node.op == "ConvTranspose":
            extra = said.get("output_padding")
            fixed["output_padding"], fixed["output_shape"] = tuple(extra) if extra else 0, tuple(size) if size else None
            return RepeatedCall(cupyconv.conv_transpose, fixed), changing
        if "prologue" in said:
            vectors = (self._constants[said[name]] if name in said else None for name in ("scale", "shift"))
            fixed["prologue"] = (*vectors, said["prologue"])
        return RepeatedCall(cupyconv.conv, fixed), changing


#: Operators that compute with constants, which are moved to the GPU if another input is there.
_MIXING = ("Add", "Sub", "Mul", "Div", "Sum", "MatMul", "Gemm", "Concat", "Gather")


def _nbytes(values: Iterable[Any]) -> int:
    """Return the bytes of arrays, also those in tuples.  A view counts as its base array; each array counts once."""
    arrays = [array for value in values for array in (value if isinstance(value, tuple) else (value,))]
    owners = [array if array.base is None else array.base for array in arrays]
    return sum(owner.nbytes for owner in {id(owner): owner for owner in owners}.values())


def _cached_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's workspace that are cached forms of its weight."""
    return sum(buffer.space for buffer in plan.workspace if buffer.of)


@dataclass(frozen=True)
class ModelStep:
    """A step of a model: its operator, outputs, the plan of a convolution, and its estimated time on a GPU."""

    op: str
    outputs: tuple[str, ...]
    plan: Plan | None
    seconds: float | None

    def __str__(self) -> str:
        if self.plan is None:
            return f"  {self.op:20} -> {self.outputs[0]}"
        plan = self.plan
        how = f": {plan.how}" if plan.how else ""
        work = f"{plan.flops:,} FLOP, {plan.bytes_moved:,} B moved, workspace {plan.workspace_bytes:,} B"
        return f"  {self.op:20} -> {self.outputs[0]}\n    {plan.problem}\n    {plan.method}{how}; {work}"


@dataclass(frozen=True)
class ModelPlan:
    """Describes what a run of a model would do.

    Attributes
    ----------
    steps : tuple of ModelStep
        In order of execution; that of a convolution has its `cupyconv.Plan`.
    done : dict
        The simplifications and their counts.
    peak_bytes, weight_bytes : int
        The peak memory of images and the workspace of one layer, and the memory of constants.
    """

    steps: tuple[ModelStep, ...]
    done: dict[str, int]
    peak_bytes: int
    weight_bytes: int

    def __str__(self) -> str:
        plans = [step.plan for step in self.steps if step.plan is not None]
        flops, moved = sum(plan.flops for plan in plans), sum(plan.bytes_moved for plan in plans)
        where = f" on {plans[0].backend} ({plans[0].device})" if plans else ""
        times = [step.seconds for step in self.steps if step.seconds is not None]
        took = f", {by_model(sum(times))}" if times else ""
        return "\n".join(
            [
                f"model of {len(self.steps)} steps, {len(plans)} of them convolutions{where}",
                f"  convolutions {flops:,} FLOP, {moved:,} B moved{took}",
                f"  memory       images at most {self.peak_bytes:,} B, constants {self.weight_bytes:,} B",
                *(f"  {count:12} {what}" for what, count in self.done.items()),
                *map(str, self.steps),
            ]
        )
