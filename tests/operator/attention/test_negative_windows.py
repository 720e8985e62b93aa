"""Windows wholly before or behind the diagonal, forward and backward, against the reference.

Lengths differ and end inside of tiles; bounds hide rows within a tile, whole tiles, and all.
"""

from __future__ import annotations

import pytest
import torch
from backward_cases import check as check_gradients
from backward_cases import check_each, inputs, packed
from paged_cases import NO_PAGE, Paged, accurate, offsets
from paged_cases import check as check_paged

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.call.options import ExactWindow
from fa4_hd256.kernels.backward.ds_tiles import DS_TILE_BYTES

# Keys behind; keys before; both sides of one sign; tiles without steps first and last; windows
# beyond all keys; none at all; a true -1.
WINDOWS = [
    ((300, 400), (None, -130)),
    ((300, 280), (-140, None)),
    ((200, 300), (-5, 20)),
    ((300, 200), (20, -5)),
    ((600, 140), (-300, 500)),
    ((100, 100), (None, -861)),
    ((130, 40), (-788, None)),
    ((140, 140), (3, -4)),
    ((140, 140), ExactWindow(-1, 5)),
]


@pytest.mark.parametrize(("lengths", "window"), WINDOWS)
@pytest.mark.sampled("static-lengths[348]-*")
def test_forward(lengths, window, use_clc, device):
    tensors = inputs(lengths, device=device)
    out, lse = flash_attn_func(*tensors, window_size=window, return_lse=True, use_clc=use_clc)
    accurate(out, lse, tensors, window_size=window)


@pytest.mark.sampled
def test_a_query_without_keys_has_the_sink(device):
    sink = torch.tensor([0.5, -2.0], device=device)
    tensors, options = inputs((200, 130), device=device), {"window_size": (None, -70)}
    options["learnable_sink"] = sink
    out, lse = flash_attn_func(*tensors, return_lse=True, use_clc=False, **options)
    accurate(out, lse, tensors, **options)
    hidden = 200 - 130 + 70
    assert (out[:, :hidden] == 0).all() and (lse[0, :, :hidden] == sink[:, None]).all()


@pytest.mark.parametrize(("lengths", "window"), WINDOWS)
@pytest.mark.sampled
def test_gradients(lengths, window, device):
    check_gradients(inputs(lengths, device=device), window_size=window)


@pytest.mark.parametrize("window", [(None, -140), (-140, None), (-30, 200)])
@pytest.mark.sampled
def test_gradients_without_stored_ds(window, device, backward_config):
    """Kernels that compute dS again."""
    config = backward_config(ds_bytes=0)
    check_gradients(inputs((300, 400), device=device), window_size=window, backward_config=config)


@pytest.mark.sampled
def test_gradients_in_chunks(device, backward_config, divisions):
    """dS of a range of queries at a time; the last queries see no key."""
    tensors = inputs((900, 700), device=device)
    config = backward_config(ds_bytes=2 * 4 * 4 * DS_TILE_BYTES)
    check_gradients(tensors, window_size=(-300, None), backward_config=config)
    assert len(divisions[-1].chunks) > 1


@pytest.mark.parametrize("window", [(None, -50), (-50, None)], ids=str)
@pytest.mark.sampled
def test_packed_sequences(window, device):
    """Sequences that are shorter than what the bound hides, and such that are not."""
    lengths = (300, 40, 0, 129), (200, 70, 33, 60)
    tensors = packed(lengths, (2, 1), torch.bfloat16, device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = flash_attn_varlen_func(
        *leaves, cu_seqlens_q=offsets(lengths[0], device), cu_seqlens_k=offsets(lengths[1], device),
        max_seqlen_q=300, max_seqlen_k=200, window_size=window,
    )  # fmt: skip
    dout = torch.randn_like(out)
    found = dict(zip("qkv", torch.autograd.grad(out, leaves, dout), strict=True))
    check_each(found, [tensor.detach() for tensor in tensors], dout, lengths, window_size=window)


@pytest.mark.parametrize("window", [(None, -20), (-2, None)], ids=str)
@pytest.mark.sampled
def test_decoding_over_pages(window, device):
    """Entries of pages that no query sees may be anything."""
    paged = Paged.of((300, 40, 0, 15), 16, device=device)
    before, keys = paged.copy(), max(-(window[1] or 0), 0)
    for row, length in enumerate(paged.lengths):
        paged.table[row, -(-max(length - keys, 0) // 16) :] = NO_PAGE
    query = torch.randn(4, 3, 4, 256).to(device, torch.bfloat16)
    check_paged(query, paged, before=before, window_size=window, num_splits=2)


def test_a_tree_has_no_hidden_nodes(device):
    q, k, v = inputs((4, 40), device=device)
    tree = torch.ones(4, 4, dtype=torch.bool, device=device).tril()
    with pytest.raises(ValueError, match="negative bound hides nodes"):
        flash_attn_func(q, k, v, tree_mask=tree, window_size=(None, -2))
