"""Litmus kernels: what may be seen out of order, counted over millions of tries on a GPU.

A message passes between two warps: data are written, a barrier is signalled, the waiter reads. Each
`Message` says how; the kernel counts how often the reader found old data. "Never" is no proof; a
count above zero is one that the rule does not hold. `probes` has kernels for what else only a GPU
can answer.

    python -m lab.litmus --out FILE [--seconds N]

needs a GPU of compute capability 9.0, a CUDA driver, cuda-bindings and numpy. The simulator runs
the messages, too, with few tries: its memory has one order, so it must count none.
"""

from __future__ import annotations

from dataclasses import dataclass

from sm100_sim.tools.golden.cases import HEADER, KERNEL

#: Bytes between the words of two lanes: a line of the cache each.
LINE = 128
DATA = 32 * LINE
#: Global memory of a cluster: two messages' data.
SCRATCH = 2 * DATA
_HEAD = HEADER + (f".visible .entry {KERNEL}(.param .u64 p0, .param .u64 p1, .param .u64 p2)\n")
_REGISTERS = (
    ".reg .b32 %t, %w, %lane, %rank, %peer, %i, %n, %parity, %value, %seen, %stale, %far, %place;\n"
    ".reg .b32 %r<16>;\n.reg .b64 %out, %scratch, %rd<12>;\n"
    ".reg .pred %first, %zero, %done, %more, %bad, %p<4>;\n"
)


@dataclass(frozen=True)
class Message:
    """One way to pass a message.

    data: where it is written: "peer" (the reader's shared memory), "own" (the writer's), "global"
    (read past the L1), "cached" (global, read through the L1); "bulk": the reader moves the
    writer's shared memory, which is its own CTA's, to global memory by a bulk copy, and "relayed"
    the same, told through a warp of the other CTA. fence, last: PTX of all lanes between data and
    signal, before and behind the warp's own barrier. arrive, wait: their semantics. ordered:
    whether the PTX ISA promises new data.
    """

    name: str
    data: str
    arrive: str
    wait: str
    ordered: bool
    fence: str = ""
    last: str = ""


_RELEASE, _RELAXED = ".release.cluster", ".relaxed.cluster"
_PROXY = "fence.proxy.async.shared::cta;"
#: A release of shared memory alone.
_SHARED_RELEASE = "fence.release.sync_restrict::shared::cta.cluster;"
MESSAGES = (
    Message("peer's memory, release", "peer", _RELEASE, ".acquire.cluster", True),
    Message("peer's memory, relaxed", "peer", _RELAXED, ".acquire.cluster", False),
    Message(
        "peer's memory, arrival of scope .cta", "peer", ".release.cta", ".acquire.cluster", False
    ),
    Message(
        "peer's memory, arrival without semantics or scope", "peer", "", ".acquire.cluster", False
    ),
    Message(
        "peer's memory, fence.acq_rel.cluster and relaxed",
        "peer",
        _RELAXED,
        ".acquire.cluster",
        True,
        "fence.acq_rel.cluster;",
    ),
    Message(
        "peer's memory, proxy fence and relaxed",
        "peer",
        _RELAXED,
        ".acquire.cluster",
        False,
        _PROXY,
    ),
    Message("peer's memory, release, wait without a scope", "peer", _RELEASE, "", False),
    Message("own memory, release", "own", _RELEASE, ".acquire.cluster", True),
    Message("own memory, relaxed", "own", _RELAXED, ".acquire.cluster", False),
    Message("own memory, relaxed both", "own", _RELAXED, ".relaxed.cluster", False),
    Message(
        "own memory, release of shared memory alone and relaxed",
        "own",
        _RELAXED,
        ".acquire.cluster",
        True,
        "",
        _SHARED_RELEASE,
    ),
    Message(
        "peer's memory, release of shared memory alone and relaxed",
        "peer",
        _RELAXED,
        ".acquire.cluster",
        False,
        "",
        _SHARED_RELEASE,
    ),
    Message(
        "global memory, release of shared memory alone and relaxed",
        "global",
        _RELAXED,
        ".acquire.cluster",
        False,
        "",
        _SHARED_RELEASE,
    ),
    Message("global memory, release", "global", _RELEASE, ".acquire.cluster", True),
    Message("global memory, relaxed", "global", _RELAXED, ".acquire.cluster", False),
    Message(
        "global memory, release of scope .cta", "global", ".release.cta", ".acquire.cluster", False
    ),
    Message("global memory through L1, release", "cached", _RELEASE, ".acquire.cluster", True),
    Message("global memory through L1, wait without a scope", "cached", _RELEASE, "", False),
    Message(
        "global memory through L1, relaxed wait", "cached", _RELEASE, ".relaxed.cluster", False
    ),
    Message("bulk copy, proxy fence and release", "bulk", ".release.cta", "", True, _PROXY),
    Message("bulk copy, proxy fence and relaxed", "bulk", ".relaxed.cluster", "", False, _PROXY),
    Message(
        "bulk copy, proxy fence, relaxed both",
        "bulk",
        ".relaxed.cluster",
        ".relaxed.cluster",
        False,
        _PROXY,
    ),
    Message("bulk copy, release without a proxy fence", "bulk", ".release.cta", "", False),
    Message(
        "bulk copy, relaxed without a fence", "bulk", ".relaxed.cluster", ".relaxed.cluster", False
    ),
    Message(
        "bulk copy told by the peer, proxy fence and relaxed",
        "relayed",
        _RELAXED,
        "",
        False,
        _PROXY,
    ),
    Message(
        "bulk copy told by the peer, proxy fence, release of shared memory alone",
        "relayed",
        _RELAXED,
        "",
        False,
        _PROXY,
        _SHARED_RELEASE,
    ),
    Message("bulk copy told by the peer, no fence", "relayed", _RELAXED, "", False),
)


def _wait(barrier: str, semantics: str, label: str) -> str:
    return (
        f"{label}:\nmbarrier.try_wait.parity{semantics}.shared::cta.b64 %done, [{barrier}], "
        f"%parity;\n@!%done bra {label};\n"
    )


def _signal(barrier: str, semantics: str, remote: bool, last: str = "") -> str:
    """One arrival of the warp; last: before it, behind the warp's barrier."""
    place = f"mov.u32 %far, {barrier};\n"
    if remote:
        place += "mapa.shared::cluster.u32 %far, %far, %peer;\n"
        return (
            f"bar.warp.sync 0xffffffff;\n{last}{place}"
            f"@%first mbarrier.arrive{semantics}.shared::cluster.b64 _, [%far];\n"
        )
    return (
        f"bar.warp.sync 0xffffffff;\n{last}{place}"
        f"@%first mbarrier.arrive{semantics}.shared::cta.b64 _, [%far];\n"
    )


def _write(message: Message) -> str:
    if message.data in ("global", "cached"):
        return "st.global.u32 [%rd1], %value;\n"
    if message.data == "peer":
        return (
            "mapa.shared::cluster.u32 %far, %place, %peer;\n"
            "st.shared::cluster.u32 [%far], %value;\n"
        )
    return "st.shared.u32 [%place], %value;\n"


def _read(message: Message) -> str:
    """Return the instructions that put what the reader's lanes see into %seen."""
    if message.data == "cached":
        return "ld.global.ca.u32 %seen, [%rd1];\n"
    if message.data == "global":
        return "ld.relaxed.gpu.global.u32 %seen, [%rd1];\n"
    if message.data == "peer":
        return "ld.shared.u32 %seen, [%place];\n"
    if message.data == "own":
        return (
            "mapa.shared::cluster.u32 %far, %place, %peer;\nld.shared::cluster.u32 %seen, [%far];\n"
        )
    return (
        "mov.u32 %r1, data;\n"
        f"@%first cp.async.bulk.global.shared::cta.bulk_group [%scratch], [%r1], {DATA};\n"
        "@%first cp.async.bulk.commit_group;\n@%first cp.async.bulk.wait_group 0;\n"
        "bar.warp.sync 0xffffffff;\nld.relaxed.gpu.global.u32 %seen, [%rd1];\n"
    )


#: Warps that write to global memory meanwhile, so that what is stored waits in queues.
NOISE = 2
BLOCK = 32 * (2 + NOISE)


def message_ptx(message: Message) -> str:
    """The kernel: clusters of two CTAs, p0 counts of stale words (u32, a cluster each), p1 scratch
    (SCRATCH bytes per CTA, then 4 MiB), p2 messages a cluster.

    The writer is warp 0 of the first CTA; the reader warp 0 of the second, or with "bulk" and
    "relayed" warp 1 of the first.
    """
    inside = message.data in ("bulk", "relayed")
    reader = "%rank", "%w", "0" if inside else "1", "1" if inside else "0"
    back = _signal("empty", ".release.cluster", not inside)
    relay = (
        "setp.ne.u32 %p0, %rank, 1;\n@%p0 bra PAST_RELAY;\nsetp.ne.u32 %p0, %w, 0;\n"
        "@%p0 bra PAST_RELAY;\nRELAYING:\n"
        + _wait("full", message.wait, "RELAY_WAIT")
        + _signal("relay", _RELAXED, True)
        + _NEXT.format(label="RELAYING")
        + "PAST_RELAY:\n"
        if message.data == "relayed"
        else ""
    )
    return (
        _HEAD + f".reqntid {BLOCK}, 1, 1\n.reqnctapercluster 2, 1, 1\n{{\n"
        f".shared .align 128 .b8 data[{DATA}];\n.shared .align 8 .b64 full;\n"
        f".shared .align 8 .b64 empty;\n.shared .align 8 .b64 relay;\n{_REGISTERS}{_START}"
        # The writer.
        "setp.ne.u32 %p0, %rank, 0;\n@%p0 bra PAST_WRITER;\nsetp.ne.u32 %p0, %w, 0;\n"
        "@%p0 bra PAST_WRITER;\nWRITING:\n"
        "shl.b32 %value, %i, 5;\nadd.u32 %value, %value, %lane;\n"
        f"{_write(message)}{message.fence}\n"
        f"{_signal('full', message.arrive, message.data != 'bulk', message.last)}"
        f"{_wait('empty', '.acquire.cluster', 'WRITER_WAIT')}{_NEXT.format(label='WRITING')}"
        f"PAST_WRITER:\n{relay}"
        # The reader.
        f"setp.ne.u32 %p0, {reader[0]}, {reader[2]};\n@%p0 bra PAST_READER;\n"
        f"setp.ne.u32 %p0, {reader[1]}, {reader[3]};\n@%p0 bra PAST_READER;\nREADING:\n"
        + _wait("relay" if message.data == "relayed" else "full", message.wait, "READER_WAIT")
        + f"{_read(message)}shl.b32 %value, %i, 5;\nadd.u32 %value, %value, %lane;\n"
        "setp.ne.u32 %bad, %seen, %value;\n@%bad add.u32 %stale, %stale, 1;\n"
        f"{back}{_NEXT.format(label='READING')}"
        "red.global.add.u32 [%out], %stale;\nPAST_READER:\n"
        f"{_NOISE_TEXT}"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nret;\n}\n"
    )


_START = (
    "mov.u32 %t, %tid.x;\nshr.u32 %w, %t, 5;\nand.b32 %lane, %t, 31;\n"
    "setp.eq.u32 %first, %lane, 0;\nsetp.eq.u32 %zero, %t, 0;\nmov.u32 %rank, %cluster_ctarank;\n"
    "xor.b32 %peer, %rank, 1;\nmov.u32 %stale, 0;\nmov.u32 %i, 1;\nmov.u32 %parity, 0;\n"
    "ld.param.u64 %rd0, [p2];\ncvt.u32.u64 %n, %rd0;\n"
    "mov.u32 %r0, %clusterid.x;\nld.param.u64 %out, [p0];\nmul.wide.u32 %rd0, %r0, 4;\n"
    "add.u64 %out, %out, %rd0;\nld.param.u64 %scratch, [p1];\n"
    f"mul.wide.u32 %rd0, %r0, {SCRATCH};\nadd.u64 %scratch, %scratch, %rd0;\n"
    f"mul.wide.u32 %rd0, %lane, {LINE};\nadd.u64 %rd1, %scratch, %rd0;\n"
    f"mov.u32 %place, data;\nmad.lo.u32 %place, %lane, {LINE}, %place;\n"
    "@%zero mbarrier.init.shared::cta.b64 [full], 1;\n"
    "@%zero mbarrier.init.shared::cta.b64 [empty], 1;\n"
    "@%zero mbarrier.init.shared::cta.b64 [relay], 1;\n"
    "st.shared.u32 [%place], 0;\nfence.mbarrier_init.release.cluster;\nfence.proxy.async;\n"
    "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
)
_NEXT = (
    "add.u32 %i, %i, 1;\nxor.b32 %parity, %parity, 1;\nsetp.le.u32 %more, %i, %n;\n"
    "@%more bra {label};\n"
)
#: Warps from 2 on store to lines all over 4 MiB.
_NOISE_TEXT = (
    "setp.lt.u32 %p0, %w, 2;\n@%p0 bra PAST_NOISE;\nld.param.u64 %rd2, [p1];\n"
    f"mov.u32 %r2, %nclusterid.x;\nmul.wide.u32 %rd3, %r2, {SCRATCH};\nadd.u64 %rd2, %rd2, %rd3;\n"
    "mov.u32 %r3, %ctaid.x;\nmad.lo.u32 %r3, %r3, 977, %t;\nSTORING:\n"
    "mad.lo.u32 %r3, %r3, 1664525, 1013904223;\nshr.u32 %r4, %r3, 10;\n"
    "and.b32 %r4, %r4, 0x3FFFFC;\n"
    "cvt.u64.u32 %rd3, %r4;\nadd.u64 %rd3, %rd3, %rd2;\nst.global.u32 [%rd3], %r3;\n"
    "add.u32 %i, %i, 1;\nsetp.le.u32 %more, %i, %n;\n@%more bra STORING;\nPAST_NOISE:\n"
)
NOISE_BYTES = 1 << 22
