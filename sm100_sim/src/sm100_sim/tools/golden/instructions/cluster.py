"""Golden cases of mbarriers, distributed shared memory and multicast (PTX ISA 9.7.13.15, 9.7.9.25).

Barriers are seen through the answers of test_wait and try_wait and through pending counts; their
64-bit states are opaque and not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import HEADER, Case
from ..ptx_text import declare
from .tma import (
    REGISTERS,
    THREADS,
    Tensor,
    coordinates_text,
    dump,
    fill,
    shared,
    start_barrier,
    wait,
)

SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
_SIZE = 2048


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _sequences()
    yield from _crowds()
    yield from _distributed()
    yield from _multicast()


# One thread works through a list of operations. After each one: bits 0-3 of a word are the answers
# of test_wait.parity 0 and 1 and try_wait.parity 0 and 1, bit 4 is test_wait of the latest state,
# bits 8 and up are the pending count of the state that the operation returned.

_SEQUENCES: dict[str, list[str]] = {
    "one arrival": ["init 1", *["arrive"] * 5],
    "three arrivals": ["init 3", *["arrive"] * 8],
    "counted arrivals": ["init 5", "arrive 2", "arrive 3", "arrive 1", "arrive 4", "arrive 5"],
    "bytes after arrivals": ["init 2", "expect_tx 64", "arrive", "arrive", "complete_tx 32",
                             "complete_tx 32", "arrive", "arrive"],
    "arrivals after bytes": ["init 2", "expect_tx 64", "complete_tx 64", "arrive", "arrive",
                             "expect_tx 16", "arrive", "complete_tx 16", "arrive"],
    "arrive expecting bytes": ["init 1", "arrive.expect_tx 128", "complete_tx 64", "complete_tx 64",
                               "arrive.expect_tx 16", "complete_tx 16", "arrive.expect_tx 0"],
    "bytes before they are expected": ["init 1", "complete_tx 48", "arrive.expect_tx 48",
                                       "complete_tx 16", "expect_tx 16", "arrive"],
    "dropping": ["init 3", "arrive_drop", "arrive", "arrive", "arrive", "arrive", "arrive_drop",
                 "arrive", "arrive", "arrive"],
    "dropping with bytes": ["init 2", "arrive_drop.expect_tx 32", "arrive", "complete_tx 32",
                            "arrive", "arrive"],
    "dropping several": ["init 6", "arrive_drop 3", "arrive 3", "arrive 2", "arrive"],
    "no completion": ["init 3", "arrive.noComplete 2", "arrive", "arrive.noComplete 1",
                      "arrive.noComplete 1", "arrive"],
    "most arrivals": ["init 1048575", "arrive 1048574", "arrive", "arrive 1048575"],
    "most bytes": ["init 1", "expect_tx 1048575", "arrive", "complete_tx 1048575", "arrive"],
    "initialised again": ["init 2", "arrive", "inval", "init 1", "arrive", "arrive", "inval",
                          "init 2", "arrive"],
}  # fmt: skip


def _operation(text: str) -> str:
    name, _, count = text.partition(" ")
    comma = f", {count}" if count else ""
    if name in ("init", "inval"):
        return f"mbarrier.{name}.shared::cta.b64 [bar]{comma};\nmov.u32 %r3, 0;"
    if name in ("expect_tx", "complete_tx"):
        return f"mbarrier.{name}.relaxed.cta.shared::cta.b64 [bar]{comma};\nmov.u32 %r3, 0;"
    return (
        f"mbarrier.{name}.shared::cta.b64 %state, [bar]{comma};\n"
        "mbarrier.pending_count.b64 %r3, %state;\nshl.b32 %r3, %r3, 8;\nmov.u32 %r4, 1;"
    )


def _answers(place: int) -> str:
    """Ask the barrier and store the word of one operation."""
    lines = []
    for bit in range(4):
        name, parity, hint = ("test_wait", "try_wait")[bit // 2], bit % 2, ("", ", 20")[bit // 2]
        lines.append(
            f"mbarrier.{name}.parity.shared::cta.b64 %done, [bar], {parity}{hint};\n"
            f"selp.u32 %r5, {1 << bit}, 0, %done;\nor.b32 %r3, %r3, %r5;"
        )
    lines.append(
        f"setp.ne.u32 %more, %r4, 0;\n@!%more bra PAST{place};\n"
        "mbarrier.test_wait.shared::cta.b64 %done, [bar], %state;\n"
        f"selp.u32 %r5, 16, 0, %done;\nor.b32 %r3, %r3, %r5;\nPAST{place}:"
    )
    lines.append(f"st.global.u32 [%rd1+{4 * place}], %r3;")
    return "\n".join(lines)


def _sequences() -> Iterator[Case]:
    for name, operations in _SEQUENCES.items():
        steps, place = [], 0
        for text in operations:
            # A state belongs to one life of the barrier: %r4 says whether %state is of this one.
            steps.append(_operation(text) + ("\nmov.u32 %r4, 0;" if text[:4] == "init" else ""))
            if text != "inval":
                steps.append(_answers(place))
                place += 1
        body = "\n".join(steps)
        ptx = (
            f"{HEADER}{declare(0, 1)}\n{{\n{shared(16)}{REGISTERS}ld.param.u64 %rd1, [p0];\n"
            f"mov.b64 %state, 0;\n{body}\nret;\n}}\n"
        )
        yield Case(
            f"cluster/mbarrier {name}", "cluster", ptx, (), (np.zeros(place, np.uint32),), block=1
        )


def _crowds() -> Iterator[Case]:
    """Four warps meet at one barrier three times; each thread reads what the next one wrote."""
    rounds = []
    for turn in range(3):
        rounds.append(
            f"mad.lo.u32 %r11, %r10, 7, {turn * 1000};\nst.shared.u32 [%r12], %r11;\n"
            "mbarrier.arrive.shared::cta.b64 %state, [bar];\n"
            f"{wait(turn & 1, f'ROUND{turn}')}ld.shared.u32 %r14, [%r13];\n"
            f"st.global.u32 [%rd1+{512 * turn}], %r14;\nbar.sync 0;\n"
        )
    ptx = (
        f"{HEADER}{declare(0, 1)}\n{{\n{shared(512)}{REGISTERS}{start_barrier(THREADS)}"
        "mov.u32 %r2, tile;\nshl.b32 %r3, %r10, 2;\nadd.u32 %r12, %r2, %r3;\n"
        f"add.u32 %r4, %r3, 4;\nand.b32 %r4, %r4, {4 * THREADS - 1};\nadd.u32 %r13, %r2, %r4;\n"
        "ld.param.u64 %rd1, [p0];\ncvt.u64.u32 %rd2, %r3;\nadd.u64 %rd1, %rd1, %rd2;\n"
        f"{''.join(rounds)}ret;\n}}\n"
    )
    yield Case("cluster/mbarrier crowd", "cluster", ptx, (), (np.zeros(3 * THREADS, np.uint32),))


# Distributed shared memory, clusters of 2, 4 and 8 CTAs, two clusters.


def entry(inputs: int, outputs: int, cluster: int, maps: int = 0) -> str:
    """Head of a module whose kernel runs in clusters of so many CTAs."""
    return f"{HEADER}{declare(inputs, outputs, maps)}\n.reqnctapercluster {cluster}, 1, 1\n{{\n"


def _exchange_ptx(cluster: int) -> str:
    """Every CTA writes word `rank` of each thread's slot in all CTAs, then reads its neighbour's.

    p0: shared memory of each CTA; p1: per thread the neighbour's words 0 and 1, read in two ways,
    and its rank; p2: special registers.
    """
    size = 4 * cluster * THREADS
    writes = "".join(
        f"mapa.shared::cluster.u32 %r6, %r5, {rank};\nadd.u32 %r7, %r3, {rank};\n"
        f"st.shared::cluster.u32 [%r6], %r7;\n"
        for rank in range(cluster)
    )
    slot = f"mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\nmad.lo.u32 %r4, %r1, {4 * cluster}, %r2;\n"
    return (
        f"{entry(0, 3, cluster)}{shared(size)}{REGISTERS}{fill(size)}"
        f"{slot}mov.u32 %r3, %cluster_ctarank;\nshl.b32 %r5, %r3, 2;\nadd.u32 %r5, %r5, %r4;\n"
        "shl.b32 %r3, %r3, 20;\nmad.lo.u32 %r3, %r1, 256, %r3;\n"
        f"{SYNC}{writes}{SYNC}{dump(size, 'p0')}{slot}"
        f"mov.u32 %r3, %cluster_ctarank;\nadd.u32 %r3, %r3, 1;\nrem.u32 %r3, %r3, {cluster};\n"
        "mapa.shared::cluster.u32 %r6, %r4, %r3;\nld.shared::cluster.v2.u32 {%r7, %r8}, [%r6];\n"
        "cvt.u64.u32 %rd4, %r4;\ncvta.shared.u64 %rd4, %rd4;\nmapa.u64 %rd5, %rd4, %r3;\n"
        "ld.u32 %r9, [%rd5+4];\ngetctarank.shared::cluster.u32 %r10, %r6;\n"
        "mov.u32 %r12, %ctaid.x;\nmad.lo.u32 %r12, %r12, 128, %r1;\nmul.wide.u32 %rd6, %r12, 16;\n"
        "ld.param.u64 %rd7, [p1];\nadd.u64 %rd7, %rd7, %rd6;\n"
        "st.global.v4.u32 [%rd7], {%r7, %r8, %r9, %r10};\n"
        "ld.param.u64 %rd7, [p2];\nadd.u64 %rd7, %rd7, %rd6;\n"
        "mov.u32 %r7, %cluster_ctarank;\nmov.u32 %r8, %cluster_nctarank;\n"
        "mov.u32 %r9, %clusterid.x;\nmov.u32 %r10, %cluster_ctaid.x;\n"
        f"st.global.v4.u32 [%rd7], {{%r7, %r8, %r9, %r10}};\n{SYNC}ret;\n}}\n"
    )


def _arrival_ptx(cluster: int) -> str:
    """Thread r of each CTA writes to CTA r and arrives at its barrier; all wait for their own."""
    return (
        f"{entry(0, 1, cluster)}{shared(512)}{REGISTERS}{fill(512)}{start_barrier(cluster)}"
        "fence.mbarrier_init.release.cluster;\n"
        f"{SYNC}mov.u32 %r1, %tid.x;\nsetp.ge.u32 %more, %r1, {cluster};\n@%more bra WAITING;\n"
        "mov.u32 %r2, tile;\nmov.u32 %r3, %cluster_ctarank;\nshl.b32 %r4, %r3, 2;\n"
        "add.u32 %r4, %r4, %r2;\nmapa.shared::cluster.u32 %r5, %r4, %r1;\n"
        "mad.lo.u32 %r6, %r3, 100, %r1;\nst.shared::cluster.u32 [%r5], %r6;\nmov.u32 %r7, bar;\n"
        "mapa.shared::cluster.u32 %r8, %r7, %r1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n"
        + wait(0, "WAITING").replace("try_wait.parity.", "try_wait.parity.acquire.cluster.")
        + f"{dump(512, 'p0')}{SYNC}ret;\n}}\n"
    )


def _atomic_ptx(cluster: int) -> str:
    """Every thread of every CTA adds to, and takes the maximum of, words of CTA 0."""
    return (
        f"{entry(0, 1, cluster)}{shared(512)}{REGISTERS}{fill(512)}"
        f"{SYNC}mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\nand.b32 %r3, %r1, 15;\n"
        "shl.b32 %r3, %r3, 3;\nadd.u32 %r3, %r3, %r2;\nmapa.shared::cluster.u32 %r4, %r3, 0;\n"
        "mov.u32 %r5, %ctaid.x;\nmad.lo.u32 %r5, %r5, 128, %r1;\n"
        "red.relaxed.cluster.shared::cluster.add.u32 [%r4], %r5;\n"
        f"red.relaxed.cluster.shared::cluster.max.s32 [%r4+4], %r5;\n{SYNC}{dump(512, 'p0')}"
        f"{SYNC}ret;\n}}\n"
    )


def _push_ptx(cluster: int) -> str:
    """cp.async.bulk from each CTA's shared memory to the next CTA's, with its barrier."""
    return (
        f"{entry(1, 1, cluster)}{shared(_SIZE)}{REGISTERS}{fill(_SIZE)}bar.sync 0;\n"
        "mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\nshl.b32 %r3, %r1, 2;\nadd.u32 %r4, %r2, %r3;\n"
        "mov.u32 %r5, %ctaid.x;\nmad.lo.u32 %r5, %r5, 128, %r1;\nmul.wide.u32 %rd1, %r5, 4;\n"
        "ld.param.u64 %rd2, [p0];\nadd.u64 %rd1, %rd1, %rd2;\nld.global.u32 %r6, [%rd1];\n"
        f"st.shared.u32 [%r4], %r6;\n{start_barrier()}fence.mbarrier_init.release.cluster;\n{SYNC}"
        "@!%first bra WAITING;\nmbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], 496;\n"
        f"mov.u32 %r7, %cluster_ctarank;\nadd.u32 %r7, %r7, 1;\nrem.u32 %r7, %r7, {cluster};\n"
        "add.u32 %r8, %r2, 1040;\nmapa.shared::cluster.u32 %r8, %r8, %r7;\nmov.u32 %r9, bar;\n"
        "mapa.shared::cluster.u32 %r9, %r9, %r7;\nadd.u32 %r11, %r2, 16;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[%r8], [%r11], 496, [%r9];\n{wait(0, 'WAITING')}{dump(_SIZE, 'p1')}{SYNC}ret;\n}}\n"
    )


def _distributed() -> Iterator[Case]:
    for cluster in (2, 4, 8):
        count = 2 * cluster
        words = np.zeros((count, THREADS, 4), np.uint32)
        yield Case(
            f"cluster/exchange {cluster}",
            "cluster",
            _exchange_ptx(cluster),
            (),
            (np.zeros((count, cluster * THREADS), np.uint32), words, words),
            (),
            count,
            THREADS,
            cluster,
        )
        dumps = np.zeros((count, 128), np.uint32)
        for name, text in (("arrive", _arrival_ptx(cluster)), ("red", _atomic_ptx(cluster))):
            yield Case(
                f"cluster/{name} {cluster}",
                "cluster",
                text,
                (),
                (dumps,),
                (),
                count,
                THREADS,
                cluster,
            )
        yield Case(
            f"cluster/bulk push {cluster}",
            "cluster",
            _push_ptx(cluster),
            (make.scrambled(600, count * THREADS).astype(np.uint32),),
            (np.zeros((count, _SIZE // 4), np.uint32),),
            (),
            count,
            THREADS,
            cluster,
        )
    own = (
        f"{entry(0, 1, 4)}{shared(64)}{REGISTERS}mov.u32 %r1, tile;\nshr.u32 %r1, %r1, 24;\n"
        "mov.u32 %r2, tile;\nmov.u32 %r7, %cluster_ctarank;\n"
        "mapa.shared::cluster.u32 %r3, %r2, %r7;\nshr.u32 %r3, %r3, 24;\n"
        "mapa.shared::cluster.u32 %r4, %r2, 3;\nshr.u32 %r4, %r4, 24;\nand.b32 %r5, %r2, 1023;\n"
        "mov.u32 %r6, %ctaid.x;\nmul.wide.u32 %rd1, %r6, 16;\nld.param.u64 %rd2, [p0];\n"
        f"add.u64 %rd1, %rd1, %rd2;\nst.global.v4.u32 [%rd1], {{%r1, %r3, %r4, %r5}};\n{SYNC}"
        "ret;\n}\n"
    )
    yield Case(
        "cluster/addresses", "cluster", own, (), (np.zeros((4, 4), np.uint32),), (), 4, 32, 4
    )


# Multicast: CTA i of p0 issues a copy to the ranks in its mask (0: none), at its coordinates.

_MASKS = {2: (0b11, 0b10), 4: (0b1111, 0b0101, 0, 0b1001), 8: (0xFF, 0x81, 0, 0x3C, 0, 0, 0x80, 1)}


def _multicast_ptx(cluster: int, text: str, place: str, size: int, maps: int) -> str:
    masks = _MASKS[cluster]
    lines = []
    for rank, mask in enumerate(masks):
        expected = size * sum(other >> rank & 1 for other in masks)
        lines.append(
            f"setp.eq.u32 %more, %r7, {rank};\n@%more mov.u32 %r11, {mask};\n"
            f"@%more mov.u32 %r12, {expected};\n"
        )
    total = cluster * 1024 + 1024
    return (
        f"{entry(2, 1, cluster, maps)}{shared(total)}{REGISTERS}.reg .b16 %mask;\n{fill(total)}"
        f"{start_barrier()}fence.mbarrier_init.release.cluster;\n{SYNC}"
        f"{coordinates_text(3)}mov.u32 %r7, %cluster_ctarank;\nmov.u32 %r11, 0;\n"
        f"mov.u32 %r12, 0;\n{''.join(lines)}cvt.u16.u32 %mask, %r11;\n"
        + (
            "mov.b64 %rd6, t0;\ncvta.param.u64 %rd6, %rd6;\n"
            if maps
            else "ld.param.u64 %rd6, [p1];\ncvt.u64.u32 %rd7, %c2;\nadd.u64 %rd6, %rd6, %rd7;\n"
        )
        + "@!%first bra WAITING;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], %r12;\n"
        "setp.eq.u32 %more, %r11, 0;\n@%more bra WAITING;\n"
        f"{text} [%r8], {place}, [bar], %mask;\n{wait(0, 'WAITING')}{dump(total, 'p2')}"
        f"{SYNC}ret;\n}}\n"
    )


def _multicast() -> Iterator[Case]:
    t = Tensor("u16", (64, 30, 9), (32, 8, 2)).describe(swizzle=64)
    tensor = (
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster"
    )
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    source = make.scrambled(610, 64 * 30 * 9 // 2).astype(np.uint32)
    for cluster in (2, 4, 8):
        count = 2 * cluster
        places = np.zeros((count, 6), np.int32)
        for cta in range(count):
            # Each CTA's tile has its own place in every destination.
            places[cta] = [
                16 * (cta % 3) - 8,
                5 * (cta % 7) - 4,
                cta % 9,
                0,
                0,
                1024 * (cta % cluster),
            ]
        total = cluster * 1024 + 1024
        result = np.zeros((count, total // 4), np.uint32)
        ptx = _multicast_ptx(cluster, tensor, "[%rd6, {%c0, %c1, %c2}]", t.tile_bytes, 1)
        yield Case(
            f"cluster/multicast tensor {cluster}",
            "cluster",
            ptx,
            (places, source),
            (result,),
            ((1, t),),
            count,
            THREADS,
            cluster,
        )
        places = places.copy()
        places[:, 2] = 64 * np.arange(count)
        ptx = _multicast_ptx(cluster, bulk, "[%rd6], 512", 512, 0)
        yield Case(
            f"cluster/multicast bulk {cluster}",
            "cluster",
            ptx,
            (places, source),
            (result,),
            (),
            count,
            THREADS,
            cluster,
        )
