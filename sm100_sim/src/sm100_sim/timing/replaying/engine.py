"""The replay's inner loop: a program executed clock by clock on a model of the SMs of a cluster.

Compiled with numba. In every clock each issue slot issues at most one instruction of its warps,
the one that has waited longest; an instruction issues when its stall count has passed, its
scoreboards are released and its pipe is free. Clocks in which nothing can happen are skipped.

Asynchronous operations are a queue of signals: what reaches an mbarrier, and when. The tensor core,
the ports of shared and tensor memory and the TMA unit are servers with a time from which they are
free; see the functions that use them.

Everything lives in a few integer tables (`state.Model`).
"""

from __future__ import annotations

import numpy as np

from . import products, shared_port
from .signals import compiled as _compiled
from .signals import drop as _drop
from .signals import signal as _signal

# isort: off
from .state import (
    BULK_GROUPS, FAR, QUEUE, SLOTS, _BARRIER_TEST, _BLOCKED, _BOARDS, _BULK, _CAUSE,
    _CLUSTER, _CLUSTER_ARRIVED, _CLUSTER_BLOCK, _CLUSTER_CLOCK, _CLUSTER_ROUND, _COLUMN_RATE,
    _COPIED, _C_ACTION, _C_BYTES, _C_FREES, _C_INTERVAL, _C_LATENCY, _C_PIPE, _C_SETS, _C_STALL,
    _C_WAITS, _C_WAVEFRONTS, _DONE, _DRAINED, _EARLIEST, _FENCED, _FENCE_CTA, _FENCE_GPU,
    _GLOBAL_LOAD, _GROUPS, _GROUP_DONE, _GROUP_READ, _HEAD, _HELD, _IN_ORDER, _ISSUED,
    _ISSUE_SLOT, _K_ACK, _K_ARRIVE, _K_BEHIND_LOADS, _K_BRANCH, _K_CLC, _K_CLUSTER, _K_DEPTH,
    _K_FENCE_SYS, _K_MMA_EXTRA, _K_MMA_ISSUE, _K_MUFU_INTERVAL, _K_NAMED, _K_NAMED_WARP,
    _K_PREFETCH, _K_REMOTE, _K_TMA_ISSUE, _K_TMA_LOAD, _K_TMA_STORE, _K_WAKE, _LAST, _LATEST,
    _LINK, _LINK_RATE, _LOADED, _LSU, _MBARRIER, _NAMED, _NAMED_BLOCK, _NAMED_UNIT,
    _NONE, _NOT, _NO_PIPE, _OPERAND_READ, _PIPE, _PORTS, _POSITION, _PREVIOUS, _PRODUCTS,
    _PRODUCT_BLOCK, _READY, _REASON, _ROUND, _RUNNING, _SIGNALLED, _SLOT_OF, _SM,
    _STALL, _START, _STARTED, _STOP, _STORED, _STORE_QUEUE, _STORE_RATE, _TAIL, _TENSOR, _TMA,
    _TMA_READS, _TMA_WRITES, _TMEM_LOAD, _TMEM_STORE, _TM_READ, _TM_WRITE, _UP, _USED_PIPE,
    _USED_UNIT, _WAIT_BAR, _WAIT_BOARD, _WAIT_EVENT, _WAIT_PARITY, _WHYS, _arrive, _bar_arrive,
    _bar_sync, _bulk_commit, _bulk_wait, _c_arrive, _c_wait, _cancel, _commit, _copy,
    _copy_arrive, _cta_fence, _fence, _g_load, _g_store, _init, _load, _mma, _nothing, _product,
    _product_wait, _shared, _store, _store_async, _tm_load, _tm_store, _tm_store_wait, _wait,
)  # fmt: skip
# isort: on


@_compiled
def _apply_signals(m, now):
    """Let the signals up to `now` reach their mbarriers, and wake who waits for a phase."""
    while m.counts[_SIGNALLED] and m.signal[0, 0] <= now:
        clock, barrier = m.signal[0, 0], m.signal[0, 2]
        arrivals, nbytes, event = m.signal[0, 3], m.signal[0, 4], m.signal[0, 5]
        _drop(m)
        bar = m.barrier[barrier]
        bar[1] -= arrivals
        bar[2] += nbytes
        if bar[1] == 0 and bar[2] == 0:
            bar[1] = bar[0]
            bar[3] += 1
            bar[4] = event
            for warp in range(m.warp.shape[0]):
                fields = m.warp[warp]
                if fields[_WAIT_BAR] == barrier and (bar[3] ^ fields[_WAIT_PARITY]) & 1:
                    fields[_WAIT_BAR] = -1
                    board = fields[_WAIT_BOARD]
                    m.warp[warp, _BOARDS + board] = clock + m.clock[_K_WAKE]
                    m.event[fields[_WAIT_EVENT], _CAUSE] = event
                    m.event[fields[_WAIT_EVENT], _DONE] = clock + m.clock[_K_WAKE]
                    _set_ready(m, warp, fields[_EARLIEST], _STALL)


@_compiled
def _set_ready(m, warp, earliest, reason):
    """Set when the warp's next instruction may issue, but for its pipe, and what it waits for."""
    fields = m.warp[warp]
    position = fields[_POSITION]
    if position >= m.warp[warp, _LAST]:
        fields[_READY] = FAR
        return
    ready = earliest
    waits = m.code[m.path[position, 0], _C_WAITS]
    for board in range(6):
        if waits >> board & 1 and m.warp[warp, _BOARDS + board] > ready:
            ready, reason = m.warp[warp, _BOARDS + board], m.warp[warp, _WHYS + board]
    fields[_READY], fields[_REASON] = ready, reason


@_compiled
def _queue_for_tensor_core(m, sm, now, event):
    """An MMA or commit is queued; the tensor core takes them in the order of their issue."""
    place = m.unit[sm, _TAIL] % QUEUE
    m.unit[sm, _TAIL] += 1
    m.queue[sm, place, 0] = now + m.clock[_K_MMA_ISSUE]
    m.queue[sm, place, 1] = event


@_compiled
def _tensor_core_start(m, sm):
    """Return when the first operation queued at this CTA's tensor core can start; FAR if none
    is."""
    queued = m.unit[sm]
    if queued[_HEAD] == queued[_TAIL]:
        return FAR
    entry = m.queue[sm, queued[_HEAD] % QUEUE]
    action = m.action[entry[1]]
    start = entry[0]
    if action[0] == _mma:
        first = sm & ~1 if action[4] == 2 else sm
        for cta in range(first, first + action[4]):
            start = max(start, m.unit[cta, _TENSOR])
    return start


@_compiled
def _run_tensor_core(m, sm, now):
    """Start what is queued at this CTA's tensor core up to `now`.

    An MMA takes its own clocks, or as long as the shared-memory ports need for its operands beside
    all other traffic. A commit signals when everything before it has completed.
    """
    queued = m.unit[sm]
    while True:
        start = _tensor_core_start(m, sm)
        if start > now:
            return
        event = m.queue[sm, queued[_HEAD] % QUEUE, 1]
        queued[_HEAD] += 1
        action = m.action[event]
        m.event[event, _STARTED] = start
        if action[0] == _commit:
            done = max(queued[_DRAINED], start + m.clock[_K_ARRIVE] - m.clock[_K_MMA_ISSUE])
            m.event[event, _CAUSE] = queued[_LATEST]
            _send(m, done, event, sm)
            continue
        compute, operands, latency, group = action[1], action[2], action[3], action[4]
        first = sm & ~1 if group == 2 else sm
        duration = compute
        for cta in range(first, first + group):
            through = shared_port.access(m, cta, start - m.clock[_K_PREFETCH], operands)
            duration = max(duration, through - start)
        for cta in range(first, first + group):
            m.unit[cta, _TENSOR] = start + duration
            m.unit[cta, _USED_UNIT + _TENSOR] += compute
        extra = latency - max(compute, operands) - m.clock[_K_MMA_ISSUE] - m.clock[_K_WAKE]
        m.event[event, _DONE] = start + duration + extra + m.clock[_K_MMA_EXTRA]
        queued[_DRAINED] = max(queued[_DRAINED], m.event[event, _DONE])
        queued[_LATEST] = event


@_compiled
def _send(m, at, event, sm):
    """Arrivals of an operation on every barrier it signals, at one time."""
    action = m.action[event]
    m.event[event, _DONE] = at
    for target in range(action[1], action[2]):
        barrier, arrivals, nbytes, _, _ = m.targets[target]
        _signal(m, at, barrier, arrivals, -nbytes, event)


@_compiled
def _issue_load(m, sm, now, event):
    """A TMA load: the unit takes one after the other, then latency, then the link to the SM."""
    action = m.action[event]
    unit = m.unit[sm]
    start = max(now, unit[_TMA])
    unit[_TMA] = start + m.clock[_K_TMA_ISSUE]
    m.unit[sm, _USED_UNIT + _TMA] += m.clock[_K_TMA_ISSUE]
    transfer = int(np.ceil(action[3] / m.rate[_LINK_RATE]))
    arrives = max(start + m.clock[_K_TMA_LOAD], unit[_LINK]) + transfer
    unit[_LINK] = unit[_TMA_READS] = arrives
    m.unit[sm, _USED_UNIT + _LINK] += transfer
    m.event[event, _STARTED] = start
    m.event[event, _DONE] = arrives
    for target in range(action[1], action[2]):
        barrier, _, nbytes, remote, _ = m.targets[target]
        at = arrives + (m.clock[_K_REMOTE] // 2 if remote else 0)
        _signal(m, at, barrier, _NONE, -nbytes, event)


@_compiled
def _issue_store(m, warp, sm, now, event):
    """A TMA store or reduction. It is read as fast as it leaves the SM, which is then all of it;
    TMA goes on to the requests behind it when that is done, as far as TMA works in order."""
    nbytes = m.action[event, 1]
    unit, fields = m.unit[sm], m.warp[warp]
    start = max(now, unit[_TMA])
    unit[_TMA] = start + m.clock[_K_TMA_ISSUE]
    m.unit[sm, _USED_UNIT + _TMA] += m.clock[_K_TMA_ISSUE]
    writing = int(nbytes / m.rate[_STORE_RATE])
    m.unit[sm, _USED_UNIT + _UP] += writing
    begin = max(start, unit[_TMA_WRITES])
    unit[_TMA_WRITES] = begin + writing
    unit[_TMA] = max(unit[_TMA], start + int(m.rate[_IN_ORDER] * (begin + writing - start)))
    done = begin + writing + m.clock[_K_TMA_STORE]
    m.event[event, _STARTED], m.event[event, _DONE] = start, done
    fields[_GROUP_READ] = fields[_GROUP_DONE] = max(fields[_GROUP_DONE], done)


@_compiled
def _global_store(m, warp, now, number):
    """A warp's store. Its registers are read shortly before it leaves the SM, which keeps warps
    from running ahead."""
    sm = m.warp[warp, _SM]
    unit = m.unit[sm]
    work = int(np.ceil(m.code[number, _C_BYTES] / m.rate[_STORE_RATE]))
    m.unit[sm, _USED_UNIT + _UP] += work
    unit[_UP] = max(unit[_UP], now) + work
    read = max(now + m.clock[_OPERAND_READ], unit[_UP] - m.clock[_K_DEPTH])
    _release(m, warp, number, read, read, _STORE_QUEUE)


@_compiled
def _global_load(m, warp, now, number):
    """A warp's load takes its share of the link from L2, behind other warps' loads, not behind
    TMA's requests: that is a queue of TMA's own."""
    unit = m.unit[m.warp[warp, _SM]]
    transfer = int(np.ceil(m.code[number, _C_BYTES] / m.rate[_LINK_RATE]))
    unit[_LOADED] = max(now + m.clock[_K_TMA_LOAD], unit[_LOADED]) + transfer
    unit[_LINK] += transfer
    unit[_USED_UNIT + _LINK] += transfer
    done = max(now + m.clock[_GLOBAL_LOAD], unit[_LOADED])
    _release(m, warp, number, done, now + m.clock[_OPERAND_READ], _GLOBAL_LOAD)


@_compiled
def _cta_fence_clock(m, warp, now):
    """Return when a fence of the CTA is through: behind the stores queued in the SM."""
    fields = m.warp[warp]
    queued = m.unit[fields[_SM], _UP] - m.clock[_K_DEPTH]
    fields[_FENCED] = max(now, queued) + m.clock[_FENCE_CTA]
    return fields[_FENCED]


@_compiled
def _fence_clock(m, warp, now, is_system):
    """Return when a fence of GPU or system scope lets its warp go on: when the stores before the
    warp's last fence of the CTA are acknowledged and the SM's loads have come, and after a round
    trip; behind loads of TMA after a second one."""
    fields = m.warp[warp]
    unit = m.unit[fields[_SM]]
    start = max(now, fields[_FENCED], unit[_LINK], unit[_LOADED])
    left = max(min(unit[_UP], fields[_FENCED] + m.clock[_K_DEPTH]), min(now, unit[_TMA_WRITES]))
    if left:
        start = max(start, left + m.clock[_K_ACK])
    if unit[_TMA_READS] > now:
        start += m.clock[_K_BEHIND_LOADS]
    return start + m.clock[_K_FENCE_SYS if is_system else _FENCE_GPU]


@_compiled
def _issue_arrivals(m, now, event):
    """Arrivals: on a barrier of the own CTA soon, of another one later."""
    action = m.action[event]
    for target in range(action[1], action[2]):
        barrier, arrivals, nbytes, remote, _ = m.targets[target]
        at = now + (m.clock[_K_REMOTE] if remote else m.clock[_K_ARRIVE])
        m.event[event, _DONE] = at
        if nbytes:
            # Bytes are expected before the arrival counts, so that it completes no phase.
            m.barrier[barrier, 2] += nbytes
        if action[3]:
            m.barrier[barrier, 1] += arrivals
        if arrivals:
            _signal(m, at, barrier, arrivals, _NONE, event)


@_compiled
def _issue_wait(m, warp, now, number, event):
    """An mbarrier wait: released at once, or when the phase completes."""
    action = m.action[event]
    board = m.code[number, _C_SETS]
    bar = m.barrier[action[1]]
    m.event[event, _STARTED] = now
    if (bar[3] ^ action[2]) & 1 or not action[3]:
        m.event[event, _DONE] = now + m.clock[_BARRIER_TEST]
        return
    fields = m.warp[warp]
    fields[_WAIT_BAR], fields[_WAIT_PARITY] = action[1], action[2]
    fields[_WAIT_BOARD], fields[_WAIT_EVENT] = board, event
    m.warp[warp, _BOARDS + board] = FAR
    m.warp[warp, _WHYS + board] = _MBARRIER


@_compiled
def _named_barrier(m, warp, now, event, waits):
    """A named barrier: who synchronises goes on when all have arrived."""
    action = m.action[event]
    named = action[1]
    expected = action[2]
    if expected == 0:
        for other in range(m.warp.shape[0]):
            expected += m.warp[other, _SM] == m.warp[warp, _SM]
    m.named[named] += 1
    unit = m.unit[m.warp[warp, _SM]]
    unit[_NAMED_UNIT] = max(unit[_NAMED_UNIT], now) + m.clock[_K_NAMED_WARP]
    released = unit[_NAMED_UNIT] + m.clock[_K_NAMED]
    fields = m.warp[warp]
    if waits:
        fields[_BLOCKED], fields[_WAIT_EVENT], fields[_WAIT_BOARD] = (
            _NAMED_BLOCK, event, named,
        )  # fmt: skip
    if m.named[named] < expected:
        return
    m.named[named] = 0
    for other in range(m.warp.shape[0]):
        waiting = m.warp[other]
        if waiting[_BLOCKED] == _NAMED_BLOCK and waiting[_WAIT_BOARD] == named:
            waiting[_BLOCKED] = _NOT
            m.event[waiting[_WAIT_EVENT], _CAUSE] = event
            m.event[waiting[_WAIT_EVENT], _DONE] = released
            waiting[_REASON] = _NAMED
            waiting[_READY] = released


@_compiled
def _cluster_barrier(m, warp, now, event, waits):
    """The cluster's barrier, counted in warps."""
    counts, fields = m.counts, m.warp[warp]
    if waits:
        # A warp waits for the round that it has arrived in.
        if fields[_ROUND] < counts[_CLUSTER_ROUND]:
            fields[_READY] = max(fields[_READY], counts[_CLUSTER_CLOCK])
            return
        fields[_BLOCKED], fields[_WAIT_EVENT] = _CLUSTER_BLOCK, event
        return
    fields[_ROUND] = counts[_CLUSTER_ROUND]
    counts[_CLUSTER_ARRIVED] += 1
    _settle_cluster(m, now, event)


@_compiled
def _settle_cluster(m, now, event):
    """Complete the cluster barrier's round if every warp that has not exited has arrived."""
    counts = m.counts
    if not counts[_CLUSTER_ARRIVED] or counts[_CLUSTER_ARRIVED] < counts[_RUNNING]:
        return
    counts[_CLUSTER_ARRIVED] = 0
    counts[_CLUSTER_ROUND] += 1
    counts[_CLUSTER_CLOCK] = now + m.clock[_K_CLUSTER]
    for other in range(m.warp.shape[0]):
        waiting = m.warp[other]
        if waiting[_BLOCKED] == _CLUSTER_BLOCK:
            waiting[_BLOCKED] = _NOT
            m.event[waiting[_WAIT_EVENT], _CAUSE] = event
            m.event[waiting[_WAIT_EVENT], _DONE] = now + m.clock[_K_CLUSTER]
            waiting[_REASON] = _CLUSTER
            waiting[_READY] = now + m.clock[_K_CLUSTER]


@_compiled
def _scoreboards(m, warp, now, number):
    """Clocks at which the scoreboards that an ordinary instruction sets are released."""
    kind = m.code[number, _C_LATENCY]
    done = now + m.clock[kind]
    read = now + m.clock[_OPERAND_READ]
    if m.code[number, _C_ACTION] == _shared and m.code[number, _C_WAVEFRONTS]:
        sm = m.warp[warp, _SM]
        work = m.code[number, _C_WAVEFRONTS]
        start = max(now, m.unit[sm, _LSU])
        m.unit[sm, _LSU] = start + work
        m.unit[sm, _USED_UNIT + _LSU] += work
        shared_port.access(m, sm, start, work)
        done = start + work - 1 + m.clock[kind]
        read = start + work + m.clock[_OPERAND_READ]
    _release(m, warp, number, done, read, kind)


@_compiled
def _release(m, warp, number, done, read, reason):
    """Set the instruction's scoreboards: result at `done`, operands read at `read`."""
    if m.code[number, _C_SETS] >= 0:
        board = m.code[number, _C_SETS]
        if done >= m.warp[warp, _BOARDS + board]:
            m.warp[warp, _BOARDS + board], m.warp[warp, _WHYS + board] = done, reason
    if m.code[number, _C_FREES] >= 0:
        board = m.code[number, _C_FREES]
        if read >= m.warp[warp, _BOARDS + board]:
            m.warp[warp, _BOARDS + board], m.warp[warp, _WHYS + board] = read, reason


@_compiled
def _tensor_memory(m, warp, now, number, event):
    """tcgen05.ld and st: columns through the port of the issue slot, then the latency."""
    sm = m.warp[warp, _SM]
    is_load = m.code[number, _C_ACTION] == _tm_load
    which = _TM_READ if is_load else _TM_WRITE
    slot = sm * SLOTS + m.warp[warp, _SLOT_OF]
    port = m.slot[slot]
    side = _PORTS if is_load else _PORTS + 1
    transfer = int(np.ceil(m.action[event, 1] / m.rate[_COLUMN_RATE]))
    start = max(now, port[side])
    port[side] = start + transfer
    m.unit[sm, _USED_UNIT + which] += transfer
    kind = _TMEM_LOAD if is_load else _TMEM_STORE
    done = start + transfer + m.clock[kind]
    m.event[event, _STARTED], m.event[event, _DONE] = start, done
    if not is_load:
        m.warp[warp, _STORED] = max(m.warp[warp, _STORED], done)
    _release(m, warp, number, done, start + transfer, kind)


@_compiled
def _bulk_groups(m, warp, now, event):
    """Commit a bulk group, or the clock until which a wait for all but a few of them blocks."""
    action, fields = m.action[event], m.warp[warp]
    groups = m.groups[warp]
    if action[0] == _bulk_commit:
        place = fields[_GROUPS] % BULK_GROUPS
        groups[place, 0], groups[place, 1] = fields[_GROUP_READ], fields[_GROUP_DONE]
        fields[_GROUPS] += 1
        return now
    until = now
    first = max(0, fields[_GROUPS] - BULK_GROUPS)
    for number in range(first, fields[_GROUPS] - action[1]):
        until = max(until, groups[number % BULK_GROUPS, 0 if action[2] else 1])
    m.event[event, _DONE] = until
    return until


@_compiled
def _goes_on(m, warp, now, event):
    """Return when a warp goes on behind its part of an MMA, or behind a wait for groups of them;
    FAR if it is too far ahead of the tensor core, or that is not known."""
    if m.action[event, 0] == _product:
        return FAR if products.is_ahead(m, warp) else now
    until = products.done(m, warp, m.action[event, 1])
    if until < FAR:
        until = max(now, until)
        m.event[event, _DONE] = until
    return until


@_compiled
def _warpgroup_products(m, warp, now, event):
    """A warp's part of a product, or a wait for groups of them: when it goes on, or it blocks."""
    fields = m.warp[warp]
    if m.action[event, 0] == _product:
        products.issue(m, warp, fields[_SM], now, event)
    until = _goes_on(m, warp, now, event)
    if until == FAR:
        fields[_BLOCKED], fields[_WAIT_EVENT] = _PRODUCT_BLOCK, event
        return now
    return until


@_compiled
def _run_products(m, sm, now):
    """Begin the products that can up to `now`, and wake who waited for that."""
    while products.begin(m, sm, now):
        for warp in range(m.warp.shape[0]):
            fields = m.warp[warp]
            if fields[_BLOCKED] != _PRODUCT_BLOCK:
                continue
            until = _goes_on(m, warp, now, fields[_WAIT_EVENT])
            if until < FAR:
                fields[_BLOCKED] = _NOT
                _set_ready(m, warp, max(fields[_EARLIEST], until), _PRODUCTS)


@_compiled
def _perform(m, warp, now, number, event):
    """Perform an instruction's action beside occupying its pipe; return when the warp may go on."""
    action, sm, fields = m.code[number, _C_ACTION], m.warp[warp, _SM], m.warp[warp]
    if action == _g_store:
        _global_store(m, warp, now, number)
        return now
    if action == _g_load:
        _global_load(m, warp, now, number)
        return now
    if action == _cta_fence:
        done = _cta_fence_clock(m, warp, now)
        _release(m, warp, number, done, done, _FENCE_CTA)
        return now
    if event < 0:
        # A site without an event is predicated off: it sets no scoreboard.
        if action == _nothing or action == _shared:
            _scoreboards(m, warp, now, number)
        return now
    if action == _tm_load or action == _tm_store:
        _tensor_memory(m, warp, now, number, event)
        return now
    if action == _tm_store_wait:
        done = max(now + 8, fields[_STORED])
        m.event[event, _DONE] = done
        _release(m, warp, number, done, done, _TMEM_STORE)
        return now
    _scoreboards(m, warp, now, number)
    m.event[event, _STARTED] = now
    if action == _wait:
        _issue_wait(m, warp, now, number, event)
    elif action == _mma or action == _commit:
        _queue_for_tensor_core(m, sm, now, event)
    elif action == _arrive:
        _issue_arrivals(m, now, event)
    elif action == _copy:
        fields[_COPIED] = max(fields[_COPIED], now + m.clock[_GLOBAL_LOAD])
    elif action == _copy_arrive:
        _issue_arrivals(m, max(now, fields[_COPIED] - m.clock[_K_ARRIVE]), event)
    elif action == _init:
        bar = m.barrier[m.action[event, 1]]
        bar[0], bar[1], bar[2], bar[3] = m.action[event, 2], m.action[event, 2], 0, 0
    elif action == _load:
        _issue_load(m, sm, now, event)
    elif action == _store:
        _issue_store(m, warp, sm, now, event)
    elif action == _bulk_commit or action == _bulk_wait:
        return _bulk_groups(m, warp, now, event)
    elif action == _bar_sync or action == _bar_arrive:
        _named_barrier(m, warp, now, event, action == _bar_sync)
    elif action == _c_arrive or action == _c_wait:
        _cluster_barrier(m, warp, now, event, action == _c_wait)
        return max(now, fields[_READY])
    elif action == _cancel or action == _store_async:
        _send(m, now + m.clock[_K_CLC if action == _cancel else _K_REMOTE], event, sm)
    elif action == _product or action == _product_wait:
        return _warpgroup_products(m, warp, now, event)
    elif action == _fence:
        m.event[event, _DONE] = _fence_clock(m, warp, now, m.action[event, 1])
        return m.event[event, _DONE]
    return now


@_compiled
def _issue(m, warp, now):
    """Issue the next instruction of a warp."""
    fields = m.warp[warp]
    position = fields[_POSITION]
    number, event = m.path[position, 0], m.path[position, 1]
    slot = m.warp[warp, _SM] * SLOTS + m.warp[warp, _SLOT_OF]
    m.slot[slot, _ISSUED] += 1
    # The clocks since the last issue: stall count, what was waited for, who went before.
    stalls = m.stalls[warp]
    stalls[_STALL] += fields[_EARLIEST] - fields[_PREVIOUS]
    stalls[fields[_REASON]] += fields[_READY] - fields[_EARLIEST]
    contention = _PIPE if fields[_HELD] else _ISSUE_SLOT
    stalls[contention] += now - fields[_READY]
    fields[_HELD] = 0
    why = fields[_REASON] if fields[_READY] > fields[_EARLIEST] else _STALL
    if now - fields[_READY] > fields[_READY] - fields[_PREVIOUS]:
        why = contention
    m.issued[position, 0], m.issued[position, 1] = now, why
    pipe = m.code[number, _C_PIPE]
    if pipe != _NO_PIPE:
        interval = m.code[number, _C_INTERVAL]
        if interval < 0:
            interval = m.clock[_K_MUFU_INTERVAL]
        m.slot[slot, pipe] = now + interval
        m.slot[slot, _USED_PIPE + pipe] += interval
    fields[_POSITION] = position + 1
    fields[_READY] = now
    until = _perform(m, warp, now, number, event)
    earliest = now + max(m.code[number, _C_STALL], 1)
    if position + 1 < m.warp[warp, _LAST] and m.path[position + 1, 0] != number + 1:
        earliest += m.clock[_K_BRANCH]
    fields[_PREVIOUS], fields[_EARLIEST] = now, earliest
    action = m.code[number, _C_ACTION]
    reason = _CLUSTER if action == _c_wait else _FENCE_GPU if action == _fence else _BULK
    reason = _PRODUCTS if action == _product_wait else reason
    _set_ready(m, warp, max(earliest, until), reason)
    if position + 1 == m.warp[warp, _LAST]:
        m.counts[_RUNNING] -= 1
        _settle_cluster(m, now, event)


@_compiled
def _pick(m, slot, now):
    """The warp of a slot that issues now, -1 if none can, and when one could at the earliest.

    Of those that can issue the one that has waited longest is taken.
    """
    chosen, since, following = np.int64(-1), np.int64(FAR), np.int64(FAR)
    for warp in range(m.slot[slot, _START], m.slot[slot, _STOP]):
        member = m.member[warp]
        fields = m.warp[member]
        if fields[_BLOCKED] != _NOT or fields[_READY] == FAR:
            continue
        pipe = m.code[m.path[fields[_POSITION], 0], _C_PIPE]
        free = m.slot[slot, pipe] if pipe != _NO_PIPE else 0
        if fields[_READY] <= now and free > now:
            fields[_HELD] = 1
        possible = max(fields[_READY], free)
        if possible > now:
            following = min(following, possible)
        elif fields[_READY] < since:
            if chosen >= 0:
                following = now + 1
            chosen, since = member, fields[_READY]
        else:
            following = now + 1
    return chosen, following


@_compiled
def run(m, limit):
    """Replay to the end; returns the clock at which the last warp exits, -1 if nothing can go on.

    limit: clocks after which the replay is given up (returns -2).
    """
    # A typed zero: with a literal one every function would be compiled twice.
    now = np.int64(0)
    while m.counts[_RUNNING]:
        if now > limit:
            return -2
        _apply_signals(m, now)
        following = np.int64(FAR)
        for sm in range(m.unit.shape[0]):
            _run_tensor_core(m, sm, now)
            _run_products(m, sm, now)
        for slot in range(m.unit.shape[0] * SLOTS):
            warp, other = _pick(m, slot, now)
            following = min(following, other)
            if warp >= 0:
                _issue(m, warp, now)
                following = now + 1
        for sm in range(m.unit.shape[0]):
            first = min(_tensor_core_start(m, sm), products.following(m, sm))
            following = min(following, max(first, now + 1))
        if m.counts[_SIGNALLED]:
            following = min(following, max(m.signal[0, 0], now + 1))
        if following >= FAR:
            return -1
        now = following
    return now
