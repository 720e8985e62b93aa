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

from sm100_sim.errors import MemoryFault, TmemError
from sm100_sim.state.tmem import LANES, split_address

from .. import minifloat
from .descriptors import K_BYTES, GatherPlan, InstructionDescriptor, gather_plan
from .zero_columns import source_columns

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
    **{name: _by_table(minifloat.VALUES[name]) for name in minifloat.ELEMENTS},
    "u8": _by_table(_CODES.astype(np.float32)),
    "s8": _by_table(_CODES.view(np.int8).astype(np.float32)),
}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def values_of(raw: np.ndarray, name: str) -> np.ndarray:
    """float32 values of raw elements (unsigned integers of their width), same shape."""
    out = np.empty(raw.shape, np.float32)
    _TO_FLOAT[name](raw, out)
    return out


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
    first. `disabled`: per CTA a bool (128,) of lanes not to write, or None. `scale_a`, `scale_b`:
    TMEM addresses of the scale factors of a block-scaled kind. `mask`: the zero-column mask, or
    None.
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
    scale_a: int = 0
    scale_b: int = 0
    mask: int | None = None

    @property
    def columns(self) -> np.ndarray | None:
        """Return the column of B for each one of the product, or -1 for zeros; None: all as they
        are."""
        if self.mask is None:
            return None
        d = self.descriptor
        return source_columns(self.mask, d.m, d.n, d.raw >> 30)

    def continues(self, before: Mma) -> bool:
        """Return True if this instruction extends the accumulator chain that `before` belongs
        to."""
        return (
            self.accumulate
            and not self.scale
            and self.d == before.d
            and self.descriptor is before.descriptor
            and self.a_in_tmem == before.a_in_tmem
            and self.disabled_bits == before.disabled_bits
            and self.mask == before.mask
            and self.ctas == before.ctas
        )


def gathered(cta: Any, plan: GatherPlan, width: int, which: str, what: str) -> np.ndarray:
    """Raw elements in SMEM, `width` bytes each: (extent, K) if K-major, (K, extent) if MN-major.

    which: operand, "A" or "B"; the result is overwritten by the next call with the same one. what:
    opcode, for errors.
    """
    smem = cta.smem
    if plan.end > smem.size:
        raise MemoryFault(
            f"{what} reads shared memory up to offset {plan.end} for its {which} operand; the CTA "
            f"has {smem.size} bytes"
        )
    chunks = smem[: smem.size & ~15].view(np.complex128)  # 16-byte units
    out = _workspace("gather" + which, plan.index.shape, "complex128")
    chunks.take(plan.index, out=out, mode="clip")
    return out.view(_RAW[width])


def _smem_operand(ctas, raws, mn_major, extent, mma: Mma, which: str) -> np.ndarray:
    """float32 operand as (len(ctas) * extent, K): each CTA of `ctas` supplies `extent` rows."""
    descriptor = mma.descriptor
    name = descriptor.a_type if which == "A" else descriptor.b_type
    k = descriptor.k * len(raws)
    rows = extent * len(ctas)
    values = _workspace("values" + which, (k, rows) if mn_major else (rows, k), "float32")
    for p, cta in enumerate(ctas):
        width = descriptor.kind.element_bytes
        plan = gather_plan(raws, mn_major, extent, width, k_bytes=descriptor.k_bytes)
        raw = gathered(cta, plan, width, which, "tcgen05.mma")
        raw = _codes(raw, name, descriptor)
        mine = slice(p * extent, (p + 1) * extent)
        _TO_FLOAT[name](raw, values[:, mine] if mn_major else values[mine])
    return values.T if mn_major else values


def b_extent(mma: Mma) -> int:
    """Return how many rows of B (N of them without a mask) an instruction reads in each CTA."""
    columns = mma.columns
    if columns is None:
        return mma.descriptor.n // len(mma.ctas)
    used = int(columns.max()) + 1
    step = 16 // mma.descriptor.kind.element_bytes if mma.descriptor.b_mn_major else 1
    return -(-max(used, 1) // step) * step


def _codes(raw: np.ndarray, name: str, descriptor: InstructionDescriptor) -> np.ndarray:
    """One element per byte: sub-byte types are packed in pairs (the 4-bit kinds), or padded."""
    bits = minifloat.BITS.get(name, 8)
    if bits == 8:
        return raw
    if descriptor.kind.packed:
        return minifloat.unpack_nibbles(raw)
    return minifloat.unpack_padded(raw, bits)


#: Bits of a scale factor's address that name a cell; programs keep the byte in the two above, which
#: the instruction descriptor names anyway.
SCALE_ADDRESS = 0x3FFFFFFF


@dataclass(frozen=True)
class FactorPlace:
    """Place of the scale factors of A or B of one instruction in a CTA.

    NOTE [scale factor layout]: row r has its factors in the cell at lane r % 32 and column r / 32
    from the address, one byte for each block of K, from the byte that the instruction descriptor
    names; each sub-partition of 32 lanes holds a copy (PTX ISA, tcgen05 "Block Scaling"). With M =
    128 over a pair, lanes 0-63 hold those of the first half of N and lanes 64-127 the second. What
    does not fit in that cell (K 96) goes on in the one 4 columns further for every 128 rows.

    first, count: first byte of a row, and its bytes. groups: of lanes, with rows of their own.
    columns: of one cell of each row. starts: the first column of each cell from the address.
    """

    first: int
    count: int
    groups: int
    columns: int
    starts: tuple[int, ...]


def factor_place(head: Mma, which: str) -> FactorPlace:
    """Return where the scale factors of operand `which`, "A" or "B", lie."""
    descriptor = head.descriptor
    first = descriptor.scale_a_id if which == "A" else descriptor.scale_b_id
    count = descriptor.k // descriptor.block
    groups = 2 if which == "B" and rows_per_cta(head) < LANES else 1
    rows = (rows_per_cta(head) if which == "A" else descriptor.n) // groups
    cells, step = -(-(first + count) // 4), -(-rows // LANES) * 4
    starts = tuple(range(0, cells * step, step))
    return FactorPlace(first, count, groups, -(-rows // 32), starts)


def _factors(cta: Any, address: int, head: Mma, which: str) -> np.ndarray:
    """Scale factors of one instruction, float32 (rows, K / block)."""
    descriptor = head.descriptor
    lane, column = split_address(address & SCALE_ADDRESS)
    if lane:
        raise TmemError(f"tcgen05.mma takes scale factors from lane {lane}; they start at lane 0")
    place, cells = factor_place(head, which), []
    for start in place.starts:
        at = column + start
        cta.tmem.check(at, place.columns, f"tcgen05.mma (scale factors of {which})")
        raw = cta.tmem.cells[at : at + place.columns].view(np.uint8)
        cells.append(raw.reshape(place.columns, place.groups, -1, 32, 4))
    codes = np.concatenate(cells, axis=-1)[..., place.first : place.first + place.count]
    if (codes != codes[:, :, :1]).any():
        raise TmemError(
            f"tcgen05.mma: the scale factors of {which} at column {column} differ between the "
            "sub-partitions of 32 lanes, which must hold copies; copy them with .warpx4"
        )
    rows = rows_per_cta(head) if which == "A" else descriptor.n
    codes = codes[:, :, 0].transpose(1, 0, 2, 3).reshape(place.groups, -1, place.count)
    codes = codes[:, : rows // place.groups].reshape(-1, place.count)
    return minifloat.VALUES[descriptor.scale_type][codes]


def _scaled(cta: Any, values: np.ndarray, run: Sequence[Mma], which: str) -> np.ndarray:
    """float32 operand (rows, K of the run), each element times its scale factor."""
    head = run[0]
    addresses = [mma.scale_a if which == "A" else mma.scale_b for mma in run]
    factors = [_factors(cta, address, head, which) for address in addresses]
    return values * np.repeat(np.concatenate(factors, axis=1), head.descriptor.block, axis=1)


def _tmem_operand(cta, addresses: Sequence[int], mma: Mma) -> np.ndarray:
    """A^T (K, rows) float32 from TMEM: K-major, packed into 32-bit cells, lowest k lowest."""
    kind = mma.descriptor.kind
    rows = rows_per_cta(mma)
    columns = []
    for address in addresses:
        lane, column = split_address(address)
        if lane and (lane != 16 or not half_sub_partitions(mma)):
            raise TmemError(f"tcgen05.mma takes A from lane {lane}; the operand starts at lane 0")
        cta.tmem.check(column, 8, "tcgen05.mma (A operand)")
        columns.append(column)
    first, count = columns[0], len(columns)
    if columns == list(range(first, first + 8 * count, 8)):
        cells = cta.tmem.cells[first : first + 8 * count]
    else:
        cells = cta.tmem.cells[(np.array(columns)[:, None] + np.arange(8)).reshape(-1)]
    cells = cells[:, a_lanes(mma, rows)]
    out = _workspace("valuesAt", (kind.k * count, cells.shape[1]), "float32")
    words = out.view(np.uint32)
    if mma.descriptor.a_type == "bf16":
        np.left_shift(cells, 16, out=words[0::2])
        np.bitwise_and(cells, 0xFFFF0000, out=words[1::2])
        return out
    raw = np.ascontiguousarray(cells.T).view(_RAW[kind.element_bytes])
    if kind.packed:
        raw = minifloat.unpack_nibbles(raw)
    elif minifloat.BITS.get(mma.descriptor.a_type, 8) < 8:
        raw = _small_codes(raw, mma, columns)
    _TO_FLOAT[mma.descriptor.a_type](raw, values := np.empty(raw.shape, np.float32))
    out[...] = values.T
    return out


def _small_codes(raw: np.ndarray, mma: Mma, columns: Sequence[int]) -> np.ndarray:
    """Return the codes of A of 4 or 6 bits, of which each has a byte of tensor memory.

    raw: (rows, bytes of K); columns: the first of each instruction. Raises TmemError for a byte
    with other bits set: see NOTE [small elements in tensor memory].
    """
    name = mma.descriptor.a_type
    bits = minifloat.BITS[name]
    first = minifloat.FIRST_BIT[bits]
    codes = raw >> first & (1 << bits) - 1
    stray = np.argwhere(codes << first != raw)
    if len(stray):
        row, byte = stray[0].tolist()
        column = columns[byte // K_BYTES] + byte % K_BYTES // 4
        lane = int(np.arange(LANES)[a_lanes(mma, rows_per_cta(mma))][row])
        raise TmemError(
            f"tcgen05.mma: A of type {name} in tensor memory at column {column}, lane {lane}: byte "
            f"{byte % 4} is {raw[row, byte]:#04x}, set outside bits {first} to {first + bits - 1}"
        )
    return codes


def rows_per_cta(mma: Mma) -> int:
    return mma.descriptor.m // len(mma.ctas)


def a_lanes(mma: Mma, rows: int) -> slice | np.ndarray:
    """TMEM lanes that hold the rows of A in one CTA (PTX ISA, data-path layouts)."""
    if rows == LANES:
        return slice(None)
    if not half_sub_partitions(mma):
        return slice(0, rows)  # duplicated in the lanes above, where D has other columns
    return _M64_LANES + split_address(mma.a)[0]


def half_sub_partitions(mma: Mma) -> bool:
    """Return True if the instruction uses 16 lanes of each sub-partition only (Layout F)."""
    return mma.descriptor.m == 64 and not mma.descriptor.ws


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
    b = _smem_operand(ctas, raws, descriptor.b_mn_major, b_extent(head), head, "B")
    columns = head.columns
    if columns is not None:
        b = np.where(columns[:, None] < 0, np.float32(0), b[columns])
    a_raws = tuple(mma.a for mma in run)
    rows = rows_per_cta(head)
    for p, cta in enumerate(ctas):
        if head.a_in_tmem:
            a_t = _tmem_operand(cta, a_raws, head)
        else:
            a_t = _smem_operand((cta,), a_raws, descriptor.a_mn_major, rows, head, "A").T
        b_values = b
        if descriptor.block:
            a_t, b_values = _scaled(cta, a_t.T, run, "A").T, _scaled(cta, b, run, "B")
        if descriptor.kind.name == "i8":  # exact: products of bytes, at most 2^53 in total
            a_t, b_values = a_t.astype(np.float64), b.astype(np.float64)
        for part, column, lanes in destinations(head):
            _accumulate(head, p, (column, lanes), b_values[part], a_t)


def destinations(mma: Mma) -> list[tuple[slice, int, Any]]:
    """Return (rows of D^T, first column, lanes) for each part of D that one CTA holds."""
    descriptor = mma.descriptor
    lane, column = split_address(mma.d)
    if half_sub_partitions(mma):
        if lane not in (0, 16):
            raise TmemError(f"tcgen05.mma with M 64 writes D at lane {lane}; accepted are 0, 16")
        return [(slice(None), column, _M64_LANES + lane)]
    if lane:
        raise TmemError(f"tcgen05.mma writes D at lane {lane}; the accumulator starts at lane 0")
    rows = rows_per_cta(mma)
    if rows == LANES:
        return [(slice(None), column, slice(None))]
    # M = 128 over a pair, or fewer than 128 weight-stationary rows: each group of lanes holds its
    # part of N.
    part = descriptor.n * rows // LANES
    return [
        (slice(q * part, (q + 1) * part), column, slice(rows * q, rows * q + rows))
        for q in range(LANES // rows)
    ]


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
    # Subtracted from 0, a sum of 0 stays +0, as the sum of products that cancel.
    product = 0 - b @ a_t if negative else b @ a_t
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
