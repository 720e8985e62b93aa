"""One validated description of a backward call, and what of it is compiled into its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .problem import Problem, ProblemClass

__all__ = [
    "BackwardProblem",
    "GradientClass",
    "PreprocessClass",
    "check_gradients",
    "choose_splits",
    "count_key_tiles",
]

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
    k_shape: (batch, seqlen_k, heads_kv, 256) of those. lse_gradient: whether the gradient of the
    LSE is given. splits: parts of the group of query heads of each key/value head, of equal size
    but for the last, each of which gets its own dK and dV in float32; 1 for none.
    """

    forward: Problem
    k_shape: tuple[int, ...]
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

    @property
    def has_no_queries(self) -> bool:
        """Then nothing is launched, and dK and dV are 0."""
        return self.forward.is_empty

    @property
    def has_no_keys(self) -> bool:
        """Then dQ is 0, and dK and dV are empty."""
        return self.k_shape[1] == 0


def check_gradients(
    named: dict[str, torch.Tensor | None], q: torch.Tensor, lse_shape: tuple[int, ...]
) -> None:
    """out and its gradient like q; lse and its gradient (batch, heads, seqlen_q) float32.

    named: out, dout, lse, dlse; None for one not given. Raises TypeError for another dtype,
    ValueError for another shape or device.
    """
    for name, tensor in named.items():
        if tensor is None:
            continue
        of_rows = name in ("lse", "dlse")
        shape, dtype = (lse_shape, torch.float32) if of_rows else (q.shape, q.dtype)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {dtype}")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {tuple(shape)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {q.device}, like q")


def count_key_tiles(problem: Problem, k_shape: tuple[int, ...]) -> int:
    """Tiles of 128 keys of all sequences, at most; lengths on the device are not known here."""
    padded = problem.sequences * -(-problem.max_seqlen_k // TILE_KEYS)
    if "cu_seqlens_k" not in problem.ragged:
        return padded
    return min(padded, k_shape[1] // TILE_KEYS + problem.sequences)


def choose_splits(tiles: int, group: int, clusters: int) -> int:
    """Parts of the group of query heads: the fewest that give every CTA pair a tile of dK and dV.

    tiles: of 128 keys, of all key/value heads and sequences. group: query heads of one key/value
    head. clusters: CTA pairs that the device holds at once. Returns 1 .. group; no part is empty
    when each but the last has ceil(group / parts) heads.
    """
    parts = max(1, min(group, -(-clusters // max(1, tiles))))
    return -(-group // -(-group // parts))
