"""Attention over one long sequence on several GPUs: each rank has some rows of q, k and v.

    from fa4_hd256.integrations.context_parallel import ring_attention, shard, unshard
    q, k, v = (shard(tensor) for tensor in (q, k, v))     # or made where they are
    out = ring_attention(q, k, v, causal=True)

Three functions with the same arguments differ in what ranks exchange:

    ring_attention         keys and values, from rank to rank, while kernels run
    all_gather_attention   keys and values, all at once; for few key/value heads
    ulysses_attention      rows for heads: during attention each rank has some heads of all rows

All ranks of the group must call with the same sizes and options, in the same order. Either all of
them run the backward, or none.
"""

from .attention import all_gather_attention, ring_attention, ulysses_attention
from .shards import shard, unshard
from .spans import ORDERS

__all__ = [
    "ORDERS",
    "all_gather_attention",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
