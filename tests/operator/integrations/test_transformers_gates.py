"""Gated layers of transformers, whose gates go into the kernels."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention

from fa4_hd256.integrations import transformers as integration
from fa4_hd256.integrations.transformers import gates, layers

ROWS = 130


@pytest.fixture(scope="module", autouse=True)
def name():
    return integration.register()


def config_of(**settings):
    return Qwen3_5TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=256,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["full_attention"],
        initializer_range=0.2, attn_implementation=integration.NAME, **settings,
    )  # fmt: skip


@pytest.fixture
def gated(monkeypatch):
    """Gates that the kernels were given, by function."""
    found = []
    for function in ("flash_attn_func", "flash_attn_varlen_func"):
        original = getattr(layers, function)

        def told(*tensors, original=original, **options):
            found.append(options["out_gate"])
            return original(*tensors, **options)

        monkeypatch.setattr(layers, function, told)
    return found


def layer_of(device):
    """Return a layer with gates of both signs."""
    torch.manual_seed(7)
    layer = Qwen3_5Attention(config_of(), 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(device, torch.bfloat16)


def results(layer, hidden, upstream):
    """Return the layer's result and the gradients of its input and of its parameters, float32."""
    hidden = hidden.clone().requires_grad_()
    positions = torch.arange(ROWS)[:, None] * 0.01 ** torch.linspace(0, 1, 32)
    angles = torch.cat((positions, positions), -1)[None].to(hidden.device)
    rotation = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
    out, _ = layer(hidden, rotation, None)
    leaves = [hidden, *layer.parameters()]
    found = [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
    return [tensor.detach().float() for tensor in found]


def test_a_layer_and_its_gradients(device, gated):
    """No farther from float32 than twice what the layer is that applies its gate itself."""
    layer = layer_of(device)
    exact = copy.deepcopy(layer).float()
    exact.config._attn_implementation = "eager"
    layer.config._attn_implementation = integration.NAME
    hidden, upstream = torch.randn(2, 2, ROWS, 64, device=device).bfloat16()
    expected = causal_eager(exact, hidden.float(), upstream.float())
    apart = results(layer, hidden, upstream)
    assert gated == [None]
    model = torch.nn.ModuleList([layer])
    assert integration.use_output_gate(model) == 1
    fused = results(layer, hidden, upstream)
    assert gated[1].shape == (2, ROWS, 2, 256)
    for got, other, right in zip(fused, apart, expected, strict=True):
        largest = right.abs().max()
        error, of_other = ((x - right).abs().max() for x in (got, other))
        assert error <= 2 * of_other + 2**-8 * largest
        assert error < largest / 8
    # The gate matters: without it results are others.
    layer.q_proj.weight.data.view(2, 2, 256, 64)[:, 1] = 0
    assert (results(layer, hidden, upstream)[0] - expected[0]).abs().max() > expected[0].std()


def causal_eager(layer, hidden, upstream):
    """Return `results` of eager attention, which needs the causal mask of the model."""
    forward = layer.forward
    hidden_rows = torch.ones(ROWS, ROWS, dtype=torch.bool, device=hidden.device).triu(1)
    mask = torch.zeros(ROWS, ROWS, device=hidden.device).masked_fill(hidden_rows, -1e9)
    layer.forward = lambda states, rotation, _: forward(states, rotation, mask[None, None])
    return results(layer, hidden, upstream)


@pytest.mark.parametrize("kind", ["left", "right", "packed", "between"])
@pytest.mark.sampled
def test_rows_of_a_batch(device, gated, kind):
    """Padding and packed sequences: the gate of a row goes with the row."""
    torch.manual_seed(3)
    model = Qwen3_5ForCausalLM(config_of()).to(device, torch.bfloat16).eval()
    ids = torch.randint(1, 64, (2, 14), device=device)
    given = {"attention_mask": torch.ones_like(ids)}
    if kind == "packed":
        ids, places = ids[:1], [*range(5), *range(9)]
        given = {"position_ids": torch.tensor([places], device=device)}
    else:
        given["attention_mask"][0, {"left": slice(4), "right": slice(9, None)}.get(kind, 5)] = 0
    rows = given.get("attention_mask", ids).bool()
    with torch.no_grad():
        apart = model(ids, **given).logits[rows].float()
        integration.use_output_gate(model)
        fused = model(ids, **given).logits[rows].float()
    assert [gate is not None for gate in gated] == [False, True]
    assert (fused - apart).abs().max() <= 0.02 * apart.abs().max()


def test_other_implementations_are_as_before(device):
    torch.manual_seed(3)
    model = Qwen3_5ForCausalLM(config_of()).to(device).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(1, 64, (2, 14), device=device)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        before = model(ids).logits, model.generate(ids, **options)
        integration.use_output_gate(model)
        after = model(ids).logits, model.generate(ids, **options)
    assert all(map(torch.equal, before, after))


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="Linear has no gated layer of head_dim 256; accepted: "):
        integration.use_output_gate(torch.nn.Linear(1, 1))
    model = Qwen3_5ForCausalLM(config_of())
    before = Qwen3_5Attention.forward

    def changed(self, *args, **options):
        out, weights = before(self, *args, **options)
        return 2 * out, weights

    changed.__signature__ = gates.inspect.signature(before)
    monkeypatch.setattr(Qwen3_5Attention, "forward", changed)
    with pytest.raises(ValueError, match="computes Qwen3_5Attention in another way"):
        integration.use_output_gate(model)
    assert all("forward" not in vars(layer) for layer in model.modules())
