"""Cluster launch control: taking over clusters that have not been launched yet.

PTX ISA 9.7.13.16 (clusterlaunchcontrol). The response is opaque to programs; here it is four
words: 1 or 0 for success, then the ctaid (x, y, z) of the first CTA of the cancelled cluster.
"""

from __future__ import annotations

import numpy as np

from sm100_sim.errors import ClcError
from sm100_sim.events import AsyncOp
from sm100_sim.isa.shared import shared_address
from sm100_sim.isa.table import machine_op, unknown
from sm100_sim.warp import predicate_writer, reader, vector_writer, writer

_RESPONSE_BYTES = 16


@machine_op("clusterlaunchcontrol.try_cancel", statistics="clc.try_cancel")
def bind_try_cancel(instruction, kernel):
    """clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes
    {.multicast::cluster::all}.b128 [addr], [mbar]."""
    rest = list(instruction.modifiers)
    multicast = "multicast::cluster::all" in rest
    shared = "shared::cta" in rest
    expected = ["async"] + ["shared::cta"] * shared + ["mbarrier::complete_tx::bytes"]
    expected += ["multicast::cluster::all"] * multicast + ["b128"]
    if rest != expected:
        raise unknown(instruction, "modifiers of try_cancel")
    slot = shared_address(instruction.operands[0], not shared)
    signal = shared_address(instruction.operands[1], not shared)

    def execute(warp, lanes: int) -> None:
        if lanes & (lanes - 1):
            raise ClcError(f"try_cancel executed by {lanes.bit_count()} lanes; elect one")
        cta = warp.cta
        cluster, machine = cta.cluster, cta.cluster.machine
        if cta.saw_failed_cancel:
            raise ClcError("try_cancel after this CTA has observed a failed one is undefined")
        response, barrier = slot(warp, lanes), signal(warp, lanes)
        if response % _RESPONSE_BYTES:
            raise ClcError(f"response address {response:#x} is not a multiple of 16")
        ranks = range(len(cluster.ctas)) if multicast else (response >> 24,)
        machine.counters["clc.try_cancel"] += 1

        def perform() -> None:
            words = machine.cancel_cluster()
            for rank in ranks:
                target = cluster.ctas[rank]
                target.write_shared(rank << 24 | response & 0xFFFFFF, words)
                cluster.mbarrier(rank << 24 | barrier & 0xFFFFFF).complete_tx(_RESPONSE_BYTES)

        machine.submit(AsyncOp("clc.try_cancel", perform))

    return execute


@machine_op("clusterlaunchcontrol.query_cancel", statistics="clc.query_cancel", defines=(0,))
def bind_query_cancel(instruction, kernel):
    """clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, response and
    .get_first_ctaid{.v4.b32 | ::x|::y|::z.b32}.b128 d, response."""
    kind, rest = instruction.modifiers[0], instruction.modifiers[1:]
    target, response_op = instruction.operands
    response = reader(response_op, 128)
    if kind == "is_canceled" and rest == ("pred", "b128"):
        return _bind_is_canceled(predicate_writer(target), response)
    if kind == "get_first_ctaid" and rest == ("v4", "b32", "b128"):
        write = vector_writer(target)

        def all_words(warp, lanes: int) -> None:
            words = _words(warp, response)
            write(warp, lanes, np.stack((words[1], words[2], words[3], words[3] * 0)))

        return all_words
    if kind[:-1] == "get_first_ctaid::" and kind[-1] in "xyz" and rest == ("b32", "b128"):
        index, write_one = 1 + "xyz".index(kind[-1]), writer(target, 32)
        return lambda warp, lanes: write_one(warp, lanes, _words(warp, response)[index])
    raise unknown(instruction, "form of query_cancel")


def _words(warp, response) -> np.ndarray:
    """The response's four words per lane, (4, 32) uint32."""
    halves = response(warp)
    low = np.uint64(0xFFFFFFFF)
    return np.stack(
        (halves[0] & low, halves[0] >> np.uint64(32), halves[1] & low, halves[1] >> np.uint64(32))
    ).astype(np.uint32)


def _bind_is_canceled(write, response):
    def execute(warp, lanes: int) -> None:
        flags = _words(warp, response)[0]
        mask = sum(1 << lane for lane in range(32) if lanes >> lane & 1 and flags[lane] == 1)
        for lane in range(32):
            if lanes >> lane & 1 and flags[lane] not in (0, 1):
                raise ClcError(
                    f"query_cancel of {int(flags[lane]):#x}, which is not a response of "
                    "try_cancel: read before it arrived, or from the wrong address"
                )
        if mask != lanes:
            warp.cta.saw_failed_cancel = True
        write(warp, lanes, mask)

    return execute


