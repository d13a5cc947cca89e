"""ONNX operators that need only a line or two of NumPy or CuPy, as they occur between the layers of a network.

An operator is a function of its call and of its inputs, with None for an absent input, and returns its outputs.  `xp`
is the arrays' module; shapes use NumPy even if images are on a GPU, because they are computed on the host.  `version`
is the model's operator set version, because some operators turned an attribute into an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from cupyconv.typing import Array


@dataclass(eq=False)
class Node:
    """A node of a graph: the names of its values, and its attributes under ONNX's names."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """The context of an operator's call: everything but its inputs."""

    node: Node
    xp: Any
    version: int

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.node.attributes.get(name, default)

    def ints(self, name: str, inputs: Sequence[Array | None], place: int) -> tuple[int, ...] | None:
        """Return ints that are an attribute in old versions and input number `place` in new ones, or None if absent."""
        given = inputs[place] if place < len(inputs) else None
        value = self(name) if given is None else given
        return None if value is None else tuple(int(one) for one in np.atleast_1d(value))

    def number(self, name: str, inputs: Sequence[Array | None], place: int) -> Any:
        """Return a number that is an attribute in old versions and input number `place` in new ones."""
        given = inputs[place] if place < len(inputs) else None
        return self(name) if given is None else given


Operator = Callable[..., Any]

#: Operators by ONNX's name; each returns one array or a tuple of outputs.
ELEMENTWISE: dict[str, Operator] = {}


def operator(function: Operator) -> Operator:
    """Register a function under its name."""
    ELEMENTWISE[function.__name__] = function
    return function


def run(call: Call, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
    """Return the outputs of an operator in `ELEMENTWISE`."""
    found = ELEMENTWISE[call.node.op](call, *inputs)
    return found if isinstance(found, tuple) else (found,)


@operator
def Add(call: Call, a: Array, b: Array) -> Array:
    return a + b


@operator
def Sub(call: Call, a: Array, b: Array) -> Array:
    return a - b


@operator
def Mul(call: Call, a: Array, b: Array) -> Array:
    return a * b


@operator
def Div(call: Call, a: Array, b: Array) -> Array:
    """Divide; the quotient of integers is rounded toward zero."""
    if a.dtype.kind not in "iu":
        return a / b
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@operator
def MatMul(call: Call, a: Array, b: Array) -> Array:
    return call.xp.matmul(a, b)


@operator
def Sum(call: Call, first: Array, *others: Array) -> Array:
    total = first
    for other in others:
        total = total + other
    return total


@operator
def Relu(call: Call, x: Array) -> Array:
    return call.xp.maximum(x, x.dtype.type(0))


@operator
def LeakyRelu(call: Call, x: Array) -> Array:
    return call.xp.where(x < 0, x * x.dtype.type(call("alpha", 0.01)), x)


@operator
def Clip(call: Call, x: Array, *bounds: Array | None) -> Array:
    low, high = call.number("min", (x, *bounds), 1), call.number("max", (x, *bounds), 2)
    for bound, pick in ((low, call.xp.maximum), (high, call.xp.minimum)):
        x = x if bound is None else pick(x, call.xp.asarray(bound, x.dtype))
    return x


@operator
def Sigmoid(call: Call, x: Array) -> Array:
    half = x.dtype.type(0.5)
    return half * call.xp.tanh(half * x) + half


@operator
def Elu(call: Call, x: Array) -> Array:
    return call.xp.where(x < 0, call.xp.expm1(call.xp.minimum(x, 0)) * x.dtype.type(call("alpha", 1.0)), x)


@operator
def HardSigmoid(call: Call, x: Array) -> Array:
    return call.xp.clip(x * x.dtype.type(call("alpha", 0.2)) + x.dtype.type(call("beta", 0.5)), 0, 1)


@operator
def HardSwish(call: Call, x: Array) -> Array:
    return x * call.xp.clip(x / x.dtype.type(6) + x.dtype.type(0.5), 0, 1)


@operator
def Softplus(call: Call, x: Array) -> Array:
    return call.xp.logaddexp(x, x.dtype.type(0))


@operator
def Tanh(call: Call, x: Array) -> Array:
    return call.xp.tanh(x)


@operator
def Sqrt(call: Call, x: Array) -> Array:
    return call.xp.sqrt(x)


@operator
def Exp(call: Call, x: Array) -> Array:
    return call.xp.exp(x)


@operator
def Neg(call: Call, x: Array) -> Array:
    return call.xp.negative(x)


@operator
def Identity(call: Call, x: Array) -> Array:
    return x


@operator
def Dropout(call: Call, x: Array, *rest: Array | None) -> Any:
    """Return x: inference drops no elements."""
    if len(rest) > 1 and rest[1] is not None and bool(rest[1]):
        raise NotImplementedError("Dropout in training mode")
    return (x, call.xp.ones(x.shape, bool)) if len(call.node.outputs) > 1 else x


@operator
def Softmax(call: Call, x: Array) -> Array:
    """Normalize along one axis; before version 13, along this axis and all that follow."""
    axis = call("axis", -1 if call.version >= 13 else 1)
    along: Any = axis if call.version >= 13 else tuple(range(axis % x.ndim, x.ndim))
    powers = call.xp.exp(x - x.max(along, keepdims=True))
    return powers / powers.sum(along, keepdims=True)


@operator
def LRN(call: Call, x: Array) -> Array:
    """Normalize each element by the squares of its neighbours along the channels."""
    size, squares = call("size"), call.xp.square(x)
    before = (size - 1) // 2
    padded = call.xp.pad(squares, ((0, 0), (before, size - 1 - before), *((0, 0),) * (x.ndim - 2)))
    near = sum(padded[:, i : i + x.shape[1]] for i in range(size))
    return x / (call("bias", 1.0) + call("alpha", 1e-4) / size * near) ** call("beta", 0.75)


@operator
def ReduceMean(call: Call, x: Array, axes: Array | None = None) -> Array:
    along = call.ints("axes", (x, axes), 1) or None
    if along is None and call("noop_with_empty_axes", 0):
        return x
    return x.mean(along, keepdims=bool(call("keepdims", 1)), dtype=x.dtype)


@operator
def GlobalMaxPool(call: Call, x: Array) -> Array:
    return x.max(tuple(range(2, x.ndim)), keepdims=True)


@operator
def Gemm(call: Call, a: Array, b: Array, c: Array | None = None) -> Array:
    product = (a.T if call("transA", 0) else a) @ (b.T if call("transB", 0) else b)
    alpha, beta = call("alpha", 1.0), call("beta", 1.0)
    if alpha != 1:
        product *= product.dtype.type(alpha)
    if c is not None:
        product += c if beta == 1 else c * c.dtype.type(beta)
    return product


@operator
def Concat(call: Call, *arrays: Array) -> Array:
    return call.xp.concatenate(arrays, call("axis", 1))


@operator
def Reshape(call: Call, x: Array, shape: Array | None = None) -> Array:
    wanted = call.ints("shape", (x, shape), 1)
    assert wanted is not None
    kept = not call("allowzero", 0)
    return x.reshape([x.shape[i] if size == 0 and kept else size for i, size in enumerate(wanted)])


@operator
def Flatten(call: Call, x: Array) -> Array:
    axis = call("axis", 1)
    before = prod(x.shape[: axis if axis >= 0 else x.ndim + axis])
    return x.reshape(before, x.size // before if before else 0)


@operator
def Transpose(call: Call, x: Array) -> Array:
    return x.transpose(call("perm"))


@operator
def Squeeze(call: Call, x: Array, axes: Array | None = None) -> Array:
    return x.squeeze(call.ints("axes", (x, axes), 1))


@operator
def Unsqueeze(call: Call, x: Array, axes: Array | None = None) -> Array:
    return call.xp.expand_dims(x, call.ints("axes", (x, axes), 1))


@operator
def Shape(call: Call, x: Array) -> Array:
    return np.array(x.shape[slice(call("start", 0), call("end"))], np.int64)


@operator
def Gather(call: Call, x: Array, indices: Array) -> Array:
    return call.xp.take(x, indices, call("axis", 0))


@operator
def Slice(call: Call, x: Array, *given: Array | None) -> Array:
    starts, ends, axes, steps = (
        call.ints(name, (x, *given), place) for place, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    assert starts is not None and ends is not None
    index: list[Any] = [slice(None)] * x.ndim
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        step = 1 if steps is None else steps[i]
        # With a negative step, Python would take an end before the first element as counted from the end.
        end = None if step < 0 and ends[i] < -x.shape[axis] else ends[i]
        index[axis] = slice(starts[i], end, step)
    return x[tuple(index)]


@operator
def Cast(call: Call, x: Array) -> Array:
    from onnx import helper

    return x.astype(helper.tensor_dtype_to_np_dtype(call("to")))


@operator
def Constant(call: Call) -> Array:
    (value,) = call.node.attributes.values()
    if isinstance(value, (int, float)):
        return np.array(value, np.int64 if isinstance(value, int) else np.float32)
    if isinstance(value, list):
        return np.array(value, np.float32 if "value_floats" in call.node.attributes else np.int64)
    return np.asarray(value)


@operator
def ConstantOfShape(call: Call, shape: Array) -> Array:
    value = call("value", np.zeros(1, np.float32))
    return np.full(tuple(int(size) for size in shape), value[0], value.dtype)


@operator
def Pad(call: Call, x: Array, *given: Array | None) -> Array:
    pads = call.ints("pads" if call.version >= 2 else "paddings", (x, *given), 1)
    value = call.number("value", (x, *given), 2)
    axes = call.ints("axes", (x, *given), 3)
    assert pads is not None
    axes, half = tuple(range(x.ndim)) if axes is None else axes, len(pads) // 2
    widths = [(0, 0)] * x.ndim
    for axis, before, after in zip(axes, pads[:half], pads[half:]):
        widths[axis] = before, after
    cut = tuple(slice(max(0, -before), n - max(0, -after)) for n, (before, after) in zip(x.shape, widths))
    grown = [(max(0, before), max(0, after)) for before, after in widths]
    mode = call("mode", "constant")
    if mode == "constant":
        constant = 0 if value is None else call.xp.asarray(value, x.dtype).reshape(()).item()
        return call.xp.pad(x[cut], grown, mode, constant_values=constant)
    return call.xp.pad(x[cut], grown, mode)


#: Target types of `Cast`, by ONNX's number: float32, integers, bool, float16, float64, complex numbers.
_CASTS = (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)


def refused(node: Node) -> str:
    """Return what this node needs that these functions do not support, or an empty string."""
    kinds = {type(value).__name__ for value in node.attributes.values()}
    if kinds & {"GraphProto", "SparseTensorProto"}:
        return f"{node.op} with a graph or a sparse tensor as attribute"
    if node.op == "Cast" and node.attributes["to"] not in _CASTS:
        return f"Cast to type {node.attributes['to']}"
    return "" if node.op in ELEMENTWISE else node.op
