"""Choose the method of a transposed convolution on a GPU: draft every method, and let the cost model pick one.

"direct" is one of three kernels: the general one, in which every element gathers the products that reach it; one for
depthwise convolutions of stride 2; or one for ordinary convolutions, if the whole result is one (``polyphase.py``).
"implicit_gemm" computes ordinary convolutions, one per phase of the result, several in one grid.  "gemm" stores the
products with the weight as columns, which every element then gathers.  With a 1x1 kernel, the products are the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.conv import access_notes, draft_conv, plan_chosen
from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.depthwise_transposed import depthwise_launches
from cupyconv.cuda.plan.direct import TILE
from cupyconv.cuda.plan.draft import Draft, cheapest, in_rounds, in_sequence, within
from cupyconv.cuda.plan.epilogue import activation_launch
from cupyconv.cuda.plan.gemm import ProductsPlanner
from cupyconv.cuda.plan.im2col import COL2IM_CHANNELS, Chunk, col2im_launch
from cupyconv.cuda.plan.implicit_gemm import draft_phases
from cupyconv.cuda.plan.launches import (
    adjoint_params,
    bytes_of,
    epilogue_params,
    grid_and_block,
    groups_params,
    image,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.matrices import (
    MAX_BATCH,
    MAX_DIMENSION,
    MatrixView,
    as_multiplied,
    chunk_count,
    chunk_steps,
    gathered_buffers,
    image_factors,
    place,
    refuse_chunk,
    row_length,
    segments,
)
from cupyconv.cuda.plan.packed_weight import Phase, Phases
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, product_flops, real_part
from cupyconv.problem.geometry import even_part, pixel_windows
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_PHASES, MAX_SOURCES, Address, Buffer, GemmCall, KernelLaunch, Plan, Step, counted
from cupyconv.problem.polyphase import (
    AxisPhase,
    exchanged_shape,
    exchanged_view,
    is_reached,
    phase_problems,
    phases_of,
    results_apart,
)
from cupyconv.problem.problems import ConvProblem, NotApplicable, TransposedProblem, inputs_with_channels
from cupyconv.problem.transforms import does_not_fit

#: The workspace buffer for the gradient of a padded image.
PADDED = "padded"


def plan_transposed(problem: TransposedProblem) -> Plan:
    """Plan a transposed convolution by ``problem.method``; raise ValueError if the method asked for does not apply."""
    if problem.pre is not None:
        return _with_activation(problem, problem.pre)
    kept, geometry = inputs_with_channels(problem.geometry)
    xs = tuple(x for x in problem.xs if x.shape[1]) or problem.xs[:1]
    problem = replace(problem, geometry=geometry, xs=xs, outs=tuple(problem.outs[i] for i in kept))
    problem, conversions = converted(problem, xs=problem.x_dtype, weight=problem.weight_dtype, bias=problem.dtype)
    return plan_chosen(problem, _draft, conversions, access_notes((*problem.xs, *problem.outs)))


def _with_activation(problem: TransposedProblem, pre: Operand) -> Plan:
    """Return the plan that computes the pre-activation `pre`, followed by a pass that computes the result from it."""
    plan = plan_transposed(replace(problem, outs=(pre,), pre=None, activation=IDENTITY))
    if not plan.steps:
        return plan
    launch = activation_launch(pre, problem.outs[0], problem.activation)
    return replace(
        plan,
        steps=(*plan.steps, launch),
        bytes_moved=plan.bytes_moved + launch.bytes_moved,
        minimal_bytes=plan.minimal_bytes + problem.outs[0].nbytes,
    )


def _draft(method: str, problem: TransposedProblem) -> Draft:
    if not any(out.nbytes for out in problem.outs):
        return Draft(method, (), reason="the results are empty")
    if method == "direct":
        return _draft_direct(problem)
    if method == "fft" and problem.geometry.padding_mode != "constant":
        return _draft_folded(problem)
    if method == "implicit_gemm":
        return _by_convolutions(method, problem, _draft_implicit_gemm)
    return _draft_gemm(problem) if method == "gemm" else _by_convolutions(method, problem)


def _draft_direct(problem: TransposedProblem) -> Draft:
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; the kernel supports at most {MAX_SOURCES}")
    drafts = []  # if each costs just one launch, the first one wins
    if launches := depthwise_launches(problem):
        drafts.append(Draft("direct", tuple(launches), reason="depthwise kernel"))
    if prod(map(min, problem.geometry.stride, problem.geometry.size)) == 1:
        with suppress(NotApplicable):
            drafts.append(_by_convolutions("direct", problem))
    launches = [_launch(problem, out, first) for out, first in zip(problem.outs, problem.geometry.channel_offsets)]
    return cheapest([*drafts, Draft("direct", tuple(launches), reason="general kernel")], problem.gpu)


def _launch(problem: TransposedProblem, out: Operand, first: int) -> KernelLaunch:
    """Return the launch of the general kernel for one result, whose first channel is `first`."""
    geometry, xs, weight = problem.geometry, problem.xs, problem.weight
    channels = out.shape[1]
    groups = (first + channels - 1) // geometry.group_channels - first // geometry.group_channels + 1
    dtypes = {"X_DTYPE": problem.x_dtype, "W_DTYPE": problem.weight_dtype, "Y_DTYPE": out.dtype}
    tiles = groups * -(-geometry.group_channels // TILE)
    products = geometry.products * channels // geometry.in_channels
    flops = products * product_flops(problem.x_dtype, problem.weight_dtype)
    launch = KernelLaunch(
        variant("transposed", **dtypes, TILE=TILE, FOLDS=int(geometry.padding_mode != "constant")),
        *grid_and_block(geometry.batch, prod(geometry.size), 1, tiles, 128),
        (
            ("sources", sources_params(xs)),
            ("windows", windows_params(geometry)),
            ("adjoint", adjoint_params(geometry)),
            ("weight", image(weight)),
            ("out", image(out)),
            ("epilogue", epilogue_params(problem.bias, None, problem.activation)),
            ("batch", geometry.batch),
            *groups_params(geometry),
            ("first", first),
            ("channels", channels),
            ("conjugated", int(problem.conjugate)),
        ),
        purpose="transposed convolution, bias, activation",
        bytes_moved=bytes_of(xs) + weight.nbytes + out.nbytes,
        flops=flops,
    )
    rate = cost.core_rate(out.dtype, problem.gpu) * cost.GENERAL
    places = geometry.batch * prod(geometry.size) * tiles * len(xs)
    return cost.priced(launch, rate, problem.gpu, beside=places * cost.READERS_PLACE)


def _draft_gemm(problem: TransposedProblem) -> Draft:
    geometry = problem.geometry
    if geometry.out_channels == 0:
        raise NotApplicable("there are no input channels to sum over")
    if geometry.is_pointwise and geometry.groups == 1 and not problem.conjugate:
        return _by_convolutions("gemm", problem)
    return _GemmPlanner(problem).draft()


def _as_convolutions(method: str, problem: TransposedProblem, weight: Operand) -> Draft:
    """Draft ordinary convolutions of x with the exchanged `weight`, each of which computes a part of a result."""
    drafts = [draft_conv(method, part) for part in _convolutions(problem, weight)]
    kinds = ", ".join(dict.fromkeys(draft.reason for draft in drafts))
    return in_sequence(method, drafts, f"{counted(len(drafts), 'convolution')} with x: {kinds}")


def _convolutions(problem: TransposedProblem, weight: Operand) -> list[ConvProblem]:
    """Return one convolution per phase of each result; it conjugates the exchanged weight if the problem does."""
    return [replace(part, conjugate=problem.conjugate) for part in phase_problems(problem, weight)]


def _by_convolutions(
    method: str,
    problem: TransposedProblem,
    draft_of: Callable[[str, TransposedProblem, Operand], Draft] = _as_convolutions,
) -> Draft:
    """Draft by `draft_of`, with outputs and channels of the weight exchanged: by a view, or by a copy in workspace.

    An implicit GEMM conjugates the weight when it packs it; for other methods the copy is conjugated.
    If a grouped convolution has several results, each is computed separately, from its own groups.
    """
    parts = results_apart(problem)
    if len(parts) > 1:

        def of_all(room: int) -> Draft:
            drafts = [_by_convolutions(method, replace(part, workspace_limit=room), draft_of) for part in parts]
            return in_sequence(method, drafts, f"results in {len(parts)} parts: {drafts[0].reason}")

        return within(problem.limit, of_all)
    (problem,) = parts

    def of_weight(problem: TransposedProblem, weight: Operand) -> Draft:
        return within(problem.limit, lambda room: draft_of(method, replace(problem, workspace_limit=room), weight))

    if view := exchanged_view(replace(problem, conjugate=False) if method == "implicit_gemm" else problem):
        return of_weight(problem, view)
    launch, buffer, weight = _exchange(problem)
    room = problem.limit - buffer.space
    if room < 0:
        raise NotApplicable(
            f"the weight with outputs and channels exchanged needs {buffer.nbytes:,} bytes of workspace,"
            f" the limit is {problem.limit:,}"
        )
    draft = of_weight(replace(problem, workspace_limit=room, conjugate=False), weight)
    return replace(draft, steps=(launch, *draft.steps), workspace=(*draft.workspace, buffer))


def _exchange(problem: TransposedProblem) -> tuple[KernelLaunch, Buffer, Operand]:
    """Return the launch that exchanges outputs and channels of each group of the weight, its buffer, and the copy."""
    weight, geometry = problem.weight, problem.geometry
    shape = exchanged_shape(geometry)
    exchanged = Operand("exchanged weight", weight.dtype, shape, c_strides(shape))
    elements = prod(shape)
    launch = KernelLaunch(
        variant("exchange_weight", DTYPE=weight.dtype if problem.conjugate else f"bits{8 * weight.itemsize}"),
        *grid_and_block(1, elements, 1, 1, 256),
        (
            ("weight", image(weight)),
            ("exchanged", Address(exchanged.name)),
            ("elements", elements),
            ("kernel", geometry.kernel),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
        ),
        purpose="weight with outputs and channels exchanged" + ", conjugated" * problem.conjugate,
        bytes_moved=2 * weight.nbytes,
    )
    return launch, Buffer(exchanged.name, elements * weight.itemsize), exchanged


def _draft_implicit_gemm(method: str, problem: TransposedProblem, weight: Operand) -> Draft:
    """Draft the phases of each result in as few grids as possible."""
    parts, phases = _convolutions(problem, weight), phases_of(problem.geometry)
    if len(phases) == 1 or not any(map(is_reached, phases)):
        return _as_convolutions(method, problem, weight)
    drafts = []
    for i in range(0, len(parts), len(phases)):
        of_result = list(zip(phases, parts[i : i + len(phases)]))
        for first in range(0, len(phases), MAX_PHASES):
            drafts.append(_side_by_side(problem, problem.outs[i // len(phases)], of_result[first : first + MAX_PHASES]))
    kinds = ", ".join(dict.fromkeys(draft.reason for draft in drafts))
    return in_sequence(
        "implicit_gemm", drafts, f"{len(parts)} convolutions with x in {counted(len(drafts), 'grid')}: {kinds}"
    )


def _side_by_side(
    problem: TransposedProblem, out: Operand, parts: list[tuple[tuple[AxisPhase, ...], ConvProblem]]
) -> Draft:
    """Draft several phases of a result in one grid; x is not cut, and windows may begin inside it."""
    reached = [part for phase, part in parts if is_reached(phase)]
    if not reached:
        return in_sequence("implicit_gemm", [draft_conv("implicit_gemm", part) for _, part in parts], "zeros")
    phases = [
        Phase(
            weight=(part if is_reached(phase) else reached[0]).weight,
            out_size=part.out.shape[2:],  # type: ignore[arg-type]
            kernel=tuple(len(axis.taps) for axis in phase),  # type: ignore[arg-type]
            before=tuple(axis.before for axis in phase),  # type: ignore[arg-type]
            first=tuple(axis.first for axis in phase),  # type: ignore[arg-type]
        )
        for phase, part in parts
    ]
    along = list(zip(*(phase for phase, _ in parts)))  # the phases along each axis
    geometry = replace(
        reached[0].geometry,
        size=problem.xs[0].shape[2:],  # type: ignore[arg-type]
        kernel=tuple(max(len(phase.taps) for phase in axis) for axis in along),  # type: ignore[arg-type]
        before=tuple(max(abs(phase.before) for phase in axis) for axis in along),
        after=tuple(max(abs(phase.after) for phase in axis) for axis in along),
    )
    whole = replace(reached[0], geometry=geometry, xs=problem.xs, out=out, pre=problem.pre)
    return draft_phases(whole, Phases(tuple(phases), problem.geometry.stride))


def _draft_folded(problem: TransposedProblem) -> Draft:
    """Draft method "fft" for a padding mode that repeats elements.

    Such a problem is a gradient, without bias and activation.  Convolutions compute the gradient of the padded image in
    workspace, for some samples at a time.  Then each of its elements is added to the element that it is a copy of.
    """
    geometry = problem.geometry
    if refusal := problem.fft_refusal:
        raise NotApplicable(refusal)
    if accumulator(problem.dtype) != problem.dtype:
        raise NotApplicable(f"sums of {problem.dtype} would be rounded twice")
    depth, height, width = (n + b + a for n, b, a in zip(geometry.size, geometry.before, geometry.after))
    padded_size, pixels = (depth, height, width), depth * height * width
    shape = (geometry.in_channels, *padded_size)
    sample = prod(shape) * ITEMSIZE[problem.dtype]
    most = (problem.limit // 2 - Plan.ALIGNMENT) // sample
    if most < 1:
        raise does_not_fit(problem.limit)
    samples = even_part(geometry.batch, most)
    room = problem.limit - Buffer(PADDED, samples * sample).space

    def draft_of(first: int, count: int) -> Draft:
        padded = Operand(PADDED, problem.dtype, (count, *shape), c_strides((count, *shape)))
        whole = replace(
            geometry, batch=count, channels=shape[:1], size=padded_size, before=(0, 0, 0), after=(0, 0, 0),
            padding_mode="constant",
        )  # fmt: skip
        xs = tuple(x.samples(first, count) for x in problem.xs)
        alone = replace(problem, geometry=whole, xs=xs, outs=(padded,), workspace_limit=room)
        draft = _by_convolutions("fft", alone)
        folds = []
        for out, begin in zip(problem.outs, geometry.channel_offsets):
            windows = replace(
                pixel_windows(count, out.shape[1], geometry.size), before=geometry.before, after=geometry.after,
                padding_mode=geometry.padding_mode,
            )  # fmt: skip
            columns = padded.view((count, out.shape[1], 1, 1, pixels), (*padded.strides[:2], 0, 0, 1), begin * pixels)
            part = out.samples(first, count)
            folds.append(_priced(col2im_launch(windows, columns, part), part, problem.gpu))
        return replace(draft, steps=(*draft.steps, *folds))

    largest = draft_of(0, samples)
    whole, rest = divmod(geometry.batch, samples)
    steps = in_rounds(whole, lambda chunk: draft_of(chunk * samples, samples).steps)
    if rest:
        steps += draft_of(whole * samples, rest).steps
    return replace(
        largest,
        steps=tuple(steps),
        workspace=(*largest.workspace, Buffer(PADDED, samples * sample)),
        reason=f"gradient of the padded image, folded; {largest.reason}",
    )


def _priced(launch: KernelLaunch, out: Operand, gpu: GpuModel) -> KernelLaunch:
    """Return a launch of col2im.cu with the time to find the windows of each element and to read what it adds."""
    places = out.shape[0] * -(-out.shape[1] // COL2IM_CHANNELS) * out.pixels
    return cost.priced(launch, gpu.fp32 / (2 * cost.COL2IM_READ), gpu, beside=places * cost.READERS_PLACE)


class _GemmPlanner(ProductsPlanner):
    """Compute the columns of some samples and channels at a time; the elements of the results gather them.

    ::

        weight'                       x of sample n                columns of sample n
        [ C taps x O ]           x    [ O x pixels ]         =     [ C taps x pixels ]    --col2im-->   results
          batch stride 0              in place, one accumulating
                                      GEMM per input

    Sums of 16-bit products stay in float32 until the last addition.
    """

    def __init__(self, problem: TransposedProblem) -> None:
        super().__init__(problem, conjugates=problem.conjugate)
        self.problem, geometry = problem, self.geometry
        self.columns_dtype = accumulator(problem.dtype)
        if self.planes == 2:
            self.columns_dtype = real_part(self.columns_dtype)
        #: Whether the GEMM conjugates the weight; if the weight is in planes, the sums are conjugated afterwards.
        self.conjugates = problem.conjugate and self.planes == 1
        self.factors = image_factors(problem.xs, self.image_views(problem.xs))
        #: Elements from one row of a sample's columns to the next.
        self.row = row_length(geometry.pixels)
        sizes = (geometry.out_channels, geometry.group_channels * geometry.taps, self.row * self.components)
        if max(sizes) > MAX_DIMENSION:
            raise NotApplicable("channels times taps, or pixels, exceed cuBLAS's 32-bit dimensions")
        self.samples, self.channels = self._chunk_size()

    def draft(self) -> Draft:
        geometry = self.geometry
        whole = geometry.in_channels if self.channels >= geometry.group_channels else geometry.group_channels
        pieces = -(-whole // self.channels)

        def steps_of(chunk: Chunk) -> list[Step]:
            views, launches = place(self.factors, chunk, self.components)

            def channels(first: int, piece: int) -> range:
                begin = piece * self.channels
                return range(first * whole + begin, first * whole + min(begin + self.channels, whole))

            def of_whole(first: int) -> list[Step]:
                steps = in_rounds(pieces - 1, lambda piece: self._steps(chunk, channels(first, piece), views))
                return [*steps, *self._steps(chunk, channels(first, pieces - 1), views)]

            return [*launches, *in_rounds(geometry.in_channels // whole, of_whole)]

        steps = [*self.weight_steps, *chunk_steps(geometry, self.samples, geometry.pixels, steps_of)]
        count = chunk_count(geometry, self.samples, geometry.pixels) * pieces * (geometry.in_channels // whole)
        cut = (
            f", {count:,} chunks of {counted(self.samples, 'sample')} x {counted(self.channels, 'channel')}"
            if count > 1
            else ""
        )
        return Draft("gemm", tuple(steps), self._workspace(), f"one batched GEMM over samples, then a gather{cut}")

    # Workspace.

    def _chunk_size(self) -> tuple[int, int]:
        """Return the samples and channels per chunk: all, else fewer samples, else fewer channels of one sample."""
        geometry, problem = self.geometry, self.problem
        limit = problem.limit - sum(buffer.space for buffer in self.weight_buffers)
        limit -= Plan.ALIGNMENT * (1 + sum(factor.view is None for factor in self.factors))
        gathered = sum(factor.bytes_per_pixel for factor in self.factors) * self.row
        channel = geometry.taps * self.planes * self.row * ITEMSIZE[self.columns_dtype]
        fitting = limit // (gathered + geometry.in_channels * channel)
        if fitting >= 1 and geometry.in_channels * geometry.taps <= MAX_DIMENSION:
            most = min(fitting, geometry.batch, MAX_BATCH)
            return even_part(geometry.batch, most), geometry.in_channels
        channels = min((limit - gathered) // channel, MAX_DIMENSION // geometry.taps)
        if channels < 1:
            refuse_chunk(problem, problem.limit - limit + gathered + channel)
        if channels >= geometry.group_channels:
            channels -= channels % geometry.group_channels
        return 1, channels

    def _workspace(self) -> tuple[Buffer, ...]:
        area, rows = self.samples * self.row, self.planes * self.channels * self.geometry.taps
        gathered = gathered_buffers(self.factors, area)
        return (*self.weight_buffers, *gathered, Buffer("columns", area * rows * ITEMSIZE[self.columns_dtype]))

    # Steps.

    def _steps(self, chunk: Chunk, channels: range, xs: list[MatrixView]) -> list[Step]:
        """Return the steps that compute the columns of a chunk and sum them into every result with these channels."""
        geometry, samples = self.geometry, chunk.samples
        rows, ld, pixels = len(channels) * geometry.taps, self.row, geometry.pixels * self.components
        stride_n = self.planes * rows * ld
        joined = [x.joined(factor.count, pixels, samples) for x, factor in zip(xs, self.factors)]
        batch = samples
        if samples > 1 and all(joined) and samples * pixels <= MAX_DIMENSION // 2:  # all samples as one long row
            stride_n, ld = geometry.pixels, row_length(samples * geometry.pixels)
            xs, batch, pixels = [x for x in joined if x is not None], 1, samples * pixels
        strides = (stride_n, ld, 0, 0, 1)
        columns = Operand("columns", self.columns_dtype, (samples, rows, 1, 1, geometry.pixels), strides)
        view = MatrixView(Address("columns"), columns.itemsize, ld, stride_n, False)
        steps = self._gemms(as_multiplied(view, self.components), xs, channels, batch, pixels)
        for out, first in zip(self.problem.outs, geometry.channel_offsets):
            begin, end = max(first, channels.start), min(first + out.shape[1], channels.stop)
            if begin < end:
                elements = chunk.first_sample * out.stride_n + (begin - first) * out.stride_c
                shape = (samples, end - begin, *out.shape[2:])
                part = replace(out, shape=shape, offset=out.offset + elements * out.itemsize)
                offset = (begin - channels.start) * geometry.taps * ld * columns.itemsize
                steps.append(self._gather(replace(columns, offset=offset), part, begin, rows * ld))
        return steps

    def _gather(self, columns: Operand, out: Operand, first: int, plane: int) -> KernelLaunch:
        """Return the launch that sums columns into `out`, from channel `first`; imaginary columns follow at `plane`."""
        problem = self.problem
        bias = problem.bias and replace(problem.bias, offset=problem.bias.offset + first * problem.bias.itemsize)
        launch = col2im_launch(
            self.geometry,
            columns,
            out,
            imaginary=plane if self.planes == 2 else 0,
            conjugated=problem.conjugate and self.planes == 2,
            bias=bias,
            activation=problem.activation,
        )
        return _priced(launch, out, problem.gpu)

    def _gemms(
        self, columns: MatrixView, xs: list[MatrixView], channels: range, samples: int, pixels: int
    ) -> list[Step]:
        """Return the calls that compute the columns: per plane and input, and per group unless batched over groups."""
        geometry, weight = self.geometry, self.weight
        first_group, last_group = (c // geometry.group_channels for c in (channels.start, channels.stop - 1))
        groups, outputs = last_group - first_group + 1, geometry.group_outputs
        over_groups = samples == 1 and groups > 1 and len(xs) == 1
        step = min(groups, MAX_BATCH) if over_groups else 1

        def calls_of(plane: int, group: int) -> Iterator[Step]:
            begin = max(channels.start, group * geometry.group_channels)
            end = min(channels.stop, (group + 1) * geometry.group_channels)
            row = (plane * len(channels) + begin - channels.start) * geometry.taps
            column = (begin - group * geometry.group_channels) * geometry.taps
            count = (end - begin) * geometry.taps
            beta = 0
            for i, x_row, output, rows in segments(self.factors, group * outputs, (group + 1) * outputs):
                x, weight_row = xs[i], plane * geometry.out_channels + group * outputs + output
                batch, strides = samples, (0, x.stride, columns.stride)
                if over_groups:
                    batch = min(last_group + 1 - group, MAX_BATCH)
                    strides = (outputs * weight.row_step, outputs * x.row_step, count * columns.row_step)
                a = weight.matrix(strides[0], weight_row, column, turned=True, conjugated=self.conjugates)
                b, c = x.matrix(strides[1], x_row), columns.matrix(strides[2], row)
                dtypes = (self.dtype, self.c_dtype(self.columns_dtype), self.compute)
                yield GemmCall(count, pixels, rows, a, b, c, batch, *dtypes, beta, "columns")
                beta = 1

        calls: list[Step] = []
        for plane in range(self.planes):
            calls += in_rounds(-(-groups // step), lambda i: tuple(calls_of(plane, first_group + i * step)))  # noqa: B023
        return calls
