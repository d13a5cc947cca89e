"""Gradients of recurrent layers: against the tape of `reference_recurrent_gradients`, PyTorch, and what a pullback promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_recurrent_gradients import Gradients, recurrent_gradients
from targets import Target, numpy_target
from tolerance import finfo, rounded, widened

import cupyconv

GATES = {"rnn": 1, "lstm": 4, "gru": 3}
COUNTS = {"rnn": 1, "lstm": 3, "gru": 2}
DEFAULTS = {"rnn": ("tanh",), "lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh")}
DIRECTIONS = ("forward", "reverse", "bidirectional")
#: Smooth ones, ones that bend, ones with parameters, ONNX's own, and none.
ACTIVATIONS = (
    "sigmoid", "tanh", "relu", ("leaky_relu", 0.2), "hard_sigmoid", ("elu", 0.7), "softplus", "softsign",
    ("scaled_tanh", 0.8, 1.2), ("affine", 0.5, 0.1), ("thresholded_relu", 0.3), ("clip", -0.7, 0.9), None,
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A whole problem; arrays are drawn from `seed`."""

    cell: str = "lstm"
    direction: str = "forward"
    sizes: tuple[int, int, int, int] = (4, 3, 2, 3)  # T, N, I, H
    present: frozenset[str] = frozenset({"bias_ih", "bias_hh", "h0", "c0"})
    grads: frozenset[str] = frozenset({"y", "h", "c"})
    lengths: tuple[int, ...] | None = None
    activations: tuple[Any, ...] | None = None  # for each direction
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = True
    dtype: Any = np.float64
    batch_first: bool = False
    seed: int = 0

    @property
    def directions(self) -> int:
        return 1 + (self.direction == "bidirectional")

    def arguments(self) -> dict[str, np.ndarray]:
        """By name; absent ones left out.  What lies beyond a length is NaN: it takes part in nothing."""
        rng = np.random.default_rng(self.seed)
        steps, samples, inputs, hidden = self.sizes
        lead = (2,) * (self.directions == 2)
        rows, state = GATES[self.cell] * hidden, (self.directions, samples, hidden)
        shapes = {
            "x": (steps, samples, inputs), "weight_ih": (*lead, rows, inputs), "weight_hh": (*lead, rows, hidden),
            "bias_ih": (*lead, rows), "bias_hh": (*lead, rows), "h0": state,
        }  # fmt: skip
        if self.cell == "lstm":
            shapes |= {"c0": state, "peephole": (*lead, 3 * hidden)}
        drawn = {name: rounded(rng.normal(size=shape), np.dtype(self.dtype)) for name, shape in shapes.items()}
        for n, length in enumerate(self.lengths or ()):
            drawn["x"][length:, n] = np.nan
        if self.batch_first:
            drawn["x"] = np.ascontiguousarray(drawn["x"].swapaxes(0, 1)).swapaxes(0, 1)
        needed = {"x", "weight_ih", "weight_hh"} | self.present
        return {name: array for name, array in drawn.items() if name in needed}

    def arriving(self) -> dict[str, np.ndarray]:
        """Gradients of the results, by the pullback's names."""
        rng = np.random.default_rng(self.seed + 1)
        steps, samples, _, hidden = self.sizes
        state = (self.directions, samples, hidden)
        shapes = {"y": (steps, samples, self.directions * hidden), "h": state, "c": state}
        drawn = {name: rounded(rng.normal(size=shape), np.dtype(self.dtype)) for name, shape in shapes.items()}
        names = [name for name in shapes if name in self.grads and (name != "c" or self.cell == "lstm")]
        return {f"grad_{name}": drawn[name] for name in names}

    @property
    def groups(self) -> tuple[Any, ...]:
        return self.activations or (DEFAULTS[self.cell],) * self.directions

    def settings(self) -> dict[str, Any]:
        """Of the public function."""
        groups: Any = self.groups
        if self.cell == "rnn":
            groups = tuple(group[0] for group in groups)
        same = {"direction": self.direction, "lengths": self.lengths and list(self.lengths), "clip": self.clip}
        same["activation" if self.cell == "rnn" else "activations"] = groups if self.directions == 2 else groups[0]
        if self.cell == "lstm":
            return {**same, "input_forget": self.input_forget}
        return {**same, "linear_before_reset": self.linear_before_reset} if self.cell == "gru" else same

    def expected(self) -> tuple[dict[str, np.ndarray], Gradients]:
        grads = self.arriving()
        return recurrent_gradients(
            self.cell, tuple(grads.get(f"grad_{name}") for name in "yhc"), self.arguments(), direction=self.direction,
            lengths=self.lengths, activations=self.groups, clip=self.clip, input_forget=self.input_forget,
            linear_before_reset=self.linear_before_reset,
        )  # fmt: skip


def vjp_of(layer: Layer) -> Any:
    return {"rnn": cupyconv.rnn_vjp, "lstm": cupyconv.lstm_vjp, "gru": cupyconv.gru_vjp}[layer.cell]


def computed(target: Target, layer: Layer) -> tuple[Any, Any]:
    """(results, pullback) of the layer on a target."""
    arrays = {name: on_device(target, array) for name, array in layer.arguments().items()}
    return vjp_of(layer)(**arrays, **layer.settings())


def on_device(target: Target, array: np.ndarray) -> Any:
    """The same strides: a batch-first view stays one."""
    if array.ndim == 3 and not array.flags.c_contiguous:
        return target.to_device(np.ascontiguousarray(array.swapaxes(0, 1))).swapaxes(0, 1)
    return target.to_device(array)


def gradients_of(target: Target, layer: Layer) -> Any:
    _, pullback = computed(target, layer)
    return pullback(**{name: target.to_device(array) for name, array in layer.arriving().items()})


def assert_right(target: Target, layer: Layer, found: Any) -> None:
    """Every gradient there is, in its argument's shape and dtype, near the oracle's."""
    _, expected = layer.expected()
    arguments = layer.arguments()
    for name in Gradients._fields:
        actual, wanted = getattr(found, name), getattr(expected, name)
        if name not in arguments:
            assert actual is None, f"there is no {name}, yet it has a gradient"
            continue
        assert actual.shape == arguments[name].shape and actual.dtype == arguments[name].dtype, name
        error = np.abs(widened(target.to_host(actual)) - wanted).max(initial=0)
        assert error <= allowed(layer) * (1 + np.abs(wanted).max(initial=0)), f"{name}: {error}"


def allowed(layer: Layer) -> float:
    """Of the largest element: roundings grow through at most a few steps; a 16-bit y is read back rounded."""
    return {8: 1e-12, 4: 1e-5, 2: 8 * float(finfo(np.dtype(layer.dtype)).eps)}[np.dtype(layer.dtype).itemsize]


# --- the oracle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", GATES)
def test_the_oracle_agrees_with_finite_differences(cell):
    """A step of every element of every argument, either way."""
    layer = Layer(cell, "bidirectional", lengths=(4, 0, 2), clip=0.8, present=frozenset(Gradients._fields),
                  linear_before_reset=cell != "gru", input_forget=True)  # fmt: skip
    arguments = {name: np.nan_to_num(array) for name, array in layer.arguments().items()}
    grads = layer.arriving()

    def loss(changed: dict[str, np.ndarray]) -> float:
        results, _ = recurrent_gradients(
            cell, (None, None, None), changed, direction=layer.direction, lengths=layer.lengths,
            activations=layer.groups, clip=layer.clip, input_forget=True, linear_before_reset=cell != "gru",
        )  # fmt: skip
        return sum(float((results[name[-1]] * grad).sum()) for name, grad in grads.items())

    _, expected = layer.expected()
    rng, step = np.random.default_rng(5), 1e-6
    for name, array in arguments.items():
        for at in rng.permutation(list(np.ndindex(array.shape)))[:12]:
            each = []
            for sign in (1, -1):
                moved = array.copy()
                moved[tuple(at)] += sign * step
                each.append(loss({**arguments, name: moved}))
            slope = (each[0] - each[1]) / (2 * step)
            assert abs(slope - getattr(expected, name)[tuple(at)]) < 1e-7 * (1 + abs(slope)), name


# --- against the oracle -------------------------------------------------------------------------------------------


@st.composite
def layers(draw) -> Layer:
    cell, direction = draw(st.sampled_from(sorted(GATES))), draw(st.sampled_from(DIRECTIONS))
    steps, samples = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    sizes = steps, samples, draw(st.integers(0, 4)), draw(st.integers(0, 5))
    each = st.lists(st.integers(0, steps), min_size=samples, max_size=samples).map(tuple)
    groups = st.tuples(*[st.sampled_from(ACTIVATIONS)] * COUNTS[cell])
    directions = 1 + (direction == "bidirectional")
    return Layer(
        cell, direction, sizes,
        present=draw(st.frozensets(st.sampled_from(Gradients._fields))),
        grads=draw(st.frozensets(st.sampled_from(["y", "h", "c"]))),
        lengths=draw(st.none() | each),
        activations=draw(st.none() | st.tuples(*[groups] * directions)),
        clip=draw(st.sampled_from([None, 0.5, 2.0])),
        input_forget=draw(st.booleans()), linear_before_reset=draw(st.booleans()),
        dtype=draw(st.sampled_from([np.float64, np.float64, np.float32, np.float16, ml_dtypes.bfloat16])),
        batch_first=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(max_examples=250)
@given(layer=layers(), limit=st.sampled_from([None, None, 6000, 20000]))
def test_gradients_are_the_oracles(layer, limit):
    target = numpy_target()
    with cupyconv.options(workspace_limit=limit):
        try:
            found = gradients_of(target, layer)
        except ValueError as refusal:
            assert limit and "workspace" in str(refusal)
            return
    assert_right(target, layer, found)
