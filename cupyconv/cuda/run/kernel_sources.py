"""Find the CUDA sources in a wheel, a source tree or an editable install, and hash them.

Every compilation gets the hash as a macro.  Compile caches use only the text of the compiled file and the options as
their key, so that they would miss an edit of an included header.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def kernel_directory() -> Path:
    """Return ``cupyconv/kernels`` of an installed package, else the directory ``kernels`` next to the package."""
    for directory in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if (directory / "portable.cuh").is_file():
            return directory
    raise FileNotFoundError(f"the CUDA sources of cupyconv are neither in {_PACKAGE} nor next to it")


def kernel_source(name: str, directory: Path | None = None) -> str:
    return ((directory or kernel_directory()) / f"{name}.cu").read_text(encoding="utf-8")


def source_hash(directory: Path | None = None) -> str:
    """Return sixteen hex digits that change with any source or header."""
    digest = hashlib.sha256()
    for path in sorted((directory or kernel_directory()).glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _installed_hash() -> str:
    return source_hash()


def compile_options(macros: tuple[tuple[str, str], ...], directory: Path | None = None) -> tuple[str, ...]:
    """Return the NVRTC options for one variant."""
    digest = _installed_hash() if directory is None else source_hash(directory)
    return (
        "-std=c++17",
        f"-I{directory or kernel_directory()}",
        *(f"-D{name}={value}" for name, value in macros),
        f"-DCUPYCONV_SOURCE_HASH=0x{digest}",
    )
