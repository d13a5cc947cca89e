"""The choice of a method for a transposed convolution on a GPU: drafted, and picked by the cost model.

"direct" is a kernel in which every element gathers what reaches it, for everything, or ordinary kernels where
the result falls apart into ordinary convolutions (``residue_classes.py``); "implicit_gemm" is these alone.
"gemm" is products of the weight, kept as columns, which every element then gathers; of a 1x1 kernel the
products are the result.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from cupyconv.cuda.plan.conv import access_notes, choose, draft_conv
from cupyconv.cuda.plan.draft import Draft, in_sequence
from cupyconv.cuda.plan.gemm import MAX_BATCH, MAX_DIMENSION, MatrixView, ProductsPlanner, row_length
from cupyconv.cuda.plan.launches import (
    Chunk,
    activation_launch,
    col2im_launch,
    epilogue_params,
    im2col_launches,
    transposed_launch,
)
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, real_part
from cupyconv.problem.geometry import even_part, pixel_windows
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, Conversion, GemmCall, Matrix, Plan, Step
from cupyconv.problem.polyphase import class_problems
from cupyconv.problem.problems import (
    NotApplicable,
    TransposedProblem,
    check_alignment,
    convert,
    convert_bias,
    inputs_with_channels,
)


def plan_transposed(problem: TransposedProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    if problem.pre is not None:
        return _with_activation(problem, problem.pre)
    check_alignment(problem.arrays)
    problem, conversions = _converted(problem)
    chosen, rejected = choose(problem.method, lambda method: _draft(method, problem), problem.gpu)
    notes = problem.notes + access_notes((*problem.xs, *problem.outs))
    return chosen.plan(problem, problem.title, problem.result, rejected, conversions, notes)


def _with_activation(problem: TransposedProblem, pre: Operand) -> Plan:
    """The plan whose result is the pre-activation that is kept, and one more pass, from there to the result."""
    plan = plan_transposed(replace(problem, outs=(pre,), pre=None, activation=IDENTITY))
    if not plan.steps:
        return plan
    launch = activation_launch(pre, problem.outs[0], problem.activation)
    return replace(
        plan, steps=(*plan.steps, launch), bytes_moved=plan.bytes_moved + launch.bytes_moved,
        minimal_bytes=plan.minimal_bytes + problem.outs[0].nbytes,
    )  # fmt: skip


def _converted(problem: TransposedProblem) -> tuple[TransposedProblem, tuple[Conversion, ...]]:
    """Arguments in the dtypes computed with, without those of no channels; conversions take their share of workspace."""
    conversions: list[Conversion] = []
    kept, geometry = inputs_with_channels(problem.geometry)
    xs = [x for x in problem.xs if x.shape[1]] or [problem.xs[0]]
    problem = replace(
        problem,
        geometry=geometry,
        outs=tuple(problem.outs[i] for i in kept),
        xs=tuple(convert(x, problem.x_dtype, conversions) for x in xs),
        weight=convert(problem.weight, problem.weight_dtype, conversions),
        bias=convert_bias(problem.bias, problem.dtype, conversions),
    )
    return problem.sharing_with(conversions), tuple(conversions)


def _draft(method: str, problem: TransposedProblem) -> Draft:
    if not any(out.nbytes for out in problem.outs):
        return Draft(method, (), reason="the results are empty")
    return {"direct": _draft_direct, "gemm": _draft_gemm, "implicit_gemm": _draft_implicit_gemm}[method](problem)


def _draft_direct(problem: TransposedProblem) -> Draft:
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    epilogue = epilogue_params(problem.bias, None, problem.activation)
    launches = [
        transposed_launch(
            problem.geometry, problem.xs, problem.weight, out, first=first, conjugated=problem.conjugate, epilogue=epilogue
        )
        for out, first in zip(problem.outs, problem.geometry.channel_offsets)
    ]  # fmt: skip
    drafts = [Draft("direct", tuple(launches), reason="general kernel")]
    with suppress(NotApplicable):
        drafts.append(_as_convolutions("direct", problem))
    return min(drafts, key=lambda draft: draft.cost(problem.gpu).seconds)


def _draft_implicit_gemm(problem: TransposedProblem) -> Draft:
    return _as_convolutions("implicit_gemm", problem)


def _draft_gemm(problem: TransposedProblem) -> Draft:
    geometry = problem.geometry
    if geometry.out_channels == 0:
        raise NotApplicable("there are no input channels to sum over")
    if geometry.is_pointwise and geometry.groups == 1 and not problem.conjugate:
        return _as_convolutions("gemm", problem)
    return _GemmPlanner(problem).draft()


def _as_convolutions(method: str, problem: TransposedProblem) -> Draft:
    """Ordinary convolutions with x, each of which is a part of a result."""
    drafts = [draft_conv(method, part) for part in class_problems(problem)]
    kinds = ", ".join(dict.fromkeys(draft.reason for draft in drafts))
    return in_sequence(method, drafts, f"{len(drafts)} convolution(s) with x: {kinds}")


class _GemmPlanner(ProductsPlanner):
    """Columns of some samples and channels, chunk by chunk, and the elements that gather them.

    ::

        weight'                       x of sample n                columns of sample n
        [ C taps x O ]           x    [ O x pixels ]         =     [ C taps x pixels ]    --col2im-->   results
          batch stride 0              where it lies, one
                                      accumulating GEMM an input

    Sums of 16-bit products are kept in float32 until their last addition.
    """

    def __init__(self, problem: TransposedProblem) -> None:
        super().__init__(problem, conjugates=problem.conjugate)
        self.problem, geometry = problem, self.geometry
        self.columns_dtype = accumulator(problem.dtype)
        if self.planes == 2:
            self.columns_dtype = real_part(self.columns_dtype)
        #: Whether the GEMM conjugates the weight; where it is in planes, the sums are conjugated after.
        self.conjugates = problem.conjugate and self.planes == 1
        self.x_views = self.image_views(problem.xs)
        row = row_length(geometry.pixels) * self.components
        if max(geometry.out_channels, geometry.group_channels * geometry.taps, row) > MAX_DIMENSION:
            raise NotApplicable("channels times taps, or pixels, pass cuBLAS's 32-bit dimensions")
        self.samples, self.channels = self._chunk_size()

    def draft(self) -> Draft:
        batch, ranges = self.geometry.batch, self._channel_ranges()
        steps = [*self.weight_steps]
        for first_sample in range(0, batch, self.samples):
            samples = min(self.samples, batch - first_sample)
            views, launches = self._x(first_sample, samples)
            steps += launches
            for channels in ranges:
                steps += self._steps(first_sample, samples, channels, views)
        chunks = -(-batch // self.samples) * len(ranges)
        cut = f", {chunks} chunks of {self.samples} samples x {self.channels} channels" if chunks > 1 else ""
        return Draft("gemm", tuple(steps), self._workspace(), f"one batched GEMM over samples, then a gather{cut}")

    # Where the matrices lie.

    def _x(self, first_sample: int, samples: int) -> tuple[list[MatrixView], list[Step]]:
        """The inputs of a chunk's samples, where they lie or gathered."""
        views: list[MatrixView] = []
        steps: list[Step] = []
        for x, view in zip(self.problem.xs, self.x_views):
            if view is not None:
                views.append(replace(view, at=view.start(sample=first_sample)))
                continue
            ld = row_length(self.geometry.pixels)
            name, channels = f"gathered {x.name}", x.shape[1]
            target = Operand(
                name, x.dtype, (samples, channels, 1, 1, self.geometry.pixels), (channels * ld, ld, 0, 0, 1)
            )
            views.append(self.as_multiplied(MatrixView(Address(name), x.itemsize, ld, channels * ld, False)))
            windows = pixel_windows(self.geometry.batch, channels, self.geometry.out_size)
            chunk = Chunk(first_sample, samples, 0, self.geometry.pixels)
            steps += im2col_launches(windows, (x,), target, chunk=chunk, purpose=name)
        return views, steps

    # Workspace.

    def _chunk_size(self) -> tuple[int, int]:
        """Samples and channels of a chunk: all, else fewer samples, else fewer channels of one."""
        geometry, problem = self.geometry, self.problem
        limit = problem.limit - sum(buffer.space for buffer in self.weight_buffers)
        limit -= Plan.ALIGNMENT * (1 + sum(view is None for view in self.x_views))
        row = row_length(geometry.pixels)
        gathered = sum(x.shape[1] for x, view in zip(problem.xs, self.x_views) if view is None)
        gathered *= row * ITEMSIZE[problem.x_dtype]
        channel = geometry.taps * self.planes * row * ITEMSIZE[self.columns_dtype]
        fitting = limit // (gathered + geometry.in_channels * channel)
        if fitting >= 1 and geometry.in_channels * geometry.taps <= MAX_DIMENSION:
            most = min(fitting, geometry.batch, MAX_BATCH)
            return even_part(geometry.batch, most), geometry.in_channels
        channels = min((limit - gathered) // channel, MAX_DIMENSION // geometry.taps)
        if channels < 1:
            least = problem.limit - limit + gathered + channel
            raise NotApplicable(
                f"the smallest chunk of columns needs {least:,} bytes of workspace, the limit is {problem.limit:,}"
            )
        if channels >= geometry.group_channels:
            channels -= channels % geometry.group_channels
        return 1, channels

    def _channel_ranges(self) -> list[range]:
        """The channels of each chunk: whole groups, or part of one."""
        geometry = self.geometry
        whole = geometry.in_channels if self.channels >= geometry.group_channels else geometry.group_channels
        return [
            range(first + begin, first + min(begin + self.channels, whole))
            for first in range(0, geometry.in_channels, whole)
            for begin in range(0, whole, self.channels)
        ]

    def _workspace(self) -> tuple[Buffer, ...]:
        geometry, row = self.geometry, row_length(self.geometry.pixels)
        buffers = [*self.weight_buffers]
        for x, view in zip(self.problem.xs, self.x_views):
            if view is None:
                buffers.append(Buffer(f"gathered {x.name}", self.samples * x.shape[1] * row * x.itemsize))
        rows = self.planes * self.channels * geometry.taps
        return (*buffers, Buffer("columns", self.samples * rows * row * ITEMSIZE[self.columns_dtype]))

    # Steps.

    def _steps(self, first_sample: int, samples: int, channels: range, xs: list[MatrixView]) -> list[Step]:
        """Columns of a chunk, and their sums in every result that has some of its channels."""
        geometry, problem = self.geometry, self.problem
        rows, ld = len(channels) * geometry.taps, row_length(geometry.pixels)
        stride_n = self.planes * rows * ld
        joined = [x.joined(x_rows, geometry.pixels * self.components, samples) for x, x_rows in self._counted(xs)]
        whole = samples > 1 and all(joined) and samples * geometry.pixels * self.components <= MAX_DIMENSION // 2
        if whole:  # all samples as one long row
            stride_n, ld = geometry.pixels, row_length(samples * geometry.pixels)
        item = ITEMSIZE[self.columns_dtype]
        columns = Operand(
            "columns", self.columns_dtype, (samples, rows, 1, 1, geometry.pixels), (stride_n, ld, 0, 0, 1)
        )
        view = self.as_multiplied(MatrixView(Address("columns"), item, ld, stride_n, False))
        factors = [x for x in joined if x is not None] if whole else xs
        pixels = geometry.pixels * self.components * (samples if whole else 1)
        steps = self._gemms(view, factors, channels, 1 if whole else samples, pixels)
        for out, first in zip(problem.outs, geometry.channel_offsets):
            begin, end = max(first, channels.start), min(first + out.shape[1], channels.stop)
            if begin >= end:
                continue
            part = replace(
                out, shape=(samples, end - begin, *out.shape[2:]),
                offset=out.offset + (first_sample * out.stride_n + (begin - first) * out.stride_c) * out.itemsize,
            )  # fmt: skip
            of_part = replace(columns, offset=(begin - channels.start) * geometry.taps * ld * item)
            bias = problem.bias and replace(problem.bias, offset=problem.bias.offset + begin * problem.bias.itemsize)
            steps.append(
                col2im_launch(
                    geometry, of_part, part, imaginary=rows * ld if self.planes == 2 else 0,
                    conjugated=problem.conjugate and self.planes == 2, bias=bias, activation=problem.activation,
                )
            )  # fmt: skip
        return steps

    def _gemms(
        self, columns: MatrixView, xs: list[MatrixView], channels: range, samples: int, pixels: int
    ) -> list[Step]:
        """The calls whose sums are the columns: one for each plane, group and input; over groups where there is one sample."""
        geometry = self.geometry
        first_group, last_group = (c // geometry.group_channels for c in (channels.start, channels.stop - 1))
        groups = last_group - first_group + 1
        over_groups = samples == 1 and groups > 1 and len(xs) == 1
        calls: list[Step] = []
        for plane in range(self.planes):
            for group in range(first_group, last_group + 1, min(groups, MAX_BATCH) if over_groups else 1):
                begin = max(channels.start, group * geometry.group_channels)
                end = min(channels.stop, (group + 1) * geometry.group_channels)
                row = (plane * len(channels) + begin - channels.start) * geometry.taps
                column = (begin - group * geometry.group_channels) * geometry.taps
                count = (end - begin) * geometry.taps
                beta = 0
                for x, first, outputs, offset in self._segments(group, xs):
                    start = self.weight.start(
                        plane * geometry.out_channels + group * geometry.group_outputs + first, column
                    )
                    batch, strides = samples, (0, x.stride, columns.stride)
                    if over_groups:
                        batch = min(last_group + 1 - group, MAX_BATCH)
                        rows = geometry.group_outputs
                        strides = (rows * self.weight.row_step, rows * x.row_step, count * columns.row_step)
                    calls.append(
                        GemmCall(
                            count, pixels, outputs,
                            Matrix(start, self.weight.ld, strides[0], not self.weight.transposed, self.conjugates),
                            Matrix(x.start(offset), x.ld, strides[1], x.transposed),
                            Matrix(columns.start(row), columns.ld, strides[2]),
                            batch, self.dtype, self._c_dtype, self.compute, beta, "columns",
                        )
                    )  # fmt: skip
                    beta = 1
        return calls

    def _segments(self, group: int, xs: list[MatrixView]) -> list[tuple[MatrixView, int, int, int]]:
        """Per input that a group reads: (matrix, first output of the group there, how many, first row of the matrix)."""
        per_group = self.geometry.group_outputs
        begin, end = group * per_group, (group + 1) * per_group
        segments, offset = [], 0
        for x, rows in self._counted(xs):
            low, high = max(begin, offset), min(end, offset + rows)
            if low < high:
                segments.append((x, low - begin, high - low, low - offset))
            offset += rows
        return segments

    def _counted(self, xs: list[MatrixView]) -> list[tuple[MatrixView, int]]:
        """Matrices of the inputs, each with its number of rows."""
        return [(view, x.shape[1]) for view, x in zip(xs, self.problem.xs)]

    @property
    def _c_dtype(self) -> str:
        return real_part(self.columns_dtype) if self.components == 2 else self.columns_dtype
