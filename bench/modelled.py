"""Attention problems on the timing model: a kernel's tile costs, and whole problems from them.

The costs of a kernel come from replays of one cluster that runs a few tiles of small problems; a
problem of any size is then a list of tiles (`sm100_sim.timing.problem`). Nothing here is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fa4_hd256.backends import empty_results
from fa4_hd256.calling import CallTensors, call_arguments
from fa4_hd256.compile import compile_forward
from fa4_hd256.config import HEAD_DIM, ForwardConfig
from fa4_hd256.problem import Options, Problem
from schedulers import TileProblem, section_heads_for, tile_coordinates
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, Values, load
from sm100_sim.timing.problem import Sample, Schedule, Tile, TileCosts, fit, schedule

from . import flash_attn_4

#: Keys of a step.
STEP = 128
FLOP_PER_CLOCK = 8192
#: (seqlen, heads) of the small problems that costs are fitted to.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1), (2048, 1))
L2_FOR_KV = 64 << 20


@dataclass(frozen=True)
class Shape:
    """A forward problem, queries and keys of one length."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    causal: bool

    def flop(self, head_dim: int) -> float:
        """By convention: 4 Sq Sk D a head, half of it if causal."""
        full = 4 * self.seqlen**2 * head_dim * self.heads * self.batch
        return full / 2 if self.causal else full


@dataclass(frozen=True)
class Kernel:
    """A forward kernel and what its tiles cost.

    rows: queries of a cluster's tile. cluster: CTAs. policy: see `problem.POLICIES`. values,
    costs: one of each replay, the central one first.
    """

    name: str
    head_dim: int
    rows: int
    cluster: int
    policy: str
    values: list[Values]
    costs: list[TileCosts]

    def tiles(self, shape: Shape) -> list[Tile]:
        """The tiles of a problem in the order in which they are worked on."""
        blocks = -(-shape.seqlen // self.rows)
        pairs = shape.batch * shape.heads
        ratio = shape.heads // shape.heads_kv
        kv_bytes = 4.0 * shape.seqlen * self.head_dim
        own = 4.0 * self.rows * self.head_dim
        section = section_heads_for(
            num_heads_per_kv=ratio, num_pairs=pairs, kv_bytes_per_head=int(kv_bytes),
            l2_bytes=L2_FOR_KV, unequal_lengths=shape.causal,
        )  # fmt: skip
        order = TileProblem(blocks, shape.heads, shape.batch, section, shape.causal).order()
        step = 4 * self.rows * STEP * self.head_dim / FLOP_PER_CLOCK / self.cluster
        found = []
        for index in range(blocks * pairs):
            block, head, batch = tile_coordinates(index, order)
            rows = min((block + 1) * self.rows, shape.seqlen)
            keys = rows if shape.causal else shape.seqlen
            group = batch * shape.heads_kv + head // ratio
            found.append(Tile(step * -(-keys // STEP), group, kv_bytes, own))
        return found

    def run(self, shape: Shape) -> list[Schedule]:
        """The problem under each of the drawn machines, the central one first."""
        tiles = self.tiles(shape)
        return [
            schedule(tiles, costs, values, self.cluster, self.policy)
            for costs, values in zip(self.costs, self.values)
        ]

    def tflops(self, shape: Shape) -> np.ndarray:
        """float64, predicted for each of the drawn machines, the central one first."""
        flop = shape.flop(self.head_dim)
        return np.array([flop / found.seconds / 1e12 for found in self.run(shape)])


def our_predictions(
    samples: tuple[tuple[int, int], ...], causal: bool, machine: Machine, draws: int,
    config: ForwardConfig | None = None,
) -> list[timing.Prediction]:
    """Our forward on one CTA pair, for each (seqlen, heads)."""
    found = []
    for seqlen, heads in samples:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).bfloat16()
            for n in (heads, 1, 1)
        )
        options = Options.check(None, causal, (None, None), 0.0, False)
        problem = Problem.describe((q, k, v), options)
        compiled = compile_forward(config or ForwardConfig(), problem.problem_class)
        tensors = CallTensors(q, k, v, *empty_results(problem))
        arguments = call_arguments(tensors, problem, 1, 0)
        found += timing.predict(compiled, *arguments, machine=machine, draws=draws)
    return found


def their_predictions(
    samples: tuple[tuple[int, int], ...], head_dim: int, causal: bool, machine: Machine, draws: int
) -> list[timing.Prediction]:
    """flash-attn-4's forward through its own interface, on one cluster."""
    from flash_attn.cute.interface import flash_attn_func

    with timing.attached(machine, draws) as session, one_cluster():
        for seqlen, heads in samples:
            shape = (1, seqlen, heads, head_dim)
            q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            flash_attn_func(q, k, v, causal=causal, num_splits=1)
    return session.predictions


@contextlib.contextmanager
def one_cluster() -> Iterator[None]:
    """Persistent kernels that ask CuTe DSL for the number of SMs get two."""
    from cutlass.utils import HardwareInfo

    saved = HardwareInfo.get_device_multiprocessor_count
    HardwareInfo.get_device_multiprocessor_count = lambda self: 2
    try:
        yield
    finally:
        HardwareInfo.get_device_multiprocessor_count = saved


def _work(prediction: timing.Prediction) -> float:
    compiled = prediction.compiled
    action, sms = compiled.program.action, compiled.program.sms
    return sum(c.compute * int(action[e, 4]) / sms for e, c in compiled.mma.items())


def kernel(
    name: str, shape: tuple[int, int, int, str], predictions: list[timing.Prediction],
    samples: tuple[tuple[int, int], ...],
) -> Kernel:
    """A kernel whose costs are fitted to predictions of the samples, (seqlen, heads) each.

    shape: head_dim, rows, cluster, policy.
    """
    head_dim, rows, cluster, policy = shape
    single = policy == "single"
    costs = []
    for draw in range(len(predictions[0].clocks)):
        taken = [
            Sample(
                1 if single else -(-seqlen // rows) * heads, _work(prediction),
                float(prediction.clocks[draw]),
            )
            for (seqlen, heads), prediction in zip(samples, predictions)
        ]  # fmt: skip
        costs.append(fit(taken, single))
    return Kernel(name, *shape, predictions[0].values, costs)


def our_kernel(causal: bool, machine: str = "b200", draws: int = 6) -> Kernel:
    """Our forward under the static scheduler."""
    model = load(machine)
    predictions = our_predictions(SAMPLES, causal, model, draws)
    return kernel("ours", (HEAD_DIM, 256, 2, "static"), predictions, SAMPLES)


def their_kernel(head_dim: int, causal: bool, machine: str = "b200", draws: int = 6) -> Kernel:
    """flash-attn-4's forward, head_dim 128 or 256, as its interface chooses it.

    Full attention runs persistent clusters, causal one tile a cluster, longest first. Raises
    RuntimeError if it is not installed, ValueError for another head dimension.
    """
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    if head_dim not in (128, 256):
        raise ValueError(f"head_dim {head_dim}; known here are 128 and 256")
    # At head_dim 128 a CTA works on two tiles of 128 rows, and only full attention on CTA pairs.
    rows, cluster = (256, 2) if head_dim == 256 else (256, 1) if causal else (512, 2)
    samples = tuple((max(seqlen, rows), heads) for seqlen, heads in SAMPLES)
    if causal:
        # The longest tile is launched first: it is the cluster that is replayed.
        samples = ((256, 1), (512, 1), (1024, 1), (2048, 1))
    samples = tuple(dict.fromkeys(samples))
    predictions = their_predictions(samples, head_dim, causal, load(machine), draws)
    policy = "single" if causal else "static"
    return kernel(
        flash_attn_4.PACKAGE, (head_dim, rows, cluster, policy), predictions, samples
    )
