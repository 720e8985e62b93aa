"""Positions of packed sequences in a pass whose mask is not that of packed sequences.

transformers looks at `position_ids` only without an attention_mask and without a cache, which
models make by default. In all other passes its masks let packed sequences see each other. Its flash
attention, to which layers pass the positions, too, keeps them apart.
"""

from __future__ import annotations

from typing import Any

import torch

from ...call.functions.until_changed import UntilChanged
from ...gpus.devices import is_captured
from .descriptions import KEY_END, KEY_START, Description

#: Whether positions decrease anywhere, by their tensor.
_checked = UntilChanged()

_RESTART = (
    "position_ids decrease, as those of packed sequences do, and the mask of the pass lets all "
    "sequences of a row see each other; accepted: use_cache=False and no attention_mask, by which "
    "transformers finds packed sequences; cu_seq_lens_q, cu_seq_lens_k, max_length_q and "
    "max_length_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True)); or an "
    "attention_mask of four dimensions"
)


def check(positions: Any, description: Description, lengths: tuple[int, int]) -> None:
    """Raise ValueError if positions of a pass without cached keys decrease.

    positions: (1 or batch, seqlen_q) integers; anything else is not looked at. description: of the
    layer's mask. lengths: seqlen_q, seqlen_k.

    The layers of a pass read positions once. Graphs, of torch.compile and of CUDA, end with a
    RuntimeError instead.
    """
    queries, keys = lengths
    is_known = isinstance(positions, torch.Tensor) and positions.ndim == 2
    if not is_known or queries != keys or queries == 1 or positions.shape[1] != queries:
        return
    if torch.compiler.is_compiling() or is_captured(positions.device):
        torch._assert_async(~_decrease(positions, description.ranges), _RESTART)
        return

    decrease: bool = _checked.made(positions, lambda: bool(_decrease(positions, None)))
    # Positions of padding may decrease.
    if decrease and _decrease(positions, description.ranges):
        raise ValueError(_RESTART)


def _decrease(positions: torch.Tensor, ranges: torch.Tensor | None) -> torch.Tensor:
    """Return a bool tensor: whether positions decrease between two rows in use."""
    steps = positions.diff(dim=1) < 0
    if ranges is not None:
        rows = torch.arange(1, positions.shape[1], device=positions.device)
        first, end = ranges[:, KEY_START, None], ranges[:, KEY_END, None]
        steps = steps & (rows > first) & (rows < end)
    return steps.any()
