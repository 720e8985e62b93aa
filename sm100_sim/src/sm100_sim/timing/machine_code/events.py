"""Correspondence of PTX synchronisation and asynchronous instructions to SASS.

An event of a simulated run (a `TraceEntry`) and a site in the SASS have the same kind if the one
can have been executed as the other. The kind of a PTX instruction stands in its row of the
instruction table, that of a SASS instruction here. The correspondence was read off cubins and the
PTX they come from; ptxas gives no documentation of it.
"""

from __future__ import annotations

import re

from sm100_sim.isa import load_table
from sm100_sim.isa.columns import Event, require_complete
from sm100_sim.isa.table import lookup

from .sass import SassFunction, SassInstruction

#: SASS opcode (a regular expression) of each event; the first that matches decides.
_SASS_OF = {
    Event.INIT: r"SYNCS\.EXCH",
    Event.WAIT: r"SYNCS\.PHASECHK",
    Event.ARRIVE: r"SYNCS\.(ARRIVE|CCTL)",
    Event.CLUSTER_ARRIVE: r"UCGABAR_ARV",
    Event.CLUSTER_WAIT: r"UCGABAR_WAIT",
    Event.BAR_SYNC: r"BAR\.SYNC",
    Event.BAR_ARRIVE: r"BAR\.ARV",
    Event.BAR_REDUCE: r"BAR\.RED",
    Event.TMEM_LOAD: r"LDTM",
    Event.TMEM_STORE: r"STTM",
    Event.TMEM_STORE_WAIT: r"FENCE\.VIEW\.ASYNC\.T",
    Event.MMA: r"UTC[A-Z]*MMA",
    Event.COMMIT: r"UTCBAR",
    Event.TMEM_COPY: r"UTCCP",
    Event.TMEM_SHIFT: r"UTCSHIFT",
    Event.TMEM_ALLOC: r"UTCATOMSWS(\.2CTA)?\.FIND_AND_SET",
    Event.TMA_LOAD: r"UTMALDG",
    Event.TMA_STORE: r"UTMASTG",
    Event.TMA_REDUCE: r"UTMAREDG",
    Event.TMA_PREFETCH: r"UTMAPF",
    Event.BULK_LOAD: r"UBLKCP\.S",
    Event.BULK_STORE: r"UBLKCP\.G",
    Event.BULK_REDUCE: r"UBLKRED",
    Event.BULK_COMMIT: r"UTMACMDFLUSH",
    Event.COPY: r"LDGSTS",
    Event.COPY_ARRIVE: r"ARRIVES",
    Event.BULK_WAIT: r"DEPBAR\.LE",
    Event.CLC_TRY_CANCEL: r"UGETNEXTWORKID",
    Event.SETMAXNREG: r"USETMAXREG",
    Event.ASYNC_FENCE: r"FENCE\.VIEW\.ASYNC\.S",
    Event.STORE_ASYNC: r"STAS",
    Event.GLOBAL_ATOMIC: r"(ATOMG|REDG|RED\b)",
    Event.LAUNCH_DEPENDENTS: r"PREEXIT",
    Event.WAIT_DEPENDENTS: r"ACQBULK",
    # A commit is a part of the last product before it.
    Event.WARPGROUP_MMA: r"[HIQB]GMMA",
    Event.WARPGROUP_FENCE: r"WARPGROUP\.ARRIVE",
    Event.WARPGROUP_WAIT: r"WARPGROUP\.DEPBAR",
}
_SASS = [(re.compile(sass), str(kind)) for kind, sass in _SASS_OF.items()]

#: Kinds that ptxas adds or drops some of: a difference costs little in the matching.
SOFT = frozenset({Event.SETMAXNREG, Event.ASYNC_FENCE, Event.TMEM_ALLOC, Event.STORE_ASYNC,
                  Event.GLOBAL_ATOMIC, Event.WARPGROUP_FENCE, Event.WARPGROUP_WAIT})  # fmt: skip

_BY_WIDTH = frozenset({Event.TMEM_LOAD, Event.TMEM_STORE})
_WIDTH = re.compile(r"\.x(\d+)\b")

load_table()
require_complete("timing.events", Event, _SASS_OF, without=(Event.NONE,))


def ptx_kind(opcode: str) -> str | None:
    """Kind of an executed PTX instruction; None if it leaves no site in the SASS."""
    found = lookup(opcode)
    if found is None:
        raise ValueError(f"{opcode}: not an opcode of the instruction table")
    event = found[0].event_with(found[1])
    return _with_width(event, opcode) or None


def sites_of(opcode: str) -> int:
    """Return the number of sites of an event's PTX instruction. ptxas makes two of tcgen05.ld and
    tcgen05.st of the shape 16x32bx2, one for each half of the threads."""
    return 2 if ".16x32bx2." in opcode else 1


def sass_kind(instruction: SassInstruction) -> str | None:
    """Kind of a SASS instruction, None if it is no site of an event."""
    opcode = instruction.opcode
    for pattern, kind in _SASS:
        if pattern.match(opcode):
            if kind == Event.BULK_WAIT and not instruction.operands.startswith("SB0"):
                return None
            return _with_width(kind, opcode)
    return None


def _with_width(kind: str, opcode: str) -> str:
    """The kind of a site; two loads of tensor memory of different width are never the same."""
    if kind not in _BY_WIDTH:
        return str(kind)
    width = _WIDTH.search(opcode)
    return f"{kind}.{width[1] if width else 1}"


def is_soft(kind: str) -> bool:
    """Return True if SASS and PTX may differ in how often this kind occurs."""
    return kind in SOFT


def sites(function: SassFunction) -> dict[int, str]:
    """Instruction number -> kind, for every site of a function that an event can stand at.

    Two have no PTX instruction of their own: the barrier over the CTA that ptxas puts behind
    barrier.cluster.wait, and the second look at an mbarrier after a pause.
    """
    found: dict[int, str] = {}
    after_cluster_wait = 0
    for number, instruction in enumerate(function.instructions):
        kind = sass_kind(instruction)
        if kind == Event.CLUSTER_WAIT:
            after_cluster_wait = number + 6
        behind = number <= after_cluster_wait and instruction.operands == "0x0"
        if kind == Event.BAR_SYNC and behind:
            continue
        if kind == Event.WAIT and function.instructions[number - 1].opcode == "NANOSLEEP.SYNCS":
            continue
        if kind is not None:
            found[number] = kind
    return found


def retries(function: SassFunction, places: dict[int, str]) -> set[int]:
    """Blocks in which an mbarrier wait whose first try has failed is tried again, with pauses.

    A wait of the PTX is recorded once, when it is through, and the replay lets the first try
    block; so paths never enter these. ptxas usually moves them out of line behind a first try.
    """
    predecessors: dict[int, set[int]] = {}
    for block in function.blocks:
        for successor in block.successors:
            predecessors.setdefault(successor, set()).add(block.index)

    def tried_before(index: int, seen: frozenset[int]) -> bool:
        """Return True if every way into this block comes from a failed try."""
        ways = predecessors.get(index, set()) - seen - {index}
        for before in ways:
            block = function.blocks[before]
            kinds = [places[n] for n in range(block.start, block.stop) if n in places]
            if kinds:
                guard = function.instructions[block.stop - 1].guard
                # The branch is taken on failure (@!P0) or on success (@P0).
                failed = (index != before + 1) if guard.startswith("!") else index == before + 1
                if kinds[-1] != Event.WAIT or not guard or not failed:
                    return False
            elif len(block.successors) > 1 or not tried_before(before, seen | {index}):
                return False
        return bool(ways)

    found = set()
    for block in function.blocks:
        numbers = range(block.start, block.stop)
        naps = any(function.instructions[n].opcode == "NANOSLEEP.SYNCS" for n in numbers)
        if naps and tried_before(block.index, frozenset()):
            found.add(block.index)
    return found
