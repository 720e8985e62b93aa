"""Causes that slow an SM's MMAs down: `python -m lab.micro.products_beside > measured.json`.

The step of Hopper's kernel of dV and dS (lab/notes.md) without its barriers: two warpgroups
multiply 64 x 64 x 256 twice, A and B from shared memory, and 64 x 256 x 64 once, A from registers,
in buffers that nobody waits for.  Beside that, each by itself or together: the loads of a step, at
its pace; the stores of dS; the arithmetic.  Needs what `whole_gpu_measure` needs.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lab.micro.cuda_c import PREAMBLE
from lab.micro.whole_gpu_measure import Device

STEPS = 400
#: Threads: two warpgroups that multiply, one whose first warp loads.
THREADS = 384
SHARED = 1024 + (224 << 10)
#: Bits of `products`: which of a step's products are issued.
PRODUCTS = {"S": 1, "dP": 2, "dV": 4}
#: Loader of Q and dO of a step: nobody, each CTA half of them for both, each CTA all of them.
LOADS = {"no loads": 0, "loads for both": 1, "loads for itself": 2}
#: Steps after which stores of dS begin again: none, such that L2 keeps them, such that it does not.
STORES = {"no stores": 0, "stores to L2": 4, "stores to HBM": 1024}
ACTIVE = (2, 132)
DELAYS = (0, 200, 400, 600, 800, 1000, 1200, 1400, 1536, 1800)


@dataclass(frozen=True)
class Row:
    """One measurement: names of PRODUCTS, LOADS and STORES, whether P and dS are computed, how many
    warpgroups multiply, on how many SMs, and by how many clocks the second one begins later."""

    products: tuple[str, ...]
    loads: str = "no loads"
    stores: str = "no stores"
    arithmetic: bool = False
    warpgroups: int = 2
    active: int = 132
    delay: int = 0

    @property
    def name(self) -> str:
        arithmetic = "arithmetic" if self.arithmetic else "no arithmetic"
        later = f", the second {self.delay} clocks later" if self.delay else ""
        return (
            f"{' '.join(self.products)}; {self.loads}; {self.stores}; {arithmetic}; "
            f"{self.warpgroups} warpgroups{later}, {self.active} SMs"
        )


def measured_rows() -> list[Row]:
    """All rows."""
    every = tuple(PRODUCTS)
    subsets = (("S",), ("S", "dP"), ("dV",), every)
    found = [
        Row(some, loads, active=active, warpgroups=warpgroups)
        for active, warpgroups, some, loads in itertools.product(ACTIVE, (1, 2), subsets, LOADS)
    ]
    found += [
        Row(every, loads, stores, arithmetic, active=active)
        for active, loads, stores, arithmetic in itertools.product(
            ACTIVE, LOADS, STORES, (False, True)
        )
    ]
    for stores, arithmetic in itertools.product(("no stores", "stores to L2"), (False, True)):
        one = Row(every, stores=stores, arithmetic=arithmetic, warpgroups=1, active=2)
        found += [one, *(replace(one, warpgroups=2, delay=delay) for delay in DELAYS)]
    return list(dict.fromkeys(found))


def _multiply(columns: int, result: str, a: str, b: str, first: bool = False) -> str:
    """One wgmma of k16.  a: a descriptor's name, or "" for the registers p[4 i] of slice i = `b`'s
    index; B of the sum lies with its rows along the sum."""
    count = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    constraints = ", ".join(f'"+f"({result}[{i}])' for i in range(count))
    form = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    if a:
        source, inputs = f"%{count}, %{count + 1}", f'"l"({a}), "l"({b})'
        tail = f"{0 if first else 1}, 1, 1, 0, 0"
    else:
        registers = ", ".join(f"%{count + i}" for i in range(4))
        source = f"{{{registers}}}, %{count + 4}"
        inputs = ", ".join(f'"r"(p[4 * i + {i}])' for i in range(4)) + f', "l"({b})'
        tail = "1, 1, 1, 1"
    return f'asm volatile("{form} {{{outputs}}}, {source}, {tail};" : {constraints} : {inputs});'


def _source(products: int, arithmetic: bool) -> str:
    """The kernel with some of PRODUCTS, by their bits."""
    score = "\n".join(
        _multiply(64, "{result}", f"a + {(k // 4 * 16384 + k % 4 * 32) >> 4}",
                  f"b + {(k // 4 * 8192 + k % 4 * 32) >> 4}", k == 0)
        for k in range(16)
    )  # fmt: skip
    head = f"#define PRODUCTS {products}\n#define ARITHMETIC {int(arithmetic)}\n"
    return (
        PREAMBLE
        + head
        + _KERNEL
        % {
            "s": score.replace("{result}", "s"),
            "dp": score.replace("{result}", "dp"),
            "dv": _multiply(256, "dv", "", "c + i * 128"),
            "threads": THREADS,
        }
    )


_KERNEL = r"""
__device__ __forceinline__ u64 matrix(u32 at, u64 leading, u64 stride) {
  return (u64)((at & 0x3FFFF) >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | 1ull << 62;
}
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")
// Shared memory: barriers; K, V of 128 keys; Q of 64 queries; two of dO.
extern "C" __global__ void __launch_bounds__(%(threads)d, 1) products(
    char* from, char* to, u64* out, u32* gate, u32 loads, u32 stores, u32 warpgroups, u32 steps,
    u32 delay) {
  extern __shared__ __align__(1024) char pool[];
  u32 base = (u32)__cvta_generic_to_shared(pool);
  u32 k = base + 1024, v = k + 65536, q = v + 65536, dout = q + 32768;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x %% 32, rank = blockIdx.x %% 2;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(base));
    asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(base + 8));
    asm volatile("st.shared.b32 [%%0], %%1;" :: "r"(base + 24), "r"(0));
    asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(base + 16));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  for (u32 i = threadIdx.x; i < 229376 / 4; i += blockDim.x)
    asm volatile("st.shared.b32 [%%0], %%1;"
                 :: "r"(k + 4 * i), "r"(0x3c003c00u ^ (i * 2654435761u & 0x83ff83ffu)));
  asm volatile("fence.proxy.async;" ::: "memory");
  if (threadIdx.x == 0) {
    atomicAdd(gate, 1u);
    while (*(volatile u32*)gate < gridDim.x);
  }
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.shared.b64 _, [%%0];" :: "r"(base + 16) : "memory");
  __syncthreads();
  cluster_barrier();
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8 && lane == 0 && loads) {
      char* mine = from + (u64)blockIdx.x * 4 * 65536;
      for (u32 step = 0; step < steps; ++step) {
        for (u32 reached = 0; reached < step; )
          asm volatile("ld.volatile.shared.b32 %%0, [%%1];" : "=r"(reached) : "r"(base + 24)
                       : "memory");
        if (step >= 2) wait(base + 8 * (step & 1), (step / 2 - 1) & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%%0], 65536;"
                     :: "r"(base + 8 * (step & 1)) : "memory");
        u32 pieces = loads == 1 ? 4 : 8;
        for (u32 i = 0; i < pieces; ++i) {
          u32 part = loads == 1 ? 4 * (i / 2) + 2 * rank + i %% 2 : i;
          u32 place = (part < 4 ? q + part * 8192 : dout + (step & 1) * 32768 + (part - 4) * 8192);
          char* source = mine + (u64)(step & 3) * 65536 + part * 8192;
          if (loads == 1)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         ".multicast::cluster [%%0], [%%1], 8192, [%%2], %%3;"
                         :: "r"(place), "l"(source), "r"(base + 8 * (step & 1)), "h"((short)3)
                         : "memory");
          else
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         " [%%0], [%%1], 8192, [%%2];"
                         :: "r"(place), "l"(source), "r"(base + 8 * (step & 1)) : "memory");
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    u32 group = warp / 4;
    if (group < warpgroups) {
      u64 kd = matrix(k + group * 8192, 16, 1024), vd = matrix(v + group * 8192, 16, 1024);
      u64 qd = matrix(q, 16, 1024), dd = matrix(dout, 16, 1024), cd = matrix(dout, 8192, 1024);
      float dv[128];
      u32 p[16];
      #pragma unroll
      for (u32 i = 0; i < 128; ++i) dv[i] = 0;
      #pragma unroll
      for (u32 i = 0; i < 16; ++i) p[i] = 0x3c003c00u + lane;
      u32* place = (u32*)to + ((u64)blockIdx.x * 8 + warp) * (stores ? stores : 1) * 512 + lane;
      if (group == 1) for (u64 since = now(); now() - since < delay;);
      u64 begin = now();
      #pragma unroll 1
      for (u32 step = 0; step < steps; ++step) {
        // Not initialised: the first product of each overwrites it.
        float s[32], dp[32];
        u64 dd_now = dd + (step & 1) * 2048, cd_now = cd + (step & 1) * 2048;
        FENCE;
#if PRODUCTS & 2
        { u64 a = vd, b = dd_now; %(dp)s }
        COMMIT;
#endif
#if PRODUCTS & 1
        { u64 a = kd, b = qd; %(s)s }
        COMMIT;
#endif
#if PRODUCTS & 4
        #pragma unroll
        for (u32 i = 0; i < 4; ++i) { u64 c = cd_now; %(dv)s }
        COMMIT;
#endif
#if PRODUCTS == 7
        WAIT(2);
#elif PRODUCTS & 2
        WAIT(0);
#endif
#if PRODUCTS & 2
        u32 words[16];
        #pragma unroll
        for (u32 i = 0; i < 16; ++i) {
          float low = dp[2 * i], high = dp[2 * i + 1];
          if (ARITHMETIC) {
            low = (low + 1.5f) * __uint_as_float(p[i] << 16);
            high = (high + 1.5f) * __uint_as_float(p[i] & 0xffff0000u);
          }
          asm volatile("cvt.rn.bf16x2.f32 %%0, %%1, %%2;" : "=r"(words[i]) : "f"(high), "f"(low));
        }
        u32* row = place + (u64)(stores ? step & (stores - 1) : 0) * 512;
        #pragma unroll
        for (u32 i = 0; i < 16; ++i)
          if (stores || words[i] == 0x12345678u)
            asm volatile("st.global.b32 [%%0], %%1;"
                         :: "l"(row + i * 32), "r"(words[i]) : "memory");
#endif
        // Passes at once; ptxas moves no arithmetic across it.
        wait(base + 16, 0);
#if PRODUCTS == 7
        WAIT(1);
#else
        WAIT(0);
#endif
#if PRODUCTS & 1
        if (ARITHMETIC) {
          #pragma unroll
          for (u32 i = 0; i < 32; ++i)
            asm volatile("ex2.approx.ftz.f32 %%0, %%1;"
                         : "=f"(s[i]) : "f"(s[i] * 0.01f - 3.0f));
        }
        wait(base + 16, 0);
        WAIT(0);
        #pragma unroll
        for (u32 i = 0; i < 16; ++i)
          asm volatile("cvt.rn.bf16x2.f32 %%0, %%1, %%2;"
                       : "=r"(p[i]) : "f"(s[2 * i + 1]), "f"(s[2 * i]));
#endif
        if (threadIdx.x == 0)
          asm volatile("st.volatile.shared.b32 [%%0], %%1;"
                       :: "r"(base + 24), "r"(step + 1) : "memory");
      }
      u64 end = now();
      float sum = 0;
      #pragma unroll
      for (u32 i = 0; i < 128; ++i) sum += dv[i];
      #pragma unroll
      for (u32 i = 0; i < 16; ++i) sum += __uint_as_float(p[i]);
      if (sum == 12345.678f) out[0] = 1;
      if (threadIdx.x %% 128 == 0) {
        u64* found = out + ((u64)blockIdx.x * 2 + group) * 2;
        found[0] = begin; found[1] = end;
      }
    }
  }
  // What is still under way to this CTA has long arrived.
  for (u64 begin = now(); now() - begin < 30000;);
  cluster_barrier();
}
"""


def clocks(device: Device, row: Row) -> float:
    """Clocks of a step: medians of five runs and over SMs of the slower warpgroup."""
    source = torch.zeros(row.active * 4 * 65536, dtype=torch.int8, device="cuda")
    steps = max(1, STORES[row.stores])
    target = torch.zeros(row.active * 8 * steps * 512, dtype=torch.int32, device="cuda")
    found = []
    for _ in range(6):
        out = torch.zeros(row.active * 4, dtype=torch.int64, device="cuda")
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = (
            (source.data_ptr(), 8), (target.data_ptr(), 8), (out.data_ptr(), 8),
            (gate.data_ptr(), 8), (LOADS[row.loads], 4), (STORES[row.stores], 4),
            (row.warpgroups, 4), (STEPS, 4), (row.delay, 4),
        )  # fmt: skip
        device.launch("products", row.active, THREADS, arguments, shared=SHARED, cluster=2)
        torch.cuda.synchronize()
        words = out.cpu().numpy().reshape(row.active, 2, 2)[:, : row.warpgroups]
        found.append((words[..., 1].max(axis=1) - words[..., 0].min(axis=1)) / STEPS)
    return float(np.median(np.median(found[1:], axis=0)))


def measure() -> dict[str, Any]:
    """Clocks of a step by name of the row."""
    devices: dict[tuple[int, bool], Device] = {}
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for row in measured_rows():
        key = sum(PRODUCTS[name] for name in row.products), row.arithmetic
        if key not in devices:
            devices[key] = Device(_source(*key))
        found[row.name] = round(clocks(devices[key], row), 1)
        print(row.name, found[row.name], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
