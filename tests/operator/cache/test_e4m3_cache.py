"""Caches in e4m3: new rows brought to it, kernels that a model needs, scheduler metadata."""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import E4M3, accurate, codes, exact, scales
from paged_cases import int32

from fa4_hd256 import (
    AttentionModel,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from fa4_hd256.architectures import named
from fa4_hd256.run.ahead.needs import Needs, specs_of
from fa4_hd256.run.kernel_names import kernel_named, name_of
from fa4_hd256.run.keys import cache_key

pytestmark = pytest.mark.simulator

LENGTHS, NEW, ROWS = [0, 21, 59], 3, 64


def nearest(values, scale):
    """The code of each value over its scale, by all codes' distances in float64."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    every = every[every.isfinite()].unique()
    wanted = (values.double() / scale.double()).clamp(-448, 448)
    upper = torch.searchsorted(every, wanted).clamp(1, len(every) - 1)
    below, above = every[upper - 1], every[upper]
    return below, above, wanted


@pytest.mark.parametrize("form", ["one", "sequences", "entries", "pages", None])
@pytest.mark.sampled("pages")
def test_new_rows_are_rounded_to_nearest(form):
    q = torch.randn(3, NEW, 8, 256).bfloat16()
    k, v = (torch.randn(3, NEW, 2, 256).bfloat16() for _ in "kv")
    k[0, 0, 0, :3] = torch.tensor([1e4, -1e4, 448.0])
    caches = [codes(3, ROWS, 2, 256) for _ in "kv"]
    given, options = {None: None, "one": scales(1)}.get(form, scales(3, 2)), {}
    places = [(b, LENGTHS[b] + i) for b in range(3) for i in range(NEW)]
    of_row = [scale.expand(3, 2) if scale.numel() == 1 else scale for scale in given or ()]
    if form == "pages":
        caches = [cache.reshape(12, 16, 2, 256) for cache in caches]
        table = torch.randperm(12).reshape(3, 4).int()
        given, options = scales(12, 2), {"page_table": table}
        places = [(int(table[b, row // 16]), row % 16) for b, row in places]
    if form == "entries":
        entries = [2, 0, 1]
        options = {"cache_batch_idx": int32(entries)}
        places = [(entries[b], row) for b, row in places]
    before = [cache.clone() for cache in caches]
    named = {} if given is None else {"k_descale": given[0], "v_descale": given[1]}
    flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=int32(LENGTHS),
        causal=True,
        num_splits=2,
        **named,
        **options,
    )
    for number, (cache, old, new) in enumerate(zip(caches, before, (k, v))):
        for place, (b, i) in zip(places, [(b, i) for b in range(3) for i in range(NEW)]):
            scale = torch.ones(2)
            if given is not None:
                scale = given[number][place[0]] if form == "pages" else of_row[number][b]
            below, above, wanted = nearest(new[b, i], scale[:, None])
            written = cache[place].double()
            error = (written - wanted).abs()
            # float32's own rounding of the quotient may move a tie.
            assert (error <= torch.minimum(wanted - below, above - wanted) + 2**-20 * wanted.abs()
                    ).all()  # fmt: skip
            old[place] = cache[place]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.sampled
def test_the_attention_is_of_new_rows_too():
    q = torch.randn(3, NEW, 4, 256).bfloat16()
    k, v = (torch.randn(3, NEW, 1, 256).bfloat16() for _ in "kv")
    caches, given = [codes(3, ROWS, 1, 256) for _ in "kv"], scales(3, 1)
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(LENGTHS), causal=True, return_lse=True,
        k_descale=given[0], v_descale=given[1],
    )  # fmt: skip
    for b, length in enumerate(LENGTHS):
        keys = exact([cache[b : b + 1, : length + NEW] for cache in caches],
                     [scale[b : b + 1] for scale in given])  # fmt: skip
        accurate((out[b : b + 1], lse[b : b + 1]), q[b : b + 1], keys, causal=True)


@pytest.mark.sampled
def test_rows_in_e4m3_are_written_as_they_are_and_others_are_refused():
    q = torch.randn(1, 1, 4, 256).bfloat16()
    caches, new = [codes(1, ROWS, 1, 256) for _ in "kv"], [codes(1, 1, 1, 256) for _ in "kv"]
    flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=7)
    for cache, row in zip(caches, new):
        assert torch.equal(cache[0, 7].view(torch.uint8), row[0, 0].view(torch.uint8))
    with pytest.raises(TypeError, match="k is torch.float32 on cpu; accepted: .*e4m3fn or"):
        flash_attn_with_kvcache(q, *caches, *(t.float() for t in new), cache_seqlens=7)
    with pytest.raises(TypeError, match="k is torch.bfloat16, v torch.float8_e4m3fn; accepted"):
        flash_attn_with_kvcache(q, *caches, new[0].bfloat16(), new[1], cache_seqlens=7)


@pytest.mark.sampled
def test_a_list_of_parts():
    lengths = int32([700, 60])
    q, keys, given = torch.randn(2, 1, 8, 256).bfloat16(), [codes(2, 700, 1, 256)] * 2, scales(1)
    metadata = get_scheduler_metadata(lengths, 1, 700, 8, 1, kv_dtype=E4M3)
    out, lse = flash_attn_varlen_func(
        q, *keys, seqused_k=lengths, max_seqlen_k=700, scheduler_metadata=metadata,
        return_lse=True, k_descale=given[0], v_descale=given[1],
    )  # fmt: skip
    for b, length in enumerate(lengths.tolist()):
        part = exact([t[b : b + 1, :length] for t in keys], given)
        accurate((out[b : b + 1], lse[b : b + 1]), q[b : b + 1], part)


SMALL = AttentionModel("small", 8, 1)


def needs(**options):
    return Needs(**{"uses": ("decode",), "forms": ("paged",), "page_sizes": (16,),
                    "use_clc": False, "kv_dtypes": (None, E4M3)} | options)  # fmt: skip


def rows_of(architecture):
    """Name the first rows of the tuning table."""
    return next(iter(architecture.gpus.values()))[0]


def test_what_a_model_needs(architecture):
    """Kernels for k and v in e4m3, of all forms of scales; each by its name and its own key."""
    own = named(architecture)
    specs = [s for s in specs_of(SMALL, needs(), own, rows_of(own)) if "combine" not in s.kind]
    appends = [s.problem_class for s in specs if s.kind == "append_rows"]
    assert {s.descale for s in appends if s.kv_dtype} == {"", "sequences", "pages"}
    assert {s.dtype for s in appends} == {torch.bfloat16, E4M3}
    forwards = [s for s in specs if s.kind != "append_rows"]
    by_dtype = [[s for s in forwards if s.problem_class.kv_dtype is d] for d in (None, E4M3)]
    assert {s.problem_class.descale for s in by_dtype[1]} == {"", "sequences", "pages"}
    assert {s.kind for s in by_dtype[1]} == {"forward_decode_e4m3"}
    assert {s.config.rows for s in by_dtype[1]} == {16, 32, 64}
    assert "forward_decode_e4m3" not in {s.kind for s in by_dtype[0]}
    assert len({cache_key(s) for s in specs}) == len(specs)
    for spec in specs:
        assert kernel_named(name_of(spec)) == spec
    with pytest.raises(ValueError, match="kv_dtype is torch.float8_e5m2"):
        needs(kv_dtypes=(torch.float8_e5m2,))
