"""Resource usage of a kernel, read out of its cubin without any tool.

A cubin is an ELF file (CUDA Binary Utilities).  Section .nv.info holds attributes: a byte for the
layout, a byte for the number, two bytes for the size or the value.  An attribute of a function
begins with the index of its symbol.  `cuobjdump --dump-resource-usage` reports the same figures.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER_PLACE, _HEADER_SIZES = struct.Struct("<40xQ"), struct.Struct("<58xHHH")
#: Name, type, flags, address, place, size, link, information, alignment, size of an entry.
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<I20x")
#: Attributes: registers of a thread at launch, and the least stack of a thread, in bytes.
_HAS_SIZE, _REGISTERS, _STACK = 4, 0x2F, 0x12


@dataclass(frozen=True)
class ResourceUsage:
    """Resources of a thread of a kernel. registers: at launch. stack, local: bytes; spills would be
    in either."""

    registers: int
    stack: int
    local: int


def resource_usage(cubin: bytes, kernel: str | None = None) -> ResourceUsage:
    """Return what a cubin's kernel uses. kernel: its (mangled) name; without one, the largest
    figures of all kernels. Raises RuntimeError for a file of another form, and where the kernel is
    not in it."""
    try:
        found = _usages(cubin)
    except (struct.error, KeyError, ValueError) as error:
        raise RuntimeError(f"this cubin does not tell what its kernels use: {error!r}") from error
    rows = [usage for name, usage in found.items() if kernel in (None, name)]
    if not rows:
        wanted = "" if kernel is None else f" {kernel}"
        raise RuntimeError(f"the cubin has no kernel{wanted}; it has {', '.join(found) or 'none'}")
    return ResourceUsage(
        registers=max(row.registers for row in rows),
        stack=max(row.stack for row in rows),
        local=max(row.local for row in rows),
    )


def _usages(cubin: bytes) -> dict[str, ResourceUsage]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("it does not begin as an ELF file does")
    sections = _sections(cubin)
    place, size, link = sections[".nv.info"][4:7]
    headers = list(sections.values())
    symbols = headers[link]
    text = headers[symbols[6]]

    def name_of(symbol: int) -> str:
        (start,) = _SYMBOL.unpack_from(cubin, symbols[4] + symbol * _SYMBOL.size)
        return _text(cubin, text[4] + start)

    figures: dict[int, dict[str, int]] = {_REGISTERS: {}, _STACK: {}}
    for number, value in _attributes(cubin[place : place + size]):
        if number in figures:
            symbol, figure = struct.unpack("<II", value)
            figures[number][name_of(symbol)] = figure
    return {
        name: ResourceUsage(
            registers, figures[_STACK].get(name, 0), sections.get(f".nv.local.{name}", [0] * 6)[5]
        )
        for name, registers in figures[_REGISTERS].items()
        if f".text.{name}" in sections
    }


def _sections(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """Name -> header of each section, in order; a name that comes again has its number, too."""
    (place,) = _HEADER_PLACE.unpack_from(cubin)
    size, count, names = _HEADER_SIZES.unpack_from(cubin)
    headers = [_SECTION.unpack_from(cubin, place + i * size) for i in range(count)]
    found: dict[str, tuple[int, ...]] = {}
    for number, header in enumerate(headers):
        name = _text(cubin, headers[names][4] + header[0])
        found[f"{name} {number}" if name in found else name] = header
    return found


def _text(cubin: bytes, place: int) -> str:
    return cubin[place : cubin.index(b"\0", place)].decode()


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) of attributes with a size."""
    place = 0
    while place < len(content):
        layout, number, size = struct.unpack_from("<BBH", content, place)
        place += 4
        if layout == _HAS_SIZE:
            yield number, content[place : place + size]
            place += size
