"""Knowledge of warps, learned and published (`clocks`): native routines, with and without Python
between them."""

from __future__ import annotations

from sm100_sim.native.language import boolean, i32, native, ptr, u8, u32, u64
from sm100_sim.native.layout import Context

from ..clocks import AGENTS_OF_A_WARP, COPY, GENERIC, LOAD, MMA, WAIT
from .draining import agent_of
from .records import WarpRecord


@native
def learn(w: ptr[WarpRecord], told: ptr[i32]) -> None:
    """Take in what somebody published."""
    known = w.frontier
    for i in range(w.cluster.size):
        known[i] = told[i] if told[i] > known[i] else known[i]


@native
def publish(w: ptr[WarpRecord], target: ptr[i32]) -> None:
    """Publish what a warp knows."""
    known = w.frontier
    for i in range(w.cluster.size):
        target[i] = known[i] if known[i] > target[i] else target[i]


@native
def publish_fenced(w: ptr[WarpRecord], target: ptr[i32]) -> None:
    """Publish what the last fences covered, and what the warp has waited for."""
    known = w.published
    for i in range(w.cluster.size):
        target[i] = known[i] if known[i] > target[i] else target[i]
    for i in range(w.cluster.warps):
        entry = i * AGENTS_OF_A_WARP + WAIT
        if w.frontier[entry] > target[entry]:
            target[entry] = w.frontier[entry]


@native
def advance(w: ptr[WarpRecord]) -> None:
    """Later accesses are not covered by what has been published."""
    w.clock += 1
    w.frontier[agent_of(w, u32(0))] = w.clock


@native
def finish_loads(c: ptr[Context], w: ptr[WarpRecord], everything: boolean) -> None:
    """Loads are complete when waited for, or when their data have been used."""
    uses = ptr[u8](c.uses)
    while w.load_first < w.load_end:
        load = w.loads + w.load_first * 2
        if not everything and uses[u32(load[1])] == 0:
            break
        w.frontier[agent_of(w, u32(LOAD))] = load[0]
        w.load_first += 1
    if w.load_first == w.load_end:
        w.load_first = u32(0)
        w.load_end = u32(0)


@native
def tell(w: ptr[WarpRecord], entry: u64) -> None:
    """A later relaxed arrive publishes what the warp knows of an agent."""
    if w.frontier[entry] > w.published[entry]:
        w.published[entry] = w.frontier[entry]


@native
def fence_tensor(w: ptr[WarpRecord]) -> None:
    """tcgen05.fence::before_thread_sync: a later relaxed arrive publishes accesses to tensor memory
    before it."""
    for i in range(w.cluster.warps):
        for which in range(LOAD, MMA + 1):
            tell(w, i * AGENTS_OF_A_WARP + which)


@native
def fence_proxy(w: ptr[WarpRecord]) -> None:
    """fence.proxy.async: generic accesses known here become visible to asynchronous agents."""
    for i in range(w.cluster.warps):
        w.frontier[w.cluster.agents + i] = w.frontier[i * AGENTS_OF_A_WARP]
    w.unfenced = u32(0)
    advance(w)


@native
def fence_shared(w: ptr[WarpRecord]) -> None:
    """fence.release.sync_restrict::shared::cta: a later relaxed arrive publishes accesses to shared
    memory before it.

    Of agents whose accesses are, or may be, to shared memory: generic ones, cp.async, copies that
    signal an mbarrier, wgmmas; and what asynchronous agents may see. Generic accesses have one
    clock, whatever memory they are to, so global ones count, too.
    """
    for i in range(w.cluster.warps):
        tell(w, i * AGENTS_OF_A_WARP + GENERIC)
        tell(w, i * AGENTS_OF_A_WARP + COPY)
        if w.cluster.products:
            tell(w, i * AGENTS_OF_A_WARP + MMA)
    for entry in range(w.cluster.warps * AGENTS_OF_A_WARP, w.cluster.agents + w.cluster.warps):
        tell(w, entry)
    advance(w)
