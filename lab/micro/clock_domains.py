"""Relation of L2's clock to that of a Hopper GPU's SMs: `python -m lab.micro.clock_domains`.

Tensor cores at work pull the SMs' clock down (`whole_gpu_measure`). One idle SM measures meanwhile
how long L2, its own shared memory and fences take, in its clocks and in nanoseconds; then all SMs
load from L2. What takes as many nanoseconds at a lower clock has a clock of its own.
Needs what `whole_gpu_measure` needs; nothing of the GPU is set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from lab.micro.cuda_c import PREAMBLE
from lab.micro.whole_gpu_measure import Device

#: SMs at work beside the measuring one.
LOADED = (0, 33, 99, 131)
#: Nanoseconds of rest, of load, and between two samples; numbers of a sample.
REST, LOAD, PERIOD, NUMBERS = 20_000_000, 380_000_000, 5_000_000, 7
#: Links of a chain of 128-byte lines in L2, how many of them are gone through at a time; bytes that
#: an SM loads at a time.
LINES, HOPS, BYTES = 32768, 128, 64 << 10
#: Clocks in which all SMs load at the end.
LAST = 400_000

_ACCUMULATORS = 128
_HEAD = r"""
__device__ __forceinline__ u64 timer() {
  u64 v; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v) :: "memory"); return v;
}
#define BYTES (64u << 10)
__device__ __forceinline__ void expect(u32 bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(BYTES)
               : "memory");
}
__device__ __forceinline__ void ask(u32 in, const char* from, u32 bar) {
  for (u32 i = 0; i < BYTES; i += 8192)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "8192, [%2];" :: "r"(in + i), "l"(from + i), "r"(bar) : "memory");
}
"""

_PRODUCT = r"""
__device__ __forceinline__ void product(float* d, u64 a, u64 b) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, 1, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%(names)s}, %%%(a)d, %%%(b)d, p, 1, 1,"
    " 0, 0; }" : %(registers)s : "l"(a), "l"(b));
}
"""

_DOMAINS = r"""
// Block 0 asks, blocks 1 to loaded multiply from rest to rest + load nanoseconds after the start.
extern "C" __global__ void __launch_bounds__(256, 1) domains(
    const u32* chain, const char* memory, u64* out, u64* rates, u32* gate, u64 rest, u64 load,
    u64 period, u32 samples, u32 loaded, u32 hops, u32 last) {
  extern __shared__ __align__(1024) char pool[];
  u32 bar = (u32)__cvta_generic_to_shared(pool), in = bar + 1024;
  u32 seed = threadIdx.x * 2654435761u + blockIdx.x;
  for (u32 i = threadIdx.x * 4; i < 2 * BYTES; i += blockDim.x * 4) {
    seed = seed * 1664525u + 1013904223u;
    *(u32*)(pool + 1024 + i) = (seed >> 3 & 0x807f807f) | 0x3f003f00;
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    atomicAdd(gate, 1u);
    while (*(volatile u32*)gate < gridDim.x);
  }
  __syncthreads();
  u64 start = timer();
  u32 parity = 0;
  const char* mine = memory + (u64)blockIdx.x * BYTES;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    u32 at = 0, place = 0;
    for (u32 i = 0; i < samples; ++i) {
      while (timer() < start + (u64)i * period);
      u64 t0 = timer(), c0 = now();
      for (u32 n = 0; n < hops; ++n)
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(chain + at));
      if (at == 0xffffffffu) out[0] = 1;
      u64 c1 = now();
      expect(bar); ask(in, mine, bar); wait(bar, parity); parity ^= 1;
      u64 c2 = now();
      for (u32 n = 0; n < hops; ++n) {
        u32 v;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(in + place));
        place = v & (hops >> 20);
      }
      u64 c3 = now();
      for (u32 n = 0; n < 8; ++n) asm volatile("fence.acq_rel.gpu;" ::: "memory");
      u64 c4 = now(), t4 = timer();
      u64* one = out + (u64)i * 7;
      one[0] = t0; one[1] = c0; one[2] = c1 - c0; one[3] = c2 - c1; one[4] = c3 - c2;
      one[5] = c4 - c3; one[6] = t4 - t0;
    }
  }
  if (blockIdx.x && blockIdx.x <= loaded) {
    float d[128];
    for (u32 i = 0; i < 128; ++i) d[i] = 0;
    while (timer() < start + rest);
    // Core matrices of 128 bytes, without a swizzle.
    u64 a = (u64)((in & 0x3ffff) >> 4) | (u64)8 << 16 | (u64)16 << 32;
    u64 b = (u64)(((in + 32768) & 0x3ffff) >> 4) | (u64)8 << 16 | (u64)16 << 32;
    while (__syncthreads_and(timer() < start + rest + load)) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll 1
      for (u32 i = 0; i < 256; ++i) {
        u32 k = i % 8 * 256 + (threadIdx.x / 128) * 128;
        product(d, a + k, b + k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float sum = 0;
    for (u32 i = 0; i < 128; ++i) sum += d[i];
    if (sum == 1.2345f) out[0] = 1;
  }
  __syncthreads();
  if (threadIdx.x) return;
  // All load, begun at one time.
  while (timer() < start + rest + load + 1000000);
  u64 t0 = timer(), begin = now(), end = begin, bytes = 0;
  for (; end - begin < last; end = now(), bytes += BYTES) {
    expect(bar); ask(in, mine, bar); wait(bar, parity); parity ^= 1;
  }
  u64* one = rates + (u64)blockIdx.x * 3;
  one[0] = bytes; one[1] = end - begin; one[2] = timer() - t0;
}
"""


def source() -> str:
    """CUDA C of the kernel."""
    names = ", ".join(f"%%{n}" for n in range(_ACCUMULATORS)).replace("%%", "%")
    registers = ", ".join(f'"+f"(d[{n}])' for n in range(_ACCUMULATORS))
    product = _PRODUCT % {
        "names": names, "registers": registers, "a": _ACCUMULATORS, "b": _ACCUMULATORS + 1,
    }  # fmt: skip
    return PREAMBLE + _HEAD + product + _DOMAINS


def _chain() -> torch.Tensor:
    """Each line's first word is the number of the word of the next line; one cycle through all."""
    order = torch.randperm(LINES, generator=torch.Generator().manual_seed(0))
    following = torch.zeros(LINES * 32, dtype=torch.int32)
    following[order * 32] = (order.roll(-1) * 32).to(torch.int32)
    # The walk begins at word 0, which the cycle contains.
    return following.cuda()


def sample(device: Device, loaded: int) -> dict[str, Any]:
    """Medians over samples at rest and over the later half of the load: the SM's clock in GHz, and
    in clocks a hop through L2, a load of 64 KiB, a hop through shared memory and a fence; what all
    SMs load together afterwards, in bytes per clock and SM and in TB/s."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    load = LOAD if loaded else 0
    count = (REST + load) // PERIOD
    memory = torch.zeros(sms * BYTES, dtype=torch.int8, device="cuda")
    chain = _chain()
    out = torch.zeros(count * NUMBERS, dtype=torch.int64, device="cuda")
    rates = torch.zeros(sms * 3, dtype=torch.int64, device="cuda")
    gate = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = (
        (chain.data_ptr(), 8), (memory.data_ptr(), 8), (out.data_ptr(), 8), (rates.data_ptr(), 8),
        (gate.data_ptr(), 8), (REST, 8), (load, 8), (PERIOD, 8), (count, 4), (loaded, 4),
        (HOPS, 4), (LAST, 4),
    )  # fmt: skip
    device.launch("domains", sms, 256, arguments, shared=1024 + 2 * BYTES + 4096)
    torch.cuda.synchronize()
    numbers = out.cpu().numpy().reshape(count, NUMBERS).astype(float)
    clocks = np.diff(numbers[:, 1]) / np.diff(numbers[:, 0])
    found: dict[str, Any] = {}
    rest = REST // PERIOD
    parts = {"rest": slice(1, rest - 1), "load": slice(rest + (count - rest) // 2, -1)}
    for name, part in parts.items():
        if not numbers[part].size:
            continue
        middle = np.median(numbers[part], axis=0)
        found[name] = {
            "clock_ghz": round(float(np.median(clocks[part])), 4),
            "l2_hop": round(middle[2] / HOPS, 2), "load_64_kib": float(middle[3]),
            "shared_hop": round(middle[4] / HOPS, 2), "fence": round(middle[5] / 8, 1),
        }  # fmt: skip
    found["series_ghz"] = [round(float(c), 3) for c in clocks[:: max(1, len(clocks) // 40)]]
    moved = rates.cpu().numpy().reshape(sms, 3).astype(float)
    found["all_load"] = {
        "bytes_a_clock": round(float(np.median(moved[:, 0] / moved[:, 1])), 2),
        "terabytes": round(float((moved[:, 0] / moved[:, 2]).sum() / 1e3), 3),
        "clock_ghz": round(float(np.median(moved[:, 1] / moved[:, 2])), 4),
    }  # fmt: skip
    return found


def measure() -> dict[str, Any]:
    """Return the samples by the number of SMs at work."""
    device = Device(source())
    found: dict[str, Any] = {"device": torch.cuda.get_device_properties(0).name}
    for loaded in LOADED:
        found[f"{loaded} SMs at work"] = sample(device, loaded)
    return found


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
