"""vLLM's entry point, which each of its processes calls before it reads its options."""

from __future__ import annotations

import logging

__all__ = ["register"]

_BACKEND = f"{__package__}.backend.Backend"


def register() -> None:
    """Register the backend as CUSTOM: the one name that vLLM also knows in processes that it
    spawns. A backend that another plug-in has registered stays, and the log says so."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _BACKEND:
        logging.getLogger("fa4_hd256").warning(
            "vLLM's backend CUSTOM is %s; %s is not registered", custom.get_path(), _BACKEND
        )
        return
    register_backend(custom, _BACKEND)
