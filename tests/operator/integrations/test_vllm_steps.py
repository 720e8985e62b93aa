"""Steps of vLLM's own attention layer with our backend, against float64.

vLLM is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)

from vllm.v1.attention.backend import AttentionType
from vllm_steps import (
    BLOCK,
    HEADS,
    SCALE,
    Step,
    accurate,
    attended,
    builder_of,
    configured,
    int32,
    layer_of,
    metadata_of,
    model_of,
    new_cache,
    place,
)

from fa4_hd256.check import reference

#: A decoding step, a part of a prompt, a whole prompt.
MIXED = [1, 9, 20], [37, 41, 20]


@pytest.fixture
def config(monkeypatch, device):
    torch.manual_seed(0)
    with configured(monkeypatch, device) as found:
        yield found


@pytest.mark.parametrize(
    "layer_options, options",
    [
        ({}, {}),
        ({"per_layer_sliding_window": 12, "logits_soft_cap": 30.0},
         {"window_size": (11, 0), "softcap": 30.0}),
    ],
    ids=["plain", "Gemma 2"],
)  # fmt: skip
def test_a_mixed_step(config, layer_options, options):
    """The layer writes new rows to the cache, then attends to all; rows of padding do nothing."""
    layer, step = layer_of(config, **layer_options), Step(*MIXED, padding=2)
    cache = new_cache(step)
    before = cache.clone()
    metadata = metadata_of(config, layer, step)
    decodes, prompts = metadata.requests
    assert (decodes.longest_q, prompts.longest_q) == (1, 20)
    assert (decodes.rows, prompts.rows) == (slice(0, 1), slice(1, 30))
    q, k, v, output = attended(config, layer, step, cache, metadata)
    slots = step.common().slot_mapping[:-2]
    written = cache.transpose(1, 2).flatten(0, 1)[slots]
    assert torch.equal(written, torch.cat((k, v), dim=-1)[:-2])
    others = torch.ones(step.blocks * BLOCK, dtype=torch.bool, device=place()).index_fill(
        0, slots, False
    )
    unchanged = (t.transpose(1, 2).flatten(0, 1)[others] for t in (cache, before))
    assert torch.equal(*unchanged)
    accurate(step, q, output, cache, causal=True, **options)


def test_requests_with_equally_many_queries(config):
    """Call without offsets, on dense queries; a graph's requests of padding have no keys."""
    layer, step = layer_of(config), Step([1, 1, 1], [37, 5, 300])
    starts, keys = [0, 1, 2, 3, 3], [37, 5, 300, 0]
    padded = step.common(
        query_start_loc=int32(starts), query_start_loc_cpu=int32(starts, "cpu"),
        seq_lens=int32(keys), seq_lens_cpu_upper_bound=int32(keys, "cpu"), num_reqs=4,
        num_actual_tokens=4, block_table_tensor=torch.cat((step.table, step.table[:1] * 0)),
    )  # fmt: skip
    step.padding, step.rows = 1, 4
    metadata = builder_of(config, layer).build(0, padded)
    assert [one.each for one in metadata.requests] == [1]
    cache = new_cache(step)
    q, _, _, output = attended(config, layer, step, cache, metadata)
    accurate(step, q, output, cache, causal=True)
    assert not output[3:].any()
    fewer = metadata_of(config, layer, Step([1, 0], [37, 0]))
    assert [one.each for one in fewer.requests] == [None]


def test_a_step_over_e4m3(config):
    """The layer's scales are those of all keys and of all values."""
    config.cache_config.cache_dtype = "fp8"
    layer = layer_of(config, cache_config=config.cache_config)
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(2.0)
    step = Step([1, 1, 5], [37, 20, 30])
    cache = new_cache(step, torch.float8_e4m3fn)
    metadata = metadata_of(config, layer, step)
    q, k, v, output = attended(config, layer, step, cache.view(torch.uint8), metadata)
    for row in range(2):
        for new, cached, scale in zip((k, v), step.cached(cache, row), (0.5, 2.0)):
            # Three bits of mantissa.
            found = cached[0, -1].double() * scale
            torch.testing.assert_close(found, new[row].double(), rtol=2**-4, atol=2**-6)
    accurate(step, q, output, cache, (0.5, 2.0), causal=True)


def test_a_shared_prefix(config):
    """Requests whose first blocks are the same ones: vLLM's prefix caching."""
    layer, step = layer_of(config), Step([1, 1, 7], [40, 53, 39], shared=2)
    cache = new_cache(step)
    q, _, _, output = attended(config, layer, step, cache, metadata_of(config, layer, step))
    assert torch.equal(step.table[0, :2], step.table[2, :2])
    accurate(step, q, output, cache, causal=True)


def test_verification_of_drafts(config):
    """Requests with as many queries as there are drafts, and one, are decoded in one call."""
    drafts = SimpleNamespace(
        num_speculative_tokens=3, parallel_drafting=False, enable_adaptive_verification=False
    )
    object.__setattr__(config, "speculative_config", drafts)
    layer, step = layer_of(config), Step([4, 4], [37, 53])
    builder = builder_of(config, layer)
    assert builder.reorder_batch_threshold == 4
    metadata = builder.build(0, step.common())
    (requests,) = metadata.requests
    assert requests.longest_q == 4
    cache = new_cache(step)
    q, _, _, output = attended(config, layer, step, cache, metadata)
    accurate(step, q, output, cache, causal=True)
    decodes, prompts = builder.build(0, Step([4, 1, 9, 2], [37, 53, 20, 30]).common()).requests
    assert (decodes.rows, prompts.rows) == (slice(0, 5), slice(5, 16))
    assert (decodes.longest_q, prompts.longest_q) == (4, 9)


def image_mask(step, row, ranges, window, clamps):
    """Return what vLLM's masks of images show: (causal and window) or the same image."""
    queries, keys = step.queries[row], step.keys[row]
    q = torch.arange(keys - queries, keys)[:, None]
    k = torch.arange(keys)
    near = q - k < window
    seen = (k <= q) & near
    for first, last in ranges.get(row, ()):
        both = (q >= first) & (q <= last) & (k >= first) & (k <= last)
        seen |= both & near if clamps else both
    return seen[None, None]


#: By request: an image that the step has whole, and one of which it has the end; one that another
#: step has the end of; one that is behind the step's rows.
IMAGES = {1: [(3, 10), (16, 33)], 2: [(15, 30)], 3: [(0, 7)]}


@pytest.mark.parametrize(
    "window, clamps", [(None, False), (18, False), (8, True)], ids=["full", "Gemma 3", "Gemma 4"]
)
def test_images(config, window, clamps):
    object.__setattr__(config, "model_config", model_of(is_mm_prefix_lm=True))
    options = {"per_layer_sliding_window": window, "mm_prefix_clamp_sliding_window": clamps}
    layer, step = layer_of(config, **options), Step([1, 21, 20, 9], [37, 41, 20, 30])
    cache = new_cache(step)
    metadata = metadata_of(config, layer, step, mm_req_doc_ranges=IMAGES)
    # Of request 1 rows 20 to 33, of request 2 rows 15 to 19: places in q.
    assert metadata.mm_prefix_range.rows.tolist() == [*range(1, 15), *range(37, 42)]
    q, _, _, output = attended(config, layer, step, cache, metadata)
    reach = step.keys[1] if window is None else window
    accurate(
        step,
        q,
        output,
        cache,
        of=lambda row: {"mask": image_mask(step, row, IMAGES, reach, clamps)},
    )
    # Gemma 4's layers whose images are causal.
    metadata.mm_prefix_range = None
    _, _, _, output = attended(config, layer, step, cache, metadata, q)
    accurate(
        step, q, output, cache, of=lambda row: {"mask": image_mask(step, row, {}, reach, clamps)}
    )


@pytest.mark.sampled
@pytest.mark.parametrize("window", [None, 12])
def test_requests_with_a_causal_flag_each(config, window):
    """DiffusionGemma: a block of queries sees itself, where its request is not causal."""
    layer, step = layer_of(config, per_layer_sliding_window=window), Step([6, 6, 1], [37, 20, 30])
    cache, causal = new_cache(step), int32([1, 0, 1])
    metadata = metadata_of(config, layer, step, causal=causal)
    q, _, _, output = attended(config, layer, step, cache, metadata)
    left = None if window is None else window - 1

    def of(row):
        return {"window_size": (left, 0 if causal[row] else left)}

    accurate(step, q, output, cache, of=of)


@pytest.mark.sampled
def test_alibi_and_sinks(config):
    slopes = [0.5, 0.25, 0.125, 0.0625]
    layer, step = layer_of(config, alibi_slopes=slopes), Step([1, 9], [37, 41])
    cache = new_cache(step)
    q, _, _, output = attended(config, layer, step, cache, metadata_of(config, layer, step))

    def of(row):
        last = step.keys[row] - step.queries[row]

        def score_mod(score, batch, head, query, key):
            return score - torch.tensor(slopes)[head] * (query + last - key).abs()

        return {"score_mod": score_mod}

    accurate(step, q, output, cache, of=of, causal=True)
    sinks = torch.linspace(-1, 2, HEADS, device=place())
    layer = layer_of(config, sinks=sinks)
    q, _, _, output = attended(config, layer, step, cache, metadata_of(config, layer, step))
    accurate(step, q, output, cache, causal=True, learnable_sink=sinks.cpu())


def test_one_kv_head_whose_stride_says_nothing(config):
    """A dimension of one element may have any stride; vLLM's tensor parallelism makes such."""
    layer, step = layer_of(config, heads_kv=1), Step([1, 9], [37, 41])
    cache = new_cache(step, heads_kv=1)
    strides = list(cache.stride())
    strides[1] = 1
    cache = cache.as_strided(cache.shape, strides)
    q, _, _, output = attended(config, layer, step, cache, metadata_of(config, layer, step))
    accurate(step, q, output, cache, causal=True)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_an_encoder(config, kind):
    """Queries of a request see its keys on both sides, and nothing is written."""
    layer, step = layer_of(config, attn_type=kind), Step([9, 20], [9, 20], padding=1)
    q, k, v, output = attended(config, layer, step, None, metadata_of(config, layer, step))
    for rows in (slice(0, 9), slice(9, 29)):
        tensors = [t[None, rows].cpu() for t in (q, k, v)]
        exact = reference.Expected.of(tensors, softmax_scale=SCALE)
        errors = exact.compare(output[None, rows].cpu(), exact.lse.float())
        assert errors.max_error <= errors.tolerance, errors


@pytest.mark.sampled
def test_batch_invariance(config, monkeypatch):
    """Rows have the same bits alone, beside longer requests, and in other parts of a prompt.  Parts
    that begin later are for a GPU: the simulator multiplies by BLAS, in which the bits of a row
    follow its place in the tile."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, step = layer_of(config), Step([1, 9, 40], [600, 41, 700])
    cache = new_cache(step)
    flags = torch.tensor([False, True, True])
    metadata = metadata_of(config, layer, step, is_prefilling=flags)
    q, _, _, output = attended(config, layer, step, cache, metadata)
    accurate(step, q, output, cache, causal=True)

    def alone(row, first, last):
        """Return rows of a request, computed by themselves."""
        part = Step([last - first], [step.keys[row] - step.queries[row] + last])
        part.table = step.table[row : row + 1]
        flag = flags[row : row + 1]
        whole = metadata_of(config, layer, part, is_prefilling=flag, slot_mapping=None)
        begin = [0, *step.ends][row]
        out = torch.empty(last - first, HEADS, 256, device=place())
        return layer.impl.forward(
            layer, q[begin + first : begin + last], None, None, cache, whole, out
        )

    parts = [(0, 0, 1), (1, 0, 9), (2, 0, 40), (2, 0, 23)]
    if place().type == "cuda":
        parts += [(2, 23, 40), (2, 39, 40)]
    for row, first, last in parts:
        begin = [0, *step.ends][row]
        assert torch.equal(alone(row, first, last), output[begin + first : begin + last])
