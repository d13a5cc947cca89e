"""A file an operation: signature, docstring, checks -> a problem.  In this order `explain` lists them."""

from cupyconv.ops import conv, conv_chain, conv_transpose  # noqa: F401

from cupyconv.ops import conv_grad_input, conv_grad_weight  # noqa: F401  # isort: skip
from cupyconv.ops import columns, pooling, recurrent, recurrent_step  # noqa: F401  # isort: skip
