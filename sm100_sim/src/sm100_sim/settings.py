"""The simulator's environment variables, read in this one place.

| variable | meaning | default |
|---|---|---|
| SM100_SIM_REPORT | file to which one JSON object per launch is appended | none |
| SM100_SIM_DEVICE | b200, gb200, b300, gb300, rubin or h200; also with its SMs, as b200:19 | b200 |
| SM100_SIM_CLUSTERS | clusters resident at once, 1 or more | as many as the device holds |
| SM100_SIM_SEED | seed of an adversarial schedule | none: the plain, eager schedule |
| SM100_SIM_SANITIZE | 1, wait-ld, strict or strict-order checks for races and lifetime errors | 0 |
| SM100_SIM_THREADS | clusters that run at the same time, 1 or more | the cores of the process |
| SM100_SIM_PADDED | 1: loads may read behind a tensor what PyTorch's allocator rounds it to | 0 |
| SM100_SIM_CACHE_DIR | directory of translated kernels; "off" keeps none | the user's cache |

Arguments of `sm100_sim.launch` override them; `devices` reads SM100_SIM_DEVICE.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Validated values; None where a variable is not set."""

    report: str | None = None
    clusters: int | None = None
    seed: int | None = None
    sanitize: bool | str = False
    cache_directory: str | None = None
    threads: int | None = None
    padded: bool = False


def _integer(environment: Mapping[str, str], name: str, least: int) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} is {text!r}; accepted are whole numbers from {least} on")
    return value


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read and check the variables. Raises ValueError naming a variable with a wrong value."""
    environment = os.environ if environment is None else environment
    sanitize = environment.get("SM100_SIM_SANITIZE", "0") or "0"
    if sanitize not in ("0", "1", "wait-ld", "strict", "strict-order"):
        raise ValueError(
            f"SM100_SIM_SANITIZE is {sanitize!r}; accepted are 0, 1, wait-ld, strict and "
            "strict-order"
        )
    padded = environment.get("SM100_SIM_PADDED", "0") or "0"
    if padded not in ("0", "1"):
        raise ValueError(f"SM100_SIM_PADDED is {padded!r}; accepted are 0 and 1")
    return Settings(
        report=environment.get("SM100_SIM_REPORT") or None,
        clusters=_integer(environment, "SM100_SIM_CLUSTERS", 1),
        seed=_integer(environment, "SM100_SIM_SEED", 0),
        sanitize={"0": False, "1": True}.get(sanitize, sanitize),
        cache_directory=_cache_directory(environment),
        threads=_integer(environment, "SM100_SIM_THREADS", 1),
        padded=padded == "1",
    )


def _cache_directory(environment: Mapping[str, str]) -> str | None:
    given = environment.get("SM100_SIM_CACHE_DIR")
    if given:
        return None if given == "off" else given
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user id without an account, as containers run with
        return os.path.join(tempfile.gettempdir(), f"sm100_sim-{os.geteuid()}")
    return os.path.join(base, "sm100_sim")
