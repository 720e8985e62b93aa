"""flash-attn-4's own calls in the simulator, and the programs that its kernels execute.

This runs in the process of an earlier release, too (`lab.model.peers.releases`): nothing is
imported here that needs the installed CuTe DSL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.peers import flash_attn_4
from lab.model.peers import flash_attn_4_code
from lab.model.replays import of_kernels, one_cluster, seeded
from sm100_sim import timing
from sm100_sim.timing import StoredProgram


@dataclass(frozen=True)
class Problem:
    """One call with one sequence. heads: of queries and of keys. packed: said to be one of several.
    options: of the call, (name, value)."""

    queries: int
    keys: int
    heads: tuple[int, int]
    head_dim: int
    options: tuple[tuple[str, Any], ...]
    packed: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """q, k and v, standard normal, without a batch where they are packed."""
        shapes = (self.queries, self.heads[0]), *((self.keys, self.heads[1]),) * 2
        found = [
            torch.randn(1, *shape, self.head_dim, dtype=torch.bfloat16, device="cuda")
            for shape in shapes
        ]
        return [tensor[0] for tensor in found] if self.packed else found

    def call(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """out of q, k and v."""
        packed, (q, k, v) = None, tensors
        if self.packed:
            of_q, of_k = (
                (torch.tensor([0, len(t)], dtype=torch.int32, device="cuda"), len(t))
                for t in (q, k)
            )
            packed = of_q, of_k
        return flash_attn_4.attention(q, k, v, packed, **dict(self.options))


def forward(problems: Sequence[Problem], alone: bool) -> list[StoredProgram]:
    """The longest cluster of the forward of each problem, through the public functions. alone: a
    persistent kernel has one cluster."""
    only = one_cluster() if alone else contextlib.nullcontext()
    with timing.attached(draws=0) as session, only, seeded():
        for problem in problems:
            problem.call(problem.tensors())
    # Each call with KV splits launches the kernel that combines the splits, too.
    return [
        StoredProgram.of(found.compiled)
        for found in session.predictions
        if "combine" not in found.report.kernel.lower()
    ]


def backward(problems: Sequence[Problem], names: Sequence[str]) -> list[list[StoredProgram]]:
    """The longest cluster of each kernel of the backward, by problem. names: parts of those of the
    kernels, in lower case."""
    return [_backward(problem, names) for problem in problems]


def _backward(problem: Problem, names: Sequence[str]) -> list[StoredProgram]:
    with timing.attached(draws=0) as session, one_cluster(), seeded():
        leaves = problem.tensors()
        for leaf in leaves:
            leaf.requires_grad_()
        out = problem.call(leaves)
        out.backward(torch.randn_like(out))
    found = of_kernels(session.predictions, *names)
    return [StoredProgram.of(one.compiled) for one in found]


def empty_backward(rows: int, causal: bool, names: Sequence[str]) -> list[StoredProgram]:
    """The kernels of the backward, a cluster whose sequence is empty, said to have at most
    `rows`."""
    with timing.attached(draws=0) as session, one_cluster():
        flash_attn_4_code.backward_of_an_empty_sequence(rows, causal)
    return [StoredProgram.of(one.compiled) for one in of_kernels(session.predictions, *names)]
