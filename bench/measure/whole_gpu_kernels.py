"""CUDA C of small kernels that measure a whole Hopper GPU; `whole_gpu_measure` runs them.

`probe` reads an SM's clock and the timer between two kernels of others. `tiles` moves own bytes of
tiles as an attention kernel does: a bulk load, some work, a bulk store that nobody waits for.
`follower` is one of several kernels in a row that spin. `spin` keeps a GPU awake and does nothing.
"""

from __future__ import annotations

#: Bytes of one bulk copy, and of the buffer that loads and stores of `tiles` have each.
COPY, BUFFER = 16 << 10, 64 << 10
#: 64-bit numbers that a tile, and an SM of a `follower`, leaves.
TILE_WORDS, FOLLOWER_WORDS = 4, 4
#: Bits of the last argument of `follower`.
WAITS, TRIGGERS = 1, 2

_HEAD = r"""
typedef unsigned long long u64;
typedef unsigned u32;
__device__ __forceinline__ u64 now() {
  u64 v; asm volatile("mov.u64 %0, %%clock64;" : "=l"(v) :: "memory"); return v;
}
__device__ __forceinline__ u64 timer() {
  u64 v; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) :: "memory"); return v;
}
__device__ __forceinline__ u32 sm() {
  u32 v; asm volatile("mov.u32 %0, %%smid;" : "=r"(v)); return v;
}
__device__ __forceinline__ void pause(u64 clocks) {
  u64 begin = now(); while (now() - begin < clocks);
}

extern "C" __global__ void probe(u64* out) {
  if (threadIdx.x == 0) { out[0] = sm(); out[1] = now(); out[2] = timer(); }
}
extern "C" __global__ void spin(u64 clocks) { pause(clocks); }
"""

_TILES = r"""
#define COPY %(copy)d
#define BUFFER %(buffer)d
// gate: 0 before each launch. lockstep: 1: all begin each tile together; 0: the first one.
extern "C" __global__ void __launch_bounds__(32, 1) tiles(
    const char* from, char* to, u64 memory, u64* out, u32* gate, u32 count, u32 lockstep,
    u32 load, u32 store, u32 stagger, u32 work, u32 wait_store) {
  extern __shared__ __align__(1024) char pool[];
  if (threadIdx.x) return;
  u32 bar = (u32)__cvta_generic_to_shared(pool), in = bar + 1024, back = in + BUFFER;
  asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(bar));
  asm volatile("fence.mbarrier_init.release.cluster;");
  u32 parity = 0;
  for (u32 tile = 0; tile < count; ++tile) {
    if (lockstep || !tile) {
      atomicAdd(gate, 1u);
      while (*(volatile u32*)gate < gridDim.x * (tile + 1));
    }
    if (stagger) pause((u64)stagger * blockIdx.x);
    u64 place = ((u64)tile * gridDim.x + blockIdx.x) * BUFFER %% memory;
    u64 asked = now();
    if (load) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%%0], %%1;" :: "r"(bar), "r"(load));
      for (u32 i = 0; i < load; i += COPY)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%%0], [%%1], %%2, [%%3];"
                     :: "r"(in + i), "l"(from + place + i), "r"(COPY), "r"(bar) : "memory");
      u32 done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%%1], %%2;"
                     " selp.u32 %%0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
      parity ^= 1;
    }
    u64 there = now();
    if (work) pause(work);
    u64 ended = now();
    if (store) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      for (u32 i = 0; i < store; i += COPY)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                     :: "l"(to + place + i), "r"(back + i), "r"(COPY) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      if (wait_store) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    u64 stored = now();
    u64* mine = out + ((u64)tile * gridDim.x + blockIdx.x) * %(words)d;
    mine[0] = asked; mine[1] = there; mine[2] = ended; mine[3] = stored;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""

_FOLLOWER = r"""
// how: 1 waits for the kernel before, 2 lets the one behind launch at once.
extern "C" __global__ void follower(u64* out, u64 clocks, u32 how) {
  u64 entered = now();
  if (how & %(waits)d) asm volatile("griddepcontrol.wait;" ::: "memory");
  u64 begun = now();
  if (how & %(triggers)d) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  pause(clocks);
  if (threadIdx.x == 0) {
    u64* mine = out + (u64)sm() * %(words)d;
    mine[0] = entered; mine[1] = begun; mine[2] = now(); mine[3] = timer();
  }
}
"""

#: All of it, for nvrtc.
SOURCE = (
    _HEAD
    + _TILES % {"copy": COPY, "buffer": BUFFER, "words": TILE_WORDS}
    + _FOLLOWER % {"waits": WAITS, "triggers": TRIGGERS, "words": FOLLOWER_WORDS}
)
