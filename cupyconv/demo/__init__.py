"""The demo: three jobs, each timed, checked against an independent computation, and shown with its code.

=================  ==========================================================================
`merge.py`         merges five fields with `linmerge`, compared with concatenating them first
`batch.py`         a convolution of 64 samples in one call, compared with a loop over the samples
`photograph.py`    applies a bank of complex Gabor filters to a photograph and writes a picture
`libraries.py`     NumPy and CuPy for the parts: arrays, clocks, counted memory
`page.py`          headings, tables and the progress bar
=================  ==========================================================================

Everything runs on NumPy.  With a working GPU, every row also has CuPy's columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cupyconv
from cupyconv.configuration import cupy_with_gpu
from cupyconv.demo import batch, merge, photograph
from cupyconv.demo.libraries import Library, cupy_library, numpy_library
from cupyconv.demo.page import Page

__all__ = ["run_demo"]

_PARTS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("Five fields into one, without concatenating them", merge.run),
    ("64 samples in one call", batch.run),
    ("A photograph through a bank of complex filters", photograph.run),
)


def run_demo(*, small: bool = False, directory: Path | None = None, libraries: Sequence[Library] | None = None) -> int:
    """Run all parts; the exit status is 0 if every check passed.

    `small` runs a hundredth of the work, `directory` receives the picture, and `libraries` are NumPy and, with a
    working GPU, CuPy.
    """
    begin = time.perf_counter()
    page = Page()
    state = ""
    if libraries is None:
        cupy, state = cupy_with_gpu()
        libraries = [numpy_library()] + ([cupy_library(cupy)] if cupy else [])
    page.line(f"cupyconv {cupyconv.__version__} on {' and '.join(library.description for library in libraries)}")
    if len(libraries) == 1:
        page.line(f"no CuPy columns: {state or 'not requested'}")
    for number, (title, part) in enumerate(_PARTS, 1):
        page.heading(f"{number}  {title}")
        try:
            part(page, libraries, small=small, directory=directory or Path.cwd())
        except Exception as error:  # a failing part is reported, and the others still run
            page.failure(f"{type(error).__name__}: {error}")
    page.verdict(time.perf_counter() - begin)
    return 1 if page.failures else 0
