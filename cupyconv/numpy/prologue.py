"""A convolution's prologue on parts of its inputs: elements are transformed while they are copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate
from cupyconv.problem.activations import Activation
from cupyconv.problem.problems import Prologue


class Transform:
    """``f(scale[c] * x + shift[c])`` of boxes (channels, samples, d, h, w), computed in the dtype of the vectors."""

    def __init__(self, scale: np.ndarray | None, shift: np.ndarray | None, activation: Activation) -> None:
        self._scale, self._shift, self._activation = scale, shift, activation

    def of(self, channels: slice) -> Transform:
        """Return the transform of some of the channels; the first of them becomes channel 0."""
        scale, shift = (None if vector is None else vector[channels] for vector in (self._scale, self._shift))
        return Transform(scale, shift, self._activation)

    def by_group(self, groups: int) -> Transform:
        """Return the same transform for boxes (groups, channels, samples, d, h, w)."""
        vectors = self._scale, self._shift
        scale, shift = (None if v is None else v.reshape(groups, -1, *v.shape[1:]) for v in vectors)
        return Transform(scale, shift, self._activation)

    def write(self, target: np.ndarray, values: np.ndarray, channels: slice) -> None:
        """Write the transformed `values`, of these merged channels, to `target`."""
        if self._scale is not None:
            np.multiply(values, self._scale[channels], out=target)
            values = target
        if self._shift is not None:
            np.add(values, self._shift[channels], out=target)
        elif values is not target:
            target[...] = values
        activate(target, self._activation)


def transform_of(prologue: Prologue, arrays: Mapping[str, Any], dtype: np.dtype) -> Transform:
    """Return the transform that a prologue applies to the inputs."""
    scale, shift = (
        arrays[vector.name].astype(dtype, copy=False)[:, None, None, None, None] if vector else None
        for vector in (prologue.scale, prologue.shift)
    )
    return Transform(scale, shift, prologue.activation)
