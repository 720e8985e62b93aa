"""K and V^T in NVFP4: from shared memory to float16 in tensor memory, where they are A of MMAs.

NOTE [lanes of K].  A lane is a key, and a column two neighbouring columns of the head.  A thread
has a key: it reads 16 bytes of codes at a time, of which cvt makes pairs of f16, and multiplies
these with the scales of their blocks.

NOTE [lanes of V].  A lane is a column of the head, and a column two neighbouring keys.  Thread t of
a warp stores columns t % 4 + 4 n of four lanes of each half of V^T (`tmem_store_quads`), that is
keys 8 n + 2 (t % 4) and the next one.  Which column of the head a lane is does not matter to the
MMAs, so that a thread has eight that follow each other: a word of codes of each key.  Two keys'
words, with their nibbles interleaved, have bytes of the same column of both, and cvt makes a pair
of each.  Words of even columns go to the first half, those of odd ones to the second
(`value_column`).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...forward.nvfp4_words import ROW_WORDS, SCALE_WORDS, load_words, scale_pair, select_bytes
from ...limits import WARP_SIZE
from ..tmem import LANES, tmem_store
from ..tmem_quads import tmem_store_quads
from .config import BLOCK_KV, HALVES, OPERAND_COLUMNS

WORD_BYTES = 4
#: Words of a piece of 16 bytes, pieces of a row, and words of f16 that a piece becomes.
PIECE_WORDS, PIECES = 4, ROW_WORDS // 4
PIECE_COLUMNS = PIECE_WORDS * WORD_BYTES
#: Threads that share a lane of V^T, and lanes of a thread in each half of V^T.
QUAD, THREAD_LANES = 4, 4
#: Keys of a quad's columns, and how many of these are stored at once.
GROUP_KEYS, GROUPS_AT_ONCE = 2 * QUAD, 4
#: Columns of the head of a warp and of a thread.
WARP_COLUMNS, THREAD_COLUMNS = 64, 8
#: The columns of a half of V^T.
HALF_COLUMNS = OPERAND_COLUMNS // len(HALVES)


def value_column(lane: Int32, half: int) -> Int32:
    """Return which column of the head a lane of a half of V^T is."""
    warp, own = lane // WARP_SIZE, lane % WARP_SIZE
    quad, number = own % THREAD_COLUMNS, own // THREAD_COLUMNS
    return WARP_COLUMNS * warp + THREAD_COLUMNS * quad + len(HALVES) * number + half


def store_keys(smem: dict[str, cute.Tensor], buffer: Int32, address: Any) -> None:
    """Store a tile of K.  address: of the warp's lanes of a buffer in tensor memory."""
    key = cute.arch.thread_idx()[0] % LANES
    row = buffer * BLOCK_KV + key
    scales = load_words(smem["scale_words"], row * SCALE_WORDS, SCALE_WORDS)
    for piece in range(PIECES):
        place = row * ROW_WORDS + (key % PIECES ^ piece) * PIECE_WORDS
        codes = load_words(smem["kv_words"], place, PIECE_WORDS)
        # A piece has two blocks, whose scales are a half of a word.
        pair = scales[piece // 2] >> (16 * (piece % 2))
        values = cute.make_rmem_tensor(PIECE_COLUMNS, Uint32)
        for number, word in enumerate(_pairs_of_blocks(codes, scale_pair(pair))):
            values[number] = word
        tmem_store(cute.recast_tensor(values, Float32), address + piece * PIECE_COLUMNS)


def store_values(smem: dict[str, cute.Tensor], buffer: Int32, address: Any) -> None:
    """Store a tile of V^T.  address: of the warp's lanes of a buffer in tensor memory."""
    thread = cute.arch.thread_idx()[0] % LANES
    warp, own = thread // WARP_SIZE, thread % WARP_SIZE
    first_key, quad = own % QUAD * 2, own // QUAD
    row = buffer * BLOCK_KV + first_key
    piece = 2 * warp + quad // PIECE_WORDS
    # Of both keys: the swizzle exchanges pieces by the key.
    codes = [
        (row + which) * ROW_WORDS + (piece ^ (first_key + which)) * PIECE_WORDS + quad % PIECE_WORDS
        for which in range(2)
    ]
    scales = [(row + which) * SCALE_WORDS + warp for which in range(2)]
    # Of the four scales in a word that of this thread's block.
    byte = quad // 2
    selector = Uint32(byte | (byte + WORD_BYTES) << 4)
    for chunk in range(BLOCK_KV // (GROUP_KEYS * GROUPS_AT_ONCE)):
        halves = [cute.make_rmem_tensor(THREAD_LANES * GROUPS_AT_ONCE, Uint32) for _ in HALVES]
        for group in range(GROUPS_AT_ONCE):
            far = (chunk * GROUPS_AT_ONCE + group) * GROUP_KEYS
            words = [load_words(smem["kv_words"], at + far * ROW_WORDS, 1)[0] for at in codes]
            first, second = (
                load_words(smem["scale_words"], at + far * SCALE_WORDS, 1)[0] for at in scales
            )
            scale = scale_pair(select_bytes(first, second, selector))
            for number, value in enumerate(_pairs_of_keys(words, scale)):
                half, lane = divmod(number, THREAD_LANES)
                upper, which = divmod(lane, 2)
                halves[half][upper * 2 * GROUPS_AT_ONCE + 2 * group + which] = value
        for half, values in zip(HALVES, halves, strict=True):
            column = half * HALF_COLUMNS + chunk * GROUPS_AT_ONCE * QUAD
            tmem_store_quads(cute.recast_tensor(values, Float32), address + column)


def _converted(source: str, number: int, scale: str) -> list[str]:
    """PTX that makes four results, from `number` on, of the bytes of a register:
    cvt.rn.f16x2.e2m1x2 (PTX ISA 9.7.9.22), times a scale."""
    lines = [f"mov.b32 {{b0, b1, b2, b3}}, {source};"]
    for byte in range(WORD_BYTES):
        lines += [
            f"cvt.rn.f16x2.e2m1x2 value, b{byte};",
            f"mul.rn.f16x2 {{$w{number + byte}}}, value, {scale};",
        ]
    return lines


def _pairs_of_blocks(codes: cute.Tensor, scales: Any) -> tuple[Any, ...]:
    lines = [
        "{.reg .b8 b0, b1, b2, b3;",
        ".reg .b16 first, second;",
        ".reg .b32 value, scale0, scale1;",
        f"mov.b32 {{first, second}}, {{$r{PIECE_WORDS}}};",
        "mov.b32 scale0, {first, first};",
        "mov.b32 scale1, {second, second};",
    ]
    for word in range(PIECE_WORDS):
        lines += _converted(f"{{$r{word}}}", word * WORD_BYTES, f"scale{word // 2}")
    return cute.arch.inline_ptx(
        "\n".join(lines) + "}",
        write_only_types=[Uint32] * PIECE_COLUMNS,
        read_only_args=[*(codes[word] for word in range(PIECE_WORDS)), scales],
    )


def _pairs_of_keys(words: list[Any], scales: Any) -> tuple[Any, ...]:
    """Words of f16x2 of two keys, of even columns and then of odd ones, times the keys' scales.
    lop3.b32 (PTX ISA 9.7.8.6) with 0xE4 is a & c | b & ~c."""
    lines = [
        "{.reg .b8 b0, b1, b2, b3;",
        ".reg .b32 value, shifted, codes;",
        "shl.b32 shifted, {$r1}, 4;",
        "lop3.b32 codes, {$r0}, shifted, 0x0F0F0F0F, 0xE4;",
        *_converted("codes", 0, "{$r2}"),
        "shr.u32 shifted, {$r0}, 4;",
        "lop3.b32 codes, shifted, {$r1}, 0x0F0F0F0F, 0xE4;",
        *_converted("codes", WORD_BYTES, "{$r2}"),
    ]
    return cute.arch.inline_ptx(
        "\n".join(lines) + "}",
        write_only_types=[Uint32] * (2 * WORD_BYTES),
        read_only_args=[*words, scales],
    )
