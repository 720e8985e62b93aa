"""Progress: a record of one logger, a line on a terminal, nothing else anywhere."""

from __future__ import annotations

import logging
import time

import pytest

from fa4_hd256 import progress, waiting
from fa4_hd256.run import compile


@pytest.mark.parametrize(("wanted", "seconds", "shown"), [
    ("1", 0.2, True), ("1", 0.0, False), ("0", 0.2, False),
])  # fmt: skip
def test_a_line_where_somebody_waits(wanted, seconds, shown, monkeypatch, capsys, caplog):
    monkeypatch.setenv("FA4_HD256_PROGRESS", wanted)
    monkeypatch.setattr(waiting, "LATER", 0.05)
    with caplog.at_level(logging.INFO, "fa4_hd256"), progress.step("compiling forward (sm_90a)"):
        time.sleep(seconds)
    out, err = capsys.readouterr()
    assert out == "" and ("compiling forward (sm_90a)" in err) == shown
    assert caplog.record_tuples == [("fa4_hd256", logging.INFO, "compiling forward (sm_90a)")]


def test_nothing_is_printed_where_nobody_asks(capfd, monkeypatch):
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    with progress.step("simulating"):
        pass
    assert capfd.readouterr() == ("", "")


def test_kernels_are_named_without_the_code_that_makes_them():
    import torch

    from fa4_hd256 import ForwardConfig
    from fa4_hd256.kernels.problem_class import ProblemClass
    from fa4_hd256.run.catalogue import KernelSpec
    from fa4_hd256.run.kernel_names import described

    spec = KernelSpec("forward", ForwardConfig(rescale_threshold=4.0), ProblemClass(torch.bfloat16))
    assert described(spec) == "forward for sm_100a (dtype bfloat16; rescale_threshold 4.0)"
    parts = KernelSpec("backward_sum", ForwardConfig(), torch.float16)
    assert described(parts) == "backward_sum for sm_100a (float16)"


def test_compiling_is_a_step(monkeypatch, caplog):
    import torch

    from fa4_hd256 import ForwardConfig
    from fa4_hd256.kernels.problem_class import ProblemClass
    from fa4_hd256.run.catalogue import KernelSpec

    def refuse(_):
        raise RuntimeError("not compiled in this test")

    monkeypatch.setattr(compile, "trace_and_compile", refuse)
    spec = KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16))
    with caplog.at_level(logging.INFO, "fa4_hd256"), pytest.raises(RuntimeError, match="not comp"):
        compile._compile_entry("key", spec)
    assert caplog.messages == ["compiling forward (sm_100f)"]
