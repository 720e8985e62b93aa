"""PTX kernels that time themselves: a loop between two readings of %clock64.

Every warp of every CTA stores its difference; what counts is the slowest. The values that a kernel
times must not be known to ptxas, so zeros come from memory where an address depends on a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENTRY = "timed"
#: Results a launch may store: 64-bit words, one per warp of the first CTAs.
RESULTS = 4096
#: A bulk copy into shared memory; bytes that leave no room for a second CTA on an SM.
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
SHARED = 200 << 10


@dataclass(frozen=True)
class Timed:
    """name; ptx without the module's head; warps per CTA; rounds of the loop; grid and cluster in
    CTAs; dynamic shared memory in bytes; buffer: bytes of global memory it may read and write.
    typical: the median of what the warps stored counts, not the largest."""

    name: str
    ptx: str
    warps: int = 1
    rounds: int = 64
    grid: int = 1
    cluster: int = 1
    shared: int = 0
    buffer: int = 1 << 20
    typical: bool = False


_HEAD = """.extern .shared .align 1024 .b8 pool[];
.visible .entry timed(.param .u64 results, .param .u64 buffer, .param .u32 turn)
ATTRIBUTES{
.shared .align 16 .b8 place[64];
.reg .b64 %out, %buf, %begin, %end, %at, %state, %far, %zero64, %d<4>;
.reg .b32 %thread, %warp, %lane, %i, %pool, %addr, %zero, %parity, %turn, %rank, %cta;
.reg .b32 %bar, %peer, %w<128>;
.reg .f32 %f<64>, %acc, %sum;
.reg .b16 %mask;
.reg .pred %more, %leader, %first, %done, %mine, %accumulate;
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
mov.u32 %cta, %ctaid.x;
setp.eq.u32 %leader, %lane, 0;
setp.eq.u32 %first, %thread, 0;
ld.param.u64 %out, [results];
ld.param.u64 %buf, [buffer];
ld.param.u32 %turn, [turn];
mov.u32 %pool, pool;
mov.u32 %bar, place;
ld.global.u32 %zero, [%buf];
cvt.u64.u32 %zero64, %zero;
mov.u64 %d3, 0;
mov.u32 %parity, 0;
"""
_TAIL = """
MEASURE
SYNC
sub.u64 %end, %end, %begin;
mad.lo.u32 %i, %cta, WARPS, %warp;
setp.ge.u32 %more, %i, RESULTS;
@%more bra STORED;
mul.wide.u32 %at, %i, 8;
add.u64 %at, %out, %at;
@%leader st.global.u64 [%at], %end;
STORED:
FINISH
ret;
}
"""
_CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


def timed(
    name: str, body: str, *, setup: str = "", finish: str = "", keep: str = "", rounds: int = 64,
    summed: bool = False, **shape: Any,
) -> Timed:  # fmt: skip
    """A kernel: `setup`, `rounds` times `body` between the clocks, `keep`, and `finish` at the end.
    summed: the body adds what it has timed to %d3, and that is what counts. shape: the other fields
    of `Timed`."""
    warps, cluster = shape.get("warps", 1), shape.get("cluster", 1)
    attributes = f".reqntid {32 * warps}, 1, 1\n"
    if cluster > 1:
        attributes += f".reqnctapercluster {cluster}, 1, 1\n"
    sync = _CLUSTER_SYNC if cluster > 1 else "bar.sync 0;"
    loop = f"mov.u32 %i, {rounds};\n" + (
        f"LOOP:\n{body}\nsub.u32 %i, %i, 1;\nsetp.ne.u32 %more, %i, 0;\n@%more bra LOOP;\n"
        if rounds > 1
        else f"{body}\n"
    )
    text = f"{_HEAD}{setup}\n{sync}\nmov.u64 %begin, %clock64;\n{loop}{keep}{_TAIL}"
    # `finish` may synchronise, too.
    measure = "add.u64 %end, %begin, %d3;" if summed else "mov.u64 %end, %clock64;"
    for word, value in (
        ("FINISH", finish), ("MEASURE", measure), ("ATTRIBUTES", attributes), ("SYNC", sync),
        ("WARPS", str(warps)), ("RESULTS", str(RESULTS)),
    ):  # fmt: skip
        text = text.replace(word, value)
    return Timed(name, text, rounds=rounds, **shape)


def init_barriers(count: int = 1, number: int = 2) -> str:
    """`number` mbarriers at %bar, 8 bytes apart, each for `count` arrivals."""
    lines = [f"@%first mbarrier.init.shared.b64 [%bar+{8 * i}], {count};" for i in range(number)]
    lines += ["@%first fence.mbarrier_init.release.cluster;", "fence.proxy.async;\nbar.sync 0;\n"]
    return "\n".join(lines)


def wait(label: str, address: str = "%bar") -> str:
    """Spin until the phase of %parity is complete."""
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared.b64 %done, [{address}], %parity;\n"
        f"@!%done bra {label};\n"
    )
