"""One file per operation: signature, docstring, and the checks that turn arguments into a problem.

`explain` lists the operations in the order of the imports below.
"""

from cupyconv.ops import conv, conv_chain, conv_transpose  # noqa: F401

from cupyconv.ops import conv_grad_input, conv_grad_weight  # noqa: F401  # isort: skip
from cupyconv.ops import columns, pooling, recurrent, recurrent_step  # noqa: F401  # isort: skip
