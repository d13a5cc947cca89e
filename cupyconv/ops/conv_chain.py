"""`conv_chain`: consecutive convolutions, whose intermediate results need not be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from inspect import Signature, signature
from math import prod
from typing import Any, NamedTuple, Never
from weakref import WeakKeyDictionary

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
from cupyconv.call.dispatch import backend_for
from cupyconv.call.keywords import positional, too_many_arguments, unknown_keyword
from cupyconv.call.operation import CheckedCall, Operation
from cupyconv.ops.conv import WINDOWS, conv_problem, prologue_parts
from cupyconv.problem.arrays import promote
from cupyconv.problem.caches import forms_of, keeping_forms
from cupyconv.problem.geometry import ConvGeometry, conv_geometry
from cupyconv.problem.padding import positive
from cupyconv.problem.problems import ChainProblem, ConvProblem
from cupyconv.typing import ActivationLike, Array, Padding, PerAxis, PrologueLike


@dataclass(frozen=True, eq=False, repr=False)
class ConvLayer:
    """One convolution of a `conv_chain`: the arguments of `conv` except `x`, which is the previous layer's result.

    Parameters
    ----------
    weight : array
        ``(C_out, C_in // groups, *kernel)``.
    bias : array, optional
        ``(C_out,)``.
    stride, padding, padding_mode, dilation, groups, activation, prologue
        As for `conv`.
    residual : array, optional
        Array of exactly the shape of this layer's result, added before the activation.

    Raises
    ------
    TypeError, ValueError
        As for `conv`.  The constructor raises every error that can be found without `x`.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> cupyconv.ConvLayer(np.ones((8, 3, 3, 3), np.float32), padding="same", activation="relu")
    ConvLayer(float32 (8, 3, 3, 3), padding='same', activation='relu')
    """

    weight: Array
    bias: Array | None = None
    _: KW_ONLY
    stride: PerAxis = 1
    padding: Padding = 0
    padding_mode: str = "constant"
    dilation: PerAxis = 1
    groups: int = 1
    activation: ActivationLike = None
    residual: Array | None = None
    prologue: PrologueLike | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> ConvLayer:
        if unknown := [keyword for keyword in kwargs if keyword not in _DEFAULTS]:
            raise unknown_keyword("ConvLayer", unknown[0], _DEFAULTS)
        parameters = signature(cls).parameters
        if len(args) > positional(parameters):
            raise TypeError(too_many_arguments("ConvLayer", parameters, len(args)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        scale, shift, prologue_activation = prologue_parts(self.prologue)
        vectors = {"bias": self.bias, "scale": scale, "shift": shift}
        arguments = Arguments.of(present({"weight": self.weight, **vectors, "residual": self.residual}, "weight"), None)
        geometry = _on_a_large_image(tuple(self.weight.shape), {name: getattr(self, name) for name in WINDOWS})
        for name, array in vectors.items():
            needed = (geometry.out_channels if name == "bias" else geometry.in_channels,)
            if array is not None and tuple(array.shape) != needed:
                raise ValueError(f"{name} has shape {tuple(array.shape)}, needed {needed}")
        for activation in (self.activation, prologue_activation):
            activation_for(activation, arguments["weight"].dtype)

    def packed(self) -> ConvLayer:
        """Return the layer with its own copy of the weight, for which calls cache derived forms.

        The forms are the weight in the order in which a kernel or a matrix product reads it and, on NumPy, the weight
        transformed for Winograd's method.  On NumPy, forms of more than 16 MiB per layer are not cached.  The first
        call with a new kind of images computes a form and waits until it is complete.  Later calls reuse it, in any
        stream or thread and in CUDA graphs that are captured afterwards.  A form lives as long as the layer and does
        not count against the workspace limit.  On CUDA, `explain` reports its size.  A few forms are cached per layer,
        for images that are read in different ways.

        Changes to the original weight do not reach the packed layer: pack it again.  The elements of the copy must not
        change; on NumPy the copy is read-only.  A packed layer that passes through `pickle` or `copy.deepcopy` is no
        longer packed.

        Returns
        -------
        ConvLayer
            The packed layer, otherwise equal to this one; or this layer itself if it is packed already.

        Examples
        --------
        >>> import numpy as np, cupyconv
        >>> layer = cupyconv.ConvLayer(np.ones((8, 3, 3, 3), np.float32), padding="same").packed()
        >>> layer
        ConvLayer(float32 (8, 3, 3, 3), padding='same', packed)
        >>> cupyconv.conv_chain(np.ones((1, 3, 8, 8), np.float32), [layer]).shape
        (1, 8, 8, 8)
        """
        if self.is_packed:
            return self
        return replace(self, weight=keeping_forms(backend_for({"weight": self.weight}).own_copy(self.weight)))

    @property
    def is_packed(self) -> bool:
        """Whether calls cache derived forms of the weight."""
        return forms_of(self.weight) is not None

    def __repr__(self) -> str:
        """One line: arrays by dtype and shape, and the settings that differ from the defaults."""

        def words(value: Any) -> str:
            if isinstance(value, (tuple, list)):
                return f"({', '.join(map(words, value))})"
            return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else repr(value)

        given = {name: getattr(self, name) for name in _DEFAULTS if name != "weight"}
        changed = [
            f"{name}={words(value)}"
            for name, value in given.items()
            if hasattr(value, "dtype") or value != _DEFAULTS[name]
        ]
        return f"ConvLayer({', '.join([words(self.weight), *changed, *['packed'] * self.is_packed])})"


#: The signature of `__init__`, not of `__new__`.
ConvLayer.__signature__ = Signature(list(signature(ConvLayer.__init__).parameters.values())[1:])  # type: ignore[attr-defined]
_DEFAULTS = {field.name: field.default for field in fields(ConvLayer) if field.name != "_"}


def _on_a_large_image(weight_shape: tuple[int, ...], windows: dict[str, Any]) -> ConvGeometry:
    """The geometry of a layer on an image that is large enough for every kernel; raise for settings that never fit."""
    rank = len(weight_shape) - 2
    channels = prod(weight_shape[1:2]) * positive("groups", windows["groups"])
    return conv_geometry({"x": (1, channels, *(1 << 62,) * rank)}, weight_shape, batched=True, **windows)


def conv_chain(
    x: Array | Sequence[Array],
    layers: Sequence[ConvLayer],
    *unnamed: Never,
    fuse: str | bool = "auto",
    out: Array | None = None,
    **foreign: Never,
) -> Array:
    """Compute consecutive convolutions; intermediate images are not stored if that is faster.

    The result equals that of calling `conv` for each layer with the previous result, including non-finite values and
    padding: an intermediate image is also padded with zeros, not continued beyond its edge.

    Parameters
    ----------
    x : array or sequence of arrays
        As for `conv`: ``(N, C_in, *spatial)``.  The axis N may be omitted, and a list or tuple of arrays is merged
        along the channels.
    layers : sequence of ConvLayer
        At least one layer.
    fuse : "auto", True or False
        ``"auto"`` fuses layers if a model of the processor predicts a gain.  ``True`` fuses as many layers as possible,
        and raises an error with the reason if none can be fused.  ``False`` runs the layers one by one, with at most
        two intermediate images in memory.
    out : array, optional
        As for `conv`; it may be the residual of the last layer.

    Returns
    -------
    array
        The last layer's result, with the dtype and memory order that consecutive calls of `conv` give.

    Raises
    ------
    TypeError, ValueError
        As for `conv`, with the layer in the message; also if `layers` is not a sequence of `ConvLayer`, or for another
        value of `fuse`.

    See Also
    --------
    explain : the plan of a chain: fused or not, both estimated costs, and the reason.

    Notes
    -----
    On CUDA, two neighbouring layers become one kernel, which holds a tile of the intermediate image in shared memory.
    Pixels in the halo of two tiles are computed twice.  Longer chains run in the best pairs.  If a fused kernel holds
    a 16-bit intermediate image in a wider type, that image is not rounded.

    On NumPy, a few rows at a time pass through all layers while they are in cache.  This costs many small NumPy calls.
    It is chosen if, by the cost model, their overhead is less than the time to move the images to memory and back.
    Rows that the next rows also need are retained, so no thread computes a row twice.  Unfused, each layer runs as
    `conv` would run it.

    Stored intermediate images count against ``workspace_limit``; if they do not fit, the samples are computed in
    chunks.  If a single sample needs more than the limit, the limit is exceeded, and `explain` reports it.

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


#: The optional arrays of a layer, each mapped to the argument that holds those arrays of all layers.
_OPTIONAL = {"bias": "biases", "residual": "residuals", "scale": "scales", "shift": "shifts"}


def unpack_layers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the layers among the arguments by their arrays, grouped by kind; a kind that no layer has is None."""
    layers = arguments["layers"]
    if not isinstance(layers, (list, tuple)):
        hint = ": put it in a list" if isinstance(layers, ConvLayer) else ""
        raise TypeError(f"layers must be a sequence of ConvLayer, given {type(layers).__name__}{hint}")
    if not layers:
        raise ValueError("layers is an empty sequence, needed at least one ConvLayer")
    for i, layer in enumerate(layers):
        if not isinstance(layer, ConvLayer):
            raise TypeError(
                f"layers[{i}] must be a ConvLayer, given {type(layer).__name__}: use ConvLayer(weight, ...)"
            )
    apart = [_apart(layer) for layer in layers]
    weights, optional, said = zip(*apart)
    unpacked = {**arguments, "weights": list(weights)}
    for several, arrays in zip(_OPTIONAL.values(), zip(*optional)):
        unpacked[several] = [array for array in arrays if array is not None] or None
    key = tuple(map(id, said))
    known = _CHAINS.get(key)
    if known is None:
        having = tuple(tuple(i for i, array in enumerate(of) if array is not None) for of in zip(*optional))
        if len(_CHAINS) >= KEPT:
            _CHAINS.clear()
        known = _CHAINS[key] = said, having
    unpacked["said"], unpacked["having"] = known
    return unpacked


class _Apart(NamedTuple):
    """The parts of a layer: its arrays (an absent one of `_OPTIONAL` is None) and its other settings."""

    weight: Any
    optional: tuple[Any, ...]
    said: tuple[Any, ...]


#: Number of chains whose settings are cached, so that the next call finds the identical objects.
KEPT = 64
_LAYERS: WeakKeyDictionary[ConvLayer, _Apart] = WeakKeyDictionary()
#: Maps the identities of the layers' settings to these settings, and to which layers have which optional arrays.
_CHAINS: dict[tuple[int, ...], tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]] = {}


def _apart(layer: ConvLayer) -> _Apart:
    known = _LAYERS.get(layer)
    if known is None:
        scale, shift, activation = prologue_parts(layer.prologue)
        said = *(getattr(layer, name) for name in WINDOWS), layer.activation, activation, layer.is_packed
        known = _Apart(layer.weight, (layer.bias, layer.residual, scale, shift), said)
        if not isinstance(layer.prologue, list):  # the entries of a list may change
            _LAYERS[layer] = known
    return known


def check_conv_chain(
    given: Arrays, *, on: str | None = None, said: Sequence[tuple[Any, ...]], having: Sequence[Sequence[int]], fuse: Any
) -> CheckedCall:
    """Check the arguments of a chain, given the parts of its layers.

    `having` lists, for each kind of array in `_OPTIONAL`, the numbers of the layers that have one.
    """
    if not (isinstance(fuse, bool) or (isinstance(fuse, str) and fuse == "auto")):
        raise ValueError(f"fuse must be 'auto', True or False, given {fuse!r}")
    inputs, weights = named_inputs("x", given["x"]), given["weights"]
    arrays = {
        **inputs,
        **{f"weight[{i}]": weight for i, weight in enumerate(weights)},
        **{
            f"{name}[{i}]": array
            for (name, several), numbers in zip(_OPTIONAL.items(), having, strict=True)
            for i, array in zip(numbers, given[several] or (), strict=True)
        },
        **present({"out": given["out"]}),
    }
    arguments = Arguments.of(arrays, on)
    kernel = tuple(weights[0].shape[2:])
    axes = Axes(is_batched(shapes_of(inputs), kernel), len(kernel))
    problems: list[ConvProblem] = []
    images: dict[str, Any] = inputs
    for i, layer in enumerate(said):
        *windows, activation, prologue_activation, is_packed = layer
        try:
            geometry = conv_geometry(
                shapes_of(images), tuple(weights[i].shape), batched=axes.batched, **dict(zip(WINDOWS, windows))
            )
            # Checked here, so that the error names the layer.
            activation_for(activation, promote({**images, f"weight[{i}]": weights[i]}))
        except (TypeError, ValueError) as error:
            raise type(error)(f"layers[{i}]: {error}") from None
        spatial = geometry.spatial(geometry.out_size)
        out = "out" if i == len(said) - 1 else f"layer[{i}]"
        problem, (result,) = conv_problem(
            arguments, axes, images, geometry, spatial, layer=f"[{i}]", out=out, activation=activation,
            prologue_activation=prologue_activation,
        )  # fmt: skip
        # The workspace limit belongs to the chain, not to its layers.
        problems.append(replace(problem, workspace_limit=None, weight_is_constant=is_packed))
        images = {out: result}
    chain = ChainProblem(layers=tuple(problems), fuse=fuse, **arguments.decided_with)
    viewed = frozenset((*inputs, *(f"residual[{i}]" for i in range(len(said))), "out"))
    return CheckedCall(arguments, chain, viewed, axes, (result,))


CONV_CHAIN = Operation(
    conv_chain,
    check_conv_chain,
    ("x", "weights", *_OPTIONAL.values(), "out"),
    ("said", "having", "fuse"),
    unpack_layers,
)
