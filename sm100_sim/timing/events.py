"""Which SASS instruction a PTX synchronisation or asynchronous instruction becomes.

One table serves both sides: an event of a simulated run (a `TraceEntry`) and a site in the SASS
have the same kind if the one can have been executed as the other. The correspondence was read off
cubins and the PTX they come from; ptxas gives no documentation of it.
"""

from __future__ import annotations

import re

from .sass import SassFunction, SassInstruction

#: (kind, PTX opcode as a regular expression, SASS opcode as a regular expression).
#: Kinds with no SASS opcode of their own leave no trace in the code or are part of another one.
_TABLE = (
    ("init", r"mbarrier\.init", r"SYNCS\.EXCH"),
    ("wait", r"mbarrier\.(try|test)_wait", r"SYNCS\.PHASECHK"),
    ("arrive", r"mbarrier\.(arrive|expect_tx|complete_tx)", r"SYNCS\.(ARRIVE|CCTL)"),
    ("cluster_arrive", r"barrier\.cluster\.arrive", r"UCGABAR_ARV"),
    ("cluster_wait", r"barrier\.cluster\.wait", r"UCGABAR_WAIT"),
    ("bar_sync", r"(bar|barrier)(\.cta)?\.sync", r"BAR\.SYNC"),
    ("bar_arrive", r"(bar|barrier)(\.cta)?\.arrive", r"BAR\.ARV"),
    ("bar_reduce", r"(bar|barrier)(\.cta)?\.red", r"BAR\.RED"),
    ("tmem_load", r"tcgen05\.ld", r"LDTM"),
    ("tmem_store", r"tcgen05\.st", r"STTM"),
    ("tmem_store_wait", r"tcgen05\.wait::st", r"FENCE\.VIEW\.ASYNC\.T"),
    ("mma", r"tcgen05\.mma", r"UTC[A-Z]*MMA"),
    ("commit", r"tcgen05\.commit", r"UTCBAR"),
    ("tmem_copy", r"tcgen05\.cp", r"UTCCP"),
    ("tmem_shift", r"tcgen05\.shift", r"UTCSHIFT"),
    ("tmem_alloc", r"tcgen05\.alloc", r"UTCATOMSWS(\.2CTA)?\.FIND_AND_SET"),
    ("tma_load", r"cp\.async\.bulk\.tensor\.\dd\.shared", r"UTMALDG"),
    ("tma_store", r"cp\.async\.bulk\.tensor\.\dd\.global", r"UTMASTG"),
    ("tma_reduce", r"cp\.reduce\.async\.bulk\.tensor", r"UTMAREDG"),
    ("tma_prefetch", r"cp\.async\.bulk\.prefetch\.tensor", r"UTMAPF"),
    ("bulk_load", r"cp\.async\.bulk\.shared", r"UBLKCP\.S"),
    ("bulk_store", r"cp\.async\.bulk\.global", r"UBLKCP\.G"),
    ("bulk_reduce", r"cp\.reduce\.async\.bulk\.(global|shared)", r"UBLKRED"),
    ("bulk_commit", r"cp\.async\.bulk\.commit_group", r"UTMACMDFLUSH"),
    ("copy", r"cp\.async\.(ca|cg)\.shared", r"LDGSTS"),
    ("copy_arrive", r"cp\.async\.mbarrier\.arrive", r"ARRIVES"),
    ("bulk_wait", r"cp\.async\.bulk\.wait_group", r"DEPBAR\.LE"),
    ("clc_try_cancel", r"clusterlaunchcontrol\.try_cancel", r"UGETNEXTWORKID"),
    ("setmaxnreg", r"setmaxnreg", r"USETMAXREG"),
    ("async_fence", r"fence\.proxy\.async", r"FENCE\.VIEW\.ASYNC\.S"),
    ("store_async", r"st\.async", r"STAS"),
    ("global_atomic", r"(atom|red)\.(?!async)\S*global", r"(ATOMG|REDG|RED\b)"),
    ("wgmma", r"wgmma\.mma_async", r"[HIQB]GMMA"),
    ("launch_dependents", r"griddepcontrol\.launch", r"PREEXIT"),
    ("wait_dependents", r"griddepcontrol\.wait", r"ACQBULK"),
)
_PTX = [(re.compile(ptx), kind) for kind, ptx, _ in _TABLE]
_SASS = [(re.compile(sass), kind) for kind, _, sass in _TABLE]

#: Kinds of which ptxas adds or drops some: a difference costs little in the matching.
SOFT = frozenset({"setmaxnreg", "async_fence", "tmem_alloc", "store_async", "global_atomic"})

_WIDTH = re.compile(r"\.x(\d+)\b")


def ptx_kind(opcode: str) -> str | None:
    """Kind of an executed PTX instruction; None if it leaves no site in the SASS."""
    for pattern, kind in _PTX:
        if pattern.match(opcode):
            # Two loads of different width are never the same site.
            if kind in ("tmem_load", "tmem_store"):
                return f"{kind}.{_WIDTH.search(opcode)[1]}"
            return kind
    return None


def sass_kind(instruction: SassInstruction) -> str | None:
    """Kind of a SASS instruction, None if it is no site of an event."""
    opcode = instruction.opcode
    for pattern, kind in _SASS:
        if pattern.match(opcode):
            if kind in ("tmem_load", "tmem_store"):
                width = _WIDTH.search(opcode)
                return f"{kind}.{width[1] if width else 1}"
            if kind == "bulk_wait" and not instruction.operands.startswith("SB0"):
                return None
            return kind
    return None


def is_soft(kind: str) -> bool:
    """Whether SASS and PTX may differ in how often this kind occurs."""
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
        if kind == "cluster_wait":
            after_cluster_wait = number + 6
        if kind == "bar_sync" and number <= after_cluster_wait and instruction.operands == "0x0":
            continue
        if kind == "wait" and function.instructions[number - 1].opcode == "NANOSLEEP.SYNCS":
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
        """Whether every way into this block comes from a failed try."""
        ways = predecessors.get(index, set()) - seen - {index}
        for before in ways:
            block = function.blocks[before]
            kinds = [places[n] for n in range(block.start, block.stop) if n in places]
            if kinds:
                guard = function.instructions[block.stop - 1].guard
                # The branch is taken on failure (@!P0) or on success (@P0).
                failed = (index != before + 1) if guard.startswith("!") else index == before + 1
                if kinds[-1] != "wait" or not guard or not failed:
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
