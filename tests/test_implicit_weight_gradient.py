"""Weight gradients with method "implicit_gemm": every compiled variant compared with the reference, and the choice.

The cost model chooses which variant runs.  Here each one is forced in turn, with sums in one part and in several.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from numpy.lib.stride_tricks import as_strided
from plans import array
from strategies import as_dtype, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.cuda.plan import conv as choice
from cupyconv.cuda.plan import implicit_weight_gradient as planning
from cupyconv.problem.plan import MAX_SOURCES, KernelLaunch
from tests.variants import all_variants

pytestmark = pytest.mark.usefixtures("fresh")

VARIANTS = [dict(kernel.macros) for kernel in all_variants() if kernel.name == "implicit_weight_gradient"]


FLOAT32 = next(variant for variant in VARIANTS if variant["DTYPE"] == "float32")


def name_of(variant):
    return "-".join(variant.values()) if isinstance(variant, dict) else None


every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)


@pytest.fixture
def force(monkeypatch):
    """Force one variant, with at most `parts` parts and at most one part per slab."""

    def one(variant, parts=1):
        tile = int(variant["TILE_M"]), int(variant["TILE_N"])
        monkeypatch.setattr(planning, "arithmetics", lambda *_: (variant["ARITHMETIC"],))
        monkeypatch.setattr(planning, "TILES", {tile: planning.TILES[tile]})
        monkeypatch.setattr(planning, "_parts", lambda blocks, tiles, slabs: min(parts, slabs))

    return one


def drawn(shape, dtype, seed, integer=True):
    """Return small integers, or normally distributed values that TF32 represents exactly."""
    rng = np.random.default_rng(seed)
    if integer:
        return rng.integers(-1, 2, shape).astype(as_dtype(dtype))
    values = np.ascontiguousarray(rng.standard_normal(shape, np.float32)).view(np.uint32) & np.uint32(0xFFFFE000)
    return values.view(np.float32).astype(as_dtype(dtype))


@dataclass(frozen=True)
class Case:
    """A convolution whose weight gradient is computed; channels are whole chunks of 16 bytes, and `more` of them."""

    chunks: tuple[int, ...] = (1,)  # 16-byte chunks of each input's channels
    out_chunks: int = 1
    more: int = 0  # additional channels of each input, and additional outputs
    batch: int = 2
    size: tuple[int, ...] = (7, 9)
    kernel: tuple[int, ...] = (3, 3)
    groups: int = 1
    layout: str = "channels_last"
    window: Mapping[str, Any] = field(default_factory=dict)

    def arrays(self, dtype, *, integer=True):
        """Return grad, and the inputs."""
        chunk = 16 // as_dtype(dtype).itemsize
        channels = [n * chunk + self.more for n in self.chunks]
        xs = [drawn((self.batch, n, *self.size), dtype, i, integer) for i, n in enumerate(channels)]
        tap = np.zeros((1, chunk, *self.kernel), np.float32)
        out = cupyconv.conv(np.zeros((1, chunk, *self.size), np.float32), tap, **self.window).shape[2:]
        return drawn((self.batch, self.out_chunks * chunk + self.more, *out), dtype, 9, integer), xs

    def gradient(self, target, grad, xs, **how):
        """Compute the gradient on CUDA from views of these arrays in `layout`."""
        grad, *xs = (with_layout(array, self.layout, target.to_device, target.xp) for array in (grad, *xs))
        settings = dict(self.window, groups=self.groups, method="implicit_gemm", **how)
        return target.to_host(cupyconv.conv_grad_weight(grad, xs, self.kernel, **settings))

    def expected(self, grad, xs):
        grad, *xs = (reference.wide(array) for array in (grad, *xs))
        return reference_gradients.conv_grad_weight(grad, xs, self.kernel, groups=self.groups, **self.window)


CASES = {
    "one pixel": Case(batch=1, size=(1,), kernel=(1,)),
    "pixels that end within a slab": Case(chunks=(2,), out_chunks=3, window={"padding": 1}),
    "several inputs": Case(chunks=(1, 3, 2), out_chunks=2, window={"padding": 1}),
    "groups that cut through inputs": Case(chunks=(3, 5), out_chunks=4, groups=4, kernel=(2, 2)),
    "more outputs and columns than a tile": Case(chunks=(4,), out_chunks=36, size=(4, 5), kernel=(3, 3)),
    "images smaller than a row of threads": Case(batch=21, size=(2, 1), kernel=(2, 3), window={"padding": (0, 1)}),
    "stride, dilation and one-sided padding": Case(
        chunks=(2, 1), size=(9, 11), kernel=(3, 2),
        window={"stride": (2, 3), "dilation": (1, 3), "padding": ((2, 0), (1, 3))},
    ),
    "three axes": Case(
        size=(4, 5, 6), kernel=(3, 2, 3), window={"stride": (1, 2, 1), "padding": ((1, 0), (0, 1), (2, 2))}
    ),
    **{
        f"padding by {mode}": Case(kernel=(3, 5), window={"padding": ((2, 1), (3, 1)), "padding_mode": mode})
        for mode in ("reflect", "symmetric", "edge", "wrap")
    },
}  # fmt: skip


@every_variant
@pytest.mark.parametrize("name", CASES)
def test_cases_exactly(cuda, force, variant, name):
    """Sums in one part and in one part per slab are exact, with integers that every dtype represents."""
    case = CASES[name]
    grad, xs = case.arrays(variant["DTYPE"])
    expected = case.expected(grad, xs)
    for parts in (1, 99):
        force(variant, parts)
        assert_exact(case.gradient(cuda, grad, xs), expected, grad.dtype)


#: Cases with images that are moved to the workspace first: planes, or pixels without whole aligned chunks of channels.
MOVED = {
    "planes": Case(chunks=(2,), out_chunks=3, layout="c_order", window={"padding": 1}),
    "a plane": Case(chunks=(0,), out_chunks=0, more=1, layout="c_order", window={"padding": 1}),
    "planes of several inputs, channels of zeros behind": Case(
        chunks=(1, 0, 2), out_chunks=1, more=1, layout="c_order", window={"padding": 1, "stride": (1, 2)}
    ),
    "planes in groups": Case(chunks=(3, 5), out_chunks=4, groups=4, layout="c_order", kernel=(2, 2)),
    "no whole chunks side by side": Case(chunks=(1,), out_chunks=2, more=3, window={"padding": 1}),
    "some channels of wider images": Case(chunks=(2,), layout="channels_last_window", window={"padding": 1}),
    "three axes of planes": Case(
        more=1, size=(4, 5, 6), kernel=(3, 2, 3), layout="c_order", window={"padding": ((1, 0), (0, 1), (2, 2)), "padding_mode": "edge"}
    ),
}  # fmt: skip


@every_variant
@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_first_exactly(cuda, force, variant, name):
    """Sums in one part and in several are exact; the result has only the channels that exist."""
    case = MOVED[name]
    grad, xs = case.arrays(variant["DTYPE"])
    expected = case.expected(grad, xs)
    for parts in (1, 99):
        force(variant, parts)
        assert_exact(case.gradient(cuda, grad, xs), expected, grad.dtype)


@every_variant
@pytest.mark.parametrize("moved", ["x", "grad"])
def test_one_factor_may_lie_right_already(cuda, force, variant, moved):
    case = Case(chunks=(2,), out_chunks=2, window={"padding": 1})
    grad, xs = case.arrays(variant["DTYPE"])
    force(variant, 2)
    factors = {"x": xs[0], "grad": grad}
    factors = {
        name: with_layout(array, "c_order" if name == moved else "channels_last", cuda.to_device, cuda.xp)
        for name, array in factors.items()
    }
    actual = cupyconv.conv_grad_weight(factors["grad"], factors["x"], 3, padding=1, method="implicit_gemm")
    assert_exact(cuda.to_host(actual), case.expected(grad, xs), grad.dtype)


@pytest.mark.parametrize("layout", ["c_order", "channels_last"])
def test_a_prologue_is_done_as_inputs_are_moved(cuda, force, monkeypatch, layout):
    """The prologue is applied before zeros are added around the inputs and behind their channels."""
    case = Case(chunks=(1, 2), out_chunks=1, more=1, window={"padding": 1})
    variant = FLOAT32
    grad, xs = case.arrays(variant["DTYPE"])
    count = sum(x.shape[1] for x in xs)
    scale, shift = drawn((count,), variant["DTYPE"], 5), drawn((count,), variant["DTYPE"], 6)
    force(variant, 2)
    monkeypatch.setattr(choice, "METHODS", ("implicit_gemm",))
    weight = drawn((grad.shape[1], count, 3, 3), variant["DTYPE"], 7)
    on = [with_layout(x, layout, cuda.to_device, cuda.xp) for x in xs]
    prologue = (cuda.to_device(scale), cuda.to_device(shift), "relu")
    _, pullback = cupyconv.vjp(cupyconv.conv, on, cuda.to_device(weight), padding=1, prologue=prologue)
    found = pullback(with_layout(grad, layout, cuda.to_device, cuda.xp), needs="weight").weight
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    assert_exact(cuda.to_host(found), case.expected(grad, images), grad.dtype)


@every_variant
def test_random_data(cuda, force, variant):
    case = Case(chunks=(2, 3), out_chunks=5, size=(9, 10), window={"padding": 1})
    grad, xs = case.arrays(variant["DTYPE"], integer=False)
    force(variant, 3)
    actual = case.gradient(cuda, grad, xs)
    magnitude = case.expected(abs(grad), [abs(x) for x in xs])
    assert_close(actual, case.expected(grad, xs), grad.dtype, grad[:, 0].size, magnitude=magnitude)


@pytest.mark.parametrize("order", ["c_order", "channels_last", "stepped"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("more", [0, 1])
def test_results_that_lie_otherwise(cuda, force, order, parts, more):
    """A single part is the result itself if its layout is that of sums: channels-last, with as many channels."""
    case, variant = Case(out_chunks=2, more=more, window={"padding": 1}), FLOAT32
    grad, xs = case.arrays(variant["DTYPE"])
    force(variant, parts)
    shape = (grad.shape[1], xs[0].shape[1], 3, 3)
    out = with_layout(np.full(shape, np.nan, "float32"), order, cuda.to_device, cuda.xp)
    assert_exact(case.gradient(cuda, grad, xs, out=out), case.expected(grad, xs), "float32")
    assert_exact(cuda.to_host(out), case.expected(grad, xs), "float32")


@every_variant
@pytest.mark.parametrize("more", [0, 1])
def test_non_finite_values_stay_in_their_places(cuda, force, variant, more):
    """Non-finite values reach only their output and the taps that read them, not a slab's tail or zero channels."""
    case = Case(chunks=(2,), out_chunks=2, more=more, window={"padding": 1})
    grad, xs = case.arrays(variant["DTYPE"])
    grad[0, 3, 2, 2], xs[0][1, 1, 0, 0] = np.inf, np.nan
    force(variant, 2)
    with np.errstate(invalid="ignore"):
        expected = case.expected(grad, xs)
    assert_close(case.gradient(cuda, grad, xs), expected, grad.dtype, grad[:, 0].size, magnitude=200)


# ---- when it is chosen ------------------------------------------------------------------------------------------


def test_a_16_bit_layer_takes_it():
    grad, x = (np.moveaxis(np.zeros((32, 56, 56, 64), "float16"), -1, 1) for _ in range(2))
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, on="sm_90")
    assert plan.method == "implicit_gemm" and "tensor cores" in str(plan) and "gemm" in dict(plan.rejected)
    products, total = plan.steps
    assert isinstance(products, KernelLaunch) and products.kernel.name == "implicit_weight_gradient"
    assert total.kernel.name == "epilogue" and total.purpose == "sum of the parts"
    assert plan.flops == products.flops == 2 * 32 * 56 * 56 * 64 * 64 * 9


def test_planes_of_16_bits_are_moved_and_take_it():
    """There is one launch per factor, while columns are nine times as large as the image."""
    grad, x = (np.zeros((32, 64, 56, 56), "float16") for _ in range(2))
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, on="sm_80")
    names = [step.kernel.name for step in plan.steps]
    assert names == ["channels_last", "channels_last", "implicit_weight_gradient", "epilogue"]
    columns = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, on="sm_80", method="gemm")
    assert 2 * plan.bytes_moved < columns.bytes_moved and 2 * plan.workspace_bytes < columns.workspace_bytes


def gradient_plan(
    *, order="last", channels=16, outputs=16, groups=1, dtype="float16", cut=False, limit=None, on="sm_90"
):
    """Return the plan of such a layer with this method."""
    x, grad = (np.moveaxis(np.zeros((2, 9, 9, count), dtype), -1, 1) for count in (channels, outputs))
    if order == "C":
        x = x.copy(order="C")
    if cut:
        x, grad = x[..., 1:], grad[..., 1:]
    with cupyconv.options(workspace_limit=limit):
        return cupyconv.explain(
            cupyconv.conv_grad_weight, grad, x, 3, method="implicit_gemm", padding=1, groups=groups, on=on
        )


@pytest.mark.parametrize(
    "words, changes",
    [
        ("not a multiple of 8", {"groups": 4}),
        ("not a multiple of 8", {"groups": 2, "channels": 24, "outputs": 32}),
        ("not a multiple of 8", {"groups": 2, "channels": 32, "outputs": 24}),
        ("sm_75 has no matrix instructions for bfloat16", {"dtype": as_dtype("bfloat16"), "on": "sm_75"}),
        ("no kernel for complex64", {"dtype": "complex64"}),
        ("its sums need", {"limit": 100}),
        ("copy of the inputs needs 5,184 bytes of workspace, the limit is 5,000", {"order": "C", "limit": 5000}),
    ],
)
def test_refusals(words, changes):
    with pytest.raises(ValueError, match=words):
        gradient_plan(**changes)


def moved_by(plan):
    """Return which factors a plan moves."""
    return {dict(step.params)["moved"].buffer for step in plan.steps if step.kernel.name == "channels_last"}


@pytest.mark.parametrize(
    "moved, changes",
    [
        ("", {}), ("", {"groups": 2, "channels": 32, "outputs": 16}), ("x", {"order": "C"}), ("x", {"channels": 12}),
        ("grad", {"outputs": 12}), ("grad", {"cut": True}),
    ],
)  # fmt: skip
def test_what_cannot_be_copied_in_chunks_is_moved(moved, changes):
    """Nothing else is moved.  All pixels of a gradient must be in one row."""
    assert moved_by(gradient_plan(**changes)) == ({f"moved_{moved}"} if moved else set())


@pytest.mark.parametrize("which", ["x", "grad"])
@pytest.mark.parametrize("axis, strides", [("n", (1300, 144, 16)), ("h", (1336, 148, 16)), ("w", (1640, 184, 20))])
def test_one_axis_along_which_pixels_are_not_aligned_is_enough_to_be_moved(which, axis, strides):
    """Otherwise its loads of 16 bytes would fault."""
    step_n, step_h, step_w = (2 * elements for elements in strides)
    slanted = as_strided(np.zeros(4000, np.float16), (2, 16, 9, 9), (step_n, 2, step_h, step_w))
    even = np.moveaxis(np.zeros((2, 9, 9, 16), np.float16), -1, 1)
    grad, x = (slanted, even) if which == "grad" else (even, slanted)
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, method="implicit_gemm", on="sm_90")
    assert moved_by(plan) == {f"moved_{which}"}


def test_planes_of_three_axes_that_are_not_aligned_are_moved():
    even = np.zeros((2, 5, 5, 5, 16), np.float16)
    slanted = as_strided(np.zeros(5000, np.float16), even.shape, (2 * 2064, 2 * 412, 2 * 80, 2 * 16, 2))
    grad, x = (np.moveaxis(image, -1, 1) for image in (even, slanted))
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, method="implicit_gemm", on="sm_90")
    assert moved_by(plan) == {"moved_x"}


def test_a_lone_pixel_is_no_reason_to_move_its_channels():
    """A single pixel has no stride to another; a stride to the next pixel would be no whole number of chunks."""
    grad, x = np.zeros((1, 16, 1, 1), np.float16), np.moveaxis(np.zeros((1, 3, 3, 16), np.float16), -1, 1)
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, method="implicit_gemm", on="sm_90")
    assert moved_by(plan) == set() and dict(plan.steps[0].params)["pixel_stride"] % 8 == 0


@pytest.mark.parametrize("shape", [(1, 3, 3), (4, 2, 2), (9, 3, 3), (1, 1, 9)])
def test_pixels_in_one_row_are_a_stride_apart(shape):
    """This holds for any number of samples; the stride of a single pixel leads to no other."""
    grad = np.moveaxis(np.zeros((*shape, 16), np.float16), -1, 1)
    plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, grad, 1, method="implicit_gemm", on="sm_90")
    assert moved_by(plan) == set() and dict(plan.steps[0].params)["pixel_stride"] == 16


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_strides_that_an_int32_does_not_count_are_refused(axis):
    """Strides within an image must be below 2**31 bytes, counted for elements of 8 bytes."""
    grad = np.moveaxis(np.zeros((2, 5, 5, 5, 8), np.float16), -1, 1)
    for stride, words in ((2**28 - 8, None), (2**28, "int32")):
        steps = list(grad.strides)
        steps[axis] = stride * grad.itemsize
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            x = as_strided(grad, grad.shape, steps)
            cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1, method="implicit_gemm", on="sm_90")


def test_more_pixels_than_an_int32_counts_in_bytes_are_refused():
    grad = array(1 << 14, 8, 200, 200, dtype="float16", order="last")
    for samples, words in ((6000, None), (1 << 14, "int32")):
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            images = grad[:samples], grad[:samples]
            cupyconv.explain(cupyconv.conv_grad_weight, *images, 1, method="implicit_gemm", on="sm_90")


def test_as_many_inputs_as_a_kernels_parameters_hold():
    images = [np.moveaxis(np.zeros((2, 9, 9, 16), np.float16), -1, 1)] * (MAX_SOURCES + 1)
    for count, words in ((MAX_SOURCES, None), (MAX_SOURCES + 1, f"supports at most {MAX_SOURCES}")):
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            xs = images[:count]
            cupyconv.explain(cupyconv.conv_grad_weight, xs[0], xs, 1, method="implicit_gemm", on="sm_90")


def test_a_sum_of_one_part_is_not_said_to_be_in_parts():
    """`purpose` is what a user reads; if there are two parts, another launch adds them."""
    for size, parts in ((9, 1), (16, 2)):
        grad = np.moveaxis(np.zeros((2, size, size, 16), np.float16), -1, 1)
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, grad, 3, padding=1, method="implicit_gemm", on="sm_90")
        (launch,) = (step for step in plan.steps if step.kernel.name == "implicit_weight_gradient")
        assert launch.grid[1] == parts and ("in parts" in launch.purpose) == (parts > 1)
