"""Configuration of the decode kernel for K and V in e4m3: rows, stages, warps, and the plans.

NOTE [keys as M].  HBM gives an SM of an H200 18 to 23 bytes per clock: a step of 128 keys, 64 KiB
in e4m3, takes 2,840 to 3,600 clocks. Hopper's MMAs of e4m3 keep 13 bits of a sum and want V
transposed, so K and V become f16, which holds every e4m3 exactly.  What a step then takes:

    converted in shared memory, S = Q K^T   of the port 512 clocks to bring the bytes, 512 to read,
                                            1,024 to write, 2,048 for wgmma's operands: 4,096
    S^T = K Q^T, K and V^T in registers     512 to bring, 512 to read, and B of 16 rows: 16 bytes a
                                            clock of 32 MMAs of a warpgroup, 256: 1,280

So keys are M, and rows of Q are N: two warpgroups have 64 keys each of S^T, and 128 columns of the
head each of O^T = V^T P^T.  A needs no buffer beside that of the bytes, and what an MMA costs
follows the rows that there are.  Q is brought to [2^14, 2^15) by a power of two a row and rounded
to f16: an element as small as 2^-31 of its row's largest keeps all bits of a bf16.

NOTE [order of columns].  A sum may take its terms in any order: a thread reads 16 bytes of a row of
K at once, which are 4 elements each of 4 slices of QK, and Q lies in shared memory in that order
(`DecodeE4m3Kernel._store_row`).  Of V a thread reads the same 4 columns of its keys, two rows of
O^T of each half of a warpgroup's; pairs of keys, which a register of A holds, are brought together
by PRMT.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from ....schedulers.protocol import COUNTER_SMEM_BYTES
from ....softmax_emu.pattern import Ex2Pattern
from ...forward.tiles import ForwardTiles, check_decode, check_threshold
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...nvfp4_format import NVFP4_BLOCK
from ...plan.budgets import (
    SmemPlan,
    SmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
    common_regions,
)
from ...plan.edges import Edge, EdgeTable, Signal

BLOCK_KV = 128  # keys of a step, 64 a warpgroup
QK_PARTS = 4  # of the columns, by which K becomes f16 and is multiplied

CONSUMERS = tuple(range(8))  # warps of both warpgroups
OTHER_WARPS = (8, 9, 10, 11)
#: Log2 of P of a row's maximum that has just moved: small P then keep their bits down to 2^-20 of
#: it.
HEADROOM = 6.0

#: Costs by rows, for the number of splits: a step of one SM alone, and what a tile takes beside its
#: steps, in steps.  Modelled (lab/notes.md): a step of 64 rows was measured as 4,400 clocks, 16 %
#: more, and tiles of 32 and 64 rows took longer beside their steps, with Q read in 4 to 16
#: iterations. `LEAST_SAVED`: what combining takes, 4 us, in steps.
STEP_SECONDS = {16: 1.03e-6, 32: 1.32e-6, 64: 2.15e-6}
PART_STEPS = {16: 2.3, 32: 2.6, 64: 2.4}
LEAST_SAVED = 4.0


@dataclass(frozen=True)
class E4m3WarpPlan(WarpPlan):
    """Warp indices and register budgets of a CTA: two warpgroups multiply, the third one has the
    other roles.  gather: warps that gather rows of K and V where these lie in pages of any size,
    and none loads; None where TMA loads them."""

    consumers: tuple[int, ...] = CONSUMERS
    load: int | None = 8
    scheduler: int = 9
    queries: int = 10
    gather: tuple[int, ...] | None = None
    registers_consumers: int = 224
    registers_other: int = 56

    warpgroups = (
        ("the first 64 keys", "registers_consumers"),
        ("the other 64 keys", "registers_consumers"),
        ("the other roles", "registers_other"),
    )

    def gathering(self) -> E4m3WarpPlan:
        taken = self.scheduler, self.queries
        return replace(
            self, load=None, gather=tuple(warp for warp in OTHER_WARPS if warp not in taken)
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        roles = {} if self.load is None else {"load": self.load}
        roles |= {"scheduler": self.scheduler, "queries": self.queries}
        if self.gather is not None and not isinstance(self.gather, tuple):
            raise TypeError(f"gather is {self.gather!r}; accepted: a tuple of warps, or None")
        if (self.load is None) == (self.gather is None):
            raise ValueError(
                f"load is {self.load} and gather is {self.gather}; accepted: a warp that loads, or "
                "warps that gather, and None for the other"
            )
        if self.consumers != CONSUMERS:
            raise ValueError(
                f"consumers is {self.consumers}; accepted is {CONSUMERS}: each warp has 16 keys of "
                "a step"
            )
        if len(set(roles.values())) < len(roles) or not set(roles.values()) <= set(OTHER_WARPS):
            named = ", ".join(f"{role} {warp}" for role, warp in roles.items())
            raise ValueError(f"{named}; accepted is a warp of {OTHER_WARPS} for each")

    @property
    def scheduled_warps(self) -> int:
        return len(self.consumers) + 2 + len(self.gather or (self.load,))


@dataclass(frozen=True)
class E4m3Config:
    """Everything static about the decode kernel that a user or a tuner may set.

    rows: query rows of a tile, one of `DECODE_ROWS`: those of the heads that share keys, of a few
        queries.
    kv_stages: buffers of the ring that K and V tiles share.
    q_stages: Q buffers; with two, the next tile's Q is there while this tile is worked on.
    ex2_pattern: which score elements take the polynomial exp2; a thread's rows are fewer than a
        fragment has columns, so that a pattern which leaves the last fragment to the hardware
        leaves all.
    rescale_threshold: in log2 units; O is rescaled only when a row's maximum grew by so much less
        `HEADROOM`.
    nvfp4: K and V are in NVFP4 (`nvfp4_fragments`), and their scales are loaded beside them.
    """

    rows: int = 16
    kv_stages: int = 6
    q_stages: int = 2
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = 12.0
    warps: E4m3WarpPlan = field(default_factory=E4m3WarpPlan)
    nvfp4: bool = False

    block_kv = BLOCK_KV

    def __post_init__(self) -> None:
        check_fields(self)
        check_decode(self.rows, self.q_stages)
        if self.kv_stages < 2:
            raise ValueError(
                f"kv_stages is {self.kv_stages}; at least 2 are needed: V arrives while K is read"
            )
        check_threshold(self.rescale_threshold)
        check_budgets(self)

    def gathering(self) -> E4m3Config:
        return replace(self, warps=self.warps.gathering())

    @property
    def gathers(self) -> bool:
        return self.warps.gather is not None

    @property
    def tiles(self) -> ForwardTiles:
        return ForwardTiles(
            self.rows, self.rows, BLOCK_KV, 1, STEP_SECONDS[self.rows], LEAST_SAVED, self.rows,
            PART_STEPS[self.rows], step_bytes=2 * (self.tile_bytes + self.scale_bytes),
            most_parts=64, pads=True, kind="forward_decode_e4m3",
            kv_dtype=torch.uint8 if self.nvfp4 else torch.float8_e4m3fn,
        )  # fmt: skip

    @property
    def headroom(self) -> float:
        """Log2 of P of a maximum that has just moved."""
        return min(HEADROOM, self.rescale_threshold)

    @property
    def is_roomy(self) -> bool:
        """Return True if a thread has registers for all of K and V in f16 beside O and S."""
        return self.rows < 64

    @property
    def part_buffers(self) -> int:
        """Parts of K in f16 that a thread has at once."""
        return QK_PARTS if self.is_roomy else 2

    @property
    def kv_bytes(self) -> Any:
        """Bytes of an element of K or V."""
        return Fraction(1, 2) if self.nvfp4 else 1

    @property
    def value_parts(self) -> int:
        """Parts of V's keys: one becomes f16 while the one before is multiplied."""
        if not self.nvfp4:
            return 1
        return 2 if self.is_roomy else 4

    @property
    def tile_bytes(self) -> int:
        return int(BLOCK_KV * HEAD_DIM * self.kv_bytes)

    @property
    def scale_bytes(self) -> int:
        return BLOCK_KV * HEAD_DIM // NVFP4_BLOCK if self.nvfp4 else 0

    @property
    def q_bytes(self) -> int:
        return self.rows * HEAD_DIM * ELEMENT_BYTES

    @property
    def smem(self) -> SmemPlan:
        warps, rows = len(self.warps.consumers), self.rows
        of_rows, scales = rows * FLOAT_BYTES, list[SmemRegion]()
        if self.nvfp4:
            text = "scales of 128 keys of K or V"
            scales += [SmemRegion.operand("kv_scales", self.kv_stages, self.scale_bytes, text)]
        return SmemPlan(
            (
                SmemRegion.operand(
                    "kv", self.kv_stages, self.tile_bytes, "128 keys x 256 columns of K or V"
                ),
                *scales,
                SmemRegion.operand(
                    "q", self.q_stages, self.q_bytes, f"{rows} rows x 256, then in f16"
                ),
                SmemRegion(
                    "p", 1, rows * BLOCK_KV * ELEMENT_BYTES, 128, f"P^T, 128 keys x {rows} rows"
                ),
                SmemRegion("factors", self.q_stages, of_rows, 16, "of each row of Q"),
                SmemRegion("maxima", warps, of_rows, 16, "of each row, by warp"),
                SmemRegion("sums", warps, of_rows, 16, "of each row, by warp"),
                SmemRegion("offsets", 1, of_rows, 16, "of each row"),
                SmemRegion("inverses", 1, of_rows, 16, "1/sum of each row"),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        consumers, warps = len(self.warps.consumers), Signal.WARPS_CTA
        loaded, role, arriving = Signal.TMA_CTA, "load", 1
        tile_bytes = self.tile_bytes + self.scale_bytes
        if self.warps.gather is not None:
            loaded, role, arriving = Signal.COPIES_CTA, "gather", len(self.warps.gather)
            tile_bytes = 0
        return EdgeTable(
            (
                Edge("q_loaded", self.q_stages, Signal.TMA_CTA, "queries", 1, "consumers",
                     "Q in SMEM", transaction_bytes=self.q_bytes),
                Edge("q_free", self.q_stages, warps, "consumers", consumers, "queries",
                     "Q buffer: the tile's last MMA is done", True),
                Edge("kv_loaded", self.kv_stages, loaded, role, arriving, "consumers",
                     "a K or V tile in SMEM", transaction_bytes=tile_bytes),
                Edge("kv_free", self.kv_stages, warps, "consumers", consumers, role,
                     "its buffer: it is in registers", True),
            )
        )  # fmt: skip

    def score_elements(self, mmas: int) -> int:
        per_step = len(self.warps.consumers) * (HEAD_DIM // 16 + 2 * BLOCK_KV // 16)
        return mmas // per_step * self.rows * BLOCK_KV

    @property
    def title(self) -> str:
        return (
            f"decode: {self.rows} query rows x {BLOCK_KV} keys per CTA and step, "
            f"head_dim {HEAD_DIM}; K and V in {'NVFP4' if self.nvfp4 else 'e4m3'}; "
            f"{self.ex2_pattern}; rescale threshold 2^{self.rescale_threshold:g}"
        )


#: Configurations of 16, 32 and 64 rows: as many stages as fit.
DECODE_E4M3 = (
    E4m3Config(16),
    E4m3Config(32, kv_stages=5),
    E4m3Config(64, kv_stages=5, q_stages=1),
)
#: The same for NVFP4, whose tiles take half the room and their scales an eighth of that.
DECODE_NVFP4 = (
    E4m3Config(16, kv_stages=10, nvfp4=True),
    E4m3Config(32, kv_stages=10, nvfp4=True),
    E4m3Config(64, kv_stages=9, q_stages=1, nvfp4=True),
)
