"""Program that the replay executes: the paths of a cluster's warps, and what their events mean.

From the entries of a simulated run (`TraceEntry`) and the paths found for them. Addresses of
mbarriers become indices; everything an event does is a row of integers (`Program`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.translate.kernel import CompiledKernel

from .machine_code.conflicts import Wavefronts, accesses_before, block_accesses
from .machine_code.events import ptx_kind, sites_of
from .machine_code.mixes import WITHOUT_EVENTS, mix_of_blocks, ptx_mixes, useful
from .machine_code.paths import Event, PathFinder, WarpPath
from .machine_code.resources import ACTIONS, Action, Instructions, instruction_arrays
from .machine_code.sass import SassFunction
from .tensor import MmaCost, mma_cost

SLOTS = 4
NAMED_BARRIERS = 16
#: Instructions from a fence to the arrival that it belongs to, at most.
_RELEASE_WITHIN = 12
#: Vector and bits of what st.async stores.
_STORED = re.compile(r"(?:\.v([24]))?\.[bsuf](32|64)$")


class Program(NamedTuple):
    """Arrays for the replay.

    numbers, event: int32, the paths of all warps one after the other: instruction number, row of
    `action` or -1. first, last: int32 (warps,), where each warp's path lies in them. sm: int32
    (warps,), the CTA of each warp. action: int64 (events, 5): `Action`, then what it needs.
    targets: int64 (n, 5): mbarrier, arrivals, bytes, whether in another CTA, and the CTA whose
    shared memory is written, of events that signal several. barriers: number of mbarriers.
    """

    numbers: np.ndarray
    event: np.ndarray
    first: np.ndarray
    last: np.ndarray
    sm: np.ndarray
    action: np.ndarray
    targets: np.ndarray
    barriers: int
    sms: int


@dataclass
class Compiled:
    """A program with what it was made from.

    warps: (CTA rank, warp) of each row. paths: by the same rows. entries: the trace entry of each
    row of `program.action`. mma: cost of each MMA event, by row.
    """

    function: SassFunction
    instructions: Instructions
    program: Program
    warps: list[tuple[int, int]]
    paths: list[WarpPath]
    entries: list[Any]
    mma: dict[int, MmaCost]
    barrier_names: list[int]

    @property
    def unmatched(self) -> int:
        """Events without a site in the SASS and sites without an event."""
        return sum(path.unmatched for path in self.paths)

    @property
    def ambiguous(self) -> int:
        """Choices of a way that neither events nor instruction mixes decide."""
        return sum(path.ambiguous for path in self.paths)

    @property
    def work(self) -> float:
        """Clocks of the tensor core of one CTA by the closed forms."""
        action, sms = self.program.action, self.program.sms
        return sum(c.compute * int(action[e, 4]) / sms for e, c in self.mma.items())

    def text_of(self, number: int) -> str:
        """An instruction, disassembled."""
        return self.function.instructions[number].text


def build(
    function: SassFunction,
    kernel: CompiledKernel,
    entries: Iterable[Any],
    cluster: tuple,
    shared_accesses: dict[int, tuple[int, int, int]] | None = None,
) -> Compiled:
    """The program of one cluster.

    kernel: the translated PTX. entries: those of one cluster of the grid. cluster: its dimensions,
    (x, y, z). shared_accesses: `Report.shared_accesses`; without it no access to shared memory has
    bank conflicts or lanes that read the same. Raises ValueError if a warp's events fit no path.
    """
    used = useful(kernel)
    finder, mixes = PathFinder(function), ptx_mixes(kernel, used)
    eventless = PathFinder(function, WITHOUT_EVENTS), ptx_mixes(kernel, used, WITHOUT_EVENTS)
    dead = {
        instruction.line
        for instruction, is_used in zip(kernel.instructions, used, strict=True)
        if not is_used
    }
    by_warp: dict[tuple[int, int], list[Any]] = {}
    for entry in entries:
        by_warp.setdefault((_rank(entry.ctaid, cluster), entry.warp), []).append(entry)
    builder = _Builder(function, sorted({rank for rank, _ in by_warp}))
    known: dict[tuple, WarpPath] = {}
    accesses = block_accesses(kernel, shared_accesses or {})
    wavefronts = Wavefronts(function, builder.instructions.wavefronts)
    for warp in sorted(by_warp):
        events, tail = _events(by_warp[warp], mixes, dead)
        key = tuple((event.entry.line, event.entry.blocks) for event in (*events, tail))
        if key not in known and events:
            known[key] = finder.find(events, tail)
        elif key not in known:
            known[key] = eventless[0].find(*_events(by_warp[warp], eventless[1], dead))
        path = known[key]
        builder.add(warp, path, events)
        before = accesses_before(by_warp[warp], accesses, [event.entry for event in events])
        wavefronts.add(path.numbers, path.event_of, before)
    builder.instructions = builder.instructions._replace(wavefronts=wavefronts.found())
    return builder.finish(builder.ranks[-1] + 1)


def _rank(ctaid: tuple[int, int, int], cluster: tuple[int, int, int]) -> int:
    x, y, z = (i % c for i, c in zip(ctaid, cluster, strict=True))
    return x + cluster[0] * (y + cluster[1] * z)


def _events(entries: Sequence[Any], mixes: np.ndarray, dead: set[int]) -> tuple[list[Event], Event]:
    """Return the events of a warp, those left out at whose line ptxas finds nothing of use, and
    what comes behind the last one up to the warp's exit."""
    events, mix = [], np.zeros(mixes.shape[1])
    runs: Counter = Counter()
    for entry in entries:
        mix = mix + mix_of_blocks(mixes, entry.blocks)
        # Entries that are no events, such as fences, may stand between the rounds of a loop.
        for block, count in entry.blocks:
            runs[block] += count
        kind = ptx_kind(entry.opcode)
        if kind is not None and entry.line not in dead:
            for _ in range(sites_of(entry.opcode)):
                events.append(Event(kind, entry, mix, max(runs.values(), default=1)))
                mix, runs = np.zeros(mixes.shape[1]), Counter()
    return events, Event("exit", entries[-1], mix, max(runs.values(), default=1))


def executed_fences(path: WarpPath, action: np.ndarray, function: SassFunction) -> list[int]:
    """Places in a path of fences beyond the CTA that the warp executes.

    ptxas puts them in front of an arrival or atomic operation that releases, under its predicate:
    the warp executes both or none. One under another predicate counts as executed.
    """
    found = []
    for place in np.flatnonzero(action[path.numbers] == Action.FENCE).tolist():
        guard = function.instructions[path.numbers[place]].guard
        executed = True
        for later in range(place + 1, min(place + _RELEASE_WITHIN, len(path.numbers))):
            number = path.numbers[later]
            if guard and action[number] == Action.ARRIVE:
                executed = path.event_of[later] >= 0 or function.instructions[number].guard != guard
                break
        if executed:
            found.append(place)
    return found


class _Builder:
    """Collects the warps of a cluster."""

    def __init__(self, function: SassFunction, ranks: list[int]) -> None:
        self.function = function
        self.ranks = ranks
        self.instructions = instruction_arrays(function)
        self.numbers: list[np.ndarray] = []
        self.event: list[np.ndarray] = []
        self.warps: list[tuple[int, int]] = []
        self.paths: list[WarpPath] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.targets: list[tuple[int, int, int, int, int]] = []
        self.entries: list[Any] = []
        self.mma: dict[int, MmaCost] = {}
        self.barriers: dict[int, int] = {}

    def add(self, warp: tuple[int, int], path: WarpPath, events: list[Event]) -> None:
        """One warp."""
        row_of = np.full(len(events) + 1, -1, np.int32)
        sites = np.full(len(events), -1)
        matched = path.event_of >= 0
        sites[path.event_of[matched]] = path.numbers[matched]
        for number, event in enumerate(events):
            action = ACTIONS.get(event.kind.split(".")[0], Action.NONE)
            if action == Action.NONE or sites[number] < 0:
                continue
            row_of[number] = len(self.rows)
            self.entries.append(event.entry)
            site = self.function.instructions[sites[number]]
            arguments = self._arguments(action, event.entry, warp[0], site)
            if action == Action.WAIT:
                # A try_wait outside a loop may have failed; a later one then waits for the phase.
                arguments = (*arguments[:2], bool(event.entry.operands[0]))
            a, b, c, d = (int(value) for value in (*arguments, 0, 0, 0, 0)[:4])
            self.rows.append((int(action), a, b, c, d))
        self.warps.append(warp)
        self.paths.append(path)
        rows = row_of[path.event_of]
        for place in executed_fences(path, self.instructions.action, self.function):
            later = path.event_of[place:]
            following = later[later >= 0]
            rows[place] = len(self.rows)
            nearest = following[0] if len(following) else -1
            self.entries.append(events[nearest].entry if events else None)
            is_system = ".SYS" in self.function.instructions[path.numbers[place]].opcode
            self.rows.append((int(Action.FENCE), int(is_system), 0, 0, 0))
        self.numbers.append(path.numbers)
        self.event.append(rows)

    def finish(self, sms: int) -> Compiled:
        """The program of the warps added."""
        lengths = np.array([len(numbers) for numbers in self.numbers], np.int32)
        last = lengths.cumsum().astype(np.int32)
        program = Program(
            np.concatenate(self.numbers).astype(np.int32),
            np.concatenate(self.event).astype(np.int32),
            (last - lengths).astype(np.int32),
            last,
            np.array([rank for rank, _ in self.warps], np.int32),
            np.array(self.rows, np.int64).reshape(-1, 5),
            np.array(self.targets or [(0, 0, 0, 0, 0)], np.int64),
            len(self.barriers),
            sms,
        )
        names = sorted(self.barriers, key=self.barriers.__getitem__)
        return Compiled(
            self.function, self.instructions, program, self.warps, self.paths, self.entries,
            self.mma, names,
        )  # fmt: skip

    # ------------------------------------------------------------ what an event does

    def _barrier(self, address: int) -> int:
        return self.barriers.setdefault(address, len(self.barriers))

    def _arguments(self, action: Action, entry: Any, rank: int, site: Any) -> tuple:
        operands = entry.operands
        if action == Action.INIT:
            return self._barrier(operands[0]), operands[1]
        if action == Action.WAIT:
            return self._barrier(operands[1]), _parity(entry)
        if action in (Action.ARRIVE, Action.COPY_ARRIVE):
            return self._arrivals(entry, rank, action == Action.COPY_ARRIVE)
        if action in (Action.BAR_SYNC, Action.BAR_ARRIVE):
            return self._named(entry, rank)
        if action in (Action.TMEM_LOAD, Action.TMEM_STORE):
            return (_tmem_registers(entry.opcode),)
        if action == Action.MMA:
            return self._mma(entry, site)
        if action in (Action.COMMIT, Action.TRY_CANCEL):
            return self._signals(entry, rank, action)
        if action == Action.STORE_ASYNC:
            return self._stores(entry, rank)
        if action == Action.TMA_LOAD:
            return self._load(entry, rank)
        if action == Action.TMA_STORE:
            return (entry.nbytes,)
        if action == Action.BULK_WAIT:
            return operands[0], ".read" in entry.opcode
        return ()

    def _arrivals(self, entry: Any, rank: int, copies: bool) -> tuple[int, int, bool]:
        begin = len(self.targets)
        operands = entry.operands
        # An arrival has a destination before the address, a bare expect_tx has none.
        arrives = ".arrive" in entry.opcode and not copies
        if ".expect_tx" in entry.opcode or ".complete_tx" in entry.opcode:
            arrivals = int(arrives)
            nbytes = operands[-1] * (-1 if ".complete_tx" in entry.opcode else 1)
        else:
            arrivals, nbytes = (operands[2] if len(operands) > 2 else 1), 0
        # Without .noinc the arrivals of copies are expected in addition to the barrier's own.
        pends = copies and ".noinc" not in entry.opcode
        counted = Counter(entry.addresses)
        if not counted:
            counted[operands[int(arrives)]] = entry.lanes.bit_count()
        for address, count in counted.items():
            remote = address >> 24 != rank
            target = self._barrier(address), arrivals * count, nbytes * count, remote, rank
            self.targets.append(target)
        return begin, len(self.targets), pends

    def _named(self, entry: Any, rank: int) -> tuple[int, int]:
        operands = entry.operands[1:] if ".red" in entry.opcode else entry.operands
        warps = -(-operands[1] // 32) if len(operands) > 1 and operands[1] else 0
        return rank * NAMED_BARRIERS + operands[0], warps

    def _mma(self, entry: Any, site: Any) -> tuple[int, int, int, int]:
        descriptor = entry.operands[3]
        group = 2 if "cta_group::2" in entry.opcode else 1
        m, n = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
        cost = mma_cost(m, n, group, site.operands.startswith("tmem"))
        self.mma[len(self.rows)] = cost
        return cost.compute, cost.operands, cost.latency, group

    def _signals(self, entry: Any, rank: int, action: Action) -> tuple[int, int]:
        begin = len(self.targets)
        address = entry.operands[1 if action == Action.TRY_CANCEL else 0]
        nbytes = 16 if action == Action.TRY_CANCEL else 0
        if "multicast::cluster::all" in entry.opcode:
            ranks = self.ranks
        elif "multicast" in entry.opcode:
            ranks = [bit for bit in range(16) if entry.operands[1] >> bit & 1]
        else:
            ranks = [address >> 24]
        for target in ranks:
            barrier = self._barrier(target << 24 | address & 0xFFFFFF)
            self.targets.append((barrier, 1 - bool(nbytes), nbytes, target != rank, target))
        return begin, len(self.targets)

    def _stores(self, entry: Any, rank: int) -> tuple[int, int]:
        """st.async: bytes of each lane on the mbarrier of the CTA that it stores to."""
        begin, (address, _, barrier) = len(self.targets), entry.operands
        vector, bits = _STORED.search(entry.opcode).groups()  # type: ignore[union-attr]
        nbytes = int(vector or 1) * int(bits) // 8
        for target in entry.addresses or (address,):
            owner = target >> 24
            signalled = self._barrier(owner << 24 | barrier & 0xFFFFFF)
            self.targets.append((signalled, 0, nbytes, owner != rank, owner))
        return begin, len(self.targets)

    def _load(self, entry: Any, rank: int) -> tuple[int, int, int]:
        begin = len(self.targets)
        operands = entry.operands
        address = operands[2] if "tensor" in entry.opcode else operands[3]
        if "multicast" in entry.opcode:
            ranks = [bit for bit in range(16) if operands[3] >> bit & 1]
        else:
            ranks = [operands[0] >> 24]
        nbytes = entry.nbytes // max(len(ranks), 1)
        for target in ranks:
            owner = address >> 24
            if "multicast" in entry.opcode:
                pair = "cta_group::2" in entry.opcode
                owner = (target & ~1 | owner & 1) if pair else target
            barrier = self._barrier(owner << 24 | address & 0xFFFFFF)
            self.targets.append((barrier, 0, nbytes, owner != rank, target))
        return begin, len(self.targets), nbytes


def _parity(entry: Any) -> int:
    """Parity waited for; a state as arrive returns it carries its phase from bit 20 on."""
    if ".parity" in entry.opcode:
        return entry.operands[2] & 1
    return entry.operands[2] >> 20 & 1


def _tmem_registers(opcode: str) -> int:
    """Registers that each thread has of what a site of a tcgen05.ld or st moves, a half of them for
    half of the threads: columns of 32 lanes."""
    shape, times = opcode.split(".x")[0].rsplit(".", 1)[-1], opcode.split(".x")[1]
    words = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    return max(words * int(times.split(".")[0]) // sites_of(opcode), 1)
