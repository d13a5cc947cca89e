"""A residual block at inference: batch normalizations are folded into weights, the rest runs in the epilogue.

python examples/batchnorm_folding.py            on NumPy
python examples/batchnorm_folding.py --cupy     on a GPU
"""

import argparse
import sys

import cupyconv

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
if parser.parse_args().cupy:
    import cupy as xp
else:
    import numpy as xp

channels = 32
x = xp.random.standard_normal((8, channels, 28, 28)).astype(xp.float32)


def trained_layer():
    """Return a weight, and the statistics, scale and shift of the batch normalization after it."""
    weight = xp.random.standard_normal((channels, channels, 3, 3)).astype(xp.float32) / 17
    mean, gamma, beta = xp.random.standard_normal((3, channels)).astype(xp.float32)
    return weight, dict(mean=mean, var=xp.ones_like(mean) / 2, gamma=gamma, beta=beta)


def batchnorm(y, mean, var, gamma, beta):
    mean, var, gamma, beta = (v[:, None, None] for v in (mean, var, gamma, beta))
    return gamma * (y - mean) / xp.sqrt(var + 1e-5) + beta


(w1, norm1), (w2, norm2) = trained_layer(), trained_layer()

# As trained: convolution, normalization and activation, each of them a pass over the image.
hidden = xp.maximum(batchnorm(cupyconv.conv(x, w1, padding="same"), **norm1), 0)
expected = xp.maximum(batchnorm(cupyconv.conv(hidden, w2, padding="same"), **norm2) + x, 0)

# Folded: two calls.
f1, b1 = cupyconv.fold_batchnorm(w1, None, **norm1)
f2, b2 = cupyconv.fold_batchnorm(w2, None, **norm2)
hidden = cupyconv.conv(x, f1, b1, padding="same", activation="relu")
y = cupyconv.conv(hidden, f2, b2, padding="same", residual=x, activation="relu")

difference = float(abs(y - expected).max())
print(f"two fused calls and six passes agree to {difference:.1e}")
if not difference < 1e-3:
    sys.exit("the difference is too large")
