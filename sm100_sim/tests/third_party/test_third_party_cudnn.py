"""cuDNN's CuTe DSL attention (PyPI: nvidia-cudnn-frontend), called inside `sm100_sim.attached()`.

Its persistent kernels take tiles over by cluster launch control and read the words of the response
without query_cancel, so tiles vanish unless the words lie as on the hardware.
"""

import math

import pytest
import torch

import sm100_sim

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.sampled,
    pytest.mark.simulator,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

pytest.importorskip("cudnn")

BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 2, 2, 1, 512, 256
#: A cluster of two CTAs does 256 queries of a head.
TILES = BATCH * HEADS * SEQLEN // 256
# (clusters resident, seed): one steals all others; some; none is left to steal; requests refused.
RUNS = [(1, None), (3, None), (TILES, None), (2, 6)]


def exact_results(q, k, v, causal):
    """Attention of (batch, heads, seqlen, dim) tensors in their own dtype, and its LSE."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    if causal:
        scores = scores.masked_fill(torch.ones(SEQLEN, SEQLEN).triu(1).bool(), -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def tensor(heads):
    memory = torch.randn(BATCH, SEQLEN, heads, HEAD_DIM, dtype=torch.bfloat16)
    return memory.transpose(1, 2)


# Policies of cuDNN's scheduler: (blocks, heads, batches) as x, y and z of the grid, full attention;
# the longest tiles first in a grid of one row, causal.
@pytest.mark.parametrize(("policy", "grid", "causal"), [
    (0, (4, HEADS, BATCH), False),
    (1, (2 * TILES, 1, 1), True),
])  # fmt: skip
def test_forward_steals_tiles(policy, grid, causal, monkeypatch):
    q, k, v = tensor(HEADS), tensor(KV_HEADS), tensor(KV_HEADS)
    exact, exact_lse = exact_results(*(t.double() for t in (q, k, v)), causal)
    allowed = (exact_results(q, k, v, causal)[0].double() - exact).abs().max()
    with sm100_sim.attached() as session:
        from cudnn.sdpa.fwd.api_dsl import SdpaFwdDslSm100

        out, lse = torch.empty_like(q), torch.empty(BATCH, HEADS, SEQLEN, 1)
        attention = SdpaFwdDslSm100(q, k, v, out, lse, is_causal=causal, sched_policy=policy)
        assert attention.check_support()
        attention.compile()
        for resident, seed in RUNS:
            monkeypatch.setenv("SM100_SIM_CLUSTERS", str(resident))
            monkeypatch.setenv("SM100_SIM_SEED", "" if seed is None else str(seed))
            out.fill_(math.nan)
            lse.fill_(math.nan)
            attention.execute(q, k, v, out, lse)
            assert (out.double() - exact).abs().max() <= allowed
            assert (lse[..., 0] - exact_lse).abs().max() < 1e-5
            report = session.reports[-1]
            assert report.grid == grid and report.resident_clusters == resident
            assert report.clc["try_cancel"] == TILES
            stolen = TILES - resident
            assert stolen - report.clc["refused"] <= report.clc["stolen"] <= stolen
