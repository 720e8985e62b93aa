"""Attention at head_dim 256 for Blackwell (SM100), in CuTe DSL.

`flash_attn_func` and `flash_attn_varlen_func` are the operators, `ForwardConfig` and
`BackwardConfig` hold their tuning parameters.
"""

from .backward_config import BackwardConfig
from .config import ForwardConfig
from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["BackwardConfig", "ForwardConfig", "flash_attn_func", "flash_attn_varlen_func"]
