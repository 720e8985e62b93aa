"""wgmma as the kernels use it: MMAs of one warpgroup, accumulators in registers.

Section numbers are those of the PTX ISA.

NOTE [accumulator layout].  Of the 64 x N result of a warpgroup (9.7.15.5.1.1) warp w holds the rows
16 w to 16 w + 15, and lane l of it the elements of two rows, l / 4 and l / 4 + 8: of every eight
columns the two from 2 (l % 4) on.  In a register fragment they are numbered column of the two, row
of the two, eight columns, the first changing fastest.  So a row is shared by four neighbouring
lanes (a quad).  A fragment of A (64 x 16) is numbered the same way: an accumulator, rounded to 16
bits, is the A of the next MMA as it stands.

NOTE [asynchronous reads]. An MMA reads its operands, registers too, until `wait` says that its
group is done; nothing may be written there before.  Each warp of the warpgroup runs a part of the
MMA, so every warp waits, and every warp says so to those who fill the buffers again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 64  # of the result of a warpgroup's MMA
WARPGROUP_THREADS = 128
QUAD = 4  # lanes that share a row of an accumulator
COLUMN_GROUP = 8  # columns that a quad has two each of


@dataclass(frozen=True)
class WgmmaShape:
    """wgmma.mma_async of 64 x n x 32 bytes of K with float32 accumulation (9.7.15.5.2).

    dtype: of A and B, cutlass.BFloat16, Float16 or Float8E4M3FN.  n: a multiple of 8 up to 256.
    a_in_registers: A is a fragment in registers.  a_mn_major, b_mn_major: A is stored with M, B
    with N contiguous; elements of 8 bits are not.
    """

    dtype: Any
    n: int
    a_in_registers: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False

    def tiled_mma(self, accumulate: Any) -> Any:
        """The DSL's object.  accumulate: whether the MMA is added to the result."""
        source = warpgroup.OperandSource
        types: tuple[Any, ...] = (self.dtype, Float32)
        operation, k = warpgroup.MmaF16BF16Op, 16
        if self.dtype.width == 8:
            types = (self.dtype, *types)
            operation, k = warpgroup.MmaF8Op, 32
        mma = cute.make_tiled_mma(
            operation(
                *types,
                (ROWS, self.n, k),
                source.RMEM if self.a_in_registers else source.SMEM,
                OperandMajorMode.MN if self.a_mn_major else OperandMajorMode.K,
                OperandMajorMode.MN if self.b_mn_major else OperandMajorMode.K,
            )
        )
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def accumulator(self) -> cute.Tensor:
        """A result in registers: float32, NOTE [accumulator layout]."""
        mma = self.tiled_mma(False)
        return mma.make_fragment_C(mma.partition_shape_C((ROWS, self.n)))

    def a_fragment(self, columns: int) -> cute.Tensor:
        """An A of 64 x `columns` in registers: as many elements as an accumulator of that width."""
        mma = self.tiled_mma(False)
        return mma.make_fragment_A(mma.partition_shape_A((ROWS, columns)))

    def a_operand(self, tile: cute.Tensor) -> cute.Tensor:
        """Descriptors of A in shared memory, 64 x k (x stages), by slice of K."""
        mma = self.tiled_mma(False)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))

    def b_operand(self, tile: cute.Tensor) -> cute.Tensor:
        """Descriptors of B in shared memory, n x k (x stages), by slice of K."""
        mma = self.tiled_mma(False)
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def multiply(
    shape: WgmmaShape,
    result: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: Any,
    first: int = 0,
) -> None:
    """Issue result = A B, or result += A B, over all slices of A; by all threads of a warpgroup.

    a, b: of `a_operand` or `a_fragment` and of `b_operand`, without stages.  first: the slice of B
    that goes with A's first.  Between the last write to a register that the MMA reads or changes
    and this stands `fence`, behind it `commit`.
    """
    overwriting, adding = shape.tiled_mma(accumulate), shape.tiled_mma(True)
    for k in range(cute.size(a, mode=[2])):
        mma = overwriting if k == 0 else adding
        cute.gemm(mma, result, a[None, None, k], b[None, None, first + k], result)


def fence() -> None:
    """wgmma.fence (9.7.15.7.1): orders registers written before with the MMAs that follow."""
    warpgroup.fence()


def commit() -> None:
    """wgmma.commit_group (9.7.15.7.2): the MMAs issued since the last one are a group."""
    warpgroup.commit_group()


def wait(pending: int) -> None:
    """wgmma.wait_group (9.7.15.7.3): until at most so many of the latest groups are not done."""
    warpgroup.wait_group(pending)


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """rows x columns (x stages) as columns x rows (x stages): the same bytes, for an operand that
    is reduced over the rows."""
    modes = [1, 0, *range(2, cute.rank(tile))]
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=modes))


def rows_of(fragment: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Both rows of a thread's fragment, each by element; `fragment_columns` has their columns."""
    count = cute.size(fragment)
    layout = cute.make_layout((2, count // 4), stride=(1, 4))
    return tuple(cute.make_tensor(fragment.iterator + 2 * row, layout) for row in (0, 1))


def fragment_columns(columns: int) -> tuple[int, ...]:
    """Columns of a row's elements in a fragment, less 2 (lane % 4)."""
    return tuple(start + column for start in range(0, columns, COLUMN_GROUP) for column in (0, 1))


def pack(values: cute.Tensor, fragment: cute.Tensor) -> None:
    """cvt.rn.bf16x2.f32 or f16x2 (9.7.9.21), by words: ptxas then keeps registers whole."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[fragment.element_type]
    words = cute.recast_tensor(fragment, Uint32)
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[values[2 * i], values[2 * i + 1]],
        )


def this_warpgroup() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4


def row_of_fragment(number: int) -> Int32:
    """Return which of the warpgroup's 64 rows row `number` (0 or 1) of this thread's fragment
    is."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    return thread // 32 * 16 + thread % 32 // QUAD + number * 8


def transpose_quad(values: list, lane: Int32) -> list:
    """Value i of lane t of a quad becomes value t of lane i."""
    values = list(values)
    for offset in (1, 2):
        is_upper = (lane & offset) != 0
        for i in (i for i in range(QUAD) if not i & offset):
            low, high = values[i], values[i | offset]
            sent = cutlass.select_(is_upper, low, high)
            received = cute.arch.shuffle_sync_bfly(sent, offset=offset)
            values[i] = cutlass.select_(is_upper, received, low)
            values[i | offset] = cutlass.select_(is_upper, high, received)
    return values
