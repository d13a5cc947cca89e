"""Convolution, pooling and recurrent layers as functions of NumPy and CuPy arrays.

y = cupyconv.conv(x, weight)              # x is (N, C, *spatial): samples, channels, one to three spatial axes
y = cupyconv.conv([a, b, c], weight)      # like a concatenation along the channels, which is never built

layers      conv, linmerge, conv_chain with ConvLayer, conv_transpose, max_pool, avg_pool,
            im2col, col2im
recurrent   rnn, lstm, gru, and rnn_step, lstm_step, gru_step
gradients   vjp of the functions above: y, pullback = cupyconv.vjp(cupyconv.conv, x, weight);
            conv_grad_input, conv_grad_weight
from ONNX   onnx_padding, from_onnx_weights, fold_batchnorm
tools       explain (the plan of a call), options, show_config, clear_caches;
            cupyconv.interop.torch, .jax, .dask and .onnx
"""

from cupyconv.call.explain import explain
from cupyconv.call.options import options
from cupyconv.configuration import clear_caches, show_config
from cupyconv.ops.batchnorm import fold_batchnorm
from cupyconv.ops.columns import col2im, im2col
from cupyconv.ops.conv import conv, linmerge
from cupyconv.ops.conv_chain import ConvLayer, conv_chain
from cupyconv.ops.conv_grad_input import conv_grad_input
from cupyconv.ops.conv_grad_weight import conv_grad_weight
from cupyconv.ops.conv_pullback import ConvGradients
from cupyconv.ops.conv_transpose import conv_transpose
from cupyconv.ops.onnx import from_onnx_weights, onnx_padding
from cupyconv.ops.pooling import avg_pool, max_pool
from cupyconv.ops.recurrent import gru, lstm, rnn
from cupyconv.ops.recurrent_pullback import RecurrentGradients
from cupyconv.ops.recurrent_step import gru_step, lstm_step, rnn_step
from cupyconv.ops.vjp import vjp
from cupyconv.problem.plan import Plan
from cupyconv.version import __version__

__all__ = [
    "ConvGradients",
    "ConvLayer",
    "Plan",
    "RecurrentGradients",
    "__version__",
    "avg_pool",
    "clear_caches",
    "col2im",
    "conv",
    "conv_chain",
    "conv_grad_input",
    "conv_grad_weight",
    "conv_transpose",
    "explain",
    "fold_batchnorm",
    "from_onnx_weights",
    "gru",
    "gru_step",
    "im2col",
    "linmerge",
    "lstm",
    "lstm_step",
    "max_pool",
    "onnx_padding",
    "options",
    "rnn",
    "rnn_step",
    "show_config",
    "vjp",
]
