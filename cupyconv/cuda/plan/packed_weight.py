"""The sum of an implicit GEMM in slabs, and the weight as its kernel reads it: in the order of these.

::

    K     | input 0: channels x taps ...     | input 1 ...           |     padded for each input to chunks of channels
          |  slab  |  slab  |  slab  |  ...                             what a block of threads multiplies at a time

The host's side of kernels/reduction.cuh and kernels/pack_weight.cu.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Self

from cupyconv.cuda.plan.launches import INT32, VECTOR_BYTES, address, grid_and_block, groups_params, image, variant
from cupyconv.problem.arrays import ITEMSIZE, Operand
from cupyconv.problem.geometry import ConvGeometry, Triple
from cupyconv.problem.plan import Address, Buffer, KernelLaunch
from cupyconv.problem.problems import ConvProblem

#: Bytes of K in a slab of the sum, as in kernels/warp_tile.cuh.
SLAB_BYTES = 64
#: What becomes of elements as the weight is packed (PackedAs of kernels/pack_weight.cu), in words.
PACKED_AS = ("", ", rounded to TF32", ", in two parts of TF32", ", conjugated")


@dataclass(frozen=True)
class Phase:
    """One of the convolutions of a grid: by a weight of its own, into elements of the result that others lie between.

    They begin at the indices `first`.  Where windows begin inside the image, `before` is negative.
    """

    weight: Operand
    out_size: Triple
    kernel: Triple
    before: Triple
    first: Triple = (0, 0, 0)

    @property
    def pixels(self) -> int:
        return prod(self.out_size)

    @property
    def taps(self) -> int:
        return prod(self.kernel)


@dataclass(frozen=True)
class Phases:
    """The convolutions of a grid, whose elements of the result are `apart` along each axis."""

    each: tuple[Phase, ...]
    apart: Triple = (1, 1, 1)


@dataclass(frozen=True)
class Reduction:
    """How K is cut up.

    `slabs`, one number a phase, and `channels` are those of the group that has the most, `channels` padded to K-chunks.
    """

    k_chunk: int
    slab: int
    slabs: tuple[int, ...]
    channels: int

    @classmethod
    def of(cls, geometry: ConvGeometry, phases: Phases, k_chunk: int, slab: int) -> Self:
        """K-chunks of so many channels, and slabs of so many elements."""
        slabs, channels = [0] * len(phases.each), 0
        for runs in group_runs(geometry):
            padded = [-(-count // k_chunk) * k_chunk for count in runs]
            of_group = [sum(-(-count * phase.taps // slab) for count in padded) for phase in phases.each]
            slabs = [*map(max, slabs, of_group)]
            channels = max(channels, sum(padded))
        return cls(k_chunk, slab, tuple(slabs), channels)

    @property
    def first_slabs(self) -> tuple[int, ...]:
        """Where the slabs of each phase begin among those of a group."""
        return tuple(accumulate(self.slabs[:-1], initial=0))


def group_runs(geometry: ConvGeometry) -> Iterable[list[int]]:
    """For each group its runs: how many channels of an input it reads.

    The first group stands for all where there is one input: they read as many channels, one after the other.
    """
    if len(geometry.channels) == 1:
        yield [geometry.group_channels]
        return
    for first in range(0, geometry.in_channels, geometry.group_channels):
        last = first + geometry.group_channels
        counts = [
            min(last, begin + channels) - max(first, begin)
            for begin, channels in zip(geometry.channel_offsets, geometry.channels)
        ]
        yield [count for count in counts if count > 0]


def runs_are_chunks(geometry: ConvGeometry, chunk: int) -> bool:
    """Whether every run is whole chunks: then each begins with one, behind those that other groups read of its input."""
    return not any(count % chunk for runs in group_runs(geometry) for count in runs)


def weight_parts(arithmetic: str, tile_m: int) -> int:
    """Numbers for each element of the packed weight: SPLIT_WEIGHT_PARTS of kernels/warp_tile.cuh."""
    return 2 if arithmetic == "TF32X3" and tile_m > 64 else 1


class WeightInSlabs(NamedTuple):
    """A weight as the kernel reads it: the C++ struct, and what it takes to have it so."""

    params: tuple[Any, ...]
    nbytes: int
    workspace: tuple[Buffer, ...] = ()
    steps: tuple[KernelLaunch, ...] = ()


def weight_in_slabs(
    problem: ConvProblem, phases: Phases, cut: Reduction, arithmetic: str, tile_m: int
) -> WeightInSlabs:
    """The weight where it lies, if it lies in slabs already; else packed, once where it is constant."""
    weight, parts, outputs = problem.weight, weight_parts(arithmetic, tile_m), problem.geometry.group_outputs
    as_it_is = arithmetic == "MMA" or (arithmetic == "TF32X3" and parts == 1)
    if as_it_is and not problem.conjugate and len(phases.each) == 1 and _lies_in_slabs(weight, problem.geometry, cut):
        row = weight.strides[0]
        return WeightInSlabs((address(weight), outputs * row, cut.slab, row, outputs), weight.nbytes)
    rows = -(-outputs // tile_m) * tile_m
    slab, row = rows * cut.slab * parts, rows if arithmetic == "FMA" else cut.slab * parts
    group = sum(cut.slabs) * slab
    is_constant = problem.weight_is_constant
    name = f"{weight.name} for {arithmetic} {tile_m} x {cut.k_chunk}" if is_constant else "packed_weight"
    packed = Buffer(name, problem.geometry.groups * group * ITEMSIZE[problem.x_dtype])
    params = Address(name), group, slab, row, rows
    pack = _pack_weight_launch(problem, phases, packed, cut, rows, arithmetic, parts)
    if is_constant:
        kept = replace(packed, is_kept=True, of=weight.name, made_by=pack)
        return WeightInSlabs(params, packed.nbytes, (kept,))
    return WeightInSlabs(params, packed.nbytes, (packed,), (pack,))


def _lies_in_slabs(weight: Operand, geometry: ConvGeometry, cut: Reduction) -> bool:
    """Whether K-slabs of rows [m][k] are there without packing: one tap, and every run's channels in whole slabs."""
    return (
        geometry.taps == 1
        and weight.stride_c == 1
        and weight.alignment >= VECTOR_BYTES
        and weight.strides[0] * weight.itemsize % VECTOR_BYTES == 0
        and abs(weight.strides[0]) <= INT32 // 128  # from a thread's one row to its other it is an int32
        and runs_are_chunks(geometry, cut.slab)
    )


def _pack_weight_launch(
    problem: ConvProblem, phases: Phases, packed: Buffer, cut: Reduction, rows: int, arithmetic: str, parts: int
) -> KernelLaunch:
    geometry, along_k = problem.geometry, arithmetic != "FMA"
    packed_as = 3 if problem.conjugate else 2 if parts > 1 else int(arithmetic == "TF32")
    weights = [phase.weight for phase in phases.each]
    # Along an axis where a phase has one tap its step is 0; the others have the one that all have.
    steps = [max(each, key=abs) for each in zip(*(weight.strides for weight in weights))]
    weight = replace(weights[0], strides=tuple(steps))
    nbytes = sum(each.nbytes for each in weights)
    grid, block = grid_and_block(1, rows * cut.channels, 1, geometry.groups, 256)
    channels = [(image(None), first, count) for first, count in zip(geometry.channel_offsets, geometry.channels)]
    return KernelLaunch(
        variant("pack_weight", DTYPE=f"bits{8 * weight.itemsize}"),
        (*grid[:2], len(weights)),
        block,
        (
            ("sources", (channels, len(channels))),
            ("weight", image(weight)),
            ("packed", Address(packed.name)),
            ("stride_m", cut.slab * parts if along_k else 1),
            ("stride_k", 1 if along_k else rows),
            *groups_params(geometry),
            ("k_chunk", cut.k_chunk),
            ("slab", cut.slab),
            ("slabs", sum(cut.slabs)),
            ("rows", rows),
            ("channels", cut.channels),
            ("packed_as", packed_as),
            (
                "phase",
                tuple(
                    ((phase.weight.offset - weight.offset) // weight.itemsize, phase.kernel, first)
                    for phase, first in zip(phases.each, cut.first_slabs)
                ),
            ),
        ),
        purpose="weight into K-slabs" + PACKED_AS[packed_as],
        bytes_moved=nbytes + packed.nbytes,
    )
