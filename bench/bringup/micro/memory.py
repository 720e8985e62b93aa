"""Microbenchmarks of TMA, L2 and HBM: latency of one SM, rates of all."""

from __future__ import annotations

from typing import Any

from .table import Micro
from .timed import COPY, SHARED, Timed, init_barriers, timed, wait

#: Larger than any L2; a launch begins where the one before has not been.
_FAR = 1 << 30
_COLD_STRIDE = 1 << 20
#: Clocks of a load's round beside the load, its bytes and the wake-up: arrive, issue, test; and of
#: 1 KiB at 64 bytes per clock.
_AROUND_LOAD, _KIB = 70.0, 16.0


def _waited(name: str, copies: str, nbytes: int, **more: Any) -> Timed:
    """Return copies of so many bytes in all, and one wait for them."""
    body = f"""@%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {nbytes};
{copies}{wait("WAITING")}xor.b32 %parity, %parity, 1;"""
    setup = init_barriers() + more.pop("setup", "")
    return timed(name, body, setup=setup, shared=SHARED, **more)


def _load(nbytes: int) -> Timed:
    copy = f"@%first {COPY} [%pool], [%buf], {nbytes}, [%bar];\n"
    return _waited(f"a bulk load of {nbytes} bytes from L2", copy, nbytes)


def _cold_load() -> Timed:
    """Return loads of 1 KiB that no launch before has touched, 32 times."""
    copy = f"""@%first {COPY} [%pool], [%far], 1024, [%bar];
add.u64 %far, %far, {_COLD_STRIDE};
"""
    # A turn's 32 blocks lie 1 MiB apart, those of the next one 4 KiB further.
    setup = "mul.wide.u32 %at, %turn, 4096;\nadd.u64 %far, %buf, %at;\n"
    name = "a bulk load of 1024 bytes from HBM"
    return _waited(name, copy, 1024, setup=setup, rounds=32, buffer=_FAR)


def _many_loads(count: int) -> Timed:
    """Return `count` copies of 128 bytes, one after the other, and one wait."""
    copies = "".join(
        f"@%first {COPY} [%pool+{128 * i}], [%buf+{128 * i}], 128, [%bar];\n" for i in range(count)
    )
    return _waited(f"{count} bulk loads of 128 bytes", copies, 128 * count, rounds=8)


def _store(nbytes: int, reads_only: bool = False) -> Timed:
    read = ".read" if reads_only else ""
    body = f"""@!%first bra PAST;
cp.async.bulk.global.shared::cta.bulk_group [%buf+4096], [%pool], {nbytes};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{read} 0;
PAST:"""
    name = f"a bulk store of {nbytes} bytes and wait_group{read}"
    return timed(name, body, setup=init_barriers(), shared=SHARED)


def _chase(cold: bool) -> Timed:
    """Return dependent loads of global memory past L1: 256 bytes apart in 512 KiB, or 1 MiB
    apart."""
    body = (
        "ld.global.cg.u32 %w0, [%far];\ncvt.u64.u32 %at, %w0;\nadd.u64 %far, %far, %at;\n"
        f"add.u64 %far, %far, {_COLD_STRIDE if cold else 256};\n"
    ) * 4
    setup = "add.u64 %far, %buf, 8192;\n"
    if cold:
        setup = "mul.wide.u32 %at, %turn, 4096;\nadd.u64 %far, %buf, %at;\n"
        setup += "add.u64 %far, %far, 8192;\n"
    keep = "setp.eq.u64 %done, %far, 1;\n@%done st.global.u64 [%buf], %far;\n"
    shape: dict[str, Any] = (
        {"rounds": 8, "buffer": _FAR} if cold else {"rounds": 64, "buffer": 1 << 20}
    )
    name = f"4 dependent loads from {'HBM' if cold else 'L2'}"
    return timed(name, body, setup=setup, keep=keep, **shape)


def table() -> tuple[Micro, ...]:
    return (
        Micro("load from L2", "clocks", (_chase(False),), lambda a: a / 4, "",
              "dependent ld.global.cg of one lane, hits in L2"),
        Micro("load from HBM", "clocks", (_chase(True),), lambda a: a / 4, "",
              "the same, misses; address translation included"),
        Micro("TMA issue", "clocks", (_many_loads(32), _many_loads(64)),
              lambda a, b: (b - a) / 32, "tma_issue", "each further bulk copy of 128 bytes"),
        Micro("TMA load from L2", "clocks", (_load(1024), _load(8192)),
              lambda a, b: a - (b - a) / 7, "tma_load_l2",
              "1 KiB: arrive, copy and wait, without what another KiB adds",
              around=_AROUND_LOAD, wakes=1),
        Micro("TMA load from HBM", "clocks", (_cold_load(),), lambda a: a, "tma_load_hbm",
              "1 KiB, misses, one SM alone", around=_AROUND_LOAD + _KIB, wakes=1),
        Micro("TMA rate of an SM", "bytes a clock and SM", (_load(8192), _load(32768)),
              lambda a, b: 24576 / (b - a), "l2_bytes_per_clock_sm",
              "what 32 KiB take longer than 8 KiB, one SM alone"),
        Micro("TMA store", "clocks", (_store(1024), _store(8192)), lambda a, b: a - (b - a) / 7,
              "tma_store",
              "1 KiB, until wait_group has passed, without what another KiB adds: in SASS the wait "
              "of wait_group.read", around=9.0),
        Micro("TMA store, read", "clocks", (_store(1024, True),), lambda a: a, "",
              "1 KiB, until wait_group.read has passed"),
    )  # fmt: skip
