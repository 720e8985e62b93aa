"""Row ranges of the batch entries: dense, padded or packed (varlen) sequences; and the views of a
call's tensors in which kernels address their rows.

NOTE [empty tiles].  A TMA load that lies wholly outside its tensor touches the tensor's first byte
(docs/silicon.md, `outside-load`), and a `clipped_view` begins below the memory of its tensor, where
nothing need be mapped.  So a half of a tile that is beyond the last row of its sequence loads that
row, once, and zeros.  It is masked, or nobody stores what comes of it, as with zeros alone: its
keys lie beyond the sequence's end, its queries have an infinite LSE in the backward.  Without any
row in the sequence it is the row before, or the tensor's first.  Stores wholly outside touch
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..limits import HEAD_DIM
from ..plan.edges import SharedByReference

#: The rows of each sequence begin at a multiple of this in tensors with padded rows: the query rows
#: of a CTA pair.
PADDING = 256


#: Fields of `SequenceTensors` that a call with gradients may not have.
PAGE_TABLE, SCHEDULER_METADATA, TREE_WORDS = "page_table", "scheduler_metadata", "tree_words"
#: Field that kernels of gradients alone read.
DS_BEGINS = "ds_begins"
#: Fields that say where the keys of a sequence lie in a cache.
CACHE_BATCH_IDX, CACHE_LEFTPAD = "cache_batch_idx", "cache_leftpad"


class SequenceTensors(NamedTuple):
    """Tensors that describe ragged sequences, and which keys queries meet: int32 unless a field
    says otherwise, None where not given. Kernels take them in this order."""

    #: (batch + 1,) offsets of packed sequences in (total, heads, 256).
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    #: (batch,) rows in use of each sequence, at most its length.
    seqused_q: Any = None
    seqused_k: Any = None
    #: (batch, most pages of a sequence) numbers of the pages of keys.
    page_table: Any = None
    #: KV splits of each sequence (`rows.scheduler_metadata`).
    scheduler_metadata: Any = None
    #: Of a block mask (`block_mask`), which no others go with: (1 or batch, 1 or heads, tiles of
    #: queries, 1 + tiles of keys, 4), and (tiles of bits, 128, 4).
    mask_steps: Any = None
    mask_bits: Any = None
    #: The same for gradients (`backward.block_mask`): (1 or batch, 1 or heads, blocks of keys and
    #: of queries, 1 + most tiles, 4), and (tiles of bits, 128, 4).
    mask_blocks: Any = None
    mask_key_bits: Any = None
    #: (1 or batch, most queries) which of the last keys each query sees; int64 for trees of more
    #: than 32 nodes (`masking`, NOTE [trees]).
    tree_words: Any = None
    #: (batch,) of packed sequences the number of the first tile of dS (`backward.ds_tiles`, NOTE
    #: [units of dS]).
    ds_begins: Any = None
    #: (batch,) the batch entry of K and V that holds the keys of each sequence.
    cache_batch_idx: Any = None
    #: (batch,) how many rows of that entry, or of the sequence's pages, lie before the first key;
    #: seqused_k counts them, too.
    cache_leftpad: Any = None

    @property
    def are_unequal(self) -> bool:
        """Return True if sequences have lengths or places of their own."""
        own = (
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqused_q,
            self.seqused_k,
            self.cache_batch_idx,
            self.cache_leftpad,
        )
        return any(tensor is not None for tensor in own)

    def num_batches(self, q: cute.Tensor) -> Any:
        for cu_seqlens in (self.cu_seqlens_q, self.cu_seqlens_k):
            if cu_seqlens is not None:
                return cute.size(cu_seqlens) - 1
        return cute.size(q, mode=[3])


def cache_entries(problem_class: Any, tensors: Any) -> Any:
    """Batch entries of K, clipped, where cache_batch_idx chooses among them; else None."""
    if CACHE_BATCH_IDX not in problem_class.ragged:
        return None
    return cute.size(tensors.k.tensor, mode=[4])


@dataclass(frozen=True)
class Sequence:
    """The rows of one batch entry on one side: [offset, offset + length) of `batch`."""

    offset: Int32
    length: Int32
    batch: Int32


class FirstPage(NamedTuple):
    """Origin of a sequence's keys in KV tiles: `forward.pages`, NOTE [left padding].

    row: the row of the sequence's pages that is key 0.  hidden: keys before the first one there is.
    """

    row: Int32
    hidden: Int32

    @classmethod
    def of(cls, first_row: Int32, length: Int32, page_size: int) -> FirstPage:
        """Return that of `length` keys, the first of which lies in a row of the pages."""
        begin = first_row // page_size * page_size
        within = first_row - begin + length <= page_size
        row = cutlass.select_(within, first_row, begin)
        return cls(row, first_row - row)


#: Place of a tile for TMA: (its sequence or `PagedTile`, first row in it, column block, head).
TilePlace = tuple[Any, Any, Any, Any]


@dataclass(frozen=True)
class Sequences(SharedByReference):
    """All batch entries.  seqlen_q, seqlen_k: Int32 lengths of dense or padded tensors; seqlen_k
    of keys in pages: of all pages that a sequence may have.  entries: of K and V, where
    cache_batch_idx chooses among them: an entry that there is not is the nearest one."""

    tensors: SequenceTensors
    seqlen_q: Int32
    seqlen_k: Int32
    entries: Any = field(default=None, kw_only=True)

    def query(self, batch: Int32) -> Sequence:
        tensors = self.tensors
        return self._sequence(batch, tensors.cu_seqlens_q, tensors.seqused_q, self.seqlen_q)

    def key(self, batch: Int32) -> Sequence:
        tensors = self.tensors
        rows = self._sequence(batch, tensors.cu_seqlens_k, tensors.seqused_k, self.seqlen_k)
        entry, before = rows.batch, Int32(0)
        if cutlass.const_expr(tensors.cache_batch_idx is not None):
            entry = cutlass.min(tensors.cache_batch_idx[batch], Int32(self.entries) - 1)
            entry = cutlass.max(entry, 0)
        if cutlass.const_expr(tensors.cache_leftpad is not None):
            before = cutlass.max(cutlass.min(tensors.cache_leftpad[batch], rows.length), 0)
        return Sequence(rows.offset + before, rows.length - before, entry)

    def padded_query_offset(self, batch: Int32) -> Int32:
        """Return the first row of a batch entry in tensors with padded query rows (see
        `run.backward_arguments.padded_rows`)."""
        cu_seqlens = self.tensors.cu_seqlens_q
        if cutlass.const_expr(cu_seqlens is None):
            return batch * ((self.seqlen_q + (PADDING - 1)) // PADDING * PADDING)
        offset = cutlass.max(cutlass.min(cu_seqlens[batch], self.seqlen_q), 0)
        return (offset + batch * PADDING) // PADDING * PADDING

    def of_batch(self, batch: Int32) -> Sequences:
        """Return the sequences for one batch entry, read from memory here, once; or `self`."""
        if not self.tensors.are_unequal:
            return self
        rows = self.query(batch), self.key(batch)
        sizes = self.seqlen_q, self.seqlen_k
        return _OneSequence(self.tensors, *sizes, rows, self.padded_query_offset(batch))

    @staticmethod
    def _sequence(batch: Int32, cu_seqlens: Any, used: Any, length: Int32) -> Sequence:
        offset, in_tensor = Int32(0), batch
        if cutlass.const_expr(cu_seqlens is not None):
            # Within the tensor, whatever the offsets are: `tail_rows`, NOTE [wrong lengths].
            in_tensor = Int32(0)
            offset = cutlass.max(cutlass.min(cu_seqlens[batch], length), 0)
            length = cutlass.max(cutlass.min(cu_seqlens[batch + 1], length) - offset, 0)
        if cutlass.const_expr(used is not None):
            length = cutlass.max(cutlass.min(used[batch], length), 0)
        return Sequence(offset, length, in_tensor)


@dataclass(frozen=True)
class _OneSequence(Sequences):
    """See `Sequences.of_batch`.  rows: of queries, of keys; padded_offset: of the queries."""

    rows: tuple[Sequence, Sequence]
    padded_offset: Int32

    def query(self, batch: Int32) -> Sequence:
        return self.rows[0]

    def key(self, batch: Int32) -> Sequence:
        return self.rows[1]

    def padded_query_offset(self, batch: Int32) -> Int32:
        return self.padded_offset


def clipped_view(tensor: cute.Tensor, rows: int) -> cute.Tensor:
    """A view of (seqlen, 256, heads, batch) whose tiles TMA can clip at any row.

    The row dimension appears twice, both with its stride: (rows, 256, end, heads, batch), and the
    base lies `rows` rows below the tensor's.  The tile at coordinates (rows - n, ., end, ., .)
    then begins n rows before row `end`, and TMA's bound on the first dimension ends it there:
    n rows are moved, the others of its box are filled with zeros, or not stored.

    With packed heads, ((packed, seqlen), 256, heads, batch), the same holds for the queries among
    the rows: ((packed, rows / packed), 256, end, heads, 1). A descriptor has five dimensions, so
    the batch must be 1.
    """
    seqlen, columns, heads, batch = tensor.shape
    stride = tensor.stride
    if cutlass.const_expr(isinstance(seqlen, tuple)):
        (packed, seqlen), (head, row) = seqlen, stride[0]
        queries = rows // packed
        layout = cute.make_layout(
            ((packed, queries), columns, seqlen + 1, heads, 1),
            stride=((head, row), stride[1], row, stride[2], 0),
        )
        return cute.make_tensor((tensor.iterator - queries * row).align(16), layout)
    layout = cute.make_layout(
        (rows, columns, seqlen + 1, heads, batch),
        stride=(stride[0], stride[1], stride[0], stride[2], stride[3]),
    )
    return cute.make_tensor((tensor.iterator - rows * stride[0]).align(16), layout)


def clipped_at_start(tensor: cute.Tensor, rows: int) -> cute.Tensor:
    """A view of (seqlen, 256, heads, batch) for loads that TMA clips at their start.

    The row dimension appears twice, both with its stride: (rows, 256, first, heads, batch).  The
    tile at coordinates (-n, ., first, ., .) fills n rows of its box with zeros, then loads row
    `first` and those that follow.  A load with a negative coordinate touches the first byte of its
    tensor (docs/silicon.md, `outside-load`), so the base is that of the tensor: a `clipped_view`
    has none that is mapped.
    """
    seqlen, columns, heads, batch = tensor.shape
    stride = tensor.stride
    layout = cute.make_layout(
        (rows, columns, seqlen, heads, batch),
        stride=(stride[0], stride[1], stride[0], stride[2], stride[3]),
    )
    return cute.make_tensor(tensor.iterator, layout)


def tma_tile(
    tensor: cute.Tensor, shape: tuple[int, int], place: TilePlace, packed: int = 1, least: int = 0
) -> cute.Tensor:
    """The coordinate tensor of one tile for TMA.

    tensor: TMA coordinates of (seqlen, 256, heads, batch) or of a `clipped_view` with shape[0]
    rows.  shape: rows and columns of the tile.  place: (sequence, first row in it, column block,
    head).  packed: heads of which the tensor's and the tile's rows consist; the first row and the
    head are then the first query and the group of heads.  least: rows of a `clipped_view` that a
    tile has at least, 0 or 1 (NOTE [empty tiles]).
    """
    sequence, first_row, column_block, head = place
    rows, columns = shape
    rows //= packed
    if cutlass.const_expr(cute.rank(tensor) == 4):
        plane, start = tensor[None, None, head, sequence.batch], first_row
    else:
        end, start = clip(sequence, first_row, rows, least)
        plane = tensor[None, None, end, head, sequence.batch]
    if cutlass.const_expr(packed > 1):
        moved = cute.domain_offset(((0, start), 0), plane)
        return cute.local_tile(moved, ((packed, rows), columns), (0, column_block))
    return cute.local_tile(cute.domain_offset((start, 0), plane), shape, (0, column_block))


def clip(sequence: Sequence, first_row: Any, rows: int, least: int = 0) -> tuple[Any, Any]:
    """Return (end, start) of a tile of `rows` in a `clipped_view`: its coordinates in the third and
    first dimension, those of the row behind its last one and of how many rows of it are left out.
    first_row: in the sequence; least: see `tma_tile`."""
    count = cutlass.max(cutlass.min(sequence.length - first_row, rows), least)
    end = sequence.offset + first_row + count
    if cutlass.const_expr(least > 0):
        last = sequence.offset + cutlass.min(first_row + count, sequence.length)
        end = cutlass.max(last, 1)
    return end, rows - count


def clipped_box(
    tensor: cute.Tensor, shape: tuple[int, int], place: tuple[Any, Any, Any, Int32, Int32]
) -> cute.Tensor:
    """The coordinate tensor of a tile of a `clipped_view`.  place: (start, column block, end, head,
    batch), start and end by `clip`."""
    start, column_block, end, head, batch = place
    plane = tensor[None, None, end, head, batch]
    return cute.local_tile(cute.domain_offset((start, 0), plane), shape, (0, column_block))


def by_sequence(
    tensor: cute.Tensor, alignment: int | None = None, columns: int = HEAD_DIM
) -> cute.Tensor:
    """View (batch, seqlen, heads, 256) as (seqlen, 256, heads, batch). columns: 256, or 128 of a
    16-bit type for as many bytes. alignment: in bytes, of the base and every stride; by default 8
    elements, which is TMA's rule for 16 bits and that of 256-bit stores for 32 bits."""
    # 8 elements have as many bytes as an element has bits.
    width = tensor.element_type.width
    alignment = alignment or width
    batch, rows, heads, _ = tensor.shape
    strides = [cute.assume(tensor.stride[i], divby=alignment * 8 // width) for i in range(3)]
    layout = cute.make_layout(
        (rows, columns, heads, batch), stride=(strides[1], 1, strides[2], strides[0])
    )
    return cute.make_tensor(tensor.iterator.align(alignment), layout)


def by_packed_heads(tensor: cute.Tensor, packed: int, rows: int) -> cute.Tensor:
    """View (seqlen, 256, heads, batch) as ((packed, seqlen), 256, heads / packed, batch): the heads
    of a group change fastest along the rows, then the queries. rows: of a tile that a query takes,
    `packed` or more: TMA fills those past the heads with zeros."""
    s, d, h, b = tensor.shape
    row, column, head, batch = tensor.stride
    # A box larger than a static extent is none to CuTe.
    extent = packed if rows == packed else Int32(packed)
    layout = cute.make_layout(
        ((extent, s), d, h // packed, b), stride=((head, row), column, head * packed, batch)
    )
    return cute.make_tensor(tensor.iterator, layout)


def columns_of(row: cute.Tensor, start: Any, columns: int) -> cute.Tensor:
    """`columns` consecutive elements of a row; start: a multiple of them."""
    return cute.logical_divide(row, cute.make_layout(columns))[None, start // columns]


def scale_of(scales: cute.Tensor, entry: Int32, head: Int32) -> Float32:
    """Return the scale of an entry and a KV head; where all have the same, that."""
    entries, heads = (cute.size(scales, mode=[mode]) for mode in range(2))
    return scales[cutlass.min(entry, entries - 1), cutlass.min(head, heads - 1)]
