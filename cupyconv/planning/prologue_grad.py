"""Plans of the way back through a prologue: the derivative where elements were transformed, and two sums a channel.

As the way back through an epilogue: on CUDA a block works on a part of the pixels of some channels, and the parts'
sums are added by a second launch; on NumPy block by block.  The order of additions is the plan's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.machine import HostModel
from cupyconv.plan import Address, Conversion, Kernel, KernelLaunch, Plan
from cupyconv.planning.epilogue_grad import cut, on_cuda, on_numpy
from cupyconv.planning.launches import collapse, image, packet_width, prologue_params
from cupyconv.planning.request import PrologueGradRequest, check_alignment, convert, converted_prologue

#: Arrays of a block's size on NumPy: x, the transformed, its derivative, what that is worked out in, the products.
TEMPORARIES = 6


def plan_prologue_grad(request: PrologueGradRequest) -> Plan:
    """One pass over the gradient and the input."""
    conversions: list[Conversion] = []
    if isinstance(request.machine, HostModel):
        activation = request.prologue.activation
        steps, workspace = on_numpy(request, "prologue_grad", activation, TEMPORARIES, flops=4)
    else:
        check_alignment((*request.images, *request.prologue.vectors))
        request = replace(
            request,
            x=convert(request.x, request.grad.dtype, conversions),
            prologue=converted_prologue(request.prologue, request.grad.dtype, conversions),
        ).sharing_with(conversions)
        steps, workspace = on_cuda(request, partial(_launch, request))
    grad = request.grad
    return Plan(
        method="prologue_grad", backend="numpy" if isinstance(request.machine, HostModel) else "cuda",
        device=str(request.machine),
        problem=f"gradient of {request.prologue}, {grad.dtype} {grad.shape}", result=f"{grad.dtype} {grad.shape}",
        steps=tuple(steps), flops=4 * prod(grad.shape), bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=sum(operand.nbytes for operand in request.images), bound="memory",
        conversions=tuple(conversions), workspace=tuple(workspace),
    )  # fmt: skip


def _launch(request: PrologueGradRequest, sums: Address | None, most_parts: int) -> KernelLaunch:
    batch, channels = request.grad.shape[:2]
    size, images = collapse(request.images)
    along_channels = channels > 1 and all(operand.stride_c == 1 for operand in images)
    width = 1 if along_channels else packet_width(images, prod(size))
    grid, threads, lanes = cut(request, width, along_channels, most_parts)
    out = image(images[2]) if request.out else (None, 0, 0, (0, 0, 0))
    sums_bytes = 2 * grid[0] * channels * ITEMSIZE[accumulator(request.grad.dtype)] * bool(sums)
    return KernelLaunch(
        Kernel("prologue_grad", (("DTYPE", request.grad.dtype), ("WIDTH", str(width)))),
        grid,
        threads,
        (
            ("grad", image(images[0])),
            ("x", image(images[1])),
            ("out", out),
            ("prologue", prologue_params(request.prologue)),
            ("partial", sums),
            ("size", size),
            ("batch", batch),
            ("pixels", prod(size)),
            ("channels", channels),
            ("lanes", lanes),
        ),
        purpose=f"derivative of {request.prologue}" + ", sums of channels" * bool(sums),
        bytes_moved=sum(operand.nbytes for operand in images) + sums_bytes,
    )
