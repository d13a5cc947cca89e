"""Refusals of shapes, numbers and names, each with its type and words, before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import Ones, assert_refused, conv_arguments, numpy_arrays, placed, table
from targets import numpy_target

import cupyconv

ml_dtypes = pytest.importorskip("ml_dtypes")

bfloat16 = np.dtype(ml_dtypes.bfloat16)


# --- conv -----------------------------------------------------------------------------------------------------

RANKS = table(
    ("weight of two axes", ["weight", "2 axes", "3 to 5", r"\(4, 5\)", r"kernel\[None, None\]"], dict(weight=Ones((4, 5)))),
    ("weight of one axis", ["weight", "1 axes", r"\(5,\)", r"kernel\[None, None\]"], dict(weight=Ones((5,)))),
    ("weight of six axes", ["weight", "6 axes", "3 to 5"], dict(weight=Ones((4, 5, 1, 1, 1, 1)))),
    ("x of too few axes", [r"\bx\b", r"\(8, 9\)", "4 axes"], dict(x=Ones((8, 9)))),
    ("x of too many axes", [r"\bx\b", r"\(2, 5, 8, 9, 1\)", "4 axes"], dict(x=Ones((2, 5, 8, 9, 1)))),
    ("one of two of other rank", [r"x\[1\]", r"\(2, 8, 9\)", "4 axes", "a list is merged"], dict(x=[Ones((2, 3, 8, 9)), Ones((2, 8, 9))])),
    ("batches differ", [r"x\[1\]", r"\(2, 3, 8, 9\)", r"\(3, 2, 8, 9\)"], dict(x=[Ones((2, 3, 8, 9)), Ones((3, 2, 8, 9))])),
    ("sizes differ", [r"x\[1\]", r"\(2, 3, 8, 9\)", r"\(2, 2, 8, 8\)"], dict(x=[Ones((2, 3, 8, 9)), Ones((2, 2, 8, 8))])),
    ("sizes that would broadcast", [r"x\[1\]", r"\(2, 2, 1, 1\)"], dict(x=[Ones((2, 3, 8, 9)), Ones((2, 2, 1, 1))])),
)  # fmt: skip

CHANNELS = table(
    ("too few", ["weight", "5 input channels", "4 channels", r"x\[0\]: 3", r"x\[1\]: 1"],
     dict(x=[Ones((2, 3, 8, 9)), Ones((2, 1, 8, 9))])),
    ("too many", ["weight", "5 input channels", "6 channels"], dict(x=Ones((2, 6, 8, 9)))),
    ("groups forgotten", ["weight", "groups=1", "2 input channels", "5 channels"], dict(weight=Ones((4, 2, 3, 3)))),
    ("channels last", ["weight", "5 input channels", "8 channels", r"\(2, 8, 9, 5\)", "before the spatial axes"],
     dict(x=Ones((2, 8, 9, 5)))),
    ("one filter for all", ["weight", "1 input channels", "5 channels", r"groups=C .* \(C, 1, 3, 3\)"],
     dict(weight=Ones((1, 1, 3, 3)))),
    ("groups not counted", ["weight", "groups=2", "8 input channels", "4 channels"],
     dict(x=Ones((2, 4, 8, 9)), weight=Ones((4, 4, 3, 3)), groups=2)),
    ("groups do not divide outputs", ["groups 3", "4 output channels"], dict(groups=3)),
    ("groups do not divide inputs", ["groups 2", "5 channels", r"x\[0\]: 3", r"x\[1\]: 2"], dict(groups=2)),
    ("no groups", ["groups", "at least 1", "0"], dict(groups=0)),
    ("negative groups", ["groups", "at least 1", "-1"], dict(groups=-1)),
)  # fmt: skip

SIZES = table(
    ("kernel larger than the input", ["kernel", "axis 0", "spans 9", "has 8"], dict(weight=Ones((4, 5, 9, 1)))),
    ("kernel larger than the padded input", ["kernel", "axis 1", "spans 12", "has 11"],
     dict(weight=Ones((4, 5, 3, 12)), padding=1)),
    ("dilated kernel larger than the input", ["kernel", "axis 0", "spans 9", "has 8", "dilation 4"], dict(dilation=4)),
    ("two taps on one element", ["kernel", "axis 1", "spans 2", "has 1"],
     dict(x=Ones((2, 5, 8, 1)), weight=Ones((4, 5, 1, 2)), residual=None, out=None)),
    ("kernel without taps", ["kernel", "at least one", r"\(3, 0\)"], dict(weight=Ones((4, 5, 3, 0)))),
    ("zero stride", ["stride", "at least 1", "0"], dict(stride=0)),
    ("negative stride", ["stride", "at least 1", "-2"], dict(stride=(1, -2))),
    ("stride of too few entries", ["stride", "1 entries", "2"], dict(stride=(1,))),
    ("stride of too many entries", ["stride", "3 entries", "2"], dict(stride=[1, 1, 1])),
    ("zero dilation", ["dilation", "at least 1", "0"], dict(dilation=0)),
    ("negative dilation", ["dilation", "at least 1", "-1"], dict(dilation=(-1, 1))),
    ("dilation of too many entries", ["dilation", "3 entries", "2"], dict(dilation=(1, 1, 1))),
)  # fmt: skip

NOT_INTEGERS = table(
    ("float stride", ["stride", "integers", "1.5"], dict(stride=1.5)),
    ("float stride of an axis", ["stride", "integers", "2.0"], dict(stride=(1, 2.0))),
    ("stride in words", ["stride", "integers", "'2'"], dict(stride="2")),
    ("no stride", ["stride", "integers", "None"], dict(stride=None)),
    ("float dilation", ["dilation", "integers", "1.0"], dict(dilation=1.0)),
    ("float groups", ["groups", "integers", "1.0"], dict(groups=1.0)),
    ("no groups", ["groups", "integers", "None"], dict(groups=None)),
    ("float padding", ["padding", "integers", "0.5"], dict(padding=0.5)),
    ("float padding of a side", ["padding", "integers", "0.5"], dict(padding=((0, 0), (0.5, 0)))),
    ("no padding", ["padding", "integers", "None"], dict(padding=None)),
)

ONE_AXIS = dict(x=Ones((1, 1, 9)), weight=Ones((1, 1, 3)), bias=None, residual=None, out=None)
THREE_AXES = dict(x=Ones((1, 1, 9, 9, 9)), weight=Ones((1, 1, 3, 3, 3)), bias=None, residual=None, out=None)

PADDING = table(
    ("negative", ["padding", "negative", "-1"], dict(padding=-1)),
    ("one axis negative", ["padding", "negative", "-2"], dict(padding=(1, -2))),
    ("one side negative", ["padding", "negative", "-3"], dict(padding=((0, 0), (0, -3)))),
    ("too few entries", ["padding", "1 entries", "2 spatial axes"], dict(padding=(1,))),
    ("too few pairs", ["padding", "1 entries", "2 spatial axes"], dict(padding=((1, 1),))),
    ("too many entries", ["padding", "3 entries", "2 spatial axes"], dict(padding=(1, 1, 1))),
    ("a triple for an axis", ["padding", "pair", r"\(1, 1, 1\)"], dict(padding=((1, 1, 1), (1, 1)))),
    ("flat ONNX list, two axes", ["padding", "4 entries", "2 spatial axes", "onnx_padding"], dict(padding=[0, 1, 0, 1])),
    ("flat ONNX list, three axes", ["6 entries", "3 spatial axes", "onnx_padding"],
     THREE_AXES | dict(padding=(0, 1, 0, 1, 0, 1))),
    ("lone pair, one axis", ["padding", "2 entries", r"write \(\(1, 2\),\)"], ONE_AXIS | dict(padding=(1, 2))),
    ("lone pair, three axes", ["padding", "2 entries", "single pair", r"\(\(1, 2\),\) \* 3"],
     THREE_AXES | dict(padding=(1, 2))),
    ("unknown name", ["padding", "'SAME'", "same_lower"], dict(padding="SAME")),
    ("causal over two axes", ["padding", "causal", "one spatial axis", "2"], dict(padding="causal")),
    ("unknown mode", ["padding_mode", "other libraries call 'zeros' is 'constant'", "reflect"], dict(padding=1, padding_mode="zeros")),
    ("unknown mode that would not be used", ["padding_mode", "'zeros'"], dict(padding_mode="zeros")),
    ("no mode", ["padding_mode", "None"], dict(padding_mode=None)),
    ("unhashable mode", ["padding_mode", "reflect"], dict(padding_mode=["reflect"])),
    ("nothing to repeat", ["padding_mode", "edge", "length 0"],
     ONE_AXIS | dict(x=Ones((1, 1, 0)), padding=2, padding_mode="edge")),
)  # fmt: skip

ADDENDS = table(
    ("short bias", ["bias", r"\(3,\)", r"\(4,\)"], dict(bias=Ones((3,)))),
    ("bias that would broadcast", ["bias", r"\(1,\)", r"\(4,\)"], dict(bias=Ones((1,)))),
    ("bias of two axes", ["bias", r"\(4, 1\)", r"\(4,\)"], dict(bias=Ones((4, 1)))),
    ("bias of no axes", ["bias", r"\(\)", r"\(4,\)"], dict(bias=Ones(()))),
    ("residual that would broadcast", ["residual", r"\(2, 4, 1, 1\)", r"\(2, 4, 6, 7\)"], dict(residual=Ones((2, 4, 1, 1)))),
    ("residual without batch", ["residual", r"\(4, 6, 7\)", r"\(2, 4, 6, 7\)"], dict(residual=Ones((4, 6, 7)))),
    ("residual of x's size", ["residual", r"\(2, 4, 8, 9\)", r"\(2, 4, 6, 7\)"], dict(residual=Ones((2, 4, 8, 9)))),
    ("short out", ["out", r"\(2, 4, 6, 6\)", r"\(2, 4, 6, 7\)"], dict(out=Ones((2, 4, 6, 6)))),
    ("out that could hold more", ["out", r"\(1, 2, 4, 6, 7\)", r"\(2, 4, 6, 7\)"], dict(out=Ones((1, 2, 4, 6, 7)))),
)  # fmt: skip

WITHOUT_BATCH = dict(x=Ones((5, 8, 9)), weight=Ones((4, 5, 3, 3)), bias=None, residual=None, out=None)

UNBATCHED = table(
    ("residual with a batch axis", ["residual", r"shape \(1, 4, 6, 7\)", r"needed \(4, 6, 7\)"],
     WITHOUT_BATCH | dict(residual=Ones((1, 4, 6, 7)))),
    ("residual of another size", ["residual", r"shape \(4, 6, 6\)", r"needed \(4, 6, 7\)"],
     WITHOUT_BATCH | dict(residual=Ones((4, 6, 6)))),
    ("out with a batch axis", ["out", r"shape \(1, 4, 6, 7\)", r"needed \(4, 6, 7\)"],
     WITHOUT_BATCH | dict(out=Ones((1, 4, 6, 7)))),
    ("out of another size", ["out", r"shape \(4, 7, 6\)", r"needed \(4, 6, 7\)"],
     WITHOUT_BATCH | dict(out=Ones((4, 7, 6)))),
    ("inputs of different sizes", [r"x\[1\]", r"shape \(3, 8, 9\)", r"\(2, 8, 8\)"],
     WITHOUT_BATCH | dict(x=[Ones((3, 8, 9)), Ones((2, 8, 8))])),
)  # fmt: skip

KINDS = table(
    ("out of another precision", ["out", "float64", "float32"], dict(out=Ones((2, 4, 6, 7), "float64"))),
    ("real out of a complex result", ["out", "float32", "complex64"], dict(weight=Ones((4, 5, 3, 3), "complex64"))),
    ("complex bias of a real result", ["bias", "complex64", "float32", "imaginary"], dict(bias=Ones((4,), "complex64"))),
    ("complex residual of a real result", ["residual", "complex128", "float32", "imaginary"],
     dict(residual=Ones((2, 4, 6, 7), "complex128"))),
    ("activation of complex x", ["activation", "relu", "complex64"],
     dict(x=Ones((2, 5, 8, 9), "complex64"), activation="relu")),
    ("activation of complex weight", ["activation", "tanh", "complex64"],
     dict(weight=Ones((4, 5, 3, 3), "complex64"), activation="tanh")),
    ("two 16-bit types", ["weight", "bfloat16", r"\bx\b", r"\bfloat16"],
     dict(x=Ones((2, 5, 8, 9), "float16"), weight=Ones((4, 5, 3, 3), bfloat16), out=None)),
    ("two 16-bit types among the inputs", [r"\bx\b", r"\bfloat16", "bfloat16"],
     dict(x=[Ones((2, 3, 8, 9), "float16"), Ones((2, 2, 8, 9), bfloat16)], out=None)),
)  # fmt: skip

ACTIVATIONS = table(
    ("unknown", ValueError, ["activation", "'swish'", "known are relu, .*silu, mish, softplus$"], "swish"),
    ("capitals", ValueError, ["activation", "'ReLU'", "write 'relu'"], "ReLU"),
    ("ONNX's spelling", ValueError, ["activation", "'HardSigmoid'", "write 'hard_sigmoid'"], "HardSigmoid"),
    ("parameters that it has not", ValueError, ["activation 'relu'", "0", "given 1"], ("relu", 1)),
    ("too many parameters", ValueError, ["activation 'leaky_relu'", "0 to 1", "given 2"], ("leaky_relu", 1, 2)),
    ("parameters missing", ValueError, ["activation 'clip' takes 2 parameters", "given 0", r"\('clip', "], "clip"),
    ("one parameter missing", ValueError, ["activation 'clip'", "2", "given 1"], ("clip", 0)),
    ("bounds exchanged", ValueError, ["activation 'clip'", "low <= high", "6", "0"], ("clip", 6, 0)),
    ("bound that is not a number", ValueError, ["activation 'clip'", "nan"], ("clip", 0, float("nan"))),
    ("parameter in words", TypeError, ["leaky_relu", "real number", "'0.1'"], ("leaky_relu", "0.1")),
    ("parameter None", TypeError, ["elu", "real number", "None"], ("elu", None)),
    ("number", TypeError, ["activation", "name", "6"], 6),
    ("function", TypeError, ["activation", "name", "tanh", "to the result"], np.tanh),
    ("empty tuple", TypeError, ["activation", "name", r"\(\)"], ()),
    *((f"recurrent only: {name}", ValueError, ["activation", name, "recurrent"], name)
      for name in ("affine", "thresholded_relu", "scaled_tanh", "softsign")),
)  # fmt: skip

METHODS = table(
    ("another", ValueError, ["unknown method", "wavelet", "direct", "gemm", "implicit_gemm", "fft"], "wavelet"),
    ("unknown", ValueError, ["method", "'im2col'", "auto", "direct", "gemm"], "im2col"),
    ("capitals", ValueError, ["method", "'GEMM'"], "GEMM"),
    ("None", ValueError, ["method", "None"], None),
    ("unhashable", ValueError, ["method", "gemm"], ["gemm"]),
)  # fmt: skip


@pytest.mark.parametrize("words, changes", [*RANKS, *CHANNELS, *SIZES, *PADDING, *ADDENDS, *UNBATCHED])
def test_values(target, words, changes):
    assert_refused(target, ValueError, words, cupyconv.conv, **conv_arguments(target, changes))


@pytest.mark.parametrize("words, changes", [*NOT_INTEGERS, *KINDS])
def test_types(target, words, changes):
    assert_refused(target, TypeError, words, cupyconv.conv, **conv_arguments(target, changes))


@pytest.mark.parametrize("error, words, activation", ACTIVATIONS)
def test_activations(target, error, words, activation):
    assert_refused(target, error, words, cupyconv.conv, **conv_arguments(target, dict(activation=activation)))


@pytest.mark.parametrize("error, words, method", METHODS)
def test_methods(target, error, words, method):
    assert_refused(target, error, words, cupyconv.conv, **conv_arguments(target, dict(method=method)))


def test_implicit_gemm_is_not_for_numpy():
    words = ["method 'implicit_gemm' does not apply: not supported on NumPy", "BLAS reads matrices", "'gemm'"]
    arguments = conv_arguments(numpy_target(), dict(method="implicit_gemm"))
    assert_refused(numpy_target(), ValueError, words, cupyconv.conv, **arguments)


PROLOGUES = table(
    ("a name", TypeError, ["prologue", r"\(scale, shift, activation\)", "'relu'"], "relu"),
    ("too few entries", ValueError, ["prologue", "2 entries", "3"], (None, "relu")),
    ("too many entries", ValueError, ["prologue", "4 entries", "3"], (None, None, "relu", None)),
    ("scale of one input", ValueError, ["scale", r"\(3,\)", r"\(5,\)"], (Ones((3,)), None, None)),
    ("shift that would broadcast", ValueError, ["shift", r"\(1,\)", r"\(5,\)"], (None, Ones((1,)), None)),
    ("shift of two axes", ValueError, ["shift", r"\(5, 1\)", r"\(5,\)"], (None, Ones((5, 1)), None)),
    ("integer scale", TypeError, ["scale", "int32", "astype"], (Ones((5,), "int32"), None, None)),
    ("complex scale", TypeError, ["scale", "complex64", "float32", "imaginary"], (Ones((5,), "complex64"), None, None)),
    ("complex shift", TypeError, ["shift", "complex128", "float32"], (None, Ones((5,), "complex128"), None)),
    ("a number for a scale", TypeError, ["scale", "float"], (2.0, None, None)),
    ("a list for a shift", TypeError, ["shift", "list"], (None, [1.0] * 5, None)),
    ("unknown activation", ValueError, ["activation", "'swish'"], (None, None, "swish")),
    ("recurrent activation", ValueError, ["activation", "'softsign'"], (None, None, "softsign")),
    ("an array for an activation", TypeError, ["activation"], (None, None, Ones((5,)))),
)  # fmt: skip


@pytest.mark.parametrize("error, words, prologue", PROLOGUES)
def test_prologues(target, error, words, prologue):
    prologue = tuple(placed(part, target) for part in prologue) if isinstance(prologue, tuple) else prologue
    assert_refused(target, error, words, cupyconv.conv, **conv_arguments(target, {}), prologue=prologue)


@pytest.mark.parametrize("x_dtype, weight_dtype", [("complex64", "float32"), ("float32", "complex64")])
def test_a_prologue_of_complex_numbers_has_no_activation(target, x_dtype, weight_dtype):
    x, weight = placed(Ones((1, 2, 8), x_dtype), target), placed(Ones((3, 2, 3), weight_dtype), target)
    words = ["prologue activation relu", "complex64"]
    assert_refused(target, TypeError, words, cupyconv.conv, x, weight, prologue=(None, None, "relu"))


def test_the_call_that_is_varied_is_valid(target):
    """The call that the tests above vary is valid, or they would pass for the wrong reason."""
    arguments = conv_arguments(target, {})
    assert cupyconv.conv(**arguments) is arguments["out"]
    assert (target.to_host(arguments["out"]) == 5 * 9 + 1 + 1).all()


@pytest.mark.parametrize("method", ["gemm", "direct"])
def test_a_workspace_limit_that_a_named_method_exceeds(target, method):
    """A method without workspace runs; any other method is refused with the workspace it needs and the limit."""
    x, weight = placed(Ones((1, 64, 40, 40)), target), placed(Ones((8, 64, 3, 3)), target)
    with cupyconv.options(workspace_limit=1):
        if target.name != "numpy" and method == "direct":
            assert cupyconv.explain(cupyconv.conv, x, weight, method=method).workspace_bytes == 0
        else:
            words = [f"method '{method}' does not apply", "workspace", "limit", r"\b1\b"]
            assert_refused(target, ValueError, words, cupyconv.conv, x, weight, method=method)


def test_explain_refuses_what_the_call_refuses(target):
    """`explain` refuses every call that `conv` refuses above, with the same words."""
    for parameter in (*RANKS, *CHANNELS, *SIZES, *PADDING, *ADDENDS, *KINDS, *NOT_INTEGERS):
        arguments = conv_arguments(target, parameter.values[-1])
        with pytest.raises((TypeError, ValueError)) as of_call:
            cupyconv.conv(**arguments)
        with pytest.raises((TypeError, ValueError)) as of_explain:
            cupyconv.explain(cupyconv.conv, **arguments)
        assert (of_explain.type, str(of_explain.value)) == (of_call.type, str(of_call.value))


# --- linmerge, im2col, col2im ---------------------------------------------------------------------------------

LINMERGE = dict(xs=[Ones((2, 3, 7)), Ones((2, 2, 7))], weight=Ones((4, 5)), out=Ones((2, 4, 7)))

MERGES = table(
    ("no channel axis", ValueError, ["xs", r"\(N, C, ", r"\(7,\)"], dict(xs=Ones((7,)))),
    ("weight of three axes", ValueError, ["weight", "two axes", r"\(4, 5, 1\)"], dict(weight=Ones((4, 5, 1)))),
    ("channels", ValueError, ["weight", "5 channels", "6 channels", r"xs\[0\]: 3", r"xs\[1\]: 3"],
     dict(xs=[Ones((2, 3, 7)), Ones((2, 3, 7))])),
    ("sizes differ", ValueError, [r"xs\[1\]", r"\(2, 2, 6\)"], dict(xs=[Ones((2, 3, 7)), Ones((2, 2, 6))])),
    ("ranks differ", ValueError, [r"xs\[1\]", r"\(2, 2\)"], dict(xs=[Ones((2, 3, 7)), Ones((2, 2))])),
    ("no batch axis", ValueError, ["xs", r"\(5, 7\)", "channels", r"array\[None\]"], dict(xs=Ones((5, 7)))),
    ("integers", TypeError, [r"xs\[0\]", "int32", "astype"], dict(xs=[Ones((2, 5, 7), "int32")])),
    ("bias", ValueError, ["bias", r"\(5,\)", r"\(4,\)"], dict(bias=Ones((5,)))),
    ("residual", ValueError, ["residual", r"\(2, 4, 1\)", r"\(2, 4, 7\)"], dict(residual=Ones((2, 4, 1)))),
    ("out", ValueError, ["out", r"\(2, 4, 8\)", r"\(2, 4, 7\)"], dict(out=Ones((2, 4, 8)))),
    ("activation", ValueError, ["activation", "'swish'"], dict(activation="swish")),
    ("prologue", ValueError, ["prologue", "2 entries"], dict(prologue=(None, None))),
    ("method", ValueError, ["unknown method", "wavelet"], dict(method="wavelet")),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changes", MERGES)
def test_linmerge(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (LINMERGE | changes).items()}
    assert_refused(target, error, words, cupyconv.linmerge, **arguments)


# More spatial axes than the kernels have are reduced to three, and no check may get lost.
FIVE_AXES = (2, 3, 4, 5)

BEYOND_THREE = table(
    ("out shape", ValueError, ["out", r"\(2, 4, 2, 3, 4, 6\)", "2, 3, 4, 5"], dict(out=Ones((2, 4, 2, 3, 4, 6)))),
    ("out of as many elements", ValueError, ["out", r"\(2, 4, 3, 2, 4, 5\)"], dict(out=Ones((2, 4, 3, 2, 4, 5)))),
    ("out channels", ValueError, ["out", r"\(2, 3, 2, 3, 4, 5\)", r"\(2, 4, 2, 3, 4, 5\)"],
     dict(out=Ones((2, 3, *FIVE_AXES)))),
    ("out dtype", TypeError, ["out", "float64", "float32"], dict(out=Ones((2, 4, *FIVE_AXES), "float64"))),
    ("residual", ValueError, ["residual", r"\(2, 4, 2, 3, 4, 1\)"], dict(residual=Ones((2, 4, 2, 3, 4, 1)))),
    ("residual channels", ValueError, ["residual", r"\(2, 1, 2, 3, 4, 5\)", r"\(2, 4, 2, 3, 4, 5\)"],
     dict(residual=Ones((2, 1, *FIVE_AXES)))),
    ("channels", ValueError, ["weight", "5 channels", "3 channels"], dict(xs=Ones((2, 3, *FIVE_AXES)))),
    ("sizes differ", ValueError, [r"xs\[1\]", r"\(2, 2, 2, 3, 4, 1\)"],
     dict(xs=[Ones((2, 3, *FIVE_AXES)), Ones((2, 2, 2, 3, 4, 1))])),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changes", BEYOND_THREE)
def test_linmerge_over_four_axes(target, error, words, changes):
    base = dict(xs=Ones((2, 5, *FIVE_AXES)), weight=Ones((4, 5)), out=Ones((2, 4, *FIVE_AXES)))
    arguments = {name: placed(value, target) for name, value in (base | changes).items()}
    assert_refused(target, error, words, cupyconv.linmerge, **arguments)


def test_linmerge_over_four_strided_axes_checks_out_itself(target):
    """These strides allow no view of three axes; the checks apply to `out` itself, not to its substitute."""
    memory = target.to_device(np.ones((2, 5, *FIVE_AXES[::-1]), np.float32))
    x = memory.transpose(0, 1, 5, 4, 3, 2)
    weight = placed(Ones((5, 5)), target)
    assert_refused(target, ValueError, ["out overlaps xs"], cupyconv.linmerge, x, weight, out=x)
    words = ["out overlaps residual"]
    other = placed(Ones((2, 5, *FIVE_AXES)), target)
    residual, out = x[..., ::-1], x
    assert_refused(target, ValueError, words, cupyconv.linmerge, other, weight, residual=residual, out=out)


def test_linmerge_over_four_strided_axes_into_read_only_out():
    out = np.full((2, 5, *FIVE_AXES[::-1]), 7.0).transpose(0, 1, 5, 4, 3, 2)
    out.flags.writeable = False
    x, weight = np.ones((2, 3, *FIVE_AXES)), np.ones((5, 3))
    words = [r"\bout\b", "is read-only"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.linmerge, x, weight, out=out)


IM2COL = dict(x=Ones((2, 3, 8, 9)), kernel_shape=(3, 3), out=Ones((2, 27, 42)))

COLUMNS = table(
    ("two axes", ValueError, [r"\bx\b", "2 axes", "3 to 5"], dict(x=Ones((8, 9)), kernel_shape=3)),
    ("six axes", ValueError, [r"\bx\b", "6 axes", "3 to 5"], dict(x=Ones((1,) * 6), kernel_shape=1)),
    ("kernel of one entry", ValueError, ["kernel_shape", "1 entries", "2"], dict(kernel_shape=(3,))),
    ("zero kernel", ValueError, ["kernel_shape", "at least 1", "0"], dict(kernel_shape=(3, 0))),
    ("float kernel", TypeError, ["kernel_shape", "integers", "3.0"], dict(kernel_shape=3.0)),
    ("no kernel", TypeError, ["kernel_shape", "integers", "None"], dict(kernel_shape=None)),
    ("large kernel", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=9)),
    ("stride", ValueError, ["stride", "at least 1", "0"], dict(stride=0)),
    ("padding", ValueError, ["padding", "negative", "-1"], dict(padding=-1)),
    ("dilation", TypeError, ["dilation", "integers", "1.5"], dict(dilation=1.5)),
    ("integers", TypeError, [r"\bx\b", "int32", "astype"], dict(x=Ones((2, 3, 8, 9), "int32"))),
    ("inputs differ", ValueError, [r"x\[1\]", r"\(2, 3, 8, 8\)"], dict(x=[Ones((2, 3, 8, 9)), Ones((2, 3, 8, 8))])),
    ("out shape", ValueError, ["out", r"\(2, 27, 6, 7\)", r"\(2, 27, 42\)"], dict(out=Ones((2, 27, 6, 7)))),
    ("out dtype", TypeError, ["out", "float64", "float32"], dict(out=Ones((2, 27, 42), "float64"))),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changes", COLUMNS)
def test_im2col(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (IM2COL | changes).items()}
    assert_refused(target, error, words, cupyconv.im2col, **arguments)


COL2IM = dict(columns=Ones((2, 27, 42)), spatial_shape=(8, 9), kernel_shape=3, out=Ones((2, 3, 8, 9)))

IMAGES = table(
    ("columns of one axis", ValueError, ["columns", "shape", r"\(42,\)"], dict(columns=Ones((42,)))),
    ("columns of four axes", ValueError, ["columns", "shape", r"\(2, 27, 6, 7\)"], dict(columns=Ones((2, 27, 6, 7)))),
    ("rows", ValueError, ["columns", r"\(2, 26, 42\)", "multiple of 9"], dict(columns=Ones((2, 26, 42)))),
    ("pixels", ValueError, ["columns", r"\(2, 27, 41\)", "42 pixels", r"\(8, 9\)"], dict(columns=Ones((2, 27, 41)))),
    ("no spatial axes", ValueError, ["spatial_shape", r"\(\)"], dict(spatial_shape=())),
    ("four spatial axes", ValueError, ["spatial_shape", "4"], dict(spatial_shape=(1, 1, 8, 9))),
    ("negative size", ValueError, ["spatial_shape", "-9"], dict(spatial_shape=(8, -9))),
    ("float size", TypeError, ["spatial_shape", "integers", "9.0"], dict(spatial_shape=(8, 9.0))),
    ("no size", TypeError, ["spatial_shape", "integers", "None"], dict(spatial_shape=None)),
    ("kernel of three entries", ValueError, ["kernel_shape", "3 entries", "2"], dict(kernel_shape=(3, 3, 3))),
    ("large kernel", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=9)),
    ("integers", TypeError, ["columns", "int64", "astype"], dict(columns=Ones((2, 27, 42), "int64"))),
    ("no columns", TypeError, ["columns", "None"], dict(columns=None)),
    ("list of columns", TypeError, ["columns", "list"], dict(columns=[Ones((2, 27, 42))])),
    ("out shape", ValueError, ["out", r"\(2, 3, 9, 8\)", r"\(2, 3, 8, 9\)"], dict(out=Ones((2, 3, 9, 8)))),
    ("out dtype", TypeError, ["out", "float16", "float32"], dict(out=Ones((2, 3, 8, 9), "float16"))),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changes", IMAGES)
def test_col2im(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (COL2IM | changes).items()}
    assert_refused(target, error, words, cupyconv.col2im, **arguments)


def test_columns_that_share_memory_with_out(target):
    memory = target.to_device(np.ones((1, 3, 6), np.float32))
    assert_refused(target, ValueError, ["out overlaps x"], cupyconv.im2col, memory, 1, out=memory)
    assert_refused(target, ValueError, ["out overlaps columns"], cupyconv.col2im, memory, 6, 1, out=memory)


MAX_POOL = dict(x=Ones((2, 3, 8, 9)), kernel_shape=(2, 2), out=Ones((2, 3, 4, 4)))

POOLS = table(
    ("complex", TypeError, [r"\bx\b", "complex64", "no order"], dict(x=Ones((2, 3, 8, 9), "complex64"))),
    ("integers", TypeError, [r"\bx\b", "int32", "astype"], dict(x=Ones((2, 3, 8, 9), "int32"))),
    ("two axes", ValueError, [r"\bx\b", "2 axes", "3 to 5"], dict(x=Ones((8, 9)), kernel_shape=2)),
    ("kernel of one entry", ValueError, ["kernel_shape", "1 entries", "2", r"x, .*\(2, 3, 8, 9\)"], dict(kernel_shape=(2,))),
    ("float kernel", TypeError, ["kernel_shape", "integers", "2.0"], dict(kernel_shape=2.0)),
    ("large kernel", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=9)),
    ("beyond the last window", ValueError, ["kernel", "spans 10", "has 8"],
     dict(kernel_shape=(10, 1), stride=2, ceil_mode=True, out=None)),
    ("stride", ValueError, ["stride", "at least 1", "0"], dict(stride=0)),
    ("padding", ValueError, ["padding", "negative", "-1"], dict(padding=-1)),
    ("dilation", TypeError, ["dilation", "integers", "1.5"], dict(dilation=1.5)),
    ("no arrays", ValueError, [r"\bx\b", "empty sequence"], dict(x=[], out=[])),
    ("inputs differ", ValueError, [r"x\[1\]", r"\(2, 3, 8, 8\)"],
     dict(x=[Ones((2, 3, 8, 9)), Ones((2, 3, 8, 8))], out=None)),
    ("one out for two", TypeError, ["out", "sequence", r"\bx\b"], dict(x=[Ones((2, 3, 8, 9))] * 2)),
    ("too few", ValueError, ["out", "1 arrays", "needed 2"], dict(x=[Ones((2, 3, 8, 9))] * 2, out=[Ones((2, 3, 4, 4))])),
    ("a hole", TypeError, [r"out\[0\]", "NoneType"], dict(x=[Ones((2, 3, 8, 9))], out=[None])),
    ("out shape", ValueError, ["out", r"\(2, 3, 4, 5\)", r"\(2, 3, 4, 4\)"], dict(out=Ones((2, 3, 4, 5)))),
    ("out dtype", TypeError, ["out", "float64", "float32"], dict(out=Ones((2, 3, 4, 4), "float64"))),
)  # fmt: skip


@pytest.mark.parametrize("error, words, changes", POOLS)
def test_max_pool(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (MAX_POOL | changes).items()}
    assert_refused(target, error, words, cupyconv.max_pool, **arguments)


def test_results_of_max_pool_that_share_memory(target):
    x, memory = placed(Ones((1, 1, 8)), target), target.to_device(np.ones((1, 1, 6), np.float32))
    meeting = [memory[..., :4], memory[..., 2:]]
    assert_refused(target, ValueError, [r"out\[0\] overlaps out\[1\]"], cupyconv.max_pool, [x, x], 2, out=meeting)
    assert_refused(target, ValueError, ["out overlaps x"], cupyconv.max_pool, x, 1, out=x)


def test_too_little_workspace_for_a_window():
    with cupyconv.options(workspace_limit=10):
        words = ["smallest block needs", "the limit is 10"]
        assert_refused(numpy_arrays(), ValueError, words, cupyconv.max_pool, np.ones((1, 1, 8, 8)), 3)


# --- arguments that nobody would give on purpose ---------------------------------------------------------------

RING: list[Any] = []
RING.append(RING)
HOLDS_ITSELF = (1, RING)
TOO_LARGE = 10**400  # for a float
GRU = dict(x=Ones((5, 2, 3)), weight_ih=Ones((12, 3)), weight_hh=Ones((12, 4)))
ONNX_GRU = dict(op="GRU", W=Ones((1, 12, 3)), R=Ones((1, 12, 4)), B=Ones((1, 24)))
FOLD = dict(weight=Ones((4, 5, 3, 3)), bias=Ones((4,)), mean=Ones((4,)), var=Ones((4,)))
CONV_ALONE = dict(x=Ones((2, 5, 8, 9)), weight=Ones((4, 5, 3, 3)))

ODD = table(
    ("stride holds itself", TypeError, ["stride", "integers"], "conv", CONV_ALONE | dict(stride=HOLDS_ITSELF)),
    ("padding holds itself", ValueError, ["padding", "pair"], "conv", CONV_ALONE | dict(padding=HOLDS_ITSELF)),
    ("activation holds itself", TypeError, ["activation"], "conv", CONV_ALONE | dict(activation=HOLDS_ITSELF)),
    ("method holds itself", ValueError, ["method"], "conv", CONV_ALONE | dict(method=HOLDS_ITSELF)),
    ("method is an array", ValueError, ["method", "array"], "conv", CONV_ALONE | dict(method=Ones((2,)))),
    ("parameter too large", ValueError, ["leaky_relu", "float"], "conv",
     CONV_ALONE | dict(activation=("leaky_relu", TOO_LARGE))),
    ("direction is a list", ValueError, ["direction", "bidirectional", "forward"], "gru", GRU | dict(direction=["forward"])),
    ("direction is an array", ValueError, ["direction", "array"], "gru", GRU | dict(direction=Ones((2,)))),
    ("recurrent method is an array", ValueError, ["method", "array"], "gru", GRU | dict(method=Ones((2,)))),
    ("clip too large", ValueError, ["clip", "float"], "gru", GRU | dict(clip=TOO_LARGE)),
    ("x of two axes beside a list of lengths", ValueError, [r"\bx\b", r"\(5, 3\)", "T, N, I"], "gru",
     GRU | dict(x=Ones((5, 3)), lengths=[5, 3])),
    ("lengths in rows", TypeError, ["lengths", "integers", r"\[1\], \[2, 3\]"], "gru", GRU | dict(lengths=[[1], [2, 3]])),
    ("op is a list", ValueError, ["op", "LSTM", "GRU"], "from_onnx_weights", ONNX_GRU | dict(op=["GRU"])),
    ("W is a list", TypeError, [r"\bW\b", "list"], "from_onnx_weights", ONNX_GRU | dict(W=[[[1.0]]])),
    ("R is absent", TypeError, [r"\bR\b", "NoneType"], "from_onnx_weights", ONNX_GRU | dict(R=None)),
    ("B is a number", TypeError, [r"\bB\b", "float"], "from_onnx_weights", ONNX_GRU | dict(B=0.5)),
    ("eps too large", ValueError, ["eps", "float"], "fold_batchnorm", FOLD | dict(eps=TOO_LARGE)),
    ("transposed is a number", TypeError, ["transposed", "True or False", "1"], "fold_batchnorm", FOLD | dict(transposed=1)),
    # True would count as 1, but was meant for another argument, or for one of another library
    ("groups is True", TypeError, ["groups accepts only integers, given True"], "conv", CONV_ALONE | dict(groups=True)),
    ("stride is True", TypeError, ["stride accepts only integers, given True"], "conv", CONV_ALONE | dict(stride=True)),
    ("padding has True", TypeError, ["padding .*integers, given True"], "conv", CONV_ALONE | dict(padding=((0, True), 1))),
    ("kernel_shape is True", TypeError, ["kernel_shape .*given True"], "max_pool", dict(x=Ones((2, 5, 8, 9)), kernel_shape=True)),
    ("parameter is True", TypeError, ["leaky_relu", "real number, given True"], "conv",
     CONV_ALONE | dict(activation=("leaky_relu", True))),
    ("clip is True", TypeError, ["clip must be a real number, given True"], "gru", GRU | dict(clip=True)),
    ("eps is True", TypeError, ["eps must be a real number, given True"], "fold_batchnorm", FOLD | dict(eps=True)),
    ("workspace_limit is True", TypeError, ["workspace_limit must be an integer or None, given True"], "options",
     dict(workspace_limit=True)),
    ("pads is a number", TypeError, ["pads", "sequence", "3"], "onnx_padding", dict(pads=3)),
    ("auto_pad is a list", ValueError, ["auto_pad", "VALID"], "onnx_padding", dict(pads=None, auto_pad=["VALID"])),
)  # fmt: skip


@pytest.mark.parametrize("error, words, function, arguments", ODD)
def test_odd_arguments(error, words, function, arguments):
    """Odd arguments are refused like others, without internal errors or NumPy's about truth values or hashes."""
    given = {name: placed(value, numpy_arrays()) for name, value in arguments.items()}
    assert_refused(numpy_arrays(), error, words, getattr(cupyconv, function), **given)


@pytest.mark.parametrize("needs", [3, np.array(1), object()], ids=lambda value: type(value).__name__)
def test_needs_that_are_no_names(needs):
    y, pullback = cupyconv.vjp(cupyconv.conv, np.ones((1, 1, 3)), np.ones((1, 1, 2)))
    assert_refused(numpy_arrays(), TypeError, ["needs must be a sequence of gradient names"], pullback, y, needs=needs)
    assert_refused(numpy_arrays(), ValueError, ["needs", "residual"], pullback, y, needs=[np.ones(2)])


TWO_KINDS = [Ones((1, 2, 3, 3), "float16"), Ones((1, 2, 3, 3), bfloat16)]
NO_COMMON_DTYPE = table(
    ("im2col", [r"x\[0\] \(float16\)", r"x\[1\] \(bfloat16\)"], "im2col", (TWO_KINDS, (2, 2))),
    ("linmerge", [r"xs\[0\] \(float16\)", r"xs\[1\] \(bfloat16\)"], "linmerge", (TWO_KINDS, Ones((4, 4), "float16"))),
    ("conv_grad_input", [r"grad \(float16\)", r"weight \(bfloat16\)"], "conv_grad_input",
     (Ones((1, 4, 2, 2), "float16"), Ones((4, 2, 2, 2), bfloat16), (1, 2, 3, 3))),
)  # fmt: skip


@pytest.mark.parametrize("words, function, given", NO_COMMON_DTYPE)
def test_arguments_without_a_common_dtype_are_named(words, function, given):
    arguments = [placed(one, numpy_arrays()) for one in given]
    assert_refused(numpy_arrays(), TypeError, words, getattr(cupyconv, function), *arguments)


@pytest.mark.parametrize("lengths, given", [([-1, 2], "-1 to 2"), ([6, 2], "2 to 6")], ids=str)
def test_lengths_in_a_subclass_of_arrays_are_looked_at(lengths, given):
    """Lengths in a subclass of ndarray, such as a memory-mapped file, are checked."""
    arguments = {name: placed(value, numpy_arrays()) for name, value in GRU.items()}
    mapped = np.array(lengths).view(type("Mapped", (np.ndarray,), {}))
    words = ["lengths must be from 0 to 5", given]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.gru, **arguments, lengths=mapped)


# --- hints ----------------------------------------------------------------------------------------------------


def test_a_padding_mode_without_padding_is_refused(target):
    x, weight = placed(Ones((1, 1, 5)), target), placed(Ones((1, 1, 2)), target)
    words = ["padding_mode 'edge'", "padding=0", "'same'", "'valid'"]
    assert_refused(target, ValueError, words, cupyconv.conv, x, weight, padding_mode="edge")
    for padding in ("valid", (0,), ((0, 0),)):
        assert cupyconv.conv(x, weight, padding=padding, padding_mode="edge").shape == (1, 1, 4)
    assert cupyconv.conv(x, weight[:, :, :1], padding=0, padding_mode="edge").shape == (1, 1, 5)


@pytest.mark.parametrize("name", ["same", "full"])
def test_a_padding_given_as_a_padding_mode(name):
    words = [f"unknown padding_mode '{name}'", f"is a padding: pass padding='{name}'$"]
    assert_refused(
        numpy_arrays(), ValueError, words, cupyconv.conv, np.ones((1, 1, 5)), np.ones((1, 1, 3)), padding_mode=name
    )


def test_a_name_in_an_arrays_place():
    """A name in an array's place is refused, as in ``scipy.signal.fftconvolve(image, kernel, "same")``."""
    words = ["bias must be an array, not the str 'same': pass settings by name, for example padding='same'"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.conv, np.ones((1, 1, 5)), np.ones((1, 1, 3)), "same")


@pytest.mark.parametrize("function", [cupyconv.conv, cupyconv.conv_transpose])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_an_image_without_channels(function, rank):
    x, weight = np.ones((9,) * rank), np.ones((1, 1, *(3,) * rank))
    assert_refused(
        numpy_arrays(),
        ValueError,
        [r"spatial ax[ei]s; for an image without channels, pass x\[None\]$"],
        function,
        x,
        weight,
    )
    assert function(x[None], weight).ndim == rank + 1


@pytest.mark.parametrize("shape", [(9,), (9, 9)], ids=str)
def test_an_image_without_samples_and_channels_to_pool(shape):
    words = [r"; for one sample of one channel, pass x\[None, None\]$"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.max_pool, np.ones(shape), 3)
    assert cupyconv.max_pool(np.ones(shape)[None, None], 3).shape == (1, 1, *(3,) * len(shape))


@pytest.mark.parametrize(
    "shape, kernel, hinted",
    [
        ((9, 9, 9), (5, 5, 5), True),
        ((2, 9, 9, 9), (3, 5, 5), True),
        ((2, 9, 9), (4, 3, 5), False),
        ((2, 9, 9), (3, 3, 5), False),
        ((2, 9), (3, 3, 3), False),
    ],
    ids=str,
)
def test_a_kernel_of_three_axes_alone(shape, kernel, hinted):
    """A kernel of three axes reads as a weight of one spatial axis; a call with signals gets no hint about volumes."""
    x, weight = np.ones(shape), np.ones(kernel)
    with pytest.raises(ValueError) as caught:
        cupyconv.conv(x, weight)
    assert ("for a kernel of three spatial axes, pass weight[None, None]" in str(caught.value)) == hinted


@pytest.mark.parametrize("shape", [(3, 9, 9), (2, 3, 9, 9), (2, 3, 3, 9), (1, 3, 9)], ids=str)
def test_a_kernel_for_each_channel_without_its_axis(shape):
    words = [r"pass weight\[:, None\] of shape \(3, 1, 5, 5\)"] * (len(shape) > 3 or shape[0] == 3)
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones(shape), np.ones((3, 5, 5)), groups=3)


@pytest.mark.parametrize(
    "shape, kernel, groups", [((1, 1, 100), (1, 2, 3), 1), ((2, 3, 5, 5, 5), (2, 1, 3, 3, 3), 2)], ids=str
)
def test_a_weight_with_all_its_axes_is_not_taken_for_kernels(shape, kernel, groups):
    with pytest.raises(ValueError) as caught:
        cupyconv.conv(np.ones(shape), np.ones(kernel), groups=groups)
    assert "a kernel" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 9, 9, 9), (2, 3, 9, 9, 9)], ids=str)
def test_a_volume_for_each_channel_without_its_axis(shape):
    words = [r"for a kernel for each of 3 channels, pass weight\[:, None\] of shape \(3, 1, 5, 5, 5\)"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones(shape), np.ones((3, 5, 5, 5)), groups=3)


@pytest.mark.parametrize(
    "shape, hint",
    [
        ((1, 64, 64), r"axis N of samples is missing: for one sample, pass array\[None\]"),
        ((64, 64), r"array\[None, None\]"),
    ],
)
def test_linmerge_names_the_missing_axis(shape, hint):
    words = ["takes 3 channels", hint]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.linmerge, [np.ones(shape)] * 3, np.ones((2, 3)))


def test_linmerge_names_the_missing_samples_of_inputs_that_do_not_agree():
    words = [
        "must agree in all but the channel axis",
        r"axis N of samples is missing: for one sample, pass array\[None\]",
    ]
    fields = [np.ones((3, 100)), np.ones((2, 100))]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.linmerge, fields, np.ones((4, 5)))


def test_linmerge_names_the_array_without_axes():
    fields = [np.ones((1, 1, 3)), np.ones(())]
    assert_refused(numpy_arrays(), ValueError, [r"xs\[1\] has shape \(\)"], cupyconv.linmerge, fields, np.ones((1, 2)))


@pytest.mark.parametrize("shapes", [((2, 100, 3), (2, 100, 2)), ((1, 3, 100), (3, 2, 100))])
def test_linmerge_misses_no_samples_where_the_rest_of_the_shapes_says_that_they_are_there(shapes):
    """Samples that add up to the weight's channels are a coincidence if channels are last, or for two batches."""
    fields = [np.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=r"must agree in all but the channel axis: [^;]*$"):
        cupyconv.linmerge(fields, np.ones((5, 4)))


def test_an_array_is_no_tuple_of_numbers_nor_a_shape():
    """An array in place of numbers or of a shape is refused in a few words, without its elements."""
    x, kernel = np.ones((1, 1, 8, 8)), np.ones((1, 1, 3, 3))
    words = [r"^stride accepts only integers, given an array of shape \(2,\): pass a tuple$"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.conv, x, kernel, stride=np.array([1, 2]))
    words = ["a shape or a sequence of shapes, given an array: pass its shape$"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.conv_grad_input, np.ones((1, 1, 6, 6)), kernel, x)


def test_an_input_shape_without_channels_is_told_the_shape_with_them():
    """A shape was once told to be indexed as an array, as ``input_shape[None]``."""
    words = [r"for an image without channels, pass \(1, 6, 6\)$"]
    grad, kernel = np.ones((3, 4, 4)), np.ones((3, 1, 3, 3))
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv_grad_input, grad, kernel, (6, 6))
