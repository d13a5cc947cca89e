"""Convolution as array functions, on NumPy and CuPy, merging inputs without concatenating them.

y = cupyconv.conv(x, weight)              # one array
y = cupyconv.conv([a, b, c], weight)      # their concatenation along channels, never built
"""

from cupyconv.batchnorm import fold_batchnorm
from cupyconv.columns import col2im, im2col
from cupyconv.configuration import show_config
from cupyconv.convolution import conv, linmerge
from cupyconv.explanation import explain
from cupyconv.padding import onnx_padding
from cupyconv.plan import Plan
from cupyconv.settings import options
from cupyconv.version import __version__

__all__ = [
    "Plan",
    "__version__",
    "col2im",
    "conv",
    "explain",
    "fold_batchnorm",
    "im2col",
    "linmerge",
    "onnx_padding",
    "options",
    "show_config",
]
