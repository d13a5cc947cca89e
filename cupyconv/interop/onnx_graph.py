"""An ONNX model as a graph, which is read and simplified once before `onnx_model` runs it.

::

    graph --constants folded, affine maps found--> nodes --fused--> steps --run--> outputs

    BatchNormalization, Mul and Add with constants    y = scale[c] * x + shift[c], an affine map; two become one
    Conv, affine map                                  Conv with another weight and bias
    Conv, Add (with an image of its shape), Relu      Conv with residual= and activation=
    affine map, Relu, Conv                            Conv with prologue=
    Concat of channels that layers compute            nothing: each layer writes its channels of the result
    Concat of other channels, Conv                    Conv of a list

A value that several nodes read is not fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from cupyconv.interop.onnx import OPERATORS
from cupyconv.interop.onnx_elementwise import ELEMENTWISE, Call, Node, refused
from cupyconv.interop.onnx_elementwise import run as run_elementwise

CONVOLUTIONS = ("Conv", "ConvTranspose")
#: Operators whose result is a new image, which may be a part of a larger array.
_WRITING = (*CONVOLUTIONS, "MaxPool", "AveragePool")

#: Activations that a convolution can apply, by ONNX's name: functions of a node and the graph's constants.
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
    """Return the clip activation if both bounds are attributes or constants, else None."""
    given = dict(zip(("min", "max"), node.inputs[1:]))
    bounds: list[Any] = [
        node.attributes.get(name) if not given.get(name) else constants.get(given[name]) for name in ("min", "max")
    ]
    return None if any(bound is None for bound in bounds) else ("clip", *map(float, bounds))


@dataclass
class Graph:
    """Nodes in an executable order, constants, inputs and outputs."""

    nodes: list[Node]
    constants: dict[str, np.ndarray]
    inputs: dict[str, tuple[np.dtype | None, tuple[int | None, ...] | None]]
    outputs: list[str]
    version: int
    #: Sizes of values as far as shape inference finds them; an unknown size is a name.
    shapes: dict[str, tuple[int | str, ...]]
    #: Values written in place into a concatenation: the output of that, and which of its inputs the value is.
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: Outputs of these concatenations.
    whole: set[str] = field(default_factory=set)
    #: Descriptions of the simplifications, with counts.
    done: Counter[str] = field(default_factory=Counter)

    def readers(self) -> dict[str, list[Node | None]]:
        """Return the nodes that read each value; for an output of the graph the list includes None."""
        found: dict[str, list[Node | None]] = {}
        for name in self.outputs:
            found.setdefault(name, []).append(None)
        for node in self.nodes:
            for name in reads(node):
                found.setdefault(name, []).append(node)
        return found

    def read_once(self) -> set[str]:
        """Return the values with exactly one reader.  Fusion does not change this for the values that remain."""
        return {name for name, readers in self.readers().items() if len(readers) == 1}

    def makers(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs if name}


def reads(node: Node) -> list[str]:
    """Return all values that a node reads, including those of nodes fused into it."""
    fused = [node.attributes[name] for name in ("residual", "scale", "shift") if name in node.attributes]
    return [name for name in (*node.inputs, *fused) if name]


# --- from ONNX --------------------------------------------------------------------------------------------------


def read(model: Any) -> Graph:
    """Return the graph of a model or of its file.  One error names all unknown operators."""
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
        raise NotImplementedError(f"cupyconv does not support these operators of the model: {listed}")
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
    """Return an attribute as Python and NumPy types."""
    from onnx import TensorProto, numpy_helper

    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


# --- simplification --------------------------------------------------------------------------------------------


def simplify(graph: Graph) -> None:
    """Apply all simplifications listed at the top of this file, in this order."""
    for step in (_fold_constants, _find_affine_maps, _fuse_behind, _fuse_before, _keep_affine_maps, _place, _merge):
        step(graph)
    used = {name for node in graph.nodes for name in reads(node)} | set(graph.outputs)
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
    """Turn nodes that scale or shift each channel by a constant into `Affine`, and merge two consecutive ones."""
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
    """Return x and, in float64, the scale and shift of each channel, or None if the node is not an affine map."""
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
    """Fuse the affine map, addition or activation after a convolution if nothing else reads its result."""
    makers, alone = graph.makers(), graph.read_once()
    for node in list(graph.nodes):
        behind = [
            makers[name] for name in node.inputs if name in alone and name in makers and makers[name].op in CONVOLUTIONS
        ]
        conv = next((one for one in behind if _takes(graph, one, node)), None)
        if conv is None:
            continue
        # The convolution moves to the node's position, where the node's other inputs are available.
        graph.nodes.remove(conv)
        graph.nodes[graph.nodes.index(node)] = conv
        conv.outputs = node.outputs[:1]
        makers[conv.outputs[0]] = conv


def _takes(graph: Graph, conv: Node, node: Node) -> bool:
    """Fuse a node into the convolution before it if possible; return whether it was fused."""
    said = conv.attributes
    if "activation" in said:
        return False
    if node.op == "Affine" and "residual" not in said and all(name in graph.constants for name in conv.inputs[1:2]):
        if len(conv.inputs) > 2 and conv.inputs[2] and conv.inputs[2] not in graph.constants:
            return False
        _fold_affine(graph, conv, *node.attributes["vectors"])
        graph.done["batch normalizations and other affine steps folded into weights"] += 1
        return True
    if node.op in ("Add", "Sum") and len(node.inputs) == 2 and conv.op == "Conv" and "residual" not in said:
        (other,) = [name for name in node.inputs if name != conv.outputs[0]] or [""]
        shape = graph.shapes.get(conv.outputs[0])
        if other in graph.constants or shape is None or graph.shapes.get(other) != shape:
            return False
        said["residual"] = other
        graph.done["additions fused as residual="] += 1
        return True
    activation = ACTIVATIONS[node.op](node, graph.constants) if node.op in ACTIVATIONS else None
    if activation is None or node.inputs[0] != conv.outputs[0]:
        return False
    said["activation"] = activation
    graph.done["activations fused"] += 1
    return True


def _fold_affine(graph: Graph, conv: Node, scale: np.ndarray, shift: np.ndarray) -> None:
    """Fold an affine map into weight and bias, under new names because other nodes may use the old constants."""
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
    """Fuse an affine map, an activation or both before a convolution if nothing else reads their results."""
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
        graph.done["batch normalizations and activations fused as prologue="] += 1


def _keep_affine_maps(graph: Graph) -> None:
    """Turn the vectors of the remaining affine maps into constants that broadcast along the channels."""
    for node in [node for node in graph.nodes if node.op == "Affine"]:
        rank = len(graph.shapes[node.inputs[0]])
        names = [f"{kind} of {node.outputs[0]}" for kind in ("scale", "shift")]
        for name, vector in zip(names, node.attributes.pop("vectors")):
            graph.constants[name] = vector.astype(node.attributes["dtype"]).reshape(-1, *(1,) * (rank - 2))
        node.inputs += names


def _place(graph: Graph) -> None:
    """Let layers write into the concatenation of channels that reads their results.  Concatenations may be nested."""
    makers = graph.makers()
    for node in [node for node in graph.nodes if is_of_channels(node)]:
        owned = {
            name: (node.outputs[0], place)
            for place, name in enumerate(node.inputs)
            if name in makers and (makers[name].op in _WRITING or makers[name].outputs[0] in graph.whole)
            if name == makers[name].outputs[0] and name not in graph.outputs and name not in graph.parts
            if node.inputs.count(name) == 1
        }
        if len(owned) == len(node.inputs):
            graph.parts |= owned
            graph.whole.add(node.outputs[0])
            graph.done["concatenations whose parts are written in place"] += 1


def is_of_channels(node: Node) -> bool:
    """Return whether a node concatenates images along the channels."""
    return node.op == "Concat" and node.attributes.get("axis", 1) == 1


def _merge(graph: Graph) -> None:
    """Turn a concatenation that only convolutions or merged concatenations read into a list, never materialized."""
    readers = graph.readers()
    for node in reversed(graph.nodes):
        if is_of_channels(node) and node.outputs[0] not in graph.whole:
            as_lists = [
                one is not None
                and (one.op == "Merged" or (one.op in CONVOLUTIONS and one.inputs[0] == node.outputs[0]))
                and one.attributes.get("residual") != node.outputs[0]
                for one in readers[node.outputs[0]]
            ]
            if all(as_lists):
                node.op = "Merged"
                graph.done["concatenations avoided"] += 1
