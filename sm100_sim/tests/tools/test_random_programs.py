"""The simulator against an H200 on random programs (docs/golden.md)."""

from __future__ import annotations

import dataclasses
import re

import pytest
from random_programs import ENDED, HANG, VARIES, agrees, programs, simulated

from sm100_sim import launcher
from sm100_sim.isa import load_table, table
from sm100_sim.state import barriers
from sm100_sim.tools.golden import replay as replaying

pytestmark = pytest.mark.simulator

FAMILIES = sorted({program.family for program in programs().values()})
HANGING = sorted({program.family for program in programs().values() if program.state == HANG})


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Programs run once; and code kept on disk would hide what a test plants."""
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", "off")


def of_family(family: str) -> list:
    return [program for program in programs().values() if program.family == family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulator_says_what_an_h200_says(family):
    """Bit for bit and hang for hang, under every schedule."""
    found = {program.case.name: simulated(program) for program in of_family(family)}
    assert [name for name, mine in found.items() if not agrees(programs()[name], mine)] == []
    states = [state for state, _ in found.values()]
    assert set(states) <= ({ENDED, HANG, VARIES} if family in HANGING else {ENDED})
    assert states.count(VARIES) <= len(states) // 8
    if family in HANGING:
        assert 1 < states.count(HANG) < len(states) - 1


def test_what_was_recorded():
    assert len(FAMILIES) == 15 and len(HANGING) == 6
    assert all(len(of_family(family)) > 9 for family in FAMILIES)


@pytest.mark.parametrize("family", ["warp", "memory", "shared", "cluster", "copies"])
def test_the_sanitizer_finds_no_races_in_them(family, monkeypatch):
    """The sanitizer keeps four bytes of shared memory together, so programs that store less are
    left out."""
    reports = []
    run = launcher.run_kernel
    monkeypatch.setattr(replaying, "run_kernel", lambda *given: reports.append(run(*given)))
    cases = [program.case for program in of_family(family)]
    cases = [case for case in cases if not re.search(r"\bst(\.shared)?\.[usb](8|16) \[", case.ptx)]
    assert len(cases) > 2
    for case in cases[:8]:
        replaying.replay(case, sanitize=True)
    assert [report.findings for report in reports] == [[]] * len(cases[:8])


def test_a_planted_bug_is_found():
    """A simulator whose bfi.b64 takes its operands the wrong way round."""
    load_table()
    right = table.rows()["bfi"]

    def wrong(emitter, instruction):
        first, a, b, *rest = instruction.operands
        instruction.operands = (
            (first, b, a, *rest) if instruction.modifiers == ("b64",) else (first, a, b, *rest)
        )
        right.emit(emitter, instruction)

    with table.temporary_rows(dataclasses.replace(right, emit=wrong)):
        found = [p for p in of_family("arithmetic") if not agrees(p, simulated(p))]
    assert 0 < len(found) < len(of_family("arithmetic"))
    assert all("bfi.b64" in program.case.ptx for program in found)


def test_a_register_pool_of_the_whole_file_is_noticed(monkeypatch):
    """The SM's file beyond what the launch has, granted to setmaxnreg, lets programs end that
    hang on an H200."""
    begin = barriers.RegisterPool.__init__

    def generous(pool, warps, per_thread, wake):
        begin(pool, warps, per_thread, wake)
        rest = barriers.REGISTER_FILE - 32 * warps * barriers.whole_granules(per_thread)
        pool.free = [rest // pool.QUARTERS] * pool.QUARTERS

    monkeypatch.setattr(barriers.RegisterPool, "__init__", generous)
    found = [(program, simulated(program)) for program in of_family("pool")]
    wrong = [(program.state, mine[0]) for program, mine in found if not agrees(program, mine)]
    assert set(wrong) == {(HANG, ENDED)}


def test_kernels_have_the_registers_that_the_driver_gives_them(monkeypatch):
    """The simulator needs no machine code to know registers where setmaxnreg is used."""
    begin, given = barriers.RegisterPool.__init__, []
    monkeypatch.setattr(
        barriers.RegisterPool,
        "__init__",
        lambda pool, warps, count, wake: (given.append(count), begin(pool, warps, count, wake))[1],
    )
    moving = [program for program in of_family("pool") if "setmaxnreg" in program.case.ptx]
    assert len(moving) > 8
    for program in moving:
        given.clear()
        simulated(program)
        assert set(given) == {program.registers}, program.case.name
