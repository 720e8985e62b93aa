"""The calling convention of the kernel that writes new rows to a cache; `append` has the slots.

caches    K and V, (batch, rows, heads_kv, 256), or in pages; in e4m3 (.., 128) of a 16-bit
          type, two elements in each, in NVFP4 (.., 64), four in each
rows      of both, (batch, rows, heads_kv, 256), packed ones with a batch of 1; likewise
tables    `kernels.small.append_rows.AppendTables`, in it
          `kernels.small.append_rows.RotaryTables`
stream    CUDA stream, 0 in the simulator
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.nvfp4_format import BLOCK_SCALES, NVFP4
from ..kernels.problem_class import KV_DESCALES
from ..kernels.small.append_rows import AppendClass, AppendTables, RotaryTables
from .arguments import WORD, tensor_type, vector_type


def append_compile_arguments(own: AppendClass) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile`."""
    element = own.element_type
    caches, rows = (tuple(tensor_type(element, 4, TMA_ALIGNMENT) for _ in "kv") for _ in range(2))
    lengths, after, offsets = (vector_type(cutlass.Int32) for _ in range(3))
    tables = AppendTables(
        lengths=lengths,
        after=after,
        offsets=offsets if own.packed else None,
        page_table=tensor_type(cutlass.Int32, 2, WORD) if own.paged else None,
        scales=tuple(tensor_type(cutlass.Float32, 2, WORD) for _ in KV_DESCALES)
        if own.descale
        else None,
        block_scales=tuple(tensor_type(element, 4, TMA_ALIGNMENT) for _ in BLOCK_SCALES)
        if own.kv_dtype == NVFP4
        else None,
        rotary=_rotary_types(own),
    )
    return caches, rows, tables, cuda.CUstream(0)


def _rotary_types(own: AppendClass) -> RotaryTables | None:
    rotary = own.rotary
    if rotary is None:
        return None
    cos, sin = (tensor_type(rotary.table_type, 2, rotary.table_dtype.itemsize) for _ in range(2))
    queries, rotated = (tensor_type(own.element_type, 4, TMA_ALIGNMENT) for _ in range(2))
    begins, offsets = (vector_type(cutlass.Int32) for _ in range(2))
    return RotaryTables(cos, sin, begins, queries, rotated, offsets if rotary.packed else None)
