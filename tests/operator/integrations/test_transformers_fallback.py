"""Models of transformers whose layers have another head_dim than the kernels, and torch.compile.

Such layers run in PyTorch's attention, in any dtype, so these tests follow masks through whole
models without running a kernel.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers")

from transformers import masking_utils as known
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

from fa4_hd256.integrations import transformers as integration
from fa4_hd256.integrations import warnings_once
from fa4_hd256.integrations.transformers import restarts

VOCABULARY, LENGTH = 64, 12
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4,
    "query_pre_attn_scalar": 16, "initializer_range": 0.2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def name():
    return integration.register()


def gemma(**settings):
    torch.manual_seed(5)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **settings)).eval()


def gemma2():
    torch.manual_seed(5)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_logit_softcapping=2.0)).eval()


def tokens(batch=2):
    return torch.randint(1, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(3))


def padding(kind):
    rows = torch.ones(2, LENGTH, dtype=torch.long)
    rows[1, {"left": slice(4), "right": slice(-5, None), "holes": slice(5, 7)}[kind]] = 0
    return rows


#: Arguments of models: each kind of mask.
ARGUMENTS = {
    "no mask": {},
    "left": {"attention_mask": padding("left")},
    "right": {"attention_mask": padding("right")},
    "holes": {"attention_mask": padding("holes")},
    "packed": {
        "position_ids": torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]]),
        "use_cache": False,
    },
}  # fmt: skip


def logits(model, implementation, ids, **arguments):
    model.set_attn_implementation(implementation)
    return model(ids, **arguments).logits


def cases(kinds):
    """Return (kind, settings) of causal models, and of those with windows on both sides;
    transformers looks for packed sequences in the former alone."""
    found = []
    for kind in kinds:
        found.append(pytest.param(kind, {}, id=f"{kind}, causal"))
        if "position_ids" not in kinds[kind]:
            found.append(pytest.param(kind, {"is_causal": False}, id=f"{kind}, both sides"))
    return found


@pytest.mark.parametrize("kind, settings", cases(ARGUMENTS))
def test_layers_of_another_head_dim(kind, settings):
    """Logits and gradients are eager attention's."""
    model, arguments = gemma(**settings), ARGUMENTS[kind]
    rows = arguments.get("attention_mask", torch.ones(2, LENGTH)).bool()
    found, gradients = {}, {}
    for implementation in ("eager", integration.NAME):
        model.zero_grad()
        result = logits(model, implementation, tokens(), **arguments)[rows]
        result.square().mean().backward()
        found[implementation] = result
        gradients[implementation] = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found[integration.NAME], found["eager"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gradients[integration.NAME], gradients["eager"], rtol=1e-3, atol=1e-4
    )


def test_a_softcap(caplog):
    """Gemma 2 with layers of another head_dim, which SDPA has no softcap for."""
    warnings_once._logged.clear()
    model = gemma2()
    found = [logits(model, name, tokens()) for name in (integration.NAME, "eager")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "head_dim 16" in caplog.text and "softcap" in caplog.text


def test_a_sink_and_a_query_that_sees_nothing():
    q, k, v = (torch.randn(1, heads, 3, 16) for heads in (2, 1, 1))
    sink = torch.randn(2)
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    seen[..., 1, :] = False
    out, _ = integration.attention(torch.nn.Module(), q, k, v, seen, s_aux=sink)
    logits = torch.cat((q @ k.mT / 4, sink.view(1, 2, 1, 1).expand(1, 2, 3, 1)), -1)
    wanted = (logits.softmax(-1)[..., :-1] @ v).transpose(1, 2)
    wanted[:, 1] = 0
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_mask_that_is_added(lowest):
    """GLM-5.3-Flash makes one for every implementation but SDPA."""
    q, k, v = (torch.randn(1, heads, 3, 16) for heads in (2, 1, 1))
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 3, 3).masked_fill(~seen, lowest)
    layer, found = torch.nn.Module(), []
    for mask in (seen, added):
        found.append(integration.attention(layer, q, k, v, mask)[0])
    assert torch.equal(*found)
    run = torch.compile(integration.attention, backend="eager", fullgraph=True)
    assert torch.equal(run(layer, q, k, v, added)[0], found[0])
    added[..., 2, 0] = lowest
    changed, _ = integration.attention(layer, q, k, v, added)
    assert torch.equal(changed, integration.attention(layer, q, k, v, added == 0)[0])
    assert not torch.equal(changed, found[0])


def test_a_bias_is_no_mask():
    q, k, v = (torch.randn(1, heads, 3, 16) for heads in (2, 1, 1))
    layer, bias = torch.nn.Module(), torch.zeros(1, 1, 3, 3)
    with pytest.raises(ValueError, match="requires gradients"):
        integration.attention(layer, q, k, v, bias.clone().requires_grad_())
    bias[..., 1, 0] = -1
    for run, error in (
        (integration.attention, ValueError),
        (torch.compile(integration.attention, backend="eager"), RuntimeError),
    ):
        with pytest.raises(error, match="a bias; accepted: 0"):
            run(layer, q, k, v, bias)


def test_a_line_in_the_log_for_each_head_dim(caplog):
    warnings_once._logged.clear()
    for dims in ((16, 16), (16, 16), (8, 8), (256, 128)):
        q, k = (torch.randn(1, 1, 3, dims[0]) for _ in range(2))
        integration.attention(torch.nn.Module(), q, k, torch.randn(1, 1, 3, dims[1]), None)
    assert len(caplog.records) == 3
    assert {record.name for record in caplog.records} == {"fa4_hd256"}
    assert "head_dim 256/128" in caplog.text and caplog.records[0].levelno == logging.WARNING


def offsets():
    """The packed arguments for `tokens`, all rows as four sequences."""
    found = torch.tensor([0, 5, 12, 21, 24], dtype=torch.int32)
    return dict(zip(integration.PACKED, (found, found, 9, 9)))


def graphs_of(model, ids, **arguments):
    """Return (logits, the number of graphs) of a compiled model, and the model's own logits."""
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch.no_grad():
        wanted = model(ids, **arguments).logits
        found = torch.compile(model, backend=counter, fullgraph=True)(ids, **arguments).logits
    return found, counter.frame_count, wanted


#: Padding before and behind the tokens: where a mask between them is, `test_holes_in_a_graph`.
COMPILED = {
    **{kind: ARGUMENTS[kind] for kind in ("no mask", "left", "right", "packed")},
    "no cache": {"use_cache": False},
    "offsets": {**ARGUMENTS["packed"], **offsets()},
}


@pytest.mark.parametrize("kind, settings", cases(COMPILED))
@pytest.mark.sampled("left, both sides", "packed, causal")
def test_one_graph(kind, settings):
    """A compiled model is one graph, whatever the mask, with windows in every case."""
    model, arguments = gemma(**settings), COMPILED[kind]
    model.set_attn_implementation(integration.NAME)
    found, graphs, wanted = graphs_of(model, tokens(), **arguments)
    assert graphs == 1
    rows = arguments.get("attention_mask", torch.ones(2, LENGTH)).bool()
    torch.testing.assert_close(found[rows], wanted[rows], rtol=1e-4, atol=1e-4)


def test_images_in_a_graph():
    """Masks that are no bands are evaluated in the graph."""
    model, blocks = gemma(), torch.full((2, LENGTH), -1)
    model.set_attn_implementation(integration.NAME)
    blocks[0, 2:8] = 0
    create = known.create_causal_mask, known.create_sliding_window_causal_mask
    ids = tokens()

    def forward(ids, blocks):
        embeddings = model.get_input_embeddings()(ids)
        full, sliding = (
            make(model.config, embeddings, None, None, block_sequence_ids=blocks) for make in create
        )
        masks = {"full_attention": full, "sliding_attention": sliding}
        return model(ids, attention_mask=masks, use_cache=False).logits

    with torch.no_grad():
        wanted = forward(ids, blocks)
        found = torch.compile(forward, fullgraph=True, backend="eager")(ids, blocks)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_holes_in_a_graph():
    """Padding between tokens, which a graph cannot look for, ends the pass instead of being taken
    for another mask."""
    model = gemma()
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(RuntimeError, match="padding between tokens"), torch.no_grad():
        torch.compile(model, backend="eager")(tokens(), attention_mask=padding("holes"))


def counted(rows):
    """Return positions of tokens as `generate` makes them: 0 for padding before the first."""
    return (rows.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("settings", [{}, {"is_causal": False}], ids=["causal", "both sides"])
def test_packed_sequences_whose_mask_is_of_one(settings):
    """transformers' masks keep packed sequences apart without a cache and attention_mask alone."""
    model, positions = gemma(**settings), ARGUMENTS["packed"]["position_ids"]
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    model.set_attn_implementation(integration.NAME)
    for arguments in ({}, {"attention_mask": ones}, {"attention_mask": padding("right")}):
        with pytest.raises(ValueError, match="position_ids decrease.*accepted: use_cache=False"):
            model(tokens(), position_ids=positions, **arguments)
    # The user's own offsets say what is packed.
    model(tokens(), position_ids=positions, **offsets())
    # The same positions under a mask that says what each sees, and positions of padding.
    apart = torch.block_diag(*(torch.ones(n, n) for n in (5, 7))).bool().tril()
    model(tokens()[:1], position_ids=positions[:1], attention_mask=apart[None, None])
    for kind in ("left", "right", "holes"):
        rows = padding(kind)
        given = {"attention_mask": rows, "position_ids": counted(rows).masked_fill(rows == 0, 1)}
        found, wanted = (
            logits(model, name, tokens(), **given)[rows.bool()]
            for name in (integration.NAME, "eager")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_packed_sequences_whose_mask_is_of_one_in_a_graph():
    model = gemma()
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(RuntimeError, match="position_ids decrease"), torch.no_grad():
        run = torch.compile(model, backend="eager")
        run(tokens(), position_ids=ARGUMENTS["packed"]["position_ids"])


def test_layers_share_the_check_of_positions(monkeypatch):
    """A step of one token, and one whose keys are cached, are not looked at."""
    looked = []
    plain = restarts._decrease
    monkeypatch.setattr(restarts, "_decrease", lambda *args: looked.append(args) or plain(*args))
    model = gemma()
    model.set_attn_implementation(integration.NAME)
    with torch.no_grad():
        cache = model(tokens()[:, :5]).cache
        assert len(looked) == 1
        for rows in (slice(5, 6), slice(6, 9)):
            cache = model(tokens()[:, rows], cache=cache).cache
    assert len(looked) == 1
