"""Columns and batched GEMM: the plan of method "gemm" on CUDA.

::

    weight                        X of sample n                    y of sample n
    [ group_outputs x K_g ]   x   [ K x pixels ]          =        [ out_channels x pixels ]
      batch stride 0               1x1: the inputs where they
                                   lie, one accumulating GEMM
                                   each; else columns

One call does all samples of a chunk.  The calls are batched over samples, or over groups where the
samples are one long matrix (channels-last) or there is but one.

An array is used where it lies if cuBLAS can read it there: unit pixel stride with channels `ld` apart,
or unit channel stride with pixels `ld` apart (channels-last, a transposed matrix).  Any other is
gathered into workspace first.  With a prologue all inputs are, as columns, and transformed on the way.

The sums are the result itself wherever that is right.  They are kept in workspace, and an epilogue
launch finishes them, for a 16-bit result that would be rounded twice, a result whose strides no GEMM
can write, and a real image with a complex weight, whose sums come as a plane of real parts and a plane
of imaginary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import Chunk, Sums, component, epilogue_launch, im2col_launches
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, collapsed_stride, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, even_part, pixel_windows
from cupyconv.problem.plan import Address, Buffer, GemmCall, KernelLaunch, Matrix, Plan, Step
from cupyconv.problem.problems import ConvProblem, NotApplicable, TransposedProblem

#: Limit of cuBLAS's int32 dimensions, with room for what it rounds them up to.
MAX_DIMENSION = 2**30
#: cuBLAS's limit on the matrices of one call.
MAX_BATCH = 65535
#: Pixels below which columns of a sample are not cut any further: smaller GEMMs would only be launches.
SMALLEST_CHUNK = 1024
#: Rows of columns are padded to this many elements, so that each starts on a 16-byte boundary.
ROW_MULTIPLE = 8


@dataclass(frozen=True)
class MatrixView:
    """`rows x columns` matrices in memory, `stride` elements from one sample's to the next.

    Row-major with leading dimension `ld`; where `transposed`, it is the transpose that lies so.
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

    def as_real(self) -> MatrixView | None:
        """A complex matrix as a real one with twice the columns; None where pixels and parts are no one axis."""
        if self.transposed or 2 * self.ld > MAX_DIMENSION:
            return None
        return replace(self, itemsize=self.itemsize // 2, ld=2 * self.ld, stride=2 * self.stride)

    def joined(self, rows: int, columns: int, samples: int) -> MatrixView | None:
        """The samples' matrices side by side as one, where a sample's last column is followed by the next's first."""
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
    """The matrix as cuBLAS can address it, with an int32 leading dimension; None where it cannot."""
    if column_stride is None or stride < 0:
        return None
    if (columns == 1 or column_stride == 1) and (rows == 1 or columns <= row_stride <= MAX_DIMENSION):
        return MatrixView(at, itemsize, row_stride if rows > 1 else columns, stride, False)
    if (rows == 1 or row_stride == 1) and (columns == 1 or rows <= column_stride <= MAX_DIMENSION):
        return MatrixView(at, itemsize, column_stride if columns > 1 else rows, stride, True)
    return None


def image_matrix(image: Operand) -> MatrixView | None:
    """An image as `channels x pixels` matrices."""
    at = Address(image.name, image.offset)
    channels = image.shape[1]
    if image.pixels == 1 and (image.stride_c == 1 or channels == 1) and channels <= image.stride_n <= MAX_DIMENSION:
        return MatrixView(at, image.itemsize, image.stride_n, image.stride_n, True)  # samples are the pixels
    return matrix_view(
        at, image.itemsize, image.shape[1], image.stride_c, image.pixels, image.pixel_stride, image.stride_n
    )


def weight_matrix(weight: Operand) -> MatrixView | None:
    """A weight as one matrix `outputs x reduction`."""
    step = collapsed_stride(weight.shape[1:], weight.strides[1:])
    at = Address(weight.name, weight.offset)
    return matrix_view(at, weight.itemsize, weight.shape[0], weight.stride_n, prod(weight.shape[1:]), step, 0)


def compute_type(dtype: str, allow_tf32: bool) -> str:
    """What cuBLAS multiplies and adds matrices of a dtype in."""
    real = accumulator(real_part(dtype))
    return "tf32" if allow_tf32 and real_part(dtype) == "float32" else real


class ProductsPlanner:
    """What products of a weight and images share: their dtype, and where the factors lie.

    Where the weight `conjugates`, it is transposed as it lies: cuBLAS conjugates nothing else.
    """

    def __init__(self, problem: ConvProblem | TransposedProblem, *, conjugates: bool = False) -> None:
        self.geometry = problem.geometry
        x_is_complex, weight_is_complex = is_complex(problem.x_dtype), is_complex(problem.weight_dtype)
        # One real factor: the complex one is read as real numbers, twice as many pixels, or in two planes.
        self.components = 2 if x_is_complex and not weight_is_complex else 1
        self.planes = 2 if weight_is_complex and not x_is_complex else 1
        self.dtype = real_part(problem.x_dtype) if x_is_complex != weight_is_complex else problem.x_dtype
        self.compute = compute_type(self.dtype, problem.allow_tf32)
        view = weight_matrix(problem.weight)
        if view is None or self.planes == 2 or (conjugates and view.transposed):
            view, self.weight_steps = gather_weight(self.geometry, problem.weight, self.dtype, self.planes)
            elements = self.planes * self.geometry.out_channels * self.geometry.reduction
            self.weight_buffers = [Buffer(view.at.buffer, elements * ITEMSIZE[self.dtype])]
        else:
            self.weight_steps, self.weight_buffers = [], []
        self.weight = view

    def image_views(self, images: Sequence[Operand]) -> list[MatrixView | None]:
        """The images as they are multiplied, where they lie; None for one that has to be gathered."""
        views = [image_matrix(image) for image in images]
        return [view and view.as_real() for view in views] if self.components == 2 else views

    def as_multiplied(self, view: MatrixView) -> MatrixView:
        """Workspace as a product reads or writes it: as real numbers where one factor alone is complex."""
        if self.components == 1:
            return view
        real = view.as_real()
        assert real is not None, "rows of workspace are kept within the limits"
        return real


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of X that lie in one place: one input's, or the columns of all."""

    first: int
    count: int
    inputs: tuple[int, ...]
    view: MatrixView | None  # None: gathered into workspace, chunk by chunk


def draft_gemm(problem: ConvProblem) -> Draft:
    """Plan method "gemm", or raise `NotApplicable`."""
    return _GemmPlanner(problem).draft()


class _GemmPlanner(ProductsPlanner):
    """What holds for all chunks is decided first; then every chunk gets its steps."""

    def __init__(self, problem: ConvProblem) -> None:
        super().__init__(problem)
        self.problem, geometry = problem, self.geometry
        self.writes_columns = bool(problem.prologue) or not geometry.is_pointwise
        if max(geometry.reduction * geometry.groups, geometry.out_channels * self.planes) > MAX_DIMENSION:
            raise NotApplicable("channels times taps pass cuBLAS's 32-bit dimensions")
        self.rows = self._rows_of_x()
        self.out = self._out_in_place()
        self.sums_dtype = self._sums_dtype()
        addends = bool(problem.bias or problem.residual)
        #: Bias and residual are written before the products are added: no pass over the result after.
        self.prefills = addends and self.out is not None and not problem.activation
        self.samples, self.pixels = self._chunk_size()

    def draft(self) -> Draft:
        geometry = self.geometry
        chunks = [
            Chunk(n, min(self.samples, geometry.batch - n), p, min(self.pixels, geometry.pixels - p))
            for n in range(0, geometry.batch, self.samples)
            for p in range(0, geometry.pixels, self.pixels)
        ]
        steps = [*self.weight_steps]
        for chunk in chunks:
            steps += self._steps(chunk)
        gathered = any(rows.view is None for rows in self.rows)
        where = "columns" if self.writes_columns else "gathered inputs" if gathered else "the inputs in place"
        cut = f", {len(chunks)} chunks of {self.samples} x {self.pixels} pixels" if len(chunks) > 1 else ""
        return Draft("gemm", tuple(steps), self._workspace(), f"one batched GEMM over samples on {where}{cut}")

    # Where the three matrices lie.

    def _rows_of_x(self) -> list[Rows]:
        geometry, xs = self.geometry, self.problem.xs
        if self.writes_columns:
            return [Rows(0, geometry.in_channels * geometry.taps, tuple(range(len(xs))), None)]
        places = zip(geometry.channel_offsets, geometry.channels, self.image_views(xs))
        return [Rows(first, count, (i,), view) for i, (first, count, view) in enumerate(places)]

    def _out_in_place(self) -> MatrixView | None:
        problem = self.problem
        (view,) = self.image_views([problem.out])
        accumulations = max(len(self._segments(group)) for group in range(self.geometry.groups))
        rounded_twice = accumulations > 1 or bool(problem.activation) or problem.residual is not None
        if view is None or self.planes == 2 or (rounded_twice and ITEMSIZE[problem.out.dtype] == 2):
            return None
        return view

    def _sums_dtype(self) -> str:
        out = self.problem.out.dtype
        if self.out is not None:
            return out
        return real_part(out) if self.planes == 2 else accumulator(out)

    def _segments(self, group: int) -> list[tuple[Rows, int, int, int]]:
        """Per place of X that a group reads: (rows, first row there, first row of the group, count)."""
        per_group = self.geometry.reduction
        begin, end = group * per_group, (group + 1) * per_group
        segments = []
        for rows in self.rows:
            low, high = max(begin, rows.first), min(end, rows.first + rows.count)
            if low < high:
                segments.append((rows, low - rows.first, low - begin, high - low))
        return segments

    # Workspace.

    def _chunk_size(self) -> tuple[int, int]:
        """Samples and pixels of a chunk: all samples, else fewer samples, else fewer pixels of one."""
        geometry, problem = self.geometry, self.problem
        limit = problem.limit - sum(buffer.space for buffer in self.weight_buffers)
        limit -= Plan.ALIGNMENT * (sum(rows.view is None for rows in self.rows) + (self.out is None))
        gathered = sum(rows.count for rows in self.rows if rows.view is None) * ITEMSIZE[problem.x_dtype]
        kept = geometry.out_channels * self.planes * ITEMSIZE[self.sums_dtype] if self.out is None else 0
        per_pixel = gathered + kept
        most_pixels = MAX_DIMENSION // self.components // ROW_MULTIPLE * ROW_MULTIPLE
        most_samples = min(geometry.batch, MAX_BATCH, max(1, MAX_DIMENSION // (geometry.pixels * self.components)))
        if not per_pixel and (limit >= 0 or not self.weight_buffers):
            if geometry.pixels > most_pixels:
                return 1, even_rows(geometry.pixels, most_pixels)
            return even_part(geometry.batch, most_samples), geometry.pixels
        fitting = limit // (per_pixel * row_length(geometry.pixels)) if per_pixel else 0
        if fitting >= 1 and geometry.pixels <= most_pixels:
            samples = min(fitting, most_samples)
            return even_part(geometry.batch, samples), geometry.pixels
        pixels = min(limit // per_pixel if per_pixel else 0, most_pixels) // ROW_MULTIPLE * ROW_MULTIPLE
        if pixels < min(geometry.pixels, SMALLEST_CHUNK):
            least = problem.limit - limit + per_pixel * row_length(min(geometry.pixels, SMALLEST_CHUNK))
            raise NotApplicable(
                f"the smallest chunk of columns needs {least:,} bytes of workspace, the limit is {problem.limit:,}"
            )
        return 1, even_rows(geometry.pixels, pixels)

    def _workspace(self) -> tuple[Buffer, ...]:
        geometry, area = self.geometry, self.samples * row_length(self.pixels)
        buffers = [*self.weight_buffers]
        for rows in self.rows:
            if rows.view is None:
                buffers.append(Buffer(self._gathered_name(rows), rows.count * area * ITEMSIZE[self.problem.x_dtype]))
        if self.out is None:
            sums = self.samples * self.pixels * geometry.out_channels * self.planes
            buffers.append(Buffer("sums", sums * ITEMSIZE[self.sums_dtype]))
        return tuple(buffers)

    def _gathered_name(self, rows: Rows) -> str:
        return "columns" if self.writes_columns else f"gathered {self.problem.xs[rows.inputs[0]].name}"

    # Steps.

    def _steps(self, chunk: Chunk) -> list[Step]:
        views: dict[Rows, MatrixView] = {}
        steps: list[Step] = []
        for rows in self.rows:
            if rows.view is None:
                views[rows], launches = self._gather(rows, chunk)
                steps += launches
            else:
                column = chunk.first_pixel * self.components
                views[rows] = replace(rows.view, at=rows.view.start(0, column, chunk.first_sample))
        c = self._sums(chunk)
        if self.prefills:
            steps.append(self._epilogue(chunk, None))
        steps += self._gemms(chunk, views, c)
        if self.out is None or self.problem.activation:
            steps.append(self._epilogue(chunk, c))
        return steps

    def _gather(self, rows: Rows, chunk: Chunk) -> tuple[MatrixView, list[KernelLaunch]]:
        problem, name = self.problem, self._gathered_name(rows)
        if self.out is not None and self.out.transposed and self._joins(self.out, chunk):
            stride_n, ld = chunk.pixels, chunk.samples * chunk.pixels  # all samples as one long row
        else:
            ld = row_length(chunk.pixels)
            stride_n = rows.count * ld
        columns = Operand(
            name, problem.x_dtype, (chunk.samples, rows.count, 1, 1, chunk.pixels), (stride_n, ld, 0, 0, 1)
        )
        windows = replace(self.geometry, channels=tuple(self.geometry.channels[i] for i in rows.inputs), groups=1)
        launches = im2col_launches(
            windows, tuple(problem.xs[i] for i in rows.inputs), columns, chunk=chunk, purpose=name,
            prologue=problem.prologue,
        )  # fmt: skip
        view = MatrixView(Address(name), columns.itemsize, ld, stride_n, False)
        return self.as_multiplied(view), launches

    def _joins(self, view: MatrixView, chunk: Chunk) -> bool:
        return view.joined(self.geometry.out_channels, chunk.pixels, chunk.samples) is not None

    def _sums(self, chunk: Chunk) -> MatrixView:
        """The chunk's C: in the result, or `samples x (planes x outputs) x pixels` in workspace."""
        if self.out is not None:
            start = self.out.start(0, chunk.first_pixel * self.components, chunk.first_sample)
            return replace(self.out, at=start)
        stride = self.geometry.out_channels * self.planes * chunk.pixels
        view = MatrixView(Address("sums"), ITEMSIZE[self.sums_dtype], chunk.pixels, stride, False)
        return self.as_multiplied(view)

    def _gemms(self, chunk: Chunk, views: dict[Rows, MatrixView], c: MatrixView) -> list[Step]:
        geometry = self.geometry
        samples, columns = chunk.samples, chunk.pixels * self.components
        joined_c = c.joined(geometry.out_channels * self.planes, columns, samples)
        joined = {
            rows: whole
            for rows, view in views.items()
            if (whole := view.joined(rows.count, columns, samples)) is not None
        }
        if joined_c is not None and len(joined) == len(views):
            views, c, samples, columns = joined, joined_c, 1, samples * columns
        if geometry.groups == 1:
            outputs = self.planes * geometry.out_channels  # planes lie one after the other
            return self._accumulate(0, 0, outputs, views, c, columns, samples)
        over_groups = samples == 1 and len(self.rows) == 1
        return [
            call
            for plane in range(self.planes)
            for group in range(0, geometry.groups, MAX_BATCH if over_groups else 1)
            for call in self._accumulate(
                group, plane * geometry.out_channels + group * geometry.group_outputs, geometry.group_outputs, views, c,
                columns, min(MAX_BATCH, geometry.groups - group) if over_groups else samples, over_groups=over_groups,
            )
        ]  # fmt: skip

    def _accumulate(
        self, group: int, first_output: int, outputs: int, views: dict[Rows, MatrixView], c: MatrixView,
        columns: int, batch: int, *, over_groups: bool = False,
    ) -> list[Step]:  # fmt: skip
        """The calls whose sum is a range of outputs: one for each place its rows of X lie in.

        The batch runs over samples, or over groups from `group` on.
        """
        weight = self.weight
        calls: list[Step] = []
        for rows, x_row, weight_column, count in self._segments(group):
            x = views[rows]
            weight_stride, x_stride, c_stride = 0, x.stride, c.stride
            if over_groups:
                weight_stride, c_stride = outputs * weight.row_step, outputs * c.row_step
                x_stride = self.geometry.reduction * x.row_step
            a = Matrix(weight.start(first_output, weight_column), weight.ld, weight_stride, weight.transposed)
            b = Matrix(x.start(x_row), x.ld, x_stride, x.transposed)
            m, n = outputs, columns
            if c.transposed:  # channels-last: C' = X' W'
                a, b, m, n = _flip(b), _flip(a), n, m
            target = Matrix(c.start(first_output), c.ld, c_stride)
            beta = int(self.prefills or bool(calls))
            c_dtype = real_part(self.sums_dtype) if self.components == 2 else self.sums_dtype
            calls.append(
                GemmCall(m, n, count, a, b, target, batch, self.dtype, c_dtype, self.compute, beta, "products")
            )
        return calls

    def _epilogue(self, chunk: Chunk, c: MatrixView | None) -> Step:
        """What is done to the sums `c`; without them, what they are added to."""
        problem = self.problem
        if c is None:
            return epilogue_launch(problem.out, bias=problem.bias, residual=problem.residual, chunk=chunk)
        parts = self.components
        sums = Sums(
            c.at, self.sums_dtype, (c.stride // parts, c.row_step // parts, 1 if parts == 2 else c.column_step),
            imaginary=self.geometry.out_channels * c.row_step if self.planes == 2 else 0,
        )  # fmt: skip
        return epilogue_launch(
            problem.out, sums, bias=problem.bias, residual=problem.residual, activation=problem.activation,
            pre=problem.pre, chunk=chunk,
        )  # fmt: skip


def gather_weight(geometry: ConvGeometry, weight: Operand, dtype: str, planes: int) -> tuple[MatrixView, list[Step]]:
    """The weight copied to workspace as `outputs x reduction`, or as two such planes of real and imaginary parts."""
    kernel_as_image = pixel_windows(geometry.out_channels, geometry.group_channels, geometry.kernel)
    plane = geometry.out_channels * geometry.reduction
    target = Operand(
        "gathered weight", dtype, (geometry.out_channels, geometry.group_channels, 1, 1, geometry.taps),
        (geometry.reduction, geometry.taps, 0, 0, 1), alignment=ITEMSIZE[dtype],
    )  # fmt: skip
    parts = [weight] if planes == 1 else [component(weight, 0), component(weight, 1)]
    launches: list[Step] = [
        launch
        for i, part in enumerate(parts)
        for launch in im2col_launches(
            kernel_as_image, (part,), replace(target, offset=i * plane * target.itemsize),
            purpose="weight" if planes == 1 else ("real parts", "imaginary parts")[i] + " of the weight",
        )
    ]  # fmt: skip
    return MatrixView(Address(target.name), target.itemsize, geometry.reduction, 0, False), launches


def _flip(matrix: Matrix) -> Matrix:
    return replace(matrix, transposed=not matrix.transposed)


def row_length(pixels: int) -> int:
    return -(-pixels // ROW_MULTIPLE) * ROW_MULTIPLE


def even_rows(pixels: int, most: int) -> int:
    """Pixels of a chunk, at most `most` (a multiple of a row's), that cut all of them evenly."""
    return row_length(even_part(pixels, most))
