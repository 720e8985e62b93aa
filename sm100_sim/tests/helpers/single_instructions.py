"""One instruction on many operands, special values among them."""

from __future__ import annotations

import numpy as np
from harness import compile_body, run_compiled

from sm100_sim.state.warp import Environment

SPECIAL_INTS = [
    0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000,
    0x80000001, 0xFFFFFFFF,
]  # fmt: skip
SPECIAL_FLOATS = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000,
    0xBF800000, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001,
    0x4B000001, 0x33800000,
]  # fmt: skip
LANES = 32


def words(bits: int, seed: int, count: int = 128, special=SPECIAL_INTS) -> np.ndarray:
    """Random and special patterns; every special value meets several others."""
    rng = np.random.default_rng(seed)
    mask = np.uint64((1 << bits) - 1)
    special = np.array(special, np.uint64)
    if bits == 64:
        top = np.array([1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 32], np.uint64)
        special = np.concatenate((special, top))
    values = rng.integers(0, 1 << bits, count, dtype=np.uint64)
    values[::3] = rng.choice(special, len(values[::3])) & mask
    # Close pairs and cancellation need values of similar size.
    near = np.array([0x3F800000, 0x40490FDB, 0xC0490FDB], np.uint64)
    values[1::6] = rng.choice(near, len(values[1::6])) & mask
    return values.astype(np.uint32 if bits <= 32 else np.uint64)


def float_words(seed: int, count: int = 128) -> np.ndarray:
    return words(32, seed, count, SPECIAL_FLOATS)


REGISTER = {16: ".b16", 32: ".b32", 64: ".b64", 1: ".pred"}


def evaluate(
    instruction: str, sources: list[np.ndarray], widths: list[int], result: int = 32
) -> np.ndarray:
    """Results of ``instruction`` (with %d and %s0, %s1, ... in it) for each row of sources."""
    body = (
        f".reg {REGISTER[result]} %d;\n"
        + "".join(f".reg {REGISTER[width]} %s{n};\n" for n, width in enumerate(widths))
        + instruction
        + ";"
    )
    names = [f"%s{n}" for n in range(len(widths))]
    compiled = compile_body(body, ("%d", *names))
    environment = Environment(
        np.zeros((1, 64), np.uint8),
        np.zeros(1, np.uint32),
        np.zeros((0, 3), np.uint64),
        np.zeros(16, np.uint8),
    )
    parts = []
    for start in range(0, len(sources[0]), LANES):
        inputs = {
            name: as_register(source[start : start + LANES], width)
            for name, source, width in zip(names, sources, widths, strict=True)
        }
        value = run_compiled(compiled, inputs, environment, {"%ntid.x": 32})["%d"]
        parts.append([value >> lane & 1 for lane in range(LANES)] if result == 1 else value)
    return np.concatenate(parts)


def as_register(values: np.ndarray, width: int):
    if width == 1:
        return sum(int(v & 1) << lane for lane, v in enumerate(values))
    return values.astype(np.uint64 if width == 64 else np.uint32)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
