"""ONNX's recurrent operators through `from_onnx_weights`, and against ONNX's own reference if it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import reference_recurrent

import cupyconv

FUNCTIONS = {"RNN": cupyconv.rnn, "LSTM": cupyconv.lstm, "GRU": cupyconv.gru}
STEPS, BATCH, INPUTS, HIDDEN = 4, 3, 2, 5
GATES = {"RNN": 1, "LSTM": 4, "GRU": 3}


def onnx_arrays(op: str, directions: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(GATES[op])
    rows = GATES[op] * HIDDEN
    shapes = {
        "X": (STEPS, BATCH, INPUTS), "W": (directions, rows, INPUTS), "R": (directions, rows, HIDDEN),
        "B": (directions, 2 * rows), "initial_h": (directions, BATCH, HIDDEN),
    }  # fmt: skip
    if op == "LSTM":
        shapes |= {"initial_c": (directions, BATCH, HIDDEN), "P": (directions, 3 * HIDDEN)}
    return {name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def naive_onnx(op: str, a: dict[str, np.ndarray], linear_before_reset: bool) -> np.ndarray:
    """Return Y of one direction, without the direction axis, from the equations and names of the ONNX specification."""
    wide = {name: array.astype(np.float64) for name, array in a.items()}
    w, r, b = np.split(wide["W"][0], GATES[op]), np.split(wide["R"][0], GATES[op]), wide["B"][0]
    wb, rb = (np.split(half, GATES[op]) for half in np.split(b, 2))
    h, f = wide["initial_h"][0], lambda v: reference_recurrent.activation("sigmoid", v)
    c = wide["initial_c"][0] if op == "LSTM" else None
    rows = []
    for x in wide["X"]:
        if op == "RNN":
            h = np.tanh(x @ w[0].T + h @ r[0].T + wb[0] + rb[0])
        elif op == "LSTM":
            p_i, p_o, p_f = np.split(wide["P"][0], 3)
            v_i, v_o, v_f, v_c = (x @ w[k].T + h @ r[k].T + wb[k] + rb[k] for k in range(4))
            c = f(v_f + p_f * c) * c + f(v_i + p_i * c) * np.tanh(v_c)
            h = f(v_o + p_o * c) * np.tanh(c)
        else:
            z, reset = (f(x @ w[k].T + h @ r[k].T + wb[k] + rb[k]) for k in range(2))
            if linear_before_reset:
                n = np.tanh(x @ w[2].T + reset * (h @ r[2].T + rb[2]) + wb[2])
            else:
                n = np.tanh(x @ w[2].T + (reset * h) @ r[2].T + rb[2] + wb[2])
            h = (1 - z) * n + z * h
        rows.append(h)
    return np.array(rows)


def ours(op: str, a: dict[str, np.ndarray], **settings) -> tuple:
    weights = cupyconv.from_onnx_weights(op, a["W"], a["R"], a["B"], a.get("P"))
    states = {"h0": a["initial_h"], **({"c0": a["initial_c"]} if op == "LSTM" else {})}
    return FUNCTIONS[op](a["X"], **weights, **states, **settings)


@pytest.mark.parametrize("op, linear_before_reset", [("RNN", True), ("LSTM", True), ("GRU", True), ("GRU", False)])
def test_against_the_operators_equations(op, linear_before_reset):
    a = onnx_arrays(op, 1)
    settings = {"linear_before_reset": linear_before_reset} if op == "GRU" else {}
    y, _ = ours(op, a, **settings)
    np.testing.assert_allclose(y, naive_onnx(op, a, linear_before_reset), rtol=0, atol=2e-6)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_two_directions_are_each_its_own(op):
    a = onnx_arrays(op, 2)
    y, _ = ours(op, a, direction="bidirectional")
    for d, direction in enumerate(("forward", "reverse")):
        one = {name: array if name == "X" else array[d : d + 1] for name, array in a.items()}
        np.testing.assert_allclose(
            y[..., d * HIDDEN : (d + 1) * HIDDEN], ours(op, one, direction=direction)[0], atol=1e-6
        )


@pytest.mark.parametrize("op, linear_before_reset", [("RNN", 0), ("LSTM", 0), ("GRU", 0), ("GRU", 1)])
def test_against_onnxs_own_reference(op, linear_before_reset):
    onnx = pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference")
    a = onnx_arrays(op, 1)
    names = ["X", "W", "R", "B", "", "initial_h", *(["initial_c", "P"] if op == "LSTM" else [])]
    outputs = ["Y", "Y_h", *(["Y_c"] if op == "LSTM" else [])]
    attributes = {"linear_before_reset": linear_before_reset} if op == "GRU" else {}
    node = onnx.helper.make_node(op, names, outputs, hidden_size=HIDDEN, **attributes)
    kinds = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names if n]
    results = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in outputs]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", kinds, results))
    expected = evaluator.ReferenceEvaluator(model).run(None, a)
    y, last = ours(op, a, **({"linear_before_reset": bool(linear_before_reset)} if op == "GRU" else {}))
    np.testing.assert_allclose(y.reshape(STEPS, BATCH, 1, HIDDEN).swapaxes(1, 2), expected[0], atol=2e-6)
    for one, wanted in zip(last if op == "LSTM" else (last,), expected[1:]):
        np.testing.assert_allclose(one.reshape(wanted.shape), wanted, atol=2e-6)


def test_what_is_absent_stays_absent():
    a = onnx_arrays("LSTM", 2)
    assert cupyconv.from_onnx_weights("LSTM", a["W"], a["R"]).keys() == {"weight_ih", "weight_hh"}
    assert cupyconv.from_onnx_weights("LSTM", a["W"], a["R"])["weight_hh"].shape == (2, 20, 5)


@pytest.mark.parametrize(
    "words, changed",
    [
        ("op must be one of RNN, LSTM, GRU, given 'lstm'", {"op": "lstm"}),
        (r"P \(peepholes\) requires op 'LSTM'", {"op": "GRU", "W": np.ones((1, 6, 3)), "R": np.ones((1, 6, 2))}),
        (r"R has shape \(8, 2\), needed \(D, 4 \* H, H\)", {"R": np.ones((8, 2))}),
        (r"R has shape \(3, 8, 2\)", {"R": np.ones((3, 8, 2))}),
        (r"W has shape \(1, 6, 3\), needed \(1, 8, I\)", {"W": np.ones((1, 6, 3))}),
        (r"B has shape \(1, 8\), needed \(1, 16\)", {"B": np.ones((1, 8))}),
        (r"P has shape \(1, 8\), needed \(1, 6\)", {"P": np.ones((1, 8))}),
    ],
)
def test_refusals(words, changed):
    right = dict(op="LSTM", W=np.ones((1, 8, 3)), R=np.ones((1, 8, 2)), B=np.ones((1, 16)), P=np.ones((1, 6)))
    cupyconv.from_onnx_weights(**right)
    with pytest.raises(ValueError, match=words):
        cupyconv.from_onnx_weights(**{**right, **changed})
