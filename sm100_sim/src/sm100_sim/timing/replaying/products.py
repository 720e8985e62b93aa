"""The replay's products of warpgroups (wgmma): an SM's tensor core takes them in turn.

A product begins when all four warps of its warpgroup have issued it, the one that was complete
first goes first, and products of one warpgroup stay in order. A warp runs ahead of the tensor core
by `AHEAD` products, no further. One that waits until at most so many of its groups are under way
goes on when the last product of the group before them is done.
"""

from __future__ import annotations

from . import shared_port
from .signals import compiled as _compiled

#: Products of an SM that may wait for its tensor core; groups of a warpgroup that are remembered.
WAITING, GROUPS = 1024, 64
#: Products of a warp that have not begun as soon as it goes on from issuing one. One warpgroup with
#: the products of a step of Hopper's dV takes 1,808 clocks per step and 2,100 with arithmetic
#: behind them; replays with 0, 1, 2 and any number give 1,968, 1,806, 1,716 and 1,716, and 2,258,
#: 2,125, 1,997 and 1,716 (docs/facts.md).
AHEAD = 1
# Columns of Model.crew: the warp's warpgroup, products and groups that it has issued.
WARPGROUP, _ISSUED, _GROUPS, CREW_COLUMNS = range(4)
# Columns of Model.warpgroup: warps that have issued the product with a number (a ring), groups that
# are done or will be at a time known, these times (a ring), products that have begun.
_CLOSED = WAITING
_STARTED = WAITING + 1 + GROUPS
WARPGROUP_COLUMNS = _STARTED + 1
# Columns of Model.lined_up: clock from which it may begin, event, warpgroup. Of Model.taken: how
# many have begun and have come, the clock from which the tensor core is free, clocks used.
_FROM, _EVENT, _WHOSE, LINED_UP_COLUMNS = range(4)
_BEGUN, _CAME, FREE, USED, TAKEN_COLUMNS = range(5)
#: Warps of a warpgroup.
WARPS = 4
_FAR = 1 << 60


@_compiled
def issue(m, warp, sm, now, event):
    """A warp's part of a product; with the fourth it is in line."""
    crew = m.crew[warp]
    whose, place = crew[WARPGROUP], crew[_ISSUED] % WAITING
    crew[_ISSUED] += 1
    crew[_GROUPS] += m.action[event, 3] > 0
    warpgroup = m.warpgroup[whose]
    warpgroup[place] += 1
    if warpgroup[place] < WARPS:
        return
    warpgroup[place] = 0
    line = m.taken[sm]
    last = m.lined_up[sm, line[_CAME] % WAITING]
    line[_CAME] += 1
    last[_FROM], last[_EVENT], last[_WHOSE] = now, event, whose


@_compiled
def following(m, sm):
    """Return when the first MMA in line can begin; far off if there is none."""
    line = m.taken[sm]
    if line[_BEGUN] == line[_CAME]:
        return _FAR
    return max(m.lined_up[sm, line[_BEGUN] % WAITING, _FROM], line[FREE])


@_compiled
def begin(m, sm, now):
    """Begin the first product in line, if it can up to `now`; whether it did.

    It takes its own clocks, or as long as the port of shared memory needs for its operands beside
    all other traffic.
    """
    start = following(m, sm)
    if start > now:
        return False
    line = m.taken[sm]
    first = m.lined_up[sm, line[_BEGUN] % WAITING]
    line[_BEGUN] += 1
    m.warpgroup[first[_WHOSE], _STARTED] += 1
    event = first[_EVENT]
    compute, operands, latency = m.action[event, 1], m.action[event, 2], m.action[event, 3]
    through = shared_port.access(m, sm, start, operands)
    line[FREE] = start + max(compute, through - start)
    line[USED] += compute
    m.event[event, 0], m.event[event, 1] = start, line[FREE] + latency
    if latency:
        warpgroup = m.warpgroup[first[_WHOSE]]
        warpgroup[_CLOSED + 1 + warpgroup[_CLOSED] % GROUPS] = line[FREE] + latency
        warpgroup[_CLOSED] += 1
    return True


@_compiled
def done(m, warp, pending):
    """Return when at most `pending` of the groups that a warp has issued are not done; far off as
    long as that is not known."""
    crew = m.crew[warp]
    warpgroup, asked = m.warpgroup[crew[WARPGROUP]], crew[_GROUPS] - pending
    if asked <= 0:
        return 0
    if warpgroup[_CLOSED] < asked:
        return _FAR
    return warpgroup[_CLOSED + 1 + (asked - 1) % GROUPS]


@_compiled
def is_ahead(m, warp):
    """Return True if more than `AHEAD` of the MMAs that a warp has issued have not begun."""
    crew = m.crew[warp]
    return crew[_ISSUED] - m.warpgroup[crew[WARPGROUP], _STARTED] > AHEAD
