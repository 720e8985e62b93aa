"""`python -m bench sglang` with engines on CPU tensors: SGLang serves a model with our backend, in
the simulator, and with its own in PyTorch; one backend does not start.

SGLang is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from checkout import ROOT

pytest.importorskip("sglang")
pytest.importorskip("transformers")

from bench.commands import sglang as command
from bench.measure.time_limit import TimeLimit
from bench.options import EAGER
from bench.serving import measured
from bench.serving.models import Size

pytestmark = pytest.mark.simulator

LOAD = measured.Load(requests=2, prompt=24, tokens=4, rounds=1)
#: SGLang's backend of CPU tensors.
OURS, NATIVE, ABSENT = "fa4_hd256", "torch_native", "no_such_backend"


def test_a_served_model(tmp_path, monkeypatch):
    """Both backends' log-probabilities are within the error of bf16."""
    paths = [str(ROOT / "tests/helpers"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    program = (sys.executable, str(ROOT / "tests/bench/helpers/sglang_bench_engine.py"))
    bench = measured.Bench(
        replace(command.ENGINE, program=program),
        Size(layers=1, hidden=256, heads=4, vocabulary=512, positions=512), LOAD,
        (OURS, NATIVE, ABSENT), tmp_path, {"device": "cpu", "mem_fraction_static": 0.1},
    )  # fmt: skip
    origin = {"basis": "computed", "machine": "CPU"}
    rates, agreements = measured.tables(bench, [("Qwen3", EAGER)], TimeLimit(), origin)
    rows = {row["backend"]: row for row in rates.rows}
    for name in (OURS, NATIVE):
        assert rows[name]["status"] == "ok", rows[name]
        assert rows[name]["later"] == 0
        assert rows[name]["prompts"] > 0 and rows[name]["step"] > 0
    # Decoding, a prompt.
    assert rows[OURS]["first"] >= 2 and rows[NATIVE]["first"] == 0
    assert rows[ABSENT]["status"] != "ok" and rows[ABSENT]["prompts"] is None
    pairs = {(row["one"], row["other"]): row for row in agreements.rows}
    assert pairs.keys() == {
        (OURS, NATIVE), (OURS, f"{OURS}, again"), (NATIVE, f"{NATIVE}, again")
    }  # fmt: skip
    assert pairs[OURS, f"{OURS}, again"]["scored_max"] == 0
    apart = pairs[OURS, NATIVE]
    assert 0 < apart["scored"] < 0.02 and apart["decoded"] < 0.02 and apart["best"] > 0.9
