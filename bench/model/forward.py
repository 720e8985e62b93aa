"""Attention problems on the timing model: a kernel's tile costs, and whole problems from them.

The costs of a kernel come from replays of one cluster that runs a few tiles of small problems; a
problem of any size is then a list of tiles (`sm100_sim.timing.problem`). Nothing here is measured.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.peers import flash_attn_4
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.run.launch import simulated_gpu
from schedulers import TileProblem, section_heads_for, tile_coordinates
from sm100_sim import devices, timing
from sm100_sim.timing.machine_constants import Machine, Values, load
from sm100_sim.timing.problem import Sample, Schedule, Tile, TileCosts, fit, schedule

from .replays import SEED, Paths, Replayed, kept, replayed, seeded

#: Keys of a step.
STEP = 128
FLOP_PER_CLOCK = 8192
#: (seqlen, heads) that costs of flash-attn-4's persistent kernel are fitted to.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1), (2048, 1))
#: A B200 as the operator sees it, and one with a single CTA pair, for replays.
B200 = simulated_gpu(devices.named("b200"))
ONE_PAIR = replace(B200, pairs=1)


def gpu_of(machine: Machine) -> Gpu:
    """A modelled machine as the operator would see it."""
    values = machine.values()
    sms = int(values.sms)
    if machine.name in devices.DEVICES:
        return simulated_gpu(replace(devices.DEVICES[machine.name], sms=sms))
    return replace(
        B200, sms=sms, pairs=sms // 2, l2_bytes=int(values.l2_megabytes * 1e6),
        hbm_bytes_per_second=values.hbm_terabytes * 1e12,
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A problem, queries and keys of one length."""

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
    costs: one of each replay, the central one first. ordered: as `ForwardConfig.ordered_tiles`.
    packs_heads: whether a tile's rows are those of all query heads of a KV head, see
    `tile_of_queries`; the costs stay those of replays with one query head. exact_grid: whether the
    grid of packed sequences follows their queries; otherwise each has blocks for the longest one.
    paths: of the replays. num_splits: parts into which the keys of a tile are divided; equal_parts:
    of equal size but for the last ones, which may be empty, else as even as can be.
    """

    name: str
    head_dim: int
    rows: int
    cluster: int
    policy: str
    values: list[Values]
    costs: list[TileCosts]
    ordered: bool = True
    packs_heads: bool = False
    exact_grid: bool = False
    paths: Paths = Paths()
    num_splits: int = 1
    equal_parts: bool = False

    def tile_of_queries(self, heads: int, heads_kv: int) -> tuple[int, int]:
        """(queries of a tile, heads that have tiles of their own).

        Heads are packed where a CTA's rows are a multiple of the ratio, in ours
        (`fa4_hd256.call.forward_problem.packed_heads`) and in flash-attn-4.
        """
        ratio = heads // heads_kv
        if self.packs_heads and (self.rows // self.cluster) % ratio == 0:
            return self.rows // ratio, heads_kv
        return self.rows, heads

    def tiles(self, shape: Shape) -> list[Tile]:
        """The tiles of a problem in the order in which they are worked on."""
        queries, heads = self.tile_of_queries(shape.heads, shape.heads_kv)
        blocks = -(-shape.seqlen // queries)
        pairs = shape.batch * heads
        ratio = heads // shape.heads_kv
        kv_bytes = 4.0 * shape.seqlen * self.head_dim
        own = 4.0 * self.rows * self.head_dim
        section = 1 if not self.ordered else section_heads_for(
            num_heads_per_kv=ratio, num_pairs=pairs, kv_bytes_per_head=int(kv_bytes),
            l2_bytes=B200.l2_bytes_for_tiles, unequal_lengths=shape.causal,
        )  # fmt: skip
        longest_first = self.ordered and shape.causal
        order = TileProblem(blocks, heads, shape.batch, section, longest_first).order()
        step = 4 * self.rows * STEP * self.head_dim / FLOP_PER_CLOCK / self.cluster
        found = []
        for index in range(blocks * pairs):
            block, head, batch = tile_coordinates(index, order)
            last = min((block + 1) * queries, shape.seqlen)
            keys = last if shape.causal else shape.seqlen
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

    def seconds(self, shape: Shape) -> np.ndarray:
        """float64, predicted for each of the drawn machines, the central one first."""
        return np.array([found.seconds for found in self.run(shape)])

    def tflops(self, shape: Shape) -> np.ndarray:
        """The same as TFLOPS by `Shape.flop`."""
        return shape.flop(self.head_dim) / self.seconds(shape) / 1e12


def their_predictions(
    samples: tuple[tuple[int, int], ...], head_dim: int, causal: bool, machine: Machine, draws: int
) -> list[timing.Prediction]:
    """flash-attn-4's forward through its own interface, on one cluster."""
    from flash_attn.cute.interface import flash_attn_func

    with timing.attached(machine, draws) as session, one_cluster(), seeded():
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


def kernel(
    name: str, shape: tuple[int, int, int, str], predictions: list[timing.Prediction],
    samples: tuple[tuple[int, int], ...],
) -> Kernel:
    """A kernel whose costs are fitted to predictions of the samples, (seqlen, heads) each.

    shape: head_dim, rows, cluster, policy.
    """
    _, rows, _, policy = shape
    rows_of = [
        replayed(prediction, 1 if policy == "single" else -(-seqlen // rows) * heads)
        for (seqlen, heads), prediction in zip(samples, predictions)
    ]
    return Kernel(name, *shape, predictions[0].values, fitted(rows_of, policy))


def memory_seconds(nbytes: float, values: Values) -> float:
    """Of a kernel that only reads and writes, a launch included: at HBM's rate."""
    return nbytes / (values.hbm_terabytes * 1e12) + values.launch_us * 1e-6


def fitted(rows: Sequence[Replayed], policy: str) -> list[TileCosts]:
    """Costs of a tile for each of the replays' machines."""
    return [
        fit([Sample(r.tiles, r.work, r.clocks[n], r.masked) for r in rows], policy == "single")
        for n in range(len(rows[0].clocks))
    ]


def their_kernel(
    head_dim: int, causal: bool, machine: str = "b200", draws: int = 6
) -> Kernel:
    """flash-attn-4's forward, head_dim 128 or 256, as its interface chooses it.

    Full attention runs persistent clusters, causal one tile a cluster, longest first. Raises
    RuntimeError if it is not installed, ValueError for another head dimension.
    """
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    if head_dim not in (128, 256):
        raise ValueError(f"head_dim {head_dim}; known here are 128 and 256")
    model = load(machine)
    # At head_dim 128 a CTA works on two tiles of 128 rows, and only full attention on CTA pairs.
    rows, cluster = (256, 2) if head_dim == 256 else (256, 1) if causal else (512, 2)
    samples = tuple((max(seqlen, rows), heads) for seqlen, heads in SAMPLES)
    if causal:
        # One tile a cluster: one head is enough.
        samples = ((256, 1), (512, 1), (1024, 1), (2048, 1))
    samples = tuple(dict.fromkeys(samples))
    policy = "single" if causal else "static"

    def make() -> list[Replayed]:
        predictions = their_predictions(samples, head_dim, causal, model, draws)
        return [
            replayed(prediction, 1 if causal else -(-seqlen // rows) * heads)
            for (seqlen, heads), prediction in zip(samples, predictions)
        ]

    rows_of = kept((their_versions(), head_dim, causal, samples, SEED), model, draws, make)
    shape = head_dim, rows, cluster, policy
    costs = fitted(rows_of, policy)
    return Kernel(
        flash_attn_4.PACKAGE, *shape, model.sampled(draws), costs, packs_heads=True,
        paths=Paths.of(rows_of),
    )


def their_versions() -> tuple[str, ...]:
    """What flash-attn-4's compiled kernels depend on."""
    names = (flash_attn_4.PACKAGE, "nvidia-cutlass-dsl", "quack-kernels")
    return tuple(importlib.metadata.version(name) for name in names)
