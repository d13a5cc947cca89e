"""The NumPy backend: BLAS products over cache-sized blocks of columns."""

from cupyconv.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
