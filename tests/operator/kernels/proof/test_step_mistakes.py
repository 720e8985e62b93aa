"""Mistakes in the steps of any kernel are refused before anything is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_edits import edits, role_of, with_edge, with_role
from step_traces import table_of

from fa4_hd256.architectures import named
from fa4_hd256.kernels.blackwell.backward import config as blackwell
from fa4_hd256.kernels.blackwell.decode.config import DECODE as BLACKWELL_DECODE
from fa4_hd256.kernels.blackwell.decode.config import DECODE_E4M3 as BLACKWELL_E4M3
from fa4_hd256.kernels.blackwell.decode.config import DECODE_NVFP4
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig as BlackwellForward
from fa4_hd256.kernels.hopper.architecture import E4M3_COLUMNS
from fa4_hd256.kernels.hopper.backward.config import (
    BackwardConfig,
    DvPlan,
    ProductsPlan,
    SinglePlan,
)
from fa4_hd256.kernels.hopper.decode.config import DECODE_E4M3
from fa4_hd256.kernels.hopper.forward.config import DECODE, ForwardConfig
from fa4_hd256.kernels.hopper.forward.e4m3.config import E4m3ForwardConfig
from fa4_hd256.kernels.hopper.proof import plans
from fa4_hd256.kernels.hopper.proof.forward_steps import ByWarpgroup
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.plan.edges import Signal
from fa4_hd256.kernels.proof.drain import check_drains
from fa4_hd256.kernels.proof.plans import describe
from fa4_hd256.kernels.proof.steps import Verb, When, again, done

DV = DvPlan()
#: Every table, with its edges.
TABLES = {
    **{
        f"Hopper, {name}{', softcap' if capped else ''}": (plan.edges, table_of(plan, capped))
        for name, plan in (
            ("dV and dS", DV), ("dQ", SinglePlan("dq")), ("dK", SinglePlan("dk")),
            ("dV", SinglePlan("dv")),
        )
        for capped in (False, True)
    },
    **{
        f"Hopper, {name}": (ByWarpgroup(config).edges, table_of(config))
        for name, config in (
            ("forward", ForwardConfig()), ("decode", DECODE), ("pairs", ForwardConfig(ctas=2)),
            ("forward in e4m3", E4m3ForwardConfig()), ("forward in e4m3, V^T", E4M3_COLUMNS),
        )
    },
    **{
        f"Hopper, {name}": (plan.edges, table_of(plan))
        for name, plan in (
            ("products", ProductsPlan()), ("decode in e4m3, few rows", DECODE_E4M3[0]),
            ("decode in e4m3, many rows", DECODE_E4M3[-1]),
        )
    },
    **{
        f"Blackwell, {name}": (plan.edges, table_of(plan))
        for name, plan in (
            ("forward", BlackwellForward()),
            ("dQ", blackwell.DqPlan()), ("dK/dV", blackwell.DkdvPlan()),
            ("dV and dS", blackwell.DvPlan()), ("products", blackwell.ProductsPlan()),
            ("decode", BLACKWELL_DECODE[0]), ("decode in e4m3", BLACKWELL_E4M3[0]),
            ("decode in NVFP4", DECODE_NVFP4[0]),
        )
    },
}  # fmt: skip
#: Verbs that only order ptxas, or tell the check what a kernel does.
NOT_NEEDED = (Verb.AGAIN, Verb.TOUCH, Verb.CHANGE)
#: Table -> actions of which one can be left out: with a softcap the products of one gradient have
#: been waited for before P; the halves of dV are read one by one, and have one name.
ONE_OF_TWO = {
    **{f"Hopper, {name}, softcap": (Verb.DONE, 1) for name in ("dQ", "dK", "dV")},
    "Blackwell, dV and dS": (Verb.READ, 2),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_action_is_needed(name):
    """Waits, arrivals, loads, products and waits for these, each left out by itself."""
    edges, table = TABLES[name]
    left = []
    for what, broken in edits(table, lambda a: None if a.verb in NOT_NEEDED else ()):
        try:
            check_drains("kernel", edges, broken)
        except ValueError as error:
            assert "kernel cannot work" in str(error)
        else:
            left.append(what)
    verb, count = ONE_OF_TWO.get(name, (None, 0))
    assert len(left) == count
    assert all(str(verb) in what for what in left)


def more(verb):
    def change(action):
        return (action, action) if action.verb is verb else None

    return change


def later(action):
    """A wait for products that leaves one more under way."""
    return (replace(action, pending=action.pending + 1),) if action.verb is Verb.DONE else None


def on_other_parity(action):
    """A wait for the phase that was waited for before."""
    return (again(action.where),) if action.verb is Verb.WAIT else None


def newest(action):
    """The latest buffer where the oldest is meant."""
    if action.verb is not Verb.MULTIPLY or not any(o.is_oldest for o in action.operands):
        return None
    operands = tuple(replace(operand, is_oldest=False) for operand in action.operands)
    return (replace(action, operands=operands),)


CHANGES = {
    "an arrival more": more(Verb.ARRIVE),
    "a load more": more(Verb.FILL),
    "a wait more": more(Verb.WAIT),
    "products that may be under way": later,
    "a wait on the other parity": on_other_parity,
    "another buffer": newest,
}
#: Changes of what tensor-core warps of Blackwell do not do, and not every one of Hopper.
OF_WARPGROUPS = ("another buffer", "products that may be under way")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TABLES)
def test_mistakes_of_one_action_are_refused(name, change):
    edges, table = TABLES[name]
    found = list(edits(table, CHANGES[change]))
    accepted = []
    for what, broken in found:
        try:
            check_drains("kernel", edges, broken)
        except ValueError:
            continue
        accepted.append(what)
    if change == "another buffer":
        # In the last step the latest is the oldest.
        accepted = [what for what in accepted if "last step" not in what]
    if change == "products that may be under way" and "softcap" in name:
        # Either may be weaker: the wait that can be left out, or the one that makes it so.
        accepted = [what for what in accepted if "each step but the last" not in what]
    assert not accepted
    assert found or change in OF_WARPGROUPS


def in_steps(table, role, place, when):
    """The table with an act of a role in other steps."""
    acts = list(role_of(table, role).acts)
    acts[place] = replace(acts[place], when=when)
    return with_role(table, role, acts=tuple(acts))


STEPS = table_of(DV)
#: Mistake -> (edges, steps, words of the refusal).
MISTAKES = {
    "K of the next tile awaited in every step": (
        DV.edges, in_steps(STEPS, "gradient", 1, When.EACH), "hangs"),
    "V given back in every step": (
        DV.edges, in_steps(STEPS, "gradient", 6, When.EACH), "an arrival on v_free"),
    "K in every step": (
        DV.edges, in_steps(STEPS, "load", 0, When.EACH), r"hangs|K of step"),
    "a buffer that starts full": (
        with_edge(DV.edges, "q_free", initially_complete=False), STEPS, "q_free must start"),
    "an operand that starts there": (
        with_edge(DV.edges, "q_loaded", initially_complete=True), STEPS,
        r"reads Q .* finds nothing|nothing makes who reads|S of"),
    "one buffer of dO": (
        with_edge(with_edge(DV.edges, "dout_free", stages=2), "dout_loaded", stages=1), STEPS,
        "dout_loaded has 1 stages, dout_free 2"),
    "a buffer of both given back by one CTA": (
        with_edge(DV.edges, "q_free", signal=Signal.WARPS_CTA), STEPS,
        r"Q of step . of tile . may overwrite q while it is in use"),
    "a buffer of both filled by one": (
        with_edge(DV.edges, "q_loaded", signal=Signal.TMA_CTA), STEPS, r"who reads Q .* finds Q"),
    "a CTA that does not wait for the other": (
        DV.edges, replace(STEPS, meets=False), r"last signal of (k|v|q|dout)_free"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake):
    edges, steps, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"the kernel cannot work: .*(?:{words})"):
        check_drains("the kernel", edges, steps)


def test_products_in_flight_are_not_given_back():
    """The buffer of dO before the wait for the product that reads it."""

    def early(action):
        return None if action != done(0) else ()

    *_, (_, late) = edits(STEPS, early)
    with pytest.raises(ValueError, match="touches the registers of dV .* may be under way"):
        check_drains("the kernel", DV.edges, late)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transaction_bytes": 64}, "q_loaded expects 64 bytes, Q LSE is 33024"),
        ({"stages": 2}, "q_loaded has 2 stages"),
        ({"producer_warps": 4}, "q_free is completed by 4 warps of a CTA, gradient has 8"),
    ],
)
def test_a_plan_is_refused_before_anything_is_compiled(change, words):
    class Wrong(DvPlan):
        @property
        def edges(self):
            name = "q_free" if "producer_warps" in change else "q_loaded"
            return with_edge(super().edges, name, **change)

    with pytest.raises(ValueError, match=f"the kernel of dV and dS cannot work: .*{words}"):
        plans.plans_of(Wrong())[0].prove()


def test_the_tables_are_printed():
    text = describe(kernels_of(named("sm_90a")), BackwardConfig())
    assert "| load | first step | fills k: K |" in text
    assert "| gradient | each step, beside the step ahead | wait(2) |" in text
    of_start = "each step, alone, a step ahead, also of the next tile"
    assert f"| gradient | {of_start} | waits for q_loaded; S; wait(0) |" in text
