"""The forward in native code and with every machine operation in Python: the same run."""

import pytest
import torch

from fa4_hd256 import flash_attn_func
from sm100_sim import last_reports, launcher
from sm100_sim.machine import Machine

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize(
    ("seqlen", "heads", "causal", "clc"), [(300, (2, 1), True, False), (520, (2, 2), False, True)]
)
def test_native_and_python_agree(monkeypatch, seqlen, heads, causal, clc):
    torch.manual_seed(0)
    q = torch.randn(1, seqlen, heads[0], 256).bfloat16()
    k, v = (torch.randn(1, seqlen, heads[1], 256).bfloat16() for _ in range(2))
    results, reports = [], []
    for python in (False, True):
        if python:
            monkeypatch.setattr(launcher, "_machine_type", lambda options: Machine)
        results.append(flash_attn_func(q, k, v, causal=causal, return_lse=True, use_clc=clc))
        reports.append(last_reports()[-1])
    for native, slow in zip(*results, strict=True):
        assert torch.equal(native, slow)
    native, slow = reports
    assert native.instructions == slow.instructions and native.opcodes == slow.opcodes
    assert native.tma == slow.tma and native.clc == slow.clc
    assert native.instructions["tcgen05.mma"]["warps"] > 0
