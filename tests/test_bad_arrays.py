"""Refusals of arrays for their dtype, their library, or the memory of `out`; and unusual arrays that are accepted."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import Ones, assert_refused, conv_arguments, foreign, numpy_arrays, placed, table

import cupyconv
from cupyconv.call import dispatch
from cupyconv.numpy import NumpyBackend

ml_dtypes = pytest.importorskip("ml_dtypes")

bfloat16 = np.dtype(ml_dtypes.bfloat16)


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


# --- libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["x[1]", "weight", "bias", "residual", "out"])
def test_numpy_and_device_arrays_are_not_mixed(cuda_target, argument):
    arguments = conv_arguments(cuda_target, {})
    if argument == "x[1]":
        arguments["x"][1] = cuda_target.to_host(arguments["x"][1])
    else:
        arguments[argument] = cuda_target.to_host(arguments[argument])
    words = [r"x\[0\] is .*HostArray", re.escape(f"{argument} is numpy.ndarray")]
    assert_refused(cuda_target, TypeError, words, cupyconv.conv, **arguments)


def test_a_gradient_of_another_library_is_refused(cuda_target):
    """A gradient of another library is refused, even for a mean, whose pullback holds no other array."""
    _, pullback = cupyconv.vjp(cupyconv.avg_pool, placed(Ones((1, 2, 8)), cuda_target), 2)
    words = ["grad is numpy.ndarray", "library and device of the result"]
    assert_refused(cuda_target, TypeError, words, pullback, np.ones((1, 2, 4)))


def test_arrays_on_two_devices(monkeypatch):
    """Arrays on two devices are refused; here both have CuPy's class name, and the devices do not exist."""
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
    """A masked array is refused, because its mask would be dropped silently."""
    arguments = conv_arguments(numpy_arrays(), {"x": Ones((2, 5, 8, 9))})
    arguments[argument] = np.ma.masked_greater(arguments[argument], 0)
    assert_refused(numpy_arrays(), TypeError, [rf"\b{argument}\b", "MaskedArray"], cupyconv.conv, **arguments)


@pytest.mark.parametrize("argument", ["xs", "weight", "residual", "out"])
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices(argument):
    """A numpy.matrix is refused, because it multiplies and indexes differently."""
    arguments = {name: np.ones((4, 4)) for name in ("xs", "weight", "residual", "out")}
    arguments[argument] = np.matrix(arguments[argument])
    words = [rf"\b{argument}\b", "matrix"]
    assert_refused(numpy_arrays(), TypeError, words, cupyconv.linmerge, **arguments)


class InMetres(np.ndarray):
    """A subclass with units, like astropy's Quantity."""

    unit = "m"


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
def test_units_are_refused(name):
    arguments = {"x": np.ones((1, 1, 3)), "weight": np.ones((1, 1, 3)), "bias": np.ones(1), "out": np.ones((1, 1, 1))}
    arguments[name] = arguments[name].view(InMetres)
    assert_refused(
        numpy_arrays(), TypeError, [rf"\b{name} has units, .*InMetres of m", "value"], cupyconv.conv, **arguments
    )


# --- out ------------------------------------------------------------------------------------------------------


def test_read_only_out():
    out = np.full((1, 1, 6), 7.0)
    out.flags.writeable = False
    words = [r"\bout\b", "read-only"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones((1, 1, 8)), np.ones((1, 1, 3)), out=out)


def test_out_that_is_one_element_many_times():
    """A writable broadcast `out` is refused because it overlaps itself."""
    out = np.lib.stride_tricks.as_strided(np.full(1, 7.0), (1, 1, 6), (0, 0, 0))
    assert out.flags.writeable
    words = ["out overlaps itself", r"\(1, 1, 6\)", "strides"]
    assert_refused(numpy_arrays(), ValueError, words, cupyconv.conv, np.ones((1, 1, 8)), np.ones((1, 1, 3)), out=out)


@pytest.mark.parametrize(
    "shape, strides, overlaps",
    [
        ((2, 2, 5), (4, 8, 1), True),  # channels begin before others end
        ((2, 2, 5), (10, 5, 1), False),
        ((2, 2, 5), (1, 2, 4), False),  # interleaved channels
        ((2, 3, 5), (1, 2, 3), True),
        ((2, 3, 4), (6, 2, 12), False),  # no stride divides the reach of the smaller ones, but none overlap
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
    """Two arrays of the same bytes with different owners are refused: only their addresses show the overlap."""
    memory, weight = np.ones((2, 3, 8), np.float32), np.ones((3, 3, 1), np.float32)
    apart = np.zeros_like(memory)
    for again in (np.frombuffer(memory, np.float32), np.asarray(memoryview(memory))):
        for other in (again.reshape(memory.shape), again.reshape(memory.shape)[:, :, ::-1]):
            x, out = (other, memory) if lies_in == "x" else (memory, other)
            cupyconv.conv(x, weight, out=apart)  # a call like the refused one has run, and is cached
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
    """As in DenseNet, a layer adds channels to one buffer and reads those before them."""
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
    """Channels of a large buffer are known to be apart, a hard problem for general strides; the test only plans."""
    buffer = np.empty(shape, np.float32)  # only address space, as long as nothing writes to it
    weight = np.ones((shape[1] - 32, 32, *(1,) * (len(shape) - 2)), np.float32)
    plan = cupyconv.explain(cupyconv.conv, buffer[:, :32], weight, out=buffer[:, 32:])
    assert plan.flops == 2 * 32 * (shape[1] - 32) * shape[0] * np.prod(shape[2:])


def test_no_overlap_where_there_is_no_element(target):
    memory = target.to_device(np.ones((2, 3, 8), np.float32))
    weight = placed(Ones((3, 3, 1)), target)
    nothing = memory[:0]
    assert cupyconv.conv(nothing, weight, out=nothing) is nothing


# --- unusual, but valid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "gemm"])
@pytest.mark.parametrize("changed", ["x", "weight", "bias", "residual"])
def test_other_byte_orders_are_read(changed, method):
    """Arrays in the other byte order, as in files of instruments, are read; the result has the machine's byte order."""
    arguments = dict(x=np.arange(8.0).reshape(1, 1, 8), weight=np.ones((1, 1, 3)))
    arguments |= dict(bias=np.ones(1), residual=np.ones((1, 1, 6)))
    expected = cupyconv.conv(**arguments)
    arguments[changed] = arguments[changed].astype(np.dtype("f8").newbyteorder("S"))
    y = cupyconv.conv(**arguments, method=method)
    assert y.dtype.isnative
    np.testing.assert_array_equal(y, expected)


def test_any_strides_of_bytes_on_numpy():
    """Any NumPy view is computed: a field of a packed record, or complex numbers that are aligned like float32."""
    weight = np.ones((1, 1, 3), np.float32)
    record = np.zeros((1, 1, 8), dtype=[("flag", "u1"), ("value", "f4")])
    record["value"] = np.arange(8)
    np.testing.assert_array_equal(cupyconv.conv(record["value"], weight)[0, 0], 3 * np.arange(1, 7))
    inside = np.arange(18, dtype=np.float32)[1:17].view(np.complex64).reshape(1, 1, 8)
    assert inside.flags.aligned
    np.testing.assert_array_equal(cupyconv.conv(inside, weight), cupyconv.conv(inside.copy(), weight))


def test_who_owns_the_memory_of_a_result():
    """Repeated arguments are apart from a result that owns its memory; a view of it or of unknown memory is not."""
    backend, out, bias = NumpyBackend(), np.zeros(4), np.ones(4)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    assert backend.are_apart([bias, bias, bias[::2], out], [3])
    for arrays in ([out[1:], out], [out, out], [bias, out[:2]], [np.frombuffer(bytearray(8)), out], [bias, read_only]):
        assert not backend.are_apart(arrays, [1])
    assert not backend.are_apart([bias, out, out], [1, 2])
