"""A call's analysis of its arrays, checked element by element: memory for `out`, and views for backends."""

from __future__ import annotations

from math import prod
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv.call.aliasing import OutMemory
from cupyconv.call.arguments import Axes
from cupyconv.call.dispatch import backend_for


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def a_view(random: Random, memory: np.ndarray) -> np.ndarray:
    """Return a random view of the memory, also with negative strides: no element occurs twice, and it may be empty."""
    view = memory.view(random.choice((np.float32, np.float64)))
    view = view.reshape(4, -1) if random.random() < 0.7 else view
    for _ in range(random.randrange(3)):
        cut = [
            slice(random.randrange(3), random.choice((None, -1, 5)), random.choice((1, 1, 2, 3))) for _ in view.shape
        ]
        view = view[tuple(cut)]
        view = view[tuple(slice(None, None, random.choice((1, -1))) for _ in view.shape)]
    return view.T if random.random() < 0.3 else view


def with_other_steps(array: np.ndarray) -> np.ndarray:
    """Return the same elements with other strides along axes of length 1, where strides have no effect."""
    strides = [step if extent > 1 else 24 for extent, step in zip(array.shape, array.strides)]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def bytes_of(array: np.ndarray) -> set[int]:
    places = np.full(array.shape, address(array), np.int64)
    for axis, (extent, step) in enumerate(zip(array.shape, array.strides)):
        places += np.arange(extent).reshape(-1, *(1,) * (array.ndim - axis - 1)) * step
    return {place + byte for place in places.ravel().tolist() for byte in range(array.itemsize)}


def test_an_out_is_refused_where_an_element_of_it_is_another_arguments():
    """`out` is refused only if it shares an element with another argument; interleaved views share none.

    It may be exactly the residual.
    """
    random, seen = Random(0), []
    memory = np.zeros(48 * 8, np.uint8)
    for _ in range(600):
        arrays = {name: a_view(random, memory) for name in ("x", "residual", "out")}
        if random.random() < 0.2:
            arrays["residual"] = with_other_steps(arrays["out"])
        out, x, residual = arrays["out"], arrays["x"], arrays["residual"]
        same = residual.dtype == out.dtype and residual.shape == out.shape and address(residual) == address(out)
        steps = [[step for step, n in zip(one.strides, one.shape) if n > 1] for one in (residual, out)]
        meets = [bool(bytes_of(out) & bytes_of(x)), bool(bytes_of(out) & bytes_of(residual))]
        expected = meets[0] or (meets[1] and not (same and steps[0] == steps[1]))
        memory_of = OutMemory(arrays, ["out"], "residual")
        try:
            memory_of.check(tuple(arrays.values()), backend_for(arrays))
            refused = False
        except ValueError as refusal:
            refused = True
            assert "overlaps x" in str(refusal) if meets[0] else "overlaps residual" in str(refusal)
        assert refused == expected
        if out.size:
            assert memory_of.is_residual(arrays, address) == (same and steps[0] == steps[1])
        seen.append((expected, *meets))
    assert len(set(seen)) >= 5, "every kind of meeting"


def test_an_out_of_which_nobody_can_say_is_refused():
    """`out` is refused if nobody can quickly decide whether it overlaps: for these arrays NumPy needs a minute."""
    itemsize = np.dtype(np.float32).itemsize

    def laid_out(place: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> SimpleNamespace:
        strides = tuple(itemsize * step for step in steps)
        return SimpleNamespace(shape=shape, strides=strides, dtype=np.dtype(np.float32), place=itemsize * (1 + place))

    x = laid_out(0, (1049, 1049, 1049), (36674, 61119, 85569))
    out = laid_out(64023025, (1049, 1049, 1), (12223, 12224, 1))
    backend: Any = SimpleNamespace(address=lambda array: array.place)
    with pytest.raises(ValueError, match="out overlaps x"):
        OutMemory({"x": x, "out": out}, ["out"], "residual").check((x, out), backend)


@pytest.mark.parametrize("spatial", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batched", [True, False])
def test_images_are_described_as_they_are_viewed(spatial, batched):
    """Images are described with a batch axis and three spatial axes, and are copied only if there is no such view."""
    random, copies = Random(spatial), 0
    for _ in range(60):
        axes = Axes(batched, spatial)
        order = list(range(spatial + 1 + batched))
        if random.random() < 0.5:
            random.shuffle(order)
        shape = [random.randrange(1, 4) for _ in order]
        image = np.arange(prod(shape) * 2.0).reshape(*shape, 2)[..., 0].transpose(order)
        if random.random() < 0.5:
            image = image[..., ::-1]
        copied: list[Any] = []

        def copy(one: np.ndarray, copied: list[Any] = copied) -> np.ndarray:
            copied.append(one)
            return np.ascontiguousarray(one)

        view = axes.view(image, copy)
        described = axes.describe("x", "float64", image.shape, image.strides, address(image))
        with_n = image if batched else image[None]
        assert (
            bool(copied)
            == axes.needs_copy(with_n.shape, with_n.strides)
            == (spatial > 3 and not shares(with_n, spatial))
        )
        assert axes.are_the_backends == (view is image)
        three = (*view.shape[:2], *(1,) * (5 - view.ndim), *view.shape[2:])
        assert described.shape == three and np.array_equal(view.reshape(with_n.shape), with_n)
        steps = (*view.strides[:2], *(0,) * (5 - view.ndim), *view.strides[2:])
        assert described.strides == tuple(step // 8 if extent > 1 else 0 for step, extent in zip(steps, three))
        back = axes.give_back(view, image.shape[-spatial:])
        assert back.shape == image.shape and np.array_equal(back, image)
        copies += len(copied)
    assert (copies > 0) == (spatial > 3)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [(7,), (7, 6), (5, 6, 7)])
def test_a_result_without_samples_lies_as_one_of_them(size, channels_last):
    x, weight = np.ones((2, 3, *size), np.float32), np.ones((4, 3, *(2 for _ in size)), np.float32)
    if channels_last:
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    several, one = cupyconv.conv(x, weight), cupyconv.conv(x[0], weight)
    assert one.strides == several.strides[1:] and (one.strides[0] == one.itemsize) == channels_last


def shares(image: np.ndarray, spatial: int) -> bool:
    """Whether the leading spatial axes can be merged into one without a copy."""
    joined = image.reshape(*image.shape[:2], prod(image.shape[2:-2]), *image.shape[-2:])
    return np.shares_memory(joined, image)
