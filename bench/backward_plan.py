"""What the operator decides of a backward from its shape alone: launches, parts of head groups,
kept dS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fa4_hd256.backward_problem import BackwardProblem
from fa4_hd256.config import HEAD_DIM
from fa4_hd256.problem import Options, Problem

from .suite import Case


@dataclass(frozen=True)
class Portion:
    """A part of a backward that has a launch of dK/dV and one of dQ to itself.

    case: of this part, with the lengths, heads and bounds that the kernels are given. splits: parts
    of the group of query heads of each KV head. keeps_ds: dK/dV stores dS for dQ. count: portions
    of this kind, one after the other.
    """

    case: Case
    splits: int
    keeps_ds: bool
    count: int = 1


def plan(case: Case, ds_bytes: int, clusters: int) -> list[Portion]:
    """As `fa4_hd256.backward.run_backward` decides where all gradients are asked for.

    ds_bytes: memory that dS may take at a time. clusters: CTA pairs that the device holds at once.
    """
    problem = _problem(case)
    problem = replace(problem, splits=problem.splits_for(case.heads_kv, clusters))
    problem = problem.keeping_ds(ds_bytes, clusters)
    if not problem.ds_heads:
        return [Portion(case, problem.splits, False)]
    whole, rest = divmod(case.heads_kv, problem.ds_heads)
    ratio = case.heads // case.heads_kv
    return [
        Portion(replace(case, heads=heads * ratio, heads_kv=heads), problem.splits, True, count)
        for heads, count in ((problem.ds_heads, whole), (rest, 1))
        if heads
    ]


def _problem(case: Case) -> BackwardProblem:
    packed = ("cu_seqlens_q", "cu_seqlens_k") if case.packed else ()
    rows_q, rows_k = (_rows(case, lengths) for lengths in zip(*case.lengths))
    forward = Problem(
        q_shape=(*rows_q, case.heads, HEAD_DIM), max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k, sequences=case.batch, dtype=torch.bfloat16,
        device=torch.device("cpu"), options=Options(HEAD_DIM**-0.5), sink=False, ragged=packed,
    )  # fmt: skip
    return BackwardProblem(forward, (*rows_k, case.heads_kv, HEAD_DIM), False, 1)


def _rows(case: Case, lengths: Sequence[int]) -> tuple[int, int]:
    """(batch, rows) of a tensor; packed sequences lie behind one another."""
    return (1, sum(lengths)) if case.packed else (case.batch, max(lengths))
