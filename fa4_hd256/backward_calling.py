"""The calling conventions of the backward's kernels: each one list of arguments, in two forms.

As in `calling`: for compiling the arguments are described by type only, for a call they carry the
values, and both forms pack to the same binary layout.

    out, dout     (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
    lse, dlse     (batch, heads_q, seqlen_q) float32, any strides but 0
    stats         (2, heads_q, padded rows) float32; see `backward_preprocess`
    ragged        int32 tensors in the problem class's order; None if there are none
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import torch

from .backward_preprocess import PreprocessRows
from .backward_problem import BackwardProblem, PreprocessClass
from .calling import ELEMENT_TYPES, dynamic_tensor, tensor_type, vector_type
from .problem import TMA_ALIGNMENT

_WORD = 4  # bytes of a float32 or int32


@dataclass(frozen=True)
class PreprocessTensors:
    """The tensors of one call of the preprocess kernel; see the module's docstring.

    dlse: None where the problem has no gradient of the LSE.
    """

    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    stats: torch.Tensor
    ragged: tuple[torch.Tensor, ...] = ()


def preprocess_compile_arguments(problem_class: PreprocessClass) -> tuple:
    """What `cute.compile` gets for the preprocess kernel."""
    element = ELEMENT_TYPES[problem_class.dtype]
    out, dout = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(2))
    lse, dlse = (tensor_type(cutlass.Float32, 4, _WORD) for _ in range(2))
    rows = PreprocessRows(out, dout, lse, dlse if problem_class.lse_gradient else None)
    ragged = tuple(vector_type(cutlass.Int32) for _ in problem_class.ragged) or None
    stats = tensor_type(cutlass.Float32, 3, _WORD)
    return rows, stats, ragged, cutlass.Int32(1), cuda.CUstream(0)


def preprocess_call_arguments(
    tensors: PreprocessTensors, problem: BackwardProblem, stream: int
) -> tuple:
    """The values of one call of the preprocess kernel."""
    rows = PreprocessRows(
        *(dynamic_tensor(t, TMA_ALIGNMENT) for t in (tensors.out, tensors.dout)),
        _row_values(tensors.lse),
        None if tensors.dlse is None else _row_values(tensors.dlse),
    )
    ragged = tuple(dynamic_tensor(tensor, _WORD) for tensor in tensors.ragged) or None
    longest = cutlass.Int32(problem.forward.max_seqlen_q)
    stats = dynamic_tensor(tensors.stats, _WORD)
    return rows, stats, ragged, longest, cuda.CUstream(stream)


def _row_values(tensor: torch.Tensor):
    """A tensor of one float per row. The dimension that is added has the static stride of 1, so
    that all others may have any."""
    return dynamic_tensor(tensor.unsqueeze(-1), _WORD)
