"""Base of every kernel of a CTA pair, or of a CTA alone: set-up, the dispatch of warps to roles,
tear-down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..context import KernelContext, KernelParts, shared_fields
from ..operands import LoadTarget, SharedMemory
from ..plan.edges import RingState, Signal
from ..problem_class import ProblemClass
from .pair_plan import CTAS


@dataclass(frozen=True)
class PairContext(KernelContext):
    """State that every warp role of one CTA shares; kernels add to it. A tensor-memory address has
    the lane in its upper 16 bits and the column of 32 bits in its lower ones."""

    #: Word of shared memory that receives the address of the allocated tensor memory.
    tmem_address: cute.Pointer
    #: First lane and column of the allocated tensor memory; None until it is allocated.
    tmem: Any = None
    #: Like `tmem`, from the first of the 32 lanes that this warp reaches: differs between warps.
    warp_lanes: Any = None


@cute.jit
def await_buffer(context: PairContext, ring: str, state: RingState) -> LoadTarget:
    """Wait until the next buffer of a ring is free, and expect its bytes; return what loads take.

    Of bytes of both CTAs, which complete on the leader's barrier, the leader alone expects all.
    The peer's bytes may come before that: the phase still waits for the leader's arrival.  The
    phase before was complete when the buffer became free, so they never count for that one.
    """
    loaded = context.barriers[f"{ring}_loaded"]
    context.barriers[f"{ring}_free"].wait(state)
    if cutlass.const_expr(loaded.edge.signal is Signal.TMA_CTA):
        loaded.expect_bytes(state)
    else:
        if context.cta_rank == 0:
            loaded.expect_bytes(state)
    return loaded.pointer(state), state.index


class PairKernel:
    """Base of every Blackwell kernel with tensor memory: those of a pair of CTAs, and those of
    `decode`, where one CTA works on a tile alone.

    A kernel has the methods `descriptors(tensors)`, the TMA tensors to prefetch; `smem(memory)`,
    its operands in shared memory, by name; `run_role(context, warp)`, which calls the role of a
    warp; and `num_steps(context, work)`, the steps of a tile, the same in both CTAs and all roles.
    """

    #: Class of the record that the roles share.
    context_class: type[PairContext]
    #: CTAs that share a tile and its MMAs: 2, or 1 in `decode`.
    ctas = CTAS
    #: Whether shared memory is addressed by its symbol: `operands` NOTE [address by symbol].
    smem_by_symbol = False

    def __init__(self, plan: Any, problem_class: ProblemClass, parts: KernelParts) -> None:
        """plan: has warps, smem, tmem, edges and steps."""
        self.problem_class = problem_class
        self.dtype = problem_class.element_type
        self.is_bf16 = self.dtype is cutlass.BFloat16
        self.parts, self.scheduler = parts, parts.scheduler
        self.warps, self.edges = plan.warps, plan.edges
        self.smem_plan, self.tmem_plan = plan.smem, plan.tmem

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: Any,
        sizes: tuple[Int32, ...],
        scalars: Any,
        order: Any,
    ) -> PairContext:
        """Lay out shared memory as the plan says and initialise the barriers: `shared_fields`."""
        memory = SharedMemory(allocator, self.smem_plan, self.dtype, self.smem_by_symbol)
        return self.context_class(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
            tmem_address=memory.region("tmem_address", Int32, 4),
            smem=self.smem(memory),
            **self.context_fields(tensors, sizes),
        )

    def context_fields(self, tensors: Any, sizes: tuple[Int32, ...]) -> dict[str, Any]:
        """Return fields of the kernel's context beside those of every kernel."""
        return {}

    def allow_next(self) -> None:
        """Consent to the next kernel's begin before this one's end: none by default."""

    @property
    def scheduled_warps(self) -> int:
        return self.warps.scheduled_warps

    @cute.kernel
    def kernel(self, tensors: Any, sizes: tuple[Int32, ...], scalars: Any, order: Any):
        """Set-up, then each warp runs its role, then tear-down."""
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.warps.load:
            for tma in self.descriptors(tensors):
                cpasync.prefetch_descriptor(tma.atom)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        # Barriers must be initialised in both CTAs before either allocates tensor memory for the
        # pair or signals the other (PTX ISA 9.7.16.7.1).
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        columns, is_pair = self.tmem_plan.allocated_columns, self.ctas > 1
        if warp == self.warps.mma:
            cute.arch.alloc_tmem(columns, context.tmem_address, is_two_cta=is_pair)
        self._meet()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, context.tmem_address)
        # A warp reaches the 32 lanes of its place in the warpgroup (PTX ISA 9.7.16.2.3.1).
        warp_lanes = tmem + warp % 4 * (32 << 16)
        context = replace(context, tmem=tmem, warp_lanes=warp_lanes)

        self.run_role(context, warp)

        # Nobody may leave while the peer still signals it or its tensor memory is in use.
        self._meet()
        if warp == self.warps.mma:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_pair)
            cute.arch.dealloc_tmem(tmem, columns, is_two_cta=is_pair)

    def set_registers(self, budget: int) -> None:
        """setmaxnreg (PTX ISA 9.7.20.5) to a role's budget, up or down from that of the launch."""
        at_launch = self.warps.registers.at_launch
        if budget > at_launch:
            cute.arch.setmaxregister_increase(budget)
        if budget < at_launch:
            cute.arch.setmaxregister_decrease(budget)

    def _meet(self) -> None:
        if self.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def skip_empty_tiles(self, context: PairContext, scheduler: Any, work: Any, requests: bool):
        """Skip tiles without any step: nothing is loaded or multiplied for them.  requests: the
        role is the one that lets the scheduler request each next tile."""
        while work.is_valid & ~self.has_steps(context, work):
            if cutlass.const_expr(requests):
                scheduler.want_next_work()
            work = scheduler.advance_to_next_work()
        return scheduler, work

    @cute.jit
    def has_steps(self, context: PairContext, work: Any):
        # The batch entry of an invalid tile must not be looked up.
        has_steps = Boolean(False)
        if work.is_valid:
            has_steps = self.num_steps(context, work) > 0
        return has_steps
