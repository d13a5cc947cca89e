"""ONNX Runtime as a peer: a case is a model of one or a few nodes, with constant weights.

ONNX Runtime lays out the weights for its own loops when it loads the model, before anything is timed.  The library
receives its weights with every call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.peers import Participant, Way, installed
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase
from cupyconv.demo.libraries import Call

#: Maps ONNX's order of the gates to cupyconv's: i f g o -> i o f c, r z n -> z r h.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
_OPSET, _IR = 17, 8


class OnnxRuntime(Participant):
    """Models of the float32 cases, with `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._onnx, self._runtime = installed("onnx"), installed("onnxruntime")
        self._settings = self._runtime.SessionOptions()
        self._settings.intra_op_num_threads, self._settings.inter_op_num_threads = threads, 1

    def properties(self) -> dict[str, Any]:
        return {"onnxruntime": self._runtime.__version__}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """Support gradients only with respect to one input, by ConvTranspose."""
        of_weight = isinstance(case, GradientCase) and (case.of == "weight" or len(case.channels) > 1)
        if case.dtype != "float32" or of_weight:
            return []
        prepare = partial(self._session, case, xs, weights)
        steps = isinstance(case, RecurrentCase) and not case.single
        as_array = _without_directions if steps else _one_step if isinstance(case, RecurrentCase) else _first
        return [Way("onnxruntime", prepare, as_array, transform=True, allocates=True)]

    def _session(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> Call:
        model = self._model(case, xs, weights)
        session = self._runtime.InferenceSession(
            model.SerializeToString(), self._settings, providers=["CPUExecutionProvider"]
        )
        if isinstance(case, RecurrentCase):
            xs = [xs[0], *(state[np.newaxis] for state in xs[1:])]
        return partial(session.run, None, {f"x{i}": x for i, x in enumerate(xs)})

    def _model(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> Any:
        helper = self._onnx.helper
        constants: dict[str, Any]
        if isinstance(case, RecurrentCase):
            nodes, constants = self._recurrent(case, weights)
            shapes = [xs[0].shape, *((1, *state.shape) for state in xs[1:])]
        else:
            nodes = self._gradient(case) if isinstance(case, GradientCase) else self._convolutions(case)
            constants = {f"w{i}": weight for i, weight in enumerate(weights)}
            shapes = [x.shape for x in xs]
        graph = helper.make_graph(
            nodes, "case",
            [helper.make_tensor_value_info(f"x{i}", self._onnx.TensorProto.FLOAT, s) for i, s in enumerate(shapes)],
            [helper.make_tensor_value_info("y", self._onnx.TensorProto.FLOAT, None)],
            [self._onnx.numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in constants.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)

    def _convolutions(self, case: Case) -> list[Any]:
        helper, nodes, x = self._onnx.helper, [], "x0"
        if len(case.channels) > 1:
            x = "joined"
            nodes.append(helper.make_node("Concat", [f"x{i}" for i in range(len(case.channels))], [x], axis=1))
        for i, layer in enumerate(case.layers):
            y = "y" if i == len(case.layers) - 1 else f"y{i}"
            nodes.append(helper.make_node("Conv", [x, f"w{i}"], [y], **_attributes(layer)))
            x = y
        return nodes

    def _gradient(self, case: GradientCase) -> list[Any]:
        """Return the gradient's node; its output_padding covers elements that the strides do not reach."""
        unread = [
            n + before + after - (out - 1) * case.stride - case.dilation * (k - 1) - 1
            for n, (before, after), out, k in zip(case.size, case.pairs, case.out_size, case.kernel)
        ]
        attributes = _attributes(case) | {"output_padding": unread}
        return [self._onnx.helper.make_node("ConvTranspose", ["x0", "w0"], ["y"], **attributes)]

    def _recurrent(self, case: RecurrentCase, weights: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        def gates(array: Any) -> Any:
            parts = np.split(array, len(_GATES[case.cell]))
            return np.concatenate([parts[i] for i in _GATES[case.cell]])[np.newaxis]

        weight_ih, weight_hh, *biases = map(gates, weights)
        constants = {"w": weight_ih, "r": weight_hh, "b": np.concatenate(biases, axis=1)}
        states = ["", *(f"x{i + 1}" for i in range(case.given_states))] if case.single else []
        outputs = ["", "y"] if case.single else ["y"]
        attributes = {"hidden_size": case.hidden} | ({"linear_before_reset": 1} if case.cell == "gru" else {})
        node = self._onnx.helper.make_node(case.cell.upper(), ["x0", "w", "r", "b", *states], outputs, **attributes)
        return [node], constants


def _attributes(case: Case) -> dict[str, Any]:
    rank = len(case.size)
    return {
        "kernel_shape": case.kernel,
        "strides": [case.stride] * rank,
        "pads": [side for sides in zip(*case.pairs) for side in sides],
        "dilations": [case.dilation] * rank,
        "group": case.groups,
    }


def _first(outputs: list[Any]) -> Any:
    return outputs[0]


def _without_directions(outputs: list[Any]) -> Any:
    """Return y (T, 1, N, H) without its axis of directions."""
    return outputs[0][:, 0]


def _one_step(outputs: list[Any]) -> Any:
    """Return h (1, N, H) without its axis of directions."""
    return outputs[0][0]
