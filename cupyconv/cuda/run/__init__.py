"""Execution of CUDA plans: kernel launches, cuBLAS and cuFFT calls on a `Device`."""

from cupyconv.cuda.run.backend import CudaBackend

__all__ = ["CudaBackend"]
