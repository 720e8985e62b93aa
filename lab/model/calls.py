"""Choices of the operator for a case, from its shape alone.

Which kernels it takes (`Kind`), by which tile scheduler, into how many KV splits, and the chunks of
a backward, each with a launch of dK/dV and one of dQ to itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.suite import BACKWARD, Case
from fa4_hd256.architectures import ARCHITECTURES, Architecture
from fa4_hd256.call import chunks
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.division import splits_for
from fa4_hd256.call.forward_problem import Problem, choose_tiles, tuned_tiles
from fa4_hd256.call.options import Options
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.gpus.family import of_capability
from fa4_hd256.kernels.kernel_set import MXFP8, kernels_of
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import E4M3, OF_BLOCKS
from fa4_hd256.kernels.rows.sequences import PADDING
from fa4_hd256.schedulers.choice import BACKWARD_PREFERS_CLC, grid_rows, prefers_clc


@dataclass(frozen=True)
class Kind:
    """Facts of a case that are compiled into the kernel."""

    causal: bool
    window: bool = False
    softcap: bool = False
    packed: bool = False

    @classmethod
    def of(cls, case: Case) -> Kind:
        windowed = case.window != (None, None)
        return cls(case.bounds[1] == 0, windowed, bool(case.softcap), case.packed)

    @property
    def is_dense(self) -> bool:
        return not (self.window or self.softcap or self.packed)


def architecture_on(gpu: Gpu) -> Architecture:
    """Return the architecture whose kernels run on a GPU; for an unsupported GPU, the first one."""
    return of_capability(gpu.capability) or ARCHITECTURES[0]


def forward_problem(
    case: Case, architecture: Architecture = ARCHITECTURES[0], config: Any = None,
    kv_dtype: torch.dtype | None = None,
) -> Problem:  # fmt: skip
    """A case as the operator describes it, without its tensors; bf16. config: of the forward, None
    for the default one. kv_dtype: of K and V, as `ProblemClass`."""
    q_dtype = None if config is None else config.tiles.q_dtype
    kv_dtype = kv_dtype or q_dtype
    blocks = config is not None and config.tiles.kind == MXFP8
    known = kernels_of(architecture).forward_tiles(config, kv_dtype, q_dtype, blocks)
    ragged: tuple[str, ...] = ("cu_seqlens_q", "cu_seqlens_k") if case.packed else ()
    if case.page_size:
        ragged = ("seqused_k", "page_table")
    queries, _ = _rows(case)
    tiles, packed = choose_tiles(known, case.heads // case.heads_kv, case.seqlen_q, ragged)
    if config is None:
        causal, paged = case.bounds[1] is not None, case.page_size is not None
        tiles = tuned_tiles(architecture, tiles, causal, case.seqlen_k, paged)
    return Problem(
        (*queries, case.heads, HEAD_DIM), case.seqlen_q, case.seqlen_k, case.batch,
        torch.bfloat16, torch.device("cpu"), Options(HEAD_DIM**-0.5, case.bounds), False, ragged,
        architecture, tiles, packed, page_size=case.page_size, q_dtype=q_dtype, kv_dtype=kv_dtype,
        descale=OF_BLOCKS if blocks else "",
    )  # fmt: skip


def backward_problem(
    case: Case, architecture: Architecture = ARCHITECTURES[0], in_mxfp8: bool = False
) -> BackwardProblem:
    """Return the backward's problem, all gradients requested, nothing split so far."""
    _, keys = _rows(case)
    forward = forward_problem(case, architecture)
    if in_mxfp8:
        forward = replace(forward, q_dtype=E4M3, kv_dtype=E4M3, descale=OF_BLOCKS)
    return BackwardProblem(forward, (*keys, case.heads_kv, HEAD_DIM), False, 1)


def _rows(case: Case) -> list[tuple[int, int]]:
    """Return (batch, rows) of the tensors of queries and of keys; packed sequences lie behind one
    another."""
    sides = zip(*case.lengths)
    return [(1, sum(side)) if case.packed else (case.batch, max(side)) for side in sides]


def default_splits(
    case: Case, gpu: Gpu, config: Any = None, kv_dtype: torch.dtype | None = None
) -> int:
    """KV splits of a call of ours by default. config, kv_dtype: as `forward_problem`'s."""
    return splits_for(forward_problem(case, architecture_on(gpu), config, kv_dtype), gpu)


def defaults_to_clc(case: Case, direction: str) -> bool:
    """Return True if a call of ours without `use_clc` and FA_CLC takes the dynamic scheduler."""
    if direction == BACKWARD:
        return BACKWARD_PREFERS_CLC
    return prefers_clc(case.bounds != (None, None), *filling(case))


def filling(case: Case) -> tuple[int, int]:
    """Query rows, and those that the forward's grid has room for."""
    rows = sum(q for q, _ in case.lengths)
    if not case.packed:
        return rows, case.batch * case.seqlen_q
    return rows, grid_rows(rows, case.batch, case.seqlen_q, PADDING)


@dataclass(frozen=True)
class Chunk:
    """A part of a backward that has a launch of dK/dV and one of dQ to itself.

    case: of this part, with the lengths, heads and bounds that the kernels are given. head_parts:
    parts of the group of query heads of each KV head. keeps_ds: dK/dV stores dS for dQ. count:
    chunks of this kind, one after the other. adds: each adds to dK and dV of others.
    """

    case: Case
    head_parts: int
    keeps_ds: bool
    count: int = 1
    adds: bool = False

    @property
    def partial(self) -> bool:
        """Return True if dK and dV are written in float32."""
        return self.head_parts > 1 or self.adds


def backward_chunks(case: Case, ds_bytes: int, gpu: Gpu, in_mxfp8: bool = False) -> list[Chunk]:
    """Return the chunks of a backward (`fa4_hd256.call.chunks.divide`) whose gradients are all
    requested. ds_bytes: memory that dS may take at a time."""
    problem = backward_problem(case, architecture_on(gpu), in_mxfp8)
    division = chunks.divide(problem, ds_bytes, gpu)
    whole = division.problem
    counts = Counter(case_of(case, part) for part in division.chunks)
    return [
        Chunk(one, whole.head_parts, whole.keeps_ds, count, whole.adds)
        for one, count in counts.items()
    ]


def case_of(case: Case, chunk: chunks.Chunk) -> Case:
    heads, heads_kv = len(chunk.heads), len(chunk.heads_kv)
    if case.packed:
        return replace(case, heads=heads, heads_kv=heads_kv)
    left, right = chunk.problem.forward.options.window
    lengths = ((len(chunk.queries), len(chunk.keys)),) * len(chunk.sequences)
    window = left, None if case.causal else right
    return replace(case, lengths=lengths, heads=heads, heads_kv=heads_kv, window=window)
