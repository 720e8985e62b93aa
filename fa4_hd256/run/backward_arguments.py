"""The calling conventions of the backward's kernels: each one list of arguments, in two forms.

q, out, dout  (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16
lse, dlse     (batch, heads_q, seqlen_q) float32, any strides but 0
stats         (2, heads_q, padded rows) float32; see `backward_preprocess`
dq            like q
dk, dv        (batch, seqlen_k, heads_kv * head_parts, 256), like k; float32 if head_parts > 1;
              dq, dk, dv: base and strides multiples of `SECTOR_BYTES`
ds            (heads_q, units, tiles, elements), like k: `kernels.backward.ds_tiles`; None where
              it is not stored
ragged        int32 tensors in the problem class's order, then what functions of the call read;
              None if there are none
scalars       `kernels.problem_class.CallScalars`
stream        CUDA stream, 0 in the simulator
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from ..call.backward_problem import BackwardProblem
from ..call.chunks import Chunk
from ..gpus.devices import Gpu
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.limits import SECTOR_BYTES, TMA_ALIGNMENT
from ..kernels.problem_class import ELEMENT_TYPES, GradientClass
from ..kernels.rows.sequences import padded_rows
from ..kernels.small.backward_preprocess import PreprocessClass, PreprocessRows
from .arguments import (
    WORD,
    call_scalars,
    dynamic_tensor,
    function_types,
    gate_types,
    gate_value,
    ragged_types,
    ragged_values,
    scalar_types,
    stream_argument,
    tensor_type,
    vector_type,
)


@dataclass(frozen=True)
class PreprocessTensors:
    """The tensors of one call of the preprocess kernel, or views of those of a plan; see the
    module's docstring.

    dlse: None where the problem has no gradient of the LSE. gates: with a gate of the result gate,
    do and dgate of `PreprocessRows`.
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    stats: Any
    ragged: tuple[Any, ...] = ()
    gates: tuple[Any, ...] = ()


def preprocess_compile_arguments(problem_class: PreprocessClass) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile` for the preprocess kernel."""
    element = ELEMENT_TYPES[problem_class.dtype]
    out, dout = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(2))
    lse, dlse = (tensor_type(cutlass.Float32, 4, WORD) for _ in range(2))
    gates = gate_types(element, problem_class.out_gate)
    if gates:
        gates = [*gates, tensor_type(element, 4, TMA_ALIGNMENT), *gates]
    rows = PreprocessRows(out, dout, lse, dlse if problem_class.lse_gradient else None, *gates)
    ragged = tuple(vector_type(cutlass.Int32) for _ in problem_class.ragged) or None
    stats = tensor_type(cutlass.Float32, 3, WORD)
    return rows, stats, ragged, cutlass.Int32(1), cuda.CUstream(0)


def preprocess_call_arguments(
    tensors: PreprocessTensors, problem: BackwardProblem, stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call of the preprocess kernel. stream: None for those of a plan."""
    rows = PreprocessRows(
        dynamic_tensor(tensors.out, TMA_ALIGNMENT),
        dynamic_tensor(tensors.dout, TMA_ALIGNMENT),
        _row_values(tensors.lse),
        None if tensors.dlse is None else _row_values(tensors.dlse),
        *map(gate_value, tensors.gates),
    )
    ragged = tuple(dynamic_tensor(tensor, WORD) for tensor in tensors.ragged) or None
    longest = cutlass.Int32(problem.forward.max_seqlen_q)
    stats = dynamic_tensor(tensors.stats, WORD)
    return rows, stats, ragged, longest, stream_argument(stream)


def sum_compile_arguments(element_type: Any) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile` for the kernel that adds up parts of dK and dV."""
    parts, results = (
        tuple(tensor_type(kind, 4, SECTOR_BYTES) for _ in range(2))
        for kind in (cutlass.Float32, element_type)
    )
    return parts, results, cuda.CUstream(0)


def sum_call_arguments(
    parts: tuple[Any, ...], results: tuple[Any, ...], stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call of that kernel, likewise."""
    made = (tuple(dynamic_tensor(t, SECTOR_BYTES) for t in pair) for pair in (parts, results))
    return *made, stream_argument(stream)


def _row_values(tensor: Any) -> Any:
    """A tensor of one float per row. The dimension that is added has the static stride of 1, so
    that all others may have any."""
    return dynamic_tensor(tensor.unsqueeze(-1), WORD)


@dataclass(frozen=True)
class GradientTensors:
    """The tensors of one call of a kernel that makes gradients, or views of those of a plan; see
    the module's docstring.

    operands: q, k, v, dout. results: in the order of the kernel (`kernel_set.BackwardKernel`).
    ds: None where it is not stored. of_functions: what functions of the call read.
    """

    operands: tuple[Any, Any, Any, Any]
    stats: Any
    results: tuple[Any, ...]
    ragged: tuple[Any, ...] = ()
    ds: Any = None
    of_functions: tuple[Any, ...] = ()

    def of(self, chunk: Chunk, names: tuple[str, ...]) -> GradientTensors:
        """Views of what belongs to a chunk but for its lists; its dS is the start of a
        one-dimensional `ds`. names: of the results."""
        q, k, v, dout = self.operands
        heads_kv, entries = k.shape[2], chunk.problem.forward.q_shape[0]

        def part(tensor: Any, heads: range, each: int, rows: range) -> Any:
            """Narrow a tensor of (batch, rows, heads, 256)."""
            tensor = _narrowed(tensor, 2, heads, each)
            if entries < q.shape[0]:
                tensor = _narrowed(tensor, 0, chunk.sequences)
            return _narrowed(tensor, 1, rows)

        def of_queries(tensor: Any) -> Any:
            return part(tensor, chunk.heads, 1, chunk.queries)

        def of_keys(tensor: Any) -> Any:
            """Narrow a tensor with as many heads for each key/value head."""
            return part(tensor, chunk.heads_kv, tensor.shape[2] // heads_kv, chunk.keys)

        stats = _narrowed(self.stats, 1, chunk.heads)
        if entries < q.shape[0] or len(chunk.queries) < q.shape[1]:
            of_sequence = padded_rows(q.shape[1], 1, packed=False)
            begin = chunk.sequences.start * of_sequence + chunk.queries.start
            count = padded_rows(len(chunk.queries), entries, packed=False)
            stats = _narrowed(stats, 2, range(begin, begin + count))
        return GradientTensors(
            (of_queries(q), of_keys(k), of_keys(v), of_queries(dout)),
            stats,
            tuple(
                of_queries(tensor) if name == "dq" else of_keys(tensor)
                for name, tensor in zip(names, self.results, strict=True)
            ),
            self.ragged,
            None if self.ds is None else begin_of(self.ds, chunk.problem.ds_shape),
            self.of_functions,
        )


#: Of the lists of a block mask, (1 or batch, 1 or heads, ...); no other ragged tensor has it.
TABLE_RANK = 5


def _narrowed(tensor: Any, dim: int, span: range, each: int = 1) -> Any:
    """A view of `each` entries of a dimension for each one of the span."""
    return tensor.narrow(dim, span.start * each, len(span) * each)


def begin_of(room: Any, shape: tuple[int, ...]) -> Any:
    """Return a contiguous tensor of this shape at the start of a one-dimensional one."""
    return room.narrow(0, 0, math.prod(shape)).view(shape)


def gradient_compile_arguments(
    problem_class: GradientClass,
    results: tuple[str, ...],
    has_ds: bool = False,
    counter: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile` for a kernel that makes gradients. results: which of
    "dq", "dk" and "dv", in its order. has_ds: it writes or reads a stored dS. counter: with that of
    the tiles."""
    problem = problem_class.problem
    element = problem.element_type
    operands = tuple(tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(4))
    of_keys = cutlass.Float32 if problem_class.partial else element
    types = (element if name == "dq" else of_keys for name in results)
    made = tuple(tensor_type(kind, 4, SECTOR_BYTES) for kind in types)
    ragged = (*ragged_types(problem.ragged), *function_types(problem)) or None
    stats = tensor_type(cutlass.Float32, 3, TMA_ALIGNMENT)
    ds = tensor_type(element, 4, TMA_ALIGNMENT) if has_ds else None
    scalars = scalar_types(backward=True, counter=counter, origin=problem.asks_places)
    return operands, stats, made, ds, ragged, scalars, cuda.CUstream(0)


def gradient_call_arguments(
    tensors: GradientTensors, problem: BackwardProblem, gpu: Gpu, stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call of such a kernel on a GPU. stream: None for those of a plan."""
    forward = problem.forward
    scalars = call_scalars(forward, gpu, stream, problem.head_parts, problem.kernels.cluster)
    if forward.problem_class.asks_places:
        origin = ScoreOrigin(*map(cutlass.Int32, problem.origin))
        scalars = scalars._replace(score_origin=origin)
    names = (*forward.ragged, *forward.function_tensors)
    return (
        tuple(dynamic_tensor(tensor, TMA_ALIGNMENT) for tensor in tensors.operands),
        dynamic_tensor(tensors.stats, TMA_ALIGNMENT),
        tuple(dynamic_tensor(tensor, SECTOR_BYTES) for tensor in tensors.results),
        None if tensors.ds is None else dynamic_tensor(tensors.ds, TMA_ALIGNMENT),
        tuple(ragged_values(names, (*tensors.ragged, *tensors.of_functions))) or None,
        scalars,
        stream_argument(stream),
    )
