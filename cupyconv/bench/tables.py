"""The tables of cases, in order of measurement: the most important come first, in case time runs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase

C = TypeVar("C", Case, RecurrentCase)

#: A dtype, and whether its products may use TF32.
PRECISIONS = (("float32", False), ("float32", True), ("float16", False), ("bfloat16", False))
WIDE_PRECISIONS = (("float64", False), ("complex64", False), ("complex128", False))


def _same(*extents: int) -> tuple[tuple[int, int], ...]:
    """Return padding that preserves the size at stride 1."""
    return tuple(((extent - 1) // 2, extent // 2) for extent in extents)


# --- NumPy ----------------------------------------------------------------------------------------------------

#: The cases of the demo.
JOBS = (
    Case("merge 5 x 4 -> 4, 10^6 points, float64", 4, (4,) * 5, (10**6,), 4, (1,), dtype="float64"),
    Case("merge 5 x 4 -> 4, 10^6 points, float32", 4, (4,) * 5, (10**6,), 4, (1,)),
    Case("3x3, 64 samples of 14x14", 64, (64,), (14, 14), 64, (3, 3), padding=_same(3, 3)),
)

#: Ten ordinary layers.
LAYERS = (
    Case("3x3, 64 -> 64, 56x56", 8, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3)),
    Case("3x3, 256 -> 256, 14x14", 8, (256,), (14, 14), 256, (3, 3), padding=_same(3, 3)),
    Case("7x7 stride 2, 3 -> 64, 224x224", 4, (3,), (224, 224), 64, (7, 7), stride=2, padding=_same(7, 7)),
    Case("1x1, 256 -> 64, 56x56", 8, (256,), (56, 56), 64, (1, 1)),
    Case("1x1 merged 128+128 -> 128, 64x64", 4, (128, 128), (64, 64), 128, (1, 1)),
    Case("3x3 merged 64+64 -> 64, 128x128", 2, (64, 64), (128, 128), 64, (3, 3), padding=_same(3, 3)),
    Case("3x3 depthwise 144, 56x56", 8, (144,), (56, 56), 144, (3, 3), padding=_same(3, 3), groups=144),
    Case("3x3 in 32 groups, 128 -> 128, 56x56", 4, (128,), (56, 56), 128, (3, 3), padding=_same(3, 3), groups=32),
    Case("1-D, 3 taps, dilation 8, 64 -> 64, 16000", 8, (64,), (16000,), 64, (3,), padding=((16, 0),), dilation=8),
    Case("3-D 3x3x3, 16 -> 32, 32x32x32", 2, (16,), (32, 32, 32), 32, (3, 3, 3), padding=_same(3, 3, 3)),
)

#: Pairs of layers whose intermediate image fits into the cache, or does not.
CHAINS = (
    Case("chain 3x3, 3x3, 32 -> 32 -> 32, 512x512", 1, (32,), (512, 512), 32, (3, 3), padding=_same(3, 3), then=((32, (3, 3), _same(3, 3), 1),)),
    Case("chain 3x3 depthwise, 1x1, 64 -> 64 -> 64, 128x128", 4, (64,), (128, 128), 64, (3, 3), padding=_same(3, 3), groups=64, then=((64, (1, 1), (), 1),)),
    Case("chain 1x1, 3x3, 256 -> 64 -> 64, 56x56", 4, (256,), (56, 56), 64, (1, 1), then=((64, (3, 3), _same(3, 3), 1),)),
    Case("chain 1-D, 3 taps, dilations 8 and 1, 64 -> 64 -> 64, 16000", 2, (64,), (16000,), 64, (3,), padding=((8, 8),), dilation=8, then=((64, (3,), _same(3), 1),)),
)  # fmt: skip

#: Unusual layers: odd sizes, long and lopsided kernels, strides, dilation, groups, one sample.
UNLIKE = (
    Case("3x3, 64 -> 64, 56x56, N 1", 1, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3)),
    Case("3x3, 48 -> 80, 61x47, N 2", 2, (48,), (61, 47), 80, (3, 3), padding=_same(3, 3)),
    Case("3x3, 512 -> 512, 7x7, N 1", 1, (512,), (7, 7), 512, (3, 3), padding=_same(3, 3)),
    Case("3x3, 16 -> 32, 28x28, N 64", 64, (16,), (28, 28), 32, (3, 3), padding=_same(3, 3)),
    Case("3x3, 3 -> 16, 224x224, N 1", 1, (3,), (224, 224), 16, (3, 3), padding=_same(3, 3)),
    Case("3x3, 24 -> 40, 33x35, N 1, float64", 1, (24,), (33, 35), 40, (3, 3), padding=_same(3, 3), dtype="float64"),
    Case("3x3, 64 -> 64, 28x28, N 2, float64", 2, (64,), (28, 28), 64, (3, 3), padding=_same(3, 3), dtype="float64"),
    Case("3x3 stride 2, 128 -> 128, 56x56, N 1", 1, (128,), (56, 56), 128, (3, 3), stride=2, padding=_same(3, 3)),
    Case("3x3 stride 2, 64 -> 96, 57x57, N 4", 4, (64,), (57, 57), 96, (3, 3), stride=2, padding=_same(3, 3)),
    Case("3x3 dilation 2, 64 -> 64, 40x40, N 2", 2, (64,), (40, 40), 64, (3, 3), padding=((2, 2),) * 2, dilation=2),
    Case("1x1, 64 -> 256, 56x56, N 4", 4, (64,), (56, 56), 256, (1, 1)),
    Case("1x1, 512 -> 512, 7x7, N 8", 8, (512,), (7, 7), 512, (1, 1)),
    Case("1x1 stride 2, 512 -> 1024, 28x28, N 1", 1, (512,), (28, 28), 1024, (1, 1), stride=2),
    Case("1x7, 128 -> 128, 17x17, N 4", 4, (128,), (17, 17), 128, (1, 7), padding=_same(1, 7)),
    Case("5x5, 48 -> 96, 27x27, N 2", 2, (48,), (27, 27), 96, (5, 5), padding=_same(5, 5)),
    Case("7x7 stride 2, 3 -> 64, 224x224, N 1", 1, (3,), (224, 224), 64, (7, 7), stride=2, padding=_same(7, 7)),
    Case("11x11 stride 4, 3 -> 64, 224x224, N 1", 1, (3,), (224, 224), 64, (11, 11), stride=4, padding=((2, 2),) * 2),
    Case("3x3 depthwise 128, 56x56, N 1", 1, (128,), (56, 56), 128, (3, 3), padding=_same(3, 3), groups=128),
    Case("3x3 stride 2 depthwise 96, 112x112, N 1", 1, (96,), (112, 112), 96, (3, 3), stride=2, padding=_same(3, 3), groups=96),
    Case("5x5 depthwise 120, 28x28, N 1", 1, (120,), (28, 28), 120, (5, 5), padding=_same(5, 5), groups=120),
    Case("5x5 stride 2 depthwise 72, 56x56, N 4", 4, (72,), (56, 56), 72, (5, 5), stride=2, padding=_same(5, 5), groups=72),
    Case("7x7 depthwise 96, 56x56, N 2", 2, (96,), (56, 56), 96, (7, 7), padding=_same(7, 7), groups=96),
    Case("3x3 in 16 groups, 128 -> 128, 28x28, N 2", 2, (128,), (28, 28), 128, (3, 3), padding=_same(3, 3), groups=16),
    Case("3x3 in 32 groups, 256 -> 256, 14x14, N 4", 4, (256,), (14, 14), 256, (3, 3), padding=_same(3, 3), groups=32),
    Case("3-D 3x3x3, 16 -> 32, 24x24x24, N 1", 1, (16,), (24, 24, 24), 32, (3, 3, 3), padding=_same(3, 3, 3)),
    Case("3-D 1x3x3, 32 -> 32, 8x28x28, N 2", 2, (32,), (8, 28, 28), 32, (1, 3, 3), padding=_same(1, 3, 3)),
    Case("1-D, 3 taps, 256 -> 256, 1500, N 1", 1, (256,), (1500,), 256, (3,), padding=_same(3)),
    Case("1-D, 9 taps, dilation 4, 64 -> 64, 4096, N 4", 4, (64,), (4096,), 64, (9,), padding=((16, 16),), dilation=4),
    Case("1-D, 15 taps, 16 -> 16, 100000, N 1", 1, (16,), (100_000,), 16, (15,), padding=_same(15)),
)  # fmt: skip

#: More kinds of problems, to evaluate the choice of a method.
CHOICES = (
    Case("3x3, 32 -> 32, 20x20, N 1", 1, (32,), (20, 20), 32, (3, 3), padding=_same(3, 3)),
    Case("3x3, 128 -> 128, 28x28, N 8", 8, (128,), (28, 28), 128, (3, 3), padding=_same(3, 3)),
    Case("3x3, 16 -> 16, 48x48, N 1, complex64", 1, (16,), (48, 48), 16, (3, 3), padding=_same(3, 3), dtype="complex64"),
    Case("9x9, 32 -> 32, 64x64, N 1", 1, (32,), (64, 64), 32, (9, 9), padding=_same(9, 9)),
    Case("15x15, 8 -> 8, 128x128, N 1", 1, (8,), (128, 128), 8, (15, 15), padding=_same(15, 15)),
    Case("21x21, 3 -> 8, 200x200, N 1", 1, (3,), (200, 200), 8, (21, 21), padding=_same(21, 21)),
    Case("5x5 stride 2, 16 -> 32, 64x64, N 2", 2, (16,), (64, 64), 32, (5, 5), stride=2, padding=_same(5, 5)),
    Case("3x3 depthwise 384, 14x14, N 1", 1, (384,), (14, 14), 384, (3, 3), padding=_same(3, 3), groups=384),
    Case("31x31 depthwise 32, 56x56, N 1", 1, (32,), (56, 56), 32, (31, 31), padding=_same(31, 31), groups=32),
    Case("3x3 depthwise 128, 56x56, N 1, channels-last", 1, (128,), (56, 56), 128, (3, 3), padding=_same(3, 3), groups=128, channels_last=True),
    Case("3x3 depthwise 64, 56x56, N 1, float64", 1, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3), groups=64, dtype="float64"),
    Case("1-D, 7 taps depthwise 128, 4000, N 1", 1, (128,), (4000,), 128, (7,), padding=_same(7), groups=128),
    Case("1-D, 101 taps, 4 -> 4, 50000, N 1", 1, (4,), (50_000,), 4, (101,), padding=_same(101)),
    Case("1-D, 1024 taps, 2 -> 2, 65536, N 1", 1, (2,), (65_536,), 2, (1024,), padding=_same(1024)),
    Case("3-D 5x5x5, 4 -> 8, 32x32x32, N 1", 1, (4,), (32, 32, 32), 8, (5, 5, 5), padding=_same(5, 5, 5)),
    Case("filter 21x21, 200x200", 1, (1,), (200, 200), 1, (21, 21), padding=_same(21, 21)),
    Case("filter 31x31, 512x512", 1, (1,), (512, 512), 1, (31, 31), padding=_same(31, 31)),
    Case("filter 15x15, 512x512, complex64", 1, (1,), (512, 512), 1, (15, 15), padding=_same(15, 15), dtype="complex64"),
    Case("filter of 2000 taps, 10^6 points", 1, (1,), (10**6,), 1, (2000,), padding=_same(2000)),
)  # fmt: skip

#: Chains with expanded layers: their intermediate images are six times as large.
EXPANDED = (
    Case("chain 1x1, 3x3 depthwise, 1x1, 24 -> 144 -> 144 -> 24, 56x56", 1, (24,), (56, 56), 144, (1, 1), then=((144, (3, 3), _same(3, 3), 144), (24, (1, 1), (), 1))),
    Case("chain 1x1, 3x3 depthwise, 1x1, 16 -> 96 -> 96 -> 24, 112x112", 1, (16,), (112, 112), 96, (1, 1), then=((96, (3, 3), _same(3, 3), 96), (24, (1, 1), (), 1))),
)  # fmt: skip

#: More kinds of chains, to evaluate the choice between tiles and layers.
CHAIN_CHOICES = (
    replace(EXPANDED[1], name=f"{EXPANDED[1].name}, N 8", batch=8),
    Case("chain 3x3, 3x3, 16 -> 16 -> 16, 512x512", 1, (16,), (512, 512), 16, (3, 3), padding=_same(3, 3), then=((16, (3, 3), _same(3, 3), 1),)),
    Case("chain 3x3, 3x3, 8 -> 8 -> 8, 1024x1024", 1, (8,), (1024, 1024), 8, (3, 3), padding=_same(3, 3), then=((8, (3, 3), _same(3, 3), 1),)),
    Case("chain 3x3, 3x3, 64 -> 64 -> 64, 56x56, N 4", 4, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3), then=((64, (3, 3), _same(3, 3), 1),)),
    Case("chain 1x1, 1x1, 32 -> 64 -> 32, 256x256, N 2", 2, (32,), (256, 256), 64, (1, 1), then=((32, (1, 1), (), 1),)),
    Case("chain 1x1, 1x1, 4 -> 8 -> 4, 1024x1024", 1, (4,), (1024, 1024), 8, (1, 1), then=((4, (1, 1), (), 1),)),
    Case("chain 3x3 depthwise twice, 32 channels, 256x256", 1, (32,), (256, 256), 32, (3, 3), padding=_same(3, 3), groups=32, then=((32, (3, 3), _same(3, 3), 32),)),
    Case("chain 3x3 depthwise, 1x1, 3x3 depthwise, 32 -> 64, 112x112, N 2", 2, (32,), (112, 112), 32, (3, 3), padding=_same(3, 3), groups=32, then=((64, (1, 1), (), 1), (64, (3, 3), _same(3, 3), 64))),
    Case("chain 3x3 stride 2, 3x3, 3 -> 32 -> 64, 224x224", 1, (3,), (224, 224), 32, (3, 3), stride=2, padding=_same(3, 3), then=((64, (3, 3), _same(3, 3), 1),)),
    Case("chain 7x7 stride 2, 3x3, 3 -> 64 -> 64, 224x224", 1, (3,), (224, 224), 64, (7, 7), stride=2, padding=_same(7, 7), then=((64, (3, 3), _same(3, 3), 1),)),
    Case("chain 3x3 merged 16+16, 1x1, 32 -> 16, 256x256", 1, (16, 16), (256, 256), 32, (3, 3), padding=_same(3, 3), then=((16, (1, 1), (), 1),)),
    Case("chain merge 5 x 4 -> 8 -> 4, 10^6 points", 1, (4,) * 5, (10**6,), 8, (1,), then=((4, (1,), (), 1),)),
    Case("chain 1-D, 9 taps three times, 8 channels, 10^5", 1, (8,), (100_000,), 8, (9,), padding=_same(9), then=((8, (9,), _same(9), 1),) * 2),
    Case("chain 1-D, 15 taps twice, 2 channels, 10^6", 1, (2,), (10**6,), 2, (15,), padding=_same(15), then=((2, (15,), _same(15), 1),)),
    Case("chain of filters, 101 and 31 taps, 10^6 points", 1, (1,), (10**6,), 1, (101,), padding=_same(101), then=((1, (31,), _same(31), 1),)),
    Case("chain 3x3 three times, 16 channels, 64x64, N 8", 8, (16,), (64, 64), 16, (3, 3), padding=_same(3, 3), then=((16, (3, 3), _same(3, 3), 1),) * 2),
    Case("chain 3x3, 3x3, 1 -> 8 -> 1, 1024x1024", 1, (1,), (1024, 1024), 8, (3, 3), padding=_same(3, 3), then=((1, (3, 3), _same(3, 3), 1),)),
    Case("chain of filters 9x1, 1x9, 2048x2048", 1, (1,), (2048, 2048), 1, (9, 1), padding=_same(9, 1), then=((1, (1, 9), _same(1, 9), 1),)),
    Case("chain of filters 31x1, 1x31, 1024x1024, float64", 1, (1,), (1024, 1024), 1, (31, 1), padding=_same(31, 1), dtype="float64", then=((1, (1, 31), _same(1, 31), 1),)),
    Case("chain 3x3, 3x3, 24 channels, 128x128, N 2, float64", 2, (24,), (128, 128), 24, (3, 3), padding=_same(3, 3), dtype="float64", then=((24, (3, 3), _same(3, 3), 1),)),
    Case("chain 5x5, 1x1, 16 -> 32 -> 16, 200x200", 1, (16,), (200, 200), 32, (5, 5), padding=_same(5, 5), then=((16, (1, 1), (), 1),)),
    Case("chain 3-D 3x3x3 twice, 8 channels, 48x48x48", 1, (8,), (48, 48, 48), 8, (3, 3, 3), padding=_same(3, 3, 3), then=((8, (3, 3, 3), _same(3, 3, 3), 1),)),
    Case("chain 3x3, 3x3, 128 -> 128 -> 128, 28x28, N 8", 8, (128,), (28, 28), 128, (3, 3), padding=_same(3, 3), then=((128, (3, 3), _same(3, 3), 1),)),
    Case("chain 3x3, 1x1, 8 -> 8 -> 8, 32x32", 1, (8,), (32, 32), 8, (3, 3), padding=_same(3, 3), then=((8, (1, 1), (), 1),)),
)  # fmt: skip


def _filters() -> Iterator[Case]:
    """Yield filters with one channel in and out, for images and signals."""
    for dtype in ("float32", "float64"):
        for extent in (3, 5, 9, 15):
            name = f"filter {extent}x{extent}, 512x512, {dtype}"
            yield Case(name, 1, (1,), (512, 512), 1, (extent,) * 2, padding=_same(extent, extent), dtype=dtype)
        for points, taps in ((10**4, 5), (10**4, 11), (10**4, 101), (10**5, 5), (10**7, 11)):
            power = len(str(points)) - 1
            yield Case(
                f"filter of {taps} taps, valid, 10^{power} points, {dtype}", 1, (1,), (points,), 1, (taps,), dtype=dtype
            )
        for taps, padding in ((31, _same(31)), (101, ((100, 0),)), (200, ((199, 0),))):
            kind = ", causal" * (padding != _same(taps))
            yield Case(f"filter of {taps} taps, 10^6 points{kind}, {dtype}", 1, (1,), (10**6,), 1, (taps,), padding=padding, dtype=dtype)  # fmt: skip


#: Images, a volume and a signal with kernels of hundreds or thousands of taps; with channels, and several inputs.
LARGE_KERNELS = (
    LargeKernelCase("31x31, 1 -> 1, 1024x1024", 1, (1,), (1024, 1024), 1, (31, 31), padding=_same(31, 31)),
    LargeKernelCase("63x63, 1 -> 1, 1024x1024", 1, (1,), (1024, 1024), 1, (63, 63), padding=_same(63, 63)),
    LargeKernelCase("15x15x15, 1 -> 1, 128x128x128", 1, (1,), (128, 128, 128), 1, (15, 15, 15), padding=_same(15, 15, 15)),
    LargeKernelCase("1001 taps, 1 -> 1, 10^7 points", 1, (1,), (10**7,), 1, (1001,), padding=_same(1001)),
    LargeKernelCase("31x31, 4 -> 1, 1024x1024", 1, (4,), (1024, 1024), 1, (31, 31), padding=_same(31, 31)),
    LargeKernelCase("31x31, 8 -> 1, 1024x1024", 1, (8,), (1024, 1024), 1, (31, 31), padding=_same(31, 31)),
    LargeKernelCase("31x31 merged 4+4 -> 1, 1024x1024", 1, (4, 4), (1024, 1024), 1, (31, 31), padding=_same(31, 31)),
    LargeKernelCase("31x31 depthwise 3, 1024x1024", 1, (3,), (1024, 1024), 3, (31, 31), padding=_same(31, 31), groups=3),
    LargeKernelCase("31x31, 4 -> 4, 1024x1024", 1, (4,), (1024, 1024), 4, (31, 31), padding=_same(31, 31)),
)  # fmt: skip

#: Calls with almost no work, to time the overhead of a call.
SMALL_CALLS: tuple[AnyCase, ...] = (
    Case("small 3x3, 8 -> 8, 16x16", 1, (8,), (16, 16), 8, (3, 3), padding=_same(3, 3), judged="host"),
    Case("small 1x1, 8 -> 8, 16x16", 1, (8,), (16, 16), 8, (1, 1), judged="host"),
    Case("small 3x3 depthwise 8, 16x16", 1, (8,), (16, 16), 8, (3, 3), padding=_same(3, 3), groups=8, judged="host"),
    Case("small merge 5 x 4 -> 4, 64 points", 1, (4,) * 5, (64,), 4, (1,), judged="host"),
    *(
        RecurrentCase(f"small {cell.upper()} step, {inputs} -> {hidden}, N {batch}", cell, 1, batch, inputs, hidden, judged="host", single=True)
        for cell in ("lstm", "gru")
        for inputs, hidden, batch in ((8, 16, 1), (128, 256, 1))
    ),
    RecurrentCase("small LSTM 8 -> 16, T 50, N 1", "lstm", 50, 1, 8, 16, judged="host"),
    RecurrentCase("small GRU 8 -> 16, T 50, N 1", "gru", 50, 1, 8, 16, judged="host"),
)  # fmt: skip

#: Layers whose gradients are both measured: the ordinary ones, and one of each other kind.
DIFFERENTIATED = (
    *(replace(case, name=f"{case.name}, N {case.batch}") for case in LAYERS),
    Case("3x3, 128 -> 128, 28x28, N 8", 8, (128,), (28, 28), 128, (3, 3), padding=_same(3, 3)),
    *(case for case in CHOICES if case.name.startswith(("15x15", "filter 31x31", "3x3 depthwise 384"))),
    Case("3x3 stride 2, 128 -> 128, 56x56, N 8", 8, (128,), (56, 56), 128, (3, 3), stride=2, padding=_same(3, 3)),
    *(
        case
        for case in UNLIKE
        if case.name.startswith((
            "3x3, 64 -> 64, 56x56", "1x1 stride 2", "1x7", "5x5", "11x11", "3x3 dilation", "3x3 stride 2 depthwise",
            "3x3 in 16 groups", "1-D, 9", "1-D, 15", "3x3, 24",
        ))
    ),
)  # fmt: skip


def _gradients(of: str) -> Iterator[GradientCase]:
    for case in DIFFERENTIATED:
        layer = {field.name: getattr(case, field.name) for field in fields(Case)}
        yield GradientCase(**layer | {"name": f"{of} gradient of {case.name}"}, of=of)


# --- a GPU ----------------------------------------------------------------------------------------------------

_ORIGINAL = Case("merge 5 x (4, 4, 10^6) -> 4", 4, (4,) * 5, (10**6,), 4, (1,), loop=True)

#: Calls with almost no work, to time the overhead of a call.
HOST = (
    Case("host: 3x3, 8 -> 8, 8x8", 1, (8,), (8, 8), 8, (3, 3), padding=_same(3, 3), judged="host"),
    Case("host: 3x3, 64 -> 64, 8x8", 1, (64,), (8, 8), 64, (3, 3), padding=_same(3, 3), judged="host"),
    Case("host: 1x1, 8 -> 8, 8x8", 1, (8,), (8, 8), 8, (1, 1), judged="host"),
    Case("host: 1x1 merged 4 x 4 -> 4, 8x8", 1, (4,) * 4, (8, 8), 4, (1, 1), judged="host"),
)


def _merges() -> Iterator[Case]:
    yield replace(_ORIGINAL, compiled=True)
    yield replace(_ORIGINAL, dtype="float64")
    yield replace(_ORIGINAL, dtype="float16", compiled=True)
    yield replace(_ORIGINAL, dtype="bfloat16")
    plane = Case("merge 5 x 4 -> 4, 1000x1000", 4, (4,) * 5, (1000, 1000), 4, (1, 1))
    yield plane
    yield replace(plane, name=f"{plane.name}, channels-last", channels_last=True)
    yield replace(plane, name=f"{plane.name}, channels-last", channels_last=True, dtype="float16")
    yield replace(_ORIGINAL, name="merge 5 x 4 -> 4, 10^6 points, unaligned", misaligned=True, loop=False)
    yield replace(_ORIGINAL, name="merge 5 x 4 -> 4, 999,999 points", size=(999_999,), loop=False)
    for channels, outputs in (
        ((1, 1), 1),
        ((1, 1, 1), 64),
        ((2, 2, 2), 8),
        ((3, 13), 32),
        ((8, 8), 8),
        ((16, 16), 16),
        ((64,), 1),
        ((32, 32), 64),
        ((64, 64), 64),
        ((64, 64), 16),
        ((1,) * 40, 4),
    ):
        shown = "+".join(map(str, channels)) if len(channels) < 4 else f"{len(channels)} x {channels[0]}"
        few = Case(f"merge {shown} -> {outputs}, 2^18 points", 4, channels, (2**18,), outputs, (1,))
        yield few
        yield replace(few, dtype="float16")
    for width, side, batch in ((128, 64, 8), (256, 32, 32), (512, 16, 32)):
        name = f"merge {width}+{width} -> {width}, {side}x{side}, N {batch}"
        wide = Case(name, batch, (width, width), (side, side), width, (1, 1))
        yield from _in_precisions([wide])


def _layers() -> Iterator[Case]:
    """Yield layers of networks other than ResNet."""
    for case in (
        Case("U-Net skip 3x3, 64+64 -> 64, 256x256, N 4", 4, (64, 64), (256, 256), 64, (3, 3), padding=_same(3, 3)),
        Case(
            "U-Net skip 3x3, 128+128 -> 128, 128x128, N 4", 4, (128,) * 2, (128, 128), 128, (3, 3), padding=_same(3, 3)
        ),
        Case("3x3, 512 -> 512, 7x7, N 1", 1, (512,), (7, 7), 512, (3, 3), padding=_same(3, 3)),
        Case(
            "3x3 in 32 groups, 128 -> 128, 56x56, N 32",
            32,
            (128,),
            (56, 56),
            128,
            (3, 3),
            padding=_same(3, 3),
            groups=32,
        ),
        Case("3x3 depthwise 144, 56x56, N 32", 32, (144,), (56, 56), 144, (3, 3), padding=_same(3, 3), groups=144),
        Case(
            "5x5 stride 2 depthwise 240, 28x28, N 32",
            32,
            (240,),
            (28, 28),
            240,
            (5, 5),
            stride=2,
            padding=_same(5, 5),
            groups=240,
        ),
        Case("7x7 depthwise 96, 56x56, N 32", 32, (96,), (56, 56), 96, (7, 7), padding=_same(7, 7), groups=96),
        Case("3-D 3x3x3, 16 -> 32, 32x32x32, N 4", 4, (16,), (32, 32, 32), 32, (3, 3, 3), padding=_same(3, 3, 3)),
        Case("3-D 3x3x3, 64 -> 64, 16x16x16, N 8", 8, (64,), (16, 16, 16), 64, (3, 3, 3), padding=_same(3, 3, 3)),
        Case(
            "1-D 3 taps, dilation 8, 64 -> 64, 16000, N 8", 8, (64,), (16000,), 64, (3,), padding=((16, 0),), dilation=8
        ),
        Case(
            "1-D 3 taps, dilation 128, 64 -> 64, 16000, N 8",
            8,
            (64,),
            (16000,),
            64,
            (3,),
            padding=((128, 128),),
            dilation=128,
        ),
        Case(
            "3x3 dilation 2, 128 -> 128, 32x32, N 8",
            8,
            (128,),
            (32, 32),
            128,
            (3, 3),
            padding=((2, 2),) * 2,
            dilation=2,
        ),
        Case("3x3, 64 samples of 64 x 14x14", 64, (64,), (14, 14), 64, (3, 3), padding=_same(3, 3), loop=True),
    ):
        for variant in _in_precisions([case]):
            yield replace(variant, compiled=case.name.startswith("U-Net skip 3x3, 64") and variant.dtype == "float16")


def _chains() -> Iterator[Case]:
    """Yield pairs of layers bound by memory, where fusing should pay, and one that is not."""
    for case in (
        Case(
            "chain 3x3, 3x3, 16 -> 16 -> 16, 256x256, N 8",
            8,
            (16,),
            (256, 256),
            16,
            (3, 3),
            padding=_same(3, 3),
            then=((16, (3, 3), _same(3, 3), 1),),
        ),
        Case(
            "chain 3x3, 3x3, 32 -> 32 -> 32, 128x128, N 8",
            8,
            (32,),
            (128, 128),
            32,
            (3, 3),
            padding=_same(3, 3),
            then=((32, (3, 3), _same(3, 3), 1),),
        ),
        Case(
            "chain 3x3 depthwise, 1x1, 32 -> 32 -> 64, 112x112, N 32",
            32,
            (32,),
            (112, 112),
            32,
            (3, 3),
            padding=_same(3, 3),
            groups=32,
            then=((64, (1, 1), (), 1),),
        ),
        Case(
            "chain 3x3 depthwise, 1x1, 144 -> 144 -> 24, 56x56, N 32",
            32,
            (144,),
            (56, 56),
            144,
            (3, 3),
            padding=_same(3, 3),
            groups=144,
            then=((24, (1, 1), (), 1),),
        ),
        Case(
            "chain 1x1, 3x3 depthwise, 24 -> 144 -> 144, 56x56, N 32",
            32,
            (24,),
            (56, 56),
            144,
            (1, 1),
            then=((144, (3, 3), _same(3, 3), 144),),
        ),
        Case(
            "chain 3x3, 1x1, 32 -> 32 -> 32, 256x256, N 4",
            4,
            (32,),
            (256, 256),
            32,
            (3, 3),
            padding=_same(3, 3),
            then=((32, (1, 1), (), 1),),
        ),
        Case(
            "chain 3x3, 3x3, 256 -> 256 -> 256, 14x14, N 32",
            32,
            (256,),
            (14, 14),
            256,
            (3, 3),
            padding=_same(3, 3),
            then=((256, (3, 3), _same(3, 3), 1),),
        ),
    ):
        for dtype in ("float32", "float16"):
            yield replace(case, dtype=dtype)


#: ResNet-50 (with the stride in the 3x3): inputs, outputs, kernel, stride, side of the input.
_RESNET = (
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 56), (128, 128, 3, 2, 56), (128, 512, 1, 1, 28), (256, 512, 1, 2, 56),
    (512, 128, 1, 1, 28), (128, 128, 3, 1, 28),
    (512, 256, 1, 1, 28), (256, 256, 3, 2, 28), (256, 1024, 1, 1, 14), (512, 1024, 1, 2, 28),
    (1024, 256, 1, 1, 14), (256, 256, 3, 1, 14),
    (1024, 512, 1, 1, 14), (512, 512, 3, 2, 14), (512, 2048, 1, 1, 7), (1024, 2048, 1, 2, 14),
    (2048, 512, 1, 1, 7), (512, 512, 3, 1, 7),
)  # fmt: skip


def _resnet(batch: int) -> list[Case]:
    return [
        Case(
            f"ResNet-50 {kernel}x{kernel}{' stride 2' * (stride == 2)}, {inputs} -> {outputs}, {side}x{side}, N {batch}",
            batch,
            (inputs,),
            (side, side),
            outputs,
            (kernel, kernel),
            stride=stride,
            padding=((kernel // 2, kernel // 2),) * 2 if kernel > 1 else (),
        )
        for inputs, outputs, kernel, stride, side in _RESNET
    ]


def _wide_types() -> Iterator[Case]:
    """Yield the smaller table, in float64 and complex."""
    for case in (
        Case("3x3, 64 -> 64, 56x56, N 8", 8, (64,), (56, 56), 64, (3, 3), padding=_same(3, 3)),
        Case("3x3, 256 -> 256, 14x14, N 8", 8, (256,), (14, 14), 256, (3, 3), padding=_same(3, 3)),
        Case("1x1, 256 -> 64, 56x56, N 8", 8, (256,), (56, 56), 64, (1, 1)),
        Case("3x3 merged 64+64 -> 64, 64x64, N 4", 4, (64, 64), (64, 64), 64, (3, 3), padding=_same(3, 3)),
        Case("3x3 depthwise 144, 28x28, N 8", 8, (144,), (28, 28), 144, (3, 3), padding=_same(3, 3), groups=144),
        Case(
            "1-D 3 taps, dilation 8, 64 -> 64, 4000, N 8", 8, (64,), (4000,), 64, (3,), padding=((16, 0),), dilation=8
        ),
        Case("merge 5 x 4 -> 4, 2^18 points", 4, (4,) * 5, (2**18,), 4, (1,)),
    ):
        yield from _in_precisions([case], WIDE_PRECISIONS)


def _in_precisions(cases: list[C], precisions: tuple[tuple[str, bool], ...] = PRECISIONS) -> list[C]:
    """Return every case in one precision before the next precision begins."""
    return [replace(case, dtype=dtype, tf32=tf32) for dtype, tf32 in precisions for case in cases]


def _channels_last(cases: list[Case]) -> Iterator[Case]:
    for case in cases:
        yield replace(case, name=f"{case.name}, channels-last", dtype="float16", channels_last=True)


def _labelled(cases: Iterable[C]) -> tuple[C, ...]:
    """Return the cases with their precision in their names, so that the names are unique."""
    return tuple(replace(case, name=f"{case.name}, {case.precision}") for case in cases)


def ordinary_cases() -> tuple[AnyCase, ...]:
    """Return the cases that the pages show line by line."""
    return (*recurrent_cases(gpu=False), *JOBS, *LAYERS, *CHAINS)


def numpy_cases() -> tuple[AnyCase, ...]:
    """Return the NumPy backend's table."""
    more: tuple[AnyCase, ...] = (
        *UNLIKE,
        *CHOICES,
        *_gradients("input"),
        *_gradients("weight"),
        *EXPANDED,
        *CHAIN_CHOICES,
        *SMALL_CALLS,
        *_filters(),
        *LARGE_KERNELS,
    )
    return (*ordinary_cases(), *more, *_other_recurrent())


def gpu_cases() -> tuple[AnyCase, ...]:
    """Return the GPU's table."""
    convolutions = _labelled(
        (
            *HOST,
            *_merges(),
            *_layers(),
            *_chains(),
            *_in_precisions(_resnet(32)),
            *_wide_types(),
            *_channels_last(_resnet(32)),
            *_in_precisions(_resnet(8)),
        )
    )
    return (*recurrent_cases(gpu=True), *convolutions)


def recurrent_cases(*, gpu: bool) -> tuple[RecurrentCase, ...]:
    """Return recurrent layers: NumPy's, or a GPU's in each precision."""
    sizes = ((50, 64, 128, 256), *(((100, 64, 512, 512), (200, 8, 256, 256), (100, 256, 1024, 1024)) if gpu else ()))
    plain = [
        RecurrentCase(f"{cell.upper()} {inputs} -> {hidden}, T {steps}, N {batch}", cell, steps, batch, inputs, hidden)
        for steps, batch, inputs, hidden in sizes
        for cell in ("lstm", "gru")
    ]
    return _labelled(_in_precisions(plain, PRECISIONS[:3])) if gpu else tuple(plain)


def _other_recurrent() -> tuple[RecurrentCase, ...]:
    """Return narrow layers, single sequences and long sequences."""
    return tuple(
        RecurrentCase(f"{cell.upper()} {inputs} -> {hidden}, T {steps}, N {batch}", cell, steps, batch, inputs, hidden)
        for steps, batch, inputs, hidden in ((100, 1, 64, 128), (30, 16, 40, 96), (200, 8, 256, 256))
        for cell in ("lstm", "gru")
    )
