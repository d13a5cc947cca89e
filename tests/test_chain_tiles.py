"""The rows that a tile of a chain reads and computes, checked row by row against the definition of a convolution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import share_of_examples

from cupyconv.numpy.chain_tiles import Piece, bands_to_plan, kept_rows, rows_of_band, tiles, tiles_to_plan
from cupyconv.problem.geometry import ConvGeometry, ranges_of
from cupyconv.problem.problems import NotApplicable

Tile = tuple[Piece, ...]


def layer_along(
    axis: int, size: int, kernel: int = 1, stride: int = 1, dilation: int = 1, before: int = 0, after: int = 0
) -> ConvGeometry:
    """Return a one-dimensional layer along `axis`."""

    def along(value: int, other: int) -> Any:
        return tuple(value if each == axis else other for each in range(3))

    return ConvGeometry(
        batch=7, channels=(2,), size=along(size, 1), kernel=along(kernel, 1), stride=along(stride, 1),
        before=along(before, 0), after=along(after, 0), dilation=along(dilation, 1), out_channels=2,
        padding_mode="constant", rank=3, groups=1,
    )  # fmt: skip


def any_chain(random: Random, rows: int) -> tuple[list[ConvGeometry], int]:
    """Return random layers for an image with `rows` rows, and the axis along which rows are counted."""
    axis, size, layers = random.randrange(3), rows, []
    for _ in range(random.randint(1, 4)):
        kernel, stride, dilation = random.randint(1, 5), random.choice((1, 1, 2, 3)), random.choice((1, 1, 2))
        before, after = (random.choice((0, 1, kernel // 2, random.randint(0, 9))) for _ in range(2))
        one = layer_along(axis, size, kernel, stride, dilation, before, after)
        layers.append(one)
        size = one.out_size[axis]
        assume(size > 0)
    return layers, axis


def reached(geometry: ConvGeometry, axis: int, row: int) -> list[int]:
    """Return the rows that a row of the result is computed from by definition; rows outside the image are padding."""
    first = row * geometry.stride[axis] - geometry.before[axis]
    return [first + tap * geometry.dilation[axis] for tap in range(geometry.kernel[axis])]


def kinds(run: Iterable[Tile]) -> set[tuple[int, ConvGeometry]]:
    return {(i, piece.geometry) for tile in run for i, piece in enumerate(tile) if piece.outputs}


@share_of_examples(2)
@given(st.randoms(use_true_random=False))
def test_a_tile_has_what_it_reads_and_nothing_is_computed_twice(random):
    layers, axis = any_chain(random, random.randint(1, 60))
    extent, step = layers[-1].out_size[axis], random.randint(1, 9)
    begin = random.randrange(extent)
    band = range(begin, random.randint(begin + 1, extent))
    run = list(tiles(layers, axis, 3, band, step))
    assert [row for tile in run for row in tile[-1].outputs] == [*band]
    computed: list[set[int]] = [set() for _ in layers]
    for tile in run:
        assert len(tile[-1].outputs) <= step
        for i, (piece, layer) in enumerate(zip(tile, layers, strict=True)):
            assert not computed[i] & {*piece.outputs}
            computed[i] |= {*piece.outputs}
            if not piece.outputs:
                continue
            part = piece.geometry
            assert (part.batch, part.size[axis], part.out_size[axis]) == (3, len(piece.reads), len(piece.outputs))
            assert i == 0 or {*piece.reads} <= computed[i - 1]
            for own, row in enumerate(piece.outputs):
                for local, there in zip(reached(part, axis, own), reached(layer, axis, row), strict=True):
                    within = 0 <= there < layer.size[axis]
                    assert within == (0 <= local < len(piece.reads))
                    assert not within or piece.reads[local] == there
    for i, count in enumerate(rows_of_band(layers, axis, band)):
        gaps = any(layer.stride[axis] > layer.span[axis] for layer in layers[i + 1 :])
        assert count == len(computed[i]) or (gaps and count > len(computed[i]))


@share_of_examples(2)
@given(st.randoms(use_true_random=False))
def test_rows_that_are_kept_are_those_that_the_tile_before_has_computed(random):
    layers, axis = any_chain(random, random.randint(20, 90))
    run = list(tiles(layers, axis, 1, range(layers[-1].out_size[axis]), random.randint(1, 9)))
    most = [0] * (len(layers) - 1)
    for tile in run:
        for i, (piece, after) in enumerate(pairwise(tile)):
            if piece.outputs:
                most[i] = max(most[i], len({*after.reads} - {*piece.outputs}))
    assert kept_rows(run) == most


def test_rows_of_padding_alone_need_none_of_the_layers_before():
    """Tiles at the end of an image whose windows read only padding need no rows of earlier layers, and keep none."""
    extent = 20
    layers = [layer_along(0, extent), layer_along(0, extent), layer_along(0, extent, after=9)]
    run = list(tiles(layers, 0, 1, range(extent + 2, extent + 8), 2))
    assert len(run) == 3 and kept_rows(run) == [0, 0]
    for *before, last in run:
        assert len(last.outputs) == 2 and not last.reads
        assert not any(piece.outputs or piece.reads for piece in before)


@share_of_examples(4)
@given(st.randoms(use_true_random=False))
def test_what_is_planned_has_all_kinds_of_parts_that_there_are(random):
    """Planning looks at few of many tiles and bands, and still finds every kind of part."""
    layers, axis = any_chain(random, random.randint(200, 1500))
    extent, step = layers[-1].out_size[axis], random.choice((1, 2, 3, 7))
    bands: Sequence[range] = ranges_of(extent, -(-extent // random.randint(1, 9)))
    everything = set()
    for band in bands:
        run = list(tiles(layers, axis, 1, band, step))
        everything |= kinds(run)
        try:
            planned = list(tiles_to_plan(layers, axis, 1, band, step))
        except NotApplicable:
            continue
        assert kinds(planned) == kinds(run) and kept_rows(planned) == kept_rows(run)
        assert max(map(longest, planned)) == max(map(longest, run))
        assert len(planned) == len(run) if len(run) <= 32 else len(run) < 300 or len(planned) < len(run)
    chosen = bands_to_plan(layers, axis, bands)
    assert everything == set().union(*(kinds(tiles(layers, axis, 1, band, step)) for band in chosen))


def longest(tile: Tile) -> list[int]:
    return [len(piece.reads) for piece in tile]
