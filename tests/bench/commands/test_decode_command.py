"""The command decode: its parts, the cases of each, and what it does without a GPU."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from fake_timer import CountingTimer

from bench import modelled
from bench.__main__ import main
from bench.commands import decode
from bench.measure import throughput
from bench.suite import Case

pytest.importorskip("cutlass")


def test_the_parts_measure_and_a_wrong_result_fails(monkeypatch, capsys):
    """Every part that was requested is printed; the exit status tells of one that failed."""
    case = Case("decode", ((1, 64),), 2, 1, True)
    failing = []

    def measured(case, timer, sampling):
        return {"shape": case.shape, "heads": case.heads_text, "failed": timer.l2 in failing,
                "basis": "measured", "machine": "a GPU"}  # fmt: skip

    def table(rows):
        return decode.Table("decode", "T", (decode.Column("shape"),), list(rows))

    class Timer(CountingTimer):
        def __init__(self, l2):
            super().__init__()
            self.l2 = l2

    parts = {name: decode.Part(lambda: [case], (), measured, table, part.l2)
             for name, part in decode.PARTS.items()}  # fmt: skip
    monkeypatch.setattr(decode, "PARTS", parts)
    monkeypatch.setattr(decode, "CudaTimer", Timer)
    monkeypatch.setattr(decode.Ours, "missing", lambda self: None)
    assert main(["decode", "pages", "new-rows"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("1x(1, 64)") == 2
    assert "each run, cold: lines" in printed and "each run, warm: what the run" in printed
    assert main(["decode", "pages", "new-rows", "--l2", "clean"]) == 0
    assert capsys.readouterr().out.count("L2 before each run, clean: ") == 2
    failing.append(decode.WARM)
    assert main(["decode", "kv-types", "pages"]) == 0 and main(["decode", "new-rows"]) == 1


def test_rates_of_a_case(monkeypatch):
    """`rates` has every provider, with its reason where it does not run."""
    seconds = np.array([1e-3])

    def measured_row(job, providers, timer, sampling, dtype):
        case, direction = job
        details = {one.name: {"status": "no GPU"} for one in providers}
        details["ours"] = {"status": "ok", "median_ms": 1.0, "tflops": 2.0, "tflops_low": 1.0,
                           "tflops_high": 3.0}  # fmt: skip
        row = throughput.comparison_row(case, direction, details, {"ours": seconds})
        return row | {"basis": "measured", "machine": "a GPU"}

    monkeypatch.setattr(decode.throughput, "measured_row", measured_row)
    timer = CountingTimer()
    timer.l2 = "cold"
    part = decode.PARTS["rates"]
    row = part.measured(part.cases()[0], timer, None)
    assert not row["failed"] and row["us"] == 1000.0
    table = part.table([row])
    assert table.command == "decode"
    assert "cuDNN: 1 of 1 not run: no GPU." in table.as_markdown()


@pytest.mark.parametrize("command", ["throughput", "decode", "schedulers", "ex2-sweep"])
def test_without_a_gpu_and_without_the_lab_a_command_says_so(command, monkeypatch, capsys):
    def missing(name, before=modelled.importlib.util.find_spec):
        return None if name == "lab" else before(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(modelled.importlib.util, "find_spec", missing)
    assert main([command, "--modelled"]) == 2
    assert "lab/, which has it, is not here" in capsys.readouterr().err


def test_modelled_figures_are_said_to_be_modelled(monkeypatch, capsys):
    seen = []

    class Module:
        @staticmethod
        def main(arguments):
            seen.append(arguments)
            return 0

    def imported(name):
        seen.append(name)
        return Module

    monkeypatch.setattr(modelled.importlib, "import_module", imported)
    for given, reason in ((True, "--modelled"), (False, "no GPU here runs the kernels")):
        arguments = Namespace(modelled=given, machine="b300")
        assert modelled.modelled("ex2_sweep", arguments) == 0
        said = f"{reason}: figures are modelled, of b300, not measured\n"
        assert capsys.readouterr() == ("", said)
    assert seen == ["lab.modelled.ex2_sweep", seen[1], "lab.modelled.ex2_sweep", arguments]
