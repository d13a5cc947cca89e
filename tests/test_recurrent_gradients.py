"""Gradients of recurrent layers against the tape of `reference_recurrent_gradients` and PyTorch, and their promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference_recurrent
from hypothesis import given
from hypothesis import strategies as st
from peak_memory import peak_bytes
from reference_recurrent_gradients import Gradients, recurrent_gradients
from strategies import share_of_examples
from targets import Target, numpy_target
from tolerance import finfo, rounded, widened

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.problem.machine import known_gpu

GATES = {"rnn": 1, "lstm": 4, "gru": 3}
COUNTS = {"rnn": 1, "lstm": 3, "gru": 2}
DEFAULTS = {"rnn": ("tanh",), "lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh")}
DIRECTIONS = ("forward", "reverse", "bidirectional")
#: Smooth activations, activations with kinks, with parameters, those of ONNX only, and none.
ACTIVATIONS = (
    "sigmoid", "tanh", "relu", ("leaky_relu", 0.2), "hard_sigmoid", ("elu", 0.7), "softplus", "softsign",
    ("scaled_tanh", 0.8, 1.2), ("affine", 0.5, 0.1), ("thresholded_relu", 0.3), ("clip", -0.7, 0.9), None,
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A whole problem; its arrays are drawn from `seed`."""

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
        """Return the arguments by name, without absent ones.  x is NaN beyond a length, because nothing may read it."""
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
        """Return gradients of the results, by the names of the pullback's arguments."""
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
        """Return the settings of the public function."""
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
    return partial(cupyconv.vjp, {"rnn": cupyconv.rnn, "lstm": cupyconv.lstm, "gru": cupyconv.gru}[layer.cell])


def computed(target: Target, layer: Layer) -> tuple[Any, Any]:
    """Return (results, pullback) of the layer on a target."""
    arrays = {name: on_device(target, array) for name, array in layer.arguments().items()}
    return vjp_of(layer)(**arrays, **layer.settings())


def on_device(target: Target, array: np.ndarray) -> Any:
    """Copy an array to the target with its strides, so that a batch-first view stays one."""
    if array.ndim == 3 and not array.flags.c_contiguous:
        return target.to_device(np.ascontiguousarray(array.swapaxes(0, 1))).swapaxes(0, 1)
    return target.to_device(array)


def gradients_of(target: Target, layer: Layer) -> Any:
    _, pullback = computed(target, layer)
    return pullback(**{name: target.to_device(array) for name, array in layer.arriving().items()})


def assert_right(target: Target, layer: Layer, found: Any) -> None:
    """Assert that every gradient has its argument's shape and dtype, and is close to the reference's."""
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
    """Return the error per largest element: few steps amplify roundings, and a 16-bit y is read back rounded."""
    return {8: 1e-12, 4: 1e-5, 2: 8 * float(finfo(np.dtype(layer.dtype)).eps)}[np.dtype(layer.dtype).itemsize]


# --- the oracle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", GATES)
def test_the_oracle_agrees_with_finite_differences(cell):
    """The tape agrees with finite differences of the forward reference, which shares no code with it."""
    layer = Layer(cell, "bidirectional", lengths=(4, 0, 2), clip=0.8, present=frozenset(Gradients._fields),
                  linear_before_reset=cell != "gru", input_forget=True)  # fmt: skip
    arguments = {name: np.nan_to_num(array) for name, array in layer.arguments().items()}
    grads = layer.arriving()

    choices = {"lstm": {"input_forget": True}, "gru": {"linear_before_reset": False}}.get(cell, {})

    def loss(changed: dict[str, np.ndarray]) -> float:
        forward = reference_recurrent.recurrent(
            cell, **changed, direction=layer.direction, lengths=layer.lengths, clip=layer.clip, **choices
        )
        return sum(float((getattr(forward, name[-1]) * grad).sum()) for name, grad in grads.items())

    _, expected = layer.expected()
    rng, step = np.random.default_rng(5), 1e-6
    for name, array in arguments.items():
        for at in rng.permutation(list(np.ndindex(array.shape)))[:6]:
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


@share_of_examples(0.5)
@given(layer=layers(), limit=st.sampled_from([None, None, 6000, 20000]))
def test_gradients_are_the_oracles(target, layer, limit):
    if target.name != "numpy":  # each dtype compiles another kernel for each cell
        layer = replace(layer, dtype=np.float64)
    with cupyconv.options(workspace_limit=limit):
        try:
            found = gradients_of(target, layer)
        except ValueError as refusal:
            assert limit and "workspace" in str(refusal)
            return
    assert_right(target, layer, found)


@pytest.mark.parametrize("reset_first", [False, True])
@pytest.mark.parametrize("cell", GATES)
def test_several_tiles_and_runs(target, cell, reset_first):
    """Samples and units exceed one block, steps exceed the workspace, and lengths are not sorted."""
    layer = layer_of_many_blocks(cell, reset_first=reset_first)
    _, pullback = computed(target, layer)
    grads = {name: target.to_device(array) for name, array in layer.arriving().items()}
    found = pullback(**grads)
    assert_right(target, layer, found)
    small = cell == "rnn"
    limits = [20_000 if small else 50_000]
    if target.name == "numpy":  # one step of all samples, then of half of them
        limits = [40_000 if small else 100_000, 20_000 if small else 60_000]
    for limit in limits:
        with cupyconv.options(workspace_limit=limit):
            in_runs = pullback(**grads)
        assert_right(target, layer, in_runs)
        assert not np.array_equal(target.to_host(in_runs.weight_hh), target.to_host(found.weight_hh)), "all in one run"
    with cupyconv.options(workspace_limit=1500), pytest.raises(ValueError, match=r"one step .*needs .* limit is 1,500"):
        pullback(**grads)


@pytest.fixture
def on_gpu(cuda_target, monkeypatch):
    """Return a function that replaces the device by another GPU with space for so many blocks at once."""

    def change(arch: str, room: int) -> None:
        monkeypatch.setattr(cuda_target.device, "model", replace(known_gpu(arch), room=room))
        forget_calls()

    yield change
    monkeypatch.undo()
    forget_calls()


def layer_of_many_blocks(cell: str, *, reset_first: bool = False, samples: int = 18, **changed: Any) -> Layer:
    """Return a layer with more samples and units than one block has, and lengths that are not sorted."""
    lengths = (5, 0, 3, 1, 5, 2) * (samples // 6)
    return Layer(cell, "bidirectional", (5, samples, 3, 20), frozenset(Gradients._fields), clip=1.5,
                 lengths=lengths, linear_before_reset=not reset_first, **changed)  # fmt: skip


def kernels_of_gradients(target: Target, layer: Layer) -> list[Any]:
    """Assert that a pullback's gradients are right, and return its launches that go back through time."""
    _, pullback = computed(target, layer)
    grads = {name: target.to_device(array) for name, array in layer.arriving().items()}
    target.device.log.clear()
    assert_right(target, layer, pullback(**grads))
    launches = [record for record in target.device.log if hasattr(record, "kernel")]
    return [launch for launch in launches if launch.kernel.name.startswith("recurrent_gradient")]


@pytest.mark.parametrize("reset_first", [False, True])
@pytest.mark.parametrize("cell", GATES)
def test_blocks_that_wait_take_many_tiles_of_samples(cuda_target, on_gpu, cell, reset_first):
    """One row of blocks fits for both directions, and each block goes through three tiles of samples per step."""
    on_gpu("sm_90", 7)
    dtype = {"rnn": ml_dtypes.bfloat16, "lstm": np.float32, "gru": np.float64}[cell]
    (launch,) = kernels_of_gradients(
        cuda_target, layer_of_many_blocks(cell, reset_first=reset_first, samples=42, dtype=dtype)
    )
    assert launch.kernel.name == "recurrent_gradient_persistent" and launch.grid == (3, 1, 2)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_few_blocks_that_wait(cuda_target, cell):
    """Blocks are so few that a race detector knows all their threads; the gru has two barriers per step."""
    sizes = 3, 3, 2, 10
    layer = Layer(cell, "forward", sizes, frozenset(Gradients._fields), dtype=np.float32, linear_before_reset=False)
    (launch,) = kernels_of_gradients(cuda_target, layer)
    assert launch.kernel.name == "recurrent_gradient_persistent" and launch.grid == (2, 1, 1)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_blocks_that_wait_without_tensor_cores(cuda_target, on_gpu, dtype):
    on_gpu("sm_75", 40)
    layer = Layer("gru", "forward", (4, 18, 2, 20), frozenset(Gradients._fields), dtype=dtype)
    (launch,) = kernels_of_gradients(cuda_target, layer)
    assert launch.kernel.name == "recurrent_gradient_persistent" and ("ARITHMETIC", "FMA") in launch.kernel.macros


@pytest.mark.parametrize("reset_first", [False, True])
def test_the_order_of_blocks_is_free(cuda_target, reset_first):
    """The bits are the same in any order of blocks and threads, because partial sums are added in block order."""
    layer, device, bits = (
        layer_of_many_blocks("gru", reset_first=reset_first, dtype=np.float32),
        cuda_target.device,
        set(),
    )
    try:
        for device.order in ("ascending", "descending", "random"):
            found = gradients_of(cuda_target, layer)
            bits.add(tuple(cuda_target.to_host(each).tobytes() for each in found if each is not None))
    finally:
        device.order = "random"
    assert len(bits) == 1


def gradient_of_h0(target: Target, weight: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Return h0's gradient through an rnn without activation: grad_y of all steps times powers of the weight."""
    steps, samples, hidden = grad.shape
    x, weight_ih = np.zeros((steps, samples, 1), grad.dtype), np.zeros((hidden, 1), grad.dtype)
    h0 = np.zeros((1, samples, hidden), np.float32)
    arrays = {"x": x, "weight_ih": weight_ih, "weight_hh": weight, "h0": h0}
    on_target = {name: target.to_device(array) for name, array in arrays.items()}
    _, pullback = cupyconv.vjp(cupyconv.rnn, **on_target, activation=None)
    return target.to_host(pullback(target.to_device(grad)).h0)[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_whole_numbers_are_exact_where_blocks_wait(cuda_target, dtype):
    """Integers that float32 holds stay exact, although TF32 alone would lose digits of them."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-2, 3, (20, 20)).astype(dtype)
    grad = rng.integers(-2000, 2001, (3, 18, 20)).astype(dtype)
    expected = np.zeros((18, 20))
    for arriving in grad[::-1]:
        expected = (expected + arriving) @ weight.astype(float)
    assert 2**14 < np.abs(expected).max() < 2**24
    assert np.array_equal(gradient_of_h0(cuda_target, weight, grad), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("which", ["weight", "grad"])
def test_what_is_not_finite_goes_where_it_belongs(cuda_target, which, dtype):
    """An infinite gradient or weight on tensor cores makes no other number NaN."""
    rng = np.random.default_rng(1)
    weight, grad = (rng.integers(1, 4, shape).astype(dtype) for shape in ((20, 20), (2, 3, 20)))
    (weight if which == "weight" else grad[1])[1, 7] = np.inf
    expected = (grad[1].astype(float) @ weight.astype(float) + grad[0]) @ weight.astype(float)
    assert np.array_equal(gradient_of_h0(cuda_target, weight, grad), expected)


@pytest.mark.parametrize("reset_first", [False, True])
@pytest.mark.parametrize("cell", GATES)
def test_a_launch_for_each_step(cuda_target, on_gpu, cell, reset_first):
    """Only one block fits at a time, so every step is a launch, with the whole workspace and in runs."""
    on_gpu("sm_90", 1)
    layer = layer_of_many_blocks(cell, reset_first=reset_first)
    _, pullback = computed(cuda_target, layer)
    grads = {name: cuda_target.to_device(array) for name, array in layer.arriving().items()}
    for limit in (None, 20_000 if cell == "rnn" else 50_000):
        cuda_target.device.log.clear()
        with cupyconv.options(workspace_limit=limit):
            assert_right(cuda_target, layer, pullback(**grads))
        names = [record.kernel.name for record in cuda_target.device.log if hasattr(record, "kernel")]
        turns = 2 if cell == "gru" and reset_first else 1
        assert names.count("recurrent_gradient") >= 6 * turns * (1 if limit is None else 2)


@pytest.mark.parametrize("hidden", [20, 3])
@pytest.mark.parametrize("activations", [None, (("sigmoid", "tanh", "relu"),)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_rows_of_any_length(cuda_target, dtype, activations, hidden):
    """Rows are whole 16-byte vectors or not, activations are the default or given, and products have several slabs."""
    layer = Layer(
        "lstm", "forward", (3, 17, 2, hidden), frozenset(Gradients._fields), dtype=dtype, activations=activations
    )
    assert_right(cuda_target, layer, gradients_of(cuda_target, layer))


@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_many_steps_of_doubled_gates(direction, clip):
    """Gradients are right if the forward layer has its gates in another order."""
    layer = Layer("lstm", direction, sizes=(40, 3, 2, 3), lengths=(40, 17, 0), clip=clip, input_forget=clip is None)
    assert_right(numpy_target(), layer, gradients_of(numpy_target(), layer))


@pytest.mark.parametrize(("cell", "dtype"), [("lstm", np.float32), ("gru", np.float16), ("rnn", ml_dtypes.bfloat16)])
def test_narrow_dtypes(target, cell, dtype):
    layer = Layer(cell, "reverse", (4, 3, 2, 5), frozenset(Gradients._fields), dtype=dtype, lengths=(4, 1, 3))
    assert_right(target, layer, gradients_of(target, layer))


# --- what a pullback promises -------------------------------------------------------------------------------------

EVERYTHING = Layer(present=frozenset(Gradients._fields), lengths=(4, 0, 2), direction="bidirectional")


@pytest.mark.parametrize("cell", GATES)
def test_a_pullback_may_be_called_again(target, cell):
    """The bits are the same in every call, whichever way the arguments are checked."""
    layer = replace(EVERYTHING, cell=cell)
    _, pullback = computed(target, layer)
    grads = {name: target.to_device(array) for name, array in layer.arriving().items()}
    first = pullback(**grads)
    forget_calls()
    again, anew = pullback(**grads), gradients_of(target, layer)
    for one, two, three in zip(first, again, anew):
        if one is not None:
            assert one is not two
            assert target.to_host(one).tobytes() == target.to_host(two).tobytes() == target.to_host(three).tobytes()


@pytest.mark.parametrize("cell", GATES)
def test_gradients_have_memory_of_their_own(target, cell):
    found = gradients_of(target, replace(EVERYTHING, cell=cell, direction="forward"))
    arrays = [target.to_host(array) if target.name == "gpu" else array for array in found if array is not None]
    for i, one in enumerate(arrays):
        assert not any(np.shares_memory(one, other) for other in arrays[i + 1 :])


def test_no_gradient_of_a_result_stands_for_zeros(target):
    _, pullback = computed(target, EVERYTHING)
    for gradient in pullback():
        assert not target.to_host(gradient).any()
    zeros = {name: target.to_device(np.zeros_like(array)) for name, array in EVERYTHING.arriving().items()}
    only_h = {"grad_h": target.to_device(EVERYTHING.arriving()["grad_h"])}
    for one, two in zip(pullback(**{**zeros, **only_h}), pullback(**only_h)):
        assert np.array_equal(target.to_host(one), target.to_host(two))


def test_each_gradient_has_its_arguments_dtype(target):
    layer = replace(EVERYTHING, cell="gru", direction="forward")
    arrays = layer.arguments()
    dtypes = {"x": np.float32, "weight_hh": np.float64, "bias_ih": np.float32, "h0": np.float16}
    arrays = {name: array.astype(dtypes.get(name, array.dtype)) for name, array in arrays.items()}
    _, pullback = cupyconv.vjp(
        cupyconv.gru, **{name: target.to_device(a) for name, a in arrays.items()}, lengths=[4, 0, 2]
    )
    grads = {name: target.to_device(array.astype(np.float32)) for name, array in layer.arriving().items()}
    found = pullback(**grads)
    for name, array in arrays.items():
        assert getattr(found, name).dtype == array.dtype, name


def test_gradients_beyond_a_length_are_zeros(target):
    found = gradients_of(target, EVERYTHING)
    x = target.to_host(found.x)
    for n, length in enumerate(EVERYTHING.lengths):
        assert (x[length:, n] == 0).all() and not np.signbit(x[length:, n]).any()
        assert (x[:length, n] != 0).all()


def test_lengths_on_the_device_are_brought_inside(cuda_target):
    """Nothing reads lengths on the device before the kernels, which clamp them."""
    layer = replace(EVERYTHING, lengths=(4, 0, 2))
    arrays = {name: cuda_target.to_device(np.nan_to_num(array)) for name, array in layer.arguments().items()}
    grads = {name: cuda_target.to_device(array) for name, array in layer.arriving().items()}
    settings = {**layer.settings(), "lengths": None}
    for lengths in (np.array([9, -3, 2], np.int32), np.array([[4, 7], [-1, 7], [2, 7]], np.int64)[:, 0]):
        on_gpu = cuda_target.to_device(np.stack([lengths, lengths], 1))[:, 0]
        _, pullback = cupyconv.vjp(cupyconv.lstm, **arrays, **{**settings, "lengths": on_gpu})
        assert_right(cuda_target, layer, pullback(**grads))


@pytest.mark.parametrize("cell", GATES)
def test_a_wrong_gradient_is_refused(target, cell):
    layer = replace(EVERYTHING, cell=cell)
    _, pullback = computed(target, layer)
    for name, array in layer.arriving().items():
        wrong = target.to_device(np.zeros((*array.shape[:-1], array.shape[-1] + 1)))
        with pytest.raises(ValueError, match=rf"{name} has shape \({wrong.shape[0]}, .*needed \({array.shape[0]}, "):
            pullback(**{name: wrong})
        with pytest.raises(TypeError, match=f"{name} is complex128"):
            pullback(**{name: target.to_device(array.astype(complex))})
        with pytest.raises(TypeError, match=f"{name} has dtype int64"):
            pullback(**{name: target.to_device(array.astype(int))})
        with pytest.raises(TypeError, match=f"{name} "):
            pullback(**{name: array.tolist()})


def test_there_is_no_cell_state_to_take_back_of_others():
    _, pullback = computed(numpy_target(), replace(EVERYTHING, cell="gru"))
    with pytest.raises(TypeError, match="grad_c"):
        pullback(grad_c=np.zeros((2, 3, 3)))


def test_arrays_of_another_library_are_refused(cuda_target):
    _, pullback = computed(cuda_target, EVERYTHING)
    with pytest.raises(TypeError, match="grad_y belongs to another library"):
        pullback(EVERYTHING.arriving()["grad_y"])


@pytest.mark.parametrize("method", ["step", "persistent"])
@pytest.mark.parametrize("cell", GATES)
def test_every_forward_method_keeps_what_a_gradient_needs(cuda_target, cell, method):
    layer = replace(EVERYTHING, cell=cell)
    arrays = {name: cuda_target.to_device(array) for name, array in layer.arguments().items()}
    _, pullback = vjp_of(layer)(**arrays, **layer.settings(), method=method)
    found = pullback(**{name: cuda_target.to_device(array) for name, array in layer.arriving().items()})
    assert_right(cuda_target, layer, found)


def test_a_failed_allocation_is_tried_with_shorter_runs(cuda_target):
    layer = Layer("lstm", sizes=(12, 6, 3, 20), present=frozenset(Gradients._fields))
    _, pullback = computed(cuda_target, layer)
    grads = {name: cuda_target.to_device(array) for name, array in layer.arriving().items()}
    device = cuda_target.device
    device.fail_allocations_over = 5 * 6 * 4 * 20 * 8  # the gates' gradients of five steps
    try:
        found = pullback(**grads)
    finally:
        device.fail_allocations_over = None
    assert_right(cuda_target, layer, found)


# --- what is run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", GATES)
def test_launches_do_not_depend_on_the_batch(cuda_target, cell):
    """One launch serves all steps and both directions, after the one that clears its counters; then come products."""
    kinds = []
    for samples in (2, 20):
        layer = Layer(cell, "bidirectional", (4, samples, 3, 3), linear_before_reset=False)
        _, pullback = computed(cuda_target, layer)
        grad = cuda_target.to_device(layer.arriving()["grad_y"])
        cuda_target.device.log.clear()
        pullback(grad)
        names = [record.kernel.name if hasattr(record, "kernel") else "gemm" for record in cuda_target.device.log]
        kernel = "recurrent_gradient_persistent"
        assert names[:2] == ["epilogue", kernel] and kernel not in names[2:]
        kinds.append(names.count("gemm"))
    assert kinds[0] == kinds[1] == 2 * (4 if cell == "gru" else 3)


def test_workspace_is_what_the_plan_says():
    """NumPy's loop keeps to the workspace, temporaries of activations included."""
    layer = Layer("lstm", "bidirectional", (40, 16, 24, 32), frozenset(Gradients._fields), lengths=(40, 30) * 8)
    _, pullback = computed(numpy_target(), layer)
    grads = layer.arriving()
    for limit in (600_000, 4_000_000):
        with cupyconv.options(workspace_limit=limit):
            found = pullback(**grads)
            results = sum(gradient.nbytes for gradient in found)
            peak = peak_bytes(lambda: pullback(**grads))
        assert peak <= limit + results + results // 4 + 50_000, (peak, limit, results)


# --- against PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", GATES)
def test_torch_agrees(cell, bidirectional, packed):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer = Layer(cell, "bidirectional" if bidirectional else "forward", (6, 4, 3, 5), seed=3,
                  lengths=(6, 2, 5, 1) if packed else None)  # fmt: skip
    arrays = {name: np.nan_to_num(array) for name, array in layer.arguments().items()}
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    module = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](3, 5, bidirectional=bidirectional)
    names = [name for name in arrays if name.startswith(("weight", "bias"))]
    parameters = {}
    for d, suffix in enumerate(("", "_reverse")[: layer.directions]):
        for name in names:
            parameters[f"{name}_l0{suffix}"] = tensors[name][d] if bidirectional else tensors[name]
    state = (tensors["h0"], tensors["c0"]) if cell == "lstm" else tensors["h0"]
    x = tensors["x"]
    if packed:
        x = torch.nn.utils.rnn.pack_padded_sequence(x, layer.lengths, enforce_sorted=False)
    y, last = torch.func.functional_call(module.double(), parameters, (x, state))
    if packed:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
    last = last if cell == "lstm" else (last,)
    grads = layer.arriving()
    total = sum((one * torch.tensor(grad)).sum() for one, grad in zip((y, *last), grads.values()))
    total.backward()
    found = gradients_of(numpy_target(), layer)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(getattr(found, name), tensor.grad.numpy(), rtol=0, atol=1e-12, err_msg=name)
