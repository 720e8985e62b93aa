"""Attention at head_dim 256 for Blackwell (SM100), in CuTe DSL.

`flash_attn_func` is the operator, `ForwardConfig` its tuning parameters.
"""

from .config import ForwardConfig
from .interface import flash_attn_func

__all__ = ["ForwardConfig", "flash_attn_func"]
