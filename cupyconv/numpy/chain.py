"""A chain of convolutions by tiles of rows: each goes through all layers while it is in cache.

::

    x  ---- rows it reads ---->  [ kept | new rows ]  ---->  [ kept | new rows ]  ---->  rows of y
            views of x             layer 0's rows              layer 1's rows

Of a layer's result only the rows are in memory that the next layer reads for this tile.  Those it will read
again are moved to the front for the next tile, and only rows that are not there yet are computed: none twice,
but where a band begins, whose neighbour belongs to another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from cupyconv.numpy.convolution import ConvolutionLoop
from cupyconv.numpy.loops import ChainLoop
from cupyconv.numpy.rows import Piece, tiles
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import dtype_from_name

#: Rows that a layer adds to its result, and what computes them; None where a layer has no channels.
Part = tuple[Piece, ConvolutionLoop | None]

#: Tiles of a band up to which they are kept from run to run: a chain of few is bound by working them out.
_KEPT_TILES = 16


class ChainConvolution:
    """What all runs of a plan have in common."""

    def __init__(self, loop: ChainLoop) -> None:
        self.plan = loop
        #: Of every layer, what computes a part of it, by its geometry.
        self._loops = [{part.geometry: ConvolutionLoop(part) for part in loops} for loops in loop.loops]
        self._kept: dict[tuple[int, range], list[tuple[Part, ...]]] = {}
        for samples, rows in product({len(samples) for samples in loop.sample_ranges}, loop.row_ranges):
            if len(rows) <= _KEPT_TILES * loop.tile[1]:
                self._kept[samples, rows] = list(self._tiles(samples, rows))
        self.dtypes = [dtype_from_name(name) for name in loop.dtypes]
        self.x_dtypes = [dtype_from_name(loops[0].x_dtype) if loops else None for loops in loop.loops]
        self.weight_dtypes = [dtype_from_name(loops[0].weight_dtype) if loops else None for loops in loop.loops]

    def tiles(self, samples: int, rows: range) -> Iterable[tuple[Part, ...]]:
        """The tiles of a band, in order: a part of each layer."""
        return self._kept.get((samples, rows)) or self._tiles(samples, rows)

    def _tiles(self, samples: int, rows: range) -> Iterator[tuple[Part, ...]]:
        for tile in tiles(self.plan.layers, self.plan.axis, samples, rows, self.plan.tile[1]):
            yield tuple((piece, loops.get(piece.geometry)) for piece, loops in zip(tile, self._loops))

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and result are given by name."""
        chain = _Run(self, arrays)
        bands = list(product(self.plan.sample_ranges, self.plan.row_ranges))
        if self.plan.threads == 1:
            for samples, rows in bands:
                chain.finish(samples, rows)
        else:
            with ThreadPoolExecutor(self.plan.threads) as pool:
                list(pool.map(chain.finish_in_thread, *zip(*bands)))


class _Held:
    """Rows of an intermediate image, the first of them number `first`."""

    def __init__(self, empty: Callable[[], np.ndarray]) -> None:
        self._empty = empty
        self._image: np.ndarray | None = None
        self.first = 0

    @property
    def image(self) -> np.ndarray:
        """The rows' memory, from when it is first asked for."""
        if self._image is None:
            self._image = self._empty()
        return self._image

    def forget(self) -> None:
        self._image = None


class _Run:
    """One run: its arrays, brought to five axes, and memory that the tiles of a thread share."""

    def __init__(self, chain: ChainConvolution, arrays: Mapping[str, Any]) -> None:
        self.chain, self.axis = chain, chain.plan.axis + 2
        self.inputs = {name: five_axes(arrays[name]) for name in chain.plan.inputs}
        self.out = five_axes(arrays["out"])
        self.residuals = {
            i: five_axes(arrays[name]) for i in range(len(chain.plan.layers)) if (name := f"residual[{i}]") in arrays
        }
        #: What a layer's tiles have in common: its weight, as they compute with it, and its bias.
        self.common = [
            {
                "weight": np.ascontiguousarray(arrays[f"weight[{i}]"], dtype),
                **({"bias": arrays[f"bias[{i}]"]} if f"bias[{i}]" in arrays else {}),
            }
            for i, dtype in enumerate(chain.weight_dtypes)
        ]
        self.scratch = {dtype: Scratch(dtype, rounds=2) for dtype in chain.x_dtypes if dtype is not None}

    def finish(self, samples: range, rows: range) -> None:
        """All tiles of a band, in order."""
        plan = self.chain.plan
        held = [_Held(partial(self._empty, i, len(samples), count)) for i, count in enumerate(plan.held)]
        for tile in self.chain.tiles(len(samples), rows):
            is_last = tile[-1][0].outputs.stop == rows.stop
            for i, (piece, _) in enumerate(tile):
                if not piece.outputs:
                    continue
                self._finish_piece(i, tile, samples, held)
                if i and is_last:
                    held[i - 1].forget()  # nobody reads it again

    def finish_in_thread(self, samples: range, rows: range) -> None:
        with np.errstate(all="ignore"):  # of the thread
            self.finish(samples, rows)

    def _finish_piece(self, i: int, tile: tuple[Part, ...], samples: range, held: list[_Held]) -> None:
        """The rows of layer `i` that a tile adds."""
        piece, loop = tile[i]
        if i == len(held):
            result = self._cut(self.out, samples, piece.outputs)
        else:
            result = self._make_room(held[i], tile[i + 1][0].reads, piece.outputs)
        if loop is None:
            return
        if i == 0:
            images = {name: self._cut(image, samples, piece.reads) for name, image in self.inputs.items()}
        else:
            before = held[i - 1]
            images = {f"layer[{i - 1}]": self._rows(before.image, piece.reads.start - before.first, len(piece.reads))}
        if i in self.residuals:
            images["residual"] = self._cut(self.residuals[i], samples, piece.outputs)
        loop.run({**self.common[i], **images, "out": result}, self.scratch[loop.x_dtype])

    def _make_room(self, held: _Held, needed: range, new: range) -> np.ndarray:
        """Bring what is there of the rows `needed` to the front; the place of `new` ones, after these."""
        kept = new.start - needed.start
        if kept and held.first != needed.start:
            self._rows(held.image, 0, kept)[...] = self._rows(held.image, needed.start - held.first, kept)
        held.first = needed.start
        return self._rows(held.image, kept, len(new))

    def _empty(self, i: int, samples: int, rows: int) -> np.ndarray:
        """Memory for some rows of layer `i`."""
        geometry = self.chain.plan.layers[i]
        size = list(geometry.out_size)
        size[self.axis - 2] = rows
        return np.empty((samples, geometry.out_channels, *size), self.chain.dtypes[i])

    def _rows(self, image: np.ndarray, first: int, count: int) -> np.ndarray:
        return image[(slice(None),) * self.axis + (slice(first, first + count),)]

    def _cut(self, image: np.ndarray, samples: range, rows: range) -> np.ndarray:
        return self._rows(image[samples.start : samples.stop], rows.start, len(rows))
