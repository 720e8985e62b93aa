"""A CuTe DSL kernel for sm_90a to measure and to predict: an online softmax over a ring of tiles.

One warp brings tiles of 64 scores a thread into a ring by bulk copies; four warps wait for each,
read it, and update the maximum and the sum of exponentials of every thread's row. It has what the
attention kernels have but for the tensor core: mbarriers to and fro, bulk copies in flight, 16-byte
loads of shared memory, exp2 and fma in proportion.
"""

from __future__ import annotations

import tempfile

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepPTX
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from fa4_hd256.run.tracing import targeting

CONSUMERS, STAGES = 128, 3
SCORES = 64
TILE = CONSUMERS * SCORES
ARCHITECTURE = "sm_90a"


class Pipeline:
    """The kernel for a number of tiles, all of which it takes from the same few of `scores`."""

    def __init__(self, tiles: int) -> None:
        self.tiles = tiles

    @cute.jit
    def __call__(self, results: cute.Tensor, scores: cute.Tensor):
        """results: int64 (64,): clocks of each warp, then bits of sums. scores: float32."""
        self.kernel(results, scores).launch(
            grid=(1, 1, 1), block=(CONSUMERS + 32, 1, 1), cluster=(1, 1, 1)
        )

    @cute.kernel
    def kernel(self, results: cute.Tensor, scores: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.utils.SmemAllocator()
        ring = memory.allocate_tensor(
            Float32, cute.make_layout((4, CONSUMERS, SCORES // 4, STAGES)), 128
        )
        barriers = memory.allocate_array(Int64, 2 * STAGES)
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + stage, 1)
                cute.arch.mbarrier_init(barriers + STAGES + stage, CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        begin = cute.arch.clock64()
        if warp == CONSUMERS // 32:
            self.produce(scores, ring, barriers)
        else:
            self.consume(results, ring, barriers, thread)
        end = cute.arch.clock64()
        if cute.arch.lane_idx() == 0:
            results[warp] = end - begin

    @cute.jit
    def produce(self, scores: cute.Tensor, ring: cute.Tensor, barriers: cute.Pointer):
        """Fill the ring, stage after stage."""
        atom = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=TILE * Float32.width
        )
        stage, phase = Int32(0), Int32(1)
        for tile in cutlass.range(self.tiles, unroll=1):
            cute.arch.mbarrier_wait(barriers + STAGES + stage, phase)
            source = cute.make_tensor(
                (scores.iterator + tile % STAGES * TILE).align(16), cute.make_layout(TILE)
            )
            target = cute.make_tensor(
                (ring.iterator + stage * TILE).align(16), cute.make_layout(TILE)
            )
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, TILE * 4)
            with cute.arch.elect_one():
                cute.copy(atom, source, target, mbar_ptr=barriers + stage)
            stage += 1
            if stage == STAGES:
                stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def consume(
        self, results: cute.Tensor, ring: cute.Tensor, barriers: cute.Pointer, thread: Int32
    ):
        """Maximum and sum of exponentials of a thread's scores, tile after tile."""
        scale = Float32(0.0901)
        row_max, row_sum = Float32(-1e30), Float32(0.0)
        stage, phase = Int32(0), Int32(0)
        values = cute.make_rmem_tensor((4, SCORES // 4), Float32)
        for _ in cutlass.range(self.tiles, unroll=1):
            cute.arch.mbarrier_wait(barriers + stage, phase)
            cute.autovec_copy(ring[None, thread, None, stage], values)
            cute.arch.mbarrier_arrive(barriers + STAGES + stage)
            loaded = values.load()
            new_max = loaded.reduce(cute.ReductionOp.MAX, row_max, 0)
            weights = cute.math.exp2(loaded * scale - new_max * scale, fastmath=True)
            row_sum *= cute.math.exp2((row_max - new_max) * scale, fastmath=True)
            row_sum += weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            row_max = new_max
            stage += 1
            if stage == STAGES:
                stage, phase = Int32(0), phase ^ 1
        if row_sum < 0.0:
            results[63] = Int64(thread)


def ptx(tiles: int, entry: str) -> str:
    """The kernel's PTX under the name `entry`, with parameters results and scores."""
    results = make_fake_tensor(Int64, (64,), (1,), assumed_align=8)
    scores = make_fake_tensor(Float32, (STAGES * TILE,), (1,), assumed_align=16)
    with targeting(ARCHITECTURE), tempfile.TemporaryDirectory(prefix="fa4_hd256_") as scratch:
        options = GPUArch(ARCHITECTURE), KeepPTX(), DumpDir(scratch)
        compiled = cute.compile[options](Pipeline(tiles), results, scores)
        text = compiled.artifacts.PTX
    name = text.split(".entry ", 1)[1].split("(", 1)[0].strip()
    return text.replace(name, entry)
