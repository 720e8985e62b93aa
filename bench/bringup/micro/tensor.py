"""Microbenchmarks of tensor memory, tcgen05.mma and cluster launch control."""

from __future__ import annotations

from typing import Any

from sm100_sim.timing import mma_cost
from sm100_sim.tools.descriptors import (
    KINDS,
    InstructionDescriptor,
    MatrixDescriptor,
    encode_instruction,
    encode_matrix,
)

from .table import Micro
from .timed import Timed, init_barriers, timed

SMEM, TMEM, PLAIN = "SMEM", "TMEM", "SMEM without a swizzle"
#: (group, M, N, place of A): the kernels' shapes, and those of one CTA beside them.
_SHAPES = (
    (2, 256, 128, SMEM),
    (2, 256, 256, SMEM),
    (2, 256, 256, PLAIN),
    (2, 256, 128, TMEM),
    (2, 256, 256, TMEM),
    (2, 128, 128, SMEM),
    (2, 128, 256, SMEM),
    (1, 128, 128, SMEM),
    (1, 128, 128, TMEM),
)
#: Matrix descriptors but for their address, of 128 rows K-major: with the swizzle, and by core
#: matrices of which those of the next 8 rows come first, as dS of the backward's products.
_RAW = encode_matrix(MatrixDescriptor(0, 16, 1024, 128))
_RAW_PLAIN = encode_matrix(MatrixDescriptor(0, 2048, 128, 0))
_SHARED = 128 << 10


def _allocate(group: int = 1) -> str:
    sync = (
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
        if group == 2
        else "bar.sync 0;"
    )
    return f"""setp.ne.u32 %more, %warp, 0;
@%more bra ALLOCATED;
add.u32 %w0, %bar, 32;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%w0], 512;
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
tcgen05.fence::before_thread_sync;
{sync}
tcgen05.fence::after_thread_sync;
ld.shared.u32 %addr, [%bar+32];
shl.b32 %w0, %warp, 21;
add.u32 %peer, %addr, %w0;
"""


def _free(group: int = 1) -> str:
    return f"""tcgen05.fence::before_thread_sync;
SYNC
tcgen05.fence::after_thread_sync;
setp.ne.u32 %more, %warp, 0;
@%more bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %addr, 512;
FREED:"""


def _words(first: int, count: int) -> str:
    return ", ".join(f"%w{first + i}" for i in range(count))


def _load(columns: int, repeat: int, warps: int) -> Timed:
    """`repeat` loads of so many columns, one wait."""
    loads = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{_words(columns * i, columns)}}}, "
        f"[%peer+{columns * i}];\n"
        for i in range(repeat)
    )
    body = f"{loads}tcgen05.wait::ld.sync.aligned;\nxor.b32 %rank, %rank, %w0;"
    keep = "setp.eq.u32 %done, %rank, 77;\n@%done st.global.u32 [%buf+64], %rank;\n"
    zeros = ", ".join(["%zero"] * 32)
    stores = "".join(
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%peer+{i}], {{{zeros}}};\n"
        for i in range(0, 128, 32)
    )
    setup = f"{_allocate()}mov.u32 %rank, 0;\n{stores}tcgen05.wait::st.sync.aligned;\n"
    name = f"{repeat} tcgen05.ld of {columns} columns, {warps} warps"
    return timed(name, body, setup=setup, keep=keep, finish=_free(), warps=warps)


def _store(columns: int) -> Timed:
    body = (
        f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%peer], "
        f"{{{', '.join(['%zero'] * columns)}}};\ntcgen05.wait::st.sync.aligned;"
    )
    return timed(f"tcgen05.st of {columns} columns", body, setup=_allocate(), finish=_free())


def _random_operands() -> str:
    """Shared memory := bf16 numbers of random sign and mantissa, 0.5 to 1; zeros would draw less
    power."""
    return f"""shl.b32 %w7, %lane, 2;
add.u32 %w6, %pool, %w7;
mad.lo.u32 %w7, %cta, 7919, %lane;
FILL:
mad.lo.u32 %w7, %w7, 1664525, 1013904223;
and.b32 %w8, %w7, 0x807F807F;
or.b32 %w8, %w8, 0x3F003F00;
st.shared.u32 [%w6], %w8;
add.u32 %w6, %w6, 128;
sub.u32 %w9, %w6, %pool;
setp.lt.u32 %more, %w9, {64 << 10};
@%more bra FILL;
fence.proxy.async;
"""


def _products(
    group: int, m: int, n: int, place: str, count: int, targets: int = 1, ctas: int = 0,
    rounds: int = 16,
) -> Timed:  # fmt: skip
    """`count` tcgen05.mma one behind the other into `targets` accumulators, a commit, a wait.
    place: of A. ctas: of the grid, on random operands; 0: one CTA or pair, on whatever is there."""
    types = InstructionDescriptor(
        KINDS["f16"], m, n, "bf16", "bf16", "f32", False, False, False, False
    )
    a_raw = _RAW_PLAIN if place == PLAIN else _RAW
    setup = (
        (_random_operands() if ctas else "")
        + init_barriers()
        + _allocate(group)
        + (
            f"mov.u32 %rank, {'%cluster_ctarank' if group == 2 else '0'};\n"
            "setp.eq.u32 %mine, %rank, 0;\nand.pred %mine, %mine, %first;\n"
            "setp.eq.u32 %accumulate, %zero, 0;\n"
            "shr.u32 %w1, %pool, 4;\nand.b32 %w1, %w1, 0x3FFF;\ncvt.u64.u32 %d0, %w1;\n"
            f"or.b64 %d1, %d0, {_RAW:#x};\nadd.u64 %d1, %d1, {32768 // 16};\n"
            f"or.b64 %d0, %d0, {a_raw:#x};\n"
            f"mov.u32 %w2, {encode_instruction(types):#x};\nadd.u32 %w3, %addr, 256;\n"
            f"add.u32 %w4, %addr, {n if targets > 1 else 0};\n"
        )
    )
    a = "[%w3]" if place == TMEM else "%d0"
    issue = "".join(
        f"tcgen05.mma.cta_group::{group}.kind::f16 [%{'w4' if i % targets else 'addr'}], {a}, %d1, "
        "%w2, %accumulate;\n"
        for i in range(count)
    )
    commit = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
    body = f"""@!%mine bra PAST;
{issue}{commit}
WAITING:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], %parity;
@!%done bra WAITING;
xor.b32 %parity, %parity, 1;
PAST:"""
    name = f"{count} mma {m}x{n} group {group} A {place.lower()}, {targets} accumulators"
    shape: dict[str, Any] = {
        "rounds": rounds,
        "grid": ctas or group,
        "cluster": group,
        "shared": _SHARED,
    }
    name = f"{name}, {ctas} CTAs" if ctas else name
    return timed(name, body, setup=setup, finish=_free(group), **shape)


def _query() -> Timed:
    """Each of many CTAs requests a cluster of the grid and waits for the answer."""
    body = """@!%first bra PAST;
mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%w5], [%bar];
WAITING:
mbarrier.try_wait.parity.shared.b64 %done, [%bar], %parity;
@!%done bra WAITING;
PAST:"""
    setup = init_barriers() + "add.u32 %w5, %bar, 48;\n"
    shape: dict[str, Any] = {"rounds": 1, "grid": 2048, "shared": 200 << 10, "typical": True}
    return timed("a query of launch control", body, setup=setup, **shape)


def _mma(group: int, m: int, n: int, place: str) -> tuple[Micro, Micro]:
    name = f"{m}x{n} group {group} A {place}"
    form = mma_cost(m, n, group, place == TMEM)
    few, more = (_products(group, m, n, place, count) for count in (8, 40))
    return (
        Micro(f"MMA interval {name}", "clocks", (few, more), lambda a, b: (b - a) / 32, "",
              f"each further instruction; the model's closed form has {form.interval}", True),
        Micro(f"MMA latency {name}", "clocks", (_products(group, m, n, place, 1),),
              lambda a: a, "", "one, its commit and the wait; the closed form has "
              f"{form.latency}", True),
    )  # fmt: skip


def _all_pairs(sms: int) -> tuple[Micro, ...]:
    """Every SM's tensor core: the clock of a GPU at rest, which some 40 ms show; then rate and
    clock for as long as the power limit takes to act."""
    count, rounds, ctas = 160, 4000, sms // 2 * 2
    flop = 2.0 * 256 * 256 * 16 * count * rounds * ctas / 2
    few, many = (
        (_products(2, 256, 256, SMEM, count, 1, ctas, number),) for number in (400, rounds)
    )
    what = "256x256 of every pair, random operands"
    return (
        Micro("SM clock of tensor cores", "GHz", few, lambda s: s, "clock_ghz",
              f"clocks over seconds of first launches, {what}", True, True),
        Micro("MMA at full load", "TFLOPS of dense bf16 MMA", many, lambda s: flop / s / 1e12, "",
              f"{what}, for some seconds", True, True),
        Micro("SM clock of tensor cores under load", "GHz", many, lambda s: s, "",
              f"the same behind that, {what}", True, True),
    )  # fmt: skip


def table(sms: int) -> tuple[Micro, ...]:
    """All of this module, for a GPU of so many SMs."""
    pair = mma_cost(256, 128, 2, False).latency
    loads = (_load(8, 1, 1), _load(64, 1, 1))
    stores = (_store(8), _store(64))
    switch = tuple(_products(2, 256, 128, SMEM, 40, targets) for targets in (1, 2))
    return (
        Micro("TMEM load", "clocks before the first column", loads,
              lambda a, b: a - 8 * (b - a) / 56, "tmem_load", "a load and its wait, one warp",
              True),
        Micro("TMEM load rate", "columns a clock and issue slot", loads,
              lambda a, b: 56 / (b - a), "tmem_columns_per_clock",
              "what 64 columns take longer than 8", True),
        Micro("TMEM load rate of an SM", "bytes a clock and SM", (_load(32, 4, 4),),
              lambda a: 4 * 4 * 32 * 32 * 4 / a, "", "four loads of 32 columns, four warps", True),
        Micro("TMEM store", "clocks before the first column", stores,
              lambda a, b: a - 8 * (b - a) / 56, "tmem_store", "a store and its wait, one warp",
              True, around=8.5),
        Micro("TMEM store rate", "columns a clock and issue slot", stores,
              lambda a, b: 56 / (b - a), "", "what 64 columns take longer than 8", True),
        *(micro for shape in _SHAPES for micro in _mma(*shape)),
        Micro("MMA latency beyond the closed form", "clocks",
              (_products(2, 256, 128, SMEM, 1),), lambda a: a - pair, "mma_extra_latency",
              "256x128 of a pair", True, around=51.5),
        Micro("MMA switch", "clocks", switch, lambda a, b: (b - a) / 40, "mma_switch",
              "two accumulators in turn less one alone", True),
        *_all_pairs(sms),
        Micro("CLC query", "clocks", (_query(),), lambda a: a, "clc_query",
              "try_cancel until its wait has passed; the median of CTAs", True),
    )  # fmt: skip
