"""Checks of a call's arguments, and of what the ranks' calls must have in common."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...call import named_configs
from ...call.checks import check_entries_of_mask, check_kinds, check_lists, check_mask_options
from ...call.forward_problem import Problem, operands_of
from ...call.functions.tensors import functions_of_keys
from ...call.memory import check_device
from ...call.operator_arguments import ForwardTensors, with_batch
from ...call.options import BY_RULE, Options, flags_of
from ...call.tile_mask import TileMask
from ...gpus.family import architecture_of
from ...kernels.kernel_set import kernels_of
from ...mask_mods import MaskMod
from ...masks import as_tile_mask
from ...score_mods import ScoreMod
from .local import Settings
from .spans import Units, spans_by_rank, unit


class Arguments(NamedTuple):
    group: Any
    order: Any
    cu_seqlens: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    learnable_sink: Any
    softcap: Any
    deterministic: Any
    return_lse: Any
    config: Any
    backward_config: Any
    use_clc: Any
    score_mod: Any
    block_mask: Any
    mask_mod: Any


def batched(q: Any, k: Any, v: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Return q, k, v with a batch, and the sink. Raises TypeError for no tensor, or k or v of
    another dtype than q: received bytes are read in q's, and e4m3 scales are not exchanged."""
    sink = arguments.learnable_sink
    check_kinds({"q": q, "k": k, "v": v, "learnable_sink": sink}, {}, BY_RULE)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; accepted over ranks: {q.dtype}, like q. Convert "
                "it before the call"
            )
    if arguments.cu_seqlens is not None:
        q, k, v = (with_batch(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
    return q, k, v, sink


def settings_of(tensors: tuple[Any, ...], arguments: Arguments, ranks: int) -> Settings:
    q, k, v, sink = tensors
    order, offsets = arguments.order, arguments.cu_seqlens
    options = Options.check(
        arguments.softmax_scale, arguments.causal, arguments.window_size, arguments.softcap
    )
    flags_of(return_lse=arguments.return_lse)
    score_mod, mask_mod = arguments.score_mod, arguments.mask_mod
    read, key = ScoreMod.read_by(score_mod)
    seen, mask_key = MaskMod.read_by(mask_mod)
    counted = {} if offsets is None else {"cu_seqlens_q": torch.empty(_count(offsets))}
    score_class, _ = functions_of_keys((key, mask_key), read | seen | counted, q)
    with_scores = replace(options, score_mod=score_class)
    operands = operands_of(ForwardTensors(q, k, v, sink, **read))
    Problem.describe(operands, with_scores, sink, read, config=arguments.config)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"a rank has {q.shape[1]} rows of q and {k.shape[1]} of k; accepted: equal numbers"
        )
    spans_by_rank(order, ranks, q.shape[1])
    rows = ranks * q.shape[1]
    documents = None if offsets is None else _documents(offsets, rows)
    kinds = kernels_of(architecture_of(q.device)).configs("backward")
    named_configs.encode(arguments.backward_config, *kinds, said="backward_config")
    mask, units = None, None
    if arguments.block_mask is not None or mask_mod is not None:
        check_mask_options(options.window, 0)
        mask = _mask_of((arguments.block_mask, mask_mod), q, rows, offsets)
        in_units = unit(order, q.shape[1])
        units = Units(in_units, mask.units(in_units))
    return Settings(
        options,
        order,
        rows,
        documents,
        arguments.config,
        arguments.backward_config,
        arguments.use_clc,
        score_mod,
        mask_mod,
        mask,
        units,
    )


def _mask_of(masks: tuple[Any, Any], q: torch.Tensor, rows: int, offsets: Any) -> TileMask:
    """Return the block mask of the whole sequence. masks: block_mask and mask_mod."""
    block_mask, mask_mod = masks
    if offsets is not None:
        beside = ", beside a mask_mod that is True inside documents alone" if mask_mod else ""
        raise ValueError(
            f"{'mask_mod' if mask_mod else 'block_mask'} with cu_seqlens; accepted: one of them: "
            "fa4_hd256.masks.in_sequences, or masks.documents, makes a block_mask that says both"
            f"{beside}"
        )
    check_lists(block_mask)
    mask = as_tile_mask(block_mask, with_bits=mask_mod is None, batch=q.shape[0], heads=q.shape[2])
    if mask.lengths != (rows, rows):
        raise ValueError(
            f"block_mask is of {mask.lengths[0]} queries and {mask.lengths[1]} keys; accepted: "
            f"{rows} of both, the rows of all ranks"
        )
    check_entries_of_mask(mask.tiles.shape[0], mask.tiles.shape[1], q)
    check_device("block_mask", mask.device, q.device, "q")
    return mask


def _count(offsets: Any) -> int:
    if isinstance(offsets, torch.Tensor):
        return offsets.numel()
    return len(offsets) if isinstance(offsets, (list, tuple)) else 0


def _documents(offsets: Any, rows: int) -> tuple[int, ...]:
    numbers = offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets
    if not isinstance(numbers, (list, tuple)) or not all(type(one) is int for one in numbers):
        raise TypeError(
            f"cu_seqlens is a {type(offsets).__name__}; accepted: a sequence or a one-dimensional "
            "tensor of integers"
        )
    rising = all(begin <= end for begin, end in zip(numbers, numbers[1:]))
    if len(numbers) < 2 or numbers[0] != 0 or numbers[-1] != rows or not rising:
        raise ValueError(
            f"cu_seqlens is {_shortened(numbers)}; accepted: rising offsets from 0 to {rows}, the "
            "rows of all ranks"
        )
    return tuple(numbers)


def _shortened(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"


def check_heads(tensors: tuple[Any, ...], count: int) -> None:
    """Raise ValueError unless heads divide among `count` ranks."""
    heads, heads_kv = tensors[0].shape[2], tensors[1].shape[2]
    if heads % count or (heads_kv % count and count % heads_kv):
        raise ValueError(
            f"{heads} heads and {heads_kv} key/value heads do not divide among {count} ranks; "
            "accepted: heads a multiple of the ranks, heads_kv a multiple or a divisor of them; "
            "or use ring_attention"
        )


def text_of(tensors: tuple[Any, ...], settings: Settings, name: str) -> str:
    q, k, _, sink = tensors
    has_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )
    options = settings.options
    scores, seen = (
        _described(kind, function)
        for kind, function in (("score_mod", settings.score_mod), ("mask_mod", settings.mask_mod))
    )
    mask = "no block_mask"
    if settings.block_mask is not None:
        units = zlib.crc32(repr(settings.units).encode())
        mask = f"block_mask {list(settings.block_mask.tiles.shape)}, in units {units:08x}"
    return (
        f"{name}, order {settings.order}, q {list(q.shape)}, k {list(k.shape)}, {q.dtype}, "
        f"softmax_scale {options.softmax_scale}, window {options.window}, softcap "
        f"{options.softcap}, "
        f"{'a' if sink is not None else 'no'} sink, {scores}, {mask}, {seen}, "
        f"{'with' if has_gradient else 'without'} gradients, cu_seqlens "
        f"{settings.documents and _shortened(settings.documents)}, "
        f"checksum {zlib.crc32(repr(settings.documents).encode()):08x}"
    )


def _described(name: str, function: ScoreMod | MaskMod | None) -> str:
    if function is None:
        return f"no {name}"
    return f"{name} {function.key} of {[[str(t.dtype), *t.shape] for t in function.tensors]}"
