"""The decode kernel's role that follows the tensor core: softmax, rescaling of O, results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers import WorkTile
from ....softmax_emu.by_key import KeySoftmax, first_row_of_lane, reduce_over_lanes
from ...forward.decode_softmax import DecodeSoftmax, any_of_softmax, synchronise
from ...limits import WARP_SIZE
from ...plan.edges import RingState
from ...ranges import traced
from ...rows.views import columns_of
from ..instructions import (
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..tmem import tmem_load, tmem_store
from .config import BLOCK_KV, HALF
from .context import BlackwellDecodeContext
from .steps import HALVES

__all__ = ["DecodeConsumers"]


class DecodeConsumers(DecodeSoftmax):
    """Mixed into DecodeKernel; the shared state is its
    `BlackwellDecodeContext`.

    What K and V in e4m3 do in another way is a method of its own (`e4m3`): `_create` to
    `_inverse`.
    """

    def _create(self, context: BlackwellDecodeContext) -> KeySoftmax:
        """The softmax's state."""
        return KeySoftmax.create(
            context.scalars.scale_log2,
            self.config.ex2_pattern,
            self.config.rescale_threshold,
            self.dtype,
            self.softmax_rows,
        )

    def _load_scores(
        self, context: BlackwellDecodeContext, softmax: Any, buffer: Int32, work: Any
    ) -> cute.Tensor:
        """Load this thread's key of S."""
        scores = cute.make_rmem_tensor(self.softmax_rows, Float32)
        tmem_load(self._scores(context, buffer), scores, self.softmax_rows)
        cute.arch.fence_view_async_tmem_load()
        return scores

    def _weigh(self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor) -> None:
        """Apply a key's own scale of V to the scores; here there is none."""

    def _store_probabilities(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        """P of this thread's key to shared memory, and into the sums."""
        probabilities = cute.make_rmem_tensor(self.softmax_rows, self.dtype)
        softmax.exponentiate(scores, probabilities)
        own = context.smem["p"][None, self._own_key(), 0]
        cute.autovec_copy(probabilities, columns_of(own, context.first_row, self.softmax_rows))

    def _load_half(self, context: BlackwellDecodeContext, half: int) -> cute.Tensor:
        """Load this lane's column of a half of O."""
        values = cute.make_rmem_tensor(self.softmax_rows, Float32)
        tmem_load(self._of_half(context, half), values, self.softmax_rows)
        cute.arch.fence_view_async_tmem_load()
        return values

    def _of_half(self, context: BlackwellDecodeContext, half: int) -> Any:
        """Return the address of this warp's lanes in its rows of a half of O."""
        return context.own_lanes + self.tmem_plan[f"o{half}"].start

    @property
    def softmax_warps(self) -> int:
        return len(self.config.warps.softmax) // self.config.softmax_groups

    @property
    def softmax_rows(self) -> int:
        return self.config.softmax_rows

    def _first_row(self, context: BlackwellDecodeContext) -> Any:
        return context.first_row

    def _own_number(self) -> Int32:
        thread = cute.arch.thread_idx()[0]
        return thread if self.config.softmax_groups == 1 else thread % self.softmax_threads

    def _synchronise(self, context: BlackwellDecodeContext) -> None:
        synchronise(self.softmax_threads, context.barrier)

    @property
    def rows_of_query(self) -> int:
        """Rows of a query, those of padding among them, that a group has."""
        return min(self.of_query, self.softmax_rows)

    def _own_queries(self, context: BlackwellDecodeContext, work: Any) -> tuple[Int32, int]:
        """Return (first query, their number) of a group's rows."""
        first = self.queries(work)[0] + context.first_row // self.of_query
        return first, self.softmax_rows // self.rows_of_query

    def _first_in_group(self, context: BlackwellDecodeContext) -> Any:
        """The first query head with rows in a group, among those that share keys."""
        return context.first_row if self.of_query > self.softmax_rows else 0

    def _step_states(self) -> tuple[RingState, RingState]:
        """Return the states of S, and of the MMA before a step, of this tile or of the one before;
        none before the first."""
        return self.edges["s_done"].waiter_state(), RingState(1, Int32(0), Int32(1))

    def _own_key(self) -> Int32:
        return self._own_number()

    @traced("softmax")
    @cute.jit
    def _step(
        self,
        context: BlackwellDecodeContext,
        running: tuple[KeySoftmax, tuple[RingState, RingState], Int32],
        place: tuple[WorkTile, Int32],
        is_masked: bool,
    ):
        """One score tile: mask, maxima where they move, exp2, P to shared memory, sums.

        running: (softmax, states of S and of O, number of the step).  place: (tile, this thread's
        key), the latter right where it is used; is_masked: static, some key may be invisible.
        """
        softmax, (s_done, o_done), step = running
        # Loaded before the wait.
        nodes = self._nodes(context, place[0], is_masked)
        context.barriers["s_done"].wait(s_done)
        fence_after_thread_sync()
        scores = self._load_scores(context, softmax, s_done.index, place[0])
        if cutlass.const_expr(self.change.exists):
            places = self._places(context, place, not is_masked)
            self.change.apply(scores, context.scalars.cap_scale, places)
        self._weigh(context, softmax, scores)
        if cutlass.const_expr(is_masked):
            self._mask(context, scores, place, nodes)
        # P and O are this step's from here on.
        context.barriers["o_done"].wait(o_done)
        if any_of_softmax(softmax.exceeds(scores), self.softmax_threads, context.barrier):
            self._raise_maxima(context, softmax, scores, step)
        self._store_probabilities(context, softmax, scores)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        fence_before_thread_sync()
        context.barriers["p_done"].arrive(o_done)
        s_done.advance()
        o_done.advance()
        return s_done, o_done

    def _scores(self, context: BlackwellDecodeContext, buffer: Int32) -> Any:
        """Return the address of this warp's lanes in its rows of S."""
        start, distance = self.tmem_plan.buffers("s", self.config.s_stages)
        return context.own_lanes + (start + buffer * distance)

    def _places(
        self, context: BlackwellDecodeContext, place: tuple[WorkTile, Int32], keys_exist: bool
    ) -> Any:
        """Return the places of this thread's scores, one of each row.  place: (tile, key)."""
        work, key = place
        first_query, packed = self._own_queries(context, work)[0], self.problem_class.packed_heads
        first_head, of_query = self._first_in_group(context), self.rows_of_query
        smaller = min if isinstance(first_head, int) else cutlass.min

        def locate(row: int) -> tuple[Int32, Int32, Int32]:
            # Rows past the heads are padding.
            in_group = smaller(first_head + row % of_query, packed - 1)
            return work.head * packed + in_group, first_query + row // of_query, key

        return self.score_places(context, work, locate, keys_exist)

    def _nodes(self, context: BlackwellDecodeContext, work: Any, is_masked: bool) -> Any:
        """The words of a group's queries for a masked step, None where they have none."""
        if not (is_masked and context.mask.tree):
            return None
        first_query, queries = self._own_queries(context, work)
        return [context.nodes(work, first_query + query) for query in range(queries)]

    def _mask(
        self,
        context: BlackwellDecodeContext,
        scores: cute.Tensor,
        place: tuple[WorkTile, Int32],
        nodes: Any,
    ) -> None:
        """The scores of rows that do not see this thread's key, -inf.  place: (tile, key); nodes:
        see `_nodes`."""
        (work, key), of_query = place, self.rows_of_query
        visibility = context.visibility(work, BLOCK_KV)
        first_query, queries = self._own_queries(context, work)
        for query in range(queries):
            row = first_query + query
            is_visible = (key >= visibility.first(row)) & (key < visibility.limit(row))
            if cutlass.const_expr(nodes is not None):
                is_visible = is_visible & visibility.sees_node(key, nodes[query])
            for number in range(query * of_query, (query + 1) * of_query):
                scores[number] = cutlass.select_(is_visible, scores[number], Float32(-math.inf))

    @traced("maxima")
    @cute.jit
    def _raise_maxima(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor, step: Int32
    ):
        """Maxima over all keys of the step; O, if there is any, and sums rescaled."""
        self._share(context, "maxima", scores, cute.arch.fmax)
        shared, rows = context.smem["maxima"], self.config.rows_at_once
        for first in cutlass.range_constexpr(0, self.softmax_rows, rows):
            own = cute.local_tile(shared, (rows, self.softmax_warps), (first // rows, 0))
            maxima = self._combined(own, cute.arch.fmax)
            factors = cute.make_rmem_tensor(rows, Float32)
            softmax.raise_maxima(maxima, factors, first)
            if step > 0:
                self._rescale(context, factors, first)

    @traced("rescale O")
    def _rescale(
        self, context: BlackwellDecodeContext, factors: cute.Tensor, first_row: int
    ) -> None:
        """O *= factor, a row per column of tensor memory, from a row of the group's on."""
        rows = cute.size(factors)
        fence_after_thread_sync()
        for half in HALVES:
            for part in range(0, self.config.columns, self.config.rows):
                address = self._of_half(context, half) + (part + first_row)
                values = cute.make_rmem_tensor(rows, Float32)
                tmem_load(address, values, rows)
                cute.arch.fence_view_async_tmem_load()
                self._multiply(values, factors)
                tmem_store(values, address)
        if first_row + rows == self.softmax_rows:
            # One wait for the stores of all rows.
            cute.arch.fence_view_async_tmem_store()

    @staticmethod
    def _multiply(values: cute.Tensor, factors: cute.Tensor) -> None:
        """values *= factors, row by row, two at a time (mul.rn.f32x2)."""
        for row in range(0, cute.size(values), 2):
            values[row], values[row + 1] = cute.arch.mul_packed_f32x2(
                (values[row], values[row + 1]), (factors[row], factors[row + 1])
            )

    def _share(
        self,
        context: BlackwellDecodeContext,
        name: str,
        values: cute.Tensor,
        operation: Callable[[Float32, Float32], Float32],
    ) -> None:
        """Each warp's values, combined over its lanes, to shared memory, for all threads."""
        found = reduce_over_lanes(values, operation)
        row = first_row_of_lane(self.softmax_rows)
        warp = self._own_number() // WARP_SIZE
        for number, value in enumerate(found):
            # Neighbours that have the same row write the same.
            context.smem[name][row + number, warp] = value
        self._synchronise(context)

    def _store_sums(
        self,
        context: BlackwellDecodeContext,
        running: tuple[KeySoftmax, tuple[RingState, RingState]],
        work: Any,
        inverses: cute.Tensor,
    ) -> None:
        """O of a tile with steps.  running: (softmax, states of S and of O)."""
        context.barriers["o_done"].wait(running[1][1])
        fence_after_thread_sync()
        self._store(context, work, inverses)

    @traced("store O")
    @cute.jit
    def _store(self, context: BlackwellDecodeContext, work: Any, inverses: cute.Tensor):
        """O / sum to global memory, in the type of `out`."""
        for half in cutlass.range_constexpr(len(HALVES)):
            values = self._load_half(context, half)
            self._multiply(values, inverses)
            self._store_half(context, work, values, half)

    @cute.jit
    def _store_half(
        self, context: BlackwellDecodeContext, work: Any, values: cute.Tensor, half: int
    ):
        """A half of the columns of a group's rows, this lane's of each."""
        column = half * HALF + self._own_key()
        first_query, queries = self._own_queries(context, work)
        packed, length = self.problem_class.packed_heads, context.query(work).length
        first_head, of_query = self._first_in_group(context), self.rows_of_query
        for query in cutlass.range_constexpr(queries):
            if first_query + query < length:
                for number in cutlass.range_constexpr(min(packed, of_query)):
                    in_group = first_head + number
                    head = work.head * packed + in_group
                    out = self.result_row(context, work, first_query + query, head)
                    value = values[query * of_query + number].to(out.element_type)
                    if cutlass.const_expr(self.of_query > packed > of_query):
                        # The last group's last rows are padding.
                        if in_group < packed:
                            out[column] = value
                    else:
                        out[column] = value

    @cute.jit
    def _store_zeros(self, context: BlackwellDecodeContext, work: Any):
        """Store out = 0 for the rows of a tile that sees no key."""
        zeros = cute.make_rmem_tensor(self.softmax_rows, Float32)
        zeros.fill(0.0)
        for half in cutlass.range_constexpr(len(HALVES)):
            self._store_half(context, work, zeros, half)
