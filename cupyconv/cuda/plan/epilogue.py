"""The epilogue as a launch of its own: bias, residual and activation over sums that another step has left, or over zeros."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from cupyconv.cuda.plan.im2col import Chunk
from cupyconv.cuda.plan.launches import (
    VECTOR_BYTES,
    collapse,
    epilogue_params,
    grid_and_block,
    image,
    is_along_channels,
    variant,
)
from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, collapsed_stride
from cupyconv.problem.plan import Address, KernelLaunch
from cupyconv.problem.problems import ConvProblem

#: Threads of a multiprocessor that hide from each other how long they wait for the parts of a sum, a few at a time.
BUSY_THREADS = 512


@dataclass(frozen=True)
class Sums:
    """Sums that an epilogue finishes, with their strides along samples, outputs and pixels.

    Imaginary parts may lie `imaginary` elements behind the real ones; a sum may come in `planes` parts, `plane`
    elements apart.
    """

    at: Address | None
    dtype: str
    strides: tuple[int, int, int]
    imaginary: int = 0
    planes: int = 1
    plane: int = 0


def epilogue_launch(
    out: Operand,
    sums: Sums | None = None,
    *,
    bias: Operand | None = None,
    residual: Operand | None = None,
    activation: Activation = IDENTITY,
    pre: Operand | None = None,
    chunk: Chunk | None = None,
    busy: int = 0,
) -> KernelLaunch:
    """Bias, residual and activation over a chunk of the result, or all of it; without `sums`, over zeros.

    Where vectors leave work for fewer than `busy` threads, each takes an element.
    """
    chunk = chunk or Chunk(0, out.shape[0], 0, out.pixels)
    samples, channels, pixels = chunk.samples, out.shape[1], chunk.pixels
    size, (flat, *others) = collapse([out] + ([residual] if residual else []))
    whole = size[:2] == (1, 1)
    along_channels = is_along_channels(flat)
    neighbours = 1 if along_channels else 4  # their axis
    full = VECTOR_BYTES // out.itemsize
    # Both ends of the chunk must be whole vectors: a power of two divides a | b where it divides both.
    extent = channels if along_channels else pixels | chunk.first_pixel
    fits = extent % full == 0 and (along_channels or whole) and _is_vectorized(flat, neighbours, full)
    width = full if fits and samples * pixels * channels >= busy * full else 1
    purpose = "store" if sums else "zeros"
    sums = sums or Sums(None, accumulator(out.dtype), (0, 0, 0), planes=0)
    sums_vectorized = False
    if sums.at:
        steps = (*sums.strides[:2], 0, 0, sums.strides[2])
        # Sums that lie in the result are aligned as it is: to whole vectors, wherever `width` is more than 1.
        placed = Operand(sums.at.buffer, sums.dtype, flat.shape, steps, VECTOR_BYTES, sums.at.offset)
        piece = min(width, VECTOR_BYTES // placed.itemsize)
        sums_vectorized = _is_vectorized(placed, neighbours, width) and (sums.imaginary | sums.plane) % piece == 0
    bias_vectorized = along_channels and bias is not None and bias.alignment % (width * out.itemsize) == 0
    residual_vectorized = bool(others) and _is_vectorized(others[0], neighbours, width)
    does = ["bias"] * bool(bias) + ["residual"] * bool(residual) + [activation.name] * bool(activation)
    planes = sums.planes * (1 + bool(sums.imaginary))
    nbytes = out.itemsize * (1 + bool(residual) + bool(pre)) + ITEMSIZE[sums.dtype] * planes
    largest = 256 if samples * pixels * channels >= busy * width else 64
    if along_channels:
        grid, block = grid_and_block(samples * pixels, channels, width, 1, largest)
    else:
        grid, block = grid_and_block(samples, pixels, width, channels, largest)
    return KernelLaunch(
        variant("epilogue", SUM_DTYPE=sums.dtype, Y_DTYPE=out.dtype, WIDTH=width),
        grid,
        block,
        (
            ("sums", sums.at),
            *zip(("sums_stride_n", "sums_stride_o", "sums_stride_p"), sums.strides),
            ("imaginary", sums.imaginary),
            ("plane", sums.plane),
            ("out", image(flat, chunk.first_sample)),
            ("epilogue", epilogue_params(bias, others[0] if others else None, activation, chunk.first_sample, pre)),
            ("size", size),
            ("batch", samples),
            ("first_pixel", chunk.first_pixel),
            ("pixels", pixels),
            ("channels", channels),
            ("planes", sums.planes),
            ("along_channels", int(along_channels)),
            ("sums_vectorized", int(sums_vectorized)),
            ("bias_vectorized", int(bias_vectorized)),
            ("residual_vectorized", int(residual_vectorized)),
        ),
        purpose=", ".join(does) or purpose,
        bytes_moved=samples * pixels * channels * nbytes,
    )


def as_line(operand: Operand) -> Operand:
    """All elements of an array without gaps as the pixels of one row, so that threads run along all axes."""
    return replace(operand, shape=(1, 1, 1, 1, prod(operand.shape)), strides=(0, 0, 0, 0, 1))


def finish(problem: ConvProblem, sums: Sums | None = None, chunk: Chunk | None = None) -> KernelLaunch:
    """A convolution's whole epilogue over its sums; over zeros where there is nothing to sum."""
    return epilogue_launch(
        problem.out,
        sums,
        bias=problem.bias,
        residual=problem.residual,
        activation=problem.activation,
        pre=problem.pre,
        chunk=chunk,
        busy=problem.gpu.multiprocessors * BUSY_THREADS if sums and sums.planes > 1 else 0,
    )


def activation_launch(pre: Operand, out: Operand, activation: Activation) -> KernelLaunch:
    """The result from a pre-activation that is kept: a pass of its own."""
    launch = epilogue_launch(out, residual=pre, activation=activation)
    return replace(launch, purpose=f"{activation} of the pre-activation, which is kept")


def finish_weight(out: Operand, sums: Sums | None) -> KernelLaunch:
    """The parts of a weight's gradient, added in order, into the result; zeros where there are none."""
    in_order = (out.shape[1] * out.pixels, out.pixels, 1)
    if collapsed_stride(out.shape, out.strides) == 1 and (sums is None or sums.strides == in_order):
        out, sums = as_line(out), sums and replace(sums, strides=(0, 0, 1))
    launch = epilogue_launch(out, sums)
    return replace(launch, purpose="sum of the parts") if sums else launch


def _is_vectorized(operand: Operand, axis: int, width: int) -> bool:
    """Whether `width` neighbours along an axis lie side by side, on the boundaries that wide accesses need."""
    piece = min(width, VECTOR_BYTES // operand.itemsize)
    extents = enumerate(zip(operand.shape, operand.strides))
    others = (stride for i, (extent, stride) in extents if i != axis and extent > 1)
    aligned = operand.alignment % (piece * operand.itemsize) == 0 and operand.offset % (piece * operand.itemsize) == 0
    return width > 1 and operand.strides[axis] == 1 and aligned and all(stride % piece == 0 for stride in others)


def kept_apart(problem: ConvProblem) -> tuple[Operand, Activation, tuple[KernelLaunch, ...]]:
    """What a kernel writes whose registers are full of sums, with which activation, and the launch after it, if any.

    Where the pre-activation is kept, the kernel writes that, and a pass of its own goes from there to the result.
    """
    if problem.pre is None:
        return problem.out, problem.activation, ()
    return problem.pre, IDENTITY, (activation_launch(problem.pre, problem.out, problem.activation),)
