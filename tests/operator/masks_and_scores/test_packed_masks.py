"""Block masks over packed sequences, as bits and as functions, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from test_score_mods import OF_ENTRIES
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks, packed_row
from fa4_hd256.check import reference
from fa4_hd256.kernels.functions.row_places import SequenceOfQuery
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.score_mods import alibi

OF_Q, OF_K = [130, 0, 170], [150, 40, 190]
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"


def offsets_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def numbers_of(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


OWN = numbers_of(OF_Q)[:, None] == numbers_of(OF_K)


def near(b, h, q, k):
    """Mask by positions in the packed row."""
    return (q * 5 + k * 3 + h) % 4 > 0


def near_in_kernel(batch, head, query, key, tensors):
    return (query * 5 + key * 3 + head) % 4 > 0


def dense_of(function, heads=2):
    index = torch.meshgrid(*map(torch.arange, (1, heads, sum(OF_Q), sum(OF_K))), indexing="ij")
    return function(*index) & OWN


def block_mask_of(function, device):
    return create_block_mask(function, 1, 2, sum(OF_Q), sum(OF_K), device=device)


def leaves(device):
    shapes = ((sum(OF_Q), 2), (sum(OF_K), 1), (sum(OF_K), 1))
    made = (torch.randn(rows, heads, 256).to(device, torch.bfloat16) for rows, heads in shapes)
    return tuple(tensor.requires_grad_() for tensor in made)


def attend(tensors, device, **options):
    cu_q, cu_k = offsets_of(OF_Q, device), offsets_of(OF_K, device)
    return flash_attn_varlen_func(
        *tensors, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max(OF_Q),
        max_seqlen_k=max(OF_K), return_lse=True, **options,
    )  # fmt: skip


def check(tensors, found, dense, score_mod=None):
    """Check (out, lse) and gradients through both."""
    out, lse = found
    given = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad(found, tensors, given)
    rows = tuple(tensor.detach()[None] for tensor in tensors)
    options = {"mask": dense, "score_mod": score_mod}
    compared = reference.compare(out.detach()[None], lse.detach()[None], rows, **options)
    assert compared.max_error <= compared.tolerance, compared
    assert compared.lse_max_error <= 1e-3, compared
    named = {name: one[None] for name, one in zip("qkv", gradients, strict=True)}
    of_gradients = reference.compare_gradients(
        named, rows, *(one[None] for one in given), **options
    )
    for name, one in of_gradients.items():
        assert one.max_error <= one.tolerance, (name, one)


def test_a_block_mask(device):
    tensors = leaves(device)
    assert not OWN.any(1).logical_not().any() and not OWN.any(0).all()
    check(tensors, attend(tensors, device, block_mask=block_mask_of(near, device)), dense_of(near))


def test_a_block_mask_for_all_heads(device):
    """The mask_mod tells heads apart."""
    shape = 1, 1, -(-sum(OF_Q) // 128)
    blocks = -(-sum(OF_K) // 128)
    indices = torch.arange(blocks, dtype=torch.int32, device=device).expand(*shape, -1)
    counts = torch.full(shape, blocks, dtype=torch.int32, device=device)
    lengths = {"BLOCK_SIZE": 128, "seq_lengths": (sum(OF_Q), sum(OF_K))}
    mask = BlockMask.from_kv_blocks(counts, indices, mask_mod=near, **lengths)
    tensors = leaves(device)
    check(tensors, attend(tensors, device, block_mask=mask), dense_of(near))


@pytest.mark.sampled
def test_a_function(device):
    """The block mask's own one is not called."""
    tensors, mask = leaves(device), block_mask_of(near, device)
    mask.mask_mod = None
    found = attend(tensors, device, block_mask=mask, mask_mod=MaskMod.of(near_in_kernel))
    check(tensors, found, dense_of(near))


@pytest.mark.parametrize("ranges", [False, True], ids=["at once", "ranges of queries"])
@pytest.mark.sampled
def test_scores_by_their_places_in_sequences(ranges, device, backward_config):
    """Places count in sequences, as everywhere with packed sequences; masks count in the packed
    row. Both hold wherever a chunk of dS begins, which has 256 queries of a head with 512 keys."""
    tensors, slopes = leaves(device), OF_ENTRIES[:, :2].contiguous()
    found = attend(
        tensors, device, block_mask=block_mask_of(near, device), score_mod=alibi(slopes.to(device)),
        backward_config=backward_config(ds_bytes=2 * 256 * 512) if ranges else None,
    )  # fmt: skip
    numbers, exact = numbers_of(OF_Q), slopes.double()
    begins = (offsets_of(OF_K)[1:] - offsets_of(OF_Q)[1:]).long()[numbers]

    def of_reference(s, b, h, q, k):
        return s - exact[numbers[q], h] * (q + begins[q] - k).abs()

    check(tensors, found, dense_of(near), of_reference)


def test_the_bits_of_one_row(device):
    """A user may also write the joined mask, made once, and dense tensors."""
    q, k, v = (tensor.detach() for tensor in leaves(device))
    cu_q, cu_k = offsets_of(OF_Q, device), offsets_of(OF_K, device)
    mask, out = block_mask_of(near, device), torch.empty_like(q)
    found, lse = attend((q, k, v), device, block_mask=mask, out=out, use_clc=False)
    joined = masks.in_sequences(mask, cu_q, cu_k)
    expected = flash_attn_func(
        q[None], k[None], v[None], block_mask=joined, return_lse=True, use_clc=False
    )
    assert found is out and torch.equal(out, expected[0][0])
    assert torch.equal(lse, expected[1][0])


def test_masks_are_joined_once(device, monkeypatch):
    """One join serves all layers, until the offsets change."""
    made = []
    join = packed_row.in_sequences
    monkeypatch.setattr(
        packed_row, "in_sequences", lambda *given, **n: made.append(1) or join(*given, **n)
    )
    offsets = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    mask = masks.from_dense(torch.ones(20, 20, device=device) > 0)
    q, k, v = (torch.randn(20, 1, 256).to(device, torch.bfloat16) for _ in range(3))

    def call():
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=12, max_seqlen_k=12,
            block_mask=mask,
        )  # fmt: skip

    first = call()
    assert torch.equal(call(), first) and len(made) == 1
    offsets[1] = 11
    assert not torch.equal(call(), first) and len(made) == 2


def test_joined_masks_that_are_kept_have_a_bound(device, monkeypatch):
    """A data set's offsets are alive all the time; the oldest joined mask goes, and comes again."""
    made = []
    true_made = packed_row._made
    monkeypatch.setattr(packed_row, "_made", lambda *given: made.append(1) or true_made(*given))
    mask = packed_row.as_tile_mask(block_mask_of(near, device), with_bits=True)
    rows = [
        (offsets_of([130 + n, 0, 170 - n], device), offsets_of(OF_K, device))
        for n in range(packed_row.MOST_JOINED + 1)
    ]
    first = packed_row._joined(mask, rows[0])[0].tiles
    for offsets in (*rows, *rows[1:]):
        packed_row._joined(mask, offsets)
    assert len(made) == len(rows), "those within the bound are made once"
    assert torch.equal(packed_row._joined(mask, rows[0])[0].tiles, first)
    assert len(made) == len(rows) + 1


def row(rows=8, device="cpu"):
    return tuple(torch.randn(rows, 1, 256).to(device, torch.bfloat16) for _ in range(3))


def test_errors(device):
    q, k, v = row(device=device)
    mask = masks.from_dense(torch.ones(8, 8, device=device) > 0)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    used = torch.tensor([3, 5], dtype=torch.int32, device=device)
    mod = MaskMod.of(near_in_kernel)

    def call(*given, **options):
        options |= zip(LENGTHS, given, strict=False)
        return flash_attn_varlen_func(q, k, v, block_mask=mask, **options)

    with pytest.raises(ValueError, match="block_mask; accepted: .*cu_seqlens_q and cu_seqlens_k"):
        call()
    with pytest.raises(ValueError, match="with block_mask and seqused_k; accepted: sequences"):
        call(cu, cu, 5, 5, seqused_k=used)
    with pytest.raises(ValueError, match="with block_mask and seqused_k, page_table"):
        call(cu, None, 5, None, seqused_k=used, page_table=used[None])
    with pytest.raises(ValueError, match="causal or window_size bound the keys"):
        call(cu, cu, 5, 5, causal=True)
    with pytest.raises(ValueError, match="num_splits is 2 with block_mask"):
        call(cu, cu, 5, 5, num_splits=2)
    with pytest.raises(ValueError, match="batch sizes disagree"):
        call(cu, cu[:2], 5, 8)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        call(cu.long(), cu, 5, 5)
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k hold no sequence"):
        call(cu[:1], cu[:1], 5, 5)
    with pytest.raises(ValueError, match=r"q has 4 dimensions.*accepted: 3, \(total"):
        flash_attn_varlen_func(
            q[None], k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5,
            block_mask=mask,
        )  # fmt: skip
    with pytest.raises(ValueError, match="block_mask is of 8 queries and 8 keys; accepted: 6"):
        flash_attn_varlen_func(
            q[:6], k, v, cu_seqlens_q=cu.clamp(max=6), cu_seqlens_k=cu, max_seqlen_q=5,
            max_seqlen_k=5, block_mask=mask,
        )  # fmt: skip
    with pytest.raises(ValueError, match="mask_mod is given without block_mask.*packed row"):
        flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5, mask_mod=mod
        )
    with pytest.raises(ValueError, match="mask_mod is given without block_mask"):
        flash_attn_varlen_func(q, k, v, mask_mod=mod)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        call([0, 3, 8], cu, 5, 5)
    with pytest.raises(TypeError, match="out must be a torch.Tensor or None, got list"):
        call(cu, cu, 5, 5, out=[q])
    for place, name in enumerate("qkv"):
        for wrong in ([1], None):
            given = [q, k, v]
            given[place] = wrong
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
                flash_attn_varlen_func(
                    *given, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5,
                    block_mask=mask,
                )  # fmt: skip
    with pytest.raises(TypeError, match="v must be a torch.Tensor, got NoneType"):
        flash_attn_func(q[None], k[None], None, block_mask=mask)
    with pytest.raises(TypeError, match="mask_mod is function"):
        call(cu, cu, 5, 5, mask_mod=near_in_kernel)


def test_graphs_take_a_mask_made_before(device):
    q, k, v = row(device=device)
    mask = masks.from_dense(torch.ones(8, 8, device=device) > 0)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)

    def layer(q):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5,
            block_mask=mask,
        )  # fmt: skip

    with pytest.raises(Exception, match="inside torch.compile; accepted: a mask of"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q)


def test_rows_behind_the_last_sequence_see_nothing():
    """Both forms agree; a score_mod gets a place that exists."""
    cu_q, cu_k = (torch.tensor(of, dtype=torch.int32) for of in ([0, 3, 5], [0, 4, 4]))
    numbers, begins, counts = masks.keys_of_rows(cu_q, cu_k, 8)
    assert numbers.tolist() == [0] * 3 + [1] * 5
    assert begins.tolist() == [0] * 3 + [4] * 5 and counts.tolist() == [4] * 3 + [0] * 5
    table = SequenceOfQuery(*packed_row._table(8, cu_q, cu_k).unbind(1))
    assert table.seqlen_k.tolist() == counts.tolist()
    assert table.seqlen_q.tolist() == [3] * 3 + [2] * 5
    mask, cu_k = masks.from_dense(torch.ones(8, 6) > 0), torch.tensor([0, 4, 6], dtype=torch.int32)
    joined = masks.in_sequences(mask, cu_q, cu_k).dense()[0, 0]
    assert not joined[5:].any() and joined[3:5, 4:].all() and joined[:3, :4].all()


def test_offsets_of_rows_are_checked():
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    for wrong, total, error, text in (
        (None, 8, TypeError, "cu_seqlens_q is NoneType"),
        (offsets.float(), 8, TypeError, "cu_seqlens_q is torch.float32"),
        (offsets.flip(0), 8, ValueError, "offsets that ascend from 0"),
        (offsets, 7, ValueError, "to 7 at most"),
        (offsets[:2], 8, ValueError, "cu_seqlens_q has 2 offsets, cu_seqlens_k 3"),
        (offsets, 0, ValueError, "total is 0"),
    ):
        with pytest.raises(error, match=text):
            masks.keys_of_rows(wrong, offsets, total)


def test_what_inference_made_may_be_trained_with(device):
    q, k, v = row(device=device)
    tensors = tuple(tensor.requires_grad_() for tensor in (torch.cat((q, q), 1), k, v))
    mask = masks.from_dense(torch.ones(8, 8, device=device) > 0)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    given = dict(zip(LENGTHS, (cu, cu, 5, 5), strict=True))
    with torch.inference_mode():
        flash_attn_varlen_func(*tensors, **given, block_mask=mask)
    flash_attn_varlen_func(*tensors, **given, block_mask=mask).sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)
