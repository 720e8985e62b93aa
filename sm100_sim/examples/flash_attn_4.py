"""flash-attn-4's forward and backward at one head_dim; a GPU script of a B200.

    SM100_SIM_SANITIZE=1 python -m sm100_sim examples/flash_attn_4.py 64|128|256

Full attention, bf16, batch 1, heads 2/1, 256 queries and keys. Needs flash-attn-4 (the extra
`test` of this package). Prints the errors against float64 beside PyTorch's in bf16.
"""

from __future__ import annotations

import sys

from attention import compare
from flash_attn.cute.interface import flash_attn_func


def attention(q, k, v):
    """Return out of flash-attn-4; (batch, seqlen, heads, head_dim) tensors."""
    found = flash_attn_func(q, k, v)
    return found[0] if isinstance(found, tuple) else found


if __name__ == "__main__":
    compare(attention, head_dim=int(sys.argv[1]))
