"""CTAs with operands of tensor-core products, made by hand."""

from types import SimpleNamespace

import numpy as np

from sm100_sim.isa.tensor.descriptors import (
    KINDS,
    InstructionDescriptor,
    MatrixDescriptor,
    decode_instruction,
    encode_instruction,
    encode_matrix,
)
from sm100_sim.isa.tensor.tensor_core import Mma
from sm100_sim.state.tmem import Tmem


def make_ctas(count: int, columns: int = 512):
    found = []
    for rank in range(count):
        smem = np.zeros(232448 // 16, np.complex128).view(np.uint8)
        cta = SimpleNamespace(rank=rank, smem=smem, tmem=Tmem())
        cta.tmem.allocate(columns, count)
        found.append(cta)
    return tuple(found)


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that the type represents exactly -> raw elements."""
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if dtype in ("u8", "s8"):
        return values.astype(np.int16).astype(np.uint8)
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    # e4m3 and e5m2 of small integers: exponent and mantissa by hand.
    bias, fraction = {"e4m3": (7, 3), "e5m2": (15, 2)}[dtype]
    mantissa, exponent = np.frexp(np.abs(values))
    code = (exponent - 1 + bias) * 2**fraction + (mantissa * 2 - 1) * 2**fraction
    return (np.where(values == 0, 0, code) + np.where(values < 0, 128, 0)).astype(np.uint8)


def random_values(rng, shape, dtype: str) -> np.ndarray:
    """Small integers: every product and sum is exact in float32, so results compare exactly."""
    low = 0 if dtype == "u8" else -4
    return rng.integers(low, 5, shape).astype(np.float32)


def pack(smem, values, dtype, mn_major, span, start):
    """Write a (rows, K) operand to SMEM by the canonical layouts; one descriptor per K step.

    Independent of the code under test: element by element from the layout table of the PTX ISA.
    """
    bits = to_bits(values, dtype)
    width = bits.dtype.itemsize
    t, step = 16 // width, 32 // width
    rows, k_total = values.shape
    units = {0: 1, 32: 2, 64: 4, 128: 8}[span]
    atom = 16 * units
    raws = []
    for first in range(0, k_total, step):
        row, k = np.meshgrid(np.arange(rows), np.arange(step), indexing="ij")
        if not mn_major:
            # Blocks of `rows` x one atom row along K; K steps stay inside the atom while it lasts.
            per_atom = max(1, units // 2)
            block, inside = divmod(first // step, per_atom)
            stride, leading = 8 * atom, rows * 16 if not span else 16
            size = rows * atom if span else 2 * rows * 16
            base = start + block * size + inside * 32
            offset = row % 8 * atom + row // 8 * stride + k % t * width
            offset = offset + k // t * (16 if span else leading)
        else:
            groups = -(-rows // (t * units))
            base = start + first // step * groups * atom * step
            far, deep = atom * step, atom * 8
            offset = row % t * width + row // t % units * 16 + k % 8 * atom
            offset = offset + row // (t * units) * far + k // 8 * deep
            leading, stride = (far, deep) if span else (deep, far)
        address = base + offset
        for low, high in {
            0: (),
            32: ((4, 7),),
            64: ((4, 7), (5, 8)),
            128: ((4, 7), (5, 8), (6, 9)),
        }[span]:
            address = address ^ ((address >> high & 1) << low)
        raw = bits[:, first : first + step]
        for byte in range(width):
            smem[address + byte] = (raw >> 8 * byte & 0xFF).astype(np.uint8)
        raws.append(encode_matrix(MatrixDescriptor(base, leading, stride, span)))
    return raws


def descriptor_of(kind, m, n, types, **flags):
    full = InstructionDescriptor(
        KINDS[kind],
        m,
        n,
        *types,
        flags.get("negate_a", False),
        flags.get("negate_b", False),
        flags.get("a_mn_major", False),
        flags.get("b_mn_major", False),
    )
    group = flags.get("group", 1)
    return decode_instruction(encode_instruction(full), kind, group)


def read_d(ctas, m, n, column=0, dtype=np.float32) -> np.ndarray:
    """Return (M, N) of the accumulator from its data-path layout (PTX ISA), element by element."""
    d = np.empty((m, n), np.uint32)
    pair = len(ctas)
    for r in range(m):
        cta, row = ctas[r // (m // pair)], r % (m // pair)
        for c in range(n):
            lane, col = row, c
            if pair == 1 and m == 64:
                lane = row % 16 + 32 * (row // 16)
            if pair == 2 and m == 128:
                lane, col = row + 64 * (c // (n // 2)), c % (n // 2)
            d[r, c] = cta.tmem.cells[column + col, lane]
    return d.view(dtype)


def issue(ctas, descriptor, a, b, a_in_tmem=False, accumulate=False, d=0, **extra):
    return [
        Mma(ctas, descriptor, d, x, y, a_in_tmem, accumulate or i > 0, **extra)
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]


def pack_pair(ctas, a, b, types, majors, spans):
    """Each CTA of the group holds its rows of A and of B; the descriptors are CTA-relative."""
    pair = len(ctas)
    for p, cta in enumerate(ctas):
        rows, cols = a.shape[0] // pair, b.shape[0] // pair
        a_raw = pack(cta.smem, a[p * rows : (p + 1) * rows], types[0], majors[0], spans[0], 1024)
        b_raw = pack(cta.smem, b[p * cols : (p + 1) * cols], types[1], majors[1], spans[1], 66560)
    return a_raw, b_raw
