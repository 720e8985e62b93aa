"""The rules of the machine as a Hopper GPU answers them (`golden.Case.rule`): each kernel ends in
the simulator as it ended there, with the same results.

Where the PTX ISA leaves a kernel undefined (`Case.undefined`) the simulator may refuse what the
hardware let pass; it must not let pass what the hardware refused.
"""

from __future__ import annotations

import re

import pytest

from sm100_sim.launcher import parsed_kernel
from sm100_sim.state.barriers import most_registers, whole_granules
from sm100_sim.tools import golden
from sm100_sim.tools.golden import KERNEL, Case
from sm100_sim.tools.golden.comparing import rule_difference
from sm100_sim.tools.golden.replay import ending
from sm100_sim.tools.golden.rules.scripts import SLEEP

pytestmark = pytest.mark.simulator

VECTORS = golden.Vectors()
RULES = [case for case in golden.all_cases() if case.rule]


def problem(case: Case, **options) -> str:
    """Describe how the simulator departs from the recording; "" if it does not."""
    mine, outputs, text = ending(case, **options)
    recorded = VECTORS.ending(case), VECTORS.outputs(case)
    wrong = rule_difference(case, (mine, outputs), recorded)
    return f"{wrong}. {text}" if wrong else ""


def kinds() -> list:
    """Cases by what they are about: the second part of their names."""
    found: dict[str, list[Case]] = {}
    for case in RULES:
        found.setdefault(case.name.split("/")[1], []).append(case)
    return [pytest.param(cases, id=kind) for kind, cases in found.items()]


@pytest.mark.parametrize("cases", kinds())
def test_each_rule_holds_or_fails_as_on_hardware(cases):
    wrong = [problem(case) for case in cases]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("cases", kinds())
@pytest.mark.sampled("barrier")
def test_the_same_with_a_random_order(cases):
    """Other orders of warps and of asynchronous work end in the same way, where no warp sleeps so
    that another comes first."""
    wrong = [problem(case, seed=5) for case in cases if case.grid <= 2 and SLEEP not in case.ptx]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_both_sides_of_every_rule_are_there():
    """Some cases keep a rule, others break it: each kind of ending has been recorded."""
    endings = [VECTORS.ending(case) for case in RULES]
    assert endings.count("done") > 60 and endings.count("hang") > 20
    for stage in ("load", "launch", "run"):
        assert any(ending.startswith(f"{stage}: CUDA_ERROR_") for ending in endings)


def test_launches_have_the_registers_that_the_driver_says():
    recorded = VECTORS.manifest["registers"]
    checked = 0
    for case in RULES:
        if re.search(r"\.(maxnreg|minnctapersm)", case.ptx) and case.name in recorded:
            kernel = parsed_kernel(case.ptx, KERNEL)
            most = kernel.max_registers or most_registers(case.block, kernel.min_ctas_per_sm)
            if whole_granules(recorded[case.name]) != whole_granules(most):
                # ptxas gives no more than the largest count that the program requests.
                assert recorded[case.name] < most, case.name
                assert f"inc.sync.aligned.u32 {recorded[case.name]}" in case.ptx, case.name
            checked += 1
    assert checked > 30


def test_a_wrong_answer_is_noticed():
    """A recording that says otherwise, in its ending or in its results."""
    case = next(case for case in RULES if case.name.endswith("384 threads at 168: 224/224/64"))
    assert VECTORS.ending(case) == "hang" and not problem(case)
    counts = VECTORS.outputs(case)[0]
    counts[0, 8 * 8] += 1
    try:
        assert "steps passed" in problem(case)
        VECTORS.manifest["endings"][case.name] = "done"
        assert "hang, recorded done" in problem(case)
    finally:
        counts[0, 8 * 8] -= 1
        VECTORS.manifest["endings"][case.name] = "hang"
