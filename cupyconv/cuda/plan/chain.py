"""Choose which layers of a chain share a kernel on a GPU: draft all pairs of neighbours, and run the best pairing.

::

    x --[ 0 ]-- layer[0] --[ 1 ]-- layer[1] --[ 2 ]-- out         three kernels or more, two images in memory
    x --[ 0 ------------- 1 ]----- layer[1] --[ 2 ]-- out         a pair and a single layer: one image
    x --[ 0 ]-- layer[0] --[ 1 ------------- 2 ]----- out

A pairing contains every layer once, alone or with a neighbour.  The cheapest pairing is found layer by layer, from the
cheapest pairings of the layers before.  An intermediate image needs workspace only if it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.conv import access_notes, choose, converted_conv, draft_conv
from cupyconv.cuda.plan.conv_pair import draft_pair
from cupyconv.cuda.plan.draft import Draft, in_rounds, in_sequence, relocated, within
from cupyconv.cuda.plan.epilogue import Sums, as_line, epilogue_launch
from cupyconv.problem.arrays import ITEMSIZE, Operand, real_part
from cupyconv.problem.geometry import even_part
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Address, Buffer, Conversion, KernelLaunch, Plan, Step, counted
from cupyconv.problem.problems import ChainProblem, ConvProblem, NotApplicable, without_empty_inputs

Layers = tuple[ConvProblem, ...]


def plan_chain(problem: ChainProblem) -> Plan:
    """Plan a chain; raise ValueError if ``fuse=True`` and no two layers can share a kernel."""
    gpu = problem.gpu
    layers, conversions = _converted(problem)
    limit = problem.sharing_with(conversions).limit
    notes = tuple(dict.fromkeys(note for layer in layers for note in layer.notes))
    notes += access_notes((*layers[0].xs, layers[-1].out))
    if layers[-1].out.nbytes == 0:
        draft = Draft("unfused", (), reason="the result is empty")
        rejected: tuple[tuple[str, str], ...] = ()
    else:
        comparison = _Comparison(tuple(replace(layer, workspace_limit=limit) for layer in layers), gpu)
        parts = comparison.best(problem.fuse)
        draft = _joined(layers, parts, limit)
        rejected = comparison.rejected(parts, problem.fuse)
    return draft.plan(problem, rejected, conversions, notes)


@dataclass(frozen=True)
class _Part:
    """The draft of layers ``first`` ... ``first + count - 1``: one layer, or two in one kernel."""

    first: int
    count: int
    draft: Draft

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def description(self) -> str:
        if self.count == 1:
            return f"{self.first} by {self.draft.method!r}"
        return f"{self.first} and {self.last} in one kernel ({self.draft.reason})"


class _Comparison:
    """The drafts of every layer and every pair of neighbours, compared by the cost model."""

    def __init__(self, layers: Layers, gpu: GpuModel) -> None:
        self.gpu = gpu
        self.layers = layers
        self.single = [_Part(i, 1, _draft_layer(layer)) for i, layer in enumerate(layers)]
        self.pairs: dict[int, _Part] = {}
        self.refusals: dict[int, str] = {}
        for i, (first, second) in enumerate(pairwise(layers)):
            try:
                self.pairs[i] = _Part(i, 2, draft_pair(first, second))
            except NotApplicable as reason:
                self.refusals[i] = str(reason)

    def seconds(self, part: _Part) -> float:
        return part.draft.cost(self.gpu).seconds

    def best(self, fuse: str | bool) -> tuple[_Part, ...]:
        """Return the cheapest pairing; if `fuse` is True, the cheapest of those with the most pairs."""
        if fuse is True and not self.pairs:
            reasons = "; ".join(f"layers {i} and {i + 1}: {reason}" for i, reason in self.refusals.items())
            raise ValueError(f"fuse=True does not apply: {reasons or 'the chain has a single layer'}")
        #: Entry i is for the first i layers: (layers not in a pair, seconds, parts).
        best: list[tuple[int, float, tuple[_Part, ...]]] = [(0, 0.0, ())]
        for i, single in enumerate(self.single):
            candidates = [(best[i], single, 1)]
            if i and i - 1 in self.pairs and fuse is not False:
                candidates.append((best[i - 1], self.pairs[i - 1], 0))
            best.append(
                min(
                    (
                        (before[0] + alone, before[1] + self.seconds(part), (*before[2], part))
                        for before, part, alone in candidates
                    ),
                    key=lambda candidate: candidate[:2] if fuse is True else candidate[1:2],
                )
            )
        return best[-1][2]

    def rejected(self, parts: Sequence[_Part], fuse: str | bool) -> tuple[tuple[str, str], ...]:
        """Return the rejected alternatives with reasons: pairs that were not chosen, and layers that run in a pair."""
        taken = {part.first for part in parts if part.count == 2}
        entries: list[tuple[str, str]] = []
        for i in range(len(self.layers) - 1):
            name = f"{i}+{i + 1}"
            alone = self.single[i : i + 2]
            methods = " and ".join(part.draft.method for part in alone)
            nbytes = 2 * self.layers[i].out.nbytes
            apart = (
                f"layers one by one ({methods}): {cost.by_model(sum(map(self.seconds, alone)))},"
                f" {nbytes:,} bytes of layer[{i}] moved"
            )
            if i in self.refusals:
                entries.append((f"fused {name}", self.refusals[i]))
            elif i in taken:
                entries.append((f"unfused {name}", apart))
            else:
                pair = self.pairs[i].draft
                asked = "fuse=False was asked for; " if fuse is False else ""
                entries.append((f"fused {name}", f"{asked}{pair.reason}; {pair.cost(self.gpu)}; {apart}"))
        return tuple(entries)


def _converted(problem: ChainProblem) -> tuple[Layers, tuple[Conversion, ...]]:
    """Return the layers in the dtypes that they compute in, except for intermediate images, and the conversions."""
    layers: list[ConvProblem] = []
    conversions: list[Conversion] = []
    for i, layer in enumerate(map(without_empty_inputs, problem.layers)):
        changed, needed = converted_conv(layer)
        layers.append(changed if i == 0 else replace(changed, xs=layer.xs))
        conversions += [conversion for conversion in needed if i == 0 or conversion.buffer != layer.xs[0].name]
    return tuple(layers), tuple(conversions)


def _draft_layer(layer: ConvProblem) -> Draft:
    """Draft one layer by its best method; widen its input first if that is an intermediate image in another dtype."""
    (x, *others) = layer.xs
    if others or x.dtype == layer.x_dtype:
        return choose(layer, draft_conv)[0]
    wide = replace(x, name="widened", dtype=layer.x_dtype)
    buffer = Buffer(wide.name, wide.nbytes)
    chosen = _draft_layer(replace(layer, xs=(wide,), workspace_limit=max(0, layer.limit - buffer.space)))
    if not chosen.steps or not x.nbytes:
        return chosen
    steps, workspace = (_widening(x, wide), *chosen.steps), (buffer, *chosen.workspace)
    note = f"{x.name} is converted from {x.dtype} to {wide.dtype} in workspace"
    return replace(chosen, steps=steps, workspace=workspace, notes=(*chosen.notes, note))


def _widening(x: Operand, wide: Operand) -> KernelLaunch:
    """Return the launch that widens an image; both images are contiguous, so that their order does not matter."""
    dtype, target = real_part(x.dtype), real_part(wide.dtype)
    line = as_line(Operand(wide.name, target, (x.nbytes // ITEMSIZE[dtype],), (1,)))
    launch = epilogue_launch(line, Sums(Address(x.name), dtype, (0, 0, 1)))
    return replace(launch, purpose=f"{dtype} -> {target}")


def _joined(layers: Layers, parts: Sequence[_Part], limit: int) -> Draft:
    """Join the parts, for as many samples at a time as leave half of the workspace limit to the layers."""
    stored = [part.last for part in parts[:-1]]
    batch = layers[0].geometry.batch
    size = sum(_slot_bytes(layers, stored)) + _widened_bytes(layers)
    most = batch if 2 * size <= limit else max(1, batch * (limit // 2) // size)
    chunk = even_part(batch, most)
    most_samples = tuple(_samples(layer, 0, chunk) for layer in layers)
    sizes = _slot_bytes(most_samples, stored)
    # The last chunk may have fewer samples, but uses the same memory.
    left = max(0, limit - sum(Buffer("", nbytes).space for nbytes in sizes))
    whole, rest = divmod(batch, chunk)

    def every_chunk(room: int) -> Draft:
        """Draft every chunk: a chunk with another start may choose other methods, which need other buffer sizes."""
        drafts: list[Draft] = []

        def steps_of(first: int, count: int) -> Sequence[Step]:
            some = [replace(_samples(layer, first, count), workspace_limit=room) for layer in layers]
            drafts.append(in_sequence("", [draft_of(part, some) for part in parts], ""))
            return drafts[-1].steps

        steps = in_rounds(whole, lambda i: steps_of(i * chunk, chunk))
        steps += steps_of(whole * chunk, rest) if rest else ()
        return replace(in_sequence("", drafts, ""), steps=tuple(steps))

    def draft_of(part: _Part, some: Sequence[ConvProblem]) -> Draft:
        if not stored:
            return part.draft
        return draft_pair(some[part.first], some[part.last]) if part.count == 2 else _draft_layer(some[part.first])

    joined = within(left, every_chunk)
    # Only two images are in use at a time: each one overwrites the last but one.
    places = {f"layer[{i}]": Address(f"layer[{stored[j % 2]}]") for j, i in enumerate(stored)}
    some = [_samples(layer, 0, chunk) for layer in layers]
    drafts = [draft_of(part, [replace(layer, workspace_limit=left) for layer in some]) for part in parts]
    cut = f", {-(-batch // chunk)} chunks of {counted(chunk, 'sample')}" if chunk < batch else ""
    notes = joined.notes + tuple(
        f"layer[{i}] reuses the memory of layer[{stored[j]}]" for j, i in enumerate(stored[2:])
    )
    for part in parts:
        if part.count == 2:
            nbytes = layers[part.first].out.nbytes
            notes += (
                f"layer[{part.first}] is never stored: saves {nbytes:,} bytes of workspace and {2 * nbytes:,} bytes moved",
            )
    if sum(sizes) > limit:
        notes += (
            f"the intermediate images need {sum(sizes):,} bytes for one sample, beyond the workspace limit of {limit:,}",
        )
    description = ", ".join(replace(part, draft=draft).description for part, draft in zip(parts, drafts))
    return replace(
        joined,
        method="fused" if any(part.count == 2 for part in parts) else "unfused",
        steps=relocated(joined.steps, places),
        workspace=(*(Buffer(f"layer[{i}]", nbytes) for i, nbytes in zip(stored, sizes)), *joined.workspace),
        reason=f"layer{'s' * (len(layers) > 1)} {description}{cut}",
        notes=notes,
    )


def _slot_bytes(layers: Layers, stored: Sequence[int]) -> list[int]:
    """Return the bytes of the buffers, at most two, in which the images are stored alternately."""
    sizes = [layers[i].out.nbytes for i in stored]
    return [max(sizes[slot::2]) for slot in range(min(2, len(sizes)))]


def _widened_bytes(layers: Layers) -> int:
    """Return the bytes of the largest widened image, for layers that compute in another dtype than their input."""
    inputs = ((layer.xs[0], layer.x_dtype) for layer in layers[1:])
    return max((replace(x, dtype=dtype).nbytes for x, dtype in inputs if x.dtype != dtype), default=0)


def _samples(layer: ConvProblem, first: int, count: int) -> ConvProblem:
    """Return the layer for some of the samples; intermediate images have only these samples."""
    if (first, count) == (0, layer.geometry.batch):
        return layer

    def cut(image: Operand) -> Operand:
        return image.samples(0 if image.name.startswith("layer[") else first, count)

    return replace(
        layer,
        geometry=replace(layer.geometry, batch=count),
        xs=tuple(map(cut, layer.xs)),
        out=cut(layer.out),
        residual=layer.residual and cut(layer.residual),
    )
