"""The tiles, windows, columns and parts of them that a block of a convolution reads, against the padded image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peak_memory import peak_bytes
from strategies import PADDING_MODES, share_of_examples

from cupyconv.numpy import windows
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.windows import (
    FEW_BESIDE,
    INDEX_ARRAYS,
    INDEX_BYTES,
    Block,
    Blocks,
    Images,
    _together,
    add,
    added_together,
    axis_segments,
    copy,
    line_regions,
    phase_reach,
    phase_regions,
    read,
    tap_regions,
    tile_regions,
    tile_shape,
    tile_size,
    whole_and_rest,
)
from cupyconv.problem.caches import held_bytes
from cupyconv.problem.geometry import ConvGeometry


class Written(Scratch):
    """Scratch memory that is full of NaN, so that elements that are not written show."""

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype | None = None) -> np.ndarray:
        array = super().array(name, shape, dtype)
        array.fill(np.nan)
        return array


@dataclass
class Case:
    """A convolution, its inputs in their layouts and as one padded image, and its blocks."""

    geometry: ConvGeometry
    images: Images
    x: np.ndarray
    padded: np.ndarray
    size: tuple[int, int, int, int]
    part: int | None

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.geometry, self.size, 4, self.part)

    def ranges(self, block: Block) -> list[range]:
        return [range(axis.start, axis.stop) for axis in (block._samples, *block._at[2:])]

    def windows(self, block: Block) -> np.ndarray:
        """Return all windows: (channels, kd, kh, kw, samples, d, h, w)."""
        samples, *pixels = self.ranges(block)
        taken, own = self.padded[samples.start : samples.stop], self.geometry
        for axis, outputs in enumerate(pixels):
            taps = np.arange(own.kernel[axis])[:, None] * own.dilation[axis]
            taken = np.take(taken, taps + np.array(outputs) * own.stride[axis], 2 + 2 * axis)
        return taken.transpose(1, 2, 4, 6, 0, 3, 5, 7)

    def tile(self, block: Block) -> np.ndarray:
        """Return the tile that contains these windows."""
        samples, *pixels = self.ranges(block)
        size = tile_size(self.geometry, [len(each) for each in pixels])
        begin = [each.start * stride for each, stride in zip(pixels, self.geometry.stride)]
        at: Any = tuple(slice(first, first + count) for first, count in zip(begin, size))
        return self.padded[(slice(samples.start, samples.stop), slice(None), *at)].swapaxes(0, 1)


def any_case(random: Random) -> Case:
    def three(of: Any) -> Any:
        return tuple(of() for _ in range(3))

    mode = random.choice(("constant", *PADDING_MODES))
    kernel, stride, dilation = (three(lambda most=most: random.randint(1, most)) for most in (3, 2, 2))
    if random.random() < 0.1:
        kernel = (1, 9, 8)
    size = tuple((k - 1) * d + random.randint(1, 5) for k, d in zip(kernel, dilation))
    before, after = (tuple(random.randint(0, min(2, extent - 1)) for extent in size) for _ in range(2))
    if random.random() < 0.3:
        before = after = (0, 0, 0)
    groups = random.choice((1, 1, 2, 3))
    channels = groups * random.randint(1, 3)
    of_first = random.choice((1, channels // groups * random.randint(1, groups)))
    parts = (channels,) if channels == of_first or random.random() < 0.5 else (of_first, channels - of_first)
    batch = random.randint(1, 4)
    geometry = ConvGeometry(
        batch=batch, channels=parts, size=size, kernel=kernel, stride=stride, before=before, after=after,
        dilation=dilation, padding_mode=mode, rank=3, out_channels=2 * groups, groups=groups,
    )  # fmt: skip
    x = np.random.default_rng(random.getrandbits(32)).standard_normal((batch, channels, *size), np.float32)
    padding = [(0, 0), (0, 0), *zip(before, after)]
    inputs, first = [], 0
    for part in parts:
        own = x[:, first : first + part].copy()
        if random.random() < 0.3:
            own = np.moveaxis(np.moveaxis(own, 1, -1).copy(), -1, 1)
        inputs.append((own, slice(first, first + part)))
        first += part
    images = Images(inputs, Written(np.dtype(np.float32), random.choice((1, 2))), None)
    axes = (batch, *geometry.out_size)
    block: Any = tuple(random.randint(1, extent) for extent in axes) if random.random() < 0.7 else axes
    part = random.choice((None, 1, 2)) if groups > 1 else None
    return Case(geometry, images, x, np.pad(x, padding, mode), block, part)  # type: ignore[call-overload]


@pytest.fixture(params=["all zeros at once", "zeros of a border"])
def few_zeros(request, monkeypatch):
    """Let tiles be small or large: in a large one, zeros are written only where there are some."""
    if request.param == "zeros of a border":
        monkeypatch.setattr(windows, "_SMALL_TILE", 0)


@share_of_examples(2)
@given(st.integers(0, 10**9))
def test_columns_and_tiles_are_of_the_padded_image(few_zeros, seed):
    random = Random(seed)
    case = any_case(random)
    geometry, images = case.geometry, case.images
    blocks = [*case.blocks]
    for block in random.sample(blocks, min(3, len(blocks))):
        of_windows, tile = case.windows(block), case.tile(block)
        assert tile.shape == tile_shape(geometry, images.channels, block.size)
        np.testing.assert_array_equal(images.columns(block), of_windows)
        matrix = images.matrix(block)
        np.testing.assert_array_equal(matrix, of_windows.reshape(matrix.shape))
        assert images.matrix(block).ctypes.data % 64 == 0 or block.area * 4 > 64
        np.testing.assert_array_equal(images.tile(block), tile)
        np.testing.assert_array_equal(images.tile_or_view(block), tile)
        whole = np.full([extent + random.randint(0, 2) for extent in tile.shape[2:]], np.nan, np.float32)
        whole = np.broadcast_to(whole, (*tile.shape[:2], *whole.shape)).copy()
        images.read_tile(block, whole)
        at: Any = (..., *map(slice, tile.shape[2:]))
        np.testing.assert_array_equal(whole[at], tile)
        assert np.count_nonzero(whole) == np.count_nonzero(tile)
        most = random.randint(1, geometry.taps)
        flat = of_windows.reshape(len(of_windows), geometry.taps, -1)
        seen = np.zeros(geometry.taps, int)
        for taps, columns in images.some_taps(block, most):
            np.testing.assert_array_equal(columns.reshape(len(flat), -1, block.area), flat[:, taps])
            seen[taps] += 1
        assert (seen == 1).all()
        begin, end = sorted(random.sample(range(images.channels + 1), 2))
        np.testing.assert_array_equal(images.some(slice(begin, end)).tile(block), tile[begin:end])
        if len(images.inputs) == 1 and geometry.padding_mode == "constant":
            of_image, before = block.read_in_place(images.inputs[0][0])
            within: Any = (..., *(slice(first, first + n) for first, n in zip(before, of_image.shape[2:])))
            np.testing.assert_array_equal(tile[within].swapaxes(0, 1), of_image)
            assert np.count_nonzero(tile) == np.count_nonzero(of_image)
        if all(own.stop % geometry.group_channels == 0 for _, own in images.inputs):
            grouped = images.by_group(geometry.groups)
            target = np.empty((geometry.groups, geometry.group_channels, *tile.shape[1:]), np.float32)
            grouped.read(block.tile(images.channels).all_regions, block, target)
            np.testing.assert_array_equal(target.reshape(tile.shape), tile)


@share_of_examples(1)
@given(st.integers(0, 10**9))
def test_phases_are_of_taps_that_read_elements_of_one_rest(seed):
    """A tap is in one phase, whose tile has its elements as a box; there are only as many phases as remainders."""
    random = Random(seed)
    case = any_case(random)
    geometry, blocks = case.geometry, [*case.blocks]
    block = random.choice(blocks)
    of_windows, phases, found = case.windows(block)[:1], phase_regions(geometry, block._ranges[1:]), []
    for phase in phases:
        tile = np.full((1, block.size[0], *phase.size), np.nan, np.float32)
        case.images.some(slice(0, 1)).read(phase.regions, block, tile)
        assert not np.isnan(tile).any()
        for tap in np.ndindex(*phase.counts):
            found.append(tuple(range(9)[own][t] for own, t in zip(phase.taps, tap)))
            at: Any = tuple(slice(t * gap, t * gap + n) for t, gap, n in zip(tap, phase.gaps, block.size[1:]))
            np.testing.assert_array_equal(tile[(..., *at)], of_windows[(slice(None), *found[-1])])
    axes = list(zip(geometry.kernel, geometry.dilation, geometry.stride))
    assert sorted(found) == list(np.ndindex(*geometry.kernel))
    assert len(phases) == prod(len({t * gap % stride for t in range(taps)}) for taps, gap, stride in axes)
    reach = [max(phase.size[axis] for phase in phases) - block.size[1 + axis] for axis in range(3)]
    assert reach == list(phase_reach(geometry))


@share_of_examples(1)
@given(st.integers(0, 10**9))
def test_blocks_are_those_parts_of_the_result(seed):
    random = Random(seed)
    case = any_case(random)
    geometry, blocks = case.geometry, case.blocks
    image = np.random.default_rng(seed).random((geometry.batch, geometry.out_channels, *geometry.out_size), np.float32)
    written, everything = np.zeros_like(image), [*blocks]
    for block in everything:
        samples, *pixels = case.ranges(block)
        at: Any = tuple(slice(each.start, each.stop) for each in pixels)
        groups = block.groups
        own = slice(groups.start * geometry.group_outputs, groups.stop * geometry.group_outputs)
        expected = image[(slice(samples.start, samples.stop), own, *at)]
        np.testing.assert_array_equal(block.of(image), expected)
        np.testing.assert_array_equal(block.samples_of(image), image[samples.start : samples.stop])
        block.of(written)[...] += expected
        assert block.outputs == own and block.area == prod(block.size) == prod(block.sums_shape[2:])
        assert prod(block.sums_shape) == expected.size
        every, shift, of = (
            (random.randint(1, 3) for _ in range(3)),
            [random.randint(-4, 4) for _ in range(3)],
            random.choice((1, 2)),
        )
        steps: Any = tuple(every)
        other = np.random.default_rng(1).random((geometry.batch, geometry.out_channels // of, 9, 11, 13), np.float32)
        if own.start % of == own.stop % of == 0:
            part, which = block.every(steps, tuple(shift), of, other)  # type: ignore[arg-type]
            places = [
                [begin + step * n for n in each if 0 <= begin + step * n < extent]
                for begin, step, each, extent in zip(shift, steps, pixels, other.shape[2:])
            ]
            taken = other[samples.start : samples.stop, own.start // of : own.stop // of]
            np.testing.assert_array_equal(
                part,
                taken[(slice(None), slice(None), *np.ix_(*places))] if all(places) else part[:0].reshape(part.shape),
            )
            for begin, step, each, inside, among in zip(shift, steps, pixels, which, places):
                assert [begin + step * n for n in each[inside]] == among
    np.testing.assert_array_equal(written, image)
    begin = random.randrange(len(everything))
    count = random.randint(0, 4)
    for one, other in zip(blocks.some(begin, count), islice(everything, begin, begin + count), strict=True):
        assert one.size == other.size and one.outputs == other.outputs and one._at == other._at


@given(st.integers(0, 10**9))
def test_to_add_is_the_adjoint_of_reading(seed):
    """Adding is the adjoint of reading for each tap, also by index arrays that name an element several times."""
    random = Random(seed)
    case = any_case(random)
    geometry, rng = case.geometry, np.random.default_rng(seed)
    x = rng.integers(-3, 4, (2, *geometry.size)).astype(np.float32)
    for regions in tap_regions(geometry, tuple(map(range, geometry.out_size))):
        for at, elements in regions:
            if elements is not None:
                values = rng.integers(-3, 4, (2, *geometry.out_size)).astype(np.float32)[(..., *at)]
                image = np.zeros_like(x)
                add(image, elements, values)
                assert (image * x).sum() == (values * read(x, elements)).sum()


@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_no_more_is_brought_together_than_is_said(small_buffers, seed):
    """No more elements are added together than stated, for a part of a border and for all of it.

    This includes corners of three wide borders, whose elements are added together along one axis after another.
    """
    random, one = Random(seed), (1, 1, 1)
    mode = random.choice([mode for mode in PADDING_MODES if mode != "constant"])
    size, steps = (tuple(random.choice(of) for _ in range(3)) for of in ((1, 2, 5, 9, 20), (1, 1, 2, 4)))
    most = {"reflect": -1, "symmetric": 0}.get(mode, 99)
    before, after = (tuple(min(random.choice((0, 3, 8, 25)), extent + most) for extent in size) for _ in range(2))
    geometry = ConvGeometry(
        batch=1, channels=(64,), size=size, kernel=one, stride=steps, before=before, after=after, dilation=one,
        padding_mode=mode, rank=3, out_channels=1, groups=1,
    )  # fmt: skip
    assume(prod(geometry.out_size) < 10_000)
    block = tuple(random.choice((range(n), a_part(random, n))) for n in geometry.out_size)
    extents = tuple(map(len, block))
    image, values = (np.ones((64, *shape), np.float32) for shape in (size, extents))
    most, python_objects = added_together(geometry, extents, steps), 5_000
    together: list[int] = []

    def counted(*of: Any) -> np.ndarray:
        result = _together(*of)
        together.append(result[0].size)
        return result

    (regions,) = tap_regions(geometry, block)
    for at, elements in regions:
        own: Any = (..., *at)
        run = partial(add, image, elements, values[own])
        assert peak_bytes(run) <= values[:, 0, 0, 0].nbytes * most + python_objects
        with mock.patch.object(windows, "_together", counted):
            run()
    assert max(together, default=0) <= most


@pytest.mark.parametrize("beside", [1, FEW_BESIDE - 1, FEW_BESIDE, 1000])
@pytest.mark.parametrize("elements", [[0], [2, 0, 0, 1, 2, 2, 0], [0, 4, 4, 4]])
def test_values_of_the_same_element_are_added(elements, beside):
    values = np.random.default_rng(0).integers(-9, 10, (beside, len(elements), 1)).astype(np.float32)
    expected = np.zeros((beside, max(elements) + 1, 1), np.float32)
    for number, element in enumerate(elements):
        expected[:, element] += values[:, number]
    np.testing.assert_array_equal(_together(values, 1, np.array(elements)), expected)


@pytest.mark.parametrize("mode", [mode for mode in PADDING_MODES if mode != "constant"])
def test_a_border_takes_no_more_index_arrays_than_is_said(mode):
    count = 50_000
    border = partial(axis_segments, range(count), count + 1, 1, -count, mode)
    assert peak_bytes(border) <= INDEX_ARRAYS * INDEX_BYTES * count + 5_000


def a_part(random: Random, count: int) -> range:
    begin = random.randrange(count)
    return range(begin, random.randint(begin + 1, count))


@pytest.mark.parametrize("side", [32, 16, 31])
@pytest.mark.parametrize("channels", [0, 3, 37, 200])
def test_channels_are_copied_to_lie_last(channels, side):
    """Channels are copied few at a time if rows of the image start in few places of a cache, in any layouts."""
    images = np.random.default_rng(0).random((channels, 2, 1, side, side), np.float32)
    lying_last = np.ascontiguousarray(np.moveaxis(images, 0, -1)).transpose(4, 0, 1, 2, 3)
    for source in (images, lying_last, images[:, :, :, ::-1]):
        for target in (np.empty_like(images), np.empty_like(lying_last)):
            copy(target, source)
            np.testing.assert_array_equal(target, source)


@given(st.integers(0, 50), st.integers(1, 60))
def test_a_row_is_whole_parts_and_a_rest(width, part):
    parts = whole_and_rest(width, part)
    pixels = [first + n * own + i for first, count, own in parts for n in range(count) for i in range(own)]
    assert pixels == list(range(width)) and all(own == part or count == 1 for _, count, own in parts)
    assert all(count and own for _, count, own in parts), "none is of nothing"


def test_blocks_beyond_those_that_are_kept_are_cut_each_time():
    one: Any = (1, 1, 1)
    geometry = ConvGeometry(
        batch=400, channels=(1,), size=one, kernel=one, stride=one, before=(0, 0, 0), after=(0, 0, 0), dilation=one,
        padding_mode="constant", rank=3, out_channels=1, groups=1,
    )  # fmt: skip
    for batch, are_kept in ((1, False), (4, True)):
        blocks = Blocks(geometry, (batch, 1, 1, 1), 4)
        assert [block._samples.start for block in blocks] == list(range(0, 400, batch))
        assert [block._samples.start for block in blocks.some(20, 3)] == [20 * batch, 21 * batch, 22 * batch]
        assert (next(iter(blocks)) is next(iter(blocks))) == are_kept


class Doubled:
    """A prologue that only doubles."""

    def write(self, part: np.ndarray, values: np.ndarray, channels: slice) -> None:
        part[...] = 2 * values


@pytest.mark.parametrize(
    "lies", ["as it is read", "in another dtype", "with gaps", "between elements", "in two inputs", "before a prologue"]
)
def test_a_tile_is_read_where_it_lies_only_as_it_is(lies):
    geometry = ConvGeometry(
        batch=2, channels=(4,), size=(1, 6, 6), kernel=(1, 3, 3), stride=(1, 1, 1), before=(0, 0, 0), after=(0, 0, 0),
        dilation=(1, 1, 1), padding_mode="constant", rank=2, out_channels=1, groups=1,
    )  # fmt: skip
    x = (
        np.random.default_rng(0)
        .integers(-9, 9, (2, 4, 1, 6, 6))
        .astype("float64" if lies == "in another dtype" else "float32")
    )
    if lies == "with gaps":
        x = np.repeat(x, 2, -1)[..., ::2]
    elif lies == "between elements":
        shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        shifted[...] = x
        x = shifted
    inputs = [(x[:, :1], slice(0, 1)), (x[:, 1:], slice(1, 4))] if lies == "in two inputs" else [(x, slice(0, 4))]
    images = Images(inputs, Scratch(np.dtype(np.float32), 1), Doubled() if lies == "before a prologue" else None)  # type: ignore[arg-type]
    (block,) = Blocks(geometry, (2, *geometry.out_size), 4)
    tile, expected = images.tile_or_view(block), x.swapaxes(0, 1) * (2 if lies == "before a prologue" else 1)
    assert tile.dtype == np.float32 and np.shares_memory(tile, x) == (lies == "as it is read")
    np.testing.assert_array_equal(tile, expected)
    for row, part in enumerate(Blocks(geometry, (2, 1, 1, 4), 4)):
        np.testing.assert_array_equal(images.tile_or_view(part), expected[:, :, :, row : row + 3])
    windows_of = np.lib.stride_tricks.sliding_window_view(expected, (3, 3), axis=(3, 4))
    np.testing.assert_array_equal(images.columns(block)[:, 0], windows_of.transpose(0, 5, 6, 1, 2, 3, 4))


@pytest.mark.parametrize("mode", ["constant", "edge", "wrap"])
@pytest.mark.parametrize("kernel", [(1, 1, 2), (3, 3, 3)])
def test_what_a_block_reads_is_kept_for_no_less_than_it_takes(monkeypatch, mode, kernel):
    """The cache counts slices by a known bound, and index arrays by their bytes."""
    counted = []
    for cache in (windows._TAP_REGIONS, windows._TILE_REGIONS, windows._PHASES, windows._LINE_REGIONS):
        cache.clear()
        monkeypatch.setattr(cache, "keep", lambda key, value, at_most=None: counted.append((key, value, at_most)))
    geometry = ConvGeometry(
        batch=1, channels=(1,), size=(3, 3, 700), kernel=kernel, stride=(1, 1, 1), before=(2, 2, 800), after=(2, 2, 800),
        dilation=(1, 1, 1), padding_mode=mode, rank=3, out_channels=1, groups=1,
    )  # fmt: skip
    block = tuple(map(range, geometry.out_size))
    tap_regions(geometry, block), tile_regions(geometry, block), phase_regions(geometry, block)
    line_regions(geometry, block, 1900)
    assert len(counted) == 4
    for key, value, at_most in counted:
        held = held_bytes((key, value), ())
        assert at_most is None if mode == "wrap" else held <= at_most <= 8 * held


def test_no_channels_are_of_no_input():
    (block,) = Blocks(any_case(Random(0)).geometry, (99, 99, 99, 99), 4)
    assert any_case(Random(0)).images.some(slice(1, 1)).tile(block).shape[0] == 0


@pytest.mark.parametrize("channels", [1, 2, windows.FEW_CHANNELS, windows.FEW_CHANNELS + 1])
@pytest.mark.parametrize("pixel", [windows.CLOSE, windows.CLOSE + 1])
@pytest.mark.parametrize("width", [windows.FEW_CHANNELS - 1, windows.FEW_CHANNELS, 9])
def test_few_channels_are_copied_to_pixels_with_channels_last(channels, pixel, width):
    source = np.random.default_rng(0).standard_normal((channels, 2, width)).astype(np.float32)
    image = np.zeros((2, width, pixel), np.float32)
    copy(image.transpose(2, 0, 1)[1 : 1 + channels], source)
    np.testing.assert_array_equal(image[..., 1 : 1 + channels].transpose(2, 0, 1), source)
    assert not image[..., 0].any() and not image[..., 1 + channels :].any()
