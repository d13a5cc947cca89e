"""`fold_batchnorm`: fold a batch normalization into the convolution before it."""

from __future__ import annotations

import numpy as np

from cupyconv.call.dispatch import backend_for
from cupyconv.call.options import flag
from cupyconv.problem.activations import as_float
from cupyconv.problem.arrays import accumulator, check_dtype, dtype_from_name, dtype_name
from cupyconv.problem.padding import positive
from cupyconv.typing import Array


def fold_batchnorm(
    weight: Array,
    bias: Array | None,
    *,
    mean: Array,
    var: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    eps: float = 1e-5,
    groups: int = 1,
    transposed: bool = False,
) -> tuple[Array, Array]:
    """Return the weight and bias of a convolution that includes the batch normalization after it.

    ``gamma * (conv(x, weight, bias) - mean) / sqrt(var + eps) + beta == conv(x, *fold_batchnorm(...))``

    Parameters
    ----------
    weight : array
        ``(C_out, C_in // groups, *kernel)``, or ``(C_in, C_out // groups, *kernel)`` if `transposed`.
    bias : array or None
        ``(C_out,)``.
    mean, var, gamma, beta : array
        ``(C_out,)``: the running statistics, and the scale and shift (1 and 0 if None).
    eps : float
        Value added to the variance.
    groups : int
        Number of groups of a transposed convolution, whose output channels are spread over two axes of its weight.
    transposed : bool
        Whether the weight belongs to a transposed convolution.

    Returns
    -------
    weight, bias : arrays
        New arrays in the weight's dtype.  16-bit arrays are computed in float32.

    Raises
    ------
    TypeError, ValueError
        For foreign or mixed arrays, and for shapes that do not fit.  On NumPy also for a variance of ``-eps`` or below,
        because its inverse square root does not exist.  On CUDA such a variance gives infinities or NaN, because
        reading it would wait for the GPU.

    Notes
    -----
    A batch normalization *before* a convolution, with its activation, is the ``prologue`` of that convolution: its
    scale is ``gamma / sqrt(var + eps)``, and its shift is ``beta - mean * scale``.

    Source: Ioffe and Szegedy, *Batch Normalization* (2015); ONNX ``BatchNormalization`` at inference.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> one = np.ones(1)
    >>> weight, bias = cupyconv.fold_batchnorm(np.ones((1, 1, 1)), None, mean=3 * one, var=4 * one, eps=0)
    >>> weight.ravel(), bias
    (array([0.5]), array([-1.5]))
    """
    required = {"weight": weight, "mean": mean, "var": var}
    optional = {"bias": bias, "gamma": gamma, "beta": beta}
    arrays = {**required, **{name: vector for name, vector in optional.items() if vector is not None}}
    backend = backend_for(arrays)
    weight, mean, var = (backend.plain(array) for array in required.values())
    bias, gamma, beta = (None if vector is None else backend.plain(vector) for vector in optional.values())
    for name, array in arrays.items():
        check_dtype(name, array.dtype)
        if array.dtype.kind == "c" and weight.dtype.kind != "c":
            raise TypeError(f"{name} is {array.dtype}, weight is {weight.dtype}: casting would drop imaginary parts")
    epsilon = as_float("eps", eps)
    transposed = flag("transposed", transposed)
    groups = positive("groups", groups)
    if weight.ndim < 2:
        raise ValueError(f"weight must have at least two axes, given shape {tuple(weight.shape)}")
    if weight.shape[0] % groups:
        raise ValueError(f"groups {groups} does not divide the weight's first axis, {weight.shape[0]}")
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    for name, vector in arrays.items():
        if name != "weight" and tuple(vector.shape) != (outputs,):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}, needed ({outputs},)")

    dtype = dtype_from_name(accumulator(dtype_name(weight.dtype)))
    with np.errstate(all="ignore"):
        squared = var.astype(dtype) + dtype.type(epsilon)
    if backend.name == "numpy" and (squared.real <= 0).any():
        raise ValueError(f"var must be above -eps, {0 - epsilon:g}, given {var.real.min():g}")

    with np.errstate(all="ignore"):
        scale = squared**-0.5
        scale = scale if gamma is None else scale * gamma.astype(dtype)
        shift = -mean.astype(dtype) if bias is None else bias.astype(dtype) - mean.astype(dtype)
        shift = shift * scale if beta is None else shift * scale + beta.astype(dtype)

        kernel = weight.shape[2:]
        if transposed:
            blocks = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
            factors = scale.reshape(groups, 1, weight.shape[1], *(1,) * len(kernel))
        else:
            blocks, factors = weight, scale.reshape(outputs, *(1,) * (weight.ndim - 1))
        folded = (blocks.astype(dtype) * factors).reshape(weight.shape)
        return folded.astype(weight.dtype), shift.astype(weight.dtype)
