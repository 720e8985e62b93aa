"""Fragments of a warpgroup's results: rescaled, and brought from registers to global memory.

Their layout: `instructions` NOTE [accumulator layout].

NOTE [results leave from registers].  A quad of lanes exchanges the words of a row until each lane
has 16 bytes in a row, and stores 64 bytes of a row at a time.  No buffer is needed.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ..limits import HEAD_DIM, WARP_SIZE
from ..operands import ATOM_ROWS, BLOCK_COLUMNS, ROW_BYTES
from ..rows.lanes import PIECE_BYTES
from ..rows.output_gate import Columns
from .instructions import COLUMN_GROUP, QUAD, ROWS, WARPGROUP_THREADS, rows_of, transpose_quad

#: Of an ldmatrix.
MATRICES = 4


@cute.jit
def rescale(o: cute.Tensor, factors: tuple[Float32, Float32]):
    """O *= factor, row by row, where any of the warp's maxima moved."""
    if cute.arch.vote_any_sync((factors[0] < Float32(1.0)) | (factors[1] < Float32(1.0))):
        for row, factor in zip(rows_of(o), factors, strict=True):
            row.store(row.load() * factor)


def row_columns() -> list[Columns]:
    """Return which columns of a row of 256 a lane has in its fragment."""
    lane = cute.arch.thread_idx()[0] % QUAD
    groups = range(HEAD_DIM // COLUMN_GROUP)
    return [Columns(2 * n, n * COLUMN_GROUP + 2 * lane, 2) for n in groups]


def fragment_words(tile: cute.Tensor, number: int) -> list[Uint32]:
    """Return words of two elements of a thread's row 0 or 1, in the order of its fragment. tile: 64
    x 256 of a 16-bit type in shared memory, an operand (`operands.smem_layout`), of which each warp
    reads its 16 rows."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    lane = thread % WARP_SIZE
    # Eight lanes have the addresses of eight rows, the next eight those of the next columns.
    in_atom, piece_of_lane = lane % ATOM_ROWS, lane // ATOM_ROWS
    row = thread // WARP_SIZE * 16 + number * ATOM_ROWS + in_atom
    to_row, words = tile.iterator.toint() + row * ROW_BYTES, list[Uint32]()
    for group in range(0, HEAD_DIM // COLUMN_GROUP, MATRICES):
        block, piece = divmod(group, BLOCK_COLUMNS // COLUMN_GROUP)
        # Bits 4 to 6 of an address are exchanged by the row's.
        address = to_row + ((piece_of_lane + piece) ^ in_atom) * PIECE_BYTES
        words += load_matrices(Int32(address), block * ROWS * ROW_BYTES)
    return words


def load_matrices(address: Int32, offset: int) -> list[Uint32]:
    """ldmatrix.sync.aligned.m8n8.x4.b16 (PTX ISA 9.7.15.5.15): four of 8 rows x 8 columns."""
    found: list[Uint32] = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        f"[{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    return found


def store_float32(values: cute.Tensor, out: cute.Tensor) -> None:
    """Store a row of 256: a quad stores eight columns, 32 bytes, at a time."""
    lane = cute.arch.thread_idx()[0] % QUAD
    pairs = cute.logical_divide(out, cute.make_layout(2))
    for group in range(HEAD_DIM // COLUMN_GROUP):
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = values[2 * group], values[2 * group + 1]
        cute.autovec_copy(pair, pairs[None, group * QUAD + lane])


def exchanged_words(values: cute.Tensor, dtype: Any) -> list[cute.Tensor]:
    """Return a row of 256, rounded to a type of 16 bits, eight neighbouring columns per lane. The
    lanes hold two columns each of every eight; they exchange words so that lane l has all of the
    eight with number 4 g + l, for each g."""
    rounded = cute.make_rmem_tensor(cute.size(values), dtype)
    rounded.store(values.load().to(dtype))
    words = cute.recast_tensor(rounded, Uint32)
    lane, groups = cute.arch.thread_idx()[0] % QUAD, []
    for start in range(0, HEAD_DIM // COLUMN_GROUP, QUAD):
        group = cute.make_rmem_tensor(QUAD, Uint32)
        exchanged = transpose_quad([words[start + i] for i in range(QUAD)], lane)
        for i, word in enumerate(exchanged):
            group[i] = word
        groups.append(group)
    return groups


def store_exchanged(words: list[cute.Tensor], out: cute.Tensor, dtype: Any) -> None:
    """Store what `exchanged_words` returns: a quad stores 32 columns, 64 bytes, at a time."""
    lane = cute.arch.thread_idx()[0] % QUAD
    groups = cute.logical_divide(out, cute.make_layout(COLUMN_GROUP))
    for number, group in enumerate(words):
        cute.autovec_copy(cute.recast_tensor(group, dtype), groups[None, number * QUAD + lane])


@cute.jit
def store_row(values: cute.Tensor, target: cute.Tensor, exists: Boolean):
    """Store a row of 256, if it exists, in the type of the target, of 16 or 32 bits. The quad
    exchanges words, so that a lane has all of every fourth run of eight columns: 16 bytes in a row,
    or 32 of float32."""
    lane = cute.arch.lane_idx() % QUAD
    words = 2 * target.element_type.width // 32  # of a lane's two columns
    for first in cutlass.range_constexpr(0, HEAD_DIM // COLUMN_GROUP, QUAD):
        rounded = cute.make_rmem_tensor((2, QUAD), target.element_type)
        part = cute.make_rmem_tensor((2, QUAD), Float32)
        for i in cutlass.range_constexpr(2 * QUAD):
            part[i] = values[2 * first + i]
        rounded.store(part.load().to(target.element_type))
        bits = cute.recast_tensor(rounded, Uint32)
        exchanged = cute.make_rmem_tensor((words, QUAD), Uint32)
        for word in cutlass.range_constexpr(words):
            column = [bits[word + words * run] for run in range(QUAD)]
            for i, value in enumerate(transpose_quad(column, lane)):
                exchanged[word, i] = value
        place = (target.iterator + (first + lane) * COLUMN_GROUP).align(16)
        place = cute.recast_ptr(place, dtype=Uint32)
        if exists:
            cute.autovec_copy(exchanged, cute.make_tensor(place, exchanged.layout))
