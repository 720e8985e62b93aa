"""vLLM's entry point, which each of its processes calls before it reads its options."""

from __future__ import annotations

import logging

from ...environment import replaces_flash_attn


def register() -> None:
    """Register CUSTOM, known in spawned processes, and with FA4_HD256_VLLM_FLASH_ATTN=1 FLASH_ATTN
    for head size 256; other plug-ins' stay, with a line in the log."""
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
