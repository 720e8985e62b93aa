"""Instructions of the long tail against plain formulas: bit fields, dot products, hints, errors."""

import numpy as np
import pytest
from harness import compile_body, environment, run_compiled, run_warp
from kernel_text import run_kernel_text

from sm100_sim.errors import MemoryFault, Misaligned, UnknownInstruction

RNG = np.random.default_rng(11)
A = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
B = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
C = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
SMALL = np.array(
    [0, 1, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 0xFFFFFFFF] * 2, np.uint32
)


def compute(opcode: str, *sources: np.ndarray) -> list[int]:
    names = [f"%s{n}" for n in range(len(sources))]
    body = f".reg .b32 %d, {', '.join(names)}; {opcode} %d, {', '.join(names)};"
    return run_warp(body, dict(zip(names, sources, strict=True)), ["%d"])["%d"].tolist()


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_fields_and_masks(mode):
    def amount(n):
        return min(n, 32) if mode == "clamp" else n % 32

    rows = list(zip(A.tolist(), SMALL.tolist(), strict=True))
    assert compute(f"szext.{mode}.u32", A, SMALL) == [a & (1 << amount(n)) - 1 for a, n in rows]
    want = [signed(a, amount(n)) & 0xFFFFFFFF if amount(n) else 0 for a, n in rows]
    assert compute(f"szext.{mode}.s32", A, SMALL) == want
    other = np.roll(SMALL, 5)
    want = [
        ((1 << amount(w)) - 1 << amount(p)) & 0xFFFFFFFF
        for p, w in zip(SMALL.tolist(), other.tolist(), strict=True)
    ]
    assert compute(f"bmsk.{mode}.b32", SMALL, other) == want


def nth_set_bit(mask: int, base: int, offset: int) -> int:
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [bit for bit in places if mask >> bit & 1]
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    number = abs(offset) - 1
    return found[number] if number < len(found) else 0xFFFFFFFF


def test_the_nth_set_bit_is_found_in_both_directions():
    names = "%mask", "%base", "%offset"
    body = f".reg .b32 %d, {', '.join(names)}; fns.b32 %d, {', '.join(names)};"
    compiled = compile_body(body, ("%d", *names))
    base = np.arange(32, dtype=np.uint32)
    offsets = np.array([-40, -3, -1, 0, 1, 2, 7, 33] * 4, np.int32)
    for shift in range(8):
        offset = np.roll(offsets, shift)
        values = A, base, offset.view(np.uint32)
        inputs = dict(zip(names, values, strict=True))
        found = run_compiled(compiled, inputs, environment())["%d"].tolist()
        assert found == list(map(nth_set_bit, A.tolist(), base.tolist(), offset.tolist()))


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_products(a_type, b_type):
    def part(value, bits, place, type_name):
        value = value >> bits * place & (1 << bits) - 1
        return signed(value, bits) if type_name == "s32" else value

    for opcode, bits, count, first in (
        ("dp4a", 8, 4, 0),
        ("dp2a.lo", 16, 2, 0),
        ("dp2a.hi", 16, 2, 2),
    ):
        want = [
            (
                c
                + sum(
                    part(a, bits, n, a_type) * part(b, 8, first + n, b_type) for n in range(count)
                )
            )
            & 0xFFFFFFFF
            for a, b, c in zip(A.tolist(), B.tolist(), C.tolist(), strict=True)
        ]
        assert compute(f"{opcode}.{a_type}.{b_type}", A, B, C) == want


def test_hints_check_their_address():
    raw = np.zeros(512, np.uint8)
    line = raw[-raw.__array_interface__["data"][0] % 128 :][:128]
    run_kernel_text(
        "applypriority.global.L2::evict_normal [%rd8], 128; discard.global.L2 [%rd8], 128;", [line]
    )
    with pytest.raises(Misaligned, match="128-byte"):
        run_kernel_text("discard.L2 [%rd8+64], 128;", [line])
    with pytest.raises(MemoryFault):
        run_kernel_text("applypriority.L2::evict_normal [%rd8+128], 128;", [line])


@pytest.mark.parametrize(
    "operation, function",
    [
        ("add.u32", np.add),
        ("min.s32", np.minimum),
        ("max.u32", np.maximum),
        ("xor.b32", np.bitwise_xor),
    ],
)
@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"sanitize": True}], ids=str)
def test_a_bulk_reduction_into_the_other_cta_of_a_cluster(operation, function, options):
    source = np.random.default_rng(2).integers(0, 1 << 32, (2, 32), dtype=np.uint32)
    out = np.zeros_like(source)
    body = f"""mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; shl.b32 %r2, %r0, 2;
mov.u32 %r3, smem; add.u32 %r4, %r3, %r2; shl.b32 %r5, %r1, 7; add.u32 %r5, %r5, %r2;
cvt.u64.u32 %rd0, %r5; add.s64 %rd1, %rd8, %rd0; add.s64 %rd2, %rd9, %rd0;
ld.global.b32 %r6, [%rd1]; st.shared.b32 [%r4], %r6; st.shared.b32 [%r4+128], %r6;
setp.eq.u32 %p1, %r0, 0; add.u32 %r7, %r3, 1024;
@%p1 mbarrier.init.shared::cta.b64 [%r7], 1;
@%p1 fence.mbarrier_init.release.cluster;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 128;
fence.proxy.async.shared::cta; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r8, %r1, 1; add.u32 %r9, %r3, 128; mapa.shared::cluster.u32 %r10, %r9, %r8;
mapa.shared::cluster.u32 %r11, %r7, %r8;
@%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation} \
[%r10], [%r3], 128, [%r11];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0; @!%p2 bra WAIT;
ld.shared.b32 %r12, [%r4+128]; st.global.b32 [%rd2], %r12;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    report = run_kernel_text(body, [source, out], grid=(2, 1, 1), cluster=(2, 1, 1), **options)
    kind = np.int32 if ".s32" in operation else np.uint32
    want = function(source.view(kind), source[::-1].view(kind)).view(np.uint32)
    np.testing.assert_array_equal(out, want)
    assert not report.findings


@pytest.mark.parametrize(
    "line, why",
    [
        ("vote.all.pred %p, %p", "use vote.sync"),
        ("vote.ballot.b32 %a, %p", "use vote.sync"),
        ("shfl.down.b32 %a, %a, 1, 31", "use shfl.sync"),
        ("multimem.red.add.u32 [%w], %a", "devices"),
        ("multimem.ld_reduce.add.u32 %a, [%w]", "devices"),
        ("dp4a.u32 %a, %a, %a, %a", "s32"),
        ("discard.global.L2 [%w], 64", "128"),
        (
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 "
            "[%a], [%a], 16, [%a]",
            "operation or type",
        ),
    ],
)
def test_other_forms_are_errors(line, why):
    with pytest.raises(UnknownInstruction, match=why):
        compile_body(f".reg .pred %p; .reg .b32 %a; .reg .b64 %w; {line};")
