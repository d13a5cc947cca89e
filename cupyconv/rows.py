"""Rows of a chain of convolutions: what every layer computes so that the last one can go on by a few rows.

"Rows" run along one spatial axis.  Going back through the layers, the rows that a layer computes say which rows
it reads, which are those that the layer before must have; some of these it has from the time before.

::

    last layer     | rows done      | rows of this tile |
    layer before   | rows done        | new rows          |      the window's rows on both sides of the tile,
    x              | rows read           | rows read         |   less what is at hand already
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cupyconv.geometry import ConvGeometry


@dataclass(frozen=True)
class Piece:
    """Some rows of a layer's result, as a convolution of the rows that they read."""

    outputs: range
    reads: range
    geometry: ConvGeometry


def piece(geometry: ConvGeometry, axis: int, samples: int, outputs: range) -> Piece:
    """Rows `outputs` of a convolution padded with zeros: beside the edges of the image they have its padding."""
    stride, size = geometry.stride[axis], geometry.size[axis]
    first = outputs.start * stride - geometry.before[axis]
    count = (len(outputs) - 1) * stride + geometry.span[axis] if outputs else 0
    begin = min(max(first, 0), size)
    end = max(begin, min(first + count, size))
    before = min(max(begin - first, 0), count)

    def put(values: tuple[int, int, int], value: int) -> tuple[int, int, int]:
        return values[:axis] + (value,) + values[axis + 1 :]  # type: ignore[return-value]

    part = replace(
        geometry, batch=samples, size=put(geometry.size, end - begin), before=put(geometry.before, before),
        after=put(geometry.after, count - before - (end - begin)),
    )  # fmt: skip
    return Piece(outputs, range(begin, end), part)


def tiles(
    layers: Sequence[ConvGeometry], axis: int, samples: int, rows: range, step: int
) -> Iterator[tuple[Piece, ...]]:
    """Rows of the last layer, `step` at a time: one piece a layer, each layer's rows one after the other, none twice."""
    done = [0] * len(layers)
    for first in range(rows.start, rows.stop, step):
        needed = range(first, min(first + step, rows.stop))
        tile: list[Piece] = []
        for i in reversed(range(len(layers))):
            new = range(min(max(needed.start, done[i]), needed.stop), needed.stop)
            tile.append(piece(layers[i], axis, samples, new))
            done[i] = max(done[i], needed.stop)
            needed = tile[-1].reads if new else range(0)
        yield tuple(reversed(tile))
