"""Backwards under a block mask on the timing model.

dS is always stored: a launch of dV and one of the products of dS for each chunk, as the operator
splits the call, and around them what `backward` has. Costs of a tile are fitted to replays of the
kernels that read lists (`backward.block_mask`, NOTE [listed blocks]). A case's tiles are the lists
of its own mask, in the kernels' order.

NOTE [one cost of a step].  In the loop of dV's kernel ptxas branches nowhere around the bits: their
work stands under a predicate, and a step that sees all issues it as well. So a step has one cost,
that of steps with bits, and all samples of dV have bits in each. Paths of other samples may not be
replayed: the timing model counts an instruction under a predicate as executed, and where
the run had none of them the way round the loop over tiles looks more alike than the loop over
steps, which is not entered at all then.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from bench.measure.masks import MaskedCase
from bench.suite import BACKWARD, Case
from fa4_hd256.call import chunks
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.call.tile_mask import TileMask, blocks_of_queries
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.backward.block_mask import READ, WRITTEN, least_section
from fa4_hd256.kernels.backward.ds_tiles import count_blocks
from fa4_hd256.kernels.backward.gemm_order import GemmOrder
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.mask.block_mask import FULL, MASK_BLOCKS, MASK_GRADIENTS, MASK_KEY_BITS
from lab.model.backward import Backward
from lab.model.calls import Chunk, Kind, backward_problem, case_of, defaults_to_clc
from lab.model.machines import compiling_ours
from lab.model.masked import HALVES, ROW_BYTES, MaskSample
from lab.model.ours import Ours, Variant, backward_call
from lab.model.replays import SEED, Replayed, Traced, digest, fitted, kept
from lab.model.stored_tiles import DS, DV, PRODUCT, ROWS, STEP, product_order
from lab.model.tiles import PARTIAL_ROW, ROW, BackwardTiling, Order, indices, section_of
from lab.paths import Paths
from lab.whole.problem import Tile, TileCosts, Tiles
from sm100_sim import timing
from sm100_sim.timing import Machine

#: Samples of the kernel of dV, whose tiles are of keys: NOTE [one cost of a step]; of the other
#: one, which knows of no bits.
DV_SAMPLES = (
    MaskSample(1024, 512, True), MaskSample(1024, 1024, True), MaskSample(2048, 512, True),
    MaskSample(3072, 256, True),
)  # fmt: skip
PRODUCT_SAMPLES = (
    MaskSample(512, 512), MaskSample(1024, 512), MaskSample(2048, 512), MaskSample(1024, 1024),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The lists of a mask for one query head, int64, by batch entry; there may be one for all.

    written, read: steps of each block of keys, for dV and for dK; partial: of the first those in
    which a half of the keys has bits. columns: steps of each block of queries, for dQ.
    """

    written: np.ndarray
    read: np.ndarray
    partial: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, mask: TileMask, queries: range | None = None) -> BlockLists:
        """Return the lists of the first head; of some queries as `blocks_of_queries` has them."""
        blocks, blocks_k = mask.blocks[:, :1], count_blocks(mask.lengths[1])
        if queries is not None:
            blocks = blocks_of_queries(blocks, mask.lengths[1], queries)
        table = blocks[:, 0].long()
        rows, columns = table[:, :blocks_k], table[:, blocks_k:]
        written = rows[..., 0, WRITTEN]
        is_listed = torch.arange(rows.shape[2] - 1) < written[..., None]
        has_bits = (rows[..., 1:, 1 : 1 + HALVES] != FULL).any(-1) & is_listed
        found = written, rows[..., 0, READ], has_bits.sum(-1), columns[..., 0, READ]
        return cls(*(steps.numpy() for steps in found))

    def narrowed(self, sequences: range) -> BlockLists:
        """Return the lists of some batch entries."""
        if len(self.written) == 1:
            return self
        part = slice(sequences.start, sequences.stop)
        return BlockLists(
            self.written[part], self.read[part], self.partial[part], self.columns[part]
        )

    def entry(self, batch: int) -> BlockLists:
        """Return the lists of one batch entry, without the batch dimension."""
        which = min(batch, len(self.written) - 1)
        return BlockLists(
            self.written[which], self.read[which], self.partial[which], self.columns[which]
        )

    @property
    def shares(self) -> tuple[float, float]:
        """Return (share of listed blocks in all blocks, share of those with bits in the steps of
        dV)."""
        _, blocks_k = self.written.shape
        most = blocks_k * self.columns.shape[1] * len(self.written) * (ROWS // STEP)
        return float(self.written.sum() / most), float(self.partial.sum() / self.written.sum())


@functools.cache
def lists_of(case: MaskedCase, queries: range) -> BlockLists:
    """Return the lists of some queries, by the case's own mask."""
    return BlockLists.of(case.tile_mask(torch.device("cpu")), queries)


def shares(case: MaskedCase) -> tuple[float, float]:
    """`BlockLists.shares` of a case."""
    return lists_of(case, range(case.seqlen_q)).shares


@dataclass(frozen=True)
class ListedChunk(Chunk):
    """whole: the case that it is a chunk of; sequences, queries: of that."""

    whole: MaskedCase = field(kw_only=True)
    sequences: range = field(kw_only=True)
    queries: range = field(kw_only=True)

    @property
    def lists(self) -> BlockLists:
        return lists_of(self.whole, self.queries).narrowed(self.sequences)


def gradient_problem(case: Case) -> BackwardProblem:
    """A case's backward with the lists of a block mask, as the operator describes it."""
    problem = backward_problem(case)
    return replace(problem, forward=replace(problem.forward, ragged=MASK_GRADIENTS))


@functools.cache
def listed_tiles(case: MaskedCase) -> int:
    """Return the listed tiles of a call on a GPU, which counts them of large masks alone."""
    mask = case.tile_mask(torch.device("cpu"))
    if mask.is_large:
        mask.count_listed()
    return mask.listed_tiles


class MaskedBackward(Backward):
    """Both kernels with lists."""

    def plan(self, case: Case) -> list[Chunk]:
        assert isinstance(case, MaskedCase)
        problem = replace(gradient_problem(case), listed_tiles=listed_tiles(case))
        division = chunks.divide(problem, self.ds_bytes, self.tiling.gpu)
        # A chunk has fewer queries than keys, which no case with a mask has.
        plain = Case(**{own.name: getattr(case, own.name) for own in fields(Case)})
        whole = division.problem
        counts = Counter(
            (case_of(plain, part), part.sequences, part.queries) for part in division.chunks
        )
        return [
            ListedChunk(
                one, whole.head_parts, whole.keeps_ds, count, whole.adds,
                whole=case, sequences=sequences, queries=queries,
            )
            for (one, sequences, queries), count in counts.items()
        ]  # fmt: skip

    def tiles(self, kernel: str, chunk: Chunk) -> Tiles:
        assert isinstance(chunk, ListedChunk)
        return _tiles(kernel, chunk, self.tiling)


@functools.lru_cache(maxsize=64)
def _tiles(kernel: str, chunk: ListedChunk, tiling: BackwardTiling) -> Tiles:
    """Return the tiles, which all machines share."""
    return Tiles.of({"dv": dv_tiles, "products": product_tiles}[kernel](chunk, tiling))


def _query_heads(chunk: Chunk, head: int) -> int:
    """Return the query heads in the part of a KV head's group that a tile's head is."""
    group, parts = chunk.case.heads // chunk.case.heads_kv, chunk.head_parts
    each = -(-group // parts)
    return min(each, group - head % parts * each)


def _shared(steps: np.ndarray, met: np.ndarray, length: int) -> tuple[np.ndarray, float]:
    """Return (rows of the other side that each tile of a head lists, rows besides that fall to
    each).

    What tiles of a head share is counted as nested (`lab.whole.problem.Tile`): all of it is the
    longest list. Rows that some tile lists and this one does not come from HBM once, too. steps: of
    each tile; met: of each block of the other side, 0 where no tile lists it; length: of that side.
    """
    rows = np.minimum(steps * STEP, length)
    some = min(int((met > 0).sum()) * ROWS, length)
    return rows, max(some - int(rows.max()), 0) / max(int((steps > 0).sum()), 1)


def dv_tiles(chunk: ListedChunk, tiling: BackwardTiling) -> list[Tile]:
    """The tiles of dV in order, by `BlockLists.written`; otherwise as `stored_tiles.dv_tiles`."""
    case, lists = chunk.case, chunk.lists
    heads, length = case.heads_kv * chunk.head_parts, case.seqlen_k
    grid = lists.written.shape[1], heads, case.batch
    of_row = 2 * ROW * _query_heads(chunk, 0)
    least = _least_section(case, tiling.gpu)
    section = section_of(case, tiling, grid, 1, of_row * case.seqlen_q, least)
    result, found = PARTIAL_ROW if chunk.partial else ROW, []
    for block, head, batch in indices(grid, section, tiling.order.later(False)):
        listed, query_heads = lists.entry(batch), _query_heads(chunk, head)
        steps, bits = (int(count[block]) for count in (listed.written, listed.partial))
        shared, besides = _shared(listed.written, listed.columns, case.seqlen_q)
        rows = min(length - block * ROWS, ROWS)
        # Without a step there is nothing to load; dV is zeros.
        reads, writes = 2 * ROW * rows * (steps > 0), result * rows
        own = reads + writes + (DS * steps + ROW_BYTES * ROWS * bits) * query_heads
        own += 2 * ROW * query_heads * besides * (steps > 0)
        found.append(
            Tile(
                DV * steps * query_heads, batch * heads + head,
                2 * ROW * query_heads * float(shared[block]), own, reads=reads, writes=writes,
            )
        )  # fmt: skip
    return found


def product_tiles(chunk: ListedChunk, tiling: BackwardTiling) -> list[Tile]:
    """The tiles of the products in order; otherwise as `stored_tiles.product_tiles`."""
    case, lists, pairs = chunk.case, chunk.lists, tiling.gpu.pairs
    heads, order = case.heads_kv * chunk.head_parts, product_order(case, chunk.head_parts)
    section = max(order.parts_at_once(pairs), _least_section(case, tiling.gpu))
    grid, last = (order.num_tiles, heads, case.batch), order.parts_at_last(pairs)
    again = [
        read_again(lists.entry(batch), order, min(section, heads * case.batch), tiling.gpu)
        for batch in range(case.batch)
    ]
    found = []
    for number, head, batch in indices(grid, section, False, last=last):
        of_keys, block, nth = order.tile(number)
        listed, query_heads = lists.entry(batch), _query_heads(chunk, head)
        if not of_keys and nth >= query_heads:
            found.append(Tile(0.0))
            continue
        # Beside dS: those of dK read Q of the part's heads, those of dQ K.
        sides = listed.read, listed.columns
        own_side, met = sides if of_keys else sides[::-1]
        length, other = case.lengths[batch][of_keys], case.lengths[batch][not of_keys]
        shared, besides = _shared(own_side, met, other)
        rows, summed = min(length - block * ROWS, ROWS), query_heads if of_keys else 1
        steps = int(own_side[block]) * summed
        writes = (PARTIAL_ROW if of_keys and chunk.partial else ROW) * rows
        own = writes + DS * steps * (1.0 if of_keys else again[batch])
        own += ROW * summed * besides * (steps > 0)
        group, of_others = 2 * (batch * heads + head) + of_keys, ROW * float(shared[block])
        found.append(Tile(PRODUCT * steps, group, of_others * summed, own, 0.0, 0.0, writes))
    return found


def read_again(lists: BlockLists, order: GemmOrder, heads: int, gpu: Gpu) -> float:
    """Share of dS that comes from HBM for both products: see `stored_tiles.read_again`. lists: of
    one sequence. heads: interleaved parts, with `order.heads` query heads each.

    A block is read by dK's and by dQ's tile of it as far apart as their lists are long, at most.
    """
    blocks = float(lists.written.sum()) * STEP / ROWS
    if blocks * ROWS * ROWS * 2 * heads * order.heads <= gpu.l2_bytes_for_tiles:
        return 0.0
    mean = blocks / max(int((lists.written > 0).sum()), 1)
    return max(0.0, 1 - gpu.pairs / 2 / heads / mean)


def _least_section(case: Case, gpu: Gpu) -> int:
    return least_section(gradient_problem(case).dkdv_class.problem, gpu.pairs)


# ------------------------------------------------------------------------------------- replays


def backward(machine: Machine, draws: int, use_clc: bool) -> MaskedBackward:
    """The backward under block masks with costs fitted to its kernels' replays."""
    variant = Variant(Kind(causal=False), use_clc, kernel=BACKWARD)
    # This kernel distributes tiles in the same way.
    like, paths = Ours().backward(variant, machine, draws), {}

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        rows = replays(machine, replace(variant, kernel=which), draws)
        paths[which] = Paths.of(rows)
        return fitted(rows, variant.policy)

    tiling = replace(like.tiling, order=Order(equal_too=True))
    return MaskedBackward(like.name, tiling, like.values, costs, like.ds_bytes, paths)


def uses_clc(case: MaskedCase) -> bool:
    """Return True if a call of it without `use_clc` takes the dynamic scheduler."""
    return defaults_to_clc(case, BACKWARD)


def replays(machine: Machine, variant: Variant, draws: int) -> list[Replayed]:
    """One CTA pair on each of a kernel's samples."""
    samples = DV_SAMPLES if variant.kernel.startswith("dv") else PRODUCT_SAMPLES

    def trace() -> list[Traced]:
        found = []
        for sample in samples:
            compiled, arguments = call_on(machine, variant, sample)
            prediction = timing.predict(compiled, *arguments, draws=0)[-1]
            found.append(Traced.of(prediction, sample_tiles(variant.kernel, sample)))
        return found

    compiled, _ = call_on(machine, variant, samples[0])
    what = digest(compiled.cubin), "block mask", variant.kernel, samples
    return kept(what, trace, machine, draws)


def _sample_heads(which: str) -> int:
    """Query heads of a sample: where parts of a group are summed one of each part."""
    return 2 if which.endswith(" partial") else 1


def sample_tiles(which: str, sample: MaskSample) -> int:
    """Tiles of a sample of a kernel."""
    heads, of_keys = _sample_heads(which), sample.keys // ROWS
    of_queries = sample.queries // ROWS if which.startswith("products") else 0
    return (of_keys + of_queries) * heads


def call_on(
    machine: Machine, variant: Variant, sample: MaskSample, mask: TileMask | None = None
) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA pair), as compiled for such machines.
    mask: that of the sample by default."""
    generator, heads = torch.Generator().manual_seed(SEED), _sample_heads(variant.kernel)
    shapes = ((sample.queries, heads), (sample.keys, 1), (sample.keys, 1), (sample.queries, heads))
    tensors: Any = tuple(
        torch.randn(1, rows, n, HEAD_DIM, generator=generator).bfloat16() for rows, n in shapes
    )
    mask = sample.mask() if mask is None else mask
    options = Options.check(None, False, (None, None), 0.0, variant.use_clc)
    assert mask.key_bits is not None
    ragged = {MASK_BLOCKS: mask.blocks, MASK_KEY_BITS: mask.key_bits}
    with compiling_ours(machine):
        problem = Problem.describe(tensors[:3], options, None, ragged, config=ForwardConfig())
        given = tuple(ragged[name] for name in problem.ragged)
        return backward_call(variant, problem, tensors, given)
