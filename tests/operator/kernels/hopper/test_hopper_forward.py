"""Test the Hopper forward: its machine code and its plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from machine_code import (
    WGMMA_LETTERS,
    letters,
    no_step_looks_up,
    nothing_is_spilled,
    roles_have_their_registers,
)

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.architecture import tuned
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.proof.plans import describe
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.timing.machine_code.sass import disassemble

pytestmark = pytest.mark.simulator

FULL = ProblemClass(torch.bfloat16)
WINDOW = replace(FULL, bounded_left=True, bounded_right=True)
#: Options that add most to a thread's registers.
EVERYTHING = replace(
    WINDOW, negative_scale=True, softcap=True, sink=True, packed_heads=8, use_clc=True,
    ragged=("cu_seqlens_q", "cu_seqlens_k"),
)  # fmt: skip
#: Configurations that a call may get by default, and a cluster that shares its loads.
LONG, SHORT = ForwardConfig(), ForwardConfig(block_kv=64)
KERNELS = {
    "long": (LONG, FULL),
    "short": (SHORT, FULL),
    "window": (SHORT, WINDOW),
    "everything": (SHORT, EVERYTHING),
    "long, everything": (LONG, EVERYTHING),
    "pair": (ForwardConfig(ctas=2), WINDOW),
}


def function_of(name: str):
    """Return (kernel, its only function)."""
    config, problem_class = KERNELS[name]
    spec = KernelSpec("forward", config, problem_class, named("sm_90a"))
    kernel = compile_kernel(spec)
    (function,) = disassemble(kernel.cubin).values()
    return kernel, function


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled("everything")
def test_no_register_is_spilled_and_every_role_has_those_it_names(name):
    kernel, function = function_of(name)
    plan = ForwardConfig().warps.registers
    nothing_is_spilled(kernel, plan)
    roles_have_their_registers(function, plan)


@pytest.mark.parametrize("name", [name for name, (_, one) in KERNELS.items() if one.ragged])
@pytest.mark.sampled("everything")
def test_no_step_looks_up_where_a_packed_sequence_lies(name):
    no_step_looks_up(function_of(name)[1])


#: A step: all of QK and of PV in a row, a wait that leaves PV in flight, exponentials and the
#: barrier of the next V, and only then the wait for PV.
STEP = re.compile("FS{16}b?F?O+W([xb]*)W")


def hidden_exponentials(code: str) -> list[int]:
    """Count the exponentials of each loop that PV hides; code: a kernel in letters."""
    return [between.count("x") for between in STEP.findall(code)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled("everything")
def test_products_stay_in_flight_and_hide_the_exponentials(name):
    """ptxas puts a wait behind every product where registers do not suffice, and moves
    exponentials behind the wait for PV; in each of the loops."""
    _, function = function_of(name)
    code = letters(function.instructions, WGMMA_LETTERS)
    config, problem_class = KERNELS[name]
    loops = 3 if problem_class.bounded_left else 2
    most = 0.75 * config.block_kv / 2
    hidden = hidden_exponentials(code)
    assert len(hidden) == loops and min(hidden) > most, code
    # Such as they would be.
    assert hidden_exponentials(code.replace("SS", "SWS")) == []
    assert max(hidden_exponentials(re.sub("x{10}([xb]*)W", r"W\1", code))) < max(hidden)


@pytest.mark.parametrize(
    "causal, seqlen_k, keys",
    [(True, 16384, 64), (False, 16384, 80), (False, 1024, 80), (False, 512, 64), (False, 1, 64)],
)
def test_the_default_wastes_little_of_the_last_step(causal, seqlen_k, keys):
    found = tuned(ForwardConfig().tiles, causal, seqlen_k, "H200", paged=False)
    assert found.block_kv == keys


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        ForwardConfig(block_kv=128)
    with pytest.raises(ValueError, match="block_kv is 72; accepted are multiples of 16"):
        ForwardConfig(block_kv=72)
    with pytest.raises(ValueError, match="v_stages is 1"):
        ForwardConfig(v_stages=1)
    with pytest.raises(ValueError, match="ctas is 4; accepted are 1 and 2"):
        ForwardConfig(ctas=4)
    with pytest.raises(ValueError, match="rescale_threshold is 16"):
        ForwardConfig(rescale_threshold=16.0)
    assert "k_free" in describe(kernels_of(named("sm_90a")), ForwardConfig())


@pytest.fixture
def sanitized(monkeypatch):
    """Return (out, findings) of a causal call on Hopper under the sanitizer."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:4")

    def findings(config: ForwardConfig, seqlen: int = 330, use_clc: bool = False) -> tuple:
        q, k, v = (torch.randn(1, seqlen, 2, 256, dtype=torch.bfloat16) for _ in range(3))
        out = flash_attn_func(q, k, v, causal=True, config=config, use_clc=use_clc)
        return out, sm100_sim.last_reports()[-1].findings

    return findings


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("config", [LONG, SHORT, ForwardConfig(ctas=2)], ids=repr)
@pytest.mark.sampled("*block_kv=80,*ctas=1,*-static")
def test_no_findings(sanitized, config, use_clc):
    """The sanitizer finds nothing in calls with several tiles per CTA, with steps that a warpgroup
    leaves out, and with loads for a cluster."""
    out, findings = sanitized(config, 700, use_clc)
    assert out.isfinite().all() and findings == []


@pytest.mark.sampled
def test_no_row_of_a_result_divides():
    """With KV splits the consumers divide a tile's batch entry by their number once, not for each
    row and result.  The load warp has two divisions: of the batch entry, and of the head."""
    problem_class = replace(FULL, bounded_right=True, split=True, fixed_parts=True)
    kernel = compile_kernel(KernelSpec("forward", SHORT, problem_class, named("sm_90a")))
    assert len(re.findall(r"\bdiv\.[su]32\b", kernel.ptx)) == 3


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_the_same_bits_under_both_schedulers(num_splits, monkeypatch):
    """Tiles of several lengths give the same bits on fewer SMs, in whatever order SMs take them."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    q, k, v = (torch.randn(1, 700, 2, 256, dtype=torch.bfloat16) for _ in range(3))
    options = {"causal": True, "num_splits": num_splits, "return_lse": True}
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:132")
    expected = flash_attn_func(q, k, v, **options, use_clc=False)
    for sms in (2, 5):
        monkeypatch.setenv("SM100_SIM_DEVICE", f"h200:{sms}")
        for use_clc in (False, True):
            found = flash_attn_func(q, k, v, **options, use_clc=use_clc)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
