"""Constants of the modelled GPUs, each with its source and uncertainty (`data/*.json`).

Every constant is a number with a range: `low` and `high` bound what is believed, equal to `value`
where it is certain. Results are the mean and spread over draws from these ranges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

DATA = Path(__file__).parent / "data"
#: Results of `python -m lab calibrate`, one file for the machines that name it ("sets").
SETS = DATA / "sets"


class Values(NamedTuple):
    """One value of every constant, as the replay takes them; clocks unless noted otherwise."""

    sms: float
    clock_ghz: float
    mufu_interval: float
    mufu_latency: float
    constant_load: float
    special_register: float
    shared_load: float
    shared_bytes_per_clock: float
    shuffle: float
    global_load: float
    tmem_load: float
    tmem_store: float
    tmem_columns_per_clock: float
    operand_read: float
    allocation: float
    fence_cta: float
    fence_gpu: float
    async_fence: float
    branch_taken: float
    barrier_test: float
    barrier_arrive: float
    barrier_wake: float
    remote_arrive: float
    named_barrier: float
    named_barrier_warp: float
    cluster_barrier: float
    mma_issue: float
    mma_extra_latency: float
    mma_switch: float
    operand_prefetch: float
    tma_issue: float
    tma_load_l2: float
    tma_load_hbm: float
    tma_store: float
    l2_bytes_per_clock_sm: float
    l2_terabytes: float
    l2_megabytes: float
    hbm_terabytes: float
    launch_us: float
    cta_reuse: float
    clc_query: float
    double_precision: float
    fence_sys: float
    fence_behind_loads: float
    store_bytes_per_clock: float
    store_depth: float
    store_ack: float
    power_watts: float
    static_watts: float
    mma_picojoules: float
    energy_exponent: float
    load_ms: float
    dependent_launch_us: float
    uneven_shares: float
    tma_in_order: float


def l2_share(values: Values, sms_running: float | None = None) -> float:
    """Bytes a clock that an SM gets from L2: its own interface, or its part of what L2 delivers to
    `sms_running` SMs, by default all."""
    delivered = values.l2_terabytes * 1e3 / values.clock_ghz / (sms_running or values.sms)
    return min(values.l2_bytes_per_clock_sm, delivered)


@dataclass(frozen=True)
class Constant:
    """value, low, high: in `unit`. source: where it is from. fitted: chosen to match end-to-end
    rates, so that those rates are no validation of it."""

    value: float
    low: float
    high: float
    unit: str
    source: str
    fitted: bool = False


@dataclass(frozen=True)
class Machine:
    """A modelled GPU: name, what kind of knowledge it rests on, constants by name, and the target
    that kernels replayed for it are compiled for.

    sets: of constants that public rates do not contradict, those by name that differ from the
    central ones; None where no calibration says anything, and constants are drawn.
    """

    name: str
    basis: str
    constants: dict[str, Constant]
    architecture: str = "sm_100a"
    sets: tuple[dict[str, float], ...] | None = None

    def values(self) -> Values:
        """The central value of every constant."""
        return Values(**{name: c.value for name, c in self.constants.items()})

    def drawn(self, generator: np.random.Generator) -> Values:
        """One draw: every uncertain constant from a triangular distribution over its range."""
        return Values(
            **{
                name: c.value
                if c.low == c.high
                else float(generator.triangular(c.low, c.value, c.high))
                for name, c in self.constants.items()
            }
        )

    def sampled(self, draws: int, seed: int = 0) -> list[Values]:
        """The central values, then as many sets: the first of `sets`, else draws by the seed.

        Raises ValueError for fewer than none, or more sets than there are.
        """
        if draws < 0:
            raise ValueError(f"{draws} draws of the constants of {self.name}; accepted: 0 or more")
        central = self.values()
        if self.sets is None:
            generator = np.random.default_rng(seed)
            return [central, *(self.drawn(generator) for _ in range(draws))]
        if draws > len(self.sets):
            raise ValueError(
                f"{draws} draws of the constants of {self.name}; {len(self.sets)} sets are known "
                "that public rates do not contradict: ask for no more, or calibrate further "
                "(`python -m lab calibrate --sets N`)"
            )
        return [central, *(central._replace(**one) for one in self.sets[:draws])]


def machines() -> list[str]:
    """Names of the machines there are data files of."""
    return sorted(path.stem for path in DATA.glob("*.json"))


def load(name: str = "b200") -> Machine:
    """The machine of that name, or of that file: a path that ends in .json.

    A file is what `data/*.json` are, or the report of a bringup, whose "machine" is one; constants
    that it lacks are those of the machine that it is "like".

    Raises ValueError for a name without a data file, or a file that is not there, lacks a constant,
    has one too many, or one whose value lies outside its range.
    """
    path = Path(name) if name.endswith(".json") else DATA / f"{name}.json"
    if not path.is_file():
        raise ValueError(
            f"machine {name!r} is not known; there are {', '.join(machines())}, and files whose "
            "name ends in .json, such as the report of `python -m bench bringup`"
        )
    content = _read(path)
    constants = content["constants"]
    missing, unknown = set(Values._fields) - set(constants), set(constants) - set(Values._fields)
    if missing or unknown:
        raise ValueError(f"{path.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    found = {}
    for key, entry in constants.items():
        value = entry["value"]
        low, high = entry.get("range", (value, value))
        if not low <= value <= high:
            raise ValueError(f"{path.name}: {key} is {value}, outside its range {low} .. {high}")
        found[key] = Constant(
            value, low, high, entry["unit"], entry["source"], entry.get("fitted", False)
        )
    if "basis" not in content:
        raise ValueError(f'{path.name} does not say what its constants rest on: no "basis"')
    name = content.get("name", path.stem)
    return Machine(
        name, content["basis"], found, content["architecture"], _sets(content, path.stem)
    )


def _read(path: Path) -> dict:
    """A data file, or the machine in a report, with the constants of what it is like."""
    content = json.loads(path.read_text())
    content = content.get("machine", content)
    if "constants" not in content:
        raise ValueError(f'{path.name} describes no machine: it has no "constants"')
    if "like" in content:
        if content["like"] not in machines():
            raise ValueError(
                f"{path.name} is like {content['like']!r}; accepted: {', '.join(machines())}"
            )
        other = _read(DATA / f"{content['like']}.json")
        own = {**other.get("own", {}), **content["constants"]}
        constants = {**other["constants"], **content["constants"]}
        content = {**_inherited(other), **content, "constants": constants, "own": own}
    elif "architecture" not in content:
        raise ValueError(
            f'{path.name} does not say what kernels are compiled for: give "architecture", such '
            'as sm_100a, or "like"'
        )
    return content


def _inherited(other: dict) -> dict:
    """Return what a machine's description takes over from the machine that it resembles."""
    return {key: other[key] for key in ("architecture", "sets") if key in other}


def _sets(content: dict, name: str) -> tuple[dict[str, float], ...] | None:
    """The calibrated sets for a machine: without constants of its own beside those that they are
    for, with its own clock in each."""
    if not content.get("sets"):
        return None
    path = SETS / f"{content['sets']}.json"
    if not path.is_file():
        raise ValueError(
            f"{name} draws from the sets in {path.name}, which is not there: "
            "`python -m lab calibrate --write` makes it"
        )
    own = set(content.get("own", {})) - {"clock_ghz"}
    found = []
    for one in json.loads(path.read_text())["sets"]:
        values = {key: value for key, value in one["constants"].items() if key not in own}
        if name in one["clock_ghz"]:
            values["clock_ghz"] = one["clock_ghz"][name]
        found.append(values)
    return tuple(found)
