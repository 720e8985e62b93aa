"""Machine code of the pair kernels: registers of the roles against those of the launch, fences."""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import replace

import pytest
import torch
from backward_cases import gradients, inputs
from machine_code import (
    letters,
    look_ups_of_steps,
    no_step_looks_up,
    nothing_is_spilled,
    roles_have_their_registers,
)

from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.kernels.blackwell.backward.config import (
    BackwardWarpPlan,
    DkdvPlan,
    DqPlan,
    DvPlan,
    ProductsPlan,
)
from fa4_hd256.kernels.blackwell.forward.config import ForwardWarpPlan
from fa4_hd256.kernels.mask.block_mask import MASK_GRADIENTS, MASK_STEPS
from fa4_hd256.kernels.plan.budgets import RegisterPlan
from fa4_hd256.kernels.problem_class import FunctionClass, GradientClass, ProblemClass
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.errors import Hang
from sm100_sim.host.cubin import launch_registers
from sm100_sim.timing.machine_code.sass import disassemble

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

BF16 = torch.bfloat16
CAUSAL = ProblemClass(BF16, bounded_right=True)
PAIR_KERNELS = {
    "forward": (ForwardConfig(), CAUSAL),
    "backward_dv": (BackwardConfig(), GradientClass(CAUSAL)),
    "backward_products": (BackwardConfig(), GradientClass(CAUSAL)),
    "backward_dkdv": (BackwardConfig(), GradientClass(CAUSAL)),
    "backward_dq": (BackwardConfig(), GradientClass(CAUSAL)),
}


def compiled(kind: str, use_clc: bool = False, ragged: tuple[str, ...] = ()):
    """Return (kernel, the register plan of its configuration)."""
    config, variant = PAIR_KERNELS[kind]
    # Packed heads beside packed sequences, as test_kernel_structure has them: one kernel for both.
    heads = 2 if ragged and kind == "forward" else 1
    problem = replace(CAUSAL, use_clc=use_clc, ragged=ragged, packed_heads=heads)
    variant = problem if kind == "forward" else replace(variant, problem=problem)
    if kind == "forward":
        return compile_kernel(KernelSpec(kind, config, variant)), config.warps.registers
    config = config.of_kernel(kind)
    return compile_kernel(KernelSpec(kind, config, variant)), config.plan.warps.registers


@pytest.mark.parametrize("kind", PAIR_KERNELS)
@pytest.mark.sampled("forward", "backward_products")
def test_the_kernel_is_launched_with_the_registers_of_its_plan(kind):
    """The pool that the budgets are checked against is the pool in the machine code."""
    kernel, plan = compiled(kind)
    assert set(launch_registers(kernel.cubin).values()) == {plan.at_launch}


@pytest.mark.parametrize("kind", PAIR_KERNELS)
@pytest.mark.sampled("forward", "backward_products")
def test_no_role_names_a_register_that_its_budget_lacks(kind):
    """Every path behind each setmaxnreg of the machine code is checked."""
    kernel, plan = compiled(kind)
    (function,) = disassemble(kernel.cubin).values()
    roles_have_their_registers(function, plan)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("kind", PAIR_KERNELS)
@pytest.mark.sampled("forward-clc")
def test_no_arrival_waits_for_the_whole_gpu(kind, use_clc):
    """MEMBAR.ALL.GPU, hundreds of clocks, stands before two cluster barriers and nowhere else: the
    one after tensor memory is allocated and the one before the CTAs exit."""
    kernel, _ = compiled(kind, use_clc)
    (function,) = disassemble(kernel.cubin).values()
    order = [i.opcode for i in function.instructions
             if i.opcode.startswith(("MEMBAR.ALL.GPU", "UCGABAR_ARV"))]  # fmt: skip
    assert order == ["UCGABAR_ARV", *2 * ["MEMBAR.ALL.GPU", "UCGABAR_ARV"]]


#: A step of the softmax: two stores, exponentials of the third fragment, only then the wait for the
#: stores (NOTE [stores hidden by exponentials]), the signal, and the same for the second half.
STEP = re.compile("Sx+Sx{24,}Wx*Ax*Sx*SWA")
LETTERS = {"STTM": "S", "MUFU.EX2": "x", "FENCE.VIEW.ASYNC.T": "W", "SYNCS.ARRIVE.TRANS64.RED": "A"}


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
def test_stores_of_the_first_half_of_p_are_hidden_by_exponentials(use_clc):
    """Stores are hidden in both loops, with a mask and without; ptxas orders arithmetic as it
    likes."""
    kernel, _ = compiled("forward", use_clc)
    (function,) = disassemble(kernel.cubin).values()
    opcodes = [i.opcode for i in function.instructions]
    end = [n for n, opcode in enumerate(opcodes) if opcode.startswith("USETMAXREG")][1]
    softmax = letters(function.instructions[:end], LETTERS)
    assert len(STEP.findall(softmax)) == 2, softmax
    # Such as they would be with the wait where the stores are.
    assert not STEP.findall(re.sub("(x+)W", r"W\1", softmax))


@pytest.mark.parametrize("kind", PAIR_KERNELS)
@pytest.mark.sampled("forward")
def test_no_step_looks_up_where_a_packed_sequence_lies(kind):
    """A look-up in no step costs no spill either."""
    kernel, plan = compiled(kind, True, ("cu_seqlens_q", "cu_seqlens_k"))
    nothing_is_spilled(kernel, plan)
    (function,) = disassemble(kernel.cubin).values()
    no_step_looks_up(function)


@pytest.mark.sampled
def test_a_step_of_listed_products_looks_up_its_tile_and_that_of_ds():
    """The facts of its row of blocks are read once per tile."""
    kernel, plan = compiled("backward_products", True, MASK_GRADIENTS)
    nothing_is_spilled(kernel, plan)
    (function,) = disassemble(kernel.cubin).values()
    assert look_ups_of_steps(function) == [2]


@pytest.mark.parametrize("plan", [ForwardWarpPlan, BackwardWarpPlan])
def test_a_plan_that_the_launch_cannot_serve_is_refused(plan):
    """One granule decides: 64 for the third warpgroup of the backward has hung on no GPU yet, 504 +
    8 registers per thread of three have on an H200."""
    other = plan().registers_other
    plan(registers_other=other - 8)
    with pytest.raises(ValueError, match=r"launched with 64512 \(168 each\)"):
        plan(registers_other=other + 8)


@pytest.mark.parametrize("kind", ["dv", "products", "dkdv", "dq"])
@pytest.mark.sampled
def test_budgets_of_the_whole_register_file_hang(kind, monkeypatch):
    """Warpgroups that together want all 65,536 registers wait for the last 1,024."""
    monkeypatch.setattr(RegisterPlan, "__post_init__", lambda self: None)
    warps = BackwardWarpPlan(registers_other=64)
    assert warps.registers.needed == 65_536
    plans = {"dv": DvPlan, "products": ProductsPlan, "dkdv": DkdvPlan, "dq": DqPlan}
    plan = plans[kind](warps=warps)
    memory = 0 if kind in ("dkdv", "dq") else BackwardConfig().ds_bytes
    config = BackwardConfig(**{kind: plan}, ds_bytes=memory)
    tensors = inputs((128, 128), (1, 1))
    with pytest.raises(Hang) as caught:
        gradients(tensors, torch.randn_like(tensors[0]), backward_config=config)
    first = " ".join(str(caught.value).split("Waiting:\n")[1].splitlines()[:2])
    assert "setmaxnreg.inc" in first and "registers are free in the CTA's pool" in first
    assert "the launch gave the CTA 64512, 168 a thread" in first


def _window(batch, head, query, key, tensors):
    return (key <= query) & ((query - key <= 300) | (key < 4))


def shortest_turn(function, start: int) -> int:
    """Instructions of the shortest way from one back to it."""
    home, least = function.block_of[start], {}
    pending = [(0, home)]
    while pending:
        count, index = heapq.heappop(pending)
        if count and index == home:
            return count
        block = function.blocks[index]
        for successor in block.successors:
            found = count + block.stop - block.start
            if found < least.get(successor, math.inf):
                least[successor] = found
                heapq.heappush(pending, (found, successor))
    raise AssertionError("no way back")


def _shortest_step() -> int:
    """Instructions of a softmax step of a forward with a mask_mod, on the shortest path."""
    function = FunctionClass(MaskMod.of(_window).key)
    problem = ProblemClass(BF16, ragged=(MASK_STEPS,), mask_mod=function)
    kernel = compile_kernel(KernelSpec("forward", ForwardConfig(), problem))
    (code,) = disassemble(kernel.cubin).values()
    names = [instruction.opcode for instruction in code.instructions]
    return shortest_turn(code, names.index("LDTM.x64"))


@pytest.mark.sampled
def test_a_step_that_sees_all_asks_no_mask_mod():
    """NOTE [a loop that runs once]."""
    assert (found := _shortest_step()) < 900, found
