"""Attention for SGLang: a backend that it selects by name, and the functions that its own calls.

SGLang loads `plugin.register` in each of its processes, which registers the name:

    python -m sglang.launch_server --model-path MODEL --attention-backend fa4_hd256

The functions replace those of SGLang's flash-attention backend, before models are loaded, for
models all of whose layers have head_dim 256:

    import sglang.srt.layers.attention.flashattention_backend as backend
    from fa4_hd256.integrations import sglang
    backend.flash_attn_with_kvcache = sglang.flash_attn_with_kvcache
    backend.flash_attn_varlen_func = sglang.flash_attn_varlen_func

Both are written for SGLang 0.5.23.
"""

from .functions import OPTIONS, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["OPTIONS", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
