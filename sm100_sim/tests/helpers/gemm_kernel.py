"""A CuTe DSL GEMM of one tile: TMA loads, tcgen05.mma, tcgen05.ld; for any type of operands.

with sm100_sim.attached():
    d = multiply(a, b, cutlass.Float16, cutlass.Float32, n=64)
"""

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import blackwell_helpers as helpers

THREADS = 128


class OneTile:
    """D (128 x N) = A (128 x K) @ B (N x K)^T; A and B are M- or N-major if `majors` says so."""

    def __init__(self, operands, accumulator, n: int, majors) -> None:
        self.a_type, self.b_type = operands
        self.accumulator, self.n, self.majors = accumulator, n, majors

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        major = [OperandMajorMode.MN if mn else OperandMajorMode.K for mn in self.majors]
        mma = helpers.make_trivial_tiled_mma(
            self.a_type, self.b_type, *major, self.accumulator, tcgen05.CtaGroup.ONE, (128, self.n)
        )
        step = cute.size(mma.shape_mnk, mode=[2])
        self.tile = (128, self.n, 2 * step)
        self.stages = stages = cute.size(a, mode=[1]) // self.tile[2]
        a_smem = helpers.make_smem_layout_a(mma, self.tile, self.a_type, stages)
        b_smem = helpers.make_smem_layout_b(mma, self.tile, self.b_type, stages)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        one = cute.slice_(a_smem, (None, None, None, 0))
        a_atom, a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, one, self.tile, mma,
            internal_type=cutlass.TFloat32 if self.a_type is cutlass.TFloat32 else None,
        )  # fmt: skip
        one = cute.slice_(b_smem, (None, None, None, 0))
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, one, self.tile, mma,
            internal_type=cutlass.TFloat32 if self.b_type is cutlass.TFloat32 else None,
        )  # fmt: skip
        self.kernel(mma, a_atom, a_tma, b_atom, b_tma, d, a_smem, b_smem).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(self, mma, a_atom, a, b_atom, b, d, a_smem, b_smem):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2)
        holder = smem.allocate_array(cutlass.Int32, 1)
        sa = smem.allocate_tensor(self.a_type, a_smem.outer, 1024, a_smem.inner)
        sb = smem.allocate_tensor(self.b_type, b_smem.outer, 1024, b_smem.inner)
        if warp == 0:
            cute.arch.alloc_tmem(256, holder)
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        slice_mma = mma.get_slice(0)
        m, n, k = self.tile
        ga = slice_mma.partition_A(cute.local_tile(a, (m, k), (0, None)))
        gb = slice_mma.partition_B(cute.local_tile(b, (n, k), (0, None)))
        gd = slice_mma.partition_C(cute.local_tile(d, (m, n), (0, 0)))
        tsa, tga = cpasync.tma_partition(
            a_atom, 0, cute.make_layout(1), cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3)
        )
        tsb, tgb = cpasync.tma_partition(
            b_atom, 0, cute.make_layout(1), cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3)
        )
        ra, rb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        shape = mma.partition_shape_C((m, n))
        fake = mma.make_fragment_C(shape)
        accumulator = cute.make_tensor(
            cute.arch.retrieve_tmem_ptr(self.accumulator, 16, holder), fake.layout
        )
        size = cute.size_in_bytes(self.a_type, cute.select(a_smem, mode=[0, 1, 2, 3]))
        size += cute.size_in_bytes(self.b_type, cute.select(b_smem, mode=[0, 1, 2, 3]))
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers, size)
            for stage in cutlass.range_constexpr(self.stages):
                cute.copy(a_atom, tga[None, stage], tsa[None, stage], tma_bar_ptr=barriers)
                cute.copy(b_atom, tgb[None, stage], tsb[None, stage], tma_bar_ptr=barriers)
            cute.arch.mbarrier_wait(barriers, 0)
            for stage in cutlass.range_constexpr(self.stages):
                for block in cutlass.range_constexpr(2):
                    mma.set(tcgen05.Field.ACCUMULATE, stage + block > 0)
                    at = (None, None, block, stage)
                    cute.gemm(mma, accumulator, ra[at], rb[at], accumulator)
            with cute.arch.elect_one():
                tcgen05.commit(barriers + 1)
        cute.arch.mbarrier_wait(barriers + 1, 0)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(16)), self.accumulator)
        loading = tcgen05.make_tmem_copy(atom, accumulator)
        mine = loading.get_slice(thread)
        source, target = mine.partition_S(accumulator), mine.partition_D(gd)
        values = cute.make_rmem_tensor(target.shape, self.accumulator)
        self.drain(loading, source, values, target)
        cute.arch.sync_threads()
        if warp == 0:
            pointer = cute.arch.retrieve_tmem_ptr(self.accumulator, 16, holder)
            cute.arch.dealloc_tmem(pointer, 256)

    def drain(self, loading, source, values, target):
        """Load the accumulator and store it."""
        cute.copy(loading, source, values)
        cute.autovec_copy(values, target)


def multiply(
    a: torch.Tensor, b: torch.Tensor, operands, accumulator, d: torch.Tensor, kind=OneTile
) -> None:
    """d (128, N) = a (128, K) @ b (N, K)^T; a dimension of stride 1 is the major one.

    kind: OneTile, or a class of it.
    """
    majors = [t.stride(0) == 1 and t.stride(1) != 1 for t in (a, b)]
    tensors = [from_dlpack(t, assumed_align=16) for t in (a, b, d)]
    kind(operands, accumulator, d.shape[1], majors)(*tensors)
