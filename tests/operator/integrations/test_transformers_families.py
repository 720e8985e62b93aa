"""Every family of `transformers_families`, with this attention and with eager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fa4_hd256.integrations import other_dims
from fa4_hd256.integrations import transformers as integration
from tests.helpers.cases.transformers_families import (
    FAMILIES,
    configuration,
    documented,
    inputs,
    is_known,
)

LENGTH = 20
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def name():
    return integration.register()


def model_of(family):
    if not is_known(family):
        pytest.skip(f"transformers {transformers.__version__} has no {family.model}")
    torch.manual_seed(7)
    return getattr(transformers, family.model)(configuration(family)).eval()


def outputs(model, implementation, arguments):
    """Logits, or hidden states, of rows that are no padding, float32."""
    model.set_attn_implementation(implementation)
    given = dict(arguments)
    for name in {"pixel_values", "state", "noise", "timestep"} & {*given}:
        given[name] = given[name].to(model.dtype)
    found = model(**given)
    found = found.logits if hasattr(found, "logits") else found.last_hidden_state
    rows = arguments["attention_mask"].bool()
    are_others = any(name in arguments for name in ("decoder_input_ids", "noise"))
    return (found if are_others else found[rows]).float()


def generated(model, implementation, arguments, cache):
    """Logits of four steps, (steps, batch, vocabulary), float32."""
    model.set_attn_implementation(implementation)
    given = {name: t for name, t in arguments.items() if name != "decoder_input_ids"}
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    found = model.generate(
        **given, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0,
        cache_implementation=cache, disable_compile=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(found.logits).float()


def gradients(model, implementation, arguments):
    """Return the gradients of all parameters, in one row."""
    model.zero_grad()
    outputs(model, implementation, arguments).square().mean().backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_masks_of_a_family(family, monkeypatch):
    """PyTorch's attention in float32 replaces kernels: logits, steps, gradients."""
    calls = []

    def noted(q, k, v):
        calls.append({t.shape[-1] for t in (q, k, v)})
        return True

    monkeypatch.setattr(other_dims, "has_other_dim", noted)
    model, arguments = model_of(family), inputs(family, LENGTH, "cpu")
    with torch.no_grad():
        wanted = outputs(model, "eager", arguments)
        found = outputs(model, integration.NAME, arguments)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    # The table's statements about layers hold.
    assert (family.here != "none") == ({256} in calls)
    assert (family.elsewhere != "-") == any(dims != {256} for dims in calls) or (
        "vision" in family.elsewhere and not family.has_images
    )
    if family.generates:
        for cache in ("dynamic", "static"):
            wanted = generated(model, "eager", arguments, cache)
            found = generated(model, integration.NAME, arguments, cache)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    wanted = gradients(model, "eager", arguments)
    found = gradients(model, integration.NAME, arguments)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


#: Families with an indexer, and settings by which it chooses some of the keys.
INDEXED = {
    "Qwen4-Exp": {"indexer_budget": 4, "indexer_compress_ratio": 2},
    "GLM-5": {"index_topk": 4},
    "GLM-5.3-Flash": {"index_topk": 4},
    "Hy4": {"index_topk": 4},
    "dots3": {"index_topk": 4},
}


@pytest.mark.parametrize("family_name", INDEXED)
def test_some_keys_of_an_index(family_name, monkeypatch):
    """In float32, where rounding changes no choice. Without the choice logits differ."""
    monkeypatch.setattr(other_dims, "has_other_dim", lambda *_: True)
    family = FAMILIES[family_name]
    settings = family.settings | INDEXED[family_name]
    few, all_keys = model_of(replace(family, settings=settings)), model_of(family)
    all_keys.load_state_dict(few.state_dict())
    arguments = inputs(family, LENGTH, "cpu")
    with torch.no_grad():
        wanted, other = outputs(few, "eager", arguments), outputs(all_keys, "eager", arguments)
        assert (wanted - other).abs().max() > 0.1
        found = outputs(few, integration.NAME, arguments)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    for cache in ("dynamic", "static") if family.generates else ():
        wanted, found = (
            generated(few, one, arguments, cache) for one in ("eager", integration.NAME)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    wanted, found = (gradients(few, one, arguments) for one in ("eager", integration.NAME))
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("family_name", sorted({*INDEXED} - {"GLM-5.3-Flash"}))
def test_packed_sequences_of_an_index(family_name, monkeypatch):
    """The indexer reads their mask. Logits are eager attention's, not those of one sequence. Masks
    of GLM-5.3-Flash take no positions."""
    monkeypatch.setattr(other_dims, "has_other_dim", lambda *_: True)
    family = FAMILIES[family_name]
    model, ids = model_of(family), inputs(family, LENGTH, "cpu")["input_ids"]
    positions = torch.cat((torch.arange(13), torch.arange(LENGTH - 13))).expand(2, -1)

    def run(name, **arguments):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found = model(ids, use_cache=False, **arguments)
        return found.logits if family.generates else found.last_hidden_state

    wanted, found = (run(name, position_ids=positions) for name in ("eager", integration.NAME))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert (run("eager") - wanted).abs().max() > 0.1


@pytest.mark.parametrize("kept", [1, 3])
def test_layers_with_shared_keys(kept, monkeypatch):
    """Gemma 4 computes them for the last queries alone, and cuts their masks."""
    monkeypatch.setattr(other_dims, "has_other_dim", lambda *_: True)
    family = FAMILIES["Gemma 4"]
    settings = {
        "num_hidden_layers": 4, "layer_types": 2 * family.settings["layer_types"],
        "num_kv_shared_layers": 2,
    }  # fmt: skip
    model = model_of(replace(family, settings=family.settings | settings))
    arguments = inputs(family, LENGTH, "cpu")
    mask = arguments.pop("attention_mask")
    for padding in (mask, mask.flip(1), torch.ones_like(mask)):
        rows, results = padding[:, -kept:].bool(), []
        for name in ("eager", integration.NAME):
            model.set_attn_implementation(name)
            with torch.no_grad():
                found = model(**arguments, attention_mask=padding, logits_to_keep=kept)
            results.append(found.logits[rows])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    for cache in ("dynamic", "static"):
        given = arguments | {"attention_mask": mask}
        wanted, found = (
            generated(model, name, given, cache) for name in ("eager", integration.NAME)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_canvas_without_padding(monkeypatch):
    """DiffusionGemma's decoder then has no mask, and sees all of a prompt beyond the window."""
    monkeypatch.setattr(other_dims, "has_other_dim", lambda *_: True)
    family = FAMILIES["DiffusionGemma"]
    model, arguments = model_of(family), inputs(family, LENGTH, "cpu")
    arguments["attention_mask"].fill_(1)
    del arguments["decoder_attention_mask"]
    with torch.no_grad():
        wanted, found = (outputs(model, name, arguments) for name in ("eager", integration.NAME))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


#: Families whose small models lose more than half of their gradient to bfloat16, with PyTorch's
#: attention, too.
NOISY = ("Gemma 4, images", "pi0")


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.sampled
def test_family(family_name, device):
    """Kernels in bfloat16 are not further from float32 than twice eager bfloat16, or SDPA's where
    that decides what is noise."""
    family = FAMILIES[family_name]
    peers = ("eager", "sdpa") if family_name in NOISY else ("eager",)
    exact, arguments = model_of(family).to(device), inputs(family, LENGTH, device)
    model = getattr(transformers, family.model)(exact.config).eval()
    model.load_state_dict(exact.state_dict())
    model = model.to(device, torch.bfloat16)
    exact.load_state_dict(model.state_dict())

    def check(run, *more):
        wanted = run(exact, "eager", arguments, *more)
        results = [run(model, one, arguments, *more) for one in (integration.NAME, *peers)]
        if run is generated:
            # Later steps follow the tokens chosen.
            wanted, results = wanted[0], [result[0] for result in results]
        error, *own = ((result - wanted).norm().item() for result in results)
        assert error <= 2 * max(own) + 2**-8 * wanted.norm().item()
        is_noise = error >= wanted.norm().item() / 2
        assert is_noise == (family_name in NOISY and run is gradients)

    with torch.no_grad():
        check(outputs)
    if family.generates:
        for cache in ("dynamic", "static"):
            check(generated, cache)
    check(gradients)


def test_the_table_of_the_docs():
    assert documented() in (ROOT / "docs" / "features.md").read_text()
