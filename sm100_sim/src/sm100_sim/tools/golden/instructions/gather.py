"""Cases of loads of four rows that need not follow each other, which no Hopper GPU can record
(PTX ISA 9.7.9.27.1.2, cp.async.bulk.tensor with .tile::gather4).

Every CTA gathers one tile. p0 holds its column, its four rows and the tile's offset in shared
memory: int32 (CTAs, 6). All of the shared memory is dumped, which was 0xEE before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import inputs as make
from ..cases import Case
from ..ptx_text import declare
from .tcgen05 import HEADER, SYNC, Probe
from .tma import FILL, REGISTERS, THREADS, Tensor, coordinates_text, dump, fill, shared, wait

_WIDTH, _HEIGHT, _COLUMNS, _ROWS = 160, 41, 64, 4
_ROW_BYTES, _SIZE = 2 * _COLUMNS, 2048
#: Shared-memory addresses of a cluster: the lowest bit of the CTA's rank in its window.
_PEER_BIT = 1 << 24
#: Column, four rows, offset: any order and a row twice; the first and the last row; none (-1) and
#: rows past the end; a column across the end; the upper half of an atom of the swizzle, and its
#: last rows with an atom's end between them.
_PLACES = (
    (0, 30, 3, 17, 3, 0), (64, 0, 40, 0, 40, 1024), (0, 5, -1, 6, 41, 0),
    (128, 8, 9, 10, 11, 512), (96, -1, -1, -1, 2, 1536), (32, 39, 38, 37, 36, 896),
    (64, 2**31 - 1, 1, -(2**31), 20, 512), (0, 12, 25, 12, 24, 1024),
)  # fmt: skip


def _gathered(source: np.ndarray, place: tuple[int, ...], swizzle: int) -> np.ndarray:
    """Return the bytes of a CTA's shared memory: FILL, and rows with zeros for what is outside."""
    column, *rows, offset = place
    tensor = source.view(np.uint16).reshape(_HEIGHT, _WIDTH)
    memory = np.full(_SIZE // 4, FILL, np.uint32).view(np.uint8)
    for number, row in enumerate(rows):
        found = np.zeros(_COLUMNS, np.uint16)
        if 0 <= row < _HEIGHT:
            inside = tensor[row, column : column + _COLUMNS]
            found[: len(inside)] = inside
        begin = offset + _ROW_BYTES * number
        turn = begin // 128 % 8 if swizzle else 0
        for piece, sixteen in enumerate(found.view(np.uint8).reshape(8, 16)):
            at = begin + 16 * (piece ^ turn)
            memory[at : at + 16] = sixteen
    return memory.view(np.uint32)


def _ptx(pair: bool) -> str:
    """Module: p0 places, p1 the tensor, p2 the dumps. pair: both CTAs signal the first one's
    barrier, on which the first one waits for both."""
    count = _ROW_BYTES * _ROWS
    start = "mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar],"
    opcode = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
        f"{'.cta_group::2' if pair else ''}"
    )
    place = "[%rd6, {%c0, %c1, %c2, %c3, %c4}]"
    tensor = "mov.b64 %rd6, t0;\ncvta.param.u64 %rd6, %rd6;\n"
    barrier = "mov.u32 %r10, %tid.x;\nsetp.eq.u32 %first, %r10, 0;\n"
    if not pair:
        return (
            f"{HEADER}{declare(2, 1, 1)}\n{{\n{shared(_SIZE)}{REGISTERS}{fill(_SIZE)}{barrier}"
            "@%first mbarrier.init.shared::cta.b64 [bar], 1;\nfence.proxy.async;\nbar.sync 0;\n"
            f"{coordinates_text(5)}{tensor}@!%first bra WAITING;\n{start} {count};\n"
            f"{opcode} [%r8], {place}, [bar];\n{wait(0, 'WAITING')}{dump(_SIZE, 'p2')}ret;\n}}\n"
        )
    return (
        f"{HEADER}{declare(2, 1, 1)}\n.reqnctapercluster 2, 1, 1\n{{\n{shared(_SIZE)}"
        f".reg .pred %leads;\n{REGISTERS}{fill(_SIZE)}{barrier}"
        "mov.u32 %r12, %cluster_ctarank;\nsetp.eq.u32 %leads, %r12, 0;\n"
        "@%first mbarrier.init.shared::cta.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n"
        f"fence.proxy.async;\n{SYNC}{coordinates_text(5)}{tensor}@!%first bra ISSUED;\n"
        f"@%leads {start} {2 * count};\nmov.u32 %r11, bar;\n"
        # An address of shared::cta names this CTA in the cluster's window, too.
        "mapa.shared::cluster.u32 %r8, %r8, %r12;\nmapa.shared::cluster.u32 %r11, %r11, %r12;\n"
        f"and.b32 %r11, %r11, {0xFFFFFFFF ^ _PEER_BIT};\n{opcode} [%r8], {place}, [%r11];\n"
        f"ISSUED:\n@!%leads bra THERE;\n{wait(0, 'WAITING')}THERE:\n{SYNC}"
        f"{dump(_SIZE, 'p2')}{SYNC}ret;\n}}\n"
    )


def probes() -> Iterator[Probe]:
    """All of this module."""
    source = make.scrambled(960, _WIDTH * _HEIGHT // 2).astype(np.uint32)
    places = np.array(_PLACES, np.int32)
    tensor = Tensor("u16", (_WIDTH, _HEIGHT), (_COLUMNS, 1))
    for pair, swizzle in ((False, 128), (False, 0), (True, 128)):
        words = np.stack([_gathered(source, place, swizzle) for place in _PLACES])
        of_pair = " of a pair" if pair else ""
        case = Case(
            f"gather/four rows{of_pair} swizzle {swizzle}", "gather", _ptx(pair),
            (places, source), (np.zeros_like(words),), ((1, tensor.describe(swizzle=swizzle)),),
            len(_PLACES), THREADS, 2 if pair else 1,
        )  # fmt: skip
        what = f"rows by their numbers, those outside zeros{', signalled to the pair' * pair}"
        yield Probe(case, what, (words,))
