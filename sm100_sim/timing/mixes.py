"""Instruction mixes that PTX and SASS share, to tell apart paths with the same events.

ptxas moves, merges and multiplies most instructions; those counted here come through one to one
or nearly so. A loop with a mask and one without, say, issue the same events, but the one has
selections and the other has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Rule
from sm100_sim.translate.blocks import operand_registers, uses_and_definitions
from sm100_sim.translate.kernel import CompiledKernel

from .sass import SassFunction

#: (name, weight of a difference of one, PTX opcodes, SASS opcodes), as regular expressions.
FEATURES = (
    ("exp2", 1.0, r"ex2", r"MUFU\.EX2"),
    ("mufu", 2.0, r"(rcp|rsqrt|lg2|sqrt|tanh|sin|cos)\.approx", r"MUFU\.(?!EX2)"),
    ("packed float", 1.0, r"(fma|mul|add|sub)\S*f32x2", r"(FFMA2|FMUL2|FADD2)"),
    ("round down", 1.0, r"add\.rm\S*f32x2", r"FADD2\.RM"),
    ("pack", 1.0, r"cvt\S*(bf16x2|f16x2|e4m3x2|e5m2x2)", r"F2FP"),
    ("select", 0.5, r"selp", r"(F?SEL)\b"),
    ("shared load", 2.0, r"ld\.\S*shared", r"LDS\b"),
    ("shared store", 2.0, r"st\.(?!async|bulk)\S*shared", r"STS\b"),
    ("global load", 4.0, r"ld\.\S*global", r"LDG"),
    ("global store", 4.0, r"st\.(?!async|bulk)\S*global", r"STG"),
    ("matrix", 2.0, r"(ld|st)matrix", r"(LDSM|STSM)"),
    ("shuffle", 3.0, r"shfl", r"SHFL"),
    ("vote", 3.0, r"vote", r"VOTE"),
)
WEIGHTS = np.array([weight for _, weight, _, _ in FEATURES])
_PTX = [re.compile(ptx) for _, _, ptx, _ in FEATURES]
_SASS = [re.compile(sass) for _, _, _, sass in FEATURES]


def useful(compiled: CompiledKernel) -> list[bool]:
    """Whether each PTX instruction contributes to anything: ptxas drops those that do not.

    Useful is what has an effect beside its result, and what defines a register that something
    useful reads. A tcgen05.ld has no other effect.
    """
    instructions = compiled.instructions
    definers: dict[Any, list[int]] = {}
    reads: list[set] = []
    pending: list[int] = []
    for number, (instruction, entry) in enumerate(
        zip(instructions, compiled.entries, strict=True)
    ):
        uses, _, definitions = uses_and_definitions(instruction, entry)
        reads.append({*uses, *operand_registers(instruction.guard)})
        for register in definitions:
            definers.setdefault(register, []).append(number)
        acts = entry.emit is None or "volatile" in instruction.modifiers
        if not definitions or acts and entry.rule is not Rule.TENSOR_LOAD:
            pending.append(number)
    found = [False] * len(instructions)
    while pending:
        number = pending.pop()
        if found[number]:
            continue
        found[number] = True
        for register in reads[number]:
            pending += definers.get(register, ())
    return found


def ptx_mixes(compiled: CompiledKernel, used: list[bool]) -> np.ndarray:
    """float64 (blocks, features): useful instructions of each kind in each block of the PTX."""
    blocks, instructions = compiled.kernel.blocks, compiled.instructions
    found = np.zeros((len(blocks), len(FEATURES)))
    for number, block in enumerate(blocks):
        for index in range(block.start, block.stop):
            if used[index]:
                for feature, pattern in enumerate(_PTX):
                    found[number, feature] += bool(pattern.match(instructions[index].name))
    return found


def mix_of_blocks(mixes: np.ndarray, blocks: Iterable[tuple[int, int]]) -> np.ndarray:
    """(features,): the sum over blocks, each with how often it was executed."""
    total = np.zeros(len(FEATURES))
    for block, count in blocks:
        total += count * mixes[block]
    return total


def sass_prefix(function: SassFunction) -> np.ndarray:
    """float64 (instructions + 1, features): row n sums over the first n instructions."""
    found = np.zeros((len(function.instructions) + 1, len(FEATURES)))
    for number, instruction in enumerate(function.instructions):
        for feature, pattern in enumerate(_SASS):
            found[number + 1, feature] = bool(pattern.match(instruction.opcode))
    return found.cumsum(axis=0)
