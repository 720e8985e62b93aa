"""The dK/dV kernel: dV = P^T dO and dK = softmax_scale dS^T Q at head_dim 256, by CTA pairs.

One tile is 128 keys of one KV head; one step, a unit, multiplies it with 256 query rows of one
of the query heads that share the KV head.  Scores are transposed, S^T = K Q^T: each CTA owns 64
keys, and the tensor core splits the columns of a result between the lanes 0..63 and 64..127
(PTX ISA 9.7.16.10.5, M = 128 over a pair), so every accumulator takes 128 columns.  Q and dO are
needed in two halves that a pair cannot share, as in NOTE [two halves of K] in backward_dq.py.

Timeline of one CTA (the MMA warp is the leader's); u counts units, last is the tile's last, 0'
the next tile's first; Q, dO are the rows for S and dP, Qc, dOc the columns for dK and dV::

    load      Q(1) dOc(0) dO(1) Qc(0)  ..  | K' Q(0') dOc(last) V' dO(0') Qc(last) ..
    mma       S(1) dV(0)  dP(1) dK(0)  ..  | S(0')    dV(last)  dP(0')    dK(last) S(1') ..
    gradient  P(0)> dS(0) P(1) dS(0)>  ..  | P(last)> dS(last)  P(0') dS(last)> P(0')> dS(0'),
                                           | dK, dV -> global
    store     dS(0) -> global

where > is the write to shared memory.  P(u) and dS(u) take turns in one buffer: P(u) is written
while S(u+1) is computed and read by dV(u), dS(u) while dP(u+1) is, and read by dK(u).  The exp2 of
a unit has the time of dV and dP before P is needed.  The store warp works where dS is stored for
`backward_dq_product`, and reads the buffer beside the tensor core.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4_hd256.kernels.blackwell.instructions import (
    MmaShape,
    fence_after_thread_sync,
    fence_before_thread_sync,
    mma_chain,
)
from fa4_hd256.kernels.blackwell.operands import (
    TmaTensor,
    k_major_operand,
    mn_major_operand,
    smem_layout,
)
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from fa4_hd256.kernels.blackwell.tmem import multiply, tmem_load
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import GradientClass
from fa4_hd256.kernels.ranges import traced
from fa4_hd256.kernels.sequences import Sequence, tma_tile
from fa4_hd256.kernels.views import columns_of
from schedulers import TileProblem, section_heads_for

from .common import FRAGMENT, BackwardKernel, score_gradients, store_row, zeros

__all__ = ["DkdvKernel"]

UNIT_Q = TILE_Q
OWN_KEYS = BLOCK_KV // 2  # keys of a CTA
OWN_QUERIES = UNIT_Q // 4  # queries of a unit that one thread works on
STAGES_OF_OPERAND = 2  # ring stages of Q or dO in a unit: 128 columns, or 128 queries, each


class Unit:
    """256 queries of one query head: (head, index of the unit); lives across loops."""

    def __init__(self, head: Int32, index: Int32) -> None:
        self.head, self.index = head, index

    def following(self, begin: Int32, end: Int32) -> Unit:
        """The next unit of the head, in [begin, end), else the first of the next head."""
        wraps = self.index + 1 == end
        head = self.head + Int32(wraps)
        return Unit(head, cutlass.select_(wraps, begin, self.index + 1))

    def __extract_mlir_values__(self) -> list:
        return [*cutlass.extract_mlir_values(self.head), *cutlass.extract_mlir_values(self.index)]

    def __new_from_mlir_values__(self, values: list) -> Unit:
        head, index = values
        return Unit(
            cutlass.new_from_mlir_values(self.head, [head]),
            cutlass.new_from_mlir_values(self.index, [index]),
        )


class DkdvKernel(BackwardKernel):
    """The dK/dV kernel for one configuration; arguments of a call: `BackwardKernel.__call__`.

    A tile's head counts parts of KV heads: KV head * head_parts + part.
    """

    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM // 2),
        "k": (1, OWN_KEYS, HEAD_DIM),
        "v": (2, OWN_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stores = self.plan.stores_ds
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        self.s_shape = MmaShape(BLOCK_KV, UNIT_Q, is_bf16, negate_a=negate)
        self.dp_shape = MmaShape(BLOCK_KV, UNIT_Q, is_bf16)
        self.sum_shape = MmaShape(BLOCK_KV, HEAD_DIM, is_bf16, b_mn_major=True)
        self.keys_layout = k_major_operand(OWN_KEYS)
        self.weights_layout = k_major_operand(OWN_KEYS, UNIT_Q)
        self.rows_layout = k_major_operand(BLOCK_Q, HEAD_DIM // 2)
        self.columns_layout = mn_major_operand(BLOCK_Q)

    def plan_of(self, plan: Any, gradient_class: GradientClass) -> Any:
        return replace(plan, stores_ds=gradient_class.stores_ds)

    def ds_tensor(self, ds: Any) -> TmaTensor | None:
        if cutlass.const_expr(ds is None):
            return None
        shape = (OWN_KEYS, UNIT_Q)
        layout = cute.select(smem_layout(self.dtype, *shape, 1), mode=[0, 1])
        operation = cpasync.CopyBulkTensorTileS2GOp()
        info = cpasync.make_tiled_tma_atom(operation, ds, layout, shape)
        return TmaTensor(info[0], info[1])

    def problem(self, scalars: Any, operands: tuple, batch: Any) -> TileProblem:
        """The tiles: 128 keys of a part of a KV head each."""
        q, k = operands
        heads = cute.size(k, mode=[2])
        heads_per_kv = cute.size(q, mode=[2]) // heads
        heads_per_part = (heads_per_kv + scalars.head_parts - 1) // scalars.head_parts
        rows = cutlass.min(cute.size(q, mode=[0]), 1 << 16) * heads_per_part
        return TileProblem(
            (scalars.max_seqlen_k + BLOCK_KV - 1) // BLOCK_KV,
            heads * scalars.head_parts,
            batch,
            section_heads_for(
                num_heads_per_kv=1,
                num_pairs=heads * scalars.head_parts * batch,
                kv_bytes_per_head=cutlass.min(rows, 1 << 20) * (4 * HEAD_DIM),
                l2_bytes=scalars.l2_bytes,
                unequal_lengths=self.problem_class.has_unequal_tiles,
            ),
            # The transposed mask: its bounds change sides.
            later_blocks_first=self.problem_class.bounded_left,
        )

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stats = cute.make_layout(UNIT_Q)
        return {
            "k": memory.operand("k", OWN_KEYS, HEAD_DIM, 1),
            "v": memory.operand("v", OWN_KEYS, HEAD_DIM, 1),
            "weights": memory.operand("weights", OWN_KEYS, UNIT_Q, 1),
            "ring": memory.operand("ring", BLOCK_Q, HEAD_DIM // 2, self.plan.ring_stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
        }

    def num_steps(self, context: Any, work: Any) -> Int32:
        """Units of all query heads of the part in which some key of the tile is seen."""
        units = self._transposed(context, work).num_tiles(work.block * BLOCK_KV, BLOCK_KV)
        return units * self._num_heads(context, work)

    def _transposed(self, context: Any, work: Any) -> Any:
        """Which queries each key is seen by."""
        return context.visibility(work, BLOCK_KV).transposed(UNIT_Q)

    def _heads_per_part(self, context: Any) -> Int32:
        head_parts = context.scalars.head_parts
        return (context.heads_per_kv + head_parts - 1) // head_parts

    def _first_head(self, context: Any, work: Any) -> Int32:
        """The first query head of a tile's part."""
        head_parts = context.scalars.head_parts
        kv_head, part = work.head // head_parts, work.head % head_parts
        return kv_head * context.heads_per_kv + part * self._heads_per_part(context)

    def _num_heads(self, context: Any, work: Any) -> Int32:
        """Query heads of a tile's part; the last part may have fewer, or none."""
        per_part = self._heads_per_part(context)
        begin = work.head % context.scalars.head_parts * per_part
        return cutlass.max(cutlass.min(per_part, context.heads_per_kv - begin), 0)

    def _units(self, context: Any, work: Any) -> tuple[Int32, Int32]:
        """[begin, end) of the units of each query head."""
        tile = (work.block * BLOCK_KV, BLOCK_KV)
        tiles = self._transposed(context, work).tile_range(tile, tile)
        return tiles.begin, tiles.end

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Any):
        """Load K, V, Q, dO and the rows' LSE and delta in the order of their use."""
        names = ("k_free", "v_free", "ring_free", "lse_free", "delta_free")
        free = self.edges.waiter_states(*names)
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            free = self._load_for_scores(context, work, free)
            free = self._load_for_dp(context, work, free)
        while work.is_valid:
            begin, end = self._units(context, work)
            unit = Unit(self._first_head(context, work), begin)
            for _ in cutlass.range(1, self.num_steps(context, work), unroll=1):
                following_unit = unit.following(begin, end)
                free = self._load_stats(context, "lse", work, following_unit, free)
                free = self._load_rows(context, "q", work, following_unit, free)
                free = self._load_columns(context, "dout", work, unit, free)
                free = self._load_stats(context, "delta", work, following_unit, free)
                free = self._load_rows(context, "dout", work, following_unit, free)
                free = self._load_columns(context, "q", work, unit, free)
                unit = following_unit
            following = scheduler.advance_to_next_work()
            ahead = self.has_steps(context, following)
            if ahead:
                free = self._load_for_scores(context, following, free)
            free = self._load_columns(context, "dout", work, unit, free)
            if ahead:
                free = self._load_for_dp(context, following, free)
            free = self._load_columns(context, "q", work, unit, free)
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    free = self._load_for_scores(context, work, free)
                    free = self._load_for_dp(context, work, free)
        self.wait_for_all(context, free, names)

    @cute.jit
    def _load_for_scores(self, context: Any, work: Any, free: Any):
        """K, and what S of the first unit of a tile needs."""
        begin, _ = self._units(context, work)
        unit = Unit(self._first_head(context, work), begin)
        free = self._load_keys(context, "k", work, free)
        free = self._load_stats(context, "lse", work, unit, free)
        return self._load_rows(context, "q", work, unit, free)

    @cute.jit
    def _load_for_dp(self, context: Any, work: Any, free: Any):
        """V, and what dP of the first unit of a tile needs."""
        begin, _ = self._units(context, work)
        unit = Unit(self._first_head(context, work), begin)
        free = self._load_keys(context, "v", work, free)
        free = self._load_stats(context, "delta", work, unit, free)
        return self._load_rows(context, "dout", work, unit, free)

    @cute.jit
    def _load_keys(self, context: Any, name: str, work: Any, free: Any):
        """This CTA's 64 keys of K or V."""
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS
        head = work.head // context.scalars.head_parts
        place = (context.sequences.key(work.batch), row, 0, head)
        return self.load_stage(context, (name, name, name), place, free)

    @cute.jit
    def _load_rows(self, context: Any, name: str, work: Any, unit: Unit, free: Any):
        """This CTA's 128 rows of Q or dO, in two halves of the columns."""
        row = unit.index * UNIT_Q + context.cta_rank * BLOCK_Q
        sequence = context.sequences.query(work.batch)
        for half in cutlass.range_constexpr(STAGES_OF_OPERAND):
            place = (sequence, row, half, unit.head)
            free = self.load_stage(context, ("ring", name, "ring"), place, free)
        return free

    @cute.jit
    def _load_columns(self, context: Any, name: str, work: Any, unit: Unit, free: Any):
        """This CTA's 128 columns of Q or dO, in two halves of the rows."""
        sequence = context.sequences.query(work.batch)
        for half in cutlass.range_constexpr(STAGES_OF_OPERAND):
            row = unit.index * UNIT_Q + half * BLOCK_Q
            place = (sequence, row, context.cta_rank, unit.head)
            free = self.load_stage(context, ("ring", name, "ring"), place, free)
        return free

    @traced("load")
    @cute.jit
    def _load_stats(self, context: Any, name: str, work: Any, unit: Unit, free: Any):
        """-LSE or -delta of a unit's rows, by a bulk copy of each CTA (PTX ISA 9.7.9.25.4)."""
        loaded, state = context.barriers[f"{name}_loaded"], free[f"{name}_free"]
        context.barriers[f"{name}_free"].wait(state)
        loaded.expect_bytes(state)
        row = context.sequences.padded_query_offset(work.batch) + unit.index * UNIT_Q
        rows = context.tensors.stats[0 if name == "lse" else 1, unit.head, None]
        source = cute.make_tensor((rows.iterator + row).align(16), cute.make_layout(UNIT_Q))
        bits = UNIT_Q * Float32.width
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=bits)
        with cute.arch.elect_one():
            cute.copy(atom, source, context.smem[name], mbar_ptr=loaded.pointer(state))
        free.advance(f"{name}_free")
        return free

    # -------------------------------------------------------------------------------------- mma

    @cute.jit
    def mma(self, context: Any):
        """Issue every S, dP, dV and dK of the pair; one warp of the leader CTA.

        S and dP of the following unit, of the next tile too, go before dV and dK.  Only one tile
        ahead, as in the forward kernel's MMA warp, and for the same reason.
        """
        states = self.edges.waiter_states(
            "k_loaded", "v_loaded", "ring_loaded", "s_free", "dp_free", "weights_done", "sums_free"
        )
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            states = self._first_scores(context, work, states)
            states = self._first_dp(context, work, states)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                is_last = step + 1 == num_steps
                states = self._scores(context, is_last, states)
                if step == 1:
                    states = self._wait_for_sums(context, states)
                states = self._dv(context, step > 1, states)
                states = self._dp(context, is_last, states)
                states = self._dk(context, step > 1, states)
            following = scheduler.advance_to_next_work()
            ahead = self.has_steps(context, following)
            if ahead:
                states = self._first_scores(context, following, states)
            if num_steps == 1:
                states = self._wait_for_sums(context, states)
            states = self._dv(context, num_steps > 1, states)
            if ahead:
                states = self._first_dp(context, following, states)
            states = self._dk(context, num_steps > 1, states)
            context.barriers["sums_done"].commit(states["sums_free"])
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    states = self._first_scores(context, work, states)
                    states = self._first_dp(context, work, states)
        self.wait_for_all(context, states, ("s_free", "dp_free", "sums_free"))

    @cute.jit
    def _wait_for_sums(self, context: Any, states: Any):
        """Until dK and dV of the tile before are in registers."""
        context.barriers["sums_free"].wait(states["sums_free"])
        states.advance("sums_free")
        return states

    @cute.jit
    def _first_scores(self, context: Any, work: Any, states: Any):
        """S of a tile's first unit, once its K is there."""
        context.barriers["k_loaded"].wait(states["k_loaded"])
        states.advance("k_loaded")
        return self._scores(context, self.num_steps(context, work) == 1, states)

    @cute.jit
    def _first_dp(self, context: Any, work: Any, states: Any):
        """dP of a tile's first unit, once its V is there."""
        context.barriers["v_loaded"].wait(states["v_loaded"])
        states.advance("v_loaded")
        return self._dp(context, self.num_steps(context, work) == 1, states)

    @traced("S")
    @cute.jit
    def _scores(self, context: Any, is_last: Boolean, states: Any):
        """S^T = K Q^T of one unit; is_last: of the tile, after which K is free."""
        states = self._keys_by_rows(context, self.s_shape, ("s", "k"), states)
        if is_last:
            context.barriers["k_free"].commit(states["k_loaded"])
        return states

    @traced("dP")
    @cute.jit
    def _dp(self, context: Any, is_last: Boolean, states: Any):
        """dP^T = V dO^T of one unit; is_last: of the tile, after which V is free."""
        states = self._keys_by_rows(context, self.dp_shape, ("dp", "v"), states)
        if is_last:
            context.barriers["v_free"].commit(states["v_loaded"])
        return states

    @cute.jit
    def _keys_by_rows(self, context: Any, shape: MmaShape, names: tuple[str, str], states: Any):
        """A product of 128 keys and 256 rows, K = 256 in 16 slices, 8 of each ring stage.

        names: of the result in TMEM, and of the keys in SMEM.
        """
        result, keys = names
        context.barriers[f"{result}_free"].wait(states[f"{result}_free"])
        a = context.smem[keys][None, None, 0].iterator
        for half in cutlass.range_constexpr(STAGES_OF_OPERAND):
            a_layout = self.keys_layout.part(half, STAGES_OF_OPERAND)
            operands = ((a, a_layout), self.rows_layout)
            states = self._chain(context, shape, result, operands, Boolean(half > 0), states)
        context.barriers[f"{result}_done"].commit(states[f"{result}_free"])
        states.advance(f"{result}_free")
        return states

    @traced("dV")
    def _dv(self, context: Any, accumulate: Boolean, states: Any):
        """dV += P^T dO of one unit."""
        return self._sum(context, "dv", accumulate, states)

    @traced("dK")
    def _dk(self, context: Any, accumulate: Boolean, states: Any):
        """dK += dS^T Q of one unit."""
        return self._sum(context, "dk", accumulate, states)

    @cute.jit
    def _sum(self, context: Any, result: str, accumulate: Boolean, states: Any):
        """One of these sums over K = 256 queries, 128 of each ring stage."""
        barriers = context.barriers
        barriers["weights_done"].wait(states["weights_done"])
        a = context.smem["weights"][None, None, 0].iterator
        for half in cutlass.range_constexpr(STAGES_OF_OPERAND):
            a_layout = self.weights_layout.part(half, STAGES_OF_OPERAND)
            operands = ((a, a_layout), self.columns_layout)
            accumulates = Boolean(True) if half > 0 else accumulate
            states = self._chain(context, self.sum_shape, result, operands, accumulates, states)
        barriers["weights_free"].commit(states["weights_done"])
        states.advance("weights_done")
        return states

    @cute.jit
    def _chain(
        self, context: Any, shape: MmaShape, result: str, operands: tuple, accumulate: Boolean,
        states: Any,
    ):  # fmt: skip
        """One ring stage's slices of a product.  operands: ((A in SMEM, layout), layout of B)."""
        (a, a_layout), b_layout = operands
        ring = states["ring_loaded"]
        context.barriers["ring_loaded"].wait(ring)
        fence_after_thread_sync()
        b = context.smem["ring"][None, None, ring.index].iterator
        mma_chain(
            shape,
            self.region_address(context, result),
            (a_layout.lower_word(a), a_layout),
            (b_layout.lower_word(b), b_layout),
            accumulate,
        )
        context.barriers["ring_free"].commit(ring)
        states.advance("ring_loaded")
        return states

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: Any):
        """S^T -> P and dP^T -> dS for this CTA's 64 keys: a key and 64 queries a thread."""
        names = ["s_done", "dp_done", "lse_loaded", "delta_loaded", "weights_free", "sums_done"]
        states = self.edges.waiter_states(*names, *(["ds_free"] if self.stores else []))
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(OWN_QUERIES, Float32)
        # P, then dS, in 16 bits, two in a register.
        p, ds = (cute.make_rmem_tensor(OWN_QUERIES // 2, Float32) for _ in range(2))
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                key = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS
                visibility = self._transposed(context, work)
                tile = (work.block * BLOCK_KV, BLOCK_KV)
                tiles = visibility.tile_range(tile, (key, OWN_KEYS))
                row = key + self._own_key()
                index = tiles.begin
                mask = (Boolean(True), visibility, row, index * UNIT_Q + self._first_query())
                states = self._probabilities(context, (factors, p), mask, states)
                for step in cutlass.range(num_steps, unroll=1):
                    states = self._publish_p(context, p, states)
                    states = self._score_gradients(context, factors, ds, states)
                    if undrained.is_valid:
                        states = self._drain(context, undrained, states)
                        undrained = self.no_work()
                    if step + 1 < num_steps:
                        index = cutlass.select_(index + 1 == tiles.end, tiles.begin, index + 1)
                        is_masked = (index < tiles.unmasked_begin) | (index >= tiles.unmasked_end)
                        query = index * UNIT_Q + self._first_query()
                        states = self._probabilities(
                            context, (factors, p), (is_masked, visibility, row, query), states
                        )
                    else:
                        # Known not to outlive the loop, they do not occupy registers in it.
                        factors.fill(0.0)
                        p.fill(0.0)
                    states = self._publish_ds(context, ds, states)
                undrained = work
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self._drain(context, undrained, states)

    def _half(self) -> Int32:
        """Which half of a result's columns this warp's lanes hold."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 // 2

    def _own_key(self) -> Int32:
        """The key of this thread, among the CTA's 64."""
        return cute.arch.thread_idx()[0] % OWN_KEYS

    def _first_query(self) -> Int32:
        """The first of this thread's 64 queries, among the unit's 256."""
        return self._half() * BLOCK_Q + self.warpgroup() * OWN_QUERIES

    def _own_stats(self, context: Any, name: str, start: int) -> cute.Tensor:
        """-LSE or -delta of a fragment of this thread's queries, in registers."""
        values = cute.make_rmem_tensor(FRAGMENT, Float32)
        column = self._first_query() + start
        cute.autovec_copy(columns_of(context.smem[name], column, FRAGMENT), values)
        return values

    @traced("P")
    @cute.jit
    def _probabilities(self, context: Any, results: tuple, mask: tuple, states: Any):
        """P of one unit.  results: (P times the slope of the softcap in float32, P in 16 bits)."""
        factors, p = results
        barriers = context.barriers
        barriers["s_done"].wait(states["s_done"])
        fence_after_thread_sync()
        tmem_load(self.own_columns(context, "s", OWN_QUERIES), factors)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        barriers["s_free"].arrive(states["s_done"], is_converged=True)
        states.advance("s_done")
        barriers["lse_loaded"].wait(states["lse_loaded"])
        slopes = self.mask_and_cap(context, factors, mask)
        rounded = cute.recast_tensor(p, self.dtype)
        for start in cutlass.range_constexpr(0, OWN_QUERIES, FRAGMENT):
            part = columns_of(factors, start, FRAGMENT)
            negative_lse = self._own_stats(context, "lse", start)
            self.exponentiate(context, part, negative_lse, (start, OWN_QUERIES))
            columns_of(rounded, start, FRAGMENT).store(part.load().to(self.dtype))
        barriers["lse_free"].arrive(states["lse_loaded"])
        states.advance("lse_loaded")
        if cutlass.const_expr(self.problem_class.softcap):
            factors.store(factors.load() * slopes.load())
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(self, context: Any, factors: cute.Tensor, ds: cute.Tensor, states: Any):
        """dS = factors (dP - delta) of one unit, in 16 bits."""
        barriers = context.barriers
        barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        barriers["delta_loaded"].wait(states["delta_loaded"])
        address = self.own_columns(context, "dp", OWN_QUERIES)
        rounded = cute.recast_tensor(ds, self.dtype)
        for start in cutlass.range_constexpr(0, OWN_QUERIES, FRAGMENT):
            dp = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, dp)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == OWN_QUERIES):
                fence_before_thread_sync()
                barriers["dp_free"].arrive(states["dp_done"], is_converged=True)
            delta = self._own_stats(context, "delta", start)
            score_gradients(dp, columns_of(factors, start, FRAGMENT), delta)
            columns_of(rounded, start, FRAGMENT).store(dp.load().to(self.dtype))
        barriers["delta_free"].arrive(states["delta_loaded"])
        states.advance("dp_done")
        states.advance("delta_loaded")
        return states

    @traced("write P")
    @cute.jit
    def _publish_p(self, context: Any, p: cute.Tensor, states: Any):
        """P to shared memory.  Where dS is stored, the store warp says when the dS that is there
        has been read by all: one wait, for a second one costs the registers that are left."""
        free = "ds_free" if self.stores else "weights_free"
        states = self._publish(context, p, free, states)
        if cutlass.const_expr(self.stores):
            states.advance("weights_free")
        return states

    @traced("write dS")
    @cute.jit
    def _publish_ds(self, context: Any, ds: cute.Tensor, states: Any):
        """dS to shared memory."""
        states = self._publish(context, ds, "weights_free", states)
        if cutlass.const_expr(self.stores):
            context.barriers["ds_written"].arrive(self.edges["ds_written"].producer_state())
        return states

    @cute.jit
    def _publish(self, context: Any, values: cute.Tensor, free: str, states: Any):
        """P or dS of this thread to shared memory.  free: the edge that says that what is there has
        been read."""
        context.barriers[free].wait(states[free])
        block = self._first_query() // OWN_QUERIES
        weights = context.smem["weights"][None, None, 0]
        columns = cute.logical_divide(weights, (None, cute.make_layout(OWN_QUERIES)))
        cute.autovec_copy(
            cute.recast_tensor(values, self.dtype), columns[self._own_key(), (None, block)]
        )
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        context.barriers["weights_done"].arrive(states["weights_free"])
        states.advance(free)
        return states

    @cute.jit
    def store(self, context: Any):
        """Store dS of every unit with TMA; only where dS is stored."""
        states = self.edges.waiter_states("ds_written", "weights_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            begin, end = self._units(context, work)
            unit = Unit(self._first_head(context, work), begin)
            for _ in cutlass.range(self.num_steps(context, work), unroll=1):
                states = self._store_ds(context, work, unit, states)
                unit = unit.following(begin, end)
            work = scheduler.advance_to_next_work()
        # Shared memory must not go away, nor the grid be reported done, under a store in flight.
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @traced("store dS")
    @cute.jit
    def _store_ds(self, context: Any, work: Any, unit: Unit, states: Any):
        """dS^T of this CTA's 64 keys and a unit's 256 queries."""
        ds, barriers = context.tensors.ds, context.barriers
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS
        place = (Sequence(Int32(0), Int32(0), work.batch), row, unit.index, unit.head)
        tile = tma_tile(ds.tensor, (OWN_KEYS, UNIT_Q), place)
        from_smem, to_global = cpasync.tma_partition(
            ds.atom, 0, cute.make_layout(1),
            cute.group_modes(context.smem["weights"][None, None, 0], 0, 2),
            cute.group_modes(tile, 0, 2),
        )  # fmt: skip
        barriers["ds_written"].wait(states["ds_written"])
        cute.copy(ds.atom, from_smem, to_global)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        # Phases of P and of dS alternate, and this dS was written after that of P: the next one is
        # dK's, whose parity never changes.
        barriers["weights_free"].wait(states["weights_free"])
        barriers["ds_free"].arrive(self.edges["ds_free"].producer_state())
        states.advance("ds_written")
        return states

    @traced("drain dK and dV")
    @cute.jit
    def _drain(self, context: Any, work: Any, states: Any):
        """dV (first warpgroup) and softmax_scale * dK (second) of a tile to global memory."""
        context.barriers["sums_done"].wait(states["sums_done"])
        fence_after_thread_sync()
        sequence = context.sequences.key(work.batch)
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS + self._own_key()
        is_dk = self.warpgroup() == 1
        factor = cutlass.select_(is_dk, context.scalars.softmax_scale, Float32(1.0))
        address = self.own_columns(context, "dv", self.tmem_plan["dv"].columns)
        columns = HEAD_DIM // 2
        for start in cutlass.range_constexpr(0, columns, FRAGMENT):
            values = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == columns):
                fence_before_thread_sync()
                context.barriers["sums_free"].arrive(states["sums_done"], is_converged=True)
            multiply(values, factor)
            if row < sequence.length:
                self._store(context, values, (sequence, row, work.head), start)
        states.advance("sums_done")
        return states

    @cute.jit
    def _store(self, context: Any, values: cute.Tensor, place: tuple, start: Any):
        """One fragment of dV or dK, by warpgroup.  place: (sequence, row, head)."""
        sequence, row, head = place
        column = self._half() * (HEAD_DIM // 2) + start
        for which in cutlass.range_constexpr(2):
            # The results are (dk, dv); the first warpgroup has dV.
            if self.warpgroup() == 1 - which:
                result = context.tensors.results[which]
                destination = result[sequence.offset + row, None, head, sequence.batch]
                store_row(values, columns_of(destination, column, FRAGMENT))

    @cute.jit
    def _store_zeros(self, context: Any, work: Any):
        """dK = dV = 0 for the keys of a tile that no query sees."""
        row = work.block * BLOCK_KV + context.cta_rank * OWN_KEYS + self._own_key()
        sequence = context.sequences.key(work.batch)
        if row < sequence.length:
            for start in cutlass.range(0, HEAD_DIM // 2, FRAGMENT, unroll=1):
                self._store(context, zeros(FRAGMENT), (sequence, row, work.head), start)
