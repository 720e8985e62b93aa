"""The steps of Hopper's kernels: the tables are what the simulator traces, and mistakes in them are
refused before anything is compiled."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from step_traces import (
    assert_as_declared,
    attend,
    declared,
    first_and_last,
    happened,
    steps_of,
    table_of,
    traced_launches,
    warps_of,
)

from fa4_hd256.architectures import named
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
from fa4_hd256.kernels.plan.edges import EdgeTable, Signal
from fa4_hd256.kernels.proof.drain import check_drains
from fa4_hd256.kernels.proof.plans import describe
from fa4_hd256.kernels.proof.steps import Verb, When, again, done

STORED, RECOMPUTED = BackwardConfig(), BackwardConfig(ds_bytes=0)
DV, PRODUCTS, DQ = DvPlan(), ProductsPlan(), SinglePlan("dq")
PAIRS = ForwardConfig(ctas=2)
#: Every table, with its edges.
TABLES = {
    f"{name}{', softcap' if capped else ''}": (plan.edges, table_of(plan, capped))
    for name, plan in (
        ("dV and dS", DV), ("dQ", DQ), ("dK", SinglePlan("dk")), ("dV", SinglePlan("dv")),
    )
    for capped in (False, True)
} | {
    "products": (PRODUCTS.edges, table_of(PRODUCTS)),
    **{
        name: (ByWarpgroup(config).edges, table_of(config))
        for name, config in (
            ("forward", ForwardConfig()), ("decode", DECODE), ("forward, pairs", PAIRS),
            ("forward in e4m3", E4m3ForwardConfig()), ("forward in e4m3, V^T", E4M3_COLUMNS),
        )
    },
    **{
        f"decode in e4m3, {config.rows} rows": (config.edges, table_of(config))
        for config in (DECODE_E4M3[0], DECODE_E4M3[-1])
    },
}  # fmt: skip


# ------------------------------------------------------------------------------------- traces


@pytest.fixture
def reports(monkeypatch):
    """Reports, with traces, of the launches that follow, on one cluster."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    return traced_launches(monkeypatch, "h200:2")


def plans_of(config):
    """Return the plans of the kernels that make gradients, in the order of their launches."""
    if config is STORED:
        return config.dv, config.products
    return config.single_dk, config.single_dv, config.single_dq


# Causal with more queries than keys, or fewer: tiles of none, of one and of more steps. Both
# schedulers; with a softcap the products come in another order.
@pytest.mark.simulator
@pytest.mark.parametrize("config", [RECOMPUTED, STORED], ids=["recomputed", "stored"])
@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        ((600, 300), True, {}),
        ((300, 600), True, {"use_clc": True}),
        ((300, 150), False, {"softcap": 20.0}),
    ],
)
@pytest.mark.sampled
def test_the_backward_does_what_its_tables_say(lengths, causal, options, config, reports):
    seen = attend(lengths, causal, backward=config, **options)
    capped = "softcap" in options
    of_gradients = reports[2:]
    order = -1 if causal else 1
    plans = plans_of(config)
    if config is RECOMPUTED:
        of_keys, of_queries = steps_of(seen.T, 256, 64), steps_of(seen, 256, 64)[::order]
        tiles = of_keys, of_keys, of_queries
    else:
        # dS is written in blocks of 256 x 256; tiles of dK and of dQ are interleaved.
        blocks = tuple(4 * count for count in steps_of(seen.T, 256, 256))
        pairs = itertools.zip_longest(steps_of(seen.T, 256, 128), steps_of(seen, 256, 128)[::order])
        tiles = blocks, tuple(tile for pair in pairs for tile in pair if tile is not None)
    assert len(of_gradients) == len(plans)
    for report, plan, steps in zip(of_gradients, plans, tiles, strict=True):
        table = table_of(plan, capped)
        assert_as_declared(report, plan, steps, table)
        for wrong in (lacking(table, Verb.ARRIVE), lacking(table, Verb.AGAIN), waiting_less(table)):
            if wrong != table:
                with pytest.raises(AssertionError):
                    assert_as_declared(report, plan, steps, wrong)
        with pytest.raises(AssertionError):
            assert_as_declared(report, plan, (*steps, 1), table)


def work_of(seen, config, warpgroup, first):
    """Return the steps of a tile whose first row is `first`, and how many of its first and last
    ones a warpgroup of a CTA leaves out; warpgroup: its number in the cluster."""

    def blocks(rows):
        columns = seen[rows].any(0)
        seen_in = [
            number for number in range(-(-seen.shape[1] // config.block_kv))
            if columns[number * config.block_kv : (number + 1) * config.block_kv].any()
        ]  # fmt: skip
        return (seen_in[0], seen_in[-1] + 1) if seen_in else (0, 0)

    begin, end = blocks(slice(first, first + config.tile_q))
    start = first + 64 * warpgroup
    own_begin, own_end = blocks(slice(start, start + 64))
    if own_begin == own_end:
        return end - begin, (0, end - begin)
    return end - begin, (end - own_end, own_begin - begin)


def assert_forward(report, config, seen, order):
    """order: 1, or -1 where later tiles come first."""
    plan, steps = ByWarpgroup(config), table_of(config)
    firsts = list(range(0, seen.shape[0], config.tile_q))[::order]
    left_out = set()
    for cta in range(2):
        mine, rank = (firsts, cta) if config.ctas == 2 else (firsts[cta::2], 0)
        skipped = {}
        for w in range(config.warpgroups):
            number = rank * config.warpgroups + w
            work = [work_of(seen, config, number, first) for first in mine]
            tiles, skipped[f"consumers {w}"] = zip(*work, strict=True)
            left_out |= set(skipped[f"consumers {w}"])
        expected = declared(plan.edges, steps, tiles, skipped)
        transposers = [role.name for role in steps.roles if role.name == "transposers"]
        for role in ("load", *transposers, *skipped):
            for warp in first_and_last(warps_of(role, plan, steps)):
                assert happened(report, plan, warp, cta) == expected[role, rank], (role, cta)
    return left_out


# Causal with more queries than keys, or fewer: warpgroups that leave out some steps of their tile,
# and all of them; a window: first and last ones.
@pytest.mark.simulator
@pytest.mark.parametrize(
    "config",
    [ForwardConfig(), PAIRS, E4m3ForwardConfig(), E4M3_COLUMNS],
    ids=["one", "pairs", "e4m3", "e4m3, V^T"],
)
@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        ((600, 260), True, {}),
        ((300, 600), True, {"use_clc": True}),
        ((300, 600), False, {"window_size": (100, 40)}),
        ((300, 150), False, {}),
    ],
)
@pytest.mark.sampled("lengths0-True-options0-one")
def test_the_forward_does_what_its_table_says(lengths, causal, options, config, reports):
    dtype = config.tiles.q_dtype or torch.bfloat16
    seen = attend(lengths, causal, None, dtype, dtype, config=config, **options)
    if "window_size" in options:
        distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
        distance -= lengths[1] - lengths[0]
        seen = (distance >= -100) & (distance <= 40)
    # V may have been transposed before.
    left_out = assert_forward(reports[-1], config, seen, -1 if causal or options else 1)
    assert (0, 0) in left_out and len(left_out) > 1
    with pytest.raises(AssertionError):
        assert_forward(reports[-1], config, seen[:, :64], -1 if causal or options else 1)


@pytest.mark.simulator
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("config", [DECODE_E4M3[0], DECODE_E4M3[-1]], ids=lambda c: str(c.rows))
@pytest.mark.parametrize(("lengths", "q_stages"), [((100, 330), 2), ((60, 40), 1)])
@pytest.mark.sampled
def test_the_decode_kernel_of_e4m3_does_what_its_table_says(
    lengths, q_stages, config, use_clc, monkeypatch
):
    """Tiles of none to three steps: on one CTA, which runs first, every other one, or all but the
    other CTA's first."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    reports = traced_launches(monkeypatch, "h200:2")
    config = replace(config, q_stages=min(q_stages, config.q_stages), ordered_tiles=False)
    seen = attend(lengths, True, kv_dtype=torch.float8_e4m3fn, config=config, use_clc=use_clc)
    tiles = steps_of(seen, config.rows, config.block_kv)
    tiles = (*tiles[:1], *tiles[2:]) if use_clc else tiles[::2]
    table = table_of(config)
    assert_as_declared(reports[0], config, tiles, ctas=(0,))
    for wrong in (lacking(table, Verb.ARRIVE), waiting_less(table)):
        with pytest.raises(AssertionError):
            assert_as_declared(reports[0], config, tiles, wrong, ctas=(0,))


# ------------------------------------------------------------------------------------- mistakes


def edits(table, change):
    """Yield (what, the table) with one action changed, of all that `change` makes another one of;
    it returns actions in place of one, or None."""
    for number, role in enumerate(table.roles):
        for what, edited in edits_of_role(role, change):
            roles = (*table.roles[:number], edited, *table.roles[number + 1 :])
            yield f"{role.name}, {what}", replace(table, roles=roles)


def edits_of_role(role, change):
    """Yield the edits of a role but for its end: the forward's load warp waits there for what is
    known."""
    for place, act in enumerate(role.acts):
        for what, actions in edits_of_actions(act.actions, change):
            acts = list(role.acts)
            acts[place] = replace(act, actions=actions)
            yield f"act {place}, {act.when.value}: {what}", replace(role, acts=tuple(acts))
    for name in ("enter", "skip", "idle"):
        for what, actions in edits_of_actions(getattr(role, name), change):
            yield f"{name}: {what}", replace(role, **{name: actions})


def edits_of_actions(actions, change):
    for i, action in enumerate(actions):
        others = change(action)
        if others is not None:
            yield str(action), (*actions[:i], *others, *actions[i + 1 :])


def lacking(table, verb):
    """The table without its last action of this verb; the table where there is none."""
    return [table, *(t for _, t in edits(table, lambda a: () if a.verb is verb else None))][-1]


def waiting_less(table):
    """The table whose last wait for products leaves one more under way."""

    def change(action):
        if action.verb is not Verb.DONE:
            return None
        return (replace(action, pending=action.pending + 1),)

    return [t for _, t in edits(table, change)][-1]


#: Verbs that only order ptxas, or tell the check what a kernel does.
NOT_NEEDED = (Verb.AGAIN, Verb.TOUCH)


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
    # With a softcap the products have been waited for before P.
    assert len(left) == ("softcap" in name)
    assert all("Verb.DONE" in what for what in left)


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
    assert found or change == "another buffer"


def with_edge(edges, name, **changes):
    return EdgeTable(tuple(replace(e, **changes) if e.name == name else e for e in edges.edges))


def in_steps(table, role, place, when):
    """The table with an act of a role in other steps."""
    acts = list(table.role(role).acts)
    acts[place] = replace(acts[place], when=when)
    roles = tuple(replace(r, acts=tuple(acts)) if r.name == role else r for r in table.roles)
    return replace(table, roles=roles)


STEPS = table_of(DV)
#: Mistake -> (edges, steps, words of the refusal).
MISTAKES = {
    "a step more": (
        DV.edges, in_steps(STEPS, "gradient", 1, When.EACH), r"V of tile|hangs|dP of"),
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
    text = describe(kernels_of(named("sm_90a")), STORED)
    assert "| load | first step | fills k: K |" in text
    assert "| gradient | last step | arrives on k_free; waits for dout_loaded; dP; dV; " in text
