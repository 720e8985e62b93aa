"""Hopper's decode kernel for keys and values in e4m3: its machine code and its plans.

What calls get from it is in tests/operator/cache/test_e4m3.py.
"""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import E4M3
from machine_code import nothing_is_spilled, roles_have_their_registers

from fa4_hd256.architectures import named
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
