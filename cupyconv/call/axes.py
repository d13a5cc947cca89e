"""The caller's axes and the geometry's: N may be missing, and a merge may have more than three spatial axes.

Below the public functions every image is (n, c, d, h, w).  What that makes of an array is said twice
here, side by side: as ints, for planning, and as a view, for running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from cupyconv.problem.arrays import ITEMSIZE, Operand, collapsed_stride, is_channels_last, operand


@dataclass(frozen=True)
class Axes:
    """How the caller's images are shaped."""

    batched: bool
    spatial: int

    @property
    def are_the_backends(self) -> bool:
        """Whether backends see an image as the caller has it: `view` would give back what it is given."""
        return self.batched and self.spatial <= 3

    def shape(self, batch: int, channels: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """An image's shape as the caller has it."""
        return (batch, channels, *spatial) if self.batched else (channels, *spatial)

    def asks_channels_last(self, image: Any) -> bool:
        """Whether an image asks for a channels-last result."""
        return is_channels_last(tuple(image.shape), tuple(image.strides), image.dtype.itemsize, int(self.batched))

    def describe(
        self, name: str, dtype: str, shape: tuple[int, ...], byte_strides: tuple[int, ...], address: int
    ) -> Operand:
        """The image as planning sees it; one that `view` has to copy is described as the copy."""
        if not self.batched:
            shape, byte_strides = (1, *shape), (0, *byte_strides)
        if self.spatial > 3:
            step = collapsed_stride(shape[2:-2], byte_strides[2:-2])
            shape = (*shape[:2], prod(shape[2:-2]), *shape[-2:])
            if step is None:
                return Operand(name, dtype, shape, (0,) * 5).in_c_order(dtype)
            byte_strides = (*byte_strides[:2], step, *byte_strides[-2:])
        return operand(name, dtype, shape, byte_strides, address)

    def needs_copy(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        """Whether no view of the image has at most three spatial axes."""
        return self.spatial > 3 and collapsed_stride(shape[-self.spatial : -2], strides[-self.spatial : -2]) is None

    def view(self, image: Any, copy: Callable[[Any], Any]) -> Any:
        """The image as backends see it: with N, and at most three spatial axes.

        Where the leading axes have no one stride, `copy` gives memory in C order to use instead.
        """
        if not self.batched:
            image = image[None]
        if self.spatial > 3:
            if self.needs_copy(image.shape, image.strides):
                image = copy(image)
            image = image.reshape(*image.shape[:2], prod(image.shape[2:-2]), *image.shape[-2:])
        return image

    def give_back(self, image: Any, spatial: tuple[int, ...]) -> Any:
        """The opposite of `view`."""
        if self.spatial > 3:
            image = image.reshape(*image.shape[:2], *spatial)
        return image if self.batched else image[0]


def byte_strides(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Of a C-ordered array."""
    return tuple(prod(shape[i + 1 :]) * ITEMSIZE[dtype] for i in range(len(shape)))
