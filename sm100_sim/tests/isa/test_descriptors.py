"""Matrix and instruction descriptors against the canonical layouts written out independently."""

import dataclasses

import numpy as np
import pytest

from sm100_sim.isa.tensor.descriptors import (
    KINDS,
    DescriptorError,
    InstructionDescriptor,
    MatrixDescriptor,
    chunk_addresses,
    chunks_of,
    decode_instruction,
    decode_matrix,
    encode_instruction,
    encode_matrix,
    gather_plan,
)

SWIZZLES = (0, 32, 64, 128)


def element_address(
    descriptor: MatrixDescriptor, mn_major: bool, row: int, k: int, element_bytes: int
) -> int:
    """SMEM byte address of element (row, k): the layouts of `chunk_addresses`, one element."""
    per_chunk = 16 // element_bytes
    extent = row - row % per_chunk + per_chunk
    table = chunk_addresses(descriptor, mn_major, extent, element_bytes)
    if mn_major:
        return int(table[k, row // per_chunk]) + row % per_chunk * element_bytes
    return int(table[row, k // per_chunk]) + k % per_chunk * element_bytes


def slow_swizzle(address: int, span: int) -> int:
    """The XOR bit by bit, as the PTX ISA lists it."""
    pairs = {0: (), 32: ((4, 7),), 64: ((4, 7), (5, 8)), 128: ((4, 7), (5, 8), (6, 9))}[span]
    for low, high in pairs:
        address ^= (address >> high & 1) << low
    return address


def canonical(d: MatrixDescriptor, mn_major: bool, row: int, k: int, width: int) -> int:
    """CuTe's canonical layouts, coordinate by coordinate, before the swizzle (bytes)."""
    t = 16 // width
    units = {0: 1, 32: 2, 64: 4, 128: 8}[d.swizzle]  # 16-byte units of one atom row
    if not mn_major:
        offset = row % 8 * units * 16 + row // 8 * d.stride + k % t * width
        return offset + k // t * (16 if d.swizzle else d.leading)
    offset = row % t * width + row // t % units * 16 + k % 8 * units * 16
    far, deep = (d.leading, d.stride) if d.swizzle else (d.stride, d.leading)
    return offset + row // (t * units) * far + k // 8 * deep


@pytest.mark.parametrize("span", SWIZZLES)
def test_swizzle_is_a_bijection_and_its_own_inverse(span):
    starts = range(0, 4096, 16)
    there = [
        int(chunks_of(MatrixDescriptor(start, 0, 0, span), False, 1, 1)[0, 0]) for start in starts
    ]
    assert there == [slow_swizzle(start, span) for start in starts]
    assert sorted(there) == list(starts)
    assert [slow_swizzle(address, span) for address in there] == list(starts)


@pytest.mark.parametrize(
    ("mn_major", "width"), [(False, 1), (False, 2), (False, 4), (True, 1), (True, 2)]
)
@pytest.mark.parametrize("span", SWIZZLES)
def test_canonical_layouts(span, mn_major, width):
    rows, k = 128, 32 // width
    descriptor = MatrixDescriptor(start=3072, leading=32768, stride=1024, swizzle=span)
    seen = set()
    for row in range(rows):
        for column in range(k):
            want = slow_swizzle(
                descriptor.start + canonical(descriptor, mn_major, row, column, width), span
            )
            assert element_address(descriptor, mn_major, row, column, width) == want
            seen.add(want)
    assert len(seen) == rows * k


def test_swizzle_with_32_byte_atoms():
    """MN-major tf32: Swizzle<2,5,2> o ((4,8,m),(4,2)):((1,4,LBO),(32,SBO)), in elements."""
    descriptor = MatrixDescriptor(2048, 32768, 4096, 128, atom=32)
    seen = set()
    for row in range(64):
        for k in range(8):
            at = row % 32 * 4 + row // 32 * 32768 + k % 4 * 128 + k // 4 * 4096 + 2048
            at ^= (at >> 7 & 3) << 5
            assert element_address(descriptor, True, row, k, 4) == at
            seen.add(at)
    assert len(seen) == 64 * 8
    assert decode_matrix(encode_matrix(descriptor)) == descriptor
    with pytest.raises(DescriptorError, match="atoms of 32 B belongs to MN-major"):
        chunk_addresses(descriptor, True, 64, 2)
    with pytest.raises(DescriptorError, match="atoms of 32 B belongs to MN-major"):
        chunk_addresses(MatrixDescriptor(2048, 32768, 4096, 128), True, 64, 4)


def test_stepping_k_inside_an_atom():
    """+32 bytes in the start address is the next K = 16 of the same 128 B swizzle atom."""
    base = MatrixDescriptor(start=2048, leading=16, stride=1024, swizzle=128)
    rows = np.arange(64)
    for step in range(4):
        moved = dataclasses.replace(base, start=base.start + 32 * step)
        chunk = chunk_addresses(moved, False, 64, 2)[:, 0]
        plain = base.start + rows // 8 * 1024 + rows % 8 * 128
        assert np.array_equal(chunk, plain + 16 * ((2 * step) ^ (rows % 8)))


def test_gather_plan_concatenates_k():
    raws = tuple(encode_matrix(MatrixDescriptor(1024 + 32 * i, 16, 1024, 128)) for i in range(4))
    plan = gather_plan(raws, False, 128, 2)
    assert plan.index.shape == (128, 8)
    assert np.array_equal(np.sort(plan.index.ravel()), np.arange(64, 64 + 1024))
    assert plan.end == 1024 + 128 * 128


def test_matrix_descriptor_round_trip_and_refusals():
    descriptor = MatrixDescriptor(start=0x3FFF0, leading=8192, stride=1024, swizzle=64)
    raw = encode_matrix(descriptor)
    assert decode_matrix(raw) == descriptor
    for bad, named in (
        (raw & ~(7 << 46), "46-48"),
        (raw | 1 << 49, "base offset"),
        (raw | 1 << 52, "leading-dimension mode"),
        (raw & ~(7 << 61) | 3 << 61, "swizzle mode 3"),
        (raw | 1 << 53, "bits 53-60 are 0b00000001, accepted 0"),
        (raw | 1 << 60, "bits 53-60 are 0b10000000, accepted 0"),
    ):
        with pytest.raises(DescriptorError, match=named):
            decode_matrix(bad)


def test_instruction_descriptor_bits():
    """M 256, N 128, bf16 x bf16 -> f32, B MN-major: the fields written out by hand."""
    raw = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | 16 << 17 | 16 << 24
    want = InstructionDescriptor(
        KINDS["f16"], 256, 128, "bf16", "bf16", "f32", False, False, False, True
    )
    assert decode_instruction(raw, "f16", 2) == want
    assert encode_instruction(want) == raw


@pytest.mark.parametrize(
    ("m", "n", "group", "named"),
    [
        (256, 128, 1, "M 256"),
        (64, 128, 2, "M 64"),
        (128, 0, 1, "N 0"),
        (256, 24, 2, "N 24"),
        (128, 264, 1, "N 264"),
    ],
)
def test_illegal_shapes(m, n, group, named):
    raw = 1 << 4 | n >> 3 << 17 | m >> 4 << 24
    with pytest.raises(DescriptorError, match=named):
        decode_instruction(raw, "f16", group)


@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
def test_the_version_of_sparse_matrices_is_no_part_of_a_type(kind):
    """CuTe DSL's primitives set bit 12 for 4-bit operands; it means nothing to a dense matrix."""
    raw = 1 << 7 | 1 << 10 | 16 << 17 | 1 << 23 | 8 << 24
    plain, versioned = (decode_instruction(raw | bit, kind, 1, block=32) for bit in (0, 1 << 12))
    assert versioned.b_type == "e2m1" and versioned == plain
    with pytest.raises(DescriptorError, match="B type field 2"):
        decode_instruction(raw ^ 3 << 10, kind, 1, block=32)


def test_illegal_types():
    shape = 16 << 17 | 8 << 24
    with pytest.raises(DescriptorError, match="A type field 2"):
        decode_instruction(shape | 1 << 4 | 2 << 7, "f16", 1)
    with pytest.raises(DescriptorError, match="D type field 2"):
        decode_instruction(shape | 2 << 4, "f16", 1)
    with pytest.raises(DescriptorError, match="MN-major operands of 4 or 6 bits"):
        decode_instruction(shape | 1 << 4 | 5 << 7 | 1 << 15, "f8f6f4", 1)
    with pytest.raises(DescriptorError, match="sparse"):
        decode_instruction(shape | 1 << 4 | 1 << 2, "f16", 1)


def test_the_k_of_later_machines_is_no_matter():
    """cuDNN's attention at head_dim 256 sets bit 29 in bf16 MMAs, which SM100 does not look at."""
    found = decode_instruction(0x30200490, "f16", 2)
    assert (found.m, found.n) == (256, 128)
    assert found == decode_instruction(0x10200490, "f16", 2)


@pytest.mark.parametrize("bit", [0, 1, 6, 23])
def test_reserved_bits_of_an_instruction_descriptor(bit):
    raw = 1 << 4 | 16 << 17 | 8 << 24
    assert decode_instruction(raw, "f16", 1).m == 128
    with pytest.raises(DescriptorError, match=f"reserved bit {bit} is set, accepted 0"):
        decode_instruction(raw | 1 << bit, "f16", 1)


@pytest.mark.parametrize("bit", [0, 1, 3, 6])
def test_reserved_bits_of_a_block_scaled_instruction_descriptor(bit):
    raw = 1 << 23 | 16 << 17 | 8 << 24
    assert decode_instruction(raw, "mxf8f6f4", 1, block=32).m == 128
    with pytest.raises(DescriptorError, match=f"reserved bit {bit} is set, accepted 0"):
        decode_instruction(raw | 1 << bit, "mxf8f6f4", 1, block=32)
