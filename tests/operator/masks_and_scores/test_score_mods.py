"""Functions of scores: ALiBi, one that is not linear, one that reads a tensor; in plain calls and
beside every mask, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cache_reference
import cutlass
import cutlass.cute as cute
import pytest
import torch

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa4_hd256.check import reference
from fa4_hd256.score_mods import ScoreMod, alibi

LSE_TOLERANCE = 1e-3
SLOPES = torch.tensor([0.05, 0.4, 0.011, 0.2])
#: Slopes by batch entry and head.
OF_ENTRIES = torch.stack((SLOPES, SLOPES.flip(0), SLOPES * 2))
#: Bias by head and key, of more keys than any call here has.
BIAS = torch.linspace(-3.0, 3.0, 4 * 700).view(4, 700)[:, torch.randperm(700)]
OF_QUERIES = torch.randint(-1, 2, (700,), dtype=torch.int32)
BOUND = 2.0


def bounded(score, place, tensors):
    """Bound the score by -BOUND and BOUND."""
    return score / (1.0 + cute.arch.fmax(score, -score) / BOUND)


def slope_of_bounded(score, place, tensors):
    root = 1.0 + cute.arch.fmax(score, -score) / BOUND
    return 1.0 / (root * root)


def by_key(score, place, tensors):
    """Add another number for each head and key; BIAS is read within its bounds alone."""
    return score + tensors[0][place.head, place.key]


def everything(score, place, tensors):
    """Change a score by all that a place says, and tensors of both dtypes."""
    slopes, of_keys, of_queries = tensors
    distance = cutlass.Float32(place.query + place.seqlen_k - place.seqlen_q - place.key)
    score = 0.5 * score - slopes[place.batch, place.head] * cute.arch.fmax(distance, -distance)
    return score + of_keys[place.head, place.key] + cutlass.Float32(of_queries[place.query])


def slope_of_everything(score, place, tensors):
    return 0.5


@dataclass(frozen=True)
class Case:
    """A score_mod of a device and of (sequences, heads) of q, and the same as the reference takes
    it, of sequences of some lengths; batch: the entry of a sequence that the reference has
    alone."""

    mod: Callable[[Any, tuple[int, int]], ScoreMod]
    torch_mod: Callable[..., torch.Tensor]

    def of_reference(self, seqlen_q, seqlen_k, batch=0):
        return lambda s, b, h, q, k: self.torch_mod(
            s, b + batch, h, q, k, (q + seqlen_k - seqlen_q - k).abs()
        )


CASES = {
    "alibi": Case(
        lambda device, of: alibi(OF_ENTRIES[: of[0], : of[1]].to(device)),
        lambda s, b, h, q, k, distance: s - OF_ENTRIES.double()[b, h] * distance,
    ),
    "bounded": Case(
        lambda device, of: ScoreMod.of(bounded, slope_of_bounded),
        lambda s, b, h, q, k, distance: s / (1 + s.abs() / BOUND),
    ),
    "by key": Case(
        lambda device, of: ScoreMod.of(by_key, None, (BIAS.to(device),)),
        lambda s, b, h, q, k, distance: s + BIAS.double()[h, k],
    ),
    "everything": Case(
        lambda device, of: ScoreMod.of(
            everything,
            slope_of_everything,
            tuple(t.to(device) for t in (OF_ENTRIES, BIAS, OF_QUERIES)),
        ),
        lambda s, b, h, q, k, distance: (
            0.5 * s - OF_ENTRIES.double()[b, h] * distance + BIAS.double()[h, k] + OF_QUERIES[q]
        ),
    ),
}


def inputs(seqlen_q, seqlen_k, heads, batch=1, device="cpu", dtype=torch.bfloat16):
    shapes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    return tuple(torch.randn(batch, s, h, 256).to(device, dtype) for s, h in shapes)


def check(found, tensors, **options):
    """Check (out, lse) against the reference."""
    compared = reference.compare(*found, tensors, **options)
    assert compared.max_error <= compared.tolerance, compared
    assert compared.lse_max_error <= LSE_TOLERANCE, compared


# A diagonal and heads that share tiles; rows past the end, a sink, a scale below 0 and keys that
# end inside a tile; both edges of a window; few rows, whose heads differ inside a tile, with KV
# splits.
@pytest.mark.parametrize(
    ("name", "lengths", "heads", "options"),
    [("alibi", (200, 300), (2, 1), {"causal": True}),
     ("bounded", (130, 260), (2, 2), {"softmax_scale": -0.3, "learnable_sink": torch.ones(2)}),
     ("by key", (300, 280), (3, 1), {"window_size": (70, 20)}),
     ("by key", (2, 500), (4, 1), {"num_splits": 2}),
     ("alibi", (3, 260), (3, 1), {"causal": True})],
)  # fmt: skip
@pytest.mark.sampled
def test_forward(name, lengths, heads, options, device):
    case, batch = CASES[name], 2
    q, k, v = inputs(*lengths, heads, batch, device)
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    mod = case.mod(device, (batch, heads[0]))
    found = flash_attn_func(q, k, v, score_mod=mod, return_lse=True, **options)
    options.pop("num_splits", None)
    check(found, (q, k, v), score_mod=case.of_reference(*lengths), **options)


def packed(lengths, heads, device):
    """Return (packed rows, offsets, the rows of each sequence)."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(int(offsets[-1]), heads, 256).to(device, torch.bfloat16)
    return rows, offsets.int().to(device), rows.split(lengths)


@pytest.mark.sampled
def test_keys_in_pages(device):
    """Places are those of the sequence, whatever page of the cache holds a key."""
    q = torch.randn(2, 1, 4, 256).to(device, torch.bfloat16)
    pages = [torch.randn(6, 64, 1, 256).to(device, torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[4, 1, 5], [0, 3, 2]], dtype=torch.int32, device=device)
    used, case = torch.tensor([150, 64], dtype=torch.int32, device=device), CASES["by key"]
    out, lse = flash_attn_varlen_func(
        q,
        *pages,
        seqused_k=used,
        page_table=table,
        score_mod=case.mod(device, (2, 4)),
        return_lse=True,
    )
    for b, count in enumerate(used.tolist()):
        alone = (q[b : b + 1], *(cache_reference.gathered(t, table[b], count)[None] for t in pages))
        own = case.of_reference(1, count, b)
        check((out[b : b + 1], lse[b : b + 1]), alone, score_mod=own)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "pages"])
@pytest.mark.sampled
def test_a_cache_with_new_rows(paged, device):
    """New rows are keys behind those in use, and queries level with them."""
    lengths, new, case = [0, 21, 59], 5, CASES["everything"]
    shape, table = (
        ((3, 64, 1, 256), None)
        if not paged
        else (
            (6, 32, 1, 256),
            torch.tensor([[5, 1], [0, 3], [2, 4]], dtype=torch.int32, device=device),
        )
    )
    k_cache, v_cache = (torch.randn(shape).to(device, torch.bfloat16) for _ in "kv")
    q, k, v = inputs(new, new, (4, 1), 3, device)
    before = cache_reference.KvCache(
        k_cache.clone(), v_cache.clone(), lengths, None if table is None else table.tolist()
    )
    _, sequences = before.appended(list(q), list(zip(k, v)), None, True)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=used, page_table=table, causal=True,
        score_mod=case.mod(device, (3, 4)), return_lse=True,
    )  # fmt: skip
    for b, rows in enumerate(sequences):
        alone = tuple(t[None].to(torch.bfloat16) for t in rows)
        own = case.of_reference(new, lengths[b] + new, b)
        check((out[b : b + 1], lse[b : b + 1]), alone, causal=True, score_mod=own)
