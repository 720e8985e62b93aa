"""Rates that others have published, of kernels that can be compiled here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.suite import BACKWARD, FORWARD, Case

BUILT_FROM, VALIDATION, FITTED = "built from", "validation", "fitted"
CONSISTENCY = "consistency of the model"
_PR_2280 = "github.com/Dao-AILab/flash-attention/pull/2280"
_PR_2605 = "github.com/Dao-AILab/flash-attention/pull/2605"
_PAPER = "arXiv 2603.05451"
TILUS = "nvidia.github.io/tilus, tutorial on matmul for Blackwell: cuBLAS and its last version"
_REFERENCE = "no single one: published rates at head_dim 256"


@dataclass(frozen=True)
class Published:
    """A rate of flash-attn-4 on B200 as somebody published it, in TFLOPS.

    heads: of queries and of keys. clock_ghz: that the GPU was locked to, None if that is not said.
    """

    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    tflops: float
    source: str
    role: str = VALIDATION
    heads: tuple[int, int] = (16, 16)
    direction: str = FORWARD
    clock_ghz: float | None = None

    @property
    def case(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = "" if self.heads[0] == self.heads[1] else f", heads {self.heads[0]}/{self.heads[1]}"
        return f"attention {self.head_dim}, {mask}, {self.batch}x{self.seqlen}{heads}"

    @property
    def problem(self) -> Case:
        return Case("published", ((self.seqlen,) * 2,) * self.batch, *self.heads, self.causal)


def _series(
    causal: bool, heads: tuple[int, int], tokens: int, rates: dict[int, float], **origin: Any
) -> Iterator[Published]:
    """Rates at head_dim 256 by seqlen, with as many tokens in each batch."""
    for seqlen, rate in rates.items():
        yield Published(256, causal, tokens // seqlen, seqlen, rate, heads=heads, **origin)


#: 32k tokens in a batch of any length. Two listings of PR 2605, which differ, count per cent of
#: 2250 TFLOPS, a B200's peak; one that counts per cent of 2500 (1837 at 4x8192) is left out.
PUBLISHED = (
    Published(128, False, 4, 8192, 1534.8, _PR_2280),
    Published(128, True, 4, 8192, 1418.1, _PR_2280),
    *(Published(128, False, 32768 // s, s, rate, f"{_PR_2605}, one listing")
      for s, rate in ((1024, 975), (2048, 1131), (4096, 1256), (8192, 1289), (16384, 1330))),
    *(Published(128, True, 32768 // s, s, rate, f"{_PR_2605}, one listing")
      for s, rate in ((1024, 660), (2048, 899), (4096, 1062))),
    *(Published(128, False, 32768 // s, s, rate, f"{_PR_2605}, another listing")
      for s, rate in ((1024, 1205), (2048, 1279), (4096, 1328), (8192, 1358), (16384, 1362))),
    *(Published(128, True, 32768 // s, s, rate, f"{_PR_2605}, another listing")
      for s, rate in ((1024, 697), (2048, 927), (4096, 1090))),
    Published(128, False, 1, 32768, 1613, f"{_PAPER}: the highest of all shapes"),
    Published(256, False, 1, 32768, 1750, f"{_REFERENCE} end at 1.7 to 1.8 PFLOPS", FITTED, (8, 8)),
)  # fmt: skip
_CONTRIBUTOR = "github.com/Johnsonms/flash-attention"
_SLOW = {"source": f"{_CONTRIBUTOR}, AI/HD256_PERSISTENT_CLUSTER_PR.md: main", "clock_ghz": 1.755}
_FAST = {"source": f"{_CONTRIBUTOR}, agent_space/notes_hd256_fwd_tma_epilogue.md: baseline",
         "clock_ghz": 1.965}  # fmt: skip
#: The forward at head_dim 256, by one of its authors on B200s with locked clocks. At 1755 MHz the
#: batch is not said: 131072 tokens, as in the backward listing of the same machine.
PUBLISHED_256 = (
    *_series(False, (32, 32), 1 << 17, {1024: 985, 2048: 1307, 4096: 1474, 8192: 1582, 16384: 1641,
             32768: 1450, 65536: 1417, 131072: 1398}, **_SLOW),
    *_series(True, (32, 32), 1 << 17, {1024: 592, 2048: 910, 4096: 1215, 8192: 1411, 16384: 1540,
             32768: 1552, 65536: 1486, 131072: 1363}, **_SLOW),
    *_series(False, (32, 2), 1 << 17, {1024: 1012, 2048: 1329, 4096: 1496, 8192: 1601, 16384: 1620,
             32768: 1482, 65536: 1436, 131072: 1389}, **_SLOW),
    *_series(True, (32, 2), 1 << 17, {1024: 600, 2048: 919, 4096: 1242, 8192: 1434, 16384: 1556,
             32768: 1624, 65536: 1493, 131072: 1373}, **_SLOW),
    *_series(False, (8, 8), 1 << 15, {1024: 941, 2048: 1277, 4096: 1457, 8192: 1568}, **_FAST),
    *_series(True, (8, 8), 1 << 15, {1024: 583, 2048: 894, 4096: 1176, 8192: 1361}, **_FAST),
)  # fmt: skip
_BACKWARD = {"source": f"{_CONTRIBUTOR}, agent_space/ncu_hd256/BENCH_after.md: B",
             "direction": BACKWARD, "clock_ghz": 1.755}  # fmt: skip
#: The backward at head_dim 256 on the same machine, five products counted; its dK and dV leave by
#: TMA, as in the version known here.
PUBLISHED_BACKWARD = (
    *_series(False, (32, 32), 1 << 17, {4096: 850, 8192: 906, 16384: 932, 32768: 909, 65536: 905,
             131072: 906}, **_BACKWARD),
    *_series(True, (32, 32), 1 << 17, {4096: 657, 8192: 773, 16384: 851, 32768: 843, 65536: 845,
             131072: 859}, **_BACKWARD),
    *_series(False, (32, 2), 1 << 17, {4096: 903, 8192: 917, 16384: 915, 32768: 918, 65536: 910,
             131072: 913}, **_BACKWARD),
    *_series(True, (32, 2), 1 << 17, {4096: 742, 8192: 813, 16384: 805, 32768: 845, 65536: 854,
             131072: 852}, **_BACKWARD),
)  # fmt: skip
GEMM_PUBLISHED = {8192: 1610.0}
