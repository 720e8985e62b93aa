"""The configuration of the forward kernel for Q, K and V in e4m3 (`e4m3`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ...forward.tiles import ForwardTiles
from ...limits import FLOAT_BYTES
from ...plan.budgets import SmemPlan, SmemRegion
from .config import TILES, ForwardConfig, ForwardWarpPlan

#: P in e4m3 is 2^P_LOG2 times as large: NOTE [range of P] in `e4m3`.
P_LOG2 = 4.0

E4M3_TILES = replace(
    TILES,
    step_seconds=0.9e-6,
    kind="forward_e4m3",
    kv_dtype=torch.float8_e4m3fn,
    q_dtype=torch.float8_e4m3fn,
)

#: Two warpgroups of the softmax, each thread with half of the scores.
TWO_GROUPS = ForwardWarpPlan(
    softmax=tuple(range(8)),
    correction=(8, 9, 10, 11),
    mma=12,
    load=13,
    epilogue=14,
    scheduler=15,
    registers_softmax=144,
    registers_correction=112,
    registers_other=112,
)


@dataclass(frozen=True)
class E4m3ForwardConfig(ForwardConfig):
    """The configuration for Q, K and V in e4m3, whose softmax has two warpgroups (`two_groups`). K
    and V take half of the bytes, so that as many bytes are on their way as in 16 bits."""

    kv_stages: int = 6
    rescale_threshold: float = 4.0
    warps: ForwardWarpPlan = field(default_factory=lambda: TWO_GROUPS)

    is_e4m3 = True
    softmax_groups = 2
    largest_threshold = 4, "e4m3, times 2^4"
    o_columns = 8  # of 64, ptxas would keep a value of the tile loop on the stack

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ex2_pattern.ex2_emu_freq > self.fragment_columns:
            raise ValueError(
                f"ex2_pattern has ex2_emu_freq {self.ex2_pattern.ex2_emu_freq}; accepted in e4m3 "
                f"are 0 to {self.fragment_columns}, the columns of a fragment"
            )

    @property
    def tiles(self) -> ForwardTiles:
        return E4M3_TILES

    @property
    def smem(self) -> SmemPlan:
        note = "maximum, or at the end sum, of each row's keys of a warpgroup of the softmax"
        size = self.block_q * FLOAT_BYTES
        exchange = SmemRegion("exchange", self.softmax_groups, size, 16, note)
        q, kv, scale, *others = super().smem.regions
        return SmemPlan((q, kv, scale, exchange, *others))


#: The default configuration, but for its exp2 mix.
E4M3_CONFIG = E4m3ForwardConfig()
