"""Movement of TMA tiles between global and shared memory (PTX ISA 9.3, "Tensor copies").

A tile starts at signed coordinates; elements outside the tensor are filled on loads and dropped on
stores. In shared memory it is dense, dimension 0 fastest, with the swizzle XOR on absolute address
bits; rows shorter than the swizzle span stand one span apart.
"""

from __future__ import annotations

from .language import boolean, copy, i64, native, ptr, u8, u32, u64
from .layout import TileMap
from .operand_layout import swizzled

#: Bytes that stay together in every swizzle, and that a store writes whole.
UNIT = 16


@native
def rounded_to_tf32(word: u32) -> u32:
    """An f32 as tf32: nearest even, NaN canonical."""
    magnitude = word & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return u32(0x7FFFE000)
    if magnitude == 0x7F800000:
        return word
    return word + 0xFFF + (word >> 13 & 1) & 0xFFFFE000


@native
def load_bytes(target: ptr[u8], source: ptr[u8], length: u64, t: ptr[TileMap]) -> None:
    """Bytes that lie inside the tensor."""
    if t.tf32 == 0:
        copy(target, source, length)
        return
    words = ptr[u32](target)
    values = ptr[u32](source)
    for i in range(length >> 2):
        words[i] = rounded_to_tf32(values[i])


@native
def fill_bytes(target: ptr[u8], length: u64, t: ptr[TileMap]) -> None:
    """Bytes of elements outside the tensor; `target` at an even byte of the tile."""
    for i in range(length):
        value = u8(0)
        if t.nan_fill != 0:
            value = u8(0x7F) if i & 1 == 1 else u8(0xF7)
        target[i] = value


@native
def move_part(
    target: ptr[u8],
    row: u64,
    first: i64,
    length: i64,
    low: i64,
    high: i64,
    t: ptr[TileMap],
    load: u32,
) -> None:
    """Bytes [first, first + length) of a row of the tile, those in [low, high) inside the tensor.

    row: where byte 0 of it is in global memory, or would be.
    """
    begin = first if first > low else low
    end = first + length if first + length < high else high
    if begin >= end:
        if load == 1:
            fill_bytes(target, u64(length), t)
        return
    inside = target + u64(begin - first)
    outer = ptr[u8](row + u64(begin))
    if load == 0:
        copy(outer, inside, u64(end - begin))
        return
    if begin > first:
        fill_bytes(target, u64(begin - first), t)
    load_bytes(inside, outer, u64(end - begin), t)
    if end < first + length:
        fill_bytes(target + u64(end - first), u64(first + length - end), t)


@native
def move_row(
    smem: ptr[u8], place: u64, row: u64, low: i64, high: i64, t: ptr[TileMap], load: u32
) -> None:
    """One row of the tile, at shared address `place` before the swizzle."""
    length = i64(t.counts[0] * t.width)
    if t.swizzle == 0:
        move_part(smem + place, row, i64(0), length, low, high, t, load)
        return
    span = u64(t.swizzle)
    atom = u64(t.atom)
    plain = low <= 0 and high >= length and (load == 0 or t.tf32 == 0)
    for unit in range(u64(length) >> 4):
        first = unit * UNIT
        inside = smem + swizzled(place + first, span, atom)
        if not plain:
            move_part(inside, row, i64(first), i64(UNIT), low, high, t, load)
        elif load == 1:
            copy(inside, ptr[u8](row + first), UNIT)
        else:
            copy(ptr[u8](row + first), inside, UNIT)


@native
def is_inside(coordinate: i64, size: i64) -> boolean:
    """Return True if a coordinate is one of the tensor's."""
    return coordinate >= 0 and coordinate < size


@native
def move_tile(smem: ptr[u8], offset: u64, t: ptr[TileMap], at: ptr[i64], load: u32) -> None:
    """A tile between the tensor and a CTA's shared memory at `offset`.

    at: five coordinates, dimension 0 first. load: 1 to shared memory, 0 from it: then whole units
    of 16 bytes are written where a row of the tensor ends within one (measured on an H200).
    """
    width = i64(t.width)
    size = t.sizes[0] * width
    if load == 0:
        size = size + 15 & ~i64(15)
    low: i64 = 0
    if at[0] < 0:
        low = (0 - at[0]) * width
    high = size - at[0] * width
    pitch = t.counts[0] * t.width
    pitch = u64(t.swizzle) if t.swizzle != 0 else pitch
    place = offset
    for i4 in range(t.counts[4]):
        c4 = at[4] + i64(i4 * t.steps[4])
        for i3 in range(t.counts[3]):
            c3 = at[3] + i64(i3 * t.steps[3])
            for i2 in range(t.counts[2]):
                c2 = at[2] + i64(i2 * t.steps[2])
                for i1 in range(t.counts[1]):
                    c1 = at[1] + i64(i1 * t.steps[1])
                    row = (
                        i64(t.address)
                        + at[0] * width
                        + c1 * i64(t.strides[1])
                        + c2 * i64(t.strides[2])
                        + c3 * i64(t.strides[3])
                        + c4 * i64(t.strides[4])
                    )
                    end: i64 = 0
                    if is_inside(c1, t.sizes[1]) and is_inside(c2, t.sizes[2]):
                        if is_inside(c3, t.sizes[3]) and is_inside(c4, t.sizes[4]):
                            end = high
                    move_row(smem, place, u64(row), low, end, t, load)
                    place += pitch
