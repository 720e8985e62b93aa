"""Arguments of kernels, in forms of one binary layout.

For compiling they are described by type only, so that compiling needs no tensor and the binary
holds no length: every size and stride is dynamic except the innermost stride, which is 1. For a
plan they are views of the tensors that it names (`plan.View`), and neither stream nor counter has
an address. From tensors they carry CuTe DSL's own values, for who launches a kernel by itself.
`forward_arguments` and `backward_arguments` have the lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_tensor

from ..call.forward_problem import Problem
from ..gpus.devices import Gpu
from ..kernels.functions.score_change import ScoreOrigin
from ..kernels.mask.block_mask import MASK_BITS, MASK_BLOCKS, MASK_KEY_BITS, MASK_STEPS
from ..kernels.problem_class import ProblemClass
from ..kernels.rows.sequences import PAGE_TABLE, TREE_WORDS
from ..kernels.scalars import CallScalars
from .slots import COUNTER, STREAM, View
from .tile_counter import tile_counter

__all__ = [
    "WORD",
    "call_scalars",
    "dynamic_tensor",
    "function_types",
    "ragged_types",
    "ragged_values",
    "row_alignment",
    "scalar_types",
    "stream_argument",
    "tensor_type",
    "vector_type",
]

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


#: Ragged tensors that are no vectors: dimensions, bytes that their rows are aligned to.
_TABLES = {
    PAGE_TABLE: (2, 4),
    TREE_WORDS: (2, 4),
    MASK_STEPS: (5, 16),
    MASK_BITS: (3, 16),
    MASK_BLOCKS: (5, 16),
    MASK_KEY_BITS: (3, 16),
}


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
        dynamic_tensor(
            tensor, max(_TABLES[name][1] if name in _TABLES else WORD, tensor.element_size())
        )
        for name, tensor in zip(names, tensors, strict=True)
    ]


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
    unseen_queries, unseen_keys, window = options.reach
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
