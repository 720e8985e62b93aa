"""SASS of a cubin: instructions, control flow, loops, and the classes of a loop's instructions.

nvdisasm prints one instruction a line, with the branch targets as labels. Loops are the natural
loops of the control-flow graph (an edge to a block that dominates its source closes one), so
neither line numbers nor the order of the blocks matter.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "nvidia-cuda-nvdisasm"
_LABEL = re.compile(r"^(\S+):\s*$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*([^;]*);")
_TARGET = re.compile(r"`\(([^)]+)\)")
_BRANCH_TARGETS = re.compile(r"\.L_x_\d+")

#: Class -> opcodes, up to the first dot; the first class that matches counts. `_class_of` adds
#: the moves that ptxas writes as multiplications and the uniform datapath (U...).
CLASSES = {
    "FFMA2": ("FFMA2",),
    "FMUL2": ("FMUL2",),
    "FADD2": ("FADD2",),
    "FFMA, FMUL, FADD": ("FFMA", "FMUL", "FADD"),
    "MUFU": ("MUFU",),
    "FMNMX": ("FMNMX", "FMNMX3"),
    "F2F, F2FP": ("F2F", "F2FP", "F2I", "I2F", "I2FP"),
    "FSETP, FSEL": ("FSETP", "FSEL"),
    "integer": (
        "IADD", "IADD3", "VIADD", "IMAD", "LEA", "SHF", "SHL", "SHR", "LOP3", "PLOP3", "ISETP",
        "SEL", "PRMT", "IMNMX", "VIMNMX", "VIADDMNMX", "IABS", "POPC", "FLO", "R2P", "P2R", "SGXT",
        "BMSK",
    ),
    "MOV": ("MOV",),
    "R2UR": ("R2UR", "S2R", "S2UR", "CS2R"),
    "SYNCS": ("SYNCS", "NANOSLEEP"),
    "LDTM, STTM": ("LDTM", "STTM"),
    "UTCMMA": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCBAR", "UTCCP"),
    "LD, ST": (
        "LDS", "STS", "LDG", "STG", "LD", "ST", "LDC", "LDCU", "LDL", "STL", "ATOMS", "ATOMG",
        "RED", "UTMALDG", "UTMASTG", "UBLKCP", "STAS",
    ),
    "branch": (
        "BRA", "BRX", "BRXU", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "JMP",
        "YIELD",
    ),
    "fence, vote": (
        "FENCE", "MEMBAR", "ELECT", "VOTE", "VOTEU", "BAR", "DEPBAR", "CCTL", "ERRBAR", "ACQBULK",
        "UCGABAR_ARV", "UCGABAR_WAIT",
    ),
    "NOP": ("NOP",),
}  # fmt: skip
UNIFORM, OTHER = "uniform", "other"
CLASS_NAMES = (*CLASSES, UNIFORM, OTHER)
_CLASS_OF_OPCODE = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}

#: Opcodes after which control never falls through, unless predicated.
_ENDS = ("BRA", "BRX", "BRXU", "JMP", "RET", "EXIT")

#: Instructions of a loop that does work; a loop that polls a barrier and has none of them waits.
_WORK = ("LDTM", "STTM", "MUFU", "FFMA2", "UTCHMMA", "UTMALDG", "UTMASTG", "STS", "LDS", "SYNCS.A")


@dataclass(frozen=True)
class SassInstruction:
    """One instruction: byte offset in its function, predicate ("" if none), opcode, operands."""

    offset: int
    guard: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def instruction_class(self) -> str:
        """One of CLASS_NAMES."""
        # ptxas spreads moves over the pipes: as a multiplication by RZ, in integer or half.
        moves = self.opcode.startswith("IMAD.MOV") or (
            self.base in ("IMAD", "HFMA2") and self.operands.count("RZ,") == 2
        )
        if moves:
            return "MOV"
        if self.base in _CLASS_OF_OPCODE:
            return _CLASS_OF_OPCODE[self.base]
        return UNIFORM if self.base.startswith("U") else OTHER

    @property
    def targets(self) -> tuple[str, ...]:
        """Labels that control may go to, other than the next instruction."""
        if self.base in ("BRA", "JMP"):
            return tuple(_TARGET.findall(self.operands))
        return tuple(_BRANCH_TARGETS.findall(self.operands)) if self.base == "BRX" else ()

    @property
    def falls_through(self) -> bool:
        """Whether control may go to the next instruction."""
        if self.base not in _ENDS:
            return True
        # A uniform predicate is an operand: BRA.U !UP0, `(label).
        conditional = self.base == "BRA" and "," in self.operands.split("`")[0]
        return bool(self.guard) or conditional


@dataclass(eq=False)
class Block:
    """A basic block; `successors` are indices into the function's list of blocks."""

    index: int
    instructions: list[SassInstruction]
    successors: list[int]


@dataclass(frozen=True)
class Loop:
    """A natural loop: header, latches (sources of its back edges), all blocks; by index."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


class Function:
    """The control-flow graph of one kernel."""

    def __init__(self, lines: list[str]) -> None:
        """lines: nvdisasm's text of one function. Raises ValueError if it has no instruction."""
        self.blocks = _basic_blocks(lines)
        if not self.blocks:
            raise ValueError("the disassembly holds no instruction")

    @property
    def instructions(self) -> list[SassInstruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, those of one header merged, in the order of their headers."""
        dominators = self._dominators()
        latches: dict[int, set[int]] = {}
        for block in self.blocks:
            for successor in block.successors:
                if successor in dominators.get(block.index, ()):
                    latches.setdefault(successor, set()).add(block.index)
        return [
            Loop(header, frozenset(sources), frozenset(self._body(header, sources)))
            for header, sources in sorted(latches.items())
        ]

    @functools.cached_property
    def working_loops(self) -> list[Loop]:
        """Innermost loops, not counting those that only wait for a barrier."""
        found = [loop for loop in self.loops if not self._only_waits(loop)]
        return [
            loop for loop in found if not any(other.blocks < loop.blocks for other in found)
        ]

    def straight_path(self, loop: Loop) -> list[SassInstruction]:
        """The instructions of one iteration in which every wait succeeds at once.

        Of the ways through the loop it is the longest one that enters no waiting loop: both
        sides of a branch that skips work are taken as not skipped.
        """
        waits = [inner for inner in self.loops if inner.blocks < loop.blocks]
        polling = {index for inner in waits if self._only_waits(inner) for index in inner.blocks}
        inside = loop.blocks - polling

        @functools.cache
        def longest(index: int) -> tuple[int, tuple[int, ...]]:
            """(instructions, blocks) from this block to a latch; -1 if no latch is reached."""
            own = len(self.blocks[index].instructions)
            best = (own, (index,)) if index in loop.latches else (-1, ())
            for successor in self.blocks[index].successors:
                if successor in inside and successor != loop.header:
                    length, path = longest(successor)
                    if length >= 0:
                        best = max(best, (own + length, (index, *path)))
            return best

        _, path = longest(loop.header)
        return [instruction for index in path for instruction in self.blocks[index].instructions]

    def _only_waits(self, loop: Loop) -> bool:
        opcodes = [i.opcode for index in loop.blocks for i in self.blocks[index].instructions]
        polls = any(opcode.startswith("SYNCS.PHASECHK") for opcode in opcodes)
        return polls and not any(opcode.startswith(_WORK) for opcode in opcodes)

    def _predecessors(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {block.index: [] for block in self.blocks}
        for block in self.blocks:
            for successor in block.successors:
                found[successor].append(block.index)
        return found

    def _dominators(self) -> dict[int, set[int]]:
        """Block -> its dominators, for the blocks that the entry reaches."""
        reached, pending = {0}, [0]
        while pending:
            for successor in self.blocks[pending.pop()].successors:
                if successor not in reached:
                    reached.add(successor)
                    pending.append(successor)
        predecessors = self._predecessors()
        dominators = {index: set(reached) for index in reached}
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for index in sorted(reached - {0}):
                before = [dominators[p] for p in predecessors[index] if p in reached]
                new = set.intersection(*before) | {index}
                if new != dominators[index]:
                    dominators[index], changed = new, True
        return dominators

    def _body(self, header: int, latches: set[int]) -> set[int]:
        predecessors = self._predecessors()
        body, pending = {header}, list(latches)
        while pending:
            index = pending.pop()
            if index not in body:
                body.add(index)
                pending += predecessors[index]
        return body


def _basic_blocks(lines: list[str]) -> list[Block]:
    blocks: list[Block] = []
    label_block: dict[str, int] = {}
    starts_block = True
    for line in lines:
        label = _LABEL.match(line)
        if label:
            label_block[label[1]] = len(blocks)
            starts_block = True
            continue
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        offset, guard, opcode, operands = found.groups()
        instruction = SassInstruction(int(offset, 16), guard or "", opcode, operands.strip())
        if starts_block:
            blocks.append(Block(len(blocks), [], []))
        blocks[-1].instructions.append(instruction)
        starts_block = bool(instruction.targets) or not instruction.falls_through
    for block in blocks:
        last = block.instructions[-1]
        successors = [label_block[target] for target in last.targets]
        if last.falls_through:
            successors.append(block.index + 1)
        block.successors = [index for index in successors if index < len(blocks)]
    return blocks


def class_counts(instructions: list[SassInstruction]) -> dict[str, int]:
    """Class -> number of instructions, every class present."""
    counts = Counter(instruction.instruction_class for instruction in instructions)
    return {name: counts[name] for name in CLASS_NAMES}


def disassemble(cubin: bytes, kernel: str | None = None) -> Function:
    """The kernel of a cubin by its (mangled) name; without one the longest function.

    Raises RuntimeError if nvdisasm is not installed, KeyError for a kernel that is not there.
    """
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [nvdisasm(), "--print-code", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^//-+ \.text\.(\S+)", text, flags=re.MULTILINE)
    named = dict(zip(sections[1::2], sections[2::2], strict=True))
    code = max(named.values(), key=len) if kernel is None else named[kernel]
    return Function(code.splitlines())


def nvdisasm() -> str:
    """Path of nvdisasm as its package installed it; RuntimeError if the package is missing."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "nvdisasm" and os.access(file.locate(), os.X_OK):
            return str(file.locate())
    raise RuntimeError(
        f"nvdisasm is needed to read the compiled instructions; install it with "
        f"pip install {_PACKAGE}"
    )
