"""Properties of every NumPy plan of a chain, by tiles and layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import array
from strategies import share_of_examples
from test_every_numpy_plan import MAX_LIMIT, MIN_LIMIT, about

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.explain import checked_call
from cupyconv.numpy import chain, chain_fused
from cupyconv.numpy.backend import NumpyBackend, Scratch
from cupyconv.numpy.block_toeplitz import BlockToeplitz
from cupyconv.numpy.chain import LayersLoop, _unfused
from cupyconv.numpy.chain_fused import (
    ChainLoop,
    Fused,
    _by_price,
    _Draft,
    _draft,
    _planned,
    _tile_sizes,
    axis_of,
    plan_fused,
)
from cupyconv.numpy.convolution import ConvLoop
from cupyconv.problem.geometry import ranges_of
from cupyconv.problem.problems import ChainProblem, HostModel, NotApplicable

BACKEND = NumpyBackend()
#: Bounds of a chain's estimated time divided by that of its parts: the estimate knows only the usual parts.
FAR_LESS, FAR_MORE = 0.05, 15.0
#: A function that makes an array with a shape, a dtype and a memory order.
Make = Callable[..., np.ndarray]


def any_chain(random: Random, make: Make, scale: int) -> tuple[np.ndarray, list[ConvLayer]]:
    """Return an image and random layers with strides and groups; some layers read many rows that are only padding."""
    rank, channels, batch = random.choice((1, 2, 2, 3)), about(random, 1, 12), about(random, 1, 9)
    dtype = random.choice(("float32", "float32", "float64"))
    size = [about(random, 1, {1: 10 * scale, 2: scale, 3: scale // 3}[rank]) for _ in range(rank)]
    x = make(batch, channels, *size, dtype=dtype, order=random.choice(("C", "last")))
    layers = []
    for _ in range(random.randint(2, 4)):
        kernel = [random.choice((1, 3, 3, 5)) for _ in range(rank)]
        padding = tuple(random.choice((taps // 2, taps // 2, taps - 1, 9)) for taps in kernel)
        stride = tuple(random.choice((1, 1, 1, 2)) for _ in range(rank))
        groups = random.choice((1, 1, channels))
        outputs = groups * about(random, 1, 12 // groups)
        weight = make(outputs, channels // groups, *kernel, dtype=dtype, order=random.choice(("C", "C", "last")))
        activation = random.choice((None, "relu"))
        layers.append(ConvLayer(weight, stride=stride, padding=padding, groups=groups, activation=activation))
        channels = outputs
    return x, layers


def chain_of(random: Random, make: Make = array, scale: int = 60) -> tuple[ChainProblem, dict[str, Any]]:
    """Return a random chain with a random workspace limit and number of threads, and its arrays."""
    x, layers = any_chain(random, make, scale)
    (result,) = checked_call(cupyconv.conv_chain, x, layers).results
    out = np.empty(result.shape, result.dtype)  # has its own memory, unlike arrays made by `array`
    call = checked_call(cupyconv.conv_chain, x, layers, out=out)
    problem: Any = call.problem
    machine = HostModel(random.choice((1, 2, 3)))
    limit = about(random, MIN_LIMIT, MAX_LIMIT)
    problem = on(replace(problem, workspace_limit=limit), machine)
    return problem, call.arrays


def on(problem: ChainProblem, machine: HostModel) -> ChainProblem:
    layers = tuple(replace(layer, machine=machine) for layer in problem.layers)
    return replace(problem, machine=machine, layers=layers)


def fused(problem: ChainProblem) -> Fused | None:
    try:
        return plan_fused(problem)
    except NotApplicable as refusal:
        assert str(refusal)
        return None


@pytest.fixture
def tile_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the approximate tile size, so that small images have several tiles."""
    return partial(monkeypatch.setattr, chain_fused, "TILE_BYTES")


@share_of_examples(0.6)
@given(st.integers(0, 10**9))
def test_tiles_are_all_of_a_chain_in_parts_that_were_planned(tile_bytes, seed):
    """Tiles cover the result once with any number of threads; their estimated time is about that of their parts."""
    random = Random(seed)
    problem, _ = chain_of(random)
    most = about(random, 1 << 8, 1 << 18)
    tile_bytes(most)
    tiled = fused(problem)
    if tiled is None:
        return
    loop, threads = tiled.loop, problem.host.threads
    last, (samples, rows) = problem.layers[-1].geometry, loop.tile
    extent = last.out_size[loop.axis]
    assert (extent >= 32 and all(size < 32 for size in last.out_size[: loop.axis])) or extent == max(last.out_size)
    assert samples == rows == 1 or problem.intermediate_bytes * samples * rows <= most * last.batch * extent
    # Threads share samples.  If these are too few, they share bands of rows; adjacent bands compute some rows twice.
    groups = ranges_of(last.batch, samples)
    assert [row for band in loop.row_ranges for row in band] == [*range(extent)]
    assert loop.bands == 1 or len(groups) % threads
    assert (loop.bands == 1) == (len(loop.row_ranges) == 1)
    assert loop.threads in (1, min(threads, len(groups) * loop.bands))
    assert loop.threads in (1, threads) or loop.bands == -(-extent // rows)
    tiles = [tile for group in groups for band in loop.row_ranges for tile in loop.tiles(len(group), band)]
    assert len(tiles) == loop.tiles_count
    parts = [[part for piece, part in layer if piece.outputs] for layer in zip(*tiles)]
    assert all(part and part.threads * loop.threads <= threads for layer in parts for part in layer)
    together = sum(part.seconds for layer in parts for part in layer if part) / loop.threads
    if problem.limit > 4 * sum(tiled.sizes.values()):  # with less, parts are smaller than estimated
        assert FAR_LESS * together < tiled.seconds < FAR_MORE * together
    assert sum(part.turns for layer in parts for part in layer if part) <= loop.turns


@share_of_examples(0.6)
@given(st.integers(0, 10**9))
def test_a_chain_keeps_within_its_limit_and_what_takes_less_is_taken(tile_bytes, seed):
    """Weight copies larger than half of the limit are added to it, and so are images that a note reports beyond it."""
    random = Random(seed)
    problem, _ = chain_of(random)
    tile_bytes(about(random, 1 << 8, 1 << 21))
    copied = sum(layer.weight.nbytes for layer in problem.layers)
    limit = max(problem.limit, min(problem.limit, copied) + copied)
    apart, tiled = _unfused(problem), fused(problem)
    (layers,) = apart.plan.steps
    assert isinstance(layers, LayersLoop) and layers.times * layers.samples >= problem.layers[0].geometry.batch
    between = sum(buffer.nbytes for buffer in apart.plan.workspace if buffer.name.startswith("layer"))
    assert (apart.plan.workspace_bytes <= limit) if apart.fits else (apart.plan.workspace_bytes - between <= limit)
    assert apart.fits != any("for one sample, beyond the workspace limit" in note for note in apart.plan.notes)
    plan = BACKEND.plan(problem)
    assert (plan.method == "unfused") if tiled is None else (plan.method == "fused") == (tiled.seconds < apart.seconds)
    if tiled is not None:
        assert sum(tiled.sizes.values()) <= limit


def values(*shape: int, dtype: str = "float32", order: str = "C") -> np.ndarray:
    array = np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)
    return np.moveaxis(np.moveaxis(array, 1, -1).copy(), -1, 1) if order == "last" else array


@share_of_examples(0.5)
@given(st.integers(0, 10**9))
def test_tiles_and_layers_compute_the_same(tile_bytes, seed):
    random = Random(seed)
    problem, arrays = chain_of(random, values, 24)
    tile_bytes(about(random, 1 << 6, 1 << 13))
    out, results = arrays["out"], []
    for fuse in (True, False):
        try:
            run = BACKEND.prepare(BACKEND.plan(replace(problem, fuse=fuse)))
        except ValueError as refusal:
            assert fuse and "apply" in str(refusal)
            continue
        out[...] = 77
        with BACKEND.current():
            run(arrays)
        results.append(out.copy())
    assert len(results) == 1 or np.abs(results[0] - results[1]).max() <= 1e-4 * np.abs(results[1]).max()


class Counted(Scratch):
    """A scratch buffer that records the size of each array."""

    def __init__(self, dtype: np.dtype, rounds: int) -> None:
        super().__init__(dtype, rounds)
        self.sizes: dict[str, int] = {}

    def array(self, name: str, shape: Any, dtype: np.dtype | None = None) -> np.ndarray:
        result = super().array(name, shape, dtype)
        self.sizes[name] = max(self.sizes.get(name, 0), result.nbytes)
        return result


#: Layers of one implementation whose parts reuse the same memory, with different largest arrays: shape and dtype of the
#: image, workspace limit, approximate tile bytes; per layer: outputs, channels per group, kernel size and groups.
SHARING: dict[str, tuple[tuple[int, ...], str, int, int, list[tuple[int, int, tuple[int, int], int]]]] = {
    "a tile of one, columns of another": (
        (4, 8, 34, 101), "float32", 312_133, 35_929, [(1, 8, (1, 3), 1), (4, 1, (3, 1), 1), (48, 4, (5, 25), 1)],
    ),
    "columns of one, products of another": (
        (3, 8, 36, 78), "float16", 1_556_002, 635_268, [(1, 8, (15, 15), 1), (16, 1, (15, 25), 1)],
    ),
    "matrices of one, products of another": (
        (6, 1, 28, 112), "float16", 7_337_953, 169_352, [(2, 1, (25, 25), 1), (2, 1, (9, 9), 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("of", SHARING)
def test_memory_that_layers_share_is_counted(of, tile_bytes, monkeypatch):
    """Each shared array is counted with the largest size that any of the layers needs."""
    size, dtype, limit, tile, shapes = SHARING[of]
    made: list[Counted] = []
    monkeypatch.setattr(chain_fused, "Scratch", lambda *of, **rounds: made.append(Counted(*of, **rounds)) or made[-1])
    tile_bytes(tile)
    x, layers = values(*size, dtype=dtype), []
    for outputs, channels, kernel, groups in shapes:
        weight, padding = values(outputs, channels, *kernel, dtype=dtype), tuple(taps // 2 for taps in kernel)
        layers.append(ConvLayer(weight, padding=padding, groups=groups, activation=None if layers else "gelu"))
    with cupyconv.options(threads=1, workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True)
        cupyconv.conv_chain(x, layers, fuse=True)
    held = sum(buffer.nbytes for buffer in plan.workspace if buffer.name.startswith("layer"))
    assert 0 < sum(sum(each.sizes.values()) for each in made) <= plan.workspace_bytes - held


@pytest.mark.parametrize(
    ("of", "share"),
    [
        ("a tile of one, columns of another", 0.9),
        ("columns of one, products of another", 0.31),
        ("matrices of one, products of another", 0.375),
    ],
)
def test_no_more_is_spared_than_layers_cannot_share(of, share, tile_bytes, monkeypatch):
    """Only memory that layers cannot share is reserved: the first tiles fit, as they did not with the largest parts."""
    monkeypatch.setattr(BlockToeplitz, "applies", lambda problem: False)  # for the implementations that `of` names
    size, dtype, limit, tile, shapes = SHARING[of]
    tile_bytes(tile)
    layers = [
        ConvLayer(array(outputs, channels, *kernel, dtype=dtype), padding=tuple(n // 2 for n in kernel), groups=groups)
        for outputs, channels, kernel, groups in shapes
    ]
    problem: Any = checked_call(cupyconv.conv_chain, array(*size, dtype=dtype), layers).problem
    fitting = []
    for percent in range(95, 105):
        within = replace(on(problem, HostModel(1)), workspace_limit=int(limit * share * percent / 100))
        draft = _draft(within, next(_tile_sizes(within, 1)), 1)
        try:
            fitting.append(sum(_planned(within, draft).sizes.values()) / within.limit)
        except NotApplicable as refusal:
            assert needed_of(refusal) > within.limit
    assert len(fitting) >= 3 and 0.5 < min(fitting) and max(fitting) <= 1, fitting


def needed_of(refusal: ValueError) -> int:
    return int(str(refusal).rpartition("needs ")[2].partition(" bytes")[0].replace(",", ""))


def test_tiles_have_room_where_there_is_just_what_they_take():
    """No memory is reserved for layers that need only their images."""
    x, layers = array(2, 8, 64, 64), [ConvLayer(array(8, 8, 1, 1))] * 2
    with cupyconv.options(threads=1, workspace_limit=1), pytest.raises(ValueError, match="needs") as refusal:
        cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True)
    needed = needed_of(refusal.value)
    with cupyconv.options(threads=1, workspace_limit=needed):
        assert cupyconv.explain(cupyconv.conv_chain, x, layers, fuse=True).workspace_bytes <= needed


def test_images_beyond_the_limit_are_said_of_layers_that_need_nothing_else():
    layers = [ConvLayer(array(8, 8, 1, 1))] * 2
    with cupyconv.options(threads=1, workspace_limit=1000):
        plan = cupyconv.explain(cupyconv.conv_chain, array(2, 8, 64, 64), layers, fuse=False)
    assert plan.workspace_bytes == 4 * 8 * 64 * 64  # the image of one sample
    assert any("bytes for one sample, beyond the workspace limit" in note for note in plan.notes)


@pytest.mark.parametrize("threads", [1, 2])
def test_other_parts_are_planned_like_the_usual_ones(tile_bytes, threads):
    tile_bytes(10_000)
    call = checked_call(cupyconv.conv_chain, array(1, 4, 99, 64), [ConvLayer(array(4, 4, 3, 3), padding=1)] * 3)
    loop = plan_fused(on(call.problem, HostModel(threads))).loop  # type: ignore[arg-type]
    tiles = [tile for band in loop.row_ranges for tile in loop.tiles(1, band)]
    assert len(tiles) > 8
    assert len(loop.loops[0]) > 2  # the first and the last tile have their own
    for layer, loops in zip(zip(*tiles), loop.loops):
        ((usual, _),) = Counter(piece.geometry for piece, _ in layer if piece.outputs).most_common(1)
        assert loops[0].geometry == usual and len({part.name for part in loops}) == 1


def test_threads_are_taken_where_one_takes_nearly_as_little():
    problem: Any = checked_call(cupyconv.conv_chain, array(2, 4, 64, 64), [ConvLayer(array(4, 4, 3, 3))] * 2).problem
    problem = on(problem, HostModel(2))
    several, alone = (ChainLoop(problem, (1, 8), 1, threads) for threads in (2, 1))
    drafts = [_Draft(alone, 2, 1.0, 1.0), _Draft(several, 1, 1.05, 2.0), _Draft(alone, 2, 0.5, 0.5)]
    assert sorted(drafts, key=_by_price) == [drafts[2], drafts[1], drafts[0]]


@pytest.mark.parametrize(
    ("seconds", "fits", "method"),
    [(0.99, True, "unfused"), (1.01, True, "fused"), (0.97, False, "fused"), (0.9, False, "unfused")],
)
def test_layers_beyond_the_limit_are_taken_where_they_take_clearly_less(seconds, fits, method, monkeypatch):
    problem: Any = checked_call(cupyconv.conv_chain, array(2, 4, 64, 64), [ConvLayer(array(4, 4, 3, 3))] * 2).problem
    problem, own = on(problem, HostModel(1)), chain._unfused
    tiled = plan_fused(problem).seconds
    monkeypatch.setattr(chain, "_unfused", lambda of: own(of)._replace(seconds=seconds * tiled, fits=fits))
    assert BACKEND.plan(problem).method == method


@pytest.mark.parametrize(
    ("machine", "channels", "holds"),
    [(HostModel(1, most=2), 96, True), (HostModel(1, most=2), 4, False), (HostModel(1), 96, False)],
)
def test_tiles_of_one_thread_hold_blas_where_it_would_divide_their_products(machine, channels, holds):
    """BLAS is not held if the caller asked for one thread: its threads are then the caller's decision."""
    layers = [ConvLayer(array(channels, channels, 3, 3))] * 2
    problem: Any = checked_call(cupyconv.conv_chain, array(1, channels, 40, 40), layers).problem
    assert plan_fused(on(problem, machine)).loop.holds_blas == holds


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [(3, 60, 9), (3, 9, 60)])
def test_parts_are_planned_for_arrays_as_they_lie(size, dtype, tile_bytes, monkeypatch):
    """Parts get arrays with the planned strides, weights in the compute dtype, and the memory of the previous part."""
    tile_bytes(4_000)
    seen, own = 0, ConvLoop.run

    def run(loop: ConvLoop, arrays: dict[str, np.ndarray], scratch: Scratch) -> None:
        nonlocal seen
        for operand, image in [(x, arrays[x.name]) for x in loop.problem.xs] + [(loop.problem.out, arrays["out"])]:
            lies = [step // image.itemsize for extent, step in zip(image.shape, image.strides) if extent > 1]
            assert image.shape == operand.shape and image.dtype == operand.dtype
            assert lies == [step for extent, step in zip(operand.shape, operand.strides) if extent > 1]
        assert arrays["weight"].dtype == loop.factor_dtype == np.float32
        assert np.shares_memory(*(scratch.array("any", (8,)) for _ in range(2)))
        seen += 1
        own(loop, arrays, scratch)

    monkeypatch.setattr(ConvLoop, "run", run)
    layers = [
        ConvLayer(values(4, 3, 3, 3, dtype=dtype), padding=1),
        *[ConvLayer(values(4, 4, 3, 3, dtype=dtype), padding=1)] * 2,
    ]
    with cupyconv.options(threads=1):
        cupyconv.conv_chain(values(1, *size, dtype=dtype), layers, fuse=True)
    assert seen > 8


def test_a_layer_may_have_no_channels():
    layers = [ConvLayer(np.ones((0, 2, 3, 3))), ConvLayer(np.ones((3, 0, 3, 3)), np.arange(3.0))]
    y = cupyconv.conv_chain(np.ones((1, 2, 40, 40)), layers, fuse=True)
    assert (y == np.arange(3.0)[:, None, None]).all()


@pytest.mark.parametrize(
    ("batch", "tile", "bands"), [(4, (1, 8), 1), (3, (1, 8), 2), (3, (1, 76), 1), (3, (2, 8), 1), (1, (2, 8), 2)]
)
def test_rows_are_of_the_last_layer_and_in_bands_where_samples_are_too_few_for_threads(batch, tile, bands):
    layers = [ConvLayer(array(4, 4, 3, 3)), ConvLayer(array(4, 4, 3, 3), stride=(19, 1))]  # in the end 2 x 76 pixels
    problem: Any = checked_call(cupyconv.conv_chain, array(batch, 4, 40, 80), layers).problem
    problem = on(problem, HostModel(2))
    cut = _draft(problem, tile, 2).cut
    assert (cut.axis, cut.bands, len(cut.row_ranges), sum(map(len, cut.row_ranges))) == (2, bands, bands, 76)
    assert next(_tile_sizes(problem, 2)) == (-(-batch // 2), 76)


@pytest.mark.parametrize(("size", "axis"), [((4, 9), 2), ((9, 4), 1), ((9, 9), 1)])
def test_rows_of_a_small_result_are_along_its_longest_axis(size, axis):
    problem: Any = checked_call(cupyconv.conv, array(1, 2, *size), array(2, 2, 1, 1)).problem
    assert axis_of(problem.geometry) == axis


@pytest.mark.parametrize(
    ("size", "kernel", "limit", "words"),
    [
        ((1, 64, 1, 1), 1, 100, "a tile of 1 sample x 1 row needs"),
        ((1, 2, 90, 4), 41, 1 << 24, "windows at the borders of an image extend over more than 32 tiles"),
        ((1, 2, 90, 4), 17, 1 << 24, "more than 12 kinds of parts per layer"),
    ],
)
def test_why_there_are_no_tiles(tile_bytes, size, kernel, limit, words):
    """Every row of windows that reach beyond an end has different padding and would need its own plan."""
    tile_bytes(1)
    weight = array(size[1], size[1], kernel, 1)
    layers = [ConvLayer(weight, padding=(kernel // 2, 0))] * 2
    with cupyconv.options(workspace_limit=limit, threads=1), pytest.raises(ValueError, match=words):
        cupyconv.explain(cupyconv.conv_chain, array(*size), layers, fuse=True)
