"""Sigmoid gates of attention's results, in the kernels, for transformers' gated layers.

A layer of Qwen3-Next and Qwen3.5 multiplies the result of attention by the sigmoid of a second half
of its queries' projection. It does so itself, behind the attention function, which never sees the
gate. So the layer's `forward` is replaced by one that hands the gate over.

NOTE [two ways, one result].  The replacement repeats what transformers' layer does around attention
and would miss what a later release changes there. So before a class is replaced, a tiny layer of it
is computed both ways with eager attention, without a cache and with one: the bits must be equal.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from ...kernels.limits import HEAD_DIM
from .layers import OUT_GATE, attention, batched_attention
from .registration import check_version

#: Classes of transformers whose layers have such a gate.
GATED = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")

#: Rows of the two steps of a tiny layer: NOTE [two ways, one result].
_STEPS = 5, 1


def use_output_gate(model: torch.nn.Module) -> int:
    """Let the gated layers of a model hand their gates to this attention. Return their number.

    A layer's result is then rounded once, behind the gate. Under any other attention
    implementation the layers compute what they did before.

    Raises ValueError if the model has no layer of `GATED` with head_dim 256, or if this release of
    transformers computes such a layer in another way; ImportError as `register` does.
    """
    check_version()
    layers = [
        layer
        for layer in model.modules()
        if type(layer).__name__ in GATED and getattr(layer, "head_dim", None) == HEAD_DIM
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no gated layer of head_dim {HEAD_DIM}; accepted: models "
            f"with layers of {', '.join(GATED)}"
        )
    for kind in {type(layer): layer for layer in layers}.values():
        _check_equal(kind)
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = hidden_states.shape[:-1]
    projected = self.q_proj(hidden_states).view(*shape, -1, 2 * self.head_dim)
    query, gate = projected.chunk(2, dim=-1)
    key = self.k_proj(hidden_states).view(*shape, -1, self.head_dim)
    value = self.v_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
    query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
    module = sys.modules[type(self).__module__]
    query, key = module.apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = _cached(self, key, value, options)
    eager = module.eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    is_ours = _is_ours(function)
    out, weights = function(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **options | ({OUT_GATE: gate} if is_ours else {}),
    )
    out = out.reshape(*shape, -1).contiguous()
    if not is_ours:
        out = out * torch.sigmoid(gate.reshape(*shape, -1))
    return self.o_proj(out), weights


def _is_ours(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return function in (attention, batched_attention)


@functools.cache
def _cache_name(forward: Callable[..., Any]) -> str:
    """Return the name by which a class's `forward` takes the cache: `cache` from transformers 5.24
    on."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def _cached(
    layer: Any, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add key and value to the layer's cache, if it has one, and return all keys and values."""
    name = _cache_name(type(layer).forward)
    cache = options.pop(name, None)
    if cache is None:
        return key, value
    # A cache of continuous batching writes the offsets of its sequences into options.
    more = {"kwargs": options} if name == "cache" else {}
    found: tuple[torch.Tensor, torch.Tensor] = cache.update(key, value, layer.layer_idx, **more)
    return found


def _check_equal(layer: torch.nn.Module) -> None:
    """Raise ValueError unless a tiny layer of this class has equal results both ways."""
    kind = type(layer)
    there, here = (list(_results(layer, replaced)) for replaced in (False, True))
    if not all(map(torch.equal, there, here)):
        import transformers

        raise ValueError(
            f"transformers {transformers.__version__} computes {kind.__name__} in another way than "
            "use_output_gate knows; accepted: leave its gates to the layers, without this call"
        )


def _results(layer: Any, replaced: bool) -> Iterator[torch.Tensor]:
    from transformers import DynamicCache

    config = copy.deepcopy(layer.config)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 8, 2, 1
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        tiny = type(layer)(config, 0).float().eval()
        forward: Callable[..., Any] = (
            functools.partial(_forward, tiny) if replaced else tiny.forward
        )
        cache, name = DynamicCache(), _cache_name(type(layer).forward)
        for rows in _STEPS:
            given = torch.randn(1, rows, 8), tuple(torch.randn(1, rows, HEAD_DIM) for _ in "cs")
            yield forward(*given, None)[0]
            yield forward(*given, None, **{name: cache})[0]
