"""`conv`, `linmerge`, `rnn`, `lstm` and `gru` as PyTorch operations that autograd differentiates.

Tensors are not copied: a CPU tensor is used as a NumPy array, a CUDA tensor as a CuPy array, on PyTorch's current
stream.  These are functions, as in `torch.nn.functional`: a module holds the weights and calls them.  For anything not
included (transposed convolutions, pooling, second derivatives, `torch.func`) use PyTorch's own functions.  To see what
a call would run, pass the function and arrays to `cupyconv.explain`: ``explain(cupyconv.conv, x.numpy(), ...)``.

A training step, complete::

    import torch
    from cupyconv.interop.torch import conv

    skip, deep = torch.randn(8, 16, 32, 32), torch.randn(8, 32, 32, 32)
    target = torch.randn(8, 16, 32, 32)
    weight = torch.randn(16, 48, 3, 3).mul_(0.05).requires_grad_()
    bias = torch.zeros(16, requires_grad=True)
    loss = (conv([skip, deep], weight, bias, padding=1, activation="relu") - target).square().mean()
    loss.backward()  # no concatenation, forward or backward
    print(loss.item(), weight.grad.shape, bias.grad.shape)
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

import cupyconv
from cupyconv.problem.arrays import dtype_from_name


def conv(
    x: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "constant",
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
    residual: torch.Tensor | None = None,
    method: str = "auto",
) -> torch.Tensor:
    """`cupyconv.conv` of tensors, differentiable once with respect to x, weight, bias and residual.

    Parameters
    ----------
    x, weight, bias, stride, padding, padding_mode, dilation, groups, activation, residual, method
        See `cupyconv.conv`, with tensors in place of arrays.

    Returns
    -------
    tensor
        On the tensors' device, in their promoted dtype.

    Raises
    ------
    TypeError, ValueError
        See `cupyconv.conv`.  TypeError also for arguments that are not tensors, and for tensors on several devices.
    ImportError
        For CUDA tensors if CuPy is not installed.

    Notes
    -----
    Settings are keywords with cupyconv's names: PyTorch's ``padding_mode="zeros"``, ``"replicate"`` and ``"circular"``
    are ``"constant"``, ``"edge"`` and ``"wrap"`` here.  Gradients follow PyTorch's convention: for complex tensors they
    use the Hermitian adjoint.

    Autograd saves the arrays that a pullback of `cupyconv.vjp` holds: x, weight, and with an activation the result or
    the values before it.  If one of these tensors was changed in place, the backward pass raises PyTorch's error; all
    other tensors may be changed.  With ``create_graph=True`` it raises a RuntimeError.  Nothing is saved if autograd is
    off, as under `torch.no_grad` and `torch.inference_mode`.  `torch.compile` leaves the call out of its graphs.  Hooks
    on saved tensors have no effect: `torch.autograd.graph.save_on_cpu` saves no memory here, whereas
    `torch.utils.checkpoint` does with ``use_reentrant=True``.

    On CUDA, results and gradients use memory of CuPy's pool.  PyTorch's memory statistics, limits and `empty_cache` do
    not include it; ``cupy.get_default_memory_pool().free_all_blocks()`` releases its free blocks.  Neither pool can use
    memory that the other has freed.  The section "Interoperability" of CuPy's user guide shows how to use one pool for
    both, ``pytorch_pfn_extras.cuda.use_torch_mempool_in_cupy()``.

    Examples
    --------
    >>> import torch
    >>> from cupyconv.interop.torch import conv
    >>> weight = torch.ones(4, 6, 3, requires_grad=True)
    >>> conv([torch.ones(2, 2, 10), torch.ones(2, 4, 10)], weight, padding=1).sum().backward()
    >>> weight.grad[0, 0]
    tensor([18., 20., 18.])
    """
    return _differentiable(cupyconv.conv, "x", locals())


def linmerge(
    xs: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Any = None,
    residual: torch.Tensor | None = None,
    method: str = "auto",
) -> torch.Tensor:
    """`cupyconv.linmerge` of tensors, differentiable once with respect to xs, weight, bias and residual.

    Parameters
    ----------
    xs, weight, bias, activation, residual, method
        See `cupyconv.linmerge`, with tensors in place of arrays.

    Returns
    -------
    tensor
        See `conv`.

    Raises
    ------
    TypeError, ValueError, ImportError
        See `conv`.

    Examples
    --------
    >>> import torch
    >>> from cupyconv.interop.torch import linmerge
    >>> a, b = torch.ones(1, 2, 5, requires_grad=True), torch.ones(1, 1, 5)
    >>> linmerge([a, b], torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    >>> a.grad[0, :, 0]
    tensor([1., 2.])
    """
    return _differentiable(cupyconv.linmerge, "xs", locals())


def rnn(
    x: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    *,
    h0: torch.Tensor | None = None,
    lengths: Any = None,
    direction: str = "forward",
    activation: Any = "tanh",
    clip: float | None = None,
    method: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cupyconv.rnn` of tensors, differentiable once with respect to all of them; see `lstm`.

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, lengths, direction, activation, clip, method
        See `cupyconv.rnn`, with tensors in place of arrays.

    Returns
    -------
    y, h : tensor
        See `cupyconv.rnn`.

    Raises
    ------
    TypeError, ValueError, ImportError
        See `lstm`.

    Examples
    --------
    >>> import torch
    >>> from cupyconv.interop.torch import rnn
    >>> weight_hh = torch.tensor([[2.0]], requires_grad=True)
    >>> _, h = rnn(torch.zeros(3, 1, 1), torch.ones(1, 1), weight_hh, h0=torch.ones(1, 1, 1), activation=None)
    >>> h.sum().backward()
    >>> weight_hh.grad
    tensor([[12.]])
    """
    y, h = _recurrent(cupyconv.rnn, locals())
    return y, h


def lstm(
    x: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    *,
    h0: torch.Tensor | None = None,
    c0: torch.Tensor | None = None,
    peephole: torch.Tensor | None = None,
    lengths: Any = None,
    direction: str = "forward",
    activations: Any = ("sigmoid", "tanh", "tanh"),
    input_forget: bool = False,
    clip: float | None = None,
    method: str = "auto",
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """`cupyconv.lstm` of tensors, differentiable once with respect to all of them.

    A training step with arguments that `torch.nn.LSTM` does not have, complete::

        import torch
        from cupyconv.interop.torch import lstm

        x, target = torch.randn(20, 8, 5), torch.randn(1, 8, 16).tanh()
        weights = [torch.randn(64, 5), torch.randn(64, 16), torch.zeros(64)]
        weights = [weight.mul(0.2).requires_grad_() for weight in weights]
        peephole = torch.zeros(48, requires_grad=True)
        y, (h, c) = lstm(x, *weights, peephole=peephole, lengths=[20, 20, 17, 12, 9, 9, 4, 1], clip=3.0)
        loss = (h - target).square().mean()
        loss.backward()  # no packing: each sample ends at its own length
        print(loss.item(), peephole.grad.shape)

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, peephole, lengths, direction, activations, input_forget, clip, method
        See `cupyconv.lstm`, with tensors in place of arrays.  Shapes and the order of gates are those of
        `torch.nn.LSTM`'s parameters.

    Returns
    -------
    y, (h, c) : tensors
        On the tensors' device, in their promoted dtype.

    Raises
    ------
    TypeError, ValueError
        See `cupyconv.lstm`.  TypeError also for arguments that are not tensors, and for tensors on several devices.
    ImportError
        For CUDA tensors if CuPy is not installed.

    Notes
    -----
    The arguments of this function are the ``module.parameters()`` of a `torch.nn.LSTM` with one layer and one
    direction, as in the example.  For two directions, stack each parameter with its reverse,
    ``torch.stack([module.weight_ih_l0, module.weight_ih_l0_reverse])``.  Call the function once per layer.  For modules
    with ``batch_first``, pass ``x.transpose(0, 1)``.

    Autograd saves the arrays that a pullback of `cupyconv.vjp` holds.  If y, or an argument other than a bias, was
    changed in place before the backward pass, the backward pass raises PyTorch's error; h and c may be changed.  The
    other notes of `conv` apply too.

    Examples
    --------
    >>> import torch
    >>> from cupyconv.interop.torch import lstm
    >>> module = torch.nn.LSTM(3, 4)
    >>> x = torch.ones(5, 2, 3)
    >>> y, (h, c) = lstm(x, *module.parameters())
    >>> torch.allclose(y, module(x)[0], atol=1e-6)
    True
    >>> c.sum().backward()
    >>> module.weight_ih_l0.grad.shape
    torch.Size([16, 3])
    """
    y, h, c = _recurrent(cupyconv.lstm, locals())
    return y, (h, c)


def gru(
    x: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    *,
    h0: torch.Tensor | None = None,
    lengths: Any = None,
    direction: str = "forward",
    activations: Any = ("sigmoid", "tanh"),
    linear_before_reset: bool = True,
    clip: float | None = None,
    method: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cupyconv.gru` of tensors, differentiable once with respect to all of them; see `lstm`.

    Parameters
    ----------
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0, lengths, direction, activations, linear_before_reset, clip, method
        See `cupyconv.gru`, with tensors in place of arrays.

    Returns
    -------
    y, h : tensor
        See `cupyconv.gru`.

    Raises
    ------
    TypeError, ValueError, ImportError
        See `lstm`.

    Examples
    --------
    >>> import torch
    >>> from cupyconv.interop.torch import gru
    >>> module = torch.nn.GRU(3, 4)
    >>> x = torch.ones(5, 2, 3, requires_grad=True)
    >>> y, h = gru(x, *module.parameters(), lengths=[5, 2])
    >>> y.sum().backward()
    >>> x.grad[2:, 1].any()
    tensor(False)
    """
    y, h = _recurrent(cupyconv.gru, locals())
    return y, h


class _Call(NamedTuple):
    """A call.  Its tensors are images, which only `conv` and `linmerge` have, followed by the tensors of `names`."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    settings: dict[str, Any]
    images: str = ""  # the function's name for x
    listed: bool = False  # whether the images came as a sequence

    def arguments(self, arrays: Sequence[Any]) -> dict[str, Any]:
        count = len(arrays) - len(self.names)
        images = {self.images: arrays[:count] if self.listed else arrays[0]} if self.images else {}
        named = dict(zip(self.names, arrays[count:]))  # including lengths if they are a tensor
        return {**self.settings, **images, **named}

    def gradients(self, pullback: Callable[..., Any], grads: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """Return one gradient per tensor: None for lengths, and possibly None for tensors that are not in `wanted`."""
        if not self.images:
            found = pullback(*grads)
            return [getattr(found, name, None) for name in self.names]
        count = len(wanted) - len(self.names)
        needs = {"x"} if any(wanted[:count]) else set()
        needs |= {name for name, want in zip(self.names, wanted[count:]) if want}
        found = pullback(*grads, needs=tuple(sorted(needs)))
        x = found.x if self.listed else [found.x]
        return [*(x or [None] * count), *(getattr(found, name) for name in self.names)]


@torch.compiler.disable  # else the compiler traces the NumPy backend step by step into its own operations
def _differentiable(function: Callable[..., Any], images: str, arguments: dict[str, Any]) -> torch.Tensor:
    """Return the result of `conv` or `linmerge`.  `arguments` maps names to values."""
    x = arguments[images]
    listed = isinstance(x, (list, tuple))
    named = {f"{images}[{i}]": tensor for i, tensor in enumerate(x)} if listed else {images: x}
    tensors = _on_one_device({**named, **{name: arguments[name] for name in _OTHERS}})
    settings = {name: value for name, value in arguments.items() if name not in (images, *_OTHERS)}
    call = _Call(function, tuple(tensors)[len(named) :], settings, images, listed)
    (y,) = _Function.apply(call, torch.is_grad_enabled(), *tensors.values())
    return y


@torch.compiler.disable  # see `_differentiable`
def _recurrent(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the results of a recurrent layer as a flat tuple."""
    tensors = _on_one_device(
        {name: arguments[name] for name in cupyconv.RecurrentGradients._fields if name in arguments},
        required=("x", "weight_ih", "weight_hh"),
    )
    settings = {name: value for name, value in arguments.items() if name not in cupyconv.RecurrentGradients._fields}
    if isinstance(settings["lengths"], torch.Tensor):
        tensors["lengths"] = settings["lengths"]  # on any device; autograd checks these for in-place changes too
    call = _Call(function, tuple(tensors), settings)
    return _Function.apply(call, torch.is_grad_enabled(), *tensors.values())


#: Tensor arguments of `conv` and `linmerge` in addition to the images.
_OTHERS = ("weight", "bias", "residual")


def _on_one_device(tensors: dict[str, Any], required: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Return the arguments that are not None; refuse anything but tensors on one device."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None or name in required}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, given {type(tensor).__name__}: use torch.as_tensor")
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise TypeError(
            f"all tensors must be on one device: {', '.join(f'{name} on {d}' for name, d in devices.items())}"
        )
    return tensors


class _Function(torch.autograd.Function):
    """The autograd function of a call, from tensors to tensors.

    `recorded` says whether autograd is on outside: inside `forward` it is off, whatever `ctx.needs_input_grad` says.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, recorded: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _stream_of(tensors[0]):
            arrays = [_array(tensor) for tensor in tensors]
            arguments = call.arguments(arrays)
            if not (recorded and any(ctx.needs_input_grad)):
                return tuple(_tensor(result) for result in _side_by_side(call.function(**arguments)))
            returned, ctx.pullback = cupyconv.vjp(call.function, **arguments)
            results = _side_by_side(returned)
            found = tuple(_tensor(result) for result in results)
        # The pullback holds the arrays.  Saving their tensors lets autograd detect changes in place.
        held = {id(array) for array in ctx.pullback.holds}
        memory = zip((*tensors, *found), (*arrays, *results))
        saved = [tensor for tensor, array in memory if id(array) in held]
        ctx.save_for_backward(*saved)
        # A detached tensor shares the version counter.  PyTorch refuses to read that of inference tensors, which have
        # none.
        ctx.versions = [(tensor.detach(), tensor._version) for tensor in saved if not tensor.is_inference()]
        ctx.call = call
        ctx.context = contextvars.copy_context()  # the options in force; the backward pass runs in another thread
        ctx.set_materialize_grads(len(found) == 1)  # an unused one of several gets None, not zeros
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # PyTorch's once_differentiable checks `grads` alone: the gradient of a sum needs none, though x and weight do.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cupyconv's functions have no second derivatives: with create_graph=True their gradients would be treated"
                " as constants; use PyTorch's own functions"
            )
        saved = ctx.saved_tensors  # raises if one was changed in place, but not if a hook packed it
        if any(tensor._version != version for tensor, version in ctx.versions):
            raise RuntimeError(
                "a tensor needed by cupyconv's backward pass has been modified by an inplace operation; saved-tensor hooks,"
                " such as those of torch.utils.checkpoint, do not change what it reads"
            )
        wanted = ctx.needs_input_grad[2:]
        with _stream_of(saved[0]):
            arrays = [None if grad is None else _array(grad) for grad in grads]
            gradients = ctx.context.copy().run(ctx.call.gradients, ctx.pullback, arrays, wanted)
            found = [_tensor(gradient) if want else None for gradient, want in zip(gradients, wanted)]
        return (None, None, *found)


def _side_by_side(results: Any) -> tuple[Any, ...]:
    """Return the arrays of ``y``, ``(y, h)`` or ``(y, (h, c))`` as a flat tuple."""
    if not isinstance(results, tuple):
        return (results,)
    y, states = results
    return (y, *(states if isinstance(states, tuple) else (states,)))


@contextmanager
def _stream_of(tensor: torch.Tensor) -> Iterator[None]:
    """Make the tensor's device and PyTorch's current stream there current in CuPy.  Does nothing on the CPU."""
    if tensor.device.type != "cuda":
        yield
        return
    import cupy

    stream = _Stream(torch.cuda.current_stream(tensor.device).cuda_stream)
    with cupy.cuda.Device(tensor.device.index), cupy.cuda.Stream.from_external(stream):
        yield


class _Stream(NamedTuple):
    """The protocol by which CuPy accepts foreign streams; not every PyTorch version implements it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _array(tensor: torch.Tensor) -> Any:
    """Return an array that shares the tensor's memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bfloat16 = tensor.dtype == torch.bfloat16
    if bfloat16:  # NumPy and DLPack consumers only support its bits
        tensor = tensor.view(torch.int16)
    if tensor.device.type == "cpu":
        array: Any = tensor.numpy()
    elif tensor.device.type == "cuda":
        import cupy

        array = cupy.from_dlpack(tensor)
    else:
        raise TypeError(f"a tensor is on {tensor.device}, needed the CPU or a CUDA device")
    return array.view(dtype_from_name("bfloat16")) if bfloat16 else array


def _tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    bfloat16 = array.dtype.name == "bfloat16"
    if bfloat16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor
