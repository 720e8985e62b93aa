"""st.async and red.async: stores and reductions to shared memory of the cluster that complete on an
mbarrier there (PTX ISA 9.3, "st.async", "red.async").

Each executing lane writes one value, or a vector, and completes its bytes of the barrier's
tx-count. Values are read at issue.
"""

from __future__ import annotations

import numpy as np

from sm100_sim.errors import BarrierError, MemoryFault, Misaligned
from sm100_sim.state.warp import Warp, reader

from ..atomics import combiner, lane_source
from ..columns import Effect, Event, Recorded, Rule, Ties
from ..shared import require_cluster, submit
from ..table import effect_of, machine_op, split_modifiers, unknown

_SPACE = ("shared::cluster", "")
_COMPLETION = "mbarrier::complete_tx::bytes"
_STORED = {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
_REDUCED = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "b32": np.uint32,
            "b64": np.uint64}  # fmt: skip


def _addresses(instruction, operand):
    if operand.base is None:
        raise unknown(instruction, "an address must be a register, a symbol or an offset to one")
    return reader(operand, 32)


@machine_op(
    "st.async",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.LANES,
    event=Event.STORE_ASYNC,
    effect=Effect.STORE,
    ties=Ties.NEVER,
)
def bind_store(instruction, kernel):
    """st.async{.weak}{.shared::cluster}.mbarrier::complete_tx::bytes{.v2,.v4}.type [a], b, [mbar]
    and the same of st.async.weak."""
    _, _, _, vector, kind = split_modifiers(
        instruction, ("weak", ""), _SPACE, (_COMPLETION,), ("v2", "v4", ""), tuple(_STORED)
    )
    size = _STORED[kind]
    source = lane_source(instruction.operands[1], size)
    count = int(vector[1:]) if vector else 1
    if len(source.readers) != count:
        raise unknown(instruction, "the number of values does not agree with the vector")
    return _execution(
        instruction, count * size, lambda warp, lane: (source.lane(warp, lane, np.uint8), None)
    )


@machine_op(
    "red.async",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.REDUCE,
    ties=Ties.UNLESS_SHARED,
)
def bind_reduction(instruction, kernel):
    """red.async{.relaxed}{.cluster}{.shared::cluster}.mbarrier::complete_tx::bytes.op.type [a], b,
    [mbar]."""
    *_, operation, kind = split_modifiers(
        instruction, ("relaxed", ""), ("cluster", ""), _SPACE, (_COMPLETION,),
        ("inc", "dec", "min", "max", "add", "and", "or", "xor"), tuple(_REDUCED),
    )  # fmt: skip
    dtype = np.dtype(_REDUCED[kind])
    source = lane_source(instruction.operands[1], dtype.itemsize)
    combine = combiner(instruction, operation, kind)
    return _execution(
        instruction, dtype.itemsize, lambda warp, lane: (source.lane(warp, lane, dtype), combine)
    )


def _execution(instruction, nbytes: int, value):
    """Executor; `value(warp, lane)` gives an array and how to combine it with memory, or None."""
    targets = _addresses(instruction, instruction.operands[0])
    signals = _addresses(instruction, instruction.operands[2])
    effect = effect_of(instruction)

    def execute(warp: Warp, lanes: int) -> None:
        require_cluster(warp, instruction.opcode)
        cluster = warp.cta.cluster
        writes, values = [], []
        places, barriers = targets(warp).tolist(), signals(warp).tolist()
        for lane in range(32):
            if lanes >> lane & 1:
                place, signal = places[lane], barriers[lane]
                writes.append(_checked(cluster, place, nbytes, signal))
                values.append(value(warp, lane))

        def perform() -> None:
            for (cta, offset, size, signal), (data, combine) in zip(writes, values, strict=True):
                cell = cta.smem[offset : offset + size].view(data.dtype)
                cell[:] = data if combine is None else combine(cell.copy(), data)
                cluster.mbarrier(signal).complete_tx(size)

        submit(warp, instruction, effect, perform, writes=tuple(writes))

    return execute


def _checked(cluster, place: int, nbytes: int, signal: int) -> tuple:
    """Return (CTA, offset, bytes, barrier) of one lane."""
    rank, offset = place >> 24, place & 0xFFFFFF
    cta = cluster.cta(rank)
    cta.require_present(f"an asynchronous store to its shared offset {offset:#x}")
    if place % nbytes:
        raise Misaligned(f"asynchronous store of {nbytes} bytes at shared address {place:#x}")
    if offset + nbytes > cta.smem.size:
        raise MemoryFault(
            f"asynchronous store of {nbytes} bytes at shared offset {offset:#x} of CTA rank "
            f"{rank}, which has {cta.smem.size} bytes"
        )
    if signal >> 24 != rank:
        raise BarrierError(
            f"asynchronous store to CTA rank {rank} signals a barrier in CTA rank {signal >> 24}; "
            "it must be in the destination CTA"
        )
    return cta, offset, nbytes, signal
