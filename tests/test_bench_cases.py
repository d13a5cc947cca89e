"""The cases of the bench: what they compute, how results are checked, and which tables they are in."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import reference as oracle
import reference_recurrent
from bench_cases import GRADIENTS, LARGE_KERNELS, RECURRENT, SMALL, STEPS, every_recurrent_case, every_small_case
from tolerance import assert_close

import cupyconv
from cupyconv import bench
from cupyconv.__main__ import main
from cupyconv.bench import record, session, tables
from cupyconv.bench.array_peers import concatenate_im2col_matmul
from cupyconv.bench.cases import Case
from cupyconv.bench.recurrent_layers import RecurrentCase, loop_in_python
from cupyconv.bench.reference import WrongResult, allowed_error, error, in_float64
from cupyconv.bench.torch_peers import Torch
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name


@pytest.fixture
def torch():
    return Torch(pytest.importorskip("torch"), np)


@pytest.mark.parametrize("case", [*SMALL, *LARGE_KERNELS], ids=str)
def test_the_reference_is_the_oracles(case):
    xs, weights = case.arrays()
    expected = xs
    for layer, weight in zip(case.layers, weights):
        settings = dict(stride=layer.stride, padding=list(layer.pairs), dilation=layer.dilation, groups=layer.groups)
        expected = oracle.conv(expected, weight, **settings)
    np.testing.assert_allclose(in_float64(np, case, xs, weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_a_gradient_is_the_adjoint_of_the_oracles_convolution(case):
    """Along a random direction, the change of the result is what the gradient says."""
    xs, weights = case.arrays()
    layer = Case(**{name: value for name, value in asdict(case).items() if name != "of"})
    inputs, (weight,) = layer.arrays()
    gradient = in_float64(np, case, xs, weights)
    steps = [np.random.default_rng(1).standard_normal(a.shape).astype(a.dtype) for a in (*inputs, weight)]
    of_input = case.of == "input"
    settings = dict(stride=layer.stride, padding=list(layer.pairs), dilation=layer.dilation, groups=layer.groups)
    gain = oracle.conv(steps[:-1] if of_input else inputs, weight if of_input else steps[-1], **settings)
    along = np.concatenate(steps[:-1], axis=1) if of_input else steps[-1]
    np.testing.assert_allclose((gain * oracle.wide(xs[0])).sum(), (gradient * oracle.wide(along)).sum(), rtol=1e-10)
    assert error(np, case, case.ours(xs, weights), gradient) <= allowed_error(case)
    with pytest.raises(WrongResult):
        error(np, case, 2 * case.ours(xs, weights), gradient)


@every_small_case
def test_the_librarys_call_and_the_numpy_peer_are_right(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    if not case.then:
        assert_close(case.ours(xs, weights), expected, case.dtype, case.terms)
    assert error(np, case, case.ours(xs, weights), expected) <= allowed_error(case)
    peer = concatenate_im2col_matmul(np, case, xs, weights)
    wide = case.dtype not in ("float16", "bfloat16")  # NumPy sums these in their own dtype
    assert error(np, case, peer, expected) >= 0 if wide else np.allclose(peer.astype(float), expected, atol=0.5)


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step_goes_on_from_its_state(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    states = dict(zip(("h0", "c0"), (oracle.wide(state)[np.newaxis] for state in xs[1:])))
    naive = reference_recurrent.recurrent(case.cell, *map(oracle.wide, (xs[0], *weights)), **states).y[0]
    np.testing.assert_allclose(expected, naive, rtol=1e-12, atol=1e-12)
    error(np, case, case.ours(xs, weights), expected)
    with pytest.raises(WrongResult):
        error(np, case, case.ours([xs[0], xs[1] * np.float32(0.5), *xs[2:]], weights), expected)


@every_recurrent_case
def test_a_recurrent_layer_is_the_oracles(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    naive = reference_recurrent.recurrent(case.cell, *map(oracle.wide, (*xs, *weights))).y
    np.testing.assert_allclose(expected, naive, rtol=1e-12, atol=1e-12)
    error(np, case, case.ours(xs, weights), expected)
    if np.dtype(dtype_from_name(case.dtype)).itemsize > 2:  # NumPy keeps 16-bit states in 16 bits
        error(np, case, loop_in_python(np, case, xs, weights), expected)
    with pytest.raises(WrongResult, match="error"):
        error(np, case, case.ours(xs, [weights[0] + weights[0], *weights[1:]]), expected)


@pytest.mark.parametrize("case", RECURRENT[::2], ids=str)
def test_torchs_layer_is_a_peer(torch, case):
    xs, weights = case.arrays()
    (way,) = torch.ways(case, xs, weights)
    with torch.during(case):
        error(np, case, way.as_array(way.prepare()()), in_float64(np, case, xs, weights), transform=True)


@pytest.mark.parametrize("case", [*tables.recurrent_cases(gpu=False), *RECURRENT, *STEPS], ids=str)
def test_flops_and_bytes_of_a_recurrent_layer_are_planning_s(case):
    function, arguments, keywords = case.call(*case.arrays(lambda dtype, first, n: np.ones(n, dtype_from_name(dtype))))
    plan = cupyconv.explain(function, *arguments, **keywords)
    assert (case.flops, case.minimal_bytes) == (plan.flops, plan.minimal_bytes)


def test_recurrent_layers_are_in_both_tables():
    assert {*tables.recurrent_cases(gpu=False)} <= {*tables.numpy_cases()}
    assert {*tables.recurrent_cases(gpu=True)} <= {*tables.gpu_cases()}
    for gpu in (False, True):
        cases = tables.recurrent_cases(gpu=gpu)
        assert len({case.name for case in cases}) == len(cases) and {case.cell for case in cases} == {"lstm", "gru"}
    assert {(case.dtype, case.tf32) for case in cases} == {("float32", False), ("float32", True), ("float16", False)}


def test_the_command_measures_recurrent_layers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "numpy_cases", lambda: RECURRENT)
    monkeypatch.setattr(session, "LONGEST", 0)
    file = tmp_path / "numpy.json"
    assert main(["bench", "--json", str(file), "--peers", "numpy", "--seconds", "60", "--only", "gru float32"]) == 0
    printed = capsys.readouterr().out
    (row,) = record.read_record(file)["cases"]
    assert row["ways"].keys() == {"cupyconv", "numpy"} and row["rejected"].keys() == {"persistent"}
    for word in ("gru float32: floor", "cupyconv: step", "recurrent: cupyconv's time divided by each peer's"):
        assert word in printed


def test_flops_and_bytes_are_planning_s():
    for case in (*SMALL, *GRADIENTS):
        function, arguments, keywords = case.call(*case.arrays())
        plan = cupyconv.explain(function, *arguments, **keywords, on="sm_90")
        assert (case.flops, case.minimal_bytes) == (plan.flops, plan.minimal_bytes), case.name


def test_layouts_are_what_their_names_say():
    (x, *_), _ = Case("x", 2, (3,), (4, 5), 1, (1, 1), channels_last=True).arrays()
    assert x.shape == (2, 3, 4, 5) and x.strides == (240, 4, 60, 12)
    (x, *_), _ = Case("x", 1, (8,), (16,), 1, (1,), misaligned=True).arrays()
    assert x.flags.c_contiguous and x.ctypes.data % 16 == 4


def rounded_to_tf32(array):
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def test_the_check_sees_what_it_should():
    case = Case("3x3", 4, (64,), (16, 16), 32, (3, 3), padding=((1, 1), (1, 1)))
    xs, (weight,) = case.arrays()
    expected, right = in_float64(np, case, xs, [weight]), case.ours(xs, [weight])
    assert error(np, case, right, expected) < allowed_error(case)
    reduced = case.ours([rounded_to_tf32(x) for x in xs], [rounded_to_tf32(weight)])
    without_a_tap = weight.copy()
    without_a_tap[5, :, 2, 2] = 0
    one_wrong, not_a_number = right.copy(), right.copy()
    one_wrong[1, 2, 3, 4] += 0.05
    not_a_number[0, 0, 0, 0] = np.nan
    missing = case.ours(xs, [without_a_tap])
    for wrong in (reduced, missing, one_wrong, not_a_number, right.astype(np.float64), right[:1]):
        with pytest.raises(WrongResult):
            error(np, case, wrong, expected, transform=True)
    assert error(np, replace(case, tf32=True), reduced, expected) > allowed_error(case)


# --- tables ---------------------------------------------------------------------------------------------------

CONVOLUTIONS_ON_GPU = [case for case in tables.gpu_cases() if isinstance(case, Case)]


@pytest.mark.parametrize("cases", [tables.numpy_cases(), tables.gpu_cases()], ids=["numpy", "gpu"])
def test_names_are_their_own(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)


def test_the_processors_table_has_what_it_is_judged_by():
    cases = tables.numpy_cases()
    assert {case.group for case in cases} == {
        "convolutions", "input gradients", "weight gradients", "recurrent", "merge", "chains", "filters", "large kernels",
        "small calls",
    }  # fmt: skip
    layers = [case for case in cases if case.group == "convolutions"]
    assert {case.kernel for case in layers} >= {(1, 1), (3, 3), (1, 7), (5, 5), (7, 7), (11, 11), (3, 3, 3), (9,)}
    for of in ("input", "weight"):
        assert {case.stride for case in cases if case.group == f"{of} gradients"} == {1, 2, 4}
    assert {case.groups for case in layers} >= {16, 32, 96, 120} and "float64" in {case.dtype for case in layers}
    assert {case.single for case in cases if isinstance(case, RecurrentCase)} == {True, False}


def test_the_gpu_s_table_has_what_was_promised():
    cases = CONVOLUTIONS_ON_GPU
    assert {case.dtype for case in cases} == set(ITEMSIZE)
    resnet = [case for case in cases if case.name.startswith("ResNet-50") and not case.channels_last]
    assert len(resnet) == 23 * 2 * 4 and {case.batch for case in resnet} == {8, 32}
    first = Case("", 32, (3,), (224, 224), 64, (7, 7), stride=2, padding=((3, 3), (3, 3)))
    assert first.out_size == (112, 112)
    assert {case.size for case in resnet if case.kernel == (3, 3)} == {(s, s) for s in (56, 28, 14, 7)}
    for wanted in ("channels_last", "misaligned", "loop", "compiled", "tf32"):
        assert any(getattr(case, wanted) for case in cases), wanted
    assert {len(case.size) for case in cases} == {1, 2, 3}
    assert any(case.judged == "host" for case in cases)
    merges = [case for case in cases if case.pointwise and len(case.channels) > 1]
    assert {min(max(case.channels), case.out_channels) >= 128 for case in merges} == {True, False}


@pytest.mark.parametrize("case", [c for c in CONVOLUTIONS_ON_GPU if c.dtype in ("float32", "complex64")], ids=str)
def test_every_case_of_the_gpu_s_table_can_be_planned(case):
    function, arguments, keywords = case.call(*case.arrays(lambda dtype, first, n: np.empty(n, dtype)))
    plan = cupyconv.explain(function, *arguments, **keywords, on="sm_90")
    last = case.layers[-1]
    assert str((last.batch, last.out_channels, *last.out_size)) in plan.result
