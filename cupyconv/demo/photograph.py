"""Part 3: a photograph filtered by a bank of complex Gabor filters, merged into a picture of orientations."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.demo.libraries import Library, measure, table_of
from cupyconv.demo.page import Page
from cupyconv.ops.conv import conv, linmerge

ORIENTATIONS, KERNEL = 12, 15
WAVELENGTHS = (4.0, 7.0)
PICTURE = "cupyconv-demo.png"
ROUNDS = 3
#: Pixels at which the response is checked by an explicit sum.
CHECKED = 16


def run(page: Page, libraries: Sequence[Library], *, small: bool, directory: Path) -> None:
    page.text(
        f"""A real image and complex weights: {KERNEL} x {KERNEL} Gabor filters of {ORIENTATIONS} orientations and
        {len(WAVELENGTHS)} wavelengths. The magnitude of a result says how strongly a pixel belongs to an edge of that
        orientation. One merge of the magnitudes and the grey image gives each orientation a colour."""
    )
    page.code(
        """
        edges = abs(cupyconv.conv(grey, bank, padding="same", padding_mode="reflect"))
        picture = cupyconv.linmerge([edges, grey], colours, activation=("clip", 0, 1))
        """
    )
    image = photograph()
    if image is None:
        page.text("Skipped: the picture needs matplotlib (pip install matplotlib, or the extra `demo`).")
        return
    image = image[::3, ::3] if small else image
    grey = np.ascontiguousarray(image.mean(axis=2, dtype=np.float32)[None, None] / np.float32(255))
    bank = np.concatenate([gabor_bank(wavelength) for wavelength in WAVELENGTHS])
    colours = orientation_colours()
    at = np.random.default_rng(0).integers(0, grey.shape[2:], (CHECKED, 2))
    by_hand = _responses(grey[0, 0], bank, at)
    name = f"conv with {len(bank)} complex filters"

    def error_of(y: np.ndarray) -> float:
        return float(np.abs(y[0, :, at[:, 0], at[:, 1]] - by_hand).max())

    measured, pictures = [], []
    for library in libraries:
        on_device = [library.xp.asarray(array) for array in (grey, bank, colours)]
        measured.append(measure(page, library, {name: partial(_filter, *on_device[:2])}, error_of, ROUNDS))
        page.check(f"filters, {library.name}", measured[-1][name].error, 1e-5)
        pictures.append(library.to_host(_picture(*on_device)))
    table_of(page, libraries, measured)
    for library, picture in zip(libraries[1:], pictures[1:]):
        page.check(f"picture, {library.name} against NumPy", float(np.abs(picture - pictures[0]).max()), 1e-4)
    page.line(f"    {_written(pictures[0], directory)}\n")


def photograph() -> np.ndarray | None:
    """Return Grace Hopper's portrait, which matplotlib includes: (height, width, 3) in 0 ... 255."""
    try:
        from matplotlib.cbook import get_sample_data
        from matplotlib.image import imread
    except ImportError:
        return None
    with get_sample_data("grace_hopper.jpg") as file:
        return imread(file, format="jpg")


def gabor_bank(wavelength: float) -> np.ndarray:
    """Return complex filters (ORIENTATIONS, 1, KERNEL, KERNEL) with no response to constant brightness."""
    reach = KERNEL // 2
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    angle = np.pi * np.arange(ORIENTATIONS)[:, None, None] / ORIENTATIONS
    envelope = np.exp(-(x**2 + y**2) / (2 * (0.5 * wavelength) ** 2))
    wave = np.exp(2j * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / wavelength)
    wave -= (wave * envelope).sum(axis=(1, 2), keepdims=True) / envelope.sum()
    return (wave * envelope / envelope.sum()).astype(np.complex64)[:, None]


def orientation_colours() -> np.ndarray:
    """Return the merge's weight (3, 2 * ORIENTATIONS + 1): a hue per orientation, and a little grey."""
    wheel = np.array([colorsys.hsv_to_rgb(i / ORIENTATIONS, 1, 1) for i in range(ORIENTATIONS)]).T
    opponent = 2.5 * (wheel - 0.75 * wheel.mean())
    return np.concatenate([1.5 * opponent, opponent, np.full((3, 1), 0.15)], axis=1).astype(np.float32)


def _filter(grey: Any, bank: Any) -> Any:
    return conv(grey, bank, padding="same", padding_mode="reflect")


def _picture(grey: Any, bank: Any, colours: Any) -> Any:
    return linmerge([abs(_filter(grey, bank)), grey], colours, activation=("clip", 0, 1))


def _responses(grey: np.ndarray, bank: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the filters' responses at some pixels, each a sum over its own window, in complex128."""
    padded = np.pad(grey.astype(np.float64), KERNEL // 2, mode="reflect")
    windows = np.stack([padded[i : i + KERNEL, j : j + KERNEL] for i, j in at])
    return np.einsum("oij,pij->po", bank[:, 0].astype(complex), windows)


def _written(picture: np.ndarray, directory: Path) -> str:
    """Write the picture; return where it is, or why it could not be written."""
    from matplotlib.image import imsave

    path = (directory / PICTURE).resolve()
    try:
        imsave(path, np.moveaxis(picture[0], 0, -1))
    except OSError as error:
        return f"picture not written: {error.strerror or error} ({path}); choose another directory with --output"
    return f"picture written to {path}"
