"""Thin wrappers of tcgen05 instructions the DSL does not offer in the form the kernels need, and
where the slices of their operand tiles lie (`kernels.operands`).

Section numbers are those of the PTX ISA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from ..limits import HEAD_DIM
from ..operands import BLOCK_COLUMNS, ROW_BYTES

DESCRIPTOR_VERSION = 0b001 << 14  # bits 46-48 of the descriptor: 14-16 of its upper word
SWIZZLE_128B = 2 << 29  # bits 61-63
ADDRESS_BITS = 0x3FFFF
SLICE = 16  # elements of one instruction's K
E4M3_SLICE = 32  # the same of e4m3; a tile of them counts here as one of half as many columns


@dataclass(frozen=True)
class OperandLayout:
    """An operand tile in SMEM (9.7.16.4, matrix descriptor), with the 128-byte swizzle or none.

    leading_bytes: with the swizzle, MN-major: distance of the next 64 MN elements; K-major ignores
        it.  Without: of the next core matrix along K.
    stride_bytes: with the swizzle, distance of the next 8 rows (K-major) or the next 8 k
        (MN-major).  Without: of the next core matrix along MN.
    step_bytes: start of each K = 16 slice, relative to the tile; slices inside a swizzle atom
        start at unaligned addresses with base offset 0, since the hardware applies the XOR to
        address bits.
    """

    leading_bytes: int
    stride_bytes: int
    step_bytes: tuple[int, ...]
    is_swizzled: bool = True

    def part(self, index: int, parts: int) -> OperandLayout:
        """One of `parts` equal runs of the slices."""
        count = len(self.step_bytes) // parts
        return self.slices(range(index * count, (index + 1) * count))

    def slices(self, numbers: range | tuple[int, ...]) -> OperandLayout:
        return replace(self, step_bytes=tuple(self.step_bytes[number] for number in numbers))

    @property
    def upper_word(self) -> int:
        """Bits 32-63 of the descriptor."""
        swizzle = SWIZZLE_128B if self.is_swizzled else 0
        return (self.stride_bytes >> 4) | DESCRIPTOR_VERSION | swizzle

    def lower_word(self, tile: cute.Pointer) -> Int32:
        """Bits 0-31 for a tile at this shared-memory address."""
        address = (tile.toint() & ADDRESS_BITS) >> 4
        return address | ((self.leading_bytes >> 4) << 16)


def k_major_operand(rows: int, columns: int = HEAD_DIM) -> OperandLayout:
    """A tile of rows x columns, reduced over its columns."""
    slices_per_block = BLOCK_COLUMNS // SLICE
    block_bytes = rows * ROW_BYTES
    steps = tuple(
        k // slices_per_block * block_bytes + k % slices_per_block * (2 * SLICE)
        for k in range(columns // SLICE)
    )
    return OperandLayout(leading_bytes=16, stride_bytes=8 * ROW_BYTES, step_bytes=steps)


def mn_major_operand(rows: int, slice_rows: int = SLICE, block: int = 0) -> OperandLayout:
    """A tile of `rows` rows, reduced over its rows.  slice_rows: of one instruction.  block: of
    columns with which it begins."""
    first = block * rows * ROW_BYTES
    steps = tuple(first + k * slice_rows * ROW_BYTES for k in range(rows // slice_rows))
    return OperandLayout(
        leading_bytes=rows * ROW_BYTES, stride_bytes=8 * ROW_BYTES, step_bytes=steps
    )


@dataclass(frozen=True)
class TmemOperand:
    """An A operand in TMEM (9.7.16.10): 8 columns a slice. step_columns: starts of the slices."""

    step_columns: tuple[int, ...]

    @classmethod
    def contiguous(cls, elements: int) -> TmemOperand:
        """`elements` of K one after the other."""
        return cls(tuple(range(0, elements // 2, 8)))

    def part(self, index: int, parts: int) -> TmemOperand:
        """One of `parts` equal runs of the slices."""
        count = len(self.step_columns) // parts
        return self.slices(range(index * count, (index + 1) * count))

    def slices(self, numbers: range | tuple[int, ...]) -> TmemOperand:
        return TmemOperand(tuple(self.step_columns[number] for number in numbers))


@dataclass(frozen=True)
class MmaShape:
    """The instruction descriptor of kind::f16, or of kind::f8f6f4 with e4m3 operands, with float32
    accumulation (9.7.16.4.2).

    m, n: of the result.  a_mn_major, b_mn_major: A is stored with M, B with N contiguous.
    negate_a: A is negated.  ctas: that have it together, 2 or 1.  is_e4m3: both operands
    are; is_bf16 then means nothing.
    """

    m: int
    n: int
    is_bf16: bool
    a_mn_major: bool = False
    b_mn_major: bool = False
    negate_a: bool = False
    ctas: int = 2
    is_e4m3: bool = False

    @property
    def kind(self) -> str:
        return "f8f6f4" if self.is_e4m3 else "f16"

    @property
    def instruction_descriptor(self) -> int:
        float32_accumulator = 1 << 4
        # In kind::f8f6f4 0 stands for e4m3.
        operand_type = (1 << 7 | 1 << 10) if self.is_bf16 and not self.is_e4m3 else 0
        return (
            float32_accumulator
            | operand_type
            | self.negate_a << 13
            | self.a_mn_major << 15
            | self.b_mn_major << 16
            | (self.n >> 3) << 17
            | (self.m >> 4) << 24
        )


def chain_ptx(
    a_layout: OperandLayout | TmemOperand, b_layout: OperandLayout, shape: MmaShape
) -> str:
    """The text of `mma_chain`: r0 accumulator, r1 and r2 A and B, r3 accumulate, r4 shape."""
    lines = [
        "{",
        ".reg .pred elected, add;",
        ".reg .b32 leader, a, b, a_low, b_low;",
        ".reg .b64 a_desc, b_desc;",
        "elect.sync leader|elected, 0xffffffff;",
        "setp.ne.b32 add, {$r3}, 0;",
        # A lane's number is below 32, so this adds 0; see the docstring.
        "shr.u32 leader, leader, 5;",
        "add.u32 a, {$r1}, leader;",
        "add.u32 b, {$r2}, leader;",
    ]
    for step, b_bytes in enumerate(b_layout.step_bytes):
        lines.append(f"add.u32 b_low, b, {b_bytes >> 4};")
        lines.append(f"mov.b64 b_desc, {{b_low, {b_layout.upper_word:#x}}};")
        if isinstance(a_layout, TmemOperand):
            operand = f"[a + {a_layout.step_columns[step]}]"
        else:
            lines.append(f"add.u32 a_low, a, {a_layout.step_bytes[step] >> 4};")
            lines.append(f"mov.b64 a_desc, {{a_low, {a_layout.upper_word:#x}}};")
            operand = "a_desc"
        lines.append(
            f"@elected tcgen05.mma.cta_group::{shape.ctas}.kind::{shape.kind} "
            f"[{{$r0}}], {operand}, b_desc, {{$r4}}, {'add' if step == 0 else '1'};"
        )
    lines.append("}")
    return "\n".join(lines)


@dsl_user_op
def mma_chain(
    shape: MmaShape,
    accumulator: Int32,
    a: tuple[Int32, OperandLayout | TmemOperand],
    b: tuple[Int32, OperandLayout],
    accumulate: Boolean,
    *,
    loc=None,
    ip=None,
) -> None:
    """tcgen05.mma.cta_group.kind (9.7.16.10.9.1) over all slices of two tiles: of K = 16, of e4m3
    K = 32, which are as many bytes.

    accumulator: TMEM address of D.  a: lower descriptor word and layout of A in SMEM, or address
    and layout of A in TMEM.  b: lower descriptor word and layout of B.  accumulate: whether the
    first slice adds to D.

    Called by all lanes of one warp, of a pair's leader CTA.  The chain stays in convergent code and
    one elected lane's predicate guards each instruction, so that the descriptors are computed
    once in uniform registers and an MMA costs one issue slot.  They depend on the elected lane's
    number, which ptxas does not know to be small: it would otherwise keep the descriptors of
    tiles that never move in registers over a whole loop, far more than there are.
    """
    a_word, a_layout = a
    b_word, b_layout = b
    cute.arch.inline_ptx(
        chain_ptx(a_layout, b_layout, shape),
        read_only_args=[
            Int32(accumulator),
            Int32(a_word),
            Int32(b_word),
            Int32(Boolean(accumulate)),
            Int32(shape.instruction_descriptor),
        ],
        loc=loc,
        ip=ip,
    )


@dataclass(frozen=True)
class Mma:
    """An MMA of a kernel: its shape, and where the slices of its operands lie in their buffers."""

    shape: MmaShape
    a: OperandLayout | TmemOperand
    b: OperandLayout

    def issue(
        self, result: Int32, a: cute.Pointer | Int32, b: cute.Pointer, accumulate: Boolean | bool
    ) -> None:
        """Issue `mma_chain`.  result: address in tensor memory.  a, b: addresses of the buffers in
        shared memory; a in tensor memory where its layout says so."""
        if isinstance(self.a, OperandLayout):
            a = self.a.lower_word(a)
        b_word = self.b.lower_word(b)
        mma_chain(self.shape, result, (a, self.a), (b_word, self.b), accumulate)


@dsl_user_op
def fence_before_thread_sync(*, loc=None, ip=None) -> None:
    """tcgen05.fence::before_thread_sync (9.7.16.11): earlier tcgen05 before the coming signal."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_thread_sync(*, loc=None, ip=None) -> None:
    """tcgen05.fence::after_thread_sync (9.7.16.11): later tcgen05 after the completed wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
