"""The scripts under examples/, which compare themselves with SDPA."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch
from checkout import ROOT

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.simulator


@pytest.fixture
def plain(monkeypatch, capsys):
    """Runs an example and returns what it prints."""

    def plain(name, *arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *map(str, arguments)])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out

    return plain


def test_decoding_over_pages(plain, monkeypatch):
    """Results equal SDPA's, times say whose they are; a difference is an error."""
    options = ("--steps", 1, "--batch", 2, "--page-size", 16)
    head, pages, sdpa, error = plain("decode.py", *options).splitlines()
    assert head.startswith("2 sequences of 30 to 40 rows, pages of 16")
    for line in (pages, sdpa):
        rate = re.search(r"(\S+) tokens a second  \(time of the simulator", line)
        assert rate and float(rate[1]) > 0
    assert error.startswith("largest difference")
    functional = torch.nn.functional
    exact = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention",
        lambda q, k, v, **more: exact(q, k, v.flip(0), **more),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="the results differ"):
        plain("decode.py", *options)


@pytest.mark.sampled
def test_continuous_batching(plain, monkeypatch):
    """Answers equal SDPA's; another attention is an error."""
    pytest.importorskip("transformers")
    from fa4_hd256.integrations import transformers as integration

    options = ("--requests", 2, "--longest", 18, "--new-tokens", 2)
    head, sdpa, ours, error = plain("continuous_batching.py", *options).splitlines()
    assert head.startswith("2 requests of 9 to 18 tokens, 16 a pass")
    assert sdpa.startswith("SDPA") and ours.startswith("fa4_hd256")
    assert error.startswith("largest difference")
    exact = integration.flash_attn_varlen_func
    monkeypatch.setattr(
        integration, "flash_attn_varlen_func", lambda q, *rest, **more: exact(-q, *rest, **more)
    )
    with pytest.raises(AssertionError, match="the results differ"):
        plain("continuous_batching.py", *options)


def test_every_example_is_listed():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
