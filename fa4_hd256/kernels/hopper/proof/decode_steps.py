"""The steps of the decode kernel as data: the proof that a configuration drains (`kernels.proof`).

Nothing is compiled from this table; `tests/operator/kernels/hopper/test_hopper_steps.py` holds the
kernel to it. K and V are read into registers and given back before they are multiplied; P is in
shared memory and is no operand here: the softmax's own barriers stand around it (`kernel` NOTE
[barriers of a step]), as one does behind Q in f16 (`kernels.forward.e4m3` NOTE [Q in place]).
"""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    Act,
    Action,
    Copy,
    Role,
    StepTable,
    When,
    arrive,
    done,
    fill,
    loaded,
    multiply,
    read,
    touch,
    wait,
    wait_all,
)
from ..decode.config import QK_PARTS, E4m3Config


def decode_steps(config: E4m3Config) -> StepTable:
    """Return the table: parts of K by themselves, one group where registers have room."""
    load = Role(
        "gather" if config.gathers else "load",
        (Act(tuple(fill("kv", *_copies(content, config.nvfp4)) for content in "KV")),),
        end=(wait_all("kv_free"),),
        claims=CLAIM_STEPS,
    )
    queries = Role("queries", (Act((fill("q", "Q"),), When.FIRST),), end=(wait_all("q_free"),))
    products, uses = _products_of_k(QK_PARTS, config.part_buffers)
    scores = (*_take("K", config.nvfp4), *products)
    parts = config.value_parts
    names = ["PV"] if parts == 1 else [f"PV{part}" for part in range(parts)]
    values = (
        *_take("V", config.nvfp4),
        done(0),
        *uses,
        *map(multiply, names),
        done(0),
        *map(touch, names),
    )
    consumers = Role(
        "consumers",
        (Act((*scores, *values)), Act((arrive("q_free"),), When.LAST)),
        enter=(wait("q_loaded"),),
    )
    regions = ("kv", "kv_scales") if config.nvfp4 else ()
    return StepTable((loaded("kv", *regions), loaded("q")), (load, queries, consumers))


def _copies(content: str, has_scales: bool) -> tuple[Copy | str, ...]:
    return (content, Copy(f"s{content}", "kv_scales")) if has_scales else (content,)


def _products_of_k(parts: int, buffers: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Return (QK, uses of unfinished results).  A part's registers wait for its MMA."""
    queries = read("q", "Q")
    if buffers == parts:
        return (multiply("QK", queries),), (touch("QK"),)
    names = [f"QK{part}" for part in range(parts)]
    found: list[Action] = []
    for part, name in enumerate(names):
        if part >= buffers:
            found += [done(buffers - 1), touch(names[part - buffers])]
        found.append(multiply(name, queries))
    return tuple(found), tuple(map(touch, names[-buffers:]))


def _take(content: str, has_scales: bool) -> tuple[Action, ...]:
    scales = (read("kv", f"s{content}"),) if has_scales else ()
    return wait("kv_loaded"), read("kv", content), *scales, arrive("kv_free")
