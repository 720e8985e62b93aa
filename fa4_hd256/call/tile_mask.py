"""A mask by tiles of 128 queries x 128 keys: which are empty, which are full, and bits of the rest.

Kernels read it as lists of steps (`kernels.mask.block_mask`), which are made here for the tiles of
each kernel, once for a mask. All of it happens on the mask's device, without a loop over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from ..gpus.devices import is_captured
from ..kernels.backward.block_mask import FIRST, NUMBER, READ, WRITTEN
from ..kernels.backward.ds_tiles import BLOCK_TILES, count_blocks
from ..kernels.mask.block_mask import BIT_WORDS, FULL, MASK_TILE, NOTHING, STEP_WORDS
from ..kernels.mask.masking import WORD_BITS
from .process import is_lasting

#: Kinds of tiles: no query sees a key; some may; each sees all.
EMPTY, PARTIAL, WHOLE = 0, 1, 2
#: In place of a tile of bits: the tile is empty; and a function is asked, where there are no bits.
ABSENT, ASKED = -2, 1
#: Tiles up to which a mask on a GPU has bits for each, so that nobody waits for their number: 64
#: MiB.
MOST_TILES = 1 << 15
#: Tiles that are evaluated at once: on a GPU more, where the host would else take longer for some
#: forty operations than the GPU does. A mask_mod's numbers are int64: 128 KiB a tile.
CHUNK, CHUNK_ON_GPU = 256, 2048
#: Numbers of tiles of bits, and of dS, are rounded up to it, since a call's key has them.
ROUNDED_TILES = 64
#: That of tiles of dS also to a power of two by so many bits shorter: 6 % at most.
ROUNDED_BITS = 5

#: (batch entry, head, query, key) of tiles, int64 of shapes (n, 1, 1), (n, 1, 1), (n, 128, 1) and
#: (n, 1, 128), all of them there -> which are seen, bool, that broadcasts to (n, 128, 128).
Evaluate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rounded_tiles(count: int) -> int:
    """Room for so many tiles of dS: rounded up, so that calls of about as many are alike."""
    unit = max(ROUNDED_TILES, 1 << max(count.bit_length() - ROUNDED_BITS, 0))
    return -(-max(count, 1) // unit) * unit


def count_mask_tiles(rows: int) -> int:
    return -(-rows // MASK_TILE)


Made = TypeVar("Made", "TileMask", torch.Tensor)


class TileMask:
    """Mask for `block_mask=`; made by the functions of `fa4_hd256.masks`.

    lengths: (seqlen_q, seqlen_k). tiles: (1 or batch, 1 or heads, tiles of queries, tiles of keys)
    int32: `ABSENT`, `FULL`, or the number of a tile of bits. bits: (tiles of bits, 128, 4) int32,
    see `kernels.mask.block_mask`; None where a mask_mod takes their place, whose tiles are `ASKED`.
    of_first: whether these are bits of the first batch entry, and of the first head, alone, and no
    others may read them, although `tiles` has one of these.

    It is never written to again: call after call may read it, also from other streams once what
    made it is done.
    """

    def __init__(
        self,
        lengths: tuple[int, int],
        tiles: torch.Tensor,
        bits: torch.Tensor | None,
        of_first: tuple[bool, bool] = (False, False),
    ) -> None:
        self.lengths, self.tiles, self.bits, self.of_first = lengths, tiles, bits, of_first
        self._made: dict[Any, torch.Tensor] = {}
        #: Its tiles without bits, and its parts.
        self._masks: dict[Any, TileMask] = {}
        self._units: dict[int, tuple[tuple[bool, ...], ...]] = {}
        #: Made of the bits, and shared with masks that have the same.
        self._of_bits: dict[str, torch.Tensor] = {}
        #: Tiles of dS of a query head in a sequence, at most: `count_listed`; 0 where unknown.
        self.listed_tiles = 0
        # Each replay of a graph makes again what its capture makes.
        self._is_captured = is_captured(tiles.device)

    @classmethod
    def of(
        cls,
        lengths: tuple[int, int],
        kinds: torch.Tensor,
        evaluate: Evaluate,
        of_first: tuple[bool, bool] = (False, False),
    ) -> TileMask:
        """Make a mask from the kinds of tiles, (1 or batch, 1 or heads, tiles of queries, tiles of
        keys).

        Tiles that turn out to be full, or empty, when they are evaluated, are so. Waits for a GPU
        only if there are more than `MOST_TILES`, to learn how many are partial; raises RuntimeError
        then in the capture of a CUDA graph.
        """
        kinds = _with_end(lengths, kinds)
        is_partial = (kinds == PARTIAL).flatten()
        places = _places(is_partial)
        bits = _no_bits(len(places), kinds.device)
        tiles = torch.full_like(kinds, ABSENT, dtype=torch.int32)
        tiles.masked_fill_(kinds == WHOLE, FULL)
        flat = tiles.view(-1)
        for start, chosen, seen in _evaluated(lengths, kinds.shape, places, evaluate):
            numbers = torch.arange(start, start + len(chosen), device=kinds.device) + 1
            bits[start + 1 : start + 1 + len(chosen)] = _packed(seen)
            whole, some = seen.flatten(1).all(1), seen.flatten(1).any(1)
            decided = torch.where(whole, FULL, torch.where(some, numbers, ABSENT)).int()
            flat[chosen] = torch.where(is_partial[chosen], decided, flat[chosen])
        return cls(lengths, tiles, bits, of_first)

    @classmethod
    def of_words(cls, lengths: tuple[int, int], words: torch.Tensor) -> TileMask:
        """Make a mask from packed bits, (1 or batch, 1 or heads, seqlen_q, words) int32: bit j of
        word w is key 32 w + j; bits behind the last key count for nothing. Tiles are copied, none
        is evaluated. Waits for a GPU, and raises, as `of` does."""
        by_tiles = _by_tiles(lengths, words)
        some, whole = ((by_tiles != 0).any(5).any(4), (by_tiles == -1).all(5).all(4))
        is_partial = (some & ~whole).flatten()
        places = _places(is_partial)
        bits = _no_bits(len(places), words.device)
        bits[1 : 1 + len(places)] = by_tiles.flatten(0, 3)[places]
        numbers = torch.zeros_like(is_partial, dtype=torch.int32)
        numbers[places] = torch.arange(1, 1 + len(places), dtype=torch.int32, device=words.device)
        tiles = torch.where(whole, FULL, torch.where(some, numbers.view_as(some), ABSENT))
        return cls(lengths, tiles.int(), bits)

    @classmethod
    def of_kinds(cls, lengths: tuple[int, int], kinds: torch.Tensor) -> TileMask:
        """Make a mask without bits from the kinds of tiles."""
        kinds = _with_end(lengths, kinds)
        tiles = torch.full_like(kinds, ABSENT, dtype=torch.int32)
        tiles.masked_fill_(kinds == PARTIAL, ASKED).masked_fill_(kinds == WHOLE, FULL)
        return cls(lengths, tiles, None)

    def with_words(self, words: torch.Tensor) -> TileMask:
        """Return the mask of this one's keys whose bits are set in words, as `of_words` has them.
        Its lists of tiles are those of `in_bits`, made once; a full or an empty tile stays listed.
        """
        whole = self.in_bits
        tile = self._once(self._made, "places", lambda: _places_of_bits(whole))
        by_tiles = _by_tiles(self.lengths, words)
        batch, head, q_tile, kv_tile = tile.unbind()
        if words.shape[0] == 1:
            batch = batch * 0
        if words.shape[1] == 1:
            head = head * 0
        assert whole.bits is not None
        bits = by_tiles[batch, head, q_tile, kv_tile].bitwise_and_(whole.bits)
        found = TileMask(self.lengths, whole.tiles, bits, self.of_first)
        found._made, found._units = whole._made, whole._units
        found.listed_tiles = whole.listed_tiles
        return found

    @property
    def in_bits(self) -> TileMask:
        return self._once(self._masks, "in bits", self._in_bits)

    def _in_bits(self) -> TileMask:
        assert self.bits is not None
        is_listed, flat = (self.tiles != ABSENT).flatten(), self.tiles.flatten()
        places = _places(is_listed)
        bits, count = _no_bits(len(places), self.device), len(places)
        bits[1 : 1 + count] = self.bits[flat[places].clamp(min=NOTHING).long()]
        bits[1 : 1 + count].masked_fill_((flat[places] == FULL)[:, None, None], -1)
        numbers = torch.full_like(flat, ABSENT)
        numbers[places] = torch.arange(1, 1 + count, dtype=flat.dtype, device=self.device)
        tiles = torch.where(is_listed, numbers, ABSENT).view_as(self.tiles)
        return TileMask(self.lengths, tiles, bits, self.of_first)

    @property
    def lists(self) -> TileMask:
        if self.bits is None:
            return self
        return self._once(
            self._masks, "lists", lambda: TileMask(self.lengths, self.tiles.clamp(max=ASKED), None)
        )

    def _once(self, cache: dict[Any, Made], kind: Any, make: Callable[[], Made]) -> Made:
        """Return what `make` makes of this mask; once, where that may serve all its calls."""
        cached = cache.get(kind)
        if cached is None:
            cached = make()
            tensor = cached.tiles if isinstance(cached, TileMask) else cached
            if is_lasting(tensor, self._is_captured):
                cache[kind] = cached
        return cached

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    def __repr__(self) -> str:
        batch, heads = self.tiles.shape[:2]
        return (
            f"{type(self).__name__}(batch {batch}, heads {heads}, {self.lengths[0]} queries, "
            f"{self.lengths[1]} keys, {self.device})"
        )

    def dense(self) -> torch.Tensor:
        """The mask as a bool tensor (1 or batch, 1 or heads, seqlen_q, seqlen_k). Raises ValueError
        where there are no bits."""
        if self.bits is None:
            raise ValueError("this mask has no bits: a mask_mod says what is seen")
        columns = torch.arange(WORD_BITS, dtype=torch.int32, device=self.device)
        seen = self.bits[self.tiles.clamp(min=NOTHING).long()][..., None] >> columns & 1
        seen = seen.bool().flatten(-2) | (self.tiles == FULL)[..., None, None]
        whole = seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return whole[:, :, : self.lengths[0], : self.lengths[1]]

    def sees(
        self, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """An `Evaluate` of this mask, which has bits."""
        assert self.bits is not None
        number = self.tiles[batch, head, query // MASK_TILE, key // MASK_TILE]
        words = self.bits[
            number.clamp(min=NOTHING).long(), query % MASK_TILE, key % MASK_TILE // WORD_BITS
        ]
        return ((words >> key % WORD_BITS & 1) != 0) & (number != ABSENT) | (number == FULL)

    def steps(self, halves: int) -> torch.Tensor:
        """The lists of a kernel whose tiles have `halves` x 128 queries and whose steps have 128
        keys: (1 or batch, 1 or heads, tiles of queries, 1 + tiles of keys, 4) int32."""
        return self._once(self._made, halves, lambda: _steps(self.tiles, halves))

    @property
    def blocks(self) -> torch.Tensor:
        """The lists of dS (`kernels.backward.block_mask`): (1 or batch, 1 or heads, blocks of keys
        and of queries, 1 + most tiles, 4) int32."""
        return self._once(self._made, "blocks", lambda: _blocks(self.tiles))

    @property
    def kinds(self) -> torch.Tensor:
        """Return the kinds of tiles, int8 like `tiles`; those with bits count as partial."""
        kinds = torch.where(self.tiles == ABSENT, EMPTY, PARTIAL)
        return torch.where(self.tiles == FULL, WHOLE, kinds).to(torch.int8)

    @property
    def is_large(self) -> bool:
        """Return True if a device sync (to learn the exact tile count) is cheaper than allocating
        for the worst case."""
        return self.tiles.numel() > MOST_TILES

    @property
    def is_countable(self) -> bool:
        """Return True if `count_listed` counts: not in a capture; on a GPU large masks alone."""
        return not self._is_captured and (self.device.type == "cpu" or self.is_large)

    def count_listed(self) -> None:
        """Learn `listed_tiles`, rounded up, where that `is_countable`; waits for a GPU once."""
        if self.listed_tiles or not self.is_countable:
            return
        written = self.blocks[:, 0, : count_blocks(self.lengths[1]), 0, WRITTEN]
        count = BLOCK_TILES * int(written.sum(-1).max())
        self.listed_tiles = rounded_tiles(count)

    @property
    def key_bits(self) -> torch.Tensor | None:
        if self.bits is None:
            return None
        bits = self.bits
        return self._once(self._of_bits, "key_bits", lambda: _exchanged(bits))

    def part(self, queries: range, keys: range, heads: range) -> TileMask:
        """The mask of some queries, keys and heads; made once. Where tiles of the part are tiles of
        this mask, they share their bits; else those that are partial are evaluated again. Without
        bits a tile that meets several kinds is partial then."""
        heads = heads if self.tiles.shape[1] > 1 else range(1)
        place = queries, keys, heads
        return self._once(self._masks, place, lambda: self._part(*place))

    def _part(self, queries: range, keys: range, heads: range) -> TileMask:
        lengths = len(queries), len(keys)
        is_aligned = all(
            rows.start % MASK_TILE == 0 and (rows.stop % MASK_TILE == 0 or rows.stop == length)
            for rows, length in zip((queries, keys), self.lengths, strict=True)
        )
        if is_aligned:
            tiles_of_part = self.met(queries, keys)[:, heads.start : heads.stop].contiguous()
            part = TileMask(lengths, tiles_of_part, self.bits, self.of_first)
            part._of_bits = self._of_bits
            return part
        kinds = self.kinds[:, heads.start : heads.stop]
        for dimension, rows in ((2, queries), (3, keys)):
            kinds = _kinds_from(kinds, dimension, rows)
        if self.bits is None:
            return TileMask.of_kinds(lengths, kinds)

        def evaluate(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            return self.sees(batch, head + heads.start, query + queries.start, key + keys.start)

        return TileMask.of(lengths, kinds, evaluate, self.of_first)

    def met(self, queries: range, keys: range) -> torch.Tensor:
        (top, bottom), (left, right) = (
            (rows.start // MASK_TILE, count_mask_tiles(rows.stop)) for rows in (queries, keys)
        )
        return self.tiles[:, :, top:bottom, left:right]

    def units(self, rows: int) -> tuple[tuple[bool, ...], ...]:
        """Return which `rows` queries and `rows` keys meet a tile that is not empty. Waits once."""
        if rows not in self._units:
            is_met = (self.tiles != ABSENT).flatten(0, 1).any(0).cpu()
            for length in self.lengths:
                is_met = torch.stack(
                    [
                        is_met[first // MASK_TILE : count_mask_tiles(first + rows)].any(0)
                        for first in range(0, length, rows)
                    ]
                ).T
            self._units[rows] = tuple(map(tuple, is_met.tolist()))
        return self._units[rows]


def _by_tiles(lengths: tuple[int, int], words: torch.Tensor) -> torch.Tensor:
    """Return a view of packed bits, (1 or batch, 1 or heads, tiles of queries, tiles of keys, 128,
    BIT_WORDS), padded: rows past the end are as the last one, so that they leave a full tile full,
    and no key is seen there."""
    q_tiles, kv_tiles = map(count_mask_tiles, lengths)
    padded = F.pad(words, (0, BIT_WORDS * kv_tiles - words.shape[3]))
    last, rest = divmod(lengths[1], WORD_BITS)
    if rest:
        padded[..., last] &= (1 << rest) - 1
    missing = MASK_TILE * q_tiles - lengths[0]
    rows = torch.cat((padded, padded[:, :, -1:].expand(-1, -1, missing, -1)), dim=2)
    of_tiles = rows.unflatten(3, (kv_tiles, BIT_WORDS)).unflatten(2, (q_tiles, MASK_TILE))
    return of_tiles.transpose(3, 4)


def _places_of_bits(mask: TileMask) -> torch.Tensor:
    """Return (4, tiles of bits) int64: batch entry, head, tile of queries and of keys of each tile
    of bits; zeros of those that no tile has. mask: each tile has bits of its own."""
    assert mask.bits is not None
    flat = mask.tiles.flatten()
    numbers = flat.clamp(min=NOTHING).long()
    place = torch.zeros(len(mask.bits), dtype=torch.int64, device=flat.device)
    place.scatter_(0, numbers, torch.arange(len(flat), device=flat.device))
    place[NOTHING] = 0
    return torch.stack(_coordinates(place, mask.tiles.shape))


def _coordinates(numbers: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return the indices of flat numbers, one tensor per dimension. (What PyTorch has for it copies
    the shape to the device, and so waits for it.)"""
    indices = []
    for size in reversed(shape):
        indices.append(numbers % size)
        numbers = numbers // size
    return indices[::-1]


def _places(is_partial: torch.Tensor) -> torch.Tensor:
    """Return the places of the tiles that get bits, of a flat tensor of all: the partial ones; on a
    GPU all, where waiting for their number takes longer. Raises RuntimeError where a capture would
    have to wait."""
    count, device = is_partial.numel(), is_partial.device
    if device.type != "cpu" and count <= MOST_TILES:
        return torch.arange(count, device=device)
    if is_captured(device):
        raise RuntimeError(
            f"a mask of {count} tiles is made in the capture of a CUDA graph, and waits for the "
            f"GPU; accepted: up to {MOST_TILES} tiles, or a mask that was made before: "
            "fa4_hd256.masks.as_tile_mask(block_mask)"
        )
    return is_partial.nonzero()[:, 0]


def _no_bits(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros for so many tiles of bits, and for the first one, which stays so."""
    room = 1 + count
    if room > ROUNDED_TILES:
        room = -(-room // ROUNDED_TILES) * ROUNDED_TILES
    return torch.zeros(room, MASK_TILE, BIT_WORDS, dtype=torch.int32, device=device)


def _exchanged(bits: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    exchanged = torch.empty_like(bits)
    for chosen in _chunks(len(exchanged), bits.device):
        seen = bits[chosen, ..., None] >> columns & 1
        exchanged[chosen] = _packed(seen.flatten(2).transpose(1, 2))
    return exchanged


def _kinds_from(kinds: torch.Tensor, dimension: int, rows: range) -> torch.Tensor:
    """Kinds of the tiles that begin with the first of `rows`, from those of all."""
    begins = torch.arange(rows.start, rows.stop, MASK_TILE, device=kinds.device)
    lasts = (begins + MASK_TILE).clamp(max=rows.stop) - 1
    first, last = (kinds.index_select(dimension, places // MASK_TILE) for places in (begins, lasts))
    return torch.where(first == last, first, PARTIAL)


def _with_end(lengths: tuple[int, int], kinds: torch.Tensor) -> torch.Tensor:
    """Kinds of tiles; none is whole that ends behind the last key, which nobody sees."""
    if not lengths[1] % MASK_TILE:
        return kinds
    return torch.cat((kinds[..., :-1], kinds[..., -1:].clamp(max=PARTIAL)), dim=-1)


def _chunks(count: int, device: torch.device) -> Iterator[slice]:
    size = CHUNK if device.type == "cpu" else CHUNK_ON_GPU
    return (slice(start, start + size) for start in range(0, count, size))


def _evaluated(
    lengths: tuple[int, int], shape: Any, places: torch.Tensor, evaluate: Evaluate
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (number of the first place, places, which keys are seen) of some places after the
    other. places: of tiles among all, in the order of `shape`. Queries past the end see what the
    last one does, keys past the end are not seen."""
    in_tile = torch.arange(MASK_TILE, device=places.device)
    seqlen_q, seqlen_k = lengths
    for numbers in _chunks(len(places), places.device):
        start, chosen = numbers.start, places[numbers]
        indices = _coordinates(chosen, shape)
        batch, head, q_tile, kv_tile = (index[:, None, None] for index in indices)
        query = (q_tile * MASK_TILE + in_tile[:, None]).clamp(max=seqlen_q - 1)
        key = kv_tile * MASK_TILE + in_tile
        seen = evaluate(batch, head, query, key.clamp(max=seqlen_k - 1)) & (key < seqlen_k)
        yield start, chosen, seen.expand(-1, MASK_TILE, MASK_TILE)


def _packed(seen: torch.Tensor) -> torch.Tensor:
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=seen.device)
    words = seen.unflatten(-1, (BIT_WORDS, WORD_BITS)) * weights
    return words.sum(-1, dtype=torch.int32)


def _blocks(tiles: torch.Tensor) -> torch.Tensor:
    padded = F.pad(tiles, (0, tiles.shape[3] % 2, 0, tiles.shape[2] % 2), value=ABSENT)
    q_tiles, kv_tiles = tiles.shape[2:]
    of_heads = (padded != ABSENT).any(1, keepdim=True)
    by_queries = of_heads.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    of_keys = by_queries.transpose(2, 3).repeat_interleave(2, 3)
    met = by_queries.repeat_interleave(2, 3)
    of_queries = met[..., :kv_tiles]
    # Those that are listed first, of queries the first one, of keys the last one first.
    order = of_keys.int().argsort(dim=-1, stable=True, descending=True)
    falling = of_queries.flip(-1).int().argsort(dim=-1, stable=True, descending=True)
    falling = kv_tiles - 1 - falling
    blocks_k, blocks_q = of_keys.shape[2], of_queries.shape[2]
    lists = torch.zeros(
        *tiles.shape[:2],
        blocks_k + blocks_q,
        1 + max(padded.shape[2:]),
        STEP_WORDS,
        dtype=torch.int32,
        device=tiles.device,
    )
    rows, columns = lists[:, :, :blocks_k], lists[:, :, blocks_k:]
    rows[..., 0, WRITTEN] = of_keys.sum(-1)
    rows[..., 0, READ] = of_keys[..., :q_tiles].sum(-1)
    # The first number of each tile of keys and block of queries: as many tiles are before it.
    taken = met.transpose(2, 3).flatten(2)
    numbers = ((taken.cumsum(-1) - taken.int()) * BLOCK_TILES).unflatten(2, (-1, blocks_q))
    rows[..., 0, FIRST] = numbers[:, :, ::BLOCK_TILES, 0]
    rows[..., 1 : 1 + order.shape[3], 0] = order
    by_keys = padded.transpose(2, 3).unflatten(2, (-1, 2))
    chosen = order[..., None, :].expand(-1, tiles.shape[1], -1, BLOCK_TILES, -1)
    kinds = by_keys.gather(4, chosen).transpose(3, 4)
    rows[..., 1 : 1 + order.shape[3], 1:3] = kinds.masked_fill(kinds == ABSENT, NOTHING)
    columns[..., 0, :2] = of_queries.sum(-1)[..., None]
    columns[..., 1 : 1 + kv_tiles, 0] = falling
    numbers = numbers.transpose(2, 3).gather(3, falling)
    columns[..., 1 : 1 + kv_tiles, NUMBER] = numbers
    return lists


def _first_numbers(rows: torch.Tensor) -> torch.Tensor:
    """Return the number of each tile of keys: (1 or batch, 1 or heads, tiles). rows: with the
    firsts."""
    firsts, written = rows[..., 0, FIRST, None], rows[..., 0, WRITTEN, None]
    return (firsts + written * torch.arange(BLOCK_TILES, device=rows.device)).flatten(-2)


def shape_of_queries(
    shape: Sequence[int], keys: int, queries: range
) -> tuple[int, int, int, int, int]:
    """Return the shape of `blocks_of_queries`. shape: of the blocks."""
    blocks_k, first, limit = map(count_blocks, (keys, queries.start, queries.stop))
    width = 1 + BLOCK_TILES * max(blocks_k, limit - first)
    return shape[0], shape[1], blocks_k + limit - first, width, STEP_WORDS


def blocks_of_queries(blocks: torch.Tensor, keys: int, queries: range) -> torch.Tensor:
    """Return the lists of a range of queries in `TileMask.blocks`; it begins with a block."""
    blocks_k, first, limit = map(count_blocks, (keys, queries.start, queries.stop))
    begin, most = BLOCK_TILES * first, BLOCK_TILES * (limit - first)
    shape = shape_of_queries(blocks.shape, keys, queries)
    width = shape[3]
    rows, columns = blocks[:, :, :blocks_k], blocks[:, :, blocks_k + first : blocks_k + limit]
    numbers, written = rows[..., 1:, 0], rows[..., 0, 0, None]
    places = torch.arange(numbers.shape[-1], device=blocks.device)
    # Listed in rising order, so those of the queries follow each other.
    before, to_end, to_last = (
        ((places < written) & (numbers < end)).sum(-1)
        for end in (begin, BLOCK_TILES * limit, count_mask_tiles(queries.stop))
    )
    lists = blocks.new_zeros(shape)
    of_keys, of_queries = lists[:, :, :blocks_k], lists[:, :, blocks_k:]
    of_keys[..., 0, WRITTEN], of_keys[..., 0, READ] = to_end - before, to_last - before
    # `backward.block_mask`, NOTE [numbers of listed tiles].
    taken = BLOCK_TILES * of_keys[..., 0, WRITTEN]
    of_keys[..., 0, FIRST] = taken.cumsum(-1) - taken
    moved = (before[..., None] + places[:most]).clamp(max=numbers.shape[-1] - 1) + 1
    listed = rows.gather(3, moved[..., None].expand(*moved.shape, STEP_WORDS))
    # Behind the last one is what nobody takes for a tile, but may ask for.
    listed[..., 0].sub_(begin).clamp_(0, most - 1)
    of_keys[..., 1 : 1 + most, :] = listed
    of_queries.copy_(columns[..., :width, :])
    # Numbers begin again: of each tile of keys with another one, at another place of its list.
    moved_by = _first_numbers(of_keys) - _first_numbers(rows)
    moved_by -= before.repeat_interleave(BLOCK_TILES, -1)
    tiles_of_keys = of_queries[..., 1:, 0].long().flatten(-2)
    shift = moved_by.gather(-1, tiles_of_keys).view_as(of_queries[..., 1:, 0])
    of_queries[..., 1:, NUMBER] += shift
    return lists


def _steps(tiles: torch.Tensor, halves: int) -> torch.Tensor:
    count = tiles.shape[3]
    padded = F.pad(tiles, (0, 0, 0, -tiles.shape[2] % halves), value=ABSENT)
    of_halves = padded.unflatten(2, (-1, halves))
    is_listed = (of_halves != ABSENT).any(3)
    numbers = torch.arange(count, device=tiles.device)
    # Those that are listed first, of these the last one first.
    order = (count - 1 - numbers + count * ~is_listed).argsort(-1)
    lists = torch.zeros(
        *is_listed.shape[:3], 1 + count, STEP_WORDS, dtype=torch.int32, device=tiles.device
    )
    lists[..., 0, 0] = is_listed.sum(-1)
    lists[..., 1:, 0] = order
    for half in range(halves):
        kinds = of_halves[:, :, :, half].gather(-1, order)
        lists[..., 1:, 1 + half] = kinds.masked_fill(kinds == ABSENT, NOTHING)
    return lists
