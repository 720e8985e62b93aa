"""Rule of the tensor core of an H200 for one wgmma, bit for bit, found by experiment.

1. Products are exact. The exponent of a product is the sum of its factors' exponents; that of a
   subnormal factor is the least exponent of its type.
2. The K products of the instruction and D, if scale-d holds, are aligned to the largest of their
   exponents, zeros aside, and cut off below 2^-25 of it, toward zero; for 8-bit floats below 2^-13.
3. What is left is added exactly. The sum becomes D: as f32 cut off behind 24 significant bits,
   toward zero (for 8-bit floats behind 14); as f16 rounded to the nearest. Beyond the largest
   number it is infinite.
4. A NaN, infinity times zero, or infinities of both signs give the NaN of all ones but the sign.

The instructions of a chain go one after the other. A in registers makes no difference, nor do
layouts. The vectors of the group "wgmma" hold this; 287,000 further sums agreed, exponents spread
over up to 26 binades, terms that cancel and any bits among them.
"""

from __future__ import annotations

import numpy as np

#: Type -> bits of the significand behind the point, bias of the exponent, bits of the word below
#: the number.
_FORMATS = {"bf16": (7, 127, 0), "f16": (10, 15, 0), "tf32": (10, 127, 13), "e4m3": (3, 7, 0),
            "e5m2": (2, 15, 0), "f32": (23, 127, 0)}  # fmt: skip
_TOTAL = {"bf16": 16, "f16": 16, "tf32": 19, "e4m3": 8, "e5m2": 8, "f32": 32}
#: Exponent of a number that takes no part in the alignment.
_NONE = -(10**6)
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}


def _parts(raw: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (signed integer, exponent of its unit, exponent of the number) of finite raw
    elements."""
    fraction, bias, below = _FORMATS[name]
    words = raw.astype(np.int64) >> below
    width = _TOTAL[name] - 1 - fraction
    field = words >> fraction & (1 << width) - 1
    number = words & (1 << fraction) - 1 | np.where(field > 0, 1 << fraction, 0)
    exponent = np.maximum(field, 1) - bias
    negative = words >> _TOTAL[name] - 1 & 1 == 1
    return np.where(negative, -number, number), exponent - fraction, exponent


def special(raw: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (is NaN, is infinite) of raw elements."""
    fraction, _, below = _FORMATS[name]
    words = raw.astype(np.int64) >> below
    magnitude = words & (1 << _TOTAL[name] - 1) - 1
    if name == "e4m3":
        return magnitude == 0x7F, np.zeros(raw.shape, bool)
    infinity = (1 << _TOTAL[name] - 1 - fraction) - 1 << fraction
    return magnitude > infinity, magnitude == infinity


def _aligned(number: np.ndarray, unit: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Numbers in units of 2^least, cut off toward zero."""
    shift = unit - least
    size = np.abs(number) << np.clip(shift, 0, 40) >> np.clip(-shift, 0, 62)
    return np.where(number < 0, -size, size)


def _cut(total: np.ndarray, least: np.ndarray, bits: int) -> np.ndarray:
    """float64 of total * 2^least, cut off toward zero behind `bits` significant ones; 0 for all."""
    size = np.abs(total)
    length = np.frexp(size.astype(np.float64))[1]
    drop = np.clip(length - bits, 0, 62) if bits else np.zeros_like(size)
    if bits:
        # Below the smallest normal number of f32 units end at 2^-149.
        drop = np.clip(np.maximum(drop, -149 - least), 0, 62)
    kept = size >> drop << drop
    return np.ldexp(np.where(total < 0, -kept, kept).astype(np.float64), least.astype(np.int32))


def one_instruction(
    a: np.ndarray, b: np.ndarray, types: tuple[str, str], d: str, before: np.ndarray | None
) -> np.ndarray:
    """D of one wgmma of floats, float32 or float16 (64, N).

    a, b: raw elements (64, K) and (N, K). d: "f32" or "f16". before: D as it was, None without.
    """
    bad_a, bad_b = special(a, types[0]), special(b, types[1])
    parts_a, parts_b = (
        _parts(np.where(nan | inf, 0, raw).astype(raw.dtype), name)
        for raw, name, (nan, inf) in ((a, types[0], bad_a), (b, types[1], bad_b))
    )
    number = parts_a[0][:, None] * parts_b[0]
    unit = parts_a[1][:, None] + parts_b[1]
    exponent = np.where(number == 0, _NONE, parts_a[2][:, None] + parts_b[2])
    if before is not None:
        words = np.where(np.isfinite(before), before, 0).astype(np.float32).view(np.uint32)
        mine = [part[..., None] for part in _parts(words, "f32")]
        mine[2] = np.where(mine[0] == 0, _NONE, mine[2])
        number, unit, exponent = (
            np.concatenate(pair, axis=2)
            for pair in zip((number, unit, exponent), mine, strict=True)
        )
    bytes_ = types[0].startswith("e")
    least = exponent.max(axis=2) - (13 if bytes_ else 25)
    total = _aligned(number, unit, least[..., None]).sum(axis=2)
    # float64 holds every total exactly, and rounds once to f16.
    cut = _cut(total, least, 0 if d == "f16" else 14 if bytes_ else 24)
    with np.errstate(over="ignore"):
        result = cut.astype(np.float16 if d == "f16" else np.float32)
    return _with_specials(result, a, b, types, before)


def _with_specials(
    result: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    types: tuple[str, str],
    before: np.ndarray | None,
) -> np.ndarray:
    """The result where infinities and NaNs take part."""
    (nan_a, inf_a), (nan_b, inf_b) = special(a, types[0]), special(b, types[1])
    if not (nan_a.any() or inf_a.any() or nan_b.any() or inf_b.any() or before is not None):
        return result
    zero_a, zero_b = (_parts(raw, name)[0] == 0 for raw, name in zip((a, b), types, strict=True))
    down_a, down_b = (raw >> raw.dtype.itemsize * 8 - 1 & 1 == 1 for raw in (a, b))
    infinite = inf_a[:, None] | inf_b
    nan = nan_a[:, None] | nan_b | infinite & (zero_a[:, None] | zero_b)
    down = down_a[:, None] ^ down_b
    if before is not None:
        infinite = np.concatenate((infinite, np.isinf(before)[..., None]), axis=2)
        nan = np.concatenate((nan, np.isnan(before)[..., None]), axis=2)
        down = np.concatenate((down, np.signbit(before)[..., None]), axis=2)
    low, high = (infinite & down).any(axis=2), (infinite & ~down).any(axis=2)
    result = np.where(low, -np.inf, np.where(high, np.inf, result)).astype(result.dtype)
    words = result.view(np.uint32 if result.dtype == np.float32 else np.uint16)
    words[nan.any(axis=2) | low & high] = _NAN["f32" if result.dtype == np.float32 else "f16"]
    return result


def chain(
    a: np.ndarray, b: np.ndarray, types: tuple[str, str], d: str, before: np.ndarray | None
) -> np.ndarray:
    """D of instructions on one accumulator, K concatenated; arguments as in `one_instruction`."""
    step = 32 // a.dtype.itemsize
    for first in range(0, a.shape[1], step):
        part = slice(first, first + step)
        before = one_instruction(a[:, part], b[:, part], types, d, before)
    assert before is not None
    return before
