"""Golden cases of what a launch may request, and of tensor maps far from the usual ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sm100_sim.state.tensormap import TensorMap

from ..cases import HEADER, Case
from ..instructions.tma import THREADS, Tensor, contents, footprint, load_ptx, store_ptx
from ..ptx_text import declare
from .scripts import MEET_CLUSTER, scripted, store

_LIMITS = "what a launch may ask for"
#: Dynamic shared memory of a CTA, after opting in: 228 KiB of the SM less 1 KiB of the system.
_MOST_SHARED = 227 * 1024


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _limits()
    yield from _parameters()
    yield from _wide()
    yield from _clipped()
    yield from _outside()


def _limits() -> Iterator[Case]:
    extern = ".extern .shared .align 1024 .b8 dynamic[];\n"
    last = (
        "mov.u32 %r1, dynamic;\nmov.u32 %r2, %dynamic_smem_size;\nadd.u32 %r3, %r1, %r2;\n"
        "st.shared.u32 [%r3+-4], %r2;\nld.shared.u32 %r4, [%r3+-4];\n"
        + "\n".join(store(i, f"%r{1 + i}") for i in range(4))
    )
    for extra in (0, 16):
        yield _shared(
            f"launch/dynamic shared memory {_MOST_SHARED + extra}",
            last,
            extern,
            _MOST_SHARED + extra,
        )
    both = ".shared .align 1024 .b8 fixed[1024];\n"
    for name, dynamic in (("all", _MOST_SHARED - 1024), ("16 too many", _MOST_SHARED - 1008)):
        text = "mov.u32 %r5, fixed;\nst.shared.u32 [%r5], %t;\n" + store(4, "%r5") + "\n" + last
        yield _shared(
            f"launch/static and dynamic shared memory, {name}", text, both + extern, dynamic
        )
    for block in (1024, 1056):
        yield scripted(f"launch/{block} threads", _LIMITS, {31: ["bar.sync 1, 32;"]}, block=block)
    for cluster in (8, 16):
        yield scripted(
            f"launch/clusters of {cluster}",
            _LIMITS,
            {0: [MEET_CLUSTER]},
            block=32,
            cluster=cluster,
            grid=cluster,
            end="",
        )
    yield scripted("launch/half a cluster", _LIMITS, {0: [""]}, block=32, cluster=2, grid=3)
    for registers in (64, 72):
        yield scripted(
            f"launch/1024 threads of {registers} registers",
            _LIMITS,
            {w: ["setmaxnreg.dec.sync.aligned.u32 24;"] for w in range(4)},
            block=1024,
            directives=f".maxnreg {registers}",
        )


def _shared(name: str, text: str, declarations: str, dynamic: int) -> Case:
    """A case whose shared memory is declared outside the kernel."""
    case = scripted(name, _LIMITS, {0: [text]}, block=32, dynamic_smem=dynamic)
    return replace(case, ptx=case.ptx.replace(HEADER, HEADER + declarations))


def _parameters() -> Iterator[Case]:
    """Kernel parameters: two addresses, and tensor maps of 128 bytes; the last is used."""
    t = Tensor("u16", (64, 20), (32, 8)).describe(swizzle=64)
    size = footprint(t)
    for maps in (31, 32, 255, 256):
        ptx = (
            load_ptx(t, size)
            .replace(declare(2, 1, 1), declare(2, 1, maps))
            .replace("mov.b64 %rd6, t0;", f"mov.b64 %rd6, t{maps - 1};")
        )
        places = np.array([(16, 5, 0, 0, 0, 128)], np.int32)
        yield Case(
            f"rules/launch/{64 + 128 * maps} bytes of parameters",
            "rules",
            ptx,
            (places, contents(t, 700)),
            (np.zeros((1, size // 4), np.uint32),),
            ((1, t),) * maps,
            1,
            THREADS,
            rule=_LIMITS,
        )


_UNMAPPED = "a tensor map whose tensor begins where no memory is"
_WIDE = "coordinates, sizes and offsets of tensor maps count in 64 bits"


def _load(name: str, rule: str, t: TensorMap, places: list[tuple[int, ...]], words: int) -> Case:
    rows = np.zeros((len(places), 6), np.int32)
    for row, place in zip(rows, places, strict=True):
        row[: len(place)] = place
    size = footprint(t)
    source = np.arange(words, dtype=np.uint32) * np.uint32(0x20002) + np.uint32(0x10000)
    return Case(
        f"rules/{name}",
        "rules",
        load_ptx(t, size),
        (rows, source),
        (np.zeros((len(rows), size // 4), np.uint32),),
        ((1, t),),
        len(rows),
        THREADS,
        rule=rule,
    )


def _wide() -> Iterator[Case]:
    """Tensors whose rows are far apart, or are the same bytes again and again (stride 0); the base
    lies so far before the data that the last rows fall on them."""

    def describe(sizes, strides, box, address=0) -> TensorMap:
        return TensorMap(address, "u16", sizes, strides, box, (1,) * len(sizes), version=0)

    for rows in ((1 << 31) - 2, 1 << 31, (1 << 31) + 1, 1 << 32):
        places = {
            "first": 0,
            "2^16": (1 << 16) + 1,
            "2^31 - 6": (1 << 31) - 6,
            "2^31 - 1": (1 << 31) - 1,
            "-1": -1,
            "-2^31": -(1 << 31),
        }
        for name, row in places.items():
            yield _load(
                f"tma/row {name} of {rows}",
                _WIDE,
                describe((64, rows), (0,), (64, 8)),
                [(0, row)],
                64,
            )
    for name, stride, rows in (
        ("2^16 rows", 16, 1 << 17),
        ("2^31 bytes", 1 << 31, 5),
        ("2^36 bytes", 1 << 36, 4),
        ("2^40 bytes", (1 << 40) - 16, 3),
    ):
        t = describe((8, rows), (stride,), (8, 1), -(rows - 1) * stride)
        yield _load(f"tma/offset beyond {name}", _WIDE, t, [(0, rows - 1)], 64)
        wide = describe((8, rows), (stride,), (8, 2), -(rows - 1) * stride)
        yield _load(f"tma/offset beyond {name}, over the end", _WIDE, wide, [(0, rows - 1)], 64)
        outside = _load(f"tma/offset beyond {name}, outside", _WIDE, wide, [(0, rows)], 64)
        yield replace(outside, undefined=_UNMAPPED)
    t = describe((32, 70000, 70000), (64, 0), (32, 2, 2), -69998 * 64)
    yield _load(
        "tma/70,000 by 70,000", _WIDE, t, [(0, 69998, 65535), (0, 69999, 69999), (16, 69998, 0)], 64
    )


def _clipped() -> Iterator[Case]:
    """A tensor whose dimensions 1 and 2 both are its rows, its base one box of rows before the
    data: a tile at (column, box - n, row) is rows [row - n, row), and nothing else moves."""
    rule = "a tensor map that names its rows twice clips tiles at any row"
    rows, box = 40, 16
    pitch = 128
    t = TensorMap(
        -box * pitch,
        "u16",
        (64, box, rows + 1),
        (pitch, pitch),
        (64, box, 1),
        (1, 1, 1),
        128,
        version=0,
    )
    places: list[tuple[int, ...]]
    places = [
        (0, box - n, end, 0, 0, offset)
        for n, end, offset in ((5, 21, 0), (16, 16, 1024), (1, 40, 0), (16, 40, 0), (7, 7, 1024))
    ]
    yield _load("tma/clipped loads", rule, t, places, rows * pitch // 4)
    places += [(0, box, 30, 0, 0, 0)]  # no rows at all
    for chosen, name in ((places[:1] + places[2:3], "apart"), (places[3:], "others")):
        rows_of = np.array(chosen, np.int32)
        size = footprint(t)
        tiles = np.arange(len(chosen) * size // 4, dtype=np.uint32) * np.uint32(0x20002)
        initial = np.full(rows * pitch // 4, 0xEEEEEEEE, np.uint32)
        yield Case(
            f"rules/tma/clipped stores, {name}",
            "rules",
            store_ptx(t, size, ""),
            (rows_of, tiles.reshape(len(chosen), -1)),
            (initial,),
            ((2, t),),
            len(chosen),
            THREADS,
            rule=rule,
        )


def _outside() -> Iterator[Case]:
    """Tiles wholly outside of tensors whose rows are 2 GiB apart: only one row is memory that is
    there. Where the first row is that one, the base is mapped; where the last, it is not."""
    rule = "a tile wholly outside touches no memory"
    step, rows = 1 << 31, 5

    def describe(sizes, strides, box, address) -> TensorMap:
        return TensorMap(address, "u16", sizes, strides, box, (1,) * len(sizes), version=0)

    shapes = {
        "first row mapped": (
            describe((8, rows), (step,), (8, 1), 0),
            ((0, 0), (0, 5), (0, -1), (8, 0), (8, 4), (-8, 0)),
        ),
        "first row mapped, two rows": (describe((8, rows), (step,), (8, 2), 0), ((0, 5), (0, -2))),
        "last row mapped": (
            describe((8, rows), (step,), (8, 1), -(rows - 1) * step),
            ((0, 4), (0, 5), (0, -1), (8, 4), (8, 0), (-8, 4), (4, 4), (-4, 4)),
        ),
        # 4 rows below the data, see `_clipped`; (., 4 - n, end) is n rows.
        "rows twice": (
            describe((8, 4, rows), (step, step), (8, 4, 1), -4 * step),
            ((0, 3, 1), (0, 4, 4), (0, 4, 0), (0, 4, 5), (0, -3, 4), (-4, 3, 1)),
        ),
        "rows twice, first row mapped": (
            describe((8, 4, rows), (step, step), (8, 4, 1), 0),
            ((0, -3, 0), (0, 3, 0), (-4, -3, 0)),
        ),
    }
    for name, (t, places) in shapes.items():
        for place in places:
            at = ", ".join(map(str, place))
            yield _load(f"tma/load at ({at}), {name}", rule, t, [place], 64)
            if min(place) < 0:
                continue
            tiles = np.arange(footprint(t) // 4, dtype=np.uint32) * np.uint32(0x20002)
            yield Case(
                f"rules/tma/store at ({at}), {name}",
                "rules",
                store_ptx(t, footprint(t), ""),
                (np.array([(*place, *[0] * (6 - len(place)))], np.int32), tiles.reshape(1, -1)),
                (np.full(64, 0xEEEEEEEE, np.uint32),),
                ((2, t),),
                1,
                THREADS,
                rule=rule,
            )
