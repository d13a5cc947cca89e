"""Columns that taps share, in the layout for products of one tap after another (Cho and Brand, "MEC", ICML 2017).

Along the outermost axis of the kernel, the columns of all taps are the same rows of pixels, and each tap starts at a
later row.  So these rows are written once for all of these taps::

    columns for kh = 0      row 0   row 1   row 2   row 3          with pixels in the order (h, samples, d, w)
                    1               row 1   row 2   row 3   row 4  the columns of a tap are one matrix;
                    2                       row 2   row 3   ...    with a stride, the rows of one phase are

Weight gradients use such products, and depthwise convolutions with a stride scale such columns.  A convolution with one
product of all taps per row of its result is in `mec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

import numpy as np

from cupyconv.numpy.convolution import MEMORY_BLOCK, temporaries
from cupyconv.numpy.windows import Block, BlockSize, Images, parts_of, tile_shape
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem, WeightGradientProblem

#: Rows of columns from which taps share them.  With fewer rows, the products of one tap would be thin.  With groups
#: they are thin anyway, and writing columns takes longer.
MIN_SHARED = 32


def taps_share(geometry: ConvGeometry, item: int) -> bool:
    """Whether taps along the kernel's outermost axis can share columns, and products of one tap are worthwhile."""
    taps = geometry.kernel[geometry.outermost]
    enough = geometry.groups > 1 or geometry.reduction >= MIN_SHARED * taps
    return taps > 1 and enough and _columns_leave_cache(geometry, item)


def _columns_leave_cache(geometry: ConvGeometry, item: int) -> bool:
    """Whether writing the columns of all taps takes long: with few channels per group, longer than their products."""
    return geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps * item > MEMORY_BLOCK


def mec_shapes(geometry: ConvGeometry, channels: int, block: BlockSize) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Yield the taps and the shape of the columns that they share: (c, other taps, rows, samples, other pixels).

    If the stride makes taps read different rows, each phase has its own array.
    """
    axis = geometry.outermost
    taps, stride, gap, rows = (t[axis] for t in (geometry.kernel, geometry.stride, geometry.dilation, block[1:]))
    others = [a for a in range(3) if a != axis]
    period = stride // gcd(stride, gap)
    for first in range(min(period, taps)):
        own = range(first, taps, period)
        rows_of_all = rows + (len(own) - 1) * (period * gap // stride)
        kernel, pixels = ([t[a] for a in others] for t in (geometry.kernel, block[1:]))
        yield own, (channels, *kernel, rows_of_all, block[0], *pixels)


def mec_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Bytes per group of the columns that a block's taps share, and of the tile that they are copied from."""
    geometry = problem.geometry
    columns = sum(prod(shape) for _, shape in mec_shapes(geometry, geometry.group_channels, block))
    tile = prod(tile_shape(geometry, geometry.group_channels, block))
    return (columns + tile * (1 + temporaries(geometry, problem.prologue))) * item


def mec_part(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Number of groups whose MEC columns stay in cache together."""
    return even_part(problem.geometry.groups, MEMORY_BLOCK // (mec_bytes(problem, block, item) or 1))


def is_in_order(geometry: ConvGeometry, block: BlockSize) -> bool:
    """Whether the pixels of MEC columns, which start with the kernel's outermost axis, are in their normal order."""
    return prod(block[: 1 + geometry.outermost]) == 1


def mec_columns(images: Images, block: Block, part: int) -> Iterator[tuple[slice, list[tuple[slice, np.ndarray]]]]:
    """Yield `part` groups at a time, which stay in cache, and the columns that their taps share.

    Columns are pairs of a slice of taps and an array (c, tap, other taps, pixels).  The array is a view in which the
    pixels of each tap start later than those of the previous tap.
    """
    per_group = block.geometry.group_channels
    for groups in parts_of(block.geometry.groups, part):
        yield groups, _columns(images.some(slice(groups.start * per_group, groups.stop * per_group)), block)


def _columns(images: Images, block: Block) -> list[tuple[slice, np.ndarray]]:
    geometry, axis = block.geometry, block.geometry.outermost
    image, tile = images.tile(block), block.tile(images.channels)
    pixels_per_row = block.area // block.size[1 + axis]
    # Axes of all windows, (c, kd, kh, kw, n, d, h, w), in the order of MEC columns.
    order = [0, *(1 + a for a in range(3) if a != axis), 5 + axis, 4, *(5 + a for a in range(3) if a != axis)]
    strides = tuple(tile.windows_strides[a] for a in order)
    columns = []
    for taps, shape in mec_shapes(geometry, images.channels, block.size):
        begin = taps.start * geometry.dilation[axis] * image.strides[2 + axis]
        source = np.ndarray(shape, image.dtype, image, begin, strides)
        if source[0].size == source[0, 0, 0].size and source[0, 0, 0].flags.c_contiguous:
            memory, c_stride = image, image.strides[0]
        else:
            memory, begin = images.scratch.array(f"columns {taps.start}", shape), 0
            memory[...] = source
            c_stride = memory.strides[0]
        item, others = image.itemsize, shape[1] * shape[2]
        step = taps.step * geometry.dilation[axis] // geometry.stride[axis] * pixels_per_row
        views = np.ndarray(
            (len(image), len(taps), others, block.area),
            image.dtype,
            memory,
            begin,
            (c_stride, step * item, c_stride // others, item),
        )
        columns.append((slice(taps.start, taps.stop, taps.step), views))
    return columns
