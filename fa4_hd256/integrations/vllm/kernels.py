"""Kernels that a group of vLLM's layers can need, compiled and loaded before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from ...models import AttentionModel, Mask
from ...run.ahead.needs import USES, Needs
from ...run.catalogue import KernelSpec
from ..engines import engine_kernels, load_and_log

_DECODE = "decode"
#: The most queries of a request in a dense call.
MOST_DENSE = USES[_DECODE] or 0


def warm_up(
    kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
) -> None:
    specs = kernels_of_layers(kv_cache_spec, layer_names, vllm_config, device)
    load_and_log(specs, device, f" of {len(layer_names)} layers")


def kernels_of_layers(
    kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
) -> list[KernelSpec]:
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
    found = dict[KernelSpec, None]()
    for layer in layers.values():
        for spec in _of_layer(layer, kv_cache_spec, vllm_config, device):
            found[spec] = None
    return list(found)


def _of_layer(
    layer: Any, kv_cache_spec: Any, vllm_config: Any, device: torch.device
) -> Iterable[KernelSpec]:
    impl = layer.impl
    model = AttentionModel(
        layer.layer_name,
        impl.num_heads,
        impl.num_kv_heads,
        _masks(impl, vllm_config),
        impl.softcap,
        impl.scale,
        impl.sinks is not None,
    )
    needs = Needs(
        forms=("packed",) if impl.is_encoder else ("packed-paged",),
        dtypes=(layer.dtype,),
        page_sizes=() if impl.is_encoder else (kv_cache_spec.block_size,),
        kv_dtypes=(impl.kv_dtype,),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        alibi=impl.has_alibi,
    )
    yield from engine_kernels(model, needs, device)
    if not (impl.is_encoder or needs.batch_invariant):
        dense = replace(needs, uses=(_DECODE,), forms=("paged",))
        yield from engine_kernels(model, dense, device)


def _masks(impl: Any, vllm_config: Any) -> tuple[Mask, ...]:
    both_sides = Mask(False, (impl.reach, impl.reach))
    if impl.attn_type != AttentionType.DECODER:
        return (both_sides,)
    masks, model = [Mask(True, (impl.reach, None))], vllm_config.model_config
    is_diffusion = model is not None and model.is_diffusion
    if is_diffusion or vllm_config.attention_config.use_non_causal:
        masks.append(both_sides)
    if model is not None and model.is_mm_prefix_lm:
        masks.append(Mask(False, (impl.reach, None)))
    return tuple(dict.fromkeys(masks))
