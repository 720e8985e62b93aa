"""The calling convention of the forward kernel: one list of arguments, in two forms.

`compile_arguments` describes them by type only, so that compiling needs no tensor and the binary
holds no length: every size and stride is dynamic except the innermost stride, which is 1.
`call_arguments` are the values of one call. Both forms pack to the same binary layout.

    q, out        (batch, seqlen_q, heads_q, 256)   bf16 or fp16
    k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16
    lse           (batch, heads_q, seqlen_q)        float32, natural log
    scale_log2    float32: |softmax_scale| * log2(e); the sign is compiled in
    clusters      int32: CTA pairs that the device holds at once
    stream        CUDA stream, 0 in the simulator
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_tensor

from .problem import TMA_ALIGNMENT

ELEMENT_TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


def _tensor_type(element_type, rank: int, alignment: int):
    """A tensor of dynamic sizes whose outer strides are multiples of `alignment` bytes."""
    divisibility = alignment * 8 // element_type.width
    return make_fake_tensor(
        element_type,
        tuple(cute.sym_int32() for _ in range(rank)),
        (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1),
        assumed_align=alignment,
    )


def compile_arguments(dtype: torch.dtype) -> tuple:
    """What `cute.compile` gets: types and alignments, no data."""
    element = ELEMENT_TYPES[dtype]
    q, k, v, out = (_tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(4))
    lse = _tensor_type(cutlass.Float32, 3, alignment=4)
    return q, k, v, out, lse, cutlass.Float32(1.0), cutlass.Int32(1), cuda.CUstream(0)


def call_arguments(
    tensors: tuple[torch.Tensor, ...], softmax_scale: float, clusters: int, stream: int
) -> tuple:
    """The values of one call; `tensors` are q, k, v, out, lse as the kernel may read them."""
    *operands, lse = (tensor.detach() for tensor in tensors)
    return (
        *(_dynamic(tensor, TMA_ALIGNMENT) for tensor in operands),
        _dynamic(lse, 4),
        cutlass.Float32(abs(softmax_scale) * math.log2(math.e)),
        cutlass.Int32(clusters),
        cuda.CUstream(stream),
    )


def _dynamic(tensor: torch.Tensor, alignment: int):
    described = from_dlpack(tensor, assumed_align=alignment)
    return described.mark_layout_dynamic(leading_dim=tensor.ndim - 1)
