"""The forward kernel has no race that the simulator's sanitizer sees, whatever the schedule."""

import pytest
import torch

import sm100_sim
from fa4_hd256 import flash_attn_func

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    # Several key tiles and two tiles per pair; ends inside a tile; more keys than queries.
    [(512, 512, False), (330, 330, True), (40, 600, True)],
)
@pytest.mark.sampled("330-330-True-None", "330-330-True-1", "330-330-True-2")
def test_no_findings(seqlen_q, seqlen_k, causal, seed, sanitize):
    sanitize(seed, clusters=2)
    q = torch.randn(1, seqlen_q, 2, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(1, seqlen_k, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    flash_attn_func(q, k, v, causal=causal)
    report = sm100_sim.last_reports()[-1]
    assert report.seed == seed
    assert report.findings == []


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.sampled
def test_no_findings_with_split_keys(use_clc, seed, sanitize, architecture):
    """Two tiles of 32 queries with 8 heads, 3 KV tiles in 4 parts; each pair takes several."""
    sanitize(seed, clusters=2)
    q = torch.randn(1, 37, 8, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 300, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    flash_attn_func(q, k, v, num_splits=4, use_clc=use_clc)
    forward, combine = sm100_sim.last_reports()[-2:]
    if architecture == "sm_100a":
        assert (forward.clc["stolen"] > 0) == use_clc
    assert combine.grid == (37 * 8 // 4, 1, 1)
    for report in (forward, combine):
        assert report.seed == seed and report.findings == []
