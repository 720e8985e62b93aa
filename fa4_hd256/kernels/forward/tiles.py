"""Facts of a forward kernel's tiles that the host must know, beside the kernel's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Query rows of a decode tile that are offered: N of both MMAs.
DECODE_ROWS = (16, 32, 64)


@dataclass(frozen=True)
class ForwardTiles:
    """Facts of a forward kernel's tiles that the host must know."""

    #: Query rows of one CTA.  The number of packed heads divides them unless the kernel `pads`.
    cta_rows: int
    #: Query rows of a cluster's tile.
    rows: int
    #: Keys of a step.
    keys: int
    #: CTAs of a cluster.
    cluster: int
    #: Seconds of a step, modelled or measured.
    step_seconds: float
    #: Steps that splitting the keys must save, about what the combining kernel takes.
    least_saved: float
    #: The most query rows for which the kernel is meant, of all heads that share KV tiles; None:
    #: any number.
    most_rows: int | None = None
    #: Time that a KV split takes beside its steps, in steps.
    part_steps: float = 1.0
    #: Bytes of K and V of a step, if no other tile reads them at the same time: HBM then bounds all
    #: clusters together.  0: tiles share them.
    step_bytes: int = 0
    #: The most KV splits of a call that requests no number.
    most_parts: int = 32
    #: Query heads of a group of any size share tiles: each query has rows of padding up to a power
    #: of two.
    pads: bool = False
    #: A block mask may name the steps.
    takes_lists: bool = False
    #: Time of one launch more, in steps, if the last wave of equal tiles may be a launch of its own
    #: (`call.division`); None: it may not.
    launch_steps: float | None = None
    #: Kind of the kernel: a key of `KernelSet.classes`.
    kind: str = "forward"
    #: Dtype of K and V, of `nvfp4_format.CACHE_DTYPES`; None: that of Q.
    kv_dtype: torch.dtype | None = None
    #: Dtype of Q, of `problem_class.KV_DTYPES`; None: that of out.
    q_dtype: torch.dtype | None = None
    #: The kernel gets memory for V^T, which a launch before it fills; for dense keys alone.
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
