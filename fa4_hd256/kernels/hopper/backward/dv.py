"""The kernel of dV and dS: dV = P^T dO at head_dim 256, and dS^T for `products`.

One tile, of a cluster of two, is 256 keys of one KV head: 128 of each CTA, 64 of each of its two
warpgroups; one step multiplies it with 64 query rows of one of the query heads that share the KV
head.  Scores are transposed, S^T = K Q^T, so that P^T lies in the registers in which wgmma reads an
A.

Timeline of one CTA; n is a tile's last step, 0' the next tile's first::

    load        Q(1) dO(1)      | Q(2) dO(2)      | ..  | K' Q(0') dO(0') V' | Q(1') dO(1') ..
    warpgroup   dP(0) S(1) dV(0) | dP(1) S(2) dV(1) | .. | dP(n) S(0') dV(n)  | dP(0') S(1') ..
                 dS(0)> P(1)        dS(1)> P(2)             dS(n)> P(0') dV ->    dS(0')> ..

where > is the write of dS to global memory, straight from registers.  A warpgroup issues three
MMAs at once, dP and dV of a step and S of the step ahead (`_step`).  It computes dS while S runs,
and P while dV runs.  The last step of a tile is no exception: the step ahead is the first of the
next tile.  Where there is no step ahead, dP and dV run alone (`_end`), and the next tile with steps
begins with S alone (`_begin`).  Nothing ties the warpgroups together but the buffers.

K has one buffer, and so has V.  K is free when S(n) is done, a step before the tile ends, so K' is
there for S(0').  V is free after dP(n); dO(0') has a free buffer before, so it is loaded first.

Where scores have slopes (softcap, score_mod), S is issued behind dS: their registers are not there
for three MMAs at once.

Both CTAs need the same rows of Q and dO: each loads half of their columns for both.  Q has one
buffer, so what L2 lacks of it would be waited for, behind the stores of dS on their way to memory:
with the loads of a step Q of the next is prefetched into L2 (docs/kernels.md).

NOTE [arithmetic before the wait].  ptxas moves arithmetic behind the wait for an MMA that is there
to hide it, but not across the loop of an mbarrier wait.  So a wait for the step's dO, which has
long been there, stands between the two.

NOTE [P in 16 bits].  dS is made of the P that dV is made of, rounded: in float32 P would take 16
registers more than there are beside dV, S, dP and the P that is being multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....schedulers.protocol import WorkTile
from ....softmax_emu.exp2 import exp2_hardware
from ....softmax_emu.recompute import scale_for_masking
from ...backward.common import BackwardContext as Context
from ...backward.common import Step, heads_of_part
from ...backward.ds_tiles import DS_TILE, RUN, RUN_STRIDE, tile_of, tiles_of_head, within_head
from ...context import CLAIM_STEPS, KernelParts, want_next_tile_if
from ...limits import HEAD_DIM
from ...mask.masking import Visibility
from ...operands import LoadTarget, SharedMemory
from ...plan.edges import RingRecord, SharedByReference
from ...problem_class import GradientClass
from ...ranges import traced
from ..instructions import (
    QUAD,
    ROWS,
    WgmmaShape,
    commit,
    fence,
    multiply,
    pack,
    row_of_fragment,
    this_warpgroup,
    transposed,
    wait,
)
from .common import HopperBackward
from .config import CTAS, DvPlan, GradientConfig
from .key_rows import KeyMask, KeyRows, ListedKeyMask

TILE_KEYS, STEP_QUERIES = DvPlan.tile_rows, DvPlan.step_columns
CTA_KEYS = TILE_KEYS // CTAS
RUNS = STEP_QUERIES // RUN
BLOCK_STEPS = TILE_KEYS // STEP_QUERIES
#: What is loaded beside Q, and beside dO.
STATS = {"q": "lse", "dout": "delta"}


@dataclass(frozen=True)
class DvOperands(SharedByReference):
    """Operands of the MMAs, and the sum of dV, of one warpgroup.

    Descriptors of shared memory: k, v: of this warpgroup's keys; q, dout: B of S and of dP;
    dout_columns: B of dV. Registers: dv: the sum; p: A of dV; p_slopes: P times the slope of its
    score, the same registers as p where scores have no slopes.
    """

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    dout_columns: cute.Tensor
    dv: cute.Tensor
    p: cute.Tensor
    p_slopes: cute.Tensor


class DvTile(NamedTuple):
    """A warpgroup's tile. mask: hides scores. ds_row: see `KeyTiles.row_of_ds`."""

    work: WorkTile
    mask: KeyMask | ListedKeyMask
    ds_row: Int32


#: A step with its tile.
PlacedStep = tuple[DvTile, Step]


class DvKernel(HopperBackward):
    """The kernel for one configuration; arguments of a call: `BackwardEntry.__call__`. results:
    (dv,). ds: see `backward.ds_tiles`. Tiles: `KeyRows`."""

    rows_of = "k"
    shared_boxes = ("q", "dout")

    boxes = {
        "q": (0, STEP_QUERIES, HEAD_DIM // 2),
        "k": (1, CTA_KEYS, HEAD_DIM),
        "v": (2, CTA_KEYS, HEAD_DIM),
        "dout": (3, STEP_QUERIES, HEAD_DIM // 2),
    }

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = KeyRows(self.plan, self.functions)
        self.score = WgmmaShape(self.dtype, STEP_QUERIES)
        self.sum = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = {"lse": self.plan.q_stages, "delta": self.plan.dout_stages}
        return {
            "k": memory.operand("k", CTA_KEYS, HEAD_DIM, 1),
            "v": memory.operand("v", CTA_KEYS, HEAD_DIM, 1),
            "q": memory.operand("q", STEP_QUERIES, HEAD_DIM, self.plan.q_stages),
            "dout": memory.operand("dout", STEP_QUERIES, HEAD_DIM, self.plan.dout_stages),
            **{
                name: cute.make_tensor(
                    memory.region(name, Float32, 128), cute.make_layout((STEP_QUERIES, count))
                )
                for name, count in stages.items()
            },
        }

    # Steps come in whole blocks of dS: NOTE [blocks of dS] in `backward.ds_tiles`.

    def num_steps(self, context: Context, work: WorkTile) -> Int32:
        if cutlass.const_expr(self.problem_class.lists_steps):
            return self.tiles.num_steps(context, work)
        blocks = self._by_blocks(context, work).num_tiles(work.block * TILE_KEYS, TILE_KEYS)
        return blocks * BLOCK_STEPS * heads_of_part(context, work.head)[1]

    def first_position(self, context: Context, work: WorkTile) -> Step:
        if cutlass.const_expr(self.problem_class.lists_steps):
            return self.tiles.first_position(context, work)
        tile = (work.block * TILE_KEYS, TILE_KEYS)
        blocks = self._by_blocks(context, work).tile_range(tile, tile)
        span = blocks.begin * BLOCK_STEPS, blocks.end * BLOCK_STEPS
        return Step(heads_of_part(context, work.head)[0], span[0], span)

    @staticmethod
    def _by_blocks(context: Context, work: WorkTile) -> Visibility:
        return context.visibility(work, TILE_KEYS).transposed(TILE_KEYS)

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Context):
        """K and V of a tile, Q and dO of each step with their LSE and delta; one warp of each CTA.
        With each Q that of the next step is prefetched into L2."""
        states = RingRecord.waiting(self.edges, "k_free", "v_free", "q_free", "dout_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            num_steps = self.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps < CLAIM_STEPS + 1)
            if num_steps > 0:
                position = self.first_position(tile_context, work)
                states = self._load_keys(tile_context, "k", work, states)
                states = self._load_queries(tile_context, "q", work, position, states)
                states = self._load_queries(tile_context, "dout", work, position, states)
                states = self._load_keys(tile_context, "v", work, states)
                self._prefetch_q(tile_context, work, position, num_steps > 1)
                for step in cutlass.range(1, num_steps, unroll=1):
                    want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    position = self.tiles.next_position(position)
                    states = self._load_queries(tile_context, "q", work, position, states)
                    states = self._load_queries(tile_context, "dout", work, position, states)
                    self._prefetch_q(tile_context, work, position, step + 1 < num_steps)
            work = scheduler.advance_to_next_work()

    @traced("load")
    def _load_keys(
        self, context: Context, name: str, work: WorkTile, states: RingRecord
    ) -> RingRecord:
        """Load this CTA's keys of K or V."""
        barrier, _ = self.next_buffer(context, name, states)
        place = self.tiles.place_of_keys(context, work)
        self.load_box(context, name, place, barrier, context.smem[name][None, None, 0])
        states.advance(f"{name}_free")
        return states

    @traced("load")
    def _load_queries(
        self, context: Context, name: str, work: WorkTile, step: Step, states: RingRecord
    ) -> RingRecord:
        """Load Q with its LSE, or dO with its delta, of a step, for both CTAs."""
        target = self.next_buffer(context, name, states)
        self._copy_queries(context, name, work, step, target)
        states.advance(f"{name}_free")
        return states

    def _copy_queries(
        self, context: Context, name: str, work: WorkTile, step: Step, target: LoadTarget
    ) -> None:
        (barrier, buffer), stats = target, STATS[name]
        place = self.tiles.place_of_queries(context, work, step)
        self.load_box(context, name, place, barrier, context.smem[name][None, None, buffer])
        destination = barrier, context.smem[stats][None, buffer]
        self.tiles.load_stats(context, stats, (work, step), destination)

    @cute.jit
    def _prefetch_q(self, context: Context, work: WorkTile, step: Step, exists: Boolean):
        """Prefetch into L2 Q of the step behind this one, if it exists."""
        if exists:
            following = self.tiles.next_position(step)
            place = self.tiles.place_of_queries(context, work, following)
            self.prefetch_box(context, "q", place, context.smem["q"][None, None, 0])

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: Context):
        """One warpgroup: dV of its 64 keys of every tile, and their dS."""
        states = RingRecord.waiting(self.edges, "k_loaded", "v_loaded", "q_loaded", "dout_loaded")
        scheduler = self.scheduler.create(context.order, context.channel)
        operands = self._operands(context)
        operands.dv.fill(0.0)
        work = scheduler.initial_work()
        # is_separate: P of a tile's first step is computed by itself (`_begin`), not beside the
        # last step of the tile before.
        num_steps, is_separate = self._num_steps_if_valid(context, work), Boolean(True)
        while work.is_valid:
            tile, step = self._tile(context, work), self.first_position(context, work)
            if num_steps > 0:
                if is_separate:
                    states = self._begin(context, operands, (tile, step), num_steps == 1, states)
                context.barriers["v_loaded"].wait(states["v_loaded"])
            for number in cutlass.range(1, num_steps, unroll=1):
                ahead = self.tiles.next_position(step)
                steps = (tile, step), (tile, ahead)
                states = self._step(context, operands, steps, number + 1 == num_steps, states)
                step = ahead
            following = scheduler.advance_to_next_work()
            following_steps = self._num_steps_if_valid(context, following)
            is_separate = (num_steps == 0) | (following_steps == 0)
            if num_steps > 0:
                if is_separate:
                    states = self._end(context, operands, (tile, step), states)
                else:
                    ahead = self._tile(context, following), self.first_position(context, following)
                    steps = (tile, step), ahead
                    states = self._step(
                        context, operands, steps, following_steps == 1, states, crosses=True
                    )
            self._finish(context, work, operands.dv)
            operands.dv.fill(0.0)
            work, num_steps = following, following_steps

    @cute.jit
    def _num_steps_if_valid(self, context: Context, work: WorkTile) -> Int32:
        """Return the number of steps of a tile, 0 if there is no tile."""
        num_steps = Int32(0)
        if work.is_valid:
            num_steps = self.num_steps(context, work)
        return num_steps

    def _tile(self, context: Context, work: WorkTile) -> DvTile:
        return DvTile(work, self.tiles.mask(context, work), self.tiles.row_of_ds(context, work))

    def _operands(self, context: Context) -> DvOperands:
        smem, shape, place = context.smem, (ROWS, HEAD_DIM), (this_warpgroup(), 0)
        k, v = (
            self.score.a_operand(cute.local_tile(smem[name][None, None, 0], shape, place))
            for name in ("k", "v")
        )
        p = p_slopes = self.sum.a_fragment(STEP_QUERIES)
        if self.capped:
            p_slopes = self.sum.a_fragment(STEP_QUERIES)
        return DvOperands(
            k,
            v,
            self.score.b_operand(smem["q"]),
            self.score.b_operand(smem["dout"]),
            self.sum.b_operand(transposed(smem["dout"])),
            self.sum.accumulator(),
            p,
            p_slopes,
        )

    @cute.jit
    def _begin(
        self,
        context: Context,
        operands: DvOperands,
        ahead: PlacedStep,
        is_last: Boolean,
        states: RingRecord,
    ):
        """Compute P of a tile's first step by itself. ahead: this step. is_last: it is the tile's
        last step, too."""
        s = self.score.accumulator()
        context.barriers["k_loaded"].wait(states["k_loaded"])
        self.issue_scores(context, "q", (operands.k, operands.q), s, states)
        wait(0)
        states = self._probabilities(context, s, operands, ahead, is_last, states)
        pack(s, operands.p)
        return states

    @cute.jit
    def _step(
        self,
        context: Context,
        operands: DvOperands,
        steps: tuple[PlacedStep, PlacedStep],
        is_last: Boolean,
        states: RingRecord,
        crosses: cutlass.Constexpr = False,
    ):
        """Compute dS and dV of a step beside P of the step ahead. steps: (the step, the step
        ahead). is_last: the step ahead is the last of its tile. crosses: it is the first of the
        next tile, whose K is awaited; V of the step's own tile is given back."""
        (tile, step), ahead = steps
        # Registers of their own for every step: an MMA takes what it overwrites as an operand,
        # too, which would keep them occupied in between.
        s, dp = self.score.accumulator(), self.score.accumulator()
        self.issue_scores(context, "dout", (operands.v, operands.dout), dp, states)
        if cutlass.const_expr(crosses):
            states.advance("k_loaded")
            context.barriers["k_loaded"].wait(states["k_loaded"])
        if cutlass.const_expr(not self.capped):
            self.issue_scores(context, "q", (operands.k, operands.q), s, states)
        self._issue_sum(operands, states)
        wait(1 if self.capped else 2)
        if cutlass.const_expr(crosses):
            context.barriers["v_free"].arrive(states["v_loaded"])
            states.advance("v_loaded")
        place = self._place_of_ds(context, step, tile.ds_row)
        self._store_ds(context, dp, operands.p_slopes, states["dout_loaded"].index, place)
        # NOTE [arithmetic before the wait], here and behind P.
        context.barriers["dout_loaded"].wait(states["dout_loaded"])
        if cutlass.const_expr(self.capped):
            self.issue_scores(context, "q", (operands.k, operands.q), s, states)
        wait(0 if self.capped else 1)
        states = self._probabilities(context, s, operands, ahead, is_last, states)
        context.barriers["dout_loaded"].wait(states["dout_loaded"])
        wait(0)
        # The MMA has read P.
        pack(s, operands.p)
        context.barriers["dout_free"].arrive(states["dout_loaded"])
        states.advance("dout_loaded")
        return states

    @cute.jit
    def _end(self, context: Context, operands: DvOperands, here: PlacedStep, states: RingRecord):
        """Compute dS and dV of a tile's last step where no step is ahead. here: this step."""
        (tile, step), dp = here, self.score.accumulator()
        self.issue_scores(context, "dout", (operands.v, operands.dout), dp, states)
        self._issue_sum(operands, states)
        wait(1)
        context.barriers["v_free"].arrive(states["v_loaded"])
        place = self._place_of_ds(context, step, tile.ds_row)
        self._store_ds(context, dp, operands.p_slopes, states["dout_loaded"].index, place)
        wait(0)
        context.barriers["dout_free"].arrive(states["dout_loaded"])
        for name in ("k_loaded", "v_loaded", "dout_loaded"):
            states.advance(name)
        return states

    def _issue_sum(self, operands: DvOperands, states: RingRecord) -> None:
        """Issue dV += P^T dO of a step."""
        columns = operands.dout_columns[None, None, None, states["dout_loaded"].index]
        fence()
        multiply(self.sum, operands.dv, operands.p, columns, True)
        commit()

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        s: cute.Tensor,
        operands: DvOperands,
        ahead: PlacedStep,
        is_last: Boolean,
        states: RingRecord,
    ):
        """Compute P of a step in place of its scores s, and P times slopes. Give Q and LSE back,
        and K if this is the last step of its tile. ahead: the step."""
        (tile, step), p_slopes = ahead, operands.p_slopes
        if is_last:
            context.barriers["k_free"].arrive(states["k_loaded"])
        negative_lse = cute.make_rmem_tensor((2, RUNS), Float32)
        stage = states["q_loaded"].index
        cute.autovec_copy(self.tiles.passing_stats(context, "lse", stage), negative_lse)
        context.barriers["q_free"].arrive(states["q_loaded"])
        states.advance("q_loaded")
        slope_of = self.change_scores(context, s, tile.work, step)
        self.tiles.apply_mask(s, tile.mask, step)
        scale = scale_for_masking(context.scalars.scale_log2)
        for run in cutlass.range_constexpr(RUNS):
            sloped = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                score = s[4 * run + i]
                p = exp2_hardware(cute.math.fma(score, scale, negative_lse[i % 2, run]))
                if cutlass.const_expr(self.capped):
                    sloped[i] = p * slope_of(4 * run + i, score)
                s[4 * run + i] = p
            if cutlass.const_expr(self.capped):
                pack(sloped, _run_of(p_slopes, run))
        return states

    def _place_of_ds(self, context: Context, step: Step, row: Int32) -> cute.Pointer:
        """Return the address of this thread's first element of dS of a step."""
        steps = DS_TILE // STEP_QUERIES
        key = this_warpgroup() * ROWS + row_of_fragment(0)
        ds = context.tensors.ds
        number = within_head(ds, row + step.index // steps, context.sequences.tensors)
        of_step = tile_of(ds, number + step.head * tiles_of_head(ds))
        run = of_step[key, step.index % steps * RUNS, None]
        return (run.iterator + cute.arch.lane_idx() % QUAD * 2).align(4)

    @traced("dS")
    @cute.jit
    def _store_ds(
        self,
        context: Context,
        dp: cute.Tensor,
        p_slopes: cute.Tensor,
        stage: Int32,
        place: cute.Pointer,
    ):
        """Store dS = p_slopes (dP - delta) in 16 bits, to global memory: a quad has 16 bytes, the
        quads of a warp 128 consecutive ones."""
        delta = self.tiles.passing_stats(context, "delta", stage)
        for run in cutlass.range_constexpr(RUNS):
            negative_delta, ds = (
                cute.make_rmem_tensor(2, Float32),
                cute.make_rmem_tensor(4, Float32),
            )
            cute.autovec_copy(delta[None, run], negative_delta)
            # Words are stored: what an MMA reads as words must not be taken apart.
            words = cute.make_rmem_tensor(2, Uint32)
            words.store(cute.recast_tensor(_run_of(p_slopes, run), Uint32).load())
            weights = cute.recast_tensor(words, self.dtype).load().to(Float32)
            for i in cutlass.range_constexpr(4):
                ds[i] = weights[i] * (dp[4 * run + i] + negative_delta[i % 2])
            rounded = cute.make_rmem_tensor((2, 2), self.dtype)
            pack(ds, rounded)
            words = cute.recast_tensor(rounded, Uint32)
            for row in cutlass.range_constexpr(2):
                # L2 gives it up first (st.cs, PTX ISA 9.7.9.1): all of dS is more than L2 holds,
                # and Q and dO are read again.
                target = cute.recast_ptr(place + (run * RUN_STRIDE + 8 * RUN * row), dtype=Uint32)
                cute.arch.store(target, words[0, row], cop="cs")

    @traced("drain dV")
    @cute.jit
    def _finish(self, context: Context, work: WorkTile, dv: cute.Tensor):
        rows, first = self.tiles.result_rows(context, work), self.tiles.first_row(context, work)
        self.store(dv, context.tensors.results[0], rows, first, work.head)


def _run_of(fragment: cute.Tensor, run: int) -> cute.Tensor:
    return cute.make_tensor(fragment.iterator + 4 * run, cute.make_layout(4))
