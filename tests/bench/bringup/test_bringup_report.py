"""The report's text."""

from __future__ import annotations

import pytest

from bench.bringup import report
from bench.bringup.outcome import Target

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
