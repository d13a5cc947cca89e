"""Errors for unknown arguments: an argument named as in another library is answered with the name used here.

The signatures of operations and of `options` have ``*unnamed: Never`` before the keywords and ``**foreign: Never`` at
the end.  Help and `inspect.signature` hide them, and type checkers refuse arguments for them.  This way, arguments that
Python would refuse before any code of the library runs arrive here; a valid call creates an empty tuple and an empty
dict.

A call without a required argument also arrives here, because that argument may have been given by another library's
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

#: Our names, each with its names in PyTorch, ONNX, JAX, TensorFlow, Keras, Chainer, cuDNN, SciPy and NumPy.
_NAMES = {
    "x": ("input", "inputs", "X", "lhs", "image", "data", "a", "in1"),
    "xs": ("x", "input", "inputs", "arrays", "tensors"),
    "weight": ("W", "w", "weights", "filter", "filters", "kernel", "rhs", "in2"),
    "bias": ("b", "B", "biases"),
    "stride": ("strides", "window_strides", "strided", "subsample", "step"),
    "padding": ("pads", "pad", "pad_width", "border_mode", "mode"),
    "padding_mode": ("mode", "pad_mode", "boundary"),
    "dilation": ("dilations", "dilate", "dilation_rate", "rhs_dilation", "atrous_rate"),
    "groups": ("group", "num_groups", "feature_group_count", "n_groups"),
    "kernel_shape": ("kernel_size", "ksize", "kernel", "pool_size", "window_shape", "window", "size"),
    "spatial_shape": ("output_size", "image_shape", "outsize"),
    "input_shape": ("input_size", "x_shape"),
    "output_shape": ("output_size", "outsize"),
    "output_padding": ("output_pad", "out_padding", "adj"),
    "ceil_mode": ("cover_all",),
    "return_indices": ("with_indices", "include_batch_in_index", "return_mask"),
    "count_include_pad": ("count_include_padding", "exclude_pad"),
    "activation": ("act", "activation_fn", "nonlinearity"),
    "activations": ("activation", "nonlinearity"),
    "residual": ("add", "z", "skip"),
    "method": ("algo", "algorithm"),
    "out": ("y", "output", "dst"),
    "lengths": ("sequence_lens", "sequence_length", "seq_lens", "batch_sizes"),
    "h0": ("initial_h", "hx", "initial_state"),
    "c0": ("initial_c", "cx"),
    "h": ("hx", "hidden"),
    "c": ("cx", "cell"),
    "weight_ih": ("W", "w_ih", "weight_ih_l0"),
    "weight_hh": ("R", "w_hh", "weight_hh_l0"),
    "bias_ih": ("b_ih", "bias_ih_l0"),
    "bias_hh": ("b_hh", "bias_hh_l0"),
    "peephole": ("P", "peepholes"),
    "workspace_limit": ("workspace", "workspace_size", "max_workspace_size", "memory_limit", "limit"),
    "threads": ("num_threads", "n_threads", "n_jobs", "workers"),
}  # fmt: skip

#: Values that distinguish two of our arguments if another library has one name for both.
_VALUES = {
    "padding": "'valid', 'same', 'full'",
    "padding_mode": "'constant', 'wrap'; ndimage's 'reflect', 'mirror', 'nearest' are 'symmetric', 'reflect', 'edge'",
}

#: Arguments of other libraries that are expressed differently here, for any function.
_WAYS = {
    "auto_pad": "use padding=onnx_padding(pads, auto_pad)",
    "data_format": "use a transposed view of a channels-last array, array.transpose(0, 3, 1, 2)",
    "layout": "use a transposed view, such as array.transpose(0, 3, 1, 2) or array.swapaxes(0, 1)",
    "batch_first": "use a view, array.swapaxes(0, 1)",
    "bidirectional": "use direction='bidirectional'",
    "hidden_size": "omit it, the weights determine it",
    "dtype": "use array.astype before the call",
    "axis": "use a transposed view whose channels come after the samples",
    "axes": "omit it, the spatial axes come after the channels, as many as the kernel has",
    "cval": "omit it, padding_mode='constant' pads with zeros",
    "fillvalue": "omit it, padding_mode='constant' pads with zeros",
    "origin": "use padding, with a pair (before, after) for each axis",
    "kernel_size": "omit it, the weight's shape determines it",
    "padding_mode": "omit it, only conv and its gradients support other padding modes",
}


def without_foreign(function: Callable[..., Any]) -> Signature:
    """The public signature of a function, without the hidden parameters."""
    shown = signature(function)
    hidden = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    return shown.replace(parameters=[p for p in shown.parameters.values() if p.kind not in hidden])


class _Missing:
    """The value of a required argument that was not given."""


MISSING = _Missing()


def let_arguments_be_missing(function: Callable[..., Any]) -> None:
    """Let calls without a required argument reach the function; its public signature does not change."""
    shown = without_foreign(function)
    defaults = tuple(
        MISSING if parameter.default is Parameter.empty else parameter.default
        for parameter in shown.parameters.values()
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    )
    function.__signature__, function.__defaults__ = shown, defaults  # type: ignore[attr-defined]


def missing_arguments(name: str, missing: Sequence[str]) -> TypeError:
    """The error, in Python's words, for arguments that were not given."""
    several, comma = ("s" if len(missing) > 1 else ""), ("," if len(missing) > 2 else "")
    *others, last = map(repr, missing)
    names = f"{', '.join(others)}{comma} and {last}" if others else last
    return TypeError(f"{name}() missing {len(missing)} required positional argument{several}: {names}")


def positional(parameters: Mapping[str, Parameter]) -> int:
    """The number of arguments that may be given by position."""
    return sum(one.kind is Parameter.POSITIONAL_OR_KEYWORD for one in parameters.values())


def too_many_arguments(name: str, parameters: Mapping[str, Parameter], given: int) -> str:
    """The message for too many positional arguments; in other libraries the stride, for example, is positional."""
    names, count = list(parameters), positional(parameters)
    places = f"{count} positional arguments ({', '.join(names[:count])})" if count else "no positional arguments"
    return (
        f"{name}() takes {places}, given {given}:"
        f" pass the others by name, {', '.join(f'{one}=' for one in names[count:])}"
    )


def unknown_keyword(name: str, keyword: str, parameters: Iterable[str]) -> TypeError:
    """The error for a keyword that a function does not have."""
    return TypeError(f"{name}() got an unexpected keyword argument {keyword!r}: {ours_for(keyword, parameters)}")


def ours_for(keyword: str, parameters: Iterable[str]) -> str:
    """A hint for a keyword that is not a parameter of the function: the parameter that is meant, or all parameters."""
    from difflib import get_close_matches

    parameters = list(parameters)
    meant = [ours for ours in parameters if keyword in _NAMES.get(ours, ())]
    if not meant and keyword in _WAYS:
        return _WAYS[keyword]
    if len(meant) > 1:
        meant = [f"{ours} ({_VALUES[ours]})" for ours in meant]
    meant = meant or get_close_matches(keyword, parameters, n=1)
    return f"use {' or '.join(meant)}" if meant else f"the arguments are {', '.join(parameters)}"
