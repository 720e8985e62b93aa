"""Attention of a rank's queries over the keys that it holds, part by part, and sums of the parts.

    q, out, dout  (batch, rows, heads, 256) bf16 or fp16
    k, v          (batch, rows, heads_kv, 256), likewise
    lse, dlse     (batch, heads, rows) float32

Sums of out are float32: (batch, rows, heads, 256).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...call.forward_problem import backward_use_clc
from ...call.operator_arguments import BackwardTensors
from ...call.options import ExactWindow, Options
from ...call.tile_mask import TileMask
from ...interface import flash_attn_func, flash_attn_varlen_func
from ...kernels.functions.kernel_functions import ScoreOrigin
from ...kernels.mask.block_mask import MASK_TILE
from ...kernels.mask.windows import Window
from ...mask_mods import MaskMod, part_tiles
from ...run.kept_tensors import made_to_keep
from ...score_mods import ScoreMod
from ..given_results import gradients_of_results
from .spans import PositionMask, SpanPart, Units

#: k and v of some rows.
KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Checked arguments of a call.

    options: softmax_scale, softcap, the window in the whole sequence. rows: of the whole sequence.
    documents: offsets of packed documents in it. block_mask: of the whole sequence, without bits
    beside a mask_mod. units: in which it is split. The others are as `flash_attn_func` takes them.
    """

    options: Options
    order: str
    rows: int
    documents: tuple[int, ...] | None = None
    config: Any = None
    backward_config: Any = None
    use_clc: bool | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    block_mask: TileMask | None = None
    units: Units | None = None

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for f in (self.score_mod, self.mask_mod) if f is not None for t in f.tensors)

    @property
    def mask(self) -> PositionMask:
        by_place = self.score_mod is not None
        return PositionMask(*self.options.window, self.documents, by_place, self.units)

    def arguments(self, window: Window) -> dict[str, Any]:
        return {
            "softmax_scale": self.options.softmax_scale,
            "window_size": ExactWindow(*window),
            "softcap": self.options.softcap,
            "config": self.config,
            "backward_config": self.backward_config,
            "use_clc": self.use_clc,
        }

    def functions_of(self, part: SpanPart, device: torch.device) -> dict[str, Any]:
        block_mask = None
        if self.block_mask is not None:
            heads = range(self.block_mask.tiles.shape[1])
            block_mask = self.block_mask.part(*part.positions, heads)
        return {
            "score_mod": self.score_mod_of(part, device),
            "block_mask": block_mask,
            "mask_mod": self.mask_mod_of(part, device),
        }

    def score_mod_of(self, part: SpanPart, device: torch.device) -> ScoreMod | None:
        if self.score_mod is None:
            return None
        return self.score_mod.in_part(_origins(part, self.documents or (0, self.rows), device))

    def mask_mod_of(self, part: SpanPart, device: torch.device) -> MaskMod | None:
        if self.mask_mod is None:
            return None
        assert self.block_mask is not None and self.units is not None
        place = _origins(part, (0, self.rows), device)
        # All parts of a call take the same form, and so the same kernel.
        if self.units.rows % MASK_TILE:
            place = part_tiles(place, self.block_mask.met(*part.positions))
        return self.mask_mod.in_part(place)


class LocalResults(NamedTuple):
    """A rank's queries, their results over all keys, and gradients of these; dlse: None if 0."""

    q: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None


class Attended:
    """Running out and lse of a rank's queries over the keys seen so far. The result of a part is
    merged when the next part begins: NOTE [room for a transfer] in `ring.py`."""

    def __init__(self, q: torch.Tensor) -> None:
        batch, rows, heads, _ = q.shape
        self.out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        self.lse = torch.full((batch, heads, rows), -math.inf, device=q.device)
        self._latest: tuple[torch.Tensor, torch.Tensor, slice] | None = None
        self._is_empty = True

    def add(
        self, q: torch.Tensor, held: KeysValues, parts: Sequence[SpanPart], settings: Settings
    ) -> None:
        for part in parts:
            self._merge()
            rows = slice(part.queries.start, part.queries.stop)
            self._latest = *_forward(q, held, part, settings), rows

    def _merge(self) -> None:
        if self._latest is None:
            return
        (part_out, part_lse, rows), self._latest = self._latest, None
        out, lse = self.out[:, rows], self.lse[..., rows]
        if self._is_empty:
            out.copy_(part_out)
            lse.copy_(part_lse)
            self._is_empty = False
            return
        total = torch.logaddexp(lse, part_lse)
        # Rows that have seen nothing yet may have -inf in both total and part_lse.
        share = torch.exp(part_lse - total).nan_to_num_(nan=0.0)
        out.lerp_(part_out.float(), share.transpose(1, 2).unsqueeze(-1))
        lse.copy_(total)

    def results(
        self, sink: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse). sink: a logit per head, or None."""
        self._merge()
        if sink is not None:
            self._add_sink(sink)
        return self.out.to(dtype), self.lse

    def _add_sink(self, sink: torch.Tensor) -> None:
        total = torch.logaddexp(self.lse, sink.float()[:, None])
        left = torch.exp(self.lse - total).nan_to_num_(nan=0.0)
        self.out *= left.transpose(1, 2).unsqueeze(-1)
        self.lse = total


def _forward(
    q: torch.Tensor, held: KeysValues, part: SpanPart, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = settings.arguments(part.window) | settings.functions_of(part, q.device)
    return attend(_operands((q,), held, part), part.documents, arguments)


def attend(
    tensors: Sequence[torch.Tensor], documents: tuple[int, ...] | None, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) by the public functions. tensors: q, k, v, with a batch of 1 where
    documents are packed in them. arguments: the other ones."""
    q, k, v = tensors
    if documents is None:
        out, lse = flash_attn_func(q, k, v, return_lse=True, **arguments)
        return out, lse
    q, k, v = (tensor.squeeze(0) for tensor in tensors)
    lengths = itertools.chain(*_lengths_of(documents, q.device))
    arguments = arguments | dict(zip(_LENGTHS, lengths, strict=True))
    out, lse = flash_attn_varlen_func(q, k, v, return_lse=True, **arguments)
    return out.unsqueeze(0), lse.unsqueeze(0)


#: Arguments of packed sequences, in the order of `_lengths_of`.
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _operands(
    of_queries: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor], part: SpanPart
) -> list[torch.Tensor]:
    rows, keys = (slice(side.start, side.stop) for side in (part.queries, part.keys))
    return [*(t[:, rows] for t in of_queries), *(t[:, keys] for t in of_keys)]


@functools.lru_cache(maxsize=256)
def _lengths_of(
    documents: tuple[int, ...] | None, device: torch.device
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return cu_seqlens and the longest sequence, each of q and of k, cached per device. All are
    None without documents."""
    if documents is None:
        return (None, None), (None, None)
    longest = max(end - begin for begin, end in zip(documents, documents[1:]))
    offsets = _kept(documents, device)
    return (offsets, offsets), (longest, longest)


@functools.lru_cache(maxsize=1024)
def _origins(part: SpanPart, documents: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the position of a part as `ScoreMod.in_part` takes it. documents: offsets in the whole
    sequence; a document's number stands in for the batch index."""
    assert part.first is not None
    first_query, first_key = part.first
    pieces = part.documents or (0, len(part.queries))
    origins = []
    for number, (begin, end) in enumerate(zip(pieces, pieces[1:])):
        query, key = first_query + begin, first_key + begin
        keys = end - begin if part.documents else len(part.keys)
        document = bisect.bisect_right(documents, query) - 1
        start, length = documents[document], documents[document + 1] - documents[document]
        origins.append(
            ScoreOrigin(
                document - number,
                0,
                query - start,
                key - start,
                length - (end - begin),
                length - keys,
            )
        )
    return _kept(origins if part.documents else origins[0], device)


def _kept(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return an int32 tensor that later calls may use, whatever mode they run in."""
    return made_to_keep(
        lambda: torch.tensor(numbers, dtype=torch.int32, device=device), torch.device(device)
    )


def add_gradients(
    of_rows: LocalResults,
    held: KeysValues,
    sums: tuple[torch.Tensor, torch.Tensor],
    parts: Sequence[SpanPart],
    settings: Settings,
) -> None:
    """Add a rank's gradients to `sums`: float32 dq, and dkv, (2, batch, rows, heads_kv, 256)."""
    q, out, dout, lse, dlse = of_rows
    dq, dkv = sums
    options, use_clc = settings.options, backward_use_clc(settings.use_clc)
    for part in parts:
        rows = slice(part.queries.start, part.queries.stop)
        keys = slice(part.keys.start, part.keys.stop)
        part_q, part_out, part_dout, part_k, part_v = _operands((q, out, dout), held, part)
        part_dlse = None if dlse is None else dlse[..., rows]
        offsets, longest = _lengths_of(part.documents, q.device)
        *gradients, _ = gradients_of_results(
            BackwardTensors(
                part_dout,
                part_dlse,
                part_q,
                part_k,
                part_v,
                part_out,
                lse[..., rows],
                cu_seqlens_q=offsets[0],
                cu_seqlens_k=offsets[1],
            ),
            Options(options.softmax_scale, part.window, options.softcap, use_clc),
            longest,
            backward_config=settings.backward_config,
            **settings.functions_of(part, q.device),
        )
        for total, gradient in zip((dq[:, rows], *dkv[:, :, keys]), gradients, strict=True):
            total += gradient


def sink_gradient(of_rows: LocalResults, sink: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sink from a rank's rows, (heads,) in the sink's dtype:

    -sum over rows of P_sink * (sum of dout * out - dlse), where P_sink = exp(sink - lse).
    """
    _, out, dout, lse, dlse = of_rows
    delta = (out.float() * dout.float()).sum(dim=-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sink.float()[:, None] - lse)
    return -(share * delta).sum(dim=(0, 2)).to(sink.dtype)
