"""Gemma 3 models of transformers, with this attention and with eager attention."""

from __future__ import annotations

import sys

import pytest
import torch

from fa4_hd256 import flash_attn_func
from fa4_hd256.integrations import transformers as integration
from fa4_hd256.integrations import warnings_once

# On Python 3.10 there is no version of transformers with the interface used here.
pytest.importorskip("transformers")

from transformers import DynamicCache, masking_utils
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

from fa4_hd256.integrations.transformers import graphs, layers
from fa4_hd256.integrations.transformers.descriptions import Description, described, padded

WINDOW = 8
VOCABULARY = 64


@pytest.fixture(scope="module", autouse=True)
def name():
    return integration.register()


def gemma(device, **settings):
    """A small Gemma 3 with a sliding and a full layer, in bfloat16, and the same in float32."""
    torch.manual_seed(7)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=64,
        sliding_window=WINDOW, initializer_range=0.2,
        **{"layer_types": ["sliding_attention", "full_attention"], **settings},
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).to(device, torch.bfloat16).eval()
    exact = Gemma3ForCausalLM(config)
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    return model, exact.to(device, torch.float32).eval()


def tokens(batch, seqlen, device):
    return torch.randint(1, VOCABULARY, (batch, seqlen)).to(device)


@torch.no_grad()
def logits(model, implementation, *args, **kwargs):
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model(*args, **kwargs).logits.float()


def assert_as_good(got, eager, exact):
    """Check that the error is at most twice that of eager bfloat16, and a rounding of the largest
    logit."""
    error, eager_error = ((x - exact).abs().max().item() for x in (got, eager))
    assert error <= 2 * eager_error + 2**-8 * exact.abs().max().item()
    # The tolerance must tell attention patterns apart, or it proves nothing.
    assert error < exact.std().item() / 2


def compared(models, ids, rows=None, **kwargs):
    model, exact = models
    results = [
        logits(model, integration.NAME, ids, **kwargs),
        logits(model, "eager", ids, **kwargs),
        logits(exact, "eager", ids, **kwargs),
    ]
    if rows is not None:
        results = [x[rows] for x in results]
    assert_as_good(*results)
    return results


def test_logits(device):
    """Sliding and causal layers, a scale that is not the default, grouped queries."""
    models = gemma(device)
    # More rows than a tile of the decode kernel has: the forward's kernels, which others compile.
    ids = tokens(2, 40, device)
    got, _, exact = compared(models, ids)
    # Each pattern matters here: without the window, and without causality, logits differ.
    for settings in ({"sliding_window": 1000}, {"use_bidirectional_attention": True}):
        other = gemma(device)[1]
        for key, value in settings.items():
            setattr(other.config, key, value)
        wrong = logits(other, "eager", ids)
        assert (wrong - exact).abs().max() > 4 * (got - exact).abs().max()


@pytest.mark.sampled
def test_steps_with_a_cache(device):
    """Prefill, a chunk of queries over more keys, then decoding beyond the sliding window."""
    model, exact = gemma(device)
    ids = tokens(1, 16, device)
    expected, eager = logits(exact, "eager", ids), logits(model, "eager", ids)
    model.set_attn_implementation(integration.NAME)
    cache, got = DynamicCache(config=model.config), []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 14), (14, 15), (15, 16)):
            step = model(ids[:, first:last], past_key_values=cache, use_cache=True)
            got.append(step.logits.float())
    assert_as_good(torch.cat(got, dim=1), eager, expected)


@pytest.mark.sampled
def test_generate_with_left_padding(device):
    """transformers' own generation, whose static cache is longer than the sequence."""
    model, _ = gemma(device)
    ids = tokens(2, 6, device)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    options = {
        "attention_mask": padding, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True,
        "disable_compile": True,
    }  # fmt: skip
    results = {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        for cache in ("dynamic", "static"):
            step = model.generate(ids, cache_implementation=cache, **options)
            results[implementation, cache] = torch.stack(step.logits).float()
    eager = results["eager", "dynamic"]
    for cache in ("dynamic", "static"):
        # The first step alone: later ones follow the tokens chosen.
        difference = (results[integration.NAME, cache][0] - eager[0]).abs().max()
        assert difference <= 0.05 * eager[0].abs().max()
    assert torch.equal(results[integration.NAME, "static"], results[integration.NAME, "dynamic"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(device, side):
    """Rows of padding take no part; positions are the same in all implementations."""
    padding = torch.ones(3, 13, dtype=torch.long, device=device)
    for row, count in enumerate((0, 4, 11)):
        if count:
            padding[row, slice(count) if side == "left" else slice(-count, None)] = 0
    models = gemma(device, layer_types=["sliding_attention"] * 2)
    compared(models, tokens(3, 13, device), padding.bool(), attention_mask=padding)


@pytest.mark.parametrize(
    "settings",
    [{"use_bidirectional_attention": True}, {"is_causal": False}],
    ids=["exclusive", "inclusive"],
)
@pytest.mark.sampled
def test_bidirectional_model(device, settings):
    """No causality, and a window on both sides: EmbeddingGemma's is exclusive; a decoder's that is
    made bidirectional is inclusive, and its layers still say that they are causal."""
    models = gemma(device, **settings)
    padding = torch.ones(2, 13, dtype=torch.long, device=device)
    padding[1, 9:] = 0
    compared(models, tokens(2, 13, device), padding.bool(), attention_mask=padding)


@pytest.mark.sampled
def test_softcap_sink_and_no_scale(device):
    """Gemma 2 and gpt-oss pass these beside Gemma 3's arguments."""
    q, k, v = (torch.randn(1, heads, 5, 256).to(device, torch.bfloat16) for heads in (2, 1, 1))
    sink = torch.randn(2).to(device)
    module = torch.nn.Module()
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, weights = integration.attention(
        module, q, k, v, None, softcap=5.0, s_aux=sink, sliding_window=3, is_causal=True,
        dropout=0.0, position_ids=None,
    )  # fmt: skip
    options = {"softcap": 5.0, "learnable_sink": sink}
    expected = flash_attn_func(*turned, causal=True, window_size=(2, 0), **options)
    assert weights is None and torch.equal(out, expected)
    causal, _ = integration.attention(module, q, k, v, None)
    assert torch.equal(causal, flash_attn_func(*turned, causal=True))


def test_refusals(device):
    q, k, v = (torch.zeros(1, 1, 5, 256, dtype=torch.bfloat16, device=device) for _ in range(3))
    module = torch.nn.Module()
    tensors = ({name: q} for name in ("block_table", "cache", "sinks", "block_indices"))
    for option in ({"dropout": 0.1}, {"output_attentions": True}, *tensors):
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            integration.attention(module, q, k, v, None, **option)
    chosen = torch.zeros(1, 5, 2, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError, match="indices is given with cu_seq_lens_q; accepted"):
        integration.attention(module, q, k, v, None, indices=chosen, cu_seq_lens_q=chosen)
    for wrong in (chosen.float(), chosen[0], chosen[:, 1:]):
        with pytest.raises(ValueError, match=r"accepted: .batch, 5, count. int32 or int64"):
            integration.attention(module, q, k, v, None, indices=wrong)
    with pytest.raises(ValueError, match="four dimensions"):
        integration.attention(module, q, k, v, torch.ones(1, 1, 5, 5, dtype=torch.int32))
    for wrong in (q.float(), q.double()):
        with pytest.raises(TypeError, match="load the model with dtype=torch.bfloat16, or run it"):
            integration.attention(module, wrong, k, v, None)
    with pytest.raises(ValueError, match="without 'flash'"):
        integration.register("my_flash")


def test_padding_between_tokens(device, caplog):
    warnings_once._logged.clear()
    ids = tokens(2, 10, device)
    holes = torch.ones_like(ids)
    holes[0, 3:5] = holes[1, 0] = holes[1, 6] = 0
    compared(gemma(device), ids, holes.bool(), attention_mask=holes)
    assert "padding between tokens" in caplog.text


def test_a_line_in_the_log_once_for_each_reason(caplog):
    """The level of the line is shown where nobody has set one, whatever the lengths."""
    warnings_once._logged.clear()

    def hidden_first(b, h, q, k):
        return (k <= q) & (k != 1)

    def hidden_second(b, h, q, k):
        return (k <= q) & (k != 2)

    for mask_function in (hidden_first, hidden_second):
        for length in (5, 6):
            padding = torch.ones(1, length, dtype=torch.bool)
            integration.mask(
                1, length, length, mask_function=mask_function, attention_mask=padding, config=None
            )
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "hidden_first" in caplog.text and "hidden_second" in caplog.text


def with_images(model, implementation, ids, images, **kwargs):
    """The model's results where tokens of a block of `images`, -1 for none, see each other."""
    model.set_attn_implementation(implementation)
    embeddings = model.get_input_embeddings()(ids)
    create = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    full, sliding = (
        make(model.config, embeddings, None, None, block_sequence_ids=images) for make in create
    )
    masks = {"full_attention": full, "sliding_attention": sliding}
    return model(ids, attention_mask=masks, **kwargs)


def images_of(device):
    """Two rows, one with images longer and shorter than the window, one of text."""
    images = torch.full((2, 24), -1, device=device)
    images[0, 2:14], images[0, 14:17] = 0, 1
    return images


def test_images(device):
    """Blocks of Gemma 3's image tokens: full and sliding layers, in one batch with plain text."""
    model, exact = gemma(device)
    ids, images = tokens(2, 24, device), images_of(device)
    create = masking_utils.create_causal_mask
    with torch.no_grad():
        results = [
            with_images(m, name, ids, images).logits.float()
            for m, name in ((model, integration.NAME), (model, "eager"), (exact, "eager"))
        ]
        causal = exact(ids).logits
    assert_as_good(*results)
    assert (results[2] - causal).abs().max() > exact(ids).logits.std() / 4
    none = images.fill_(-1)
    embeddings = model.get_input_embeddings()(ids)
    model.set_attn_implementation(integration.NAME)
    plain = create(model.config, embeddings, None, None, block_sequence_ids=none)
    assert described(plain) == Description((None, 0))


def test_layers_share_a_mask(device, monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "from_dense", lambda mask: made.append(mask) or mask)
    monkeypatch.setattr(layers, "flash_attn_func", lambda q, *_, **options: q)
    rows = torch.zeros(1, 2, 5, 256, dtype=torch.bfloat16)
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for _ in range(3):
        integration.attention(torch.nn.Module(), rows, rows, rows, seen)
    assert len(made) == 1
    seen[0, 0, 0, 1] = False
    integration.attention(torch.nn.Module(), rows, rows, rows, seen)
    assert len(made) == 2


def test_layers_share_chosen_keys(device, monkeypatch):
    """Layers that reuse an indexer's choice have one mask: of keys that are chosen and visible."""
    made = []
    monkeypatch.setattr(graphs, "from_dense", lambda mask: made.append(mask) or mask)
    monkeypatch.setattr(layers, "flash_attn_func", lambda q, *_, **options: q)
    rows, module = torch.zeros(2, 2, 3, 256, dtype=torch.float16), torch.nn.Module()
    indices = torch.tensor([[[0, 1], [2, 1], [0, 0]], [[2, 2], [1, 2], [1, 0]]])
    causal = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    for _ in range(2):
        integration.attention(module, rows, rows, rows, causal, indices=indices)
    (found,) = made
    seen = [[[1, 0, 0], [0, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 1, 0], [1, 1, 0]]]
    assert found.int().tolist() == [[one] for one in seen]
    indices[0, 0, 0] = 1
    integration.attention(module, rows, rows, rows, causal, indices=indices)
    assert not made[1][0, 0, 0].any()


def test_layers_share_a_mask_in_inference_mode(device, monkeypatch):
    """One that `mask` made; of a user's nothing is kept, since writing to it would not be seen."""
    made = []
    monkeypatch.setattr(graphs, "from_dense", lambda mask: made.append(mask) or mask)
    monkeypatch.setattr(layers, "flash_attn_func", lambda q, *_, block_mask, **__: block_mask)
    rows, layer = torch.zeros(2, 2, 5, 256, dtype=torch.bfloat16), torch.nn.Module()
    with torch.inference_mode():
        given = torch.ones(1, 1, 5, 5, dtype=torch.bool)
        integration.attention(layer, rows, rows, rows, given)
        given[0, 0, 0, 1] = False
        integration.attention(layer, rows, rows, rows, given)
        assert len(made) == 2
        holes = torch.tensor([[True, False, True, True, True], [True] * 5])
        for padding, entries in ((holes, 2), (None, 1)):
            own = integration.mask(
                2, 5, 5, mask_function=lambda b, h, q, k: (k <= q) & (k != 1),
                attention_mask=padding, config=None,
            )  # fmt: skip
            assert own.shape == (2, 1, 5, 5)
            assert own.untyped_storage().nbytes() == entries * 25
            for _ in range(2):
                integration.attention(layer, rows, rows, rows, own)
    assert len(made) == 4


def test_training_step_with_images(device):
    """Parameter gradients of one step against SDPA in float64."""
    model, exact = gemma(device)
    ids, images = tokens(2, 24, device), images_of(device)

    def step(model, implementation):
        model.zero_grad()
        with_images(model, implementation, ids, images, labels=ids).loss.backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    found, eager = step(model, integration.NAME), step(model, "eager")
    for parameter, wanted in step(exact.double(), "sdpa").items():
        error, eager_error = ((one[parameter] - wanted).norm().item() for one in (found, eager))
        assert error <= 2 * eager_error + 2**-8 * wanted.norm().item(), parameter


#: Positions of packed sequences: three of one batch entry; two entries of a batch, one whole.
SEQUENCES = {
    "three": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 0]],
    "two entries": [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]],
}


@pytest.mark.parametrize("positions", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.sampled
def test_packed_sequences(device, positions):
    """Padding-free batches, as collators make them: positions that start again; some longer than
    the window. Each sequence is as it is alone."""
    positions = torch.tensor(positions, device=device)
    models, ids = gemma(device), tokens(*positions.shape, device)
    got, _, exact = compared(models, ids, position_ids=positions, use_cache=False)
    one = logits(models[1], "eager", ids, use_cache=False)
    assert (one - exact).abs().max() > 4 * (got - exact).abs().max()
    alone = logits(models[0], integration.NAME, ids[:1, :3], use_cache=False)
    whole = logits(models[1], "eager", ids[:1, :3], use_cache=False)
    assert_as_good(alone, logits(models[0], "eager", ids[:1, :3], use_cache=False), whole)


@pytest.mark.sampled
def test_packed_sequences_by_their_offsets(device):
    """The arguments that transformers gives its flash-attention, with and without positions."""
    positions = torch.tensor(SEQUENCES["three"], device=device)
    models, ids = gemma(device), tokens(1, 15, device)
    offsets = torch.tensor([0, 11, 14, 15], device=device)
    packed = dict(zip(integration.PACKED, (offsets, offsets, 11, torch.tensor(11))))
    model = models[0]
    got = logits(model, integration.NAME, ids, position_ids=positions, use_cache=False)
    for more in ({"position_ids": positions}, {"position_ids": positions, **packed}):
        assert torch.equal(logits(model, integration.NAME, ids, use_cache=False, **more), got)
    q, k, v = (torch.randn(1, 1, 15, 256).to(device, torch.bfloat16) for _ in range(3))
    module = torch.nn.Module()
    alone, _ = integration.attention(module, q, k, v, None, **packed)
    rows = slice(11, 14)
    expected, _ = integration.attention(module, *(t[:, :, rows] for t in (q, k, v)), None)
    assert (alone[:, rows].float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()
    with pytest.raises(ValueError, match="max_length_k is missing"):
        integration.attention(module, q, k, v, None, **packed | {"max_length_k": None})
    padding = padded((None, 0), torch.tensor([[0, 15, 0, 15, 15]], device=device))
    with pytest.raises(ValueError, match="one of them"):
        integration.attention(module, q, k, v, padding, **packed)


@pytest.mark.sampled
def test_training_on_packed_sequences(device):
    """Parameter gradients of one step, against SDPA in float64 of the sequences one by one."""
    model, exact = gemma(device)
    positions = torch.tensor(SEQUENCES["three"], device=device)
    ids, weights = tokens(1, 15, device), torch.randn(1, 15, VOCABULARY).to(device)

    def gradients(model, implementation, *parts):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        for rows in parts:
            found = model(ids[:, rows], position_ids=positions[:, rows], use_cache=False).logits
            (found * weights[:, rows].to(found.dtype)).sum().backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    apart = slice(0, 11), slice(11, 14), slice(14, 15)
    found = gradients(model, integration.NAME, slice(0, 15))
    eager = gradients(model, "eager", *apart)
    for parameter, wanted in gradients(exact.double(), "sdpa", *apart).items():
        error, eager_error = ((one[parameter] - wanted).norm() for one in (found, eager))
        assert error <= 2 * eager_error + 2**-8 * wanted.norm(), parameter


@pytest.mark.sampled
def test_layers_share_what_is_known_of_packed_sequences(device, monkeypatch):
    """Lengths are read once per pass and kind of layer, where gradients are requested."""
    made, plain = [], layers.get_backward_metadata

    def noted(*arguments):
        made.append(plain(*arguments))
        return made[-1]

    monkeypatch.setattr(layers, "get_backward_metadata", noted)
    model, _ = gemma(device)
    positions = torch.tensor(SEQUENCES["three"], device=device)
    for _ in range(2):
        logits(model, integration.NAME, tokens(1, 15, device), position_ids=positions,
               use_cache=False)  # fmt: skip
    assert not made
    model.set_attn_implementation(integration.NAME)
    for passes in (1, 2):
        found = model(tokens(1, 15, device), position_ids=positions, use_cache=False).logits
        found.sum().backward()
        kinds = {one.window for one in made}
        assert len(kinds) == 2 and len(made) == 2 * passes
        # Each sequence is a block of keys and of queries.
        assert all(one.ds_begins.tolist() == [0, 4, 8] for one in made)
    offsets = torch.tensor([0, 11, 14, 15], dtype=torch.int32, device=device)
    given = dict(zip(integration.PACKED, (offsets, offsets, 11, 11)))
    model(tokens(1, 15, device), position_ids=positions, use_cache=False, **given)
    assert len(made) == 4


@pytest.mark.sampled
def test_continuous_batching(device, monkeypatch):
    """Requests of several lengths, more than fit one pass, in a paged cache; prompts in chunks."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, exact = gemma(device)
    prompts = [tokens(1, count, "cpu")[0].tolist() for count in (5, 19, 3)]
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        max_batch_tokens=16, num_blocks=16, page_size=16, return_logprobs=True,
        use_cuda_graph=False,
    )  # fmt: skip

    def logprobs():
        results = model.generate_batch(
            prompts, generation_config=options, continuous_batching_config=batching,
            progress_bar=False,
        )  # fmt: skip
        return [(r.generated_tokens, torch.tensor(r.logprobs)) for _, r in sorted(results.items())]

    model.set_attn_implementation("sdpa")
    peers = logprobs()
    assert integration.use_in_continuous_batching(model) == integration.BATCHING_NAME
    calls, attend = [], layers.flash_attn_varlen_func
    monkeypatch.setattr(
        layers, "flash_attn_varlen_func",
        lambda *args, **options: calls.append(options) or attend(*args, **options),
    )  # fmt: skip
    found = logprobs()
    # Several requests in a pass, and one whose prompt has a part in an earlier one.
    assert max(options["cu_seqlens_q"].numel() for options in calls) > 2
    assert any(1 < o["max_seqlen_q"] < o["max_seqlen_k"] for o in calls)
    for prompt, (chosen, got), (_, peer) in zip(prompts, found, peers):
        ids = torch.tensor([prompt + chosen], device=device)
        wanted = logits(exact, "eager", ids)[0, len(prompt) - 1 : -1].log_softmax(-1).cpu()
        wanted = wanted[range(len(chosen)), chosen]
        error, peer_error = ((x - wanted).abs().max().item() for x in (got, peer))
        assert error <= 2 * peer_error + 2**-8 * wanted.abs().max().item()
    # Both models have one configuration, which `logits` has changed.
    integration.use_in_continuous_batching(model)
    with pytest.raises(ValueError, match="that of continuous batching"):
        model(torch.tensor([prompts[0]], device=device))


def test_versions(monkeypatch):
    for version in ("4.57.1", "5.19.0", "6.0.0"):
        # The module that an import finds now; transformers puts another in its place once.
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=f"transformers {version} is installed"):
            integration.register()
    monkeypatch.undo()
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match="do not take .*kv_length.*q_offset"):
        integration.register()


def test_without_registration_of_the_mask(device, monkeypatch):
    """`register` registers two functions: transformers builds no mask for unknown names."""
    model, _ = gemma(device)
    monkeypatch.delitem(masking_utils.AttentionMaskInterface._global_mapping, integration.NAME)
    model.set_attn_implementation(integration.NAME)
    embeddings = torch.zeros(1, 6, 64, dtype=torch.bfloat16, device=device)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1]], device=device)
    create = masking_utils.create_causal_mask
    assert create(model.config, embeddings, padding, None) is None
    integration.register()
    described_padding = described(create(model.config, embeddings, padding, None))
    assert described_padding.ranges.tolist() == [[2, 6, 2, 6, 6]]


def padded_tokens(device):
    """(ids, attention_mask) of two sequences, one of them shorter."""
    ids = tokens(2, 12, device)
    padding = torch.ones_like(ids)
    padding[1, 9:] = 0
    return ids, padding


@pytest.mark.sampled
def test_training_step(device):
    """Loss and parameter gradients of one step, with padding, against SDPA in float64."""
    model, exact = gemma(device)
    ids, padding = padded_tokens(device)
    labels = ids.masked_fill(padding == 0, -100)

    def step(model, implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(ids, attention_mask=padding, labels=labels).loss
        loss.backward()
        return loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}

    loss, gradients = step(model, integration.NAME)
    eager_loss, eager = step(model, "eager")
    exact_loss, expected = step(exact.double(), "sdpa")
    assert abs(loss - exact_loss) <= 2 * abs(eager_loss - exact_loss) + 2**-8 * exact_loss
    for parameter, wanted in expected.items():
        error, eager_error = (
            (found[parameter] - wanted).norm().item() for found in (gradients, eager)
        )
        assert error <= 2 * eager_error + 2**-8 * wanted.norm().item(), parameter
        # The tolerance must be far from what a missing gradient would give.
        assert error < wanted.norm().item() / 4, parameter


@pytest.mark.sampled
def test_float32_weights_under_autocast(device):
    """A trainer's bf16=True: the layers get float32 queries and keys. The padding is that of
    `test_training_step`, whose kernels serve here, too."""
    _, exact = gemma(device)
    ids, padding = padded_tokens(device)
    rows = padding.bool()
    expected = logits(exact, "eager", ids, attention_mask=padding)[rows]
    exact.set_attn_implementation(integration.NAME)
    with torch.autocast(device, torch.bfloat16):
        found = exact(ids, attention_mask=padding).logits.float()[rows]
        found.square().mean().backward()
    eager = logits(gemma(device)[0], "eager", ids, attention_mask=padding)[rows]
    assert_as_good(found.detach(), eager, expected)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in exact.parameters())


@pytest.mark.parametrize("kind", ["counted later", "offsets", "images"])
@pytest.mark.sampled
def test_training_step_in_one_graph(device, kind):
    """Padding-free batches and masks by tiles under torch.compile, with their gradients. All layers
    are of one kind, which halves the kernels; `test_one_graph` has both kinds, without kernels."""
    model, _ = gemma(device, layer_types=["sliding_attention"] * 2)
    model.set_attn_implementation(integration.NAME)
    ids, images = tokens(1, 15, device), images_of(device)[:1, :15]
    arguments = {"position_ids": torch.tensor(SEQUENCES["three"], device=device)}
    if kind == "offsets":
        offsets = torch.tensor([0, 11, 14, 15], dtype=torch.int32, device=device)
        arguments |= dict(zip(integration.PACKED, (offsets, offsets, 11, 11)))

    def forward(ids):
        if kind == "images":
            return with_images(model, integration.NAME, ids, images, use_cache=False).logits
        return model(ids, use_cache=False, **arguments).logits

    def step(run):
        model.zero_grad()
        found = run(ids)
        found.float().square().mean().backward()
        return found.detach().float(), {n: p.grad.float() for n, p in model.named_parameters()}

    wanted, gradients = step(forward)
    if kind == "images":
        model.set_attn_implementation = lambda name: None
    found, compiled = step(torch.compile(forward, fullgraph=True, backend="aot_eager"))
    assert (found - wanted).abs().max() <= 2**-6 * wanted.abs().max()
    for name, gradient in gradients.items():
        assert (compiled[name] - gradient).norm() <= 2**-6 * gradient.norm(), name
