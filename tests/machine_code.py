"""Machine code of the kernels, counted without a GPU.

As a command, for a list of typical calls, or only for the calls that launch the named kernels::

    python -m tests.machine_code                                     # sm_80 and sm_90
    python -m tests.machine_code recurrent_persistent --arch sm_90
    python -m tests.machine_code depthwise --every                   # every variant, whatever calls it
    python -m tests.machine_code --write                             # the same into machine_code.json

The line of a launch states its use of a multiprocessor, its operations per byte that its tiles request from the L2
cache, and the counts of its instructions.  A "-" means that a launch has no tiles of its own: threads of "direct",
depthwise, pooling, im2col and col2im kernels read single windows.  These share data in the L1 cache only if their
blocks happen to run at the same time.  A line for every loop follows, indented by its depth; its counts include the
loops inside.  A branch to a block that dominates the branch closes a loop.  Counts are static: they do not tell which
of two branches runs, or how often, and a called function counts once, as part of the whole.

"round" counts the instructions that a warp issues on one path around a loop, inner loops once.  It is the path with
the most products; then the most accesses of global memory, stores to shared memory and barriers; then the fewest
calls; then the most exponentials, because a step past a sample's end has none; then the fewest instructions.  For the
loop of a GEMM this is a K-slab, for that of a recurrent layer a step, in which nothing rare happens.  Only for
complex64 it is a slab in which some sums overflow, because these are multiplied twice.

The compiler is that of `tests.nvrtc`.  The disassembler comes in the wheel ``nvidia-cuda-nvdisasm``; one on PATH works
too.  machine_code.json has the figures of typical calls as last written; `tests/test_machine_code.py` compares them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv.cuda.plan.occupancy import blocks_that_fit
from cupyconv.ops.recurrent_pullback import RECURRENT_GRADIENT
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch, LaunchLoop, Plan
from tests import nvrtc
from tests.variants import all_variants, is_planned

ARCHITECTURES = ("sm_80", "sm_90")
FIGURES = Path(__file__).with_suffix(".json")

# ---- instructions and loops ---------------------------------------------------------------------------------------

#: Kinds of instructions, by the beginning of their names.  "global" are loads and stores, "copy" are copies from global
#: to shared memory that bypass the registers.
KINDS = {
    "mma": r"[HDIQ]G?MMA",
    "fma": r"(FFMA|DFMA|HFMA2)",
    "global": r"(LDG|STG|LD|ST|RED|ATOM|ATOMG)\b",
    "copy": r"(LDGSTS|UBLKCP)\b",
    "shared": r"(LDS|STS|LDSM|ATOMS|STSM)\b",
    "local": r"(LDL|STL)\b",
    "float64": r"(D(ADD|MUL|FMA|SETP|MNMX)\b|\w+\..*F64|MUFU\.RCP64H)",
    "reciprocal": r"MUFU\.RCP",
    "call": r"CALL",
    "barrier": r"BAR",
}
COUNTED = ("instructions", *KINDS)
_KINDS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}
#: Instructions that bring a slab to where it is multiplied, and barriers; not the loads from there.
_BRINGS = re.compile(rf"{KINDS['global']}|{KINDS['copy']}|{KINDS['barrier']}|STS\b")


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly; `targets` are the labels that it may jump to."""

    name: str
    predicated: bool
    targets: tuple[str, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The `KINDS` that it counts for; an integer division also has a reciprocal, or a call for 64 bits."""
        return _kinds(self.name)


@cache
def _kinds(name: str) -> frozenset[str]:
    return frozenset(kind for kind, pattern in _KINDS.items() if pattern.match(name))


@dataclass(frozen=True)
class Loop:
    """`depth` counts enclosing loops; `counts` has "instructions" and `KINDS`; `round` counts one path around it."""

    depth: int
    counts: Counter[str]
    round: Counter[str]


_LABEL = re.compile(r"^([.$\w]+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@\S+\s+)?([A-Z][\w.]*)([^;]*);(.*)$")


class Listing:
    """A disassembly as instructions with their successors."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.instructions)
            elif found := _INSTRUCTION.match(line):
                guard, name, operands = found[1], found[2], found[3]
                # A branch may have a condition among its operands; a branch of a whole warp is conditional.  A call of
                # a part of the same function counts as a branch, because a warp may leave a loop through it.
                conditional = guard is not None or re.match(r"\s*!?U?P\d", operands) is not None or ".DIV" in name
                goes = name.startswith(("BRA", "BRX", "JMP", "CALL"))
                targets = re.findall(r"(\.L_x_\d+)", operands + found[4]) if goes else ()
                if name != "NOP":
                    self.instructions.append(Instruction(name, conditional, tuple(targets)))

    def counts(self, of: Iterable[int] | None = None) -> Counter[str]:
        """Count all instructions, or these, in total and by kind."""
        chosen = self.instructions if of is None else [self.instructions[i] for i in of]
        return Counter(kind for each in chosen for kind in ("instructions", *each.kinds))

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops in the order of the code, an outer loop before those inside."""
        bodies = sorted(self._bodies.items(), key=lambda each: (min(each[1]), -len(each[1])))
        others = self._bodies.values()
        loops = (
            Loop(sum(body < other for other in others), self.counts(body), self.counts(self._round(head, body)))
            for head, body in bodies
        )
        return tuple(loop for loop in loops if loop.counts["instructions"] > 1)  # code ends with a jump to itself

    @cached_property
    def _following(self) -> list[list[int]]:
        return [list(self._successors(i)) for i in range(len(self.instructions))]

    @cached_property
    def _preceding(self) -> dict[int, list[int]]:
        preceding: dict[int, list[int]] = defaultdict(list)
        for i, following in enumerate(self._following):
            for j in following:
                preceding[j].append(i)
        return preceding

    @cached_property
    def _order(self) -> list[int]:
        entries = [i for i in range(len(self.instructions)) if not self._preceding[i]] or [0]
        return _reverse_postorder(self._following, entries)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {i: at for at, i in enumerate(self._order)}

    @cached_property
    def _bodies(self) -> dict[int, frozenset[int]]:
        """Head of each loop (the target of a jump back) -> all instructions of the loop."""
        dominators = _dominators(self._order, self._preceding)
        bodies: dict[int, set[int]] = {}
        for i in self._order:
            for head in self._following[i]:
                if _dominates(head, i, dominators):
                    body, pending = bodies.setdefault(head, {head}), [i]
                    while pending:
                        if (j := pending.pop()) not in body:
                            body.add(j)
                            pending += self._preceding[j]
        return {head: frozenset(body) for head, body in bodies.items()}

    def _round(self, head: int, body: frozenset[int]) -> list[int]:
        """Return a path around a loop: most products, most of `_BRINGS`, fewest calls, most exponentials.

        Among equal paths it is the shortest.  If the loop has matrix products, no other products count, because an
        activation has some of these too.
        """
        place = self._place
        best: dict[int, tuple[int, ...]] = {head: (0, 0, 0, 0, 0)}
        before: dict[int, int] = {}
        products = "mma" if self.counts(body)["mma"] else "fma"
        for i in sorted(body, key=lambda j: place[j]):
            if i != head:
                known = [j for j in self._preceding[i] if j in best and place[j] < place[i]]
                before[i] = max(known, key=best.__getitem__)
                best[i] = best[before[i]]
            name, kinds = self.instructions[i].name, self.instructions[i].kinds
            gain = products in kinds, bool(_BRINGS.match(name)), -("call" in kinds), name.startswith("MUFU.EX2"), -1
            best[i] = tuple(map(add, best[i], gain))
        way = [max((i for i in body if head in self._following[i]), key=best.__getitem__)]
        while way[-1] != head:
            way.append(before[way[-1]])
        return way

    def _successors(self, i: int) -> Iterator[int]:
        """Yield the successors; the next instruction follows a call of a function, or a barrier of a diverged warp."""
        instruction = self.instructions[i]
        yield from (self._labels[target] for target in instruction.targets)
        ends = instruction.targets or instruction.name.startswith(("EXIT", "RET", "BRX", "JMX"))
        if (instruction.predicated or not ends) and i + 1 < len(self.instructions):
            yield i + 1


def _reverse_postorder(successors: list[list[int]], entries: list[int]) -> list[int]:
    """Return the reachable nodes, each before the nodes that only it leads to."""
    seen, order = set(entries), []
    pending = [(entry, iter(successors[entry])) for entry in entries]
    while pending:
        node, rest = pending[-1]
        following = next((j for j in rest if j not in seen), None)
        if following is None:
            order.append(node)
            pending.pop()
        else:
            seen.add(following)
            pending.append((following, iter(successors[following])))
    return order[::-1]


def _dominators(order: list[int], predecessors: dict[int, list[int]]) -> dict[int, int]:
    """Return node -> its immediate dominator, the last node before it on every path to it; -1 for an entry.

    Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
    """
    place = {-1: -1, **{node: i for i, node in enumerate(order)}}
    found: dict[int, int] = {-1: -1}
    changed = True
    while changed:
        changed = False
        for node in order:
            known = [j for j in predecessors[node] if j in found] or [-1]
            nearest = known[0]
            for other in known[1:]:
                while nearest != other:
                    if place[nearest] > place[other]:
                        nearest = found[nearest]
                    else:
                        other = found[other]
            if found.get(node) != nearest:
                found[node], changed = nearest, True
    return found


def _dominates(head: int, node: int, dominators: dict[int, int]) -> bool:
    while node not in (head, -1):
        node = dominators[node]
    return node == head


# ---- what is compiled and read -----------------------------------------------------------------------------------


@cache
def disassembler() -> Path | None:
    """Return the path of nvdisasm, from a wheel or else on PATH."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or () if spec else ()
    found = [
        path for root in roots for name in ("nvdisasm", "nvdisasm.exe") for path in Path(root).glob(f"*/bin/{name}")
    ]
    on_path = shutil.which("nvdisasm")
    return max(found, default=Path(on_path) if on_path else None)


def unavailable() -> str | None:
    """Return why no machine code can be read here, or None if it can."""
    missing = None if disassembler() else "nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)"
    return nvrtc.unavailable() or missing


def listing(cubin: bytes) -> Listing:
    """Disassemble what NVRTC has compiled."""
    program = disassembler()
    assert program is not None, unavailable()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True).stdout
    return Listing(text)


@dataclass(frozen=True)
class Figures:
    """A kernel's machine code for one architecture; `blocks` and `flops_per_l2_byte` are None if the launch is unknown.

    `flops_per_l2_byte` is also None if the planner does not count what the tiles request from L2.
    """

    kernel: Kernel
    arch: str
    registers: int
    spills: int
    shared: int
    blocks: int | None
    flops_per_l2_byte: float | None
    listing: Listing

    @property
    def summary(self) -> dict[str, Any]:
        """The entry of machine_code.json.

        "inner loop" has the largest share of products; "round" is that of the outermost loop with the most products.
        """
        loops = [loop.counts for loop in self.listing.loops]
        inner = max(
            loops, key=lambda n: (n["mma"] / n["instructions"], n["fma"] / n["instructions"]), default=Counter()
        )
        rounds = [loop.round for loop in self.listing.loops if loop.depth == 0]
        most = max(rounds, key=lambda n: (n["mma"], n["fma"]), default=Counter())
        known = {"registers": self.registers, "spills": self.spills, "shared": self.shared, "blocks": self.blocks}
        known |= {} if self.flops_per_l2_byte is None else {"FLOP/B": self.flops_per_l2_byte}
        code = self.listing.counts()
        return {**known, "code": _in_order(code), "round": _in_order(most), "inner loop": _in_order(inner)}


def _in_order(counts: Counter[str]) -> dict[str, int]:
    return {kind: counts[kind] for kind in COUNTED if counts[kind]}


def figures(kernel: Kernel, arch: str, launch: KernelLaunch | None = None) -> Figures:
    """Compile a variant and read its machine code."""
    compiled = nvrtc.compile_variant(kernel, int(arch[3:]))
    shared, blocks, intensity = compiled.shared, None, None
    if launch is not None:
        shared += launch.shared_bytes
        blocks = blocks_that_fit(compiled.registers, launch.block, shared, known_gpu(arch))
        if launch.l2_bytes:
            intensity = float(f"{launch.flops / launch.l2_bytes:.3g}")
    code = listing(compiled.cubin)
    return Figures(kernel, arch, compiled.registers, compiled.spills, shared, blocks, intensity, code)


# ---- typical calls ------------------------------------------------------------------------------------------------


def _array(dtype: str, *shape: int) -> np.ndarray:
    return np.empty(shape, dtype)


def _channels_last(dtype: str, *shape: int) -> np.ndarray:
    return np.moveaxis(_array(dtype, shape[0], *shape[2:], shape[1]), -1, 1)


def _conv(dtype: str, image: Callable[..., np.ndarray] = _array, **how: Any) -> Callable[[str], Plan]:
    return lambda arch: cupyconv.explain(
        cupyconv.conv, image(dtype, 32, 64, 56, 56), _array(dtype, 64, 64, 3, 3), padding=1, on=arch, **how
    )


def _pointwise(arch: str) -> Plan:
    x, weight = _array("float16", 32, 512, 28, 28), _array("float16", 128, 512, 1, 1)
    return cupyconv.explain(cupyconv.conv, x, weight, activation="relu", on=arch)


def _tf32(arch: str) -> Plan:
    with cupyconv.options(allow_tf32=True):
        return _conv("float32", _channels_last)(arch)


def _recurrent(name: str, dtype: str, method: str) -> Callable[[str], Plan]:
    """Plan 100 steps of 32 samples, 256 inputs and units, with biases."""
    gates = {"rnn": 1, "lstm": 4, "gru": 3}[name]
    x, weight, bias = _array(dtype, 100, 32, 256), _array(dtype, gates * 256, 256), _array(dtype, gates * 256)
    return lambda arch: cupyconv.explain(getattr(cupyconv, name), x, weight, weight, bias, bias, method=method, on=arch)


def _recurrent_gradient(dtype: str) -> Callable[[str], Plan]:
    """Plan what a pullback runs after such an lstm, which `explain` cannot plan."""
    steps, batch, hidden = 100, 32, 256
    sequence, kept = _array(dtype, steps, batch, hidden), "float32" if dtype == "float16" else dtype
    weight, state = _array(dtype, 1, 4 * hidden, hidden), _array(dtype, 1, batch, hidden)
    given: dict[str, Any] = dict.fromkeys(RECURRENT_GRADIENT.arrays)
    given |= {"x": sequence, "y": sequence, "grad_y": sequence, "weight_ih": weight, "weight_hh": weight}
    given |= {"gates": _array(kept, 1, steps, batch, 4 * hidden), "cells": _array(kept, 1, steps, batch, hidden)}
    given |= {"h0": state, "c0": state, "grad_h": state, "cell": "lstm", "direction": "forward", "clip": None}
    given |= {"activations": ("sigmoid", "tanh", "tanh"), "input_forget": False, "linear_before_reset": True}
    return lambda arch: RECURRENT_GRADIENT.checked(given, arch).plan()


def _merge(dtype: str) -> Callable[[str], Plan]:
    return lambda arch: cupyconv.explain(
        cupyconv.linmerge, [_array(dtype, 1, 4, 10**6)] * 5, _array(dtype, 4, 20), on=arch
    )


def _pair(arch: str) -> Plan:
    layers = [cupyconv.ConvLayer(_array("float16", 32, 32, 3, 3), padding=1)] * 2
    return cupyconv.explain(cupyconv.conv_chain, _array("float16", 8, 32, 64, 64), layers, fuse=True, on=arch)


#: The calls in machine_code.json: name -> function that returns the plan for a GPU.
TYPICAL: dict[str, Callable[[str], Plan]] = {
    "conv 3x3, float16, channels last": _conv("float16", _channels_last),
    "conv 3x3, float16": _conv("float16"),
    "conv 1x1, float16": _pointwise,
    "conv 3x3, TF32, channels last": _tf32,
    "conv 3x3, float32": _conv("float32", method="implicit_gemm"),
    "conv 3x3, float64": _conv("float64", method="implicit_gemm"),
    "conv 3x3, float32, direct": _conv("float32", method="direct"),
    "conv 3x3, complex64": _conv("complex64"),
    "conv_chain of two 3x3, float16": _pair,
    "linmerge, float32": _merge("float32"),
    "linmerge, float16": _merge("float16"),
    "depthwise 3x3, float32": lambda arch: cupyconv.explain(
        cupyconv.conv, _array("float32", 8, 64, 112, 112), _array("float32", 64, 1, 3, 3), padding=1, groups=64, on=arch
    ),
    "conv_transpose 4x4, float32": lambda arch: cupyconv.explain(
        cupyconv.conv_transpose, _array("float32", 8, 64, 28, 28), _array("float32", 64, 32, 4, 4), stride=2, padding=1, on=arch
    ),
    "depthwise conv_transpose 3x3, float32": lambda arch: cupyconv.explain(
        cupyconv.conv_transpose, _array("float32", 8, 64, 56, 56), _array("float32", 64, 1, 3, 3), stride=2, padding=1, groups=64, on=arch
    ),
    "conv_grad_weight 3x3, float16, channels last": lambda arch: cupyconv.explain(
        cupyconv.conv_grad_weight, *[_channels_last("float16", 32, 64, 56, 56)] * 2, (3, 3), padding=1, on=arch
    ),
    "conv_grad_weight 3x3, float16": lambda arch: cupyconv.explain(
        cupyconv.conv_grad_weight, _array("float16", 32, 64, 56, 56), _array("float16", 32, 64, 56, 56), (3, 3), padding=1, on=arch
    ),
    "max_pool 3x3, float32": lambda arch: cupyconv.explain(
        cupyconv.max_pool, _array("float32", 8, 64, 112, 112), 3, stride=2, padding=1, on=arch
    ),
    "lstm 256, float16": _recurrent("lstm", "float16", "persistent"),
    "lstm 256, float32": _recurrent("lstm", "float32", "persistent"),
    "lstm 256, float64": _recurrent("lstm", "float64", "persistent"),
    "gru 256, float16": _recurrent("gru", "float16", "persistent"),
    "rnn 256, float16": _recurrent("rnn", "float16", "persistent"),
    "lstm 256, float16, step by step": _recurrent("lstm", "float16", "step"),
    "lstm 256, float32, step by step": _recurrent("lstm", "float32", "step"),
    "gradients of lstm 256, float16": _recurrent_gradient("float16"),
    "gradients of lstm 256, float32": _recurrent_gradient("float32"),
}  # fmt: skip


def launches(plan: Plan) -> list[KernelLaunch]:
    """Return the launches of a plan, one per kernel, without the small kernels that prepare or finish."""
    every = [each for step in plan.steps for each in (step.launches if isinstance(step, LaunchLoop) else (step,))]
    kernels = {each.kernel: each for each in every if isinstance(each, KernelLaunch)}
    return [each for kernel, each in kernels.items() if kernel.name not in ("epilogue", "pack_weight")]


# ---- the command -------------------------------------------------------------------------------------------------


def _counted(counts: Counter[str]) -> str:
    return " ".join(f"{counts[column] or '.':>{max(len(column), 5)}}" for column in COUNTED)


def _print_figures(name: str, found: Figures) -> None:
    blocks = "-" if found.blocks is None else found.blocks
    intensity = "-" if found.flops_per_l2_byte is None else f"{found.flops_per_l2_byte:g}"
    taken = f"{found.registers:>9} {found.spills:>6} {found.shared:>7,} {blocks:>6} {intensity:>6} {'':>6}"
    if name:
        print(name)
    print(f"  {found.kernel!s:<46} {found.arch:>6} {taken}  {_counted(found.listing.counts())}")
    for loop in found.listing.loops:
        print(f"  {'  ' * (loop.depth + 1) + 'loop':<91}{loop.round['instructions']:>7}  {_counted(loop.counts)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, or write those of typical calls."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code", description="Count the kernels' machine code."
    )
    parser.add_argument("kernels", nargs="*", metavar="kernel", help="only launches of these; otherwise of all")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="separated by commas (%(default)s)")
    parser.add_argument(
        "--every", action="store_true", help="every variant of these kernels, not only those of typical calls"
    )
    parser.add_argument("--write", action="store_true", help=f"write {FIGURES.name} instead")
    given = parser.parse_args(arguments)
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 1
    unknown = set(given.kernels) - {variant.name for variant in all_variants()}
    if unknown:
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}")
    if given.write:
        write()
        return 0
    counted = " ".join(f"{column:>5}" for column in COUNTED)
    print(
        f"  {'kernel':<46} {'arch':>6} {'registers':>9} {'spills':>6} {'shared':>7} {'blocks':>6} {'FLOP/B':>6} {'round':>6}  {counted}"
    )
    for arch in given.arch.split(","):
        if given.every:
            for variant in all_variants():
                if variant.name in (given.kernels or [variant.name]) and is_planned(variant, int(arch[3:])):
                    _print_figures("", figures(variant, arch))
            continue
        for name, plan in TYPICAL.items():
            for launch in launches(plan(arch)):
                if launch.kernel.name in (given.kernels or [launch.kernel.name]):
                    _print_figures(name, figures(launch.kernel, arch, launch))
    return 0


def written() -> dict[str, Any]:
    """Read machine_code.json: typical call -> architecture -> kernel -> its figures."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def write() -> None:
    """Write machine_code.json, one line per kernel."""
    lines = []
    for name in TYPICAL:
        of_call = {
            arch: {kernel: f"@{json.dumps(found)}@" for kernel, found in summaries(name, arch).items()}
            for arch in ARCHITECTURES
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(of_call, indent=1)}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    FIGURES.write_text(re.sub(r'"@(.*)@"', lambda row: json.loads(f'"{row[1]}"'), text), encoding="utf-8")


def summaries(name: str, arch: str) -> dict[str, dict[str, Any]]:
    """Return kernel -> its entry in machine_code.json, for a typical call."""
    return {str(each.kernel): figures(each.kernel, arch, each).summary for each in launches(TYPICAL[name](arch))}


if __name__ == "__main__":
    sys.exit(main())
