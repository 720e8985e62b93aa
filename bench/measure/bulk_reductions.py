"""How fast a Hopper GPU adds float32 to global memory: `python -m bench.measure.bulk_reductions`.

Bulk stores and bulk reductions of the same bytes from shared memory, by one SM and by all, to
memory that stays in L2: what sums of dQ over CTAs cost (docs/facts.md has the result). Needs what
`whole_gpu_measure` needs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from .cuda_c import PREAMBLE
from .whole_gpu_measure import Device

#: Bytes of a bulk operation, and how many each SM has under way.
PIECE, DEPTH = 8 << 10, 4
#: Bulk operations of each SM in a run, the first of which are not counted.
COUNT, WARM = 768, 256
ACTIVE = (1, 33, 66, 132)
#: Bytes that all SMs write to: once each SM's own part of it, once all of it in turns.
PLACES = (8 << 20, 32 << 20)

SOURCE = r"""
// adds: 0 stores. shared: all SMs go through all of the place, else each through its part.
extern "C" __global__ void __launch_bounds__(32, 1) leave(
    char* to, u64 bytes, u64* out, u32* gate, u32 adds, u32 shared) {
  extern __shared__ __align__(1024) char pool[];
  u32 from = (u32)__cvta_generic_to_shared(pool);
  for (u32 i = threadIdx.x * 4; i < %(depth)d * %(piece)d; i += 128) *(u32*)(pool + i) = 0;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x) return;
  atomicAdd(gate, 1u);
  while (*(volatile u32*)gate < gridDim.x);
  u64 part = shared ? bytes : bytes / gridDim.x / %(piece)d * %(piece)d;
  u64 first = shared ? (u64)blockIdx.x * 37 * %(piece)d : blockIdx.x * part;
  u64 begin = 0;
  for (u32 i = 0; i < %(count)d; ++i) {
    if (i == %(warm)d) begin = now();
    char* at = to + (shared ? (first + (u64)i * %(piece)d) %% bytes
                            : first + (u64)i * %(piece)d %% part);
    u32 source = from + i %% %(depth)d * %(piece)d;
    if (adds)
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%%0], [%%1], %%2;"
                   :: "l"(at), "r"(source), "r"(%(piece)d) : "memory");
    else
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                   :: "l"(at), "r"(source), "r"(%(piece)d) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group %(open)d;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  out[blockIdx.x] = now() - begin;
}
"""


def rate(device: Device, active: int, adds: bool, place: int, shared: bool) -> dict[str, float]:
    """Bytes a clock that all SMs move together, the median of five runs, and those of the slowest
    SM alone."""
    found = []
    for _ in range(5):
        to = torch.zeros(place, dtype=torch.int8, device="cuda")
        out = torch.zeros(active, dtype=torch.int64, device="cuda")
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = ((to.data_ptr(), 8), (place, 8), (out.data_ptr(), 8), (gate.data_ptr(), 8),
                     (int(adds), 4), (int(shared), 4))  # fmt: skip
        device.launch("leave", active, 32, arguments, shared=DEPTH * PIECE)
        torch.cuda.synchronize()
        found.append(out.cpu().numpy().astype(float))
    clocks = np.median(found, axis=0)
    moved = (COUNT - WARM) * PIECE
    return {"all": float((moved / clocks).sum()), "slowest": float((moved / clocks).min())}


def measure() -> dict[str, Any]:
    """Bytes a clock by what is done, how many SMs do it, and where to."""
    source = PREAMBLE + SOURCE % {"depth": DEPTH, "piece": PIECE, "count": COUNT, "warm": WARM,
                       "open": DEPTH - 1}  # fmt: skip
    device = Device(source)
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for adds in (False, True):
        for active in ACTIVE:
            for place in PLACES:
                for shared in (False, True):
                    key = (f"{'add' if adds else 'store'}, {active} SMs, {place >> 20} MiB, "
                           f"{'all of it each' if shared else 'a part each'}")  # fmt: skip
                    found[key] = rate(device, active, adds, place, shared)
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
