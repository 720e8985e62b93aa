"""Tensor memory to registers and back: each thread the row of its own lane, or parts of four rows.

In the second form the four threads of a quad share rows (`quad_fragment`), so that a thread needs
what belongs to columns for a quarter of them only.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import T, dsl_user_op

from ..plan.budgets import TmemPlan
from ..plan.edges import RingState

__all__ = [
    "QUAD_COLUMNS",
    "multiply",
    "multiply_rows",
    "quad_fragment",
    "tmem_buffer",
    "tmem_load",
    "tmem_load_quads",
    "tmem_store",
    "tmem_store_quads",
]

LANES = 128

# Columns of one load unless the caller says otherwise: more in one instruction delay the first use.
LOAD_COLUMNS = 32


def tmem_buffer(tmem: Any, plan: TmemPlan, name: str, state: RingState) -> Int32:
    """Return the address of a ring's buffer that is in use.  tmem: first lane and column of the
    allocated tensor memory.  name: see `TmemPlan.buffers`."""
    start, distance = plan.buffers(name, state.stages)
    # The index of the only buffer is 0.
    return tmem.toint() + start + (state.index * distance if state.stages > 1 else 0)


def tmem_load(address: Any, values: cute.Tensor, each: int = LOAD_COLUMNS) -> None:
    """tcgen05.ld.32x32b (PTX ISA 9.7.16.8): this thread's row, as many columns as `values`.

    `address` names the warp's own lanes.  `values`: register tensor of Float32, at most `each`
    columns, those of one instruction, or a multiple of them; wait before use.
    """
    columns = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(min(columns, each))), Float32)
    tensor = _tmem_tensor(address, columns)
    copy = tcgen05.make_tmem_copy(atom, tensor)
    thread = copy.get_slice(0)
    registers = thread.partition_D(cute.make_identity_tensor((LANES, columns)))
    cute.copy(
        copy,
        thread.partition_S(tensor),
        cute.make_tensor(values.iterator, cute.make_layout(registers.shape)),
    )


def tmem_store(values: cute.Tensor, address: Any) -> None:
    """tcgen05.st.32x32b (PTX ISA 9.7.16.8) of this thread's row: one instruction."""
    columns = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), Float32)
    tensor = _tmem_tensor(address, columns)
    copy = tcgen05.make_tmem_copy(atom, tensor)
    thread = copy.get_slice(0)
    registers = thread.partition_S(cute.make_identity_tensor((LANES, columns)))
    cute.copy(
        copy,
        cute.make_tensor(values.iterator, cute.make_layout(registers.shape)),
        thread.partition_D(tensor),
    )


#: Columns that `tmem_load_quads` moves, in two halves of 16 lanes.
QUAD_COLUMNS = 64
HALF_LANES = 16


def quad_fragment(values: cute.Tensor, half: int) -> cute.Tensor:
    """Registers of 32 lanes x QUAD_COLUMNS columns, of one half of the lanes, as (2, 2, 8).

    Thread t has column 8 k + 2 (t % 4) + i of lane 16 half + 8 j + t / 4 at (i, j, k).
    """
    return cute.make_tensor(
        values.iterator + half * (cute.size(values) // 2), cute.make_layout((2, 2, 8))
    )


@dsl_user_op
def tmem_load_quads(address: Any, values: cute.Tensor, *, loc: Any = None, ip: Any = None) -> None:
    """tcgen05.ld.16x256b.x8 (PTX ISA 9.7.16.8), twice: QUAD_COLUMNS columns of the warp's lanes to
    64 Float32 of each thread, see `quad_fragment`; wait before use."""
    for half in range(2):
        words = ir.VectorType.get([32], T.i32())
        loaded = nvvm.tcgen05_ld(
            words, nvvm.Tcgen05LdStShape.SHAPE_16X256B, _lanes(address, half), loc=loc, ip=ip
        )
        part = cute.make_tensor(values.iterator + half * 32, cute.make_layout(32))
        part.store(cute.TensorSSA(loaded, (32,), Int32).bitcast(Float32))


@dsl_user_op
def tmem_store_quads(values: cute.Tensor, address: Any, *, loc: Any = None, ip: Any = None) -> None:
    """tcgen05.st.16x128b.x8, twice: what `tmem_load_quads` loads, in 16 bits, two of a row in a
    column, hence to half as many columns.  values: 32 Float32 registers, two elements each."""
    for half in range(2):
        part = cute.make_tensor(values.iterator + half * 16, cute.make_layout(16))
        nvvm.tcgen05_st(
            nvvm.Tcgen05LdStShape.SHAPE_16X128B,
            _lanes(address, half),
            part.load().bitcast(Int32).ir_value(loc=loc, ip=ip),
            loc=loc,
            ip=ip,
        )


def _lanes(address: Any, half: int) -> ir.Value:
    """Return the address of one half of the warp's lanes."""
    words = address.toint() + (half * HALF_LANES << 16)
    return llvm.inttoptr(llvm.PointerType.get(AddressSpace.tmem.value), words.ir_value())


def multiply(values: cute.Tensor, factor: Float32) -> None:
    """values *= factor, two at a time (mul.rn.f32x2)."""
    for i in range(0, cute.size(values), 2):
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(
            (values[i], values[i + 1]), (factor, factor)
        )


def multiply_rows(values: cute.Tensor, factors: cute.Tensor) -> None:
    """values *= factors, one by one, two at a time (mul.rn.f32x2)."""
    for row in range(0, cute.size(values), 2):
        values[row], values[row + 1] = cute.arch.mul_packed_f32x2(
            (values[row], values[row + 1]), (factors[row], factors[row + 1])
        )


def _tmem_tensor(address: Any, columns: int) -> cute.Tensor:
    """128 lanes x columns at `address`: lane stride 2^16.

    The address names the warp's own lanes, so every thread takes the part of thread 0.
    """
    layout = cute.make_layout((LANES, columns), stride=(1 << 16, 1))
    return cute.make_tensor(address, layout)
