"""TMA tensor copies in native code (`isa.copies.tma` has the rules, `tiles` moves the bytes).

With a descriptor that Python has seen before, of a tensor that is memory as a whole; others are
left to Python.
"""

from __future__ import annotations

from .barriers import TRANSACTION_LIMIT, barrier_at, change
from .language import boolean, cycles, i32, i64, native, ptr, stack, u32, u64
from .layout import DIMENSIONS, Cluster, Context, Operand, Operation, TileMap
from .operands import DONE, PYTHON, operand, shared_by_lanes
from .tiles import move_tile

#: Alignment of a tile in shared memory (`tiles.SHARED_ALIGNMENT`), as a mask.
ALIGNMENT_MASK = 127


@native
def same_in_all(c: ptr[Context], lanes: u32, operands: ptr[Operand], count: u64) -> boolean:
    """Return True if the executing lanes issue one copy: the operands are the same in all of
    them."""
    for i in range(count):
        if not shared_by_lanes(c, lanes, operands[i]):
            return False
    return True


@native
def known_map(c: ptr[Context], pointer: u64, rank: u64) -> ptr[TileMap]:
    """The descriptor at an address; null if native code has not got it."""
    m = c.cluster.machine
    for i in range(m.map_count):
        if m.maps[i].pointer == pointer and u64(m.maps[i].rank) == rank:
            return m.maps[i]
    return ptr[TileMap](u64(0))


@native
def tile_at(
    c: ptr[Context], lanes: u32, t: ptr[TileMap], coordinates: ptr[Operand], at: ptr[i64]
) -> boolean:
    """Read the signed coordinates of a tile; False unless it starts at a multiple of 16 bytes."""
    for i in range(DIMENSIONS):
        at[i] = 0
    for i in range(t.rank):
        at[i] = i64(i32(u32(operand(c, lanes, coordinates[i]))))
    return u64(at[0]) * t.width & 15 == 0


@native
def can_land(k: ptr[Cluster], rank: u64, offset: u64, signal: u64, t: ptr[TileMap]) -> boolean:
    """Return True if a tile fits at an offset of a CTA and its mbarrier can be signalled
    natively."""
    b = barrier_at(k, signal)
    if not b or offset & ALIGNMENT_MASK != 0 or offset + t.shared_bytes > k.ctas[rank].smem_bytes:
        return False
    # Several destinations of a multicast may signal one barrier.
    room = i64(t.bytes) * i64(k.cta_count)
    return b.watched == 0 and i64(b.transactions) - room > 0 - TRANSACTION_LIMIT


@native
def signal_of(barrier: u64, rank: u64, group: u64) -> u64:
    """The mbarrier that a multicast to CTA `rank` signals (`isa.copies.tma`)."""
    holder = rank
    if group == 2:
        holder = rank & ~u64(1) | barrier >> 24 & 1
    return holder << 24 | barrier & 0xFFFFFF


@native
def load_ranks(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u64:
    """Mask of the CTAs that a tile is loaded to; 0 if Python must load it (see `tile_load`)."""
    if not same_in_all(c, lanes, o.operands, u64(9)):
        return 0
    t = known_map(c, operand(c, lanes, o.operands[2]), o.form[0])
    if not t or not tile_at(c, lanes, t, o.operands + 3, stack(i64, DIMENSIONS)):
        return 0
    target = operand(c, lanes, o.operands[0])
    barrier = operand(c, lanes, o.operands[1])
    k = c.cluster
    offset = target & 0xFFFFFF
    own = target >> 24
    ranks = u64(1) << (own & 15)
    if o.form[1] == 1:
        ranks = operand(c, lanes, o.operands[8]) & 0xFFFF
    elif own != barrier >> 24 and (o.form[2] != 2 or own ^ 1 != barrier >> 24):
        return 0
    if own > 15 or ranks >> u64(k.cta_count) != 0:
        return 0
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            if not can_land(k, rank, offset, load_signal(barrier, rank, o), t):
                return 0
    return ranks


@native
def load_signal(barrier: u64, rank: u64, o: ptr[Operation]) -> u64:
    """The mbarrier that the part of a load to CTA `rank` signals."""
    return signal_of(barrier, rank, o.form[2]) if o.form[1] == 1 else barrier


@native
def tile_load(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """cp.async.bulk.tensor to shared memory.

    Operands: target, mbarrier, descriptor, five coordinates, CTA mask. form: rank, whether there
    is a mask, cta_group (0 for none).
    """
    ranks = load_ranks(c, lanes, o)
    if ranks == 0:
        return PYTHON
    t = known_map(c, operand(c, lanes, o.operands[2]), o.form[0])
    at = stack(i64, DIMENSIONS)
    tile_at(c, lanes, t, o.operands + 3, at)
    offset = operand(c, lanes, o.operands[0]) & 0xFFFFFF
    barrier = operand(c, lanes, o.operands[1])
    k = c.cluster
    for rank in range(k.cta_count):
        if ranks >> rank & 1 == 1:
            signal = load_signal(barrier, rank, o)
            started = cycles()
            move_tile(k.ctas[rank].smem, offset, t, at, u32(1))
            k.machine.copy_ticks += cycles() - started
            change(barrier_at(k, signal), u64(0), 0 - i64(t.bytes))
            k.machine.loaded += t.bytes
    return DONE


@native
def tile_store(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """cp.async.bulk.tensor to global memory. Operands: source, descriptor, five coordinates.

    form: rank. The copy is performed at once, so that no bulk group has to wait for it.
    """
    if not same_in_all(c, lanes, o.operands, u64(2) + DIMENSIONS):
        return PYTHON
    t = known_map(c, operand(c, lanes, o.operands[1]), o.form[0])
    at = stack(i64, DIMENSIONS)
    if not t or not tile_at(c, lanes, t, o.operands + 2, at):
        return PYTHON
    for i in range(t.rank):
        if at[i] < 0:
            return PYTHON
    source = operand(c, lanes, o.operands[0])
    offset = source & 0xFFFFFF
    if source >> 24 != u64(c.cta.rank) or offset & ALIGNMENT_MASK != 0:
        return PYTHON
    if offset + t.shared_bytes > c.cta.smem_bytes:
        return PYTHON
    started = cycles()
    move_tile(c.cta.smem, offset, t, at, u32(0))
    c.cluster.machine.copy_ticks += cycles() - started
    c.cluster.machine.stored += t.bytes
    return DONE


@native
def bulk_group(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """cp.async.bulk.commit_group and wait_group: nothing is pending where copies are eager."""
    if c.chain:
        return DONE
    return PYTHON
