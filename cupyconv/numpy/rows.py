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

from cupyconv.problem.geometry import ConvGeometry, Triple


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
        geometry, batch=samples, size=put(geometry.size, rows), before=put(geometry.before, before), after=put(geometry.after, after)
    )  # fmt: skip
