"""Rates that NVIDIA published of cuDNN, of the CuTe DSL kernels of its frontend and of others.

github.com/NVIDIA/cudnn-frontend, benchmark/: head_dim 256, heads 32/2, one sequence, causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.suite import BACKWARD, FORWARD

from .rows import (
    AS_PUBLISHED,
    CUDNN,
    FIT,
    FLASH_ATTENTION,
    FROST,
    TEST,
    Build,
    Clock,
    Protocol,
    Published,
    series,
)  # fmt: skip

#: The frontend's CuTe DSL kernels and their plan. Its package asks for nvidia-cutlass-dsl >= 4.6.2;
#: the newest release on 2026-09-28 was 4.8.0, on 2026-09-18 4.7.1.
_PLAN = (("TILE_CGA_M", 2), ("TILE_M", 128), ("TILE_N", 128), ("SCHED_POLICY", 2), ("PACK_GQA", 0),
         ("SPLIT_KV", 1))  # fmt: skip
FROST_1_31 = Build(FROST, "1.31.0", "4.8.0", _PLAN)
#: A development tree of 2026-09-18, between 1.30 and 1.31.
FROST_SEPTEMBER = Build(FROST, "1.31.0", "4.7.1", _PLAN)
CUDNN_9_27 = Build(CUDNN, "9.27.0")
FLASH_ATTENTION_UNKNOWN = Build(FLASH_ATTENTION, None)

_RESULTS = "github.com/NVIDIA/cudnn-frontend, benchmark"
_LENGTHS = 2048, 4096, 8192, 16384, 32768
#: `benchmark_single_sdpa.py`: device time by CUPTI, the median of ten, L2 flushed before each.
_TEN = Protocol("CUPTI", 0, 10, cold=True)
_TWENTY = Protocol("CUPTI", 0, 20, cold=True)
#: By the table's peak of bf16, which is computed from the highest clock sampled meanwhile.
SAMPLED = {
    "GB200": Clock(2.062, "highest sample"),
    "GB300": Clock(2.070, "highest sample"),
    "H200": Clock(1.980, "highest sample"),
}


def _training(
    build: Build,
    gpu: str,
    rates: tuple[float, ...],
    direction: str = FORWARD,
    role: str = AS_PUBLISHED,
) -> Iterator[Published]:
    source = f"{_RESULTS}/attention_training/results/qwen35, 2026-09-28"
    first = Published(
        build, gpu, True, 1, 1, (32, 2), 1.0, source, role, direction, SAMPLED[gpu], _TEN
    )  # fmt: skip
    yield from series(first, dict(zip(_LENGTHS, rates, strict=True)))


TRAINING = (
    *_training(CUDNN_9_27, "GB200", (1174, 1481, 1745, 1900, 1838)),
    *_training(FROST_1_31, "GB200", (992, 1385, 1689, 1888, 1757), role=FIT),
    *_training(FLASH_ATTENTION_UNKNOWN, "GB200", (786, 1160, 1485, 1715, 1685)),
    *_training(CUDNN_9_27, "GB200", (623, 857, 1043, 1132, 1045), BACKWARD),
    *_training(FLASH_ATTENTION_UNKNOWN, "GB200", (308, 575, 941, 944, 939), BACKWARD),
    *_training(CUDNN_9_27, "GB300", (1350, 1786, 1986, 2057, 2115)),
    *_training(FROST_1_31, "GB300", (1205, 1663, 1927, 2052, 2095), role=FIT),
    *_training(FLASH_ATTENTION_UNKNOWN, "GB300", (867, 1314, 1648, 1852, 1926)),
    *_training(CUDNN_9_27, "GB300", (669, 931, 1106, 1190, 1164), BACKWARD),
    *_training(FLASH_ATTENTION_UNKNOWN, "GB300", (321, 599, 1005, 1119, 1101), BACKWARD),
    *_training(CUDNN_9_27, "H200", (482, 615, 689, 727, 678)),
    *_training(FLASH_ATTENTION_UNKNOWN, "H200", (617, 731, 791, 810, 751)),
    *_training(CUDNN_9_27, "H200", (277, 354, 393, 365, 358), BACKWARD),
    *_training(FLASH_ATTENTION_UNKNOWN, "H200", (280, 336, 369, 385, 378), BACKWARD),
)


def _timed(
    first: Published, shapes: dict[tuple[int, int, int | None], float]
) -> Iterator[Published]:
    """Rows by their times in ms. shapes: (batch, queries, keys if others)."""
    for (batch, seqlen, keys), milliseconds in shapes.items():
        row = replace(first, batch=batch, seqlen=seqlen, keys=keys)
        yield replace(row, tflops=row.seconds / (milliseconds * 1e-3))


def _inference(build: Build, role: str = AS_PUBLISHED, **options: Any) -> Published:
    """A row of 1 TFLOPS on a B200, to be replaced."""
    source = f"{_RESULTS}/attention_inference/results/qwen35/b200, 2026-09-18"
    return Published(
        build, "B200", True, 1, 1, (32, 2), 1.0, source, role, protocol=_TWENTY, **options
    )  # fmt: skip


#: Whole prompts, chunks of a prompt (bottom-right), and decoding from 131072 keys in pages of 16.
INFERENCE = (
    *_timed(_inference(CUDNN_9_27), {(1, 2048, None): 0.05616, (1, 8192, None): 0.664633,
            (1, 32768, None): 10.367662, (1, 512, 65536): 0.66073, (1, 512, 131072): 1.33228,
            (1, 1024, 65536): 1.34755, (1, 1024, 131072): 2.694231, (1, 1, 131072): 0.081631,
            (128, 1, 131072): 8.906546, (1, 4, 131072): 6.804887, (128, 4, 131072): 202.200735}),
    *_timed(_inference(FROST_SEPTEMBER, FIT), {(1, 8192, None): 0.697024}),
    *_timed(_inference(FROST_SEPTEMBER, TEST), {(1, 2048, None): 0.070176,
            (1, 32768, None): 10.296361}),
)  # fmt: skip
#: One call of the bf16 backward of three launches, S = 8192.
FROST_BACKWARD = (
    *_timed(replace(_inference(FROST_SEPTEMBER, TEST), direction=BACKWARD, causal=False,
                    source="cudnn-frontend's bf16 backward at head_dim 256, B200"),
            {(1, 8192, None): 5.673}),
    *_timed(replace(_inference(FROST_SEPTEMBER, TEST), direction=BACKWARD,
                    source="cudnn-frontend's bf16 backward at head_dim 256, B200"),
            {(1, 8192, None): 3.256}),
)  # fmt: skip
