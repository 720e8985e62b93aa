"""`python -m bench vllm` with engines on CPU tensors: what its tables say of equal backends, and of
one that does not start.

vLLM is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from checkout import ROOT

pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)
pytest.importorskip("transformers")

from bench.commands import vllm as command
from bench.measure.time_limit import TimeLimit
from bench.options import EAGER
from bench.serving import measured
from bench.serving.models import Size

pytestmark = pytest.mark.simulator

LOAD = measured.Load(requests=2, prompt=24, tokens=3, rounds=1)
#: vLLM's own name, which means our backend here: FA4_HD256_VLLM_FLASH_ATTN.
SAME, ABSENT = "FLASH_ATTN", "NO_SUCH_BACKEND"


def test_equal_backends_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_HD256_VLLM_FLASH_ATTN", "1")
    paths = [str(ROOT / "tests/helpers"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    program = (sys.executable, str(ROOT / "tests/bench/helpers/vllm_bench_engine.py"))
    bench = measured.Bench(
        replace(command.ENGINE, program=program),
        Size(layers=1, hidden=256, heads=4, vocabulary=512, positions=512), LOAD,
        ("CUSTOM", SAME, ABSENT), tmp_path,
        {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.05,
         "compilation_config": {"mode": 0, "custom_ops": ["none"]}},
    )  # fmt: skip
    origin = {"basis": "computed", "machine": "CPU"}
    rates, agreements = measured.tables(bench, [("Qwen3", EAGER)], TimeLimit(), origin)
    rows = {row["backend"]: row for row in rates.rows}
    for name in ("CUSTOM", SAME):
        assert rows[name]["status"] == "ok", rows[name]
        # Decoding, a prompt; and nothing more behind the warm-up.
        assert rows[name]["first"] >= 2 and rows[name]["later"] == 0
        assert rows[name]["prompts"] > 0 and rows[name]["step"] > 0
    assert ABSENT in rows[ABSENT]["status"] and rows[ABSENT]["prompts"] is None
    pairs = {(row["one"], row["other"]): row for row in agreements.rows}
    assert pairs.keys() == {
        ("CUSTOM", SAME), ("CUSTOM", "CUSTOM, again"), (SAME, f"{SAME}, again")
    }  # fmt: skip
    for row in pairs.values():
        assert (row["equal"], row["requests"], row["first"]) == (2, 2, None)
        assert row["decoded_max"] == row["scored_max"] == 0 and row["best"] == 1
    assert "| Qwen3" in rates.as_markdown()
