"""Cases of tcgen05 and tensor memory (PTX ISA 9.7.16), which no Hopper GPU can record.

They are `Probe`s: next to the case stands what its outputs must be, computed in numpy from the
layouts that the PTX ISA draws and from nothing of the simulator. Operands are integers so small
that every sum is exact, so results compare bit for bit.

A CTA has four warps; warp w owns the lanes 32 w .. 32 w + 31 of tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sm100_sim.isa.tensor.descriptors import (
    KINDS,
    InstructionDescriptor,
    MatrixDescriptor,
    encode_instruction,
    encode_matrix,
)

from .. import inputs as make
from ..cases import Case
from ..ptx_text import declare
from .tma import FILL, THREADS, dump

HEADER = ".version 8.6\n.target sm_100a\n.address_size 64\n"
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
#: K of a case: four instructions of 16, one swizzle atom of 128 bytes.
K, SLICE = 64, 16
LANES = 128
_ROW_BYTES = 128


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


# ---------------------------------------------------------------- tcgen05.mma


@dataclass(frozen=True)
class Product:
    """One shape: group, M (of the pair) and N; dtype; where A lies ("k", "mn": in shared memory,
    K-major or M-major; "tmem"); whether B is N-major."""

    group: int
    m: int
    n: int
    dtype: str = "bf16"
    a: str = "k"
    b_mn: bool = False

    @property
    def name(self) -> str:
        b = "mn" if self.b_mn else "k"
        return f"mma {self.dtype} {self.m}x{self.n} group {self.group} A {self.a} B {b}"

    @property
    def rows(self) -> int:
        """Rows of A and, from there, lanes that a CTA holds."""
        return self.m // self.group

    @property
    def columns(self) -> int:
        """Columns of tensor memory that D takes in a CTA."""
        return self.n // 2 if (self.group, self.m) == (2, 128) else self.n


#: The kernels' shapes: pairs, M = 256 and 128, bf16 and f16, either major, P as A in tensor memory;
#: and those of one CTA that the layouts of the pairs are made of.
PRODUCTS = (
    *(Product(2, 256, n, a=a, b_mn=b) for n in (128, 256) for a in ("k", "tmem")
      for b in (False, True)),
    *(Product(2, m, 128, a="mn", b_mn=b) for m in (128, 256) for b in (False, True)),
    *(Product(2, 128, n, b_mn=b) for n in (128, 256) for b in (False, True)), Product(2, 128, 64),
    Product(2, 256, 128, "f16"), Product(2, 256, 256, "f16", "tmem", True),
    Product(2, 128, 128, "f16", "mn", True),
    *(Product(1, m, n) for m in (64, 128) for n in (64, 128)),
    Product(1, 128, 128, a="tmem", b_mn=True), Product(1, 128, 64, "f16", "mn", True),
)  # fmt: skip


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """uint16 patterns of small integers."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _packed(values: np.ndarray, dtype: str, mn_major: bool) -> np.ndarray:
    """uint16 of an operand (rows, K = 64) in shared memory with the 128-byte swizzle.

    K-major: row r is 128 bytes at 128 r. Major in the rows: 64 rows are 128 bytes; eight k of them
    an atom of 1 KiB, the next 64 rows' atoms 2 KiB further, each slice of 16 k its own block.
    """
    rows = len(values)
    r, k = np.meshgrid(np.arange(rows), np.arange(K), indexing="ij")
    if mn_major:
        groups = -(-rows // 64)
        place = k // SLICE * groups * 2048 + r // 64 * 2048 + k % SLICE // 8 * 1024
        place = place + k % 8 * _ROW_BYTES + r % 64 * 2
    else:
        place = r * _ROW_BYTES + k * 2
    # Bits 4-6 of the address change by bits 7-9; what is packed starts on 1 KiB.
    place = place ^ (place >> 3 & 0x70)
    memory = np.zeros(rows * K, np.uint16)
    memory[place // 2] = _bits(values, dtype)
    return memory


def _descriptor(mn_major: bool, rows: int) -> tuple[int, int]:
    """Return (matrix descriptor but for its address, 16-byte units from a slice of K to the
    next)."""
    if not mn_major:
        return encode_matrix(MatrixDescriptor(0, 16, 1024, 128)), SLICE * 2 // 16
    groups = -(-rows // 64)
    return encode_matrix(MatrixDescriptor(0, 2048, 1024, 128)), groups * 2048 // 16


def _issue(p: Product) -> str:
    """Thread 0 of the pair's first CTA: four products and a commit to the barriers of all."""
    types = InstructionDescriptor(KINDS["f16"], p.m, p.n, p.dtype, p.dtype, "f32", False, False,
                                  p.a == "mn", p.b_mn)  # fmt: skip
    a_raw, a_step = _descriptor(p.a == "mn", p.rows)
    b_raw, b_step = _descriptor(p.b_mn, p.n // p.group)
    a = "[%r21]" if p.a == "tmem" else "%da"
    a_next = (
        f"add.u32 %r21, %r21, {SLICE // 2};\n"
        if p.a == "tmem"
        else f"add.u64 %da, %da, {a_step};\n"
    )
    lines = [
        "setp.ne.u32 %more, %thread, 0;\n@%more bra ISSUED;\nsetp.ne.u32 %more, %rank, 0;\n"
        "@%more bra ISSUED;\n",
        *(f"mov.u32 %r1, {name};\nshr.u32 %r1, %r1, 4;\nand.b32 %r1, %r1, 0x3FFF;\n"
          f"cvt.u64.u32 %d{name}, %r1;\nor.b64 %d{name}, %d{name}, {raw:#x};\n"
          for name, raw in (("a", a_raw), ("b", b_raw))),
        f"add.u32 %r21, %taddr, {p.columns};\nmov.u32 %r20, {encode_instruction(types):#x};\n"
        "setp.ne.u32 %sum, %rank, 0;\n",
    ]  # fmt: skip
    for _ in range(K // SLICE):
        lines.append(
            f"tcgen05.mma.cta_group::{p.group}.kind::f16 [%taddr], {a}, %db, %r20, %sum;\n"
            f"setp.eq.u32 %sum, %rank, 0;\n{a_next}add.u64 %db, %db, {b_step};\n"
        )
    commit = f"tcgen05.commit.cta_group::{p.group}.mbarrier::arrive::one.shared::cluster"
    if p.group == 2:
        lines.append(f"mov.b16 %mask, 3;\n{commit}.multicast::cluster.b64 [bar], %mask;\nISSUED:\n")
    else:
        lines.append(f"{commit}.b64 [bar];\nISSUED:\n")
    return "".join(lines)


def _a_to_tmem(columns: int) -> str:
    """All threads: lane := row of p0, two elements of K to a column, behind the columns of D."""
    words = registers("w", K // 2)
    loads = "".join(f"ld.global.u32 %w{i}, [%rd1+{4 * i}];\n" for i in range(K // 2))
    return (
        "ld.param.u64 %rd1, [p0];\nmov.u32 %r1, %ctaid.x;\n"
        f"mad.lo.u32 %r1, %r1, {THREADS}, %thread;\nmul.wide.u32 %rd2, %r1, {2 * K};\n"
        f"add.u64 %rd1, %rd1, %rd2;\n{loads}add.u32 %a, %taddr, %lanes;\n"
        f"add.u32 %a, %a, {columns};\n"
        f"tcgen05.st.sync.aligned.32x32b.x{K // 2}.b32 [%a], {words};\n"
        "tcgen05.wait::st.sync.aligned;\n"
    )


def _mma_ptx(p: Product) -> str:
    a_bytes, b_bytes = p.rows * K * 2, p.n // p.group * K * 2
    columns = next(
        c for c in (32, 64, 128, 256, 512) if c >= p.columns + (K // 2 if p.a == "tmem" else 0)
    )
    sync = SYNC if p.group == 2 else "bar.sync 0;\n"
    shared = f".shared .align 1024 .b8 b[{b_bytes}];\n.reg .b32 %w<{K // 2}>;\n.reg .b16 %mask;\n"
    if p.a == "tmem":
        # The descriptor of A is computed all the same; it needs a name.
        shared += ".shared .align 1024 .b8 a[1024];\n"
        operands = _a_to_tmem(p.columns)
    else:
        shared += f".shared .align 1024 .b8 a[{a_bytes}];\n"
        operands = to_shared(a_bytes, "p0", "a", "COPY_A")
    body = (
        f"{operands}{to_shared(b_bytes, 'p1', 'b', 'COPY_B')}fence.proxy.async;\n"
        f"tcgen05.fence::before_thread_sync;\n{sync}tcgen05.fence::after_thread_sync;\n"
        f"{_issue(p)}{await_barrier('WAITING')}{dump_columns(p.columns, 'p2')}"
    )
    return frame(shared, body, p.group, columns, 3)


def _cell(p: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (CTA, lane, column) of every element of D (PTX ISA 9.7.16.10.5, data-path layouts)."""
    row, column = np.meshgrid(np.arange(p.m), np.arange(p.n), indexing="ij")
    cta, lane = row // p.rows, row % p.rows
    if (p.group, p.m) == (1, 64):
        lane = row % 16 + row // 16 * 32
    if (p.group, p.m) == (2, 128):
        lane, column = lane + 64 * (column // (p.n // 2)), column % (p.n // 2)
    return cta, lane, column


def _small(seed: int, rows: int) -> np.ndarray:
    """Integers -4 .. 4, float32 (rows, K)."""
    picks = make.scrambled(seed, rows * K) % np.uint64(9)
    return picks.astype(np.float32).reshape(rows, K) - 4


def _mma(p: Product, number: int) -> Probe:
    a, b = _small(700 + number, p.m), _small(800 + number, p.n)
    per_cta = p.n // p.group
    if p.a == "tmem":
        halves = _bits(a, p.dtype)
        a_memory = halves.reshape(p.group, LANES, K)
    else:
        parts = [
            _packed(a[i * p.rows : (i + 1) * p.rows], p.dtype, p.a == "mn") for i in range(p.group)
        ]
        a_memory = np.stack(parts)
    b_memory = np.stack(
        [_packed(b[i * per_cta : (i + 1) * per_cta], p.dtype, p.b_mn) for i in range(p.group)]
    )
    words = np.full((p.group, LANES, p.columns), FILL, np.uint32)
    words[_cell(p)] = (a @ b.T).astype(np.float32).view(np.uint32)
    case = Case(
        f"tcgen05/{p.name}", "tcgen05", _mma_ptx(p),
        (np.ascontiguousarray(a_memory).view(np.uint32), b_memory.view(np.uint32)),
        (np.zeros_like(words),), (), p.group, THREADS, p.group,
    )  # fmt: skip
    return Probe(
        case, "D = A B^T of small integers against numpy, lanes beside it untouched", (words,)
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


def _copy(shape: str) -> Probe:
    """Shared memory to tensor memory: the source has no swizzle, 8 rows of 16 bytes together."""
    row_of, width = _COPIES[shape]
    size, columns = LANES * 32, 32
    # Core matrices of 8 x 16 bytes: the second 16 bytes of the rows lie 2 KiB further.
    raw = encode_matrix(MatrixDescriptor(0, 2048, 128, 0))
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
    body = (
        f"{to_shared(size, 'p0', 'a', 'COPY_A')}fence.proxy.async;\nbar.sync 0;\n"
        "@!%first bra ISSUED;\nmov.u32 %r1, a;\nshr.u32 %r1, %r1, 4;\n"
        f"cvt.u64.u32 %da, %r1;\nor.b64 %da, %da, {raw:#x};\n"
        f"tcgen05.cp.cta_group::1.{shape} [%taddr], %da;\n{commit}ISSUED:\n"
        f"{await_barrier('WAITING')}{dump_columns(columns, 'p1')}"
    )
    ptx = frame(f".shared .align 1024 .b8 a[{size}];\n", body, 1, columns, 2)
    source = np.arange(size // 4, dtype=np.uint32) + np.uint32(0x5000)
    # (half of a row, row, word)
    rows = source.reshape(2, LANES, 4)
    expected = np.full((LANES, columns), FILL, np.uint32)
    for lane in range(LANES):
        row = row_of(lane)
        if row >= 0:
            for half in range(width // 16):
                expected[lane, 4 * half : 4 * half + 4] = rows[half, row]
    case = Case(f"tcgen05/cp {shape}", "tcgen05", ptx, (source,), (np.zeros_like(expected),),
                block=THREADS)  # fmt: skip
    return Probe(case, "which bytes of shared memory each lane and column gets", (expected,))


def probes() -> Iterator[Probe]:
    """All of this module."""
    for number, product in enumerate(PRODUCTS):
        yield _mma(product, number)
    for shape in _FRAGMENTS:
        for repeat in _repeats(shape):
            yield _load(shape, repeat)
            yield _store(shape, repeat)
    for shape in _COPIES:
        yield _copy(shape)
