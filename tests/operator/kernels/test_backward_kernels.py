"""What the backward's kernels execute, use and leave undone, by the simulator and the compiler."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from backward_cases import gradients, inputs

import sm100_sim
from fa4_hd256 import BackwardConfig
from fa4_hd256.kernels.blackwell.backward.config import BackwardWarpPlan
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.resources import resource_usage

pytestmark = pytest.mark.simulator

TILE_Q, TILE_K = 256, 128
# Instructions of one step of 256 queries x 128 keys, 16 of the reduced dimension each: S and dP
# over 256 columns; dQ over 128 keys; dK and dV over 256 queries.
DQ_INSTRUCTIONS = 16 + 16 + 8
DQ_PRODUCT_INSTRUCTIONS = 8
DKDV_INSTRUCTIONS = 16 + 16 + 16 + 16

#: dQ from the dS that the dK/dV kernel stores, and dQ with a dS of its own.
STORED, ANEW = BackwardConfig(), BackwardConfig(ds_bytes=0)
both_ways = pytest.mark.parametrize("config", [STORED, ANEW], ids=["stored", "anew"])


def run(lengths, heads=(2, 1), causal=True, config=STORED, **options):
    """Gradients of random tensors; returns (gradients, reports of preprocess, dK/dV, dQ)."""
    tensors = inputs(lengths, heads)
    options["backward_config"] = config
    found = gradients(tensors, torch.randn_like(tensors[0]), causal=causal, **options)
    return found, sm100_sim.last_reports()[-3:]


# Several tiles either way, with rests; more queries than keys, so that some see nothing.
@both_ways
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("lengths", "causal"), [((300, 330), True), ((300, 330), False), ((330, 150), True)]
)
def test_no_findings(lengths, causal, seed, config, monkeypatch):
    """No race, lifetime error or missing fence that the sanitizer sees, whatever the schedule."""
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "2")
    if seed is not None:
        monkeypatch.setenv("SM100_SIM_SEED", str(seed))
    _, reports = run(lengths, causal=causal, config=config)
    assert [report.seed for report in reports] == [seed] * 3
    assert [report.findings for report in reports] == [[], [], []]


@both_ways
@pytest.mark.parametrize("seed", [None, 1])
def test_no_findings_across_tiles(seed, config, monkeypatch):
    """One cluster runs all tiles: the next one's loads and products overlap this one's results."""
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:2")
    if seed is not None:
        monkeypatch.setenv("SM100_SIM_SEED", str(seed))
    _, reports = run((520, 260), (2, 2), config=config)
    assert [report.findings for report in reports] == [[], [], []]


@both_ways
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


def test_launch_control_may_refuse_and_reorder(monkeypatch):
    """Requests that fail although tiles are left, and tiles in any order: the same bits."""
    torch.manual_seed(0)
    expected, _ = run((520, 260), use_clc=False)
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "2")
    monkeypatch.setenv("SM100_SIM_SEED", "22")
    torch.manual_seed(0)
    found, reports = run((520, 260), use_clc=True)
    assert all(torch.equal(found[name], expected[name]) for name in "qkv")
    assert all(report.clc["refused"] and report.clc["stolen"] for report in reports[1:])


def steps(lengths, causal):
    """(steps of dQ, steps of dK and dV) of one head, from the definition of the mask."""
    seqlen_q, seqlen_k = lengths

    def sees(row, key):
        return not causal or key <= row + seqlen_k - seqlen_q

    of_dq = of_dkdv = 0
    for first_row in range(0, seqlen_q, TILE_Q):
        last_row = min(first_row + TILE_Q, seqlen_q) - 1
        for first_key in range(0, seqlen_k, TILE_K):
            # The last row sees the most keys, and the first key is seen by the most rows.
            of_dq += sees(last_row, first_key)
            of_dkdv += sees(last_row, first_key)
    return of_dq, of_dkdv


@both_ways
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700), (700, 300), (515, 131)], ids=str)
def test_mma_count_is_the_closed_form(lengths, causal, config):
    """Every step that some row sees is computed once for each head, no other one at all."""
    _, (_, dkdv, dq) = run(lengths, causal=causal, config=config)
    of_dq, of_dkdv = steps(lengths, causal)
    in_dq = DQ_PRODUCT_INSTRUCTIONS if config is STORED else DQ_INSTRUCTIONS
    assert dq.warps("tcgen05.mma") == 2 * of_dq * in_dq
    assert dkdv.warps("tcgen05.mma") == 2 * of_dkdv * DKDV_INSTRUCTIONS


def test_tma_bytes_are_the_closed_form():
    """dQ: Q and dO once a tile, K in two forms and V in each step.  dK/dV, by tiles of two parts:
    K and V once a tile, Q and dO in two forms in each step, with LSE and delta of its rows for
    each CTA.  TMA stores nothing, or dS, which then with K is all that dQ loads."""
    _, (_, dkdv, dq) = run((512, 640), causal=False, config=ANEW)
    _, (_, storing, product) = run((512, 640), causal=False, config=STORED)
    rows, keys = TILE_Q * 512, TILE_K * 512
    tiles_q, tiles_k, heads = 2, 5, 2
    assert dq.tma["load_bytes"] == heads * tiles_q * (2 * rows + tiles_k * 3 * keys)
    statistics = 2 * 2 * TILE_Q * 4
    step = 4 * rows + statistics
    assert dkdv.tma["load_bytes"] == heads * tiles_k * (2 * keys + tiles_q * step)
    assert dq.tma["store_bytes"] == dkdv.tma["store_bytes"] == product.tma["store_bytes"] == 0
    ds = heads * tiles_q * tiles_k * TILE_Q * TILE_K * 2
    assert storing.tma == {"load_bytes": dkdv.tma["load_bytes"], "store_bytes": ds}
    assert product.tma["load_bytes"] == ds + heads * tiles_q * tiles_k * keys


def test_every_probability_is_exponentiated_once():
    """By executed lanes of the special-function unit, on which the default pattern puts all."""
    _, (_, dkdv, dq) = run((300, 400), config=ANEW)
    for report, number in zip((dq, dkdv), steps((300, 400), True), strict=True):
        assert report.opcodes["ex2.approx.ftz.f32"]["lanes"] == 2 * number * TILE_Q * TILE_K


BF16 = torch.bfloat16
CAUSAL = ProblemClass(BF16, bounded_right=True)
VARIANTS = {
    "causal": GradientClass(CAUSAL),
    "causal, dS stored": GradientClass(CAUSAL, stores_ds=True),
    "causal, parts": GradientClass(CAUSAL, partial=True),
    "fp16, window, softcap, packed with lengths in use, dS stored": GradientClass(
        ProblemClass(
            torch.float16, True, True, softcap=True,
            ragged=("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
        ),
        partial=True,
        stores_ds=True,
    ),
    "fp16, window, softcap, negative scale, varlen": GradientClass(
        ProblemClass(
            torch.float16, True, True, negative_scale=True, softcap=True,
            ragged=("cu_seqlens_q", "cu_seqlens_k"),
        ),
        partial=True,
    ),
    "varlen, clc": GradientClass(
        ProblemClass(
            BF16, bounded_right=True, ragged=("cu_seqlens_q", "cu_seqlens_k"), use_clc=True
        ),
        partial=True,
        stores_ds=True,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("result", ["dq", "dkdv"])
def test_no_spills_and_no_local_memory(result, variant):
    """By the compiler's own report, for every kind of kernel."""
    kind = f"backward_{result}"
    if result == "dq":
        variant = replace(variant, partial=False)
        kind += "_product" if variant.stores_ds else ""
    compiled = compile_kernel(KernelSpec(kind, BackwardConfig().of_kernel(kind), variant))
    usage = resource_usage(compiled.cubin)
    assert usage.stack == usage.local == 0
    assert usage.registers == BackwardWarpPlan().registers.at_launch
    assert "ld.local" not in compiled.ptx and "st.local" not in compiled.ptx


def test_shapes_of_the_tiles():
    """What the closed forms above assume."""
    config = BackwardConfig()
    assert (config.dq.tile_rows, config.dq.step_columns) == (TILE_Q, TILE_K)
    assert (config.dkdv.tile_rows, config.dkdv.step_columns) == (TILE_K, TILE_Q)
    assert math.prod((TILE_Q, 256, 2)) == 2 * config.dq.query_bytes
