"""One validated description of a backward call, and what of it is compiled into its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .problem import Problem, ProblemClass

__all__ = ["BackwardProblem", "GradientClass", "PreprocessClass", "choose_splits"]

#: Keys of one tile of the dK/dV kernel.
TILE_KEYS = 128

_RAGGED_QUERIES = ("cu_seqlens_q", "seqused_q")


@dataclass(frozen=True)
class PreprocessClass:
    """What of a call is compiled into the preprocess kernel.

    lse_gradient: the gradient of the LSE is given. ragged: which of the tensors that describe the
    query rows are given.
    """

    dtype: torch.dtype
    lse_gradient: bool = False
    ragged: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientClass:
    """What of a call is compiled into the dQ or the dK/dV kernel.

    problem: as for the forward; the sink is none of theirs. partial: dK and dV are written in
    float32, one part for each piece of the group of query heads (never so for dQ).
    """

    problem: ProblemClass
    partial: bool = False


@dataclass(frozen=True)
class BackwardProblem:
    """A backward call.

    forward: the call whose gradients are asked for, with k and v as the kernels read them.
    k_shape: (batch, seqlen_k, heads_kv, 256) of those. max_seqlen_k: bound on the longest key
    sequence. lse_gradient: whether the gradient of the LSE is given. splits: pieces of the group
    of query heads, whose dK and dV are summed afterwards.
    """

    forward: Problem
    k_shape: tuple[int, ...]
    max_seqlen_k: int
    lse_gradient: bool
    splits: int

    @property
    def preprocess_class(self) -> PreprocessClass:
        ragged = tuple(name for name in self.forward.ragged if name in _RAGGED_QUERIES)
        return PreprocessClass(self.forward.dtype, self.lse_gradient, ragged)

    @property
    def dq_class(self) -> GradientClass:
        return GradientClass(replace(self.forward.problem_class, sink=False))

    @property
    def dkdv_class(self) -> GradientClass:
        return replace(self.dq_class, partial=self.splits > 1)


def choose_splits(
    key_tiles: int, heads_kv: int, batch: int, group: int, clusters: int
) -> int:
    """Pieces of the group of query heads: the fewest that give every CTA pair a tile of dK and dV.

    key_tiles: tiles of 128 keys of a sequence. group: query heads of one key/value head. clusters:
    CTA pairs that the device holds at once. Returns 1 .. group.
    """
    tiles = max(1, key_tiles * heads_kv * batch)
    return max(1, min(group, -(-clusters // tiles)))
