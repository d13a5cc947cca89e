"""The problem of a recurrent layer, as ints: steps, samples, sizes, directions, and the function of its cell.

Gates are in PyTorch's order.

::

    rnn     1 gate        h' = f(W x + b + R h)
    lstm    i, f, g, o    c' = f * c + i * g          h' = o * act(c')
    gru     r, z, n       h' = (1 - z) * n + z * h    n = act(W x + b + r * (R h + b_h)), or R (r * h) + b_h inside
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cupyconv.problem.activations import Activation
from cupyconv.problem.arrays import Operand
from cupyconv.problem.plan import counted
from cupyconv.problem.problems import Problem

RECURRENT_METHODS = ("step", "persistent")

#: Number of gates of each cell.
GATES = {"rnn": 1, "lstm": 4, "gru": 3}

#: Directions in time of each `direction`: +1 begins at the first step, -1 at the last.
DIRECTIONS = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}


@dataclass(frozen=True, kw_only=True)
class RecurrentGeometry:
    """A recurrent layer over a sequence.

    Attributes
    ----------
    cell : str
        ``"rnn"``, ``"lstm"`` or ``"gru"``.
    steps, batch, inputs, hidden : int
        T, N, I and H.
    direction : str
        ``"forward"``, ``"reverse"`` or ``"bidirectional"``.
    activations : one tuple per direction
        For an rnn (f,); for a gru (f, g): gates, candidate; for an lstm (f, g, h): gates, candidate, cell.
    clip : float or None
        Bound of the gates' pre-activations.
    input_forget : bool
        Whether f is 1 - i in an lstm.
    linear_before_reset : bool
        Whether the reset gate of a gru multiplies the recurrent product instead of the state.
    """

    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    direction: str
    activations: tuple[tuple[Activation, ...], ...]
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = True

    @cached_property
    def signs(self) -> tuple[int, ...]:
        """The step through time in each direction."""
        return DIRECTIONS[self.direction]

    @cached_property
    def directions(self) -> int:
        return len(self.signs)

    @cached_property
    def gates(self) -> int:
        """Rows of the weights per hidden unit."""
        return GATES[self.cell]

    @property
    def keeps(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the buffers that a gradient needs from the forward pass, in the dtype of the computation.

        Each is indexed by the time steps of x.  ``gates`` holds the pre-activations.  ``cells`` holds the state of an
        lstm after each step.  ``candidate`` holds what the reset gate of a gru changed: R h + b_h of the candidate
        before the multiplication, or r * h after it.
        """
        each = (self.directions, self.steps, self.batch)
        kept: dict[str, tuple[int, ...]] = {"gates": (*each, self.gates * self.hidden)}
        if self.cell != "rnn":
            kept["cells" if self.cell == "lstm" else "candidate"] = (*each, self.hidden)
        return kept

    def sums(self, peephole: bool) -> int:
        """Rows of H sums over steps and samples from which the gradients of biases and peepholes are taken."""
        apart = self.cell == "gru" and self.linear_before_reset  # the candidate's two biases
        return self.gates + (1 if apart else 0) + (3 if peephole else 0)

    def __str__(self) -> str:
        return f"{self.cell} {self.inputs} -> {self.hidden}, {self.direction}, on {counted(self.steps, 'step')} x {counted(self.batch, 'sample')}"

    @cached_property
    def products(self) -> int:
        """Multiply-adds of all matrix products."""
        return self.directions * self.steps * self.batch * self.gates * self.hidden * (self.inputs + self.hidden)


#: Possible arguments and results of a recurrent layer.
_ROLES = ("x", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "h0", "c0", "peephole", "lengths", "out", "h", "c")


@dataclass(frozen=True, kw_only=True)
class LayerProblem(Problem):
    """A problem of a recurrent layer, in which each step waits for the previous one."""

    geometry: RecurrentGeometry

    @property
    def turns(self) -> int:
        return max(1, self.geometry.steps)


@dataclass(frozen=True, kw_only=True)
class RecurrentProblem(LayerProblem):
    """A recurrent layer over a sequence, or one step of it.

    Operands have the axes of the sequence: x (T, N, I), weights (D, G*H, I or H), biases (D, G*H), peephole (D, 3*H),
    states (D, N, H), out (T, N, D*H), lengths (N,), and `kept` as in `RecurrentGeometry.keeps`.
    """

    x: Operand
    weight_ih: Operand
    weight_hh: Operand
    out: Operand
    h: Operand | None = None  # the last state; for a single step, `out` is the last state
    c: Operand | None = None  # the last cell state of an lstm
    bias_ih: Operand | None = None
    bias_hh: Operand | None = None
    h0: Operand | None = None
    c0: Operand | None = None
    peephole: Operand | None = None
    lengths: Operand | None = None
    kept: tuple[Operand, ...] = ()  # what a gradient needs: gates, cells, candidate
    method: str = "auto"

    @property
    def dtype(self) -> str:
        """Dtype of the result."""
        return self.out.dtype

    @property
    def operands(self) -> dict[str, Operand]:
        """All present arguments and results by role."""
        given = {role: getattr(self, role) for role in _ROLES if getattr(self, role) is not None}
        return {**given, **dict(zip(self.geometry.keeps, self.kept))}

    @property
    def arrays(self) -> Iterable[Operand]:
        return self.operands.values()

    @property
    def flops(self) -> int:
        return 2 * self.geometry.products

    @property
    def title(self) -> str:
        return str(self.geometry)

    @property
    def result(self) -> str:
        return f"{self.dtype} {self.out.shape}"


@dataclass(frozen=True, kw_only=True)
class RecurrentGradientProblem(LayerProblem):
    """The gradients of a recurrent layer; operands have the axes that `RecurrentProblem` gives them."""

    dtype: str  # dtype of the computation and of the results
    arguments: tuple[Operand, ...]
    results: tuple[Operand, ...]

    @cached_property
    def operands(self) -> dict[str, Operand]:
        """Arguments and results by name."""
        return {operand.name: operand for operand in self.arrays}

    @property
    def arrays(self) -> Iterable[Operand]:
        return (*self.arguments, *self.results)

    @property
    def flops(self) -> int:
        """One product with each weight, and one for its gradient."""
        return 4 * self.geometry.products

    @property
    def title(self) -> str:
        return f"gradients of {self.geometry}"

    @property
    def result(self) -> str:
        return f"{self.dtype} {', '.join(f'{operand.name} {operand.shape}' for operand in self.results)}"
