"""Rate at which a Hopper GPU adds float32 to global memory: `python -m
lab.micro.bulk_reductions`.

Bulk stores and bulk reductions of the same bytes from shared memory, by one SM and by all, to
memory that stays in L2, and the same beside as many bytes of bulk loads from there: what sums of dQ
over CTAs cost (sm100_sim/docs/facts.md has the result). Needs what `whole_gpu_measure` needs.
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

#: Bytes of a bulk operation, and how many each SM has under way.
PIECE, DEPTH = 16 << 10, 4
#: Bulk operations of each SM in a run; the first are not counted.
COUNT, WARM = 512, 128
ACTIVE = (1, 33, 66, 132)
#: Bytes that all SMs write to: once each SM's own part of it, once all of it in rotation.
PLACES = (8 << 20, 16 << 20)

#: Work of an SM on a piece of its shared memory, as the kernel counts it.
LEAVES = {"store": 0, "add": 1, "nothing": 2}

SOURCE = r"""
// leaves: 0 stores, 1 adds, 2 nothing. loads: whether as many bytes are loaded, too. shared: all
// SMs go through all of the place, else each through its part; loads are of the place `from`.
extern "C" __global__ void __launch_bounds__(32, 1) leave(
    char* to, char* from, u64 bytes, u64* out, u32* gate, u32 leaves, u32 loads, u32 shared) {
  extern __shared__ __align__(1024) char pool[];
  __shared__ __align__(8) u64 barriers[%(depth)d];
  u32 pieces = (u32)__cvta_generic_to_shared(pool), bars = (u32)__cvta_generic_to_shared(barriers);
  for (u32 i = threadIdx.x * 4; i < %(depth)d * %(piece)d; i += 128) *(u32*)(pool + i) = 0;
  if (threadIdx.x < %(depth)d)
    asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(bars + 8 * threadIdx.x));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x) return;
  atomicAdd(gate, 1u);
  while (*(volatile u32*)gate < gridDim.x);
  // An SM's place in its part, or in all, comes back to the first; a remainder of 64 bits in each
  // turn would take longer than what is measured.
  u64 part = shared ? bytes : bytes / gridDim.x / %(piece)d * %(piece)d;
  u64 first = shared ? 0 : blockIdx.x * part;
  u64 at = shared ? (u64)blockIdx.x * 37 * %(piece)d %% bytes : first;
  u64 begin = 0;
  for (u32 i = 0; i < %(count)d; ++i) {
    if (i == %(warm)d) begin = now();
    u32 stage = i %% %(depth)d, piece = pieces + stage * %(piece)d;
    if (loads) {
      u32 bar = bars + 8 * stage;
      if (i >= %(depth)d) wait(bar, (i / %(depth)d - 1) & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%%0], %%1;"
                   :: "r"(bar), "r"(%(piece)d) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                   " [%%0], [%%1], %%2, [%%3];"
                   :: "r"(piece + %(depth)d * %(piece)d), "l"(from + at), "r"(%(piece)d), "r"(bar)
                   : "memory");
    }
    if (leaves == 1)
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%%0], [%%1], %%2;"
                   :: "l"(to + at), "r"(piece), "r"(%(piece)d) : "memory");
    if (leaves == 0)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%%0], [%%1], %%2;"
                   :: "l"(to + at), "r"(piece), "r"(%(piece)d) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group %(open)d;" ::: "memory");
    at += %(piece)d;
    if (at == first + part) at = first;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  if (loads)
    for (u32 i = %(count)d - %(depth)d; i < %(count)d; ++i)
      wait(bars + 8 * (i %% %(depth)d), i / %(depth)d & 1);
  out[blockIdx.x] = now() - begin;
}
"""


def rate(
    device: Device, active: int, what: tuple[str, bool], place: int, shared: bool
) -> dict[str, float]:
    """Bytes a clock that all SMs leave, or load where they leave nothing, the median of five runs,
    and those of the slowest SM alone. what: (one of `LEAVES`, whether they load as many)."""
    found, (leaves, loads) = [], what
    for _ in range(5):
        to, source = (torch.zeros(place, dtype=torch.int8, device="cuda") for _ in range(2))
        out = torch.zeros(active, dtype=torch.int64, device="cuda")
        gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        arguments = (
            (to.data_ptr(), 8), (source.data_ptr(), 8), (place, 8), (out.data_ptr(), 8),
            (gate.data_ptr(), 8), (LEAVES[leaves], 4), (int(loads), 4), (int(shared), 4),
        )  # fmt: skip
        device.launch("leave", active, 32, arguments, shared=2 * DEPTH * PIECE)
        torch.cuda.synchronize()
        found.append(out.cpu().numpy().astype(float))
    clocks = np.median(found, axis=0)
    moved = (COUNT - WARM) * PIECE
    return {"all": float((moved / clocks).sum()), "slowest": float((moved / clocks).min())}


def names() -> dict[str, tuple[int, tuple[str, bool], int, bool]]:
    """Name of a row -> (SMs, what they do, bytes of the place, whether all SMs go through it)."""
    return {
        f"{leaves}{' beside loads' * loads}, {active} SMs, {place >> 20} MiB, "
        f"{'all of it each' if shared else 'a part each'}": (active, (leaves, loads), place, shared)
        for leaves, loads, active, place, shared in itertools.product(
            LEAVES, (False, True), ACTIVE, PLACES, (False, True)
        )
        if loads or leaves != "nothing"
    }


def measure() -> dict[str, Any]:
    """`rate` by `names`."""
    source = PREAMBLE + SOURCE % {"depth": DEPTH, "piece": PIECE, "count": COUNT, "warm": WARM,
                       "open": DEPTH - 1}  # fmt: skip
    device = Device(source)
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for name, row in names().items():
        found[name] = rate(device, *row)
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
