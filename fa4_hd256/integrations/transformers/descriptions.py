"""The tensor that the mask function passes to the attention function of every layer.

It describes which keys queries see, so that the layer's own settings are not needed. Models pass it
on like any mask of four dimensions. The window is coded in the shape, which the host reads without
waiting for the device:

    form       dtype   shape
    whole      uint16  (left, right, 1, 1)        every row is in use
    padded     uint64  (batch, left, 1, 5 + right)    columns `KEY_START` to `QUERIES`
    unbounded  uint64  (batch, keys, 1, 5)    the same without a window
    packed     uint32  (left, right, longest, sequences + 1)    offsets of the sequences
    uncounted  uint16  (batch, left, right, seqlen)    1 where a packed sequence begins

The last form has at least two rows. Graphs of torch.compile need it: they cannot count sequences.
left and right code the numbers of keys visible before and behind a query: 1 if unbounded, else the
number + 2. keys is the length of the mask that transformers requested. Dimensions but the batch and
the last one are expanded and take no memory. Users' masks do not have these dtypes.

NOTE [last queries].  Gemma 4 computes layers with shared keys for the last queries alone, and cuts
the third dimension of their masks to as many. So the first three forms have one entry there, and
`of_last_queries` follows the cut by the number of queries. Packed sequences cannot be cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...compat.windows import seen_in_window
from ...kernels.mask.windows import Window

#: Columns of the padded form: rows in use, and how many queries the mask was made for.
KEY_START, KEY_END, QUERY_START, QUERY_END, QUERIES = range(5)

_COLUMNS = QUERIES + 1

_WHOLE, _PADDED, _PACKED = torch.uint16, torch.uint64, torch.uint32


class Description(NamedTuple):
    """Mask that a tensor describes.

    window: keys visible on each side. ranges: (batch, 5) int64, rows in use and queries; None: all
    rows.
    offsets: (sequences + 1,) int32 of packed sequences, or None. longest: the longest sequence.
    begins: (batch, seqlen) bool, True where a packed sequence begins, or None. keys: the number of
    keys that the mask was made for, or None, if the description does not say it.
    """

    window: Window
    ranges: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    longest: int = 0
    begins: torch.Tensor | None = None
    keys: int | None = None


def whole(window: Window, device: torch.device | str) -> torch.Tensor:
    codes = _codes(window)
    return torch.zeros(1, 1, 1, 1, dtype=_WHOLE, device=device).expand(*codes, 1, 1)


def padded(window: Window, ranges: torch.Tensor) -> torch.Tensor:
    """Return the description of sequences with padding; ranges: (batch, 5) integers."""
    left, right = _codes(window)
    columns = torch.nn.functional.pad(ranges, (0, right)).to(_PADDED)
    return columns[:, None, None].expand(-1, left, 1, -1)


def unbounded(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the description of sequences with padding, without a window; ranges: (batch, 5)."""
    return ranges.to(_PADDED)[:, None, None].expand(-1, keys, 1, -1)


def packed(window: Window, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the description of packed sequences; offsets: (sequences + 1,) integers."""
    return offsets.to(_PACKED).expand(*_codes(window), longest, -1)


def offsets_of(begins: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (offsets int32, the longest sequence) of packed sequences; waits for the device.
    begins: (batch, seqlen) bool, True where a sequence begins."""
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat((starts, starts.new_tensor([begins.numel()]))).int()
    return offsets, int(offsets.diff().max())


def uncounted(window: Window, begins: torch.Tensor) -> torch.Tensor:
    """Return the description of packed sequences by their first rows; begins: (batch, seqlen)
    bool."""
    return begins.to(_WHOLE)[:, None, None].expand(-1, *_codes(window), -1)


def described(attention_mask: torch.Tensor) -> Description | None:
    """Return the mask that a tensor describes, None for a tensor of another form."""
    if attention_mask.ndim != 4:
        return None
    if attention_mask.dtype == _PACKED:
        codes, longest = attention_mask.shape[:2], attention_mask.shape[2]
        return Description(_window(*codes), None, attention_mask[0, 0, 0].int(), longest)
    _, first, second, last = attention_mask.shape
    if attention_mask.dtype == _PADDED and last >= _COLUMNS:
        ranges = attention_mask[:, 0, 0, :_COLUMNS].long()
        if last == _COLUMNS:
            return Description((None, None), ranges, keys=first)
        return Description(_window(first, last - _COLUMNS), ranges)
    if attention_mask.dtype != _WHOLE:
        return None
    if last == 1:
        return Description(_window(*attention_mask.shape[:2]))
    return Description(_window(first, second), begins=attention_mask[:, 0, 0].bool())


def of_last_queries(description: Description, queries: int) -> Description:
    """Return the description for the last queries of those that it was made for: NOTE [last
    queries]. queries: of the layer."""
    ranges = description.ranges
    if ranges is None:
        return description
    before = ranges[:, QUERIES:] - queries
    rows = (ranges[:, QUERY_START:] - before).clamp(min=0)
    return description._replace(ranges=torch.cat((ranges[:, :QUERY_START], rows), dim=1))


def seen_by(
    description: Description, q_shape: torch.Size, seqlen_k: int, device: torch.device | str
) -> torch.Tensor:
    """Return the mask, (1 or batch, 1, seqlen_q, seqlen_k) bool, aligned at the last rows in
    use."""
    window, ranges, offsets, _, begins, _ = description
    if offsets is not None:
        of_all = packed_seen(window, (offsets, offsets), (q_shape.numel(),) * 2)
        rows = of_all.view(q_shape[0], q_shape[1], *q_shape)
        return rows.diagonal(dim1=0, dim2=2).permute(2, 0, 1)[:, None]
    queries = torch.arange(q_shape[1], device=device)[:, None]
    keys = torch.arange(seqlen_k, device=device)
    if begins is not None:
        numbers = begins.cumsum(1)
        is_same = numbers[:, None, :, None] == numbers[:, None, None]
        return is_same & seen_in_window(keys - queries, window)
    if ranges is None:
        return seen_in_window(keys - queries - seqlen_k + q_shape[1], window)[None, None]
    first_key, end_key, first_query, end_query = (
        side[:, None, None, None] for side in ranges[:, :QUERIES].unbind(1)
    )
    is_in_use = (keys >= first_key) & (keys < end_key)
    is_in_use = is_in_use & (queries >= first_query) & (queries < end_query)
    return is_in_use & seen_in_window(keys - end_key - queries + end_query, window)


def packed_seen(
    window: Window, offsets: tuple[torch.Tensor, torch.Tensor], totals: tuple[int, int]
) -> torch.Tensor:
    """Return the mask of packed rows, (total_q, total_k) bool, aligned at sequences' ends."""
    numbers, from_end = [], []
    for side, total in zip(offsets, totals):
        rows = torch.arange(total, device=side.device)
        ends = side[1:].long().contiguous()
        number = torch.searchsorted(ends, rows, right=True)
        numbers.append(number)
        from_end.append(ends[number.clamp(max=ends.numel() - 1)] - rows)
    is_same = numbers[0][:, None] == numbers[1]
    is_used = numbers[1] < offsets[1].numel() - 1
    return is_same & is_used & seen_in_window(from_end[0][:, None] - from_end[1], window)


def _codes(window: Window) -> tuple[int, int]:
    left, right = (1 if side is None else side + 2 for side in window)
    return left, right


def _window(left: int, right: int) -> Window:
    return (None if left == 1 else left - 2), (None if right == 1 else right - 2)
