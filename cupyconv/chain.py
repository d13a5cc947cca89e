"""`conv_chain`: convolutions one after the other, whose intermediate results need not be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from cupyconv.calls.call import Call
from cupyconv.calls.chain import LayerSettings, prepare_split_chain
from cupyconv.repetition import call
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

    On NumPy a few rows at a time go through all layers while they are in cache.  Rows that the next ones need too are
    kept, so that no thread computes a row twice.

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
    return call(prepare_split_chain, *_split(x, layers, fuse, out))


def prepare_conv_chain(x: Any, layers: Any, *, fuse: Any = "auto", out: Any = None, on: str | None = None) -> Call:
    """Check the arguments of `conv_chain`."""
    arrays, settings = _split(x, layers, fuse, out)
    return prepare_split_chain(**arrays, **settings, on=on)


def _split(x: Any, layers: Any, fuse: Any, out: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The arrays of a chain and its other arguments, apart."""
    if not isinstance(layers, (list, tuple)):
        hint = ": put it in a list" if isinstance(layers, ConvLayer) else ""
        raise TypeError(f"layers must be a sequence of ConvLayer, given {type(layers).__name__}{hint}")
    if not layers:
        raise ValueError("layers is an empty sequence, needed at least one ConvLayer")
    for i, layer in enumerate(layers):
        if not isinstance(layer, ConvLayer):
            raise TypeError(f"layers[{i}] must be a ConvLayer, given {type(layer).__name__}: ConvLayer(weight, ...)")
    settings = tuple(
        LayerSettings(
            layer.stride, layer.padding, layer.dilation, layer.groups, layer.activation, layer.bias is not None,
            layer.residual is not None,
        )
        for layer in layers
    )  # fmt: skip
    arrays = {
        "x": x,
        "weights": [layer.weight for layer in layers],
        "biases": [layer.bias for layer in layers if layer.bias is not None],
        "residuals": [layer.residual for layer in layers if layer.residual is not None],
        "out": out,
    }
    return arrays, {"layers": tuple(map(tuple, settings)), "fuse": fuse}
