"""The steps of the backward's pair kernels as data, one table a kernel.

Contents with a c are columns: the second half of an operand that a pair needs in two halves
(NOTE [two halves of K] in dq.py).
"""

from __future__ import annotations

from ...context import CLAIM_STEPS
from ...proof.steps import (
    MMA,
    Act,
    Action,
    Ring,
    Role,
    StepTable,
    When,
    act,
    add,
    arrive,
    extend,
    fill,
    loaded,
    multiply,
    read,
    wait,
    wait_all,
    write,
)

PIECES = 2  # buffers of Q or dO that a unit of dK/dV takes: 128 columns, or 128 queries, each

FIRST, LAST = When.FIRST, When.LAST


def _load(*acts: Act, rings: tuple[Ring, ...]) -> Role:
    ends = tuple(wait_all(ring.freed) for ring in rings)
    return Role("load", acts, end=ends, claims=CLAIM_STEPS, crosses=True)


def _mma(*acts: Act, ends: tuple[str, ...]) -> Role:
    return Role(MMA, acts, end=tuple(map(wait_all, ends)), crosses=True)


def _ahead(*actions: Action, when: When = When.EACH) -> Act:
    return act(*actions, when=when, is_ahead=True)


def _drained(*actions: Action) -> Act:
    return Act(actions, FIRST, of_tile_before=True)


def _pieces(
    product: str, a: Action, passing: str, result: Action, *waits: str, pieces: int = PIECES
) -> list[Action]:
    """Return acts of an MMA of rows that pass by pieces.  waits: edges of the first one."""
    found: list[Action] = []
    for piece in range(pieces):
        made = result if piece == 0 else extend(result.where, result.content)
        found += map(wait, waits if piece == 0 else ("ring_loaded",))
        found += multiply(product, a, read("ring", passing, piece), made), arrive("ring_free")
    return found


def _scores(
    product: str, stays: str, passing: str, ring: str, *waits: str, pieces: int = PIECES
) -> tuple[Act, ...]:
    """Rows that stay, times rows that pass: S = Q K^T or dP = dO V^T, or transposed, a step ahead.
    ring: of the result.  waits: edges that say that the result, or the place of its scales, may be
    overwritten, none where the MMAs' order does."""
    kept = "dout" if stays == "dO" else stays.lower()
    operands = read(kept, stays), passing, write(ring, product)
    gemm = _pieces(product, *operands, *waits, "ring_loaded", pieces=pieces)
    return (
        _ahead(wait(f"{kept}_loaded"), when=FIRST),
        _ahead(*gemm, arrive(f"{ring}_done")),
        _ahead(arrive(f"{kept}_free"), when=LAST),
    )


def _passes(content: str, pieces: int = PIECES) -> Action:
    return fill("ring", content, pieces=pieces)


_DQ_LOADED = loaded("q"), loaded("dout"), loaded("ring")

DQ_STEPS = StepTable(
    rings=(
        *_DQ_LOADED,
        Ring("s", full="s_done", free="s_free"),
        # NOTE [dS over dP] in dq.py: the MMAs' order frees both.
        Ring("dp", full="dp_done"),
        Ring("ds", full="ds_done", over="dp"),
        Ring("dq", full="dq_done", free="dq_free"),
    ),
    roles=(
        _load(
            _ahead(fill("q", "Q"), when=FIRST),
            _ahead(fill("ring", "K")),
            act(fill("ring", "Kc")),
            _ahead(fill("dout", "dO"), when=FIRST),
            _ahead(fill("ring", "V")),
            rings=_DQ_LOADED,
        ),
        _mma(
            *_scores("S", "Q", "K", "s", "s_free", pieces=1),
            act(wait("dq_free"), when=FIRST),
            act(
                wait("ring_loaded"),
                wait("ds_done"),
                multiply("dQ", read("ds", "dS"), read("ring", "Kc"), add("dq", "dQ")),
                arrive("ring_free"),
            ),
            act(arrive("dq_done"), when=LAST),
            *_scores("dP", "dO", "V", "dp", pieces=1),
            ends=("s_free", "dq_free"),
        ),
        Role(
            "gradient",
            (
                _drained(wait("dq_done"), read("dq", "dQ"), arrive("dq_free")),
                act(wait("dp_done"), read("dp", "dP"), write("ds", "dS"), arrive("ds_done")),
                _ahead(wait("s_done"), read("s", "S"), arrive("s_free")),
            ),
        ),
    ),
)

#: K and V, which stay for a tile, and Q and dO, which pass.
_OPERANDS = loaded("k"), loaded("v"), loaded("ring")

_DKDV_LOADED = *_OPERANDS, loaded("lse"), loaded("delta")


def _weighted(result: str, weights: str, passing: str) -> Act:
    operands = read("weights", weights), passing, add("sums", result)
    gemm = _pieces(result, *operands, "weights_done", "ring_loaded")
    return act(*gemm, arrive("weights_free"))


DKDV_STEPS = StepTable(
    rings=(
        *_DKDV_LOADED,
        Ring("s", full="s_done", free="s_free"),
        Ring("dp", full="dp_done", free="dp_free"),
        Ring("weights", full="weights_done", free="weights_free"),
        Ring("sums", full="sums_done", free="sums_free", regions=("dv", "dk")),
    ),
    roles=(
        _load(
            _ahead(fill("k", "K"), when=FIRST),
            _ahead(fill("lse", "LSE"), _passes("Q")),
            act(_passes("dOc")),
            _ahead(fill("v", "V"), when=FIRST),
            _ahead(fill("delta", "delta"), _passes("dO")),
            act(_passes("Qc")),
            rings=_DKDV_LOADED,
        ),
        _mma(
            *_scores("S", "K", "Q", "s", "s_free"),
            act(wait("sums_free"), when=FIRST),
            _weighted("dV", "P", "dOc"),
            *_scores("dP", "V", "dO", "dp", "dp_free"),
            _weighted("dK", "dS", "Qc"),
            act(arrive("sums_done"), when=LAST),
            ends=("s_free", "dp_free", "sums_free"),
        ),
        Role(
            "gradient",
            (
                # P and dS share one buffer in alternation.
                act(wait("weights_free"), write("weights", "P"), arrive("weights_done")),
                act(
                    wait("dp_done"),
                    wait("delta_loaded"),
                    read("dp", "dP"),
                    arrive("dp_free"),
                    read("delta", "delta"),
                    arrive("delta_free"),
                ),
                _drained(
                    wait("sums_done"), read("sums", "dV"), read("sums", "dK"), arrive("sums_free")
                ),
                _ahead(
                    wait("s_done"),
                    read("s", "S"),
                    arrive("s_free"),
                    wait("lse_loaded"),
                    read("lse", "LSE"),
                    arrive("lse_free"),
                ),
                act(wait("weights_free"), write("weights", "dS"), arrive("weights_done")),
            ),
        ),
    ),
)


_DV_LOADED = *_OPERANDS, loaded("stats", "lse", "delta")
#: What the gradient warps do last in a step: dS, then P of the next step.
_DV_LAST_ACTS = (
    act(read("stats", "delta"), arrive("stats_free")),
    _ahead(
        wait("s_done"), read("s", "S"), arrive("s_free"), wait("stats_loaded"), read("stats", "LSE")
    ),
)


def _dv_load(pieces: int) -> Role:
    return _load(
        _ahead(fill("k", "K"), when=FIRST),
        _ahead(_passes("Q", pieces), fill("stats", "LSE", "delta")),
        act(_passes("dOc", pieces)),
        _ahead(fill("v", "V"), when=FIRST),
        _ahead(_passes("dO", pieces)),
        rings=_DV_LOADED,
    )


def _dv_sum(pieces: int) -> Act:
    operands = read("p", "P"), "dOc", add("dv", "dV")
    return act(*_pieces("dV", *operands, "ring_loaded", "p_done", pieces=pieces))


DV_STEPS = StepTable(
    rings=(
        *_DV_LOADED,
        Ring("s", full="s_done", free="s_free"),
        # NOTE [P over dP] in dv.py: the MMAs' order frees both.
        Ring("dp", full="dp_done"),
        Ring("p", full="p_done", over="dp"),
        Ring("dv", full="dv_done", free="dv_free"),
    ),
    roles=(
        _dv_load(PIECES),
        _mma(
            *_scores("S", "K", "Q", "s", "s_free"),
            act(wait("dv_free"), when=FIRST),
            _dv_sum(PIECES),
            act(arrive("dv_done"), when=LAST),
            *_scores("dP", "V", "dO", "dp"),
            ends=("s_free", "dv_free"),
        ),
        Role(
            "gradient",
            (
                _drained(wait("dv_done"), read("dv", "dV")),
                act(wait("dp_done"), read("dp", "dP"), write("p", "P"), arrive("p_done")),
                # With a score_mod all of dV is drained before P is stored, and dv_free comes then:
                # this is the later case.
                _drained(read("dv", "dV"), arrive("dv_free")),
                *_DV_LAST_ACTS,
            ),
        ),
    ),
)

DV_MXFP8_STEPS = StepTable(
    rings=(
        *_DV_LOADED,
        # The wait of dP(i) for S(i) in registers comes before the next S.
        Ring("s", full="s_done"),
        Ring("s_read", full="s_free", is_permit=True),
        Ring("dp", full="dp_done"),
        # Scales of the next S lie over dP.
        Ring("dp_read", full="dp_free", is_permit=True),
        Ring("p", full="p_done", over="dp"),
        Ring("dv", full="dv_done", free="dv_free"),
    ),
    roles=(
        _dv_load(pieces=1),
        _mma(
            *_scores("S", "K", "Q", "s", "dp_free", pieces=1),
            act(wait("dv_free"), when=FIRST),
            _dv_sum(pieces=1),
            act(arrive("dv_done"), when=LAST),
            *_scores("dP", "V", "dO", "dp", "s_free", pieces=1),
            ends=("dp_free", "dv_free"),
        ),
        Role(
            "gradient",
            (
                _drained(wait("dv_done"), read("dv", "dV")),
                act(
                    wait("dp_done"),
                    read("dp", "dP"),
                    arrive("dp_free"),
                    write("p", "P"),
                    arrive("p_done"),
                ),
                _drained(read("dv", "dV"), arrive("dv_free")),
                *_DV_LAST_ACTS,
            ),
        ),
    ),
)

#: Sums of dK and of dQ alike: X is Q or K.
PRODUCTS_STEPS = StepTable(
    rings=(loaded("step", "ds", "rows"), Ring("sum", full="sum_done", free="sum_free")),
    roles=(
        Role(
            "load",
            (act(fill("step", "dS", "X")),),
            end=(wait_all("step_free"),),
            claims=CLAIM_STEPS,
        ),
        Role(
            MMA,
            (
                act(wait("sum_free"), when=FIRST),
                act(
                    wait("step_loaded"),
                    multiply("sum", read("step", "dS"), read("step", "X"), add("sum", "sum")),
                    arrive("step_free"),
                ),
                act(arrive("sum_done"), when=LAST),
            ),
            end=(wait_all("sum_free"),),
        ),
        Role(
            "gradient", (act(wait("sum_done"), read("sum", "sum"), arrive("sum_free"), when=LAST),)
        ),
    ),
)
