"""Rates that NVIDIA published of cuDNN, of the CuTe DSL kernels of its frontend and of others.

github.com/NVIDIA/cudnn-frontend, benchmark/: head_dim 256, one sequence, causal, clocks not locked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bench.suite import BACKWARD, FORWARD
from lab.published.rows import (
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
    half_of,
    series,
)

#: Options of the frontend's CuTe DSL kernels in every row here; SCHED_POLICY and SPLIT_KV differ.
_PLAN = (("TILE_CGA_M", 2), ("TILE_M", 128), ("TILE_N", 128), ("PACK_GQA", 0))
#: Its package requires nvidia-cutlass-dsl >= 4.6.2; the newest release on 2026-09-28 was 4.8.0.
FROST_1_31 = Build(FROST, "1.31.0", "4.8.0", (*_PLAN, ("SCHED_POLICY", 2), ("SPLIT_KV", 1)))
#: On 2026-09-18 a tree between 1.30 and 1.31, with 4.7.1 the newest release.
FROST_SEPTEMBER = replace(FROST_1_31, cutlass_dsl="4.7.1")
CUDNN_9_27 = Build(CUDNN, "9.27.0")
CUDNN_9_26 = Build(CUDNN, "9.26.0")
FLASH_ATTENTION_UNKNOWN = Build(FLASH_ATTENTION, None)

LAB = "NVIDIA"
_REPOSITORY = "github.com/NVIDIA/cudnn-frontend"
_RESULTS = f"{_REPOSITORY}, benchmark"
#: `benchmark_single_sdpa.py`: CUPTI's device time of one call at a time, L2 flushed and tensors
#: made again before it; the median of the last five of ten.
TRAINING_PROTOCOL = Protocol("CUPTI, one call at a time", 0, 1, cold=True)
#: `benchmark_single_attention.py`: events around a call.
INFERENCE_PROTOCOL = Protocol("events", 5, 20)
#: Clocks by the table's peak of bf16, which is computed from the highest clock sampled meanwhile.
SAMPLED = {
    "GB200": Clock(2.062, "highest sample"),
    "GB300": Clock(2.070, "highest sample"),
    "H200": Clock(1.980, "highest sample"),
}


def _training(
    build: Build, gpu: str, rates: Sequence[float], direction: str = FORWARD,
    role: str = AS_PUBLISHED,
) -> Iterator[Published]:  # fmt: skip
    source = f"{_RESULTS}/attention_training/results/qwen35, 2026-09-28"
    first = Published(
        build, gpu, True, 1, 1, (32, 2), 1.0, source, role, direction, SAMPLED[gpu],
        TRAINING_PROTOCOL, lab=LAB,
    )  # fmt: skip
    yield from series(first, {2048 << n: rate for n, rate in enumerate(rates)})


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

#: (queries, keys) of a sequence: whole prompts, and chunks of a prompt whose mask is bottom-right.
_PROMPTS = ((2048, 2048), (8192, 8192), (32768, 32768))
_CHUNKS = ((512, 65536), (512, 131072), (1024, 65536), (1024, 131072))
_HEADS = ((32, 2), (16, 1), (8, 1), (4, 1))
#: Heads of a row, and of each of the prompts and chunks its time in us. On GPUs of 64 to 76 CTA
#: pairs the chunks of 32/2 and 16/1 are one tile per pair, 512 or 1024 steps, or fewer pairs.
_CUDNN_TIMES = {
    "B200": (
        (56.160, 664.633, 10367.662, 660.730, 1332.280, 1347.550, 2694.231),
        (32.192, 321.243, 5099.996, 583.965, 1157.100, 653.026, 1319.669),
        (27.936, 158.973, 2560.864, 582.556, 1154.427, 583.826, 1157.304),
        (26.208, 85.024, 1272.762, 581.602, 1154.427, 582.175, 1154.420),
    ),
    "GB200": (
        (59.809, 638.362, 10037.202, 631.216, 1224.706, 1241.676, 2459.044),
        (31.583, 329.440, 4626.971, 556.728, 1097.944, 629.041, 1221.931),
        (27.072, 177.186, 2311.640, 554.681, 1097.581, 556.001, 1098.123),
        (25.343, 97.950, 1185.433, 554.094, 1096.075, 554.548, 1096.811),
    ),
    "GB300": (
        (50.686, 541.079, 8186.879, 557.827, 1102.694, 1125.334, 2241.823),
        (29.088, 272.737, 4058.152, 549.237, 1087.974, 555.330, 1100.124),
        (25.728, 143.105, 2028.875, 547.977, 1086.703, 549.226, 1088.784),
        (24.287, 78.114, 1026.909, 547.491, 1086.065, 548.272, 1086.460),
    ),
}
_FROST_TIMES = {
    "B200": (
        (70.176, 697.024, 10296.361, 652.704, 1318.887, 1335.263, 2769.491),
        (45.024, 342.302, 5106.611, 354.112, 685.790, 648.665, 1303.752),
        (30.176, 172.031, 2553.562, 194.848, 357.118, 354.555, 688.412),
        (48.546, 120.613, 1279.583, 115.903, 194.789, 192.994, 356.667),
    ),
    "GB200": (
        (69.728, 662.767, 9601.200, 625.666, 1215.367, 1243.789, 2512.644),
        (44.159, 343.895, 4549.017, 362.005, 661.450, 619.337, 1205.889),
        (28.640, 182.044, 2288.118, 205.346, 362.299, 357.248, 656.553),
        (47.392, 128.157, 1157.388, 129.728, 212.268, 207.484, 364.314),
    ),
    "GB300": (
        (58.015, 558.570, 8480.448, 557.091, 1100.998, 1124.752, 2278.422),
        (37.984, 283.877, 4050.212, 315.526, 587.739, 553.788, 1097.564),
        (26.241, 147.836, 2024.772, 175.361, 311.750, 310.586, 582.525),
        (45.695, 108.160, 1028.502, 108.539, 178.306, 175.521, 312.545),
    ),
}
#: (SCHED_POLICY, SPLIT_KV) of the CuTe DSL kernels in the same places; 0 natural, 1 longest first,
#: 2 longest first in sections of L2.
_FROST_PLANS = (
    ((2, 1), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1), (0, 4)),
    ((2, 1), (2, 1), (2, 1), (0, 2), (0, 2), (1, 1), (1, 1)),
    ((2, 1), (2, 1), (2, 1), (0, 4), (0, 4), (0, 2), (0, 2)),
    ((0, 2), (2, 1), (2, 1), (0, 8), (0, 8), (0, 4), (0, 4)),
)
_DATES = {"B200": "2026-09-18", "GB200": "2026-09-28", "GB300": "2026-09-28"}


def _inference(
    first: Published, times: Mapping[str, Sequence[Sequence[float]]]
) -> Iterator[Published]:
    """times: in us, of each GPU, heads and shape. The plan of the CuTe DSL kernels is put in."""
    for gpu, rows in times.items():
        source = f"{_RESULTS}/attention_inference/results/qwen35, {_DATES[gpu]}"
        for number, (heads, found) in enumerate(zip(_HEADS, rows, strict=True)):
            for place, ((queries, keys), us) in enumerate(
                zip((*_PROMPTS, *_CHUNKS), found, strict=True)
            ):
                row = replace(first, gpu=gpu, heads=heads, seqlen=queries, source=source)
                row = replace(row, keys=None if keys == queries else keys)
                if row.build.project == FROST:
                    scheduler, parts = _FROST_PLANS[number][place]
                    plan = (*_PLAN, ("SCHED_POLICY", scheduler), ("SPLIT_KV", parts))
                    build = FROST_SEPTEMBER if gpu == "B200" else FROST_1_31
                    role = half_of(queries if row.keys is None else keys // 2)
                    row = replace(row, build=replace(build, options=plan), role=role)
                yield replace(row, tflops=row.seconds / (us * 1e-6))


#: A row of 1 TFLOPS, to be replaced.
_FIRST = Published(
    CUDNN_9_27, "B200", True, 1, 1, (32, 2), 1.0, "", protocol=INFERENCE_PROTOCOL, lab=LAB
)
INFERENCE = (
    *_inference(_FIRST, _CUDNN_TIMES),
    *_inference(replace(_FIRST, build=FROST_1_31), _FROST_TIMES),
)
_DECODING = replace(_FIRST, keys=131072, source=f"{_RESULTS}/attention_inference/results/qwen35")


def _decode(build: Build, gpu: str, times: Mapping[tuple[int, int], float]) -> Iterator[Published]:
    """times: in us, by (batch, queries), heads 32/2, 131072 keys in pages of 16."""
    for (batch, queries), us in times.items():
        row = replace(_DECODING, build=build, gpu=gpu, batch=batch, seqlen=queries)
        yield replace(row, tflops=row.seconds / (us * 1e-6))


#: The CuTe DSL kernel packs query heads (PACK_GQA 1) there.
_FROST_DECODE = Build(FROST, "1.31.0", "4.8.0", (("PACK_GQA", 1),))
DECODE = (
    *_decode(CUDNN_9_27, "B200", {(1, 1): 81.631, (1, 2): 6811.824, (1, 4): 6804.887,
             (128, 1): 8906.546, (128, 2): 202889.241, (128, 4): 202200.735}),
    *_decode(CUDNN_9_27, "GB200", {(1, 1): 80.704, (1, 2): 7103.051, (1, 4): 7097.453,
             (128, 1): 8458.129, (128, 2): 193252.527, (128, 4): 192530.007}),
    *_decode(CUDNN_9_27, "GB300", {(1, 1): 78.658, (1, 2): 6529.395, (1, 4): 6526.885,
             (128, 1): 8534.959, (128, 2): 189080.072, (128, 4): 187512.735}),
    *_decode(_FROST_DECODE, "B200", {(1, 1): 106.686, (1, 2): 94.847, (1, 4): 99.680,
             (128, 1): 4722.108, (128, 2): 6120.281, (128, 4): 6100.242}),
    *_decode(_FROST_DECODE, "GB200", {(1, 1): 108.474, (1, 2): 95.678, (1, 4): 101.214,
             (128, 1): 4541.128, (128, 2): 5407.654, (128, 4): 5536.878}),
    *_decode(_FROST_DECODE, "GB300", {(1, 1): 107.362, (1, 2): 91.134, (1, 4): 95.776,
             (128, 1): 4798.381, (128, 2): 4888.174, (128, 4): 4962.752}),
)  # fmt: skip
#: The bf16 backward of three launches as of 2026-10-01, between 1.31 and 1.32.
FROST_OCTOBER = Build(FROST, "1.32.0", "4.8.0")
#: Clock of the B200 on which that lab measured on that day: "1155 MHz SW power cap", NVML sampled
#: (`sdpa/bwd/api_dsl.py` of 1.32; `bprop_d512_f16_2x2.py` says the same). The rows below do not say
#: it again. cuDNN's own backward among them, 3939 us, has 1.44 times the clocks of a B200 whose
#: clock is free: 2636 us on a GB200 (`TRAINING`) and 1.041 of a GB200's time in the forward of the
#: same shape give 2744.
CAPPED = Clock(1.155, "sampled on that lab's B200 the same day, power cap", held=True)
#: One call, S = 8192, CUPTI; how many is not said. Its main kernel takes 3781 us full and 2020
#: causal, 4525 and 1974 with the scores of a step issued one step ahead (`config_d256_2x2.py` of
#: 1.32).
_BACKWARD = Published(
    FROST_OCTOBER, "B200", False, 1, 8192, (32, 2), 1.0,
    f"{_REPOSITORY}, docs/fe-oss-apis/attention/sdpa_bwd_sm107.md", TEST, BACKWARD, CAPPED,
    lab=f"{LAB}, 1155 MHz",
)  # fmt: skip
FROST_BACKWARD = tuple(
    replace(row, tflops=row.seconds / (us * 1e-6))
    for row, us in ((_BACKWARD, 5673.0), (replace(_BACKWARD, causal=True), 3256.0))
)
CUDNN_BACKWARD = tuple(
    replace(row, build=CUDNN_9_26, role=AS_PUBLISHED, tflops=row.seconds / (us * 1e-6))
    for row, us in ((_BACKWARD, 7265.0), (replace(_BACKWARD, causal=True), 3939.0))
)

#: Pull request 488 (2026-08-05), about 1.27: under Nsight Compute, which holds the base clock, and
#: says which it was. Batch and heads follow from the TFLOPS that are given beside the times.
_PROFILED = Published(
    Build(FROST, "1.27.0"), "B200", False, 2, 8192, (128, 128), 1.0,
    "github.com/NVIDIA/cudnn-frontend/pull/488", clock=Clock(0.845069, "observed by NCU"),
    protocol=Protocol("NCU", 0, 1, cold=True), lab="NVIDIA, profiled",
)  # fmt: skip
PROFILED = tuple(
    replace(row, tflops=row.seconds / (us * 1e-6))
    for row, us in (
        (_PROFILED, 18153.50),
        (replace(_PROFILED, causal=True, clock=Clock(0.846004, "observed by NCU")), 10054.18),
    )
)
