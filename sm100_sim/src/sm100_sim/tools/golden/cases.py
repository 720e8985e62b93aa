"""Golden vectors: what a real GPU computes, recorded once and replayed in the simulator.

A `Case` is one small PTX kernel with its buffers. The recorder (`record`) runs the cases
on a Hopper GPU, which shares these instructions with SM100, and stores their results; the tests
run the same PTX on the same inputs in the simulator and compare. Inputs are not stored: they are
computed here from integers, and `Case.digest` says whether a stored result belongs to them.

This module and those it imports need numpy alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sm100_sim.state.tensormap import TensorMap

#: Folder of the vectors; they come with the package.
DIRECTORY = Path(__file__).with_name("data")
MANIFEST = "manifest.json"
TENSOR_MAPS = "tensormaps.npz"
KERNEL = "golden"

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def head(capability: tuple[int, int]) -> str:
    """Return version, target and address size of a module for a GPU.

    Architecture-specific features (tcgen05, TMA of pairs, setmaxnreg) exist for one compute
    capability alone: hence the `a` of the target, which exists from 9.0 on. Drivers
    refuse versions newer than their own, so it is an old one: on Blackwell that of MMAs with block
    scales (`.block32`), which every driver for CUDA 13 knows.
    """
    major, minor = capability
    version = "8.6" if capability < (10, 0) else "8.8"
    target = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    return f".version {version}\n.target {target}\n.address_size 64\n"


def retargeted(ptx: str, capability: tuple[int, int]) -> str:
    """Return the module with the head for another GPU."""
    lines = ptx.splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if line.startswith(".address_size"))
    return head(capability) + "".join(lines[last + 1 :])


@dataclass(frozen=True)
class Case:
    """One kernel and its buffers.

    `name` is unique; `group` names the file of its results. The kernel's parameters are the
    addresses of `inputs`, then of `outputs` (all .u64), then the tensor maps (128 bytes each).
    `outputs` are the initial contents; what the kernel leaves there is the result. `tensor_maps`:
    (buffer index among inputs and outputs, descriptor whose address counts from the start of that
    buffer). `grid`, `block`, `cluster` are x extents in CTAs, threads and CTAs. `floats` is the
    format of outputs whose NaN payloads the ISA leaves open ("f32", "f16x2", ...). `approximate`:
    results are bounded by the ISA, not defined bit for bit. `faults`: the hardware ends the kernel
    with an error, and no output is recorded. `rule`: what of the machine the case tests, one that
    it keeps or one that it breaks; then how the kernel ends (`Vectors.ending`) is recorded, too,
    and of a kernel that hangs what it had written. `undefined`: which sentence of the PTX ISA
    leaves the case undefined; the simulator may then refuse what the hardware lets pass.
    `dynamic_smem`: bytes. `hashed`: only a hash of the outputs is stored, because what they must be
    is known. `hopper`: of sm_90a alone, no other GPU has it.
    """

    name: str
    group: str
    ptx: str
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    tensor_maps: tuple[tuple[int, TensorMap], ...] = ()
    grid: int = 1
    block: int = 128
    cluster: int = 1
    floats: str = ""
    approximate: bool = False
    faults: bool = False
    rule: str = ""
    undefined: str = ""
    dynamic_smem: int = 0
    hashed: bool = False
    hopper: bool = False

    def digest(self) -> str:
        """16 hexadecimal digits of everything that determines the result."""
        state = hashlib.sha256(self.ptx.encode())
        for array in (*self.inputs, *self.outputs):
            state.update(f"{array.dtype}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).tobytes())
        state.update(repr((self.tensor_maps, self.grid, self.block, self.cluster)).encode())
        if self.dynamic_smem:
            state.update(repr(self.dynamic_smem).encode())
        return state.hexdigest()[:16]

    def keys(self) -> list[str]:
        """Names of the outputs in the group's file."""
        if len(self.outputs) == 1:
            return [self.name]
        return [f"{self.name}#{i}" for i in range(len(self.outputs))]


class Vectors:
    """Recorded results of a directory; files are read on first use."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.directory = directory
        path = directory / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} holds no golden vectors; record them on a GPU of compute capability "
                "9.0 with `python -m sm100_sim record`"
            )
        self.manifest = json.loads(path.read_text())
        self._files: dict[str, dict[str, np.ndarray]] = {}

    def file(self, name: str) -> dict[str, np.ndarray]:
        """Arrays of one file."""
        if name not in self._files:
            with np.load(self.directory / name) as archive:
                self._files[name] = {key: archive[key] for key in archive.files}
        return self._files[name]

    def ending(self, case: Case) -> str:
        """Return how a case ended: "done", "hang", or stage and CUDA error ("run: CUDA_ERROR_...");
        the stage is "load" (ptxas, loading), "launch" or "run"."""
        return self.manifest.get("endings", {}).get(case.name, "done")

    def outputs(self, case: Case) -> list[np.ndarray]:
        """Recorded outputs of a case; none of one that faults.

        Raises KeyError if the case was not recorded or its outputs were hashed, ValueError if its
        PTX or its inputs have changed since.
        """
        self._require(case)
        if case.faults or self.ending(case) not in ("done", "hang"):
            return []
        arrays = self.file(f"{case.group}.npz")
        return [arrays[key] for key in case.keys()]

    def agrees(self, case: Case, outputs: list[np.ndarray]) -> bool:
        """Return True if the outputs of a case are those that were recorded as a hash. Raises as
        `outputs` does."""
        self._require(case)
        return self.manifest["hashes"][case.name] == hash_of(outputs)

    def _require(self, case: Case) -> None:
        if case.name not in self.manifest["cases"]:
            why = self.manifest["failed"].get(case.name, "it is newer than the recording")
            raise KeyError(f"no recorded vector for {case.name}: {why}")
        if self.manifest["cases"][case.name] != case.digest():
            raise ValueError(f"{case.name} has changed since its vector was recorded; record again")


def hash_of(outputs: Iterable[np.ndarray]) -> str:
    """32 hexadecimal digits of outputs."""
    state = hashlib.sha256()
    for array in outputs:
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:32]
