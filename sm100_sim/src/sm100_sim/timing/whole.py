"""Time of a whole launch, from the replay of one of its clusters.

A launch runs its clusters in waves over all SMs. What an SM holds at once is replayed together:
resident CTAs share its issue slots, pipes, tensor core, ports and link to L2. No launch is faster
than its bytes at HBM's rate. Everything is modelled.

    with WholeLaunches("h200") as found:                  # a Collector that notes machine code
        ...
    found.launches[-1].whole(clusters=4096, hbm_bytes=8e8).seconds

Not modelled: the order in which clusters are taken to SMs, clusters of unequal length, the overlap
of one wave's end with the next one's begin, turnaround of HBM between reads and writes, sectors
that are read again because L2 has lost them, and the clock under a power limit.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from elftools.elf.elffile import ELFFile

from sm100_sim import devices
from sm100_sim.host.cubin import launch_registers
from sm100_sim.launcher import Options
from sm100_sim.report import Report
from sm100_sim.state.launch import LaunchConfig

from .machine_code.assembling import assembled
from .machine_code.resources import Action
from .machine_constants import Machine, Values, l2_share
from .prediction import Collector, Prediction
from .program import NAMED_BARRIERS, SLOTS
from .replaying.replay import Replay, replay
from .replaying.state import BUSY
from .stored import StoredProgram

#: Warps, CTAs and bytes of shared memory kept back per CTA, of an SM (CUDA programming guide,
#: compute capabilities 9.0 and 10.x); registers are allocated by warp in units of 256.
_WARPS, _CTAS, _KEPT_BACK, _REGISTER_UNIT = 64, 32, 1024, 256
_LANES = 32
_DOWN, _UP = BUSY.index("L2 to SM"), BUSY.index("SM to L2")
#: Clocks by which a load from HBM takes longer than one from L2: 672.72 and 286.44 measured on an
#: H200 (docs/bringup_h200.json). Of Blackwell no figure is known; it is taken to be the same.
HBM_LATENCY = 386
#: Actions whose arguments are a range of `Program.targets`, and those whose first one is an
#: mbarrier, or a named barrier.
_SIGNALLING = (Action.ARRIVE, Action.COPY_ARRIVE, Action.COMMIT, Action.TRY_CANCEL,
               Action.STORE_ASYNC, Action.TMA_LOAD)  # fmt: skip
_OF_MBARRIER = (Action.INIT, Action.WAIT)
_NAMED = (Action.BAR_SYNC, Action.BAR_ARRIVE)
_OF_CLUSTER = (Action.CLUSTER_ARRIVE, Action.CLUSTER_WAIT)


class Resources(NamedTuple):
    """Resources that a CTA holds: threads, registers per thread, bytes of shared memory."""

    threads: int
    registers: int
    shared: int

    @classmethod
    def of(cls, cubin: bytes, config: LaunchConfig) -> Resources:
        """Read them off a launch and its machine code."""
        name = config.kernel_name
        section = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".nv.shared.{name}")
        # The section begins with what the system keeps back.
        static = 0 if section is None else max(section["sh_size"] - _KEPT_BACK, 0)
        registers = launch_registers(cubin).get(name) or config.registers or 0
        return cls(math.prod(config.block), registers, static + config.dynamic_smem)

    @property
    def resident(self) -> int:
        """CTAs of the kernel that an SM holds at once, 1 at least."""
        warps = -(-self.threads // _LANES)
        by_warp = _REGISTER_UNIT * -(-self.registers * _LANES // _REGISTER_UNIT)
        # A register file belongs to an issue slot.
        held = SLOTS * (devices.REGISTER_FILE // SLOTS // by_warp) if by_warp else _WARPS
        by_shared = devices.SHARED_OF_AN_SM // (self.shared + _KEPT_BACK)
        return max(1, min(_CTAS, _WARPS // warps, held // warps, by_shared))


@dataclass(frozen=True)
class WholeTime:
    """Time of a whole launch.

    seconds: the larger of both bounds and the launch itself. waves, memory: seconds of the waves of
    clusters on the SMs, of the bytes at HBM's rate. resident: CTAs of an SM at once. rounds: waves.
    clocks: of a full wave. busy: share of a full wave that each resource is busy.
    """

    seconds: float
    waves: float
    memory: float
    resident: int
    rounds: float
    clocks: int
    busy: dict[str, float]

    @property
    def bound(self) -> str:
        """Return what decides: "HBM", or the resource of an SM that is busy the longest."""
        if self.memory > self.waves:
            return "HBM"
        return max(self.busy, key=self.busy.__getitem__)


@dataclass(frozen=True)
class Launch:
    """A predicted launch, of which a larger one with the same clusters is to be told.

    prediction: of one cluster. resources: of a CTA.
    """

    prediction: Prediction
    resources: Resources

    def whole(
        self, clusters: int, hbm_bytes: float = 0.0, values: Values | None = None
    ) -> WholeTime:
        """Return the time of a launch of so many such clusters.

        hbm_bytes: that the launch reads from HBM and writes to it: distinct ones, where L2 holds
        what is read again. values: constants, by default the central ones. Raises ValueError as
        `side_by_side`.
        """
        values = self.prediction.machine.values() if values is None else values
        report, stored = self.prediction.report, StoredProgram.of(self.prediction.compiled)
        size = math.prod(report.cluster)
        places = int(values.sms) // size
        values = _from_hbm(self.prediction, values, hbm_bytes / clusters)
        mine = -(-clusters // places)
        resident = min(self.resources.resident, mine)
        rounds, rest = divmod(mine, resident)
        full, wave = self._wave(stored, resident, values)
        clocks = rounds * wave
        if rest:
            clocks += self._wave(stored, rest, values)[1]
        if resident == 1:
            clocks += int((rounds - 1) * values.cta_reuse)
        waves = clocks / values.clock_ghz * 1e-9
        memory = hbm_bytes / values.hbm_terabytes * 1e-12
        seconds = max(waves, memory) + values.launch_us * 1e-6
        busy = {name: share * full.clocks / wave for name, share in full.utilisation().items()}
        busy["L2 to SM"] = self._link(full, resident, values) / wave
        return WholeTime(seconds, waves, memory, resident, mine / resident, wave, busy)

    def _wave(self, stored: StoredProgram, clusters: int, values: Values) -> tuple[Replay, int]:
        """Return the replay of clusters at once, and its clocks: no less than their bytes take on
        the SM's link, of which the replay leaves out those of cp.async."""
        run = replay(side_by_side(stored, clusters), values)
        return run, max(run.clocks, math.ceil(self._link(run, clusters, values)))

    def _link(self, run: Replay, clusters: int, values: Values) -> float:
        """Return the clocks that an SM's link from L2 is busy."""
        copied = copied_bytes(self.prediction) / self.prediction.compiled.program.sms
        return run.busy[:, _DOWN].max() + clusters * copied / l2_share(values)

    def seconds(self, clusters: int, hbm_bytes: float = 0.0) -> np.ndarray:
        """Return float64, the time with the central constants and with each drawn set."""
        return np.array(
            [self.whole(clusters, hbm_bytes, drawn).seconds for drawn in self.prediction.values]
        )


def _from_hbm(prediction: Prediction, values: Values, nbytes: float) -> Values:
    """Return constants with the latency of loads for the share of a cluster's bytes that comes from
    HBM. nbytes: of a cluster, read and written."""
    run = prediction.central
    moved = (
        run.busy[:, _DOWN].sum() * l2_share(prediction.values[0])
        + run.busy[:, _UP].sum() * prediction.values[0].store_bytes_per_clock
        + copied_bytes(prediction)
    )
    more = HBM_LATENCY * min(1.0, nbytes / moved) if moved else 0.0
    return values._replace(
        global_load=values.global_load + more, tma_load_l2=values.tma_load_l2 + more
    )


def copied_bytes(prediction: Prediction) -> int:
    """Return the bytes that a cluster copies to shared memory by cp.async, each lane its own."""
    compiled, program = prediction.compiled, prediction.compiled.program
    held = program.event >= 0
    copies = program.action[program.event[held], 0] == Action.COPY
    numbers, counts = np.unique(program.numbers[held][copies], return_counts=True)
    code = compiled.function.instructions
    return sum(
        count * _LANES * _copy_width(code[number].opcode)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    )


def _copy_width(opcode: str) -> int:
    """Return the bytes that a lane copies."""
    return 16 if ".128" in opcode else 8 if ".64" in opcode else 4


def side_by_side(stored: StoredProgram, copies: int) -> StoredProgram:
    """Return the program of so many equal clusters that share their SMs and nothing else.

    Raises ValueError for more than one with a cluster barrier: the replay counts one cluster's.
    """
    if copies == 1:
        return stored
    program, warps = stored.program, stored.warps
    if np.isin(program.action[:, 0], _OF_CLUSTER).any():
        raise ValueError("clusters with a barrier of their own are replayed one at a time")
    rows, targets, elements = len(program.action), len(program.targets), len(program.numbers)
    each = max(warp for _, warp in warps) + 1
    explicit = _counted(program.action, program, warps)
    actions, all_targets, names = [], [], []
    for copy in range(copies):
        actions.append(_moved(explicit, copy, (targets, program.barriers, program.sms)))
        all_targets.append(program.targets + np.array([copy * program.barriers, 0, 0, 0, 0]))
        names += [(rank, warp + copy * each) for rank, warp in warps]
    shift = np.repeat(np.arange(copies), len(program.event)).astype(np.int32)
    event = np.tile(program.event, copies)
    first = np.repeat(np.arange(copies), len(warps)).astype(np.int32) * elements
    together = program._replace(
        numbers=np.tile(program.numbers, copies),
        event=np.where(event >= 0, event + shift * rows, event).astype(np.int32),
        first=np.tile(program.first, copies) + first,
        last=np.tile(program.last, copies) + first,
        sm=np.tile(program.sm, copies),
        action=np.concatenate(actions),
        targets=np.concatenate(all_targets),
        barriers=program.barriers * copies,
        # Further SMs stay empty; named barriers are numbered by SM.
        sms=program.sms * copies,
    )
    return StoredProgram(
        stored.instructions, together, names, stored.work, stored.unmatched, stored.ambiguous
    )


def _counted(action: np.ndarray, program: object, warps: list[tuple[int, int]]) -> np.ndarray:
    """Return the actions with the number of warps in barriers of a whole CTA, which the replay
    would count by SM."""
    found = action.copy()
    whole = np.isin(found[:, 0], _NAMED) & (found[:, 2] == 0)
    ranks = [rank for rank, _ in warps]
    found[whole, 2] = [ranks.count(int(named) // NAMED_BARRIERS) for named in found[whole, 1]]
    return found


def _moved(action: np.ndarray, copy: int, sizes: tuple[int, int, int]) -> np.ndarray:
    """Return a copy's actions. sizes: targets, mbarriers and SMs of one."""
    targets, barriers, sms = sizes
    found = action.copy()
    found[np.isin(found[:, 0], _SIGNALLING), 1:3] += copy * targets
    found[np.isin(found[:, 0], _OF_MBARRIER), 1] += copy * barriers
    found[np.isin(found[:, 0], _NAMED), 1] += copy * sms * NAMED_BARRIERS
    return found


class WholeLaunches(Collector):
    """Collects predictions with what a CTA of each holds of an SM: `launches`, in order."""

    def __init__(self, machine: str | Machine = "b200", draws: int = 8, seed: int = 0) -> None:
        super().__init__(machine, draws, seed)
        self.launches: list[Launch] = []

    def observe(self, config: LaunchConfig, report: Report) -> None:
        """Predict one launch. Raises ValueError and ReplayError as `predict`."""
        before = len(self.predictions)
        super().observe(config, report)
        cubin = config.cubin or assembled(config.ptx)
        for prediction in self.predictions[before:]:
            self.launches.append(Launch(prediction, Resources.of(cubin, config)))

    def options(self) -> Options:
        """Return the options of a launch that is to be predicted."""
        return Options(clusters=1, trace=True, observe=self.observe)
