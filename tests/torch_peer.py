"""PyTorch's values and gradients of each function, from `torch.nn.functional` and autograd, as NumPy arrays.

They are an independent check of results; only tests that skip without PyTorch import this module.  Features that
PyTorch lacks are composed of others: padding is a gather by an index that np.pad makes, and a list is `torch.cat`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import reference
import reference_gradients
import torch
import torch.nn.functional as F

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda v, slope=0.01: F.leaky_relu(v, slope),
    "clip": F.hardtanh,
    "elu": lambda v, alpha=1.0: F.elu(v, alpha),
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": lambda v, alpha=0.2, beta=0.5: F.hardtanh(alpha * v + beta, 0, 1),
    "hardswish": F.hardswish,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
}


def conv_gradients(
    grad: np.ndarray,
    x: Any,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "constant",
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
    residual: np.ndarray | None = None,
) -> reference_gradients.Gradients:
    """Return the gradients of `conv`."""
    rank = weight.ndim - 2
    stride, dilation = reference.per_axis(stride, rank), reference.per_axis(dilation, rank)
    leaves = Leaves(x, weight, bias, residual)
    image = leaves.image(rank)
    pairs = reference.padding_pairs(padding, image.shape[2:], weight.shape[2:], stride, dilation)
    y = CONVOLUTIONS[rank](padded(image, pairs, padding_mode), leaves.weight, leaves.bias, stride, 0, dilation, groups)
    y = y if leaves.has_batch else y[0]
    y = activated(y if leaves.residual is None else y + leaves.residual, activation)
    y.backward(torch.from_numpy(grad))
    return leaves.gradients()


def conv_transpose(
    grad: np.ndarray,
    x: Any,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    output_shape: Any = None,
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
) -> tuple[np.ndarray, reference_gradients.Gradients]:
    """Return the result of `conv_transpose` and its gradients; padding that PyTorch lacks is cut from the whole."""
    rank = weight.ndim - 2
    leaves = Leaves(x, weight, bias, None)
    image = leaves.image(rank)
    strides, dilations = reference.per_axis(stride, rank), reference.per_axis(dilation, rank)
    by_torch = output_shape is None and not isinstance(padding, str)
    pairs = reference.padding_pairs(padding, [], [], [], []) if by_torch and not isinstance(padding, int) else []
    by_torch = by_torch and all(before == after for before, after in pairs)
    if by_torch:
        amounts = padding if isinstance(padding, int) else tuple(before for before, _ in pairs)
        settings = (strides, amounts, output_padding, groups, dilations)
        y = TRANSPOSED[rank](image, leaves.weight, leaves.bias, *settings)
    else:
        begins, sizes = reference_gradients.transposed_window(
            image.shape[2:], weight.shape[2:], strides, dilations, padding=padding, output_padding=output_padding,
            output_shape=output_shape,
        )  # fmt: skip
        whole = TRANSPOSED[rank](image, leaves.weight, None, strides, 0, 0, groups, dilations)
        missing = [max(0, begin + size - full) for begin, size, full in zip(begins, sizes, whole.shape[2:])]
        whole = F.pad(whole, [amount for end in reversed(missing) for amount in (0, end)])
        y = whole[(..., *(slice(begin, begin + size) for begin, size in zip(begins, sizes)))]
        y = y if leaves.bias is None else y + leaves.bias.reshape(-1, *(1,) * rank)
    y = activated(y if leaves.has_batch else y[0], activation)
    y.backward(torch.from_numpy(grad))
    return y.detach().numpy(), leaves.gradients()


def max_pool(
    grad: Any, x: Any, kernel_shape: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1
) -> tuple[Any, Any]:
    """Return the result of `max_pool` and its gradient; -inf is padded first, as PyTorch pads at most half a window."""
    rank = len(kernel_shape)
    strides = reference.per_axis(kernel_shape if stride is None else stride, rank)
    results = []
    for one_grad, one in zip(reference.sequence(grad), reference.sequence(x)):
        leaves = Leaves(one, np.zeros((0,) * (rank + 2)), None, None)
        image = leaves.image(rank)
        dilations = reference.per_axis(dilation, rank)
        pairs = reference.padding_pairs(padding, image.shape[2:], kernel_shape, strides, dilations)
        flat = [amount for pair in reversed(pairs) for amount in pair]
        y = pooled(F.pad(image, flat, value=-math.inf), kernel_shape, strides, dilations)
        y = y if leaves.has_batch else y[0]
        y.backward(torch.from_numpy(one_grad))
        results.append((y.detach().numpy(), leaves.gradients().x))
    ys, backs = map(list, zip(*results))
    return (ys, backs) if isinstance(x, (list, tuple)) else (ys[0], backs[0])


def pooled(image: torch.Tensor, kernel: Any, stride: Any, dilation: Any) -> torch.Tensor:
    """`max_pool`, also for no samples and no channels, some of which PyTorch refuses."""
    rank = len(kernel)
    if 0 in image.shape[:2]:
        sizes = [len(range(0, n - d * (k - 1), s)) for n, k, s, d in zip(image.shape[2:], kernel, stride, dilation)]
        return image.sum() + image.new_zeros((*image.shape[:2], *sizes))
    return POOLS[rank](image, kernel, stride, 0, dilation)


class Leaves:
    """The arguments as tensors that collect gradients; `gradients` has these in the form of the arguments."""

    def __init__(self, x: Any, weight: np.ndarray, bias: np.ndarray | None, residual: np.ndarray | None) -> None:
        self.is_sequence = isinstance(x, (list, tuple))
        self.xs = [self._leaf(array) for array in reference.sequence(x)]
        self.weight, self.bias, self.residual = map(self._leaf, (weight, bias, residual))
        self.has_batch = self.xs[0].ndim == weight.ndim

    def image(self, rank: int) -> torch.Tensor:
        """Return the inputs as one (N, C, *spatial) tensor."""
        whole = torch.cat(self.xs, dim=-rank - 1)
        return whole if self.has_batch else whole[None]

    def gradients(self) -> reference_gradients.Gradients:
        def collected(leaf: torch.Tensor | None) -> Any:
            if leaf is None:
                return None
            return np.zeros(leaf.shape, leaf.detach().numpy().dtype) if leaf.grad is None else leaf.grad.numpy()

        xs = [collected(leaf) for leaf in self.xs]
        others = map(collected, (self.weight, self.bias, self.residual))
        return reference_gradients.Gradients(xs if self.is_sequence else xs[0], *others)

    @staticmethod
    def _leaf(array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(array.copy()).requires_grad_()


def padded(image: torch.Tensor, pairs: reference.Pairs, mode: str) -> torch.Tensor:
    if mode == "constant":
        return F.pad(image, [amount for pair in reversed(pairs) for amount in pair])
    for axis, pair in enumerate(pairs):
        source = np.pad(np.arange(image.shape[2 + axis]), pair, mode=mode)
        image = image.index_select(2 + axis, torch.from_numpy(source))
    return image


def activated(v: torch.Tensor, spec: Any) -> torch.Tensor:
    if spec is None:
        return v
    name, *parameters = (spec,) if isinstance(spec, str) else spec
    return ACTIVATIONS[name](v, *parameters)
