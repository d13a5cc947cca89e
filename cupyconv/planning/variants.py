"""Every kernel variant that planning can ask for, as a list: to compile, to check, to warm a cache with.

A variant is a kernel and its macros.  The list is written from the tables that ``launches.py`` chooses
from; a test plans a broad product of problems and finds every kernel of every plan in it.
"""

from __future__ import annotations

from itertools import product

from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.geometry import pointwise_geometry
from cupyconv.plan import Kernel
from cupyconv.planning.launches import DEPTHWISE_PIXELS, DIRECT_TILE, MERGE_TILES, PACKET_BYTES, merge_tile

_SCALAR_MERGE = ("WIDTH", "1")


def is_fast(kernel: Kernel) -> bool:
    """Whether speed is the reason the variant exists, so that a register spilled to memory defeats it.

    direct and col2im are for generality, a merge without packets for unaligned rows: there a few bytes
    spilled cost little beside the scattered access.
    """
    if kernel.name == "merge":
        return _SCALAR_MERGE not in kernel.macros
    return kernel.name in ("im2col", "epilogue", "depthwise")


DTYPES = tuple(ITEMSIZE)
REAL_DTYPES = tuple(dtype for dtype in DTYPES if not is_complex(dtype))


def all_variants() -> tuple[Kernel, ...]:
    """All 77 variants: 36 merge, 10 direct, 4 depthwise, 7 im2col, 6 col2im, 14 epilogue.

    The number is bounded because nothing of a problem's size reaches a macro: only dtypes, and tile
    and packet widths from short tables.
    """
    return (
        *_merge_variants(),
        *_direct_variants(),
        *(_kernel("depthwise", DTYPE=dtype, PIXELS=DEPTHWISE_PIXELS) for dtype in REAL_DTYPES),
        *(
            _kernel("im2col", DTYPE=f"bits{8 * itemsize}", WIDTH=width)
            for itemsize in sorted(set(ITEMSIZE.values()))
            for width in packet_widths(itemsize)
        ),
        *(_kernel("col2im", DTYPE=dtype) for dtype in DTYPES),
        *_epilogue_variants(),
    )


def packet_widths(itemsize: int) -> tuple[int, ...]:
    """Elements that a thread may move at once: 16 bytes of them, or one."""
    return tuple(dict.fromkeys((PACKET_BYTES // itemsize, 1)))


def _merge_variants() -> list[Kernel]:
    return [
        _kernel("merge", DTYPE=dtype, TILE=tile, WIDTH=width)
        for dtype in REAL_DTYPES
        for tile in _merge_tiles(dtype)
        for width in packet_widths(ITEMSIZE[dtype])
    ]


def _merge_tiles(dtype: str) -> list[int]:
    """What `merge_tile` answers for one to many outputs; fewer that fit are among the same answers."""
    geometries = (pointwise_geometry({"x": (1, 1)}, (outputs, 1)) for outputs in range(1, max(MERGE_TILES) + 1))
    tiles = {merge_tile(geometry, dtype) for geometry in geometries}
    return sorted(tile for tile in tiles if tile is not None)


def _direct_variants() -> list[Kernel]:
    """Image and weight are of the result's dtype, or one of them is real beside a complex result."""
    return [
        _kernel("direct", X_DTYPE=x, W_DTYPE=weight, Y_DTYPE=result, TILE=DIRECT_TILE)
        for result in DTYPES
        for x, weight in dict.fromkeys(product((result, real_part(result)), repeat=2))
        if result in (x, weight)
    ]


def _epilogue_variants() -> list[Kernel]:
    """Sums come in the accumulator's dtype, a complex one whole or in two real planes."""
    return [
        _kernel("epilogue", SUM_DTYPE=sums, Y_DTYPE=result, WIDTH=width)
        for result in DTYPES
        for sums in dict.fromkeys((accumulator(result), real_part(accumulator(result))))
        for width in packet_widths(ITEMSIZE[result])
    ]


def _kernel(name: str, **macros: object) -> Kernel:
    return Kernel(name, tuple((macro, str(value)) for macro, value in macros.items()))
