"""tcgen05 numerics: mma against float64 products of independently packed operands, TMEM rules,
and every ld/st shape against its written formula."""

import ctypes
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_text import run_kernel_text
from tcgen05_operands import (
    descriptor_of,
    issue,
    make_ctas,
    pack_pair,
    random_values,
    read_d,
    to_bits,
)

from sm100_sim.errors import MemoryFault, SimulationError, TmemError
from sm100_sim.isa.tensor import tensor_core
from sm100_sim.isa.tensor.descriptors import KINDS, MatrixDescriptor, encode_matrix
from sm100_sim.isa.tensor.tcgen05_data import SHAPES, Form, fragment_record
from sm100_sim.native.calling import callable_of
from sm100_sim.native.fragments import load_fragment, store_fragment
from sm100_sim.state.tmem import POISON, Tmem
from sm100_sim.tools.golden.instructions import mma
from sm100_sim.tools.golden.replay import replay

SWIZZLES = (0, 32, 64, 128)


@pytest.mark.parametrize("spans", [(0, 32), (32, 64), (64, 128), (128, 128), (128, 0)])
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("group", "m", "n"), [(1, 64, 64), (1, 128, 256), (2, 128, 128), (2, 256, 128)]
)
def test_mma_from_shared(group, m, n, majors, spans):
    rng = np.random.default_rng(1)
    ctas = make_ctas(group)
    a, b = random_values(rng, (m, 64), "bf16"), random_values(rng, (n, 64), "bf16")
    a_raw, b_raw = pack_pair(ctas, a, b, ("bf16", "bf16"), majors, spans)
    descriptor = descriptor_of(
        "f16",
        m,
        n,
        ("bf16", "bf16", "f32"),
        group=group,
        a_mn_major=majors[0],
        b_mn_major=majors[1],
    )
    tensor_core.execute(issue(ctas, descriptor, a_raw, b_raw))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.array_equal(read_d(ctas, m, n), want)
    # Once more on top of it, with enable-input-d.
    tensor_core.execute(issue(ctas, descriptor, a_raw, b_raw, accumulate=True))
    assert np.array_equal(read_d(ctas, m, n), 2 * want)
    columns = n // 2 if (group, m) == (2, 128) else n
    assert all((cta.tmem.cells[columns:] == POISON).all() for cta in ctas)


@pytest.mark.parametrize("n", [8, 24])
def test_one_cta_has_n_in_steps_of_eight(n):
    """NVIDIA's mixed-input decode has N = 8 for eight query heads."""
    test_mma_from_shared(1, 128, n, (False, False), (128, 128))


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("f16", ("f16", "f16", "f32")),
        ("f16", ("f16", "bf16", "f32")),
        ("tf32", ("tf32", "tf32", "f32")),
        ("f8f6f4", ("e4m3", "e5m2", "f32")),
        ("i8", ("s8", "u8", "s32")),
    ],
)
def test_mma_types(kind, types):
    rng = np.random.default_rng(2)
    ctas = make_ctas(1)
    k = 4 * KINDS[kind].k
    a, b = random_values(rng, (128, k), types[0]), random_values(rng, (64, k), types[1])
    a_raw, b_raw = pack_pair(ctas, a, b, types, (False, False), (128, 64))
    descriptor = descriptor_of(kind, 128, 64, types)
    tensor_core.execute(issue(ctas, descriptor, a_raw, b_raw))
    got = read_d(ctas, 128, 64, dtype=np.int32 if kind == "i8" else np.float32)
    assert np.array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("group", "m"), [(1, 128), (2, 256), (2, 128)])
def test_mma_with_a_in_tmem(group, m, dtype):
    rng = np.random.default_rng(3)
    ctas = make_ctas(group)
    n, k = 256, 64
    a, b = random_values(rng, (m, k), dtype), random_values(rng, (n, k), dtype)
    _, b_raw = pack_pair(ctas, a, b, (dtype, dtype), (False, True), (128, 128))
    rows = m // group
    bits = to_bits(a, dtype).astype(np.uint32)
    for p, cta in enumerate(ctas):
        mine = bits[p * rows : (p + 1) * rows]
        for j in range(k // 2):  # two elements per cell, the lower k in the low half
            cta.tmem.cells[384 + j, :rows] = mine[:, 2 * j] | mine[:, 2 * j + 1] << 16
    addresses = [384 + 8 * i for i in range(k // 16)]
    descriptor = descriptor_of("f16", m, n, (dtype, dtype, "f32"), group=group, b_mn_major=True)
    tensor_core.execute(issue(ctas, descriptor, addresses, b_raw, a_in_tmem=True))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.array_equal(read_d(ctas, m, n), want)


def test_negation_scale_half_accumulator_and_lane_mask():
    rng = np.random.default_rng(4)
    ctas = make_ctas(1)
    a, b = random_values(rng, (128, 16), "f16"), random_values(rng, (32, 16), "f16")
    a_raw, b_raw = pack_pair(ctas, a, b, ("f16", "f16"), (False, False), (128, 128))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    negated = descriptor_of("f16", 128, 32, ("f16", "f16", "f32"), negate_a=True)
    tensor_core.execute(issue(ctas, negated, a_raw, b_raw))
    assert np.array_equal(read_d(ctas, 128, 32), -want)
    plain = descriptor_of("f16", 128, 32, ("f16", "f16", "f32"))
    tensor_core.execute(issue(ctas, plain, a_raw, b_raw, accumulate=True, scale=2))
    assert np.array_equal(read_d(ctas, 128, 32), 0.75 * want)
    disabled = (np.arange(128) % 3 == 0,)
    tensor_core.execute(issue(ctas, plain, a_raw, b_raw, disabled=disabled, disabled_bits=1))
    mixed = np.where(disabled[0][:, None], 0.75 * want, want)
    assert np.array_equal(read_d(ctas, 128, 32), mixed)
    half = descriptor_of("f16", 128, 32, ("f16", "f16", "f16"))
    tensor_core.execute(issue(ctas, half, a_raw, b_raw, d=64))
    cells = ctas[0].tmem.cells[64:96].T
    assert np.array_equal(cells.astype(np.uint16).view(np.float16), want.astype(np.float16))
    assert not (cells >> 16).any()


def test_f16_operands_are_exact_for_every_value():
    bits = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    tensor_core._f16_to_f32(bits, out)
    assert np.array_equal(out, bits.view(np.float16).astype(np.float32), equal_nan=True)
    finite = bits[(bits & 0x7C00) != 0x7C00]
    out = np.empty(finite.size, np.float32)
    tensor_core._f16_to_f32(finite, out)
    want = finite.view(np.float16).astype(np.float32)
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))


def test_runs_are_joined_by_program_order_only():
    ctas = make_ctas(1)
    descriptor = descriptor_of("f16", 128, 32, ("f16", "f16", "f32"))
    raw = encode_matrix(MatrixDescriptor(1024, 16, 1024, 128))
    chain = issue(ctas, descriptor, [raw] * 3, [raw] * 3)
    other = issue(ctas, descriptor, [raw] * 2, [raw] * 2, d=32)
    restart = issue(ctas, descriptor, [raw], [raw], d=32)
    lengths = [len(run) for run in tensor_core.joined_runs(chain + other + restart)]
    assert lengths == [3, 2, 1]


def test_mma_outside_allocation_or_shared_memory():
    ctas = make_ctas(1, columns=64)
    descriptor = descriptor_of("f16", 128, 32, ("f16", "f16", "f32"))
    raw = encode_matrix(MatrixDescriptor(1024, 16, 1024, 128))
    with pytest.raises(TmemError, match="columns 64 to 95"):
        tensor_core.execute(issue(ctas, descriptor, [raw], [raw], d=64))
    with pytest.raises(TmemError, match="lane 16"):
        tensor_core.execute(issue(ctas, descriptor, [raw], [raw], d=16 << 16))
    far = encode_matrix(MatrixDescriptor(0x3F000, 16, 1024, 128))
    with pytest.raises(MemoryFault, match="A operand"):
        tensor_core.execute(issue(ctas, descriptor, [far], [raw]))


# ---------------------------------------------------------------- loads and stores


def record_of(form: Form):
    """The form with its registers in the slots from 0 on."""
    registers = [SimpleNamespace(kind="reg", slot=slot) for slot in range(form.registers)]
    return fragment_record(form, SimpleNamespace(kind="vec", items=tuple(registers)))


def first_cell(cells: np.ndarray, lane: int, column: int) -> int:
    return cells[column, lane:].ctypes.data


def load_cells(cells: np.ndarray, lane: int, column: int, form: Form, lanes=0xFFFFFFFF):
    """uint32 (registers, 32) that a tcgen05.ld at (lane, column) returns; 7 where it loads none."""
    registers, record = np.full((form.registers, 32), 7, np.uint32), record_of(form)
    callable_of(load_fragment)(
        registers.ctypes.data, first_cell(cells, lane, column), ctypes.addressof(record), lanes
    )
    return registers


def store_cells(cells: np.ndarray, lane: int, column: int, form: Form, values) -> None:
    values, record = np.ascontiguousarray(values), record_of(form)
    callable_of(store_fragment)(
        values.ctypes.data, first_cell(cells, lane, column), ctypes.addressof(record)
    )


def cell_of(shape: str, t: int, r: int, split: int) -> tuple[int, int]:
    """Return (lane, column) of thread t, register r: the formulas as they are written in the ISA
    notes."""
    return {
        "32x32b": lambda: (t, r),
        "16x64b": lambda: ((t >> 2) + 8 * (t & 1), ((t >> 1) & 1) + 2 * r),
        "16x128b": lambda: ((t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)),
        "16x256b": lambda: ((t >> 2) + 8 * ((r >> 1) & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)),
        "16x32bx2": lambda: (t % 16, r + (split if t >= 16 else 0)),
    }[shape]()


@pytest.mark.parametrize(
    ("shape", "repeat"),
    [(s, n) for s in SHAPES for n in (1, 2, 8, 32, 64, 128) if SHAPES[s].registers * n <= 128],
)
def test_load_and_store_shapes(shape, repeat):
    form = Form(shape, repeat, split=128 if shape == "16x32bx2" else 0)
    cells = np.arange(512 * 128, dtype=np.uint32).reshape(512, 128)
    lane, column = (96, 0) if shape == "32x32b" else (112, 0)
    values = load_cells(cells, lane, column, form)
    some = load_cells(cells, lane, column, form, lanes=0x0F0F0F0F)
    executes = np.arange(32) % 8 < 4
    assert (some[:, executes] == values[:, executes]).all() and (some[:, ~executes] == 7).all()
    assert values.shape == (form.registers, 32)
    touched = set()
    for t in range(32):
        for r in range(form.registers):
            at_lane, at_column = cell_of(shape, t, r, form.split)
            assert values[r, t] == cells[column + at_column, lane + at_lane]
            touched.add((at_column, at_lane))
    assert len(touched) == 32 * form.registers
    assert form.columns == max(c for c, _ in touched) + 1
    target = np.zeros_like(cells)
    store_cells(target, lane, column, form, values)
    for at_column, at_lane in touched:
        cell = target[column + at_column, lane + at_lane]
        assert cell == cells[column + at_column, lane + at_lane]
    assert np.count_nonzero(target) == len(touched)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_packed_loads_and_stores(shape):
    split = 32 if shape == "16x32bx2" else 0
    form = Form(shape, 4, packed=True, split=split)
    rng = np.random.default_rng(5)
    cells = rng.integers(0, 2**32, (512, 128), dtype=np.uint32)
    values = load_cells(cells, 32, 16, form)
    for t in range(32):
        for r in range(form.registers):
            lane, column = cell_of(shape, t, r, split)
            low, high = cells[16 + 2 * column : 18 + 2 * column, 32 + lane] & 0xFFFF
            assert values[r, t] == low | high << 16
    target = np.zeros_like(cells)
    store_cells(target, 32, 16, form, values)
    assert np.array_equal(load_cells(target, 32, 16, form), values)
    assert target.max() <= 0xFFFF


# ---------------------------------------------------------------- allocation


def test_allocation_rules():
    tmem = Tmem()
    assert [tmem.allocate(n, 2) for n in (256, 128, 64, 64)] == [0, 256, 384, 448]
    assert tmem.allocate(32, 2) is None
    tmem.deallocate(384, 64, 2)
    assert tmem.allocate(32, 2) == 384
    with pytest.raises(TmemError, match="must not grow"):
        tmem.allocate(64, 2)
    with pytest.raises(TmemError, match="powers of two"):
        tmem.allocate(48, 2)
    with pytest.raises(TmemError, match="cta_group"):
        tmem.allocate(32, 1)
    with pytest.raises(TmemError, match="allocated are"):
        tmem.deallocate(256, 64, 2)
    tmem.relinquish(2)
    with pytest.raises(TmemError, match="relinquish"):
        tmem.allocate(32, 2)
    assert tmem.leaked() == {0: 256, 256: 128, 448: 64, 384: 32}


def test_column_checks():
    tmem = Tmem()
    tmem.allocate(128, 1)
    tmem.check(0, 128, "x")
    tmem.check(127, 1, "x")
    with pytest.raises(TmemError, match=r"columns 120 to 135; .*columns 0\.\.127"):
        tmem.check(120, 16, "x")
    with pytest.raises(TmemError, match="512 columns"):
        tmem.check(510, 4, "x")


# ---------------------------------------------------------------- refusals of whole kernels


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["alloc", "commit", "mma"])
def test_a_kernel_of_both_cta_groups_is_refused(name):
    """ptxas refuses it, too; here before anything runs."""
    case = mma.probe_of(mma.Product(2, 256, 128)).case
    own, other = (f"tcgen05.{name}.cta_group::{group}" for group in (2, 1))
    text = case.ptx.replace(own, other, 1)
    with pytest.raises(TmemError, match="kernel golden has cta_group::[12] .*and cta_group::[12]"):
        replay(dataclasses.replace(case, ptx=text))


@pytest.mark.simulator
def test_n_of_a_pair_with_a_in_tensor_memory():
    """N goes in steps of 32, beside 16 of other MMAs of a pair."""
    a_in_smem, a_in_tmem = (mma.Product(2, 256, 48, a=a) for a in ("k", "tmem"))
    probe = mma.probe_of(a_in_smem)
    assert probe.wrong(replay(probe.case)) == ""
    with pytest.raises(SimulationError, match="N 48, accepted 32..256 in steps of 32"):
        replay(mma.probe_of(a_in_tmem).case)


@pytest.mark.simulator
@pytest.mark.parametrize("bit", [0, 23])
def test_reserved_bits_of_an_instruction_descriptor_in_a_kernel(bit):
    product = mma.Product(1, 128, 64)
    raw = product.instruction_descriptor()
    case = mma.probe_of(product).case
    text = case.ptx.replace(f"mov.u32 %r20, {raw:#x}", f"mov.u32 %r20, {raw | 1 << bit:#x}")
    with pytest.raises(SimulationError, match=f"reserved bit {bit} is set"):
        replay(dataclasses.replace(case, ptx=text))


@pytest.mark.simulator
def test_reserved_bits_of_a_matrix_descriptor_in_a_kernel():
    case = mma.probe_of(mma.Product(1, 128, 64)).case
    text = case.ptx.replace(
        "or.b64 %db, %db, 0x", f"or.b64 %db, %db, {1 << 53:#x};\nor.b64 %db, %db, 0x"
    )
    with pytest.raises(SimulationError, match="bits 53-60"):
        replay(dataclasses.replace(case, ptx=text))


#: Two warps: the first allocates and frees 32 columns, the second loads one of them behind that.
FREED = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+1024], 32;
    bar.sync 0;
    ld.shared.u32 %r2, [smem+1024];
    mov.u32 %r4, 2097152;
    selp.b32 %r4, 0, %r4, %p1;
    add.u32 %r3, %r2, %r4;
    mov.u32 %r5, 7;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r5};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    bar.sync 0;
    @%p1 bra DONE;
    tcgen05.ACCESS;
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd8], %r5;
DONE:
"""


def test_loads_of_freed_columns_are_a_finding():
    out = np.zeros(1, np.uint32)
    load = FREED.replace("ACCESS", "ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3]")
    report = run_kernel_text(load, [out], block=(64, 1, 1))
    assert out[0] == 7
    (finding,) = report.findings
    assert "tcgen05.ld (PTX line " in finding and "reads columns that its CTA has freed" in finding
    store = FREED.replace("ACCESS", "st.sync.aligned.32x32b.x1.b32 [%r3], {%r5}")
    with pytest.raises(TmemError, match="columns none are allocated"):
        run_kernel_text(store, [out], block=(64, 1, 1))


def test_columns_that_were_freed_are_known_until_they_are_allocated_again():
    tmem = Tmem()
    assert tmem.allocate(128, 1) == 0 and tmem.allocate(64, 1) == 128
    assert not tmem.reads_freed(0, 32)
    tmem.deallocate(0, 128, 1)
    assert tmem.reads_freed(96, 64) and not tmem.reads_freed(128, 64)
    assert not tmem.reads_freed(160, 64) and not tmem.reads_freed(480, 64)
    assert tmem.allocate(64, 1) == 0
    assert not tmem.reads_freed(0, 64) and tmem.reads_freed(64, 32)
