"""flash-attn-4's forward with divided keys on the timing model: one CTA a tile of 128 rows.

Its interface takes this path for `num_splits` above 1, and for 0 where its rule divides
(`flash_attn_4.split_numbers`). A second kernel makes one result of the float32 parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.peers import flash_attn_4
from bench.peers.flash_attn_4 import SINGLE_ROWS
from bench.suite import Case
from fa4_hd256.kernels.blackwell.forward.config import HEAD_DIM
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine

from . import forward as modelled
from . import workload
from .predictor import Predicted
from .replays import SEED, Paths, Replayed, kept, replayed, seeded
from .workload import STEP, Kind

#: Keys of the samples that costs are fitted to, with left bounds of windowed ones; in two parts.
SAMPLE_KEYS = (1024, 2048, 4096)
SAMPLE_WINDOWS = ((1024, 511), (2048, 1023), (4096, 2047))
SAMPLE_SPLITS = 2


def numbers(case: Case, sms: int) -> range:
    """The numbers of parts above 1 that its rule picks from for a case."""
    left, right = case.bounds
    ratio = case.heads // case.heads_kv
    steps = -(-case.seqlen_k // STEP)
    if left is not None:
        # What it takes a tile of a windowed call to load at most.
        most = left + (case.seqlen_k if right is None else right) + 1 + SINGLE_ROWS
        steps = -(-min(case.seqlen_k, most) // STEP)
    tiles = case.batch * case.heads_kv * -(-case.seqlen_q * ratio // SINGLE_ROWS)
    return flash_attn_4.split_numbers(tiles, steps, sms)


def kernel(case: Case, machine: Machine, draws: int) -> modelled.Kernel:
    """The kernel a case takes, `num_splits` left open; costs follow how many rows a tile has.

    Raises RuntimeError if flash-attn-4 is not installed, ValueError for packed sequences.
    """
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    if case.packed:
        raise ValueError("packed sequences divided by flash-attn-4 are not modelled")
    ratio = case.heads // case.heads_kv
    shape = min(case.seqlen_q, max(SINGLE_ROWS // ratio, 1)), ratio
    replays = _replays(Kind.of(case), shape, machine, draws)
    return modelled.Kernel(
        flash_attn_4.PACKAGE, HEAD_DIM, SINGLE_ROWS, 1, "single", machine.sampled(draws),
        modelled.fitted(replays, "single"), packs_heads=True, paths=Paths.of(replays),
        equal_parts=True,
    )  # fmt: skip


def predict(case: Case, found: modelled.Kernel, splits: int) -> Predicted:
    """A call with that many parts, above 1; both kernels, the second at a launch and HBM's rate."""
    divided = replace(found, num_splits=splits)
    runs = workload.run(case, divided)
    beside = [workload.combine_seconds(case, splits, values) for values in divided.values]
    seconds, unlimited = (
        np.array(each) + beside
        for each in ([r.seconds for r in runs], [r.seconds_without("power") for r in runs])
    )
    return Predicted(seconds, runs[0].bound, divided.paths, unlimited)


def _replays(
    kind: Kind, shape: tuple[int, int], machine: Machine, draws: int
) -> list[Replayed]:
    """The longest CTA of each sample, one part of a tile. shape: (queries, query heads) of it."""
    samples: tuple[Any, ...] = SAMPLE_WINDOWS if kind.window else SAMPLE_KEYS

    def make() -> list[Replayed]:
        predictions = _predictions(kind, shape, samples, machine, draws)
        return [replayed(prediction, 1) for prediction in predictions]

    what = modelled.their_versions(), "divided", kind, shape, samples, SEED
    return kept(what, machine, draws, make)


def _predictions(
    kind: Kind, shape: tuple[int, int], samples: tuple, machine: Machine, draws: int
) -> list[timing.Prediction]:
    from flash_attn.cute.interface import flash_attn_func

    queries, heads = shape
    options: dict[str, Any] = {"num_splits": SAMPLE_SPLITS}
    if kind.softcap:
        options["softcap"] = workload.SAMPLE_SOFTCAP
    with timing.attached(machine, draws) as session, seeded():
        for sample in samples:
            keys, left = sample if kind.window else (sample, None)
            options |= {"window_size": (left, 0)} if kind.window else {"causal": kind.causal}
            q, k, v = (
                torch.randn(1, rows, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
                for rows, n in ((queries, heads), (keys, 1), (keys, 1))
            )
            flash_attn_func(q, k, v, **options)
    # Each call launches the kernel that makes one result of the parts, too.
    return [found for found in session.predictions if "combine" not in found.report.kernel.lower()]
