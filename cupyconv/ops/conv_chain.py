"""`conv_chain`: convolutions one after the other, whose intermediate results need not be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from cupyconv.call.arguments import (
    Arguments,
    Arrays,
    Axes,
    activation_for,
    is_batched,
    named_inputs,
    present,
    shapes_of,
)
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv import conv_problem
from cupyconv.problem.arrays import promote
from cupyconv.problem.geometry import conv_geometry
from cupyconv.problem.problems import ChainProblem, ConvProblem
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis


@dataclass(frozen=True, eq=False)
class ConvLayer:
    """One convolution of a `conv_chain`: the arguments of `conv` but for `x`, which is the layer's before.

    Parameters
    ----------
    weight : array
        ``(C_out, C_in // groups, *kernel)``.
    bias : array, optional
        ``(C_out,)``.
    stride, padding, dilation, groups, activation
        As for `conv`; padding is zeros.
    residual : array, optional
        Of exactly the shape of this layer's result, added before the activation.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> layer = cupyconv.ConvLayer(np.ones((8, 3, 3, 3), np.float32), padding="same", activation="relu")
    >>> layer.padding, layer.bias is None
    ('same', True)
    """

    weight: Array
    bias: Array | None = None
    _: KW_ONLY
    stride: PerAxis = 1
    padding: Padding = 0
    dilation: PerAxis = 1
    groups: int = 1
    activation: ActivationLike = None
    residual: Array | None = None


def conv_chain(
    x: Array | Sequence[Array], layers: Sequence[ConvLayer], *, fuse: str | bool = "auto", out: Array | None = None
) -> Array:
    """Convolutions one after the other; where it is faster, the images between them are not stored.

    The result is that of calling `conv` for each layer with the result of the one before, non-finite values and
    padding included: an intermediate image too is padded with zeros, not continued beyond its edge.

    Parameters
    ----------
    x : array or sequence of arrays
        As for `conv`: ``(N, C_in, *spatial)``, N may be missing; a list or tuple is a merge.
    layers : sequence of ConvLayer
        At least one.
    fuse : "auto", True or False
        ``"auto"`` fuses layers where a model of the processor predicts a gain.  ``True`` fuses as many as
        can be, or is refused with the reason where none can.  ``False`` runs them one by one, with at most
        two intermediate images in memory.
    out : array, optional
        As for `conv`; may be the last layer's residual.

    Returns
    -------
    array
        The last layer's result, with the dtype and order that calling `conv` in turn would give.

    Raises
    ------
    TypeError, ValueError
        As for `conv`, naming the layer; for layers that are no sequence of `ConvLayer`, or another `fuse`.

    See Also
    --------
    explain : what a chain would run: fused or not, both costs by the model, and why.

    Notes
    -----
    On CUDA two neighbouring layers become one kernel.  It keeps a tile of the image between them in shared memory; the
    pixels around a tile that two tiles need are computed twice.  Longer chains run in the best pairs.  A 16-bit
    intermediate image that a fused kernel keeps in a wider type is not rounded.

    On NumPy a few rows at a time go through all layers while they are in cache, where by the model their many small
    calls of NumPy take less than the images' way to memory and back.  Rows that the next ones need too are kept, so that
    no thread computes a row twice.  Unfused, each layer runs as `conv` would run it.

    Intermediate images that are stored count against ``workspace_limit``: then the samples are computed in chunks.
    Where one sample alone needs more, the limit is exceeded, and `explain` says so.

    Source: Alwani et al., *Fused-Layer CNN Accelerators* (2016).

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> from cupyconv import ConvLayer
    >>> x = np.ones((1, 8, 32, 32), np.float32)
    >>> depthwise = ConvLayer(np.ones((8, 1, 3, 3), np.float32), padding="same", groups=8, activation="relu")
    >>> pointwise = ConvLayer(np.ones((16, 8, 1, 1), np.float32), bias=np.ones(16, np.float32))
    >>> y = cupyconv.conv_chain(x, [depthwise, pointwise])
    >>> y.shape, float(y[0, 0, 5, 5])
    ((1, 16, 32, 32), 73.0)
    """
    return CONV_CHAIN(locals())


#: What a layer says of its geometry.
_LAYER_WINDOWS = ("stride", "padding", "dilation", "groups")


def unpack_layers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the layers taken apart: all arrays of a kind together, None where a layer has none."""
    layers = arguments["layers"]
    if not isinstance(layers, (list, tuple)):
        hint = ": put it in a list" if isinstance(layers, ConvLayer) else ""
        raise TypeError(f"layers must be a sequence of ConvLayer, given {type(layers).__name__}{hint}")
    if not layers:
        raise ValueError("layers is an empty sequence, needed at least one ConvLayer")
    for i, layer in enumerate(layers):
        if not isinstance(layer, ConvLayer):
            raise TypeError(f"layers[{i}] must be a ConvLayer, given {type(layer).__name__}: ConvLayer(weight, ...)")
    biases, residuals = [layer.bias for layer in layers], [layer.residual for layer in layers]
    return {
        **arguments,
        "weights": [layer.weight for layer in layers],
        "biases": [bias for bias in biases if bias is not None],
        "residuals": [residual for residual in residuals if residual is not None],
        "with_bias": tuple(i for i, bias in enumerate(biases) if bias is not None),
        "with_residual": tuple(i for i, residual in enumerate(residuals) if residual is not None),
        "said": tuple(tuple(getattr(layer, name) for name in (*_LAYER_WINDOWS, "activation")) for layer in layers),
    }


def check_conv_chain(
    given: Arrays,
    *,
    on: str | None = None,
    said: Sequence[tuple[Any, ...]],
    with_bias: Sequence[int],
    with_residual: Sequence[int],
    fuse: Any,
) -> CheckedCall:
    """Check a chain whose layers are taken apart; `with_bias` and `with_residual` number those that have one."""
    if not (isinstance(fuse, bool) or (isinstance(fuse, str) and fuse == "auto")):
        raise ValueError(f"fuse must be 'auto', True or False, given {fuse!r}")
    inputs, weights = named_inputs("x", given["x"]), given["weights"]
    arrays = {
        **inputs,
        **{f"weight[{i}]": weight for i, weight in enumerate(weights)},
        **{f"bias[{i}]": bias for i, bias in zip(with_bias, given["biases"], strict=True)},
        **{f"residual[{i}]": array for i, array in zip(with_residual, given["residuals"], strict=True)},
        **present({"out": given["out"]}),
    }
    arguments = Arguments.of(arrays, on)
    kernel = tuple(weights[0].shape[2:])
    axes = Axes(is_batched(shapes_of(inputs), kernel), len(kernel))
    problems: list[ConvProblem] = []
    images: dict[str, Any] = inputs
    for i, layer in enumerate(said):
        *windows, activation = layer
        try:
            geometry = conv_geometry(
                shapes_of(images), tuple(weights[i].shape), batched=axes.batched, **dict(zip(_LAYER_WINDOWS, windows))
            )
            # Asked here for errors that name the layer.
            activation_for(activation, promote({**images, f"weight[{i}]": weights[i]}))
        except (TypeError, ValueError) as error:
            raise type(error)(f"layers[{i}]: {error}") from None
        spatial = geometry.spatial(geometry.out_size)
        out = "out" if i == len(said) - 1 else f"layer[{i}]"
        problem, (result,) = conv_problem(
            arguments, axes, images, geometry, spatial, layer=f"[{i}]", out=out, activation=activation
        )
        problems.append(replace(problem, workspace_limit=None))  # the limit is the chain's
        images = {out: result}
    chain = ChainProblem(layers=tuple(problems), fuse=fuse, **arguments.decided_with)
    viewed = frozenset((*inputs, *(f"residual[{i}]" for i in with_residual), "out"))
    return CheckedCall(arguments, chain, viewed, axes, (result,))


CONV_CHAIN = Operation(
    conv_chain,
    check_conv_chain,
    ("x", "weights", "biases", "residuals", "out"),
    ("said", "with_bias", "with_residual", "fuse"),
    unpack_layers,
)
