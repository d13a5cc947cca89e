"""Decisions: which method, which launches, how much workspace, and why.

Ints in, a printable `Plan` out; no array is touched here and none can be.  Plans are cached: the same
problem on the same layouts, settings and device is decided once.
"""

from __future__ import annotations

from functools import lru_cache

from cupyconv.machine import HostModel
from cupyconv.plan import Plan
from cupyconv.planning import columns, cuda, numpy
from cupyconv.planning.request import ColumnsRequest, ConvRequest

#: Plans kept; one holds a few kilobytes.
CACHED_PLANS = 1024


@lru_cache(maxsize=CACHED_PLANS)
def plan_conv(request: ConvRequest) -> Plan:
    """Decide how a convolution or merge runs on ``request.machine``."""
    return (numpy if isinstance(request.machine, HostModel) else cuda).plan_conv(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_im2col(request: ColumnsRequest) -> Plan:
    """Decide how columns are written."""
    return columns.plan_im2col(request)


@lru_cache(maxsize=CACHED_PLANS)
def plan_col2im(request: ColumnsRequest) -> Plan:
    """Decide how columns are summed back into an image."""
    return columns.plan_col2im(request)
