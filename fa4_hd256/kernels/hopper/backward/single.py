"""One gradient by itself, with scores and dS of its own: dQ = dS K, dK = dS^T Q or dV = P^T dO.

For calls whose dS is not stored, or that request some gradients only.  One tile is 256 rows of the
result, 128 of each CTA, 64 of each of its two warpgroups; one step meets it with 64 rows of the
other side; each CTA loads half of their columns for both.  A of the MMAs, Q and dO or K and V,
stays (a, g); B, K and V or Q and dO, passes (x, y)::

    dQ   S = Q K^T     dP = dO V^T     sum += dS K       a, g = Q, dO   x, y = K, V
    dK   S^T = K Q^T   dP^T = V dO^T   sum += dS^T Q     a, g = K, V    x, y = Q, dO
    dV   S^T = K Q^T                   sum += P^T dO     a = K          x, y = Q, dO

Timeline of one CTA::

    load        x(1) y(1) x(2) y(2) ..
    warpgroup   S(0) dP(0) | S(1) dP(1) sum(0) | S(2) dP(2) sum(1) ..     | sum(n)
                     dS(0)                dS(1)                dS(2) ..            result ->

A warpgroup computes the dS of a step while the sum of the step before runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ....softmax_emu.exp2 import exp2_hardware
from ....softmax_emu.recompute import scale_for_masking
from ...backward.common import BackwardContext as Context
from ...backward.common import Step
from ...backward.ds_tiles import RUN
from ...context import CLAIM_STEPS, KernelParts, want_next_tile_if
from ...limits import HEAD_DIM
from ...operands import SharedMemory
from ...plan.edges import RingRecord, SharedByReference
from ...problem_class import GradientClass
from ...ranges import traced
from ..instructions import (
    ROWS,
    WgmmaShape,
    commit,
    fence,
    multiply,
    pack,
    this_warpgroup,
    transposed,
    wait,
)
from .common import HopperBackward
from .config import CTAS, GradientConfig, SinglePlan
from .key_rows import KeyMask, KeyRows, ListedKeyMask
from .query_rows import QueryMask, QueryRows

TILE_ROWS, STEP_COLUMNS = SinglePlan.tile_rows, SinglePlan.step_columns
CTA_ROWS = TILE_ROWS // CTAS
RUNS = STEP_COLUMNS // RUN
OPERANDS = ("q", "k", "v", "dout")
#: What passes beside x, and beside y, where the plan says so.
STATS = {"x": "lse", "y": "delta"}


@dataclass(frozen=True)
class SingleOperands(SharedByReference):
    """Descriptors: a, g of this warpgroup's rows; columns: x or y as B of the sum."""

    a: cute.Tensor
    g: cute.Tensor
    x: cute.Tensor
    y: cute.Tensor
    columns: cute.Tensor


class SingleTile(NamedTuple):
    """A warpgroup's tile. weights: A of the sum, dS or P in 16 bits. mask: hides scores."""

    work: WorkTile
    operands: SingleOperands
    weights: cute.Tensor
    mask: KeyMask | ListedKeyMask | QueryMask


class SingleKernel(HopperBackward):
    """Base of the three, which say what differs. stays, passes: names of a and g, and of x and y.
    rows: class of the tiles. of_ds: the sum is of dS, else of P. is_scaled: the result is
    softmax_scale times the sum."""

    stays: tuple[str, ...]
    passes: tuple[str, str]
    rows: type[KeyRows] | type[QueryRows]
    of_ds = True
    is_scaled = True

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = self.rows(self.plan, self.functions)
        self.boxes = {
            **{n: (OPERANDS.index(n), CTA_ROWS, HEAD_DIM) for n in self.stays},
            **{n: (OPERANDS.index(n), STEP_COLUMNS, HEAD_DIM // 2) for n in self.passes},
        }
        self.shared_boxes = self.passes
        self.score = WgmmaShape(self.dtype, STEP_COLUMNS)
        self.sum = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        plan = self.plan
        buffers = {
            "a": memory.operand("a", CTA_ROWS, HEAD_DIM, 1),
            "g": memory.operand("g", CTA_ROWS, HEAD_DIM, 1),
            "x": memory.operand("x", STEP_COLUMNS, HEAD_DIM, plan.x_stages),
            "y": memory.operand("y", STEP_COLUMNS, HEAD_DIM, plan.y_stages),
        }
        for name, stages in (("lse", plan.x_stages), ("delta", plan.y_stages)):
            if name in plan.passing_stats:
                layout = cute.make_layout((STEP_COLUMNS, stages))
                buffers[name] = cute.make_tensor(memory.region(name, Float32, 128), layout)
        return buffers

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Context):
        states = RingRecord.waiting(self.edges, "a_free", "x_free", "y_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            num_steps = self.tiles.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.tiles.first_position(tile_context, work)
                states = self._load_stays(tile_context, work, position, states)
                for step in cutlass.range(0, num_steps, unroll=1):
                    want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    states = self._load_passing(tile_context, "x", work, position, states)
                    states = self._load_passing(tile_context, "y", work, position, states)
                    position = self.tiles.next_position(position)
            work = scheduler.advance_to_next_work()

    @traced("load")
    def _load_stays(
        self, context: Context, work: WorkTile, position: Int32 | Step, states: RingRecord
    ) -> RingRecord:
        barrier, _ = self.next_buffer(context, "a", states)
        for box, name in zip(self.stays, "ag"):
            place = self.tiles.places(context, box, work, position)
            self.load_box(context, box, place, barrier, context.smem[name][None, None, 0])
        states.advance("a_free")
        return states

    @traced("load")
    def _load_passing(
        self,
        context: Context,
        name: str,
        work: WorkTile,
        position: Int32 | Step,
        states: RingRecord,
    ) -> RingRecord:
        """Load x, or y, of a step, for both CTAs, with what passes beside it."""
        barrier, buffer = self.next_buffer(context, name, states)
        box, stats = self.passes["xy".index(name)], STATS[name]
        place = self.tiles.places(context, box, work, position)
        self.load_box(context, box, place, barrier, context.smem[name][None, None, buffer])
        if stats in self.plan.passing_stats:
            destination = barrier, context.smem[stats][None, buffer]
            self.tiles.load_stats(context, stats, (work, position), destination)
        states.advance(f"{name}_free")
        return states

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: Context):
        """One warpgroup: its 64 rows of every tile."""
        states = RingRecord.waiting(
            self.edges, "a_loaded", "x_loaded", "y_loaded", "x_free", "y_free"
        )
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        operands, sums = self._operands(context), self.sum.accumulator()
        while work.is_valid:
            num_steps = self.tiles.num_steps(context, work)
            sums.fill(0.0)
            if num_steps > 0:
                states = self._steps(context, operands, sums, work, num_steps, states)
            self._finish(context, work, sums)
            work = scheduler.advance_to_next_work()

    def _operands(self, context: Context) -> SingleOperands:
        smem, shape, place = context.smem, (ROWS, HEAD_DIM), (this_warpgroup(), 0)
        a, g = (
            self.score.a_operand(cute.local_tile(smem[name][None, None, 0], shape, place))
            for name in "ag"
        )
        x, y = (self.score.b_operand(smem[name]) for name in "xy")
        columns = self.sum.b_operand(transposed(smem["x" if self.of_ds else "y"]))
        return SingleOperands(a, g, x, y, columns)

    @cute.jit
    def _steps(
        self,
        context: Context,
        operands: SingleOperands,
        sums: cute.Tensor,
        work: WorkTile,
        num_steps: Int32,
        states: RingRecord,
    ):
        position, mask = self.tiles.first_position(context, work), self.tiles.mask(context, work)
        tile = SingleTile(work, operands, self.sum.a_fragment(STEP_COLUMNS), mask)
        context.barriers["a_loaded"].wait(states["a_loaded"])
        states = self._step(context, tile, position, None, states)
        for _ in cutlass.range(1, num_steps, unroll=1):
            position = self.tiles.next_position(position)
            states = self._step(context, tile, position, sums, states)
        context.barriers["a_free"].arrive(states["a_loaded"])
        states.advance("a_loaded")
        states = self._issue_sum(context, tile, sums, states)
        wait(0)
        return self._release_sum(context, states)

    @cute.jit
    def _step(
        self,
        context: Context,
        tile: SingleTile,
        position: Int32 | Step,
        sums: cute.Tensor | None,
        states: RingRecord,
    ):
        """dS, or P, of a step, beside the sum of the step before.  sums: None in the first step."""
        operands = tile.operands
        # Registers of their own for every step: an MMA takes what it overwrites as an operand.
        s, dp = self.score.accumulator(), self.score.accumulator()
        stages = states["x_loaded"].index, states["y_loaded"].index
        states = self._issue(context, "x", (operands.a, operands.x), s, states)
        if cutlass.const_expr(self.of_ds and not self.capped):
            states = self._issue(context, "y", (operands.g, operands.y), dp, states)
        if cutlass.const_expr(sums is not None):
            states = self._issue_sum(context, tile, sums, states)
        wait(0 if self.capped or sums is None else 1)
        self._probabilities(context, s, tile, position, stages)
        if cutlass.const_expr(self.of_ds and self.capped):
            states = self._issue(context, "y", (operands.g, operands.y), dp, states)
            wait(0)
        if cutlass.const_expr(self.of_ds):
            _, negative_delta = self.tiles.stats_of(context, tile.mask, stages)
            for i in cutlass.range_constexpr(4 * RUNS):
                s[i] = s[i] * (dp[i] + negative_delta(i))
        # NOTE [arithmetic before the wait] in dv.py.
        context.barriers["a_loaded"].wait(states["a_loaded"])
        # Only the scores needed this; the rest is read by the sum.
        if cutlass.const_expr(self.of_ds):
            states = self._release(context, "y", states)
        else:
            states = self._release(context, "x", states)
        if cutlass.const_expr(sums is not None):
            wait(0)
            states = self._release_sum(context, states)
        # The sum of the step before has read its own.
        pack(s, tile.weights)
        return states

    def _issue(
        self,
        context: Context,
        ring: str,
        operands: tuple[cute.Tensor, cute.Tensor],
        result: cute.Tensor,
        states: RingRecord,
    ) -> RingRecord:
        self.issue_scores(context, ring, operands, result, states)
        states.advance(f"{ring}_loaded")
        return states

    def _issue_sum(
        self, context: Context, tile: SingleTile, sums: cute.Tensor, states: RingRecord
    ) -> RingRecord:
        """Issue the oldest step's part of the sum."""
        if self.of_ds:
            index = states["x_free"].index
        else:
            context.barriers["y_loaded"].wait(states["y_loaded"])
            index = states["y_loaded"].index
            states.advance("y_loaded")
        fence()
        columns = tile.operands.columns[None, None, None, index]
        multiply(self.sum, sums, tile.weights, columns, True)
        commit()
        return states

    def _release_sum(self, context: Context, states: RingRecord) -> RingRecord:
        return self._release(context, "x" if self.of_ds else "y", states)

    @staticmethod
    def _release(context: Context, ring: str, states: RingRecord) -> RingRecord:
        """The oldest buffer of a ring that this warp holds."""
        context.barriers[f"{ring}_free"].arrive(states[f"{ring}_free"])
        states.advance(f"{ring}_free")
        return states

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        s: cute.Tensor,
        tile: SingleTile,
        position: Int32 | Step,
        stages: tuple[Int32, Int32],
    ):
        """P in place of scores; for dS times the slope of each.  stages: of x and y."""
        slope_of = self.change_scores(context, s, tile.work, position)
        scale = scale_for_masking(context.scalars.scale_log2)
        negative_lse, _ = self.tiles.stats_of(context, tile.mask, stages)
        self.tiles.apply_mask(s, tile.mask, position)
        for i in cutlass.range_constexpr(4 * RUNS):
            p = exp2_hardware(cute.math.fma(s[i], scale, negative_lse(i)))
            if cutlass.const_expr(self.capped and self.of_ds):
                p = p * slope_of(i, s[i])
            s[i] = p

    @traced("drain")
    @cute.jit
    def _finish(self, context: Context, work: WorkTile, sums: cute.Tensor):
        if cutlass.const_expr(self.is_scaled):
            sums.store(sums.load() * context.scalars.softmax_scale)
        rows, first = self.tiles.result_rows(context, work), self.tiles.first_row(context, work)
        self.store(sums, context.tensors.results[0], rows, first, work.head)


class DkKernel(SingleKernel):
    """Kernel of dK: 256 keys of a part of a KV head.  results: (dk,)."""

    rows, rows_of = KeyRows, "k"
    stays = ("k", "v")
    passes = ("q", "dout")


class SingleDvKernel(SingleKernel):
    """Kernel of dV: 256 keys of a part of a KV head.  results: (dv,)."""

    rows, rows_of = KeyRows, "k"
    stays = ("k",)
    passes = ("q", "dout")
    of_ds = False
    is_scaled = False


class DqKernel(SingleKernel):
    """Kernel of dQ: 256 queries of a head, which meet the keys from the last one they see."""

    rows, rows_of = QueryRows, "q"
    stays = ("q", "dout")
    passes = ("k", "v")
