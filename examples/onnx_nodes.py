"""ONNX's convolutions, pooling and recurrent layers as calls of cupyconv: one function for each operator.

python examples/onnx_nodes.py            on NumPy
python examples/onnx_nodes.py --cupy     on a GPU

Inputs are positional and attributes are keywords, with ONNX's names and defaults, so an engine runs a node by
``OPERATORS[node.op_type](*inputs, **attributes)``, strings being `str` (``value.decode()``).  At the end each operator is
compared with an example from ONNX's documentation, or with its formula.
"""

import argparse
import re
import sys

import numpy as np

import cupyconv
from cupyconv import from_onnx_weights, onnx_padding


def Conv(X, W, B=None, *, strides=1, pads=None, auto_pad="NOTSET", dilations=1, group=1, kernel_shape=None):
    padding = onnx_padding(pads, auto_pad)
    return cupyconv.conv(X, W, B, stride=strides, padding=padding, dilation=dilations, groups=group)


def ConvTranspose(
    X, W, B=None, *, strides=1, pads=None, auto_pad="NOTSET", output_padding=0, output_shape=None, dilations=1, group=1,
    kernel_shape=None,
):  # fmt: skip
    padding = onnx_padding(None if output_shape else pads, auto_pad)  # output_shape overrides pads
    return cupyconv.conv_transpose(
        X, W, B, stride=strides, padding=padding, output_padding=output_padding, output_shape=output_shape,
        dilation=dilations, groups=group,
    )  # fmt: skip


def MaxPool(
    X, *, kernel_shape, strides=1, pads=None, auto_pad="NOTSET", dilations=1, ceil_mode=0, storage_order=0
):  # fmt: skip
    """The values alone, not the second output, which is indices."""
    padding, ceil_mode = onnx_padding(pads, auto_pad), bool(ceil_mode)
    return cupyconv.max_pool(X, kernel_shape, stride=strides, padding=padding, dilation=dilations, ceil_mode=ceil_mode)


def AveragePool(
    X, *, kernel_shape, strides=1, pads=None, auto_pad="NOTSET", dilations=1, ceil_mode=0, count_include_pad=0
):  # fmt: skip
    return cupyconv.avg_pool(
        X, kernel_shape, stride=strides, padding=onnx_padding(pads, auto_pad), dilation=dilations,
        ceil_mode=bool(ceil_mode), count_include_pad=bool(count_include_pad),
    )  # fmt: skip


def LSTM(X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, **attributes):
    X, h0, c0, settings, results = recurrent(X, W, R, initial_h, initial_c, 3, **attributes)
    weights = from_onnx_weights("LSTM", W, R, B, P)
    y, (h, c) = cupyconv.lstm(X, **weights, h0=h0, c0=c0, lengths=sequence_lens, **settings)
    return results(y, h, c)


def GRU(X, W, R, B=None, sequence_lens=None, initial_h=None, *, linear_before_reset=0, **attributes):
    X, h0, _, settings, results = recurrent(X, W, R, initial_h, None, 2, **attributes)
    settings["linear_before_reset"] = bool(linear_before_reset)  # cupyconv's default is PyTorch's: True
    y, h = cupyconv.gru(X, **from_onnx_weights("GRU", W, R, B), h0=h0, lengths=sequence_lens, **settings)
    return results(y, h)


def recurrent(
    X, W, R, h0, c0, count, *, direction="forward", clip=None, activations=None, activation_alpha=(),
    activation_beta=(), input_forget=None, layout=0, hidden_size=None,
):  # fmt: skip
    """What LSTM and GRU have in common; `count` is how many activations one direction has."""
    settings = dict(direction=direction, clip=clip)
    if input_forget is not None:
        settings["input_forget"] = bool(input_forget)
    if activations:
        found = [*map_activations(activations, iter(activation_alpha), iter(activation_beta))]
        settings["activations"] = found if len(found) == count else (found[:count], found[count:])
    if layout:  # samples first: views, without a copy
        X, h0, c0 = (None if array is None else array.swapaxes(0, 1) for array in (X, h0, c0))

    def results(y, *states):
        """Y has an axis for directions: (T, D, N, H), or samples first, (N, T, D, H)."""
        y = y.reshape(*y.shape[:2], len(W), R.shape[2])
        return y.swapaxes(0 if layout else 1, 1 if layout else 2), *(s.swapaxes(0, 1) if layout else s for s in states)

    return X, h0, c0, settings, results


def map_activations(names, alphas, betas):
    """ONNX's "HardSigmoid" is "hard_sigmoid", or ("hard_sigmoid", alpha, beta)."""
    parameters = {"LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1, "HardSigmoid": 2, "ScaledTanh": 2, "Affine": 2}
    for name in names:
        given = [next(values, None) for values in (alphas, betas)[: parameters.get(name, 0)]]
        ours = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
        yield (ours, *[value for value in given if value is not None])


OPERATORS = {f.__name__: f for f in (Conv, ConvTranspose, MaxPool, AveragePool, LSTM, GRU)}


def check(name, ours, expected):
    difference = float(abs(ours - xp.asarray(expected)).max())
    print(f"{name:20} {ours.shape!s:16} largest difference {difference:.1e}")
    if not difference < 1e-5:
        sys.exit(f"{name} differs from ONNX")


def main():
    def ramp(*shape, start=0):
        return xp.arange(start, start + np.prod(shape), dtype=xp.float32).reshape(shape)

    def sigmoid(v):
        return 1 / (1 + xp.exp(-v))

    y = Conv(ramp(1, 1, 5, 5), xp.ones((1, 1, 3, 3), xp.float32), pads=[1, 1, 1, 1])
    check("Conv", y[0, 0, :2], [[12, 21, 27, 33, 24], [33, 54, 63, 72, 51]])
    y = ConvTranspose(ramp(1, 1, 3, 3), xp.ones((1, 2, 3, 3), xp.float32))
    check("ConvTranspose", y[0, 1, :2], [[0, 1, 3, 3, 2], [3, 8, 15, 12, 7]])
    y = MaxPool(ramp(1, 1, 4, 4, start=1), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    check("MaxPool", y[0, 0], [[11, 12], [15, 16]])
    y = AveragePool(ramp(1, 1, 5, 5, start=1), kernel_shape=[5, 5], pads=[2, 2, 2, 2])
    check("AveragePool", y[0, 0, :2], [[7, 7.5, 8, 8.5, 9], [9.5, 10, 10.5, 11, 11.5]])

    # One step from zero states; the gates of an LSTM are i, o, f, c here, those of a GRU are z, r, h.
    random, hidden = np.random.default_rng(0), 4
    X = xp.asarray(random.normal(size=(1, 2, 3)), xp.float32)
    W, R, B = (xp.asarray(random.normal(size=(1, *s)), xp.float32) for s in ((16, 3), (16, hidden), (32,)))
    i, o, _, c = xp.split(X[0] @ W[0].T + B[0, :16] + B[0, 16:], 4, axis=1)
    _, Y_h, _ = LSTM(X, W, R, B, hidden_size=hidden)
    check("LSTM", Y_h[0], sigmoid(o) * xp.tanh(sigmoid(i) * xp.tanh(c)))
    W, R, B = W[:, :12], R[:, :12], B[:, :24]
    z, _, h = xp.split(X[0] @ W[0].T + B[0, :12] + B[0, 12:], 3, axis=1)
    Y, _ = GRU(X, W, R, B, hidden_size=hidden)
    check("GRU", Y[0, 0], (1 - sigmoid(z)) * xp.tanh(h))


xp = np
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
    if parser.parse_args().cupy:
        import cupy as xp
    main()
