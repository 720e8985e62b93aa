"""P and dS of the dV kernel in e4m3: rounded in registers, and dS on its way to global memory.

Scores are in registers by half rows (`blackwell.tmem_halves`): a thread has two keys of its warp's
32, 16 apart, and 32 consecutive queries of each.  So four codes of a word are of one thread, and 16
bytes of dS leave at a time.

NOTE [scales of dS].  dK reduces dS over queries, dQ over keys.  So dS is rounded twice, each time
with a scale for 32 elements along that side.  The 32 queries of a block for dK are one key's of a
thread.  The 32 keys of a block for dQ are those of a warp, two of each thread of a half: each lane
reduces the share of the blocks whose scales it stores (`_scattered_max`), and their inverses come
back through shared memory.  Scales are the least powers of two that bring the largest magnitude to
448 at most, as those of the quantizer.  A block with a NaN has any scale: the row of dK or dQ that
it is of is NaN.

NOTE [two magnitudes in a word].  Over lanes go magnitudes times GROWTH, two in a word, as bf16
rounded towards zero.  The product is exactly then in the next octave when the magnitude lies beyond
1.75 of its own, 448 being 1.75 * 2^8.  So the exponent is that of the scale, and is not rounded.

NOTE [staged codes].  Stores of warps read their registers no sooner than they leave the SM, which
would hold up the loads of the next S.  So codes go to shared memory, and from there by bulk copies
of 8 KiB, two of a warpgroup: its 64 queries are half of the codes of a kind, one behind the other.
The warpgroup meets at a named barrier before it stores codes, when those of the step before have
been read, and behind that.

NOTE [2^8 times].  P is rounded times 2^P_LOG2, which the exponent of 2 has already.  So dS has this
factor, too, and its scales are less by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ....backward.common import Step
from ....backward.mxfp8_ds import CODE_BYTES, FOR_DK, FOR_DQ, RUN_BYTES, RUN_CODES
from ....block_scales import ATOM_BYTES
from ....e4m3_codes import WORD_CODES, codes_of
from ....limits import WARP_SIZE
from ....mask.masking import Visibility
from ....plan.budgets import WARPS_PER_WARPGROUP
from ....rows.sequences import columns_of
from ...tmem_halves import half_row
from ...tmem_quads import HALF_LANES
from ..common import BlackwellBackwardContext, warpgroup
from ..quads import BEYOND, STEP_QUERIES, WARPGROUP_QUERIES, DsStore, QuadMask, StepDs

#: Queries and keys of a thread, and rows from one key to the other; codes of its scores of a step,
#: four in a word.
QUERIES, KEYS, KEY_DISTANCE = WARPGROUP_QUERIES // 2, 2, HALF_LANES
WORDS = WARPGROUP_QUERIES // WORD_CODES
HALF_WORDS = WORDS // 2
#: Words of all codes of one kind, of a run of 16 queries, and of a key in it.
CODE_WORDS, RUN_WORDS, KEY_WORDS = CODE_BYTES // 4, RUN_BYTES // 4, RUN_CODES // 4
#: Threads of a warpgroup, and the named barrier of the first one.
WARPGROUP_THREADS, FIRST_BARRIER = WARPS_PER_WARPGROUP * WARP_SIZE, 1
#: P is rounded times 2^P_LOG2: NOTE [2^8 times].
P_LOG2 = 8
#: What is added to the bits of a float32 to round its exponent up beyond 1.75; the exponent of 448
#: = 1.75 * 2^8.
ROUND_UP, EXPONENT = 0x1FFFFF, 8
#: The float32 before 8 / 7: NOTE [two magnitudes in a word].
GROWTH = float.fromhex("0x1.249248p+0")
SIGNIFICAND_BITS, EXPONENT_MASK = 23, 0xFF
#: Bytes of a scale and of the factor that brings dS times 2^P_LOG2 to it, 2^(byte - 127), add up to
#: this.
BOTH_BIASES = 254 - P_LOG2


class StagedTile(NamedTuple):
    """A tile of dS in global memory, and the first word of shared memory of a warpgroup's codes."""

    tile: cute.Tensor
    staged: cute.Pointer


@dataclass(frozen=True)
class Mxfp8DsStore(DsStore):
    """The stores of dS of the kernel in mxfp8: `backward.mxfp8_ds`."""

    registers: ClassVar[int] = 2 * WORDS + 2

    def tile_numbered(self, ds: cute.Tensor, number: Int32) -> cute.Tensor:
        """Return the first word of a tile, as a tensor of one."""
        first = cute.recast_ptr(ds[0, 0, number, None].iterator.align(16), dtype=Int32)
        return _some(first, 1)

    def tile(self, context: BlackwellBackwardContext, step: Step, row: Int32, number: Int32) -> Any:
        """Return this CTA's tile of dS of a step, with the memory that it leaves through."""
        tile = super().tile(context, step, row, number)
        return StagedTile(tile, context.smem["staged"][None, warpgroup()].iterator)

    def store(self, step: StepDs | None, half: int) -> None:
        """Store one key of this thread's dS of a step, if there is any; with the second the scales
        of both.  Codes of a staged tile leave behind the second: NOTE [staged codes]."""
        if step is None:
            return
        words, tile = cute.recast_tensor(step.values, Int32), step.tile
        if isinstance(tile, StagedTile):
            tile, staged = tile
            if half == 0:
                await_copies()
            _store_codes(words, half, staged, CODE_WORDS // 2)
            if half == 1:
                copy_codes(tile, staged)
        else:
            runs = warpgroup() * (WARPGROUP_QUERIES // RUN_CODES)
            _store_codes(words, half, tile.iterator + runs * RUN_WORDS, CODE_WORDS)
        if half == 1:
            scales = tile.iterator + 2 * CODE_WORDS
            _store_scales(scales, words[2 * WORDS], words[2 * WORDS + 1])


def _store_codes(words: cute.Tensor, half: int, target: cute.Pointer, stride: int) -> None:
    """Store codes of one key of this thread.  target: first word of the warpgroup's runs; stride:
    words from those for dK to those for dQ.  Half of a warp stores 256 consecutive bytes."""
    (row, side), runs = half_row(), QUERIES // RUN_CODES
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    key = warp * WARP_SIZE + row + KEY_DISTANCE * half
    target += side * runs * RUN_WORDS + key * KEY_WORDS
    for codes in (FOR_DK, FOR_DQ):
        for run in range(runs):
            source = words.iterator + (codes * WORDS + half * HALF_WORDS + run * KEY_WORDS)
            place = (target + (codes * stride + run * RUN_WORDS)).align(RUN_CODES)
            cute.autovec_copy(_some(source, KEY_WORDS), _some(place, KEY_WORDS))


@cute.jit
def await_copies() -> None:
    """Wait until the warpgroup's codes of the step before have been read: NOTE [staged codes]."""
    if _copies():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    _meet()


@cute.jit
def copy_codes(tile: cute.Tensor, staged: cute.Pointer) -> None:
    """Copy the warpgroup's codes for dK and those for dQ to a tile, when all of its threads have
    stored them.  staged: of the former."""
    cute.arch.fence_proxy("async.shared", space="cta")
    _meet()
    if _copies():
        runs = warpgroup() * (WARPGROUP_QUERIES // RUN_CODES) * RUN_WORDS
        words = CODE_WORDS // 2
        atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Int32, num_bits_per_copy=32 * words)
        for codes in cutlass.range_constexpr(2):
            target = tile.iterator + (runs + codes * CODE_WORDS)
            source = staged + codes * words
            cute.copy(atom, _some(source, words), _some(target.align(16), words))
        cute.arch.cp_async_bulk_commit_group()


def _copies() -> Boolean:
    """Return True for the thread of a warpgroup that issues its copies."""
    return cute.arch.thread_idx()[0] % WARPGROUP_THREADS == 0


def _meet() -> None:
    """Synchronise the threads of a warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_BARRIER + warpgroup(), number_of_threads=WARPGROUP_THREADS)


def _store_scales(base: cute.Pointer, of_keys: Int32, of_queries: Int32) -> None:
    """Store this thread's scales to the atoms of a tile: two bytes each of its keys' blocks, and of
    the queries' whose blocks it has reduced."""
    row, side = half_row()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    block = warpgroup() * 2 + side
    # Row r, block c: byte r % 32 * 16 + r // 32 * 4 + c.
    scales = cute.recast_ptr(base, dtype=cutlass.Uint8)
    for_dk = scales + (row * 16 + warp * 4 + block)
    for_dq = scales + (row * 32 + block * 4 + warp + ATOM_BYTES)
    for i in range(2):
        _some(for_dk + i * 16 * KEY_DISTANCE, 1)[0] = cutlass.Uint8(of_keys >> 8 * i & 0xFF)
        _some(for_dq + i * 16, 1)[0] = cutlass.Uint8(of_queries >> 8 * i & 0xFF)


class HalfRowMask(NamedTuple):
    """Mask of a step by ranges.  key: this thread's first one; query: the first of its queries."""

    applies: Boolean
    visibility: Visibility
    key: Int32
    query: Int32

    def hide(self, scores: cute.Tensor) -> None:
        """Scores of queries that a key does not see := -inf; of keys beyond the sequence's end all,
        for their dS has to be 0."""
        for number in range(KEYS):
            key = self.key + KEY_DISTANCE * number
            first = cutlass.select_(key < self.visibility.seqlen_q, self.query, Int32(BEYOND))
            self.visibility.apply(columns_of(scores, number * QUERIES, QUERIES), key, first)


def half_row_mask(cta_key: Int32, mask: QuadMask) -> HalfRowMask:
    """Return the mask of a step for this thread's scores.  cta_key: the CTA's first key."""
    (row, side), warp = half_row(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    query = mask.index * STEP_QUERIES + warpgroup() * WARPGROUP_QUERIES + side * QUERIES
    return HalfRowMask(mask.applies, mask.visibility, cta_key + warp % 4 * WARP_SIZE + row, query)


def rounds(applies: Boolean) -> Int32:
    """Return 1 or 0, of which the compiler does not know that there are no others."""
    number = cutlass.select_(applies, Int32(1), Int32(0))
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number]
    )


def add_each(stats: cute.Tensor, value: float) -> None:
    """Add a number to each of a thread's statistics."""
    for i in range(0, cute.size(stats), 2):
        pair = stats[i], stats[i + 1]
        stats[i], stats[i + 1] = cute.arch.add_packed_f32x2(pair, (Float32(value), Float32(value)))


def _some(pointer: cute.Pointer, count: int) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_layout(count))


def round_p(p: cute.Tensor, words: cute.Tensor, half: int) -> None:
    """Round P of one of a thread's keys to words of e4m3, four queries each."""
    rounded = cute.recast_tensor(words, Int32)
    for word in range(HALF_WORDS):
        values = [p[word * WORD_CODES + i] for i in range(WORD_CODES)]
        rounded[half * HALF_WORDS + word] = codes_of(values)


def quantize_ds(ds: cute.Tensor, target: cute.Tensor, inverses: cute.Tensor) -> None:
    """Round dS of a step for dK and for dQ: NOTE [scales of dS].

    ds: 64 float32 of this thread.  target: `Mxfp8DsStore.registers` registers.  inverses: 64
    float32 in shared memory that this warp alone uses, others in the next step.
    """
    words = cute.recast_tensor(target, Int32)
    row, side = half_row()
    keys = [columns_of(ds, key * QUERIES, QUERIES) for key in range(KEYS)]
    of_queries = _query_scales(keys)
    own = _some((inverses.iterator + (side * QUERIES + row * 2)).align(8), 2)
    factors = cute.make_rmem_tensor(2, Float32)
    factors[0], factors[1] = (_inverse(scale) for scale in of_queries)
    cute.autovec_copy(factors, own)
    of_keys = [_scale((_largest(list_of(key)) + ROUND_UP) >> SIGNIFICAND_BITS) for key in keys]
    for half, values in enumerate(keys):
        factor = _inverse(of_keys[half])
        _round(values, words, FOR_DK * WORDS + half * HALF_WORDS, lambda _: factor)  # noqa: B023
    cute.arch.sync_warp()
    by_query = cute.make_rmem_tensor(QUERIES, Float32)
    cute.autovec_copy(_some((inverses.iterator + side * QUERIES).align(16), QUERIES), by_query)
    for half, values in enumerate(keys):
        _round(values, words, FOR_DQ * WORDS + half * HALF_WORDS, lambda i: by_query[i])
    words[2 * WORDS], words[2 * WORDS + 1] = (a | b << 8 for a, b in (of_keys, of_queries))


def list_of(values: cute.Tensor) -> list[Float32]:
    return [values[i] for i in range(cute.size(values))]


def _round(values: cute.Tensor, words: cute.Tensor, first: int, factor: Any) -> None:
    """Round a key's values to words from number `first` on.  factor: of a value, by its number."""
    for word in range(HALF_WORDS):
        scaled: list[Float32] = []
        for i in range(word * WORD_CODES, (word + 1) * WORD_CODES, 2):
            pair = values[i], values[i + 1]
            scaled += cute.arch.mul_packed_f32x2(pair, (factor(i), factor(i + 1)))
        words[first + word] = codes_of(scaled)


def _query_scales(keys: list[cute.Tensor]) -> list[Int32]:
    """Return the bytes of the scales for dQ of two queries, those that this thread stores."""
    largest = []
    for i in range(0, QUERIES, 2):
        pair = [_as_float(_largest([key[i + n] for key in keys])) for n in range(2)]
        grown = cute.arch.mul_packed_f32x2(pair, (Float32(GROWTH), Float32(GROWTH)))
        # The upper halves, the second one's above: NOTE [two magnitudes in a word].
        largest.append(cute.arch.prmt(*(_bits(value) for value in grown), 0x7632))
    row = half_row()[0]
    sides = tuple((distance, row // distance % 2) for distance in (8, 4, 2, 1))
    kept = _scattered_max(largest, sides)[0]
    return [_scale(kept >> 7 & EXPONENT_MASK), _scale(kept >> 23 & EXPONENT_MASK)]


def _largest(values: list[Float32]) -> Int32:
    """Return the bits of the largest magnitude: max.f32 of three (PTX ISA 9.7.3.12), whose
    operands' signs cost nothing."""
    lines = [".reg .f32 found, a, b;", "abs.f32 found, {$r0};"]
    for i in range(1, len(values), 2):
        lines.append(f"abs.f32 a, {{$r{i}}};")
        if i + 1 < len(values):
            lines += [f"abs.f32 b, {{$r{i + 1}}};", "max.f32 found, found, a, b;"]
        else:
            lines.append("max.f32 found, found, a;")
    lines.append("mov.b32 {$w0}, found;")
    return cute.arch.inline_ptx(
        "{" + "\n".join(lines) + "}", write_only_types=[Int32], read_only_args=values
    )


def _scattered_max(words: list[Int32], exchanges: tuple[tuple[int, Int32], ...]) -> list[Int32]:
    """Return the maxima over lanes of a share of the words, two bf16 each: at each exchange a lane
    keeps the first half if its side is 0, the second if it is 1, and gives the other one away.

    exchanges: (distance of the other lane, side of this one).
    """
    for distance, side in exchanges:
        half = len(words) // 2
        is_first = side == 0
        kept = [cutlass.select_(is_first, a, b) for a, b in zip(words[:half], words[half:])]
        given = [cutlass.select_(is_first, b, a) for a, b in zip(words[:half], words[half:])]
        words = [
            _larger(own, cute.arch.shuffle_sync_bfly(other, offset=distance))
            for own, other in zip(kept, given)
        ]
    return words


def _larger(a: Int32, b: Int32) -> Int32:
    """max.bf16x2 (PTX ISA 9.7.4.8): a NaN loses against a number."""
    return cute.arch.inline_ptx(
        "max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )


def _scale(exponent: Int32) -> Int32:
    """Return the byte of the scale of a largest magnitude with this biased exponent, rounded up:
    NOTE [2^8 times]."""
    return cutlass.max(exponent - (EXPONENT + P_LOG2), Int32(0))


def _inverse(scale: Int32) -> Float32:
    """Return what brings dS times 2^P_LOG2 to a scale."""
    return _as_float(BOTH_BIASES - scale << SIGNIFICAND_BITS)


def _as_float(bits: Int32) -> Float32:
    words = cute.make_rmem_tensor(1, Int32)
    words[0] = bits
    return cute.recast_tensor(words, Float32)[0]


def _bits(value: Float32) -> Int32:
    values = cute.make_rmem_tensor(1, Float32)
    values[0] = value
    return cute.recast_tensor(values, Int32)[0]
