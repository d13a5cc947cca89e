"""The CUDA backend: plans run as kernel launches and cuBLAS calls on a `Device`."""

from cupyconv.cuda.run.backend import CudaBackend

__all__ = ["CudaBackend"]
