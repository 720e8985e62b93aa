"""Native machine operations give what the executors in Python give, bit for bit."""

import ctypes

import numpy as np
import pytest
from native_rig import Rig, operation
from tcgen05_operands import descriptor_of, issue, make_ctas, pack_pair

from sm100_sim.isa.tensor import tensor_core
from sm100_sim.isa.tensor.descriptors import encode_instruction
from sm100_sim.native import layout
from sm100_sim.native.calling import callable_of
from sm100_sim.native.operands import DONE, PYTHON
from sm100_sim.native.products import perform_issued
from sm100_sim.run.blas import sgemm

pytestmark = [
    pytest.mark.simulator,
    # Native code multiplies by the OpenBLAS of numpy's wheels; without it, Python does.
    pytest.mark.skipif(not sgemm()[0], reason="numpy has another BLAS than its wheels"),
]


def random_bits(rng, count: int, dtype: str) -> np.ndarray:
    """Elements (uint16) of normally distributed numbers."""
    numbers = rng.standard_normal(count).astype(np.float32)
    if dtype == "f16":
        return numbers.astype(np.float16).view(np.uint16)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def random_operands(seed: int, group: int, dtype: str):
    """CTAs whose shared and tensor memory hold random numbers of the type."""
    rng = np.random.default_rng(seed)
    ctas = make_ctas(group)
    for cta in ctas:
        cta.smem[:] = random_bits(rng, cta.smem.size // 2, dtype).view(np.uint8)
        cells = cta.tmem.cells
        cells[:] = random_bits(rng, 2 * cells.size, dtype).view(np.uint32).reshape(cells.shape)
    return ctas


def operands_of(ctas, m, n, k, dtype, majors, spans, a_in_tmem):
    """Descriptors of operands somewhere in shared memory; contents stay as they are."""
    kept = [cta.smem.copy() for cta in ctas]
    zeros = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
    a, b = pack_pair(ctas, *zeros, (dtype, dtype), majors, spans)
    for cta, smem in zip(ctas, kept, strict=True):
        cta.smem[:] = smem
    return ([256 + 8 * i for i in range(k // 16)] if a_in_tmem else a), b


def issue_natively(rig, run, group, a_in_tmem, raw) -> list[int]:
    return [
        rig.call(
            "tensor_mma",
            operation([mma.d, mma.a, mma.b, raw, int(mma.accumulate)], [group, int(a_in_tmem)]),
        )
        for mma in run
    ]


FORMS = [(majors, spans, False) for majors in ((0, 0), (1, 0), (0, 1), (1, 1))
         for spans in ((128, 128), (64, 32), (0, 128), (32, 0))]  # fmt: skip
FORMS += [((0, 1), (128, 128), True), ((0, 0), (128, 64), True)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("majors", "spans", "a_in_tmem"), FORMS)
def test_products_are_the_same_bits(majors, spans, a_in_tmem, group, dtype):
    m, n, k = 128 * group, 96, 64
    descriptor = descriptor_of(
        "f16",
        m,
        n,
        (dtype, dtype, "f32"),
        group=group,
        a_mn_major=bool(majors[0]),
        b_mn_major=bool(majors[1]),
    )
    results = []
    for native in (False, True):
        ctas = random_operands(7, group, dtype)
        a, b = operands_of(ctas, m, n, k, dtype, majors, spans, a_in_tmem)
        first = issue(ctas, descriptor, a, b, a_in_tmem=a_in_tmem, d=32)
        again = issue(ctas, descriptor, a, b, a_in_tmem=a_in_tmem, d=32, accumulate=True)[:3]
        other = issue(ctas, descriptor, a[1:], b[:-1], a_in_tmem=a_in_tmem, d=128)
        if native:
            rig, raw = Rig(ctas), encode_instruction(descriptor)
            # A chain ends at an mma that does not continue it, or at a fence.
            for run, fence in ((first, True), (again, False), (other, True)):
                outcomes = issue_natively(rig, run, group, a_in_tmem, raw)
                assert set(outcomes) == {DONE}
                if fence:
                    assert rig.call("fence_before", operation([])) == DONE
            assert rig.context.chain_length == 0
        else:
            for run in (first, again, other):
                tensor_core.execute(run)
        results.append([cta.tmem.cells.copy() for cta in ctas])
    for slow, fast in zip(*results, strict=True):
        assert np.array_equal(slow, fast)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("sparse", lambda raw: raw | 4),
        ("negated", lambda raw: raw | 1 << 13),
        ("half accumulator", lambda raw: raw & ~(3 << 4)),
        ("64 rows", lambda raw: raw & ~(31 << 24) | 4 << 24),
    ],
)
def test_other_products_are_left_to_python(what, change):
    ctas = random_operands(1, 1, "bf16")
    a, b = operands_of(ctas, 128, 64, 16, "bf16", (0, 0), (128, 128), False)
    raw = encode_instruction(descriptor_of("f16", 128, 64, ("bf16", "bf16", "f32")))
    rig = Rig(ctas)
    values = [0, a[0], b[0], change(raw), 0]
    assert rig.call("tensor_mma", operation(values, [1, 0])) == PYTHON
    assert rig.context.chain_length == 0
    assert rig.call("tensor_mma", operation([0, a[0], b[0], raw, 0], [1, 0]), lanes=3) == PYTHON


@pytest.mark.parametrize(
    ("what", "d", "a", "b"),
    [
        ("columns that are not allocated", 480, None, None),
        ("a D that does not start at lane 0", 16 << 16, None, None),
        ("A outside shared memory", 0, 0x3FFF, None),
        ("B outside shared memory", 0, None, 0x3FFF),
    ],
)
def test_operands_outside_are_left_to_python(what, d, a, b):
    ctas = make_ctas(1, 256)
    a_raw, b_raw = operands_of(ctas, 128, 64, 16, "bf16", (0, 0), (128, 128), False)
    a_raw, b_raw = (
        raw[0] & ~0x3FFF | start if start else raw[0] for raw, start in ((a_raw, a), (b_raw, b))
    )
    raw = encode_instruction(descriptor_of("f16", 128, 64, ("bf16", "bf16", "f32")))
    rig = Rig(ctas)
    before = ctas[0].tmem.cells.copy()
    assert rig.call("tensor_mma", operation([d, a_raw, b_raw, raw, 0], [1, 0])) == DONE
    assert rig.call("fence_before", operation([])) == PYTHON
    assert rig.context.chain_length == 1
    assert np.array_equal(ctas[0].tmem.cells, before)


def test_what_python_has_issued_is_performed_or_refused_as_a_whole():
    """Bits equal numpy's; a descriptor that is not covered changes nothing."""
    descriptor = descriptor_of("f16", 128, 96, ("bf16", "bf16", "f32"))
    results = []
    for native in (False, True):
        ctas = random_operands(3, 1, "bf16")
        a, b = operands_of(ctas, 128, 96, 64, "bf16", (0, 0), (128, 128), False)
        run = issue(ctas, descriptor, a, b, d=32)
        if not native:
            tensor_core.execute(run)
        else:
            rig, raw = Rig(ctas), encode_instruction(descriptor)
            chain = layout.Chain(
                d=32, descriptor=raw, group=1, a=tuple(m.a for m in run), b=tuple(m.b for m in run)
            )
            before = ctas[0].tmem.cells.copy()
            for wrong in ({"descriptor": raw | 1 << 13}, {"d": 480}):
                refused = layout.Chain.from_buffer_copy(chain)
                for name, value in wrong.items():
                    setattr(refused, name, value)
                assert not perform(rig, refused, len(run))
            refused = layout.Chain.from_buffer_copy(chain)
            refused.b[len(run) - 1] |= 1 << 61
            assert not perform(rig, refused, len(run))
            assert np.array_equal(ctas[0].tmem.cells, before)
            assert perform(rig, chain, len(run))
        results.append(ctas[0].tmem.cells)
    assert np.array_equal(*results)


def perform(rig: Rig, chain: layout.Chain, count: int) -> bool:
    return callable_of(perform_issued)(
        ctypes.addressof(rig.context), ctypes.addressof(chain), count
    )
