"""Learn handwritten digits in plain array code: a small DenseNet whose reverse pass is written by hand.

python examples/train_digits.py            on NumPy, in half a minute
python examples/train_digits.py --cupy     on a GPU

Needs scikit-learn (the digits) and matplotlib (the picture, digits.png): pip install '.[examples]'
"""

import argparse
import math
import sys
import time

import numpy as np
from matplotlib.figure import Figure  # pip install '.[examples]'
from sklearn.datasets import load_digits  # pip install '.[examples]'
from threadpoolctl import threadpool_limits  # pip install '.[examples]'

from cupyconv import conv, linmerge, max_pool, vjp

if "--cupy" in sys.argv:
    import cupy as xp
else:
    xp = np
host = getattr(xp, "asnumpy", np.asarray)  # converts to a NumPy array

DEPTH, GROWTH, WIDTH = 4, 8, 16  # layers per dense block; channels per layer; channels at a block's start
BATCH, RATE, MOMENTUM = 32, 0.03, 0.9


def new_layers(random):
    """Return (weight, bias) of every layer, in the order of the forward pass."""

    def layer(outputs, inputs, *kernel):
        weight = random.normal(0, (2 / (inputs * np.prod(kernel))) ** 0.5, (outputs, inputs, *kernel))
        return xp.asarray(weight, xp.float32), xp.zeros(outputs, xp.float32)

    def block():
        return [layer(GROWTH, WIDTH + GROWTH * i, 3, 3) for i in range(DEPTH)]

    every = WIDTH + GROWTH * DEPTH  # total channels of a block's images
    return [layer(WIDTH, 1, 3, 3), *block(), layer(WIDTH, every), *block(), layer(10, every)]


def dense_block(image, layers):
    """Run a block: each layer reads the image and the results of all previous layers, without a concatenation."""
    images, pullbacks = [image], []
    for weight, bias in layers:
        y, pullback = vjp(conv, images, weight, bias, padding="same", activation="relu")
        images, pullbacks = [*images, y], [*pullbacks, pullback]
    return images, pullbacks


def dense_block_reverse(grads, pullbacks):
    """Return the gradient of the block's first image, and those of its layers, from the gradients of all its images."""
    layers = []
    for pullback in reversed(pullbacks):
        *grads, grad = grads  # complete for the last image: all layers that read it are done
        back = pullback(grad)
        grads = [earlier + skip for earlier, skip in zip(grads, back.x)]
        layers = [(back.weight, back.bias), *layers]
    return grads[0], layers


def network(layers, x):
    """Return the scores of the ten digits for each image of x, and a function from their gradient to the layers'."""
    stem, *fine, merge = layers[: DEPTH + 2]
    *coarse, votes = layers[DEPTH + 2 :]

    a, back_a = vjp(conv, x, *stem, padding="same", activation="relu")
    A, back_A = dense_block(a, fine)  # 8 x 8 pixels
    P, back_P = vjp(max_pool, A, (2, 2))
    b, back_b = vjp(linmerge, P, *merge, activation="relu")
    B, back_B = dense_block(b, coarse)  # 4 x 4 pixels
    v, back_v = vjp(linmerge, B, *votes)  # every pixel votes; the mean decides
    scores = v.mean(axis=(2, 3))

    def reverse(dscores):
        dv = xp.broadcast_to(dscores[:, :, None, None] / v[0, 0].size, v.shape)
        dB, *dvotes = back_v(dv)[:3]
        db, dcoarse = dense_block_reverse(dB, back_B)
        dP, *dmerge = back_b(db)[:3]
        dA = back_P(dP).x
        da, dfine = dense_block_reverse(dA, back_A)
        _, *dstem = back_a(da, needs=("weight", "bias"))[:3]
        return [dstem, *dfine, dmerge, *dcoarse, dvotes]

    return scores, reverse


def cross_entropy(scores, onehot):
    """Return the mean of -log p(true digit), where p is the softmax of the scores, and its gradient."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    return -(log_p * onehot).sum() / len(scores), (xp.exp(log_p) - onehot) / len(scores)


def picture(losses, accuracies, images, digits, guesses):
    """Draw the curves and sixty test digits: all mistakes (at most twenty), framed in red, among correct digits."""
    wrong, right = np.flatnonzero(guesses != digits), np.flatnonzero(guesses == digits)
    others = right[np.linspace(0, len(right) - 1, 60 - min(20, len(wrong))).astype(int)]
    shown = np.sort(np.concatenate([wrong[:20], others]))
    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, gallery = figure.subfigures(1, 2, width_ratios=(1, 1.35))
    top, bottom = curves.subplots(2, 1, sharex=True)
    epochs = range(1, len(accuracies) + 1)
    top.semilogy(np.linspace(0, len(accuracies), len(losses)), losses, color="#4c72b0", linewidth=0.5, alpha=0.5)
    top.semilogy(
        epochs, np.mean(np.split(np.array(losses), len(epochs)), axis=1), color="#1f3d70", label="mean of an epoch"
    )
    top.set(ylabel="loss of each batch", ylim=(1e-4, 5), title="Training")
    top.legend(frameon=False)
    bottom.plot(epochs, accuracies, "o-", color="#2a8a4a", markersize=4)
    bottom.set(
        ylabel="correct test digits", xlabel="epoch", ylim=(0.8, 1.005), title=f"Test: {accuracies[-1]:.1%} correct"
    )
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.yaxis.set_major_formatter("{x:.0%}")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    gallery.suptitle(f"Test digits and the network's guesses: {len(wrong)} of {len(digits)} are wrong")
    for axes, i in zip(gallery.subplots(6, 10).flat, shown):
        mistake = guesses[i] != digits[i]
        title, color, frame = (f"{guesses[i]}, not {digits[i]}", "#c0392b", 2) if mistake else (guesses[i], "0.4", 0.5)
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, color=color, size=9, pad=3)
        axes.spines[:].set(color=color, linewidth=frame)
    return figure


@threadpool_limits.wrap(limits=1)  # for such small products, BLAS threads would mostly wait for each other
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--output", default="digits.png", help="the picture (default: %(default)s)")
    options = parser.parse_args()

    random = np.random.default_rng(0)
    digits = load_digits()
    order = random.permutation(len(digits.target))
    images = xp.asarray(digits.images[order, None] / 8 - 1, xp.float32)
    onehot = xp.eye(10, dtype=xp.float32)[xp.asarray(digits.target[order])]
    test_x, train_x, test_y, train_y = images[:450], images[450:], onehot[:450], onehot[450:]
    layers = new_layers(random)
    velocities = [[xp.zeros_like(array) for array in layer] for layer in layers]
    count = sum(array.size for layer in layers for array in layer)
    print(
        f"A DenseNet of {len(layers)} layers ({count:,} parameters) is trained on {len(train_x):,} digits of 8 x 8 pixels."
    )
    print(f"{len(test_x)} other digits are the test.")

    losses, accuracies = [], []
    steps, start = -(-len(train_x) // BATCH), time.perf_counter()
    for epoch in range(options.epochs):
        chosen = random.permutation(len(train_x))
        for step in range(steps):
            batch = xp.asarray(chosen[step * BATCH : (step + 1) * BATCH])
            scores, reverse = network(layers, train_x[batch])
            loss, dscores = cross_entropy(scores, train_y[batch])
            rate = RATE * (1 + math.cos(math.pi * len(losses) / (steps * options.epochs))) / 2
            for layer, velocity, grads in zip(layers, velocities, reverse(dscores)):
                for array, v, grad in zip(layer, velocity, grads):
                    v *= MOMENTUM
                    v -= rate * grad
                    array += v
            losses.append(loss)  # not printed yet: printing would synchronize with the GPU
            if sys.stdout.isatty():
                bar = "█" * (24 * (step + 1) // steps)
                print(f"epoch {epoch + 1:2} of {options.epochs} │{bar:<24}│", end="\r", flush=True)
        scores, _ = network(layers, test_x)
        guesses = scores.argmax(axis=1)
        accuracies.append(float((guesses == test_y.argmax(axis=1)).mean()))
        loss = float(sum(losses[-steps:])) / steps
        print(
            f"epoch {epoch + 1:2} of {options.epochs}: loss {loss:.4f}, {accuracies[-1]:.1%} of the test digits correct"
        )
    losses = [float(loss) for loss in losses]
    picture(losses, accuracies, *map(host, (test_x, test_y.argmax(axis=1), guesses))).savefig(options.output, dpi=110)
    print(f"{time.perf_counter() - start:.0f} seconds on {xp.__name__}; the picture is in {options.output}")


if __name__ == "__main__":
    main()
