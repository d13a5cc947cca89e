"""Every refusal: its type, its words, and that nothing was launched or written before it.

A refusal is a valid call with one thing wrong, and the words its message must hold: the argument's name, what was given
and what was needed.  The words are regular expressions, searched for one by one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from targets import Target, numpy_target

import cupyconv
from cupyconv.call import dispatch
from cupyconv.numpy import NumpyBackend

ml_dtypes = pytest.importorskip("ml_dtypes")

bfloat16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Ones:
    """An array of ones, before it is on a device."""

    shape: tuple[int, ...]
    dtype: Any = "float32"


def placed(value: Any, target: Target) -> Any:
    """`value` with every `Ones` in it as an array of the target."""
    if isinstance(value, Ones):
        return target.to_device(np.ones(value.shape, value.dtype))
    if isinstance(value, list):
        return [placed(entry, target) for entry in value]
    return value


def assert_refused(
    target: Target, error: type[Exception], words: Iterable[str], function: Callable, *args: Any, **kwargs: Any
) -> None:
    """The call raises `error` and says all `words`; `out` and the device's log stay as they are."""
    out = kwargs.get("out")
    before = out.tobytes() if hasattr(out, "tobytes") else None
    launched = None if target.device is None else len(target.device.log)
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    missing = [word for word in words if not re.search(word, message)]
    assert not missing, f"{missing} not said in: {message}"
    if before is not None:
        assert out.tobytes() == before, "out was written to"
    if launched is not None:
        assert len(target.device.log) == launched, "something was launched"


def table(*rows: tuple) -> Any:
    """Rows (id, ...) as pytest parameters."""
    return [pytest.param(*values, id=name) for name, *values in rows]


# --- conv -----------------------------------------------------------------------------------------------------

# A valid call, in which two inputs of 3 and 2 channels make 4.
CONV = dict(
    x=[Ones((2, 3, 8, 9)), Ones((2, 2, 8, 9))],
    weight=Ones((4, 5, 3, 3)),
    bias=Ones((4,)),
    residual=Ones((2, 4, 6, 7)),
    out=Ones((2, 4, 6, 7)),
)

RANKS = table(
    ("weight of two axes", ["weight", "2 axes", "3 to 5", r"\(4, 5\)", r"kernel\[None, None\]"], dict(weight=Ones((4, 5)))),
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
    ("lone pair, three axes", ["padding", "2 entries", "lone pair", r"\(\(1, 2\),\) \* 3"],
     THREE_AXES | dict(padding=(1, 2))),
    ("unknown name", ["padding", "'SAME'", "same_lower"], dict(padding="SAME")),
    ("causal over two axes", ["padding", "causal", "one spatial axis", "2"], dict(padding="causal")),
    ("unknown mode", ["padding_mode", "'zeros' of another library is 'constant'", "reflect"], dict(padding=1, padding_mode="zeros")),
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
    ("unknown", ValueError, ["activation", "'swish'", "silu"], "swish"),
    ("capitals", ValueError, ["activation", "'ReLU'", "write 'relu'"], "ReLU"),
    ("ONNX's spelling", ValueError, ["activation", "'HardSigmoid'", "write 'hard_sigmoid'"], "HardSigmoid"),
    ("parameters that it has not", ValueError, ["activation 'relu'", "0", "given 1"], ("relu", 1)),
    ("too many parameters", ValueError, ["activation 'leaky_relu'", "0 to 1", "given 2"], ("leaky_relu", 1, 2)),
    ("parameters missing", ValueError, ["activation 'clip' takes 2 parameters", "given 0", r"\('clip', "], "clip"),
    ("one parameter missing", ValueError, ["activation 'clip'", "2", "given 1"], ("clip", 0)),
    ("bounds exchanged", ValueError, ["activation 'clip'", "low <= high", "6", "0"], ("clip", 6, 0)),
    ("bound that is not a number", ValueError, ["activation 'clip'", "nan"], ("clip", 0, float("nan"))),
    ("parameter in words", TypeError, ["activation", "numbers", "'0.1'"], ("leaky_relu", "0.1")),
    ("parameter None", TypeError, ["activation", "numbers", "None"], ("elu", None)),
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
    words = ["method 'implicit_gemm' does not apply", "BLAS reads matrices", "'gemm'"]
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
    """Else every test above would pass for the wrong reason."""
    arguments = conv_arguments(target, {})
    assert cupyconv.conv(**arguments) is arguments["out"]
    assert (target.to_host(arguments["out"]) == 5 * 9 + 1 + 1).all()


def conv_arguments(target: Target, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: placed(value, target) for name, value in (CONV | changes).items()}


@pytest.mark.parametrize("method", ["gemm", "direct"])
def test_a_workspace_limit_that_a_named_method_exceeds(target, method):
    """A method without workspace runs; any other says what it needs and what it was allowed."""
    x, weight = placed(Ones((1, 64, 40, 40)), target), placed(Ones((8, 64, 3, 3)), target)
    with cupyconv.options(workspace_limit=1):
        if target.name != "numpy" and method == "direct":
            assert cupyconv.explain(cupyconv.conv, x, weight, method=method).workspace_bytes == 0
        else:
            words = [f"method '{method}' does not apply", "workspace", "limit", r"\b1\b"]
            assert_refused(target, ValueError, words, cupyconv.conv, x, weight, method=method)


# --- dtypes ---------------------------------------------------------------------------------------------------

CONVERTIBLE = ("int8", "int32", "int64", "uint8", "bool")
ARGUMENTS = ("x", "weight", "bias", "residual", "out")


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("dtype", CONVERTIBLE)
def test_integers_name_astype(target, argument, dtype):
    arguments = conv_arguments(target, {"x": Ones((2, 5, 8, 9))})
    arguments[argument] = target.to_device(target.to_host(arguments[argument]).astype(dtype))
    assert_refused(target, TypeError, [rf"\b{argument}\b", dtype, "astype"], cupyconv.conv, **arguments)


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("dtype", ["longdouble", "object", "str", "datetime64[s]", "timedelta64[s]", "f4,f4"])
def test_other_dtypes(argument, dtype):
    target = numpy_arrays()
    arguments = conv_arguments(target, {"x": Ones((2, 5, 8, 9))})
    strange = np.zeros(arguments[argument].shape, dtype)
    arguments[argument] = strange
    words = [rf"\b{argument}\b", re.escape(str(strange.dtype)), "float32"]
    assert_refused(target, TypeError, words, cupyconv.conv, **arguments)


def test_an_input_of_a_sequence_is_named(target):
    xs = [placed(Ones((1, 1, 8)), target), placed(Ones((1, 1, 8), "int16"), target)]
    weight = placed(Ones((1, 2, 3)), target)
    assert_refused(target, TypeError, [r"x\[1\]", "int16", "astype"], cupyconv.conv, xs, weight)


# --- whose arrays ---------------------------------------------------------------------------------------------


def numpy_arrays() -> Target:
    return Target("numpy", np.array, np.asarray, np)


@pytest.mark.parametrize("argument", ["x[1]", "weight", "bias", "residual", "out"])
def test_numpy_and_device_arrays_are_not_mixed(cuda_target, argument):
    arguments = conv_arguments(cuda_target, {})
    if argument == "x[1]":
        arguments["x"][1] = cuda_target.to_host(arguments["x"][1])
    else:
        arguments[argument] = cuda_target.to_host(arguments[argument])
    words = [r"x\[0\] is .*HostArray", re.escape(f"{argument} is numpy.ndarray")]
    assert_refused(cuda_target, TypeError, words, cupyconv.conv, **arguments)


def test_arrays_on_two_devices(monkeypatch):
    """Two arrays of CuPy's class, on two devices that are not there."""
    cupy_like = type("ndarray", (), {"__module__": "cupy"})
    arrays = {"x": cupy_like(), "weight": cupy_like()}
    for ordinal, array in enumerate(arrays.values()):
        array.device = SimpleNamespace(id=ordinal)
    backends = {0: object(), 1: object()}
    monkeypatch.setattr(dispatch, "_REGISTRY", dict(dispatch._REGISTRY))
    monkeypatch.setattr(dispatch, "_cupy_device_backend", backends.__getitem__)
    assert dispatch.backend_for({"x": arrays["x"]}) is backends[0]
    with pytest.raises(TypeError, match=r"one library and device: x is cupy.ndarray on .*0.*, weight is .*1"):
        dispatch.backend_for(arrays)


def foreign(module: str, name: str) -> Any:
    """An object of a class that says it comes from another library."""
    return type(name, (), {"__module__": module, "shape": (2, 5, 8, 9), "ndim": 4, "dtype": np.dtype("f4")})()


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize(
    "module, name, way_in",
    [
        ("torch", "Tensor", r"interop\.torch.*cupy\.from_dlpack"),
        ("jaxlib._jax", "ArrayImpl", r"interop\.jax.*cupy\.from_dlpack"),
        ("dask.array.core", "Array", r"interop\.dask"),
        ("zarr.core.array", "Array", r"interop\.dask.*loop"),
        ("h5py._hl.dataset", "Dataset", r"interop\.dask.*loop"),
        ("somewhere.new", "Array", r"numpy\.asarray"),
    ],
)
def test_foreign_arrays_with_the_way_in(target, argument, module, name, way_in):
    arguments = conv_arguments(target, {"x": Ones((2, 5, 8, 9))}) | {argument: foreign(module, name)}
    words = [rf"\b{argument} must be a NumPy or CuPy array", re.escape(f"{module}.{name}"), way_in]
    assert_refused(target, TypeError, words, cupyconv.conv, **arguments)


@pytest.mark.parametrize("argument", ["x", "weight"])
@pytest.mark.parametrize("value", [None, 1.0, np.float32(1), "array", {}], ids=repr)
def test_things_that_are_no_arrays(target, argument, value):
    arguments = conv_arguments(target, {}) | {argument: value}
    assert_refused(target, TypeError, [rf"\b{argument}\b", type(value).__name__], cupyconv.conv, **arguments)


@pytest.mark.parametrize("argument", ["bias", "residual", "out"])
@pytest.mark.parametrize("value", [1.0, [1.0, 2.0, 3.0, 4.0], "relu"], ids=repr)
def test_optional_things_that_are_no_arrays(target, argument, value):
    arguments = conv_arguments(target, {}) | {argument: value}
    assert_refused(target, TypeError, [rf"\b{argument}\b", type(value).__name__], cupyconv.conv, **arguments)


@pytest.mark.parametrize(
    "x, words",
    table(
        ("lists of lists", [[1.0, 2.0], [3.0, 4.0]], [r"x\[0\]", "list"]),
        ("numbers", [1.0, 2.0, 3.0], [r"x\[0\]", "float"]),
        ("a hole", [Ones((2, 5, 8, 9)), None], [r"x\[1\]", "None"]),
        ("a tuple in a list", [(Ones((2, 5, 8, 9)),)], [r"x\[0\]", "tuple"]),
    ),
)
def test_sequences_of_no_arrays(target, x, words):
    assert_refused(target, TypeError, words, cupyconv.conv, **conv_arguments(target, {"x": x}))


@pytest.mark.parametrize("empty", [[], ()], ids=repr)
@pytest.mark.parametrize("function, name", [(cupyconv.conv, "x"), (cupyconv.linmerge, "xs"), (cupyconv.im2col, "x")])
def test_an_empty_sequence(target, function, name, empty):
    second = 3 if function is cupyconv.im2col else placed(Ones((4, 5)), target)
    assert_refused(target, ValueError, [rf"\b{name}\b", "empty", "at least one"], function, empty, second)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_masked_arrays(argument):
    """A mask would be dropped without a word."""
    arguments = conv_arguments(numpy_arrays(), {"x": Ones((2, 5, 8, 9))})
    arguments[argument] = np.ma.masked_greater(arguments[argument], 0)
    assert_refused(numpy_arrays(), TypeError, [rf"\b{argument}\b", "MaskedArray"], cupyconv.conv, **arguments)


@pytest.mark.parametrize("argument", ["xs", "weight", "residual", "out"])
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices(argument):
    """numpy.matrix multiplies and indexes in ways of its own."""
    arguments = {name: np.ones((4, 4)) for name in ("xs", "weight", "residual", "out")}
    arguments[argument] = np.matrix(arguments[argument])
    words = [rf"\b{argument}\b", "matrix"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.linmerge, **arguments)


# --- out ------------------------------------------------------------------------------------------------------


def test_read_only_out():
    out = np.full((1, 1, 6), 7.0)
    out.flags.writeable = False
    words = [r"\bout\b", "read-only"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones((1, 1, 8)), np.ones((1, 1, 3)), out=out)


def test_out_that_is_one_element_many_times():
    """A broadcast out says which of its properties is wrong even where it may be written to."""
    out = np.lib.stride_tricks.as_strided(np.full(1, 7.0), (1, 1, 6), (0, 0, 0))
    assert out.flags.writeable
    words = ["out overlaps itself", r"\(1, 1, 6\)", "strides"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones((1, 1, 8)), np.ones((1, 1, 3)), out=out)


@pytest.mark.parametrize(
    "shape, strides, overlaps",
    [
        ((2, 2, 5), (4, 8, 1), True),  # channels begin where others are not yet over
        ((2, 2, 5), (10, 5, 1), False),
        ((2, 2, 5), (1, 2, 4), False),  # channels between channels
        ((2, 3, 5), (1, 2, 3), True),
        ((2, 3, 4), (6, 2, 12), False),  # no stride divides the reach of the smaller ones, and yet none meet
        ((2, 2, 5), (-10, 5, -1), False),
        ((1, 1, 5), (0, 0, 1), False),
        ((2, 1, 5), (0, 5, 1), True),
    ],
)
def test_out_of_any_strides_that_do_not_overlap(shape, strides, overlaps):
    n, c, width = shape
    memory = np.full(100, 7.0)
    first = sum(-stride * (extent - 1) for stride, extent in zip(strides, shape) if stride < 0)
    byte_strides = tuple(8 * stride for stride in strides)
    out = np.lib.stride_tricks.as_strided(memory[first:], shape, byte_strides)
    x, weight = np.ones((n, 2, width + 2)), np.arange(2.0 * c).reshape(c, 2, 1).repeat(3, 2)
    if overlaps:
        assert_refused(numpy_arrays(), ValueError, ["out overlaps itself"], cupyconv.conv, x, weight, out=out)
    else:
        np.testing.assert_array_equal(cupyconv.conv(x, weight, out=out), cupyconv.conv(x, weight))


def test_out_shares_memory_with_x(target):
    memory = target.to_device(np.ones((2, 3, 8), np.float32))
    weight = placed(Ones((3, 3, 1)), target)
    assert_refused(target, ValueError, ["out overlaps x"], cupyconv.conv, memory, weight, out=memory)
    assert_refused(target, ValueError, ["out overlaps x"], cupyconv.conv, memory[::-1], weight, out=memory)


@pytest.mark.parametrize("lies_in", ["x", "out"])
def test_out_whose_memory_is_known_by_another_owner(lies_in):
    """The same bytes as an array of a buffer, and as a view of that: no owner says that these meet, addresses do."""
    memory, weight = np.ones((2, 3, 8), np.float32), np.ones((3, 3, 1), np.float32)
    apart = np.zeros_like(memory)
    for again in (np.frombuffer(memory, np.float32), np.asarray(memoryview(memory))):
        for other in (again.reshape(memory.shape), again.reshape(memory.shape)[:, :, ::-1]):
            x, out = (other, memory) if lies_in == "x" else (memory, other)
            cupyconv.conv(x, weight, out=apart)  # a call like the refused one has run, and is remembered
            for _ in range(2):
                assert_refused(numpy_arrays(), ValueError, ["out overlaps x"], cupyconv.conv, x, weight, out=out)


def test_out_shares_memory_with_one_of_many_inputs(target):
    buffer = target.to_device(np.ones((2, 5, 8), np.float32))
    xs = [placed(Ones((2, 1, 8)), target), buffer[:, :3]]
    weight = placed(Ones((3, 4, 1)), target)
    assert_refused(target, ValueError, [r"out overlaps x\[1\]"], cupyconv.conv, xs, weight, out=buffer[:, 2:])


def test_out_shares_memory_with_weight(target):
    memory = target.to_device(np.ones((3, 3, 3), np.float32))
    x = placed(Ones((3, 3, 5)), target)
    assert_refused(target, ValueError, ["out overlaps weight"], cupyconv.conv, x, memory, out=memory)


def test_out_shares_memory_with_bias(target):
    memory = target.to_device(np.ones((1, 3, 4), np.float32))
    x, weight = placed(Ones((1, 2, 4)), target), placed(Ones((3, 2, 1)), target)
    bias = memory[0, :, 2]
    assert_refused(target, ValueError, ["out overlaps bias"], cupyconv.conv, x, weight, bias, out=memory)


@pytest.mark.parametrize("shift", [1, 4])
def test_out_shares_memory_with_a_part_of_residual(target, shift):
    memory = target.to_device(np.ones((1, 1, 12), np.float32))
    x, weight = placed(Ones((1, 2, 8)), target), placed(Ones((1, 2, 1)), target)
    residual, out = memory[:, :, :8], memory[:, :, shift : 8 + shift]
    words = ["out overlaps residual", "exactly"]
    assert_refused(target, ValueError, words, cupyconv.conv, x, weight, residual=residual, out=out)


def test_out_is_residual_backwards(target):
    memory = target.to_device(np.ones((1, 1, 8), np.float32))
    x, weight = placed(Ones((1, 2, 8)), target), placed(Ones((1, 2, 1)), target)
    words = ["out overlaps residual"]
    assert_refused(target, ValueError, words, cupyconv.conv, x, weight, residual=memory[:, :, ::-1], out=memory)


@pytest.mark.parametrize("method", ["direct", "gemm"])
@pytest.mark.parametrize("view", [slice(None), slice(None, None, -1), slice(None, None, 2)], ids=str)
def test_out_may_be_residual(target, view, method):
    start = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    x, weight = placed(Ones((2, 2, 8)), target)[..., view], placed(Ones((3, 2, 1)), target)
    memory = target.to_device(start)
    out = memory[..., view]
    assert cupyconv.conv(x, weight, residual=memory[..., view], out=out, method=method) is out
    expected = start.copy()
    expected[..., view] += 2
    np.testing.assert_array_equal(target.to_host(memory), expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_out_may_be_other_channels_of_the_buffer_that_x_lies_in(target, channels_last, method):
    """As DenseNet has it: each layer adds channels to one buffer, reading those before it."""
    shape = (2, 10, 6, 5)
    order = (0, 3, 1, 2) if channels_last else (0, 1, 2, 3)
    stored = tuple(shape[order.index(axis)] for axis in range(4))
    start = np.random.default_rng(0).integers(-3, 4, stored).astype(np.float32)
    memory = target.to_device(start)
    buffer = memory.transpose(order)
    weight = placed(Ones((4, 6, 3, 3)), target)
    cupyconv.conv(buffer[:, :6], weight, padding=1, out=buffer[:, 6:], method=method)

    expected = start.copy().transpose(order)
    x = target.to_device(np.ascontiguousarray(expected[:, :6]))
    expected[:, 6:] = target.to_host(cupyconv.conv(x, weight, padding=1))
    np.testing.assert_array_equal(target.to_host(buffer), expected)


@pytest.mark.parametrize("shape", [(64, 512, 56, 56), (7, 131, 61, 59), (3, 40, 17, 19, 23)], ids=str)
def test_no_buffer_is_too_large_to_see_that_channels_are_apart(shape):
    """Whether strided views meet is a hard problem in general; a plan is enough here, nothing is touched."""
    buffer = np.empty(shape, np.float32)  # address space alone, as long as nothing writes to it
    weight = np.ones((shape[1] - 32, 32, *(1,) * (len(shape) - 2)), np.float32)
    plan = cupyconv.explain(cupyconv.conv, buffer[:, :32], weight, out=buffer[:, 32:])
    assert plan.flops == 2 * 32 * (shape[1] - 32) * shape[0] * np.prod(shape[2:])


def test_no_overlap_where_there_is_no_element(target):
    memory = target.to_device(np.ones((2, 3, 8), np.float32))
    weight = placed(Ones((3, 3, 1)), target)
    nothing = memory[:0]
    assert cupyconv.conv(nothing, weight, out=nothing) is nothing


# --- strange, and yet valid -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "gemm"])
@pytest.mark.parametrize("changed", ["x", "weight", "bias", "residual"])
def test_other_byte_orders_are_read(changed, method):
    """As files of instruments have them; the result is in the machine's own."""
    arguments = dict(x=np.arange(8.0).reshape(1, 1, 8), weight=np.ones((1, 1, 3)))
    arguments |= dict(bias=np.ones(1), residual=np.ones((1, 1, 6)))
    expected = cupyconv.conv(**arguments)
    arguments[changed] = arguments[changed].astype(np.dtype("f8").newbyteorder("S"))
    y = cupyconv.conv(**arguments, method=method)
    assert y.dtype.isnative
    np.testing.assert_array_equal(y, expected)


def test_any_strides_of_bytes_on_numpy():
    """A field of a packed record, and a complex number that begins where a float32 may: any view is computed."""
    weight = np.ones((1, 1, 3), np.float32)
    record = np.zeros((1, 1, 8), dtype=[("flag", "u1"), ("value", "f4")])
    record["value"] = np.arange(8)
    np.testing.assert_array_equal(cupyconv.conv(record["value"], weight)[0, 0], 3 * np.arange(1, 7))
    inside = np.arange(18, dtype=np.float32)[1:17].view(np.complex64).reshape(1, 1, 8)
    assert inside.flags.aligned
    np.testing.assert_array_equal(cupyconv.conv(inside, weight), cupyconv.conv(inside.copy(), weight))


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


# More spatial axes than the kernels have are brought to three, where no check may get lost.
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
    """These strides allow no view of three axes, and the checks are of `out`, not of what stands in for it."""
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


# --- arguments of a kind that nobody would give on purpose -----------------------------------------------------

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
    ("pads is a number", TypeError, ["pads", "sequence", "3"], "onnx_padding", dict(pads=3)),
    ("auto_pad is a list", ValueError, ["auto_pad", "VALID"], "onnx_padding", dict(pads=None, auto_pad=["VALID"])),
)  # fmt: skip


@pytest.mark.parametrize("error, words, function, arguments", ODD)
def test_odd_arguments(error, words, function, arguments):
    """As any other refusal: neither an error of the way there, nor one of NumPy's about truth values or hashes."""
    given = {name: placed(value, numpy_arrays()) for name, value in arguments.items()}
    assert_refused(numpy_arrays(), error, words, getattr(cupyconv, function), **given)


@pytest.mark.parametrize("needs", [3, np.array(1), object()], ids=lambda value: type(value).__name__)
def test_needs_that_are_no_names(needs):
    y, pullback = cupyconv.vjp(cupyconv.conv, np.ones((1, 1, 3)), np.ones((1, 1, 2)))
    assert_refused(numpy_arrays(), TypeError, ["needs must be names"], pullback, y, needs=needs)
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
    """A memory-mapped file, say."""
    arguments = {name: placed(value, numpy_arrays()) for name, value in GRU.items()}
    mapped = np.array(lengths).view(type("Mapped", (np.ndarray,), {}))
    words = ["lengths must be from 0 to 5", given]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.gru, **arguments, lengths=mapped)


# --- explain, options, onnx_padding ---------------------------------------------------------------------------


def test_a_padding_mode_without_padding_is_refused(target):
    x, weight = placed(Ones((1, 1, 5)), target), placed(Ones((1, 1, 3)), target)
    words = ["padding_mode 'edge'", "padding 0", "'same'", "'valid'"]
    assert_refused(target, ValueError, words, cupyconv.conv, x, weight, padding_mode="edge")
    for padding in ("valid", (0,), ((0, 0),)):
        assert cupyconv.conv(x, weight, padding=padding, padding_mode="edge").shape == (1, 1, 3)
    assert cupyconv.conv(x, weight[:, :, :1], padding=0, padding_mode="edge").shape == (1, 1, 5)


class InMetres(np.ndarray):
    """As astropy's Quantity is one."""

    unit = "m"


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
def test_units_are_refused(name):
    arguments = {"x": np.ones((1, 1, 3)), "weight": np.ones((1, 1, 3)), "bias": np.ones(1), "out": np.ones((1, 1, 1))}
    arguments[name] = arguments[name].view(InMetres)
    assert_refused(
        numpy_arrays(), TypeError, [rf"\b{name} is in units, .*InMetres of m", "value"], cupyconv.conv, **arguments
    )


@pytest.mark.parametrize("shape", [(3, 9, 9), (2, 3, 9, 9), (2, 3, 3, 9), (1, 3, 9)], ids=str)
def test_a_kernel_for_each_channel_without_its_axis(shape):
    words = [r"weight\[:, None\], of shape \(3, 1, 5, 5\)"] * (len(shape) > 3 or shape[0] == 3)
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones(shape), np.ones((3, 5, 5)), groups=3)


@pytest.mark.parametrize(
    "shape, hint", [((1, 64, 64), r"axis N of samples is missing: array\[None\]"), ((64, 64), r"array\[None, None\]")]
)
def test_linmerge_names_the_missing_axis(shape, hint):
    words = ["takes 3 channels", hint]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.linmerge, [np.ones(shape)] * 3, np.ones((2, 3)))


@pytest.mark.parametrize(
    "given", [cupyconv.vjp, cupyconv.vjp(cupyconv.conv, np.ones((1, 1, 3)), np.ones((1, 1, 3)))[1]]
)
def test_explain_of_a_gradient_says_what_to_explain(given):
    words = [r"explain\(conv, x, weight\) is the forward", r"explain\(conv_grad_weight, ...\)"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.explain, given, cupyconv.conv, np.ones((1, 1, 3)))


@pytest.mark.parametrize(
    "function, keyword, ours",
    [
        ("conv", "strides", "stride"), ("conv", "pads", "padding"), ("conv", "pad", "padding"), ("conv", "group", "groups"),
        ("conv", "dilations", "dilation"), ("conv", "W", "weight"), ("conv", "b", "bias"), ("conv", "mode", "padding_mode"),
        ("conv", "auto_pad", r"padding=onnx_padding\(pads, auto_pad\)"), ("conv", "data_format", "a transposed view of an array .*"),
        ("conv", "stirde", "stride"), ("linmerge", "x", "xs"), ("conv_transpose", "output_size", "output_shape"),
        ("conv_chain", "output", "out"), ("max_pool", "kernel_size", "kernel_shape"), ("max_pool", "strides", "stride"),
        ("avg_pool", "pool_size", "kernel_shape"), ("im2col", "ksize", "kernel_shape"), ("col2im", "output_size", "spatial_shape"),
        ("conv_grad_input", "input_size", "input_shape"), ("conv_grad_weight", "pads", "padding"), ("rnn", "nonlinearity", "activation"),
        ("lstm", "sequence_lens", "lengths"), ("gru", "batch_first", r"a view, array.swapaxes\(0, 1\)"), ("lstm", "activation", "activations"),
        ("rnn_step", "hx", "h"), ("lstm_step", "cx", "c"), ("gru_step", "R", "weight_hh"),
    ],
)  # fmt: skip
def test_keywords_of_other_libraries_are_answered_with_ours(function, keyword, ours):
    """By the call, by `explain` and, where there is one, by `vjp`; a layer takes what `conv` takes."""
    called = getattr(cupyconv, function)
    some = [np.ones((1, 1, 3))] * 6
    needed = [p for p in inspect.signature(called).parameters.values() if p.default is p.empty]
    words = rf"{function}\(\) got an unexpected keyword argument '{keyword}': here it is {ours}$"
    with pytest.raises(TypeError, match=words):
        called(*some[: len(needed)], **{keyword: 1})
    with pytest.raises(TypeError, match=rf"^{function}: .*'{keyword}': here it is {ours}$"):
        cupyconv.explain(called, *some[: len(needed)], **{keyword: 1})


def test_a_keyword_that_nobody_has_is_answered_with_all_of_ours():
    with pytest.raises(TypeError, match=r"'zzz': its arguments are x, kernel_shape, stride, padding, dilation, out$"):
        cupyconv.im2col(np.ones((1, 1, 3)), 2, zzz=1)
    with pytest.raises(TypeError, match=r"ConvLayer\(\) got .*'strides': here it is stride$"):
        cupyconv.ConvLayer(np.ones((1, 1, 3)), strides=2)


def test_an_executable_that_is_known_does_not_let_a_wrong_keyword_pass():
    x = np.ones((1, 1, 3))
    cupyconv.conv(x, x)
    with pytest.raises(TypeError, match="here it is groups"):
        cupyconv.conv(x, x, group=1)


@pytest.mark.parametrize("name", ["conv", "max_pool", "lstm"])
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


def test_explain_refuses_what_the_call_refuses(target):
    """With the same words, for every refusal of `conv` above."""
    for parameter in (*RANKS, *CHANNELS, *SIZES, *PADDING, *ADDENDS, *KINDS, *NOT_INTEGERS):
        arguments = conv_arguments(target, parameter.values[-1])
        with pytest.raises((TypeError, ValueError)) as of_call:
            cupyconv.conv(**arguments)
        with pytest.raises((TypeError, ValueError)) as of_explain:
            cupyconv.explain(cupyconv.conv, **arguments)
        assert (of_explain.type, str(of_explain.value)) == (of_call.type, str(of_call.value))


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
        TypeError, match=rf"explain takes one of conv, linmerge, .*im2col, col2im, max_pool, .*given .*{given}"
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
    with pytest.raises(TypeError, match=f"vjp takes one of {known}, and then its arguments, given {given}"):
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
        (TypeError, ["unexpected keyword", "thread"], dict(thread=1)),
    ],
    ids=str,
)
def test_options(error, words, given):
    """When the block is set up, not when a call inside it is made."""
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


def test_who_owns_the_memory_of_a_result():
    """An argument given twice does not matter to a result that owns its memory; a view of the result, or of who knows what, does."""
    backend, out, bias = NumpyBackend(), np.zeros(4), np.ones(4)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    assert backend.are_apart([bias, bias, bias[::2], out], [3])
    for arrays in ([out[1:], out], [out, out], [bias, out[:2]], [np.frombuffer(bytearray(8)), out], [bias, read_only]):
        assert not backend.are_apart(arrays, [1])
    assert not backend.are_apart([bias, out, out], [1, 2])
