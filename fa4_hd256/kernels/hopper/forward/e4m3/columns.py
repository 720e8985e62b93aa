"""V^T of a whole call: the kernel that transposes V in global memory, before the forward.

A CTA has a tile, 128 keys of a head: it reads them, transposes them in shared memory as `values`
does, and writes 256 rows of 128 bytes.  That moves V twice through HBM.  The forward then loads a
tile once for each of its query tiles, and none of them transposes it again: `config` NOTE [who
transposes].
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from ....limits import HEAD_DIM, SWIZZLE_ALIGNMENT
from .config import BLOCK_KV
from .values import HALF_BYTES, MATRIX_ROWS, PIECE, ROW_BYTES, transpose

THREADS = 128
TILE_BYTES = BLOCK_KV * HEAD_DIM
WORD = 4  # bytes
PIECE_WORDS = PIECE // WORD
#: Pieces of a thread, of a key's row, and of a column or half of a row.
THREAD_PIECES = TILE_BYTES // PIECE // THREADS
KEY_PIECES, HALF_PIECES = HEAD_DIM // PIECE, ROW_BYTES // PIECE


class ColumnsKernel:
    """Launch with `launch`, under `cute.compile`."""

    def launch(self, v: cute.Tensor, columns: cute.Tensor, stream: Any) -> None:
        """Fill V^T.

        v: (keys, 128 pairs of columns, heads, batch), dense.  columns: (256, 64 pairs of keys,
        heads, batch x tiles); a tile has its keys in the order of `values` NOTE [V by columns],
        those behind the last key 0, and its columns in that of NOTE [columns of O].
        """
        ctas = cute.size(columns, mode=[2]) * cute.size(columns, mode=[3])
        self.kernel(v, columns).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, v: cute.Tensor, columns: cute.Tensor):
        """Transpose the tile of this CTA; neighbouring CTAs have the same keys of all heads."""
        cta, heads = cute.arch.block_idx()[0], cute.size(columns, mode=[2])
        memory = SmemAllocator().allocate(2 * TILE_BYTES, SWIZZLE_ALIGNMENT)
        self._read(v, _words_at(memory), cta % heads, cta // heads)
        cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # A warp has 64 keys and half of the columns.
        source, target = (memory + start + warp // 2 * HALF_BYTES for start in (0, TILE_BYTES))
        transpose(source, target, warp % 2, halves=1)
        cute.arch.sync_threads()
        tile = columns[None, None, cta % heads, cta // heads]
        self._write(_words_at(memory + TILE_BYTES), cute.recast_tensor(tile, Uint32))

    def _read(self, v: cute.Tensor, rows: cute.Tensor, head: Int32, entry: Int32) -> None:
        """Bring a tile to shared memory, as TMA would.  entry: of the batch and its tiles."""
        keys, thread = cute.size(v, mode=[0]), cute.arch.thread_idx()[0]
        tiles = (keys + BLOCK_KV - 1) // BLOCK_KV
        batch, first = entry // tiles, entry % tiles * BLOCK_KV
        pieces = cute.make_rmem_tensor((PIECE_WORDS, THREAD_PIECES), Uint32)
        pieces.fill(0)
        piece, key = thread % KEY_PIECES, thread // KEY_PIECES
        # All of a thread's loads before the first of its stores.
        self._read_keys(v[None, None, head, batch], pieces, (first + key, piece))
        for number in range(THREAD_PIECES):
            row = piece // HALF_PIECES * BLOCK_KV + key + number * (THREADS // KEY_PIECES)
            place = _place(row, piece % HALF_PIECES)
            cute.autovec_copy(pieces[None, number], _piece(rows, place))

    @cute.jit
    def _read_keys(self, plane: cute.Tensor, pieces: cute.Tensor, place: tuple[Int32, Int32]):
        """Load a thread's pieces of the keys that there are.  place: (first key, piece)."""
        first, piece = place
        for number in cutlass.range_constexpr(THREAD_PIECES):
            key = first + number * (THREADS // KEY_PIECES)
            if key < cute.size(plane, mode=[0]):
                row = cute.recast_tensor(plane[key, None], Uint32)
                cute.autovec_copy(_piece(row, piece * PIECE_WORDS), pieces[None, number])

    def _write(self, columns: cute.Tensor, tile: cute.Tensor) -> None:
        """Write a tile of V^T to global memory.  tile: (256, 32 words)."""
        thread = cute.arch.thread_idx()[0]
        piece, column = thread % HALF_PIECES, thread // HALF_PIECES
        pieces = cute.make_rmem_tensor((PIECE_WORDS, THREAD_PIECES), Uint32)
        for number in range(THREAD_PIECES):
            row = column + number * (THREADS // HALF_PIECES)
            cute.autovec_copy(_piece(columns, _place(row, piece)), pieces[None, number])
            row_words = tile[row, None]
            cute.autovec_copy(pieces[None, number], _piece(row_words, piece * PIECE_WORDS))


def _words_at(memory: cute.Pointer) -> cute.Tensor:
    words = cute.recast_ptr(memory.align(PIECE), dtype=Uint32)
    return cute.make_tensor(words, cute.make_layout(TILE_BYTES // WORD))


def _place(row: Int32, piece: Int32) -> Int32:
    """Return the first word of a piece of a row of 128 bytes, with the 128-byte swizzle."""
    return row * (ROW_BYTES // WORD) + (piece ^ row % MATRIX_ROWS) * PIECE_WORDS


def _piece(words: cute.Tensor, first: Int32) -> cute.Tensor:
    return cute.make_tensor((words.iterator + first).align(PIECE), cute.make_layout(PIECE_WORDS))
