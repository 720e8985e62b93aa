"""Synchronisation left out of the forward kernel, one instruction at a time."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256 import flash_attn_func
from sm100_sim.launcher import Options
from sm100_sim.mutation.score import Score, captured

pytestmark = [pytest.mark.simulator, pytest.mark.sampled, pytest.mark.architecture("sm_100a")]

#: Instructions of the forward kernel, by opcode and position among its like: one of each family.
SAMPLE = (
    ("fence.mbarrier_init", 0), ("barrier.cluster.arrive", 0), ("barrier.cluster.wait", 2),
    ("mbarrier.try_wait", 3), ("mbarrier.try_wait", 12), ("mbarrier.try_wait", 20),
    ("mbarrier.arrive", 2), ("mbarrier.arrive.relaxed", 0), ("tcgen05.commit", 1),
    ("tcgen05.wait::st", 0), ("fence.proxy.async", 0), ("tcgen05.fence::before", 0),
)  # fmt: skip


def sample(instructions):
    chosen = []
    for prefix, position in SAMPLE:
        like = [i for i in instructions if i.name.startswith(prefix)]
        chosen.append(like[position])
    return chosen


def test_a_missing_synchronisation_is_caught(monkeypatch):
    """12 mutants of the forward kernel; one CTA pair does 4 tiles, so that all is reached."""
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:2")
    q = torch.randn(1, 512, 2, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 512, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    found = []

    def take(launch):
        found.extend(Score("forward", 2, 2).add(launch, Options(sanitize="strict"), only=sample))

    with captured(take):
        flash_attn_func(q, k, v)
    assert len(found) == len(SAMPLE) == 12
    assert {m.outcome for m in found} <= {"caught", "redundant"}, [str(m) for m in found]
    assert [m.outcome for m in found].count("caught") >= 10
