"""Machine operations in native code with what the sanitizer records of them.

Each does as its twin in `hooks` and `sanitizer` do. Whatever would be a finding, and whatever is
rare, is left to Python before anything has changed.
"""

from __future__ import annotations

from sm100_sim.isa.columns import Rule
from sm100_sim.native.barriers import barrier_at, change, mbarrier_arrive, mbarrier_wait
from sm100_sim.native.copies import known_map, load_ranks, load_signal, tile_at
from sm100_sim.native.fragments import tensor_load, tensor_store
from sm100_sim.native.language import (
    Signature,
    boolean,
    cycles,
    fill,
    i32,
    i64,
    invoke,
    native,
    ptr,
    stack,
    u8,
    u32,
    u64,
)
from sm100_sim.native.layout import DIMENSIONS, Barrier, Context, Operation
from sm100_sim.native.operands import DONE, PYTHON, operand, shared_by_lanes
from sm100_sim.native.products import (
    CHAIN_IN_PYTHON,
    commit_ranks,
    continues,
    end_chain,
    tensor_commit,
    tensor_mma,
)
from sm100_sim.native.tiles import move_tile

from ..clocks import AGENTS_OF_A_WARP, LOAD, MMA, STORE, WAIT
from .draining import GRANULE_SHIFT, add_access, agent_of, drain
from .frontiers import (
    advance,
    fence_proxy,
    fence_shared,
    fence_tensor,
    finish_loads,
    learn,
    publish,
    publish_fenced,
)
from .records import (
    ARRIVE_KIND,
    IN_FLIGHT,
    LOAD_KIND,
    ROLES,
    STORE_KIND,
    TMA_KIND,
    AccessRow,
    BarrierRecord,
    OperationRecord,
    WarpRecord,
)
from .tracking import touch_rows, touch_run

#: Granules of a column of tensor memory, and lanes of one.
GRANULES, GRANULE_LANES = 8, 16
CALLBACK = Signature(None, (u64,))


@native
def flush(c: ptr[Context], w: ptr[WarpRecord]) -> boolean:
    """Record the MMAs of the open chain that are not recorded; False if Python has the chain."""
    if c.chain_length == CHAIN_IN_PYTHON:
        return False
    if c.chain_length > w.recorded:
        invoke(CALLBACK, w.cluster.record, u64(c))
    return True


@native
def begin(c: ptr[Context], o: ptr[Operation]) -> boolean:
    """`Sanitizer.begin`: False if Python must do the operation."""
    w = ptr[WarpRecord](c.watch)
    about = ptr[OperationRecord](o.watch)
    uses = ptr[u8](c.uses)
    for i in range(about.used_count):
        uses[about.used[i]] = u8(1)
    if w.joining != 0:
        if not flush(c, w):
            return False
        learn(w, ptr[i32](w.joining))
        w.joining = 0
    if not drain(c, w):
        return False
    finish_loads(c, w, False)
    return True


# mbarriers


@native
def visible(w: ptr[WarpRecord], b: ptr[BarrierRecord], remotely: boolean) -> boolean:
    """Return True if a warp may use an mbarrier (`Sanitizer.use_barrier`)."""
    if w.frontier[b.warp * AGENTS_OF_A_WARP] < b.clock:
        return False
    return b.fenced != 0 or not remotely


@native
def observed(w: ptr[WarpRecord], b: ptr[BarrierRecord]) -> boolean:
    """Return True if a warp knows of a wait for the phase before."""
    for i in range(w.cluster.warps):
        if b.observed[i] > 0 and w.frontier[i * AGENTS_OF_A_WARP + WAIT] >= b.observed[i]:
            return True
    return False


@native
def takes_role(w: ptr[WarpRecord], b: ptr[BarrierRecord], index: u32) -> boolean:
    """Note an instruction by which a warp arrives; False if there is no room."""
    for i in range(ROLES):
        place = b.roles + (w.number * ROLES + u32(i))
        if place[0] == -1:
            place[0] = i32(index)
        if place[0] == i32(index):
            return True
    return False


@native
def may_arrive(w: ptr[WarpRecord], record: ptr[Barrier], index: u32, remotely: boolean) -> boolean:
    """Return True if an arrive needs no word of Python's."""
    b = ptr[BarrierRecord](record.watch)
    if not b or not visible(w, b, remotely):
        return False
    if not takes_role(w, b, index):
        return False
    rank = record.address >> 24
    if w.met >> rank & 1 == 0:
        return False
    return record.phase == 0 or b.skipped != 0 or observed(w, b)


@native
def complete_phase(w: ptr[WarpRecord], record: ptr[Barrier]) -> None:
    """A phase has been completed: what its arrivals published can be learned."""
    b = ptr[BarrierRecord](record.watch)
    k = w.cluster
    if b.completed == 0:
        for i in range(k.warps):
            b.usual[i] = b.arrivals[i]
    else:
        for i in range(k.warps):
            if b.arrivals[i] != b.usual[i]:
                invoke(CALLBACK, k.unbalanced, u64(record))
                break
    for i in range(k.warps):
        b.arrivals[i] = 0
        b.observed[i] = 0
    b.signalled = u32(0)
    b.completed += 1
    published = b.gathering
    b.gathering = b.released
    b.released = published
    fill(ptr[u8](u64(b.gathering)), u8(0), k.size * 4)


@native
def visit(w: ptr[WarpRecord], rank: u32, agent: i32, access: u32) -> None:
    """Note an access that must be complete before a CTA exits."""
    w.cluster.ctas[rank].guests[u32(agent)] = i32(access)


@native
def watched_arrive(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """mbarrier.arrive."""
    w = ptr[WarpRecord](c.watch)
    about = ptr[OperationRecord](o.watch)
    if not begin(c, o) or not shared_by_lanes(c, lanes, o.operands[0]):
        return PYTHON
    address = operand(c, lanes, o.operands[0])
    record = barrier_at(c.cluster, address)
    if not record:
        return PYTHON
    rank = u32(address >> 24)
    foreign = rank != w.rank
    if foreign and about.narrow != 0 or not may_arrive(w, record, about.index, foreign):
        return PYTHON
    pending = record.pending
    phase = record.phase
    outcome = mbarrier_arrive(c, lanes, o)
    if outcome != DONE:
        return outcome
    b = ptr[BarrierRecord](record.watch)
    if about.relaxed == 0:
        publish(w, b.gathering)
    else:
        publish_fenced(w, b.gathering)
    if foreign:
        w.unfenced = u32(1)
        agent = i32(agent_of(w, u32(0)))
        access = add_access(w, agent, w.clock, u32(ARRIVE_KIND), u32(1), about.index, u32(0))
        visit(w, rank, agent, access)
    b.arrivals[w.number] += i32(pending if record.phase != phase else pending - record.pending)
    if record.phase != phase:
        complete_phase(w, record)
    advance(w)
    return DONE


@native
def watched_wait(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """mbarrier.try_wait and test_wait."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o) or not shared_by_lanes(c, lanes, o.operands[0]):
        return PYTHON
    record = barrier_at(c.cluster, operand(c, lanes, o.operands[0]))
    if not record:
        return PYTHON
    b = ptr[BarrierRecord](record.watch)
    phase = i32(record.phase) - 1
    if not b or not visible(w, b, False) or c.chain_length == CHAIN_IN_PYTHON:
        return PYTHON
    overtaken = phase - b.last_waits[w.number]
    if overtaken >= 3 and overtaken & 1 == 1:
        return PYTHON
    outcome = mbarrier_wait(c, lanes, o)
    if outcome != DONE:
        return outcome
    flush(c, w)
    if b.completed != 0:
        learn(w, b.released)
    entry = agent_of(w, u32(WAIT))
    w.frontier[entry] += 1
    b.observed[w.number] = w.frontier[entry]
    b.last_waits[w.number] = phase
    return DONE


# Tensor memory


@native
def touch_fragment(
    w: ptr[WarpRecord], o: ptr[Operation], address: u64, frontier: ptr[i32], access: u32, write: u32
) -> None:
    """Touch what a tcgen05.ld or st does: form[1] columns and form[2] lanes; those from form[3] on,
    if it is not 0, are a run of their own as long as the first."""
    start = (address & 0xFFFF) * GRANULES + (address >> 16) // GRANULE_LANES
    tmem = w.cluster.ctas[w.rank].tmem
    rows = o.form[2] // GRANULE_LANES
    columns = o.form[1] - o.form[3]
    touch_rows(tmem, access, write, frontier, start, rows, u64(GRANULES), columns)
    if o.form[3] != 0:
        start += o.form[3] * GRANULES
        touch_rows(tmem, access, write, frontier, start, rows, u64(GRANULES), columns)


@native
def record_load(c: ptr[Context], o: ptr[Operation], address: u64, frontier: ptr[i32]) -> None:
    """A tcgen05.ld at lane << 16 | column has been issued; there is room for one more.

    frontier: what the warp knows for its accesses to tensor memory.
    """
    w = ptr[WarpRecord](c.watch)
    about = ptr[OperationRecord](o.watch)
    w.issued[LOAD] += 1
    clock = w.issued[LOAD]
    access = add_access(
        w, i32(agent_of(w, u32(LOAD))), clock, u32(LOAD_KIND), u32(0), about.index, u32(0)
    )
    touch_fragment(w, o, address, frontier, access, u32(0))
    ptr[u8](c.uses)[about.load] = u8(0)
    load = w.loads + w.load_end * 2
    load[0] = clock
    load[1] = i32(about.load)
    w.load_end += 1


@native
def record_store(c: ptr[Context], o: ptr[Operation], address: u64, frontier: ptr[i32]) -> None:
    """Record a tcgen05.st."""
    w = ptr[WarpRecord](c.watch)
    about = ptr[OperationRecord](o.watch)
    w.issued[STORE] += 1
    access = add_access(
        w,
        i32(agent_of(w, u32(STORE))),
        w.issued[STORE],
        u32(STORE_KIND),
        u32(1),
        about.index,
        u32(0),
    )
    touch_fragment(w, o, address, frontier, access, u32(1))


@native
def watched_load(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.ld."""
    w = ptr[WarpRecord](c.watch)
    if w.load_end == w.load_room or not begin(c, o):
        return PYTHON
    # The registers that are loaded may hold the address.
    address = operand(c, lanes, o.operands[0])
    outcome = tensor_load(c, lanes, o)
    if outcome == DONE:
        record_load(c, o, address, w.frontier)
    return outcome


@native
def watched_store(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.st."""
    if not begin(c, o):
        return PYTHON
    outcome = tensor_store(c, lanes, o)
    if outcome == DONE:
        address = operand(c, lanes, o.operands[0])
        record_store(c, o, address, ptr[WarpRecord](c.watch).frontier)
    return outcome


@native
def watched_wait_loads(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.wait::ld."""
    if not begin(c, o):
        return PYTHON
    finish_loads(c, ptr[WarpRecord](c.watch), True)
    return DONE


@native
def watched_wait_stores(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.wait::st."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o):
        return PYTHON
    w.frontier[agent_of(w, u32(STORE))] = w.issued[STORE]
    return DONE


@native
def watched_fence_after(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.fence::after_thread_sync."""
    return DONE if begin(c, o) else u32(PYTHON)


@native
def watched_fence_before(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.fence::before_thread_sync."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o) or not c.chain or not flush(c, w) or not end_chain(c):
        return PYTHON
    w.recorded = u32(0)
    fence_tensor(w)
    return DONE


@native
def watched_fence_proxy(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """fence.proxy.async."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o) or w.inits != 0:
        return PYTHON
    fence_proxy(w)
    return DONE


@native
def watched_fence_proxy_release(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o) or w.inits != 0:
        return PYTHON
    fence_proxy(w)
    fence_shared(w)
    return DONE


@native
def watched_fence_shared(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """fence.release.sync_restrict::shared::cta.cluster."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o):
        return PYTHON
    fence_shared(w)
    return DONE


@native
def watched_mma(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.mma."""
    w = ptr[WarpRecord](c.watch)
    if not c.chain or c.chain_length == CHAIN_IN_PYTHON or not begin(c, o):
        return PYTHON
    if c.chain_length > 0:
        d = u32(operand(c, lanes, o.operands[0]))
        descriptor = u32(operand(c, lanes, o.operands[3]))
        enabled = u32(1) if operand(c, lanes, o.operands[4]) != 0 else u32(0)
        if not continues(c.chain, d, descriptor, o, enabled):
            flush(c, w)
    outcome = tensor_mma(c, lanes, o)
    if c.chain_length == 0 or outcome == DONE and c.chain_length == 1:
        w.recorded = u32(0)
    return outcome


@native
def watched_commit(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.commit."""
    w = ptr[WarpRecord](c.watch)
    about = ptr[OperationRecord](o.watch)
    if not begin(c, o):
        return PYTHON
    ranks = commit_ranks(c, lanes, o)
    if ranks == 0:
        return PYTHON
    offset = operand(c, lanes, o.operands[0]) & 0xFFFFFF
    k = c.cluster
    phases = stack(u64, 16)
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            record = barrier_at(k, rank << 24 | offset)
            if not may_arrive(w, record, about.index, True):
                return PYTHON
            phases[rank] = record.phase
    if not flush(c, w) or tensor_commit(c, lanes, o) != DONE:
        return PYTHON
    w.recorded = u32(0)
    agent = agent_of(w, u32(MMA))
    known = w.frontier[agent]
    w.frontier[agent] = w.issued[MMA]
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            record = barrier_at(k, rank << 24 | offset)
            b = ptr[BarrierRecord](record.watch)
            if u32(rank) != w.rank:
                access = add_access(
                    w, i32(agent), w.issued[MMA], u32(ARRIVE_KIND), u32(1), about.index, u32(0)
                )
                visit(w, u32(rank), i32(agent), access)
            publish(w, b.gathering)
            b.arrivals[w.number] += 1
            if record.phase != phases[rank]:
                complete_phase(w, record)
    w.frontier[agent] = known
    advance(w)
    return DONE


# Copies


@native
def may_load(c: ptr[Context], ranks: u64, barrier: u64, o: ptr[Operation]) -> boolean:
    """Return True if the sanitizer has nothing to say of the mbarriers and CTAs of a load."""
    w = ptr[WarpRecord](c.watch)
    k = c.cluster
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            record = barrier_at(k, load_signal(barrier, rank, o))
            b = ptr[BarrierRecord](record.watch)
            if not b or not visible(w, b, True) or w.met >> u32(rank) & 1 == 0:
                return False
            # Two destinations with one mbarrier are one access.
            for other in range(rank):
                if ranks >> other & 1 == 1:
                    if load_signal(barrier, other, o) == load_signal(barrier, rank, o):
                        return False
    return True


@native
def watched_tile_load(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """cp.async.bulk.tensor to shared memory."""
    w = ptr[WarpRecord](c.watch)
    if not begin(c, o):
        return PYTHON
    ranks = load_ranks(c, lanes, o)
    if ranks == 0:
        return PYTHON
    t = known_map(c, operand(c, lanes, o.operands[2]), o.form[0])
    barrier = operand(c, lanes, o.operands[1])
    if t.written != 0 or t.shared_bytes & 15 != 0 or not may_load(c, ranks, barrier, o):
        return PYTHON
    offset = operand(c, lanes, o.operands[0]) & 0xFFFFFF
    at = stack(i64, DIMENSIONS)
    tile_at(c, lanes, t, o.operands + 3, at)
    k = c.cluster
    accesses = stack(u32, 16)
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            signal = load_signal(barrier, rank, o)
            b = ptr[BarrierRecord](barrier_at(k, signal).watch)
            access = add_access(
                w,
                b.agent,
                i32(IN_FLIGHT),
                u32(TMA_KIND),
                u32(1),
                ptr[OperationRecord](o.watch).index,
                u32(signal),
            )
            accesses[rank] = access
            visit(w, u32(rank), b.agent, access)
            touch_run(
                w.cluster.ctas[rank].smem,
                access,
                u32(1),
                w.frontier,
                offset >> GRANULE_SHIFT,
                t.shared_bytes >> GRANULE_SHIFT,
            )
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            started = cycles()
            move_tile(k.ctas[rank].smem, offset, t, at, u32(1))
            k.machine.copy_ticks += cycles() - started
            signal_copy(w, barrier_at(k, load_signal(barrier, rank, o)), accesses[rank], t.bytes)
            k.machine.loaded += t.bytes
    advance(w)
    return DONE


@native
def signal_copy(w: ptr[WarpRecord], record: ptr[Barrier], access: u32, size: u64) -> None:
    """The bytes of a copy have arrived."""
    b = ptr[BarrierRecord](record.watch)
    row = ptr[AccessRow](w.cluster.accesses.data) + access
    phase = record.phase
    clock = b.base + i32(phase) + 1
    row.clock = clock
    b.signalled = u32(1)
    publish(w, b.gathering)
    b.gathering[u32(b.agent)] = clock
    change(record, u64(0), 0 - i64(size))
    if record.phase != phase:
        complete_phase(w, record)


#: Routines by the names of those in native code that they replace.
WATCHED = {
    "mbarrier_arrive": watched_arrive, "mbarrier_wait": watched_wait, "tensor_load": watched_load,
    "tensor_store": watched_store, "tensor_mma": watched_mma, "tensor_commit": watched_commit,
    "fence_before": watched_fence_before, "tile_load": watched_tile_load,
}  # fmt: skip
#: Routines of instructions without an effect of their own, by rule.
WATCHED_ORDERS = {
    Rule.WAIT_LOADS: watched_wait_loads, Rule.WAIT_STORES: watched_wait_stores,
    Rule.FENCE_AFTER: watched_fence_after, Rule.FENCE_SHARED: watched_fence_shared,
    Rule.FENCE_PROXY: watched_fence_proxy,
    Rule.FENCE_PROXY_RELEASE: watched_fence_proxy_release,
}  # fmt: skip
