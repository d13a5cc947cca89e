"""The filters of scipy.ndimage and scipy.signal as calls of cupyconv, each compared with SciPy's result.

python examples/filters.py            on NumPy
python examples/filters.py --cupy     on a GPU

Differences from SciPy: arrays have axes for samples and channels, (N, C, height, width) or (C, height, width).  A
kernel has two such axes in front.  Kernels are not flipped (correlation).  Edge modes have the names of `numpy.pad`.
Needs SciPy: pip install '.[examples]'
"""

import argparse
import sys

import numpy as np
from scipy import ndimage, signal  # pip install '.[examples]'

import cupyconv

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cupy", action="store_true", help="compute on a GPU")
if parser.parse_args().cupy:
    import cupy as xp
else:
    xp = np
host = getattr(xp, "asnumpy", np.asarray)  # converts to a NumPy array

random = np.random.default_rng(0)
image = random.random((120, 160))  # height, width
photo = random.random((120, 160, 3))  # height, width, colours
leads = random.standard_normal((12, 5000))  # twelve signals of 5000 samples
kernel = random.random((5, 5))
taps = signal.firwin(101, 0.2)
blur = np.outer(signal.windows.gaussian(9, 1.5), signal.windows.gaussian(9, 1.5))
sobel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])

# Arrays on the GPU, with the axes that cupyconv needs; a kernel is (results, channels, *kernel).
x, p, s = xp.asarray(image[None]), xp.asarray(photo.transpose(2, 0, 1)), xp.asarray(leads[:, None])
k, b, t = xp.asarray(kernel[None, None]), xp.asarray(blur[None, None]), xp.asarray(taps[None, None])
both = xp.asarray(np.stack([sobel.T, sobel])[:, None].astype(float))  # one call computes two results from two kernels

same = dict(padding="same")  # as large as the input
filters = {
    "ndimage.correlate, mode='reflect'": (
        cupyconv.conv(x, k, **same, padding_mode="symmetric")[0],
        ndimage.correlate(image, kernel, mode="reflect"),
    ),
    "ndimage.correlate, mode='mirror'": (
        cupyconv.conv(x, k, **same, padding_mode="reflect")[0],
        ndimage.correlate(image, kernel, mode="mirror"),
    ),
    "ndimage.convolve, mode='nearest'": (
        cupyconv.conv(x, k[:, :, ::-1, ::-1], **same, padding_mode="edge")[0],
        ndimage.convolve(image, kernel, mode="nearest"),
    ),
    "ndimage.sobel along both axes": (
        cupyconv.conv(x, both, **same, padding_mode="symmetric"),
        np.stack([ndimage.sobel(image, axis) for axis in (0, 1)]),
    ),
    "a blur of each colour": (
        cupyconv.conv(p, b.repeat(3, axis=0), **same, padding_mode="wrap", groups=3).transpose(1, 2, 0),
        ndimage.correlate(photo, blur[:, :, None], mode="wrap"),
    ),
    "ndimage.maximum_filter, size=3": (
        cupyconv.max_pool(x, (3, 3), stride=1, **same)[0],  # 3 alone would mean one spatial axis
        ndimage.maximum_filter(image, 3),
    ),
    "signal.convolve2d, mode='full'": (
        cupyconv.conv(x, k[:, :, ::-1, ::-1], padding="full")[0],
        signal.convolve2d(image, kernel),
    ),
    "signal.lfilter(taps, 1, leads)": (
        cupyconv.conv(s, t[:, :, ::-1], padding="causal")[:, 0],
        signal.lfilter(taps, 1, leads),
    ),
    "signal.upfirdn, down=4": (
        cupyconv.conv(s, t[:, :, ::-1], padding="full", stride=4)[:, 0],
        signal.upfirdn(taps, leads, down=4),
    ),
    "signal.upfirdn, up=4": (cupyconv.conv_transpose(s, t, stride=4)[:, 0], signal.upfirdn(taps, leads, up=4)),
}

worst = 0.0
for name, (ours, theirs) in filters.items():
    difference = abs(host(ours) - theirs).max()
    worst = max(worst, difference)
    print(f"{name:36} {theirs.shape!s:14} largest difference {difference:.1e}")
if not worst < 1e-10:
    sys.exit("some filter differs from SciPy's")
