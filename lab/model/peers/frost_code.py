"""FROST's code, read: the order of its tiles, and the chunks of its backward."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from bench.peers.frost import PACKAGE

#: FROST's `L2_SIZE_MIB` of head_dim 256, and `_SCHED_L2_BUDGET_BYTES`: a KV head above it is left
#: out.
_L2_BYTES, _LARGEST_KV_HEAD = 60 << 20, 50 << 20
#: Bytes of a key and its value.
_KV_ROW = 2 * 2 * 256


def versions() -> tuple[str, ...]:
    """Return the versions that its compiled kernels depend on: its own, that of CuTe DSL."""
    return tuple(importlib.metadata.version(name) for name in (PACKAGE, "nvidia-cutlass-dsl"))


def forget_compiled() -> None:
    """Have what is called next recompiled: its own caches in a process do not tell apart GPUs that
    the simulator passes for one after the other."""
    from cudnn.frost import compiled_cache, template_loader

    compiled_cache.clear_memo()
    template_loader._MODULES.clear()


#: Memory that dS may take at a time (`_SM107_WS_BUDGET_BYTES`), and what lengths are padded to.
_DS_BYTES, QUERY_PAD, KEY_PAD = 8 << 30, 128, 256


def backward_chunks(
    batch: int, heads: int, heads_kv: int, lengths: tuple[int, int]
) -> tuple[int, int]:
    """Return (sequences, query heads) whose dS is in memory at a time, as `_sm107_chunks` decides.

    Both are divisors of what there is. As many sequences as fit with one group of query heads at
    least, then as many whole groups; where not even one group of one sequence fits, a part of it,
    at least a head.
    """
    group = heads // heads_kv
    each = 2 * -(-lengths[0] // QUERY_PAD) * QUERY_PAD * -(-lengths[1] // KEY_PAD) * KEY_PAD
    planes = _DS_BYTES // each
    whole = [
        (some, groups * group)
        for some in _divisors(batch) for groups in _divisors(heads_kv)
        if some * groups * group <= planes
    ]  # fmt: skip
    parts = [(1, part) for part in _divisors(group) if part <= planes]
    return max(whole or parts or [(1, 1)])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def forward_order(
    tiles: int, batch: int, heads: int, heads_kv: int, seqlen_k: int, by_length: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (tile, query head, batch) of its forward in the order in which clusters get them.

    tiles: of the queries of a head, 256 each. As the grid has them, tiles first; or by length (its
    causal calls without KV splits): the longest tiles first, where KV heads whose keys and values
    fit into the part of L2 that it counts on are interleaved (`lpt_l2_tile_coords`), and all heads
    if one KV head is too large (`lpt_tile_coords`).
    """
    ratio, groups = heads // heads_kv, heads_kv * batch
    kv_head = seqlen_k * _KV_ROW
    if not by_length:
        for index in range(tiles * heads * batch):
            yield index % tiles, index // tiles % heads, index // tiles // heads
        return
    if kv_head > _LARGEST_KV_HEAD:
        for index in range(tiles * heads * batch):
            rank, within = divmod(index, heads * batch)
            yield tiles - 1 - rank, within % heads, within // heads
        return
    most = min(max(_L2_BYTES // max(kv_head, 1), 1), groups)
    sections = -(-groups // most)
    active = -(-groups // sections)
    for first in range(0, groups, active):
        together = min(active, groups - first)
        for rank in range(tiles):
            for place in range(together * ratio):
                member, group = place // together, place % together + first
                head = group % heads_kv * ratio + member
                yield tiles - 1 - rank, head, group // heads_kv
