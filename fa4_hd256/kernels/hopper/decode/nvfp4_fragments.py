"""K and V in NVFP4: from shared memory to the words of f16 that are an A in registers.

NOTE [e2m1 in f16].  The bits of an e2m1, sign apart, in the low exponent bits and the first bit of
the significand of an e4m3 are its value times 2^-6, subnormal ones too.  So the four high nibbles
of a word, or the four low ones, become a word of e4m3 by two shifts and two logical operations,
and cvt makes f16 of two at a time.  Seven integer operations bring eight elements to e4m3;
straight to f16 they would be fifteen.  An e2m1 has two bits of significand and a block's scale, an
e4m3, four: their product times 2^-6 is a multiple of 2^-16 of at most six bits, below 2^6.  So an
f16 holds it exactly, and one multiplication brings two elements to it.  What multiplies scores,
and the rows of O, has the 2^6 (`UNIT`).

NOTE [fragments of codes].  Threads have the rows and keys that they have in e4m3
(`e4m3_fragments`).  A row is 128 bytes, one row of the swizzle.  Thread t of a quad reads the
pieces 2 t and 2 t + 1 of 16 bytes of a row of K: 64 columns, four blocks, whose scales are one
word.  A word has 8 columns, for two slices of QK: a register of A has those of two high nibbles,
or of two low ones (`PAIRS`).

Of V a thread reads the same four columns of its keys, half a word.  The bytes of two keys,
interleaved, make a word, in which two high nibbles, or two low ones, are the same column of both.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...forward.nvfp4_words import (
    CODE_COLUMNS,
    ROW_WORDS,
    SCALE_WORDS,
    load_words,
    scale_pair,
    select_bytes,
)
from ...limits import WARP_SIZE
from ..instructions import QUAD, WARPGROUP_THREADS
from .config import BLOCK_KV, QK_PARTS
from .e4m3_fragments import KEY_STEPS, thread_key

#: What results of MMAs are to be multiplied with.
UNIT = 2.0**6
#: Columns of a row as 16-bit elements, four columns of the head in each.
TILE_COLUMNS = CODE_COLUMNS
PIECE_WORDS, PIECE_HALVES = 4, 8
#: Words of a thread's part of a row of K: 16 columns, a block.
PART_WORDS = 2
#: Elements of a word of K that registers of A have, in the order of `_scaled`.
PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
#: Columns of a word of two keys of V that registers of A have, in the same order.
VALUE_COLUMNS = (0, 2, 1, 3)


def query_pairs(lane: Int32) -> list[tuple[tuple[int, int], Int32]]:
    """Return ((two of this lane's 8 elements of a row of Q), the column at which they are stored
    next to each other): the order in which K's columns are multiplied."""
    thread, word = lane // 8, lane % 8
    found = []
    for number, pair in enumerate(PAIRS):
        of_slice, upper = divmod(number, 2)
        column = (2 * word + of_slice) * 16 + 8 * upper + 2 * thread
        found.append((pair, column))
    return found


def read_keys(smem: dict[str, cute.Tensor], buffer: Int32) -> list[list[Any]]:
    """Return (words, scale) of both rows of a K tile, by part of the columns."""
    thread, codes = cute.arch.thread_idx()[0], smem["kv_words"]
    lane, key = thread % QUAD, thread_key()
    row = (buffer * BLOCK_KV + key) * ROW_WORDS
    swizzle = thread % WARP_SIZE // QUAD
    scales = (buffer * BLOCK_KV + key) * SCALE_WORDS + lane
    of_rows = [
        load_words(smem["scale_words"], scales + step * SCALE_WORDS, 1)[0] for step in KEY_STEPS
    ]
    loaded = []
    for piece in range(2):
        at = row + ((2 * lane + piece) ^ swizzle) * PIECE_WORDS
        pieces = [load_words(codes, at + step * ROW_WORDS, PIECE_WORDS) for step in KEY_STEPS]
        for half in range(2):
            words = [[own[PART_WORDS * half + i] for i in range(PART_WORDS)] for own in pieces]
            part = 2 * piece + half
            loaded.append([(two, scale, part) for two, scale in zip(words, of_rows, strict=True)])
    assert len(loaded) == QK_PARTS
    return loaded


def convert_keys(of_rows: list[Any], keys: cute.Tensor) -> None:
    """Write A of a part of QK.  of_rows: of `read_keys`."""
    fragment = cute.recast_tensor(keys, Uint32)
    for which, (words, scales, part) in enumerate(of_rows):
        scale = scale_pair(_both(scales, part))
        for number, word in enumerate(words):
            for pair, elements in enumerate(_scaled(word, scale)):
                of_slice, upper = divmod(pair, 2)
                fragment[4 * (2 * number + of_slice) + which + 2 * upper] = elements


def read_values(smem: dict[str, cute.Tensor], buffer: Int32) -> list[tuple[Any, Any]]:
    """Return (word, scales of its two keys) by pairs of this thread's keys of a tile of V."""
    thread = cute.arch.thread_idx()[0]
    warpgroup, warp = thread // WARPGROUP_THREADS, thread // WARP_SIZE % 4
    quad, first_key = thread % WARP_SIZE // QUAD, thread % QUAD * 2
    row = buffer * BLOCK_KV + first_key
    piece = (4 * warpgroup + warp) ^ first_key
    at = [
        (row + which) * (2 * ROW_WORDS) + (piece ^ which) * PIECE_HALVES + quad
        for which in range(2)
    ]
    scale = row * SCALE_WORDS + 2 * warpgroup + warp // 2
    # Of the four scales in a word that of this thread's block.
    byte = 2 * (warp % 2) + quad // 4
    selector = byte | (byte + 4) << 4
    loaded = []
    for eight in range(BLOCK_KV // 8):
        far = eight * 8
        first, second = (
            Uint32(load_words(smem["kv_halves"], start + far * (2 * ROW_WORDS), 1)[0])
            for start in at
        )
        of_first, of_second = (
            load_words(smem["scale_words"], scale + (far + which) * SCALE_WORDS, 1)[0]
            for which in range(2)
        )
        word = select_bytes(first, second, Uint32(0x5140))
        loaded.append((word, select_bytes(of_first, of_second, Uint32(selector))))
    return loaded


def convert_values(loaded: list[tuple[Any, Any]], values: list[cute.Tensor]) -> None:
    fragments = [cute.recast_tensor(operand, Uint32) for operand in values]
    for eight, (word, scales) in enumerate(loaded):
        at = 4 * (eight // 2) + 2 * (eight % 2)
        of_columns = zip(VALUE_COLUMNS, _scaled(word, scale_pair(scales)), strict=True)
        for column, elements in of_columns:
            number, which = divmod(column, 2)
            fragments[number][at + which] = elements


def _both(word: Any, byte: int) -> Any:
    return select_bytes(word, word, Uint32(byte | byte << 4))


def _scaled(word: Any, scale: Any) -> tuple[Any, ...]:
    """Eight e2m1 as four words of f16x2 times a scale, low nibbles first, then high ones: NOTE
    [e2m1 in f16].  lop3.b32 (PTX ISA 9.7.8.6) with 0xEA is a & b | c."""
    lines = ["{.reg .b32 value, sign, codes;", ".reg .b16 first, second;"]
    for half, (shift, sign) in enumerate(
        (
            ("shl.b32 value, {$r0}, 2;", "shl.b32 sign, {$r0}, 4;"),
            ("shr.u32 value, {$r0}, 2;", "mov.b32 sign, {$r0};"),
        )
    ):
        lines += [
            shift,
            sign,
            "and.b32 value, value, 0x1C1C1C1C;",
            "lop3.b32 codes, sign, 0x80808080, value, 0xEA;",
            "mov.b32 {first, second}, codes;",
        ]
        for number, source in enumerate(("first", "second")):
            to = f"{{$w{2 * half + number}}}"
            lines += [
                f"cvt.rn.f16x2.e4m3x2 value, {source};",
                f"mul.rn.f16x2 {to}, value, {{$r1}};",
            ]
    return cute.arch.inline_ptx(
        "\n".join(lines) + "}", write_only_types=[Uint32] * 4, read_only_args=[word, scale]
    )
