"""The table of smoke calls: for each kernel of `kernels/`, a call of the library that runs it.

A call is small, and has several blocks and edges.  The arguments that make CUDA choose the kernel, most often a
method, are separate, because NumPy has other methods and computes the reference without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from cupyconv import (
    ConvLayer,
    avg_pool,
    col2im,
    conv,
    conv_chain,
    conv_grad_input,
    conv_grad_weight,
    conv_transpose,
    im2col,
    linmerge,
    lstm,
    max_pool,
    options,
    vjp,
)
from cupyconv.cuda.plan import implicit_gemm, recurrent_gradient
from cupyconv.problem.arrays import ITEMSIZE, is_complex

ALL = tuple(ITEMSIZE)
REAL = tuple(dtype for dtype in ALL if not is_complex(dtype))


@dataclass(frozen=True)
class SmokeCall:
    """A function that returns one or more arrays, its arguments' shapes, and `how` to make CUDA choose the kernel.

    With `of_few_bits`, TF32 represents the numbers exactly.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    function: Callable[..., Any]
    how: Mapping[str, Any] = field(default_factory=dict)
    of_few_bits: bool = False

    def __call__(self, *arrays: Any, **how: Any) -> list[Any]:
        results = self.function(*arrays, **how)
        return list(results) if isinstance(results, (list, tuple)) else [results]


DIRECT, GEMM, IMPLICIT = {"method": "direct"}, {"method": "gemm"}, {"method": "implicit_gemm"}
FFT = {"method": "fft"}
IMAGE, WEIGHT = (2, 5, 19, 35), (7, 5, 3, 3)
#: x, both weights and both biases of an LSTM.
SEQUENCE = ((6, 9, 20), (4 * 40, 20), (4 * 40, 40), (4 * 40,), (4 * 40,))


def _merge(a: Any, b: Any, weight: Any, **how: Any) -> Any:
    return linmerge([a, b], weight, activation="relu", **how)


def _direct(x: Any, weight: Any, **how: Any) -> Any:
    return conv(x, weight, stride=2, padding=1, padding_mode="reflect", **how)


def _depthwise(x: Any, weight: Any, **how: Any) -> Any:
    return conv(x, weight, padding=1, groups=5, **how)


def _same(x: Any, weight: Any, **how: Any) -> Any:
    return conv(x, weight, padding="same", **how)


def _wrapped(x: Any, weight: Any, **how: Any) -> Any:
    return conv(x, weight, padding="same", padding_mode="wrap", **how)


def _moved(x: Any, weight: Any, **how: Any) -> Any:
    """Move the inputs first, even if it saves little; in float64 only the weight gradient moves them."""
    gatherings = implicit_gemm._gatherings

    def moved(*given: Any) -> Any:
        return [gathering for gathering in gatherings(*given) if gathering.steps] or gatherings(*given)

    with mock.patch.object(implicit_gemm, "_gatherings", moved), options(allow_tf32=True):
        return conv(x, weight, padding=1, **how), conv_grad_weight(x, x, (3, 3), padding=1, **how)


def _smooth(x: Any) -> str | None:
    """An activation whose derivative is not constant, or None for complex numbers, which have no activations."""
    return None if x.dtype.kind == "c" else "tanh"


def _biased(x: Any, weight: Any, bias: Any, **how: Any) -> Any:
    return conv(x, weight, bias, padding="same", activation=_smooth(x), **how)


def _epilogue_grad(x: Any, weight: Any, bias: Any, grad: Any) -> Any:
    gradients = vjp(conv, x, weight, bias, padding="same", activation=_smooth(x))[1](grad)
    return gradients.x, gradients.bias


def _prologue_grad(x: Any, weight: Any, scale: Any, shift: Any, grad: Any) -> Any:
    gradients = vjp(conv, x, weight, padding="same", prologue=(scale, shift, _smooth(x)))[1](grad)
    return gradients.x, gradients.scale, gradients.shift


def _pair(x: Any, first: Any, second: Any, **how: Any) -> Any:
    return conv_chain(x, [ConvLayer(first, padding=1, activation="relu"), ConvLayer(second, padding=1)], **how)


def _transposed(x: Any, weight: Any, **how: Any) -> Any:
    return conv_transpose(x, weight, stride=2, padding=1, **how)


def _depthwise_transposed(x: Any, weight: Any, **how: Any) -> Any:
    return conv_transpose(x, weight, stride=2, padding=1, groups=5, **how)


def _pool(x: Any) -> Any:
    y, indices = max_pool(x, 3, return_indices=True)
    places = (indices % 128).astype(x.dtype)  # numbers that every dtype has
    return max_pool(x, 3, stride=2), y, places, avg_pool(x, 3, stride=2, padding=1)


def _pool_gradient(x: Any, grad: Any) -> Any:
    return tuple(vjp(function, x, 3, stride=2)[1](grad).x for function in (max_pool, avg_pool))


def _weight_gradient(grad: Any, x: Any, **how: Any) -> Any:
    return conv_grad_weight(grad, x, (3, 3), padding=1, **how)


def _depthwise_weight_gradient(grad: Any, x: Any, **how: Any) -> Any:
    return conv_grad_weight(grad, x, (3, 3), padding=1, groups=5, **how)


def _channels_last_weight_gradient(grad: Any, x: Any, **how: Any) -> Any:
    grad, x = (image.transpose(0, 3, 1, 2) for image in (grad, x))
    return conv_grad_weight(grad, x, (3, 3), padding=1, **how)


def _weight_gradient_by_transforms(grad: Any, x: Any, **how: Any) -> Any:
    return conv_grad_weight(grad, x, (9, 9), padding=4, padding_mode="wrap", groups=grad.shape[1] // 7 or 5, **how)


def _grouped_input_gradient(grad: Any, weight: Any, **how: Any) -> Any:
    return conv_grad_input(grad, weight, (2, 6, 19, 35), padding=4, groups=2, **how)


def _lstm(*arrays: Any, **how: Any) -> Any:
    y, (h, c) = lstm(*arrays, **how)
    return y, h, c


def _lstm_gradient(*arrays: Any, lengths: list[int] | None = None) -> Any:
    *arguments, grad = arrays
    gradients = vjp(lstm, *arguments, lengths=lengths)[1](grad)
    return gradients.x, gradients.weight_ih, gradients.weight_hh, gradients.bias_hh


def _lstm_gradient_by_steps(*arrays: Any) -> Any:
    with mock.patch.object(recurrent_gradient, "MAX_PARTS", 0):  # rejects the persistent kernel
        return _lstm_gradient(*arrays)


def _lstm_gradient_of_lengths(*arrays: Any) -> Any:
    return _lstm_gradient(*arrays, lengths=[6, 6, 5, 4, 4, 3, 2, 1, 1])


CALLS: dict[str, SmokeCall] = {
    "merge": SmokeCall(REAL, ((2, 5, 1001), (2, 3, 1001), (7, 8)), _merge, DIRECT),
    "direct": SmokeCall(ALL, (IMAGE, WEIGHT), _direct, DIRECT),
    "depthwise": SmokeCall(REAL, (IMAGE, (5, 1, 3, 3)), _depthwise, DIRECT),
    "implicit_gemm": SmokeCall((*REAL, "complex64"), (IMAGE, WEIGHT), _same, IMPLICIT),
    "pack_weight": SmokeCall(REAL, (IMAGE, (9, 5, 1, 3)), _same, IMPLICIT),
    "channels_last": SmokeCall(REAL, (IMAGE, (8, 5, 3, 3)), _moved, IMPLICIT, of_few_bits=True),
    "exchange_weight": SmokeCall(
        tuple(dtype for dtype in ALL if is_complex(dtype)), ((2, 8, 19, 35), (8, 3, 9, 9)), _grouped_input_gradient, FFT
    ),
    "im2col": SmokeCall(ALL, (IMAGE,), lambda x: im2col(x, (3, 3), padding=1)),
    "col2im": SmokeCall(ALL, ((2, 45, 19 * 35),), lambda columns: col2im(columns, (19, 35), (3, 3), padding=1)),
    "epilogue": SmokeCall(ALL, (IMAGE, WEIGHT, (7,)), _biased, GEMM),
    "tiles": SmokeCall(ALL, (IMAGE, WEIGHT), _wrapped, FFT),
    "spectra": SmokeCall(tuple(dtype for dtype in ALL if is_complex(dtype)), (IMAGE, (5, 1, 9, 9)), _depthwise, FFT),
    "finish_tiles": SmokeCall(ALL, (IMAGE, WEIGHT, (7,)), _biased, FFT),
    "spectra_gradient": SmokeCall(
        tuple(dtype for dtype in ALL if is_complex(dtype)), ((2, 5, 19, 35), IMAGE), _weight_gradient_by_transforms, FFT
    ),
    "finish_weight_tiles": SmokeCall(ALL, ((2, 7, 19, 35), IMAGE), _weight_gradient_by_transforms, FFT),
    "epilogue_grad": SmokeCall(ALL, (IMAGE, WEIGHT, (7,), (2, 7, 19, 35)), _epilogue_grad),
    "prologue_grad": SmokeCall(ALL, (IMAGE, WEIGHT, (5,), (5,), (2, 7, 19, 35)), _prologue_grad),
    "conv_pair": SmokeCall(REAL, (IMAGE, WEIGHT, (6, 7, 3, 3)), _pair, {"fuse": True}),
    "transposed": SmokeCall(ALL, (IMAGE, (5, 7, 3, 3)), _transposed, DIRECT),
    "depthwise_transposed": SmokeCall(REAL, (IMAGE, (5, 1, 3, 3)), _depthwise_transposed, DIRECT),
    "implicit_weight_gradient": SmokeCall(
        REAL, ((2, 19, 35, 24), (2, 19, 35, 16)), _channels_last_weight_gradient, IMPLICIT
    ),
    "depthwise_weight_gradient": SmokeCall(REAL, ((2, 5, 19, 35), IMAGE), _depthwise_weight_gradient, DIRECT),
    "weight_gradient": SmokeCall(ALL, ((2, 7, 19, 35), IMAGE), _weight_gradient, DIRECT),
    "pool": SmokeCall(REAL, (IMAGE,), _pool),
    "pool_gradient": SmokeCall(REAL, (IMAGE, (2, 5, 9, 17)), _pool_gradient),
    "recurrent_step": SmokeCall(REAL, SEQUENCE, _lstm, {"method": "step"}),
    "recurrent_persistent": SmokeCall(REAL, SEQUENCE, _lstm, {"method": "persistent"}),
    "recurrent_gradient": SmokeCall(REAL, ((6, 10, 20), *SEQUENCE[1:], (6, 10, 40)), _lstm_gradient_by_steps),
    "recurrent_gradient_persistent": SmokeCall(REAL, (*SEQUENCE, (6, 9, 40)), _lstm_gradient),
    "recurrent_inputs": SmokeCall(REAL, (*SEQUENCE, (6, 9, 40)), _lstm_gradient_of_lengths),
}

#: Kernels whose threads or blocks exchange values through shared or global memory: the sanitizers check these.
EXCHANGING = (
    "implicit_gemm",
    "implicit_weight_gradient",
    "conv_pair",
    "recurrent_persistent",
    "recurrent_step",
    "weight_gradient",
    "depthwise_weight_gradient",
    "recurrent_gradient",
    "recurrent_gradient_persistent",
)
