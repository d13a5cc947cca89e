"""Part 1: the merge that the library started with, at its original size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.call.explain import explain
from cupyconv.cuda.run.kernel_sources import kernel_directory
from cupyconv.demo.libraries import Call, Library, Measured, measure, table_of
from cupyconv.demo.page import Page, megabytes
from cupyconv.ops.conv import linmerge

INPUTS, BATCH, CHANNELS, POINTS = 5, 4, 4, 10**6
ROUNDS = 5
#: Points that are compared with a float64 computation.
CHECKED = 4096
#: Factor by which the free memory must exceed the required memory.
_RESERVE = 1.2


def run(page: Page, libraries: Sequence[Library], *, small: bool, directory: Path) -> None:
    page.text(
        f"""{INPUTS} fields of {CHANNELS} channels on a million points, in a batch of {BATCH}, are combined linearly
        into {CHANNELS} channels. The second line does the same without the
        library; it first copies all inputs."""
    )
    page.code(
        """
        y = cupyconv.linmerge(fields, weight)
        y = xp.matmul(weight, xp.concatenate(fields, axis=1))
        """
    )
    page.text(
        """In every table of this page, extra memory is what a call allocates in addition to its result, and the error
        is the largest difference from the same result computed in another way, in higher precision."""
    )
    for dtype in (np.dtype(np.float64), np.dtype(np.float32)):
        points = _affordable(page, libraries, POINTS // 100 if small else POINTS, dtype.itemsize)
        if points is None:
            return
        _one_dtype(page, libraries, dtype, points)


def _affordable(page: Page, libraries: Sequence[Library], points: int, itemsize: int) -> int | None:
    """Return the number of points that fit into memory; print it if it is below the requested number."""
    for library in libraries:
        # Memory in units of the inputs: inputs, their concatenation, results; on a GPU also the stacked copy.
        multiple = 3.5 if library.name == "CuPy" else 2.5
        per_point = INPUTS * BATCH * CHANNELS * itemsize * multiple * _RESERVE
        free = library.free_bytes()
        if free is None or free >= points * per_point:
            continue
        fits = int(free / per_point) // 1000 * 1000
        if fits == 0:
            page.failure(f"{library.name}: {megabytes(free)} of free memory, too little for this part")
            return None
        page.text(
            f"{library.name}: {megabytes(free)} of free memory, {megabytes(int(points * per_point))} needed:"
            f" {fits:,} points instead of {points:,}."
        )
        points = fits
    return points


def _one_dtype(page: Page, libraries: Sequence[Library], dtype: np.dtype, points: int) -> None:
    rng = np.random.default_rng(0)
    fields = [rng.standard_normal((BATCH, CHANNELS, points), dtype.type) for _ in range(INPUTS)]
    weight = rng.standard_normal((CHANNELS, INPUTS * CHANNELS), dtype.type)
    part = np.concatenate([field[..., :CHECKED] for field in fields], axis=1).astype(np.longdouble)
    expected = np.einsum("oc,ncp->nop", weight.astype(np.longdouble), part)
    magnitude = np.einsum("oc,ncp->nop", abs(weight.astype(np.float64)), abs(part.astype(np.float64))).max()
    allowed = float(INPUTS * CHANNELS * np.finfo(dtype).eps * magnitude)

    def error_of(y: np.ndarray) -> float:
        return float(np.abs(y[..., :CHECKED] - expected).max())

    measured: list[dict[str, Measured]] = []
    for library in libraries:
        ways = _ways(library, fields, weight)
        measured.append(measure(page, library, ways, error_of, ROUNDS))
        for name, way in measured[-1].items():
            page.check(f"{name}, {dtype}, {library.name}", way.error, allowed)
    page.line(f"    {dtype}, {points:,} points, {megabytes(sum(field.nbytes for field in fields))} of inputs:\n")
    table_of(page, libraries, measured)
    if dtype == np.float32:
        page.text("The plan that ran, as explain(linmerge, fields, weight) prints it:")
        page.verbatim(str(explain(linmerge, fields, weight)))
        page.text(
            'The plan for a GPU, which need not be in this machine: explain(linmerge, fields, weight, on="sm_90"):'
        )
        page.verbatim(str(explain(linmerge, fields, weight, on="sm_90")))


def _ways(library: Library, host_fields: list[np.ndarray], host_weight: np.ndarray) -> dict[str, Call]:
    xp = library.xp
    fields, weight = [xp.asarray(field) for field in host_fields], xp.asarray(host_weight)
    ways: dict[str, Call] = {
        "linmerge": lambda: linmerge(fields, weight),
        "concatenate, then matmul": lambda: xp.matmul(weight, xp.concatenate(fields, axis=1)),
    }
    if library.name == "CuPy":
        ways["one block, sums in global memory"] = _one_block(xp, fields, weight)
    return ways


def _one_block(cupy: Any, fields: list[Any], weight: Any) -> Call:
    """Return a call of the original kernel, ``kernels/demo/one_block_merge.cu``, which needs stacked inputs."""
    source = (kernel_directory() / "demo" / "one_block_merge.cu").read_text(encoding="utf-8")
    dtype = {"float32": "float", "float64": "double"}[weight.dtype.name]
    kernel = cupy.RawModule(code=source, options=(f"-DDTYPE={dtype}",)).get_function("one_block_merge")
    batch, channels, points = fields[0].shape
    stacked = cupy.stack(fields)
    sizes = [np.int32(len(fields)), np.int32(batch), np.int32(channels), np.int32(len(weight)), np.int64(points)]

    def call() -> Any:
        y = cupy.empty((batch, len(weight), points), weight.dtype)
        kernel((1,), (256,), (stacked, weight, y, *sizes))
        return y

    return call
