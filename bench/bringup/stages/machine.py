"""Description of the machine: GPU, driver, clocks, other users, versions, settings."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages.gpu import gpu

#: Packages whose versions a report needs.
PACKAGES = ("fa4-hd256", "torch", "nvidia-cutlass-dsl", "cuda-bindings", "numpy", "scipy",
            "llvmlite", "triton", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13",
            "nvidia-cudnn-cu12")  # fmt: skip
_QUERY = ("name", "driver_version", "vbios_version", "pstate", "clocks.sm", "clocks.mem",
          "clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics",
          "clocks_event_reasons.active", "power.draw", "power.limit", "temperature.gpu",
          "memory.total", "memory.used", "mig.mode.current", "compute_mode", "ecc.mode.current",
          "persistence_mode")  # fmt: skip
_ATTRIBUTES = {
    "SMs": "MULTIPROCESSOR_COUNT",
    "largest SM clock, kHz": "CLOCK_RATE",
    "largest memory clock, kHz": "MEMORY_CLOCK_RATE",
    "memory bus, bits": "GLOBAL_MEMORY_BUS_WIDTH",
    "L2, bytes": "L2_CACHE_SIZE",
    "persisting L2, bytes": "MAX_PERSISTING_L2_CACHE_SIZE",
    "shared memory an SM, bytes": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "shared memory a CTA at most, bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared memory a CTA reserved, bytes": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "registers an SM": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "threads an SM": "MAX_THREADS_PER_MULTIPROCESSOR",
    "clusters": "CLUSTER_LAUNCH",
    "ECC": "ECC_ENABLED",
}


def items(target: Target) -> list[str]:
    return list(_FACTS)[0 if target.is_gpu else 3 :]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One kind of facts; nothing here is judged."""
    note(item)
    return _FACTS[item]()


def find_target() -> Target:
    """The GPU of this process; raises what the driver's first call raises without one."""
    device = gpu()
    found = device.description()
    major, minor = map(int, found["capability"].split("."))
    return Target("gpu", found["device"], (major, minor), _attribute("MULTIPROCESSOR_COUNT"))


def _attribute(name: str) -> int:
    device = gpu()
    key = getattr(device.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(device.call("cuDeviceGetAttribute", key, device.device))


def _device() -> Outcome:
    values: dict[str, Any] = dict(gpu().description())
    for title, name in _ATTRIBUTES.items():
        if hasattr(gpu().driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"):
            values[title] = _attribute(name)
    free, total = gpu().call("cuMemGetInfo")
    values |= {"memory, bytes": int(total), "memory free, bytes": int(free)}
    megabytes = values["L2, bytes"] / 1e6
    text = (
        f"{values['device']}, compute capability {values['capability']}, {values['SMs']} SMs, "
        f"{megabytes:.0f} MB L2, {total / 1e9:.0f} GB, CUDA {values['driver_cuda']}"
    )
    return Outcome("measured", text, values)


def _ask(*arguments: str) -> str | None:
    """Return what nvidia-smi prints; None where it is missing or refuses."""
    if shutil.which("nvidia-smi") is None:
        return None
    result = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    return result.stdout.strip() if result.returncode == 0 else None


def _smi() -> Outcome:
    values = {}
    # The bus address names the GPU: nvidia-smi knows nothing of CUDA_VISIBLE_DEVICES, and counts in
    # another order.
    place = gpu().call("cuDeviceGetPCIBusId", 32, gpu().device).split(b"\0")[0].decode()
    for field in _QUERY:
        # One at a time: a field that this driver does not know would spoil the others.
        answer = _ask(f"--query-gpu={field}", "--format=csv,noheader", f"--id={place}")
        if answer is not None:
            values[field] = answer.splitlines()[0].strip()
    if not values:
        return Outcome("skipped", "nvidia-smi is not there, or answers nothing")
    text = (
        f"driver {values.get('driver_version')}, SM clock {values.get('clocks.sm')} of "
        f"{values.get('clocks.max.sm')}, power limit {values.get('power.limit')}, MIG "
        f"{values.get('mig.mode.current')}"
    )
    return Outcome("measured", text, values)


def _others() -> Outcome:
    listed = _ask("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    if listed is None:
        return Outcome("skipped", "nvidia-smi is not there, or does not list processes")
    rows = [line for line in listed.splitlines() if line.split(",")[0].strip() != str(os.getpid())]
    text = f"{len(rows)} other processes on the GPUs" if rows else "none"
    return Outcome("measured", text, {"processes": rows[:20]})


def _host() -> Outcome:
    values = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "nvcc": shutil.which("nvcc") is not None,
        "compute-sanitizer": shutil.which("compute-sanitizer") is not None,
    }
    return Outcome("measured", f"Python {values['python']}, {values['cores']} cores", values)


def _versions() -> Outcome:
    from fa4_hd256.run.bug_report import version_of

    values = {name: version_of(name) for name in PACKAGES}
    text = ", ".join(f"{k} {v}" for k, v in values.items() if v != "not installed")
    return Outcome("measured", text, values)


def _settings() -> Outcome:
    from fa4_hd256 import environment

    names = {variable.name for variable in environment.VARIABLES}
    names |= {name for name in os.environ if name.startswith(("CUDA_", "CUTE_DSL_", "NCCL_"))}
    values = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    return Outcome("measured", ", ".join(f"{k}={v}" for k, v in values.items()) or "none", values)


_FACTS = {
    "device": _device, "nvidia-smi": _smi, "other processes": _others, "host": _host,
    "versions": _versions, "settings": _settings,
}  # fmt: skip
