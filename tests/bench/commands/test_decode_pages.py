"""Keys in pages as they are measured: what a row holds, with ours in the simulator or in PyTorch,
and a timer that counts."""

import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.decode import pages
from bench.measure.providers import Inputs, Pages
from bench.measure.timer import Sampling
from bench.suite import Case

CASE = Case("pages", ((2, 300),) * 2, 4, 2, True)


@pytest.fixture(params=["PyTorch", "simulator"])
def here(monkeypatch, request):
    """Let ours run where there is no GPU; flash-attn-4 does not."""
    if request.param == "PyTorch":
        in_torch(monkeypatch)
    monkeypatch.setattr(pages.Ours, "missing", lambda self: None)
    monkeypatch.setattr(pages.FlashAttention4, "missing", lambda self: "no CUDA device")


@pytest.mark.parametrize(
    ("size", "dtype"), [(16, torch.bfloat16), (128, torch.bfloat16), (1, torch.float8_e4m3fn)],
    ids=str,
)  # fmt: skip
def test_pages_hold_the_rows(size, dtype):
    inputs = Inputs.random(CASE, torch.device("cpu"), torch.bfloat16)
    of_both = inputs.k.to(dtype), inputs.v.to(dtype)
    found = Pages.of(*of_both, size, torch.Generator().manual_seed(0))
    for pool, whole in zip((found.k, found.v), of_both, strict=True):
        assert pool.dtype == dtype
        pool, whole = pool.float(), whole.float()
        rows = pool[found.table.long()].flatten(1, 2)
        assert torch.equal(rows[:, :300], whole)
        assert not rows[:, 300:].any()
    assert sorted(found.table.flatten().tolist()) == list(range(len(found.k)))
    assert found.lengths.tolist() == [300, 300]


@pytest.mark.sampled("PyTorch")
def test_a_row(here):
    row = pages.measured(CASE, CountingTimer(), Sampling(0, 3))
    assert [row[name] for name in ("none", "pages_128", "pages_16")] == pytest.approx([1, 2, 3])
    assert row["behind_16"] == pytest.approx(2) and row["behind_128"] == pytest.approx(1)
    assert row["range_pages_128"] == "2.0..2.0" and row["range_none"] == "1.0..1.0"
    # K and V once, in bf16, in the microsecond without pages.
    assert row["rate"] == pytest.approx(2 * 300 * 2 * 2 * 256 * 2 / 1e-6 / 1e12)
    assert (row["clock_mhz"], row["power_watts"]) == (2000, 600)
    assert (row["shape"], row["heads"], row["basis"]) == (CASE.shape, "4/2", "measured")
    assert row["theirs_none"] is None
    assert row["refused"] == "flash-attn-4: no CUDA device" and not row["failed"]
    text = pages.table([row]).as_markdown()
    assert "2x(2, 300)" in text and "Not run: flash-attn-4: no CUDA device." in text


@pytest.mark.sampled("*PyTorch*")
@pytest.mark.parametrize("kv_type", ["bf16", "e4m3"])
def test_pages_of_few_rows(here, kv_type):
    """Beside those of 64 rows, without others' kernels; keys and values in both types."""
    case = pages.CacheCase("pages", CASE.lengths, 4, 2, True, kv_type=kv_type)
    row = pages.measured_small(case, CountingTimer(), Sampling(0, 3))
    of_sizes = [row[f"pages_{size}"] for size in (64, 8, 4, 2, 1)]
    assert of_sizes == pytest.approx([1, 2, 3, 4, 5])
    assert row["behind_1"] == pytest.approx(4) and "behind_64" not in row
    assert not row["failed"] and row["refused"] == ""
    nbytes = {"bf16": 2, "e4m3": 1}[kv_type]
    assert row["rate"] == pytest.approx(2 * 300 * 2 * 2 * 256 * nbytes / 1e-6 / 1e12)
    text = pages.small_table([row]).as_markdown()
    assert "pages of 1 over 64" in text and kv_type in text


def test_cases_of_few_rows():
    """Both types of one sequence and of many, of the lengths for which there is an aim."""
    found = pages.small_cases()
    assert {case.kv_type for case in found} == {"bf16", "e4m3"}
    assert {case.seqlen_k for case in found} == {8192, 131072}
    assert len({str(case) for case in found}) == len(found)


@pytest.mark.sampled
def test_wrong_results_are_not_timed(here, monkeypatch):
    call = pages.Ours.call
    monkeypatch.setattr(
        pages.Ours, "call",
        lambda self, inputs: call(self, inputs) + (1.0 if inputs.case.page_size == 16 else 0.0),
    )  # fmt: skip
    row = pages.measured(CASE, CountingTimer(), Sampling(0, 1))
    assert row["pages_16"] is None and row["behind_16"] is None
    assert row["failed"] and "ours: wrong: error" in row["refused"]
