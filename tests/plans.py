"""Plans for GPUs, without a GPU: arrays to plan with, the launches of a plan, and checks that hold for every plan."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from rounds import each_step

import cupyconv
from cupyconv.ops.recurrent_pullback import RECURRENT_GRADIENT
from cupyconv.problem.arrays import ITEMSIZE, is_complex
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import GemmCall, KernelLaunch, LaunchLoop, Plan, Transform
from cupyconv.problem.recurrence import GATES

GPU = "sm_90"
INT32 = 2**31 - 1
#: CUDA's maximum number of blocks along y, and along z.
GRID_Y = 65535
#: cuBLAS's maximum number of matrices per call.
MAX_BATCH = 65535
#: Maximum bytes of shared memory per block on every GPU from sm_75 on, if more than 48 KiB are requested.
LARGEST_SHARED = 64 << 10
ACTIVATIONS_OF = {"rnn": "tanh", "lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh")}
#: Kernels that are an operation's only implementation, so that nothing needs the cost of their arithmetic.
UNCOSTED = ("pool", "pool_gradient")
#: Kernels that move numbers: their arithmetic computes indices, or their scattered loads are counted.
PLACING = ("channels_last", "tiles", "finish_tiles", "finish_weight_tiles")

_MEMORY = np.zeros(512, np.uint8)
_ALIGNED = -_MEMORY.ctypes.data % 256


def array(*shape: int, dtype: Any = "float32", order: str = "C", offset: int = 0) -> np.ndarray:
    """Return an array to plan with, never to read: any size, `offset` elements past an aligned address.

    `order` is "C", "last" (channels-last) or "gaps" (every second element along the last axis).
    """
    dtype = np.dtype(dtype)
    axes = [0, *range(2, len(shape)), 1] if order == "last" else list(range(len(shape)))
    strides, step = [0] * len(shape), dtype.itemsize * (2 if order == "gaps" else 1)
    for axis in reversed(axes):
        strides[axis] = step
        step *= max(1, shape[axis])
    first = _ALIGNED + offset * dtype.itemsize
    element = _MEMORY[first : first + dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(element, shape, strides)


def plan(x: Any, weight: np.ndarray, *args: Any, on: str = GPU, limit: int | None = None, **kwargs: Any) -> Plan:
    """Plan `conv` on a GPU."""
    with cupyconv.options(workspace_limit=limit):
        return cupyconv.explain(cupyconv.conv, x, weight, *args, on=on, **kwargs)


def gemms(plan: Plan) -> list[GemmCall]:
    return [step for step in each_step(plan.steps) if isinstance(step, GemmCall)]


def launches(plan: Plan, name: str | None = None) -> list[KernelLaunch]:
    steps = each_step(plan.steps)
    found = [launch for step in steps for launch in (step.launches if isinstance(step, LaunchLoop) else [step])]
    found = [launch for launch in found if isinstance(launch, KernelLaunch)]
    return [launch for launch in found if name in (None, launch.kernel.name)]


def columns_launches(plan: Plan) -> list[KernelLaunch]:
    """Return launches that write columns, not launches that gather a weight."""
    return [launch for launch in launches(plan, "im2col") if launch.purpose == "columns"]


# Checks that hold for every plan.


def check(plan: Plan, limit: int | None = None, on: str = GPU) -> None:
    """Check the limits of the hardware and of cuBLAS, and that steps stay inside their workspace."""
    sizes = {buffer.name: buffer.nbytes for buffer in plan.workspace}
    _check_sums_begin(plan, sizes)
    for transform in (step for step in each_step(plan.steps) if isinstance(step, Transform)):
        _check_transform(transform, sizes)
    for step in (*launches(plan), *gemms(plan)):
        if isinstance(step, KernelLaunch):
            x, y, z = step.grid
            assert 1 <= x <= INT32 and 1 <= y <= GRID_Y and 1 <= z <= GRID_Y, step
            assert 32 <= step.block <= 1024 and step.block % 32 == 0, step
            asks = step.kernel.name in ("conv_pair", "implicit_gemm")  # how much shared memory the GPU has
            assert step.shared_bytes <= (known_gpu(on).shared_bytes if asks else LARGEST_SHARED), step
            if step.kernel.name not in UNCOSTED:
                assert (step.arithmetic_seconds > 0) == (step.flops > 0 or step.kernel.name in PLACING), step
            _check_columns(step, sizes)
            _check_sums(step, sizes)
            _check_vectors(step)
        else:
            assert isinstance(step, GemmCall)
            _check_gemm(step, sizes)
    allowed = limit if limit is not None else 256 << 20
    assert sum(sizes.values()) <= allowed and plan.workspace_bytes <= allowed + sum(c.nbytes for c in plan.conversions)


def _check_gemm(call: GemmCall, sizes: dict[str, int]) -> None:
    assert 1 <= min(call.m, call.n, call.k) and max(call.m, call.n, call.k) <= INT32, call
    assert 1 <= call.batch <= MAX_BATCH and call.beta in (0, 1), call
    shapes = ((call.a, call.m, call.k, call.dtype), (call.b, call.k, call.n, call.dtype))
    for matrix, rows, columns, dtype in (*shapes, (call.c, call.m, call.n, call.c_dtype)):
        lines, length = (columns, rows) if matrix.transposed else (rows, columns)
        assert length <= matrix.ld <= INT32, f"leading dimension of {matrix} below {length}\n{call}"
        if matrix.at.buffer in sizes:
            elements = (call.batch - 1) * matrix.stride + (lines - 1) * matrix.ld + length
            end = matrix.at.offset + elements * ITEMSIZE[dtype]
            assert end <= sizes[matrix.at.buffer], f"{matrix} ends at byte {end} of {sizes[matrix.at.buffer]}\n{call}"
    if call.batch > 1:
        assert call.c.stride, f"all products of the batch go to one place\n{call}"


def _check_sums_begin(plan: Plan, sizes: dict[str, int]) -> None:
    """Check that products are added to what an earlier step wrote, not to old contents of a buffer."""
    written: set[str] = set()
    for step in each_step(plan.steps) if any(call.beta for call in gemms(plan)) else ():
        if isinstance(step, GemmCall):
            place = step.c.at.buffer
            assert not step.beta or place in written or place not in sizes, f"nothing wrote {place} before\n{step}"
            written.add(place)
        else:
            written |= {name for name in sizes if f"buffer={name!r}" in repr(step)}


def _check_transform(transform: Transform, sizes: dict[str, int]) -> None:
    """Check that sizes fit in an int32, and that images and spectra are within their buffers."""
    item = ITEMSIZE[transform.dtype]
    image = transform.batch * prod(transform.size)
    spectrum = transform.batch * prod(transform.frequencies) * (1 if is_complex(transform.dtype) else 2)
    assert 1 <= len(transform.size) <= 3 and min(transform.size) > 1 and 1 <= image <= INT32, transform
    source, target = (spectrum, image) if transform.inverse else (image, spectrum)
    for at, elements in ((transform.source, source), (transform.target, target)):
        assert at.offset + elements * item <= sizes[at.buffer], transform


def _check_columns(launch: KernelLaunch, sizes: dict[str, int]) -> None:
    if launch.kernel.name != "im2col":
        return
    params = dict(launch.params)
    kernel = params["windows"][2]
    last = (
        (params["batch"] - 1) * params["stride_n"]
        + (sum(channels for _, _, channels in params["sources"][0]) * prod(kernel) - 1) * params["stride_row"]
        + (params["pixels"] - 1) * params["stride_pixel"]
    )
    dtype = dict(launch.kernel.macros)["DTYPE"]
    itemsize = ITEMSIZE[dtype] if dtype in ITEMSIZE else int(dtype.removeprefix("bits")) // 8
    target = params["columns"]
    if target.buffer in sizes:
        assert target.offset + (last + 1) * itemsize <= sizes[target.buffer], launch


def _check_sums(launch: KernelLaunch, sizes: dict[str, int]) -> None:
    """Check that an epilogue's sums are within their buffer, and that no sum belongs to two elements of the result."""
    params = dict(launch.params)
    if launch.kernel.name != "epilogue" or params["sums"] is None or params["sums"].buffer not in sizes:
        return
    axes = [(params["batch"], params["sums_stride_n"]), (params["channels"], params["sums_stride_o"])]
    axes += [(params["pixels"], params["sums_stride_p"]), (params["planes"], params["plane"])]
    axes += [(2, params["imaginary"])] * (params["imaginary"] > 0)
    reached = 0
    for extent, stride in sorted(((n, step) for n, step in axes if n > 1), key=lambda axis: axis[1]):
        assert stride > reached, launch
        reached += (extent - 1) * stride
    end = params["sums"].offset + (reached + 1) * ITEMSIZE[dict(launch.kernel.macros)["SUM_DTYPE"]]
    assert end <= sizes[params["sums"].buffer], launch


def _check_vectors(launch: KernelLaunch) -> None:
    """Check that an epilogue writes whole vectors, and reads sums in pieces of 16 bytes if all of these are aligned."""
    params, macros = dict(launch.params), dict(launch.kernel.macros)
    if launch.kernel.name != "epilogue":
        return
    assert params["channels"] == 1 or params["out"][2], "all channels would be written to one place"
    width, item = int(macros["WIDTH"]), ITEMSIZE[macros["SUM_DTYPE"]]
    along, across = ("channels", "pixels") if params["along_channels"] else ("pixels", "channels")
    assert params[along] % width == 0 and (params["along_channels"] or params["first_pixel"] % width == 0), launch
    strides = {"channels": params["sums_stride_o"], "pixels": params["sums_stride_p"]}
    piece, sums = min(width * item, 16), params["sums"]
    apart = [params["sums_stride_n"]] * (params["batch"] > 1) + [strides[across]] * (params[across] > 1)
    begins = [step * item for step in (*apart, params["imaginary"], params["plane"])] + [sums.offset if sums else 1]
    in_pieces = width > 1 and strides[along] == 1 and all(begin % piece == 0 for begin in begins)
    assert params["sums_vectorized"] == in_pieces, launch


def recurrent_gradient_plan(
    cell: str,
    dtype: Any,
    sizes: tuple[int, int, int, int] = (4, 20, 3, 5),
    *,
    direction: str = "forward",
    on: Any = None,
    **settings: Any,
) -> Plan:
    """Plan the gradients of a layer of sizes (T, N, I, H) with every argument except lengths, for a GPU."""
    steps, batch, inputs, hidden = sizes
    directions, rows = 1 + (direction == "bidirectional"), GATES[cell] * hidden
    kept, state = np.float64 if np.dtype(dtype) == np.float64 else np.float32, (directions, batch, hidden)
    arrays = {
        "x": array(steps, batch, inputs, dtype=dtype), "weight_ih": array(directions, rows, inputs, dtype=dtype),
        "weight_hh": array(directions, rows, hidden, dtype=dtype), "y": array(steps, batch, directions * hidden, dtype=dtype),
        "gates": array(directions, steps, batch, rows, dtype=kept), "h0": array(*state, dtype=dtype),
        "grad_y": array(steps, batch, directions * hidden, dtype=dtype), "grad_h": array(*state, dtype=dtype),
    }  # fmt: skip
    beside = array(directions, steps, batch, hidden, dtype=kept)
    if cell == "lstm":
        arrays |= {"cells": beside, "c0": arrays["h0"], "peephole": array(directions, 3 * hidden, dtype=dtype)}
    elif cell == "gru":
        arrays["candidate"] = beside
    cells = {"cell": cell, "direction": direction, "activations": ACTIVATIONS_OF[cell], "clip": None}
    flags = {"input_forget": False, "linear_before_reset": True, **settings}
    arguments = {**dict.fromkeys(RECURRENT_GRADIENT.arrays), **arrays, **cells, **flags}
    return RECURRENT_GRADIENT.checked(arguments, on or GPU).plan()
