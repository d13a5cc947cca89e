"""Transposed convolution on NumPy: products of the weight, added where the kernel reaches.

::

    columns [g, C_g taps, pixels]   =   W' [g, C_g taps, O_g]   x   x [g, O_g, pixels]
    results [g, C_g, elements]     +=   a slice of columns for every tap

A block is some samples and some channels of the results, so that blocks share nothing.  Within one, run
after run of x's pixels is multiplied, and added while its columns are in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from cupyconv.numpy.convolution_plan import (
    BALANCE,
    LONE_PIXELS,
    MEMORY_BLOCK,
    NO_IMPLICIT_GEMM,
    PRODUCT_BLOCK,
    SMALLEST_BLOCK,
    block_of_pixels,
    choose,
    is_matrix,
    plan_conv,
)
from cupyconv.numpy.loops import BlockLoop, GatheredLoop, TransposedLoop
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.polyphase import class_problem, is_reached, residue_classes
from cupyconv.problem.problems import HostModel, NotApplicable, TransposedProblem, inputs_with_channels

#: Channels of a block below which pixels are cut rather: fewer would make rows of a product too few.
FEW_CHANNELS = 32

#: Convolutions that a result may fall apart into to be gathered: stride 2 along three axes.
MOST_PARTS = 8

#: Pixels of a row up to which adding row by row is slow, and how much longer rows may make the product instead.
SHORT_ROW, MOST_AREA = 256, 1.25


def plan_transposed(problem: TransposedProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    kept, geometry = inputs_with_channels(problem.geometry)
    problem = replace(problem, geometry=geometry, outs=tuple(problem.outs[i] for i in kept))
    try:
        return _gathered(problem)
    except ValueError:  # of parts a reason; the method's own follows
        preferred, other = ("direct", "gemm") if geometry.is_depthwise else ("gemm", "direct")
        return choose(problem, {"gemm": _gemm, "direct": _direct}, preferred, other)


def _gathered(problem: TransposedProblem) -> Plan:
    """The plan of convolutions that the results are, where writing their columns takes less than adding products."""
    geometry = problem.geometry
    classes = residue_classes(geometry)
    if geometry.padding_mode != "constant" or not _reads_less(geometry, len(classes)):
        raise NotApplicable("products are added where the kernel reaches")
    if geometry.groups > 1 and len(problem.outs) > 1:
        raise NotApplicable("several results of a grouped convolution")
    weight = prod(problem.weight.shape) * problem.weight.itemsize
    plans, steps = [], []
    for (out, first), one in product(zip(problem.outs, geometry.channel_offsets), classes):
        taps = [axis.taps for axis in one] if is_reached(one) else [range(0)] * 3
        shape = (out.shape[1], geometry.group_outputs, *map(len, taps))
        own = replace(problem.weight, shape=shape, strides=c_strides(shape))
        part = class_problem(replace(problem, workspace_limit=problem.limit_with(weight) - weight), one, out, own)
        plan = plan_conv(replace(part, method=problem.method if is_reached(one) else "auto"))
        plans.append(plan)
        for loop in plan.steps:
            assert isinstance(loop, BlockLoop)
            parts = {field.name: getattr(loop, field.name) for field in fields(BlockLoop)}
            parts |= dict(output=out.name, first_channel=first, conjugate=problem.conjugate, taps=tuple(taps))
            read = tuple(
                (max(0, -axis.before), extent - max(0, -axis.after)) if is_reached(one) else (0, extent)
                for axis, extent in zip(one, geometry.out_size)
            )
            written = tuple((axis.first, step) for axis, step in zip(one, geometry.stride))
            steps.append(GatheredLoop(**parts, read=read, written=written))
    largest = max(plans, key=lambda plan: plan.flops)
    sizes = {"weight": weight, "blocks": max(plan.workspace_bytes for plan in plans)}
    return replace(
        largest, problem=problem.title, result=problem.result, steps=tuple(steps), flops=problem.flops,
        bytes_moved=problem.minimal_bytes, minimal_bytes=problem.minimal_bytes, notes=problem.notes,
        reason=f"gathered{f' in {len(plans)} parts' if len(plans) > 1 else ''}, {largest.reason}",
        workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items()) if steps else (),
    )  # fmt: skip


def _reads_less(geometry: ConvGeometry, parts: int) -> bool:
    """Whether the convolutions' columns take less than sums: in groups, and of no more channels than the results have."""
    if geometry.groups > 1:
        return parts <= MOST_PARTS
    return parts == 1 and geometry.taps > 1 and 0 < geometry.out_channels <= min(geometry.channels, default=0)


def _gemm(problem: TransposedProblem) -> Plan:
    geometry = problem.geometry
    why = "method='gemm' was asked for" if problem.method == "gemm" else "slower: a product for every tap"
    if _products_are_results(problem):
        words = "products written where the results lie"
        return _plan(problem, "gemm", _Body("view", 0), words, ("direct", why))
    return _plan(problem, "gemm", _Body("columns", geometry.taps), "products and columns", ("direct", why))


def _direct(problem: TransposedProblem) -> Plan:
    scaled = problem.geometry.is_depthwise and not _one_is_complex(problem)
    if problem.method == "direct":
        why = "method='direct' was asked for"
    elif problem.geometry.is_depthwise:
        why = "slower: with one channel a group, each product is a vector by a matrix"
    else:
        why = "columns do not fit the workspace limit"
    body = _Body("scaled taps", 2, MEMORY_BLOCK) if scaled else _Body("taps", 1)
    return _plan(problem, "direct", body, "tap by tap, no columns", ("gemm", why))


@dataclass(frozen=True)
class _Body:
    """A loop body, how many columns it keeps for a channel and a pixel, and how many bytes it aims at."""

    name: str
    columns: int
    target: int = PRODUCT_BLOCK

    def workspace(self, problem: TransposedProblem, part: _Part) -> int:
        """Bytes for one block: columns, its part of x, sums, and what borders and activations take."""
        geometry = problem.geometry
        area, channels = part.samples * part.area(problem), part.channels
        item, x_item = ITEMSIZE[accumulator(problem.dtype)], ITEMSIZE[accumulator(problem.x_dtype)]
        nbytes = self.columns * channels * area * item
        if is_complex(problem.weight_dtype) and not is_complex(problem.x_dtype):
            nbytes += nbytes // 2  # products with the parts of the weight
        if self.columns and not (_x_is_factor(problem) and part.samples == 1 and not part.flat):
            groups = max(1, channels // max(1, geometry.group_channels))
            nbytes += groups * geometry.group_outputs * area * x_item
        if geometry.padding_mode != "constant":
            nbytes += channels * area * item
        image = channels * part.samples * item
        nbytes += image * prod(geometry.reached) if part.flat else image * prod(geometry.size) * (not part.in_place)
        return nbytes + image * prod(geometry.size) * bool(problem.activation)


@dataclass(frozen=True)
class _Part:
    """What a block does at a time."""

    samples: int
    channels: int
    run: Triple
    in_place: bool
    flat: bool = False

    def area(self, problem: TransposedProblem) -> int:
        """Pixels of a run of one sample, and the zeros between."""
        if not self.flat:
            return prod(self.run)
        _, rows, columns = problem.geometry.reached
        depth, height, width = self.run
        return depth * (rows if depth > 1 else height) * (columns if depth * height > 1 else width)


def _plan(problem: TransposedProblem, method: str, body: _Body, words: str, rejected: tuple[str, str]) -> Plan:
    geometry, machine = problem.geometry, problem.machine
    assert isinstance(machine, HostModel)
    empty = geometry.batch == 0 or geometry.in_channels == 0 or 0 in geometry.size
    part = _part(problem, body)
    loop = TransposedLoop(
        body=body.name, inputs=tuple(x.name for x in problem.xs), outputs=tuple(out.name for out in problem.outs),
        block=(part.samples, *part.run), channels=part.channels, blocks=0, threads=machine.threads, geometry=geometry,
        dtype=accumulator(problem.dtype), x_dtype=accumulator(problem.x_dtype), weight_dtype=accumulator(problem.weight_dtype),
        conjugate=problem.conjugate, flat=part.flat, activation=problem.activation, in_place=part.in_place,
        bytes_moved=problem.minimal_bytes, flops=problem.flops,
    )  # fmt: skip
    blocks = 0 if empty else -(-geometry.batch // part.samples) * len(loop.channel_ranges)
    threads = max(1, min(machine.threads, blocks))
    sizes = {"weight": _weight_copy(problem, body), "blocks": threads * body.workspace(problem, part)}
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=problem.title, result=problem.result,
        steps=() if empty else (replace(loop, blocks=blocks, threads=threads),), flops=problem.flops,
        bytes_moved=problem.minimal_bytes, minimal_bytes=problem.minimal_bytes,
        rejected=(rejected, ("implicit_gemm", NO_IMPLICIT_GEMM)), reason=words, notes=problem.notes,
        bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic",
        workspace=() if empty else tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip


def _part(problem: TransposedProblem, body: _Body) -> _Part:
    """The largest part, of about the bytes that the body aims at, that keeps within the workspace limit."""
    assert isinstance(problem.machine, HostModel)
    weight = _weight_copy(problem, body)
    limit, fixed = problem.limit_with(weight), weight + 2 * Plan.ALIGNMENT
    least = 0
    for part in _parts(problem, body):
        needed = fixed + problem.machine.threads * body.workspace(problem, part)
        if needed <= limit:
            return part
        least = min(least or needed, needed)
    raise NotApplicable(f"the smallest block needs {least:,} bytes of workspace, the limit is {limit:,}")


def _parts(problem: TransposedProblem, body: _Body) -> Iterator[_Part]:
    """Parts to try, the best first: fewer channels, then shorter runs of pixels, at last sums in the results."""
    geometry, machine = problem.geometry, problem.machine
    assert isinstance(machine, HostModel)
    exact = accumulator(problem.dtype) == problem.dtype
    # Sums are added to for every tap: at strides, that takes longer than one copy at the end.
    unit = all(out.strides[4] == 1 or out.shape[4] == 1 for out in problem.outs)
    per_pixel = max(1, body.columns) * ITEMSIZE[accumulator(problem.dtype)]
    few = 1 if body.name == "scaled taps" else FEW_CHANNELS  # these are no products
    ways = [(True, False)] if _is_flat(problem, body) else []
    ways += [(False, in_place) for in_place in dict.fromkeys((exact and unit, exact))]
    for flat, in_place in ways:
        target = body.target
        while target:
            fitting = target // (per_pixel * max(1, geometry.pixels))
            channels = max(fitting, min(few, target // (per_pixel * SMALLEST_BLOCK)), 1)
            samples = fitting // max(1, geometry.in_channels) if geometry.pixels < LONE_PIXELS else 1
            samples = even_part(geometry.batch, min(samples, geometry.batch // machine.threads))
            if -(-geometry.batch // samples) < machine.threads:  # too few samples for all threads
                channels = min(channels, -(-geometry.in_channels // machine.threads))
            channels = _even_channels(problem, channels)
            pixels = target // (per_pixel * max(1, channels))
            run = geometry.out_size
            if pixels < geometry.pixels:
                samples, run = 1, block_of_pixels(geometry, max(1, pixels), 1)[1:]
            yield _Part(samples, channels, run, in_place, flat)
            target //= 2
        yield _Part(1, 1, (1, 1, 1), in_place, flat)


def _is_flat(problem: TransposedProblem, body: _Body) -> bool:
    """Whether a tap should add one run of memory: rows are short, and few zeros have to be multiplied for it."""
    geometry = problem.geometry
    area = _Part(1, 1, geometry.out_size, in_place=False, flat=True).area(problem)
    return (
        body.name in ("columns", "scaled taps")
        and geometry.taps > 1
        and geometry.stride == (1, 1, 1)
        and geometry.padding_mode == "constant"
        and min(geometry.after) >= 0  # else the result has elements that no window reads
        and geometry.out_size[2] <= SHORT_ROW
        and area <= MOST_AREA * geometry.pixels
    )


def _even_channels(problem: TransposedProblem, most: int) -> int:
    """At most that many channels, which cut all of them evenly: whole groups, or part of one."""
    geometry = problem.geometry
    if most < geometry.group_channels:
        return even_part(geometry.group_channels, most)
    return even_part(geometry.groups, most // max(1, geometry.group_channels)) * geometry.group_channels


def _products_are_results(problem: TransposedProblem) -> bool:
    """Whether each result is a product: a 1x1 kernel, and matrices that BLAS takes as they lie."""
    geometry = problem.geometry
    return (
        geometry.is_pointwise
        and geometry.pixels >= LONE_PIXELS
        and (len(problem.outs) == 1 or geometry.groups == 1)
        and problem.dtype == accumulator(problem.dtype)
        and all(out.pixel_stride == 1 and is_matrix(out) for out in problem.outs)
        and _x_is_factor(problem)
        and not _one_is_complex(problem)
    )


def _x_is_factor(problem: TransposedProblem) -> bool:
    """Whether products read x where it lies, sample by sample."""
    (x, *others) = problem.xs
    return not others and x.dtype == accumulator(problem.x_dtype) and is_matrix(x) and not _one_is_complex(problem)


def _one_is_complex(problem: TransposedProblem) -> bool:
    return is_complex(problem.x_dtype) != is_complex(problem.weight_dtype)


def _weight_copy(problem: TransposedProblem, body: _Body) -> int:
    """Bytes of the weight where it must be copied: another dtype, order or sign, or parts taken apart."""
    weight = problem.weight
    copied = (
        weight.dtype != accumulator(problem.weight_dtype)
        or weight != weight.in_c_order(weight.dtype)
        or body.name == "taps"
        or (is_complex(problem.weight_dtype) and (problem.conjugate or not is_complex(problem.x_dtype)))
    )
    item = ITEMSIZE[accumulator(real_part(problem.weight_dtype))] * (1 + is_complex(problem.weight_dtype))
    return copied * prod(weight.shape) * item
