"""The Hopper forward for q, k and v in e4m3: its machine code, its plans, who transposes V.

What calls get from it is in tests/operator/attention/test_e4m3_forward.py.
"""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import E4M3, accurate_e4m3, all_scales, triple

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.architectures import named
from fa4_hd256.kernels.hopper.architecture import E4M3 as IN_KERNEL
from fa4_hd256.kernels.hopper.architecture import E4M3_COLUMNS as BEFORE
from fa4_hd256.kernels.hopper.forward.e4m3.config import E4m3ForwardConfig, E4m3ForwardWarpPlan
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.proof.plans import describe

pytestmark = pytest.mark.simulator

CONFIGS = {"in kernel": IN_KERNEL, "before": BEFORE}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:4")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled("before")
def test_no_findings(name, hopper, monkeypatch):
    """Several tiles per CTA, steps that a warpgroup leaves out, keys that end within a tile; the
    launch before the forward is checked, too."""
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    tensors, given = triple((330, 300), (4, 2), 2, "cpu"), all_scales(2, 2)
    before = len(sm100_sim.last_reports())
    found = flash_attn_func(
        *tensors, causal=True, return_lse=True, config=CONFIGS[name], use_clc=True, **given
    )
    accurate_e4m3(found, tensors, given, causal=True)
    reports = sm100_sim.last_reports()
    assert reports and all(report.findings == [] for report in reports), before


@pytest.mark.sampled
def test_who_transposes_does_not_change_a_bit(hopper):
    tensors = triple((330, 300), (2, 1), 2, "cpu")
    results = [flash_attn_func(*tensors, config=config) for config in CONFIGS.values()]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("queries", "group", "ragged", "before"),
    [(2048, 1, (), True), (1024, 1, (), False), (256, 8, (), True), (1, 16, (), False),
     (4096, 1, ("cu_seqlens_q", "cu_seqlens_k"), False), (4096, 8, ("page_table",), False)],
    ids=str,
)  # fmt: skip
def test_who_transposes(queries, group, ragged, before):
    """Many rows of a dense call: a launch before. Few rows, packed sequences and pages: warps."""
    from fa4_hd256.call.forward_problem import choose_tiles, usable_tiles

    architecture = named("sm_90a")
    known = kernels_of(architecture).forward_tiles(None, E4M3, E4M3)
    names = dict.fromkeys(ragged)
    tiles, _ = choose_tiles(usable_tiles(known, architecture, names), group, queries, names)
    assert tiles.takes_columns == before


def test_plans_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="shared memory"):
        E4m3ForwardConfig(k_stages=3)
    with pytest.raises(ValueError, match="v_stages is 1"):
        E4m3ForwardConfig(v_stages=1)
    with pytest.raises(ValueError, match="rescale_threshold is 3"):
        E4m3ForwardConfig(rescale_threshold=3.0)
    for warps, message in (
        ({"transposers": (9, 10)}, "load 8, scheduler 9"),
        ({"load": 9, "scheduler": 10, "transposers": (11, 8)}, "one after the other"),
        ({"consumers": (0, 1, 2, 3)}, "consumers is"),
    ):
        with pytest.raises(ValueError, match=message):
            E4m3ForwardWarpPlan(**warps)
    for config, edge in ((IN_KERNEL, "v_free"), (BEFORE, "columns_free")):
        assert edge in describe(kernels_of(named("sm_90a")), config)


def test_pages_of_any_size_are_refused():
    with pytest.raises(NotImplementedError, match="no multiple of 16"):
        IN_KERNEL.gathering()
