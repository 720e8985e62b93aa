"""Microbenchmarks of arithmetic, shared memory, barriers and fences: what Hopper shares."""

from __future__ import annotations

from typing import Any

from .table import Micro
from .timed import Timed, init_barriers, timed, wait

_SHARED = 64 << 10


def _floats(count: int) -> str:
    """Return %f0 .. from the lane, so that nothing is a constant."""
    lines = ["cvt.rn.f32.u32 %acc, %lane;", "mul.f32 %acc, %acc, 0fBC23D70A;"]
    lines += [f"add.f32 %f{i}, %acc, 0f{0xBD000000 + 4096 * i:08X};" for i in range(count)]
    return "\n".join(lines) + "\n"


def _summed(count: int) -> str:
    """Return a use of %f0 .. that ptxas cannot leave out."""
    lines = ["mov.f32 %sum, 0f00000000;"]
    lines += [f"add.f32 %sum, %sum, %f{i};" for i in range(count)]
    lines += ["setp.eq.f32 %done, %sum, 0f7F7FFFFF;", "@%done st.global.f32 [%buf], %sum;\n"]
    return "\n".join(lines)


def _exp2() -> Timed:
    body = "\n".join(f"ex2.approx.ftz.f32 %f{i}, %f{i};" for i in range(32))
    return timed("32 exp2 of each of 4 warps", body, setup=_floats(32), keep=_summed(32), warps=4)


def _chain(name: str, text: str) -> Timed:
    """Return 32 instructions of one warp, each on the result of the one before."""
    setup = (
        "add.u32 %addr, %pool, %zero;\n@%first st.shared.b32 [%addr], %addr;\n"
        f"xor.b32 %w0, %lane, 5;\n{_floats(1)}"
    )
    keep = "add.u32 %addr, %addr, %w0;\ncvt.rn.f32.u32 %f1, %addr;\n" + _summed(2)
    body = "\n".join([text] * 32)
    return timed(f"32 {name} in a chain", body, setup=setup, keep=keep, shared=_SHARED)


def _shared_loads() -> Timed:
    lines = []
    for i in range(8):
        words = ", ".join(f"%w{4 * i + j}" for j in range(4))
        lines.append(f"ld.volatile.shared.v4.b32 {{{words}}}, [%addr+{8192 * (i % 4)}];")
    setup = "shl.b32 %addr, %thread, 4;\nadd.u32 %addr, %addr, %pool;\n"
    name, body = "8 ld.shared.v4 of each of 16 warps", "\n".join(lines)
    return timed(name, body, setup=setup, warps=16, rounds=512, shared=_SHARED)


def _named_barrier(warps: int) -> Timed:
    body = "\n".join([f"bar.sync 1, {32 * warps};"] * 8)
    return timed(f"8 bar.sync of {warps} warps", body, warps=warps)


def _at_barrier(name: str, text: str) -> Timed:
    """Return 8 instructions at an mbarrier; the next address depends on what came back."""
    setup = init_barriers(32) + "add.u32 %addr, %bar, %zero;\n"
    return timed(f"8 {name} in a chain", text * 8, setup=setup)


def _arrivals() -> Timed:
    return _at_barrier(
        "mbarrier.arrive",
        "mbarrier.arrive.shared.b64 %state, [%addr];\nand.b64 %state, %state, %zero64;\n"
        "cvt.u32.u64 %w0, %state;\nadd.u32 %addr, %addr, %w0;\n",
    )


def _tests() -> Timed:
    """Return tests of a phase that is complete."""
    return _at_barrier(
        "mbarrier.test_wait",
        "mbarrier.test_wait.parity.shared.b64 %done, [%addr], 1;\n"
        "selp.u32 %w0, %zero, 1, %done;\nadd.u32 %addr, %addr, %w0;\n",
    )


def _turns(arrive: tuple[str, str], other: str) -> str:
    """Return the body in which two warps hand a turn to and fro: twice a round. arrive: of the
    first and of the second; other: what the first one waits at."""
    return f"""@!%mine bra SECOND;
{arrive[0]}
{wait("WAIT_A", other)}bra BOTH;
SECOND:
{wait("WAIT_B")}{arrive[1]}
BOTH:
xor.b32 %parity, %parity, 1;"""


def _hand_over() -> Timed:
    """Return hand-overs between two warps of a CTA, over two mbarriers."""
    first, second = (
        f"@%leader mbarrier.arrive.shared.b64 _, [{place}];" for place in ("%bar", "%bar+8")
    )
    setup = init_barriers() + "setp.eq.u32 %mine, %warp, 0;\n"
    body = _turns((first, second), "%bar+8")
    return timed("2 hand-overs of a turn in a CTA", body, warps=2, setup=setup)


def _remote_hand_over(form: str) -> Timed:
    """Return those of a warp of each CTA of a pair; the arrive goes to the other's mbarrier."""
    arrive = f"@%leader mbarrier.arrive.{form}.cluster.shared::cluster.b64 _, [%peer];"
    setup = init_barriers() + (
        "mov.u32 %rank, %cluster_ctarank;\nsetp.eq.u32 %mine, %rank, 0;\n"
        "xor.b32 %w0, %rank, 1;\nmapa.shared::cluster.u32 %peer, %bar, %w0;\n"
    )
    body = _turns((arrive, arrive), "%bar")
    return timed(f"2 hand-overs of a turn in a pair, {form}", body, setup=setup, grid=2, cluster=2)


def _cluster_barrier() -> Timed:
    body = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"
    return timed("a cluster barrier of 2 CTAs", body, rounds=16, grid=2, cluster=2)


def _fence(text: str, before: str = "", warps: int = 1, grid: int = 1) -> Timed:
    """Return a fence that warp 0 of each CTA times behind `before`, which all warps do."""
    name = f"{text} behind {before.count('st.')} stores of {warps} warps, {grid} CTAs"
    setup = (
        f"mul.wide.u32 %at, %thread, 16;\nmul.wide.u32 %d0, %cta, {32 * 16 * warps * 8};\n"
        "add.u64 %at, %at, %d0;\nadd.u64 %far, %buf, %at;\n"
        "setp.eq.u32 %mine, %warp, 0;\n"
    )
    body = (
        f"{before}@!%mine bra PAST;\nmov.u64 %d1, %clock64;\n{text};\n"
        "mov.u64 %d2, %clock64;\nsub.u64 %d2, %d2, %d1;\nadd.u64 %d3, %d3, %d2;\nPAST:"
    )
    shape: dict[str, Any] = {"warps": warps, "grid": grid, "buffer": 64 << 20, "typical": True}
    return timed(name, body, setup=setup, summed=True, **shape)


def _stores(count: int, warps: int) -> str:
    return "".join(
        f"st.global.v4.u32 [%far+{512 * warps * i}], {{%zero, %zero, %zero, %zero}};\n"
        for i in range(count)
    )


def _fence_cost(name: str, text: str, constant: str, what: str, **load: int) -> Micro:
    """The fence between its two readings of the clock, less nothing between them."""
    warps, count, grid = load.get("warps", 1), load.get("stores", 0), load.get("grid", 1)
    before = _stores(count, warps)
    other = _fence(text, before, warps, grid)
    without = _fence("mov.u32 %w0, %w0", before, warps, grid)
    return Micro(name, "clocks", (other, without), lambda a, b: a - b, constant, what)


def table() -> tuple[Micro, ...]:
    release = "fence.acq_rel.gpu"
    return (
        Micro("exp2 interval", "clocks a warp", (_exp2(),), lambda a: a / 32, "mufu_interval",
              "MUFU.EX2 of a warp on an issue slot that does nothing else", around=0.1),
        Micro("exp2 latency", "clocks", (_chain("ex2", "ex2.approx.ftz.f32 %f0, %f0;"),),
              lambda a: a / 32, "mufu_latency", "dependent ex2 of one warp"),
        Micro("shared load", "clocks", (_chain("ld.shared", "ld.shared.b32 %addr, [%addr];"),),
              lambda a: a / 32, "shared_load", "dependent loads of shared memory"),
        Micro("shared rate", "bytes a clock and SM", (_shared_loads(),),
              lambda a: 16 * 8 * 512 / a, "shared_bytes_per_clock", "16-byte loads of 16 warps"),
        Micro("shuffle", "clocks",
              (_chain("shfl", "shfl.sync.idx.b32 %w0, %w0, %w0, 31, -1;"),),
              lambda a: a / 32, "shuffle", "dependent shuffles of one warp"),
        Micro("bar.sync", "clocks", (_named_barrier(4), _named_barrier(16)),
              lambda a, b: (a - 4 * (b - a) / 12) / 8, "named_barrier",
              "of 4 and 16 warps, what does not grow with their number", around=-2.0),
        Micro("bar.sync a warp", "clocks", (_named_barrier(4), _named_barrier(16)),
              lambda a, b: (b - a) / 12 / 8, "named_barrier_warp", "what each warp adds"),
        Micro("mbarrier arrive", "clocks", (_arrivals(),), lambda a: a / 8, "barrier_arrive",
              "dependent arrivals", around=15.0),
        Micro("mbarrier test", "clocks", (_tests(),), lambda a: a / 8, "barrier_test",
              "dependent tests of a complete phase, a select and an addition each", around=9.0),
        Micro("hand-over", "clocks", (_hand_over(),), lambda a: a / 2, "",
              "arrive until another warp of the CTA has passed its wait"),
        Micro("wake-up", "clocks", (_hand_over(), _arrivals()), lambda a, b: a / 2 - b / 8,
              "barrier_wake", "what a hand-over takes beside the arrive", around=6.5),
        Micro("remote hand-over", "clocks", (_remote_hand_over("relaxed"),), lambda a: a / 2, "",
              "the same between the CTAs of a pair, relaxed"),
        Micro("remote arrive", "clocks",
              (_remote_hand_over("relaxed"), _hand_over(), _arrivals()),
              lambda a, b, c: (a - b) / 2 + c / 8, "remote_arrive",
              "an arrive and what the way to the other CTA adds to a hand-over", around=15.0),
        Micro("remote hand-over, release", "clocks", (_remote_hand_over("release"),),
              lambda a: a / 2, "", "the same with an arrive that releases at cluster scope"),
        Micro("cluster barrier", "clocks", (_cluster_barrier(),), lambda a: a, "cluster_barrier",
              "arrive.relaxed and wait of two CTAs", around=14.0),
        _fence_cost("fence.proxy.async.shared", "fence.proxy.async.shared::cta", "async_fence",
                    "nothing pending"),
        _fence_cost("fence.proxy.async", "fence.proxy.async", "",
                    "of all spaces, which ptxas makes a MEMBAR.ALL.GPU and the one of shared"),
        _fence_cost("fence.cta", "fence.acq_rel.cta", "fence_cta", "nothing pending"),
        _fence_cost("fence.gpu, idle", release, "fence_gpu", "nothing pending"),
        _fence_cost("fence.gpu, own stores", release, "", "8 stores of 16 bytes a lane pending",
                    stores=8),
        _fence_cost("fence.gpu, stores of 16 warps", release, "",
                    "every warp of the SM stores all the time", stores=8, warps=16),
        _fence_cost("fence.gpu, stores of all SMs", release, "",
                    "every warp of 128 CTAs stores all the time", stores=8, warps=16, grid=128),
    )  # fmt: skip
