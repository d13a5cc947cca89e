"""Padding as names and as numbers, and the index map that replaces a padded copy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

import cupyconv
from cupyconv import onnx_padding
from cupyconv.numpy.windows import axis_segments, padded_index
from cupyconv.problem.padding import PADDING_MODES, resolve_padding

sizes, kernels = st.integers(1, 40), st.integers(1, 9)
strides, dilations = st.integers(1, 5), st.integers(1, 4)


def resolved(name: str, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    (pair,) = resolve_padding(name, (size,), (kernel,), (stride,), (dilation,))
    return pair


def outputs(padded: int, kernel: int, stride: int, dilation: int) -> int:
    """Count the positions of the kernel."""
    last_tap = dilation * (kernel - 1)
    return sum(first + last_tap < padded for first in range(0, padded, stride))


# --- names ----------------------------------------------------------------------------------------------------


@given(sizes, kernels, strides, dilations)
def test_same_is_the_least_padding_with_an_output_a_stride(size, kernel, stride, dilation):
    before, after = resolved("same", size, kernel, stride, dilation)
    wanted = math.ceil(size / stride)
    assert 0 <= after - before <= 1, "the odd element is after"
    assert outputs(size + before + after, kernel, stride, dilation) == wanted
    if before + after:
        assert outputs(size + before + after - 1, kernel, stride, dilation) < wanted
    assert resolved("same_lower", size, kernel, stride, dilation) == (after, before)


@given(sizes, kernels, strides, dilations)
def test_full_has_an_output_for_every_place_where_kernel_and_input_meet(size, kernel, stride, dilation):
    before, after = resolved("full", size, kernel, stride, dilation)
    reach = dilation * (kernel - 1)
    assert (before, after) == (reach, reach)
    assert outputs(size + before + after, kernel, 1, dilation) == size + reach


@given(sizes, kernels, strides, dilations)
def test_causal_reads_nothing_that_comes_later(size, kernel, stride, dilation):
    before, after = resolved("causal", size, kernel, stride, dilation)
    assert after == 0
    assert dilation * (kernel - 1) - before == 0, "the last tap of the first output is the first element"
    assert outputs(size + before, kernel, 1, dilation) == size


@given(sizes, kernels, strides, dilations)
def test_valid_is_none(size, kernel, stride, dilation):
    assert resolved("valid", size, kernel, stride, dilation) == (0, 0)


def test_causal_through_conv(target):
    """With causal padding, a changed element changes no result before it."""
    x = np.zeros((1, 1, 12), np.float32)
    later = x.copy()
    later[..., 5] = 1
    weight = target.to_device(np.ones((1, 1, 3), np.float32))
    a, b = (
        target.to_host(cupyconv.conv(target.to_device(v), weight, padding="causal", dilation=2)) for v in (x, later)
    )
    assert a.shape == x.shape
    assert np.flatnonzero(a != b).tolist() == [5, 7, 9]


@given(st.integers(0, 5), st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_numbers_and_pairs(amount, pair):
    axes = (9, 9), (3, 3), (1, 1), (1, 1)
    assert resolve_padding(amount, *axes) == ((amount, amount), (amount, amount))
    assert resolve_padding(pair, *axes) == ((pair[0], pair[0]), (pair[1], pair[1]))
    assert resolve_padding([pair, (amount, 0)], *axes) == (pair, (amount, 0))
    assert resolve_padding((np.int64(amount), np.uint8(pair[1])), *axes) == ((amount,) * 2, (pair[1],) * 2)


@given(st.data(), st.integers(1, 3), st.sampled_from(("valid", "same", "same_lower", "full")))
def test_every_axis_for_itself(data, rank, name):
    entries = [data.draw(st.tuples(*[values] * rank)) for values in (sizes, kernels, strides, dilations)]
    assert list(resolve_padding(name, *entries)) == reference.padding_pairs(name, *entries)


# --- ONNX -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_onnx_pads_are_all_begins_then_all_ends(pairs):
    begins, ends = zip(*pairs)
    assert onnx_padding([*begins, *ends]) == tuple(pairs)
    assert onnx_padding(np.array([*begins, *ends])) == tuple(pairs)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((), 0),
        ((None,), 0),
        ((None, "NOTSET"), 0),
        (([1, 2], "NOTSET"), ((1, 2),)),
        ((None, "VALID"), "valid"),
        ((None, "SAME_UPPER"), "same"),
        ((None, "SAME_LOWER"), "same_lower"),
        (([0, 0, 0, 0], "SAME_UPPER"), "same"),  # exporters write both
    ],
    ids=str,
)
def test_onnx_attributes(arguments, expected):
    assert onnx_padding(*arguments) == expected


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_onnx_names_give_onnx_sizes(target, auto_pad):
    x, weight = np.ones((1, 1, 7, 8), np.float32), np.ones((1, 1, 4, 2), np.float32)
    padding = onnx_padding(None, auto_pad)
    y = target.to_host(cupyconv.conv(target.to_device(x), target.to_device(weight), padding=padding, stride=(2, 3)))
    before = {"SAME_UPPER": (1, 0), "SAME_LOWER": (2, 0)}[auto_pad]
    assert y.shape == (1, 1, 4, 3)
    assert y[0, 0, 0, 0] == (4 - before[0]) * (2 - before[1])


# --- the index map --------------------------------------------------------------------------------------------

MODES = [mode for mode in PADDING_MODES if mode != "constant"]
amounts = st.integers(0, 30)


@pytest.mark.parametrize("mode", MODES)
@given(size=st.integers(1, 8), before=amounts, after=amounts)
def test_index_map_is_numpys_pad(mode, size, before, after):
    """The index map equals `np.pad`, also for padding beyond the size, where reflections are reflected again."""
    expected = np.pad(np.arange(size), (before, after), mode=mode)
    np.testing.assert_array_equal(padded_index(np.arange(-before, size + after), size, mode), expected)


@pytest.mark.parametrize("mode", PADDING_MODES)
@given(
    size=st.integers(1, 8), before=amounts, after=amounts, stride=st.integers(1, 4), tap=st.integers(0, 5),
    block=st.tuples(st.integers(0, 20), st.integers(1, 20)),
)  # fmt: skip
def test_segments_read_what_a_padded_copy_would_hold(mode, size, before, after, stride, tap, block):
    """Segments of any block of outputs (zeros, a slice or an index array) read the elements of a padded copy."""
    padded = np.pad(np.arange(1, size + 1), (before, after), mode=mode)
    outputs = range(block[0], block[0] + block[1])
    if (outputs.stop - 1) * stride + tap >= len(padded):
        return  # a tap beyond the padding, which no geometry has
    actual = np.full(len(outputs), -1)
    for at, elements in axis_segments(outputs, size, stride, tap - before, mode):
        assert (actual[at] == -1).all(), "no output is read twice"
        actual[at] = 0 if elements is None else np.arange(1, size + 1)[elements]
    np.testing.assert_array_equal(actual, padded[[output * stride + tap for output in outputs]])


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_pads_beyond_the_size_through_conv(target, mode, size):
    x = np.arange(1, size + 1, dtype=np.float32)
    one = target.to_device(np.ones((1, 1, 1), np.float32))
    y = cupyconv.conv(target.to_device(x[None, None]), one, padding=((11, 13),), padding_mode=mode)
    np.testing.assert_array_equal(target.to_host(y)[0, 0], np.pad(x, (11, 13), mode=mode))


@pytest.mark.parametrize(
    "size, padding, hint",
    [
        ((9,), (1, 2), "for one axis with unequal sides, write ((1, 2),)"),
        ((9, 9), (1, 2, 3, 4), "for a flat ONNX list, use onnx_padding(pads)"),
        ((9, 9, 9), (1, 2), "a single pair is ambiguous: write ((1, 2),) * 3"),
        ((9, 9, 9), ((1, 2), (1, 2)), "pass an int, or one int or (before, after) pair per spatial axis"),
        ((9, 9), "SAME_UPPER", "; for ONNX's auto_pad, use onnx_padding"),
        ((9, 9), "reflect", "unknown padding 'reflect'; known are "),
        (
            (9, 9),
            "nearest",
            "; 'nearest' is a padding mode: pass it as padding_mode, together with padding='same' or numbers",
        ),
        ((9, 9), "causal", "padding 'causal' requires one spatial axis, given 2"),
        ((9, 9), ((1, 2, 3), 1), "padding of one axis must be an int or a (before, after) pair, given (1, 2, 3)"),
    ],
)
def test_what_is_refused_is_answered_with_what_was_meant(size, padding, hint):
    x, weight = np.ones((1, 1, *size), np.float32), np.ones((1, 1, *(2,) * len(size)), np.float32)
    with pytest.raises(ValueError) as refused:
        cupyconv.conv(x, weight, padding=padding)
    assert hint in str(refused.value)
    assert ("onnx_padding" in str(refused.value)) == ("onnx_padding" in hint)
