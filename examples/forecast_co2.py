"""Forecast half a year of atmospheric CO2: causal convolutions feed a GRU, in plain array code.

python examples/forecast_co2.py            on NumPy, in a few seconds
python examples/forecast_co2.py --cupy     on a GPU

The series is that of Mauna Loa, weekly from 1958 to 2001, as included in statsmodels.  The network learns from the
first four fifths and is tested on the rest.  It is compared with three simple forecasts.  One of them, least squares,
is a little better than the network, because the series is very regular.

Needs statsmodels and matplotlib (the picture, co2.png): pip install '.[examples]'
"""

import argparse
import math
import sys
import time

import numpy as np
from matplotlib.figure import Figure  # pip install '.[examples]'
from statsmodels.datasets import co2  # pip install '.[examples]'
from threadpoolctl import threadpool_limits  # pip install '.[examples]'

from cupyconv import ConvLayer, conv, conv_chain, gru, vjp

if "--cupy" in sys.argv:
    import cupy as xp
else:
    xp = np
host = getattr(xp, "asnumpy", np.asarray)  # converts to a NumPy array

YEAR, PAST, AHEAD = 52, 156, 26  # weeks in a year, in the network's input, in its forecast
CHANNELS, HIDDEN, DILATIONS, EVERY = 8, 12, (1, 2, 4), 4  # the GRU reads every fourth week
BATCH, RATE, DECAY, NOISE = 64, 5e-3, 1e-2, 0.4


def new_parameters(random):
    """Return weights and biases of the convolutions, of the GRU, and of the forecast from its last state."""

    def uniform(bound, *shapes):
        return [xp.asarray(random.uniform(-bound, bound, shape), xp.float32) for shape in shapes]

    convolutions = []
    for inputs in (1, *[CHANNELS] * (len(DILATIONS) - 1)):
        convolutions += uniform((3 * inputs) ** -0.5, (CHANNELS, inputs, 3), (CHANNELS,))
    gates = 3 * HIDDEN
    recurrent = uniform(HIDDEN**-0.5, (gates, CHANNELS), (gates, HIDDEN), (gates,), (gates,))
    return convolutions + recurrent + uniform(HIDDEN**-0.5, (HIDDEN, AHEAD), (AHEAD,))


def forecast(parameters, x):
    """Return the forecast weeks of each series in x, (N, 1, weeks), for inference."""
    *convolutions, w_ih, w_hh, b_ih, b_hh, weight, bias = parameters
    pairs = zip(convolutions[::2], convolutions[1::2], DILATIONS)
    layers = [ConvLayer(w, b, padding="causal", dilation=d, activation="relu") for w, b, d in pairs]
    features = conv_chain(x, layers)
    _, h = gru(features[:, :, EVERY - 1 :: EVERY].transpose(2, 0, 1), w_ih, w_hh, b_ih, b_hh)
    return h[0] @ weight + bias


def forecast_vjp(parameters, x):
    """Return the forecast and a function from its gradient to the parameters', for training."""
    *convolutions, w_ih, w_hh, b_ih, b_hh, weight, bias = parameters
    features, pullbacks = x, []
    for w, b, d in zip(convolutions[::2], convolutions[1::2], DILATIONS):
        features, pullback = vjp(conv, features, w, b, padding="causal", dilation=d, activation="relu")
        pullbacks.append(pullback)
    (_, h), gru_pullback = vjp(gru, features[:, :, EVERY - 1 :: EVERY].transpose(2, 0, 1), w_ih, w_hh, b_ih, b_hh)

    def reverse(grad):
        back = gru_pullback(grad_h=(grad @ weight.T)[None])
        dfeatures = xp.zeros_like(features)
        dfeatures[:, :, EVERY - 1 :: EVERY] = back.x.transpose(1, 2, 0)
        found = []
        for pullback in reversed(pullbacks):
            gradients = pullback(dfeatures)
            dfeatures = gradients.x
            found = [gradients.weight, gradients.bias, *found]
        return [*found, back.weight_ih, back.weight_hh, back.bias_ih, back.bias_hh, h[0].T @ grad, grad.sum(axis=0)]

    return h[0] @ weight + bias, reverse


class Adam:
    """Kingma and Ba's optimizer with weight decay: each parameter's step is scaled by its own past gradients."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.mean = [xp.zeros_like(array) for array in parameters]
        self.square = [xp.zeros_like(array) for array in parameters]
        self.steps = 0

    def step(self, grads, rate):
        self.steps += 1
        rate *= math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for array, grad, mean, square in zip(self.parameters, grads, self.mean, self.square):
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            array *= 1 - RATE * DECAY
            array -= rate * mean / (xp.sqrt(square) + 1e-8)


def windows(series):
    """Return (past, ahead) for every week that has both."""
    cut = np.lib.stride_tricks.sliding_window_view(series, YEAR + PAST + AHEAD)
    return cut[:, :-AHEAD], cut[:, -AHEAD:]


def seen(past):
    """Return the network's input: the increase of each week over the same week a year before, minus 1.4 ppm."""
    return xp.asarray((past[:, YEAR:] - past[:, :-YEAR])[:, None] - 1.4, xp.float32)


def a_year_ago(past):
    return past[:, -YEAR : AHEAD - YEAR]


def with_growth(past):
    """Return last year's values plus this month's growth over the same month of last year."""
    growth = past[:, -4:].mean(axis=1) - past[:, -4 - YEAR : -YEAR].mean(axis=1)
    return a_year_ago(past) + growth[:, None]


def least_squares(past, ahead, test_past):
    """Return the best linear map's forecast from every fourth week of the network's input."""

    def matrix(p):
        return np.c_[host(seen(p))[:, 0, ::4].astype(np.float64), np.ones(len(p))]

    found = np.linalg.lstsq(matrix(past), ahead - a_year_ago(past))[0]
    return matrix(test_past) @ found + a_year_ago(test_past)


def picture(weeks, series, first_test, forecasts, ahead):
    """Draw the series with some test forecasts, and every method's error by week ahead."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    shown = slice(first_test - 2 * YEAR, None)
    left.plot(weeks[shown], series[shown], color="0.6", linewidth=2.5, label="measured")
    ours = forecasts["convolutions and GRU"]
    for start in range(0, len(ours), AHEAD):
        week = first_test + start
        left.plot(
            weeks[week : week + AHEAD], ours[start], color="#c0392b", linewidth=1, label=None if start else "forecast"
        )
    left.set(
        xlabel="year", ylabel="CO$_2$ at Mauna Loa, ppm",
        title=f"Forecasts of {AHEAD} weeks, each from the {PAST + YEAR} weeks before it",
    )  # fmt: skip
    left.legend(frameon=False)
    for (name, guess), color in zip(forecasts.items(), ("0.6", "#4c72b0", "#2a8a4a", "#c0392b")):
        right.plot(range(1, AHEAD + 1), np.sqrt(((guess - ahead) ** 2).mean(axis=0)), color=color, label=name)
    right.set(xlabel="weeks ahead", ylabel="root mean square error, ppm", ylim=0, title="Errors of all test forecasts")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


@threadpool_limits.wrap(limits=1)  # for such small products, BLAS threads would mostly wait for each other
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", default="co2.png", help="the picture (default: %(default)s)")
    options = parser.parse_args()

    random = np.random.default_rng(0)
    table = co2.load_pandas().data["co2"].interpolate()
    weeks, series = table.index.to_numpy(), table.to_numpy()
    first_test = len(series) * 4 // 5
    (past, ahead), (test_past, test_ahead) = windows(series[:first_test]), windows(series[first_test - YEAR - PAST :])
    x, test_x = seen(past), seen(test_past)
    y = xp.asarray(ahead - a_year_ago(past) - 1.4, xp.float32)
    parameters = new_parameters(random)
    adam = Adam(parameters)
    count = sum(array.size for array in parameters)
    print(
        f"{len(DILATIONS)} causal convolutions and a GRU ({count:,} parameters) are trained on {len(x):,} pieces of the series."
    )
    print(f"{len(test_x)} later pieces are the test: {AHEAD} weeks are forecast from the {PAST + YEAR} weeks before.")

    steps, start = -(-len(x) // BATCH), time.perf_counter()
    for epoch in range(options.epochs):
        chosen = random.permutation(len(x))
        losses = []
        for step in range(steps):
            batch = xp.asarray(chosen[step * BATCH : (step + 1) * BATCH])
            noise = xp.asarray(random.normal(0, NOISE, (len(batch), *x.shape[1:])), xp.float32)
            guess, reverse = forecast_vjp(parameters, x[batch] + noise)
            wrong = guess - y[batch]
            rate = RATE * (1 + math.cos(math.pi * (epoch + step / steps) / options.epochs)) / 2
            adam.step(reverse(2 * wrong / wrong.size), rate)
            losses.append((wrong * wrong).mean())  # not printed yet: printing would synchronize with the GPU
            if sys.stdout.isatty():
                bar = "█" * (24 * (step + 1) // steps)
                print(f"epoch {epoch + 1:2} of {options.epochs} │{bar:<24}│", end="\r", flush=True)
        print(f"epoch {epoch + 1:2} of {options.epochs}: mean squared error {float(sum(losses)) / steps:.4f}")
    seconds = time.perf_counter() - start

    forecasts = {
        "a year ago": a_year_ago(test_past),
        "a year ago, and growth": with_growth(test_past),
        "least squares": least_squares(past, ahead, test_past),
        "convolutions and GRU": host(forecast(parameters, test_x)) + a_year_ago(test_past) + 1.4,
    }
    print(f"Root mean square error of the forecasts of {AHEAD} weeks, in parts per million (ppm):")
    for name, guess in forecasts.items():
        print(f"  {name:<24}{np.sqrt(((guess - test_ahead) ** 2).mean()):.3f}")
    picture(weeks, series, first_test, forecasts, test_ahead).savefig(options.output, dpi=110)
    print(f"{seconds:.0f} seconds on {xp.__name__}; the picture is in {options.output}")


if __name__ == "__main__":
    main()
