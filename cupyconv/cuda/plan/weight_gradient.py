"""The gradient of a weight on CUDA: columns, one batched GEMM per chunk, and a sum of its parts in order.

::

    grad of sample n               columns of sample n            part n of dW
    [ group_outputs x pixels ]  x  [ K_g x pixels ]'        =     [ group_outputs x K_g ]        dW = their sum

The sum over samples and pixels is cut into parts, one per matrix of a GEMM call, in one of two ways:

- *parts of every sample*: both factors keep their samples separate, so that `grad` is read in place.  A large sample is
  cut into a few parts; each part is one call, batched over the samples.
- *parts of one long matrix*: all pixels of a chunk form one row.  `grad` is copied into that order unless it has it
  already, and the row is cut into as many parts as keep the GPU busy.

The cost model picks one.  Chunks accumulate into the same parts, one after the other, and the epilogue kernel adds the
parts in order: there are no atomics, and every run gives the same bits.  A single part is written directly into the
result if a GEMM can do so without rounding twice.  If just one of input and gradient is complex, its real and imaginary
parts are gathered separately, and each has its own plane of sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.conv import access_notes, plan_chosen
from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.depthwise_weight_gradient import draft_depthwise_gradient
from cupyconv.cuda.plan.draft import Draft, cheapest_of, in_rounds
from cupyconv.cuda.plan.epilogue import Sums, finish_weight
from cupyconv.cuda.plan.fft_weight_gradient import draft_fft_gradient
from cupyconv.cuda.plan.im2col import Chunk
from cupyconv.cuda.plan.implicit_weight_gradient import draft_implicit
from cupyconv.cuda.plan.launches import (
    GRID_Y,
    bytes_of,
    groups_params,
    image,
    prologue_params,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.matrices import (
    MAX_BATCH,
    MAX_DIMENSION,
    ROW_MULTIPLE,
    Factor,
    MatrixView,
    chunk_count,
    chunk_steps,
    column_factor,
    compute_type,
    even_rows,
    gathered_buffers,
    image_factors,
    image_matrix,
    place,
    refuse_chunk,
    row_length,
    segments,
    weight_matrix,
)
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, GemmCall, KernelLaunch, Plan, Step, counted
from cupyconv.problem.problems import (
    NO_SUCH_METHOD,
    NotApplicable,
    Prologue,
    WeightGradientProblem,
    without_empty_inputs,
)

#: Outputs per block of weight_gradient.cu, for groups of one output and of more; rows and threads per block.
OUTPUTS = (1, 4)
ROWS, THREADS = 4, 128
#: Minimum pixels of a chunk of one sample, and of a part of the sum.
MIN_CHUNK, MIN_PART = 64, 1024
#: Maximum number of parts per sample: each needs a call.
MAX_CALLS = 8
#: Ways to cut the sum: whether all pixels form one long row, and the maximum number of parts, per sample or of the row.
CUTS = ((False, 1), (False, MAX_CALLS), (True, MAX_BATCH))
#: Blocks of weight_gradient.cu that keep a multiprocessor busy.
BLOCKS_PER_MULTIPROCESSOR = 8


def plan_weight_gradient(problem: WeightGradientProblem) -> Plan:
    """Plan a weight gradient by ``problem.method``; raise ValueError if the method asked for does not apply."""
    problem = without_empty_inputs(problem)
    x_dtype = problem.x_dtype
    problem, conversions = converted(problem, xs=x_dtype, grad=problem.grad_dtype, prologue=x_dtype)
    return plan_chosen(problem, _draft, conversions, access_notes((*problem.xs, problem.grad)))


def _draft(method: str, problem: WeightGradientProblem) -> Draft:
    if not problem.out.nbytes:
        return Draft(method, (), reason="the result is empty")
    if 0 in (problem.geometry.batch, problem.geometry.pixels):
        return Draft(method, (finish_weight(problem.out, None),), reason="there are no samples to sum over")
    if method == "direct":
        return _draft_direct(problem)
    if method == "implicit_gemm":
        return draft_implicit(problem)
    if method == "fft":
        return draft_fft_gradient(problem)
    if method != "gemm":
        raise NotApplicable(NO_SUCH_METHOD)
    return _draft_gemm(problem)


def _draft_direct(problem: WeightGradientProblem) -> Draft:
    """Draft the kernel without columns, with its sum in as many parts as keep the GPU busy."""
    geometry, out = problem.geometry, problem.out
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; the kernel supports at most {MAX_SOURCES}")
    depthwise = draft_depthwise_gradient(problem)
    if depthwise is not None:
        return depthwise
    dtype = accumulator(out.dtype)
    part = geometry.out_channels * geometry.reduction
    tiles = geometry.groups * -(-geometry.group_outputs // outputs_per_block(geometry, problem.prologue))
    tiles *= -(-geometry.reduction // ROWS)
    pixels = geometry.batch * geometry.pixels
    affordable = Buffer.parts_in(problem.limit, part * ITEMSIZE[dtype])
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * problem.gpu.multiprocessors // tiles)
    parts = max(1, min(wanted, pixels // MIN_PART, affordable))
    in_place = parts == 1 and out.dtype == dtype and out.strides == c_strides(out.shape)
    if not in_place and affordable < 1:
        smallest = Buffer("sums", part * ITEMSIZE[dtype]).space
        raise NotApplicable(f"its sums need {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    at = Address(out.name, out.offset) if in_place else Address("sums")
    launch = _launch(problem, at, parts)
    if in_place:
        return Draft("direct", (launch,), reason="one kernel, no columns")
    sums = Sums(at, dtype, (geometry.reduction, geometry.taps, 1), planes=parts, plane=part)
    workspace = (Buffer("sums", parts * part * ITEMSIZE[dtype]),)
    reason = f"one kernel, no columns, sum in {counted(parts, 'part')}"
    return Draft("direct", (launch, finish_weight(problem.out, sums)), workspace, reason)


def _launch(problem: WeightGradientProblem, sums: Address, parts: int) -> KernelLaunch:
    """Return the launch that computes the parts of a weight gradient, each over a share of all samples' pixels."""
    geometry, xs, grad, dtype = problem.geometry, problem.xs, problem.grad, problem.out.dtype
    outputs = outputs_per_block(geometry, problem.prologue)
    tiles_m, tiles_n = -(-geometry.group_outputs // outputs), -(-geometry.reduction // ROWS)
    plane = geometry.out_channels * geometry.reduction
    dtypes = {"X_DTYPE": problem.x_dtype, "G_DTYPE": problem.grad_dtype, "Y_DTYPE": dtype}
    launch = KernelLaunch(
        variant("weight_gradient", problem.prologue, **dtypes, OUTPUTS=outputs),
        (parts, min(geometry.groups * tiles_m * tiles_n, GRID_Y), 1),
        THREADS,
        (
            ("sources", sources_params(xs)),
            ("windows", windows_params(geometry)),
            ("prologue", prologue_params(problem.prologue)),
            ("grad", image(grad)),
            ("sums", sums),
            ("plane", plane),
            ("batch", geometry.batch),
            ("pixels_per_part", -(-geometry.batch * geometry.pixels // parts)),
            *groups_params(geometry),
        ),
        purpose="products summed in parts" if parts > 1 else "products summed",
        bytes_moved=bytes_of(xs) * tiles_m + grad.nbytes * tiles_n + parts * plane * ITEMSIZE[accumulator(dtype)],
        flops=problem.flops,
    )
    return cost.priced(launch, cost.core_rate(dtype, problem.gpu) * cost.GENERAL, problem.gpu)


def outputs_per_block(geometry: ConvGeometry, prologue: Prologue) -> int:
    """Return the outputs of a group per block of weight_gradient.cu; with a prologue, the number is fixed."""
    return OUTPUTS[geometry.group_outputs > 1 or bool(prologue)]


def _draft_gemm(problem: WeightGradientProblem) -> Draft:
    """Return the cheapest draft of all ways to cut the sum whose smallest chunk fits."""
    geometry = problem.geometry
    if max(geometry.reduction * geometry.groups, geometry.out_channels) > MAX_DIMENSION:
        raise NotApplicable("channels times taps exceed cuBLAS's 32-bit dimensions")
    if problem.prologue and is_complex(problem.x_dtype) and not is_complex(problem.grad_dtype):
        raise NotApplicable("complex inputs with a prologue and a real gradient are not supported")
    return cheapest_of(CUTS, lambda cut: _Planner(problem, *cut).draft(), problem.gpu)


@dataclass(frozen=True)
class _Run:
    """Consecutive parts of the sum with equal length: the first part, the number of parts, and the first pixel."""

    part: int
    count: int
    column: int
    sample: int
    pixels: int
    beta: int  # 1 if they accumulate onto earlier chunks


class _Planner:
    """Draft one way to cut the sum: decide what all chunks share, then emit the steps of every chunk."""

    def __init__(self, problem: WeightGradientProblem, is_long: bool, most_parts: int) -> None:
        self.problem, self.geometry, self.is_long = problem, problem.geometry, is_long
        x_is_complex, grad_is_complex = is_complex(problem.x_dtype), is_complex(problem.grad_dtype)
        self.conjugates = x_is_complex and grad_is_complex
        #: 2 if just one factor is complex, with a plane of real and a plane of imaginary parts.
        self.planes = 2 if x_is_complex != grad_is_complex else 1
        self.dtype = real_part(problem.x_dtype) if self.planes == 2 else problem.x_dtype
        self.grad = self._grad_factor(2 if grad_is_complex and self.planes == 2 else 1)
        self.xs = self._x_factors(2 if x_is_complex and self.planes == 2 else 1)
        self.sums_dtype = accumulator(real_part(problem.out.dtype) if self.planes == 2 else problem.out.dtype)
        #: Elements per part of the sum.
        self.part = self.planes * self.geometry.out_channels * self.geometry.reduction
        self.wanted = min(self._parts_wanted(), most_parts)
        self.samples, self.pixels = self._chunk_size()

    def draft(self) -> Draft:
        geometry = self.geometry
        length = self.samples * self.pixels if self.is_long else self.pixels
        #: Pixels per part.
        self.part_length = row_length(-(-length // self.wanted))
        self.parts = -(-length // self.part_length) * (1 if self.is_long else self.samples)
        self.chunks = chunk_count(geometry, self.samples, self.pixels)
        self.out = self._result_in_place(self.parts, self.chunks)
        steps = chunk_steps(geometry, self.samples, self.pixels, self._steps)
        if self.out is None:
            imaginary = geometry.out_channels * geometry.reduction if self.planes == 2 else 0
            strides = (geometry.reduction, geometry.taps, 1)
            sums = Sums(Address("sums"), self.sums_dtype, strides, imaginary, self.parts, self.part)
            steps.append(finish_weight(self.problem.out, sums))
        columns = "the inputs" if geometry.is_pointwise and not self.problem.prologue else "columns"
        cut = (
            f"of {self.part_length} pixels" if self.is_long else f"of one sample and at most {self.part_length} pixels"
        )
        how = f"one batched GEMM on {columns}, sum in {counted(self.parts, 'part')} {cut}"
        if self.chunks > 1:
            how += f", {self.chunks:,} chunks of {self.samples} x {self.pixels} pixels"
        return Draft("gemm", tuple(steps), self._workspace(), how)

    # Where the matrices are stored.

    def _grad_factor(self, parts: int) -> Factor:
        grad = self.problem.grad
        view = self._usable(image_matrix(grad), self.geometry.out_channels) if parts == 1 else None
        (factor,) = image_factors([grad], [view])
        return replace(factor, dtype=self.dtype, parts=parts)

    def _x_factors(self, parts: int) -> list[Factor]:
        geometry, xs, prologue = self.geometry, self.problem.xs, self.problem.prologue
        if not geometry.is_pointwise or parts == 2 or prologue:
            return [column_factor(geometry, xs, self.dtype, parts, prologue)]
        views = [self._usable(image_matrix(x), count) for x, count in zip(xs, geometry.channels)]
        if self.conjugates:  # cuBLAS would not transpose a transposed view, nor conjugate it
            views = [None if view is None or view.transposed else view for view in views]
        return image_factors(xs, views)

    def _usable(self, view: MatrixView | None, rows: int) -> MatrixView | None:
        """Return the view if this cut can use it: its samples may stay separate, or already form one long row."""
        geometry = self.geometry
        if view is None or not self.is_long:
            return view
        return view.joined(rows, geometry.pixels, geometry.batch)

    def _result_in_place(self, parts: int, chunks: int) -> MatrixView | None:
        """Return the result as the only matrix of sums; None if it needs several, or a separate pass."""
        out = self.problem.out
        if parts > 1 or self.planes == 2 or (chunks > 1 and self.sums_dtype != out.dtype):
            return None
        view = weight_matrix(out)
        return None if view is None or view.transposed else view

    # Sizes.

    def _parts_wanted(self) -> int:
        """Return the parts of the row, or per sample, that occupy the GPU within a quarter of the workspace limit."""
        geometry = self.geometry
        tiles_m, tiles_n = (-(-n // cost.GEMM_TILE) for n in (geometry.group_outputs, geometry.reduction))
        tiles = geometry.groups * tiles_m * tiles_n
        affordable = self.problem.limit // 4 // (self.part * ITEMSIZE[self.sums_dtype])
        apart = 1 if self.is_long else geometry.batch
        pixels = geometry.batch * geometry.pixels // apart
        multiprocessors = self.problem.gpu.multiprocessors
        return max(1, min(-(-multiprocessors // (tiles * apart)), pixels // MIN_PART, affordable // apart))

    def _chunk_size(self) -> tuple[int, int]:
        """Return the samples and pixels per chunk: all samples, else fewer samples, else fewer pixels of one sample."""
        geometry = self.geometry
        gathered = [factor for factor in (self.grad, *self.xs) if factor.view is None]
        per_pixel = sum(factor.bytes_per_pixel for factor in gathered)
        per_sample = per_pixel * row_length(geometry.pixels)
        limit = self.problem.limit - Plan.ALIGNMENT * len(gathered)
        if geometry.pixels <= MAX_DIMENSION:
            most = max(1, MAX_DIMENSION // row_length(geometry.pixels)) if self.is_long else MAX_BATCH
            if geometry.batch <= most and geometry.batch * per_sample + self._sums_bytes(geometry.batch, 1) <= limit:
                return geometry.batch, geometry.pixels
            sizes = range(1, min(most, geometry.batch) + 1)
            if fitting := bisect_right(sizes, limit, key=lambda n: n * per_sample + self._sums_bytes(n, 2)):
                return even_part(geometry.batch, fitting), geometry.pixels
        limit -= self._sums_bytes(1, 2)
        smallest = min(row_length(geometry.pixels), MIN_CHUNK)
        if limit < per_pixel * smallest:
            refuse_chunk(self.problem, self.problem.limit - limit + per_pixel * smallest)
        pixels = min(limit // per_pixel, MAX_DIMENSION) if per_pixel else MAX_DIMENSION
        return 1, even_rows(geometry.pixels, pixels // ROW_MULTIPLE * ROW_MULTIPLE)

    def _sums_bytes(self, samples: int, chunks: int) -> int:
        """Return the bytes of the parts for chunks of `samples` samples: 0 if the result is the only part."""
        parts = self.wanted * (1 if self.is_long else samples)
        if self._result_in_place(parts, chunks) is not None:
            return 0
        return Buffer("sums", parts * self.part * ITEMSIZE[self.sums_dtype]).space

    def _workspace(self) -> tuple[Buffer, ...]:
        area = row_length(self.samples * self.pixels) if self.is_long else self.samples * row_length(self.pixels)
        buffers = gathered_buffers((self.grad, *self.xs), area)
        if self.out is None:
            buffers.append(Buffer("sums", self.parts * self.part * ITEMSIZE[self.sums_dtype]))
        return tuple(buffers)

    # Steps.

    def _steps(self, chunk: Chunk) -> list[Step]:
        row = row_length(chunk.samples * chunk.pixels) if self.is_long else 0
        (grad, *xs), steps = place((self.grad, *self.xs), chunk, row=row)
        return [*steps, *self._products(chunk, grad, xs)]

    def _products(self, chunk: Chunk, grad: MatrixView, xs: list[MatrixView]) -> Iterator[Step]:
        """Yield the calls that add a chunk to the parts of the sum; parts of equal length share a call."""
        length, beta = self.part_length, int((chunk.first_sample, chunk.first_pixel) != (0, 0))
        if self.is_long:
            whole, rest = divmod(chunk.samples * chunk.pixels, length)
            runs = [_Run(0, whole, 0, 0, length, beta), _Run(whole, 1, whole * length, 0, rest, beta)]
        else:
            runs = [
                _Run(i * self.samples, chunk.samples, first, 0, min(length, chunk.pixels - first), beta)
                for i, first in enumerate(range(0, chunk.pixels, length))
            ]
        for run in runs:
            if run.count and run.pixels:
                yield from self._products_of_parts(run, grad, xs)

    def _products_of_parts(self, run: _Run, grad: MatrixView, xs: list[MatrixView]) -> Iterator[Step]:
        """Yield the calls for a run of parts, batched over the parts or over the groups."""
        geometry = self.geometry
        for plane in range(self.planes):
            if geometry.groups > run.count and len(self.xs) == 1:
                for i in range(run.count):
                    column, sample = (run.column + i * run.pixels, 0) if self.is_long else (run.column, i)
                    part = replace(run, part=run.part + i, count=1, column=column, sample=sample)
                    for group in range(0, geometry.groups, MAX_BATCH):
                        yield from self._calls(grad, xs, plane, group, part, over_groups=True)
            else:
                yield from in_rounds(
                    geometry.groups,
                    lambda group: tuple(self._calls(grad, xs, plane, group, run)),  # noqa: B023
                )

    def _calls(
        self, grad: MatrixView, xs: list[MatrixView], plane: int, group: int, run: _Run, *, over_groups: bool = False
    ) -> Iterator[GemmCall]:
        """Yield the calls that start at a group and a part, one per factor with its rows of x."""
        geometry = self.geometry
        outputs, reduction = geometry.group_outputs, geometry.reduction
        grad_row = group * outputs + (plane * geometry.out_channels if self.grad.parts == 2 else 0)
        c, c_dtype = self.out, self.problem.out.dtype
        if c is None:
            c_dtype = self.sums_dtype
            c = MatrixView(Address("sums"), ITEMSIZE[c_dtype], reduction, self.part, False)
        c_row = plane * geometry.out_channels + group * outputs
        batch = min(MAX_BATCH, geometry.groups - group) if over_groups else run.count
        compute = compute_type(self.dtype, self.problem.allow_tf32)
        for i, x_row, column, n in segments(self.xs, group * reduction, (group + 1) * reduction):
            x, factor = xs[i], self.xs[i]
            if over_groups:
                strides = outputs * grad.row_step, reduction * x.row_step, outputs * c.row_step
            elif self.is_long:
                strides = run.pixels * grad.column_step, run.pixels * x.column_step, self.part
            else:
                strides = grad.stride, x.stride, self.part
            x_row += plane * factor.count if factor.parts == 2 else 0
            yield GemmCall(
                outputs,
                n,
                run.pixels,
                grad.matrix(strides[0], grad_row, run.column, run.sample),
                x.matrix(strides[1], x_row, run.column, run.sample, turned=True, conjugated=self.conjugates),
                c.matrix(strides[2], c_row, column, run.part),
                batch,
                self.dtype,
                c_dtype,
                compute,
                beta=run.beta,
                purpose="products",
                # The input is conjugated: its imaginary parts are subtracted.
                alpha=-1 if plane == 1 and factor.parts == 2 else 1,
            )
