"""P and dS of the dV kernel in e4m3: rounded in registers, and dS on its way to global memory.

Scores are in registers by half rows (`blackwell.tmem_halves`): a thread has two keys of its warp's
32, 16 apart, and 32 consecutive queries of each.  So four codes of a word are of one thread, and 16
bytes of dS leave at a time.

NOTE [scales of dS].  A scale is that of 32 keys x 32 queries (`backward.mxfp8_ds`, NOTE [square
blocks]).  The 32 keys of a block are those of a warp, two of each thread of a half; its queries are
those of the half's threads.  So 16 threads have a block, and four exchanges find its largest
magnitude.  A scale is the least power of two that brings that to 448 at most, as those of the
quantizer.  NaN does not count, and stays NaN.

NOTE [staged codes].  Stores of warps read their registers no sooner than they leave the SM, which
would hold up the loads of the next S.  So codes go to shared memory, and from there by a bulk copy
of 8 KiB of each warpgroup: its 64 queries are half of a tile's codes, one behind the other.  The
warpgroup meets at a named barrier before it stores codes, when those of the step before have been
read, and behind that.

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
from ....backward.mxfp8_ds import CODE_BYTES, RUN_BYTES, RUN_CODES
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

#: Queries and keys of a thread, and rows from one key to the other; words of its codes of a step.
QUERIES, KEYS, KEY_DISTANCE = WARPGROUP_QUERIES // 2, 2, HALF_LANES
WORDS = WARPGROUP_QUERIES // WORD_CODES
HALF_WORDS = WORDS // 2
#: Words of all codes of a tile, of a run of 16 queries, and of a key in it.
CODE_WORDS, RUN_WORDS, KEY_WORDS = CODE_BYTES // 4, RUN_BYTES // 4, RUN_CODES // 4
#: Threads of a warpgroup, and the named barrier of the first one.
WARPGROUP_THREADS, FIRST_BARRIER = WARPS_PER_WARPGROUP * WARP_SIZE, 1
#: P is rounded times 2^P_LOG2: NOTE [2^8 times].
P_LOG2 = 8
#: What is added to the bits of a float32 to round its exponent up beyond 1.75; the exponent of 448
#: = 1.75 * 2^8.
ROUND_UP, EXPONENT = 0x1FFFFF, 8
SIGNIFICAND_BITS = 23
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

    registers: ClassVar[int] = WORDS + 1

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
            _store_codes(words, half, staged)
            if half == 1:
                copy_codes(tile, staged)
        else:
            runs = warpgroup() * (WARPGROUP_QUERIES // RUN_CODES)
            _store_codes(words, half, tile.iterator + runs * RUN_WORDS)
        if half == 1:
            _store_scales(tile.iterator + CODE_WORDS, words[WORDS])


def _store_codes(words: cute.Tensor, half: int, target: cute.Pointer) -> None:
    """Store codes of one key of this thread.  target: first word of the warpgroup's runs.  Half of
    a warp stores 256 consecutive bytes."""
    (row, side), runs = half_row(), QUERIES // RUN_CODES
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    key = warp * WARP_SIZE + row + KEY_DISTANCE * half
    target += side * runs * RUN_WORDS + key * KEY_WORDS
    for run in range(runs):
        source = words.iterator + (half * HALF_WORDS + run * KEY_WORDS)
        place = (target + run * RUN_WORDS).align(RUN_CODES)
        cute.autovec_copy(_some(source, KEY_WORDS), _some(place, KEY_WORDS))


@cute.jit
def await_copies() -> None:
    """Wait until the warpgroup's codes of the step before have been read: NOTE [staged codes]."""
    if _copies():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    _meet()


@cute.jit
def copy_codes(tile: cute.Tensor, staged: cute.Pointer) -> None:
    """Copy the warpgroup's codes to a tile, when all of its threads have stored them."""
    cute.arch.fence_proxy("async.shared", space="cta")
    _meet()
    if _copies():
        runs = warpgroup() * (WARPGROUP_QUERIES // RUN_CODES) * RUN_WORDS
        words = CODE_WORDS // 2
        atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Int32, num_bits_per_copy=32 * words)
        target = (tile.iterator + runs).align(16)
        cute.copy(atom, _some(staged, words), _some(target, words))
        cute.arch.cp_async_bulk_commit_group()


def _copies() -> Boolean:
    """Return True for the thread of a warpgroup that issues its copies."""
    return cute.arch.thread_idx()[0] % WARPGROUP_THREADS == 0


def _meet() -> None:
    """Synchronise the threads of a warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_BARRIER + warpgroup(), number_of_threads=WARPGROUP_THREADS)


def _store_scales(base: cute.Pointer, scale: Int32) -> None:
    """Store the scale of this thread's block to the atoms of a tile, for two keys and for two
    queries."""
    row, side = half_row()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    block = warpgroup() * 2 + side
    # Row r, block c: byte r % 32 * 16 + r // 32 * 4 + c.
    scales = cute.recast_ptr(base, dtype=cutlass.Uint8)
    for_dk = scales + (row * 16 + warp * 4 + block)
    for_dq = scales + (row * 16 + block * 4 + warp + ATOM_BYTES)
    for i in range(2):
        for target in (for_dk, for_dq):
            _some(target + i * 16 * KEY_DISTANCE, 1)[0] = cutlass.Uint8(scale)


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


def quantize_ds(ds: cute.Tensor, target: cute.Tensor) -> None:
    """Round dS of a step: NOTE [scales of dS].

    ds: 64 float32 of this thread.  target: `Mxfp8DsStore.registers` registers.
    """
    words = cute.recast_tensor(target, Int32)
    largest = _largest(list_of(ds))
    for distance in (8, 4, 2, 1):
        other = cute.arch.shuffle_sync_bfly(largest, offset=distance)
        largest = cutlass.max(largest, other)
    scale = _scale((largest + ROUND_UP) >> SIGNIFICAND_BITS)
    factor = _inverse(scale)
    for word in range(WORDS):
        scaled: list[Float32] = []
        for i in range(word * WORD_CODES, (word + 1) * WORD_CODES, 2):
            scaled += cute.arch.mul_packed_f32x2((ds[i], ds[i + 1]), (factor, factor))
        words[word] = codes_of(scaled)
    words[WORDS] = scale


def list_of(values: cute.Tensor) -> list[Float32]:
    return [values[i] for i in range(cute.size(values))]


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
