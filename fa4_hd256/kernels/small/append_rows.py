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

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from ..e4m3_codes import WORD_CODES, codes_of
from ..limits import HEAD_DIM, WARP_SIZE
from ..nvfp4_format import E2M1_LARGEST, E2M1_MIDPOINTS, NVFP4, NVFP4_BLOCK
from ..problem_class import ELEMENT_TYPES, KV_DTYPES, OF_PAGES
from ..rows.lanes import LANE_COLUMNS, lane_columns, load_lane_columns
from ..rows.sequences import by_sequence, columns_of, scale_of

#: Lanes that have a block of NVFP4.
BLOCK_LANES = NVFP4_BLOCK // LANE_COLUMNS
#: The largest number of rows.
LARGEST_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class RotaryClass:
    """Facts of rotary embedding that are compiled into the kernel that writes new rows to a cache.

    table_dtype: of cosines and sines, float32 or that of the rows. interleaved: pairs are
    neighbours, else halves. ordered: queries of a sequence have positions one after the other, else
    all have that of the first new row. packed: queries are packed by offsets.
    """

    table_dtype: torch.dtype
    interleaved: bool
    ordered: bool
    packed: bool


@dataclass(frozen=True)
class AppendClass:
    """Facts of a call that are compiled into the kernel that writes new rows to a cache.

    dtype: of the rows, and unless kv_dtype says otherwise of the cache. packed: rows are packed by
    offsets. paged: a table says which entry of the cache holds them. kv_dtype: of `CACHE_DTYPES`,
    which rows of another dtype are brought to; None for rows that are written as they are. descale:
    whose scales they are then divided by, as of `ProblemClass`. rotary: embedding of those of K
    before that, and of queries; None for none.
    """

    dtype: torch.dtype
    packed: bool = False
    paged: bool = False
    kv_dtype: torch.dtype | None = None
    descale: str = ""
    rotary: RotaryClass | None = None

    @property
    def element_type(self) -> Any:
        """Return the DSL's type; elements of one byte travel in pairs."""
        return ELEMENT_TYPES[self.torch_type]

    @property
    def torch_type(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype in KV_DTYPES else self.dtype

    @property
    def row_columns(self) -> int:
        """Elements of that type in a row."""
        return HEAD_DIM // 2 if self.dtype in KV_DTYPES else HEAD_DIM

    @property
    def cache_columns(self) -> int:
        if self.kv_dtype is None:
            return self.row_columns
        return HEAD_DIM // (4 if self.kv_dtype == NVFP4 else 2)


class RotaryTables(NamedTuple):
    """cos, sin: (positions, columns). begins: (batch,) int32, positions of the sequences' first
    rows. queries, rotated: (batch, rows, heads, 256), packed ones with a batch of 1; the second is
    the kernel's own. offsets: (batch + 1,) int32 of packed queries, None for others."""

    cos: Any
    sin: Any
    begins: Any
    queries: Any
    rotated: Any
    offsets: Any


class RotaryRows:
    """Rotary embedding of rows of K, and of queries; a lane of a warp has 8 consecutive elements.

    The first 2 * columns elements of a row are pairs, of neighbours (2i and 2i + 1) or of halves (i
    and i + columns), each rotated by the angle whose cosine and sine the tables hold for the row's
    position and i. As columns are a multiple of 8, a lane's 8 elements are rotated or not as one,
    and the other halves of their pairs are those of one other lane. A row whose position the tables
    have not becomes NaN there.
    """

    def __init__(self, rotary_class: RotaryClass) -> None:
        self.rotary_class = rotary_class

    def turned(self, values: cute.Tensor, tables: RotaryTables, position: Int32) -> cute.Tensor:
        """A row at a position, computed in float32, typed as before. For a whole warp."""
        if self.rotary_class.interleaved:
            return self._neighbours(values, tables, position)
        return self._halves(values, tables, position)

    def _neighbours(
        self, values: cute.Tensor, tables: RotaryTables, position: Int32
    ) -> cute.Tensor:
        pairs = LANE_COLUMNS // 2
        begin = cute.arch.lane_idx() * pairs
        is_turned = begin < cute.size(tables.cos, mode=[1])
        cos, sin = self._angles(tables, position, cutlass.select_(is_turned, begin, 0), pairs)
        own = [Float32(values[i]) for i in range(LANE_COLUMNS)]
        turned = []
        for i in range(pairs):
            one, two = own[2 * i], own[2 * i + 1]
            turned += [one * cos[i] - two * sin[i], two * cos[i] + one * sin[i]]
        return self._chosen(is_turned, turned, own, values.element_type)

    def _halves(self, values: cute.Tensor, tables: RotaryTables, position: Int32) -> cute.Tensor:
        lane, lanes = cute.arch.lane_idx(), cute.size(tables.cos, mode=[1]) // LANE_COLUMNS
        is_first, is_turned = lane < lanes, lane < 2 * lanes
        of_half = cutlass.select_(is_first, lane, lane - lanes)
        partner = cutlass.select_(is_first, lane + lanes, of_half)
        partner = cutlass.select_(is_turned, partner, lane)
        begin = cutlass.select_(is_turned, of_half, 0) * LANE_COLUMNS
        cos, sin = self._angles(tables, position, begin, LANE_COLUMNS)
        words = cute.recast_tensor(values, Int32)
        received = cute.make_rmem_tensor_like(words)
        for word in range(cute.size(words)):
            received[word] = cute.arch.shuffle_sync(words[word], partner)
        others = cute.recast_tensor(received, values.element_type)
        own = [Float32(values[i]) for i in range(LANE_COLUMNS)]
        turned = []
        for i in range(LANE_COLUMNS):
            # The second of a pair has the first one's part added, the first the second's taken off.
            signed = cutlass.select_(is_first, -sin[i], sin[i])
            turned.append(own[i] * cos[i] + Float32(others[i]) * signed)
        return self._chosen(is_turned, turned, own, values.element_type)

    def _angles(
        self, tables: RotaryTables, position: Int32, begin: Int32, count: int
    ) -> tuple[list[Float32], list[Float32]]:
        """Cosines and sines of `count` columns, NaN at a position that the tables have not."""
        is_known = (position >= 0) & (position < cute.size(tables.cos, mode=[0]))
        row = cutlass.select_(is_known, position, Int32(0))
        found = []
        for table in (tables.cos, tables.sin):
            loaded = [Float32(table[row, begin + i]) for i in range(count)]
            unknown = Float32(math.nan)
            found.append([cutlass.select_(is_known, value, unknown) for value in loaded])
        return found[0], found[1]

    def _chosen(
        self, is_turned: Any, turned: list[Float32], own: list[Float32], element_type: Any
    ) -> cute.Tensor:
        rows = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        for i in range(LANE_COLUMNS):
            rows[i] = cutlass.select_(is_turned, turned[i], own[i])
        found = cute.make_rmem_tensor(LANE_COLUMNS, element_type)
        found.store(rows.load().to(element_type))
        return found


@dataclass(frozen=True)
class AppendConfig:
    """num_warps: of a CTA, each with a row and head."""

    num_warps: int = 4


class AppendTables(NamedTuple):
    """Tables of row addresses, None for what the problem class has not.

    lengths: (batch,) int32, rows in use. after: likewise, of the kernel's own: with the new ones.
    offsets: (batch + 1,) int32 of packed new rows. page_table: (batch, pages) int32. scales: of K
    and of V, (entries, heads_kv) float32, one of either where all have the same. rotary:
    `RotaryTables`.
    """

    lengths: Any
    after: Any
    offsets: Any
    page_table: Any
    scales: Any
    block_scales: Any
    rotary: Any


class AppendKernel:
    """Launch with `__call__`, under `cute.compile`."""

    def __init__(self, config: AppendConfig, problem_class: AppendClass) -> None:
        self.config = config
        self.problem_class = problem_class
        rotary = problem_class.rotary
        self.rotary_rows: Any = None if rotary is None else RotaryRows(rotary)

    @cute.jit
    def __call__(
        self,
        caches: tuple[cute.Tensor, cute.Tensor],
        rows: tuple[cute.Tensor, cute.Tensor],
        tables: AppendTables,
        stream: Any,
    ) -> None:
        """caches: K and V, (batch or pages, rows of one, heads_kv, 256).  rows: new ones of both,
        (batch, rows, heads_kv, 256), packed ones with a batch of 1.  Tensors of e4m3 are given as
        (.., 128) of a 16-bit type, two elements in each, of NVFP4 as (.., 64), their scales as
        (.., 8).  At least one row or query, and one
        sequence."""
        own = self.problem_class
        caches = tuple(by_sequence(t, 16, own.cache_columns) for t in caches)
        rows = tuple(by_sequence(t, 16, own.row_columns) for t in rows)
        if cutlass.const_expr(tables.block_scales is not None):
            of_blocks = HEAD_DIM // NVFP4_BLOCK // 2
            block_scales = tuple(by_sequence(t, 16, of_blocks) for t in tables.block_scales)
            tables = tables._replace(block_scales=block_scales)
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
    ) -> None:
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
    ) -> None:
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
        codes: list[Any] = []
        if cutlass.const_expr(self.problem_class.kv_dtype == NVFP4):
            # Lanes that share a block's scale exchange values, whether or not the row is stored.
            codes = [self._quantized(*pair) for pair in zip(loaded, scales, strict=True)]
        if fits:
            for number, cache in enumerate(caches):
                target = cache[place, None, head, to]
                if cutlass.const_expr(self.problem_class.kv_dtype == NVFP4):
                    of_blocks = tables.block_scales[number][place, None, head, to]
                    self._store_nvfp4(target, of_blocks, codes[number])
                else:
                    self._store(target, loaded[number], scales[number])

    @cute.jit
    def _turn_query(self, tables: AppendTables, index: Int32) -> None:
        """A row and head of the queries, by number."""
        rotary = tables.rotary
        row, head, entry = _place_of(index, rotary.queries)
        values = load_lane_columns(rotary.queries[row, None, head, entry], cute.arch.lane_idx())
        sequence, number = self._of_row(tables, rotary.offsets, row, entry)
        position = rotary.begins[sequence]
        if cutlass.const_expr(self.rotary_rows.rotary_class.ordered):
            position += number
        turned = self.rotary_rows.turned(values, rotary, position)
        to = lane_columns(rotary.rotated[row, None, head, entry], cute.arch.lane_idx())
        cute.autovec_copy(turned, to)

    def _load(self, row: cute.Tensor) -> cute.Tensor:
        columns = self.problem_class.row_columns // WARP_SIZE
        values = cute.make_rmem_tensor(columns, row.element_type)
        cute.autovec_copy(columns_of(row, cute.arch.lane_idx() * columns, columns), values)
        return values

    @cute.jit
    def _of_row(
        self, tables: AppendTables, offsets: Any, row: Int32, entry: Int32
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

    def _quantized(self, values: cute.Tensor, scale: Float32) -> tuple[Int32, Int32]:
        """Return (codes of this lane's columns, scales of two blocks, in lanes of a multiple of
        4)."""
        codes, block_scale = quantized([Float32(values[i]) for i in range(LANE_COLUMNS)], scale)
        following = cute.arch.shuffle_sync_bfly(block_scale, offset=BLOCK_LANES)
        return codes, block_scale | (following << 8)

    @cute.jit
    def _store_nvfp4(
        self, row: cute.Tensor, block_scales: cute.Tensor, own: tuple[Int32, Int32]
    ) -> None:
        lane, columns = cute.arch.lane_idx(), self.problem_class.cache_columns // WARP_SIZE
        words = cute.make_rmem_tensor(2, Int32)
        words[0], words[1] = own
        elements = cute.recast_tensor(words, row.element_type)
        for i in cutlass.range_constexpr(columns):
            row[lane * columns + i] = elements[i]
        if lane % (2 * BLOCK_LANES) == 0:
            block_scales[lane // (2 * BLOCK_LANES)] = elements[columns]

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
    def _count(self, tables: AppendTables, seqlen: Int32) -> None:
        """Count rows in use with new ones, a sequence per thread. seqlen: of unpacked new rows."""
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


# ---------------------------------------------------------------- NVFP4

CODE_BITS = 4


def quantized(values: list[Float32], scale: Float32) -> tuple[Int32, Int32]:
    """Return (codes, the block's scale in e4m3) of a lane's 8 values and those of its neighbour:
    `quantize.nvfp4` NOTE [NVFP4]. scale: the global one. For a whole warp."""
    largest = functools.reduce(_larger, values, Float32(0.0))
    largest = _larger(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    zero = Float32(0.0)
    # Saturates at 448; NaN stays NaN.
    block_scale = codes_of([largest / (Float32(E2M1_LARGEST) * scale), zero, zero, zero])
    step = _float_of(block_scale) * scale
    codes = Int32(0)
    for number, value in enumerate(values):
        quotient = cutlass.select_(step == zero, zero, value / step)
        codes = codes | (_code(quotient) << (CODE_BITS * number))
    return codes, block_scale


def _larger(first: Float32, second: Any) -> Float32:
    """The larger of a value and an absolute value, NaN if either is: max.NaN.f32 (PTX ISA
    9.7.3.13)."""
    return cute.arch.inline_ptx(
        "{.reg .f32 absolute;\nabs.f32 absolute, {$r1};\nmax.NaN.f32 {$w0}, {$r0}, absolute;}",
        write_only_types=[Float32],
        read_only_args=[first, Float32(second)],
    )


def _float_of(code: Int32) -> Float32:
    """The value of an e4m3 in the low byte of a word."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high, value, other;\n"
        ".reg .b32 pair;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 pair, low;\n"
        "mov.b32 {value, other}, pair;\n"
        "cvt.f32.f16 {$w0}, value;}",
        write_only_types=[Float32],
        read_only_args=[code],
    )


def _code(value: Float32) -> Int32:
    """The nearest e2m1, of NaN that of 0."""
    absolute, code = cute.math.absf(value), Int32(0)
    for midpoint, goes_up in E2M1_MIDPOINTS:
        exceeds = absolute >= midpoint if goes_up else absolute > midpoint
        code = code + cutlass.select_(exceeds, Int32(1), Int32(0))
    bits = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
    sign = cutlass.select_((value == value) & (bits < 0), Int32(1 << (CODE_BITS - 1)), Int32(0))
    return code | sign
