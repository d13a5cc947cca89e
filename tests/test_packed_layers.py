"""`ConvLayer.packed`: a weight is packed once, every later call reuses it correctly, and `explain` lists it."""

from __future__ import annotations

import gc
import pickle
import weakref
from copy import deepcopy
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import reference
from integer_arrays import integers
from targets import TARGETS
from tolerance import assert_exact

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.repeated import RepeatedCall
from cupyconv.cuda.plan import conv as cuda_planning
from cupyconv.numpy.winograd import Winograd
from cupyconv.problem import caches


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param()


@pytest.fixture
def by_implicit_gemm(monkeypatch):
    """Allow only `implicit_gemm`, the method that packs weights, whatever the cost model prefers."""
    monkeypatch.setattr(cuda_planning, "METHODS", ("implicit_gemm",))


@pytest.fixture
def cuda(by_implicit_gemm, cuda_target):
    """Return the host device, on which layers run by `implicit_gemm`, with an empty log."""
    cuda_target.device.log.clear()
    return cuda_target


def layer_on(target, *shape, seed=1, **settings):
    return ConvLayer(target.to_device(integers(*shape, seed=seed)), **settings)


def packs(target):
    """Return how many launches packed a weight since the log was last cleared, and clear it."""
    names = [getattr(record, "kernel", None) and record.kernel.name for record in target.device.log]
    target.device.log.clear()
    return names.count("pack_weight")


def cached_bytes(plan):
    return {buffer.name: buffer.nbytes for buffer in plan.workspace if buffer.of}


@pytest.mark.parametrize("images", [1, 3])
def test_it_computes_what_the_layer_does(target, by_implicit_gemm, images):
    x, settings = integers(images, 6, 9, 8), dict(padding=1, activation=("leaky_relu", 0.5))
    layer = layer_on(target, 5, 6, 3, 3, **settings)
    packed = layer.packed()
    for _ in range(2):
        actual = cupyconv.conv_chain(target.to_device(x), [packed])
        assert_exact(target.to_host(actual), reference.conv(x, target.to_host(layer.weight), **settings), "float32")


def test_a_weight_is_packed_by_the_first_call(cuda):
    x, packed = cuda.to_device(integers(2, 6, 9, 8)), layer_on(cuda, 5, 6, 3, 3).packed()
    cuda.device.waits = 0
    counts = []
    for _ in range(3):
        cupyconv.conv_chain(x, [packed])
        counts.append((packs(cuda), cuda.device.waits))
    assert counts == [(1, 1), (0, 1), (0, 1)]
    cupyconv.conv_chain(cuda.to_device(integers(7, 6, 11, 8)), [packed])  # other images, the same packed form
    assert packs(cuda) == 0
    for _ in range(2):
        cupyconv.conv_chain(x, [layer_on(cuda, 5, 6, 3, 3)])
    assert packs(cuda) == 2


def test_a_call_that_is_repeated_packs_its_weight_once(cuda):
    """A repeated call packs its weight once, as for a model's layers; another repeated call packs its own."""
    x, weight, count = integers(2, 6, 9, 8), cuda.to_device(integers(5, 6, 3, 3)), []
    expected = reference.conv(x, cuda.to_host(weight), padding=1)
    for _ in range(2):
        call = RepeatedCall(cupyconv.conv, {"weight": weight, "padding": 1})
        for _ in range(3):
            assert_exact(cuda.to_host(call(x=cuda.to_device(x))), expected, "float32")
            count.append(packs(cuda))
    assert count == [1, 0, 0] * 2
    assert cached_bytes(call.checked(x=cuda.to_device(x)).plan())


def test_what_is_read_in_another_way_has_a_form_of_its_own(cuda):
    packed, x, forms = layer_on(cuda, 5, 8, 3, 3).packed(), integers(2, 8, 9, 8), {}
    for _ in range(2):
        for tf32 in (False, True):
            with cupyconv.options(allow_tf32=tf32):
                forms |= cached_bytes(cupyconv.explain(cupyconv.conv_chain, cuda.to_device(x), [packed]))
                actual = cupyconv.conv_chain(cuda.to_device(x), [packed])
            assert_exact(cuda.to_host(actual), reference.conv(x, cuda.to_host(packed.weight)), "float32")
    assert packs(cuda) == len(forms) == 2


def test_of_many_forms_some_are_made_anew(cuda, monkeypatch):
    monkeypatch.setattr(caches, "MAX_FORMS", 0)
    x, packed = integers(2, 6, 9, 8), layer_on(cuda, 5, 6, 3, 3).packed()
    cuda.device.waits = 0
    for _ in range(2):
        actual = cupyconv.conv_chain(cuda.to_device(x), [packed])
        assert_exact(cuda.to_host(actual), reference.conv(x, cuda.to_host(packed.weight)), "float32")
    assert (packs(cuda), cuda.device.waits) == (2, 0)


def test_every_layer_of_a_chain_keeps_its_own(cuda):
    layers = [layer_on(cuda, 6, 6, 3, 3, seed=seed, padding=1).packed() for seed in (1, 2)]
    layers.append(layer_on(cuda, 6, 6, 3, 3, seed=3, padding=1))
    x = integers(2, 6, 9, 8)
    expected = x
    for layer in layers:
        expected = reference.conv(expected, cuda.to_host(layer.weight), padding=1)
    plan = cupyconv.explain(cupyconv.conv_chain, cuda.to_device(x), layers, fuse=False)
    assert [name.split()[0] for name in cached_bytes(plan)] == ["weight[0]", "weight[1]"]
    for count in (3, 1):
        actual = cupyconv.conv_chain(cuda.to_device(x), layers, fuse=False)
        assert_exact(cuda.to_host(actual), expected, "float32")
        assert packs(cuda) == count


def test_samples_in_chunks_share_what_is_kept(cuda):
    layers = [layer_on(cuda, 6, 6, 3, 3, seed=seed, padding=1).packed() for seed in (1, 2)]
    x = integers(5, 6, 30, 30)
    expected = x
    for layer in layers:
        expected = reference.conv(expected, cuda.to_host(layer.weight), padding=1)
    with cupyconv.options(workspace_limit=100_000):
        plan = cupyconv.explain(cupyconv.conv_chain, cuda.to_device(x), layers, fuse=False)
        actual = cupyconv.conv_chain(cuda.to_device(x), layers, fuse=False)
    assert "chunks of" in plan.reason
    assert_exact(cuda.to_host(actual), expected, "float32")
    assert packs(cuda) == len(cached_bytes(plan)) >= 2
    assert plan.workspace_bytes - sum(cached_bytes(plan).values()) <= 100_000


def test_the_first_layers_weight_may_change(target, by_implicit_gemm):
    """A packed layer holds a copy of the weight: in-place changes of the original weight do not change it."""
    x, layer = integers(2, 6, 9, 8), layer_on(target, 5, 6, 3, 3)
    before = target.to_host(layer.weight).copy()
    packed = layer.packed()
    for change in (0, 2):
        actual = cupyconv.conv_chain(target.to_device(x), [packed])
        assert_exact(target.to_host(actual), reference.conv(x, before), "float32")
        layer.weight[...] = change
        expected = reference.conv(x, np.full_like(before, change))
        assert_exact(target.to_host(cupyconv.conv_chain(target.to_device(x), [layer.packed()])), expected, "float32")


def test_another_weight_is_another_layer(target):
    layer = layer_on(target, 5, 6, 3, 3).packed()
    assert layer.packed() is layer and repr(layer) == "ConvLayer(float32 (5, 6, 3, 3), packed)"
    other = replace(layer, weight=target.to_device(integers(5, 6, 3, 3)))
    assert (layer.is_packed, other.is_packed) == (True, False)
    assert replace(layer, stride=2).is_packed  # the same weight


@pytest.mark.parametrize("shape", [(8, 8, 3, 3), (64, 64, 3, 3)])
def test_on_numpy_it_goes_with_the_layer_too(shape):
    gc.collect()
    forms = len(caches._forms)
    packed = ConvLayer(integers(*shape), padding=1).packed()
    cupyconv.conv_chain(integers(1, shape[1], 28, 28), [packed])
    copy = weakref.ref(packed.weight.base)
    assert len(caches._forms) == forms + 1
    del packed
    gc.collect()
    assert copy() is None and len(caches._forms) == forms


def test_layers_laid_out_alike_keep_each_its_own(target, by_implicit_gemm):
    """Packed layers of equal shape keep their own weights, although they share one executable."""
    x = integers(1, 64, 28, 28)
    for seed in (1, 2, 1):
        packed = layer_on(target, 16, 64, 3, 3, seed=seed, padding=1).packed()
        actual = target.to_host(cupyconv.conv_chain(target.to_device(x), [packed]))
        expected = reference.conv(x, target.to_host(packed.weight), padding=1)
        assert abs(actual - expected).max() < 0.1


def test_numpys_copy_is_read_only():
    packed = ConvLayer(np.ones((5, 6, 3, 3), np.float32)).packed()
    with pytest.raises(ValueError, match="read-only"):
        packed.weight[0] = 1


def test_what_is_kept_goes_with_the_layer(cuda):
    gc.collect()
    before, forms = cuda.device.allocated_bytes, len(caches._forms)
    packed = layer_on(cuda, 5, 6, 3, 3).packed()
    x = cuda.to_device(integers(2, 6, 9, 8))
    plan = cupyconv.explain(cupyconv.conv_chain, x, [packed])
    (nbytes,) = cached_bytes(plan).values()
    assert plan.workspace_bytes >= nbytes and "packed" not in str(plan.steps) and ", cached" in str(plan)
    cupyconv.conv_chain(x, [packed])
    gc.collect()
    assert cuda.device.allocated_bytes - before == nbytes + packed.weight.nbytes + x.nbytes
    del packed, x
    gc.collect()
    assert (cuda.device.allocated_bytes, len(caches._forms)) == (before, forms)


def test_what_is_kept_is_beside_the_limit(cuda):
    x, layer = np.empty((2, 64, 9, 8), np.float32), ConvLayer(np.empty((64, 64, 3, 3), np.float32))
    with cupyconv.options(workspace_limit=1000):
        plan = cupyconv.explain(cupyconv.conv_chain, x, [layer.packed()], on="sm_90")
        assert plan.workspace_bytes == sum(cached_bytes(plan).values()) > 1000
        with pytest.raises(ValueError, match="packed weight needs"):
            cupyconv.explain(cupyconv.conv_chain, x, [layer], on="sm_90")


def test_a_graph_reads_what_was_kept_before_it(cuda):
    """During capture nothing may wait: the graph itself packs a form that is missing, at every launch."""
    x, packed = cuda.to_device(integers(2, 6, 9, 8)), layer_on(cuda, 5, 6, 3, 3).packed()
    expected = reference.conv(cuda.to_host(x), cuda.to_host(packed.weight))
    for warm, count in ((False, 1), (False, 1), (True, 0)):
        if warm:
            cupyconv.conv_chain(x, [packed])
        packs(cuda)
        cuda.device.capturing = True
        try:
            actual = cupyconv.conv_chain(x, [packed])
        finally:
            cuda.device.capturing = False
        assert packs(cuda) == count
        assert_exact(cuda.to_host(actual), expected, "float32")
    cuda.device.capturing = True
    try:
        with pytest.raises(RuntimeError, match="pack it before"):
            layer_on(cuda, 5, 6, 3, 3).packed()
    finally:
        cuda.device.capturing = False


def test_threads_that_call_at_once_pack_once(cuda):
    x, packed = cuda.to_device(integers(2, 6, 9, 8)), layer_on(cuda, 5, 6, 3, 3).packed()
    results = []
    threads = [Thread(target=lambda: results.append(cupyconv.conv_chain(x, [packed]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert packs(cuda) == 1 and len(results) == 4
    for result in results:
        assert_exact(cuda.to_host(result), reference.conv(cuda.to_host(x), cuda.to_host(packed.weight)), "float32")


def test_a_weight_that_is_converted_is_packed_in_each_call(cuda):
    """A weight that calls convert is packed in each call, because each call converts it to a new array."""
    x = integers(2, 6, 9, 8).astype(np.float64)
    packed = layer_on(cuda, 5, 6, 3, 3).packed()
    for _ in range(2):
        actual = cupyconv.conv_chain(cuda.to_device(x), [packed])
        assert_exact(cuda.to_host(actual), reference.conv(x, cuda.to_host(packed.weight)), "float64")
    assert not cached_bytes(cupyconv.explain(cupyconv.conv_chain, cuda.to_device(x), [packed]))


def test_numpy_keeps_what_winograd_makes(monkeypatch):
    x = np.random.default_rng(0).random((1, 64, 28, 28), np.float32)
    layer = ConvLayer(np.random.default_rng(1).random((64, 64, 3, 3), np.float32), padding=1)
    packed, made, arranged = layer.packed(), [], Winograd.arranged
    monkeypatch.setattr(Winograd, "arranged", lambda self, weight: made.append(1) or arranged(self, weight))
    assert "Winograd" in str(cupyconv.explain(cupyconv.conv_chain, x, [packed]))
    images = x, x, x[:, :, 4:]
    results = [cupyconv.conv_chain(image, [packed]) for image in images]
    assert len(made) == 1
    for image, result in zip(images, results):
        assert np.array_equal(result, cupyconv.conv(image, layer.weight, padding=1, method="winograd"))
    assert len(made) == 4


def test_a_copy_of_a_packed_layer_is_not_packed_and_gives_the_same():
    layer = ConvLayer(integers(5, 6, 3, 3), integers(5), activation="relu").packed()
    x = integers(2, 6, 9, 8)
    for copy in (pickle.loads(pickle.dumps(layer)), deepcopy(layer)):
        assert layer.is_packed and not copy.is_packed
        assert repr(layer) == f"{repr(copy)[:-1]}, packed)"
        np.testing.assert_array_equal(cupyconv.conv_chain(x, [copy]), cupyconv.conv_chain(x, [layer]))
