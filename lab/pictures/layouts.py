"""Layouts of an operand's elements: in swizzled shared memory, in a CTA pair, in tensor memory.

The rules drawn here are those by which the simulator's tensor core reads; tests hold them together.
"""

from __future__ import annotations

from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.blackwell.instructions import (
    OperandLayout,
    k_major_operand,
    mn_major_operand,
)
from lab.pictures.svg import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RULE, SKY, Drawing, tint

_SLICE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
ROWS, CHUNKS, CHUNK_BYTES = 8, 8, 16


def place_of_chunk(row: int, chunk: int) -> tuple[int, int]:
    """Return (line of 128 bytes, place of 16 bytes in it) of a chunk of an atom of 8 rows. The
    128-byte swizzle: address bits 6:4 are XORed with bits 9:7 (PTX ISA 9.7.16.4)."""
    address = row * CHUNKS * CHUNK_BYTES + chunk * CHUNK_BYTES
    address ^= (address >> 3) & 0x70
    return address // (CHUNKS * CHUNK_BYTES), address // CHUNK_BYTES % CHUNKS


def swizzle() -> Drawing:
    """One atom, 8 rows of 64 16-bit elements: as the kernel thinks of it, and as it lies."""
    drawing = Drawing(
        930,
        520,
        "The 128-byte swizzle of one atom",
        "Two grids of 8 by 8 chunks of 16 bytes. Left: rows and columns of the operand. Right: "
        "where the chunks lie in 128-byte lines of shared memory; chunk c of row r lies at place "
        "c xor r.",
    )
    drawing.heading(
        "The 128-byte swizzle: chunk c of row r lies at place c xor r",
        "one atom: 8 rows of 64 16-bit elements, 1024 bytes; a chunk is 8 elements, 16 bytes",
    )
    left, right, top, cell = 96, 560, 132, 40
    drawing.text((left + 4 * cell, 84), "the operand", 14, "middle", style="bold")
    drawing.text((right + 4 * cell, 84), "shared memory", 14, "middle", style="bold")
    for number, colour in enumerate(_SLICE_COLOURS):
        x = left + 2 * number * cell
        drawing.line([(x + 3, 118), (x + 2 * cell - 3, 118)], colour, 3)
        drawing.text((x + cell, 110), f"K slice {number}", 11, "middle", GREY)
    for place in range(CHUNKS):
        drawing.text(
            (right + (place + 0.5) * cell, 122), str(place * CHUNK_BYTES), 11, "middle", GREY
        )
    drawing.text((right + 4 * cell, 105), "byte in the line", 11, "middle", GREY)
    for row in range(ROWS):
        y = top + row * cell
        drawing.text((left - 12, y + 25), f"row {row}", 12, "end", GREY)
        drawing.text((right - 12, y + 25), f"line {row}", 12, "end", GREY)
        for chunk in range(CHUNKS):
            line, place = place_of_chunk(row, chunk)
            for x0, y0, words in (
                (left + chunk * cell, y, str(chunk)),
                (right + place * cell, top + line * cell, str(chunk)),
            ):
                _chunk(drawing, (x0, y0), cell, chunk, words)
    x = left + 8 * cell
    drawing.arrow([(x + 16, top + 160), (right - 72, top + 160)], INK, 2)
    drawing.lines(
        (24, 486),
        ["A column of the operand, 8 rows of one chunk, falls into 8 different places: all 32 "
         "banks, no conflict.",
         "An instruction reads K = 16, two chunks a row (one colour). Its descriptor starts 32 "
         "bytes further for each slice."], 12.5, colour=INK,
    )  # fmt: skip
    return drawing


def _chunk(
    drawing: Drawing, place: tuple[float, float], cell: float, chunk: int, words: str
) -> None:
    colour = _SLICE_COLOURS[chunk // 2]
    drawing.rect(*place, cell, cell, tint(colour, 0.55 if chunk % 2 else 0.25), "#ffffff", 0, 1.5)
    drawing.text((place[0] + cell / 2, place[1] + cell / 2 + 5), words, 13, "middle")


def operand_majors() -> Drawing:
    """K and V tiles in shared memory: the same kind of blocks, read along either side."""
    config = ForwardConfig()
    drawing = Drawing(
        1010,
        500,
        "K-major and MN-major operands",
        "A K tile of 64 keys and 256 columns lies in four blocks and is reduced over its columns; "
        "a V tile of 128 keys and 128 columns lies in two blocks and is reduced over its rows.",
    )
    drawing.heading(
        "K-major or MN-major: the same blocks, read along one side or the other",
        "what one CTA holds of a tile; a block is 64 columns, 128 bytes a row, swizzled in atoms "
        "of 8 rows; numbers: K = 16 slices",
    )
    keys = config.block_kv // 2
    _blocks(drawing, (36, 152), (keys, 4), k_major_operand(keys), True)
    drawing.text((36, 100), f"K for S = Q Kᵀ: {keys} keys x 256, K-major", 14, style="bold")
    drawing.lines((36, 121), ["reduced over the columns: slices stand side by side,",
                              "N are the keys"], 12, colour=GREY)  # fmt: skip
    rows = config.block_kv
    _blocks(drawing, (664, 152), (rows, 2), mn_major_operand(rows), False)
    drawing.text((664, 100), f"V for O = P V: {rows} keys x 128, MN-major", 14, style="bold")
    drawing.lines(
        (664, 121),
        [
            "reduced over the rows: slices one below the other,",
            "N are the columns, across both blocks",
        ],
        12,
        colour=GREY,
    )
    k, v = k_major_operand(keys), mn_major_operand(rows)
    drawing.lines(
        (36, 364),
        ["In the descriptors:",
         f"K: a slice starts {k.step_bytes[1]} bytes after the one before; the fifth "
         f"{k.step_bytes[4]:,} bytes in.",
         f"K: the next 8 rows lie {k.stride_bytes:,} bytes on (stride).",
         f"V: a slice is 16 rows, {v.step_bytes[1]:,} bytes after the one before.",
         f"V: the next 8 rows lie {v.stride_bytes:,} bytes on (stride), the next block",
         f"    {v.leading_bytes:,} bytes on (leading).",
         "TMA writes both alike, one box a block."], 12.5,
    )  # fmt: skip
    return drawing


def _blocks(
    drawing: Drawing,
    place: tuple[float, float],
    size: tuple[int, int],
    layout: OperandLayout,
    k_major: bool,
) -> None:
    """size: rows, and blocks of 64 columns; each slice of the layout is tinted in turn."""
    (left, top), (rows, blocks) = place, size
    width, scale = 132.0, 2.3
    for block in range(blocks):
        x = left + block * (width + 10)
        drawing.rect(x, top, width, rows * scale, "#ffffff", GREY, 0, 1.5)
    block_bytes = rows * 128
    for number, start in enumerate(layout.step_bytes):
        colour = tint(_SLICE_COLOURS[number % 4], 0.3)
        if k_major:
            block, inside = divmod(start, block_bytes)
            x = left + block * (width + 10) + inside / 128 * width
            drawing.rect(x, top, width / 4, rows * scale, colour, "#ffffff")
            drawing.text((x + width / 8, top + rows * scale / 2), str(number), 12, "middle")
        else:
            y, tall = top + start / 128 * scale, 16 * scale
            for block in range(blocks):
                drawing.rect(left + block * (width + 10), y, width, tall, colour, "#ffffff")
                drawing.text(
                    (left + block * (width + 10) + width / 2, y + tall / 2 + 4),
                    str(number),
                    12,
                    "middle",
                )
    for block in range(blocks):
        x = left + block * (width + 10) + width / 2
        drawing.text((x, top + rows * scale + 17), f"block {block}", 11, "middle", GREY)


def pair_operands() -> Drawing:
    """Draw which CTA holds which part of the operands of both MMAs."""
    drawing = Drawing(
        960,
        650,
        "Operands of a CTA pair",
        "Two products. For S = Q K^T each CTA holds its 128 rows of Q and 64 of the 128 keys. For "
        "O += P V each holds its 128 rows of P in tensor memory and 128 of the 256 columns of V.",
    )
    drawing.heading(
        "A pair shares K and V: each CTA loads half, the tensor cores of both read both halves",
        "blue: CTA 0, the leader, whose warp issues every product; orange: CTA 1",
    )
    _product(drawing, 100, ("Q", "K", "S"), (256, 256, 128), "K-major", ("SMEM", "SMEM", "TMEM"))
    _product(drawing, 388, ("P", "V", "O"), (256, 128, 256), "MN-major", ("TMEM", "SMEM", "TMEM"))
    return drawing


def _product(
    drawing: Drawing,
    top: float,
    names: tuple[str, str, str],
    size: tuple[int, int, int],
    major: str,
    homes: tuple[str, str, str],
) -> None:
    """A = m x k, B = k x n as drawn, D = m x n; A and D divided by rows, B by its n."""
    m, k, n = size
    scale = 0.92
    a, b, d = names
    left = 150.0
    verb = "S = Q Kᵀ" if a == "Q" else "O += P V"
    drawing.text((24, top + m * scale / 2 - 8), verb, 16, style="bold")
    drawing.text((24, top + m * scale / 2 + 14), f"K = {k}: {k // 16} x", 11.5, colour=GREY)
    drawing.text((24, top + m * scale / 2 + 29), "tcgen05.mma", 11.5, colour=GREY)
    halves = ((BLUE, 0), (ORANGE, 1))
    for colour, rank in halves:
        y = top + rank * m / 2 * scale
        _part(
            drawing,
            (left, y, k * scale, m / 2 * scale),
            colour,
            [f"{a} rows {rank * m // 2}..{(rank + 1) * m // 2 - 1}", homes[0]],
        )
    x = left + k * scale + 52
    drawing.text((x - 26, top + m * scale / 2 + 6), "x", 20, "middle")
    for colour, rank in halves:
        what = "keys" if b == "K" else "columns"
        first, last = rank * n // 2, (rank + 1) * n // 2 - 1
        words = [f"{b}{'ᵀ' if b == 'K' else ''} {what}", f"{first}..{last}", homes[1]]
        wide = max(n / 2 * scale, 92)
        tall = max(k * scale, 92)
        _part(drawing, (x + rank * wide, top + (m * scale - tall) / 2, wide, tall), colour, words)
    x += 2 * max(n / 2 * scale, 92) + 52
    drawing.text((x - 26, top + m * scale / 2 + 6), "=", 20, "middle")
    for colour, rank in halves:
        y = top + rank * m / 2 * scale
        _part(
            drawing,
            (x, y, max(n * scale, 130), m / 2 * scale),
            colour,
            [f"{d} rows {rank * m // 2}..{(rank + 1) * m // 2 - 1}", homes[2]],
        )
    x += max(n * scale, 130) + 22
    drawing.lines(
        (x, top + m * scale / 2 - 20),
        [f"B is {major}", "N is divided", "over the pair"],
        12,
        colour=GREY,
    )


def _part(
    drawing: Drawing, place: tuple[float, float, float, float], colour: str, words: list[str]
) -> None:
    left, top, width, height = place
    drawing.rect(left, top, width, height, tint(colour, 0.3), colour, 0, 1.5)
    first = top + height / 2 - (len(words) - 1) * 8 + 4
    for number, text in enumerate(words):
        last = number == len(words) - 1
        drawing.text(
            (left + width / 2, first + number * 16),
            text,
            11 if last else 12.5,
            "middle",
            GREY if last else INK,
        )


def accumulator_parts(m: int, n: int) -> list[tuple[range, range, range]]:
    """Return (lanes, rows, columns of the product) of each part of an accumulator in CTA 0 of a
    pair.

    M = 256: a row per lane. M = 128: 64 rows, the first half of N in lanes 0 to 63, the second in
    lanes 64 to 127 (PTX ISA 9.7.16.10.5).
    """
    rows = m // 2
    parts = 128 // rows
    return [
        (range(q * rows, (q + 1) * rows), range(rows), range(q * n // parts, (q + 1) * n // parts))
        for q in range(parts)
    ]


def tensor_memory_lanes() -> Drawing:
    """Rows of an accumulator in the lanes of tensor memory, and the warps that reach them."""
    drawing = Drawing(
        1040,
        476,
        "Lanes of tensor memory",
        "Two accumulators of CTA 0. With M = 256 over the pair a row of the product has a lane of "
        "its own; with M = 128 the lanes 0 to 63 hold the first half of the columns and 64 to 127 "
        "the second. Each warp of a warpgroup reaches 32 lanes.",
    )
    drawing.heading(
        "Tensor memory: 128 lanes, and a warp reaches 32 of them",
        "accumulators of CTA 0; the peer holds the other rows in the same way",
    )
    shapes = (
        ("M = 256 over the pair: S of the forward", 256, 128, "row", "key"),
        ("M = 128 over the pair: Sᵀ of dK/dV", 128, 256, "key", "query"),
    )
    top, tall = 126, 72
    for number, (title, m, n, of_row, of_column) in enumerate(shapes):
        left = 130 + number * 500
        drawing.text((left, 92), title, 14, style="bold")
        drawing.text((left, 112), f"128 columns, {m} x {n} float32 in the pair", 12, colour=GREY)
        for lanes, rows, columns in accumulator_parts(m, n):
            y, height = top + lanes.start / 32 * tall, len(lanes) / 32 * tall
            colour = (BLUE, SKY)[lanes.start > 0]
            drawing.rect(left, y, 300, height, tint(colour, 0.3), colour, 0, 1.5)
            drawing.lines(
                (left + 150, y + height / 2 - 6),
                [f"{of_row} {rows.start} .. {rows.stop - 1}, one a lane",
                 f"{of_column} {columns.start} .. {columns.stop - 1}, one a column"], 13, "middle",
            )  # fmt: skip
        for warp in range(4):
            y = top + warp * tall
            if warp:
                drawing.line([(left - 74, y), (left + 300, y)], RULE, 1, "3 3")
            drawing.text((left - 10, y + tall / 2 - 3), f"warp {warp}", 12.5, "end", style="bold")
            drawing.text(
                (left - 10, y + tall / 2 + 14), f"{32 * warp}..{32 * warp + 31}", 11, "end", GREY
            )
    drawing.text(
        (24, 450), "A thread of tcgen05.ld.32x32b gets its lane's columns: with M = 256 a whole "
        "row, so a row's maximum needs no shuffle.", 12.5,
    )  # fmt: skip
    return drawing
