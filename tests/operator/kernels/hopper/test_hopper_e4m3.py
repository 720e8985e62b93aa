"""Hopper's decode kernel for keys and values in e4m3: its machine code, and mistakes planted in it.

What calls get from it is in tests/operator/cache/test_e4m3.py.
"""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import E4M3, accurate, codes, exact
from machine_code import nothing_is_spilled, roles_have_their_registers

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.decode import e4m3_fragments
from fa4_hd256.kernels.hopper.decode import kernel as decode_kernel
from fa4_hd256.kernels.hopper.decode.config import DECODE_E4M3, E4m3WarpPlan
from fa4_hd256.kernels.problem_class import OF_PAGES, OF_SEQUENCES, ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.timing.machine_code.sass import disassemble

pytestmark = pytest.mark.simulator

CLASSES = {
    "causal": {"bounded_right": True, "descale": OF_SEQUENCES},
    "pages": {
        "bounded_left": True, "bounded_right": True, "softcap": True, "sink": True,
        "ragged": ("cu_seqlens_q", "seqused_k", "page_table"), "use_clc": True, "split": True,
        "page_size": 16, "descale": OF_PAGES,
    },
}  # fmt: skip


def compiled(config, name):
    heads = config.rows // 2
    problem = ProblemClass(torch.bfloat16, packed_heads=heads, kv_dtype=E4M3, **CLASSES[name])
    return compile_kernel(KernelSpec("forward_decode_e4m3", config, problem, named("sm_90a")))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("config", DECODE_E4M3, ids=lambda config: str(config.rows))
@pytest.mark.sampled
def test_machine_code(config, name):
    """Registers within the budgets, nothing spilled; and products are under way together: where
    ptxas cannot tell registers apart it fences and awaits each by itself."""
    kernel = compiled(config, name)
    plan = config.warps.registers
    nothing_is_spilled(kernel, plan)
    (function,) = disassemble(kernel.cubin).values()
    roles_have_their_registers(function, plan)
    opcodes = [i.opcode.split(".")[0] + "." * ("ARRIVE" in i.opcode) for i in function.instructions]
    loops = 2 + ("bounded_left" in CLASSES[name])
    assert opcodes.count("HGMMA") == 32 * loops
    # Groups of four parts of QK, and of PV.
    assert opcodes.count("WARPGROUP.") == 5 * loops


@pytest.mark.parametrize(
    ("plan", "named"),
    [({"consumers": (0, 1, 2, 3)}, "consumers is"), ({"queries": 8}, "queries 8; accepted"),
     ({"load": 12}, "load 12"), ({"scheduler": 3}, "scheduler 3")],
    ids=str,
)  # fmt: skip
def test_plans_whose_warps_could_not_do_it_are_refused(plan, named):
    with pytest.raises(ValueError, match=named):
        E4m3WarpPlan(**plan)
    assert E4m3WarpPlan(load=10, queries=8).scheduled_warps == 11


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")


def call():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 256).bfloat16()
    keys = [codes(1, 300, 1, 256) for _ in "kv"]
    found = flash_attn_func(q, *keys, causal=True, num_splits=1, return_lse=True)
    return found, q, exact(keys, None)


def _no_barrier(threads):
    return None


def _early(real):
    """Buffers of V are given back before they are read."""

    def load(self, context, kv):
        context.barriers["kv_loaded"].wait(kv)
        context.barriers["kv_free"].arrive(kv)
        return real(self, context, kv)

    return load


@pytest.mark.parametrize("bug", ["barrier", "fence", "free"])
@pytest.mark.sampled
def test_the_sanitizer_finds_what_is_missing(bug, planted, hopper, sanitize):
    """A barrier of the softmax; the fence behind P and Q; a buffer given back too early."""
    sanitize(1, clusters=2)
    if bug == "barrier":
        planted.setattr(decode_kernel, "synchronise", _no_barrier)
    if bug == "fence":
        planted.setattr(decode_kernel.cute.arch, "fence_view_async_shared", lambda: None)
    if bug == "free":
        kernel = decode_kernel.DecodeE4m3Kernel
        planted.setattr(kernel, "_load_values", _early(kernel._load_values))
    try:
        call()
    except Exception as error:
        assert type(error).__module__.startswith("sm100_sim"), error
    else:
        assert sm100_sim.last_reports()[-1].findings


def _pairs_of_others(number, first, second):
    """Keys of a pair exchanged."""
    return REAL_PAIRS(number, second, first)


def _other_slices(self, context, row, elements, stage):
    """Q in the order of its columns."""
    return REAL_ROW(self, context, row, elements[2:] + elements[:2], stage)


REAL_PAIRS, REAL_ROW = e4m3_fragments.pair_of, decode_kernel.DecodeE4m3Kernel._store_row


@pytest.mark.parametrize("bug", ["pairs", "columns", None])
@pytest.mark.sampled
def test_results_notice_another_order(bug, planted, hopper):
    """Pairs of keys of V, or columns of Q, that are not those of P and of K."""
    if bug == "pairs":
        planted.setattr(e4m3_fragments, "pair_of", _pairs_of_others)
    if bug == "columns":
        planted.setattr(decode_kernel.DecodeE4m3Kernel, "_store_row", _other_slices)
    found, q, values = call()
    if bug is None:
        accurate(found, q, values, causal=True)
        return
    with pytest.raises(AssertionError, match="max_error"):
        accurate(found, q, values, causal=True)
