"""Times of whole networks and memory of a dense block, recorded in `results/networks.json` for the pages::

    python -m tests.benchmarks.networks     # on a quiet machine, with onnx and onnxruntime
    python -m tests.benchmarks.figures

The networks come from ONNX's own test data and process one image.  Each is run by `load`, by the same calls written by
hand, node by node with nothing fused, and by ONNX Runtime.  `examples/densenet_block.py` prints the memory figures.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend import test as backend_test

import cupyconv
from cupyconv.bench.machines import environment, numpy_machine
from cupyconv.interop.onnx import OPERATORS, load
from cupyconv.interop.onnx_elementwise import Call
from cupyconv.interop.onnx_elementwise import run as run_elementwise
from cupyconv.interop.onnx_graph import CONVOLUTIONS, read
from cupyconv.interop.onnx_model import Model, Places

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).resolve().parent / "results" / "networks.json"
#: Name in ONNX's file names -> common name.
TIMED = {
    "squeezenet": "SqueezeNet", "shufflenet": "ShuffleNet", "resnet50": "ResNet-50", "densenet121": "DenseNet-121",
}  # fmt: skip
IMPLEMENTATIONS = ("cupyconv", "by hand", "node by node", "onnxruntime")
ROUNDS = 11
NETWORKS = Path(backend_test.__file__).parent / "data" / "light"


def with_weights(model):
    """Replace the constant weights of one of ONNX's networks by random weights that keep values near 1.

    A final softmax is removed, because ONNX's reference uses another axis than the model's version specifies.
    """
    rng, graph = np.random.default_rng(0), model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    variances = {node.input[4] for node in graph.node if node.op_type == "BatchNormalization"}
    weights = {}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        (name,), shape = node.output, tuple(constants[node.input[0]])
        spread = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.1
        drawn = rng.uniform(0.5, 1.5, shape) if name in variances else rng.normal(0, spread, shape)
        weights[name] = drawn.astype(np.float32)
        graph.node.remove(node)
    if graph.node[-1].op_type == "Softmax":
        graph.output[0].name = graph.node.pop().input[0]
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = 8  # from version 4 on, a constant need not be an input
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def call_of(implementation: str, model: Any, given: dict[str, np.ndarray]) -> Callable[[], Any]:
    """Return a call that runs a network in one of `IMPLEMENTATIONS`."""
    if implementation == "onnxruntime":
        import onnxruntime

        onnxruntime.set_default_logger_severity(3)  # hide the warning that the shapes are no longer used
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return lambda: session.run(None, given)[0]
    if implementation == "cupyconv":
        run = load(model)
        return lambda: run(**given)
    if implementation == "by hand":
        return by_hand(load(model), given)
    graph = read(model)
    last = {name: node for node in graph.nodes for name in node.inputs}

    def node_by_node() -> Any:
        values = graph.constants | given
        for node in graph.nodes:
            inputs = [values[name] if name else None for name in node.inputs]
            for name in node.inputs:
                if last[name] is node and name not in graph.outputs:
                    values.pop(name, None)  # as in a script that gives the image's name to the next one
            if node.op in OPERATORS:
                outputs = OPERATORS[node.op](*inputs, **node.attributes, outputs=len(node.outputs))
            else:
                outputs = run_elementwise(Call(node, np, graph.version), inputs)
            values |= zip(node.outputs, outputs)
        return values[graph.outputs[0]]

    return node_by_node


def by_hand(run: Model, given: dict[str, np.ndarray]) -> Callable[[], Any]:
    """Return a model's calls with everything fused, as a script makes them: public functions, one after the other."""
    functions = {"Conv": cupyconv.conv, "ConvTranspose": cupyconv.conv_transpose}
    # Weights are plain arrays, as in a script: nothing derived from them is cached between calls.
    settings = {
        key: {name: np.array(one) if isinstance(one, np.ndarray) else one for name, one in layer.arguments.items()}
        for key, (layer, _) in run._layers.items()
    }

    def calls() -> Any:
        values, anywhere = dict(given), Places(run._graph, {}, np.empty)
        for node, unread in zip(run._graph.nodes, run._last_reads):
            if node.op in CONVOLUTIONS:
                arrays = run._layer(node, values, anywhere)[1]
                outputs = [functions[node.op](**settings[id(node)] | arrays)]
            else:
                outputs = run._computed(node, [run._of(values, name) for name in node.inputs])
            values |= zip(node.outputs, outputs)
            for name in unread:
                values.pop(name, None)
        return values[run.outputs[0]]

    return calls


def seconds_of(name: str, implementation: str) -> float:
    """Return the median seconds of a network, after comparing its result with that of ONNX Runtime."""
    model = with_weights(onnx.load(NETWORKS / f"light_{name}.onnx"))
    given = {model.graph.input[0].name: np.random.default_rng(1).normal(size=(1, 3, 224, 224)).astype(np.float32)}
    expected = call_of("onnxruntime", model, given)()  # its threads end before the timed calls
    call = call_of(implementation, model, given)
    np.testing.assert_allclose(call(), expected, rtol=0, atol=1e-5 * abs(expected).max())
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def timed(name: str) -> dict[str, float]:
    """Return the seconds for each of `IMPLEMENTATIONS`, each in its own process: waiting threads of one library slow another.

    The result is the minimum of three processes: another program on the machine disturbs two threads more than one.
    """
    command = [sys.executable, "-m", "tests.benchmarks.networks", name]
    turns = [
        [float(subprocess.check_output([*command, implementation], cwd=ROOT)) for implementation in IMPLEMENTATIONS]
        for _ in range(3)
    ]
    return dict(zip(IMPLEMENTATIONS, map(min, *turns)))


def block_memory() -> list[list[float]]:
    """Return rows of layers and megabytes of a training step, concatenating and merged."""
    command = [sys.executable, str(ROOT / "examples" / "densenet_block.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^ *(\d+) +([\d.]+) MB.*? ([\d.]+) MB", printed, re.MULTILINE)
    assert lines, printed
    return [[float(number) for number in line] for line in lines]


def main(arguments: list[str]) -> int:
    if arguments:
        name, implementation = arguments
        print(seconds_of(name, implementation))
        return 0
    import onnxruntime

    known = environment(numpy_machine()) | {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    networks = {shown: timed(name) for name, shown in TIMED.items()}
    record = {"environment": known, "networks": networks, "block_memory": block_memory()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
