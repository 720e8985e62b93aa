"""The replay's port of shared memory: who reads and writes when.

One port a CTA. Accesses of warps and operand reads of MMAs take it in the order in which they
come. What TMA moves waits for clocks that these leave: a tensor core at work is never held up by
bytes that arrive for a later product, so that a faster link to L2 makes no kernel slower.
"""

from __future__ import annotations

from .signals import compiled as _compiled
from .signals import signal as _signal

#: Completions that may wait for the port of a CTA.
WAITING = 4096
# Columns of Model.port: the clock from which it is free, clocks used, clocks of TMA's accesses that
# came and that are done, the row of Model.waiting of the first that waits and of the next to come.
FREE, USED, _CAME, _DONE, _FIRST, _NEXT, PORT_COLUMNS = range(7)
# Columns of Model.waiting: value of `_DONE` from which it may signal, mbarrier, bytes, event.
_FROM, _BARRIER, _BYTES, _EVENT, WAITING_COLUMNS = range(5)
_FAR = 1 << 60


@_compiled
def access(m, sm, now, work):
    """`work` clocks for a warp or an MMA; returns when a batch queued now is through."""
    settle(m, sm, now)
    port = m.port[sm]
    port[USED] += work
    port[FREE] = max(port[FREE], now) + work
    return port[FREE]


@_compiled
def settle(m, sm, now):
    """Give TMA the clocks up to `now` that nobody else has taken; signal what is through."""
    port = m.port[sm]
    left = port[_CAME] - port[_DONE]
    if left and port[FREE] < now:
        given = min(left, now - port[FREE])
        port[_DONE] += given
        port[FREE] += given
    while port[_FIRST] < port[_NEXT]:
        piece = m.waiting[sm, port[_FIRST] % WAITING]
        if piece[_FROM] > port[_DONE]:
            return
        port[_FIRST] += 1
        _signal(m, now, piece[_BARRIER], 0, piece[_BYTES], piece[_EVENT], -1)


@_compiled
def move(m, sm, now, work, barrier, nbytes, event):
    """A piece that TMA moves, of `work` clocks, and whose last ones signal an mbarrier (-1: none).
    True if nothing has to go before it, and it signals at once; else `settle` does when it may."""
    settle(m, sm, now)
    port = m.port[sm]
    at_once = port[_CAME] == port[_DONE]
    if at_once:
        port[FREE] = max(port[FREE], now)
    port[USED] += work
    if barrier >= 0 and not at_once:
        last = m.waiting[sm, port[_NEXT] % WAITING]
        port[_NEXT] += 1
        last[_FROM], last[_BARRIER], last[_BYTES] = port[_CAME], barrier, nbytes
        last[_EVENT] = event
    port[_CAME] += work
    return at_once


@_compiled
def following(m, sm, now):
    """When the first completion that waits can be signalled; far off if none does."""
    port = m.port[sm]
    if port[_FIRST] == port[_NEXT]:
        return _FAR
    return max(port[FREE] + m.waiting[sm, port[_FIRST] % WAITING, _FROM] - port[_DONE], now + 1)
