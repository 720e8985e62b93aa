"""The calling convention of the last kernel over packed results, in two forms.

tensors   `kernels.small.tail_rows.TailTensors`: results by rows, in 32-bit words, and their offsets
bounds    `kernels.small.tail_rows.TailBounds`
stream    CUDA stream, 0 in the simulator
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.small.tail_rows import TailBounds, TailClass, TailTensors
from .arguments import WORD, dynamic_tensor, stream_argument, tensor_type, vector_type

__all__ = ["tail_call_arguments", "tail_compile_arguments"]


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


def tail_call_arguments(
    tensors: TailTensors, bounds: TailBounds, stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call. tensors: PyTorch's, of any dtype, or views of a plan, whose stream
    is None; bounds: ints."""
    words = (result.detach().view(torch.int32) for result in tensors.results)
    given = TailTensors(
        tuple(dynamic_tensor(result, TMA_ALIGNMENT) for result in words),
        *(None if tensor is None else dynamic_tensor(tensor, WORD) for tensor in tensors[1:]),
    )
    return given, TailBounds(*map(cutlass.Int32, bounds)), stream_argument(stream)
