"""Backpropagation through time: gradients of a recurrent layer, one run of steps after the other.

::

    all steps of a run at once    factors from the state's gradient to each gate's gradient; h and c before each step
    step by step, backwards       state's gradient -> gates' gradients (in place) -> product with weight_hh
    all steps of a run at once    products and sums: weights, x, biases, peepholes

Activations and their derivatives do not depend on the incoming gradient, so they are computed before the loop over
steps.  The loop itself has only multiplications in place and one product, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate, derivative
from cupyconv.numpy.backend import NumpyStep
from cupyconv.problem.activations import Activation, derivative_from_result
from cupyconv.problem.arrays import ITEMSIZE, c_strides, dtype_from_name
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.recurrence import RecurrentGradientProblem

#: Arrays of (N, H) per step of a run, in addition to the gates' gradients: first the states before the steps and the
#: factors of gradients, then the temporaries with which these are computed.
_ARRAYS_PER_STEP = {"rnn": 1 + 5, "lstm": 4 + 9, "gru": 3 + 9}
#: Arrays of (N, H) that persist from step to step: gradients of states, copies of these, and products.
_LASTING_ARRAYS = {"rnn": 2, "lstm": 4, "gru": 3}
#: Bytes of one product that is added to a weight's gradient.
PRODUCT_BYTES = 1 << 19


def plan_recurrent_gradient(problem: RecurrentGradientProblem) -> Plan:
    """Plan the gradient; ValueError if one step of one sample exceeds the workspace limit."""
    step, sizes = _fitting(problem)
    return problem.planned(
        (step,),
        sizes,
        method="step",
        reason="activations and derivatives of many steps at once, then backward step by step",
    )


@dataclass(frozen=True)
class RecurrentGradientStep(NumpyStep):
    """Backpropagation through time, one direction after the other.

    The gates' gradients of `run_steps` steps and `samples` samples are in memory at once.  Their factors are computed
    for the whole run first.  Products with the weights and x are computed for the whole run last, and are added to
    those of other runs `product_rows` rows at a time.
    """

    problem: RecurrentGradientProblem
    samples: int
    run_steps: int
    product_rows: int

    def __str__(self) -> str:
        geometry, dtype = self.problem.geometry, self.problem.dtype
        runs = -(-geometry.steps // max(1, self.run_steps))
        return (
            f"loop     backward {geometry.cell} in {dtype}: {counted(geometry.directions, 'direction')}, {counted(runs, 'run')}"
            f" of {counted(self.run_steps, 'step')} x {counted(self.samples, 'sample')}; derivatives, then one product per step, then products of a whole run"
        )

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Write the gradients; the direction is the first axis of `arrays`.

        The results are ``grad_x``, ``grad_weight_ih``, ``grad_weight_hh``, ``grad_h0``, ``grad_c0`` of an lstm, and
        ``sums``.  ``sums`` has sums over all samples and steps: of the gates' gradients, then of the gradient of a gru
        candidate's recurrent product, or of the gates' gradients times the states that peepholes read.
        """
        geometry = self.problem.geometry
        gru = _Gru if geometry.linear_before_reset else _ResetFirst
        direction = {"rnn": _Rnn, "lstm": _Lstm, "gru": gru}[geometry.cell]
        arrays["sums"][...] = 0
        if not geometry.steps or not geometry.batch:
            for name in ("grad_weight_ih", "grad_weight_hh"):
                arrays[name][...] = 0
        for d in range(geometry.directions):
            for first in range(0, geometry.batch, max(1, self.samples)):
                part = _samples(arrays, slice(first, first + self.samples))
                direction(self, part, d, begins=first == 0).run()


def _fitting(problem: RecurrentGradientProblem) -> tuple[RecurrentGradientStep, dict[str, int]]:
    """Return the step, and the bytes of its memory by purpose.

    It has all samples, or a part of them for which one step fits the limit, and then as many steps as fit.
    """
    geometry, item = problem.geometry, ITEMSIZE[problem.dtype]
    gates, hidden, inputs = geometry.gates * geometry.hidden, geometry.hidden, geometry.inputs
    x_copies = 1 + (geometry.directions == 2)  # x with zeros past each length; and a product to be added
    width = max(1, inputs, hidden) * item
    sizes = {"weights": _copied_weights(problem), "product": min(gates * width, max(PRODUCT_BYTES, width))}
    samples = geometry.batch
    while True:
        per_step = samples * (gates + _ARRAYS_PER_STEP[geometry.cell] * hidden + x_copies * inputs) * item
        sizes["states"] = _LASTING_ARRAYS[geometry.cell] * samples * hidden * item
        limit = problem.limit_with(sizes["weights"])
        left = limit - sum(sizes.values()) - Plan.ALIGNMENT * (len(sizes) + 1)
        run_steps = min(geometry.steps, left // per_step) if per_step else geometry.steps
        if run_steps >= min(1, geometry.steps):
            break
        if samples <= 1:
            least = limit - left + per_step
            raise problem.does_not_fit("one step of one sample", least, limit)
        samples = even_part(geometry.batch, samples // 2)
    run_steps = even_part(geometry.steps, run_steps)
    sizes["run of steps"] = run_steps * per_step
    return RecurrentGradientStep(problem, samples, run_steps, max(1, PRODUCT_BYTES // width)), sizes


def _copied_weights(problem: RecurrentGradientProblem) -> int:
    """Bytes of one direction's weights that are copied because they have another dtype or are not in C order."""
    weights = (problem.operands[name] for name in ("weight_ih", "weight_hh"))
    return sum(
        prod(weight.shape[1:]) * ITEMSIZE[problem.dtype]
        for weight in weights
        if weight.dtype != problem.dtype or weight.strides != c_strides(weight.shape)
    )


#: The sample axis of each array that has one.
_AXES = {
    "x": 1, "y": 1, "h0": 1, "c0": 1, "lengths": 0, "gates": 2, "cells": 2, "candidate": 2, "grad_y": 1, "grad_h": 1,
    "grad_c": 1, "grad_x": 1, "grad_h0": 1, "grad_c0": 1,
}  # fmt: skip


def _samples(arrays: Mapping[str, Any], samples: slice) -> dict[str, Any]:
    """Select a part of the samples from each array."""
    return {
        name: array[(slice(None),) * _AXES[name] + (samples,)] if name in _AXES else array
        for name, array in arrays.items()
    }


class _Direction:
    """One direction of a layer for some samples; the base of all cells.

    If it `begins`, its first run writes the weights' gradients.  All other runs add to them.
    """

    def __init__(self, step: RecurrentGradientStep, arrays: Mapping[str, Any], d: int, begins: bool) -> None:
        self.geometry, self.arrays, self.d = step.problem.geometry, arrays, d
        self.begins, self.product_rows = begins, step.product_rows
        self.steps, self.batch, self.hidden = self.geometry.steps, arrays["x"].shape[1], self.geometry.hidden
        self.sign = self.geometry.signs[d]
        self.dtype = dtype_from_name(step.problem.dtype)
        self.activations = self.geometry.activations[d]
        self.most = min(step.run_steps, self.steps)  # most steps of a run
        self.lengths = arrays["lengths"] if "lengths" in arrays else np.full(self.batch, self.steps)
        self.shortest = int(self.lengths.min(initial=self.steps))
        self.weight_ih, self.weight_hh = (
            np.ascontiguousarray(arrays[name][d], self.dtype) for name in ("weight_ih", "weight_hh")
        )
        columns = slice(d * self.hidden, (d + 1) * self.hidden)
        self.y = arrays["y"][:, :, columns]
        self.grad_y = arrays["grad_y"][:, :, columns] if "grad_y" in arrays else None
        #: The gradient of h after the step that is processed next.
        self.back = self._begun("h")
        self.of_gates = self.run_of(self.geometry.gates * self.hidden)
        self.previous = self.run_of(self.hidden)  # h before each step
        self.state_gradient, self.kept_back = self.of_step(), self.of_step()
        self.none_left = np.empty(self.batch, bool)  # samples that end before a step

    def run_of(self, columns: int) -> np.ndarray:
        """Allocate memory for a run of steps."""
        return np.empty((self.most, self.batch, columns), self.dtype)

    def of_step(self) -> np.ndarray:
        return np.empty((self.batch, self.hidden), self.dtype)

    def _begun(self, state: str) -> np.ndarray:
        """The array for the initial state's gradient, set to the gradient of the last state."""
        back = self.arrays[f"grad_{state}0"][self.d]
        given = self.arrays.get(f"grad_{state}")
        back[...] = 0 if given is None else given[self.d]
        return back

    def run(self) -> None:
        for first, end in self.runs():
            self.prepare(first, end)
            for t in range(first, end)[:: -self.sign]:
                self.step_back(t, t - first)
            self.add_products(first, end, self.rows(self.of_gates, first, end))
            self.begins = False

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield runs of steps, in the order of backpropagation."""
        starts = range(0, self.steps, max(1, self.most))
        for start in starts:
            end = min(start + self.most, self.steps)
            yield (start, end) if self.sign < 0 else (self.steps - end, self.steps - start)

    # All steps of a run at once.

    def prepare(self, first: int, end: int) -> None:
        """Fill `of_gates` with the factors of each gate's gradient, and `previous` with h before each step."""
        self.states_before(self.previous, self.y, "h0", first, end)
        gates = self.arrays["gates"][self.d, first:end]
        gates = gates.reshape(end - first, self.batch, self.geometry.gates, self.hidden)
        self.weigh(gates, self.of_gates[: end - first].reshape(gates.shape), first, end)

    def weigh(self, gates: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        raise NotImplementedError

    def states_before(self, before: np.ndarray, states: np.ndarray, initial: str, first: int, end: int) -> None:
        """Fill `before` with the state before each step."""
        start = self.arrays[initial][self.d] if initial in self.arrays else 0
        for k, t in enumerate(range(first, end)):
            earlier = t - self.sign
            before[k] = states[earlier] if 0 <= earlier < self.steps else start
            if self.sign < 0 and t + 1 >= self.shortest:
                np.copyto(before[k], start, where=(self.lengths == t + 1)[:, None])
        self.leave_out(before, first, end)

    def leave_out(self, run: np.ndarray, first: int, end: int) -> None:
        """Write zeros at steps past a sample's length, whatever was there."""
        for t in range(max(first, self.shortest), end):
            run[t - first][self.lengths <= t] = 0

    def value_and_slope(self, gate: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
        """An activation's value and derivative; the derivative is 0 where the argument was clipped."""
        value = gate.copy()
        activate(value, activation)
        slope = _slope(gate, value, activation)
        clip = self.geometry.clip
        if clip is not None:
            slope[np.abs(gate) >= self.dtype.type(clip)] = 0
        return value, slope

    def add_products(self, first: int, end: int, of_gates: np.ndarray) -> None:
        """Add everything that is linear in the gates' gradients of a run."""
        self.add("grad_weight_ih", of_gates.T, self.inputs(first, end))
        of_x = self.arrays["grad_x"][first:end]
        left = of_gates.reshape(*of_x.shape[:2], of_gates.shape[1])
        if of_x.flags.c_contiguous:  # all samples are one matrix
            of_x, left = of_x.reshape(len(of_gates), of_x.shape[2]), of_gates
        if self.d:
            of_x += left @ self.weight_ih
        else:
            np.matmul(left, self.weight_ih, out=of_x)
        self.add_sums(0, of_gates)
        self.add_recurrent_products(first, end, of_gates)

    def add_recurrent_products(self, first: int, end: int, of_gates: np.ndarray) -> None:
        self.add("grad_weight_hh", of_gates.T, self.rows(self.previous, first, end))

    def add(self, name: str, a: np.ndarray, b: np.ndarray, rows: slice = slice(None)) -> None:
        """Write the product to rows of this result, or add it, some rows at a time."""
        result = self.arrays[name][self.d, rows]
        if self.begins:
            np.matmul(a, b, out=result)
            return
        for first in range(0, len(result), self.product_rows):
            part = slice(first, first + self.product_rows)
            result[part] += a[part] @ b

    def add_sums(self, row: int, columns: np.ndarray) -> None:
        """Add the sum of each column, as a product with ones: BLAS reads a matrix faster than NumPy adds it."""
        sums = self.arrays["sums"][self.d].reshape(-1)[row * self.hidden :][: columns.shape[1]]
        sums += np.ones(len(columns), self.dtype) @ columns

    def rows(self, run: np.ndarray, first: int, end: int) -> np.ndarray:
        return run[: end - first].reshape((end - first) * self.batch, run.shape[2])

    def inputs(self, first: int, end: int) -> np.ndarray:
        """x of these steps as rows, with zeros past each sample's length."""
        x = self.arrays["x"][first:end].astype(self.dtype, copy=self.shortest < end)
        self.leave_out(x, first, end)
        return x.reshape((end - first) * self.batch, self.geometry.inputs)

    # Step by step.

    def step_back(self, t: int, k: int) -> None:
        """Compute the gates' gradients at time t, the k-th step of the run, and the gradient of the state before it."""
        if t < self.shortest:
            self.step(k, self.state_gradient_at(t))
            return
        np.less_equal(self.lengths, t, out=self.none_left)
        unreached = self.none_left[:, None]
        with_initial = self.carried()
        for kept, carried in with_initial:
            kept[...] = carried
        self.step(k, self.state_gradient_at(t))
        for gradients in self.written():
            np.copyto(gradients[k], 0, where=unreached)
        for kept, carried in with_initial:
            np.copyto(carried, kept, where=unreached)

    def state_gradient_at(self, t: int) -> np.ndarray:
        """The gradient of h after the step at time t."""
        if self.grad_y is None:
            self.state_gradient[...] = self.back
            return self.state_gradient
        return np.add(self.back, self.grad_y[t], out=self.state_gradient)

    def step(self, k: int, of_h: np.ndarray) -> None:
        raise NotImplementedError

    def carried(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Gradients that a sample carries unchanged through steps past its length, each with memory for a copy."""
        return [(self.kept_back, self.back)]

    def written(self) -> list[np.ndarray]:
        """Gradients that are 0 at steps past a sample's length."""
        return [self.of_gates]


class _Rnn(_Direction):
    def weigh(self, gates: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        weights[:, :, 0] = self.value_and_slope(gates[:, :, 0], self.activations[0])[1]

    def step(self, k: int, of_h: np.ndarray) -> None:
        self.of_gates[k] *= of_h
        np.matmul(self.of_gates[k], self.weight_hh, out=self.back)


class _Lstm(_Direction):
    """::

    of_c += of_h * o * act'(c)          of_o = of_h * act(c) * o'           with a peephole, of_c += of_o * p_o
    of_i, of_f, of_g = of_c * (g i', c_before f', i g')                     of_c of the step before: of_c * f
    """

    def __init__(self, step: RecurrentGradientStep, arrays: Mapping[str, Any], d: int, begins: bool) -> None:
        super().__init__(step, arrays, d, begins)
        self.back_c = self._begun("c")
        self.cells_before, self.forget, self.to_cell = (self.run_of(self.hidden) for _ in range(3))
        self.kept_back_c, self.product = self.of_step(), self.of_step()
        self.peephole = None
        if "peephole" in arrays:
            self.peephole = arrays["peephole"][d].astype(self.dtype).reshape(3, self.hidden)

    def weigh(self, gates: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        f_gates, f_candidate, f_cell = self.activations
        count = end - first
        cells = self.arrays["cells"][self.d]
        self.states_before(self.cells_before, cells, "c0", first, end)
        before, forget, to_cell = self.cells_before[:count], self.forget[:count], self.to_cell[:count]
        i, slope_i = self.value_and_slope(gates[:, :, 0], f_gates)
        g, slope_g = self.value_and_slope(gates[:, :, 2], f_candidate)
        np.multiply(i, slope_g, out=weights[:, :, 2])
        if self.geometry.input_forget:
            np.subtract(1, i, out=forget)
            g -= before
            weights[:, :, 1] = 0
        else:
            forget[...], slope = self.value_and_slope(gates[:, :, 1], f_gates)
            np.multiply(before, slope, out=weights[:, :, 1])
        np.multiply(g, slope_i, out=weights[:, :, 0])
        o, slope_o = self.value_and_slope(gates[:, :, 3], f_gates)
        value = cells[first:end].copy()
        activate(value, f_cell)
        np.multiply(value, slope_o, out=weights[:, :, 3])
        np.multiply(o, _slope(cells[first:end], value, f_cell), out=to_cell)

    def step(self, k: int, of_h: np.ndarray) -> None:
        gates = self.of_gates[k].reshape(self.batch, 4, self.hidden)
        of_i, of_f, of_o = gates[:, 0], gates[:, 1], gates[:, 3]
        of_c, product = self.back_c, self.product
        of_o *= of_h
        of_c += np.multiply(of_h, self.to_cell[k], out=product)
        if self.peephole is not None:
            of_c += np.multiply(of_o, self.peephole[2], out=product)
        gates[:, :3] *= of_c[:, None]
        of_c *= self.forget[k]
        if self.peephole is not None:
            of_c += np.multiply(of_i, self.peephole[0], out=product)
            of_c += np.multiply(of_f, self.peephole[1], out=product)
        np.matmul(self.of_gates[k], self.weight_hh, out=self.back)

    def carried(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [*super().carried(), (self.kept_back_c, self.back_c)]

    def add_recurrent_products(self, first: int, end: int, of_gates: np.ndarray) -> None:
        super().add_recurrent_products(first, end, of_gates)
        if self.peephole is None:
            return
        gates = of_gates.reshape(end - first, self.batch, 4, self.hidden)
        cells = self.arrays["cells"][self.d, first:end]
        for row, gate, read in (
            (4, 0, self.cells_before[: end - first]),
            (5, 1, self.cells_before[: end - first]),
            (6, 3, cells),
        ):
            products = gates[:, :, gate] * read
            self.leave_out(products, first, end)
            self.add_sums(row, self.rows(products, first, end))


class _Gru(_Direction):
    """The reset gate multiplies the recurrent product q = R h + b.

    ::

        of_n = of_h * (1 - z) n'     of_z = of_h * (h_before - n) z'     of_q = of_n * r     of_r = of_n * q r'
        of h before:  of_h * z + of_r R_r + of_z R_z + of_q R_n
    """

    def __init__(self, step: RecurrentGradientStep, arrays: Mapping[str, Any], d: int, begins: bool) -> None:
        super().__init__(step, arrays, d, begins)
        self.update, self.reset = self.run_of(self.hidden), self.run_of(self.hidden)
        self.product = self.of_step()
        self.weight_rz, self.weight_n = np.split(self.weight_hh, [2 * self.hidden])

    def weigh(self, gates: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        count = end - first
        f_gates, f_candidate = self.activations
        r, slope_r = self.value_and_slope(gates[:, :, 0], f_gates)
        z, slope_z = self.value_and_slope(gates[:, :, 1], f_gates)
        n, slope_n = self.value_and_slope(gates[:, :, 2], f_candidate)
        self.update[:count] = z
        np.subtract(self.previous[:count], n, out=n)
        np.multiply(n, slope_z, out=weights[:, :, 1])
        np.subtract(1, z, out=z)
        np.multiply(z, slope_n, out=weights[:, :, 2])
        self.weigh_reset(r, slope_r, weights, first, end)

    def weigh_reset(self, r: np.ndarray, slope: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        np.multiply(weights[:, :, 2], r, out=self.reset[: end - first])
        slope *= self.arrays["candidate"][self.d, first:end]
        np.multiply(weights[:, :, 2], slope, out=weights[:, :, 0])

    def step(self, k: int, of_h: np.ndarray) -> None:
        self.of_gates[k].reshape(self.batch, 3, self.hidden)[...] *= of_h[:, None]
        self.reset[k] *= of_h  # of_q from here on
        of_h *= self.update[k]
        np.matmul(self.of_gates[k][:, : 2 * self.hidden], self.weight_rz, out=self.back)
        self.back += of_h
        self.back += np.matmul(self.reset[k], self.weight_n, out=self.product)

    def written(self) -> list[np.ndarray]:
        return [self.of_gates, self.reset]

    def add_recurrent_products(self, first: int, end: int, of_gates: np.ndarray) -> None:
        hidden, previous = self.hidden, self.rows(self.previous, first, end)
        of_q = self.rows(self.reset, first, end)
        self.add("grad_weight_hh", of_gates[:, : 2 * hidden].T, previous, slice(2 * hidden))
        self.add("grad_weight_hh", of_q.T, previous, slice(2 * hidden, None))
        self.add_sums(3, of_q)


class _ResetFirst(_Gru):
    """The reset gate multiplies the state: two dependent products per step.

    ::

        of_rh = of_n R_n     of_r = of_rh * h_before r'     of h before:  of_h * z + of_rh * r + of_r R_r + of_z R_z
    """

    def weigh_reset(self, r: np.ndarray, slope: np.ndarray, weights: np.ndarray, first: int, end: int) -> None:
        self.reset[: end - first] = r
        np.multiply(self.previous[: end - first], slope, out=weights[:, :, 0])

    def step(self, k: int, of_h: np.ndarray) -> None:
        gates = self.of_gates[k].reshape(self.batch, 3, self.hidden)
        gates[:, 1:] *= of_h[:, None]
        of_reset = np.matmul(gates[:, 2], self.weight_n, out=self.product)
        gates[:, 0] *= of_reset
        of_reset *= self.reset[k]
        of_h *= self.update[k]
        np.matmul(self.of_gates[k][:, : 2 * self.hidden], self.weight_rz, out=self.back)
        self.back += of_h
        self.back += of_reset

    def written(self) -> list[np.ndarray]:
        return [self.of_gates]

    def add_recurrent_products(self, first: int, end: int, of_gates: np.ndarray) -> None:
        hidden, previous = self.hidden, self.rows(self.previous, first, end)
        read = self.arrays["candidate"][self.d, first:end].copy()  # r * h
        self.leave_out(read, first, end)
        self.add("grad_weight_hh", of_gates[:, : 2 * hidden].T, previous, slice(2 * hidden))
        read = self.rows(read, first, end)
        self.add("grad_weight_hh", of_gates[:, 2 * hidden :].T, read, slice(2 * hidden, None))


def _slope(argument: np.ndarray, value: np.ndarray, activation: Activation) -> np.ndarray:
    """The derivative of an activation at `argument`; `value` is the activation itself there."""
    if not activation:
        return np.ones_like(argument)
    return derivative(value if derivative_from_result(activation) else argument, activation).astype(
        argument.dtype, copy=False
    )
