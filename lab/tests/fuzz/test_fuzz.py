"""The fuzzer: its programs, the simulator against an H200 on them, comparing and shrinking."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from checkout import ROOT

from lab.fuzz import command, gpu, simulate
from lab.fuzz import outcome as outcomes
from lab.fuzz.families import FAMILIES, program
from lab.fuzz.outcome import ENDED, HANG, REFUSED, VARIES, Outcome, Variant, variant
from lab.fuzz.shrink import shrink
from sm100_sim.isa import load_table, table
from sm100_sim.tools.golden import KERNEL

pytestmark = pytest.mark.simulator

_DATA = json.loads((ROOT / "sm100_sim/tests/data/random_programs.json").read_text())
_FIELDS = [field.name for field in dataclasses.fields(Outcome)]
#: Outcomes of an H200, a few programs of each family out of thousands.
RECORDED = {
    key: Outcome(**{name: row[name] for name in _FIELDS if name in row})
    for key, row in _DATA["programs"].items()
}
ABOUT = _DATA["about"]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Programs run once; and code kept on disk would hide what a test plants."""
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", "off")


def of_family(family: str) -> list[str]:
    return [key for key in RECORDED if key.startswith(f"{family}/")]


def simulated(variants: list[Variant]) -> dict[str, Outcome]:
    """Outcomes in this process, so that what a test has planted is seen."""
    return {one.key: simulate.outcome_of(one)[1] for one in variants}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_makes_one_program(family):
    first, again, other = (FAMILIES[family](seed) for seed in (7, 7, 8))
    assert first.case().digest() == again.case().digest()
    assert first.case().ptx != other.case().ptx


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_without_any_one_piece_is_legal(family):
    """Pieces inside others count, too; the text gets shorter, and the simulator has nothing against
    it."""
    whole = program(f"{family}/4")
    free = [number for number, piece in enumerate(whole.numbered()) if not piece.fixed]
    for number in free[:: max(1, len(free) // 4)]:
        one = Variant(whole.name, (number,))
        assert len(one.case().ptx) < len(whole.case().ptx)
        assert simulate.outcome_of(one)[1].state in (
            (ENDED, HANG, VARIES) if whole.may_hang else (ENDED,)
        )


def test_a_planted_bug_is_found_and_shrunk():
    """A simulator whose bfi.b64 takes its operands the wrong way round, against one as it is."""
    load_table()
    right = table.rows()["bfi"]

    def wrong(emitter, instruction):
        first, a, b, *rest = instruction.operands
        instruction.operands = (
            (first, b, a, *rest) if instruction.modifiers == ("b64",) else (first, a, b, *rest)
        )
        right.emit(emitter, instruction)

    def broken(variants):
        with table.temporary_rows(dataclasses.replace(right, emit=wrong)):
            return simulated(variants)

    programs = [Variant(f"arithmetic/{seed}") for seed in range(1, 40, 7)]
    found = command.differences(simulated(programs), broken(programs))
    assert 0 < len(found) < len(programs)
    (smallest,) = shrink([variant(found[0])], simulated, broken).values()
    whole = program(smallest.name)
    left = [
        piece.before
        for number, piece in enumerate(whole.numbered())
        if number not in smallest.dropped
    ]
    assert len(left) == 1 < len(whole.numbered())
    assert "bfi.b64" in left[0]
    assert command.differences(simulated([smallest]), broken([smallest])) == [smallest.key]


def test_a_hang_is_shrunk_to_the_warps_that_matter():
    """A program without the dropped pieces still hangs, and without any other one it ends."""
    name = next(key for key in of_family("waits") if RECORDED[key].state == HANG)
    ended = Outcome(ENDED, "")

    def never(variants):
        return {
            one.key: dataclasses.replace(ended, program=one.case().digest()) for one in variants
        }

    (smallest,) = shrink([variant(name)], simulated, never).values()
    assert simulated([smallest])[smallest.key].state == HANG
    left = [
        number
        for number, piece in enumerate(program(name).numbered())
        if not piece.fixed and number not in smallest.dropped
    ]
    assert len(left) < sum(not piece.fixed for piece in program(name).numbered())
    fewer = [Variant(name, tuple(sorted({*smallest.dropped, number}))) for number in left]
    assert {outcome.state for outcome in simulated(fewer).values()} == {ENDED}


def test_outcomes_travel_in_files(tmp_path):
    path = tmp_path / "outcomes.json"
    some = {key: RECORDED[key] for key in of_family("pool")}
    outcomes.save(path, some, ABOUT)
    assert outcomes.load(path) == (some, ABOUT)
    assert variant("warp/3-1-5") == Variant("warp/3", (1, 5))
    assert variant("warp/3-1-5").key == "warp/3-1-5"


def test_outcomes_of_different_programs_are_not_compared():
    one, other = (RECORDED[key] for key in of_family("warp")[:2])
    with pytest.raises(ValueError, match="the same version of lab.fuzz"):
        one.agrees(other)
    assert one.agrees(dataclasses.replace(one, state=VARIES))
    assert not one.agrees(dataclasses.replace(one, output="0" * 16))


def test_the_command_compares_with_another_run(tmp_path, capsys):
    other, mine = tmp_path / "other.json", tmp_path / "mine.json"
    wrong = dataclasses.replace(RECORDED["pool/1"], state=HANG, output="")
    outcomes.save(other, {**RECORDED, "pool/1": wrong})
    given = ["--families", "pool", "--count", "2", "--against", str(other), "--out", str(mine)]
    assert command.main(given) == 1
    shown = capsys.readouterr().out
    assert "1 differ" in shown
    assert "pool/1 differs: ended" in shown
    assert outcomes.load(mine)[0]["pool/0"].agrees(RECORDED["pool/0"])
    programs = tmp_path / "programs"
    programs.write_text("pool/0\n")
    assert command.main(["--programs", str(programs), "--against", str(other)]) == 0


def test_on_both_machines_what_differs_is_shrunk(monkeypatch, capsys):
    """A GPU whose compiler gets popc wrong when it optimises."""

    def runner(arguments, on):
        wrong = on == "gpu" and arguments.level == 4

        def run(some):
            for one in some:
                _, outcome, outputs = simulate.outcome_of(one)
                if wrong and "popc" in one.case().ptx:
                    outcome = dataclasses.replace(outcome, output="other")
                yield one, outcome, outputs

        return run, {"device": on}

    monkeypatch.setattr(command, "_runner", runner)
    programs = [f"arithmetic/{seed}" for seed in range(10, 13)]
    wrong = [name for name in programs if "popc" in program(name).case().ptx]
    assert 0 < len(wrong) < len(programs)
    given = ["--on", "both", "--families", "arithmetic", "--first", "10", "--count", "3"]
    assert command.main(given) == 1
    shown = capsys.readouterr().out
    assert shown.count("compiled without optimisation: the same as here") == len(wrong)
    smallest = re.findall(r"is smallest as (\S+)", shown)
    assert [key.split("-")[0] for key in smallest] == wrong
    for key in smallest:
        whole = variant(key)
        left = [
            piece
            for number, piece in enumerate(program(whole.name).numbered())
            if number not in whole.dropped
        ]
        assert len(left) == 1 and "popc" in left[0].before


@pytest.mark.parametrize("option", ["--against", "--outputs"])
def test_what_both_machines_do_not_do_is_refused(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--on", "both", option, str(tmp_path / "FILE")])
    assert "--against and --outputs are for one" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--families", "warp,nonsense"], ["--programs", "FILE"]])
def test_what_names_no_program_is_refused(given, tmp_path, capsys):
    (tmp_path / "FILE").write_text("nonsense/3\n")
    given = [str(tmp_path / "FILE") if word == "FILE" else word for word in given]
    with pytest.raises(SystemExit):
        command.main(given)
    assert "arithmetic, divergence" in capsys.readouterr().err


def test_a_module_of_many_programs_has_a_kernel_for_each():
    cases = [program(f"{family}/1").case() for family in FAMILIES]
    text = gpu.module_text(cases)
    names = re.findall(rf"\.entry ({KERNEL}\w*)\(", text)
    assert names == [f"{KERNEL}_{i}" for i in range(len(cases))]
    assert text.count(".target") == 1


def faulty(connection, variants, hanging, level):
    """A batch that ends with a fault at seed 2, having sent what ran before it."""
    for number, one in enumerate(variants):
        if one.name.endswith("/2"):
            connection.send((-1, "an illegal instruction", None))
            return
        connection.send((number, Outcome(ENDED, "", "digest"), [np.zeros(1)]))
    connection.send(None)


def test_a_program_that_faults_costs_nobody_else_anything():
    programs = [Variant(f"pool/{seed}") for seed in range(5)]
    found = gpu.run_batch(programs, False, work=faulty)
    states = [found[one][0].state for one in programs]
    assert states == [ENDED, ENDED, REFUSED, ENDED, ENDED]
    assert found[programs[2]][0].text == "an illegal instruction"


def test_a_program_that_hangs_unexpectedly_is_told_apart(monkeypatch):
    """Seed 2 never ends; only a batch of programs that may hang can say so."""
    batches = []

    def once(variants, hanging, level, work):
        batches.append((len(variants), hanging))
        ends = [one for one in variants if not one.name.endswith("/2")]
        found = {one: (Outcome(ENDED, "", "digest"), [np.zeros(1)]) for one in ends}
        if hanging:
            found |= {one: (Outcome(HANG, ""), None) for one in set(variants) - set(ends)}
            return found, ""
        before = variants.index(programs[2])
        return {one: found[one] for one in variants[:before]}, gpu._STUCK

    monkeypatch.setattr(gpu, "_run_once", once)
    programs = [Variant(f"warp/{seed}") for seed in range(5)]
    found = gpu.run_batch(programs, False)
    assert [found[one][0].state for one in programs] == [ENDED, ENDED, HANG, ENDED, ENDED]
    assert batches == [(5, False), (3, True)]
