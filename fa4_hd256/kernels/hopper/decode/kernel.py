"""The decode kernel for K and V in e4m3: a few query rows against many keys, by one CTA per tile.

One tile is 16, 32 or 64 query rows, those of all heads that share a KV head, of a few queries; one
step multiplies 128 keys with it, S^T = K Q^T and O^T += V^T P^T, K and V^T from registers, to which
they come from e4m3 to f16.  Why so: `config` NOTE [keys as M].

Timeline of a CTA; two warpgroups have 64 keys of S^T each, and 128 columns of O^T::

    queries     Q
    load        K(1) V(1) K(2) V(2) ..
    warpgroups  Q' | K(0)  QK(0)  | S(0)->P(0) | PV(0)  K(1)  QK(1)  | S(1)->P(1) | PV(1) ..
                   |       V(0)   |            |              V(1)   |            |

Q', K(i) and V(i) stand for the conversions; the last runs beside QK; at the bars all threads meet
(NOTE [barriers of a step]).  The roles follow in this order: set-up, load, queries, consume (a
tile, a step, the softmax), results.

NOTE [barriers of a step].  All threads meet twice: to test whether a maximum moves, when each has
seen its last PV done, which read P; and when P is written.

The tables of roles, barriers and SMEM: `python -m fa4_hd256 plan --arch sm_90a`.  NOTE [packed
heads] and NOTE [split keys]: `kernels.forward.common`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers.order import TileOrder
from ....schedulers.protocol import WorkTile
from ...context import CLAIM_STEPS, KernelParts, schedule, shared_fields
from ...forward.context import ForwardKernelTensors
from ...forward.decode_rows import TileRows, any_of_softmax, combine_warps, sum_of_row, synchronise
from ...forward.e4m3 import KeyScales, ScaledRows, ScaledSoftmax
from ...forward.nvfp4_words import with_block_scales
from ...limits import HEAD_DIM, WARP_SIZE
from ...mask.masking import Visibility
from ...operands import SharedMemory
from ...plan.edges import RingState
from ...problem_class import CallScalars, OptionalTensors, ProblemClass
from ...ranges import traced
from ...rows.output_gate import Columns, multiply_by_gate
from ...rows.sequences import columns_of
from ..forward_common import HopperForward
from ..instructions import (
    COLUMN_GROUP,
    QUAD,
    WgmmaShape,
    commit,
    fence,
    multiply,
    pack,
    rows_of,
    wait,
)
from . import e4m3_fragments, nvfp4_fragments, nvfp4_scales
from .config import BLOCK_KV, QK_PARTS, E4m3Config
from .context import HopperE4m3DecodeContext as Context
from .e4m3_fragments import KEY_STEPS, thread_key

KEYS = len(KEY_STEPS)  # of a thread
#: P^T lies by core matrices of 8 keys x 8 rows, 16 bytes per key.
P_CORE = 8


class KeyFragments(ScaledSoftmax):
    """The softmax of a thread's keys and rows, and what else it works on in registers. keys,
    values: A of the parts of QK, and of those of both PV. o: both accumulators, 64 of the columns x
    rows each. stage: (1,) Q's buffer. k_scale: (1,) of K of the tile, and the sign of the scale."""

    keys: list[cute.Tensor]
    values: list[list[cute.Tensor]]
    o: list[cute.Tensor]
    stage: cute.Tensor
    k_scale: cute.Tensor


class DecodeStep(NamedTuple):
    """Keys of a step. first: this thread's. nodes: words of its rows under a tree mask."""

    work: WorkTile
    first: Int32
    is_masked: bool
    nodes: list[Any] | None


class DecodeE4m3Kernel(HopperForward):
    """The decode kernel for one configuration. config: rows, stages, warps, exp2 pattern.
    problem_class: what of a call is compiled in. parts: see `KernelParts`. Called under
    `cute.compile`; see `ForwardCommon.__call__` for the arguments at run time."""

    def __init__(self, config: E4m3Config, problem_class: ProblemClass, parts: KernelParts) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.parts, self.scheduler = parts, parts.scheduler
        # How K and V lie in shared memory, and how they come to registers.
        self.fragments: Any = nvfp4_fragments if config.nvfp4 else e4m3_fragments
        self.kv_bytes = config.kv_bytes
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        self.softmax_warps = len(config.warps.consumers)
        self.softmax_threads = self.softmax_warps * WARP_SIZE
        self.rows = TileRows(config.rows, problem_class.packed_heads, BLOCK_KV)
        self.tile_queries, self.load_keys = self.rows.queries, BLOCK_KV
        self.scales = KeyScales(problem_class, self.rows, KEY_STEPS)
        # How Q comes to f16.
        self.scaled_rows = ScaledRows(
            self.dtype,
            self.rows,
            config.warps.consumers,
            top_exponent=14,
            rows_at_once=4,  # more take registers that a warp has not
            loaded="q_loaded",
            memory="q",
            store=self._store_row,
        )
        half = cutlass.Float16
        self.qk = WgmmaShape(half, config.rows, a_in_registers=True)
        self.pv = WgmmaShape(half, config.rows, a_in_registers=True, b_mn_major=True)

    @property
    def thread_rows(self) -> int:
        return self.config.rows // QUAD

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        load = cpasync.CopyBulkTensorTileG2SOp()
        keys = load, BLOCK_KV, self.fragments.TILE_COLUMNS
        boxes = (load, self.config.rows, HEAD_DIM), keys, keys
        q, k, v = (
            self.loaded_tensor(name, view, box)
            for name, view, box in zip("qkv", operands[:3], boxes, strict=True)
        )
        found = ForwardKernelTensors(q, k, v, None, operands[3], lse, optional)
        return with_block_scales(self, found, load, BLOCK_KV) if self.config.nvfp4 else found

    @cute.kernel
    def kernel(
        self,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ):
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == (self.warps.queries if self.gathers else self.warps.load):
            self.prefetch_descriptors(tensors)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < len(self.warps.consumers):
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.consume(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            if self._loads(warp):
                self.load(context)
            if warp == self.warps.scheduler:
                schedule(self.scheduler, context)
            if warp == self.warps.queries:
                self.scaled_rows.load(context, self.scheduler)

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> Context:
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        smem, p = self._smem(memory)
        return Context(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=Int32(0),
            smem=smem,
            **self.context_fields(tensors, sizes),
            q=self.qk.b_operand(smem["q_halves"]),
            p=self.pv.b_operand(p),
        )

    @property
    def scheduled_warps(self) -> int:
        return self.warps.scheduled_warps

    def _smem(self, memory: SharedMemory) -> tuple[dict[str, cute.Tensor], cute.Tensor]:
        """Return (buffers by name, P^T as rows x keys of an operand)."""
        config = self.config
        rows, runs, half = config.rows, config.rows // P_CORE, cutlass.Float16
        group = P_CORE * BLOCK_KV
        p_layout = cute.make_layout(
            ((P_CORE, runs), (P_CORE, BLOCK_KV // P_CORE)),
            stride=((1, group), (P_CORE, P_CORE * P_CORE)),
        )
        # Two neighbouring rows of a key are a word.
        words = cute.make_layout((P_CORE // 2, BLOCK_KV, runs), stride=(1, P_CORE // 2, group // 2))
        shapes = {
            "factors": (rows, config.q_stages),
            "maxima": (rows, self.softmax_warps),
            "sums": (rows, self.softmax_warps),
            "offsets": (rows, 1),
            "inverses": (rows, 1),
        }
        buffers = {
            "q": memory.operand("q", rows, HEAD_DIM, config.q_stages),
            "q_halves": memory.operand("q", rows, HEAD_DIM, config.q_stages, half),
            "kv": memory.operand("kv", BLOCK_KV, self.fragments.TILE_COLUMNS, config.kv_stages),
            "kv_words": cute.make_tensor(memory.region("kv", Uint32, 1024), cute.make_layout(1)),
            "p_words": cute.make_tensor(memory.region("p", Uint32, 128), words),
        } | {
            name: cute.make_tensor(memory.region(name, Float32, 16), cute.make_layout(shape))
            for name, shape in shapes.items()
        }
        buffers |= nvfp4_scales.buffers(memory, config)
        return buffers, cute.make_tensor(memory.region("p", half, 128), p_layout)

    # ------------------------------------------------------------------------------------- load

    def _loads(self, warp: Int32) -> Any:
        if not self.gathers:
            return warp == self.warps.load
        return (warp != self.warps.scheduler) & (warp != self.warps.queries)

    @cute.jit
    def load(self, context: Context):
        state = self.edges["kv_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            num_steps = self.rows.num_steps(tile_context, work)
            self.claim_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                visibility = tile_context.visibility(work, BLOCK_KV)
                first_query = self.rows.first_query(work)
                position = self.keys.first(tile_context, work, visibility, first_query)
                for step in cutlass.range(num_steps, unroll=1):
                    self.claim_if(scheduler, step + CLAIM_STEPS == num_steps)
                    state = self._load_kv(tile_context, "k", work, position, state)
                    state = self._load_kv(tile_context, "v", work, position, state)
                    position = self.keys.next(position)
            work = scheduler.advance_to_next_work()
        context.barriers["kv_free"].wait_for_all(state)

    @traced("load")
    @cute.jit
    def _load_kv(
        self, context: Context, name: str, work: WorkTile, position: Any, state: RingState
    ):
        """A tile of K or V to the next buffer.  position: the KV tile, as of `KeySource.first`."""
        loaded = context.barriers["kv_loaded"]
        context.barriers["kv_free"].wait(state)
        nvfp4_scales.begin_load(self, context, name, work, position, state)
        if cutlass.const_expr(self.gathers):
            self.gather_kv(context, name, work, position, "kv", state)
        else:
            keys, first_key = self.keys.rows(context, work, position), self.keys.first_row(position)
            place = keys, first_key, Int32(0), work.head // context.heads_per_kv
            target = loaded.pointer(state), state.index
            self.keys.load(getattr(context.tensors, name), context.smem["kv"], place, target)
        state.advance()
        return state

    # ---------------------------------------------------------------------------------- queries

    # `ScaledRows.load` is the role of a warp; `ScaledRows.scale` is done by the consumers.

    @traced("Q to f16")
    @cute.jit
    def _bring_queries(self, context: Context, stage: Int32):
        self.scaled_rows.scale(context, stage)
        synchronise(self.softmax_threads)

    def _store_row(
        self, context: Context, row: tuple[int, Int32], elements: list[Float32], stage: Int32
    ) -> None:
        """Store this lane's 8 elements of a row in the order of K's columns."""
        target = context.smem["q_halves"][row, None, stage]
        for (first, second), column in self.fragments.query_pairs(cute.arch.lane_idx()):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = elements[first], elements[second]
            rounded = cute.make_rmem_tensor(2, cutlass.Float16)
            rounded.store(pair.load().to(cutlass.Float16))
            cute.autovec_copy(rounded, columns_of(target, column, 2))

    # ------------------------------------------------------------------------------------- tiles

    @cute.jit
    def consume(self, context: Context):
        """S^T = K Q^T, softmax and O^T += V^T P^T; O and LSE at the tile's end."""
        kv = self.edges["kv_loaded"].waiter_state()
        q_loaded = self.edges["q_loaded"].waiter_state()
        softmax = self._create(context)
        first_key = thread_key()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, BLOCK_KV)
            num_steps = self.rows.num_steps(tile_context, work)
            tile = self.rows.first_query(work), self.tile_queries
            tiles = visibility.tile_range(tile, tile)
            softmax.reset()
            if num_steps > 0:
                key = (tiles.end - 1) * BLOCK_KV + first_key
                q_loaded = self._begin_tile(tile_context, softmax, work, key, q_loaded)
                for _ in cutlass.range(tiles.num_masked_first, unroll=1):
                    kv = self._step(tile_context, softmax, work, key, True, kv)
                    key -= BLOCK_KV
                for _ in cutlass.range(tiles.num_unmasked, unroll=1):
                    kv = self._step(tile_context, softmax, work, key, False, kv)
                    if cutlass.const_expr(self.functions.change.by_place):
                        key -= BLOCK_KV
                if cutlass.const_expr(self.problem_class.mask.hides_first):
                    if cutlass.const_expr(not self.functions.change.by_place):
                        key -= tiles.num_unmasked * BLOCK_KV
                    for _ in cutlass.range(tiles.num_masked_last, unroll=1):
                        kv = self._step(tile_context, softmax, work, key, True, kv)
                        key -= BLOCK_KV
                context.barriers["q_free"].arrive(RingState(1, softmax.stage[0], Int32(0)))
            inverses = self._finish(tile_context, softmax, work)
            if num_steps > 0:
                self._store_sums(tile_context, softmax, work, inverses)
            else:
                self._store_zeros(tile_context, work)
            work = scheduler.advance_to_next_work()

    def _create(self, context: Context) -> KeyFragments:
        config = self.config
        created = KeyFragments.create(
            self.scales.softmax_scale(context),
            config.ex2_pattern,
            config.rescale_threshold,
            cutlass.Float16,
            self.thread_rows,
            config.headroom,
            packed=False,
        )
        softmax = cast(KeyFragments, created)
        self.scales.allocate(softmax)
        buffers = range(config.part_buffers)
        softmax.keys = [self.qk.a_fragment(HEAD_DIM // QK_PARTS) for _ in buffers]
        parts = config.value_parts
        of_part = BLOCK_KV // parts
        softmax.values = [[self.pv.a_fragment(of_part) for _ in range(2)] for _ in range(parts)]
        softmax.o = [self.pv.accumulator() for _ in range(2)]
        return softmax

    def _row(self, number: int) -> Int32:
        run, which = divmod(number, 2)
        return cute.arch.thread_idx()[0] % QUAD * 2 + (run * COLUMN_GROUP + which)

    @cute.jit
    def _begin_tile(
        self, context: Context, softmax: KeyFragments, work: WorkTile, key: Int32, state: RingState
    ):
        context.barriers["q_loaded"].wait(state)
        self._bring_queries(context, state.index)
        softmax.stage[0] = state.index
        sign = -1.0 if self.problem_class.negative_scale else 1.0
        softmax.k_scale[0] = Float32(sign * self.fragments.UNIT)
        self.scales.enter(context, softmax, work, key)
        for accumulator in softmax.o:
            accumulator.fill(0.0)
        state.advance()
        return state

    # ------------------------------------------------------------------------------------- steps

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: Context,
        softmax: KeyFragments,
        work: WorkTile,
        key: Int32,
        is_masked: bool,
        kv: RingState,
    ):
        """QK, softmax and PV of a step.  key: right where it is used."""
        keys = DecodeStep(work, key, is_masked, self._nodes(context, work, is_masked))
        scores, kv = self._issue_qk(context, softmax, kv)
        words, kv = self._load_values(context, kv)
        if self.config.is_roomy:
            self.fragments.convert_values(words[0], softmax.values[0])
        wait(0)
        self._exponentiate(context, softmax, scores, keys)
        slices = BLOCK_KV // 16 // self.config.value_parts
        for part, operands in enumerate(softmax.values):
            # The tensor core has the part before, if there is one.
            if part > 0 or not self.config.is_roomy:
                self.fragments.convert_values(words[part], operands)
            fence()
            for values, result in zip(operands, softmax.o, strict=True):
                multiply(self.pv, result, values, context.p, True, part * slices)
            commit()
        wait(0)
        return kv

    def _issue_qk(
        self, context: Context, softmax: KeyFragments, kv: RingState
    ) -> tuple[cute.Tensor, RingState]:
        """Issue S^T = K Q^T, part by part as K becomes f16; S."""
        context.barriers["kv_loaded"].wait(kv)
        words = self.fragments.read_keys(context.smem, kv.index)
        context.barriers["kv_free"].arrive(kv)
        kv.advance()
        scores = self.qk.accumulator()
        queries = context.q[None, None, None, softmax.stage[0]]
        slices = HEAD_DIM // QK_PARTS // 16
        buffers = len(softmax.keys)
        for part, of_rows in enumerate(words):
            buffer = softmax.keys[part % buffers]
            if part >= buffers:
                wait(buffers - 1)
            self.fragments.convert_keys(of_rows, buffer)
            fence()
            multiply(self.qk, scores, buffer, queries, part > 0, part * slices)
            if part == QK_PARTS - 1 or buffers < QK_PARTS:
                commit()
        return scores, kv

    def _load_values(self, context: Context, kv: RingState) -> tuple[list[Any], RingState]:
        context.barriers["kv_loaded"].wait(kv)
        words = self.fragments.read_values(context.smem, kv.index)
        count = len(words) // self.config.value_parts
        context.barriers["kv_free"].arrive(kv)
        kv.advance()
        return [words[i : i + count] for i in range(0, len(words), count)], kv

    # ----------------------------------------------------------------------------------- softmax

    @traced("softmax")
    @cute.jit
    def _exponentiate(
        self, context: Context, softmax: KeyFragments, scores: cute.Tensor, step: DecodeStep
    ):
        """S -> P in shared memory; maxima where they move, sums."""
        keys = rows_of(scores)
        self._scale(context, softmax, keys, step.work)
        if cutlass.const_expr(self.functions.change.exists):
            self.functions.change.apply(scores, context.scalars.cap_scale, None, packed=False)
        self._weigh(context, softmax, keys)
        if cutlass.const_expr(step.is_masked):
            self._mask(context.visibility(step.work, BLOCK_KV), keys, step)
        exceeds = softmax.exceeds(keys[0]) | softmax.exceeds(keys[1])
        if any_of_softmax(exceeds, self.softmax_threads):
            self._raise_maxima(context, softmax, keys)
        for number, values in enumerate(keys):
            softmax.exponentiate(values, None, softmax.weights[number])
        self._store_probabilities(context, scores)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        synchronise(self.softmax_threads)

    def _scale(
        self, context: Context, softmax: KeyFragments, keys: tuple[cute.Tensor, ...], work: WorkTile
    ) -> None:
        """Scores of the rows as they were: by their scales, which K's scale of the tile is among,
        those of a key by its page's scale."""
        factors = self._read(context.smem["factors"], softmax.stage[0])
        if self.config.nvfp4 or self.problem_class.descale or self.problem_class.negative_scale:
            _multiply_all(factors, softmax.k_scale[0])
        k_scales: list = [None] * KEYS
        if self.scales.of_pages:
            k_scales = self.scales.take(context, softmax, work)
        for values, k_scale in zip(keys, k_scales, strict=True):
            for row in range(self.thread_rows):
                values[row] = values[row] * factors[row]
            if k_scale is not None:
                _multiply_all(values, k_scale)

    def _weigh(
        self, context: Context, softmax: KeyFragments, keys: tuple[cute.Tensor, ...]
    ) -> None:
        """A key's own scale of V, into the exponents of 2."""
        if not self.scales.of_pages:
            return
        scale = context.scalars.scale_log2
        for values, logarithm in zip(keys, softmax.log2_v, strict=True):
            for row in range(self.thread_rows):
                values[row] = cute.math.fma(values[row], scale, logarithm)

    def _query_of(self, work: WorkTile, number: int) -> Int32:
        return self.rows.first_query(work) + self._row(number) // self.rows.of_query

    def _nodes(self, context: Context, work: WorkTile, is_masked: bool) -> list[Any] | None:
        if not (is_masked and context.mask.tree):
            return None
        return [context.nodes(work, self._query_of(work, row)) for row in range(self.thread_rows)]

    def _mask(
        self, visibility: Visibility, keys: tuple[cute.Tensor, ...], step: DecodeStep
    ) -> None:
        """The scores of rows that do not see a key, -inf."""
        nodes = step.nodes
        for number in range(self.thread_rows):
            row = self._query_of(step.work, number)
            first, limit = visibility.first(row), visibility.limit(row)
            for values, distance in zip(keys, KEY_STEPS, strict=True):
                key = step.first + distance
                is_visible = (key >= first) & (key < limit)
                if nodes is not None:
                    is_visible = is_visible & visibility.sees_node(key, nodes[number])
                values[number] = cutlass.select_(is_visible, values[number], Float32(-math.inf))

    @traced("maxima")
    def _raise_maxima(self, context: Context, softmax: KeyFragments, keys: tuple[cute.Tensor, ...]):
        largest = cute.make_rmem_tensor(self.thread_rows, Float32)
        for row in range(self.thread_rows):
            largest[row] = cute.arch.fmax(keys[0][row], keys[1][row])
        self._share(context, "maxima", largest, cute.arch.fmax)
        synchronise(self.softmax_threads)
        maxima = combine_warps(
            functools.partial(self._read, context.smem["maxima"]),
            self.softmax_warps,
            cute.arch.fmax,
        )
        factors = cute.make_rmem_tensor(self.thread_rows, Float32)
        softmax.raise_maxima(maxima, factors)
        for accumulator in softmax.o:
            self._multiply_columns(accumulator, factors)

    def _multiply_columns(self, accumulator: cute.Tensor, factors: cute.Tensor) -> None:
        """O^T *= factor, by column: a thread's rows of the tile."""
        for values in rows_of(accumulator):
            for row in range(self.thread_rows):
                values[row] = values[row] * factors[row]

    def _share(
        self,
        context: Context,
        name: str,
        values: cute.Tensor,
        operation: Callable[[Float32, Float32], Float32],
    ) -> None:
        """Each warp's values, combined over the lanes that have the same rows, to shared memory."""
        shared, warp = context.smem[name], cute.arch.thread_idx()[0] // WARP_SIZE
        for number in range(self.thread_rows):
            value = values[number]
            for distance in (4, 8, 16):
                value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
            # Lanes that have the same row write the same.
            shared[self._row(number), warp] = value

    @traced("sums")
    @cute.jit
    def _finish(self, context: Context, softmax: KeyFragments, work: WorkTile):
        """LSE of each row to global memory; return 1/sum of this thread's rows."""
        self._share(context, "sums", softmax.sums, lambda a, b: a + b)
        if cute.arch.thread_idx()[0] < WARP_SIZE:
            # Alike in all warps.
            for number in cutlass.range_constexpr(self.thread_rows):
                context.smem["offsets"][self._row(number), 0] = softmax.offsets[number]
        synchronise(self.softmax_threads)
        row = cute.arch.thread_idx()[0]
        if row < self.config.rows:
            total = sum_of_row(context, row, self.softmax_warps)
            query, head, exists = self.rows.place(context, work, row)
            inverse, lse = softmax.finish(
                total, context.smem["offsets"][row, 0], self.sink_log2(context, work, head)
            )
            inverse = self.scales.scaled_inverse(softmax, inverse)
            if cutlass.const_expr(self.config.nvfp4):
                inverse = inverse * self.fragments.UNIT
            context.smem["inverses"][row, 0] = inverse
            if exists:
                self.store_lse(context, work, (query, head), softmax, lse)
        synchronise(self.softmax_threads)
        return self._read(context.smem["inverses"], 0)

    def _read(self, shared: cute.Tensor, column: Any) -> cute.Tensor:
        values = cute.make_rmem_tensor(self.thread_rows, Float32)
        for number in range(self.thread_rows):
            values[number] = shared[self._row(number), column]
        return values

    def _store_probabilities(self, context: Context, scores: cute.Tensor) -> None:
        """P to shared memory: a key of two neighbouring rows per word."""
        rounded = cute.make_rmem_tensor(cute.size(scores), cutlass.Float16)
        pack(scores, rounded)
        words, target = cute.recast_tensor(rounded, Uint32), context.smem["p_words"]
        lane = cute.arch.thread_idx()[0] % QUAD
        for number in range(cute.size(words)):
            run, which = divmod(number, KEYS)
            target[lane, thread_key() + KEY_STEPS[which], run] = words[number]

    # ----------------------------------------------------------------------------------- results

    @traced("store O")
    def _store_sums(
        self, context: Context, softmax: KeyFragments, work: WorkTile, inverses: cute.Tensor
    ):
        for accumulator in softmax.o:
            self._multiply_columns(accumulator, inverses)
        columns = [values for accumulator in softmax.o for values in rows_of(accumulator)]
        self._store(context, work, columns)

    def _store_zeros(self, context: Context, work: WorkTile):
        """Store out = 0 for the rows of a tile that sees no key."""
        zeros = cute.make_rmem_tensor(self.thread_rows, Float32)
        zeros.fill(0.0)
        self._store(context, work, [zeros] * 4)

    @cute.jit
    def _store(self, context: Context, work: WorkTile, columns: list):
        """Four neighbouring columns of this thread's rows.  columns: their values by row."""
        packed, length = self.problem_class.packed_heads, context.query(work).length
        thread = cute.arch.thread_idx()[0]
        first = thread // WARP_SIZE * WARP_SIZE + thread % WARP_SIZE // QUAD * 4
        for number in cutlass.range_constexpr(self.thread_rows):
            row, query = self._row(number), self._query_of(work, number)
            in_group = row % self.rows.of_query
            if (query < length) & (in_group < packed):
                out = context.result_row(work, query, work.head * packed + in_group)
                values = cute.make_rmem_tensor(4, Float32)
                for i in cutlass.range_constexpr(4):
                    values[i] = columns[i][number]
                if cutlass.const_expr(context.out_gate is not None):
                    gate = context.gate_row(work, query, work.head * packed + in_group)
                    multiply_by_gate(values, gate, [Columns(0, first, 4)])
                rounded = cute.make_rmem_tensor(4, out.element_type)
                rounded.store(values.load().to(out.element_type))
                cute.autovec_copy(rounded, columns_of(out, first, 4))


def _multiply_all(values: cute.Tensor, factor: Float32) -> None:
    for i in range(cute.size(values)):
        values[i] = values[i] * factor
