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
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case
from cupyconv.bench.peers import Way
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase
from cupyconv.demo.libraries import Call
from cupyconv.problem.arrays import dtype_from_name, dtype_name

#: Spatial axes -> the name of torch's channels-last format.
_CHANNELS_LAST = {2: "channels_last", 3: "channels_last_3d"}


def find_torch() -> ModuleType | None:
    """torch, or None where it is not installed."""
    try:
        return import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None


class Torch:
    """torch's ways to do a case, on arrays of `xp`."""

    def __init__(self, torch: ModuleType, xp: ModuleType) -> None:
        self._torch, self._xp = torch, xp

    def properties(self) -> dict[str, Any]:
        """Versions, for the record."""
        cudnn = self._torch.backends.cudnn.version() if self._torch.backends.cudnn.is_available() else None
        return {"torch": self._torch.__version__, "cudnn": cudnn, "cuda_of_torch": self._torch.version.cuda}

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

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any], *, compiled: bool) -> list[Way]:
        """Both memory formats, where there are two; torch.compile where the case asks and `compiled` lets it."""
        torch = self._torch
        if isinstance(case, RecurrentCase):
            return [Way("torch", partial(self._recurrent_layer, case, xs[0], weights), self.array)]

        def eager(memory_format: Any) -> Call:
            return partial(self._convolve, case, *self._tensors(xs, weights, memory_format))

        def compiled_call() -> Call:
            tensors = self._tensors(xs, weights, torch.contiguous_format)
            torch.compiler.reset()  # torch gives up compiling a function after eight shapes of it
            function = torch.compile(
                lambda inputs, kernels: self._convolve(case, inputs, kernels), fullgraph=True, dynamic=False
            )
            return partial(function, *tensors)

        ways = [Way("torch", partial(eager, torch.contiguous_format), self.array)]
        if len(case.size) in _CHANNELS_LAST:
            memory_format = getattr(torch, _CHANNELS_LAST[len(case.size)])
            ways.append(Way("torch channels-last", partial(eager, memory_format), self.array))
        if case.compiled and compiled:
            ways.append(Way("torch.compile", compiled_call, self.array))
        return ways

    def product(self, left: Any, right: Any) -> Call:
        """A product of two matrices, for the floor."""
        return partial(self._torch.matmul, self.tensor(left), self.tensor(right))

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
        """Give unused memory back to the GPU."""
        if self._torch.cuda.is_available():
            self._torch.cuda.empty_cache()

    def _tensors(self, xs: list[Any], weights: list[Any], memory_format: Any) -> list[list[Any]]:
        return [[self.tensor(a).contiguous(memory_format=memory_format) for a in arrays] for arrays in (xs, weights)]

    def _recurrent_layer(self, case: RecurrentCase, x: Any, weights: list[Any]) -> Call:
        """``torch.nn.LSTM`` or ``GRU``, for inference; on a GPU that is cuDNN's."""
        tensor = self.tensor(x)
        kind = getattr(self._torch.nn, case.cell.upper())
        layer = kind(case.inputs, case.hidden, device=tensor.device, dtype=tensor.dtype)
        layer.requires_grad_(False).eval()  # else cuDNN keeps what a backward pass would need
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(self.tensor(weight))
        return lambda: layer(tensor)[0]

    def _convolve(self, case: Case, inputs: list[Any], kernels: list[Any]) -> Any:
        for layer, kernel in zip(case.layers, kernels):
            inputs = [self._convolve_once(layer, inputs, kernel)]
        return inputs[0]

    def _convolve_once(self, case: Case, inputs: list[Any], kernel: Any) -> Any:
        functional = self._torch.nn.functional
        x = self._torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
        padding: tuple[int, ...] = tuple(before for before, _ in case.pairs)
        if any(before != after for before, after in case.pairs):  # torch pads both sides alike
            x = functional.pad(x, [side for pair in reversed(case.pairs) for side in pair])
            padding = (0,) * len(case.size)
        convolution = getattr(functional, f"conv{len(case.size)}d")
        return convolution(x, kernel, None, case.stride, padding, case.dilation, case.groups)
