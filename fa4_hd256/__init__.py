"""Attention at head_dim 256 for Blackwell (SM100), in CuTe DSL.

`flash_attn_func` and `flash_attn_varlen_func` are the operators, `ForwardConfig` holds their tuning
parameters.
"""

from .config import ForwardConfig
from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["ForwardConfig", "flash_attn_func", "flash_attn_varlen_func"]
