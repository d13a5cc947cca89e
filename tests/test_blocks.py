"""How a result is cut into blocks of pixels, samples and channels, and which images BLAS reads as a matrix."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import share_of_examples

from cupyconv.numpy import convolution
from cupyconv.numpy.block_loops import block_of_pixels, even_channels, largest_block, share_of_pixels
from cupyconv.problem.arrays import Operand
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import NotApplicable


def geometry(batch: int, size: Any, channels: int = 1, groups: int = 1) -> ConvGeometry:
    one: Any = (1, 1, 1)
    return ConvGeometry(
        batch=batch, channels=(groups * channels,), size=size, kernel=one, stride=one, before=(0, 0, 0), after=(0, 0, 0),
        dilation=one, padding_mode="constant", rank=3, out_channels=groups, groups=groups,
    )  # fmt: skip


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 300))


@share_of_examples(3)
@given(st.integers(1, 20), SIZES, st.integers(1, 100_000), st.integers(1, 20))
@example(20, (1, 1, 1), 16, 20)
def test_a_block_is_one_run_of_pixels_or_of_samples(batch, size, pixels, most_samples):
    """A block has at most the requested numbers of pixels and samples, and not far fewer."""
    samples, *own = block_of_pixels(geometry(batch, size), pixels, most_samples)
    whole = [part == extent for part, extent in zip(own, size)]
    assert 1 <= samples <= min(batch, most_samples) and all(1 <= part <= extent for part, extent in zip(own, size))
    if pixels >= prod(size):
        most = min(batch, most_samples, pixels // prod(size))
        assert all(whole) and samples <= most and ceil(batch / samples) == ceil(batch / most)
        return
    cut = max(axis for axis in range(3) if not whole[axis])
    assert samples == 1 and own[:cut] == [1] * cut
    assert prod(own) <= pixels < 2 * prod(own) + prod(own[cut + 1 :])


def test_a_block_of_nothing():
    """Along an empty axis a block has an extent of 1, since the size of the axis, 0, is divided by it."""
    assert block_of_pixels(geometry(3, (1, 0, 5)), 10, 2) == (2, 1, 1, 5)
    assert block_of_pixels(geometry(0, (0, 4, 0)), 10, 2)[1:] == (1, 4, 1)


@share_of_examples(3)
@given(st.integers(1, 20), SIZES, st.integers(1, 4), st.integers(0, 20_000))
def test_every_thread_has_as_many_pixels(batch, size, threads, most):
    """There are no more blocks than needed; each has whole samples, slices or rows if there are enough of these."""
    share, pixels = share_of_pixels(geometry(batch, size), threads, most), batch * prod(size)
    blocks = threads * ceil(pixels / (threads * max(1, most)))
    assert ceil(pixels / share) <= blocks and share < 2 * ceil(pixels / blocks)
    units = [unit for unit in (prod(size), size[1] * size[2], size[2], 1) if unit * blocks <= pixels] or [1]
    assert share % units[0] == 0 and share - units[0] < pixels / blocks


@share_of_examples(3)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 500))
@example(1, 12, 5)
def test_channels_are_cut_evenly(own, groups, most):
    """Channels are divided evenly into whole groups, or into parts of one group, and into as few parts as possible."""
    channels = even_channels(geometry(1, (1, 1, 1), own, groups), most)
    assert 1 <= channels <= min(most, own * groups)
    if most < own:
        assert ceil(own / channels) == ceil(own / most) and ceil(own / channels) * channels < own + ceil(own / channels)
    else:
        assert channels % own == 0 and ceil(groups * own / channels) == ceil(groups / (most // own))


@share_of_examples(3)
@given(
    st.integers(1, 9), SIZES, st.integers(1, 50_000), st.integers(1, 64), st.integers(1, 9),
    st.integers(1, 40), st.integers(0, 3000), st.integers(1, 200_000),
)  # fmt: skip
def test_a_block_is_as_large_as_the_limit_allows(batch, size, target, smallest, samples, each, fixed, limit):
    whole = geometry(batch, size)

    def needed(block: Any) -> int:
        return fixed + each * prod(block)

    least = needed(block_of_pixels(whole, min(smallest, prod(size)), samples))
    aimed = block_of_pixels(whole, max(target, min(smallest, prod(size))), samples)
    try:
        block = largest_block(whole, needed, limit, target, smallest, samples)
    except NotApplicable as refusal:
        assert least > limit and str(refusal).startswith(f"the smallest block needs {least:,} bytes")
        assert str(refusal).endswith(f"the limit is {limit:,}")
        return
    assert least <= needed(block) <= limit or needed(aimed) < least
    for enough in (least, needed(aimed)):
        assert needed(largest_block(whole, needed, enough, target, smallest, samples)) <= enough
    if needed(aimed) <= limit:
        assert block == aimed
    else:
        assert needed(block) == least or each * prod(block) * 9 > limit - fixed


#: Shapes (channels, pixels) and strides of images that BLAS reads as a matrix, and of images that it does not.  In the
#: test a matrix spans less than 1000 elements, and channels-last images are read 100 pixels at a time.
MATRICES = [
    ((4, 25), (25, 1)), ((4, 25), (30, 1)), ((1, 25), (0, 1)), ((1, 2500), (5000, 1)), ((10, 25), (99, 1)),
    ((4, 25), (1, 4)), ((4, 25), (1, 6)), ((4, 90), (1, 11)), ((4, 2500), (1, 9)),
]  # fmt: skip
NO_MATRICES = [
    ((4, 25), (24, 1)), ((4, 25), (50, 2)), ((4, 25), (1, 3)), ((10, 25), (100, 1)), ((4, 25), (2, 8)),
    ((4, 100), (1, 10)), ((4, 2500), (1, 10)), ((1, 25), (1, 40)), ((4, 25), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "strides", "takes"), [(*each, True) for each in MATRICES] + [(*each, False) for each in NO_MATRICES]
)
def test_what_blas_takes_as_a_matrix(monkeypatch, shape, strides, takes):
    monkeypatch.setattr(convolution, "BLAS_REACH", 1000)
    monkeypatch.setattr(convolution, "PRODUCT_BLOCK", 400)
    channels, pixels = shape
    image = Operand("x", "float32", (2, channels, 1, 1, pixels), (10_000, strides[0], 0, 0, strides[1]), 16)
    assert convolution.is_matrix(image) is takes
    apart = Operand("x", "float32", (2, 4, 1, 5, 5), (10_000, 100, 0, 7, 1), 16)
    assert not convolution.is_matrix(apart)
