"""Families of transformers models with layers of head_dim 256, as tiny random models.

One table for the tests and for docs/features.md, which `documented` writes a part of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["FAMILIES", "Family", "configuration", "documented", "inputs", "is_known"]

VOCABULARY, WINDOW = 64, 8
#: The token of an image's place, and how many of these an image takes.
IMAGE_TOKEN, IMAGE_TOKENS = 60, 4

#: Sizes of every model. A class takes those of them that its configuration has.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "initializer_range": 0.2,
    "sliding_window": WINDOW, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
#: Linear attention, and experts, of Qwen's hybrid models.
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
#: Multi-head latent attention, expanded to head_dim 256.
LATENT = {
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 2, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
#: An index that keeps all keys of the tests, so that no rounding changes which ones are kept.
#: `test_some_keys_of_an_index` has smaller ones.
INDEX = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 2}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A row of the table.

    model, config: names of classes of transformers. settings: of the configuration beside `SIZES`;
    parts: those of configurations inside it. here, elsewhere: layers that this package computes,
    and those that PyTorch does, with the reason. generates: whether the class has `generate`.
    has_images: whether the tests give it images.
    """

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    here: str = "all"
    elsewhere: str = "-"
    generates: bool = True
    has_images: bool = False


FAMILIES = {
    "Gemma": Family("GemmaForCausalLM", "GemmaConfig"),
    "Gemma 2": Family("Gemma2ForCausalLM", "Gemma2Config", SLIDING, here="all, with softcap"),
    "VaultGemma": Family(
        "VaultGemmaForCausalLM", "VaultGemmaConfig", SLIDING, here="all, with softcap",
    ),
    "Gemma 3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", SLIDING),
    "Gemma 3, images": Family(
        "Gemma3ForConditionalGeneration", "Gemma3Config",
        {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62,
         "mm_tokens_per_image": 4},
        {"text_config": SLIDING, "vision_config": VISION},
        here="text, blocks of image tokens by tiles", elsewhere="vision tower: head_dim 72",
        has_images=True,
    ),
    "Gemma 3n": Family(
        "Gemma3nForCausalLM", "Gemma3nTextConfig",
        {**SLIDING, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
         "num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]},
    ),
    "Gemma 4": Family(
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {**SLIDING, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
        here="sliding layers", elsewhere="full layers: head_dim 512",
    ),
    "Gemma 4, images": Family(
        "Gemma4ForConditionalGeneration", "Gemma4Config",
        {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62},
        {"text_config": {**SLIDING, "vocab_size_per_layer_input": VOCABULARY,
                         "hidden_size_per_layer_input": 16,
                         "use_bidirectional_attention": "vision"},
         "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 64,
                           "position_embedding_size": 16, "pooling_kernel_size": 2}},
        here="sliding layers, blocks of image tokens by tiles",
        elsewhere="full layers: head_dim 512, vision tower: head_dim 64", has_images=True,
    ),
    "EmbeddingGemma": Family(
        "Gemma3TextModel", "Gemma3TextConfig", {**SLIDING, "use_bidirectional_attention": True},
        generates=False,
    ),
    "EmbeddingGemma 2": Family(
        "EmbeddingGemma2TextModel", "EmbeddingGemma2TextConfig",
        {**SLIDING, "hidden_size_per_layer_input": 16, "embedding_dim": 32},
        here="sliding layers", elsewhere="full layers: head_dim 512", generates=False,
    ),
    "T5Gemma": Family(
        "T5GemmaForConditionalGeneration", "T5GemmaConfig", {},
        {"encoder": SLIDING, "decoder": {**SLIDING, "is_decoder": True}},
        here="encoder, decoder and cross attention, with softcap",
    ),
    "T5Gemma 2": Family(
        "T5Gemma2ForConditionalGeneration", "T5Gemma2Config",
        {"image_token_index": 60, "eoi_token_index": 62},
        {"encoder": {"text_config": SLIDING, "vision_config": VISION,
                     "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
         "decoder": SLIDING},
        here="encoder; decoder by tiles", elsewhere="vision tower: head_dim 72",
    ),
    "PaliGemma": Family(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        {"image_token_index": 60, "projection_dim": 32},
        {"text_config": {"model_type": "gemma", "sliding_window": None},
         "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 32}},
        here="text, prefixes by tiles", elsewhere="vision tower: head_dim 72", has_images=True,
    ),
    "pi0": Family(
        "PI0ForConditionalGeneration", "PI0Config",
        {"chunk_size": 4, "max_state_dim": 8, "max_action_dim": 8},
        {"vlm_config": {
            "model_type": "paligemma", "image_token_index": 60, "projection_dim": 32,
            "text_config": {"model_type": "gemma", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "siglip_vision_model",
                              "projection_dim": 32, "vision_use_head": False}},
         "dit_config": {"model_type": "gemma", "sliding_window": None}},
        here="text and actions, prefixes by tiles", elsewhere="vision tower: head_dim 72",
        generates=False, has_images=True,
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {**HYBRID, **EXPERTS}, here="full layers",
    ),
    "Qwen3.5 and 3.6": Family(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", HYBRID, here="full layers",
    ),
    "Qwen3.5 and 3.6 with experts": Family(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**HYBRID, **EXPERTS}, here="full layers",
    ),
    "Qwen4-Exp": Family(
        "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {**HYBRID, **EXPERTS, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64,
         "indexer_compress_ratio": 4},
        here="full layers, keys of the index by tiles",
    ),
    "GLM-4.7-Flash": Family("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT),
    "GLM-5": Family(
        "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**LATENT, **INDEX, "head_dim": 64},
        here="all, keys of the index by tiles",
    ),
    "GLM-5.3-Flash": Family(
        "Glm5NextTextModel", "Glm5NextTextConfig",
        {**LATENT, **INDEX, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "index_kpool": 4,
         "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16,
         "linear_num_heads": 2, "hc_mult": 2, "indexer_types": ["full", "full"]},
        here="full layers, keys of the index by tiles", generates=False,
    ),
    "Hy4": Family(
        "HYV4ForCausalLM", "HYV4Config", {**LATENT, **INDEX},
        here="all, keys of the index by tiles",
    ),
    "dots3": Family(
        "Dots3NoteTextModel", "Dots3NoteTextConfig",
        {**SLIDING, **LATENT, **INDEX, "v_head_dim": 128}, generates=False,
        here="none", elsewhere="head_dim 256/128",
    ),
    "DiffusionGemma": Family(
        "DiffusionGemmaForBlockDiffusion", "DiffusionGemmaConfig",
        {"image_token_id": 60, "canvas_length": 20},
        {"text_config": {**SLIDING, "num_experts": 2, "top_k_experts": 2,
                         "moe_intermediate_size": 16, "final_logit_softcapping": 30.0},
         "vision_config": {**VISION, "model_type": "gemma4_vision"}},
        here="sliding layers", elsewhere="full layers: head_dim 512", generates=False,
    ),
    "Dory": Family("DoryForCausalLM", "DoryConfig", {
        **SLIDING, "n_input_layers": 1, "n_output_layers": 0, "n_recurrent_loops": 2,
    }),
}  # fmt: skip


def is_known(family: Family) -> bool:
    """Return True if the installed transformers has this family."""
    import transformers

    return hasattr(transformers, family.model)


def configuration(family: Family) -> Any:
    """The configuration of a tiny model."""
    import transformers

    kind = getattr(transformers, family.config)
    if not family.parts:
        return kind(**_sizes(kind) | family.settings)
    parts = {name: _with_sizes(part) for name, part in family.parts.items()}
    return kind(**family.settings, **parts)


def inputs(family: Family, length: int, device: Any) -> dict[str, torch.Tensor]:
    """Arguments of a model: a batch of two with left padding, longer than the window."""
    chosen = torch.Generator().manual_seed(11)
    ids = torch.randint(3, IMAGE_TOKEN, (2, length), generator=chosen)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if family.has_images:
        ids[:, 5 : 5 + IMAGE_TOKENS] = IMAGE_TOKEN
        found |= _images(family, ids == IMAGE_TOKEN, chosen)
    if family.model.startswith("PI0"):
        found["state"] = torch.randn(2, 8, generator=chosen)
        found["noise"] = torch.randn(2, 4, 8, generator=chosen)
        found["timestep"] = torch.rand(2, generator=chosen)
    if family.model.startswith(("T5", "Diffusion")):
        found["decoder_input_ids"] = ids.flip(1)
    if family.model.startswith("Diffusion"):
        found["decoder_attention_mask"] = torch.cat((mask, torch.ones_like(mask)), 1)
    return {name: tensor.to(device) for name, tensor in found.items()}


def _images(
    family: Family, are_images: torch.Tensor, chosen: torch.Generator
) -> dict[str, torch.Tensor]:
    """One image of `IMAGE_TOKENS` tokens for each sequence, and which tokens stand for it."""
    kinds = are_images.long()
    if family.model.startswith("Gemma4"):
        # 4 x 4 patches, of which the tower pools 2 x 2 into a token.
        patches = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
        return {
            "mm_token_type_ids": kinds, "image_position_ids": patches.expand(2, -1, -1),
            "pixel_values": torch.rand(2, len(patches), 48, generator=chosen),
        }  # fmt: skip
    pixels = torch.randn(2, 3, 8, 8, generator=chosen)
    if family.model.startswith("PI0"):
        cameras = torch.ones(2, 1, dtype=torch.bool)
        return {"pixel_values": pixels[:, None], "pixel_attention_mask": cameras}
    return {"token_type_ids": kinds, "pixel_values": pixels}


def _with_sizes(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a configuration, and parts of it; one that has sizes keeps them."""
    if any(isinstance(value, dict) for value in part.values()):
        return {
            name: _with_sizes(value) if isinstance(value, dict) else value
            for name, value in part.items()
        }
    return part if "hidden_size" in part else SIZES | part


def _sizes(kind: Any) -> dict[str, Any]:
    """Return the entries of `SIZES` that a configuration class has."""
    names = set(getattr(kind, "__annotations__", {}))
    for base in kind.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return {name: value for name, value in SIZES.items() if name in names}


def documented() -> str:
    """The table of the docs."""
    lines = ["| family | computed here | by PyTorch |", "|---|---|---|"]
    lines += [
        f"| {name} | {family.here} | {family.elsewhere} |" for name, family in FAMILIES.items()
    ]
    return "\n".join(lines)
