"""Short name for `cupyconv.interop.dask`: ``cupyconv.dask.conv(x, weight)`` for Dask arrays."""

from cupyconv.interop.dask import conv, conv_transpose, linmerge, max_pool

__all__ = ["conv", "conv_transpose", "linmerge", "max_pool"]
