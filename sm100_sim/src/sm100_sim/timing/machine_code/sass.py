"""SASS of a cubin with its control codes: instructions, basic blocks, control flow.

nvdisasm prints one instruction per line, followed by the 128 bits of its encoding. Since Volta the
control code stands in bits 105 to 125 of them: stall count (4 bits), yield (1, inverted),
scoreboard set on completion (3, 7 = none), scoreboard set when the operands are read (3),
scoreboards waited for (6), operand reuse (4). The layout is that found by Jia et al., "Dissecting
the NVIDIA Volta GPU Architecture via Microbenchmarking" (arXiv 1804.06826), and by the CuAssembler
project; sm_90 and sm_100 cubins decode to consistent values with it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "nvidia-cuda-nvdisasm"
_LABEL = re.compile(r"^(\S+):\s*$")
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][^\s;]*)\s*([^;]*);"
    r"\s*/\* 0x([0-9a-f]{16}) \*/"
)
_UPPER_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_BRANCH_TARGETS = re.compile(r"\.L_x_\d+")
_CONTROL_SHIFT = 105 - 64
NO_SCOREBOARD = 7

#: Opcodes after which control never falls through, unless predicated.
_ENDS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "RET", "EXIT", "BPT")


@dataclass(frozen=True)
class Control:
    """The control code of an instruction.

    stall: clocks until the warp may issue the next one. yields: whether the scheduler should turn
    to another warp. sets: scoreboard that completion releases, None if none. frees: scoreboard
    that reading the operands releases. waits: bit mask of scoreboards that must be released first.
    """

    stall: int
    yields: bool
    sets: int | None
    frees: int | None
    waits: int

    @classmethod
    def decode(cls, upper: int) -> Control:
        """Decode the upper 64 bits of an encoding."""
        bits = upper >> _CONTROL_SHIFT
        sets, frees = bits >> 5 & 7, bits >> 8 & 7
        return cls(
            stall=bits & 15,
            yields=not bits >> 4 & 1,
            sets=None if sets == NO_SCOREBOARD else sets,
            frees=None if frees == NO_SCOREBOARD else frees,
            waits=bits >> 11 & 63,
        )


@dataclass(frozen=True)
class SassInstruction:
    """One instruction: byte offset in its function, predicate ("" if none), opcode, operands."""

    offset: int
    guard: str
    opcode: str
    operands: str
    control: Control

    @functools.cached_property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def targets(self) -> tuple[str, ...]:
        """Labels that control may go to, other than the next instruction."""
        if self.base in ("BRA", "JMP"):
            return tuple(_TARGET.findall(self.operands))
        if self.base in ("BRX", "BRXU"):
            return tuple(_BRANCH_TARGETS.findall(self.operands))
        return ()

    @property
    def falls_through(self) -> bool:
        """Return True if control may go to the next instruction."""
        if self.base not in _ENDS:
            return True
        # A uniform predicate is an operand: BRA.U !UP0, `(label).
        conditional = self.base == "BRA" and "," in self.operands.split("`")[0]
        return bool(self.guard) or conditional

    @property
    def text(self) -> str:
        """Return the instruction as disassembled."""
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".strip()


@dataclass(eq=False)
class Block:
    """A basic block: instructions start .. stop - 1; `successors` are indices of blocks."""

    index: int
    start: int
    stop: int
    successors: list[int]


class SassFunction:
    """The control-flow graph of one kernel: `instructions`, and `blocks` over them."""

    def __init__(self, name: str, lines: list[str]) -> None:
        """lines: nvdisasm's text of one function. Raises ValueError if it has no instruction."""
        self.name = name
        self.instructions: list[SassInstruction] = []
        self.blocks: list[Block] = []
        self._read(lines)
        if not self.instructions:
            raise ValueError(f"the disassembly of {name!r} holds no instruction")

    def _read(self, lines: list[str]) -> None:
        label_block: dict[str, int] = {}
        starts_block = True
        for line, following in zip(lines, [*lines[1:], ""]):
            label = _LABEL.match(line)
            if label:
                label_block[label[1]] = len(self.blocks)
                starts_block = True
                continue
            found, upper = _INSTRUCTION.match(line), _UPPER_HALF.match(following)
            if not found or not upper:
                continue
            offset, guard, opcode, operands, _ = found.groups()
            guard = "" if guard in (None, "PT", "UPT") else guard
            control = Control.decode(int(upper[1], 16))
            instruction = SassInstruction(int(offset, 16), guard, opcode, operands.strip(), control)
            number = len(self.instructions)
            if starts_block:
                self.blocks.append(Block(len(self.blocks), number, number, []))
            self.instructions.append(instruction)
            self.blocks[-1].stop = number + 1
            starts_block = bool(instruction.targets) or not instruction.falls_through
        for block in self.blocks:
            last = self.instructions[block.stop - 1]
            successors = [label_block[t] for t in last.targets if t in label_block]
            if last.falls_through:
                successors.append(block.index + 1)
            unique = dict.fromkeys(successors)
            block.successors = [index for index in unique if index < len(self.blocks)]

    @functools.cached_property
    def block_of(self) -> list[int]:
        """Instruction number -> index of its block."""
        found = [0] * len(self.instructions)
        for block in self.blocks:
            for number in range(block.start, block.stop):
                found[number] = block.index
        return found


def disassemble(cubin: bytes) -> dict[str, SassFunction]:
    """The functions of a cubin by name; helpers that a kernel calls are part of its section.

    Raises RuntimeError if nvdisasm is not installed or refuses the cubin.
    """
    with tempfile.TemporaryDirectory(prefix="sm100_sim_") as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [nvdisasm(), "--print-code", "-hex", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"nvdisasm refused the cubin: {result.stderr.strip()}")
    found = {}
    for section in re.split(r"^//-+ \.text\.", result.stdout, flags=re.MULTILINE)[1:]:
        lines = section.splitlines()
        name = lines[0].split(" ")[0]
        found[name] = SassFunction(name, lines)
    return found


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
