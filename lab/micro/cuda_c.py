"""Start of the CUDA C of the measurements of a Hopper GPU."""

#: Types, a CTA's clock, the barrier of a cluster, and the wait for a phase of an mbarrier, whose
#: address is one of shared memory.
PREAMBLE = r"""
typedef unsigned long long u64;
typedef unsigned u32;
__device__ __forceinline__ u64 now() {
  u64 v; asm volatile("mov.u64 %0, %%clock64;" : "=l"(v) :: "memory"); return v;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}
"""
