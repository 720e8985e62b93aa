"""dK and dQ as products of a dS that is made here, by the kernel alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from ds_images import to_tiles
from single_launch import launch

import sm100_sim
from fa4_hd256 import BackwardConfig
from fa4_hd256.architectures import named
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_stats
from fa4_hd256.kernels.backward.gemm_order import GemmOrder
from fa4_hd256.kernels.blackwell.forward.config import TILES
from fa4_hd256.kernels.mask.masking import MaskKind
from fa4_hd256.run.backward_arguments import GradientTensors, gradient_call_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

BLACKWELL = named("sm_100a")
BF16, FP16 = torch.bfloat16, torch.float16
FULL, CAUSAL = (None, None), (None, 0)


class Case(NamedTuple):
    """lengths: (queries, keys) of each sequence; heads: (query, key/value); ragged: "", "packed",
    "used" for lengths in use of padded sequences."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (1, 1)
    window: tuple[int | None, int | None] = FULL
    head_parts: int = 1
    dtype: torch.dtype = BF16
    ragged: str = ""
    use_clc: bool = False
    scale: float = 1 / 16


CASES = {
    "one block": Case(((256, 256),)),
    "one row": Case(((1, 1),)),
    "several blocks, rests": Case(((300, 600),)),
    "fp16, more queries than keys": Case(((700, 130),), dtype=FP16),
    "causal, GQA": Case(((520, 520),), (3, 1), CAUSAL),
    "causal, some queries see nothing": Case(((700, 300),), (2, 1), CAUSAL),
    "causal, more keys": Case(((300, 700),), window=CAUSAL),
    "parts": Case(((300, 520),), (4, 2), head_parts=2),
    "a short last part": Case(((300, 300),), (5, 1), CAUSAL, head_parts=3),
    "an empty last part": Case(((300, 300),), (4, 1), head_parts=3),
    "window": Case(((900, 900),), (2, 2), (200, 100)),
    "left bound": Case(((600, 520),), window=(130, None)),
    "right bound": Case(((520, 600),), window=(None, 100)),
    "batch, negative scale": Case(((300, 300),) * 2, (2, 1), CAUSAL, scale=-0.1),
    "packed": Case(((300, 520), (0, 100), (130, 0), (5, 260)), (2, 1), CAUSAL, ragged="packed"),
    "packed, parts, fp16": Case(
        ((300, 300), (260, 513)), (2, 1), (200, 0), 2, dtype=FP16, ragged="packed"
    ),
    "lengths in use": Case(((300, 200), (513, 520), (0, 300)), (2, 1), ragged="used"),
    "dynamic": Case(((520, 520), (300, 100)), (4, 2), CAUSAL, ragged="packed", use_clc=True),
}


def visible(queries: int, keys: int, window) -> torch.Tensor:
    """bool (queries, keys): the mask, aligned to the end of both."""
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    found = torch.ones(queries, keys, dtype=torch.bool)
    left, right = window
    if left is not None:
        found &= distance >= -left
    if right is not None:
        found &= distance <= right
    return found


def describe(case: Case, q: torch.Tensor, k: torch.Tensor, ragged: dict) -> BackwardProblem:
    longest = [max(side) for side in zip(*case.lengths)]
    options = Options(case.scale, case.window, 0.0, case.use_clc)
    forward = Problem(
        tuple(q.shape), *longest, len(case.lengths), case.dtype, q.device, options, False,
        tuple(ragged), BLACKWELL, TILES,
    )  # fmt: skip
    return BackwardProblem(forward, tuple(k.shape), False, case.head_parts, keeps_ds=True)


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return (q, k, ragged); what lies beyond the lengths in use is NaN."""
    sides = list(zip(*case.lengths))
    tensors, ragged = [], {}
    for side, heads in zip(sides, case.heads):
        if case.ragged == "packed":
            tensors.append(torch.randn(1, sum(side), heads, 256))
        else:
            tensors.append(torch.randn(len(side), max(side), heads, 256))
            for rows, length in zip(tensors[-1], side):
                rows[length:] = math.nan
    for name, side in zip("qk", sides):
        if case.ragged == "packed":
            ends = torch.tensor((0, *side)).cumsum(0)
            ragged[f"cu_seqlens_{name}"] = ends.to(torch.int32)
        elif case.ragged == "used":
            ragged[f"seqused_{name}"] = torch.tensor(side, dtype=torch.int32)
    return tensors[0].to(case.dtype), tensors[1].to(case.dtype), ragged


def rows_of(case: Case, tensor: torch.Tensor, side: int, number: int) -> torch.Tensor:
    """Return (heads, rows, columns) of a sequence."""
    length = case.lengths[number][side]
    if case.ragged == "packed":
        begin = sum(pair[side] for pair in case.lengths[:number])
        return tensor[0, begin : begin + length].transpose(0, 1)
    return tensor[number, :length].transpose(0, 1)


def run(case: Case):
    """Return (found, expected): dK and dQ of every sequence in float32, dK summed over its
    parts."""
    q, k, ragged = operands(case)
    problem = describe(case, q, k, ragged)
    seen = [visible(*lengths, case.window) for lengths in case.lengths]
    ds = [torch.randn(case.heads[0], *mask.shape) * mask for mask in seen]
    stored = to_tiles(ds, seen, problem)
    partial = torch.float32 if case.head_parts > 1 else case.dtype
    shape = (*k.shape[:2], case.heads[1] * case.head_parts, 256)
    dk, dq = torch.full(shape, math.nan, dtype=partial), torch.full_like(q, math.nan)
    stats = empty_stats(problem)
    tensors = GradientTensors((q, k, k, q), stats, (dk, dq), tuple(ragged.values()), stored)
    kind = "backward_products"
    spec = KernelSpec(kind, BackwardConfig().of_kernel(kind), problem.dkdv_class)
    launch(
        compile_kernel(spec), q.device,
        lambda gpu, stream: gradient_call_arguments(tensors, problem, gpu, stream),
    )  # fmt: skip
    group = case.heads[0] // case.heads[1]
    found, expected = [], []
    for number, of_sequence in enumerate(ds):
        rounded = of_sequence.to(case.dtype).double() * case.scale
        queries = rows_of(case, q, 0, number).double()
        keys = rows_of(case, k, 1, number).double().repeat_interleave(group, 0)
        of_head = rounded.transpose(1, 2) @ queries
        expected.append((of_head.unflatten(0, (-1, group)).sum(1), rounded @ keys))
        parts = rows_of(case, dk, 1, number).double()
        found.append(
            (parts.unflatten(0, (-1, case.head_parts)).sum(1),
             rows_of(case, dq, 0, number).double())
        )  # fmt: skip
    return found, expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sampled("causal, GQA", "causal, some queries see nothing", "a short last part")
def test_products(case):
    """Within the rounding of the results; NaN where no tile may be read."""
    torch.manual_seed(0)
    found, expected = run(case)
    bits = 8 if case.dtype is BF16 else 11
    for pair, exact in zip(found, expected, strict=True):
        for result, wanted in zip(pair, exact, strict=True):
            # Half a unit of the last place, and what float32 sums of so many products lose.
            tolerance = 2.0**-bits * wanted.abs() + 1e-4
            assert (result - wanted).abs().le(tolerance).all()


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", ["causal, GQA", "packed", "dynamic"])
@pytest.mark.sampled("causal, GQA-None", "causal, GQA-1", "causal, GQA-2")
def test_no_findings(name, seed, sanitize):
    """No race, lifetime error or missing fence that the sanitizer sees; one cluster after the
    other runs several tiles."""
    sanitize(seed, device="b200:4")
    run(CASES[name])
    report = sm100_sim.last_reports()[-1]
    assert report.seed == seed and report.findings == []


def steps(case: Case) -> int:
    """Products of 256 rows x 128 of the sum of both results, from the definition of the mask."""
    found = 0
    for lengths in case.lengths:
        seen = visible(*lengths, case.window)
        for rows, columns in ((256, 128), (128, 256)):
            found += sum(
                bool(seen[i : i + rows, j : j + columns].any())
                for i in range(0, lengths[0], rows) for j in range(0, lengths[1], columns)
            )  # fmt: skip
    return found * case.heads[0]


@pytest.mark.parametrize(
    "name", ["several blocks, rests", "causal, GQA", "window", "packed, parts, fp16"]
)
@pytest.mark.sampled("causal, GQA")
def test_what_is_executed_is_the_closed_form(name):
    """Every step with a visible pair once, no other one; of each a tile of dS and one of Q or K in
    each CTA."""
    case = CASES[name]
    run(case)
    report = sm100_sim.last_reports()[-1]
    assert report.warps("tcgen05.mma") == steps(case) * 8
    assert report.tma == {"load_bytes": steps(case) * 2 * 2 * 128 * 128 * 2, "store_bytes": 0}


@pytest.mark.parametrize("blocks", [1, 4, 16, 33, 34, 64])
@pytest.mark.parametrize("heads", [1, 8])
def test_tiles_that_share_ds_are_at_work_at_once(blocks, heads):
    """One more part would begin when others of it are done."""
    order = GemmOrder.of(256 * blocks, 256 * blocks, heads, MaskKind(False, False))
    take_turns = {number for number in range(order.num_tiles) if order.tile(number)[2] == 0}
    parts = order.parts_at_once(66)
    assert parts == 1 or parts * len(take_turns) <= 66
    assert (parts + 1) * len(take_turns) > 66 or heads == 1
    assert order.parts_at_last(66) * len(take_turns) >= 66
