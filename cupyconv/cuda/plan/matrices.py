"""Images, weights and workspace as the matrices of batched GEMMs, and how cuBLAS can address them.

An array is used in place if cuBLAS can read it: unit pixel stride with channels `ld` apart, or unit channel stride with
pixels `ld` apart (channels-last, a transposed matrix).  Any other array is first gathered into workspace, chunk by
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from cupyconv.cuda.plan.draft import in_rounds
from cupyconv.cuda.plan.im2col import Chunk, im2col_launches
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, collapsed_stride, real_part
from cupyconv.problem.geometry import ConvGeometry, Windows, even_part, pixel_windows
from cupyconv.problem.plan import Address, Buffer, KernelLaunch, Matrix, Step
from cupyconv.problem.problems import NO_PROLOGUE, NotApplicable, Problem, Prologue

#: Limit for the int32 dimensions of cuBLAS, with some space for rounding up.
MAX_DIMENSION = 2**30
#: Maximum number of matrices in one cuBLAS call.
MAX_BATCH = 65535
#: Rows of columns are padded to a multiple of this many elements, so that each starts on a 16-byte boundary.
ROW_MULTIPLE = 8


@dataclass(frozen=True)
class MatrixView:
    """`rows x columns` matrices in memory, one per sample, `stride` elements apart.

    The matrix is row-major with leading dimension `ld`; if `transposed`, its transpose is.
    """

    at: Address
    itemsize: int
    ld: int
    stride: int
    transposed: bool

    @property
    def row_step(self) -> int:
        return 1 if self.transposed else self.ld

    @property
    def column_step(self) -> int:
        return self.ld if self.transposed else 1

    def start(self, row: int = 0, column: int = 0, sample: int = 0) -> Address:
        elements = row * self.row_step + column * self.column_step + sample * self.stride
        return Address(self.at.buffer, self.at.offset + elements * self.itemsize)

    def matrix(
        self,
        stride: int,
        row: int = 0,
        column: int = 0,
        sample: int = 0,
        *,
        turned: bool = False,
        conjugated: bool = False,
    ) -> Matrix:
        """Return a GEMM operand that starts at an element; its matrices are `stride` apart, transposed if `turned`."""
        return Matrix(self.start(row, column, sample), self.ld, stride, self.transposed != turned, conjugated)

    def as_real(self) -> MatrixView | None:
        """Return a complex matrix as a real one with twice the columns; None if pixels and parts are not one axis."""
        if self.transposed or 2 * self.ld > MAX_DIMENSION:
            return None
        return replace(self, itemsize=self.itemsize // 2, ld=2 * self.ld, stride=2 * self.stride)

    def joined(self, rows: int, columns: int, samples: int) -> MatrixView | None:
        """Return the matrices of all samples as one, or None if the columns of the samples are not consecutive."""
        if samples > 1 and self.stride != columns * self.column_step:
            return None
        if self.transposed:
            return self
        if rows == 1:
            return replace(self, ld=samples * columns)
        return self if self.ld >= samples * columns else None


def matrix_view(
    at: Address, itemsize: int, rows: int, row_stride: int, columns: int, column_stride: int | None, stride: int
) -> MatrixView | None:
    """Return a view that cuBLAS can address, with an int32 leading dimension, or None."""
    if column_stride is None or stride < 0:
        return None
    if (columns == 1 or column_stride == 1) and (rows == 1 or columns <= row_stride <= MAX_DIMENSION):
        return MatrixView(at, itemsize, row_stride if rows > 1 else columns, stride, False)
    if (rows == 1 or row_stride == 1) and rows <= column_stride <= MAX_DIMENSION:
        return MatrixView(at, itemsize, column_stride, stride, True)
    return None


def image_matrix(image: Operand) -> MatrixView | None:
    """Return an image as `channels x pixels` matrices, or None."""
    at = Address(image.name, image.offset)
    channels = image.shape[1]
    if image.pixels == 1 and (image.stride_c == 1 or channels == 1) and channels <= image.stride_n <= MAX_DIMENSION:
        return MatrixView(at, image.itemsize, image.stride_n, image.stride_n, True)  # samples act as pixels
    return matrix_view(
        at, image.itemsize, image.shape[1], image.stride_c, image.pixels, image.pixel_stride, image.stride_n
    )


def weight_matrix(weight: Operand) -> MatrixView | None:
    """Return a weight as one `outputs x reduction` matrix, or None."""
    step = collapsed_stride(weight.shape[1:], weight.strides[1:])
    at = Address(weight.name, weight.offset)
    return matrix_view(at, weight.itemsize, weight.shape[0], weight.stride_n, prod(weight.shape[1:]), step, 0)


def as_multiplied(view: MatrixView, components: int) -> MatrixView:
    """Return workspace as a GEMM reads or writes it: with two components, complex numbers are pairs of real ones."""
    if components == 1:
        return view
    real = view.as_real()
    assert real is not None, "rows of workspace are kept within the limits"
    return real


@dataclass(frozen=True)
class Factor:
    """Consecutive rows of a GEMM's factor that are stored together: those of one image, or the columns of all.

    Without a `view`, the rows are gathered into workspace.  If `parts` is 2, the rows of real parts come first, then
    the rows of imaginary parts.
    """

    name: str  # of the workspace buffer for gathered rows
    first: int
    count: int
    images: tuple[Operand, ...]
    windows: Windows
    dtype: str  # of gathered rows
    view: MatrixView | None
    parts: int = 1
    prologue: Prologue = NO_PROLOGUE

    @property
    def bytes_per_pixel(self) -> int:
        """Workspace per pixel of a chunk."""
        return 0 if self.view else self.parts * self.count * ITEMSIZE[self.dtype]

    def placed(self, chunk: Chunk, components: int, row: int) -> tuple[MatrixView, list[KernelLaunch]]:
        """Return the view of a chunk's part of the rows, and the launches that gather it: see `place`."""
        if self.view is not None:
            return replace(self.view, at=self.view.start(0, chunk.first_pixel * components, chunk.first_sample)), []
        ld = row or row_length(chunk.pixels)
        stride_n = chunk.pixels if row else self.parts * self.count * ld
        shape = (chunk.samples, self.count, 1, 1, chunk.pixels)
        target = Operand(self.name, self.dtype, shape, (stride_n, ld, 0, 0, 1))
        launches = []
        for i in range(self.parts):
            part = replace(target, offset=i * self.count * ld * target.itemsize)
            images = tuple(component(image, i) for image in self.images) if self.parts == 2 else self.images
            purpose = self.name + (", real parts", ", imaginary parts")[i] * (self.parts == 2)
            launches += im2col_launches(
                self.windows, images, part, chunk=chunk, purpose=purpose, prologue=self.prologue
            )
        view = MatrixView(Address(self.name), target.itemsize, ld, stride_n, False)
        return as_multiplied(view, components), launches


def place(
    factors: Iterable[Factor], chunk: Chunk, components: int = 1, row: int = 0
) -> tuple[list[MatrixView], list[Step]]:
    """Return the views of a chunk of every factor, and the launches that gather those without a view in place.

    Samples are gathered one after the other, or, if `row` is given, side by side into rows of `row` elements.
    """
    placed = [factor.placed(chunk, components, row) for factor in factors]
    return [view for view, _ in placed], [launch for _, launches in placed for launch in launches]


def gathered_buffers(factors: Iterable[Factor], pixels: int) -> list[Buffer]:
    """Return the workspace of the factors that are gathered, for `pixels` pixels at a time."""
    return [Buffer(each.name, each.bytes_per_pixel * pixels) for each in factors if each.view is None]


def image_factors(images: Sequence[Operand], views: Sequence[MatrixView | None]) -> list[Factor]:
    """Return one factor per image, with consecutive channels; each uses its view, or is gathered if that is None."""
    factors: list[Factor] = []
    first = 0
    for x, view in zip(images, views):
        batch, channels, depth, height, width = x.shape
        windows = pixel_windows(batch, channels, (depth, height, width))
        factors.append(Factor(f"gathered {x.name}", first, channels, (x,), windows, x.dtype, view))
        first += channels
    return factors


def column_factor(
    geometry: ConvGeometry, xs: tuple[Operand, ...], dtype: str, parts: int = 1, prologue: Prologue = NO_PROLOGUE
) -> Factor:
    """Return the columns of all inputs as one factor."""
    return Factor("columns", 0, geometry.in_channels * geometry.taps, xs, geometry, dtype, None, parts, prologue)


def is_in_segments(factors: Sequence[Factor], reduction: int) -> bool:
    """Return whether the rows of some group are spread over several factors."""
    return any(factor.count and factor.first % reduction for factor in factors)


def segments(factors: Iterable[Factor], begin: int, end: int) -> list[tuple[int, int, int, int]]:
    """Return (index, first row in the factor, first row from `begin`, count) for each factor with such rows."""
    found = []
    for i, factor in enumerate(factors):
        low, high = max(begin, factor.first), min(end, factor.first + factor.count)
        if low < high:
            found.append((i, low - factor.first, low - begin, high - low))
    return found


def chunk_count(windows: Windows, samples: int, pixels: int) -> int:
    """Return the number of chunks of at most `pixels` pixels of `samples` samples."""
    return -(-windows.batch // samples) * -(-windows.pixels // pixels)


def chunk_steps(windows: Windows, samples: int, pixels: int, steps_of: Callable[[Chunk], Sequence[Step]]) -> list[Step]:
    """Return the steps for all pixels of all samples, in chunks of at most `pixels` pixels of `samples` samples."""

    def of_samples(first: int, count: int) -> list[Step]:
        whole, rest = divmod(windows.pixels, pixels)
        steps = in_rounds(whole, lambda i: steps_of(Chunk(first, count, i * pixels, pixels)))
        return [*steps, *(steps_of(Chunk(first, count, whole * pixels, rest)) if rest else ())]

    whole, rest = divmod(windows.batch, samples)
    steps = in_rounds(whole, lambda i: of_samples(i * samples, samples))
    return [*steps, *(of_samples(whole * samples, rest) if rest else ())]


def refuse_chunk(problem: Problem, nbytes: int) -> NoReturn:
    """Raise `NotApplicable` because the smallest chunk exceeds the workspace limit."""
    raise NotApplicable(
        f"the smallest chunk of columns needs {nbytes:,} bytes of workspace, the limit is {problem.limit:,}"
    )


def gather_weight(geometry: ConvGeometry, weight: Operand, dtype: str, planes: int) -> tuple[MatrixView, list[Step]]:
    """Copy the weight to workspace as `outputs x reduction`, or as two such planes of real and imaginary parts."""
    kernel_as_image = pixel_windows(geometry.out_channels, geometry.group_channels, geometry.kernel)
    plane = geometry.out_channels * geometry.reduction
    shape = (geometry.out_channels, geometry.group_channels, 1, 1, geometry.taps)
    strides = (geometry.reduction, geometry.taps, 0, 0, 1)
    target = Operand("gathered weight", dtype, shape, strides, alignment=ITEMSIZE[dtype])
    parts = {"weight": weight}
    if planes == 2:
        parts = {f"{part} parts of the weight": component(weight, i) for i, part in enumerate(("real", "imaginary"))}
    launches: list[Step] = []
    for i, (purpose, part) in enumerate(parts.items()):
        at = replace(target, offset=i * plane * target.itemsize)
        launches += im2col_launches(kernel_as_image, (part,), at, purpose=purpose)
    return MatrixView(Address(target.name), target.itemsize, geometry.reduction, 0, False), launches


def component(operand: Operand, which: int) -> Operand:
    """Return the real (0) or imaginary (1) parts of a complex operand as a real operand."""
    dtype = real_part(operand.dtype)
    size, strides = ITEMSIZE[dtype], tuple(2 * stride for stride in operand.strides)
    return replace(operand, dtype=dtype, strides=strides, alignment=size, offset=operand.offset + which * size)


def compute_type(dtype: str, allow_tf32: bool) -> str:
    """Return the type in which cuBLAS multiplies and adds matrices of a dtype."""
    real = accumulator(real_part(dtype))
    return "tf32" if allow_tf32 and real_part(dtype) == "float32" else real


def row_length(pixels: int) -> int:
    """Return the padded length of a row with this many pixels."""
    return -(-pixels // ROW_MULTIPLE) * ROW_MULTIPLE


def even_rows(pixels: int, most: int) -> int:
    """Return the pixels per chunk, at most `most` (a multiple of `ROW_MULTIPLE`), that divide all pixels evenly."""
    return row_length(even_part(pixels, most))
