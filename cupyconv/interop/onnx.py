"""ONNX models as functions of arrays, and ONNX's convolution, pooling and recurrent operators.

Run a model on NumPy arrays, or with ``xp=cupy`` on CuPy arrays.  It is planned once and fused if possible::

    from cupyconv.interop.onnx import load

    run = load("model.onnx")
    y = run(x=image)
    print(run.explain())

Run a model in ONNX's own evaluator, whose reference implementation provides all other operators::

    import onnx
    from onnx.reference import ReferenceEvaluator
    from cupyconv.interop.onnx import operators

    session = ReferenceEvaluator(onnx.load("model.onnx"), new_ops=operators())
    (y,) = session.run(None, {"x": x})

The evaluator computes with NumPy arrays.  Your own engine runs a node on NumPy or CuPy arrays with
``OPERATORS[node.op_type](*inputs, **attributes, outputs=len(node.output))``: inputs are positional, with None for an
absent one.  Attributes are keywords with ONNX's names and defaults, and strings are `str`.  The call returns a tuple of
`outputs` arrays.  `load` and `operators` need the package onnx.

Each operator implements its newest definition in ONNX.  Models with older definitions run correctly as far as the old
and the new definition agree.
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

#: A sequence of ints, as in ONNX's attributes.
Ints = Sequence[int]
Outputs = tuple[Array, ...]

#: Number of parameters of each activation of ONNX's recurrent operators: alpha, or alpha and beta.
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
    """Compute `cupyconv.conv`."""
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
    """Compute `cupyconv.conv_transpose`.  `output_shape` overrides `pads` if given."""
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
    """Compute `cupyconv.max_pool`.  Integers (8-bit) are pooled in float32, which represents them exactly."""
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
    """Compute `cupyconv.avg_pool`."""
    settings = {"kernel_shape": tuple(kernel_shape), **_windows(strides, pads, auto_pad, dilations)}
    counts = bool(count_include_pad)
    return (cupyconv.avg_pool(X, **settings, ceil_mode=bool(ceil_mode), count_include_pad=counts),)


def GlobalAveragePool(X: Array, *, outputs: int = 1) -> Outputs:
    """Return the mean of each channel of each sample."""
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
    """Compute one multiplication and one addition per element.  `training_mode` uses the statistics of X itself."""
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
    """Compute `cupyconv.col2im`.  Reading the two shapes from a GPU synchronizes with it."""
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
    """Compute `cupyconv.rnn`."""
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
    """Compute `cupyconv.gru`."""
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
    """Compute `cupyconv.lstm`."""
    x, states, settings, answer = _recurrent("LSTM", X, W, R, B, P, (initial_h, initial_c), **attributes)
    h0, c0 = states
    y, (h, c) = cupyconv.lstm(x, **settings, h0=h0, c0=c0, lengths=sequence_lens, input_forget=bool(input_forget))
    return answer(y, h, c)[:outputs]


#: All operators by name.
OPERATORS: dict[str, Callable[..., Outputs]] = {
    operator.__name__: operator
    for operator in (
        Conv, ConvTranspose, MaxPool, AveragePool, GlobalAveragePool, BatchNormalization, Col2Im, RNN, GRU, LSTM,
    )
}  # fmt: skip


def operators() -> list[type]:
    """Return operator classes for `onnx.reference.ReferenceEvaluator`, ``new_ops=operators()``.

    Returns
    -------
    list of classes
        One subclass of `onnx.reference.op_run.OpRun` per entry of `OPERATORS`.

    Raises
    ------
    ImportError
        If onnx is not installed; the extra ``onnx`` installs it.

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
    """Load an ONNX model as a function of arrays, and simplify and check it once.

    Constants are folded.  Batch normalizations are folded into weights, or together with the activation that follows
    into a convolution's ``prologue=``.  Activations and additions after a convolution become its ``activation=`` and
    ``residual=``.  A concatenation of channels before convolutions becomes a list and is never materialized.

    Parameters
    ----------
    model : onnx.ModelProto, str or path
        The model or its file.
    xp : module
        `numpy` or `cupy`: the library of the arrays that the model takes, computes with and returns.

    Returns
    -------
    Model
        ``run = load(model)``; ``run(**inputs)`` returns the output, or a tuple if there are several.
        ``print(run.explain())`` describes a run, ``run.explain(on="sm_90")`` a run on that GPU architecture.

    Raises
    ------
    ImportError
        If onnx is not installed.
    NotImplementedError
        If the model has operators that are neither in `OPERATORS` nor known elementwise ones.  The error names them
        all.

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
    """Return ONNX's window attributes as cupyconv's arguments.  Strides default to 1, for pooling too."""
    return {
        "stride": tuple(strides) if strides else 1,
        "padding": onnx_padding(pads, auto_pad),
        "dilation": tuple(dilations) if dilations else 1,
    }


def _over_all_images(indices: Array, spatial: Sequence[int], column_major: bool) -> Array:
    """Return indices over all samples and channels from indices in one image, in row-major or `column_major` order."""
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
    """Return x, the states, the other arguments, and a function that turns cupyconv's results into ONNX's outputs."""
    settings: dict[str, Any] = {"direction": direction, "clip": clip, **from_onnx_weights(kind, W, R, B, P)}
    if activations:
        found = list(_activations(activations, iter(activation_alpha), iter(activation_beta)))
        each = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind]
        # ONNX's default lists activations for two directions, even if there is only one.
        groups = [found[i] if each == 1 else tuple(found[i : i + each]) for i in range(0, len(W) * each, each)]
        settings["activation" if each == 1 else "activations"] = groups[0] if len(groups) == 1 else tuple(groups)

    def swapped(array: Array | None) -> Array | None:
        """Return a view with samples or steps first."""
        return array.swapaxes(0, 1) if layout and array is not None else array

    def answer(y: Array, *last: Array) -> Outputs:
        """Return the outputs; Y has an axis for directions: (T, D, N, H), or with samples first (N, T, D, H)."""
        by_direction = y.reshape(*y.shape[:2], len(W), R.shape[2])
        return by_direction.swapaxes(0 if layout else 1, 1 if layout else 2), *map(swapped, last)

    return swapped(X), tuple(map(swapped, states)), settings, answer


def _activations(names: Sequence[str], alphas: Iterator[float], betas: Iterator[float]) -> Iterator[tuple[Any, ...]]:
    """Yield ``("hard_sigmoid", alpha, beta)`` for "HardSigmoid", and so on, with as many parameters as are left."""
    for name in names:
        given = [next(values, None) for values in (alphas, betas)[: _PARAMETERS.get(name, 0)]]
        yield re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower(), *(value for value in given if value is not None)
