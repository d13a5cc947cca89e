"""A model of ONNX as calls of cupyconv: read once, made simpler once, then run on NumPy or CuPy arrays.

::

    graph --constants folded, affine maps found--> nodes --fused--> steps --run--> outputs

    BatchNormalization, Mul and Add with constants    y = scale[c] * x + shift[c], an affine map; two are one
    Conv, affine map                                  Conv with another weight and bias
    Conv, Add (with an image of its shape), Relu      Conv with residual= and activation=
    affine map, Relu, Conv                            Conv with prologue=
    Concat of channels, Conv                          Conv of a list

A value that more than one node reads is fused with none.  An image is let go after the last step that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan.cost import by_model
from cupyconv.cuda.plan.draft import Draft
from cupyconv.interop.onnx import OPERATORS
from cupyconv.interop.onnx_elementwise import ELEMENTWISE, Call, Node, refused
from cupyconv.interop.onnx_elementwise import run as run_elementwise
from cupyconv.ops.onnx import onnx_padding
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Plan
from cupyconv.typing import Array

Values = dict[str, Any]
CONVOLUTIONS = ("Conv", "ConvTranspose")

#: Activations that a convolution ends with, by ONNX's name: what makes ours of a node and the constants of a graph.
ACTIVATIONS: dict[str, Callable[[Node, Mapping[str, np.ndarray]], Any]] = {
    "Relu": lambda node, constants: "relu",
    "LeakyRelu": lambda node, constants: ("leaky_relu", node.attributes.get("alpha", 0.01)),
    "Elu": lambda node, constants: ("elu", node.attributes.get("alpha", 1.0)),
    "Sigmoid": lambda node, constants: "sigmoid",
    "HardSigmoid": lambda node, constants: (
        "hard_sigmoid", node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5),
    ),
    "HardSwish": lambda node, constants: "hardswish",
    "Tanh": lambda node, constants: "tanh",
    "Softplus": lambda node, constants: "softplus",
    "Clip": lambda node, constants: _clip(node, constants),
}  # fmt: skip


def _clip(node: Node, constants: Mapping[str, np.ndarray]) -> Any:
    """Both bounds as attributes or as constants; None where one is neither."""
    given = dict(zip(("min", "max"), node.inputs[1:]))
    bounds: list[Any] = [
        node.attributes.get(name) if not given.get(name) else constants.get(given[name]) for name in ("min", "max")
    ]
    return None if any(bound is None for bound in bounds) else ("clip", *map(float, bounds))


@dataclass
class Graph:
    """Nodes in an order in which they can run, constants, and what comes in and goes out."""

    nodes: list[Node]
    constants: dict[str, np.ndarray]
    inputs: dict[str, tuple[np.dtype | None, tuple[int | None, ...] | None]]
    outputs: list[str]
    version: int
    #: Sizes by name, a size that is not known by its own; those of values that shape inference finds.
    shapes: dict[str, tuple[int | str, ...]]
    #: What was made simpler, in words, and how often.
    done: Counter[str] = field(default_factory=Counter)

    def readers(self) -> dict[str, list[Node | None]]:
        """Of each value the nodes that read it; what goes out is read by None, too."""
        found: dict[str, list[Node | None]] = {}
        for name in self.outputs:
            found.setdefault(name, []).append(None)
        for node in self.nodes:
            for name in _reads(node):
                found.setdefault(name, []).append(node)
        return found

    def read_once(self) -> set[str]:
        """Values with one reader; fusing changes that of none that is left."""
        return {name for name, readers in self.readers().items() if len(readers) == 1}

    def makers(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs if name}


def _reads(node: Node) -> list[str]:
    """All values that a node reads, what was fused into it included."""
    fused = [node.attributes[name] for name in ("residual", "scale", "shift") if name in node.attributes]
    return [name for name in (*node.inputs, *fused) if name]


# --- from ONNX --------------------------------------------------------------------------------------------------


def read(model: Any) -> Graph:
    """The graph of a model, or of a file; one error names all operators that are not known."""
    import onnx
    from onnx import helper, numpy_helper, shape_inference

    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(model)
    versions = {one.domain: one.version for one in model.opset_import}
    unknown: Counter[str] = Counter()
    nodes = []
    for proto in model.graph.node:
        attributes = {one.name: _plain(helper.get_attribute_value(one)) for one in proto.attribute}
        name = f"{proto.domain}.{proto.op_type}" if proto.domain not in ("", "ai.onnx") else proto.op_type
        node = Node(name, list(proto.input), list(proto.output), attributes)
        if name not in OPERATORS and refused(node):
            unknown[refused(node)] += 1
        nodes.append(node)
    if unknown:
        listed = ", ".join(f"{name} ({count} x)" if count > 1 else name for name, count in sorted(unknown.items()))
        raise NotImplementedError(f"operators of this model that cupyconv does not run: {listed}")
    constants = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    inputs: dict[str, Any] = {}
    for value in model.graph.input:
        if value.name not in constants:
            tensor = value.type.tensor_type
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else None
            sizes = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
            inputs[value.name] = dtype, sizes if tensor.HasField("shape") else None
    shapes = {name: constant.shape for name, constant in constants.items()}
    inferred = shape_inference.infer_shapes(model).graph
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}[{axis}]"
                for axis, d in enumerate(value.type.tensor_type.shape.dim)
            )
    outputs = [value.name for value in model.graph.output]
    return Graph(nodes, constants, inputs, outputs, versions.get("", 1), shapes)


def _plain(value: Any) -> Any:
    """An attribute in Python's types and NumPy's."""
    from onnx import TensorProto, numpy_helper

    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


# --- made simpler ----------------------------------------------------------------------------------------------


def simplify(graph: Graph) -> None:
    """All that is listed at the top of this file, in this order."""
    for step in (_fold_constants, _find_affine_maps, _fuse_behind, _fuse_before, _keep_affine_maps, _merge):
        step(graph)
    used = {name for node in graph.nodes for name in _reads(node)} | set(graph.outputs)
    graph.constants = {name: array for name, array in graph.constants.items() if name in used}


def _fold_constants(graph: Graph) -> None:
    left = []
    for node in graph.nodes:
        if node.op in ELEMENTWISE and all(not name or name in graph.constants for name in node.inputs):
            inputs = [graph.constants[name] if name else None for name in node.inputs]
            outputs = run_elementwise(Call(node, np, graph.version), inputs)
            graph.constants |= dict(zip(node.outputs, map(np.asarray, outputs)))
            graph.done["constants folded"] += 1
        else:
            left.append(node)
    graph.nodes = left


def _find_affine_maps(graph: Graph) -> None:
    """Nodes that multiply and add a constant for each channel become `Affine`; two that follow each other become one."""
    for node in graph.nodes:
        found = _affine(graph, node)
        if found is not None:
            x, scale, shift = found
            dtype = np.result_type(*(graph.constants[name].dtype for name in node.inputs if name in graph.constants))
            node.op, node.inputs, node.outputs = "Affine", [x], node.outputs[:1]
            node.attributes = {"vectors": (scale, shift), "dtype": dtype}
    makers, readers = graph.makers(), graph.readers()
    for node in list(graph.nodes):
        before = makers.get(node.inputs[0]) if node.op == "Affine" else None
        if before is not None and before.op == "Affine" and len(readers[before.outputs[0]]) == 1:
            (scale, shift), (then, add) = before.attributes["vectors"], node.attributes["vectors"]
            node.attributes["vectors"] = scale * then, shift * then + add
            node.inputs = before.inputs
            graph.nodes.remove(before)


def _affine(graph: Graph, node: Node) -> tuple[str, np.ndarray, np.ndarray] | None:
    """x and, in float64, scale and shift of each channel; None for what is no such map."""
    constants = graph.constants
    if node.op == "BatchNormalization":
        known = all(name in constants for name in node.inputs[1:]) and node.inputs[0] in graph.shapes
        if node.attributes.get("training_mode") or not known:
            return None
        gamma, beta, mean, var = (constants[name].astype(np.float64) for name in node.inputs[1:])
        scale = gamma / np.sqrt(var + node.attributes.get("epsilon", 1e-5))
        return node.inputs[0], scale, beta - mean * scale
    if node.op not in ("Add", "Sub", "Mul", "Div") or len({name in constants for name in node.inputs}) != 2:
        return None
    x, other = sorted(node.inputs, key=lambda name: name in constants)
    if node.op in ("Sub", "Div") and node.inputs[0] != x:
        return None
    shape, values = graph.shapes.get(x, ()), constants[other]
    if len(shape) < 3 or not isinstance(shape[1], int) or values.dtype.kind != "f" or values.ndim > len(shape):
        return None
    sizes = (*(1,) * (len(shape) - values.ndim), *values.shape)
    if sizes[1] not in (1, shape[1]) or prod(sizes) != sizes[1]:
        return None
    vector = np.broadcast_to(values.reshape(-1).astype(np.float64), (shape[1],))
    if node.op in ("Add", "Sub"):
        return x, np.ones(shape[1]), vector if node.op == "Add" else -vector
    return x, vector if node.op == "Mul" else 1 / vector, np.zeros(shape[1])


def _fuse_behind(graph: Graph) -> None:
    """What follows a convolution, and nobody else reads: an affine map, an image that is added, an activation."""
    makers, alone = graph.makers(), graph.read_once()
    for node in list(graph.nodes):
        behind = [
            makers[name] for name in node.inputs if name in alone and name in makers and makers[name].op in CONVOLUTIONS
        ]
        conv = next((one for one in behind if _takes(graph, one, node)), None)
        if conv is None:
            continue
        # The convolution runs where the node stood: what else that reads is there by then.
        graph.nodes.remove(conv)
        graph.nodes[graph.nodes.index(node)] = conv
        conv.outputs = node.outputs[:1]
        makers[conv.outputs[0]] = conv


def _takes(graph: Graph, conv: Node, node: Node) -> bool:
    """Make a node part of the convolution before it, if it can be."""
    said = conv.attributes
    if "activation" in said:
        return False
    if node.op == "Affine" and "residual" not in said and all(name in graph.constants for name in conv.inputs[1:2]):
        if len(conv.inputs) > 2 and conv.inputs[2] and conv.inputs[2] not in graph.constants:
            return False
        _fold_affine(graph, conv, *node.attributes["vectors"])
        graph.done["batch normalisations and the like folded into weights"] += 1
        return True
    if node.op in ("Add", "Sum") and len(node.inputs) == 2 and conv.op == "Conv" and "residual" not in said:
        (other,) = [name for name in node.inputs if name != conv.outputs[0]] or [""]
        shape = graph.shapes.get(conv.outputs[0])
        if other in graph.constants or shape is None or graph.shapes.get(other) != shape:
            return False
        said["residual"] = other
        graph.done["additions made residual="] += 1
        return True
    activation = ACTIVATIONS[node.op](node, graph.constants) if node.op in ACTIVATIONS else None
    if activation is None or node.inputs[0] != conv.outputs[0]:
        return False
    said["activation"] = activation
    graph.done["activations fused"] += 1
    return True


def _fold_affine(graph: Graph, conv: Node, scale: np.ndarray, shift: np.ndarray) -> None:
    """A weight and a bias that include what follows, under names of their own: another node may have the old ones."""
    weight, groups = graph.constants[conv.inputs[1]], conv.attributes.get("group", 1)
    bias = graph.constants[conv.inputs[2]] if len(conv.inputs) > 2 and conv.inputs[2] else np.zeros(())
    if conv.op == "Conv":
        by_output = weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    else:
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        factors = scale.reshape(groups, 1, weight.shape[1], *(1,) * (weight.ndim - 2))
        by_output = (grouped * factors).reshape(weight.shape)
    names = [f"{kind} of {conv.outputs[0]}" for kind in ("weight", "bias")]
    graph.constants[names[0]] = by_output.astype(weight.dtype)
    graph.constants[names[1]] = (bias * scale + shift).astype(weight.dtype)
    conv.inputs = [conv.inputs[0], *names]


def _fuse_before(graph: Graph) -> None:
    """An affine map, an activation or both before a convolution, that nobody else reads."""
    makers, alone = graph.makers(), graph.read_once()
    for conv in [node for node in graph.nodes if node.op == "Conv"]:
        activation = None
        fused = []
        node = makers.get(conv.inputs[0]) if conv.inputs[0] in alone else None
        if node is not None and node.op in ACTIVATIONS:
            activation = ACTIVATIONS[node.op](node, graph.constants)
            if activation is None:
                continue
            fused.append(node)
            node = makers.get(node.inputs[0]) if node.inputs[0] in alone else None
        if node is not None and node.op == "Affine":
            fused.append(node)
        if not fused:
            continue
        for kind, vector in zip(("scale", "shift"), fused[-1].attributes.get("vectors", ())):
            name = f"{kind} before {conv.outputs[0]}"
            graph.constants[name] = vector.astype(fused[-1].attributes["dtype"])
            conv.attributes[kind] = name
        conv.attributes["prologue"] = activation
        conv.inputs[0] = fused[-1].inputs[0]
        for node in fused:
            graph.nodes.remove(node)
        graph.done["batch normalisations and activations made prologue="] += 1


def _keep_affine_maps(graph: Graph) -> None:
    """Those that no convolution took have their vectors as constants, in the shape that goes along the channels."""
    for node in [node for node in graph.nodes if node.op == "Affine"]:
        rank = len(graph.shapes[node.inputs[0]])
        names = [f"{kind} of {node.outputs[0]}" for kind in ("scale", "shift")]
        for name, vector in zip(names, node.attributes.pop("vectors")):
            graph.constants[name] = vector.astype(node.attributes["dtype"]).reshape(-1, *(1,) * (rank - 2))
        node.inputs += names


def _merge(graph: Graph) -> None:
    """A concatenation of channels that convolutions alone read, or others that are merged, is a list: never built."""
    readers = graph.readers()
    for node in reversed(graph.nodes):
        if node.op == "Concat" and node.attributes.get("axis", 1) == 1:
            as_lists = [
                one is not None
                and (one.op == "Merged" or (one.op in CONVOLUTIONS and one.inputs[0] == node.outputs[0]))
                and one.attributes.get("residual") != node.outputs[0]
                for one in readers[node.outputs[0]]
            ]
            if all(as_lists):
                node.op = "Merged"
                graph.done["concatenations that are never built"] += 1


# --- run --------------------------------------------------------------------------------------------------------


class Model:
    """A model that runs: ``run(**inputs)``.  What `load` returns."""

    def __init__(self, graph: Graph, xp: Any) -> None:
        self._graph, self._xp = graph, xp
        #: Integers are shapes and indices, which the host has to know.
        self._constants = {
            name: xp.asarray(array) if array.dtype.kind == "f" and array.ndim else array
            for name, array in graph.constants.items()
        }
        self._last_reads: list[list[str]] = []
        kept, later = set(graph.outputs), set(graph.outputs)
        for node in reversed(graph.nodes):
            read = {name for name in _reads(node) if name not in self._constants}
            unread = {name for name in node.outputs if name not in later}
            self._last_reads.append(sorted((read - later) | unread - kept))
            later |= read
        self._last_reads.reverse()

    @property
    def inputs(self) -> list[str]:
        """The names of what `run` takes."""
        return list(self._graph.inputs)

    @property
    def outputs(self) -> list[str]:
        """The names of what it returns."""
        return list(self._graph.outputs)

    def __repr__(self) -> str:
        convolutions = sum(node.op in CONVOLUTIONS for node in self._graph.nodes)
        steps = f"{len(self._graph.nodes)} steps, {convolutions} of them convolutions"
        return f"Model({', '.join(self.inputs)} -> {', '.join(self.outputs)}: {steps}, on {self._xp.__name__})"

    def __call__(self, **inputs: Array) -> Any:
        """The outputs of the model: one array, or a tuple of them in the model's order.

        Parameters
        ----------
        **inputs : array
            By the model's names; ``run(**{"data/in": x})`` for one that is no name in Python.
        """
        values = self._checked(inputs)
        for node, unread in zip(self._graph.nodes, self._last_reads):
            for name, value in zip(node.outputs, self._run(node, values)):
                if name:
                    values[name] = value
            for name in unread:
                values.pop(name, None)
        found = tuple(self._of(values, name) for name in self._graph.outputs)
        return found if len(found) > 1 else found[0]

    def explain(self, *, on: str | None = None, **inputs: Array) -> ModelPlan:
        """What a run would do, by a page that can be printed; no layer is computed.

        Parameters
        ----------
        on : str, optional
            A GPU's architecture, as for `cupyconv.explain`; then the arrays are NumPy's.
        **inputs : array
            As for a run.  An input whose shape the model says may be left out.
        """
        for name, (dtype, sizes) in self._graph.inputs.items():
            if name not in inputs and dtype is not None and sizes is not None and None not in sizes:
                inputs[name] = self._xp.zeros(sizes, dtype)
        values, lines, live, peak = self._checked(inputs), [], 0, 0
        for node, unread in zip(self._graph.nodes, self._last_reads):
            plan, seconds = None, None
            if node.op in CONVOLUTIONS:
                function, arguments = self._convolution(node, values)
                call = checked_call(function, on=on, **arguments)
                plan, (result, *_) = call.plan(), call.results
                machine = call.problem.machine
                if isinstance(machine, GpuModel):
                    seconds = Draft(plan.method, plan.steps).cost(machine).seconds
                outputs: Sequence[Any] = [self._xp.zeros(result.shape, result.dtype)]
            else:
                with np.errstate(all="ignore"):  # of zeros that stand for what a layer would compute
                    outputs = self._run(node, values)
            values |= {name: value for name, value in zip(node.outputs, outputs) if name}
            live = sum(_nbytes(value) for name, value in values.items())
            peak = max(peak, live + (plan.workspace_bytes if plan else 0))
            lines.append(ModelStep(node.op, tuple(node.outputs), plan, seconds))
            for name in unread:
                values.pop(name, None)
        weights = sum(array.nbytes for array in self._constants.values())
        return ModelPlan(tuple(lines), dict(self._graph.done), peak, weights)

    def _checked(self, inputs: Mapping[str, Array]) -> Values:
        """The inputs, if they are those of the model."""
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
        """A value: of the run, a constant, or None where an optional one is absent."""
        if not name:
            return None
        return values[name] if name in values else self._constants[name]

    def _run(self, node: Node, values: Values) -> Sequence[Any]:
        """The outputs of a node."""
        if node.op in CONVOLUTIONS:
            function, arguments = self._convolution(node, values)
            return (function(**arguments),)
        given = [self._of(values, name) for name in node.inputs]
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

    def _convolution(self, node: Node, values: Values) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of a convolution, and its arguments."""
        said = node.attributes
        x, weight, bias = (self._of(values, name) for name in (*node.inputs, "")[:3])
        strides, dilations = said.get("strides"), said.get("dilations")
        size = said.get("output_shape") if node.op == "ConvTranspose" else None
        arguments = {
            "x": list(x) if isinstance(x, tuple) else x,
            "weight": weight,
            "bias": bias,
            "stride": tuple(strides) if strides else 1,
            "padding": onnx_padding(None if size else said.get("pads"), said.get("auto_pad", "NOTSET")),
            "dilation": tuple(dilations) if dilations else 1,
            "groups": said.get("group", 1),
            "activation": said.get("activation"),
        }
        if node.op == "ConvTranspose":
            extra = said.get("output_padding")
            sizes = {"output_padding": tuple(extra) if extra else 0, "output_shape": tuple(size) if size else None}
            return cupyconv.conv_transpose, arguments | sizes
        if "residual" in said:
            arguments["residual"] = self._of(values, said["residual"])
        if "prologue" in said:
            vectors = (self._of(values, said.get(name, "")) for name in ("scale", "shift"))
            arguments["prologue"] = (*vectors, said["prologue"])
        return cupyconv.conv, arguments


#: Operators whose constants take part in the arithmetic, and are moved to the GPU beside an image.
_MIXING = ("Add", "Sub", "Mul", "Div", "Sum", "MatMul", "Gemm", "Concat", "Gather")


def _nbytes(value: Any) -> int:
    return 0 if isinstance(value, tuple) else value.nbytes


@dataclass(frozen=True)
class ModelStep:
    """A step of a model: the operator, what it makes, the plan of a convolution, and on a GPU its time by the model."""

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
    """What a run of a model would do.

    Attributes
    ----------
    steps : tuple of ModelStep
        In order; a convolution's has its `cupyconv.Plan`.
    done : dict
        What was made simpler, and how often.
    peak_bytes, weight_bytes : int
        The most memory that images, and the workspace of one layer, take at a time; and that of constants.
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
                f"  memory       images {self.peak_bytes:,} B at the most, constants {self.weight_bytes:,} B",
                *(f"  {count:12} {what}" for what, count in self.done.items()),
                *map(str, self.steps),
            ]
        )
