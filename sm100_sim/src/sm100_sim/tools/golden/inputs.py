"""Inputs of the golden cases, computed from integers so that they are the same everywhere."""

from __future__ import annotations

import numpy as np

#: float32 patterns: zeros, subnormals, neighbours of the limits, small numbers, infinities, NaNs.
SPECIAL_F32 = np.array([
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00000002, 0x00400000, 0x007FFFFF, 0x807FFFFF,
    0x00800000, 0x80800000, 0x00800001, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0xBF800000, 0x3F800001,
    0x3FC00000, 0x40000000, 0xC0000000, 0x40200000, 0x40490FDB, 0x4B000000, 0x4B000001, 0xCB000001,
    0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000, 0x5F000000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFF812345, 0x477FE000, 0x477FEFFF,
    0x477FF000, 0xC77FF000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000,
    0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x7F7FE000,
], np.uint32)  # fmt: skip
SPECIAL_F16 = np.array([
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3BFF, 0x3C00, 0xBC00, 0x3C01,
    0x4000, 0xC000, 0x4248, 0x6400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0xFD23,
], np.uint32)  # fmt: skip
SPECIAL_BF16 = np.array([
    0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x3F7F, 0x3F80, 0xBF80, 0x3F81,
    0x4000, 0xC000, 0x4049, 0x4B00, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFA3,
], np.uint32)  # fmt: skip
SPECIAL_INTEGERS = np.array([
    0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF,
    0x10000, 0xFFFFFF, 0x1000001, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFFFFFF,
    0x100000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFBF,
    0x7FFFFFFFBFFFFFFF,
], np.uint64)  # fmt: skip


def scrambled(seed: int, count: int) -> np.ndarray:
    """uint64 (count,): the splitmix64 sequence of a seed (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed * 0x1000003 % (1 << 64)) + (
            np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        )
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def integers(bits: int, seed: int, count: int) -> np.ndarray:
    """Random and special patterns of `bits` bits, as uint16, uint32 or uint64 (count,)."""
    values = scrambled(seed, count)
    choice = scrambled(seed + 1000, count)
    special = SPECIAL_INTEGERS[(choice >> np.uint64(8)) % np.uint64(len(SPECIAL_INTEGERS))]
    small = values % np.uint64(80)
    kind = choice % np.uint64(4)
    values = np.where(kind == 0, special, np.where(kind == 1, small, values))
    return values.astype({8: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def _mixed(special: np.ndarray, moderate: np.ndarray, seed: int, count: int) -> np.ndarray:
    """A third special patterns, a third of moderate size, the rest any pattern."""
    values, choice = scrambled(seed, count), scrambled(seed + 1000, count)
    picked = special[(choice >> np.uint64(8)) % np.uint64(len(special))]
    kind = choice % np.uint64(3)
    return np.where(kind == 0, picked, np.where(kind == 1, moderate, values))


def floats(seed: int, count: int) -> np.ndarray:
    """float32 patterns, uint32 (count,): special, of exponents 2^-12 to 2^11, and any."""
    raw = scrambled(seed + 2000, count)
    exponent = np.uint64(115) + (raw >> np.uint64(32)) % np.uint64(24)
    moderate = raw & np.uint64(0x807FFFFF) | exponent << np.uint64(23)
    return _mixed(SPECIAL_F32.astype(np.uint64), moderate, seed, count).astype(np.uint32)


def doubles(seed: int, count: int) -> np.ndarray:
    """float64 patterns, uint64 (count,): widened float32 patterns, close to such, and any."""
    wide = np.empty(count, np.uint64)
    with np.errstate(invalid="ignore"):
        wide[:] = floats(seed, count).view(np.float32).astype(np.float64).view(np.uint64)
    raw = scrambled(seed + 3000, count)
    finite = wide & np.uint64(0x7FF0000000000000) != np.uint64(0x7FF0000000000000)
    close = np.where(finite, wide ^ raw >> np.uint64(44), wide)
    # The payload of a widened NaN is the host's choice.
    nan = np.uint64(0x7FF8000000000000)
    wide = np.where(finite | (wide << np.uint64(12) == 0), wide, nan)
    close = np.where(finite | (close << np.uint64(12) == 0), close, nan)
    return np.where(raw % np.uint64(3) == 0, wide, np.where(raw % np.uint64(3) == 1, close, raw))


def halves(kind: str, seed: int, count: int) -> np.ndarray:
    """f16 or bf16 patterns, uint16 (count,)."""
    raw = scrambled(seed + 2000, count)
    if kind == "f16":
        special = SPECIAL_F16
        moderate = raw & np.uint64(0x83FF) | np.uint64(10) + (raw >> np.uint64(32)) % np.uint64(
            11
        ) << np.uint64(10)
    else:
        special = SPECIAL_BF16
        moderate = raw & np.uint64(0x807F) | np.uint64(121) + (raw >> np.uint64(32)) % np.uint64(
            13
        ) << np.uint64(7)
    return _mixed(special.astype(np.uint64), moderate, seed, count).astype(np.uint16)


def all_halves() -> np.ndarray:
    """Every 16-bit pattern, uint16 (65536,)."""
    return np.arange(65536, dtype=np.uint32).astype(np.uint16)


def pairs(kind: str, seed: int, count: int) -> np.ndarray:
    """Two half-precision patterns in each uint32 (count,)."""
    low, high = (halves(kind, seed + n, count).astype(np.uint32) for n in (0, 500))
    return low | high << np.uint32(16)


def operands(kind: str, number: int, seed: int, count: int) -> list[np.ndarray]:
    """`number` arrays of patterns of a type; some last operands nearly cancel a product or sum."""

    def make(seed: int) -> np.ndarray:
        if kind in ("f32", "f64"):
            return (floats if kind == "f32" else doubles)(seed, count)
        return pairs(kind[:-2], seed, count) if kind.endswith("x2") else halves(kind, seed, count)

    values = [make(seed + 10 * n) for n in range(number)]
    if kind == "f32" and number > 1:
        with np.errstate(all="ignore"):
            first = values[0].view(np.float32).astype(np.float64)
            other = first * values[1].view(np.float32) if number == 3 else first
            close = (-other).astype(np.float32)
        finite = np.isfinite(close)
        near = close.view(np.uint32) ^ (scrambled(seed, count) & np.uint64(3)).astype(np.uint32)
        values[-1][::5] = np.where(finite, near, values[-1])[::5]
    return values


def sweep(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spaced float32 patterns, uint32 (count,)."""
    step = (high - low) / (count - 1)
    return (low + step * np.arange(count)).astype(np.float32).view(np.uint32)


def all_exponents() -> np.ndarray:
    """Both signs of every power of two of float32, its neighbours and one and a half of it."""
    base = np.arange(0, 256, dtype=np.uint32) << np.uint32(23)
    near = np.concatenate(
        (base, base + np.uint32(1), base[1:] - np.uint32(1), base | np.uint32(1 << 22))
    )
    return np.concatenate((near, near | np.uint32(0x80000000)))


def approximation_inputs(low: float, high: float, count: int = 3072) -> np.ndarray:
    """Dense inputs of a function of one float32: sweeps of its range and near 0, all exponents."""
    return np.concatenate(
        (
            SPECIAL_F32,
            all_exponents(),
            sweep(low, high, count),
            sweep(-1.0, 1.0, 1024),
            floats(77, 1024),
        )
    )
