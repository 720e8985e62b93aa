"""vLLM's backend FLASH_ATTN, whose layers of head size 256 are ours.

vLLM selects a class for a name, and asks it for a builder and for a layer's implementation without
a word about shapes. So these are classes that make an object of ours or of vLLM's, by the head size
that they are made with.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from ...kernels.limits import HEAD_DIM
from .backend import Backend, Impl
from .metadata import Builder


def _is_ours(kv_cache_spec: Any) -> bool:
    if kv_cache_spec is not None:
        return getattr(kv_cache_spec, "head_size", None) == HEAD_DIM
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return False
    return bool(config.model_config.get_head_size() == HEAD_DIM)


class FlashAttn(FlashAttentionBackend):
    @classmethod
    def validate_configuration(cls, head_size: int, **facts: Any) -> list[str]:
        if head_size == HEAD_DIM:
            return Backend.validate_configuration(head_size, **facts)
        return super().validate_configuration(head_size, **facts)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        of = Backend if _is_ours(kv_cache_spec) else FlashAttentionBackend
        return of.get_supported_kernel_block_sizes(kv_cache_spec)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        of = Backend if _is_ours(None) else FlashAttentionBackend
        return of.get_preferred_block_size(default_block_size)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return _Impl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return _Builder


class _Impl(FlashAttentionImpl):
    def __new__(cls, num_heads: int, head_size: int, *args: Any, **options: Any) -> Any:
        of = Impl if head_size == HEAD_DIM else FlashAttentionImpl
        return of(num_heads, head_size, *args, **options)


class _Builder(FlashAttentionMetadataBuilder):
    def __new__(cls, kv_cache_spec: Any, *args: Any, **options: Any) -> Any:
        of = Builder if _is_ours(kv_cache_spec) else FlashAttentionMetadataBuilder
        return of(kv_cache_spec, *args, **options)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        of = Builder if _is_ours(kv_cache_spec) else FlashAttentionMetadataBuilder
        return of.get_cudagraph_support(vllm_config, kv_cache_spec)
