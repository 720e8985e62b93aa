"""Models served by vLLM's engine with our backend: scheduler, block manager, runner, sampler.

vLLM is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from checkout import ROOT

pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.simulator

SHAPE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 512, "tie_word_embeddings": False,
    "max_position_embeddings": 512, "initializer_range": 0.06, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
#: A prompt of several steps and a short one, which decodes beside it; then one whose first blocks
#: are in the cache.
GENERATOR = torch.Generator().manual_seed(0)
LONG = torch.randint(3, 512, (100,), generator=GENERATOR).tolist()
PROMPTS = [LONG[:7], LONG, LONG[:64] + LONG[:9]]


def model_of(kind):
    if kind == "Qwen3":
        config = transformers.Qwen3Config(num_hidden_layers=2, **SHAPE)
    else:
        # Every second layer has a window, shorter than the prompts.
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
            sliding_window=40, query_pre_attn_scalar=256, **SHAPE,
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def logits_of(model, tokens, dtype):
    return model.to(dtype)(torch.tensor([tokens])).logits[0].double()


@pytest.mark.sampled("Qwen3")
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma 3"])
def test_a_model_is_served(tmp_path, kind):
    """Each token is the best one by float64, as far as PyTorch's own bf16 could tell."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    command = [sys.executable, str(ROOT / "tests/helpers/vllm_engine.py"), str(tmp_path)]
    done = subprocess.run(
        command, input=json.dumps(PROMPTS), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # A step of decoding beside a part of a prompt, and keys of other requests.
    assert "step [[1, " in done.stderr and "], [47, " in done.stderr, done.stderr
    # vLLM has let go of what is left of the window.
    assert f"cached [{64 if kind == 'Qwen3' else 0}]" in done.stderr, done.stderr
    for prompt, generated in zip(PROMPTS, json.loads(done.stdout), strict=True):
        assert len(generated) == 5
        tokens = prompt + generated[:-1]
        rounded, exact = (logits_of(model, tokens, t) for t in (torch.bfloat16, torch.float64))
        error = (rounded - exact).abs().max()
        rows = exact[len(prompt) - 1 :]
        behind = rows.amax(-1) - rows[torch.arange(5), generated]
        # An error of either logit, of twice PyTorch's.
        assert (behind <= 4 * error).all() and (behind == 0).sum() >= 3, (behind, error)
