"""The calling convention of the forward's kernels: one list of arguments each, in two forms.

`compile_arguments` describes them by type only, so that compiling needs no tensor and the binary
holds no length: every size and stride is dynamic except the innermost stride, which is 1.
`call_arguments` are the values of one call. Both forms pack to the same binary layout.

    q             (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
    k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16
    results       out like q; lse (batch, heads_q, seqlen_q) float32, natural log
    optional      what the problem class asks for: sink (heads_q,) float32, then int32 tensors of
                  the ragged sequences; None if that is nothing
    scalars       `forward.ForwardScalars`
    stream        CUDA stream, 0 in the simulator

With split keys the results are (batch * splits, seqlen_q, heads_q, 256) and (batch * splits,
heads_q, seqlen_q), both float32, and the arguments of the combining kernel are these, the results
proper, and the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_tensor

from fa4_hd256.call.forward_problem import TMA_ALIGNMENT, Problem, ProblemClass
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.blackwell.forward.kernel import ForwardScalars

#: The largest window passed on.
LARGEST_WINDOW = 1 << 29

ELEMENT_TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


def tensor_type(element_type, rank: int, alignment: int):
    """A tensor of dynamic sizes whose outer strides are multiples of `alignment` bytes."""
    divisibility = alignment * 8 // element_type.width
    return make_fake_tensor(
        element_type,
        tuple(cute.sym_int32() for _ in range(rank)),
        (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1),
        assumed_align=alignment,
    )


def compile_arguments(problem_class: ProblemClass) -> tuple:
    """What `cute.compile` gets: types and alignments, no data."""
    element = ELEMENT_TYPES[problem_class.dtype]
    q, k, v = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(3))
    results = _result_types(cutlass.Float32 if problem_class.split else element)
    optional = [vector_type(cutlass.Float32)] if problem_class.sink else []
    optional += [vector_type(cutlass.Int32) for _ in problem_class.ragged]
    scalars = ForwardScalars(*map(cutlass.Float32, (1, 1)), *map(cutlass.Int32, (0, 0, 1, 1, 1)))
    return q, k, v, results, tuple(optional) or None, scalars, cuda.CUstream(0)


def combine_compile_arguments(element_type) -> tuple:
    """What `cute.compile` gets for the combining kernel; element_type: of out."""
    return _result_types(cutlass.Float32), _result_types(element_type), cuda.CUstream(0)


def _result_types(element_type) -> tuple:
    """(out, lse)."""
    out = tensor_type(element_type, 4, row_alignment(element_type.width))
    return out, tensor_type(cutlass.Float32, 3, alignment=4)


@dataclass(frozen=True)
class CallTensors:
    """The tensors of one call, as the kernel may read them; see the module's docstring."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    optional: tuple[torch.Tensor, ...] = ()


def call_arguments(tensors: CallTensors, problem: Problem, gpu: Gpu, stream: int) -> tuple:
    """The values of one call on a GPU."""
    q, k, v = (dynamic_tensor(t, TMA_ALIGNMENT) for t in (tensors.q, tensors.k, tensors.v))
    results = _results((tensors.out, tensors.lse))
    optional = tuple(dynamic_tensor(tensor, 4) for tensor in tensors.optional) or None
    scalars = forward_scalars(problem, gpu)
    return q, k, v, results, optional, scalars, cuda.CUstream(stream)


def combine_call_arguments(
    parts: tuple[torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    stream: int,
) -> tuple:
    """The values of one call of the combining kernel; each (out, lse)."""
    return _results(parts), _results(results), cuda.CUstream(stream)


def _results(tensors: tuple[torch.Tensor, torch.Tensor]) -> tuple:
    out, lse = tensors
    return dynamic_tensor(out, row_alignment(8 * out.element_size())), dynamic_tensor(lse, 4)


def row_alignment(bits: int) -> int:
    """Bytes of 8 elements of so many bits: TMA's rule for 16, that of 256-bit accesses for 32."""
    return bits


def forward_scalars(problem: Problem, gpu: Gpu) -> ForwardScalars:
    """The scalars of one call."""
    options = problem.options
    scale, softcap = abs(options.softmax_scale), options.softcap
    left, right = options.window
    # A bound beyond every length changes nothing, and sums with it stay in 32 bits.
    left, right = (min(side or 0, LARGEST_WINDOW) for side in (left, right))
    return ForwardScalars(
        cutlass.Float32((softcap or scale) * math.log2(math.e)),
        cutlass.Float32(scale / softcap if softcap else 0.0),
        cutlass.Int32(left),
        cutlass.Int32(right),
        cutlass.Int32(problem.max_seqlen_q),
        cutlass.Int32(gpu.grid_pairs),
        cutlass.Int32(gpu.l2_bytes_for_tiles),
    )


def vector_type(element_type):
    """A contiguous vector of dynamic length."""
    return make_fake_tensor(element_type, (cute.sym_int32(),), (1,), assumed_align=4)


def dynamic_tensor(tensor: torch.Tensor, alignment: int):
    described = from_dlpack(tensor.detach(), assumed_align=alignment)
    return described.mark_layout_dynamic(leading_dim=tensor.ndim - 1)
