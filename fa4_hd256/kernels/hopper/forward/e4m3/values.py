"""V in e4m3 on its way to the tensor core: transposed in shared memory, and O's columns put right.

NOTE [V by columns].  wgmma takes operands of 8 bits K-major only: V^T has to lie with the keys of a
column in a row.  Two warps bring a tile there through registers, 64 keys each.  Elements of 16
bits, which ldmatrix can transpose, are two neighbouring columns of a key: of eight keys x 16
columns lane l gets columns 2 (l / 4) and 2 (l / 4) + 1 of the keys 2 (l % 4) and 2 (l % 4) + 1.  Of
two such matrices, keys 0 to 7 and 8 to 15, one PRMT takes the bytes of the even column, one those
of the odd one, and stmatrix writes both as rows of 16 bytes.

A row then has its 16 keys in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.  The scores of a
lane are those of the keys 2 (l % 4), 2 (l % 4) + 1 of every eight (`instructions` NOTE [accumulator
layout]), and an A of e4m3 has 4 (l % 4) to 4 (l % 4) + 3 of every sixteen there: P, rounded and
packed as it stands, has the keys in that very order.  PV sums over the keys, so it may be any.

NOTE [columns of O].  Eight rows that stmatrix writes at once lie side by side, so that no two meet
in a bank: of 16 columns first the even ones, then the odd ones.  So are the columns of O.  A lane
then has, of every 16, the four neighbours from 4 (l % 4) on: the elements of an accumulator in the
order 0 2 1 3.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ....e4m3_codes import codes_of
from ....limits import HEAD_DIM, WARP_SIZE
from ....rows.output_gate import Columns
from ...instructions import QUAD
from .config import BLOCK_KV, TRANSPOSERS

ROW_BYTES = BLOCK_KV  # of V^T; of V, a half of a row
SHARE = BLOCK_KV // TRANSPOSERS  # keys of a warp
PIECE = 16  # bytes of a row of a matrix
MATRIX_ROWS = 8
BLOCK_BYTES = 128  # of columns of V, whose rows lie together
HALF_BYTES = BLOCK_BYTES * ROW_BYTES
#: Loads that are under way before the first of them is used: more take registers that a warp lacks.
IN_FLIGHT = 1


def transpose(
    source: cute.Pointer, target: cute.Pointer, keys: Int32, halves: int = HEAD_DIM // BLOCK_BYTES
) -> None:
    """Transpose 64 keys of a tile of V, by one warp.  source: V, 128 keys x 256 columns as TMA
    writes them; target: V^T.  keys: which of the tile's two times 64.  halves: of the columns.

    Pieces of 16 bytes are exchanged by the last bits of their row, so that a step of some pieces
    is an exclusive or; all other steps are constants in the instructions.
    """
    lane = cute.arch.lane_idx()
    matrix, row = lane // MATRIX_ROWS, lane % MATRIX_ROWS
    # A lane names a key.
    read = (keys * SHARE + lane) * ROW_BYTES + row * PIECE
    # A lane names a row of V^T; the matrices are (even or odd columns, 16 keys).
    write = (matrix % 2 * MATRIX_ROWS + row) * ROW_BYTES
    write += (keys * (SHARE // PIECE) + matrix // 2 ^ row) * PIECE
    from_tile, to_tile = source.toint(), target.toint()
    blocks = [
        (block, piece, number)
        for piece in range(BLOCK_BYTES // PIECE)
        for block in range(halves)
        for number in range(SHARE // WARP_SIZE)
    ]
    loaded: list[list[Uint32]] = []
    for number in range(len(blocks) + IN_FLIGHT):
        if number < len(blocks):
            block, piece, keys_number = blocks[number]
            offset = block * HALF_BYTES + keys_number * WARP_SIZE * ROW_BYTES
            loaded.append(_load((read ^ (piece * PIECE)) + from_tile, offset))
        if number >= IN_FLIGHT:
            block, piece, keys_number = blocks[number - IN_FLIGHT]
            words = loaded[number - IN_FLIGHT]
            by_columns = [
                _pick(words[i], words[i + 1], which) for i in (0, 2) for which in ("even", "odd")
            ]
            offset = block * HALF_BYTES + piece * PIECE * ROW_BYTES
            _store((write ^ (2 * PIECE * keys_number)) + to_tile, offset, by_columns)


def _load(address: Int32, offset: int) -> list[Uint32]:
    """ldmatrix.sync.aligned.m8n8.x4.trans.b16 (PTX ISA 9.7.15.5.15): 32 keys x 16 columns."""
    words: list[Uint32] = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        f"[{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    return words


def _store(address: Int32, offset: int, words: list[Uint32]) -> None:
    """stmatrix.sync.aligned.m8n8.x4.b16 (PTX ISA 9.7.15.5.16): 16 rows of V^T, 32 keys each."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
        f"[{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def _pick(first: Uint32, second: Uint32, which: str) -> Uint32:
    """Bytes 0 and 2, or 1 and 3, of two words: prmt.b32 (PTX ISA 9.7.9.7)."""
    selector = {"even": 0x6420, "odd": 0x7531}[which]
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{selector:x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


def pack_codes(values: cute.Tensor, fragment: cute.Tensor) -> None:
    """Round an accumulator's values to e4m3, into the fragment of an A: NOTE [V by columns]."""
    words = cute.recast_tensor(fragment, Int32)
    for number in range(cute.size(words)):
        sixteen, row = divmod(number, 2)
        first = 8 * sixteen + 2 * row
        words[number] = codes_of([values[first + i] for i in (0, 1, 4, 5)])


def ordered(values: cute.Tensor) -> cute.Tensor:
    """Return a thread's columns of a row of O, four neighbours after four: NOTE [columns of O]."""
    columns = cute.make_rmem_tensor(cute.size(values), values.element_type)
    for first in range(0, cute.size(values), 4):
        for number, at in enumerate((0, 2, 1, 3)):
            columns[first + number] = values[first + at]
    return columns


def lane_columns() -> list[Columns]:
    lane = cute.arch.thread_idx()[0] % QUAD
    return [Columns(4 * n, n * PIECE + 4 * lane, 4) for n in range(HEAD_DIM // PIECE)]


def store_float32(values: cute.Tensor, out: cute.Tensor) -> None:
    """Store a row of 256: a quad stores 16 columns, 64 bytes, at a time."""
    lane = cute.arch.thread_idx()[0] % QUAD
    fours = cute.logical_divide(out, cute.make_layout(4))
    for number in range(HEAD_DIM // PIECE):
        four = cute.make_rmem_tensor(4, values.element_type)
        for i in range(4):
            four[i] = values[4 * number + i]
        cute.autovec_copy(four, fours[None, number * QUAD + lane])


def exchanged_pieces(values: cute.Tensor, dtype: Any) -> list[cute.Tensor]:
    """Return a row of 256, rounded to a type of 16 bits, eight neighbouring columns per lane. Of
    every 32 columns a lane has twice four neighbours. Two lanes exchange four for four, so that the
    even one has eight of the first 16, the odd one eight of the last."""
    rounded = cute.make_rmem_tensor(cute.size(values), dtype)
    rounded.store(values.load().to(dtype))
    words, is_odd = cute.recast_tensor(rounded, Uint32), cute.arch.thread_idx()[0] % 2 != 0
    pieces = []
    for first in range(0, cute.size(words), 4):
        own, other = (
            [cutlass.select_(is_odd, words[first + a + i], words[first + b + i]) for i in (0, 1)]
            for a, b in ((2, 0), (0, 2))
        )
        received = [cute.arch.shuffle_sync_bfly(word, offset=1) for word in other]
        piece = cute.make_rmem_tensor(4, Uint32)
        for i in (0, 1):
            piece[i] = cutlass.select_(is_odd, received[i], own[i])
            piece[2 + i] = cutlass.select_(is_odd, own[i], received[i])
        pieces.append(piece)
    return pieces


def store_pieces(pieces: list[cute.Tensor], out: cute.Tensor, dtype: Any) -> None:
    lane = cute.arch.thread_idx()[0] % QUAD
    place = lane % 2 * 2 + lane // 2
    eights = cute.logical_divide(out, cute.make_layout(8))
    for number, piece in enumerate(pieces):
        cute.autovec_copy(cute.recast_tensor(piece, dtype), eights[None, number * QUAD + place])
