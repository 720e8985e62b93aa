"""vLLM's entry point, which each of its processes calls before it reads its options."""

from __future__ import annotations

import logging

from ...environment import replaces_flash_attn


def register() -> None:
    """Register the backend as CUSTOM: the one name that vLLM also knows in processes that it
    spawns. With FA4_HD256_VLLM_FLASH_ATTN=1 also register FLASH_ATTN, for head size 256. A backend
    that another plug-in has registered stays, and the log says so."""
    _register("CUSTOM", f"{__package__}.backend.Backend")
    if replaces_flash_attn():
        _register("FLASH_ATTN", f"{__package__}.flash_attn.FlashAttn")


def _register(name: str, path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member = AttentionBackendEnum[name]
    if member.is_overridden() and member.get_path() != path:
        logging.getLogger("fa4_hd256").warning(
            "vLLM's backend %s is %s; %s is not registered", name, member.get_path(), path
        )
        return
    register_backend(member, path)
