"""Decisions: which method, which launches, how much workspace, and why.

Ints in, a printable `Plan` out; no array is touched here and none can be.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from cupyconv.machine import HostModel
from cupyconv.plan import Plan
from cupyconv.planning import request as requests

#: Plans kept; one holds a few kilobytes.
CACHED_PLANS = 1024

#: Problem -> the function that plans it, and its module: for the host, for a GPU.
PLANNERS: dict[type[requests.Request], tuple[str, str, str]] = {
    requests.ConvRequest: ("plan_conv", "cupyconv.planning.numpy", "cupyconv.planning.cuda"),
    requests.ChainRequest: ("plan_chain", "cupyconv.planning.chain_numpy", "cupyconv.planning.chain_cuda"),
    requests.TransposedRequest: (
        "plan_transposed", "cupyconv.planning.transposed_numpy", "cupyconv.planning.transposed_cuda"
    ),
    requests.WeightGradientRequest: (
        "plan_weight_gradient", "cupyconv.planning.weight_gradient_numpy", "cupyconv.planning.weight_gradient_cuda"
    ),
    requests.RecurrentRequest: ("plan_recurrent", "cupyconv.planning.recurrent_numpy", "cupyconv.planning.recurrent_cuda"),
    requests.RecurrentGradientRequest: (
        "plan_recurrent_gradient", "cupyconv.planning.recurrent_gradient_numpy", "cupyconv.planning.recurrent_gradient_cuda"
    ),
    requests.Im2colRequest: ("plan_im2col", *("cupyconv.planning.columns",) * 2),
    requests.Col2imRequest: ("plan_col2im", *("cupyconv.planning.columns",) * 2),
    requests.EpilogueGradRequest: ("plan_epilogue_grad", *("cupyconv.planning.epilogue_grad",) * 2),
    requests.PrologueGradRequest: ("plan_prologue_grad", *("cupyconv.planning.prologue_grad",) * 2),
    requests.PoolingRequest: ("plan_max_pool", *("cupyconv.planning.pooling",) * 2),
    requests.PoolingGradientRequest: ("plan_max_pool_gradient", *("cupyconv.planning.pooling",) * 2),
}  # fmt: skip


@lru_cache(maxsize=CACHED_PLANS)
def plan(request: requests.Request) -> Plan:
    """How a problem runs on ``request.machine``; the same one is decided once."""
    function, on_host, on_gpu = PLANNERS[type(request)]
    # Imported when first asked for: who has no GPU loads nothing of its planning.
    module = import_module(on_host if isinstance(request.machine, HostModel) else on_gpu)
    return getattr(module, function)(request)
