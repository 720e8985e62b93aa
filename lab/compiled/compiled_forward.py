"""Compilation results of our forward and of flash-attn-4's, and the instructions of a step.

Both are compiled for sm_100a by the same compiler, at the same true share of emulated exp2, and
disassembled. Per kernel: registers, stack, local memory, SMEM, instructions; of the two loops that
take the time, the instructions of one step (128 keys) by class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bench.peers import flash_attn_4
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.resources import resource_usage
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from lab.compiled.instruction_classes import class_counts, kernel_code
from lab.model import ours
from lab.model.calls import Kind
from sm100_sim import launch_configs
from sm100_sim.timing import SassInstruction
from sm100_sim.timing.machine_code.loops import LoopNest

OURS = "fa4_hd256"
STEP_COLUMNS = 128
#: MMAs of a step: Q K^T over 256 columns of the head and P V over 128 keys, K = 16 each.
STEP_MMAS = HEAD_DIM // 16 + STEP_COLUMNS // 16


@dataclass(frozen=True)
class Mix:
    """One true share of emulated exp2, as each project is told to compile it."""

    ours: Ex2Pattern
    theirs: Ex2Pattern

    def __post_init__(self) -> None:
        if self.ours.true_share(STEP_COLUMNS) != self.theirs.true_share(STEP_COLUMNS):
            raise ValueError(f"not the same true share: {self.ours} and {self.theirs}")

    @property
    def share(self) -> Fraction:
        return self.ours.true_share(STEP_COLUMNS)


#: Hardware only; what flash-attn-4 4.0.0b36's own tuning compiles to; half of three fragments.
MIXES = (
    Mix(HARDWARE_ONLY, HARDWARE_ONLY),
    Mix(Ex2Pattern(14, 4), flash_attn_4.pattern(14)),
    Mix(Ex2Pattern(4, 3), flash_attn_4.pattern(8)),
)


@dataclass(frozen=True)
class LoopCounts:
    """Instructions of one step of a loop: every wait succeeds at once, no work is skipped.

    total and classes: per 128 keys. steps: of one iteration of the loop. share: of the exp2 of
    the step's scores that the instructions emulate, None in a loop without exp2.
    """

    total: float
    classes: dict[str, float]
    steps: int
    share: Fraction | None = None


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel.

    stack, local: bytes per thread. spills: instructions that load or store local memory.
    smem_bytes: dynamic, of one CTA.
    """

    project: str
    mask: str
    share: Fraction
    is_own_tuning: bool
    registers: int
    stack: int
    local: int
    spills: int
    smem_bytes: int
    instructions: int
    softmax: LoopCounts
    mma: LoopCounts


def _operations(path: list[SassInstruction]) -> Counter:
    """Count the opcodes without modifiers; exp2 as "EX2"."""
    counts = Counter(instruction.base for instruction in path)
    counts["EX2"] = sum(instruction.opcode.startswith("MUFU.EX2") for instruction in path)
    return counts


def _columns(path: list[SassInstruction]) -> int:
    """Columns of tensor memory that a thread's tcgen05.ld (LDTM.xN) read."""
    loads = [i.opcode.split(".") for i in path if i.base == "LDTM"]
    return sum(int(part[1:]) for parts in loads for part in parts if part[1:].isdigit())


def softmax_loop(loops: LoopNest) -> LoopCounts:
    """The unmasked softmax loop: S from tensor memory, exp2, P to tensor memory.

    Masked loops differ by a selection per column, so of those found the one with the fewest
    instructions a step is meant. Raises ValueError if the kernel has none.
    """
    found = []
    for loop in loops.working_loops:
        path = loops.straight_path(loop)
        operations, columns = _operations(path), _columns(path)
        if operations["STTM"] and operations["EX2"] and columns and columns % STEP_COLUMNS == 0:
            steps = columns // STEP_COLUMNS
            # One exp2 a step is the factor by which the row's maximum moved.
            share = 1 - Fraction(operations["EX2"] - steps, columns)
            found.append(_counts(path, steps, share))
    if not found:
        raise ValueError("no loop loads S, takes exp2 and stores P; was the kernel changed?")
    return min(found, key=lambda counts: counts.total)


def mma_loop(loops: LoopNest) -> LoopCounts:
    """The loop that issues the tensor core's instructions; ValueError if the kernel has none."""
    found = []
    for loop in loops.working_loops:
        path = loops.straight_path(loop)
        issued = _operations(path)["UTCHMMA"]
        if issued and issued % STEP_MMAS == 0:
            found.append(_counts(path, issued // STEP_MMAS))
    if not found:
        raise ValueError(f"no loop issues {STEP_MMAS} MMAs a step; was the kernel changed?")
    return min(found, key=lambda counts: counts.total)


def _counts(path: list[SassInstruction], steps: int, share: Fraction | None = None) -> LoopCounts:
    classes = {name: count / steps for name, count in class_counts(path).items()}
    return LoopCounts(len(path) / steps, classes, steps, share)


def _report(
    identity: tuple[str, str, bool], mix: Ex2Pattern, cubin: bytes, smem_bytes: int
) -> KernelReport:
    """identity: project, mask, whether the mix is the project's own choice.

    Raises RuntimeError if the instructions emulate another share than the pattern says.
    """
    project, mask, is_own_tuning = identity
    function, usage = kernel_code(cubin), resource_usage(cubin)
    spills = sum(i.base in ("LDL", "STL") for i in function.instructions)
    loops = LoopNest(function)
    share, softmax = mix.true_share(STEP_COLUMNS), softmax_loop(loops)
    if softmax.share != share:
        raise RuntimeError(
            f"{project}, {mask}: {float(softmax.share or 0):.2%} of the exp2 are emulated by the "
            f"compiled instructions, but the pattern says {float(share):.2%}"
        )
    return KernelReport(
        project, mask, share, is_own_tuning, usage.registers, usage.stack, usage.local,
        spills, smem_bytes, len(function.instructions), softmax, mma_loop(loops),
    )  # fmt: skip


def _launched_smem(compiled: Any, arguments: tuple, keywords: dict[str, Any]) -> int:
    """Dynamic SMEM in bytes that the host code requests."""
    return launch_configs(compiled, *arguments, **keywords)[-1].dynamic_smem


def our_report(causal: bool, mix: Ex2Pattern) -> KernelReport:
    """Our forward, bf16, full or causal attention, static scheduler."""
    config = ForwardConfig(ex2_pattern=mix)
    compiled, arguments = ours.call(ours.Variant(Kind(causal), config=config), (256, 2))
    smem = _launched_smem(compiled, arguments, {})
    is_default = mix == ForwardConfig().ex2_pattern
    return _report((OURS, _mask(causal), is_default), mix, compiled.cubin, smem)


def their_report(causal: bool, mix: Ex2Pattern) -> KernelReport:
    """flash-attn-4's forward, as `our_report`; RuntimeError if it is not installed."""
    import cuda.bindings.driver as cuda

    compiled = flash_attn_4.compile_forward(causal, mix)
    smem = _launched_smem(compiled, flash_attn_4.arguments(), {"stream": cuda.CUstream(0)})
    tuned = mix == flash_attn_4.tuned_pattern(causal)
    identity = (flash_attn_4.PACKAGE, _mask(causal), tuned)
    return _report(identity, mix, compiled.artifacts.CUBIN, smem)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def reports(
    masks: Iterable[bool] = (False, True), mixes: Iterable[Mix] = MIXES
) -> Iterator[KernelReport]:
    """Yield reports in pairs (ours, flash-attn-4's), the latter left out if it is not installed."""
    has_theirs = flash_attn_4.unavailable() is None
    mixes = tuple(mixes)
    for causal in masks:
        for mix in mixes:
            yield our_report(causal, mix.ours)
            if has_theirs:
                yield their_report(causal, mix.theirs)


def count() -> int:
    """Return the number of reports without arguments."""
    return 2 * len(MIXES) * (2 if flash_attn_4.unavailable() is None else 1)
