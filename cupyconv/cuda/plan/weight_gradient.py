"""The gradient of a weight on CUDA: columns, one batched GEMM a chunk, a sum of its parts in order.

::

    grad of sample n               columns of sample n            part n of dW
    [ group_outputs x pixels ]  x  [ K_g x pixels ]'        =     [ group_outputs x K_g ]        dW = their sum

The sum over samples and pixels is cut into parts, one matrix of a GEMM call each, in one of two ways:

- *parts of every sample*: both factors keep their samples apart, so `grad` is read where it lies; one call for
  each of the few parts that a large sample is cut into, batched over the samples;
- *parts of one long matrix*: all pixels of a chunk lie in one row, `grad` is copied into that order unless it
  lies so, and the row is cut into as many parts as keep the GPU busy.

The cost model chooses.  Chunks add to the same parts, one after the other, and the epilogue kernel adds the
parts in their order: no atomics, the same bits on every run.  A lone part is the result itself wherever a GEMM can
write it without rounding it twice.  Of a complex input beside a real gradient, or the reverse, the real and imaginary
parts are gathered apart, and a plane of sums is kept of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from cupyconv.cuda.plan.conv import access_notes, choose
from cupyconv.cuda.plan.draft import GEMM_TILE, Draft
from cupyconv.cuda.plan.gemm import (
    MAX_BATCH,
    MAX_DIMENSION,
    ROW_MULTIPLE,
    MatrixView,
    compute_type,
    even_rows,
    image_matrix,
    row_length,
    weight_matrix,
)
from cupyconv.cuda.plan.launches import (
    WEIGHT_GRADIENT_ROWS,
    Chunk,
    Sums,
    component,
    epilogue_launch,
    im2col_launches,
    weight_gradient_launch,
    weight_gradient_tile,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, collapsed_stride, is_complex, real_part
from cupyconv.problem.geometry import Windows, even_part, pixel_windows
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, Conversion, GemmCall, KernelLaunch, Matrix, Plan, Step
from cupyconv.problem.problems import (
    NO_PROLOGUE,
    NotApplicable,
    WeightGradientProblem,
    check_alignment,
    convert,
    converted_prologue,
    without_empty_inputs,
)

#: Pixels below which a chunk of one sample is not cut any further, and a part of a long row is not.
SMALLEST_CHUNK, SMALLEST_PART = 64, 1024
#: Parts that a sample is cut into at the most: each takes a call.
MOST_CALLS = 8
#: Blocks of the kernel without columns that keep a multiprocessor busy.
BLOCKS_A_MULTIPROCESSOR = 8


def plan_weight_gradient(problem: WeightGradientProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    problem = without_empty_inputs(problem)
    check_alignment(problem.arrays)
    conversions: list[Conversion] = []
    problem = replace(
        problem,
        xs=tuple(convert(x, problem.x_dtype, conversions) for x in problem.xs),
        grad=convert(problem.grad, problem.grad_dtype, conversions),
        prologue=converted_prologue(problem.prologue, problem.x_dtype, conversions),
    )
    problem = problem.sharing_with(conversions)
    chosen, rejected = choose(problem.method, lambda method: _draft(method, problem), problem.gpu)
    geometry = problem.geometry
    shape = (geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))
    return chosen.plan(
        problem, f"weight gradient of {geometry}", f"{problem.out.dtype} {shape}", rejected, tuple(conversions),
        problem.notes + access_notes((*problem.xs, problem.grad)),
    )  # fmt: skip


def _draft(method: str, problem: WeightGradientProblem) -> Draft:
    if not problem.out.nbytes:
        return Draft(method, (), reason="the result is empty")
    if 0 in (problem.geometry.batch, problem.geometry.pixels):
        return Draft(method, (_finish(problem, None),), reason="there are no samples to sum over")
    if method == "direct":
        return _draft_direct(problem)
    if method == "implicit_gemm":
        raise NotApplicable("the sum over samples and pixels has no such kernel (methods 'gemm' and 'direct')")
    drafts: list[Draft] = []
    refusals: list[NotApplicable] = []
    for is_long, most_parts in ((False, 1), (False, MOST_CALLS), (True, MAX_BATCH)):
        try:
            drafts.append(_Planner(problem, is_long, most_parts).draft())
        except NotApplicable as refusal:
            refusals.append(refusal)
    if not drafts:
        raise refusals[-1]
    return min(drafts, key=lambda draft: draft.cost(problem.gpu).seconds)


def _draft_direct(problem: WeightGradientProblem) -> Draft:
    """The kernel without columns, its sum in as many parts as keep the GPU busy."""
    geometry, out = problem.geometry, problem.out
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    dtype = accumulator(out.dtype)
    part = geometry.out_channels * geometry.reduction
    tiles = geometry.groups * -(-geometry.group_outputs // weight_gradient_tile(geometry, problem.prologue))
    tiles *= -(-geometry.reduction // WEIGHT_GRADIENT_ROWS)
    pixels = geometry.batch * geometry.pixels
    affordable = (problem.limit - Plan.ALIGNMENT) // (part * ITEMSIZE[dtype])
    wanted = -(-BLOCKS_A_MULTIPROCESSOR * problem.gpu.multiprocessors // tiles)
    parts = max(1, min(wanted, pixels // SMALLEST_PART, affordable))
    in_place = parts == 1 and out.dtype == dtype and out.strides == c_strides(out.shape)
    if not in_place and affordable < 1:
        raise NotApplicable(
            f"its sums need {part * ITEMSIZE[dtype]:,} bytes of workspace, the limit is {problem.limit:,}"
        )
    at = Address(out.name, out.offset) if in_place else Address("sums")
    launch = weight_gradient_launch(geometry, problem.xs, problem.grad, out.dtype, at, parts, problem.prologue)
    if in_place:
        return Draft("direct", (launch,), reason="one kernel, no columns")
    sums = Sums(at, dtype, (geometry.reduction, geometry.taps, 1), planes=parts, plane=part)
    workspace = (Buffer("sums", parts * part * ITEMSIZE[dtype]),)
    reason = f"one kernel, no columns, {parts} part(s) of the sum"
    return Draft("direct", (launch, _finish(problem, sums)), workspace, reason)


@dataclass(frozen=True)
class _Factor:
    """Rows of one factor that lie in one place: `grad`, one input, or the columns of all inputs.

    Gathered where there is no `view`; then with real and imaginary parts apart where `parts` is 2, all rows of the
    real ones first.
    """

    name: str
    first: int
    count: int
    images: tuple[Operand, ...]
    windows: Windows
    dtype: str  # of a product's factor
    parts: int
    view: MatrixView | None

    @property
    def bytes_a_pixel(self) -> int:
        return 0 if self.view else self.parts * self.count * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class _Run:
    """Consecutive parts of the sum, of equal length: their first, how many, and where the first one's pixels begin."""

    part: int
    count: int
    column: int
    sample: int
    pixels: int
    beta: int  # 1 where they are added to those of the chunks before


class _Planner:
    """One of the two ways to cut the sum: what holds for all chunks first, then every chunk's steps."""

    def __init__(self, problem: WeightGradientProblem, is_long: bool, most_parts: int) -> None:
        self.problem, self.geometry, self.is_long = problem, problem.geometry, is_long
        geometry = self.geometry
        x_is_complex, grad_is_complex = is_complex(problem.x_dtype), is_complex(problem.grad_dtype)
        self.conjugates = x_is_complex and grad_is_complex
        #: Real parts and imaginary parts, of the one factor that is complex.
        self.planes = 2 if x_is_complex != grad_is_complex else 1
        self.dtype = real_part(problem.x_dtype) if self.planes == 2 else problem.x_dtype
        if max(geometry.reduction * geometry.groups, geometry.out_channels) > MAX_DIMENSION:
            raise NotApplicable("channels times taps pass cuBLAS's 32-bit dimensions")
        self.grad = self._grad_factor(2 if grad_is_complex and self.planes == 2 else 1)
        self.xs = self._x_factors(2 if x_is_complex and self.planes == 2 else 1)
        self.sums_dtype = accumulator(real_part(problem.out.dtype) if self.planes == 2 else problem.out.dtype)
        #: Elements of one part of the sum.
        self.part = self.planes * geometry.out_channels * geometry.reduction
        wanted = min(self._parts_wanted(), most_parts)
        self.samples, self.pixels = self._chunk_size(wanted)
        length = self.samples * self.pixels if is_long else self.pixels
        #: Pixels of a part.
        self.part_length = row_length(-(-length // wanted))
        self.parts = -(-length // self.part_length) * (1 if is_long else self.samples)
        self.chunks = [
            Chunk(n, min(self.samples, geometry.batch - n), p, min(self.pixels, geometry.pixels - p))
            for n in range(0, geometry.batch, self.samples)
            for p in range(0, geometry.pixels, self.pixels)
        ]
        self.out = self._out_in_place()

    def draft(self) -> Draft:
        steps = [step for chunk in self.chunks for step in self._steps(chunk)]
        if self.out is None:
            geometry = self.geometry
            imaginary = geometry.out_channels * geometry.reduction if self.planes == 2 else 0
            strides = (geometry.reduction, geometry.taps, 1)
            sums = Sums(Address("sums"), self.sums_dtype, strides, imaginary, self.parts, self.part)
            steps.append(_finish(self.problem, sums))
        columns = "the inputs" if self.geometry.is_pointwise and not self.problem.prologue else "columns"
        cut = (
            f"of {self.part_length} pixels" if self.is_long else f"a sample each and {self.part_length} pixels at most"
        )
        how = f"one batched GEMM on {columns}, {self.parts} part(s) of the sum, {cut}"
        if len(self.chunks) > 1:
            how += f", {len(self.chunks)} chunks of {self.samples} x {self.pixels} pixels"
        return Draft("gemm", tuple(steps), self._workspace(), how)

    # Where the matrices lie.

    def _grad_factor(self, parts: int) -> _Factor:
        geometry, grad = self.geometry, self.problem.grad
        windows = pixel_windows(geometry.batch, geometry.out_channels, geometry.out_size)
        view = self._usable(image_matrix(grad), geometry.out_channels) if parts == 1 else None
        return _Factor("grad", 0, geometry.out_channels, (grad,), windows, self.dtype, parts, view)

    def _x_factors(self, parts: int) -> list[_Factor]:
        geometry, xs = self.geometry, self.problem.xs
        if self.problem.prologue and parts == 2:
            raise NotApplicable("a prologue is of complex numbers, whose parts are not gathered apart")
        if not geometry.is_pointwise or parts == 2 or self.problem.prologue:
            count = geometry.in_channels * geometry.taps
            return [_Factor("columns", 0, count, xs, geometry, self.dtype, parts, None)]
        factors = []
        for x, first, count in zip(xs, geometry.channel_offsets, geometry.channels):
            view = self._usable(image_matrix(x), count)
            if view is not None and view.transposed and self.conjugates:
                view = None  # cuBLAS conjugates what it transposes, and this it would not
            one = replace(geometry, channels=(count,), groups=1)
            factors.append(_Factor(x.name, first, count, (x,), one, self.dtype, 1, view))
        return factors

    def _usable(self, view: MatrixView | None, rows: int) -> MatrixView | None:
        """The view, where its samples may stay apart or lie in one row already."""
        geometry = self.geometry
        if view is None or not self.is_long:
            return view
        return view.joined(rows, geometry.pixels, geometry.batch)

    def _out_in_place(self) -> MatrixView | None:
        """The result as the one matrix of sums; None where it needs more than one, or a pass of its own."""
        out = self.problem.out
        if self.parts > 1 or self.planes == 2 or (len(self.chunks) > 1 and self.sums_dtype != out.dtype):
            return None
        view = weight_matrix(out)
        return None if view is None or view.transposed else view

    # Sizes.

    def _parts_wanted(self) -> int:
        """Parts of a long row, or of a sample: as many as occupy the multiprocessors, within a quarter of the workspace."""
        geometry = self.geometry
        tiles = geometry.groups * -(-geometry.group_outputs // GEMM_TILE) * -(-geometry.reduction // GEMM_TILE)
        affordable = self.problem.limit // 4 // (self.part * ITEMSIZE[self.sums_dtype])
        apart = 1 if self.is_long else geometry.batch
        pixels = geometry.batch * geometry.pixels // apart
        multiprocessors = self.problem.gpu.multiprocessors
        return max(1, min(-(-multiprocessors // (tiles * apart)), pixels // SMALLEST_PART, affordable // apart))

    def _chunk_size(self, parts: int) -> tuple[int, int]:
        """Samples and pixels of a chunk: all samples, else fewer samples, else fewer pixels of one."""
        geometry, factors = self.geometry, [self.grad, *self.xs]
        per_pixel = sum(factor.bytes_a_pixel for factor in factors)
        part = self.part * ITEMSIZE[self.sums_dtype]
        limit = self.problem.limit - Plan.ALIGNMENT * (len(factors) + 1)
        a_sample = per_pixel * row_length(geometry.pixels)
        if self.is_long:
            limit -= parts * part if parts > 1 else self._lone_part_bytes()
            most = max(1, MAX_DIMENSION // row_length(geometry.pixels))
        elif geometry.batch * parts == 1:
            limit -= self._lone_part_bytes()
            most = 1
        else:
            a_sample += parts * part
            most = MAX_BATCH
        most = min(most, geometry.batch)
        fitting = limit // a_sample if a_sample else most if limit >= 0 or not per_pixel else 0
        if fitting >= 1 and geometry.pixels <= MAX_DIMENSION:
            samples = min(fitting, most)
            return even_part(geometry.batch, samples), geometry.pixels
        if not self.is_long and geometry.batch * parts > 1:
            limit -= parts * part
        pixels = min(limit // per_pixel if per_pixel else MAX_DIMENSION, MAX_DIMENSION) // ROW_MULTIPLE * ROW_MULTIPLE
        if pixels < min(row_length(geometry.pixels), SMALLEST_CHUNK):
            least = self.problem.limit - limit + per_pixel * min(row_length(geometry.pixels), SMALLEST_CHUNK)
            raise NotApplicable(
                f"the smallest chunk of columns needs {least:,} bytes of workspace, the limit is {self.problem.limit:,}"
            )
        return 1, even_rows(geometry.pixels, pixels)

    def _lone_part_bytes(self) -> int:
        """What one part takes where it may not be the result; counted although a single chunk may do without."""
        out = self.problem.out
        in_place = self.planes == 1 and out.dtype == self.sums_dtype and out.strides[1:] == _packed_strides(out)
        return 0 if in_place else self.part * ITEMSIZE[self.sums_dtype]

    def _workspace(self) -> tuple[Buffer, ...]:
        area = row_length(self.samples * self.pixels) if self.is_long else self.samples * row_length(self.pixels)
        gathered = [(factor, factor.bytes_a_pixel * area) for factor in (self.grad, *self.xs) if factor.view is None]
        buffers = [Buffer(_gathered_name(factor), nbytes) for factor, nbytes in gathered]
        if self.out is None:
            buffers.append(Buffer("sums", self.parts * self.part * ITEMSIZE[self.sums_dtype]))
        return tuple(buffers)

    # Steps.

    def _steps(self, chunk: Chunk) -> list[Step]:
        steps: list[Step] = []
        views = []
        for factor in (self.grad, *self.xs):
            view, launches = self._place(factor, chunk)
            views.append(view)
            steps += launches
        return [*steps, *self._products(chunk, views[0], views[1:])]

    def _place(self, factor: _Factor, chunk: Chunk) -> tuple[MatrixView, list[KernelLaunch]]:
        """A factor of this chunk: where it lies, or gathered into workspace."""
        if factor.view is not None:
            return replace(factor.view, at=factor.view.start(0, chunk.first_pixel, chunk.first_sample)), []
        name, rows = _gathered_name(factor), factor.parts * factor.count
        if self.is_long:
            stride_n, ld = chunk.pixels, row_length(chunk.samples * chunk.pixels)
        else:
            ld = row_length(chunk.pixels)
            stride_n = rows * ld
        itemsize = ITEMSIZE[self.dtype]
        target = Operand(name, self.dtype, (chunk.samples, factor.count, 1, 1, chunk.pixels), (stride_n, ld, 0, 0, 1))
        launches = []
        for i in range(factor.parts):
            images = tuple(component(image, i) for image in factor.images) if factor.parts == 2 else factor.images
            launches += im2col_launches(
                factor.windows, images, replace(target, offset=i * factor.count * ld * itemsize), chunk=chunk,
                purpose=name + (", real parts", ", imaginary parts")[i] * (factor.parts == 2),
                prologue=NO_PROLOGUE if factor is self.grad else self.problem.prologue,
            )  # fmt: skip
        return MatrixView(Address(name), itemsize, ld, stride_n, False), launches

    def _products(self, chunk: Chunk, grad: MatrixView, xs: list[MatrixView]) -> Iterator[GemmCall]:
        """The calls that add a chunk to the parts of the sum: those of equal length in one call."""
        length, beta = self.part_length, int(chunk is not self.chunks[0])
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

    def _products_of_parts(self, run: _Run, grad: MatrixView, xs: list[MatrixView]) -> Iterator[GemmCall]:
        """The calls for a run of parts: batched over them, or over the groups."""
        geometry = self.geometry
        for plane in range(self.planes):
            if geometry.groups > run.count and len(self.xs) == 1:
                for i in range(run.count):
                    column, sample = (run.column + i * run.pixels, 0) if self.is_long else (run.column, i)
                    part = replace(run, part=run.part + i, count=1, column=column, sample=sample)
                    for group in range(0, geometry.groups, MAX_BATCH):
                        yield self._call(grad, xs[0], self.xs[0], plane, group, part, over_groups=True)
                continue
            for group in range(geometry.groups):
                for x, factor in zip(xs, self.xs):
                    if factor.first < (group + 1) * geometry.reduction and group * geometry.reduction < (
                        factor.first + factor.count
                    ):
                        yield self._call(grad, x, factor, plane, group, run)

    def _call(
        self, grad: MatrixView, x: MatrixView, factor: _Factor, plane: int, group: int, run: _Run, *,
        over_groups: bool = False,
    ) -> GemmCall:  # fmt: skip
        """One call from a group and a part on, its batch over the groups or over the parts."""
        geometry = self.geometry
        outputs, reduction = geometry.group_outputs, geometry.reduction
        low = max(group * reduction, factor.first)
        n = min((group + 1) * reduction, factor.first + factor.count) - low
        grad_row = group * outputs + (plane * geometry.out_channels if self.grad.parts == 2 else 0)
        x_row = low - factor.first + (plane * factor.count if factor.parts == 2 else 0)
        c, c_dtype = self.out, self.problem.out.dtype
        if c is None:
            c_dtype = self.sums_dtype
            c = MatrixView(Address("sums"), ITEMSIZE[c_dtype], reduction, self.part, False)
        plane_rows = plane * geometry.out_channels
        batch = run.count
        if over_groups:
            batch = min(MAX_BATCH, geometry.groups - group)
            strides = outputs * grad.row_step, reduction * x.row_step, outputs * c.row_step
        elif self.is_long:
            strides = run.pixels * grad.column_step, run.pixels * x.column_step, self.part
        else:
            strides = grad.stride, x.stride, self.part
        # The imaginary parts of a conjugated input are subtracted.
        is_subtracted = plane == 1 and factor.parts == 2
        return GemmCall(
            outputs, n, run.pixels,
            Matrix(grad.start(grad_row, run.column, run.sample), grad.ld, strides[0], grad.transposed),
            Matrix(x.start(x_row, run.column, run.sample), x.ld, strides[1], not x.transposed, self.conjugates),
            Matrix(c.start(plane_rows + group * outputs, low - group * reduction, run.part), c.ld, strides[2]),
            batch, self.dtype, c_dtype, compute_type(self.dtype, self.problem.allow_tf32),
            beta=run.beta, purpose="products", alpha=-1 if is_subtracted else 1,
        )  # fmt: skip


def _finish(problem: WeightGradientProblem, sums: Sums | None) -> KernelLaunch:
    """The parts of the sum, added in order, into the result; zeros where there are none."""
    out = problem.out
    if collapsed_stride(out.shape, out.strides) == 1:  # all of it as one row, so that threads run along all axes
        out = replace(out, shape=(1, 1, 1, 1, prod(out.shape)), strides=(0, 0, 0, 0, 1))
        sums = sums and replace(sums, strides=(0, 0, 1))
    launch = epilogue_launch(out, sums)
    return replace(launch, purpose="sum of the parts") if sums else launch


def _packed_strides(out: Operand) -> tuple[int, ...]:
    """Strides of one output's weights where they lie one after the other."""
    taps = out.shape[2:]
    strides = (taps[0] * taps[1] * taps[2], taps[1] * taps[2], taps[2], 1)
    return tuple(stride if extent > 1 else 0 for extent, stride in zip(out.shape[1:], strides))


def _gathered_name(factor: _Factor) -> str:
    return factor.name if factor.name == "columns" else f"gathered {factor.name}"
