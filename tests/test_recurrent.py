"""`rnn`, `lstm`, `gru` and their single steps against the naive definition and PyTorch, and their promises."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
import reference_recurrent
from hypothesis import given
from peak_memory import peak_bytes
from recurrent_cases import FUNCTIONS, STEPS, RecurrentCase, recurrent_cases
from refusals import Ones, assert_refused, placed, table
from strategies import as_dtype, share_of_examples
from targets import TARGETS, Target
from test_activations import DTYPES, special_values
from test_repetition import assert_warm_is_fresh
from tolerance import assert_close

import cupyconv
from cupyconv.call.operation import bound, operation_of
from cupyconv.numpy import activations as numpy_activations
from cupyconv.numpy.recurrent_weights import is_doubled
from cupyconv.problem.activations import RECURRENT_ONLY, resolve_activation

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
CELLS = ("rnn", "lstm", "gru")
LAYERS = {"rnn": cupyconv.rnn, "lstm": cupyconv.lstm, "gru": cupyconv.gru}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """Return each target in turn."""
    return request.param()


def full_case(cell: str, **changed: Any) -> RecurrentCase:
    """Return a case with everything that a cell can have at once."""
    optional = ("bias_ih", "bias_hh", "h0", *(("c0", "peephole") if cell == "lstm" else ()))
    case = RecurrentCase(
        cell=cell, steps=6, batch=5, inputs=4, hidden=3, direction="bidirectional", dtype="float32", optional=optional,
        lengths=(6, 0, 3, 1, 6), clip=1.5, input_forget=cell == "lstm", linear_before_reset=False,
    )  # fmt: skip
    return replace(case, **changed)


# --- values -----------------------------------------------------------------------------------------------------


@share_of_examples(1.5)
@given(case=recurrent_cases())
def test_every_attribute(target, case):
    arrays = case.arrays()
    out = case.new_out(target.to_device, target.xp)
    y, h, c = case.call(case.views(arrays, target.to_device, target.xp), out=out)
    assert out is None or y is out
    expected = case.expected(arrays)
    case.assert_close(target.to_host(y), expected.y, expected.largest)
    case.assert_close(target.to_host(h), expected.h, expected.largest)
    if c is not None:
        case.assert_close(target.to_host(c), expected.c, expected.largest)


@share_of_examples(0.5)
@given(case=recurrent_cases(dtypes=("float64", "float32", "bfloat16")))
def test_what_a_gradient_needs(target, case):
    """Saved gates are the values before their activations, at the time of x, in either direction."""
    arrays = case.arrays()
    function = LAYERS[case.cell]
    views = case.views(arrays, target.to_device, target.xp)
    arguments = bound(function, (), {**views, "lengths": case.lengths, **case.settings})
    returned = [target.to_host(array) for array in operation_of(function)(arguments, saving=True)]
    plain = [
        target.to_host(one) for one in case.call(case.views(arrays, target.to_device, target.xp)) if one is not None
    ]
    for one, another in zip(returned, plain):
        np.testing.assert_array_equal(one, another)
    expected = case.expected(arrays)
    gates = returned[len(plain)]
    wide = "float64" if case.dtype == "float64" else "float32"
    lengths = (case.steps,) * case.batch if case.lengths is None else case.lengths
    coupled = slice(case.hidden, 2 * case.hidden) if case.input_forget else slice(0, 0)  # f's own values are unused
    for n, length in enumerate(lengths):
        actual, wanted = gates[:, :length, n].copy(), expected.gates[:, :length, n].copy()
        actual[..., coupled] = wanted[..., coupled] = 0
        replace(case, dtype=wide).assert_close(actual, wanted, expected.largest)


@share_of_examples(0.4)
@given(case=recurrent_cases(directions=("forward",)))
def test_steps_are_a_sequence(target, case):
    """One call per step gives the results of one call for all steps."""
    case = replace(case, lengths=None)
    arrays = case.arrays()
    views = case.views(arrays, target.to_device, target.xp)
    options = {name: value for name, value in case.settings.items() if name != "direction"}
    zeros = np.zeros((case.batch, case.hidden), as_dtype(case.dtype))
    states = [views.pop(name)[0] if name in views else target.to_device(zeros) for name in ("h0", "c0")]
    states = states[: 2 if case.cell == "lstm" else 1]
    x = views.pop("x")
    for t in range(case.steps):
        next_states = STEPS[case.cell](x[t], *states, **views, **options)
        states = list(next_states) if case.cell == "lstm" else [next_states]
    expected = case.expected(arrays)
    rounded = max(1, case.steps) if as_dtype(case.dtype).itemsize == 2 else 0  # states are rounded at every step
    for state, wanted in zip(states, (expected.h[0], expected.c[0])):
        if rounded:
            eps = float(ml_dtypes.finfo(as_dtype(case.dtype)).eps)
            actual = reference.wide(target.to_host(state))
            np.testing.assert_allclose(actual, wanted, atol=4 * rounded * eps * (1 + expected.largest) ** 2)
        else:
            case.assert_close(target.to_host(state), wanted, expected.largest)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_larger_sizes(target, cell, dtype):
    """Sizes exceed the blocks of a BLAS or a kernel, and are not multiples of them."""
    case = full_case(
        cell, steps=5, batch=17, inputs=70, hidden=67, dtype=dtype, lengths=tuple(n % 6 for n in range(17)),
        linear_before_reset=True, input_forget=False,
    )  # fmt: skip
    arrays = case.arrays()
    expected = case.expected(arrays)
    for actual, wanted in zip(case.call(case.views(arrays, target.to_device, target.xp)), expected):
        if actual is not None:
            case.assert_close(target.to_host(actual), wanted, expected.largest)


# --- activations ------------------------------------------------------------------------------------------------

RECURRENT_SPECIFICATIONS = [
    *RECURRENT_ONLY, ("affine", -0.5, 2), ("thresholded_relu", 0), ("thresholded_relu", -1.5), ("scaled_tanh", 1.5, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("specification", [*RECURRENT_SPECIFICATIONS, "sigmoid", "tanh", "softplus", None], ids=str)
def test_special_values(target, specification, dtype):
    """Through a step that changes nothing else, no NaN or infinity is lost, moved or created."""
    values = special_values(dtype)
    x, one = target.to_device(values[:, None]), target.to_device(np.ones((1, 1), dtype))
    h = target.to_device(np.zeros((len(values), 1), dtype))
    actual = cupyconv.rnn_step(x, h, one, one, activation=specification)
    expected = reference_recurrent.activation(specification, reference.wide(values))
    magnitude = np.where(np.isfinite(values), np.abs(reference.wide(values)), 0) + 1
    assert_close(target.to_host(actual)[:, 0], expected, dtype, terms=1, magnitude=magnitude)


@pytest.mark.parametrize("specification", RECURRENT_SPECIFICATIONS, ids=str)
def test_derivatives(specification):
    """Derivatives agree with central differences away from kinks."""
    resolved = resolve_activation(specification, recurrent=True)
    v = np.array([-7.3, -2.1, -0.8, -0.03, 0.02, 0.6, 1.7, 5.2])
    near = 1e-6
    difference = (
        reference_recurrent.activation(specification, v + near)
        - reference_recurrent.activation(specification, v - near)
    ) / (2 * near)
    np.testing.assert_allclose(numpy_activations.derivative(v, resolved), difference, atol=1e-8)


def test_a_pair_of_activations_is_one_for_each_direction(target):
    x = target.to_device(np.full((2, 1, 1), -1.0))
    weight_ih, weight_hh = (target.to_device(np.full((2, 1, 1), value)) for value in (1.0, 0.0))
    for pair in (("relu", None), [None, "relu"], ("relu", ("affine", 2, 1)), (("leaky_relu", 0.5), ("relu",))):
        y, _ = cupyconv.rnn(x, weight_ih, weight_hh, direction="bidirectional", activation=pair)
        expected = [reference_recurrent.activation(one, np.array(-1.0)) for one in pair]
        np.testing.assert_array_equal(target.to_host(y)[0, 0], expected)
    both, _ = cupyconv.rnn(x, weight_ih, weight_hh, direction="bidirectional", activation=("leaky_relu", 0.5))
    np.testing.assert_array_equal(target.to_host(both), np.full((2, 1, 2), -0.5))


# --- lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_nothing_past_a_length_is_seen(target, cell, direction):
    """A NaN of x past a length reaches no result, and no bit of a result depends on it."""
    case = full_case(cell, direction=direction)
    arrays = case.arrays()
    spoilt = arrays["x"].copy()
    for n, length in enumerate(case.lengths):
        spoilt[length:, n] = np.nan
    results = [
        [target.to_host(one).tobytes() for one in case.call(case.views({**arrays, "x": x}, target.to_device, target.xp)) if one is not None]
        for x in (arrays["x"], spoilt)
    ]  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.parametrize("cell", CELLS)
def test_kinds_of_lengths(target, cell):
    case = full_case(cell)
    views = case.views(case.arrays(), target.to_device, target.xp)
    expected = [target.to_host(one) for one in case.call(views) if one is not None]
    kinds = (list, *(lambda v, kind=kind: np.array(v, kind) for kind in ("int64", "int32", "uint8", ">i4", "uint64")))
    strided = [
        np.repeat(case.lengths, 2)[::2], target.to_device(np.array(case.lengths, np.int32)),
        target.to_device(np.repeat(case.lengths, 3))[::3],
    ]  # fmt: skip
    for lengths in (*(kind(case.lengths) for kind in kinds), *strided):
        actual = FUNCTIONS[cell](**views, lengths=lengths, **case.settings)
        flat = (actual[0], *actual[1]) if cell == "lstm" else actual
        for one, wanted in zip(flat, expected):
            np.testing.assert_array_equal(target.to_host(one), wanted)


def test_other_lengths_are_checked_again(target):
    """A repeated call reuses all its checks except those of the values of lengths."""
    case = full_case("gru")
    views = case.views(case.arrays(), target.to_device, target.xp)
    for lengths, fits in (((6, 0, 3, 1, 6), True), ((1, 1, 1, 1, 7), False), ((2, 2, 2, 2, 2), True)):
        given = np.array(lengths)
        if fits:
            y, _ = cupyconv.gru(**views, **case.settings, lengths=given)
            expected = replace(case, lengths=lengths).expected(case.arrays())
            case.assert_close(target.to_host(y), expected.y, expected.largest)
        else:
            with pytest.raises(ValueError, match="lengths must be from 0 to 6, given 1 to 7"):
                cupyconv.gru(**views, **case.settings, lengths=given)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("sizes", [{"steps": 0}, {"batch": 0}, {"inputs": 0}, {"hidden": 0}], ids=str)
def test_sizes_of_nothing(target, cell, sizes):
    case = full_case(cell, **{"lengths": None, **sizes})
    arrays = case.arrays()
    y, h, _ = case.call(case.views(arrays, target.to_device, target.xp))
    expected = case.expected(arrays)
    case.assert_close(target.to_host(y), expected.y, expected.largest)
    case.assert_close(target.to_host(h), expected.h, expected.largest)
    if "steps" in sizes:
        np.testing.assert_array_equal(target.to_host(h), arrays["h0"])


# --- layouts, dtypes, results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_batch_first_is_a_view(target, cell):
    """A batch-first view gives the bits of time-first arrays."""
    case = full_case(cell)
    arrays = case.arrays()
    views = case.views(arrays, target.to_device, target.xp)
    batch_first = target.to_device(np.ascontiguousarray(arrays["x"].swapaxes(0, 1)))
    out = target.to_device(np.zeros((case.batch, case.steps, 2 * case.hidden), np.float32))
    expected, *_ = case.call(views)
    actual, *_ = case.call({**views, "x": batch_first.swapaxes(0, 1)}, out=out.swapaxes(0, 1))
    np.testing.assert_array_equal(target.to_host(actual), target.to_host(expected))
    assert np.shares_memory(actual, out) if target.name != "gpu" else actual.data.ptr == out.data.ptr


def test_addends_and_states_do_not_widen(target):
    x, weight_ih, weight_hh = (target.to_device(np.ones(s, np.float16)) for s in ((2, 1, 2), (4, 2), (4, 1)))
    bias, peephole = target.to_device(np.ones(4)), target.to_device(np.ones(3, np.float32))
    h0, c0 = target.to_device(np.ones((1, 1, 1))), target.to_device(np.ones((1, 1, 1), np.float32))
    y, (h, c) = cupyconv.lstm(x, weight_ih, weight_hh, bias, bias, h0=h0, c0=c0, peephole=peephole)
    assert y.dtype == h.dtype == c.dtype == np.float16
    y, _ = cupyconv.lstm(x, target.to_device(np.ones((4, 2))), weight_hh)
    assert y.dtype == np.float64
    plan = cupyconv.explain(cupyconv.lstm, np.ones((2, 1, 2), np.float16), np.ones((4, 2)), np.ones((4, 1), np.float16))
    assert "weight_ih (float64) widens the result to float64" in str(plan)


def test_an_addend_is_rounded_as_if_given_in_the_results_dtype(target):
    one = target.to_device(np.zeros((1, 1), np.float16))
    bias = 1 + 2**-12
    y = cupyconv.rnn_step(one, one, one, one, target.to_device(np.array([bias])), activation=("affine", 2048, -2048))
    assert target.to_host(y).item() == 0


@pytest.mark.parametrize("cell", CELLS)
def test_out_for_all_results(target, cell):
    case = full_case(cell)
    views = case.views(case.arrays(), target.to_device, target.xp)
    expected = [target.to_host(one) for one in case.call(views) if one is not None]
    outs = [target.to_device(np.zeros(one.shape, one.dtype)) for one in expected]
    nested = (outs[0], tuple(outs[1:])) if cell == "lstm" else tuple(outs)
    for _ in range(2):
        returned = [one for one in case.call(views, out=nested) if one is not None]
        assert all(a is b for a, b in zip(returned, outs, strict=True))
        for one, wanted in zip(outs, expected):
            np.testing.assert_array_equal(target.to_host(one), wanted)
            one[...] = 0


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_into_given_arrays(target, cell):
    case = full_case(cell, direction="forward", lengths=None, clip=None, input_forget=False)
    views = case.views(case.arrays(), target.to_device, target.xp)
    weights = {name: a for name, a in views.items() if name.startswith(("weight", "bias"))}
    states = [views[name][0] for name in ("h0", "c0") if name in views]
    returned = STEPS[cell](views["x"][0], *states, **weights)
    expected = returned if cell == "lstm" else (returned,)
    outs = tuple(target.to_device(np.zeros((5, 3), np.float32)) for _ in expected)
    STEPS[cell](views["x"][0], *states, **weights, out=outs if cell == "lstm" else outs[0])
    for one, wanted in zip(outs, expected):
        np.testing.assert_array_equal(target.to_host(one), target.to_host(wanted))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("samples", [1, 3])
def test_a_weight_of_zero_times_nan(cell, samples):
    """BLAS skips products with zero if a factor has one element."""
    gates = {"rnn": 1, "lstm": 4, "gru": 3}[cell]
    x, states = np.full((samples, 1), np.nan), [np.zeros((samples, 1))] * (2 if cell == "lstm" else 1)
    result = STEPS[cell](x, *states, np.zeros((gates, 1)), np.zeros((gates, 1)))
    assert np.isnan(result).all()
    for steps in (1, 2, 40):
        xs, h0 = np.zeros((steps, samples, 1)), np.full((1, samples, 1), np.nan)
        for inputs, state in ((xs * np.nan, None), (xs, h0)):
            y = FUNCTIONS[cell](inputs, np.zeros((gates, 1)), np.zeros((gates, 1)), h0=state)[0]
            assert np.isnan(y).all()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("samples", "hidden", "small"), [(1, 40, True), (4, 40, True), (4, 300, False)])
def test_steps_of_a_few_samples(cell, samples, hidden, small):
    """A step of a few samples is computed on the caller's arrays, also in turn with calls of another thread."""
    optional = ("bias_ih", "h0", *(("c0",) if cell == "lstm" else ()))
    case = RecurrentCase(cell=cell, steps=3, batch=samples, inputs=30, hidden=hidden, optional=optional)
    arrays = case.arrays()
    weights = {name: a for name, a in arrays.items() if name.startswith(("weight", "bias"))}
    states = [arrays[name][0] for name in ("h0", "c0") if name in arrays]
    plan = cupyconv.explain(STEPS[cell], arrays["x"][0], *states, **weights)
    assert plan.steps[0].is_small is small

    def sequence(_):
        now = states
        for x in arrays["x"]:
            after = STEPS[cell](x, *now, **weights)
            now = list(after) if cell == "lstm" else [after]
        return now

    expected = case.expected(arrays)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(sequence, range(20)):
            for state, wanted in zip(results, (expected.h[0], expected.c[0])):
                case.assert_close(state, wanted, expected.largest)


@pytest.mark.parametrize("cell", CELLS)
def test_the_same_bits_every_time(target, cell):
    case = full_case(cell, hidden=40, batch=5, inputs=30)
    views = case.views(case.arrays(), target.to_device, target.xp)
    bits = {tuple(target.to_host(one).tobytes() for one in case.call(views) if one is not None) for _ in range(5)}
    assert len(bits) == 1


def test_layers_are_calls(target):
    """The second layer's x is the first layer's y, with both directions."""
    first = full_case("gru", dtype="float64")
    second = replace(first, inputs=2 * first.hidden, seed=1)
    arrays, more = first.arrays(), second.arrays()
    y, *_ = first.call(first.views(arrays, target.to_device, target.xp))
    z, *_ = second.call({**second.views(more, target.to_device, target.xp), "x": y})
    expected = first.expected(arrays)
    second.assert_close(target.to_host(z), second.expected({**more, "x": expected.y}).y, 4.0)


# --- repetition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_a_warm_call_is_a_fresh_call(target, cell):
    """Calls that differ from one call in one thing, some of them invalid, behave alike in first and repeated calls."""
    case = full_case(cell)
    views = case.views(case.arrays(), target.to_device, target.xp)
    name = "activation" if cell == "rnn" else "activations"
    ones = {"rnn": (("leaky_relu", 0.0), ("leaky_relu", -0.0), "relu"), "gru": (("relu", "tanh"), ("tanh", "relu"))}
    ones["lstm"] = (("relu", "tanh", "tanh"), ("tanh", "relu", "tanh"), ("tanh", "tanh", "relu"))

    def call(**changed: Any) -> Any:
        given = {**views, "lengths": case.lengths, **case.settings, **changed}
        return lambda: FUNCTIONS[cell](**given)[0]

    calls = [
        call(), call(lengths=None), call(lengths=(1, 2, 3, 4, 5)), call(lengths=[1, 2, 3, 4, 7]), call(clip=1),
        call(clip=1.0), call(clip=True), call(clip=None), call(direction="reverse"), call(h0=None), call(bias_ih=None),
        call(bias_hh=None), call(bias_ih=views["bias_hh"], bias_hh=views["bias_ih"]), call(method="step"),
        call(method="direct"), *(call(**{name: one}) for one in ones[cell]),
    ]  # fmt: skip
    if cell == "gru":
        calls += [call(linear_before_reset=value) for value in (True, False, 1, None)]
    if cell == "lstm":
        calls += [call(input_forget=False), call(input_forget=0), call(c0=None), call(peephole=None)]
    outcomes = assert_warm_is_fresh(target, calls)
    assert not isinstance(outcomes[0][0], type) and outcomes[3][0] is ValueError and outcomes[6][0] is TypeError


# --- implementations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("cell", "hidden"), [("rnn", 81), ("lstm", 21), ("gru", 27)])
def test_weights_in_blocks(cell, hidden, direct, monkeypatch):
    """Weights are split into blocks of rows, as for large products, and the last block ends beyond the gates."""
    columns = (1 if cell == "gru" else 2) * hidden + 1  # inputs share one product with the state, except a gru's
    monkeypatch.setattr("cupyconv.numpy.recurrent_weights.SMALL_PRODUCT", 40 * columns * 5)
    case = full_case(cell, steps=9, inputs=hidden, hidden=hidden, linear_before_reset=direct, lengths=(9, 0, 3, 1, 8))
    arrays = case.arrays()
    cupyconv.clear_caches()
    try:
        for lengths in (case.lengths, None):
            given = replace(case, lengths=lengths)
            plan = cupyconv.explain(FUNCTIONS[cell], **arrays, lengths=lengths, **given.settings)
            assert plan.steps[0].blocks == (32, 32 if cell == "gru" else 0)
            expected = given.expected(arrays)
            for actual, wanted in zip(given.call(arrays), (expected.y, expected.h, expected.c)):
                if actual is not None:
                    given.assert_close(actual, wanted, expected.largest)
    finally:
        cupyconv.clear_caches()


@pytest.mark.parametrize("input_forget", [False, True])
@pytest.mark.parametrize(
    ("steps", "batch", "inputs", "hidden", "dtype", "blocks"),
    [
        (40, 1, 5, 7, "float32", False),  # a small weight, in rows
        (90, 1, 50, 70, "float64", False),  # separate inputs, by columns
        (34, 5, 30, 41, "float64", True),  # gates start within a block, the last block ends beyond them, c is large
        (300, 2, 3, 4, "float16", False),  # two chunks
    ],
)
def test_doubled_gates(steps, batch, inputs, hidden, dtype, blocks, input_forget, monkeypatch):
    """An lstm that computes its sigmoids as tanh + 1 gives the right results."""
    if blocks:
        monkeypatch.setattr("cupyconv.numpy.recurrent_weights.SMALL_PRODUCT", 40 * (inputs + hidden + 1) * batch)
        monkeypatch.setattr("cupyconv.numpy.recurrent_cells._SMALL_SUM", batch * hidden - 1)
    lengths = tuple(range(steps, steps - batch, -1)) if batch <= steps else None
    case = RecurrentCase(
        cell="lstm", direction="bidirectional", steps=steps, batch=batch, inputs=inputs, hidden=hidden, dtype=dtype,
        optional=("bias_ih", "h0", "c0"), input_forget=input_forget, clip=0.7,
    )  # fmt: skip
    arrays = case.arrays()
    arrays |= {
        name: arrays[name] * 4 for name in ("weight_ih", "weight_hh")
    }  # some gates are clipped, and nearly closed
    cupyconv.clear_caches()
    try:
        for given in (case, replace(case, lengths=lengths), replace(case, clip=None, optional=())):
            own = {name: array for name, array in arrays.items() if name in given.shapes}
            step = cupyconv.explain(cupyconv.lstm, **own, lengths=given.lengths, **given.settings).steps[0]
            assert step.folded and any(step.blocks) == blocks
            assert is_doubled(step.problem.geometry, 1, peephole=False, folded=True)
            expected = given.expected(own)
            for actual, wanted in zip(given.call(own), (expected.y, expected.h, expected.c)):
                given.assert_close(actual, wanted, expected.largest)
    finally:
        cupyconv.clear_caches()


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("limit", [None, 600_000])
def test_memory_is_what_the_plan_says(cell, dtype, limit):
    case = full_case(cell, steps=60, batch=64, inputs=20, hidden=32, dtype=dtype, lengths=tuple(range(60, -4, -1)[:64]))
    case = replace(case, lengths=tuple(max(0, length) for length in case.lengths), linear_before_reset=True)
    if limit is None and cell == "lstm":
        case = replace(case, activations=("hard_sigmoid", "elu", "mish"))
    views, out = case.views(case.arrays()), np.empty((60, 64, 64), dtype)
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(FUNCTIONS[cell], **views, lengths=case.lengths, **case.settings)
        case.call(views, out=out)  # fills the caches
        peak = peak_bytes(lambda: case.call(views, out=out))
        assert limit is None or plan.workspace_bytes <= limit
    states = 2 * 2 * 64 * 32 * 4
    of_numpy = 80_000 * plan.steps[0].threads  # Python objects, and NumPy's buffers for an array that is cast
    assert peak <= plan.workspace_bytes + states + of_numpy


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_allocates_nothing(cell):
    """Four times the steps, with as many in memory at a time, need no more bytes."""

    def case(steps: int) -> RecurrentCase:
        return full_case(cell, steps=steps, batch=128, inputs=8, hidden=64, lengths=None, direction="forward")

    peaks = []
    with cupyconv.options(threads=1):
        limit = cupyconv.explain(FUNCTIONS[cell], **case(10).arrays(), **case(10).settings).workspace_bytes + 2048
    for steps in (10, 40):
        arrays, out = case(steps).arrays(), np.empty((steps, 128, 64), np.float32)
        with cupyconv.options(workspace_limit=limit, threads=1):
            plan = cupyconv.explain(FUNCTIONS[cell], **arrays, **case(steps).settings)
            assert plan.steps[0].chunk == 10
            case(steps).call(arrays, out=out)
            peaks.append(peak_bytes(lambda steps=steps, arrays=arrays, out=out: case(steps).call(arrays, out=out)))
    assert abs(peaks[1] - peaks[0]) < 4_000, "one gate of a step alone has 32,768 bytes"


@pytest.mark.parametrize("limit", [20_000, 30_000, 1 << 20])
def test_chunks_of_steps_give_the_same_numbers(limit):
    case = full_case("lstm", steps=40, batch=6, inputs=5, hidden=16, lengths=(40, 0, 17, 39, 20, 21))
    arrays = case.arrays()
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.lstm, **arrays, lengths=case.lengths, **case.settings)
        y, h, c = case.call(arrays)
    assert plan.workspace_bytes <= limit and (plan.steps[0].chunk < 40) == (limit < 1 << 20)
    expected = case.expected(arrays)
    for actual, wanted in ((y, expected.y), (h, expected.h), (c, expected.c)):
        case.assert_close(actual, wanted, expected.largest)


def test_a_limit_below_one_step_is_refused():
    case = full_case("lstm", hidden=64, lengths=None)
    with cupyconv.options(workspace_limit=4_000):
        with pytest.raises(ValueError, match=r"one step of one sample needs .* bytes of workspace, the limit is 4,000"):
            case.call(case.arrays())


@pytest.mark.parametrize("limit", [8_000, 20_000, 80_000])
def test_samples_are_split_where_a_step_of_all_is_too_much(limit):
    case = full_case("lstm", batch=37, inputs=5, hidden=16, lengths=tuple(n % 7 for n in range(37)))
    arrays = case.arrays()
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.lstm, **arrays, lengths=case.lengths, **case.settings)
        results = case.call(arrays)
    assert plan.workspace_bytes <= limit and (plan.steps[0].samples < 37) == (limit < 80_000)
    for actual, wanted in zip(results, case.expected(arrays)):
        case.assert_close(actual, wanted, 4.0)


def test_a_large_layer_fits_the_usual_limit():
    """Weights that are no smaller than the limit are not copied."""
    x, weight_ih, weight_hh = (np.zeros(s, np.float32) for s in ((8, 600, 16), (4096, 16), (4096, 1024)))
    plan = cupyconv.explain(cupyconv.lstm, x, weight_ih, weight_hh)
    assert plan.workspace_bytes <= 16 << 20 and plan.steps[0].copied == ()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_threads_take_directions_and_samples(cell, threads):
    """The bits are the same every time, whichever thread is first."""
    case = full_case(
        cell, batch=7, hidden=9, lengths=(6, 0, 3, 1, 6, 2, 5), direction="forward" if threads == 2 else "bidirectional"
    )
    arrays = case.arrays()
    with cupyconv.options(threads=threads):
        plan = cupyconv.explain(FUNCTIONS[cell], **arrays, lengths=case.lengths, **case.settings)
        results = [case.call(arrays) for _ in range(3)]
    assert plan.steps[0].threads == 2 and plan.steps[0].samples == (4 if threads == 2 else 7)
    assert len({tuple(one.tobytes() for one in result if one is not None) for result in results}) == 1
    for actual, wanted in zip(results[0], case.expected(arrays)):
        if actual is not None:
            case.assert_close(actual, wanted, 4.0)


# --- plans ------------------------------------------------------------------------------------------------------


def test_a_plan_of_numpys():
    x, weight_ih, weight_hh = (np.ones(s, np.float32) for s in ((50, 64, 128), (1024, 128), (1024, 256)))
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.lstm, x, weight_ih, weight_hh)
    assert (plan.method, plan.backend, len(plan.steps)) == ("step", "numpy", 1)
    assert plan.flops == 2 * 50 * 64 * 1024 * (128 + 256)
    page = str(plan)
    for words in ("lstm 128 -> 256, forward, on 50 steps x 64 samples", "1024 x 384 x 64", "not persistent: "):
        assert words in page
    step = cupyconv.explain(
        cupyconv.lstm_step, x[0], np.ones((64, 256), "f4"), np.ones((64, 256), "f4"), weight_ih, weight_hh
    )
    assert step.flops == plan.flops // 50


def test_the_method_of_a_gpu_is_refused_on_numpy():
    case = full_case("rnn")
    with pytest.raises(ValueError, match=r"method 'persistent' does not apply: .* GPU"):
        case.call(case.arrays(), method="persistent")


# --- refusals ---------------------------------------------------------------------------------------------------

LSTM = dict(
    x=Ones((5, 2, 3)), weight_ih=Ones((16, 3)), weight_hh=Ones((16, 4)), bias_ih=Ones((16,)), bias_hh=Ones((16,)),
    h0=Ones((1, 2, 4)), c0=Ones((1, 2, 4)), peephole=Ones((12,)), lengths=[5, 0], out=Ones((5, 2, 4)),
)  # fmt: skip
GRU = dict(x=Ones((5, 2, 3)), weight_ih=Ones((2, 12, 3)), weight_hh=Ones((2, 12, 4)), direction="bidirectional")

REFUSALS = table(
    ("x of two axes", ValueError, ["x has shape", r"\(5, 2\)", r"\(T, N, I\): steps, samples, inputs"], dict(x=Ones((5, 2)), lengths=None)),
    ("inputs differ", ValueError, ["weight_ih", r"\(16, 3\)", r"needed \(16, 5\)"], dict(x=Ones((5, 2, 5)))),
    ("recurrent weight not square", ValueError, ["weight_hh", r"\(16, 5\)", r"\(4 \* H, H\)"], dict(weight_hh=Ones((16, 5)))),
    ("gates of a gru", ValueError, ["weight_hh", r"\(12, 4\)", r"\(4 \* H, H\)"], dict(weight_hh=Ones((12, 4)))),
    ("an axis of directions", ValueError, ["weight_hh", r"\(1, 16, 4\)", r"weight_hh\[0\]"], dict(weight_hh=Ones((1, 16, 4)))),
    ("weight transposed", ValueError, ["weight_hh", r"\(4, 16\)", r"weight_hh\.T"], dict(weight_hh=Ones((4, 16)))),
    ("both biases in one", ValueError, ["bias_ih", r"\(32,\)", r"\(16,\)", "from_onnx_weights"], dict(bias_ih=Ones((32,)))),
    ("weight of one axis", ValueError, ["weight_hh", r"\(16,\)"], dict(weight_hh=Ones((16,)))),
    ("bias of another size", ValueError, ["bias_ih", r"\(4,\)", r"\(16,\)"], dict(bias_ih=Ones((4,)))),
    ("state without directions", ValueError, ["h0", r"\(2, 4\)", r"\(1, 2, 4\)"], dict(h0=Ones((2, 4)))),
    ("state that would broadcast", ValueError, ["c0", r"\(1, 1, 4\)"], dict(c0=Ones((1, 1, 4)))),
    ("peephole for each gate", ValueError, ["peephole", r"\(16,\)", r"\(12,\)"], dict(peephole=Ones((16,)))),
    ("integers", TypeError, ["x has dtype int64", "astype"], dict(x=Ones((5, 2, 3), "int64"))),
    ("integer bias", TypeError, ["bias_hh has dtype int32", "astype"], dict(bias_hh=Ones((16,), "int32"))),
    ("complex", TypeError, ["weight_ih has dtype complex64", "real"], dict(weight_ih=Ones((16, 3), "complex64"))),
    ("no common dtype", TypeError, ["bfloat16", "float16"],
     dict(x=Ones((5, 2, 3), "float16"), weight_ih=Ones((16, 3), ml_dtypes.bfloat16))),
    ("no weight", TypeError, ["weight_hh", "NoneType"], dict(weight_hh=None)),
    ("x is a list", TypeError, ["x must be", "list"], dict(x=[[[1.0]]], lengths=None)),
    ("unknown direction", ValueError, ["direction", "forward, reverse, bidirectional", "'both'"], dict(direction="both")),
    ("direction is no word", ValueError, ["direction", "None"], dict(direction=None)),
    ("two activations", ValueError, ["activations", "3 activations", "'tanh'"], dict(activations=("sigmoid", "tanh"))),
    ("one activation", TypeError, ["activations", "tuple of 3", "'tanh'"], dict(activations="tanh")),
    ("pair for one direction", ValueError, ["activations must be 3 activations;"], dict(activations=(("tanh",) * 3,) * 2)),
    ("unknown activation", ValueError, ["unknown activation 'swish'", "softsign"], dict(activations=("swish", "tanh", "tanh"))),
    ("flag of another type", TypeError, ["input_forget", "True or False", "1"], dict(input_forget=1)),
    ("negative clip", ValueError, ["clip", "at least 0", "-1"], dict(clip=-1)),
    ("clip is not a number", ValueError, ["clip", "nan"], dict(clip=float("nan"))),
    ("clip of text", TypeError, ["clip", "'1'"], dict(clip="1")),
    ("clip of truth", TypeError, ["clip", "True"], dict(clip=True)),
    ("method of a convolution", ValueError, ["method 'gemm'", "step, persistent"], dict(method="gemm")),
    ("too many lengths", ValueError, ["lengths", r"\(3,\)", r"\(2,\)"], dict(lengths=[1, 2, 3])),
    ("length beyond", ValueError, ["lengths", "0 to 5", "1 to 6"], dict(lengths=[1, 6])),
    ("negative length", ValueError, ["lengths", "0 to 5", "-1 to 5"], dict(lengths=[5, -1])),
    ("length of half a step", TypeError, ["lengths must be integers", "2.5"], dict(lengths=[1, 2.5])),
    ("lengths of truth", TypeError, ["lengths must be integers", "True"], dict(lengths=[True, False])),
    ("lengths of two axes", ValueError, ["lengths", r"\(1, 2\)", r"\(2,\)"], dict(lengths=[[1, 2]])),
    ("one length", TypeError, ["lengths", "int"], dict(lengths=5)),
    ("out of another shape", ValueError, ["out", r"\(5, 2, 8\)", r"\(5, 2, 4\)"], dict(out=Ones((5, 2, 8)))),
    ("out of another dtype", TypeError, ["out", "float64", "float32"], dict(out=Ones((5, 2, 4), "float64"))),
    ("too few results", ValueError, ["out", "a sequence of 3", "given 2"], dict(out=[Ones((5, 2, 4)), Ones((1, 2, 4))])),
    ("second result of another shape", ValueError, [r"out\[1\]", r"\(2, 4\)", r"\(1, 2, 4\)"],
     dict(out=[Ones((5, 2, 4)), Ones((2, 4)), Ones((1, 2, 4))])),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changed", REFUSALS)
def test_refusals(target, error, words, changed):
    call = {name: placed(value, target) for name, value in {**LSTM, **changed}.items()}
    cupyconv.lstm(**{name: placed(value, target) for name, value in LSTM.items()})
    assert_refused(target, error, words, cupyconv.lstm, **call)


@pytest.mark.parametrize(
    "words, changed",
    table(
        ("weights of one direction", ["weight_hh", r"\(12, 4\)", r"\(2, 3 \* H, H\)", "bidirectional"], dict(weight_hh=Ones((12, 4)))),
        ("input weight of one", ["weight_ih", r"\(12, 3\)", r"\(2, 12, 3\)", "bidirectional"], dict(weight_ih=Ones((12, 3)))),
        ("bias of one", ["bias_ih", r"\(12,\)", r"\(2, 12\)"], dict(bias_ih=Ones((12,)))),
        ("state of one", ["h0", r"\(1, 2, 4\)", r"\(2, 2, 4\)"], dict(h0=Ones((1, 2, 4)))),
        ("out of one", ["out", r"\(5, 2, 4\)", r"\(5, 2, 8\)"], dict(out=Ones((5, 2, 4)))),
        ("three groups", ["activations", "or a pair"], dict(activations=(("tanh", "tanh"),) * 3)),
    ),
)  # fmt: skip
def test_refusals_of_two_directions(target, words, changed):
    cupyconv.gru(**{name: placed(value, target) for name, value in GRU.items()})
    call = {name: placed(value, target) for name, value in {**GRU, **changed}.items()}
    assert_refused(target, ValueError, words, cupyconv.gru, **call)


@pytest.mark.parametrize(
    "error, words, changed",
    table(
        ("x of a sequence", ValueError, ["x has shape", r"\(5, 2, 3\)", r"\(N, I\)"], dict(x=Ones((5, 2, 3)))),
        ("state of a sequence", ValueError, [r"\bh has shape", r"\(1, 2, 4\)", r"\(2, 4\)"], dict(h=Ones((1, 2, 4)))),
        ("no cell state", TypeError, [r"\bc must be", "NoneType"], dict(c=None)),
        ("cell state of another batch", ValueError, [r"\bc has shape", r"\(3, 4\)", r"\(2, 4\)"], dict(c=Ones((3, 4)))),
        ("one out", ValueError, ["out", "given 1"], dict(out=[Ones((2, 4))])),
    ),
)
def test_refusals_of_a_step(target, error, words, changed):
    step = dict(
        x=Ones((2, 3)), h=Ones((2, 4)), c=Ones((2, 4)), weight_ih=Ones((16, 3)), weight_hh=Ones((16, 4))
    )  # fmt: skip
    call = {name: placed(value, target) for name, value in {**step, **changed}.items()}
    assert_refused(target, error, words, cupyconv.lstm_step, **call)


def test_a_result_may_not_lie_over_an_argument(target):
    x, weight = (target.to_device(np.ones(s, np.float32)) for s in ((5, 2, 4), (4, 4)))
    with pytest.raises(ValueError, match="out overlaps x"):
        cupyconv.rnn(x, weight, weight, out=x)
    h = x[0]
    with pytest.raises(ValueError, match="out overlaps h"):
        cupyconv.rnn_step(x[1], h, weight, weight, out=h)


def test_arrays_of_two_libraries_are_refused():
    class Foreign:
        dtype, shape, ndim = np.dtype(np.float32), (5, 2, 3), 3

    with pytest.raises(TypeError, match="x must be a NumPy or CuPy array"):
        cupyconv.gru(Foreign(), np.ones((12, 3)), np.ones((12, 4)))
    with pytest.raises(TypeError, match="peephole"):
        cupyconv.lstm(np.ones((5, 2, 3)), np.ones((16, 3)), np.ones((16, 4)), peephole=Foreign())


# --- PyTorch ----------------------------------------------------------------------------------------------------


def torch_layer(case: RecurrentCase, layers: int = 1) -> Any:
    import torch

    kinds = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    torch.manual_seed(case.seed)
    return kinds[case.cell](
        case.inputs,
        case.hidden,
        num_layers=layers,
        bidirectional=case.directions == 2,
        dtype=getattr(torch, case.dtype),
    )


def weights_of(module: Any, layer: int, directions: int) -> list[np.ndarray]:
    """Return weight_ih, weight_hh, bias_ih and bias_hh in the layout of this library."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    each = [
        [getattr(module, f"{name}_l{layer}{'_reverse' * d}").detach().numpy() for name in names]
        for d in range(directions)
    ]
    return [np.stack(pair) for pair in zip(*each)] if directions == 2 else each[0]


@needs_torch
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("cell", CELLS)
def test_against_torch(cell, direction, dtype):
    """PyTorch agrees on two layers, with the lengths of a packed sequence."""
    import torch

    case = RecurrentCase(cell=cell, steps=7, batch=4, inputs=5, hidden=6, direction=direction, dtype=dtype)
    module, lengths = torch_layer(case, layers=2), [7, 1, 4, 6]
    x = torch.randn(7, 4, 5, dtype=getattr(torch, dtype))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    with torch.no_grad():
        y_packed, last = module(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(y_packed)
    y, states = x.numpy(), []
    for layer in range(2):
        weights = weights_of(module, layer, case.directions)
        y, state = FUNCTIONS[cell](y, *weights, lengths=lengths, direction=direction)
        states.append(state)
    near = dict(rtol=0, atol=64 * np.finfo(dtype).eps)
    np.testing.assert_allclose(y, expected.numpy(), **near)
    for k, of_torch in enumerate(last if cell == "lstm" else [last]):
        ours = np.concatenate([state[k] if cell == "lstm" else state for state in states])
        np.testing.assert_allclose(ours, of_torch.numpy(), **near)
