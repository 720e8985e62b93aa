"""Work, resources and leftovers of the backward's kernels, by the simulator and the compiler."""

from __future__ import annotations

import pytest
import torch
from backward_cases import gradients, inputs, last_reports

from fa4_hd256 import BackwardConfig
from fa4_hd256.call import backward_problem

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

TILE, STEP = 256, 128  # of all kernels but dK/dV's, which has them the other way round
# Instructions of one step, 16 of the reduced dimension each: S and dP over 256 columns; dQ, dV and
# the products over the rows of the step; dK and dV of their own kernel over 256 queries.
DQ_INSTRUCTIONS = DV_INSTRUCTIONS = 16 + 16 + 8
PRODUCT_INSTRUCTIONS = 8
DKDV_INSTRUCTIONS = 16 + 16 + 16 + 16

#: dK and dQ from the dS that the kernel of dV stores; dK/dV and dQ, each with a dS of its own.
STORED, RECOMPUTED = BackwardConfig(), BackwardConfig(ds_bytes=0)
both_ways = pytest.mark.parametrize("config", [STORED, RECOMPUTED], ids=["stored", "recomputed"])


def run(lengths, heads=(2, 1), causal=True, config=STORED, **options):
    """Gradients of random tensors; returns (gradients, reports of preprocess and of the two other
    kernels)."""
    tensors = inputs(lengths, heads)
    options["backward_config"] = config
    found = gradients(tensors, torch.randn_like(tensors[0]), causal=causal, **options)
    return found, last_reports(3)


# Several tiles either way, with rests; more queries than keys, so that some see nothing.
@both_ways
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("lengths", "causal"), [((300, 330), True), ((300, 330), False), ((330, 150), True)]
)
@pytest.mark.sampled("lengths0-True-None-stored", "lengths0-True-1-stored")
def test_no_findings(lengths, causal, seed, config, sanitize):
    """No race, lifetime error or missing fence that the sanitizer sees, whatever the schedule."""
    sanitize(seed, clusters=2)
    _, reports = run(lengths, causal=causal, config=config)
    assert [report.seed for report in reports] == [seed] * 3
    assert [report.findings for report in reports] == [[], [], []]


@both_ways
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled("None-stored", "1-stored")
def test_no_findings_across_tiles(seed, config, sanitize):
    """One cluster runs all tiles: the next one's loads and products overlap this one's results."""
    sanitize(seed, device="b200:2")
    _, reports = run((520, 260), (2, 2), config=config)
    assert [report.findings for report in reports] == [[], [], []]


@both_ways
@pytest.mark.sampled("stored")
def test_results_do_not_depend_on_the_schedule(config, monkeypatch):
    """Any order of warps and completions, any number of resident clusters: the same bits."""
    results = []
    for clusters, seed in ((74, None), (1, 1), (3, 2)):
        monkeypatch.setenv("SM100_SIM_CLUSTERS", str(clusters))
        if seed is not None:
            monkeypatch.setenv("SM100_SIM_SEED", str(seed))
        torch.manual_seed(0)
        results.append(run((300, 330), config=config)[0])
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in "qkv")


@pytest.mark.sampled
def test_launch_control_may_refuse_and_reorder(monkeypatch):
    """Requests that fail although tiles are left, and tiles in any order: the same bits."""
    monkeypatch.setattr(backward_problem, "choose_head_parts", lambda work, group, *rest: group)
    torch.manual_seed(0)
    expected, _ = run((520, 260), use_clc=False)
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "2")
    monkeypatch.setenv("SM100_SIM_SEED", "22")
    torch.manual_seed(0)
    found, reports = run((520, 260), use_clc=True)
    assert all(torch.equal(found[name], expected[name]) for name in "qkv")
    assert all(report.clc["refused"] and report.clc["stolen"] for report in reports[1:])


def steps(lengths, causal, queries, keys):
    """Blocks of so many queries and keys of one head with a visible pair, from the definition of
    the mask."""
    seqlen_q, seqlen_k = lengths
    found = 0
    for first_row in range(0, seqlen_q, queries):
        # The last row sees the most keys.
        level = min(first_row + queries, seqlen_q) - 1 + seqlen_k - seqlen_q
        found += sum(not causal or key <= level for key in range(0, seqlen_k, keys))
    return found


@both_ways
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300), (515, 131)], ids=str)
@pytest.mark.sampled("(700, 300)-full-stored", "(700, 300)-causal-stored", "(515, 131)-full-stored")
def test_mma_count_is_the_closed_form(lengths, causal, config):
    """Every step that some row sees is computed once for each head, no other one at all."""
    _, (_, *reports) = run(lengths, causal=causal, config=config)
    of_queries, of_keys = (steps(lengths, causal, *block) for block in ((TILE, STEP), (STEP, TILE)))
    expected = of_queries * DKDV_INSTRUCTIONS, of_queries * DQ_INSTRUCTIONS
    if config is STORED:
        expected = of_keys * DV_INSTRUCTIONS, (of_keys + of_queries) * PRODUCT_INSTRUCTIONS
    assert [report.warps("tcgen05.mma") for report in reports] == [2 * count for count in expected]
