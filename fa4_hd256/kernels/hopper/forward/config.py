"""Configuration of the Hopper forward: tiles, stages, warps, and the plans that follow.

NOTE [decode].  Where all rows that share keys fit into one warpgroup, as those of a few queries and
all heads of their group do, one is all there is: half of the rows of two would be padding.  HBM
gives an SM 18 to 20 bytes per clock, so that the MMAs and the softmax of a step, one after the
other, take less than the loads of the next; its room goes to stages, so that these never wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ....schedulers.protocol import COUNTER_SMEM_BYTES
from ....softmax_emu.pattern import Ex2Pattern
from ...forward.tiles import ForwardTiles, check_threshold
from ...limits import ELEMENT_BYTES, HEAD_DIM, PAGE_MULTIPLE
from ...plan.budgets import (
    WARPS_PER_WARPGROUP,
    SmemPlan,
    SmemRegion,
    WarpPlan,
    check_budgets,
    check_fields,
    common_regions,
)
from ...plan.edges import Edge, EdgeTable, Signal

WARPGROUP_ROWS = 64  # query rows of a warpgroup
BLOCK_KV = 80  # keys of a step
SHORT_BLOCK_KV = 64  # of a short one
CTAS = 1  # of a cluster
#: Registers of a thread where warps gather rows: of those that multiply, and of the others.
GATHERING_CONSUMERS, GATHERING_OTHERS = 232, 40

#: Seconds of a key: 2 x 1280 clocks of the tensor core for 80 of them and two warpgroups, at 1.7
#: GHz; and for one warpgroup, 885 ns for 64 where memory does not bind (an H200, lab/notes.md).
SECONDS = 1.5e-6 / 80
DECODE_SECONDS = 0.885e-6 / 64
#: What splitting the keys must save, in keys, and what a KV split takes beside its steps: the same
#: time whatever the keys of a step.
LEAST_SAVED, BESIDE_STEPS = 5 * BLOCK_KV, BLOCK_KV


def check_stages(config: Any) -> None:
    for name in ("k_stages", "v_stages"):
        if getattr(config, name) < 2:
            raise ValueError(
                f"{name} is {getattr(config, name)}; at least 2 are needed: a tile is read while "
                "that of the next step arrives"
            )


def query_region(config: Any) -> SmemRegion:
    note = "64 rows x 256, of a warpgroup each"
    return SmemRegion.operand("q", config.warpgroups, config.q_bytes, note)


def query_edges(config: Any) -> tuple[Edge, Edge]:
    stages, warps = config.warpgroups, len(config.warps.consumers) // config.warpgroups
    return (
        Edge("q_loaded", stages, Signal.TMA_CTA, "load", 1, "consumers",
             "Q of a warpgroup in SMEM", transaction_bytes=config.q_bytes),
        Edge("q_free", stages, Signal.WARPS_CTA, "consumers", warps, "load",
             "Q of a warpgroup: its last QK is done", True),
    )  # fmt: skip


@dataclass(frozen=True)
class ForwardWarpPlan(WarpPlan):
    """Warp indices and register budgets of one CTA. One or two warpgroups work on 64 query rows
    each; of the last one warp loads. gather: warps that gather rows of K and V where these lie in
    pages of any size; None where TMA loads them."""

    consumers: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    load: int = 8
    scheduler: int = 9
    gather: tuple[int, ...] | None = None
    registers_consumers: int = 240
    registers_other: int = 24

    def gathering(self) -> ForwardWarpPlan:
        begin = len(self.consumers)
        others = range(begin, begin + WARPS_PER_WARPGROUP)
        return replace(
            self,
            gather=tuple(warp for warp in others if warp not in (self.load, self.scheduler)),
            registers_consumers=GATHERING_CONSUMERS,
            registers_other=GATHERING_OTHERS,
        )

    @property
    def consuming_warpgroups(self) -> int:
        return len(self.consumers) // WARPS_PER_WARPGROUP

    @property
    def warpgroups(self) -> tuple[tuple[str, str], ...]:
        names = ("the first 64 rows", "the other 64 rows")[: self.consuming_warpgroups]
        rows = tuple((name, "registers_consumers") for name in names)
        return (*rows, ("the other roles", "registers_other"))

    @property
    def scheduled_warps(self) -> int:
        """Warps of a CTA that run the tile loop under a dynamic scheduler."""
        return len(self.consumers) + 2 + len(self.gather or ())


@dataclass(frozen=True)
class ForwardConfig:
    """Everything static about the Hopper forward kernel that a user or a tuner may set.

    block_kv: keys of a step.  k_stages, v_stages: buffers of K and of V.
    ctas: of a cluster, 1 or 2; two work on neighbouring query tiles of a head, and each loads half
        of every K and V tile for both.
    ex2_pattern: which score elements take the polynomial exp2.  A thread's own columns of a row, a
        quarter of block_kv, are its only fragment, so that a pattern which leaves the last one to
        the hardware leaves all.
    rescale_threshold: in log2 units; O is rescaled only when the row maximum grew by more.
    skips: whether a warpgroup leaves out steps that its own rows do not see.
    """

    block_kv: int = BLOCK_KV
    k_stages: int = 2
    v_stages: int = 2
    ctas: int = CTAS
    ex2_pattern: Ex2Pattern = field(default_factory=Ex2Pattern)
    rescale_threshold: float = 8.0
    warps: ForwardWarpPlan = field(default_factory=ForwardWarpPlan)
    skips: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_kv % 16 or not 16 <= self.block_kv <= 128:
            raise ValueError(
                f"block_kv is {self.block_kv}; accepted are multiples of 16 from 16 to 128"
            )
        check_stages(self)
        if self.ctas not in (1, 2):
            raise ValueError(f"ctas is {self.ctas}; accepted are 1 and 2")
        check_threshold(self.rescale_threshold)
        check_budgets(self)

    def gathering(self) -> ForwardConfig:
        """Return the configuration with warps that gather rows of K and V. Raises ValueError where
        these cannot share the rows of a KV tile."""
        if self.block_kv != SHORT_BLOCK_KV or self.ctas != 1:
            raise ValueError(
                f"block_kv is {self.block_kv} and ctas {self.ctas} with a page_size that is no "
                f"multiple of {PAGE_MULTIPLE}; accepted with it: block_kv {SHORT_BLOCK_KV}, ctas 1"
            )
        return replace(self, warps=self.warps.gathering())

    @property
    def gathers(self) -> bool:
        return self.warps.gather is not None

    @property
    def tiles(self) -> ForwardTiles:
        keys = self.block_kv
        if self.warpgroups == 1:
            return ForwardTiles(
                WARPGROUP_ROWS,
                self.tile_q,
                keys,
                self.ctas,
                keys * DECODE_SECONDS,
                5,
                most_rows=WARPGROUP_ROWS,
                step_bytes=2 * self.kv_bytes,
                most_parts=64,
                pads=True,
            )
        return ForwardTiles(
            WARPGROUP_ROWS,
            self.tile_q,
            keys,
            self.ctas,
            keys * SECONDS,
            least_saved=LEAST_SAVED / keys,
            part_steps=BESIDE_STEPS / keys,
            takes_lists=self.ctas == 1 and keys == SHORT_BLOCK_KV,
        )

    @property
    def warpgroups(self) -> int:
        return self.warps.consuming_warpgroups

    @property
    def block_q(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def tile_q(self) -> int:
        return self.ctas * self.block_q

    def score_elements(self, mmas: int) -> int:
        per_step = WARPS_PER_WARPGROUP * (HEAD_DIM // 16 + self.block_kv // 16)
        return mmas // per_step * WARPGROUP_ROWS * self.block_kv

    @property
    def q_bytes(self) -> int:
        """Q of one warpgroup."""
        return WARPGROUP_ROWS * HEAD_DIM * ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        return self.block_kv * HEAD_DIM * ELEMENT_BYTES

    @property
    def smem(self) -> SmemPlan:
        block = self.block_kv
        return SmemPlan(
            (
                query_region(self),
                SmemRegion.operand("k", self.k_stages, self.kv_bytes, f"{block} keys x 256"),
                SmemRegion.operand("v", self.v_stages, self.kv_bytes, f"{block} keys x 256"),
                *common_regions(self.edges, COUNTER_SMEM_BYTES),
            )
        )

    @property
    def edges(self) -> EdgeTable:
        warps = len(self.warps.consumers)
        loaded, free, role, arriving = Signal.TMA_CTA, Signal.WARPS_CTA, "load", 1
        tile_bytes = self.kv_bytes
        if self.ctas > 1:
            loaded, free = Signal.TMA_BOTH, Signal.WARPS_BOTH
        elif self.warps.gather is not None:
            loaded, role, arriving = Signal.COPIES_CTA, "gather", len(self.warps.gather)
            tile_bytes = 0
        return EdgeTable(
            (
                *query_edges(self),
                Edge("k_loaded", self.k_stages, loaded, role, arriving, "consumers",
                     "K tile in SMEM", transaction_bytes=tile_bytes),
                Edge("k_free", self.k_stages, free, "consumers", warps, role,
                     "K buffer: QK is done", True),
                Edge("v_loaded", self.v_stages, loaded, role, arriving, "consumers",
                     "V tile in SMEM", transaction_bytes=tile_bytes),
                Edge("v_free", self.v_stages, free, "consumers", warps, role,
                     "V buffer: PV is done", True),
            )
        )  # fmt: skip

    @property
    def title(self) -> str:
        return (
            f"forward: {self.tile_q} query rows x {self.block_kv} keys per cluster of {self.ctas} "
            f"and step, head_dim {HEAD_DIM}; {self.ex2_pattern}; "
            f"rescale threshold 2^{self.rescale_threshold:g}"
        )


#: Configuration for steps of fewer keys, and for a block mask, whose tiles are of two steps each. A
#: third buffer of V fits beside these; one of K instead loses 1 % (lab/notes.md).
MASKED = ForwardConfig(block_kv=SHORT_BLOCK_KV, v_stages=3)

#: Configuration for a few rows against many keys, NOTE [decode].
DECODE = ForwardConfig(
    block_kv=64,
    k_stages=3,
    v_stages=3,
    ctas=1,
    skips=False,
    warps=ForwardWarpPlan(consumers=(0, 1, 2, 3), load=4, scheduler=5),
)
