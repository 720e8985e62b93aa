"""Arguments of kernels by type, as `cute.compile` takes them; `building` has the kernels.

Compiling needs no tensor, and the binary holds no length: every size and stride is dynamic except
the innermost stride, which is 1. `arguments` and `backward_arguments` have the same lists as slots
of a plan. scalars: `kernels.problem_class.CallScalars`. stream: the CUDA stream, 0 in the
simulator.

NOTE [arguments of the forward].

    q             (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
    k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16; in pages (pages, page_size, ..);
                  q, k, v in e4m3: (.., 128) of out's type, two elements in each;
                  k, v in NVFP4: (.., 64), four in each
    results       out (batch, seqlen_q, heads_q, 256); lse (batch, heads_q, seqlen_q) float32,
                  natural log; with max_logits the row maxima, like lse
    optional      what the problem class asks for: `kernels.problem_class.OptionalTensors`; None
                  if that is nothing
    scalars, stream

With split keys the results are (batch * splits, seqlen_q, heads_q, 256) and (batch * splits,
heads_q, seqlen_q), both float32, and the arguments of the combining kernel are these, the results
proper with out_gate, if there is one, the scalars and the stream. With scheduler metadata they are
(splits, max_seqlen_q, heads_q, 256) and (splits, heads_q, max_seqlen_q), and the combining kernel
gets the metadata and cu_seqlens_q, if there is one, before the scalars.

NOTE [arguments of the backward].  Three kinds of kernels, each with its arguments in order. Rows of
packed sequences have a batch of 1.

Of the preprocess kernel:

    rows          `PreprocessRows` of `kernels.small.backward_preprocess`: out, dout (batch,
                  seqlen_q, heads_q, 256) bf16 or fp16; lse, dlse (batch, heads_q, seqlen_q, 1)
                  float32, any strides but 0, dlse None without a gradient of the LSE; with a gate
                  of the result gate, do like out, and dgate like gate
    stats         (2, heads_q, padded rows) float32: `kernels.small.backward_preprocess`
    ragged        lengths and offsets of the queries (`kernels.rows.sequences.SequenceTensors`);
                  None if there are none
    scalars, stream

Of the kernels that make gradients:

    operands      q, k, v, dout; q, dout (batch, seqlen_q, heads_q, 256), k, v (batch, seqlen_k,
                  heads_kv, 256), bf16 or fp16. In mxfp8 those of `MXFP8_GRADIENT_OPERANDS`, (..,
                  128) of a 16-bit type, two codes in each, then their scales in the same order,
                  (batch, heads, tiles, 2, 128) int32. With a gate of the result dout is do
    stats         as above
    results       of dq, dk and dv those that the kernel makes: dq like q; dk, dv (batch, seqlen_k,
                  heads_kv * head_parts, 256), like k, float32 if head_parts > 1; base and strides
                  multiples of `SECTOR_BYTES`
    ds            (heads_q, units, tiles, elements), like k: `kernels.backward.ds_tiles`; None where
                  it is not stored
    optional      ragged tensors, and what functions of the call read, as in the forward
    scalars, stream

Of the sum kernel, where query heads of a group are divided:

    parts         of dk and dv, (batch, seqlen_k, heads_kv * head_parts, 256) float32
    results       dk, dv, (batch, seqlen_k, heads_kv * copies, 256) bf16 or fp16;
                  `BackwardProblem.copies`
    stream

NOTE [arguments of new rows].

    caches        K and V, (batch, rows, heads_kv, 256), or in pages; in e4m3 (.., 128) of a 16-bit
                  type, two elements in each, in NVFP4 (.., 64), four in each
    rows          of both, (batch, rows, heads_kv, 256), packed ones with a batch of 1; likewise
    tables        `kernels.small.append_rows.AppendTables`
    stream

The last kernel over packed results gets `TailTensors` and `TailBounds` of `kernels.small.tail_rows`
and the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from ..kernels.block_scales import MXFP8_GRADIENT_OPERANDS
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.functions.user_functions import FUNCTION_KINDS
from ..kernels.limits import SECTOR_BYTES, TMA_ALIGNMENT
from ..kernels.mask.block_mask import MASK_BITS, MASK_BLOCKS, MASK_KEY_BITS, MASK_STEPS
from ..kernels.nvfp4_format import BLOCK_SCALES, NVFP4, block_scales_of
from ..kernels.problem_class import (
    COLUMNS,
    ELEMENT_TYPES,
    GATE_OF_HEADS,
    KV_DESCALES,
    OF_BLOCKS,
    OUT_GATE,
    CallScalars,
    GradientClass,
    OptionalTensors,
    ProblemClass,
)
from ..kernels.rows.sequences import PAGE_TABLE, TREE_WORDS, SequenceTensors
from ..kernels.small.append_rows import AppendClass, AppendTables, RotaryTables
from ..kernels.small.backward_preprocess import PreprocessClass, PreprocessRows
from ..kernels.small.combine_config import CombineClass
from ..kernels.small.tail_rows import TailBounds, TailClass, TailTensors

WORD = 4  # bytes of a float32 or int32


def tensor_type(element_type: Any, rank: int, alignment: int) -> Any:
    """A tensor of dynamic sizes whose outer strides are multiples of `alignment` bytes."""
    divisibility = alignment * 8 // element_type.width
    return make_fake_tensor(
        element_type,
        tuple(cute.sym_int32() for _ in range(rank)),
        (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1),
        assumed_align=alignment,
    )


def vector_type(element_type: Any) -> Any:
    return make_fake_tensor(element_type, (cute.sym_int32(),), (1,), assumed_align=4)


#: Dimensions of scales of blocks.
SCALE_RANK = 5

#: Ragged tensors that are no vectors: dimensions, bytes that their rows are aligned to.
TABLES = {
    PAGE_TABLE: (2, 4),
    TREE_WORDS: (2, 4),
    MASK_STEPS: (5, 16),
    MASK_BITS: (3, 16),
    MASK_BLOCKS: (5, 16),
    MASK_KEY_BITS: (3, 16),
}


def table_rank(name: str) -> int:
    return TABLES[name][0] if name in TABLES else 1


def _ragged_type(name: str, wide_tree: bool) -> Any:
    if name == TREE_WORDS and wide_tree:
        return tensor_type(cutlass.Int64, 2, 2 * WORD)
    if name in TABLES:
        return tensor_type(cutlass.Int32, *TABLES[name])
    return vector_type(cutlass.Int32)


#: Dtypes of tensors that functions of a call read, by name.
_FUNCTION_TYPES = {"float32": cutlass.Float32, "int32": cutlass.Int32}


def optional_tensors(tensors: Mapping[str, Any]) -> OptionalTensors | None:
    """Return the record of tensors by name, None without any: CuTe DSL warns of an empty one. Names
    are those of the torch operators' arguments, and `COLUMNS`."""
    if not tensors:
        return None
    own, ragged = dict(tensors), SequenceTensors._fields
    sequences = SequenceTensors(**{name: own.pop(name) for name in ragged if name in own})
    score, mask = (
        tuple(own.pop(name) for name in kind.tensors if name in own) for kind in FUNCTION_KINDS
    )
    return OptionalTensors(ragged=sequences, score_tensors=score, mask_tensors=mask, **own)


def _of_sequences_and_functions(problem_class: ProblemClass) -> dict[str, Any]:
    """Return types by name: of ragged tensors, and of what functions of the call read."""
    wide_tree, found = problem_class.wide_tree, {}
    for name in problem_class.ragged:
        found[name] = _ragged_type(name, wide_tree)
    for kind in FUNCTION_KINDS:
        own = getattr(problem_class, kind.argument)
        for name, form in zip(kind.tensors, () if own is None else own.tensors):
            dtype, rank = form.split()
            found[name] = tensor_type(_FUNCTION_TYPES[dtype], int(rank), WORD)
    return found


def row_alignment(bits: int) -> int:
    """Bytes of 8 elements of so many bits: TMA's rule for 16, that of 256-bit accesses for 32."""
    return bits


def scalar_types(names: Sequence[str]) -> CallScalars | None:
    types = {name: kind(1) for name, kind in CallScalars.kinds().items()}
    types["tile_counter"] = vector_type(cutlass.Int32)
    types["score_origin"] = ScoreOrigin(*(cutlass.Int32(1) for _ in ScoreOrigin._fields))
    return CallScalars.named(names, types)


# ---------------------------------------------------------------- kernels of the forward


def compile_arguments(
    problem_class: ProblemClass, scalars: Sequence[str], columns: bool = False
) -> tuple[Any, ...]:
    """Return `cute.compile`'s arguments: types and alignments. columns: with memory for V^T."""
    element = problem_class.element_type
    q, k, v = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(3))
    results = _result_types(cutlass.Float32 if problem_class.split else element)
    if problem_class.max_logits:
        results = (*results, results[1])
    types = _of_sequences_and_functions(problem_class)
    if problem_class.sink:
        types["sink"] = vector_type(cutlass.Float32)
    of_blocks = problem_class.descale == OF_BLOCKS
    scale = (cutlass.Int32, SCALE_RANK, TMA_ALIGNMENT) if of_blocks else (cutlass.Float32, 2, 4)
    types |= {name: tensor_type(*scale) for name in problem_class.descales}
    if problem_class.out_gate:
        (types[OUT_GATE],) = gate_types(element, problem_class.out_gate)
    others = *block_scales_of(problem_class.kv_dtype), *(COLUMNS,) * columns
    types |= {name: tensor_type(element, 4, TMA_ALIGNMENT) for name in others}
    optional = optional_tensors(types)
    return q, k, v, results, optional, scalar_types(scalars), cuda.CUstream(0)


def gate_types(element_type: Any, form: str) -> list[Any]:
    if not form:
        return []
    if form == GATE_OF_HEADS:
        return [tensor_type(element_type, 3, element_type.width // 8)]
    return [tensor_type(element_type, 4, TMA_ALIGNMENT)]


def combine_compile_arguments(
    problem_class: CombineClass, scalars: Sequence[str], listed: bool = False
) -> tuple[Any, ...]:
    element = problem_class.element_type
    results = *_result_types(element), *gate_types(element, problem_class.out_gate)
    offsets = tuple(vector_type(cutlass.Int32) for _ in range(1 + problem_class.packed))
    lists = (offsets,) if listed else ()
    parts = _result_types(cutlass.Float32)
    return parts, results, *lists, scalar_types(scalars), cuda.CUstream(0)


def _result_types(element_type: Any) -> tuple[Any, ...]:
    out = tensor_type(element_type, 4, row_alignment(element_type.width))
    return out, tensor_type(cutlass.Float32, 3, alignment=4)


# ---------------------------------------------------------------- kernels of the backward


def preprocess_compile_arguments(
    problem_class: PreprocessClass, scalars: Sequence[str]
) -> tuple[Any, ...]:
    element = ELEMENT_TYPES[problem_class.dtype]
    out, dout = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(2))
    lse, dlse = (tensor_type(cutlass.Float32, 4, WORD) for _ in range(2))
    gates = gate_types(element, problem_class.out_gate)
    if gates:
        gates = [*gates, tensor_type(element, 4, TMA_ALIGNMENT), *gates]
    rows = PreprocessRows(out, dout, lse, dlse if problem_class.lse_gradient else None, *gates)
    types = {name: vector_type(cutlass.Int32) for name in problem_class.ragged}
    ragged = SequenceTensors(**types) if types else None
    stats = tensor_type(cutlass.Float32, 3, WORD)
    return rows, stats, ragged, scalar_types(scalars), cuda.CUstream(0)


def sum_compile_arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    parts, results = (
        tuple(tensor_type(kind, 4, SECTOR_BYTES) for _ in range(2))
        for kind in (cutlass.Float32, ELEMENT_TYPES[dtype])
    )
    return parts, results, cuda.CUstream(0)


def gradient_compile_arguments(
    problem_class: GradientClass, results: tuple[str, ...], has_ds: bool, scalars: Sequence[str]
) -> tuple[Any, ...]:
    """Return `cute.compile`'s arguments. results: of "dq", "dk", "dv". has_ds: dS is stored."""
    problem = problem_class.problem
    element = problem.element_type
    operands = tuple(tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(4))
    if problem.descale == OF_BLOCKS:
        codes, scales = (element, 4), (cutlass.Int32, SCALE_RANK)
        operands = tuple(
            tensor_type(*form, TMA_ALIGNMENT)
            for form in (codes, scales)
            for _ in MXFP8_GRADIENT_OPERANDS
        )
    of_keys = cutlass.Float32 if problem_class.partial else element
    types = (element if name == "dq" else of_keys for name in results)
    made = tuple(tensor_type(kind, 4, SECTOR_BYTES) for kind in types)
    optional = optional_tensors(_of_sequences_and_functions(problem))
    stats = tensor_type(cutlass.Float32, 3, TMA_ALIGNMENT)
    ds = tensor_type(element, 4, TMA_ALIGNMENT) if has_ds else None
    return operands, stats, made, ds, optional, scalar_types(scalars), cuda.CUstream(0)


# ---------------------------------------------------------------- new rows, and the tail


def append_compile_arguments(own: AppendClass) -> tuple[Any, ...]:
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
    table = {**ELEMENT_TYPES, torch.float32: cutlass.Float32}[rotary.table_dtype]
    cos, sin = (tensor_type(table, 2, rotary.table_dtype.itemsize) for _ in range(2))
    queries, rotated = (tensor_type(own.element_type, 4, TMA_ALIGNMENT) for _ in range(2))
    begins, offsets = (vector_type(cutlass.Int32) for _ in range(2))
    return RotaryTables(cos, sin, begins, queries, rotated, offsets if rotary.packed else None)


def tail_compile_arguments(own: TailClass) -> tuple[Any, ...]:
    offsets = {f"cu_seqlens_{side}": vector_type(cutlass.Int32) for side in own.sides}
    tensors = TailTensors(
        tuple(tensor_type(cutlass.Int32, 4, TMA_ALIGNMENT) for _ in own.results),
        tensor_type(cutlass.Float32, 3, WORD) if own.lse else None,
        ds_begins=None if own.ds is None else vector_type(cutlass.Int32),
        **offsets,
    )
    bounds = TailBounds(*(cutlass.Int32(1) for _ in TailBounds._fields))
    return tensors, bounds, cuda.CUstream(0)
