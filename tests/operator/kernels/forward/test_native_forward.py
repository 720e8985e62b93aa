"""The forward in native code, with every machine operation in Python, on threads: one run."""

import pytest
import torch

from fa4_hd256 import flash_attn_func
from sm100_sim import last_reports, launcher
from sm100_sim.run.observer import Observer

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]


@pytest.mark.parametrize(
    ("seqlen", "heads", "causal", "clc"), [(300, (2, 1), True, False), (520, (2, 2), False, True)]
)
@pytest.mark.sampled("300-heads0-True-False")
def test_native_and_python_agree(monkeypatch, seqlen, heads, causal, clc):
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, heads[0], 256).bfloat16()
    k, v = (torch.randn(1, seqlen, heads[1], 256).bfloat16() for _ in range(2))
    results, reports = [], []
    for python in (False, True):
        if python:
            monkeypatch.setattr(launcher, "observers_of", lambda *_: (Observer(),))
        # Not split: the last report is then the forward's.
        options = {"causal": causal, "use_clc": clc, "num_splits": 1}
        results.append(flash_attn_func(q, k, v, return_lse=True, **options))
        reports.append(last_reports()[-1])
    for native, slow in zip(*results, strict=True):
        assert torch.equal(native, slow)
    native, slow = reports
    assert native.instructions == slow.instructions and native.opcodes == slow.opcodes
    assert native.tma == slow.tma and native.clc == slow.clc
    assert native.instructions["tcgen05.mma"]["warps"] > 0
