"""tcgen05.mma on elements of 8 bits and fewer, block scaling, weight-stationary shapes, tcgen05.cp.

Operands are packed bit by bit by the formats' definitions (PTX ISA: packing formats, Block Scaling)
and results compared exactly: all values are small multiples of powers of two.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from kernel_text import run_kernel_text

from sm100_sim.errors import TmemError
from sm100_sim.isa import minifloat
from sm100_sim.isa.tensor import tensor_core
from sm100_sim.isa.tensor.descriptors import (
    DescriptorError,
    MatrixDescriptor,
    check_operand,
    decode_instruction,
    decode_matrix,
    encode_instruction,
    encode_matrix,
)
from sm100_sim.isa.tensor.tcgen05_copy import SHAPES, source_chunks
from sm100_sim.isa.tensor.tensor_core import Mma
from sm100_sim.sanitizer.memory.footprints import mma_operands
from sm100_sim.state.tmem import Tmem

#: Exponent bits, mantissa bits, bias (OCP formats).
FORMATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3),
           "e2m1": (2, 1, 1)}  # fmt: skip
A_AT, B_AT = 1024, 66560
RNG = np.random.default_rng(7)


def value_of(code: int, name: str) -> float:
    exponent_bits, mantissa_bits, bias = FORMATS[name]
    sign = -1.0 if code >> exponent_bits + mantissa_bits & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (code & (1 << mantissa_bits) - 1) / 2**mantissa_bits
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def random_codes(shape, name: str) -> np.ndarray:
    """Codes of values of magnitude 1/8 to 2 and zero, so that every sum is exact in float32."""
    width = 1 + sum(FORMATS[name][:2])
    every = [c for c in range(1 << width) if abs(v := value_of(c, name)) <= 2
             and v * 8 == int(v * 8)]  # fmt: skip
    return RNG.choice(np.array(every), shape)


def values_of(codes: np.ndarray, name: str) -> np.ndarray:
    return np.vectorize(lambda code: value_of(int(code), name))(codes)


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_every_code(name):
    width = 1 + sum(FORMATS[name][:2])
    want = np.array([value_of(code, name) for code in range(1 << width)])
    got = minifloat.VALUES[name].astype(np.float64)
    finite = np.isfinite(got)
    assert np.array_equal(got[finite], want[finite])
    specials = {"e4m3": [0x7F, 0xFF], "e5m2": [*range(0x7C, 0x80), *range(0xFC, 0x100)]}
    assert np.flatnonzero(~finite).tolist() == specials.get(name, [])


def test_values_of_scale_factors():
    codes = [0, 1, 127, 254]
    assert minifloat.VALUES["ue8m0"][codes].tolist() == [2.0 ** (c - 127) for c in codes]
    assert np.isnan(minifloat.VALUES["ue8m0"][255])
    assert minifloat.VALUES["ue4m3"][0x38] == 1.0


def bytes_of_row(codes, name: str, packed: bool) -> np.ndarray:
    """The bytes of one row along K: packed pairs, or 16 elements in 16 bytes."""
    width = 1 + sum(FORMATS[name][:2])
    if packed:
        return np.array([codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)], np.uint8)
    out = bytearray()
    for first in range(0, len(codes), 16):
        bits = sum(int(code) << width * i for i, code in enumerate(codes[first : first + 16]))
        out += bits.to_bytes(16, "little")
    return np.frombuffer(bytes(out), np.uint8)


def pack(smem, codes, name, packed, start) -> list[int]:
    """K-major without a swizzle: 8 x 16-byte core matrices; one descriptor per 32 bytes of K."""
    rows = np.stack([bytes_of_row(row, name, packed) for row in codes])
    count, size = rows.shape
    raws = []
    for step in range(size // 32):
        base = start + step * 32 * count
        for r in range(count):
            for c in range(2):
                at = base + c * 16 * count + r // 8 * 128 + r % 8 * 16
                smem[at : at + 16] = rows[r, step * 32 + c * 16 : step * 32 + c * 16 + 16]
        raws.append(encode_matrix(MatrixDescriptor(base, 16 * count, 128, 0)))
    return raws


def make_ctas(count: int):
    found = []
    for rank in range(count):
        smem = np.zeros(232448 // 16, np.complex128).view(np.uint8)
        found.append(SimpleNamespace(rank=rank, smem=smem, tmem=Tmem()))
        found[-1].tmem.allocate(512, count)
    return tuple(found)


A_TYPES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def plain_descriptor(m, n, a="e4m3", b="e4m3") -> int:
    return 1 << 4 | A_TYPES[a] << 7 | A_TYPES[b] << 10 | n >> 3 << 17 | m >> 4 << 24


def result(ctas, m, n, column=0) -> np.ndarray:
    """Return (M, N): lanes by the data-path organisation, 128 rows in all of a CTA's lanes or
    fewer."""
    per_cta = m // len(ctas)
    d = np.empty((m, n))
    for r in range(m):
        cta, row = ctas[r // per_cta], r % per_cta
        part = n * per_cta // 128
        for c in range(n):
            lane, col = row + per_cta * (c // part), c % part
            d[r, c] = cta.tmem.cells[column + col : column + col + 1, lane].view(np.float32)[0]
    return d


@pytest.mark.parametrize("types", [("e2m3", "e3m2"), ("e2m1", "e4m3"), ("e5m2", "e2m1")])
def test_small_floats(types):
    (cta,) = ctas = make_ctas(1)
    a, b = random_codes((128, 64), types[0]), random_codes((32, 64), types[1])
    a_raw = pack(cta.smem, a, types[0], False, A_AT)
    b_raw = pack(cta.smem, b, types[1], False, B_AT)
    descriptor = decode_instruction(plain_descriptor(128, 32, *types), "f8f6f4", 1)
    tensor_core.execute(
        [
            Mma(ctas, descriptor, 0, x, y, False, i > 0)
            for i, (x, y) in enumerate(zip(a_raw, b_raw, strict=True))
        ]
    )
    assert np.array_equal(result(ctas, 128, 32), values_of(a, types[0]) @ values_of(b, types[1]).T)


#: First bit of an element in its byte of tensor memory (PTX ISA, packing formats).
FIRST_BIT = {"e2m3": 0, "e3m2": 0, "e2m1": 2}


def put_in_bytes(cta, column: int, codes: np.ndarray, name: str) -> None:
    """Put a row of A in each lane, an element in each byte, the lowest k lowest."""
    columns = codes.shape[1] // 4
    words = (codes << FIRST_BIT[name]).astype(np.uint8).view(np.uint32)
    cta.tmem.cells[column : column + columns] = words.T


@pytest.mark.parametrize("name", FIRST_BIT)
def test_small_floats_in_tensor_memory(name):
    (cta,) = ctas = make_ctas(1)
    a, b = random_codes((128, 64), name), random_codes((32, 64), "e4m3")
    put_in_bytes(cta, 64, a, name)
    b_raw = pack(cta.smem, b, "e4m3", False, B_AT)
    descriptor = decode_instruction(plain_descriptor(128, 32, name), "f8f6f4", 1)
    tensor_core.execute(
        [Mma(ctas, descriptor, 0, 64 + 8 * i, y, True, i > 0) for i, y in enumerate(b_raw)]
    )
    assert np.array_equal(result(ctas, 128, 32), values_of(a, name) @ values_of(b, "e4m3").T)


@pytest.mark.parametrize(
    ("name", "m", "bit", "bits"),
    [("e2m1", 128, 1, "2 to 5"), ("e2m1", 64, 6, "2 to 5"), ("e2m3", 128, 6, "0 to 5"),
     ("e3m2", 128, 7, "0 to 5")],
)  # fmt: skip
def test_bits_beside_an_element_in_tensor_memory_are_refused(name, m, bit, bits):
    (cta,) = ctas = make_ctas(1)
    b_raw = pack(cta.smem, random_codes((32, 64), "e4m3"), "e4m3", False, B_AT)
    descriptor = decode_instruction(plain_descriptor(m, 32, name), "f8f6f4", 1)
    columns = 64, 80
    for column in columns:
        put_in_bytes(cta, column, np.zeros((128, 32), int), name)
    mmas = [Mma(ctas, descriptor, 0, *each, True, i > 0)
            for i, each in enumerate(zip(columns, b_raw, strict=True))]  # fmt: skip
    tensor_core.execute(mmas)
    cta.tmem.cells[83, 37] |= 1 << 8 + bit
    where = f"A of type {name} in tensor memory at column 83, lane 37: byte 1 is {1 << bit:#04x}"
    with pytest.raises(TmemError, match=f"{where}, set outside bits {bits}"):
        tensor_core.execute(mmas)


def scale_codes(shape, name: str) -> np.ndarray:
    return RNG.integers(125, 130, shape) if name == "ue8m0" else RNG.integers(0x30, 0x48, shape)


def scale_values(codes, name: str) -> np.ndarray:
    return 2.0 ** (codes - 127.0) if name == "ue8m0" else values_of(codes, "e4m3")


def put_scales(cta, column: int, codes: np.ndarray, byte: int, halves: int = 1) -> None:
    """Factors (rows, count) of one instruction: row r at lane r % 32 of each sub-partition and
    column r / 32; with two halves, the second half of the rows in lanes 64-127."""
    rows, count = codes.shape
    for r in range(rows):
        half, inside = divmod(r, rows // halves)
        for copy in range(4 // halves):
            lane = inside % 32 + 32 * (copy + half * 4 // halves)
            cell = cta.tmem.cells[column + inside // 32 : column + inside // 32 + 1, lane]
            for i in range(count):
                shift = 8 * (byte + i)
                cell[0] = int(cell[0]) & ~(0xFF << shift) | int(codes[r, i]) << shift


KINDS = {  # types, scale type, factors per row and instruction, elements of K
    ("mxf8f6f4", "e4m3", "e5m2"): ("ue8m0", 1, 32),
    ("mxf8f6f4", "e2m1", "e3m2"): ("ue8m0", 1, 32),
    ("mxf4", "e2m1", "e2m1"): ("ue8m0", 2, 64),
    ("mxf4nvf4", "e2m1", "e2m1"): ("ue4m3", 4, 64),
}


@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 72), (2, 256, 64), (2, 128, 64)])
@pytest.mark.parametrize("case", KINDS, ids=lambda case: ".".join(case))
def test_block_scaling(case, group, m, n):
    kind, a_type, b_type = case
    scale_type, count, k = KINDS[case]
    ctas, steps = make_ctas(group), 2
    packed = kind != "mxf8f6f4"
    a, b = random_codes((m, k * steps), a_type), random_codes((n, k * steps), b_type)
    rows, cols = m // group, n // group
    for p, cta in enumerate(ctas):
        a_raw = pack(cta.smem, a[p * rows : (p + 1) * rows], a_type, packed, A_AT)
        b_raw = pack(cta.smem, b[p * cols : (p + 1) * cols], b_type, packed, B_AT)
    a_scales, b_scales = (scale_codes((size, count * steps), scale_type) for size in (m, n))
    numbers = (1, 1) if packed else (A_TYPES[a_type], A_TYPES[b_type])
    raw = (numbers[0] << 7 | numbers[1] << 10 | n >> 3 << 17 | m >> 4 << 24
           | (scale_type == "ue8m0") << 23)  # fmt: skip
    mmas = []
    for i in range(steps):
        byte = 0 if count == 4 else count * i
        columns = (256 + 16 * i * (count == 4), 320 + 16 * i * (count == 4))
        halves = 2 if (group, m) == (2, 128) else 1
        mine = slice(i * count, (i + 1) * count)
        for p, cta in enumerate(ctas):
            put_scales(cta, columns[0], a_scales[p * rows : (p + 1) * rows, mine], byte)
            put_scales(cta, columns[1], b_scales[:, mine], byte, halves)
        ids, named = byte << 29 | byte << 4, byte << 30
        descriptor = decode_instruction(raw | ids, kind, group, False, k // count)
        mmas.append(Mma(ctas, descriptor, 0, a_raw[i], b_raw[i], False, i > 0,
                        scale_a=columns[0] | named, scale_b=columns[1] | named))  # fmt: skip
    tensor_core.execute(mmas)
    scaled = [
        values_of(codes, name) * np.repeat(scale_values(scales, scale_type), k // count, axis=1)
        for codes, name, scales in ((a, a_type, a_scales), (b, b_type, b_scales))
    ]
    assert np.array_equal(result(ctas, m, n), scaled[0] @ scaled[1].T)


def test_scale_factors_must_agree_between_sub_partitions():
    (cta,) = ctas = make_ctas(1)
    a_raw = pack(cta.smem, random_codes((128, 32), "e4m3"), "e4m3", False, A_AT)
    descriptor = decode_instruction(1 << 23 | 16 >> 3 << 17 | 8 << 24, "mxf8f6f4", 1, False, 32)
    put_scales(cta, 256, np.full((128, 1), 127), 0)
    cta.tmem.cells[256, 40] ^= 1
    mma = Mma(ctas, descriptor, 0, a_raw[0], a_raw[0], False, False, scale_a=256, scale_b=256)
    with pytest.raises(TmemError, match="scale factors of A at column 256 differ"):
        tensor_core.execute([mma])


@pytest.mark.parametrize(
    ("raw", "kind", "block", "message"),
    [
        (8 << 24 | 2 << 17, "mxf8f6f4", 32, "scale type ue4m3"),
        (8 << 24 | 2 << 17 | 1 << 7 | 1 << 10, "mxf4", 32, "scale type ue4m3"),
        (4 << 24 | 2 << 17 | 1 << 23, "mxf8f6f4", 32, "M 64"),
        (8 << 24 | 2 << 17 | 1 << 23 | 1 << 29 | 1 << 7 | 1 << 10, "mxf4", 32, "scale factor ids"),
        (8 << 24 | 2 << 17 | 1 << 31, "mxf8f6f4", 32, "K 96"),
        (0x88940480 | 1 << 29, "mxf4nvf4", 16, "scale factor ids"),
        (8 << 24 | 2 << 17 | 1 << 23 | 1 << 15 | 1 << 7 | 1 << 10, "mxf4", 32, "MN-major"),
    ],
)
def test_refused_descriptors(raw, kind, block, message):
    with pytest.raises(DescriptorError, match=message):
        decode_instruction(raw, kind, 1, False, block)


def test_k_96_of_64_rows_in_a_cta_is_refused():
    with pytest.raises(DescriptorError, match="K 96 with M 128 of a pair"):
        decode_instruction(0x88940480, "mxf4nvf4", 2, False, 16)


@pytest.mark.parametrize(("m", "n"), [(32, 64), (64, 128), (128, 64)])
def test_weight_stationary(m, n):
    (cta,) = ctas = make_ctas(1)
    a, b = random_codes((m, 32), "e4m3"), random_codes((n, 32), "e5m2")
    a_raw = pack(cta.smem, a, "e4m3", False, A_AT)
    b_raw = pack(cta.smem, b, "e5m2", False, B_AT)
    descriptor = decode_instruction(plain_descriptor(m, n, "e4m3", "e5m2"), "f8f6f4", 1, True)
    tensor_core.execute([Mma(ctas, descriptor, 0, a_raw[0], b_raw[0], False, False)])
    assert np.array_equal(result(ctas, m, n), values_of(a, "e4m3") @ values_of(b, "e5m2").T)
    with pytest.raises(DescriptorError, match="weight-stationary shape"):
        decode_instruction(plain_descriptor(m, 96), "f8f6f4", 1, True)


# ---------------------------------------------------------------- K 96 of sm_103a


#: Bytes of K of one instruction; instructions, two of which go past the end of a row.
LONG_BYTES, LONG_STEPS = 48, 6


def pack_rows(smem, codes, start) -> list[int]:
    """Rows of 128 bytes of K one buffer behind the other, in the 128 B swizzle; a descriptor per 48
    bytes of K, whose second address is the buffer after its first."""
    rows = np.stack([bytes_of_row(row, "e2m1", True) for row in codes])
    count, size = rows.shape
    for r in range(count):
        for byte in range(0, size, 16):
            at = start + byte // 128 * count * 128 + r * 128 + byte % 128
            at ^= (r % 8) << 4
            smem[at : at + 16] = rows[r, byte : byte + 16]
    raws = []
    for first in range(0, size, LONG_BYTES):
        buffer = start + first // 128 * count * 128
        raws.append(encode_matrix(MatrixDescriptor(
            buffer + first % 128, 0, 1024, 128, second=buffer + count * 128)))  # fmt: skip
    return raws


def put_factors(cta, column: int, codes: np.ndarray) -> int:
    """All factors of rows, four to a cell, the cells of a row 4 columns apart for every 128 rows.

    Return that distance.
    """
    rows, count = codes.shape
    step = 4 if rows <= 128 else 8
    for first in range(0, count, 4):
        put_scales(cta, column + first // 4 * step, codes[:, first : first + 4], 0)
    return step


@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 72), (1, 128, 256), (2, 256, 64)])
@pytest.mark.parametrize(("scale_type", "block"), [("ue8m0", 32), ("ue8m0", 16), ("ue4m3", 16)])
def test_k_96(scale_type, block, group, m, n):
    ctas, k, count = make_ctas(group), 96 * LONG_STEPS, 96 // block
    a, b = random_codes((m, k), "e2m1"), random_codes((n, k), "e2m1")
    scales = [scale_codes((size, k // block), scale_type) for size in (m, n)]
    rows, cols = m // group, n // group
    for p, cta in enumerate(ctas):
        mine = slice(p * rows, (p + 1) * rows)
        a_raw = pack_rows(cta.smem, a[mine], A_AT)
        b_raw = pack_rows(cta.smem, b[p * cols : (p + 1) * cols], 115712)
        steps = put_factors(cta, 256, scales[0][mine]), put_factors(cta, 320, scales[1])
    raw = (1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24 | (scale_type == "ue8m0") << 23
           | 1 << 31)  # fmt: skip
    mmas = []
    for i in range(LONG_STEPS):
        cell, byte = divmod(i * count, 4)
        ids = raw | byte << 29 | byte << 4
        descriptor = decode_instruction(ids, "mxf4nvf4", group, False, block)
        assert encode_instruction(descriptor) == ids
        columns = 256 + cell * steps[0], 320 + cell * steps[1]
        named = byte << 30
        mmas.append(Mma(ctas, descriptor, 0, a_raw[i], b_raw[i], False, i > 0,
                        scale_a=columns[0] | named, scale_b=columns[1] | named))  # fmt: skip
        check_footprint(mmas[-1], columns, steps, byte + count)
    tensor_core.execute(mmas)
    scaled = [
        values_of(codes, "e2m1") * np.repeat(scale_values(factors, scale_type), block, axis=1)
        for codes, factors in zip((a, b), scales, strict=True)
    ]
    assert np.array_equal(result(ctas, m, n), scaled[0] @ scaled[1].T)


def check_footprint(mma, columns, steps, end: int) -> None:
    """The sanitizer's record of what an MMA reads: three chunks of each row, and the cells of its
    factors up to byte `end`."""
    read = list(mma_operands([mma]))
    ctas, n = mma.ctas, mma.descriptor.n
    chunks = [np.r_[region].size for _, space, region in read if space == "smem"]
    assert chunks == [3 * n // len(ctas), 3 * 128] * len(ctas)
    cells = [
        (r[0].start, r[0].stop) for cta, space, r in read if space == "tmem" and cta is ctas[0]
    ]
    want = []
    for column, step, rows in zip(columns, steps, (128, n), strict=True):
        starts = range(column, column + -(-end // 4) * step, step)
        want += [(start, start + -(-rows // 32)) for start in starts]
    assert cells == want


def test_refused_operands_of_k_96():
    crossing = MatrixDescriptor(96, 0, 1024, 128)
    with pytest.raises(DescriptorError, match="from byte 96 of a row of 128 bytes"):
        check_operand(crossing, LONG_BYTES)
    check_operand(MatrixDescriptor(80, 0, 1024, 128), LONG_BYTES)
    absolute = MatrixDescriptor(96, 0, 1024, 128, second=4096)
    check_operand(absolute, LONG_BYTES)
    assert decode_matrix(encode_matrix(absolute)) == absolute
    with pytest.raises(DescriptorError, match="accepted for tcgen05.mma with K 96"):
        check_operand(absolute, 32)
    with pytest.raises(DescriptorError, match="accepted for tcgen05.mma with K 96"):
        source_chunks(encode_matrix(absolute), SHAPES["32x128b", "warpx4"])


# ---------------------------------------------------------------- tcgen05.cp


WARP_ROWS = {  # first source row of each warp's 32 lanes (PTX ISA, tcgen05.cp)
    ("128x256b", ""): (0, 32, 64, 96),
    ("128x128b", ""): (0, 32, 64, 96),
    ("64x128b", "warpx2::02_13"): (0, 32, 0, 32),
    ("64x128b", "warpx2::01_23"): (0, 0, 32, 32),
    ("32x128b", "warpx4"): (0, 0, 0, 0),
}


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("key", WARP_ROWS, ids=".".join)
def test_copy_shapes(key, swizzle):
    """The chunk that each lane gets, against rows of a K-major matrix placed by hand."""
    raw = encode_matrix(MatrixDescriptor(4096, 2048, 8 * (swizzle or 16), swizzle))
    chunks = source_chunks(raw, SHAPES[key])
    assert chunks.shape == (128, 2 if key[0].endswith("256b") else 1)
    for lane in range(128):
        row = WARP_ROWS[key][lane // 32] + lane % 32
        for c in range(chunks.shape[1]):
            at = 4096 + row * (swizzle or 16) + c * (16 if swizzle else 2048)
            for low, high in ((4, 7), (5, 8), (6, 9))[: {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]]:
                at ^= (at >> high & 1) << low
            assert chunks[lane, c] == at // 16


def test_four_row_copy_reaches_one_lane_of_each_sub_partition():
    shape = SHAPES["4x256b", ""]
    assert [lane for lane, row in enumerate(shape.rows) if row >= 0] == [0, 32, 64, 96]
    assert [row for row in shape.rows if row >= 0] == [0, 1, 2, 3]


#: The warps fill shared memory; warp 0 copies it to column 0 and (optionally) shifts the rows of
#: warp 1's lanes; every warp reads its 32 lanes x 4 columns.
COPY_KERNEL = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    shl.b32 %r3, %r1, 2;  add.u32 %r3, %r3, %r2;  FILL
    st.shared.u32 [%r3+2048], %r4;
    setp.lt.u32 %p1, %r1, 32;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 mbarrier.init.shared::cta.b64 [smem+1032], 1;
    @%p2 fence.mbarrier_init.release.cluster;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+1024], 32;
    fence.proxy.async;
    bar.sync 0;
    ld.shared.u32 %r5, [smem+1024];
    add.u32 %r6, %r2, 2048;  shr.u32 %r6, %r6, 4;  cvt.u64.u32 %rd1, %r6;
    or.b64 %rd1, %rd1, DESCRIPTOR;
    add.u32 %r7, %r5, SHIFTED;
    @%p2 tcgen05.cp.cta_group::1.SHAPE [%r5], %rd1;
    SHIFT
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+1032];
    WAIT
    setp.ge.u32 %p4, %r1, 128;
    @%p4 bra DONE;
    shr.u32 %r8, %r1, 5;  shl.b32 %r8, %r8, 21;  add.u32 %r8, %r8, %r5;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r10, %r11, %r12, %r13}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r9, %r1, 4;  cvt.u64.u32 %rd2, %r9;  add.u64 %rd2, %rd2, %rd8;
    st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};
DONE: bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""
WAITING = """
LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem+1032], 0;
    @!%p3 bra LOOP;
    tcgen05.fence::after_thread_sync;
"""


ONE_MORE = "add.u32 %r4, %r1, 1000;"


def copied(shape: str, shift: str = "", wait: str = WAITING, fill: str = ONE_MORE, **options):
    out = np.zeros((128, 4), np.uint32)
    # 8-row groups 128 bytes apart.
    descriptor = encode_matrix(MatrixDescriptor(0, 0, 128, 0))
    body = COPY_KERNEL.replace("DESCRIPTOR", str(descriptor)).replace("SHAPE", shape)
    body = body.replace("FILL", fill)
    body = body.replace("SHIFTED", str(32 << 16)).replace("SHIFT", shift).replace("WAIT", wait)
    report = run_kernel_text(body, [out], block=(512, 1, 1), dynamic_smem=8192, **options)
    return out, report


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize("key", [key for key in WARP_ROWS if key[0] != "128x256b"], ids=".".join)
def test_copy_in_a_kernel(key, schedule):
    out, report = copied(".".join(filter(None, key)), schedule=schedule, sanitize=True)
    for warp, first in enumerate(WARP_ROWS[key]):
        rows = 1000 + 4 * (first + np.arange(32))[:, None] + np.arange(4)
        assert np.array_equal(out[32 * warp : 32 * warp + 32], rows)
    assert report.findings == []
    assert report.instructions["tcgen05.cp"]["warps"] == 1


def decompressed(unit: bytes, width: int, first_bit: int) -> bytes:
    """Return 16 bytes with an element each of a unit of 16 elements and their padding."""
    whole = int.from_bytes(unit, "little")
    return bytes((whole >> width * i & (1 << width) - 1) << first_bit for i in range(16))


def test_elements_of_a_decompressed_unit_lie_where_the_formats_say():
    """1.0 is 0x2 in e2m1 and 0xC in e3m2; the padding is not read."""
    assert decompressed(b"\x22" * 8 + b"\xff" * 8, 4, 2) == b"\x08" * 16
    assert decompressed(bytes.fromhex("0cc330" * 4) + b"\xff" * 4, 6, 0) == b"\x0c" * 16


@pytest.mark.parametrize(("source", "width", "bit"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
@pytest.mark.parametrize("key", [key for key in WARP_ROWS if key[0] != "128x256b"], ids=".".join)
def test_decompressing_copy_in_a_kernel(key, source, width, bit):
    shape = ".".join((*filter(None, key), "b8x16", source))
    out, report = copied(shape, fill="mul.lo.u32 %r4, %r1, 2654435761;", sanitize=True)
    stored = (np.arange(512, dtype=np.uint64) * 2654435761).astype(np.uint32).reshape(128, 4)
    want = [decompressed(row.tobytes(), width, bit) for row in stored]
    for warp, first in enumerate(WARP_ROWS[key]):
        found = [row.tobytes() for row in out[32 * warp : 32 * warp + 32]]
        assert found == want[first : first + 32]
    assert report.findings == []


def test_shift_moves_rows_down():
    shift = "@%p2 tcgen05.shift.cta_group::1.down [%r7];"
    out, _ = copied("32x128b.warpx4", shift)
    rows = 1000 + 4 * np.arange(32)[:, None] + np.arange(4)
    assert np.array_equal(out[:32], rows) and np.array_equal(out[64:96], rows)
    assert np.array_equal(out[32:64], rows[[0, *range(31)]])


@pytest.mark.parametrize("formats", ["", ".b8x16.b4x16_p64"])
def test_unawaited_copy_is_found(formats):
    _, report = copied("32x128b.warpx4" + formats, wait="", sanitize=True)
    assert any("tcgen05.cp" in finding for finding in report.findings)
