"""Layout of an MMA operand in shared memory: addresses of its 16-byte chunks, and the swizzle.

The layouts that matrix descriptors name (`isa.tensor.descriptors`), for MMAs in native code and in
Python, tcgen05.cp, wgmma and the sanitizer; the swizzle, for TMA, too. Canonical layouts: CuTe's
SM100 UMMA traits, in bytes.
"""

from __future__ import annotations

from .language import i64, native, ptr, trailing_zeros, u32, u64

#: Numbers of a layout, in bytes: first chunk, leading and stride byte offset, span of the swizzle
#: pattern (0 for none), atom that it keeps together (16 or 32).
START, LEADING, STRIDE, SPAN, ATOM, LAYOUT = range(6)


@native
def swizzled(address: u64, span: u64, atom: u64) -> u64:
    """Shared address after the swizzle, an XOR on absolute address bits.

    128 B: bits 6:4 ^= bits 9:7; 64 B: bits 5:4 ^= bits 8:7; 32 B: bit 4 ^= bit 7; 128 B with atoms
    of 32 B: bits 6:5 ^= bits 8:7. It is its own inverse.
    """
    if atom == 32:
        return address ^ (address >> 2 & 0x60)
    if span == 0:
        return address
    return address ^ (address >> 3 & (span - 16))


@native
def read_layout(layout: ptr[u64], raw: u64) -> None:
    """The layout that a matrix descriptor of tcgen05 names, atoms of 16 bytes."""
    mode = raw >> 61
    layout[START] = (raw & 0x3FFF) << 4
    layout[LEADING] = (raw >> 16 & 0x3FFF) << 4
    layout[STRIDE] = (raw >> 32 & 0x3FFF) << 4
    layout[SPAN] = u64(256) >> (mode >> 1) if mode != 0 else u64(0)
    layout[ATOM] = 16


@native
def chunk_at(layout: ptr[u64], mn_major: u32, line: u64, chunk: u64) -> u64:
    """Shared address of a chunk. K-major: a line is a row of M or N, its chunks go along K.
    MN-major: a line is a k, its chunks go along M or N."""
    plain = layout[SPAN] == 0
    width = u64(16) if plain else layout[SPAN]
    address = layout[START] + (line & 7) * width + (line >> 3) * layout[STRIDE]
    if mn_major == 0:
        address += chunk * (layout[LEADING] if plain else u64(16))
    else:
        # Without a swizzle the two strides swap their roles.
        far = layout[STRIDE] if plain else layout[LEADING]
        deep = layout[LEADING] if plain else layout[STRIDE]
        rows = u64(3) if layout[ATOM] == 16 else u64(2)
        across = u64(trailing_zeros(width)) - 4
        inside = chunk & ((u64(1) << across) - 1)
        address = layout[START] + inside * 16 + (chunk >> across) * far
        address += (line & ((u64(1) << rows) - 1)) * width + (line >> rows) * deep
    return swizzled(address, layout[SPAN], layout[ATOM])


@native
def chunk_table(out: ptr[i64], layout: ptr[u64], mn_major: u32, lines: u64, chunks: u64) -> None:
    """Addresses of all chunks of an operand, int64 [lines, chunks]."""
    for line in range(lines):
        for chunk in range(chunks):
            out[line * chunks + chunk] = i64(chunk_at(layout, mn_major, line, chunk))
