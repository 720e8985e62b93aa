"""The page of a bringup's report: well-formed, complete, without a library or a network."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from bench.bringup import report
from bench.bringup.outcome import Target
from lab import bringup_page
from sm100_sim.timing import load

pytestmark = pytest.mark.simulator

GPU = Target("gpu", "NVIDIA <B200>", (10, 0), 148)
FIGURE = {"value": 150.0, "low": 140.0, "high": 170.0, "unit": "clocks", "constant": "tmem_load",
          "what": "a test"}  # fmt: skip
ROWS = [{"shape": "1x4096", "heads": "16/2", "mask": "causal", "panel": "forward, dense, causal",
         "details": {"fa4_hd256": {"tflops": 1400.0}, "cuDNN": {"tflops": 1200.0},
                     "flash-attn-4": {"status": "not installed"}}}]  # fmt: skip
MEASURED = {"state": "measured", "text": "150", "values": FIGURE}
RESULTS = {
    "golden": {"a & b": {"state": "passed"}, "c": {"state": "differs", "text": "1 < 2"}},
    "micro": {"TMEM load": MEASURED},
    # bench adds a table of ratios where both have rates.
    "throughput": {"forward dense": {
        "state": "measured", "values": {"tables": [{"rows": ROWS}, {"rows": [{"ratio": 1.2}]}]}}},
}  # fmt: skip


def test_the_page_is_whole(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.content(GPU, RESULTS, "2026-01-01 00:00")))
    assert bringup_page.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    text = (tmp_path / "report.html").read_text()
    assert "Bringup of NVIDIA &lt;B200&gt;" in text and "1 &lt; 2" in text
    assert "http" not in text and "<script" not in text and "src=" not in text
    assert text.count("<svg") == 2, "constants and throughput"
    assert text.count("<rect") == 2, "providers that have rates"
    model = load("b200").values().tmem_load
    assert f"150, model {model:g}" in text and "cuDNN" in text and ">1400<" in text


def test_plots_are_where_the_figures_are():
    """Twice the model's constant lies at the right end of an axis that reaches to 2x."""
    svg = bringup_page._against_model({"TMEM load": MEASURED}, {"tmem_load": 75.0})
    drawing = svg[svg.index("<svg") :]
    quoted = re.sub(r"=([^\s\"'>]+)", r'="\1"', drawing)
    (circle,) = ElementTree.fromstring(quoted).iter("circle")
    assert float(circle.get("cx")) == bringup_page._LABEL + bringup_page._WIDTH
    assert bringup_page._against_model({}, {}) == ""


def test_the_page_of_the_h200(tmp_path):
    """The report that docs/ holds has a page."""
    from checkout import ROOT

    content = json.loads((ROOT / "docs/bringup_h200.json").read_text())
    assert "Bringup of NVIDIA H200" in bringup_page.page(content)
