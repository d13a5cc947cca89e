"""im2col and col2im: launches that write the columns of images, and that sum columns back into an image.

Every GEMM on windows uses them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    VECTOR_BYTES,
    WARP,
    address,
    adjoint_params,
    epilogue_params,
    grid_and_block,
    image,
    is_along_channels,
    prologue_params,
    prologue_words,
    sources_params,
    variant,
    vector_width,
    windows_params,
)
from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import Operand, c_strides
from cupyconv.problem.geometry import Windows
from cupyconv.problem.passes import Col2imProblem, Im2colProblem
from cupyconv.problem.plan import MAX_SOURCES, Address, KernelLaunch, Plan
from cupyconv.problem.problems import NO_PROLOGUE, Prologue, inputs_with_channels

#: Neighbouring threads of im2col.cu that share pixels if channels are contiguous.
IM2COL_LANES = 4
#: Channels per thread of col2im.cu.
COL2IM_CHANNELS = 4


@dataclass(frozen=True)
class Chunk:
    """A range of samples and of their pixels: the part of a problem that one round of steps computes."""

    first_sample: int
    samples: int
    first_pixel: int
    pixels: int


def im2col_launches(
    windows: Windows,
    xs: Sequence[Operand],
    columns: Operand,
    *,
    chunk: Chunk | None = None,
    purpose: str = "columns",
    prologue: Prologue = NO_PROLOGUE,
) -> list[KernelLaunch]:
    """Return the launches that write the columns of a chunk, or of everything: one per `MAX_SOURCES` inputs."""
    chunk = chunk or Chunk(0, windows.batch, 0, windows.pixels)
    samples, pixels, itemsize = chunk.samples, chunk.pixels, columns.itemsize
    # The kernel stores the tail of a row separately.  If the columns are not aligned, neither are their rows.
    width = vector_width((columns,), VECTOR_BYTES // itemsize)
    launches = []
    for begin in range(0, len(xs), MAX_SOURCES):
        part = slice(begin, begin + MAX_SOURCES)
        group = replace(windows, channels=windows.channels[part])
        squares = sum(-(-channels // width) for channels in group.channels)
        lanes = min(IM2COL_LANES, 1 << (squares - 1).bit_length()) if is_along_channels(xs[begin]) else 1
        shares = samples * -(-pixels // width)
        block = min(256, -(-shares * lanes // WARP) * WARP)
        rows = -(-squares // lanes) * windows.taps
        row_offset = sum(windows.channels[:begin]) * windows.taps * columns.stride_c * itemsize
        launches.append(
            KernelLaunch(
                variant("im2col", prologue, DTYPE=columns.dtype if prologue else f"bits{8 * itemsize}", WIDTH=width),
                (min(-(-shares * lanes // block), GRID_X), min(rows, GRID_Y), 1),
                block,
                (
                    ("sources", sources_params(xs[part], chunk.first_sample)),
                    ("windows", windows_params(windows)),
                    ("prologue", prologue_params(prologue, sum(windows.channels[:begin]))),
                    ("columns", Address(columns.name, columns.offset + row_offset)),
                    ("stride_n", columns.stride_n),
                    ("stride_row", columns.stride_c),
                    ("stride_pixel", columns.strides[4]),
                    ("batch", samples),
                    ("first_pixel", chunk.first_pixel),
                    ("pixels", pixels),
                    ("squares", squares),
                    ("channel_lanes", lanes),
                ),
                purpose=purpose + prologue_words(prologue),
                bytes_moved=samples
                * group.in_channels
                * itemsize
                * (windows.taps * pixels + -(-prod(windows.size) * pixels // windows.pixels)),
            )
        )
    return launches


def col2im_launch(
    windows: Windows,
    columns: Operand,
    out: Operand,
    *,
    imaginary: int = 0,
    conjugated: bool = False,
    bias: Operand | None = None,
    activation: Activation = IDENTITY,
) -> KernelLaunch:
    """Return the launch that sums columns back into an image, for the samples and channels of `out`."""
    samples, channels = out.shape[:2]
    elements = prod(windows.size)
    row, pixel = columns.stride_c, columns.strides[-1]  # a row is a tap of a channel, a pixel a window
    to_tap, to_window = (
        tuple(step * stride for stride in c_strides(shape))
        for step, shape in ((row, windows.kernel), (pixel, windows.out_size))
    )
    return KernelLaunch(
        variant("col2im", SUM_DTYPE=columns.dtype, Y_DTYPE=out.dtype, FOLDS=int(windows.padding_mode != "constant")),
        *grid_and_block(samples, elements, 1, -(-channels // COL2IM_CHANNELS), 256),
        (
            ("columns", (address(columns), columns.stride_n, windows.taps * row, to_window)),
            ("tap_stride", to_tap),
            ("windows", windows_params(windows)),
            ("adjoint", adjoint_params(windows)),
            ("out", image(out)),
            ("epilogue", epilogue_params(bias, None, activation)),
            ("batch", samples),
            ("imaginary", imaginary),
            ("channels", channels),
            ("conjugated", int(conjugated)),
        ),
        purpose="sum of columns",
        bytes_moved=samples * channels * windows.taps * windows.pixels * columns.itemsize * (1 + bool(imaginary))
        + out.nbytes,
        flops=samples * channels * windows.taps * windows.pixels,
    )


# The operations `im2col` and `col2im`.


def plan_im2col(problem: Im2colProblem) -> Plan:
    """Plan im2col: write the columns of one or many inputs directly into the result."""
    columns = problem.columns
    if not columns.nbytes:
        return problem.planned([])
    kept, windows = inputs_with_channels(problem.windows)
    read, conversions = converted(replace(problem, xs=tuple(problem.xs[i] for i in kept)), xs=columns.dtype)
    return problem.planned(im2col_launches(windows, read.xs, columns), conversions=conversions)


def plan_col2im(problem: Col2imProblem) -> Plan:
    """Plan col2im: each element of the image gathers the column entries that were read from it."""
    (out,) = problem.xs
    return problem.planned([col2im_launch(problem.windows, problem.columns, out)] if out.nbytes else [])
