"""Machine code is read correctly, and that of typical calls is no worse than machine_code.json says.

Releases of the compiler differ slightly, and so do two versions of the same loop.  The tests therefore check four
facts: no more spills, as many blocks fit, a byte of L2 serves as many operations, and instructions stay within a tenth.
If figures are worse for a reason, renew them with ``python -m tests.machine_code --write``.  Renew better ones too, so
that they are not lost.
"""

from __future__ import annotations

import re

import pytest

from cupyconv.cuda.plan import cost, implicit_gemm
from cupyconv.cuda.plan.launches import WARP
from cupyconv.cuda.plan.packed_weight import SLAB_BYTES
from cupyconv.problem.arrays import ITEMSIZE
from tests import machine_code, nvrtc

nvrtc.require(machine_code.unavailable)
pytestmark = pytest.mark.nvrtc

#: `SOME` has two of them for every run; ``--nightly`` checks all.
EVERY = [(name, arch) for name in machine_code.TYPICAL for arch in machine_code.ARCHITECTURES]
SOME = [("lstm 256, float16", "sm_90"), ("linmerge, float32", "sm_80")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        metafunc.parametrize(("name", "arch"), EVERY if metafunc.config.getoption("--nightly") else SOME)


def test_machine_code_has_not_become_worse(name, arch):
    before, now = machine_code.written()[name][arch], machine_code.summaries(name, arch)
    assert set(now) == set(before), "other kernels than were written down: python -m tests.machine_code --write"
    for kernel, figures in now.items():
        assert worse(figures, before[kernel]) == [], kernel


def worse(now: dict, before: dict) -> list[str]:
    """Return which figures are worse than before, and by how much."""
    found = [f"{name} {now[name]}, were {before[name]}" for name in ("spills",) if now[name] > before[name]]
    found += [
        f"{name} {now.get(name)}, were {before[name]}"
        for name in ("blocks", "FLOP/B")
        if name in before and now.get(name, 0) < before[name]
    ]
    for part in ("code", "round", "inner loop"):
        for kind, count in now[part].items():
            known = before[part].get(kind, 0)
            if count > known + max(4, known // 10):
                found.append(f"{kind} of {part} {count}, were {known}")
    return found


def test_the_model_knows_what_a_warp_issues_for_a_slab():
    """`cost.ISSUED` is within an eighth of the instructions of each recorded implicit GEMM's products."""
    compared = set()
    for call in machine_code.written().values():
        for name, figures in call["sm_90"].items():
            kernel, *macros = re.findall(r"\w+", name)
            if kernel != "implicit_gemm" or macros[0] == "complex64":  # a round of complex64 multiplies twice
                continue
            dtype, arithmetic, *size, gather = macros
            tile, itemsize = (int(size[0]), int(size[1])), ITEMSIZE[dtype]
            warps = (implicit_gemm.TILES | implicit_gemm.WIDE_TILES)[tile] // WARP
            one = {2: 16, 4: 8, 8: 4}[itemsize] * 16 * 8 * warps  # multiply-adds of one instruction of every warp
            parts = 3 if arithmetic == "TF32X3" else 1
            products = parts * tile[0] * tile[1] * (SLAB_BYTES // itemsize) // one
            once, inner = figures["round"], figures["inner loop"]
            slab = once["instructions"] + (products - once["mma"]) // inner["mma"] * inner["instructions"]
            known = cost.ISSUED[arithmetic, itemsize, gather][tile]
            assert abs(slab - known) <= known / 8, f"{name}: {slab} where the model has {known}"
            compared.add((arithmetic, itemsize))
    assert compared == {("MMA", 2), ("TF32", 4), ("TF32X3", 4), ("MMA", 8)}


def test_what_is_worse_is_found():
    figures = {
        "spills": 0,
        "blocks": 2,
        "FLOP/B": 96.0,
        "code": {"instructions": 1000},
        "round": {"instructions": 300, "mma": 64},
        "inner loop": {"instructions": 100, "mma": 16},
    }
    assert worse(figures, figures) == []
    assert worse({**figures, "spills": 8, "blocks": 1}, figures) == ["spills 8, were 0", "blocks 1, were 2"]
    assert worse({**figures, "FLOP/B": 64.0}, figures) == ["FLOP/B 64.0, were 96.0"]
    longer = {"instructions": 331, "mma": 64}
    assert worse({**figures, "round": longer}, figures) == ["instructions of round 331, were 300"]
    slower = {"instructions": 111, "mma": 16, "float64": 5}
    assert worse({**figures, "inner loop": slower}, figures) == [
        "instructions of inner loop 111, were 100", "float64 of inner loop 5, were 0"
    ]  # fmt: skip


SOURCE = """
extern "C" __global__ void kernel(double* out, const float* x, int rows, int columns, int divisor) {
    __shared__ float row[256];
    float sum = 0;
    for (int i = 0; i < rows; ++i) {
        __syncthreads();
        row[threadIdx.x] = x[i * blockDim.x + threadIdx.x];
        __syncthreads();
#pragma unroll 1
        for (int j = 0; j < columns; ++j) sum = fmaf(row[j], row[j] + 1.0f, sum);
    }
    if (divisor) out[threadIdx.x] = double(sum) * out[threadIdx.x / divisor];
}
"""


@pytest.mark.parametrize("architecture", [75, 90, 120])
def test_loops_are_found_in_the_control_flow(architecture):
    compiled = nvrtc.compile_source(SOURCE, nvrtc.CHECK_OPTIONS, architecture)
    listing = machine_code.listing(compiled.cubin)
    outer, inner = listing.loops
    assert (outer.depth, inner.depth) == (0, 1)
    assert (outer.counts["barrier"], outer.counts["global"], outer.counts["fma"]) == (2, 1, 1)
    assert (inner.counts["barrier"], inner.counts["global"], inner.counts["fma"]) == (0, 0, 1)
    assert inner.counts["shared"] == 1 and outer.counts["shared"] == 2
    assert 4 <= inner.counts["instructions"] < outer.counts["instructions"] < listing.counts()["instructions"]
    assert listing.counts()["float64"] == 2  # a conversion and a product
    assert (
        listing.counts()["reciprocal"] == 1 and listing.counts()["global"] == 3
    )  # one reciprocal for the division; two loads and one store
    assert outer.counts["float64"] == outer.counts["reciprocal"] == 0


def test_a_loop_whose_branch_is_a_table_is_one():
    """Code as the disassembler writes it: unordered blocks, a jump by a table, a branch with its condition behind."""
    listing = machine_code.Listing(
        """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   BRX R2 -0x20                        (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_2:
        /*0020*/                   BRA P1, `(.L_x_1) ;
        /*0030*/               @P0 EXIT ;
        /*0040*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0050*/                   MUFU.RCP R3, R3 ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*0070*/                   BRA `(.L_x_4);
        /*0080*/                   NOP;
"""
    )
    (loop,) = listing.loops
    assert loop.counts == {"instructions": 4, "reciprocal": 1}
    assert loop.round == {"instructions": 2}  # without the reciprocal
    assert listing.counts()["instructions"] == 8


def test_a_round_multiplies_and_loads_the_most_on_the_shortest_way():
    """Of two paths with as many loads, the round is the shorter one; paths that skip some or all loads are no round."""
    listing = machine_code.Listing(
        """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0008*/               @P0 BRA `(.L_x_5) ;
        /*0010*/               @P1 BRA `(.L_x_2) ;
        /*0020*/               @P2 BRA `(.L_x_3) ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0040*/                   IMAD R2, R3, R4, R2 ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R1+0x10], [R2.64] ;
        /*0060*/                   BRA `(.L_x_4) ;
.L_x_2:
        /*0070*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0080*/                   LDGSTS.E.BYPASS.128 [R1+0x10], [R2.64] ;
        /*0090*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*00a0*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
.L_x_4:
        /*00b0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00c0*/               @P3 BRA `(.L_x_4) ;
.L_x_5:
        /*00d0*/               @P4 BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
"""
    )
    outer, inner = listing.loops
    assert outer.round == {"instructions": 8, "copy": 2, "mma": 1}
    assert inner.round == inner.counts == {"instructions": 2, "mma": 1}
    assert outer.counts["instructions"] == 14


def test_a_round_of_a_recurrent_layer_has_its_gates():
    """Of two paths with as many loads and no calls, the round has the gates, though the other one is shorter."""
    listing = machine_code.Listing(
        """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/               @P0 BRA `(.L_x_3) ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   MUFU.EX2 R2, R2 ;
        /*0050*/                   MUFU.RCP R2, R2 ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   MUFU.EX2 R2, R2 ;
        /*0080*/                   MUFU.EX2 R2, R2 ;
        /*0090*/                   CALL.REL.NOINC `($curve) ;
.L_x_3:
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""
    )
    (loop,) = listing.loops
    assert loop.round == {"instructions": 7, "mma": 1, "reciprocal": 1}


def test_a_part_of_the_function_that_is_called_is_a_branch():
    """ptxas writes this for sm_80; without an edge for the call, the loop behind it could be entered in the middle."""
    listing = machine_code.Listing(
        """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/               @P0 CALL.REL.NOINC `(.L_x_2) ;
        /*0020*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   BSYNC B0 ;
.L_x_3:
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
        /*0060*/                   EXIT ;
"""
    )
    (loop,) = listing.loops
    assert loop.counts == {"instructions": 4, "call": 1} and loop.round["instructions"] == 3
