"""Facts of a forward kernel's tiles that the host must know, beside the kernel's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Query rows of a decode tile that are offered: N of both MMAs.
DECODE_ROWS = (16, 32, 64)


@dataclass(frozen=True)
class ForwardTiles:
    """Facts of a forward kernel's tiles that the host must know.

    cta_rows: query rows of one CTA, which the number of packed heads divides unless it `pads`.
    rows: of a cluster's tile.  keys: of a step.  cluster: CTAs of a cluster.  step_seconds: of a
    step, modelled or measured.  least_saved: steps that splitting the keys must save, about what
    the combining kernel takes.  most_rows: the most query rows of a group of heads that share KV
    tiles for which the kernel is meant, None for any.  part_steps: what a KV split takes beside its
    steps, in steps.  step_bytes: of K and V of a step, where no other tile reads them at the same
    time: HBM then bounds all clusters together; 0 where tiles share them.  most_parts: the most KV
    splits where the call requests no number.  pads: query heads of any group share tiles, each
    query with rows of padding up to a power of two.  takes_lists: a block mask may name its steps.
    launch_steps: what one launch more takes, in steps, where the last wave of equal tiles may be
    one (`call.division`); None where it is not.  kind: of the kernel.  kv_dtype: of K and V, of
    `problem_class.KV_DTYPES`; None for that of Q.  q_dtype: of Q, of these, too; None for that of
    out.  takes_columns: the kernel gets memory for V^T, which a launch before it fills; for dense
    keys alone.
    """

    cta_rows: int
    rows: int
    keys: int
    cluster: int
    step_seconds: float
    least_saved: float
    most_rows: int | None = None
    part_steps: float = 1.0
    step_bytes: int = 0
    most_parts: int = 32
    pads: bool = False
    takes_lists: bool = False
    launch_steps: float | None = None
    kind: str = "forward"
    kv_dtype: torch.dtype | None = None
    q_dtype: torch.dtype | None = None
    takes_columns: bool = False


def check_decode(rows: int, q_stages: int) -> None:
    """Raise ValueError for rows, or buffers of Q, that a decode kernel does not offer."""
    if rows not in DECODE_ROWS:
        accepted = ", ".join(map(str, DECODE_ROWS))
        raise ValueError(f"rows is {rows}; accepted are {accepted}")
    if q_stages not in (1, 2):
        raise ValueError(f"q_stages is {q_stages}; accepted are 1 and 2")


def check_threshold(threshold: float, largest: int = 15, dtype: str = "float16") -> None:
    """Raise ValueError for a rescale threshold, in log2 units, with which P could overflow."""
    if not 0 <= threshold <= largest:
        raise ValueError(
            f"rescale_threshold is {threshold}; accepted are 0 to {largest} "
            f"(P reaches 2^threshold and must stay finite in {dtype})"
        )
