"""Formats of 8 bits and fewer: their values, and how sub-byte elements lie in memory.

Sources: OCP 8-bit floating point and OCP microscaling (MX) specifications; PTX ISA, "Alternate
floating-point data formats" and the packing formats .b4x16_p64 and .b6x16_p32. e4m3 has no
infinity; e2m3, e3m2 and e2m1 have neither infinity nor NaN; ue8m0 is a power of two.
"""

from __future__ import annotations

import numpy as np

#: The formats of matrix elements.
ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
#: Bits of an element by type name.
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "ue8m0": 8, "ue4m3": 8}


#: Bits of an element by packing format: 16 elements, then padding, in 16 bytes.
PADDED = {"b4x16_p64": 4, "b6x16_p32": 6}
#: NOTE [small elements in tensor memory]: A of 4 or 6 bits has a byte for each element there, which
#: begins at this bit of it; the other bits are 0 (PTX ISA, "Packing formats" and "Optional
#: Decompression", figures). So e2m1 lies as the same number in e2m3 does.
FIRST_BIT = {4: 2, 6: 0}


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """All values of a format with a sign, as float32, without its special values."""
    codes = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    sign = np.where(codes >> exponent_bits + mantissa_bits, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    value = np.where(exponent > 0, normal, np.ldexp(fraction, 1 - bias))
    return (sign * value).astype(np.float32)


def _e4m3() -> np.ndarray:
    table = _table(4, 3, 7)
    table[[0x7F, 0xFF]] = np.nan
    return table


def _e5m2() -> np.ndarray:
    table = _table(5, 2, 15)
    table[[0x7C, 0xFC]] = np.inf, -np.inf
    table[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return table


def _ue8m0() -> np.ndarray:
    return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


#: float32 value of every code, by type name. ue4m3 is e4m3 without its sign bit.
VALUES = {
    "e4m3": _e4m3(),
    "e5m2": _e5m2(),
    "e2m3": _table(2, 3, 1),
    "e3m2": _table(3, 2, 3),
    "e2m1": _table(2, 1, 1),
    "ue8m0": _ue8m0(),
    "ue4m3": np.tile(_e4m3()[:128], 2),
}


def unpack_padded(raw: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 16-byte units that hold 16 elements of 4 or 6 bits, then padding.

    raw: uint8, the last dimension a multiple of 16 (.b4x16_p64 or .b6x16_p32); the result has the
    same shape, one element per byte.
    """
    units = raw.reshape(*raw.shape[:-1], -1, 16)
    if bits == 4:
        packed = units[..., :8]
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
    else:
        packed = units[..., :12].reshape(*units.shape[:-1], 4, 3).astype(np.uint32)
        word = packed[..., 0] | packed[..., 1] << 8 | packed[..., 2] << 16
        codes = np.stack([word >> 6 * i & 63 for i in range(4)], axis=-1).astype(np.uint8)
    return codes.reshape(raw.shape)


def decompress(raw: np.ndarray, bits: int) -> np.ndarray:
    """Return 16-byte units as tensor memory has them: see NOTE [small elements in tensor memory].

    raw: as of `unpack_padded`; the result has the same shape.
    """
    return unpack_padded(raw, bits) << FIRST_BIT[bits]


def unpack_nibbles(raw: np.ndarray) -> np.ndarray:
    """Codes of packed 4-bit elements, the low half of a byte first; the last dimension doubles."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
