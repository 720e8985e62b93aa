"""Kernels that a model's layers can need, compiled and loaded before the first request."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_exec, get_spec

from ...models import AttentionModel, Mask
from ...run.ahead.needs import Needs
from ...run.catalogue import KernelSpec
from ..engines import engine_kernels, load_and_log
from .checks import OURS, dims_of, layers_of


def warm_up_layers(runner: Any) -> None:
    load_and_log(kernels_of_layers(runner), torch.device(runner.device))


def kernels_of_layers(runner: Any) -> list[KernelSpec]:
    device, needs = torch.device(runner.device), needs_of(runner)
    found = dict[KernelSpec, None]()
    for model in kinds_of_layers(runner):
        found |= dict.fromkeys(engine_kernels(model, needs, device))
    return list(found)


def needs_of(runner: Any) -> Needs:
    is_e4m3 = runner.kv_cache_dtype == torch.float8_e4m3fn
    is_deterministic = bool(get_exec().deterministic.enable_deterministic_inference)
    layers, has_trees = layers_of(runner), (get_spec().speculative_eagle_topk or 0) > 1
    has_blocks = any(layer.attn_type != AttentionType.DECODER for layer in layers)
    # Nodes of a tree have keys of their own in a layer with a window, in pages of one row.
    has_nodes = has_trees and any(layer.sliding_window_size >= 0 for layer in layers)
    return Needs(
        forms=("packed-paged",),
        dtypes=(runner.dtype,),
        page_sizes=(runner.page_size, 1) if has_nodes else (runner.page_size,),
        kv_dtypes=(torch.float8_e4m3fn if is_e4m3 else None,),
        batch_invariant=is_deterministic,
        cache_leftpad=has_blocks,
        tree_mask=has_trees,
    )


def kinds_of_layers(runner: Any) -> list[AttentionModel]:
    has_sinks = any(name.endswith("sinks") for name, _ in runner.model.named_parameters())
    found: dict[tuple[int, int, float], set[Mask]] = {}
    for layer in layers_of(runner):
        if dims_of(layer) == OURS:
            kind = layer.tp_q_head_num, layer.tp_k_head_num, float(layer.logit_cap)
            found.setdefault(kind, set()).update(_masks(layer, runner))
    return [
        AttentionModel("layers", heads, heads_kv, tuple(masks), softcap, sink=has_sinks)
        for (heads, heads_kv, softcap), masks in found.items()
    ]


def _masks(layer: Any, runner: Any) -> set[Mask]:
    reach = layer.sliding_window_size if layer.sliding_window_size >= 0 else None
    masks = {Mask(True, (reach, None))}
    if layer.attn_type != AttentionType.DECODER:
        masks |= {Mask(False, (reach, reach)), Mask(False, (None, None))}
    if hasattr(runner.model, "prepare_attn_masks"):
        masks.add(Mask(False, (reach, None)))
    return masks
