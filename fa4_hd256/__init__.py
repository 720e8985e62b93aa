"""Attention at head_dim 256 for Blackwell (SM100) and Hopper (SM90), in CuTe DSL.

`flash_attn_func` and `flash_attn_varlen_func` are the operators, `flash_attn_with_kvcache` writes
new keys and values to a cache first, `ForwardConfig` and `BackwardConfig` hold their tuning
parameters on Blackwell. `warm_up` compiles what a model needs before its first call
(`AttentionModel`, `Mask`), `use_prebuilt` takes kernels that `python -m fa4_hd256 build` made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call.packed_ds import BackwardMetadata
    from .interface import flash_attn_func, flash_attn_varlen_func
    from .kernels.blackwell.backward.config import BackwardConfig
    from .kernels.blackwell.forward.config import ForwardConfig
    from .kv_cache import flash_attn_with_kvcache
    from .metadata import get_backward_metadata, get_scheduler_metadata
    from .models import AttentionModel, Mask
    from .run.ahead.needs import Needs
    from .run.ahead.prebuilt import use_prebuilt
    from .warm import warm_up

__version__ = "0.1.0"

__all__ = [
    "AttentionModel", "BackwardConfig", "BackwardMetadata", "ForwardConfig", "Mask", "Needs",
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_backward_metadata", "get_scheduler_metadata", "use_prebuilt", "warm_up",
]  # fmt: skip

# Loaded on first use: `bringup` also runs where CuTe DSL is not installed.
_HOMES = {
    "AttentionModel": "models",
    "Mask": "models",
    "Needs": "run.ahead.needs",
    "use_prebuilt": "run.ahead.prebuilt",
    "warm_up": "warm",
    "BackwardConfig": "kernels.blackwell.backward.config",
    "ForwardConfig": "kernels.blackwell.forward.config",
    "flash_attn_func": "interface",
    "flash_attn_varlen_func": "interface",
    "flash_attn_with_kvcache": "kv_cache",
    "BackwardMetadata": "call.packed_ds",
    "get_backward_metadata": "metadata",
    "get_scheduler_metadata": "metadata",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
