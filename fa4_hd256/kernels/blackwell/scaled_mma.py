"""MMAs with scales of blocks, and the copies that bring scales to tensor memory.

Section numbers are those of the PTX ISA, as in `instructions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..block_scales import ATOM_BLOCKS, ATOM_BYTES
from .instructions import Mma, OperandLayout, chain_ptx

#: Addresses of the scales of A and of B in tensor memory.
Places: TypeAlias = "tuple[Int32, Int32]"
#: Bits of an instruction descriptor: float32 results, which kinds with scales always have, and that
#: scales are E8M0.
FLOAT32_RESULT, E8M0 = 1 << 4, 1 << 23


@dataclass(frozen=True)
class ScaledMma(Mma):
    """An MMA in e4m3, kind::mxf8f6f4, whose blocks of 32 along K have E8M0 scales, one a slice.

    numbers: of its slices among those that the scales are of.
    """

    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, mma: Mma, numbers: Iterable[int] | None = None) -> ScaledMma:
        numbers = range(len(mma.b.step_bytes)) if numbers is None else numbers
        return cls(mma.shape, mma.a, mma.b, tuple(numbers))

    def issue_scaled(
        self,
        result: Int32,
        a: cute.Pointer | Int32,
        b: cute.Pointer,
        accumulate: Boolean | bool,
        scales: Places,
    ) -> None:
        if isinstance(self.a, OperandLayout):
            a = self.a.lower_word(a)
        words = (Int32(word) for word in (result, a, self.b.lower_word(b)))
        descriptor = self.shape.instruction_descriptor & ~FLOAT32_RESULT | E8M0
        _issue(self, (*words, Int32(Boolean(accumulate)), Int32(descriptor), *map(Int32, scales)))

    @property
    def ptx(self) -> str:
        lines, numbers = [], iter(self.numbers)
        for line in chain_ptx(self.a, self.b, self.shape).splitlines():
            if "tcgen05.mma" in line:
                lines += _scales_ptx(next(numbers))
                line = line.replace("::f8f6f4", "::mxf8f6f4.block_scale.block32")
                line = line.replace("{$r4}", "idesc, [a_scales], [b_scales]")
            lines.append(line.replace(".b32 leader,", ".b32 idesc, a_scales, b_scales, leader,"))
        return "\n".join(lines)


def _scales_ptx(number: int) -> list[str]:
    """Choose the scales of a slice, by its number in the tile: words, and the byte of them, which
    bits 30-31 of their address and the descriptor's scale ids name (9.7.16.10.7.2)."""
    word, byte = divmod(number, ATOM_BLOCKS)
    place = word * ATOM_BLOCKS | byte << 30
    return [
        f"or.b32 idesc, {{$r4}}, {byte << 29 | byte << 4:#x};",
        f"add.u32 a_scales, {{$r5}}, {place:#x};",
        f"add.u32 b_scales, {{$r6}}, {place:#x};",
    ]


@dsl_user_op
def _issue(mma: ScaledMma, words: tuple[Int32, ...], *, loc: Any = None, ip: Any = None) -> None:
    cute.arch.inline_ptx(mma.ptx, read_only_args=list(words), loc=loc, ip=ip)


@dsl_user_op
def copy_scales(
    target: Int32,
    source: cute.Pointer,
    atoms: int,
    ctas: int = 2,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """tcgen05.cp.32x128b.warpx4 (9.7.16.9.2) of so many atoms, one after the other in shared memory
    and four columns each in tensor memory, in all CTAs; called as `mma_chain` is, whose slices come
    after it.

    target: address in tensor memory.  source: of the first atom, 512 bytes: 32 rows of 16.
    """
    layout = OperandLayout(16, 128, (0,), is_swizzled=False)
    lines = [
        "{",
        ".reg .pred elected;",
        ".reg .b32 leader, low, to;",
        ".reg .b64 desc;",
        "elect.sync leader|elected, 0xffffffff;",
        "shr.u32 leader, leader, 5;",
    ]
    for atom in range(atoms):
        lines += [
            f"add.u32 low, {{$r1}}, {atom * ATOM_BYTES >> 4};",
            "add.u32 low, low, leader;",
            f"mov.b64 desc, {{low, {layout.upper_word:#x}}};",
            f"add.u32 to, {{$r0}}, {atom * ATOM_BLOCKS};",
            f"@elected tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [to], desc;",
        ]
    cute.arch.inline_ptx(
        "\n".join([*lines, "}"]),
        read_only_args=[Int32(target), Int32(layout.lower_word(source))],
        loc=loc,
        ip=ip,
    )
