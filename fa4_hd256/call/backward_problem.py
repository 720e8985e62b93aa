"""One validated description of a backward call, and what of it is compiled into its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV
from fa4_hd256.kernels.problem_class import GradientClass, PreprocessClass
from fa4_hd256.kernels.sequences import PADDING

from .checks import check_gradients
from .forward_problem import ForwardCall, Options, Problem
from .layouts import without_expanded_heads

__all__ = [
    "BackwardCall",
    "BackwardProblem",
    "choose_head_parts",
    "count_key_tiles",
]

_RAGGED_QUERIES = ("cu_seqlens_q", "seqused_q")


@dataclass(frozen=True)
class BackwardProblem:
    """A backward call.

    forward: the call whose gradients are asked for, with k and v as the kernels read them. k_shape:
    (batch, seqlen_k, heads_kv, 256) of those. lse_gradient: whether the gradient of the LSE is
    given. head_parts: parts into which the group of query heads of each key/value head is divided,
    of equal size but for the last, each of which gets its own dK and dV in float32; 1 for none.
    copies: heads of the user's k and v that are one expanded head here, each with a gradient, hence
    a part, of its own. keeps_ds: dK/dV stores dS for dQ, which computes it anew otherwise. adds:
    the call is divided so that several portions add to the same dK and dV, in float32.
    """

    forward: Problem
    k_shape: tuple[int, ...]
    lse_gradient: bool
    head_parts: int
    copies: int = 1
    keeps_ds: bool = False
    adds: bool = False

    @property
    def preprocess_class(self) -> PreprocessClass:
        ragged = tuple(name for name in self.forward.ragged if name in _RAGGED_QUERIES)
        return PreprocessClass(self.forward.dtype, self.lse_gradient, ragged)

    @property
    def dq_class(self) -> GradientClass:
        problem_class = replace(self.forward.problem_class, sink=False, packed_heads=1)
        return GradientClass(problem_class, stores_ds=self.keeps_ds)

    @property
    def dkdv_class(self) -> GradientClass:
        return replace(self.dq_class, partial=self.head_parts > 1 or self.adds)

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.forward.q_shape[2] // self.k_shape[2]

    @property
    def dkdv_shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen_k, parts, 256) of the dK, and of the dV, that the kernel writes."""
        batch, seqlen, heads, columns = self.k_shape
        return batch, seqlen, heads * self.head_parts, columns

    @property
    def ds_shape(self) -> tuple[int, int, int, int]:
        """(sequences, query heads, keys, queries) of dS^T, the queries in whole units."""
        forward = self.forward
        queries = -(-forward.max_seqlen_q // PADDING) * PADDING
        return forward.sequences, forward.q_shape[2], forward.max_seqlen_k, queries

    @property
    def ds_bytes_of_head(self) -> int:
        """Memory that dS of one key/value head takes, of all sequences."""
        return math.prod(self.ds_shape) * self.forward.dtype.itemsize // self.k_shape[2]

    def head_parts_for(self, heads_kv: int, sequences: int, gpu: Gpu) -> int:
        """`choose_head_parts` for a launch with so many key/value heads and sequences."""
        if self.copies > 1:
            return self.copies
        forward, (left, right) = self.forward, self.forward.options.window
        seen = forward.max_seqlen_q
        if left is not None and right is not None:
            seen = min(seen, left + right + BLOCK_KV)
        bounded = left is not None or right is not None
        unequal = bool(forward.ragged) or (bounded and seen == forward.max_seqlen_q)
        tiles = heads_kv * count_key_tiles(replace(forward, sequences=sequences), self.k_shape)
        return choose_head_parts(tiles, -(-seen // PADDING), self.group, gpu, unequal)

    @property
    def has_no_queries(self) -> bool:
        """Then nothing is launched, and dK and dV are 0."""
        return self.forward.is_empty

    @property
    def has_no_keys(self) -> bool:
        """Then dQ is 0, and dK and dV are empty."""
        return self.k_shape[1] == 0


@dataclass(frozen=True)
class BackwardCall:
    """The tensors of a backward call, as the user has them.

    q, out, dout: (batch, seqlen_q, heads_q, 256); k, v: (batch, seqlen_k, heads_kv, 256); lse,
    dlse: (batch, heads_q, seqlen_q) float32, dlse None for zero; sink: (heads_q,) or None; packed
    sequences have a batch of 1. ragged: those of `forward_problem.RAGGED` that are given.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None
    ragged: dict[str, torch.Tensor]

    def describe(
        self, options: Options, max_seqlen_q: int | None, max_seqlen_k: int | None
    ) -> BackwardProblem:
        """Validate the call; raises as `Problem.describe` and `check_gradients` do."""
        forward = ForwardCall(self.q, self.k, self.v, self.sink, self.ragged).describe(
            options, max_seqlen_q, max_seqlen_k
        )
        check_gradients(
            {"out": self.out, "dout": self.dout, "lse": self.lse, "dlse": self.dlse},
            self.q,
            forward.lse_shape,
        )
        k, _ = without_expanded_heads(self.k, self.v)
        # One head that was expanded: each of its copies has its own gradient, which is the part of
        # the query heads that read it.
        copies = self.k.shape[2] // k.shape[2]
        return BackwardProblem(forward, tuple(k.shape), self.dlse is not None, copies, copies)


def count_key_tiles(problem: Problem, k_shape: tuple[int, ...]) -> int:
    """Tiles of 128 keys of all sequences, at most; lengths on the device are not known here."""
    padded = problem.sequences * -(-problem.max_seqlen_k // BLOCK_KV)
    if "cu_seqlens_k" not in problem.ragged:
        return padded
    return min(padded, k_shape[1] // BLOCK_KV + problem.sequences)


#: What a tile takes beside its units, in the time of a unit; that time, modelled; and the bytes of
#: writing and summing the parts of 128 keys in float32 (docs/backward.md).
_TILE_OVERHEAD, _UNIT_SECONDS, _PART_BYTES = 1.0, 4.16e-6, 1e6


def choose_head_parts(tiles: int, units: int, group: int, gpu: Gpu, unequal: bool) -> int:
    """Parts of the group of query heads: those that end soonest, by an estimate.

    More parts fill the CTA pairs better, but each writes its own dK and dV. tiles: of 128 keys, of
    all key/value heads and sequences. units: of 256 queries, at most, that a tile passes for each
    query head. group: query heads of one key/value head. unequal: tiles differ in their units, by a
    mask or by the sequences' lengths. Returns 1 .. group; no part is empty when each but the last
    has ceil(group / parts) heads.
    """
    # Of the whole GPU's bandwidth, in the time of a unit.
    part_cost = _PART_BYTES / (gpu.hbm_bytes_per_second * _UNIT_SECONDS)

    def estimate(parts: int) -> float:
        count, longest = tiles * parts, -(-group // parts) * units
        if unequal:
            # Half of the longest on average; who draws a long one last ends half of one later.
            ends = count / gpu.pairs * (longest / 2 + _TILE_OVERHEAD) + longest / 2
        else:
            ends = -(-count // gpu.pairs) * (longest + _TILE_OVERHEAD)
        return ends + part_cost * count * (parts > 1)

    parts = min(range(1, group + 1), key=estimate)
    return -(-group // -(-group // parts))
