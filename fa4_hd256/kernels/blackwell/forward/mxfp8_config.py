"""The configuration of the forward kernel for Q, K and V in mxfp8 (`mxfp8`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...block_scales import SCALE_ALIGNMENT, SCALE_BYTES
from ...forward.tiles import ForwardTiles
from ...plan.budgets import SmemPlan, SmemRegion, TmemPlan, TmemRegion
from ...plan.edges import Edge, EdgeTable, Signal
from ..pair_plan import CTAS, with_scale_bytes
from .config import E4M3_TILES, E4m3ForwardConfig

#: Those of e4m3; blocks begin where a tensor does, so all tiles are of one launch.
MXFP8_TILES = replace(E4M3_TILES, kind="forward_mxfp8", launch_steps=None)

#: Columns of tensor memory that the scales of an operand take, as A or B of both MMAs, and where
#: they lie over S: behind P, whose own come with it.
SCALE_COLUMNS = {"q": (32, 8), "k": (40, 8), "p": (64, 4), "v": (72, 8)}


@dataclass(frozen=True)
class Mxfp8Config(E4m3ForwardConfig):
    """The configuration of e4m3 with buffers of scales, which take the place of one of K and V."""

    kv_stages: int = 5

    @property
    def tiles(self) -> ForwardTiles:
        return MXFP8_TILES

    @property
    def smem(self) -> SmemPlan:
        q, kv, *others = super().smem.regions
        of_k, of_v = "K: 128 keys, all of the pair's", "V: 256 columns, all of the pair's"
        scales = (
            ("q_scales", self.q_stages, "of the CTA's 128 rows"),
            ("kv_scales", self.kv_stages, f"{of_k}, or {of_v}"),
        )
        regions = (SmemRegion(n, k, SCALE_BYTES, SCALE_ALIGNMENT, note) for n, k, note in scales)
        return SmemPlan((q, kv, *regions, *others))

    @property
    def tmem(self) -> TmemPlan:
        regions = list(super().tmem.regions)
        for stage in range(self.s_stages):
            start = super().tmem[f"s{stage}"].start
            for operand, (first, count) in SCALE_COLUMNS.items():
                of = "of the other S's QK" if operand in "qk" else "of its PV"
                note = f"scales of {operand.upper()}, {of}, once S is in registers"
                name = f"{operand}_scales{stage}"
                regions.append(TmemRegion(name, start + first, count, f"s{stage}", note))
        return TmemPlan(tuple(regions))

    @property
    def edges(self) -> EdgeTable:
        softmax = len(self.warps.softmax)
        read = Edge("s_read", 1, Signal.WARPS_PAIR, "softmax", softmax, "mma",
                    "S in registers: scales may lie over it", True, polls=self.polls)  # fmt: skip
        return EdgeTable((*with_scale_bytes(super().edges, CTAS * SCALE_BYTES), read))

    @property
    def title(self) -> str:
        return super().title.replace("in e4m3", "in mxfp8")


MXFP8_CONFIG = Mxfp8Config()
