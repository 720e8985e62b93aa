"""Cases of TMA for CTA pairs and of cluster launch control, which no Hopper GPU can record
(PTX ISA 9.7.9.27.1.2, cp.async.bulk.tensor with .cta_group::2; clusterlaunchcontrol)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import inputs as make
from ..cases import Case
from ..ptx_text import declare
from .tcgen05 import HEADER, SYNC, Probe
from .tma import FILL, REGISTERS, THREADS, Tensor, dump, fill, shared, wait

#: Shared-memory addresses of a cluster: the lowest bit of the CTA's rank in its window.
_PEER_BIT = 1 << 24
_TILE = Tensor("u16", (64, 40), (32, 8))
_ROWS, _WIDTH = 8, 16
_TILE_BYTES = _ROWS * _WIDTH * 4


def _tile(source: np.ndarray, column: int, row: int) -> np.ndarray:
    """uint32 words of the tile at (column, row): 8 rows of 32 elements."""
    words = source.reshape(40, 32)
    return words[row : row + _ROWS, column // 2 : column // 2 + _WIDTH].ravel()


def _load_ptx(cluster: int, multicast: bool) -> str:
    """Each CTA loads a tile, or CTA 0 one for all; both of a pair signal the pair's first CTA.

    p0: the tensor; p1: shared memory of each CTA. CTA i's tile is at (8 i, 4 i).
    """
    total = _TILE_BYTES + 128
    opcode = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        f"{'.multicast::cluster' if multicast else ''}.cta_group::2"
    )
    mask = ", %mask" if multicast else ""
    issuer = "setp.ne.u32 %more, %r12, 0;\n@%more bra ISSUED;\n" if multicast else ""
    return (
        f"{HEADER}{declare(1, 1, 1)}\n.reqnctapercluster {cluster}, 1, 1\n{{\n{shared(total)}"
        f".reg .b16 %mask;\n.reg .pred %leads;\n{REGISTERS}{fill(total)}"
        "mov.u32 %r10, %tid.x;\nsetp.eq.u32 %first, %r10, 0;\nmov.u32 %r12, %cluster_ctarank;\n"
        "and.b32 %r11, %r12, 1;\nsetp.eq.u32 %leads, %r11, 0;\n"
        "@%first mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
        f"fence.proxy.async;\n{SYNC}@!%first bra ISSUED;\n"
        f"@%leads mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], {2 * _TILE_BYTES};\n"
        f"mov.b16 %mask, {(1 << cluster) - 1};\n{issuer}"
        "mov.u32 %r8, tile;\nmov.u32 %r9, bar;\n"
        # An address of shared::cta names this CTA in the cluster's window, too.
        f"mapa.shared::cluster.u32 %r8, %r8, %r12;\nmapa.shared::cluster.u32 %r9, %r9, %r12;\n"
        f"and.b32 %r9, %r9, {0xFFFFFFFF ^ _PEER_BIT};\n"
        "shl.b32 %c0, %r12, 3;\nshl.b32 %c1, %r12, 2;\nmov.b64 %rd6, t0;\n"
        "cvta.param.u64 %rd6, %rd6;\n"
        f"{opcode} [%r8], [%rd6, {{%c0, %c1}}], [%r9]{mask};\n"
        f"ISSUED:\n@!%leads bra THERE;\n{wait(0, 'WAITING')}THERE:\n{SYNC}"
        f"{dump(total, 'p1')}{SYNC}ret;\n}}\n"
    )


def _loads() -> Iterator[Probe]:
    source = make.scrambled(950, 64 * 40 // 2).astype(np.uint32)
    described = _TILE.describe()
    for cluster, multicast in ((2, False), (4, False), (2, True), (4, True)):
        words = np.full((cluster, (_TILE_BYTES + 128) // 4), FILL, np.uint32)
        for cta in range(cluster):
            own = 0 if multicast else cta
            words[cta, : _TILE_BYTES // 4] = _tile(source, 8 * own, 4 * own)
        name = f"pairs/load{' multicast' if multicast else ''} cluster {cluster}"
        case = Case(
            name,
            "pairs",
            _load_ptx(cluster, multicast),
            (source,),
            (np.zeros_like(words),),
            ((0, described),),
            cluster,
            THREADS,
            cluster,
        )
        yield Probe(case, "TMA of a CTA pair signals the barrier of the pair's first CTA", (words,))


# ---------------------------------------------------------------- cluster launch control

#: CTAs of a grid: more than a GPU holds at once at 48 KiB of shared memory each.
_GRID = 1024


def _clc_ptx(cluster: int, multicast: bool) -> str:
    """multicast: the response goes to all CTAs of the cluster, in a launch without clusters to the
    CTA itself.

    Each CTA, of one thread, counts its tile, notes the response to a request for another, which
    the first CTA of its cluster makes for all, and goes on with that.

    p0: how often each tile was worked on. p1: the response to the request made there, as words.
    p2: what query_cancel says of it: 1 + ctaid.x, or 0 where nothing was cancelled.
    """
    sync = SYNC if cluster > 1 else ""
    to_all = ".multicast::cluster::all" if multicast else ""
    size = "" if multicast and cluster == 1 else f".reqnctapercluster {cluster}, 1, 1\n"
    return (
        f"{HEADER}{declare(0, 3)}\n{size}{{\n"
        ".shared .align 16 .b8 response[16];\n.shared .align 8 .b64 bar;\n"
        ".shared .align 16 .b8 ballast[47000];\n"
        ".reg .b128 %words;\n.reg .b32 %tile, %parity, %r<8>;\n.reg .b64 %rd<8>, %state;\n"
        ".reg .pred %done, %leads, %got;\n"
        "mov.u32 %r0, %cluster_ctarank;\nsetp.eq.u32 %leads, %r0, 0;\n"
        "mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
        "mov.u32 %tile, %ctaid.x;\nmov.u32 %parity, 0;\nmov.u32 %r7, ballast;\n"
        "ld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];\nld.param.u64 %rd3, [p2];\n"
        "NEXT:\nmul.wide.u32 %rd4, %tile, 4;\nadd.u64 %rd5, %rd1, %rd4;\n"
        "atom.global.add.u32 %r1, [%rd5], 1;\n"
        "fence.proxy.async;\n"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], 16;\n{sync}"
        "@%leads clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        f"{to_all}.b128 [response], [bar];\n"
        "WAITING:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [bar], %parity;\n"
        "@!%done bra WAITING;\nxor.b32 %parity, %parity, 1;\n"
        "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [response];\nld.shared.b128 %words, [response];\n"
        "mul.wide.u32 %rd6, %tile, 16;\nadd.u64 %rd6, %rd2, %rd6;\n"
        "st.global.v4.u32 [%rd6], {%r1, %r2, %r3, %r4};\nadd.u64 %rd7, %rd3, %rd4;\n"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %got, %words;\n"
        "mov.u32 %r5, 0;\n@!%got st.global.u32 [%rd7], %r5;\n@!%got bra LEAVE;\n"
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %tile, %words;\n"
        "add.u32 %r5, %tile, 1;\nst.global.u32 [%rd7], %r5;\nadd.u32 %tile, %tile, %r0;\n"
        f"bra NEXT;\nLEAVE:\n{sync}ret;\n}}\n"
    )


def _judge_clc(cluster: int, found: list[np.ndarray]) -> str:
    """Every tile once; words 0 to 2 as kernels that read them raw expect them, in every CTA."""
    counts, words, said = found
    if (counts != 1).any():
        at = int(np.argmax(counts != 1))
        return f"{(counts != 1).sum()} tiles not worked on exactly once, first {at}: {counts[at]}"
    got = said > 0
    if not (~got).any():
        return "no request failed, so more tiles were handed out than there are"
    if (words[:, 2] & 1 != got).any():
        at = int(np.argmax(words[:, 2] & 1 != got))
        row = " ".join(f"{int(w):08x}" for w in words[at])
        return f"bit 0 of word 2 is not is_canceled: {row}, is_canceled {bool(got[at])}"
    wrong = got & ((words[:, 0] != said - 1) | (words[:, 1] != 0))
    if wrong.any():
        row = " ".join(f"{int(w):08x}" for w in words[int(np.argmax(wrong))])
        return f"words 0 and 1 are not x and y | z << 16: {row}, ctaid.x {int(said[wrong][0]) - 1}"
    told = said.reshape(-1, cluster)
    apart = (told != told[:, :1]).any(1)
    if apart.any():
        at = int(np.argmax(apart))
        return f"CTAs of cluster {at} were told different things: 1 + ctaid.x {told[at].tolist()}"
    if ((said[got] - 1) % cluster).any():
        return f"not the first CTA of a cluster of {cluster}: {sorted(set(said[got] - 1))[:4]}"
    return ""


def show_clc(found: list[np.ndarray]) -> dict[str, Any]:
    """Raw responses, three that succeeded and three that failed; how many of each."""
    _, words, said = found
    rows = {}
    for name, chosen in (("cancelled", said > 0), ("refused", said == 0)):
        some = [" ".join(f"{int(w):08x}" for w in row) for row in words[chosen][:3]]
        rows[name] = {"number": int(chosen.sum()), "words": some}
    return rows


def _launch_control(cluster: int, multicast: bool) -> Probe:
    outputs = (np.zeros(_GRID, np.uint32), np.zeros((_GRID, 4), np.uint32),
               np.zeros(_GRID, np.uint32))  # fmt: skip
    of_cluster = f" cluster {cluster}" if cluster > 1 else " multicast" * multicast
    name = f"pairs/launch control{of_cluster}"
    case = Case(name, "pairs", _clc_ptx(cluster, multicast), (), outputs, (), _GRID, 1, cluster)
    return Probe(
        case,
        "raw words of the response; every tile is worked on once",
        None,
        functools.partial(_judge_clc, cluster),
        show_clc,
    )


def probes() -> Iterator[Probe]:
    """All of this module."""
    yield from _loads()
    for cluster, multicast in ((1, False), (1, True), (2, True)):
        yield _launch_control(cluster, multicast)
