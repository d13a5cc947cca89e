"""The epilogue as a separate launch: bias, residual and activation, applied to stored sums or to zeros."""

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

#: Threads per multiprocessor that hide the latency of loading the parts of a sum, a few parts at a time.
BUSY_THREADS = 512


@dataclass(frozen=True)
class Sums:
    """Sums that an epilogue finishes, with their strides along samples, outputs and pixels.

    If `imaginary` is not 0, imaginary parts are stored that many elements after the real ones.  A sum may come in
    `planes` parts, `plane` elements apart.
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
    """Return the launch that applies bias, residual and activation to a chunk of the result, or to all of it.

    Without `sums`, it applies them to zeros.  If vectorized access would leave work for fewer than `busy` threads, each
    thread computes one element.
    """
    chunk = chunk or Chunk(0, out.shape[0], 0, out.pixels)
    samples, channels, pixels = chunk.samples, out.shape[1], chunk.pixels
    size, (flat, *others) = collapse([out] + ([residual] if residual else []))
    whole = size[:2] == (1, 1)
    along_channels = is_along_channels(flat)
    neighbours = 1 if along_channels else 4  # the axis of neighbouring elements
    full = VECTOR_BYTES // out.itemsize
    # The chunk must begin and end at whole vectors: a power of two divides a | b if it divides both.
    extent = channels if along_channels else pixels | chunk.first_pixel
    fits = extent % full == 0 and (along_channels or whole) and _is_vectorized(flat, neighbours, full)
    width = full if fits and samples * pixels * channels >= busy * full else 1
    purpose = "store" if sums else "zeros"
    sums = sums or Sums(None, accumulator(out.dtype), (0, 0, 0), planes=0)
    sums_vectorized = False
    if sums.at:
        steps = (*sums.strides[:2], 0, 0, sums.strides[2])
        # Sums stored in the result have its alignment, which is whole vectors whenever `width` is more than 1.
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
    """View a contiguous array as one row of pixels, so that threads run along all axes."""
    return replace(operand, shape=(1, 1, 1, 1, prod(operand.shape)), strides=(0, 0, 0, 0, 1))


def finish(problem: ConvProblem, sums: Sums | None = None, chunk: Chunk | None = None) -> KernelLaunch:
    """Return the whole epilogue of a convolution on its sums, or on zeros if there is nothing to sum."""
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
    """Return the separate pass that computes the result from a stored pre-activation."""
    launch = epilogue_launch(out, residual=pre, activation=activation)
    return replace(launch, purpose=f"{activation} of the stored pre-activation")


def finish_weight(out: Operand, sums: Sums | None) -> KernelLaunch:
    """Return the launch that adds the parts of a weight gradient, in order, into the result; without parts, zeros."""
    in_order = (out.shape[1] * out.pixels, out.pixels, 1)
    if collapsed_stride(out.shape, out.strides) == 1 and (sums is None or sums.strides == in_order):
        out, sums = as_line(out), sums and replace(sums, strides=(0, 0, 1))
    launch = epilogue_launch(out, sums)
    return replace(launch, purpose="sum of the parts") if sums else launch


def _is_vectorized(operand: Operand, axis: int, width: int) -> bool:
    """Return whether groups of `width` elements along an axis are contiguous and aligned for vectorized access."""
    piece = min(width, VECTOR_BYTES // operand.itemsize)
    extents = enumerate(zip(operand.shape, operand.strides))
    others = (stride for i, (extent, stride) in extents if i != axis and extent > 1)
    aligned = operand.alignment % (piece * operand.itemsize) == 0 and operand.offset % (piece * operand.itemsize) == 0
    return width > 1 and operand.strides[axis] == 1 and aligned and all(stride % piece == 0 for stride in others)


def kept_apart(problem: ConvProblem) -> tuple[Operand, Activation, tuple[KernelLaunch, ...]]:
    """Return what a kernel writes, with which activation, and the launches after it.

    This is for kernels that have no registers left to write two results.  If the pre-activation is wanted too, the
    kernel writes only that, and a separate pass computes the result from it.
    """
    if problem.pre is None:
        return problem.out, problem.activation, ()
    return problem.pre, IDENTITY, (activation_launch(problem.pre, problem.out, problem.activation),)
