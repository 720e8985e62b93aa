"""The steps of the backward's pair kernels as data, one table a kernel.

Contents with a c are columns: the second half of an operand that a pair needs in two halves
(NOTE [two halves of K] in dq.py).
"""

from __future__ import annotations

from ...proof.steps import (
    Act,
    Action,
    Copy,
    Load,
    Operand,
    Product,
    Ring,
    Role,
    StepTable,
    When,
    arrive,
    each,
    first,
    last,
    read,
    wait,
    write,
)

PIECES = 2  # buffers of Q or dO that a unit of dK/dV takes: 128 columns, or 128 queries, each

DQ_STEPS = StepTable(
    rings=(
        Ring("q", full="q_loaded", free="q_free"),
        Ring("dout", full="dout_loaded", free="dout_free"),
        Ring("ring", full="ring_loaded", free="ring_free"),
        Ring("s", full="s_done", free="s_free"),
        # NOTE [dS over dP] in dq.py: the MMAs' order frees both.
        Ring("dp", full="dp_done"),
        Ring("ds", full="ds_done", over="dp"),
        Ring("dq", full="dq_done", free="dq_free"),
    ),
    products=(
        Product(
            "S",
            result=Operand("S", ring="s"),
            a=Operand("Q", ring="q"),
            b=Operand("K", ring="ring"),
            waits=(first("q_loaded"), each("s_free"), each("ring_loaded")),
            commits=(each("ring_free"), each("s_done"), last("q_free")),
            loads=(
                Load.one("Q", "q", "q", "q", When.FIRST),
                Load.one("K", "k", "keys", "ring"),
            ),
            is_ahead=True,
        ),
        Product(
            "dQ",
            result=Operand("dQ", ring="dq"),
            a=Operand("dS", ring="ds"),
            b=Operand("Kc", ring="ring"),
            waits=(first("dq_free"), each("ring_loaded"), each("ds_done")),
            commits=(each("ring_free"), last("dq_done")),
            loads=(Load.one("Kc", "k_columns", "columns", "ring"),),
            overwrites=When.FIRST,
        ),
        Product(
            "dP",
            result=Operand("dP", ring="dp"),
            a=Operand("dO", ring="dout"),
            b=Operand("V", ring="ring"),
            waits=(first("dout_loaded"), each("ring_loaded")),
            commits=(each("ring_free"), each("dp_done"), last("dout_free")),
            loads=(
                Load.one("dO", "dout", "dout", "dout", When.FIRST),
                Load.one("V", "v", "keys", "ring"),
            ),
            is_ahead=True,
        ),
    ),
    roles=(
        Role(
            "gradient",
            (
                Act(
                    (wait("dq_done"), read("dq", "dQ"), arrive("dq_free")),
                    When.FIRST,
                    of_tile_before=True,
                ),
                Act((wait("dp_done"), read("dp", "dP"), write("ds", "dS"), arrive("ds_done"))),
                Act((wait("s_done"), read("s", "S"), arrive("s_free")), is_ahead=True),
            ),
        ),
    ),
)

#: K and V, which stay for a tile, and Q and dO, which pass.
_OPERAND_RINGS = (
    Ring("k", full="k_loaded", free="k_free"),
    Ring("v", full="v_loaded", free="v_free"),
    Ring("ring", full="ring_loaded", free="ring_free"),
)


def _of_keys(
    result: Operand,
    keys: str,
    passing: Load,
    frees: tuple[str, ...],
    loads: tuple[tuple[Load, ...], tuple[Load, ...]],
) -> Product:
    """Keys that stay, times rows that pass. frees: edges that say the result may be overwritten,
    none where the MMAs' order does. loads: what is loaded (before, after) the rows."""
    kept = keys.lower()
    before, after = loads
    return Product(
        result.content,
        result=result,
        a=Operand(keys, ring=kept),
        b=Operand(passing.copies[0].content, ring="ring"),
        waits=(first(f"{kept}_loaded"), *(each(edge) for edge in frees), each("ring_loaded")),
        commits=(each("ring_free"), each(f"{result.ring}_done"), last(f"{kept}_free")),
        loads=(Load.one(keys, kept, kept, kept, When.FIRST), *before, passing, *after),
        is_ahead=True,
        pieces=PIECES,
    )


def _scores(before: tuple[Load, ...] = (), after: tuple[Load, ...] = ()) -> Product:
    """S^T = K Q^T, a step ahead."""
    passing = Load.one("Q", "q", "ring", "ring", pieces=PIECES)
    return _of_keys(Operand("S", ring="s"), "K", passing, ("s_free",), (before, after))


def _score_gradients(frees: tuple[str, ...] = (), before: tuple[Load, ...] = ()) -> Product:
    """Issue dP^T = V dO^T, a step ahead."""
    passing = Load.one("dO", "dout", "ring", "ring", pieces=PIECES)
    return _of_keys(Operand("dP", ring="dp"), "V", passing, frees, (before, ()))


def _stats(name: str, content: str) -> tuple[Action, Action, Action]:
    """Return the actions by which the gradient warps of dK/dV read LSE, or delta."""
    return wait(f"{name}_loaded"), read(name, content), arrive(f"{name}_free")


_WAIT_DELTA, *_READ_DELTA = _stats("delta", "delta")

DKDV_STEPS = StepTable(
    rings=(
        *_OPERAND_RINGS,
        Ring("lse", full="lse_loaded", free="lse_free"),
        Ring("delta", full="delta_loaded", free="delta_free"),
        Ring("s", full="s_done", free="s_free"),
        Ring("dp", full="dp_done", free="dp_free"),
        Ring("weights", full="weights_done", free="weights_free"),
        Ring("sums", full="sums_done", free="sums_free", regions=("dv", "dk")),
    ),
    products=(
        _scores(before=(Load.one("LSE", "lse", "lse", "lse"),)),
        Product(
            "dV",
            result=Operand("dV", ring="sums"),
            a=Operand("P", ring="weights"),
            b=Operand("dOc", ring="ring"),
            waits=(first("sums_free"), each("weights_done"), each("ring_loaded")),
            commits=(each("ring_free"), each("weights_free")),
            loads=(Load.one("dOc", "dout", "ring", "ring", pieces=PIECES),),
            overwrites=When.FIRST,
            pieces=PIECES,
        ),
        _score_gradients(
            frees=("dp_free",), before=(Load.one("delta", "delta", "delta", "delta"),)
        ),
        Product(
            "dK",
            result=Operand("dK", ring="sums"),
            a=Operand("dS", ring="weights"),
            b=Operand("Qc", ring="ring"),
            waits=(each("weights_done"), each("ring_loaded")),
            commits=(each("ring_free"), each("weights_free"), last("sums_done")),
            loads=(Load.one("Qc", "q", "ring", "ring", pieces=PIECES),),
            overwrites=When.FIRST,
            pieces=PIECES,
        ),
    ),
    roles=(
        Role(
            "gradient",
            (
                # P and dS share one buffer in alternation.
                Act((wait("weights_free"), write("weights", "P"), arrive("weights_done"))),
                Act(
                    (
                        wait("dp_done"),
                        _WAIT_DELTA,
                        read("dp", "dP"),
                        arrive("dp_free"),
                        *_READ_DELTA,
                    )
                ),
                Act(
                    (
                        wait("sums_done"),
                        read("sums", "dV"),
                        read("sums", "dK"),
                        arrive("sums_free"),
                    ),
                    When.FIRST,
                    of_tile_before=True,
                ),
                Act(
                    (wait("s_done"), read("s", "S"), arrive("s_free"), *_stats("lse", "LSE")),
                    is_ahead=True,
                ),
                Act((wait("weights_free"), write("weights", "dS"), arrive("weights_done"))),
            ),
        ),
    ),
)

DV_STEPS = StepTable(
    rings=(
        *_OPERAND_RINGS,
        Ring("stats", full="stats_loaded", free="stats_free", regions=("lse", "delta")),
        Ring("s", full="s_done", free="s_free"),
        # NOTE [P over dP] in dv.py: the MMAs' order frees both.
        Ring("dp", full="dp_done"),
        Ring("p", full="p_done", over="dp"),
        Ring("dv", full="dv_done", free="dv_free"),
    ),
    products=(
        _scores(
            after=(Load("stats", (Copy("LSE", "lse", "lse"), Copy("delta", "delta", "delta"))),)
        ),
        Product(
            "dV",
            result=Operand("dV", ring="dv"),
            a=Operand("P", ring="p"),
            b=Operand("dOc", ring="ring"),
            waits=(first("dv_free"), each("ring_loaded"), each("p_done")),
            commits=(each("ring_free"), last("dv_done")),
            loads=(Load.one("dOc", "dout", "ring", "ring", pieces=PIECES),),
            overwrites=When.FIRST,
            pieces=PIECES,
        ),
        _score_gradients(),
    ),
    roles=(
        Role(
            "gradient",
            (
                Act((wait("dv_done"), read("dv", "dV")), When.FIRST, of_tile_before=True),
                Act((wait("dp_done"), read("dp", "dP"), write("p", "P"), arrive("p_done"))),
                # With a score_mod all of dV is drained before P is stored, and dv_free comes then:
                # this is the later case.
                Act((read("dv", "dV"), arrive("dv_free")), When.FIRST, of_tile_before=True),
                Act((read("stats", "delta"), arrive("stats_free"))),
                Act(
                    (
                        wait("s_done"),
                        read("s", "S"),
                        arrive("s_free"),
                        wait("stats_loaded"),
                        read("stats", "LSE"),
                    ),
                    is_ahead=True,
                ),
            ),
        ),
    ),
)

#: Sums of dK and of dQ alike: X is Q or K.
PRODUCTS_STEPS = StepTable(
    rings=(
        Ring("step", full="step_loaded", free="step_free", regions=("ds", "rows")),
        Ring("sum", full="sum_done", free="sum_free"),
    ),
    products=(
        Product(
            "sum",
            result=Operand("sum", ring="sum"),
            a=Operand("dS", ring="step"),
            b=Operand("X", ring="step"),
            waits=(first("sum_free"), each("step_loaded")),
            commits=(each("step_free"), last("sum_done")),
            loads=(Load("step", (Copy("dS", "ds", "ds"), Copy("X", "rows", "rows"))),),
            overwrites=When.FIRST,
        ),
    ),
    roles=(
        Role(
            "gradient",
            (Act((wait("sum_done"), read("sum", "sum"), arrive("sum_free")), When.LAST),),
        ),
    ),
)
