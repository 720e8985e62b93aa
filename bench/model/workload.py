"""Cases of the suite on the timing model: tiles of any mask and lengths, costs of any kernel.

Here are all forward kernels of ours, flash-attn-4's for what is not dense, and the tiles of both;
`modelled` has its dense ones, and what costs are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.peers import flash_attn_4
from bench.suite import Case
from fa4_hd256.call.forward_problem import Options, Problem, packed_heads
from fa4_hd256.call.portions import visible_keys
from fa4_hd256.call.splits import divided, splits_for
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.blackwell.forward.config import HEAD_DIM, ForwardConfig
from fa4_hd256.run.compile import compile_forward
from fa4_hd256.run.forward_arguments import CallTensors, call_arguments
from fa4_hd256.run.launch import empty_results
from schedulers import TileProblem, section_heads_for, tile_coordinates
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, Values
from sm100_sim.timing.problem import ALONE, Room, Schedule, Tile, schedule

from . import forward as modelled
from .replays import SEED, Paths, Replayed, digest, kept, replayed, seeded

STEP, ROWS = modelled.STEP, 256
ONE_PAIR = modelled.ONE_PAIR
#: Clocks of the tensor core in a step of 256 queries, of each CTA of a pair.
STEP_WORK = 4 * ROWS * STEP * HEAD_DIM / modelled.FLOP_PER_CLOCK / 2
#: (seqlen, heads) that the costs of a kernel are fitted to, and one tile of many steps: causal ones
#: of few tell little of the pace of many.
SAMPLES = ((256, 1), (512, 1), (512, 2), (1024, 1), (256, 1, None, 4096))
#: The same of flash-attn-4's kernels, which run one tile a cluster.
SINGLE_SAMPLES = ((256, 1), (512, 1), (1024, 1), (2048, 1))
#: (seqlen, heads, left bound) for windowed kernels. Where the bound is 256 every step is masked; in
#: the last two most are not. Costs of masked and unmasked steps follow from both. No sample is a
#: single short tile: one of two steps never reaches the pace of the loop.
WINDOW_SAMPLES = ((512, 1, 256), (1024, 1, 256), (1024, 1, 4096), (2048, 1, 1024))
#: Not in the fit, to hold its predictions against (`bench validate`).
HELD_OUT = ((1536, 1, 512), (2048, 1, 1536), (2304, 1, 1023))
#: The same for kernels whose keys are divided, each sample in `SAMPLE_SPLITS` parts; how many of
#: the 256 rows of a tile exist goes in their place.
SPLIT_SAMPLES = ((ROWS, 1, None, 1024), (ROWS, 2, None, 1024), (ROWS, 1, None, 2048))
SAMPLE_SPLITS = 2
#: As Gemma 2's.
SAMPLE_SOFTCAP = 50.0


#: (queries, heads), the left bound for windowed kernels, and the number of keys if it is another.
Samples = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class Kind:
    """What of a case is compiled into the kernel."""

    causal: bool
    window: bool = False
    softcap: bool = False
    packed: bool = False

    @classmethod
    def of(cls, case: Case) -> Kind:
        windowed = case.window != (None, None)
        return cls(case.bounds[1] == 0, windowed, bool(case.softcap), case.packed)

    @property
    def is_dense(self) -> bool:
        return not (self.window or self.softcap or self.packed)

    def samples(self, single: bool) -> Samples:
        """What costs are fitted to. single: of a kernel with one tile a cluster."""
        if self.window:
            return WINDOW_SAMPLES
        return SINGLE_SAMPLES if single else SAMPLES


@dataclass(frozen=True)
class Variant:
    """One of our kernels to predict. config, samples: None for the default ones. split_rows: for
    the kernel that divides the keys of a tile, how many rows of it exist, all in samples of
    windows; None for the other kernel."""

    kind: Kind
    use_clc: bool = False
    config: ForwardConfig | None = None
    samples: Samples | None = None
    split_rows: int | None = None

    @property
    def num_splits(self) -> int:
        """Parts of a tile in each sample."""
        return 1 if self.split_rows is None else SAMPLE_SPLITS

    def chosen_samples(self) -> Samples:
        if self.samples:
            return self.samples
        if self.split_rows is None or self.kind.window:
            return self.kind.samples(single=False)
        return tuple((self.split_rows, *others) for _, *others in SPLIT_SAMPLES)


def our_kernel(variant: Variant, machine: Machine, draws: int) -> modelled.Kernel:
    """Our forward, with costs fitted to replays of that kernel."""
    policy = "dynamic" if variant.use_clc else "static"
    replays = our_replays(variant, machine, draws)
    costs, config = modelled.fitted(replays, policy), variant.config or ForwardConfig()
    return modelled.Kernel(
        "ours", HEAD_DIM, ROWS, 2, policy, machine.sampled(draws), costs, config.ordered_tiles,
        packs_heads=True, paths=Paths.of(replays),
    )


def our_replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One CTA pair on each of the variant's samples, every tile of them run by it."""

    samples = variant.chosen_samples()

    def make() -> list[Replayed]:
        found = []
        for sample in samples:
            compiled, arguments = our_call(variant, sample)
            prediction = timing.predict(compiled, *arguments, machine=machine, draws=draws)[-1]
            masked = sum(masked for _, masked in _sample_work(sample))
            tiles = -(-sample[0] // ROWS) * sample[1] * variant.num_splits
            found.append(replayed(prediction, tiles, masked))
        return found

    compiled, _ = our_call(variant, samples[0])
    what = digest(compiled.cubin), variant.kind, samples
    return kept(what, machine, draws, make)


def _parts(
    queries: int, heads: int, left: int | None = None, keys: int | None = None
) -> tuple[int, int, int | None, int]:
    """(queries, heads, left bound, keys) of a sample."""
    return queries, heads, left, keys or queries


def _sample_work(sample: tuple[int | None, ...]) -> list[tuple[float, float]]:
    """(work, its masked part) of each tile of a sample; nothing masked without a window, where what
    the diagonal costs is the same for each tile and part of that."""
    queries, heads, left, keys = _parts(*sample)
    found = []
    for begin in range(0, queries, ROWS):
        tile = begin, min(begin + ROWS, queries)
        steps, masked = key_steps(*tile, (queries, keys), (left, 0))
        found.append((STEP_WORK * steps, 0.0 if left is None else STEP_WORK * masked))
    return found * heads


def our_call(variant: Variant, sample: tuple[int | None, ...]) -> tuple[Any, tuple]:
    """(compiled kernel, arguments of a call on one CTA pair)."""
    queries, heads, left, keys = _parts(*sample)
    kind, generator = variant.kind, torch.Generator().manual_seed(SEED)
    q, k, v = (
        torch.randn(1, rows, n, HEAD_DIM, generator=generator).bfloat16()
        for rows, n in ((queries, heads), (keys, 1), (keys, 1))
    )
    softcap = SAMPLE_SOFTCAP if kind.softcap else 0.0
    bounds = (left if kind.window else None, None)
    options = Options.check(None, kind.causal, bounds, softcap, variant.use_clc)
    ragged = {}
    if kind.packed:
        ragged = {
            name: torch.tensor([0, rows], dtype=torch.int32)
            for name, rows in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys))
        }
    longest = (queries, keys) if kind.packed else (None, None)
    problem = Problem.describe((q, k, v), options, None, ragged, *longest)
    problem = divided(problem, variant.num_splits, ONE_PAIR)
    compiled = compile_forward(variant.config or ForwardConfig(), problem.problem_class)
    results = empty_results(problem, parts=problem.num_splits > 1)
    tensors = CallTensors(q, k, v, *results, tuple(ragged.values()))
    return compiled, call_arguments(tensors, problem, ONE_PAIR, 0)


def their_kernel(kind: Kind, machine: Machine, draws: int) -> modelled.Kernel:
    """flash-attn-4's forward of a kind that is not dense: one tile a cluster, the longest first.

    Raises RuntimeError if it is not installed.
    """
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    replays = their_replays(kind, machine, draws)
    costs = modelled.fitted(replays, "single")
    name = flash_attn_4.PACKAGE
    return modelled.Kernel(
        name, HEAD_DIM, ROWS, 2, "single", machine.sampled(draws), costs, packs_heads=True,
        exact_grid=True, paths=Paths.of(replays),
    )


def their_replays(
    kind: Kind, machine: Machine, draws: int, samples: Samples | None = None
) -> list[Replayed]:
    """The longest cluster, one tile, on each of the samples, by default those of the kind."""
    samples = samples or kind.samples(single=True)

    def make() -> list[Replayed]:
        predictions = _their_predictions(kind, samples, machine, draws)
        return [
            replayed(prediction, 1, max(_sample_work(sample))[1])
            for sample, prediction in zip(samples, predictions, strict=True)
        ]

    return kept((modelled.their_versions(), kind, samples, SEED), machine, draws, make)


def _their_predictions(
    kind: Kind, samples: Samples, machine: Machine, draws: int
) -> list[timing.Prediction]:
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": kind.causal and not kind.window, "num_splits": 1}
    if kind.softcap:
        options["softcap"] = SAMPLE_SOFTCAP
    with timing.attached(machine, draws) as session, seeded():
        for seqlen, heads, *window in samples:
            if window:
                options["window_size"] = (window[0], 0)
            shape = (seqlen, heads, HEAD_DIM)
            q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            if kind.packed:
                offsets = torch.tensor([0, seqlen], dtype=torch.int32, device="cuda")
                lengths = {
                    "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
                    "max_seqlen_q": seqlen, "max_seqlen_k": seqlen,
                }  # fmt: skip
                flash_attn_varlen_func(q, k, v, **lengths, **options)
            else:
                flash_attn_func(q[None], k[None], v[None], **options)
    return session.predictions


def tiles(case: Case, kernel: modelled.Kernel) -> list[Tile]:
    """The tiles of a forward in the order in which they are worked on, those skipped included."""
    left, right = case.bounds
    queries, heads = kernel.tile_of_queries(case.heads, case.heads_kv)
    blocks = -(-case.seqlen_q // queries)
    ratio = heads // case.heads_kv
    unequal = case.packed or (left, right) != (None, None)
    keys = sum(k for _, k in case.lengths) if case.packed else case.seqlen_k
    section = section_heads_for(
        num_heads_per_kv=ratio, num_pairs=case.batch * kernel.num_splits * heads,
        kv_bytes_per_head=4 * HEAD_DIM * keys, l2_bytes=modelled.B200.l2_bytes_for_tiles,
        unequal_lengths=unequal,
    )  # fmt: skip
    splits = kernel.num_splits
    order = TileProblem(blocks, heads, case.batch * splits, section, right is not None).order()
    step = 4 * kernel.rows * STEP * kernel.head_dim / modelled.FLOP_PER_CLOCK / kernel.cluster
    # Q is read, O written; parts of it in float32.
    own_bytes = (4.0 if splits == 1 else 6.0) * kernel.rows * kernel.head_dim

    @functools.cache
    def of(block: int, lengths: tuple[int, int], part: int) -> tuple[float, float, float]:
        """(work, own bytes, masked work) of a block of queries, or a part of its keys; without a
        window masked work is not told apart (`_sample_work`)."""
        begin, end = block * queries, min((block + 1) * queries, lengths[0])
        if begin >= lengths[0]:
            return 0.0, 0.0, 0.0
        parts = Parts(part, splits, kernel.equal_parts)
        steps, masked = key_steps(begin, end, lengths, (left, right), parts=parts)
        return step * steps, own_bytes, step * masked * (left is not None)

    @functools.cache
    def seen(lengths: tuple[int, int]) -> int:
        """Keys of a sequence that any of its queries sees."""
        return len(visible_keys(0, lengths[0], lengths, (left, right)))

    found = []
    for index in range(order.num_tiles):
        block, head, entry = tile_coordinates(index, order)
        batch, part = divmod(entry, splits)
        lengths = case.lengths[batch]
        if kernel.exact_grid and case.packed and block * queries >= lengths[0]:
            continue
        shared = 4.0 * seen(lengths) * kernel.head_dim / splits
        work, own, masked = of(block, lengths, part)
        found.append(Tile(work, entry * case.heads_kv + head // ratio, shared, own, masked))
    return found


class Parts(NamedTuple):
    """Which part of how many; equal: see `modelled.Kernel`."""

    which: int = 0
    count: int = 1
    equal: bool = False

    def of(self, first: int, limit: int) -> tuple[int, int]:
        """Of the KV tiles first .. limit - 1 the first and the one behind the last."""
        whole = limit - first
        if self.equal:
            each = -(-whole // self.count)
            return tuple(first + min(n * each, whole) for n in (self.which, self.which + 1))
        return tuple(first + whole * n // self.count for n in (self.which, self.which + 1))


WHOLE = Parts()


def key_steps(
    begin: int, end: int, lengths: tuple[int, int], bounds: tuple[int | None, int | None],
    keys: int = STEP, parts: Parts = WHOLE,
) -> tuple[int, int]:
    """(KV tiles that the rows begin .. end - 1 see any key of, those of them with a key that not
    all of these rows see); the mask is bottom-right aligned. keys: of a KV tile. parts: of these KV
    tiles."""
    seen = visible_keys(begin, end, lengths, bounds)
    if not seen:
        return 0, 0
    seqlen_q, seqlen_k = lengths
    left, right = bounds
    offset = seqlen_k - seqlen_q
    # Keys that every row sees.
    common_first = 0 if left is None else max(0, end - 1 + offset - left)
    common_limit = seqlen_k if right is None else min(seqlen_k, begin + 1 + offset + right)
    first, limit = seen.start // keys, -(-seen.stop // keys)
    first, limit = parts.of(first, limit)
    unmasked = min(common_limit // keys, limit) - max(-(-common_first // keys), first)
    return limit - first, limit - first - max(0, unmasked)


def problem_of(case: Case) -> Problem:
    """A case as the operator describes it, without its tensors; bf16."""
    ragged = ("cu_seqlens_q", "cu_seqlens_k") if case.packed else ()
    rows = sum(q for q, _ in case.lengths) if case.packed else case.seqlen_q
    return Problem(
        (1 if case.packed else case.batch, rows, case.heads, HEAD_DIM), case.seqlen_q,
        case.seqlen_k, case.batch, torch.bfloat16, torch.device("cpu"), Options(1.0, case.bounds),
        False, ragged, packed_heads(case.heads // case.heads_kv, ragged),
    )  # fmt: skip


def default_splits(case: Case, gpu: Gpu) -> int:
    """Parts into which a call of ours divides the keys by default."""
    return splits_for(problem_of(case), gpu)


def combine_seconds(case: Case, splits: int, values: Values) -> float:
    """Of the kernel that makes one result of the parts."""
    rows = sum(q for q, _ in case.lengths) * case.heads
    nbytes = rows * (splits * (4 * HEAD_DIM + 4) + 2 * HEAD_DIM + 4)
    return modelled.memory_seconds(nbytes, values)


def run(case: Case, kernel: modelled.Kernel, room: Room = ALONE) -> list[Schedule]:
    """The case under each of the drawn machines, the central one first. room: of the machine that
    the launch gets."""
    listed = tiles(case, kernel)
    return [
        schedule(listed, costs, values, kernel.cluster, kernel.policy, room)
        for costs, values in zip(kernel.costs, kernel.values)
    ]
