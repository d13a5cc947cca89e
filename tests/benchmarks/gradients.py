"""The gradients of ordinary layers on NumPy, beside the forward pass and PyTorch's gradients, on the same threads::

    python -m tests.benchmarks.gradients [--threads 2] [--seconds 2] [--only NAME] [--json FILE]

For every layer the input and the weight gradient of the library and of torch (``aten.convolution_backward``, asked for
one gradient at a time, contiguous arrays), and both forward passes, are held to float64 and then timed in rounds in which
each has its turn.  torch has so many threads; the library has them in two ways, each measured beside torch anew::

    blocks    options(threads=T), and NumPy's BLAS on one thread: blocks run beside each other
    BLAS      as the library is by default: one block at a time, BLAS on T threads

A ratio is the median of the rounds' own.  **Below 1 the library is faster**, and what is lost is printed beside what is won.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from math import exp, fsum, log, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

import cupyconv
from cupyconv.bench.cases import APART, Case, repeat_normals
from cupyconv.bench.clock import HostClock, measure, ratio
from cupyconv.bench.machines import environment, numpy_machine
from cupyconv.bench.record import write_record
from cupyconv.bench.reference import allowed_error_of_sums, error_beside, in_float64
from cupyconv.bench.tables import LAYERS
from cupyconv.bench.torch_peers import Torch, find_torch

#: Ways to use threads.
SETTINGS = ("blocks", "BLAS")
#: The table of the command, and two more of the commonest kind.
CASES = (
    *LAYERS,
    replace(LAYERS[0], name="3x3, 128 -> 128, 28x28", channels=(128,), size=(28, 28), out_channels=128),
    Case("3x3 stride 2, 128 -> 128, 56x56", 8, (128,), (56, 56), 128, (3, 3), stride=2, padding=((1, 1),) * 2),
)
GRADIENTS = ("input gradient", "weight gradient")
#: Most times the forward pass that a gradient may take, and most times torch's, in the geometric mean.
MOST_FORWARD, MOST_TORCH = 2.2, 1.0

Results = Callable[[], Sequence[Any]]


def arguments_of(case: Case) -> dict[str, Any]:
    """What the library's functions take beside arrays."""
    return dict(stride=case.stride, padding=case.pairs, dilation=case.dilation, groups=case.groups)


def arrays_of(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The inputs, the weight and the gradient that arrives."""
    xs, (weight,) = case.arrays()
    shape = (case.batch, case.out_channels, *case.out_size)
    return xs, weight, repeat_normals(case.dtype, (len(xs) + 1) * APART, prod(shape)).reshape(shape)


def ours(case: Case, xs: list[np.ndarray], weight: np.ndarray, grad: np.ndarray) -> dict[str, Results]:
    """The library's calls; each gives its results in a list."""
    settings = arguments_of(case)
    shapes = [x.shape for x in xs]
    return {
        "forward": lambda: [case.ours(xs, [weight])],
        "input gradient": lambda: cupyconv.conv_grad_input(grad, weight, shapes, **settings),
        "weight gradient": lambda: [cupyconv.conv_grad_weight(grad, xs, case.kernel, **settings)],
    }


def torchs(torch: Any, case: Case, xs: list[np.ndarray], weight: np.ndarray, grad: np.ndarray) -> dict[str, Results]:
    """torch's.  Inputs are joined in the forward pass; a gradient finds that done, as it would in training."""
    peer = Torch(torch, np)
    tensors, kernel, arriving = [peer.tensor(x) for x in xs], peer.tensor(weight), peer.tensor(grad)
    rank = len(case.size)
    symmetric = all(before == after for before, after in case.pairs)
    padding = [before if symmetric else 0 for before, _ in case.pairs]
    sides = [] if symmetric else [side for pair in reversed(case.pairs) for side in pair]

    def joined() -> Any:
        x = torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0]
        return torch.nn.functional.pad(x, sides) if sides else x

    rest = (None, [case.stride] * rank, padding, [case.dilation] * rank, False, [0] * rank, case.groups)
    x = joined()
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(case.size, case.pairs)) if sides else ()

    def gradient(which: int) -> Any:
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(arriving, x, kernel, *rest, mask)[which]

    def input_gradients() -> Sequence[Any]:
        whole = gradient(0)
        return whole[(..., *inside)].split(list(case.channels), 1) if inside else whole.split(list(case.channels), 1)

    return {
        "torch forward": lambda: [torch.ops.aten.convolution(joined(), kernel, *rest)],
        "torch input gradient": input_gradients,
        "torch weight gradient": lambda: [gradient(1)],
    }


def gradients_in_float64(
    case: Case, xs: list[np.ndarray], weight: np.ndarray, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Both gradients summed tap by tap, without code in common with what is measured."""
    groups, pixels = case.groups, prod(case.out_size)
    x = np.pad(np.concatenate(xs, axis=1).astype(float), ((0, 0), (0, 0), *case.pairs))
    arriving = grad.astype(float).reshape(case.batch, groups, -1, pixels)
    to_x, to_weight = np.zeros(x.shape), np.zeros(weight.shape)
    for tap in product(*map(range, case.kernel)):
        steps = (slice(t * case.dilation, None, case.stride) for t in tap)
        reached = (..., *(slice(s.start, s.start + (n - 1) * s.step + 1, s.step) for s, n in zip(steps, case.out_size)))
        matrix = weight[(..., *tap)].astype(float).reshape(groups, -1, weight.shape[1])
        part = x[reached].reshape(case.batch, groups, -1, pixels)
        to_x[reached] += np.matmul(matrix.swapaxes(1, 2), arriving).reshape(x[reached].shape)
        to_weight[(..., *tap)] = np.matmul(arriving, part.swapaxes(2, 3)).sum(0).reshape(weight.shape[:2])
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(case.size, case.pairs))
    return to_x[(..., *inside)], to_weight


def check(case: Case, calls: Mapping[str, Results], arrays: tuple[Any, Any, Any]) -> dict[str, float]:
    """The errors of all results; WrongResult where one is too large."""
    xs, weight, grad = arrays
    to_x, to_weight = gradients_in_float64(case, xs, weight, grad)
    expected = {"forward": in_float64(np, case, xs, [weight]), "input gradient": to_x, "weight gradient": to_weight}
    products = expected["forward"].size * case.terms
    errors = {}
    for name, call in calls.items():
        wanted = expected[name.removeprefix("torch ")]
        terms = products / wanted.size
        result = np.concatenate([np.asarray(part) for part in call()], axis=1 if "weight" not in name else 0)
        allowed = allowed_error_of_sums(case.dtype, terms, transform=name.startswith("torch"))
        errors[name] = error_beside(np, case.dtype, sqrt(terms), result, wanted, allowed)
    return errors


@contextmanager
def threads_of(setting: str, threads: int) -> Iterator[None]:
    """So many threads in one of the two ways; torch's are its own."""
    blas = ThreadpoolController().select(internal_api="openblas")
    if not len(blas):
        raise RuntimeError("NumPy's BLAS is not OpenBLAS: its threads cannot be set here")
    with blas.limit(limits=1 if setting == "blocks" else threads):
        with cupyconv.options(threads=threads if setting == "blocks" else None):
            yield


def measure_case(torch: Any, case: Case, threads: int, seconds: float) -> dict[str, Any]:
    """One layer's row of the record."""
    arrays = arrays_of(case)
    peers = torchs(torch, case, *arrays) if torch is not None else {}
    row: dict[str, Any] = {"case": asdict(case), "settings": {}}
    for setting in SETTINGS:
        with threads_of(setting, threads):
            calls = {**ours(case, *arrays), **peers}
            errors = check(case, calls, arrays)
            timings, failed = measure(calls, HostClock(), seconds)
            if failed:
                raise next(iter(failed.values()))
        compared = {}
        for name in GRADIENTS:
            compared[f"{name} / forward"] = ratio(timings["forward"], timings[name], "device")
            if peers:
                compared[f"{name} / torch's"] = ratio(timings[f"torch {name}"], timings[name], "device")
        if peers:
            compared["forward / torch's"] = ratio(timings["torch forward"], timings["forward"], "device")
        ways = {name: {**timing.summary(), "error": errors[name]} for name, timing in timings.items()}
        row["settings"][setting] = {"ways": ways, "ratios": compared}
    return row


def means(rows: Sequence[Mapping[str, Any]], setting: str) -> dict[str, float]:
    """The geometric mean of each ratio over the layers."""
    ratios = [row["settings"][setting]["ratios"] for row in rows]
    return {name: exp(fsum(log(one[name]["ratio"]) for one in ratios) / len(ratios)) for name in ratios[0]}


def line(row: Mapping[str, Any], setting: str) -> str:
    """A layer's medians in milliseconds and its ratios."""
    measured = row["settings"][setting]
    times = "".join(f"{way['median'] * 1e3:>8.2f}" for way in measured["ways"].values())
    ratios = "".join(f"{one['ratio']:>7.2f}" for one in measured["ratios"].values())
    return f"{row['case']['name']:<45}{setting:<8}{times:<50}{ratios}"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Geometric means, targets, and every layer that is slower than torch."""
    lines = []
    for setting in SETTINGS:
        lines.append(f"\nthreads for {setting}, geometric means of {len(rows)} layers:")
        for name, mean in means(rows, setting).items():
            most = MOST_FORWARD if name.endswith("/ forward") else MOST_TORCH
            wanted = "" if name.startswith("forward") else f"  (at most {most}: {'met' if mean <= most else 'MISSED'})"
            lines.append(f"    {mean:5.2f}  {name}{wanted}")
        lost = sorted(
            ((one["ratio"], name, row["case"]["name"]) for row in rows
             for name, one in row["settings"][setting]["ratios"].items() if name.endswith("torch's") and one["ratio"] > 1),
            reverse=True,
        )  # fmt: skip
        lines.append(f"    slower than torch: {len(lost)} of {3 * len(rows)}")
        lines += [f"    {slower:5.2f}  {name}, {case}" for slower, name, case in lost]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gradients", description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both sides")
    parser.add_argument("--seconds", type=float, default=2.0, help="a layer, in each of the two ways")
    parser.add_argument("--only", default="", metavar="NAME", help="layers with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    torch = find_torch()
    known = {**environment(numpy_machine()), "threads": given.threads, "torch": None}
    del known["blas_threads"]  # it is set here
    if torch is not None:
        torch.set_num_threads(given.threads)
        known |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name, value in known.items():
        print(f"{name:<18}{value}")
    rows: list[dict[str, Any]] = []
    for case in (case for case in CASES if given.only in case.name):
        row = measure_case(torch, case, given.threads, given.seconds)
        if not rows:
            first = row["settings"][SETTINGS[0]]
            print("\nmilliseconds of: " + ", ".join(first["ways"]) + "\nratios: " + ", ".join(first["ratios"]))
        rows.append(row)
        print("\n".join(line(row, setting) for setting in SETTINGS), flush=True)
        record = {"environment": known, "means": {setting: means(rows, setting) for setting in SETTINGS}, "cases": rows}
        write_record(record, given.json)
    if not rows:
        print(f"no layer has {given.only!r} in its name", file=sys.stderr)
        return 2
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
