"""Plans of the way back through a prologue: the derivative where elements were transformed, and two sums a channel.

As the way back through an epilogue: on CUDA a block works on a part of the pixels of some channels, and the parts'
sums are added by a second launch; on NumPy block by block.  The order of additions is the plan's.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.loops import ElementwiseLoop
from cupyconv.machine import GpuModel, HostModel
from cupyconv.operands import c_strides
from cupyconv.plan import Address, Buffer, Conversion, Kernel, KernelLaunch, Plan, Step
from cupyconv.planning.epilogue_grad import (
    BLOCK_ELEMENTS,
    BLOCKS_A_MULTIPROCESSOR,
    LANES,
    THREADS,
    block_of,
    power_of_two,
    sum_of_parts,
)
from cupyconv.planning.launches import GRID_X, GRID_Y, collapse, image, packet_width, prologue_params
from cupyconv.planning.request import PrologueGradRequest, check_alignment, convert, converted_prologue

#: Arrays of a block's size on NumPy: x, the transformed, its derivative, what that is worked out in, the products.
TEMPORARIES = 6


def plan_prologue_grad(request: PrologueGradRequest) -> Plan:
    """One pass over the gradient and the input."""
    conversions: list[Conversion] = []
    on_host = isinstance(request.machine, HostModel)
    if not on_host:
        check_alignment((*request.images, *request.prologue.vectors))
        request = replace(
            request,
            x=convert(request.x, request.grad.dtype, conversions),
            prologue=converted_prologue(request.prologue, request.grad.dtype, conversions),
        ).sharing_with(conversions)
    steps, workspace = (_on_numpy if on_host else _on_cuda)(request)
    grad = request.grad
    return Plan(
        method="prologue_grad", backend="numpy" if on_host else "cuda", device=str(request.machine),
        problem=f"gradient of {request.prologue}, {grad.dtype} {grad.shape}", result=f"{grad.dtype} {grad.shape}",
        steps=tuple(steps), flops=4 * prod(grad.shape), bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=sum(operand.nbytes for operand in request.images), bound="memory",
        conversions=tuple(conversions), workspace=tuple(workspace),
    )  # fmt: skip


def _on_cuda(request: PrologueGradRequest) -> tuple[list[Step], list[Buffer]]:
    gpu, sums, grad = request.machine, request.sums, request.grad
    assert isinstance(gpu, GpuModel)
    if sums is None or not sums.nbytes:
        return ([_launch(request, gpu, None)] if grad.nbytes else []), []
    most_parts = max(1, request.limit // Plan.ALIGNMENT * Plan.ALIGNMENT // sums.nbytes)
    launch = _launch(request, gpu, Address(sums.name, sums.offset), most_parts)
    parts = launch.grid[0]
    if parts == 1:
        return [launch], []
    shape = (parts, sums.shape[1], 1, 1, 1)
    partial = replace(sums, name="partial", shape=shape, strides=c_strides(shape), alignment=16)
    launch = _launch(request, gpu, Address(partial.name), most_parts)
    return [launch, sum_of_parts(partial, sums, gpu)], [Buffer(partial.name, partial.nbytes)]


def _launch(
    request: PrologueGradRequest, gpu: GpuModel, partial: Address | None, most_parts: int = GRID_X
) -> KernelLaunch:
    batch, channels = request.grad.shape[:2]
    size, images = collapse(request.images)
    along_channels = channels > 1 and all(operand.stride_c == 1 for operand in images)
    width = 1 if along_channels else packet_width(images, prod(size))
    lanes = min(LANES, power_of_two(channels)) if along_channels else 1
    shares = batch * prod(size) // width
    threads = min(THREADS, max(32, lanes * power_of_two(shares)))
    tiles = -(-channels // lanes)
    parts = min(-(-shares * lanes // threads), -(-gpu.multiprocessors * BLOCKS_A_MULTIPROCESSOR // tiles), most_parts)
    out = image(images[2]) if request.out else (None, 0, 0, (0, 0, 0))
    sums = 2 * max(1, parts) * channels * ITEMSIZE[accumulator(request.grad.dtype)] * bool(partial)
    return KernelLaunch(
        Kernel("prologue_grad", (("DTYPE", request.grad.dtype), ("WIDTH", str(width)))),
        (max(1, parts), min(tiles, GRID_Y), 1),
        threads,
        (
            ("grad", image(images[0])),
            ("x", image(images[1])),
            ("out", out),
            ("prologue", prologue_params(request.prologue)),
            ("partial", partial),
            ("size", size),
            ("batch", batch),
            ("pixels", prod(size)),
            ("channels", channels),
            ("lanes", lanes),
        ),
        purpose=f"derivative of {request.prologue}" + ", sums of channels" * bool(partial),
        bytes_moved=sum(operand.nbytes for operand in images) + sums,
    )


def _on_numpy(request: PrologueGradRequest) -> tuple[list[Step], list[Buffer]]:
    machine, grad, dtype = request.machine, request.grad, accumulator(request.grad.dtype)
    assert isinstance(machine, HostModel)
    if not grad.nbytes and not (request.sums and request.sums.nbytes):
        return [], []
    elements = request.limit // (TEMPORARIES * machine.threads * ITEMSIZE[dtype])
    block = block_of(request.images[-1], max(1, min(BLOCK_ELEMENTS, elements)))
    blocks = prod(-(-extent // part) for extent, part in zip(grad.shape, block))
    threads = max(1, min(machine.threads, blocks))
    loop = ElementwiseLoop(
        body="prologue_grad", block=block, blocks=blocks, threads=threads, dtype=dtype,
        activation=request.prologue.activation, bytes_moved=sum(operand.nbytes for operand in request.images),
        flops=4 * prod(grad.shape),
    )  # fmt: skip
    return [loop], [Buffer("blocks", TEMPORARIES * threads * prod(block) * ITEMSIZE[dtype])]
