"""Defaults against their alternatives under every accepted set of constants.

A `Choice` is something that a call decides for itself: candidates are ways of deciding it, among
them the default. For each case an alternative (a scheduler, a number of parts) takes a time under
each set; a candidate picks one alternative a case without knowing the set. Its loss is its time
over the least of all alternatives under the same set, less 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.suite import BACKWARD, FORWARD, Case, equal, ragged_lengths
from bench.tables.comparison import OURS
from fa4_hd256 import BackwardConfig, progress
from fa4_hd256.call.division import splits_for
from fa4_hd256.call.options import MOST_SPLITS
from fa4_hd256.kernels.blackwell.architecture import STORED, tuned
from fa4_hd256.kernels.blackwell.backward.config import DvPlan, ProductsPlan
from fa4_hd256.kernels.blackwell.forward.config import TILES, ForwardConfig
from fa4_hd256.kernels.context import CLAIM_STEPS
from fa4_hd256.run.kernel_names import in_words
from fa4_hd256.schedulers.choice import MOST_EMPTY, prefers_clc
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from lab.model import ours
from lab.model.backward import Backward
from lab.model.calls import (
    Kind,
    backward_problem,
    default_splits,
    defaults_to_clc,
    filling,
    forward_problem,
)
from lab.model.exp2 import replayed, with_mix
from lab.model.forward import Kernel
from lab.model.machines import gpu_of
from lab.model.ours import Variant
from lab.model.predictor import OURS_FORWARD, Predictor
from lab.model.tiles import DKDV, KEYS, STEP_WORK, Order
from lab.whole.conditions import BURST
from lab.whole.problem import Late


@dataclass(frozen=True)
class Decided:
    """A case. seconds: float64, of each alternative under each set of constants, all equally long.
    picks: candidate -> the alternative that it takes."""

    case: Case
    direction: str
    seconds: Mapping[Any, np.ndarray]
    picks: Mapping[str, Hashable]

    def losses(self) -> dict[str, np.ndarray]:
        """float64 (sets,), of each candidate."""
        least = np.min(list(self.seconds.values()), axis=0)
        return {name: self.seconds[pick] / least - 1 for name, pick in self.picks.items()}

    def best(self, first: Hashable, resolved: float = 0.0) -> Hashable:
        """The alternative of the least loss on average; `first` where it loses no more than
        `resolved` more."""
        least = np.min(list(self.seconds.values()), axis=0)
        means = {one: float(np.mean(taken / least)) for one, taken in self.seconds.items()}
        found = min(means, key=means.__getitem__)
        return first if means[first] - means[found] <= resolved else found


@dataclass(frozen=True)
class Choice:
    """default: the candidate that calls take. cases: that it is decided on. decide: (case,
    predictor) -> what the candidates make of it."""

    name: str
    default: str
    cases: Callable[[], Iterable[Case]]
    decide: Callable[[Case, Predictor], Decided]


GEMMA, QWEN, MANY = (8, 4), (16, 2), (8, 8)


def unequal_cases() -> list[Case]:
    """Tiles of different length: causal, windowed, packed, ragged; few and many of them."""
    return [
        *(
            Case("causal", equal(b, s), *heads, True)
            for heads in (QWEN, MANY)
            for b, s in ((16, 1024), (4, 4096), (2, 8192), (1, 16384), (1, 32768))
        ),
        *(Case("few KV heads", equal(1, s), 32, 2, True) for s in (2048, 8192)),
        Case("window", equal(8, 4096), *GEMMA, True, (512, None)),
        Case("window", equal(1, 65536), *GEMMA, True, (1023, None)),
        *(
            Case("ragged", ragged_lengths(count, longest, seed), *QWEN, causal, packed=True)
            for count, longest, seed in (
                (4, 16384, 0),
                (8, 8192, 0),
                (8, 8192, 1),
                (16, 8192, 1),
                (64, 4096, 0),
            )
            for causal in (True, False)
        ),
    ]


def all_cases() -> list[Case]:
    """Return the unequal cases, full attention, and packed sequences of equal length."""
    return [
        *unequal_cases(),
        *(
            Case("full", equal(b, s), *heads, False)
            for heads in (QWEN, MANY)
            for b, s in ((16, 1024), (4, 4096), (1, 16384))
        ),
        Case("full", equal(1, 4352), *QWEN, False),
        Case("ranges of queries", equal(1, 65536), *MANY, False),
        *(
            Case("varlen", equal(b, s), *QWEN, True, packed=True)
            for b, s in ((16, 1024), (4, 4096), (2048, 34))
        ),
    ]


def sparse_cases() -> list[Case]:
    """Add ragged batches that fill between a half and a sixth of their grid."""
    batches = (
        ragged_lengths(count, longest, seed)
        for count, longest in ((4, 2048), (8, 1024), (16, 2048), (32, 1024), (64, 512), (256, 512))
        for seed in (3, 4, 5)
    )
    ragged = (
        Case("ragged, sparse", lengths, *QWEN, causal, packed=True)
        for lengths in batches for causal in (True, False)
    )  # fmt: skip
    return [*all_cases(), *(case for case in ragged if 2 <= emptiness(case) <= 6)]


def emptiness(case: Case) -> float:
    """Query rows that the forward's grid has room for, for each one that is there."""
    rows, capacity = filling(case)
    return capacity / rows


#: Name -> order of tiles.
DEFAULT_ORDER = "half of L2, longest first"
ORDERS = {
    "one KV head at a time, longest first": Order(0.0),
    "a quarter of L2, longest first": Order(0.5),
    DEFAULT_ORDER: Order(),
    "all of L2, longest first": Order(2.0),
    "all heads, longest first": Order(math.inf),
    "half of L2, blocks upwards": Order(later_first=False),
    "half of L2, equal tiles too": Order(equal_too=True),
}


#: Orders of the forward alone.
FORWARD_ORDERS = ORDERS | {
    f"half of L2, 1 of {n} blocks, the shortest, last": Order(short_last=1 / n) for n in (8, 16)
}


def _order(case: Case, predictor: Predictor, direction: str) -> Decided:
    """Compare tile orders under the scheduler that the call takes."""
    clc, seconds = defaults_to_clc(case, direction), {}
    orders = FORWARD_ORDERS if direction == FORWARD else ORDERS
    for name, order in orders.items():
        kernel: Any = (
            predictor.forward(OURS, case, clc)
            if direction == FORWARD
            else predictor.backward(OURS, case, clc)
        )
        seconds[name] = replace(kernel, tiling=replace(kernel.tiling, order=order)).seconds(case)
    return Decided(case, direction, seconds, {name: name for name in orders})


def _scheduler(case: Case, predictor: Predictor, direction: str) -> Decided:
    predict = predictor.forward if direction == FORWARD else predictor.backward
    seconds = {clc: predict(OURS, case, clc).seconds(case) for clc in (False, True)}
    bounded = case.bounds != (None, None)
    picks = {"static": False, "CLC": True, "CLC where the mask is bounded": bounded}
    if direction == BACKWARD:
        picks |= {
            "bounded or ragged": bounded or case.packed,
            "bounded, ragged or grouped": bounded or case.packed or case.heads > case.heads_kv,
        }
    else:
        rows, capacity = filling(case)
        picks |= {
            _by_emptiness(most): prefers_clc(bounded, rows, capacity, most_empty=most)
            for most in (2, 4, MOST_EMPTY, 10)
        }
        picks["bounded, the same"] = bounded and prefers_clc(bounded, rows, capacity)
    return Decided(case, direction, seconds, picks)


def _by_emptiness(most: int) -> str:
    return f"bounded or ragged, 1 of {most} rows exists"


def split_cases() -> list[Case]:
    """Calls of few tiles, with the heads of Qwen3-Next and of Gemma."""
    shapes = [(b, 1, keys) for b in (1, 4, 8, 20) for keys in (1024, 2048, 8192, 32768, 131072)]
    shapes += [(8, 4, 8192), (1, 128, 8192), (1, 512, 2048), (1, 512, 8192), (1, 512, 32768)]
    shapes += [(8, 128, 4096), (2, 1024, 8192)]
    return [
        *(
            Case("decoding" if q == 1 else "chunk", equal(b, q, keys), *QWEN, True)
            for b, q, keys in shapes
        ),
        *(Case("decoding", equal(b, 1, 8192), 32, 2, True) for b in (1, 16, 32)),
        Case("window", equal(1, 1, 65536), *GEMMA, True, (1023, None)),
    ]


DEFAULT_SPLITS = "the rule"
SPLIT_RULES = {
    DEFAULT_SPLITS: TILES,
    **{f"{n:g} steps saved": replace(TILES, least_saved=n) for n in (0.0, 1.0, 3.0, 5.0)},
    "at most 32 parts": replace(TILES, most_parts=32),
    **{f"a part takes {n:g} beside": replace(TILES, part_steps=n) for n in (0.5, 2.0, 3.0)},
}


def _splits(case: Case, predictor: Predictor) -> Decided:
    """Compare KV splits of the forward's own tiles, also where calls of few rows take others."""
    config = OURS_FORWARD.config
    clc, gpu = defaults_to_clc(case, FORWARD), gpu_of(predictor.machine)
    # Parts without a step are no alternative.
    most = max(1, min(MOST_SPLITS, -(-case.seqlen_k // KEYS)))
    seconds = {
        n: predictor.predict_forward(OURS_FORWARD.name, case, clc, n).seconds
        for n in range(1, most + 1)
    }
    problem = forward_problem(case, config=config)
    picks = {name: splits_for(problem, gpu, rule) for name, rule in SPLIT_RULES.items()}
    assert picks[DEFAULT_SPLITS] == default_splits(case, gpu, config)
    return Decided(case, FORWARD, seconds, {"not divided": 1, **picks})


def stage_cases() -> list[Case]:
    """A few of each kind of kernel."""
    return [
        Case("full", equal(4, 4096), *QWEN, False),
        *(Case("causal", equal(b, s), *QWEN, True) for b, s in ((16, 1024), (2, 8192))),
        Case("window", equal(8, 4096), *GEMMA, True, (512, None)),
    ]


DEFAULT_STAGES = "as shipped"
FORWARD_STAGES = {DEFAULT_STAGES: ForwardConfig(), "one S buffer": ForwardConfig(s_stages=1)}
BACKWARD_STAGES = {
    DEFAULT_STAGES: BackwardConfig(),
    **{f"ring of dV: {n}": BackwardConfig(dv=DvPlan(ring_stages=n)) for n in (4, 5)},
    "products: 2": BackwardConfig(products=ProductsPlan(stages=2)),
}


def _stages(case: Case, predictor: Predictor, direction: str) -> Decided:
    configs: Mapping[str, Any]
    configs = FORWARD_STAGES if direction == FORWARD else BACKWARD_STAGES
    base: Any = ours.Ours().variant(case, direction, defaults_to_clc(case, direction))
    seconds = {
        name: _of_variant(replace(base, config=config), direction, predictor).seconds(case)
        for name, config in configs.items()
    }
    return Decided(case, direction, seconds, {name: name for name in configs})


def mix_cases() -> list[Case]:
    """Return cases of each kind of kernel whose softmax differs."""
    return [
        Case("full", equal(4, 4096), *QWEN, False),
        *(Case("causal", equal(b, s), *QWEN, True) for b, s in ((16, 1024), (2, 8192))),
        *(
            Case("softcap", equal(4, 4096), *GEMMA, causal, softcap=50.0)
            for causal in (False, True)
        ),
    ]


DEFAULT_MIX = "hardware"
#: Degree 3, a share of all fragments, of the last one none.
MIXES = {
    DEFAULT_MIX: HARDWARE_ONLY,
    **{
        f"{share:g} % emulated": Ex2Pattern(freq, res)
        for share, freq, res in ((9.375, 16, 2), (18.75, 8, 2), (37.5, 4, 2), (75, 4, 4))
    },
}


def _mixes(case: Case, predictor: Predictor) -> Decided:
    gpu, kind = gpu_of(predictor.machine), Kind.of(case)
    config = tuned(TILES, case.causal, case.seqlen_k, gpu.tuning_name, paged=False)
    assert config.ex2_pattern == MIXES[DEFAULT_MIX]
    kernel = predictor.forward(OURS, case, defaults_to_clc(case, FORWARD))
    runs = {}
    for name, pattern in MIXES.items():
        with progress.step(f"replaying {in_words(kind) or 'full'} with {name}"):
            runs[name] = replayed(pattern, kind, predictor.machine, predictor.draws)
    seconds = {
        name: with_mix(kernel, run, runs[DEFAULT_MIX]).seconds(case) for name, run in runs.items()
    }
    return Decided(case, FORWARD, seconds, {name: name for name in MIXES})


def _of_variant(variant: Variant, direction: str, predictor: Predictor) -> Kernel | Backward:
    make = ours.Ours().forward if direction == FORWARD else ours.Ours().backward
    with progress.step(f"replaying {OURS}, {direction}: {in_words(variant) or 'full'}"):
        return make(variant, predictor.machine, predictor.draws)


def _late(steps: int, step: float) -> Late:
    """Claimed when so many steps are left to load, of so much work each."""
    return Late((steps + ours.LOADS_AHEAD) * step)


DEFAULT_CLAIM = f"{CLAIM_STEPS} steps left to load"
#: When the next tile is claimed under CLC: name -> as `lab.whole.problem.schedule` takes it, by the
#: work of a step.
CLAIMS: dict[str, Callable[[float], Late | int]] = {
    "as a tile begins": lambda step: 1,
    **{f"{n} steps left to load": functools.partial(_late, n) for n in (1, 2, 3, 4, 6)},
}


def _claims(case: Case, predictor: Predictor, direction: str) -> Decided:
    predict = predictor.forward if direction == FORWARD else predictor.backward
    kernel: Any = predict(OURS, case, True)
    step = STEP_WORK if direction == FORWARD else DKDV
    seconds = {
        name: replace(kernel, tiling=replace(kernel.tiling, claims=claims(step))).seconds(case)
        for name, claims in CLAIMS.items()
    }
    return Decided(case, direction, seconds, {name: name for name in CLAIMS})


def grouped_cases() -> list[Case]:
    """Few KV heads, few and many sequences."""
    heads = ((16, 1), (16, 2), (32, 2), (24, 4), (12, 4), (16, 4), (8, 4))
    shapes = [
        (1, 1024, True), (1, 2048, True), (1, 4096, True), (1, 8192, True), (1, 2048, False),
        (1, 8192, False), (4, 2048, True), (8, 1024, True),
    ]  # fmt: skip
    return [
        *(Case("grouped", equal(b, s), *of, causal) for of in heads for b, s, causal in shapes),
        Case("window", equal(1, 8192), *QWEN, True, (1023, None)),
        Case("ragged", ragged_lengths(8, 4096), *QWEN, True, packed=True),
    ]


DEFAULT_PARTS = "the estimate"
ESTIMATES = {
    DEFAULT_PARTS: STORED,
    **{f"a tile takes {n:g} steps beside": replace(STORED, overhead=n) for n in (0.5, 2.0, 4.0)},
    **{
        f"a part of {n:g} MB": replace(STORED, part_bytes=n * 1e6)
        for n in (0.5, 1.0, 1.2, 1.4, 1.6, 2.0, 4.0)
    },
    **{f"products {n:g} of a step": replace(STORED, products=n) for n in (0.0, 0.7, 1.0)},
}


def _head_parts(case: Case, predictor: Predictor) -> Decided:
    """Compare head parts of a call whose dS is stored as a whole."""
    kernel: Any = predictor.backward(OURS, case, defaults_to_clc(case, BACKWARD))
    gpu = gpu_of(predictor.machine)
    (chunk,) = kernel.plan(case)
    if not chunk.keeps_ds or chunk.adds or chunk.count > 1:
        raise ValueError(f"{case}: dS of the call is not stored as a whole")
    problem, group = replace(backward_problem(case), keeps_ds=True), case.heads // case.heads_kv
    numbers = sorted({-(-group // -(-group // n)) for n in range(1, group + 1)})
    calls = {n: kernel.calls_of(case, [replace(chunk, head_parts=n)]) for n in numbers}
    seconds = {
        n: np.array([one.seconds(v, BURST) for one, v in zip(found, kernel.values)])
        for n, found in calls.items()
    }
    picks = {
        name: problem.head_parts_for(case.heads_kv, case.batch, gpu, estimate)
        for name, estimate in ESTIMATES.items()
    }
    assert picks[DEFAULT_PARTS] == chunk.head_parts
    return Decided(case, BACKWARD, seconds, {"not divided": 1, "by query head": group, **picks})


def memory_cases() -> list[Case]:
    """Return cases whose dS is larger than the smaller candidates."""
    shapes = ((2, 16384), (1, 32768), (1, 65536), (1, 131072))
    return [
        *(Case("dense", equal(b, s), *MANY, causal) for causal in (False, True) for b, s in shapes),
        *(Case("few KV heads", equal(1, s), 32, 2, True) for s in (16384, 32768)),
        *(Case("full", equal(1, 32768), *heads, False) for heads in (QWEN, (24, 4), (16, 16))),
        Case("full", equal(1, 49152), *MANY, False),
    ]


DEFAULT_MEMORY = "8 GiB"
MEMORY = {f"{n} GiB": n << 30 for n in (1, 2, 4, 8, 16)}


def _memory(case: Case, predictor: Predictor) -> Decided:
    """Compare memory limits of dS under the scheduler that the call takes."""
    assert MEMORY[DEFAULT_MEMORY] == BackwardConfig().ds_bytes
    kernel: Any = predictor.backward(OURS, case, defaults_to_clc(case, BACKWARD))
    seconds = {name: replace(kernel, ds_bytes=most).seconds(case) for name, most in MEMORY.items()}
    return Decided(case, BACKWARD, seconds, {name: name for name in MEMORY})


def _directed(decide: Callable, direction: str) -> Callable[[Case, Predictor], Decided]:
    return functools.partial(decide, direction=direction)


def choices() -> Iterator[Choice]:
    """All that is decided here."""
    forward, backward = (lambda f, d=d: _directed(f, d) for d in (FORWARD, BACKWARD))
    yield Choice("order, forward", DEFAULT_ORDER, all_cases, forward(_order))
    yield Choice("order, backward", DEFAULT_ORDER, all_cases, backward(_order))
    yield Choice("scheduler, forward", _by_emptiness(MOST_EMPTY), sparse_cases, forward(_scheduler))
    yield Choice("scheduler, backward", "CLC", all_cases, backward(_scheduler))
    yield Choice("claims, forward", DEFAULT_CLAIM, unequal_cases, forward(_claims))
    yield Choice("claims, backward", DEFAULT_CLAIM, unequal_cases, backward(_claims))
    yield Choice("splits", DEFAULT_SPLITS, split_cases, _splits)
    yield Choice("parts of a group", DEFAULT_PARTS, grouped_cases, _head_parts)
    yield Choice("memory for dS", DEFAULT_MEMORY, memory_cases, _memory)
    yield Choice("exp2 mix", DEFAULT_MIX, mix_cases, _mixes)
    yield Choice("stages, forward", DEFAULT_STAGES, stage_cases, forward(_stages))
    yield Choice("stages, backward", DEFAULT_STAGES, stage_cases, backward(_stages))


CHOICES = {one.name: one for one in choices()}
