"""Refusals of whole calls: unknown keywords, arguments of `explain` and `vjp`, `options`, `onnx_padding`."""

from __future__ import annotations

import inspect
import re
from functools import partial

import numpy as np
import pytest
from refusals import Ones, assert_refused, numpy_arrays, placed, table

import cupyconv


@pytest.mark.parametrize(
    "given", [cupyconv.vjp, cupyconv.vjp(cupyconv.conv, np.ones((1, 1, 3)), np.ones((1, 1, 3)))[1]]
)
def test_explain_of_a_gradient_says_what_to_explain(given):
    words = [r"explain\(conv, x, weight\) plans the forward", r"explain\(conv_grad_weight, ...\)"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.explain, given, cupyconv.conv, np.ones((1, 1, 3)))


@pytest.mark.parametrize(
    "function, keyword, ours",
    [
        ("conv", "strides", "use stride"), ("conv", "pads", "use padding"), ("conv", "pad", "use padding"), ("conv", "group", "use groups"),
        ("conv", "dilations", "use dilation"), ("conv", "W", "use weight"), ("conv", "b", "use bias"), ("conv", "boundary", "use padding_mode"),
        ("conv", "mode", r"use padding \('valid', 'same', 'full'\) or padding_mode \('constant', .*'edge'\)"), ("conv_transpose", "mode", "use padding"),
        ("conv", "cval", "omit it, .* pads with zeros"), ("conv", "origin", r"use padding, with a pair \(before, after\) .*"),
        ("conv", "axes", "omit it, the spatial axes come after the channels, .*"), ("conv", "kernel_size", "omit it, the weight's shape determines it"),
        ("conv_transpose", "padding_mode", "omit it, only conv and its gradients support other padding modes"),
        ("conv", "auto_pad", r"use padding=onnx_padding\(pads, auto_pad\)"), ("conv", "data_format", "use a transposed view of a channels-last array, .*"),
        ("conv", "stirde", "use stride"), ("linmerge", "x", "use xs"), ("conv_transpose", "output_size", "use output_shape"),
        ("conv_chain", "output", "use out"), ("max_pool", "kernel_size", "use kernel_shape"), ("max_pool", "strides", "use stride"),
        ("avg_pool", "pool_size", "use kernel_shape"), ("im2col", "ksize", "use kernel_shape"), ("col2im", "output_size", "use spatial_shape"),
        ("conv_grad_input", "input_size", "use input_shape"), ("conv_grad_weight", "pads", "use padding"), ("rnn", "nonlinearity", "use activation"),
        ("lstm", "sequence_lens", "use lengths"), ("gru", "batch_first", r"use a view, array.swapaxes\(0, 1\)"), ("lstm", "activation", "use activations"),
        ("rnn_step", "hx", "use h"), ("lstm_step", "cx", "use c"), ("gru_step", "R", "use weight_hh"),
    ],
)  # fmt: skip
def test_keywords_of_other_libraries_are_answered_with_ours(function, keyword, ours):
    """The call and `explain` refuse a keyword of another library and name the one to use here."""
    called = getattr(cupyconv, function)
    some = [np.ones((1, 1, 3))] * 6
    needed = [p for p in inspect.signature(called).parameters.values() if p.default is p.empty]
    words = rf"{function}\(\) got an unexpected keyword argument '{keyword}': {ours}$"
    with pytest.raises(TypeError, match=words):
        called(*some[: len(needed)], **{keyword: 1})
    with pytest.raises(TypeError, match=rf"^{function}: .*'{keyword}': {ours}$"):
        cupyconv.explain(called, *some[: len(needed)], **{keyword: 1})


def functions_of_arrays():
    """Return the functions that answer keywords of other libraries."""
    return [name for name in cupyconv.__all__ if "foreign" in getattr(getattr(cupyconv, name), "__annotations__", {})]


@pytest.mark.parametrize("name", functions_of_arrays())
def test_an_argument_that_is_missing_may_have_come_by_another_name(name):
    """The error names all missing arguments as Python does, but answers an unknown keyword first."""
    function = getattr(cupyconv, name)
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    given = dict.fromkeys(needed, np.ones((1, 1, 3)))
    for lacking in needed:
        less = {key: value for key, value in given.items() if key != lacking}
        with pytest.raises(TypeError, match=rf"^{name}\(\) missing 1 required positional argument: '{lacking}'$"):
            function(**less)
        with pytest.raises(TypeError, match=rf"^{name}\(\) got .* 'their_{lacking}': "):
            function(**less, **{f"their_{lacking}": 1})
        with pytest.raises(TypeError, match=rf"^{name}: missing a required argument: '{lacking}'$"):
            cupyconv.explain(function, **less)
    if len(needed) > 2:
        more = f"{', '.join(map(repr, needed[:-1]))}, and {needed[-1]!r}"
        with pytest.raises(
            TypeError, match=rf"^{name}\(\) missing {len(needed)} required positional arguments: {more}$"
        ):
            function()


@pytest.mark.parametrize("name", functions_of_arrays())
def test_more_arguments_than_have_places_are_told_to_have_names(name):
    """Too many positional arguments are refused with the names to use, because stride is fourth in other libraries.

    Python's own message would say "from 0 to 3", as if the first three could be missing.
    """
    function = getattr(cupyconv, name)
    parameters = inspect.signature(function).parameters.values()
    places = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    others = ", ".join(f"{one.name}=" for one in parameters if one.kind is one.KEYWORD_ONLY)
    given = [np.ones((1, 1, 3))] * (len(places) + 2)
    words = re.escape(
        f"{name}() takes {len(places)} positional arguments ({', '.join(places)}), given {len(given)}:"
        f" pass the others by name, {others}"
    )
    for call in (function, partial(cupyconv.explain, function)):
        with pytest.raises(TypeError, match=rf"^{words}$"):
            call(*given)


def test_more_arguments_than_have_places_in_a_layer_and_a_gradient():
    ones, words = (np.ones((1, 1, 3)), r"takes 3 positional arguments \(x, weight, bias\), given 4: .* name, stride=, ")
    with pytest.raises(TypeError, match=rf"^conv\(\) {words}"):
        cupyconv.vjp(cupyconv.conv, ones, ones, None, 1)
    with pytest.raises(
        TypeError, match=r"^ConvLayer\(\) takes 2 positional arguments \(weight, bias\), given 3: .*stride="
    ):
        cupyconv.ConvLayer(ones, None, 1)
    with pytest.raises(
        TypeError, match=r"^options\(\) takes no positional arguments, given 1: .* name, workspace_limit=, "
    ):
        cupyconv.options(1 << 20)
    with pytest.raises(TypeError, match=r"^pullback\(\) missing 1 required positional argument: 'grad'$"):
        cupyconv.vjp(cupyconv.conv, ones, ones)[1]()
    with pytest.raises(TypeError, match=r"use stride$"):  # a keyword with another name here is answered first
        cupyconv.conv(ones, ones, None, 1, strides=1)


def test_the_other_name_is_answered_before_what_is_missing():
    for call in (
        cupyconv.max_pool,
        partial(cupyconv.explain, cupyconv.max_pool),
        partial(cupyconv.vjp, cupyconv.max_pool),
    ):
        with pytest.raises(TypeError, match=r"'kernel_size': use kernel_shape$"):
            call(np.ones((1, 1, 4)), kernel_size=2)
    with pytest.raises(TypeError, match=r"^conv\(\) missing 2 required positional arguments: 'x' and 'weight'$"):
        cupyconv.conv()
    with pytest.raises(TypeError, match=r"^conv_chain\(\) missing 1 .*'layers'$") as refused:
        cupyconv.conv_chain(np.ones((1, 1, 4)))
    assert refused.value.__suppress_context__, "what stands for a missing argument is shown to nobody"
    with pytest.raises(TypeError, match=r"^lstm\(\) missing 1 required positional argument: 'x'$"):
        cupyconv.lstm(weight_ih=np.ones((4, 1)), weight_hh=np.ones((4, 1)), lengths=[1])


def test_a_keyword_that_nobody_has_is_answered_with_all_of_ours():
    with pytest.raises(TypeError, match=r"'zzz': the arguments are x, kernel_shape, stride, padding, dilation, out$"):
        cupyconv.im2col(np.ones((1, 1, 3)), 2, zzz=1)
    with pytest.raises(TypeError, match=r"ConvLayer\(\) got .*'strides': use stride$"):
        cupyconv.ConvLayer(np.ones((1, 1, 3)), strides=2)


def test_an_executable_that_is_known_does_not_let_a_wrong_keyword_pass():
    x = np.ones((1, 1, 3))
    cupyconv.conv(x, x)
    with pytest.raises(TypeError, match="use groups"):
        cupyconv.conv(x, x, group=1)


@pytest.mark.parametrize("name", ["conv", "max_pool", "lstm", "options"])
def test_help_shows_our_keywords_alone(name):
    assert "foreign" not in str(inspect.signature(getattr(cupyconv, name)))


@pytest.mark.parametrize(
    "words, arguments",
    table(
        ("unknown", ["conv: ", "unexpected keyword", "'strides'"], dict(strides=2)),
        ("of the inside", ["conv: ", "unexpected keyword", "'saving'"], dict(saving=True)),
    ),
)
def test_explain_takes_the_arguments_of_the_function(words, arguments):
    x, weight = np.ones((1, 1, 3)), np.ones((1, 1, 3))
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.explain, cupyconv.conv, x, weight, **arguments)
    assert_refused(numpy_arrays(), TypeError, ["conv: ", "'weight'"], cupyconv.explain, cupyconv.conv, x)


@pytest.mark.parametrize(
    "function, given",
    [
        (len, "len"),
        (cupyconv.fold_batchnorm, "fold_batchnorm"),
        ("conv", "'conv'"),
        (None, "None"),
        ([], "list"),
        (np.ones(2), "ndarray: write explain.conv, x"),
    ],
)
def test_explain_what_has_no_plan(function, given):
    with pytest.raises(
        TypeError,
        match=rf"the first argument of explain must be one of conv, linmerge, .*im2col, col2im, max_pool, .*given .*{given}",
    ):
        cupyconv.explain(function, np.ones((1, 1, 3)), np.ones((1, 1, 3)))


@pytest.mark.parametrize(
    "function, given",
    [
        (len, "'len'$"),
        (cupyconv.im2col, "'im2col'$"),
        (cupyconv.vjp, "'vjp'$"),
        ("conv", "'conv': write vjp.conv, x"),
        (None, "None"),
        ([], "list"),
        (np.ones(2), "ndarray: write vjp.conv, x"),
    ],
)
def test_vjp_of_what_has_no_pullback(function, given):
    known = "conv, linmerge, conv_transpose, max_pool, avg_pool, rnn, lstm, gru"
    with pytest.raises(TypeError, match=f"the first argument of vjp must be one of {known}, given {given}"):
        cupyconv.vjp(function, np.ones((1, 1, 3)), np.ones((1, 1, 3)))


def test_vjp_refuses_what_the_function_does_not_take():
    x, weight = np.ones((1, 1, 3)), np.ones((1, 1, 3))
    for words, given in (("missing .*weight", {}), ("unexpected .*stridee", {"weight": weight, "stridee": 1})):
        with pytest.raises(TypeError, match=f"^conv: .*{words}"):
            cupyconv.vjp(cupyconv.conv, x, **given)


def test_vjp_refuses_an_out():
    x, out = np.ones((1, 1, 3)), np.full((1, 1, 1), 7.0)
    assert_refused(numpy_arrays(), TypeError, ["vjp", "out"], cupyconv.vjp, cupyconv.conv, x, x, out=out)
    assert (out == 7).all()
    assert cupyconv.vjp(cupyconv.conv, x, x, out=None)[0] == 3


@pytest.mark.parametrize("on", ["sm_91", "H200", "", 90, ["sm_90"]], ids=repr)
def test_explain_on_an_unknown_gpu(on):
    with pytest.raises(ValueError, match=rf"on={re.escape(repr(on))}.*known are sm_75.*sm_90"):
        cupyconv.explain(cupyconv.conv, np.ones((1, 1, 3)), np.ones((1, 1, 3)), on=on)


def test_explain_on_a_gpu_beside_arrays_of_another(cuda_target):
    x, weight = placed(Ones((1, 1, 3)), cuda_target), placed(Ones((1, 1, 3)), cuda_target)
    words = ["on='sm_90'", "NumPy arrays", "cuda"]
    assert_refused(cuda_target, TypeError, words, cupyconv.explain, cupyconv.conv, x, weight, on="sm_90")


@pytest.mark.parametrize(
    "error, words, given",
    [
        (ValueError, ["workspace_limit", "at least 0", "-1"], dict(workspace_limit=-1)),
        (TypeError, ["workspace_limit", "integer", "1.5"], dict(workspace_limit=1.5)),
        (TypeError, ["workspace_limit", "integer", "1 GiB"], dict(workspace_limit="1 GiB")),
        (ValueError, ["threads", "at least 1", "0"], dict(threads=0)),
        (ValueError, ["threads", "at least 1", "-2"], dict(threads=-2)),
        (TypeError, ["threads", "integer", "1.5"], dict(threads=1.5)),
        (TypeError, [r"options\(\) got an unexpected keyword", "'thread': use threads$"], dict(thread=1)),
        (TypeError, ["'workspace': use workspace_limit$"], dict(workspace=1 << 20)),
        (TypeError, ["'zzz': the arguments are workspace_limit, allow_tf32, .*threads$"], dict(zzz=1)),
    ],
    ids=str,
)
def test_options(error, words, given):
    """Bad options are refused when the block is set up, not when a call inside it is made."""
    assert_refused(numpy_arrays(), error, words, cupyconv.options, **given)


@pytest.mark.parametrize(
    "error, words, given",
    table(
        ("odd", ValueError, ["pads", "two entries", "3"], ([0, 1, 2],)),
        ("empty", ValueError, ["pads", "two entries", "0"], ([],)),
        ("negative", ValueError, ["negative", "-1"], ([0, -1],)),
        ("float", TypeError, ["pads", "integers", "0.5"], ([0, 0.5],)),
        ("unknown auto_pad", ValueError, ["auto_pad", "'SAME'", "SAME_UPPER", "NOTSET"], (None, "SAME")),
        ("lower case", ValueError, ["auto_pad", "'valid'", "VALID"], (None, "valid")),
        ("bytes", ValueError, ["auto_pad", "b'VALID'", r"decode\(\)"], (None, b"VALID")),
        ("both", ValueError, ["pads", r"\[1, 1\]", "auto_pad", "VALID"], ([1, 1], "VALID")),
    ),
)
def test_onnx_padding(error, words, given):
    assert_refused(numpy_arrays(), error, words, cupyconv.onnx_padding, *given)
