"""ONNX's convolution, pooling and recurrent operators on NumPy or CuPy arrays, node by node.

python examples/onnx_nodes.py            on NumPy
python examples/onnx_nodes.py --cupy     on a GPU

Your own engine can run a node with ``OPERATORS[node.op_type](*inputs, **attributes, outputs=len(node.output))``, where
strings must be `str` (``value.decode()``).  Each operator is compared with an example from ONNX's documentation or with
its formula.  On NumPy, ``cupyconv.interop.onnx.operators`` adds the operators to ONNX's own evaluator.
"""

import argparse
import sys

import numpy as np

from cupyconv.interop.onnx import OPERATORS


def run(op_type, *inputs, **attributes):
    """Return the first output of a node."""
    return OPERATORS[op_type](*inputs, **attributes)[0]


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

    y = run("Conv", ramp(1, 1, 5, 5), xp.ones((1, 1, 3, 3), xp.float32), pads=[1, 1, 1, 1])
    check("Conv", y[0, 0, :2], [[12, 21, 27, 33, 24], [33, 54, 63, 72, 51]])
    y = run("ConvTranspose", ramp(1, 1, 3, 3), xp.ones((1, 2, 3, 3), xp.float32))
    check("ConvTranspose", y[0, 1, :2], [[0, 1, 3, 3, 2], [3, 8, 15, 12, 7]])
    y = run("MaxPool", ramp(1, 1, 4, 4, start=1), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    check("MaxPool", y[0, 0], [[11, 12], [15, 16]])
    y = run("AveragePool", ramp(1, 1, 5, 5, start=1), kernel_shape=[5, 5], pads=[2, 2, 2, 2])
    check("AveragePool", y[0, 0, :2], [[7, 7.5, 8, 8.5, 9], [9.5, 10, 10.5, 11, 11.5]])

    # One step from zero states.  In ONNX, the order of gates is i, o, f, c for an LSTM, and z, r, h for a GRU.
    random, hidden = np.random.default_rng(0), 4
    X = xp.asarray(random.normal(size=(1, 2, 3)), xp.float32)
    W, R, B = (xp.asarray(random.normal(size=(1, *s)), xp.float32) for s in ((16, 3), (16, hidden), (32,)))
    i, o, _, c = xp.split(X[0] @ W[0].T + B[0, :16] + B[0, 16:], 4, axis=1)
    _, Y_h, _ = OPERATORS["LSTM"](X, W, R, B, hidden_size=hidden)
    check("LSTM", Y_h[0], sigmoid(o) * xp.tanh(sigmoid(i) * xp.tanh(c)))
    W, R, B = W[:, :12], R[:, :12], B[:, :24]
    z, _, h = xp.split(X[0] @ W[0].T + B[0, :12] + B[0, 12:], 3, axis=1)
    check("GRU", run("GRU", X, W, R, B, hidden_size=hidden)[0, 0], (1 - sigmoid(z)) * xp.tanh(h))


xp = np
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
    if parser.parse_args().cupy:
        import cupy as xp
    main()
