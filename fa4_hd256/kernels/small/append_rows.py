"""The kernel before the attention of `flash_attn_with_kvcache`: new rows of K and V are written
behind those in use of each sequence, in pages or not, and the rows in use are counted again. With
rotary embedding those of K are rotated before, and queries, whose rows follow, are rotated into a
tensor of their own.

Bound by memory, 512 bytes per row and head of both K and V, twice: a warp moves such a pair, a lane
8 columns of each, which lie next to each other; all that its row addresses follow from is loaded
before. A row whose place is none of the cache's (lengths past it, page numbers out of range) is not
written, nor is a packed row past the last offset: nobody on the host looks at what the device
holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..e4m3_codes import WORD_CODES, codes_of, scale_of
from ..limits import HEAD_DIM, WARP_SIZE
from ..problem_class import OF_PAGES, AppendClass
from ..rows.views import by_sequence, columns_of, lane_columns, load_lane_columns
from .append_rotary import RotaryRows, RotaryTables

__all__ = ["AppendConfig", "AppendKernel", "AppendTables"]

#: The largest number of rows.
LARGEST_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class AppendConfig:
    """num_warps: of a CTA, each with a row and head."""

    num_warps: int = 4


class AppendTables(NamedTuple):
    """Tables of row addresses, None for what the problem class has not.

    lengths: (batch,) int32, rows in use. after: likewise, of the kernel's own: with the new ones.
    offsets: (batch + 1,) int32 of packed new rows. page_table: (batch, pages) int32. scales: of K
    and of V, (entries, heads_kv) float32, one of either where all have the same. rotary: those of
    rotary embedding, and its queries.
    """

    lengths: Any
    after: Any
    offsets: Any
    page_table: Any
    scales: Any
    rotary: RotaryTables | None


class AppendKernel:
    """Launch with `__call__`, under `cute.compile`."""

    def __init__(self, config: AppendConfig, problem_class: AppendClass) -> None:
        self.config = config
        self.problem_class = problem_class
        rotary = problem_class.rotary
        self.rotary_rows = None if rotary is None else RotaryRows(rotary)

    @cute.jit
    def __call__(
        self,
        caches: tuple[cute.Tensor, cute.Tensor],
        rows: tuple[cute.Tensor, cute.Tensor],
        tables: AppendTables,
        stream: Any,
    ):
        """caches: K and V, (batch or pages, rows of one, heads_kv, 256).  rows: new ones of both,
        (batch, rows, heads_kv, 256), packed ones with a batch of 1.  Tensors of e4m3 are given as
        (.., 128) of a 16-bit type, two elements in each.  At least one row or query, and one
        sequence."""
        own = self.problem_class
        caches = tuple(by_sequence(t, 16, own.cache_columns) for t in caches)
        rows = tuple(by_sequence(t, 16, own.row_columns) for t in rows)
        of_warps = _rows_of(rows[0])
        if cutlass.const_expr(tables.rotary is not None):
            rotary = tables.rotary
            rotary = rotary._replace(
                queries=by_sequence(rotary.queries, 16), rotated=by_sequence(rotary.rotated, 16)
            )
            tables = tables._replace(rotary=rotary)
            of_warps += _rows_of(rotary.queries)
        warps = self.config.num_warps
        self.kernel(caches, rows, tables).launch(
            grid=((of_warps + warps - 1) // warps, 1, 1),
            block=(warps * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, caches: tuple[cute.Tensor, ...], rows: tuple[cute.Tensor, ...], tables: AppendTables
    ):
        """A row and head of K and V for each warp, or of the queries; neighbouring warps have
        neighbouring heads."""
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = block * self.config.num_warps + warp
        new = _rows_of(rows[0])
        if index < new:
            self._append(caches, rows, tables, index)
        if cutlass.const_expr(self.rotary_rows is not None):
            if (index >= new) & (index < new + _rows_of(tables.rotary.queries)):
                self._turn_query(tables, index - new)
        self._count(tables, rows[0].shape[0])

    @cute.jit
    def _append(
        self,
        caches: tuple[cute.Tensor, ...],
        rows: tuple[cute.Tensor, ...],
        tables: AppendTables,
        index: Int32,
    ):
        """A row and head of K and V, by number."""
        row, head, entry = _place_of(index, rows[0])
        loaded = [self._load(tensor[row, None, head, entry]) for tensor in rows]
        sequence, number = self._of_row(tables, tables.offsets, row, entry)
        position = tables.lengths[sequence] + number
        to, place, fits = self._place(caches[0], tables, sequence, position)
        if cutlass.const_expr(self.problem_class.packed):
            fits = fits & (row < tables.offsets[cute.size(tables.lengths)])
        if cutlass.const_expr(self.rotary_rows is not None):
            begin = tables.rotary.begins[sequence]
            loaded[0] = self.rotary_rows.turned(loaded[0], tables.rotary, begin + number)
        scales = [Float32(1.0)] * len(rows)
        if cutlass.const_expr(self.problem_class.descale):
            owner = to if self.problem_class.descale == OF_PAGES else sequence
            scales = [scale_of(scale, owner, head) for scale in tables.scales]
        if fits:
            for cache, values, scale in zip(caches, loaded, scales, strict=True):
                self._store(cache[place, None, head, to], values, scale)

    @cute.jit
    def _turn_query(self, tables: AppendTables, index: Int32):
        """A row and head of the queries, by number."""
        rotary = tables.rotary
        row, head, entry = _place_of(index, rotary.queries)
        values = load_lane_columns(rotary.queries[row, None, head, entry], cute.arch.lane_idx())
        sequence, number = self._of_row(tables, rotary.offsets, row, entry)
        position = rotary.begins[sequence]
        if cutlass.const_expr(self.problem_class.rotary.ordered):
            position += number
        turned = self.rotary_rows.turned(values, rotary, position)
        to = lane_columns(rotary.rotated[row, None, head, entry], cute.arch.lane_idx())
        cute.autovec_copy(turned, to)

    def _load(self, row: cute.Tensor) -> cute.Tensor:
        """Load this lane's columns."""
        columns = self.problem_class.row_columns // WARP_SIZE
        values = cute.make_rmem_tensor(columns, row.element_type)
        cute.autovec_copy(columns_of(row, cute.arch.lane_idx() * columns, columns), values)
        return values

    @cute.jit
    def _of_row(
        self, tables: AppendTables, offsets: cute.Tensor | None, row: Int32, entry: Int32
    ) -> tuple[Int32, Int32]:
        """Return (sequence of a row, its number among the rows of that sequence).  offsets: of
        packed rows; they ascend, and of equal ones, those of sequences without rows, the last
        begins the sequence of the row."""
        if cutlass.const_expr(offsets is None):
            return entry, row
        batch, lane = cute.size(tables.lengths), cute.arch.lane_idx()
        begun = Int32(0)
        for first in cutlass.range(0, batch, WARP_SIZE, unroll=1):
            # Offset 0 begins the first sequence; past the last one none does.
            number = first + lane + 1
            offset = offsets[cutlass.min(number, batch)]
            begun += cutlass.select_((number < batch) & (offset <= row), Int32(1), Int32(0))
        sequence = cute.arch.warp_reduction_sum(begun)
        return sequence, row - offsets[sequence]

    @cute.jit
    def _place(
        self, cache: cute.Tensor, tables: AppendTables, sequence: Int32, position: Int32
    ) -> tuple[Int32, Int32, Any]:
        """Return (entry of the cache, row of it, whether there is such a one) of a position in a
        sequence."""
        rows, _, _, entries = cache.shape
        if cutlass.const_expr(not self.problem_class.paged):
            return sequence, position, (position >= 0) & (position < rows)
        pages = cute.size(tables.page_table, mode=[1])
        page = position // rows
        fits = (position >= 0) & (page < pages)
        # No branch parts the loads: of a page that is none the first one's number is read.
        to = tables.page_table[sequence, cutlass.select_(fits, page, Int32(0))]
        fits = fits & (to >= 0) & (to < entries)
        return cutlass.select_(fits, to, Int32(0)), position % rows, fits

    def _store(self, row: cute.Tensor, values: cute.Tensor, scale: Float32) -> None:
        """Store this lane's columns of a row of a cache; scale: of what is brought to e4m3."""
        columns = self.problem_class.cache_columns // WARP_SIZE
        if self.problem_class.kv_dtype is not None:
            values = self._rounded(row, values, scale)
        cute.autovec_copy(values, columns_of(row, cute.arch.lane_idx() * columns, columns))

    def _rounded(self, row: cute.Tensor, values: cute.Tensor, scale: Float32) -> cute.Tensor:
        """Values divided by a scale, in e4m3, as elements of the cache hold them."""
        codes = cute.make_rmem_tensor(HEAD_DIM // WARP_SIZE // WORD_CODES, Int32)
        for word in range(cute.size(codes)):
            own = [Float32(values[WORD_CODES * word + i]) for i in range(WORD_CODES)]
            if self.problem_class.descale:
                own = [value / scale for value in own]
            codes[word] = codes_of(own)
        return cute.recast_tensor(codes, row.element_type)

    @cute.jit
    def _count(self, tables: AppendTables, seqlen: Int32):
        """Rows in use of each sequence, with the new ones: one sequence per thread at a time.
        seqlen: new rows of each where they are not packed."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        of_block = self.config.num_warps * WARP_SIZE
        begin, step = block * of_block + thread, blocks * of_block
        for sequence in cutlass.range(begin, cute.size(tables.lengths), step, unroll=1):
            added = Int32(seqlen)
            if cutlass.const_expr(self.problem_class.packed):
                added = tables.offsets[sequence + 1] - tables.offsets[sequence]
            # A count past all rows stays so, whatever the sum would wrap to.
            room = Int32(LARGEST_COUNT) - added
            tables.after[sequence] = cutlass.min(tables.lengths[sequence], room) + added


def _rows_of(rows: cute.Tensor) -> Int32:
    """Return the number of rows of all heads; rows: as of `by_sequence`."""
    seqlen, _, heads, batch = rows.shape
    return seqlen * heads * batch


def _place_of(index: Int32, rows: cute.Tensor) -> tuple[Int32, Int32, Int32]:
    """Return (row, head, batch entry) of one of `_rows_of`; the heads of a row are neighbours."""
    seqlen, _, heads, _ = rows.shape
    return index // heads % seqlen, index % heads, index // heads // seqlen
