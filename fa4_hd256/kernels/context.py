"""Context of the warp roles of a CTA, and the role of its scheduler warp, on every architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.memory import SmemAllocator

from ..schedulers.order import TileOrder
from ..schedulers.protocol import WorkTile
from .mask.masking import KvSplit, MaskKind, Visibility
from .operands import SharedMemory
from .plan.edges import Barrier, EdgeTable, SharedByReference
from .problem_class import CallScalars, ProblemClass
from .rows.sequences import FirstPage, Sequences, cache_entries

#: Class of a kernel's own context.
OwnContext = TypeVar("OwnContext", bound="KernelContext")


@dataclass(frozen=True)
class KernelContext(SharedByReference):
    """State that every warp role of one CTA shares; architectures and kernels add to it. A context
    is made once, by a kernel's `set_up`, and read by all roles. Its fields have the same values in
    all threads of the CTA unless a field says otherwise."""

    #: Tensors of the call in global memory, and their TMA descriptors.
    tensors: Any
    #: Barriers in shared memory by the name of their edge, as the plan's `EdgeTable` lists them.
    barriers: dict[str, Barrier]
    #: Rows of the batch entries, on both sides.
    sequences: Sequences
    #: What hides scores; known when the kernel is compiled.
    mask: MaskKind
    #: Scalars of the call.
    scalars: CallScalars
    #: Query heads that share a KV head; with packed heads, groups of them.
    heads_per_kv: Int32
    #: Order of the tiles, from which a scheduler derives a tile's block, head and batch entry.
    order: TileOrder
    #: State that the schedulers of all warps share: the result of the scheduler class's `setup`.
    channel: Any
    #: Rank of this CTA in its cluster; 0 is the leader.
    cta_rank: Int32
    #: Buffers in shared memory by name.  The kernel's method that makes them has their shapes.
    smem: dict[str, cute.Tensor]

    def batch(self, work: WorkTile) -> Int32:
        return work.batch

    def of_tile(self: OwnContext, work: WorkTile) -> OwnContext:
        """Return the context for one valid tile, before its steps: its sequence is looked up once,
        not in each of them."""
        return replace(self, sequences=self.sequences.of_batch(self.batch(work)))

    def part(self, work: WorkTile) -> KvSplit | None:
        return None

    def visibility(self, work: WorkTile, block_kv: int) -> Visibility:
        """Return the keys that the rows of a tile see, counted without rows that a negative bound
        hides: `windows`, NOTE [negative windows]."""
        batch, mask, scalars = self.batch(work), self.mask, self.scalars
        queries, keys = self.sequences.query(batch).length, self._visible_keys(batch)
        if cutlass.const_expr(mask.hides_rows and mask.bounded_left):
            queries = cutlass.max(queries - scalars.unseen_queries, 0)
        first_page = self.first_page(batch)
        hidden = None if first_page is None else first_page.hidden
        return Visibility(
            queries,
            keys if hidden is None else keys + hidden,
            mask,
            self.scalars.window_left,
            self.scalars.window_right,
            block_kv,
            self.part(work),
            hidden,
        )

    def _visible_keys(self, batch: Int32) -> Int32:
        keys = self.sequences.key(batch).length
        if cutlass.const_expr(self.mask.hides_rows and self.mask.bounded_right):
            keys = cutlass.max(keys - self.scalars.unseen_keys, 0)
        return keys

    def first_page(self, batch: Int32) -> FirstPage | None:
        """Return where KV tiles count keys from; None for the first key of the entry."""
        if not self.mask.padded_pages:
            return None
        first_row = self.sequences.key(batch).offset
        return FirstPage.of(first_row, self._visible_keys(batch), self.mask.padded_pages)

    def nodes(self, work: WorkTile, row: Int32) -> Any:
        """Return the word of a row of a tile, Int32 or Int64, `masking` NOTE [trees].

        None without a tree mask.  Rows past the queries get the word of some query.
        """
        if not self.mask.tree:
            return None
        words = self.sequences.tensors.tree_words
        batch, row = (
            cutlass.min(place, Int32(cute.size(words, mode=[mode])) - 1)
            for mode, place in enumerate((self.batch(work), row))
        )
        return words[batch, row]


class KernelParts(NamedTuple):
    """Code that a kernel of tiles is composed of beside its class; `run.building` chooses it.

    scheduler: a class of the `schedulers` protocol.  functions: those of its scores
    (`kernel_functions.KernelFunctions`).  keys: the class of a forward that says where rows of K
    and V lie (`forward.keys.KeySource`).
    """

    scheduler: Any
    functions: Any
    keys: Any = None


class TileKernel(Protocol):
    """A kernel of tiles, as `shared_fields` needs it. scheduled_warps: of a cluster."""

    problem_class: ProblemClass
    edges: EdgeTable
    scheduler: Any

    @property
    def scheduled_warps(self) -> int: ...


def shared_fields(
    kernel: TileKernel,
    allocator: SmemAllocator,
    memory: SharedMemory,
    tensors: Any,
    sizes: tuple[Int32, ...],
    scalars: CallScalars,
    order: TileOrder,
) -> dict[str, Any]:
    """Return the fields of a kernel's context but for `cta_rank` and `smem`; initialise barriers.
    memory: laid out as the plan says. sizes: seqlen_q, seqlen_k, query heads (or groups of them)
    for each KV head, and what the kernel adds."""
    problem_class = kernel.problem_class
    entries = cache_entries(problem_class, tensors)
    return {
        "tensors": tensors,
        "barriers": kernel.edges.bind(memory.region("barriers", cutlass.Int64, 8)),
        "sequences": Sequences(tensors.optional.ragged, *sizes[:2], entries=entries),
        "mask": problem_class.mask,
        "scalars": scalars,
        "heads_per_kv": sizes[2],
        "order": order,
        "channel": kernel.scheduler.setup(allocator, kernel.scheduled_warps, scalars.tile_counter),
    }


#: Steps of a tile that the load role has left when it lets the scheduler request the next one. Too
#: early keeps tiles from clusters that have nothing to do; the response takes 500 to 2,000 clocks,
#: and the load role wants it when these steps are loaded.
CLAIM_STEPS = 2


@cute.jit
def schedule(scheduler_class: Any, context: KernelContext) -> None:
    """Request each next tile when the load warp wants it; nothing under a static scheduler."""
    if cutlass.const_expr(scheduler_class.needs_scheduler_warp):
        scheduler = scheduler_class.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            scheduler.prefetch_next_work()
            work = scheduler.advance_to_next_work()
        scheduler.producer_tail()


@cute.jit
def want_next_tile_if(scheduler: Any, is_time: Boolean) -> None:
    """Let the scheduler warp request the next tile, once in a tile."""
    if is_time:
        scheduler.want_next_work()
