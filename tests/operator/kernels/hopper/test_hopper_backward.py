"""The Hopper backward: its machine code, what the sanitizer says of it, and its plans."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from backward_cases import accurate, gradients, inputs
from machine_code import (
    WGMMA_LETTERS,
    letters,
    no_step_looks_up,
    nothing_is_spilled,
    roles_have_their_registers,
)

import sm100_sim
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.backward.config import (
    BackwardConfig,
    DvPlan,
    ProductsPlan,
    SinglePlan,
)
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.operands import EVICT_LAST
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.kernels.proof.plans import describe
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.timing.machine_code.sass import disassemble

pytestmark = pytest.mark.simulator

HOPPER = named("sm_90a")
STORED, RECOMPUTED = BackwardConfig(), BackwardConfig(ds_bytes=0)

FULL = ProblemClass(torch.bfloat16)
CAUSAL = replace(FULL, bounded_right=True, use_clc=True)
PACKED = replace(CAUSAL, bounded_left=True, ragged=("cu_seqlens_q", "cu_seqlens_k"))
CAPPED = replace(FULL, bounded_left=True, bounded_right=True, softcap=True, negative_scale=True)
CLASSES = {"full": FULL, "causal": CAUSAL, "packed": PACKED, "capped": CAPPED}
KINDS = ("dv", "products", "single_dq", "single_dk", "single_dv")


def function_of(kind: str, name: str):
    """Return (kernel, its only function, its plan)."""
    kind = f"backward_{kind}"
    config = STORED.of_kernel(kind)
    kernel = compile_kernel(KernelSpec(kind, config, GradientClass(CLASSES[name]), HOPPER))
    (function,) = disassemble(kernel.cubin).values()
    return kernel, function, config.plan


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled("dv-packed", "products-capped")
def test_no_register_is_spilled_and_every_role_has_those_it_names(kind, name):
    if kind == "products" and name == "capped":
        pytest.skip("has no scores")
    kernel, function, plan = function_of(kind, name)
    nothing_is_spilled(kernel, plan.warps.registers)
    roles_have_their_registers(function, plan.warps.registers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled("dv")
def test_no_step_looks_up_where_a_packed_sequence_lies(kind):
    no_step_looks_up(function_of(kind, "packed")[1])


LETTERS = {**WGMMA_LETTERS, "STG": "s"}
#: A step of the loop: three products in a row; dS to memory before the wait for S, exponentials
#: before that for dV.
STEP = re.compile("FS{16}b?FS{16}b?FO{4}W([sb]*)W([xb]*)W")
#: One gradient by itself: S, dP (not for dV) and the sum, then exponentials before the wait for it.
SINGLE_STEP = re.compile("FS{16}b*(?:FS{16}b*)?FO{4}W([xb]*)W")


@pytest.mark.parametrize("name", ["full", "packed"])
@pytest.mark.sampled
def test_products_stay_in_flight_and_hide_the_arithmetic(name):
    """ptxas puts a wait behind every product where registers do not suffice, and moves arithmetic
    behind the wait for the product that hides it."""
    code = letters(function_of("dv", name)[1].instructions, LETTERS)
    ((stores, exponentials),) = STEP.findall(code)
    assert stores.count("s") == 16 and exponentials.count("x") == 32
    assert STEP.findall(code.replace("SS", "SWS")) == []
    for kind in KINDS[2:]:
        code = letters(function_of(kind, name)[1].instructions, LETTERS)
        (exponentials,) = SINGLE_STEP.findall(code)
        assert exponentials.count("x") == 32, kind


def hints(ptx: str) -> set[int]:
    """Cache hints of the TMA loads of boxes, one each; 0 says nothing."""
    loads = re.findall(r"cp\.async\.bulk\.tensor[^;]*;", ptx)
    registers = {re.search(r"L2::cache_hint.*, (%rd\d+);", load)[1] for load in loads}
    return {int(re.search(rf"mov\.b64\s+{name}, (\d+);", ptx)[1]) for name in registers}


@pytest.mark.sampled
def test_what_l2_gives_up_first_and_last():
    """First dS as it is stored, and it alone; last Q and K of the products, and no dS of theirs."""
    dv, products = (function_of(kind, "causal")[0].ptx for kind in ("dv", "products"))
    stores = set(re.findall(r"st\.global[.\w]*", dv))
    of_ds = [name for name in stores if ".b32" in name and ".v" not in name]
    assert of_ds == ["st.global.cs.b32"] == [name for name in stores if ".cs" in name]
    assert "st.global.cs" not in products
    # Q of the next step is requested of L2 ahead.
    assert "cp.async.bulk.prefetch.tensor" in dv
    assert (hints(dv), hints(products)) == ({0}, {EVICT_LAST})
    (of_tiles,) = re.findall(r"cp\.async\.bulk\.shared[^;]*;", products)
    assert "L2::cache_hint" not in of_tiles


# Several tiles either way, with rests; one cluster works on all of them, or each on its own.
@pytest.mark.parametrize("config", [STORED, RECOMPUTED], ids=["stored", "recomputed"])
@pytest.mark.parametrize(("seed", "sms"), [(None, 132), (1, 2), (2, 4)])
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "counted"])
@pytest.mark.sampled
def test_no_findings(config, seed, sms, use_clc, monkeypatch, sanitize):
    """No race, lifetime error or missing fence that the sanitizer sees, whatever the schedule."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    sanitize(seed, device=f"h200:{sms}")
    torch.manual_seed(0)
    tensors = inputs((300, 330), (2, 1))
    dout = torch.randn_like(tensors[0])
    options = {"causal": True, "use_clc": use_clc}
    found = gradients(tensors, dout, backward_config=config, **options)
    kernels = 3 if config is STORED else 4
    reports = sm100_sim.last_reports()[-kernels:]
    assert [report.findings for report in reports] == [[]] * kernels
    accurate(found, tensors, dout, causal=True)


@pytest.mark.sampled
def test_schedulers_give_the_same_bits(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:6")
    tensors = inputs((520, 700), (4, 2))
    dout = torch.randn_like(tensors[0])
    static, counted = (gradients(tensors, dout, causal=True, use_clc=c) for c in (False, True))
    assert all(torch.equal(static[name], counted[name]) for name in "qkv")


def test_a_plan_that_does_not_fit_is_refused():
    for plan in (lambda: DvPlan(dout_stages=3), lambda: ProductsPlan(rows_stages=6)):
        with pytest.raises(ValueError, match="shared memory"):
            plan()
    with pytest.raises(ValueError, match="q_stages is 1 and dout_stages 1; at least 1 and 2"):
        DvPlan(dout_stages=1)
    with pytest.raises(ValueError, match="ds_stages is 2 and rows_stages 2; at least 2 and 3"):
        ProductsPlan(rows_stages=2)
    with pytest.raises(ValueError, match="x_stages is 1 and y_stages 1; at least 2 and 1"):
        SinglePlan("dq", x_stages=1)
    with pytest.raises(ValueError, match="result is 'out'; accepted are dq, dk and dv"):
        SinglePlan("out")
    with pytest.raises(ValueError, match="ds_bytes is -1; accepted"):
        BackwardConfig(ds_bytes=-1)
    assert "dout_free" in describe(kernels_of(named("sm_90a")), STORED)
