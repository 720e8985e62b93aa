"""How Blackwell's decode kernel brings Q to e4m3, by its machine code."""

import pytest
import torch
from machine_code import roles_have_their_registers

from fa4_hd256.kernels.blackwell.decode.config import DECODE_E4M3
from fa4_hd256.kernels.blackwell.decode.e4m3 import DecodeE4m3Kernel
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.host.cubin import launch_registers
from sm100_sim.timing.sass import SassFunction, disassemble

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

#: Rows of a tile: those that a warp asks for at a time.
AT_ONCE = {16: 4, 32: 8, 64: 4}
QUERIES = ProblemClass(
    torch.bfloat16, bounded_right=True, packed_heads=8, kv_dtype=torch.float8_e4m3fn
)


def compiled(config):
    """(kernel, its machine code)."""
    kernel = compile_kernel(KernelSpec("forward_decode_e4m3", config, QUERIES))
    (function,) = disassemble(kernel.cubin).values()
    return kernel, function


def asked_for_together(function: SassFunction) -> int:
    """Loads of 16 bytes a lane, a row of Q each, at most in a block: what is done with them follows
    behind."""
    blocks = (function.instructions[block.start : block.stop] for block in function.blocks)
    return max(sum(i.base == "LDG" and "128" in i.opcode for i in block) for block in blocks)


@pytest.mark.parametrize("config", DECODE_E4M3, ids=lambda config: str(config.rows))
def test_registers(config):
    kernel, function = compiled(config)
    plan = config.warps.registers
    assert set(launch_registers(kernel.cubin).values()) == {plan.at_launch}
    roles_have_their_registers(function, plan)


@pytest.mark.parametrize("config", DECODE_E4M3, ids=lambda config: str(config.rows))
@pytest.mark.sampled("64")
def test_rows_are_asked_for_together(config):
    """A load takes some 700 clocks, a row without it 170."""
    assert asked_for_together(compiled(config)[1]) == AT_ONCE[config.rows]


def test_a_row_behind_the_other_is_noticed(planted):
    planted.setattr(DecodeE4m3Kernel, "rows_at_once", 1)
    assert asked_for_together(compiled(DECODE_E4M3[-1])[1]) == 1
