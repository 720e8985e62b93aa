"""Refusals of SGLang's backend: when a model is loaded, and at a layer's first call."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec

from ...call.tree_mask import MOST_NODES
from ...gpus.gpu import of_capability
from ...kernels.limits import HEAD_DIM
from ...kernels.problem_class import KV_DTYPES

#: Head dimensions of layers that the backend serves.
OURS = (HEAD_DIM, HEAD_DIM)

_DTYPES = (torch.bfloat16, torch.float16)


def layers_of(runner: Any) -> list[Any]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def dims_of(layer: Any) -> tuple[int, int]:
    return layer.qk_head_dim, layer.v_head_dim


def head_dims(runner: Any) -> set[tuple[int, int]]:
    """Return the head dimensions of the rank's layers, or of the model's configuration."""
    layers, config = layers_of(runner), runner.model_config
    if layers:
        return {dims_of(layer) for layer in layers}
    dims = {(config.head_dim, config.v_head_dim)}
    if config.is_hybrid_swa:
        own = getattr(config, "swa_head_dim", config.head_dim)
        dims.add((own, getattr(config, "swa_v_head_dim", own)))
    return dims


def check_runner(runner: Any) -> None:
    """Raise NotImplementedError or ValueError for a runner, with pools, that is not served."""
    parallel, config = get_parallel(), runner.model_config
    refused = {
        "a model with MLA": runner.use_mla_backend,
        "cross attention": config.is_encoder_decoder,
        "decode context parallelism": parallel.dcp_enabled,
        "context parallelism": parallel.attn_cp_size > 1,
        "--enable-unified-memory": runner.kv_index_translator.is_translating,
        "a window that grows with the prompt": getattr(runner, "prefill_aware_swa", False),
        # Such a graph would keep the bound of lengths that the host knew when it was captured.
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH": envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
    }
    for name, is_given in refused.items():
        if is_given:
            raise NotImplementedError(
                f"{name} is not offered by fa4_hd256; use another --attention-backend"
            )
    is_deterministic = get_exec().deterministic.enable_deterministic_inference
    if is_deterministic and get_schedule().enable_mixed_chunk:
        raise NotImplementedError(
            "--enable-mixed-chunk is given with deterministic inference, where a row that decodes "
            "has other bits beside a prompt; accepted: one of them"
        )
    _check_types(runner)
    for layer in layers_of(runner):
        if dims_of(layer) == OURS:
            check_layer(layer)
    nodes, topk = get_spec().speculative_num_draft_tokens, get_spec().speculative_eagle_topk or 0
    if topk > 1 and not runner.is_draft_worker and nodes > MOST_NODES:
        raise ValueError(
            f"speculative_num_draft_tokens is {nodes} with topk > 1; accepted: up to {MOST_NODES}"
        )


def _check_types(runner: Any) -> None:
    if runner.dtype not in _DTYPES:
        raise ValueError(f"dtype is {runner.dtype}; accepted: bfloat16 or float16, --dtype")
    cache = runner.kv_cache_dtype
    if cache not in (runner.dtype, *KV_DTYPES) or runner.kv_cache_dtype_str.startswith("mx"):
        raise ValueError(
            f"KV cache is of {runner.kv_cache_dtype_str} ({cache}); accepted: --kv-cache-dtype "
            "auto or fp8_e4m3"
        )
    if torch.device(runner.device).type == "cuda":
        capability = torch.cuda.get_device_capability()
        if of_capability(capability) is None:
            raise ValueError(
                f"GPU has compute capability {capability[0]}.{capability[1]}; accepted: 9.0, 10.0 "
                "and 10.3 (H100, H200, B200, B300)"
            )


def check_layer(layer: Any) -> None:
    if dims_of(layer) != OURS:
        raise ValueError(f"layer {layer.layer_id} has head_dim {dims_of(layer)}; accepted: {OURS}")
    refused = {
        "is_cross_attention": layer.is_cross_attention,
        "use_irope": layer.use_irope,
        "pos_encoding_mode": layer.pos_encoding_mode != "NONE",
        "xai_temperature_len": layer.xai_temperature_len > 0,
        "logit_capping_method": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
    }
    for name, is_given in refused.items():
        if is_given:
            raise NotImplementedError(
                f"layer {layer.layer_id} has {name} {getattr(layer, name)!r}, which is not offered "
                "by fa4_hd256; use another --attention-backend"
            )
