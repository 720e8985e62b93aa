"""TMA and tcgen05 instructions from PTX text: operands, barriers, groups and refusals.

The machine around them is a stand-in that performs operations when the test says so.
"""

import ctypes
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sm100_sim.errors import (
    BarrierError,
    MemoryFault,
    Misaligned,
    SimulationError,
    TmemError,
    UnknownInstruction,
)
from sm100_sim.isa import load_table
from sm100_sim.isa.table import resolve
from sm100_sim.isa.tensor.descriptors import MatrixDescriptor, encode_matrix
from sm100_sim.ptx.parser import parse_module
from sm100_sim.state import tensormap
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.memory import GlobalMemory, poisoned_shared
from sm100_sim.state.tensormap import TensorMap
from sm100_sim.state.tmem import Tmem

load_table()
ALL = 0xFFFFFFFF
HEADER = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry probe()
{
	.reg .pred %p<4>;
	.reg .b32 %r<64>;
	.reg .b64 %rd<16>;
	"""


class Rig:
    """A cluster of `count` CTAs, one warp each, and a queue of issued operations."""

    def __init__(self, count: int = 2, tensors=()) -> None:
        self.issued = []
        self.explicit_cluster = count > 1
        self.counters = Counter()
        self.woken, self.found = [], []
        self.wake, self.finding = self.woken.append, self.found.append
        ranges = [
            (t.__array_interface__["data"][0], t.__array_interface__["data"][0] + t.nbytes, "t")
            for t in tensors
        ]
        self.memory = GlobalMemory(ranges, np.zeros(64, np.uint8))
        self.smem = poisoned_shared(count, 65536)
        self.barriers = {}
        cluster = SimpleNamespace(id=0, machine=self, mbarrier=self.barriers.__getitem__)
        cluster.ctas = [
            SimpleNamespace(
                rank=i,
                ctaid=(i, 0, 0),
                smem=self.smem[i],
                tmem=Tmem(),
                cluster=cluster,
                bulk_groups={},
                require_present=lambda what: None,
            )
            for i in range(count)
        ]
        for cta in cluster.ctas:
            cta.peer = cluster.ctas[cta.rank ^ 1] if count > cta.rank ^ 1 else None
        self.ctas = cluster.ctas
        self.warps = [
            SimpleNamespace(
                cta=cta,
                index=0,
                rank=cta.rank,
                r32=np.zeros((64, 32), np.uint32),
                r64=np.zeros((16, 32), np.uint64),
                preds=np.zeros(4, np.uint32),
            )
            for cta in self.ctas
        ]

    def barrier(self, address: int, count: int = 1) -> MBarrier:
        self.barriers[address] = MBarrier(address, count, lambda barrier: None)
        return self.barriers[address]

    def submit(self, operation) -> None:
        self.issued.append(operation)

    def perform(self) -> None:
        while self.issued:
            operation = self.issued.pop(0)
            operation.perform()
            operation.performed = True

    def run(self, text: str, rank: int = 0, lanes: int = 1):
        return bind(text)(self.warps[rank], lanes)


def bind(text: str):
    (kernel,) = parse_module(HEADER + text + "\n\tret;\n}\n").values()
    for register in kernel.registers:
        register.slot = int("".join(filter(str.isdigit, register.name)))
    instruction = kernel.instructions[0]
    return resolve(instruction).bind(instruction, kernel)


def aligned(shape, dtype) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    skip = -raw.__array_interface__["data"][0] % 128
    return raw[skip : skip + size].view(dtype).reshape(shape)


def tensor_rig(count: int = 2, box=(64, 8)):
    """A rig with a (32, 64) u16 tensor; %rd1 holds its descriptor, 128 B swizzle."""
    tensor = aligned((32, 64), np.uint16)
    tensor[...] = np.arange(tensor.size).reshape(tensor.shape)
    raw = aligned(128, np.uint8)
    rig = Rig(count, (tensor, raw))
    rig.descriptor = raw
    described = TensorMap(tensor.ctypes.data, "u16", (64, 32), (128,), box, (1, 1), 128)
    raw[:] = np.frombuffer(tensormap.encode(described), np.uint8)
    for warp in rig.warps:
        warp.r64[1] = raw.ctypes.data
    return rig, tensor


def tile_at(rig, rank: int, offset: int, rows: int) -> np.ndarray:
    """Undo the 128 B swizzle of a tile of 128-byte rows at a multiple of 1024."""
    chunks = rig.smem[rank][offset : offset + 128 * rows].reshape(rows, 8, 16)
    rows_index = np.arange(rows)[:, None]
    order = np.arange(8)[None, :] ^ rows_index % 8
    return chunks[rows_index, order].reshape(rows, 128).view(np.uint16)


LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{} "
    "[%r1], [%rd1, {{%r3, %r4}}], [%r2]{};"
)


def test_load_signals_the_whole_box_when_clipped():
    rig, tensor = tensor_rig()
    warp = rig.warps[0]
    warp.r32[1], warp.r32[2], warp.r32[3], warp.r32[4] = 2048, 0x100, 0, 28
    barrier = rig.barrier(0x100)
    barrier.expect_tx(1024)
    barrier.arrive(1)
    rig.run(LOAD.format("", ""))
    assert not barrier.parity_complete(0)
    rig.perform()
    assert barrier.parity_complete(0)
    tile = tile_at(rig, 0, 2048, 8)
    assert np.array_equal(tile[:4], tensor[28:]) and not tile[4:].any()
    assert rig.counters["tma.load bytes"] == 1024


def test_negative_coordinates_are_signed():
    rig, tensor = tensor_rig()
    rig.barrier(0x100)
    warp = rig.warps[0]
    warp.r32[1], warp.r32[2], warp.r32[4] = 2048, 0x100, 2**32 - 3
    rig.run(LOAD.format("", ""))
    rig.perform()
    tile = tile_at(rig, 0, 2048, 8)
    assert not tile[:3].any() and np.array_equal(tile[3:], tensor[:5])


GATHER = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes{} "
    "[%r1], [%rd1, {{%r3, %r4, %r5, %r6, %r7}}], [%r2];"
)


def test_four_rows_are_gathered():
    """Rows in any order, one of them twice, and none outside the tensor: zeros."""
    rig, tensor = tensor_rig(box=(64, 1))
    warp = rig.warps[0]
    # In the upper half of an atom of the swizzle.
    warp.r32[1], warp.r32[2] = 2048 + 512, 0x100
    for register, row in zip((4, 5, 6, 7), (30, 3, 2**32 - 1, 3), strict=True):
        warp.r32[register] = row
    barrier = rig.barrier(0x100)
    barrier.expect_tx(512)
    barrier.arrive(1)
    rig.run(GATHER.format(""))
    rig.perform()
    assert barrier.parity_complete(0)
    found = tile_at(rig, 0, 2048, 8)[4:]
    for row, expected in zip(found, (tensor[30], tensor[3], 0 * tensor[0], tensor[3]), strict=True):
        assert np.array_equal(row, expected)


def test_rows_are_gathered_by_boxes_of_one():
    rig, _ = tensor_rig()
    rig.barrier(0x100)
    rig.warps[0].r32[1], rig.warps[0].r32[2] = 2048, 0x100
    with pytest.raises(SimulationError, match=r"box of \(64, 8\); its second dimension must be 1"):
        rig.run(GATHER.format(""))


@pytest.mark.parametrize(
    "text",
    [
        GATHER.format("").replace("2d", "3d"),
        LOAD.format("", "").replace("tile", "tile::gather4"),
        GATHER.format("").replace("gather4", "scatter4"),
    ],
)
def test_other_forms_of_gathers_are_unknown(text):
    with pytest.raises(UnknownInstruction):
        bind(text)


def test_cta_group_2_may_signal_the_peer_and_group_1_may_not():
    rig, _ = tensor_rig()
    even = rig.barrier(0x100)
    warp = rig.warps[1]
    warp.r32[1], warp.r32[2] = 1 << 24 | 2048, 0x100
    rig.run(LOAD.format(".cta_group::2", ""), rank=1)
    rig.perform()
    assert even.transactions == -1024
    with pytest.raises(BarrierError, match="signals a barrier in CTA rank 0"):
        rig.run(LOAD.format("", ""), rank=1)


@pytest.mark.parametrize("group", [1, 2])
def test_multicast(group):
    rig, tensor = tensor_rig(count=4)
    named = 1 << 24 | 0x100
    barriers = [rig.barrier(rank << 24 | 0x100) for rank in range(4)]
    warp = rig.warps[1]
    warp.r32[1], warp.r32[2], warp.r32[5] = 1 << 24 | 2048, named, 0b1101
    modifiers = f".multicast::cluster.cta_group::{group}"
    rig.run(LOAD.format(modifiers, ", %r5"), rank=1)
    rig.perform()
    bytes_seen = [-barrier.transactions for barrier in barriers]
    # Group 1: the barrier of each destination. Group 2: of the odd member of its pair.
    assert bytes_seen == ([1024, 0, 1024, 1024] if group == 1 else [0, 1024, 0, 2048])
    assert all(np.array_equal(tile_at(rig, rank, 2048, 8), tensor[:8]) for rank in (0, 2, 3))
    warp.r32[5] = 0b10001
    with pytest.raises(SimulationError, match="0x0011"):
        rig.run(LOAD.format(modifiers, ", %r5"), rank=1)


STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r3, %r4}], [%r1];"


def test_store_and_bulk_groups():
    rig, tensor = tensor_rig()
    before = tensor.copy()
    warp = rig.warps[0]
    warp.r32[1], warp.r32[4] = 4096, 30
    rig.smem[0][4096:5120] = 7
    # Executed by the whole warp with uniform operands: one store, in the group of every lane.
    rig.run(STORE, lanes=ALL)
    assert len(rig.issued) == 1
    rig.run("cp.async.bulk.commit_group;", lanes=ALL)
    assert rig.run("cp.async.bulk.wait_group 1;", lanes=ALL) is None
    waiting = rig.run("cp.async.bulk.wait_group.read 0;", lanes=1 << 5)
    assert waiting.key is rig.issued[0] and "1 copies" in waiting.what
    rig.perform()
    assert rig.run("cp.async.bulk.wait_group.read 0;", lanes=ALL) is None
    assert (tensor[30:] == 0x0707).all() and np.array_equal(tensor[:30], before[:30])


def test_lanes_with_their_own_operands_issue_their_own_copies():
    rig, tensor = tensor_rig()
    warp = rig.warps[0]
    warp.r32[1] = 4096
    warp.r32[4] = np.arange(32) * 8
    rig.run(STORE, lanes=0b101)
    assert len(rig.issued) == 2


def test_tensor_reduction():
    rig, tensor = tensor_rig()
    before = tensor[:8].copy()
    rig.warps[0].r32[1] = 4096
    rig.smem[0][4096:5120] = 0
    text = STORE.replace("cp.async", "cp.reduce.async").replace("cta.tile", "cta.or.tile")
    rig.run(text)
    rig.perform()
    assert np.array_equal(tensor[:8], before)


def test_bulk_copies_round_trip():
    source, target = aligned(256, np.uint8), aligned(256, np.uint8)
    source[:] = np.arange(256)
    rig = Rig(2, (source, target))
    warp = rig.warps[0]
    warp.r32[1], warp.r32[2], warp.r32[3] = 1 << 24 | 4096, 256, 1 << 24 | 0x80
    barrier = rig.barrier(1 << 24 | 0x80)
    warp.r64[1], warp.r64[2] = source.ctypes.data, target.ctypes.data
    rig.run(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1], %r2, [%r3];"
    )
    rig.perform()
    assert barrier.transactions == -256
    other = rig.warps[1]
    other.r32[1], other.r32[2], other.r64[2] = 1 << 24 | 4096, 256, target.ctypes.data
    rig.run("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], %r2;", rank=1)
    rig.perform()
    assert np.array_equal(source, target)
    other.r32[2] = 24
    with pytest.raises(Misaligned, match="24 bytes"):
        rig.run("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], %r2;", rank=1)


def test_shared_to_shared_copy():
    rig = Rig(2)
    barrier = rig.barrier(1 << 24 | 0x80)
    warp = rig.warps[0]
    warp.r32[1], warp.r32[2], warp.r32[3], warp.r32[4] = 1 << 24 | 2048, 1024, 64, 1 << 24 | 0x80
    rig.smem[0][1024:1088] = np.arange(64)
    rig.run(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r1], [%r2], %r3, [%r4];"
    )
    rig.perform()
    assert np.array_equal(rig.smem[1][2048:2112], np.arange(64)) and barrier.transactions == -64


def test_descriptor_faults_name_the_instruction():
    rig, _ = tensor_rig()
    rig.barrier(0x100)
    warp = rig.warps[0]
    warp.r32[1], warp.r32[2] = 2048 + 64, 0x100
    rig.run(LOAD.format("", ""))
    with pytest.raises(Misaligned, match=r"(?s)multiple of 128.*cp\.async\.bulk\.tensor.*CTA"):
        rig.perform()
    warp.r64[1] = 64
    with pytest.raises(MemoryFault, match="TMA descriptor"):
        rig.run(LOAD.format("", ""))


@pytest.mark.parametrize(
    "text",
    [
        LOAD.format("", "").replace(".tile", ".im2col"),
        LOAD.format("", "").replace(".2d", ".3d"),
        LOAD.format(".surprise", ""),
        STORE.replace(".bulk_group", ".mbarrier::complete_tx::bytes"),
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];",
        "tcgen05.ld.sync.aligned.64x32b.x1.b32 {%r1}, [%r2];",
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, %r3, %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r4], %r3, %p1;",
        "tcgen05.mma.ws.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {%r4, %r5, %r6, %r7}, %p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1, %rd3, %rd4;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {%r4, %r5, %r6, %r7}, %p1, "
        "%rd3;",
        "tcgen05.cp.cta_group::1.128x128b.b8x16 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.128x128b.b6x16_p32 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.128x128b.b6x16_p32.b8x16 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16_p64.b6x16_p32 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.32x128b.b8x16.b4x16_p64 [%r1], %rd1;",
        "tcgen05.cp.cta_group::1.64x128b [%r1], %rd1;",
        "tcgen05.shift.cta_group::1.up [%r1];",
        "tcgen05.alloc.cta_group::3.sync.aligned.shared::cta.b32 [%r1], 32;",
    ],
)
def test_unknown_forms_are_named(text):
    with pytest.raises(UnknownInstruction) as caught:
        bind(text)
    assert text.split()[0] in str(caught.value)


# ---------------------------------------------------------------- tcgen05


ALLOC = "tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [%r1], {};"


def test_alloc_blocks_until_room_is_freed():
    rig = Rig()
    warp = rig.warps[0]
    warp.r32[1] = 1024
    assert rig.run(ALLOC.format(1, 512), lanes=ALL) is None
    assert rig.smem[0][1024:1028].view(np.uint32)[0] == 0
    waiting = rig.run(ALLOC.format(1, 256), lanes=ALL)
    assert "256" in waiting.what and waiting.key is rig.ctas[0].tmem
    warp.r32[2] = 0
    rig.run("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;", lanes=ALL)
    assert rig.woken == [rig.ctas[0].tmem]
    assert rig.run(ALLOC.format(1, 256), lanes=ALL) is None
    rig.run("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", lanes=ALL)
    with pytest.raises(TmemError, match="relinquish"):
        rig.run(ALLOC.format(1, 32), lanes=ALL)


@pytest.mark.parametrize(
    "shape,lane",
    [
        ("32x32b.x1", 0),
        ("32x32b.x1", 64),
        ("16x64b.x1", 0),
        ("16x64b.x1", 16),
        ("16x64b.x1", 64),
        ("16x64b.x1", 80),
    ],
)
def test_a_warp_counts_the_lanes_of_its_quarter_from_zero_or_from_the_first(shape, lane):
    rig = Rig(1)
    rig.ctas[0].tmem.allocate(32, 1)
    rig.ctas[0].tmem.cells[0] = np.arange(128)
    rig.warps[0].index = 6  # The third of its warpgroup: lanes 64 to 95.
    rig.warps[0].r32[1] = lane << 16
    rig.run(f"tcgen05.ld.sync.aligned.{shape}.b32 {{%r4}}, [%r1];", lanes=ALL)
    even = rig.warps[0].r32[4]
    first = 64 + lane % 32
    if shape == "32x32b.x1":
        assert (even == first + np.arange(32)).all()
    else:
        # Threads with an even column, in threads 0, 1, 4, 5, ...: rows t / 4 + 8 (t mod 2).
        threads = np.flatnonzero(np.arange(32) // 2 % 2 == 0)
        assert (even[threads] == first + threads // 4 + 8 * (threads % 2)).all()
    for other in (32, 96, 48):
        rig.warps[0].r32[1] = other << 16
        with pytest.raises(TmemError, match="reaches lanes 64 to 95"):
            rig.run(f"tcgen05.ld.sync.aligned.{shape}.b32 {{%r4}}, [%r1];", lanes=ALL)


def test_load_store_and_their_lanes():
    rig = Rig()
    rig.ctas[0].tmem.allocate(64, 1)
    warp = rig.warps[0]
    warp.index = 6  # the third warp of its warpgroup: lanes 64 to 95
    warp.r32[1] = 64 << 16 | 8
    warp.r32[2:4] = np.arange(64).reshape(2, 32)
    rig.run("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r2, %r3};", lanes=ALL)
    assert np.array_equal(rig.ctas[0].tmem.cells[8:10, 64:96], np.arange(64).reshape(2, 32))
    rig.run("tcgen05.wait::st.sync.aligned;", lanes=ALL)
    rig.run("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r4}, [%r1];", lanes=ALL)
    assert np.array_equal(warp.r32[4], warp.r32[3]) and np.array_equal(warp.r32[5], warp.r32[2])
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r1];"
    warp.r32[1] = 32 << 16
    with pytest.raises(TmemError, match="lanes 64 to 95"):
        rig.run(load, lanes=ALL)
    warp.r32[1] = 64 << 16 | 64
    with pytest.raises(TmemError, match="columns 64 to 64"):
        rig.run(load, lanes=ALL)
    warp.r32[1] = 8 + (np.arange(32) << 16)
    rig.run(load, lanes=ALL)
    assert np.array_equal(warp.r32[4], np.arange(32)), "the first lane's address"
    (found,) = rig.found
    assert "the address differs between the lanes" in found and "first lane was taken" in found


MMA = "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, {};"
COMMIT = (
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    ".multicast::cluster.b64 [%r4], %r5;"
)


def mma_rig():
    """Identity-like operands: A and B rows of ones in bf16, K 16, M 256, N 32."""
    rig = Rig()
    for cta in rig.ctas:
        cta.tmem.allocate(32, 2)
        cta.smem[1024:].view(np.uint16)[...] = 0x3F80
    warp = rig.warps[0]
    warp.r64[1] = warp.r64[2] = encode_matrix(MatrixDescriptor(1024, 16, 1024, 128))
    warp.r32[2] = 1 << 4 | 1 << 7 | 1 << 10 | 32 >> 3 << 17 | 256 >> 4 << 24
    warp.r32[4], warp.r32[5] = 0x40, 0b11
    return rig, warp


def test_chain_is_one_operation_and_commit_follows_it():
    rig, warp = mma_rig()
    barriers = [rig.barrier(rank << 24 | 0x40) for rank in range(2)]
    for enable in (0, 1, 1):
        rig.run(MMA.format(enable))
    assert not rig.issued
    rig.run(COMMIT)
    assert [operation.kind for operation in rig.issued] == ["tcgen05.mma", "tcgen05.commit"]
    assert rig.issued[0].queue == rig.issued[1].queue
    rig.perform()
    for cta, barrier in zip(rig.ctas, barriers, strict=True):
        assert (cta.tmem.cells.view(np.float32)[:32] == 48).all()
        assert barrier.parity_complete(0)
    warp.r32[5] = 0b101
    with pytest.raises(SimulationError, match="0x0005"):
        rig.run(COMMIT)


def test_enable_input_predicate_and_fence_end_the_chain():
    rig, warp = mma_rig()
    warp.preds[1] = 0
    rig.run(MMA.format("%p1"))
    warp.preds[1] = ALL
    rig.run(MMA.format("%p1"))
    rig.run("tcgen05.fence::before_thread_sync;")
    assert len(rig.issued) == 1
    rig.run(MMA.format("%p1"))
    rig.run("tcgen05.fence::before_thread_sync;")
    assert len(rig.issued) == 2
    rig.perform()
    assert (rig.ctas[1].tmem.cells.view(np.float32)[:32] == 48).all()


def test_mma_refusals():
    rig, warp = mma_rig()
    with pytest.raises(SimulationError, match="2 lanes"):
        rig.run(MMA.format(0), lanes=3)
    warp.r32[2] = 0
    with pytest.raises(SimulationError, match="D type|illegal shape"):
        rig.run(MMA.format(0))
    lonely = Rig(1)
    lonely.warps[0].r32[2] = rig.warps[1].r32[2] = 1 << 4 | 32 >> 3 << 17 | 256 >> 4 << 24
    lonely.warps[0].r64[1] = lonely.warps[0].r64[2] = warp.r64[1, 0]
    with pytest.raises(SimulationError, match="no peer"):
        lonely.run(MMA.format(0))


def test_commit_to_a_generic_address():
    rig, warp = mma_rig()
    barrier = rig.barrier(0x40)
    warp.r64[3] = 0x7F00_0000_0000_0040
    rig.run("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd3];")
    rig.perform()
    assert barrier.parity_complete(0)


def test_descriptor_prefetch_is_checked():
    rig, _ = tensor_rig()
    rig.run("prefetch.tensormap [%rd1];")
    ctypes.memset(int(rig.warps[0].r64[1, 0]) + 9, 0x06, 1)
    with pytest.raises(SimulationError, match="invalid TMA descriptor.*b6x16_p32"):
        rig.run("prefetch.tensormap [%rd1];")
