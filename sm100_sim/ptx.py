"""PTX text to instructions: the tokenizer and parser of the simulator.

The parser covers what NVVM and inline assembly emit for sm_100a kernels: entry parameters, shared
symbols, register declarations with nested scopes, guards, vector, memory and bracket-list operands,
immediates, special registers, labels, branch-target tables and source locations (PTX ISA 4 and 5).
It knows the syntax only; what an opcode means is the business of ``sm100_sim.isa.table``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DYNAMIC_SHARED_OFFSET = 1024
"""Shared offset of the dynamic shared memory: the hardware keeps the first KiB for itself."""

TYPE_BYTES = {"pred": 0, "b8": 1, "s8": 1, "u8": 1, "b16": 2, "s16": 2, "u16": 2, "f16": 2,
              "bf16": 2, "b32": 4, "s32": 4, "u32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
              "b64": 8, "s64": 8, "u64": 8, "f64": 8, "f32x2": 8, "b128": 16}


class PtxSyntaxError(ValueError):
    """The text is not PTX that the parser understands; the message names line and statement."""


@dataclass(slots=True, eq=False)
class Register:
    """One declared register.

    ``file`` is "r32", "r64" or "pred". ``slot`` is its row in that register file of a warp (a b128
    register takes rows slot and slot + 1 of r64), or -1 while it lives in no file: the code
    generator gives slots only to registers that some other basic block or a trap reads.
    """

    name: str
    type: str
    order: int
    slot: int = -1

    @property
    def file(self) -> str:
        if self.type == "pred":
            return "pred"
        return "r64" if TYPE_BYTES[self.type] >= 8 else "r32"


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an instruction.

    kind      meaning
    reg       a register: ``register``, ``name``, ``type`` ("b32", "b64", ...)
    pred      a predicate register, with ``negated`` for ``!p``
    imm       an immediate: ``value``; ``type`` is "int", "f32" (``value`` holds the 32-bit
              pattern) or "f64" (the 64-bit pattern)
    mem       ``[base + value]``: ``base`` is a reg, sym, or imm operand; a bracket list such as
              TMA's ``[%rd1, {%r1, %r2}]`` has its further members in ``items``
    vec       ``{a, b, ...}``: ``items``
    pair      ``a|b`` (two destinations): ``items``
    label     a branch target: ``name``, ``value`` = instruction index
    targets   the table of a ``brx.idx``: ``items`` are labels
    sym       an address: ``name``; ``type`` is "shared" or "param"; ``value`` is the offset
    special   a special register: ``name`` such as "%tid.x"
    sink      ``_``: the result is dropped
    """

    kind: str
    name: str = ""
    type: str = ""
    value: int = 0
    base: "Operand | None" = None
    items: "tuple[Operand, ...]" = ()
    negated: bool = False
    register: Register | None = None

    @property
    def slot(self) -> int:
        """Row in the register file; raises if the register has none."""
        if self.register is None or self.register.slot < 0:
            raise ValueError(f"operand {self.name or self.kind!r} occupies no register-file slot")
        return self.register.slot


@dataclass(slots=True)
class Instruction:
    """One instruction.

    ``opcode`` and ``modifiers`` are the dotted name split at the first dot by the parser; loading
    the kernel re-splits them at the longest prefix that the instruction table knows. ``source`` is
    (file, line) of the last ``.loc``. ``spin`` marks a try_wait whose false result leads straight
    back to it (set by the control-flow analysis).
    """

    index: int
    opcode: str
    modifiers: tuple[str, ...]
    guard: Operand | None
    operands: tuple[Operand, ...]
    text: str
    line: int
    source: tuple[str, int] | None = None
    spin: bool = False

    @property
    def name(self) -> str:
        """The full dotted name, e.g. ``add.rm.ftz.f32x2``."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter: byte offset, size and alignment in the parameter buffer."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class SharedSymbol:
    """One .shared variable: offset within the CTA's shared memory; dynamic ones have size 0."""

    name: str
    offset: int
    size: int
    align: int
    dynamic: bool


@dataclass(slots=True)
class Kernel:
    """One entry function.

    ``blocks`` is filled when the kernel is loaded by the code generator. ``static_shared_end`` is
    the first shared offset after the static symbols; dynamic shared memory starts at
    DYNAMIC_SHARED_OFFSET, static symbols come after ``dynamic bytes`` of no launch: they sit
    between the reserved KiB and the dynamic symbol when they fit, see ``place_shared``.
    """

    name: str
    params: list[Param]
    shared: dict[str, SharedSymbol]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    blocks: list = field(default_factory=list)
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    min_ctas_per_sm: int = 1
    local_bytes: int = 0
    static_shared_end: int = DYNAMIC_SHARED_OFFSET

    @property
    def param_bytes(self) -> int:
        """Size of the parameter buffer in bytes."""
        return max((p.offset + p.size for p in self.params), default=0)
