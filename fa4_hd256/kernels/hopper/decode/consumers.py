"""The consumers of the decode kernel: K and V from e4m3 to f16, MMAs, softmax and results.

NOTE [fragments of bytes].  Thread t of a quad g of a warp has rows g and g + 8 of the 16 of its
warp, in A and in S^T: keys.  Of a row of K it reads the pieces 2 t and 2 t + 1 of 16 bytes of each
128, and the bytes 4 i to 4 i + 3 of a piece are its four elements of one slice of QK.  Lanes that
read at the same time have rows g and g + 1, so that the 128-byte swizzle gives them pieces that
differ in the bit that their rows do: no two meet in a bank.

Of V it reads the four bytes 4 g of the 32 columns of its warp, of the keys 2 t and 2 t + 1 of every
eight: swizzled, each pair of rows has its own pair of pieces.  They are the rows g and g + 8 of
both MMAs of O^T.

NOTE [barriers of a step].  All threads meet twice: to test whether a maximum moves, when each has
seen its last PV done, which read P; and when P is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....schedulers import WorkTile
from ...forward.decode_softmax import DecodeSoftmax, any_of_softmax, synchronise
from ...forward.e4m3_scales import KeyScales, ScaledSoftmax
from ...limits import HEAD_DIM, WARP_SIZE
from ...mask.masking import Visibility
from ...operands import ROW_BYTES
from ...plan.edges import RingState
from ...ranges import traced
from ...rows.views import columns_of
from ..instructions import (
    QUAD,
    WARPGROUP_THREADS,
    commit,
    fence,
    multiply,
    pack,
    rows_of,
    wait,
)
from .config import BLOCK_KV
from .context import HopperE4m3DecodeContext
from .queries import QueryRows
from .steps import QK_PARTS

__all__ = ["E4m3Consumer", "P_CORE", "halves_of", "pair_of"]

WORD = 4  # bytes
PIECE = 16  # bytes that a thread reads of K at once
COLUMN_RUN = 8  # columns of an accumulator of which a quad has two each
KEYS = 2  # of a thread
WARPGROUP_KEYS = 64
BLOCK_WORDS = BLOCK_KV * ROW_BYTES // WORD  # of 128 columns of a tile
#: P^T lies by core matrices of 8 keys x 8 rows, 16 bytes per key.
P_CORE = 8


def halves_of(word: Any) -> tuple[Any, Any]:
    """Four e4m3 as two words of f16x2, exactly: cvt.rn.f16x2.e4m3x2 (PTX ISA 9.7.9.22)."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 {$w0}, low;\n"
        "cvt.rn.f16x2.e4m3x2 {$w1}, high;}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


def pair_of(number: int, first: Any, second: Any) -> Any:
    """Bytes 0 and 1, or 2 and 3, of two words, interleaved: prmt.b32 (PTX ISA 9.7.9.7)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{(0x5140, 0x7362)[number]:x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


class KeyFragments(ScaledSoftmax):
    """The softmax of a thread's keys and rows, and what else it works on in registers.

    keys, values: A of the parts of QK and of both PV.  o: both accumulators, 64 of the columns x
    rows each.  stage: (1,) Q's buffer.  k_scale: (1,) of K of the tile, and the sign of the scale.
    """

    keys: list[cute.Tensor]
    values: list[cute.Tensor]
    o: list[cute.Tensor]
    stage: cute.Tensor
    k_scale: cute.Tensor


class E4m3Consumer(QueryRows, KeyScales, DecodeSoftmax):
    """Mixed into the decode kernel; the shared state is its
    `HopperE4m3DecodeContext`."""

    key_steps = (0, 8)

    @property
    def softmax_warps(self) -> int:
        return len(self.config.warps.consumers)

    @property
    def own_rows(self) -> int:
        """Rows of a thread, two of every eight: `_row`."""
        return self.config.rows // QUAD

    def _row(self, number: int) -> Int32:
        """Return which row of the tile a thread's is."""
        run, own = divmod(number, 2)
        return cute.arch.thread_idx()[0] % QUAD * 2 + (run * COLUMN_RUN + own)

    def _create(self, context: HopperE4m3DecodeContext) -> KeyFragments:
        config = self.config
        softmax = KeyFragments.create(
            self.softmax_scale(context),
            config.ex2_pattern,
            config.rescale_threshold,
            cutlass.Float16,
            self.own_rows,
            config.headroom,
            "scalar",
        )
        self._make_room(softmax)
        buffers = range(config.part_buffers)
        softmax.keys = [self.qk.a_fragment(HEAD_DIM // QK_PARTS) for _ in buffers]
        softmax.values = [self.pv.a_fragment(BLOCK_KV) for _ in range(2)]
        softmax.o = [self.pv.accumulator() for _ in range(2)]
        softmax.stage = cute.make_rmem_tensor(1, Int32)
        softmax.k_scale = cute.make_rmem_tensor(1, Float32)
        return softmax

    def _context_of(self, context: HopperE4m3DecodeContext, work: Any) -> Any:
        return context.of_tile(work)

    def _step_states(self) -> RingState:
        return self.edges["kv_loaded"].waiter_state()

    def _tile_state(self) -> RingState:
        return self.edges["q_loaded"].waiter_state()

    def _own_key(self) -> Int32:
        thread = cute.arch.thread_idx()[0]
        return thread // WARP_SIZE * 16 + thread % WARP_SIZE // QUAD

    @cute.jit
    def _begin_tile(
        self, context: HopperE4m3DecodeContext, softmax: Any, work: Any, key: Int32, state: Any
    ):
        """Q in f16, and the scales of the tile, or of the first step's keys."""
        context.barriers["q_loaded"].wait(state)
        self._bring_queries(context, state.index)
        softmax.stage[0] = state.index
        softmax.k_scale[0] = Float32(-1.0 if self.problem_class.negative_scale else 1.0)
        self._enter_scales(context, softmax, work, key)
        for accumulator in softmax.o:
            accumulator.fill(0.0)
        state.advance()
        return state

    def _multiply_all(self, values: cute.Tensor, factor: Float32) -> None:
        for i in range(cute.size(values)):
            values[i] = values[i] * factor

    # ------------------------------------------------------------ a step

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: HopperE4m3DecodeContext,
        running: tuple[ScaledSoftmax, RingState, Int32],
        place: tuple[WorkTile, Int32],
        is_masked: bool,
    ):
        """QK, softmax and PV of a step.

        running: (softmax, state of K and V, number of the step).  place: (tile, this thread's first
        key), the latter right where it is used; is_masked: static, some key may be invisible.
        """
        softmax, kv, step = running
        nodes = self._nodes(context, place[0], is_masked)
        scores, kv = self._multiply_keys(context, softmax, kv)
        words, kv = self._load_values(context, kv)
        if self.config.is_roomy:
            self._convert_values(softmax, words)
        wait(0)
        self._exponentiate(context, softmax, scores, (place, nodes, step), is_masked)
        if not self.config.is_roomy:
            self._convert_values(softmax, words)
        fence()
        for values, result in zip(softmax.values, softmax.o, strict=True):
            multiply(self.pv, result, values, context.p, True)
        commit()
        wait(0)
        return kv

    def _end_steps(self, context: HopperE4m3DecodeContext, softmax: Any, states: Any) -> Any:
        context.barriers["q_free"].arrive(RingState(1, softmax.stage[0], Int32(0)))
        return states

    def _multiply_keys(
        self, context: HopperE4m3DecodeContext, softmax: Any, kv: Any
    ) -> tuple[cute.Tensor, Any]:
        """Issue S^T = K Q^T, part by part as K becomes f16, NOTE [fragments of bytes]; S."""
        context.barriers["kv_loaded"].wait(kv)
        words = self._load_keys(context, kv)
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
            fragment = cute.recast_tensor(buffer, Uint32)
            for own, pieces in enumerate(of_rows):
                for i in range(PIECE // WORD):
                    at = 4 * i + own
                    fragment[at], fragment[at + 2] = halves_of(pieces[i])
            fence()
            multiply(self.qk, scores, buffer, queries, part > 0, part * slices)
            if part == QK_PARTS - 1 or buffers < QK_PARTS:
                commit()
        return scores, kv

    def _load_keys(self, context: HopperE4m3DecodeContext, kv: Any) -> list[list[cute.Tensor]]:
        """A tile of K in registers: a piece of each part of the columns and of both rows."""
        thread = cute.arch.thread_idx()[0]
        piece = (2 * (thread % QUAD)) ^ (thread % WARP_SIZE // QUAD)
        tile = kv.index * (2 * BLOCK_WORDS) + self._own_key() * (ROW_BYTES // WORD)
        pieces = [tile + ((piece ^ odd) * (PIECE // WORD)) for odd in range(2)]
        found = []
        for part in range(QK_PARTS):
            block, odd = divmod(part, 2)
            far = [block * BLOCK_WORDS + step * (ROW_BYTES // WORD) for step in self.key_steps]
            found.append([self._words(context, pieces[odd] + f, PIECE // WORD) for f in far])
        return found

    def _load_values(self, context: HopperE4m3DecodeContext, kv: Any) -> tuple[list, Any]:
        """A tile of V in registers, NOTE [fragments of bytes], by eight keys and the two of each
        pair."""
        context.barriers["kv_loaded"].wait(kv)
        thread = cute.arch.thread_idx()[0]
        warpgroup, warp = thread // WARPGROUP_THREADS, thread // WARP_SIZE % 4
        quad, first_key = thread % WARP_SIZE // QUAD, thread % QUAD * 2
        piece = (2 * warp + quad // 4) ^ first_key
        tile = kv.index * (2 * BLOCK_WORDS) + warpgroup * BLOCK_WORDS
        tile = tile + first_key * (ROW_BYTES // WORD) + quad % 4
        pieces = [
            tile + (own * (ROW_BYTES // WORD) + (piece ^ own) * (PIECE // WORD)) for own in range(2)
        ]
        found = []
        for eight in range(BLOCK_KV // 8):
            far = eight * 8 * (ROW_BYTES // WORD)
            found.append([self._words(context, pieces[own] + far, 1)[0] for own in range(2)])
        context.barriers["kv_free"].arrive(kv)
        kv.advance()
        return found, kv

    def _convert_values(self, softmax: Any, words: list) -> None:
        """A of both PV.  words: of `_load_values`."""
        for number, values in enumerate(softmax.values):
            fragment = cute.recast_tensor(values, Uint32)
            for eight, pair in enumerate(words):
                at = 4 * (eight // 2) + 2 * (eight % 2)
                fragment[at], fragment[at + 1] = halves_of(pair_of(number, *pair))

    def _words(self, context: HopperE4m3DecodeContext, start: Int32, count: int) -> cute.Tensor:
        """Some words of K's and V's buffers, from a multiple of their number on."""
        words = cute.make_rmem_tensor(count, Uint32)
        place = (context.smem["kv_words"].iterator + start).align(count * WORD)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), words)
        return words

    # ------------------------------------------------------------ softmax

    @traced("softmax")
    @cute.jit
    def _exponentiate(
        self,
        context: HopperE4m3DecodeContext,
        softmax: Any,
        scores: cute.Tensor,
        where: tuple[tuple[WorkTile, Int32], Any, Int32],
        is_masked: bool,
    ):
        """S -> P in shared memory; maxima where they move, sums.  where: (place of `_step`, nodes,
        number of the step)."""
        place, nodes, step = where
        keys = rows_of(scores)
        self._scale(context, softmax, keys, place[0])
        if cutlass.const_expr(self.change.exists):
            self.change.apply(scores, context.scalars.cap_scale, None, packed=False)
        self._weigh(context, softmax, keys)
        if cutlass.const_expr(is_masked):
            self._mask(context.visibility(place[0], BLOCK_KV), keys, place, nodes)
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
        self,
        context: HopperE4m3DecodeContext,
        softmax: Any,
        keys: tuple[cute.Tensor, ...],
        work: Any,
    ) -> None:
        """Scores of the rows as they were: by their scales, which K's scale of the tile is among,
        those of a key by its page's scale."""
        factors = self._read(context.smem["factors"], softmax.stage[0])
        if self.problem_class.descale or self.problem_class.negative_scale:
            self._multiply_all(factors, softmax.k_scale[0])
        k_scales: list = [None] * KEYS
        if self.of_pages:
            k_scales = self._take_scales(context, softmax, work)
        for values, k_scale in zip(keys, k_scales, strict=True):
            for row in range(self.own_rows):
                values[row] = values[row] * factors[row]
            if k_scale is not None:
                self._multiply_all(values, k_scale)

    def _weigh(
        self, context: HopperE4m3DecodeContext, softmax: Any, keys: tuple[cute.Tensor, ...]
    ) -> None:
        """A key's own scale of V, into the exponents of 2."""
        if not self.of_pages:
            return
        scale = context.scalars.scale_log2
        for values, logarithm in zip(keys, softmax.log2_v, strict=True):
            for row in range(self.own_rows):
                values[row] = cute.math.fma(values[row], scale, logarithm)

    def _query_of(self, work: Any, number: int) -> Int32:
        """The query of one of a thread's rows."""
        return self.queries(work)[0] + self._row(number) // self.of_query

    def _nodes(self, context: HopperE4m3DecodeContext, work: Any, is_masked: bool) -> Any:
        """The words of a thread's rows for a masked step, None where they have none."""
        if not (is_masked and context.mask.tree):
            return None
        return [context.nodes(work, self._query_of(work, row)) for row in range(self.own_rows)]

    def _mask(
        self,
        visibility: Visibility,
        keys: tuple[cute.Tensor, ...],
        place: tuple[WorkTile, Int32],
        nodes: Any,
    ) -> None:
        """The scores of rows that do not see a key, -inf.  place: (tile, first key); nodes: see
        `_nodes`."""
        work, first_key = place
        for number in range(self.own_rows):
            row = self._query_of(work, number)
            first, limit = visibility.first(row), visibility.limit(row)
            for values, distance in zip(keys, self.key_steps, strict=True):
                key = first_key + distance
                is_visible = (key >= first) & (key < limit)
                if cutlass.const_expr(nodes is not None):
                    is_visible = is_visible & visibility.sees_node(key, nodes[number])
                values[number] = cutlass.select_(is_visible, values[number], Float32(-math.inf))

    @traced("maxima")
    def _raise_maxima(
        self, context: HopperE4m3DecodeContext, softmax: Any, keys: tuple[cute.Tensor, ...]
    ):
        """Maxima over all keys of the step; O and sums rescaled."""
        largest = cute.make_rmem_tensor(self.own_rows, Float32)
        for row in range(self.own_rows):
            largest[row] = cute.arch.fmax(keys[0][row], keys[1][row])
        self._share(context, "maxima", largest, cute.arch.fmax)
        synchronise(self.softmax_threads)
        maxima = self._combined(context.smem["maxima"], cute.arch.fmax)
        factors = cute.make_rmem_tensor(self.own_rows, Float32)
        softmax.raise_maxima(maxima, factors)
        for accumulator in softmax.o:
            self._multiply_columns(accumulator, factors)

    def _multiply_columns(self, accumulator: cute.Tensor, factors: cute.Tensor) -> None:
        """O^T *= factor, by column: a thread's rows of the tile."""
        for values in rows_of(accumulator):
            for row in range(self.own_rows):
                values[row] = values[row] * factors[row]

    def _share(
        self,
        context: HopperE4m3DecodeContext,
        name: str,
        values: cute.Tensor,
        operation: Callable[[Float32, Float32], Float32],
    ) -> None:
        """Each warp's values, combined over the lanes that have the same rows, to shared memory."""
        shared, warp = context.smem[name], cute.arch.thread_idx()[0] // WARP_SIZE
        for number in range(self.own_rows):
            value = values[number]
            for distance in (4, 8, 16):
                value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
            # Lanes that have the same row write the same.
            shared[self._row(number), warp] = value

    @cute.jit
    def _share_sums(self, context: HopperE4m3DecodeContext, softmax: Any):
        self._share(context, "sums", softmax.sums, lambda a, b: a + b)
        if cute.arch.thread_idx()[0] < WARP_SIZE:
            # Alike in all warps.
            for number in cutlass.range_constexpr(self.own_rows):
                context.smem["offsets"][self._row(number), 0] = softmax.offsets[number]
        synchronise(self.softmax_threads)

    def _offset_of(self, context: HopperE4m3DecodeContext, softmax: Any, row: Int32) -> Float32:
        return context.smem["offsets"][row, 0]

    def _read(self, shared: cute.Tensor, column: Any) -> cute.Tensor:
        found = cute.make_rmem_tensor(self.own_rows, Float32)
        for number in range(self.own_rows):
            found[number] = shared[self._row(number), column]
        return found

    def _store_probabilities(self, context: HopperE4m3DecodeContext, scores: cute.Tensor) -> None:
        """P to shared memory: a key of two neighbouring rows per word."""
        rounded = cute.make_rmem_tensor(cute.size(scores), cutlass.Float16)
        pack(scores, rounded)
        words, target = cute.recast_tensor(rounded, Uint32), context.smem["p_words"]
        lane = cute.arch.thread_idx()[0] % QUAD
        for number in range(cute.size(words)):
            run, own = divmod(number, KEYS)
            target[lane, self._own_key() + self.key_steps[own], run] = words[number]

    # ------------------------------------------------------------ results

    @traced("store O")
    def _store_sums(
        self,
        context: HopperE4m3DecodeContext,
        running: tuple[ScaledSoftmax, RingState],
        work: Any,
        inverses: cute.Tensor,
    ):
        """O / sum to global memory, in the type of `out`."""
        softmax, _ = running
        for accumulator in softmax.o:
            self._multiply_columns(accumulator, inverses)
        columns = [values for accumulator in softmax.o for values in rows_of(accumulator)]
        self._store(context, work, columns)

    def _store_zeros(self, context: HopperE4m3DecodeContext, work: Any):
        """Store out = 0 for the rows of a tile that sees no key."""
        zeros = cute.make_rmem_tensor(self.own_rows, Float32)
        zeros.fill(0.0)
        self._store(context, work, [zeros] * 4)

    @cute.jit
    def _store(self, context: HopperE4m3DecodeContext, work: Any, columns: list):
        """Four neighbouring columns of this thread's rows.  columns: their values by row."""
        packed, length = self.problem_class.packed_heads, context.query(work).length
        thread = cute.arch.thread_idx()[0]
        first = thread // WARP_SIZE * WARP_SIZE + thread % WARP_SIZE // QUAD * 4
        for number in cutlass.range_constexpr(self.own_rows):
            row, query = self._row(number), self._query_of(work, number)
            in_group = row % self.of_query
            if (query < length) & (in_group < packed):
                out = self.result_row(context, work, query, work.head * packed + in_group)
                values = cute.make_rmem_tensor(4, Float32)
                for i in cutlass.range_constexpr(4):
                    values[i] = columns[i][number]
                rounded = cute.make_rmem_tensor(4, out.element_type)
                rounded.store(values.load().to(out.element_type))
                cute.autovec_copy(rounded, columns_of(out, first, 4))
