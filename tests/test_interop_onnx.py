"""`cupyconv.interop.onnx`: ONNX's own tests of the operators, and whole networks, by ONNX's evaluator and by itself."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("ml_dtypes")

import onnx.backend.test as backend_test  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402
from onnx.backend.test.case import node as node_cases  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import cupyconv  # noqa: E402
from cupyconv.interop import onnx as interop  # noqa: E402
from cupyconv.interop.onnx import OPERATORS, operators  # noqa: E402

#: Where ONNX keeps the tests of each operator; they are made as a module is imported.
MODULES = {
    "Conv": "conv", "ConvTranspose": "convtranspose", "MaxPool": "maxpool", "AveragePool": "averagepool",
    "GlobalAveragePool": "globalaveragepool", "BatchNormalization": "batch_normalization", "Col2Im": "col2im",
    "RNN": "rnn", "GRU": "gru", "LSTM": "lstm",
}  # fmt: skip
#: What differs beside ONNX's own tolerance, which has no room for a zero that is computed.
ATOL = 1e-6


def collected():
    for name in MODULES.values():
        importlib.import_module(f"onnx.backend.test.case.node.{name}")
    return [case for case in node_cases._NodeTestCases if case.model.graph.node[0].op_type in OPERATORS]


CASES = collected()
ids = [case.name for case in CASES]


def arrays_of(tensors):
    return [tensor if isinstance(tensor, np.ndarray) else numpy_helper.to_array(tensor) for tensor in tensors]


def test_the_example_in_the_documentation_runs():
    assert doctest.testmod(interop).failed == 0
    assert doctest.testmod(interop).attempted > 0


def test_every_operator_has_tests_of_onnxs():
    assert OPERATORS.keys() == MODULES.keys() == {case.model.graph.node[0].op_type for case in CASES}
    assert len(CASES) >= 79
    assert sorted(operator.__name__ for operator in operators()) == sorted(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_by_onnxs_evaluator(case):
    session = ReferenceEvaluator(case.model, new_ops=operators())
    for inputs, outputs in case.data_sets:
        found = session.run(None, dict(zip(session.input_names, arrays_of(inputs))))
        for one, expected in zip(found, arrays_of(outputs), strict=True):
            assert (one.shape, one.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(one, expected, rtol=case.rtol, atol=max(case.atol, ATOL))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_as_functions_of_arrays(target, case):
    (node,) = case.model.graph.node
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    plain = {name: decoded(value) for name, value in attributes.items()}
    if target.name == "host_device" and (node.op_type in ("RNN", "GRU", "LSTM") or "uint8" in case.name):
        pytest.skip("the arrays of the host device have no arithmetic and no gathering of their own")
    for inputs, outputs in case.data_sets:
        given = dict(zip([value.name for value in case.model.graph.input], arrays_of(inputs)))
        placed = [target.to_device(given[name]) if name else None for name in node.input]
        found = OPERATORS[node.op_type](*placed, **plain, outputs=len(node.output))
        named = [one for name, one in zip(node.output, found, strict=True) if name]
        for one, expected in zip(named, arrays_of(outputs), strict=True):
            assert one.dtype == expected.dtype
            np.testing.assert_allclose(target.to_host(one), expected, rtol=case.rtol, atol=max(case.atol, ATOL))


@pytest.mark.parametrize("column_major", [0, 1])
def test_indices_count_over_samples_and_channels(column_major):
    """Of three axes, against the definition: the place of each maximum among all elements of X."""
    x = np.random.default_rng(0).permutation(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6).astype(np.float32)
    y, indices = OPERATORS["MaxPool"](x, kernel_shape=[2, 3, 2], storage_order=column_major, outputs=2)
    stored = x.reshape(6, 4, 5, 6)
    flat = np.concatenate([image.ravel(order="F" if column_major else "C") for image in stored])
    assert (flat[indices] == y).all()


def conv_transpose_model(**attributes):
    node = helper.make_node("ConvTranspose", ["X", "W"], ["Y"], **attributes)
    kinds = [helper.make_tensor_value_info(name, 1, None) for name in "XWY"]
    graph = helper.make_graph([node], "g", kinds[:2], kinds[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("attributes", [
    dict(strides=[2], output_shape=[5]), dict(strides=[2], output_shape=[5], output_padding=[1]),
    dict(strides=[2], output_shape=[4], output_padding=[1], auto_pad="SAME_UPPER"), dict(strides=[2], auto_pad="SAME_LOWER"),
    dict(strides=[2], output_padding=[1], auto_pad="SAME_UPPER"), dict(strides=[2], output_shape=[4], pads=[1, 0], output_padding=[1]),
], ids=str)  # fmt: skip
def test_where_a_transposed_convolution_begins_is_onnxruntimes(attributes):
    """ONNX's reference does not shift a result whose shape is given."""
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    model = conv_transpose_model(**attributes)
    x, w = np.arange(1, 4, dtype=np.float32)[None, None], np.array([[[1, 10, 100]]], np.float32)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"X": x, "W": w})
    (found,) = ReferenceEvaluator(model, new_ops=operators()).run(None, {"X": x, "W": w})
    assert np.array_equal(found, expected)


def test_activations_by_name_and_parameters():
    """What ONNX's reference does not compute."""
    rng = np.random.default_rng(0)
    x, w, r = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 2, 3), (1, 12, 3), (1, 12, 4)))
    settings = dict(activations=["HardSigmoid", "LeakyRelu"], activation_alpha=[0.3, 0.1], activation_beta=[0.6])
    y, _ = OPERATORS["GRU"](x, w, r, **settings, linear_before_reset=1)
    weights = cupyconv.from_onnx_weights("GRU", w, r)
    expected, _ = cupyconv.gru(x, **weights, activations=(("hard_sigmoid", 0.3, 0.6), ("leaky_relu", 0.1)))
    assert np.array_equal(y[:, 0], expected)


def test_half_precision_and_training_of_a_batch_normalisation():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 3, 5)) * 50 + 100).astype(np.float16)
    scale, shift, mean, var = (np.array(row, np.float32) for row in ([1, 2, 3], [0, 1, 0], [100] * 3, [2500] * 3))
    (y,) = OPERATORS["BatchNormalization"](x, scale, shift, mean, var)
    wide = (x.astype(float) - 100) / np.sqrt(2500 + 1e-5) * scale[:, None] + shift[:, None]
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, wide, rtol=2e-3, atol=1e-3)
    y, running, _ = OPERATORS["BatchNormalization"](
        x, scale, shift, mean, var, training_mode=1, momentum=0.5, outputs=3
    )
    assert abs(y.astype(float).mean((0, 2)) - shift).max() < 1e-2
    np.testing.assert_allclose(running, (100 + x.astype(float).mean((0, 2))) / 2, rtol=1e-5)


NETWORKS = Path(backend_test.__file__).parent / "data" / "light"


def with_weights(model):
    """One of ONNX's networks, whose weights are all one number, with random ones, that keep numbers near 1.

    Without the softmax at its end, which ONNX's reference does along another axis than this version of it says.
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
    last = graph.node.pop()
    assert last.op_type == "Softmax"
    graph.output[0].name = last.input[0]
    inputs = [value for value in graph.input if value.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = 8  # from 4 on a constant need not be an input
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_whole_networks_are_onnxruntimes(name):
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    path = NETWORKS / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip("this onnx brings no networks")
    model = with_weights(onnx.load(path))
    runtime.set_default_logger_severity(3)  # it would say that the shapes are used no longer
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    image = np.random.default_rng(1).normal(size=(1, 3, 224, 224)).astype(np.float32)
    given = {model.graph.input[0].name: image}
    (expected,) = session.run(None, given)
    (found,) = ReferenceEvaluator(model, new_ops=operators()).run(None, given)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


def decoded(value):
    if isinstance(value, bytes):
        return value.decode()
    return [decoded(one) for one in value] if isinstance(value, list) else value
