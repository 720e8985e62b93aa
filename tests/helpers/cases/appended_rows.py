"""The kernel that writes new rows to a cache, launched by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.run.append import add_append, append_class
from fa4_hd256.run.execute import execute
from fa4_hd256.run.plan import PlanBuilder

__all__ = ["AppendTensors", "run_append"]


class AppendTensors(NamedTuple):
    """Tensors that the kernel takes, None where not given; q with rotary_cos alone."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    q: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None


def run_append(
    tensors: AppendTensors, descale: str = "", interleaved: bool = True, ordered: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the rows; return the rows in use with them, and q, rotated."""
    device = tensors.k.device
    builder = PlanBuilder.for_tensors(device, AppendTensors._fields, tensors)
    own = append_class(builder.inputs, descale, interleaved, ordered)
    results = add_append(builder, builder.inputs, own, architecture_of(device))
    after, rotated = execute(builder.plan(*results), tensors)
    return after, rotated
