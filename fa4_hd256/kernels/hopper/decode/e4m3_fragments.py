"""K and V in e4m3: from shared memory to the words of f16 that are an A in registers.

NOTE [fragments of bytes].  Thread t of a quad g of a warp has rows g and g + 8 of the 16 of its
warp, in A and in S^T: keys.  Of a row of K it reads the pieces 2 t and 2 t + 1 of 16 bytes of each
128, and the bytes 4 i to 4 i + 3 of a piece are its four elements of one slice of QK.  Lanes that
read at the same time have rows g and g + 1, so that the 128-byte swizzle gives them pieces that
differ in the bit that their rows do: no two meet in a bank.

Of V it reads the four bytes 4 g of the 32 columns of its warp, of the keys 2 t and 2 t + 1 of every
eight: swizzled, each pair of rows has its own pair of pieces.  They are the rows g and g + 8 of
both MMAs of O^T.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import ROW_BYTES
from ..instructions import QUAD, WARPGROUP_THREADS
from .config import BLOCK_KV, QK_PARTS

#: How far a thread's two keys of a step are from its first one.
KEY_STEPS = (0, 8)
WORD = 4  # bytes
PIECE = 16  # bytes that a thread reads of K at once
#: Columns of a row as 16-bit elements, and what results of MMAs are to be multiplied with.
TILE_COLUMNS = HEAD_DIM // 2
UNIT = 1.0
ROW_WORDS = ROW_BYTES // WORD
PIECE_WORDS = PIECE // WORD
BLOCK_WORDS = BLOCK_KV * ROW_WORDS  # of 128 columns of a tile


def thread_key() -> Int32:
    """Return the first of this thread's keys in a step."""
    thread = cute.arch.thread_idx()[0]
    return thread // WARP_SIZE * 16 + thread % WARP_SIZE // QUAD


def query_pairs(lane: Int32) -> list[tuple[tuple[int, int], Int32]]:
    """Return ((two of this lane's 8 elements of a row of Q), the column at which they are stored
    next to each other): half of a piece of 16, thus of two slices; `config` NOTE [order of
    columns]."""
    piece, half = lane // 2, lane % 2
    thread, first_slice = piece % 8 // 2, (piece // 8 * 2 + piece % 2) * 4 + 2 * half
    found = []
    for pair in range(4):
        of_slice, upper = divmod(pair, 2)
        column = (first_slice + of_slice) * 16 + 8 * upper + 2 * thread
        found.append(((2 * pair, 2 * pair + 1), column))
    return found


def read_keys(smem: dict[str, cute.Tensor], buffer: Int32) -> list[list[cute.Tensor]]:
    """Return a thread's words of a K tile: a piece of each part of the columns, of both rows."""
    thread, tiles = cute.arch.thread_idx()[0], smem["kv_words"]
    piece = (2 * (thread % QUAD)) ^ (thread % WARP_SIZE // QUAD)
    tile = buffer * (2 * BLOCK_WORDS) + thread_key() * ROW_WORDS
    pieces = [tile + ((piece ^ odd) * PIECE_WORDS) for odd in range(2)]
    loaded = []
    for part in range(QK_PARTS):
        block, odd = divmod(part, 2)
        far = [block * BLOCK_WORDS + step * ROW_WORDS for step in KEY_STEPS]
        loaded.append([_words(tiles, pieces[odd] + f, PIECE_WORDS) for f in far])
    return loaded


def read_values(smem: dict[str, cute.Tensor], buffer: Int32) -> list[list[Uint32]]:
    thread, tiles = cute.arch.thread_idx()[0], smem["kv_words"]
    warpgroup, warp = thread // WARPGROUP_THREADS, thread // WARP_SIZE % 4
    quad, first_key = thread % WARP_SIZE // QUAD, thread % QUAD * 2
    piece = (2 * warp + quad // 4) ^ first_key
    tile = buffer * (2 * BLOCK_WORDS) + warpgroup * BLOCK_WORDS
    tile = tile + first_key * ROW_WORDS + quad % 4
    pieces = [tile + (which * ROW_WORDS + (piece ^ which) * PIECE_WORDS) for which in range(2)]
    loaded = []
    for eight in range(BLOCK_KV // 8):
        far = eight * 8 * ROW_WORDS
        loaded.append([_words(tiles, pieces[which] + far, 1)[0] for which in range(2)])
    return loaded


def convert_keys(of_rows: list[cute.Tensor], keys: cute.Tensor) -> None:
    """Write A of a part of QK.  of_rows: the part's words of both rows."""
    fragment = cute.recast_tensor(keys, Uint32)
    for which, pieces in enumerate(of_rows):
        for i in range(PIECE_WORDS):
            at = 4 * i + which
            fragment[at], fragment[at + 2] = halves_of(pieces[i])


def convert_values(words: list[list[Uint32]], values: list[cute.Tensor]) -> None:
    """Write A of both PV.  words: of `read_values`."""
    for number, operand in enumerate(values):
        fragment = cute.recast_tensor(operand, Uint32)
        for eight, pair in enumerate(words):
            at = 4 * (eight // 2) + 2 * (eight % 2)
            fragment[at], fragment[at + 1] = halves_of(pair_of(number, *pair))


def _words(tiles: cute.Tensor, start: Int32, count: int) -> cute.Tensor:
    words = cute.make_rmem_tensor(count, Uint32)
    place = (tiles.iterator + start).align(count * WORD)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), words)
    return words


def halves_of(word: Any) -> tuple[Any, Any]:
    """Four e4m3 as two words of f16x2, exactly: cvt.rn.f16x2.e4m3x2 (PTX ISA 9.7.9.22)."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 {$w0}, low;\n"
        "cvt.rn.f16x2.e4m3x2 {$w1}, high;}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


def pair_of(number: int, first: Any, second: Any) -> Any:
    """Bytes 0 and 1, or 2 and 3, of two words, interleaved: prmt.b32 (PTX ISA 9.7.9.7)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{(0x5140, 0x7362)[number]:x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )
