"""Cutting an extent into parts that differ by little: the last one should not be a remnant."""

from __future__ import annotations


def even_part(extent: int, most: int) -> int:
    """The part that cuts `extent` into as few pieces as parts of `most` would, of equal size; at least 1."""
    return -(-extent // -(-extent // max(1, most))) if extent else 1
