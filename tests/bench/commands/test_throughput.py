"""The throughput command without a GPU: the loop under a timer of its own, and checks."""

import argparse

import pytest
import torch
from fake_timer import FakeTimer

from bench.commands import throughput
from bench.measure import checking, providers
from bench.measure import throughput as measured
from bench.measure.settings import Sampling
from bench.measure.timer import State, interleave
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256.check import reference
from fa4_hd256.kernels.problem_class import E4M3

pytest.importorskip("cutlass")

DENSE = Case("dense", ((48, 80),) * 2, 4, 2, False)
CAUSAL = Case("dense", ((70, 70),), 2, 1, True)
PACKED = Case("varlen", ((3, 3), (40, 50), (0, 7)), 2, 2, True, packed=True)


class Reference(providers.PyTorchSdpa):
    """PyTorch's math back end, whose results are off by `offset`."""

    def __init__(self, name: str, offset: float = 0.0) -> None:
        super().__init__(name, "MATH")
        self.offset = offset

    def call(self, inputs):
        return super().call(inputs) + self.offset


def test_runs_take_turns():
    timer = FakeTimer()
    calls = {name: (lambda: None) for name in "abc"}
    calls = {name: (lambda n=name: n) for name in calls}
    found = interleave(timer, calls, Sampling(2, 4))
    order = [call() for call in timer.order]
    assert order == list("abcbcacabcbaacbbac")
    assert all(len(samples.seconds) == 4 for samples in found.values())
    # The warm-up's two runs do not count: 3, 4, 5, 6 microseconds above 1 ms.
    assert found["b"].quantile(0.5) == pytest.approx(1.0045e-3)
    assert found["b"].quantile(0.2) < found["b"].quantile(0.8)
    assert found["b"].median_state() == State(2000.0, 600.0)


def test_measured_rows_hold_rates_and_reasons():
    shown = [Reference("ours"), Reference("wrong", 0.5), Reference("PyTorch math")]
    jobs = [(DENSE, FORWARD), (DENSE, BACKWARD), (PACKED, FORWARD)]
    rows = [measured.measured_row(job, shown, FakeTimer(), Sampling(1, 3)) for job in jobs]
    forward, backward, packed = rows
    assert (forward["basis"], forward["machine"]) == ("measured", "a GPU, driver 1.0")
    assert forward["clock_mhz"] == 2000
    ours = forward["details"]["ours"]
    flop = 4 * 48 * 80 * 256 * 4 * 2
    assert ours["tflops"] == pytest.approx(flop / ours["median_ms"] / 1e9)
    assert ours["of_peak"] == pytest.approx(ours["tflops"] / (100 * 8192 * 2e9 / 1e12))
    assert ours["p20_ms"] < ours["median_ms"] < ours["p80_ms"]
    assert ours["power_watts"] == 600.0 and ours["launch"] == "graph"
    assert backward["details"]["ours"]["max_error"] > 0
    ratio = backward["ours"] / forward["ours"]
    assert ratio == pytest.approx(2.5, rel=0.05)
    # Right gradients, as the offset is a constant; wrong out.
    assert forward["wrong"] is None and "wrong: error 0.5" in forward["details"]["wrong"]["status"]
    assert backward["wrong"] is not None
    assert packed["ours"] is None
    for row, (case, direction) in zip(rows, jobs, strict=True):
        row.update(throughput.times_of(row, case, direction), l2="cold")
    assert forward["us"] == pytest.approx(1e3 * ours["median_ms"]) and forward["peer_us"] is None
    assert forward["kv_rate"] == pytest.approx(2 * 2 * 80 * 2 * 256 * 2 / forward["us"] / 1e6)
    assert forward["power_watts"] == 600.0
    assert (packed["us"], packed["kv_rate"], backward["kv_rate"]) == (None, None, None)
    text = throughput.table(rows).as_markdown()
    assert "PyTorch math: 1 of 3 not run: takes no packed sequences." in text


class LibraryError(Exception):
    """Error like CuTe DSL's: of no built-in kind."""


def test_an_error_of_one_provider_ends_nothing():
    """Neither while its result is checked nor while it is prepared for timing."""

    class Broken(Reference):
        def call(self, inputs):
            raise LibraryError("no such instruction")

    class Timer(FakeTimer):
        def prepare(self, call):
            if len(self.prepared) == 1:
                self.prepared.append(call)
                raise LibraryError("no memory for the graph")
            self.prepared.append(call)
            return super().prepare(call)

    timer = Timer()
    timer.prepared = []
    shown = [Broken("ours"), Reference("first"), Reference("second"), Reference("third")]
    row = measured.measured_row((DENSE, FORWARD), shown, timer, Sampling(0, 2))
    found = row["details"]
    assert found["ours"] == {"status": "LibraryError: no such instruction", "failed": True}
    assert found["second"]["status"] == "LibraryError: no memory for the graph"
    assert found["second"]["failed"] and "tflops" not in found["second"]
    assert {name for name, one in found.items() if one["status"] == "ok"} == {"first", "third"}


@pytest.mark.parametrize("case", [DENSE, CAUSAL, PACKED], ids=str)
def test_the_check_finds_one_wrong_row(case):
    """Rows are compared under the mask of the whole problem, of every sequence that is packed."""
    inputs = providers.Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    out = torch.zeros_like(inputs.q)
    for index, (seqlen_q, _) in enumerate(case.lengths):
        q = inputs.sequence(inputs.q, index, 0)
        k, v = (inputs.sequence(t, index, 1) for t in (inputs.k, inputs.v))
        if seqlen_q:
            options = {"causal": case.causal, "window_size": case.window}
            exact, _ = reference.attention(q[None], k[None], v[None], **options)
            inputs.sequence(out, index, 0).copy_(exact[0])
    assert checking.check_forward(inputs, out).passed
    first = inputs.sequence(out, 0, 0)
    first[-1, -1, 7] += 0.25
    assert not checking.check_forward(inputs, out).passed


LONG = Case("dense", ((500, 500),) * 2, 4, 2, True)


class LateError(Reference):
    """Right results; past the length of the small check the gradient of one row is off."""

    def call(self, inputs):
        out = super().call(inputs)
        if inputs.case.seqlen_q > checking.CHECKED_SEQLEN and out.requires_grad:
            factor = torch.ones_like(out)
            factor[-1, -40, -1] = 1.5
            out.register_hook(lambda gradient: gradient * factor)
        return out


@pytest.mark.parametrize("case", [DENSE, CAUSAL, LONG], ids=str)
def test_the_check_of_gradients(case):
    inputs = providers.Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    assert checking.check_gradients(Reference("right"), inputs).passed
    assert checking.check_gradients(LateError("late"), inputs).passed == (case is not LONG)


def test_gradients_of_keys_that_no_row_sees():
    """Rows at the start of a causal sequence do not see its last key: its gradient is 0."""

    class Leaking(Reference):
        def call(self, inputs):
            return super().call(inputs) + 1e-4 * inputs.v[:, -1:]

    case = Case("dense", ((200, 200),), 1, 1, True)
    inputs = providers.Inputs.random(case, torch.device("cpu"), torch.bfloat16)
    assert all(check.passed for check in checking._check_rows(Reference("right"), inputs))
    passed = [check.passed for check in checking._check_rows(Leaking("leaking"), inputs)]
    assert passed[:2] == [False, False]


def test_providers_say_why_they_do_not_run():
    ours, theirs, five, divided, frost, cudnn, _, math = providers.default_providers()
    if not torch.cuda.is_available():
        assert {p.name: p.missing() for p in (ours, cudnn)} == {
            "ours": "no CUDA device",
            "cuDNN": "no CUDA device",
        }
    windowed = Case("window", ((64, 64),), 2, 1, True, (16, None))
    assert "local attention" in theirs.refuses(windowed, BACKWARD)
    assert theirs.refuses(windowed, FORWARD) is None
    assert "local attention" in five.refuses(windowed, BACKWARD)
    assert "its forward" in five.refuses(windowed, FORWARD)
    assert "its backward" in divided.refuses(windowed, BACKWARD)
    assert divided.refuses(windowed, FORWARD) is None
    assert "window only as a mask" in math.refuses(windowed, FORWARD)
    assert "left bound" in frost.refuses(windowed, BACKWARD)
    assert frost.refuses(windowed, FORWARD) is None
    capped = Case("dense", ((64, 64),), 2, 1, True, softcap=5.0)
    assert "softcap" in frost.refuses(capped, FORWARD) and frost.refuses(capped, BACKWARD)
    unequal = Case("unequal", ((1, 64),), 2, 1, True)
    assert frost.refuses(unequal, FORWARD) is None
    assert "top left" in cudnn.refuses(unequal, FORWARD)
    assert providers.attempt(lambda: 3) == (3, None)
    _, reason = providers.attempt(lambda: torch.zeros(2) @ torch.zeros(3))
    assert reason


def test_providers_by_name():
    names = [provider.name for provider in providers.default_providers()]
    assert [p.name for p in throughput.chosen_providers(None)] == names[:-1]
    assert names[-1] == "PyTorch math"
    assert [p.name for p in throughput.chosen_providers(["cuDNN", "ours"])] == ["ours", "cuDNN"]


def test_e4m3_is_beside_bf16_and_judged_by_rounded_probabilities():
    """Inputs are rounded, the reference has P in e4m3: a result with such a P passes, one without
    its last keys does not."""
    assert [p.name for p in throughput.chosen_providers(None, E4M3)] == ["ours", "ours, bf16"]
    with pytest.raises(ValueError, match="cuDNN: no q, k and v in e4m3"):
        throughput.chosen_providers(["cuDNN", "ours"], E4M3)
    case = Case("test", ((96, 96),), 2, 1, causal=True)
    inputs = providers.Inputs.random(case, torch.device("cpu"), E4M3)
    assert {t.dtype for t in inputs.leaves} == {E4M3}
    assert {t.dtype for t in inputs.in_bf16.leaves} == {torch.bfloat16}
    values = [t.double() for t in inputs.leaves]
    out = reference.e4m3_pytorch(*values, torch.bfloat16, window_size=(None, 0))
    assert checking.check_forward(inputs, out).passed
    values[2][:, 40:] = 0
    wrong = reference.e4m3_pytorch(*values, torch.bfloat16, window_size=(None, 0))
    assert not checking.check_forward(inputs, wrong).passed


def test_there_is_no_backward_in_e4m3(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="no gradients in e4m3"):
        throughput.main(argparse.Namespace(dtype="e4m3", direction="backward", modelled=False))
