"""`cupyconv.interop.dask` by a shorter name: ``cupyconv.dask.conv(x, weight)`` of Dask arrays."""

from cupyconv.interop.dask import conv, conv_transpose, linmerge, max_pool

__all__ = ["conv", "conv_transpose", "linmerge", "max_pool"]
