"""Edges of an image by orientation: one `conv` with complex Gabor filters on a real image.

python examples/edges.py            on NumPy
python examples/edges.py --cupy     on a GPU
"""

import argparse
import math
import sys

import cupyconv

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
if parser.parse_args().cupy:
    import cupy as xp
else:
    import numpy as xp

# A disc: its edge has every orientation, and at each point of it we know which.
y, x = xp.mgrid[-64:64, -64:64]
disc = (x**2 + y**2 < 40**2).astype(xp.float32)

# Eight complex filters of 15 x 15, none of which sees an even brightness.
angles = xp.pi * xp.arange(8)[:, None, None] / 8
j, i = xp.mgrid[-7:8, -7:8]
envelope = xp.exp(-(i**2 + j**2) / 18)
bank = envelope * xp.exp(2j * xp.pi / 7 * (i * xp.cos(angles) + j * xp.sin(angles)))
bank -= envelope * bank.sum(axis=(1, 2), keepdims=True) / envelope.sum()

edges = abs(cupyconv.conv(disc[None, None], bank[:, None].astype(xp.complex64), padding="same", padding_mode="edge"))
strongest = edges[0].argmax(axis=0)

right = 0
for step, angle in enumerate(angles.ravel().tolist()):
    column, row = (round(64 + 40 * f(angle)) for f in (math.cos, math.sin))
    right += int(strongest[row, column]) == step
    print(f"edge at {step * 180 / 8:5.1f} degrees: filter {int(strongest[row, column])} answers strongest")

if right != 8:
    sys.exit("some filter did not answer to its own orientation")
