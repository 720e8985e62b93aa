"""Cubins of the kernels that a Hopper GPU is measured with, and what has been measured."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lab.micro import hopper_fences, hopper_kernels, hopper_pipeline
from lab.micro.hopper_kernels import Kernel

#: Measurements, and their GPU; written by `hopper_measure`.
MEASUREMENTS = Path(__file__).with_name("hopper_measured.json")
THREADS = 32


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """All kernels, those in PTX and the one in CuTe DSL."""
    warps = hopper_pipeline.CONSUMERS // THREADS + 1
    ptx = hopper_pipeline.ptx(hopper_kernels.ROUNDS, hopper_kernels.ENTRY)
    name = "CuTe DSL: online softmax over a ring of bulk copies"
    pipeline = Kernel(name, warps, ptx, 1, "tile")
    return *hopper_kernels.KERNELS, pipeline, *hopper_fences.KERNELS


def assemblers() -> list[Path]:
    """The versions of ptxas that triton brings, the older one, with which the measured kernels were
    compiled, first; RuntimeError if triton is not installed."""
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("ptxas comes with triton, which is not installed: pip install triton")
    directory = Path(found.submodule_search_locations[0], "backends", "nvidia", "bin")
    return [directory / "ptxas", directory / "ptxas-blackwell"]


def compile_ptx(ptx: str) -> bytes:
    """The cubin of a PTX module for sm_90a, by the first ptxas that knows its PTX version. Raises
    RuntimeError with what the last one says."""
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        for tool in assemblers():
            command = [str(tool), "-arch=sm_90a", "-O3", str(source), "-o", str(target)]
            result = subprocess.run(command, capture_output=True, text=True)
            if "Unsupported .version" not in result.stderr:
                break
        if result.returncode:
            raise RuntimeError(f"ptxas refused the kernel: {result.stderr.strip()}")
        return target.read_bytes()


def write_cubins(directory: Path, known: Collection[str] = ()) -> None:
    """A cubin of each kernel but the known ones and kernels.json, which `hopper_measure` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, kernel in enumerate(kernels()):
        if kernel.name in known:
            continue
        file = f"{number}.cubin"
        (directory / file).write_bytes(compile_ptx(kernel.ptx))
        listed.append(
            {"name": kernel.name, "warps": kernel.warps, "ctas": kernel.ctas, "file": file}
        )
    content = {
        "entry": hopper_kernels.ENTRY,
        "rounds": hopper_kernels.ROUNDS,
        "buffer_bytes": hopper_kernels.BUFFER,
        "dynamic_shared": hopper_kernels.DYNAMIC_SHARED,
        "kernels": listed,
    }
    (directory / "kernels.json").write_text(json.dumps(content, indent=1))


def measurements() -> dict[str, Any]:
    """Return the measurements of the GPU; no rounds if there are none."""
    if not MEASUREMENTS.exists():
        return {"rounds": {}, "quartiles": {}, "device": "no GPU"}
    return json.loads(MEASUREMENTS.read_text())


def add_measurements(file: Path) -> None:
    """Put what `hopper_measure` has printed into the file of measurements, newer over older.

    Raises ValueError if it was measured on another GPU than what is there.
    """
    known, new = measurements(), json.loads(file.read_text())
    if known["rounds"] and known["device"] != new["device"]:
        raise ValueError(f"measured on {new['device']}, {MEASUREMENTS.name} on {known['device']}")
    merged = {**new, **{key: {**known[key], **new[key]} for key in ("rounds", "quartiles")}}
    MEASUREMENTS.write_text(json.dumps(merged, indent=1) + "\n")
