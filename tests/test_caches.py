"""Caches between calls: they share one budget, are released on request, and hold nothing large."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from functools import partial
from itertools import count

import numpy as np
import pytest
from peak_memory import peak_bytes

import cupyconv
from cupyconv.call import operation
from cupyconv.numpy import windows
from cupyconv.numpy.backend import LINE, CachedScratch, Scratch, _Buffers, aligned_bytes, lines_apart, whole_lines
from cupyconv.problem import caches


@pytest.fixture(autouse=True)
def nothing_kept():
    cupyconv.clear_caches()
    yield
    cupyconv.clear_caches()


def conv_of_a_wide_border(padding: int) -> np.ndarray:
    x, w = np.ones((1, 1, 100), np.float32), np.ones((1, 1, 3), np.float32)
    return cupyconv.conv(x, w, padding=padding, padding_mode="wrap")


def kept_after(*calls) -> int:
    """Return the bytes in use after the calls that were not in use before them."""
    gc.collect()
    tracemalloc.start()
    try:
        for call in calls:
            call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_budget_is_that_of_all_together(monkeypatch):
    """Index arrays of a padding mode were once limited by their number: 20 calls cached 1 GiB."""
    monkeypatch.setattr(caches, "BUDGET", 1 << 20)
    monkeypatch.setattr(caches, "LARGEST", 1 << 18)
    calls = [partial(conv_of_a_wide_border, 4000 + i) for i in range(40)]
    conv_of_a_wide_border(10)  # imports and sets up what is needed once
    assert kept_after(*calls) < (1 << 20) + 100_000
    assert 0 < caches.spent() <= 1 << 20


def test_what_is_large_is_not_kept():
    """The slices of a window of 100,000 taps once took 345 MB."""
    x = np.ones((1, 1, 20_000), np.float32)
    cupyconv.max_pool(x, 3)
    assert kept_after(lambda: cupyconv.max_pool(x, 10_000, stride=1)) < caches.LARGEST
    assert caches.spent() < caches.LARGEST


def test_what_it_counts_is_what_is_held():
    def call():
        cupyconv.conv(np.ones((2, 3, 16, 16), np.float32), np.ones((4, 3, 3, 3), np.float32))

    call()
    cupyconv.clear_caches()
    held = kept_after(call)
    assert 0.7 * held < caches.spent() < 2 * held


def test_what_is_held_twice_is_counted_once():
    part, loop = bytes(100_000), []
    loop += [part, loop]
    alone = caches.held_bytes([part])
    assert 100_000 <= alone < 100_300
    assert caches.held_bytes([part, part]) < alone + 100 and caches.held_bytes(loop) < alone + 100
    assert caches.held_bytes([part, 1], shared=[part]) < 300


def test_a_view_holds_what_it_is_of():
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(100_000, np.uint8), 3)
    assert 100_000 <= caches.held_bytes([windows[1:], windows[2:]]) < 103_000


def test_a_full_cache_lets_go_of_what_was_not_used_for_longest():
    cache = caches.Cache(2)
    cache.keep("first", 1)
    cache.keep("second", 2)
    assert cache.get("first") == 1
    cache.keep("third", 3)
    assert [cache.get(key) for key in ("first", "second", "third")] == [1, None, 3] and len(cache) == 2
    before = caches.spent()
    cache.keep("third", 4)  # replaces its own entry
    assert (cache.get("first"), cache.get("third"), caches.spent()) == (1, 4, before)


class CallsWithin:
    """A key whose hash makes a call in the middle of a cache operation, as a signal handler may."""

    def __init__(self, call) -> None:
        self.call = call

    def __hash__(self) -> int:
        call, self.call = self.call, lambda: None
        call()
        self.call = call
        return 0


@pytest.mark.parametrize("within", ["keep", "clear"])
def test_a_call_in_the_midst_of_letting_go(within, monkeypatch):
    """The inner call once evicted what the outer one was about to look up: a convolution raised KeyError."""
    cache, others = caches.Cache(4), count()
    calls = {"keep": lambda: [cache.keep(next(others), None) for _ in range(3)], "clear": cache.clear}
    keys = [CallsWithin(calls[within]) for _ in range(20)]
    monkeypatch.setattr(caches, "BUDGET", caches.spent() + 3000)
    for key in keys:
        cache.keep(key, bytes(500))
    assert len(cache) <= 5  # the inner call cached one entry in the space of the outer call's entry
    for key in keys:
        key.call = lambda: None
    cache.clear()
    assert len(cache) == 0 and caches.spent() == 0


def test_what_a_call_within_keeps_by_the_same_key_is_counted_once():
    cache, before = caches.Cache(4), caches.spent()
    key = CallsWithin(lambda: cache.keep(key, bytes(500)))
    cache.keep(key, bytes(500))
    assert len(cache) == 1
    cache.clear()
    assert caches.spent() == before


def test_what_was_not_used_for_longest_goes_first_whichever_cache_it_is_in(monkeypatch):
    monkeypatch.setattr(caches, "BUDGET", 3000)
    one, other = caches.Cache(10), caches.Cache(10)
    one.keep("oldest", bytes(1000))
    other.keep("older", bytes(1000))
    other.keep("latest", bytes(1000))
    assert one.get("oldest") is None and other.get("older") and other.get("latest")
    assert caches.spent() <= 3000


def test_as_much_as_the_budget_may_be_reserved_but_for_what_one_large_thing_needs():
    """Gradient memory in four dtypes once left space for one cached call; twenty in turn took 80 times as long each."""
    cache, most = caches.Cache(30), caches.BUDGET - caches.LARGEST
    for number in range(20):
        cache.keep(number, number, at_most=caches.LARGEST)
    assert caches.spent() == 16 * caches.LARGEST == caches.BUDGET
    assert caches.reserve(most - 1) and len(cache) == 1
    assert caches.reserve(1) is True and caches.reserve(1) is False and caches.spent() == caches.BUDGET
    assert cache.get(19) == 19
    caches.release(most)
    assert caches.spent() == caches.LARGEST


def test_what_was_released_may_be_reserved_or_kept_again_at_once():
    cache, most = caches.Cache(30), caches.BUDGET - caches.LARGEST
    for _ in range(3):
        assert caches.reserve(most)
        caches.release(most)
    assert caches.reserve(most)
    cache.keep("first", 1, at_most=caches.LARGEST)
    caches.release(most)
    cache.keep("second", 2, at_most=caches.LARGEST)
    assert (cache.get("first"), cache.get("second")) == (1, 2)


def test_as_much_as_is_large_is_kept_and_no_more(monkeypatch):
    cache = caches.Cache(10)
    monkeypatch.setattr(caches, "LARGEST", caches.held_bytes(("key", bytes(1000))))
    cache.keep("key", bytes(1001))
    assert cache.get("key") is None
    cache.keep("key", bytes(1000))
    assert cache.get("key")


def test_a_full_cache_of_many_lets_go_of_an_eighth_more():
    cache = caches.Cache(16)
    for key in range(17):
        cache.keep(key, key)
    assert [key for key in range(17) if cache.get(key) is None] == [0, 1, 2]


def test_forms_are_made_once_each_and_so_many_at_the_most():
    forms, made = caches.Forms(), count()
    keys = list(range(caches.MAX_FORMS))
    for _ in range(2):
        assert [forms.keep(key, lambda: next(made)) for key in keys] == [forms.get(key) for key in keys] == keys
    assert forms.keep("one more", lambda: next(made)) is forms.get("one more") is None
    assert next(made) == len(keys)


def test_forms_live_as_long_as_the_view_that_they_are_of():
    array = np.ones(3)
    view, before = caches.keeping_forms(array), len(caches._forms)
    assert caches.forms_of(view) and not caches.forms_of(array) and not caches.forms_of(view[:])
    np.testing.assert_array_equal(view, array)
    del view
    gc.collect()
    assert len(caches._forms) == before - 1


def test_what_waits_for_clearing_comes_after_all_that_gives_back(monkeypatch):
    called: list[str] = []
    for name in ("_clearers", "_after_clearing"):
        monkeypatch.setattr(caches, name, [])
    caches.after_clearing(lambda: called.append("after"))
    caches.on_clear(lambda: called.append("gives back"))
    cupyconv.clear_caches()
    assert called == ["gives back", "after"]


def test_clear_caches_gives_everything_back():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 64, 30, 30)).astype(np.float32)
    w = rng.standard_normal((64, 64, 3, 3)).astype(np.float32)
    expected = cupyconv.conv(x, w)
    assert cupyconv.explain(cupyconv.conv, x, w).method == "winograd"
    cupyconv.clear_caches()

    def call():
        np.testing.assert_array_equal(cupyconv.conv(x, w), expected)
        cupyconv.clear_caches()

    call()
    assert kept_after(call) < 50_000
    assert caches.spent() == 0 and not operation._executables


@pytest.mark.parametrize("itemsize", [2, 4, 8, 16])
def test_rows_are_whole_lines_and_follow_each_other_in_other_places_of_the_cache(itemsize):
    """Rows need as few lines as possible, or one more; the L1 cache stores a line in one of 64 places."""
    for elements in range(1, 5000):
        whole, apart = (rows(elements, itemsize) * itemsize for rows in (whole_lines, lines_apart))
        assert elements * itemsize <= whole < elements * itemsize + LINE and whole % LINE == 0
        places = {row * apart // LINE % 64 for row in range(8)}
        assert apart in (whole, whole + LINE) and len(places) == 8
        assert apart == whole or whole // LINE % 16 == 0


def test_memory_begins_where_a_line_does():
    for nbytes in (1, 100, 4096):
        memory = aligned_bytes(nbytes)
        assert memory.nbytes == nbytes and memory.__array_interface__["data"][0] % LINE == 0


def test_scratch_memory_of_several_rounds_is_a_threads_own_and_overwritten():
    scratch = Scratch(np.dtype(np.float32), rounds=2)
    first = scratch.array("tile", (10, 10))
    assert first.flags.c_contiguous and first.dtype == np.float32
    assert np.shares_memory(first, scratch.array("tile", (25,), np.dtype(np.float64)))
    assert not np.shares_memory(first, scratch.array("columns", (10, 10)))
    others = []
    thread = threading.Thread(target=lambda: others.append(scratch.array("tile", (10, 10))))
    thread.start()
    thread.join()
    assert not np.shares_memory(first, others[0])
    larger = scratch.array("tile", (10, 11))
    assert not np.shares_memory(first, larger) and np.shares_memory(larger, scratch.array("tile", (10, 10)))
    assert peak_bytes(lambda: [scratch.array("rows", (size,)).nbytes for size in (100_000, 110_000)]) < 500_000
    alone = Scratch(np.dtype(np.float32), rounds=1)
    assert not np.shares_memory(alone.array("tile", (4,)), alone.array("tile", (4,)))


def test_views_of_scratch_memory_are_made_once_while_it_stays():
    scratch, made, owners = Scratch(np.dtype(np.float32), rounds=2), count(), [object() for _ in range(300)]

    def views(owner: object, size: int = 10) -> int:
        scratch.array("tile", (10,))
        return scratch.views(owner, size, ("tile",), lambda: next(made))

    assert [views(owners[0]), views(owners[0]), views(owners[0], 11), views(owners[1])] == [0, 0, 1, 2]
    scratch.array("tile", (20,))
    assert views(owners[0]) == 3
    buffers = scratch._buffers
    assert buffers is not None
    sizes = [len(buffers) for owner in owners if views(owner) > 3 or owner is owners[0]]
    assert 100 < max(sizes) <= 128 and min(sizes[140:]) < 20 and len(sizes) == len(owners)
    of_others = [scratch.views(made, 10, ("tile", "columns"), lambda: next(made)) for _ in range(2)]
    assert of_others[0] < of_others[1]  # their memory is not cached
    alone = Scratch(np.dtype(np.float32), rounds=1)
    assert [alone.views(owners[0], 10, ("tile",), lambda: next(made)) for _ in range(2)] == [305, 306]


def test_the_scratch_memory_of_a_thread_that_has_ended_counts_no_more():
    scratch = CachedScratch(np.dtype(np.float32))

    def use():
        scratch.array("tile", (1000,))[...] = 1

    before = caches.spent()
    use()
    assert caches.spent() == before + 4000 + LINE
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    del thread  # from Python 3.14 on, it holds the context in which it ran
    gc.collect()
    assert caches.spent() == before + 4000 + LINE
    scratch.array("tile", (2000,))
    assert caches.spent() == before + 8000 + LINE
    cupyconv.clear_caches()
    assert caches.spent() == 0


def test_scratch_memory_beyond_the_budget_is_fresh(monkeypatch):
    monkeypatch.setattr(caches, "BUDGET", 1000)
    scratch = CachedScratch(np.dtype(np.float32))
    large = scratch.array("tile", (1000,))
    assert large.nbytes == 4000 and caches.spent() == 0
    assert not np.shares_memory(large, scratch.array("tile", (1000,)))


def test_a_buffer_is_given_back_while_another_thread_gives_all_back():
    buffers, ended, interval = _Buffers(), threading.Event(), sys.getswitchinterval()

    def keep_and_clear() -> None:
        while not ended.is_set():
            buffers.update(((number, "size"), None) for number in range(30))
            buffers.clear()

    other = threading.Thread(target=keep_and_clear)
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        for _ in range(60_000):
            buffers["columns"] = np.empty(1)
            buffers.give_back("columns")
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(interval)


def test_clearing_while_others_compute():
    """Another thread clears the caches again and again while this one computes."""
    x, w = np.ones((8, 64, 20, 20), np.float32), np.ones((64, 64, 3, 3), np.float32)
    expected, done = cupyconv.conv(x, w), threading.Event()

    def clear() -> None:
        while not done.is_set():
            cupyconv.clear_caches()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(30):
            np.testing.assert_array_equal(cupyconv.conv(x, w), expected)
    finally:
        done.set()
        thread.join()
    cupyconv.clear_caches()
    gc.collect()
    assert caches.spent() == 0


@pytest.mark.parametrize("mode", ["wrap", "reflect", "edge", "symmetric"])
def test_index_arrays_of_borders_are_within_the_limit(mode):
    """With a border of 10**6 elements and a limit of 1 MiB, they once took 986 MiB."""
    x, w, limit = np.ones((1, 1, 100), np.float32), np.ones((1, 1, 3), np.float32), 1 << 20
    with cupyconv.options(workspace_limit=limit):
        call = partial(cupyconv.conv, x, w, padding=200_000, padding_mode=mode)
        out = call()
        cupyconv.clear_caches()
        peak = peak_bytes(partial(call, out=out))
    assert peak <= limit + caches.spent() + 200_000


def test_index_arrays_of_a_wide_border_are_kept_within_the_budget():
    """They have dozens of megabytes, as the documentation says, although the call's limit is 1 MiB."""
    grad, w = np.ones((1, 1, 2 * 10**6 + 98), np.float32), np.ones((1, 1, 3), np.float32)
    with cupyconv.options(workspace_limit=1 << 20):
        cupyconv.conv_grad_input(grad, w, (1, 1, 100), padding=10**6, padding_mode="wrap")
    assert 12 << 20 < caches.spent() <= caches.BUDGET


def test_show_config_says_what_is_kept(capsys):
    cupyconv.show_config()
    assert "of at most 64 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [None, 20_000])
@pytest.mark.parametrize("shape", [(40,), (20, 20), (9, 9, 9)])
def test_bytes_that_are_not_counted_up_are_bounded(shape, limit):
    """The bytes of what blocks read are a bound, since counting them took longer than computing what is cached."""
    x = np.ones((2, 4, *shape), np.float32)
    for size in (1, 2, 5):
        w = np.ones((4, 4, *(size,) * len(shape)), np.float32)
        with cupyconv.options(workspace_limit=limit):
            cupyconv.conv(x, w, padding="same")
            cupyconv.conv(x, w, padding="same", method="direct")
            cupyconv.conv_transpose(x, w, stride=2, padding=size // 2, method="direct")
    for cache in (windows._TAP_REGIONS, windows._TILE_REGIONS):
        assert len(cache)
        for key, entry in cache._entries.items():
            for name in dir(key[0]):  # a geometry caches the properties that are read
                getattr(key[0], name)
            assert caches.held_bytes((key, entry.value)) <= entry.nbytes
