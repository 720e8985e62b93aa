"""Inline instructions against independent formulas, on random and special values.

Integer references compute in Python integers; roundings in exact fractions; approximate functions
are held against float64 within the error that the PTX ISA states.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from harness import compile_body, run_compiled, run_warp

from sm100_sim.errors import UnknownInstruction
from sm100_sim.state.warp import Environment

SPECIAL_INTS = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 255, 256, 0x7FFF, 0x8000, 0xFFFF,
                0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF]
SPECIAL_FLOATS = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,
                  0x80800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF,
                  0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x4B000001, 0x33800000]
LANES = 32


def words(bits: int, seed: int, count: int = 128, special=SPECIAL_INTS) -> np.ndarray:
    """Random and special patterns; every special value meets several others."""
    rng = np.random.default_rng(seed)
    mask = np.uint64((1 << bits) - 1)
    special = np.array(special, np.uint64)
    if bits == 64:
        top = np.array([1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 32], np.uint64)
        special = np.concatenate((special, top))
    values = rng.integers(0, 1 << bits, count, dtype=np.uint64)
    values[::3] = rng.choice(special, len(values[::3])) & mask
    # Close pairs and cancellation need values of similar size.
    near = np.array([0x3F800000, 0x40490FDB, 0xC0490FDB], np.uint64)
    values[1::6] = rng.choice(near, len(values[1::6])) & mask
    return values.astype(np.uint32 if bits <= 32 else np.uint64)


def float_words(seed: int, count: int = 128) -> np.ndarray:
    return words(32, seed, count, SPECIAL_FLOATS)


REGISTER = {16: ".b16", 32: ".b32", 64: ".b64", 1: ".pred"}


def evaluate(instruction: str, sources: list[np.ndarray], widths: list[int], result: int = 32
             ) -> np.ndarray:
    """Results of ``instruction`` (with %d and %s0, %s1, ... in it) for each row of sources."""
    body = f".reg {REGISTER[result]} %d;\n" + "".join(
        f".reg {REGISTER[width]} %s{n};\n" for n, width in enumerate(widths)) + instruction + ";"
    names = [f"%s{n}" for n in range(len(widths))]
    compiled = compile_body(body, ("%d", *names))
    environment = Environment(np.zeros((1, 64), np.uint8), np.zeros(1, np.uint32),
                              np.zeros((0, 3), np.uint64), np.zeros(16, np.uint8))
    parts = []
    for start in range(0, len(sources[0]), LANES):
        inputs = {name: _input(source[start:start + LANES], width)
                  for name, source, width in zip(names, sources, widths, strict=True)}
        value = run_compiled(compiled, inputs, environment, {"%ntid.x": 32})["%d"]
        parts.append([value >> lane & 1 for lane in range(LANES)] if result == 1 else value)
    return np.concatenate(parts)


def _input(values: np.ndarray, width: int):
    if width == 1:
        return sum(int(v & 1) << lane for lane, v in enumerate(values))
    return values.astype(np.uint64 if width == 64 else np.uint32)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def check_integers(instruction: str, widths: list[int], function, result: int = 32,
                   seed: int = 1) -> None:
    """``function`` maps Python ints (register patterns) to the result, taken modulo its width."""
    sources = [words(width, seed + n) for n, width in enumerate(widths)]
    got = evaluate(instruction, sources, widths, result)
    for row, value in enumerate(got):
        arguments = [int(source[row]) for source in sources]
        want = function(*arguments) & ((1 << result) - 1)
        assert int(value) == want, (instruction, [hex(a) for a in arguments], hex(value),
                                    hex(want))


def both(bits):
    """Return (unsigned type, to Python int) and the signed twin."""
    return [(f"u{bits}", lambda x: x), (f"s{bits}", lambda x: signed(x, bits))]


TYPES = [(bits, name, value) for bits in (16, 32, 64) for name, value in both(bits)]
IDS = [name for _, name, _ in TYPES]


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_integer_arithmetic(bits, name, value):
    two, three = [bits] * 2, [bits] * 3

    def run(text, widths, function, result=bits):
        check_integers(text, widths, function, result)

    run(f"add.{name} %d, %s0, %s1", two, lambda a, b: a + b)
    run(f"sub.{name} %d, %s0, %s1", two, lambda a, b: a - b)
    run(f"mul.lo.{name} %d, %s0, %s1", two, lambda a, b: a * b)
    run(f"mul.hi.{name} %d, %s0, %s1", two, lambda a, b: value(a) * value(b) >> bits)
    run(f"mad.lo.{name} %d, %s0, %s1, %s2", three, lambda a, b, c: a * b + c)
    run(f"min.{name} %d, %s0, %s1", two, lambda a, b: min(value(a), value(b)))
    run(f"max.{name} %d, %s0, %s1", two, lambda a, b: max(value(a), value(b)))
    if bits < 64:
        run(f"mul.wide.{name} %d, %s0, %s1", two, lambda a, b: value(a) * value(b), 2 * bits)
        run(f"mad.wide.{name} %d, %s0, %s1, %s2", [bits, bits, 2 * bits],
            lambda a, b, c: value(a) * value(b) + c, 2 * bits)


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_division(bits, name, value):
    def quotient(a, b):
        a, b = value(a), value(b)
        if b == 0:
            return -1
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    def rest(a, b):
        # The ISA leaves both open for a division by zero; the hardware gives all ones (golden
        # vectors).
        return value(a) - quotient(a, b) * value(b) if b else -1

    check_integers(f"div.{name} %d, %s0, %s1", [bits] * 2, quotient, bits)
    check_integers(f"rem.{name} %d, %s0, %s1", [bits] * 2, rest, bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    one, two = [bits], [bits] * 2
    check_integers(f"and.b{bits} %d, %s0, %s1", two, lambda a, b: a & b, bits)
    check_integers(f"or.b{bits} %d, %s0, %s1", two, lambda a, b: a | b, bits)
    check_integers(f"xor.b{bits} %d, %s0, %s1", two, lambda a, b: a ^ b, bits)
    check_integers(f"not.b{bits} %d, %s0", one, lambda a: ~a, bits)
    check_integers(f"neg.s{bits} %d, %s0", one, lambda a: -a, bits)
    check_integers(f"abs.s{bits} %d, %s0", one, lambda a: abs(signed(a, bits)), bits)
    check_integers(f"shl.b{bits} %d, %s0, %s1", [bits, 32],
                   lambda a, n: a << n if n < bits else 0, bits)
    check_integers(f"shr.u{bits} %d, %s0, %s1", [bits, 32],
                   lambda a, n: a >> n if n < bits else 0, bits)
    check_integers(f"shr.s{bits} %d, %s0, %s1", [bits, 32],
                   lambda a, n: signed(a, bits) >> min(n, bits), bits)


def _funnel(a, b, n, left):
    value = b << 32 | a
    return value << n >> 32 if left else value >> n


def test_funnel_shifts():
    for left, letter in ((True, "l"), (False, "r")):
        check_integers(f"shf.{letter}.wrap.b32 %d, %s0, %s1, %s2", [32] * 3,
                       lambda a, b, n, left=left: _funnel(a, b, n & 31, left))
        check_integers(f"shf.{letter}.clamp.b32 %d, %s0, %s1, %s2", [32] * 3,
                       lambda a, b, n, left=left: _funnel(a, b, min(n, 32), left))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits):
    def field(operand):
        # The ISA restricts it to 0..255; beyond, as the hardware does it (golden vectors).
        return operand & 255 if bits == 32 else min(operand, 255)

    def extract(a, position, length, is_signed):
        position, length = field(position), field(length)
        if length == 0:
            return 0
        if is_signed:
            top = min(position + length - 1, bits - 1)
            digits = [a >> min(position + n, top) & 1 if position + n <= top else a >> top & 1
                      for n in range(bits)]
            return sum(d << n for n, d in enumerate(digits))
        return a >> position & ((1 << length) - 1)

    def insert(a, b, position, length):
        position, length = field(position), field(length)
        mask = ((1 << length) - 1) << position & ((1 << bits) - 1)
        return b & ~mask | a << position & mask

    def leading(a, is_signed):
        if is_signed and a >> (bits - 1):
            a = ~a & ((1 << bits) - 1)
        return a.bit_length() - 1

    check_integers(f"bfe.u{bits} %d, %s0, %s1, %s2", [bits, 32, 32],
                   lambda a, p, n: extract(a, p, n, False), bits)
    check_integers(f"bfe.s{bits} %d, %s0, %s1, %s2", [bits, 32, 32],
                   lambda a, p, n: extract(a, p, n, True), bits)
    check_integers(f"bfi.b{bits} %d, %s0, %s1, %s2, %s3", [bits, bits, 32, 32], insert, bits)
    check_integers(f"bfind.u{bits} %d, %s0", [bits], lambda a: leading(a, False))
    check_integers(f"bfind.s{bits} %d, %s0", [bits], lambda a: leading(a, True))
    check_integers(f"bfind.shiftamt.u{bits} %d, %s0", [bits],
                   lambda a: bits - 1 - leading(a, False) if a else -1)
    check_integers(f"popc.b{bits} %d, %s0", [bits], lambda a: bin(a).count("1"))
    check_integers(f"clz.b{bits} %d, %s0", [bits], lambda a: bits - a.bit_length())
    check_integers(f"brev.b{bits} %d, %s0", [bits],
                   lambda a: int(f"{a:0{bits}b}"[::-1], 2), bits)


def test_carry_chain_adds_and_subtracts_64_bits():
    for operation, sign in (("add", 1), ("sub", -1)):
        text = (f".reg .b32 %al, %ah, %bl, %bh, %l, %h;\nmov.b64 {{%al, %ah}}, %s0;\n"
                f"mov.b64 {{%bl, %bh}}, %s1;\n{operation}.cc.u32 %l, %al, %bl;\n"
                f"{operation}c.u32 %h, %ah, %bh;\nmov.b64 %d, {{%l, %h}}")
        check_integers(text, [64, 64], lambda a, b, sign=sign: a + sign * b, 64)


def test_lop3_is_its_table():
    for table in (0x00, 0xFF, 0xF0, 0xCC, 0xAA, 0xE8, 0x96, 0x1B):
        def function(a, b, c, table=table):
            return sum((table >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n
                       for n in range(32))

        check_integers(f"lop3.b32 %d, %s0, %s1, %s2, {table:#x}", [32] * 3, function)


def test_prmt_modes():
    def pick(source, index, replicate=False):
        byte = source >> 8 * index & 255
        return (255 if byte >> 7 else 0) if replicate else byte

    def general(a, b, c):
        source = b << 32 | a
        return sum(pick(source, c >> 4 * n & 7, bool(c >> 4 * n & 8)) << 8 * n for n in range(4))

    modes = {"f4e": lambda n, k: (n + k) % 8, "b4e": lambda n, k: (n - k) % 8,
             "rc8": lambda n, k: n, "ecl": max, "ecr": min,
             "rc16": lambda n, k: 2 * (n & 1) + (k & 1)}
    check_integers("prmt.b32 %d, %s0, %s1, %s2", [32] * 3, general)
    for mode, index in modes.items():
        check_integers(
            f"prmt.b32.{mode} %d, %s0, %s1, %s2", [32] * 3,
            lambda a, b, c, index=index: sum(pick(b << 32 | a, index(c & 3, k)) << 8 * k
                                             for k in range(4)))


INTEGER_COMPARISONS = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
                       "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
                       "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}


@pytest.mark.parametrize("bits,name,value", TYPES, ids=IDS)
def test_integer_comparisons(bits, name, value):
    for comparison, holds in INTEGER_COMPARISONS.items():
        check_integers(f"setp.{comparison}.{name} %d, %s0, %s1", [bits] * 2,
                       lambda a, b, holds=holds: int(holds(value(a), value(b))), 1)


def test_setp_combines_and_gives_two_results():
    for how, combine in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        text = f".reg .pred %q, %x;\nsetp.lt.{how}.s32 %x|%q, %s0, %s1, %s2;\n"
        check_integers(text + "mov.pred %d, %x", [32, 32, 1],
                       lambda a, b, c, f=combine: f(int(signed(a, 32) < signed(b, 32)), c & 1), 1)
        check_integers(text + "mov.pred %d, %q", [32, 32, 1],
                       lambda a, b, c, f=combine: f(int(signed(a, 32) >= signed(b, 32)), c & 1),
                       1)


def test_selections():
    check_integers("selp.b32 %d, %s0, %s1, %s2", [32, 32, 1], lambda a, b, p: a if p & 1 else b)
    check_integers("selp.b64 %d, %s0, %s1, !%s2", [64, 64, 1],
                   lambda a, b, p: b if p & 1 else a, 64)
    check_integers("slct.b32.s32 %d, %s0, %s1, %s2", [32] * 3,
                   lambda a, b, c: a if signed(c, 32) >= 0 else b)
    check_integers("set.gt.u32.s32 %d, %s0, %s1", [32] * 2,
                   lambda a, b: -1 if signed(a, 32) > signed(b, 32) else 0)


def test_packing_and_unpacking():
    check_integers("mov.b64 %d, {%s0, %s1}", [32, 32], lambda a, b: b << 32 | a, 64)
    check_integers("mov.b32 %d, {%s0, %s1}", [16, 16], lambda a, b: b << 16 | a)
    check_integers(".reg .b32 %x;\nmov.b64 {%x, %d}, %s0", [64], lambda a: a >> 32)
    check_integers("mov.b64 {%d, _}, %s0", [64], lambda a: a)
    check_integers(".reg .b16 %x;\nmov.b32 {%x, %d}, %s0", [32], lambda a: a >> 16, 16)
    check_integers(".reg .b128 %q;\nmov.b128 %q, {%s0, %s1};\nmov.b128 {_, %d}, %q", [64, 64],
                   lambda a, b: b, 64)
    check_integers("mov.b64 %d, {%s0, %s1, %s2, %s3}", [16] * 4,
                   lambda a, b, c, d: a | b << 16 | c << 32 | d << 48, 64)


def test_integer_conversions():
    for to, bits in (("u32", 32), ("s32", 32), ("u64", 64), ("s64", 64), ("u16", 16)):
        for source, width in (("u32", 32), ("s32", 32), ("u16", 16), ("s16", 16), ("s64", 64)):
            take = (lambda a, w=width: signed(a, w)) if source[0] == "s" else (lambda a: a)
            check_integers(f"cvt.{to}.{source} %d, %s0", [width], take, bits)
    check_integers("cvt.sat.s16.s32 %d, %s0", [32],
                   lambda a: min(max(signed(a, 32), -32768), 32767), 16)
    check_integers("cvt.sat.u32.s32 %d, %s0", [32], lambda a: max(signed(a, 32), 0))
    check_integers("cvt.sat.u8.u32 %d, %s0", [32], lambda a: min(a, 255))
    check_integers("cvt.s32.s8 %d, %s0", [32], lambda a: signed(a, 8))


def test_guard_keeps_the_old_value():
    check_integers("mov.b32 %d, %s1;\n@%s2 add.u32 %d, %s0, 1", [32, 32, 1],
                   lambda a, b, p: a + 1 if p & 1 else b)
    check_integers("mov.b64 %d, {%s0, %s1};\n@!%s2 mov.b64 %d, {%s1, %s0}", [32, 32, 1],
                   lambda a, b, p: b << 32 | a if p & 1 else a << 32 | b, 64)


# Address instructions.

def test_shared_addresses_carry_the_rank_and_survive_generic_windows():
    body = """
    .reg .b32 %s, %m, %c; .reg .b64 %l, %g, %b; .reg .pred %p, %q;
    mov.b32 %s, buffer;
    cvt.u64.u32 %l, %s;
    cvta.shared.u64 %g, %l;
    cvta.to.shared::cluster.u64 %b, %g;
    mapa.shared::cluster.u32 %m, %s, 3;
    isspacep.shared %p, %g;
    isspacep.global %q, %g;
    """
    run = run_warp(body, {}, ["%s", "%g", "%b", "%m", "%p", "%q"],
                   head=".shared .align 16 .b8 buffer[64];",
                   specials={"%cluster_ctarank": 1})
    assert set(run["%s"]) == {0x01000400} and set(run["%m"]) == {0x03000400}
    assert set(run["%b"]) == {0x01000400} and run["%g"][0] >> 56 == 0x7F
    assert run["%p"] == 0xFFFFFFFF and run["%q"] == 0


def test_special_registers():
    body = (".reg .b32 %x, %y, %l, %c; mov.u32 %x, %tid.x; mov.u32 %y, %tid.y;"
            "mov.u32 %l, %laneid; mov.u32 %c, %ctaid.z;")
    run = run_warp(body, {}, ["%x", "%y", "%l", "%c"], index=1,
                   specials={"%ntid.x": 24, "%ntid.y": 4, "%ctaid.z": 7})
    thread = 32 + np.arange(32)
    assert (run["%x"] == thread % 24).all() and (run["%y"] == thread // 24).all()
    assert (run["%l"] == np.arange(32)).all() and set(run["%c"]) == {7}


# Floats.

def as_float(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.uint32).view(np.float32)


def same_float(got: np.ndarray, want: np.ndarray) -> None:
    """Bitwise equality, all NaNs alike."""
    got, want = np.asarray(got, np.uint32), np.asarray(want, np.float32).view(np.uint32)
    nan = np.isnan(as_float(got)) & np.isnan(as_float(want))
    wrong = np.flatnonzero((got != want) & ~nan)
    assert not wrong.size, (wrong[0], hex(got[wrong[0]]), hex(want[wrong[0]]))


def flushed(values: np.ndarray) -> np.ndarray:
    values = np.array(values, np.float32)
    small = np.abs(values) < np.float32(2.0 ** -126)
    return np.where(small, np.copysign(np.float32(0), values), values).astype(np.float32)


@np.errstate(all="ignore")
def rounded(exact: Fraction, mode: str, zero_sign: int) -> np.float32:
    """An exact value to float32 by rn, rz, rm or rp."""
    if exact == 0:
        return np.float32(-0.0 if zero_sign else 0.0)
    # The neighbour below in magnitude: cut to 24 bits, or to the subnormal spacing.
    magnitude = abs(exact)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 25,
                   -149)
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    low = int(scaled)
    rest = scaled - low
    up = {"rz": False, "rm": exact < 0, "rp": exact > 0,
          "rn": rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1}[mode] and rest != 0
    value = (low + int(up)) * Fraction(2) ** exponent
    if value >= Fraction(2) ** 128:
        away = {"rz": False, "rm": exact < 0, "rp": exact > 0, "rn": True}[mode]
        value = np.float32(np.inf) if away else np.finfo(np.float32).max
    else:
        value = np.float32(float(value))
    return np.float32(-value if exact < 0 else value)


@np.errstate(all="ignore")
def reference(operation: str, mode: str, values: list[np.float32]) -> np.float32:
    a, b, c = (*values, np.float32(0))[:3] if operation != "fma" else values
    exact = {"add": lambda: np.float64(a) + b, "mul": lambda: np.float64(a) * b,
             "fma": lambda: np.float64(a) * b + c}[operation]()
    if not all(np.isfinite(v) for v in values):
        return np.float32(exact)
    fa, fb, fc = Fraction(float(a)), Fraction(float(b)), Fraction(float(c))
    value = {"add": fa + fb, "mul": fa * fb, "fma": fa * fb + fc}[operation]
    negative = [bool(np.signbit(v)) for v in values]
    if operation == "mul":
        return rounded(value, mode, negative[0] ^ negative[1])
    terms = negative if operation == "add" else [negative[0] ^ negative[1], negative[2]]
    zero_sign = all(terms) or (mode == "rm" and any(terms))
    if value == 0 and not any(Fraction(float(v)) for v in values):
        return rounded(value, mode, zero_sign)
    # An exact cancellation of nonzero terms: +0, or -0 when rounding down.
    cancels = {"add": fa != 0, "fma": fa * fb != 0}[operation]
    return rounded(value, mode, mode == "rm" if value == 0 and cancels else zero_sign)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_f32_rounding(operation, mode):
    count = 3 if operation == "fma" else 2
    sources = [float_words(10 * count + n) for n in range(count)]
    # Near cancellation, for every rounding: the last operand undoes the rest, almost.
    with np.errstate(all="ignore"):
        product = as_float(sources[0]) * (as_float(sources[1]) if operation == "fma" else 1)
    sources[-1][::5] = (-product[::5]).view(np.uint32) if operation != "mul" else sources[-1][::5]
    operands = ", ".join(f"%s{n}" for n in range(count))
    got = evaluate(f"{operation}.{mode}.f32 %d, {operands}", sources, [32] * count)
    want = [reference(operation, mode, [as_float(s[row:row + 1])[0] for s in sources])
            for row in range(len(got))]
    same_float(got, want)


@pytest.mark.parametrize("operation,mode", [("add", "rn"), ("add", "rm"), ("mul", "rn"),
                                            ("fma", "rn"), ("sub", "rn"), ("fma", "rz")])
def test_f32x2_does_each_half_like_f32(operation, mode):
    count = 3 if operation == "fma" else 2
    halves = [[float_words(50 + 2 * n), float_words(51 + 2 * n)] for n in range(count)]
    packed = [low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
              for low, high in halves]
    operands = ", ".join(f"%s{n}" for n in range(count))
    for ftz in ("", ".ftz"):
        got = evaluate(f"{operation}.{mode}{ftz}.f32x2 %d, {operands}", packed, [64] * count, 64)
        for half in (0, 1):
            single = evaluate(f"{operation}.{mode}{ftz}.f32 %d, {operands}",
                              [pair[half] for pair in halves], [32] * count)
            part = (got >> np.uint64(32 * half)).astype(np.uint32)
            same_float(part, as_float(single))


@np.errstate(all="ignore")
def test_ftz_and_sat():
    a, b, c = float_words(70), float_words(71), float_words(72)
    fa, fb = flushed(as_float(a)), flushed(as_float(b))
    same_float(evaluate("add.ftz.f32 %d, %s0, %s1", [a, b], [32] * 2), flushed(fa + fb))
    same_float(evaluate("mul.ftz.f32 %d, %s0, %s1", [a, b], [32] * 2), flushed(fa * fb))
    want = as_float(a) + as_float(b)
    want = np.where(np.isnan(want), 0, np.clip(want, 0, 1)).astype(np.float32) + np.float32(0)
    same_float(evaluate("add.sat.f32 %d, %s0, %s1", [a, b], [32] * 2), want)
    same_float(evaluate("sub.f32 %d, %s0, %s1", [a, c], [32] * 2), as_float(a) - as_float(c))
    same_float(evaluate("neg.f32 %d, %s0", [a], [32]), -as_float(a))
    same_float(evaluate("abs.ftz.f32 %d, %s0", [a], [32]), np.abs(fa))
    same_float(evaluate("div.rn.f32 %d, %s0, %s1", [a, b], [32] * 2), as_float(a) / as_float(b))
    same_float(evaluate("sqrt.rn.f32 %d, %s0", [a], [32]), np.sqrt(as_float(a)))


def _extreme(values, larger: bool, keep_nan: bool):
    """PTX min or max of Python float32 values."""
    numbers = [v for v in values if not np.isnan(v)]
    if not numbers or keep_nan and len(numbers) < len(values):
        return np.float32(np.nan)
    return sorted(numbers, key=lambda v: (v, not np.signbit(v)))[-1 if larger else 0]


@pytest.mark.parametrize("count", [2, 3])
def test_min_max(count):
    sources = [float_words(80 + n) for n in range(count)]
    operands = ", ".join(f"%s{n}" for n in range(count))
    rows = list(zip(*(as_float(s) for s in sources), strict=True))
    for name in ("min", "max"):
        for modifier in ("", ".NaN"):
            got = evaluate(f"{name}{modifier}.f32 %d, {operands}", sources, [32] * count)
            same_float(got, [_extreme(row, name == "max", bool(modifier)) for row in rows])
    got = evaluate(f"max.ftz.f32 %d, {operands}", sources, [32] * count)
    same_float(got, [_extreme(flushed(np.array(row)), True, False) for row in rows])
    assert (got[np.isnan(as_float(got))] == 0x7FFFFFFF).all()


def test_max_xorsign_abs():
    a, b = float_words(90), float_words(91)
    got = evaluate("max.xorsign.abs.f32 %d, %s0, %s1", [a, b], [32] * 2)
    want = [np.copysign(_extreme([abs(x), abs(y)], True, False),
                        np.float32(-1) if np.signbit(x) != np.signbit(y) else np.float32(1))
            for x, y in zip(as_float(a), as_float(b), strict=True)]
    same_float(got, want)


@np.errstate(all="ignore")
def test_float_comparisons():
    a, b = float_words(100), float_words(101)
    x, y = as_float(a), as_float(b)
    unordered = np.isnan(x) | np.isnan(y)
    ordered = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    for name, holds in ordered.items():
        got = evaluate(f"setp.{name}.f32 %d, %s0, %s1", [a, b], [32] * 2, 1)
        assert (got == (holds & ~unordered)).all(), name
        got = evaluate(f"setp.{name}u.f32 %d, %s0, %s1", [a, b], [32] * 2, 1)
        assert (got == (holds | unordered)).all(), name
    assert (evaluate("setp.nan.f32 %d, %s0, %s1", [a, b], [32] * 2, 1) == unordered).all()
    assert (evaluate("setp.num.f32 %d, %s0, %s1", [a, b], [32] * 2, 1) == ~unordered).all()


# Conversions.

def half_reference(values: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """float32 patterns to f16 or bf16 patterns, rounded by hand; NaN is 0x7FFF."""
    result = []
    for value in as_float(values):
        if np.isnan(value):
            result.append(0x7FFF)
            continue
        sign, magnitude = (0x8000 if np.signbit(value) else 0), abs(float(value))
        mantissa, bias, top = (10, 15, 0x7C00) if kind == "f16" else (7, 127, 0x7F80)
        if np.isinf(magnitude):
            result.append(sign | top)
            continue
        exponent = max(int(np.frexp(magnitude)[1]) - 1, 1 - bias) if magnitude else 1 - bias
        units = Fraction(magnitude) / Fraction(2) ** (exponent - mantissa)
        low, rest = int(units), units - int(units)
        up = mode == "rn" and (rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1)
        bits = ((exponent + bias - 1) << mantissa) + low + int(up)
        result.append(sign | min(bits, top if mode == "rn" else top - 1))
    return np.array(result, np.uint32)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_float_to_half(kind, mode):
    a, b = float_words(110), float_words(111)
    a[::4] = (np.linspace(-70000, 70000, len(a[::4]), dtype=np.float32)).view(np.uint32)
    b[::4] = np.float32(2.0 ** -16) .view(np.uint32) + np.arange(len(b[::4]), dtype=np.uint32)
    want = [half_reference(v, kind, mode) for v in (a, b)]
    assert (evaluate(f"cvt.{mode}.{kind}.f32 %d, %s0", [a], [32], 16) == want[0]).all()
    got = evaluate(f"cvt.{mode}.{kind}x2.f32 %d, %s0, %s1", [a, b], [32] * 2)
    assert (got == (want[0] << 16 | want[1])).all()
    relu = evaluate(f"cvt.{mode}.relu.{kind}x2.f32 %d, %s0, %s1", [a, b], [32] * 2)
    negative = (want[0] >= 0x8000) & (want[0] != 0x7FFF)
    assert ((relu >> 16) == np.where(negative, 0, want[0])).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_factors_of_a_float_sum(kind):
    """fma.f32.bf16 and its like: every product and sum here is exact in float64, then rounded."""
    a, b, c = (np.random.default_rng(n).normal(size=64).astype(np.float32) for n in range(3))
    a, b = (v.astype(np.float16).astype(np.float32) for v in (a, b))
    if kind == "bf16":
        a, b = (as_float(v.view(np.uint32) & 0xFFFF0000) for v in (a, b))
    halves = [v.view(np.uint32) >> 16 if kind == "bf16" else v.astype(np.float16).view(np.uint16)
              for v in (a, b)]
    halves = [v.astype(np.uint32) for v in halves]
    floats = c.view(np.uint32)
    got = evaluate(f"fma.rn.f32.{kind} %d, %s0, %s1, %s2", [*halves, floats], [16, 16, 32])
    same_float(got, (a.astype(np.float64) * b + c).astype(np.float32))
    got = evaluate(f"add.rn.f32.{kind} %d, %s0, %s1", [halves[0], floats], [16, 32])
    same_float(got, (a.astype(np.float64) + c).astype(np.float32))


def test_half_to_float_and_half_arithmetic():
    halves = np.arange(0, 65536, 97, dtype=np.uint32)[:640]
    got = evaluate("cvt.f32.f16 %d, %s0", [halves], [16])
    same_float(got, halves.astype(np.uint16).view(np.float16).astype(np.float32))
    got = evaluate("cvt.f32.bf16 %d, %s0", [halves], [16])
    same_float(got, as_float(halves << 16))
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 65536, 128, dtype=np.uint32) for _ in range(3))
    with np.errstate(all="ignore"):
        x, y = (v.astype(np.uint16).view(np.float16) for v in (a, b))
        for name, want in (("add", x + y), ("mul", x * y), ("sub", x - y)):
            got = evaluate(f"{name}.f16 %d, %s0, %s1", [a, b], [16] * 2, 16)
            finite = ~np.isnan(want)
            assert (got[finite] == want.view(np.uint16)[finite]).all(), name
    floats = [as_float(v << 16) for v in (a, b, c)]
    rows = [reference("fma", "rz", list(row)) for row in zip(*floats, strict=True)]
    exact = [None if not np.isfinite(r) else r for r in rows]
    got = evaluate("fma.rn.bf16x2 %d, %s0, %s1, %s2",
                   [v | v << 16 for v in (a, b, c)], [32] * 3)
    for row, value in enumerate(exact):
        if value is None:
            continue
        fraction = Fraction(float(floats[0][row])) * Fraction(float(floats[1][row])) \
            + Fraction(float(floats[2][row]))
        want = _nearest_bf16(fraction)
        if want is not None and fraction != 0:
            assert got[row] & 0xFFFF == want and got[row] >> 16 == want


def _nearest_bf16(value: Fraction) -> int | None:
    """Nearest bf16 pattern of an exact value, ties to even; None near overflow."""
    magnitude = abs(value)
    if magnitude >= Fraction(2) ** 127 or magnitude == 0:
        return None
    exponent = -126
    while exponent < 127 and magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = magnitude / Fraction(2) ** (exponent - 7)
    low, rest = int(units), units - int(units)
    up = rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1
    return (0x8000 if value < 0 else 0) | ((exponent + 126) << 7) + low + int(up)


@np.errstate(all="ignore")
def test_float_to_integer():
    a = float_words(120)
    a[::2] = np.linspace(-3e9, 5e9, len(a[::2]), dtype=np.float32).view(np.uint32)
    a[1::4] = (np.arange(len(a[1::4]), dtype=np.float32) / 2 - 7).view(np.uint32)
    wide = as_float(a).astype(np.float64)
    modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, function in modes.items():
        for name, low, high in (("s32", -2**31, 2**31 - 1), ("u32", 0, 2**32 - 1),
                                ("s16", -2**15, 2**15 - 1)):
            want = np.clip(np.where(np.isnan(wide), 0, function(wide)), low, high)
            bits = int(name[1:])
            got = evaluate(f"cvt.{mode}.{name}.f32 %d, %s0", [a], [32], bits)
            assert (got == want.astype(np.int64) % (1 << bits)).all(), (mode, name)
        same_float(evaluate(f"cvt.{mode}.f32.f32 %d, %s0", [a], [32]), function(as_float(a)))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(mode):
    a = words(32, 130)
    for name, value in both(32):
        want = [rounded(Fraction(value(int(v))), mode, 0) for v in a]
        same_float(evaluate(f"cvt.{mode}.f32.{name} %d, %s0", [a], [32]), want)


# Approximate functions.

def sweep(low: float, high: float, count: int = 4096) -> np.ndarray:
    return np.linspace(low, high, count, dtype=np.float32)


def apply(instruction: str, values: np.ndarray) -> np.ndarray:
    return as_float(evaluate(f"{instruction} %d, %s0", [values.view(np.uint32)], [32]))


def test_ex2():
    x = sweep(-126, 127.99)
    error = apply("ex2.approx.ftz.f32", x) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 2.0 ** -22
    special = np.array([-np.inf, np.inf, 0, -0.0, 128, -126, -126.00001, -150, 1, -1, 127, 1e30,
                        -1e30, 1e-40] + [0] * 18, np.float32)
    want = np.array([0, np.inf, 1, 1, np.inf, 2.0**-126, 0, 0, 2, 0.5, 2.0**127, np.inf, 0, 1]
                    + [1] * 18, np.float32)
    same_float(apply("ex2.approx.ftz.f32", special).view(np.uint32), want)
    assert not np.signbit(apply("ex2.approx.ftz.f32", special)).any()
    assert np.isnan(apply("ex2.approx.ftz.f32", np.full(32, np.nan, np.float32))).all()
    low = sweep(-149, -126, 1024)
    got = apply("ex2.approx.f32", low).astype(np.float64)
    assert np.abs(got - np.exp2(low.astype(np.float64))).max() <= 2.0 ** -149
    assert (apply("ex2.approx.f32", np.full(32, -151, np.float32)) == 0).all()


@np.errstate(all="ignore")
def test_logarithm_and_reciprocals():
    x = np.exp2(sweep(-126, 127)).astype(np.float32)
    exact = np.log2(x.astype(np.float64))
    got = apply("lg2.approx.ftz.f32", x)
    near = (x > 0.5) & (x < 2)
    assert np.abs(got - exact)[near].max() < 2.0 ** -22
    assert np.abs(got / exact - 1)[~near].max() < 2.0 ** -22
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2.0**-149] + [1] * 24, np.float32)
    want = [-np.inf, -np.inf, 0, np.nan, np.inf, np.nan, np.nan, -149] + [0] * 24
    same_float(apply("lg2.approx.f32", special).view(np.uint32), want)
    assert np.isneginf(apply("lg2.approx.ftz.f32", special)[7])
    same_float(apply("rcp.approx.ftz.f32", x).view(np.uint32), flushed(1 / x))
    assert np.abs(apply("rsqrt.approx.ftz.f32", x) * np.sqrt(x.astype(np.float64)) - 1).max() \
        < 2.0 ** -22
    zeros = np.array([0, -0.0, np.inf, -np.inf] * 8, np.float32)
    same_float(apply("rcp.approx.ftz.f32", zeros).view(np.uint32), 1 / zeros)
    same_float(apply("rsqrt.approx.f32", zeros).view(np.uint32),
               [np.inf, -np.inf, 0, np.nan] * 8)


@np.errstate(all="ignore")
def test_trigonometry():
    x = sweep(-np.pi, np.pi)
    wide = x.astype(np.float64)
    assert np.abs(apply("sin.approx.f32", x) - np.sin(wide)).max() < 2.0 ** -20.5
    assert np.abs(apply("cos.approx.f32", x) - np.cos(wide)).max() < 2.0 ** -20.5
    x = np.concatenate((sweep(-10, 10), sweep(-1e-3, 1e-3)))
    exact = np.tanh(x.astype(np.float64))
    got = apply("tanh.approx.f32", x)
    assert np.abs(got - exact).max() < 2.0 ** -20
    assert np.abs(got / exact - 1)[exact != 0].max() < 2.0 ** -11
    assert np.isnan(apply("sin.approx.f32", np.full(32, np.inf, np.float32))).all()


# Missing instructions are refused, by name.

@pytest.mark.parametrize("text", [
    "frobnicate.b32 %d, %s0", "add.rx.f32 %d, %s0, %s0", "shl.u32 %d, %s0, 1",
    "ld.shared.v3.b32 %d, [%s0]", "mul.s32 %d, %s0, %s0", "cvt.f32.s64.rn %d, %s0"])
def test_unknown_instructions_are_named(text):
    with pytest.raises(UnknownInstruction) as caught:
        compile_body(f".reg .b32 %d, %s0;\n{text};")
    assert text in str(caught.value)
