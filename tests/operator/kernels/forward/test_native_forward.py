"""The forward in native code, with every machine operation in Python, on threads: one run."""

import pytest
import torch

from fa4_hd256 import flash_attn_func
from sm100_sim import last_reports, launcher
from sm100_sim.isa.tensor import tensor_core
from sm100_sim.run import machine
from sm100_sim.run.blas import sgemm
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


@pytest.mark.skipif(not sgemm()[0], reason="numpy has another BLAS than its wheels")
@pytest.mark.parametrize("options", [{"SEED": "1"}, {"SANITIZE": "strict"}], ids=str)
def test_every_schedule_performs_products_by_one_routine(monkeypatch, options):
    """numpy's form of them is for what native code does not cover: here, for nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 1, 256).bfloat16() for _ in range(3))
    plain = flash_attn_func(q, k, v)

    def refuse(run):
        raise AssertionError(f"a chain of {len(run)} MMAs came to numpy")

    monkeypatch.setattr(tensor_core, "execute", refuse)
    for name, value in options.items():
        monkeypatch.setenv(f"SM100_SIM_{name}", value)
    assert torch.equal(flash_attn_func(q, k, v), plain)
    monkeypatch.setattr(machine, "perform_natively", lambda operation: False)
    with pytest.raises(AssertionError, match="came to numpy"):
        flash_attn_func(q, k, v)


@pytest.mark.parametrize("clc", [False, True])
@pytest.mark.sampled("False")
def test_threads_do_not_show(monkeypatch, clc):
    torch.manual_seed(0)
    q = torch.randn(1, 700, 4, 256).bfloat16()
    k, v = (torch.randn(1, 300, 2, 256).bfloat16() for _ in range(2))
    results, reports = [], []
    for threads in (1, 2, 3, 3):
        monkeypatch.setenv("SM100_SIM_THREADS", str(threads))
        results.append(flash_attn_func(q, k, v, return_lse=True, use_clc=clc))
        reports.append(last_reports()[-1])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    # Under CLC it depends on the order of the clusters which tiles one of them gets.
    assert [report.threads for report in reports] == ([1] * 4 if clc else [1, 2, 3, 3])
    for name in ("instructions", "opcodes", "tma", "clc", "findings"):
        first, *others = (getattr(report, name) for report in reports)
        assert all(other == first for other in others), name
