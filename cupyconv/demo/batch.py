"""Part 2: one call for a batch, compared with a loop over its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.call.explain import explain
from cupyconv.demo.libraries import Call, Library, measure, table_of
from cupyconv.demo.page import Page
from cupyconv.ops.conv import conv

SAMPLES, CHANNELS, SIZE = 64, 64, 14
ROUNDS = 7


def run(page: Page, libraries: Sequence[Library], *, small: bool, directory: Path) -> None:
    page.text(
        f"""{SAMPLES} images of {CHANNELS} channels, {SIZE} x {SIZE} pixels, 3 x 3 kernels, float32. On a GPU the one call
        is one kernel or product for all samples; the loop starts {SAMPLES} small ones. On NumPy the one call takes as many
        samples at a time as fit into the cache."""
    )
    page.code(
        """
        y = cupyconv.conv(x, weight, padding="same")
        y = xp.concatenate([cupyconv.conv(sample[None], weight, padding="same") for sample in x])
        """
    )
    channels = CHANNELS // 4 if small else CHANNELS
    rng = np.random.default_rng(0)
    host_x = rng.standard_normal((SAMPLES, channels, SIZE, SIZE), np.float32)
    host_weight = rng.standard_normal((channels, channels, 3, 3), np.float32)
    expected = _sum_over_taps(host_x.astype(np.float64), host_weight.astype(np.float64))
    terms = channels * 9
    allowed = float(terms * np.finfo(np.float32).eps * _sum_over_taps(abs(host_x), abs(host_weight)).max())

    measured = []
    for library in libraries:
        ways = _ways(library, host_x, host_weight)
        measured.append(measure(page, library, ways, lambda y: float(np.abs(y - expected).max()), ROUNDS))
        for name, way in measured[-1].items():
            page.check(f"{name}, {library.name}", way.error, allowed)
    table_of(page, libraries, measured)
    page.text('The plan for a GPU, explain(conv, x, weight, padding="same", on="sm_90"):')
    page.verbatim(str(explain(conv, host_x, host_weight, padding="same", on="sm_90")))


def _ways(library: Library, host_x: np.ndarray, host_weight: np.ndarray) -> dict[str, Call]:
    xp = library.xp
    x, weight = xp.asarray(host_x), xp.asarray(host_weight)

    def loop() -> Any:
        return xp.concatenate([conv(sample[None], weight, padding="same") for sample in x])

    return {"one call": lambda: conv(x, weight, padding="same"), f"loop over {SAMPLES} samples": loop}


def _sum_over_taps(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute the convolution independently: one product for each of the nine shifts of a padded image."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sum(
        np.einsum("oc,nchw->nohw", weight[:, :, i, j], padded[:, :, i : i + height, j : j + width], optimize=True)
        for i in range(3)
        for j in range(3)
    )
