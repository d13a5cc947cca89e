"""Decisions: which method, which launches, how much workspace, and why.

Ints in, a printable `Plan` out; no array is touched here and none can be.  Plans are cached: the same
problem on the same layouts, settings and device is decided once.  A planner is imported when it is first
asked for: who has no GPU loads nothing of its planning.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cupyconv.activations import IDENTITY
from cupyconv.machine import HostModel
from cupyconv.plan import Plan
from cupyconv.planning.request import (
    ChainRequest,
    ColumnsRequest,
    ConvRequest,
    EpilogueGradRequest,
    PoolingRequest,
    PrologueGradRequest,
    RecurrentGradientRequest,
    RecurrentRequest,
    TransposedRequest,
    WeightGradientRequest,
)

#: Plans kept; one holds a few kilobytes.
CACHED_PLANS = 1024


@lru_cache(maxsize=CACHED_PLANS)
def plan_conv(request: ConvRequest) -> Plan:
    """Decide how a convolution or merge runs on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import numpy as planner
    else:
        from cupyconv.planning import cuda as planner  # type: ignore[no-redef]
    return planner.plan_conv(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_chain(request: ChainRequest) -> Plan:
    """Decide which layers of a chain share a kernel or a loop on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import chain_numpy as planner
    else:
        from cupyconv.planning import chain as planner  # type: ignore[no-redef]
    return planner.plan_chain(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_weight_gradient(request: WeightGradientRequest) -> Plan:
    """Decide how the gradient of a weight is computed on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import weight_gradient_numpy as planner
    else:
        from cupyconv.planning import weight_gradient_cuda as planner  # type: ignore[no-redef]
    return planner.plan_weight_gradient(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_transposed(request: TransposedRequest) -> Plan:
    """Decide how a transposed convolution or an input gradient runs on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import transposed_numpy

        return transposed_numpy.plan_transposed(request)
    from cupyconv.planning import transposed_cuda
    from cupyconv.planning.pre_activation import with_activation

    if request.pre is None:
        return transposed_cuda.plan_transposed(request)
    plan = transposed_cuda.plan_transposed(replace(request, outs=(request.pre,), pre=None, activation=IDENTITY))
    return with_activation(plan, request.pre, request.outs[0], request.activation)


@lru_cache(maxsize=CACHED_PLANS)
def plan_im2col(request: ColumnsRequest) -> Plan:
    """Decide how columns are written."""
    from cupyconv.planning import columns

    return columns.plan_im2col(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_col2im(request: ColumnsRequest) -> Plan:
    """Decide how columns are summed back into an image."""
    from cupyconv.planning import columns

    return columns.plan_col2im(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_epilogue_grad(request: EpilogueGradRequest) -> Plan:
    """Decide how a gradient goes back through an epilogue."""
    from cupyconv.planning import epilogue_grad

    return epilogue_grad.plan_epilogue_grad(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_prologue_grad(request: PrologueGradRequest) -> Plan:
    """Decide how a gradient goes back through a prologue."""
    from cupyconv.planning import prologue_grad

    return prologue_grad.plan_prologue_grad(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_max_pool(request: PoolingRequest) -> Plan:
    """Decide how images are pooled."""
    from cupyconv.planning import pooling

    return pooling.plan_max_pool(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_max_pool_gradient(request: PoolingRequest) -> Plan:
    """Decide how gradients are handed to the elements that were the largest."""
    from cupyconv.planning import pooling

    return pooling.plan_max_pool_gradient(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_recurrent(request: RecurrentRequest) -> Plan:
    """Decide how a recurrent layer runs on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import recurrent_numpy as planner
    else:
        from cupyconv.planning import recurrent_cuda as planner  # type: ignore[no-redef]
    return planner.plan_recurrent(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_recurrent_gradient(request: RecurrentGradientRequest) -> Plan:
    """Decide how the gradients of a recurrent layer are computed on ``request.machine``."""
    if isinstance(request.machine, HostModel):
        from cupyconv.planning import recurrent_gradient_numpy as planner
    else:
        from cupyconv.planning import recurrent_gradient_cuda as planner  # type: ignore[no-redef]
    return planner.plan_recurrent_gradient(request)
