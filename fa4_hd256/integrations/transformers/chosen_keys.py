"""Keys that a layer's indexer chooses for each query, as in GLM-5 and Hy4 (sparse attention).

Such layers join the choice with the mask under transformers' own names "eager" and "sdpa" alone.
Under every other name they pass it beside the mask, as the option `INDICES`.
"""

from __future__ import annotations

import torch

from ...call.functions.until_changed import UntilChanged
from ...words import shown

#: Option of `attention`: (batch, seqlen_q, count) integers, the keys that each query may see.
INDICES = "indices"

#: Masks by indices, then by the mask of the pass: layers may share both.
_joined = UntilChanged()


def joined(indices: torch.Tensor, mask: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the mask without the keys that are not chosen, bool (batch, 1 or heads, seqlen_q,
    keys). mask: bool, (1 or batch, 1 or heads, seqlen_q, keys).

    Raises ValueError for indices of another kind or shape."""
    is_whole = isinstance(indices, torch.Tensor) and indices.dtype in (torch.int32, torch.int64)
    if not is_whole or indices.ndim != 3 or indices.shape[1] != mask.shape[2]:
        raise ValueError(
            f"{INDICES} is {shown(indices)}; accepted: (batch, {mask.shape[2]}, count) int32 or "
            "int64, the keys that each query may see"
        )

    def make() -> torch.Tensor:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=mask.device)
        return mask & chosen.scatter_(-1, indices.long(), True)[:, None]

    if torch.compiler.is_compiling():
        return make()
    of_indices: UntilChanged = _joined.made(indices, UntilChanged)
    made: torch.Tensor = of_indices.made(mask, make)
    return made
