"""P and dS of the dV kernel in e4m3: rounded in registers, and dS on its way to global memory.

Scores are in registers by quads, as in `backward.quads`: value i + 2 j + 4 k of half h of a thread
is of key 16 h + 8 j + quad and query 8 k + 2 t + i, t being the thread of the quad.

NOTE [scales of dS].  dK reduces dS over queries, dQ over keys.  So dS is rounded twice, each time
with a scale for 32 elements along that side.  The 32 queries of a block for dK lie in a quad, four
registers pairs of each thread; the 32 keys of a block for dQ are those of a warp, four values of
each quad.  Scales are the least powers of two that bring the largest magnitude to 448 at most, as
those of the quantizer; an element that is NaN does not count.  Each lane reduces the share of the
blocks whose scales it stores (`_scattered_max`), and bytes of the inverse scales come back four in
a word (`_gathered`).

NOTE [2^8 times].  P is rounded times 2^P_LOG2, which the exponent of 2 has already.  So dS has this
factor, too, and its scales are less by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....backward.mxfp8_ds import CODE_BYTES, FOR_DK, FOR_DQ, RUN_BYTES, RUN_CODES
from ....block_scales import ATOM_BYTES
from ....e4m3_codes import codes_of
from ....limits import WARP_SIZE
from ...tmem_quads import quad_fragment
from ..common import warpgroup
from ..quads import WARPGROUP_QUERIES, DsStore, StepDs, quad

#: Codes of a thread's scores of a step, four in a word.
WORDS = WARPGROUP_QUERIES // 4
HALF_WORDS = WORDS // 2
#: Words of all codes of one kind, of a run of 16 queries, and of a key in it.
CODE_WORDS, RUN_WORDS, KEY_WORDS = CODE_BYTES // 4, RUN_BYTES // 4, RUN_CODES // 4
#: P is rounded times 2^P_LOG2: NOTE [2^8 times].
P_LOG2 = 8
#: What is added to the bits of a float32 to round its exponent up beyond 1.75; the exponent of 448
#: = 1.75 * 2^8.
ROUND_UP, EXPONENT = 0x1FFFFF, 8
SIGNIFICAND_BITS, EXPONENT_MASK = 23, 0x7F800000
#: Bytes of a scale and of the factor that brings dS times 2^P_LOG2 to it, 2^(byte - 127), add up to
#: this.
BOTH_BIASES = 254 - P_LOG2


class QuantizedDs(NamedTuple):
    """dS of a step, in e4m3.  codes: WORDS each for dK and dQ, one behind the other.  scales: two
    bytes of a key, and a byte each of two queries, of those blocks that this thread stores."""

    codes: cute.Tensor
    scales: cute.Tensor


@dataclass(frozen=True)
class Mxfp8DsStore(DsStore):
    registers: ClassVar[int] = 2 * WORDS + 2

    def tile_numbered(self, ds: cute.Tensor, number: Int32) -> cute.Tensor:
        """Return the first word of a tile, as a tensor of one."""
        first = cute.recast_ptr(ds[0, 0, number, None].iterator.align(16), dtype=Int32)
        return _one(first)

    def store(self, step: StepDs | None, half: int) -> None:
        """Store half of this thread's dS of a step; with the second half its scales."""
        if step is None:
            return
        (number, thread), base = quad(), step.tile.iterator
        words = cute.recast_tensor(step.values, Int32)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        key, run = warp * WARP_SIZE + number + 16 * half, warpgroup() * (WORDS // 4)
        # `_paired` leaves the second four queries of a run to the third thread.
        place = run * RUN_WORDS + key * KEY_WORDS + thread % 2 * 2 + thread // 2
        for codes in (FOR_DK, FOR_DQ):
            for word in range(HALF_WORDS):
                offset = codes * CODE_WORDS + word // 2 * RUN_WORDS + word % 2 * 8 * KEY_WORDS
                value = words[codes * WORDS + half * HALF_WORDS + word]
                _one(base + (place + offset))[0] = value
        if half == 1:
            _store_scales(base + 2 * CODE_WORDS, words[2 * WORDS], words[2 * WORDS + 1])


def _store_scales(base: cute.Pointer, of_key: Int32, of_queries: Int32) -> None:
    number, thread = quad()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    # Row r, block c: byte r % 32 * 16 + r // 32 * 4 + c.
    key = thread % 2 * 16 + thread // 2 * 8 + number
    pairs = cute.recast_ptr(base, dtype=cutlass.Uint16)
    place = key * 8 + warp * 2 + warpgroup()
    _one(pairs + place)[0] = cutlass.Uint16(of_key)
    query = warpgroup() * WARPGROUP_QUERIES + _query_run(number) * 8 + thread * 2
    place = query % 32 * 16 + query // 32 * 4 + warp
    scales = cute.recast_ptr(base, dtype=cutlass.Uint8) + (ATOM_BYTES + place)
    for i in range(2):
        value = cutlass.Uint8(of_queries >> 8 * i & 0xFF)
        _one(scales + 16 * i)[0] = value


def _query_run(number: Int32) -> Int32:
    """Return which 8 queries a quad's two blocks for dQ are among: `_scattered_max`."""
    return number % 2 * 4 + number // 2 % 2 * 2 + number // 4


def add_each(stats: cute.Tensor, value: float) -> None:
    """Add a number to each of a thread's 16 statistics (`DvKernel._thread_stats`)."""
    own = cute.make_tensor(stats.iterator, cute.make_layout(WARPGROUP_QUERIES // 4))
    for i in range(0, cute.size(own), 2):
        pair = own[i], own[i + 1]
        own[i], own[i + 1] = cute.arch.add_packed_f32x2(pair, (Float32(value), Float32(value)))


def _one(pointer: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_layout(1))


def round_p(factors: cute.Tensor, words: cute.Tensor, half: int) -> None:
    """Round P of one half of a thread's keys to words of e4m3 as `tmem_store_quads` takes them."""
    thread = quad()[1]
    lane = cute.arch.lane_idx() - thread
    # Threads 2 t % 4 and the next one have these queries, in the first or second of their pairs.
    first, choice = lane + thread % 2 * 2, 0x5410 + thread // 2 * (0x7632 - 0x5410)
    values = quad_fragment(factors, half)
    rounded = cute.recast_tensor(words, Int32)
    for m in range(4):
        for j in range(2):
            own = codes_of([values[i, j, 2 * m + k] for k in range(2) for i in range(2)])
            parts = (cute.arch.shuffle_sync(own, first + i) for i in range(2))
            rounded[half * HALF_WORDS + j + 2 * m] = cute.arch.prmt(*parts, choice)


def quantize_ds(ds: cute.Tensor, target: cute.Tensor) -> None:
    """Round dS of a step for dK and for dQ: NOTE [scales of dS].

    ds: 64 float32 of this thread.  target: `Mxfp8DsStore.registers` registers.
    """
    words = cute.recast_tensor(target, Int32)
    of_keys, key_bytes = _key_scales(ds)
    of_queries, query_bytes = _query_scales(ds)
    words[2 * WORDS], words[2 * WORDS + 1] = key_bytes, query_bytes
    thread = quad()[1]
    # Bytes of the own word and of the neighbour's: `_paired`.
    choice = 0x5410 + thread % 2 * (0x3276 - 0x5410)
    for half in range(2):
        values = quad_fragment(ds, half)
        for m in range(4):
            for j in range(2):
                scale = _inverse(of_keys[half], 2 * j + m // 2)
                place = half * HALF_WORDS + j + 2 * m
                for_dk = _word(values, j, m, ((scale, scale), (scale, scale)))
                pairs = tuple(
                    (_inverse(of_queries[m], 2 * k), _inverse(of_queries[m], 2 * k + 1))
                    for k in range(2)
                )
                for_dq = _word(values, j, m, pairs)
                words[FOR_DK * WORDS + place] = _paired(for_dk, choice)
                words[FOR_DQ * WORDS + place] = _paired(for_dq, choice)


def _word(values: cute.Tensor, j: int, m: int, scales: Any) -> Int32:
    """Return the codes of queries 2 t, 2 t + 1 of runs 2 m and 2 m + 1.  scales: by run."""
    scaled: list[Float32] = []
    for k in range(2):
        pair = values[0, j, 2 * m + k], values[1, j, 2 * m + k]
        scaled += cute.arch.mul_packed_f32x2(pair, scales[k])
    return codes_of(scaled)


def _paired(word: Int32, choice: Int32) -> Int32:
    """Return four consecutive queries of a key: a thread and its neighbour exchange pairs.  Even
    threads get those of the first run of 8, odd ones those of the second."""
    other = cute.arch.shuffle_sync_bfly(word, offset=1)
    return cute.arch.prmt(word, other, choice)


def _key_scales(ds: cute.Tensor) -> tuple[list[Int32], Int32]:
    """Return (bytes of the inverse scales for dK, those of the scales that this thread stores). The
    former: a word for each half, with byte 2 j + block."""
    largest = []
    for half in range(2):
        own = quad_fragment(ds, half)
        for j in range(2):
            largest += [_largest([own[i, j, 4 * block + k] for k in range(4) for i in range(2)])
                        for block in range(2)]  # fmt: skip
    thread = quad()[1]
    kept = _scattered_max(largest, ((1, thread % 2), (2, thread // 2)))
    inverses, stored = _bytes_of(kept)
    return _gathered(inverses, ((2, thread // 2), (1, thread % 2))), stored


def _query_scales(ds: cute.Tensor) -> tuple[list[Int32], Int32]:
    """Return the same for dQ: a word for each two runs of 8 queries, with byte 2 (k % 2) + i."""
    halves = [quad_fragment(ds, half) for half in range(2)]
    largest = [_largest([own[i, j, k] for own in halves for j in range(2)])
               for k in range(8) for i in range(2)]  # fmt: skip
    number = quad()[0]
    sides = number % 2, number // 2 % 2, number // 4
    kept = _scattered_max(largest, ((4, sides[0]), (8, sides[1]), (16, sides[2])))
    inverses, stored = _bytes_of(kept)
    return _gathered(inverses, ((16, sides[2]), (8, sides[1]), (4, sides[0]))), stored


def _largest(values: list[Float32]) -> Int32:
    """Return the bits of the largest magnitude: max.f32 of three (PTX ISA 9.7.3.12)."""
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


def _scattered_max(values: list[Int32], exchanges: tuple[tuple[int, Int32], ...]) -> list[Int32]:
    """Return the maxima over lanes of a share of the values: at each exchange a lane keeps the
    first half if its side is 0, the second if it is 1, and gives the other one away. exchanges:
    (distance of the other lane, side of this one)."""
    for distance, side in exchanges:
        half = len(values) // 2
        is_first = side == 0
        kept = [cutlass.select_(is_first, a, b) for a, b in zip(values[:half], values[half:])]
        given = [cutlass.select_(is_first, b, a) for a, b in zip(values[:half], values[half:])]
        values = [
            cutlass.max(own, cute.arch.shuffle_sync_bfly(other, offset=distance))
            for own, other in zip(kept, given)
        ]
    return values


def _bytes_of(pair: list[Int32]) -> tuple[Int32, Int32]:
    """Return the bytes of the inverse scales and scales of two magnitudes: NOTE [2^8 times]."""
    low, high = (
        cutlass.max((bits + ROUND_UP >> SIGNIFICAND_BITS) - (EXPONENT + P_LOG2), Int32(0))
        for bits in pair
    )
    scales = low | high << 8
    return (BOTH_BIASES | BOTH_BIASES << 8) - scales, scales


def _gathered(own: Int32, exchanges: tuple[tuple[int, Int32], ...]) -> list[Int32]:
    """Return the bytes of all lanes by the exchanges of `_scattered_max` in reverse."""
    distance, side = exchanges[0]
    other = cute.arch.shuffle_sync_bfly(own, offset=distance)
    is_first = side == 0
    words = [cutlass.select_(is_first, own | other << 16, other | own << 16)]
    for distance, side in exchanges[1:]:
        others = [cute.arch.shuffle_sync_bfly(word, offset=distance) for word in words]
        is_first = side == 0
        both = [*zip(words, others), *zip(others, words)]
        words = [cutlass.select_(is_first, a, b) for a, b in both]
    return words


def _inverse(word: Int32, byte: int) -> Float32:
    """Return the float32 whose exponent is a byte of a word."""
    shift = SIGNIFICAND_BITS - 8 * byte
    moved = word << shift if shift > 0 else word >> -shift
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = moved & EXPONENT_MASK
    return cute.recast_tensor(bits, Float32)[0]
