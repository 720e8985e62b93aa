"""Small models in the form of well-known ones, with random weights, in a folder that engines load.

Layers of attention have head_dim 256. Weights are normal, with the standard deviation that keeps
the size of a layer's rows, so that logits differ as in a trained model: none is at its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEAD_DIM = 256
#: Keys that a layer of Gemma's with a window sees, and every how many-th layer sees all.
WINDOW, FULL_EVERY = 1024, 6
#: Every how many-th layer of Qwen3.5 is attention.
ATTENTION_EVERY = 4


@dataclass(frozen=True)
class Size:
    """Size of a model. vocabulary: tokens; positions: the longest request."""

    layers: int = 12
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 32768
    positions: int = 4096


def config_of(kind: str, size: Size) -> Any:
    """Return transformers' configuration. kind: of `MODELS`. Heads for keys and values are as in
    the published models of that form: 2 of Qwen's, half of the query heads of Gemma's."""
    config: Any = MODELS[kind](size, _common(size))
    return config


def save(kind: str, size: Size, folder: Path, device: torch.device) -> None:
    """Write a model's configuration and weights. device: where the weights are drawn."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config_of(kind, size), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def cache_bytes(kind: str, size: Size, tokens: int) -> int:
    """Return enough bytes of a cache for so many tokens in all layers, in bf16. A hybrid model's
    states lie in the same memory: every layer counts."""
    heads_kv = config_of(kind, size).num_key_value_heads
    return 2 * size.layers * heads_kv * 2 * HEAD_DIM * 2 * tokens


def _common(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden, "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "head_dim": HEAD_DIM,
        "vocab_size": size.vocabulary, "max_position_embeddings": size.positions,
        "initializer_range": size.hidden**-0.5, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def _qwen3(size: Size, common: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(num_key_value_heads=2, **common)


def _gemma3(size: Size, common: dict[str, Any]) -> Any:
    from transformers import Gemma3TextConfig

    kinds = [
        "sliding_attention" if layer % FULL_EVERY else "full_attention"
        for layer in range(1, size.layers + 1)
    ]
    return Gemma3TextConfig(
        num_key_value_heads=max(1, size.heads // 2), layer_types=kinds, sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_DIM, **common,
    )  # fmt: skip


def _qwen3_5(size: Size, common: dict[str, Any]) -> Any:
    """Return the form of a hybrid model: gated delta rule, and attention with an output gate."""
    from transformers import Qwen3_5TextConfig

    kinds = [
        "linear_attention" if layer % ATTENTION_EVERY else "full_attention"
        for layer in range(1, size.layers + 1)
    ]
    return Qwen3_5TextConfig(
        num_key_value_heads=2, layer_types=kinds, linear_num_key_heads=size.heads,
        linear_num_value_heads=size.heads, linear_key_head_dim=128, linear_value_head_dim=128,
        full_attention_interval=ATTENTION_EVERY, **common,
    )  # fmt: skip


#: Makers of configurations, by the name of the form.
MODELS: dict[str, Callable[[Size, dict[str, Any]], Any]] = {
    "Qwen3": _qwen3, "Gemma 3": _gemma3, "Qwen3.5": _qwen3_5,
}  # fmt: skip
