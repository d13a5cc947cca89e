"""`cupyconv.interop.onnx`: ONNX's own operator tests, and whole networks, with ONNX's evaluator and with `load`."""

from __future__ import annotations

import doctest
import importlib
import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("ml_dtypes")

from onnx import helper, numpy_helper, parser  # noqa: E402
from onnx.backend.test.case import node as node_cases  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from peak_memory import peak_bytes  # noqa: E402

import cupyconv  # noqa: E402
from cupyconv.interop import onnx as interop  # noqa: E402
from cupyconv.interop.onnx import OPERATORS, load, operators  # noqa: E402
from cupyconv.interop.onnx_elementwise import ELEMENTWISE  # noqa: E402
from cupyconv.interop.onnx_graph import CONVOLUTIONS, read  # noqa: E402
from cupyconv.interop.onnx_model import Model, Places  # noqa: E402
from cupyconv.numpy import cost  # noqa: E402
from cupyconv.numpy.backend import seconds_of  # noqa: E402
from cupyconv.numpy.threads import BLAS  # noqa: E402
from tests.benchmarks.networks import NETWORKS, with_weights  # noqa: E402

#: Modules that define ONNX's tests of each operator; importing a module creates its tests.
MODULES = {
    "Conv": "conv", "ConvTranspose": "convtranspose", "MaxPool": "maxpool", "AveragePool": "averagepool",
    "GlobalAveragePool": "globalaveragepool", "BatchNormalization": "batch_normalization", "Col2Im": "col2im",
    "RNN": "rnn", "GRU": "gru", "LSTM": "lstm",
}  # fmt: skip
#: Least absolute tolerance: ONNX's own tolerance allows no error of a zero that is computed.
ATOL = 1e-6


#: Modules that define the tests of the operators between these.
BETWEEN = (
    "add", "cast", "clip", "concat", "constant", "constantofshape", "div", "dropout", "elu", "exp", "flatten", "gather",
    "gemm", "globalmaxpool", "hardsigmoid", "hardswish", "identity", "leakyrelu", "lrn", "matmul", "mul", "neg", "pad",
    "reducemean", "relu", "reshape", "shape", "sigmoid", "slice", "softmax", "softplus", "sqrt", "squeeze", "sub", "sum",
    "tanh", "transpose", "unsqueeze",
)  # fmt: skip


def collected(known):
    """Return ONNX's tests of single nodes with these operators."""
    with warnings.catch_warnings(action="ignore"):  # their computations overflow on purpose
        for name in (*MODULES.values(), *BETWEEN):
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    nodes = [(case, list(case.model.graph.node)) for case in node_cases._NodeTestCases]
    return [case for case, node in nodes if len(node) == 1 and node[0].op_type in known]


def is_plain(case):
    """Whether a case has no sequence, no bfloat16, 8-bit floating-point or 4-bit numbers, and no training."""
    tensors = [value.type.tensor_type for value in (*case.model.graph.input, *case.model.graph.output)]
    to = [one.i for node in case.model.graph.node for one in node.attribute if one.name == "to"]
    return (
        all(0 < one.elem_type < 16 for one in tensors) and all(one < 16 for one in to) and "training" not in case.name
    )


CASES = collected(OPERATORS)
LOADED = [case for case in collected(OPERATORS.keys() | ELEMENTWISE.keys()) if is_plain(case)]
ids = [case.name for case in CASES]


def arrays_of(tensors):
    """Return the tensors as arrays; a single number may be given as a scalar."""
    return [numpy_helper.to_array(one) if isinstance(one, onnx.TensorProto) else np.asarray(one) for one in tensors]


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
    """For three axes, indices are compared with the definition: each maximum's position among all elements of X."""
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
    """ONNX's reference does not compute these."""
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


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "densenet121"])
def test_whole_networks_are_onnxruntimes(name):
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    path = NETWORKS / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip("this onnx brings no networks")
    model = with_weights(onnx.load(path))
    runtime.set_default_logger_severity(3)  # it would warn about shapes that are no longer used
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    image = np.random.default_rng(1).normal(size=(1, 3, 224, 224)).astype(np.float32)
    given = {model.graph.input[0].name: image}
    (expected,) = session.run(None, given)
    assert expected.std() > 0.1
    loaded = load(model)
    np.testing.assert_allclose(loaded(**given), expected, rtol=0, atol=1e-5 * abs(expected).max())
    if name == "densenet121":  # ONNX's evaluator is slow between the operators of cupyconv
        assert loaded.explain().done[PLACED] > 40
        return
    (found,) = ReferenceEvaluator(model, new_ops=operators()).run(None, given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


# --- load -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LOADED, ids=[case.name for case in LOADED])
def test_single_nodes_as_models(case):
    run = load(case.model)
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        found = run(**dict(zip(names, arrays_of(inputs))))
        for one, expected in zip(found if isinstance(found, tuple) else (found,), arrays_of(outputs), strict=True):
            assert (one.shape, one.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(one, expected, rtol=case.rtol, atol=max(case.atol, ATOL))


def parsed(signature, body, version=17):
    """Return a model from ONNX's text format; w, v and the vectors of length 4 are constants."""
    rng = np.random.default_rng(0)
    shapes = {
        "w": (4, 4, 3, 3),
        "v": (4, 4, 1, 1),
        "t": (4, 2, 3, 3),
        "b": (4,),
        "m": (4,),
        "c": (4,),
        "k": (1, 4, 1, 1),
    }
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {version}]> g {signature} {{ {body} }}')
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given["s"] = rng.uniform(0.5, 1.5, 4).astype(np.float32)
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in given.items() if name in used
    )
    return model


IMAGE = "(float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y)"
NORMALISED = "BatchNormalization(a, b, c, m, s)"
FOLDED, ACTIVATED = "batch normalizations and other affine steps folded into weights", "activations fused"
ADDED, BEFORE, MERGED, PLACED = (
    "additions fused as residual=", "batch normalizations and activations fused as prologue=", "concatenations avoided",
    "concatenations whose parts are written in place",
)  # fmt: skip
GRAPHS = {
    "a residual block": (
        f"a = Conv <pads = [1,1,1,1]>(x, w) d = {NORMALISED} e = Relu(d) f = Conv <pads = [1,1,1,1]>(e, w, b) g = Add(x, f) y = Relu(g)",
        IMAGE, {FOLDED: 1, ACTIVATED: 2, ADDED: 1}),
    "two convolutions added": (
        "a = Conv(x, v) d = Conv(x, v, b) e = Add(a, d) y = Sigmoid(e)", IMAGE, {ADDED: 1, ACTIVATED: 1}),
    "added to itself": ("a = Conv(x, v) y = Add(a, a)", IMAGE, {}),
    "an addition that broadcasts": (
        "a = Conv(x, v) d = GlobalAveragePool(x) e = Add(d, a) y = Tanh(e)", IMAGE, {}),
    "an activation that is read twice": (
        "a = Conv(x, v) d = Relu(a) e = Conv(d, v) y = Add(d, e)", IMAGE, {ACTIVATED: 1, ADDED: 1}),
    "a convolution that is read twice": ("a = Conv(x, v) d = Relu(a) y = Mul(d, a)", IMAGE, {}),
    "a convolution that goes out": (
        "a = Conv(x, v) y = Relu(a)", "(float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] a, float[2, 4, 6, 6] y)", {}),
    "a shared weight": (
        f"a = Conv(x, v) d = {NORMALISED} e = Conv(x, v) y = Sub(d, e)", IMAGE, {FOLDED: 1}),
    "grouped and transposed": (
        f"a = ConvTranspose <group = 2, pads = [1,1,1,1]>(x, t) d = {NORMALISED} y = LeakyRelu <alpha = 0.3>(d)",
        IMAGE, {FOLDED: 1, ACTIVATED: 1}),
    "grouped": (
        f"q = Slice(w, zero, two, one) a = Conv <group = 2, pads = [1,1,1,1]>(x, q) d = {NORMALISED} y = Elu(d)",
        IMAGE, {FOLDED: 1, ACTIVATED: 1, "constants folded": 1}),
    "normalised before": (
        f"a = Identity(x) d = {NORMALISED} e = Relu(d) y = Conv <pads = [1,1,1,1]>(e, w, b)", IMAGE, {BEFORE: 1}),
    "normalised before, and read twice": (
        f"a = Identity(x) d = {NORMALISED} e = Relu(d) f = Conv <pads = [1,1,1,1]>(e, w) y = Add(e, f)", IMAGE, {ADDED: 1}),
    "scaled and shifted": (
        "a = Mul(x, k) d = Add(k, a) e = Sub(d, k) f = Div(e, k) y = Conv <pads = [1,1,1,1]>(f, w)", IMAGE, {BEFORE: 1}),
    "scaled and shifted behind": ("a = Conv(x, v) d = Mul(k, a) e = Add(d, k) y = Relu(e)", IMAGE, {FOLDED: 1, ACTIVATED: 1}),
    "subtracted from a constant": ("a = Conv(x, v) y = Sub(k, a)", IMAGE, {}),
    "clipped": ("a = Conv(x, v) y = Clip(a, low, high)", IMAGE, {ACTIVATED: 1}),
    "clipped at one side": ("a = Conv(x, v) y = Clip(a, low)", IMAGE, {}),
    "concatenations of concatenations": (
        "a = Concat <axis = 1>(p, x) d = Concat <axis = 1>(q, a) y = Conv(d, v)",
        "(float[2, 2, 6, 6] x, float[2, 1, 6, 6] p, float[2, 1, 6, 6] q) => (float[2, 4, 6, 6] y)", {MERGED: 2}),
    "a dense block": (
        "a = Conv(x, v) d = Conv <pads = [1,1,1,1]>(a, w) e = Concat <axis = 1>(a, d) f = Conv(e, o) g = Relu(f)"
        " h = Concat <axis = 1>(e, g) i = Add(h, h) y = Concat <axis = 1>(i, h)",
        "(float[2, 4, 6, 6] x) => (float[2, 24, 6, 6] y)", {PLACED: 2, ACTIVATED: 1}),
    "pooled, transposed and joined": (
        "a = ConvTranspose <group = 2, pads = [1,1,1,1]>(x, t) d = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]>(x)"
        " e = AveragePool <kernel_shape = [1,1]>(x) f = Concat <axis = 1>(e, a) g = Concat <axis = 1>(f, d) y = Sigmoid(g)",
        "(float[2, 4, 6, 6] x) => (float[2, 12, 6, 6] y)", {PLACED: 2}),
    "a part that goes out, and one that is in twice": (
        "y = Conv(x, v) a = Concat <axis = 1>(x, y) d = Conv <pads = [1,1,1,1]>(x, w) e = Concat <axis = 1>(d, d) z = Sub(a, e)",
        "(float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y, float[2, 8, 6, 6] z)", {}),
    "a part of two concatenations": (
        "a = Conv(x, v) d = Conv <pads = [1,1,1,1]>(x, w) e = Concat <axis = 1>(a, d) f = Concat <axis = 1>(d, a) y = Mul(e, f)",
        "(float[2, 4, 6, 6] x) => (float[2, 8, 6, 6] y)", {PLACED: 1}),
    "a concatenation that something else reads": (
        "a = Concat <axis = 1>(p, x) d = Conv(a, v) e = Sigmoid(a) y = Mul(d, e)",
        "(float[2, 3, 6, 6] x, float[2, 1, 6, 6] p) => (float[2, 4, 6, 6] y)", {}),
    "a concatenation as a residual": (
        "a = Concat <axis = 1>(p, x) d = Conv(x, r) y = Add(d, a)",
        "(float[2, 3, 6, 6] x, float[2, 1, 6, 6] p) => (float[2, 4, 6, 6] y)", {ADDED: 1}),
    "of a size that is computed": (
        "a = Shape(x) d = Gather(a, zero) e = Concat <axis = 0>(d, minus) y = Reshape(x, e)",
        "(float[2, 4, 6, 6] x) => (float[2, 144] y)", {}),
}  # fmt: skip
MORE = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "minus": np.array([-1]), "low": np.float32(-0.3),
    "high": np.float32(0.4), "o": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8, 1, 1), "r": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3, 1, 1),
}  # fmt: skip


def graph_named(name):
    body, signature, done = GRAPHS[name]
    model = parsed(signature, body)
    used = {one for node in model.graph.node for one in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in MORE.items() if n in used)
    return model, done


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_fused_and_what_is_not(target, name):
    if target.name == "host_device":
        pytest.skip("the host device has no arithmetic of its own")
    model, done = graph_named(name)
    rng = np.random.default_rng(1)
    inputs = {
        value.name: rng.normal(size=[d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    # ONNX's own transposed convolution does not support groups of more than one output.
    only = [operator for operator in operators() if operator.__name__ == "ConvTranspose"]
    run, expected = load(model, target.xp), ReferenceEvaluator(model, new_ops=only).run(None, inputs)
    assert run.explain().done == done
    placed = {one: target.to_device(array) for one, array in inputs.items()}
    for _ in range(2):
        found = run(**placed)
        for one, wanted in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            np.testing.assert_allclose(target.to_host(one), wanted, rtol=2e-5, atol=2e-5)
    assert all(np.array_equal(target.to_host(placed[one]), array) for one, array in inputs.items())


def test_parts_of_a_concatenation_are_where_they_belong_in_images_of_any_size():
    """This also holds with integer inputs, which may contain sizes; then each part has its own array."""
    body, signature, _ = GRAPHS["a dense block"]
    for more in ("", "int64[1] n, "):
        text = signature.replace("float[2, 4, 6, 6] x", f"{more}float[N, 4, H, W] x").replace(
            "2, 24, 6, 6", "N, 24, H, W"
        )
        model = parsed(text, body)
        model.graph.initializer.append(numpy_helper.from_array(MORE["o"], "o"))
        run, session = load(model), ReferenceEvaluator(model)
        for shape in ((1, 4, 5, 7), (3, 4, 9, 2), (1, 4, 5, 7)):
            given = {"x": np.random.default_rng(3).normal(size=shape).astype(np.float32)}
            given |= {"n": np.array([1])} if more else {}
            (expected,) = session.run(None, given)
            np.testing.assert_allclose(run(**given), expected, rtol=2e-5, atol=2e-5)


def test_products_between_layers_leave_the_processors_to_these(monkeypatch):
    """After a product, BLAS's threads would look for work for a while, on cores that the next layers need."""
    seen = []
    gemm = ELEMENTWISE["Gemm"]
    monkeypatch.setitem(ELEMENTWISE, "Gemm", lambda call, *inputs: seen.append(BLAS._numbers()) or gemm(call, *inputs))
    run = load(parsed("(float[4, 4] x) => (float[4, 4] y)", "y = Gemm(x, x)"))
    x, before = np.ones((4, 4), np.float32), BLAS._numbers()
    run(x=x)
    with cupyconv.options(threads=2):
        run(x=x)
    assert seen == [[1] * len(before), before] and BLAS._numbers() == before


#: Passes over the result that a node needs, for the nodes that are fused.
PASSES = {"BatchNormalization": 2, "Affine": 2, "Relu": 1, "Add": 1, "Sum": 1, "Clip": 2, "Concat": 1}


def prices(model):
    """Yield each node of a model and its estimated time, which is 0 for unknown nodes."""
    inputs = {name: np.zeros(sizes, dtype) for name, (dtype, sizes) in model._graph.inputs.items()}
    places = Places(model._graph, model._wholes(inputs), np.zeros)
    for node, values, call in model._walked(inputs, places):
        seconds = 0.0
        if call is not None:
            seconds = seconds_of(call.plan().steps)
        elif node.op in PASSES and node.outputs[0] not in model._graph.whole:
            y = values[node.outputs[0]]
            seconds = PASSES[node.op] * (cost.CALL + cost.added(y.size, y.dtype.name)) + cost.touched(y.nbytes)
        yield node, seconds


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "resnet50", "densenet121"])
def test_what_is_fused_takes_no_longer_than_its_nodes(name):
    """Every step is compared, in estimated time, with code written by hand: separate layers and NumPy's functions."""
    path = NETWORKS / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip("this onnx brings no networks")
    model = with_weights(onnx.load(path))
    fused = {node.outputs[0]: (node, seconds) for node, seconds in prices(load(model))}
    by_hand = {node.outputs[0]: (node, seconds) for node, seconds in prices(Model(read(model), np))}

    def apart(output):
        """Return the estimated time of a step node by node, from the outputs of other steps on."""
        node, seconds = by_hand.pop(output)
        return seconds + sum(apart(one) for one in node.inputs if one in by_hand and one not in fused)

    differences = []
    for output, (step, seconds) in fused.items():
        nodes = apart(output)
        assert seconds <= 1.02 * nodes + 2 * cost.CALL, (step, seconds, nodes)
        differences += [seconds - nodes] if step.op in CONVOLUTIONS else []
    assert len(differences) > 20 and sum(differences) < 0


def test_explain_computes_with_zeros_and_warns_of_nothing():
    """Not even 0 / 0 gives a warning, which is an error here."""
    model = parsed(
        "(float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y)", "a = Conv(x, v) n = Sub(x, x) d = Div(n, n) y = Div(a, d)"
    )
    page = load(model).explain()
    assert [step.op for step in page.steps] == ["Conv", "Sub", "Div", "Div"]


@pytest.mark.parametrize("body, done", [
    ("d = BatchNormalization(x, b, c, m, s) e = Relu(d) y = Conv(e, h)", {BEFORE: 1}),
    ("a = Conv(x, h) d = BatchNormalization(a, b, c, m, s) y = Relu(d)", {FOLDED: 1, ACTIVATED: 1}),
    ("d = BatchNormalization(x, b, c, m, s) y = Relu(d)", {}),
])  # fmt: skip
def test_half_precision_beside_constants_of_full_precision(body, done):
    model = parsed("(float16[2, 4, 6, 6] x) => (float16[2, 4, 6, 6] y)", body)
    rng = np.random.default_rng(2)
    half, x = (rng.normal(size=shape).astype(np.float16) for shape in ((4, 4, 1, 1), (2, 4, 6, 6)))
    if "h)" in body:
        model.graph.initializer.append(numpy_helper.from_array(half, "h"))
    run = load(model)
    y = run(x=x)
    assert run.explain().done == done and y.dtype == np.float16
    gamma, beta, mean, var = (
        numpy_helper.to_array(one) for name in "bcms" for one in model.graph.initializer if one.name == name
    )
    factor = gamma / np.sqrt(var.astype(np.float64) + 1e-5)

    def normalised(image):
        return image * factor[:, None, None] + (beta - mean * factor)[:, None, None]

    wide = half.astype(np.float64)[:, :, 0, 0]
    expected = x.astype(np.float64)
    for op in [node.op_type for node in model.graph.node]:
        if op == "Conv":
            expected = np.einsum("oc,nchw->nohw", wide, expected)
        else:
            expected = np.maximum(expected, 0) if op == "Relu" else normalised(expected)
    np.testing.assert_allclose(y, expected, rtol=4e-3, atol=0.03)


def test_unknown_operators_are_listed_together():
    body = "i, j = Split <axis = 1>(x) d = Det(x) e = Det(x) y = Relu(i)"
    with pytest.raises(
        NotImplementedError, match=r"does not support these operators of the model: Det \(2 x\), Split$"
    ):
        load(parsed("(float[2, 4, 6, 6] x) => (float[2, 2, 6, 6] y)", body))


@pytest.mark.parametrize("error, words, inputs", [
    (TypeError, "the model takes x, given nothing", {}),
    (TypeError, "the model takes x, given x, z", {"x": np.ones((2, 4, 6, 6), np.float32), "z": np.ones(1)}),
    (TypeError, "x has dtype float64, the model takes float32", {"x": np.ones((2, 4, 6, 6))}),
    (ValueError, r"x has shape \(2, 4, 6, 7\), the model takes \(None, 4, 6, 6\)", {"x": np.ones((2, 4, 6, 7), np.float32)}),
    (TypeError, "x must be an array of numpy, given builtins.list", {"x": [1.0]}),
])  # fmt: skip
def test_inputs_that_are_not_the_models(error, words, inputs):
    run = load(parsed("(float[N, 4, 6, 6] x) => (float[N, 4, 6, 6] y)", "y = Conv(x, v)"))
    assert run(x=np.ones((3, 4, 6, 6), np.float32)).shape == (3, 4, 6, 6)
    with pytest.raises(error, match=words):
        run(**inputs)


def test_images_are_let_go_after_their_last_use():
    """Only two images of eight layers exist at a time, and `explain` reports how much memory that is."""
    layers = (
        " ".join(f"a{i + 1} = Conv <pads = [1,1,1,1]>(a{i}, w)" for i in range(8)).replace("a0", "x").replace("a8", "y")
    )
    run = load(parsed("(float[1, 4, 300, 300] x) => (float[1, 4, 300, 300] y)", layers))
    x = np.ones((1, 4, 300, 300), np.float32)
    run(x=x)
    plan = run.explain()
    workspace = max(step.plan.workspace_bytes for step in plan.steps)
    assert plan.peak_bytes == 2 * x.nbytes + workspace
    assert peak_bytes(lambda: run(x=x)) < plan.peak_bytes + x.nbytes // 2


@pytest.mark.parametrize("on", [None, "sm_90"])
def test_a_page_for_a_model(on):
    model, _ = graph_named("a residual block")
    page = str(load(model).explain(on=on))
    assert "model of 2 steps, 2 of them convolutions on " + ("cuda" if on else "numpy") in page
    assert "conv 4 -> 4 channels, kernel 3x3 on 2 samples of 6x6" in page
    assert "1 additions fused as residual=" in page
    assert ("(model not yet measured on a GPU)" in page.splitlines()[1]) == (on is not None)


def decoded(value):
    if isinstance(value, bytes):
        return value.decode()
    return [decoded(one) for one in value] if isinstance(value, list) else value
