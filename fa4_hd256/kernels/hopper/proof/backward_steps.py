"""The steps of the backward's kernels as data: the proof that a plan drains (`kernels.proof`).

Nothing is compiled from these tables; `tests/operator/kernels/hopper/test_hopper_steps.py` holds
the kernels to them. An MMA's A in registers is no operand here; `touch` says when its registers are
used.
"""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    Act,
    Action,
    Copy,
    Ring,
    Role,
    StepTable,
    When,
    again,
    arrive,
    done,
    fill,
    loaded,
    multiply,
    read,
    read_oldest,
    touch,
    wait,
)

WARPGROUPS = 2

FIRST, LAST, NOT_FIRST, NOT_LAST = When.FIRST, When.LAST, When.NOT_FIRST, When.NOT_LAST


def _table(
    rings: tuple[Ring, ...], loads: tuple[Act, ...], acts: tuple[Act, ...], crosses: bool = False
) -> StepTable:
    gradient = Role("gradient", acts, parts=WARPGROUPS, crosses=crosses)
    return StepTable(rings, (Role("load", loads, claims=CLAIM_STEPS), gradient), meets=True)


def _ahead(when: When, *actions: Action, beside: bool | None = None) -> Act:
    return Act(actions, when, is_ahead=True, beside=beside)


def _here(when: When, *actions: Action, beside: bool | None = None) -> Act:
    return Act(actions, when, beside=beside)


def _passing(content: str, ring: str, *stats: str) -> Action:
    """Rows that pass, half of the columns by each CTA; stats: of the same rows."""
    copies = (Copy(name, name.lower()) for name in stats)
    return fill(ring, Copy(content, is_shared=True), *copies)


def dv_steps(capped: bool) -> StepTable:
    """Return the steps. capped: with slopes S of a step follows dS of the one before."""
    score = (wait("q_loaded"), multiply("S", read("k", "K"), read("q", "Q")))
    gradient = wait("dout_loaded"), multiply("dP", read("v", "V"), read("dout", "dO"))
    total = (multiply("dV", read("dout", "dO")),)
    weights = touch("S"), read("q", "LSE"), arrive("q_free")
    # dS, out of dP.
    store = touch("dP"), read("dout", "delta")
    # S of the step ahead, and the MMAs under way when dP is done.
    early, late, pending = ((), score, 1) if capped else (score, (), 2)
    return _table(
        (loaded("k"), loaded("v"), loaded("q", "q", "lse"), loaded("dout", "dout", "delta")),
        (
            _here(FIRST, fill("k", "K")),
            _here(When.EACH, _passing("Q", "q", "LSE")),
            _here(When.EACH, _passing("dO", "dout", "delta")),
            _here(FIRST, fill("v", "V")),
        ),
        (
            _here(When.EACH, *gradient),
            _ahead(FIRST, wait("k_loaded")),
            _ahead(When.EACH, *early, beside=True),
            _here(When.EACH, *total),
            _here(When.EACH, done(pending), beside=True),
            _here(When.EACH, done(1), beside=False),
            _here(LAST, arrive("v_free")),
            _here(When.EACH, *store),
            _here(When.EACH, again("dout_loaded"), beside=True),
            _ahead(When.EACH, *late, done(pending - 1), beside=True),
            _ahead(When.EACH, *score, done(0), beside=False),
            _ahead(LAST, arrive("k_free")),
            _ahead(When.EACH, *weights),
            _here(When.EACH, again("dout_loaded"), beside=True),
            _here(When.EACH, done(0), touch("dV"), arrive("dout_free")),
            _ahead(FIRST, wait("v_loaded")),
        ),
        crosses=True,
    )


PIECES = 2  # of Q or K in a step of the GEMMs


def products_steps() -> StepTable:
    """Sums of dK and of dQ alike: X is Q or K."""
    begin, second = (
        (wait("rows_loaded"), multiply("sum", read("ds", "dS"), read("rows", "X", piece)))
        for piece in range(PIECES)
    )
    first = wait("ds_loaded"), *begin
    end = arrive("rows_free"), arrive("ds_free")
    rows = fill("rows", Copy("X", is_shared=True), pieces=PIECES)
    return _table(
        (loaded("ds"), loaded("rows")),
        (_here(When.EACH, fill("ds", "dS"), rows),),
        (
            _ahead(FIRST, *first),
            _here(NOT_LAST, *second, done(1), arrive("rows_free")),
            _ahead(NOT_FIRST, *first),
            _here(NOT_LAST, done(1), *end),
            _here(LAST, *second, done(1), arrive("rows_free"), done(0), *end, touch("sum")),
        ),
    )


#: Operands that stay for a tile, and those that pass, by the result of a kernel.
STAYS = {"dq": ("Q", "dO"), "dk": ("K", "V"), "dv": ("K",)}
PASSES = {"dq": ("K", "V"), "dk": ("Q", "dO"), "dv": ("Q", "dO")}


def single_steps(result: str, capped: bool) -> StepTable:
    """Return the steps of "dq", "dk" or "dv".  capped: with slopes dP follows P."""
    x, y = PASSES[result]
    stays, of_ds = STAYS[result], result != "dv"
    lse = ("LSE",) if result != "dq" else ()
    delta = ("delta",) if result == "dk" else ()
    score = wait("x_loaded"), multiply("S", read("a", stays[0]), read("x", x))
    gradient: tuple[Action, ...] = ()
    if of_ds:
        gradient = wait("y_loaded"), multiply("dP", read("a", stays[1]), read("y", y))
        total: tuple[Action, ...] = (multiply("sum", read_oldest("x", x)),)
    else:
        total = wait("y_loaded"), multiply("sum", read("y", y))
    probabilities = touch("S"), *(read("x", name) for name in lse)
    weights = (touch("dP"), *(read("y", name) for name in delta)) if of_ds else ()
    given, kept = ("y_free", "x_free") if of_ds else ("x_free", "y_free")
    before, after = (gradient, ()) if not capped else ((), gradient)
    late = (*after, *((done(0),) if after else ()))
    end = *weights, again("a_loaded"), arrive(given)
    return _table(
        (loaded("a", "a"), loaded("x", "x", *map(str.lower, lse)), loaded("y", "y", *delta)),
        (
            _here(FIRST, fill("a", *map(Copy, stays, "ag"))),
            _here(When.EACH, _passing(x, "x", *lse), _passing(y, "y", *delta)),
        ),
        (
            _ahead(FIRST, wait("a_loaded"), *score, *before, done(0), *probabilities, *late, *end),
            _ahead(NOT_FIRST, *score, *before),
            _here(NOT_LAST, *total, done(0 if capped else 1)),
            _ahead(NOT_FIRST, *probabilities, *late, *end),
            _here(NOT_LAST, done(0), touch("sum"), arrive(kept)),
            _here(LAST, arrive("a_free"), *total, done(0), touch("sum"), arrive(kept)),
        ),
    )
