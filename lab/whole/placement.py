"""The discrete-event run behind `problem.schedule`: tiles over places, and their own bytes.

A place is where a cluster runs. Bytes that tiles read and write themselves are flows that share
HBM, and none gets more than an SM's interface to L2 takes. Shares are not equal: some places lie
better than others, so that clusters which begin their tiles together fall apart within some tiles,
as they do on a GPU. What a tile's replay has of its reading, its bytes at the interface's rate, is
no delay; a delay is what a flow takes longer than that, because others read at the same time.

All of a run's state is in arrays that are made outside, so that numba compiles it without counting
references; without numba the same functions run in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Entries of Tables.rule: what a cluster costs once and again, rates in bytes per clock, the policy,
# how far the shares of places lie apart, tiles claimed ahead, clocks of a claim, clocks before the
# end of a tile at which the next is claimed (infinite: at its start).
(BEGIN, REUSE, LINK, MEMORY, STATIC, SINGLE, PREFETCHES, UNEVEN, CLAIMS, QUERY, LEAD,
 RULES) = range(12)  # fmt: skip
#: Tiles that a place may have claimed ahead.
MOST_CLAIMS = 2
# Columns of Tables.place: UNDER_WAY claims are still to be made, VOID ones were made before their
# time, CLAIMED tiles stand behind FIRST_CLAIM in order. Stages: free for its next tile, or about
# to start it.
(STAGE, TILE, NEXT, USED, FRESH, START, DUE, FLOW, AWAITED, UNDER_WAY, VOID, CLAIMED,
 FIRST_CLAIM) = range(13)  # fmt: skip
COLUMNS = FIRST_CLAIM + MOST_CLAIMS
_FREE, _STARTING = 0.0, 1.0
# States of the flow that a place has requested: none, on its way, there.
_NONE, _ASKED, _THERE = 0.0, 1.0, 2.0
# Entries of Tables.counts: entries of both heaps, tiles that are given away.
PLACES, FLOWS, GIVEN, COUNTS = range(4)
# Entries of Tables.server: its clock, bytes that a flow of weight 1 which was always there would
# have got, weight of the flows that are there.
NOW, SERVED, WEIGHT, SERVER = range(4)
#: Places one behind another get weights far apart: multiples of the golden section, modulo 1.
_GOLDEN = 0.6180339887498949
#: Clocks that are nothing but the rounding of sums.
_ROUNDING = 1e-6


class Tables(NamedTuple):
    """Tables that `run` reads and fills; float64 unless noted.

    clocks, reads, writes: of each tile, without waiting; skips: int64, whether it is passed over.
    rule: see above. free, free_place: a heap of clocks and int64 places, those of claims behind
    those of tiles. flow, flow_place: likewise of flows by when they end, in bytes served; -1 -
    place where that does not wait for it. place: (places, COLUMNS). starts, ends, cluster_of
    (int64): of each tile. busy: of each place. counts: int64. server: (SERVER,).
    """

    clocks: np.ndarray
    reads: np.ndarray
    writes: np.ndarray
    skips: np.ndarray
    rule: np.ndarray
    free: np.ndarray
    free_place: np.ndarray
    flow: np.ndarray
    flow_place: np.ndarray
    place: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    cluster_of: np.ndarray
    busy: np.ndarray
    counts: np.ndarray
    server: np.ndarray


def _plain(function: Callable) -> Callable:
    return function


try:
    import numba
except ImportError:  # The simulator's timing extra is not installed.
    _compiled = _plain
else:
    _compiled = numba.njit(cache=True, _nrt=False)


@_compiled
def _push(keys, ties, here, key, tie):
    keys[here], ties[here] = key, tie
    while here > 0:
        above = (here - 1) // 2
        if keys[above] < keys[here] or (keys[above] == keys[here] and ties[above] <= ties[here]):
            return
        keys[above], keys[here] = keys[here], keys[above]
        ties[above], ties[here] = ties[here], ties[above]
        here = above


@_compiled
def _drop(keys, ties, size):
    """Remove the first entry of a heap, which keeps `size` of them."""
    keys[0], ties[0] = keys[size], ties[size]
    here = 0
    while True:
        least = here
        for below in (2 * here + 1, 2 * here + 2):
            if below < size and (
                keys[below] < keys[least]
                or (keys[below] == keys[least] and ties[below] < ties[least])
            ):
                least = below
        if least == here:
            return
        keys[least], keys[here] = keys[here], keys[least]
        ties[least], ties[here] = ties[here], ties[least]
        here = least


@_compiled
def _later(t, clock, place):
    """Look at a place again at that clock."""
    _push(t.free, t.free_place, t.counts[PLACES], clock, place)
    t.counts[PLACES] += 1


@_compiled
def _weight(t, place):
    """Return the weight of a place's flows, from 1 - UNEVEN to 1 + UNEVEN."""
    return 1.0 + t.rule[UNEVEN] * (2.0 * ((place + 1) * _GOLDEN % 1.0) - 1.0)


@_compiled
def _flow_rate(t):
    """Bytes a clock that a flow of weight 1 gets."""
    return min(t.rule[LINK], t.rule[MEMORY] / t.server[WEIGHT])


@_compiled
def _advance(t, clock):
    if t.counts[FLOWS]:
        t.server[SERVED] += (clock - t.server[NOW]) * _flow_rate(t)
    else:
        t.server[SERVED] = t.server[WEIGHT] = 0.0
    t.server[NOW] = clock


@_compiled
def _ask(t, nbytes, place, awaited):
    """A flow of so many bytes begins now. awaited: whether its place will wait for its end."""
    weight = _weight(t, place)
    who = place if awaited else -1 - place
    _push(t.flow, t.flow_place, t.counts[FLOWS], t.server[SERVED] + nbytes / weight, who)
    t.counts[FLOWS] += 1
    t.server[WEIGHT] += weight


@_compiled
def _next_tile(t, place, given):
    """The tile behind a place's current one, and whether there is one. given: take it away from
    the others, too."""
    row = t.place[place]
    if row[CLAIMED]:
        following = int(row[FIRST_CLAIM])
        if given:
            row[CLAIMED] -= 1
            for n in range(MOST_CLAIMS - 1):
                row[FIRST_CLAIM + n] = row[FIRST_CLAIM + n + 1]
            row[FRESH] = 1.0 - row[USED]
        return following
    if t.rule[STATIC]:
        following = int(row[NEXT])
        if given:
            row[NEXT] = following + len(t.place)
        return following
    following = t.counts[GIVEN]
    if given:
        t.counts[GIVEN] += 1
        row[FRESH] = 1.0 - row[USED]
        if row[UNDER_WAY] > row[VOID]:
            # A claim that is under way brings this tile.
            row[VOID] += 1
    return following


@_compiled
def _ask_for_claims(t, place, number):
    """A place requests so many tiles more, one after the other, now and behind those that begin
    now."""
    for n in range(number):
        t.place[place, UNDER_WAY] += 1
        _later(t, t.server[NOW] + n * t.rule[QUERY], place + len(t.place))


@_compiled
def _claim(t, place):
    row = t.place[place]
    row[UNDER_WAY] -= 1
    if row[VOID]:
        row[VOID] -= 1
    elif t.counts[GIVEN] < len(t.clocks):
        row[int(FIRST_CLAIM + row[CLAIMED])] = t.counts[GIVEN]
        row[CLAIMED] += 1
        t.counts[GIVEN] += 1
        if t.rule[LEAD] < math.inf:
            _prefetch(t, place)


@_compiled
def _prefetch(t, place):
    """A place at work loads the operands of its next tile, if it may and there is one."""
    if t.rule[PREFETCHES]:
        following = _next_tile(t, place, False)
        if following < len(t.clocks) and t.reads[following]:
            _ask(t, t.reads[following], place, True)
            t.place[place, FLOW] = _ASKED


@_compiled
def _work(t, place):
    """The tile of a place has its operands: it runs to its end."""
    row, now = t.place[place], t.server[NOW]
    tile = int(row[TILE])
    hidden = 0.0
    if row[FLOW] != _THERE:
        hidden = t.reads[tile] / _weight(t, place) / t.rule[LINK]
    delay = now - row[START] - hidden
    if delay < _ROUNDING:
        delay = 0.0
    # Never before its operands are there, however little a cost says.
    clocks = max(now - row[START], row[DUE] + delay)
    t.starts[tile], t.ends[tile], t.cluster_of[tile] = row[START], row[START] + clocks, place
    t.busy[place] += clocks
    row[STAGE], row[FLOW], row[AWAITED] = _FREE, _NONE, 0.0
    _later(t, row[START] + clocks, place)
    if t.rule[LEAD] < math.inf:
        row[UNDER_WAY] += 1
        _later(t, max(now, row[START] + clocks - t.rule[LEAD]), place + len(t.place))
    else:
        _prefetch(t, place)


@_compiled
def _start(t, place):
    """A place starts its tile, now or when its operands are there."""
    row = t.place[place]
    tile = int(row[TILE])
    if row[FLOW] == _THERE or (row[FLOW] == _NONE and not t.reads[tile]):
        _work(t, place)
        return
    row[AWAITED] = 1.0
    if row[FLOW] == _NONE:
        _ask(t, t.reads[tile], place, True)


@_compiled
def _free(t, place):
    """A place has ended its tile, if it had one, and takes the next."""
    row, now = t.place[place], t.server[NOW]
    if row[TILE] >= 0 and t.writes[int(row[TILE])]:
        _ask(t, t.writes[int(row[TILE])], place, False)
    row[TILE] = -1.0
    tile = _next_tile(t, place, True)
    if tile >= len(t.clocks):
        return
    if t.rule[LEAD] == math.inf:
        missing = t.rule[CLAIMS] - row[CLAIMED] - (row[UNDER_WAY] - row[VOID])
        _ask_for_claims(t, place, int(missing))
    if t.skips[tile]:
        t.starts[tile], t.ends[tile], t.cluster_of[tile] = now, now + t.clocks[tile], place
        t.busy[place] += t.clocks[tile]
        _later(t, now + t.clocks[tile], place)
        return
    row[TILE], row[START], row[DUE] = tile, now, t.clocks[tile]
    # A cluster of its own, after another one or the first in its place.
    if row[USED] and (row[FRESH] or t.rule[SINGLE]):
        row[START] += t.rule[REUSE]
    if row[FRESH]:
        row[DUE] += t.rule[BEGIN]
    row[FRESH], row[USED] = 0.0, 1.0
    if row[START] > now:
        row[STAGE] = _STARTING
        _later(t, row[START], place)
        return
    _start(t, place)


@_compiled
def _arrived(t):
    """The first flow ends."""
    place = t.flow_place[0]
    t.counts[FLOWS] -= 1
    _drop(t.flow, t.flow_place, t.counts[FLOWS])
    t.server[WEIGHT] -= _weight(t, place if place >= 0 else -1 - place)
    if place < 0:
        return
    row = t.place[place]
    if row[FLOW] == _ASKED:
        row[FLOW] = _THERE
    if row[AWAITED]:
        _work(t, place)


@_compiled
def run(t):
    """Run all tiles. Ends when no place has one and nothing is on its way."""
    while t.counts[PLACES] or t.counts[FLOWS]:
        arrival = free = math.inf
        if t.counts[FLOWS]:
            left = max(0.0, t.flow[0] - t.server[SERVED])
            arrival = t.server[NOW] + left / _flow_rate(t)
        if t.counts[PLACES]:
            free = t.free[0]
        if arrival <= free:
            end = t.flow[0]
            _advance(t, arrival)
            # Free of the rounding of `arrival`: flows of one length end together.
            t.server[SERVED] = end
            _arrived(t)
            continue
        _advance(t, free)
        place = t.free_place[0]
        t.counts[PLACES] -= 1
        _drop(t.free, t.free_place, t.counts[PLACES])
        if place >= len(t.place):
            _claim(t, place - len(t.place))
        elif t.place[place, STAGE] == _STARTING:
            _start(t, place)
        else:
            _free(t, place)
