"""mbarrier operations in native code (`isa.sync`, `barriers.MBarrier` have the rules)."""

from __future__ import annotations

from .language import boolean, i32, i64, native, ptr, u32, u64
from .layout import Barrier, Cluster, Context, Operation
from .operands import DONE, PYTHON, WAIT, lane_count, operand, shared_by_lanes

#: Largest expected arrival count, and largest magnitude of the tx-count (mbarrier contents).
TRANSACTION_LIMIT = (1 << 20) - 1
#: Upper bits of the state that an arrive returns (`barriers.MBarrier.state`).
STATE_MARK = 0x5B << 56


@native
def barrier_at(k: ptr[Cluster], address: u64) -> ptr[Barrier]:
    """The live mbarrier at a shared address; null where native code knows none."""
    rank = address >> 24
    offset = address & 0xFFFFFF
    if rank >= u64(k.cta_count) or offset & 7 != 0:
        return ptr[Barrier](u64(0))
    cta = k.ctas[rank]
    if offset + 8 > cta.smem_bytes:
        return ptr[Barrier](u64(0))
    number = cta.barriers_at[offset >> 3]
    if number == 0:
        return ptr[Barrier](u64(0))
    return k.barriers + (u64(number) - 1)


@native
def enqueue(k: ptr[Cluster], c: ptr[Context]) -> None:
    """A warp is ready: it gets a turn behind the others."""
    c.queued = u32(1)
    k.polls = u32(0)
    place = k.head + k.waiting
    if place >= k.capacity:
        place -= k.capacity
    k.ring[place] = u64(c)
    k.waiting += 1


@native
def wake_waiters(b: ptr[Barrier]) -> None:
    """Let the warps run that native code made wait for an mbarrier."""
    c = b.first
    b.first = ptr[Context](u64(0))
    b.last = ptr[Context](u64(0))
    while c:
        following = c.next_waiter
        c.blocked &= ~c.wait_lanes
        c.wait_lanes = u32(0)
        c.cluster.progress = u32(1)
        if c.queued == 0:
            enqueue(c.cluster, c)
        c = following


@native
def completes(b: ptr[Barrier], count: u64, transactions: i64) -> boolean:
    """Return True if `count` arrivals and a change of the tx-count end the phase."""
    return count == u64(b.pending) and i64(b.transactions) + transactions == 0


@native
def in_python(b: ptr[Barrier], count: u64, transactions: i64) -> boolean:
    """Return True if Python must do this: an error, or a warp to be woken."""
    total = i64(b.transactions) + transactions
    if count > u64(b.pending) or total > TRANSACTION_LIMIT or total < 0 - TRANSACTION_LIMIT:
        return True
    return b.watched != 0 and completes(b, count, transactions)


@native
def change(b: ptr[Barrier], count: u64, transactions: i64) -> None:
    """Arrivals and a change of the tx-count; `in_python` has returned False."""
    ends = completes(b, count, transactions)
    b.pending -= u32(count)
    b.transactions += i32(transactions)
    if ends:
        b.phase += 1
        b.pending = b.expected
        wake_waiters(b)


@native
def is_own(c: ptr[Context], address: u64) -> boolean:
    """Return True if a shared address is in the memory of the executing CTA."""
    return address >> 24 == u64(c.shared_base) >> 24


@native
def mbarrier_arrive(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """mbarrier.arrive [0], count [1] or with .expect_tx (form[0] = 1) bytes [1].

    form[1]: 1 + slot of the 64-bit register for the state, 0 for none. form[2]: 1 if the barrier
    must be the CTA's own.
    """
    address = o.operands[0]
    number = o.operands[1]
    if not shared_by_lanes(c, lanes, address) or not shared_by_lanes(c, lanes, number):
        return PYTHON
    b = barrier_at(c.cluster, operand(c, lanes, address))
    if not b or o.form[2] == 1 and not is_own(c, operand(c, lanes, address)):
        return PYTHON
    total = lane_count(lanes) * operand(c, lanes, number)
    if total > TRANSACTION_LIMIT:
        return PYTHON
    arrivals = total
    transactions: i64 = 0
    if o.form[0] == 1:
        arrivals = lane_count(lanes)
        transactions = i64(total)
    if arrivals == 0 or in_python(b, arrivals, transactions):
        return PYTHON
    if o.form[1] != 0:
        state = u64(STATE_MARK) | (b.phase & 0xFFFFFFFF) << 20 | u64(b.pending)
        row = c.r64 + (o.form[1] - 1) * 32
        for lane in range(32):
            if lanes >> u32(lane) & 1 == 1:
                row[lane] = state
    change(b, arrivals, transactions)
    return DONE


@native
def mbarrier_wait(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """mbarrier.try_wait.parity or test_wait.parity: barrier [0], parity [1].

    form[0]: slot of the result's predicate. form[1]: 1 in a spin loop, where lanes may sleep.
    """
    if not shared_by_lanes(c, lanes, o.operands[0]) or not shared_by_lanes(c, lanes, o.operands[1]):
        return PYTHON
    b = barrier_at(c.cluster, operand(c, lanes, o.operands[0]))
    if not b or not is_own(c, operand(c, lanes, o.operands[0])):
        return PYTHON
    if (b.phase ^ operand(c, lanes, o.operands[1])) & 1 == 1:
        c.preds[o.form[0]] |= lanes
        return DONE
    if o.form[1] == 0 or c.wait_lanes != 0:
        return PYTHON
    c.preds[o.form[0]] &= ~lanes
    c.wait_on = b
    c.wait_lanes = lanes
    c.next_waiter = ptr[Context](u64(0))
    if b.last:
        b.last.next_waiter = c
    else:
        b.first = c
    b.last = c
    return WAIT
