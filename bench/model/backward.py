"""The backward on the timing model: dQ and dK/dV kernels over tiles, and what runs beside them.

The two kernels are replayed and fitted like the forward (`workload`). Ours run portion by portion,
as the operator does (`backward_plan`), and keep dS between them where it fits. The kernels around
them do nothing but read and write: the rows' statistics before, and the sum over the parts of dK
and dV after, where our kernel splits a group of query heads. They are taken at HBM's rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from fa4_hd256 import BackwardConfig
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Options, Problem
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.blackwell.forward.config import HEAD_DIM
from fa4_hd256.run.backward import empty_stats, kernel_specs
from fa4_hd256.run.backward_arguments import GradientTensors, gradient_call_arguments
from fa4_hd256.run.compile import compile_kernel
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, Values
from sm100_sim.timing.problem import ALONE, Room, Schedule, TileCosts, schedule

from .backward_plan import Portion, plan
from .backward_tiles import (
    DKDV,
    DQ,
    KEYS,
    ROW,
    UNIT_Q,
    Order,
    dkdv_tiles,
    dkdv_units,
    dq_tiles,
    dq_units,
)
from .forward import B200, ONE_PAIR, fitted, gpu_of, memory_seconds, one_cluster, their_versions
from .replays import SEED, Paths, Replayed, digest, kept, replayed, seeded
from .workload import SAMPLE_SOFTCAP, Kind, Samples

#: (seqlen, query heads of one KV head) of the small problems that costs are fitted to.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1))
#: The same for kernels with one tile a cluster, whose tiles are to be of different length.
SINGLE_SAMPLES = ((256, 1), (512, 1), (1024, 1))
#: (seqlen, query heads, left bound) of windowed kernels; see `workload.WINDOW_SAMPLES`.
WINDOW_SAMPLES = ((512, 1, 256), (1024, 1, 256), (1024, 1, 4096), (2048, 1, 1024))
#: Packed sequences whose longest is said to be 4096, but there is only one of 256: what an empty
#: tile costs.
EMPTY_SAMPLE, LONGEST = (256, 1), 4096
#: Not in the fit, to hold its predictions against (`bench validate`).
HELD_OUT = ((1280, 1, 512), (1536, 1, 1023))
FLOAT_BYTES = 4.0


@dataclass(frozen=True)
class Backward:
    """Both kernels of a kind. costs: kernel -> tile costs for each of the drawn machines; a
    function, because some are only replayed if a case needs them. Kernels: "dq", "dkdv", "dkdv
    partial", and where dS is kept the same with "kept " before. ds_bytes: memory that dS may take,
    0: it is not kept. paths: of the replays of each kernel that was asked for. gpu: what the
    division of a call follows.
    """

    name: str
    order: Order
    values: list[Values]
    costs: Callable[[str], list[TileCosts]]
    ds_bytes: int = 0
    paths: dict[str, Paths] = field(default_factory=dict)
    gpu: Gpu = B200

    def plan(self, case: Case) -> list[Portion]:
        """The launches of a case."""
        found = plan(case, self.ds_bytes, self.gpu)
        return found if self.order.splits else [replace(one, splits=1) for one in found]

    def run(self, portion: Portion, room: Room = ALONE) -> dict[str, list[Schedule]]:
        """dQ and dK/dV of a portion, once, under each of the drawn machines, the central one
        first. room: of the machine that each launch gets."""
        case, keeps, (dq, dkdv) = portion.case, portion.keeps_ds, _names(portion)
        kernels = {
            "dq": (dq_tiles(case, self.order, keeps), dq),
            "dkdv": (
                dkdv_tiles(case, self.order, portion.splits, keeps, portion.partial), dkdv
            ),
        }
        return {
            kernel: [
                schedule(tiles, costs, values, 2, self.order.policy, room)
                for costs, values in zip(self.costs(which), self.values)
            ]
            for kernel, (tiles, which) in kernels.items()
        }

    def paths_of(self, case: Case) -> Paths:
        """Of the replays behind a case's prediction, which has been made."""
        names = {name: None for portion in self.plan(case) for name in _names(portion)}
        return sum((self.paths.get(name, Paths()) for name in names), Paths())

    def seconds(self, case: Case, room: Room = ALONE) -> np.ndarray:
        """float64, all kernels one after the other, for each of the drawn machines. room: that
        those of CTA pairs get."""
        portions = self.plan(case)
        total = np.array([self._beside(case, portions, values) for values in self.values])
        for portion in portions:
            runs = self.run(portion, room).values()
            total += portion.count * np.sum([[one.seconds for one in run] for run in runs], axis=0)
        return total

    def tflops(self, case: Case) -> np.ndarray:
        """The same as TFLOPS by `Case.flop`, five products."""
        return case.flop(BACKWARD) / self.seconds(case) / 1e12

    def _beside(self, case: Case, portions: Sequence[Portion], values: Values) -> float:
        """Seconds of the kernels that only read and write."""
        rows = sum(q for q, _ in case.lengths)
        # out and dout read; LSE read, LSE and delta written.
        nbytes = [rows * case.heads * (2 * ROW + 3 * FLOAT_BYTES)]
        # For dK and dV: the parts summed, the sum converted.
        partial = [one for one in portions if one.partial]
        if partial and not partial[0].adds:
            sums = (_key_elements(one) * FLOAT_BYTES * (one.splits + 1) for one in partial)
            nbytes += [sum(sums)] * 2
        for one in (one for one in partial if one.adds):
            # Summed, then read with what others gave, and written.
            each = _key_elements(one) * FLOAT_BYTES / one.count
            nbytes += [each * (one.splits + 1), each * 3] * 2 * one.count
        if partial:
            elements = sum(k for _, k in case.lengths) * case.heads_kv * HEAD_DIM
            nbytes += [elements * (FLOAT_BYTES + 2)] * 2
        return sum(memory_seconds(n, values) for n in nbytes)


def _names(portion: Portion) -> tuple[str, str]:
    """The dQ and the dK/dV kernel that a portion takes."""
    kept_ds, partial = "kept " * portion.keeps_ds, " partial" * portion.partial
    return f"{kept_ds}dq", f"{kept_ds}dkdv{partial}"


def _key_elements(portion: Portion) -> int:
    """Elements of k, all portions of this kind."""
    case = portion.case
    return portion.count * sum(k for _, k in case.lengths) * case.heads_kv * HEAD_DIM


def samples(kind: Kind, single: bool) -> Samples:
    """What costs are fitted to. single: of kernels with one tile a cluster."""
    if kind.window:
        return WINDOW_SAMPLES
    return SINGLE_SAMPLES if single else SAMPLES


@dataclass(frozen=True)
class Variant:
    """Our kernels of a kind. config: None for the default one."""

    kind: Kind
    use_clc: bool = False
    config: BackwardConfig | None = None


def our_backward(variant: Variant, machine: Machine, draws: int) -> Backward:
    """Our dQ and dK/dV kernels under the static or the CLC scheduler."""
    policy = "dynamic" if variant.use_clc else "static"

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        rows = our_replays(variant, which, machine, draws)
        found = fitted(rows, policy)
        if variant.kind.packed:
            rows = [*rows, *_our_empty_replays(variant, which, machine, draws)]
            found = _with_empty_tiles(found, rows[0], rows[-1])
        paths[which] = Paths.of(rows)
        return found

    order, paths = Order(policy, True, True, UNIT_Q), {}
    config = variant.config or BackwardConfig()
    return Backward(
        "ours", order, machine.sampled(draws), costs, config.ds_bytes, paths, gpu_of(machine)
    )


def our_replays(
    variant: Variant, which: str, machine: Machine, draws: int, chosen: Samples | None = None
) -> list[Replayed]:
    """One CTA pair on each of the samples, by default those of the kind, every tile of them run by
    it. which: the kernel, see `Backward`."""
    chosen = chosen or samples(variant.kind, single=False)

    def make() -> list[Replayed]:
        found = []
        for sample in chosen:
            compiled, arguments = our_call(variant, which, sample)
            prediction = timing.predict(compiled, *arguments, machine=machine, draws=draws)
            tiles, masked = _sample_tiles(which, sample)
            found.append(replayed(prediction[-1], tiles, masked))
        return found

    compiled, _ = our_call(variant, which, chosen[0])
    return kept((digest(compiled.cubin), which, chosen), machine, draws, make)


def _our_empty_replays(
    variant: Variant, which: str, machine: Machine, draws: int
) -> list[Replayed]:
    """One, of `EMPTY_SAMPLE` on a grid for `LONGEST`; its tiles are those of the grid."""

    def make() -> list[Replayed]:
        prediction = timing.predict(compiled, *arguments, machine=machine, draws=draws)[-1]
        return [replayed(prediction, _sample_tiles(which, (LONGEST, 1))[0])]

    compiled, arguments = our_call(variant, which, EMPTY_SAMPLE, LONGEST)
    return kept((digest(compiled.cubin), which, EMPTY_SAMPLE, LONGEST), machine, draws, make)


def _with_empty_tiles(
    costs: list[TileCosts], without: Replayed, some: Replayed
) -> list[TileCosts]:
    """Costs with those of an empty tile. without, some: replays that differ in such tiles only."""
    tiles = some.tiles - without.tiles
    return [
        replace(one, empty=(more - less) / tiles)
        for one, more, less in zip(costs, some.clocks, without.clocks, strict=True)
    ]


def _sample_tiles(which: str, sample: tuple[int, ...]) -> tuple[int, float]:
    """(tiles, masked work in all) of a sample; nothing masked without a window, where what the
    diagonal costs is the same for each tile and part of that, nor in a product of a kept dS."""
    (seqlen, heads, *window), is_dq = sample, which.endswith("dq")
    lengths = seqlen, seqlen
    # Where parts of a group are summed, each of the two heads' parts has tiles of its own.
    parts = 2 if which.endswith(" partial") else 1
    blocks = -(-seqlen // UNIT_Q) * heads if is_dq else -(-seqlen // KEYS) * parts
    if not window or which == "kept dq":
        return blocks, 0.0
    bounds = window[0], 0
    if is_dq:
        units = [dq_units(block, lengths, bounds) for block in range(-(-seqlen // UNIT_Q))]
        return blocks, DQ * heads * sum(masked for _, masked in units)
    units = [dkdv_units(block, lengths, bounds, UNIT_Q) for block in range(-(-seqlen // KEYS))]
    return blocks, DKDV * heads * sum(masked for _, masked in units)


def our_call(
    variant: Variant, which: str, sample: tuple[int, ...], longest: int | None = None
) -> tuple:
    """(compiled kernel, arguments of a call on one CTA pair). longest: length that packed sequences
    are said to have at most, by default that of the sample."""
    seqlen, heads, *window = sample
    kind, keeps = variant.kind, which.startswith("kept ")
    generator = torch.Generator().manual_seed(SEED)
    q, k, v, dout = (
        torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).bfloat16()
        for n in (heads, 1, 1, heads)
    )
    bounds, softcap = (window[0] if kind.window else None, None), SAMPLE_SOFTCAP * kind.softcap
    options = Options.check(None, kind.causal, bounds, softcap, variant.use_clc)
    ragged = {}
    if kind.packed:
        offsets = torch.tensor([0, seqlen], dtype=torch.int32)
        ragged = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    limits = (longest or seqlen,) * 2 if kind.packed else (None, None)
    forward = Problem.describe((q, k, v), options, None, ragged, *limits)
    splits = 2 if which.endswith(" partial") else 1
    problem = BackwardProblem(forward, tuple(k.shape), False, splits, keeps_ds=keeps)
    stats = empty_stats(problem)
    # Rows as the preprocess kernel leaves them; their values decide no instruction.
    stats.zero_()
    dtype = torch.float32 if splits > 1 else q.dtype
    is_dq = which.endswith("dq")
    results = (
        (torch.empty_like(q),)
        if is_dq
        else tuple(torch.empty(1, seqlen, splits, HEAD_DIM, dtype=dtype) for _ in range(2))
    )
    spec = kernel_specs(problem, variant.config or BackwardConfig())["dq" if is_dq else "dkdv"]
    # Zeros: a dS of another call would do as well, but no bits that are not numbers.
    ds = torch.zeros(problem.ds_shape, dtype=q.dtype) if keeps else None
    tensors = GradientTensors((q, k, v, dout), stats, results, tuple(ragged.values()), ds)
    return compile_kernel(spec), gradient_call_arguments(tensors, problem, ONE_PAIR, 0)


def their_backward(kind: Kind, machine: Machine, draws: int) -> Backward:
    """flash-attn-4's dedicated backward at head_dim 256: one tile a cluster, blocks ascending.

    Raises RuntimeError if it is not installed, ValueError for a kind that it refuses.
    """
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    reason = flash_attn_4.backward_refusal(kind.window, kind.softcap)
    if reason:
        raise ValueError(f"{flash_attn_4.PACKAGE}: {reason}")
    count = len(SINGLE_SAMPLES)

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        def make() -> list[Replayed]:
            found = [_their_predictions(sample, kind, machine, draws)
                     for sample in SINGLE_SAMPLES]  # fmt: skip
            # dQ kernels first, then dK/dV.
            return [replayed(both[n], 1) for n in range(2) for both in found]

        packed = ("packed",) * kind.packed
        what = their_versions(), BACKWARD, HEAD_DIM, kind.causal, SINGLE_SAMPLES, SEED, *packed
        rows = kept(what, machine, draws, make)
        rows = rows[:count] if which == "dq" else rows[count:]
        found = fitted(rows, "single")
        if kind.packed:
            rows = [*rows, _their_empty_replays(kind, machine, draws)[which == "dkdv"]]
            found = [replace(one, empty=clocks) for one, clocks in zip(found, rows[-1].clocks)]
        paths[which] = Paths.of(rows)
        return found

    order, paths = Order("single", False, False, KEYS), {}
    return Backward(flash_attn_4.PACKAGE, order, machine.sampled(draws), costs, paths=paths)


def _their_predictions(
    sample: tuple[int, int], kind: Kind, machine: Machine, draws: int
) -> tuple[timing.Prediction, timing.Prediction]:
    """Its dQ and dK/dV kernels, each on its longest cluster, through its own interface."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    seqlen, heads = sample
    with timing.attached(machine, draws) as session, one_cluster(), seeded():
        q, k, v = (
            torch.randn(1, seqlen, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            for n in (heads, 1, 1)
        )
        options = {"causal": kind.causal, "num_splits": 1}
        if kind.packed:
            offsets = torch.tensor([0, seqlen], dtype=torch.int32, device="cuda")
            options |= {
                "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
                "max_seqlen_q": seqlen, "max_seqlen_k": seqlen,
            }  # fmt: skip
            q, k, v = q[0], k[0], v[0]
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = (flash_attn_varlen_func if kind.packed else flash_attn_func)(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.randn_like(out))
    return _dq_and_dkdv(session.predictions)


def _their_empty_replays(kind: Kind, machine: Machine, draws: int) -> list[Replayed]:
    """Its dQ and dK/dV kernels, a cluster whose sequence is empty."""
    from flash_attn.cute.interface import _flash_attn_bwd

    def make() -> list[Replayed]:
        rows = torch.zeros(UNIT_Q, 1, HEAD_DIM, dtype=torch.bfloat16)
        offsets = torch.zeros(2, dtype=torch.int32)
        with timing.attached(machine, draws) as session, one_cluster():
            _flash_attn_bwd(
                *[rows] * 5, torch.zeros(1, UNIT_Q), causal=kind.causal, cu_seqlens_q=offsets,
                cu_seqlens_k=offsets, max_seqlen_q=UNIT_Q, max_seqlen_k=UNIT_Q,
            )  # fmt: skip
        return [replayed(prediction, 1) for prediction in _dq_and_dkdv(session.predictions)]

    what = their_versions(), BACKWARD, HEAD_DIM, kind.causal, "empty"
    return kept(what, machine, draws, make)


def _dq_and_dkdv(
    predictions: Sequence[timing.Prediction],
) -> tuple[timing.Prediction, timing.Prediction]:
    named = {key: prediction for prediction in predictions
             for key in ("dqkernel", "dkdvkernel") if key in prediction.report.kernel}  # fmt: skip
    if len(named) != 2:
        kernels = [prediction.report.kernel for prediction in predictions]
        raise RuntimeError(f"expected a dQ and a dK/dV kernel, found {kernels}")
    return named["dqkernel"], named["dkdvkernel"]
