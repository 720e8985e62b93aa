"""The public functions of flash-attention 2, 3 and 4, with their signatures, on this operator.

`flash_attn_4`, `flash_attn_3` and `flash_attn_2` are modules with the names, positional order,
defaults and results of `flash_attn.cute`, `flash_attn_interface` and `flash_attn`:

    from fa4_hd256.compat.flash_attn_4 import flash_attn_func

`arguments` lists what becomes of each argument (docs/api.md).
"""
