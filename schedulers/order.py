"""The order in which cluster tiles are worked on: linear index -> (block, head, batch).

One formula serves the host (Python integers) and the device (Int32 with precomputed fast
divisors), and every scheduler uses it, so a tile means the same under all of them.

The (batch, head) pairs, head fastest, are cut into sections of `section_heads` pairs.  Inside a
section the block is the slow index and the head the fast one::

    index -> section -> rank of the block (longest first) -> head in the section

* The heads of one KV group are neighbours, and a section is at least one group wide, so the
  clusters that run at the same time read the same K and V and find them in L2.
* With a causal or windowed mask the tiles of one section differ in length; the longest come
  first, so the short ones fill the end (longest-processing-time-first scheduling).  A section of
  one KV group gives the best reuse; a section of all heads gives the best balance;
  `section_heads_for` chooses the widest section whose K and V stay in L2.
* `num_blocks` and the number of pairs may be any positive numbers.  The last section takes in what
  is left over, so it is less than twice as wide as the others, unless `last_heads` requires more:
  in a narrower one the longest tiles of a few heads would begin when little is left to do beside
  them.

NOTE [blocks in a row].  Of packed sequences each would have blocks for the longest one, most of
them empty where lengths differ much.  The host does not know the lengths, which are on the device,
but their sum: where that gives fewer blocks, they are numbered one sequence after the other
(`PackedBlocks`), as one batch entry, and whoever decodes a tile looks its sequence up.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .carried import Carried


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """`condition ? if_true : if_false` for Python values and for device values."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return cutlass.select_(condition, if_true, if_false)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two integers, Python or DSL."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return cutlass.min(Int32(a), Int32(b))


def maximum(a: Any, b: Any) -> Any:
    """The larger of two integers, Python or DSL."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return cutlass.max(Int32(a), Int32(b))


#: Lanes of a warp, which look at as many sequences at once.
_LANES = 32


@dataclass(frozen=True)
class PackedBlocks(Carried):
    """Blocks of packed sequences, numbered one sequence after the other.

    offsets: (sequences + 1,) int32 where sequences begin; rows: of a block, or queries where heads
    are packed; is_used: whether blocks are numbered so, or each sequence has as many.  The numbers
    of sequence b begin at offsets[b] // rows + b: room for all of its blocks, and one number more
    than it needs at most, which is an empty block's.
    """

    offsets: Any
    rows: int
    is_used: Any = False

    CARRIED: ClassVar[tuple[str, ...]] = ("offsets", "is_used")

    def count(self, total_rows: Any, sequences: Any) -> Any:
        """Numbers in all, by the sum of the lengths."""
        return total_rows // self.rows + sequences

    def begin(self, sequence: Any) -> Any:
        """The number of a sequence's first block."""
        return self.offsets[sequence] // self.rows + sequence

    def locate(self, number: Any) -> tuple[Any, Any]:
        """Return (block in its sequence, sequence) of a number; on the device by all lanes of a
        warp."""
        if isinstance(number, int):
            sequences = range(len(self.offsets) - 1)
            sequence = bisect_right(sequences, number, key=self.begin) - 1
        else:
            sequence = _last_before(number, self)
        return number - self.begin(sequence), sequence


@cute.jit
def _last_before(number: Int32, blocks: PackedBlocks) -> Int32:
    """The last sequence whose numbers begin at `number` or before."""
    lane = cute.arch.lane_idx()
    first, count = Int32(0), Int32(cute.size(blocks.offsets) - 1)
    while count > 1:
        # Each lane looks at one of as many sequences, evenly spaced; these are in order.
        step = (count + _LANES - 1) // _LANES
        sequence = first + cutlass.min(lane * step, count - 1)
        is_before = blocks.begin(sequence) <= number and lane * step < count
        votes = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(is_before)), 1)
        left_out = (votes - 1) * step
        first, count = first + left_out, cutlass.min(count - left_out, step)
    return Int32(cute.arch.make_warp_uniform(first))


@dataclass(frozen=True)
class TileProblem:
    """The work of a launch, counted in cluster tiles: blocks of rows, heads, batch entries.

    `num_blocks` (of query rows or of keys, as the kernel's tiles are), `num_heads`, `num_batches`
    and `section_heads` are Python integers or Int32 values of the host function; the sizes of one
    launch must give fewer than 2**31 tiles.  `section_heads` is the width of a section in (batch,
    head) pairs, of all but the last (see the module's docstring).  `later_blocks_first` is static:
    the compiled kernel depends on it.  The longest tiles go first if it says whether the mask
    bounds the keys to the right of the diagonal, as a causal one does: then later rows see as many
    keys as earlier ones or more, with a bound on the left alone as many or fewer.  packed: of
    sequences whose blocks may be in a row (`in_a_row`).  last_heads: no fewer pairs in the last
    section, as far as there are so many.

    Raises ValueError for Python integers below 1.
    """

    num_blocks: Any
    num_heads: Any
    num_batches: Any
    section_heads: Any = 1
    later_blocks_first: bool = False
    packed: PackedBlocks | None = None
    last_heads: Any = 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_heads", "num_batches", "section_heads", "last_heads"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {value}; "
                    "a problem without tiles must not be launched"
                )
        if self.python_integers and self.num_tiles >= 2**31:
            raise ValueError(f"{self.num_tiles} tiles in one launch; the limit is 2**31 - 1")

    @property
    def python_integers(self) -> bool:
        """Return True if every size is a Python integer."""
        sizes = (self.num_blocks, self.num_heads, self.num_batches, self.section_heads)
        return all(isinstance(size, int) for size in (*sizes, self.last_heads))

    @property
    def num_tiles(self) -> Any:
        return self.num_blocks * self.num_heads * self.num_batches

    def in_a_row(self, packed: PackedBlocks, total_rows: Any) -> TileProblem:
        """Return the problem with the blocks of its packed sequences in a row if these are fewer:
        NOTE [blocks in a row].  total_rows: of all sequences."""
        count = packed.count(total_rows, self.num_batches)
        blocks, batches, one = self.num_blocks, self.num_batches, 1
        is_fewer = is_used = count < blocks * batches
        if not isinstance(is_fewer, bool):
            is_used, one = Int32(is_fewer), Int32(1)
        return replace(
            self,
            packed=replace(packed, is_used=is_used),
            num_blocks=select(is_fewer, count, blocks),
            num_batches=select(is_fewer, one, batches),
        )

    def order(self) -> TileOrder:
        """The order of the tiles: with Python integers for Python sizes, else for the device. In
        the second case it must be called in the host function (under `cute.jit`), where the fast
        divisors are computed once per launch, and the result is handed to the kernel."""
        pairs = self.num_heads * self.num_batches
        width = minimum(self.section_heads, pairs)
        least = maximum(width, minimum(self.last_heads, pairs))
        last_width = least + (pairs - least) % width
        section_tiles, last_pair = width * self.num_blocks, pairs - last_width
        divisors = (section_tiles, width, last_width, self.num_heads)
        if not self.python_integers:
            divisors = tuple(cute.fast_divmod_create_divisor_v2(Int32(d)) for d in divisors)
        sizes = (self.num_tiles, self.num_blocks, last_pair * self.num_blocks, last_pair, width)
        if not self.python_integers:
            sizes = tuple(Int32(size) for size in sizes)
        return TileOrder(*sizes, *divisors, self.later_blocks_first, self.packed)

    def device_order(self) -> TileOrder:
        """`order` for the device even if all sizes are Python integers (compile-time shapes)."""
        return TileProblem(
            Int32(self.num_blocks),
            Int32(self.num_heads),
            Int32(self.num_batches),
            Int32(self.section_heads),
            self.later_blocks_first,
            self.packed,
            Int32(self.last_heads),
        ).order()


@dataclass(frozen=True)
class TileOrder(Carried):
    """The precomputed parameters of `tile_coordinates`; a kernel parameter on the device.

    Made by `TileProblem.order`.  last_tile, last_pair: the first of the last section.  The `per_*`
    fields are divisors: Python integers on the host, `cute.FastDivmodDivisorV2` on the device, so
    that decoding costs no integer division.
    """

    num_tiles: Any
    num_blocks: Any
    last_tile: Any
    last_pair: Any
    section_heads: Any
    per_section: Any
    per_block: Any
    per_block_of_last_section: Any
    per_batch: Any
    later_blocks_first: bool
    packed: PackedBlocks | None = None

    CARRIED = (
        "num_tiles",
        "num_blocks",
        "last_tile",
        "last_pair",
        "section_heads",
        "per_section",
        "per_block",
        "per_block_of_last_section",
        "per_batch",
        "packed",
    )


def section_heads_for(
    *,
    num_heads_per_kv: int,
    num_pairs: Any,
    kv_bytes_per_head: Any,
    l2_bytes: Any,
    unequal_lengths: bool,
    least: Any = 1,
) -> Any:
    """Return the number of (batch, head) pairs of one section.

    `kv_bytes_per_head` is the size of K and V of one KV head of one batch entry, of packed
    sequences the longest; `l2_bytes` the part of the L2 cache they may fill, `num_pairs` query
    heads times batches.  With tiles of equal length one KV group is the best section.  With unequal
    lengths (causal, windowed, ragged) the widest multiple of a KV group whose K and V fit gives the
    best balance. least: no fewer pairs than that, rounded up to whole groups, as far as there are
    so many. Integers may be Python integers or Int32 values of the host function.
    """
    section = _section_in_l2(
        num_heads_per_kv, num_pairs, kv_bytes_per_head, l2_bytes, unequal_lengths
    )
    if isinstance(least, int) and least <= 1:
        return section
    whole = (least + num_heads_per_kv - 1) // num_heads_per_kv * num_heads_per_kv
    return maximum(section, minimum(whole, num_pairs))


def _section_in_l2(
    num_heads_per_kv: int,
    num_pairs: Any,
    kv_bytes_per_head: Any,
    l2_bytes: Any,
    unequal_lengths: bool,
) -> Any:
    if not unequal_lengths:
        return num_heads_per_kv
    if isinstance(kv_bytes_per_head, int) and isinstance(num_pairs, int):
        groups = max(1, l2_bytes // max(1, kv_bytes_per_head))
        return min(groups * num_heads_per_kv, max(num_pairs, num_heads_per_kv))
    groups = cutlass.max(Int32(l2_bytes) // cutlass.max(Int32(kv_bytes_per_head), 1), 1)
    limit = cutlass.max(Int32(num_pairs), num_heads_per_kv)
    # Compared as group counts: groups * num_heads_per_kv could pass 2**31.
    return minimum(groups, (limit + num_heads_per_kv - 1) // num_heads_per_kv) * num_heads_per_kv
