"""Detect edges by orientation: one `conv` applies complex Gabor filters to a real image.

python examples/edges.py                        on NumPy
python examples/edges.py --cupy                 on a GPU
python examples/edges.py --output edges.png     also draws a picture: pip install '.[examples]'
"""

import argparse
import math
import sys

import cupyconv

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
parser.add_argument("--output", metavar="FILE", help="draw a picture")
options = parser.parse_args()
if options.cupy:
    import cupy as xp
else:
    import numpy as xp

# A disc: its edge has every orientation, and the orientation at each of its points is known.
y, x = xp.mgrid[-64:64, -64:64]
disc = (x**2 + y**2 < 40**2).astype(xp.float32)

# Eight complex filters of 15 x 15 that do not respond to constant brightness.
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
    print(f"edge at {step * 180 / 8:5.1f} degrees: filter {int(strongest[row, column])} responds most")

if right != 8:
    sys.exit("some filter did not respond most to its own orientation")

if options.output:
    from matplotlib.figure import Figure  # pip install '.[examples]'

    host = getattr(xp, "asnumpy", lambda array: array)
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    left, middle, last = figure.subplots(1, 3)
    left.imshow(host(disc), cmap="gray")
    left.set_title("a disc")
    middle.imshow(host(xp.concatenate([bank[step].real for step in (0, 2, 4)], axis=1)), cmap="RdBu", vmin=-1, vmax=1)
    middle.set_title("three of eight filters, their real parts")
    last.imshow(host(strongest), cmap="hsv", vmin=0, vmax=8, alpha=host(edges[0].max(axis=0) / edges.max()))
    last.set_title("the filter that responds most")
    for axes in (left, middle, last):
        axes.set_axis_off()
    figure.savefig(options.output, dpi=100)
