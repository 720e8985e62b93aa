"""Cluster launch control: taking over clusters of the grid that have not been launched yet.

PTX ISA 9.3, "clusterlaunchcontrol.try_cancel" and ".query_cancel". The response is opaque there,
but kernels read its words, so they lie as on the hardware:

======  ========  ======================================================================
word    bits      meaning
======  ========  ======================================================================
0       31 .. 0   ctaid.x of the first CTA of the cancelled cluster
1       15 .. 0   its ctaid.y
1       31 .. 16  its ctaid.z
2       0         1: a cluster was cancelled; 0: none was, and words 0 and 1 are undefined
2       31 .. 1   undefined
3       31 .. 0   undefined
======  ========  ======================================================================

Two sources: what ptxas 12.8 and 13.1 make of query_cancel for sm_100a, sm_103a and sm_120a (the
words masked and shifted, nothing else), and kernels measured on B200s that read the words without
it (`read_clc_payload` of cuDNN's nvidia-cudnn-frontend 1.32.0). No source says what the undefined
bits hold; here they are poison, so that whoever relies on them sees a value that fits nothing.

Programs may store such words themselves, all zero for "no cluster", and have query_cancel decode
them (`store_invalid_response` of CUTLASS's sm100_tile_scheduler.hpp).
"""

from __future__ import annotations

import functools

import numpy as np

from sm100_sim.errors import BarrierError, ClcError
from sm100_sim.state.warp import lane_array, predicate_writer, reader, vector_writer, writer

from .columns import Effect, Event, Recorded, Rule, Ties
from .shared import shared_address, submit
from .table import effect_of, machine_op, split_modifiers, unknown

RESPONSE_BYTES = 16
#: The bit of word 2 that tells whether a cluster was cancelled.
CANCELLED = 1
#: Words 0 and 1 of a request that failed: no ctaid.x, ctaid.y or ctaid.z of any grid.
CTAID_POISON = 0xFFF0_5EED, 0xFFFF_FFFF
#: Undefined bits of words 2 and 3.
MARKS = 0x0C1C_0DE0, 0xBADC_0C1C
#: Fourth element of get_first_ctaid, whose contents are unspecified.
FOURTH_POISON = 0xFFF4_5EED


@machine_op(
    "clusterlaunchcontrol.try_cancel",
    statistics="clc.try_cancel",
    rule=Rule.BY_OBJECTS,
    trace=Recorded.ENTRY,
    event=Event.CLC_TRY_CANCEL,
    effect=Effect.CANCEL,
    ties=Ties.ALWAYS,
)
def bind_try_cancel(instruction, kernel):
    """clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes
    {.multicast::cluster::all}.b128 [addr], [mbar].

    With multicast the response and its 16 bytes of tx-count go to the same offsets of every CTA.
    """
    _, space, _, multicast, _ = split_modifiers(
        instruction, ("async",), ("shared::cta", ""), ("mbarrier::complete_tx::bytes",),
        ("multicast::cluster::all", ""), ("b128",),
    )  # fmt: skip
    slot, signal = (shared_address(operand, not space) for operand in instruction.operands)
    effect = effect_of(instruction)

    def execute(warp, lanes: int) -> None:
        cta = warp.cta
        cluster, machine = cta.cluster, cta.cluster.machine
        response, barrier = slot(warp, lanes), signal(warp, lanes)
        _check(cta, lanes, response, barrier)
        machine.counters["clc.try_cancel"] += 1
        response, barrier = response & 0xFFFFFF, barrier & 0xFFFFFF
        # One cluster for all copies of the response, which arrive on their own.
        words = functools.cache(lambda: response_words(machine.cancel_cluster()))
        for target in cluster.ctas if multicast else (cta,):
            place = target.rank << 24 | barrier
            submit(
                warp, instruction, effect,
                functools.partial(_deliver, target, response, place, words),
                writes=((target, response, RESPONSE_BYTES, place),),
            )  # fmt: skip
        machine.end_turn()

    return execute


def _deliver(target, response: int, barrier: int, words) -> None:
    """Write a response at a shared offset of a CTA and complete its bytes on the CTA's mbarrier."""
    if not target.running:
        raise ClcError(f"the response is multicast to CTA {target.ctaid}, which has exited")
    target.write_shared(target.rank << 24 | response, words())
    target.cluster.mbarrier(barrier).complete_tx(RESPONSE_BYTES)


def _check(cta, lanes: int, response: int, barrier: int) -> None:
    if lanes & lanes - 1:
        raise ClcError(
            f"try_cancel executed by {lanes.bit_count()} lanes, each a request; elect one"
        )
    if cta.saw_failed_cancel:
        raise ClcError(
            "try_cancel after this CTA has observed that an earlier one failed, which is undefined"
        )
    if response % RESPONSE_BYTES:
        raise ClcError(f"response at shared address {response:#x}; accepted: multiples of 16")
    if response >> 24 != cta.rank or barrier >> 24 != cta.rank:
        raise BarrierError(
            f"try_cancel names CTA ranks {response >> 24} (response) and {barrier >> 24} "
            f"(mbarrier); both must be of the executing CTA, rank {cta.rank}"
        )


def response_words(first: tuple[int, int, int] | None) -> np.ndarray:
    """Words (4,) uint32 of a response: `first` is the first ctaid, None if none was cancelled.

    y and z are below 65,536, as in every grid that can be launched.
    """
    if first is None:
        return np.array((*CTAID_POISON, *MARKS), np.uint32)
    x, y, z = first
    return np.array((x, z << 16 | y, MARKS[0] | CANCELLED, MARKS[1]), np.uint32)


def of_hardware(words: np.ndarray) -> np.ndarray:
    """Return True where words, uint32 (4, ...), are a response that try_cancel has written."""
    return (words[2] & ~np.uint32(CANCELLED) == MARKS[0]) & (words[3] == MARKS[1])


def failed(words: np.ndarray) -> np.ndarray:
    """Return True where words, uint32 (4, ...), are the response to a request that has failed."""
    return of_hardware(words) & (words[2] & CANCELLED == 0)


@machine_op(
    "clusterlaunchcontrol.query_cancel",
    statistics="clc.query_cancel",
    defines=(0,),
    rule=Rule.COMPUTES,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.ALWAYS,
)
def bind_query_cancel(instruction, kernel):
    """clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, response and
    .get_first_ctaid{.v4.b32 | ::x.b32 | ::y.b32 | ::z.b32}.b128 d, response."""
    kind, rest = instruction.modifiers[0], instruction.modifiers[1:]
    target, response_op = instruction.operands
    response = reader(response_op, 128)
    if kind == "is_canceled" and rest == ("pred", "b128"):
        return _bind_is_canceled(predicate_writer(target), response)
    if kind == "get_first_ctaid" and rest == ("v4", "b32", "b128"):
        write = vector_writer(target)
        return lambda warp, lanes: write(warp, lanes, _first_ctaid(response(warp), lanes))
    if rest == ("b32", "b128") and kind in (f"get_first_ctaid::{axis}" for axis in "xyz"):
        row, write_one = "xyz".index(kind[-1]), writer(target, 32)
        return lambda warp, lanes: write_one(warp, lanes, _first_ctaid(response(warp), lanes)[row])
    raise unknown(instruction, "form of query_cancel")


def _words(halves: np.ndarray, lanes: int) -> np.ndarray:
    """The four words of each lane's response, uint32 (4, 32), from uint64 (2, 32) registers."""
    words = np.empty((4, 32), np.uint32)
    words[0::2], words[1::2] = halves & np.uint64(0xFFFFFFFF), halves >> np.uint64(32)
    of_program = (words[2] & ~np.uint32(CANCELLED) | words[3]) == 0
    foreign = ~(of_hardware(words) | of_program) & lane_array(lanes)
    if foreign.any():
        lane = int(foreign.argmax())
        raise ClcError(
            f"query_cancel of {' '.join(f'{int(word):08x}' for word in words[:, lane])}, which is "
            "no response of try_cancel: it was read before it arrived, or from a wrong address; "
            "words that a program stores itself have zeros in the undefined bits",
            lane=lane,
        )
    return words


def _cancelled(words: np.ndarray, lanes: int) -> int:
    flags = words[2].tolist()
    return sum(1 << lane for lane in range(32) if lanes >> lane & flags[lane] & CANCELLED)


def _first_ctaid(halves: np.ndarray, lanes: int) -> np.ndarray:
    """x, y, z and the unspecified fourth element, uint32 (4, 32).

    Undefined for a request that failed, but compilers execute it before the test of is_canceled.
    """
    x, packed, *_ = _words(halves, lanes)
    return np.stack((x, packed & 0xFFFF, packed >> 16, np.full_like(x, FOURTH_POISON)))


def _bind_is_canceled(write, response):
    def execute(warp, lanes: int) -> None:
        words = _words(response(warp), lanes)
        if (failed(words) & lane_array(lanes)).any():
            warp.cta.saw_failed_cancel = True
        write(warp, lanes, _cancelled(words, lanes))

    return execute
