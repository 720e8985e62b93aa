"""Keys and values in pages for tests: what no call may read is NaN, or numbers no page."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import cache_reference
import torch

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.check import reference

LSE_TOLERANCE = 1e-3
NO_PAGE = 1 << 30


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths, device="cpu"):
    return int32([0, *itertools.accumulate(lengths)], device)


def _room(layout, pages, page_size, heads, dtype):
    """Return (k, v), both (pages, page_size, heads, 256) of NaN."""
    if layout == "nhd":
        k, v = (torch.empty(pages, page_size, heads, 256) for _ in "kv")
    elif layout == "hnd":
        k, v = (torch.empty(pages, heads, page_size, 256).transpose(1, 2) for _ in "kv")
    elif layout == "pages of both":
        k, v = torch.empty(pages, 2, page_size, heads, 256).unbind(1)
    else:
        assert layout == "rows of both"
        k, v = torch.empty(pages, page_size, heads, 512).split(256, dim=3)
    storage = k.untyped_storage()
    k, v = (t.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (k, v))
    if v.untyped_storage().data_ptr() != storage.data_ptr():
        return tuple(t.to(dtype).fill_(torch.nan) for t in (k, v))
    whole = torch.full((storage.nbytes() // 4,), torch.nan, dtype=dtype)
    return tuple(whole.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (k, v))


@dataclass(frozen=True)
class Paged:
    """A cache in pages, in no order, of keys of several lengths.

    k, v: (pages, page_size, heads_kv, 256); table: a part of a wider one, whose entries past those
    in use number no page; lengths: in use.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths, page_size, heads=1, layout="nhd", device="cpu", dtype=torch.bfloat16):
        counts = [-(-length // page_size) for length in lengths]
        pages, most = sum(counts) + 3, max(*counts, 1) + 1
        k, v = _room(layout, pages, page_size, heads, dtype)
        table = torch.full((len(lengths), most + 3), NO_PAGE, dtype=torch.int32)[:, 2:-1]
        numbers = iter(torch.randperm(pages).tolist())
        for row, length in enumerate(lengths):
            for column in range(counts[row]):
                table[row, column] = number = next(numbers)
                rows = min(page_size, length - column * page_size)
                k[number, :rows] = torch.randn(rows, heads, 256).to(dtype)
                v[number, :rows] = torch.randn(rows, heads, 256).to(dtype)
        if device != "cpu":
            k, v, table = k.to(device), v.to(device), table.to(device)
        return cls(k, v, table, tuple(lengths))

    @property
    def used(self):
        return int32(self.lengths, self.k.device)

    def keys(self, row):
        """Return (1, length, heads_kv, 256) of a sequence: its keys, and its values."""
        return tuple(
            cache_reference.gathered(t, self.table[row], self.lengths[row])[None]
            for t in (self.k, self.v)
        )

    def padded(self):
        """k and v as (batch, pages * page_size, heads_kv, 256), rows not in use of 0."""
        rows = self.table.shape[1] * self.k.shape[1]
        found = tuple(
            t.new_zeros(len(self.lengths), rows, *t.shape[2:]).contiguous()
            for t in (self.k, self.v)
        )
        for row, length in enumerate(self.lengths):
            for tensor, keys in zip(found, self.keys(row), strict=True):
                tensor[row, :length] = keys[0]
        return found

    def copy(self):
        """One that `forget` leaves alone."""
        return Paged(self.k.clone(), self.v.clone(), self.table.clone(), self.lengths)

    def forget(self, row, first_key):
        """Pages wholly before a key are gone: NaN, and no longer in the table."""
        for column in range(first_key // self.k.shape[1]):
            number = int(self.table[row, column])
            self.k[number], self.v[number] = torch.nan, torch.nan
            self.table[row, column] = -1


def attend(q, paged, lengths_q=None, **options):
    """Return (out, lse) of the function; lengths_q: of packed queries (total, heads, 256)."""
    if lengths_q is not None:
        cu_seqlens_q = offsets(lengths_q, q.device)
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(*lengths_q, 1)}
    return flash_attn_varlen_func(
        q, paged.k, paged.v, seqused_k=paged.used, page_table=paged.table, return_lse=True,
        **options,
    )  # fmt: skip


#: Options of a call that the reference does not know.
NOT_OF_MATHS = ("num_splits", "batch_invariant", "use_clc", "config", "max_seqlen_k")


def queries(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape, 256).to(device, dtype)


def accurate(out, lse, tensors, **options):
    found = reference.compare(out, lse, tensors, **options)
    assert found.max_error <= found.tolerance, found
    assert found.lse_max_error <= LSE_TOLERANCE, found


def check(q, paged, lengths_q=None, before=None, **options):
    """The function against the reference of each sequence; (out, lse). before: the same cache with
    pages that `forget` has dropped."""
    out, lse = attend(q, paged, lengths_q, **options)
    wanted = {name: value for name, value in options.items() if name not in NOT_OF_MATHS}
    starts = [0, *itertools.accumulate(lengths_q or ())]
    for row in range(len(paged.lengths)):
        if lengths_q is None:
            of = q[row : row + 1], out[row : row + 1], lse[row : row + 1]
        else:
            rows = slice(starts[row], starts[row + 1])
            of = q[rows][None], out[rows][None], lse[:, rows][None]
        keys = (before or paged).keys(row)
        accurate(*of[1:], (of[0], *keys), **wanted)
    return out, lse
