"""Whole problems for recurrent layers: drawn, made into arrays, called, and compared with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import reference_recurrent
from hypothesis import strategies as st
from strategies import View, as_dtype, constant_where_broadcast, nan_filled, with_layout
from tolerance import assert_close

import cupyconv

FUNCTIONS = {"rnn": cupyconv.rnn, "lstm": cupyconv.lstm, "gru": cupyconv.gru}
STEPS = {"rnn": cupyconv.rnn_step, "lstm": cupyconv.lstm_step, "gru": cupyconv.gru_step}
#: Smooth and piecewise activations; none grows faster than its argument.
ACTIVATIONS = (
    "sigmoid", "tanh", "relu", ("leaky_relu", 0.25), ("thresholded_relu", 0.05), ("scaled_tanh", 0.9, 1.1),
    ("hard_sigmoid", 0.3, 0.4), "elu", "softsign", "softplus", ("affine", 0.5, 0.25), ("clip", -0.25, 0.5), None,
)  # fmt: skip
OPTIONAL = {"rnn": ("bias_ih", "bias_hh", "h0"), "gru": ("bias_ih", "bias_hh", "h0")}
OPTIONAL["lstm"] = (*OPTIONAL["rnn"], "c0", "peephole")
LAYOUTS = ("c_order", "unaligned", "window", "stepped", "reversed", "fortran", "channels_last", "broadcast_first")
OUT_LAYOUTS = LAYOUTS[:-1]


@dataclass(frozen=True, kw_only=True)
class RecurrentCase:
    """One valid call of `rnn`, `lstm` or `gru`."""

    cell: str
    steps: int = 3
    batch: int = 2
    inputs: int = 3
    hidden: int = 2
    direction: str = "forward"
    dtype: str = "float64"
    optional: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    activations: Any = None  # None: the function's default
    input_forget: bool = False
    linear_before_reset: bool = True
    clip: float | None = None
    layout: str = "c_order"
    weight_layout: str = "c_order"
    out_layout: str | None = None  # None: no out
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the array arguments."""
        lead = (2,) * (self.directions == 2)
        rows = reference_recurrent.GATES[self.cell] * self.hidden
        state = (self.directions, self.batch, self.hidden)
        every = {
            "x": (self.steps, self.batch, self.inputs), "weight_ih": (*lead, rows, self.inputs),
            "weight_hh": (*lead, rows, self.hidden), "bias_ih": (*lead, rows), "bias_hh": (*lead, rows), "h0": state,
            "c0": state, "peephole": (*lead, 3 * self.hidden),
        }  # fmt: skip
        return {name: shape for name, shape in every.items() if name not in OPTIONAL["lstm"] or name in self.optional}

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.steps, self.batch, self.directions * self.hidden

    @property
    def settings(self) -> dict[str, Any]:
        """The other arguments."""
        given: dict[str, Any] = {"direction": self.direction, "clip": self.clip}
        if self.activations is not None:
            given["activation" if self.cell == "rnn" else "activations"] = self.activations
        if self.cell == "lstm":
            given["input_forget"] = self.input_forget
        if self.cell == "gru":
            given["linear_before_reset"] = self.linear_before_reset
        return given

    def arrays(self) -> dict[str, np.ndarray]:
        """Return random numbers below 1; the weights are so small that no error grows from step to step."""
        rng = np.random.default_rng(self.seed)
        arrays = {}
        for name, shape in self.shapes.items():
            values = rng.uniform(-1, 1, shape)
            if name in ("weight_ih", "weight_hh"):
                values /= max(1, shape[-1])
            layout = {"x": self.layout, "weight_ih": self.weight_layout}.get(name, "c_order")
            arrays[name] = constant_where_broadcast(values.astype(as_dtype(self.dtype)), layout)
        return arrays

    def views(self, arrays: dict[str, np.ndarray], to_device: View = np.array, xp: ModuleType = np) -> dict[str, Any]:
        """Return the arrays on the device, in the layouts of the case."""
        layouts = {"x": self.layout, "weight_ih": self.weight_layout, "weight_hh": self.weight_layout}
        if self.weight_layout == "broadcast_first":
            layouts["weight_hh"] = "c_order"
        return {name: with_layout(a, layouts.get(name, "c_order"), to_device, xp) for name, a in arrays.items()}

    def new_out(self, to_device: View = np.array, xp: ModuleType = np) -> Any:
        if self.out_layout is None:
            return None
        return with_layout(nan_filled(self.out_shape, as_dtype(self.dtype)), self.out_layout, to_device, xp)

    def call(self, arrays: dict[str, Any], **extra: Any) -> tuple[Any, Any, Any]:
        """Return y, h and c; c is None except for an lstm."""
        y, last = FUNCTIONS[self.cell](**arrays, lengths=self.lengths, **self.settings, **extra)
        return (y, *last) if self.cell == "lstm" else (y, last, None)

    def expected(self, arrays: dict[str, np.ndarray]) -> reference_recurrent.Result:
        settings = {name: value for name, value in self.settings.items() if name != "activation"}
        if self.cell == "rnn" and self.activations is not None:
            one = self.activations
            pair = isinstance(one, tuple) and len(one) == 2 and not isinstance(one[1], (int, float))
            settings["activations"] = tuple((each,) for each in one) if pair else (one,)
        return reference_recurrent.recurrent(self.cell, **arrays, lengths=self.lengths, **settings)

    def assert_close(self, actual: Any, expected: np.ndarray, largest: float) -> None:
        """Compare; the tolerance allows every step the rounding of one sum, and no growth of earlier errors."""
        terms = max(1, self.steps) * (self.inputs + self.hidden + 4)
        assert_close(actual, expected, as_dtype(self.dtype), terms, magnitude=4 * (1 + largest) ** 2)


@st.composite
def recurrent_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16"),
    cells: tuple[str, ...] = ("rnn", "lstm", "gru"),
    directions: tuple[str, ...] = ("forward", "reverse", "bidirectional"),
) -> RecurrentCase:
    """Draw all attributes of a case, including sizes of 0."""
    cell = draw(st.sampled_from(cells))
    steps, batch = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    case = RecurrentCase(
        cell=cell, steps=steps, batch=batch, inputs=draw(st.integers(0, 5)), hidden=draw(st.integers(0, 5)),
        direction=draw(st.sampled_from(directions)), dtype=draw(st.sampled_from(dtypes)),
        optional=tuple(name for name in OPTIONAL[cell] if draw(st.booleans())),
        lengths=draw(st.none() | st.tuples(*(st.integers(0, steps),) * batch)),
        input_forget=cell == "lstm" and draw(st.booleans()),
        linear_before_reset=cell != "gru" or draw(st.booleans()),
        clip=draw(st.sampled_from((None, None, 0.5, 1.0))), layout=draw(st.sampled_from(LAYOUTS)),
        weight_layout=draw(st.sampled_from(LAYOUTS)), out_layout=draw(st.sampled_from((None, *OUT_LAYOUTS))),
        seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip
    if draw(st.booleans()):
        count = len(reference_recurrent.DEFAULTS[cell])
        groups = [tuple(draw(st.sampled_from(ACTIVATIONS)) for _ in range(count)) for _ in range(case.directions)]
        given: tuple[Any, ...] = tuple(groups) if len(groups) == 2 and draw(st.booleans()) else groups[0]
        if cell == "rnn":
            given = given[0] if len(given) == 1 else tuple(one for (one,) in given)
        case = replace(case, activations=given)
    return case
