"""Calls that tests on a real GPU share, and the comparison of their results bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call by its shapes. lengths: of the queries and of the keys, a pair for each sequence;
    is_packed: whether the sequences lie one behind the other, else they are a batch."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    causal: bool = True
    num_splits: int = 1
    is_packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    has_gradients: bool = True

    def tensors(self, device: Any, seed: int = 0) -> Results:
        """q, k, v and the gradients of out and lse, random, the same for a seed; for packed
        sequences the offsets as well."""
        made = torch.Generator().manual_seed(seed)
        batch = 1 if self.is_packed else len(self.lengths)
        rows = [sum(side) if self.is_packed else side[0] for side in zip(*self.lengths)]
        shapes = {"q": (rows[0], self.heads[0]), "k": (rows[1], self.heads[1])}
        shapes |= {"v": shapes["k"], "dout": shapes["q"]}
        found = {
            name: torch.randn(batch, *shape, 256, generator=made).to(device, self.dtype)
            for name, shape in shapes.items()
        }
        found["dlse"] = torch.randn(batch, self.heads[0], rows[0], generator=made).to(device)
        if self.is_packed:
            found = {name: tensor[0] for name, tensor in found.items()}
            for name, side in zip(("cu_q", "cu_k"), zip(*self.lengths)):
                ends = list(itertools.accumulate(side, initial=0))
                found[name] = torch.tensor(ends, dtype=torch.int32, device=device)
        return found

    def run(self, tensors: Results, use_clc: bool = False) -> Results:
        """ "out" and "lse", and where the case has gradients "dq", "dk", "dv"."""
        leaves = [tensors[name].detach() for name in "qkv"]
        if self.has_gradients:
            leaves = [leaf.requires_grad_() for leaf in leaves]
        options = {"causal": self.causal, "num_splits": self.num_splits, "use_clc": use_clc}
        if self.is_packed:
            longest = [max(side) for side in zip(*self.lengths)]
            out, lse = flash_attn_varlen_func(
                *leaves, cu_seqlens_q=tensors["cu_q"], cu_seqlens_k=tensors["cu_k"],
                max_seqlen_q=longest[0], max_seqlen_k=longest[1], return_lse=True, **options,
            )  # fmt: skip
        else:
            out, lse = flash_attn_func(*leaves, return_lse=True, **options)
        found = {"out": out.detach(), "lse": lse.detach()}
        if self.has_gradients:
            cotangents = tensors["dout"], tensors["dlse"]
            gradients = torch.autograd.grad((out, lse), leaves, cotangents)
            found |= dict(zip(("dq", "dk", "dv"), gradients))
        return found


#: Several tiles for each SM of an H200, the last ones not full; heads that share tiles; sequences
#: of many lengths, none among them; few queries with KV splits, as in decoding.
CASES = {
    "dense": Case(((1100, 1100),) * 4, (16, 16)),
    "grouped": Case(((1000, 1500),) * 4, (16, 4)),
    "packed": Case(
        ((700, 700), (1, 1), (0, 40), (1500, 1500), (129, 260), (64, 900)) * 3, (8, 8),
        is_packed=True,
    ),
    "split": Case(((4, 8200),) * 3, (16, 2), num_splits=8, has_gradients=False),
}  # fmt: skip
HALVES = {
    f"{name} float16": replace(CASES[name], dtype=torch.float16) for name in ("dense", "split")
}
ALL = CASES | HALVES


def differing(one: Results, other: Results) -> list[str]:
    """Names of results whose bits differ, NaN's and those of zero's sign among them."""
    assert one.keys() == other.keys()
    integers = {2: torch.int16, 4: torch.int32}
    return [
        name for name, tensor in one.items()
        if not torch.equal(*(t.contiguous().view(integers[t.element_size()])
                             for t in (tensor, other[name])))
    ]  # fmt: skip


def exact(case: Case, tensors: Results) -> Results:
    """out and gradients by PyTorch's own operations in float32, for a batch of equal lengths."""
    q, k, v = (tensors[name].float().transpose(1, 2).requires_grad_() for name in "qkv")
    group = case.heads[0] // case.heads[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ keys.transpose(2, 3) / 16
    if case.causal:
        rows, columns = scores.shape[2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(1 + columns - rows), -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values
    found = {"out": out.detach().transpose(1, 2), "lse": lse.detach()}
    if case.has_gradients:
        cotangents = tensors["dout"].float().transpose(1, 2), tensors["dlse"]
        gradients = torch.autograd.grad((out, lse), (q, k, v), cotangents)
        found |= {f"d{name}": g.transpose(1, 2) for name, g in zip("qkv", gradients)}
    return found


def dirty(device: Any) -> None:
    """Leave NaN in memory that the next call is likely to get."""
    torch.full((1 << 26,), torch.nan, device=device)
    for elements in (1 << 20, 1 << 16, 1 << 10):
        kept = [torch.full((elements,), torch.nan, device=device) for _ in range(8)]
        del kept
