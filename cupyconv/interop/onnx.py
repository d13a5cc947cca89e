"""ONNX's models as functions of arrays, and ONNX's operators of convolution, pooling and recurrent layers.

A model, on NumPy or with ``xp=cupy`` on CuPy arrays, planned once and fused where it can be::

    from cupyconv.interop.onnx import load

    run = load("model.onnx")
    y = run(x=image)
    print(run.explain())

A model in ONNX's own evaluator, whose reference brings every other operator::

    import onnx
    from onnx.reference import ReferenceEvaluator
    from cupyconv.interop.onnx import operators

    session = ReferenceEvaluator(onnx.load("model.onnx"), new_ops=operators())
    (y,) = session.run(None, {"x": x})

The evaluator computes with NumPy arrays.  An engine of your own runs a node, on NumPy or CuPy arrays, by
``OPERATORS[node.op_type](*inputs, **attributes, outputs=len(node.output))``: inputs are positional, an absent one is
None, attributes are keywords with ONNX's names and defaults, and strings are `str`.  The answer is a tuple of `outputs`
arrays.  `load` and `operators` need the package onnx.

The newest definition of each operator is meant, which those before agree with where they say the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

import cupyconv
from cupyconv.call.dispatch import backend_for
from cupyconv.ops.onnx import from_onnx_weights, onnx_padding
from cupyconv.typing import Array

if TYPE_CHECKING:
    from cupyconv.interop.onnx_model import Model

#: A sequence of ints, as ONNX's attributes have it.
Ints = Sequence[int]
Outputs = tuple[Array, ...]

#: How many parameters an activation of ONNX's recurrent operators takes: alpha, or alpha and beta.
_PARAMETERS = {"LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1, "HardSigmoid": 2, "ScaledTanh": 2, "Affine": 2}


def Conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    outputs: int = 1,
) -> Outputs:
    """`cupyconv.conv`."""
    windows = _windows(strides, pads, auto_pad, dilations)
    return (cupyconv.conv(X, W, B, **windows, groups=group),)


def ConvTranspose(
    X: Array,
    W: Array,
    B: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    outputs: int = 1,
) -> Outputs:
    """`cupyconv.conv_transpose`; a given `output_shape` overrides `pads`."""
    windows = _windows(strides, None if output_shape else pads, auto_pad, dilations)
    size = tuple(output_shape) if output_shape else None
    extra = tuple(output_padding) if output_padding else 0
    return (cupyconv.conv_transpose(X, W, B, **windows, groups=group, output_padding=extra, output_shape=size),)


def MaxPool(
    X: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
    outputs: int = 1,
) -> Outputs:
    """`cupyconv.max_pool`; of 8-bit integers in float32, which holds them all."""
    floating = X.astype("float32") if X.dtype.kind in "iu" else X
    windows = _windows(strides, pads, auto_pad, dilations)
    settings = {"kernel_shape": tuple(kernel_shape), "ceil_mode": bool(ceil_mode), **windows}
    if outputs == 1:
        y: Array = cupyconv.max_pool(floating, **settings)
        return (y.astype(X.dtype, copy=False),)
    y, indices = cupyconv.max_pool(floating, **settings, return_indices=True)
    return y.astype(X.dtype, copy=False), _over_all_images(indices, X.shape[2:], bool(storage_order))


def AveragePool(
    X: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    outputs: int = 1,
) -> Outputs:
    """`cupyconv.avg_pool`."""
    settings = {"kernel_shape": tuple(kernel_shape), **_windows(strides, pads, auto_pad, dilations)}
    counts = bool(count_include_pad)
    return (cupyconv.avg_pool(X, **settings, ceil_mode=bool(ceil_mode), count_include_pad=counts),)


def GlobalAveragePool(X: Array, *, outputs: int = 1) -> Outputs:
    """The mean of each channel of each sample."""
    return (X.mean(tuple(range(2, X.ndim)), keepdims=True),)


def BatchNormalization(
    X: Array,
    scale: Array,
    B: Array,
    input_mean: Array,
    input_var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    outputs: int = 1,
) -> Outputs:
    """One multiplication and one addition for each element; with `training_mode` of the statistics of X itself."""
    across = (0, *range(2, X.ndim))
    mean, var = input_mean, input_var
    wide = X.astype("float32") if X.dtype.itemsize == 2 else X
    if training_mode:
        mean, var = wide.mean(across), wide.var(across)
    factor = scale / (var + epsilon) ** 0.5
    by_channel = (-1, *(1,) * (X.ndim - 2))
    y = wide * factor.reshape(by_channel)
    y += (B - mean * factor).reshape(by_channel)
    running = [kept * momentum + now * (1 - momentum) for kept, now in ((input_mean, mean), (input_var, var))]
    kept = (statistic.astype(input_mean.dtype, copy=False) for statistic in running)
    return (y.astype(X.dtype, copy=False), *kept)[:outputs]


def Col2Im(
    input: Array,
    image_shape: Iterable[Any],
    block_shape: Iterable[Any],
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    outputs: int = 1,
) -> Outputs:
    """`cupyconv.col2im`; the two shapes are read, which waits for a GPU."""
    image, block = (tuple(int(size) for size in shape) for shape in (image_shape, block_shape))
    return (cupyconv.col2im(input, image, block, **_windows(strides, pads, "NOTSET", dilations)),)


def RNN(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    outputs: int = 2,
    **attributes: Any,
) -> Outputs:
    """`cupyconv.rnn`."""
    x, states, settings, answer = _recurrent("RNN", X, W, R, B, None, (initial_h,), **attributes)
    y, h = cupyconv.rnn(x, **settings, h0=states[0], lengths=sequence_lens)
    return answer(y, h)[:outputs]


def GRU(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    linear_before_reset: int = 0,
    outputs: int = 2,
    **attributes: Any,
) -> Outputs:
    """`cupyconv.gru`."""
    x, states, settings, answer = _recurrent("GRU", X, W, R, B, None, (initial_h,), **attributes)
    reset = bool(linear_before_reset)
    y, h = cupyconv.gru(x, **settings, h0=states[0], lengths=sequence_lens, linear_before_reset=reset)
    return answer(y, h)[:outputs]


def LSTM(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    P: Array | None = None,
    *,
    input_forget: int = 0,
    outputs: int = 3,
    **attributes: Any,
) -> Outputs:
    """`cupyconv.lstm`."""
    x, states, settings, answer = _recurrent("LSTM", X, W, R, B, P, (initial_h, initial_c), **attributes)
    h0, c0 = states
    y, (h, c) = cupyconv.lstm(x, **settings, h0=h0, c0=c0, lengths=sequence_lens, input_forget=bool(input_forget))
    return answer(y, h, c)[:outputs]


#: Each operator by its name.
OPERATORS: dict[str, Callable[..., Outputs]] = {
    operator.__name__: operator
    for operator in (
        Conv, ConvTranspose, MaxPool, AveragePool, GlobalAveragePool, BatchNormalization, Col2Im, RNN, GRU, LSTM,
    )
}  # fmt: skip


def operators() -> list[type]:
    """The operators as `onnx.reference.ReferenceEvaluator` takes them, ``new_ops=operators()``.

    Returns
    -------
    list of classes
        Of `onnx.reference.op_run.OpRun`, one for each of `OPERATORS`.

    Raises
    ------
    ImportError
        Where onnx is not installed: the extra ``onnx`` brings it.

    Examples
    --------
    >>> from cupyconv.interop.onnx import operators
    >>> sorted(operator.__name__ for operator in operators())[:3]
    ['AveragePool', 'BatchNormalization', 'Col2Im']
    """
    from onnx.reference.op_run import OpRun

    def runs(operator: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def _run(self: Any, *inputs: Any, **attributes: Any) -> Outputs:
            given = {name: value for name, value in attributes.items() if value is not None}
            return operator(*inputs, **given, outputs=len(self.output))

        return _run

    return [type(name, (OpRun,), {"_run": runs(operator)}) for name, operator in OPERATORS.items()]


def load(model: Any, xp: Any = np) -> Model:
    """A model of ONNX as a function of arrays: read, made simpler and checked once.

    Constants are folded; batch normalisations go into weights, or with what follows into a convolution's ``prologue=``;
    activations and additions behind a convolution become its ``activation=`` and ``residual=``; a concatenation of
    channels before convolutions becomes a list, which is never built.

    Parameters
    ----------
    model : onnx.ModelProto, str or path
        The model, or its file.
    xp : module
        `numpy`, or `cupy`: whose arrays it takes, computes with and returns.

    Returns
    -------
    Model
        ``run = load(model)``; ``run(**inputs)`` gives the output, or a tuple of several; ``print(run.explain())`` is a
        page of what a run does, ``run.explain(on="sm_90")`` of what it would do on a GPU.

    Raises
    ------
    ImportError
        Where onnx is not installed.
    NotImplementedError
        For operators that are neither in `OPERATORS` nor elementwise ones that are known; it names all of them.

    Examples
    --------
    >>> import numpy as np, onnx.parser
    >>> from cupyconv.interop.onnx import load
    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 1, 5] x) => (float[N, 1, 4] y) '
    >>> model = onnx.parser.parse_model(text + "<float[1, 1, 2] w = {1, 2}> { c = Conv(x, w)  y = Relu(c) }")
    >>> run = load(model)
    >>> run
    Model(x -> y: 1 steps, 1 of them convolutions, on numpy)
    >>> run(x=np.array([[[1, 2, 0, -1, -1]]], np.float32))
    array([[[5., 2., 0., 0.]]], dtype=float32)
    """
    from cupyconv.interop.onnx_graph import read, simplify
    from cupyconv.interop.onnx_model import Model

    graph = read(model)
    simplify(graph)
    return Model(graph, xp)


def _windows(strides: Ints | None, pads: Ints | None, auto_pad: str, dilations: Ints | None) -> dict[str, Any]:
    """ONNX's attributes of windows as ours; without `strides` they are 1, of pooling too."""
    return {
        "stride": tuple(strides) if strides else 1,
        "padding": onnx_padding(pads, auto_pad),
        "dilation": tuple(dilations) if dilations else 1,
    }


def _over_all_images(indices: Array, spatial: Sequence[int], column_major: bool) -> Array:
    """Indices in one image, over all samples and channels; column-major ones count along the first spatial axis first."""
    if column_major:
        rest, step, moved = indices, prod(spatial), indices * 0
        for size in reversed(spatial):
            step //= size
            moved += rest % size * step
            rest = rest // size
        indices = moved
    first = np.arange(prod(indices.shape[:2])) * prod(spatial)
    images = first.reshape(*indices.shape[:2], *(1,) * len(spatial))
    return indices + backend_for({"indices": indices}).from_host(images)


def _recurrent(
    kind: str,
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    P: Array | None,
    states: tuple[Array | None, ...],
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Array, tuple[Array | None, ...], dict[str, Any], Callable[..., Outputs]]:
    """Our x and states, weights and settings; and what makes ONNX's outputs of our results."""
    settings: dict[str, Any] = {"direction": direction, "clip": clip, **from_onnx_weights(kind, W, R, B, P)}
    if activations:
        found = list(_activations(activations, iter(activation_alpha), iter(activation_beta)))
        each = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind]
        # ONNX's default is for two directions, also where there is one.
        groups = [found[i] if each == 1 else tuple(found[i : i + each]) for i in range(0, len(W) * each, each)]
        settings["activation" if each == 1 else "activations"] = groups[0] if len(groups) == 1 else tuple(groups)

    def swapped(array: Array | None) -> Array | None:
        """Samples first, or steps first: a view."""
        return array.swapaxes(0, 1) if layout and array is not None else array

    def answer(y: Array, *last: Array) -> Outputs:
        """Y has an axis for directions: (T, D, N, H), or samples first, (N, T, D, H)."""
        by_direction = y.reshape(*y.shape[:2], len(W), R.shape[2])
        return by_direction.swapaxes(0 if layout else 1, 1 if layout else 2), *map(swapped, last)

    return swapped(X), tuple(map(swapped, states)), settings, answer


def _activations(names: Sequence[str], alphas: Iterator[float], betas: Iterator[float]) -> Iterator[tuple[Any, ...]]:
    """ONNX's "HardSigmoid" is ``("hard_sigmoid", alpha, beta)``, of as many parameters as are left."""
    for name in names:
        given = [next(values, None) for values in (alphas, betas)[: _PARAMETERS.get(name, 0)]]
        yield re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower(), *(value for value in given if value is not None)
