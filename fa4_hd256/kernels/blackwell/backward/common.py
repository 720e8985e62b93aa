"""Base of the pair kernels that make gradients; all but `products` compute S and dP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ....schedulers.order import TileProblem
from ....schedulers.protocol import WorkTile
from ....softmax_emu.pattern import Ex2Pattern
from ....softmax_emu.recompute import probabilities_from_lse, scale_for_masking
from ...backward.common import BackwardContext, BackwardEntry, BackwardKernelTensors
from ...context import CLAIM_STEPS, KernelParts, schedule, want_next_tile_if
from ...functions.kernel_functions import ScorePlaces
from ...mask.masking import Visibility
from ...operands import TmaTensor, load_tile
from ...plan.edges import RingRecord, RingState
from ...problem_class import CallScalars, GradientClass
from ...ranges import traced
from ...rows.sequences import Sequence as RowSequence
from ...rows.sequences import TilePlace
from ..instructions import Mma, fence_after_thread_sync, fence_before_thread_sync
from ..pair_kernel import PairContext, PairKernel, await_buffer
from ..tmem import tmem_buffer
from .config import GradientConfig

FRAGMENT = 32  # columns that one tensor-memory load moves

#: Class of an MMA warp's own rings.
Rings = TypeVar("Rings", bound="ScoreRings")


@dataclass(frozen=True)
class BlackwellBackwardContext(BackwardContext, PairContext):
    """State that every warp role of one CTA shares. Buffers in `smem`: those of the kernel's
    `smem(memory)`, which has their shapes."""


class ScoreMask(Protocol):
    """Mask of the scores that a thread has of a step."""

    @property
    def applies(self) -> Boolean:
        """Return True if it may hide any of them."""

    def hide(self, scores: cute.Tensor) -> None:
        """Scores that are not seen := -inf."""


def hide(mask: ScoreMask, scores: cute.Tensor) -> None:
    """Hide scores, outside of traced code, in which a called object must live across branches."""
    mask.hide(scores)


class RowMask(NamedTuple):
    """Mask of scores of one row, in columns one after the other from the first one on."""

    applies: Boolean
    visibility: Visibility
    row: Int32
    column: Int32

    def hide(self, scores: cute.Tensor) -> None:
        """Scores that are not visible := -inf."""
        self.visibility.apply(scores, self.row, self.column)


class RowsOfStep(NamedTuple):
    """Query rows of a step: their sequence, the first one, their query head."""

    sequence: RowSequence
    first: Int32
    head: Int32


class ScoreRings(Protocol):
    """Buffers of S, of dP and of the ring that the MMA warp uses next, beside those that stay."""

    s: RingState
    dp: RingState
    ring: RingState


class KernelTiles(Protocol):
    """Tiles of a launch and their steps, which a kernel owns."""

    def problem(
        self, scalars: CallScalars, operands: tuple[cute.Tensor, ...], batch: Int32
    ) -> TileProblem:
        """Return the tiles of a launch.  operands: q, k."""

    def num_steps(self, context: BlackwellBackwardContext, work: WorkTile) -> Int32:
        """Return the number of steps of a tile."""


class BlackwellBackward(BackwardEntry, PairKernel):
    """Base of these kernels: host code, set-up, dispatch, loads, and the load and MMA warps.

    A kernel adds `boxes`, see `BackwardEntry`; `tiles`; `smem(memory)`; and the role `gradient`, of
    two warpgroups of each CTA.  `load` is of one warp of each CTA, `mma` of one warp of the leader,
    which issues the MMAs of both.

    Those here are of the kernels that compute S and dP, and of these one sum of the tile, or two;
    `products` has its own.  They work on one tile ahead at most: the dynamic scheduler keeps two
    responses, and fetches tile t + 3 when every role has read tile t + 1.  Gradient warps read it
    after the first sum of tile t, so tiles without steps are skipped after the last MMA of that
    tile.  For them a kernel adds the classes of its rings, `load_rings` and `mma_rings`; by field
    of `mma_rings` its edges, `mma_waits`; `mma_ends`, rings of the MMA warp of which signals are
    left at the end; and the methods below.  Those that load or issue get and return the rings of
    their role.
    """

    context_class = BlackwellBackwardContext
    tiles: KernelTiles
    gradient: Callable
    load_rings: type[RingRecord]
    mma_rings: type[Any]
    mma_waits: Mapping[str, str]
    mma_ends: tuple[str, ...]
    #: Operands of S and of dP that stay for a tile; in `smem`, the view of those that pass.
    kept: tuple[str, str]
    passing: str
    mma_s: Sequence[Mma]
    mma_dp: Sequence[Mma]
    #: (context, work): the position of a tile's first step, which `next_step` advances.
    first_step: Callable
    #: (context, work, name, rings): load this CTA's rows of an operand of `kept`.
    load_kept: Callable
    #: (context, work, step, rings): load what S, dP or the first sum needs in a step.
    load_s: Callable
    load_dp: Callable
    load_sum: Callable
    #: (context, number, is_last, rings): issue the first sum of a step.  number: of the step, from
    #: 1 on; the first one waits until the sums of the tile before are in registers, and overwrites
    #: them.  is_last: in the tile.
    issue_sum: Callable

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        self.plan = config.plan
        super().__init__(self.plan, gradient_class.problem, parts)
        self.ex2_pattern = config.ex2_pattern

    def problem(
        self, scalars: CallScalars, operands: tuple[cute.Tensor, ...], batch: Int32
    ) -> TileProblem:
        return self.tiles.problem(scalars, operands, batch)

    def num_steps(self, context: BlackwellBackwardContext, work: WorkTile) -> Int32:
        return self.tiles.num_steps(context, work)

    def copy_operation(self, box: str) -> Any:
        """The DSL's TMA load of one of `boxes`, whose bytes complete on the leader's barrier."""
        return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)

    def descriptors(self, tensors: BackwardKernelTensors) -> tuple[TmaTensor, ...]:
        return tensors.loads

    def tma_tensor(self, context: BlackwellBackwardContext, box: str) -> TmaTensor:
        return context.tensors.loads[list(self.boxes).index(box)]

    @cute.jit
    def run_role(self, context: BlackwellBackwardContext, warp: Int32):
        warps = self.warps
        if warp < warps.mma:
            cute.arch.setmaxregister_increase(warps.registers_gradient)
            self.gradient(context)
        else:
            cute.arch.setmaxregister_decrease(warps.registers_other)
            if warp == warps.mma:
                if context.cta_rank == 0:
                    self.mma(context)
            if warp == warps.load:
                self.load(context)
            if warp == warps.scheduler:
                schedule(self.scheduler, context)

    # ------------------------------------------------------------ load

    @traced("load")
    def load_box(
        self,
        context: BlackwellBackwardContext,
        box: str,
        place: TilePlace,
        buffers: tuple[str, RingState],
        memory: str | None = None,
    ) -> None:
        """Load one of `boxes` into the next buffer of a ring. buffers: (name of the ring, its
        state). memory: the view of its buffers in `smem`, if it is not the ring's name."""
        name, state = buffers
        target = await_buffer(context, name, state)
        load_tile(self.tma_tensor(context, box), context.smem[memory or name], place, *target)
        state.advance()

    def load_rows(
        self, context: BlackwellBackwardContext, box: str, step: RowsOfStep, ring: RingState
    ) -> None:
        """Load this CTA's half of the rows of Q or dO, by halves of the columns: B of S or dP."""
        sequence, first, head = step
        first += context.cta_rank * (self.plan.step_columns // 2)
        for half in range(2):
            self.load_box(context, box, (sequence, first, half, head), ("ring", ring))

    def load_columns(
        self, context: BlackwellBackwardContext, box: str, step: RowsOfStep, ring: RingState
    ) -> None:
        """Load this CTA's half of the columns of Q or dO, by halves of the rows: B of dK or dV."""
        sequence, first, head = step
        for half in range(2):
            row = first + half * (self.plan.step_columns // 2)
            self.load_box(context, box, (sequence, row, context.cta_rank, head), ("ring", ring))

    @cute.jit
    def load(self, context: BlackwellBackwardContext):
        """Fetch what the MMAs need, in the order of `mma`; each CTA loads its own share."""
        rings = self.load_rings.waiting(self.edges, **self._free_edges())
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
        if work.is_valid:
            rings = self._load_first_s(context, work, rings)
            rings = self._load_first_dp(context, work, rings)
        while work.is_valid:
            # A look-up of the sequence in each step would take longer than the step's MMAs.
            tile_context = context.of_tile(work)
            step = self.first_step(tile_context, work)
            num_steps = self.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps <= CLAIM_STEPS)
            for number in cutlass.range(1, num_steps, unroll=1):
                want_next_tile_if(scheduler, number + CLAIM_STEPS == num_steps)
                following_step = self.next_step(step)
                rings = self.load_s(tile_context, work, following_step, rings)
                rings = self.load_sum(tile_context, work, step, rings)
                rings = self.load_dp(tile_context, work, following_step, rings)
                rings = self.load_second_sum(tile_context, work, step, rings)
                step = following_step
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._load_first_s(context, following, rings)
            rings = self.load_sum(tile_context, work, step, rings)
            if is_ahead:
                rings = self._load_first_dp(context, following, rings)
            rings = self.load_second_sum(tile_context, work, step, rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
                if work.is_valid:
                    rings = self._load_first_s(context, work, rings)
                    rings = self._load_first_dp(context, work, rings)
        self._await_all(context, rings, self._free_edges())

    def _free_edges(self) -> dict[str, str]:
        """Return the edge that says that a buffer is free, by the field of `load_rings`."""
        names = (field.name for field in fields(cast(Any, self.load_rings)))
        return {name: f"{name}_free" for name in names}

    @staticmethod
    def _await_all(
        context: BlackwellBackwardContext, rings: RingRecord, names: Iterable[str]
    ) -> None:
        for name in names:
            context.barriers[f"{name}_free"].wait_for_all(rings[name])

    def _load_first_s(self, context: BlackwellBackwardContext, work: WorkTile, rings: Any) -> Any:
        step = self.first_step(context, work)
        rings = self.load_kept(context, work, self.kept[0], rings)
        return self.load_s(context, work, step, rings)

    def _load_first_dp(self, context: BlackwellBackwardContext, work: WorkTile, rings: Any) -> Any:
        step = self.first_step(context, work)
        rings = self.load_kept(context, work, self.kept[1], rings)
        return self.load_dp(context, work, step, rings)

    def next_step(self, step: Any) -> Any:
        return step.following()

    def load_second_sum(
        self, context: BlackwellBackwardContext, work: WorkTile, step: Any, rings: Any
    ) -> Any:
        return rings

    # ------------------------------------------------------------ mma

    @cute.jit
    def mma(self, context: BlackwellBackwardContext):
        """Issue S(0) and dP(0), then S(i), the first sum of step i - 1, dP(i), the second sum of
        step i - 1; S(0) of the next tile before the last first sum of this one, its dP(0) before
        the last second one.  One warp of the leader CTA."""
        rings = self.mma_rings.waiting(self.edges, **self.mma_waits)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
        if work.is_valid:
            rings = self._first_s(context, work, rings)
            rings = self._first_dp(context, work, rings)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                is_last = step + 1 == num_steps
                rings = self._s(context, is_last, rings)
                rings = self.issue_sum(context, step, False, rings)
                rings = self._dp(context, is_last, rings)
                rings = self.issue_second_sum(context, step, False, rings)
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._first_s(context, following, rings)
            rings = self.issue_sum(context, num_steps, True, rings)
            if is_ahead:
                rings = self._first_dp(context, following, rings)
            rings = self.issue_second_sum(context, num_steps, True, rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
                if work.is_valid:
                    rings = self._first_s(context, work, rings)
                    rings = self._first_dp(context, work, rings)
        self._await_all(context, rings, self.mma_ends)

    def issue_second_sum(
        self, context: BlackwellBackwardContext, number: Int32, is_last: bool, rings: Any
    ) -> Any:
        return rings

    def issue_from_ring(
        self,
        context: BlackwellBackwardContext,
        mmas: Sequence[Mma],
        operands: tuple[str, str],
        result: tuple[str, RingState],
        ring: RingState,
        adds: Boolean | bool = False,
    ) -> None:
        """Issue the MMAs of a step, each with the next buffer of the ring as its B. operands: names
        of A, which stays, and of the ring's buffers in `smem`. result: (name, its state). adds: the
        first one adds to the result, as the others do."""
        barriers, smem = context.barriers, context.smem
        for number, mma in enumerate(mmas):
            barriers["ring_loaded"].wait(ring)
            fence_after_thread_sync()
            a = smem[operands[0]][None, None, 0].iterator
            b = smem[operands[1]][None, None, ring.index].iterator
            address = tmem_buffer(context.tmem, self.tmem_plan, *result)
            mma.issue(address, a, b, adds if number == 0 else True)
            barriers["ring_free"].commit(ring)
            ring.advance()

    def _first_s(self, context: BlackwellBackwardContext, work: WorkTile, rings: Rings) -> Rings:
        self._enter(context, self.kept[0], rings)
        return self._s(context, self.num_steps(context, work) == 1, rings)

    def _first_dp(self, context: BlackwellBackwardContext, work: WorkTile, rings: Rings) -> Rings:
        self._enter(context, self.kept[1], rings)
        return self._dp(context, self.num_steps(context, work) == 1, rings)

    def _enter(self, context: BlackwellBackwardContext, name: str, rings: ScoreRings) -> None:
        """Wait for an operand that stays for the tile. It has one buffer, so the state's index
        stays 0, and its phase is that of the next tile at once."""
        state = getattr(rings, name)
        context.barriers[f"{name}_loaded"].wait(state)
        state.advance()

    @traced("S")
    @cute.jit
    def _s(self, context: BlackwellBackwardContext, is_last: Boolean, rings: ScoreRings):
        """S = Q K^T of a step, or its transpose; the tile's last one is done with what stays."""
        barriers, kept = context.barriers, self.kept[0]
        barriers["s_free"].wait(rings.s)
        self.issue_from_ring(context, self.mma_s, (kept, self.passing), ("s", rings.s), rings.ring)
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        if is_last:
            barriers[f"{kept}_free"].commit(getattr(rings, kept))
        return rings

    @traced("dP")
    @cute.jit
    def _dp(self, context: BlackwellBackwardContext, is_last: Boolean, rings: ScoreRings):
        """dP = dO V^T of a step, or transposed. Without dp_free the MMAs' order frees dP."""
        barriers, kept = context.barriers, self.kept[1]
        if cutlass.const_expr("dp_free" in barriers):
            barriers["dp_free"].wait(rings.dp)
        operands = kept, self.passing
        self.issue_from_ring(context, self.mma_dp, operands, ("dp", rings.dp), rings.ring)
        barriers["dp_done"].commit(rings.dp)
        rings.dp.advance()
        if is_last:
            barriers[f"{kept}_free"].commit(getattr(rings, kept))
        return rings

    # ------------------------------------------------------------ gradient

    def warp_columns(self, context: BlackwellBackwardContext, name: str, columns: int) -> Int32:
        """The warp's lanes of a region, from its warpgroup's part of `columns` columns on."""
        start = self.tmem_plan[name].start + warpgroup() * columns
        return context.warp_lanes + start

    def no_work(self) -> WorkTile:
        return WorkTile(Int32(0), Int32(0), Int32(0), Boolean(False))

    def take_scores(
        self,
        context: BlackwellBackwardContext,
        scores: cute.Tensor,
        load: Callable[[Int32, cute.Tensor], None],
        states: RingRecord,
    ) -> RingRecord:
        """S of one step to registers, whose buffer is then free. load: of `blackwell.tmem`."""
        context.barriers["s_done"].wait(states["s_done"])
        fence_after_thread_sync()
        load(self.warp_columns(context, "s", cute.size(scores)), scores)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        context.barriers["s_free"].arrive(states["s_done"], is_converged=True)
        states.advance("s_done")
        return states

    @cute.jit
    def change_and_mask(
        self,
        context: BlackwellBackwardContext,
        scores: cute.Tensor,
        places: ScorePlaces | None,
        mask: ScoreMask,
    ):
        """Change the scores, and mask them, in place; return the slope of each score, None where
        that is 1. places: see `ScoreChange.apply`."""
        slopes = None
        if cutlass.const_expr(self.functions.change.exists):
            slopes = self.functions.change.apply_with_slopes(
                scores, context.scalars.cap_scale, places
            )
        if mask.applies:
            hide(mask, scores)
        return slopes

    def exponentiate(
        self,
        context: BlackwellBackwardContext,
        scores: cute.Tensor,
        negative_lse: Float32 | cute.Tensor,
        start: int,
        columns: int,
    ) -> None:
        """scores := P, in place.  start: first of the thread's `columns` columns."""
        scale_log2 = scale_for_masking(context.scalars.scale_log2)
        first, columns = start // FRAGMENT, columns // FRAGMENT
        pattern = cast(Ex2Pattern, self.ex2_pattern)
        probabilities_from_lse(scores, scale_log2, negative_lse, (pattern, first, columns))


def score_gradients(
    dp: cute.Tensor, p_slopes: cute.Tensor, negative_delta: Float32 | cute.Tensor
) -> None:
    """dp := p_slopes * (dp - delta), dS in float32; p_slopes: P, times the slope of the score.
    negative_delta: one Float32, or a register tensor with one for each column."""
    for i in range(0, cute.size(dp), 2):
        delta = (negative_delta, negative_delta)
        if isinstance(negative_delta, cute.Tensor):
            delta = (negative_delta[i], negative_delta[i + 1])
        pair = cute.arch.add_packed_f32x2((dp[i], dp[i + 1]), delta)
        dp[i], dp[i + 1] = cute.arch.mul_packed_f32x2(pair, (p_slopes[i], p_slopes[i + 1]))


def store_row(values: cute.Tensor, destination: cute.Tensor) -> None:
    rounded = cute.make_rmem_tensor(cute.size(values), destination.element_type)
    rounded.store(values.load().to(destination.element_type))
    cute.autovec_copy(rounded, destination)


def warpgroup() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4


def zeros(columns: int) -> cute.Tensor:
    values = cute.make_rmem_tensor(columns, Float32)
    values.fill(0.0)
    return values
