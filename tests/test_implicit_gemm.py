"""Method "implicit_gemm": every compiled variant compared with the reference, and the method's other guarantees.

The cost model chooses which variant runs.  Here each one is forced in turn (`forced_plan`): its arithmetic and tile by
restricting what planning may choose from, its gather by the layout of the inputs.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import reference
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import ACTIVATIONS, LAYOUTS, ConvCase, as_dtype, conv_cases
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import conv as cuda_planning
from cupyconv.cuda.plan import implicit_gemm
from cupyconv.cuda.plan.arithmetic import FIRST_MMA
from cupyconv.cuda.plan.occupancy import blocks_that_fit
from cupyconv.cuda.plan.packed_weight import group_runs
from cupyconv.problem.machine import KNOWN_GPUS
from cupyconv.problem.plan import KernelLaunch, counted
from tests.variants import all_variants

MACROS = [dict(kernel.macros) for kernel in all_variants() if kernel.name == "implicit_gemm"]
VARIANTS = [macros for macros in MACROS if "PROLOGUE" not in macros]  # tests/test_prologue.py has the others
ALONG_PIXELS = [variant for variant in VARIANTS if variant["GATHER"] == "ALONG_PIXELS"]
PIXEL_CHUNKS = [variant for variant in VARIANTS if variant["GATHER"] == "PIXEL_CHUNKS"]
ALONG_CHANNELS = [variant for variant in VARIANTS if variant["GATHER"] == "ALONG_CHANNELS"]


def name_of(variant):
    return "-".join(variant.values()) if isinstance(variant, dict) else None


def tile_of(variant):
    """Return the rows and columns of the variant's tile."""
    return int(variant["TILE_M"]), int(variant["TILE_N"])


every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
TILES = {f"{rows} x {columns}": (rows, columns) for rows, columns in implicit_gemm.TILES}
both_tiles = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
of_float32 = pytest.mark.parametrize("arithmetic", ["FMA", "TF32", "TF32X3"])


# ---- one variant, forced -------------------------------------------------------------------------------------


def forced_plan(call, arithmetic, tile, *, moves=False):
    """Return the method's plan for a call with this arithmetic and tile; `moves` says if the inputs are moved first."""
    gatherings = implicit_gemm._gatherings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            implicit_gemm,
            "_gatherings",
            lambda *how: [gathering for gathering in gatherings(*how) if bool(gathering.steps) == moves],
        )
        patch.setattr(implicit_gemm, "arithmetics", lambda *_: (arithmetic,))
        patch.setattr(implicit_gemm, "tiles", lambda *_: (tile,))
        return cuda_planning.plan_conv(replace(call.problem, method="implicit_gemm"))


def product_of(plan):
    """Return the launch of implicit_gemm.cu in a plan, or None if the result is empty."""
    found = [step for step in plan.steps if isinstance(step, KernelLaunch) and step.kernel.name == "implicit_gemm"]
    return found[0] if found else None


def run_forced(target, arguments, arithmetic, tile, *, moves=False):
    """Return the result of one variant, and its plan."""
    call = checked_call(cupyconv.conv, **arguments)
    has_matrices = call.problem.machine.capability >= FIRST_MMA[call.problem.out.dtype]
    if arithmetic != "FMA" and not has_matrices:
        pytest.skip(f"{call.problem.machine} has no matrix instructions for it")
    plan = forced_plan(call, arithmetic, tile, moves=moves)
    call.plan = lambda: plan
    return target.to_host(call.run()), plan


def run_case(target, case, arrays, variant, *, moves=False):
    """Run one variant on a case, in the case's layouts."""
    arguments = case.views(arrays, target.to_device, target.xp)
    out = case.new_out(target.to_device, target.xp)
    arguments |= dict(case.parameters, out=out)
    return run_forced(target, arguments, variant["ARITHMETIC"], tile_of(variant), moves=moves)


def run_arrays(target, x, weight, arithmetic, tile=(64, 64), **settings):
    """Return the result of one variant on arrays in C order."""
    x = [target.to_device(each) for each in x] if isinstance(x, list) else target.to_device(x)
    return run_forced(target, dict(x=x, weight=target.to_device(weight), **settings), arithmetic, tile)[0]


def as_operands(arrays, arithmetic):
    """Return random arrays with the precision of the arithmetic: TF32 has 11 significant bits."""
    if arithmetic != "TF32":
        return arrays
    x, weight = arrays["x"], arrays["weight"]
    return arrays | {"x": [tf32(each) for each in x] if isinstance(x, list) else tf32(x), "weight": tf32(weight)}


def tf32(values):
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def with_what_is_defined(case):
    """Return the case without an activation if it is complex: complex numbers have none."""
    return replace(case, activation=None) if case.dtype.startswith("complex") else case


def check_case(target, case, variant, *, exact=True, moves=False):
    """Check integers exactly, unless sums have too many terms, and random data by the tolerance; return the plans."""
    plans, case = [], with_what_is_defined(case)
    for integer in (True, False) if exact else (False,):
        arrays = case.arrays(integer=integer)
        if not integer:
            arrays = as_operands(arrays, variant["ARITHMETIC"])
        actual, plan = run_case(target, case, arrays, variant, moves=moves)
        expected = reference.conv(**arrays, **case.parameters)
        if integer:
            assert_exact(actual, expected, case.result_dtype)
        else:
            assert_close(actual, expected, case.result_dtype, case.terms, magnitude=case.magnitude(arrays))
        plans.append(plan)
    return plans


# ---- geometries that reach every branch ------------------------------------------------------------------------

EPILOGUE = dict(bias=True, residual=True, activation=("leaky_relu", 0.25))

CASES = {
    "one pixel, one channel": ConvCase(spatial=(1,), kernel=(1,)),
    "K-chunks that end in zeros": ConvCase(channels=(5,), out_channels=3, spatial=(9, 9), kernel=(3, 3), padding=1),
    "a block of many taps": ConvCase(batch=2, channels=(1,), out_channels=6, spatial=(7, 8), kernel=(5, 5), padding=2),
    "a block of many taps along one axis": ConvCase(channels=(2,), spatial=(40,), kernel=(36,), padding="same"),
    "several runs": ConvCase(
        batch=2, channels=(3, 6, 1, 2), out_channels=4, spatial=(6, 5), kernel=(3, 2), padding=1, **EPILOGUE
    ),
    "groups that cut through inputs": ConvCase(
        channels=(5, 7), groups=4, out_channels=8, spatial=(6, 7), kernel=(3, 3), padding=1, **EPILOGUE
    ),
    "an input of no channels": ConvCase(channels=(3, 0, 4), out_channels=2, spatial=(5, 5), kernel=(2, 2)),
    "tiles partly outside": ConvCase(
        batch=3, channels=(4,), out_channels=133, spatial=(9, 9), kernel=(1, 1), padding=((1, 0), (0, 2)), bias=True
    ),
    "groups of more outputs than a tile": ConvCase(
        channels=(6,), groups=2, out_channels=2 * 67, spatial=(3, 3), kernel=(2, 2), **EPILOGUE
    ),
    "stride, dilation and one-sided padding": ConvCase(
        batch=2, channels=(4, 2), out_channels=3, spatial=(9, 11), kernel=(3, 2), stride=(2, 3), dilation=(1, 3),
        padding=((2, 0), (1, 3)),
    ),
    "three axes": ConvCase(
        batch=2, channels=(3,), out_channels=4, spatial=(4, 5, 6), kernel=(3, 2, 3), stride=(1, 2, 1),
        padding=((1, 0), (0, 1), (2, 2)), dilation=(1, 1, 2), **EPILOGUE,
    ),
    "no batch axis": ConvCase(batch=None, channels=(4,), out_channels=4, spatial=(5, 6), kernel=(3, 3), **EPILOGUE),
    "no sample": ConvCase(batch=0, channels=(4,), out_channels=4, spatial=(5, 6), kernel=(3, 3), **EPILOGUE),
    "more samples than pixels": ConvCase(batch=70, channels=(3,), out_channels=2, spatial=(3,), kernel=(2,), bias=True),
    **{
        f"padding by {mode}": ConvCase(
            batch=2, channels=(3,), out_channels=2, spatial=(3, 4), kernel=(3, 3), padding=((5, 4), (3, 6)),
            padding_mode=mode,
        )
        for mode in ("reflect", "symmetric", "edge", "wrap")
    },
    **{
        f"{layout} beside C order": ConvCase(
            batch=2, channels=(5, 3), out_channels=3, spatial=(5, 6), kernel=(3, 3), padding=1, residual=True,
            layouts=(layout, "c_order"), weight_layout=layout, residual_layout=layout,
            out_layout=None if layout.startswith("broadcast") else layout,
        )
        for layout in LAYOUTS
    },
}  # fmt: skip


@pytest.mark.grid(variant=ALONG_PIXELS, case=CASES)
def test_along_pixels(cuda, case, variant):
    for plan in check_case(cuda, replace(case, dtype=variant["DTYPE"]), variant):
        assert product_of(plan) is None or dict(product_of(plan).kernel.macros) == variant


CHANNELS_LAST_CASES = {
    "one pixel": ConvCase(channels=(8,), spatial=(2,), kernel=(1,)),
    "a block of many taps": ConvCase(
        batch=2, channels=(8,), out_channels=6, spatial=(7, 8), kernel=(5, 4), padding=2, **EPILOGUE
    ),
    "several runs": ConvCase(
        batch=2, channels=(16, 8, 24), out_channels=4, spatial=(6, 5), kernel=(2, 2), padding=1, **EPILOGUE
    ),
    "groups that cut through inputs": ConvCase(
        channels=(24, 8), groups=2, out_channels=6, spatial=(6, 7), kernel=(3, 3), padding=1, **EPILOGUE
    ),
    "tiles partly outside": ConvCase(
        batch=3, channels=(8,), out_channels=133, spatial=(9, 9), kernel=(1, 1), padding=((1, 0), (0, 2)), bias=True
    ),
    "stride, dilation and one-sided padding": ConvCase(
        batch=2, channels=(8, 16), out_channels=3, spatial=(9, 11), kernel=(3, 2), stride=(2, 3), dilation=(1, 3),
        padding=((2, 0), (1, 3)),
    ),
    "three axes": ConvCase(
        batch=2, channels=(8,), out_channels=4, spatial=(4, 5, 6), kernel=(3, 2, 3), stride=(1, 2, 1),
        padding=((1, 0), (0, 1), (2, 2)), dilation=(1, 1, 2), **EPILOGUE,
    ),
    "into C order": ConvCase(
        batch=2, channels=(8,), out_channels=5, spatial=(6, 6), kernel=(3, 3), out_layout="c_order", residual=True
    ),
    **{
        f"padding by {mode}": ConvCase(
            channels=(8,), out_channels=2, spatial=(3, 4), kernel=(2, 2), padding=((5, 4), (3, 6)), padding_mode=mode
        )
        for mode in ("reflect", "symmetric", "edge", "wrap")
    },
}  # fmt: skip


@pytest.mark.grid(variant=ALONG_CHANNELS, case=CHANNELS_LAST_CASES)
def test_along_channels(cuda, case, variant):
    case = replace(
        case, dtype=variant["DTYPE"], layouts=("channels_last",) * len(case.channels), residual_layout="channels_last"
    )
    for plan in check_case(cuda, case, variant):
        assert dict(product_of(plan).kernel.macros) == variant


POINTWISE_CASES = {
    "a chunk, a channel": ConvCase(spatial=(8,), kernel=(1,)),
    "several samples in a tile": ConvCase(batch=11, channels=(5,), out_channels=3, spatial=(2, 4), kernel=(1, 1), **EPILOGUE),
    "three axes": ConvCase(batch=2, channels=(37,), out_channels=4, spatial=(2, 3, 8), kernel=(1, 1, 1), bias=True),
    "several runs": ConvCase(
        batch=2, channels=(3, 40, 1, 34), out_channels=4, spatial=(6, 16), kernel=(1, 1), **EPILOGUE
    ),
    "groups that cut through inputs": ConvCase(
        channels=(25, 47), groups=4, out_channels=8, spatial=(6, 8), kernel=(1, 1), **EPILOGUE
    ),
    "tiles partly outside": ConvCase(batch=3, channels=(4,), out_channels=133, spatial=(9, 8), kernel=(1, 1), bias=True),
    "a sum in parts": ConvCase(channels=(233, 200), out_channels=7, spatial=(8,), kernel=(1,), **EPILOGUE),
    "one sample again and again": ConvCase(
        batch=3, channels=(9, 7), out_channels=4, spatial=(4, 8), kernel=(1, 1), layouts=("broadcast_first", "c_order")
    ),
}  # fmt: skip


@pytest.mark.grid(variant=PIXEL_CHUNKS, case=POINTWISE_CASES)
def test_pixels_of_one_tap_in_chunks(cuda, case, variant):
    exact = case.terms <= 100 or variant["DTYPE"] in ("float32", "float64")
    for plan in check_case(cuda, replace(case, dtype=variant["DTYPE"]), variant, exact=exact):
        assert dict(product_of(plan).kernel.macros) == variant
        assert product_of(plan).grid[1] > 1 or sum(case.channels) < 400


def test_which_pixels_go_in_chunks():
    """Chunks are whole aligned vectors of one tap, and nothing is transformed when they are read."""

    def gather(x, kernel=1, dtype="float16", **how):
        plan = cupyconv.explain(
            cupyconv.conv,
            x,
            np.empty((64, x.shape[1], kernel, kernel), dtype),
            method="implicit_gemm",
            on="sm_90",
            **how,
        )
        return dict(product_of(plan).kernel.macros)["GATHER"]

    x = np.empty((8, 64, 12, 12), np.float16)
    assert gather(x) == "PIXEL_CHUNKS"
    assert gather(x.astype(np.float32), dtype="float32") == "PIXEL_CHUNKS"
    for other, how in (
        (x, {"stride": 2}), (x, {"padding": 1}), (x, {"kernel": 3}), (x, {"prologue": (None, None, "relu")}),
        (x[..., :11], {}), (x[:, :, :9, :7], {}), (x[..., ::-1], {}), (np.empty((8, 64, 9, 9), np.float16), {}),
        (np.empty((8, 12, 12, 64), np.float16).transpose(0, 3, 1, 2), {}),
    ):  # fmt: skip
        assert gather(other, **how) != "PIXEL_CHUNKS"


@pytest.mark.parametrize("batch, width", [(1, "1"), (64, "8")])
def test_parts_of_few_sums_are_added_by_many_threads(batch, width):
    """Sixteen blocks once added all parts of 8 x 8 pixels, one vector of each part after the other."""
    x, weight = np.empty((batch, 8, 8, 512), np.float16).transpose(0, 3, 1, 2), np.empty((512, 512, 3, 3), np.float16)
    how = {"padding": 1, "activation": "relu", "on": "sm_90"}
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm" if batch == 1 else "gemm", **how)
    last = plan.steps[-1]
    assert last.kernel.name == "epilogue" and dict(last.kernel.macros)["WIDTH"] == width
    assert last.blocks >= 2 * 132


MOVED = {dtype: next(v for v in ALONG_CHANNELS if v["DTYPE"] == dtype and v["ARITHMETIC"] == arithmetic) for dtype, arithmetic in
         (("float16", "MMA"), ("bfloat16", "MMA"), ("float32", "TF32"))}  # fmt: skip
#: In addition to cases of `CASES`: rows with and without vectors, few and many channels, several tiles of either.
MOVED_CASES = {
    **{name: case for name, case in CASES.items() if case.groups == 1 and case.batch != 0},
    "vectors of several inputs": ConvCase(
        batch=2, channels=(24, 5, 40), out_channels=9, spatial=(8, 24), kernel=(1, 3), padding=1, **EPILOGUE
    ),
    "a few channels of many pixels": ConvCase(batch=2, channels=(3,), out_channels=4, spatial=(16, 72), kernel=(3, 3), stride=2),
    "many channels of a pixel": ConvCase(batch=3, channels=(150,), out_channels=4, spatial=(1,), kernel=(1,)),
    "groups of whole vectors": ConvCase(
        channels=(24, 8), groups=2, out_channels=6, spatial=(6, 7), kernel=(3, 3), padding=1, **EPILOGUE
    ),
}  # fmt: skip


@pytest.mark.grid(variant=MOVED, case=MOVED_CASES)
def test_inputs_are_moved_first(cuda, case, variant):
    """Inputs that would be gathered by elements are read in chunks, from one workspace image of all inputs."""
    for plan in check_case(cuda, replace(case, dtype=variant["DTYPE"]), variant, moves=True):
        assert dict(product_of(plan).kernel.macros) == variant
        assert plan.steps[0].kernel.name == plan.workspace[0].name == "channels_last"


def test_inputs_are_moved_where_that_is_less():
    """Inputs with contiguous channels are not moved, and neither are inputs that are read once."""
    how = {"method": "implicit_gemm", "on": "sm_90"}

    def steps(image, weight, **more):
        plan = cupyconv.explain(cupyconv.conv, image, weight, **how, **more)
        return [step.kernel.name for step in plan.steps], {b.name: b.nbytes for b in plan.workspace}

    x, weight = np.empty((32, 60, 56, 56), np.float16), np.empty((64, 60, 3, 3), np.float16)
    names, workspace = steps(x, weight, padding=1)
    assert names[0] == "channels_last" and workspace["channels_last"] == 32 * 56 * 56 * 64 * 2
    assert "channels_last" not in steps(x, weight[..., :1, :1])[0]
    assert "channels_last" not in steps(x[:1, :, :9, :9], weight)[0]
    last = np.empty((32, 56, 56, 64), np.float16).transpose(0, 3, 1, 2)
    assert "channels_last" not in steps(last, np.empty((64, 64, 3, 3), np.float16), padding=1)[0]
    with cupyconv.options(workspace_limit=8 << 20):  # all samples need 13 MB
        how["on"] = "sm_80"
        names, workspace = steps(x, weight, padding=1)
        assert names == ["pack_weight", *["channels_last", "implicit_gemm"] * 4]
        assert workspace["channels_last"] == 8 * 56 * 56 * 64 * 2
    with cupyconv.options(workspace_limit=600_000):  # too little for one sample and as much again
        assert "channels_last" not in steps(x, weight, padding=1)[0]


@pytest.mark.parametrize("arithmetic", ["MMA", "TF32X3"])
@pytest.mark.parametrize("batch, samples", [(7, 2), (21, 1)])
@pytest.mark.parametrize("channels", [(24,), (5, 150)])
def test_inputs_are_moved_some_samples_at_a_time(cuda, arithmetic, batch, samples, channels, monkeypatch):
    """The weight is packed once; all chunks but the last are alike; long sums have parts in each chunk."""
    gatherings = implicit_gemm._gatherings

    def some_samples(*how):
        return [replace(gatherings(*how)[0], gather="ALONG_CHANNELS", notes=(), samples=samples)]

    case = ConvCase(
        batch=batch, channels=channels, out_channels=9, spatial=(9, 8), kernel=(3, 3), padding=1,
        dtype="float16" if arithmetic == "MMA" else "float32", **EPILOGUE,
    )  # fmt: skip
    monkeypatch.setattr(implicit_gemm, "_gatherings", some_samples)
    arrays = case.arrays(integer=True)
    arguments = case.views(arrays, cuda.to_device, cuda.xp) | dict(case.parameters)
    call = checked_call(cupyconv.conv, **arguments)
    monkeypatch.setattr(implicit_gemm, "arithmetics", lambda *_: (arithmetic,))
    plan = cuda_planning.plan_conv(replace(call.problem, method="implicit_gemm"))
    call.plan = lambda: plan
    assert f"{counted(samples, 'sample')} at a time" in plan.reason and str(plan).count("pack_weight<") == 1
    padded, itemsize = -(-sum(channels) // (8 if arithmetic == "MMA" else 4)), 16
    assert {b.name: b.nbytes for b in plan.workspace}["channels_last"] == samples * 9 * 8 * padded * itemsize
    assert_exact(cuda.to_host(call.run()), reference.conv(**arrays, **case.parameters), case.dtype)


def test_channels_last_in_odd_numbers_is_gathered_by_elements(cuda):
    """On CUDA cores, which read no chunks, the gather is along channels nevertheless."""
    case = ConvCase(
        batch=2, channels=(5, 3), out_channels=4, spatial=(6, 5), kernel=(3, 3), padding=1,
        layouts=("channels_last_window", "channels_last"),
    )  # fmt: skip
    for arithmetic, gather in (("FMA", "ALONG_CHANNELS"), ("TF32X3", "ALONG_PIXELS")):
        for plan in check_case(cuda, case, dict(ARITHMETIC=arithmetic, TILE_M="64", TILE_N="64")):
            assert dict(product_of(plan).kernel.macros)["GATHER"] == gather
            assert any("gathered element by element" in note for note in plan.notes) == (arithmetic != "FMA")


SPLIT_CASES = {
    "a long sum": ConvCase(channels=(150,), out_channels=7, spatial=(4, 5), kernel=(3, 3), padding=1, **EPILOGUE),
    "a smooth activation": ConvCase(
        batch=None, channels=(150,), out_channels=7, spatial=(30,), kernel=(5,), bias=True, activation="tanh"
    ),
    "groups of unlike runs": ConvCase(
        channels=(37, 27, 61, 3), groups=2, out_channels=4, spatial=(3, 3), kernel=(3, 3), padding=1, **EPILOGUE
    ),
    # Sixteen inputs of one channel are sixteen slabs; the single input of the other group is one or two.
    "shares with nothing to sum": ConvCase(
        channels=(1,) * 16 + (16,), groups=2, out_channels=4, spatial=(6,), kernel=(1,), **EPILOGUE
    ),
    "blocks of channels, three axes": ConvCase(
        batch=2, channels=(40, 70), out_channels=5, spatial=(3, 4, 5), kernel=(2, 3, 2), padding=1, **EPILOGUE
    ),
    "blocks of channels, padding by reflect": ConvCase(
        channels=(72, 48), out_channels=5, spatial=(4, 5), kernel=(3, 3), padding=2, padding_mode="reflect",
        layouts=("channels_last",) * 2,
    ),
    "blocks of channels, more taps than bits": ConvCase(
        channels=(40, 24), out_channels=5, spatial=(9,), kernel=(36,), padding=20, layouts=("channels_last",) * 2
    ),
    "channels-last": ConvCase(
        batch=2, channels=(72, 80), out_channels=7, spatial=(4, 5), kernel=(3, 3), padding=1, **EPILOGUE,
        layouts=("channels_last",) * 2, residual_layout="channels_last",
    ),
}  # fmt: skip


@pytest.mark.grid(variant=ALONG_PIXELS, case=SPLIT_CASES)
def test_a_sum_in_parts(cuda, case, variant):
    exact = case.terms <= 100 or variant["DTYPE"] in ("float32", "float64")
    for plan in check_case(
        cuda, replace(case, dtype=variant["DTYPE"]), variant, exact=exact and "tanh" != case.activation
    ):
        launch = product_of(plan)
        params, splits = dict(launch.params), launch.grid[1]
        assert splits > 1 and params["keeps_sums"] == 1 and "parts" in plan.reason
        _, stride_g, stride_slab, *_ = params["weight"]
        assert (splits - 1) * params["slabs_per_split"] < stride_g // stride_slab <= splits * params["slabs_per_split"]
        assert plan.steps[-1].kernel.name == "epilogue"


@pytest.mark.grid(
    variant=[v for v in VARIANTS if v["ARITHMETIC"] == "MMA" or (v["ARITHMETIC"], v["TILE_M"]) == ("TF32X3", "64")],
    groups=[1, 2],
    weight_layout=["c_order", "broadcast_first", "stepped"],
)
def test_a_weight_that_lies_in_slabs_is_not_packed(cuda, variant, groups, weight_layout):
    """The kernel has one tap, and each input's channels fill slabs of any dtype; the last tile exceeds the outputs."""
    along_channels = variant["GATHER"] == "ALONG_CHANNELS"
    case = ConvCase(
        batch=2, channels=(32, 32), groups=groups, out_channels=2 * 67, kernel=(1, 1),
        spatial=(5, 8) if variant["GATHER"] == "PIXEL_CHUNKS" else (5, 7),
        dtype=variant["DTYPE"], weight_layout=weight_layout, **EPILOGUE,
        layouts=("channels_last",) * 2 if along_channels else ("c_order",) * 2,
    )  # fmt: skip
    for plan in check_case(cuda, case, variant):
        packs = [step.kernel.name for step in plan.steps if isinstance(step, KernelLaunch)].count("pack_weight")
        assert packs == ("packed_weight" in {buffer.name for buffer in plan.workspace}) == (weight_layout == "stepped")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("dtype", "tf32", "packed"),
    [("float16", False, False), ("float64", False, False), ("float32", False, False), ("float32", True, True)],
)
def test_a_pointwise_weight_is_packed_only_to_be_rounded(arch, dtype, tf32, packed):
    x, weight = np.empty((2, 128, 14, 14), dtype), np.empty((64, 128, 1, 1), dtype)
    with cupyconv.options(allow_tf32=tf32):
        plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on=arch)
    assert ("pack_weight" in [step.kernel.name for step in plan.steps]) == packed
    assert ("packed_weight" in [buffer.name for buffer in plan.workspace]) == packed


@given(case=conv_cases(dtypes=("float16", "bfloat16", "float32", "float64"), mixed_dtypes=False),
       variant=st.sampled_from(ALONG_PIXELS))  # fmt: skip
def test_integers_are_exact(cuda, case, variant):
    case = with_what_is_defined(replace(case, dtype=variant["DTYPE"]))
    arrays = case.arrays(integer=True)
    actual, _ = run_case(cuda, case, arrays, variant)
    assert_exact(actual, reference.conv(**arrays, **case.parameters), case.result_dtype)


@given(case=conv_cases(dtypes=("float16", "bfloat16", "float32", "float64"), mixed_dtypes=False, activations=ACTIVATIONS),
       variant=st.sampled_from(ALONG_PIXELS))  # fmt: skip
def test_random_data(cuda, case, variant):
    check_case(cuda, replace(case, dtype=variant["DTYPE"]), variant, exact=False)


@given(case=conv_cases(dtypes=("float16", "float32", "float64"), mixed_dtypes=False), variant=st.sampled_from(ALONG_CHANNELS),
       octets=st.lists(st.integers(1, 2), min_size=1, max_size=3))  # fmt: skip
def test_channels_last(cuda, case, variant, octets):
    """Chunks of 16 bytes are whole: each input has a multiple of eight channels, in one group."""
    assume(prod(case.spatial) > 1)  # an image of one pixel is in C order too, and gathered along pixels
    case = replace(
        case, dtype=variant["DTYPE"], channels=tuple(8 * count for count in octets), groups=1, bare_x=False,
        layouts=("channels_last",) * len(octets),
    )  # fmt: skip
    if case.terms <= 60:
        check_case(cuda, case, variant)
    else:
        check_case(cuda, case, variant, exact=False)


# ---- float32 on tensor cores -----------------------------------------------------------------------------------


def matrices(kind, terms, generator, size=40):
    """Return A (size x terms) and B (terms x size) in float32."""
    shapes = (size, terms), (terms, size)
    if kind == "positive":
        return [generator.uniform(1, 2, shape).astype(np.float32) for shape in shapes]
    a, b = (generator.standard_normal(shape) for shape in shapes)
    if kind == "scaled":  # scale each row of A and each column of B by its own power of two
        a, b = a * 2.0 ** generator.integers(-20, 21, (size, 1)), b * 2.0 ** generator.integers(-20, 21, size)
    if kind == "wide":  # scale each element
        a, b = (each * 2.0 ** generator.integers(-20, 21, each.shape) for each in (a, b))
    if kind == "cancelling":  # the second half of every sum cancels the first half, up to its last bits
        half = terms // 2
        a[:, half : 2 * half] = -a[:, :half] * (1 + 2.0**-20)
        b[half : 2 * half] = b[:half]
    return [a.astype(np.float32), b.astype(np.float32)]


def largest_error(actual, a, b):
    """Return the largest error in units of float32's roundoff, 2**-24, times sum |a| |b|."""
    exact, magnitude = reference.wide(a) @ reference.wide(b), abs(reference.wide(a)) @ abs(reference.wide(b))
    return float((abs(actual - exact) / magnitude).max() * 2**24)


def float32_product(a, b):
    """Return a b by sequential fused multiply-adds, as a float32 GEMM on CUDA cores computes it."""
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for a_m, b_n in zip(a.T.astype(np.float64), b.astype(np.float64)):
        sums = (sums + np.multiply.outer(a_m, b_n)).astype(np.float32)
    return sums


def as_convolution(target, a, b, arithmetic, tile=(64, 64)):
    """Return a b, computed as a 1x1 convolution."""
    return run_arrays(target, b[None], a[..., None], arithmetic, tile)[0]


@pytest.mark.grid(kind=["normal", "positive", "scaled", "wide", "cancelling"], terms=[16, 150, 1000], tile=TILES)
def test_three_products_are_as_good_as_float32(cuda, kind, terms, tile):
    a, b = matrices(kind, terms, np.random.default_rng(terms))
    error = largest_error(as_convolution(cuda, a, b, "TF32X3", tile), a, b)
    assert error <= 4 * largest_error(float32_product(a, b), a, b)


@pytest.mark.parametrize("terms", [1, 2, 3])
@both_tiles
def test_three_products_of_few_terms(cuda, terms, tile):
    """A product omits at most 8 units of float32 (warp_tile.cuh), and rounding the result adds one."""
    for kind in ("normal", "positive", "wide"):
        a, b = matrices(kind, terms, np.random.default_rng(terms), size=130)
        assert 1 < largest_error(as_convolution(cuda, a, b, "TF32X3", tile), a, b) <= 9


def complex_matrices(kind, terms, generator):
    """Return two factors; for "cancelling", the second is the first one's adjoint: the product's diagonal is real."""
    of_real = "normal" if kind == "cancelling" else kind
    (a, b), (c, d) = (matrices(of_real, terms, generator, size=40) for _ in range(2))
    a, b = (a + 1j * c).astype(np.complex64), (b + 1j * d).astype(np.complex64)
    return (a, np.ascontiguousarray(a.conj().T)) if kind == "cancelling" else (a, b)


@pytest.mark.parametrize("terms", [1, 3, 200])
@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancelling"])
def test_three_real_products_are_a_complex_one(cuda, kind, terms):
    """The error is within complex_tile.cuh's bound: 1 + sqrt 2 times that of real products, relative to sum |a| |b|.

    Real products are off by at most 9 units of float32, plus one for the parts that were added.  A long sum is off by
    at most 4 times the error of one on CUDA cores, which adds at least one unit for each of sqrt(terms) terms.
    """
    a, b = complex_matrices(kind, terms, np.random.default_rng(terms))
    actual = as_convolution(cuda, a, b, "TF32X3")
    exact, magnitude = (each.astype(np.complex128) for each in (a, b)), abs(a).astype(float) @ abs(b).astype(float)
    wrong = actual - np.matmul(*exact)
    error = max((abs(part) / magnitude).max() for part in (wrong.real, wrong.imag)) * 2**24
    assert 0.1 < error <= (1 + 2**0.5) * (10 + 4 * np.sqrt(terms - 1))


def test_complex_parts_may_overflow_where_they_are_added(cuda):
    """Results that are finite by the definition are finite, even if sums of parts, or rounded operands, overflow."""
    largest = np.finfo(np.float32).max
    b = np.array([[largest * (1 + 1j), largest * (1 - 1j), largest, -1j * largest]], np.complex64)
    a = np.array([[0.25], [-0.25j], [2**-30 * (1 + 1j)]], np.complex64)
    expected = a.astype(np.complex128) @ b.astype(np.complex128)
    for actual, wanted in ((as_convolution(cuda, a, b, "TF32X3"), expected),
                           (as_convolution(cuda, b.T.copy(), a.T.copy(), "TF32X3"), expected.T)):  # fmt: skip
        assert_close(actual, wanted, "complex64", 1, magnitude=abs(wanted))


def test_complex_values_that_are_not_finite_stay_where_they_belong(cuda):
    x, weight = np.ones((2, 9, 4, 5), np.complex64), np.ones((6, 9, 2, 2), np.complex64)
    x[1, 7, 2, 3], x[0, 0, 0, 0], weight[2, 7, 1, 0] = complex(np.inf, 1), complex(0, np.nan), complex(1, -np.inf)
    assert_close(run_arrays(cuda, x, weight, "TF32X3"), reference.conv(x, weight), "complex64", 36, magnitude=80)


@of_float32
def test_eleven_bits_are_exact(cuda, arithmetic):
    """TF32 represents the operands exactly, and the sums of their integer products need no rounding."""
    generator = np.random.default_rng(5)
    a, b = (generator.integers(-2047, 2048, shape).astype(np.float32) for shape in ((9, 3), (3, 70)))
    assert_exact(as_convolution(cuda, a, b, arithmetic), a.astype(np.float64) @ b, "float32")


def test_tf32_is_rounded_to_nearest(cuda):
    """Truncated operands would be off by twice as much."""
    a, b = matrices("normal", 1, np.random.default_rng(6), size=130)
    error = largest_error(as_convolution(cuda, a, b, "TF32"), a, b) / 2**24
    assert 1.5 * 2.0**-11 < error < 2.01 * 2.0**-11


# ---- values that are not finite --------------------------------------------------------------------------------

SPECIAL = {
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "NaN": 0x7FC00000,
    "all bits": 0x7FFFFFFF,
    "signalling": 0x7F800001,
    "negative signalling": 0xFF800001,
}


@pytest.mark.grid(arithmetic=["FMA", "TF32", "TF32X3"], tile=TILES, side=["x", "weight"], bits=SPECIAL)
def test_special_values_stay_where_they_belong(cuda, arithmetic, tile, side, bits):
    """With one special element, exactly the results that read it are infinite or NaN."""
    value = np.array(bits, np.uint32).view(np.float32)
    x, weight = np.ones((2, 9, 4, 5), np.float32), np.ones((6, 9, 2, 2), np.float32)
    weight[3], weight[4] = -1, 1.5  # -1 gives -inf; 1.5 has a second significant bit
    (x if side == "x" else weight)[(1, 7, 2, 3) if side == "x" else (2, 7, 1, 0)] = value
    actual = run_arrays(cuda, x, weight, arithmetic, tile)
    for array in (x, weight):  # NumPy warns if it widens a signalling NaN
        array[np.isnan(array)] = np.nan
    assert_close(actual, reference.conv(x, weight), "float32", 36, magnitude=60)


@of_float32
@both_tiles
def test_infinite_times_infinite(cuda, arithmetic, tile):
    x, weight = np.ones((1, 2, 4), np.float32), np.ones((3, 2, 1), np.float32)
    x[0, 0], weight[:, 0, 0] = (np.inf, -np.inf, 0, np.nan), (np.inf, 0, -np.inf)
    assert_close(run_arrays(cuda, x, weight, arithmetic, tile), reference.conv(x, weight), "float32", 2)


@pytest.mark.parametrize("arithmetic", ["FMA", "TF32X3"])
@both_tiles
def test_the_largest_number_does_not_overflow(cuda, arithmetic, tile):
    largest = np.finfo(np.float32).max
    x = np.array([[[largest, -largest, largest * np.float32(1 - 2.0**-12), largest * np.float32(1 - 2.0**-10)]]])
    weight = np.array([1, 0.5, -1], np.float32)[:, None, None]
    actual = run_arrays(cuda, x, weight, arithmetic, tile)
    expected = reference.conv(x, weight)
    assert_close(actual, expected, "float32", 1, magnitude=abs(expected))
    assert_close(
        run_arrays(cuda, weight.reshape(1, 1, 3), x.reshape(4, 1, 1), arithmetic, tile)[0],
        expected[0].T,
        "float32",
        1,
        magnitude=abs(expected[0].T),
    )


# ---- order -------------------------------------------------------------------------------------------------------


@every_variant
def test_the_order_of_threads_and_blocks_changes_nothing(cuda_target, variant):
    """The host device runs threads and blocks in another order at every launch."""
    windows = dict(kernel=(1, 1)) if variant["GATHER"] == "PIXEL_CHUNKS" else dict(kernel=(3, 3), padding=1)
    case = ConvCase(
        batch=2, channels=(24, 16), out_channels=70, spatial=(9, 8), dtype=variant["DTYPE"], **windows,
        layouts=("channels_last",) * 2 * (variant["GATHER"] == "ALONG_CHANNELS"), **EPILOGUE,
    )  # fmt: skip
    case = with_what_is_defined(case)
    arrays = case.arrays(integer=False)
    results = [run_case(cuda_target, case, arrays, variant)[0].tobytes() for _ in range(3)]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("variant", ALONG_PIXELS, ids=name_of)
def test_inputs_of_whole_blocks_are_bit_for_bit_their_concatenation(cuda, variant):
    """64 channels fill whole K-slabs of every dtype, and every input begins a slab."""
    dtype = as_dtype(variant["DTYPE"])
    generator = np.random.default_rng(7)
    xs = [generator.standard_normal((2, channels, 5, 6)).astype(dtype) for channels in (64, 128, 64)]
    weight = generator.standard_normal((5, 256, 1, 1)).astype(dtype)
    results = [
        run_arrays(cuda, x, weight, variant["ARITHMETIC"], tile_of(variant)) for x in (xs, np.concatenate(xs, axis=1))
    ]
    assert results[0].tobytes() == results[1].tobytes()


# ---- plans -------------------------------------------------------------------------------------------------------


def plan_for(on, dtype="float32", *, tf32=False, limit=None, outputs=64):
    x, weight = np.empty((8, 64, 28, 28), as_dtype(dtype)), np.empty((outputs, 64, 3, 3), as_dtype(dtype))
    with cupyconv.options(allow_tf32=tf32, workspace_limit=limit):
        return cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="implicit_gemm", on=on)


def arithmetic_of(plan):
    return dict(product_of(plan).kernel.macros)["ARITHMETIC"]


@pytest.mark.parametrize("on", ["sm_86", "sm_89", "sm_120"])
def test_a_multiprocessor_of_100_kib_holds_two_large_tiles(on):
    """This holds for 16-bit types and TF32, whose threads may use 128 registers each."""
    taken = {implicit_gemm.shared_bytes((128, 128), arithmetic, "float32") for arithmetic in ("MMA", "TF32")}
    assert [blocks_that_fit(128, implicit_gemm.TILES[128, 128], bytes_, KNOWN_GPUS[on]) for bytes_ in taken] == [2]


@pytest.mark.parametrize("on", KNOWN_GPUS)
def test_what_each_gpu_computes_with(on):
    first = on == "sm_75"
    assert arithmetic_of(plan_for(on, "float16")) == "MMA"
    assert arithmetic_of(plan_for(on, tf32=True)) == ("FMA" if first else "TF32")
    assert arithmetic_of(plan_for(on)) in (("FMA",) if first else ("FMA", "TF32X3"))
    assert arithmetic_of(plan_for(on, "float64")) in (("FMA",) if first else ("FMA", "MMA"))
    if first:
        with pytest.raises(ValueError, match="does not apply: sm_75 has no matrix instructions for bfloat16"):
            plan_for(on, "bfloat16")
    else:
        assert arithmetic_of(plan_for(on, "bfloat16")) == "MMA"


def test_what_has_no_complex_kernel_is_refused():
    with pytest.raises(ValueError, match="'implicit_gemm' does not apply: no kernel for products of complex128"):
        plan_for("sm_90", "complex128")
    with pytest.raises(
        ValueError, match="'implicit_gemm' does not apply: sm_75 has no matrix instructions for complex64"
    ):
        plan_for("sm_75", "complex64")
    x, weight = np.ones((1, 2, 5, 5), np.complex64), np.ones((3, 2, 1, 1), np.float32)
    with pytest.raises(ValueError, match="no kernel for products of complex64 and float32"):
        cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90")


@pytest.mark.grid(variant=ALONG_PIXELS, channels=[(9,), (24, 7, 200)], groups=[1, 3])
def test_workspace_is_the_packed_weight_and_the_parts_of_sums(cuda_target, variant, channels, groups):
    """Bytes are counted here from the definition: every run in whole K-chunks, then in slabs, and every tile whole."""
    dtype, tile = as_dtype(variant["DTYPE"]), tile_of(variant)
    channels, outputs, taps = tuple(3 * count for count in channels), 3 * 50, 6
    xs = [cuda_target.to_device(np.zeros((2, count, 4, 5), dtype)) for count in channels]
    weight = cuda_target.to_device(np.zeros((outputs, sum(channels) // groups, 3, 2), dtype))
    call = checked_call(cupyconv.conv, xs, weight, groups=groups)
    plan = forced_plan(call, variant["ARITHMETIC"], tile)

    edges = np.cumsum((0, *channels))
    step, slab = edges[-1] // groups, 64 // dtype.itemsize
    shared = [[max(0, min(b, (g + 1) * step) - max(a, g * step)) for a, b in pairwise(edges)] for g in range(groups)]
    slabs = max(sum(-(-(-(-count // 4) * 4 * taps) // slab) for count in counts) for counts in shared)
    rows = -(-outputs // groups // tile[0]) * tile[0]
    sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    parts = 2 if variant["ARITHMETIC"] == "TF32X3" and tile[0] == 128 else 1
    assert sizes.pop("packed_weight") == groups * slabs * slab * rows * dtype.itemsize * parts
    splits = product_of(plan).grid[1]
    sum_bytes = max(4, dtype.itemsize)
    assert sizes == ({"sums": splits * prod((2, outputs, 2, 4)) * sum_bytes} if splits > 1 else {})


def test_a_limit_that_the_packed_weight_exceeds():
    needed = plan_for("sm_90").workspace_bytes
    with pytest.raises(
        ValueError, match=r"packed weight needs [\d,]+ bytes of workspace, the limit is 1,000"
    ) as refusal:
        plan_for("sm_90", limit=1000)
    smallest = int(re.search(r"needs ([\d,]+) bytes", str(refusal.value)).group(1).replace(",", ""))
    assert plan_for("sm_90", limit=smallest).workspace_bytes == smallest <= needed
    with pytest.raises(ValueError, match="the limit is"):
        plan_for("sm_90", limit=smallest - 1)


def test_a_sum_stays_whole_where_its_parts_exceed_the_limit():
    x, weight = np.empty((1, 512, 7, 7), np.float32), np.empty((64, 512, 3, 3), np.float32)
    explained = []
    for spare in (None, 2 * 64 * 25 * 4, 0):
        limit = None if spare is None else explained[0].workspace[0].nbytes + spare
        with cupyconv.options(workspace_limit=limit):
            explained.append(cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_80"))
    assert product_of(explained[0]).grid[1] > 2
    assert [product_of(plan).grid[1] for plan in explained[1:]] == [2, 1]


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "settings"),
    [
        ((1, 1, 2**29), (1, 1, 3), {}),
        ((1, 1, 8), (1, 1, 3), {"padding": 2**28}),
        ((2**29, 1, 8), (1, 1, 3), {}),
        ((1, 2**27, 8), (1, 2**27, 3), {}),
        ((1, 1, 8), (2**24, 1, 3), {}),
    ],
    ids=["size", "padding", "batch", "terms", "outputs"],
)
def test_sizes_beyond_int32_are_refused(x_shape, weight_shape, settings):
    """The limits leave a margin, because sums of a few such numbers must fit too."""
    x, weight = (np.broadcast_to(np.zeros((), np.float32), shape) for shape in (x_shape, weight_shape))
    with (
        cupyconv.options(workspace_limit=1 << 60),
        pytest.raises(ValueError, match=r"'implicit_gemm' .* exceed the kernel's int32 indices"),
    ):
        cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90", **settings)


def test_planning_does_not_count_every_group():
    """Groups of one input are alike; 100,000 of them one by one would take seconds."""
    call = checked_call(cupyconv.conv, np.zeros((1, 300_000, 1)), np.zeros((100_000, 3, 1)), groups=100_000, on="sm_90")
    assert list(group_runs(call.problem.geometry)) == [[3]]


def test_the_page():
    page = str(plan_for("sm_90"))
    for words in ("implicit_gemm on cuda", "kernel   pack_weight<bits32>", "kernel   implicit_gemm<float32, ", "tiles of ",
                  "packed_weight", "cores"):  # fmt: skip
        assert words in page, f"{words!r} is missing in\n{page}"
    assert "tensor cores" in str(plan_for("sm_75", "float16")) and "CUDA cores" in str(plan_for("sm_75"))


@pytest.mark.parametrize(("taps", "is_long"), [(29, 0), (30, 1)])
def test_windows_of_more_taps_than_bits_are_gone_through_another_way(taps, is_long):
    """A window has one bit per tap of each axis, in 31 of 32 bits: 29 for a row, and one for each axis with one tap."""
    x, weight = np.broadcast_to(np.float32(0), (1, 4, 64)), np.broadcast_to(np.float32(0), (4, 4, taps))
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", on="sm_90")
    (launch,) = (step for step in plan.steps if getattr(step, "kernel", None) and step.kernel.name == "implicit_gemm")
    assert dict(launch.params)["steps"][-1] == is_long
