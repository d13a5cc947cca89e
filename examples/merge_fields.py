"""Combine five fields of a simulation into four channels, without concatenating them.

python examples/merge_fields.py            on NumPy
python examples/merge_fields.py --cupy     on a GPU
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

batch, points = 4, 100_000
velocity = xp.random.standard_normal((batch, 3, points))
pressure = xp.random.standard_normal((batch, 1, points))
density = xp.random.standard_normal((batch, 1, points))
temperature = xp.random.standard_normal((batch, 1, points))
tracers = xp.random.standard_normal((batch, 14, points))
fields = [velocity, pressure, density, temperature, tracers]  # 20 channels in all
weight = xp.random.standard_normal((4, 20))

merged = cupyconv.linmerge(fields, weight, activation="tanh")
print("merged", merged.shape, merged.dtype)

difference = abs(merged - xp.tanh(weight @ xp.concatenate(fields, axis=1))).max()
print(f"largest difference from concatenate and matmul: {float(difference):.1e}")
print()
print(cupyconv.explain(cupyconv.linmerge, fields, weight, activation="tanh"))

if not difference < 1e-12:
    sys.exit("the difference is too large")
