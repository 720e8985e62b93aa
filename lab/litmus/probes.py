"""Probes: figures of a GPU that no simulated machine has, each from one small kernel.

A probe is a function of a `record.Gpu` and the seconds it may take; it returns what a JSON file
holds. `processes` runs them, each in a process of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.tools.golden.cases import HEADER, KERNEL
from sm100_sim.tools.golden.record import DriverError, Gpu

from .messages import BLOCK, MESSAGES, NOISE_BYTES, SCRATCH, message_ptx

_CLUSTERS = 60


class Kernel:
    """A kernel whose parameters are 64-bit words, on a GPU."""

    def __init__(self, gpu: Gpu, ptx: str, dynamic_smem: int = 0) -> None:
        self.gpu, self.dynamic_smem = gpu, dynamic_smem
        module = gpu.call("cuModuleLoadData", ptx.encode() + b"\0")
        self.function = gpu.call("cuModuleGetFunction", module, KERNEL.encode())
        if dynamic_smem:
            kind = gpu.driver.CUfunction_attribute
            gpu.call(
                "cuFuncSetAttribute",
                self.function,
                kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic_smem,
            )

    def start(self, grid: int, block: int, *words: int, after: bool = False) -> None:
        """Launch; after: as a programmatic dependent of the launch before."""
        driver = self.gpu.driver
        values = [ctypes.c_uint64(int(word)) for word in words]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = self.dynamic_smem, 0
        if after:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self.gpu.call("cuLaunchKernelEx", config, self.function, ctypes.addressof(pointers), 0)

    def run(self, grid: int, block: int, *words: int) -> float:
        """Launch and wait; seconds."""
        begin = time.perf_counter()
        self.start(grid, block, *words)
        self.gpu.call("cuCtxSynchronize")
        return time.perf_counter() - begin


def zeros(gpu: Gpu, nbytes: int) -> int:
    """Device memory, all zeros."""
    buffer = gpu.call("cuMemAlloc", nbytes)
    gpu.call("cuMemsetD8", buffer, 0, nbytes)
    gpu.call("cuCtxSynchronize")
    return int(buffer)


def fetch(gpu: Gpu, buffer: int, count: int, dtype: Any = np.uint32) -> np.ndarray:
    """Contents of device memory."""
    found = np.empty(count, dtype)
    gpu.call("cuMemcpyDtoH", found.ctypes.data, buffer, found.nbytes)
    return found


def messages(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Stale words of each `litmus.Message`, and how many were read."""
    found = {}
    out = zeros(gpu, 4 * _CLUSTERS)
    scratch = zeros(gpu, _CLUSTERS * SCRATCH + NOISE_BYTES)
    for message in MESSAGES:
        kernel = Kernel(gpu, message_ptx(message))
        stale = tries = 0
        count, spent = 1000, 0.0
        while spent < seconds:
            gpu.call("cuMemsetD8", out, 0, 4 * _CLUSTERS)
            gpu.call("cuMemsetD8", scratch, 0, _CLUSTERS * SCRATCH)
            took = kernel.run(2 * _CLUSTERS, BLOCK, out, scratch, count)
            spent += took
            stale += int(fetch(gpu, out, _CLUSTERS).sum())
            tries += 32 * count * _CLUSTERS
            count = min(count * 8, 1 << 20) if took < seconds / 8 else count
        found[message.name] = {"stale": stale, "read": tries, "promised": message.ordered}
        print(message.name, found[message.name], flush=True)
    return found


def _plain(parameters: int, body: str, shared: str = "", directives: str = "") -> str:
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    return (
        f"{HEADER}.visible .entry {KERNEL}({names})\n{directives}\n{{\n{shared}"
        ".reg .b32 %t, %n, %i, %parity, %seen, %count;\n.reg .b32 %r<16>;\n.reg .b64 %rd<24>;\n"
        ".reg .pred %one, %two, %done, %more, %p<4>;\nmov.u32 %t, %tid.x;\n"
        f"{body}ret;\n}}\n"
    )


def loads_ptx(first: int, second: int) -> str:
    """One thread starts two bulk loads of so many bytes, on a barrier each, and counts how often
    the second's barrier completes before the first's. p0 counts, p1 64 MiB, p2 turns."""
    load = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{place}], [{source}], {size}, [{bar}];\n"
    )
    body = (
        "mov.u32 %i, 0;\nmov.u32 %count, 0;\nmov.u32 %parity, 0;\nld.param.u64 %rd0, [p0];\n"
        "ld.param.u64 %rd1, [p1];\nld.param.u64 %rd2, [p2];\ncvt.u32.u64 %n, %rd2;\n"
        "mbarrier.init.shared::cta.b64 [one], 1;\nmbarrier.init.shared::cta.b64 [two], 1;\n"
        "fence.proxy.async;\nmov.u32 %r0, %ctaid.x;\nmul.lo.u32 %r1, %r0, 40503;\n"
        "mov.u32 %r5, near;\nmov.u32 %r6, far;\nTURN:\n"
        "mad.lo.u32 %r1, %r1, 1664525, 1013904223;\nshr.u32 %r2, %r1, 8;\n"
        "and.b32 %r2, %r2, 0x2FFC000;\ncvt.u64.u32 %rd3, %r2;\nadd.u64 %rd3, %rd3, %rd1;\n"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [one], {first};\n"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [two], {second};\n"
        + load.format(place="%r5", source="%rd3", size=first, bar="one")
        + load.format(place="%r6", source="%rd1", size=second, bar="two")
        + "POLL:\nmbarrier.test_wait.parity.shared::cta.b64 %two, [two], %parity;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 %one, [one], %parity;\n"
        "setp.eq.and.u32 %p0, 0, 0, %two;\n@!%p0 bra FIRST;\n@%one bra BOTH;\n"
        "add.u32 %count, %count, 1;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %one, [one], %parity;\n@!%one bra WAIT;\n"
        "bra BOTH;\nFIRST:\nbra POLL;\nBOTH:\nxor.b32 %parity, %parity, 1;\nadd.u32 %i, %i, 1;\n"
        "setp.lt.u32 %more, %i, %n;\n@%more bra TURN;\nred.global.add.u32 [%rd0], %count;\n"
    )
    shared = (
        ".shared .align 128 .b8 near[16384];\n.shared .align 128 .b8 far[16384];\n"
        ".shared .align 8 .b64 one;\n.shared .align 8 .b64 two;\n"
    )
    return _plain(3, body, shared, ".reqntid 1, 1, 1")


def order_of_loads(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Count how often the later of two bulk loads completes first."""
    found, source, out = {}, zeros(gpu, 1 << 26), zeros(gpu, 4)
    for first, second in ((16384, 16), (16, 16384), (4096, 4096), (16, 16)):
        kernel = Kernel(gpu, loads_ptx(first, second))
        gpu.call("cuMemsetD8", out, 0, 4)
        turns = 20000
        kernel.run(132, 1, out, source, turns)
        found[f"{first} then {second} bytes"] = {
            "second first": int(fetch(gpu, out, 1)[0]),
            "turns": 132 * turns,
        }
    return found


def try_wait(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Nanoseconds and clocks for which try_wait waits before it says no, by its hint."""
    found, out = {}, zeros(gpu, 16 * 8)
    for hint in ("", ", 0", ", 1000", ", 100000", ", 10000000", ", 0xFFFFFFFF"):
        lines = [
            "ld.param.u64 %rd0, [p0];\nmbarrier.init.shared::cta.b64 [one], 1;\n"
            f"mov.u32 %r1, {hint[2:] or 0};\n"
        ]
        operand = ", %r1" if hint else ""
        for turn in range(8):
            lines.append(
                "mov.u64 %rd1, %globaltimer;\nmov.u64 %rd3, %clock64;\n"
                f"mbarrier.try_wait.parity.shared::cta.b64 %done, [one], 0{operand};\n"
                # The clock must not be read before the answer is there.
                "@%done st.shared.u32 [word], %r1;\nbar.warp.sync 0xffffffff;\n"
                "mov.u64 %rd4, %clock64;\nmov.u64 %rd2, %globaltimer;\n"
                "selp.u64 %rd5, 1, 0, %done;\nadd.u64 %rd2, %rd2, %rd5;\n"
                "sub.u64 %rd1, %rd2, %rd1;\nsub.u64 %rd3, %rd4, %rd3;\n"
                f"st.global.u64 [%rd0+{16 * turn}], %rd1;\nst.global.u64 [%rd0+{16 * turn + 8}], "
                "%rd3;\n"
            )
        kernel = Kernel(
            gpu,
            _plain(1, "".join(lines), ".shared .align 8 .b64 one;\n.shared .align 4 .b32 word;\n"),
        )
        kernel.run(1, 1, out)
        times = fetch(gpu, out, 16, np.uint64).reshape(8, 2)
        found[hint[2:] or "none"] = {"ns": times[:, 0].tolist(), "clocks": times[:, 1].tolist()}
    return found


_COMMIT = "@%one cp.async.bulk.commit_group;\n"
_EXITS = {
    "nothing": "",
    "commit_group": _COMMIT,
    "wait_group.read": _COMMIT + "@%one cp.async.bulk.wait_group.read 0;\n",
    "wait_group": _COMMIT + "@%one cp.async.bulk.wait_group 0;\n",
}


def exit_store_ptx(tail: str) -> str:
    """Each CTA of 128 threads fills 16 KiB, stores them in bulk to its part of p1, and exits."""
    body = (
        "mov.u32 %r0, %ctaid.x;\nshl.b32 %r1, %r0, 12;\nmov.u32 %r2, tile;\nshl.b32 %r3, %t, 2;\n"
        "FILL:\nadd.u32 %r4, %r2, %r3;\nshr.u32 %r5, %r3, 2;\nadd.u32 %r5, %r5, %r1;\n"
        "st.shared.u32 [%r4], %r5;\nadd.u32 %r3, %r3, 512;\nsetp.lt.u32 %more, %r3, 16384;\n"
        "@%more bra FILL;\nfence.proxy.async;\nbar.sync 0;\nsetp.eq.u32 %one, %t, 0;\n"
        "ld.param.u64 %rd0, [p1];\nmul.wide.u32 %rd1, %r0, 16384;\nadd.u64 %rd0, %rd0, %rd1;\n"
        "@%one cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 16384;\n" + tail
    )
    return _plain(2, body, ".shared .align 128 .b8 tile[16384];\n")


def exit_stores(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Words that a bulk store in flight at its CTA's exit left wrong, read behind the kernel."""
    ctas = 4096
    found, target = {}, zeros(gpu, ctas * 16384)
    expected = np.arange(ctas * 4096, dtype=np.uint32)
    for name, tail in _EXITS.items():
        kernel, wrong, turns = Kernel(gpu, exit_store_ptx(tail)), 0, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end or turns < 3:
            gpu.call("cuMemsetD8", target, 0xEE, ctas * 16384)
            kernel.run(ctas, 128, 0, target)
            wrong += int((fetch(gpu, target, ctas * 4096) != expected).sum())
            turns += 1
        found[name] = {"wrong words": wrong, "words": turns * expected.size, "launches": turns}
    return found


def residence_ptx() -> str:
    """One thread a CTA counts up p0 and looks for up to 20 ms whether it gets to p1; p2 counts
    those that saw it."""
    body = (
        "ld.param.u64 %rd0, [p0];\nld.param.u64 %rd1, [p1];\ncvt.u32.u64 %n, %rd1;\n"
        "ld.param.u64 %rd2, [p2];\nred.global.add.u32 [%rd0], 1;\nmov.u64 %rd3, %globaltimer;\n"
        "LOOK:\nld.relaxed.gpu.global.u32 %seen, [%rd0];\nmov.u64 %rd4, %globaltimer;\n"
        "sub.u64 %rd4, %rd4, %rd3;\nsetp.lt.u64 %p0, %rd4, 20000000;\n"
        "setp.lt.and.u32 %more, %seen, %n, %p0;\n@%more bra LOOK;\n"
        "setp.lt.u64 %p0, %rd4, 20000000;\n@%p0 red.global.add.u32 [%rd2], 1;\n"
    )
    return _plain(3, body, "", ".reqntid 1, 1, 1")


def residence(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """CTAs per SM by dynamic shared memory: whether twice as many CTAs as SMs run at a time."""
    count = gpu.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    sms = gpu.call("cuDeviceGetAttribute", count, gpu.device)
    found: dict[str, Any] = {"sms": sms}
    for dynamic in (113 * 1024, 113 * 1024 + 16, 113 * 1024 + 128, 113 * 1024 + 1024, 114 * 1024):
        kernel = Kernel(gpu, residence_ptx(), dynamic)
        counters = zeros(gpu, 8)
        asked = gpu.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.function, 1, dynamic)
        kernel.run(2 * sms, 1, counters, 2 * sms, counters + 4)
        found[str(dynamic)] = {
            "occupancy": int(asked),
            "met": int(fetch(gpu, counters, 2)[1]),
            "of": 2 * sms,
        }
    return found


def launches(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Dynamic shared memory without opting in; clusters at once by size and shared memory."""
    found: dict[str, Any] = {}
    kernel = Kernel(gpu, _plain(0, ""))
    for dynamic in (49152, 49168):
        kernel.dynamic_smem = dynamic
        try:
            kernel.run(1, 32)
            found[f"{dynamic} bytes without opting in"] = "done"
        except DriverError as error:
            found[f"{dynamic} bytes without opting in"] = error.error
    driver = gpu.driver
    for size, dynamic in itertools.product((2, 4, 8), (0, 232448)):
        kernel = Kernel(gpu, _plain(0, ""), dynamic)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 8 * size, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 384, 1, 1
        config.sharedMemBytes = dynamic
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = size
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        config.attrs, config.numAttrs = [attribute], 1
        found[f"clusters of {size} with {dynamic} bytes"] = int(
            gpu.call("cuOccupancyMaxActiveClusters", kernel.function, config)
        )
    return found


def placement(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Record on which SMs the CTAs of a cluster of two run."""
    body = (
        "ld.param.u64 %rd0, [p0];\nmov.u32 %r0, %ctaid.x;\nmul.wide.u32 %rd1, %r0, 8;\n"
        "add.u64 %rd0, %rd0, %rd1;\nmov.u32 %r1, %smid;\nmov.u32 %r2, %nsmid;\n"
        "setp.eq.u32 %p0, %t, 0;\n@%p0 st.global.v2.u32 [%rd0], {%r1, %r2};\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    )
    kernel = Kernel(gpu, _plain(1, body, "", ".reqnctapercluster 2, 1, 1"), 200 * 1024)
    out = zeros(gpu, 8 * 132)
    kernel.run(132, 32, out)
    found = fetch(gpu, out, 264).reshape(66, 2, 2)
    pairs = found[:, :, 0]
    return {
        "nsmid": int(found[0, 0, 1]),
        "neighbours": int((pairs[:, 0] ^ 1 == pairs[:, 1]).sum()),
        "even first": int((pairs[:, 0] % 2 == 0).sum()),
        "clusters": len(pairs),
        "distinct SMs": int(np.unique(pairs).size),
    }


def dependent_ptx(role: str) -> str:
    """first: each CTA's thread 0 stores p2 to word 0 of its line of p0, starts its dependents, and
    after some 20 us stores it to word 1. "late": the same without starting them. second: adds to
    p1 how many CTAs' word 0, then word 1, are not p2; "waits" first waits for the kernel before."""
    line = (
        "mov.u32 %r0, %ctaid.x;\nld.param.u64 %rd0, [p0];\nmul.wide.u32 %rd1, %r0, 128;\n"
        "add.u64 %rd0, %rd0, %rd1;\nld.param.u64 %rd2, [p2];\ncvt.u32.u64 %n, %rd2;\n"
        "ld.param.u64 %rd3, [p1];\n"
    )
    if role in ("first", "late"):
        start = "griddepcontrol.launch_dependents;\n" if role == "first" else ""
        return _plain(
            3,
            f"{line}st.global.u32 [%rd0], %n;\n{start}nanosleep.u32 20000;\n"
            "nanosleep.u32 20000;\nst.global.u32 [%rd0+4], %n;\n",
        )
    wait = "griddepcontrol.wait;\n" if role == "waits" else ""
    return _plain(
        3,
        f"{line}{wait}"
        + "".join(
            f"ld.relaxed.gpu.global.u32 %seen, [%rd0+{4 * i}];\nsetp.ne.u32 %p0, %seen, %n;\n"
            f"@%p0 red.global.add.u32 [%rd3+{4 * i}], 1;\n"
            for i in range(2)
        ),
    )


def dependent_launch(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Record what a programmatic dependent launch sees of the kernel before it."""
    found, turns, ctas = {}, 300, 64
    for first, second in itertools.product(("first", "late"), ("waits", "runs")):
        one, two = Kernel(gpu, dependent_ptx(first)), Kernel(gpu, dependent_ptx(second))
        lines, counts = zeros(gpu, 128 * ctas), zeros(gpu, 8)
        for turn in range(1, turns + 1):
            one.start(ctas, 1, lines, counts, turn)
            two.start(ctas, 1, lines, counts, turn, after=True)
        gpu.call("cuCtxSynchronize")
        early, late = fetch(gpu, counts, 2).tolist()
        found[f"{first}, {second}"] = {
            "stale before the start": early,
            "stale after it": late,
            "read": turns * ctas,
        }
    return found


PROBES: dict[str, Callable[[Gpu, float], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (
        launches,
        placement,
        residence,
        try_wait,
        order_of_loads,
        dependent_launch,
        exit_stores,
        messages,
    )
}
