"""A list of every kernel variant that planning can request: to compile, to check, to fill a cache with.

A variant is a kernel and its macros.  The list is written from the tables that planning chooses from.  A test plans a
broad product of problems, and finds every kernel of every plan in the list.
"""

from __future__ import annotations

from itertools import product

from cupyconv.cuda.plan import (
    depthwise,
    depthwise_transposed,
    depthwise_weight_gradient,
    direct,
    implicit_weight_gradient,
    merge,
    weight_gradient,
)
from cupyconv.cuda.plan.arithmetic import arithmetics
from cupyconv.cuda.plan.conv_pair import FIRST_PAIR, pair_arithmetics
from cupyconv.cuda.plan.implicit_gemm import tiles
from cupyconv.cuda.plan.launches import VECTOR_BYTES
from cupyconv.cuda.plan.pool import CHANNELS, LARGEST, LARGEST_AND_PLACE, MEAN
from cupyconv.cuda.plan.recurrence import Tile, recurrent_tiles
from cupyconv.cuda.plan.recurrent_gradient import CELLS, gradient_arithmetic
from cupyconv.problem.activations import Activation
from cupyconv.problem.arrays import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.problem.machine import KNOWN_GPUS, known_gpu
from cupyconv.problem.plan import Kernel
from cupyconv.problem.problems import NO_PROLOGUE, Prologue

#: Pooling kernels, and what each computes of a window.
POOLING = {"pool": (LARGEST, LARGEST_AND_PLACE, MEAN), "pool_gradient": (LARGEST, MEAN)}
#: Kernels of a recurrent layer's gradients.
RECURRENT_GRADIENT = ("recurrent_gradient", "recurrent_gradient_persistent", "recurrent_inputs")
#: Kernels of recurrent layers, by whether the weight stays in shared memory.
RECURRENT = {False: "recurrent_step", True: "recurrent_persistent"}
#: Rows of the weight per unit in one product: an rnn and the last part of a gru, that gru's first part, a gru, an lstm.
GATES_PER_PRODUCT = (1, 2, 3, 4)


def is_fast(kernel: Kernel) -> bool:
    """Return whether the variant exists for speed, so that a register spill defeats its purpose.

    `direct` and `transposed` exist for generality: a few spilled bytes cost little compared with their scattered
    access.
    """
    fast = ("merge", "im2col", "epilogue", "epilogue_grad", "prologue_grad", "depthwise", "implicit_gemm", "conv_pair")
    of_transforms = ("tiles", "spectra", "spectra_gradient")
    return kernel.name in (
        *fast,
        *of_transforms,
        "channels_last",
        "col2im",
        "implicit_weight_gradient",
        "depthwise_transposed",
        "depthwise_weight_gradient",
        *POOLING,
        *RECURRENT.values(),
        *RECURRENT_GRADIENT,
    )


def is_planned(kernel: Kernel, capability: int) -> bool:
    """Return whether GPUs of this compute capability have a variant's instructions, so that planning may request it.

    The other variants compile there too, to code that stops with an error.
    """
    macros, gpu = dict(kernel.macros), known_gpu(f"sm_{capability}")
    if kernel.name in RECURRENT.values():
        resident = kernel.name == RECURRENT[True]
        return any(
            macros["ARITHMETIC"] == tile.arithmetic
            for tf32 in (False, True)
            for tile in recurrent_tiles(macros["DTYPE"], resident, gpu, tf32)
        )
    if kernel.name == "recurrent_gradient_persistent":
        return macros["ARITHMETIC"] == gradient_arithmetic(macros["DTYPE"], gpu)
    if kernel.name == "conv_pair":
        kinds = macros["FIRST"], macros["SECOND"]
        offered = (pair_arithmetics(macros["DTYPE"], kinds, gpu, tf32) for tf32 in (False, True))
        return capability >= FIRST_PAIR[macros["DTYPE"]] and any(macros["ARITHMETIC"] in names for names in offered)
    if kernel.name not in ("implicit_gemm", "implicit_weight_gradient"):
        return True
    return any(macros["ARITHMETIC"] in arithmetics(macros["DTYPE"], gpu, tf32) for tf32 in (False, True))


DTYPES = tuple(ITEMSIZE)
COMPLEX = {real_part(dtype): dtype for dtype in DTYPES if is_complex(dtype)}
FOLDS = (0, 1)
PROLOGUES: tuple[dict[str, object], ...] = ({}, {"PROLOGUE": 1})
REAL_DTYPES = tuple(dtype for dtype in DTYPES if not is_complex(dtype))


def all_variants() -> tuple[Kernel, ...]:
    """Return all variants.

    Their number is bounded because no size of a problem reaches a macro: only dtypes, and tile and vector widths from
    short tables.
    """
    return (
        *_merge_variants(),
        *_direct_variants("direct"),
        *_direct_variants("direct", PROLOGUE=1),
        *(variant for folds in FOLDS for variant in _direct_variants("transposed", FOLDS=folds)),
        *(
            _kernel("depthwise", DTYPE=dtype, KERNEL=kernel, STRIDE=stride, **prologue)
            for dtype in REAL_DTYPES
            for prologue in PROLOGUES
            for kernel, stride in (
                *(depthwise.PROLOGUE_KERNELS if prologue else depthwise.KERNELS),
                depthwise.ANY_KERNEL,
            )
        ),
        *(
            _kernel("depthwise", DTYPE=dtype, KERNEL=kernel, STRIDE=stride, GROUPED=1)
            for dtype in REAL_DTYPES
            for kernel, stride in depthwise.GROUPED_KERNELS
        ),
        *(
            _kernel("im2col", DTYPE=f"bits{8 * itemsize}", WIDTH=width)
            for itemsize in sorted(set(ITEMSIZE.values()))
            for width in vector_widths(itemsize)
        ),
        *(
            _kernel("im2col", DTYPE=dtype, WIDTH=width, PROLOGUE=1)
            for dtype in DTYPES
            for width in vector_widths(ITEMSIZE[dtype])
        ),
        *_col2im_variants(),
        *_tiles_variants(),
        *(_kernel("spectra", DTYPE=dtype) for dtype in DTYPES if is_complex(dtype)),
        *(_kernel("spectra_gradient", DTYPE=dtype) for dtype in DTYPES if is_complex(dtype)),
        *(
            _kernel("finish_weight_tiles", X_DTYPE=x, G_DTYPE=grad, Y_DTYPE=result, **prologue)
            for x, grad, result in (dtypes.values() for dtypes in _products())
            for prologue in PROLOGUES
        ),
        *(_kernel("finish_tiles", **dtypes, **prologue) for dtypes in _products() for prologue in PROLOGUES),
        *(
            _kernel(name, DTYPE=dtype, CHANNELS=CHANNELS, NUMBER=number)
            for name, numbers in POOLING.items()
            for dtype in REAL_DTYPES
            for number in numbers
        ),
        *_epilogue_variants(),
        *_epilogue_grad_variants(),
        *(
            _kernel("prologue_grad", DTYPE=dtype, WIDTH=width)
            for dtype in DTYPES
            for width in vector_widths(ITEMSIZE[dtype])
        ),
        *(_kernel("pack_weight", DTYPE=f"bits{8 * size}") for size in sorted({ITEMSIZE[d] for d in REAL_DTYPES})),
        *(_kernel("exchange_weight", DTYPE=f"bits{8 * size}") for size in sorted(set(ITEMSIZE.values()))),
        *(_kernel("exchange_weight", DTYPE=dtype) for dtype in DTYPES if is_complex(dtype)),
        *(
            _kernel("channels_last", DTYPE=dtype, **prologue)
            for prologue in PROLOGUES
            for dtype in (REAL_DTYPES if prologue else ("bits16", "bits32", "bits64"))
        ),
        *_implicit_gemm_variants(),
        *_conv_pair_variants(),
        *_weight_gradient_variants(),
        *(
            _kernel("depthwise_transposed", DTYPE=dtype, KERNEL=kernel)
            for dtype in REAL_DTYPES
            for kernel, _ in depthwise_transposed.KERNELS
        ),
        *(
            _kernel("depthwise_weight_gradient", DTYPE=dtype, KERNEL=kernel, STRIDE=stride)
            for dtype in REAL_DTYPES
            for kernel, stride in depthwise_weight_gradient.KERNELS
        ),
        *(
            _kernel("implicit_weight_gradient", DTYPE=dtype, ARITHMETIC=arithmetic, TILE_M=tile_m, TILE_N=tile_n)
            for dtype in implicit_weight_gradient.DTYPES
            for arithmetic in _arithmetics(dtype)
            for tile_m, tile_n in implicit_weight_gradient.TILES
        ),
        *_recurrent_variants(),
        *_recurrent_gradient_variants(),
    )


def vector_widths(itemsize: int) -> tuple[int, ...]:
    """Return the numbers of elements that a thread may move at once: 16 bytes of them, or one."""
    return tuple(dict.fromkeys((VECTOR_BYTES // itemsize, 1)))


def _merge_variants() -> list[Kernel]:
    return [
        merge.merge_kernel(dtype, tile, vector, prologue)
        for dtype in REAL_DTYPES
        for prologue in (NO_PROLOGUE, Prologue(activation=Activation("relu", 1)))
        for tile in ([merge.PROLOGUE_TILE] if prologue else merge.TILES[ITEMSIZE[dtype]])
        for vector in vector_widths(ITEMSIZE[dtype])
    ]


def _products() -> list[dict[str, object]]:
    """Return dtypes of image, weight and result: all the same, or one real factor and a complex result."""
    return [
        {"X_DTYPE": x, "W_DTYPE": weight, "Y_DTYPE": result}
        for result in DTYPES
        for x, weight in dict.fromkeys(product((result, real_part(result)), repeat=2))
        if result in (x, weight)
    ]


def _direct_variants(name: str, **macros: object) -> list[Kernel]:
    return [_kernel(name, **dtypes, TILE=direct.TILE, **macros) for dtypes in _products()]


def _tiles_variants() -> list[Kernel]:
    """Return tiles in the dtype of sums, or complex for a real array and a complex one; weights have no prologue."""
    return [
        _kernel("tiles", DTYPE=dtype, TILE_DTYPE=tile, **prologue)
        for dtype in DTYPES
        for tile in dict.fromkeys((accumulator(dtype), COMPLEX.get(dtype, accumulator(dtype))))
        for prologue in PROLOGUES
    ]


def _col2im_variants() -> list[Kernel]:
    """Return columns in the result's dtype, in the accumulator's dtype, or in two real planes, as a GEMM stores them.

    The first come from `col2im`, whose padding is zeros.
    """
    return [
        _kernel("col2im", SUM_DTYPE=columns, Y_DTYPE=result, FOLDS=folds)
        for result in DTYPES
        for columns in dict.fromkeys((result, accumulator(result), real_part(accumulator(result))))
        for folds in FOLDS
        if not folds or ITEMSIZE[columns] > 2
    ]


def _weight_gradient_variants() -> list[Kernel]:
    """Return variants for image and gradient of the result's dtype, or for one real factor and a complex result."""
    return [
        _kernel("weight_gradient", X_DTYPE=x, G_DTYPE=grad, Y_DTYPE=result, OUTPUTS=outputs, **prologue)
        for prologue in PROLOGUES
        for result in DTYPES
        for x, grad in dict.fromkeys(product((result, real_part(result)), repeat=2))
        if result in (x, grad)
        for outputs in (weight_gradient.OUTPUTS[1:] if prologue else weight_gradient.OUTPUTS)
    ]


def _epilogue_variants() -> list[Kernel]:
    """Return variants for sums in the accumulator's dtype, its real planes or the result's, and for widened images."""
    narrower = {"float32": ("float16", "bfloat16"), "float64": ("float16", "bfloat16", "float32")}
    return [
        _kernel("epilogue", SUM_DTYPE=sums, Y_DTYPE=result, WIDTH=width)
        for result in DTYPES
        for sums in dict.fromkeys(
            (accumulator(result), real_part(accumulator(result)), result, *narrower.get(result, ()))
        )
        for width in vector_widths(ITEMSIZE[result])
    ]


def _epilogue_grad_variants() -> list[Kernel]:
    """Return variants with vectors along pixels, along channels, or without vectors."""
    return [
        _kernel("epilogue_grad", DTYPE=dtype, WIDTH=width, ALONG_CHANNELS=along_channels)
        for dtype in DTYPES
        for width in vector_widths(ITEMSIZE[dtype])
        for along_channels in ((0, 1) if width > 1 else (0,))
    ]


def _conv_pair_variants() -> list[Kernel]:
    """Return variants for every arithmetic that a pair of layers has on any GPU."""
    return [
        _kernel("conv_pair", DTYPE=dtype, ARITHMETIC=arithmetic, FIRST=kinds[0], SECOND=kinds[1])
        for dtype in REAL_DTYPES
        for kinds in product(("DENSE", "DEPTHWISE"), repeat=2)
        for arithmetic in dict.fromkeys(
            name
            for gpu, tf32 in product(KNOWN_GPUS.values(), (False, True))
            for name in pair_arithmetics(dtype, kinds, gpu, tf32)
        )
    ]


def _implicit_gemm_variants() -> list[Kernel]:
    """Return every arithmetic of a dtype on any GPU, with every tile and gather; with a prologue, one gather."""
    of_dtype = [(dtype, arithmetic) for dtype in DTYPES for arithmetic in _arithmetics(dtype)]
    return [
        *(
            _kernel("implicit_gemm", DTYPE=dtype, ARITHMETIC=arithmetic, TILE_M=tile[0], TILE_N=tile[1], GATHER=gather)
            for dtype, arithmetic in of_dtype
            for gather in ("ALONG_PIXELS", "PIXEL_CHUNKS", "ALONG_CHANNELS")
            for tile in tiles(dtype, arithmetic, gather)
        ),
        *(
            _kernel(
                "implicit_gemm",
                DTYPE=dtype,
                ARITHMETIC=arithmetic,
                TILE_M=tile[0],
                TILE_N=tile[1],
                GATHER="ALONG_PIXELS",
                PROLOGUE=1,
            )
            for dtype, arithmetic in of_dtype
            for tile in tiles(dtype, arithmetic, "ALONG_PIXELS", has_prologue=True)
        ),
    ]


def _recurrent_gradient_variants() -> list[Kernel]:
    return [
        *(_kernel("recurrent_gradient", DTYPE=dtype, CELL=cell) for dtype in REAL_DTYPES for cell in CELLS.values()),
        *(
            _kernel("recurrent_gradient_persistent", DTYPE=dtype, CELL=cell, ARITHMETIC=arithmetic)
            for dtype in REAL_DTYPES
            for cell in CELLS.values()
            for arithmetic in dict.fromkeys(gradient_arithmetic(dtype, gpu) for gpu in KNOWN_GPUS.values())
        ),
        *(_kernel("recurrent_inputs", DTYPE=dtype) for dtype in REAL_DTYPES),
    ]


def _recurrent_variants() -> list[Kernel]:
    """Return every tile of a dtype on any GPU, for each number of gates; persistent ones also for given gates."""
    return [
        _kernel(name, **dict(tile.macros), GATES=gates, **given)
        for resident, name in RECURRENT.items()
        for dtype in REAL_DTYPES
        for tile in _recurrent_tiles(dtype, resident)
        for gates in GATES_PER_PRODUCT
        for given in ({}, {"GIVEN_GATES": 1})[: 1 + resident]
    ]


def _recurrent_tiles(dtype: str, resident: bool) -> tuple[Tile, ...]:
    answers = product(KNOWN_GPUS.values(), (False, True))
    return tuple(dict.fromkeys(tile for gpu, tf32 in answers for tile in recurrent_tiles(dtype, resident, gpu, tf32)))


def _arithmetics(dtype: str) -> list[str]:
    answers = (arithmetics(dtype, gpu, tf32) for gpu in KNOWN_GPUS.values() for tf32 in (False, True))
    return sorted({name for answer in answers for name in answer})


def _kernel(name: str, **macros: object) -> Kernel:
    return Kernel(name, tuple((macro, str(value)) for macro, value in macros.items()))
