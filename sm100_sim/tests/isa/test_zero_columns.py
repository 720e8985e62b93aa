"""The zero-column mask of tcgen05.mma.ws (PTX ISA 9.3, "Zero-Column Mask Descriptor")."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from kernel_text import run_kernel_text

from sm100_sim.isa.tensor import tensor_core
from sm100_sim.isa.tensor.descriptors import (
    DescriptorError,
    MatrixDescriptor,
    decode_instruction,
    encode_matrix,
)
from sm100_sim.isa.tensor.tensor_core import Mma
from sm100_sim.isa.tensor.zero_columns import source_columns
from sm100_sim.sanitizer.memory.footprints import mma_operands
from sm100_sim.state.tmem import Tmem

A_AT, B_AT = 0, 65536


def mask(starts=(0, 0, 0, 0), firsts=(0, 0, 0, 0), skip=2, use=3, shift=0) -> int:
    """Return a descriptor with sub-mask 0 first; skip and use as in the ISA's examples."""
    low = sum(start << 8 * i for i, start in enumerate(starts))
    spans = sum(first << 32 + i for i, first in enumerate(firsts))
    return low | spans | 1 << 39 | skip << 40 | use << 48 | shift << 56


def pattern(columns: np.ndarray) -> str:
    """Return the mask as the ISA writes it: 1 for zeros, column 0 last."""
    return "".join("1" if column < 0 else "0" for column in columns[::-1])


def test_examples_of_the_isa():
    assert source_columns(4 << 40 | 3 << 48, 128, 64, 0).tolist() == list(range(64))
    assert pattern(source_columns(mask(), 128, 64, 0))[-14:] == "11100001110000"
    two = source_columns(mask(firsts=(1, 0, 0, 0)), 64, 64, 0)
    assert pattern(two[:32])[-17:] == "11100001110000111"
    assert pattern(two[32:])[-18:] == "000011100001110000"
    four = source_columns(mask((0, 1, 2, 1), (1, 1, 0, 0), shift=2), 32, 128, 1)
    parts = [pattern(part) for part in np.split(four, 4)]
    assert parts[0][-14:] == "00001110000111" and parts[1][-13:] == "0000111000011"
    assert parts[2][-12:] == "111000011100" and parts[3][-13:] == "1110000111000"
    used = four >= 0
    assert np.array_equal(four[used], np.arange(128)[used] + 2) and four.max() <= 129


@pytest.mark.parametrize(
    ("raw", "m", "limit", "message"),
    [
        (mask(shift=9), 128, 1, "column shift 9, accepted 0 to 8 with M 128"),
        (mask(shift=17), 32, 3, "column shift 17, accepted 0 to 16 with M 32"),
        (mask(shift=1), 64, 0, "column shift 1, accepted 0 to 0"),
        (mask() | 1 << 36, 128, 0, "reserved bit"),
        (mask() | 1 << 38, 128, 0, "reserved bit"),
        (mask() | 1 << 63, 128, 0, "reserved bit"),
        (mask(starts=(4, 0, 0, 0)), 128, 0, "start count 4 of mask 0, accepted less than .* 4"),
        (
            mask((0, 3, 0, 0), (0, 1, 0, 0)),
            64,
            0,
            "start count 3 of mask 1, accepted less than .* 3",
        ),
    ],
)
def test_refused_masks(raw, m, limit, message):
    with pytest.raises(DescriptorError, match=message):
        source_columns(raw, m, 64, limit)


def test_largest_shifts_are_accepted():
    assert source_columns(mask(shift=32), 128, 64, 3).max() < 96
    assert source_columns(16 << 56, 32, 64, 3).tolist() == list(range(16, 80))
    assert source_columns(16 << 56, 64, 64, 2).tolist() == list(range(16, 80))


def filled_cta():
    """Return a CTA whose shared memory holds small bf16 integers."""
    memory = np.zeros(232448 // 16, np.complex128).view(np.uint8)
    values = np.random.default_rng(5).integers(-4, 5, memory.size // 2).astype(np.float32)
    memory.view(np.uint16)[:] = values.view(np.uint32) >> 16
    cta = SimpleNamespace(rank=0, smem=memory, tmem=Tmem())
    cta.tmem.allocate(512, 1)
    return cta


def descriptor_of(m: int, n: int, b_mn: bool, limit: int = 0):
    raw = 1 << 4 | 1 << 7 | 1 << 10 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24 | limit << 30
    return decode_instruction(raw, "f16", 1, True)


def product(cta, descriptor, b: int, zeros: int | None, accumulate: bool = False) -> np.ndarray:
    """Return D of the 128 rows, float32 (128, N)."""
    a = encode_matrix(MatrixDescriptor(A_AT, 2048, 128, 0))
    mma = Mma((cta,), descriptor, 0, a, b, False, accumulate, mask=zeros)
    tensor_core.execute([mma])
    return cta.tmem.cells[: descriptor.n].view(np.float32).T.copy()


@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize("shift", [0, 5, 32])
def test_products_take_the_columns_of_the_mask(b_mn, shift):
    cta = filled_cta()
    b = encode_matrix(MatrixDescriptor(B_AT, 4096, 128, 0))
    whole = product(cta, descriptor_of(128, 128, b_mn), b, None)
    zeros = mask(starts=(1, 0, 0, 0), shift=shift)
    narrow = descriptor_of(128, 64, b_mn, 3)
    found = product(cta, narrow, b, zeros)
    columns = source_columns(zeros, 128, 64, 3)
    want = np.where(columns < 0, 0, whole[:, columns])
    assert np.array_equal(found, want) and (columns < 0).sum() > 20
    assert np.array_equal(product(cta, narrow, b, zeros, True), 2 * want)
    mma = Mma((cta,), narrow, 0, 0, b, True, False, mask=zeros)
    read = np.zeros(cta.smem.size // 16, bool)
    for _, space, region in mma_operands([mma]):
        if space == "smem":
            read[region] = True
    rows = {int(column) // (8 if b_mn else 1) for column in columns[columns >= 0]}
    assert read.sum() == len(rows) * (16 if b_mn else 2)


def test_a_mask_of_zeros_alone_reads_no_column():
    cta = filled_cta()
    descriptor = descriptor_of(128, 64, False)
    zeros = mask(firsts=(1, 0, 0, 0), skip=255)
    assert not product(
        cta, descriptor, encode_matrix(MatrixDescriptor(B_AT, 4096, 128, 0)), zeros
    ).any()
    mma = Mma(
        (cta,),
        descriptor,
        0,
        0,
        encode_matrix(MatrixDescriptor(B_AT, 4096, 128, 0)),
        True,
        False,
        mask=zeros,
    )
    assert [region for _, space, region in mma_operands([mma]) if space == "smem"] == [slice(0, 0)]


def test_rows_behind_the_last_used_column_may_lie_outside_shared_memory():
    cta = filled_cta()
    b = encode_matrix(MatrixDescriptor(cta.smem.size - 4096 - 4 * 16, 4096, 128, 0))
    found = product(cta, descriptor_of(128, 64, False), b, mask(skip=255))
    assert found[:, :4].any() and not found[:, 4:].any()


def test_masks_part_a_chain():
    cta, descriptor = filled_cta(), descriptor_of(128, 64, False)
    first, second, third = (Mma((cta,), descriptor, 0, 0, 0, True, True, mask=zeros)
                            for zeros in (mask(), mask(), None))  # fmt: skip
    assert second.continues(first) and not third.continues(second)


KERNEL = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 mbarrier.init.shared::cta.b64 [smem+16], 1;
    @%p2 fence.mbarrier_init.release.cluster;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 64;
    mov.u32 %r2, smem;
    shl.b32 %r3, %r1, 5;  add.u32 %r3, %r3, %r2;
    mov.u32 %r4, 0x3F803F80;
    st.shared.v4.u32 [%r3+1024], {%r4, %r4, %r4, %r4};
    st.shared.v4.u32 [%r3+1040], {%r4, %r4, %r4, %r4};
    fence.proxy.async;
    bar.sync 0;
    ld.shared.u32 %r5, [smem];
    add.u32 %r6, %r2, 1024;  shr.u32 %r6, %r6, 4;  cvt.u64.u32 %rd1, %r6;
    or.b64 %rd1, %rd1, OPERAND;
    mov.u32 %r7, INSTRUCTION;
    mov.b64 %rd3, MASK;
    setp.ne.u32 %p3, %r1, %r1;
    @%p2 tcgen05.mma.ws.cta_group::1.kind::f16 [%r5], %rd1, %rd1, %r7, %p3, %rd3;
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+16];
LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem+16], 0;
    @!%p3 bra LOOP;
    tcgen05.fence::after_thread_sync;
    shr.u32 %r8, %r1, 5;  shl.b32 %r8, %r8, 21;  add.u32 %r8, %r8, %r5;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r9, %r1, 5;  cvt.u64.u32 %rd2, %r9;  add.u64 %rd2, %rd2, %rd8;
    st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};
    st.global.v4.u32 [%rd2+16], {%r14, %r15, %r16, %r17};
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
"""


def run(zeros: int):
    """Return (eight columns of A B^T of ones, report) of a kernel with a mask."""
    out = np.zeros((128, 8), np.float32)
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | 64 >> 3 << 17 | 128 >> 4 << 24
    body = KERNEL.replace("OPERAND", str(encode_matrix(MatrixDescriptor(0, 2048, 128, 0))))
    body = body.replace("INSTRUCTION", str(descriptor)).replace("MASK", str(zeros))
    return out, run_kernel_text(body, [out], block=(128, 1, 1), dynamic_smem=8192, sanitize=True)


def test_a_kernel_with_a_mask():
    out, report = run(mask())
    assert (out == [16, 16, 16, 16, 0, 0, 0, 16]).all() and report.findings == []


def test_a_mask_is_refused_where_it_is_issued():
    with pytest.raises(DescriptorError, match="reserved bit") as caught:
        run(mask() | 1 << 36)
    assert "tcgen05.mma.ws" in str(caught.value)
