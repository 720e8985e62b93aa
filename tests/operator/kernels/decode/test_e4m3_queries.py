"""Blackwell's decode kernels for K and V in e4m3 and NVFP4, in machine code: registers, and rows of
Q."""

from dataclasses import replace

import pytest
import torch
from machine_code import roles_have_their_registers

from fa4_hd256.kernels.blackwell.decode.config import DECODE_E4M3, DECODE_NVFP4
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.host.cubin import launch_registers
from sm100_sim.timing.machine_code.sass import SassFunction, disassemble

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

QUERIES = ProblemClass(torch.bfloat16, bounded_right=True, packed_heads=8)
CONFIGS = *DECODE_E4M3, *DECODE_NVFP4


def compiled(config):
    """Return (kernel, its machine code)."""
    tiles = config.tiles
    problem = replace(QUERIES, kv_dtype=tiles.kv_dtype)
    kernel = compile_kernel(KernelSpec(tiles.kind, config, problem))
    (function,) = disassemble(kernel.cubin).values()
    return kernel, function


def rows_behind_a_load(function: SassFunction) -> int:
    """Loads of 16 bytes per lane from global memory, as a row of Q would be one."""
    return sum(i.base == "LDG" and "128" in i.opcode for i in function.instructions)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.rows}{'-nvfp4' * c.nvfp4}")
@pytest.mark.sampled
def test_registers(config):
    kernel, function = compiled(config)
    plan = config.warps.registers
    assert set(launch_registers(kernel.cubin).values()) == {plan.at_launch}
    roles_have_their_registers(function, plan)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.rows}{'-nvfp4' * c.nvfp4}")
@pytest.mark.sampled
def test_rows_come_by_tma(config):
    """Rows that warps load take a latency of memory each iteration, 1.6 us beside the loads of K
    and V (docs/kernels.md)."""
    assert rows_behind_a_load(compiled(config)[1]) == 0
