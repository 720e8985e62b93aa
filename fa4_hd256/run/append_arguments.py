"""The calling convention of the kernel that writes new rows to a cache: one list of arguments, in
two forms.

    caches    K and V, (batch, rows, heads_kv, 256), or in pages; in e4m3 (.., 128) of a 16-bit
              type, two elements in each
    rows      of both, (batch, rows, heads_kv, 256), packed ones with a batch of 1; likewise
    tables    `kernels.small.append_rows.AppendTables`, in it
              `kernels.small.append_rotary.RotaryTables`
    stream    CUDA stream, 0 in the simulator
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass

from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.problem_class import DESCALES, AppendClass, RotaryClass
from ..kernels.small.append_rotary import RotaryTables
from ..kernels.small.append_rows import AppendTables
from .arguments import WORD, dynamic_tensor, stream_argument, tensor_type, vector_type

__all__ = [
    "AFTER",
    "ROTATED",
    "AppendOptions",
    "AppendTensors",
    "append_call_arguments",
    "append_compile_arguments",
]

#: Names of the kernel's own results.
AFTER, ROTATED = "after", "rotated"


class AppendOptions(NamedTuple):
    """Options of the kernel that are no tensors. descale: whose scales K and V have. interleaved,
    ordered: as of `RotaryClass`."""

    descale: str = ""
    interleaved: bool = True
    ordered: bool = False


class AppendTensors(NamedTuple):
    """Tensors as a user has them, None where not given.

    k, v: the new rows. k_cache, v_cache: written to in place. lengths: (batch,) int32 rows in use.
    q, cu_seqlens_q: of the attention, for rotary_cos and rotary_sin alone.
    """

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    lengths: Any
    page_table: Any = None
    cu_seqlens_k_new: Any = None
    k_descale: Any = None
    v_descale: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_seqlens: Any = None
    q: Any = None
    cu_seqlens_q: Any = None

    def compiled_in(self, options: AppendOptions) -> AppendClass:
        """The class of a call."""
        dtype, of_cache = self.k.dtype, self.k_cache.dtype
        kv_dtype = None if dtype == of_cache else of_cache
        return AppendClass(
            dtype,
            packed=self.cu_seqlens_k_new is not None,
            paged=self.page_table is not None,
            kv_dtype=kv_dtype,
            descale="" if kv_dtype is None else options.descale,
            rotary=None
            if self.rotary_cos is None
            else RotaryClass(
                self.rotary_cos.dtype,
                options.interleaved,
                options.ordered,
                packed=self.cu_seqlens_q is not None,
            ),
        )


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
        scales=tuple(tensor_type(cutlass.Float32, 2, WORD) for _ in DESCALES)
        if own.descale
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


def append_call_arguments(operands: dict[str, Any], stream: int | None) -> tuple[Any, ...]:
    """The arguments of a call. operands: tensors, or views of a plan, whose stream is None, by
    name; None for what the kernel does not take."""
    given = {
        name: None
        if tensor is None
        else dynamic_tensor(
            tensor, TMA_ALIGNMENT if tensor.ndim == 4 else min(WORD, tensor.element_size())
        )
        for name, tensor in operands.items()
    }
    caches, rows = ((given[k], given[v]) for k, v in (("k_cache", "v_cache"), ("k", "v")))
    scales = tuple(given[name] for name in DESCALES)
    tables = AppendTables(
        lengths=given["lengths"],
        after=given[AFTER],
        offsets=given["cu_seqlens_k_new"],
        page_table=given["page_table"],
        scales=None if scales[0] is None else scales,
        rotary=None
        if given["rotary_cos"] is None
        else RotaryTables(
            given["rotary_cos"],
            given["rotary_sin"],
            given["rotary_seqlens"],
            given["q"],
            given[ROTATED],
            given["cu_seqlens_q"],
        ),
    )
    return caches, rows, tables, stream_argument(stream)
