"""Rotary embedding in the kernel that writes new rows to a cache: of these and of queries, beside
PyTorch's own operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from appended_rows import AppendTensors, run_append
from cache_reference import Rotary
from e4m3_cases import E4M3
from paged_cases import int32, offsets

from fa4_hd256 import flash_attn_with_kvcache

ARCHITECTURES = "sm_100a", "sm_90a"
POSITIONS = 40


@dataclass(frozen=True)
class Case:
    """lengths: rows in use; counts: new rows and queries of each sequence; packed: which of both
    are; begins: positions, None for lengths."""

    columns: int = 32
    table_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = True
    ordered: bool = True
    lengths: tuple[int, ...] = (0, 7, 30)
    counts: tuple[tuple[int, ...], tuple[int, ...]] = ((3, 3, 3), (2, 2, 2))
    packed: tuple[bool, bool] = (False, False)
    begins: tuple[int, ...] | None = None

    def rows(self, side: int, heads: int) -> torch.Tensor:
        counts = self.counts[side]
        shape = (sum(counts),) if self.packed[side] else (len(counts), counts[0])
        return torch.randn(*shape, heads, 256).to(self.dtype)

    def tensors(self, device) -> AppendTensors:
        angles = torch.randn(POSITIONS, self.columns)
        cos, sin = (t.to(self.table_dtype) for t in (angles.cos(), angles.sin()))
        k, v, q = self.rows(0, 2), self.rows(0, 2), self.rows(1, 4)
        caches = [torch.randn(len(self.lengths), POSITIONS, 2, 256).to(self.dtype) for _ in "kv"]
        new, of_q = (
            offsets(counts) if packed else None
            for counts, packed in zip(self.counts, self.packed, strict=True)
        )
        begins = None if self.begins is None else int32(self.begins)
        found = AppendTensors(
            k, v, *caches, int32(self.lengths), None, new, None, None, cos, sin, begins, q, of_q
        )
        return AppendTensors(*[None if t is None else t.to(device) for t in found])

    def positions(self, side: int) -> list[int]:
        """Return the position of each row."""
        ordered = side == 0 or self.ordered
        return [
            begin + i * ordered
            for begin, count in zip(self.begins or self.lengths, self.counts[side], strict=True)
            for i in range(count)
        ]

    def turned(self, rows: torch.Tensor, tensors: AppendTensors, side: int) -> torch.Tensor:
        """Return (rows, heads, 256) float64, NaN where the tables end."""
        rows = rows if self.packed[side] else rows.flatten(0, 1)
        rotary = Rotary(tensors.rotary_cos, tensors.rotary_sin, self.interleaved)
        is_known = [0 <= position < POSITIONS for position in self.positions(side)]
        places = zip(self.positions(side), is_known, strict=True)
        found = rotary.rotated(rows, [position if known else 0 for position, known in places])
        found[~torch.tensor(is_known, dtype=torch.bool), :, : 2 * self.columns] = torch.nan
        return found

    def options(self) -> tuple[str, bool, bool]:
        return "", self.interleaved, self.ordered


def close(found: torch.Tensor, exact: torch.Tensor, columns: int) -> None:
    """Rounded once where columns are rotated, the same bits elsewhere."""
    found, step = found.cpu().double(), torch.finfo(found.dtype).eps / 2
    assert torch.equal(found.isnan(), exact.isnan())
    error = (found - exact).abs().nan_to_num()
    # Each product of float32 has an error of its own, which cancellation leaves.
    assert (error <= step * exact.abs().nan_to_num() + 2**-20).all()
    assert torch.equal(found[..., 2 * columns :], exact[..., 2 * columns :])


def check(case: Case, device) -> None:
    tensors = case.tensors(device)
    before = tensors.k_cache.clone(), tensors.v_cache.clone(), tensors.q.clone(), tensors.k.clone()
    after, rotated = run_append(tensors, *case.options())
    added = [length + new for length, new in zip(case.lengths, case.counts[0], strict=True)]
    assert after.tolist() == added and rotated.is_contiguous()
    assert torch.equal(tensors.q, before[2]) and torch.equal(tensors.k, before[3])
    shape = rotated.shape if case.packed[1] else rotated.flatten(0, 1).shape
    close(rotated.view(shape), case.turned(tensors.q, tensors, 1), case.columns)
    k, places = case.turned(tensors.k, tensors, 0), []
    for sequence, (length, count) in enumerate(zip(case.lengths, case.counts[0], strict=True)):
        places += [(sequence, length + i) for i in range(count)]
    values = tensors.v if case.packed[0] else tensors.v.flatten(0, 1)
    for row, place in enumerate(places):
        if place[1] < POSITIONS:
            close(tensors.k_cache[place], k[row], case.columns)
            assert torch.equal(tensors.v_cache[place], values[row])
            before[0][place], before[1][place] = tensors.k_cache[place], tensors.v_cache[place]
    for cache, old in zip((tensors.k_cache, tensors.v_cache), before):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


CASES = {
    "neighbours": Case(),
    "halves": Case(interleaved=False),
    "all columns": Case(128, torch.bfloat16),
    "all columns, halves": Case(128, torch.bfloat16, interleaved=False),
    "8 columns, halves, float16": Case(8, torch.float16, torch.float16, interleaved=False),
    "24 columns": Case(24, ordered=False),
    "24 columns, halves": Case(24, interleaved=False, ordered=False, begins=(3, 0, 20)),
    "packed rows": Case(counts=((0, 5, 2), (3, 3, 3)), packed=(True, False)),
    "packed queries": Case(counts=((2, 2, 2), (0, 1, 6)), packed=(False, True)),
    "both packed": Case(
        counts=((4, 0, 1), (2, 0, 3)), packed=(True, True), interleaved=False, begins=(9, 1, 0)
    ),
    "no new rows": Case(counts=((0, 0, 0), (1, 2, 3)), packed=(True, True)),
    "no queries": Case(counts=((1, 2, 3), (0, 0, 0)), packed=(True, True)),
    "no new rows of a batch": Case(counts=((0, 0, 0), (2, 2, 2))),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sampled("neighbours", "all columns, halves", "no new rows of a batch")
def test_rows_and_queries(case, device):
    check(case, device)


@pytest.mark.simulator
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled("sm_100a-True")
def test_of_each_architecture(architecture, interleaved, monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", architecture)
    check(Case(interleaved=interleaved), "cpu")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.sampled("True")
def test_positions_that_the_tables_have_not(interleaved, device):
    """NaN where a row is rotated, in the cache too, so that nobody takes it for a result."""
    begins = (-1, POSITIONS - 1, 1 << 30)
    check(Case(24, lengths=(4, 6, 0), begins=begins, interleaved=interleaved), device)


def test_tables_of_other_layouts(device):
    """A part of wider tables, and tables whose rows lie side by side, which are copied."""
    case = Case(8, torch.bfloat16, interleaved=False)
    tensors = case.tensors(device)
    wide = [torch.randn(POSITIONS, 19).bfloat16().to(device) for _ in "cs"]
    for cos, sin in (
        [table[:, 3:11] for table in wide],
        [table[:, 3:11].t().contiguous().t() for table in wide],
        [table[:1, 3:11].expand(POSITIONS, 8) for table in wide],
    ):
        given = tensors._replace(rotary_cos=cos, rotary_sin=sin)
        _, rotated = run_append(given, *case.options())
        close(rotated.flatten(0, 1), case.turned(given.q, given, 1), case.columns)


def given_call(**changed):
    """Arguments of a call over pages, its rows to be rotated."""
    cos, sin = torch.randn(2, POSITIONS, 16).bfloat16()
    arguments = {
        "q": torch.randn(2, 2, 2, 256).bfloat16(),
        "k": torch.randn(2, 2, 1, 256).bfloat16(), "v": torch.randn(2, 2, 1, 256).bfloat16(),
        "k_cache": torch.randn(4, 16, 1, 256).bfloat16(),
        "v_cache": torch.randn(4, 16, 1, 256).bfloat16(), "cache_seqlens": int32([3, 17]),
        "page_table": int32([[3, 0], [1, 2]]), "rotary_cos": cos, "rotary_sin": sin,
        "rotary_seqlens": int32([5, 2]), "causal": True,
    }  # fmt: skip
    return arguments | changed


@pytest.mark.simulator
@pytest.mark.sampled
def test_over_a_cache_in_e4m3():
    """Rotated first, then divided and rounded; rows that are in e4m3 already are refused."""
    given = given_call(k_descale=torch.full((2, 1), 0.5), v_descale=torch.full((2, 1), 0.25))
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].to(E4M3)
    bfloat16 = given | {
        "k_cache": given["k_cache"].to(torch.bfloat16),
        "k_descale": None,
        "v_cache": given["v_cache"].to(torch.bfloat16),
        "v_descale": None,
    }
    flash_attn_with_kvcache(**given)
    flash_attn_with_kvcache(**bfloat16)
    for page, row in ((3, 3), (3, 4), (2, 1), (2, 2)):
        wanted = (bfloat16["k_cache"][page, row].float() / 0.5).clamp(-448, 448).to(E4M3)
        assert torch.equal(given["k_cache"][page, row].float(), wanted.float())
    given |= {name: given[name].to(E4M3) for name in ("k", "v")}
    with pytest.raises(TypeError, match="k is torch.float8_e4m3fn with rotary_cos; accepted"):
        flash_attn_with_kvcache(**given)
