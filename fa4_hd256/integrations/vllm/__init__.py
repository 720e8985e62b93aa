"""Attention for vLLM: a backend that vLLM selects, and the function that its own backend calls.

The backend needs nothing but its name, since vLLM loads `plugin.register` in each of its processes:

    vllm serve MODEL --attention-backend CUSTOM

The function replaces that of vLLM's flash-attention backend, before models are loaded, for models
all of whose layers have head_dim 256:

    import vllm.v1.attention.backends.flash_attn as backend
    from fa4_hd256.integrations.vllm import flash_attn_varlen_func
    backend.flash_attn_varlen_func = flash_attn_varlen_func

Both are written for vLLM 0.33.0.
"""

from .functions import OPTIONS, flash_attn_varlen_func, get_scheduler_metadata

__all__ = ["OPTIONS", "flash_attn_varlen_func", "get_scheduler_metadata"]
