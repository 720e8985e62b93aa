"""KV caches in NVFP4 for tests: what no call may read is NaN, or numbers no page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from paged_cases import Paged, int32

from fa4_hd256.quantize import dequantize_nvfp4, quantize_nvfp4

NAMES = "k_block_scale", "v_block_scale"
#: A block scale that is NaN, and codes that are no zeros.
NAN_SCALE, GARBAGE = 0x7F, 0xAB


@dataclass(frozen=True)
class Cache:
    """codes, block_scales: of K and of V. scales: global ones, one for each KV head."""

    codes: tuple[torch.Tensor, ...]
    block_scales: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, *values, device="cpu"):
        """Return the cache of K and V, (.., .., heads_kv, 256); rows with a NaN become garbage."""
        heads = values[0].shape[2]
        scales = tuple(0.002 + 0.01 * torch.rand(heads) for _ in values)
        codes, block_scales = zip(*map(quantize_nvfp4, values, scales))
        for value, code, block_scale in zip(values, codes, block_scales):
            unused = value.isnan().any(-1)
            code[unused] = GARBAGE
            block_scale.view(torch.uint8)[unused] = NAN_SCALE
        return cls(*(tuple(t.to(device) for t in both) for both in (codes, block_scales, scales)))

    def options(self, sequences):
        """Return the arguments of a call beside the codes."""
        of_sequences = (scale.expand(sequences, -1) for scale in self.scales)
        named = dict(zip(("k_descale", "v_descale"), of_sequences))
        return named | dict(zip(NAMES, self.block_scales))

    def values(self):
        """Return K and V in float64."""
        return tuple(
            dequantize_nvfp4(*of_one, torch.float64)
            for of_one in zip(self.codes, self.block_scales, self.scales)
        )

    def empty_like(self):
        """Return a cache of garbage of the same shape and scales."""
        codes = tuple(torch.full_like(t, GARBAGE) for t in self.codes)
        nan = (torch.full_like(t.view(torch.uint8), NAN_SCALE) for t in self.block_scales)
        return Cache(codes, tuple(t.view(torch.float8_e4m3fn) for t in nan), self.scales)


def dense(queries, keys, heads, batch=2, dtype=torch.bfloat16, device="cpu"):
    """Return (q, cache) of (query heads, KV heads)."""
    q = torch.randn(batch, queries, heads[0], 256).to(device, dtype)
    values = (torch.randn(batch, keys, heads[1], 256) for _ in "kv")
    return q, Cache.of(*values, device=device)


@dataclass(frozen=True)
class PagedCache:
    """paged: pages of K and V in bfloat16. cache: the same pages in NVFP4."""

    paged: Paged
    cache: Cache

    @classmethod
    def of(cls, lengths, page_size, heads, device="cpu"):
        paged = Paged.of(lengths, page_size, heads, device=device)
        values = (pages.cpu().float() for pages in (paged.k, paged.v))
        return cls(paged, Cache.of(*values, device=device))

    @property
    def options(self):
        lengths = int32(self.paged.lengths, self.paged.table.device)
        own = {"page_table": self.paged.table, "cache_seqlens": lengths}
        return self.cache.options(len(lengths)) | own

    def keys(self, row):
        """Return K and V of a sequence in float64, with a batch of 1."""
        length, size = self.paged.lengths[row], self.paged.k.shape[1]
        pages = self.paged.table[row, : -(-length // size)].long()
        return tuple(t[pages].flatten(0, 1)[None, :length] for t in self.cache.values())
