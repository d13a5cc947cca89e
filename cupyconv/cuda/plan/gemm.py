"""Plan method "gemm" on CUDA: columns and batched GEMM.

::

    weight                        X of sample n                    y of sample n
    [ group_outputs x K_g ]   x   [ K x pixels ]          =        [ out_channels x pixels ]
      batch stride 0               1x1: the inputs in place,
                                   one accumulating GEMM per
                                   input; else columns

One call computes all samples of a chunk.  The calls are batched over samples.  They are batched over groups if the
samples form one long matrix (channels-last) or if there is only one sample.  With a prologue, all inputs are gathered
as columns and transformed while they are gathered.

The GEMM writes its sums directly into the result if this is correct.  It writes them to workspace, and an epilogue
launch finishes them, if a 16-bit result would be rounded twice, if no GEMM can write the strides of the result, or if
the image is real and the weight complex: then the sums form one plane of real and one plane of imaginary parts.

A 16-bit result is rounded only once if one product is added to either bias or residual: both have the dtype of the
result, and cuBLAS adds in float32.  Bounds (relu, relu6, clip) may be applied before or after that rounding, since
rounding keeps the order of numbers.  The cost model decides whether one pass before the GEMM and one after it cost less
than float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cupyconv.cuda.plan.draft import Draft, cheapest_of, in_rounds
from cupyconv.cuda.plan.epilogue import Sums, epilogue_launch, finish
from cupyconv.cuda.plan.im2col import Chunk
from cupyconv.cuda.plan.matrices import (
    MAX_BATCH,
    MAX_DIMENSION,
    ROW_MULTIPLE,
    MatrixView,
    as_multiplied,
    chunk_count,
    chunk_steps,
    column_factor,
    compute_type,
    even_rows,
    gather_weight,
    gathered_buffers,
    image_factors,
    image_matrix,
    is_in_segments,
    place,
    refuse_chunk,
    row_length,
    segments,
    weight_matrix,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, is_complex, real_part
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Address, Buffer, GemmCall, Plan, Step
from cupyconv.problem.problems import ConvProblem, NotApplicable, TransposedProblem

#: Minimum pixels per chunk when the columns of a sample are cut: smaller GEMMs would take mostly launch overhead.
MIN_CHUNK = 1024


class ProductsPlanner:
    """Base class for GEMMs of a weight and images: the dtypes, and the views of the factors.

    With `conjugates`, a weight whose view is transposed is gathered first.  The GEMM then reads the weight as a
    conjugate transpose, since cuBLAS conjugates only operands that it transposes.
    """

    def __init__(self, problem: ConvProblem | TransposedProblem, *, conjugates: bool = False) -> None:
        self.geometry = problem.geometry
        x_is_complex, weight_is_complex = is_complex(problem.x_dtype), is_complex(problem.weight_dtype)
        # If only one factor is complex, it is read as real numbers: an image as twice as many pixels, a weight as two
        # planes.
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
        """Return views of the images in place, as the GEMM reads them; None for an image that has to be gathered."""
        views = [image_matrix(image) for image in images]
        return [view and view.as_real() for view in views] if self.components == 2 else views

    def c_dtype(self, stored: str) -> str:
        """Return the dtype that cuBLAS gets for sums stored in the dtype `stored`."""
        return real_part(stored) if self.components == 2 else stored


def draft_gemm(problem: ConvProblem) -> Draft:
    """Return the cheapest draft of method "gemm", or raise `NotApplicable`."""
    has_choice = problem.out.itemsize == 2 and problem.activation and (problem.bias or problem.residual)
    candidates = (True, False) if has_choice else (False,)
    return cheapest_of(candidates, lambda keeps_sums: _GemmPlanner(problem, keeps_sums).draft(), problem.gpu)


class _GemmPlanner(ProductsPlanner):
    """Draft one plan: decide what all chunks share, then emit the steps of every chunk.

    `keeps_sums` writes the sums to workspace even if the GEMM could write them into the result.
    """

    def __init__(self, problem: ConvProblem, keeps_sums: bool) -> None:
        super().__init__(problem)
        self.problem, geometry = problem, self.geometry
        self.writes_columns = bool(problem.prologue) or not geometry.is_pointwise
        if max(geometry.reduction * geometry.groups, geometry.out_channels * self.planes) > MAX_DIMENSION:
            raise NotApplicable("channels times taps exceed cuBLAS's 32-bit dimensions")
        if self.writes_columns:
            self.factors = [column_factor(geometry, problem.xs, problem.x_dtype, prologue=problem.prologue)]
        else:
            self.factors = image_factors(problem.xs, self.image_views(problem.xs))
        self.addends = bool(problem.bias) + bool(problem.residual)
        self.out = None if keeps_sums else self._out_in_place()
        self.sums_dtype = self._sums_dtype()
        #: Whether bias and residual are written to the result before the GEMM accumulates into it.  This saves the pass
        #: afterwards, or rounds a 16-bit result only once.
        self.prefills = (
            self.addends > 0 and self.out is not None and (not problem.activation or problem.out.itemsize == 2)
        )
        self.samples, self.pixels = self._chunk_size()

    def draft(self) -> Draft:
        steps = [*self.weight_steps, *chunk_steps(self.geometry, self.samples, self.pixels, self._steps)]
        chunks = chunk_count(self.geometry, self.samples, self.pixels)
        gathered = any(factor.view is None for factor in self.factors)
        where = "columns" if self.writes_columns else "gathered inputs" if gathered else "the inputs in place"
        cut = f", {chunks:,} chunks of {self.samples} x {self.pixels} pixels" if chunks > 1 else ""
        return Draft("gemm", tuple(steps), self._workspace(), f"one batched GEMM over samples on {where}{cut}")

    # Where the sums are written.

    def _out_in_place(self) -> MatrixView | None:
        problem = self.problem
        (view,) = self.image_views([problem.out])
        bounded = not problem.activation or problem.activation.bounds is not None
        rounded_twice = is_in_segments(self.factors, self.geometry.reduction) or self.addends > 1 or not bounded
        if view is None or self.planes == 2 or (rounded_twice and ITEMSIZE[problem.out.dtype] == 2):
            return None
        return view

    def _sums_dtype(self) -> str:
        out = self.problem.out.dtype
        if self.out is not None:
            return out
        return real_part(out) if self.planes == 2 else accumulator(out)

    def _segments(self, group: int) -> list[tuple[int, int, int, int]]:
        """Return the rows of X that a group reads, as one segment per factor."""
        return segments(self.factors, group * self.geometry.reduction, (group + 1) * self.geometry.reduction)

    # Workspace.

    def _chunk_size(self) -> tuple[int, int]:
        """Return the samples and pixels per chunk: all samples, else fewer samples, else fewer pixels of one sample."""
        geometry, problem = self.geometry, self.problem
        limit = problem.limit - sum(buffer.space for buffer in self.weight_buffers)
        limit -= Plan.ALIGNMENT * (sum(factor.view is None for factor in self.factors) + (self.out is None))
        kept = geometry.out_channels * self.planes * ITEMSIZE[self.sums_dtype] if self.out is None else 0
        per_pixel = sum(factor.bytes_per_pixel for factor in self.factors) + kept
        most_pixels = MAX_DIMENSION // self.components // ROW_MULTIPLE * ROW_MULTIPLE
        most_samples = min(geometry.batch, MAX_BATCH, max(1, MAX_DIMENSION // (geometry.pixels * self.components)))
        if not per_pixel and (limit >= 0 or not self.weight_buffers):
            if geometry.pixels > most_pixels:
                return 1, even_rows(geometry.pixels, most_pixels)
            return even_part(geometry.batch, most_samples), geometry.pixels
        fitting = limit // (per_pixel * row_length(geometry.pixels)) if per_pixel else 0
        if fitting >= 1 and geometry.pixels <= most_pixels:
            return even_part(geometry.batch, min(fitting, most_samples)), geometry.pixels
        pixels = min(limit // per_pixel if per_pixel else 0, most_pixels) // ROW_MULTIPLE * ROW_MULTIPLE
        if pixels < min(geometry.pixels, MIN_CHUNK):
            smallest = per_pixel * row_length(min(geometry.pixels, MIN_CHUNK))
            refuse_chunk(problem, problem.limit - limit + smallest)
        return 1, even_rows(geometry.pixels, pixels)

    def _workspace(self) -> tuple[Buffer, ...]:
        area = self.samples * row_length(self.pixels)
        buffers = [*self.weight_buffers, *gathered_buffers(self.factors, area)]
        if self.out is None:
            sums = self.samples * self.pixels * self.geometry.out_channels * self.planes
            buffers.append(Buffer("sums", sums * ITEMSIZE[self.sums_dtype]))
        return tuple(buffers)

    # Steps.

    def _steps(self, chunk: Chunk) -> list[Step]:
        joined_out = self.out and self.out.joined(self.geometry.out_channels, chunk.pixels, chunk.samples)
        row = chunk.samples * chunk.pixels if joined_out and joined_out.transposed else 0
        views, steps = place(self.factors, chunk, self.components, row)
        c = self._sums(chunk)
        if self.prefills:
            steps.append(self._epilogue(chunk, None))
        steps += self._gemms(chunk, views, c)
        if self.out is None or self.problem.activation:
            steps.append(self._epilogue(chunk, c))
        return steps

    def _sums(self, chunk: Chunk) -> MatrixView:
        """Return C of a chunk: in the result, or `samples x (planes x outputs) x pixels` in workspace."""
        if self.out is not None:
            start = self.out.start(0, chunk.first_pixel * self.components, chunk.first_sample)
            return replace(self.out, at=start)
        stride = self.geometry.out_channels * self.planes * chunk.pixels
        view = MatrixView(Address("sums"), ITEMSIZE[self.sums_dtype], chunk.pixels, stride, False)
        return as_multiplied(view, self.components)

    def _gemms(self, chunk: Chunk, views: list[MatrixView], c: MatrixView) -> list[Step]:
        """Return the GEMM calls of a chunk: one per plane, group and factor that stores rows of X.

        The batch runs over the samples, or over the groups if there is only one sample.
        """
        geometry, weight, reduction = self.geometry, self.weight, self.geometry.reduction
        samples, columns = chunk.samples, chunk.pixels * self.components
        joined_c = c.joined(geometry.out_channels * self.planes, columns, samples)
        joined = [view.joined(factor.count, columns, samples) for factor, view in zip(self.factors, views)]
        if joined_c is not None and None not in joined:
            views, c, samples, columns = [view for view in joined if view], joined_c, 1, samples * columns
        planes, outputs, c_dtype = self.planes, geometry.group_outputs, self.c_dtype(self.sums_dtype)
        if geometry.groups == 1:  # planes are contiguous: one matrix with more rows
            planes, outputs = 1, self.planes * outputs
        over_groups = samples == 1 and geometry.groups > 1 and len(self.factors) == 1
        flips = c.transposed  # channels-last: C' = X' W'

        def calls_of(plane: int, group: int) -> Iterator[Step]:
            row = plane * geometry.out_channels + group * outputs
            batch = min(MAX_BATCH, geometry.groups - group) if over_groups else samples
            beta = int(self.prefills)
            for i, x_row, weight_column, count in self._segments(group):
                x, strides = views[i], (0, views[i].stride, c.stride)
                if over_groups:
                    strides = outputs * weight.row_step, reduction * x.row_step, outputs * c.row_step
                a = weight.matrix(strides[0], row, weight_column, turned=flips)
                b = x.matrix(strides[1], x_row, turned=flips)
                factors = (columns, outputs, count, b, a) if flips else (outputs, columns, count, a, b)
                target = c.matrix(strides[2], row, turned=flips)
                yield GemmCall(*factors, target, batch, self.dtype, c_dtype, self.compute, beta, "products")
                beta = 1

        calls: list[Step] = []
        for plane in range(planes):
            if over_groups:
                calls += [call for group in range(0, geometry.groups, MAX_BATCH) for call in calls_of(plane, group)]
            else:
                calls += in_rounds(geometry.groups, lambda group: tuple(calls_of(plane, group)))  # noqa: B023
        return calls

    def _epilogue(self, chunk: Chunk, c: MatrixView | None) -> Step:
        """Return the launch that finishes the sums `c`; without `c`, the launch that prefills the result."""
        problem = self.problem
        if c is None:
            return epilogue_launch(problem.out, bias=problem.bias, residual=problem.residual, chunk=chunk)
        parts = self.components
        strides = (c.stride // parts, c.row_step // parts, c.column_step)  # 1 for pairs, which are contiguous
        imaginary = self.geometry.out_channels * c.row_step if self.planes == 2 else 0
        sums = Sums(c.at, self.sums_dtype, strides, imaginary=imaginary)
        if not self.prefills:
            return finish(problem, sums, chunk)
        return epilogue_launch(problem.out, sums, activation=problem.activation, pre=problem.pre, chunk=chunk)
