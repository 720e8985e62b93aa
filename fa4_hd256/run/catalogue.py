"""Every kernel of a call: which of them it takes, in which configuration; `building` builds them.

What an architecture has of its own is said by its folder (`kernels.kernel_set`); kernels without
tensor cores serve all of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..architectures import ARCHITECTURES, Architecture
from ..call.backward_problem import BackwardProblem
from ..call.forward_problem import Problem
from ..gpus.devices import Gpu
from ..kernels.forward.tiles import ForwardTiles
from ..kernels.kernel_set import KernelSet, kernels_of, kinds
from ..kernels.limits import WARP_SIZE
from ..kernels.problem_class import scalar_names
from ..kernels.small.append_rows import AppendClass, AppendConfig
from ..kernels.small.backward_preprocess import PreprocessConfig
from ..kernels.small.backward_sum import SumConfig
from ..kernels.small.combine_config import MOST_PARTS, CombineClass
from ..kernels.small.tail_rows import TailClass, TailConfig

#: Kinds of kernels, of any architecture.
KINDS = frozenset(
    (
        "append_rows",
        "backward_preprocess",
        "backward_sum",
        "forward_combine",
        "forward_combine_ragged",
        "tail_rows",
        *kinds(),
    )
)


@dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel: everything that its code depends on, beside sources and compiler.

    kind: one of `KINDS`.  config: the kernel's configuration.  problem_class: what of a call is
    compiled in, of `kernels.problem_class` or the kernel's module, or for `backward_sum` the
    dtype of the results.  The repr of both names all their fields, since it is
    part of the cache's key.  architecture: whose kernel it is, and for which target.
    """

    kind: str
    config: Any
    problem_class: Any
    architecture: Architecture = ARCHITECTURES[0]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; accepted: {', '.join(sorted(KINDS))}")

    @property
    def kernels(self) -> KernelSet:
        return kernels_of(self.architecture)

    @property
    def scalars(self) -> tuple[str, ...]:
        return scalar_names(self.problem_class, self.kernels.counts_tiles)


class TuningKey(NamedTuple):
    """All that the forward's default configuration depends on but the number of keys. causal: the
    mask bounds the keys on the right. gpu: rows of the tuning table (`Gpu.tuning_name`)."""

    architecture: Architecture
    tiles: ForwardTiles
    causal: bool
    paged: bool
    gpu: str

    def config(self, keys: int) -> Any:
        tuned = kernels_of(self.architecture).tuned
        return tuned(self.tiles, self.causal, keys, self.gpu, self.paged)


def tuning_key(problem: Problem, gpu: str) -> TuningKey:
    causal, paged = problem.options.window[1] is not None, problem.page_size is not None
    return TuningKey(problem.architecture, problem.tiles, causal, paged, gpu)


def forward_spec(problem: Problem, gpu: Gpu, config: Any = None) -> KernelSpec:
    """The forward's kernel; config: None for the default one of the call on this GPU."""
    if config is None:
        config = tuning_key(problem, gpu.tuning_name).config(problem.max_seqlen_k)
    return configured(problem, config)


def configured(problem: Problem, config: Any) -> KernelSpec:
    own = problem.problem_class
    if own.gathers:
        config = _gathering(problem.architecture, config)
    return KernelSpec(problem.tiles.kind, config, own, problem.kernels.architecture)


@functools.cache
def _gathering(architecture: Architecture, config: Any) -> Any:
    """Return a forward's configuration for pages of any size, whose plans are checked once."""
    gathering = kernels_of(architecture).gathering
    return config if gathering is None else gathering(config)


def combine_spec(problem: Problem) -> KernelSpec:
    kernels = problem.kernels
    if problem.lists_splits:
        config = replace(kernels.combine.config, lane_parts=MOST_PARTS // WARP_SIZE)
        own = CombineClass(problem.dtype, "cu_seqlens_q" in problem.ragged, problem.out_gate)
        return KernelSpec("forward_combine_ragged", config, own, kernels.architecture)
    config = kernels.combine.of(problem.num_splits, math.prod(problem.lse_shape))
    own = CombineClass(problem.dtype, out_gate=problem.out_gate)
    return KernelSpec("forward_combine", config, own, kernels.architecture)


def backward_specs(problem: BackwardProblem, config: Any) -> dict[str, KernelSpec]:
    """The kernels of a divided backward by name, in the order in which they run: "preprocess", then
    those of the architecture for a dS that is stored, or for one that is not, then "sum" where
    parts of dK and dV are added up."""
    kernels = problem.kernels.stored if problem.keeps_ds else problem.kernels.recomputed
    architecture = problem.forward.kernels.architecture
    found = {"preprocess": preprocess_spec(problem)}
    for kernel in kernels:
        own = problem.of_kernel(kernel)
        compiled_in = own.dq_class if kernel.results == ("dq",) else own.dkdv_class
        found[kernel.name] = KernelSpec(
            kernel.kind, config.of_kernel(kernel.kind), compiled_in, architecture
        )
    if problem.sums:
        found["sum"] = sum_spec(problem)
    return found


def preprocess_spec(problem: BackwardProblem) -> KernelSpec:
    architecture = problem.forward.kernels.architecture
    return KernelSpec(
        "backward_preprocess", PreprocessConfig(), problem.preprocess_class, architecture
    )


def sum_spec(problem: BackwardProblem) -> KernelSpec:
    forward = problem.forward
    return KernelSpec("backward_sum", SumConfig(), forward.dtype, forward.kernels.architecture)


def append_spec(own: AppendClass, architecture: Architecture) -> KernelSpec:
    return KernelSpec("append_rows", AppendConfig(), own, architecture)


def tail_spec(own: TailClass, problem: Problem) -> KernelSpec:
    return KernelSpec("tail_rows", TailConfig(), own, problem.kernels.architecture)
