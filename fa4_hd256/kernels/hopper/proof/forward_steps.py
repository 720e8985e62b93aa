"""The steps of the forward as data: the proof that a configuration drains (`kernels.proof`).

Nothing is compiled from this table; `tests/operator/kernels/hopper/test_hopper_steps.py` holds the
kernel to it.  P is in registers: it is no operand here, and `touch` says when its registers, or
those of O, are used.

Q of each warpgroup has a buffer and barriers of its own, stage w of the arrays of all: here they
are rings of their own (`ByWarpgroup`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...context import CLAIM_STEPS
from ...plan.budgets import SmemPlan, WarpPlan
from ...plan.edges import EdgeTable
from ...proof.steps import (
    Act,
    Copy,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    done,
    fill,
    leave,
    loaded,
    multiply,
    read,
    touch,
    wait,
    wait_all,
    write,
)
from ..forward.config import ForwardConfig
from ..forward.e4m3.config import E4m3ForwardConfig

FIRST, LAST, NOT_FIRST, NOT_LAST = When.FIRST, When.LAST, When.NOT_FIRST, When.NOT_LAST


@dataclass(frozen=True)
class ByWarpgroup:
    """The plans of a configuration with Q's barriers and buffers of each warpgroup named apart."""

    config: ForwardConfig | E4m3ForwardConfig

    @property
    def title(self) -> str:
        return self.config.title

    @property
    def warps(self) -> WarpPlan:
        return self.config.warps

    @property
    def edges(self) -> EdgeTable:
        edges = []
        for edge in self.config.edges.edges:
            if edge.name not in ("q_loaded", "q_free"):
                edges.append(edge)
                continue
            for w in range(edge.stages):
                name = edge.name.replace("q", q_name(w))
                by = f"consumers {w}" if edge.producer == "consumers" else edge.producer
                edges.append(replace(edge, name=name, stages=1, producer=by))
        return EdgeTable(tuple(edges))

    @property
    def smem(self) -> SmemPlan:
        q, *others = self.config.smem.regions
        return SmemPlan((*(replace(q, name=q_name(w), stages=1) for w in range(q.stages)), *others))


def q_name(warpgroup: int) -> str:
    return f"q{warpgroup}"


def forward_steps(config: ForwardConfig) -> StepTable:
    """Return the table, with Q of each warpgroup by itself."""
    ctas, q_rings = config.ctas, [q_name(w) for w in range(config.warpgroups)]
    rings = tuple(map(loaded, (*q_rings, "k", "v")))
    keys, values = (fill(name.lower(), Copy(name, is_shared=ctas > 1)) for name in ("K", "V"))
    queries = tuple(fill(name, "Q") for name in q_rings)
    first_keys, of_tile = Act((keys,), is_ahead=True), Act(queries, FIRST, is_ahead=True)
    acts: tuple[Act, ...] = (first_keys, of_tile, Act((values,)))
    loads: tuple[Role, ...] = ()
    if config.gathers:
        loads, acts = (Role("load", (of_tile,)),), (first_keys, Act((values,)))
    of_keys = Role(
        "gather" if config.gathers else "load",
        acts,
        end=(wait_all("k_free"), wait_all("v_free")),
        claims=CLAIM_STEPS,
    )
    consumers = tuple(consumer(w, config.skips) for w in range(config.warpgroups))
    return StepTable(rings, roles=(of_keys, *loads, *consumers), meets=ctas > 1)


def consumer(
    warpgroup: int,
    skips: bool,
    edges: tuple[str, str] = ("v_loaded", "v_free"),
    value: tuple[str, str] = ("v", "V"),
) -> Role:
    """Return the role of a warpgroup: QK of a step before PV of the one before it. edges: of V as
    it is multiplied. value: its ring, and what is in it."""
    full, free = edges
    q = q_name(warpgroup)
    scores = wait("k_loaded"), multiply("QK", read(q, "Q"), read("k", "K"))
    give_back = arrive(free)
    sum_up = multiply("PV", read(*value))
    skip = wait("k_loaded"), arrive("k_free"), wait(full), arrive(free)
    idle = leave(q, "Q"), arrive(f"{q}_free")
    return Role(
        f"consumers {warpgroup}",
        (
            Act((*scores, done(0), arrive("k_free")), FIRST, is_ahead=True),
            Act(scores, NOT_FIRST, is_ahead=True),
            Act((sum_up, done(1)), NOT_LAST),
            Act((arrive("k_free"),), NOT_FIRST, is_ahead=True),
            Act((arrive(f"{q}_free"),), LAST, is_ahead=True),
            # P of the step, and the V that it is multiplied with.
            Act((touch("QK"), wait(full)), is_ahead=True),
            Act((done(0), touch("PV"), give_back), NOT_LAST),
            Act((sum_up, done(0), touch("PV"), give_back), LAST),
        ),
        of="consumers",
        enter=(wait(f"{q}_loaded"),),
        skip=skip if skips else (),
        idle=idle if skips else (),
    )


def e4m3_forward_steps(config: E4m3ForwardConfig) -> StepTable:
    """Return the table, with Q of each warpgroup by itself."""
    q_rings = [q_name(w) for w in range(config.warpgroups)]
    of_loads = (*q_rings, "k", *(("v",) if config.transposes else ()))
    rings = (*map(loaded, of_loads), Ring("columns", "columns_written", "columns_free"))
    queries = tuple(fill(name, "Q") for name in q_rings)
    values, v_free = fill("columns", "V^T"), "columns_free"
    if config.transposes:
        values, v_free = fill("v", "V"), "v_free"
    load = Role(
        "load",
        (Act((fill("k", "K"),)), Act(queries, When.FIRST), Act((values,))),
        end=(wait_all("k_free"), wait_all(v_free)),
        claims=CLAIM_STEPS,
    )
    consumers = (
        consumer(w, config.skips, ("columns_written", "columns_free"), ("columns", "V^T"))
        for w in range(config.warpgroups)
    )
    transposers = (TRANSPOSERS,) if config.transposes else ()
    return StepTable(rings, roles=(load, *transposers, *consumers))


#: Role of the warps that transpose V.
TRANSPOSERS = Role(
    "transposers",
    (
        Act(
            (
                wait("v_loaded"),
                wait("columns_free"),
                read("v", "V"),
                write("columns", "V^T"),
                arrive("columns_written"),
                arrive("v_free"),
            )
        ),
    ),
    end=(wait_all("columns_free"),),
)
