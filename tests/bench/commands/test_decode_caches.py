"""Test how decode over several forms of caches is measured: our calls run in the simulator or in
PyTorch, and a timer counts instead of measuring."""

import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.measure import caches
from bench.measure.providers import Inputs, Pages
from bench.measure.settings import Sampling
from fa4_hd256.quantize import dequantize_nvfp4

LENGTHS = ((2, 300),) * 2
PAGED = caches.CacheCase("pages", LENGTHS, 4, 2, True, sizes=(None, 128, 16), peer=True)
TYPED = caches.CacheCase("decode", LENGTHS, 4, 2, True, kv_types=("bf16", "e4m3", "NVFP4"))
#: K and V of a case, elements.
ELEMENTS = 2 * 300 * 2 * 2 * 256


@pytest.fixture(params=["PyTorch", "simulator"])
def here(monkeypatch, request):
    """Let ours run where there is no GPU; flash-attn-4 does not."""
    if request.param == "PyTorch":
        in_torch(monkeypatch)
    monkeypatch.setattr(caches.Ours, "missing", lambda self: None)
    monkeypatch.setattr(caches.FlashAttention4, "missing", lambda self: "no CUDA device")


@pytest.mark.parametrize(
    ("size", "dtype"), [(16, torch.bfloat16), (128, torch.bfloat16), (1, torch.float8_e4m3fn)],
    ids=str,
)  # fmt: skip
def test_pages_hold_the_rows(size, dtype):
    inputs = Inputs.random(PAGED.of(None), torch.device("cpu"), torch.bfloat16)
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


def test_all_caches_hold_the_same_numbers():
    found = caches._inputs(TYPED, torch.device("cpu"))
    of_bf16, of_e4m3, of_nvfp4 = (found[kind] for kind in ("bf16", "e4m3", "NVFP4"))
    assert of_bf16.k.dtype == torch.bfloat16 and of_e4m3.k.dtype == torch.float8_e4m3fn
    for name, scales in zip("kv", of_nvfp4.block_scales, strict=True):
        exact = getattr(of_bf16, name)
        assert torch.equal(exact, getattr(of_e4m3, name).bfloat16())
        assert torch.equal(exact.double(), dequantize_nvfp4(
            getattr(of_nvfp4, name), scales, dtype=torch.float64))  # fmt: skip
        # Rounded from standard normal numbers, kept within 3.
        assert 0.9 < exact.float().std() < 1.1 and len(exact.unique()) == 15
    assert torch.equal(of_bf16.q, of_e4m3.q) and torch.equal(of_bf16.q, of_nvfp4.q)


@pytest.mark.sampled("PyTorch")
def test_a_row_of_pages(here):
    row = caches.measured(PAGED, CountingTimer(), Sampling(0, 3))
    assert [row[name] for name in ("none", "pages_128", "pages_16")] == pytest.approx([1, 2, 3])
    assert row["over_pages_16"] == pytest.approx(2) and row["over_pages_128"] == pytest.approx(1)
    assert row["range_pages_128"] == "2.0..2.0" and row["range_none"] == "1.0..1.0"
    # K and V once, in bf16, in the microsecond without pages.
    assert row["rate_none"] == pytest.approx(ELEMENTS * 2 / 1e-6 / 1e12)
    assert (row["clock_mhz"], row["power_watts"]) == (2000, 600)
    assert (row["shape"], row["heads"], row["basis"]) == (PAGED.shape, "4/2", "measured")
    assert row["theirs_none"] is None
    assert row["refused"] == "flash-attn-4: no CUDA device" and not row["failed"]
    text = caches.table(PAGED, "T", [row]).as_markdown()
    assert "2x(2, 300)" in text and "Not run: flash-attn-4: no CUDA device." in text


@pytest.mark.simulator
@pytest.mark.sampled("PyTorch")
def test_a_row_of_types(here):
    row = caches.measured(TYPED, CountingTimer(), Sampling(0, 3))
    assert (row["bf16"], row["e4m3"], row["over_e4m3"]) == pytest.approx((1, 2, 1))
    assert (row["NVFP4"], row["over_NVFP4"]) == pytest.approx((3, 2))
    assert row["rate_bf16"] == pytest.approx(ELEMENTS * 2 / 1e-6 / 1e12)
    assert row["rate_e4m3"] == pytest.approx(row["rate_bf16"] / 4)
    assert row["rate_NVFP4"] == pytest.approx(row["rate_bf16"] * 9 / 32 / 3)
    assert row["refused"] == "" and not row["failed"]
    assert "2x(2, 300)" in caches.table(TYPED, "T", [row]).as_markdown()


@pytest.mark.sampled("*PyTorch*")
@pytest.mark.parametrize("kv_type", ["bf16", "e4m3"])
def test_pages_of_few_rows(here, kv_type):
    """Pages of 8 to 1 rows are measured beside those of 64, for our kernels, in both dtypes."""
    sizes = caches.small_page_cases()[0].sizes
    case = caches.CacheCase("pages", LENGTHS, 4, 2, True, kv_types=(kv_type,), sizes=sizes)
    row = caches.measured(case, CountingTimer(), Sampling(0, 3))
    of_sizes = [row[f"pages_{size}"] for size in (64, 8, 4, 2, 1)]
    assert of_sizes == pytest.approx([1, 2, 3, 4, 5])
    assert row["over_pages_1"] == pytest.approx(4) and not row["failed"] and row["refused"] == ""
    nbytes = {"bf16": 2, "e4m3": 1}[kv_type]
    assert row["rate_pages_64"] == pytest.approx(ELEMENTS * nbytes / 1e-6 / 1e12)
    text = caches.table(case, "T", [row]).as_markdown()
    assert "pages of 1 over the first" in text and kv_type in text


@pytest.mark.sampled
@pytest.mark.parametrize("wrong", ["pages_16", "e4m3"])
def test_wrong_results_are_not_timed(here, wrong, monkeypatch):
    case, call = PAGED if wrong == "pages_16" else TYPED, caches.Ours.call

    def called(self, inputs):
        is_wrong = inputs.case.page_size == 16 or inputs.k.dtype == torch.float8_e4m3fn
        return call(self, inputs) + float(is_wrong)

    monkeypatch.setattr(caches.Ours, "call", called)
    row = caches.measured(case, CountingTimer(), Sampling(0, 1))
    assert row[wrong] is None and row[f"over_{wrong}"] is None
    assert row["failed"] and "ours: wrong: error" in row["refused"]
