"""MMAs of every kernel in machine code against its PTX: what the simulator, which runs PTX, cannot
see of ptxas (`mma_machine_code` says what is followed)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mma_machine_code
import pytest
import torch
from mma_machine_code import Chain, chains_of_machine_code, chains_of_ptx, hazards

from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3, DECODE_NVFP4
from fa4_hd256.kernels.blackwell.forward.config import E4M3_CONFIG
from fa4_hd256.kernels.blackwell.forward.mxfp8_config import MXFP8_CONFIG
from fa4_hd256.kernels.block_scales import SCALE_BLOCK
from fa4_hd256.kernels.nvfp4_format import NVFP4
from fa4_hd256.kernels.problem_class import (
    E4M3,
    OF_BLOCKS,
    OF_SEQUENCES,
    GradientClass,
    ProblemClass,
)
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.resources import resource_usage
from sm100_sim.isa.tensor.descriptors import decode_instruction
from sm100_sim.timing.machine_code.sass import SassFunction, disassemble
from sm100_sim.tools.golden.instructions import mma

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

CAUSAL = ProblemClass(torch.bfloat16, bounded_right=True)
E4M3_KEYS = replace(CAUSAL, kv_dtype=E4M3)
NVFP4_KEYS = replace(CAUSAL, kv_dtype=NVFP4)
QUERIES_TOO = replace(E4M3_KEYS, q_dtype=E4M3, descale=OF_SEQUENCES)
BLOCKS = replace(QUERIES_TOO, descale=OF_BLOCKS)


def specs() -> dict[str, KernelSpec]:
    """Every kernel with tensor cores in each of its configurations, causal; negated scores too."""
    backward = ("backward_dv", "backward_products", "backward_dkdv", "backward_dq")
    negated = replace(CAUSAL, negative_scale=True)
    found = {
        "forward": KernelSpec("forward", ForwardConfig(), CAUSAL),
        "forward-clc": KernelSpec("forward", ForwardConfig(), replace(CAUSAL, use_clc=True)),
        "forward-negated": KernelSpec("forward", ForwardConfig(), negated),
        "forward_e4m3": KernelSpec("forward_e4m3", E4M3_CONFIG, QUERIES_TOO),
        "forward_mxfp8": KernelSpec("forward_mxfp8", MXFP8_CONFIG, BLOCKS),
        **{f"decode-{c.rows}": KernelSpec("forward_decode", c, CAUSAL) for c in DECODE},
        **{f"decode_e4m3-{c.rows}": KernelSpec("forward_decode_e4m3", c, E4M3_KEYS)
           for c in DECODE_E4M3},
        **{f"decode_nvfp4-{c.rows}": KernelSpec("forward_decode_nvfp4", c, NVFP4_KEYS)
           for c in DECODE_NVFP4},
    }  # fmt: skip
    for kind in backward:
        config = BackwardConfig().of_kernel(kind)
        found[kind] = KernelSpec(kind, config, GradientClass(CAUSAL))
    return found


def machine_code(name: str) -> tuple[SassFunction, str]:
    kernel = compile_kernel(specs()[name])
    (function,) = disassemble(kernel.cubin).values()
    return function, kernel.ptx


def told(function: SassFunction) -> Counter[str]:
    return Counter(i.base for i in function.instructions)


@pytest.mark.parametrize("name", specs())
@pytest.mark.sampled("forward", "backward_products")
def test_every_chain_of_the_ptx_is_in_the_machine_code(name):
    """Each once, with its descriptors, distances, shapes and signs, and nothing else."""
    function, ptx = machine_code(name)
    wanted = chains_of_ptx(ptx)
    assert wanted
    assert Counter(chains_of_machine_code(function, wanted)) == Counter(wanted)
    commits = ptx.count("tcgen05.commit.")
    assert told(function)["UTCBAR"] == commits > 0


@pytest.mark.parametrize("name", specs())
@pytest.mark.sampled("forward", "backward_products")
def test_operands_wait_for_their_scoreboards(name):
    function, _ = machine_code(name)
    assert hazards(function) == []


@pytest.mark.parametrize("name", specs())
@pytest.mark.sampled("forward", "backward_products")
def test_no_kernel_has_local_memory(name):
    usage = resource_usage(compile_kernel(specs()[name]).cubin)
    assert usage.stack == usage.local == 0


def forms(chain: Chain) -> set[tuple]:
    """Return what a golden case has of a chain: group, kind, M, N, signs, majors, and where A lies
    and B, with a swizzle or without."""
    block = SCALE_BLOCK if chain.scales else 0
    found = decode_instruction(chain.descriptor, chain.kind, chain.group, False, block)
    a = "tmem" if chain.upper_a is None else chain.upper_a >> 29
    majors = found.a_mn_major, found.b_mn_major
    return {(chain.group, chain.kind, found.m, found.n, *majors, a, chain.upper_b >> 29, sign)
            for sign in {found.negate_a, False}}  # fmt: skip


def probed() -> set[tuple]:
    """Return the forms that golden cases have."""
    found = set()
    for p in mma.PRODUCTS:
        a, b = (0 if which in p.plain else 2 for which in "ab")
        place = "tmem" if p.a == "tmem" else a
        majors = p.a == "mn", p.b_mn
        found.add((p.group, p.kind, p.m, p.n, *majors, place, b, p.negate))
    return found


@pytest.mark.parametrize("name", specs())
@pytest.mark.sampled("forward", "backward_products")
def test_every_form_of_an_mma_has_a_golden_case(name):
    """A form that no case asks of a GPU would first be seen as a wrong result of a kernel."""
    kernel = compile_kernel(specs()[name])
    wanted = {form for chain in chains_of_ptx(kernel.ptx) for form in forms(chain)}
    # A sign is asked of some shapes, and is one bit beside them.
    asked = probed()
    missing = {form for form in wanted if not form[-1]} - asked
    assert missing == set()
    assert all((*form[:2], True) in {(*p[:2], p[-1]) for p in asked} for form in wanted if form[-1])


def changed(function: SassFunction, index: int, **fields) -> SassFunction:
    """Return a function with other fields of one instruction, or of its control code."""
    copy = object.__new__(SassFunction)
    copy.name, copy.blocks = function.name, function.blocks
    copy.instructions = list(function.instructions)
    old = copy.instructions[index]
    if "control" in fields:
        fields["control"] = replace(old.control, **fields["control"])
    copy.instructions[index] = replace(old, **fields)
    return copy


def first(function: SassFunction, start: str) -> int:
    """Return the number of the first instruction whose text begins so."""
    return next(n for n, i in enumerate(function.instructions) if i.text.startswith(start))


def test_an_error_of_the_assembler_is_seen():
    """A wrong sign, a wrong constant and a wrong distance of one MMA of the forward."""
    function, ptx = machine_code("forward")
    wanted = chains_of_ptx(ptx)
    instructions = function.instructions
    mma = first(function, "UTCHMMA")
    adds = instructions[mma].operands.rsplit(", ", 1)
    other = "UPT" if adds[1] != "UPT" else "!UPT"
    word = next(n for n, i in enumerate(instructions)
                if i.opcode == "UMOV" and "0x40004040" in i.operands)  # fmt: skip
    step = next(n for n, i in enumerate(instructions)
                if i.opcode == "UIADD3" and i.operands.endswith(", 0x6, URZ"))  # fmt: skip
    for index, operands in (
        (mma, f"{adds[0]}, {other}"),
        (word, instructions[word].operands.replace("0x40004040", "0x40004048")),
        (step, instructions[step].operands.replace(", 0x6, URZ", ", 0x8, URZ")),
    ):
        wrong = changed(function, index, operands=operands)
        with pytest.raises(AssertionError, match="begins no chain"):
            chains_of_machine_code(wrong, wanted)


def test_a_scoreboard_that_nobody_waits_for_is_seen():
    """No instruction of the forward waits for anything: operands are overwritten, loads unread."""
    function, _ = machine_code("forward")
    copy = object.__new__(SassFunction)
    copy.name, copy.blocks = function.name, function.blocks
    copy.instructions = [
        replace(i, control=replace(i.control, waits=0)) for i in function.instructions
    ]
    texts = "\n".join(hazards(copy))
    assert "may not have been read" in texts
    assert "which a load of tensor memory may still write" in texts
    assert mma_machine_code.NEXT not in range(6)
