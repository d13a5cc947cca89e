"""`conv_chain`: convolutions one after the other, whose intermediate results need not be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from cupyconv.call.axes import Axes
from cupyconv.call.cache import call
from cupyconv.call.call import (
    Call,
    activation_for,
    describe,
    describe_given,
    describe_result,
    machine_for,
    named_inputs,
    owner,
    present,
    widened,
)
from cupyconv.call.dispatch import Backend
from cupyconv.call.executable import Result
from cupyconv.call.options import current_settings
from cupyconv.ops.conv import check_addend
from cupyconv.problem.arrays import is_channels_last, operand_dtypes, promote
from cupyconv.problem.geometry import conv_geometry
from cupyconv.problem.problems import ChainProblem, ConvProblem, Machine
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


class LayerSettings(NamedTuple):
    """What a layer has beside its arrays, and which of these it has."""

    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    activation: Any
    has_bias: bool
    has_residual: bool


def prepare_split_chain(
    x: Any, weights: Sequence[Any], biases: Sequence[Any], residuals: Sequence[Any], layers: Sequence[tuple[Any, ...]],
    fuse: Any = "auto", out: Any = None, on: str | None = None,
) -> Call:  # fmt: skip
    """Check a chain whose layers are taken apart; `biases` and `residuals` are those that there are."""
    settings = [LayerSettings(*layer) for layer in layers]
    if not (isinstance(fuse, bool) or (isinstance(fuse, str) and fuse == "auto")):
        raise ValueError(f"fuse must be 'auto', True or False, given {fuse!r}")
    inputs = named_inputs("x", x)
    arrays = present(
        {
            **inputs,
            **{f"weight[{i}]": weight for i, weight in enumerate(weights)},
            **_named("bias", biases, [layer.has_bias for layer in settings]),
            **_named("residual", residuals, [layer.has_residual for layer in settings]),
        },
        out=out,
    )
    backend = owner(arrays)
    rank = weights[0].ndim - 2
    batched = not all(array.ndim == rank + 1 for array in inputs.values())
    checker = _Checker(backend, Axes(batched, rank), arrays, machine_for(backend, on), len(settings))
    problems: list[ConvProblem] = []
    images = {
        name: _Image(tuple(array.shape), array.dtype, checker.axes.asks_channels_last(array))
        for name, array in inputs.items()
    }
    for i, layer in enumerate(settings):
        problem, result = checker.layer(i, layer, images)
        problems.append(problem)
        images = {result.name: _Image(result.shape, result.dtype, _is_stored_channels_last(problem))}
    chain = ChainProblem(
        layers=tuple(problems), fuse=fuse, machine=checker.machine, workspace_limit=current_settings().workspace_limit
    )
    named = frozenset((*inputs, *(name for name in arrays if name.startswith("residual[")), "out"))
    return Call(backend, chain, arrays, named, checker.axes, (result,))


class _Image(NamedTuple):
    """What the checks of a layer look at of the images it reads."""

    shape: tuple[int, ...]
    dtype: Any
    channels_last: bool


class _Checker:
    """What the layers of a chain have in common."""

    def __init__(self, backend: Backend, axes: Axes, arrays: Mapping[str, Any], machine: Machine, count: int) -> None:
        self.backend, self.axes, self.arrays, self.machine = backend, axes, arrays, machine
        self.last = count - 1
        #: Intermediate results as planning sees them.
        self.between: dict[str, Any] = {}

    def layer(self, i: int, layer: LayerSettings, images: Mapping[str, _Image]) -> tuple[ConvProblem, Result]:
        """Check layer `i`, which reads `images`."""
        backend, axes, arrays = self.backend, self.axes, self.arrays
        weight, bias, residual = arrays[f"weight[{i}]"], f"bias[{i}]", f"residual[{i}]"
        try:
            geometry = conv_geometry(
                {name: image.shape for name, image in images.items()}, tuple(weight.shape), batched=axes.batched,
                stride=layer.stride, padding=layer.padding, padding_mode="constant", dilation=layer.dilation, groups=layer.groups,
            )  # fmt: skip
            dtype = promote({**images, f"weight[{i}]": weight})
            activation = activation_for(layer.activation, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layers[{i}]: {error}") from None
        shape = axes.shape(geometry.batch, geometry.out_channels, geometry.spatial(geometry.out_size))
        check_addend(arrays, bias, (geometry.out_channels,), dtype)
        check_addend(arrays, residual, shape, dtype)
        channels_last = all(image.channels_last for image in images.values())
        name = "out" if i == self.last else f"layer[{i}]"
        result = Result(name, shape, dtype, channels_last, addend=residual)
        x_dtype, weight_dtype = operand_dtypes([image.dtype for image in images.values()], weight.dtype, dtype)
        read = [self.between.get(name) or describe(backend, axes, name, arrays[name]) for name in images]
        problem = ConvProblem(
            geometry=geometry, xs=tuple(read), weight=describe(backend, Axes(True, weight.ndim - 2), f"weight[{i}]", weight),
            out=describe_result(backend, axes, arrays, result),
            bias=describe_given(backend, Axes(False, 0), bias, arrays),
            residual=describe_given(backend, axes, residual, arrays),
            x_dtype=x_dtype, weight_dtype=weight_dtype, activation=activation, machine=self.machine,
            allow_tf32=current_settings().allow_tf32,
            notes=widened({**images, f"weight[{i}]": weight}, dtype),
        )  # fmt: skip
        self.between[name] = problem.out
        return problem, result


def _named(name: str, arrays: Sequence[Any], present: Sequence[bool]) -> dict[str, Any]:
    """Arrays by name, of the layers that have one."""
    places = [i for i, is_there in enumerate(present) if is_there]
    return {f"{name}[{i}]": array for i, array in zip(places, arrays, strict=True)}


def _is_stored_channels_last(problem: ConvProblem) -> bool:
    """Whether an intermediate result would ask for a channels-last one, were it an argument."""
    out = problem.out
    return is_channels_last(out.shape, [step * out.itemsize for step in out.strides], out.itemsize, 1)
