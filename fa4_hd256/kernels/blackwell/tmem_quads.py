"""Tensor memory to registers and back by quads: the four threads of one share rows, so that a
thread needs what belongs to columns for a quarter of them only (`quad_fragment`)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import T, dsl_user_op

#: Columns that `tmem_load_quads` moves, in two halves of 16 lanes.
QUAD_COLUMNS = 64
HALF_LANES = 16


def quad_fragment(values: cute.Tensor, half: int) -> cute.Tensor:
    """Registers of 32 lanes x QUAD_COLUMNS columns, of one half of the lanes, as (2, 2, 8). Thread
    t has column 8 k + 2 (t % 4) + i of lane 16 half + 8 j + t / 4 at (i, j, k)."""
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
            words, nvvm.Tcgen05LdStShape.SHAPE_16X256B, lanes_of_half(address, half), loc=loc, ip=ip
        )
        part = cute.make_tensor(values.iterator + half * 32, cute.make_layout(32))
        part.store(cute.TensorSSA(loaded, (32,), Int32).bitcast(Float32))


@dsl_user_op
def tmem_store_quads(values: cute.Tensor, address: Any, *, loc: Any = None, ip: Any = None) -> None:
    """tcgen05.st.16x128b, twice: of what `tmem_load_quads` loads, in 16 bits, two of a row in a
    column, 32 Float32 registers to half as many columns as it loads.  values: registers of 32 bits;
    of each half of the lanes thread t has column 4 k + t % 4 of lane 8 j + t / 4 at (j, k)."""
    registers = cute.size(values) // 2
    for half in range(2):
        part = cute.make_tensor(values.iterator + half * registers, cute.make_layout(registers))
        nvvm.tcgen05_st(
            nvvm.Tcgen05LdStShape.SHAPE_16X128B,
            lanes_of_half(address, half),
            part.load().bitcast(Int32).ir_value(loc=loc, ip=ip),
            loc=loc,
            ip=ip,
        )


def lanes_of_half(address: Any, half: int) -> ir.Value:
    """Return the address of one half of the warp's lanes."""
    words = address.toint() + (half * HALF_LANES << 16)
    return llvm.inttoptr(llvm.PointerType.get(AddressSpace.tmem.value), words.ir_value())
