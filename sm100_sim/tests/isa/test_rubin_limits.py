"""Limits of sm_107a that other targets have not: 576 columns of tensor memory, 327 KiB of shared
memory, matrix descriptors of 15 bits of address. No GPU of that target has run any of this."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_text import kernel_text, run_configured

from sm100_sim import LaunchConfig, devices, timing
from sm100_sim.errors import LaunchError, MemoryFault, TmemError
from sm100_sim.isa.tensor.descriptors import (
    KINDS,
    InstructionDescriptor,
    MatrixDescriptor,
    decode_matrix,
    encode_instruction,
    encode_matrix,
    issued_matrix,
)
from sm100_sim.report import Report
from sm100_sim.state.tmem import Tmem
from sm100_sim.targets import limits_of

KIB = 1024


def run(
    body: str, *arrays: np.ndarray, target: str = "sm_107a", smem: int = 4096, **options
) -> Report:
    """Run a kernel of one warp with so many bytes of dynamic shared memory."""
    config = LaunchConfig(
        "test", (1, 1, 1), (32, 1, 1), (1, 1, 1), smem, (),
        ptx=kernel_text(body, len(arrays), target),
    )  # fmt: skip
    return run_configured(config, arrays, **options)


# ---------------------------------------------------------------- tensor memory


def columns_of(count: int, exclusive: str = ".exclusive") -> str:
    """Allocate columns, write the last one and read it back into the first parameter."""
    return f"""
    mov.u32 %r0, smem;
    tcgen05.alloc{exclusive}.cta_group::1.sync.aligned.shared::cta.b32 [%r0], {count};
    ld.shared.u32 %r1, [%r0];  add.u32 %r2, %r1, {count - 1};
    mov.u32 %r3, %tid.x;  add.u32 %r3, %r3, 5;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {{%r3}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r4}}, [%r2];
    tcgen05.wait::ld.sync.aligned;
    mov.u32 %r5, %tid.x;  mul.wide.u32 %rd0, %r5, 4;  add.u64 %rd0, %rd8, %rd0;
    st.global.u32 [%rd0], %r4;
    tcgen05.dealloc{exclusive}.cta_group::1.sync.aligned.b32 %r1, {count};
    """


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("columns", [512, 544, 576])
def test_an_exclusive_allocation_has_up_to_576_columns(columns, sanitize):
    out = np.zeros(32, np.uint32)
    report = run(columns_of(columns), out, sanitize=sanitize)
    assert np.array_equal(out, np.arange(32) + 5) and not report.findings


def test_the_sanitizer_follows_the_columns_behind_512():
    body = columns_of(576)
    first, last = body.index("tcgen05.st."), body.index("tcgen05.ld.")
    report = run(body[:first] + body[last:], np.zeros(32, np.uint32), sanitize=True)
    assert [finding.kind for finding in report.findings] == ["uninitialised-read"]


@pytest.mark.parametrize(
    ("target", "columns", "exclusive"),
    [("sm_100a", 576, ".exclusive"), ("sm_103a", 544, ".exclusive"), ("sm_107a", 576, ""),
     ("sm_107a", 608, ".exclusive"), ("sm_107a", 560, ".exclusive")],
)  # fmt: skip
def test_other_allocations_of_more_than_512_columns(target, columns, exclusive):
    message = f"tcgen05.alloc of {columns} columns; .* with .exclusive up to 576 .* on sm_107a"
    with pytest.raises(TmemError, match=message):
        run(columns_of(columns, exclusive), np.zeros(32, np.uint32), target=target)


def test_columns_beyond_those_of_the_target():
    body = columns_of(512).replace("add.u32 %r2, %r1, 511", "add.u32 %r2, %r1, 512")
    for target, message in (("sm_100a", "TMEM has 512 columns"), ("sm_107a", r"columns 0\.\.511")):
        with pytest.raises(TmemError, match=f"columns 512 to 512; .*{message}"):
            run(body, np.zeros(32, np.uint32), target=target)


def test_an_exclusive_allocation_is_alone():
    tmem = Tmem(columns=limits_of("sm_107a").columns)
    assert tmem.allocate(64, 1, True) == 0
    assert tmem.allocate(32, 1) is None and tmem.allocate(32, 1, True) is None
    with pytest.raises(TmemError, match="both or neither"):
        tmem.deallocate(0, 64, 1)
    tmem.deallocate(0, 64, 1, True)
    assert tmem.allocate(32, 1) == 0 and tmem.allocate(32, 1, True) is None


# ---------------------------------------------------------------- shared memory


LAST_WORD = """
    ld.global.u32 %r2, [%rd8];  mov.u32 %r0, smem;  add.u32 %r0, %r0, %r2;
    mov.u32 %r1, 77;  st.shared.u32 [%r0], %r1;  ld.shared.u32 %r3, [%r0];
    st.global.u32 [%rd8], %r3;
"""


@pytest.mark.parametrize("sanitize", [False, True])
def test_a_cta_has_327_kib_of_shared_memory(sanitize):
    size = 327 * KIB
    out = np.array([size - 4], np.uint32)
    report = run(LAST_WORD, out, smem=size, sanitize=sanitize)
    assert out[0] == 77 and not report.findings
    with pytest.raises(MemoryFault):
        run(LAST_WORD, np.array([size], np.uint32), smem=size)


@pytest.mark.parametrize(("target", "most"), [("sm_107a", 327 * KIB), ("sm_100f", 227 * KIB)])
def test_more_shared_memory_than_the_target_has(target, most):
    with pytest.raises(LaunchError, match=f"{most + 16} bytes .*the kernel may have {most}"):
        run(LAST_WORD, np.zeros(1, np.uint32), target=target, smem=most + 16)


def test_host_code_has_to_allow_more_than_227_kib():
    ptx = kernel_text(LAST_WORD, 1, "sm_107a")
    for size, is_refused in ((227 * KIB, False), (227 * KIB + 16, True)):
        config = LaunchConfig(
            "test", (1, 1, 1), (32, 1, 1), (1, 1, 1), size, (), ptx=ptx, oversized_shared=False
        )
        if is_refused:
            with pytest.raises(LaunchError, match="more than 232448 need .*OVERSIZED_SHARED"):
                run_configured(config, [np.zeros(1, np.uint32)])
        else:
            run_configured(config, [np.zeros(1, np.uint32)])


def test_what_the_device_says():
    """Opting in without the oversized mode gives a CTA no more than on a B200."""
    rubin, b200 = (devices.device(name).attributes for name in ("rubin", "b200"))
    changed = {n: rubin[n] for n in rubin if rubin[n] != b200.get(n) and n in (8, 81, 97, 150)}
    assert changed == {150: 327 * KIB}
    assert devices.device("rubin").hbm_bytes_per_second == pytest.approx(22e12, rel=1e-6)


def test_nothing_is_timed():
    """No machine of the timing model has this target, whose machine code has other opcodes."""
    report = run("mov.u32 %r0, 0;", trace=True)
    ptx = kernel_text("mov.u32 %r0, 0;", 0, "sm_107a")
    with pytest.raises(ValueError, match="test is compiled for sm_107a.*no times.*accepted are"):
        timing.traced_program(report, ptx, None)


# ---------------------------------------------------------------- matrix descriptors

BEYOND = 1 << 14
VERSION_1 = 1 << 46


@pytest.mark.parametrize(
    ("version", "bits", "start", "is_cut"),
    [(1, 15, 260 * KIB, False), (0, 15, 4 * KIB, True), (1, 14, 4 * KIB, False)],
)
def test_the_version_says_how_long_an_address_is(version, bits, start, is_cut):
    raw = (260 * KIB >> 4) | version << 46 | 2 << 61
    issued, found = issued_matrix(raw, bits)
    assert decode_matrix(issued).start == start and found == is_cut


def test_version_0_is_silent_below_256_kib():
    raw = (255 * KIB >> 4) | 2 << 61
    assert issued_matrix(raw, 15) == (raw | VERSION_1, False)
    assert issued_matrix(raw, 14) == (raw, False)  # which `decode_matrix` refuses


def product(version: int, a_at: int) -> str:
    """An MMA of f16, M 128, N 16 and K 16: A at an offset of shared memory, all 1; what lies 256
    KiB below is all 4; B all 2. Row 0 to 31 of column 0 go to the first parameter."""
    b_at = 16 * KIB
    a, b = (encode_matrix(MatrixDescriptor(at, 128, 256, 0)) for at in (a_at, b_at))
    a ^= VERSION_1 if version == 0 else 0
    shape = InstructionDescriptor(KINDS["f16"], 128, 16, "f16", "f16", "f32", *[False] * 4)
    fills = {a_at: 0x3C003C00, a_at % (256 * KIB): 0x44004400, b_at: 0x40004000}
    fill = "".join(
        f"""
        mov.u32 %r1, {at};  shl.b32 %r2, %r0, 2;  add.u32 %r1, %r1, %r2;
        mov.u32 %r3, {value};  mov.u32 %r4, 0;
        FILL{at}:
        st.shared.u32 [%r1], %r3;  add.u32 %r1, %r1, 128;  add.u32 %r4, %r4, 1;
        setp.lt.u32 %p0, %r4, 32;
        @%p0 bra FILL{at};
        """
        for at, value in fills.items()
    )
    return f"""
    mov.u32 %r0, %tid.x;
    {fill}
    fence.proxy.async;
    mov.u32 %r5, smem;  add.u32 %r6, %r5, 8;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;
    ld.shared.u32 %r7, [%r5];
    setp.eq.u32 %p1, %r0, 0;
    @!%p1 bra ISSUED;
    mbarrier.init.shared::cta.b64 [%r6], 1;  fence.proxy.async;
    mov.u64 %rd1, {a};  mov.u64 %rd2, {b};  mov.u32 %r8, {encode_instruction(shape)};
    setp.ne.u32 %p2, %r0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r7], %rd1, %rd2, %r8, %p2;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r6];
    ISSUED:
    bar.warp.sync 0xffffffff;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6], 0;
    @!%p3 bra WAIT;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r7];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r10, %r0, 2;  cvt.u64.u32 %rd3, %r10;  add.u64 %rd3, %rd8, %rd3;
    st.global.u32 [%rd3], %r9;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;
    """


@pytest.mark.parametrize("options", [{}, {"sanitize": True}, {"seed": 3}], ids=str)
@pytest.mark.parametrize(
    ("version", "a_at", "expected"),
    [(1, 260 * KIB, 32.0), (0, 260 * KIB, 128.0), (1, 8 * KIB, 128.0), (0, 8 * KIB, 128.0)],
)
def test_an_operand_beyond_256_kib(version, a_at, expected, options):
    """Version 0 reads 256 KiB below, and a finding says so; with less memory both do the same."""
    out = np.zeros(32, np.float32)
    report = run(product(version, a_at), out, smem=300 * KIB, **options)
    assert (out == expected).all()
    if (version, a_at) != (0, 260 * KIB):
        assert not report.findings
        return
    (finding,) = report.findings
    assert "tcgen05.mma (PTX line" in finding and "version 0 (bits 46-48)" in finding
    assert "256 KiB below; make it with version 1" in finding


def test_an_address_that_was_cut_before():
    """A descriptor whose maker has kept 14 bits does not tell; what nobody wrote there does."""
    body = product(1, 260 * KIB)
    raws = [encode_matrix(MatrixDescriptor(at * KIB, 128, 256, 0)) for at in (260, 4)]
    place = f"mov.u32 %r1, {4 * KIB};"
    assert body.count(place) == body.count(f"%rd1, {raws[0]};") == 1
    body = body.replace(str(raws[0]), str(raws[1])).replace(place, f"mov.u32 %r1, {64 * KIB};")
    report = run(body, np.zeros(32, np.float32), smem=300 * KIB, sanitize=True)
    assert [finding.kind for finding in report.findings] == ["uninitialised-read"]


def test_a_copy_from_beyond_256_kib():
    """tcgen05.cp reads its descriptor by the same rule."""
    raw = encode_matrix(MatrixDescriptor(260 * KIB, 128, 256, 0)) ^ VERSION_1
    body = product(1, 260 * KIB).replace(
        "tcgen05.mma.cta_group::1.kind::f16 [%r7], %rd1, %rd2, %r8, %p2;",
        f"mov.u64 %rd4, {raw};  tcgen05.cp.cta_group::1.128x128b [%r7], %rd4;",
    )
    out = np.zeros(32, np.uint32)
    report = run(body, out, smem=300 * KIB)
    assert (out == 0x44004400).all()
    assert [text.startswith("tcgen05.cp (PTX line") for text in report.findings] == [True]
