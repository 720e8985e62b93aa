"""CUDA C of small kernels that measure a whole Hopper GPU; `whole_gpu_measure` runs them.

`probe` reads an SM's clock and the timer between two kernels of others. `tiles` moves own bytes of
tiles as an attention kernel does: a bulk load, some work, a bulk store that nobody waits for.
`queue` has a load behind or in front of a store on one SM; two others do nothing but exp2 or FMA.
`follower` is one of several kernels in a row that spin. `spin` keeps a GPU awake and does nothing.
"""

from __future__ import annotations

from lab.micro.cuda_c import PREAMBLE

#: Bytes of one bulk copy, and of the buffer that loads and stores of `tiles` have each.
COPY, BUFFER = 16 << 10, 64 << 10
#: Clocks of work of a tile, and how many tiles each SM goes through.
WORK, TILES = 16000, 24
#: 64-bit numbers that a tile, and an SM of a `follower`, leaves.
TILE_WORDS, FOLLOWER_WORDS = 4, 4
#: Bits of the last argument of `follower`.
WAITS, TRIGGERS = 1, 2

_HEAD = r"""
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

_QUEUE = r"""
__device__ __forceinline__ void leave(char* to, u32 back, u32 bytes, u32 piece) {
  for (u32 i = 0; i < bytes; i += piece)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                 :: "l"(to + i), "r"(back + i), "r"(min(piece, bytes - i)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// A load beside a store of one SM. by: 0 TMA stores, 1 the warp does; order: 0 the store first.
// Bytes of both in pieces. hot: loads find their bytes in L2.
extern "C" __global__ void __launch_bounds__(32, 1) queue(
    const char* from, char* to, u64 memory, u64* out, u32 count, u32 load, u32 store, u32 piece,
    u32 by, u32 order, u32 hot) {
  extern __shared__ __align__(1024) char pool[];
  u32 bar = (u32)__cvta_generic_to_shared(pool), in = bar + 1024, back = in + BUFFER;
  bool first = threadIdx.x == 0;
  if (first) {
    asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncwarp();
  for (u32 turn = 0; turn < count; ++turn) {
    u64 place = ((u64)turn * gridDim.x + blockIdx.x) * BUFFER %% memory;
    const char* source = from + (hot ? (u64)blockIdx.x * BUFFER : place);
    pause(4000);
    u64 begin = now();
    if (store && order == 0) {
      if (by == 0 && first) leave(to + place, back, store, piece);
      if (by == 1)
        for (u32 i = threadIdx.x * 16; i < store; i += 512)
          asm volatile("st.global.v4.u32 [%%0], {%%1, %%1, %%1, %%1};"
                       :: "l"(to + place + i), "r"(turn) : "memory");
    }
    __syncwarp();
    u64 asked = now();
    if (first && load) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%%0], %%1;" :: "r"(bar), "r"(load));
      for (u32 i = 0; i < load; i += piece)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%%0], [%%1], %%2, [%%3];"
                     :: "r"(in + i), "l"(source + i), "r"(min(piece, load - i)), "r"(bar)
                     : "memory");
      if (store && order == 1) leave(to + place, back, store, piece);
      u32 done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%%1], %%2;"
                     " selp.u32 %%0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(turn & 1) : "memory");
    }
    u64 there = now();
    if (first) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    u64 read = now();
    if (first) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (first) {
      u64* mine = out + ((u64)turn * gridDim.x + blockIdx.x) * %(words)d;
      mine[0] = asked - begin; mine[1] = there - asked; mine[2] = read - begin;
      mine[3] = now() - begin;
    }
    __syncwarp();
  }
}
// 32 operations of each thread in a round, eight chains.
#define ARITHMETIC(name, operation) \
extern "C" __global__ void name(float* out, u32 rounds) { \
  float v[8], sum = 0, scale = -0.5f - 0.001f * (threadIdx.x & 7); \
  for (int i = 0; i < 8; ++i) v[i] = -0.001f * (threadIdx.x + 37 * i + blockIdx.x); \
  for (u32 r = 0; r < rounds; ++r) { \
    _Pragma("unroll") \
    for (int j = 0; j < 32; ++j) asm volatile(operation : "+f"(v[j & 7]) : "f"(scale)); \
  } \
  for (int i = 0; i < 8; ++i) sum += v[i]; \
  if (sum == 12345.f) out[0] = sum; \
}
ARITHMETIC(exp2s, "ex2.approx.ftz.f32 %%0, %%0;")
ARITHMETIC(fmas, "fma.rn.f32 %%0, %%0, %%1, %%1;")
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
    PREAMBLE
    + _HEAD
    + _TILES % {"copy": COPY, "buffer": BUFFER, "words": TILE_WORDS}
    + _QUEUE % {"words": TILE_WORDS}
    + _FOLLOWER % {"waits": WAITS, "triggers": TRIGGERS, "words": FOLLOWER_WORDS}
)
