"""Golden cases of tensor copies and bulk copies within one CTA (PTX ISA 9.7.9.25).

Every CTA of a tensor case moves one tile. p0 holds its coordinates (dimension 0 first) and the
offset of the tile in shared memory: int32 (CTAs, 6). A load dumps all of the shared memory, which
was 0xEE before, so that bytes beside the tile are seen too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sm100_sim.state.tensormap import TensorMap

from .. import inputs as make
from ..cases import HEADER, Case
from ..ptx_text import declare

THREADS = 128
FILL = 0xEEEEEEEE
#: Offsets of tiles in shared memory; a swizzle acts on address bits, so these matter.
_OFFSETS = (0, 1024, 128, 256, 512, 896, 640, 384, 768)

#: Registers and labels that every kernel here uses.
REGISTERS = (
    ".reg .b32 %r<16>, %c<6>;\n.reg .b64 %rd<12>, %state;\n.reg .pred %more, %first, %done;\n"
)


def wait(parity: int, label: str) -> str:
    """Wait for a phase of `bar`; the recorder ends a kernel that waits for ever."""
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [bar], {parity};\n"
        f"@!%done bra {label};\n"
    )


def fill(size: int, base: str = "tile") -> str:
    """All threads: write FILL over `size` bytes of shared memory."""
    return (
        f"mov.u32 %r1, %tid.x;\nmov.u32 %r2, {base};\nshl.b32 %r3, %r1, 2;\nmov.u32 %r4, {FILL};\n"
        f"FILLING:\nadd.u32 %r5, %r2, %r3;\nst.shared.u32 [%r5], %r4;\n"
        f"add.u32 %r3, %r3, {4 * THREADS};\nsetp.lt.u32 %more, %r3, {size};\n@%more bra FILLING;\n"
    )


def dump(size: int, parameter: str, base: str = "tile", row: str = "%ctaid.x") -> str:
    """All threads: copy `size` bytes of shared memory to row `row` of a buffer."""
    return (
        f"ld.param.u64 %rd1, [{parameter}];\nmov.u32 %r6, {row};\nmul.wide.u32 %rd2, %r6, {size};\n"
        f"add.u64 %rd1, %rd1, %rd2;\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, {base};\n"
        "shl.b32 %r3, %r1, 2;\n"
        "DUMPING:\nadd.u32 %r5, %r2, %r3;\nld.shared.u32 %r4, [%r5];\ncvt.u64.u32 %rd3, %r3;\n"
        f"add.u64 %rd3, %rd3, %rd1;\nst.global.u32 [%rd3], %r4;\nadd.u32 %r3, %r3, {4 * THREADS};\n"
        f"setp.lt.u32 %more, %r3, {size};\n@%more bra DUMPING;\n"
    )


def coordinates_text(rank: int, row: str = "%ctaid.x") -> str:
    """Load %c0.. and the tile's address %r8 from row `row` of p0."""
    lines = [
        f"ld.param.u64 %rd4, [p0];\nmov.u32 %r7, {row};\nmul.wide.u32 %rd5, %r7, 24;\n"
        "add.u64 %rd4, %rd4, %rd5;"
    ]
    lines += [f"ld.global.u32 %c{i}, [%rd4+{4 * i}];" for i in range(rank)]
    lines.append("ld.global.u32 %r8, [%rd4+20];\nmov.u32 %r9, tile;\nadd.u32 %r8, %r8, %r9;\n")
    return "\n".join(lines)


def start_barrier(count: int = 1) -> str:
    """Thread 0 initialises `bar`; sets %first in it."""
    return (
        "mov.u32 %r10, %tid.x;\nsetp.eq.u32 %first, %r10, 0;\n"
        f"@%first mbarrier.init.shared::cta.b64 [bar], {count};\n"
        "fence.proxy.async;\nbar.sync 0;\n"
    )


def shared(size: int) -> str:
    """Declarations of the tile and the barrier."""
    return f".shared .align 1024 .b8 tile[{size}];\n.shared .align 8 .b64 bar;\n"


def load_ptx(t: TensorMap, size: int) -> str:
    """Module of a load: p0 places, p1 the tensor, p2 the dumps of shared memory."""
    place = f"[%rd6, {{{', '.join(f'%c{i}' for i in range(t.rank))}}}]"
    return (
        f"{HEADER}{declare(2, 1, 1)}\n{{\n{shared(size)}{REGISTERS}{fill(size)}{start_barrier()}"
        f"{coordinates_text(t.rank)}mov.b64 %rd6, t0;\ncvta.param.u64 %rd6, %rd6;\n"
        "@!%first bra WAITING;\n"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], {t.tile_bytes};\n"
        f"cp.async.bulk.tensor.{t.rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%r8], {place}, [bar];\n"
        f"{wait(0, 'WAITING')}{dump(size, 'p2')}ret;\n}}\n"
    )


def store_ptx(t: TensorMap, size: int, reduction: str) -> str:
    """Module of a store or reduction: p0 places, p1 the tiles, p2 the tensor."""
    place = f"[%rd6, {{{', '.join(f'%c{i}' for i in range(t.rank))}}}]"
    opcode = (
        f"cp.reduce.async.bulk.tensor.{t.rank}d.global.shared::cta.{reduction}.tile"
        if reduction
        else f"cp.async.bulk.tensor.{t.rank}d.global.shared::cta.tile"
    )
    copy = (
        dump(size, "p1")
        .replace("DUMPING", "FILLING")
        .replace("ld.shared.u32 %r4, [%r5];\n", "")
        .replace(
            "st.global.u32 [%rd3], %r4;", "ld.global.u32 %r4, [%rd3];\nst.shared.u32 [%r5], %r4;"
        )
    )
    return (
        f"{HEADER}{declare(2, 1, 1)}\n{{\n{shared(size)}{REGISTERS}{copy}"
        "fence.proxy.async;\nbar.sync 0;\nmov.u32 %r10, %tid.x;\nsetp.ne.u32 %first, %r10, 0;\n"
        f"{coordinates_text(t.rank)}mov.b64 %rd6, t0;\ncvta.param.u64 %rd6, %rd6;\n"
        "@%first bra LEAVE;\n"
        f"{opcode}.bulk_group {place}, [%r8];\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nLEAVE:\nret;\n}\n"
    )


@dataclass(frozen=True)
class Tensor:
    """A tensor of a case: element type, sizes and row pitch as the descriptor has them."""

    dtype: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    padding: int = 0

    def describe(self, **fields) -> TensorMap:
        """Descriptor at offset 0; each row is `padding` bytes longer than it must be."""
        bits = {"u8": 8, "u16": 16, "f16": 16, "bf16": 16, "f64": 64, "u64": 64, "s64": 64}.get(
            self.dtype, 32
        )
        pitch = -(-self.sizes[0] * bits // 8 // 16) * 16 + self.padding
        strides = []
        for size in self.sizes[1:]:
            strides.append(pitch)
            pitch *= size
        steps = self.steps or (1,) * len(self.sizes)
        return TensorMap(
            0, self.dtype, self.sizes, tuple(strides), self.box, steps, version=0, **fields
        )


def _places(t: TensorMap, seed: int, is_store: bool) -> np.ndarray:
    """int32 (9, 6): coordinates inside, across each edge and wholly outside, and tile offsets."""
    count = len(_OFFSETS)
    rows = np.zeros((count, 6), np.int32)
    # The hardware takes no tile that starts off a 16-byte boundary of its row.
    unit = 128 // t.element_bits
    for d in range(t.rank):
        size, box = t.sizes[d], t.box[d]
        # Inside; across the near edge; across the far edge; outside on both sides.
        choices = [
            0,
            max(0, (size - box) // 2),
            -(box // 2),
            size - box // 2,
            size,
            -box,
            1,
            -1,
            size - 1,
            -box - 5,
        ]
        picks = make.scrambled(seed + d, count) % np.uint64(len(choices))
        rows[:, d] = [choices[int(p)] for p in picks]
        rows[0, d], rows[1, d] = 0, max(0, size - box)
        rows[2, d] = -(box // 2)
        rows[3, d] = size - (box + 1) // 2
    rows[:, 0] = rows[:, 0] // unit * unit
    if is_store:
        # Stores take no negative coordinate. The last dimension keeps the CTAs apart.
        rows = np.maximum(rows, 0)
        rows[:, t.rank - 1] = np.arange(count)
    rows[:, 5] = _OFFSETS
    return rows


def contents(t: TensorMap, seed: int) -> np.ndarray:
    """uint32 words of a tensor: floats of its type, or numbers that say where they are."""
    size = -(-t.extent()[1] // 128) * 128
    if t.dtype in ("f16", "bf16"):
        return make.pairs(t.dtype, seed, size // 4)
    if t.dtype.startswith("f32"):
        return make.floats(seed, size // 4)
    return _numbered(size // 4, seed)


def _numbered(count: int, seed: int) -> np.ndarray:
    """uint32 (count,): all different, in both halves too, and easily compressed."""
    number = np.arange(count, dtype=np.uint32)
    return number * np.uint32(0x20002) + np.uint32(0x10000) + np.uint32(seed)


def footprint(t: TensorMap) -> int:
    """Bytes of shared memory of a case: the tile, its rows as long as the swizzle, and 1 KiB."""
    inner = t.tile_shape[0] * t.element_bits // 8
    tile = t.tile_bytes // inner * max(inner, t.swizzle)
    return -(-tile // 128) * 128 + 1024


def _load(name: str, t: TensorMap, seed: int) -> Case:
    size = footprint(t)
    places = _places(t, seed, False)
    return Case(
        f"tma/load {name}", "tma", load_ptx(t, size), (places, contents(t, seed)),
        (np.zeros((len(places), size // 4), np.uint32),), ((1, t),), len(places), THREADS,
    )  # fmt: skip


_FORMATS = {"f16": "f16x2", "bf16": "bf16x2", "f32": "f32", "f32.ftz": "f32"}


def store_case(name: str, t: TensorMap, seed: int, reduction: str = "") -> Case:
    """Tiles stored to, or combined with, a tensor, one per CTA."""
    size = footprint(t)
    places = _places(t, seed, True)
    tiles = _numbered(len(places) * size // 4, seed + 50)
    initial = np.zeros(-(-t.extent()[1] // 128) * 32, np.uint32)
    if reduction:
        initial = contents(t, seed + 60)[: len(initial)]
        if t.dtype in ("f16", "bf16"):
            tiles = make.pairs(t.dtype, seed + 50, tiles.size)
        elif t.dtype.startswith("f32"):
            tiles = make.floats(seed + 50, tiles.size)
    return Case(
        f"tma/{reduction or 'store'} {name}", "tma", store_ptx(t, size, reduction),
        (places, tiles.reshape(len(places), -1)), (initial,), ((2, t),), len(places), THREADS,
        floats=_FORMATS.get(t.dtype, "") if reduction else "",
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _loads()
    yield from _stores()
    yield from _bulk()


def _loads() -> Iterator[Case]:
    for span in (0, 32, 64, 128):
        inner = span or 48
        flat = Tensor("u16", (200, 37), (inner // 2, 12), padding=16)
        yield _load(f"2d u16 swizzle {span}", flat.describe(swizzle=span), 300 + span)
        deep = Tensor("bf16", (72, 9, 5, 3), (inner // 2, 4, 3, 2))
        yield _load(
            f"4d bf16 swizzle {span} nan", deep.describe(swizzle=span, nan_fill=True), 310 + span
        )
        wide = Tensor("f32", (44, 6, 5, 3, 3), (inner // 4, 3, 2, 2, 2), padding=32)
        yield _load(f"5d f32 swizzle {span}", wide.describe(swizzle=span), 320 + span)
        small = Tensor("u8", (300, 20, 4), (inner, 16, 2))
        yield _load(f"3d u8 swizzle {span}", small.describe(swizzle=span), 330 + span)
    one = Tensor("u32", (1000,), (64,))
    yield _load("1d u32", one.describe(), 340)
    for dtype in ("f16", "f32", "f32.ftz", "f64"):
        pair = Tensor(dtype, (50, 11), (16, 8), padding=48)
        yield _load(f"2d {dtype} nan", pair.describe(nan_fill=True), 350)
    pair = Tensor("f32", (50, 11), (16, 8))
    yield _load("2d tf32.ftz", Tensor("f32.ftz", (50, 11), (16, 8)).describe(tf32=True), 354)
    yield _load("2d tf32", pair.describe(tf32=True), 351)
    yield _load("2d tf32 nan", pair.describe(tf32=True, nan_fill=True), 352)
    for dtype in ("s32", "u64", "s64"):
        yield _load(f"2d {dtype}", Tensor(dtype, (50, 11), (16, 8)).describe(), 353)
    for steps in ((1, 2, 1), (1, 3, 2), (2, 2, 2), (1, 8, 5)):
        strided = Tensor("u16", (80, 30, 9), (32, 12, 6), steps)
        yield _load(f"3d u16 steps {steps}", strided.describe(), 360)
        yield _load(f"3d u16 steps {steps} swizzle 64", strided.describe(swizzle=64), 361)
    broadcast = Tensor("u16", (64, 6, 5), (64, 4, 3)).describe(swizzle=128)
    yield _load("3d u16 stride 0", replace(broadcast, strides=(broadcast.strides[0], 0)), 370)
    transposed = replace(broadcast, strides=(6 * 128, 128), sizes=(64, 5, 6))
    yield _load("3d u16 transposed", transposed, 371)
    for span, inner in ((128, 64), (128, 32), (64, 32), (128, 16), (32, 16)):
        narrow = Tensor("u16", (100, 20), (inner // 2, 12))
        yield _load(f"2d u16 swizzle {span} rows {inner}", narrow.describe(swizzle=span), 380)
    yield from _faults()


def _faults() -> Iterator[Case]:
    """Tiles off a 16-byte boundary of a row or 128 bytes of shared memory; stores before a row."""
    t = Tensor("u16", (200, 37), (64, 12)).describe(swizzle=128)
    for name, row in (
        ("coordinate", (4, 0, 0, 0, 0, 0)),
        ("offset", (0, 0, 0, 0, 0, 64)),
        ("before", (-8, 0, 0, 0, 0, 0)),
        ("above", (0, -1, 0, 0, 0, 0)),
    ):
        for make_case in (_load, store_case):
            if make_case is _load and min(row) < 0:
                continue  # filled, as other cases show
            case = make_case("2d u16", t, 390)
            places = np.tile(np.array(row, np.int32), (len(case.inputs[0]), 1))
            yield replace(
                case,
                name=f"{case.name} {name}",
                inputs=(places, *case.inputs[1:]),
                outputs=(case.outputs[0][:1],) if make_case is _load else case.outputs,
                grid=1,
                faults=True,
            )


def _stores() -> Iterator[Case]:
    for span in (0, 32, 64, 128):
        inner = span or 48
        flat = Tensor("u16", (100, 21, 9), (inner // 2, 10, 1), padding=16)
        yield store_case(f"3d u16 swizzle {span}", flat.describe(swizzle=span), 400 + span)
        deep = Tensor("u8", (150, 6, 4, 3, 9), (inner, 4, 3, 2, 1))
        yield store_case(f"5d u8 swizzle {span}", deep.describe(swizzle=span), 410 + span)
    narrow = Tensor("u16", (100, 21, 9), (32, 10, 1)).describe(swizzle=128)
    yield store_case("3d u16 swizzle 128 rows 64", narrow, 418)
    yield store_case("2d u32", Tensor("u32", (90, 9), (64, 1)).describe(), 420)
    yield store_case("2d u64", Tensor("u64", (90, 9), (16, 1)).describe(), 420)
    strided = Tensor("u16", (80, 14, 9), (32, 9, 1), (1, 3, 1))
    yield store_case("3d u16 steps 3", strided.describe(), 421)
    for dtype, operations in (
        ("u32", ("add", "min", "max", "and", "or", "xor")), ("s32", ("add", "min", "max")),
        ("f32", ("add",)), ("f32.ftz", ("add",)), ("f16", ("add", "min", "max")),
        ("bf16", ("add", "min", "max")), ("u64", ("add", "and")),
    ):  # fmt: skip
        for operation in operations:
            # Rows end within 16 bytes: there, plain stores and reductions differ.
            t = Tensor(dtype, (42, 7, 9), (16, 6, 1)).describe()
            yield store_case(f"3d {dtype}", t, 430, operation)


# Bulk copies: CTA i moves p0[i] = (shared offset, global offset, bytes).

_BULK = np.array(
    [(0, 0, 16), (16, 32, 48), (128, 256, 496), (512, 16, 512), (48, 384, 640), (0, 0, 1024)],
    np.uint32,
)
_BULK_BYTES = 1024


def _bulk_ptx(text: str, load: bool) -> str:
    read = (
        "ld.param.u64 %rd4, [p0];\nmov.u32 %r7, %ctaid.x;\nmul.wide.u32 %rd5, %r7, 12;\n"
        "add.u64 %rd4, %rd4, %rd5;\nld.global.u32 %r8, [%rd4];\nld.global.u32 %c0, [%rd4+4];\n"
        f"ld.global.u32 %c1, [%rd4+8];\nmov.u32 %r9, tile;\nadd.u32 %r8, %r8, %r9;\n"
        f"ld.param.u64 %rd6, [{'p1' if load else 'p2'}];\ncvt.u64.u32 %rd7, %c0;\n"
        "add.u64 %rd6, %rd6, %rd7;\n"
    )
    size = _BULK_BYTES
    if load:
        return (
            f"{HEADER}{declare(2, 1)}\n{{\n{shared(size)}{REGISTERS}{fill(size)}{start_barrier()}"
            f"{read}@!%first bra WAITING;\n"
            "mbarrier.arrive.expect_tx.shared::cta.b64 %state, [bar], %c1;\n"
            f"{text} [%r8], [%rd6], %c1, [bar];\n{wait(0, 'WAITING')}{dump(size, 'p2')}ret;\n}}\n"
        )
    copy = (
        dump(size, "p1")
        .replace("DUMPING", "FILLING")
        .replace("ld.shared.u32 %r4, [%r5];\n", "")
        .replace(
            "st.global.u32 [%rd3], %r4;", "ld.global.u32 %r4, [%rd3];\nst.shared.u32 [%r5], %r4;"
        )
    )
    # Writes of the CTAs do not overlap: CTA i's part begins at _BULK_BYTES * i.
    apart = f"mul.wide.u32 %rd8, %r7, {size};\nadd.u64 %rd6, %rd6, %rd8;\n"
    return (
        f"{HEADER}{declare(2, 1)}\n{{\n{shared(size)}{REGISTERS}{copy}"
        f"fence.proxy.async;\nbar.sync 0;\n{read}{apart}"
        "mov.u32 %r10, %tid.x;\nsetp.ne.u32 %first, %r10, 0;\n@%first bra LEAVE;\n"
        f"{text} [%rd6], [%r8], %c1;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
        "LEAVE:\nret;\n}\n"
    )


def _bulk() -> Iterator[Case]:
    count = len(_BULK)
    source = make.scrambled(500, 1024).astype(np.uint32)
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    yield Case(
        f"tma/{text}",
        "tma",
        _bulk_ptx(text, True),
        (_BULK, source),
        (np.zeros((count, _BULK_BYTES // 4), np.uint32),),
        (),
        count,
        THREADS,
    )
    forms = [("", "")]
    forms += [
        (f".{name}.{kind}", "")
        for name in ("add", "min", "max", "and", "or", "xor")
        for kind in (("u32", "s32", "u64") if name in ("add", "min", "max") else ("b32", "b64"))
    ]
    forms += [
        (".add.f32", "f32"),
        (".add.noftz.f16", "f16"),
        (".add.noftz.bf16", "bf16"),
        (".min.f16", "f16"),
        (".max.f16", "f16"),
        (".min.bf16", "bf16"),
        (".max.bf16", "bf16"),
    ]
    for form, kind in forms:
        words = {"": lambda s, n: make.integers(32, s, n), "f32": make.floats}.get(
            kind, lambda s, n, kind=kind: make.pairs(kind, s, n)
        )
        yield bulk_case(form, kind, words)


def bulk_case(form: str, kind: str, make_words: Callable[[int, int], np.ndarray]) -> Case:
    """Bulk stores, or reductions of a form (".add.u32"); make_words: words of a seed and a count.

    kind: the format of words that are floats.
    """
    count = len(_BULK)
    tiles = make_words(501, count * _BULK_BYTES // 4).reshape(count, -1)
    initial = make_words(502, tiles.size)
    name = f"cp.{'reduce.' if form else ''}async.bulk.global.shared::cta.bulk_group{form}"
    return Case(
        f"tma/{name}",
        "tma",
        _bulk_ptx(name, False),
        (_BULK, tiles),
        (initial,),
        (),
        count,
        THREADS,
        floats=kind + ("x2" if kind in ("f16", "bf16") else ""),
    )
