"""Arguments of the forward's kernels in a plan: slots, in the order of `argument_types`.

A slot is a view of a tensor that the plan names (`call.memory.View`), a number, or the stream;
neither stream nor counter has an address. Tensors in the place of views stay as they are:
`check.single_kernels` launches single kernels so. `backward_arguments` has the backward's.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..call.backward_problem import BackwardProblem
from ..call.forward_problem import Problem
from ..call.memory import View
from ..gpus.devices import Gpu
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.mask.windows import Reach
from ..kernels.nvfp4_format import BLOCK_SCALES
from ..kernels.problem_class import (
    COLUMNS,
    DESCALES,
    OUT_GATE,
    TILE_COUNTER,
    CallScalars,
    OptionalTensors,
    scalar_names,
)
from .argument_types import SCALE_RANK, TABLES, WORD, optional_tensors, row_alignment

# ---------------------------------------------------------------- slots


@dataclass(frozen=True)
class Number:
    """A scalar of 32 bits. kind: "Int32" or "Float32"."""

    value: int | float
    kind: str

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "Float32" else str(self.value)


def int32(value: int) -> Number:
    return Number(value, "Int32")


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
    """Return the nested arguments with `function` of each; tuples keep their type."""
    if isinstance(arguments, tuple):
        parts = [mapped(part, function) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    return None if arguments is None else function(arguments)


# ---------------------------------------------------------------- values

#: The largest window passed on, and the largest bound of lengths, which may be any number.
LARGEST_WINDOW = 1 << 29
LARGEST_LENGTH = (1 << 31) - 1


def aligned_view(tensor: Any, alignment: int) -> Any:
    """Return a tensor as `tensor_type` or `vector_type` describe it, RuntimeError if it is none."""
    if isinstance(tensor, View) and (
        tensor.data_ptr() % alignment or (tensor.shape[-1] > 1 and tensor.strides[-1] != 1)
    ):
        raise RuntimeError(f"a kernel reads {tensor} with an alignment of {alignment} bytes")
    return tensor


def optional_values(tensors: Mapping[str, Any]) -> OptionalTensors | None:
    return optional_tensors({name: _optional_value(name, t) for name, t in tensors.items()})


def _optional_value(name: str, tensor: Any) -> Any:
    if name == OUT_GATE:
        return gate_value(tensor)
    alignment = TABLES[name][1] if name in TABLES else WORD
    if name in (*BLOCK_SCALES, COLUMNS) or name in DESCALES and tensor.ndim == SCALE_RANK:
        alignment = TMA_ALIGNMENT
    return aligned_view(tensor, max(alignment, tensor.element_size()))


def gate_value(gate: Any) -> Any:
    return aligned_view(gate, TMA_ALIGNMENT if gate.ndim == 4 else gate.element_size())


def call_scalars(
    own: Any, problem: Problem, gpu: Gpu, of_backward: BackwardProblem | None = None
) -> CallScalars | None:
    """Return a kernel's scalars. of_backward: of a backward, whose forward the problem is."""
    options, backward = problem.options, of_backward
    scale, softcap = abs(options.softmax_scale), options.softcap
    of_softmax, of_scores = scale, 0.0
    if softcap:
        of_softmax, of_scores = softcap, scale / softcap
    elif options.score_mod is not None:
        of_softmax, of_scores = 1.0, scale
    unseen_queries, unseen_keys, window = Reach.of(options.window)
    # A bound beyond every length changes nothing, and sums with it stay in 32 bits.
    left, right = (min(side or 0, LARGEST_WINDOW) for side in window)
    cluster = problem.tiles.cluster if backward is None else backward.kernels.cluster
    numbers: dict[str, Any] = {
        "scale_log2": of_softmax * math.log2(math.e),
        "cap_scale": of_scores,
        "softmax_scale": options.softmax_scale,
        "window_left": left,
        "window_right": right,
        "unseen_queries": unseen_queries,
        "unseen_keys": unseen_keys,
        "max_seqlen_q": problem.max_seqlen_q,
        "max_seqlen_k": min(problem.max_seqlen_k, LARGEST_LENGTH),
        "head_parts": 1 if backward is None else backward.head_parts,
        "clusters": gpu.grid_clusters(cluster),
        "l2_bytes": gpu.l2_bytes_for_tiles,
        "part_keys": problem.part_keys,
    }
    slots: dict[str, Any] = {
        name: Number(numbers[name], kind.__name__) for name, kind in CallScalars.kinds().items()
    }
    slots[TILE_COUNTER] = View.contiguous(TILE_COUNTER, (1,), torch.int32)
    if backward is not None:
        slots["score_origin"] = ScoreOrigin(*map(int32, backward.origin))
    return CallScalars.named(scalar_names(own, problem.kernels.counts_tiles), slots)


@dataclass(frozen=True)
class CallTensors:
    """Views of a call's tensors as kernels may read them: NOTE [arguments of the forward]."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    #: Those of `OptionalTensors`, by name.
    optional: Mapping[str, Any] = field(default_factory=dict)
    row_maxima: Any = None


def call_arguments(tensors: CallTensors, problem: Problem, gpu: Gpu) -> tuple[Any, ...]:
    q, k, v = (aligned_view(t, TMA_ALIGNMENT) for t in (tensors.q, tensors.k, tensors.v))
    results: tuple[Any, ...] = _results((tensors.out, tensors.lse))
    if tensors.row_maxima is not None:
        results = (*results, aligned_view(tensors.row_maxima, 4))
    scalars = call_scalars(problem.problem_class, problem, gpu)
    return q, k, v, results, optional_values(tensors.optional), scalars, STREAM


def combine_call_arguments(
    parts: tuple[Any, Any],
    results: tuple[Any, Any],
    gate: Any,
    lists: tuple[Any, ...],
    scalars: CallScalars | None,
) -> tuple[Any, ...]:
    """Return the combining kernel's arguments. parts, results: (out, lse) each. gate: of out, or
    None."""
    listed = (tuple(aligned_view(t, 4) for t in lists),) if lists else ()
    made = _results(results) if gate is None else (*_results(results), gate_value(gate))
    return _results(parts), made, *listed, scalars, STREAM


def _results(tensors: tuple[Any, Any]) -> tuple[Any, Any]:
    out, lse = tensors
    return aligned_view(out, row_alignment(8 * out.element_size())), aligned_view(lse, 4)
