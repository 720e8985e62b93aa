"""cuDNN's own CuTe DSL kernels (FROST; PyPI: nvidia-cudnn-frontend): what they refuse, and how
they are called.

Through the classes of `cudnn.sdpa` that its graphs lower to, with the plan that these would choose.
An object of such a class belongs to shapes, strides and a mask, and is kept, as its users keep it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PACKAGE, NAME = "nvidia-cudnn-frontend", "FROST"

#: The versions whose private interface this file knows: the first is the one to install, rates were
#: published of the second.
KNOWN_VERSIONS = "1.32.0", "1.31.0"


def unavailable() -> str | None:
    """Return why it cannot be compiled here, None if it can."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}=={KNOWN_VERSIONS[0]}"
    if version not in KNOWN_VERSIONS:
        known = " and ".join(KNOWN_VERSIONS)
        return f"{PACKAGE} {version} is installed; known here are {known}"
    try:
        from cudnn.sdpa.fwd import api_dsl  # noqa: F401
    except ImportError as error:
        return f"{PACKAGE} {version} with its SDPA kernels cannot be imported: {error}"
    return None


def forward_refusal(packed: bool, softcap: bool, right: int | None) -> str | None:
    """Return why its forward is not called for a case, None if it is. right: the bound of a
    window."""
    if softcap:
        return "its kernels at head_dim 256 have no softcap"
    if packed:
        return "its packed sequences, a scheduler of their own, are not called here"
    if right is not None and right > 0:
        return "a right bound of a window other than the diagonal is not called here"
    return None


def backward_refusal(
    packed: bool, softcap: bool, bounds: tuple[int | None, int | None]
) -> str | None:
    """Return why its backward is not called for a case, None if it is. bounds: of a window."""
    if bounds[0] is not None:
        return "its backward with a left bound of a window is not called here"
    return forward_refusal(packed, softcap, bounds[1])


@dataclass
class _Compiled:
    """Objects of one of FROST's classes; compiled once for each mask, shape and stride."""

    compiled: dict[tuple, Any] = field(default_factory=dict)

    def run(
        self, kind: Callable[..., Any], tensors: Sequence[torch.Tensor], **options: Any
    ) -> None:
        """Run on tensors, the results among them. Raises RuntimeError for what the class does not
        support."""
        key = *options.items(), *((t.shape, t.stride(), t.dtype) for t in tensors)
        if key not in self.compiled:
            attention = kind(*tensors, **options)
            if not attention.check_support():
                raise RuntimeError(f"{NAME} does not support this call")
            attention.compile()
            self.compiled[key] = attention
        attention = self.compiled[key]
        nbytes = attention.scratch_workspace_bytes()
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=tensors[0].device)
        attention.execute(*tensors, workspace=workspace if nbytes else None)


class Forward(_Compiled):
    """FROST's forward."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool,
        left: int | None = None, num_splits: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return (out like q, LSE (batch, heads, seqlen_q) float32).

        q, k, v: (batch, seqlen, heads, 256). causal: bottom-right aligned. left: how many keys in
        front of the diagonal a query sees; None for all. num_splits: KV splits. Heads are packed as
        its heuristics would. Raises RuntimeError for what its classes do not support.
        """
        from cudnn.sdpa.fwd.api_dsl import SdpaFwdDslSm100

        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torch.empty_like(q)
        lse = torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
        self.run(
            SdpaFwdDslSm100, (q, k, v, out, lse), is_causal=causal,
            # At equal lengths both corners are the same, and its top-left kernel is the faster one.
            causal_bottom_right=causal and q.shape[2] != k.shape[2], window_size_left=left,
            split_kv=num_splits, pack_gqa=packs_heads(q.shape[2], q.shape[1], k.shape[1]),
            # KV splits are offered with the natural order alone.
            sched_policy=0 if num_splits > 1 else None,
        )  # fmt: skip
        return out.transpose(1, 2), lse[..., 0]


class Backward(_Compiled):
    """FROST's backward."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, dout: torch.Tensor, *, causal: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return dq, dk, dv like q, k, v. q, k, v, out, dout: (batch, seqlen, heads, 256). lse:
        (batch, heads, seqlen_q) float32, as `Forward` gives it. causal: bottom-right aligned.
        Raises RuntimeError as `Forward`."""
        from cudnn.sdpa.bwd.api_dsl_sm100_d256 import SdpaBwdDslSm100D256

        results = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        rows = [_transposed(t) for t in (q, k, v, out, dout)]
        statistics = lse.contiguous()[..., None]
        self.run(
            SdpaBwdDslSm100D256, (*rows, statistics, *(t.transpose(1, 2) for t in results)),
            is_causal=causal, causal_bottom_right=causal and q.shape[1] != k.shape[1],
        )  # fmt: skip
        return results


def _transposed(rows: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, seqlen, 256) of a tensor with the heads behind the rows, which lie in
    memory in that order: strides that a size of 1 leaves open are looked at, too."""
    return rows.contiguous().view(-1).view(rows.shape).transpose(1, 2)


#: Queries from which on heads are not packed (`_pack_gqa_wins`); rows of a CTA's tile.
_PACKED_BELOW, _TILE_ROWS = 256, 128


def packs_heads(seqlen_q: int, heads: int, heads_kv: int) -> bool:
    """Return True if the query heads of a KV head share tiles."""
    ratio = heads // heads_kv
    return ratio > 1 and seqlen_q < _PACKED_BELOW and _TILE_ROWS % ratio == 0


#: Columns of the tile of its decode kernel; launches that it takes the wide one for
#: (`d256_wide_decode_launch`): so many KV heads, and so many tiles of 128 keys in all of them.
_NARROW, _WIDE, _WIDE_HEADS, _WIDE_TILES = 16, 32, 8, 4096


def decode_columns(
    batch: int, lengths: tuple[int, int], heads: int, heads_kv: int, window: bool = False
) -> int:
    """Rows (queries times heads) of a tile of its decode kernel, of one CTA; 0 where the kernel for
    prompts serves the call (`decode_d256_q_tile`)."""
    ratio = heads // heads_kv if packs_heads(lengths[0], heads, heads_kv) else 1
    rows, groups = lengths[0] * ratio, batch * heads // ratio
    if rows <= _NARROW:
        return _NARROW
    large = groups >= _WIDE_HEADS and groups * -(-lengths[1] // 128) >= _WIDE_TILES
    return _WIDE if rows <= _WIDE and large and not window else 0


def chosen_splits(batch: int, lengths: tuple[int, int], heads: int, heads_kv: int, sms: int) -> int:
    """Parts of the keys that its heuristics choose on a GPU with so many SMs, without a window."""
    from cudnn.sdpa.fwd import heuristics

    seqlen_q, seqlen_k = lengths
    tiles = -(-seqlen_k // 128)
    ratio = heads // heads_kv if packs_heads(seqlen_q, heads, heads_kv) else 1
    serial = seqlen_q >= heuristics._SERIAL_COMBINE_MIN_SQ
    columns = decode_columns(batch, lengths, heads, heads_kv)
    if columns:
        found = heuristics.choose_decode_tile_split_kv(
            units=batch * heads // ratio, kv_tiles=tiles, sm_count=sms, q_tile=columns,
            serial_combine=serial, device_cc=(10, 0),
        )  # fmt: skip
    else:
        found = heuristics.choose_split_kv(
            q_tiles=-(-seqlen_q * ratio // 256), heads_q=heads // ratio, batch=batch,
            kv_tiles=tiles, sm_count=sms, combine_rows=seqlen_q * heads * batch, ctas_per_tile=2,
            serial_combine=serial,
        )  # fmt: skip
    return int(found)
