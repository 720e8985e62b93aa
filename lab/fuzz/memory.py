"""Family of memory: loads, stores and atomics of a thread on bytes of its own.

Each thread has 64 bytes of local and 64 of global memory, which start as zeros.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Registers
from .program import Launch, Piece, Program, Writer, writer
from .straight import finish

_OWN = 64
_THREADS = 64
_SIZES = {f"{kind}{8 * size}": size for size in (1, 2, 4, 8) for kind in "bus"}
#: Modifiers of global accesses that change no result of a thread alone.
_STORES = (
    "", *".wb .cg .cs .wt .volatile .relaxed.gpu .release.gpu .relaxed.cta .relaxed.sys".split()
)  # fmt: skip
_LOADS = (
    "", ".ca",
    *".cg .cs .lu .cv .volatile .relaxed.gpu .acquire.gpu .relaxed.cta .relaxed.sys".split(),
)  # fmt: skip
_ATOMICS = {
    "b32": ("and", "or", "xor", "exch", "cas"), "b64": ("and", "or", "xor", "exch", "cas"),
    "u32": ("add", "min", "max", "inc", "dec"), "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max"), "s64": ("min", "max"), "b16": ("cas",),
}  # fmt: skip


class _Accesses:
    def __init__(self, w: Writer, registers: Registers) -> None:
        self.w, self.registers = w, registers

    def piece(self) -> Piece:
        kinds = (self._store, self._store, self._load, self._load, self._atomic)
        guard = ""
        if self.w.chance(0.15):
            guard = f"@{self.w.random.choice(('', '!'))}{self.registers.pick('p')} "
        return Piece(self.w.random.choice(kinds)(guard))

    def _area(self, size: int, atomic: bool = False) -> tuple[str, str]:
        """State space and address of some aligned place; the address space may be left out."""
        offset = size * self.w.random.randrange(_OWN // size)
        local = not atomic and self.w.chance(0.4)
        if self.w.chance(0.3):
            return "", f"[{'%stack' if local else '%own'}+{offset}]"
        return (".local", f"[stack+{offset}]") if local else (".global", f"[%own+{offset}]")

    def _operand(self, kind: str, count: int, distinct: bool) -> str:
        file = {1: "h", 2: "h", 4: "r", 8: "w"}[_SIZES[kind]]
        if _SIZES[kind] == 1 and self.w.chance(0.5):
            file = "r"
        names = [self.registers.pick(file) for _ in range(count)]
        if distinct:
            numbers = self.w.random.sample(range(self.registers.files[file]), count)
            names = [f"%{file}{number}" for number in numbers]
        return names[0] if count == 1 else f"{{{', '.join(names)}}}"

    def _form(self) -> tuple[str, int]:
        """Type and number of registers of an access of at most 16 bytes."""
        kind = self.w.random.choice(tuple(_SIZES))
        counts = [n for n in (1, 1, 2, 4) if n * _SIZES[kind] <= 16 and (n < 4 or kind[1:] == "32")]
        return kind, self.w.random.choice(counts)

    def _access(
        self, name: str, choices: tuple[str, ...], kind: str, count: int
    ) -> tuple[str, str]:
        space, place = self._area(_SIZES[kind] * count)
        how = self.w.random.choice(choices) if space == ".global" else ""
        before, after = (how, "") if how[1:4] in ("vol", "rel", "acq") else ("", how)
        vector = f".v{count}" if count > 1 else ""
        return f"{name}{before}{space}{after}{vector}.{kind}", place

    def _store(self, guard: str) -> str:
        kind, count = self._form()
        opcode, place = self._access("st", _STORES, kind, count)
        return f"{guard}{opcode} {place}, {self._operand(kind, count, False)};\n"

    def _load(self, guard: str) -> str:
        kind, count = self._form()
        opcode, place = self._access("ld", _LOADS, kind, count)
        return f"{guard}{opcode} {self._operand(kind, count, True)}, {place};\n"

    def _atomic(self, guard: str) -> str:
        kind = self.w.random.choice(tuple(_ATOMICS))
        name = self.w.random.choice(_ATOMICS[kind])
        space, place = self._area(_SIZES[kind], atomic=True)
        how = self.w.random.choice(
            ("", ".relaxed.cta", ".acquire.gpu", ".release.gpu", ".acq_rel.sys")
        )
        values = ", ".join(self._operand(kind, 1, False) for _ in range(2 if name == "cas" else 1))
        if name != "cas" and name != "exch" and self.w.chance(0.3):
            how = how.replace("acquire", "relaxed").replace("acq_rel", "relaxed")
            return f"{guard}red{how}{space}.{name}.{kind} {place}, {values};\n"
        return (
            f"{guard}atom{how}{space}.{name}.{kind} {self._operand(kind, 1, False)}, {place}, "
            f"{values};\n"
        )


def memory(seed: int) -> Program:
    """Loads, stores and atomics on local and global bytes, mixed with arithmetic."""
    w = writer("memory", seed)
    registers = Registers(w, ("integer", "short", "wide"))
    accesses = _Accesses(w, registers)
    pieces = [
        accesses.piece() if w.chance(0.75) else registers.instruction()
        for _ in range(w.random.randrange(15, 40))
    ]
    zeros = "".join(
        f"st.local.v4.b32 [stack+{16 * i}], {{%i0, %i0, %i0, %i0}};\n" for i in range(_OWN // 16)
    )
    head = (
        f".local .align 16 .b8 stack[{_OWN}];\n.reg .b64 %own, %stack;\n"
        f"ld.param.u64 %own, [p2];\nmul.wide.u32 %step, %index, {_OWN};\n"
        f"add.u64 %own, %own, %step;\nmov.u64 %stack, stack;\ncvta.local.u64 %stack, %stack;\n"
        f"mov.b32 %i0, 0;\n{zeros}"
    )
    return finish(
        w, registers, "memory", seed, pieces, Launch(1, _THREADS), extra_head=head,
        extra_outputs=(np.zeros((_THREADS, _OWN // 4), np.uint32),),
    )  # fmt: skip
