"""Denoise a photograph with a tiny U-Net in plain array code, trained with a hand-written reverse pass.

python examples/denoise.py                   with the weights stored next to this file
python examples/denoise.py --train           trains these weights again, on NumPy in some minutes
python examples/denoise.py --cupy            on a GPU, with or without --train

The network learned from photographs of a flower and of a portrait.  It is tested on a Chinese pavilion, which is new to
it.
Needs scikit-learn and matplotlib (photographs, the picture denoise.png) and SciPy: pip install '.[examples]'
"""

import argparse
import math
import sys
from pathlib import Path

import matplotlib.cbook  # pip install '.[examples]'
import matplotlib.image
import numpy as np
from matplotlib.figure import Figure
from scipy.ndimage import median_filter  # pip install '.[examples]'
from sklearn.datasets import load_sample_image  # pip install '.[examples]'
from threadpoolctl import threadpool_limits  # pip install '.[examples]'

from cupyconv import conv, conv_transpose, vjp

if "--cupy" in sys.argv:
    import cupy as xp
else:
    xp = np
host = getattr(xp, "asnumpy", np.asarray)  # converts to a NumPy array

NOISE = 0.1  # standard deviation, relative to a white of 1
PATCH, BATCH, STEPS, RATE = 48, 8, 2000, 2e-3
WEIGHTS = Path(__file__).with_name("denoise_weights.npz")


def new_layers(random):
    """Return (weight, bias) of every layer, in the order of the forward pass."""

    def layer(outputs, shape, fan_in, gain=2.0):
        weight = random.normal(0, (gain / fan_in) ** 0.5, shape)
        return [xp.asarray(weight, xp.float32), xp.zeros(outputs, xp.float32)]

    def kernels(outputs, inputs, gain=2.0):
        return layer(outputs, (outputs, inputs, 3, 3), 9 * inputs, gain)

    def doubling(outputs, inputs):  # transposed: inputs first, and one tap per result pixel
        return layer(outputs, (inputs, outputs, 2, 2), inputs)

    down = [kernels(16, 3), kernels(24, 16), kernels(32, 24)]
    up = [doubling(24, 32), kernels(24, 24 + 24), doubling(16, 24), kernels(16, 16 + 16)]
    return [*down, *up, kernels(3, 16, gain=0.01)]


def network(layers, x):
    """Return the images x without noise, and a function from their gradient to those of the layers.

    x ── a ───────────────────── [f, a] ── g ── + x     all pixels
         └── b ──────── [d, b] ── e ── f ┘              half of them along each axis
             └── c ── d ┘                               a quarter
    """
    A, B, C, D, E, F, G, H = layers
    same = dict(padding=1, padding_mode="edge", activation="relu")
    a, back_a = vjp(conv, x, *A, **same)
    b, back_b = vjp(conv, a, *B, **same, stride=2)
    c, back_c = vjp(conv, b, *C, **same, stride=2)
    d, back_d = vjp(conv_transpose, c, *D, stride=2)
    e, back_e = vjp(conv, [d, b], *E, **same)
    f, back_f = vjp(conv_transpose, e, *F, stride=2)
    g, back_g = vjp(conv, [f, a], *G, **same)
    y, back_y = vjp(conv, g, *H, padding=1, padding_mode="edge", residual=x)

    def reverse(dy):
        dg, *dH = back_y(dy, needs=("x", "weight", "bias"))[:3]
        (df, skip_a), *dG = back_g(dg)[:3]
        de, *dF = back_f(df)[:3]
        (dd, skip_b), *dE = back_e(de)[:3]
        dc, *dD = back_d(dd)[:3]
        db, *dC = back_c(dc)[:3]
        da, *dB = back_b(db + skip_b)[:3]
        _, *dA = back_a(da + skip_a, needs=("weight", "bias"))[:3]
        return [dA, dB, dC, dD, dE, dF, dG, dH]

    return y, reverse


def train(layers, photographs, random, steps):
    """Minimize the mean squared error of random patches with Adam; yield the loss of each step."""
    moments = [[(xp.zeros_like(array), xp.zeros_like(array)) for array in layer] for layer in layers]
    for step in range(1, steps + 1):
        patches = np.stack([patch(photographs[random.integers(len(photographs))], random) for _ in range(BATCH)])
        noisy = patches + random.normal(0, NOISE, patches.shape)
        clean, noisy = xp.asarray(patches, xp.float32), xp.asarray(noisy, xp.float32)
        y, reverse = network(layers, noisy)
        rate = RATE * (1 + math.cos(math.pi * step / steps)) / 2 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        for layer, moment, grads in zip(layers, moments, reverse(2 * (y - clean) / y.size)):
            for array, (mean, square), grad in zip(layer, moment, grads):
                mean += 0.1 * (grad - mean)
                square += 0.001 * (grad**2 - square)
                array -= rate * mean / (xp.sqrt(square) + 1e-8)
        yield ((y - clean) ** 2).mean()


def patch(photograph, random):
    """Return a square of a photograph at full or half resolution, with permuted colors, maybe mirrored or inverted."""
    step = random.integers(1, 3)
    photograph = photograph[:, ::step, ::step]
    row, column = (random.integers(size - PATCH + 1) for size in photograph.shape[1:])
    square = photograph[random.permutation(3), row : row + PATCH, column : column + PATCH]
    square = square[:, :, :: random.choice([-1, 1])]
    return 1 - square if random.integers(2) else square


def planes(photograph):
    """Return the photograph with channels first, values between 0 and 1, and sides divisible by 4."""
    height, width = (size // 4 * 4 for size in photograph.shape[:2])
    return photograph[:height, :width].transpose(2, 0, 1) / 255


def psnr(image, clean):
    return float(10 * np.log10(1 / np.mean((image - clean) ** 2)))


def picture(clean, noisy, median, denoised):
    """Draw noisy, denoised, and their difference, which should be noise alone, above a detail from each method."""
    figure = Figure(figsize=(13.5, 7), layout="constrained")
    detail = (slice(None), slice(110, 210), slice(250, 400))
    shown = [
        (f"noisy: {psnr(noisy, clean):.1f} dB", noisy),
        (f"denoised: {psnr(denoised, clean):.1f} dB", denoised),
        ("removed noise, twice as strong", 0.5 + 2 * (noisy - denoised)),
        (f"detail, median filter of 3 x 3 pixels: {psnr(median, clean):.1f} dB", median[detail]),
        ("detail, denoised", denoised[detail]),
        ("detail, the photograph without noise", clean[detail]),
    ]
    figure.suptitle("A U-Net removes noise from a photograph (peak signal-to-noise ratio: higher is better)")
    for axes, (title, image) in zip(figure.subplots(2, 3).flat, shown):
        axes.imshow(image.clip(0, 1).transpose(1, 2, 0))
        axes.set_title(title)
        axes.set_axis_off()
    return figure


def training_photographs():
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        return [planes(load_sample_image("flower.jpg")), planes(matplotlib.image.imread(file, "jpg"))]


@threadpool_limits.wrap(limits=1)  # for such small products, BLAS threads would mostly wait for each other
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
    parser.add_argument("--train", action="store_true", help="train, and write the weights")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="file to read, or to write with --train")
    parser.add_argument("--output", default="denoise.png", help="the picture (default: %(default)s)")
    options = parser.parse_args()
    if options.train:
        print(f"Training on two photographs, {BATCH} patches of {PATCH} x {PATCH} pixels a step.")
        random = np.random.default_rng(0)
        layers, losses = new_layers(random), []
        for step, loss in enumerate(train(layers, training_photographs(), random, options.steps), 1):
            losses.append(loss)
            shown = 10 if sys.stdout.isatty() else -(-options.steps // 10)  # a progress bar, or ten lines
            if step % shown == 0 or step == options.steps:
                bar, recent = "█" * (40 * step // options.steps), float(sum(losses[-shown:])) / len(losses[-shown:])
                end = "\r" if sys.stdout.isatty() and step < options.steps else "\n"
                print(f"step {step:4} of {options.steps} │{bar:<40}│ loss {recent:.5f}", end=end, flush=True)
        np.savez_compressed(options.weights, *(host(array).astype(np.float16) for layer in layers for array in layer))

    stored = np.load(options.weights)
    arrays = [xp.asarray(stored[name], xp.float32) for name in stored.files]
    layers = list(zip(arrays[::2], arrays[1::2]))
    clean = planes(load_sample_image("china.jpg"))
    noisy = clean + np.random.default_rng(1).normal(0, NOISE, clean.shape)
    y, _ = network(layers, xp.asarray(noisy[None], xp.float32))
    denoised = host(y[0])
    median = median_filter(noisy, (1, 3, 3))

    print(
        f"A U-Net of {sum(array.size for array in arrays):,} parameters removes noise of standard deviation {NOISE}"
        " (white is 1) from a photograph that it was not trained on."
    )
    print("Peak signal-to-noise ratio, higher is better:")
    for name, image in dict(noisy=noisy, median=median, denoised=denoised).items():
        print(f"  {name:8} {psnr(image, clean):5.2f} dB")
    picture(clean, noisy, median, denoised).savefig(options.output, dpi=110)
    print(f"The picture is in {options.output}")


if __name__ == "__main__":
    main()
