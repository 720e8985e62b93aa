"""The observer that keeps a trace, and how each access to shared memory uses its port."""

from __future__ import annotations

from typing import Any

import numpy as np

from sm100_sim.isa.table import row_of
from sm100_sim.run.observer import Executor, Observer
from sm100_sim.translate.access_log import AccessLog
from sm100_sim.translate.blocks import tensor_loads

from .records import Trace

BANKS, BANK_BYTES = 32, 4
#: Executions of one instruction that are looked at; all others are taken to be like these.
_SAMPLES = 1024


def wavefronts(addresses: np.ndarray, masks: np.ndarray, width: int) -> np.ndarray:
    """int64 (n,): clocks of the shared-memory port that each access of a warp takes.

    addresses: uint64 (n, 32), by lane, right up to a common offset. masks: uint32 (n,), lanes that
    take part, none of them 0. width: bytes per lane.

    Every clock each of the 32 banks gives or takes one word of 4 bytes, and a word goes to all
    lanes that want it: lanes that go together take as many clocks as one bank has different words
    to move. All lanes go together with up to 4 bytes each; half a warp with 8, a quarter with 16;
    two of these go together if every lane has the address of its neighbour, or of the one after
    that. So an H200 was measured to do (lab/micro/hopper_measured.json, "shared loads").
    """
    active = (masks[:, None] >> np.arange(32, dtype=np.uint32)) & 1 == 1
    if width <= BANK_BYTES:
        return _words_of_a_bank(addresses, active, width)
    lanes = 32 * BANK_BYTES // width
    parts = [_words_of_a_bank(addresses[:, i : i + lanes], active[:, i : i + lanes], width)
             for i in range(0, 32, lanes)]  # fmt: skip
    clocks = np.zeros(len(addresses), np.int64)
    for first in range(0, len(parts), 2):
        both = slice(first * lanes, (first + 2) * lanes)
        address, taking = addresses[:, both], active[:, both]
        together = _words_of_a_bank(address, taking, width)
        apart = parts[first] + parts[first + 1]
        clocks += np.where(_neighbours_share(address, taking), together, apart)
    return np.maximum(clocks, 1)


def _words_of_a_bank(addresses: np.ndarray, active: np.ndarray, width: int) -> np.ndarray:
    """int64 (n,): most different words that one bank has to move for the active lanes."""
    # A lane that takes no part reads what the first that does reads: no additional word.
    first = addresses[np.arange(len(addresses)), active.argmax(axis=1)]
    words = np.where(active, addresses, first[:, None]).astype(np.int64) // BANK_BYTES
    words = words[:, :, None] + np.arange(max(width // BANK_BYTES, 1))
    words = np.sort(words.reshape(len(addresses), -1), axis=1)
    is_new = np.ones(words.shape, bool)
    is_new[:, 1:] = words[:, 1:] != words[:, :-1]
    bank = np.arange(len(addresses))[:, None] * BANKS + words % BANKS
    moved = np.bincount(bank[is_new], minlength=len(addresses) * BANKS)
    return np.where(active.any(axis=1), moved.reshape(-1, BANKS).max(axis=1), 0)


def _neighbours_share(addresses: np.ndarray, active: np.ndarray) -> np.ndarray:
    """bool (n,): whether active lanes i and i ^ 1, or all i and i ^ 2, have one address."""
    lanes, found = np.arange(addresses.shape[1]), np.zeros(len(addresses), bool)
    for apart in (1, 2):
        other = lanes ^ apart
        same = (addresses == addresses[:, other]) | ~active | ~active[:, other]
        found |= same.all(axis=1)
    return found


def _is_shared(instruction: Any) -> bool:
    """Return True if an instruction's lanes are known to access shared memory."""
    return row_of(instruction).access.is_shared(instruction.modifiers)


class Tracer(Observer):
    """Keeps a trace; the kernel was translated with sanitize=True, so that its native code logs
    accesses to memory.

    trace: what is filled. ports: whether accesses to shared memory are looked at, which takes the
    log of the launch.
    """

    def __init__(self, trace: Trace, ports: bool = True) -> None:
        self.trace = trace
        self._ports = ports
        self._log = AccessLog(self._drain)
        self._machine: Any = None

    def attach(self, machine: Any) -> None:
        self._machine = machine
        instructions = machine.compiled.instructions
        self._is_shared = np.array([_is_shared(i) for i in instructions], bool)
        # Native code also notes here which tensor-memory loads are used; nobody reads it.
        loads = len(tensor_loads(instructions))
        self._uses = np.zeros(max(loads, 1), np.uint8)

    def around(self, executors: list[Executor | None]) -> list[Executor | None]:
        return self.trace.wrapped(self._machine.compiled.instructions, executors)

    def warp_leaves(self, warp: Any) -> None:
        self.trace.account(warp)

    def warp_exits(self, warp: Any) -> None:
        self.trace.exits(warp)

    def run_ends(self) -> None:
        self._drain()

    def cluster_begins(self, cluster: Any) -> None:
        if not self._ports:
            return
        for warp in cluster.warps:
            warp.context.log = self._log.address
            warp.context.uses = self._uses.__array_interface__["data"][0]

    def _drain(self) -> None:
        """Count what is in the log, up to about `_SAMPLES` executions of an instruction."""
        records, found = self._log.records(), self.trace.shared_accesses
        index = records["tag"] >> 1
        taken = self._is_shared[index] & (records["mask"] != 0)
        for number in np.unique(index[taken]).tolist():
            _, executions, clocks = found.get(number, (0, 0, 0))
            if executions >= _SAMPLES:
                continue
            chosen = records[taken & (index == number)]
            width = int(chosen["width"][0])
            clocks += int(wavefronts(chosen["addresses"], chosen["mask"], width).sum())
            found[number] = width, executions + len(chosen), clocks
