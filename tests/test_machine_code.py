"""Machine code is read right, and that of typical calls has not become worse than machine_code.json says.

The compiler's releases differ a little, and so do two writings of the same loop: what is held is that nothing spills,
that as many blocks fit, that a byte of L2 serves as many operations, and that instructions stay within a tenth.
Figures that are worse for a reason are renewed by ``python -m tests.machine_code --write``, and so are better ones,
lest they get lost.
"""

from __future__ import annotations

import pytest

from tests import machine_code, nvrtc

nvrtc.require(machine_code.unavailable)
pytestmark = pytest.mark.nvrtc

#: Two of them in every run, with ``--nightly`` all.
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
    """What is worse than it was, by how much."""
    found = [f"{name} {now[name]}, were {before[name]}" for name in ("spills",) if now[name] > before[name]]
    found += [
        f"{name} {now.get(name)}, were {before[name]}"
        for name in ("blocks", "FLOP/B")
        if name in before and now.get(name, 0) < before[name]
    ]
    for part in ("code", "inner loop"):
        for kind, count in now[part].items():
            known = before[part].get(kind, 0)
            if count > known + max(4, known // 10):
                found.append(f"{kind} of {part} {count}, were {known}")
    return found


def test_what_is_worse_is_found():
    figures = {
        "spills": 0,
        "blocks": 2,
        "FLOP/B": 96.0,
        "code": {"instructions": 1000},
        "inner loop": {"instructions": 100, "mma": 16},
    }
    assert worse(figures, figures) == []
    assert worse({**figures, "spills": 8, "blocks": 1}, figures) == ["spills 8, were 0", "blocks 1, were 2"]
    assert worse({**figures, "FLOP/B": 64.0}, figures) == ["FLOP/B 64.0, were 96.0"]
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
    )  # of the division; the loads, the store
    assert outer.counts["float64"] == outer.counts["reciprocal"] == 0


def test_a_loop_whose_branch_is_a_table_is_one():
    """Code as the disassembler writes it: blocks out of order, a jump by a table, a branch with its condition behind."""
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
    assert listing.counts()["instructions"] == 8
