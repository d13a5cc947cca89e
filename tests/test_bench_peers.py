"""The benchmark's peers: which implementations each one offers, and that all of them compute the same result."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_cases import FILTERS, GRADIENTS, LARGE_KERNELS, RECURRENT, SMALL, STEPS, every_small_case, numpy_machine

from cupyconv.bench.array_peers import ArrayLibrary
from cupyconv.bench.peers import NotInstalled
from cupyconv.bench.reference import WrongResult, error, in_float64
from cupyconv.bench.runner import PEERS
from cupyconv.bench.torch_peers import Torch
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name


@pytest.fixture
def torch():
    return Torch(pytest.importorskip("torch"), np)


def array_ways(on_gpu, case, arrays):
    return ArrayLibrary(numpy_machine(arch="sm_90" if on_gpu else None)).ways(case, *arrays)


def test_which_array_peers_there_are():
    def names(on_gpu, **changes):
        case = replace(SMALL[0], **changes)
        return [way.name for way in array_ways(on_gpu, case, case.arrays())]

    assert names(False) == ["numpy", "loop over samples"]
    assert names(True) == ["cupy", "loop over samples"]
    assert names(True, loop=False, tf32=True) == names(True, loop=False, dtype="bfloat16") == []
    assert array_ways(True, SMALL[7], SMALL[7].arrays()) == []


@pytest.mark.parametrize("case", [case for case in SMALL if case.loop], ids=str)
def test_the_loop_over_samples_is_right(case):
    xs, weights = case.arrays()
    (loop,) = (way for way in array_ways(True, case, (xs, weights)) if way.name.startswith("loop"))
    call = loop.prepare()
    call()[...] = 0
    error(np, case, call(), in_float64(np, case, xs, weights))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_computes_the_same(name):
    peer = installed_peer(name)
    ways = 0
    for case in (*SMALL, *GRADIENTS, *RECURRENT, *STEPS, *FILTERS, *LARGE_KERNELS):
        if name == "numpy" and case.dtype in ("float16", "bfloat16"):
            continue  # NumPy accumulates in these dtypes themselves
        xs, weights = case.arrays()
        with peer.during(case):
            for way in peer.ways(case, xs, weights):
                result, ways = way.as_array(way.prepare()()), ways + 1
                try:
                    error(np, case, result, in_float64(np, case, xs, weights), transform=way.transform)
                except WrongResult as wrong:
                    raise AssertionError(f"{way.name}, {case}: {wrong}") from wrong
    assert ways


def installed_peer(name):
    try:
        return PEERS[name](numpy_machine(), 1)
    except NotInstalled as missing:
        pytest.skip(f"could not import {missing}")


@pytest.mark.parametrize(
    ("name", "case", "count"),
    [
        ("numpy", GRADIENTS[0], 1), ("numpy", STEPS[0], 1), ("torch", GRADIENTS[0], 1), ("torch", GRADIENTS[7], 2),
        ("torch", STEPS[0], 1), ("onnxruntime", SMALL[3], 1), ("onnxruntime", GRADIENTS[6], 1),
        ("onnxruntime", GRADIENTS[7], 0), ("onnxruntime", STEPS[0], 1), ("jax", GRADIENTS[0], 1), ("jax", STEPS[0], 1),
        ("scipy", FILTERS[0], 2), ("scipy", FILTERS[1], 1), ("scipy", FILTERS[2], 2), ("scipy", FILTERS[3], 1),
        ("scipy", SMALL[3], 0), ("opencv", FILTERS[0], 1), ("opencv", FILTERS[2], 0),
        ("scipy", LARGE_KERNELS[0], 2), ("scipy", LARGE_KERNELS[1], 3), ("scipy", LARGE_KERNELS[2], 3),
        ("opencv", LARGE_KERNELS[0], 1), ("opencv", LARGE_KERNELS[1], 0), ("numpy", LARGE_KERNELS[0], 0),
    ],
)  # fmt: skip
def test_which_ways_a_peer_has(name, case, count):
    assert len(installed_peer(name).ways(case, *case.arrays())) == count, case.name


@every_small_case
def test_torch_has_both_formats(torch, case):
    ways = torch.ways(case, *case.arrays())
    assert [way.name for way in ways] == ["torch"] + ["torch channels-last"] * (len(case.size) > 1)


def test_torch_sees_the_very_memory(torch):
    for dtype in ITEMSIZE:
        array = np.zeros((2, 3, 4), dtype_from_name(dtype)).transpose(0, 2, 1)
        tensor = torch.tensor(array)
        assert tensor.data_ptr() == array.ctypes.data and str(tensor.dtype) == f"torch.{dtype}"
        back = torch.array(tensor)
        assert back.ctypes.data == array.ctypes.data and back.dtype == array.dtype and back.strides == array.strides


def test_torch_gets_the_formats_it_is_named_after(torch):
    case = replace(SMALL[3], channels_last=True)
    xs, weights = case.arrays()
    ways = {way.name: way.prepare() for way in torch.ways(case, xs, weights)}
    for name, contiguous in (("torch", False), ("torch channels-last", True)):
        inputs, kernels = ways[name].args[1:]
        library = pytest.importorskip("torch")
        for tensor in (*inputs, *kernels):
            assert tensor.is_contiguous(memory_format=library.channels_last) is contiguous, name


def test_the_flags_are_the_case_s_and_are_put_back(torch):
    library = pytest.importorskip("torch")
    before = library.backends.cudnn.allow_tf32, library.backends.cudnn.benchmark
    for tf32 in (True, False):
        with torch.flags(replace(SMALL[3], tf32=tf32)) as flags:
            assert flags["cudnn.allow_tf32"] is flags["matmul.allow_tf32"] is tf32
            assert library.backends.cudnn.benchmark and library.backends.cudnn.allow_tf32 is tf32
            assert flags["cudnn.benchmark"] and not flags["matmul.allow_fp16_reduced_precision_reduction"]
    assert (library.backends.cudnn.allow_tf32, library.backends.cudnn.benchmark) == before


def test_torch_compile_is_offered_where_the_case_asks(torch):
    case = replace(SMALL[0], compiled=True)
    ways = torch.ways(case, *case.arrays())
    assert ways[-1].name == "torch.compile" and ways[-1].patience > 0
    assert "torch.compile" not in [way.name for way in torch.ways(SMALL[0], *SMALL[0].arrays())]


def test_another_stream_is_refused():
    class Streams:
        class cuda:
            @staticmethod
            def current_stream():
                return SimpleNamespace(cuda_stream=7)

    torch = Torch(Streams, np)
    torch.check_stream(7)
    torch.check_stream(None)
    with pytest.raises(RuntimeError, match="0x7"):
        torch.check_stream(0)
