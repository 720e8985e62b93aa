"""One validated description of a backward call, and what of it is compiled into its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..gpus.devices import Gpu
from ..kernels.backward import mxfp8_ds
from ..kernels.backward.ds_tiles import DS_TILE_ELEMENTS, count_tiles, ds_units
from ..kernels.functions.kernel_functions import ScoreOrigin
from ..kernels.kernel_set import BackwardKernel, BackwardSet, KeyKernel
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.windows import Reach
from ..kernels.problem_class import OF_BLOCKS, GradientClass
from ..kernels.rows.sequences import DS_BEGINS
from ..kernels.small.backward_preprocess import PreprocessClass
from ..schedulers.order import TileProblem, section_heads_for
from .checks import check_gradients
from .forward_problem import Problem, is_masked
from .memory import without_expanded_heads
from .operator_arguments import BackwardTensors
from .options import Options

_RAGGED_QUERIES = ("cu_seqlens_q", "seqused_q")


@dataclass(frozen=True)
class BackwardProblem:
    """A backward call, or a chunk of one (`chunks`)."""

    #: The call whose gradients are requested, with k and v as the kernels read them.
    forward: Problem
    #: (batch, seqlen_k, heads_kv, 256) of this k and v.
    k_shape: tuple[int, ...]
    #: Whether the gradient of the LSE is given.
    lse_gradient: bool
    #: Parts into which the query heads of each KV head are divided, of equal size but for the last.
    #: Each part gets its own dK and dV in float32; 1 for none.
    head_parts: int
    #: Heads of the user's k and v that are one expanded head here. Each of them has a gradient,
    #: hence a part, of its own.
    copies: int = 1
    #: Whether the kernel of dV stores dS, of which dK and dQ are products. Otherwise one kernel
    #: makes dK and dV, another one dQ.
    keeps_ds: bool = False
    #: Whether several chunks add to the same dK and dV, in float32.
    adds: bool = False
    #: Where a chunk lies in the call.
    origin: ScoreOrigin = ScoreOrigin()
    #: Tiles of dS of a query head: under a block mask the most that a sequence has, with
    #: `DS_BEGINS` those of all sequences. 0 where the host does not know, which leaves room for all
    #: that may be.
    listed_tiles: int = 0

    @classmethod
    def describe(
        cls,
        tensors: BackwardTensors,
        options: Options,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> BackwardProblem:
        """Validate a call. tensors: packed sequences with a batch of 1. Raises as
        `Problem.describe` and `check_gradients` do, and NotImplementedError for an architecture
        that has no backward."""
        q, others = tensors.q, tensors.others()
        k, v = without_expanded_heads(tensors.k, tensors.v)
        forward = Problem.describe(
            (q, k, v), options, tensors.sink, others, max_seqlen_q, max_seqlen_k
        )
        # A user's bounds, of the keys above all, may be any number; grids follow them.
        forward = replace(
            forward,
            max_seqlen_q=min(forward.max_seqlen_q, max(1, q.shape[1])),
            max_seqlen_k=min(forward.max_seqlen_k, max(1, k.shape[1])),
            # The last of all names.
            ragged=(*forward.ragged, *[DS_BEGINS] * (DS_BEGINS in others)),
        )
        named = {name: getattr(tensors, name) for name in ("out", "dout", "lse", "dlse")}
        check_gradients(named, q, forward.lse_shape)
        forward.kernels.backward_set()
        # One head that was expanded: each of its copies has its own gradient, which is the part of
        # the query heads that read it.
        copies = tensors.k.shape[2] // k.shape[2]
        return cls(forward, tuple(k.shape), tensors.dlse is not None, copies, copies)

    @property
    def preprocess_class(self) -> PreprocessClass:
        ragged = tuple(name for name in self.forward.ragged if name in _RAGGED_QUERIES)
        return PreprocessClass(self.forward.dtype, self.lse_gradient, ragged, self.forward.out_gate)

    @property
    def dq_class(self) -> GradientClass:
        own = replace(self.forward.problem_class, sink=False, packed_heads=1, out_gate="")
        return GradientClass(own)

    @property
    def dkdv_class(self) -> GradientClass:
        return replace(self.dq_class, partial=self.head_parts > 1 or self.adds)

    def of_kernel(self, kernel: BackwardKernel) -> BackwardProblem:
        """Return the problem as a kernel has it: one that computes no scores knows no functions of
        them."""
        if kernel.computes_scores:
            return self
        options = replace(self.forward.options, softcap=0.0, score_mod=None, mask_mod=None)
        return replace(self, forward=replace(self.forward, options=options))

    @property
    def group(self) -> int:
        return self.forward.q_shape[2] // self.k_shape[2]

    @property
    def dkdv_shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen_k, parts, 256) of the dK, and of the dV, that a kernel writes."""
        batch, seqlen, heads, columns = self.k_shape
        return batch, seqlen, heads * self.head_parts, columns

    @property
    def sums(self) -> bool:
        """Return True if a kernel, not PyTorch, adds up the parts of dK and dV."""
        is_empty = self.has_no_queries or self.has_no_keys
        return self.head_parts > self.copies and not self.adds and not is_empty

    @property
    def kernels(self) -> BackwardSet:
        return self.forward.kernels.backward_set(self.is_mxfp8)

    @property
    def is_mxfp8(self) -> bool:
        """Return True if operands, and dS, are in mxfp8."""
        return self.forward.descale == OF_BLOCKS

    @property
    def tile_elements(self) -> int:
        """Return the elements of 16 bits that a tile of dS takes."""
        return mxfp8_ds.TILE_ELEMENTS if self.is_mxfp8 else DS_TILE_ELEMENTS

    @property
    def ds_shape(self) -> tuple[int, int, int, int]:
        """(query heads, units, tiles of a unit, elements of a tile) of dS: `backward.ds_tiles`."""
        forward = self.forward
        longest = forward.max_seqlen_q, forward.max_seqlen_k
        window = forward.options.window
        units = forward.sequences, count_tiles(longest, window)
        if is_masked(forward.ragged):
            units = forward.sequences, self.of_listed(units[1])
        elif DS_BEGINS in forward.ragged:
            units = 1, self.listed_tiles
        elif forward.ragged:
            packed = self.k_shape[1] if "cu_seqlens_k" in forward.ragged else None
            units = ds_units(longest, window, forward.sequences, packed)
        return forward.q_shape[2], *units, self.tile_elements

    def of_listed(self, tiles: int) -> int:
        """Return how many of so many tiles of a query head may be listed under a block mask."""
        return min(tiles, self.listed_tiles or tiles)

    @property
    def ds_bytes(self) -> int:
        return math.prod(self.ds_shape) * self.forward.dtype.itemsize

    @property
    def ds_bytes_of_head(self) -> int:
        return self.ds_bytes // self.k_shape[2]

    def head_parts_for(self, heads_kv: int, sequences: int, gpu: Gpu) -> int:
        """`choose_head_parts` of a launch."""
        if self.copies > 1:
            return self.copies
        forward, reach = self.forward, Reach.of(self.forward.options.window)
        left, right = reach.window
        kernel = self.kernels.stored_keys if self.keeps_ds else self.kernels.recomputed_keys
        seen, keys = reach.lengths(forward.max_seqlen_q, forward.max_seqlen_k)
        if right is not None:
            seen = min(seen, keys + right)
        band = seen
        if left is not None and right is not None:
            band = min(seen, left + right + kernel.keys)
        mean = 1.0
        if forward.ragged:
            mean = 0.5
        elif (left is not None or right is not None) and band == seen:
            # Over as many keys as there are queries a tile's fall to none.
            mean = 1 - max(min(seen, keys) - kernel.keys, 0) / (2 * max(keys, 1))
        launch = replace(forward, sequences=sequences)
        tiles = heads_kv * count_key_tiles(launch, self.k_shape, kernel.keys)
        steps = -(-band // kernel.queries)
        pairs = 0 if forward.ragged else heads_kv * sequences
        work = KeyWork(tiles, steps, mean, pairs, forward.max_seqlen_q)
        return choose_head_parts(work, self.group, gpu, kernel)

    @property
    def has_no_queries(self) -> bool:
        return self.forward.is_empty

    @property
    def has_no_keys(self) -> bool:
        return self.k_shape[1] == 0


def count_key_tiles(problem: Problem, k_shape: tuple[int, ...], keys: int) -> int:
    """Tiles of so many keys of all sequences, at most; lengths on the device are not known here."""
    padded = problem.sequences * -(-problem.max_seqlen_k // keys)
    if "cu_seqlens_k" not in problem.ragged:
        return padded
    return min(padded, k_shape[1] // keys + problem.sequences)


@dataclass(frozen=True)
class KeyWork:
    """Tiles of keys of a launch, by which its parts are chosen.

    tiles: of all KV heads and sequences. steps: at most, that a tile passes for each query head.
    mean: steps of a tile on average, over those of the longest; 1 where all are alike. pairs: KV
    heads times sequences of equal length, 0 where lengths differ. rows: queries of a sequence.
    """

    tiles: int
    steps: int
    mean: float = 1.0
    pairs: int = 0
    rows: int = 0


def choose_head_parts(work: KeyWork, group: int, gpu: Gpu, kernel: KeyKernel) -> int:
    """Parts of the group of query heads: those that end soonest, by an estimate.

    More parts fill the clusters better, but each writes its own dK and dV. group: query heads of
    one key/value head. Returns 1 .. group; no part is empty when each but the last has
    ceil(group / parts) heads.
    """
    clusters = gpu.clusters(kernel.cluster)
    # Of the whole GPU's bandwidth, in the time of a step.
    part_cost = kernel.part_bytes / (gpu.hbm_bytes_per_second * kernel.seconds)

    def estimate(parts: int) -> float:
        heads = -(-group // parts)
        count, longest = work.tiles * parts, heads * work.steps
        if work.mean < 1:
            ends = count / clusters * (longest * work.mean + kernel.overhead)
            ends += _wait_for_longest(work, parts, heads, gpu, kernel)
            if kernel.by_sections:
                ends = max(ends, longest + kernel.overhead)
        else:
            ends = -(-count // clusters) * (longest + kernel.overhead)
        # Of the products only the longest tile, a part's dK, depends on the parts: half of it is
        # waited for.
        ends += kernel.products * longest / 2
        return ends + part_cost * count * (parts > 1)

    parts = min(range(1, group + 1), key=estimate)
    return -(-group // -(-group // parts))


def _wait_for_longest(work: KeyWork, parts: int, heads: int, gpu: Gpu, kernel: KeyKernel) -> float:
    """Steps by which tiles of different lengths end later than equal shares of them would.

    heads: query heads of a part. The last section of a launch begins with its longest tiles, while
    tiles of the section before are at work. So one of them is waited for where both sections
    together have less than it for each cluster. Of ragged sequences half of it is.
    """
    longest = heads * work.steps
    if not kernel.by_sections:
        # Who draws a long one last ends later by more, the more they differ.
        return 2 * (1 - work.mean) * longest
    if not work.pairs or not work.tiles:
        return (1 - work.mean) * longest
    blocks, pairs = work.tiles // work.pairs, work.pairs * parts
    section = section_heads_for(
        num_heads_per_kv=1,
        num_pairs=pairs,
        kv_bytes_per_head=work.rows * heads * 4 * HEAD_DIM,
        l2_bytes=gpu.l2_bytes_for_tiles,
        unequal_lengths=True,
    )
    last = pairs - TileProblem(blocks, pairs, 1, section).order().last_pair
    share = last * blocks * work.mean / gpu.clusters(kernel.cluster)
    return max(0.0, 1 - 2 * share) * longest
