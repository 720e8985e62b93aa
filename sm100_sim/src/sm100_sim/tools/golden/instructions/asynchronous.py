"""Golden cases of cp.async, st.async and red.async (PTX ISA 9.7.9.25.3, 9.7.9.12, 9.7.13.8)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import HEADER, Case
from ..ptx_text import declare
from .cluster import SYNC, entry
from .tma import REGISTERS, THREADS, dump, fill, shared, start_barrier, wait

_ROWS = 3
_SLOT = 32


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _copies()
    yield from _stores()
    yield from _reductions()


def _copy_ptx(text: str, size: int) -> str:
    """Thread i of a CTA copies to slot i of the tile; p0 holds bytes to read, p1 the source."""
    total = THREADS * _SLOT
    return (
        f"{HEADER}{declare(2, 1)}\n{{\n{shared(total)}{REGISTERS}{fill(total)}bar.sync 0;\n"
        "mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\n"
        f"mad.lo.u32 %r3, %r1, {_SLOT}, %r2;\nmov.u32 %r4, %ctaid.x;\n"
        f"mad.lo.u32 %r5, %r4, {THREADS}, %r1;\nmul.wide.u32 %rd1, %r5, 4;\n"
        "ld.param.u64 %rd2, [p0];\nadd.u64 %rd1, %rd1, %rd2;\nld.global.u32 %r6, [%rd1];\n"
        f"mul.wide.u32 %rd3, %r5, {size};\nld.param.u64 %rd4, [p1];\nadd.u64 %rd3, %rd3, %rd4;\n"
        "setp.eq.u32 %more, %r6, 0;\n"
        f"{text};\ncp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;\n"
        f"{dump(total, 'p2')}ret;\n}}\n"
    )


def _copies() -> Iterator[Case]:
    source = make.scrambled(900, _ROWS * THREADS * 4).astype(np.uint32)
    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        read = (make.scrambled(901, _ROWS * THREADS) % np.uint64(size + 1)).astype(np.uint32)
        opcode = f"cp.async.{cache}.shared.global [%r3], [%rd3], {size}"
        for name, text in (
            ("", opcode),
            (" src-size", f"{opcode}, %r6"),
            (" ignore-src", f"{opcode}, %more"),
        ):
            yield Case(
                f"async/cp.async.{cache} {size}{name}", "async", _copy_ptx(text, size),
                (read, source), (np.zeros((_ROWS, THREADS * _SLOT // 4), np.uint32),), (), _ROWS,
                THREADS,
            )  # fmt: skip


def _send_ptx(cluster: int, text: str, expected: tuple[int, int], many: bool) -> str:
    """Every thread sends %r12, %r13 to the next CTA, or all to 16 slots of CTA 0.

    expected: bytes that arrive at CTA 0 and at the others.
    """
    total = THREADS * 8
    target = (
        "mov.u32 %r7, 0;\nand.b32 %r3, %r1, 15;\n"
        if many
        else (
            f"mov.u32 %r7, %cluster_ctarank;\nadd.u32 %r7, %r7, 1;\nrem.u32 %r7, %r7, {cluster};\n"
            "mov.u32 %r3, %r1;\n"
        )
    )
    return (
        f"{entry(1, 1, cluster)}{shared(total)}{REGISTERS}{fill(total)}{start_barrier()}"
        f"fence.mbarrier_init.release.cluster;\n{SYNC}"
        f"mov.u32 %r1, %tid.x;\nmov.u32 %r2, tile;\n{target}shl.b32 %r3, %r3, 3;\n"
        "add.u32 %r3, %r3, %r2;\nmapa.shared::cluster.u32 %r8, %r3, %r7;\nmov.u32 %r9, bar;\n"
        "mapa.shared::cluster.u32 %r9, %r9, %r7;\nmov.u32 %r11, %cluster_ctarank;\n"
        f"setp.eq.u32 %more, %r11, 0;\nselp.u32 %r5, {expected[0]}, {expected[1]}, %more;\n"
        "@%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], %r5;\n"
        f"mov.u32 %r4, %ctaid.x;\nmad.lo.u32 %r5, %r4, {THREADS}, %r1;\n"
        "mul.wide.u32 %rd1, %r5, 8;\nld.param.u64 %rd2, [p0];\nadd.u64 %rd1, %rd1, %rd2;\n"
        "ld.global.v2.u32 {%r12, %r13}, [%rd1];\nmov.b64 %rd7, {%r12, %r13};\n"
        f"{text};\n{wait(0, 'WAITING')}{dump(total, 'p1')}{SYNC}ret;\n}}\n"
    )


def _send(name: str, text: str, size: int, many: bool) -> Case:
    cluster = 4
    count = 2 * cluster
    values = make.scrambled(910, 2 * count * THREADS).astype(np.uint32)
    if "inc" in name or "dec" in name:
        # All threads wrap at the same value: then their order does not matter.
        values[:] = 1000
    expected = (size * THREADS * cluster, 0) if many else (size * THREADS, size * THREADS)
    return Case(
        f"async/{name}", "async", _send_ptx(cluster, text, expected, many), (values,),
        (np.zeros((count, 2 * THREADS), np.uint32),), (), count, THREADS, cluster,
    )  # fmt: skip


def _stores() -> Iterator[Case]:
    for kind, value, size in (
        ("b32", "%r12", 4),
        ("v2.u32", "{%r12, %r13}", 8),
        ("b64", "%rd7", 8),
    ):
        opcode = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        yield _send(opcode, f"{opcode} [%r8], {value}, [%r9]", size, False)


def _reductions() -> Iterator[Case]:
    forms = (
        "add.u32",
        "add.s32",
        "min.u32",
        "min.s32",
        "max.u32",
        "max.s32",
        "and.b32",
        "or.b32",
        "xor.b32",
        "inc.u32",
        "dec.u32",
        "add.u64",
    )
    for form in forms:
        opcode = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{form}"
        value, size = ("%rd7", 8) if form.endswith("64") else ("%r12", 4)
        yield _send(opcode, f"{opcode} [%r8], {value}, [%r9]", size, True)
