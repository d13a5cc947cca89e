"""Rows of a chain of convolutions: which rows of every image a tile of the last one's needs, and which of them are new.

"Rows" run along one spatial axis.  Going back through the layers, the rows that a layer computes say which rows
it reads, which are those that the layer before must have; some of these it has from the tile before.

::

    last layer     | rows done      | rows of this tile |
    layer before   | rows done        | new rows          |      the window's rows on both sides of the tile,
    x              | rows read           | rows read         |   less what is at hand already

Rows that a layer will read again are kept for the next tile, and only rows that are not there yet are computed: none twice,
but where a band begins, whose neighbour belongs to another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cupyconv.problem.geometry import ConvGeometry, Triple
from cupyconv.problem.problems import NotApplicable

#: Tiles of a band up to which planning looks at each; of more, at those where something changes, if these are as few.
_PLANNED_TILES = 32


@dataclass(frozen=True)
class Piece:
    """Some rows of a layer's result, as a convolution of the rows that they read.

    Its padding is zeros: what of the layer's own lies beside these rows.
    """

    outputs: range
    reads: range
    geometry: ConvGeometry


def tiles(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Rows of the last layer, `step` at a time: one piece a layer, each layer's rows one after the other, none twice."""
    done = [0] * len(layers)
    # Most tiles are alike: their parts are one object, made and hashed once.
    alike: dict[tuple[int, int, int, int], ConvGeometry] = {}
    for first in range(rows.start, rows.stop, step):
        needed = range(first, min(first + step, rows.stop))
        tile: list[Piece] = []
        for i in reversed(range(len(layers))):
            new = range(min(max(needed.start, done[i]), needed.stop), needed.stop)
            done[i] = max(done[i], needed.stop)
            reads, before, after = _reads(layers[i], axis, new)
            key = i, len(reads), before, after
            if key not in alike:
                alike[key] = _part(layers[i], axis, samples, *key[1:])
            tile.append(Piece(new, reads, alike[key]))
            needed = reads if new else range(0)
        yield tuple(reversed(tile))


def tiles_to_plan(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Tiles of a band among which are all that differ in more than where they lie; NotApplicable where these are many."""
    count = -(-len(rows) // step)
    numbers: Iterable[int] = range(count)
    if count > _PLANNED_TILES:
        # Before a tile at which one layer's windows first reach an end of its image, or last do, all are alike.
        near = {0, count - 1}
        for begin, end in _rows_at_ends(layers, axis):
            first, last = (min(max((row - rows.start) // step, -2), count + 1) for row in (begin, end))
            if last - first > _PLANNED_TILES:
                raise NotApplicable(f"windows at the ends of an image reach over more than {_PLANNED_TILES} tiles")
            near.update(range(first, last + 1))
        numbers = sorted({n for i in near for n in range(i - 2, i + 3) if 0 <= n < count})
    before = -1
    for number in numbers:
        if number > before + 1 or number == 0:
            # What a tile adds depends on the one before it.
            begin = rows.start + max(0, number - 1) * step
            run = tiles(layers, axis, samples, range(begin, rows.stop), step)
            if number:
                next(run)
        before = number
        yield next(run)


def bands_to_plan(layers: Sequence[ConvGeometry], axis: int, bands: Sequence[range]) -> list[range]:
    """Bands among which are all that differ in more than where they lie: those between the ends of images are alike."""
    ends = list(_rows_at_ends(layers, axis))
    chosen = [bands[0], *bands[1:-1][:1], *bands[1:][-1:]]
    met = [band for band in bands if any(begin <= band.stop and band.start <= end for begin, end in ends)]
    return list(dict.fromkeys(chosen + met))


def _rows_at_ends(layers: Sequence[ConvGeometry], axis: int) -> Iterator[tuple[int, int]]:
    """For both ends of each layer's image: the first and the last row of the last result whose windows meet it."""
    for i in range(len(layers)):
        for position in (0, layers[i].size[axis]):
            begin = end = position
            for layer in layers[i:]:
                first = begin + layer.before[axis] - layer.span[axis]
                begin, end = first // layer.stride[axis], (end + layer.before[axis]) // layer.stride[axis]
            yield begin, end


def _reads(geometry: ConvGeometry, axis: int, outputs: range) -> tuple[range, int, int]:
    """The rows that rows of the result are computed from, and those of padding before and after them."""
    stride, size = geometry.stride[axis], geometry.size[axis]
    first = outputs.start * stride - geometry.before[axis]
    count = (len(outputs) - 1) * stride + geometry.span[axis] if outputs else 0
    begin = min(max(first, 0), size)
    end = max(begin, min(first + count, size))
    before = min(max(begin - first, 0), count)
    return range(begin, end), before, count - before - (end - begin)


def _part(geometry: ConvGeometry, axis: int, samples: int, rows: int, before: int, after: int) -> ConvGeometry:
    """The convolution of so many rows."""

    def put(values: Triple, value: int) -> Triple:
        return values[:axis] + (value,) + values[axis + 1 :]  # type: ignore[return-value]

    return replace(
        geometry,
        batch=samples,
        size=put(geometry.size, rows),
        before=put(geometry.before, before),
        after=put(geometry.after, after),
    )


def rows_of_band(layers: Sequence[ConvGeometry], axis: int, rows: range) -> list[int]:
    """Rows of each layer's result that are computed for a band."""
    counts = []
    for layer in reversed(layers):
        counts.append(len(rows))
        rows = _reads(layer, axis, rows)[0]
    return counts[::-1]


def kept_rows(parts: Sequence[tuple[Piece, ...]]) -> list[int]:
    """The most rows of each image between that are kept from one tile to the next."""
    return [
        max((len(part[i + 1].reads) - len(part[i].outputs) for part in parts if part[i].outputs), default=0)
        for i in range(len(parts[0]) - 1)
    ]
