"""Two convolutions in one kernel (kernels/conv_pair.cu): the results of every tile shape, and what the plan states.

The oracle is the reference applied twice.  The cost model normally chooses the tile; these tests force each choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import share_of_examples
from tolerance import assert_exact, compare, rounded, tolerance

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import chain as chain_cuda
from cupyconv.cuda.plan import conv_pair, cost
from cupyconv.cuda.plan.draft import Draft, cheapest
from cupyconv.cuda.plan.occupancy import blocks_that_fit, registers, resident_blocks
from cupyconv.problem.machine import KNOWN_GPUS, known_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch

DENSE, DEPTHWISE = "DENSE", "DEPTHWISE"

#: Largest slope of an activation used here (silu): the factor by which it may enlarge an error of its argument.
STEEPEST = 1.1

#: Variants that are compiled for the host here: all kinds of pairs once, both arithmetics, every accumulator.
VARIANTS = [
    *(("float32", "FMA", first, second) for first in (DENSE, DEPTHWISE) for second in (DENSE, DEPTHWISE)),
    *(("float32", "TF32X3", *kinds) for kinds in ((DENSE, DENSE), (DENSE, DEPTHWISE), (DEPTHWISE, DENSE))),
    ("float32", "TF32", DENSE, DENSE),
    ("float16", "MMA", DENSE, DENSE),
    ("float16", "MMA", DEPTHWISE, DENSE),
    ("bfloat16", "MMA", DENSE, DENSE),
    ("float64", "FMA", DENSE, DENSE),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids="-".join)


def as_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# ---- pairs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer's settings; `outputs` applies only if the layer is dense."""

    outputs: int = 3
    kernel: tuple[int, ...] = (3, 3)
    stride: Any = 1
    padding: Any = 1
    dilation: Any = 1
    activation: Any = None
    residual: bool = False


@dataclass(frozen=True)
class Pair:
    batch: int = 2
    channels: tuple[int, ...] = (5,)  # of each input
    size: tuple[int, ...] = (9, 11)
    first: Layer = Layer(activation="relu")
    second: Layer = Layer()
    channels_last: bool = False


def made(pair: Pair, variant: tuple[str, str, str, str], seed: int = 0, *, integer: bool = True):
    """Return the arrays of a pair: a list of inputs, and the keywords of the reference for both layers."""
    dtype, _, *kinds = variant
    rng = np.random.default_rng(seed)

    def numbers(*shape: int, share: float = 1.0) -> np.ndarray:
        if integer:  # small and sparse, so that float16 represents every sum
            return (rng.integers(-1, 2, shape) * (rng.random(shape) < share)).astype(as_dtype(dtype))
        return rng.standard_normal(shape).astype(as_dtype(dtype))

    xs = [numbers(pair.batch, count, *pair.size) for count in pair.channels]
    channels, size, layers = sum(pair.channels), pair.size, []
    for layer, kind in zip((pair.first, pair.second), kinds):
        outputs = layer.outputs if kind == DENSE else channels
        groups = 1 if kind == DENSE else channels
        weight = numbers(outputs, channels // groups, *layer.kernel, share=0.3)
        given_ = dict(
            weight=weight, bias=numbers(outputs), stride=layer.stride, padding=layer.padding, dilation=layer.dilation,
            groups=groups, activation=layer.activation,
        )  # fmt: skip
        shape = reference.conv(np.zeros((1, channels, *size)), **given_).shape[1:]
        if layer.residual:
            given_["residual"] = numbers(pair.batch, *shape)
        layers.append(given_)
        channels, size = shape[0], shape[1:]
    return xs, layers


def expected(xs, layers) -> np.ndarray:
    """Return the result by definition, with the intermediate image rounded to its dtype."""
    between = rounded(reference.conv(xs, **layers[0]), xs[0].dtype)
    return reference.conv(between, **layers[1])


def fused(target, variant, xs, layers, *, choose=None, channels_last=False):
    """Return the pair's result from one kernel, and its launch; `choose` selects among the variant's tiles that fit."""

    def put(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if channels_last and array.ndim > 2:
            axes = (0, *range(2, array.ndim), 1)
            return target.xp.moveaxis(target.to_device(np.ascontiguousarray(array.transpose(axes))), -1, 1)
        return target.to_device(array)

    device_layers = [ConvLayer(**{name: put(value) for name, value in layer.items()}) for layer in layers]
    with cupyconv.options(allow_tf32=variant[1] == "TF32"):
        call = checked_call(cupyconv.conv_chain, [put(x) for x in xs], device_layers, fuse=True)

    def chosen(first: Any, second: Any) -> Draft:
        patch.setattr(conv_pair, "pair_arithmetics", lambda *_: (variant[1],))
        drafts = conv_pair.drafts_of(first, second)
        return choose(drafts) if choose else cheapest(drafts, first.gpu)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_cuda, "draft_pair", chosen)
        plan = chain_cuda.plan_chain(call.problem)
    (launch,) = plan.steps
    assert isinstance(launch, KernelLaunch) and launch.kernel.name == "conv_pair"
    call.plan = lambda: plan
    return target.to_host(call.run()), launch


def variant_of(launch: KernelLaunch) -> tuple[str, ...]:
    return tuple(value for _, value in launch.kernel.macros)


def check(target, pair: Pair, variant, *, choose=None, seed: int = 0) -> KernelLaunch:
    """Check that integer results are exact, and return the launch."""
    xs, layers = made(pair, variant, seed)
    actual, launch = fused(target, variant, xs, layers, choose=choose, channels_last=pair.channels_last)
    assert variant_of(launch) == variant
    assert_exact(actual, expected(xs, layers), as_dtype(variant[0]))
    return launch


POINTWISE = {"kernel": (1, 1), "padding": 0}

PAIRS = {
    "one pixel": Pair(1, (2,), (1, 1), Layer(2, **POINTWISE), Layer(1, **POINTWISE)),
    "separable": Pair(2, (40,), (9, 11), Layer(6, activation="relu"), Layer(35, **POINTWISE, residual=True)),
    "kxk then 1x1": Pair(1, (5,), (9, 11), Layer(19, activation=("leaky_relu", 0.5)), Layer(7, **POINTWISE)),
    "1x1 then kxk": Pair(2, (7,), (9, 11), Layer(34, **POINTWISE, activation="relu"), Layer(5)),
    "chunks that end early": Pair(1, (33,), (5, 6), Layer(17), Layer(70, activation="relu6")),
    "stride 2 twice": Pair(2, (3,), (13, 12), Layer(4, stride=2), Layer(5, stride=(2, 3))),
    "dilation": Pair(1, (3,), (15, 14), Layer(4, dilation=(2, 1), padding=2), Layer(5, dilation=(1, 3), padding="same")),
    "one-sided padding": Pair(1, (3,), (8, 9), Layer(4, padding=((2, 0), (0, 3))), Layer(5, padding=((0, 2), (3, 0)))),
    "wider padding than image": Pair(1, (2,), (2, 3), Layer(3, padding=4), Layer(2, padding=5)),
    "even kernels": Pair(1, (3,), (9, 8), Layer(4, kernel=(2, 4)), Layer(5, kernel=(4, 2), padding=2)),
    "merged inputs": Pair(2, (3, 20, 1, 9), (7, 9), Layer(6, activation="relu"), Layer(5)),
    "one axis": Pair(2, (4,), (300,), Layer(5, kernel=(3,)), Layer(4, kernel=(5,), padding=2)),
    "three axes": Pair(1, (3,), (4, 5, 6), Layer(4, kernel=(3, 2, 3)), Layer(5, kernel=(1, 3, 2), stride=(1, 2, 1))),
    "channels-last": Pair(2, (32,), (9, 11), Layer(16, activation="relu"), Layer(9, residual=True), channels_last=True),
    "channels-last, no whole vectors": Pair(2, (9, 16), (6, 5), Layer(6), Layer(9), channels_last=True),
}  # fmt: skip


#: Pairs for all dtypes, which differ in channels per chunk and per vector, and in how products are computed.
OF_EVERY_DTYPE = ("one pixel", "chunks that end early", "stride 2 twice", "merged inputs", "channels-last")


@pytest.mark.parametrize(
    ("variant", "pair"),
    [
        pytest.param(variant, pair, id="-".join((*variant, name)))
        for variant in VARIANTS
        for name, pair in PAIRS.items()
        if (variant[1] in ("FMA", "TF32X3") and variant[0] != "float64") or name in OF_EVERY_DTYPE
    ],
)
def test_integers_are_exact(cuda, variant, pair):
    check(cuda, pair, variant)


@share_of_examples(0.15)
@given(data=st.data())
def test_any_pair_in_any_tile(cuda, data):
    """Random geometry runs with any of the tiles that fit, not only with the cheapest."""
    ints = st.integers
    variant = data.draw(st.sampled_from([variant for variant in VARIANTS if variant[0] == "float32"]))
    rank = data.draw(ints(1, 3))

    def layer(extent: int) -> Layer:
        kernel = tuple(data.draw(st.tuples(*[ints(1, 5 - rank)] * rank)))
        stride, dilation = (tuple(data.draw(st.tuples(*[ints(1, most)] * rank))) for most in (3, 2))
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
        pads = [(data.draw(ints(max(0, span - extent), 3 + span)), data.draw(ints(0, 3))) for span in spans]
        activation = data.draw(st.sampled_from([None, "relu", "relu6", ("clip", -1, 2)]))
        return Layer(data.draw(ints(2, 36)), kernel, stride, tuple(pads), dilation, activation)

    pair = Pair(
        data.draw(ints(1, 2)), (2, *data.draw(st.lists(ints(1, 18), max_size=2))),
        tuple(data.draw(st.tuples(*[ints(1, 9 if rank < 3 else 4)] * rank))), layer(1), layer(1),
        channels_last=data.draw(st.booleans()),
    )  # fmt: skip
    share = data.draw(st.floats(0, 1, exclude_max=True))
    check(cuda, pair, variant, choose=lambda drafts: drafts[int(share * len(drafts))])


@every_variant
def test_random_data(cuda, variant):
    """Errors are within the tolerance of both layers; the first layer's error passes through the second.

    For TF32 the operands are given with 11 significant bits, but the intermediate image has more.
    """
    pair = Pair(2, (12,), (9, 11), Layer(24, activation="silu"), Layer(9, activation="tanh", residual=True))
    xs, (first, second) = made(pair, variant, integer=False)
    for arrays in (xs, *([layer["weight"]] for layer in (first, second))):
        for array in arrays if variant[1] == "TF32" else ():
            array.view(np.uint32)[...] &= np.uint32(0xFFFFE000)
    actual, _ = fused(cuda, variant, xs, [first, second])
    dtype, is_tf32 = as_dtype(variant[0]), variant[1] == "TF32"
    plain = {"activation": None, "bias": None, "residual": None}

    def magnitude(x: Any, layer: dict[str, Any]) -> np.ndarray:
        return reference.conv(np.abs(x), **{**layer, **plain, "weight": np.abs(layer["weight"])}) + 8

    x = np.concatenate(xs, axis=1).astype(np.float64)
    between = reference.conv(x, **first)
    error = tolerance(between, dtype, first["weight"][0].size, magnitude(x, first))
    error += is_tf32 * 2.0**-11 * np.abs(between)
    wanted = reference.conv(between, **second)
    passed_on = STEEPEST * (magnitude(error, second) - 8)
    allowed = tolerance(wanted, dtype, second["weight"][0].size, magnitude(between, second)) + passed_on
    compare(actual, rounded(wanted, dtype), allowed)


@every_variant
def test_the_image_between_ends_where_it_ends(cuda, variant):
    """Beyond its edge the intermediate image is zero, not the first layer's value there from its bias or from x."""
    pair = Pair(1, (4,), (6, 7), Layer(4, padding=0), Layer(4, padding=2))
    xs, layers = made(pair, variant)
    layers[0]["bias"] = np.full_like(layers[0]["bias"], 3)
    actual, _ = fused(cuda, variant, xs, layers)
    assert_exact(actual, expected(xs, layers), as_dtype(variant[0]))


@every_variant
def test_non_finite_values_land_where_the_definition_puts_them(cuda, variant):
    pair = Pair(2, (6,), (12, 13), Layer(6, activation="relu6"), Layer(4))  # bfloat16 represents sums up to 256
    xs, layers = made(pair, variant)
    for layer in layers:  # zero times infinity is NaN in every method; no NaN may appear elsewhere
        layer["weight"][layer["weight"] == 0] = 1
    xs[0][0, 2, 3, 4], xs[0][1, 5, 0, 12], xs[0][1, 0, 11, 0] = np.nan, np.inf, -np.inf
    actual, _ = fused(cuda, variant, xs, layers, choose=lambda drafts: drafts[len(drafts) // 2])
    wanted = expected(xs, layers)
    assert np.isnan(wanted).any() and np.isfinite(wanted).any()
    assert_exact(actual, wanted, as_dtype(variant[0]))


def test_blocks_go_on_to_further_tiles(cuda, monkeypatch):
    """With more tiles than blocks, data that stays in shared memory is reused, and other data is loaded again."""
    monkeypatch.setattr(conv_pair, "resident_blocks", lambda *_: 1)
    for kinds in ((DENSE, DENSE), (DEPTHWISE, DENSE), (DENSE, DEPTHWISE)):
        variant = ("float32", "FMA", *kinds)
        launch = check(cuda, Pair(3, (18, 3), (9, 10)), variant, choose=smallest)
        assert dict(launch.params)["tile_count"] > 2 * launch.grid[0] and launch.grid[0] == 132


def smallest(drafts: list[Draft]) -> Draft:
    """Return the draft with the smallest tiles."""
    return max(drafts, key=lambda draft: dict(draft.steps[0].params)["tile_count"])


@pytest.mark.parametrize(
    "variant", [("float32", "TF32X3", DENSE, DENSE), ("float16", "MMA", DEPTHWISE, DENSE)], ids="-".join
)
def test_blocks_may_share_the_outputs(cuda, variant):
    """One block computes all outputs, part by part, or each block computes one part, of which the last is smaller."""
    pair = Pair(1, (6,), (7, 8), Layer(6, activation="relu"), Layer(70, **POINTWISE, residual=True))
    for columns in (1, 2, 3):
        launch = check(cuda, pair, variant, choose=lambda drafts: by_columns(drafts)[columns])  # noqa: B023
        assert launch.grid[1] == columns


def by_columns(drafts: list[Draft]) -> dict[int, Draft]:
    """Return one draft for each number of blocks that share the outputs."""
    return {draft.steps[0].grid[1]: draft for draft in drafts}


def test_channels_last_is_loaded_in_vectors(cuda):
    for channels, vectorized in (((8, 16, 8), 1), ((8, 10), 0)):
        pair = Pair(2, channels, (13, 15), channels_last=True)
        launch = check(cuda, pair, ("float16", "MMA", DENSE, DENSE))
        assert dict(launch.params)["x_vectorized"] == vectorized


# ---- plans -------------------------------------------------------------------------------------------------------


def image(*shape: int, dtype: Any = "float32") -> np.ndarray:
    """Return an array for planning only; its elements are never read."""
    strides = [prod(shape[axis + 1 :]) * np.dtype(dtype).itemsize for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides)


def layers_of(*kernels: tuple[int, ...], channels: int, groups: tuple[int, ...] = (1, 1), dtype: Any = "float32"):
    return [
        ConvLayer(image(channels, channels // count, *kernel, dtype=dtype), padding="same", groups=count)
        for kernel, count in zip(kernels, groups)
    ]


def explained(x, layers, on: str = "sm_90", **settings: Any) -> cupyconv.Plan:
    return cupyconv.explain(cupyconv.conv_chain, x, layers, on=on, **settings)


@pytest.mark.parametrize("on", ["sm_80", "sm_90"])
def test_few_channels_are_fused_and_many_are_not(on):
    """Layers are fused if moving the intermediate image costs more than computing its halo again."""
    threes = ((3, 3), (3, 3))
    for dtype in ("float16", "float32"):
        small = explained(image(4, 16, 128, 128, dtype=dtype), layers_of(*threes, channels=16, dtype=dtype), on)
        assert small.method == "fused", small
        large = explained(image(4, 256, 28, 28, dtype=dtype), layers_of(*threes, channels=256, dtype=dtype), on)
        assert large.method == "unfused", large
    separable = layers_of((3, 3), (1, 1), channels=64, groups=(64, 1), dtype="float16")
    assert explained(image(8, 64, 112, 112, dtype="float16"), separable, on).method == "fused"


@pytest.mark.parametrize("channels", [8, 32, 48])
def test_auto_is_never_slower_by_the_model(channels):
    def seconds(fuse: Any) -> float:
        plan = explained(image(2, channels, 64, 64), layers_of((3, 3), (3, 3), channels=channels), fuse=fuse)
        return float(plan.price.split(" ")[1].replace(",", ""))

    assert seconds("auto") <= min(seconds(True), seconds(False))


def test_explain_states_what_the_decision_rests_on():
    """A plan states recomputation, saved bytes, shared memory, registers and occupancy, and both estimated times."""
    channels = 16
    x, layers = image(4, channels, 128, 128), layers_of((3, 3), (3, 3), channels=channels)
    plan = explained(x, layers)
    (launch,) = plan.steps
    depth, height, width = dict(launch.params)["tile"][0]
    times = (height + 2) * (width + 2) / (height * width)
    blocks = resident_blocks(launch.kernel, launch.block, launch.shared_bytes, known_gpu("sm_90"))
    fused_pair = conv_pair.draft_pair(*checked_call(cupyconv.conv_chain, x, layers, on="sm_90").problem.layers)
    for words in (
        f"tiles of {height} x {width}", f"computed {times:.2f} times", f"{2 * x.nbytes:,} fewer bytes moved",
        f"{launch.shared_bytes:,} bytes of shared memory", "registers", f"allow {blocks} blocks",
    ):  # fmt: skip
        assert words in fused_pair.reason
    assert depth == 1 and 128 % height == 128 % width == 0
    assert "µs (model not yet measured on a GPU)" in dict(plan.rejected)["unfused 0+1"]
    assert "µs (model not yet measured on a GPU)" in plan.price


def drafts_of(kernels: Any, channels: int, groups: tuple[int, int], dtype: str, on: str, batch: int = 2) -> list[Any]:
    layers = layers_of(*kernels, channels=channels, groups=groups, dtype=dtype)
    request = checked_call(cupyconv.conv_chain, image(batch, channels, 30, 31, dtype=dtype), layers, on=on).problem
    return conv_pair.drafts_of(*request.layers)


@pytest.mark.parametrize("kernels", [((1, 1), (3, 3)), ((3, 3), (1, 1))], ids=["1x1 first", "1x1 second"])
@pytest.mark.parametrize("on", KNOWN_GPUS)
def test_every_draft_fits_its_gpu(on, kernels):
    """Every draft fits its GPU, and its blocks cover all pixels, samples and outputs once, with no idle block."""
    gpu, is_small = known_gpu(on), kernels[0] == (1, 1)  # whether a dense first layer has a small weight
    cases = [(3, (1, 1)), (16, (16, 1)), (48 if is_small else 12, (1, 48 if is_small else 12))]
    for dtype in ("float16", "float32", "float64"):
        has_room = is_small and dtype == "float16" and gpu.shared_bytes > 200 << 10
        for channels, groups in [*cases, *([(100, (1, 1)), (100, (100, 1))] if has_room else [])]:
            drafts = drafts_of(kernels, channels, groups, dtype, on)
            assert len({(draft.steps[0].kernel, draft.steps[0].params) for draft in drafts}) == len(drafts) > 4
            for draft in drafts:
                (launch,) = draft.steps
                params = dict(launch.params)
                tile, counts, rows = params["tile"][0], params["tiles"], params["outputs_per_block"]
                assert launch.shared_bytes <= gpu.shared_bytes and min(launch.grid) >= 1
                assert prod(tile) <= 256 and prod(params["middle_tile"][0]) <= 384
                assert all(size <= count * part < size + part for size, count, part in zip((1, 30, 31), counts, tile))
                assert launch.grid[0] <= params["tile_count"] == 2 * prod(counts)
                blocks = launch.grid[1] if groups[1] == 1 else 1
                assert channels <= blocks * rows < channels + rows and blocks == launch.grid[1]
                assert all(part <= size for part, size in zip(tile, (1, 30, 31)))
                weights = [prod(kernel) * channels * channels // count for kernel, count in zip(kernels, groups)]
                read = params["tile_count"] * launch.grid[1] * prod(params["x_tile"][0]) * channels
                asked = launch.blocks * weights[0] + launch.grid[0] * weights[1] + read
                assert launch.l2_bytes == asked * np.dtype(dtype).itemsize
                assert draft.cost(gpu).seconds > gpu.launch_seconds


@pytest.mark.parametrize("groups", [(1, 1), (16, 1), (1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_tile_that_is_done_by_many_rounds_of_blocks_takes_as_long_each(dtype, groups):
    """Further rounds of all blocks take equally long, and no longer than the first, which also loads the weights.

    No tile takes less time than its products at the rate of their arithmetic.
    """
    gpu = known_gpu("sm_90")
    once, twice, thrice = (
        {
            (dict(launch.params)["tile"], dict(launch.params)["outputs_per_block"]): launch
            for (launch,) in (draft.steps for draft in drafts_of(((3, 3), (3, 3)), 16, groups, dtype, "sm_90", batch))
        }
        for batch in (2640, 2 * 2640, 3 * 2640)
    )
    assert once.keys() == twice.keys() == thrice.keys() and len(once) > 20
    for key, launch in once.items():
        takes = [each[key].arithmetic_seconds for each in (once, twice, thrice)]
        arithmetic = dict(launch.kernel.macros)["ARITHMETIC"]
        assert takes[0] > launch.flops / cost.product_rate(arithmetic, dtype, gpu)
        if all(dict(each[key].params)["tile_count"] % each[key].grid[0] == 0 for each in (once, twice, thrice)):
            assert takes[2] - takes[1] == pytest.approx(takes[1] - takes[0])
            assert takes[1] - takes[0] <= takes[0] * (1 + 1e-9)


def changed_layers(**changes: Any) -> list[ConvLayer]:
    plain = layers_of((3, 3), (3, 3), channels=8)
    return [replace(plain[0], **changes), plain[1]]


@pytest.mark.parametrize(
    ("words", "on", "layers"),
    [
        ("the first layer has groups of more", "sm_90", lambda: changed_layers(weight=image(8, 4, 3, 3), groups=2)),
        ("the first layer has a residual", "sm_90", lambda: changed_layers(residual=image(1, 8, 16, 16))),
        ("the second layer has groups of more", "sm_90", lambda: layers_of((3, 3), (3, 3), channels=8, groups=(1, 4))),
        ("complex products", "sm_90", lambda: layers_of((3, 3), (3, 3), channels=8, dtype="complex64")),
        ("sm_75 has no matrix instructions for bfloat16", "sm_75", lambda: layers_of((1, 1), (1, 1), channels=8, dtype=as_dtype("bfloat16"))),
    ],
)  # fmt: skip
def test_a_refusal_says_why(words, on, layers):
    layers = layers()
    x = image(1, 8, 16, 16, dtype=layers[0].weight.dtype)
    with pytest.raises(ValueError, match=words):
        explained(x, layers, on, fuse=True)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"exceed the 65,536 bytes of shared memory"):
        explained(image(1, 256, 28, 28), layers_of((3, 3), (3, 3), channels=256), "sm_75", fuse=True)


def test_too_many_inputs_are_refused():
    xs, layers = [image(1, 1, 8, 8)] * 33, layers_of((1, 1), (1, 1), channels=33)
    with pytest.raises(ValueError, match="33 inputs; the kernel supports at most 32"):
        explained(xs, layers, fuse=True)


def test_occupancy_counts_what_is_scarce():
    """Registers, shared memory or threads limit the occupancy, whichever is used up first."""
    kernel = Kernel("conv_pair", (("DTYPE", "float32"), ("ARITHMETIC", "FMA"), ("FIRST", DENSE), ("SECOND", DENSE)))
    h200, t4 = known_gpu("sm_90"), known_gpu("sm_75")
    assert resident_blocks(kernel, 256, 1 << 10, h200) == 2  # 120 registers
    assert resident_blocks(kernel, 128, 1 << 10, h200) == 4
    assert resident_blocks(kernel, 256, 114 << 10, h200) == 1  # twice 115 KiB is more than 228
    assert resident_blocks(kernel, 256, 113 << 10, h200) == 2
    assert resident_blocks(kernel, 256, 228 << 10, h200) == 0
    light = Kernel(
        "conv_pair", (("DTYPE", "float32"), ("ARITHMETIC", "FMA"), ("FIRST", DEPTHWISE), ("SECOND", DEPTHWISE))
    )
    assert resident_blocks(light, 512, 1 << 10, t4) == 2  # 1,024 threads
    # One block may use all shared memory.  From sm_80 on, each block uses 1 KiB more than it requests.
    assert blocks_that_fit(8, 128, h200.shared_bytes, h200) == blocks_that_fit(8, 128, t4.shared_bytes, t4) == 1
    quarters = [blocks_that_fit(8, 128, gpu.shared_bytes // 4, gpu) for gpu in (t4, known_gpu("sm_80"), h200)]
    assert quarters == [4, 3, 3]
    # For newer GPUs the assembler uses more registers.
    macros = (("DTYPE", "float32"), ("ARITHMETIC", "TF32X3"), ("FIRST", DEPTHWISE), ("SECOND", DENSE))
    before, after = (registers(Kernel("conv_pair", macros), known_gpu(on)) for on in ("sm_90", "sm_100"))
    assert before < after == registers(Kernel("conv_pair", macros), known_gpu("sm_120"))


@pytest.mark.parametrize(
    "architecture, threads",
    [
        ("sm_75", 1024),
        ("sm_80", 2048),
        ("sm_86", 1536),
        ("sm_89", 1536),
        ("sm_90", 2048),
        ("sm_100", 2048),
        ("sm_120", 1536),
    ],
)
def test_threads_that_a_multiprocessor_holds(architecture, threads):
    """Threads per multiprocessor are those of the table in the CUDA programming guide."""
    assert blocks_that_fit(8, 128, 1, known_gpu(architecture)) * 128 == threads
