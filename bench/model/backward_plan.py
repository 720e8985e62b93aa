"""What the operator decides of a backward from its shape alone: portions, parts, kept dS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.suite import Case
from fa4_hd256.call import portions
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Options, Problem
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.blackwell.forward.config import HEAD_DIM


@dataclass(frozen=True)
class Portion:
    """A part of a backward that has a launch of dK/dV and one of dQ to itself.

    case: of this part, with the lengths, heads and bounds that the kernels are given. splits: parts
    of the group of query heads of each KV head. keeps_ds: dK/dV stores dS for dQ. count: portions
    of this kind, one after the other. adds: each adds to dK and dV of others.
    """

    case: Case
    splits: int
    keeps_ds: bool
    count: int = 1
    adds: bool = False

    @property
    def partial(self) -> bool:
        """Whether dK and dV are written in float32."""
        return self.splits > 1 or self.adds


def plan(case: Case, ds_bytes: int, gpu: Gpu) -> list[Portion]:
    """As `fa4_hd256.run.backward.run_backward` decides where all gradients are asked for.

    ds_bytes: memory that dS may take at a time.
    """
    problem = _problem(case)
    splits = problem.head_parts_for(case.heads_kv, case.batch, gpu)
    division = portions.divide(replace(problem, head_parts=splits), ds_bytes, gpu)
    whole = division.problem
    counts = Counter(_case(case, part) for part in division.portions if part.keys)
    return [
        Portion(one, whole.head_parts, whole.keeps_ds, count, whole.adds)
        for one, count in counts.items()
    ]


def _case(case: Case, portion: portions.Portion) -> Case:
    heads_kv = len(portion.heads_kv)
    heads = heads_kv * case.heads // case.heads_kv
    if case.packed:
        return replace(case, heads=heads, heads_kv=heads_kv)
    left, right = portion.problem.forward.options.window
    lengths = ((len(portion.queries), len(portion.keys)),) * len(portion.sequences)
    window = left, None if case.causal else right
    return replace(case, lengths=lengths, heads=heads, heads_kv=heads_kv, window=window)


def _problem(case: Case) -> BackwardProblem:
    packed = ("cu_seqlens_q", "cu_seqlens_k") if case.packed else ()
    rows_q, rows_k = (_rows(case, lengths) for lengths in zip(*case.lengths))
    forward = Problem(
        q_shape=(*rows_q, case.heads, HEAD_DIM), max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k, sequences=case.batch, dtype=torch.bfloat16,
        device=torch.device("cpu"), options=Options(HEAD_DIM**-0.5, case.bounds),
        sink=False, ragged=packed,
    )  # fmt: skip
    return BackwardProblem(forward, (*rows_k, case.heads_kv, HEAD_DIM), False, 1)


def _rows(case: Case, lengths: Sequence[int]) -> tuple[int, int]:
    """(batch, rows) of a tensor; packed sequences lie behind one another."""
    return (1, sum(lengths)) if case.packed else (case.batch, max(lengths))
