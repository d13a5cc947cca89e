"""`options`: settings of the calls inside a block, and of no others."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cupyconv
from cupyconv.call.options import Settings, current_settings
from cupyconv.numpy.transposed import FiniteWeight
from cupyconv.numpy.weight_exchanged import ExchangedLoops
from cupyconv.problem.problems import METHODS

DEFAULTS = Settings()


def test_the_defaults():
    assert current_settings() == DEFAULTS
    assert DEFAULTS == Settings(workspace_limit=None, allow_tf32=False, threads=None)


def test_a_block_has_its_settings_and_gives_them_back():
    with cupyconv.options(workspace_limit=1000, threads=2) as inside:
        assert inside == current_settings() == Settings(workspace_limit=1000, threads=2)
    assert current_settings() == DEFAULTS


def test_a_setting_left_out_has_its_default_whatever_encloses():
    with cupyconv.options(workspace_limit=1000, allow_tf32=True):
        with cupyconv.options(threads=3):
            assert current_settings() == Settings(threads=3)
        assert current_settings() == Settings(workspace_limit=1000, allow_tf32=True)


def test_an_exception_leaves_the_block_as_any_end_does():
    with pytest.raises(ZeroDivisionError), cupyconv.options(threads=2):
        raise ZeroDivisionError
    assert current_settings() == DEFAULTS


def test_values_like_integers_are_integers():
    with cupyconv.options(workspace_limit=np.int64(5), threads=np.uint8(2)) as settings:
        assert (settings.workspace_limit, settings.threads) == (5, 2)
        assert type(settings.workspace_limit) is type(settings.threads) is int
    with cupyconv.options(workspace_limit=0) as settings:
        assert settings.workspace_limit == 0


def test_nothing_happens_before_the_block_begins():
    waiting = cupyconv.options(threads=2)
    assert current_settings() == DEFAULTS
    with waiting:
        assert current_settings().threads == 2


def test_one_object_many_blocks():
    """One `options` object serves blocks that follow each other or are nested."""
    two, three = cupyconv.options(threads=2), cupyconv.options(threads=3)
    for _ in range(2):
        with two:
            assert current_settings().threads == 2
    with two, three, two:
        assert current_settings().threads == 2
    with two:
        with three, two:
            pass
        assert current_settings().threads == 2
    assert current_settings() == DEFAULTS


def test_one_object_in_two_threads_at_once():
    """Two threads enter the same object, one after the other, and leave it in that order."""
    shared = cupyconv.options(threads=2)
    both_inside, first_out = threading.Barrier(2, timeout=10), threading.Event()

    def first() -> tuple[Settings, Settings]:
        with shared:
            both_inside.wait()
            inside = current_settings()
        return inside, current_settings()

    def second() -> tuple[Settings, Settings]:
        with shared:
            both_inside.wait()
            first_out.wait(10)
            inside = current_settings()
        return inside, current_settings()

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(first), pool.submit(second)
        running[0].add_done_callback(lambda _: first_out.set())
    assert [future.result() for future in running] == [(Settings(threads=2), DEFAULTS)] * 2


def test_new_threads_begin_with_the_defaults():
    """Python 3.14 lets a thread inherit the context of its starter, and its settings, if there is no GIL."""
    inherits, seen = getattr(sys.flags, "thread_inherit_context", False), []
    with cupyconv.options(threads=2):
        thread = threading.Thread(target=lambda: seen.append(current_settings()))
        thread.start()
        thread.join()
    assert seen == [Settings(threads=2) if inherits else DEFAULTS]


def test_a_copied_context_has_its_settings_for_itself():
    """A copied context, such as that of an asyncio task, keeps its own settings."""
    with cupyconv.options(threads=2):
        copied = contextvars.copy_context()

        def inside() -> None:
            assert current_settings().threads == 2
            with cupyconv.options(threads=3):
                assert current_settings().threads == 3

        copied.run(inside)
        assert current_settings().threads == 2


def test_settings_are_those_at_the_call(target):
    """Settings are those at the call, not those where the arrays or the library came from."""
    x = target.to_device(np.ones((4, 4, 40, 40), np.float32))
    weight = target.to_device(np.ones((4, 4, 3, 3), np.float32))

    def workspace() -> int:
        return cupyconv.explain(cupyconv.conv, x, weight, method="gemm").workspace_bytes

    unlimited = workspace()
    limit = unlimited // 4
    with cupyconv.options(workspace_limit=limit):
        assert 0 < workspace() <= limit < unlimited
    assert workspace() == unlimited


def test_threads_of_the_numpy_backend():
    x, weight = np.ones((8, 8, 64, 64)), np.ones((8, 8, 3, 3))
    with cupyconv.options(threads=3):
        assert cupyconv.explain(cupyconv.conv, x, weight).steps[0].threads == 3


def test_tf32_is_asked_for(cuda_target):
    x = cuda_target.to_device(np.ones((1, 64, 40, 40), np.float32))
    weight = cuda_target.to_device(np.ones((64, 64, 3, 3), np.float32))
    compute_types = []
    for allowed in (False, True):
        cuda_target.device.log.clear()
        with cupyconv.options(allow_tf32=allowed):
            cupyconv.conv(x, weight, method="gemm")
        compute_types += [{record.compute_type for record in cuda_target.device.log if hasattr(record, "compute_type")}]
    assert compute_types == [{68}, {77}]


@pytest.mark.parametrize(
    "function, shapes, settings",
    [
        (cupyconv.conv, [(2, 256, 20, 20), (16, 256, 3, 3)], {}),
        (cupyconv.conv, [(2, 256, 20, 20), (256, 1, 3, 3)], {"groups": 256}),
        (cupyconv.conv_transpose, [(2, 64, 12, 12), (64, 32, 3, 3)], {"stride": 2}),
        (cupyconv.conv_grad_weight, [(2, 8, 18, 18), (2, 64, 20, 20), (3, 3)], {}),
        (cupyconv.max_pool, [(2, 16, 30, 30), (3, 3)], {}),
        (cupyconv.avg_pool, [(2, 16, 30, 30), (3, 3)], {}),
        (cupyconv.lstm, [(3, 4, 16), (128, 16), (128, 32)], {}),
    ],
    ids=["conv", "depthwise", "transposed", "weight gradient", "max pool", "avg pool", "lstm"],
)
def test_threads_are_as_many_as_the_limit_has_room_for(function, shapes, settings):
    """More threads do not exclude a method that one thread has."""
    arguments = [np.ones(shape) if len(shape) > 2 or function is cupyconv.lstm else shape for shape in shapes]
    with cupyconv.options(workspace_limit=500_000):
        one = cupyconv.explain(function, *arguments, **settings)
    with cupyconv.options(workspace_limit=500_000, threads=10**6):
        named = {"method": one.method} if one.method in METHODS else {}
        many = cupyconv.explain(function, *arguments, **settings, **named)
    assert many.method == one.method and many.workspace_bytes <= 500_000
    (step, *_) = many.steps
    if isinstance(step, (FiniteWeight, ExchangedLoops)):
        (loop, *_) = step.loops
        step = getattr(loop, "convolution", loop)
    assert 1 <= step.threads < 10**6


def test_blocks_end_in_any_order():
    """If generators alternate, the outer block may end first."""

    def with_threads(threads):
        with cupyconv.options(threads=threads):
            yield
            yield current_settings().threads

    outer, inner = with_threads(2), with_threads(3)
    next(outer), next(inner)
    outer.close()
    assert next(inner) == 3
    inner.close()
    assert current_settings() == Settings()


def test_the_end_of_a_block_is_that_of_the_one_around_it():
    with cupyconv.options(threads=2), cupyconv.options(threads=3):
        with cupyconv.options(threads=4):
            pass
        assert current_settings().threads == 3


def test_a_block_may_end_where_it_did_not_begin():
    """Another thread may close a generator that is inside a block; there is nothing to restore in that thread."""

    def with_threads():
        with cupyconv.options(threads=2):
            yield

    entered = with_threads()
    contextvars.copy_context().run(next, entered)
    with cupyconv.options(threads=3):
        entered.close()
        assert current_settings().threads == 3
    assert current_settings() == DEFAULTS


def test_an_event_loop_closes_an_asynchronous_generator_within_a_block():
    """The loop closes it in a task that has not entered the block; errors there reach only the loop's handler."""
    unhandled = []

    async def with_threads() -> AsyncIterator[int]:
        with cupyconv.options(threads=2):
            yield 1
            yield 2

    async def first_of(each: AsyncIterator[int]) -> int:
        async for one in each:
            return one
        raise AssertionError

    async def main() -> Settings:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        each = with_threads()
        assert await asyncio.create_task(first_of(each)) == 1
        del each
        gc.collect()
        await asyncio.sleep(0.01)
        return current_settings()

    assert asyncio.run(main()) == DEFAULTS
    assert unhandled == []
