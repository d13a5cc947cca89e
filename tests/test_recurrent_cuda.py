"""Recurrent layers on CUDA by either method: values, tiles, chunks, waiting blocks, graphs and plans.

Behaviour that all targets share is tested in test_recurrent.py, with the method "auto".
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from recurrent_cases import FUNCTIONS, RecurrentCase, recurrent_cases
from strategies import share_of_examples
from test_kernels_compile import compile_for_host

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import recurrence as recurrent_cuda
from cupyconv.cuda.plan import recurrent_gradient
from cupyconv.cuda.plan.recurrence import recurrent_tiles
from cupyconv.cuda.run import execution
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import GemmCall, Kernel, KernelLaunch, LaunchLoop, Plan

pytestmark = pytest.mark.host_device

CELLS = ("rnn", "lstm", "gru")
METHODS = ("step", "persistent")


def full_case(cell: str, **changed: Any) -> RecurrentCase:
    """Return a case with everything that a cell can have at once, and sizes that are not whole tiles."""
    optional = ("bias_ih", "bias_hh", "h0", *(("c0", "peephole") if cell == "lstm" else ()))
    case = RecurrentCase(
        cell=cell, steps=4, batch=19, inputs=5, hidden=21, direction="bidirectional", dtype="float32", optional=optional,
        lengths=tuple(n % 5 for n in range(19)), clip=1.5,
    )  # fmt: skip
    return replace(case, **changed)


def assert_right(target, case: RecurrentCase, method: str) -> list[np.ndarray]:
    """Assert that the call's results are right, and return them."""
    arrays = case.arrays()
    actual = case.call(case.views(arrays, target.to_device), method=method)
    expected = case.expected(arrays)
    results = []
    for one, wanted in zip(actual, expected):
        if one is not None:
            results.append(target.to_host(one))
            case.assert_close(results[-1], wanted, expected.largest)
    return results


@pytest.fixture
def choosing(monkeypatch):
    """Return a function that leaves plans one tile to choose; cached calls are dropped before and after."""

    def choose(samples: int) -> None:
        def one(dtype, resident, gpu, allow_tf32):
            tiles = recurrent_tiles(dtype, resident, gpu, allow_tf32)
            return tuple(tile for tile in tiles if resident or tile.samples == samples)

        monkeypatch.setattr(recurrent_cuda, "recurrent_tiles", one)
        forget_calls()

    yield choose
    monkeypatch.undo()
    forget_calls()


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_attribute(cuda_target, method):
    @share_of_examples(0.5)
    @given(case=recurrent_cases(dtypes=("float32",)))
    def check(case):
        arrays = case.arrays()
        out = case.new_out(cuda_target.to_device)
        y, h, c = case.call(case.views(arrays, cuda_target.to_device), out=out, method=method)
        expected = case.expected(arrays)
        for actual, wanted in ((y, expected.y), (h, expected.h), (c, expected.c)):
            if actual is not None:
                case.assert_close(actual, wanted, expected.largest)

    check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_persistent_in_other_dtypes(cuda_target, dtype):
    """The step method is tested in these dtypes in test_recurrent.py."""
    for hidden in (21, 48):
        assert_right(cuda_target, full_case("lstm", dtype=dtype, hidden=hidden), "persistent")


@pytest.mark.parametrize("batch", [3, 18])
@pytest.mark.parametrize("cell", CELLS)
def test_16_bit_states_without_tensor_cores(cuda_target, monkeypatch, cell, batch):
    """Warps sum three gates in shared memory that is not a multiple of their sums."""
    monkeypatch.setattr(cuda_target.device, "model", known_gpu("sm_75"))
    forget_calls()
    try:
        assert_right(cuda_target, full_case(cell, dtype="bfloat16", batch=batch, lengths=None), "persistent")
        kernel = cuda_target.device.log[-1].kernel
        assert kernel.name == "recurrent_persistent" and ("ARITHMETIC", "FMA") in kernel.macros
    finally:
        monkeypatch.undo()
        forget_calls()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("method", METHODS)
def test_states_of_many_blocks(cuda_target, cell, method):
    """States have several blocks along samples and units, and several K-slabs, the last of them partial."""
    assert_right(cuda_target, full_case(cell, batch=35, hidden=138, steps=3, lengths=None, optional=("h0",)), method)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_tiles(cuda_target, choosing, dtype):
    choosing(8)
    case = full_case("lstm", batch=37, hidden=44, dtype=dtype, lengths=tuple(n % 5 for n in range(37)))
    plan = cupyconv.explain(
        cupyconv.lstm, **case.arrays(), lengths=case.lengths, **case.settings, method="step", on="sm_90"
    )
    (loop,) = (step for step in plan.steps if isinstance(step, LaunchLoop))
    assert loop.launches[0].grid == (2, 2, 2)
    assert_right(cuda_target, case, "step")


@pytest.mark.parametrize("method", METHODS)
def test_tf32_where_it_is_allowed(cuda_target, method):
    """Results differ only as products of factors rounded to 11 bits do."""
    case = full_case("lstm", hidden=44, lengths=None)
    views = case.views(case.arrays(), cuda_target.to_device)
    with cupyconv.options(allow_tf32=True):
        plan = cupyconv.explain(cupyconv.lstm, **views, **case.settings, method=method)
        actual = case.call(views, method=method)
    assert "TF32" in str(plan.steps[-1])
    for one, wanted in zip(actual, case.expected(case.arrays())):
        error = np.abs(cuda_target.to_host(one) - wanted).max()
        assert 1e-6 < error < 2**-11 * case.steps * 4, "sums of products below 1, which the gates flatten"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_default_gates_keep_their_digits(cuda_target, dtype):
    """Sigmoid and tanh are right to a few ulp of their own values, near 0 and in saturation, not only to ulp of 1."""
    size = np.concatenate([np.geomspace(1e-30, 1, 700), np.linspace(0.5, 0.6, 500), np.linspace(1, 80, 800)])
    parts, exponents = np.frexp(np.concatenate([size, -size]))
    values = np.ldexp(np.round(parts * 2**11), exponents - 11).astype(dtype)  # few digits: products by 1 are exact
    wide = values.astype(np.float64)
    x, one = cuda_target.to_device(values[:, None]), np.ones((1, 1), dtype)
    h0, h1 = (cuda_target.to_device(np.full((len(values), 1), start, dtype)) for start in (0, 1))
    tanh = cupyconv.rnn_step(x, h0, cuda_target.to_device(one), cuda_target.to_device(0 * one))
    # A gru whose only nonzero gate weight is that of z takes the state 1 to z.
    z = cuda_target.to_device(np.array([[0], [1], [0]], dtype))
    sigmoid = cupyconv.gru_step(x, h1, z, cuda_target.to_device(np.zeros((3, 1), dtype)))
    for actual, expected in ((tanh, np.tanh(wide)), (sigmoid, 1 / (1 + np.exp(-wide)))):
        error = np.abs(cuda_target.to_host(actual)[:, 0] / expected - 1)
        assert error.max() <= 4 * np.finfo(dtype).eps, values[error.argmax()]


def test_16_bit_states_are_not_rounded_between_steps(cuda_target):
    """A state that grows by 2^-9 per step would stay at 1 in eight bits; its two halves on tensor cores keep it."""
    one = np.ones((8, 8), ml_dtypes.bfloat16)
    x = np.zeros((40, 2, 8), ml_dtypes.bfloat16)
    bias = np.full(8, 2**-9, ml_dtypes.bfloat16)
    identity = np.eye(8).astype(ml_dtypes.bfloat16)
    arrays = [cuda_target.to_device(array) for array in (x, one, identity, bias)]
    h0 = cuda_target.to_device(np.ones((1, 2, 8), ml_dtypes.bfloat16))
    for method in METHODS:
        _, h = cupyconv.rnn(*arrays, h0=h0, activation=None, method=method)
        assert (cuda_target.to_host(h).astype(np.float64) == np.array(1 + 40 / 512).astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_overflows_its_16_bits_is_infinite_not_nan(cuda_target, method):
    """A float32 state beyond float16's range, about twice its largest number, goes through a weight of 1."""
    arrays = [np.full((3, 1, 1), 60000), np.ones((1, 1)), np.ones((1, 1))]
    y, _ = cupyconv.rnn(
        *(cuda_target.to_device(a.astype(np.float16)) for a in arrays), activation="relu", method=method
    )
    np.testing.assert_array_equal(cuda_target.to_host(y)[:, 0, 0], np.array([60000, np.inf, np.inf], np.float16))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_on_the_device_are_clamped(cuda_target, method, dtype):
    case = full_case("gru", batch=5, lengths=(4, 0, 4, 2, 0))
    views = case.views(case.arrays(), cuda_target.to_device)
    far = 2**31 - 1 if dtype == np.int32 else 2**62
    given = cuda_target.to_device(np.array([4, 0, far, 2, -far], dtype))
    clamped, expected = (
        cupyconv.gru(**views, lengths=lengths, **case.settings, method=method) for lengths in (given, case.lengths)
    )
    for one, wanted in zip(clamped, expected):
        np.testing.assert_array_equal(cuda_target.to_host(one), cuda_target.to_host(wanted))


def test_one_step_needs_no_projection_and_no_workspace(cuda_target):
    """Cells with one product need neither a projection nor workspace for one step."""
    rng = np.random.default_rng(0)
    for name, gates in (("rnn_step", 1), ("lstm_step", 4), ("gru_step", 3)):
        shapes = [(2, 5), *((2, 7),) * (1 + (gates == 4)), (7 * gates, 5), (7 * gates, 7)]
        arrays = [cuda_target.to_device(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
        plan = cupyconv.explain(getattr(cupyconv, name), *arrays)
        assert [step.kernel.name for step in plan.steps] == ["recurrent_step"] and plan.workspace_bytes == 0


# --- blocks that wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_few_blocks_that_wait(cuda_target, cell):
    """Blocks are so few that a race detector knows all their threads; the gru has two barriers per step."""
    case = full_case(cell, steps=2, batch=3, hidden=10, direction="forward", lengths=None, linear_before_reset=False)
    assert_right(cuda_target, case, "persistent")


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_order_of_blocks_is_free(cuda_target, cell):
    """The bits are the same in any order of blocks and threads; the gru has two barriers per step."""
    case = full_case(cell, linear_before_reset=False)
    device = cuda_target.device
    try:
        bits = set()
        for device.order in ("ascending", "descending", "random"):
            bits.add(tuple(array.tobytes() for array in assert_right(cuda_target, case, "persistent")))
    finally:
        device.order = "random"
    assert len(bits) == 1


def test_blocks_take_many_tiles_of_samples(cuda_target, monkeypatch):
    """On a GPU with eight multiprocessors, each block goes through five tiles of samples per step."""
    case = full_case("lstm", batch=70, lengths=tuple(n % 5 for n in range(70)))
    monkeypatch.setattr(cuda_target.device, "model", replace(known_gpu("sm_90"), multiprocessors=8))
    forget_calls()
    try:
        views = case.views(case.arrays(), cuda_target.to_device)
        plan = cupyconv.explain(cupyconv.lstm, **views, lengths=case.lengths, **case.settings, method="persistent")
        assert plan.steps[-1].grid == (3, 1, 2) and "5 passes per step" in plan.reason
        assert_right(cuda_target, case, "persistent")
    finally:
        monkeypatch.undo()
        forget_calls()


@pytest.fixture(params=[True, False], ids=["asked", "launched"])
def with_room(request, cuda_target, monkeypatch):
    """Return a function that lets few blocks run at once, which the device either reports or shows only at a launch."""
    device = cuda_target.device

    def set_room(blocks: int) -> None:
        for name, value in (("room", blocks), ("shows_room", request.param), ("model", known_gpu("sm_90"))):
            monkeypatch.setattr(device, name, value)
        forget_calls()

    yield set_room
    monkeypatch.undo()
    forget_calls()


def test_fewer_blocks_wait_where_the_device_has_room_for_fewer(cuda_target, with_room):
    """Fewer blocks run if the device has space for fewer; the second call reuses what the first one made."""
    with_room(6)
    case = full_case("lstm", batch=70, lengths=tuple(n % 5 for n in range(70)))
    for _ in range(2):
        cuda_target.device.log.clear()
        assert_right(cuda_target, case, "persistent")
        assert 0 < cuda_target.device.log[-1].grid[1] * 6 <= 6
    views = case.views(case.arrays(), cuda_target.to_device)
    plan = cupyconv.explain(cupyconv.lstm, **views, lengths=case.lengths, **case.settings, method="persistent")
    assert np.prod(plan.steps[-1].grid) <= 6


def test_steps_are_taken_where_waiting_blocks_have_no_room(cuda_target, with_room):
    case = full_case("rnn", steps=40, batch=2, hidden=64, direction="forward", lengths=None)
    views = case.views(case.arrays(), cuda_target.to_device)

    def plan() -> Plan:
        return cupyconv.explain(cupyconv.rnn, **views, **case.settings)

    assert plan().method == "persistent"
    with_room(1)
    assert_right(cuda_target, case, "auto")
    assert cuda_target.device.log[-1].kernel.name == "recurrent_step"
    assert plan().method == "step" and "blocks of 8 units must run at the same time, the GPU has room for" in str(
        plan()
    )


def test_a_named_method_that_has_no_room_is_refused(cuda_target, with_room):
    with_room(1)
    with pytest.raises(
        ValueError, match=r"'persistent' does not apply: .* blocks .* at the same time, the GPU has room for \d"
    ):
        assert_right(cuda_target, full_case("gru"), "persistent")


# --- memory and graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cell", CELLS)
def test_chunks_of_steps(cuda_target, method, cell):
    device = cuda_target.device
    case = full_case(cell, steps=11, batch=6, lengths=(11, 0, 5, 10, 3, 6), linear_before_reset=False)
    views = case.views(case.arrays(), cuda_target.to_device)
    counts = []
    limit = None
    for _ in range(2):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(FUNCTIONS[cell], **views, lengths=case.lengths, **case.settings, method=method)
            assert limit is None or plan.workspace_bytes <= limit
            before = device.peak_bytes = device.allocated_bytes
            results = case.call(views, method=method)
            taken = device.peak_bytes - before
        assert taken <= plan.workspace_bytes + sum(one.nbytes for one in results if one is not None) + 256  # lengths
        expected = case.expected(case.arrays())
        for one, wanted in zip(results, expected):
            if one is not None:
                case.assert_close(one, wanted, expected.largest)
        assert not any(isinstance(step, GemmCall) for step in plan.steps)
        counts.append(str([step.shape_of_work for step in plan.steps]).count(f"recurrent_{method}"))
        sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
        limit = plan.workspace_bytes - sizes["gates"] // 2
    assert counts[0] < counts[1]


def test_a_limit_below_one_step_is_refused(cuda_target):
    case = full_case("lstm")
    with (
        cupyconv.options(workspace_limit=10_000),
        pytest.raises(ValueError, match=r"one step does not fit into 10,000 bytes"),
    ):
        case.call(case.views(case.arrays(), cuda_target.to_device), method="step")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_named_method_can_be_captured(cuda_target, method, cell):
    device, case = cuda_target.device, full_case(cell, lengths=None)
    views = case.views(case.arrays(), cuda_target.to_device)
    outs = [
        cuda_target.to_device(np.zeros_like(one.get())) for one in case.call(views, method=method) if one is not None
    ]
    device.capturing, device.fail_allocations_over = True, 0
    try:
        case.call(views, method=method, out=outs if len(outs) == 2 else (outs[0], tuple(outs[1:])))
    finally:
        device.capturing, device.fail_allocations_over = False, None
    expected = case.expected(case.arrays())
    for one, wanted in zip(outs, expected):
        case.assert_close(one, wanted, expected.largest)


def test_lengths_of_the_host_cannot_be_captured(cuda_target):
    case = full_case("gru", batch=5, lengths=(4, 0, 4, 2, 0))
    views = case.views(case.arrays(), cuda_target.to_device)
    given = cuda_target.to_device(np.array(case.lengths))
    cuda_target.device.capturing = True
    try:
        with pytest.raises(RuntimeError, match="give lengths as a CuPy array"):
            cupyconv.gru(**views, lengths=list(case.lengths), **case.settings, method="step")
        cupyconv.gru(**views, lengths=given, **case.settings, method="step")
    finally:
        cuda_target.device.capturing = False


# --- plans ------------------------------------------------------------------------------------------------------


def plan_of(cell: str, *, on: str = "sm_90", dtype: Any = np.float32, sizes: tuple[int, ...], **settings: Any) -> Plan:
    """Return the plan for sizes (T, N, I, H); it needs no GPU and no array of that size."""
    steps, batch, inputs, hidden = sizes
    lead = (2,) if settings.get("direction") == "bidirectional" else ()
    rows = {"rnn": 1, "lstm": 4, "gru": 3}[cell] * hidden
    shapes = ((steps, batch, inputs), (*lead, rows, inputs), (*lead, rows, hidden))
    arrays = [
        np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, byte_strides(shape, dtype)) for shape in shapes
    ]
    return cupyconv.explain(FUNCTIONS[cell], *arrays, on=on, **settings)


def byte_strides(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) * np.dtype(dtype).itemsize for i in range(len(shape)))


def test_launches_do_not_depend_on_the_batch_and_projections_not_on_the_steps():
    def kinds(steps: int, batch: int) -> list[str]:
        plan = plan_of("lstm", sizes=(steps, batch, 64, 96), method="step")
        assert not any(isinstance(step, GemmCall) for step in plan.steps)
        return [type(step).__name__ for step in plan.steps]

    assert kinds(125, 256) == kinds(50, 512) == kinds(500, 64) == ["KernelLaunch", "KernelLaunch", "LaunchLoop"]
    # Small tiles read the weight in place.
    assert kinds(50, 64) == kinds(50, 32) == kinds(25, 64) == ["KernelLaunch", "LaunchLoop"]


def test_a_persistent_plan():
    plan = plan_of("lstm", sizes=(50, 64, 128, 256), method="persistent")
    launch = plan.steps[-1]
    assert isinstance(launch, KernelLaunch) and launch.cooperative and launch.kernel.name == "recurrent_persistent"
    assert sum(isinstance(step, KernelLaunch) and step.cooperative for step in plan.steps) == 1
    assert (
        np.prod(launch.grid) <= 132
        and "cooperative" in str(plan)
        and not any(isinstance(step, LaunchLoop) for step in plan.steps)
    )
    assert [name for name, _ in plan.rejected] == ["step"]


def test_a_plan_of_steps():
    plan = plan_of("gru", sizes=(50, 64, 128, 256), method="step", linear_before_reset=False)
    loop = plan.steps[-1]
    assert isinstance(loop, LaunchLoop) and loop.times == 50
    assert [dict(launch.kernel.macros)["GATES"] for launch in loop.launches] == ["2", "1"]
    assert "loop     50 x, step = 0 ... 49" in str(plan) and str(plan).count("recurrent_step") == 2


@pytest.mark.parametrize(
    "words, settings",
    [
        (
            r"blocks of 8 units must run at the same time, the GPU has 132",
            dict(sizes=(9, 4, 64, 1200), dtype=np.float16),
        ),
        (
            r"a block .* needs [\d,]+ bytes of shared memory, the GPU has 65,536",
            dict(sizes=(9, 4, 64, 256), dtype=np.float64, on="sm_75"),
        ),
    ],
)
def test_why_a_weight_does_not_stay(words, settings):
    with pytest.raises(ValueError, match=f"method 'persistent' does not apply: .*{words}"):
        plan_of("lstm", method="persistent", **settings)
    assert dict(plan_of("lstm", method="auto", **settings).rejected).keys() == {"persistent"}


def test_float32_is_multiplied_by_tensor_cores_but_for_few_samples():
    """Products are three of TF32, which keep the digits, one if TF32 is allowed, and none without the instructions."""
    found = {}
    for arch, batch, tf32 in (("sm_90", 2, False), ("sm_90", 128, False), ("sm_90", 128, True), ("sm_75", 128, False)):
        with cupyconv.options(allow_tf32=tf32):
            plan = plan_of("lstm", sizes=(9, batch, 64, 192), dtype=np.float32, on=arch, method="persistent")
        macros = dict(plan.steps[-1].kernel.macros)
        found[arch, batch, tf32] = macros["ARITHMETIC"], macros["SAMPLES"]
    assert list(found.values()) == [("FMA", "1"), ("TF32X3", "4"), ("TF32", "4"), ("FMA", "4")]


def test_where_there_are_no_matrix_instructions_for_a_type():
    """For bfloat16 on sm_75, CUDA cores step and cuBLAS projects, which `explain` says no graph captures."""
    plan = plan_of("lstm", sizes=(9, 4, 64, 128), dtype=ml_dtypes.bfloat16, on="sm_75", method="step")
    assert dict(plan.steps[-1].launches[0].kernel.macros)["ARITHMETIC"] == "FMA"
    assert any(
        "sm_75 has no matrix instructions for bfloat16: cuBLAS projects the inputs, so CUDA graphs cannot" in note
        for note in plan.notes
    )


def test_a_loop_is_packed_once(cuda_target, monkeypatch):
    """A loop of 40 steps packs as many parameter structs as a loop of 4."""
    packed: list[int] = []
    original = execution.PackedParameters

    def counting(*arguments: Any) -> Any:
        packed.append(1)
        return original(*arguments)

    monkeypatch.setattr(execution, "PackedParameters", counting)
    counts = []
    for steps in (4, 40):
        packed.clear()
        assert_right(cuda_target, full_case("rnn", steps=steps, batch=2, hidden=3, lengths=None), "step")
        counts.append(len(packed))
    assert counts[0] == counts[1] > 0


# --- the host's side of the kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_shared_memory_is_what_the_kernel_lays_out(resident):
    """`sizeof` covers stages and partial sums; resident rows are stored behind them."""
    name = "recurrent_persistent" if resident else "recurrent_step"
    tiles = {
        tile: None
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for arch in ("sm_75", "sm_90")
        for tf32 in (False, True)
        for tile in recurrent_tiles(dtype, resident, known_gpu(arch), tf32)
    }
    hidden = 100
    for tile, gates in product(tiles, (1, 4)):
        shared = tile.shared_bytes(0, gates, hidden)
        assertions = [
            f"static_assert(sizeof(Tile::Shared) == {shared});",
            f"static_assert(Tile::K == {tile.k_block} && Tile::ROWS == {tile.rows} && Tile::UNITS == {tile.units});",
            f"static_assert(Tile::THREADS == {recurrent_cuda.THREADS});",
        ]
        if resident:
            columns = -(-hidden // tile.k_block) * tile.k_block
            rows = tile.shared_bytes(gates, gates, hidden) - shared
            assert rows == gates * tile.units * (columns * ITEMSIZE[tile.dtype] + 16)
            assertions.append(f"static_assert(APART == {recurrent_cuda.COUNTERS_APART});")
        check = compile_for_host(Kernel(name, (*tile.macros, ("GATES", str(gates)))), assertions)
        assert check.returncode == 0, f"{tile}: {check.stderr}"


@pytest.mark.parametrize(
    ("dtype", "arch"), [("float16", "sm_75"), ("bfloat16", "sm_90"), ("float32", "sm_90"), ("float64", "sm_90")]
)
@pytest.mark.parametrize("cell", CELLS)
def test_shared_memory_of_the_gradient_is_what_the_kernel_lays_out(cell, dtype, arch):
    """`sizeof` covers parts of the state's gradient and gradients of gates; rows of the weight are behind them."""
    hidden = 100
    geometry = SimpleNamespace(hidden=hidden, gates={"rnn": 1, "lstm": 4, "gru": 3}[cell])
    rows = geometry.gates * recurrent_gradient.UNITS
    weight = rows * (-(-hidden // recurrent_gradient.UNITS) | 1) * recurrent_gradient.UNITS * ITEMSIZE[dtype]
    shared = recurrent_gradient.shared_bytes(dtype, geometry) - weight
    arithmetic = recurrent_gradient.gradient_arithmetic(dtype, known_gpu(arch))
    macros = (("DTYPE", dtype), ("CELL", recurrent_gradient.CELLS[cell]), ("ARITHMETIC", arithmetic))
    check = compile_for_host(
        Kernel("recurrent_gradient_persistent", macros), [f"static_assert(sizeof(Shared) == {shared});"]
    )
    assert check.returncode == 0, check.stderr
