"""The replay's port of shared memory: who reads and writes when.

One port a CTA. Accesses of warps and operand reads of MMAs take it in the order in which they come.
What TMA moves takes none of it: on an H200 loads of warps at 98 bytes per clock go on beside bulk
loads of 41 and bulk stores of 21, more together than the port has (docs/facts.md).
"""

from __future__ import annotations

from .signals import compiled as _compiled

# Columns of Model.port: the clock from which it is free, clocks used.
FREE, USED, PORT_COLUMNS = range(3)


@_compiled
def access(m, sm, now, work):
    """`work` clocks for a warp or an MMA; returns when a batch queued now is through."""
    port = m.port[sm]
    port[USED] += work
    port[FREE] = max(port[FREE], now) + work
    return port[FREE]
