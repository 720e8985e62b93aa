"""The last kernel over packed results: zeros behind the last offset, or NaN for wrong lengths.

Static shapes leave rows behind the last offset.  They belong to no sequence, so no other kernel
writes them, and the host does not know how many there are: the offsets are on the device.  Writing
zeros to the whole tensor first would cost as much as writing the results.

NOTE [wrong lengths].  A launch relies on what the host was told about the lengths: `max_seqlen_q`
and `max_seqlen_k`, and where dS of each sequence begins.  Lengths on a GPU are not read, so they
may contradict it.  The other kernels then stay within their tensors, but their results are of no
use.  This kernel reads all offsets and overwrites such results with NaN, so that a caller sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

from ..backward.ds_tiles import DsTiles
from ..limits import WARP_SIZE
from ..mask.masking import MaskKind
from ..rows.sequences import columns_of

#: Words of a row that a lane writes at once.
LANE_WORDS = 4
#: A word that is NaN in float32, and twice NaN in bfloat16 and float16.
NAN_WORD = 0x7FFF7FFF


@dataclass(frozen=True)
class TailClass:
    """Compiled-in properties of the kernel. results: "q" or "k" for each, the operand whose rows it
    has. lse: the first has an LSE. sides: operands that have offsets. ds: mask of a backward whose
    `ds_begins` are checked, None without these."""

    results: tuple[str, ...]
    sides: tuple[str, ...]
    lse: bool = False
    ds: MaskKind | None = None


@dataclass(frozen=True)
class TailConfig:
    """num_warps: of a CTA, each with a row of a head.  most_ctas: of a result."""

    num_warps: int = 8
    most_ctas: int = 128


class TailTensors(NamedTuple):
    """Tensors of a call, None for those that the problem class lacks.

    results: (1, rows, heads, words) int32; words: a multiple of 128, strides multiples of 16 bytes.
    lse: (1, heads, rows) float32 of the first.  cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32.
    ds_begins: (sequences,) int32, see `SequenceTensors`.
    """

    results: Any
    lse: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    ds_begins: Any = None


class TailBounds(NamedTuple):
    """Limits that the host was given, Int32.

    rows_q, rows_k: of the tensors.  longest_q, longest_k: no sequence may have more rows.
    window_left, window_right: of the mask, as of `Visibility`.  unseen_queries, unseen_keys: rows
    at the end of each sequence for which dS has no tile.  ds_tiles: of dS of a query head.
    """

    rows_q: Any
    rows_k: Any
    longest_q: Any
    longest_k: Any
    window_left: Any
    window_right: Any
    unseen_queries: Any
    unseen_keys: Any
    ds_tiles: Any


class TailKernel:
    """Launch with `__call__`, under `cute.compile`."""

    problem_class: Any  #: A `TailClass`.

    def __init__(self, config: TailConfig, problem_class: TailClass) -> None:
        self.config = config
        self.problem_class = problem_class

    @cute.jit
    def __call__(self, tensors: TailTensors, bounds: TailBounds, stream: Any) -> None:
        views, most = [], Int32(1)
        for tensor in tensors.results:
            _, rows, heads, words = tensor.shape
            strides = [cute.assume(tensor.stride[mode], divby=LANE_WORDS) for mode in (1, 2)]
            layout = cute.make_layout((rows, heads, words), stride=(*strides, 1))
            views.append(cute.make_tensor(tensor.iterator.align(16), layout))
            most = cutlass.max(most, rows * heads)
        warps = self.config.num_warps
        ctas = cutlass.min((most + warps - 1) // warps, self.config.most_ctas)
        self.kernel(tensors._replace(results=tuple(views)), bounds).launch(
            grid=(ctas, len(views), 1), block=(warps * WARP_SIZE, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: TailTensors, bounds: TailBounds) -> None:
        """A row of a head for each warp at a time; neighbouring warps have neighbouring heads."""
        _, which, _ = cute.arch.block_idx()
        is_wrong = self._any_thread(self._found_wrong(tensors, bounds))
        for number in cutlass.range_constexpr(len(self.problem_class.results)):
            side = self.problem_class.results[number]
            offsets = tensors.cu_seqlens_q if side == "q" else tensors.cu_seqlens_k
            lse = tensors.lse if number == 0 else None
            if which == number:
                self._fill(tensors.results[number], offsets, lse, is_wrong)

    @cute.jit
    def _found_wrong(self, tensors: TailTensors, bounds: TailBounds) -> Boolean:
        """Return True if this thread's sequences contradict the bounds: NOTE [wrong lengths]."""
        thread, _, _ = cute.arch.thread_idx()
        threads, own = self.config.num_warps * WARP_SIZE, self.problem_class
        is_wrong = Boolean(False)
        for side in cutlass.range_constexpr(len(own.sides)):
            is_q = own.sides[side] == "q"
            offsets = tensors.cu_seqlens_q if is_q else tensors.cu_seqlens_k
            rows = bounds.rows_q if is_q else bounds.rows_k
            longest = bounds.longest_q if is_q else bounds.longest_k
            sequences = cute.size(offsets) - 1
            for start in cutlass.range(0, sequences, threads, unroll=1):
                # A sequence may be looked at by several threads: no branch parts these.
                entry = cutlass.min(start + thread, sequences - 1)
                begin, end = offsets[entry], offsets[entry + 1]
                is_wrong = is_wrong | (end < begin) | (end - begin > longest) | (end > rows)
                is_wrong = is_wrong | ((entry == 0) & (begin != 0))
        if cutlass.const_expr(own.ds is not None):
            is_wrong = is_wrong | self._ds_is_wrong(tensors, bounds)
        return is_wrong

    @cute.jit
    def _ds_is_wrong(self, tensors: TailTensors, bounds: TailBounds) -> Boolean:
        """Return True if dS of this thread's sequences ends behind the next one's begin."""
        thread, _, _ = cute.arch.thread_idx()
        begins, threads = tensors.ds_begins, self.config.num_warps * WARP_SIZE
        sequences, window = cute.size(begins), (bounds.window_left, bounds.window_right)
        is_wrong = Boolean(False)
        for start in cutlass.range(0, sequences, threads, unroll=1):
            entry = cutlass.min(start + thread, sequences - 1)
            queries, keys = (
                offsets[entry + 1] - offsets[entry] - unseen
                for offsets, unseen in (
                    (tensors.cu_seqlens_q, bounds.unseen_queries),
                    (tensors.cu_seqlens_k, bounds.unseen_keys),
                )
            )
            tiles = DsTiles.of((queries, keys), self.problem_class.ds, window).count(keys)
            tiles = cutlass.select_((queries > 0) & (keys > 0), tiles, Int32(0))
            following = begins[cutlass.min(entry + 1, sequences - 1)]
            end = cutlass.select_(entry + 1 < sequences, following, bounds.ds_tiles)
            is_wrong = is_wrong | (begins[entry] < 0) | (begins[entry] + tiles > end)
        return is_wrong

    @cute.jit
    def _any_thread(self, condition: Boolean) -> Boolean:
        warps = self.config.num_warps
        memory = SmemAllocator().allocate(4 * warps, 16)
        votes = cute.make_tensor(cute.recast_ptr(memory, dtype=Int32), cute.make_layout(warps))
        found = cute.arch.popc(cute.arch.vote_ballot_sync(condition))
        # Every lane takes part in finding the warp's number.
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.lane_idx() == 0:
            votes[warp] = found
        cute.arch.sync_threads()
        total = Int32(0)
        for warp in cutlass.range_constexpr(warps):
            total = total + votes[warp]
        return total > 0

    @cute.jit
    def _fill(self, result: cute.Tensor, offsets: Any, lse: Any, is_wrong: Boolean) -> None:
        """Zeros behind the last offset; NaN in all rows where lengths are wrong."""
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows, heads, words = result.shape
        first = Int32(rows)
        if cutlass.const_expr(offsets is not None):
            first = offsets[cute.size(offsets) - 1]
        first = cutlass.select_(is_wrong, Int32(0), first)
        count, warps = (rows - first) * heads, self.config.num_warps
        values = cute.make_rmem_tensor(LANE_WORDS, Int32)
        values.fill(cutlass.select_(is_wrong, Int32(NAN_WORD), Int32(0)))
        for index in cutlass.range(block * warps + warp, count, ctas * warps, unroll=1):
            row, head, lane = first + index // heads, index % heads, cute.arch.lane_idx()
            for start in cutlass.range(lane, words // LANE_WORDS, WARP_SIZE, unroll=1):
                to = result[row, head, None]
                cute.autovec_copy(values, columns_of(to, start * LANE_WORDS, LANE_WORDS))
            if cutlass.const_expr(lse is not None):
                if lane == 0:
                    value = Float32(-math.inf)
                    lse[0, head, row] = cutlass.select_(is_wrong, Float32(math.nan), value)
