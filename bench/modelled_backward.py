"""The backward on the timing model: dQ and dK/dV kernels over tiles, and what runs beside them.

The two kernels are replayed and fitted like the forward (`modelled`). Ours keep dS between them
where it fits, some KV heads at a time, as the operator does. The kernels around them do
nothing but read and write: the rows' statistics before, and the sum over the parts of dK and dV
after, where our kernel splits a group of query heads. They are taken at HBM's rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fa4_hd256 import BackwardConfig
from fa4_hd256.backward import empty_stats, kernel_specs
from fa4_hd256.backward_calling import GradientTensors, gradient_call_arguments
from fa4_hd256.backward_problem import BackwardProblem
from fa4_hd256.compile import compile_kernel
from fa4_hd256.config import HEAD_DIM
from fa4_hd256.problem import Options, Problem
from schedulers import TileProblem, section_heads_for, tile_coordinates
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, Values
from sm100_sim.timing.problem import Schedule, Tile, TileCosts, schedule

from . import flash_attn_4
from .backward_plan import BackwardPlan, plan
from .modelled import L2_FOR_KV, Shape, fitted, one_cluster, their_versions
from .replays import SEED, Paths, Replayed, digest, kept, replayed, seeded
from .suite import Case

#: (seqlen, query heads of one KV head) of the small problems that costs are fitted to.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1))
#: The same for kernels with one tile a cluster, whose tiles are to be of different length.
SINGLE_SAMPLES = ((256, 1), (512, 1), (1024, 1))
KEYS = 128
#: Tensor-core clocks of 256 queries x 128 keys in a CTA pair, by products: dQ 3, or 1 from dS that
#: is kept, dK/dV 4.
UNIT_Q = 256
DQ, DQ_PRODUCT, DKDV = 3 * 1024.0, 1024.0, 4 * 1024.0
#: Bytes of dS in such a unit.
DS = 2.0 * UNIT_Q * KEYS


@dataclass(frozen=True)
class Order:
    """How a project orders tiles and shares them out.

    policy: see `sm100_sim.timing.problem.POLICIES`. sections: heads take turns so that they share
    L2, the longest tiles first; else one head after the other, blocks ascending. splits: groups of
    query heads are split where there are few KV heads. rows: of queries, what a dK/dV tile under a
    causal mask starts at a multiple of.
    """

    policy: str
    sections: bool
    splits: bool
    rows: int


@dataclass(frozen=True)
class Backward:
    """Both kernels. costs: kernel -> tile costs for each of the drawn machines; a function, because
    some are only replayed if a shape needs them. Kernels: "dq", "dkdv", "dkdv partial", and where
    dS is kept the same with "kept " before. ds_bytes: memory that dS may take, 0: it is not kept.
    paths: of the replays of each kernel that was asked for.
    """

    name: str
    head_dim: int
    order: Order
    values: list[Values]
    costs: Callable[[str], list[TileCosts]]
    ds_bytes: int = 0
    paths: dict[str, Paths] = field(default_factory=dict)

    def plan(self, shape: Shape) -> BackwardPlan:
        """Parts of each group of query heads, and the KV heads whose dS is kept at a time."""
        clusters = int(self.values[0].sms) // 2
        lengths = ((shape.seqlen, shape.seqlen),) * shape.batch
        case = Case("dense", lengths, shape.heads, shape.heads_kv, shape.causal)
        found = plan(case, self.ds_bytes, clusters)
        return found if self.order.splits else replace(found, splits=1)

    def run(self, shape: Shape, heads_kv: int | None = None) -> dict[str, list[Schedule]]:
        """dQ and dK/dV under each of the drawn machines, the central one first.

        heads_kv: so many of the KV heads only, those of one launch; all by default.
        """
        planned, (dq, dkdv) = self.plan(shape), self._names(shape)
        splits, keeps = planned.splits, planned.ds_heads > 0
        if heads_kv is not None:
            ratio = shape.heads // shape.heads_kv
            shape = replace(shape, heads=heads_kv * ratio, heads_kv=heads_kv)
        kernels = {
            "dq": (self._dq_tiles(shape, keeps), dq),
            "dkdv": (self._dkdv_tiles(shape, splits, keeps), dkdv),
        }
        return {
            kernel: [
                schedule(tiles, costs, values, 2, self.order.policy)
                for costs, values in zip(self.costs(which), self.values)
            ]
            for kernel, (tiles, which) in kernels.items()
        }

    def _names(self, shape: Shape) -> tuple[str, str]:
        """The dQ and the dK/dV kernel that a shape takes."""
        planned = self.plan(shape)
        kept_ds, partial = "kept " * (planned.ds_heads > 0), " partial" * (planned.splits > 1)
        return f"{kept_ds}dq", f"{kept_ds}dkdv{partial}"

    def paths_of(self, shape: Shape) -> Paths:
        """Of the replays behind a shape's prediction, which has been made."""
        return sum((self.paths.get(name, Paths()) for name in self._names(shape)), Paths())

    def seconds(self, shape: Shape) -> np.ndarray:
        """float64, all kernels one after the other, for each of the drawn machines."""
        planned = self.plan(shape)
        heads = planned.ds_heads or shape.heads_kv
        whole, rest = divmod(shape.heads_kv, heads)
        total = np.array([self._beside(shape, planned.splits, v) for v in self.values])
        for count, heads_kv in ((whole, heads), (int(rest > 0), rest)):
            if count:
                runs = self.run(shape, heads_kv).values()
                total += count * np.sum([[one.seconds for one in run] for run in runs], axis=0)
        return total

    def tflops(self, shape: Shape) -> np.ndarray:
        """The same as TFLOPS by `Shape.flop`, five products."""
        return shape.flop(self.head_dim, "backward") / self.seconds(shape) / 1e12

    def _beside(self, shape: Shape, splits: int, values: Values) -> float:
        """Seconds of the kernels that only read and write."""
        rows = shape.batch * shape.seqlen
        # out and dout read; LSE read, LSE and delta written.
        nbytes = [rows * shape.heads * (2 * 2 * self.head_dim + 3 * 4)]
        if splits > 1:
            elements = rows * shape.heads_kv * self.head_dim
            # For dK and dV: the parts summed, the sum converted.
            nbytes += [elements * (4 * splits + 4), elements * (4 + 2)] * 2
        rate = values.hbm_terabytes * 1e12
        return sum(n / rate + values.launch_us * 1e-6 for n in nbytes)

    def _indices(
        self, blocks: int, heads: int, shape: Shape, group: int, bytes_of_group: float, last: bool
    ) -> list[tuple[int, int, int]]:
        """(block, head, batch) of every tile in order. last: whether later blocks are longer."""
        pairs = heads * shape.batch
        if not self.order.sections:
            return [(i % blocks, i // blocks % heads, i // blocks // heads)
                    for i in range(blocks * pairs)]  # fmt: skip
        section = section_heads_for(
            num_heads_per_kv=group, num_pairs=pairs, kv_bytes_per_head=int(bytes_of_group),
            l2_bytes=L2_FOR_KV, unequal_lengths=shape.causal,
        )  # fmt: skip
        order = TileProblem(blocks, heads, shape.batch, section, last and shape.causal).order()
        return [tile_coordinates(index, order) for index in range(blocks * pairs)]

    def _dq_tiles(self, shape: Shape, keeps: bool = False) -> list[Tile]:
        """256 queries of a head each; keeps: from a dS that is kept."""
        blocks, ratio = -(-shape.seqlen // UNIT_Q), shape.heads // shape.heads_kv
        operand = 2.0 * self.head_dim
        # K and V are shared; Q, dO and dQ are not. With dS: K, and dQ beside what each unit reads.
        shared = (1 if keeps else 2) * operand * shape.seqlen
        own, work = (1 if keeps else 3) * operand * UNIT_Q, DQ_PRODUCT if keeps else DQ
        found = []
        for block, head, batch in self._indices(blocks, shape.heads, shape, ratio, shared, True):
            keys = min((block + 1) * UNIT_Q, shape.seqlen) if shape.causal else shape.seqlen
            group = batch * shape.heads_kv + head // ratio
            units = -(-keys // KEYS)
            found.append(Tile(work * units, group, shared, own + DS * units * keeps))
        return found

    def _dkdv_tiles(self, shape: Shape, splits: int, keeps: bool = False) -> list[Tile]:
        """128 keys of a part of a KV head each; keeps: dS is written."""
        blocks = -(-shape.seqlen // KEYS)
        ratio = shape.heads // shape.heads_kv
        part = -(-ratio // splits)
        shared = 4.0 * shape.seqlen * self.head_dim * part
        own = (4.0 + 2 * (4.0 if splits > 1 else 2.0)) * KEYS * self.head_dim
        heads = shape.heads_kv * splits
        found = []
        for block, head, batch in self._indices(blocks, heads, shape, 1, shared, False):
            begin = block * KEYS // self.order.rows * self.order.rows if shape.causal else 0
            units = (-(-shape.seqlen // self.order.rows) * self.order.rows - begin) / UNIT_Q
            units *= min(part, ratio - head % splits * part)
            nbytes = own + DS * units * keeps
            found.append(Tile(DKDV * units, batch * heads + head, shared, nbytes))
        return found


def our_backward(
    causal: bool, machine: Machine, draws: int, use_clc: bool = False,
    config: BackwardConfig | None = None,
) -> Backward:
    """Our dQ and dK/dV kernels under the static or the CLC scheduler."""
    policy, config = "dynamic" if use_clc else "static", config or BackwardConfig()

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        def call(seqlen: int, heads: int) -> tuple:
            return _our_call(which, (seqlen, heads), causal, use_clc, config)

        def make() -> list[Replayed]:
            found = []
            for seqlen, heads in SAMPLES:
                compiled, arguments, tiles = call(seqlen, heads)
                prediction = timing.predict(compiled, *arguments, machine=machine, draws=draws)
                found.append(replayed(prediction[-1], tiles))
            return found

        compiled, *_ = call(*SAMPLES[0])
        rows = kept((digest(compiled.cubin), which, SAMPLES), machine, draws, make)
        paths[which] = Paths.of(rows)
        return fitted(rows, policy)

    order, paths = Order(policy, True, True, UNIT_Q), {}
    values = machine.sampled(draws)
    return Backward("ours", HEAD_DIM, order, values, costs, config.ds_bytes, paths)


def _our_call(
    which: str, sample: tuple[int, int], causal: bool, use_clc: bool, config: BackwardConfig
) -> tuple:
    """(compiled kernel, arguments of a call on one CTA pair, tiles)."""
    seqlen, heads = sample
    generator = torch.Generator().manual_seed(SEED)
    q, k, v, dout = (
        torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).bfloat16()
        for n in (heads, 1, 1, heads)
    )
    options = Options.check(None, causal, (None, None), 0.0, use_clc)
    problem = BackwardProblem(Problem.describe((q, k, v), options), tuple(k.shape), False, 1)
    kind, keeps = which.removeprefix("kept ").removesuffix(" partial"), which.startswith("kept ")
    if which.endswith(" partial"):
        problem = replace(problem, splits=2)
    problem = replace(problem, ds_heads=int(keeps))
    stats = empty_stats(problem)
    # Rows as the preprocess kernel leaves them; their values decide no instruction.
    stats.zero_()
    dtype = torch.float32 if problem.splits > 1 else q.dtype
    kv_heads = problem.splits
    results = (
        (torch.empty_like(q),)
        if kind == "dq"
        else tuple(torch.empty(1, seqlen, kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
    )
    spec = kernel_specs(problem, config)[kind]
    # Zeros: a dS of another call would do as well, but no bits that are not numbers.
    ds = torch.zeros(problem.ds_shape(1), dtype=q.dtype) if keeps else None
    tensors = GradientTensors((q, k, v, dout), stats, results, (), ds)
    arguments = gradient_call_arguments(tensors, problem, 1, 0)
    blocks = -(-seqlen // UNIT_Q) * heads if kind == "dq" else -(-seqlen // KEYS) * kv_heads
    return compile_kernel(spec), arguments, blocks


def their_backward(head_dim: int, causal: bool, machine: Machine, draws: int) -> Backward:
    """flash-attn-4's dedicated backward at head_dim 256: one tile a cluster, blocks ascending.

    Raises ValueError for another head dimension, where its backward is one kernel that adds to dQ.
    """
    if head_dim != HEAD_DIM:
        raise ValueError(f"the backward of {flash_attn_4.PACKAGE} is modelled at 256 only")

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        def make() -> list[Replayed]:
            found = [_their_predictions(sample, causal, machine, draws)
                     for sample in SINGLE_SAMPLES]  # fmt: skip
            # dQ kernels first, then dK/dV.
            return [replayed(both[n], 1) for n in range(2) for both in found]

        what = their_versions(), "backward", head_dim, causal, SINGLE_SAMPLES, SEED
        rows = kept(what, machine, draws, make)
        count = len(SINGLE_SAMPLES)
        rows = rows[:count] if which == "dq" else rows[count:]
        paths[which] = Paths.of(rows)
        return fitted(rows, "single")

    order, paths = Order("single", False, False, KEYS), {}
    values = machine.sampled(draws)
    return Backward(flash_attn_4.PACKAGE, head_dim, order, values, costs, paths=paths)


def _their_predictions(
    sample: tuple[int, int], causal: bool, machine: Machine, draws: int
) -> tuple[timing.Prediction, timing.Prediction]:
    """Its dQ and dK/dV kernels, each on its longest cluster, through its own interface."""
    from flash_attn.cute.interface import flash_attn_func

    seqlen, heads = sample
    with timing.attached(machine, draws) as session, one_cluster(), seeded():
        q, k, v = (
            torch.randn(1, seqlen, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            .requires_grad_()
            for n in (heads, 1, 1)
        )
        out = flash_attn_func(q, k, v, causal=causal, num_splits=1)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.randn_like(out))
    named = {key: prediction for prediction in session.predictions
             for key in ("dqkernel", "dkdvkernel") if key in prediction.report.kernel}  # fmt: skip
    if len(named) != 2:
        kernels = [prediction.report.kernel for prediction in session.predictions]
        raise RuntimeError(f"expected a dQ and a dK/dV kernel, found {kernels}")
    return named["dqkernel"], named["dkdvkernel"]
