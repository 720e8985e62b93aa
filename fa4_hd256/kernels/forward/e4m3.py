"""Shared by kernels for K and V in e4m3: rows of Q in a range of their own, and scales.

NOTE [Q in place].  Each row of Q is brought to a range of its own by a power of two, so that it
keeps its bits in a type of few exponents.  The rows' scales, which bring scores back, lie beside it
in shared memory.  A tile's first MMA waits for Q, which nothing can be done for.  All of its rows
are loaded at once, by TMA, so that they take one latency of memory, beside that of the first K.
Each of some warps then has its share of the rows.  A row has as many bytes behind as before, and
the same ones, though in another order: so a warp reads its rows, and writes them when all of its
lanes have read.

NOTE [scales].  A scale of K multiplies scores.  What a sequence's KV head has is taken into what
scores are multiplied with, at a tile's start.  What a page has is a key's, hence a thread's: it
multiplies that thread's scores.  A scale of V multiplies the row of O; a page's would have to
multiply P, whose type has few exponents.  So its logarithm is added to the scores, in the exponent
of 2, where the running maximum takes care of any size, and the sums take what each key counts
without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...schedulers.protocol import WorkTile
from ...softmax_emu.by_key import KeySoftmax
from ..limits import HEAD_DIM, WARP_SIZE
from ..operands import ATOM_ROWS, load_tile
from ..plan.edges import RingState, SharedByReference
from ..problem_class import OF_PAGES, ProblemClass
from ..ranges import traced
from ..rows.lanes import lane_columns
from ..rows.sequences import scale_of
from .context import ForwardContext as Context
from .decode_rows import TileRows
from .gathered import page_sizes

FLOAT_BIAS, FLOAT_MANTISSA = 127, 23
#: Least exponent of a row's largest element, as float32 has it: the scale of smaller ones would
#: leave the exponents of a float32.
LEAST_EXPONENT = 32
INFINITE_EXPONENT = 255
#: V's scale of a page counts as this at least: its logarithm and its reciprocal are then finite.
LEAST_SCALE = 2.0**-64


@dataclass(frozen=True)
class ScaledRows(SharedByReference):
    """Loads of a tile's rows of Q, and how warps bring them to their ranges: NOTE [Q in place].

    warps: those that do it, one behind the other, each its share of the rows.  top_exponent: a
    row's largest element comes to lie in [2^top, 2^(top + 1)).  rows_at_once: rows that a warp
    works on at a time, at most.  loaded, memory: the edge that says that rows are loaded, and the
    name of their buffers.  store: `store(context, row, elements, stage)` writes a lane's elements
    of a row, scaled, float32, to shared memory.  is_packed: two are scaled at a time (f32x2), which
    takes fewer registers, too.

    A row is its place in an atom of the swizzle and the atom's number.
    """

    dtype: Any
    rows: TileRows
    warps: tuple[int, ...]
    top_exponent: int
    rows_at_once: int
    loaded: str
    memory: str
    store: Callable[[Any, tuple[Any, Any], list[Float32], Int32], None]
    is_packed: bool = False

    @cute.jit
    def load(self, context: Context, scheduler_class: Any):
        """Role of the warp that loads each tile's rows, as they are."""
        state = context.barriers["q_free"].edge.waiter_state()
        scheduler = scheduler_class.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            if self.rows.num_steps(tile_context, work) > 0:
                state = self._load_tile(tile_context, work, state)
            work = scheduler.advance_to_next_work()
        context.barriers["q_free"].wait_for_all(state)

    @traced("load Q")
    @cute.jit
    def _load_tile(self, context: Context, work: WorkTile, state: RingState):
        loaded, memory = context.barriers[self.loaded], context.smem[self.memory]
        context.barriers["q_free"].wait(state)
        loaded.expect_bytes(state)
        place = context.query(work), self.rows.first_query(work), 0, work.head
        barrier = loaded.pointer(state)
        load_tile(context.tensors.q, memory, place, barrier, state.index, self.rows.of_query)
        state.advance()
        return state

    @cute.jit
    def scale(self, context: Context, stage: Int32):
        """Bring this warp's rows to their ranges, with scales; readable when all warps have met."""
        rows, warps = self.rows.count, len(self.warps)
        warp = cute.arch.thread_idx()[0] // WARP_SIZE - self.warps[0]
        at_once = min(self.rows_at_once, rows // warps)
        if cutlass.const_expr(rows // warps < ATOM_ROWS):
            shares = ATOM_ROWS // at_once
            self._scale_some(context, warp % shares * at_once, warp // shares, at_once, stage)
        else:
            for turn in cutlass.range(rows // warps // ATOM_ROWS, unroll=1):
                # Places in an atom are known when the kernel is compiled: addresses are cheap.
                for first in range(0, ATOM_ROWS, at_once):
                    self._scale_some(context, first, turn * warps + warp, at_once, stage)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()

    def _scale_some(
        self, context: Context, first: Any, atom: Any, count: int, stage: Int32
    ) -> None:
        """Rows from `first` on of the rows of an atom of the swizzle."""
        rows = [(first + i, atom) for i in range(count)]
        values = [self._load_row(context, row, stage) for row in rows]
        cute.arch.sync_warp()
        for row, elements in zip(rows, values, strict=True):
            self._scale_row(context, row, elements, stage)

    def _load_row(self, context: Context, row: tuple[Any, Any], stage: Int32) -> cute.Tensor:
        """Load this lane's elements of a row as it was loaded."""
        values = cute.make_rmem_tensor(HEAD_DIM // WARP_SIZE, self.dtype)
        source = context.smem[self.memory][row, None, stage]
        cute.autovec_copy(lane_columns(source, cute.arch.lane_idx()), values)
        return values

    def _as_floats(self, values: cute.Tensor) -> list[Float32]:
        if self.dtype is not cutlass.BFloat16:
            elements = values.load().to(Float32)
            return [elements[i] for i in range(HEAD_DIM // WARP_SIZE)]
        # A word has two, each the upper half of a float32.
        words = cute.recast_tensor(values, Int32)
        halves = ((words[i] << 16, words[i] & -(1 << 16)) for i in range(cute.size(words)))
        return [_float(half) for pair in halves for half in pair]

    def _multiplied(self, elements: list[Float32], scale: Float32) -> list[Float32]:
        if not self.is_packed:
            return [element * scale for element in elements]
        scaled: list[Float32] = []
        for i in range(0, len(elements), 2):
            scaled += cute.arch.mul_packed_f32x2(tuple(elements[i : i + 2]), (scale, scale))
        return scaled

    def _scale_row(
        self, context: Context, row: tuple[Any, Any], values: cute.Tensor, stage: Int32
    ) -> None:
        """Store a row to shared memory, with its scale."""
        elements = self._as_floats(values)
        pairs = [_larger(*elements[i : i + 2]) for i in range(0, len(elements), 2)]
        # Infinity is the largest; NaN, which is not seen here, stays NaN in the row itself.
        while len(pairs) > 1:
            pairs = [_larger(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
        largest = _bits(pairs[0])
        largest = cute.arch.warp_redux_sync(largest, "max")
        exponent = cutlass.max(largest >> FLOAT_MANTISSA, LEAST_EXPONENT)
        scale = _float((2 * FLOAT_BIAS + self.top_exponent - exponent) << FLOAT_MANTISSA)
        factor = _float((exponent - self.top_exponent) << FLOAT_MANTISSA)
        # The type may have no infinity: what a row with one comes to is NaN.
        factor = cutlass.select_(exponent == INFINITE_EXPONENT, Float32(math.nan), factor)
        self.store(context, row, self._multiplied(elements, scale), stage)
        # All lanes write the same.
        place, atom = row
        context.smem["factors"][atom * ATOM_ROWS + place, stage] = factor


def _larger(first: Float32, second: Float32) -> Float32:
    """The larger of the absolute values; of a number and NaN the number."""
    return cute.arch.fmax(cute.math.absf(first), cute.math.absf(second))


def _bits(value: Float32) -> Int32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _float(bits: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


class ScaledSoftmax(KeySoftmax):
    """Softmax with the scales, NOTE [scales].  Register memory, which lives across loops:

    stage: (1,) of the buffer that has the rows' scales.  k_scale: (1,) of K of the tile, and what
    else multiplies all scores.  v_scale: (1,) V's of the tile.  key: (1,) this thread's first one
    in the step after the next, of whose next one `coming` has the scales: K's and V's of each key.

    Of a step alone, with scales of pages, for each of this thread's keys: log2_v of its scale of V,
    weights their reciprocals.
    """

    stage: cute.Tensor
    k_scale: cute.Tensor
    v_scale: cute.Tensor
    key: cute.Tensor
    coming: cute.Tensor
    log2_v: list[Float32]
    weights: list[Any]


@dataclass(frozen=True)
class KeyScales(SharedByReference):
    """Scales of a kernel's keys and values: NOTE [scales].

    key_steps: how far a thread's keys of a step are from its first one.
    """

    problem_class: ProblemClass
    rows: TileRows
    key_steps: tuple[int, ...] = (0,)

    @property
    def of_pages(self) -> bool:
        return self.problem_class.descale == OF_PAGES

    @property
    def of_tiles(self) -> bool:
        return bool(self.problem_class.descale) and not self.of_pages

    def softmax_scale(self, context: Context) -> Float32:
        """Return what the softmax multiplies scores with.  With scales of pages scores are
        exponents of 2 before it has them."""
        return Float32(1.0) if self.of_pages else context.scalars.scale_log2

    def allocate(self, softmax: Any) -> None:
        keys = len(self.key_steps)
        softmax.stage = cute.make_rmem_tensor(1, Int32)
        softmax.k_scale = cute.make_rmem_tensor(1, Float32)
        softmax.weights = [None] * keys
        if self.of_pages:
            softmax.key = cute.make_rmem_tensor(1, Int32)
            softmax.coming = cute.make_rmem_tensor(2 * keys, Float32)
        elif self.of_tiles:
            softmax.v_scale = cute.make_rmem_tensor(1, Float32)
            # A tile without steps, whose O is 0, reads it, too.
            softmax.v_scale.fill(1.0)

    @cute.jit
    def enter(self, context: Context, softmax: Any, work: Any, key: Int32):
        """The scales of the tile, or of the first step's keys.  key: this thread's first one."""
        if cutlass.const_expr(self.of_pages):
            softmax.key[0] = key
            self._load_next(context, softmax, work)
        elif cutlass.const_expr(context.k_descale is not None):
            head, batch = work.head // context.heads_per_kv, context.batch(work)
            softmax.v_scale[0] = scale_of(context.v_descale, batch, head)
            softmax.k_scale[0] = softmax.k_scale[0] * scale_of(context.k_descale, batch, head)

    def _load_next(self, context: Context, softmax: Any, work: Any) -> None:
        """The scales of this thread's keys in the next step, loaded a step ahead."""
        block = self.rows.block_kv
        visibility = context.visibility(work, block)
        size, first_page = self.problem_class.page_size, context.first_page(context.batch(work))
        if self.problem_class.gathers:
            size, first_row = page_sizes(context.tensors.k)[0], context.key(work).offset

        def page_of(key: Any) -> Any:
            if self.problem_class.gathers:
                return (key + first_row) // size
            return (key if first_page is None else key + first_page.row) // size

        # Pages without a key that some query sees may be anybody's: their entries are not read.
        first = page_of(visibility.first(self.rows.first_query(work)))
        last = page_of(visibility.seqlen_k - 1)
        for number, distance in enumerate(self.key_steps):
            key = softmax.key[0] + distance if distance else softmax.key[0]
            place = cutlass.max(cutlass.min(cutlass.max(page_of(key), first), last), 0)
            page = context.sequences.tensors.page_table[context.batch(work), place]
            head = work.head // context.heads_per_kv
            softmax.coming[2 * number] = scale_of(context.k_descale, page, head)
            softmax.coming[2 * number + 1] = scale_of(context.v_descale, page, head)
        softmax.key[0] = softmax.key[0] - block

    def take(self, context: Context, softmax: Any, work: Any) -> list[Float32]:
        """Take the pages' scales of this step's keys: V's go into the softmax, K's are returned."""
        keys = range(len(self.key_steps))
        k_scales = [softmax.coming[2 * number] for number in keys]
        v_scales = [
            cute.arch.fmax(softmax.coming[2 * number + 1], Float32(LEAST_SCALE)) for number in keys
        ]
        softmax.log2_v = [cute.math.log2(scale, approx=True, ftz=True) for scale in v_scales]
        softmax.weights = [cute.arch.rcp_approx(scale) for scale in v_scales]
        self._load_next(context, softmax, work)
        return k_scales

    def scaled_inverse(self, softmax: Any, inverse: Float32) -> Float32:
        return inverse * softmax.v_scale[0] if self.of_tiles else inverse
