"""tcgen05 SMEM matrix descriptors and instruction descriptors, and the layouts they name.

Sources: PTX ISA 9.3, sections "Matrix descriptor", "Instruction descriptor" and "Canonical
layouts" of tcgen05; NOTE [descriptor version] has those of sm_107. The unit of every layout is the
16-byte chunk: T = 16 / element bytes elements that stay together whatever the swizzle, along K in a
K-major operand and along M or N in an MN-major one.

Where chunks lie is computed in native code (`native.operand_layout`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from sm100_sim.errors import SimulationError
from sm100_sim.native.calling import callable_of
from sm100_sim.native.operand_layout import LAYOUT, chunk_table

#: Swizzle span and atom in bytes by the value of bits 61-63 of the matrix descriptor.
_SWIZZLE_MODES = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}
#: Bytes of K that one tcgen05.mma instruction covers, for every dense kind, and of the longer form
#: of the 4-bit kinds: K 96.
K_BYTES, LONG_K_BYTES = 32, 48
#: Bytes of K in a row of the 128 B swizzle, which chunks of one descriptor do not leave.
_ROW_BYTES = 128


class DescriptorError(SimulationError):
    """A matrix or instruction descriptor with a value the hardware does not define."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise DescriptorError(message)


@dataclass(frozen=True)
class MatrixDescriptor:
    """SMEM matrix descriptor: `start`, `leading` (LBO) and `stride` (SBO) in bytes.

    `swizzle` is the span in bytes: 0, 32, 64 or 128; `atom` is what stays together, 16 or 32 bytes.
    `second`: in absolute mode, where the K behind the end of a row of 128 bytes goes on.
    """

    start: int
    leading: int
    stride: int
    swizzle: int
    atom: int = 16
    second: int | None = None


#: Bits of the version in a matrix descriptor, and its value.
_VERSION, _VERSION_1 = 7 << 46, 1 << 46
#: Bits behind the start address and the leading offset of 14 bits; with 15 bits the first of each
#: pair belongs to the field.
_BEHIND_FIELDS, _FIFTEENTH = 0xC000C000, 0x40004000


def issued_matrix(raw: int, address_bits: int) -> tuple[int, bool]:
    """Return (the descriptor as `decode_matrix` takes it, whether its version cuts an address).

    address_bits: of the start address and the leading offset on the target (`targets.Limits`).

    NOTE [descriptor version]. The version is in bits 46-48. Targets with 14 bits know 1 alone, and
    have no field in bits 14-15 and 30-31, which count for nothing. sm_107 has more shared memory
    than 14 bits reach, 256 KiB. There version 1 has bits 14 and 30, which CuTe DSL 4.8.1 fills for
    sm_107a. Version 0 has not, and reads 256 KiB below without a fault (cuDNN's front end 1.32, in
    comments on a GPU of compute capability 10.7).
    """
    if address_bits == 14:
        return raw & ~_BEHIND_FIELDS, False
    if raw & _VERSION:
        return raw & ~(_BEHIND_FIELDS & ~_FIFTEENTH), False
    return raw & ~_BEHIND_FIELDS | _VERSION_1, bool(raw & _FIFTEENTH)


@lru_cache(maxsize=65536)
def decode_matrix(raw: int) -> MatrixDescriptor:
    """Decode a 64-bit SMEM matrix descriptor, as `issued_matrix` returns it.

    Raises DescriptorError naming the field: a version other than 0b001 in bits 46-48, bits 53-60
    other than 0, absolute mode (bit 52) without the 128 B swizzle of 16-byte atoms, a non-zero base
    offset (bits 49-51: a swizzle pattern that does not start on its own size) or a swizzle mode
    without an XOR pattern here.
    """
    what = f"SMEM matrix descriptor {raw:#018x}: "
    _check(raw >> 46 & 7 == 1, what + f"bits 46-48 are {raw >> 46 & 7:#05b}, accepted 0b001")
    _check(
        not raw >> 49 & 7,
        what + f"base offset {raw >> 49 & 7}, accepted 0: start the swizzle "
        "pattern on a multiple of its size",
    )
    _check(not raw >> 53 & 255, what + f"bits 53-60 are {raw >> 53 & 255:#010b}, accepted 0")
    mode, absolute = raw >> 61, raw >> 52 & 1
    _check(mode in _SWIZZLE_MODES, what + f"swizzle mode {mode}, accepted 0, 1, 2, 4, 6")
    _check(
        not absolute or mode == 2,
        what + f"swizzle mode {mode} in absolute leading-dimension mode (bit 52), accepted 2",
    )
    span, atom = _SWIZZLE_MODES[mode]
    leading = (raw >> 16 & 0x7FFF) << 4
    return MatrixDescriptor(
        start=(raw & 0x7FFF) << 4,
        leading=0 if absolute else leading,
        stride=(raw >> 32 & 0x3FFF) << 4,
        swizzle=span,
        atom=atom,
        second=leading if absolute else None,
    )


#: Swizzle span in bytes by the value of bits 62-63 of the matrix descriptor of wgmma.
_WARPGROUP_SPANS = (0, 128, 64, 32)


@lru_cache(maxsize=65536)
def decode_warpgroup_matrix(raw: int) -> MatrixDescriptor:
    """Decode a 64-bit SMEM matrix descriptor of wgmma.

    PTX ISA 9.3, "Asynchronous Warpgroup Level Matrix: Matrix Descriptor Format". The bits that no
    field has do not matter, as on an H200 (docs/silicon.md). Raises DescriptorError for a non-zero
    base offset (bits 49-51).
    """
    what = f"SMEM matrix descriptor {raw:#018x} of wgmma: "
    _check(
        not raw >> 49 & 7,
        what + f"base offset {raw >> 49 & 7}, accepted 0: start the swizzle "
        "pattern on a multiple of its size",
    )
    return MatrixDescriptor(
        start=(raw & 0x3FFF) << 4,
        leading=(raw >> 16 & 0x3FFF) << 4,
        stride=(raw >> 32 & 0x3FFF) << 4,
        swizzle=_WARPGROUP_SPANS[raw >> 62],
    )


def encode_matrix(descriptor: MatrixDescriptor) -> int:
    """The 64-bit value of a descriptor; the inverse of `decode_matrix`."""
    modes = {layout: number for number, layout in _SWIZZLE_MODES.items()}
    mode = modes[descriptor.swizzle, descriptor.atom]
    absolute = descriptor.second is not None
    leading = descriptor.leading if descriptor.second is None else descriptor.second
    fields = (
        ("start", descriptor.start, 19),
        ("leading", leading, 19),
        ("stride", descriptor.stride, 18),
    )
    for name, value, bits in fields:
        _check(
            value % 16 == 0 and 0 <= value < 1 << bits,
            f"{name} of {value} bytes, accepted multiples of 16 below 2^{bits}",
        )
    return (
        descriptor.start >> 4
        | leading >> 4 << 16
        | descriptor.stride >> 4 << 32
        | 1 << 46
        | absolute << 52
        | mode << 61
    )


def check_operand(descriptor: MatrixDescriptor, k_bytes: int) -> None:
    """Raise DescriptorError if a K-major operand with so many bytes of K cannot lie as described.

    PTX ISA, tcgen05 "Leading Dimension Stride": absolute mode is that of K 96, whose 48 bytes may
    go past the end of a row of 128 bytes.
    """
    _check(
        descriptor.second is None or k_bytes == LONG_K_BYTES,
        "absolute leading-dimension mode (bit 52 of the SMEM matrix descriptor), accepted for "
        "tcgen05.mma with K 96",
    )
    if k_bytes == LONG_K_BYTES and descriptor.swizzle and descriptor.second is None:
        first = descriptor.start % descriptor.swizzle
        _check(
            first + k_bytes <= descriptor.swizzle,
            f"48 bytes of K from byte {first} of a row of {descriptor.swizzle} bytes; what goes "
            "past its end needs absolute leading-dimension mode (bit 52)",
        )


def chunk_addresses(
    descriptor: MatrixDescriptor,
    mn_major: bool,
    extent: int,
    element_bytes: int,
    k_bytes: int = K_BYTES,
) -> np.ndarray:
    """SMEM byte address of every 16-byte chunk of one instruction's operand.

    `extent`: rows of M or N in this CTA. K-major: shape (extent, k_bytes / 16), chunk c holds
    k = T*c .. T*c+T-1. MN-major: shape (K, extent / T), chunk j holds rows T*j .. T*j+T-1.
    """
    check_operand(descriptor, k_bytes)
    if (descriptor.atom == 32) != (mn_major and element_bytes == 4):
        raise DescriptorError(
            "the 128 B swizzle with atoms of 32 B belongs to MN-major operands of 4 bytes, and "
            f"they to it; this one is {'MN' if mn_major else 'K'}-major, {element_bytes} bytes an "
            f"element, atoms of {descriptor.atom} B"
        )
    if not mn_major:
        return _k_major_chunks(descriptor, extent, k_bytes // 16)
    per_chunk = 16 // element_bytes
    _check(
        extent % per_chunk == 0,
        f"an MN-major operand of {extent} rows is not a multiple of {per_chunk} elements",
    )
    return chunks_of(descriptor, True, K_BYTES // element_bytes, extent // per_chunk)


def _k_major_chunks(descriptor: MatrixDescriptor, extent: int, chunks: int) -> np.ndarray:
    """Addresses of chunks (extent, chunks); in absolute mode those behind a row's end go on at
    the second address."""
    if descriptor.second is None:
        return chunks_of(descriptor, False, extent, chunks)
    before = min(chunks, (_ROW_BYTES - descriptor.start % _ROW_BYTES) // 16)
    parts = [chunks_of(descriptor, False, extent, before)]
    if before < chunks:
        second = replace(descriptor, start=descriptor.second)
        parts.append(chunks_of(second, False, extent, chunks - before))
    return np.concatenate(parts, axis=1)


def chunks_of(d: MatrixDescriptor, mn_major: bool, lines: int, chunks: int) -> np.ndarray:
    """SMEM byte addresses of 16-byte chunks, int64 (lines, chunks): lines are rows of a K-major
    operand, or the k of an MN-major one."""
    table = np.empty((lines, chunks), np.int64)
    layout = (ctypes.c_uint64 * LAYOUT)(d.start, d.leading, d.stride, d.swizzle, d.atom)
    where = table.ctypes.data, ctypes.addressof(layout)
    callable_of(chunk_table)(*where, mn_major, lines, chunks)
    return table


@dataclass(frozen=True)
class GatherPlan:
    """16-byte chunk indices of an operand over a run of instructions, K concatenated.

    `index`: intp, (extent, chunks) K-major or (K, chunks) MN-major, in 16-byte units from the
    start of the CTA's shared memory. `end`: first byte after the operand.
    """

    index: np.ndarray
    end: int
    mn_major: bool


@lru_cache(maxsize=2048)
def gather_plan(
    raws: tuple[int, ...],
    mn_major: bool,
    extent: int,
    element_bytes: int,
    decode: Callable[[int], MatrixDescriptor] = decode_matrix,
    k_bytes: int = K_BYTES,
) -> GatherPlan:
    """Plan for the operands of consecutive instructions whose descriptors are `raws`; decode: what
    reads them."""
    parts = [chunk_addresses(decode(raw), mn_major, extent, element_bytes, k_bytes) for raw in raws]
    addresses = np.concatenate(parts, axis=0 if mn_major else 1)
    index = np.ascontiguousarray(addresses >> 4).astype(np.intp)
    index.setflags(write=False)
    return GatherPlan(index, int(addresses.max()) + 16, mn_major)


# ---------------------------------------------------------------- instruction descriptor


@dataclass(frozen=True)
class MmaKind:
    """One `.kind` of tcgen05.mma: operand and accumulator types by descriptor field value."""

    name: str
    element_bytes: int
    operands: dict[int, str]
    accumulators: dict[int, str]
    #: Two 4-bit elements to a byte.
    packed: bool = False
    #: Scale factors for each row of A and column of B.
    block_scaled: bool = False

    @property
    def k(self) -> int:
        """K of one dense instruction, in elements."""
        return K_BYTES // self.element_bytes << self.packed


_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
#: The dense kinds (PTX ISA, tcgen05.mma: instruction descriptor tables). In shared memory f8f6f4
#: gives 16 elements of any type 16 bytes: those of 4 and 6 bits are packed and then padded.
KINDS = {
    "f16": MmaKind("f16", 2, {0: "f16", 1: "bf16"}, {0: "f16", 1: "f32"}),
    "tf32": MmaKind("tf32", 4, {2: "tf32"}, {1: "f32"}),
    "f8f6f4": MmaKind(
        "f8f6f4",
        1,
        _F8F6F4,
        {0: "f16", 1: "f32"},
    ),
    "i8": MmaKind("i8", 1, {0: "u8", 1: "s8"}, {2: "s32"}),
    "mxf8f6f4": MmaKind("mxf8f6f4", 1, _F8F6F4, {1: "f32"}, block_scaled=True),
    "mxf4": MmaKind("mxf4", 1, {1: "e2m1"}, {1: "f32"}, True, True),
    "mxf4nvf4": MmaKind("mxf4nvf4", 1, {1: "e2m1"}, {1: "f32"}, True, True),
}


@dataclass(frozen=True)
class InstructionDescriptor:
    """Decoded 32-bit instruction descriptor. `m` is the total over the CTA pair."""

    kind: MmaKind
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool = False
    #: Fields of the block-scaled kinds: type of the scales, the byte of a cell that holds the first
    #: one of a row, and elements of K to a factor.
    scale_type: str = ""
    scale_a_id: int = 0
    scale_b_id: int = 0
    block: int = 0
    #: tcgen05.mma.ws: weight-stationary.
    ws: bool = False
    #: Bytes of K in a row of an operand.
    k_bytes: int = K_BYTES
    #: Decoded word, of the kinds without block scaling.
    raw: int = field(default=0, compare=False)

    @property
    def k(self) -> int:
        """K of the instruction, in elements."""
        return self.k_bytes // self.kind.element_bytes << self.kind.packed


def _check_stationary(m: int, n: int, kind: MmaKind, what: str) -> None:
    """Shapes of tcgen05.mma.ws, which exists for cta_group::1 and kinds without block scaling."""
    _check(not kind.block_scaled, what + "weight-stationary MMAs take no scale factors")
    _check(
        m in (32, 64, 128) and n in (64, 128, 256),
        what + f"illegal weight-stationary shape M "
        f"{m}, N {n}; accepted M 32, 64, 128 and N 64, 128, 256",
    )


#: Bits of an instruction descriptor that must be 0: of dense kinds, and of block-scaled ones. Bit
#: 29 of dense ones is reserved, too, but cuDNN sets it (K of a later machine), and is right.
_RESERVED = (0, 1, 6, 23)
_RESERVED_BLOCK_SCALED = (0, 1, 3, 6)


def _check_reserved(raw: int, bits: tuple[int, ...], what: str) -> None:
    for bit in bits:
        _check(not raw >> bit & 1, what + f"reserved bit {bit} is set, accepted 0")


def _check_majors(types: list[str], majors: tuple[bool, bool], what: str) -> None:
    small = [name in ("e2m3", "e3m2", "e2m1") for name in types[:2]]
    _check(
        not any(s and m for s, m in zip(small, majors, strict=True)),
        what + "MN-major operands of 4 or 6 bits, accepted K-major",
    )


def _check_shape(m: int, n: int, group: int, kind: MmaKind, what: str) -> None:
    """Allowed dense shapes (PTX ISA, tcgen05.mma "Shapes")."""
    allowed = (64, 128) if group == 1 else (128, 256)
    _check(m in allowed, what + f"illegal shape: M {m}, accepted {allowed} for cta_group::{group}")
    if kind.name == "i8":
        step = 8 if group == 1 and n <= 24 else 32 if group == 2 else 16
    else:
        step = 16 if group == 2 else 8
    _check(
        step <= n <= 256 and n % step == 0,
        what + f"illegal shape: N {n}, accepted {step}..256 in steps of {step} for M {m}, "
        f"cta_group::{group}",
    )


@lru_cache(maxsize=4096)
def decode_instruction(
    raw: int, kind_name: str, group: int, ws: bool = False, block: int = 0
) -> InstructionDescriptor:
    """Decode and validate an instruction descriptor for `.kind`, `.cta_group` and `.ws`.

    block: of a block-scaled kind, elements of K to a scale factor. Raises DescriptorError naming
    the field and what is accepted.
    """
    kind = KINDS[kind_name]
    if kind.block_scaled:
        return _decode_block_scaled(raw, kind, group, block)
    what = f"instruction descriptor {raw:#010x} of kind::{kind_name}: "
    _check(not raw >> 2 & 1, what + "sparse A (bit 2) is not modelled")
    _check_reserved(raw, _RESERVED, what)
    types = []
    for name, value, table in (
        ("A type", raw >> 7 & 7, kind.operands),
        ("B type", raw >> 10 & 7, kind.operands),
        ("D type", raw >> 4 & 3, kind.accumulators),
    ):
        _check(value in table, what + f"{name} field {value}, accepted {sorted(table)}")
        types.append(table[value])
    m, n = (raw >> 24 & 31) << 4, (raw >> 17 & 63) << 3
    if ws:
        _check_stationary(m, n, kind, what)
    else:
        _check_shape(m, n, group, kind, what)
    majors = bool(raw >> 15 & 1), bool(raw >> 16 & 1)
    _check_majors(types, majors, what)
    negate = bool(raw >> 13 & 1), bool(raw >> 14 & 1)
    _check(kind_name != "i8" or not any(negate), what + "negation of integer operands")
    a_type, b_type, d_type = types
    return InstructionDescriptor(
        kind, m, n, a_type, b_type, d_type, *negate, *majors, bool(raw >> 3 & 1), ws=ws, raw=raw
    )


def _decode_block_scaled(raw: int, kind: MmaKind, group: int, block: int) -> InstructionDescriptor:
    """The form of mxf8f6f4, mxf4 and mxf4nvf4: bits 4-5 scale id of B, 23 scale type (0 ue4m3,
    1 ue8m0), 29-30 scale id of A, 31 K 96 of the 4-bit kinds (sm_103a); the rest as in the other
    kinds."""
    what = f"instruction descriptor {raw:#010x} of kind::{kind.name}: "
    _check(not raw >> 2 & 1, what + "sparse A (bit 2) is not modelled")
    _check_reserved(raw, _RESERVED_BLOCK_SCALED, what)
    long = bool(raw >> 31)
    _check(not long or kind.packed, what + "K 96 (bit 31), accepted for kinds of 4-bit elements")
    types = []
    # Bit 12 is the version of sparse matrices in the 4-bit kinds, part of the type in the other.
    of_b = raw >> 10 & (3 if kind.packed else 7)
    for name, value in (("A type", raw >> 7 & 7), ("B type", of_b)):
        _check(
            value in kind.operands, what + f"{name} field {value}, accepted {sorted(kind.operands)}"
        )
        types.append(kind.operands[value])
    m, n = (raw >> 24 & 31) << 4, (raw >> 17 & 63) << 3
    _check(m != 64, what + "illegal shape: M 64, accepted 128 (and 256 for cta_group::2)")
    _check_shape(m, n, group, kind, what)
    majors = bool(raw >> 15 & 1), bool(raw >> 16 & 1)
    _check_majors(types, majors, what)
    scale = "ue8m0" if raw >> 23 & 1 else "ue4m3"
    _check(
        scale == "ue8m0" or block == 16,
        what + "scale type ue4m3 (bit 23), accepted ue8m0; "
        "ue4m3 belongs to scale_vec::4X of kind::mxf4nvf4",
    )
    ids = raw >> 29 & 3, raw >> 4 & 3
    _check_scale_ids(ids, kind.k // block, long, what)
    # The ISA's figures and CuTe's layouts leave open where the second word of 64 rows lies.
    _check(not long or m == 128 * group, what + f"K 96 with M {m} of a pair, accepted 256")
    a_type, b_type = types
    return InstructionDescriptor(
        kind, m, n, a_type, b_type, "f32", bool(raw >> 13 & 1), bool(raw >> 14 & 1), *majors, False,
        scale, *ids, block, k_bytes=LONG_K_BYTES if long else K_BYTES,
    )  # fmt: skip


def _check_scale_ids(ids: tuple[int, int], count: int, long: bool, what: str) -> None:
    """Check the bytes of a cell that hold the first factors of a row, `count` of them with K 64."""
    step = count // 2 if long else count
    _check(
        all(first % step == 0 for first in ids),
        what + f"scale factor ids {ids} of A and B, accepted multiples of {step}",
    )


def encode_instruction(descriptor: InstructionDescriptor) -> int:
    """The 32-bit value of an instruction descriptor; the inverse of `decode_instruction`."""
    d = descriptor
    operands = {name: value for value, name in d.kind.operands.items()}
    accumulators = {name: value for value, name in d.kind.accumulators.items()}
    low = d.saturate << 3 | accumulators[d.d_type] << 4
    if d.kind.block_scaled:
        low = d.scale_b_id << 4 | (d.scale_type == "ue8m0") << 23 | d.scale_a_id << 29
        low |= (d.k_bytes == LONG_K_BYTES) << 31
    return (
        low
        | operands[d.a_type] << 7
        | operands[d.b_type] << 10
        | d.negate_a << 13
        | d.negate_b << 14
        | d.a_mn_major << 15
        | d.b_mn_major << 16
        | d.n >> 3 << 17
        | d.m >> 4 << 24
    )
