"""The roles that feed the tensor core, load and mma, generated from a kernel's steps.

`kernels.plan.steps` says what a table of MMAs means and in which order it is issued; here are the
loops that do so.  Both roles run the same ones: for each MMA the load role fetches what it needs,
and the MMA role issues it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..operands import LoadTarget, load_tile
from ..plan.edges import RingStates, SharedByReference, Signal
from ..plan.steps import CLAIM_STEPS, Load, Operand, Product, StepTable, When
from ..ranges import traced
from .context import PairContext
from .instructions import OperandLayout, TmemOperand, fence_after_thread_sync, mma_chain

__all__ = ["PairProducers"]


@dataclass(frozen=True)
class Turn:
    """Position of an issued MMA: its tile and step.

    position: where its step lies, in the load role; nothing in the MMA role.  is_first, is_last:
    whether the step is the tile's first, its last one; a bool where that is known when the kernel
    is compiled, None where the step is the first and the number of steps has not been read. adds:
    whether the step is a later one, for MMAs that overwrite in the first.
    """

    work: Any
    position: Any
    is_first: Any
    is_last: Any
    adds: Any


class NoPosition(SharedByReference):
    """Empty position, which the MMA role carries through its loops."""


class LoadRole(SharedByReference):
    """Load role: for each MMA, loads its operands into the next free buffers of its rings."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.steps = kernel, kernel.steps

    def states(self) -> RingStates:
        edges = self.kernel.edges
        rings = self.steps.loaded_rings
        return RingStates({ring.name: edges[ring.free].waiter_state() for ring in rings})

    def context_of(self, context: PairContext, work: Any) -> Any:
        """Return the context of a tile's steps.  A look-up of its sequence in each of them would
        take longer than the MMAs of a step."""
        return context.of_tile(work)

    def first_position(self, context: PairContext, work: Any) -> Any:
        return self.kernel.first_position(context, work)

    def next_position(self, position: Any) -> Any:
        return self.kernel.next_position(position)

    def perform(
        self, context: PairContext, product: Product, turn: Turn, states: RingStates
    ) -> Any:
        """The loads of an MMA for one step, those of a tile's first step in that alone."""
        for load in product.loads:
            if load.when is When.EACH or turn.is_first is True:
                states = self._load(context, load, turn, states)
        return states

    def enter(self, context: PairContext, work: Any, states: RingStates) -> Any:
        """Load what a tile's first step needs besides, where no MMA is ahead."""
        for load in self.steps.loads:
            if load.when is When.FIRST:
                states = self._load(context, load, Turn(work, None, True, False, False), states)
        return states

    def leave(self, context: PairContext, states: RingStates) -> Any:
        return states

    def leave_tile(self, is_ahead: bool, states: RingStates) -> Any:
        return states

    def want_next_tile(self, scheduler: Any) -> None:
        """The tile is as good as loaded."""
        scheduler.want_next_work()

    @cute.jit
    def want_next_tile_if(self, scheduler: Any, is_time: Boolean):
        if is_time:
            self.want_next_tile(scheduler)

    def _load(self, context: PairContext, load: Load, turn: Turn, states: RingStates) -> Any:
        places = self.kernel.places(context, load.content, turn.work, turn.position)
        for of_piece in places:
            states = traced("load")(self._fill)(context, load, of_piece, states)
        return states

    @cute.jit
    def _fill(self, context: PairContext, load: Load, places: tuple[Any, ...], states: RingStates):
        """One buffer, by a copy from each of the places.  Where both CTAs' bytes complete on the
        leader's barrier, it alone expects them."""
        ring = self.steps.ring(load.ring)
        state, loaded = states[ring.name], context.barriers[ring.full]
        context.barriers[ring.free].wait(state)
        if cutlass.const_expr(loaded.edge.signal is Signal.TMA_CTA):
            loaded.expect_bytes(state)
        else:
            if context.cta_rank == 0:
                loaded.expect_bytes(state)
        for copy, place in zip(load.copies, places, strict=True):
            target = loaded.pointer(state), state.index
            self.kernel.copy(context, copy, place, target)
        states.advance(ring.name)
        return states

    def tail(self, context: PairContext, states: RingStates) -> None:
        """Every buffer must be free before this CTA may exit: its barriers are still signalled."""
        for ring in self.steps.loaded_rings:
            _wait_for_all(context.barriers[ring.free], states[ring.name])


class MmaRole(SharedByReference):
    """MMA role: for each MMA, its waits, its instructions, its commits; one warp of the leader
    CTA."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.steps = kernel, kernel.steps

    def states(self) -> RingStates:
        edges, steps = self.kernel.edges, self.steps
        return RingStates(
            {
                ring.name: edges[steps.mma_edge(ring)].waiter_state()
                for ring in steps.multiplied_rings
            }
        )

    def context_of(self, context: PairContext, work: Any) -> Any:
        return context

    def first_position(self, context: PairContext, work: Any) -> Any:
        return NoPosition()

    def next_position(self, position: Any) -> Any:
        return position

    def want_next_tile(self, scheduler: Any) -> None:
        """The load role, which is ahead, says when."""

    def want_next_tile_if(self, scheduler: Any, is_time: Boolean) -> None:
        """The load role, which is ahead, says when."""

    def perform(
        self, context: PairContext, product: Product, turn: Turn, states: RingStates
    ) -> Any:
        """One MMA for one step."""
        return traced(product.name)(self._issue)(context, product, turn, states)

    def _issue(self, context: PairContext, product: Product, turn: Turn, states: RingStates) -> Any:
        for edge in product.waits_for(When.FIRST):
            states = self._wait_first(context, edge, turn.is_first, states)
        is_last = turn.is_last
        if is_last is None and When.LAST in {use.when for use in product.commits}:
            is_last = self.kernel.num_steps(context, turn.work) == 1
        ring = self.steps.ring(product.b.ring)
        for piece in range(product.pieces):
            for edge in product.waits_for(When.EACH):
                if piece == 0 or edge == ring.full:
                    context.barriers[edge].wait(states[self.steps.ring_of(edge).name])
            fence_after_thread_sync()
            self._chain(context, product, (piece, turn), states)
            if piece < product.pieces - 1:
                self._commit(context, ring.free, states)
                states.advance(ring.name)
        return self._signal(context, product, is_last, states)

    def _wait_first(
        self, context: PairContext, edge: str, is_first: Any, states: RingStates
    ) -> Any:
        """Wait for a buffer that serves a whole tile."""
        if not isinstance(is_first, bool):
            return self._wait_if_first(context, edge, is_first, states)
        return self._enter_ring(context, edge, states) if is_first else states

    def _enter_ring(self, context: PairContext, edge: str, states: RingStates) -> RingStates:
        """Wait on a ring's edge at a tile's start; see `_wait_first`.  Where there is one buffer,
        its index never changes, and its phase is that of the next tile at once."""
        ring = self.steps.ring_of(edge).name
        context.barriers[edge].wait(states[ring])
        if self.kernel.edges[edge].stages == 1:
            states.advance(ring)
        return states

    @cute.jit
    def _wait_if_first(
        self, context: PairContext, edge: str, is_first: Boolean, states: RingStates
    ):
        if is_first:
            states = self._enter_ring(context, edge, states)
        return states

    def _chain(
        self, context: PairContext, product: Product, which: tuple[int, Turn], states: RingStates
    ) -> None:
        """The instructions of one piece.  which: (piece, turn)."""
        piece, turn = which
        a_layout, b_layout = self._layout(product.a), self._layout(product.b)
        in_tmem = isinstance(a_layout, TmemOperand)
        address = self._tmem_address if in_tmem else self._buffer
        a = address(context, product.a, states)
        b = self._buffer(context, product.b, states)
        result = self._tmem_address(context, product.result, states)
        a_layout = a_layout.part(piece, product.pieces)
        chain = self.kernel.shapes[product.result.content], result, (a, a_layout), (b, b_layout)
        adds = Boolean(self._adds(product, piece, turn))
        self.kernel.multiply(context, turn.work, chain, adds)

    def _layout(self, operand: Operand) -> OperandLayout | TmemOperand:
        """Return the layout of the slices that an MMA reads of an operand's buffer."""
        part = operand.part
        if part is None:
            return self.kernel.layouts[operand.content]
        return self.kernel.layouts[part.content].slices(part.start, part.stop)

    @staticmethod
    def _adds(product: Product, piece: int, turn: Turn) -> Any:
        """Return True if a piece is added to the result."""
        if product.overwrites is None or piece > 0:
            return True
        return turn.adds if product.overwrites is When.FIRST else False

    def _index(self, operand: Operand, states: RingStates) -> Any:
        """The buffer of an operand's ring that is in use."""
        return states[operand.ring].index if self._stages(operand) > 1 else 0

    def _stages(self, operand: Operand) -> int:
        return self.kernel.edges[self.steps.ring(operand.ring).full].stages

    def _buffer(self, context: PairContext, operand: Operand, states: RingStates) -> cute.Pointer:
        """Return the address of an operand in shared memory."""
        return context.smem[operand.memory][None, None, self._index(operand, states)].iterator

    def _tmem_address(self, context: PairContext, operand: Operand, states: RingStates) -> Int32:
        """Return the address of an operand or a result in tensor memory."""
        start, stride = self.kernel.tmem_plan.buffers(operand.memory, self._stages(operand))
        return context.tmem.toint() + start + self._index(operand, states) * stride

    def _commit(self, context: PairContext, edge: str, states: RingStates) -> None:
        context.barriers[edge].commit(states[self.steps.ring_of(edge).name])

    def _signal(
        self, context: PairContext, product: Product, is_last: Any, states: RingStates
    ) -> Any:
        """The commits of an MMA; buffers that served this step alone are done with."""
        for use in product.commits:
            if use.when is When.EACH:
                self._commit(context, use.edge, states)
                states.advance(self.steps.ring_of(use.edge).name)
        for ring in self.steps.left_after(product):
            states.advance(ring)
        for use in product.commits:
            if use.when is When.LAST:
                states = self._commit_last(context, use.edge, is_last, states)
        return states

    def _commit_last(
        self, context: PairContext, edge: str, is_last: Any, states: RingStates
    ) -> Any:
        if isinstance(is_last, bool):
            if is_last:
                self._commit(context, edge, states)
            return states
        return self._commit_if_last(context, edge, is_last, states)

    @cute.jit
    def _commit_if_last(
        self, context: PairContext, edge: str, is_last: Boolean, states: RingStates
    ):
        if is_last:
            self._commit(context, edge, states)
        return states

    def enter(self, context: PairContext, work: Any, states: RingStates) -> Any:
        """Wait for what a tile's first step needs, where no MMA is ahead."""
        for product in self.steps.products:
            for edge in product.waits_for(When.FIRST):
                states = self._enter_ring(context, edge, states)
        return states

    def leave(self, context: PairContext, states: RingStates) -> Any:
        """Commit what a tile's last step commits, where no MMA is ahead."""
        for product in self.steps.products:
            for use in product.commits:
                if use.when is When.LAST:
                    self._commit(context, use.edge, states)
        return self.leave_tile(False, states)

    def leave_tile(self, is_ahead: bool, states: RingStates) -> Any:
        """Advance to the next tile's buffers, where the MMAs that are ahead, or those that are not,
        hold one for a whole tile."""
        products = [p for p in self.steps.products if p.is_ahead == is_ahead]
        for name in dict.fromkeys(o.ring for product in products for o in product.operands):
            several = self.kernel.edges[self.steps.mma_edge(self.steps.ring(name))].stages > 1
            if several and self.steps.resident(name):
                states.advance(name)
        return states

    def tail(self, context: PairContext, states: RingStates) -> None:
        """The last signals arrive at this CTA's barriers, which must outlive them."""
        for name in self.steps.mma_tail(self.kernel.edges):
            edge = self.steps.mma_edge(self.steps.ring(name))
            _wait_for_all(context.barriers[edge], states[name])


def _wait_for_all(barrier: Any, state: Any) -> None:
    """Wait for the last phase of every stage of an edge."""
    for _ in range(barrier.edge.stages):
        barrier.wait(state)
        state.advance()


class PairProducers:
    """The roles load and mma of a kernel; mixed into it.

    A kernel has `steps`, its table; `shapes` of its instructions, by the content of their result,
    and `layouts` of their operands, by content; `first_position(context, work)` and
    `next_position(position)`, where a tile's steps lie; `places(context, content, work, position)`,
    where a load comes from: for each piece a place for each copy; `tma_tensor(context, box)`; and,
    where not all are alike, `copy(context, copy, place, target)` and
    `multiply(context, work, chain, accumulate)`.
    """

    steps: StepTable

    @cute.jit
    def load(self, context: PairContext):
        """Fetch what the MMAs need, in the order in which they are issued.

        Each CTA loads its own share of every tile.
        """
        self._run(context, LoadRole(self))

    @cute.jit
    def mma(self, context: PairContext):
        """Issue every MMA of the pair; one warp of the leader CTA."""
        self._run(context, MmaRole(self))

    def copy(self, context: PairContext, copy: Any, place: Any, target: LoadTarget) -> None:
        """One TMA load.  place: see `tma_tile`.  target: (barrier, buffer)."""
        barrier, index = target
        smem = context.smem[copy.memory]
        load_tile(self.tma_tensor(context, copy.box), smem, place, barrier, index)

    def multiply(
        self, context: PairContext, work: Any, chain: tuple[Any, Any, Any, Any], accumulate: Boolean
    ) -> None:
        """The instructions of an MMA. chain: (shape, address of the result, A, B); A and B:
        (address, layout), the address that of shared or of tensor memory."""
        shape, result, (a, a_layout), (b, b_layout) = chain
        if isinstance(a_layout, OperandLayout):
            a = a_layout.lower_word(a)
        mma_chain(shape, result, (a, a_layout), (b_layout.lower_word(b), b_layout), accumulate)

    def _run(self, context: PairContext, role: Any) -> None:
        if self.steps.looks_ahead:
            self._look_ahead(context, role)
        else:
            self._in_order(context, role)

    @cute.jit
    def _look_ahead(self, context: PairContext, role: Any):
        """The loops of a table with MMAs that are ahead.

        Only one tile ahead: the dynamic scheduler hands out a further tile when every role has
        taken the one before, and some of them wait for the last MMA of this tile.  So tiles without
        steps are skipped after it.
        """
        products = self.steps.products
        states = role.states()
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, role, scheduler, scheduler.initial_work())
        if work.is_valid:
            states = self._start(context, role, work, states)
        while work.is_valid:
            own_context = role.context_of(context, work)
            position = role.first_position(own_context, work)
            num_steps = self.num_steps(own_context, work)
            role.want_next_tile_if(scheduler, num_steps <= CLAIM_STEPS)
            for step in cutlass.range(1, num_steps, unroll=1):
                role.want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                following_position = role.next_position(position)
                is_last = step + 1 == num_steps
                for product in products:
                    if cutlass.const_expr(product.is_ahead):
                        turn = Turn(work, following_position, False, is_last, True)
                    else:
                        turn = Turn(work, position, step == 1, False, step > 1)
                    states = role.perform(own_context, product, turn, states)
                position = following_position
            states = role.leave_tile(True, states)
            following = scheduler.advance_to_next_work()
            ahead = self.has_steps(context, following)
            for product in products:
                if cutlass.const_expr(product.is_ahead):
                    if ahead:
                        states = self._perform_first(context, role, product, following, states)
                else:
                    turn = Turn(work, position, num_steps == 1, True, num_steps > 1)
                    states = role.perform(own_context, product, turn, states)
            states = role.leave_tile(False, states)
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, role, scheduler, work)
                if work.is_valid:
                    states = self._start(context, role, work, states)
        role.tail(context, states)

    def _start(self, context: PairContext, role: Any, work: Any, states: RingStates) -> Any:
        """The MMAs that are ahead, for a tile's first step."""
        for product in self.steps.products:
            if product.is_ahead:
                states = self._perform_first(context, role, product, work, states)
        return states

    def _perform_first(
        self, context: PairContext, role: Any, product: Product, work: Any, states: RingStates
    ) -> Any:
        position = role.first_position(context, work)
        return role.perform(context, product, Turn(work, position, True, None, False), states)

    @cute.jit
    def _in_order(self, context: PairContext, role: Any):
        """The loops of a table without MMAs that are ahead."""
        products = self.steps.products
        states = role.states()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            own_context = role.context_of(context, work)
            num_steps = self.num_steps(own_context, work)
            role.want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                states = role.enter(own_context, work, states)
                position = role.first_position(own_context, work)
                for step in cutlass.range(num_steps, unroll=1):
                    role.want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    turn = Turn(work, position, False, False, step > 0)
                    for product in products:
                        states = role.perform(own_context, product, turn, states)
                    position = role.next_position(position)
                states = role.leave(context, states)
            work = scheduler.advance_to_next_work()
        role.tail(context, states)
