"""Cost of a Hopper GPU's stores and copies to its SMs: `python -m lab.micro.stores`.

`rows`: clocks of a warp's store by how many lines its lanes reach. `traffic`: bulk copies beside
warps that load or store shared memory, which share its port. Needs what `whole_gpu_measure` needs.
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

#: Stores of each warp, in rotation over the rows of its own part of memory.
COUNT = 512
#: Bytes of a row that a warp's stores fill before it begins again.
ROW = 512
#: (bytes per lane, lanes that lie behind one another in a row, bytes from row to row). 32 lanes of
#: a row are a plain store; 1 lane a row is a thread that stores a row of its own.
PATTERNS = (
    *((width, 32, 0) for width in (2, 4, 8, 16)),
    *((width, 1, stride) for width in (2, 4, 8, 16) for stride in (512, 1024, 8192)),
    *((16, lanes, 512) for lanes in (2, 4, 8, 16)),
    (4, 8, 512), (4, 16, 512), (2, 16, 512),
)  # fmt: skip
WARPS, ACTIVE = (1, 4, 8), (1, 132)
#: Bytes of a bulk copy, copies under way, clocks of a run of `traffic`.
PIECE, DEPTH, CLOCKS = 8 << 10, 8, 200_000
#: Bulk copies of a run of `traffic`: nothing, loads, stores, both.
COPIES = {"none": 0, "loads": 1, "stores": 2, "both": 3}
#: Work of the warps beside them, and their number.
BESIDE = (
    ("nothing", 0),
    *((what, warps) for what in ("ld.shared", "st.shared") for warps in (8, 16, 24)),
)

_HEAD = r"""
__device__ __forceinline__ void together(u32* gate) {
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(gate, 1u);
    while (*(volatile u32*)gate < gridDim.x);
  }
  __syncthreads();
}
"""

_ROWS = r"""
#define STORE2(p) asm volatile("st.global.b16 [%0], %1;" :: "l"(p), "h"((short)i) : "memory")
#define STORE4(p) asm volatile("st.global.b32 [%0], %1;" :: "l"(p), "r"(i) : "memory")
#define STORE8(p) asm volatile("st.global.v2.b32 [%0], {%1, %1};" :: "l"(p), "r"(i) : "memory")
#define STORE16(p) \
  asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};" :: "l"(p), "r"(i) : "memory")
// part: bytes of memory of a warp. lanes: that lie behind one another in a row, rows stride apart.
#define ROWS(WIDTH) \
extern "C" __global__ void rows##WIDTH( \
    char* to, u64 part, u64* out, u32* gate, u32 lanes, u32 stride, u32 row, u32 count) { \
  u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32; \
  char* base = to + ((u64)blockIdx.x * warps + warp) * part; \
  base += (u64)(lane / lanes) * stride + lane % lanes * WIDTH; \
  u32 step = lanes * WIDTH, turns = row / step; \
  together(gate); \
  u64 begin = now(); \
  for (u32 i = 0; i < count; i += turns) { \
    char* p = base; \
    _Pragma("unroll 8") for (u32 j = 0; j < turns; ++j, p += step) STORE##WIDTH(p); \
  } \
  u64 issued = now(); \
  asm volatile("fence.acq_rel.gpu;" ::: "memory"); \
  u64 ended = now(); \
  if (lane == 0) { \
    u64* mine = out + ((u64)blockIdx.x * warps + warp) * 3; \
    mine[0] = begin; mine[1] = issued; mine[2] = ended; \
  } \
}
ROWS(2)
ROWS(4)
ROWS(8)
ROWS(16)
"""

_TRAFFIC = r"""
#define PIECE %(piece)d
#define DEPTH %(depth)d
// Warp 0 loads in bulk (copies & 1), warp 1 stores (copies & 2), the others do as told: 1 load, 2
// store shared memory, 128 bytes a clock. Each counts bytes until the clocks are over.
extern "C" __global__ void traffic(
    char* memory, u64* out, u32* gate, u32 copies, u32 beside, u32 clocks) {
  extern __shared__ __align__(1024) char pool[];
  u32 warp = threadIdx.x / 32, lane = threadIdx.x %% 32, warps = blockDim.x / 32;
  u32 bars = (u32)__cvta_generic_to_shared(pool), in = bars + 1024, back = in + DEPTH * PIECE;
  u32 plain = back + DEPTH * PIECE;
  char* mine = memory + (u64)blockIdx.x * 2 * DEPTH * PIECE;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < DEPTH; ++i)
      asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(bars + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  together(gate);
  u64 begin = now(), bytes = 0, end = begin;
  if (warp == 0 && lane == 0 && (copies & 1)) {
    u32 n = 0;
    for (; n < DEPTH || end - begin < clocks; ++n, end = now()) {
      u32 slot = n %% DEPTH, done = n < DEPTH;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%%1], %%2;"
                     " selp.u32 %%0, 1, 0, p; }"
                     : "=r"(done) : "r"(bars + 8 * slot), "r"((n / DEPTH - 1) & 1) : "memory");
      bytes += n >= DEPTH ? PIECE : 0;
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%%0], %%1;"
                   :: "r"(bars + 8 * slot), "r"(PIECE) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                   "[%%0], [%%1], %%2, [%%3];" :: "r"(in + slot * PIECE), "l"(mine + slot * PIECE),
                   "r"(PIECE), "r"(bars + 8 * slot) : "memory");
    }
    for (u32 i = 0; i < DEPTH; ++i, ++n) {
      u32 slot = n %% DEPTH, done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%%1], %%2;"
                     " selp.u32 %%0, 1, 0, p; }"
                     : "=r"(done) : "r"(bars + 8 * slot), "r"((n / DEPTH - 1) & 1) : "memory");
    }
  } else if (warp == 1 && lane == 0 && (copies & 2)) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (u32 n = 0; end - begin < clocks; ++n, end = now()) {
      u32 slot = n %% DEPTH;
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                   :: "l"(mine + (DEPTH + slot) * PIECE), "r"(back + slot * PIECE), "r"(PIECE)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
      bytes += n >= 4 ? PIECE : 0;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  } else if (warp >= 2 && beside) {
    u32 at = plain + (warp - 2) %% 8 * 512 + lane * 16, sum = 0;
    while (end - begin < clocks) {
      #pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        u32 v[32];
        #pragma unroll
        for (u32 j = 0; j < 32; j += 4)
          if (beside == 1)
            asm volatile("ld.shared.v4.u32 {%%0, %%1, %%2, %%3}, [%%4];" : "=r"(v[j]),
                         "=r"(v[j + 1]), "=r"(v[j + 2]), "=r"(v[j + 3]) : "r"(at));
          else
            asm volatile("st.shared.v4.u32 [%%0], {%%1, %%1, %%1, %%1};" :: "r"(at), "r"(sum));
        if (beside == 1)
          #pragma unroll
          for (u32 j = 0; j < 32; ++j) sum ^= v[j];
      }
      bytes += 32 * 512;
      end = now();
    }
    if (sum == 12345) out[0] = sum;
  }
  if (lane == 0) {
    u64* found = out + ((u64)blockIdx.x * warps + warp) * 2;
    found[0] = bytes; found[1] = end - begin;
  }
}
"""


def rows(device: Device, active: int, warps: int, pattern: tuple[int, int, int]) -> dict[str, Any]:
    """Clocks of an SM for each store of a warp: of the issue, and until a fence behind all of them
    is through; medians of five runs, of the slowest SM."""
    width, lanes, stride = pattern
    part = max(ROW, 32 // lanes * stride) if lanes < 32 else ROW
    to = torch.zeros(active * warps * part, dtype=torch.int8, device="cuda")
    found = []
    for _ in range(6):
        out = torch.zeros(active * warps * 3, dtype=torch.int64, device="cuda")
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = (
            (to.data_ptr(), 8), (part, 8), (out.data_ptr(), 8), (gate.data_ptr(), 8), (lanes, 4),
            (stride, 4), (ROW, 4), (COUNT, 4),
        )  # fmt: skip
        device.launch(f"rows{width}", active, 32 * warps, arguments)
        torch.cuda.synchronize()
        clocks = out.cpu().numpy().reshape(active, warps, 3).astype(float)
        begin = clocks[..., 0].min(axis=1)
        stores = warps * -(-COUNT // (ROW // (lanes * width))) * (ROW // (lanes * width))
        found.append([(clocks[..., n].max(axis=1) - begin).max() / stores for n in (1, 2)])
    issued, ended = np.median(found[1:], axis=0)
    return {"issued": round(float(issued), 2), "through": round(float(ended), 2),
            "bytes_a_clock": round(32 * width / float(ended), 2)}  # fmt: skip


def traffic(device: Device, active: int, copies: int, beside: str, warps: int) -> dict[str, float]:
    """Bytes a clock and SM of bulk loads, bulk stores and the warps beside them; medians of three
    runs and of the SMs."""
    memory = torch.zeros(active * 2 * DEPTH * PIECE, dtype=torch.int8, device="cuda")
    kinds = {"nothing": 0, "ld.shared": 1, "st.shared": 2}
    found = []
    for _ in range(4):
        out = torch.zeros(active * (2 + warps) * 2, dtype=torch.int64, device="cuda")
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = (
            (memory.data_ptr(), 8), (out.data_ptr(), 8), (gate.data_ptr(), 8), (copies, 4),
            (kinds[beside], 4), (CLOCKS, 4),
        )  # fmt: skip
        shared = 1024 + 2 * DEPTH * PIECE + 4096
        device.launch("traffic", active, 32 * (2 + warps), arguments, shared=shared)
        torch.cuda.synchronize()
        counted = out.cpu().numpy().reshape(active, 2 + warps, 2).astype(float)
        rates = counted[..., 0] / np.maximum(counted[..., 1], 1)
        found.append([rates[:, 0], rates[:, 1], rates[:, 2:].sum(axis=1)])
    loads, stores, others = np.median(np.median(found[1:], axis=0), axis=1)
    return {"loads": round(float(loads), 2), "stores": round(float(stores), 2),
            "beside": round(float(others), 2)}  # fmt: skip


def key_of_rows(active: int, warps: int, pattern: tuple[int, int, int]) -> str:
    """The name of a row of `rows` in the results."""
    width, lanes, stride = pattern
    where = "in one row" if lanes == 32 else f"{lanes} lanes a row, rows {stride} apart"
    return f"{width} bytes a lane, {where}; {warps} warps, {active} SMs"


def key_of_traffic(active: int, name: str, beside: str, warps: int) -> str:
    """The name of a row of `traffic` in the results."""
    return f"{name}, beside {warps} warps of {beside}, {active} SMs"


def measure() -> dict[str, Any]:
    """Everything: rows, then traffic, by name."""
    device = Device(PREAMBLE + _HEAD + _ROWS + _TRAFFIC % {"piece": PIECE, "depth": DEPTH})
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for active, warps, pattern in itertools.product(ACTIVE, WARPS, PATTERNS):
        found[key_of_rows(active, warps, pattern)] = rows(device, active, warps, pattern)
    for active, (name, copies), (beside, warps) in itertools.product(
        ACTIVE, COPIES.items(), BESIDE
    ):
        if copies or warps:
            found[key_of_traffic(active, name, beside, warps)] = traffic(
                device, active, copies, beside, warps
            )
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
