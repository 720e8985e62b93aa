"""The steps of the decode kernel as data: S^T = K Q^T and O^T += V^T P^T for 128 keys at a time.

K and V come in halves of 128 columns, a buffer each: the halves of K are added up in S, those of V
give the two halves of O, each 128 of the head's columns.  In e4m3 a buffer holds a whole tile of K
or V, and Q is written by a role of the kernel (`scaled`).  In NVFP4 that role writes K and V, too,
in tensor memory (`nvfp4`).
"""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    MMA,
    Act,
    Action,
    Copy,
    Ring,
    Role,
    StepTable,
    When,
    act,
    add,
    again,
    arrive,
    change,
    extend,
    fill,
    loaded,
    multiply,
    read,
    wait,
    wait_all,
    write,
)
from ..decode.config import HALVES, DecodeConfig

RINGS = (
    loaded("kv"),
    loaded("q"),
    # QK of the step after the next writes there; before it is issued, P of S has been waited for.
    Ring("s", full="s_done"),
    # P is written when the PV before is done, which read it.
    Ring("p", full="p_done"),
    # O is rescaled, or read, between o_done and p_done, without which no PV follows.
    Ring("o", full="o_done", regions=tuple(f"o{half}" for half in HALVES)),
)


def decode_steps(config: DecodeConfig) -> StepTable:
    """Return the table.  QK of the following step goes before PV."""
    if config.is_scaled:
        return _scaled_steps(config)
    load = (
        act(fill("q", "Q"), when=When.FIRST, is_ahead=True),
        act(*(fill("kv", f"K{half}") for half in HALVES), is_ahead=True),
        act(*(fill("kv", f"V{half}") for half in HALVES)),
    )
    scores, sums = (
        [action for half in HALVES for action in of_half(half)] for of_half in (_qk, _pv)
    )
    ends = wait_all("kv_free"), wait_all("q_free")
    return StepTable(RINGS, (_load(load, *ends), _mma(scores, sums), _softmax()))


def _load(acts: tuple[Act, ...], *ends: Action) -> Role:
    return Role("load", acts, end=ends, claims=CLAIM_STEPS, crosses=True)


def _mma(scores: list[Action], sums: list[Action]) -> Role:
    return Role(
        MMA,
        (
            act(wait("q_loaded"), when=When.FIRST, is_ahead=True),
            act(*scores, arrive("s_done"), is_ahead=True),
            act(arrive("q_free"), when=When.LAST, is_ahead=True),
            act(wait("p_done"), *sums, arrive("o_done")),
        ),
        crosses=True,
    )


def _qk(half: int) -> tuple[Action, ...]:
    """S from a half of the columns."""
    result = write("s", "S") if half == HALVES[0] else extend("s", "S")
    product = multiply(f"QK{half}", read("kv", f"K{half}"), read("q", "Q"), result)
    return wait("kv_loaded"), product, arrive("kv_free")


def _pv(half: int) -> tuple[Action, ...]:
    """A half of O."""
    operands = read("kv", f"V{half}"), read("p", "P"), add("o", f"O{half}")
    return wait("kv_loaded"), multiply(f"PV{half}", *operands), arrive("kv_free")


def _scaled_steps(config: DecodeConfig) -> StepTable:
    """Return the steps for tiles of K and V in e4m3 or NVFP4, each in one buffer."""
    ring = "operand" if config.nvfp4 else "kv"
    qk = multiply("QK", read(ring, "K"), read("q", "Q"), write("s", "S"))
    sums = [
        multiply(f"PV{half}", read(ring, "V"), read("p", "P"), add("o", f"O{half}"))
        for half in HALVES
    ]
    take, give = wait(f"{ring}_loaded"), arrive(f"{ring}_free")
    queries = Role(
        "queries",
        (act(fill("rows", "raw Q"), when=When.FIRST),),
        # The last commits arrive at this CTA's barriers.
        end=(wait_all("q_free"),),
    )
    bring = (
        wait("rows_loaded"),
        wait("factors_free"),
        read("rows", "raw Q"),
        write("q", "Q"),
        write("factors", "F"),
        arrive("q_loaded"),
        arrive("factors_ready"),
    )
    # Every step reads the scales of the rows when it has S.
    enter = act(wait("factors_ready"), when=When.FIRST, is_ahead=True)
    leave = act(arrive("factors_free"), when=When.LAST, is_ahead=True)
    if config.nvfp4:
        converting = Role(
            "convert",
            (
                act(*bring, when=When.FIRST, is_ahead=True),
                act(*_convert("K", config.gathers), is_ahead=True),
                act(*_convert("V", config.gathers)),
            ),
            end=(wait_all("operand_free"),),
            crosses=True,
        )
    else:
        converting = Role("quantise", (act(*bring, when=When.FIRST),))
    load = act(*_fills("K", config), is_ahead=True), act(*_fills("V", config))
    roles = (
        _load(load, wait_all("kv_free")),
        _mma([take, qk, give], [take, *sums, give]),
        _softmax((read("factors", "F"),), (enter,), (leave,)),
        queries,
        converting,
    )
    return StepTable(_scaled_rings(config), roles)


def _fills(content: str, config: DecodeConfig) -> tuple[Action, ...]:
    if not config.nvfp4:
        return (fill("kv", content),)
    codes, scales = Copy(f"{content} codes"), Copy(f"{content} scales", "kv_scales")
    if config.gathers:
        return fill("kv", codes), fill("scales", scales)
    return (fill("kv", codes, scales),)


def _scaled_rings(config: DecodeConfig) -> tuple[Ring, ...]:
    rings = (
        *RINGS,
        # In the bytes of Q's buffer, which is refilled when both have been read.
        Ring("rows", full="rows_loaded", free="q_free", over="q"),
        Ring("factors", full="factors_ready", free="factors_free"),
    )
    if not config.nvfp4:
        return rings
    if config.gathers:
        of_keys: tuple[Ring, ...] = (loaded("kv"), loaded("scales", "kv_scales"))
    else:
        of_keys = (loaded("kv", "kv", "kv_scales"),)
    return *of_keys, loaded("operand"), *rings[1:]


def _convert(content: str, gathers: bool) -> tuple[Action, ...]:
    ring = "scales" if gathers else "kv"
    return (
        wait("kv_loaded"),
        *((wait("scales_loaded"),) if gathers else ()),
        wait("operand_free"),
        read("kv", f"{content} codes"),
        read(ring, f"{content} scales"),
        write("operand", content),
        arrive("kv_free"),
        *((arrive("scales_free"),) if gathers else ()),
        arrive("operand_loaded"),
    )


def _softmax(
    beside: tuple[Action, ...] = (), enter: tuple[Act, ...] = (), leave: tuple[Act, ...] = ()
) -> Role:
    results = [f"O{half}" for half in HALVES]
    return Role(
        "softmax",
        (
            *enter,
            act(wait("s_done"), read("s", "S"), *beside, is_ahead=True),
            # The edge of the tile before, which has been waited for; without one this does not
            # block.
            act(again("o_done"), when=When.FIRST, is_ahead=True),
            act(wait("o_done"), *(change("o", name) for name in results), when=When.NOT_LAST),
            act(write("p", "P"), arrive("p_done"), is_ahead=True),
            *leave,
            act(wait("o_done"), *(read("o", name) for name in results), when=When.LAST),
        ),
    )
