"""Convolution, pooling and recurrent layers as functions of NumPy and CuPy arrays.

y = cupyconv.conv(x, weight)              # x is (N, C, *spatial): samples, channels, one to three spatial axes
y = cupyconv.conv([a, b, c], weight)      # as if concatenated along the channels; the concatenation is never built

layers      conv, linmerge, conv_chain with ConvLayer, conv_transpose, max_pool, im2col, col2im
recurrent   rnn, lstm, gru, and rnn_step, lstm_step, gru_step
gradients   conv_vjp, linmerge_vjp, conv_transpose_vjp, max_pool_vjp, rnn_vjp, lstm_vjp, gru_vjp,
            conv_grad_input, conv_grad_weight
from ONNX   onnx_padding, from_onnx_weights, fold_batchnorm
around it   explain (what a call would run), options, show_config; cupyconv.interop.torch and .jax
"""

from cupyconv.batchnorm import fold_batchnorm
from cupyconv.chain import ConvLayer, conv_chain
from cupyconv.columns import col2im, im2col
from cupyconv.configuration import show_config
from cupyconv.convolution import conv, linmerge
from cupyconv.explanation import explain
from cupyconv.input_gradient import conv_grad_input
from cupyconv.onnx_weights import from_onnx_weights
from cupyconv.padding import onnx_padding
from cupyconv.plan import Plan
from cupyconv.pooling import max_pool
from cupyconv.pullbacks import ConvGradients, conv_transpose_vjp, conv_vjp, linmerge_vjp, max_pool_vjp
from cupyconv.recurrent import gru, gru_step, lstm, lstm_step, rnn, rnn_step
from cupyconv.recurrent_pullbacks import RecurrentGradients, gru_vjp, lstm_vjp, rnn_vjp
from cupyconv.settings import options
from cupyconv.transposed import conv_transpose
from cupyconv.version import __version__
from cupyconv.weight_gradient import conv_grad_weight

__all__ = [
    "ConvGradients",
    "ConvLayer",
    "Plan",
    "RecurrentGradients",
    "__version__",
    "col2im",
    "conv",
    "conv_chain",
    "conv_grad_input",
    "conv_grad_weight",
    "conv_transpose",
    "conv_transpose_vjp",
    "conv_vjp",
    "explain",
    "fold_batchnorm",
    "from_onnx_weights",
    "gru",
    "gru_step",
    "gru_vjp",
    "im2col",
    "linmerge",
    "linmerge_vjp",
    "lstm",
    "lstm_step",
    "lstm_vjp",
    "max_pool",
    "max_pool_vjp",
    "onnx_padding",
    "options",
    "rnn",
    "rnn_step",
    "rnn_vjp",
    "show_config",
]
