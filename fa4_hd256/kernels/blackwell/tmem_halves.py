"""Tensor memory to registers and back by half rows: a thread has two of its warp's 32 rows, 16
apart, and half of the columns of each, consecutive ones."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .tmem_quads import HALF_LANES, lanes_of_half

_SHAPE = nvvm.Tcgen05LdStShape.SHAPE_16X32BX2


def half_row() -> tuple[Int32, Int32]:
    """Return (the first of this thread's two rows of its warp, which half of the columns)."""
    lane = cute.arch.lane_idx()
    return lane % HALF_LANES, lane // HALF_LANES


@dsl_user_op
def tmem_load_halves(address: Any, values: cute.Tensor, *, loc: Any = None, ip: Any = None) -> None:
    """tcgen05.ld.16x32bx2 (PTX ISA 9.7.16.8), twice: as many columns as `values` of the warp's
    lanes to Float32 of each thread, the first row's before the second one's; wait before use."""
    columns = cute.size(values) // 2
    for half in range(2):
        loaded = nvvm.tcgen05_ld(
            ir.VectorType.get([columns], T.i32()),
            _SHAPE,
            lanes_of_half(address, half),
            offset=Int64(columns).ir_value(),
            loc=loc,
            ip=ip,
        )
        part = cute.make_tensor(values.iterator + half * columns, cute.make_layout(columns))
        part.store(cute.TensorSSA(loaded, (columns,), Int32).bitcast(Float32))


@dsl_user_op
def tmem_store_halves(
    values: cute.Tensor, address: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """tcgen05.st.16x32bx2 (PTX ISA 9.7.16.8), twice: where `tmem_load_halves` of as many registers
    of 32 bits has loaded from."""
    columns = cute.size(values) // 2
    for half in range(2):
        part = cute.make_tensor(values.iterator + half * columns, cute.make_layout(columns))
        nvvm.tcgen05_st(
            _SHAPE,
            lanes_of_half(address, half),
            part.load().bitcast(Int32).ir_value(loc=loc, ip=ip),
            offset=Int64(columns).ir_value(),
            loc=loc,
            ip=ip,
        )
