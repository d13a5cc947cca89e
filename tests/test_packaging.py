"""Wheel and sdist hold the right files, and an installed, built or editable copy finds its kernels.

The other tests run the checkout.  Their results hold for the wheel, because it has the checkout's files byte for byte.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cupyconv
from cupyconv.cuda.run.kernel_sources import source_hash

ROOT = Path(__file__).resolve().parents[1]

#: A script for an installed copy: it computes a convolution, and prints where the copy and its kernels are.
QUESTIONS = """
import numpy as np, cupyconv, pathlib
from cupyconv.cuda.run.kernel_sources import kernel_directory, source_hash
y = cupyconv.conv(np.ones((1, 2, 4, 4)), np.ones((3, 2, 3, 3)))
assert y.shape == (1, 3, 2, 2) and (y == 18).all()
print(pathlib.Path(cupyconv.__file__).resolve().parent)
print(kernel_directory())
print(source_hash())
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of the checkout, and the wheel built from that sdist."""
    for module in ("build", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def environment(*path: Path) -> dict[str, str]:
    """Return the environment without the checkout on the path, unless `path` names it."""
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return cleaned | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}


def sources(*folders: str) -> dict[str, bytes]:
    """Return every source file of the checkout under these folders, by path.

    Folders with a leading dot hold build results and are skipped: another test may be compiling the host device in one.
    """
    paths = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return {
        path.as_posix(): (ROOT / path).read_bytes()
        for path in paths
        if (
            path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp", ".json", ".npz", ".md", ".svg", ".css", ".png"}
            or path.name == "py.typed"
        )
        and not any(part.startswith(".") for part in path.parts)
        and (ROOT / path).is_file()
    }


def ask(folder: Path, *path: Path) -> tuple[Path, Path, str]:
    """Return the paths of a copy of the package and its kernels, and their hash, from a process in another folder."""
    command = [sys.executable, "-c", QUESTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment(*path))
    assert done.returncode == 0, done.stderr
    package, kernels, digest = done.stdout.split()
    return Path(package), Path(kernels), digest


def test_wheel_holds_the_package_and_the_kernels_byte_for_byte(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        described = wheel.read(metadata).decode()
    expected = sources("cupyconv") | {f"cupyconv/{name}": text for name, text in sources("kernels").items()}
    assert sorted(found) == sorted(expected)
    assert found == expected
    assert [line for line in described.splitlines() if line.startswith("Requires-Dist") and "extra" not in line] == [
        "Requires-Dist: numpy>=2.1.2",
        "Requires-Dist: scipy>=1.14",
        "Requires-Dist: threadpoolctl>=3.5",
    ]


def test_sdist_holds_everything_needed_to_build_and_test(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(sources("cupyconv", "kernels", "tests", "examples", "docs")) <= names
    assert {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "mkdocs.yml",
    } <= names
    assert {".ci/run", ".ci/nightly", ".ci/dependencies"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_citation_is_of_this_version():
    assert f"\nversion: {cupyconv.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_installed_wheel_finds_its_kernels(distributions, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(site)
    package, kernels, digest = ask(tmp_path, site)
    assert package == site / "cupyconv"
    assert kernels == site / "cupyconv" / "kernels"
    assert digest == source_hash()


def test_unpacked_sdist_finds_its_kernels(distributions, tmp_path):
    with tarfile.open(distributions[0]) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(tmp_path)
    (tree,) = tmp_path.glob("cupyconv-*")
    package, kernels, digest = ask(tmp_path, tree)
    assert package == tree / "cupyconv"
    assert kernels == tree / "kernels"
    assert digest == source_hash()


def test_editable_install_finds_the_checkouts_kernels(distributions, tmp_path):
    """An editable install finds the checkout's kernels; its path file is put where only one interpreter reads it."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", str(site), "--editable", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path_file,) = site.glob("*.pth")
    assert not (site / "cupyconv").exists()
    package, kernels, digest = ask(tmp_path, *map(Path, path_file.read_text().split()))
    assert package == ROOT / "cupyconv"
    assert kernels == ROOT / "kernels"
    assert digest == source_hash()
