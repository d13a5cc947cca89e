"""The C++ parameter structs of the kernels, mirrored as NumPy dtypes.

A test compares the size and every offset with the compilers' values.  `PackedParameters` converts the values of a
launch to bytes once; every call writes the addresses of its arrays into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np

from cupyconv.problem.plan import MAX_MERGED, MAX_PAIR_SOURCES, MAX_PHASES, MAX_SOURCES, Address, KernelLaunch

POINTER, INT64, INT32, FLOAT64 = np.uint64, np.int64, np.int32, np.float64


def _struct(**fields: Any) -> np.dtype:
    return np.dtype(
        [(name, *(spec if isinstance(spec, tuple) else (spec,))) for name, spec in fields.items()], align=True
    )


IMAGE = _struct(data=POINTER, stride_n=INT64, stride_c=INT64, stride=(INT64, 3))
SOURCE = _struct(image=IMAGE, first=INT32, channels=INT32)
SOURCES = _struct(table=(SOURCE, MAX_SOURCES), count=INT32)
MERGE_SOURCE = _struct(data=POINTER, stride_n=INT64, stride_c=INT64, channels=INT32)
WINDOWS = _struct(
    size=(INT64, 3), out=(INT64, 3), kernel=(INT32, 3), stride=(INT32, 3), before=(INT32, 3), dilation=(INT32, 3),
    padding_mode=INT32,
)  # fmt: skip
COUNTED = _struct(first=(INT64, 3), end=(INT64, 3))
ADJOINT = _struct(end=(INT64, 3), tap_step=(INT32, 3), window_step=(INT32, 3))
EPILOGUE = _struct(bias=POINTER, residual=IMAGE, pre=POINTER, alpha=FLOAT64, beta=FLOAT64, activation=INT32)

PROLOGUE = _struct(
    scale=POINTER, shift=POINTER, scale_step=INT64, shift_step=INT64, alpha=FLOAT64, beta=FLOAT64, activation=INT32
)

WEIGHT_SLABS = _struct(data=POINTER, stride_g=INT64, stride_slab=INT64, stride_row=INT64, rows=INT32)
PLACE_BITS = _struct(shift_d=INT32, shift_h=INT32)
STEPS = _struct(size=(INT64, 3), stride=(INT32, 3), dilation=(INT32, 3), padding_mode=INT32, is_mapped=INT32)
PHASE = _struct(first_element=INT64, out=(INT32, 3), kernel=(INT32, 3), before=(INT32, 3), first_slab=INT32)
PHASE_WEIGHT = _struct(at=INT64, kernel=(INT32, 3), first_slab=INT32)

_CONVOLUTION = _struct(
    sources=SOURCES, windows=WINDOWS, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, prologue=PROLOGUE, batch=INT64,
    groups=INT32, group_channels=INT32, group_outputs=INT32,
)  # fmt: skip

STRIDED = _struct(data=POINTER, stride_d=INT64, stride_n=INT64, stride_u=INT64)
GATE_ACTIVATION = _struct(alpha=FLOAT64, beta=FLOAT64, code=INT32)
_RECURRENT = _struct(
    weight=STRIDED, x=STRIDED, weight_ih=STRIDED, bias_ih=STRIDED, bias_hh=STRIDED, peephole=STRIDED, h0=STRIDED, c0=STRIDED, h=STRIDED, c=STRIDED,
    y=STRIDED, y_step=INT64, lengths=POINTER, lengths_stride=INT64, gates=POINTER, gates_d=INT64, gates_t=INT64,
    beside=POINTER, beside_d=INT64, beside_t=INT64, states=POINTER, cells=POINTER, counters=POINTER,
    activation=(GATE_ACTIVATION, 6), default_gates=INT32, clip=FLOAT64, steps=INT32, batch=INT32, inputs=INT32, hidden=INT32, step=INT32, count=INT32,
    first=(INT32, 2), backward=(INT32, 2), gates_per_unit=INT32, is_candidate=INT32, keeps_gates=INT32,
    input_forget=INT32, lengths_wide=INT32, weight_vector=INT32, weight_ih_vector=INT32,
    states_vectorized=INT32,
)  # fmt: skip
_RECURRENT_GRADIENT = _struct(
    gates=POINTER, beside=POINTER, weight_hh=POINTER, y=POINTER, h0=POINTER, c0=POINTER, peephole=POINTER,
    lengths=POINTER, lengths_stride=INT64, grad_y=POINTER, grad_y_t=INT64, grad_y_n=INT64, grad_y_u=INT64,
    begin_h=POINTER, begin_c=POINTER, carried_h=POINTER, carried_c=POINTER, dgates=POINTER, dcandidate=POINTER,
    previous=POINTER, reset=POINTER, sums=POINTER, activation=(GATE_ACTIVATION, 6), default_gates=INT32, clip=FLOAT64, first=(INT64, 2),
    steps=INT64, batch=INT64, count=INT64, hidden=INT32, directions=INT32, sign=(INT32, 2), first_direction=INT32,
    is_reset=INT32, input_forget=INT32, reset_first=INT32, wide_lengths=INT32, begins=INT32, sum_rows=INT32,
    steps_done=INT32, counters=POINTER, parts=POINTER,
)  # fmt: skip
_PAIR_LAYER = _struct(windows=WINDOWS, weight=IMAGE, epilogue=EPILOGUE)
_BOX = _struct(size=(INT32, 3))

#: Kernel name -> the struct that is its only parameter.
PARAMETERS = {
    "merge": _struct(
        sources=(MERGE_SOURCE, MAX_MERGED), weight=POINTER, weight_stride_o=INT64, weight_stride_c=INT64, out=IMAGE, epilogue=EPILOGUE,
        prologue=PROLOGUE, batch=INT64, pixels=INT64, shares=INT64, step_n=INT32, step_share=INT32, in_channels=INT32,
        out_channels=INT32,
    ),
    "direct": _CONVOLUTION,
    "depthwise": _struct(
        sources=SOURCES, windows=WINDOWS, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, prologue=PROLOGUE, batch=INT64,
        outputs=INT32, group_outputs=INT32, group_channels=INT32, channel_lanes=INT32,
    ),
    "conv_pair": _struct(
        sources=(SOURCE, MAX_PAIR_SOURCES), first=_PAIR_LAYER, second=_PAIR_LAYER, out=IMAGE, tile_count=INT64, tiles=(INT64, 3),
        source_count=INT32, middle=INT32, outputs=INT32, outputs_per_block=INT32, tile=_BOX, middle_tile=_BOX, x_tile=_BOX,
        x_vectorized=INT32, x_chunks=INT32, middle_chunks=INT32,
    ),
    "im2col": _struct(
        sources=SOURCES, windows=WINDOWS, prologue=PROLOGUE, columns=POINTER, stride_n=INT64, stride_row=INT64, stride_pixel=INT64, batch=INT64,
        first_pixel=INT64, pixels=INT64, squares=INT32, channel_lanes=INT32,
    ),
    "tiles": _struct(
        x=IMAGE, windows=WINDOWS, prologue=PROLOGUE, tiles=POINTER, stride_u=INT64, stride_c=INT64, stride_t=INT64, first_unit=INT64,
        scale=FLOAT64, read=(INT32, 3), units=INT32, channels=INT32, channel_lanes=INT32,
    ),
    "spectra": _struct(
        x=POINTER, weight=POINTER, y=POINTER, frequencies=INT64, units=INT64, first=INT32, channels=INT32, groups=INT32,
        group_channels=INT32, group_outputs=INT32,
    ),
    "spectra_gradient": _struct(
        grad=POINTER, x=POINTER, y=POINTER, frequencies=INT64, units=INT64, units_per_part=INT64, first=INT32, channels=INT32,
        groups=INT32, group_channels=INT32, group_outputs=INT32, adds=INT32,
    ),
    "finish_weight_tiles": _struct(
        sources=SOURCES, windows=WINDOWS, prologue=PROLOGUE, grad=IMAGE, out=IMAGE, sums=POINTER, stride_part=INT64, stride_o=INT64,
        stride_c=INT64, stride_t=INT64, batch=INT64, tile=(INT32, 3), parts=INT32, outputs=INT32, group_channels=INT32,
        group_outputs=INT32, computes_again=INT32,
    ),
    "finish_tiles": _struct(
        sources=SOURCES, windows=WINDOWS, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, prologue=PROLOGUE, sums=POINTER, stride_u=INT64,
        stride_o=INT64, stride_t=INT64, first_unit=INT64, tiles=(INT64, 3), tile=(INT32, 3), block=(INT32, 3), units=INT32, outputs=INT32,
        output_lanes=INT32, group_channels=INT32, group_outputs=INT32, computes_again=INT32,
    ),
    "channels_last": _struct(
        sources=SOURCES, prologue=PROLOGUE, moved=POINTER, stride_n=INT64, size=(INT64, 3), batch=INT64, pixels=INT64,
        channels=INT32, padded=INT32, lanes_shift=INT32, vectorized=INT32,
    ),
    "pack_weight": _struct(
        sources=SOURCES, weight=IMAGE, packed=POINTER, stride_m=INT64, stride_k=INT64, groups=INT32,
        group_channels=INT32, group_outputs=INT32, k_chunk=INT32, slab=INT32, slabs=INT32, rows=INT32, channels=INT32,
        packed_as=INT32, phase=(PHASE_WEIGHT, MAX_PHASES),
    ),
    "exchange_weight": _struct(
        weight=IMAGE, exchanged=POINTER, elements=INT64, kernel=(INT32, 3), group_channels=INT32, group_outputs=INT32
    ),
    "implicit_gemm": _struct(
        sources=SOURCES, steps=STEPS, weight=WEIGHT_SLABS, out=IMAGE, plane=INT64, epilogue=EPILOGUE, prologue=PROLOGUE, batch=INT64,
        place_bits=PLACE_BITS, groups=INT32, group_channels=INT32, group_outputs=INT32, tiles_m=INT32, keeps_sums=INT32,
        slabs_per_split=INT32, phases=INT32, phase=(PHASE, MAX_PHASES),
    ),
    "col2im": _struct(
        columns=IMAGE, tap_stride=(INT64, 3), windows=WINDOWS, adjoint=ADJOINT, out=IMAGE, epilogue=EPILOGUE, batch=INT64,
        imaginary=INT64, channels=INT32, conjugated=INT32,
    ),
    "transposed": _struct(
        sources=SOURCES, windows=WINDOWS, adjoint=ADJOINT, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, batch=INT64,
        groups=INT32, group_channels=INT32, group_outputs=INT32, first=INT32, channels=INT32, conjugated=INT32,
    ),
    "depthwise_transposed": _struct(
        sources=SOURCES, windows=WINDOWS, weight=IMAGE, out=IMAGE, epilogue=EPILOGUE, batch=INT64, group_channels=INT32,
        group_outputs=INT32, first=INT32, channels=INT32, channel_lanes=INT32,
    ),
    "weight_gradient": _struct(
        sources=SOURCES, windows=WINDOWS, prologue=PROLOGUE, grad=IMAGE, sums=POINTER, plane=INT64, batch=INT64, pixels_per_part=INT64, groups=INT32,
        group_channels=INT32, group_outputs=INT32,
    ),
    "implicit_weight_gradient": _struct(
        sources=SOURCES, windows=WINDOWS, grad=POINTER, pixel_stride=INT64, sums=POINTER, plane=INT64, pixels=INT32,
        pixels_per_part=INT32, groups=INT32, group_channels=INT32, group_outputs=INT32,
    ),
    "depthwise_weight_gradient": _struct(
        sources=SOURCES, windows=WINDOWS, grad=IMAGE, sums=POINTER, plane=INT64, batch=INT32, outputs=INT32,
        group_outputs=INT32, channel_lanes=INT32,
    ),
    "pool": _struct(
        x=IMAGE, windows=WINDOWS, out=IMAGE, indices=IMAGE, counted=COUNTED, batch=INT64, nothing=FLOAT64, channels=INT32, lanes=INT32
    ),
    "pool_gradient": _struct(
        x=IMAGE, y=IMAGE, grad=IMAGE, windows=WINDOWS, out=IMAGE, counted=COUNTED, batch=INT64, channels=INT32, lanes=INT32
    ),
    "epilogue": _struct(
        sums=POINTER, sums_stride_n=INT64, sums_stride_o=INT64, sums_stride_p=INT64, imaginary=INT64, plane=INT64, out=IMAGE,
        epilogue=EPILOGUE, size=(INT64, 3), batch=INT64, first_pixel=INT64, pixels=INT64, channels=INT32, planes=INT32,
        along_channels=INT32, sums_vectorized=INT32, bias_vectorized=INT32, residual_vectorized=INT32,
    ),
    "recurrent_step": _RECURRENT,
    "recurrent_persistent": _RECURRENT,
    "recurrent_gradient": _RECURRENT_GRADIENT,
    "recurrent_gradient_persistent": _RECURRENT_GRADIENT,
    "recurrent_inputs": _struct(
        x=POINTER, stride_t=INT64, stride_n=INT64, stride_i=INT64, lengths=POINTER, lengths_stride=INT64, inputs=POINTER,
        first=INT64, steps=INT64, batch=INT64, columns=INT64, wide_lengths=INT32,
    ),
    "prologue_grad": _struct(
        grad=IMAGE, x=IMAGE, out=IMAGE, prologue=PROLOGUE, partial=POINTER, size=(INT64, 3), batch=INT64, pixels=INT64,
        channels=INT32, lanes=INT32,
    ),
    "epilogue_grad": _struct(
        grad=IMAGE, saved=IMAGE, out=IMAGE, partial=POINTER, alpha=FLOAT64, beta=FLOAT64, size=(INT64, 3), batch=INT64,
        pixels=INT64, activation=INT32, channels=INT32, lanes=INT32,
    ),
}  # fmt: skip


class BoundParameters:
    """A copy of a parameter struct, and the `argument` that a device launches with it."""

    __slots__ = ("argument", "integers", "params", "words")

    def __init__(self, template: np.ndarray, argument_of: Callable[[np.ndarray], Any]) -> None:
        # Plain bytes: if NumPy had to describe a nested struct to CuPy, this would take longer than a launch.
        self.params = template.copy().view(np.dtype((np.void, template.nbytes)))
        self.words = memoryview(self.params.view(np.uint64))  # type: ignore[arg-type]
        self.integers = memoryview(self.params.view(np.int32))  # type: ignore[arg-type]
        self.argument = argument_of(self.params)


class PackedParameters:
    """The parameter struct of a launch, with holes for addresses.

    A launch copies its parameters when it is enqueued, so that their memory can be reused, but by one launch at a time.
    `bind` hands out memory that no other thread uses; `give_back` returns it after the launch is enqueued.

    `seconds` has one launch for each `Rounds` around this one, outermost first: this launch in the second round.
    Whatever differs in the second round advances by the same amount from round to round.
    """

    def __init__(
        self,
        launch: KernelLaunch,
        slots: Mapping[str, int],
        argument_of: Callable[[np.ndarray], Any],
        seconds: Sequence[KernelLaunch] = (),
    ) -> None:
        dtype = self._dtype = PARAMETERS[launch.kernel.name]
        assert dtype.names == tuple(name for name, _ in launch.params), f"fields of {launch.kernel.name} disagree"
        assert dtype.itemsize % 8 == 0, "every struct is a whole number of 8-byte words"
        template = np.zeros((), dtype)
        self._addresses: list[tuple[int, Address]] = []  # byte offset, address to write there
        self._fill(template, 0, tuple(value for _, value in launch.params))
        self._holes = [(at // 8, slots[address.buffer], address.offset) for at, address in self._addresses]
        self._template = template.reshape(1).view(np.uint64)
        self._argument_of = argument_of
        self._free: list[BoundParameters] = []
        #: Words that change from round to round: index, value in the first round (None for addresses), step per
        #: `Rounds`.
        self._moving = self._going_on([PackedParameters(second, slots, argument_of) for second in seconds])

    def _going_on(self, seconds: list[PackedParameters]) -> list[tuple[int, int | None, list[int]]]:
        if not seconds:
            return []
        holes = {at for at, _, _ in self._holes}
        values = [
            dict(enumerate(each._template.tolist())) | {at: o for at, _, o in each._holes} for each in (self, *seconds)
        ]
        moving: list[tuple[int, int | None, list[int]]] = []
        for at, first in values[0].items():
            gaps = [each[at] - first for each in values[1:]]
            if any(gaps):
                moving.append((at, None if at in holes else first, gaps))
        return moving

    def place(self, field: str) -> int:
        """Return the index of an int32 field in `BoundParameters.integers`."""
        fields = self._dtype.fields
        assert fields is not None and fields[field][0] == INT32
        return fields[field][1] // 4

    def bind(self, addresses: Sequence[int], at: Sequence[int] = ()) -> BoundParameters:
        """Return the struct with the addresses of a run's buffers, by slot; `at` has the index in each `Rounds`."""
        try:
            bound = self._free.pop()
        except IndexError:
            bound = BoundParameters(self._template, self._argument_of)
        words = bound.words
        for word, slot, offset in self._holes:
            words[word] = addresses[slot] + offset
        for word, first, gaps in self._moving:
            words[word] = (words[word] if first is None else first) + sum(map(mul, at, gaps))
        return bound

    def give_back(self, bound: BoundParameters) -> None:
        """Reuse memory from `bind` after its launch is enqueued."""
        self._free.append(bound)

    def _fill(self, struct: np.ndarray, base: int, values: tuple[Any, ...]) -> None:
        assert struct.dtype.names is not None and struct.dtype.fields is not None
        for name, value in zip(struct.dtype.names, values, strict=True):
            field, offset = struct.dtype.fields[name][:2]
            self._fill_field(struct, name, field, base + offset, value)

    def _fill_field(self, struct: np.ndarray, name: str, field: np.dtype, at: int, value: Any) -> None:
        if isinstance(value, Address):
            self._addresses.append((at, value))
        elif value is None:
            struct[name] = 0
        elif field.names is not None:
            self._fill(struct[name], at, value)
        elif field.subdtype is not None and field.subdtype[0].names is not None:
            item = field.subdtype[0]
            for i, entry in enumerate(value):
                self._fill(struct[name][i], at + i * item.itemsize, entry)
        else:
            struct[name] = value
