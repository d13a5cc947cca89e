"""Kernel variants compile for GPUs, with warnings as errors, and are what they claim to be.

No GPU is needed: NVRTC gives machine code, PTX and the registers used.  The parameter structs are compared with NumPy's
mirror of them by static assertions, which are generated field by field.  NVRTC and the host's C++ compiler compile them
into every kernel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grids import fewest

from cupyconv.cuda.plan import (
    channels_last,
    conv_pair,
    depthwise,
    depthwise_transposed,
    depthwise_weight_gradient,
    implicit_gemm,
    implicit_weight_gradient,
    merge,
    recurrence,
)
from cupyconv.cuda.plan import recurrent_gradient as recurrent_gradient_cuda
from cupyconv.cuda.plan.im2col import COL2IM_CHANNELS
from cupyconv.cuda.plan.launches import VECTOR_BYTES, WARP
from cupyconv.cuda.plan.occupancy import blocks_that_fit, registers
from cupyconv.cuda.run.kernel_sources import compile_options, kernel_directory, kernel_source, source_hash
from cupyconv.cuda.run.parameters import PARAMETERS
from cupyconv.problem import activations
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import MAX_MERGED, MAX_PAIR_SOURCES, MAX_SOURCES, Kernel
from cupyconv.problem.recurrence import GATES
from tests import nvrtc
from tests.host_device import build
from tests.variants import MEAN, all_variants, is_fast, is_planned

nvrtc.require()
pytestmark = pytest.mark.nvrtc

#: The oldest architecture that current toolkits compile for, and the one that most checks use.
ARCHITECTURES = (75, 90)
NAMES = tuple(PARAMETERS)
VARIANTS = {name: [variant for variant in all_variants() if variant.name == name] for name in NAMES}

#: Variants of implicit_gemm.cu with every tile, for the smallest and the largest type of sums.
IMPLICIT_GEMM_LAYOUTS = [
    variant
    for variant in VARIANTS["implicit_gemm"]
    if {("ARITHMETIC", "MMA"), ("GATHER", "ALONG_CHANNELS")} <= {*variant.macros}
    and dict(variant.macros)["DTYPE"] in ("float16", "float64")
]

#: Maximum bytes of a struct passed by value that every driver supports.
PARAMETER_SPACE = 4096

#: An access of 16 bytes at once, in PTX: four 32-bit words or two 64-bit words.
SIXTEEN_BYTES = r"{access}\.global(?:\.\w+)*\.(?:v4\.[bfsu]32|v2\.[bfsu]64)\b"

#: Loads that bypass the coherence of caches, in PTX, for data that is not written while the kernel runs.
READ_ONLY = r"ld\.global(?:\.\w+)*\.nc\b"

#: Every variant for both architectures, which ``--nightly`` compiles.
EVERY_VARIANT = [(variant, architecture) for variant in all_variants() for architecture in ARCHITECTURES]


def pairs_of(variant: Kernel, architecture: int) -> set[tuple[object, ...]]:
    """Return every pair of values that a kernel is compiled with."""
    return {(variant.name, *pair) for pair in combinations([*variant.macros, ("architecture", architecture)], 2)}


#: Enough of these variants that every pair of a kernel's macros occurs, and every macro for both architectures.
SOME_VARIANTS = [EVERY_VARIANT[index] for index in fewest([pairs_of(*each) for each in EVERY_VARIANT])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        chosen = EVERY_VARIANT if metafunc.config.getoption("--nightly") else SOME_VARIANTS
        ids = [f"{variant}-sm_{architecture}" for variant, architecture in chosen]
        metafunc.parametrize(("variant", "architecture"), chosen, ids=ids)


#: Variants of the recurrent kernels whose plan gives the size of their shared memory.
RECURRENT_LAYOUTS = list(
    dict.fromkeys(
        variant
        for variant, _ in SOME_VARIANTS
        if variant.name in ("recurrent_step", "recurrent_persistent", "recurrent_gradient_persistent")
    )
)


def test_a_variant_compiles_to_what_it_claims_to_be(variant, architecture):
    result = nvrtc.compile_variant(variant, architecture)
    assert result.cubin.startswith(b"\x7fELF")
    assert result.registers, f"no resource report in\n{result.log}"
    assert parameter_bytes(result.ptx, variant.name) == [PARAMETERS[variant.name].itemsize]
    if is_fast(variant) and is_planned(variant, architecture):
        assert (result.spills, result.stack) == (0, 0), "bytes of spills, and of stack"
    for access in wide_accesses(variant):
        assert re.search(SIXTEEN_BYTES.format(access=access), result.ptx), f"no 16-byte {access}"
    if variant.name in ("recurrent_persistent", "recurrent_gradient_persistent"):
        assert not re.search(READ_ONLY, result.ptx), "other blocks write what it reads, and that path may keep what was"
    if variant.name == "conv_pair" and is_planned(variant, architecture):  # registers limit its occupancy
        gpu = known_gpu(f"sm_{architecture}")
        listed, used = (
            blocks_that_fit(count, 256, 1 << 10, gpu) for count in (registers(variant, gpu), result.registers)
        )
        assert result.registers <= registers(variant, gpu)
        assert used - listed in (0, 1), "the list is of other kernels"


def wide_accesses(variant: Kernel) -> tuple[str, ...]:
    """Return the instructions with which a variant must move 16 bytes at once, if that is its purpose."""
    macro, accesses = {
        "merge": ("VECTOR", ("ld", "st")),
        "im2col": ("WIDTH", ("st",)),
        "epilogue": ("WIDTH", ("st",)),
    }.get(variant.name, ("", ()))
    return accesses if dict(variant.macros).get(macro, "1") != "1" else ()


def test_every_kernel_is_compiled_and_held_to_what_it_is_for():
    """The few variants include one of every kernel, and one of every fast kernel that must not spill."""
    assert {variant.name for variant, _ in SOME_VARIANTS} == set(NAMES)
    assert {variant.name for variant, architecture in SOME_VARIANTS if is_fast(variant) and is_planned(variant, architecture)} == {
        "merge", "im2col", "epilogue", "epilogue_grad", "prologue_grad", "depthwise", "implicit_gemm", "conv_pair", "pool",
        "channels_last", "col2im", "tiles", "spectra", "spectra_gradient", "depthwise_weight_gradient", "implicit_weight_gradient",
        "pool_gradient", "recurrent_step", "recurrent_persistent", "recurrent_gradient", "recurrent_gradient_persistent",
        "recurrent_inputs", "depthwise_transposed",
    }  # fmt: skip
    assert {variant.name for variant, _ in SOME_VARIANTS if wide_accesses(variant)} == {"merge", "im2col", "epilogue"}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_fit_the_space_they_are_passed_in(name):
    assert PARAMETERS[name].itemsize <= PARAMETER_SPACE


@pytest.mark.parametrize("name", NAMES)
def test_fields_lie_where_numpy_puts_them(name):
    nvrtc.compile_source(*with_assertions(name, field_assertions(name)))


@pytest.mark.parametrize("name", NAMES)
def test_fields_lie_where_numpy_puts_them_on_the_host(name):
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    assertions = [*field_assertions(name), *constant_assertions(name)]
    check = compile_for_host(VARIANTS[name][0], assertions)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("name", NAMES)
def test_enumerations_and_limits_agree(name):
    nvrtc.compile_source(*with_assertions(name, constant_assertions(name)))


@pytest.mark.parametrize("kernel", VARIANTS["conv_pair"], ids=str)
def test_a_pair_lays_out_as_much_shared_memory_as_is_planned(kernel):
    """This is checked on the host, which compiles faster than NVRTC; the first variant is checked with both."""
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    check = compile_for_host(kernel, layout_assertions(kernel))
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("kernel", IMPLICIT_GEMM_LAYOUTS, ids=str)
def test_an_implicit_gemm_lays_out_as_much_shared_memory_as_is_planned(kernel):
    """This holds for every tile, with sums of 4 and of 8 bytes."""
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    macros = dict(kernel.macros)
    tile = int(macros["TILE_M"]), int(macros["TILE_N"])
    threads = (implicit_gemm.TILES | implicit_gemm.WIDE_TILES)[tile]
    planned = implicit_gemm.shared_bytes(tile, macros["ARITHMETIC"], accumulator(macros["DTYPE"]))
    check = compile_for_host(kernel, [f"static_assert(sizeof(Shared) == {planned} && THREADS == {threads});"])
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("kernel", RECURRENT_LAYOUTS, ids=str)
def test_a_recurrent_layer_lays_out_as_much_shared_memory_as_is_planned(kernel):
    """Checks the part that does not depend on the layer's size.

    Rows of the weight are stored behind it; of these, a layer without units has only the ends.
    """
    if build.unavailable():
        pytest.skip(str(build.unavailable()))
    macros, item = dict(kernel.macros), ITEMSIZE[dict(kernel.macros)["DTYPE"]]
    if kernel.name == "recurrent_gradient_persistent":
        gates, units = GATES[macros["CELL"].lower()], recurrent_gradient_cuda.UNITS
        without_units: Any = SimpleNamespace(gates=gates, hidden=0)
        planned = recurrent_gradient_cuda.shared_bytes(macros["DTYPE"], without_units) - gates * units**2 * item
        shared = "Shared"
    else:
        gates, is_resident = int(macros["GATES"]), kernel.name == "recurrent_persistent"
        tile = recurrence.Tile(macros["DTYPE"], macros["ARITHMETIC"], int(macros["SAMPLES"]), is_resident)
        planned = tile.shared_bytes(gates, gates, 0) - is_resident * gates * tile.units * VECTOR_BYTES
        shared = "Tile::Shared"
    check = compile_for_host(kernel, [f"static_assert(sizeof({shared}) == {planned});"])
    assert check.returncode == 0, check.stderr


def test_a_wrong_assertion_is_seen():
    """The checks above can fail: for a field one byte off, or an enumerator with another's number."""
    wrong_field = field_assertions("merge")[-1].replace(" == ", " == 1 + ", 1)
    wrong_code = "static_assert(int(cupyconv::TANH) == 0);"
    pair = VARIANTS["conv_pair"][0]
    wrong_layout = layout_assertions(pair)[-1].replace(" == ", " == 1 + ", 1)
    if build.unavailable() is None:
        assert "static assertion failed" in compile_for_host(pair, [wrong_layout]).stderr
    for wrong in (wrong_field, wrong_code):
        with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
            nvrtc.compile_source(*with_assertions("merge", [wrong]))
        if build.unavailable() is None:
            assert "static assertion failed" in compile_for_host(VARIANTS["merge"][0], [wrong]).stderr


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in VARIANTS["pool"] + VARIANTS["pool_gradient"] if dict(kernel.macros)["NUMBER"] != MEAN],
    ids=str,
)
def test_pooling_compares_without_flushing(kernel):
    """This concerns comparisons that choose an element, not checks for NaN (ordered or unordered, with infinity)."""
    ptx = nvrtc.compile_variant(kernel, ARCHITECTURES[0]).ptx
    assert re.search(r"setp\.(gt|eq)\.f(32|64)", ptx)
    assert not re.search(r"setp\.(gt|lt|eq|neu?)\.ftz", ptx)


def test_warnings_are_errors():
    source = 'extern "C" __global__ void kernel(int* out) { int unused = 1; *out = 0; }'
    nvrtc.compile_source(source.replace("int unused = 1;", ""), nvrtc.CHECK_OPTIONS, ARCHITECTURES[0])
    with pytest.raises(nvrtc.CompileError, match="unused"):
        nvrtc.compile_source(source, nvrtc.CHECK_OPTIONS, ARCHITECTURES[0])


def test_spills_are_seen():
    """128 values alive at once do not fit 32 registers."""
    source = """
        extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* data) {
            float v[128];
            #pragma unroll
            for (int i = 0; i < 128; ++i) v[i] = data[i * 1024 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 128; ++i) data[(127 - i) * 1024 + threadIdx.x] = v[i];
        }"""
    result = nvrtc.compile_source(source, nvrtc.CHECK_OPTIONS[:1], ARCHITECTURES[1])
    assert result.spills and result.stack and 0 < result.registers <= 32


def test_loads_by_the_read_only_path_are_seen():
    source = """extern "C" __global__ void kernel(float* __restrict__ out, const float* __restrict__ x) {
        out[threadIdx.x] = x[threadIdx.x];
    }"""
    assert re.search(READ_ONLY, nvrtc.compile_source(source, nvrtc.CHECK_OPTIONS, ARCHITECTURES[1]).ptx)
    without = source.replace("__restrict__", "")
    assert not re.search(READ_ONLY, nvrtc.compile_source(without, nvrtc.CHECK_OPTIONS, ARCHITECTURES[1]).ptx)


def test_no_variant_is_listed_twice():
    assert len(set(all_variants())) == len(all_variants())
    assert {variant.name for variant in all_variants()} == set(PARAMETERS)


def test_an_edited_header_changes_the_options(tmp_path):
    """A compile cache knows only the options and the one file given to it, so the hash must be among the options."""
    copy = tmp_path / "kernels"
    shutil.copytree(kernel_directory(), copy)
    assert source_hash(copy) == source_hash()
    before = compile_options((), copy)
    for header in sorted(copy.glob("*.cuh")):
        original = header.read_bytes()
        header.write_bytes(original + b"\n// edited\n")
        assert source_hash(copy) != source_hash(), header.name
        assert compile_options((), copy) != before, header.name
        header.write_bytes(original)
    assert compile_options((), copy) == before
    (copy / "numeric.cuh").rename(copy / "renamed.cuh")
    assert source_hash(copy) != source_hash()


# Assertions about the parameter structs.

#: The struct that a kernel takes by value, and whether a field is a pointer, an integer or a floating-point number.
DECLARATIONS = """
template <class P> P parameter_of(void (*)(P));
using Params = decltype(parameter_of(&{kernel}));
template <class T> constexpr char KIND = '?';
template <class T> constexpr char KIND<T&> = KIND<T>;
template <class T> constexpr char KIND<T*> = 'u';
template <> constexpr char KIND<int> = 'i';
template <> constexpr char KIND<long long> = 'i';
template <> constexpr char KIND<double> = 'f';
#ifdef __CUDACC_RTC__  // older releases have only the one that offsetof was made of
#define OFFSET_OF(field) __INTADDR__(&static_cast<Params*>(nullptr)->field)
#else
#define OFFSET_OF(field) __builtin_offsetof(Params, field)
#endif
"""


def with_assertions(name: str, assertions: list[str]) -> tuple[str, tuple[str, ...], int]:
    """Return a kernel's first variant followed by assertions, as arguments of `nvrtc.compile_source`."""
    source = "\n".join([kernel_source(name), DECLARATIONS.format(kernel=name), *assertions])
    return source, (*compile_options(VARIANTS[name][0].macros), *nvrtc.CUPY_OPTIONS), ARCHITECTURES[1]


def compile_for_host(kernel: Kernel, assertions: list[str]) -> subprocess.CompletedProcess[str]:
    """Compile the same translation unit with the host's C++ compiler, without output."""
    source = "\n".join([f'#include "{kernel.name}.cu"', DECLARATIONS.format(kernel=kernel.name), *assertions])
    flags = [*build.COMMON_FLAGS, *build.KERNEL_FLAGS, f"-I{kernel_directory()}", f"-I{build.HERE}"]
    flags += [f"-D{macro}={value}" for macro, value in kernel.macros]
    command = [*build.compiler(), *flags, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def field_assertions(name: str) -> list[str]:
    """Return assertions about size, offset and kind of every field of a kernel's parameters, down to the scalars."""
    dtype = PARAMETERS[name]
    return [
        f"static_assert(sizeof(Params) == {dtype.itemsize});",
        *(assertion for path, field, offset in fields(dtype) for assertion in _field_assertions(path, field, offset)),
    ]


def _field_assertions(path: str, field: np.dtype, offset: int) -> Iterator[str]:
    expression = f"static_cast<Params*>(nullptr)->{path}"
    yield f'static_assert(OFFSET_OF({path}) == {offset}, "offset of {path}");'
    yield f'static_assert(sizeof({expression}) == {field.itemsize}, "size of {path}");'
    if field.names is None and field.subdtype is None:
        yield f"static_assert(KIND<decltype(({expression}))> == '{field.kind}', \"kind of {path}\");"


def fields(dtype: np.dtype, path: str = "", base: int = 0) -> Iterator[tuple[str, np.dtype, int]]:
    """Yield everything inside a dtype as (C++ path, dtype, offset); for an array, its first two and last elements."""
    parts: list[tuple[str, np.dtype, int]] = []
    if dtype.subdtype is not None:
        item, (count,) = dtype.subdtype
        parts = [(f"{path}[{i}]", item, i * item.itemsize) for i in sorted({0, 1, count - 1})]
    elif dtype.names is not None:
        parts = [(f"{path}.{name}".lstrip("."), *dtype.fields[name][:2]) for name in dtype.names]
    for inner, field, offset in parts:
        yield inner, field, base + offset
        yield from fields(field, inner, base + offset)


def constant_assertions(name: str) -> list[str]:
    """Return assertions about numbers that C++ and Python both define, in the headers that this kernel includes."""
    assertions: list[str] = []
    if not name.startswith("recurrent_") or name == "recurrent_inputs":  # the others have no images
        assertions = [f"static_assert(cupyconv::MAX_SOURCES == {MAX_SOURCES});"]
        assertions += [
            f"static_assert(int(cupyconv::{mode.upper()}) == {code});" for code, mode in enumerate(PADDING_MODES)
        ]
    if name == "merge":
        assertions += [
            f"static_assert(cupyconv::MAX_MERGED == {MAX_MERGED});",
            f"static_assert(DEPTH == {merge.DEPTH} && BLOCK == {merge.BLOCK} && cupyconv::WARP == {WARP});",
        ]
    if name == "conv_pair":
        assertions += layout_assertions(VARIANTS[name][0])
        assertions += [
            f"static_assert(cupyconv::MAX_PAIR_SOURCES == {MAX_PAIR_SOURCES});",
            f"static_assert(sizeof(Tables) == {conv_pair.TABLES} && cupyconv::TILE_THREADS == {conv_pair.THREADS});",
            f"static_assert(PIXELS == {conv_pair.PIXELS} && MIDDLE_PIXELS == {conv_pair.MIDDLE_PIXELS});",
            f"static_assert(CHUNK * sizeof(T) == {conv_pair.CHUNK_BYTES} && PITCH * sizeof(T) == {conv_pair.PITCH_BYTES});",
            f"static_assert(PART == {conv_pair.PART} && EPILOGUE_PITCH == {conv_pair.EPILOGUE_PITCH});",
            f"static_assert(OUTPUTS * sizeof(A) == {conv_pair.OUTPUTS_BYTES});",
        ]
    if name == "col2im":
        assertions += [f"static_assert(CHANNELS == {COL2IM_CHANNELS});"]
    if name == "channels_last":
        assertions += [
            f"static_assert(THREADS == {channels_last.THREADS} && VECTORS == {channels_last.TILE_VECTORS} * VECTOR);"
        ]
    if name == "depthwise_weight_gradient":
        assertions += [
            f"static_assert(MAX_BLOCK == {depthwise_weight_gradient.THREADS} && ROWS == {depthwise.ROWS[1]});"
        ]
    if name == "depthwise_transposed":
        assertions += [f"static_assert(ROWS == {depthwise_transposed.ROWS} && STRIDE == 2);"]
    if name == "implicit_weight_gradient":
        assertions += [
            f"static_assert(WARP_ROWS == 64 && WARP_COLUMNS == 32 && STAGES == {implicit_weight_gradient.STAGES});",
            f"static_assert(THREADS == {implicit_weight_gradient.TILES[64, 128]});",
            f"static_assert(STAGES * sizeof(Stage) == {implicit_weight_gradient.shared_bytes((64, 128))});",
        ]
    if name == "recurrent_gradient":
        assertions += [
            f"static_assert(TILE == {recurrent_gradient_cuda.TILE} && BLOCK == {recurrent_gradient_cuda.THREADS});"
        ]
    if name == "recurrent_gradient_persistent":
        assertions += [
            f"static_assert(ROWS == {recurrent_gradient_cuda.ROWS} && UNITS == {recurrent_gradient_cuda.UNITS});",
            f"static_assert(PITCH == {recurrent_gradient_cuda.PITCH} && WARPS == {recurrent_gradient_cuda.WARPS});",
            f"static_assert(BLOCK == {recurrent_gradient_cuda.THREADS} && APART == {recurrence.COUNTERS_APART});",
        ]
    if name not in (
        "im2col",
        "col2im",
        "channels_last",
        "spectra",
        "spectra_gradient",
        "finish_weight_tiles",
        "pack_weight",
        "exchange_weight",
        "pool",
        "pool_gradient",
        "weight_gradient",
        "depthwise_weight_gradient",
        "implicit_weight_gradient",
        "recurrent_inputs",
    ):  # these have no epilogue
        codes = {
            "identity": activations.IDENTITY.code,
            **{key: code for key, (code, _) in (activations.TABLE | activations.RECURRENT_ONLY).items()},
        }
        assertions += [f"static_assert(int(cupyconv::{key.upper()}) == {code});" for key, code in codes.items()]
    return assertions


def layout_assertions(kernel: Kernel) -> list[str]:
    """Return assertions about the bytes of conv_pair.cu's shared memory, for small and large values of its inputs."""
    dtype, arithmetic, *kinds = (value for _, value in kernel.macros)
    counts = product(((1, 1), (9, 2)), ((1, 1), (3, 2)), (1, 3), ((1, 1), (700, 300)))
    return [
        f"static_assert(SharedLayout({', '.join(map(str, (*taps, *chunks, tiles, *pixels)))}).end == "
        f"{conv_pair.shared_bytes(dtype, arithmetic, tuple(kinds), taps, chunks, tiles, pixels)});"
        for taps, chunks, tiles, pixels in counts
    ]


def parameter_bytes(ptx: str, entry: str) -> list[int]:
    """Return the sizes of an entry point's parameters."""
    declaration = re.search(rf"\.entry {entry}\((.*?)\)", ptx, re.DOTALL)
    assert declaration is not None
    return [int(size) for size in re.findall(r"\.param [^,]*?\.b8 \w+\[(\d+)\]", declaration.group(1))]
