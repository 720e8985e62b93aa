"""`python -m lab splits`: KV splits of a query tile, over CTA pairs, where tiles are few.

Decoding, a few queries at once, and a chunk of a long prompt. On a GPU that runs the kernels some
numbers of KV splits are timed, interleaved; without one the tiles of every number are placed on the
clusters of the machine, with costs from replays of the compiled kernel. flash-attn-4 stands beside
it with its best call: unsplit, or with any number of KV splits that its rule picks from; and FROST,
split as its heuristics choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench import suite
from bench.measure.providers import FlashAttention4, Frost, Ours, Provider
from bench.measure.throughput import measured_rows, times_of
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer, Sampling, Timer
from bench.peers import flash_attn_4, frost
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS, RESOLUTION, standing, standing_figures, verdict
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.call.chunks import visible_keys
from fa4_hd256.call.options import MOST_SPLITS
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.gpus.devices import gpu_of as device_gpu
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.calls import architecture_on, default_splits, defaults_to_clc, forward_problem
from lab.model.machines import B200, gpu_of
from lab.model.origin import modelled_machine
from lab.model.peers.flash_attn_4 import split_numbers
from lab.model.predictor import OURS_FORWARD, Predicted, Predictor, predictor_of
from lab.model.stated_errors import stated_errors
from lab.paths import PATH_COLUMNS, path_figures, path_note
from lab.published import paged_decode
from lab.published.rows import CUDNN, FROST

#: KV splits of a tile that the table shows; 1: not split.
NUMBERS = (1, 2, 4, 8, 16, 32)
THEIRS = flash_attn_4.PACKAGE
#: Columns of its calls: num_splits=1, its default, and 0, where its rule decides.
THEIR_DEFAULT, THEIR_RULE = "theirs, num_splits=1", "theirs, num_splits=0"
#: Column -> project whose published time it has, of keys in pages of 16.
PUBLISHED = {"cuDNN, as published": CUDNN, "FROST, as published": FROST}


def default_cases() -> list[Case]:
    """Return (batch, queries, keys), with the heads of Qwen3-Next and of Gemma."""
    decoding = [(b, 1, keys) for b in (1, 8) for keys in (1024, 2048, 8192, 32768, 131072)]
    # 40 tiles: two splits would make 80 for 74 CTA pairs.
    decoding += [(20, 1, keys) for keys in (2048, 32768)]
    few = [(b, q, 131072) for b in (1, 128) for q in (1, 2, 4)]
    chunks = [(8, 4, 8192), (1, 128, 8192), (1, 512, 8192), (1, 512, 32768), (8, 128, 4096)]
    found = [
        Case("decoding" if q == 1 else "chunk", ((q, keys),) * batch, 16, 2, True)
        for batch, q, keys in decoding + chunks
    ]
    found += [Case("few queries", ((q, keys),) * batch, 32, 2, True) for batch, q, keys in few]
    return [*found, Case("window", ((1, 65536),), *suite.GEMMA_HEADS, True, (1023, None))]


def modelled_row(case: Case, predictor: Predictor) -> dict[str, Any]:
    """Every number of parts on one case, for each of the drawn machines."""
    use_clc = defaults_to_clc(case, FORWARD)
    gpu = gpu_of(predictor.machine)
    chosen = default_splits(case, gpu)
    found = {
        n: predictor.predict_forward(OURS, case, use_clc, n)
        for n in sorted({*_tried(case, gpu), chosen})
    }
    seconds: dict[int, Any] = {n: one.seconds for n, one in found.items()}
    theirs = {}
    if predictor.refuses(THEIRS, case, FORWARD) is None:
        theirs = their_predictions(case, predictor)
    calls: dict[int, Any] = {n: one.seconds for n, one in theirs.items()}
    best = theirs[_fastest(calls)].paths if calls else None
    paths = path_figures(found[chosen].paths, best)
    origin = {BASIS: "modelled", MACHINE: modelled_machine(predictor.machine)}
    third = None
    if predictor.refuses(frost.NAME, case, FORWARD) is None:
        third = predictor.predict(frost.NAME, case, FORWARD).seconds
    beside = None
    if predictor.refuses(OURS_FORWARD.name, case, FORWARD) is None:
        beside = predictor.predict(OURS_FORWARD.name, case, FORWARD).seconds[0] * 1e6
    return (
        _row(case, chosen, seconds, calls)
        | _of_frost(third, seconds[chosen])
        | paths
        | origin
        | _of_kernel(case, gpu, seconds[chosen])
        | {"forward": beside}
        | _standing(seconds[chosen], calls, third, predictor.ratio_error(case, FORWARD))
        | _published(predictor.machine.name, case)
    )


def _standing(
    ours: np.ndarray, calls: dict[int, np.ndarray], third: np.ndarray | None, error: float
) -> dict[str, Any]:
    """Compare ours with the best of both peers under each set of constants; calls: flash-attn-4's
    by number of splits, of which it takes the best, third: FROST's."""
    peers = {} if third is None else {frost.NAME: third}
    if calls:
        peers[THEIRS] = np.min(list(calls.values()), axis=0)
    found = standing({OURS: ours, **peers}, error)
    figures = {f"peer_{name}": value for name, value in standing_figures(found).items()}
    return figures | {"faster": verdict(found)}


def _published(machine: str, case: Case) -> dict[str, Any]:
    """Microseconds of the same call over pages, as published; None where nobody has."""
    rows = paged_decode(machine, case)
    return {
        column: rows[project].seconds * 1e6 if project in rows else None
        for column, project in PUBLISHED.items()
    }


def _tried(case: Case, gpu: Gpu) -> list[int]:
    """Numbers of parts: all, but of calls of many tiles those of the table alone."""
    problem = forward_problem(case, architecture_on(gpu))
    most = 4 * gpu.clusters(problem.tiles.cluster) // problem.num_tiles
    return [n for n in range(1, MOST_SPLITS + 1) if n <= most or n in NUMBERS]


def _of_kernel(case: Case, gpu: Gpu, seconds: np.ndarray) -> dict[str, Any]:
    """Rows of the tiles that a call takes, and its keys' and values' bytes over what HBM gives by
    its data sheet in the call's time."""
    problem = forward_problem(case, architecture_on(gpu))
    seen = sum(len(visible_keys(0, q, (q, k), case.bounds)) for q, k in case.lengths)
    nbytes = 4 * HEAD_DIM * case.heads_kv * seen
    share = nbytes / (float(seconds[0]) * gpu.hbm_bytes_per_second)
    return {"rows": problem.tiles.rows, "hbm": share}


def _of_frost(found: np.ndarray | None, chosen: np.ndarray) -> dict[str, Any]:
    """FROST's time with the parts of its own choice, and that over ours. None: it did not run."""
    if found is None:
        return {frost.NAME: None, "frost_ratio": None}
    return {frost.NAME: found[0] * 1e6, "frost_ratio": float(found[0] / chosen[0])}


def their_predictions(case: Case, predictor: Predictor) -> dict[int, Predicted]:
    """flash-attn-4's calls by number of parts, undivided first."""
    found = {1: predictor.predict(THEIRS, case, FORWARD)}
    numbers = split_numbers(case, int(predictor.machine.values().sms))
    return found | {n: predictor.predict_forward(THEIRS, case, False, n) for n in numbers}


def _fastest(seconds: dict[int, np.ndarray]) -> int:
    """The number of parts whose central time is the least, the smallest of equal ones."""
    return min(sorted(seconds), key=lambda n: seconds[n][0])


def _row(
    case: Case, chosen: int, seconds: dict[int, np.ndarray], theirs: dict[int, np.ndarray | None]
) -> dict[str, Any]:
    """seconds, theirs: by number of parts, the central figure first; ranges are over pairs of
    figures at the same place. The largest number of theirs is what its rule takes; None: that call
    did not run."""
    gains = seconds[1] / seconds[chosen]
    best = _fastest(seconds)
    row = {
        "group": case.group, "shape": case.shape, "heads": case.heads_text, "mask": case.mask,
        "parts": chosen, **{str(n): seconds[n][0] * 1e6 if n in seconds else None for n in NUMBERS},
        "chosen": seconds[chosen][0] * 1e6,
        "gain": float(gains[0]), "gain_low": float(gains.min()), "gain_high": float(gains.max()),
        "best": best, "behind": float(seconds[chosen][0] / seconds[best][0] - 1),
        THEIR_DEFAULT: None, THEIR_RULE: None, THEIRS: None, "their_parts": None,
        "ratio": None, "ratio_low": None, "ratio_high": None,
    }  # fmt: skip
    ran = {n: found for n, found in theirs.items() if found is not None}
    if ran:
        their_best = _fastest(ran)
        ratios = ran[their_best] / seconds[chosen]
        default, rule = (
            None if found is None else found[0] * 1e6 for found in (theirs[1], theirs[max(theirs)])
        )
        row |= {
            THEIR_DEFAULT: default, THEIR_RULE: rule,
            THEIRS: ran[their_best][0] * 1e6, "their_parts": their_best,
            "ratio": float(ratios[0]), "ratio_low": float(ratios.min()),
            "ratio_high": float(ratios.max()),
        }  # fmt: skip
    return row


def _gpu_of(timer: Timer) -> Gpu:
    """Return the GPU that the operator takes the timer's GPU for."""
    if torch.cuda.is_available():
        return device_gpu(torch.device("cuda"))
    return replace(B200, sms=timer.gpu.sms, pairs=timer.gpu.sms // 2)


def measured(cases: Iterable[Case], timer: Timer, sampling: Sampling) -> Iterator[dict[str, Any]]:
    """Yield rows on the timer's GPU, results checked before."""
    for case in cases:
        chosen = default_splits(case, _gpu_of(timer))
        numbers = sorted({*NUMBERS, chosen})
        theirs = {n: f"{THEIRS} {n}" for n in _their_measured(case, timer.gpu.sms)}
        providers: list[Provider] = [
            *(Ours(str(n), num_splits=n) for n in numbers),
            *(FlashAttention4(name, num_splits=n) for n, name in theirs.items()),
            Frost(),
        ]
        (row,) = measured_rows([(case, FORWARD)], providers, timer, sampling, torch.bfloat16)
        times = times_of(case, row, map(str, numbers))
        seconds = {n: times[str(n)] for n in numbers}
        calls = {n: times.get(name) for n, name in theirs.items()}
        yield (
            _row(case, chosen, seconds, calls)
            | _of_frost(times.get(frost.NAME), seconds[chosen])
            | _of_kernel(case, _gpu_of(timer), seconds[chosen])
            | {"forward": None, "details": row["details"], BASIS: row[BASIS], MACHINE: row[MACHINE]}
        )


def _their_measured(case: Case, sms: int) -> list[int]:
    """Parts that flash-attn-4 is timed with: `NUMBERS` among those of its rule, and the last."""
    allowed = split_numbers(case, sms)
    return [1, *sorted({*(n for n in NUMBERS if n in allowed), *allowed[-1:]})]


COLUMNS = (
    Column("group"), Column("shape"), Column("heads"), Column("mask"),
    Column("rows", title="rows of a tile"),
    *(Column(str(n), "us", ".1f", "not divided" if n == 1 else f"{n} parts") for n in NUMBERS),
    Column("parts", title="chosen"), Column("chosen", "us", ".1f", "time of the choice"),
    Column("hbm", format=".1%", title="of HBM"),
    Column("forward", "us", ".1f", "in tiles of 256 rows"),
    Column("gain", format=".2f", title="over not divided"),
    Column("gain_low", format=".2f", title="low"), Column("gain_high", format=".2f", title="high"),
    Column("best"), Column("behind", format="+.1%", title="choice over best"),
    Column(THEIR_DEFAULT, "us", ".1f"), Column(THEIR_RULE, "us", ".1f"),
    Column(THEIRS, "us", ".1f", f"{THEIRS} at best"), Column("their_parts", title="its parts"),
    Column("ratio", format=".2f", title=f"{THEIRS} at best / choice"),
    Column("ratio_low", format=".2f", title="ratio, low"),
    Column("ratio_high", format=".2f", title="ratio, high"),
    Column(frost.NAME, "us", ".1f"),
    Column("frost_ratio", format=".2f", title=f"{frost.NAME} / choice"),
)  # fmt: skip

#: Columns of modelled rows alone.
STANDING_COLUMNS = (
    Column("peer_peer", title="best peer"),
    Column("peer_ratio", format=".2f", title="best peer / choice"),
    Column("peer_ratio_low", format=".2f", title="best peer, low"),
    Column("peer_ratio_high", format=".2f", title="best peer, high"),
    Column("peer_probability", format=".0%", title="probability"),
    Column("peer_gain", format="+.0%", title="gain"),
    Column("faster"),
    *(Column(name, "us", ".1f") for name in PUBLISHED),
)  # fmt: skip


MODELLED_COLUMNS = COLUMNS + STANDING_COLUMNS + PATH_COLUMNS


def table(rows: list[dict[str, Any]]) -> Table:
    columns: tuple[Column, ...] = COLUMNS
    notes: tuple[str, ...] = (
        f'The number of parts that a call without num_splits= takes stands under "chosen"; '
        f"differences below {RESOLUTION:.0%} are not resolved. {THEIRS} at best: the fastest of "
        "num_splits=1, two CTAs a tile of 256 rows, and of the numbers its rule picks from, one "
        f"CTA a tile of 128, the last of which num_splits=0 takes. {frost.NAME}: with the parts "
        "that its heuristics choose. Of HBM: bytes of keys and values that are seen, over what the "
        "data sheet's rate (8 TB/s on a B200) gives in the time of the choice. In tiles of 256 "
        "rows: our forward's kernel with the parts of its own rule.",
    )
    if rows[0][BASIS] == "modelled":
        columns = MODELLED_COLUMNS
        notes += (
            "Best peer: the faster of both under each set of constants, of which a tenth lie below "
            '"low" and a tenth above "high". Probability: that ours is faster; it counts '
            f"what the model may be off in a ratio ({stated_errors()}). As published: the same "
            "queries and keys on such a GPU, its keys in pages of 16 (attention_inference); no "
            "replay, and no peer of the ratio, since ours has its keys in one piece here.",
            "The kernels that make one result of the parts are taken at a launch, ours as a "
            "dependent, and HBM's rate.",
            path_note(f"the replays behind the choice, and behind {THEIRS} at best"),
        )
    plot = Plot(("shape", "mask"), ("1", "chosen", THEIRS, frost.NAME), panel="group")
    title = "Keys divided among CTA pairs, forward, bf16"
    return Table("splits", title, columns, rows, notes, plot)


def main(arguments: argparse.Namespace) -> int:
    limit, cases = TimeLimit(arguments.within), suite.selected(arguments, default_cases)
    if not arguments.modelled and Ours().missing() is None:
        sampling = Sampling(arguments.warmup, arguments.runs)
        begun = measured(limit.begun(cases), CudaTimer(), sampling)
        rows = ready(begun, len(cases), COLUMNS, "measuring")
    else:
        predictor = predictor_of(arguments.machine, arguments.draws)
        modelled = (modelled_row(case, predictor) for case in cases)
        rows = ready(modelled, len(cases), MODELLED_COLUMNS)
    emit(limit.noted(table(rows)), arguments)
    return 0
