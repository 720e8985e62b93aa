"""Numerics of tcgen05.mma: operand decode, products, accumulation into tensor memory.

A run of consecutive instructions of one accumulator chain becomes one matrix product over the
concatenated K, in float32 (integers: exactly, in float64). Which instructions form a run depends
on program order alone, so results do not depend on the schedule.

Everything is laid out so that D, stored in tensor memory as [column, lane], is written in place:
D^T (N, rows) = B (N, K) @ A^T (K, rows) for each CTA of the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any

import numpy as np

from .descriptors import InstructionDescriptor, gather_plan
from .errors import MemoryFault, TmemError
from .tmem import LANES, split_address

# ---------------------------------------------------------------- element decode to float32


def _bf16_to_f32(bits: np.ndarray, out: np.ndarray) -> None:
    words = out.view(np.uint32)
    words[...] = bits
    np.left_shift(words, 16, out=words)


def _f16_to_f32(bits: np.ndarray, out: np.ndarray) -> None:
    """Exact widening: move exponent and mantissa in place, then rescale by 2^112.

    Infinities and NaN do not survive the rescaling and take numpy's slower cast.
    """
    words = out.view(np.int32)
    words[...] = bits.view(np.int16)
    np.left_shift(words, 13, out=words)
    np.bitwise_and(words, -0x70002000, out=words)  # 0x8FFFE000: sign, exponent, mantissa
    np.multiply(out, np.float32(2.0**112), out=out)
    if np.abs(out).max(initial=0.0) >= 65536.0:
        out[...] = bits.view(np.float16)


def _tf32_to_f32(bits: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_and(bits, 0xFFFFE000, out=out.view(np.uint32))


def _minifloat_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """All 256 values of an 8-bit float format; NaN and infinities by `_special_values`."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    value = np.where(exponent > 0, normal, np.ldexp(fraction, 1 - bias))
    return (sign * value).astype(np.float32)


def _e4m3_table() -> np.ndarray:
    table = _minifloat_table(4, 3, 7)
    table[[0x7F, 0xFF]] = np.nan  # e4m3 has no infinity
    return table


def _e5m2_table() -> np.ndarray:
    table = _minifloat_table(5, 2, 15)
    table[[0x7C, 0xFC]] = np.inf, -np.inf
    table[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return table


def _by_table(table: np.ndarray) -> Callable[[np.ndarray, np.ndarray], None]:
    def convert(bits: np.ndarray, out: np.ndarray) -> None:
        np.take(table, bits, out=out, mode="clip")

    return convert


_CODES = np.arange(256, dtype=np.uint8)
#: Raw elements (unsigned integers of the element's width) to float32, exact, by type name.
_TO_FLOAT: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "bf16": _bf16_to_f32,
    "f16": _f16_to_f32,
    "tf32": _tf32_to_f32,
    "e4m3": _by_table(_e4m3_table()),
    "e5m2": _by_table(_e5m2_table()),
    "u8": _by_table(_CODES.astype(np.float32)),
    "s8": _by_table(_CODES.view(np.int8).astype(np.float32)),
}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def supported_type(name: str) -> bool:
    """Whether operands of this type can be decoded."""
    return name in _TO_FLOAT


@lru_cache(maxsize=256)
def _allocate(tag: str, shape: tuple[int, ...], dtype: str, thread: int) -> np.ndarray:
    return np.empty(shape, dtype)


def _workspace(tag: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A scratch array of this thread that is reused: fresh pages cost more than the arithmetic."""
    return _allocate(tag, shape, dtype, get_ident())


# ---------------------------------------------------------------- one instruction


@dataclass(slots=True)
class Mma:
    """One tcgen05.mma instruction with its operands read.

    `ctas`: the CTA, or the pair with the even CTA first; each has `smem` (uint8 row of its shared
    memory, index = offset) and `tmem`. `d`, and `a` if `a_in_tmem`: TMEM addresses; else `a`, and
    `b`: matrix descriptors. `accumulate`: enable-input-d. `scale`: D is multiplied by 2^-scale
    first. `disabled`: per CTA a bool (128,) of lanes not to write, or None.
    """

    ctas: tuple[Any, ...]
    descriptor: InstructionDescriptor
    d: int
    a: int
    b: int
    a_in_tmem: bool
    accumulate: bool
    scale: int = 0
    disabled: tuple[np.ndarray, ...] | None = None
    disabled_bits: int = 0

    def continues(self, before: Mma) -> bool:
        """Whether this instruction extends the accumulator chain that `before` belongs to."""
        return (
            self.accumulate
            and not self.scale
            and self.d == before.d
            and self.descriptor is before.descriptor
            and self.a_in_tmem == before.a_in_tmem
            and self.disabled_bits == before.disabled_bits
            and self.ctas == before.ctas
        )


def _gather(cta: Any, raws: tuple[int, ...], mn_major: bool, extent: int, width: int, tag: str):
    """Raw operand elements in SMEM: (extent, K) if K-major, (K, extent) if MN-major."""
    plan = gather_plan(raws, mn_major, extent, width)
    smem = cta.smem
    if plan.end > smem.size:
        raise MemoryFault(
            f"tcgen05.mma reads shared memory up to offset {plan.end} for its {tag[0]} operand; "
            f"the CTA has {smem.size} bytes"
        )
    chunks = smem[: smem.size & ~15].view(np.complex128)  # 16-byte units
    out = _workspace("gather" + tag, plan.index.shape, "complex128")
    chunks.take(plan.index, out=out, mode="clip")
    return out.view(_RAW[width])


def _smem_operand(ctas, raws, mn_major, extent, mma: Mma, which: str) -> np.ndarray:
    """float32 operand as (len(ctas) * extent, K): each CTA of `ctas` supplies `extent` rows."""
    descriptor = mma.descriptor
    name = descriptor.a_type if which == "A" else descriptor.b_type
    k = descriptor.kind.k * len(raws)
    rows = extent * len(ctas)
    values = _workspace("values" + which, (k, rows) if mn_major else (rows, k), "float32")
    for p, cta in enumerate(ctas):
        raw = _gather(cta, raws, mn_major, extent, descriptor.kind.element_bytes, which)
        mine = slice(p * extent, (p + 1) * extent)
        _TO_FLOAT[name](raw, values[:, mine] if mn_major else values[mine])
    return values.T if mn_major else values


def _tmem_operand(cta, addresses: Sequence[int], mma: Mma) -> np.ndarray:
    """A^T (K, rows) float32 from TMEM: K-major, packed into 32-bit cells, lowest k lowest."""
    kind = mma.descriptor.kind
    per_cell = 4 // kind.element_bytes
    rows = rows_per_cta(mma)
    columns = []
    for address in addresses:
        lane, column = split_address(address)
        if lane:
            raise TmemError(f"tcgen05.mma takes A from lane {lane}; the operand starts at lane 0")
        cta.tmem.check(column, 8, "tcgen05.mma (A operand)")
        columns.append(column)
    first, count = columns[0], len(columns)
    if columns == list(range(first, first + 8 * count, 8)):
        cells = cta.tmem.cells[first : first + 8 * count]
    else:
        cells = cta.tmem.cells[(np.array(columns)[:, None] + np.arange(8)).reshape(-1)]
    cells = cells[:, a_lanes(mma, rows)]
    out = _workspace("valuesAt", (8 * count * per_cell, cells.shape[1]), "float32")
    words = out.view(np.uint32)
    if mma.descriptor.a_type == "bf16":
        np.left_shift(cells, 16, out=words[0::2])
        np.bitwise_and(cells, 0xFFFF0000, out=words[1::2])
        return out
    raw = np.ascontiguousarray(cells.T).view(_RAW[kind.element_bytes])
    _TO_FLOAT[mma.descriptor.a_type](raw, values := np.empty(raw.shape, np.float32))
    out[...] = values.T
    return out


def rows_per_cta(mma: Mma) -> int:
    return mma.descriptor.m // len(mma.ctas)


def a_lanes(mma: Mma, rows: int) -> slice | np.ndarray:
    """TMEM lanes that hold the rows of A in one CTA (PTX ISA, data-path layouts)."""
    if rows == LANES:
        return slice(None)
    if len(mma.ctas) == 2:
        return slice(0, 64)  # M = 128 over a pair: duplicated in lanes 64-127
    return _M64_LANES


#: NOTE [M=64 accumulator layout]: row r of a 64-row accumulator of cta_group::1 is in lane
#: (r % 16) + 32 * (r / 16); the other halves of the sub-partitions are not touched.
_M64_LANES = np.arange(64) % 16 + 32 * (np.arange(64) // 16)


# ---------------------------------------------------------------- runs


def joined_runs(mmas: Sequence[Mma]) -> list[list[Mma]]:
    """Split instructions in program order into accumulator chains that are computed at once."""
    runs: list[list[Mma]] = []
    for mma in mmas:
        if runs and mma.continues(runs[-1][-1]):
            runs[-1].append(mma)
        else:
            runs.append([mma])
    return runs


def execute(mmas: Sequence[Mma]) -> None:
    """Perform tcgen05.mma instructions in order, joining accumulator chains.

    Raises MemoryFault or TmemError for operands outside shared memory or allocated columns.
    """
    # Infinities and NaN are data like any other.
    with np.errstate(invalid="ignore", over="ignore"):
        for run in joined_runs(mmas):
            _execute_run(run)


def _execute_run(run: list[Mma]) -> None:
    head = run[0]
    descriptor, ctas = head.descriptor, head.ctas
    raws = tuple(mma.b for mma in run)
    extent = descriptor.n // len(ctas)
    b = _smem_operand(ctas, raws, descriptor.b_mn_major, extent, head, "B")
    a_raws = tuple(mma.a for mma in run)
    rows = rows_per_cta(head)
    for p, cta in enumerate(ctas):
        if head.a_in_tmem:
            a_t = _tmem_operand(cta, a_raws, head)
        else:
            a_t = _smem_operand((cta,), a_raws, descriptor.a_mn_major, rows, head, "A").T
        if descriptor.kind.name == "i8":  # exact: products of bytes, at most 2^53 in total
            a_t, b = a_t.astype(np.float64), b.astype(np.float64)
        for part, column, lanes in destinations(head):
            _accumulate(head, p, (column, lanes), b[part], a_t)


def destinations(mma: Mma) -> list[tuple[slice, int, Any]]:
    """(rows of D^T, first column, lanes) for each part of D that one CTA holds."""
    descriptor = mma.descriptor
    lane, column = split_address(mma.d)
    if descriptor.m == 64:
        if lane not in (0, 16):
            raise TmemError(f"tcgen05.mma with M 64 writes D at lane {lane}; accepted are 0, 16")
        return [(slice(None), column, _M64_LANES + lane)]
    if lane:
        raise TmemError(f"tcgen05.mma writes D at lane {lane}; the accumulator starts at lane 0")
    if rows_per_cta(mma) == LANES:
        return [(slice(None), column, slice(None))]
    # M = 128 over a pair: lanes 0-63 hold the first half of N, lanes 64-127 the second.
    half = descriptor.n // 2
    return [(slice(q * half, (q + 1) * half), column, slice(64 * q, 64 * q + 64)) for q in (0, 1)]


def _accumulate(mma: Mma, p: int, destination, b: np.ndarray, a_t: np.ndarray) -> None:
    """D^T[columns, lanes] (+)= b @ a_t in CTA p, negated if one operand is."""
    column, lanes = destination
    negative = mma.descriptor.negate_a != mma.descriptor.negate_b
    descriptor, tmem = mma.descriptor, mma.ctas[p].tmem
    tmem.check(column, len(b), "tcgen05.mma (D)")
    cells = tmem.cells[column : column + len(b)]
    whole = isinstance(lanes, slice) and lanes == slice(None) and mma.disabled is None
    if whole and descriptor.d_type == "f32" and not negative and b.dtype == np.float32:
        target = cells.view(np.float32)
        if not mma.accumulate:
            np.matmul(b, a_t, out=target)
            return
        product = _workspace("product", target.shape, "float32")
        np.matmul(b, a_t, out=product)
        if mma.scale:
            np.multiply(target, np.float32(2.0**-mma.scale), out=target)
        np.add(target, product, out=target)
        return
    product = -(b @ a_t) if negative else b @ a_t
    old = cells[:, lanes]
    value = _rounded(descriptor, product, old if mma.accumulate else None, mma.scale)
    if mma.disabled is not None:
        value = np.where(mma.disabled[p][lanes], old, value)
    cells[:, lanes] = value


def _rounded(descriptor, product: np.ndarray, old: np.ndarray | None, scale: int) -> np.ndarray:
    """Cells (uint32) of product + old * 2^-scale in the accumulator's type.

    A half-precision accumulator occupies the low 16 bits of its cell.
    """
    if descriptor.d_type == "s32":
        total = np.rint(product).astype(np.int64)
        if old is not None:
            total += old.view(np.int32)
        if descriptor.saturate:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.uint32)
    if descriptor.d_type == "f16":
        if old is not None:
            half = (old & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
            product = product + half * np.float32(2.0**-scale)
        return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    if old is not None:
        product = product + np.ascontiguousarray(old).view(np.float32) * np.float32(2.0**-scale)
    return np.ascontiguousarray(product, np.float32).view(np.uint32)
