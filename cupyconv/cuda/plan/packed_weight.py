"""The K-slabs of an implicit GEMM, and the weight packed in their order, as its kernel reads it.

::

    K     | input 0: channels x taps ...     | input 1 ...           |     each input is padded to whole K-chunks
          |  slab  |  slab  |  slab  |  ...                             a block of threads multiplies one slab at a time

This is the host side of kernels/reduction.cuh and kernels/pack_weight.cu.
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

#: Bytes of K per slab, as in kernels/warp_tile.cuh.
SLAB_BYTES = 64
#: How packing changes the elements (PackedAs of kernels/pack_weight.cu), in words.
PACKED_AS = ("", ", rounded to TF32", ", as two TF32 parts", ", conjugated")


@dataclass(frozen=True)
class Phase:
    """One convolution of a grid: it has its own weight, and writes elements of the result between those of others.

    The first of these elements has the indices `first`.  `before` is negative if windows begin inside the image.
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
    """The convolutions of a grid; each writes elements that are `apart` elements from each other along each axis."""

    each: tuple[Phase, ...]
    apart: Triple = (1, 1, 1)


@dataclass(frozen=True)
class Reduction:
    """The division of K into K-chunks and slabs.

    `slabs`, one number per phase, and `channels`, padded to K-chunks, are the maximum over all groups.
    """

    k_chunk: int
    slab: int
    slabs: tuple[int, ...]
    channels: int

    @classmethod
    def of(cls, geometry: ConvGeometry, phases: Phases, k_chunk: int, slab: int) -> Self:
        """Divide K into K-chunks of `k_chunk` channels and slabs of `slab` elements."""
        slabs, channels = [0] * len(phases.each), 0
        for runs in group_runs(geometry):
            padded = [-(-count // k_chunk) * k_chunk for count in runs]
            of_group = [sum(-(-count * phase.taps // slab) for count in padded) for phase in phases.each]
            slabs = [*map(max, slabs, of_group)]
            channels = max(channels, sum(padded))
        return cls(k_chunk, slab, tuple(slabs), channels)

    @property
    def first_slabs(self) -> tuple[int, ...]:
        """Return the index of each phase's first slab among the slabs of a group."""
        return tuple(accumulate(self.slabs[:-1], initial=0))


def group_runs(geometry: ConvGeometry) -> Iterable[list[int]]:
    """Yield the runs of each group: how many channels of each input the group reads.

    With one input, only the first group is yielded: all groups read equally many channels.
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
    """Return whether the channels of every run are whole chunks; then every run also begins at a chunk of its input."""
    return not any(count % chunk for runs in group_runs(geometry) for count in runs)


def weight_parts(arithmetic: str, tile_m: int) -> int:
    """Return the numbers per element of the packed weight: SPLIT_WEIGHT_PARTS of kernels/warp_tile.cuh."""
    return 2 if arithmetic == "TF32X3" and tile_m > 64 else 1


class WeightInSlabs(NamedTuple):
    """A weight as the kernel reads it: the fields of the C++ struct, and the workspace and steps that packing needs."""

    params: tuple[Any, ...]
    nbytes: int
    workspace: tuple[Buffer, ...] = ()
    steps: tuple[KernelLaunch, ...] = ()


def weight_in_slabs(
    problem: ConvProblem, phases: Phases, cut: Reduction, arithmetic: str, tile_m: int
) -> WeightInSlabs:
    """Return the weight in place if it is stored in slabs, else packed; a constant weight is packed only once."""
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
    """Return whether the weight has K-slabs of rows [m][k] without packing: one tap, and whole slabs in every run."""
    return (
        geometry.taps == 1
        and weight.stride_c == 1
        and weight.alignment >= VECTOR_BYTES
        and weight.strides[0] * weight.itemsize % VECTOR_BYTES == 0
        and abs(weight.strides[0]) <= INT32 // 128  # the kernel counts the step between the rows of a thread in int32
        and runs_are_chunks(geometry, cut.slab)
    )


def _pack_weight_launch(
    problem: ConvProblem, phases: Phases, packed: Buffer, cut: Reduction, rows: int, arithmetic: str, parts: int
) -> KernelLaunch:
    geometry, along_k = problem.geometry, arithmetic != "FMA"
    packed_as = 3 if problem.conjugate else 2 if parts > 1 else int(arithmetic == "TF32")
    weights = [phase.weight for phase in phases.each]
    # A phase with one tap along an axis has step 0 there; all other phases have the same step.
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
        purpose="weight packed into K-slabs" + PACKED_AS[packed_as],
        bytes_moved=nbytes + packed.nbytes,
    )
