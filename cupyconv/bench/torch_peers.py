"""PyTorch as a peer, on the library's own arrays, shared through DLPack.

`Torch` is created if torch is installed.  Its calls run on the stream that the clock times.  CuPy's and torch's current
streams must be the same, which `Torch` checks.  They are, unless one was changed: both default to CUDA's default
stream.  ``cudnn.benchmark`` lets cuDNN try its algorithms on each shape.  That happens while results are checked,
before anything is timed.  Data are in the requested memory format before the clock starts.  A merge's ``torch.cat`` is
timed, as is the library's reading of several inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.peers import Participant, Way
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase
from cupyconv.demo.libraries import Call
from cupyconv.problem.arrays import dtype_from_name, dtype_name

Pairs = tuple[tuple[int, int], ...]

#: Seconds that must be left for torch.compile, which may take 20 seconds.
FOR_COMPILING = 60.0
#: Number of spatial axes -> the name of torch's channels-last format.
_CHANNELS_LAST = {2: "channels_last", 3: "channels_last_3d"}


class Torch(Participant):
    """torch's implementations of a case, on arrays of `xp`, with `threads` CPU threads."""

    def __init__(self, torch: ModuleType, xp: ModuleType, threads: int | None = None) -> None:
        self._torch, self._xp = torch, xp
        if threads is not None:
            torch.set_num_threads(threads)

    def properties(self) -> dict[str, Any]:
        cudnn = self._torch.backends.cudnn.version() if self._torch.backends.cudnn.is_available() else None
        return {"torch": self._torch.__version__, "cudnn": cudnn, "cuda_of_torch": self._torch.version.cuda}

    @contextmanager
    def during(self, case: AnyCase) -> Iterator[None]:
        """Return a context for inference with the flags of the case."""
        with self._torch.inference_mode(), self.flags(case):
            yield

    def notes(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> dict[str, Any]:
        with self.flags(case) as flags:
            return {"flags": flags}

    @contextmanager
    def flags(self, case: AnyCase) -> Iterator[dict[str, bool]]:
        """Set and yield the precision flags of a case; restore them afterwards."""
        cudnn, matmul = self._torch.backends.cudnn, self._torch.backends.cuda.matmul
        wanted = {
            (cudnn, "benchmark"): True,
            (cudnn, "deterministic"): False,
            (cudnn, "allow_tf32"): case.tf32,
            (matmul, "allow_tf32"): case.tf32,
            (matmul, "allow_fp16_reduced_precision_reduction"): False,
            (matmul, "allow_bf16_reduced_precision_reduction"): False,
        }
        before = {key: getattr(*key) for key in wanted}
        try:
            for (owner, name), value in wanted.items():
                setattr(owner, name, value)
            yield {("cudnn." if owner is cudnn else "matmul.") + name: getattr(owner, name) for owner, name in wanted}
        finally:
            for (owner, name), value in before.items():
                setattr(owner, name, value)

    def check_stream(self, stream: int | None) -> None:
        """Raise RuntimeError if torch works on a stream other than the timed one."""
        if stream is not None and (own := self._torch.cuda.current_stream().cuda_stream) != stream:
            raise RuntimeError(f"torch's current stream is {own:#x}, but the timed stream is {stream:#x}")

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """Return both memory formats if there are two, and torch.compile if the case requests it."""
        torch = self._torch
        way = partial(Way, as_array=self.array, transform=True, allocates=True)
        if isinstance(case, RecurrentCase):
            return [way("torch", partial(self._step if case.single else self._recurrent_layer, case, xs, weights))]

        def eager(memory_format: Any) -> Call:
            if isinstance(case, GradientCase):
                return self._gradient(case, xs, weights, memory_format)
            return partial(self._convolve, case, *self._tensors(xs, weights, memory_format))

        def compiled_call() -> Call:
            tensors = self._tensors(xs, weights, torch.contiguous_format)
            torch.compiler.reset()  # torch stops compiling a function after eight of its shapes
            function = torch.compile(
                lambda inputs, kernels: self._convolve(case, inputs, kernels), fullgraph=True, dynamic=False
            )
            return partial(function, *tensors)

        ways = [way("torch", partial(eager, torch.contiguous_format))]
        if len(case.size) in _CHANNELS_LAST:
            memory_format = getattr(torch, _CHANNELS_LAST[len(case.size)])
            ways.append(way("torch channels-last", partial(eager, memory_format)))
        if case.compiled:
            ways.append(way("torch.compile", compiled_call, patience=FOR_COMPILING))
        return ways

    def product(self, square: Case, x: Any, weight: Any) -> Call:
        return partial(self._torch.matmul, self.tensor(weight[:, :, 0]), self.tensor(x[0]))

    def tensor(self, array: Any) -> Any:
        """Return a tensor with the array's memory.  bfloat16, unknown to NumPy's DLPack, passes as integers."""
        if dtype_name(array.dtype) == "bfloat16":
            return self._torch.from_dlpack(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_dlpack(array)

    def array(self, tensor: Any) -> Any:
        """Return an array with the tensor's memory."""
        if tensor.dtype is self._torch.bfloat16:
            return self._xp.from_dlpack(tensor.view(self._torch.int16)).view(dtype_from_name("bfloat16"))
        return self._xp.from_dlpack(tensor)

    def release(self) -> None:
        if self._torch.cuda.is_available():
            self._torch.cuda.empty_cache()

    def _tensors(self, xs: list[Any], weights: list[Any], memory_format: Any) -> list[list[Any]]:
        return [[self.tensor(a).contiguous(memory_format=memory_format) for a in arrays] for arrays in (xs, weights)]

    def _recurrent_layer(self, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Call:
        """Return ``torch.nn.LSTM`` or ``GRU`` for inference, which is cuDNN's on a GPU."""
        tensor = self.tensor(xs[0])
        kind = getattr(self._torch.nn, case.cell.upper())
        layer = kind(case.inputs, case.hidden, device=tensor.device, dtype=tensor.dtype)
        layer.requires_grad_(False).eval()  # else cuDNN saves data for a backward pass
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(self.tensor(weight))
        return lambda: layer(tensor)[0]

    def _step(self, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Call:
        """Return the functions that ``torch.nn.LSTMCell`` and ``GRUCell`` call."""
        x, *states = (self.tensor(array) for array in (xs[0][0], *xs[1:]))
        parameters = [self.tensor(weight) for weight in weights]
        if case.cell == "gru":
            return partial(self._torch.gru_cell, x, *states, *parameters)
        return lambda: self._torch.lstm_cell(x, states, *parameters)[0]

    def _gradient(self, case: GradientCase, xs: list[Any], weights: list[Any], memory_format: Any) -> Call:
        """Return one of the gradients, computed alone, with inputs already joined and padded as in training."""
        torch, rank, of_input = self._torch, len(case.size), case.of == "input"
        [arriving, *inputs], kernels = self._tensors(xs, weights, memory_format)
        pad, padding = self._padding(case)
        size = tuple(n + sum(pair) for n, pair in zip(case.size, pad or [(0, 0)] * rank))
        made = partial(arriving.new_zeros, dtype=arriving.dtype)
        x = made((case.batch, case.in_channels, *size)) if of_input else self._padded(self._joined(inputs), pad)
        kernel = kernels[0] if of_input else made(case.weight_shape)
        x, kernel = (tensor.contiguous(memory_format=memory_format) for tensor in (x, kernel))
        rest = (None, [case.stride] * rank, padding, [case.dilation] * rank, False, [0] * rank, case.groups)
        inside = (..., *(slice(before, before + n) for (before, _), n in zip(pad, case.size)))

        def call() -> Any:
            both = torch.ops.aten.convolution_backward(arriving, x, kernel, *rest, [of_input, not of_input, False])
            return both[0][inside] if of_input else both[1]

        return call

    def _convolve(self, case: Case, inputs: list[Any], kernels: list[Any]) -> Any:
        for layer, kernel in zip(case.layers, kernels):
            inputs = [self._convolve_once(layer, inputs, kernel)]
        return inputs[0]

    def _convolve_once(self, case: Case, inputs: list[Any], kernel: Any) -> Any:
        pad, padding = self._padding(case)
        x = self._padded(self._joined(inputs), pad)
        convolution = getattr(self._torch.nn.functional, f"conv{len(case.size)}d")
        return convolution(x, kernel, None, case.stride, padding, case.dilation, case.groups)

    def _joined(self, inputs: list[Any]) -> Any:
        return self._torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]

    def _padded(self, x: Any, pad: Pairs) -> Any:
        return self._torch.nn.functional.pad(x, [side for pair in reversed(pad) for side in pair]) if pad else x

    @staticmethod
    def _padding(case: Case) -> tuple[Pairs, tuple[int, ...]]:
        """Return the padding applied before the call, and that for torch, which pads both sides equally."""
        if all(before == after for before, after in case.pairs):
            return (), tuple(before for before, _ in case.pairs)
        return case.pairs, (0,) * len(case.size)
