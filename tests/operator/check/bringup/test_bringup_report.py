"""The report's text and page: well-formed, complete, without a library or a network."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fa4_hd256.check.bringup import page, report
from fa4_hd256.check.bringup.outcome import Target
from fa4_hd256.check.bringup.runner import BringupRun
from sm100_sim.timing import load

pytestmark = pytest.mark.simulator

GPU = Target("gpu", "NVIDIA <B200>", (10, 0), 148)
FIGURE = {"value": 150.0, "low": 140.0, "high": 170.0, "unit": "clocks", "constant": "tmem_load",
          "what": "a test"}  # fmt: skip
ROWS = [{"shape": "1x4096", "heads": "16/2", "mask": "causal", "panel": "forward, dense, causal",
         "details": {"fa4_hd256": {"tflops": 1400.0}, "cuDNN": {"tflops": 1200.0},
                     "flash-attn-4": {"status": "not installed"}}}]  # fmt: skip
RESULTS = {
    "golden": {"a & b": {"state": "passed"}, "c": {"state": "differs", "text": "1 < 2"}},
    "micro": {"TMEM load": {"state": "measured", "text": "150", "values": FIGURE},
              "CLC query": {"state": "hang", "text": "no end within 60 s"}},
    "throughput": {"forward dense": {
        "state": "measured", "values": {"tables": [{"rows": ROWS}]}}},
    "answers": {"triples": {"state": "passed"}},
}  # fmt: skip


def test_the_text_lists_what_needs_a_look():
    text = report.text(GPU, RESULTS, "the driver hangs")
    assert "golden: 1 passed, 1 differs" in text and "  c: differs  1 < 2" in text
    assert "a & b" not in text, "passed cases of golden are counted"
    assert "CLC query: hang  no end within 60 s" in text and "stopped: the driver hangs" in text
    assert "answers" not in text


def test_the_page_is_whole(tmp_path):
    run = BringupRun(tmp_path, GPU)
    run.results = RESULTS
    report.write_reports(run)
    text = (tmp_path / "report.html").read_text()
    assert "Bringup of NVIDIA &lt;B200&gt;" in text and "1 &lt; 2" in text
    assert "http" not in text and "<script" not in text and "src=" not in text
    assert text.count("<svg") == 2, "constants and throughput"
    model = load("b200").values().tmem_load
    assert f"150, model {model:g}" in text and "cuDNN" in text and ">1400<" in text


def test_plots_are_where_the_figures_are():
    """Twice the model's constant lies at the right end of an axis that reaches to 2x."""
    steps = {"TMEM load": {"state": "measured", "values": FIGURE}}
    svg = page._against_model(steps, {"tmem_load": 75.0})
    drawing = svg[svg.index("<svg") :]
    quoted = re.sub(r"=([^\s\"'>]+)", r'="\1"', drawing)
    (circle,) = ElementTree.fromstring(quoted).iter("circle")
    assert float(circle.get("cx")) == page._LABEL + page._WIDTH
    assert page._against_model({}, {}) == ""
