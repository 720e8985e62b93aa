"""Golden cases of wgmma (PTX ISA 9.3, "Asynchronous Warpgroup Level Matrix Instructions").

One warpgroup multiplies operands whose images in shared memory are made here from the canonical
layouts, element by element and with nothing of the simulator. The output is D as the registers of
each thread hold it, uint32 (threads, registers). Where operands are small integers every sum is
exact, and `expected` has it by numpy; of these a hash alone is stored. The others follow the rule
in `tensor_sums`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import inputs as make
from ..cases import HEADER, Case
from ..ptx_text import declare

THREADS, ROWS, STEP_BYTES = 128, 64, 32
_WIDTH = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}
#: Bits 62-63 of a matrix descriptor by the span of the swizzle.
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
#: Content of accumulators where scale-d is false: a NaN that must not come through.
_POISON = 0x7FC1_2345


@dataclass(frozen=True)
class Product:
    """A case: types of D, A and B, N, instructions along K.

    a: "k", "mn" (in shared memory, major in K or M) or "registers". spans: of the swizzles of A
    and B. accumulate: D begins with values, not with zero. values: what the operands hold, by a
    name in `_VALUES`. saturate: .satfinite.
    """

    d: str
    types: tuple[str, str]
    n: int
    steps: int = 4
    a: str = "k"
    b_mn: bool = False
    spans: tuple[int, int] = (128, 128)
    negate: tuple[bool, bool] = (False, False)
    accumulate: bool = False
    values: str = "small"
    saturate: bool = False

    @property
    def name(self) -> str:
        signs = "".join(f" -{which}" for which, negated in zip("ab", self.negate) if negated)
        a = self.a if self.a == "registers" else f"{self.a} {self.spans[0]}"
        return (
            f"{self.d} {' '.join(self.types)} n{self.n} x{self.steps}, A {a}, "
            f"B {'mn' if self.b_mn else 'k'} {self.spans[1]}{signs}"
            f"{', sum' * self.accumulate}{', satfinite' * self.saturate}, {self.values}"
        )

    @property
    def is_exact(self) -> bool:
        """Return True if no order and no rounding of sums makes a difference."""
        return self.values in ("small", "large")

    @property
    def width(self) -> int:
        """Bytes of an element of A and B."""
        return _WIDTH[self.types[0]]

    @property
    def k_of_a_step(self) -> int:
        return STEP_BYTES // self.width

    @property
    def k(self) -> int:
        return self.k_of_a_step * self.steps

    @property
    def registers(self) -> int:
        """Return the registers of D in a thread."""
        return self.n // (4 if self.d == "f16" else 2)


# ---------------------------------------------------------------- values


def bits_of(values: np.ndarray, name: str) -> np.ndarray:
    """Raw elements of float32 values that the type has."""
    if name == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    if name == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if name in ("s8", "u8"):
        return values.astype(np.int16).astype(np.uint8)
    bias, fraction = {"e4m3": (7, 3), "e5m2": (15, 2)}[name]
    mantissa, exponent = np.frexp(np.abs(values))
    code = (exponent - 1 + bias) * 2**fraction + (mantissa * 2 - 1) * 2**fraction
    return (np.where(values == 0, 0, code) + np.where(values < 0, 128, 0)).astype(np.uint8)


def _small(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Integers of -4 to 4, 0 to 8 without a sign: sums are exact."""
    picks = make.scrambled(seed, shape[0] * shape[1]) % np.uint64(9)
    values = picks.astype(np.float32).reshape(shape) - (0 if name == "u8" else 4)
    return bits_of(values, name)


def _any(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Any bit pattern: infinities, NaNs and subnormals included."""
    words = make.scrambled(seed, shape[0] * shape[1]).reshape(shape)
    return (words >> np.uint64(7)).astype(_RAW[_WIDTH[name]])


def _near(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Random significands, exponents of eight binades around 1: what is lost in sums shows."""
    words = make.scrambled(seed, shape[0] * shape[1]).reshape(shape)
    fraction, bias, total = {"bf16": (7, 127, 16), "f16": (10, 15, 16), "tf32": (23, 127, 32),
                             "e4m3": (3, 7, 8), "e5m2": (2, 15, 8)}[name]  # fmt: skip
    exponent = (words >> np.uint64(40)) % np.uint64(8) + np.uint64(bias - 4)
    sign = words >> np.uint64(60) & np.uint64(1)
    significand = words & np.uint64((1 << fraction) - 1)
    if name == "tf32":
        # The lower 13 bits of the word are no part of the number.
        significand &= np.uint64(0x7FFFFF)
    return (sign << np.uint64(total - 1) | exponent << np.uint64(fraction) | significand).astype(
        _RAW[_WIDTH[name]]
    )


def _large(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Integers of one sign, near the ends of their range: sums leave 32 bits beside a large D."""
    picks = make.scrambled(seed, shape[0] * shape[1]) % np.uint64(4)
    return np.where(picks.reshape(shape) > 0, 127, 100).astype(np.uint8)


_VALUES = {"small": _small, "any": _any, "near": _near, "large": _large}


def _start(p: Product, seed: int) -> np.ndarray:
    """D before the first instruction, uint32 (threads, registers)."""
    count = THREADS * p.registers
    words = make.scrambled(seed, count)
    if not p.accumulate:
        found = np.full(count, _POISON, np.uint32)
    elif p.values == "large":
        found = np.where(words & np.uint64(1), 0x7FFFFFF0, 0x80000010).astype(np.uint32)
    elif p.d == "s32":
        found = (words % np.uint64(2000)).astype(np.uint32) - np.uint32(1000)
    elif p.d == "f16":
        halves = (make.scrambled(seed, 2 * count) % np.uint64(33)).astype(np.float16) - 16
        found = halves.astype(np.float16).view(np.uint32)
    elif p.values == "small":
        found = ((words % np.uint64(2001)).astype(np.float32) - 1000).view(np.uint32)
    elif p.values == "any":
        found = (words >> np.uint64(9)).astype(np.uint32)
    else:
        exponent = (words >> np.uint64(40)) % np.uint64(16) + np.uint64(120)
        found = (words & np.uint64(0x807FFFFF) | exponent << np.uint64(23)).astype(np.uint32)
    return found.reshape(THREADS, p.registers)


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Image:
    """An operand in shared memory. memory: uint8. steps: offset of each instruction's part.
    leading, stride: byte offsets of its descriptor."""

    memory: np.ndarray
    steps: tuple[int, ...]
    leading: int
    stride: int


def image(raw: np.ndarray, mn_major: bool, span: int) -> Image:
    """The image of an operand (rows, K) by the canonical layouts; it begins at a multiple of 1 KiB.

    T elements are 16 bytes, u = span / 16 of these (1 without a swizzle) a row of an atom of eight
    rows. Each instruction's K is a block of its own, unless rows of an atom hold that of several.
    """
    width, (rows, k_total) = raw.itemsize, raw.shape
    u, t, step = max(1, span // 16), 16 // width, STEP_BYTES // width
    steps = k_total // step
    row, k = np.meshgrid(np.arange(rows), np.arange(k_total), indexing="ij")
    number, inside = k // step, k % step
    if mn_major:
        groups, deep = -(-rows // (t * u)), 128 * u
        far = step // 8 * deep
        block = groups * far
        place = number * block + row % t * width + row // t % u * 16 + row // (t * u) * far
        place = place + inside % 8 * 16 * u + inside // 8 * deep
        leading, stride = (far, deep) if span else (deep, far)
        starts = tuple(block * i for i in range(steps))
    else:
        in_a_row = max(1, u // 2)
        block = rows * max(16 * u, STEP_BYTES)
        pitch, stride = 16 * u, 128 * u
        leading = 16 if span else rows * 16
        place = number // in_a_row * block + number % in_a_row * STEP_BYTES + row % 8 * pitch
        place = place + row // 8 * stride + inside % t * width + inside // t * leading
        starts = tuple(i // in_a_row * block + i % in_a_row * STEP_BYTES for i in range(steps))
    place = place ^ (place >> 3 & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span])
    size = -(-(int(place.max()) + width) // 2048) * 2048
    memory = np.zeros(size // width, raw.dtype)
    memory[place // width] = raw
    return Image(memory.view(np.uint8), starts, leading, stride)


def places_of_a(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column of K) of the elements of A by [thread, register, element], all
    instructions."""
    per = 4 // p.width
    t, r, e = np.ogrid[:THREADS, : 4 * p.steps, :per]
    i = r % 4
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i % 2) + 0 * e
    column = r // 4 * p.k_of_a_step + t % 4 * per + e + 4 * per * (i // 2)
    return row, column


def places_of_d(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of the elements of D by [thread, element]; two halves share a
    register."""
    t, i = np.ogrid[:THREADS, : p.n // 2]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (t % 4) + i % 2
    return row, column


# ---------------------------------------------------------------- kernels


def _copied(parameter: str, name: str, size: int) -> str:
    """All threads: `size` bytes of a buffer to shared memory."""
    lines = [
        f"ld.param.u64 %rd1, [{parameter}];\nmul.wide.u32 %rd2, %thread, 16;\n"
        f"add.u64 %rd1, %rd1, %rd2;\nmov.u32 %s, {name};\nmad.lo.u32 %s, %thread, 16, %s;\n"
    ]
    words = "{%w0, %w1, %w2, %w3}"
    for offset in range(0, size, 16 * THREADS):
        lines.append(
            f"ld.global.v4.u32 {words}, [%rd1+{offset}];\n"
            f"st.shared.v4.u32 [%s+{offset}], {words};\n"
        )
    return "".join(lines)


def _registers(name: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{name}{first + i}" for i in range(count)) + "}"


def _moved(parameter: str, name: str, count: int, loads: bool) -> str:
    """Each thread: its `count` words of a buffer to registers, or back."""
    lines = [
        f"ld.param.u64 %rd1, [{parameter}];\nmul.wide.u32 %rd2, %thread, {4 * count};\n"
        "add.u64 %rd1, %rd1, %rd2;\n"
    ]
    for i in range(count):
        where = f"[%rd1+{4 * i}]"
        lines.append(
            f"ld.global.u32 %{name}{i}, {where};\n"
            if loads
            else f"st.global.u32 {where}, %{name}{i};\n"
        )
    return "".join(lines)


def _described(name: str, at: Image, span: int) -> str:
    """Descriptor of the operand's first instruction."""
    rest = (at.leading >> 4) << 16 | (at.stride >> 4) << 32 | _MODES[span] << 62
    return (
        f"mov.u32 %s, {name};\nshr.u32 %s, %s, 4;\nand.b32 %s, %s, 0x3FFF;\n"
        f"cvt.u64.u32 %{name}, %s;\nor.b64 %{name}, %{name}, {rest:#x};\n"
    )


def _instructions(p: Product, a: Image | None, b: Image) -> str:
    immediates = ""
    if p.d != "s32":
        immediates = "".join(f", {-1 if negated else 1}" for negated in p.negate)
        if p.width == 2:
            immediates += f", {int(p.a == 'mn')}" * (a is not None) + f", {int(p.b_mn)}"
    saturate = ".satfinite" * p.saturate
    opcode = (
        f"wgmma.mma_async.sync.aligned.m64n{p.n}k{p.k_of_a_step}{saturate}.{p.d}."
        f"{'.'.join(p.types)}"
    )
    lines = [f"setp.ne.u32 %sum, {int(p.accumulate)}, 0;\n"]
    for i in range(p.steps):
        left = _registers("a", 4 * i, 4)
        if a is not None:
            left = "%da"
            lines.append(f"add.u64 %da, %a, {a.steps[i] >> 4};\n")
        lines.append(f"add.u64 %db, %b, {b.steps[i] >> 4};\n")
        d = _registers("d", 0, p.registers)
        lines.append(f"{opcode} {d}, {left}, %db, %sum{immediates};\n")
        if not i:
            lines.append("setp.ne.u32 %sum, 1, 0;\n")
    return "".join(lines)


def _ptx(p: Product, a: Image | None, b: Image) -> str:
    """p0: A, p1: B, p2: D before, p3: D."""
    shared = f".shared .align 1024 .b8 b[{b.memory.size}];\n"
    left = _moved("p0", "a", 4 * p.steps, True)
    if a is not None:
        shared += f".shared .align 1024 .b8 a[{a.memory.size}];\n.reg .b64 %a, %da;\n"
        left = _copied("p0", "a", a.memory.size) + _described("a", a, p.spans[0])
    else:
        shared += f".reg .b32 %a<{4 * p.steps}>;\n"
    return (
        f"{HEADER}{declare(3, 1)}\n.reqntid {THREADS}, 1, 1\n{{\n{shared}"
        f".reg .b32 %d<{p.registers}>, %w<4>, %thread, %s;\n.reg .b64 %rd<4>, %b, %db;\n"
        ".reg .pred %sum;\nmov.u32 %thread, %tid.x;\n"
        f"{left}{_copied('p1', 'b', b.memory.size)}{_described('b', b, p.spans[1])}"
        f"{_moved('p2', 'd', p.registers, True)}fence.proxy.async;\nbar.sync 0;\n"
        f"wgmma.fence.sync.aligned;\n{_instructions(p, a, b)}"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        f"{_moved('p3', 'd', p.registers, False)}ret;\n}}\n"
    )


def operands(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements of A (64, K) and B (N, K)."""
    seed = 1000 + PRODUCTS.index(p) * 3
    fill = _VALUES[p.values]
    return fill(p.types[0], seed, (ROWS, p.k)), fill(p.types[1], seed + 1, (p.n, p.k))


def start(p: Product) -> np.ndarray:
    """D before the first instruction, uint32 (threads, registers)."""
    return _start(p, 1002 + PRODUCTS.index(p) * 3)


def case_of(p: Product) -> Case:
    """The case of a product."""
    a_raw, b_raw = operands(p)
    b = image(b_raw, p.b_mn, p.spans[1])
    a = None if p.a == "registers" else image(a_raw, p.a == "mn", p.spans[0])
    left = a.memory if a is not None else np.ascontiguousarray(a_raw[places_of_a(p)])
    before = start(p)
    return Case(
        f"wgmma/{p.name}", "wgmma", _ptx(p, a, b),
        (left.view(np.uint32).reshape(-1), b.memory.view(np.uint32), before),
        (np.zeros_like(before),), block=THREADS, approximate=not p.is_exact,
        floats="" if p.d == "s32" else p.d, hashed=p.is_exact, hopper=True,
    )  # fmt: skip


def expected(p: Product) -> np.ndarray:
    """D of a case whose sums are exact, as its output holds it."""
    a_raw, b_raw = operands(p)
    a, b = (values_of(raw, name) for raw, name in zip((a_raw, b_raw), p.types, strict=True))
    total = a @ b.T * (-1.0 if p.negate[0] != p.negate[1] else 1.0)
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[p.d]
    places = places_of_d(p)
    before = start(p).view(dtype).astype(np.float64)
    found = total[places] + (before if p.accumulate else 0.0)
    if p.d != "s32":
        return found.astype(dtype).view(np.uint32)
    if p.saturate:
        found = np.clip(found, -(1 << 31), (1 << 31) - 1)
    return found.astype(np.int64).astype(np.uint64).astype(np.uint32)


def values_of(raw: np.ndarray, name: str) -> np.ndarray:
    """float64 of raw elements; of tf32 the lower 13 bits do not count."""
    if name == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name == "f16":
        return raw.view(np.float16).astype(np.float64)
    if name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name in ("s8", "u8"):
        return raw.view(np.int8 if name == "s8" else np.uint8).astype(np.float64)
    bias, fraction = {"e4m3": (7, 3), "e5m2": (15, 2)}[name]
    exponent = (raw >> fraction & (1 << 7 - fraction) - 1).astype(np.float64)
    mantissa = (raw & (1 << fraction) - 1) / 2.0**fraction
    size = np.where(exponent == 0, mantissa * 2, mantissa + 1) * 2.0 ** (exponent - bias)
    return np.where(raw & 0x80, -size, size)


_EIGHT_BITS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))
_INTEGERS = (("s8", "s8"), ("s8", "u8"), ("u8", "s8"), ("u8", "u8"))
_BF16, _F16, _TF32 = ("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32")
#: (D, types) that floats may have.
_FLOATS = (("f32", _BF16), ("f32", _F16), ("f16", _F16), ("f32", _TF32),
           *((d, types) for d in ("f32", "f16") for types in _EIGHT_BITS))  # fmt: skip
_SPANS = ((0, 32), (32, 64), (64, 128), (128, 0))
PRODUCTS = (
    # Every N, by the shape of the result; of the other types the ends and what is between.
    *(Product("f32", _BF16, n, 1) for n in range(8, 257, 8)),
    *(Product(d, types, n, 1) for d, types in _FLOATS[1:] for n in (8, 72)),
    *(Product("s32", types, n, 1) for types in _INTEGERS for n in (8, 24, 80)),
    Product("f16", _F16, 256, 1), Product("f32", _TF32, 256, 1),
    Product("s32", _INTEGERS[0], 256, 1),
    # Every swizzle and major, over four instructions.
    *(Product("f32", _BF16, 64, a=a, b_mn=b_mn, spans=spans)
      for spans in _SPANS for a in ("k", "mn") for b_mn in (False, True)),
    *(Product(d, types, 32, spans=spans)
      for d, types in (("f32", _TF32), ("f32", _EIGHT_BITS[0])) for spans in _SPANS),
    Product("f32", _BF16, 128, a="mn", b_mn=True), Product("f32", _BF16, 256, 2, b_mn=True),
    Product("f32", _F16, 64, a="mn", b_mn=True),
    # A in registers.
    *(Product(d, types, 32, 2, "registers") for d, types in _FLOATS),
    *(Product("s32", types, 32, 2, "registers") for types in _INTEGERS),
    Product("f32", _BF16, 64, 4, "registers", True),
    # Signs, D as it was, saturation.
    *(Product("f32", _BF16, 16, 2, negate=signs, accumulate=True)
      for signs in ((False, False), (True, False), (False, True), (True, True))),
    Product("f16", _F16, 16, 2, negate=(True, False), accumulate=True),
    Product("f32", _TF32, 16, 2, negate=(False, True), accumulate=True),
    *(Product("s32", types, 16, 2, accumulate=True) for types in _INTEGERS[:2]),
    *(Product("s32", _INTEGERS[0], 16, 2, accumulate=True, values="large", saturate=saturate)
      for saturate in (False, True)),
    # Losses in sums: one instruction and four, from zero and from D; any bits.
    *(Product(d, types, 16, steps, accumulate=sums, values=values) for d, types in _FLOATS
      for values in ("near", "any") for steps, sums in ((1, False), (1, True), (4, False))),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases of this module."""
    return (case_of(product) for product in PRODUCTS)
