"""`cupyconv.interop.dask`: results in any chunks compared with the reference, the structure of graphs, and errors."""

from __future__ import annotations

import doctest
import pickle
import re
import tracemalloc
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
from hypothesis import strategies as st
from strategies import conv_cases, pool_cases, share_of_examples, transposed_cases
from targets import gpu_target
from tolerance import assert_exact

da = pytest.importorskip("dask.array", reason="Dask is not installed")

import dask  # noqa: E402
from dask.callbacks import Callback  # noqa: E402

import cupyconv  # noqa: E402
from cupyconv.call.operation import Operation  # noqa: E402
from cupyconv.call.options import current_settings  # noqa: E402
from cupyconv.interop import dask as interop  # noqa: E402
from cupyconv.interop.dask_workers import in_threads_of  # noqa: E402
from cupyconv.numpy.threads import BLAS  # noqa: E402

DTYPES = ("float32", "float64", "complex128")


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def integers(*shape, dtype=np.float64):
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype)


@st.composite
def chunks_of(draw, shape):
    """Draw chunks of any size for an array of this shape."""
    sizes = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3))) if size > 1 else []
        sizes.append(tuple(b - a for a, b in zip((0, *cuts), (*cuts, size))))
    return tuple(sizes)


def chunked(data, array):
    """Return an array in chunks that are views of it or have their own memory, available or computed by tasks."""
    chunks = da.from_array(array, chunks=data.draw(chunks_of(array.shape)))
    return data.draw(st.sampled_from(KINDS))(chunks)


def computed_views(chunks):
    return chunks.map_blocks(lambda chunk: chunk, dtype=chunks.dtype, meta=chunks._meta)


def computed_copies(chunks):
    return chunks.map_blocks(np.array)


def copies(chunks):
    return computed_copies(chunks).persist(scheduler="synchronous")


def views(chunks):
    return chunks


KINDS = [views, computed_views, computed_copies, copies]


def places(data, *results):
    """Draw `out` for these results: none, or memory with or without other elements between those of a result."""
    if not data.draw(st.booleans()):
        return None
    step = data.draw(st.sampled_from([1, 2]))
    return [np.full((*y.shape[:-1], y.shape[-1] * step), 99, y.dtype)[..., ::step] for y in results]


def computed(y, out):
    """Return the result in memory, which is `out` if that was given."""
    y = y.compute()
    assert out is None or y is out
    return y


def all_chunked(data, x):
    return [chunked(data, each) for each in x] if isinstance(x, list) else chunked(data, x)


# --- values ---------------------------------------------------------------------------------------------------


@share_of_examples(0.7)
@given(case=conv_cases(dtypes=DTYPES), data=st.data())
def test_convolutions_in_any_chunks(case, data):
    """Strides, dilation, all padding modes, groups and merges are right, also for chunks smaller than a kernel."""
    arrays = case.arrays()
    expected = reference.conv(**arrays, **case.parameters)
    lazy = {**arrays, "x": all_chunked(data, arrays["x"])}
    if case.residual:
        lazy["residual"] = chunked(data, arrays["residual"])
    (out,) = places(data, expected.astype(case.result_dtype)) or [None]
    y = interop.conv(**lazy, **case.parameters, out=out)
    assert y.shape == expected.shape
    assert y.dtype == case.result_dtype
    assert_exact(computed(y, out), expected, case.result_dtype)


@share_of_examples(0.5)
@given(case=transposed_cases(dtypes=DTYPES), data=st.data())
def test_transposed_convolutions_in_any_chunks(case, data):
    arrays = case.arrays()
    expected = reference_gradients.conv_transpose(**arrays, **case.parameters)
    (out,) = places(data, expected.astype(case.result_dtype)) or [None]
    y = interop.conv_transpose(**{**arrays, "x": all_chunked(data, arrays["x"])}, **case.parameters, out=out)
    assert y.shape == expected.shape
    assert_exact(computed(y, out), expected, case.result_dtype)


@share_of_examples(0.5)
@given(case=pool_cases(dtypes=("float32", "float64")), data=st.data())
def test_pooling_in_any_chunks(case, data):
    """A list gives a list, and each image has its own chunks."""
    x = case.arrays()["x"]
    expected = reference_gradients.max_pool(x, **case.parameters)
    all_expected = reference.sequence(expected)
    outs = places(data, *(wanted.astype(case.dtype) for wanted in all_expected))
    out = outs[0] if outs and not isinstance(x, list) else outs
    y = interop.max_pool(all_chunked(data, x), **case.parameters, out=out)
    assert isinstance(y, list) == isinstance(x, list)
    for one, wanted, own in zip(reference.sequence(y), all_expected, outs or [None] * len(all_expected), strict=True):
        assert_exact(computed(one, own), wanted, case.dtype)


@pytest.mark.parametrize("spatial", [(), (9,), (2, 3, 2, 3, 2)], ids=len)
def test_merges_of_arrays_in_different_chunks(spatial):
    xs, weight, bias = [integers(4, c, *spatial) for c in (3, 1, 5)], integers(6, 9), integers(6)
    scale, shift = integers(9), integers(9)
    residual = integers(4, 6, *spatial)
    lazy = [
        da.from_array(x, chunks=(n, c, *[part] * len(spatial)))
        for x, n, c, part in zip(xs, (2, 1, 4), (2, 1, 1), (4, 2, 9))
    ]
    how = dict(activation="relu", prologue=(scale, shift, "relu"))
    y = interop.linmerge(lazy, weight, bias, residual=da.from_array(residual, chunks=2), **how)
    assert y.chunks[0] == (2, 2), "as the first array"
    assert_exact(y.compute(), cupyconv.linmerge(xs, weight, bias, residual=residual, **how), np.float64)


@pytest.mark.parametrize("groups, chunks", [(1, (6,)), (2, (3, 3)), (3, (6,)), (6, (2, 1, 3))])
@pytest.mark.parametrize("padding_mode", ["constant", "wrap"])
def test_groups_are_cut_where_chunks_of_channels_end(groups, chunks, padding_mode):
    """The weight, the bias and a prologue are cut too; the prologue's values apply to x before padding."""
    x, weight, bias = integers(2, 6, 8, 7), integers(12, 6 // groups, 3, 2), integers(12)
    how = dict(padding="same", padding_mode=padding_mode, groups=groups, prologue=(integers(6), integers(6), "relu"))
    y = interop.conv(da.from_array(x, chunks=(1, chunks, 3, 4)), weight, bias, **how)
    assert y.chunks[1] == (tuple(2 * c for c in chunks) if groups > 1 and len(chunks) > 1 else (12,))
    assert_exact(y.compute(), cupyconv.conv(x, weight, bias, **how), np.float64)


def test_a_kernel_reaches_over_many_chunks():
    """It also reaches chunks that have only padding next to them."""
    x, weight = integers(1, 1, 40), integers(1, 1, 33)
    for how in (dict(padding="full"), dict(padding=50), dict(padding=50, padding_mode="reflect")):
        y = interop.conv(da.from_array(x, chunks=(1, 1, 3)), weight, **how)
        assert_exact(y.compute(), cupyconv.conv(x, weight, **how), np.float64)


def test_infinities_and_nan_stay_where_they_are():
    x = integers(1, 2, 20)
    x[0, 0, 4], x[0, 1, 11] = np.nan, np.inf
    lazy, weight = da.from_array(x, chunks=(1, 1, 5)), np.ones((1, 2, 3))
    np.testing.assert_array_equal(interop.conv(lazy, weight, padding=1), cupyconv.conv(x, weight, padding=1))
    np.testing.assert_array_equal(interop.max_pool(lazy, 3, padding=1), cupyconv.max_pool(x, 3, padding=1))


@pytest.mark.gpu
def test_chunks_may_be_cupys():
    target = gpu_target()
    with pytest.raises(TypeError, match="weight is a cupy array, the chunks of x are numpy arrays"):
        interop.conv(X, target.to_device(W))
    x, weight = integers(2, 4, 9, 10, dtype=np.float32), integers(3, 4, 3, 3, dtype=np.float32)
    on_gpu = da.from_array(target.to_device(x), chunks=(1, 2, 4, 10), asarray=False)
    for how in (dict(padding="same"), dict(padding=2, padding_mode="edge", stride=2)):
        y, expected = interop.conv(on_gpu, target.to_device(weight), **how), cupyconv.conv(x, weight, **how)
        assert isinstance(y._meta, target.xp.ndarray)
        assert_exact(target.to_host(y.compute()), expected, np.float32)
        out = target.to_device(np.zeros_like(expected))
        assert interop.conv(on_gpu, target.to_device(weight), **how, out=out).compute() is out
        assert_exact(target.to_host(out), expected, np.float32)


# --- results in one array -------------------------------------------------------------------------------------


@pytest.fixture
def image_and_result():
    x, weight = integers(2, 3, 12, 14), integers(4, 3, 3, 3)
    return x, weight, cupyconv.conv(x, weight, padding="same")


def views_of(array, chunks):
    """Return a Dask array whose chunks are views of this array."""
    chunks = da.core.normalize_chunks(chunks, array.shape)
    cut = lambda block_info: array[tuple(slice(*ends) for ends in block_info[None]["array-location"])]  # noqa: E731
    return da.map_blocks(cut, chunks=chunks, dtype=array.dtype, meta=np.empty((0,) * array.ndim, array.dtype))


def test_out_is_written_when_it_is_computed(image_and_result):
    """Each chunk writes its part when it is computed, and the chunks are views of `out`."""
    x, weight, expected = image_and_result
    out = np.full_like(expected, np.nan)
    y = interop.conv(da.from_array(x, chunks=(1, 3, 6, 7)), weight, padding="same", out=out)
    assert np.isnan(out).all()
    assert_exact(y[1, :, :3].compute(), expected[1, :, :3], np.float64)
    is_left = np.isnan(out)
    assert is_left[0].all() and is_left[:, :, 6:].all() and not is_left[1, :, :6].any()
    kept = y.persist()
    assert_exact(out, expected, np.float64)
    is_view = kept.map_blocks(
        lambda chunk: np.full((1,) * 4, np.shares_memory(chunk, out)), chunks=(1,) * 4, dtype=bool
    )
    assert is_view.compute().all()
    out[...] = np.nan
    assert y.compute() is out and not np.isnan(out).any()


def test_what_is_made_of_a_result_in_out_is_apart(image_and_result):
    x, weight, expected = image_and_result
    out = np.empty_like(expected)
    y = interop.conv(da.from_array(x, chunks=6), weight, padding="same", out=out)
    assert_exact((y + 1).compute(), expected + 1, np.float64)
    assert_exact(out, expected, np.float64)
    for assigned in (y, interop.conv(da.from_array(x, chunks=6), weight, padding="same")):
        assigned[:, 0] = 77
        result = assigned.compute()
        assert (result[:, 0] == 77).all() and not np.shares_memory(result, out)
        assert_exact(result[:, 1:], expected[:, 1:], np.float64)
        assert_exact(out, expected, np.float64)


def test_out_may_lie_between_chunks_that_are_read_but_not_on_them(image_and_result):
    """Other tasks read the chunks before and after."""
    x, weight, expected = image_and_result
    buffer = np.zeros((2, 8, 12, 14))
    image = buffer[:, :3]
    for first in (3, 2, 0):
        image[...] = x
        lazy = interop.conv(views_of(image, (1, 3, 6, 7)), weight, padding="same", out=buffer[:, first : first + 4])
        if first == 3:
            assert_exact(lazy.compute(), expected, np.float64)
        else:
            with pytest.raises(ValueError, match="out overlaps chunks of x"):
                lazy.compute()


def test_out_may_be_the_residual_and_not_beside_it(image_and_result):
    x, weight, expected = image_and_result
    lazy, residual = da.from_array(x, chunks=(1, 3, 6, 7)), integers(2, 5, 12, 14)
    before = residual[:, :4].copy()
    for out, chunks in ((residual[:, :4], (1, 4, 6, 7)), (residual[:, :4], (2, 2, 5, 14))):
        out[...] = before
        y = interop.conv(lazy, weight, padding="same", residual=views_of(residual[:, :4], chunks), out=out)
        assert_exact(y.compute(), expected + before, np.float64)
    beside = interop.conv(
        lazy, weight, padding="same", residual=views_of(residual[:, :4], (1, 4, 6, 7)), out=residual[:, 1:]
    )
    with pytest.raises(ValueError, match="out overlaps residual"):
        beside.compute()


def test_out_is_not_sent_to_another_process(image_and_result):
    """The other process would write to a copy."""
    x, weight, expected = image_and_result
    out = np.empty_like(expected)
    y = interop.conv(da.from_array(x, chunks=6), weight, padding="same", out=out)
    with pytest.raises(TypeError, match="out is in the memory of this process"):
        pickle.dumps(y)


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("kind", [computed_views, computed_copies, copies])
def test_chunks_of_what_is_computed_whole_are_not_joined(image_and_result, results, scheduler, kind):
    """Tasks write to the array that is returned."""
    x, weight, expected = image_and_result
    y = interop.conv(kind(da.from_array(x, chunks=(1, 3, 6, 7))), weight, padding="same")
    whole = y.compute(scheduler=scheduler)
    assert_exact(whole, expected, np.float64)
    assert whole.flags.c_contiguous and len(results) == 8
    assert all(np.shares_memory(chunk, whole) for chunk in results)
    assert not np.shares_memory(y.compute(scheduler=scheduler), whole)


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("in_out", [True, False])
def test_arrays_in_memory_are_computed_at_once(image_and_result, results, scheduler, in_out):
    """The call in memory computes them with as many threads, bit for bit, and no task is made."""
    x, weight = image_and_result[0] / 3, np.concatenate([image_and_result[1]] * 2, 1) / 7
    residual = np.cos(np.arange(2 * 4 * 12 * 14.0)).reshape(2, 4, 12, 14)
    workers = dask.system.CPU_COUNT if scheduler == "threads" else 1
    call = partial(cupyconv.conv, [x, x], weight, residual=residual, padding="same")
    expected = in_threads_of(workers, current_settings(), call)
    xs, added = [da.from_array(x, chunks=size) for size in (5, (1, 2, 6, 7))], da.from_array(residual, chunks=5)
    out = np.empty_like(expected) if in_out else None
    y = interop.conv(xs, weight, residual=added, padding="same", out=out)
    results.clear()
    whole = y.compute(scheduler=scheduler)
    assert len(results) == 1 and (out is None or whole is out)
    np.testing.assert_array_equal(whole, expected)
    assert not y.dask.layers[y.name].is_materialized()


@pytest.mark.parametrize("kind", [views, copies])
def test_who_watches_sees_a_task_for_each_chunk(image_and_result, results, kind):
    """If the chunks are in memory anyway, no task cuts a halo."""
    x, weight, expected = image_and_result
    y = interop.conv(kind(da.from_array(x, chunks=(1, 3, 6, 7))), weight, padding="same")
    done = []
    with Callback(posttask=lambda *task: done.append(task)):
        assert_exact(y.compute(), expected, np.float64)
    assert len(done) == len(results) == 8


def test_chunks_that_lie_otherwise_than_in_their_array():
    """Chunks in memory are read in place if they are swapped, repeated, separate, or have elements between them."""
    x, weight = integers(1, 2, 12), integers(3, 2, 3)
    other, wider = integers(1, 2, 12, dtype=np.float64) + 1, np.repeat(x, 2, axis=2)
    a, b = x[:, :, :6], x[:, :, 6:]
    for pieces in ((a, b), (b, a), (a, a), (a, other[:, :, 6:]), (wider[:, :, :12:2], b), (a, wider[:, :, 12::2])):
        lazy = da.Array(
            {("pieces", 0, 0, i): piece for i, piece in enumerate(pieces)}, "pieces", ((1,), (2,), (6, 6)), x.dtype
        )
        assert_exact(interop.conv(lazy, weight).compute(), cupyconv.conv(np.concatenate(pieces, 2), weight), np.float64)


def test_a_result_is_in_memory_once():
    x = da.ones((1, 1, 64, 256, 64), chunks=(1, 1, 64, 64, 64))
    y = interop.conv(x, integers(1, 1, 1, 1, 1))
    for compute, times in ((y.compute, 1), (partial(da.Array.compute, y), 2)):
        tracemalloc.start()
        compute()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert times - 0.1 < peak / y.nbytes < times + 0.9, "and what a task takes, and a chunk of ones"


@pytest.mark.parametrize("in_config", [True, False])
def test_a_pool_of_processes_is_given_no_array_to_write_to(image_and_result, in_config):
    """Dask's threaded scheduler accepts such a pool too."""
    x, weight, expected = image_and_result
    y = interop.conv(da.from_array(x, chunks=(1, 3, 6, 14)), weight, padding="same")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        given = {"pool": pool}
        with dask.config.set(given if in_config else {}):
            whole = y.compute(scheduler="threads", **{} if in_config else given)
    assert_exact(whole, expected, np.float64)


def test_a_copy_by_numpy_is_not_out(image_and_result):
    x, weight, expected = image_and_result
    out = np.empty_like(expected)
    y = interop.conv(da.from_array(x, chunks=6), weight, padding="same", out=out)
    assert np.asarray(y) is out
    for array in (np.array(y), np.array(y, np.float32)):
        assert not np.shares_memory(array, out)
        assert_exact(array, expected, array.dtype)


def test_where_no_array_can_be_shared_dask_joins_chunks(image_and_result, results):
    """Dask does the same for workers elsewhere, whose memory is not known."""
    x, weight, expected = image_and_result
    y = interop.conv(da.from_array(x, chunks=(1, 3, 6, 7)), weight, padding="same")
    whole = y.compute(scheduler=lambda graph, keys, **how: dask.get(graph, keys, **how))
    assert_exact(whole, expected, np.float64)
    assert len(results) == 8 and not any(np.shares_memory(chunk, whole) for chunk in results)


# --- graphs ---------------------------------------------------------------------------------------------------


def tasks_by_layer(y):
    """Return the number of tasks per kind of layer."""
    return {name.partition("-")[0]: len(layer) for name, layer in y.dask.layers.items()}


def test_one_task_a_chunk_and_one_for_the_halos_of_each():
    x = da.zeros((2, 3, 128, 128), chunks=(1, 3, 64, 64))
    y = interop.conv(x, integers(5, 3, 3, 3), padding="same")
    assert y.chunks == ((1, 1), (5,), (64, 64), (64, 64))
    assert tasks_by_layer(y) == tasks_by_layer(x) | {"halo": 8, "call": 1, "conv": 8}


def test_no_halo_no_task_for_one():
    """There is no copy either: a task's images are views of chunks."""
    a, b = da.zeros((2, 3, 64), chunks=(1, 3, 16)), da.zeros((2, 2, 64), chunks=(1, 1, 16))
    for y in (
        interop.linmerge([a, b], integers(4, 5)),
        interop.conv([a, b], integers(4, 5, 1)),
        interop.conv_transpose([a, b], integers(5, 4, 2), stride=2),
        *interop.max_pool([a, b], 4),
    ):
        assert not tasks_by_layer(y)["halo"]
        chunk = np.ones((1, 3, 16))
        for task in dict(y.dask.layers[y.name]).values():
            for block in task[0].blocks:
                assert np.shares_memory(block.of(iter([chunk]), chunk), chunk)


def test_a_halo_is_only_what_is_read():
    """A chunk's neighbors get copies of what they read, so they do not keep the chunk in memory."""
    x = da.zeros((1, 1, 96, 64), chunks=(1, 1, 32, 64))
    y = interop.conv(x, integers(1, 1, 5, 5), padding="same", dilation=(3, 1))
    (halo,) = (layer for name, layer in y.dask.layers.items() if name.startswith("halo"))
    lent = [piece.shape for cut, _ in dict(halo).values() for piece in cut(np.zeros((1, 1, 32, 64)))]
    assert lent == [(1, 1, 6, 64)] * 4
    source = np.zeros((1, 1, 32, 64))
    assert not any(np.shares_memory(piece, source) for cut, _ in dict(halo).values() for piece in cut(source))


@pytest.fixture
def results(monkeypatch):
    """Record what tasks return."""
    seen, run = [], Operation.__call__

    def recorded(self, *args, **kwargs):
        seen.append(run(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(Operation, "__call__", recorded)
    return seen


@pytest.fixture
def images(monkeypatch):
    """Record the images that tasks convolve."""
    seen, run = [], Operation.__call__

    def recorded(self, arguments):
        seen.append(arguments["x"])
        return run(self, arguments)

    monkeypatch.setattr(Operation, "__call__", recorded)
    return seen


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_chunks_of_one_array_need_no_copy(images, mode, tmp_path):
    """With their halos they are read-only views, in memory or in a file, wherever the array has what is read."""
    in_file = np.lib.format.open_memmap(tmp_path / "image.npy", "w+", np.float32, (2, 40, 36))
    in_file[...] = integers(2, 40, 36)
    weight = integers(3, 2, 5, 3).astype(np.float32)
    settings = dict(padding="same", padding_mode=mode)
    for array in (in_file, np.array(in_file), np.array(in_file)[::-1, ::-1], np.array(in_file)[:, :, ::-1]):
        images.clear()
        y = interop.conv(views_of(array, (2, 10, 9)), weight, **settings).compute()
        assert_exact(y, reference.conv(array, weight, **settings), "float32")
        views = [x for x in images if not x.flags.writeable]  # a copy is writeable
        assert len(images) == 16 and len(views) == (4 * 4 if mode == "constant" else 2 * 2)


def test_a_chunk_that_is_a_view_of_itself_is_not_held():
    """Examples are a chunk with transposed axes, and a chunk from another process."""
    x = da.zeros((1, 1, 96, 64), chunks=(1, 1, 32, 64))
    y = interop.conv(x, integers(1, 1, 5, 5), padding="same")
    (halo,) = (layer for name, layer in y.dask.layers.items() if name.startswith("halo"))
    exchanged = np.zeros((64, 32, 1, 1)).transpose(2, 3, 1, 0)
    sent = np.frombuffer(bytearray(32 * 64 * 8)).reshape(1, 1, 32, 64)
    part = np.zeros((1, 1, 96, 64))[:, :, 32:64]
    for source, is_held in ((exchanged, False), (sent, False), (part, True)):
        pieces = [piece for cut, _ in dict(halo).values() for piece in cut(source)]
        assert len(pieces) == 4 and all(np.shares_memory(piece, source) == is_held for piece in pieces)


def test_strides_keep_chunks_aligned():
    x = da.zeros((1, 1, 96, 100), chunks=(1, 1, 32, (40, 60)))
    assert interop.conv(x, integers(1, 1, 3, 3), stride=2, padding="same").chunks[2:] == ((16,) * 3, (20, 30))
    assert interop.max_pool(x, 4).chunks[2:] == ((8,) * 3, (10, 15))
    assert interop.conv_transpose(x, integers(1, 1, 3, 3), stride=2, padding="same").chunks[3] == (80, 120)


def test_graphs_can_be_sent_and_are_told_apart():
    x, weight = da.ones((1, 1, 8), chunks=4), integers(1, 1, 3)
    y = interop.conv(x, weight)
    assert pickle.loads(pickle.dumps(y)).compute().tolist() == y.compute().tolist()
    with cupyconv.options(workspace_limit=1 << 20):
        others = [interop.conv(x, weight), interop.conv(x, weight + 1), interop.conv(x, weight, padding=1)]
    assert interop.conv(x, weight).name == y.name
    assert len({y.name, *(other.name for other in others)}) == 4


def test_what_is_computed_is_what_was_given():
    """One weight may be refilled for each of several lazy results."""
    x, weight, scale = da.ones((1, 2, 8), chunks=4), np.ones((1, 2, 3)), np.ones(2)
    first = interop.conv(x, weight, prologue=(scale, None, None))
    weight *= 5
    scale *= 7
    assert (first.compute() == 6).all()


class Metres(np.ndarray):
    unit = "m"


@pytest.mark.parametrize(
    "error, words, becomes",
    [
        (TypeError, "MaskedArray, whose mask would be lost", lambda chunk: np.ma.masked_greater(chunk, 2)),
        (TypeError, "has units", lambda chunk: chunk.view(Metres)),
        (ValueError, r"float64 of shape .* declares float32", lambda chunk: chunk.astype(np.float64)),
        (ValueError, "complex64 of shape", lambda chunk: chunk.astype(np.complex64)),
        (ValueError, r"of shape \(1, 2, 1\), but", lambda chunk: chunk[:, :, :1]),
    ],
    ids=["mask", "units", "precision", "complex", "shape"],
)
@pytest.mark.parametrize("own", [False, True], ids=["of one array", "of their own"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("length", [4, 12], ids=["of many", "one"])
def test_chunks_that_are_not_what_dask_was_told(error, words, becomes, own, in_memory, length):
    """Such chunks are refused, since a conversion would lose or repeat a part of them."""
    x = da.from_array(integers(1, 2, 12, dtype=np.float32), chunks=(1, 2, length))
    others = x.map_blocks(
        lambda chunk: becomes(chunk.copy() if own else chunk), dtype=x.dtype, meta=np.empty((0, 0, 0), x.dtype)
    )
    others = others.persist() if in_memory else others
    with pytest.raises(error, match=words):
        interop.conv(others, integers(1, 2, 9, dtype=np.float32), padding="same").compute()


@pytest.mark.parametrize("length", [4, 12], ids=["of many", "one"])
@pytest.mark.parametrize("own", [False, True], ids=["of one array", "of their own"])
def test_chunks_of_a_narrower_dtype_than_dask_was_told_are_widened(own, length):
    x = da.from_array(integers(1, 2, 12, dtype=np.float32), chunks=(1, 2, length))
    told = x.map_blocks(
        lambda chunk: chunk.copy() if own else chunk, dtype="float64", meta=np.empty((0, 0, 0), np.float64)
    )
    weight = integers(3, 2, 3, dtype=np.float32)
    result = interop.conv(told, weight, padding=1).compute()
    assert result.dtype == np.float64
    np.testing.assert_array_equal(result, cupyconv.conv(x.compute().astype(np.float64), weight, padding=1))


# --- threads and options --------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """Record the settings in force, and BLAS's numbers of threads, at each call in a task."""
    calls, run = [], Operation.__call__

    def recorded(self, *args, **kwargs):
        calls.append((current_settings(), BLAS._numbers()))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Operation, "__call__", recorded)
    return calls


def test_options_are_those_of_where_the_graph_was_made(seen):
    x = da.ones((4, 1, 8), chunks=(1, 1, 8))
    with cupyconv.options(workspace_limit=12345, threads=3):
        y = interop.conv(x, integers(1, 1, 3))
    with cupyconv.options(workspace_limit=54321):
        y.compute()
        y.persist()
    assert {(settings.workspace_limit, settings.threads) for settings, _ in seen} == {(12345, 3)}


def test_a_task_takes_one_thread(seen):
    """A task uses one thread, and one of BLAS, however many tasks run at a time; then BLAS has its old number again."""
    before = BLAS._numbers()
    y = interop.conv(da.ones((8, 4, 40), chunks=(1, 4, 40)), integers(4, 4, 3))
    y.compute(scheduler="threads", num_workers=4)
    assert len(seen) == 8
    assert all(settings.threads == 1 and set(blas) <= {1} for settings, blas in seen)
    assert BLAS._numbers() == before


@pytest.mark.parametrize("settings, each", [({}, 1), ({"threads": 3}, 3)])
@pytest.mark.parametrize(
    "how, workers",
    [
        (dict(scheduler="synchronous"), 1),
        (dict(scheduler="threads", num_workers=1), 1),
        (dict(scheduler="threads", num_workers=5), 5),
        (dict(scheduler="threads", pool=ThreadPoolExecutor(3)), 3),
        (dict(scheduler="threads", pool=ThreadPool(2)), 2),
        (dict(scheduler="threads"), dask.system.CPU_COUNT),
    ],
)
def test_a_call_in_the_place_of_all_tasks_takes_their_threads(seen, settings, each, how, workers):
    """If BLAS would use this number of threads anyway, no number is requested."""
    x, weight = np.ones((8, 4, 40)), integers(4, 4, 3)
    with cupyconv.options(**settings):
        interop.conv(da.from_array(x, chunks=(1, 4, 40)), weight).compute(**how)
    ((used, blas),) = seen
    assert used.threads == (None if workers == BLAS.threads > 1 and not settings else workers * each)
    if workers * each == 1:
        assert set(blas) <= {1}


@pytest.mark.parametrize(
    "how, words", [(dict(get=dask.get), "scheduler= keyword"), (dict(num_workers=-1), "max_workers")]
)
def test_what_dask_refuses_of_compute_is_refused_by_it(how, words):
    y = interop.conv(da.from_array(np.ones((1, 4, 40)), chunks=(1, 4, 20)), integers(4, 4, 3))
    with pytest.raises((TypeError, ValueError), match=words):
        y.compute(**({"scheduler": "threads"} | how))


# --- errors ---------------------------------------------------------------------------------------------------

X = da.ones((1, 2, 8), chunks=(1, 2, 4))
W = np.ones((3, 2, 3))


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, r"x must be a Dask array, given numpy.ndarray.*from_array", lambda: interop.conv(np.ones((1, 2, 8)), W)),
        (TypeError, r"x\[1\] must be a Dask array", lambda: interop.conv([X, np.ones((1, 2, 8))], W)),
        (TypeError, r"weight must be an array in memory.*weight\.compute", lambda: interop.conv(X, da.ones((3, 2, 3)))),
        (TypeError, r"prologue\[0\] must be an array in memory", lambda: interop.conv(X, W, prologue=(da.ones(2), None, None))),
        (TypeError, r"residual must be a Dask array", lambda: interop.conv(X, W, residual=np.ones((1, 3, 6)))),
        (ValueError, r"residual has shape \(1, 3, 8\), needed \(1, 3, 6\)", lambda: interop.conv(X, W, residual=da.ones((1, 3, 8)))),
        (TypeError, r"out must be an array in memory", lambda: interop.conv(X, W, out=da.ones((1, 3, 6)))),
        (TypeError, r"out has dtype float32, needed float64", lambda: interop.conv(X, W, out=np.ones((1, 3, 6), np.float32))),
        (ValueError, r"out has shape \(1, 3, 8\), needed \(1, 3, 6\)", lambda: interop.conv(X, W, out=np.ones((1, 3, 8)))),
        (ValueError, r"out is read-only", lambda: interop.conv(X, W, out=np.frombuffer(bytes(8 * 18)).reshape(1, 3, 6))),
        (ValueError, r"chunks of known size.*compute_chunk_sizes", lambda: interop.conv(X[:, :, X[0, 0] > 0], W)),
        (ValueError, r"takes 3 input channels", lambda: interop.conv(X, np.ones((3, 3, 3)))),
        (ValueError, r"implicit_gemm", lambda: interop.conv(X, W, method="implicit_gemm")),
        (TypeError, r"xs\[0\].*int64.*astype", lambda: interop.linmerge([X.astype(int)], np.ones((1, 2)))),
        (ValueError, r"groups 4 does not divide", lambda: interop.conv_transpose(X, np.ones((2, 3, 3)), groups=4)),
        (TypeError, r"no order", lambda: interop.max_pool(X.astype(complex), 2)),
    ],
)  # fmt: skip
def test_errors_come_with_the_call(error, words, call):
    """The call raises them, as the functions in memory do, and not the computation of the result."""
    with pytest.raises(error, match=words):
        call()


def test_ordinary_functions_name_this_module():
    with pytest.raises(TypeError, match=r"x must be a NumPy or CuPy array, not dask.*cupyconv\.interop\.dask"):
        cupyconv.conv(X, W)


def test_arrays_on_disk_are_told_the_way_in(tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    stored = zarr.create_array(tmp_path / "x.zarr", shape=(1, 2, 8), chunks=(1, 2, 4), dtype="f8")
    with pytest.raises(TypeError, match=r"zarr.*cupyconv\.interop\.dask.*from_array.*loop over blocks"):
        cupyconv.conv(stored, W)
    stored[...] = integers(1, 2, 8)
    assert_exact(interop.conv(da.from_array(stored), W).compute(), cupyconv.conv(stored[...], W), np.float64)


# --- the docstrings -------------------------------------------------------------------------------------------


def test_the_page_of_the_module_runs(tmp_path, monkeypatch):
    """The module's example, from Zarr to Zarr, runs unchanged."""
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    (page,) = re.findall(r"::\n\n((?:    import dask.*\n)(?:    .*\n|\n)*)", interop.__doc__)
    monkeypatch.chdir(tmp_path)
    volume, weight = integers(2, 6, 6, 6), integers(3, 2, 3, 3, 3)
    zarr.create_array("volume.zarr", shape=volume.shape, chunks=(2, 3, 3, 6), dtype="f8")[...] = volume
    exec("\n".join(line[4:] for line in page.splitlines()), {"weight": weight})
    expected = cupyconv.conv(volume, weight, padding="same", activation="relu")
    assert_exact(zarr.open("result.zarr", mode="r")[...], expected, np.float64)


def test_the_shorter_name():
    import cupyconv.dask

    assert cupyconv.dask.conv is interop.conv
    assert set(cupyconv.dask.__all__) == {"conv", "conv_transpose", "linmerge", "max_pool"}


def test_examples():
    results = doctest.testmod(interop, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted >= 12 and results.failed == 0
