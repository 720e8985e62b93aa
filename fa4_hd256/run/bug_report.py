"""Contents of a bug report: `python -m fa4_hd256 env`.

PyTorch is imported where there is a driver of NVIDIA's to query, CuTe DSL where prebuilt kernels
are in use, and neither elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys

from .. import environment
from ..architectures import ARCHITECTURES
from ..gpus.simulated import simulated_device, simulated_gpu, simulator
from ..package_name import package_version
from .kernel_cache import disk_cache


def describe() -> str:
    cache = disk_cache()
    caches = (
        f"{cache.contents} in {cache.directory}: {cache.state()}",
        _prebuilt_state(),
        _simulator_state(),
    )
    found = (f"{name} {version}" for name, version in versions().items())
    return "\n\n".join([environment.describe(), _gpus(), "\n".join(caches), "\n".join(found)])


def versions() -> dict[str, str]:
    """Versions that a bug report needs."""
    names = ("torch", "nvidia-cutlass-dsl", "numpy", "scipy", "llvmlite")
    own = {"python": sys.version.split()[0], "fa4-hd256": package_version()}
    return own | {name: version_of(name) for name in names}


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    """Return a line for each target of the kernels and for each GPU, the simulator's included."""
    if has_driver():
        from .launch import describe_gpus

        lines = [describe_gpus()]
    else:
        lines = [f"kernels are compiled for {a.targets[0]}: {a.describe()}" for a in ARCHITECTURES]
        lines.append("cuda: this machine has no driver of NVIDIA's")
    try:
        with simulated_device() as device:
            lines.append(f"cpu: the simulator's: {simulated_gpu(device).describe()}")
    except ImportError as error:
        lines.append(f"cpu: cannot be used: {error}")
    return "\n".join(lines)


def has_driver() -> bool:
    nodes = ("/dev/nvidiactl", "/dev/dxg")  # the second one under WSL
    return any(map(os.path.exists, nodes)) or shutil.which("nvidia-smi") is not None


def _prebuilt_state() -> str:
    if environment.prebuilt_directory() is None:
        return "no prebuilt kernels in use"
    from .ahead import prebuilt

    try:
        place = prebuilt.active()
    except ValueError as error:
        return f"prebuilt kernels: {error}"
    assert place is not None
    return f"{place.directory}: {place.describe()}"


def _simulator_state() -> str:
    try:
        sm100_sim = simulator()
        return f"sm100_sim {sm100_sim.__version__}\n{sm100_sim.cache_state()}"
    except ImportError:
        return environment.NO_SIMULATOR
