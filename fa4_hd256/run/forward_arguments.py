"""The calling conventions of the forward's kernels: each one list of arguments, in two forms.

    q             (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
    k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16; in pages (pages, page_size, ..);
                  in e4m3 (.., 128) of q's type, two elements in each
    results       out like q; lse (batch, heads_q, seqlen_q) float32, natural log; with max_logits
                  the row maxima, like lse
    optional      what the problem class asks for: sink (heads_q,) float32, then int32 tensors of
                  the ragged sequences, vectors but for page_table (batch, pages) and those of
                  masks (`kernels.rows.sequences.SequenceTensors`), then k_descale and v_descale
                  (entries, heads_kv) float32, then what functions of the call read; None if that
                  is nothing
    scalars       `kernels.scalars.CallScalars`
    stream        CUDA stream, 0 in the simulator

With split keys the results are (batch * splits, seqlen_q, heads_q, 256) and (batch * splits,
heads_q, seqlen_q), both float32, and the arguments of the combining kernel are these, the results
proper, and the stream. With listed parts they are (parts, max_seqlen_q, heads_q, 256) and (parts,
heads_q, max_seqlen_q), and the combining kernel gets the list and cu_seqlens_q, if there is one,
before the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from ..call.forward_problem import Problem
from ..gpus.devices import Gpu
from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.problem_class import DESCALES, CombineClass, ProblemClass
from .arguments import (
    call_scalars,
    dynamic_tensor,
    function_types,
    ragged_types,
    ragged_values,
    row_alignment,
    scalar_types,
    stream_argument,
    tensor_type,
    vector_type,
)


def compile_arguments(problem_class: ProblemClass, counter: bool = False) -> tuple:
    """Return the arguments of `cute.compile`: types and alignments, no data; counter: with that of
    the tiles."""
    element = problem_class.element_type
    q, k, v = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(3))
    results = _result_types(cutlass.Float32 if problem_class.split else element)
    if problem_class.max_logits:
        results = (*results, results[1])
    optional = [vector_type(cutlass.Float32)] if problem_class.sink else []
    optional += ragged_types(problem_class.ragged, problem_class.wide_tree)
    if problem_class.descale:
        optional += [tensor_type(cutlass.Float32, 2, 4) for _ in DESCALES]
    optional += function_types(problem_class)
    scalars = scalar_types(counter=counter, fixed_parts=problem_class.fixed_parts)
    return q, k, v, results, tuple(optional) or None, scalars, cuda.CUstream(0)


def combine_compile_arguments(element_type: Any) -> tuple:
    """Return the arguments of `cute.compile` for the combining kernel; element_type: of out."""
    return _result_types(cutlass.Float32), _result_types(element_type), cuda.CUstream(0)


def ragged_combine_compile_arguments(problem_class: CombineClass) -> tuple:
    """Return the arguments of `cute.compile` for the kernel that combines listed splits."""
    *results, stream = combine_compile_arguments(problem_class.element_type)
    lists = tuple(vector_type(cutlass.Int32) for _ in range(1 + problem_class.packed))
    return *results, lists, stream


def _result_types(element_type: Any) -> tuple:
    """Return (out, lse)."""
    out = tensor_type(element_type, 4, row_alignment(element_type.width))
    return out, tensor_type(cutlass.Float32, 3, alignment=4)


@dataclass(frozen=True)
class CallTensors:
    """The tensors of one call, or views of those of a plan, as the kernel may read them; see the
    module's docstring."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    optional: tuple[Any, ...] = ()
    row_maxima: Any = None


def call_arguments(
    tensors: CallTensors, problem: Problem, gpu: Gpu, stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call on a GPU. stream: None for those of a plan, from its views."""
    q, k, v = (dynamic_tensor(t, TMA_ALIGNMENT) for t in (tensors.q, tensors.k, tensors.v))
    results: tuple[Any, ...] = _results((tensors.out, tensors.lse))
    if tensors.row_maxima is not None:
        results = (*results, dynamic_tensor(tensors.row_maxima, 4))
    names = (*(("sink",) if problem.sink else ()), *problem.tables)
    optional = tuple(ragged_values(names, tensors.optional)) or None
    scalars = call_scalars(problem, gpu, stream)
    return q, k, v, results, optional, scalars, stream_argument(stream)


def combine_call_arguments(
    parts: tuple[Any, Any],
    results: tuple[Any, Any],
    stream: int | None,
    lists: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """The arguments of one call of the combining kernel, as of `call_arguments`; each (out, lse).
    lists: those of listed parts."""
    listed = (tuple(dynamic_tensor(t, 4) for t in lists),) if lists else ()
    return _results(parts), _results(results), *listed, stream_argument(stream)


def _results(tensors: tuple[Any, Any]) -> tuple[Any, Any]:
    out, lse = tensors
    return dynamic_tensor(out, row_alignment(8 * out.element_size())), dynamic_tensor(lse, 4)
