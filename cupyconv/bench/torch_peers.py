"""PyTorch as a peer, on the very arrays of the library, shared through DLPack.

`Torch` is made where torch is installed.  Its calls run on the stream that the clock times: CuPy's current stream and
torch's have to be the same, which `Torch` checks, and which they are while neither was changed, as both then are
CUDA's default stream.  ``cudnn.benchmark`` lets cuDNN try its algorithms on each shape; that happens while results are
checked, before anything is timed.  Data lie in the memory format asked for before the clock runs; a merge's
``torch.cat`` is timed, as the library's reading of several inputs is.
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

#: Seconds that must be left for torch.compile, which may take twenty.
FOR_COMPILING = 60.0
#: Spatial axes -> the name of torch's channels-last format.
_CHANNELS_LAST = {2: "channels_last", 3: "channels_last_3d"}


class Torch(Participant):
    """torch's ways to do a case, on arrays of `xp`, with so many threads of the processor."""

    def __init__(self, torch: ModuleType, xp: ModuleType, threads: int | None = None) -> None:
        self._torch, self._xp = torch, xp
        if threads is not None:
            torch.set_num_threads(threads)

    def properties(self) -> dict[str, Any]:
        cudnn = self._torch.backends.cudnn.version() if self._torch.backends.cudnn.is_available() else None
        return {"torch": self._torch.__version__, "cudnn": cudnn, "cuda_of_torch": self._torch.version.cuda}

    @contextmanager
    def during(self, case: AnyCase) -> Iterator[None]:
        """For inference, under the flags of the case."""
        with self._torch.inference_mode(), self.flags(case):
            yield

    def notes(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> dict[str, Any]:
        with self.flags(case) as flags:
            return {"flags": flags}

    @contextmanager
    def flags(self, case: AnyCase) -> Iterator[dict[str, bool]]:
        """The precision flags of a case, set and stated; what they were is put back."""
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
        """RuntimeError where torch works on another stream than the clock times."""
        if stream is not None and (own := self._torch.cuda.current_stream().cuda_stream) != stream:
            raise RuntimeError(f"torch's current stream is {own:#x}, the one that is timed is {stream:#x}")

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """Both memory formats, where there are two; torch.compile where the case asks."""
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
            torch.compiler.reset()  # torch gives up compiling a function after eight shapes of it
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
        """The array's own memory as a tensor; bfloat16 goes over as integers, since NumPy's DLPack does not know it."""
        if dtype_name(array.dtype) == "bfloat16":
            return self._torch.from_dlpack(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_dlpack(array)

    def array(self, tensor: Any) -> Any:
        """The tensor's own memory as an array."""
        if tensor.dtype is self._torch.bfloat16:
            return self._xp.from_dlpack(tensor.view(self._torch.int16)).view(dtype_from_name("bfloat16"))
        return self._xp.from_dlpack(tensor)

    def release(self) -> None:
        if self._torch.cuda.is_available():
            self._torch.cuda.empty_cache()

    def _tensors(self, xs: list[Any], weights: list[Any], memory_format: Any) -> list[list[Any]]:
        return [[self.tensor(a).contiguous(memory_format=memory_format) for a in arrays] for arrays in (xs, weights)]

    def _recurrent_layer(self, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Call:
        """``torch.nn.LSTM`` or ``GRU``, for inference; on a GPU that is cuDNN's."""
        tensor = self.tensor(xs[0])
        kind = getattr(self._torch.nn, case.cell.upper())
        layer = kind(case.inputs, case.hidden, device=tensor.device, dtype=tensor.dtype)
        layer.requires_grad_(False).eval()  # else cuDNN keeps what a backward pass would need
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(self.tensor(weight))
        return lambda: layer(tensor)[0]

    def _step(self, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Call:
        """The functions under ``torch.nn.LSTMCell`` and ``GRUCell``."""
        x, *states = (self.tensor(array) for array in (xs[0][0], *xs[1:]))
        parameters = [self.tensor(weight) for weight in weights]
        if case.cell == "gru":
            return partial(self._torch.gru_cell, x, *states, *parameters)
        return lambda: self._torch.lstm_cell(x, states, *parameters)[0]

    def _gradient(self, case: GradientCase, xs: list[Any], weights: list[Any], memory_format: Any) -> Call:
        """One of the gradients, asked for alone; it finds inputs joined and padded, as it would in training."""
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
        """What is padded before, and what torch is told: it pads both sides alike."""
        if all(before == after for before, after in case.pairs):
            return (), tuple(before for before, _ in case.pairs)
        return case.pairs, (0,) * len(case.size)
