"""Reader of a kernel's machine code: the registers of its launch, and whether setmaxnreg moves
them.

A cubin is an ELF file (CUDA Binary Utilities). Section .nv.info holds attributes, each a format
byte, a number and a size, then the value; number 0x2f, of 8 bytes, is the index of a function's
symbol and its registers per thread. `cuobjdump --dump-resource-usage` reports the same count.
"""

from __future__ import annotations

import ctypes
import io
import struct

import numpy as np
from elftools.elf.elffile import ELFFile

__all__ = ["launch_registers", "loaded_cubin", "moving_registers"]

_ELF_MAGIC = b"\x7fELF"
_FAT_BINARY_MAGIC = 0xBA55ED50
_FAT_BINARY = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the content
_HAS_SIZE, _REGISTER_COUNT = 4, 0x2F
#: Instructions have 16 bytes; the lowest 12 bits are the opcode, here of USETMAXREG.
_INSTRUCTION_BYTES, _OPCODE, _SET_REGISTERS = 16, 0xFFF, 0x9C8


def loaded_cubin(address: int) -> bytes:
    """The cubin in host memory that cudaLibraryLoadData is given.

    address: of an ELF file, or of a fat binary, whose first ELF file counts. Returns b"" if there
    is none, or only compressed ones.
    """
    if ctypes.string_at(address, 4) == _ELF_MAGIC:
        return _elf_at(address)
    magic, _, header, size = _FAT_BINARY.unpack(ctypes.string_at(address, _FAT_BINARY.size))
    if magic != _FAT_BINARY_MAGIC:
        return b""
    place, end = address + header, address + header + size
    while place < end:
        _, _, header, size = _ENTRY.unpack(ctypes.string_at(place, _ENTRY.size))
        if size >= 4 and ctypes.string_at(place + header, 4) == _ELF_MAGIC:
            return _elf_at(place + header)
        place += header + size
    return b""


def _elf_at(address: int) -> bytes:
    """The ELF file that starts at a host address; its header tables are its end."""
    program, section = struct.unpack("<QQ", ctypes.string_at(address + 32, 16))
    _, program_size, programs, section_size, sections = struct.unpack(
        "<5H", ctypes.string_at(address + 52, 10)
    )
    return ctypes.string_at(
        address, max(program + programs * program_size, section + sections * section_size)
    )


def launch_registers(cubin: bytes) -> dict[str, int]:
    """Registers that a thread of each function of a cubin is launched with, by (mangled) name."""
    if not cubin:
        return {}
    file = ELFFile(io.BytesIO(cubin))
    section = file.get_section_by_name(".nv.info")
    if section is None:
        return {}
    content, symbols = section.data(), file.get_section(section["sh_link"])
    found, place = {}, 0
    while place < len(content):
        layout, number, size = struct.unpack_from("<BBH", content, place)
        place += 4
        if layout != _HAS_SIZE:  # the two bytes are the value itself
            continue
        if number == _REGISTER_COUNT:
            symbol, registers = struct.unpack_from("<II", content, place)
            found[symbols.get_symbol(symbol).name] = registers
        place += size
    return found


def moving_registers(cubin: bytes) -> set[str]:
    """Return the mangled names of the functions of a cubin that have a setmaxnreg.

    ptxas drops it, with a warning, from kernels whose registers no directive fixes: neither
    .maxnreg nor .minnctapersm (ptxas 13.1). The PTX ISA requires one of them.
    """
    if not cubin:
        return set()
    found = set()
    for section in ELFFile(io.BytesIO(cubin)).iter_sections():
        if section.name.startswith(".text."):
            words = np.frombuffer(section.data(), "<u2")[:: _INSTRUCTION_BYTES // 2]
            if (words & _OPCODE == _SET_REGISTERS).any():
                found.add(section.name.removeprefix(".text."))
    return found
