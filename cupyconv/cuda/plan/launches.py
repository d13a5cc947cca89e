"""Helpers for kernel launches: parameters that many kernels share, and the division of work into a grid.

The values of a launch's `params` match the C++ structs of ``kernels/*.cuh`` field by field.  A struct is a tuple; a
pointer is an `Address` or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd
from typing import Any

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import Operand
from cupyconv.problem.geometry import ConvGeometry, Triple, Windows
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import Address, Kernel
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, Prologue

#: Maximum size of a grid along x and y; kernels loop over larger sizes.
GRID_X, GRID_Y = 2**31 - 1, 65535
#: Maximum of whatever a kernel counts in int32.
INT32 = 2**31 - 1
WARP = 32
#: Bytes of one vectorized access, for contiguous elements.
VECTOR_BYTES = 16


def convolution_params(
    problem: ConvProblem, result: Operand, epilogue: tuple[object, ...]
) -> tuple[tuple[str, Any], ...]:
    """Return the first parameters of direct.cu and depthwise.cu."""
    geometry = problem.geometry
    return (
        ("sources", sources_params(problem.xs)),
        ("windows", windows_params(geometry)),
        ("weight", image(problem.weight)),
        ("out", image(result)),
        ("epilogue", epilogue),
        ("prologue", prologue_params(problem.prologue)),
        ("batch", geometry.batch),
    )


def epilogue_params(
    bias: Operand | None,
    residual: Operand | None,
    activation: Activation = IDENTITY,
    first_sample: int = 0,
    pre: Operand | None = None,
) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Epilogue; `pre` has the layout of the result."""
    low, high = activation.bounds or (activation.alpha, activation.beta)
    return (address(bias), image(residual, first_sample), image(pre, first_sample)[0], low, high, activation.code)


def prologue_params(prologue: Prologue, first_channel: int = 0) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Prologue, starting at a channel."""
    vectors = [
        (Address(v.name, v.offset + first_channel * v.stride_c * v.itemsize), v.stride_c) if v else (None, 0)
        for v in (prologue.scale, prologue.shift)
    ]
    addresses, steps = zip(*vectors)
    activation = prologue.activation
    low, high = activation.bounds or (activation.alpha, activation.beta)
    return (*addresses, *steps, low, high, activation.code)


def prologue_words(prologue: Prologue) -> str:
    """Return the words that name the prologue in the purpose of a launch, empty without one."""
    return f" of {prologue}" if prologue else ""


def variant(name: str, prologue: Prologue = NO_PROLOGUE, /, **macros: object) -> Kernel:
    """Return a kernel with these macros; only with a prologue is the kernel compiled with code for one."""
    transforms = {"PROLOGUE": 1} if prologue else {}
    return Kernel(name, tuple((macro, str(value)) for macro, value in (macros | transforms).items()))


def address(operand: Operand | None) -> Address | None:
    """Return the address of the first element; None without an operand."""
    return Address(operand.name, operand.offset) if operand else None


def image(operand: Operand | None, first_sample: int = 0) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Image, starting at a sample."""
    if operand is None:
        return None, 0, 0, (0, 0, 0)
    offset = operand.offset + first_sample * operand.stride_n * operand.itemsize
    return Address(operand.name, offset), operand.stride_n, operand.stride_c, operand.strides[2:]


def collapse(images: Sequence[Operand]) -> tuple[Triple, list[Operand]]:
    """Return the spatial size and the images, with all spatial axes joined into one if every image allows it."""
    depth, height, width = images[0].shape[2:]
    flat = []
    for operand in images:
        stride = operand.pixel_stride
        if stride is None:
            return (depth, height, width), list(images)
        shape, strides = (*operand.shape[:2], 1, 1, operand.pixels), (*operand.strides[:2], 0, 0, stride)
        flat.append(replace(operand, shape=shape, strides=strides))
    return (1, 1, depth * height * width), flat


def vector_width(images: Sequence[Operand], pixels: int) -> int:
    """Return how many neighbouring pixels one 16-byte access may move in all images: 16 bytes of pixels, or 1.

    Vectorized access needs unit pixel stride, aligned rows and a whole number of vectors per row.
    """
    width = VECTOR_BYTES // images[0].itemsize
    aligned = all(
        op.pixel_stride == 1
        and op.alignment % VECTOR_BYTES == 0
        and op.stride_n % width == 0
        and op.stride_c % width == 0
        for op in images
    )
    return width if aligned and pixels % width == 0 else 1


def is_along_channels(out: Operand) -> bool:
    """Return whether neighbours in memory are channels of one pixel rather than pixels of one channel."""
    return out.stride_c == 1 and (out.pixels == 1 or out.pixel_stride != 1)  # `stride_c` of a single channel is 0


def bytes_of(images: Iterable[Operand]) -> int:
    """Return the bytes of all images, each read once."""
    return sum(operand.nbytes for operand in images)


def sources_params(xs: Sequence[Operand], first_sample: int = 0) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Sources, starting at a sample."""
    firsts = accumulate((x.shape[1] for x in xs), initial=0)
    return tuple((image(x, first_sample), first, x.shape[1]) for x, first in zip(xs, firsts)), len(xs)


def groups_params(geometry: ConvGeometry) -> tuple[tuple[str, int], ...]:
    """Return the fields, used by many kernels, for the number of groups and their channels and outputs."""
    names = ("groups", "group_channels", "group_outputs")
    return tuple((name, getattr(geometry, name)) for name in names)


def windows_params(windows: Windows) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Windows."""
    return (
        windows.size,
        windows.out_size,
        windows.kernel,
        windows.stride,
        windows.before,
        windows.dilation,
        PADDING_MODES.index(windows.padding_mode),
    )


def adjoint_params(windows: Windows) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Adjoint."""
    common = [gcd(s, d) for s, d in zip(windows.stride, windows.dilation)]
    return (
        tuple(
            (p - 1) * s + span - b
            for p, s, span, b in zip(windows.out_size, windows.stride, windows.span, windows.before)
        ),
        tuple(s // g for s, g in zip(windows.stride, common)),
        tuple(d // g for d, g in zip(windows.dilation, common)),
    )


def grid_and_block(samples: int, pixels: int, width: int, rows: int, largest: int) -> tuple[Triple, int]:
    """Return a grid with shares of `width` pixels of all samples along x and rows along y, and the threads per block.

    A block has whole warps, and no more than the shares need.
    """
    shares = samples * -(-pixels // width)
    block = min(largest, max(32, -(-shares // 32) * 32))
    return (min(-(-shares // block), GRID_X), min(rows, GRID_Y), 1), block
