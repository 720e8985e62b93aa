"""Masks of transformers as `integrations.transformers` describes them, beside transformers' own.

Nothing here runs a kernel: descriptions are evaluated on the host, as kernels follow them.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import masking_utils as known

from fa4_hd256.integrations import transformers as integration
from fa4_hd256.integrations.transformers.descriptions import (
    described,
    of_last_queries,
    seen_by,
)
from fa4_hd256.integrations.transformers.patterns import band_of

#: Mask functions of transformers and of models, and what they are: (low, high) bounds of query
#: position - key position, None for no bound.
BANDS = {
    "causal": (known.causal_mask_function, (0, None)),
    "bidirectional": (known.bidirectional_mask_function, (None, None)),
    # EmbeddingGemma's full layers.
    "a constant": (
        known.or_masks(known.causal_mask_function, lambda *_: torch.tensor(True)), (None, None)
    ),
    "window": (known.sliding_window_causal_mask_function(5), (0, 4)),
    "both sides": (known.sliding_window_bidirectional_mask_function(5), (-5, 5)),
    # Gemma 3's own, without the key at that distance.
    "exclusive": (
        known.or_masks(
            known.sliding_window_causal_mask_function(5), lambda b, h, q, k: abs(q - k) < 5
        ),
        (-4, 4),
    ),
    # T5Gemma 2's and Gemma 4's own, with two sides of different length.
    "two lengths": (
        lambda b, h, q, k: ((q - k >= 0) & (q - k < 5)) | ((q - k < 0) & (-(q - k) < 3)), (-2, 4)
    ),
    "window of a union": (
        known.and_masks(
            known.or_masks(known.causal_mask_function, lambda b, h, q, k: abs(q - k) <= 2),
            known.sliding_window_overlay(4),
        ),
        (-2, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BANDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_bounds_of_known_functions(kind, compiled):
    """Read without evaluating anything, and while tracing, too."""
    function, bounds = BANDS[kind]

    def read(x):
        band = band_of(function)
        return x, (band.low, band.high)

    if compiled:
        read = torch.compile(read, fullgraph=True, backend="eager")
    assert read(torch.zeros(2))[1] == bounds


@pytest.mark.parametrize("compiled", [False, True])
def test_other_functions_are_no_bands(compiled):
    ids = torch.zeros(1, 8, dtype=torch.long)
    others = (
        known.or_masks(known.causal_mask_function, known.blockwise_overlay(ids)),
        known.chunked_causal_mask_function(4, ids[:, 0]),
        lambda b, h, q, k: (k <= q) & (k != 3),
        lambda b, h, q, k: (q - k > 3) | (q - k < 1),
        lambda b, h, q, k: k <= q if q > 3 else k < 1,
    )

    def read(x):
        return x, [band_of(function) is None for function in others]

    if compiled:
        read = torch.compile(read, fullgraph=True, backend="eager")
    assert all(read(torch.zeros(2))[1])


def seen(mask, batch, seqlen_q, seqlen_k):
    """Return the mask that queries see, (batch, 1, seqlen_q, seqlen_k)."""
    if mask.dtype != torch.bool:
        description = of_last_queries(described(mask), seqlen_q)
        mask = seen_by(description, torch.Size((batch, seqlen_q)), seqlen_k, mask.device)
    return mask.expand(batch, 1, seqlen_q, seqlen_k)


def functions(length):
    """Random mask functions of positions below `length`, nested in each other."""
    sizes = st.integers(1, 6)
    ids = st.lists(st.integers(-1, 1), min_size=2 * length, max_size=2 * length).map(
        lambda numbers: torch.tensor(numbers).view(2, length)
    )
    leaves = st.one_of(
        st.just(known.causal_mask_function),
        st.just(known.bidirectional_mask_function),
        sizes.map(known.sliding_window_causal_mask_function),
        sizes.map(known.sliding_window_bidirectional_mask_function),
        sizes.map(known.sliding_window_overlay),
        sizes.map(lambda size: lambda b, h, q, k: abs(q - k) < size),
        sizes.map(lambda size: lambda b, h, q, k: k < q + size),
        sizes.map(lambda size: lambda b, h, q, k: k < size),
        ids.map(known.blockwise_overlay),
        ids.map(known.packed_sequence_mask_function),
        st.tuples(sizes, st.integers(0, 3)).map(
            lambda pair: known.chunked_causal_mask_function(pair[0], torch.tensor([0, pair[1]]))
        ),
    )
    return st.recursive(
        leaves,
        lambda inner: st.tuples(
            st.sampled_from((known.and_masks, known.or_masks)), inner, inner
        ).map(lambda node: node[0](node[1], node[2])),
        max_leaves=4,
    )


@st.composite
def requests(draw):
    """Arguments of a mask function as transformers calls it: self-attention, with or without a
    cache that holds `offset` keys before the queries and room behind them."""
    offset = draw(st.sampled_from((0, 0, 3)))
    q_length = draw(st.sampled_from((1, 4, 7)))
    kv_length = offset + q_length + draw(st.sampled_from((0, 0, 2)))
    padding = None
    if draw(st.booleans()):
        rows = [draw(st.sampled_from(("left", "right", "holes", "none"))) for _ in range(2)]
        padding = torch.ones(2, offset + q_length, dtype=torch.bool)
        for row, kind in zip(padding, rows):
            count = draw(st.integers(0, len(row) - 1))
            if kind == "left":
                row[:count] = False
            elif kind == "right":
                row[len(row) - count :] = False
            elif kind == "holes":
                row[count] = False
    function = draw(functions(offset + q_length + 2))
    return {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": offset,
        "mask_function": function, "attention_mask": padding, "use_vmap": False,
    }  # fmt: skip


@settings(max_examples=200)
@given(request=requests(), count=st.integers(1, 7))
def test_masks_of_the_last_queries(request, count):
    """Gemma 4 cuts masks to the last queries for layers with shared keys."""
    wanted = known.sdpa_mask(**request, allow_is_causal_skip=False)[:, :, -count:]
    batch, q, k = (request[name] for name in ("batch_size", "q_length", "kv_length"))
    mask, left = integration.mask(**request), min(count, q)
    if mask.dtype == torch.uint32:  # packed sequences, which cannot be cut
        return
    found = seen(mask[:, :, -count:], batch, left, k)
    padding, end = request["attention_mask"], request["q_offset"] + q
    rows = torch.ones(batch, left, dtype=torch.bool)
    if padding is not None:
        rows = padding[:, end - left : end]
    assert torch.equal(found[rows[:, None]], wanted.expand_as(found)[rows[:, None]])


def test_packed_sequences_cannot_be_cut():
    """Offsets of packed sequences are of all queries."""
    function = known.and_masks(
        known.causal_mask_function,
        known.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
    )
    rows, mask = torch.randn(1, 1, 8, 16), integration.mask(1, 8, 8, mask_function=function)
    module = torch.nn.Module()
    assert integration.attention(module, rows, rows, rows, mask)[0].shape == (1, 8, 1, 16)
    with pytest.raises(NotImplementedError, match="sequences of 8 rows in a layer with 2 queries"):
        integration.attention(module, rows[:, :, -2:], rows, rows, mask[:, :, -2:])


@settings(max_examples=200)
@given(request=requests())
def test_descriptions_see_what_transformers_sees(request):
    """Every query that is no padding sees the same, whatever pattern and padding."""
    wanted = known.sdpa_mask(**request, allow_is_causal_skip=False)
    batch, q, k = (request[name] for name in ("batch_size", "q_length", "kv_length"))
    found = seen(integration.mask(**request), batch, q, k)
    padding, first = request["attention_mask"], request["q_offset"]
    rows = torch.ones(batch, q, dtype=torch.bool)
    if padding is not None:
        rows = padding[:, first : first + q]
    assert torch.equal(found[rows[:, None]], wanted.expand_as(found)[rows[:, None]])


@pytest.mark.parametrize("compiled", [False, True])
def test_padding_of_another_length_than_the_keys(compiled):
    """A cross attention whose mask is shorter or longer than the encoder's rows is refused:
    generate(prefill_chunk_size=..) of transformers 5.24 cuts the encoder's mask to a chunk."""

    def attend(rows, padding):
        count = padding.shape[1]
        mask = integration.mask(
            2, 3, count, mask_function=known.bidirectional_mask_function, attention_mask=padding
        )
        return integration.attention(torch.nn.Module(), rows[:, :, :3], rows, rows, mask)[0]

    run = torch.compile(attend, backend="eager") if compiled else attend
    rows, padding = torch.randn(2, 1, 8, 16), torch.ones(2, 8, dtype=torch.bool)
    padding[1, :2] = False
    last = torch.nn.functional.scaled_dot_product_attention(
        rows[1:, :, :3], rows[1:, :, 2:], rows[1:, :, 2:]
    )
    torch.testing.assert_close(run(rows, padding)[1:], last.transpose(1, 2))
    for other in (padding[:, :6], torch.nn.functional.pad(padding, (0, 1), value=True)):
        with pytest.raises(ValueError, match="made for [69] keys in a layer with 8"):
            run(rows, other)


def test_padding_that_ends_before_the_queries():
    """Queries without an entry would be taken for padding: a prompt that is added again in each
    step, without its entries, is an error."""
    rows = torch.ones(2, 6, dtype=torch.bool)
    for function in (known.causal_mask_function, known.sliding_window_causal_mask_function(8)):
        request = {"mask_function": function, "attention_mask": rows}
        assert described(integration.mask(2, 2, 6, q_offset=4, **request)).ranges is None
        with pytest.raises(ValueError, match="6 entries a sequence, and queries up to row 7"):
            integration.mask(2, 4, 8, q_offset=4, **request)


@pytest.mark.parametrize("count", [int, torch.tensor])
def test_a_step_of_a_static_cache(count):
    """transformers forbids skipping the mask. It is described, not evaluated: a full window, whose
    cache counts in an int, and one that is not full."""
    function = known.sliding_window_causal_mask_function(8)
    for offset, first, rows in ((20, 13, 8), (5, 0, 8)):
        mask = integration.mask(
            2, 1, rows, q_offset=count(offset), kv_offset=first, mask_function=function,
            allow_is_causal_skip=False, local_size=8, config=None,
        )  # fmt: skip
        assert described(mask) is not None
        wanted = known.sdpa_mask(2, 1, rows, offset, first, function, allow_is_causal_skip=False)
        assert torch.equal(seen(mask, 2, 1, rows), wanted.expand(2, 1, 1, rows))
