"""Arguments of kernels, in forms of one binary layout.

For compiling they are described by type only, so that compiling needs no tensor and the binary
holds no length: every size and stride is dynamic except the innermost stride, which is 1. For a
plan they are slots: views of the tensors that it names (`call.memory.View`), numbers, and the
stream; neither stream nor counter has an address. From tensors (tests and bench launch single
kernels so) they carry CuTe DSL's own values. Kernels of the forward have their lists here, others
in `backward_arguments`, `append_arguments` and `tail_arguments`.

NOTE [arguments of the forward].  One list, in two forms:

    q             (batch, seqlen_q, heads_q, 256)   bf16 or fp16; packed sequences: batch 1
    k, v          (batch, seqlen_k, heads_kv, 256)  bf16 or fp16; in pages (pages, page_size, ..);
                  q, k, v in e4m3: (.., 128) of out's type, two elements in each;
                  k, v in NVFP4: (.., 64), four in each
    results       out (batch, seqlen_q, heads_q, 256); lse (batch, heads_q, seqlen_q) float32,
    natural log; with max_logits
                  the row maxima, like lse
    optional      what the problem class asks for: sink (heads_q,) float32, then int32 tensors of
                  the ragged sequences, vectors but for page_table (batch, pages) and those of
                  masks (`kernels.rows.sequences.SequenceTensors`), then the scales that
                  `ProblemClass.descales` names, (entries, heads_kv) float32, of blocks (batch,
                  heads, tiles, 2, 128) int32, then out_gate, like
                  out or (batch, seqlen_q, heads_q),
                  then what functions of the call read, then the block scales of k and v in
                  NVFP4, (.., 8) of out's type, then memory for V^T where the tiles take
                  it, (batch x tiles of keys, heads_kv, 256, 64); None if that is nothing
    scalars       `kernels.problem_class.CallScalars`
    stream        CUDA stream, 0 in the simulator

With split keys the results are (batch * splits, seqlen_q, heads_q, 256) and (batch * splits,
heads_q, seqlen_q), both float32, and the arguments of the combining kernel are these, the results
proper with out_gate, if there is one, and the stream. With listed parts they are (parts,
max_seqlen_q, heads_q, 256) and (parts, heads_q, max_seqlen_q), and the combining kernel gets the
list and cu_seqlens_q, if there is one, before the stream.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_tensor

from ..call.forward_problem import Problem
from ..call.memory import View
from ..gpus.devices import Gpu
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.mask.block_mask import MASK_BITS, MASK_BLOCKS, MASK_KEY_BITS, MASK_STEPS
from ..kernels.mask.windows import Reach
from ..kernels.nvfp4_format import BLOCK_SCALES, block_scales_of
from ..kernels.problem_class import (
    DESCALES,
    GATE_OF_HEADS,
    OF_BLOCKS,
    OUT_GATE,
    CallScalars,
    ProblemClass,
)
from ..kernels.rows.sequences import PAGE_TABLE, TREE_WORDS
from ..kernels.small.combine_config import CombineClass
from .tile_counter import tile_counter

# ---------------------------------------------------------------- slots

#: Name of the dynamic scheduler's counter.
COUNTER = "tile_counter"


@dataclass(frozen=True)
class Number:
    """A scalar of 32 bits. kind: "Int32" or "Float32"."""

    value: int | float
    kind: str

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "Float32" else str(self.value)


class _Stream(enum.Enum):
    """The slot of the CUDA stream."""

    STREAM = "stream"


STREAM = _Stream.STREAM

#: An argument of a kernel.
Slot = View | Number | _Stream


def leaves(arguments: Any) -> Iterator[Any]:
    """Arguments in the order in which CuTe DSL packs them, which leaves out None."""
    if isinstance(arguments, (tuple, list)):
        for part in arguments:
            yield from leaves(part)
    elif arguments is not None:
        yield arguments


def mapped(arguments: Any, function: Callable[[Slot], Any]) -> Any:
    """Return the nested arguments with `function` of each, in their order. Tuples keep their type,
    and None stays."""
    if isinstance(arguments, tuple):
        parts = [mapped(part, function) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    return None if arguments is None else function(arguments)


def plain_arguments(arguments: Any) -> Any:
    """Return the nested arguments with CuTe DSL's numbers as `Number`s."""

    def plain(argument: Any) -> Slot:
        if isinstance(argument, (View, _Stream)):
            return argument
        return Number(argument.value, type(argument).__name__)

    return mapped(arguments, plain)


# ---------------------------------------------------------------- types and values

#: The largest window passed on, and the largest bound of lengths, which may be any number.
LARGEST_WINDOW = 1 << 29
LARGEST_LENGTH = (1 << 31) - 1
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
    """A contiguous vector of dynamic length."""
    return make_fake_tensor(element_type, (cute.sym_int32(),), (1,), assumed_align=4)


def dynamic_tensor(tensor: torch.Tensor | View, alignment: int) -> Any:
    """A tensor of a call, for one that `tensor_type` or `vector_type` describes."""
    if isinstance(tensor, View):
        if tensor.data_ptr() % alignment or (tensor.shape[-1] > 1 and tensor.strides[-1] != 1):
            raise RuntimeError(f"a kernel reads {tensor} with an alignment of {alignment} bytes")
        return tensor
    described = from_dlpack(tensor.detach(), assumed_align=alignment)
    return described.mark_layout_dynamic(leading_dim=tensor.ndim - 1)


#: Dimensions of scales of blocks.
SCALE_RANK = 5

#: Ragged tensors that are no vectors: dimensions, bytes that their rows are aligned to.
_TABLES = {
    PAGE_TABLE: (2, 4),
    TREE_WORDS: (2, 4),
    MASK_STEPS: (5, 16),
    MASK_BITS: (3, 16),
    MASK_BLOCKS: (5, 16),
    MASK_KEY_BITS: (3, 16),
}


def table_rank(name: str) -> int:
    """Return the dimensions of a ragged tensor."""
    return _TABLES[name][0] if name in _TABLES else 1


def ragged_types(names: Sequence[str], wide_tree: bool = False) -> list[Any]:
    """Return the types of ragged tensors. wide_tree: as of `ProblemClass`."""
    return [_ragged_type(name, wide_tree) for name in names]


def _ragged_type(name: str, wide_tree: bool) -> Any:
    if name == TREE_WORDS and wide_tree:
        return tensor_type(cutlass.Int64, 2, 2 * WORD)
    if name in _TABLES:
        return tensor_type(cutlass.Int32, *_TABLES[name])
    return vector_type(cutlass.Int32)


def stream_argument(stream: int | None) -> Any:
    """A CUDA stream, None for that of a plan."""
    return STREAM if stream is None else cuda.CUstream(stream)


def ragged_values(names: Sequence[str], tensors: Sequence[Any]) -> list[Any]:
    """Return the values of a call's ragged tensors; vectors of other types may be among them."""
    return [
        gate_value(tensor)
        if name == OUT_GATE
        else dynamic_tensor(tensor, max(_alignment(name, tensor.ndim), tensor.element_size()))
        for name, tensor in zip(names, tensors, strict=True)
    ]


def _alignment(name: str, rank: int) -> int:
    """Return the bytes that rows of a tensor beside q, k and v are aligned to."""
    if name in BLOCK_SCALES or name in DESCALES and rank == SCALE_RANK:
        return TMA_ALIGNMENT
    return _TABLES[name][1] if name in _TABLES else WORD


#: Dtypes of tensors that functions of a call read, by name.
_FUNCTION_TYPES = {"float32": cutlass.Float32, "int32": cutlass.Int32}


def function_types(problem_class: ProblemClass) -> list[Any]:
    """Return the types of the tensors that functions of a call read."""
    asked = problem_class.score_mod, problem_class.mask_mod
    forms = [form.split() for own in asked if own is not None for form in own.tensors]
    return [tensor_type(_FUNCTION_TYPES[dtype], int(rank), WORD) for dtype, rank in forms]


def row_alignment(bits: int) -> int:
    """Bytes of 8 elements of so many bits: TMA's rule for 16, that of 256-bit accesses for 32."""
    return bits


def scalar_types(
    backward: bool = False,
    counter: bool = False,
    fixed_parts: bool = False,
    origin: bool = False,
) -> CallScalars:
    """The scalars by type only; backward: with those that are None in the forward; counter: with
    that of the tiles; fixed_parts: with the keys of a part; origin: with that of the scores."""
    types: dict[str, Any] = {
        name: cutlass.Float32(1) if "scale" in name else cutlass.Int32(1)
        for name in CallScalars._fields
    }
    types["tile_counter"] = vector_type(cutlass.Int32) if counter else None
    numbers = (cutlass.Int32(1) for _ in ScoreOrigin._fields)
    types["score_origin"] = ScoreOrigin(*numbers) if origin else None
    if not fixed_parts:
        types["part_keys"] = None
    if not backward:
        types |= dict.fromkeys(("softmax_scale", "head_parts"))
    return CallScalars(**types)


def call_scalars(
    problem: Problem,
    gpu: Gpu,
    stream: int | None = 0,
    head_parts: int | None = None,
    cluster: int | None = None,
) -> CallScalars:
    """The scalars of one call on a GPU and stream, None for those of a plan; head_parts and
    cluster, the CTAs of one: of a backward, None for the forward."""
    options = problem.options
    scale, softcap = abs(options.softmax_scale), options.softcap
    of_softmax, of_scores = scale, 0.0
    if softcap:
        of_softmax, of_scores = softcap, scale / softcap
    elif options.score_mod is not None:
        of_softmax, of_scores = 1.0, scale
    unseen_queries, unseen_keys, window = Reach.of(options.window)
    # A bound beyond every length changes nothing, and sums with it stay in 32 bits.
    left, right = (min(side or 0, LARGEST_WINDOW) for side in window)
    backward = head_parts is not None
    counter: Any = None
    if options.use_clc and problem.kernels.counts_tiles:
        counter = View.contiguous(COUNTER, (1,), torch.int32)
        if stream is not None:
            counter = dynamic_tensor(tile_counter(problem.device, stream), 4)
    return CallScalars(
        scale_log2=cutlass.Float32(of_softmax * math.log2(math.e)),
        cap_scale=cutlass.Float32(of_scores),
        softmax_scale=cutlass.Float32(options.softmax_scale) if backward else None,
        window_left=cutlass.Int32(left),
        window_right=cutlass.Int32(right),
        unseen_queries=cutlass.Int32(unseen_queries),
        unseen_keys=cutlass.Int32(unseen_keys),
        max_seqlen_q=cutlass.Int32(problem.max_seqlen_q),
        max_seqlen_k=cutlass.Int32(min(problem.max_seqlen_k, LARGEST_LENGTH)),
        head_parts=cutlass.Int32(head_parts) if backward else None,
        clusters=cutlass.Int32(gpu.grid_clusters(cluster or problem.tiles.cluster)),
        l2_bytes=cutlass.Int32(gpu.l2_bytes_for_tiles),
        part_keys=None if problem.part_keys is None else cutlass.Int32(problem.part_keys),
        tile_counter=counter,
    )


# ---------------------------------------------------------------- kernels of the forward


def compile_arguments(
    problem_class: ProblemClass, counter: bool = False, columns: bool = False
) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile`: types and alignments, no data; counter: with that of
    the tiles.  columns: with memory for V^T."""
    element = problem_class.element_type
    q, k, v = (tensor_type(element, 4, TMA_ALIGNMENT) for _ in range(3))
    results = _result_types(cutlass.Float32 if problem_class.split else element)
    if problem_class.max_logits:
        results = (*results, results[1])
    optional = [vector_type(cutlass.Float32)] if problem_class.sink else []
    optional += ragged_types(problem_class.ragged, problem_class.wide_tree)
    of_blocks = problem_class.descale == OF_BLOCKS
    scale = (cutlass.Int32, SCALE_RANK, TMA_ALIGNMENT) if of_blocks else (cutlass.Float32, 2, 4)
    optional += [tensor_type(*scale) for _ in problem_class.descales]
    optional += gate_types(element, problem_class.out_gate)
    optional += function_types(problem_class)
    optional += [
        tensor_type(element, 4, TMA_ALIGNMENT) for _ in block_scales_of(problem_class.kv_dtype)
    ]
    optional += [q] if columns else []
    scalars = scalar_types(counter=counter, fixed_parts=problem_class.fixed_parts)
    return q, k, v, results, tuple(optional) or None, scalars, cuda.CUstream(0)


def gate_types(element_type: Any, form: str) -> list[Any]:
    """Return the type of the gate of the result, none without one. form: as `out_gate` of
    `ProblemClass`."""
    if not form:
        return []
    if form == GATE_OF_HEADS:
        return [tensor_type(element_type, 3, element_type.width // 8)]
    return [tensor_type(element_type, 4, TMA_ALIGNMENT)]


def gate_value(gate: Any) -> Any:
    """The gate of a call, for one that `gate_types` describes."""
    return dynamic_tensor(gate, TMA_ALIGNMENT if gate.ndim == 4 else gate.element_size())


def combine_compile_arguments(problem_class: CombineClass) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile` for the combining kernel."""
    element = problem_class.element_type
    results = *_result_types(element), *gate_types(element, problem_class.out_gate)
    return _result_types(cutlass.Float32), results, cuda.CUstream(0)


def ragged_combine_compile_arguments(problem_class: CombineClass) -> tuple[Any, ...]:
    """Return the arguments of `cute.compile` for the kernel that combines listed splits."""
    *results, stream = combine_compile_arguments(problem_class)
    lists = tuple(vector_type(cutlass.Int32) for _ in range(1 + problem_class.packed))
    return *results, lists, stream


def _result_types(element_type: Any) -> tuple[Any, ...]:
    """Return (out, lse)."""
    out = tensor_type(element_type, 4, row_alignment(element_type.width))
    return out, tensor_type(cutlass.Float32, 3, alignment=4)


@dataclass(frozen=True)
class CallTensors:
    """The tensors of one call, or views of those of a plan, as the kernel may read them; see NOTE
    [arguments of the forward]."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    optional: tuple[Any, ...] = ()
    row_maxima: Any = None
    columns: Any = None


def call_arguments(
    tensors: CallTensors, problem: Problem, gpu: Gpu, stream: int | None
) -> tuple[Any, ...]:
    """The arguments of one call on a GPU. stream: None for those of a plan, from its views."""
    q, k, v = (dynamic_tensor(t, TMA_ALIGNMENT) for t in (tensors.q, tensors.k, tensors.v))
    results: tuple[Any, ...] = _results((tensors.out, tensors.lse))
    if tensors.row_maxima is not None:
        results = (*results, dynamic_tensor(tensors.row_maxima, 4))
    names = (*(("sink",) if problem.sink else ()), *problem.tables)
    optional: tuple[Any, ...] = tuple(ragged_values(names, tensors.optional))
    if tensors.columns is not None:
        optional = (*optional, dynamic_tensor(tensors.columns, TMA_ALIGNMENT))
    scalars = call_scalars(problem, gpu, stream)
    return q, k, v, results, optional or None, scalars, stream_argument(stream)


def combine_call_arguments(
    parts: tuple[Any, Any],
    results: tuple[Any, ...],
    stream: int | None,
    lists: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """The arguments of one call of the combining kernel, as of `call_arguments`; each (out, lse),
    of the results with the gate of out, if there is one. lists: those of listed parts."""
    listed = (tuple(dynamic_tensor(t, 4) for t in lists),) if lists else ()
    made = *_results(results[:2]), *map(gate_value, results[2:])
    return _results(parts), made, *listed, stream_argument(stream)


def _results(tensors: tuple[Any, Any]) -> tuple[Any, Any]:
    out, lse = tensors
    return dynamic_tensor(out, row_alignment(8 * out.element_size())), dynamic_tensor(lse, 4)
