"""Cases of tensor memory (PTX ISA 9.7.16), which no Hopper GPU can record.

They are `Probe`s: next to the case stands what its outputs must be, computed in numpy from the
layouts that the PTX ISA draws and from nothing of the simulator. Those of tcgen05.mma are in `mma`.

A CTA has four warps; warp w owns the lanes 32 w .. 32 w + 31 of tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sm100_sim.isa.tensor.descriptors import MatrixDescriptor, encode_matrix

from .. import inputs as make
from ..cases import Case, head
from ..ptx_text import declare
from .tma import FILL, THREADS, dump

HEADER = head((10, 0))
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
LANES = 128


@dataclass(frozen=True)
class Probe:
    """case; expected: its outputs; what: one line for a reader.

    Where outputs depend on chance there is no `expected`: judge says what is wrong with them, or
    nothing, and show what a report should keep of them, as JSON values.
    """

    case: Case
    what: str
    expected: tuple[np.ndarray, ...] | None = None
    judge: Callable[[list[np.ndarray]], str] | None = None
    show: Callable[[list[np.ndarray]], dict] | None = None

    def wrong(self, found: list[np.ndarray]) -> str:
        """Return what is wrong with outputs; "" if nothing is."""
        if self.judge is not None:
            return self.judge(found)
        for number, (mine, wanted) in enumerate(zip(found, self.expected or (), strict=True)):
            bad = np.argwhere(mine != wanted)
            if len(bad):
                at = tuple(bad[0])
                return (
                    f"output {number}, {len(bad)} of {mine.size} words differ, first at "
                    f"{tuple(map(int, at))}: {int(mine[at]):#x}, expected "
                    f"{int(wanted[at]):#x}"
                )
        return ""


def frame(declarations: str, body: str, group: int, columns: int, parameters: int) -> str:
    """A module: allocate `columns` of tensor memory, fill them, do `body`, give them back.

    In the body %taddr is the allocation, %lanes the first lane of the warp in bits 31-16, %thread
    and %warp, %rank the CTA in its pair, %first thread 0 of the CTA, `bar` an mbarrier of count 1.
    """
    cluster = f".reqnctapercluster {group}, 1, 1\n" if group > 1 else ""
    sync = SYNC if group > 1 else "bar.sync 0;\n"
    rank = "mov.u32 %rank, %cluster_ctarank;" if group > 1 else "mov.u32 %rank, 0;"
    fill = "".join(
        f"add.u32 %a, %a, 8;\ntcgen05.st.sync.aligned.32x32b.x8.b32 [%a], {{{', '.join(['%f'] * 8)}"
        "};\n"
        for _ in range(columns // 8)
    )
    return (
        f"{HEADER}{declare(parameters - 1, 1)}\n{cluster}.reqntid {THREADS}, 1, 1\n{{\n"
        ".shared .align 8 .b64 bar;\n.shared .align 4 .b32 slot;\n"
        ".reg .b32 %r<24>, %taddr, %lanes, %thread, %warp, %rank, %a, %f;\n"
        ".reg .b64 %rd<12>, %state, %da, %db;\n"
        f".reg .pred %more, %first, %done, %leads, %sum;\n{declarations}"
        "mov.u32 %thread, %tid.x;\nshr.u32 %warp, %thread, 5;\nsetp.eq.u32 %first, %thread, 0;\n"
        f"{rank}\nshl.b32 %lanes, %warp, 21;\n"
        "@%first mbarrier.init.shared::cta.b64 [bar], 1;\n"
        "fence.mbarrier_init.release.cluster;\n"
        f"{sync}setp.ne.u32 %more, %warp, 0;\n@%more bra ALLOCATED;\nmov.u32 %r1, slot;\n"
        f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1], {columns};\n"
        f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;\n"
        "ALLOCATED:\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
        "tcgen05.fence::after_thread_sync;\nld.shared.u32 %taddr, [slot];\n"
        f"mov.u32 %f, {FILL};\nadd.u32 %a, %taddr, %lanes;\nsub.u32 %a, %a, 8;\n{fill}"
        "tcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.fence::before_thread_sync;\n{sync}tcgen05.fence::after_thread_sync;\n"
        f"{body}"
        f"tcgen05.fence::before_thread_sync;\n{sync}tcgen05.fence::after_thread_sync;\n"
        "setp.ne.u32 %more, %warp, 0;\n@%more bra FREED;\n"
        f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %taddr, {columns};\n"
        "FREED:\nret;\n}\n"
    )


def to_shared(size: int, parameter: str, base: str, label: str) -> str:
    """All threads: copy row %ctaid.x of a buffer to `size` bytes of shared memory."""
    text = dump(size, parameter, base).replace("DUMPING", label)
    return text.replace("ld.shared.u32 %r4, [%r5];\n", "").replace(
        "st.global.u32 [%rd3], %r4;", "ld.global.u32 %r4, [%rd3];\nst.shared.u32 [%r5], %r4;"
    )


def registers(name: str, count: int) -> str:
    """{%name0, %name1, ...}"""
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def dump_columns(columns: int, parameter: str) -> str:
    """All threads: word (ctaid, lane, column) of a buffer := tensor memory."""
    lines = [
        f"ld.param.u64 %rd1, [{parameter}];\nmov.u32 %r1, %ctaid.x;\n"
        f"mad.lo.u32 %r1, %r1, {THREADS}, %thread;\nmul.wide.u32 %rd2, %r1, {4 * columns};\n"
        "add.u64 %rd1, %rd1, %rd2;\nadd.u32 %a, %taddr, %lanes;\n"
    ]
    for first in range(0, columns, 8):
        words = registers("r", 16).strip("{}").split(", ")[8:]
        lines.append(
            f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{', '.join(words)}}}, [%a];\n"
            "tcgen05.wait::ld.sync.aligned;\nadd.u32 %a, %a, 8;\n"
            f"st.global.v4.u32 [%rd1+{4 * first}], {{{', '.join(words[:4])}}};\n"
            f"st.global.v4.u32 [%rd1+{4 * first + 16}], {{{', '.join(words[4:])}}};\n"
        )
    return "".join(lines)


def await_barrier(label: str) -> str:
    """All threads wait for phase 0 of `bar`."""
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0;\n"
        f"@!%done bra {label};\ntcgen05.fence::after_thread_sync;\n"
    )


# ---------------------------------------------------------------- tcgen05.ld and tcgen05.st

#: Shape -> (registers a repetition, lane and column of register r of thread t), as the PTX ISA
#: draws the fragments.
_FRAGMENTS: dict[str, tuple[int, Callable]] = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r)),
    "16x128b": (2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
}
_COLUMNS = 64


def _fragment(shape: str, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (lane, column), each (32 threads, registers)."""
    per, place = _FRAGMENTS[shape]
    t, r = np.meshgrid(np.arange(32), np.arange(per * repeat), indexing="ij")
    lane, column = (np.broadcast_to(x, t.shape) for x in place(t, r))
    return lane, column


def _repeats(shape: str) -> tuple[int, ...]:
    return {"32x32b": (1, 2, 16, 32, 64), "16x64b": (1, 4, 32), "16x128b": (1, 4, 16),
            "16x256b": (1, 2, 8)}[shape]  # fmt: skip


def _row_text(width: int) -> str:
    """%rd1 := row of this thread in p0."""
    return (
        "ld.param.u64 %rd1, [p0];\n"
        f"mul.wide.u32 %rd2, %thread, {4 * width};\nadd.u64 %rd1, %rd1, %rd2;\n"
    )


def _load(shape: str, repeat: int) -> Probe:
    """Cell (lane, column) holds lane << 16 | column; every register says what it got."""
    count = _FRAGMENTS[shape][0] * repeat
    number = "".join(
        f"mov.u32 %w{i}, {i};\nshl.b32 %r1, %thread, 16;\nor.b32 %w{i}, %w{i}, %r1;\n"
        for i in range(_COLUMNS)
    )
    stores = "".join(f"st.global.u32 [%rd1+{4 * i}], %v{i};\n" for i in range(count))
    body = (
        f"{number}add.u32 %a, %taddr, %lanes;\n"
        f"tcgen05.st.sync.aligned.32x32b.x{_COLUMNS}.b32 [%a], {registers('w', _COLUMNS)};\n"
        "tcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers('v', count)}, [%a];\n"
        f"tcgen05.wait::ld.sync.aligned;\n{_row_text(count)}{stores}"
    )
    ptx = frame(f".reg .b32 %w<{_COLUMNS}>, %v<{count}>;\n", body, 1, _COLUMNS, 1)
    lane, column = _fragment(shape, repeat)
    warps = [(lane + 32 * w) << 16 | column for w in range(4)]
    expected = np.concatenate(warps).astype(np.uint32)
    case = Case(f"tcgen05/ld {shape} x{repeat}", "tcgen05", ptx, (), (np.zeros_like(expected),),
                block=THREADS)  # fmt: skip
    return Probe(case, "which lane and column each register of each thread gets", (expected,))


def _store(shape: str, repeat: int) -> Probe:
    """Register r of thread t is t << 16 | r; tensor memory is then read lane by lane."""
    count = _FRAGMENTS[shape][0] * repeat
    number = "".join(
        f"mov.u32 %v{i}, {i};\nshl.b32 %r1, %thread, 16;\nor.b32 %v{i}, %v{i}, %r1;\n"
        for i in range(count)
    )
    body = (
        f"{number}add.u32 %a, %taddr, %lanes;\n"
        f"tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%a], {registers('v', count)};\n"
        f"tcgen05.wait::st.sync.aligned;\n{dump_columns(_COLUMNS, 'p0')}"
    )
    ptx = frame(f".reg .b32 %v<{count}>;\n", body, 1, _COLUMNS, 1)
    lane, column = _fragment(shape, repeat)
    expected = np.full((LANES, _COLUMNS), FILL, np.uint32)
    t, r = np.meshgrid(np.arange(32), np.arange(count), indexing="ij")
    for w in range(4):
        expected[lane + 32 * w, column] = (t + 32 * w) << 16 | r
    case = Case(f"tcgen05/st {shape} x{repeat}", "tcgen05", ptx, (), (np.zeros_like(expected),),
                block=THREADS)  # fmt: skip
    return Probe(case, "which lane and column each register of each thread goes to", (expected,))


# ---------------------------------------------------------------- tcgen05.cp

#: Shape and multicast -> (row of the source for each lane, or -1; bytes of a row).
_COPIES: dict[str, tuple[Callable[[int], int], int]] = {
    "128x256b": (lambda lane: lane, 32),
    "128x128b": (lambda lane: lane, 16),
    "4x256b": (lambda lane: lane // 32 if lane % 32 == 0 else -1, 32),
    "64x128b.warpx2::02_13": (lambda lane: lane % 64, 16),
    "64x128b.warpx2::01_23": (lambda lane: lane // 64 * 32 + lane % 32, 16),
    "32x128b.warpx4": (lambda lane: lane % 32, 16),
}


#: Source format of a copy that decompresses -> (bits of an element, its first one in a byte).
_SOURCES = {"b4x16_p64": (4, 2), "b6x16_p32": (6, 0)}


def _decompressed(words: np.ndarray, source: str) -> np.ndarray:
    """Return 16-byte units, uint32 (..., 4), with an element of a source format in each byte."""
    width, first = _SOURCES[source]
    packed = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[..., : 16 * width]
    spread = np.zeros((*words.shape[:-1], 16, 8), np.uint8)
    spread[..., first : first + width] = packed.reshape(*words.shape[:-1], 16, width)
    return np.packbits(spread, axis=-1, bitorder="little")[..., 0].view(np.uint32)


def _copy(shape: str, source: str = "") -> Probe:
    """Shared memory to tensor memory: the source has no swizzle, 8 rows of 16 bytes together.
    source: its format, of a copy that decompresses."""
    row_of, width = _COPIES[shape]
    form = f"{shape}.b8x16.{source}" if source else shape
    size, columns = LANES * 32, 32
    # Core matrices of 8 x 16 bytes: the second 16 bytes of the rows lie 2 KiB further.
    raw = encode_matrix(MatrixDescriptor(0, 2048, 128, 0))
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
    body = (
        f"{to_shared(size, 'p0', 'a', 'COPY_A')}fence.proxy.async;\nbar.sync 0;\n"
        "@!%first bra ISSUED;\nmov.u32 %r1, a;\nshr.u32 %r1, %r1, 4;\n"
        f"cvt.u64.u32 %da, %r1;\nor.b64 %da, %da, {raw:#x};\n"
        f"tcgen05.cp.cta_group::1.{form} [%taddr], %da;\n{commit}ISSUED:\n"
        f"{await_barrier('WAITING')}{dump_columns(columns, 'p1')}"
    )
    ptx = frame(f".shared .align 1024 .b8 a[{size}];\n", body, 1, columns, 2)
    words = np.arange(size // 4, dtype=np.uint32) + np.uint32(0x5000)
    if source:
        words = make.scrambled(600, size // 4).astype(np.uint32)
    # (half of a row, row, word)
    rows = words.reshape(2, LANES, 4)
    rows = _decompressed(rows, source) if source else rows
    expected = np.full((LANES, columns), FILL, np.uint32)
    for lane in range(LANES):
        row = row_of(lane)
        if row >= 0:
            for half in range(width // 16):
                expected[lane, 4 * half : 4 * half + 4] = rows[half, row]
    case = Case(f"tcgen05/cp {form}", "tcgen05", ptx, (words,), (np.zeros_like(expected),),
                block=THREADS)  # fmt: skip
    return Probe(case, "which bytes of shared memory each lane and column gets", (expected,))


def probes() -> Iterator[Probe]:
    """All of this module."""
    for shape in _FRAGMENTS:
        for repeat in _repeats(shape):
            yield _load(shape, repeat)
            yield _store(shape, repeat)
    for shape in _COPIES:
        yield _copy(shape)
        for source in _SOURCES:
            yield _copy(shape, source)
