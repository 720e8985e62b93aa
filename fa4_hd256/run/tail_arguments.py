"""The calling convention of the last kernel over packed results; `tail` has the slots.

tensors   `kernels.small.tail_rows.TailTensors`: results by rows, in 32-bit words, and their offsets
bounds    `kernels.small.tail_rows.TailBounds`
stream    CUDA stream, 0 in the simulator
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.small.tail_rows import TailBounds, TailClass, TailTensors
from .arguments import WORD, tensor_type, vector_type


def tail_compile_arguments(own: TailClass) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile`."""
    offsets = {f"cu_seqlens_{side}": vector_type(cutlass.Int32) for side in own.sides}
    tensors = TailTensors(
        tuple(tensor_type(cutlass.Int32, 4, TMA_ALIGNMENT) for _ in own.results),
        tensor_type(cutlass.Float32, 3, WORD) if own.lse else None,
        ds_begins=None if own.ds is None else vector_type(cutlass.Int32),
        **offsets,
    )
    bounds = TailBounds(*(cutlass.Int32(1) for _ in TailBounds._fields))
    return tensors, bounds, cuda.CUstream(0)
