"""The kernel for the gradient of depthwise weights, whose threads hold the sums of all taps."""

from __future__ import annotations

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.depthwise import ANY_KERNEL, ROWS, listed_kernel
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import Sums, finish_weight
from cupyconv.cuda.plan.launches import (
    GRID_Y,
    WARP,
    bytes_of,
    image,
    is_along_channels,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, is_complex
from cupyconv.problem.plan import Address, Buffer, KernelLaunch, counted
from cupyconv.problem.problems import WeightGradientProblem

#: Square kernels, with their stride along h, that depthwise_weight_gradient.cu is compiled for.
KERNELS = ((3, 1), (3, 2), (5, 1), (5, 2))
THREADS = 128
#: Blocks that keep a multiprocessor busy, and the minimum number of strips of pixels per thread.
BLOCKS_PER_MULTIPROCESSOR, SMALLEST_SHARE = 8, 4


def draft_depthwise_gradient(problem: WeightGradientProblem) -> Draft | None:
    """Draft the kernel for one channel per group, or return None if it does not apply.

    The sum is cut into as many parts as keep the GPU busy.
    """
    geometry, grad, out, gpu = problem.geometry, problem.grad, problem.out, problem.gpu
    if geometry.group_channels > 1 or is_complex(out.dtype) or problem.prologue:
        return None
    kernel = size, stride = listed_kernel(geometry, problem.xs, (), KERNELS)
    if kernel == ANY_KERNEL:
        return None
    dtype, part = accumulator(out.dtype), geometry.out_channels * geometry.taps
    lanes = min(WARP, 1 << (geometry.out_channels - 1).bit_length()) if is_along_channels(grad) else 1
    depth, height, width = geometry.out_size
    shares = geometry.batch * depth * -(-height // ROWS[stride]) * width
    rows = min(-(-geometry.out_channels // lanes), GRID_Y)
    affordable = Buffer.parts_in(problem.limit, part * ITEMSIZE[dtype])
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors // rows)
    parts = max(1, min(wanted, shares * lanes // (SMALLEST_SHARE * THREADS), affordable))
    in_place = parts == 1 and out.dtype == dtype and out.strides == c_strides(out.shape)
    if not in_place and affordable < 1:
        return None
    sums = Address(out.name, out.offset) if in_place else Address("sums")
    launch = KernelLaunch(
        variant("depthwise_weight_gradient", DTYPE=out.dtype, KERNEL=size, STRIDE=stride),
        (parts, rows, 1),
        THREADS,
        (
            ("sources", sources_params(problem.xs)),
            ("windows", windows_params(geometry)),
            ("grad", image(grad)),
            ("sums", sums),
            ("plane", part),
            ("batch", geometry.batch),
            ("outputs", geometry.out_channels),
            ("group_outputs", geometry.group_outputs),
            ("channel_lanes", lanes),
        ),
        purpose="products summed in parts" if parts > 1 else "products summed",
        bytes_moved=bytes_of(problem.xs) * geometry.group_outputs + grad.nbytes + parts * part * ITEMSIZE[dtype],
        flops=problem.flops,
    )
    launch = cost.priced(launch, cost.core_rate(out.dtype, gpu) * cost.DEPTHWISE, gpu)
    if in_place:
        return Draft("direct", (launch,), reason="depthwise kernel")
    finish = finish_weight(out, Sums(sums, dtype, (geometry.taps, geometry.taps, 1), planes=parts, plane=part))
    workspace = (Buffer("sums", parts * part * ITEMSIZE[dtype]),)
    return Draft("direct", (launch, finish), workspace, f"depthwise kernel, sum in {counted(parts, 'part')}")
