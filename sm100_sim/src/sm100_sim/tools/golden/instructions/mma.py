"""Cases of tcgen05.mma (PTX ISA 9.7.16.10), which no Hopper GPU can record.

Operands are integers so small that every sum is exact, so results compare bit for bit. K of a case
is 128 bytes: four instructions of 32 bytes, one row of the 128-byte swizzle.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from .tcgen05 import LANES, SYNC, Probe, await_barrier, dump_columns, frame, registers, to_shared
from .tma import FILL, THREADS

K_BYTES, SLICE_BYTES, SLICES = 128, 32, 4
#: Columns of tensor memory that K of A takes, four bytes each.
A_COLUMNS = K_BYTES // 4
_ROW_BYTES = 128
#: Scales of 128 rows, four bytes each.
_ATOM_BYTES = 512
_WIDTH = {"bf16": 2, "f16": 2, "e4m3": 1}


@dataclass(frozen=True)
class Product:
    """One form: group, M (of the pair) and N; dtype; where A lies ("k", "mn": in shared memory,
    K-major or M-major; "tmem"); whether B is N-major. plain: operands in shared memory without a
    swizzle, "a" and "b". negate: A is negated. scaled: kind::mxf8f6f4, with an E8M0 scale for each
    32 elements of K, copied to tensor memory by tcgen05.cp."""

    group: int
    m: int
    n: int
    dtype: str = "bf16"
    a: str = "k"
    b_mn: bool = False
    plain: str = ""
    negate: bool = False
    scaled: bool = False

    @property
    def name(self) -> str:
        majors = ("A", self.a), ("B", "mn" if self.b_mn else "k")
        operands = (f"{x} {where}{' plain' * (x.lower() in self.plain)}" for x, where in majors)
        shape = f"{self.dtype}{' scaled' * self.scaled} {self.m}x{self.n} group {self.group}"
        return f"mma {shape} {' '.join(operands)}{' negated' * self.negate}"

    @property
    def rows(self) -> int:
        """Rows of A and, from there, lanes that a CTA holds."""
        return self.m // self.group

    @property
    def columns(self) -> int:
        """Columns of tensor memory that D takes in a CTA."""
        return self.n // 2 if (self.group, self.m) == (2, 128) else self.n

    @property
    def a_column(self) -> int:
        """Column of tensor memory at which A begins: behind those that a case reads back."""
        return dumped(self.columns)

    @property
    def k(self) -> int:
        return K_BYTES // _WIDTH[self.dtype]

    @property
    def kind(self) -> str:
        if self.scaled:
            return "mxf8f6f4"
        return "f8f6f4" if self.dtype == "e4m3" else "f16"

    @property
    def scale_atoms(self) -> int:
        """Atoms of scales of a CTA: of its rows of A, and of all of B."""
        return 1 + self.n // LANES if self.scaled else 0

    def instruction_descriptor(self, number: int = 0) -> int:
        """Return the instruction descriptor of a slice of K, which names the byte of its scales."""
        scales = ("ue8m0", number, number, SLICE_BYTES) if self.scaled else ()
        return encode_instruction(
            InstructionDescriptor(
                KINDS[self.kind], self.m, self.n, self.dtype, self.dtype, "f32", self.negate,
                False, self.a == "mn", self.b_mn, False, *scales,
            )
        )  # fmt: skip


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
    # dS of `backward_products` has no swizzle, reduced over queries and over keys; A of the wide
    # pair is loaded in two halves.
    *(Product(2, m, 256, a=a, b_mn=True, plain="a") for m in (128, 256) for a in ("k", "mn")),
    # Either operand without a swizzle, in either major.
    Product(1, 128, 64, plain="b"), Product(1, 128, 64, b_mn=True, plain="b"),
    Product(1, 128, 64, plain="ab"), Product(1, 128, 64, a="mn", b_mn=True, plain="ab"),
    # Decode: few rows as N, V major in its columns, P without a swizzle.
    *(Product(1, 128, n) for n in (16, 32)),
    *(Product(1, 128, n, a="mn", b_mn=True, plain="b") for n in (16, 32, 64)),
    *(Product(1, 128, n, "e4m3") for n in (32, 64, 128)),
    *(Product(1, 128, n, "e4m3", "mn", True, "b") for n in (32, 64, 128)),
    # The forward of e4m3: P in tensor memory, V major in its columns.
    Product(2, 256, 128, "e4m3"), Product(2, 256, 256, "e4m3", "tmem", True),
    # The forward of mxfp8, and a form of one CTA that its layouts of scales are made of.
    Product(1, 128, 128, "e4m3", scaled=True), Product(2, 256, 128, "e4m3", scaled=True),
    Product(2, 256, 256, "e4m3", "tmem", True, scaled=True),
    # Negative scales of scores.
    Product(1, 128, 32, negate=True), Product(1, 128, 32, "e4m3", negate=True),
    *(Product(2, m, 128, negate=True) for m in (128, 256)),
    Product(2, 256, 128, "e4m3", negate=True, scaled=True),
    # Decode over NVFP4: K and V in tensor memory.
    *(Product(1, 128, n, "f16", "tmem") for n in (16, 32, 64)),
    *(Product(1, 128, n, "f16", "tmem", True, "b") for n in (16, 32, 64)),
)  # fmt: skip


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bit patterns of small integers in a dtype."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "e4m3":
        # 1 is 0x38, 2 0x40, 3 0x44, 4 0x48; eight exponents of eight steps each.
        sizes = np.array([0, 0x38, 0x40, 0x44, 0x48], np.uint8)[np.abs(values).astype(int)]
        return sizes | np.where(values < 0, 0x80, 0).astype(np.uint8)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Image:
    """An operand of (rows, K) in shared memory. place: byte of each element. size: bytes. raw: the
    matrix descriptor but for its address. step: 16-byte units from a slice of K to the next."""

    place: np.ndarray
    size: int
    raw: int
    step: int

    @classmethod
    def swizzled(cls, rows: int, width: int, mn_major: bool) -> Image:
        """Return an image with the 128-byte swizzle.

        K-major: row r is 128 bytes at 128 r. M- or N-major: a run is 128 bytes of rows, and the
        runs of eight k make an atom of 1 KiB. The atoms of a slice of K follow each other, then
        come those of the next rows; each slice is a block.
        """
        r, k = np.meshgrid(np.arange(rows), np.arange(K_BYTES // width), indexing="ij")
        if mn_major:
            run, of_slice = _ROW_BYTES // width, SLICE_BYTES // width
            atoms, runs = of_slice // 8 * 1024, -(-rows // run)
            place = k // of_slice * (runs * atoms) + r // run * atoms + k % of_slice // 8 * 1024
            place = place + k % 8 * _ROW_BYTES + r % run * width
            raw = encode_matrix(MatrixDescriptor(0, atoms, 1024, 128))
            size, step = SLICES * runs * atoms, runs * atoms // 16
        else:
            place = r * _ROW_BYTES + k * width
            raw = encode_matrix(MatrixDescriptor(0, 16, 1024, 128))
            size, step = rows * K_BYTES, SLICE_BYTES // 16
        # Bits 4-6 of the address change by bits 7-9; an image starts on 1 KiB.
        return cls(place ^ (place >> 3 & 0x70), size, raw, step)

    @classmethod
    def plain(cls, rows: int, width: int, mn_major: bool) -> Image:
        """Return an image without a swizzle, in core matrices of 8 x 16 bytes.

        K-major: the core matrices of the next 8 rows come first. M- or N-major: those of the next
        8 k come first.
        """
        r, k = np.meshgrid(np.arange(rows), np.arange(K_BYTES // width), indexing="ij")
        run = 16 // width
        if mn_major:
            ahead, across = 128, K_BYTES // width // 8 * 128
            place = k // 8 * ahead + r // run * across + k % 8 * 16 + r % run * width
            step = SLICE_BYTES // width // 8 * ahead // 16
        else:
            ahead, across = rows // 8 * 128, 128
            place = k // run * ahead + r // 8 * across + r % 8 * 16 + k % run * width
            step = 2 * ahead // 16
        raw = encode_matrix(MatrixDescriptor(0, ahead, across, 0))
        return cls(place, rows * K_BYTES, raw, step)

    def bytes(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return the bytes of an operand (rows, K)."""
        memory = np.zeros(self.size, np.uint8)
        width = _WIDTH[dtype]
        memory.view(f"u{width}")[self.place // width] = _bits(values, dtype)
        return memory


def _image(p: Product, which: str) -> Image:
    """Return the image of a CTA's part of operand "a" or "b"."""
    rows, major = (p.rows, p.a == "mn") if which == "a" else (p.n // p.group, p.b_mn)
    layout = Image.plain if which in p.plain else Image.swizzled
    return layout(rows, _WIDTH[p.dtype], major)


def _address(name: str, buffer: str, raw: int) -> str:
    """Return PTX that puts the descriptor of a buffer into %d<name>."""
    return (
        f"mov.u32 %r1, {buffer};\nshr.u32 %r1, %r1, 4;\nand.b32 %r1, %r1, 0x3FFF;\n"
        f"cvt.u64.u32 %d{name}, %r1;\nor.b64 %d{name}, %d{name}, {raw:#x};\n"
    )


def _chain(p: Product, steps: tuple[int, int], result: str = "%taddr", adds: bool = False) -> str:
    """Four instructions: A at [%r21] or %da, B at %db, which move by `steps`; the first one adds to
    the result if `adds`."""
    a = "[%r21]" if p.a == "tmem" else "%da"
    a_next = (
        f"add.u32 %r21, %r21, {SLICE_BYTES // 4};\n"
        if p.a == "tmem"
        else f"add.u64 %da, %da, {steps[0]};\n"
    )
    lines = [f"setp.{'eq' if adds else 'ne'}.u32 %sum, %rank, 0;\n"]
    kind = f"{p.kind}.block_scale.block32" if p.scaled else p.kind
    for number in range(SLICES):
        scales = ""
        if p.scaled:
            places = (number << 30 | first for first in _scale_columns(p))
            for name, place in zip(("%r18", "%r19"), places, strict=True):
                lines.append(f"add.u32 {name}, %taddr, {place:#x};\n")
            scales = "[%r18], [%r19], "
        lines.append(
            f"mov.u32 %r20, {p.instruction_descriptor(number):#x};\n"
            f"tcgen05.mma.cta_group::{p.group}.kind::{kind} [{result}], {a}, %db, %r20, {scales}"
            "%sum;\n"
            f"setp.eq.u32 %sum, %rank, 0;\n{a_next}add.u64 %db, %db, {steps[1]};\n"
        )
    return "".join(lines)


def _issued(group: int, chains: str) -> str:
    """Return PTX: thread 0 of the pair's first CTA issues MMAs and commits; all threads wait."""
    leaders = (
        "setp.ne.u32 %more, %thread, 0;\n@%more bra ISSUED;\nsetp.ne.u32 %more, %rank, 0;\n"
        "@%more bra ISSUED;\n"
    )
    commit = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    signal = f"{commit}.b64 [bar];\n"
    if group == 2:
        signal = f"mov.b16 %mask, 3;\n{commit}.multicast::cluster.b64 [bar], %mask;\n"
    return f"{leaders}{chains}{signal}ISSUED:\n{await_barrier('WAITING')}"


def _scale_columns(p: Product) -> tuple[int, int]:
    """Return the first columns of the scales of A and of B: behind D and A."""
    first = p.a_column + A_COLUMNS if p.a == "tmem" else p.columns
    return first, first + 4


def _copies(p: Product) -> str:
    """Return PTX that copies scales to tensor memory, in atoms of 32 rows of 16 bytes."""
    raw = encode_matrix(MatrixDescriptor(0, 16, 128, 0))
    lines = [_address("a", "s", raw)]
    for atom in range(p.scale_atoms):
        lines.append(
            f"add.u32 %r1, %taddr, {_scale_columns(p)[0] + 4 * atom};\n"
            f"tcgen05.cp.cta_group::{p.group}.32x128b.warpx4 [%r1], %da;\n"
            f"add.u64 %da, %da, {_ATOM_BYTES // 16};\n"
        )
    return "".join(lines)


def _issue(p: Product, a: Image, b: Image) -> str:
    copies = _copies(p) if p.scaled else ""
    addresses = copies + _address("a", "a", a.raw) + _address("b", "b", b.raw)
    start = f"{addresses}add.u32 %r21, %taddr, {p.a_column};\n"
    return _issued(p.group, start + _chain(p, (a.step, b.step)))


def _a_to_tmem(columns: int) -> str:
    """Return PTX that stores A behind the columns of D: a row per lane, four bytes per column."""
    words = registers("w", A_COLUMNS)
    loads = "".join(f"ld.global.u32 %w{i}, [%rd1+{4 * i}];\n" for i in range(A_COLUMNS))
    return (
        "ld.param.u64 %rd1, [p0];\nmov.u32 %r1, %ctaid.x;\n"
        f"mad.lo.u32 %r1, %r1, {THREADS}, %thread;\nmul.wide.u32 %rd2, %r1, {K_BYTES};\n"
        f"add.u64 %rd1, %rd1, %rd2;\n{loads}add.u32 %a, %taddr, %lanes;\n"
        f"add.u32 %a, %a, {columns};\n"
        f"tcgen05.st.sync.aligned.32x32b.x{A_COLUMNS}.b32 [%a], {words};\n"
        "tcgen05.wait::st.sync.aligned;\n"
    )


def _mma_ptx(p: Product, a: Image, b: Image) -> str:
    needed = _scale_columns(p)[0] + 4 * p.scale_atoms
    sync = SYNC if p.group == 2 else "bar.sync 0;\n"
    # The descriptor of A is computed even if it lies in tensor memory; it needs a name.
    a_bytes = 1024 if p.a == "tmem" else a.size
    shared = (
        f".shared .align 1024 .b8 b[{b.size}];\n.shared .align 1024 .b8 a[{a_bytes}];\n"
        f".reg .b32 %w<{A_COLUMNS}>;\n.reg .b16 %mask;\n"
    )
    scales, out = "", "p2"
    if p.scaled:
        size, out = p.scale_atoms * _ATOM_BYTES, "p3"
        shared += f".shared .align 1024 .b8 s[{size}];\n"
        scales = to_shared(size, "p2", "s", "COPY_S")
    operand = _a_to_tmem(p.a_column) if p.a == "tmem" else to_shared(a.size, "p0", "a", "COPY_A")
    body = (
        f"{operand}{to_shared(b.size, 'p1', 'b', 'COPY_B')}{scales}fence.proxy.async;\n"
        f"tcgen05.fence::before_thread_sync;\n{sync}tcgen05.fence::after_thread_sync;\n"
        f"{_issue(p, a, b)}{dump_columns(dumped(p.columns), out)}"
    )
    return frame(shared, body, p.group, allocated(needed), 3 + p.scaled)


def allocated(columns: int) -> int:
    """Return the columns that tcgen05.alloc has for so many."""
    return next(count for count in (32, 64, 128, 256, 512) if count >= columns)


def dumped(columns: int) -> int:
    """Return the columns that a case reads back: at least 32, so that neighbours are seen."""
    return max(columns, 32)


def _cell(p: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (CTA, lane, column) of every element of D (PTX ISA 9.7.16.10.5, data-path layouts)."""
    row, column = np.meshgrid(np.arange(p.m), np.arange(p.n), indexing="ij")
    cta, lane = row // p.rows, row % p.rows
    if (p.group, p.m) == (1, 64):
        lane = row % 16 + row // 16 * 32
    if (p.group, p.m) == (2, 128):
        lane, column = lane + 64 * (column // (p.n // 2)), column % (p.n // 2)
    return cta, lane, column


def _small(seed: int, rows: int, k: int) -> np.ndarray:
    """Return random integers -4 to 4, float32 (rows, k)."""
    picks = make.scrambled(seed, rows * k) % np.uint64(9)
    return picks.astype(np.float32).reshape(rows, k) - 4


def _parts(p: Product, which: str, values: np.ndarray) -> np.ndarray:
    """Return each CTA's rows of an operand as in its shared memory, uint32 (CTA, words)."""
    image = _image(p, which)
    parts = [image.bytes(rows, p.dtype) for rows in np.split(values, p.group)]
    return np.stack(parts).view(np.uint32)


def _scales_of(seed: int, rows: int) -> np.ndarray:
    """Return random E8M0 codes of 1/2 to 4, uint8 (rows, slices), for which sums are exact."""
    picks = make.scrambled(seed, rows * SLICES) % np.uint64(4)
    return (picks.astype(np.uint8) + np.uint8(126)).reshape(rows, SLICES)


def _in_atoms(codes: np.ndarray) -> np.ndarray:
    """Return scales as in shared memory: rows r, r + 32, r + 64 and r + 96 lie together."""
    return codes.reshape(-1, 4, 32, SLICES).transpose(0, 2, 1, 3).reshape(-1)


def _scaled(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    factors = np.exp2(codes.astype(np.float32) - 127)
    return values * np.repeat(factors, values.shape[1] // SLICES, axis=1)


def probe_of(p: Product, number: int = 0) -> Probe:
    """Return the probe of a form. number: selects its random operands."""
    a, b = _small(700 + number, p.m, p.k), _small(800 + number, p.n, p.k)
    if p.a == "tmem":
        a_memory = _bits(a, p.dtype).view(np.uint32).reshape(p.group, LANES, A_COLUMNS)
    else:
        a_memory = _parts(p, "a", a)
    b_memory = _parts(p, "b", b)
    words = np.full((p.group, LANES, dumped(p.columns)), FILL, np.uint32)
    scales: tuple[np.ndarray, ...] = ()
    if p.scaled:
        of_a, of_b = _scales_of(900 + number, p.m), _scales_of(950 + number, p.n)
        a, b = _scaled(a, of_a), _scaled(b, of_b)
        rows = (np.concatenate([own, of_b]) for own in np.split(of_a, p.group))
        scales = (np.stack([_in_atoms(each) for each in rows]).view(np.uint32),)
    # Adding 0 makes +0 of a -0, which no sum of products that starts at +0 gives.
    result = (-a if p.negate else a) @ b.T + np.float32(0)
    words[_cell(p)] = result.astype(np.float32).view(np.uint32)
    case = Case(
        f"tcgen05/{p.name}", "tcgen05", _mma_ptx(p, _image(p, "a"), _image(p, "b")),
        (np.ascontiguousarray(a_memory), b_memory, *scales),
        (np.zeros_like(words),), (), p.group, THREADS, p.group,
    )  # fmt: skip
    return Probe(
        case, "D = A B^T of small integers against numpy, lanes beside it untouched", (words,)
    )


# ---------------------------------------------------------------- order of MMAs

#: Wide and narrow MMAs of a pair; B serves as A in shared memory of the narrow ones, too.
_WIDE, _PV = Product(2, 256, 256), Product(2, 256, 256, a="tmem")
_NARROW, _NARROWER = Product(2, 256, 128), Product(2, 256, 64)
_ORDER_COLUMNS = 384


def _rows_of(n: int) -> np.ndarray:
    """Rows of B that an MMA of N = n reads, of the 128 in each CTA's shared memory."""
    return np.concatenate([np.arange(n // 2), 128 + np.arange(n // 2)])


def _order(
    name: str, what: str, chains: str, expected: np.ndarray, memory: tuple[np.ndarray, ...]
) -> Probe:
    """Return a probe of MMAs of a pair with no wait between. expected: float32 (256, columns)."""
    words = np.full((2, LANES, _ORDER_COLUMNS), FILL, np.uint32)
    results = expected.astype(np.float32).view(np.uint32).reshape(2, LANES, -1)
    words[..., : results.shape[2]] = results
    size = Image.swizzled(128, 2, False).size
    shared = f".shared .align 1024 .b8 b[{size}];\n.reg .b32 %w<{A_COLUMNS}>;\n.reg .b16 %mask;\n"
    body = (
        f"{_a_to_tmem(256)}{to_shared(size, 'p1', 'b', 'COPY_B')}fence.proxy.async;\n"
        f"tcgen05.fence::before_thread_sync;\n{SYNC}tcgen05.fence::after_thread_sync;\n"
        f"{_issued(2, chains)}{dump_columns(_ORDER_COLUMNS, 'p2')}"
    )
    case = Case(
        f"tcgen05/mma order {name}", "tcgen05", frame(shared, body, 2, 512, 3), memory,
        (np.zeros_like(words),), (), 2, THREADS, 2,
    )  # fmt: skip
    return Probe(case, what, (words,))


def _orders() -> Iterator[Probe]:
    """MMAs of one thread run in the order of issue, whatever their shapes: `mma-order`."""
    a, b = _small(690, 256, _PV.k), _small(691, 256, _PV.k)
    memory = (
        np.ascontiguousarray(_bits(a, "bf16").view(np.uint32).reshape(2, LANES, A_COLUMNS)),
        _parts(_WIDE, "b", b),
    )
    raw = Image.swizzled(128, 2, False).raw
    operands = _address("a", "b", raw) + _address("b", "b", raw)
    steps = (SLICE_BYTES // 16, SLICE_BYTES // 16)

    def scores(n: int) -> np.ndarray:
        return b @ b[_rows_of(n)].T

    under = (
        f"{operands}add.u32 %r21, %taddr, 256;\n{_chain(_PV, steps)}"
        f"{operands}add.u32 %r22, %taddr, 256;\n{_chain(_NARROW, steps, '%r22')}"
    )
    yield _order(
        "of S over P", "an MMA writes where the one before it reads A, in tensor memory", under,
        np.concatenate([a @ b.T, scores(128)], 1), memory,
    )  # fmt: skip
    columns = scores(256)
    columns[:, 64:192] = scores(128)
    columns[:, 96:160] += scores(64)
    over = (
        f"{operands}{_chain(_WIDE, steps)}"
        f"{operands}add.u32 %r22, %taddr, 64;\n{_chain(_NARROW, steps, '%r22')}"
        f"{operands}add.u32 %r22, %taddr, 96;\n{_chain(_NARROWER, steps, '%r22', adds=True)}"
    )
    # Behind the columns of D lies A, which none of these reads.
    stored = memory[0].reshape(256, A_COLUMNS).view(np.float32)
    yield _order(
        "of three shapes", "wide, narrow and narrower MMAs over the same columns", over,
        np.concatenate([columns, stored], 1), memory,
    )  # fmt: skip


def probes() -> Iterator[Probe]:
    """Return the probes of this module."""
    for number, product in enumerate(PRODUCTS):
        yield probe_of(product, number)
    yield from _orders()
