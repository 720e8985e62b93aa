"""Attention at head_dim 256 for Blackwell (SM100), in CuTe DSL.

`flash_attn_func` and `flash_attn_varlen_func` are the operators, `ForwardConfig` and
`BackwardConfig` hold their tuning parameters.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backward_config import BackwardConfig
    from .config import ForwardConfig
    from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["BackwardConfig", "ForwardConfig", "flash_attn_func", "flash_attn_varlen_func"]

# Loaded on first use: `bringup` also runs where CuTe DSL is not installed.
_HOMES = {"BackwardConfig": "backward_config", "ForwardConfig": "config",
          "flash_attn_func": "interface", "flash_attn_varlen_func": "interface"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
