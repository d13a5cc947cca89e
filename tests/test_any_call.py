"""Any call of any public function returns what the naive reference computes, or its error names an argument.

A valid call is drawn, and then some of its arguments are replaced: by others that may fit, by arrays of another shape,
dtype or layout, by values that no call accepts.  Whatever the outcome, the call does not change its arguments, and a
refused call writes nothing into `out`.

The functions of `cupyconv.interop` are not drawn: the tests `test_interop_...` compare them with these functions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
import reference_recurrent
import reference_recurrent_gradients
from hypothesis import given
from hypothesis import strategies as st
from strategies import share_of_examples

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call.operation import _OPERATIONS

Arguments = dict[str, Any]

#: Names that are not operations on arrays: they print, look something up, or are a result.
OTHERS = {
    "ConvGradients",
    "ConvLayer",
    "Plan",
    "RecurrentGradients",
    "__version__",
    "clear_caches",
    "explain",
    "show_config",
}
FUNCTIONS = sorted(set(cupyconv.__all__) - OTHERS - {"vjp"})

# --- arguments that fit together ------------------------------------------------------------------------------------


def numbers(random: Random, *shape: int, dtype: Any = np.float64) -> np.ndarray:
    rng = np.random.default_rng(random.getrandbits(32))
    values = rng.integers(-2, 3, shape).astype(dtype)
    return values + 1j * rng.integers(-2, 3, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values


def fractions(random: Random, *shape: int, dtype: Any) -> np.ndarray:
    """Return numbers for a recurrent layer: its sums are not integers, and should not meet the kinks of activations."""
    return np.random.default_rng(random.getrandbits(32)).uniform(-1, 1, shape).astype(dtype)


def sizes(random: Random, rank: int, least: int, most: int) -> tuple[int, ...]:
    return tuple(random.randint(least, most) for _ in range(rank))


def split(random: Random, x: np.ndarray, axis: int) -> Any:
    """Return the array, or sometimes two parts of it, which a call merges."""
    if random.random() < 0.7 or x.shape[axis] < 2:
        return x
    return np.split(x, [random.randint(1, x.shape[axis] - 1)], axis)


def convolution(random: Random) -> Arguments:
    rank, groups = random.choice((1, 1, 2, 2, 3)), random.choice((1, 1, 2))
    inputs, outputs, kernel = random.randint(1, 2), random.randint(1, 2), sizes(random, rank, 1, 3)
    batch = random.choice(((), (1,), (2,)))
    spatial = tuple(k + random.randint(0, 3) for k in kernel)
    dtype = random.choice((np.float64, np.float64, np.float32, np.complex128))
    return {
        "x": split(random, numbers(random, *batch, groups * inputs, *spatial, dtype=dtype), len(batch)),
        "weight": numbers(random, groups * outputs, inputs, *kernel, dtype=dtype),
        "groups": groups,
        "stride": random.choice((1, 1, sizes(random, rank, 1, 2))),
        "padding": random.choice((0, 1, "same", "full", tuple((random.randint(0, 1), 1) for _ in range(rank)))),
        "dilation": 1,
    }


def prologue(random: Random, channels: int, dtype: Any = np.float64) -> tuple[Any, Any, Any]:
    """Return scale, shift and an activation that maps integers to integers; each may be None."""
    scale, shift = (numbers(random, channels, dtype=dtype) if random.random() < 0.7 else None for _ in range(2))
    return scale, shift, None if np.dtype(dtype).kind == "c" else random.choice((None, "relu", ("clip", -1, 2)))


def conv(random: Random) -> Arguments:
    case = convolution(random)
    weight, dtype = case["weight"], case["weight"].dtype
    if random.random() < 0.5:
        case["bias"] = numbers(random, len(weight), dtype=dtype)
    if dtype.kind == "f":
        case["activation"] = random.choice((None, "relu", "tanh", ("clip", -1, 2)))
    if random.random() < 0.4:
        case["prologue"] = prologue(random, case["groups"] * weight.shape[1], dtype)
    return case


def linmerge(random: Random) -> Arguments:
    shape, channels = (random.randint(1, 2), *sizes(random, random.randint(0, 2), 1, 4)), sizes(random, 2, 1, 3)
    xs = [numbers(random, shape[0], count, *shape[1:]) for count in channels]
    weight = numbers(random, random.randint(1, 3), sum(channels))
    optional = {"bias": numbers(random, len(weight)), "prologue": prologue(random, sum(channels))}
    optional = {name: value for name, value in optional.items() if random.random() < 0.4}
    return {"xs": xs, "weight": weight, "activation": "relu", **optional}


def conv_chain(random: Random) -> Arguments:
    channels, rank = sizes(random, 3, 1, 3), random.choice((1, 2))
    layers = [
        ConvLayer(
            numbers(random, after, before, *(3,) * rank),
            random.choice((None, numbers(random, after))),
            padding=1,
            activation=random.choice((None, "relu")),
            prologue=random.choice((None, None, prologue(random, before))),
        )
        for before, after in pairwise(channels)
    ]
    layers = [random.choice((layer, layer.packed())) for layer in layers]
    return {"x": numbers(random, 2, channels[0], *sizes(random, rank, 1, 6)), "layers": layers}


def conv_transpose(random: Random) -> Arguments:
    case = convolution(random)
    groups, kernel = case["groups"], case["weight"].shape[2:]
    images = case["x"] if isinstance(case["x"], list) else [case["x"]]
    channels = sum(x.shape[-1 - len(kernel)] for x in images)
    case["weight"] = numbers(random, channels, random.randint(1, 2), *kernel, dtype=case["weight"].dtype)
    case |= {"padding": 0, "groups": groups, "output_padding": 0, "stride": random.choice((1, 2))}
    if random.random() < 0.5:
        case["bias"] = numbers(random, groups * case["weight"].shape[1], dtype=case["weight"].dtype)
    return case


def gradient_of(random: Random) -> tuple[Arguments, np.ndarray]:
    """Return the settings and arrays of a convolution, and a gradient of its result."""
    case = convolution(random)
    if isinstance(case["x"], list):
        case["x"] = np.concatenate(case["x"], case["x"][0].ndim + 1 - case["weight"].ndim)
    result = reference.conv(**case)
    return case, numbers(random, *result.shape, dtype=case["weight"].dtype)


def conv_grad_input(random: Random) -> Arguments:
    case, grad = gradient_of(random)
    return {"grad": grad, "input_shape": case.pop("x").shape, **case}


def conv_grad_weight(random: Random) -> Arguments:
    case, grad = gradient_of(random)
    return {"grad": grad, "kernel_shape": case.pop("weight").shape[2:], **case}


def im2col(random: Random) -> Arguments:
    case = convolution(random)
    return {
        "x": case["x"],
        "kernel_shape": case["weight"].shape[2:],
        "stride": case["stride"],
        "padding": case["padding"],
    }


def col2im(random: Random) -> Arguments:
    case = im2col(random)
    x = case.pop("x")
    x = x[0] if isinstance(x, list) else x
    columns = reference.im2col(x, **case)
    return {"columns": numbers(random, *columns.shape), "spatial_shape": x.shape[-len(case["kernel_shape"]) :], **case}


def max_pool(random: Random) -> Arguments:
    return pooling(random) | {"return_indices": random.choice((True, False))}


def avg_pool(random: Random) -> Arguments:
    return pooling(random) | {
        "ceil_mode": random.choice((True, False)),
        "count_include_pad": random.choice((True, False)),
    }


def pooling(random: Random) -> Arguments:
    case = im2col(random)
    real = [x.real.copy() for x in (case["x"] if isinstance(case["x"], list) else [case["x"]])]
    return case | {"x": real if isinstance(case["x"], list) else real[0], "padding": 0}


def recurrent(gates: int) -> Callable[[Random], Arguments]:
    def draw(random: Random) -> Arguments:
        steps, batch, inputs, hidden = sizes(random, 4, 1, 4)
        direction = random.choice(("forward", "reverse", "bidirectional"))
        directions = (2,) if direction == "bidirectional" else ()
        dtype = random.choice((np.float64, np.float64, np.float32))
        case = {
            "x": fractions(random, steps, batch, inputs, dtype=dtype),
            **weights(random, gates, inputs, hidden, directions, dtype),
            "direction": direction,
        }
        if random.random() < 0.5:
            case["h0"] = fractions(random, len(directions) + 1, batch, hidden, dtype=dtype)
        if random.random() < 0.3:
            case["lengths"] = [random.randint(0, steps) for _ in range(batch)]
        return case

    return draw


def step(gates: int) -> Callable[[Random], Arguments]:
    def draw(random: Random) -> Arguments:
        batch, inputs, hidden = sizes(random, 3, 1, 4)
        dtype = random.choice((np.float64, np.float64, np.float32))
        case = {"x": fractions(random, batch, inputs, dtype=dtype)}
        case |= {state: fractions(random, batch, hidden, dtype=dtype) for state in ("hc" if gates == 4 else "h")}
        return case | weights(random, gates, inputs, hidden, (), dtype)

    return draw


def weights(random: Random, gates: int, inputs: int, hidden: int, directions: Sequence[int], dtype: Any) -> Arguments:
    """Return the weights of a recurrent layer, and some of its biases and peepholes."""
    rows = gates * hidden
    shapes = {"weight_ih": (rows, inputs), "weight_hh": (rows, hidden)}
    optional = {"bias_ih": (rows,), "bias_hh": (rows,)} | ({"peephole": (3 * hidden,)} if gates == 4 else {})
    shapes |= {name: shape for name, shape in optional.items() if random.random() < 0.5}
    return {name: fractions(random, *directions, *shape, dtype=dtype) for name, shape in shapes.items()}


def fold_batchnorm(random: Random) -> Arguments:
    outputs = random.randint(1, 3)
    statistics = {"mean": numbers(random, outputs), "var": numbers(random, outputs) ** 2}
    statistics |= {name: numbers(random, outputs) for name in ("gamma", "beta") if random.random() < 0.5}
    return {
        "weight": numbers(random, outputs, 2, 3),
        "bias": random.choice((None, numbers(random, outputs))),
        **statistics,
    }


def onnx_padding(random: Random) -> Arguments:
    return {"pads": random.choice((None, [1, 2], (0, 1, 2, 3))), "auto_pad": "NOTSET"}


def from_onnx_weights(random: Random) -> Arguments:
    op, gates = random.choice((("RNN", 1), ("LSTM", 4), ("GRU", 3)))
    directions, hidden = random.randint(1, 2), random.randint(1, 3)
    rows = gates * hidden
    shapes = {"W": (rows, 2), "R": (rows, hidden), "B": (2 * rows,)} | ({"P": (3 * hidden,)} if op == "LSTM" else {})
    needed = {name: shape for name, shape in shapes.items() if name in ("W", "R") or random.random() < 0.5}
    return {"op": op} | {name: numbers(random, directions, *shape) for name, shape in needed.items()}


def options(random: Random) -> Arguments:
    return {"workspace_limit": random.choice((None, 1000)), "threads": random.choice((None, 2)), "allow_tf32": False}


FITTING: dict[str, Callable[[Random], Arguments]] = {
    "avg_pool": avg_pool, "col2im": col2im, "conv": conv, "conv_chain": conv_chain, "conv_grad_input": conv_grad_input,
    "conv_grad_weight": conv_grad_weight, "conv_transpose": conv_transpose, "fold_batchnorm": fold_batchnorm,
    "from_onnx_weights": from_onnx_weights, "gru": recurrent(3), "gru_step": step(3), "im2col": im2col,
    "linmerge": linmerge, "lstm": recurrent(4), "lstm_step": step(4), "max_pool": max_pool,
    "onnx_padding": onnx_padding, "options": options, "rnn": recurrent(1), "rnn_step": step(1),
}  # fmt: skip

# --- arguments that may not fit ---------------------------------------------------------------------------------------

#: Parameter -> values that some call accepts.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "stride": (1, 2, (2,), (1, 2), [2, 1], np.int64(2)),
    "padding": (0, 1, 2, "same", "same_lower", "valid", "full", "causal", ((1, 0),), ((0, 1), (2, 0)), (1,), (1, 2)),
    "padding_mode": ("constant", "reflect", "symmetric", "edge", "wrap"),
    "dilation": (1, 2, (2,), (1, 2)),
    "groups": (1, 2, 3),
    "activation": (None, "relu", "leaky_relu", ("leaky_relu", 0.25), ("clip", -1, 1), "elu", "softplus", "sigmoid"),
    "activations": (("sigmoid", "tanh"), ("sigmoid", "tanh", "tanh"), ("relu", "relu"), ["tanh", "tanh", "relu"]),
    "method": ("auto", "direct", "gemm", "implicit_gemm", "winograd", "fft", "step", "persistent"),
    "prologue": (None, (None, None, "relu"), (np.ones(2), np.ones(2), None), (np.ones(1), None, "relu")),
    "kernel_shape": (1, 2, (2,), (1, 2), (2, 1)),
    "input_shape": ((1, 2, 5), (2, 5), [(1, 1, 4), (1, 1, 4)]),
    "spatial_shape": (4, (4,), (4, 3)),
    "output_shape": (None, 5, (5,), (6, 5)),
    "output_padding": (0, 1, (1,), (0, 1)),
    "direction": ("forward", "reverse", "bidirectional"),
    "lengths": (None, [1], [1, 1], np.array([1, 0]), [2, 1, 1]),
    "linear_before_reset": (True, False),
    "input_forget": (True, False),
    "clip": (None, 0.5, 1),
    "ceil_mode": (True, False),
    "return_indices": (True, False),
    "count_include_pad": (True, False),
    "fuse": ("auto", True, False),
    "eps": (1e-5, 0, 1.0),
    "transposed": (True, False),
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    "pads": (None, [0, 0], [1, 1, 1, 1]),
    "op": ("RNN", "LSTM", "GRU"),
    "workspace_limit": (None, 0, 10**9),
    "threads": (None, 1, 4),
    "allow_tf32": (True, False),
    "allow_winograd": (True, False),
    "allow_fft": (True, False),
    "layers": ([], [ConvLayer(np.ones((1, 1, 3)))], (ConvLayer(np.ones((2, 2, 1)), np.ones(2)),)),
}
#: Parameters that are arrays, or lists of arrays.
ARRAYS = {
    "x", "xs", "weight", "bias", "residual", "out", "grad", "columns", "weight_ih", "weight_hh", "bias_ih", "bias_hh",
    "h", "c", "h0", "c0", "peephole", "mean", "var", "gamma", "beta", "W", "R", "B", "P",
}  # fmt: skip
#: Values that no parameter accepts, or few.
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 7, 2**62, 1.5, np.nan, "", "nothing", b"same", (), (1,) * 9, [[1, 2], [3]], ((1, 2, 3),), {}, {1: 2},
    object(), len, np.float64(2), np.array(2), np.array([1, 2]), [None], (None, None, None), range(2), np.ma.ones((1, 2, 3)),
 "relu", ("relu", 1), ("clip", 3, 1), ("clip", "a", None), [np.ones((1, 1, 3)), None],
)  # fmt: skip


def other_array(random: Random, value: Any) -> Any:
    """Return an array that is similar to the given one."""
    if isinstance(value, (list, tuple)) and value and random.random() < 0.8:
        changed = list(value)
        place = random.randrange(len(changed))
        changed[place] = other_array(random, changed[place])
        return changed
    if not isinstance(value, np.ndarray) or random.random() < 0.1:
        shape = sizes(random, random.randint(0, 5), 0, 3)
        return numbers(random, *shape, dtype=random.choice((np.float64, np.float32, np.complex64, np.float16)))
    kind = random.randrange(10)
    axis = random.randrange(value.ndim) if value.ndim else 0
    if kind == 0:
        return value[..., None]
    if kind == 1:
        return value[0] if value.ndim and len(value) else value
    if kind == 2:
        return np.concatenate([value, value], axis) if value.ndim else value
    if kind == 3:
        return value.real.astype(random.choice((np.float16, np.float32, np.complex64, np.int32, bool, object, "S3")))
    if kind == 4:
        return np.moveaxis(np.moveaxis(value, axis, 0)[::-1], 0, axis) if value.ndim else value
    if kind == 5:
        return value.swapaxes(0, -1) if value.ndim else value
    if kind == 6:
        return np.take(value, range(0), axis) if value.ndim else value
    if kind == 7:
        return np.broadcast_to(value.ravel()[:1].reshape((1,) * value.ndim), value.shape) if value.size else value
    if kind == 8:
        return value.astype(value.dtype.newbyteorder())
    return value.tolist()


def replaced(random: Random, name: str, value: Any) -> Any:
    if random.random() < 0.3:
        return random.choice(STRANGE)
    return other_array(random, value) if name in ARRAYS else random.choice(PLAUSIBLE[name])


def any_call(random: Random, name: str) -> Arguments:
    """Return valid arguments of a function, of which none, one or two are replaced."""
    arguments = FITTING[name](random)
    if random.random() < 0.5:
        arguments |= like_the_results(random, name, arguments)
    for parameter in random.sample(sorted(parameters_of(name)), random.choice((0, 1, 1, 2))):
        arguments[parameter] = replaced(random, parameter, arguments.get(parameter))
    return arguments


def like_the_results(random: Random, name: str, arguments: Arguments) -> Arguments:
    """Return further valid arguments, with the shapes of the results: a residual, a cell state, and `out`."""
    result, parameters, more = run(name, arguments), parameters_of(name), {}
    if "residual" in parameters and random.random() < 0.5:
        more["residual"] = integers_like(random, result)
    if "c0" in parameters and random.random() < 0.7:
        more["c0"] = integers_like(random, result[1][1])
    if name == "conv_chain" and random.random() < 0.5:
        *layers, last = arguments["layers"]
        more["layers"] = [*layers, replace(last, residual=integers_like(random, result))]
    if "out" in parameters and random.random() < 0.6:
        memory = like(result)
        forms = (memory[0], memory, all_arrays(memory)) if name in CELLS else (memory,)  # y, (y, (h, c)), (y, h, c)
        more["out"] = memory[0] if returns_indices(name, arguments) else random.choice(forms)
    return more


def like(result: Any) -> Any:
    """Return memory for a result."""
    return [like(one) for one in result] if isinstance(result, (list, tuple)) else np.full_like(result, 77)


def integers_like(random: Random, result: Any) -> Any:
    """Return integers with the shapes and dtypes of a result."""
    if isinstance(result, (list, tuple)):
        return [integers_like(random, one) for one in result]
    return numbers(random, *result.shape, dtype=result.dtype)


def all_arrays(value: Any) -> list[Any]:
    """Return all arrays of a result, or of `out`, in a flat list."""
    if isinstance(value, (list, tuple)):
        return [array for one in value for array in all_arrays(one)]
    return [] if value is None else [value]


def returns_indices(name: str, arguments: Arguments) -> bool:
    """Return whether the result has indices, which have no gradient and no `out`."""
    return name == "max_pool" and arguments.get("return_indices") is True


def parameters_of(name: str) -> list[str]:
    return list(inspect.signature(getattr(cupyconv, name)).parameters)


# --- what they compute -------------------------------------------------------------------------------------------------

#: Parameters that do not change the values of a result.
HOW = {"method", "out", "fuse"}


def chained(x: Any, layers: Any) -> np.ndarray:
    for layer in layers:
        known = inspect.signature(reference.conv).parameters
        settings = {name: getattr(layer, name) for name in parameters_of("ConvLayer") if name in known}
        x = reference.conv(**transformed({"x": x, **settings}, layer.prologue))
    return x


def transformed(known: Arguments, prologue: Any) -> Arguments:
    """Return the arguments of the same convolution without a prologue, whose inputs are transformed before."""
    if prologue is None:
        return known
    images, axis = images_of(known)
    return known | {"xs" if "xs" in known else "x": reference.transformed(images, *prologue, axis=axis)}


def images_of(known: Arguments) -> tuple[list[np.ndarray], int]:
    """Return the inputs of a convolution, and the axis of their channels."""
    images = reference.sequence(known["xs"] if "xs" in known else known["x"])
    return images, 1 if "xs" in known else images[0].ndim + 1 - known["weight"].ndim


def max_pool_of(return_indices: bool = False, **arguments: Any) -> Any:
    pooled = reference_gradients.max_pool(**arguments)
    return (pooled, reference_gradients.max_pool_indices(**arguments)) if return_indices else pooled


def of_cell(cell: str) -> Callable[..., Any]:
    def sequence(**arguments: Any) -> Any:
        groups = take_activations(cell, arguments)
        result = reference_recurrent.recurrent(cell, **arguments, activations=groups if len(groups) == 2 else groups[0])
        return result.y, (result.h, result.c) if cell == "lstm" else result.h

    return sequence


def of_step(cell: str) -> Callable[..., Any]:
    def step(x: np.ndarray, h: np.ndarray, c: np.ndarray | None = None, **arguments: Any) -> Any:
        states = {"h0": h[None]} | ({} if c is None else {"c0": c[None]})
        _, last = of_cell(cell)(x=x[None], **states, **arguments)
        return last[0] if c is None else (last[0][0], last[1][0])

    return step


def take_activations(cell: str, arguments: Arguments) -> list[tuple[Any, ...]]:
    """Take the activations out of the arguments of a recurrent layer; return those of each direction."""
    default, directions = reference_recurrent.DEFAULTS[cell], 1 + (arguments.get("direction") == "bidirectional")
    given = arguments.pop("activation", default[0]) if cell == "rnn" else arguments.pop("activations", default)
    given = [given] if cell == "rnn" and is_one_activation(given) else given
    if len(given) == len(default) and all(map(is_one_activation, given)):
        return [tuple(given)] * directions
    return [(group,) if is_one_activation(group) else tuple(group) for group in given]


def is_one_activation(value: Any) -> bool:
    """Return whether this is one activation, a name or a tuple of a name and numbers, and not several activations."""
    if isinstance(value, (tuple, list)):
        return isinstance(value[0], str) and all(isinstance(number, (int, float)) for number in value[1:])
    return value is None or isinstance(value, str)


def from_onnx(op: str, W: np.ndarray, R: np.ndarray, B: np.ndarray | None = None, P: np.ndarray | None = None) -> Any:
    """Compute `from_onnx_weights`: exchange the parts of each gate, named as in ONNX, and split the biases."""
    theirs, ours = {"RNN": ("h", "h"), "LSTM": ("iofc", "ifco"), "GRU": ("zrh", "rzh")}[op]

    def exchanged(array: np.ndarray, theirs: str, ours: str) -> np.ndarray:
        part = dict(zip(theirs, np.split(array, len(theirs), axis=1)))
        result = np.concatenate([part[gate] for gate in ours], axis=1)
        return result if len(result) == 2 else result[0]

    weights = {"weight_ih": exchanged(W, theirs, ours), "weight_hh": exchanged(R, theirs, ours)}
    if B is not None:
        halves = np.split(B, 2, axis=1)
        weights |= {name: exchanged(half, theirs, ours) for name, half in zip(("bias_ih", "bias_hh"), halves)}
    return weights if P is None else weights | {"peephole": exchanged(P, "iof", "ifo")}


def settings_of(**given: Any) -> Arguments:
    defaults = inspect.signature(cupyconv.options).parameters
    return {name: parameter.default for name, parameter in defaults.items()} | given


REFERENCES: dict[str, Callable[..., Any]] = {
    "col2im": reference.col2im, "conv": reference.conv, "conv_chain": chained, "fold_batchnorm": reference.fold_batchnorm,
    "conv_grad_input": reference_gradients.conv_grad_input, "conv_grad_weight": reference_gradients.conv_grad_weight,
    "conv_transpose": reference_gradients.conv_transpose, "im2col": reference.im2col, "linmerge": reference.linmerge,
    "max_pool": max_pool_of, "avg_pool": reference_gradients.avg_pool, "onnx_padding": reference.onnx_padding,
    "from_onnx_weights": from_onnx, "options": settings_of,
    "rnn": of_cell("rnn"), "lstm": of_cell("lstm"), "gru": of_cell("gru"),
    "rnn_step": of_step("rnn"), "lstm_step": of_step("lstm"), "gru_step": of_step("gru"),
}  # fmt: skip


GRADIENTS: dict[str, Callable[..., Any]] = {
    "conv": reference_gradients.conv_gradients, "linmerge": reference_gradients.linmerge_gradients,
    "conv_transpose": reference_gradients.conv_transpose_gradients,
    "max_pool": reference_gradients.max_pool_gradients, "avg_pool": reference_gradients.avg_pool_gradients,
}  # fmt: skip
#: Functions whose results are y and the states after the last step.
CELLS = ("rnn", "lstm", "gru")


def expected_gradients(name: str, arguments: Arguments, grads: Sequence[Any]) -> Arguments:
    """Return the gradients of a function's arguments that the references compute, given those of its results."""
    known, prologue = as_the_reference_takes_them(arguments), arguments.get("prologue")
    with np.errstate(all="ignore"):
        if name in CELLS:
            return cell_gradients(name, known, grads)
        known.pop("return_indices", None)
        if prologue is None:
            return GRADIENTS[name](*grads, **known)._asdict()
        return gradients_through(prologue, known, GRADIENTS[name](*grads, **transformed(known, prologue))._asdict())


def cell_gradients(cell: str, known: Arguments, grads: Sequence[np.ndarray | None]) -> Arguments:
    groups = take_activations(cell, known)
    arrays = {name: known.pop(name, None) for name in reference_recurrent_gradients.Gradients._fields}
    grad_y, grad_h, grad_c = (*grads, None)[:3]
    _, gradients = reference_recurrent_gradients.recurrent_gradients(
        cell, (grad_y, grad_h, grad_c), arrays, activations=groups, **known
    )
    return gradients._asdict()


def gradients_through(prologue: Any, known: Arguments, gradients: Arguments) -> Arguments:
    """Return the gradients of a convolution with a prologue, given those of one with transformed inputs."""
    scale, shift, activation = prologue
    xs, axis = images_of(known)
    slopes = [
        reference_gradients.derivative(activation, u) for u in reference.transformed(xs, scale, shift, None, axis=axis)
    ]
    du = np.concatenate([dv * slope for dv, slope in zip(gradients["x"], slopes)], axis)
    image = np.concatenate([reference.wide(x) for x in xs], axis)
    others = tuple(other for other in range(image.ndim) if other != axis)
    column = (slice(None), *(None,) * (image.ndim - axis - 1))
    dx = du if scale is None else du * reference.wide(scale).conj()[column]
    images = np.split(dx, np.cumsum([x.shape[axis] for x in xs])[:-1], axis)
    images = [reference_gradients.real_where(x, one) for x, one in zip(xs, images)]
    of_vectors = {"scale": (scale, (du * image.conj()).sum(others)), "shift": (shift, du.sum(others))}
    gradients |= {
        name: None if vector is None else reference_gradients.real_where(vector, gradient)
        for name, (vector, gradient) in of_vectors.items()
    }
    listed = isinstance(known.get("xs", known.get("x")), (list, tuple))
    return gradients | {"x": images if listed else images[0]}


def plain(value: Any) -> Any:
    """Return NumPy scalars and bools as the Python numbers that the reference expects."""
    if isinstance(value, bool):
        return int(value)
    return (
        value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    )


def rank_of(known: Arguments) -> int:
    """Return the number of spatial axes, for a kernel shape that does not tell it."""
    if "columns" in known:
        return len(known["spatial_shape"])
    x = known["x"][0] if isinstance(known["x"], (list, tuple)) else known["x"]
    if "grad" in known:
        return x.ndim - 2 if known["grad"].ndim == x.ndim and x.shape[0] == known["grad"].shape[0] else x.ndim - 1
    return x.ndim - 2


def expected_of(name: str, arguments: Arguments) -> Any:
    """Return what the reference computes."""
    with np.errstate(all="ignore"):
        return REFERENCES[name](**transformed(as_the_reference_takes_them(arguments), arguments.get("prologue")))


def as_the_reference_takes_them(arguments: Arguments) -> Arguments:
    known = {key: plain(value) for key, value in arguments.items() if key not in HOW | {"prologue"}}
    if isinstance(known.get("spatial_shape"), int):
        rank = len(known["kernel_shape"]) if isinstance(known["kernel_shape"], (tuple, list)) else 1
        known["spatial_shape"] = (known["spatial_shape"],) * rank
    if isinstance(known.get("output_shape"), int):
        known["output_shape"] = (known["output_shape"],) * (known["weight"].ndim - 2)
    if isinstance(known.get("kernel_shape"), int):
        known["kernel_shape"] = (known["kernel_shape"],) * rank_of(known)
    return known


def assert_as_expected(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        assert_as_expected([actual[key] for key in expected], [*expected.values()])
    elif isinstance(expected, (list, tuple)) and not isinstance(actual, np.ndarray):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            assert_as_expected(one, other)
    elif isinstance(actual, np.ndarray):
        expected = np.asarray(expected)
        assert actual.shape == expected.shape
        digits = {"float16": 2e-2, "float32": 1e-4, "complex64": 1e-4}.get(actual.dtype.name, 1e-9)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(actual.astype(complex), expected.astype(complex), rtol=digits, atol=8 * digits)
    else:
        assert actual == expected


#: Functions that `vjp` accepts.
DIFFERENTIABLE = ("conv", "linmerge", "conv_transpose", "max_pool", "avg_pool", "rnn", "lstm", "gru")

# --- what holds for every call --------------------------------------------------------------------------------------

#: Argument -> names of its parts, which a message may use instead.
PARTS: dict[str, tuple[str, ...]] = {
    "prologue": ("scale", "shift", "activation"),
    "activations": ("activation",),
    "layers": (*parameters_of("ConvLayer"), "scale", "shift"),
    "weight": ("kernel",),
    "kernel_shape": ("kernel",),
}


def names_of(name: str) -> set[str]:
    """Return the names that a message may use: of a function's arguments, of their parts, and of settings."""
    arguments = parameters_of(name)
    return {
        *arguments,
        *(part for argument in arguments for part in PARTS.get(argument, ())),
        *parameters_of("options"),
    }


def held(value: Any) -> Any:
    """Return what must not change: the bytes of all arrays."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes() if value.dtype != object else repr(value)
    if isinstance(value, ConvLayer):
        return held(vars(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(held, value))
    return tuple(map(held, value.values())) if isinstance(value, dict) else repr(value)


def test_every_parameter_of_every_function_is_tried():
    assert set(FITTING) == set(FUNCTIONS)
    known = set(PLAUSIBLE) | ARRAYS
    assert {parameter for name in FUNCTIONS for parameter in parameters_of(name)} <= known
    assert {*parameters_of("ConvLayer")} < {*parameters_of("conv")}


def test_every_function_and_every_gradient_has_a_reference():
    assert set(REFERENCES) == set(FUNCTIONS) and {*GRADIENTS, *CELLS} == set(DIFFERENTIABLE)


#: Settings under which a call computes the same, or lacks workspace.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "workspace_limit": (None, None, 0, 500, 5000, 100_000),
    "threads": (None, 1, 2, 3),
    "allow_winograd": (True, False),
    "allow_fft": (True, False),
}


def any_settings(random: Random) -> Arguments:
    """Return the default settings half of the time, else random ones."""
    return {name: random.choice(values) for name, values in SETTINGS.items()} if random.random() < 0.5 else {}


def run(name: str, arguments: Arguments) -> Any:
    function = getattr(cupyconv, name)
    result = function(**arguments)
    if name == "options":
        with result as settings:
            return settings._asdict()
    return result


def refused(name: str, call: Callable[[], Any]) -> str | None:
    """Return the message of an error, which must name an argument; None if there is no error."""
    try:
        call()
    except (TypeError, ValueError) as refusal:
        assert names_of(name) & {*re.findall(r"\w+", str(refusal))}, f"names no argument: {refusal}"
        return str(refusal)
    return None


@pytest.mark.parametrize("name", FUNCTIONS)
@share_of_examples(0.2)
@given(st.randoms(use_true_random=False))
def test_any_call(name, random):
    """Under any settings a call equals the reference, or its error names an argument; `explain` refuses the same."""
    arguments, settings = any_call(random, name), any_settings(random)
    before, inputs = held(arguments), {key: value for key, value in arguments.items() if key != "out"}
    inputs_before, results = held(inputs), []
    with cupyconv.options(**settings):
        refusal = refused(name, lambda: results.append(run(name, arguments)))
        assert held(inputs) == inputs_before, "an argument has changed"
        if name in {function.__name__ for function in _OPERATIONS}:
            explained = refused(name, lambda: cupyconv.explain(getattr(cupyconv, name), **arguments))
            assert (explained is None) == (refusal is None), (explained, refusal)
    if refusal is not None:
        assert held(arguments) == before, "a refused call has written something"
        return
    (actual,), expected = results, expected_of(name, arguments)
    assert_as_expected(actual, expected)
    assert_written(arguments.get("out"), expected)


def assert_written(out: Any, expected: Any) -> None:
    """Check that the arrays of `out` hold the first results."""
    written = all_arrays(out)
    assert_as_expected(written, all_arrays(expected)[: len(written)])


@share_of_examples(0.4)
@given(st.randoms(use_true_random=False))
def test_any_layer(random):
    """A layer is refused only if `conv` refuses its arguments; a chain of it computes, and refuses, what `conv` does."""
    arguments = {key: value for key, value in any_call(random, "conv").items() if key not in ("method", "out")}
    before, layers, results = held(arguments), [], []
    of_layer = {key: value for key, value in arguments.items() if key != "x"}
    refusal_of_conv = refused("conv", lambda: run("conv", arguments))
    refusal = refused("ConvLayer", lambda: layers.append(ConvLayer(**of_layer)))
    if refusal is None:
        chain = {"x": arguments["x"], "layers": layers}
        refusal_of_chain = refused("conv_chain", lambda: results.append(run("conv_chain", chain)))
        assert (refusal_of_chain is None) == (refusal_of_conv is None), (refusal_of_chain, refusal_of_conv)
    else:
        assert refusal_of_conv is not None, refusal
    assert held(arguments) == before, "an argument has changed"
    for actual in results:
        assert_as_expected(actual, expected_of("conv", arguments))


def any_grads(random: Random, name: str, arguments: Arguments, result: Any) -> list[Any]:
    """Return gradients of a result, as a pullback takes them; for a recurrent layer some are None."""
    if name in CELLS:
        return [random.choice((None, integers_like(random, one))) for one in all_arrays(result)]
    return [integers_like(random, result[0] if returns_indices(name, arguments) else result)]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@share_of_examples(0.2)
@given(st.randoms(use_true_random=False))
def test_any_gradient(name, random):
    """`vjp` returns the function's value or is refused; gradients equal the reference's in the arguments' shapes."""
    arguments = {key: value for key, value in any_call(random, name).items() if key not in ("method", "out")}
    before, results = held(arguments), []
    function = getattr(cupyconv, name)
    if refused(name, lambda: results.append(cupyconv.vjp(function, **arguments))) is not None:
        assert held(arguments) == before
        return
    value, pullback = results[0]
    assert_as_expected(value, run(name, arguments))
    grads = any_grads(random, name, arguments, value)
    gradients = pullback(*grads)
    assert_gradients(gradients, expected_gradients(name, arguments, grads))
    for field, gradient in gradients._asdict().items():
        argument = arguments.get("xs" if (name, field) == ("linmerge", "x") else field)
        if gradient is None or argument is None:
            continue
        many = isinstance(argument, (list, tuple))
        assert isinstance(gradient, list) == many
        for one, other in zip(gradient, argument) if many else ((gradient, argument),):
            assert one.shape == other.shape and one.dtype.name == other.dtype.name
    assert held(arguments) == before, "an argument has changed"


def assert_gradients(gradients: Any, expected: Arguments) -> None:
    """Check each gradient, and that exactly those of absent arguments are None."""
    for field, actual in gradients._asdict().items():
        assert (actual is None) == (expected.get(field) is None), field
        assert_as_expected(actual, expected.get(field))
