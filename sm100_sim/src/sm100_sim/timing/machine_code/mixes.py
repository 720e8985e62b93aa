"""Instruction mixes that PTX and SASS share, to tell apart paths with the same events.

ptxas moves, merges and multiplies most instructions; those counted here come through one to one
or nearly so. A loop with a mask and one without, say, issue the same events, but the one has
selections and the other has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.isa.columns import MemoryAccess, Mix, Rule, require_complete
from sm100_sim.isa.table import row_of
from sm100_sim.translate.blocks import operand_registers, uses_and_definitions
from sm100_sim.translate.kernel import CompiledKernel

from .sass import SassFunction


class Feature(NamedTuple):
    """Counted feature. name; weight of a difference of one; sass: opcodes, a regular expression;
    ptx: what rows of the instruction table say of it, and which modifier must be there besides;
    named: PTX opcodes with their types, a regular expression, in place of both."""

    name: str
    weight: float
    sass: str
    ptx: frozenset[Mix | MemoryAccess]
    modifier: str = ""
    named: str = ""

    def counts(self, instruction: Any) -> bool:
        """Return True if an instruction of the PTX is one of these."""
        if self.named:
            return re.match(self.named, instruction.name) is not None
        row, modifiers = row_of(instruction), instruction.modifiers
        if self.ptx.isdisjoint((row.mix_with(modifiers), row.access)):
            return False
        return not self.modifier or any(part.startswith(self.modifier) for part in modifiers)


def _feature(
    name: str, weight: float, sass: str, *ptx: Mix | MemoryAccess, modifier: str = ""
) -> Feature:
    return Feature(name, weight, sass, frozenset(ptx), modifier)


FEATURES = (
    _feature("exp2", 1.0, r"MUFU\.EX2", Mix.EXP2),
    _feature("mufu", 2.0, r"MUFU\.(?!EX2)", Mix.SPECIAL),
    _feature("packed float", 1.0, r"(FFMA2|FMUL2|FADD2)", Mix.PACKED, Mix.PACKED_SUM),
    _feature("round down", 1.0, r"FADD2\.RM", Mix.PACKED_SUM, modifier="rm"),
    _feature("pack", 1.0, r"F2FP", Mix.NARROW),
    _feature("select", 0.5, r"(F?SEL)\b", Mix.SELECT),
    _feature("shared load", 2.0, r"LDS\b", MemoryAccess.LOAD, modifier="shared"),
    _feature("shared store", 2.0, r"STS\b", MemoryAccess.STORE, modifier="shared"),
    _feature("global load", 4.0, r"LDG", MemoryAccess.LOAD, modifier="global"),
    _feature("global store", 4.0, r"STG", MemoryAccess.STORE, modifier="global"),
    _feature("matrix", 2.0, r"(LDSM|STSM)", MemoryAccess.MATRIX_LOAD, MemoryAccess.MATRIX_STORE),
    _feature("shuffle", 3.0, r"SHFL", Mix.SHUFFLE),
    _feature("vote", 3.0, r"VOTE", Mix.VOTE),
)
#: Features of warps without any event, whose paths nothing else decides. ptxas makes one of a
#: product and a sum, and packs some, so these counts are near the PTX's and no more.
WITHOUT_EVENTS = (
    *FEATURES,
    Feature(
        "float", 1.0, r"(FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2|DFMA|DMUL|DADD|HMMA)\b", frozenset(),
        named=r"(fma|mul|add|sub|mma)\..*(f16|bf16|f32|f64)",
    ),
)  # fmt: skip
_WEIGHTS = np.array([feature.weight for feature in WITHOUT_EVENTS])
require_complete(
    "timing.mixes", Mix, {value for feature in FEATURES for value in feature.ptx} & {*Mix}
)


def useful(compiled: CompiledKernel) -> list[bool]:
    """Return, for each PTX instruction, True if it contributes to anything: ptxas drops the others.

    Useful is what has an effect beside its result, and what defines a register that something
    useful reads. A tcgen05.ld has no other effect.
    """
    instructions = compiled.instructions
    definers: dict[Any, list[int]] = {}
    reads: list[set] = []
    pending: list[int] = []
    for number, instruction in enumerate(instructions):
        row = row_of(instruction)
        uses, _, definitions = uses_and_definitions(instruction)
        reads.append({*uses, *operand_registers(instruction.guard)})
        for register in definitions:
            definers.setdefault(register, []).append(number)
        acts = row.emit is None or "volatile" in instruction.modifiers
        if not definitions or acts and row.rule is not Rule.TENSOR_LOAD:
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


def apart(drift: np.ndarray) -> float:
    """Return how far two mixes are apart. drift: their difference."""
    return float(np.abs(drift) @ _WEIGHTS[: len(drift)])


def ptx_mixes(
    compiled: CompiledKernel, used: list[bool], features: tuple[Feature, ...] = FEATURES
) -> np.ndarray:
    """float64 (blocks, features): useful instructions of each kind in each block of the PTX."""
    blocks, instructions = compiled.kernel.blocks, compiled.instructions
    found = np.zeros((len(blocks), len(features)))
    for number, block in enumerate(blocks):
        for index in range(block.start, block.stop):
            if used[index]:
                found[number] += [feature.counts(instructions[index]) for feature in features]
    return found


def mix_of_blocks(mixes: np.ndarray, blocks: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return (features,): the sum over blocks, each with how often it was executed."""
    total = np.zeros(mixes.shape[1])
    for block, count in blocks:
        total += count * mixes[block]
    return total


def sass_prefix(function: SassFunction, features: tuple[Feature, ...] = FEATURES) -> np.ndarray:
    """float64 (instructions + 1, features): row n sums over the first n instructions."""
    patterns = [re.compile(feature.sass) for feature in features]
    found = np.zeros((len(function.instructions) + 1, len(features)))
    for number, instruction in enumerate(function.instructions):
        for feature, pattern in enumerate(patterns):
            found[number + 1, feature] = bool(pattern.match(instruction.opcode))
    return found.cumsum(axis=0)
