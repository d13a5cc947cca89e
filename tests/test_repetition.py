"""A call like an earlier one gives what a first call would give, refusals included, and does no work twice.

The tests compare a *fresh* call, made after all caches are cleared, with a *warm* one, made while all calls of the
sequence are cached.  If a cache key omits something, a warm call returns the result of another call.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ConvCase, conv_cases, share_of_examples
from targets import Target

import cupyconv
from cupyconv.call import dispatch
from cupyconv.call import operation as repetition
from cupyconv.call.operation import Operation, bound, forget_calls
from cupyconv.cuda.run import CudaBackend
from cupyconv.cuda.run import backend as cuda_run_backend
from cupyconv.cuda.run.parameters import PackedParameters
from cupyconv.numpy.backend import NumpyBackend
from cupyconv.ops import conv as conv_operation
from cupyconv.ops.conv import CONV, check_conv, unpack_prologue
from cupyconv.problem.plan import GemmCall, KernelLaunch
from cupyconv.problem.problems import UnlikeItsModel
from tests.benchmarks.host_time import NullArray, NullDevice, cuda_calls
from tests.host_device import GemmRecord, LaunchRecord

Outcome = tuple[Any, ...]


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    forget_calls()
    yield
    forget_calls()


def outcome(target: Target, call: Callable[[], Any]) -> Outcome:
    """Return all that a caller sees of a call's result, or of its refusal."""
    try:
        y = call()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    return y.dtype.str, tuple(y.shape), tuple(y.strides), np.ascontiguousarray(target.to_host(y)).tobytes()


def assert_warm_is_fresh(target: Target, calls: list[Callable[[], Any]]) -> list[Outcome]:
    """Assert that every call has the same outcome whichever others are cached; return the outcomes."""
    fresh = []
    for call in calls:
        forget_calls()
        fresh.append(outcome(target, call))
    forget_calls()
    for call in calls * 2:
        outcome(target, call)
    assert [outcome(target, call) for call in calls] == fresh
    return fresh


# --- every kind of argument -------------------------------------------------------------------------------------


def case_calls(target: Target, case: ConvCase, **extra: Any) -> list[Callable[[], Any]]:
    """Return the case's call, and calls that each differ from it in one thing, some of them invalid."""
    views = case.views(case.arrays(), target.to_device, target.xp)
    given = {**views, **case.parameters, **extra}

    def call(**changed: Any) -> Callable[[], Any]:
        return lambda: cupyconv.conv(**{**given, "out": case.new_out(target.to_device, target.xp), **changed})

    def limited(limit: int) -> Any:
        with cupyconv.options(workspace_limit=limit):
            return call()()

    def in_place() -> Any:
        residual = target.to_device(np.ones(case.out_shape, case.result_dtype))
        return call(residual=residual, out=residual)()

    def over_weight() -> Any:
        return call(out=given["weight"])()

    integers = [name for name in ("stride", "dilation", "groups", "padding") if type(given[name]) is int]
    retyped = [
        call(**{name: kind(given[name])}) for name in integers for kind in (float, bool, np.int64, np.float32, str)
    ]
    tuples = [name for name in ("stride", "dilation", "padding") if isinstance(given[name], tuple)]
    nested = [call(**{name: kind(given[name])}) for name in tuples for kind in (list, with_floats, with_bools)]
    return [
        call(), *retyped, *nested, call(out=None), call(bias=None), call(residual=None), call(method="direct"),
        call(method="gemm"), call(activation=("leaky_relu", 0.0)), call(activation=("clip", 0, 1)),
        call(activation=("clip", False, True)), call(activation=["clip", 0.0, 1.0]), call(x=tuple(listed(given["x"]))),
        call(weight=list(np.ones(3))), lambda: limited(0), lambda: limited(1 << 16), in_place, over_weight,
    ]  # fmt: skip


def listed(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


def with_floats(values: Any) -> Any:
    return tuple(map(with_floats, values)) if isinstance(values, tuple) else float(values)


def with_bools(values: Any) -> Any:
    return tuple(map(with_bools, values)) if isinstance(values, tuple) else bool(values)


@share_of_examples(0.2)
@given(case=conv_cases())
def test_a_warm_call_is_a_fresh_call_on_numpy(case):
    target = Target("numpy", np.array, np.asarray, np)
    assert_warm_is_fresh(target, case_calls(target, case))


@share_of_examples(0.1)
@given(case=conv_cases(dtypes=("float32", "float16")))
def test_a_warm_call_is_a_fresh_call_on_cuda(cuda_target, case):
    assert_warm_is_fresh(cuda_target, case_calls(cuda_target, case))


@share_of_examples(0.15)
@given(case=conv_cases(dtypes=("float32",), mixed_dtypes=False), data=st.data())
def test_layouts_are_told_apart(target, case, data):
    """The same problem in other layouts and alignments gives the same result, by separate entries of the cache."""
    layouts = ("c_order", "unaligned", "window", "reversed", "channels_last", "stepped")
    cases = [
        replace(case, layouts=(layout,) * len(case.channels), weight_layout=data.draw(st.sampled_from(layouts)))
        for layout in layouts
    ]
    calls = [case_calls(target, other)[0] for other in cases]
    results = assert_warm_is_fresh(target, calls)
    assert len({result[3] for result in results}) == 1


def test_every_function_comes_this_way(target):
    """Calls have no batch axis, are channels-last, have more spatial axes than kernels, or need copies."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return target.to_device(rng.integers(-3, 4, shape).astype(np.float32))

    x, weight, columns = array(2, 3, 8, 7), array(4, 3, 3, 3), array(2, 27, 30)
    last = array(2, 8, 7, 3).transpose(0, 3, 1, 2)
    deep, matrix, deep_out = array(1, 3, 2, 4, 2, 3, 2), array(5, 6), array(1, 5, 2, 4, 2, 3, 2)
    broken = array(1, 3, 4, 4, 2, 3, 2)[:, :, ::2]  # its leading spatial axes have no common stride
    broken_out = array(1, 5, 4, 4, 2, 3, 2)[:, :, ::2]
    bias, residual, out = array(4), array(2, 4, 6, 5), array(2, 4, 6, 5)
    calls: list[Callable[[], Any]] = [
        lambda: cupyconv.conv(x[0], weight), lambda: cupyconv.conv(last, weight), lambda: cupyconv.conv(last[1], weight),
        lambda: cupyconv.conv(x, weight, bias, residual=residual, activation="relu"),
        lambda: cupyconv.conv(x, weight, bias, residual=residual[:, :, ::-1], activation="relu"),
        lambda: cupyconv.conv(x[0], weight, out=out[1]),
        lambda: cupyconv.linmerge([deep, deep], matrix), lambda: cupyconv.linmerge([deep, broken], matrix),
        lambda: cupyconv.linmerge([broken, deep], matrix, out=deep_out),
        lambda: cupyconv.linmerge([deep, deep], matrix, out=broken_out),
        lambda: cupyconv.im2col(x, 3), lambda: cupyconv.im2col(x, 3, padding=1), lambda: cupyconv.im2col(x[0], (3, 3)),
        lambda: cupyconv.im2col([x, last], 3), lambda: cupyconv.im2col(x[0], 3), lambda: cupyconv.im2col(x, 3.0),
        lambda: cupyconv.col2im(columns, (8, 7), 3), lambda: cupyconv.col2im(columns[1], (8, 7), 3),
        lambda: cupyconv.col2im(columns, (7, 8), 3), lambda: cupyconv.col2im(columns, (8, 7), (3, 3.0)),
    ]  # fmt: skip
    outcomes = assert_warm_is_fresh(target, calls)
    assert [i for i, result in enumerate(outcomes) if isinstance(result[0], type)] == [15, 19]  # kernels of 3.0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (dict(stride=1), dict(stride=1.0)),
        (dict(stride=(1, 1)), dict(stride=(1, 1.0))),
        (dict(groups=1), dict(groups=1.0)),
        (dict(padding=((1, 1), (0, 0))), dict(padding=((1, 1), (0, 0.0)))),
        (dict(activation=("clip", 0, 1)), dict(activation=("clip", 0, "1"))),
        (dict(activation=("clip", 0.0, 1.0)), dict(activation=("clip", 0.0, "1.0"))),
        (dict(activation="relu"), dict(activation=("relu", None))),
        (dict(method="auto"), dict(method=None)),
    ],
    ids=lambda value: str(value),
)
def test_what_python_calls_equal_is_still_refused(target, right, wrong):
    x, weight = (target.to_device(np.ones(shape, np.float32)) for shape in ((1, 2, 6, 6), (3, 2, 3, 3)))
    for _ in range(2):
        cupyconv.conv(x, weight, **right)
        with pytest.raises((TypeError, ValueError)):
            cupyconv.conv(x, weight, **wrong)


def test_an_out_is_looked_at_every_time(target):
    """The layout of `out` is cached; its address, and whether it is writable, are checked in every call."""
    memory = target.to_device(np.ones((2, 2, 3, 8), np.float32))
    x, weight = memory[0], target.to_device(np.ones((3, 3, 1), np.float32))
    cupyconv.conv(x[:, :, :4], weight, out=memory[1, :, :, :4])
    for overlapping in (x[:, :, :4], x[:, :, 1:5], x[:, :, 3:7]):
        with pytest.raises(ValueError, match="out overlaps x"):
            cupyconv.conv(x[:, :, :4], weight, out=overlapping)
    interleaved = memory.reshape(2, 2, 3, 4, 2)
    for _ in range(2):  # spans that overlap, elements that do not
        cupyconv.conv(interleaved[0, ..., 0], weight, out=interleaved[0, ..., 1])


def test_each_out_of_several_is_looked_at_every_time():
    """Every `out` of several is checked in each call; in a chain, `out` may be the residual of the last layer."""
    x, w_ih, w_hh = np.ones((3, 2, 4)), np.ones((4, 4)), np.ones((4, 4))
    y, h = np.zeros((3, 2, 4)), np.zeros((1, 2, 4))
    for out in ((y, h), (y, h)):
        cupyconv.rnn(x, w_ih, w_hh, out=out)
    with pytest.raises(ValueError, match=r"out\[1\] overlaps x"):
        cupyconv.rnn(x, w_ih, w_hh, out=(y, x[:1]))
    out, weight = np.ones((1, 2, 5)), np.ones((2, 2, 1))
    layers = [cupyconv.ConvLayer(weight), cupyconv.ConvLayer(weight, residual=out)]
    for ones in (1, 5, 9):
        assert (out == ones).all()
        cupyconv.conv_chain(np.ones((1, 2, 5)), layers, out=out)


def test_an_out_that_became_read_only_is_refused():
    x, weight, out = np.ones((1, 2, 5)), np.ones((2, 2, 1)), np.zeros((1, 2, 5))
    cupyconv.conv(x, weight, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        cupyconv.conv(x, weight, out=out)


def test_byte_orders_are_told_apart():
    x, weight, out = np.ones((1, 2, 5), np.float32), np.ones((2, 2, 1), np.float32), np.zeros((1, 2, 5), np.float32)
    cupyconv.conv(x, weight, out=out)
    swapped = np.zeros((1, 2, 5), np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match="out has dtype"):
        cupyconv.conv(x, weight, out=swapped)
    assert (cupyconv.conv(x.astype(swapped.dtype), weight) == 2).all()


def test_equal_values_of_other_types_are_told_apart():
    """Equal values of different types have different keys, also 0.0 and -0.0, alone and inside tuples."""
    values = (0.0, -0.0, 0, False, None, "0.0", "0", np.int64(0), np.int32(0), (), ((),), (0,), [0])
    assert len({repetition._typed((value,)) for value in values}) == len(values)
    assert len({repetition._typed((("leaky_relu", value),)) for value in values}) == len(values)


def test_a_list_that_changed_is_read_anew(target):
    """The same object with another value is read again, also if it is inside a tuple."""
    x, weight = (target.to_device(np.ones(s, np.float32)) for s in ((1, 2, 6, 6), (2, 2, 2, 2)))
    stride, pads = [1, 1], [0, 0]
    for height in (5, 3):
        assert cupyconv.conv(x, weight, stride=stride).shape == (1, 2, height, 5)
        stride[0] = 2
    padding = (pads, (0, 0))
    for height in (5, 6):
        assert cupyconv.conv(x, weight, padding=padding).shape == (1, 2, height, 5)
        pads[1] = 1


def test_the_same_array_in_another_place_is_told_apart(target):
    """The same arrays in the same order are another call as bias or residual, or as residual or `out`."""
    x, weight, square = (target.to_device(np.ones(s, np.float32)) for s in ((1, 2, 2), (2, 2, 1), (1, 2, 2)))
    vector = target.to_device(np.ones(2, np.float32))
    residual = cupyconv.conv(x, weight, residual=square)
    assert cupyconv.conv(x, weight, out=square) is square is not residual
    assert (target.to_host(square) == 2).all() and (target.to_host(residual) == 3).all()
    cupyconv.conv(x, weight, vector)
    with pytest.raises(ValueError, match="residual has shape"):
        cupyconv.conv(x, weight, residual=vector)
    cupyconv.linmerge([x, x], target.to_device(np.ones((2, 4), np.float32)))
    with pytest.raises(ValueError, match="weight of linmerge"):
        cupyconv.linmerge([x], x, target.to_device(np.ones((2, 4), np.float32)))


def test_functions_are_told_apart():
    """Two functions that have the same arguments have separate entries in the cache."""

    def check_with_stride_two(given: Any, **settings: Any) -> Any:
        return check_conv(given, **{**settings, "stride": 2})

    with_stride_two = Operation(None, check_with_stride_two, CONV.arrays, CONV.settings, unpack_prologue)
    plain = Operation(None, check_conv, CONV.arrays, CONV.settings, unpack_prologue)
    arguments = bound(cupyconv.conv, (np.ones((1, 2, 6)), np.ones((2, 2, 2))), {})
    for _ in range(2):
        assert plain(dict(arguments)).shape == (1, 2, 5)
        assert with_stride_two(dict(arguments)).shape == (1, 2, 3)


def test_a_call_for_a_gradient_is_told_apart():
    """A call for a gradient has its own entry in the cache, because it also returns what the gradient needs."""
    arguments = dict(bound(cupyconv.conv, (np.ones((1, 2, 6)), np.ones((2, 2, 2))), {"activation": "gelu"}))
    for _ in range(2):
        assert CONV(dict(arguments)).shape == (1, 2, 5)
        assert [array.shape for array in CONV(dict(arguments), saving=True)] == [(1, 2, 5), (1, 2, 5)]


def test_an_address_out_of_alignment_gets_its_own_kernel(cuda_target):
    """Vectors have 16 bytes if every image allows that; an address four bytes further allows single elements."""
    memory = cuda_target.to_device(np.ones(1 + 2 * 64, np.float32))
    weight, out = (cuda_target.to_device(np.ones(s, np.float32)) for s in ((2, 2), (1, 2, 64)))
    for first, width in ((0, "4"), (1, "1"), (0, "4")):
        x = memory[first : first + 128].reshape(1, 2, 64)
        cuda_target.device.log.clear()
        cupyconv.linmerge(x, weight, out=out)
        (record,) = cuda_target.device.log
        assert dict(record.kernel.macros)["VECTOR"] == width


def test_arrays_of_a_subclass_take_the_long_way():
    """A masked array is refused although a plain one of its layout is cached."""
    x, weight = np.ones((1, 2, 5)), np.ones((2, 2, 1))
    cupyconv.conv(x, weight)
    cupyconv.conv([x[:, :1], x[:, 1:]], weight)
    cases = (np.ma.array(x), weight), (x, np.ma.array(weight)), ([x[:, :1], np.ma.array(x[:, 1:])], weight)
    for masked in cases:
        with pytest.raises(TypeError, match="MaskedArray"):
            cupyconv.conv(*masked)


def test_options_are_told_apart(target):
    x, weight = (
        target.to_device(np.ones((4, 4, 40, 40), np.float32)),
        target.to_device(np.ones((4, 4, 3, 3), np.float32)),
    )
    cupyconv.conv(x, weight, method="gemm")
    with cupyconv.options(workspace_limit=0), pytest.raises(ValueError, match="the limit is 0"):
        cupyconv.conv(x, weight, method="gemm")


def test_a_backend_registered_anew_is_found(monkeypatch):
    monkeypatch.setattr(dispatch, "_REGISTRY", dict(dispatch._REGISTRY))
    devices = [NullDevice(), NullDevice()]
    x, weight = devices[0].array(1, 2, 5), devices[0].array(2, 2, 1)
    for device in devices:
        backend = CudaBackend(device)
        dispatch.register_backend(NullArray, lambda array, backend=backend: backend)
        cupyconv.conv(x, weight)
    assert [device.launches for device in devices] == [1, 1]


# --- what is not done again -------------------------------------------------------------------------------------


@pytest.fixture
def null_device(monkeypatch) -> NullDevice:
    monkeypatch.setattr(dispatch, "_REGISTRY", dict(dispatch._REGISTRY))
    device = NullDevice()
    backend = CudaBackend(device)
    dispatch.register_backend(NullArray, lambda array: backend)
    return device


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_a_repeated_call_only_allocates_and_enqueues(null_device, monkeypatch, number, with_out):
    """A repeated call checks, plans, compiles and packs nothing; it allocates memory and enqueues the steps."""
    _, call, shape = list(cuda_calls(null_device.array))[number]
    out = null_device.array(*shape) if with_out else None
    call(out)
    before = dict(vars(null_device))

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("done again")

    for module, name in ((dispatch, "backend_for"), (cuda_run_backend, "plan"), (conv_operation, "conv_problem")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(PackedParameters, "__init__", never)
    call(out)
    done = {name: vars(null_device)[name] - value for name, value in before.items() if type(value) is int}
    launches, gemms, workspace = ((1, 0, 0), (1, 1, 1), (2, 1, 1))[(0, 0, 0, 0, 1, 2)[number]]
    assert done == {
        "loads": 0, "arguments": 0, "launches": launches, "gemms": gemms, "allocations": workspace + (not with_out),
    }  # fmt: skip


def test_the_benchmark_of_host_time_runs():
    """The benchmark prints both tables; its times have a meaning only on a quiet machine."""
    command = [sys.executable, "-m", "tests.benchmarks.host_time", "--rounds", "1", "--calls", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    for name, _, _ in cuda_calls(NullDevice().array):
        assert f"{name}, out=" in done.stdout
    assert "conv 3x3, bias, relu" in done.stdout


def test_what_repeats_is_what_explain_says(cuda_target):
    """After a cache hit the log has the plan's steps, each with its kernel, grid, block and shared memory."""
    x, weight, bias = (cuda_target.to_device(np.ones(s, np.float32)) for s in ((2, 8, 9, 9), (8, 8, 3, 3), (8,)))
    for method in ("direct", "gemm"):
        arguments = dict(bias=bias, padding=1, activation="relu", method=method)
        for _ in range(2):
            cuda_target.device.log.clear()
            cupyconv.conv(x, weight, **arguments)
        plan = cupyconv.explain(cupyconv.conv, x, weight, **arguments)
        for step, record in zip(plan.steps, cuda_target.device.log, strict=True):
            if isinstance(step, KernelLaunch):
                assert record == LaunchRecord(step.kernel, step.grid, step.block, step.shared_bytes)
            else:
                assert isinstance(step, GemmCall) and isinstance(record, GemmRecord)
                assert {record.m, record.n} == {step.m, step.n} and record.k == step.k


# --- what is remembered -----------------------------------------------------------------------------------------


def test_refusals_are_not_remembered(target):
    x, weight = target.to_device(np.ones((1, 2, 5), np.float32)), target.to_device(np.ones((2, 2, 9), np.float32))
    for _ in range(2):
        with pytest.raises(ValueError, match="kernel spans 9"):
            cupyconv.conv(x, weight)
    assert not repetition._executables


def test_arguments_nobody_thought_of_are_not_remembered():
    class Two:
        def __index__(self) -> int:
            return 2

    x, weight = np.ones((1, 2, 6)), np.ones((2, 2, 2))
    assert cupyconv.conv(x, weight, stride=Two()).shape == (1, 2, 3)
    assert cupyconv.conv(x.view(np.memmap), weight).shape == (1, 2, 5)
    assert not repetition._executables


def test_the_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(repetition._executables, "most", 5)
    weight = np.ones((1, 1, 1))
    for width in range(1, 40):
        x = np.full((1, 1, width), float(width))
        assert (cupyconv.conv(x, weight) == width).all()
        assert len(repetition._executables) <= 5


def test_the_least_recently_used_call_is_let_go(monkeypatch):
    checked = []
    monkeypatch.setattr(repetition._executables, "most", 2)
    monkeypatch.setattr(CONV, "_check", lambda given, **rest: checked.append(given["x"]) or check_conv(given, **rest))
    weight, images = np.ones((1, 1, 1)), [np.ones((1, 1, width)) for width in range(1, 4)]
    for number in (0, 1, 0, 2, 0, 1):
        cupyconv.conv(images[number], weight)
    assert [x.shape[2] for x in checked] == [1, 2, 3, 2]  # the third call saves the first entry; the second is evicted


def test_forgetting_while_others_call(target, monkeypatch):
    """Results stay right while the cache overflows again and again under many threads."""
    monkeypatch.setattr(repetition._executables, "most", 3)
    weight = target.to_device(np.ones((2, 3, 1), np.float32))
    images = [target.to_device(np.full((1, 3, width), float(width), np.float32)) for width in range(1, 9)]

    def call(number: int) -> bool:
        x = images[number % len(images)]
        return bool((target.to_host(cupyconv.conv(x, weight)) == 3 * x.shape[2]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(200)))


def test_no_array_is_kept(target):
    x, weight, out = (target.to_device(np.ones(s, np.float32)) for s in ((1, 2, 5), (2, 2, 1), (1, 2, 5)))
    alive = [weakref.ref(array) for array in (x, weight, out)]
    cupyconv.conv(x, weight, out=out)
    cupyconv.conv(x, weight, out=out)
    assert repetition._executables
    del x, weight, out
    gc.collect()
    assert not any(reference() is not None for reference in alive)


# --- memory that runs out, and graphs ---------------------------------------------------------------------------


def test_a_remembered_call_too_is_retried_with_smaller_chunks(cuda_target):
    device = cuda_target.device
    x, weight = device.asarray(np.ones((8, 4, 64, 64), np.float32)), device.asarray(np.ones((4, 4, 3, 3), np.float32))
    out = device.empty((8, 4, 62, 62), np.float32)
    cupyconv.conv(x, weight, out=out, method="gemm")
    out.fill(0)
    device.log.clear()
    device.fail_allocations_over = 1_000_000
    try:
        cupyconv.conv(x, weight, out=out, method="gemm")
    finally:
        device.fail_allocations_over = None
    assert (out == 36).all() and len(device.log) > 2


def test_a_device_that_refuses_what_its_model_has_is_planned_for_anew(monkeypatch):
    """The new plan is made once: a repeated call runs it."""
    prepare, plans, attempts = NumpyBackend.prepare, [], []

    def prepared(backend: NumpyBackend, plan: Any) -> Callable[[Any], None]:
        execute = prepare(backend, plan)
        plans.append(plan)
        number = len(plans)

        def attempt(arrays: Any) -> None:
            attempts.append(number)
            if number == 1:
                raise UnlikeItsModel
            execute(arrays)

        return attempt

    monkeypatch.setattr(NumpyBackend, "prepare", prepared)
    for _ in range(2):
        assert (cupyconv.conv(np.ones((1, 2, 6)), np.ones((2, 2, 2))) == 4).all()
    assert attempts == [1, 2, 2]


def test_an_out_at_the_residuals_place_is_the_residual(cuda_target):
    """Two views of the same elements are one array: after a failure their sums must not be added again."""
    device = cuda_target.device
    x, weight = device.asarray(np.ones((8, 4, 64, 64), np.float32)), device.asarray(np.ones((4, 4, 3, 3), np.float32))
    out = device.asarray(np.ones((8, 4, 62, 62), np.float32))
    device.fail_allocations_over = 1_000_000
    try:
        with pytest.raises(MemoryError):
            cupyconv.conv(x, weight, residual=out[:], out=out, method="gemm")
    finally:
        device.fail_allocations_over = None
    assert (out == 1).all()


@pytest.mark.parametrize("warm", [False, True])
def test_what_cannot_be_captured_says_so_before_anything_is_enqueued(cuda_target, warm):
    device = cuda_target.device
    x, weight, wide = (
        device.asarray(np.ones(s, d)) for s, d in (((1, 2, 9), "f4"), ((3, 2, 3), "f4"), ((3, 2, 3), "f8"))
    )
    out, wide_out = device.empty((1, 3, 7), np.float32), device.empty((1, 3, 7), np.float64)
    calls = [
        (lambda: cupyconv.conv(x, weight, method="gemm", out=out), "cannot capture cuBLAS calls"),
        (lambda: cupyconv.conv(x, wide, method="direct", out=wide_out), "converts an argument .x. cannot be captured"),
    ]
    for call, words in calls:
        if warm:
            call()
        device.log.clear()
        device.capturing = True
        try:
            with pytest.raises(RuntimeError, match=words):
                call()
        finally:
            device.capturing = False
        assert not device.log
        call()


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_own_kernels_with_out_are_captured_without_allocating(cuda_target, method):
    """Workspace, if there is any, belongs to the graph."""
    device = cuda_target.device
    x, weight = device.asarray(np.ones((1, 2, 9), np.float32)), device.asarray(np.ones((3, 2, 3), np.float32))
    out = device.empty((1, 3, 7), np.float32)
    cupyconv.conv(x, weight, method=method, out=out)
    device.capturing, device.fail_allocations_over = True, 0
    try:
        cupyconv.conv(x, weight, method=method, out=out)
    finally:
        device.capturing, device.fail_allocations_over = False, None
    assert (out == 6).all()
