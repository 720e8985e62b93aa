"""ldmatrix and stmatrix of bytes, movmatrix and mma.sync against the PTX ISA's fragment tables, one
element at a time. Matrices of 16 bits are recorded (tests/tools/test_golden.py, "matrix").
"""

import numpy as np
import pytest
from harness import compile_body, run_warp

from sm100_sim.errors import UnknownInstruction

RNG = np.random.default_rng(11)
BASE = 1024  # the first bytes of shared memory are the system's
#: Rows of 16 bytes at scattered places.
PLACES = BASE + 16 * RNG.permutation(128)[:32]


def fresh_shared() -> np.ndarray:
    return RNG.integers(0, 256, (1, 4096), dtype=np.uint8)


def row(shared: np.ndarray, lane: int) -> np.ndarray:
    """The 16 bytes of the row whose address lane `lane` gives."""
    return shared[0, PLACES[lane] : PLACES[lane] + 16]


def load(text: str, count: int, shared: np.ndarray, given: int = 32) -> np.ndarray:
    """Registers (count, 32) of a load; lanes from `given` on hold no address."""
    names = [f"%d{i}" for i in range(count)]
    addresses = np.where(np.arange(32) < given, PLACES, 0xDEAD0001).astype(np.uint32)
    body = f".reg .b32 %a, {', '.join(names)};\n{text} {{{', '.join(names)}}}, [%a];"
    run = run_warp(body, {"%a": addresses}, names, shared=shared)
    assert run.stops[-1].kind == "exit", run.stops[-1]
    return np.stack([run[name] for name in names])


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes(count):
    """m16n16, transposed: thread t has elements 4(t%4).. of the rows t/4 and t/4+8."""
    shared = fresh_shared()
    text = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8"
    got = load(text, 2 * count, shared, 16 * count)
    for i in range(count):
        matrix = np.stack([row(shared, 16 * i + r) for r in range(16)]).T
        for t in range(32):
            for half in range(2):
                four = matrix[t // 4 + 8 * half, 4 * (t % 4) : 4 * (t % 4) + 4]
                assert got[2 * i + half, t].tobytes() == four.tobytes()


def unpacked(raw: np.ndarray, bits: int) -> list[int]:
    """16 elements from the low bits of a row."""
    whole = int.from_bytes(raw.tobytes(), "little")
    return [whole >> bits * i & (1 << bits) - 1 for i in range(16)]


@pytest.mark.parametrize(("bits", "name"), [(4, "b4x16_p64"), (6, "b6x16_p32")])
def test_ldmatrix_unpacks_small_elements(bits, name):
    shared = fresh_shared()
    got = load(f"ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.{name}", 2, shared, 16)
    trans = load(f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.{name}", 2, shared, 16)
    matrix = np.array([unpacked(row(shared, r), bits) for r in range(16)], np.uint8)
    for t in range(32):
        four = slice(4 * (t % 4), 4 * (t % 4) + 4)
        for i in range(2):
            assert got[i, t].tobytes() == matrix[8 * i + t // 4, four].tobytes()
            assert trans[i, t].tobytes() == matrix[four, t // 4 + 8 * i].tobytes()


def store(text: str, registers: np.ndarray) -> np.ndarray:
    """Shared memory after a store to the rows of PLACES, zero before."""
    count = len(registers)
    names = [f"%d{i}" for i in range(count)]
    body = f".reg .b32 %a, {', '.join(names)};\n{text} [%a], {{{', '.join(names)}}};"
    shared = np.zeros((1, 4096), np.uint8)
    addresses = np.where(np.arange(32) < 8 * count, PLACES, 0xDEAD0001).astype(np.uint32)
    run = run_warp(body, {"%a": addresses} | dict(zip(names, registers, strict=True)), (),
                   shared=shared)  # fmt: skip
    assert run.stops[-1].kind == "exit", run.stops[-1]
    return shared


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count):
    """m16n8.trans: the 16 x 8 fragment (row t/4 + 8(v/2), column 2(t%4) + v%2) by columns."""
    registers = RNG.integers(0, 2**32, (count, 32), dtype=np.uint32)
    shared = store(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8", registers)
    for i in range(count):
        for t in range(32):
            for v, byte in enumerate(registers[i, t].tobytes()):
                assert row(shared, 8 * i + 2 * (t % 4) + v % 2)[t // 4 + 8 * (v // 2)] == byte


def test_refused_row_is_a_fault_that_names_the_lane():
    body = ".reg .b32 %a, %d;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d}, [%a];"
    addresses = PLACES.astype(np.uint32)
    addresses[5] += 4
    stop = run_warp(body, {"%a": addresses}, ["%d"], shared=fresh_shared()).stops[-1]
    assert stop.kind == "fault" and stop.fault.reason == "misaligned shared access"
    assert stop.fault.lane == 5


def test_movmatrix():
    matrix = RNG.integers(0, 2**16, (8, 8), dtype=np.uint16)
    body = ".reg .b32 %a, %d;\nmovmatrix.sync.aligned.m8n8.trans.b16 %d, %a;"
    run = run_warp(body, {"%a": matrix.view(np.uint32).reshape(32)}, ["%d"])
    assert np.array_equal(run["%d"].view(np.uint16).reshape(8, 8), matrix.T)


# ---------------------------------------------------------------- mma.sync


def bits(values: np.ndarray, name: str) -> np.ndarray:
    """Small integers as raw elements."""
    if name == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if name in ("e4m3", "e5m2"):
        exponent, mantissa = {"e4m3": (7, 3), "e5m2": (15, 2)}[name]
        fraction, power = np.frexp(np.abs(values))
        code = (power - 1 + exponent) * 2**mantissa + (fraction * 2 - 1) * 2**mantissa
        return (np.where(values == 0, 0, code) + np.where(values < 0, 128, 0)).astype(np.uint8)
    kind = {"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8,
            "f64": np.float64}[name]  # fmt: skip
    raw = np.ascontiguousarray(values.astype(kind))
    return raw.view(f"u{raw.itemsize}")


def a_place(i: int, t: int, j: int, m: int, per: int) -> tuple[int, int]:
    """Register i, thread t, element j (PTX ISA: fragments of A for mma.m16n8k*)."""
    if m == 8:
        return t // 4, t % 4 * per + j + 4 * per * i
    return t // 4 + (8 if i in (1, 3, 5, 7) else 0), t % 4 * per + j + 4 * per * (i // 2)


def spread(matrix: np.ndarray, place, count: int, per: int) -> np.ndarray:
    """Registers (count, 32) that hold a matrix of raw elements."""
    width = max(matrix.itemsize * per, 4)
    registers = np.zeros((count, 32), f"u{width}")
    for i in range(count):
        for t in range(32):
            for j in range(per):
                value = int(matrix[place(i, t, j)])
                registers[i, t] |= registers.dtype.type(value << 8 * matrix.itemsize * j)
    return registers


CASES = [
    ("m16n8k8", "f16", "f16", "f32"), ("m16n8k16", "f16", "f16", "f32"),
    ("m16n8k16", "f16", "f16", "f16"), ("m16n8k8", "bf16", "bf16", "f32"),
    ("m16n8k16", "bf16", "bf16", "f32"), ("m16n8k4", "tf32", "tf32", "f32"),
    ("m16n8k8", "tf32", "tf32", "f32"), ("m8n8k16", "s8", "u8", "s32"),
    ("m16n8k16", "u8", "s8", "s32"), ("m16n8k32", "s8", "s8", "s32"),
    ("m16n8k16", "e4m3", "e4m3", "f32"), ("m16n8k32", "e4m3", "e5m2", "f32"),
    ("m16n8k32", "e5m2", "e4m3", "f16"), ("m8n8k4", "f64", "f64", "f64"),
    ("m16n8k8", "f64", "f64", "f64"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "a_type", "b_type", "d_type"), CASES)
def test_mma(shape, a_type, b_type, d_type):
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    low = 0 if "u8" in (a_type, b_type) else -4
    a, b = RNG.integers(low, 5, (m, k)), RNG.integers(low, 5, (k, 8))
    c = RNG.integers(-4, 5, (m, 8))
    size = {"f16": 2, "bf16": 2, "tf32": 4, "f64": 8}.get(a_type, 1)
    per = max(1, 4 // size)
    a_regs = spread(bits(a, a_type), lambda i, t, j: a_place(i, t, j, m, per),
                    m * k // 32 // per, per)  # fmt: skip
    b_regs = spread(bits(b, b_type), lambda i, t, j: (t % 4 * per + j + 4 * per * i, t // 4),
                    k // 4 // per, per)  # fmt: skip
    kind = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}[d_type]
    c_raw = c.astype(kind).view(f"u{np.dtype(kind).itemsize}")
    pair = 2 if d_type == "f16" else 1

    def c_place(i, t, j):
        return (
            (t // 4 + 8 * i, t % 4 * 2 + j)
            if pair == 2
            else (t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2)
        )

    c_regs = spread(c_raw, c_place, m // 4 // pair, pair)
    groups = {"a": a_regs, "b": b_regs, "c": c_regs, "d": c_regs}
    width = 64 if a_type == "f64" else 32
    names = {g: [f"%{g}{i}" for i in range(len(r))] for g, r in groups.items()}
    declared = ", ".join(name for group in names.values() for name in group)
    operands = ", ".join(f"{{{', '.join(names[g])}}}" for g in "dabc")
    body = (
        f".reg .b{width} {declared};\n"
        f"mma.sync.aligned.{shape}.row.col.{d_type}.{a_type}.{b_type}.{d_type} {operands};"
    )
    inputs = {n: r for g in "abc" for n, r in zip(names[g], groups[g], strict=True)}
    run = run_warp(body, inputs, names["d"])
    want = a @ b + c
    for i, name in enumerate(names["d"]):
        values = np.ascontiguousarray(run[name]).view(kind).reshape(32, pair)
        for t in range(32):
            for j in range(pair):
                assert values[t, j] == want[c_place(i, t, j)]


def test_mma_saturates_integers():
    body = """.reg .b32 %a0, %a1, %a2, %a3, %b0, %b1, %c<4>, %d<4>, %e<4>;
    mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32
        {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
        {%e0, %e1, %e2, %e3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c0, %c0, %c0};"""
    ones = dict.fromkeys(("%a0", "%a1", "%a2", "%a3", "%b0", "%b1"), 0x01010101)
    run = run_warp(body, ones | {"%c0": 0x7FFFFFF0}, ["%d0", "%e0"])
    assert (run["%d0"] == 0x7FFFFFFF).all() and (run["%e0"] == 0x80000010).all()


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1, %r3}, [%r2];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r1}, [%r2];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r2], {%r1};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
        "{%r1,%r2}, {%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
        "{%r1,%r2}, {%r1,%r2,%r3,%r4};",
    ],
)
def test_unknown_forms(text):
    with pytest.raises(UnknownInstruction):
        compile_body(f".reg .b32 %r<8>;\n{text}")
