"""The language of native routines: what it computes, and what it refuses."""

import ctypes

import numpy as np
import pytest

from sm100_sim.jit import engine
from sm100_sim.jit.engine import native_engine
from sm100_sim.native.calling import callable_of
from sm100_sim.native.compiler import NativeError, module_text
from sm100_sim.native.language import (
    bits_of,
    boolean,
    copy,
    f32,
    fill,
    half_to_float,
    i32,
    i64,
    native,
    popcount,
    ptr,
    stack,
    trailing_zeros,
    u8,
    u16,
    u32,
    u64,
    widen_bf16,
    widen_f16,
)

pytestmark = pytest.mark.simulator
CONSTANT = 7


class Pair(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint32), ("high", ctypes.c_int64), ("more", ctypes.c_uint16 * 3),
                ("next", ctypes.c_uint64)]  # fmt: skip
    pointers = {"next": lambda: Pair}


@native
def arithmetic(a: u32, b: u32, c: i32, d: i32) -> u64:
    total = u64((a + b * 3 - CONSTANT) ^ (a << 2 | b >> 1)) << 32
    total += u64((a // (b | 1)) + a % (b | 1))
    return total + u64(u32(c >> 3) & 0xFFFF) + (u64(1) if c < d else u64(0))


@native
def collatz(n: u64, limit: u64) -> u64:
    steps: u64 = 0
    while n != 1 and steps < limit:
        if n & 1 == 1:
            n = 3 * n + 1
        else:
            n = n >> 1
        steps += 1
    return steps


@native
def sum_of(values: ptr[u16], count: u64) -> u64:
    total: u64 = 0
    for i in range(count):
        if values[i] == 0:
            continue
        if values[i] == 0xFFFF:
            break
        total += u64(values[i])
    return total


@native
def walk(p: ptr[Pair]) -> i64:
    total: i64 = 0
    while p:
        p.low += 1
        p.more[2] = u16(p.low)
        total += p.high
        p = p.next
    return total


@native
def logic(a: u32, b: u32) -> u32:
    both = a > 3 and (b > 3 or not b == 2)
    return u32(both) + (u32(2) if not both and a == b else u32(0))


@native
def numbers(x: u32, half: u16) -> f32:
    return bits_of(x) * 2.0 + half_to_float(half)


@native
def bits(x: u64) -> u64:
    room = stack(u64, 4)
    fill(ptr[u8](room), u8(0), 32)
    room[1] = popcount(x)
    room[2] = trailing_zeros(x)
    copy(room + 3, room + 1, 8)
    return room[0] + room[3] * 100 + room[2]


@native
def widened(target: ptr[f32], source: ptr[u16], count: u64, bf16: u32) -> None:
    for i in range(count):
        if bf16 == 1:
            widen_bf16(target + i * 8, source + i * 8)
        else:
            widen_f16(target + i * 8, source + i * 8)


@pytest.fixture(scope="module")
def functions():
    routines = (arithmetic, collatz, sum_of, walk, logic, numbers, bits)
    engine = native_engine(module_text(routines))

    def get(routine, result, *parameters):
        kind = ctypes.CFUNCTYPE(result, *parameters)
        return kind(engine.get_function_address(routine.name))

    get.engine = engine
    return get


def test_integers(functions):
    run = functions(arithmetic, ctypes.c_uint64, *[ctypes.c_uint32] * 2, *[ctypes.c_int32] * 2)
    rng = np.random.default_rng(0)
    for a, b, c, d in rng.integers(0, 1 << 32, (50, 4)).tolist():
        c, d = c - (1 << 31), d - (1 << 31)
        first = (a + 3 * b - 7 ^ (a << 2 | b >> 1)) & 0xFFFFFFFF
        rest = ((a // (b | 1)) + a % (b | 1) & 0xFFFFFFFF) + (c >> 3 & 0xFFFF) + (c < d)
        assert run(a, b, c, d) == ((first << 32) + rest) % 2**64


def test_loops(functions):
    run = functions(collatz, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    assert run(27, 1000) == 111 and run(27, 5) == 5 and run(1, 9) == 0
    total = functions(sum_of, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    values = np.array([5, 0, 7, 0xFFFF, 9], np.uint16)
    assert total(values.ctypes.data, 5) == 12 and total(values.ctypes.data, 2) == 5


def test_structures(functions):
    last = Pair(1, -5)
    first = Pair(9, 3, next=ctypes.addressof(last))
    assert functions(walk, ctypes.c_int64, ctypes.c_uint64)(ctypes.addressof(first)) == -2
    assert (first.low, last.low, first.more[2], last.more[2]) == (10, 2, 10, 2)


def test_logic(functions):
    run = functions(logic, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
    for a in range(6):
        for b in range(6):
            both = a > 3 and (b > 3 or b != 2)
            assert run(a, b) == both + (2 if not both and a == b else 0)


def test_floats_and_bits(functions):
    run = functions(numbers, ctypes.c_float, ctypes.c_uint32, ctypes.c_uint16)
    assert run(0x40490000, 0x3C00) == 2 * 3.140625 + 1
    assert functions(bits, ctypes.c_uint64, ctypes.c_uint64)(0b1101000) == 303


@native
def mixes(a: u32, b: u64) -> u64:
    return a + b


@native
def untyped(a: u32) -> u32:
    x = 3
    return x + a


@native
def negative_division(a: i32) -> i32:
    return a // 2


@native
def unknown_name(a: u32) -> boolean:
    return a == elsewhere  # noqa: F821


@native
def comprehension(a: u32) -> u32:
    return [a][0]


@pytest.mark.parametrize(
    ("routine", "why"),
    [(mixes, "must stand"), (untyped, "annotate"), (negative_division, "signed"),
     (unknown_name, "elsewhere"), (comprehension, "List")],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_refuses(routine, why):
    with pytest.raises(NativeError, match=why):
        module_text([routine])


def test_only_compiled():
    with pytest.raises(TypeError, match="compiled"):
        arithmetic(1, 2, 3, 4)


def test_a_cpu_without_half_precision_is_refused(monkeypatch):
    """An old CPU, or a virtual one: an error in words where conversions would crash."""
    features = engine.llvm.get_host_cpu_features()
    features["f16c"] = False
    monkeypatch.setattr(engine.llvm, "get_host_cpu_features", lambda: features)
    with pytest.raises(RuntimeError, match="F16C.*for a virtual machine choose a CPU model"):
        engine.host.__wrapped__()


@pytest.mark.parametrize("bf16", [False, True])
def test_eight_elements_widen_exactly(bf16):
    halves, out = np.arange(1 << 16, dtype=np.uint16), np.empty(1 << 16, np.float32)
    callable_of(widened)(out.ctypes.data, halves.ctypes.data, len(out) // 8, bf16)
    bits = (halves.astype(np.uint32) << 16).view(np.float32)
    expected = bits if bf16 else halves.view(np.float16).astype(np.float32)
    assert np.array_equal(out, expected, equal_nan=True)
