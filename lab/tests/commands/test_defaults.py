"""Defaults against their alternatives, on costs by hand: losses, candidates, tables."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256 import BackwardConfig
from lab.commands import defaults as command
from lab.model.backward import Backward
from lab.model.forward import Kernel
from lab.model.predictor import Predicted
from lab.model.studies import defaults
from lab.model.studies.defaults import CHOICES, Choice, Decided
from lab.model.tiles import BackwardTiling, ForwardTiling, Order, forward_tiles
from lab.whole.problem import Late, TileCosts
from sm100_sim.timing import load

pytest.importorskip("cutlass")

MACHINE = load("b200")
VALUES = [MACHINE.values()] * 2
CAUSAL = Case("causal", ((2048, 2048),), 32, 2, True)
#: The static scheduler is better under one set, CLC under the other.
SECONDS = {False: np.array([1.0, 1.2]), True: np.array([1.1, 1.0])}


class FakePredictor:
    """Predictor of ours alone; a step of a split call takes a microsecond, the second kernel
    four."""

    machine, draws = MACHINE, 1

    def forward(self, provider, case, use_clc):
        tiling = ForwardTiling(
            "dynamic" if use_clc else "static", packs_heads=True, prefetches=True,
            claims=Late(9000.0) if use_clc else 0,
        )  # fmt: skip
        return Kernel(provider, tiling, VALUES, [TileCosts(7000.0, 1500.0, 1.04)] * 2)

    def backward(self, provider, case, use_clc):
        tiling = BackwardTiling(
            "dynamic" if use_clc else "static", True, True, 256,
            claims=Late(9000.0) if use_clc else 0,
        )  # fmt: skip
        costs = [TileCosts(7000.0, 1500.0, 1.04)] * 2
        ds_bytes = BackwardConfig().ds_bytes
        return Backward(provider, tiling, VALUES, lambda which: costs, ds_bytes)

    def predict_forward(self, provider, case, use_clc, number):
        turns = -(-16 * number // 74)
        steps = turns * -(-case.seqlen_k // 128 // number) + 4 * (number > 1)
        return Predicted(*[np.array([8.0 + steps, 9.0 + steps]) * 1e-6] * 2, None)


def decided(**picks):
    return Decided(CAUSAL, FORWARD, SECONDS, picks)


def test_a_loss_is_over_the_best_under_the_same_set():
    found = decided(static=False, clc=True)
    losses = found.losses()
    assert losses["static"] == pytest.approx([0.0, 0.2])
    assert losses["clc"] == pytest.approx([0.1, 0.0])
    assert found.best(False) is True
    # The first requested of equal ones.
    assert found.best(False, 0.06) is False


def test_candidates_are_ordered_by_their_mean_and_set_beside_the_default():
    """The second case has the loss of the static scheduler under one set alone."""
    other = Decided(
        replace(CAUSAL, causal=False), FORWARD, {False: np.array([1.0, 1.0]), True: SECONDS[True]},
        {"static": False, "clc": True, "by mask": False},
    )  # fmt: skip
    first = decided(static=False, clc=True, **{"by mask": True})
    choice = Choice("scheduler", "static", lambda: [], lambda case, predictor: first)
    rows = command.summary_rows(choice, [first, other])
    assert [row["candidate"] for row in rows] == ["by mask", "static", "clc"]
    by_mask, static, clc = rows
    assert by_mask["mean"] == pytest.approx(0.025) and by_mask["most"] == pytest.approx(0.1)
    assert static["mean"] == pytest.approx(0.05) and static["worst_mean"] == pytest.approx(0.1)
    assert static["worst_case"] == "1x2048, 32/2, causal" and static["is_default"]
    assert static["verdict"] is None
    assert by_mask["verdict"] == "less on average, less at worst"
    assert clc["verdict"] == "as much on average, less at worst"
    of_cases = command.case_rows(choice, [first, other])
    assert [(row["taken"], row["best"]) for row in of_cases] == [
        ("static", "CLC"), ("static", "static")
    ]  # fmt: skip
    assert [row["loss"] for row in of_cases] == pytest.approx([0.1, 0.0])
    origin = {"basis": "modelled", "machine": "B200 modelled, constants 01234567"}
    summed, candidates, cases = command.tables([(choice, [first, other])], origin, 1)
    (row,) = summed.rows
    assert (row["default"], row["best"], row["cases"]) == ("static", "by mask", 2)
    assert [row["mean"], row["best_mean"]] == pytest.approx([0.05, 0.025])
    assert [row["most"], row["best_most"]] == pytest.approx([0.2, 0.1])
    assert row["verdict"] == by_mask["verdict"]
    assert row["worst_case"] == "1x2048, 32/2, causal"
    assert "| scheduler | by mask" in candidates.as_markdown()
    assert "over 1 sets" in cases.as_markdown()


#: For each choice a case in which candidates differ.
CASES = {
    "order, forward": Case("causal", ((8192, 8192),) * 2, 16, 2, True),
    "order, backward": Case("causal", ((8192, 8192),) * 2, 16, 2, True),
    "scheduler, forward": CAUSAL,
    "scheduler, backward": CAUSAL,
    "claims, forward": Case("ragged", ((4096, 4096), (300, 300)) * 8, 16, 2, True, packed=True),
    "claims, backward": Case("ragged", ((4096, 4096), (300, 300)) * 8, 16, 2, True, packed=True),
    "splits": Case("decoding", ((1, 8192),) * 8, 16, 2, True),
    "parts of a group": CAUSAL,
    "memory for dS": Case("full", ((32768, 32768),), 8, 8, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_default_is_what_a_call_takes(name):
    """Alternatives differ from the default, so that a table of them says something."""
    choice, case, predictor = CHOICES[name], CASES[name], FakePredictor()
    found = choice.decide(case, predictor)
    taken = found.seconds[found.picks[choice.default]]
    assert {len(one) for one in found.seconds.values()} == {2}
    assert len({round(float(one[0]) * 1e9, 2) for one in found.seconds.values()}) > 1
    assert all(min(loss) >= 0 for loss in found.losses().values())
    if name.startswith(("order", "parts", "memory")):
        clc = case.causal or found.direction == BACKWARD
        predict = predictor.backward if found.direction == BACKWARD else predictor.forward
        assert np.array_equal(taken, predict("ours", case, clc).seconds(case))


def test_every_choice_has_its_default_among_cases_that_it_can_decide():
    assert set(CASES) | {"stages, forward", "stages, backward", "exp2 mix"} == set(CHOICES)
    for name, choice in CHOICES.items():
        cases = list(choice.cases())
        assert len(cases) == len(set(cases)) > 3, name
    shares = [float(mix.true_share()) for mix in defaults.MIXES.values()]
    assert [name.split()[0] for name in defaults.MIXES] == ["hardware", *(
        f"{100 * share:g}" for share in shares[1:]
    )]  # fmt: skip
    for configs in (defaults.FORWARD_STAGES, defaults.BACKWARD_STAGES):
        assert configs[CHOICES["stages, forward"].default] == type(next(iter(configs.values())))()
        assert len(set(configs.values())) == len(configs)


@pytest.mark.parametrize(
    ("order", "section"),
    [(Order(0.0), 8), (Order(0.5), 16), (Order(), 32), (Order(math.inf), 64)],
)
def test_heads_that_take_turns_follow_the_share_of_l2(order, section):
    """K and V of a head of 16k keys take 16 MiB, four of them the half of L2; 8 query heads each,
    of 64 in all."""
    case = Case("causal", ((16384, 16384),), 64, 8, True)
    tiling = ForwardTiling("static", order=order)
    places = list(tiling.places(case))
    assert {head for _, head, _ in places[:64]} == set(range(section))
    assert places[0][0] == 63 and sorted(places) == sorted(ForwardTiling("static").places(case))
    upwards = replace(tiling, order=replace(order, later_first=False))
    assert next(iter(upwards.places(case)))[0] == 0


def test_the_shortest_blocks_of_all_heads_come_last_if_asked():
    """16 blocks of a head, heads one behind another; two of them held back, the longer one first.
    Without a mask tiles are of one length."""
    case = Case("causal", ((4096, 4096),), 3, 3, True)
    tiling = ForwardTiling("static", order=Order(0.0, short_last=1 / 8))
    places = [(block, head) for block, head, _ in tiling.places(case)]
    assert places == [
        *((block, head) for head in range(3) for block in range(15, 1, -1)),
        *((block, head) for block in (1, 0) for head in range(3)),
    ]
    full = replace(case, causal=False)
    assert list(tiling.places(full)) == list(ForwardTiling("static").places(full))


def test_tiles_of_equal_length_have_one_head_at_a_time_unless_asked():
    case = Case("full", ((4096, 4096),), 8, 8, False)
    alone, turns = (
        [head for _, head, _ in ForwardTiling("static", order=order).places(case)][:16]
        for order in (Order(math.inf), Order(equal_too=True))
    )
    assert alone == [0] * 16 and turns == [*range(8)] * 2
    assert len(forward_tiles(case, ForwardTiling("static", order=Order(equal_too=True)))) == 128


def test_one_case_in_so_many_is_replayed_and_said(monkeypatch, capsys):
    from lab.__main__ import main

    cases = [Case("causal", ((n * 1024, n * 1024),), 32, 2, True) for n in range(1, 8)]
    asked = []

    def decide(case, predictor):
        asked.append(case)
        return decided(one=False, other=True)

    one = Choice("order, forward", "one", lambda: cases, decide)
    monkeypatch.setitem(CHOICES, "order, forward", one)
    assert main(["defaults", "order, forward", "--every", "3"]) == 0
    assert asked == cases[::3]
    assert "one in 3 was replayed" in capsys.readouterr().out
    assert main(["defaults", "order, forward"]) == 0
    assert "was replayed" not in capsys.readouterr().out
    assert main(["defaults", "--every", "0"]) == 2
    assert "accepted is 1 or more" in capsys.readouterr().err
