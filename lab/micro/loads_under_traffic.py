"""Latency of a load while others load and store: `python -m lab.micro.loads_under_traffic`.

Clusters of two, each with all shared memory of its SMs, as Hopper's kernel of dV and dS has them:
in every period each CTA loads half of 32 KiB by bulk copies for both, waits until it has the whole,
and its other warps store 16 KiB.  What the loads read stays in L2, shared by some clusters; what is
stored stays there or goes on to HBM.  Needs what `whole_gpu_measure` needs.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np
import torch

from lab.micro.cuda_c import PREAMBLE
from lab.micro.whole_gpu_measure import Device

#: Clocks from one load to the next of a CTA, as far as the load itself allows.
PERIODS = (16000, 8000, 4400, 3300, 2200, 1500)
ROUNDS, SKIPPED = 120, 20
#: Periods after which stores begin again: none are made, L2 keeps them, it does not.
STORES = {"no stores": 0, "stores to L2": 4, "stores to HBM": ROUNDS}
#: Bytes that a group of clusters reads in rotation, and clusters that read the same at other times.
SPAN, SHARING = 2 << 20, 16
THREADS, SHARED = 288, 1024 + (200 << 10)
PERCENTILES = (5, 25, 50, 75, 95)

_SOURCE = (
    PREAMBLE
    + r"""extern "C" __global__ void loads(
    char* from, char* to, u64* out, u32* gate, u32 period, u32 stores, u32 rounds, u32 sharing,
    u32 span) {
  extern __shared__ __align__(1024) char pool[];
  u32 base = (u32)__cvta_generic_to_shared(pool), data = base + 1024;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % 2;
  u32 cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; ++i)
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(base + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;");
    atomicAdd(gate, 1u);
    while (*(volatile u32*)gate < gridDim.x);
  }
  __syncthreads();
  cluster_barrier();
  // Clusters that share what they read are apart from each other, as tiles of a head are.
  u64 begin = now() + cluster % sharing * (u64)(period / sharing);
  if (warp == 8) {
    if (lane == 0) {
      char* mine = from + (u64)(cluster / sharing) * span;
      for (u32 n = 0; n < rounds; ++n) {
        while (now() < begin + (u64)n * period);
        u32 bar = base + 8 * (n & 1);
        char* source = mine + (u64)(n * 32768) % span;
        u64 asked = now();
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 32768;" :: "r"(bar) : "memory");
        for (u32 i = 0; i < 2; ++i) {
          u32 part = 2 * rank + i;
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                       ".multicast::cluster [%0], [%1], 8192, [%2], %3;"
                       :: "r"(data + (n & 1) * 32768 + part * 8192), "l"(source + part * 8192),
                          "r"(bar), "h"((short)3) : "memory");
        }
        wait(bar, n / 2 & 1);
        out[(u64)blockIdx.x * rounds + n] = now() - asked;
      }
    }
    __syncwarp();
  } else {
    u32* place = (u32*)to + ((u64)blockIdx.x * 8 + warp) * (stores ? stores : 1) * 512 + lane;
    for (u32 n = 0; n < rounds; ++n) {
      while (now() < begin + (u64)n * period + period / 2);
      u32* row = place + (u64)(stores ? n % stores : 0) * 512;
      if (stores)
        for (u32 i = 0; i < 16; ++i)
          asm volatile("st.global.b32 [%0], %1;" :: "l"(row + i * 32), "r"(n) : "memory");
    }
  }
  __syncthreads();
  cluster_barrier();
}
"""
)


def summary(clocks: np.ndarray) -> dict[str, float]:
    """The mean, and percentiles by their names."""
    found = {str(q): float(np.percentile(clocks, q)) for q in PERCENTILES}
    return found | {"mean": round(float(clocks.mean()), 1)}


def latencies(device: Device, period: int, stores: int, sharing: int) -> dict[str, float]:
    """`summary` of the clocks of all loads but the first `SKIPPED`."""
    active = torch.cuda.get_device_properties(0).multi_processor_count
    source = torch.zeros(-(-active // 2 // sharing) * SPAN, dtype=torch.int8, device="cuda")
    target = torch.zeros(active * 8 * max(1, stores) * 512, dtype=torch.int32, device="cuda")
    out = torch.zeros(active * ROUNDS, dtype=torch.int64, device="cuda")
    for _ in range(2):
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = (
            (source.data_ptr(), 8), (target.data_ptr(), 8), (out.data_ptr(), 8),
            (gate.data_ptr(), 8), (period, 4), (stores, 4), (ROUNDS, 4), (sharing, 4), (SPAN, 4),
        )  # fmt: skip
        device.launch("loads", active, THREADS, arguments, shared=SHARED, cluster=2)
        torch.cuda.synchronize()
    found = out.cpu().numpy().reshape(active, ROUNDS)[:, SKIPPED:].astype(float)
    return summary(found)


def names() -> dict[str, tuple[int, int, int]]:
    """Name of a row -> (period, periods after which stores begin again, clusters that share)."""
    return {
        f"{name}; {sharing} clusters read the same; every {period} clocks": (
            period, stores, sharing
        )
        for (name, stores), sharing, period in itertools.product(
            STORES.items(), (1, SHARING), PERIODS
        )
    }  # fmt: skip


def measure() -> dict[str, Any]:
    """Everything by name."""
    device = Device(_SOURCE)
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for name, row in names().items():
        found[name] = latencies(device, *row)
        print(name, found[name], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
