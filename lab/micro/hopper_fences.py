"""Small PTX kernels that time arrivals that release, relaxed ones and fences, for a Hopper GPU.

One warp of a cluster of two CTAs goes round a loop with one arrival or fence a round; what else its
SM does meanwhile is the kernel's setting: nothing, stores of the same warp before each arrival, or
other warps that load or store all the time. See `hopper_kernels` for how they are measured.
"""

from __future__ import annotations

from lab.micro.hopper_kernels import BUFFER, ROUNDS, Kernel

CLUSTER = 2
#: Offset at which bulk copies land, beyond the barriers.
_COPIES = 1024

_HEAD = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 pool[];
.visible .entry measure(.param .u64 results, .param .u64 buffer)
.reqntid THREADS, 1, 1
.reqnctapercluster CLUSTER, 1, 1
{
.reg .b64 %out, %buf, %begin, %end, %at, %place, %state<2>;
.reg .b32 %thread, %warp, %lane, %rank, %i, %pool, %peer, %word<32>, %bytes, %parity, %offset;
.reg .f32 %number;
.reg .pred %more, %leader, %first, %other, %works, %done;
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
mov.u32 %rank, %cluster_ctarank;
setp.eq.u32 %leader, %lane, 0;
setp.eq.u32 %first, %thread, 0;
ld.param.u64 %out, [results];
ld.param.u64 %buf, [buffer];
mov.u32 %pool, pool;
mapa.shared::cluster.u32 %peer, %pool, 1;
@%first mbarrier.init.shared.b64 [%pool], 1;
@%first mbarrier.init.shared.b64 [%pool+8], 1;
@%first mbarrier.init.shared.b64 [%pool+16], 1;
@%first mbarrier.init.shared.b64 [%pool+24], 1;
@%first mbarrier.init.shared.b64 [%pool+32], 1;
@%first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u64 %begin, 0;
mov.u64 %end, 0;
mov.u32 %parity, 0;
mov.u32 %offset, 0;
cvt.rn.f32.u32 %number, %lane;
mul.wide.u32 %place, %thread, 16;
add.u64 %place, %buf, %place;
setp.ne.u32 %other, %rank, 0;
@%other bra JOIN;
setp.ne.u32 %other, %warp, 0;
@%other bra OTHERS;
"""
_TAIL = """
JOIN:
setp.eq.f32 %done, %number, 0f7F7FFFFF;
@%done st.global.f32 [%buf], %number;
sub.u64 %end, %end, %begin;
mad.lo.u32 %rank, %rank, WARPS, %warp;
mul.wide.u32 %at, %rank, 8;
add.u64 %at, %out, %at;
@%leader st.global.u64 [%at], %end;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
}
"""

#: Its count tells the timing model the rounds of a loop without an arrival.
_COUNTED = "\nex2.approx.ftz.f32 %number, %number;"

#: Name -> what is timed. Nobody waits for the barrier at [%pool+8] of either CTA.
_TIMED = {
    "release arrive, peer":
        "@%leader mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%peer+8];",
    "relaxed arrive, peer":
        "@%leader mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%peer+8];",
    "async fence and relaxed arrive, peer":
        "fence.proxy.async.shared::cta;\n"
        "@%leader mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%peer+8];",
    "release arrive, own":
        "@%leader mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%pool+8];",
    "relaxed arrive, own":
        "@%leader mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%pool+8];",
    "fence.acq_rel.cluster": f"fence.acq_rel.cluster;{_COUNTED}",
    "fence.acq_rel.gpu": f"fence.acq_rel.gpu;{_COUNTED}",
    "fence.acq_rel.sys": f"fence.acq_rel.sys;{_COUNTED}",
    "fence.proxy.async": f"fence.proxy.async;{_COUNTED}",
}  # fmt: skip
_ARRIVALS = tuple(_TIMED)[:3]


def _own_stores(count: int) -> str:
    """A warp's stores of 16 bytes per lane."""
    words = ", ".join(["%thread"] * 4)
    return "\n".join(f"st.global.v4.b32 [%place+{512 * i}], {{{words}}};" for i in range(count))


def _others(rounds: int, body: str) -> str:
    """Return the other warps' code: `rounds` times the body, longer than the timed warp takes."""
    return f"""
mov.u32 %i, {rounds};
BACKGROUND:
.pragma "nounroll";
{body}
sub.u32 %i, %i, 1;
setp.ne.u32 %more, %i, 0;
@%more bra BACKGROUND;
"""


def _advance(step: int) -> str:
    """Advance to the next part of the buffer."""
    return (f"add.u32 %offset, %offset, {step};\nand.b32 %offset, %offset, {BUFFER // 2 - 1};\n"
            "cvt.u64.u32 %at, %offset;\nadd.u64 %at, %place, %at;\n")  # fmt: skip


def _loads(rounds: int) -> str:
    """Load 16 bytes per lane, eight in flight per warp, past L1; their words are used, or ptxas
    would let them wait for each other's registers."""
    lines = []
    for i in range(8):
        words = ", ".join(f"%word{4 * i + j}" for j in range(4))
        lines.append(f"ld.volatile.global.v4.b32 {{{words}}}, [%at+{4096 * i}];")
    lines += [f"xor.b32 %bytes, %bytes, %word{i};" for i in range(32)]
    used = "cvt.rn.f32.u32 %number, %bytes;\n"
    return "mov.u32 %bytes, 0;" + _others(rounds, _advance(32768) + "\n".join(lines)) + used


def _stores(rounds: int) -> str:
    """Store 16 bytes per lane, as fast as they are taken."""
    words = ", ".join(["%thread"] * 4)
    lines = [f"st.global.v4.b32 [%at+{4096 * i}], {{{words}}};" for i in range(8)]
    return _others(rounds, _advance(32768) + "\n".join(lines))


def _bulk_loads(rounds: int, nbytes: int, stages: int) -> str:
    """One warp keeps `stages` bulk loads of `nbytes` in flight."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

    def issue(stage: int) -> str:
        barrier = 16 + 8 * stage
        return (
            f"@%leader mbarrier.arrive.expect_tx.shared.b64 %state0, [%pool+{barrier}], {nbytes};\n"
            f"add.u32 %word0, %pool, {_COPIES + nbytes * stage};\n"
            f"add.u32 %word1, %pool, {barrier};\n"
            f"@%leader {copy} [%word0], [%buf], {nbytes}, [%word1];"
        )

    first = "\n".join(issue(stage) for stage in range(stages - 1))
    lines = []
    for stage in range(stages):
        lines.append(issue((stage + stages - 1) % stages))
        lines.append(
            f"WAIT_{stage}:\n"
            f"mbarrier.try_wait.parity.shared.b64 %done, [%pool+{16 + 8 * stage}], %parity;\n"
            f"@!%done bra WAIT_{stage};"
        )
    lines.append("xor.b32 %parity, %parity, 1;")
    # Copies issued ahead are waited for, so that no copy outlives the CTA.
    last = "\n".join(
        f"LAST_{stage}:\n"
        f"mbarrier.try_wait.parity.shared.b64 %done, [%pool+{16 + 8 * stage}], %parity;\n"
        f"@!%done bra LAST_{stage};"
        for stage in range(stages - 1)
    )
    return first + _others(rounds, "\n".join(lines)) + last


def _bulk_stores(rounds: int, nbytes: int) -> str:
    """One warp keeps two bulk stores of `nbytes` going."""
    body = (
        f"@%leader cp.async.bulk.global.shared::cta.bulk_group [%buf], [%word0], {nbytes};\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 1;"
    )
    return (f"add.u32 %word0, %pool, {_COPIES};" + _others(rounds, body)
            + "cp.async.bulk.wait_group 0;")  # fmt: skip


#: Name -> (warps of a CTA, before each arrival, what the other warps of the first CTA do).
_SETTINGS = {
    "idle": (1, "", ""),
    **{f"{n} own store{'s' * (n > 1)}": (1, _own_stores(n), "") for n in (1, 2, 4, 8, 16, 32)},
    "12 warps load": (13, "", _loads(512)),
    "bulk loads, 4 KB in flight": (2, "", _bulk_loads(1024, 4096, 1)),
    "bulk loads, 16 KB in flight": (2, "", _bulk_loads(512, 16384, 1)),
    "bulk loads, 2 x 16 KB in flight": (2, "", _bulk_loads(512, 16384, 2)),
    "bulk loads, 96 KB in flight": (2, "", _bulk_loads(128, 32768, 3)),
    "bulk stores, 4 KB each": (2, "", _bulk_stores(2048, 4096)),
    "bulk stores, 32 KB each": (2, "", _bulk_stores(512, 32768)),
    "1 warp stores": (2, "", _stores(2048)),
    "4 warps store": (5, "", _stores(2048)),
    "12 warps store": (13, "", _stores(1024)),
}


#: Constant of h200.json that a row gives.
_SETS = {
    "release arrive, peer; idle": "fence_gpu",
    "fence.acq_rel.gpu; idle": "fence_gpu",
    "fence.acq_rel.sys; idle": "fence_sys",
    "release arrive, peer; bulk loads, 96 KB in flight": "fence_behind_loads",
    "release arrive, peer; 32 own stores": "store_ack",
    "release arrive, peer; 4 warps store": "store_ack",
    "relaxed arrive, peer; 32 own stores": "store_bytes_per_clock",
    "async fence and relaxed arrive, peer; idle": "async_fence",
    "async fence and relaxed arrive, peer; 4 warps store": "store_depth",
}


def _kernel(timed: str, setting: str) -> Kernel:
    warps, before, others = _SETTINGS[setting]
    body = f"""
mov.u32 %i, {ROUNDS};
mov.u64 %begin, %clock64;
LOOP:
.pragma "nounroll";
{before}
{_TIMED[timed]}
sub.u32 %i, %i, 1;
setp.ne.u32 %more, %i, 0;
@%more bra LOOP;
mov.u64 %end, %clock64;
bra JOIN;
OTHERS:
{others}
"""
    ptx = (_HEAD + body + _TAIL).replace("THREADS", str(32 * warps))
    ptx = ptx.replace("CLUSTER", str(CLUSTER)).replace("WARPS", str(warps))
    name = f"{timed}; {setting}"
    return Kernel(name, warps, ptx, 1, "round", _SETS.get(name, ""), CLUSTER)


def _all() -> list[Kernel]:
    found = [_kernel(timed, setting) for setting in _SETTINGS for timed in _ARRIVALS]
    return found + [_kernel(timed, "idle") for timed in _TIMED if timed not in _ARRIVALS]


KERNELS = tuple(_all())
