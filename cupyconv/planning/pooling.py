"""Plans of max_pool and of its gradient: one method each, every input by itself.

On a GPU one launch an input.  On NumPy a loop over blocks that stay in cache, cut along the axes in the order in
which they lie in memory: planes of a C-ordered image, rows of a channels-last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod

from cupyconv.cuda.plan.conversions import check_alignment, convert
from cupyconv.cuda.plan.launches import grid_and_block, image, windows_params
from cupyconv.numpy.convolution_plan import MEMORY_BLOCK
from cupyconv.numpy.loops import PoolingLoop
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator
from cupyconv.problem.geometry import Windows, even_part
from cupyconv.problem.plan import Buffer, Conversion, Kernel, KernelLaunch, Plan, Step
from cupyconv.problem.problems import HostModel, PoolingGradientProblem, PoolingProblem

#: Channels a thread of max_pool.cu and max_pool_gradient.cu takes: what it works out of a pixel serves them all.
CHANNELS = 4
#: Threads that go along the channels of a channels-last image, at most.
LANES = 32

Block = tuple[int, int, int, int, int]


def plan_max_pool(problem: PoolingProblem) -> Plan:
    """The largest element of every window."""
    steps: list[Step] = []
    workspace = 0
    for channels, x, out in zip(problem.windows.channels, problem.xs, problem.outs):
        windows = replace(problem.windows, channels=(channels,))
        if out.nbytes and isinstance(problem.machine, HostModel):
            loop, needed = _loop("max_pool", problem, windows, (x,), out, _forward_touched, _forward_workspace)
            steps, workspace = [*steps, loop], max(workspace, needed)
        elif out.nbytes:
            check_alignment((x, out))
            steps.append(_max_pool_launch(windows, x, out))
    return _plan(problem, "max_pool", steps, workspace, [])


def plan_max_pool_gradient(problem: PoolingGradientProblem) -> Plan:
    """Each window's gradient, at the element that was its largest."""
    steps: list[Step] = []
    conversions: list[Conversion] = []
    workspace = 0
    for channels, x, y, grad, out in zip(problem.windows.channels, problem.xs, problem.ys, problem.grads, problem.outs):
        windows = replace(problem.windows, channels=(channels,))
        if out.nbytes and isinstance(problem.machine, HostModel):
            body = "max_pool gradient"
            loop, needed = _loop(body, problem, windows, (x, y, grad), out, _gradient_touched, _gradient_workspace)
            steps, workspace = [*steps, loop], max(workspace, needed)
        elif out.nbytes:
            check_alignment((x, y, grad, out))
            steps.append(_gradient_launch(windows, x, y, convert(grad, x.dtype, conversions), out))
    return _plan(problem, "max_pool gradient", steps, workspace, conversions)


def _plan(
    problem: PoolingProblem, method: str, steps: list[Step], workspace: int, conversions: list[Conversion]
) -> Plan:
    windows = problem.windows
    kernel, size = ("x".join(map(str, windows.spatial(triple))) for triple in (windows.kernel, windows.size))
    merged = f" ({'+'.join(map(str, windows.channels))})" if len(windows.channels) > 1 else ""
    results = (f"{out.dtype} {out.shape[:2] + windows.spatial(out.shape[2:])}" for out in problem.outs)
    return Plan(
        method=method, backend="numpy" if isinstance(problem.machine, HostModel) else "cuda",
        device=str(problem.machine), result=", ".join(results), steps=tuple(steps),
        problem=f"{method} {windows.in_channels}{merged} channels, kernel {kernel} on {windows.batch} x {size}",
        flops=sum(step.flops for step in steps), bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=problem.minimal_bytes, bound="memory", conversions=tuple(conversions),
        workspace=(Buffer("blocks", workspace),) if workspace else (),
    )  # fmt: skip


# A GPU: one thread a pixel, for CHANNELS channels.


def _max_pool_launch(windows: Windows, x: Operand, out: Operand) -> KernelLaunch:
    lanes = _lanes(windows, x)
    return KernelLaunch(
        Kernel("max_pool", (("DTYPE", x.dtype), ("CHANNELS", str(CHANNELS)))),
        *grid_and_block(windows.batch, windows.pixels * lanes, 1, _groups(windows, lanes), 256),
        (
            ("x", image(x)),
            ("windows", windows_params(windows)),
            ("out", image(out)),
            ("batch", windows.batch),
            ("nothing", -inf),
            ("channels", windows.in_channels),
            ("lanes", lanes),
        ),
        purpose=f"the largest of each window, threads along {_along(lanes)}",
        bytes_moved=x.nbytes + out.nbytes,
        flops=_comparisons(windows),
    )


def _gradient_launch(windows: Windows, x: Operand, y: Operand, grad: Operand, out: Operand) -> KernelLaunch:
    lanes = _lanes(windows, x)
    return KernelLaunch(
        Kernel("max_pool_gradient", (("DTYPE", x.dtype), ("CHANNELS", str(CHANNELS)))),
        *grid_and_block(windows.batch, prod(windows.size) * lanes, 1, _groups(windows, lanes), 256),
        (
            ("x", image(x)),
            ("y", image(y)),
            ("grad", image(grad)),
            ("windows", windows_params(windows)),
            ("out", image(out)),
            ("batch", windows.batch),
            ("channels", windows.in_channels),
            ("lanes", lanes),
        ),
        purpose=f"gradients of the largest, threads along {_along(lanes)}",
        bytes_moved=x.nbytes + y.nbytes + grad.nbytes + out.nbytes,
        flops=_comparisons(windows),
    )


def _lanes(windows: Windows, x: Operand) -> int:
    """Neighbouring threads that take neighbouring channels: 1 where it is pixels that lie side by side."""
    pixel_steps = [abs(step) for extent, step in zip(x.shape[2:], x.strides[2:]) if extent > 1]
    if all(abs(x.stride_c) < step for step in pixel_steps):
        return max(1, min(LANES, -(-windows.in_channels // CHANNELS)))
    return 1


def _groups(windows: Windows, lanes: int) -> int:
    return -(-windows.in_channels // (CHANNELS * lanes))


def _along(lanes: int) -> str:
    return "channels" if lanes > 1 else "pixels"


def _comparisons(windows: Windows) -> int:
    return windows.batch * windows.in_channels * windows.pixels * windows.taps


# NumPy: blocks.


def _loop(
    body: str, problem: PoolingProblem, windows: Windows, inputs: Sequence[Operand], out: Operand,
    touched: Callable[[Windows, Block, str], int], workspace: Callable[[Windows, Block, str], int],
) -> tuple[PoolingLoop, int]:  # fmt: skip
    """The loop over blocks of `out`, and the bytes of temporaries it takes."""
    assert isinstance(problem.machine, HostModel)
    threads, x = problem.machine.threads, inputs[0]

    def fits(block: Block) -> bool:
        in_cache = touched(windows, block, x.dtype) <= MEMORY_BLOCK
        return in_cache and threads * workspace(windows, block, x.dtype) <= problem.limit

    by_distance = sorted(range(5), key=lambda axis: abs(x.strides[axis]) if x.shape[axis] > 1 else 0)
    block = _cut(out.shape, by_distance, fits)
    blocks = prod(-(-extent // part) for extent, part in zip(out.shape, block))
    each = workspace(windows, block, x.dtype)
    threads = max(1, min(threads, blocks, problem.limit // (each or 1)))
    needed = threads * each
    if needed > problem.limit:
        raise ValueError(f"the smallest block needs {needed:,} bytes of workspace, the limit is {problem.limit:,}")
    loop = PoolingLoop(
        body=body, inputs=tuple(operand.name for operand in inputs), result=out.name, block=block, blocks=blocks,
        threads=threads, geometry=windows, dtype=accumulator(x.dtype),
        bytes_moved=sum(operand.nbytes for operand in (*inputs, out)), flops=_comparisons(windows),
    )  # fmt: skip
    return loop, needed


def _cut(shape: Sequence[int], axes: Sequence[int], fits: Callable[[Block], bool]) -> Block:
    """The largest block that fits: whole axes first to last, part of one, single steps of the rest."""

    def with_part(axis: int, part: int) -> Block:
        return (*block[:axis], part, *block[axis + 1 :])  # type: ignore[return-value]

    block: Block = (1, 1, 1, 1, 1)
    for axis in axes:
        extent = shape[axis]
        if not fits(with_part(axis, extent)):
            part = max(1, bisect_right(range(extent), 0, key=lambda below: not fits(with_part(axis, below + 1))))
            return with_part(axis, even_part(extent, part))
        block = with_part(axis, extent)
    return block


def _read(windows: Windows, outputs: Sequence[int]) -> list[int]:
    """Elements along each axis that windows of this many outputs read."""
    return [
        min(size, (count - 1) * stride + span)
        for size, count, stride, span in zip(windows.size, outputs, windows.stride, windows.span)
    ]


def _forward_touched(windows: Windows, block: Block, dtype: str) -> int:
    samples, channels, *outputs = block
    return samples * channels * (prod(_read(windows, outputs)) + prod(outputs)) * ITEMSIZE[accumulator(dtype)]


def _forward_workspace(windows: Windows, block: Block, dtype: str) -> int:
    """Maxima along one axis, and then another; for 16-bit types the block itself, widened, and its result."""
    samples, channels, *outputs = block
    read = _read(windows, outputs)
    elements = outputs[0] * read[1] * read[2] + outputs[0] * outputs[1] * read[2]
    if accumulator(dtype) != dtype:
        elements += prod(read) + prod(outputs)
    return samples * channels * elements * ITEMSIZE[accumulator(dtype)]


def _windows_of(windows: Windows, block: Block) -> list[int]:
    """Windows along each axis that lie over a block of elements, at the most."""
    return [
        min(out, (count + span - 2) // stride + 1)
        for out, count, span, stride in zip(windows.out_size, block[2:], windows.span, windows.stride)
    ]


def _gradient_touched(windows: Windows, block: Block, dtype: str) -> int:
    elements = 2 * prod(block[2:]) + 4 * prod(_windows_of(windows, block))
    return block[0] * block[1] * elements * ITEMSIZE[accumulator(dtype)]


def _gradient_workspace(windows: Windows, block: Block, dtype: str) -> int:
    """What is left of the gradient, what a tap takes, and which do; for 16-bit types all of a block, widened."""
    outputs = _windows_of(windows, block)
    item = ITEMSIZE[accumulator(dtype)]
    nbytes = prod(outputs) * (2 * item + 2)
    if accumulator(dtype) != dtype:
        nbytes += (prod(outputs) + prod(_read(windows, outputs)) + prod(block[2:])) * item
    return block[0] * block[1] * nbytes
