"""Published rates of flash-attention's CuTe DSL kernels (flash-attn-4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.suite import BACKWARD
from lab.published.rows import (
    AS_PUBLISHED,
    FIT,
    FLASH_ATTENTION,
    NO_CLOCK,
    Build,
    Clock,
    Protocol,
    Published,
    series,
)

_PULLS = "github.com/Dao-AILab/flash-attention/pull"
_FORK = "github.com/Johnsonms/flash-attention"

# Commits of Dao-AILab/flash-attention. Its pyproject.toml requires nvidia-cutlass-dsl >= 4.4.2,
# which was the newest release until 2026-05-06 (4.5.0). PR 2454's branch (2026-04-05): its last
# commit, and the one before, which has no polynomial.
PR_2454_BASE = Build(FLASH_ATTENTION, "3c015f1a", "4.4.2")
PR_2454 = Build(FLASH_ATTENTION, "e122e67c", "4.4.2")
#: PR 2412 as it was merged (2026-04-23); PR 2487 leaves its forward as it is.
PR_2412 = Build(FLASH_ATTENTION, "27b4eb98", "4.4.2")
#: PR 2488 as it was merged (2026-04-27).
PR_2488 = Build(FLASH_ATTENTION, "6c73fb50", "4.4.2")
#: PR 2497 as it was merged (2026-05-01): the fork's d3747c0 and a fixed store past the end.
PR_2497 = Build(FLASH_ATTENTION, "956366b9", "4.4.2")
UNKNOWN_VERSION = Build(FLASH_ATTENTION, None)

#: Both said to be locked; rates at the two are nearly equal, and nobody logged a clock.
LOCKED_1755 = Clock(1.755, "locked, not logged")
LOCKED_1965 = Clock(1.965, "locked, not logged")
#: `benchmarks/benchmark_attn.py`: `do_bench` with 5 ms and 10 ms, a second's rest before it.
_DO_BENCH = Protocol("do_bench", 5, 10, milliseconds=True, cold=True)
_DO_BENCH_50 = replace(_DO_BENCH, timed=50)


def _rows(
    build: Build,
    causal: bool,
    heads: tuple[int, int],
    rates: Mapping[int, float],
    tokens: int,
    **origin: Any,
) -> Iterator[Published]:
    clock = origin.get("clock", NO_CLOCK)
    lab = f"{FLASH_ATTENTION} at {clock.ghz * 1e3:.0f} MHz" if clock.ghz else FLASH_ATTENTION
    origin = {"role": FIT, "protocol": _DO_BENCH, "lab": lab, **origin}
    yield from series(Published(build, "B200", causal, 1, 1, heads, 1.0, **origin), rates, tokens)


_2454 = {
    "source": f"{_PULLS}/2454, commit e122e67c",
    "clock": LOCKED_1965,
    "protocol": replace(_DO_BENCH, host_seconds=0.39e-3),
}


def _pr_2454() -> Iterator[Published]:
    """32768 tokens, nine runs. Calls of 1k, and of causal 2k, all take the host's 0.39 ms."""
    lengths = 1024, 2048, 4096, 8192, 16384, 32768, 65536, 98304, 131072
    tables = (
        (PR_2454_BASE, False, (585, 1258, 1438, 1525, 1575, 1602, 1419, 1448, 1372)),
        (PR_2454, False, (728, 1265, 1488, 1608, 1680, 1726, 1569, 1557, 1560)),
        (PR_2454_BASE, True, (347, 702, 1175, 1356, 1476, 1552, 1612, 1453, 1399)),
        (PR_2454, True, (343, 709, 1190, 1384, 1505, 1586, 1628, 1434, 1444)),
    )  # fmt: skip
    for build, causal, rates in tables:
        found = dict(zip(lengths, rates, strict=True))
        for row in _rows(build, causal, (8, 8), found, 1 << 15, **_2454):
            yield replace(row, host_bound=row.seqlen <= (2048 if causal else 1024))


_MAIN = {"source": f"{_FORK}, AI/HD256_PERSISTENT_CLUSTER_PR.md: main", "clock": LOCKED_1755}
_EPILOGUE = {"source": f"{_FORK}, agent_space/notes_hd256_fwd_tma_epilogue.md: baseline",
             "clock": LOCKED_1965, "role": AS_PUBLISHED}  # fmt: skip
#: The forward at head_dim 256. At 1755 MHz "main" is b21e2049; the batch is not said: 32768 tokens,
#: the script's default, by which rates drop behind as much load as in PR 2454's table. The baseline
#: at 1965 MHz (2026-04-28) is main before or after PR 2488.
_FORWARD_256 = (
    *_pr_2454(),
    *_rows(PR_2412, False, (32, 32), {1024: 985, 2048: 1307, 4096: 1474, 8192: 1582, 16384: 1641,
           32768: 1450, 65536: 1417, 131072: 1398}, 1 << 15, **_MAIN),
    *_rows(PR_2412, True, (32, 32), {1024: 592, 2048: 910, 4096: 1215, 8192: 1411, 16384: 1540,
           32768: 1552, 65536: 1486, 131072: 1363}, 1 << 15, **_MAIN),
    *_rows(PR_2412, False, (32, 2), {1024: 1012, 2048: 1329, 4096: 1496, 8192: 1601, 16384: 1620,
           32768: 1482, 65536: 1436, 131072: 1389}, 1 << 15, **_MAIN),
    *_rows(PR_2412, True, (32, 2), {1024: 600, 2048: 919, 4096: 1242, 8192: 1434, 16384: 1556,
           32768: 1624, 65536: 1493, 131072: 1373}, 1 << 15, **_MAIN),
    *_rows(UNKNOWN_VERSION, False, (8, 8), {1024: 941, 2048: 1277, 4096: 1457, 8192: 1568}, 1 << 15,
           **_EPILOGUE),
    *_rows(UNKNOWN_VERSION, True, (8, 8), {1024: 583, 2048: 894, 4096: 1176, 8192: 1361}, 1 << 15,
           **_EPILOGUE),
)  # fmt: skip


def _pr_2488() -> Iterator[Published]:
    """PR 2488's commit: per cent over main, whose rates are above, at 4k to 128k."""
    tables = (
        (False, (32, 32), (-0.2, 0.4, 0.7, 2.3, 5.4, 7.4)),
        (True, (32, 32), (0.3, 0.8, 0.8, 5.2, 1.1, 3.4)),
        (False, (32, 2), (0.7, 0.3, -1.0, -0.3, 5.2, 7.3)),
        (True, (32, 2), (0.9, 0.9, 1.1, -0.4, 1.1, 2.6)),
    )
    source = f"{_PULLS}/2488: its gains; {_MAIN['source']}"
    for causal, heads, gains in tables:
        rates = {row.seqlen: row for row in _FORWARD_256
                 if (row.build, row.causal, row.heads) == (PR_2412, causal, heads)}  # fmt: skip
        for number, gain in enumerate(gains):
            row = rates[4096 << number]
            tflops = row.tflops * (1 + gain / 100)
            yield replace(row, build=PR_2488, source=source, tflops=tflops)


FORWARD_256 = (*_FORWARD_256, *_pr_2488())
_BWD = {"source": f"{_FORK}, agent_space/ncu_hd256/BENCH_after.md: B", "direction": BACKWARD,
        "clock": LOCKED_1755, "protocol": _DO_BENCH_50}  # fmt: skip
#: The backward at head_dim 256 (2026-04-26), five products counted, seven done.
BACKWARD_256 = (
    *_rows(PR_2497, False, (32, 32), {4096: 850, 8192: 906, 16384: 932, 32768: 909, 65536: 905,
           131072: 906}, 1 << 17, **_BWD),
    *_rows(PR_2497, True, (32, 32), {4096: 657, 8192: 773, 16384: 851, 32768: 843, 65536: 845,
           131072: 859}, 1 << 17, **_BWD),
    *_rows(PR_2497, False, (32, 2), {4096: 903, 8192: 917, 16384: 915, 32768: 918, 65536: 910,
           131072: 913}, 1 << 17, **_BWD),
    *_rows(PR_2497, True, (32, 2), {4096: 742, 8192: 813, 16384: 805, 32768: 845, 65536: 854,
           131072: 852}, 1 << 17, **_BWD),
)  # fmt: skip
_128 = {"head_dim": 128, "role": AS_PUBLISHED}
_2280 = {"source": f"{_PULLS}/2280", **_128}
_2605 = {"source": f"{_PULLS}/2605, one listing", **_128}
_2605_OTHER = {"source": f"{_PULLS}/2605, another listing", **_128}
_PAPER = {"source": "arXiv 2603.05451: the highest of all shapes", **_128}
#: Head_dim 128. Two listings of PR 2605, which differ, count per cent of 2250 TFLOPS, the peak of a
#: B200; one that counts per cent of 2500 (1837 at 4x8192) is left out.
FORWARD_128 = (
    *_rows(UNKNOWN_VERSION, False, (16, 16), {8192: 1534.8}, 1 << 15, **_2280),
    *_rows(UNKNOWN_VERSION, True, (16, 16), {8192: 1418.1}, 1 << 15, **_2280),
    *_rows(UNKNOWN_VERSION, False, (16, 16), {1024: 975, 2048: 1131, 4096: 1256, 8192: 1289,
           16384: 1330}, 1 << 15, **_2605),
    *_rows(UNKNOWN_VERSION, True, (16, 16), {1024: 660, 2048: 899, 4096: 1062}, 1 << 15, **_2605),
    *_rows(UNKNOWN_VERSION, False, (16, 16), {1024: 1205, 2048: 1279, 4096: 1328, 8192: 1358,
           16384: 1362}, 1 << 15, **_2605_OTHER),
    *_rows(UNKNOWN_VERSION, True, (16, 16), {1024: 697, 2048: 927, 4096: 1090}, 1 << 15,
           **_2605_OTHER),
    *_rows(UNKNOWN_VERSION, False, (16, 16), {32768: 1613}, 1 << 15, **_PAPER),
)  # fmt: skip
