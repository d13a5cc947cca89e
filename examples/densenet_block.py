"""A DenseNet block in training: its memory grows linearly with depth; with concatenations it grows quadratically.

python examples/densenet_block.py                         on NumPy
python examples/densenet_block.py --cupy                  on a GPU
python examples/densenet_block.py --output memory.png     also draws the memory: pip install '.[examples]'

Each layer normalizes all previous feature maps (with frozen statistics: one scale and shift per channel), and applies
relu and a 3x3 convolution.  The usual implementation stores their concatenation and the normalized copy, once per
layer.  With a list of feature maps and a prologue, only the feature maps are stored, once.
"""

import argparse
import sys
import tracemalloc

import cupyconv

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
parser.add_argument("--output", metavar="FILE", help="draw the memory")
options = parser.parse_args()
if options.cupy:
    import cupy as xp
else:
    import numpy as xp

DEPTHS = (4, 8, 16, 32)  # layers
WIDTH, GROWTH = 16, 12  # channels at the block's start; channels per layer
BATCH, SIZE = 4, 32


def new_layers(depth):
    """Return (weight, scale, shift) of every layer."""
    layers = []
    for channels in range(WIDTH, WIDTH + GROWTH * depth, GROWTH):
        weight = xp.random.standard_normal((GROWTH, channels, 3, 3)) * (2 / (9 * channels)) ** 0.5
        scale, shift = 1 + xp.random.standard_normal((2, channels)) / 4
        layers.append([array.astype(xp.float32) for array in (weight, scale, shift - 1)])
    return layers


def merged(image, layers):
    """Return the block's feature maps and their reverse pass; nothing is concatenated, no normalized copy is stored."""
    maps, pullbacks = [image], []
    for weight, scale, shift in layers:
        y, pullback = cupyconv.vjp(cupyconv.conv, maps, weight, padding=1, prologue=(scale, shift, "relu"))
        maps, pullbacks = [*maps, y], [*pullbacks, pullback]

    def reverse(grads):
        """Return the gradient of the image and those of the layers, from the gradients of all feature maps."""
        found = []
        for pullback in reversed(pullbacks):
            *grads, grad = grads  # complete for the last map: all layers that read it are done
            back = pullback(grad)
            for earlier, more in zip(grads, back.x):
                earlier += more
            found = [(back.weight, back.scale, back.shift), *found]
        return grads[0], found

    return maps, reverse


def concatenating(image, layers):
    """Do the same as `merged`, but copy all previous maps at each layer, and copy them again to normalize them."""
    maps, kept = [image], []
    for weight, scale, shift in layers:
        joined = xp.concatenate(maps, axis=1)
        normalised = joined * scale[:, None, None]
        normalised += shift[:, None, None]
        xp.maximum(normalised, 0, out=normalised)
        y, pullback = cupyconv.vjp(cupyconv.conv, normalised, weight, padding=1)
        maps, kept = [*maps, y], [*kept, (joined, normalised, scale, pullback)]

    def reverse(grads):
        found = []
        while kept:
            joined, normalised, scale, pullback = kept.pop()
            *grads, grad = grads
            back = pullback(grad)
            du = back.x
            du *= normalised > 0
            vectors = xp.einsum("nchw,nchw->c", du, joined), du.sum(axis=(0, 2, 3))
            du *= scale[:, None, None]
            first = 0
            for earlier in grads:
                earlier += du[:, first : first + earlier.shape[1]]
                first += earlier.shape[1]
            found = [(back.weight, *vectors), *found]
        return grads[0], found

    return maps, reverse


def step(block, image, layers):
    """Return all results of a training step: the feature maps, and the gradients of the image and of every layer."""
    maps, reverse = block(image, layers)
    image_grad, layer_grads = reverse([xp.ones_like(m) for m in maps])
    return [*maps, image_grad, *(grad for grads in layer_grads for grad in grads)]


def peak_of(block, image, layers):
    """Return the results of a step and the peak memory in addition to what was in use before."""
    if xp.__name__ == "cupy":
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            results = step(block, image, layers)
            return results, pool.total_bytes()  # the pool never shrinks, so this is the peak
    tracemalloc.start()
    results = step(block, image, layers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return results, peak


xp.random.seed(0)
image = xp.random.standard_normal((BATCH, WIDTH, SIZE, SIZE)).astype(xp.float32)
print("Memory of one training step of a dense block; x: relative to half the layers.")
print("layers    concatenating           merged")
peaks = [(None, None)]
worst = 0.0
# Both blocks sum the same products: different rounding near zero could let a relu pass another gradient.
with cupyconv.options(workspace_limit=4 << 20, allow_winograd=False):
    for block in (concatenating, merged):
        step(block, image, new_layers(2))  # exclude what first calls import and cache
    for depth in DEPTHS:
        layers = new_layers(depth)
        expected, copying = peak_of(concatenating, image, layers)
        results, listing = peak_of(merged, image, layers)
        for a, b in zip(results, expected):
            worst = max(worst, float(abs(a - b).max() / abs(b).max()))
        grown = [f"x {now / before:.1f}" if before else "" for now, before in zip((copying, listing), peaks[-1])]
        print(f"{depth:6}{copying / 1e6:11.1f} MB {grown[0]:6}{listing / 1e6:11.1f} MB {grown[1]:6}".rstrip())
        peaks.append((copying, listing))
print(f"largest relative difference of a result: {worst:.1e}")
if not worst < 1e-3:
    sys.exit("the difference is too large")

if options.output:
    from matplotlib.figure import Figure  # pip install '.[examples]'

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, color, of in zip(("concatenating", "merged"), ("#c0392b", "#12545c"), zip(*peaks[1:])):
        axes.plot(DEPTHS, [peak / 1e6 for peak in of], "o-", color=color, label=name)
    axes.set(xlabel="layers of the block", ylabel="memory of a training step, MB", xticks=DEPTHS, ylim=0)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.output, dpi=110)
