"""Rows of a chain of convolutions: the rows of every image that a tile of the result needs, and which of these are new.

"Rows" are counted along one spatial axis.  Planning goes backwards through the layers.  The rows that a layer computes
determine the rows that it reads, which the layer before must provide.  Some of these remain from the previous tile.

::

    last layer     | rows done      | rows of this tile |
    layer before   | rows done        | new rows          |      the tile's rows with the halo of their windows,
    x              | rows read           | rows read         |   without the rows that are in memory already

Rows that a layer will read again stay in memory for the next tile, and only missing rows are computed.  No row is
computed twice, except at the start of a band, because the neighbouring band belongs to another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cupyconv.problem.geometry import ConvGeometry, Triple
from cupyconv.problem.problems import NotApplicable

#: Tiles of a band up to which planning looks at every tile.  In a longer band it looks only at the tiles where
#: something changes, and gives up if windows at an end of an image reach over more tiles than this.
_PLANNED_TILES = 32


@dataclass(frozen=True)
class Piece:
    """Some rows of a layer's result, as a convolution of the rows that they read.

    Its zero padding is the part of the layer's padding that is next to these rows.
    """

    outputs: range
    reads: range
    geometry: ConvGeometry


def tiles(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Yield tiles of `step` rows of the last layer, with one piece per layer.

    Each layer's rows follow one another, and no row is computed twice.
    """
    done = [0] * len(layers)
    # Most tiles are alike: they share one geometry object per layer, which is created and hashed once.
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
    """Yield some tiles of a band such that all other tiles differ from one of these only in position.

    Raises NotApplicable if these are too many.
    """
    count = -(-len(rows) // step)
    numbers: Iterable[int] = range(count)
    if count > _PLANNED_TILES:
        # Tiles are alike, except near those in which a layer's windows reach an end of its image.
        near = {0, count - 1}
        for begin, end in _rows_at_ends(layers, axis):
            first, last = (min(max((row - rows.start) // step, -2), count + 1) for row in (begin, end))
            if last - first > _PLANNED_TILES:
                raise NotApplicable(f"windows at the borders of an image extend over more than {_PLANNED_TILES} tiles")
            near.update(range(first, last + 1))
        numbers = sorted({n for i in near for n in range(i - 2, i + 3) if 0 <= n < count})
    before = -1
    for number in numbers:
        if number > before + 1 or number == 0:
            # The rows that a tile adds depend on the tile before it.
            begin = rows.start + max(0, number - 1) * step
            run = tiles(layers, axis, samples, range(begin, rows.stop), step)
            if number:
                next(run)
        before = number
        yield next(run)


def bands_to_plan(layers: Sequence[ConvGeometry], axis: int, bands: Sequence[range]) -> list[range]:
    """Some bands such that all other bands differ from one of these only in position.

    Bands that meet no end of an image are alike.
    """
    ends = list(_rows_at_ends(layers, axis))
    chosen = [bands[0], *bands[1:-1][:1], *bands[1:][-1:]]
    met = [band for band in bands if any(begin <= band.stop and band.start <= end for begin, end in ends)]
    return list(dict.fromkeys(chosen + met))


def _rows_at_ends(layers: Sequence[ConvGeometry], axis: int) -> Iterator[tuple[int, int]]:
    """Yield, for both ends of each layer's image, the first and last row of the result whose windows meet this end."""
    for i in range(len(layers)):
        for position in (0, layers[i].size[axis]):
            begin = end = position
            for layer in layers[i:]:
                first = begin + layer.before[axis] - layer.span[axis]
                begin, end = first // layer.stride[axis], (end + layer.before[axis]) // layer.stride[axis]
            yield begin, end


def _reads(geometry: ConvGeometry, axis: int, outputs: range) -> tuple[range, int, int]:
    """The rows that `outputs` are computed from, and the numbers of rows of padding before and after them."""
    stride, size = geometry.stride[axis], geometry.size[axis]
    first = outputs.start * stride - geometry.before[axis]
    count = (len(outputs) - 1) * stride + geometry.span[axis] if outputs else 0
    begin = min(max(first, 0), size)
    end = max(begin, min(first + count, size))
    before = min(max(begin - first, 0), count)
    return range(begin, end), before, count - before - (end - begin)


def _part(geometry: ConvGeometry, axis: int, samples: int, rows: int, before: int, after: int) -> ConvGeometry:
    """The convolution of `rows` rows, with `before` and `after` rows of padding."""

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
    """Number of rows of each layer's result that are computed for a band."""
    counts = []
    for layer in reversed(layers):
        counts.append(len(rows))
        rows = _reads(layer, axis, rows)[0]
    return counts[::-1]


def kept_rows(parts: Sequence[tuple[Piece, ...]]) -> list[int]:
    """Most rows of each intermediate image that stay in memory from one tile to the next."""
    return [
        max((len(part[i + 1].reads) - len(part[i].outputs) for part in parts if part[i].outputs), default=0)
        for i in range(len(parts[0]) - 1)
    ]
