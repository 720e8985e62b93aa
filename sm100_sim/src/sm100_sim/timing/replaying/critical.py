"""The critical path of a replay: backwards from its end, always to what was waited for last.

Every clock of the run is put down to one thing: the tensor core at work, a warp that executes (by
the reason it did not issue sooner), or a latency between two of them (MMA completion, TMA, an
arrival, a barrier).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..machine_code.resources import Action
from ..program import Compiled
from .replay import Replay
from .state import REASONS

TENSOR_CORE, DRAIN, TMA, ARRIVAL, BARRIER, START = (
    "tensor core", "MMA completion latency", "TMA latency", "arrival latency", "barrier latency",
    "start",
)  # fmt: skip
_WAITS = (Action.WAIT, Action.BAR_SYNC, Action.CLUSTER_WAIT)


class CriticalPath:
    """Clocks of a replay by cause.

    clocks: Counter of (what, who, why) -> clocks; who: the warp's label where a warp executes,
    else ""; why: one of REASONS there. segments: (begin, end, what, who, why), last first.
    """

    def __init__(self, compiled: Compiled, replay: Replay, labels: dict[int, str]) -> None:
        """labels: row of a warp -> name of its role."""
        self._compiled, self._replay, self._labels = compiled, replay, labels
        self.segments: list[tuple[int, int, str, str, str]] = []
        program = compiled.program
        self._place = np.full(max(len(program.action), 1), -1, np.int64)
        held = program.event >= 0
        self._place[program.event[held]] = np.flatnonzero(held)
        self._warp = np.repeat(np.arange(len(program.sm)), program.last - program.first)
        order = sorted(compiled.mma, key=lambda event: replay.started[event])
        self._before = {
            (program.sm[self._warp[self._place[b]]], b): a
            for a, b in zip(order, order[1:])
            if program.sm[self._warp[self._place[a]]] == program.sm[self._warp[self._place[b]]]
        }
        self._walk()

    def between(self, begin: int, end: int) -> Counter:
        """Clocks by (what, who, why) of the part of the run from `begin` to `end`."""
        found: Counter = Counter()
        for low, high, *key in self.segments:
            shared = min(high, end) - max(low, begin)
            if shared > 0:
                found[tuple(key)] += shared
        return found

    # ------------------------------------------------------------ the walk

    def _note(self, begin: int, end: int, what: str, who: str = "", why: str = "") -> None:
        if end > begin:
            self.segments.append((int(begin), int(end), what, who, why))

    def _walk(self) -> None:
        issued, program = self._replay.issued, self._compiled.program
        place = int(np.argmax(issued))
        now = int(issued[place])
        while True:
            warp = self._warp[place]
            if place == program.first[warp]:
                self._note(0, now, START)
                return
            wait = self._released_by(place, now)
            if wait is None:
                why = REASONS[self._replay.reason[place]]
                previous = int(issued[place - 1])
                self._note(previous, now, "warp", self._labels[warp], why)
                place, now = place - 1, previous
                continue
            place, now = self._cross(wait, now)

    def _released_by(self, place: int, now: int) -> int | None:
        """The event of a wait that ended just before this instruction, if that held it up."""
        program, replay = self._compiled.program, self._replay
        before = int(replay.issued[place - 1])
        for earlier in range(place - 1, max(place - 24, program.first[self._warp[place]]) - 1, -1):
            event = program.event[earlier]
            if event < 0 or program.action[event, 0] not in _WAITS:
                continue
            if replay.cause[event] >= 0 and before < replay.done[event] <= now:
                return int(event)
        return None

    def _cross(self, wait: int, now: int) -> tuple[int, int]:
        """Go from the end of a wait to the instruction that released it; note what lies between."""
        replay, program = self._replay, self._compiled.program
        cause = int(replay.cause[wait])
        action = program.action[cause, 0]
        place = int(self._place[cause])
        issue = int(replay.issued[place])
        if action == Action.COMMIT:
            return self._through_tensor_core(cause, now)
        if action == Action.TMA_LOAD:
            self._note(issue, now, TMA)
        elif action == Action.ARRIVE:
            self._note(issue, now, ARRIVAL)
        else:
            self._note(issue, now, BARRIER)
        return place, issue

    def _through_tensor_core(self, commit: int, now: int) -> tuple[int, int]:
        """Go from a commit's signal back through the MMAs before it to the issue they waited
        for."""
        replay, program = self._replay, self._compiled.program
        mma = int(replay.cause[commit])
        place = int(self._place[commit])
        issue = int(replay.issued[place])
        if mma < 0 or replay.done[mma] < issue:
            self._note(issue, now, ARRIVAL)
            return place, issue
        sm = program.sm[self._warp[place]]
        first_end = int(replay.started[mma]) + self._compiled.mma[mma].interval
        self._note(first_end, now, DRAIN)
        now = first_end
        while True:
            start = int(replay.started[mma])
            self._note(start, now, TENSOR_CORE)
            place = int(self._place[mma])
            issue = int(replay.issued[place])
            before = self._before.get((sm, mma))
            free = 0 if before is None else int(replay.started[before])
            if before is None or issue >= free + self._compiled.mma[before].interval - 20:
                self._note(issue, start, DRAIN)
                return place, issue
            mma, now = before, start


def words(clocks: Counter, total: int, least: float = 0.01) -> list[str]:
    """The critical path as lines, largest share first; shares below `least` are summed up."""
    grouped: dict[str, Counter] = {}
    for (what, who, why), count in clocks.items():
        name = f"{who} execute" if what == "warp" else what
        grouped.setdefault(name, Counter())[why] += count
    lines, rest = [], 0
    for name, reasons in sorted(grouped.items(), key=lambda item: -sum(item[1].values())):
        count = sum(reasons.values())
        if count < least * total:
            rest += count
            continue
        line = f"{count:8.0f} clocks ({count / total:5.1%}) {name}"
        parts = [(n, why) for why, n in reasons.most_common() if why and n >= least * total]
        if parts:
            line += ": " + ", ".join(f"{why} {n:.0f}" for n, why in parts)
        lines.append(line)
    if rest:
        lines.append(f"{rest:8.0f} clocks ({rest / total:5.1%}) other")
    return lines


def labels_of(compiled: Compiled, ranks: Iterable[int] | None = None) -> dict[int, str]:
    """Row of a warp -> name of its role: the warps of a CTA that take the same path."""
    groups: dict[tuple, list[tuple[int, int]]] = {}
    for row, (rank, warp) in enumerate(compiled.warps):
        if ranks is None or rank in ranks:
            numbers = compiled.paths[row].numbers
            # Roles differ in where they spend their instructions, not in a few of them.
            hot = tuple(np.unique(numbers[numbers.size // 4 : -(numbers.size // 4) or None])[:4])
            groups.setdefault((rank, hot), []).append((row, warp))
    found: dict = {}
    for (rank, _), members in groups.items():
        warps = [warp for _, warp in members]
        span = f"{warps[0]}" if len(warps) == 1 else f"{warps[0]}-{warps[-1]}"
        name = f"CTA {rank} warp{'s' if len(warps) > 1 else ''} {span}"
        found |= {row: name for row, _ in members}
    return found
