"""One validated description of a backward call, and what of it is compiled into its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .problem import Problem, ProblemClass
from .sequences import PADDING

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
    """What of a call is compiled into a dQ kernel or the dK/dV kernel.

    problem: as for the forward; the sink is none of theirs. partial: dK and dV are written in
    float32, one part for each piece of the group of query heads (never so for dQ). stores_ds: the
    dK/dV kernel stores dS, and dQ is a product of it.
    """

    problem: ProblemClass
    partial: bool = False
    stores_ds: bool = False


@dataclass(frozen=True)
class BackwardProblem:
    """A backward call.

    forward: the call whose gradients are asked for, with k and v as the kernels read them.
    k_shape: (batch, seqlen_k, heads_kv, 256) of those. lse_gradient: whether the gradient of the
    LSE is given. splits: parts of the group of query heads of each key/value head, of equal size
    but for the last, each of which gets its own dK and dV in float32; 1 for none. ds_heads:
    key/value heads whose dS is kept for dQ at a time; 0: dQ computes dS anew.
    """

    forward: Problem
    k_shape: tuple[int, ...]
    lse_gradient: bool
    splits: int
    ds_heads: int = 0

    @property
    def preprocess_class(self) -> PreprocessClass:
        ragged = tuple(name for name in self.forward.ragged if name in _RAGGED_QUERIES)
        return PreprocessClass(self.forward.dtype, self.lse_gradient, ragged)

    @property
    def dq_class(self) -> GradientClass:
        problem_class = replace(self.forward.problem_class, sink=False, packed_heads=1)
        return GradientClass(problem_class, stores_ds=self.ds_heads > 0)

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.forward.q_shape[2] // self.k_shape[2]

    def ds_shape(self, heads_kv: int) -> tuple[int, int, int, int]:
        """(sequences, query heads, keys, queries) of dS^T of some key/value heads, the queries in
        whole units."""
        forward = self.forward
        queries = -(-forward.max_seqlen_q // PADDING) * PADDING
        return forward.sequences, heads_kv * self.group, forward.max_seqlen_k, queries

    def keeping_ds(self, num_bytes: int, clusters: int) -> BackwardProblem:
        """The same with as many `ds_heads` as fit into so much memory, and the splits for them.

        clusters: CTA pairs that the device holds at once.
        """
        of_one = math.prod(self.ds_shape(1)) * self.forward.dtype.itemsize
        heads = min(num_bytes // of_one if of_one else 0, self.k_shape[2])
        # Each launch has the tiles of these heads only.
        some = 0 < heads < self.k_shape[2]
        splits = self.splits_for(heads, clusters) if some else self.splits
        return replace(self, ds_heads=heads, splits=splits)

    def splits_for(self, heads_kv: int, clusters: int) -> int:
        """`choose_splits` for a launch with so many of the key/value heads."""
        tiles = heads_kv * count_key_tiles(self.forward, self.k_shape)
        return choose_splits(tiles, self.group, clusters)

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
