"""Forwards under a block mask on the timing model, and what making the mask takes.

Costs of a tile are fitted to replays of the block-mask kernel: tiles of queries that see all of
their listed keys, and those whose tiles all have bits. A case's tiles are the lists that its own
mask makes (`call.tile_mask`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.measure.masks import MaskedCase
from bench.suite import Case
from bench.tables.comparison import OURS
from fa4_hd256 import masks
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.functions.tensors import functions_of_keys
from fa4_hd256.call.options import Options
from fa4_hd256.call.tile_mask import TileMask
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.mask.block_mask import FULL, MASK_BITS, MASK_STEPS, MASK_TILE
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.schedulers.choice import prefers_clc
from lab.model.calls import Kind, filling
from lab.model.forward import Kernel
from lab.model.machines import compiling_ours, gpu_of
from lab.model.ours import Variant, forward_call
from lab.model.replays import SEED, Traced, digest, fitted, kept
from lab.model.tiles import KEYS, ROWS, STEP_WORK, ForwardTiling, Order
from lab.paths import Paths
from lab.whole.conditions import Call
from lab.whole.problem import Tile
from sm100_sim import timing
from sm100_sim.timing import Machine, Values

#: Halves of a tile of queries, each of as many as a tile of bits has.
HALVES = ROWS // MASK_TILE
#: Bytes of the bits of a row in a step.
ROW_BYTES = KEYS // 8
#: Microseconds of the host for each operation of PyTorch that makes a tensor: of an H200's five
#: rows in docs/tables/masks_h200.md, forward, the mean of what making a mask takes over their
#: number. They are 19.7 to 22.7; the GPU's own part is below it there.
OPERATION_US = 21.5


@dataclass(frozen=True)
class MaskSample:
    """A small call of one head. partial: bits say of every tile what is seen, else all is."""

    queries: int
    keys: int
    partial: bool = False

    @property
    def tiles(self) -> int:
        return self.queries // ROWS

    @property
    def masked(self) -> float:
        """Clocks of the tensor core in steps with bits."""
        return self.partial * self.tiles * STEP_WORK * (self.keys // KEYS)

    def mask(self) -> TileMask:
        """Every second key, or all."""
        rows, columns = torch.arange(self.queries)[:, None], torch.arange(self.keys)
        return masks.from_dense((rows + columns) % 2 < 2 - self.partial)


SAMPLES = (
    MaskSample(512, 1024), MaskSample(512, 1024, True), MaskSample(1024, 1024, True),
    MaskSample(1024, 2048), MaskSample(512, 4096),
)  # fmt: skip


def forward(machine: Machine, draws: int, use_clc: bool) -> Kernel:
    """The block-mask forward with costs fitted to its replays."""

    def trace() -> list[Traced]:
        found = []
        for sample in SAMPLES:
            compiled, arguments = call_on(machine, sample, use_clc)
            prediction = timing.predict(compiled, *arguments, draws=0)[-1]
            found.append(Traced.of(prediction, sample.tiles, sample.masked))
        return found

    compiled, _ = call_on(machine, SAMPLES[0], use_clc)
    found = kept((digest(compiled.cubin), "block mask", SAMPLES), trace, machine, draws)
    like = _like(use_clc)
    tiling = ForwardTiling(
        like.policy, prefetches=True, gpu=gpu_of(machine), order=Order(equal_too=True),
        claims=like.claims,
    )  # fmt: skip
    costs = fitted(found, like.policy)
    return Kernel(OURS, tiling, machine.sampled(draws), costs, Paths.of(found))


def _like(use_clc: bool) -> Variant:
    """The forward without a mask, which shares tiles out in the same way."""
    return Variant(Kind(causal=False), use_clc)


def uses_clc(case: MaskedCase) -> bool:
    """Return True if a call of it without `use_clc` takes the dynamic scheduler."""
    return prefers_clc(True, *filling(case))


def calls(case: MaskedCase, kernel: Kernel) -> list[Call]:
    """A call for each of the drawn machines, the central one first."""
    return [Call([(1, found)]) for found in kernel.placed(tiles(case, kernel.tiling))]


def tiles(case: MaskedCase, tiling: ForwardTiling) -> list[Tile]:
    """The tiles of a case in order, by the lists of its mask."""
    listed, partial, _ = _lists(case)
    plain = Case(case.group, case.lengths, case.heads, case.heads_kv, False)
    ratio, found = case.heads // case.heads_kv, []
    for block, head, batch in tiling.places(plain):
        place = min(batch, len(listed) - 1), 0, block
        work, bits = STEP_WORK * listed[place], STEP_WORK * partial[place]
        elements = min(ROWS, case.seqlen_q - block * ROWS) * HEAD_DIM
        reads, group = 2.0 * elements, batch * case.heads_kv + head // ratio
        shared = 4.0 * HEAD_DIM * KEYS * listed[place]
        found.append(
            Tile(
                float(work), group, float(shared), reads=reads, writes=2.0 * elements,
                own_bytes=4.0 * elements + ROW_BYTES * ROWS * float(partial[place]),
                masked=float(bits),
            )
        )  # fmt: skip
    return found


def shares(case: MaskedCase) -> tuple[float, float]:
    """Return (share of listed steps in all steps, share of those with bits in these), of a head's
    queries."""
    listed, partial, most = _lists(case)
    return float(listed.mean() / most), float(partial.sum() / listed.sum())


@functools.cache
def _lists(case: MaskedCase) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (steps, those of them in which a half has bits, each (batch, heads, tiles of queries);
    steps of a tile at most), by the lists of the case's mask."""
    steps = case.tile_mask(torch.device("cpu")).steps(HALVES)
    count = steps[..., 0, 0]
    is_listed = torch.arange(steps.shape[3] - 1) < count[..., None]
    has_bits = (steps[..., 1:, 1 : 1 + HALVES] != FULL).any(-1) & is_listed
    return count.numpy(), has_bits.sum(-1).numpy(), steps.shape[3] - 1


def call_on(
    machine: Machine, sample: MaskSample, use_clc: bool, mask_mod: MaskMod | None = None
) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA pair), as compiled for such machines.
    mask_mod: what says instead of bits what is seen of tiles that have some."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (
        torch.randn(1, rows, 1, HEAD_DIM, generator=generator).bfloat16()
        for rows in (sample.queries, sample.keys, sample.keys)
    )
    mask, options = sample.mask(), Options.check(None, False, (None, None), 0.0, use_clc)
    assert mask.bits is not None
    ragged = {MASK_STEPS: mask.steps(HALVES), MASK_BITS: mask.bits}
    if mask_mod is not None:
        read, key = MaskMod.read_by(mask_mod)
        _, function = functions_of_keys((None, key), read, q)
        options = replace(options, mask_mod=function)
        ragged = {MASK_STEPS: mask.lists.steps(HALVES), **read}
    with compiling_ours(machine):
        problem = Problem.describe((q, k, v), options, None, ragged, config=ForwardConfig())
        given = tuple(ragged[name] for name in problem.tables)
        return forward_call(_like(use_clc), problem, (q, k, v), given)


@dataclass(frozen=True)
class Making:
    """Cost of making a mask on a GPU: operations of PyTorch that make a tensor, and bytes that they
    read and write."""

    operations: int
    nbytes: int

    def seconds(self, values: Values) -> float:
        """The host's time for the operations, or HBM's for the bytes, whichever is longer."""
        return max(self.operations * OPERATION_US * 1e-6, self.nbytes / values.hbm_terabytes / 1e12)


@functools.cache
def making(case: MaskedCase, gradients: bool = False) -> Making:
    """Count the making of a case's mask from its name to bits and lists, with those of the backward
    if requested.

    Counted where tensors have no contents, which takes the way of a GPU: bits of all tiles.
    """
    with _Counter() as counter:
        mask = case.tile_mask(torch.device("meta"))
        mask.steps(HALVES)
        if gradients:
            assert mask.blocks is not None and mask.key_bits is not None
    return Making(counter.operations, counter.nbytes)


class _Counter(TorchDispatchMode):
    """Counts operations that make or write a tensor, not views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if made and not is_view:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.operations += 1
            self.nbytes += sum(tensor.nbytes for tensor in (*given, *made))
        return found
