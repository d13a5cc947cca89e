"""`linmerge` compared with its definition, and its guarantees: any number of inputs and axes, no concatenation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAYOUTS, constant_where_broadcast, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.problem.machine import known_gpu

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


def integers(rng, shape, dtype):
    values = rng.integers(-2, 3, shape).astype(dtype)
    return values + 1j * rng.integers(-2, 3, shape).astype(values.real.dtype) if "complex" in dtype else values


@given(
    channels=st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any),
    outputs=st.integers(1, 20),
    spatial=st.lists(st.integers(1, 6), max_size=5).map(tuple),
    batch=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    method=st.sampled_from(("auto", "direct", "gemm")),
    bias=st.booleans(),
    residual=st.booleans(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=9, max_size=9),
    seed=st.integers(0, 2**16),
)
def test_any_inputs(target, channels, outputs, spatial, batch, dtype, method, bias, residual, layouts, seed):
    rng = np.random.default_rng(seed)
    shapes = [(batch, c, *spatial) for c in channels]
    xs = [constant_where_broadcast(integers(rng, s, dtype), layout) for s, layout in zip(shapes, layouts)]
    weight = constant_where_broadcast(integers(rng, (outputs, sum(channels)), dtype), layouts[-1])
    extras = {
        "bias": integers(rng, outputs, dtype) if bias else None,
        "residual": integers(rng, (batch, outputs, *spatial), dtype) if residual else None,
    }
    expected = reference.linmerge(xs, weight, **extras)

    def move(array, layout):
        return with_layout(array, layout, target.to_device, target.xp)

    actual = cupyconv.linmerge(
        [move(x, layout) for x, layout in zip(xs, layouts)],
        move(weight, layouts[-1]),
        **{name: None if a is None else move(a, "c_order") for name, a in extras.items()},
        method=method,
    )
    assert_exact(target.to_host(actual), expected, dtype)


def test_an_out_whose_leading_axes_have_no_one_stride(target):
    """The result is computed in other memory and copied to `out` in every call; elements in between are unchanged."""
    rng = np.random.default_rng(0)
    x, weight = (integers(rng, shape, "float32") for shape in ((2, 3, 2, 4, 2, 3, 2), (5, 3)))
    memory = target.to_device(np.full((2, 5, 4, 4, 2, 3, 2), 7, np.float32))
    out = memory[:, :, ::2]
    for _ in range(2):
        out[...] = 0
        assert cupyconv.linmerge([target.to_device(x)], target.to_device(weight), out=out) is out
        assert_exact(target.to_host(out), reference.linmerge([x], weight), "float32")
        assert (target.to_host(memory)[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("count", [1, 2, 5, 40, 65, 120, 130])
@pytest.mark.parametrize("method", ["auto", "direct", "gemm"])
def test_any_number_of_inputs(target, count, method):
    """The table of inputs in a kernel's parameters is bounded, but the number of inputs is not."""
    rng = np.random.default_rng(count)
    channels = [1 + i % 3 for i in range(count)]
    xs = [integers(rng, (2, c, 33), "float32") for c in channels]
    weight = integers(rng, (3, sum(channels)), "float32")
    moved = [target.to_device(x) for x in xs], target.to_device(weight)
    if method == "direct" and target.name != "numpy" and count > 120:
        with pytest.raises(ValueError, match=r"method 'direct' does not apply: .* inputs"):
            cupyconv.linmerge(*moved, method=method)
        return
    actual = cupyconv.linmerge(*moved, method=method)
    assert_exact(target.to_host(actual), reference.linmerge(xs, weight), "float32")


@pytest.mark.parametrize("count", [2, 65, 120])
def test_many_inputs_under_one_kernel(target, count):
    """Several launches make the columns of more inputs than one launch can hold."""
    rng = np.random.default_rng(count)
    xs = [integers(rng, (2, 1 + i % 2, 9), "float32") for i in range(count)]
    weight = integers(rng, (2, sum(x.shape[1] for x in xs), 3), "float32")
    actual = cupyconv.conv([target.to_device(x) for x in xs], target.to_device(weight), padding=1)
    assert_exact(target.to_host(actual), reference.conv(xs, weight, padding=1), "float32")


@pytest.mark.parametrize("outputs", [1, 3, 4, 5, 8, 9, 16, 17, 32, 33, 40])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("pixels", [16, 1000, 1001])
def test_tiles_and_vectors(target, outputs, dtype, pixels):
    """Every tile of the merge kernel is right, with rows that can and cannot be read in 16-byte vectors."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((2, c, pixels)).astype(dtype) for c in (4, 1, 7)]
    weight, bias = rng.standard_normal((outputs, 12)).astype(dtype), rng.standard_normal(outputs).astype(dtype)
    residual = rng.standard_normal((2, outputs, pixels)).astype(dtype)
    arguments = [weight, bias]
    expected = reference.linmerge(xs, *arguments, activation="tanh", residual=residual)
    actual = cupyconv.linmerge(
        [target.to_device(x) for x in xs],
        *map(target.to_device, arguments),
        activation="tanh",
        residual=target.to_device(residual),
        method="direct",
    )
    assert_close(target.to_host(actual), expected, dtype, terms=12)


@pytest.mark.parametrize("outputs", [3, 30, 120])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("batch", "pixels"), [(3, 5000), (3, 5001), (700, 16), (700, 15)])
def test_blocks_stay(cuda_target, monkeypatch, outputs, dtype, batch, pixels):
    """On a GPU with one multiprocessor, blocks continue from pixels to pixels and from sample to sample."""
    monkeypatch.setattr(cuda_target.device, "model", replace(known_gpu("sm_90"), multiprocessors=1))
    forget_calls()
    rng = np.random.default_rng(outputs)
    xs = [integers(rng, (batch, c, pixels), dtype) for c in (2, 11, 1, 4)]
    weight, bias = integers(rng, (outputs, 18), dtype), integers(rng, outputs, dtype)
    given = [*map(cuda_target.to_device, xs)], cuda_target.to_device(weight), cuda_target.to_device(bias)
    try:
        plan = cupyconv.explain(cupyconv.linmerge, *given, activation="relu", method="direct")
        actual = cupyconv.linmerge(*given, activation="relu", method="direct")
    finally:
        monkeypatch.undo()
        forget_calls()
    assert plan.steps[0].blocks <= max(7, -(-outputs // 4))
    expected = np.einsum("oc,ncp->nop", weight, np.concatenate(xs, axis=1), dtype="float64") + bias[:, None]
    assert_exact(cuda_target.to_host(actual), np.maximum(expected, 0).astype(dtype), dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("special", ["x", "weight"])
@pytest.mark.parametrize("pixels", [40, 41])
def test_what_is_not_finite_stays_where_it_belongs(target, dtype, special, pixels):
    """A tile has zeros beyond the last channel and output; multiplied by infinity, they cause no NaN elsewhere."""
    xs, weight = [np.ones((2, c, pixels), dtype) for c in (4, 1)], np.ones((9, 5), dtype)
    if special == "x":
        xs[0][0, 3, 5], xs[1][1, 0, pixels - 1] = np.inf, np.nan
    else:
        weight[2, 4], weight[8, 0] = -np.inf, np.nan
    actual = cupyconv.linmerge([target.to_device(x) for x in xs], target.to_device(weight), method="direct")
    np.testing.assert_array_equal(target.to_host(actual), reference.linmerge(xs, weight))


@pytest.mark.grid(
    dtype=["float16", "float32", "float64"], pixels=[1, 31, 33, 128, 129, 259], residual_step=[None, 1, 3]
)
def test_unaligned_rows(target, dtype, pixels, residual_step):
    """Images begin one element after an aligned address, with rows of any length and a residual with gaps.

    There are several samples, and inputs may end anywhere in a round of channels.
    """
    rng = np.random.default_rng(pixels)
    xs = [integers(rng, (3, c, pixels + 1), dtype) for c in (1, 6, 4, 2)]
    weight, bias = integers(rng, (5, 13), dtype), integers(rng, 5, dtype)
    residual = None if residual_step is None else integers(rng, (3, 5, pixels * residual_step), dtype)
    expected = reference.linmerge(
        [x[..., 1:] for x in xs], weight, bias, residual=None if residual is None else residual[..., ::residual_step]
    )
    actual = cupyconv.linmerge(
        [target.to_device(x)[..., 1:] for x in xs],
        target.to_device(weight),
        target.to_device(bias),
        residual=None if residual is None else target.to_device(residual)[..., ::residual_step],
        method="direct",
    )
    assert_exact(target.to_host(actual), expected, dtype)


def test_the_story_in_small(cuda_target):
    """Five inputs of four channels need one launch, and no memory in addition to the result."""
    device = cuda_target.device
    xs = [device.asarray(np.full((4, 4, 10_000), i, np.float64)) for i in range(5)]
    weight = device.asarray(np.ones((4, 20)))
    out = device.empty((4, 4, 10_000), np.float64)
    device.log.clear()
    before = device.peak_bytes = device.allocated_bytes
    cupyconv.linmerge(xs, weight, out=out)
    assert [record.kernel.name for record in device.log] == ["merge"]
    assert device.peak_bytes == before
    assert (cuda_target.to_host(out) == 40).all()
