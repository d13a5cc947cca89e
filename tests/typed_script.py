"""A user's script for two type checkers, mypy and pyright, both strict.  Nobody runs it; see `.ci/run`.

It uses every public name as users do.  A line with ``type: ignore`` is a mistake that both checkers must find, because
an unused ignore is itself an error.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import cupyconv
import cupyconv.interop.onnx
from cupyconv import ConvGradients, ConvLayer, Plan, RecurrentGradients, conv, linmerge, max_pool, options, vjp

Image = npt.NDArray[np.float32]


def convolutions(x: Image, weight: Image, bias: Image | None) -> Image:
    y: Image = conv(x, weight, bias, padding="same", activation="relu")
    y = conv([x, x], weight, stride=2, padding=[(1, 2), (0, 1)], dilation=(1, 1), activation=("clip", 0, 6))
    y = conv((x,), weight, padding=(1, 1), padding_mode="reflect", prologue=(None, bias, "relu"), residual=y, out=y)
    merged: Image = linmerge([x, x], weight, bias, method="gemm")
    larger: Image = cupyconv.conv_transpose(x, weight, stride=2, output_padding=1)
    larger = cupyconv.conv_transpose(x, weight, stride=(2, 2), output_shape=(8, 8))
    columns: Image = cupyconv.im2col(x, 3, padding=1)
    image: Image = cupyconv.col2im(columns, (8, 8), (3, 3), padding=1)
    layers = [ConvLayer(weight, bias, padding=1, activation="relu"), ConvLayer(weight)]
    chained: Image = cupyconv.conv_chain(x, layers, fuse=False)
    return y + merged + larger + image + chained


def wrong(x: Image, weight: Image) -> None:
    conv(x, weight, strides=2)  # type: ignore
    conv(x, weight, stride="2")  # type: ignore
    conv(x, weight, padding=1.5)  # type: ignore
    conv(x)  # type: ignore
    linmerge([x], weight, bias=None, groups=2)  # type: ignore
    max_pool(x, None)  # type: ignore
    options(workspace_limit="1 GiB")  # type: ignore
    cupyconv.conv_chain(x, [weight, "relu"], fuse=1.5)  # type: ignore
    cupyconv.onnx_padding([1, 1], auto_pad=None)  # type: ignore


def pools(x: Image) -> Image:
    largest: Image = max_pool(x, 2)
    largest = max_pool(x, (2, 2), stride=2, padding=1, ceil_mode=True).astype(np.float32)
    largest, indices = max_pool(x, 2, return_indices=True)
    several: list[Image] = max_pool([x, x], 2, return_indices=False)
    mean: Image = cupyconv.avg_pool(x, 2, count_include_pad=False)
    print(indices.shape, len(several))
    return largest + mean


def either(x: Image, wanted: bool) -> None:
    pooled = max_pool(x, 2, return_indices=wanted)
    print(pooled[0] if wanted else pooled)


def gradients(x: Image, weight: Image) -> Image:
    y, pullback = vjp(conv, x, weight, padding="same")
    found: ConvGradients = pullback(np.ones_like(y), needs=("x", "weight"))
    by_hand: Image = cupyconv.conv_grad_input(y, weight, x.shape, padding="same")
    parts: list[Image] = cupyconv.conv_grad_input(y, weight, [x.shape, x.shape])
    by_weight: Image = cupyconv.conv_grad_weight(y, [x, x], (3, 3), stride=1)
    print(by_hand.shape, len(parts), by_weight.shape, found.bias is None, found.weight.shape)
    of_x: Image = found.x
    return of_x


def recurrent(x: Image, w: Image, u: Image, b: Image | None) -> Image:
    y, h = cupyconv.rnn(x, w, u, b, b, activation="relu", lengths=[3, 2])
    y, (h, c) = cupyconv.lstm(x, w, u, h0=h, c0=h, peephole=b, direction="bidirectional", input_forget=True)
    y, h = cupyconv.gru(x, w, u, activations=("hard_sigmoid", "tanh"), linear_before_reset=False, clip=3)
    h = cupyconv.rnn_step(x[0], h, w, u)
    h, c = cupyconv.lstm_step(x[0], h, c, w, u, peephole=b)
    h = cupyconv.gru_step(x[0], h, w, u, clip=1.5)
    (y, (h, c)), pullback = vjp(cupyconv.lstm, x, w, u)
    found: RecurrentGradients = pullback(y, h, c)
    keywords = cupyconv.from_onnx_weights("LSTM", w, u)
    y, _ = cupyconv.lstm(x, **keywords)
    result: Image = y + found.x
    return result


def plans(x: Image, weight: Image) -> None:
    with options(workspace_limit=1 << 24, allow_tf32=True, allow_winograd=False, allow_fft=False, threads=2):
        plan = cupyconv.explain(conv, x, weight, padding=1, on="sm_90")
    assert_type(plan, Plan)
    assert_type(plan.method, str)
    assert_type(plan.workspace_bytes, int)
    assert_type(plan.flops, int)
    for method, reason in plan.rejected:
        print(method.upper(), reason.upper())
    print(plan, plan.backend.upper(), plan.bound.upper(), len(plan.steps), plan.bytes_moved)
    cupyconv.show_config()
    cupyconv.clear_caches()


def weights(weight: Image, bias: Image, mean: Image, var: Image) -> tuple[Image, Image]:
    folded, shifted = cupyconv.fold_batchnorm(weight, bias, mean=mean, var=var, gamma=None, eps=1e-3)
    padding = cupyconv.onnx_padding([1, 1, 2, 2])
    conv(weight, folded, padding=padding)
    layer = ConvLayer(folded, shifted, stride=2, padding=padding)
    assert_type(cupyconv.__version__, str)
    again: Any = layer.weight
    print(again, layer.stride, layer.activation)
    return folded, shifted


def models(image: Image) -> None:
    model = cupyconv.interop.onnx.load("model.onnx", xp=np)
    print(model(image=image), cupyconv.interop.onnx.operators())
