"""The kernels of the sanitizer's tests and the bugs planted in them, by class.

The classes are those of bugs reported against public Blackwell kernels; docs/sanitizer.md names
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_text import run_kernel_text
from sanitizer_kernels import (
    CANCEL,
    COPIES,
    GATE,
    NAMED,
    ONE_WAY,
    OWN_SHARED,
    PAIR,
    REGISTERS,
    RING,
    STAGES,
    TENSOR,
    TURNS,
    WORDS,
    changed,
    without,
)
from sanitizer_kernels_memory import (
    ATOMICS,
    COPY_BARRIER,
    COPY_GROUP,
    COPY_STAGES,
    COPY_THROUGH,
    MAPS,
    MATRICES,
    OUTPUT,
    SCALES,
    SEMAPHORE,
    TAIL,
    TWO_COPIES,
)
from sanitizer_kernels_pair import COUNTER, MULTICAST, PRODUCT, STORES
from sanitizer_kernels_warpgroup import NARROW, WARPGROUP

from sm100_sim.errors import SimulationError
from sm100_sim.state.tensormap import TensorMap, encode

SCHEDULES: list[dict[str, Any]] = [{}, {"schedule": "lazy"}, {"seed": 1}, {"seed": 2}]


@dataclass(frozen=True)
class Kernel:
    """A correct kernel: its text, its launch, and what makes the arrays that it is given."""

    text: str
    launch: dict[str, Any] = field(default_factory=dict)
    arrays: Callable[[], list[np.ndarray]] = list

    def run(self, text: str = "", **options: Any) -> list[str]:
        """Findings of a launch of `text`, by default of the correct kernel."""
        launch = {"sanitize": True, **self.launch, **options}
        return run_kernel_text(text or self.text, self.arrays(), **launch).findings


def words(*counts: int) -> Callable[[], list[np.ndarray]]:
    """Arrays of zeros, uint32, each on a 1024-byte boundary."""
    return lambda: [_aligned(4 * count).view(np.uint32) for count in counts]


def _aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 1024, np.uint8)
    start = -raw.__array_interface__["data"][0] % 1024
    return raw[start : start + size]


def _maps() -> list[np.ndarray]:
    """256 bytes of data, room for a tensor map, and the maps of both halves of the data."""
    data, room, maps = _aligned(256), _aligned(128), _aligned(256)
    for half in range(2):
        address = data.__array_interface__["data"][0] + 128 * half
        tensor_map = TensorMap(address, "u32", (32,), (), (32,), (1,))
        maps[128 * half : 128 * half + 128] = np.frombuffer(encode(tensor_map), np.uint8)
    return [data, room, maps]


#: `SEMAPHORE` with relaxed accesses and fences.
_FENCED = changed(
    changed(SEMAPHORE, "count", "fence.acq_rel.gpu;  red.relaxed.gpu.global.add.u32 [%rd9], 1;"),
    "poll", "ld.relaxed.gpu.global.u32 %r8, [%rd9];  fence.acq_rel.gpu;",
)  # fmt: skip

#: The release of a slot as a relaxed arrival, which says nothing of its reads.
_RELAXED = "mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [smem+8];"
_RELEASED = changed(
    WARPGROUP, "release", f"fence.release.sync_restrict::shared::cta.cluster;  {_RELAXED}"
)  # fmt: skip

_PAIR = {"cluster": (2, 1, 1), "grid": (2, 1, 1)}
KERNELS = {
    "RING": Kernel(RING, {"block": (64, 1, 1)}),
    "STAGES": Kernel(STAGES, {"block": (64, 1, 1)}),
    "GATE": Kernel(GATE, {"block": (128, 1, 1)}),
    "TURNS": Kernel(TURNS, {"block": (64, 1, 1)}),
    "NAMED": Kernel(NAMED, {"block": (64, 1, 1)}),
    "REGISTERS": Kernel(REGISTERS, {"block": (512, 1, 1)}),
    "PAIR": Kernel(PAIR, {"cluster": (2, 1, 1), "grid": (4, 1, 1)}),
    "ONE_WAY": Kernel(ONE_WAY, _PAIR),
    "OWN_SHARED": Kernel(OWN_SHARED, _PAIR),
    "COUNTER": Kernel(COUNTER, _PAIR),
    "MULTICAST": Kernel(MULTICAST, _PAIR, words(32)),
    "STORES": Kernel(STORES, _PAIR),
    "PRODUCT": Kernel(PRODUCT, {"block": (128, 1, 1), **_PAIR}),
    "COPIES": Kernel(COPIES, {}, words(32)),
    "TWO_COPIES": Kernel(TWO_COPIES, {}, words(64)),
    "TAIL": Kernel(TAIL, {}, words(32)),
    "COPY_GROUP": Kernel(COPY_GROUP, {"block": (64, 1, 1)}, words(32)),
    "COPY_BARRIER": Kernel(COPY_BARRIER, {"block": (64, 1, 1)}, words(32)),
    "COPY_STAGES": Kernel(COPY_STAGES, {"block": (64, 1, 1)}, words(96)),
    "COPY_THROUGH": Kernel(COPY_THROUGH, {}, words(64)),
    "MATRICES": Kernel(MATRICES, {"block": (64, 1, 1)}),
    "ATOMICS": Kernel(ATOMICS, {"block": (64, 1, 1)}),
    "TENSOR": Kernel(TENSOR, {"block": (128, 1, 1)}),
    "SCALES": Kernel(SCALES, {"block": (128, 1, 1)}),
    "CANCEL": Kernel(CANCEL, {"block": (64, 1, 1), "grid": (5, 1, 1), "clusters": 1}),
    "WORDS": Kernel(WORDS, {"block": (64, 1, 1), "grid": (5, 1, 1), "clusters": 1}),
    "OUTPUT": Kernel(OUTPUT, {"grid": (2, 1, 1)}, words(128)),
    "SEMAPHORE": Kernel(SEMAPHORE, {"cluster": (2, 1, 1), "grid": (4, 1, 1)}, words(128, 1)),
    "FENCED": Kernel(_FENCED, {"cluster": (2, 1, 1), "grid": (4, 1, 1)}, words(128, 1)),
    "MAPS": Kernel(MAPS, {"block": (64, 1, 1)}, _maps),
    "WARPGROUP": Kernel(WARPGROUP, {"block": (160, 1, 1)}),
    "RELEASED": Kernel(_RELEASED, {"block": (160, 1, 1)}),
}


@dataclass(frozen=True)
class Bug:
    """A bug of class `number`: `text` is the kernel named `kernel` with the bug in it.

    expected: kinds of findings, or names of errors; at least one must be reported.
    """

    number: int
    kernel: str
    what: str
    text: str
    expected: frozenset[str]

    def findings(self) -> list[str]:
        """Findings of the first schedule that reports something expected, else of the last; of a
        launch that ends with an error, those made before it."""
        return self._results()[1]

    def reported(self) -> set[str]:
        """Return the kinds of its findings, and the name of an error that ended the launch."""
        error, found = self._results()
        return {finding.kind for finding in found} | ({error} if error else set())

    def _results(self) -> tuple[str, list[str]]:
        for options in SCHEDULES:
            try:
                error, found = "", KERNELS[self.kernel].run(self.text, **options)
            except SimulationError as raised:
                error, found = type(raised).__name__, list(raised.findings)
            if error in self.expected or {f.kind for f in found} & self.expected:
                break
        return error, found


def _bug(number: int, kernel: str, what: str, text: str, *expected: str) -> Bug:
    return Bug(number, kernel, what, text, frozenset(expected))


def _omit(number: int, kernel: str, tag: str, *expected: str) -> Bug:
    """The kernel without a line."""
    text = without(KERNELS[kernel].text, tag)
    return _bug(number, kernel, f"without {tag}", text, *expected)


def _swap(number: int, kernel: str, what: str, tag: str, line: str, *expected: str) -> Bug:
    """The kernel with another line in place of one."""
    return _bug(number, kernel, what, changed(KERNELS[kernel].text, tag, line), *expected)


_ALLOC = "@!%p2 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [smem+16], 64;"
_FENCE = "fence.proxy.async.shared::cta;"
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_COMMIT = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
_COMMIT_GROUP = "wgmma.commit_group.sync.aligned;"
_RELEASE = "  mbarrier.arrive.shared.b64 _, [smem+8];"
_REMOTE_ARRIVE = "mbarrier.arrive.release.{}.shared::cluster.b64 _, [%r12];"

BUGS = [
    # P announced to the MMA before it is in tensor memory.
    _omit(1, "TENSOR", "wait st", "store-in-flight"),
    _omit(1, "TENSOR", "store", "uninitialised-read"),
    # Columns given back while a load may be in flight.
    _bug(2, "TENSOR", "loads not waited for", without(TENSOR, "wait ld", "early use"),
         "load-in-flight"),
    # Generic writes that the async proxy reads; the slot of a launch-control response.
    _omit(3, "TENSOR", "proxy", "missing-proxy-fence"),
    _omit(3, "COPIES", "proxy", "missing-proxy-fence"),
    _omit(3, "CANCEL", "proxy", "missing-proxy-fence"),
    _omit(3, "PRODUCT", "proxy", "missing-proxy-fence"),
    _omit(3, "SCALES", "proxy", "missing-proxy-fence"),
    _omit(3, "COPY_STAGES", "proxy", "missing-proxy-fence"),
    _omit(3, "COPY_STAGES", "second proxy", "missing-proxy-fence"),
    _omit(3, "COPY_THROUGH", "proxy", "missing-proxy-fence"),
    _bug(3, "COPY_THROUGH", "fence before the copies are complete",
         changed(without(COPY_THROUGH, "proxy"), "between", _FENCE), "missing-proxy-fence"),
    # Freed before the other warps have finished.
    _omit(4, "TENSOR", "end", "freed-in-use", "TmemError"),
    _omit(4, "PRODUCT", "end", "freed-in-use", "TmemError"),
    # Another slot than the one that was filled, or that is free.
    _swap(5, "RING", "reads beside the slot", "read", "ld.shared.b32 %r7, [%r5+192];",
          "uninitialised-read"),
    _swap(5, "RING", "writes to the barrier", "fill", "st.shared.b32 [smem], %r4;",
          "barrier-bytes"),
    _swap(5, "STAGES", "fills the first slot only", "slot", "mov.u32 %r11, 0;", "race"),
    # Roles that disagree on how often they arrive, or on how many bytes come.
    _swap(6, "RING", "slot not given back", "release", "bar.warp.sync -1;", "Hang"),
    _swap(6, "GATE", "one role makes a trip more", "trips",
          "setp.eq.u32 %p4, %r1, 0;  selp.u32 %r8, 4, 3, %p4;", "Hang"),
    _swap(6, "GATE", "one role arrives once more at its end", "leave",
          "setp.eq.u32 %p4, %r1, 0;  @%p4 mbarrier.arrive.shared.b64 _, [smem];  bra END;",
          "arrivals-unbalanced"),
    _swap(6, "GATE", "one role makes a trip less", "trips",
          "setp.eq.u32 %p4, %r1, 0;  selp.u32 %r8, 2, 3, %p4;", "Hang"),
    _swap(6, "GATE", "one warp arrives for another", "arrive",
          "setp.eq.u32 %p4, %r4, 1;  setp.eq.and.u32 %p5, %r1, 1, %p4;"
          "  setp.eq.and.u32 %p6, %r1, 0, %p4;  @!%p5 mbarrier.arrive.shared.b64 _, [smem];"
          "  @%p6 mbarrier.arrive.shared.b64 _, [smem];", "arrivals-unbalanced"),
    _swap(6, "TURNS", "one warp arrives for both", "who", "setp.lt.u32 %p1, %r0, 2;",
          "arrivals-unbalanced", "phase-skipped"),
    _swap(6, "TWO_COPIES", "bytes that never come", "left",
          "@!%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 64;"
          "  @!%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 32;",
          "transactions-at-exit"),
    _swap(6, "TWO_COPIES", "more bytes than expected", "expect",
          "mbarrier.arrive.expect_tx.shared.b64 _, [smem], 128;", "transactions-at-exit"),
    _swap(6, "TWO_COPIES", "fewer bytes than expected", "expect",
          "mbarrier.arrive.expect_tx.shared.b64 _, [smem], 384;", "Hang"),
    # A producer that leads by more than a phase; a wait that takes a later phase for its own.
    _omit(7, "RING", "empty", "phase-not-observed"),
    # The response requested again before everybody has read it, or read before it is there.
    _omit(8, "CANCEL", "meet", "race", "phase-skipped"),
    _omit(8, "CANCEL", "wait", "uninitialised-read"),
    _swap(9, "CANCEL", "asks on after a failure", "last",
          "add.u32 %r9, %r9, 1;  setp.lt.u32 %p2, %r9, 9;", "ClcError"),
    _swap(9, "WORDS", "asks on after a failure", "last",
          "add.u32 %r9, %r9, 1;  setp.lt.u32 %p2, %r9, 9;", "cancel-after-failure"),
    # Deadlocks of schedulers, of setmaxnreg; named barriers that do not exist.
    _swap(10, "RING", "work never announced", "publish", "bar.warp.sync -1;", "Hang"),
    _omit(10, "REGISTERS", "give", "Hang"),
    _swap(10, "NAMED", "barrier 16", "arrive", "bar.arrive 16, 64;", "BarrierError"),
    # A CTA exits while its peer may still arrive at its barrier.
    _omit(11, "ONE_WAY", "end", "exit-too-early"),
    # Masks that name a CTA outside the cluster.
    _swap(12, "MULTICAST", "load", "copy",
          f"{_BULK}.multicast::cluster [smem+1024], [%rd8], 128, [smem], 6;", "SimulationError"),
    _swap(12, "PRODUCT", "commit", "commit", f"{_COMMIT} [smem], 7;", "SimulationError"),
    # .cta scope where the barrier is in another CTA; one CTA's operands not waited for.
    _swap(13, "PAIR", ".cta scope", "arrive", _REMOTE_ARRIVE.format("cta"), "race"),
    _bug(13, "PRODUCT", "waits for its own operands only",
         changed(changed(PRODUCT, "target", "mbarrier.init.shared.b64 [smem+8], 128;"), "ready",
                 "mbarrier.arrive.shared.b64 _, [smem+8];"),
         "race", "missing-proxy-fence", "store-in-flight"),
    _omit(13, "OWN_SHARED", "release", "race"),
    _swap(13, "OWN_SHARED", "acquires where it should release", "release",
          "fence.acquire.sync_restrict::shared::cluster.cluster;", "race"),
    _swap(13, "OWN_SHARED", "fences the proxies alone", "release", "fence.proxy.async.shared::cta;",
          "race"),
    _swap(13, "SEMAPHORE", "counts without release", "count",
          "red.relaxed.gpu.global.add.u32 [%rd9], 1;", "race"),
    _swap(13, "SEMAPHORE", "polls without acquire", "poll",
          "ld.relaxed.gpu.global.u32 %r8, [%rd9];", "race"),
    # Copies whose completion is not waited for, or in no group.
    _omit(14, "COPIES", "wait", "copy-in-flight"),
    _omit(14, "COPIES", "commit", "bulk-store-in-flight"),
    _omit(14, "COPIES", "drain", "bulk-store-in-flight"),
    _omit(14, "COPY_GROUP", "wait", "copy-in-flight"),
    _omit(14, "COPY_GROUP", "commit", "copy-in-flight"),
    _omit(14, "STORES", "wait", "copy-in-flight", "uninitialised-read"),
    _omit(14, "STORES", "wait sum", "copy-in-flight", "race"),
    _swap(14, "COPY_BARRIER", "arrives before its copies are complete", "track",
          "mbarrier.arrive.shared.b64 _, [smem];", "copy-in-flight"),
    # Missing waits at hand-offs through shared memory.
    _omit(15, "RING", "full", "race", "uninitialised-read"),
    _omit(15, "COPY_GROUP", "meet", "copy-in-flight", "uninitialised-read"),
    _omit(15, "COPY_BARRIER", "wait", "copy-in-flight", "uninitialised-read"),
    _omit(15, "MATRICES", "meet", "race", "uninitialised-read"),
    _omit(15, "ATOMICS", "clear", "race"),
    _omit(15, "ATOMICS", "meet", "race"),
    _omit(15, "STORES", "read", "race", "copy-in-flight"),
    # Named barriers and aligned instructions.
    _swap(16, "NAMED", "by half a warp", "sync",
          "setp.gt.u32 %p4, %r2, 15;  @%p4 bra HALF;  bar.sync 1, 64;  HALF:", "DivergenceError"),
    _swap(16, "NAMED", "another thread count", "arrive", "bar.arrive 1, 96;", "BarrierError",
          "Hang"),
    _swap(16, "NAMED", "another barrier", "arrive", "bar.arrive 3, 64;", "Hang"),
    _swap(16, "NAMED", "no barrier", "sync", "bar.warp.sync -1;", "race", "BarrierError"),
    # Tensor memory of a pair before the peer is known to be there.
    _bug(17, "PRODUCT", "allocated before the cluster barrier",
         changed(without(PRODUCT, "alloc"), "early", _ALLOC), "peer-not-met"),
    _omit(17, "PRODUCT", "free", "TmemError"),
    # Counters of a pair that count one CTA; elements that two CTAs write.
    _swap(18, "COUNTER", "target of one CTA", "target", "mbarrier.init.shared.b64 [smem], 32;",
          "race", "phase-not-observed"),
    _swap(18, "PRODUCT", "target of one CTA", "target", "mbarrier.init.shared.b64 [smem+8], 128;",
          "race", "missing-proxy-fence", "store-in-flight", "phase-not-observed"),
    _swap(18, "SEMAPHORE", "target of one pair", "target", "setp.lt.u32 %p2, %r8, 2;", "race"),
    _swap(18, "SEMAPHORE", "overwrites what it has not read", "look", "mov.u32 %r10, 0;",
          "two-writers"),
    _swap(18, "OUTPUT", "stores to one row", "row", "mov.u32 %r6, 0;", "two-writers"),
    _swap(18, "OUTPUT", "bulk stores to one row", "tile", "mov.u32 %r8, 0;", "two-writers"),
    # A tensor map changed while a copy may read it, or used without the fences of its proxy.
    _omit(19, "MAPS", "wait", "tensormap-in-flight"),
    _omit(19, "MAPS", "release", "tensormap-not-fenced"),
    _omit(19, "MAPS", "acquire", "tensormap-not-fenced"),
    _omit(19, "MAPS", "meet", "tensormap-not-fenced"),
    # The tail of a tile that nothing has written.
    _omit(20, "TAIL", "zeros", "uninitialised-read"),
    # Results of the tensor core before they are known to be complete.
    _omit(21, "TENSOR", "wait d", "mma-in-flight"),
    _omit(21, "PRODUCT", "wait d", "mma-in-flight"),
    _omit(21, "SCALES", "wait", "mma-in-flight"),
    _omit(21, "TENSOR", "wait a", "store-in-flight", "race", "load-in-flight"),
    # A warp that leaves its group; barriers not initialised once, or not visibly.
    _swap(22, "NAMED", "one warp returns early", "return",
          "mov.u32 %r8, 1;  setp.eq.u32 %p4, %r1, 1;  @%p4 bra END;", "Hang"),
    _omit(22, "PAIR", "init fence", "barrier-not-visible"),
    _bug(22, "RING", "every thread initialises", RING.replace("@%p0 bra READY;", ""), "machine",
         "BarrierError"),
    # Products of a warpgroup: operands, hand-overs, a warp that leaves.
    _omit(3, "WARPGROUP", "proxy", "missing-proxy-fence"),
    _swap(13, "WARPGROUP", "slot released without a release", "release", _RELAXED, "mma-in-flight"),
    _omit(15, "WARPGROUP", "full", "race", "uninitialised-read"),
    _omit(15, "WARPGROUP", "empty", "mma-in-flight"),
    _omit(21, "WARPGROUP", "wait", "mma-in-flight"),
    _omit(21, "WARPGROUP", "commit", "mma-in-flight"),
    _swap(21, "WARPGROUP", "waits for the group before", "wait", "wgmma.wait_group.sync.aligned 1;",
          "mma-in-flight"),
    _bug(21, "WARPGROUP", "slot released before the wait",
         changed(without(WARPGROUP, "release"), "commit", _COMMIT_GROUP + _RELEASE),
         "mma-in-flight"),
    _swap(21, "WARPGROUP", "a consumer overwrites B", "commit",
          f"{_COMMIT_GROUP}  st.shared.b32 [%r3+3072], %r4;", "mma-in-flight"),
    _swap(22, "WARPGROUP", "one warp returns early", "leave",
          "setp.eq.u32 %p4, %r1, 2;  @%p4 bra END;  setp.ne.u32 %p4, 1, 0;", "SimulationError"),
    # Registers of a wgmma: not fenced, or touched while it is at work.
    _omit(23, "WARPGROUP", "fence", "registers-not-fenced"),
    _omit(23, "WARPGROUP", "wait", "registers-in-flight"),
    _omit(23, "WARPGROUP", "commit", "registers-in-flight"),
    _swap(23, "WARPGROUP", "waits for the group before", "wait", "wgmma.wait_group.sync.aligned 1;",
          "registers-in-flight"),
    _swap(23, "WARPGROUP", "accumulator written", "commit", f"{_COMMIT_GROUP}  mov.u32 %r21, 0;",
          "registers-in-flight"),
    _swap(23, "WARPGROUP", "accumulator read", "commit",
          f"{_COMMIT_GROUP}  add.f32 %r28, %r20, %r23;", "registers-in-flight"),
    _swap(23, "WARPGROUP", "A overwritten", "commit", f"{_COMMIT_GROUP}  mov.u32 %r26, 0;",
          "registers-in-flight"),
    _swap(23, "WARPGROUP", "two shapes on one accumulator", "registers", NARROW,
          "registers-in-flight"),
    _swap(23, "WARPGROUP", "A written behind the fence", "fence",
          "wgmma.fence.sync.aligned;  mov.u32 %r25, 0;", "registers-not-fenced"),
]  # fmt: skip
