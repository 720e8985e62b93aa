"""Kernels with a score_mod or mask_mod, under the sanitizer: the forward and the gradients of both
architectures, and bugs of theirs that it finds."""

from __future__ import annotations

import pytest
import torch

import sm100_sim
from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.score_mods import ScoreMod

pytestmark = pytest.mark.simulator

#: Two tiles of queries and of keys on either architecture at least, with rests.
LENGTHS = 300, 330
LIMITS = torch.arange(LENGTHS[0], dtype=torch.int32) * 977 % LENGTHS[1]
BIAS = torch.linspace(-1.0, 1.0, LENGTHS[1])
#: Sums are made where steps are listed: heads of a group work by themselves.
KERNELS = "ForwardKernel", "PreprocessKernel", "DvKernel", "ProductsKernel", "SumKernel"
#: GPUs of four SMs: each cluster has several tiles.
ARCHITECTURES = {"sm_100a": "b200:4", "sm_90a": "h200:4"}


def _changed(score, place, tensors):
    return 0.5 * score + tensors[0][place.key]


def _slope(score, place, tensors):
    return 0.5


def _seen(batch, head, query, key, tensors):
    return ((query + key) % 3 > 0) & (key <= tensors[0][query])


def _options(kind):
    """A function that reads a tensor, with a slope; one beside tiles of all kinds."""
    if kind == "score_mod":
        return {"causal": True, "score_mod": ScoreMod.of(_changed, _slope, (BIAS,))}
    tiles = torch.tensor([[1, 2, 0], [0, 1, 1], [2, 1, 1]], dtype=torch.int8)
    lists = masks.TileMask.of_kinds(LENGTHS, tiles[None, None])
    return {"block_mask": lists, "mask_mod": MaskMod.of(_seen, (LIMITS,))}


def reports_of(kind, use_clc=False):
    """Return (reports by kernel of a call with gradients, which are all that it launches; out and
    gradients)."""
    q = torch.randn(1, LENGTHS[0], 2, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(1, LENGTHS[1], 1, 256, dtype=torch.bfloat16) for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flash_attn_func(*leaves, use_clc=use_clc, **_options(kind))
    found = torch.autograd.grad(out, leaves, torch.randn_like(out))
    reports = sm100_sim.last_reports()
    begin = max(i for i, report in enumerate(reports) if "ForwardKernel" in report.kernel)
    own = {name: one for one in reports[begin:] for name in KERNELS if name in one.kernel}
    assert len(own) == len(reports) - begin
    return own, (out, *found)


@pytest.fixture(params=ARCHITECTURES)
def of_architecture(request, monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", request.param)
    return request.param


@pytest.mark.parametrize(("seed", "use_clc"), [(None, False), (1, True)], ids=["static", "clc"])
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
@pytest.mark.sampled
def test_no_findings(kind, seed, use_clc, of_architecture, sanitize):
    sanitize(seed, device=ARCHITECTURES[of_architecture])
    reports, results = reports_of(kind, use_clc)
    assert reports.keys() == set(KERNELS[: 4 if kind == "score_mod" else 5])
    for name, report in reports.items():
        assert report.seed == seed and report.findings == [], name
    assert all(tensor.isfinite().all() for tensor in results)
